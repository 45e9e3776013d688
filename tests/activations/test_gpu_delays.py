"""Gradients on a GPU whose streams fall behind each other by drawn times.

Each piece of work of a stream that packs, sends or fetches begins after a drawn pause on that
stream, and so does, now and then, what computes: whatever is not ordered by an event shows.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bitslab.activations.executor import Executor
from bitslab.engine.transfer import StreamLane
from tests.activations.cases import CASES, Offloaded
from tests.activations.test_gradients import check_case
from tests.activations.test_planned_gradients import DrawnPolicy, drawn

__all__ = ["drawn"]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("deterministic"),
    pytest.mark.filterwarnings("ignore:.*is not computed again in the backward pass any more"),
]

#: Clock cycles of a pause: none, shorter than a small copy, longer than all of a step's.
PAUSES_CYCLES = (0, 0, 10_000, 300_000)
WAYS: dict[str, dict[str, Any]] = {
    "raw": {"policy": "raw"},
    "raw-in-flight": {"policy": "raw", "in_flight_bytes": 1 << 20},
    "packed": {"policy": "static"},
    "packed-in-flight": {"policy": "static", "in_flight_bytes": 4096},
}


def pause(stream: torch.cuda.Stream, draw: random.Random) -> None:
    """Let a stream do nothing for a drawn time."""
    cycles = draw.choice(PAUSES_CYCLES)
    if cycles:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(cycles)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> random.Random:
    """Let streams pause before their work, by what is drawn."""
    draw = random.Random(0)

    def behind(real: Callable[..., Any]) -> Callable[..., Any]:
        def work(lane: StreamLane, *arguments: Any, **marks: Any) -> Any:
            pause(lane.stream, draw)
            return real(lane, *arguments, **marks)

        return work

    for name in ("run", "queue", "queue_on", "copy", "submit"):
        monkeypatch.setattr(StreamLane, name, behind(getattr(StreamLane, name)))

    def computes(real: Callable[..., Any]) -> Callable[..., Any]:
        def work(executor: Executor, *arguments: Any, **options: Any) -> Any:
            if executor.on_gpu:
                pause(torch.cuda.current_stream(executor.device), draw)
            return real(executor, *arguments, **options)

        return work

    for name in ("store", "bytes_of"):
        monkeypatch.setattr(Executor, name, computes(getattr(Executor, name)))
    return draw


@pytest.mark.usefixtures("fits_at_once")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_gradients_when_streams_are_late(name: str, way: str, late: random.Random) -> None:
    late.seed(f"{name} {way}")
    check_case(name, Offloaded("cuda", **WAYS[way]))


@pytest.mark.usefixtures("fits_at_once")
@pytest.mark.parametrize("name", CASES)
def test_gradients_by_way_of_the_disk_when_streams_are_late(
    name: str, late: random.Random, quick_disk: None, tmp_path: Path
) -> None:
    late.seed(name)
    check_case(name, Offloaded("cuda", policy="raw", disk=tmp_path, in_flight_bytes=0))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", CASES)
def test_gradients_under_random_plans_when_streams_are_late(
    name: str, seed: int, drawn: type[DrawnPolicy], late: random.Random, tmp_path: Path
) -> None:
    drawn.seed, drawn.keeps = seed, late.random() < 0.5
    late.seed(f"{name} {seed}")
    check_case(name, Offloaded("cuda", slowdown=0.5, disk=tmp_path), None)
