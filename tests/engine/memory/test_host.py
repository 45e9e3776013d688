"""Host memory for GPUs: its size, page-locking, release, and ways to other processes."""

from __future__ import annotations

import copy
import ctypes
import errno
import gc
import itertools
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
from tests.forked import run_forked
from tests.tables.support import Recorder, inode_at, open_files


@pytest.fixture
def recorder(monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(page_locking, "registrar", recorder)
    monkeypatch.setattr(page_locking, "_warned_of_refusal", False)
    yield recorder
    gc.collect()  # what is left is released here, not by CUDA


def allocate_filled(nbytes: int, **options) -> HostBuffer:
    buffer = HostBuffer.allocate(nbytes, **options)
    buffer.tensor.copy_(torch.arange(nbytes) % 251)
    return buffer


def resident_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of the pages of mapped memory that the system has given."""
    library = ctypes.CDLL(None, use_errno=True)
    found = (ctypes.c_ubyte * -(-tensor.numel() // 4096))()
    library.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    assert library.mincore(tensor.data_ptr(), tensor.numel(), found) == 0
    return sum(page & 1 for page in found) * 4096


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


@pytest.mark.parametrize("private", [True, False], ids=["private", "file"])
def test_memory_is_taken_where_pages_cannot_be_asked_for(private, monkeypatch):
    monkeypatch.setattr(page_taking, "_MADV_POPULATE_WRITE", 12345)  # as before Linux 5.14
    monkeypatch.setattr(host, "LARGE_BYTES", 1 << 20)
    buffer = HostBuffer.allocate(1 << 20, private=private)
    fd = buffer._fd
    taken = resident_bytes(buffer.tensor) if fd is None else 512 * os.fstat(fd).st_blocks
    assert (fd is None) == private
    assert taken == 1 << 20
    assert not buffer.tensor.any()
    assert buffer.tensor.fill_(1).sum() == 1 << 20


@pytest.mark.drawn(3)
@pytest.mark.parametrize("private", [True, False], ids=["private", "file"])
@pytest.mark.parametrize("threads", [1, 3, 8])
def test_pages_are_taken_in_pieces_by_several_threads(private, threads, monkeypatch):
    nbytes = (45 << 20) + 4097
    parts: list[tuple[int, int, int]] = []
    populate = page_taking._populate
    together = threading.Barrier(threads, timeout=20)
    met: set[int] = set()

    def recorded(address: int, size: int) -> int:
        if len(met) < threads and threading.get_ident() not in met:  # each takes at least one
            met.add(threading.get_ident())
            together.wait()
        parts.append((address, size, threading.get_ident()))
        return populate(address, size)

    for size in ("PIECE_BYTES", "MOST_PIECE_BYTES"):
        monkeypatch.setattr(page_taking, size, 4 << 20)
    monkeypatch.setattr(page_taking, "threads_for", lambda nbytes: threads)
    monkeypatch.setattr(page_taking, "_populate", recorded)
    buffer = allocate_filled(nbytes, pin=False, private=private)
    begin, ends = buffer.tensor.data_ptr(), [address + size for address, size, _ in sorted(parts)]
    assert [address for address, _, _ in sorted(parts)] == [begin, *ends[:-1]]
    assert ends[-1] == begin + nbytes and all(end % (2 << 20) == 0 for end in ends[:-1])
    assert max(size for _, size, _ in parts) <= 4 << 20
    idents = {ident for *_, ident in parts}
    assert len(idents) == threads and threading.get_ident() in idents
    assert torch.equal(buffer.tensor, (torch.arange(nbytes) % 251).to(torch.uint8))
    if not private:
        assert torch.equal(HostBuffer.attach(buffer.handle()).tensor, buffer.tensor)


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


@pytest.mark.parametrize("refused_after", [0, 7, None])
@pytest.mark.parametrize("slow_after", [0, 12, 25, None])
def test_huge_pages_are_asked_for_while_they_are_given_quickly(
    refused_after, slow_after, monkeypatch
):
    """Where they are refused, or slow over several pieces, small pages are taken for the rest."""
    page = page_taking.HUGE_PAGE_BYTES
    judged = page_taking.JUDGED_BYTES // page
    begin, end = 5 * page - 4096, 48 * page + 8192  # 43 whole ones
    advised: list[tuple[int, int, int]] = []
    now = [0.0]

    def advise(address: int, nbytes: int, advice: int) -> int:
        advised.append((address, nbytes, advice))
        if advice != page_taking._MADV_COLLAPSE:
            return 0
        done = sum(each[2] == advice for each in advised) - 1
        if refused_after is not None and done >= refused_after:
            return errno.EINVAL
        slow = slow_after is not None and done >= slow_after
        now[0] += nbytes / page_taking.LEAST_COLLAPSED * (judged if slow else 0.5)  # one is enough
        return 0

    monkeypatch.setattr(page_taking, "_advise", advise)
    for clock in ("perf_counter", "thread_time"):
        monkeypatch.setattr(time, clock, lambda: now[0])
    assert page_taking.take_pages(begin, end - begin, 1, collapse=True)
    asked = 43
    if slow_after is not None:  # several are looked at together
        asked = (slow_after // judged + 1) * judged
    if refused_after is not None:
        asked = min(asked, refused_after + 1)
    collapsed = [each for each in advised if each[2] == page_taking._MADV_COLLAPSE]
    assert [each[:2] for each in collapsed] == [((5 + n) * page, page) for n in range(asked)]
    # The first page of each was taken before, and all pages of each piece behind.
    taken = [each[:2] for each in advised if each[2] != page_taking._MADV_COLLAPSE]
    firsts = [((5 + n) * page, 4096) for n in range(asked)]
    assert [each for each in taken if each in firsts] == firsts
    pieces = [each for each in taken if each not in firsts]
    assert pieces[0][0] == begin and sum(nbytes for _, nbytes in pieces) == end - begin
    assert all(a + n == b for (a, n), (b, _) in itertools.pairwise(pieces))


@pytest.mark.parametrize("waits", [False, True], ids=["alone", "beside Python"])
def test_pieces_are_larger_where_a_thread_waits_for_the_interpreter(waits, monkeypatch):
    """Else it would wait for each, up to some milliseconds, beside a thread that runs Python."""
    sizes: list[int] = []
    wall_s, own_s = [0.0], [0.0]

    def populate(address: int, nbytes: int) -> int:
        sizes.append(nbytes)
        own_s[0] += 1e-4
        wall_s[0] += 5e-3 if waits else 1.5e-4
        return 0

    monkeypatch.setattr(page_taking, "_populate", populate)
    monkeypatch.setattr(time, "perf_counter", lambda: wall_s[0])
    monkeypatch.setattr(time, "thread_time", lambda: own_s[0])
    assert page_taking.take_pages(0, 1 << 30, 1)
    assert sum(sizes) == 1 << 30
    if waits:
        assert max(sizes) == page_taking.MOST_PIECE_BYTES and len(sizes) < 25
    else:
        assert set(sizes) == {page_taking.PIECE_BYTES}


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    "error", [OSError(errno.ENOMEM, "no pages"), KeyboardInterrupt(), ZeroDivisionError()], ids=repr
)
@pytest.mark.parametrize("in_caller", [False, True])
def test_no_thread_goes_on_behind_a_failure(threads, error, in_caller, monkeypatch):
    """Whoever owns the memory may unmap it then."""
    if threads == 1 and not in_caller:
        in_caller = True
    calls, main = [], threading.get_ident()
    together = threading.Barrier(threads, timeout=20)
    first: set[int] = set()

    def populate(address: int, nbytes: int) -> int:
        ident = threading.get_ident()
        if ident not in first:
            first.add(ident)
            together.wait()
        calls.append(ident)
        if (ident == main) == in_caller:
            raise error
        time.sleep(0.001)
        return 0

    monkeypatch.setattr(page_taking, "_populate", populate)
    with pytest.raises(type(error)):
        page_taking.take_pages(0, 1 << 40, threads)
    n = len(calls)
    assert n < 200
    time.sleep(0.01)
    assert len(calls) == n


def test_where_no_thread_can_be_started_one_takes_all(monkeypatch):
    def start(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    sizes: list[int] = []
    monkeypatch.setattr(page_taking, "_populate", lambda address, nbytes: sizes.append(nbytes))
    assert page_taking.take_pages(0, 64 << 20, 8) and sum(sizes) == 64 << 20


def test_memory_of_huge_pages_keeps_its_bytes():
    """Whether this system gives some or not."""
    fd = os.memfd_create("pages")
    os.ftruncate(fd, 8 << 20)
    buffer = HostBuffer(fd, 8 << 20, "pages", False, owner=True)
    address = buffer.tensor.data_ptr()
    whole = -(-address // (2 << 20)) * (2 << 20) - address
    buffer.tensor[whole :: 1 << 20] = 7
    expected = buffer.tensor.clone()
    assert page_taking.take_pages(address, buffer.nbytes, 2, collapse=True)
    assert torch.equal(buffer.tensor, expected)
    assert 512 * os.fstat(fd).st_blocks == buffer.nbytes


@pytest.mark.parametrize("private", [True, False], ids=["private", "file"])
def test_pages_that_the_system_refuses_to_threads_are_an_error(private, monkeypatch):
    monkeypatch.setattr(host, "LARGE_BYTES", 8 << 20)
    monkeypatch.setattr(page_taking, "threads_for", lambda nbytes: 2)
    monkeypatch.setattr(page_taking, "_populate", lambda address, nbytes: errno.ENOMEM)
    gc.collect()
    before = open_files()
    with pytest.raises(BitslabError, match="bytes of host memory: .*Cannot allocate memory"):
        HostBuffer.allocate(8 << 20, private=private)
    gc.collect()
    assert open_files() == before


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


def test_large_memory_takes_more_threads():
    cores = page_taking.available_cores()
    assert page_taking.threads_for(1 << 20) == page_taking.threads_for(31 << 20) == 1
    assert page_taking.threads_for(64 << 20) == min(4, cores)
    assert page_taking.threads_for(1 << 40) == min(page_taking.MAX_THREADS, cores)


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
