"""Host memory at one address that grows in the background."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time

import pytest
import torch

from bitslab import BitslabError
from bitslab.engine.memory import growing, host, page_locking
from bitslab.engine.memory.growing import GrowingBuffer
from tests.engine.memory.test_host import resident_bytes
from tests.tables.support import Recorder, open_files

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
PAGE = 4096


@pytest.fixture
def recorder(monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(page_locking, "registrar", recorder)
    monkeypatch.setattr(page_locking, "_warned_of_refusal", False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    yield recorder
    gc.collect()  # what is left is released here, not by CUDA


def wait_for(buffer: GrowingBuffer):
    end = time.monotonic() + 30
    while buffer.growing:
        assert time.monotonic() < end
        time.sleep(1e-3)


@pytest.mark.parametrize("most_bytes", [PAGE * 40 + 8, 64 << 20])
def test_it_takes_memory_as_it_grows_and_never_moves(monkeypatch, most_bytes):
    monkeypatch.setattr(growing, "PIECE_BYTES", 4 << 20)
    buffer = GrowingBuffer(most_bytes, pin=False)
    tensor, address = buffer.tensor, buffer.tensor.data_ptr()
    assert tensor.shape == (most_bytes,) and buffer.nbytes == 0 and not resident_bytes(tensor)
    for nbytes in (100, PAGE + 1, most_bytes // 3, most_bytes):
        before = tensor[: buffer.nbytes].clone()
        buffer.grow(nbytes)
        assert buffer.nbytes == nbytes and buffer.tensor is tensor
        assert torch.equal(tensor[: len(before)], before)
        taken = resident_bytes(tensor)
        assert nbytes <= taken <= nbytes + buffer._unit_bytes
        tensor[len(before) : nbytes] = torch.arange(nbytes - len(before)) % 251
    assert tensor.data_ptr() == address
    buffer.grow(10)
    buffer.grow(most_bytes + 10)
    assert buffer.nbytes == most_bytes


def test_it_grows_in_the_background_by_pieces(monkeypatch, recorder):
    monkeypatch.setattr(growing, "PIECE_BYTES", 4 << 20)
    before = open_files()
    buffer = GrowingBuffer(64 << 20, pin=True)
    address, most = buffer.tensor.data_ptr(), 64 << 20
    buffer.grow_soon(5 << 20, GPU)
    buffer.grow_soon(9 << 20, GPU)
    buffer.grow_soon(8 << 20, GPU)
    wait_for(buffer)
    assert buffer.nbytes == 9 << 20 and buffer.pinned and not buffer.refused
    buffer.grow_soon(most, GPU)
    wait_for(buffer)
    assert buffer.nbytes == most and resident_bytes(buffer.tensor) == most
    pieces = [call[1:] for call in recorder.calls if call[0] == "register"]
    ends = [at + nbytes for at, nbytes in pieces]
    assert [at for at, _ in pieces] == [address, *ends[:-1]] and ends[-1] == address + most
    assert max(nbytes for _, nbytes in pieces) == 4 << 20
    recorder.calls.clear()
    buffer.close()
    assert recorder.calls == [("synchronize",), *(("unregister", at) for at, _ in pieces)]
    gc.collect()
    assert open_files() == before
    with pytest.raises(BitslabError, match="closed"):
        buffer.tensor  # noqa: B018


def test_a_caller_who_cannot_wait_helps(monkeypatch):
    monkeypatch.setattr(growing, "PIECE_BYTES", PAGE)
    buffer = GrowingBuffer(200 * PAGE, pin=False)
    buffer.grow_soon(200 * PAGE, CPU)
    for pages in range(1, 100):
        buffer.grow(pages * PAGE)
        assert buffer.nbytes >= pages * PAGE
    wait_for(buffer)
    assert buffer.nbytes == 200 * PAGE == resident_bytes(buffer.tensor)


def test_memory_that_cannot_be_locked_is_of_no_use_to_a_gpu(recorder):
    buffer = GrowingBuffer(200 * PAGE, pin=True)
    buffer.grow_soon(10 * PAGE, GPU)
    wait_for(buffer)
    recorder.refusal = "out of memory"
    with pytest.warns(UserWarning, match="refused to page-lock"):
        buffer.grow_soon(20 * PAGE, GPU)
        wait_for(buffer)
    assert buffer.refused and buffer.nbytes == 10 * PAGE and buffer.ensure_pinned()
    asked = len(recorder.calls)
    buffer.grow_soon(20 * PAGE, GPU)  # so soon it is not tried again
    assert not buffer.growing and len(recorder.calls) == asked
    buffer.grow(20 * PAGE)  # the host can use it
    assert buffer.nbytes == 20 * PAGE and not buffer.pinned
    asked = len(recorder.calls)
    assert not buffer.ensure_pinned() and len(recorder.calls) == asked


def test_what_was_taken_before_there_was_a_gpu_is_locked_when_one_is_used(recorder):
    recorder.there = False
    buffer = GrowingBuffer(200 * PAGE, pin=True)
    buffer.grow(10 * PAGE)
    assert not buffer.pinned and not buffer.ensure_pinned()
    recorder.there, recorder.captures = True, True
    assert not buffer.ensure_pinned()  # a graph is captured
    other = GrowingBuffer(200 * PAGE, pin=False)
    other.grow(PAGE)
    assert not other.ensure_pinned() and "register" not in recorder.names()


@pytest.mark.parametrize("retries", [False, True])
def test_memory_that_is_not_there_is_asked_for_again_later(monkeypatch, retries):
    buffer = GrowingBuffer(200 * PAGE, pin=False)
    buffer.grow(PAGE)
    monkeypatch.setattr(growing, "RETRY_SECONDS", 0.0 if retries else 1000.0)

    def full(nbytes):
        raise BitslabError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(host, "check_available", full)
        with pytest.raises(BitslabError, match="no room"):
            buffer.grow(2 * PAGE)
        buffer.grow_soon(100 * PAGE, CPU)
        wait_for(buffer)
    assert buffer.nbytes == PAGE and buffer.refused != retries
    buffer.grow_soon(50 * PAGE, CPU)
    wait_for(buffer)
    assert buffer.nbytes == (50 * PAGE if retries else PAGE)


def test_closing_ends_the_growth(monkeypatch):
    monkeypatch.setattr(growing, "PIECE_BYTES", PAGE)
    taken, was = threading.Event(), host.HostBuffer.take_piece

    def take(self, begin, nbytes, *, pin):
        taken.set()
        time.sleep(1e-3)
        return was(self, begin, nbytes, pin=pin)

    monkeypatch.setattr(host.HostBuffer, "take_piece", take)
    buffer = GrowingBuffer(2000 * PAGE, pin=False)
    buffer.grow_soon(2000 * PAGE, CPU)
    assert taken.wait(10)
    buffer.close()
    wait_for(buffer)
    assert buffer.nbytes < 2000 * PAGE


def test_forked_children_see_it():
    buffer = GrowingBuffer(200 * PAGE, pin=False)
    buffer.grow(3 * PAGE)
    buffer.tensor[5] = 7

    child = os.fork()
    if not child:
        status = 1
        with contextlib.suppress(BaseException):
            seen = buffer.tensor[5] == 7 and not buffer.pinned
            buffer.tensor[6] = 8
            buffer.close()
            status = int(not seen)
        os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert buffer.tensor[5:7].tolist() == [7, 8]
