"""Invariant bit packing once more, slowly, from the text of the format and nothing of `core/`.

`read_rows` decodes packed rows as DESIGN.md, section 3, describes them. `packed_bits` and
`row_words` are the sizes that the published algorithm (EuroSys'26, section 4) and the format give.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

THRESHOLDS = [0.5 + 0.05 * step for step in range(11)]


class Bits:
    """A run of 32-bit words, read from the least significant bit of the first word on."""

    def __init__(self, words: np.ndarray) -> None:
        self.number = int.from_bytes(words.astype("<u4").tobytes(), "little")
        self.size = 32 * len(words)
        self.at = 0

    def take(self, count: int) -> int:
        assert self.at + count <= self.size, "the row ends before its last bit"
        taken = (self.number >> self.at) & ((1 << count) - 1)
        self.at += count
        return taken

    def finish_word(self) -> None:
        assert self.take(-self.at % 32) == 0, "bits between two parts are not zero"


def deposit(bits: int, mask: int) -> int:
    """Put the low bits of `bits` where `mask` is 1, lowest first."""
    result = 0
    while mask:
        lowest = mask & -mask
        if bits & 1:
            result |= lowest
        bits >>= 1
        mask ^= lowest
    return result


def read_row(
    words: np.ndarray, profile: Mapping[str, Any], masks: np.ndarray, values: np.ndarray
) -> bytes:
    """Decode one packed row, which must be exactly as long as its own codes say."""
    width, k = profile["chunk_bytes"], profile["code_bits"]
    everything = (1 << 8 * width) - 1
    chunks = profile["row_bytes"] // width
    groups = -(-chunks // 32)
    where = [0 if profile["uniform"] else i for i in range(chunks)]
    mask = [int(masks[p]) for p in where]
    bits = Bits(words)

    payload = [bits.take((everything & ~m).bit_count()) for m in mask]
    bits.finish_word()
    full = [False] * groups
    if profile["grouped"]:
        full = [bits.take(1) == 1 for _ in range(groups)]
        bits.at = -(-bits.at // 32) * 32
    codes = []
    for all_first in full:
        group = [1] * 32 if all_first else [bits.take(k) for _ in range(32)]
        assert not profile["grouped"] or all_first == (group == [1] * 32)
        codes += group
    assert codes[chunks:] == [1] * (32 * groups - chunks), "missing chunks are coded 1"
    row = []
    for i in range(chunks):
        chunk = deposit(payload[i], everything & ~mask[i])
        if codes[i]:
            chunk |= int(values[where[i]][codes[i] - 1])
        else:
            chunk |= deposit(bits.take(mask[i].bit_count()), mask[i])
        row.append(chunk.to_bytes(width, "little"))
    bits.finish_word()
    assert bits.at == bits.size, "the row is longer than its codes say"
    return b"".join(row)


def unsigned(t: torch.Tensor) -> np.ndarray:
    return t.numpy().view(f"<u{t.element_size()}")


def profile_of(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], np.ndarray, np.ndarray]:
    """Return the profile of a codec's configuration, its masks and its values."""
    profile = config["profile"]
    width, clusters = profile["chunk_bytes"], profile["clusters"]
    positions = 1 if profile["uniform"] else profile["row_bytes"] // width
    masks = np.frombuffer(base64.b64decode(profile["masks"]), f"<u{width}")
    values = np.frombuffer(base64.b64decode(profile["values"]), f"<u{width}")
    return (
        profile,
        masks.reshape(clusters, positions),
        values.reshape(clusters, positions, (1 << profile["code_bits"]) - 1),
    )


def read_rows(config: Mapping[str, Any], parts: Mapping[str, torch.Tensor]) -> list[bytes]:
    """Decode all rows that a codec with this configuration packed."""
    profile, masks, values = profile_of(config)
    words, lengths, bases = unsigned(parts["words"]), unsigned(parts["lengths"]), parts["bases"]
    row_words = -(-profile["row_bytes"] // 4)
    rows = []
    at = 0
    for r, length in enumerate(map(int, lengths)):
        if r % 32 == 0:
            assert int(bases[r // 32]) == at
        size = length or row_words
        row = words[at : at + size]
        if length:
            cluster = int(parts["row_clusters"][r]) if profile["clusters"] > 1 else 0
            rows.append(read_row(row, profile, masks[cluster], values[cluster]))
        else:
            raw = row.astype("<u4").tobytes()
            assert not any(raw[profile["row_bytes"] :])
            rows.append(raw[: profile["row_bytes"]])
        at += size
    assert int(bases[-1]) == at
    assert not words[at:].any() and len(words) == at + 4
    return rows


def row_words(
    chunks: np.ndarray, masks: np.ndarray, values: np.ndarray, code_bits: int, grouped: bool
) -> np.ndarray:
    """Return ``[N]``: words of each packed row, whether or not that is less than raw.

    Parameters
    ----------
    chunks : numpy.ndarray
        Unsigned, ``[N, C]``.
    masks, values : numpy.ndarray
        ``[positions]`` and ``[positions, P]``.
    """
    n, count = chunks.shape
    width = 8 * chunks.itemsize
    masked_bits = np.broadcast_to(np.bitwise_count(masks).astype(np.int64), (count,))
    masked = chunks & masks
    matches = masked[..., None] == values
    missed = ~matches.any(-1)
    payload = -(-int((width - masked_bits).sum()) // 32)
    exceptions = -(-(missed * masked_bits).sum(1) // 32)
    groups = -(-count // 32)
    codes: Any = groups * code_bits
    if grouped:
        not_first = np.zeros((n, groups * 32), bool)
        not_first[:, :count] = ~matches[..., 0]
        codes = -(-groups // 32) + not_first.reshape(n, groups, 32).any(-1).sum(1) * code_bits
    words: np.ndarray = payload + codes + exceptions
    return words


def packed_bits(chunks: np.ndarray, masks: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return ``[N]``: bits of each row as the paper counts them.

    A chunk that equals its value where the mask is 1 saves the mask's bits; every chunk costs one
    participation bit (`getCompressSize` of section 4).
    """
    n, count = chunks.shape
    saved = (((chunks & masks) == values) * np.bitwise_count(masks).astype(np.int64)).sum(1)
    left: np.ndarray = np.full(n, 8 * chunks.itemsize * count) - saved + count
    return left


def bit_shares(chunks: np.ndarray) -> np.ndarray:
    """Return ``[C, bits]``: the share of rows that have each bit set."""
    n, count = chunks.shape
    flat = np.ascontiguousarray(chunks).view(np.uint8).reshape(n, -1)
    bits = np.unpackbits(flat, axis=1, bitorder="little")
    shares: np.ndarray = bits.sum(0).reshape(count, -1) / n
    return shares


def threshold_masks(shares: np.ndarray, threshold: float, dtype: np.dtype) -> np.ndarray:
    """Return ``[C]`` masks: the bits on which at least `threshold` of the rows agree."""
    invariant = np.maximum(shares, 1 - shares) >= threshold - 1e-9
    weights = np.left_shift(np.uint64(1), np.arange(shares.shape[1], dtype=np.uint64))
    masks: np.ndarray = (invariant * weights).sum(1, dtype=np.uint64).astype(dtype)
    return masks


def majority_values(shares: np.ndarray, masks: np.ndarray) -> np.ndarray:
    """Return the paper's Bitval: for each bit of the mask what most rows have."""
    majority = threshold_masks(np.where(shares > 0.5, 1.0, 0.5), 0.75, masks.dtype)
    values: np.ndarray = majority & masks
    return values


def frequent_values(chunks: np.ndarray, masks: np.ndarray) -> np.ndarray:
    """Return for each position the masked chunk that most rows have, the smallest of equals."""
    found = []
    for column in (chunks & masks).T:
        values, counts = np.unique(column, return_counts=True)
        found.append(values[counts.argmax()])
    return np.array(found, chunks.dtype)
