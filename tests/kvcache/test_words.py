"""Host memory of histories: pieces that never move, some of them made ahead in a thread."""

from __future__ import annotations

import threading
from itertools import pairwise

import pytest
import torch

from bitslab.errors import BitslabError
from bitslab.kvcache import arena as arenas
from bitslab.kvcache.arena import AHEAD, THREAD_NAME, HostArena
from bitslab.kvcache.link import Link
from bitslab.kvcache.words import HostWords

PIECE, PART = 10_240, 1024  # words


class Buffers:
    """Notes who made which buffers, and refuses some."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead: list[int] = []
        self.asked: list[int] = []
        self.error: Exception | None = None  # of the thread
        make = arenas._buffer

        def noted(nbytes: int, *, pin: bool) -> torch.Tensor:
            if threading.current_thread().name.startswith(THREAD_NAME):
                self.ahead.append(nbytes)
                if self.error is not None:
                    raise self.error
            else:
                self.asked.append(nbytes)
            return make(nbytes, pin=pin)

        monkeypatch.setattr(arenas, "_buffer", noted)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arenas, "MIN_PART_WORDS", PART)


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
    assert arena.nbytes <= 1.1 * max(taken, 4 * PIECE * slab_pieces)


def test_what_is_expected_and_does_not_come_costs_few_buffers(buffers: Buffers) -> None:
    arena = HostArena(pin=False, slab_bytes=4 * PIECE)
    pieces = [arena.take(PIECE, PIECE, others=1000), arena.take(PIECE, PIECE)]
    assert_apart(pieces)
    assert len(buffers.ahead) + len(buffers.asked) <= len(pieces) + AHEAD


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
