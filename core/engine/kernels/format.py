"""Sizes and offsets of the packed row, format version 1: all arithmetic of the form is here.

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

from dataclasses import dataclass, replace
from math import gcd

import torch

from ...errors import ArgumentError
from .uploads import uploaded

FORMAT_VERSION = 1
WORD_BITS = 32
GROUP_CHUNKS = 32  # chunks whose codes share one group bit
BLOCK_ROWS = 32  # rows that share one entry of `bases`
PAD_WORDS = 4  # zero words behind the last row, so that readers may fetch 16 aligned bytes
MAX_CLUSTERS = 256  # the cluster id of a row is one byte
CHUNK_BYTES = (1, 2, 4, 8)
CODE_BITS = (1, 2, 3)

# Locations of cached rows, as in the paper (IBP section 5) but for the lowest 20 bits, which are
# spare there: bits 63..61 slab, 60..21 byte offset in the slab, 20 packed, 19..0 words of the row.
SLAB_SHIFT = 61
OFFSET_SHIFT = 21
PACKED_BIT = 20
MAX_SLABS = 8
MAX_CACHED_ROW_WORDS = (1 << PACKED_BIT) - 1

# The map from ids to locations: entries of two int64, id and location, in buckets of one line.
LINE_BYTES = 128
BUCKET_ENTRIES = LINE_BYTES // 16
NO_ID = -1  # the id of an empty entry
NO_SLOT = -1  # the slot of a row that has none; smaller ones are marks of a lookup in hand
#: In ids that are known to be good: nothing, whose row of the output is left as it is.
NO_ROW = -(1 << 63)
NOT_CACHED = -1  # the location of an id that has no entry

# Bits are counted in 32-bit integers by the kernels; this keeps every bit offset of a row in range.
MAX_ROW_BYTES = 1 << 27

#: Items shorter than this share packed rows: what is stored of each row takes too much of them.
NARROW_ITEM_BYTES = 64
#: Bytes of a row that items share, about. Longer ones save little more, and a gather of one item
#: reads and decodes the whole row.
SHARED_ROW_BYTES = 256
#: Longest row that items may share: tiles of such rows fit the kernels' stage.
MAX_SHARED_ROW_BYTES = 4096


def ceil_div(a: int, b: int) -> int:
    """Return a / b rounded up, for non-negative integers."""
    return -(-a // b)


def shared_row_items(item_bytes: int) -> int:
    """Return how many items of a table share a packed row; 1 where items are long enough.

    Such a row is a multiple of 4 bytes, and of 16 where that keeps it short: those are decoded by
    wider loads and stores, and every width of a chunk divides them.
    """
    if not 0 < item_bytes < NARROW_ITEM_BYTES:
        return 1
    unit = 16 // gcd(16, item_bytes)
    if unit * item_bytes > SHARED_ROW_BYTES:
        unit = 4 // gcd(4, item_bytes)
    return unit * max(1, round(SHARED_ROW_BYTES / (unit * item_bytes)))


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
    byte_fields : tuple of (int, int)
        The same of a byte of the mask, where all of its bytes are equal.
    """

    format: RowFormat
    tables: torch.Tensor
    starts: torch.Tensor
    fields: tuple[tuple[int, int], ...]
    byte_fields: tuple[tuple[int, int], ...]

    def to(self, device: torch.device) -> RowLayout:
        """Return the layout with its tables on `device`; see `uploads.in_stream_order`."""
        tables, starts = (uploaded(t, device) for t in (self.tables, self.starts))
        return RowLayout(self.format, tables, starts, self.fields, self.byte_fields)


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


@dataclass(frozen=True, eq=False)
class TableStorage:
    """A table of rows of which any may be packed, as the kernels that gather by id read it.

    `words` and `overflow` lie in host memory or on the device, the other tensors on the device
    that gathers. Three kinds of table:

    - compact: rows back to back as in `RowStorage`; `bases` and `lengths` find a row;
    - in place: row r at word ``r * row_words``; bit r of `flags` says that it is packed;
    - raw: row r at byte ``r * row_bytes``; `flags` is None.

    Ids name items. An item is a row, or, where items are narrow, several of them share a row: id i
    is item ``i % items_per_row`` of row ``i // items_per_row``. Raw tables have one item a row.

    Parameters
    ----------
    n_rows : int
        Rows of the table.
    words : torch.Tensor
        int32, with PAD_WORDS readable words behind the last row.
    bases, lengths : torch.Tensor or None
        As in `RowStorage`, but a row may be shorter than `lengths` says; None when in place.
    row_clusters : torch.Tensor or None
        uint8 ``[N]``; None when there is one cluster.
    flags : torch.Tensor or None
        int32 ``[ceil(N / 32)]``, bit ``r & 31`` of word ``r >> 5`` is 1 when row r is packed.
    moved : torch.Tensor or None
        int32 ``[ceil(N / 32)]``, 1 when row r no longer fits its place, whose first word then says
        in which place of `overflow` it lies; None when no row has moved.
    overflow : torch.Tensor or None
        int32, raw rows at multiples of row_words, with PAD_WORDS behind.
    typical_words : int
        In place: words of a packed row that are fetched at first; longer rows are fetched on.
    max_words : int
        Words that a row's place in shared memory holds: at least those of the longest packed row.
        Longer raw rows are gathered more slowly.
    max_packed_words : int
        Words of the longest packed row; 0 when that is not known.
    items_per_row : int
        Items of a row.
    filler_items : int
        Items of the last row that the table does not have.
    """

    n_rows: int
    words: torch.Tensor
    bases: torch.Tensor | None = None
    lengths: torch.Tensor | None = None
    row_clusters: torch.Tensor | None = None
    flags: torch.Tensor | None = None
    moved: torch.Tensor | None = None
    overflow: torch.Tensor | None = None
    typical_words: int = 0
    max_words: int = 0
    max_packed_words: int = 0
    items_per_row: int = 1
    filler_items: int = 0

    @property
    def n_items(self) -> int:
        """Items of the table: the ids that it has."""
        return self.n_rows * self.items_per_row - self.filler_items


def unsigned_lengths(lengths: torch.Tensor) -> torch.Tensor:
    """Return `lengths` of rows as int64: they are unsigned, whatever torch's dtype says."""
    if lengths.dtype == torch.uint8:
        return lengths.to(torch.int64)
    return lengths.to(torch.int64) & ((1 << 8 * lengths.element_size()) - 1)


def words_of_rows(lengths: torch.Tensor, row_words: int) -> torch.Tensor:
    """Return int64 ``[N]``, the words of each row; rows kept raw take `row_words`."""
    return torch.where(lengths == 0, row_words, unsigned_lengths(lengths))


def bases_of_rows(words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where blocks of BLOCK_ROWS rows begin, on the device of the rows.

    Parameters
    ----------
    words : torch.Tensor
        int64 ``[N]``, of each row.

    Returns
    -------
    bases : torch.Tensor
        As in `RowStorage`, of rows that begin at word 0.
    by_block : torch.Tensor
        int64 ``[ceil(N / 32)]``, the words of each block.
    """
    padded = torch.nn.functional.pad(words, (0, -words.shape[0] % BLOCK_ROWS))
    by_block = padded.view(-1, BLOCK_ROWS).sum(1)
    return torch.nn.functional.pad(by_block.cumsum(0), (1, 0)), by_block


def check_sizes(table: TableStorage, clusters: int) -> None:
    """Refuse a table whose tensors are too small for its number of rows."""
    blocks, words = ceil_div(table.n_rows, BLOCK_ROWS), ceil_div(table.n_rows, WORD_BITS)
    wanted = {
        "bases": (table.bases if table.lengths is not None else None, blocks),
        "lengths": (table.lengths, table.n_rows),
        "row_clusters": (table.row_clusters, table.n_rows if clusters > 1 else 0),
        "flags": (table.flags, words),
        "moved": (table.moved, words),
    }
    for name, (part, size) in wanted.items():
        if part is not None and part.numel() < size:
            raise ArgumentError(
                f"table.{name}: {part.numel()} entries, a table of {table.n_rows} rows has {size}"
            )
    if table.lengths is not None and table.bases is None:
        raise ArgumentError("table.bases: None, a table with lengths has them")


@dataclass(frozen=True, eq=False)
class CacheStorage:
    """Cached rows of a table, as the kernels that gather by id read them.

    Parameters
    ----------
    entries : torch.Tensor
        int64 ``[buckets * BUCKET_ENTRIES, 2]`` on the device that gathers: the number of a row,
        and its location. `buckets` is a power of two. Row r belongs to the first bucket with a free
        entry from bucket ``mix(r) % buckets`` on, around the end (`kernels.cpu.maps.mix`).
    slabs : tuple of torch.Tensor
        int32, one a device; packed rows on words and raw rows on bytes, with PAD_WORDS behind.
    addresses : torch.Tensor
        int64 ``[MAX_SLABS]`` on the device that gathers: where each slab starts; 0: none.
    max_words : int
        As in `TableStorage`, of the cached rows.
    row_clusters : torch.Tensor or None
        uint8 ``[N]`` on the device that gathers, of the rows of a raw table, where those that are
        cached are packed by a codec with clusters.
    holds_items : bool
        Whether what is cached are raw items, by their ids, though items of the table share rows.
    """

    entries: torch.Tensor
    slabs: tuple[torch.Tensor, ...]
    addresses: torch.Tensor
    max_words: int = 0
    row_clusters: torch.Tensor | None = None
    holds_items: bool = False


def read_together(table: TableStorage, cache: CacheStorage | None) -> TableStorage:
    """Return a table with which one gather reads its rows and the cached ones.

    A raw table has no clusters of its own: those of a cache that packs its rows take their place.
    """
    if cache is None or cache.row_clusters is None:
        return table
    return replace(table, row_clusters=cache.row_clusters)
