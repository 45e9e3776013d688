"""What a history costs as its tokens come: bytes that are copied, codecs that are fitted again."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bitslab.kvcache import fitting, packed_tokens
from tests.kvcache.test_history import assert_same, make, normal


class Copies(TorchDispatchMode):
    """Counts the bytes that are copied."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = {"clone": 0, "copy_": 0}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if name in self.nbytes:
            self.nbytes[name] += found.nbytes
        return found


@pytest.mark.parametrize("pieces", [False, True], ids=["one-tensor", "pieces"])
def test_copies_of_a_prompt_do_not_grow_with_its_pieces(
    pieces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither what is left of it nor what is packed is copied anew for each piece."""
    tokens = normal(1, 2, 4096 + 8, 64)
    nbytes: list[dict[str, int]] = []
    for n_pieces in (4, 32):
        monkeypatch.setattr(packed_tokens, "PIECE_BYTES", 4096 * 256 // n_pieces)
        history = make(pieces=pieces, block_tokens=64)
        with Copies() as copies:
            history.append(tokens)
        assert history.packed_tokens == 4096
        assert history.tail.untyped_storage().nbytes() == history.tail.nbytes
        assert_same(history, tokens)
        nbytes.append(copies.nbytes)
    few, many = nbytes
    assert many["clone"] <= 1.2 * few["clone"] + tokens.nbytes
    assert many["copy_"] <= 1.2 * few["copy_"]
    assert many["copy_"] <= 1.2 * 4 * history.words.n_words + tokens.nbytes / 8


def test_what_is_left_of_a_prompt_is_no_memory_of_the_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packed_tokens, "PIECE_BYTES", 1 << 11)
    given = normal(1, 2, 1000, 64)
    tokens = given.clone()
    history = make(block_tokens=64, window=900)
    history.append(given)
    assert 0 < history.packed_tokens < 100
    given.zero_()
    assert_same(history, tokens)


def test_tokens_that_change_their_kind_again_and_again_are_fitted_to_by_the_share() -> None:
    """As many fits as the logarithm of the tokens, not one for each change."""
    kinds = normal(1, 2, 16 * 6, 64), normal(1, 2, 16 * 6, 64) * 1e-20
    history = make()
    counts = []
    for phase in range(96):
        for block in kinds[phase % 2].split(16, dim=2):
            history.append(block)
        counts.append((history.packed.refits, len(history.segments)))
    assert counts[3] == (3, 4)  # as soon as they change
    (middle, _), (end, segments) = counts[47], counts[95]
    assert end - middle <= 1 + math.log(2) / math.log(1 + fitting.REFIT_SHARE)
    assert segments <= 1 + end
    expected = [kinds[phase % 2] for phase in range(96)]
    assert_same(history, torch.cat(expected, dim=2))
    history.crop(16 * 6 * 4)
    for _ in range(2):
        history.append(normal(1, 2, 16 * 6, 64) * 1e10)
        for block in (normal(1, 2, 16 * 6, 64) * 1e10).split(16, dim=2):
            history.append(block)
    assert history.packed.refits > end  # what was removed does not count
