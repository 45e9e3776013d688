"""Damaged blobs of every codec on a GPU: cut off at every byte, with every bit flipped."""

from __future__ import annotations

import functools

import pytest
import torch

import bitslab
from bitslab.engine.codecs import Blob, BlobCodec
from bitslab.engine.codecs.blob import ALIGN_BYTES
from tests.engine.codecs.test_blob_contract import CASES, Case, small
from tests.helpers import refusal_on_gpu, same_bits

pytestmark = pytest.mark.gpu

#: LZ4 needs nvCOMP on a GPU.
ON_GPU = {name: case for name, case in CASES.items() if "cuda" in case.cls.device_types}
#: Elements before and behind what is decoded.
GUARD = 64
#: What the header says in these bytes is checked in every form.
CHECKED_BYTES = 24

every_case = pytest.mark.parametrize("case", ON_GPU.values(), ids=ON_GPU)


def refused_by(
    codec: BlobCodec, blobs: torch.Tensor, ends: list[int], t: torch.Tensor
) -> tuple[list[bool], torch.Tensor]:
    """Decode blobs ``[n, bytes]`` up to their ends; return which are refused, and what comes out.

    Each is decoded to memory of its own, and nothing may be written beside it.
    """
    memory = torch.full((len(ends), 2 * GUARD + t.numel()), 7, dtype=t.dtype, device=blobs.device)
    found = memory[:, GUARD:-GUARD].unflatten(1, t.shape)
    refused = []
    for data, end, out in zip(blobs, ends, found, strict=True):
        blob = Blob(data[:end], t.shape, t.dtype)
        error = refusal_on_gpu(functools.partial(codec.decode, blob, out))
        # Rows of ibp have the words of packed rows.
        assert not error or any(word in str(error) for word in ("blob: ", "row ", "damaged")), error
        refused.append(error is not None)
    assert (memory[:, :GUARD] == 7).all() and (memory[:, -GUARD:] == 7).all()
    return refused, found


def copies_of(blob: Blob, count: int, device: str) -> torch.Tensor:
    """Return the bytes of a blob so many times, uint8 ``[count, bytes]``, each aligned."""
    n = len(blob.data)
    padded = torch.zeros(count, -(-n // ALIGN_BYTES) * ALIGN_BYTES, dtype=torch.uint8)
    padded[:, :n] = blob.data
    return padded.to(device)


@every_case
def test_blobs_cut_off_at_every_byte_are_refused(case: Case, device: str = "cuda") -> None:
    """Also where what is missing lies behind them."""
    codec, t, blob = small(case)
    ends = list(range(len(blob.data)))
    refused, _ = refused_by(codec, copies_of(blob, len(ends), device), ends, t)
    assert all(refused), [end for end in ends if not refused[end]]


@every_case
def test_every_flipped_bit_is_refused_or_harmless_to_others(
    case: Case, device: str = "cuda"
) -> None:
    codec, t, blob = small(case)
    n = len(blob.data)
    blobs = copies_of(blob, 8 * n, device)
    flipped = torch.arange(8 * n, device=device)
    bits = torch.ones_like(flipped) << flipped % 8
    blobs[flipped, flipped // 8] ^= bits.to(torch.uint8)
    refused, found = refused_by(codec, blobs, [n] * (8 * n), t)
    assert sum(refused) >= 8 * 20
    expected = codec.decode(blob)
    for place in range(8 * CHECKED_BYTES):
        assert refused[place] or same_bits(found[place].cpu(), expected), f"bit {place}"
    # What follows is as if nothing had been.
    assert same_bits(codec.decode(blob.to(device)).cpu(), expected)
    bitslab.raise_pending_errors()
