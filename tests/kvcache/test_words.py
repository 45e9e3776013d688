"""Host memory of histories: pieces that never move, some of them made ahead in a thread."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitslab.engine.memory import HostBuffer, host_arena
from bitslab.engine.memory import arena as engine_arena
from bitslab.engine.memory.arena import THREAD_NAME
from bitslab.engine.memory.pieces import ALIGN_BYTES
from bitslab.errors import BitslabError
from bitslab.kvcache import CodecPlans, HistoryReader, PackedHistory, words
from bitslab.kvcache import arena as arenas
from bitslab.kvcache import reader as reader_module
from bitslab.kvcache.arena import AHEAD, MIN_PIECE_WORDS, HostArena
from bitslab.kvcache.link import Link
from bitslab.kvcache.words import DeviceWords, HostWords

PIECE, PART = 10_240, 1024  # words


class Buffers:
    """Records who made which buffers, and refuses some."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead: list[int] = []
        self.asked: list[int] = []
        self.error: Exception | None = None  # of the thread
        make = HostBuffer.allocate

        def recorded(nbytes: int, **options: Any) -> HostBuffer:
            if threading.current_thread().name.startswith(THREAD_NAME):
                self.ahead.append(nbytes)
                if self.error is not None:
                    raise self.error
            else:
                self.asked.append(nbytes)
            return make(nbytes, **options)

        monkeypatch.setattr(HostBuffer, "allocate", recorded)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are small, and the process's arena has nothing of other tests."""
    monkeypatch.setattr(arenas, "MIN_PART_WORDS", PART)
    monkeypatch.setattr(engine_arena, "_arena", None)


@pytest.fixture
def buffers(monkeypatch: pytest.MonkeyPatch) -> Buffers:
    return Buffers(monkeypatch)


def assert_apart(pieces: list[torch.Tensor]) -> None:
    places = sorted((p.data_ptr(), p.data_ptr() + p.nbytes) for p in pieces)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(places))
    assert all(begin % 256 == 0 for begin, _ in places)
    for i, piece in enumerate(pieces):
        piece.fill_(i)
    assert all(bool((piece == i).all()) for i, piece in enumerate(pieces))


def parts(arena: HostArena, others: int = 0) -> list[torch.Tensor]:
    """Take PIECE words, in parts of what is left of buffers."""
    found: list[torch.Tensor] = []
    missing = PIECE
    while missing > 0:
        found.append(arena.take(min(missing, PART), missing, others=others))
        missing -= found[-1].shape[0]
        others = 0
    return found


@pytest.mark.parametrize("slab_pieces", [0.5, 1.0, 2.5, 40.0])
def test_what_is_expected_comes_from_a_thread(buffers: Buffers, slab_pieces: float) -> None:
    arena = HostArena(pin=False, slab_bytes=int(4 * PIECE * slab_pieces))
    pieces = parts(arena, others=15)
    for _ in range(15):
        pieces += parts(arena)
    assert_apart(pieces)
    assert len(buffers.asked) <= 2
    assert bool(buffers.ahead) == (slab_pieces < 16)
    taken = 4 * sum(piece.shape[0] for piece in pieces)
    # The last that is made ahead has MIN_PIECE_WORDS at least.
    room = 4 * MIN_PIECE_WORDS + ALIGN_BYTES * len(pieces)
    assert arena.nbytes <= max(taken, 4 * PIECE * slab_pieces) + room


@pytest.mark.parametrize(
    ("expected_mib", "ahead_kib"), [(0.5, 64), (1, 128), (4, 256), (64, 256)], ids=str
)
def test_much_that_is_expected_comes_in_few_buffers_of_a_bounded_size(
    buffers: Buffers, monkeypatch: pytest.MonkeyPatch, expected_mib: float, ahead_kib: int
) -> None:
    monkeypatch.setattr(arenas, "MOST_AHEAD_BYTES", 256 << 10)
    arena = HostArena(pin=False, slab_bytes=64 << 10, histories=16)
    words = int(expected_mib * (1 << 20)) // 4 // 16
    arena.expect(words, 2 * words, tokens=10)
    while arena._ahead:
        arena._ahead.popleft()[0].result()
    assert buffers.ahead[:AHEAD] == [ahead_kib << 10] * AHEAD


def test_what_is_expected_and_does_not_come_costs_few_buffers(buffers: Buffers) -> None:
    arena = HostArena(pin=False, slab_bytes=4 * PIECE)
    pieces = [arena.take(PIECE, PIECE, others=1000), arena.take(PIECE, PIECE)]
    assert_apart(pieces)
    assert len(buffers.ahead) + len(buffers.asked) <= len(pieces) + AHEAD


def test_memory_of_a_prompt_is_begun_before_its_words_are_there(buffers: Buffers) -> None:
    arena = HostArena(pin=False, slab_bytes=4 * PIECE, histories=6)
    for _ in range(6):  # of all layers, the first one counts
        arena.expect(PIECE, 2 * PIECE, tokens=100)
    wait_for_buffers(arena)
    assert buffers.ahead and not buffers.asked
    before = len(buffers.ahead)
    histories = [HostWords(arena, Link(torch.device("cpu"))) for _ in range(6)]
    for history in histories:
        history.append(torch.zeros(PIECE - 200, dtype=torch.int32), tokens=100, most=2 * PIECE)
    assert len(buffers.ahead) > before
    assert arena.nbytes <= 7 * 4 * PIECE


@pytest.mark.parametrize("expected", [0.9, 0.1], ids=["too much", "too little"])
def test_memory_of_a_prompt_on_the_device_is_as_its_first_piece_tells(expected: float) -> None:
    raw = 100 * PIECE
    store = DeviceWords(Link(torch.device("cpu")))
    store.expect(int(expected * raw), raw, tokens=100)
    addresses = set()
    for piece in range(10):
        words = torch.full((3 * PIECE,), piece, dtype=torch.int32)
        store.append(words, tokens=10 * (piece + 1), most=raw)
        addresses.add(store.whole().data_ptr())
    assert len(addresses) == 1
    assert store.nbytes <= 4 * 1.2 * store.n_words
    found = store.fetch()[: store.n_words].view(10, -1)
    assert bool((found == torch.arange(10).view(-1, 1)).all())


def test_memory_that_is_asked_for_is_not_less_for_a_prompt() -> None:
    store = DeviceWords(Link(torch.device("cpu")))
    store.expect(PIECE, 100 * PIECE, tokens=100)
    store.reserve(50 * PIECE)
    store.append(torch.zeros(PIECE // 10, dtype=torch.int32), tokens=10, most=100 * PIECE)
    assert store.nbytes >= 4 * 50 * PIECE


@pytest.mark.parametrize("missing_bytes", [4, 4 * PART, 8 * PART, PIECE, 4 * PIECE], ids=str)
@pytest.mark.parametrize("blocks", [1, 16], ids=lambda n: f"{n}-blocks")
def test_histories_lie_in_few_pieces_where_free_memory_is_nearly_enough(
    missing_bytes: int, blocks: int
) -> None:
    """A second request that takes a little more than the first one has left."""
    histories, n_words = 8, 100 * PIECE
    wanted = n_words + n_words // arenas.GROWTH  # as `expect` has it
    left = host_arena().reserve(4 * histories * wanted - missing_bytes, pin="lazily", private=False)
    del left
    arena = HostArena(pin=False, slab_bytes=4 * 50 * PIECE, histories=histories)
    found = [HostWords(arena, Link(torch.device("cpu"))) for _ in range(histories)]
    for history in found:
        history.expect(n_words, 4 * n_words, tokens=blocks)
    for block in range(blocks):
        for history in found:
            history.append(
                torch.full((n_words // blocks,), block, dtype=torch.int32),
                tokens=block + 1,
                most=4 * n_words * (block + 1) // blocks,
            )
    for history in found:
        pieces = [source for _, source in history.transfers(torch.empty(n_words))]
        assert len(pieces) <= 2 * blocks + arenas.PARTS
        words = history.fetch()[:n_words].view(blocks, -1)
        assert bool((words == torch.arange(blocks).view(-1, 1)).all())


@pytest.mark.parametrize("n_words", [PIECE, 40 * PIECE], ids=["small", "large"])
def test_histories_that_are_used_again_expect_only_what_they_lack(
    buffers: Buffers, n_words: int
) -> None:
    """A cache that is reset for one slightly longer prompt after the other."""
    arena = HostArena(pin=False, slab_bytes=4 * 50 * PIECE, histories=8)
    found = [HostWords(arena, Link(torch.device("cpu"))) for _ in range(8)]
    for request in range(12):
        n = n_words + request * n_words // 50
        for history in found:
            history.truncate(0)
            history.expect(n, 6 * n, tokens=1000 + request)
            history.append(torch.zeros(n, dtype=torch.int32), tokens=1000 + request, most=6 * n)
        wait_for_buffers(arena)
        kept = sum(history.nbytes for history in found)
        assert kept <= 4 * 8 * (1.3 * n + arenas.MIN_PIECE_WORDS)
        assert arena.nbytes <= 1.3 * kept
        assert host_arena().stats()["reserved_bytes"] <= 1.3 * kept
    assert len(buffers.asked) + len(buffers.ahead) <= 20


@dataclass(frozen=True)
class Request:
    """Words of each history for a prompt, and how it goes on."""

    words: int
    chunks: int
    blocks: int  # of tokens behind it
    block_words: int
    ratio: float
    histories: int
    again: bool  # in the cache of the request before, whose tokens are removed
    kept: int  # caches of requests before that are still alive
    merged: bool  # whether rows are read by themselves at the end

    @property
    def most_pieces(self) -> float:
        """Each takes an eighth more than there is, or all of a chunk, in up to PARTS of memory."""
        total = self.words + self.blocks * self.block_words
        steps = math.log(total / self.words) / math.log(1 + 1 / arenas.GROWTH)
        return 2 * arenas.PARTS + 2 * min(self.chunks, 26) + 2 * steps


REQUESTS = st.builds(
    Request,
    words=st.integers(300, 20_000),
    chunks=st.sampled_from([1, 1, 4, 16]),
    blocks=st.integers(0, 30),
    block_words=st.integers(1, 300),
    ratio=st.sampled_from([1.3, 1.5, 6.7]),
    histories=st.integers(1, 6),
    again=st.booleans(),
    kept=st.integers(0, 2),
    merged=st.booleans(),
)


def serve(histories: list[HostWords], request: Request) -> None:
    """Fill histories with the words of a request, and look at their pieces."""
    there = [len(history._pieces) for history in histories]
    for history in histories:
        history.truncate(0)
    appended = 0
    sizes = [max(1, request.words // request.chunks)] * request.chunks
    for tokens, n in enumerate(sizes + [request.block_words] * request.blocks, 1):
        appended += n
        for i, history in enumerate(histories):
            most = int(request.ratio * appended)
            if tokens == 1:
                history.expect(n, most, tokens=tokens)
            new = torch.full((n,), i, dtype=torch.int32)
            history.append(new, tokens=tokens, most=most)
    for i, (history, before) in enumerate(zip(histories, there, strict=True)):
        assert len(history._pieces) <= before + request.most_pieces
        sources = [source for _, source in history.transfers(torch.empty(history.n_words))]
        assert sum(map(len, sources)) == history.n_words
        assert all(bool((source == i).all()) for source in sources)
        if request.merged:
            assert bool((history.merged()[: history.n_words] == i).all())


@settings(max_examples=25)
@given(st.lists(REQUESTS, min_size=2, max_size=8), st.sampled_from([1 << 12, 1 << 16]))
def test_requests_of_any_sizes_lie_in_few_pieces_and_reserve_about_what_they_use(
    requests: list[Request], slab_bytes: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_arena, "_arena", None)
        patch.setattr(arenas, "MIN_PART_WORDS", 1 << 6)
        patch.setattr(arenas, "MIN_PIECE_WORDS", 1 << 10)
        patch.setattr(words, "MIN_PIECE_WORDS", least_words := 1 << 9)
        least = 4 * least_words
        caches: list[tuple[HostArena, list[HostWords]]] = []
        most_used = 0
        for request in requests:
            if not (request.again and caches):
                del caches[: max(0, len(caches) - request.kept)]
                made = HostArena(pin=False, slab_bytes=slab_bytes, histories=request.histories)
                link = Link(torch.device("cpu"))
                caches.append((made, [HostWords(made, link) for _ in range(request.histories)]))
                del made
            serve(caches[-1][1], request)
            for arena, _ in caches:
                wait_for_buffers(arena)
            used = [sum(max(h.nbytes, least) for h in histories) for _, histories in caches]
            most_used = max(most_used, sum(used))
            few = 16 * arenas.MIN_PIECE_WORDS
            assert caches[-1][0].nbytes <= 1.5 * used[-1] + few
            # Pieces that are merged are there twice, and buffers of one of them may be too small.
            most = 4 if any(r.merged for r in requests) else 2.5
            assert host_arena().stats()["reserved_bytes"] <= most * most_used + few
            del arena
        caches.clear()
        host_arena().trim()


@pytest.mark.parametrize("growth", [1.0, 1.05, 1.14])
def test_requests_whose_pieces_are_merged_leave_no_buffers_that_are_too_small(
    growth: float, buffers: Buffers
) -> None:
    """Each request a little longer than the one before, read by rows after each block."""
    reserved = []
    for request in range(12):
        n = int(2 * PIECE * growth**request)
        arena = HostArena(pin=False, slab_bytes=4 * PIECE, histories=3)
        histories = [HostWords(arena, Link(torch.device("cpu"))) for _ in range(3)]
        for tokens, new in enumerate([n] + [n // 30] * 5, 1):
            for i, history in enumerate(histories):
                appended = torch.full((new,), i, dtype=torch.int32)
                history.append(appended, tokens=tokens, most=6 * (n + tokens * n // 30))
                words_there = history.merged()[: history.n_words]
                assert bool((words_there == i).all())
        used = sum(history.nbytes for history in histories)
        reserved.append(host_arena().stats()["reserved_bytes"] / used)
        del arena, histories, history, words_there
    assert max(reserved) <= 3.0
    assert len(buffers.asked) + len(buffers.ahead) <= 5 * 12


def test_larger_pieces_than_expected_are_made_at_once(buffers: Buffers) -> None:
    arena = HostArena(pin=False, slab_bytes=4 * PIECE)
    pieces = [arena.take(PIECE, PIECE, others=8)]
    pieces += [arena.take(3 * PIECE, 3 * PIECE) for _ in range(4)]
    assert_apart(pieces)
    assert max(buffers.asked) >= 4 * 3 * PIECE


@pytest.mark.parametrize("error", [BitslabError("no memory"), RuntimeError("no GPU")], ids=repr)
def test_memory_that_is_refused_ahead_is_asked_for_again(
    buffers: Buffers, error: Exception
) -> None:
    buffers.error = error
    arena = HostArena(pin=False, slab_bytes=4 * PIECE)
    pieces = [arena.take(PIECE, PIECE, others=8)]
    pieces += [arena.take(PIECE, PIECE) for _ in range(8)]
    assert_apart(pieces)
    assert buffers.ahead
    assert len(buffers.asked) > 1


def test_words_of_several_histories_lie_in_memory_made_ahead(buffers: Buffers) -> None:
    arena = HostArena(pin=False, slab_bytes=4 * PIECE, histories=6)
    histories = [HostWords(arena, Link(torch.device("cpu"))) for _ in range(6)]
    given = [torch.arange(i, PIECE + i, dtype=torch.int32) for i in range(6)]
    for history, new in zip(histories, given, strict=True):
        history.append(new, tokens=100)
    for history, new in zip(histories, given, strict=True):
        out = torch.zeros(PIECE, dtype=torch.int32)
        for target, source in history.transfers(out):
            target.copy_(source)
        assert torch.equal(out, new)
    assert buffers.ahead


def grown_histories(n: int = 4) -> tuple[HistoryReader, list[PackedHistory]]:
    """Return histories with words in pieces of host memory, as on a GPU, that grew by steps."""
    reader = HistoryReader(torch.device("cpu"), offload=True, sm_budget=None, histories=n)
    plans = CodecPlans()
    histories = [
        PackedHistory(HostWords(reader.arena, reader.link), plans, "k", window=8, block_tokens=16)
        for _ in range(n)
    ]
    generator = torch.Generator().manual_seed(0)
    for length in (300, 40, 40, 200):
        for history in histories:
            history.append(torch.randn(2, 2, length, 64, generator=generator).bfloat16())
    return reader, histories


def wait_for_buffers(arena: HostArena) -> None:
    """Wait for the buffers that are being made ahead."""
    for made, _ in arena._ahead:
        made.result()


def test_a_second_cache_uses_the_memory_of_the_first() -> None:
    reader, histories = grown_histories()
    wait_for_buffers(reader.arena)
    before, reserved = host_arena().stats(), reader.arena.nbytes
    assert 0 < reserved <= before["reserved_bytes"]
    for _ in range(3):
        del reader, histories
        assert host_arena().stats()["used_bytes"] == 0
        reader, histories = grown_histories()
        wait_for_buffers(reader.arena)
        assert host_arena().stats()["reserved_bytes"] == before["reserved_bytes"]
        assert 0.8 * reserved < reader.arena.nbytes <= reserved  # nothing is made ahead
    assert torch.equal(histories[0].decode(), grown_histories()[1][0].decode())


@pytest.mark.parametrize("new_tokens", [0, 70], ids=["prompt", "and tokens"])
def test_requests_of_other_tokens_take_no_pages(
    new_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They pack to other sizes, and their pieces lie elsewhere among the free ones."""
    monkeypatch.setattr(reader_module, "SLAB_BYTES", 1 << 18)
    monkeypatch.setattr(arenas, "MIN_PART_WORDS", 1 << 8)
    monkeypatch.setattr(words, "MIN_PIECE_WORDS", 1 << 10)
    reserved = []
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        reader = HistoryReader(torch.device("cpu"), offload=True, sm_budget=None, histories=12)
        plans = CodecPlans()
        histories = [
            PackedHistory(
                HostWords(reader.arena, reader.link), plans, "k", window=16, block_tokens=16
            )
            for _ in range(12)
        ]
        for n in [500 + 10 * (seed % 2), *[7] * (new_tokens // 7)]:
            for history in histories:
                history.append(torch.randn(2, 2, n, 64, generator=generator).bfloat16())
        wait_for_buffers(reader.arena)
        reserved.append(host_arena().stats()["reserved_bytes"])
        assert reserved[-1] < 1.2 * sum(4 * history.words.n_words for history in histories)
        del reader, histories, history
    assert reserved[1:] == reserved[1:2] * 3
    assert reserved[1] <= 1.03 * reserved[0]


def test_two_caches_at_once_share_no_memory() -> None:
    caches = [grown_histories() for _ in range(2)]
    kept = [[history.decode() for history in histories] for _, histories in caches]
    del caches[0], kept[0]
    caches.append(grown_histories())
    caches[1][1][0].append(kept[0][0])
    assert torch.equal(caches[0][1][1].decode(), kept[0][1])
    first, second = (reader.arena.nbytes for reader, _ in caches)
    assert first + second <= host_arena().stats()["reserved_bytes"]


def test_a_history_that_is_gone_gives_its_memory_back() -> None:
    reader, histories = grown_histories()
    before, each = reader.arena.nbytes, histories[0].words.nbytes
    histories.pop(0)
    assert before - each - 1024 <= reader.arena.nbytes <= before - each
    first = histories[0].decode()
    histories.append(grown_histories(1)[1][0])
    assert torch.equal(histories[0].decode(), first)


def test_pieces_behind_the_words_are_given_back() -> None:
    arena = HostArena(pin=False, slab_bytes=4 * PIECE)
    store = HostWords(arena, Link(torch.device("cpu")))
    given = torch.arange(20 * PIECE, dtype=torch.int32)
    for begin in range(0, given.shape[0], PIECE):
        store.append(given[begin : begin + PIECE])
    reserved = arena.nbytes
    store.trim()
    assert arena.nbytes == reserved
    before = store.nbytes
    store.truncate(PIECE + 5)
    store.trim()
    assert PIECE + 5 <= store.nbytes // 4 < 4 * PIECE
    assert (
        reserved - 1.01 * (before - store.nbytes)
        <= arena.nbytes
        <= reserved - (before - store.nbytes)
    )
    store.append(given)
    assert torch.equal(store.merged()[: PIECE + 5], given[: PIECE + 5])
    assert torch.equal(store.merged()[PIECE + 5 : store.n_words], given)
    store.truncate(0)
    store.trim()
    assert store.nbytes == 0


def test_pieces_that_are_merged_are_kept_for_a_fetch_that_was_planned_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(words, "MIN_PIECE_WORDS", 1 << 8)
    _, [history] = grown_histories(1)
    store = history.words
    assert isinstance(store, HostWords)
    out = torch.zeros(store.n_words, dtype=torch.int32)
    planned = store.transfers(out)
    expected = store.merged()[: store.n_words].clone()
    others = grown_histories(2)
    for target, source in planned:
        target.copy_(source)
    assert torch.equal(out, expected) and len(planned) > 1 and others
