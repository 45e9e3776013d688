"""Sizes and offsets of the packed row, format version 1: the one home of this arithmetic.

A row of ``row_bytes`` bytes is cut into chunks of ``chunk_bytes``. Its packed form is a run of
little-endian 32-bit words with four parts, each starting on a word:

1. payload: of every chunk the bits where the mask is 0, lowest first, with no gaps;
2. group bits (``grouped`` profiles only): bit g is 1 when all codes of group g are 1;
3. codes: 32 codes of ``code_bits`` bits for each stored group, missing chunks coded 1;
4. exceptions: of every chunk of code 0 the bits where the mask is 1, with no gaps.

Rows lie back to back. Row ``r`` of a table starts at word ``bases[r // 32]`` plus the words of the
rows before it in its block of 32; ``lengths[r]`` is its length in words, 0 for a row kept raw.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

FORMAT_VERSION = 1
WORD_BITS = 32
GROUP_CHUNKS = 32  # chunks whose codes share one group bit
BLOCK_ROWS = 32  # rows that share one entry of `bases`
PAD_WORDS = 4  # zero words behind the last row, so that readers may fetch 16 aligned bytes
MAX_CLUSTERS = 256  # the cluster id of a row is one byte
CHUNK_BYTES = (1, 2, 4, 8)
CODE_BITS = (1, 2, 3)

# Bits are counted in 32-bit integers by the kernels; this keeps every bit offset of a row in range.
MAX_ROW_BYTES = 1 << 27


def ceil_div(a: int, b: int) -> int:
    """Return a / b rounded up, for non-negative integers."""
    return -(-a // b)


@dataclass(frozen=True)
class RowFormat:
    """Everything about a packed row that is known from its profile's options alone.

    Parameters
    ----------
    row_bytes : int
        Bytes of a row before packing.
    chunk_bytes : int
        Bytes of a chunk, 1, 2, 4 or 8; divides `row_bytes`.
    code_bits : int
        Bits of a participation code, 1 to 3.
    grouped : bool
        Whether groups of 32 chunks whose codes are all 1 are stored as one bit.
    uniform : bool
        Whether one mask serves all chunk positions.
    clusters : int
        Number of profiles that rows choose from, 1 to 256.
    """

    row_bytes: int
    chunk_bytes: int
    code_bits: int
    grouped: bool
    uniform: bool
    clusters: int = 1

    @property
    def chunks(self) -> int:
        """Chunks of a row."""
        return self.row_bytes // self.chunk_bytes

    @property
    def positions(self) -> int:
        """Chunk positions with a mask of their own: 1 when uniform."""
        return 1 if self.uniform else self.chunks

    @property
    def row_words(self) -> int:
        """Words of a row kept raw."""
        return ceil_div(self.row_bytes, 4)

    @property
    def groups(self) -> int:
        """Groups of 32 chunks, the last one possibly short."""
        return ceil_div(self.chunks, GROUP_CHUNKS)

    @property
    def group_words(self) -> int:
        """Words of the group bits."""
        return ceil_div(self.groups, WORD_BITS) if self.grouped else 0

    @property
    def values(self) -> int:
        """Values of a masked chunk that have a code."""
        return (1 << self.code_bits) - 1

    @property
    def levels(self) -> int:
        """Steps of a bit move: log2 of the bits of a chunk."""
        return (8 * self.chunk_bytes).bit_length() - 1

    # Sections of the kernels' tables, each `positions` entries long: the mask, the values by
    # code, the steps that move the payload's bits, the steps that move an exception's bits.

    @property
    def keep_section(self) -> int:
        """First section with the steps of the payload's bits."""
        return 1 + self.values

    @property
    def mask_section(self) -> int:
        """First section with the steps of the masked bits."""
        return self.keep_section + self.levels

    @property
    def sections(self) -> int:
        """Number of sections of the tables."""
        return self.mask_section + self.levels

    @property
    def table_dtype(self) -> torch.dtype:
        """Integer dtype that holds a chunk in the kernels' tables."""
        return torch.int64 if self.chunk_bytes == 8 else torch.int32

    @property
    def length_dtype(self) -> torch.dtype:
        """Smallest dtype that holds the words of a packed row, always fewer than `row_words`."""
        if self.row_words <= 1 << 8:
            return torch.uint8
        return torch.int16 if self.row_words <= 1 << 16 else torch.int32

    def row_metadata_bytes(self, n_rows: int) -> int:
        """Bytes of bases, lengths, cluster ids and padding of a table of `n_rows` rows."""
        per_row = self.length_dtype.itemsize + (1 if self.clusters > 1 else 0)
        bases = 8 * (ceil_div(n_rows, BLOCK_ROWS) + 1)
        return per_row * n_rows + bases + 4 * PAD_WORDS


@dataclass(frozen=True, eq=False)
class RowLayout:
    """A row format with the tables that the kernels read, on one device.

    Parameters
    ----------
    format : RowFormat
        Sizes of the packed row.
    tables : torch.Tensor
        ``[clusters, sections, positions]`` of `format.table_dtype`.
    starts : torch.Tensor
        int32 ``[clusters, chunks + 1]``: the payload's bit offset of each chunk and its end; for
        a uniform profile ``[clusters, 2]``: 0 and the payload bits of one chunk.
    fields : tuple of (int, int)
        For each cluster of a uniform profile whose mask is one run of bits its lowest bit and its
        width, else (0, 0).
    """

    format: RowFormat
    tables: torch.Tensor
    starts: torch.Tensor
    fields: tuple[tuple[int, int], ...]

    def to(self, device: torch.device) -> RowLayout:
        """Return the layout with its tables on `device`."""
        return RowLayout(self.format, self.tables.to(device), self.starts.to(device), self.fields)


@dataclass(frozen=True, eq=False)
class RowStorage:
    """The tensors that hold packed rows, on one device.

    Parameters
    ----------
    words : torch.Tensor
        int32, the packed rows back to back and PAD_WORDS zero words behind them.
    bases : torch.Tensor
        int64 ``[ceil(N / 32) + 1]``, the word at which each block of 32 rows starts, and the end.
    lengths : torch.Tensor
        ``[N]`` of `RowFormat.length_dtype`, words of each row; 0 for a row kept raw.
    row_clusters : torch.Tensor
        uint8 ``[N]``, or ``[0]`` when there is one cluster.
    """

    words: torch.Tensor
    bases: torch.Tensor
    lengths: torch.Tensor
    row_clusters: torch.Tensor
