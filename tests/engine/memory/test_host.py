"""Host memory for GPUs: its size, page-locking, release, and ways to other processes."""

from __future__ import annotations

import copy
import errno
import gc
import multiprocessing
import os
import pickle
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bitslab import ArgumentError, ArgumentTypeError, BitslabError
from bitslab.engine.memory import host, page_locking, page_taking
from bitslab.engine.memory.host import HostBuffer
from tests import spawned
from tests.engine.memory.filled import allocate_filled
from tests.forked import run_forked
from tests.tables.support import Recorder, inode_at, open_files


@pytest.fixture
def recorder(monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(page_locking, "registrar", recorder)
    monkeypatch.setattr(page_locking, "_warned_of_refusal", False)
    yield recorder
    gc.collect()  # what is left is released here, not by CUDA


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, 3 << 20])
def test_a_buffer_is_zeros_of_its_exact_size(nbytes):
    buffer = HostBuffer.allocate(nbytes, pin=False)
    assert buffer.tensor.dtype == torch.uint8 and buffer.tensor.shape == (nbytes,)
    assert buffer.nbytes == nbytes == buffer.tensor.untyped_storage().nbytes()
    assert not buffer.tensor.any() and buffer.tensor.data_ptr() % 4096 == 0
    assert buffer.owner and not buffer.shared and not buffer.closed
    assert buffer.tensor is buffer.tensor


@pytest.mark.parametrize(
    ("nbytes", "pin", "error", "says"),
    [
        (-1, False, ArgumentError, "nbytes: expected 0 or more, got -1"),
        (1.5, False, ArgumentTypeError, "nbytes: expected an int"),
        (1, "sometimes", ArgumentError, "pin: expected True, False or 'lazily', got 'sometimes'"),
        (1, 1, ArgumentError, "pin: expected True, False or 'lazily', got 1"),
        (1 << 60, False, BitslabError, "are available"),
    ],
)
def test_what_cannot_be_allocated_is_reported_at_once(nbytes, pin, error, says):
    with pytest.raises(error, match=says):
        HostBuffer.allocate(nbytes, pin=pin)


def test_memory_that_the_system_refuses_is_an_error_and_leaves_no_file(monkeypatch):
    def full(fd, offset, length):
        raise OSError(errno.ENOSPC, "No space left")

    monkeypatch.setattr(os, "posix_fallocate", full)
    gc.collect()
    before = open_files()
    with pytest.raises(BitslabError, match="5000 bytes of host memory: .*No space left"):
        HostBuffer.allocate(5000)
    assert open_files() == before


def test_buffers_leave_no_file_and_no_memory_behind():
    kept = HostBuffer.allocate(100, pin=False)
    gc.collect()
    before = open_files()
    for close in (True, False):
        buffer = HostBuffer.allocate(1 << 20, pin=False)
        assert open_files() > before
        view = buffer.tensor[5:]
        if close:
            buffer.close()
        del buffer
        address = view.data_ptr()
        del view
        gc.collect()
        assert open_files() == before
        with pytest.raises(AssertionError):
            inode_at(address)
    assert kept.tensor.numel() == 100


def test_views_keep_the_memory_when_the_buffer_goes():
    buffer = allocate_filled(10_000, pin=False)
    expected = buffer.tensor.clone()
    view, array = buffer.tensor[17:], buffer.tensor.numpy()[33:]
    buffer.close()
    del buffer
    gc.collect()
    assert torch.equal(view, expected[17:]) and np.array_equal(array, expected.numpy()[33:])


def test_page_locking_happens_once_and_ends_once_after_the_gpu(recorder):
    buffer = HostBuffer.allocate(5000)
    address = buffer.tensor.data_ptr()
    assert buffer.pinned and buffer.ensure_pinned() and buffer.ensure_pinned()
    assert recorder.calls == [("register", address, 5000)]
    buffer.close()
    buffer.close()
    del buffer
    gc.collect()
    assert recorder.calls[1:] == [("synchronize",), ("unregister", address)]


@pytest.mark.parametrize("make_view", [lambda t: t[100:], lambda t: t.numpy()[100:]])
def test_page_locking_lasts_as_long_as_any_view(recorder, make_view):
    buffer = HostBuffer.allocate(5000)
    view = make_view(buffer.tensor)
    del buffer
    gc.collect()
    assert recorder.names() == ["register"]
    del view
    gc.collect()
    assert recorder.names() == ["register", "synchronize", "unregister"]


def test_pin_says_when_memory_is_page_locked(recorder):
    lazily, never = HostBuffer.allocate(10, pin="lazily"), HostBuffer.allocate(10, pin=False)
    assert not recorder.calls
    assert [lazily.pinned, lazily.ensure_pinned(), lazily.pinned] == [False, True, True]
    assert recorder.names() == ["register"]
    assert not never.ensure_pinned() and not never.pinned and recorder.names() == ["register"]
    assert not HostBuffer.allocate(0).ensure_pinned() and recorder.names() == ["register"]


def test_without_a_gpu_memory_is_ordinary_until_there_is_one(recorder):
    recorder.there = False
    buffer = HostBuffer.allocate(10)
    assert not buffer.pinned and not buffer.ensure_pinned() and not recorder.calls
    recorder.there = True
    assert buffer.ensure_pinned()


def test_refused_page_locking_is_reported_once_and_the_memory_remains_usable(recorder):
    recorder.refusal = "out of memory"
    with pytest.warns(UserWarning) as reported:
        first = HostBuffer.allocate(5000)
    assert len(reported) == 1
    message = str(reported[0].message)
    assert "5000 bytes" in message and "out of memory" in message and "ulimit -l" in message
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = HostBuffer.allocate(6000)
        assert not first.ensure_pinned() and not second.ensure_pinned()
    assert recorder.names() == ["register"] * 2  # each buffer asks once
    assert not first.pinned and not second.pinned
    second.tensor.fill_(3)
    first.close()
    del second
    gc.collect()
    assert recorder.names() == ["register"] * 2


@pytest.mark.parametrize("end", ["close", "drop"])
def test_release_waits_while_a_stream_is_captured(recorder, end):
    buffer = HostBuffer.allocate(5000)
    address = buffer.tensor.data_ptr()
    recorder.captures = True
    if end == "close":
        buffer.close()
    del buffer
    gc.collect()
    HostBuffer.allocate(10, pin=False)
    assert recorder.names() == ["register"]
    assert inode_at(address)  # still mapped: the GPU may read it
    recorder.captures = False
    HostBuffer.allocate(10, pin=False)
    assert recorder.calls[1:] == [("synchronize",), ("unregister", address)]
    gc.collect()
    with pytest.raises(AssertionError):
        inode_at(address)


def test_page_locking_does_not_begin_while_a_stream_is_captured(recorder):
    buffer = HostBuffer.allocate(10, pin="lazily")
    recorder.captures = True
    with pytest.raises(BitslabError, match="while a graph is captured"):
        buffer.ensure_pinned()
    recorder.captures = False
    assert buffer.ensure_pinned()


def test_a_forked_child_leaves_page_locking_to_its_parent(recorder):
    buffer = allocate_filled(5000)
    child = os.fork()
    if not child:
        status = 1
        try:
            recorder.there = False  # as for CUDA in a forked child
            view = buffer.tensor[:]
            fine = not buffer.pinned and not buffer.ensure_pinned()
            view[0] = 77
            buffer.close()
            del view
            gc.collect()
            status = 0 if fine and recorder.names() == ["register"] else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert buffer.pinned and buffer.tensor[0] == 77


def test_threads_that_close_one_buffer_end_its_page_locking_once(recorder):
    for _ in range(50):
        buffer = HostBuffer.allocate(10)
        start = threading.Barrier(4)

        def close(buffer=buffer, start=start):
            start.wait()
            buffer.close()

        threads = [threading.Thread(target=close) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert recorder.names().count("unregister") == 50


@pytest.mark.parametrize(
    "use",
    [
        lambda b: b.tensor,
        lambda b: b.ensure_pinned(),
        lambda b: b.handle(),
        lambda b: pickle.dumps(b),
        lambda b: copy.deepcopy(b),
    ],
    ids=["tensor", "ensure_pinned", "handle", "pickle", "deepcopy"],
)
def test_a_closed_buffer_says_so(use):
    buffer = HostBuffer.allocate(10, pin=False)
    buffer.close()
    assert buffer.closed and not buffer.pinned and "closed" in repr(buffer)
    with pytest.raises(BitslabError, match="closed"):
        use(buffer)


def test_an_interpreter_that_ends_says_nothing_and_calls_no_gpu():
    script = """
from bitslab.engine.memory import host, page_locking, page_taking
from tests.tables.support import Recorder
class Loud(Recorder):
    def unregister(self, address): print("unregister")
    def synchronize(self): print("synchronize")
page_locking.registrar = Loud()
buffer, view = host.HostBuffer.allocate(5000), host.HostBuffer.allocate(10).tensor
"""
    run = run_forked(["-c", script])
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


@pytest.mark.parametrize("pin", [True, False, "lazily"])
@pytest.mark.parametrize("nbytes", [0, 5000])
@pytest.mark.parametrize(
    "make_copy",
    [lambda b: pickle.loads(pickle.dumps(b)), copy.deepcopy, copy.copy],
    ids=["pickle", "deepcopy", "copy"],
)
def test_pickle_and_copy_copy(make_copy, nbytes, pin, recorder):
    buffer = allocate_filled(nbytes, pin=pin)
    expected = buffer.tensor.clone()
    twin = make_copy(buffer)
    buffer.tensor.zero_()
    assert torch.equal(twin.tensor, expected) and twin.owner and not buffer.shared
    assert twin.pinned == (pin is True and nbytes > 0)
    assert twin.ensure_pinned() == (pin is not False and nbytes > 0)


# Processes. The functions below run in spawned children.


def add_one(buffer: HostBuffer, answers) -> None:
    buffer.tensor.add_(1)
    answers.send((buffer.owner, buffer.shared, inode_at(buffer.tensor.data_ptr())))


def make_buffer(answers) -> None:
    answers.send(allocate_filled(5000, pin=False))
    answers.recv()


def test_a_spawned_process_gets_the_same_memory():
    buffer = allocate_filled(5000, pin=False)
    expected = buffer.tensor + 1
    context = multiprocessing.get_context("spawn")
    answers, theirs = context.Pipe()
    process = context.Process(target=add_one, args=(buffer, theirs))
    process.start()
    owner, shared, inode = answers.recv()
    process.join()
    assert process.exitcode == 0 and not owner and shared and buffer.shared
    assert torch.equal(buffer.tensor, expected)
    assert inode == inode_at(buffer.tensor.data_ptr())


def test_memory_outlives_the_process_that_made_it():
    context: Any = multiprocessing.get_context(spawned.METHOD)
    answers, theirs = context.Pipe()
    process = context.Process(target=make_buffer, args=(theirs,))
    process.start()
    buffer = answers.recv()
    process.kill()
    process.join()
    assert not buffer.owner and torch.equal(buffer.tensor, allocate_filled(5000).tensor)


ATTACH = """
import sys
from bitslab.engine.memory.host import HostBuffer
from tests.tables.support import inode_at
buffer = HostBuffer.attach(sys.argv[1])
buffer.tensor.add_(1)
print(buffer.owner, buffer.shared, buffer.nbytes, inode_at(buffer.tensor.data_ptr()))
"""


def test_an_unrelated_process_attaches_by_handle():
    buffer = allocate_filled(5000, pin=False)
    expected = buffer.tensor + 1
    run = run_forked(["-c", ATTACH, buffer.handle()])
    assert run.returncode == 0, run.stderr
    inode = inode_at(buffer.tensor.data_ptr())
    assert run.stdout.split() == ["False", "True", "5000", str(inode)]
    assert buffer.shared and torch.equal(buffer.tensor, expected)


@pytest.mark.parametrize(("pin", "locked"), [(True, True), (False, False), ("lazily", True)])
def test_attached_memory_is_page_locked_when_asked_for(recorder, pin, locked):
    buffer = allocate_filled(5000, pin=pin)
    recorder.calls.clear()
    attached = HostBuffer.attach(buffer.handle())
    assert not attached.pinned and not recorder.calls
    assert attached.ensure_pinned() == locked
    assert attached.tensor.data_ptr() != buffer.tensor.data_ptr()
    assert torch.equal(attached.tensor, buffer.tensor)


def test_a_handle_goes_on_from_process_to_process():
    first = allocate_filled(5000, pin=False)
    second = HostBuffer.attach(first.handle())
    first.close()
    third = HostBuffer.attach(second.handle())
    third.tensor[0] = 99
    assert second.tensor[0] == 99


def test_a_stale_handle_is_refused():
    buffer = HostBuffer.allocate(5000, pin=False)
    handle = buffer.handle()
    buffer.close()
    with pytest.raises(ArgumentError, match="leads to no memory"):
        HostBuffer.attach(handle)
    # The number of the file descriptor is used again at once.
    gc.collect()
    before = open_files()
    others = [HostBuffer.allocate(5000, pin=False) for _ in range(3)]
    assert any(other.handle().split(":")[2] == handle.split(":")[2] for other in others)
    with pytest.raises(ArgumentError, match="another file is in its place"):
        HostBuffer.attach(handle)
    del others
    assert open_files() == before
    script = "from bitslab.engine.memory.host import HostBuffer as H; print(H.allocate(9).handle())"
    run = run_forked(["-c", script])
    assert run.returncode == 0, run.stderr
    with pytest.raises(ArgumentError, match="leads to no memory: process .* has ended"):
        HostBuffer.attach(run.stdout.strip())


@pytest.mark.parametrize(
    ("handle", "error"),
    [
        ("", ArgumentError),
        ("bitslab-memory:1:2", ArgumentError),
        ("bitslab-memory:../x:3:5:0123456789abcdef:True", ArgumentError),
        (b"bitslab-memory:1:3:5:0123456789abcdef:True", ArgumentTypeError),
    ],
)
def test_what_is_no_handle_is_refused(handle, error):
    with pytest.raises(error, match="handle: expected"):
        HostBuffer.attach(handle)


def test_without_memory_files_a_buffer_works_but_goes_to_no_other_process(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    buffer = allocate_filled(5000, pin=False)
    assert torch.equal(copy.deepcopy(buffer).tensor, buffer.tensor)
    with pytest.raises(BitslabError, match="no memfd_create"):
        buffer.handle()
    assert not buffer.shared
    buffer.close()


def test_available_memory_is_read_from_the_system():
    assert 0 < host.available_bytes() <= 2 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE")


@pytest.mark.parametrize("nbytes", [0, 1, 4097, 5 << 20])
@pytest.mark.parametrize("pin", [True, False, "lazily"])
def test_private_memory_is_zeros_and_page_locked_as_asked(recorder, pin, nbytes):
    buffer = HostBuffer.allocate(nbytes, pin=pin, private=True)
    assert buffer.tensor.shape == (nbytes,)
    assert not buffer.tensor.any()
    buffer.tensor.fill_(7)
    locked = pin is True and nbytes > 0
    assert buffer.pinned == locked
    view = buffer.tensor.view(-1)
    del buffer
    assert bool((view == 7).all())
    assert recorder.names() == ["register"] * locked
    del view
    assert recorder.names() == ["register", "synchronize", "unregister"][: 3 * locked]


def test_large_files_begin_where_huge_pages_may(recorder, monkeypatch):
    nbytes = host.LARGE_BYTES + 4097
    buffer = allocate_filled(nbytes)
    address = buffer.tensor.data_ptr()
    assert address % page_taking.HUGE_PAGE_BYTES == 0 and buffer.tensor.numel() == nbytes
    assert recorder.calls[0] == ("register", address, nbytes)
    expected = (torch.arange(nbytes) % 251).to(torch.uint8)
    other = HostBuffer.attach(buffer.handle())
    assert other.tensor.data_ptr() % page_taking.HUGE_PAGE_BYTES == 0
    other.populate()
    assert torch.equal(other.tensor, expected)
    other.tensor[-1] = 255
    assert buffer.tensor[-1] == 255
    assert torch.equal(copy.deepcopy(buffer).tensor[:-1], expected[:-1])


def test_large_memory_is_taken_by_one_buffer_at_a_time(monkeypatch):
    """So that what two threads ask for is not given twice."""
    nbytes, taken, lock = host.LARGE_BYTES, [0], threading.Lock()

    def take(buffer: HostBuffer) -> None:
        time.sleep(0.02)
        with lock:
            taken[0] += buffer.nbytes

    monkeypatch.setattr(host, "available_bytes", lambda: 2.5 * nbytes - taken[0])
    monkeypatch.setattr(HostBuffer, "take_pages", take)
    kept: list[HostBuffer] = []
    errors: list[BitslabError] = []

    def allocate() -> None:
        try:
            kept.append(HostBuffer.allocate(nbytes, pin=False, private=True))
        except BitslabError as error:
            errors.append(error)

    threads = [threading.Thread(target=allocate) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(kept) == 2 and len(errors) == 3
    assert all("are available" in str(error) for error in errors)


def test_private_memory_is_not_shared_but_copied(recorder):
    buffer = HostBuffer.allocate(5000, private=True)
    buffer.tensor.random_()
    with pytest.raises(BitslabError, match="private to its process"):
        buffer.handle()
    packed = multiprocessing.reduction.ForkingPickler.dumps(buffer)
    for twin in (pickle.loads(packed), pickle.loads(pickle.dumps(buffer)), copy.deepcopy(buffer)):
        assert torch.equal(twin.tensor, buffer.tensor)
        assert twin.tensor.data_ptr() != buffer.tensor.data_ptr()


def test_private_memory_does_not_move_when_a_process_forks():
    """A child that had the pages would make the next write of the parent go to other ones."""
    buffer = HostBuffer.allocate(1 << 20, private=True)
    buffer.tensor.fill_(3)
    found = Path("/proc/self/smaps").read_text()
    begin = f"{buffer.tensor.data_ptr():x}-"
    lines = found[found.index("\n" + begin) :].splitlines()
    flags = next(line for line in lines if line.startswith("VmFlags:"))
    assert "dc" in flags.split()
