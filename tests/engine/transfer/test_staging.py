"""Staging rings: which buffer is filled next, what waits for what, and bytes in all directions."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bitslab.engine.files.positioned import read_at, write_at
from bitslab.engine.memory import HostBuffer
from bitslab.engine.transfer import StagingBuffer, StagingRing, StreamLane, ThreadLane
from bitslab.engine.transfer.staging import copy_pieces
from bitslab.errors import BitslabError
from tests.streams import recorded

CPU = torch.device("cpu")
N = 5000


def ring_of(count: int, nbytes: int = N) -> Any:
    return StagingRing(
        [StagingBuffer(torch.zeros(nbytes, dtype=torch.uint8)) for _ in range(count)]
    )


@pytest.fixture
def files(request):
    lane = ThreadLane(request.node.name)
    yield lane
    lane.close()


# Which buffer


def test_the_buffer_filled_longest_ago_is_filled_next():
    ring = ring_of(3)
    for n in range(3):
        ring.take((), must=False).key = n
    assert [ring.find(n) for n in range(3)] == ring.buffers
    assert ring.take([0, 1, 2], must=False) is None
    assert ring.take([0, 2], must=False) is ring.buffers[1]  # 1 alone is not expected
    assert ring.find(1) is None
    ring.buffers[2].key = None
    assert ring.take([0], must=False) is ring.buffers[2], "of two empty ones, that of the last turn"
    assert ring.take([0], must=False) is ring.buffers[1]


def test_what_must_come_takes_an_expected_one():
    ring = ring_of(2)
    for n in range(2):
        ring.take((), must=False).key = n
    assert ring.take([0, 1], must=True) is ring.buffers[0]


@given(
    takes=st.lists(st.tuples(st.integers(0, 5), st.sets(st.integers(0, 5)), st.booleans())),
    count=st.integers(1, 4),
)
def test_expected_contents_are_kept(takes, count):
    ring = ring_of(count, 1)
    for key, window, must in takes:
        if ring.find(key) is not None:
            continue
        held = {buffer.key for buffer in ring.buffers} - {None}
        buffer = ring.take(window, must=must)
        assert (buffer is None) == (not must and len(held) == count and held <= window)
        if buffer is not None:
            lost = held - {b.key for b in ring.buffers}
            assert must or not lost & window
            assert buffer.turn == max(b.turn for b in ring.buffers)
            buffer.key = key


@pytest.mark.parametrize("side", ["fills", "drains"])
def test_a_buffer_that_a_thread_works_on_is_not_taken(files, side):
    ring, held = ring_of(2), threading.Event()
    buffer = ring.buffers[0]
    (buffer.fill if side == "fills" else buffer.drain)(files, held.wait, 20)
    assert buffer.in_thread
    other = ring.take((), must=False)
    assert other is ring.buffers[1]
    other.key = 1
    assert ring.take([1], must=False) is None
    held.set()
    (buffer.ready if side == "fills" else buffer.released).wait()
    assert ring.take([1], must=False) is buffer


# What waits


def test_copies_to_a_gpu_wait_for_who_uses_the_buffer(monkeypatch):
    with recorded(monkeypatch) as record:
        ring, copies = ring_of(2), StreamLane(CPU)
        made = record.made
        for n in range(5):
            buffer = ring.take((), must=True)
            source = torch.full((N,), n, dtype=torch.uint8)
            buffer.fill(copies, copy_pieces, [(buffer.data, source)])
            record.current.wait_event(buffer.ready)
            record.work("uses")
            buffer.release(record.current)
        assert record.made == made + 4, "events are used again"
        expected = []
        for n in range(5):
            if n > 1:
                expected += [("stream0", f"after current:{n - 1}")]
            expected += [("stream0", f"copies {N}"), ("current", f"after stream0:{n + 1}")]
            expected += [("current", "uses")]
        assert record.take() == expected


def test_bytes_of_a_gpu_go_to_a_file_and_back(monkeypatch, files, tmp_path):
    """Device to host to file, and file to host to device, by the same buffers."""
    chunks = [torch.randint(0, 256, (N,), dtype=torch.uint8) for _ in range(7)]
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    with recorded(monkeypatch) as record:
        ring, out = ring_of(2), StreamLane(CPU)
        writes = []
        for n, chunk in enumerate(chunks):
            buffer = ring.take((), must=True)
            buffer.fill(out, copy_pieces, [(buffer.data, chunk)])  # the host waits for the write
            buffer.drain(files, write_at, fd, n * N, buffer.data)
            buffer.key = n
            writes.append(buffer.released)
        for write in writes:
            write.result()
        waits = [step for step in record.take() if step[0] == "host"]
        assert waits == [("host", f"after stream0:{n + 1}") for n in range(7)]
        assert (tmp_path / "file").read_bytes() == b"".join(c.numpy().tobytes() for c in chunks)

        back, there = StreamLane(CPU), ring_of(2)
        for n, chunk in enumerate(chunks):
            read, target = ring.take((), must=True), there.take((), must=True)
            read.fill(files, read_at, fd, n * N, read.data)
            read.ready.result()
            target.fill(back, copy_pieces, [(target.data, read.data)])
            read.release(back.stream)
            assert torch.equal(target.data, chunk)
            target.release(record.current)
    os.close(fd)


def test_an_error_of_a_thread_is_that_of_what_needs_its_bytes(files, tmp_path):
    (tmp_path / "file").write_bytes(bytes(N - 1))
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    [buffer] = ring_of(1).buffers
    buffer.fill(files, read_at, fd, 0, buffer.data)
    buffer.drain(files, list)
    for task in (buffer.ready, buffer.released):
        with pytest.raises(BitslabError, match=f"ends at byte {N - 1}, expected {N}"):
            task.result()
    buffer.drain(files, write_at, fd, 0, buffer.data)
    buffer.fill(files, read_at, fd, 0, buffer.data[:-1])
    buffer.ready.result()  # the buffer can be used again
    buffer.drain(files, write_at, fd, 0, buffer.data)
    with pytest.raises(OSError, match="Bad file descriptor"):
        buffer.released.result()
    os.close(fd)


def test_an_error_of_a_copy_leaves_the_last_marks(monkeypatch):
    with recorded(monkeypatch):
        lane, [buffer] = StreamLane(CPU), ring_of(1).buffers
        buffer.fill(lane, copy_pieces, [])
        ready = buffer.ready
        with pytest.raises(ZeroDivisionError):
            buffer.fill(lane, lambda: 1 / 0)
        assert buffer.ready is ready


@pytest.mark.gpu
def test_a_gpus_bytes_reach_a_file_and_come_back(tmp_path):
    n_bytes, device = 1 << 20, torch.device("cuda", 0)
    memory = [HostBuffer.allocate(n_bytes) for _ in range(2)]
    assert all(buffer.pinned for buffer in memory)
    ring: Any = StagingRing([StagingBuffer(buffer.tensor) for buffer in memory])
    out, files = StreamLane(device), ThreadLane("files")
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    chunks = [torch.randint(0, 256, (n_bytes,), dtype=torch.uint8, device=device) for _ in range(9)]
    out.follow(torch.cuda.current_stream(device))
    for n, chunk in enumerate(chunks):
        buffer = ring.take((), must=True)
        buffer.fill(out, copy_pieces, [(buffer.data, chunk)])
        buffer.drain(files, write_at, fd, n * n_bytes, buffer.data)
        buffer.key = n
    for buffer in ring.buffers:
        buffer.released.result()

    there: Any = StagingRing(
        [StagingBuffer(torch.empty(n_bytes, dtype=torch.uint8, device=device)) for _ in range(3)]
    )
    out.follow(torch.cuda.current_stream(device))
    current = torch.cuda.current_stream(device)
    found = []
    for n in range(9):
        read, target = ring.take((), must=True), there.take((), must=True)
        read.fill(files, read_at, fd, n * n_bytes, read.data)
        read.ready.result()
        target.fill(out, copy_pieces, [(target.data, read.data)])
        read.release(out.stream)
        current.wait_event(target.ready)
        found.append(target.data.clone())
        target.release(current)
    assert all(map(torch.equal, found, chunks))
    files.close()
    os.close(fd)
