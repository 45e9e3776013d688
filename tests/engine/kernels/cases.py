"""Rows and profiles that reach every path of the kernels, and how to pack them with a backend."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from bitslab.engine.codecs.base import elements
from bitslab.engine.codecs.invariant.codec import InvariantCodec
from bitslab.engine.codecs.invariant.layout import build_layout
from bitslab.engine.codecs.invariant.profile import Profile
from bitslab.engine.kernels import cpu
from bitslab.engine.kernels.cuda.source import BYTE_FIELDS, WORD_CHUNKS, Variant
from bitslab.engine.kernels.format import (
    BLOCK_ROWS,
    BUCKET_ENTRIES,
    MAX_SLABS,
    NO_ID,
    OFFSET_SHIFT,
    PACKED_BIT,
    PAD_WORDS,
    SLAB_SHIFT,
    CacheStorage,
    RowFormat,
    RowLayout,
    RowStorage,
    TableStorage,
    ceil_div,
)

#: Masks that decoders apply to whole words of chunks: at each end of a chunk and across its bytes,
#: narrow and wide, in both bytes, all of a chunk.
WORD_MASKS = {
    1: (0x7C, 0xF8, 0x01, 0x80, 0x3F, 0xFF),
    2: (0x7C00, 0xFF00, 0x00FF, 0x7F80, 0x8000, 0x0001, 0x7878, 0xF0F0, 0x0101, 0xFFFF),
}


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
    variant: Variant,
    *,
    clusters: int = 1,
    n_rows: int = 70,
    row_bytes: int | None = None,
    seed=0,
    field: tuple[int, int] | None = None,
    mask: int | None = None,
) -> Case:
    """Return rows that match the profile to different degrees, some of them too little to pack.

    The rows' size makes the decoder take just this variant: 16-byte stores need rows of a
    multiple of 16 bytes. With `field`, its lowest bit and its width, that is the mask; with `mask`,
    that one.
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
    if mask is not None:
        masks[:] = mask
    elif field is not None:
        masks[:] = ((1 << field[1]) - 1) << field[0]
    elif variant.byte_field:
        masks[:] = 255 << BYTE_FIELDS[width]
    elif variant.words:
        # With codes of three bits an exponent has kernels of its own.
        taken = 255 << BYTE_FIELDS[width] if width in BYTE_FIELDS and variant.code_bits == 3 else 0
        masks[:] = rng.choice([each for each in WORD_MASKS[width] if each != taken])
    elif variant.vector > 1 and variant.uniform and width in WORD_CHUNKS:
        # Runs of ones apart from each other, at both ends of a chunk.
        top = 1 << (8 * width - 1)
        masks[:] = (masks | top | 1) & ~dtype.type(0x10)
    elif variant.uniform and seed % 2:
        masks[:] = ((1 << (5 * width)) - 1) << (2 * width)  # one run of ones
    values = _draw(rng, dtype, (*shape, fmt.values)) & masks[..., None]
    cluster = rng.integers(0, clusters, n_rows)
    mostly_first = rng.random((n_rows, fmt.chunks)) < rng.choice([0.5, 0.995], (n_rows, 1))
    code = np.where(mostly_first, 0, rng.integers(0, fmt.values, (n_rows, fmt.chunks)))
    masked = np.broadcast_to(masks[cluster], (n_rows, fmt.chunks))
    value = np.take_along_axis(
        np.broadcast_to(values[cluster], (n_rows, fmt.chunks, fmt.values)), code[..., None], 2
    )[..., 0]
    hit = rng.random((n_rows, fmt.chunks)) < rng.choice([0.2, 0.9, 0.98, 1.0], (n_rows, 1))
    noise = _draw(rng, dtype, (n_rows, fmt.chunks))
    chunks = np.where(hit, (noise & ~masked) | value, noise).astype(dtype)
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


TABLE_KINDS = ("compact", "compact-moved", "inplace", "raw")


def table_of(case: Case, kind: str, seed: int = 0) -> TableStorage:
    """Return a table that holds the rows of a case, on the CPU.

    Parameters
    ----------
    kind : str
        One of TABLE_KINDS. "compact-moved" is what updates leave behind: it was packed with the
        rows in another order, and then each was written where it stands now: into its place, which
        may be longer, or into the overflow. Words that belong to no row hold noise.
    """
    rng = np.random.default_rng([seed, len(kind)])
    if kind == "compact":
        return _compact_table(pack_on_cpu(case)[0], case)
    if kind == "compact-moved":
        return _moved_table(case, rng)
    fmt = case.layout.format
    n, size = case.rows.shape[0], fmt.row_words
    if kind == "raw":
        words = _noise(rng, ceil_div(case.rows.numel(), 4) + PAD_WORDS)
        words.view(torch.uint8)[: case.rows.numel()] = case.rows.reshape(-1)
        return TableStorage(n, words, max_words=size)
    words = _noise(rng, n * size + PAD_WORDS)
    words[: n * size].view(n, size)[:] = _raw_words(case.rows, size)
    packed = pack_on_cpu(case)[0]
    at, lengths, _ = cpu.locate_rows(_compact_table(packed, case), case.layout, torch.arange(n))
    cpu.move_rows(packed.words, at, lengths, words, torch.arange(n) * size)
    lengths = lengths.to(torch.int64)
    sizes = torch.where(lengths > 0, lengths, size)
    return TableStorage(
        n,
        words,
        row_clusters=packed.row_clusters if fmt.clusters > 1 else None,
        flags=_bits(lengths > 0),
        typical_words=int(sizes.median()) if n else 0,
        max_words=int(sizes.max()) if n else 0,
    )


def cache_of(
    case: Case, table: TableStorage, ids: torch.Tensor, slabs: int = 2, load: float = 0.5
) -> CacheStorage:
    """Return a cache that holds rows `ids` of a table, dealt out to `slabs` slabs, on the CPU."""
    ids = torch.unique(ids.to(torch.int64) % max(1, table.n_rows))
    if table.lengths is None and table.flags is None:
        return raw_cache_of(case.rows, ids, slabs)
    at, lengths, kind = cpu.locate_rows(table, case.layout, ids)
    sizes = torch.where(lengths > 0, lengths, case.layout.format.row_words).to(torch.int64)
    buckets = 1
    while buckets * BUCKET_ENTRIES * load < len(ids):
        buckets *= 2
    entries = torch.full((buckets * BUCKET_ENTRIES, 2), NO_ID, dtype=torch.int64)
    places = torch.empty_like(ids)
    filled = []
    for slab in range(slabs):
        places[slab::slabs] = torch.nn.functional.pad(sizes[slab::slabs].cumsum(0), (1, 0))[:-1]
        words = torch.zeros(int(sizes[slab::slabs].sum()) + PAD_WORDS, dtype=torch.int32)
        filled.append(words)
        for source, words_of in enumerate((table.words, table.overflow)):
            here = (kind == source) & (torch.arange(len(ids)) % slabs == slab)
            if words_of is not None:
                cpu.move_rows(words_of, at[here], sizes[here], words, places[here])
    locations = torch.tensor(
        [
            location(i % slabs, 4 * int(places[i]), int(sizes[i]), bool(lengths[i] > 0))
            for i in range(len(ids))
        ],
        dtype=torch.int64,
    )
    return _cache(entries, ids, locations, filled)


def raw_cache_of(
    rows: torch.Tensor, ids: torch.Tensor, slabs: int = 2, holds_items: bool = False
) -> CacheStorage:
    """Return a cache of rows uint8 ``[N, row_bytes]`` that lie raw, byte after byte, on the CPU."""
    row_bytes = rows.shape[1]
    buckets = 1 << ceil_div(2 * len(ids), BUCKET_ENTRIES).bit_length()
    entries = torch.full((buckets * BUCKET_ENTRIES, 2), NO_ID, dtype=torch.int64)
    filled = []
    for slab in range(slabs):
        data = rows[ids[slab::slabs]].reshape(-1)
        words = torch.zeros(ceil_div(data.numel(), 4) + PAD_WORDS, dtype=torch.int32)
        words.view(torch.uint8)[: data.numel()] = data
        filled.append(words)
    locations = [
        location(i % slabs, i // slabs * row_bytes, ceil_div(row_bytes, 4), False)
        for i in range(len(ids))
    ]
    made = _cache(entries, ids, torch.tensor(locations, dtype=torch.int64), filled)
    return replace(made, holds_items=holds_items)


def _cache(
    entries: torch.Tensor, ids: torch.Tensor, locations: torch.Tensor, filled: list[torch.Tensor]
) -> CacheStorage:
    assert cpu.map_insert(entries, ids, locations) == 0
    addresses = torch.zeros(MAX_SLABS, dtype=torch.int64)
    addresses[: len(filled)] = torch.tensor([words.data_ptr() for words in filled])
    return CacheStorage(entries, tuple(filled), addresses)


def location(slab: int, offset_bytes: int, words: int, packed: bool) -> int:
    """Return the location of a cached row, as the int64 that holds its 64 bits."""
    bits = slab << SLAB_SHIFT | offset_bytes << OFFSET_SHIFT | int(packed) << PACKED_BIT | words
    return bits - (1 << 64) if bits >> 63 else bits


def _compact_table(storage: RowStorage, case: Case) -> TableStorage:
    fmt = case.layout.format
    sizes = _wide(storage.lengths)
    return TableStorage(
        storage.lengths.shape[0],
        storage.words,
        storage.bases,
        storage.lengths,
        storage.row_clusters if fmt.clusters > 1 else None,
        max_words=int(torch.where(sizes > 0, sizes, fmt.row_words).max()) if len(sizes) else 0,
    )


def _moved_table(case: Case, rng: np.random.Generator) -> TableStorage:
    fmt = case.layout.format
    n, size = case.rows.shape[0], fmt.row_words
    order = torch.from_numpy(rng.permutation(n))
    order[::3] = torch.arange(n)[::3]  # a third was never written
    now, _ = pack_on_cpu(case)
    before = _compact_table(pack_on_cpu(replace(case, rows=case.rows[order]))[0], case)
    places, room, _ = cpu.locate_rows(before, case.layout, torch.arange(n))
    packed_at, packed_words, _ = cpu.locate_rows(
        _compact_table(now, case), case.layout, torch.arange(n)
    )
    raw = _raw_words(case.rows, size)
    moved = torch.zeros(n, dtype=torch.bool)
    overflow: list[torch.Tensor] = []
    for r in range(n):
        place, length = int(places[r]), int(packed_words[r])
        if room[r] == 0:  # the place of a raw row takes any row, raw
            before.words[place : place + size] = raw[r]
        elif 0 < length <= room[r]:
            start = int(packed_at[r])
            before.words[place : place + length] = now.words[start : start + length]
        else:
            moved[r] = True
            before.words[place] = len(overflow)
            overflow.append(raw[r])
    return replace(
        before,
        row_clusters=now.row_clusters if fmt.clusters > 1 else None,
        moved=_bits(moved),
        overflow=torch.cat([*overflow, _noise(rng, PAD_WORDS)]),
        max_words=size if overflow else before.max_words,
    )


def _raw_words(rows: torch.Tensor, row_words: int) -> torch.Tensor:
    """Return raw rows as int32 ``[N, row_words]``, zeros in what is left of their last words."""
    filled = torch.nn.functional.pad(rows, (0, 4 * row_words - rows.shape[1]))
    return filled.contiguous().view(torch.int32)


def _wide(lengths: torch.Tensor) -> torch.Tensor:
    return lengths.to(torch.int64) & ((1 << 8 * lengths.element_size()) - 1)


def _bits(flags: torch.Tensor) -> torch.Tensor:
    """Return flags, one a row, as the bits of int32 words, at least one."""
    size = ceil_div(max(1, flags.shape[0]), 32) * 4
    packed = np.packbits(flags.numpy(), bitorder="little")
    return torch.from_numpy(np.pad(packed, (0, size - len(packed)))).view(torch.int32)


def _noise(rng: np.random.Generator, words: int) -> torch.Tensor:
    return torch.from_numpy(rng.integers(-(2**31), 2**31, words).astype(np.int32))
