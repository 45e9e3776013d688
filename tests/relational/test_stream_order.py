"""Streams wait for those on which a graph's tables were made."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from bitslab.relational import RelationalGraph, stream_order
from bitslab.relational.stream_order import StreamOrder
from tests.relational.oracle import random_graph
from tests.relational.programs import PROGRAMS, inputs_of

GPU = torch.device("cuda", 0)


class Stream:
    """Knows what it waits for."""

    def __init__(self) -> None:
        self.behind: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.behind.append(other)


class Streams:
    """Torch's current stream, which a test sets, and whether it is captured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current, self.captured = Stream(), False
        monkeypatch.setattr(stream_order, "current_stream", lambda device: self.current)
        monkeypatch.setattr(stream_order, "stream_pointer", lambda device: id(self.current))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.captured)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    return Streams(monkeypatch)


def test_another_stream_waits_once_and_again_for_what_is_made_later(streams: Streams) -> None:
    order, first, second = StreamOrder(GPU), streams.current, Stream()
    order.made()
    order.wait()
    assert not first.behind
    streams.current = second
    order.wait()
    order.wait()
    assert second.behind == [first]
    streams.current = first
    order.made()
    streams.current = second
    order.wait()
    assert second.behind == [first, first]


def test_the_first_stream_waits_for_what_the_second_one_made(streams: Streams) -> None:
    order, first, second = StreamOrder(GPU), streams.current, Stream()
    order.made()
    streams.current = second
    order.wait()
    order.made()
    streams.current = first
    order.wait()
    assert first.behind == [second] and second.behind == [first]


def test_nothing_waits_in_a_capture_nor_counts_as_waited(streams: Streams) -> None:
    order, first, second = StreamOrder(GPU), streams.current, Stream()
    order.made()
    streams.current, streams.captured = second, True
    order.wait()
    assert not second.behind
    streams.captured = False
    order.wait()
    assert second.behind == [first]


def test_nothing_waits_on_a_cpu() -> None:
    order = StreamOrder(torch.device("cpu"))
    order.made()
    order.wait()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["rgcn", "rgat"])
def test_a_second_stream_runs_behind_the_plan_of_the_first(
    name: str, held_stream: Callable[..., AbstractContextManager[None]]
) -> None:
    def made() -> RelationalGraph:
        plain = random_graph(0, 300, 300, 2000, 12)
        edges = plain.edge_index.cuda(), plain.edge_type.cuda()
        graph = RelationalGraph(*edges, (300, 300), 12)
        torch.cuda.synchronize()
        return graph

    plain = random_graph(0, 300, 300, 2000, 12)
    inputs: list[Any] = [x.cuda() for x in inputs_of(name, plain, torch.float32).values()]
    program = PROGRAMS[name].compile()
    expected = program(made(), *inputs)  # what graphs of these sizes share is measured by then
    graph, first, second = made(), torch.cuda.Stream(), torch.cuda.Stream()
    with held_stream(first):
        with torch.cuda.stream(first):
            program(graph, *inputs)
        with torch.cuda.stream(second):
            found = program(graph, *inputs)
        ends = torch.cuda.Event()
        ends.record(second)
        torch.cuda.current_stream().synchronize()
        assert not ends.query()
    for a, b in zip(_outputs(found), _outputs(expected), strict=True):
        assert torch.equal(a, b)


def _outputs(found: Any) -> list[torch.Tensor]:
    return list(found) if isinstance(found, tuple) else [found]
