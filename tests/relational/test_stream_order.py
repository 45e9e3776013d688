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
        self.behind: list[Any] = []

    def wait_stream(self, other: Stream) -> None:
        self.behind.append(other)

    def wait_event(self, event: Event) -> None:
        self.behind.append(event.stream)


class Event:
    """Knows the stream on which it was recorded last."""

    stream: Stream

    def record(self, stream: Stream) -> None:
        self.stream = stream


class Streams:
    """Torch's current stream, which a test sets, and whether it is captured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current, self.captured = Stream(), False
        monkeypatch.setattr(stream_order, "current_stream", lambda device: self.current)
        monkeypatch.setattr(stream_order, "stream_pointer", lambda device: id(self.current))
        monkeypatch.setattr(stream_order, "_is_captured", lambda stream: self.captured)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.captured)
        monkeypatch.setattr(torch.cuda, "Event", Event)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    return Streams(monkeypatch)


def test_another_stream_waits_once_and_again_for_what_is_made_later(streams: Streams) -> None:
    order, first, second = StreamOrder(GPU), streams.current, Stream()
    with order:
        pass
    order.wait()
    assert not first.behind
    streams.current = second
    order.wait()
    order.wait()
    assert second.behind == [first]
    streams.current = first
    with order:
        pass
    streams.current = second
    order.wait()
    assert second.behind == [first, first]


def test_what_is_made_on_a_second_stream_is_behind_the_first_and_the_first_behind_it(
    streams: Streams,
) -> None:
    order, first, second = StreamOrder(GPU), streams.current, Stream()
    with order:
        pass
    streams.current = second
    with order:
        assert second.behind == [first]
    streams.current = first
    order.wait()
    assert first.behind == [second] and second.behind == [first]


def test_others_wait_for_the_end_of_all_that_is_made_together(streams: Streams) -> None:
    order, recorded = StreamOrder(GPU), []
    with order:
        with order:
            recorded.append(order._event)
        recorded.append(order._event)
    assert recorded == [None, None] and order._event is not None


def test_nothing_waits_in_a_capture_nor_counts_as_waited(streams: Streams) -> None:
    order, first, second = StreamOrder(GPU), streams.current, Stream()
    with order:
        pass
    streams.current, streams.captured = second, True
    order.wait()
    assert not second.behind
    streams.captured = False
    order.wait()
    assert second.behind == [first]


@pytest.mark.parametrize("captured", [False, True], ids=["", "captured"])
def test_the_memory_of_tables_goes_when_all_streams_have_read_it(
    streams: Streams, captured: bool
) -> None:
    order, first, second = StreamOrder(GPU), streams.current, Stream()
    with order:
        pass
    streams.current = second
    order.wait()
    streams.captured = captured
    del order
    assert first.behind == ([] if captured else [second]) and second.behind == [first]


def test_nothing_waits_on_a_cpu(streams: Streams) -> None:
    order = StreamOrder(torch.device("cpu"))
    with order:
        pass
    streams.current = Stream()
    order.wait()
    assert order._event is None and not streams.current.behind


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_forward_and_backward_passes_wait_and_say_that_they_may_make_tables(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of torch's operators, whose tables are made as they run."""
    said: list[str] = []
    graph = random_graph(0, 30, 30, 90, 3)
    inputs = inputs_of("rgcn", graph, torch.float32)
    program = PROGRAMS["rgcn"].compile(backend=backend)
    given = [x.requires_grad_() for x in inputs.values()]
    program(graph, *given).sum().backward()  # plans, and makes tables
    monkeypatch.setattr(StreamOrder, "wait", lambda _: said.append("waits"))
    monkeypatch.setattr(StreamOrder, "made", lambda _: said.append("made"))
    found = program(graph, *given)
    assert said == ["waits", "made"]
    found.sum().backward()
    assert said == ["waits", "made"] * 2


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
