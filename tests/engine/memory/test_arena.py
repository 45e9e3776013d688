"""The arena of host memory: pieces that are taken, given back and taken again."""

from __future__ import annotations

import gc
import os
import threading
import traceback
import weakref
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from bitslab.engine.memory import Arena, HostBuffer, arena, host, host_arena, page_locking
from bitslab.engine.memory.arena import THREAD_NAME
from bitslab.engine.memory.pieces import ALIGN_BYTES, Pending
from bitslab.errors import ArgumentError, BitslabError

#: Of memory that no GPU reads: as fast on every machine.
PLAIN: dict[str, Any] = {"pin": False, "private": False}
OTHER: dict[str, Any] = {"pin": False, "private": True}


class Event:
    """An event that passes when `passed` is set."""

    def __init__(self) -> None:
        self.passed = False
        self.queries = 0

    def query(self) -> bool:
        self.queries += 1
        return self.passed


def take(
    pool: Arena,
    least: int,
    wanted: int | None = None,
    *,
    pending: Pending | None = None,
    **kind: Any,
) -> torch.Tensor:
    """Return all of a reservation."""
    reserved = pool.reserve(least, wanted, **kind)
    return reserved.cut(reserved.nbytes, pending)


class Pieces(RuleBasedStateMachine):
    """An arena, and the pieces that are taken of it, each filled with a number of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena()
        self.pieces: list[tuple[torch.Tensor, int, Event]] = []
        self.waiting: list[tuple[int, int, Event]] = []  # addresses that a GPU may still use
        self.n = 0

    def keep(self, piece: torch.Tensor, event: Event) -> None:
        assert piece.dim() == 1 and piece.dtype == torch.uint8
        self.n = (self.n + 1) % 251
        self.pieces.append((piece.fill_(self.n), self.n, event))

    @rule(
        least=st.integers(1, 3000),
        more=st.integers(0, 3000),
        kind=st.sampled_from([PLAIN, OTHER]),
    )
    def take(self, least: int, more: int, kind: dict[str, Any]) -> None:
        event = Event()
        piece = take(self.arena, least, least + more, pending=lambda: [event], **kind)
        assert least <= piece.nbytes <= least + more
        self.keep(piece, event)

    @rule(nbytes=st.integers(1, 20_000), each=st.integers(100, 3000), share=st.floats(0, 1))
    def cut(self, nbytes: int, each: int, share: float) -> None:
        reserved, total, n = self.arena.reserve(nbytes, **PLAIN), 0, 0
        while reserved.nbytes and total <= share * nbytes:
            event = Event()
            piece = reserved.cut(min(each, reserved.nbytes), partial(list, [event]))
            total, n = total + piece.nbytes, n + 1
            self.keep(piece, event)
        assert 0 <= nbytes - total - reserved.nbytes < ALIGN_BYTES * n

    @precondition(lambda self: self.pieces)
    @rule(data=st.data(), passed=st.booleans(), most=st.integers(0, 3))
    def drop(self, data: st.DataObject, passed: bool, most: int) -> None:
        at = data.draw(st.integers(0, len(self.pieces) - 1))
        tensor, _, event = self.pieces.pop(at)
        event.passed = passed
        if not passed:
            self.waiting.append((*addresses(tensor), event))
        del tensor
        self.arena.collect(most)

    @precondition(lambda self: self.waiting)
    @rule()
    def pass_all(self) -> None:
        for _, _, event in self.waiting:
            event.passed = True
        self.waiting = []

    @rule()
    def trim(self) -> None:
        before = self.arena.stats()["reserved_bytes"]
        freed = self.arena.trim()
        assert self.arena.stats()["reserved_bytes"] == before - freed

    @invariant()
    def pieces_are_apart_and_whole(self) -> None:
        used = [addresses(tensor) for tensor, *_ in self.pieces]
        used += [(begin, end) for begin, end, _ in self.waiting]
        assert all(end <= begin for (_, end), (begin, _) in pairwise(sorted(used)))
        assert all(begin % ALIGN_BYTES == 0 for begin, _ in used)
        assert all(bool((tensor == n).all()) for tensor, n, _ in self.pieces)

    @invariant()
    def nothing_is_lost(self) -> None:
        stats = self.arena.stats()
        used = sum(tensor.numel() for tensor, *_ in self.pieces)
        used += sum(end - begin for begin, end, _ in self.waiting)
        n = len(self.pieces) + len(self.waiting)
        assert used <= stats["used_bytes"] <= used + n * (ALIGN_BYTES - 1)
        for slab in self.arena._slabs:
            assert all(a_end < begin for (_, a_end), (begin, _) in pairwise(slab.free)), "joined"

    def teardown(self) -> None:
        self.pass_all()
        while self.pieces:
            self.pieces.pop()[2].passed = True
        self.arena.trim()
        assert self.arena.stats() == {"reserved_bytes": 0, "used_bytes": 0, "buffers": 0}


def addresses(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.numel()


TestPieces = Pieces.TestCase
TestPieces.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)


def test_memory_that_is_given_back_is_taken_again() -> None:
    pool = Arena()
    for _ in range(3):
        pieces = [take(pool, nbytes, **PLAIN) for nbytes in (5000, 100_000, 300)]
        assert pool.stats()["reserved_bytes"] == 105_300
        del pieces
    assert pool.stats() == {"reserved_bytes": 105_300, "used_bytes": 0, "buffers": 3}


def test_neighbours_are_joined() -> None:
    pool = Arena()
    reserved = pool.reserve(4096, **PLAIN)
    first, second, third = (reserved.cut(nbytes) for nbytes in (1024, 1024, 1500))
    del second
    assert pool.stats()["used_bytes"] == 3072
    del reserved  # with what is left
    assert pool.stats()["used_bytes"] == 1024 + 1536
    reserved = pool.reserve(512, **PLAIN)
    assert pool.stats()["used_bytes"] == 3072
    del first, third, reserved
    assert take(pool, 4096, **PLAIN).nbytes == 4096
    assert pool.stats()["buffers"] == 1


def test_the_smallest_range_that_is_enough_is_taken() -> None:
    pool = Arena()
    pieces = [take(pool, nbytes, **PLAIN) for nbytes in (8192, 4096, 2048)]
    places = {piece.nbytes: piece.data_ptr() for piece in pieces}
    pieces.clear()
    assert take(pool, 3000, **PLAIN).data_ptr() == places[4096]
    largest = take(pool, 100, 10_000, **PLAIN)
    assert (largest.nbytes, largest.data_ptr()) == (8192, places[8192])


def test_a_view_keeps_its_piece() -> None:
    pool = Arena()
    piece = take(pool, 4096, **PLAIN)
    view = piece[100:200].view(2, 50)
    view.fill_(7)
    del piece
    other = take(pool, 4096, **PLAIN)
    other.fill_(9)
    assert bool((view == 7).all()) and pool.stats()["used_bytes"] == 8192
    del view
    assert pool.stats()["used_bytes"] == 4096


def test_memory_that_a_gpu_may_still_use_waits_for_its_events() -> None:
    pool, events = Arena(), [Event(), Event()]
    piece = take(pool, 4096, **PLAIN, pending=lambda: events)
    place = piece.data_ptr()
    del piece
    assert events[0].queries == 0
    for event in events:
        other = take(pool, 4096, **PLAIN)
        assert other.data_ptr() != place
        del other
        event.passed = True
    assert pool.stats() == {"reserved_bytes": 8192, "used_bytes": 0, "buffers": 2}
    queries = events[1].queries
    pool.stats()
    assert events[1].queries == queries, "asked no more"


def test_pieces_are_collected_up_to_the_first_that_a_gpu_may_still_use() -> None:
    """With their events, while the reservation that they are cut from lasts."""
    pool, events = Arena(), [Event() for _ in range(4)]
    reserved = pool.reserve(1 << 20, **PLAIN)
    pieces = [reserved.cut_piece(300, partial(list, [event])) for event in events]
    free = pool._slabs[0].free
    for event in (events[0], events[1], events[3]):
        event.passed = True
    gone = [weakref.ref(event) for event in events]
    waits = events[2]
    events.clear()
    del event
    for n in range(1, 4):
        while pieces:
            del pieces[0]
        pool.collect(10)
        assert waits.queries == n and free.free_bytes == 2 * 512
        assert [ref() is not None for ref in gone] == [False, False, True, True]
        assert gone[3]().queries == 0  # type: ignore[union-attr]
    waits.passed = True
    pool.collect(1)
    assert free.free_bytes == 3 * 512 and gone[3]().queries == 0  # type: ignore[union-attr]
    pool.collect(1)
    del waits
    assert free.free_bytes == 4 * 512 and not any(ref() for ref in gone)


def test_a_gpu_that_has_failed_uses_nothing() -> None:
    def fail() -> Any:
        raise RuntimeError("CUDA error: an illegal memory access")

    class Broken(Event):
        def query(self) -> bool:
            return bool(fail())

    pool = Arena()
    pieces = [take(pool, 100, **PLAIN, pending=way) for way in (fail, lambda: [Broken()])]
    pieces.clear()
    assert pool.stats()["used_bytes"] == 0


def test_no_event_is_made_or_asked_for_while_a_graph_is_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Capturing:
        def capturing(self) -> bool:
            return True

    pool, asked = Arena(), []

    def pending() -> list[Event]:
        asked.append(1)
        return []

    piece = take(pool, 4096, **PLAIN, pending=pending)
    del piece
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_initialized", lambda: True)
        patched.setattr(page_locking, "registrar", Capturing())
        assert pool.stats()["used_bytes"] == 4096 and not asked
    assert pool.stats()["used_bytes"] == 0 and asked


def test_threads_share_it() -> None:
    pool, errors = Arena(), []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        held: list[torch.Tensor] = []
        try:
            for turn in range(150):
                n = int(torch.randint(2000, 20_000, (), generator=generator))
                reserved = pool.reserve(n, **PLAIN)
                held += [reserved.cut(size).fill_(seed) for size in (1 + n // 3, 1 + n // 4)]
                del reserved
                if n % 5 == 0:
                    pool.trim()
                if turn % 4 == 3:
                    del held[: len(held) // 2]
                if not all(bool((t == seed).all()) for t in held[:3]):
                    errors.append(f"{seed}: bytes of another")
        except BaseException as error:
            errors.append(repr(error))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert pool.stats()["used_bytes"] == 0
    pool.trim()
    assert pool.stats()["reserved_bytes"] == 0


def test_memory_of_the_garbage_collector_comes_back() -> None:
    pool = Arena()
    cycle: list[Any] = [take(pool, 4096, **PLAIN)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert pool.stats()["used_bytes"] == 0


def test_what_is_taken_soon_is_made_in_a_thread_beside_free_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool, allocate = Arena(), HostBuffer.allocate
    names: list[str] = []

    def recorded(nbytes: int, **options: Any) -> HostBuffer:
        names.append(threading.current_thread().name)
        if nbytes == 13:
            raise BitslabError("no memory")
        return allocate(nbytes, **options)

    monkeypatch.setattr(HostBuffer, "allocate", recorded)
    for count in (1, 2):
        assert pool.free_bytes(**PLAIN) == 4096 * (count - 1)
        made = pool.reserve_soon(4096, **PLAIN).result()
        assert names.pop().startswith(THREAD_NAME)
        assert pool.stats() == {
            "reserved_bytes": 4096 * count,
            "used_bytes": 4096,
            "buffers": count,
        }
        del made
    assert pool.free_bytes(**PLAIN) == 8192 and pool.free_bytes(**OTHER) == 0
    with pytest.raises(BitslabError, match="no memory"):
        pool.reserve_soon(13, **OTHER).result()


def test_free_buffers_go_when_memory_is_lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, allocate = Arena(), HostBuffer.allocate

    def scarce(nbytes: int, **options: Any) -> HostBuffer:
        if pool.stats()["reserved_bytes"] + nbytes > 10_000:
            raise BitslabError("no memory")
        return allocate(nbytes, **options)

    monkeypatch.setattr(HostBuffer, "allocate", scarce)
    kept, free = take(pool, 2000, **PLAIN), take(pool, 5000, **PLAIN)
    kept.fill_(5)
    with pytest.raises(BitslabError, match="no memory"):
        take(pool, 6000, **OTHER)
    assert pool.stats()["buffers"] == 2
    del free
    assert take(pool, 6000, **OTHER).nbytes == 6000
    assert bool((kept == 5).all())
    with pytest.raises(BitslabError, match="no memory"):
        take(pool, 9000, **OTHER)


def test_free_buffers_that_are_too_small_for_every_taker_go() -> None:
    pool, n = Arena(), 50
    kept = take(pool, 256, **PLAIN)
    kept.fill_(5)
    reserved = []
    for i in range(n):  # each wants a little more than the one before has left
        pieces = [take(pool, 4096 + 256 * i, **PLAIN) for _ in range(3)]
        assert pool.stats()["used_bytes"] == 256 + 3 * pieces[0].nbytes
        reserved.append(pool.stats()["reserved_bytes"] / pool.stats()["used_bytes"])
        del pieces
    assert 1.5 < max(reserved) <= arena.MOST_RESERVED
    assert bool((kept == 5).all())
    # As much as was in use at a time remains.
    buffers = pool.stats()["buffers"]
    pieces = [take(pool, 4096 + 256 * (n - 1), **PLAIN) for _ in range(3)]
    assert pool.stats()["buffers"] == buffers
    del pieces


def test_a_buffer_of_its_own_has_exactly_its_size() -> None:
    pool = Arena()
    free = take(pool, 8192, **PLAIN)
    del free
    buffer = pool.buffer(5001)
    assert buffer.nbytes == 5001 and not buffer.private
    assert pool.stats() == {"reserved_bytes": 13_193, "used_bytes": 5001, "buffers": 2}
    view = buffer.tensor[:10]
    buffer.close()
    assert pool.stats()["reserved_bytes"] == 8192
    assert take(pool, 8192, **PLAIN).data_ptr() != view.data_ptr()
    dropped = pool.buffer(10)
    del dropped
    assert pool.stats()["buffers"] == 1


def test_what_is_needed_comes_where_more_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    allocate, most = HostBuffer.allocate, 1000

    def limited(nbytes: int, **options: Any) -> HostBuffer:
        if nbytes > most:
            raise BitslabError(f"nbytes: {nbytes} bytes asked for")
        return allocate(nbytes, **options)

    monkeypatch.setattr(HostBuffer, "allocate", limited)
    pool = Arena()
    with pytest.raises(BitslabError, match="1001 bytes asked for"):
        pool.reserve(1001, 4096, **PLAIN)
    assert pool.stats()["reserved_bytes"] == 0
    assert pool.reserve(1000, 4096, **PLAIN).nbytes == 1000


@pytest.mark.parametrize(("least", "wanted"), [(0, None), (-1, None), (5, 4)])
def test_sizes_are_checked(least: int, wanted: int | None) -> None:
    with pytest.raises(ArgumentError, match="least"):
        Arena().reserve(least, wanted, **PLAIN)


@pytest.mark.parametrize("nbytes", [0, 101])
def test_a_piece_is_cut_inside(nbytes: int) -> None:
    reserved = Arena().reserve(100, **PLAIN)
    with pytest.raises(ArgumentError, match="nbytes"):
        reserved.cut(nbytes)
    assert reserved.cut(100).nbytes == 100 and reserved.nbytes == 0


@pytest.fixture
def own_arena(monkeypatch: pytest.MonkeyPatch) -> Iterator[Arena]:
    monkeypatch.setattr(arena, "_arena", None)
    yield host_arena()


def test_a_process_has_one(own_arena: Arena) -> None:
    assert host_arena() is own_arena


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("kind", [PLAIN, OTHER], ids=["file", "private"])
def test_a_forked_child_uses_and_frees_nothing_of_the_parent(
    own_arena: Arena, kind: dict[str, Any]
) -> None:
    free, piece = take(own_arena, 4096, **kind), take(own_arena, 4096, **kind)
    piece.fill_(3)
    del free
    pid = os.fork()
    if not pid:
        try:
            fresh = host_arena()
            assert fresh is not own_arena and fresh.stats()["buffers"] == 0
            mine = [take(fresh, 4096, **kind) for _ in range(8)]
            del piece
            gc.collect()
            for each in mine:
                each.fill_(9)
            del each, mine
            fresh.trim()
            assert fresh.stats()["buffers"] == 0
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert own_arena.stats() == {"reserved_bytes": 8192, "used_bytes": 4096, "buffers": 2}
    assert bool((piece == 3).all())
    assert take(own_arena, 4096, **kind).nbytes == 4096


@pytest.mark.gpu
@pytest.mark.parametrize("soon", [False, True], ids=["now", "soon"])
def test_pieces_are_page_locked(soon: bool) -> None:
    pool = Arena()
    reserved = pool.reserve_soon(1 << 20).result() if soon else pool.reserve(1 << 20)
    for nbytes in (1000, reserved.nbytes - 1024):
        piece = reserved.cut(nbytes)
        assert piece.is_pinned()
        piece.fill_(5)
        assert bool((piece.cuda() == 5).all())
    assert pool.stats()["buffers"] == 1


@pytest.mark.gpu
def test_memory_that_a_copy_reads_is_not_used_again_before_its_end(held_stream: Any) -> None:
    pool, stream = Arena(), torch.cuda.Stream()
    out = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    piece = take(pool, 1 << 20, pending=lambda: [stream.record_event()])
    place = piece.data_ptr()
    piece.fill_(5)
    spare = take(pool, 1 << 20)
    spare.fill_(0)
    del spare
    with held_stream(stream):
        with torch.cuda.stream(stream):
            out.copy_(piece, non_blocking=True)
        del piece
        for _ in range(2):
            other = take(pool, 1 << 20)
            assert other.data_ptr() != place
            other.fill_(9)
            del other
    assert bool((out == 5).all())
    assert pool.stats()["used_bytes"] == 0
    assert pool.trim() == 2 << 20


def test_a_capture_of_another_thread_frees_nothing() -> None:
    """It makes CUDA refuse questions, which says nothing about the GPU's work."""
    captured = [True]

    def refuse() -> None:
        if captured[0]:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    class Refusing(Event):
        def query(self) -> bool:
            refuse()
            return True

    def pending() -> list[Event]:
        refuse()
        return []

    pool = Arena()
    pieces = [take(pool, 256, **PLAIN, pending=way) for way in (pending, lambda: [Refusing()])]
    pieces.clear()
    assert pool.stats()["used_bytes"] == 512
    captured[0] = False
    assert pool.stats()["used_bytes"] == 0


def test_memory_that_lacks_elsewhere_is_taken_of_idle_buffers(
    own_arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle = take(own_arena, 5000, **PLAIN)
    del idle
    monkeypatch.setattr(
        host, "available_bytes", lambda: (32 << 20) - own_arena.stats()["reserved_bytes"]
    )
    HostBuffer.allocate((32 << 20) - 1000, pin=False).close()
    assert own_arena.stats()["buffers"] == 0
    with pytest.raises(BitslabError, match="are available"):
        HostBuffer.allocate(33 << 20, pin=False)


def test_trim_waits_for_gpus_that_still_read(monkeypatch: pytest.MonkeyPatch) -> None:
    event = Event()

    class Registrar:
        def capturing(self) -> bool:
            return False

        def synchronize(self) -> None:
            event.passed = True

    pool = Arena()
    piece = take(pool, 4096, **PLAIN, pending=lambda: [event])
    del piece
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_initialized", lambda: True)
        patched.setattr(page_locking, "registrar", Registrar())
        assert pool.trim() == 4096


def test_kinds_of_memory_in_turn_keep_their_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, made = Arena(), []
    allocate = HostBuffer.allocate

    def counted(nbytes: int, **options: Any) -> HostBuffer:
        made.append(nbytes)
        return allocate(nbytes, **options)

    monkeypatch.setattr(HostBuffer, "allocate", counted)
    for _ in range(10):
        for kind in (PLAIN, OTHER, {"pin": "lazily", "private": True}):
            there = [pool.reserve(4096, **kind) for _ in range(8)]
            assert len(there) == 8
            del there
    assert len(made) == 3 * 8


def test_nothing_is_returned_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    class Registrar(page_locking.CudaRegistrar):
        def capturing(self) -> bool:
            return True

    pool, sizes = Arena(), [4096 * 5**k // 4**k for k in range(14)]
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_initialized", lambda: True)
        patched.setattr(page_locking, "registrar", Registrar())
        for nbytes in sizes:
            assert pool.reserve(nbytes, **PLAIN).nbytes == nbytes
        assert pool.stats()["buffers"] == len(sizes)
    assert pool.reserve(2 * sizes[-1], **PLAIN).nbytes == 2 * sizes[-1]
    assert pool.stats()["reserved_bytes"] <= 4 * sizes[-1]
