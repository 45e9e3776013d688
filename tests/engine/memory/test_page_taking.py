"""Taking pages of host memory: by whom, in which pieces, and until when."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import threading
import time

import pytest
import torch

from bitslab import BitslabError
from bitslab.engine.memory import host, page_taking
from bitslab.engine.memory.host import HostBuffer
from tests.engine.memory.filled import allocate_filled, resident_bytes
from tests.tables.support import open_files


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


def test_large_memory_takes_more_threads():
    cores = page_taking.available_cores()
    assert page_taking.threads_for(1 << 20) == page_taking.threads_for(31 << 20) == 1
    assert page_taking.threads_for(64 << 20) == min(4, cores)
    assert page_taking.threads_for(1 << 40) == min(page_taking.MAX_THREADS, cores)
