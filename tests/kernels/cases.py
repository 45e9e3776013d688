"""Rows and profiles that reach every path of the kernels, and how to pack them with a backend."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from bitslab.codecs.base import elements
from bitslab.codecs.invariant.codec import InvariantCodec
from bitslab.codecs.invariant.layout import build_layout
from bitslab.codecs.invariant.profile import Profile
from bitslab.kernels import cpu
from bitslab.kernels.cuda.source import BYTE_FIELDS, Variant
from bitslab.kernels.format import BLOCK_ROWS, RowFormat, RowLayout, RowStorage, ceil_div


@dataclass
class Case:
    """Rows with a profile that packs most of them."""

    layout: RowLayout
    profile: Profile
    rows: torch.Tensor  # uint8 [N, row_bytes]

    @property
    def codec(self) -> InvariantCodec:
        """A codec with this profile, of uint8 rows."""
        return InvariantCodec(self.profile, (self.layout.format.row_bytes,), torch.uint8)


def make_case(
    variant: Variant, *, clusters: int = 1, n_rows: int = 70, row_bytes: int | None = None, seed=0
) -> Case:
    """Return rows that match the profile to different degrees, some of them too little to pack.

    The rows' size makes the decoder take just this variant: 16-byte stores need rows of a
    multiple of 16 bytes.
    """
    rng = np.random.default_rng([seed, clusters, n_rows, *variant.name.encode()])
    width = variant.chunk_bytes
    dtype = np.dtype(f"u{width}")
    if row_bytes is None:
        if variant.vector > 1:
            row_bytes = 16 * int(rng.integers(4, 90))
        else:
            row_bytes = width * (2 * int(rng.integers(2, 90)) + 1)
    fmt = RowFormat(row_bytes, width, variant.code_bits, variant.grouped, variant.uniform, clusters)
    shape = (clusters, fmt.positions)
    masks = _draw(rng, dtype, shape) | _draw(rng, dtype, shape)
    if variant.byte_field:
        masks[:] = 255 << BYTE_FIELDS[width]
    elif variant.uniform and seed % 2:
        masks[:] = ((1 << (5 * width)) - 1) << (2 * width)  # one run of ones
    values = _draw(rng, dtype, (*shape, fmt.values)) & masks[..., None]
    cluster = rng.integers(0, clusters, n_rows)
    mostly_first = rng.random((n_rows, fmt.chunks)) < rng.choice([0.5, 0.995], (n_rows, 1))
    code = np.where(mostly_first, 0, rng.integers(0, fmt.values, (n_rows, fmt.chunks)))
    mask = np.broadcast_to(masks[cluster], (n_rows, fmt.chunks))
    value = np.take_along_axis(
        np.broadcast_to(values[cluster], (n_rows, fmt.chunks, fmt.values)), code[..., None], 2
    )[..., 0]
    hit = rng.random((n_rows, fmt.chunks)) < rng.choice([0.2, 0.9, 0.98, 1.0], (n_rows, 1))
    noise = _draw(rng, dtype, (n_rows, fmt.chunks))
    chunks = np.where(hit, (noise & ~mask) | value, noise).astype(dtype)
    rows = torch.from_numpy(chunks.view(np.uint8).reshape(n_rows, row_bytes).copy())
    return Case(build_layout(fmt, masks, values), Profile(fmt, masks, values), rows)


def _draw(rng: np.random.Generator, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    raw = rng.integers(0, 256, elements(shape) * dtype.itemsize, dtype=np.uint8)
    return raw.view(dtype).reshape(shape)


def pack(kernels, case: Case) -> tuple[RowStorage, dict[str, int]]:
    """Pack the rows of a case with a backend; return the storage and its facts."""
    fmt = case.layout.format
    n = case.rows.shape[0]
    lengths, row_clusters = kernels.packed_words(case.rows, case.layout)
    wide = lengths.to(torch.int64) & ((1 << 8 * lengths.element_size()) - 1)
    words = torch.where(wide == 0, fmt.row_words, wide)
    blocks = ceil_div(n, BLOCK_ROWS)
    by_block = torch.nn.functional.pad(words, (0, blocks * BLOCK_ROWS - n)).view(blocks, -1).sum(1)
    bases = torch.nn.functional.pad(by_block.cumsum(0), (1, 0))
    facts = {"max_row_words": int(words.max()), "max_block_words": int(by_block.max())}
    packed = kernels.encode_rows(
        case.rows, case.layout, lengths, row_clusters, bases, int(bases[-1])
    )
    return RowStorage(packed, bases, lengths, row_clusters), facts


def pack_on_cpu(case: Case) -> tuple[RowStorage, dict[str, int]]:
    """Pack with the Numba twins, the oracle of every other backend."""
    return pack(cpu, case)
