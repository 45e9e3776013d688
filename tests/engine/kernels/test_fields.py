"""Rows whose mask is the same everywhere: the fast decoder gives what the general one does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bitslab.engine.codecs.base import first_bad_id
from bitslab.engine.kernels import cpu
from bitslab.engine.kernels.cpu.constants import constants_of
from bitslab.engine.kernels.cpu.prepared import PreparedTable
from bitslab.engine.kernels.cuda.source import Variant
from bitslab.engine.kernels.format import PAD_WORDS, TableStorage
from tests.engine.kernels.cases import TABLE_KINDS, Case, cache_of, make_case, table_of
from tests.engine.kernels.test_gather import general_layout, guard
from tests.simt.module import guarded

#: Masks as (chunk_bytes, mask): whole bytes of payload or not, one run of bits or several.
MASKS = {
    "float32": (4, 0x7F800000),
    "float32-less-a-bit": (4, 0x7F400000),
    "float32-and-a-bit": (4, 0x7FC00000),
    "float32-signed": (4, 0xFF800000),
    "low-byte-of-4": (4, 0x000000FF),
    "float16-pair": (4, 0x78007800),
    "three-runs": (4, 0x70070070),
    "three-bits-of-4": (4, 0xE0000000),
    "whole-4": (4, 0xFFFFFFFF),
    "bfloat16": (2, 0x7F80),
    "bfloat16-less-a-bit": (2, 0x7F40),
    "float16": (2, 0x7C00),
    "float16-less-a-bit": (2, 0x7B00),
    "one-bit-of-2": (2, 0x8000),
    "whole-2": (2, 0xFFFF),
    "float8": (1, 0x78),
    "whole-1": (1, 0xFF),
    "float64": (8, 0x7FF0000000000000),
    "float32-pair": (8, 0x7F0000007F000000),
    "most-of-8": (8, 0xFFFFFFFFFFFFFF00),
    "whole-8": (8, 0xFFFFFFFFFFFFFFFF),
}
#: Masks that the general decoder has to decode.
OTHERS = {
    "none": (4, 0),
    "every-other-bit": (4, 0x55555555),
    "four-runs": (4, 0x11110000),
    "two-bits-of-4": (4, 0xC0000000),
    "six-bits-of-8": (8, 0xFC00000000000000),
}
names = st.sampled_from([*MASKS])
seeds = st.integers(0, 2**32 - 1)


def case_of(name: str, chunks: int, **options: Any) -> Case:
    width, mask = (MASKS | OTHERS)[name]
    bits, grouped = options.pop("code_bits", 3), options.pop("grouped", False)
    variant = Variant("gather", width, bits, grouped, options.pop("uniform", True))
    return make_case(variant, row_bytes=width * chunks, mask=mask, **options)


def gathered(table: TableStorage, case: Case, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    out = guarded(torch.full((len(ids), case.rows.shape[1]), 7, dtype=torch.uint8))
    assert cpu.gather_rows(table, case.layout, ids, out, **options) == -1
    return out


@pytest.mark.parametrize("uniform", [True, False], ids=["uniform", "positional"])
@pytest.mark.parametrize("name", MASKS)
def test_these_masks_have_the_fast_decoder(name: str, uniform: bool) -> None:
    assert constants_of(case_of(name, 40, uniform=uniform).layout).field is not None


@pytest.mark.parametrize("name", OTHERS)
def test_other_masks_have_the_general_decoder(name: str) -> None:
    case = case_of(name, 40)
    assert constants_of(case.layout).field is None
    ids = torch.arange(len(case.rows))
    assert torch.equal(gathered(table_of(case, "compact"), case, ids), case.rows)


def test_masks_that_differ_from_place_to_place_have_the_general_decoder() -> None:
    case = make_case(Variant("gather", 4), row_bytes=400)
    assert constants_of(case.layout).field is None


@given(
    name=names,
    code_bits=st.integers(1, 3),
    grouped=st.booleans(),
    uniform=st.booleans(),
    chunks=st.one_of(st.integers(1, 70), st.integers(1, 600), st.sampled_from([32, 64, 128, 256])),
    clusters=st.sampled_from([1, 1, 3]),
    kind=st.sampled_from(TABLE_KINDS),
    cached=st.booleans(),
    n_rows=st.sampled_from([1, 31, 32, 33, 70]),
    wide=st.booleans(),
    seed=seeds,
)
def test_both_decoders_give_the_rows(
    name: str,
    code_bits: int,
    grouped: bool,
    uniform: bool,
    chunks: int,
    clusters: int,
    kind: str,
    cached: bool,
    n_rows: int,
    wide: bool,
    seed: int,
) -> None:
    case = case_of(
        name,
        chunks,
        code_bits=code_bits,
        grouped=grouped,
        uniform=uniform,
        clusters=clusters,
        n_rows=n_rows,
        seed=seed,
    )
    table = table_of(case, kind)
    stored = cache_of(case, table, torch.arange(0, n_rows, 2)) if cached else None
    ids = torch.from_numpy(np.random.default_rng(seed).integers(-n_rows, n_rows, 50))
    ids = ids if wide else ids.to(torch.int32)
    counters = torch.zeros(2, 18, dtype=torch.int64)
    fast = gathered(guard(table, "end"), case, ids, cache=stored, counters=counters[0])
    assert torch.equal(fast, case.rows[ids.long()])
    general = replace(case, layout=general_layout(case.layout))
    slow = gathered(table, general, ids, cache=stored, counters=counters[1])
    assert torch.equal(slow, fast)
    assert torch.equal(counters[0], counters[1])


@pytest.mark.parametrize("row_bytes", [1024, 1028, 1 << 18, (1 << 18) + 4])
def test_lengths_of_every_width_find_the_rows(row_bytes: int) -> None:
    """They have 8 bits up to 1 KiB, 16 bits up to 256 KiB and then 32."""
    case = case_of("float32", row_bytes // 4, n_rows=40 if row_bytes < 2000 else 5, seed=1)
    lengths = table_of(case, "compact").lengths
    assert lengths is not None
    assert lengths.element_size() == (1 if row_bytes <= 1024 else 2 if row_bytes <= 1 << 18 else 4)
    ids = torch.arange(-len(case.rows), len(case.rows))
    for kind in ("compact", "compact-moved"):
        assert torch.equal(gathered(table_of(case, kind), case, ids), case.rows.repeat(2, 1))


def test_blocks_of_raw_and_packed_rows_are_found() -> None:
    """Rows as long as 8 bits can say, among raw ones, for which a length of 0 stands."""
    case = case_of("float32", 256, n_rows=320)
    noise = np.random.default_rng(0).integers(0, 256, (320, 1024), dtype=np.uint8)
    raw = torch.from_numpy(np.random.default_rng(1).random(320) < 0.4)
    rows = torch.where(raw[:, None], torch.from_numpy(noise), case.rows)
    case = replace(case, rows=rows)
    table = table_of(case, "compact")
    assert table.lengths is not None
    assert 100 < int((table.lengths == 0).sum()) < 320
    ids = torch.from_numpy(np.random.default_rng(2).permutation(320))
    assert torch.equal(gathered(table, case, ids), rows[ids])


@given(
    name=names,
    grouped=st.booleans(),
    code_bits=st.integers(1, 3),
    chunks=st.integers(1, 140),
    spare=st.integers(-1, 1),
    ones=st.floats(0, 1),
    seed=seeds,
)
def test_both_decoders_agree_on_any_words(
    name: str, grouped: bool, code_bits: int, chunks: int, spare: int, ones: float, seed: int
) -> None:
    """Whether they are sound, too."""
    case = case_of(name, chunks, grouped=grouped, code_bits=code_bits, n_rows=1)
    rng = np.random.default_rng(seed)
    bits = rng.random((case.layout.format.row_words + 16, 32)) < ones
    words = np.packbits(bits, axis=1, bitorder="little").view(np.int32).ravel()
    room = case.layout.format.row_words - 1
    need = 1 + int(rng.integers(max(1, room)))
    for size in {max(0, min(room, room + spare)), min(room, need)}:
        table = TableStorage(
            1,
            guarded(torch.from_numpy(words[: size + PAD_WORDS].copy())),
            torch.tensor([0, size]),
            torch.tensor([size]).to(case.layout.format.length_dtype),
        )
        found = []
        for layout in (case.layout, general_layout(case.layout)):
            out = torch.zeros(1, case.rows.shape[1], dtype=torch.uint8)
            found.append((cpu.gather_rows(table, layout, torch.tensor([0]), out), out))
        assert found[0][0] == found[1][0]
        assert found[0][0] == 0 or torch.equal(found[0][1], found[1][1])


@given(
    n_rows=st.sampled_from([0, 1, 75, 2**31 - 1, 2**40]),
    count=st.sampled_from([0, 1, 7, 1023, 1024, 1025, 3000]),
    wide=st.booleans(),
    bad=st.integers(0, 2999),
    seed=seeds,
)
def test_first_id_outside_is_found(
    n_rows: int, count: int, wide: bool, bad: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    dtype = np.int64 if wide else np.int32
    limits = np.iinfo(dtype)
    low, high = max(-n_rows, limits.min), min(n_rows - 1, limits.max)
    ids = rng.integers(low, high, count, dtype, endpoint=True) if n_rows else np.zeros(count, dtype)
    for place in (bad, bad + 5):
        if place < count:
            ids[place] = rng.choice([limits.min, -n_rows - 1, n_rows, limits.max]).astype(dtype)
    outside = np.flatnonzero((ids.astype(object) < -n_rows) | (ids.astype(object) >= n_rows))
    expected = int(outside[0]) if len(outside) else -1
    assert first_bad_id(torch.from_numpy(ids), n_rows) == expected


def test_first_of_several_damaged_rows_is_reported() -> None:
    case = case_of("float32", 32, n_rows=200)
    table = table_of(case, "compact")
    assert table.bases is not None
    bases = table.bases.clone()
    bases[[1, 3]] = 2**62
    prepared = PreparedTable(replace(table, bases=bases), case.layout)
    out = torch.empty(3, 128, dtype=torch.uint8)
    assert prepared.gather(torch.tensor([0, 100, 40]), out)[0] == 100
    assert prepared.gather(torch.tensor([0, -160, 100]), out)[0] == 40
    assert prepared.gather(torch.tensor([0, 64, 199]), out)[0] == -1
