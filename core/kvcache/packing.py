"""Tokens as rows of a codec, plans of codecs, and packing without waiting for the GPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch

from ..engine.codecs import InvariantCodec, RowCodec, RowKernels
from ..engine.codecs.base import rows_as_bytes
from ..engine.kernels import kernels_for
from ..engine.kernels.format import ceil_div, unsigned_lengths

#: Rows are made of as many tokens as this many bytes take: shorter rows carry more metadata, and
#: rows of several lines decode faster.
ROW_BYTES = 256
#: Bytes of rows that a codec is fitted to; more took twice as long and saved 0.04 % more on
#: MiniLM's K and V.
SAMPLE_BYTES = 128 << 10
#: As much of tiles, whose codecs learn the spread of each channel of each head.
TILE_SAMPLE_BYTES = 1 << 20
#: Rows over which the bytes of a profile are counted: it is kept for a whole history.
HISTORY_ROWS = 1 << 16
#: Layers pack alike if their packed shares of the raw bytes differ by this at most.
SHARE_DIFFERENCE = 0.02
#: A bit is steady if this share of the chunks agree on it.
STEADY_SHARE = 0.9
#: Share of the raw bytes that a codec must save, or rows are kept raw.
LEAST_GAIN = 0.01


@dataclass(frozen=True)
class TokenRows:
    """Shape of the rows that tokens of one layer become.

    A row is `tokens_per_row` consecutive tokens of one head, so that rows decoded in the order of
    batch, head and time are a contiguous ``[B, H, T, D]``.

    Parameters
    ----------
    heads, dim : int
        H and D.
    dtype : torch.dtype
        Of the elements.
    block_tokens : int
        Tokens of a block, the unit that is packed; a power of two.
    tile_tokens : int, optional
        Tokens of a row, where rows are tiles of a codec; a power of two up to `block_tokens`. Left
        out, the least power of two whose tokens take ROW_BYTES, or a block.
    """

    heads: int
    dim: int
    dtype: torch.dtype
    block_tokens: int
    tile_tokens: int | None = None

    @cached_property
    def tokens_per_row(self) -> int:
        """Consecutive tokens of one head that make a row."""
        if self.tile_tokens is not None:
            return self.tile_tokens
        tokens = 1
        while tokens < self.block_tokens and tokens * self.token_bytes < ROW_BYTES:
            tokens *= 2
        return tokens

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of a token of one head."""
        return self.dim * self.dtype.itemsize

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.tokens_per_row * self.token_bytes

    @cached_property
    def head_rows(self) -> int:
        """Rows of a block of one head of one sequence."""
        return self.block_tokens // self.tokens_per_row

    def rows_of(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return whole blocks of tokens as rows, in the order of block, sequence, head and time.

        Parameters
        ----------
        tokens : torch.Tensor
            ``[B, H, n * block_tokens, D]``, of any strides.

        Returns
        -------
        torch.Tensor
            ``[n * B * H * head_rows, tokens_per_row * D]``, contiguous.
        """
        n = tokens.shape[2] // self.block_tokens
        shape = (n, self.head_rows, self.tokens_per_row)
        blocks = torch.unflatten(tokens, 2, shape).permute(2, 0, 1, 3, 4, 5)
        return blocks.reshape(-1, self.tokens_per_row * self.dim)


@dataclass(frozen=True)
class _Planned:
    """A codec, the share of the raw bytes that its sample took, and the steady bits it leaves."""

    codec: InvariantCodec
    share: float
    steady: int


class Plans(Protocol):
    """What fits the codecs of histories."""

    def fit(self, kind: str, sample: torch.Tensor, *, search_all: bool = False) -> RowCodec:
        """Return a codec of one cluster for rows like those of a sample; see `CodecPlans.fit`."""
        ...


class CodecPlans:
    """Fits invariant bit packing; the best options of one layer serve others that pack alike.

    Layers of a model differ in the values that their exponents take, not in what a chunk is. Where
    all chunks have one mask, a layer takes that of the layer before, and learns its values alone,
    in a quarter of the time, if they pack it as well as the other and no bit outside of the mask is
    steadier: with the same result on MiniLM's K and V. Else masks are learnt too, with the options
    of the other layer where these are positional.
    """

    def __init__(self) -> None:
        self._planned: dict[tuple[str, torch.dtype, int], _Planned] = {}

    def fit(self, kind: str, sample: torch.Tensor, *, search_all: bool = False) -> InvariantCodec:
        """Return a codec for rows like those of a sample.

        Parameters
        ----------
        kind : str
            Kind of the rows, ``"k"`` or ``"v"``.
        sample : torch.Tensor
            ``[n, elements]`` on the CPU.
        search_all : bool
            Whether to search all options again.
        """
        key = (kind, sample.dtype, sample.shape[1])
        planned = None if search_all else self._planned.get(key)
        options: dict[str, Any] = {}
        if planned is not None and planned.share <= 1 - LEAST_GAIN:
            f = planned.codec.profile.format
            if f.uniform:
                refitted = planned.codec.refitted(sample)
                steadier = _steady_bits(refitted, sample) & ~planned.steady
                more = abs(_packed_share(refitted, sample) - planned.share)
                if not steadier and more <= SHARE_DIFFERENCE:
                    return refitted
            else:
                options = {
                    "chunk_bytes": f.chunk_bytes,
                    "code_bits": f.code_bits,
                    "grouped": f.grouped,
                    "uniform": f.uniform,
                }
        codec = InvariantCodec.fit(sample, n_rows=max(HISTORY_ROWS, sample.shape[0]), **options)
        share = _packed_share(codec, sample)
        steady = _steady_bits(codec, sample) if codec.profile.format.uniform else 0
        self._planned[key] = _Planned(codec, share, steady)
        return codec


def _packed_share(codec: InvariantCodec, sample: torch.Tensor) -> float:
    return float(codec.packed_bytes(sample).sum()) / sample.nbytes


def _steady_bits(codec: InvariantCodec, sample: torch.Tensor) -> int:
    """Return the bits outside of a uniform codec's mask that are nearly always the same."""
    profile = codec.profile
    rows = rows_as_bytes(sample, profile.format.row_bytes).contiguous()
    counts = kernels_for(rows.device).count_bits(rows, profile.format.chunk_bytes).sum(0)
    share = counts.cpu().numpy() / (rows.numel() // profile.format.chunk_bytes)
    steady = np.packbits(np.maximum(share, 1 - share) >= STEADY_SHARE, bitorder="little")
    return int.from_bytes(steady.tobytes(), "little") & ~int(profile.masks.flat[0])


def draw_rows(rows: TokenRows, tokens: torch.Tensor) -> torch.Tensor:
    """Return about SAMPLE_BYTES of rows spread over whole blocks of tokens, on their device.

    Of tiles about TILE_SAMPLE_BYTES, all rows of some blocks: their codecs tell heads apart.

    Parameters
    ----------
    rows : TokenRows
        What a row is.
    tokens : torch.Tensor
        ``[B, H, n * block_tokens, D]``.
    """
    blocks = torch.unflatten(tokens, 2, (-1, rows.block_tokens))
    block_bytes = blocks[:, :, 0].numel() * tokens.itemsize
    if rows.tile_tokens is not None:
        step = max(1, ceil_div(blocks.shape[2] * block_bytes, TILE_SAMPLE_BYTES))
        return rows.rows_of(blocks[:, :, ::step].flatten(2, 3))
    step = max(1, blocks.shape[2] * block_bytes // (16 * SAMPLE_BYTES))
    some = rows.rows_of(blocks[:, :, ::step].flatten(2, 3))
    # An odd step visits all heads and all rows of a block, whose numbers are often even.
    step = max(1, some.shape[0] * rows.row_bytes // SAMPLE_BYTES)
    return some[:: step - 1 + step % 2].contiguous()


@dataclass(frozen=True, eq=False)
class Packed:
    """Packed rows; the device may still be writing them.

    Parameters
    ----------
    words : torch.Tensor
        int32, at least as many as the rows take.
    lengths : torch.Tensor
        ``[n]`` as in `RowStorage`.
    bases : torch.Tensor
        int64 ``[ceil(n / 32) + 1]`` as in `RowStorage`.
    sizes : torch.Tensor
        int64 ``[2]``: words of all rows, and of the longest one that is packed.
    """

    words: torch.Tensor
    lengths: torch.Tensor
    bases: torch.Tensor
    sizes: torch.Tensor


def pack_rows(rows: torch.Tensor, kernels: RowKernels) -> Packed:
    """Pack rows on their device, without waiting for it.

    Parameters
    ----------
    rows : torch.Tensor
        uint8 ``[n, row_bytes]``, contiguous.
    kernels : RowKernels
        On the same device.
    """
    kernels_for(rows.device)  # raises the error of an earlier decode there
    packed = kernels.pack_rows(rows)
    sizes = torch.stack([packed.bases[-1], unsigned_lengths(packed.lengths).max()])
    return Packed(packed.words, packed.lengths, packed.bases, sizes)
