"""Tokens that were not packed are put back after packing them was part of what failed."""

from __future__ import annotations

import pytest
import torch

from bitslab.kvcache import CodecPlans, HistoryReader, PackedHistory, RawTokens, put_back
from tests.helpers import same_bits
from tests.kvcache.lossy_codec import RoundingPlans
from tests.kvcache.test_lossy_history import BLOCK, CPU, DIM, HEADS, expected, make, normal


def raw_of(history: PackedHistory, last: int | None = None) -> RawTokens:
    """Return what is not packed, or a copy of its last tokens."""
    tail, packed = history.unpacked.tail, history.packed_tokens
    if last is None:
        return RawTokens(history.head, tail.memory, tail.length, packed)
    copied = history.tail[:, :, -last:].clone()
    return RawTokens(history.head, copied, last, packed + tail.length - last)


@pytest.mark.parametrize("room", [0, 64])
@pytest.mark.parametrize("new", [1, 5, 100])
@pytest.mark.parametrize("there", [3, 20, 40, 75])
def test_what_was_not_packed_is_put_back(there: int, new: int, room: int) -> None:
    history = make(RoundingPlans(), tail_room_tokens=room)
    tokens = normal(2, HEADS, there + 2 * new, DIM)
    for n in range(there):
        history.append(tokens[:, :, n : n + 1])
    before, packed, raw = history.decode(), history.packed_tokens, raw_of(history)
    for _ in range(2):  # an error again
        history.append(tokens[:, :, there : there + new])
        history.append(tokens[:, :, there + new :])
        put_back(history, raw, there)
        put_back(history, raw, there)  # which changes nothing
        assert history.packed_tokens == packed
        assert same_bits(history.decode(), before)
    history.append(tokens[:, :, there:])
    assert same_bits(history.decode(), expected(history, tokens))


@pytest.mark.parametrize("lossy", [True, False])
@pytest.mark.parametrize("packs", [True, False])
def test_the_last_tokens_of_a_prompt_that_was_packed_meanwhile(packs: bool, lossy: bool) -> None:
    history = make(RoundingPlans())
    if not lossy:
        store = HistoryReader(CPU, offload=True, sm_budget=None).new_words()
        history = PackedHistory(store, CodecPlans(), "k", window=8, block_tokens=BLOCK, sinks=4)
    tokens = normal(2, HEADS, 150, DIM)
    history.append(tokens[:, :, :100], pack=False)
    raw = raw_of(history, 21)
    history.append(tokens[:, :, 100:], pack=packs)
    packed = history.packed_tokens
    put_back(history, raw, 100)
    found = history.decode()
    assert (packed > 79) is packs
    assert history.length == 100
    assert same_bits(found[:, :, 79:], tokens[:, :, 79:100])
    if lossy and packs:
        assert history.packed_tokens == 75
        assert same_bits(found, expected(history, tokens[:, :, :100]))
    else:
        assert torch.equal(found, tokens[:, :, :100])
    history.append(tokens[:, :, 100:])
    assert history.length == 150
