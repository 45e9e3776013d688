"""Rows by id out of tables and caches: indexing is the oracle, damage is reported, none crashes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import bitslab
from bitslab.engine.kernels import cpu
from bitslab.engine.kernels.cpu import constants, row_finder
from bitslab.engine.kernels.cpu import gather as jitted
from bitslab.engine.kernels.cuda.source import BYTE_FIELDS, Variant
from bitslab.engine.kernels.format import (
    BLOCK_ROWS,
    CHUNK_BYTES,
    CODE_BITS,
    MAX_SLABS,
    NO_ID,
    OFFSET_SHIFT,
    PAD_WORDS,
    CacheStorage,
    RowLayout,
    TableStorage,
)
from tests.engine.kernels.cases import TABLE_KINDS, Case, cache_of, location, make_case, table_of
from tests.forked import run_forked
from tests.simt.module import guarded
from tests.simt.variants import settings_of

ROOT = Path(__file__).resolve().parents[3]
N_ROWS = 75  # two blocks of rows and a part of one
BATCH = 400  # damaged tables that one subprocess reads
COUNTERS = 2 * (MAX_SLABS + 1)
Side = Literal["end", "start"]

VARIANTS = [
    *(
        Variant("gather", width, bits, grouped, uniform)
        for width, bits, grouped, uniform in product(
            CHUNK_BYTES, CODE_BITS, (False, True), (False, True)
        )
    ),
    *(
        Variant("gather", width, 3, grouped, True, 16 // width, byte_field=True)
        for width, grouped in product(BYTE_FIELDS, (False, True))
    ),
]
#: Fields of at most 8 bits, as (chunk_bytes, lowest bit, width).
FIELDS = {
    "float32": (4, 23, 8),
    "bfloat16": (2, 7, 8),
    "float16": (2, 10, 5),
    "float8": (1, 3, 4),
    "highest-byte": (4, 24, 8),
    "lowest-byte": (2, 0, 8),
    "whole-chunk": (1, 0, 8),
    "one-bit": (4, 31, 1),
}
FIELDED = [variant for variant in VARIANTS if variant.byte_field]
variants = st.sampled_from(VARIANTS)
kinds = st.sampled_from(TABLE_KINDS)
cluster_counts = st.sampled_from([1, 3])
id_dtypes = st.sampled_from([torch.int32, torch.int64])
seeds = st.integers(0, 2**32 - 1)


@cache
def case_of(variant: Variant, clusters: int, seed: int = 0) -> Case:
    return make_case(variant, clusters=clusters, n_rows=N_ROWS, seed=seed)


def field_case(
    name: str, grouped: bool, columns: int, n_rows: int = N_ROWS, **options: Any
) -> Case:
    """Return rows of `columns` chunks whose masks are one field."""
    width, *field = FIELDS[name]
    variant = Variant("gather", width, 3, grouped, True)
    size = {"row_bytes": width * columns, "n_rows": n_rows, "seed": columns}
    return make_case(variant, field=(field[0], field[1]), **size, **options)


@cache
def tabled(variant: Variant, clusters: int, kind: str) -> TableStorage:
    return table_of(case_of(variant, clusters), kind)


@cache
def cached(variant: Variant, clusters: int, kind: str, slabs: int) -> CacheStorage:
    """Return a cache of every other row."""
    ids = torch.arange(0, N_ROWS, 2)
    return cache_of(case_of(variant, clusters), tabled(variant, clusters, kind), ids, slabs)


def general_layout(layout: RowLayout) -> RowLayout:
    """Return a layout with which the general decoder is used."""
    copy = replace(layout)
    constants._constants[copy] = replace(constants.constants_of(layout), field=None)
    return copy


def draw_ids(seed: int, n: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Return `n` ids of rows, from either end, some of them twice."""
    return torch.from_numpy(np.random.default_rng(seed).integers(-N_ROWS, N_ROWS, n)).to(dtype)


def gather(
    table: TableStorage, case: Case, ids: torch.Tensor, **options: Any
) -> tuple[int, torch.Tensor]:
    out = torch.full((len(ids), case.rows.shape[1]), 7, dtype=torch.uint8)
    return cpu.gather_rows(table, case.layout, ids, out, **options), out


def guard(storage: Any, side: Side) -> Any:
    """Return a table or cache whose tensors lie beside pages that may not be touched."""
    guards: dict[str, Any] = {}
    for field in fields(storage):
        part = getattr(storage, field.name)
        if isinstance(part, torch.Tensor) and part.numel():
            guards[field.name] = guarded(part, side=side)
        elif isinstance(part, tuple):
            guards[field.name] = tuple(guarded(slab, side=side) for slab in part)
    return replace(storage, **guards)


# Rows come back


@given(
    variant=variants,
    clusters=cluster_counts,
    kind=kinds,
    n=st.integers(0, 120),
    dtype=id_dtypes,
    slabs=st.sampled_from([0, 1, 2, 8]),
    seed=seeds,
)
def test_gathered_rows_are_those_of_plain_indexing(
    variant: Variant,
    clusters: int,
    kind: str,
    n: int,
    dtype: torch.dtype,
    slabs: int,
    seed: int,
) -> None:
    case, table = case_of(variant, clusters), tabled(variant, clusters, kind)
    ids = draw_ids(seed, n, dtype)
    stored = cached(variant, clusters, kind, slabs) if slabs else None
    bad, out = gather(table, case, ids, cache=stored)
    assert bad == -1
    assert torch.equal(out, case.rows[ids.long()])


@pytest.mark.pairwise(variant=settings_of)
@pytest.mark.parametrize("kind", TABLE_KINDS)
@pytest.mark.parametrize("clusters", [1, 3], ids=["one-profile", "three-clusters"])
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_every_row_of_every_kind_of_table(variant: Variant, clusters: int, kind: str) -> None:
    """The parts are exactly as long as the kernels may read."""
    case, table = case_of(variant, clusters), tabled(variant, clusters, kind)
    for side in ("end", "start"):
        bad, out = gather(guard(table, side), case, torch.arange(-N_ROWS, N_ROWS))
        assert bad == -1
        assert torch.equal(out, case.rows.repeat(2, 1))


@pytest.mark.pairwise(columns=lambda n: (min(n // 32, 3), n % 32 % 4))
@pytest.mark.parametrize("columns", [1, 3, 4, 5, 31, 32, 33, 63, 64, 65, 97, 100, 131])
@pytest.mark.parametrize("grouped", [False, True], ids=["codes", "groups"])
@pytest.mark.parametrize("name", FIELDS)
def test_rows_with_one_field_of_any_number_of_chunks(
    name: str, grouped: bool, columns: int
) -> None:
    """Loops over several chunks at once leave a rest, of every size here."""
    case = field_case(name, grouped, columns, clusters=1 + columns % 2)
    for kind in TABLE_KINDS:
        bad, out = gather(guard(table_of(case, kind), "end"), case, torch.arange(N_ROWS))
        assert bad == -1
        assert torch.equal(out, case.rows)
    assert torch.equal(case.codec.decode(case.codec.encode(case.rows)), case.rows)


@pytest.mark.parametrize("offset", [1, 2, 3])
@pytest.mark.parametrize("variant", [VARIANTS[0], FIELDED[0], FIELDED[-1], VARIANTS[-5]])
def test_output_and_words_of_any_address(variant: Variant, offset: int) -> None:
    case, table = case_of(variant, 1), tabled(variant, 1, "compact")
    memory = torch.empty(case.rows.numel() + offset, dtype=torch.uint8)
    out = memory[offset:].view(case.rows.shape)
    assert cpu.gather_rows(table, case.layout, torch.arange(N_ROWS), out) == -1
    assert torch.equal(out, case.rows)
    shifted = np.empty(4 * table.words.numel() + offset, np.uint8)[offset:]
    shifted[:] = table.words.numpy().view(np.uint8)
    out.zero_()
    unaligned = replace(table, words=torch.from_numpy(shifted.view(np.int32)))
    assert cpu.gather_rows(unaligned, case.layout, torch.arange(N_ROWS), out) == -1
    assert torch.equal(out, case.rows)


@pytest.fixture
def thread_count() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("thread_count")
@pytest.mark.parametrize("kind", TABLE_KINDS)
def test_rows_and_counters_do_not_depend_on_the_number_of_threads(kind: str) -> None:
    case = make_case(Variant("gather", 4), n_rows=3000, row_bytes=1020)
    table = table_of(case, kind)
    stored = cache_of(case, table, torch.arange(0, 3000, 3), 2)
    ids = torch.from_numpy(np.random.default_rng(0).integers(-3000, 3000, 5500))
    seen = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        counters = torch.zeros(COUNTERS, dtype=torch.int64)
        bad, out = gather(table, case, ids, cache=stored, counters=counters)
        assert bad == -1
        assert torch.equal(out, case.rows[ids])
        seen.append(counters.tolist())
    assert seen[0] == seen[1] == seen[2]


def test_no_row_is_written_after_a_bad_id() -> None:
    case, table = case_of(VARIANTS[0], 1), tabled(VARIANTS[0], 1, "compact")
    ids = torch.arange(5)
    for bad_id, untouched in ((3, True), (0, True), (-1, False)):
        bad, out = gather(table, case, ids, first_bad=torch.tensor([bad_id]))
        assert bad == -1
        assert bool((out == 7).all()) == untouched


# Counters


@given(
    variant=variants,
    clusters=cluster_counts,
    kind=kinds,
    n=st.integers(0, 120),
    slabs=st.sampled_from([0, 1, 3, 8]),
    seed=seeds,
)
def test_counters_say_how_many_rows_and_words_came_from_where(
    variant: Variant, clusters: int, kind: str, n: int, slabs: int, seed: int
) -> None:
    case, table = case_of(variant, clusters), tabled(variant, clusters, kind)
    ids = draw_ids(seed, n)
    stored = cached(variant, clusters, kind, slabs) if slabs else None
    counters = torch.arange(COUNTERS)  # added to
    assert gather(table, case, ids, cache=stored, counters=counters)[0] == -1
    _, words, _ = cpu.locate_rows(table, case.layout, ids)
    expected = list(range(COUNTERS))
    for row, count in zip((ids % N_ROWS).tolist(), words.tolist(), strict=True):
        place = row // 2 % slabs if slabs and row % 2 == 0 else MAX_SLABS
        expected[place] += 1
        expected[MAX_SLABS + 1 + place] += count or case.layout.format.row_words
    assert counters.tolist() == expected


# Places and moves


packed_kinds = st.sampled_from([kind for kind in TABLE_KINDS if kind != "raw"])


@given(variant=variants, clusters=cluster_counts, kind=packed_kinds, dtype=id_dtypes, seed=seeds)
def test_places_are_exact(
    variant: Variant, clusters: int, kind: str, dtype: torch.dtype, seed: int
) -> None:
    """Rows copied from their places, and nothing else, make a sound compact table."""
    case, table = case_of(variant, clusters), tabled(variant, clusters, kind)
    ids = draw_ids(seed, 60, dtype)
    at, words, source = cpu.locate_rows(table, case.layout, ids)
    assert (at.dtype, words.dtype, source.dtype) == (torch.int64, torch.int32, torch.uint8)
    sizes = torch.where(words > 0, words, case.layout.format.row_words).to(torch.int64)
    ends = sizes.cumsum(0)
    starts = ends - sizes
    packed = torch.zeros(int(ends[-1]) + PAD_WORDS, dtype=torch.int32)
    for kind_of, words_of in enumerate((table.words, table.overflow)):
        here = source == kind_of
        if words_of is not None:
            cpu.move_rows(words_of, at[here], sizes[here], packed, starts[here])
    compact = TableStorage(
        60,
        packed,
        torch.cat([starts[::BLOCK_ROWS], ends[-1:]]),
        words.to(case.layout.format.length_dtype),
        None if table.row_clusters is None else table.row_clusters[ids.long()],
    )
    bad, out = gather(compact, case, torch.arange(60))
    assert bad == -1
    assert torch.equal(out, case.rows[ids.long()])
    exact = case.codec.encode(case.rows[ids.long()]).parts["lengths"]
    packed_rows = (words > 0) & (exact != 0)
    assert torch.equal(words.to(exact.dtype)[packed_rows], exact[packed_rows])


@pytest.mark.parametrize("kind", TABLE_KINDS)
def test_no_ids_have_no_places(kind: str) -> None:
    case, table = case_of(VARIANTS[0], 1), tabled(VARIANTS[0], 1, kind)
    at, words, source = cpu.locate_rows(table, case.layout, torch.empty(0, dtype=torch.int64))
    assert (at.shape, words.shape, source.shape) == ((0,), (0,), (0,))


def test_moved_tables_have_rows_of_every_sort() -> None:
    """What the other tests call moved has rows in the overflow, shorter rows and raw ones."""
    case, table = case_of(FIELDED[0], 1), tabled(FIELDED[0], 1, "compact-moved")
    _, words, source = cpu.locate_rows(table, case.layout, torch.arange(N_ROWS))
    assert table.lengths is not None
    room = table.lengths.numpy().view(f"u{table.lengths.element_size()}").astype(np.int64)
    assert int((source == 1).sum()) > 2
    assert int(((words.numpy() < room) & (words.numpy() > 0)).sum()) > 2
    assert int(((words == 0) & (source == 0)).sum()) > 2


@given(seed=seeds, n=st.integers(0, 50), wide=st.booleans())
def test_runs_of_words_are_copied(seed: int, n: int, wide: bool) -> None:
    rng = np.random.default_rng(seed)
    source = torch.from_numpy(rng.integers(-(2**31), 2**31, 300).astype(np.int32))
    counts = torch.from_numpy(rng.integers(0, 9, n)).to(torch.int64 if wide else torch.int32)
    at = torch.from_numpy(rng.integers(0, 292, n))
    gaps = torch.from_numpy(rng.integers(0, 3, n))
    ends = (counts.long() + gaps).cumsum(0)
    target_at = ends - counts
    target = guarded(torch.full((int(ends[-1]) if n else 0,), 7, dtype=torch.int32))
    expected = target.clone()
    for i in range(n):
        end = int(target_at[i] + counts[i])
        expected[int(target_at[i]) : end] = source[int(at[i]) : int(at[i] + counts[i])]
    cpu.move_rows(guarded(source), at, counts, target, target_at)
    assert torch.equal(target, expected)


@pytest.mark.parametrize(
    ("at", "count", "target_at", "name"),
    [
        (-1, 1, 0, "at"),
        (91, 10, 0, "at"),
        (2**63 - 1, 10, 0, "at"),
        (0, -1, 0, "at"),
        (0, 10, -1, "target_at"),
        (0, 10, 11, "target_at"),
        (0, 10, 2**63 - 5, "target_at"),
    ],
)
def test_runs_outside_are_refused(at: int, count: int, target_at: int, name: str) -> None:
    source, target = torch.ones(100, dtype=torch.int32), torch.zeros(20, dtype=torch.int32)
    arguments = (
        torch.tensor([0, at]),
        torch.tensor([3, count]),
        target,
        torch.tensor([0, target_at]),
    )
    with pytest.raises(bitslab.ArgumentError, match=f"^{name}: run 1 "):
        cpu.move_rows(source, *arguments)
    assert not target.any()


# Raw rows


@given(
    row_bytes=st.integers(0, 300),
    spare=st.integers(0, 40),
    offset=st.integers(0, 5),
    n=st.integers(0, 100),
    dtype=id_dtypes,
    side=st.sampled_from(["end", "start"]),
    seed=seeds,
)
def test_raw_rows_of_any_size_and_address_are_copied(
    row_bytes: int, spare: int, offset: int, n: int, dtype: torch.dtype, side: Side, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    stride = row_bytes + spare
    data = rng.integers(0, 256, N_ROWS * stride + offset, dtype=np.uint8)
    rows = guarded(torch.from_numpy(data), side=side)[offset:].view(N_ROWS, stride)
    ids = draw_ids(seed, n, dtype)
    out = guarded(torch.zeros(n * row_bytes + offset, dtype=torch.uint8), side=side)
    target = out[offset:].view(n, row_bytes)
    cpu.copy_rows(rows, row_bytes, ids, target)
    assert torch.equal(target, rows[ids.long(), :row_bytes])
    assert not out[:offset].any()


def test_raw_rows_are_left_alone_after_a_bad_id() -> None:
    rows = torch.arange(100, dtype=torch.uint8).view(25, 4)
    out = torch.zeros(2, 4, dtype=torch.uint8)
    cpu.copy_rows(rows, 4, torch.tensor([3, 4]), out, first_bad=torch.tensor([1]))
    assert not out.any()
    cpu.copy_rows(rows, 4, torch.tensor([3, 4]), out, first_bad=torch.tensor([-1]))
    assert torch.equal(out, rows[3:5])


# Damage


@given(
    name=st.sampled_from([*FIELDS]),
    grouped=st.booleans(),
    columns=st.integers(1, 140),
    spare=st.integers(-1, 1),
    ones=st.floats(0, 1),
    seed=seeds,
)
def test_both_decoders_agree_on_any_words(
    name: str, grouped: bool, columns: int, spare: int, ones: float, seed: int
) -> None:
    """What the fast decoder takes for sound, and what it makes of it, is what the general one does.

    The words are noise with more or fewer codes 0, or groups that are all 1.
    """
    case = field_case(name, grouped, columns, n_rows=1)
    rng = np.random.default_rng(seed)
    bits = rng.random((400, 32)) < ones
    words = np.packbits(bits, axis=1, bitorder="little").view(np.int32).ravel()

    def table_with(room: int) -> TableStorage:
        return TableStorage(
            1,
            guarded(torch.from_numpy(words[: room + PAD_WORDS].copy())),
            torch.tensor([0, room]),
            torch.tensor([room]).to(case.layout.format.length_dtype),
        )

    room = max(0, case.layout.format.row_words - 1)
    with contextlib.suppress(bitslab.CorruptedDataError):
        # As many words as the codes ask for, give or take one.
        needed = int(cpu.locate_rows(table_with(room), case.layout, torch.tensor([0]))[1])
        room = min(room, max(0, needed + spare))
    table = table_with(room)
    ids = torch.zeros(1, dtype=torch.int64)
    bad, out = gather(table, case, ids)
    general = general_layout(case.layout)
    expected = torch.full_like(out, 7)
    assert cpu.gather_rows(table, general, ids, expected) == bad
    if bad < 0:
        assert torch.equal(out, expected)


@pytest.mark.parametrize("general", [False, True], ids=["fast", "general"])
@pytest.mark.parametrize("columns", [62, 63, 90])
@pytest.mark.parametrize("name", ["float32", "float16", "float8"])
def test_codes_of_chunks_that_are_missing_do_not_count(
    name: str, columns: int, general: bool
) -> None:
    """They are written as 1; a reader that took 0 for an exception would run over the row."""
    case = field_case(name, False, columns)
    table = table_of(case, "inplace")
    at, lengths, _ = cpu.locate_rows(table, case.layout, torch.arange(N_ROWS))
    groups = (columns + 31) // 32
    payload_bits = (8 * FIELDS[name][0] - FIELDS[name][2]) * columns
    last = (payload_bits + 31) // 32 + 3 * (groups - 1)  # word of the last group's codes
    stored = ((1 << 3 * (columns - 32 * (groups - 1))) - 1).to_bytes(12, "little")
    mask = torch.from_numpy(np.frombuffer(stored, np.int32).copy())
    packed = at[lengths > 0]
    assert len(packed) > 5
    for place in packed.tolist():
        table.words[place + last : place + last + 3] &= mask
    layout = general_layout(case.layout) if general else case.layout
    out = guarded(torch.zeros_like(case.rows))
    assert cpu.gather_rows(table, layout, torch.arange(N_ROWS), out) == -1
    assert torch.equal(out, case.rows)


@pytest.mark.parametrize("row", [-1, N_ROWS, 2**40, -(2**62)])
@pytest.mark.parametrize("kind", TABLE_KINDS)
def test_row_that_is_not_there_is_reported_even_unchecked(kind: str, row: int) -> None:
    case, table = case_of(VARIANTS[0], 1), guard(tabled(VARIANTS[0], 1, kind), "end")
    first = row - N_ROWS if row < 0 else row  # as an id that is outside from either end
    ids = torch.tensor([0, first])
    assert gather(table, case, ids)[0] == (first + N_ROWS if first < 0 else first)


SHORT = {
    "compact": ["bases", "lengths", "row_clusters"],
    "compact-moved": ["moved"],
    "inplace": ["flags", "row_clusters"],
}


@pytest.mark.parametrize(
    ("kind", "part"), [(kind, part) for kind, parts in SHORT.items() for part in parts]
)
def test_part_that_is_too_small_for_its_table_is_refused(kind: str, part: str) -> None:
    case, table = case_of(VARIANTS[0], 3), tabled(VARIANTS[0], 3, kind)
    size = {"bases": 2, "flags": 2, "moved": 2}.get(part, N_ROWS - 1)
    short = replace(table, **{part: getattr(table, part)[:size].clone()})
    with pytest.raises(bitslab.ArgumentError, match=rf"^table\.{part}: {size} entries"):
        gather(short, case, torch.arange(3))
    with pytest.raises(bitslab.ArgumentError, match=rf"^table\.{part}: {size} entries"):
        cpu.locate_rows(short, case.layout, torch.arange(3))


def test_damaged_row_is_reported_by_its_number() -> None:
    case, table = case_of(FIELDED[0], 1), tabled(FIELDED[0], 1, "compact")
    assert table.bases is not None
    bases = table.bases.clone()
    bases[1] = 2**62
    damaged = replace(table, bases=bases)
    assert gather(damaged, case, torch.tensor([3, 40, 41]))[0] == 40
    assert gather(damaged, case, torch.tensor([3, -N_ROWS + 33]))[0] == 33
    assert gather(damaged, case, torch.tensor([3, 70]))[0] == -1
    with pytest.raises(bitslab.CorruptedDataError, match="^table: row 40 is damaged$"):
        cpu.locate_rows(damaged, case.layout, torch.tensor([3, 40, 41]))


def test_row_that_asks_for_more_words_than_its_place_is_reported() -> None:
    """Every code 0: more exceptions than fit."""
    for variant in (VARIANTS[0], FIELDED[0], FIELDED[1]):
        case = case_of(variant, 1)
        table = tabled(variant, 1, "inplace")
        at, words, _ = cpu.locate_rows(table, case.layout, torch.arange(N_ROWS))
        row = int((words > 0).nonzero()[-1])
        zeroed = table.words.clone()
        size = case.layout.format.row_words
        zeroed[int(at[row]) : int(at[row]) + size] = 0
        damaged = replace(table, words=zeroed)
        assert gather(damaged, case, torch.tensor([0, row]))[0] == row
        with pytest.raises(bitslab.CorruptedDataError, match=f"^table: row {row} is damaged$"):
            cpu.locate_rows(damaged, case.layout, torch.tensor([row]))


@pytest.mark.parametrize("place", [-1, 1000, 2**31 - 1])
def test_overflow_place_that_is_not_there_is_reported(place: int) -> None:
    case, table = case_of(VARIANTS[0], 1), tabled(VARIANTS[0], 1, "compact-moved")
    source = cpu.locate_rows(table, case.layout, torch.arange(N_ROWS))[2]
    row = int((source == 1).nonzero()[0])
    before = table_of(replace(case), "compact-moved")
    assert before.bases is not None and before.lengths is not None
    lengths = before.lengths[row // 32 * 32 : row].to(torch.int64) & 255
    size = case.layout.format.row_words
    at = int(before.bases[row // 32] + torch.where(lengths > 0, lengths, size).sum())
    before.words[at] = place
    assert gather(guard(before, "end"), case, torch.tensor([row]))[0] == row


BAD_LOCATIONS = {
    "no-such-slab": location(2, 0, 5, True),
    "slab-7": location(7, 0, 5, True),
    "behind-the-end": location(0, 4 * 10**6, 5, True),
    "farthest": location(1, (1 << 40) - 4, 5, True),
    "too-long": location(0, 0, (1 << 20) - 1, True),
    "raw-behind-the-end": location(1, 4 * 10**6, 0, False),
}


@pytest.mark.parametrize("name", BAD_LOCATIONS)
def test_location_outside_the_slabs_is_reported(name: str) -> None:
    case, table = case_of(VARIANTS[0], 1), tabled(VARIANTS[0], 1, "compact")
    stored = guard(cached(VARIANTS[0], 1, "compact", 2), "end")
    assert (
        cpu.map_insert(stored.entries, torch.tensor([4]), torch.tensor([BAD_LOCATIONS[name]])) == 0
    )
    counters = torch.zeros(COUNTERS, dtype=torch.int64)
    assert gather(table, case, torch.tensor([2, 4, 3]), cache=stored, counters=counters)[0] == 4
    assert not counters.any()
    bad, out = gather(table, case, torch.tensor([2, 3, 6]), cache=stored)
    assert bad == -1
    assert torch.equal(out, case.rows[[2, 3, 6]])


@pytest.mark.parametrize("variant", [VARIANTS[0], *FIELDED], ids=lambda variant: variant.name)
def test_location_without_the_number_of_words_is_enough(variant: Variant) -> None:
    """0 words mean that their number is not known."""
    case, table = case_of(variant, 1), tabled(variant, 1, "compact")
    stored = cached(variant, 1, "compact", 2)
    entries = stored.entries.clone()
    taken = entries[:, 0] != NO_ID
    entries[taken, 1] &= ~((1 << 20) - 1)
    ids = torch.arange(-N_ROWS, N_ROWS)
    bad, out = gather(table, case, ids, cache=guard(replace(stored, entries=entries), "end"))
    assert bad == -1
    assert torch.equal(out, case.rows[ids])


def test_location_between_words_is_reported() -> None:
    case, table = case_of(VARIANTS[0], 1), tabled(VARIANTS[0], 1, "compact")
    stored = cached(VARIANTS[0], 1, "compact", 2)
    entries = stored.entries.clone()
    entries[(entries[:, 0] == 4).nonzero(), 1] |= 2 << OFFSET_SHIFT
    damaged = replace(stored, entries=entries)
    assert gather(table, case, torch.tensor([2, 4, 3]), cache=damaged)[0] == 4


def damage(rng: np.random.Generator, t: torch.Tensor) -> torch.Tensor:
    """Flip a bit, set a byte or an entry, or overwrite the tensor."""
    t = t.clone()
    if not t.numel():
        return t
    flat = t.view(-1).view(torch.uint8)
    kind = rng.choice(["bit", "byte", "entry", "all"], p=[0.4, 0.25, 0.3, 0.05])
    at = int(rng.integers(flat.numel()))
    if kind == "bit":
        flat[at] ^= 1 << int(rng.integers(8))
    elif kind == "byte":
        flat[at] = int(rng.integers(256))
    elif kind == "entry":
        size = t.element_size()
        extremes = [-(2**63), -1, 0, 1, 255, 2**31, 2**32, 2**61, 2**62, 2**63 - 1]
        value = np.int64(rng.choice(extremes)) - np.int64(rng.integers(0, 2))
        start = at // size * size
        flat[start : start + size] = torch.from_numpy(
            np.array([value]).view(np.uint8)[:size].copy()
        )
    else:
        flat[:] = torch.from_numpy(rng.integers(0, 256, flat.numel(), dtype=np.uint8))
    return t


def damage_storage(rng: np.random.Generator, storage: Any) -> Any:
    """Damage one part of a table or a cache."""
    parts = {f.name: getattr(storage, f.name) for f in fields(storage)}
    names = [
        name
        for name, part in parts.items()
        if name != "addresses" and isinstance(part, torch.Tensor | tuple)
    ]
    name = str(rng.choice(names))
    part = parts[name]
    if isinstance(part, tuple):
        hit = int(rng.integers(len(part)))
        damaged: Any = tuple(damage(rng, t) if i == hit else t for i, t in enumerate(part))
    elif name in ("words", "overflow") and rng.random() < 0.2:
        damaged = part[: int(rng.integers(part.numel() + 1))].clone()
    else:
        damaged = damage(rng, part)
    return replace(storage, **{name: damaged})


def read_damaged(seed: int, count: int) -> None:
    """Read damaged tables and caches beside pages that may not be touched."""
    rng = np.random.default_rng(seed)
    reported = sound = 0
    for _ in range(count):
        variant = VARIANTS[rng.integers(len(VARIANTS))]
        clusters = int(rng.choice([1, 3]))
        kind = str(rng.choice(TABLE_KINDS))
        case, table = case_of(variant, clusters), tabled(variant, clusters, kind)
        stored = cached(variant, clusters, kind, 2)
        for _ in range(rng.integers(1, 4)):
            if rng.random() < 0.4:
                stored = damage_storage(rng, stored)
            else:
                table = damage_storage(rng, table)
        side: Side = "end" if rng.random() < 0.5 else "start"
        table, stored = guard(table, side), guard(stored, side)
        ids = draw_ids(int(rng.integers(2**32)), 80)
        try:
            cpu.locate_rows(table, case.layout, ids)
        except bitslab.CorruptedDataError:
            pass
        out = guarded(torch.zeros(80, case.rows.shape[1], dtype=torch.uint8), side=side)
        for cache_or_none in (None, stored):
            bad = cpu.gather_rows(table, case.layout, ids, out, cache=cache_or_none)
            assert bad == -1 or bad in (ids % N_ROWS).tolist()
            reported, sound = reported + (bad >= 0), sound + (bad < 0)
    assert reported > count // 10 and sound > count // 10
    print("read", count)


@pytest.mark.parametrize("seed", [0, 1])
def test_damaged_tables_and_caches_never_crash_the_process(seed: int) -> None:
    code = (
        f"from tests.engine.kernels.test_gather import read_damaged as read; read({seed}, {BATCH})"
    )
    result = run_forked(["-c", code], cwd=ROOT, timeout_s=120)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout == f"read {BATCH}\n"


def test_sources_are_numbered_alike_on_both_sides() -> None:
    assert row_finder.SOURCES == jitted.SOURCES
    assert row_finder.HOST_SOURCES == jitted.FROM_SLABS
