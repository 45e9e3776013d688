"""Rows whose field is one byte, and lookups of bags out of them and a cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bitslab.engine.kernels.cpu import bytefields, constants, prepared
from bitslab.engine.kernels.cpu.constants import constants_of
from bitslab.engine.kernels.cpu.prepared import PreparedTable, SlotMap
from bitslab.engine.kernels.format import PAD_WORDS, RowLayout, TableStorage
from tests.engine.kernels.cases import Case, table_of
from tests.engine.kernels.test_fields import case_of
from tests.engine.kernels.test_gather import guard
from tests.simt.module import guarded

names = st.sampled_from(["float32", "bfloat16"])
seeds = st.integers(0, 2**32 - 1)


def without_bytes(layout: RowLayout) -> RowLayout:
    """Return the layout for which fields.py decodes."""
    found = constants_of(layout)
    assert found.field is not None
    other = replace(layout)
    constants._constants[other] = replace(found, field=replace(found.field, bytes=None))
    return other


@pytest.mark.parametrize(
    ("name", "chunks", "grouped", "served"),
    [
        ("float32", 32, False, True),
        ("float32", 96, False, True),
        ("bfloat16", 64, False, True),
        ("float32", 33, False, False),
        ("float32", 16, False, False),
        ("float32", 64, True, False),
        ("float32-signed", 64, False, False),
        ("low-byte-of-4", 64, False, False),
        ("float16-pair", 64, False, False),
        ("float16", 64, False, False),
        ("whole-1", 64, False, False),
    ],
)
def test_rows_of_these_kinds_are_decoded_so(
    name: str, chunks: int, grouped: bool, served: bool
) -> None:
    field = constants_of(case_of(name, chunks, grouped=grouped).layout).field
    assert field is not None
    assert (field.bytes is not None) == (served and bytefields.available())


@given(
    name=names,
    groups=st.integers(1, 9),
    code_bits=st.integers(1, 3),
    clusters=st.sampled_from([1, 1, 3]),
    kind=st.sampled_from(["compact", "compact-moved"]),
    end=st.sampled_from(["start", "end"]),
    n_rows=st.sampled_from([1, 31, 32, 33, 70]),
    seed=seeds,
)
def test_rows_are_those_of_the_other_decoder(
    name: str,
    groups: int,
    code_bits: int,
    clusters: int,
    kind: str,
    end: Literal["start", "end"],
    n_rows: int,
    seed: int,
) -> None:
    case = case_of(
        name, 32 * groups, code_bits=code_bits, clusters=clusters, n_rows=n_rows, seed=seed
    )
    table = guard(table_of(case, kind), end)
    ids = torch.from_numpy(np.random.default_rng(seed).integers(-n_rows, n_rows, 50))
    words = set()
    for layout in (case.layout, without_bytes(case.layout)):
        out = guarded(torch.full((50, case.rows.shape[1]), 7, dtype=torch.uint8))
        bad, count = PreparedTable(table, layout).gather(ids, out)
        assert bad == -1
        assert torch.equal(out, case.rows[ids])
        words.add(count)
    assert len(words) == 1


@given(
    name=names,
    groups=st.integers(1, 4),
    code_bits=st.integers(1, 3),
    short=st.integers(0, 40),
    ones=st.floats(0, 1),
    seed=seeds,
)
def test_any_words_are_sound_or_damaged_to_both_decoders(
    name: str, groups: int, code_bits: int, short: int, ones: float, seed: int
) -> None:
    case = case_of(name, 32 * groups, code_bits=code_bits, n_rows=1)
    rng = np.random.default_rng(seed)
    f = case.layout.format
    size = max(1, f.row_words - 1 - short)
    bits = rng.random((size + PAD_WORDS, 32)) < ones
    words = np.packbits(bits, axis=1, bitorder="little").view(np.int32).ravel()
    table = TableStorage(
        1,
        guarded(torch.from_numpy(words)),
        torch.tensor([0, size]),
        torch.tensor([size]).to(f.length_dtype),
    )
    found = []
    for layout in (case.layout, without_bytes(case.layout)):
        out = guarded(torch.zeros(1, f.row_bytes, dtype=torch.uint8))
        bad, _ = PreparedTable(table, layout).gather(torch.tensor([0]), out)
        found.append((bad, out))
    assert found[0][0] == found[1][0]
    assert found[0][0] == 0 or torch.equal(found[0][1], found[1][1])


def bags_of(
    case: Case, dtype: torch.dtype, ids: torch.Tensor, slots: torch.Tensor, with_bits: bool
) -> tuple[tuple[int, int, int] | None, torch.Tensor, torch.Tensor]:
    """Look bags up with rows `slots` resident, negated; return that, and what to expect."""
    rows = case.rows.view(dtype)
    slot_of = np.full(len(rows), -1, np.int32)
    slot_of[slots.numpy()] = np.arange(len(slots))
    resident = -rows[slots]
    expected = rows.clone()
    expected[slots] = resident
    out = guarded(torch.full((len(ids), case.rows.shape[1]), 7, dtype=torch.uint8)).view(dtype)
    table = PreparedTable(table_of(case, "compact-moved"), case.layout)
    map_of_slots = SlotMap(slot_of)
    if with_bits:
        map_of_slots.make_bits()
    found = table.look_up(ids, torch.arange(len(ids)), map_of_slots, resident, out)
    return found, out, expected[ids] + 0.0


@pytest.mark.pairwise
@pytest.mark.parametrize("n", [1, 15, 16, 33, 5000])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(
    ("name", "dtype", "chunks"),
    [
        ("float32", torch.float32, 32),
        ("float32", torch.float32, 37),
        ("float64", torch.float64, 24),
    ],
)
@pytest.mark.parametrize("with_team", [True, False], ids=["team", "pool"])
@pytest.mark.parametrize("with_bits", [True, False], ids=["bits", "map alone"])
def test_bags_are_rows_of_the_cache_or_of_the_table(
    name: str,
    dtype: torch.dtype,
    chunks: int,
    share: float,
    n: int,
    with_bits: bool,
    with_team: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not with_team:
        monkeypatch.setattr(prepared, "team_of_torch", lambda: None)
    case = case_of(name, chunks, n_rows=300, seed=3)
    case.rows.view(dtype)[::5, 1::3] = -0.0
    rng = np.random.default_rng(n)
    slots = torch.from_numpy(rng.permutation(300)[: int(300 * share)])
    ids = torch.from_numpy(rng.integers(0, 300, n))
    found, out, expected = bags_of(case, dtype, ids, slots, with_bits)
    assert found is not None
    bad, words, missing = found
    assert bad == -1
    assert missing == n - int(torch.isin(ids, slots).sum())
    assert (words > 0) == (missing > 0)
    # The bits of a number that is not one are not defined by torch's own addition.
    assert torch.equal(out.isnan(), expected.isnan())
    whole = torch.int32 if dtype == torch.float32 else torch.int64
    assert torch.equal(
        torch.where(out.isnan(), 0, out).view(whole),
        torch.where(expected.isnan(), 0, expected).view(whole),
    )


@pytest.mark.parametrize("n", [40, 5000])
@pytest.mark.parametrize(
    ("ids_at", "offsets_at"), [((7, 300), None), ((39, -1), None), (None, (39, 0)), (None, (0, 1))]
)
def test_bags_of_several_ids_or_bad_ones_are_refused(
    n: int, ids_at: tuple[int, int] | None, offsets_at: tuple[int, int] | None
) -> None:
    case = case_of("float32", 32, n_rows=300)
    table = PreparedTable(table_of(case, "compact"), case.layout)
    ids, offsets = torch.arange(n) % 300, torch.arange(n)
    if ids_at is not None:
        ids[ids_at[0]] = ids_at[1]
    if offsets_at is not None:
        offsets[offsets_at[0]] = offsets_at[1]
    out = torch.empty(n, 32)
    slot_of = np.full(300, -1, np.int32)
    assert table.look_up(ids, offsets, SlotMap(slot_of), torch.empty(0, 32), out) is None


def test_first_damaged_row_of_bags_is_reported() -> None:
    case = case_of("float32", 32, n_rows=200)
    storage = table_of(case, "compact")
    assert storage.bases is not None
    storage.bases[1] = 2**62
    table = PreparedTable(storage, case.layout)
    ids = torch.tensor([1, 45, 2])
    slot_of, resident, out = np.full(200, -1, np.int32), torch.zeros(1, 32), torch.empty(3, 32)
    found = table.look_up(ids, torch.arange(3), SlotMap(slot_of), resident, out)
    assert found is not None
    assert found[0] == 45
    slot_of[45] = 0  # a resident row is not looked for in the table
    found = table.look_up(ids, torch.arange(3), SlotMap(slot_of), resident, out)
    assert found is not None
    assert found[0] == -1
    assert torch.equal(out[1], resident[0])
