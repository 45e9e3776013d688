"""Memory that another stream uses than the one on which it was allocated is kept for both."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from bitslab.distributed import function, passes
from bitslab.distributed import streams as of_memory
from bitslab.distributed.function import TablesInFlight
from bitslab.distributed.passes import Pass
from bitslab.distributed.work import OVER
from bitslab.engine.on_host import on_host
from tests.distributed.ranks import run_ranks


class Stream:
    """Knows what it waits for."""

    device = torch.device("cuda", 0)

    def __init__(self) -> None:
        self.behind: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.behind.append(other)


class OnGpu:
    """What is asked of a tensor on a GPU."""

    is_cuda, device = True, Stream.device

    def __init__(self) -> None:
        self.kept_for: list[Stream] = []

    def record_stream(self, stream: Stream) -> None:
        self.kept_for.append(stream)


class Streams:
    """Torch's current stream, which a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = Stream()
        for module in (of_memory, function, passes):
            monkeypatch.setattr(module, "current_stream", lambda device: self.current)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    return Streams(monkeypatch)


@pytest.mark.parametrize("same", [True, False], ids=["same-stream", "another"])
def test_a_pass_keeps_what_it_uses_for_the_stream_that_waits(streams: Streams, same: bool) -> None:
    memory, read = OnGpu(), OnGpu()
    used = cast(Any, [memory, read])
    begun = Pass(OVER, lambda: used, used)
    streams.current = streams.current if same else Stream()
    assert begun.finish() is used
    assert memory.kept_for == read.kept_for == ([] if same else [streams.current])


def test_a_stream_that_waits_again_is_behind_the_one_that_waited_first(streams: Streams) -> None:
    first, rows = streams.current, OnGpu()
    found = object.__new__(TablesInFlight)
    found._in_flight, found._waited_on = None, cast(Any, first)
    found._found = {"rows": cast(Any, rows)}
    assert found.wait() == {"rows": rows}
    assert not rows.kept_for and not first.behind
    streams.current = Stream()
    assert found.wait() == {"rows": rows}
    assert rows.kept_for == [streams.current] and streams.current.behind == [first]


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_a_pass_reads_behind_an_exchange_is_kept_for_who_waits(
    ranks: int, tmp_path: Path
) -> None:
    for seen in run_ranks("kept_where_it_is_waited_for", ranks, tmp_path):
        assert seen and all(seen.values()), seen


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_a_plain_exchange_sends_is_kept_for_who_waits(ranks: int, tmp_path: Path) -> None:
    check = "what_is_sent_is_kept_where_it_is_waited_for"
    for seen in run_ranks(check, ranks, tmp_path):
        assert seen and all(seen.values()), seen


def test_what_the_helper_encodes_from_and_writes_is_kept_for_its_stream(tmp_path: Path) -> None:
    for seen in run_ranks("kept_on_the_lane", 2, tmp_path):
        assert len(seen) == 4 and all(seen.values()), seen


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2])
def test_rows_on_gpus_are_begun_on_one_stream_and_waited_for_on_another(
    ranks: int, tmp_path: Path
) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    for seen in run_ranks("nccl_streams", ranks, tmp_path, timeout_s=120):
        assert seen and all(seen.values()), seen


@pytest.mark.gpu
def test_other_threads_queue_work_while_one_reads_behind_a_stream(
    held_stream: Callable[..., AbstractContextManager[None]],
) -> None:
    """As a helper reads sizes that other ranks have not sent yet."""
    stream, numbers = torch.cuda.Stream(), torch.arange(6, device="cuda")
    there = torch.zeros(6, dtype=torch.int64).pin_memory()

    def read() -> list[int]:
        with torch.cuda.stream(stream):
            return on_host(numbers, there).tolist()

    with ThreadPoolExecutor(1) as helper:
        with held_stream(stream):
            reading = helper.submit(read)
            for _ in range(20):  # the helper waits behind one of them
                time.sleep(0.01)
                numbers.add(1)
            torch.cuda.current_stream().synchronize()
            assert not reading.done()
        assert reading.result() == [0, 1, 2, 3, 4, 5]
