"""Variants of the CUDA kernels, run on the CPU, give the bytes of their Numba twins."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from bitslab.engine.codecs.invariant.layout import build_layout
from bitslab.engine.kernels import cpu
from bitslab.engine.kernels.cuda.encode import BLOCKS
from bitslab.engine.kernels.cuda.runner import DAMAGED_ERROR, INDEX_ERROR, NO_ERROR
from bitslab.engine.kernels.cuda.source import MIN_SHORT_VECTOR, Variant, short_lanes
from bitslab.engine.kernels.cuda.tiles import (
    NARROW_ROW_BYTES,
    SHORT_ROW_BYTES,
    STAGE_BYTES,
    WARPS,
    WAVES,
    run_shape,
)
from bitslab.engine.kernels.format import RowStorage
from bitslab.errors import ArgumentError
from tests import pairwise
from tests.engine.kernels.cases import WORD_MASKS, Case, make_case, pack, pack_on_cpu
from tests.simt.module import guarded
from tests.simt.runner import SimtRunner, simt_kernels
from tests.simt.variants import settings_of, variants_drawn

#: Those that other tests of this file decode with; with them goes an encoder of each plan.
NAMED = [
    *(Variant("decode", 4, 3, *plan) for plan in product((False, True), (False, True), (1, 4))),
    *(Variant("decode", 2, 1, False, uniform) for uniform in (False, True)),
    *(Variant("decode", width, 1, False, True) for width in (4, 8)),
    Variant("decode", 4, 1, True, True, 4),
    Variant("decode", 2, 3, False, True, 8, byte_field=True),
]
DECODERS = variants_drawn("decode", NAMED)
ENCODERS = variants_drawn(
    "encode", [Variant("encode", 4, 3, *plan) for plan in product((False, True), (False, True))]
)


def by_name(variant: Variant) -> str:
    return variant.name


def profiles_of(variant: Variant) -> tuple[int, ...]:
    """Rows with clusters take the decoder of one chunk a lane."""
    return (1, 3) if variant.vector == 1 else (1,)


def assert_decodes(case: Case, storage: RowStorage, facts, seed: int, kernel="decode_rows"):
    kernels, runner = simt_kernels(seed)
    n, row_bytes = case.rows.shape
    guarded_words = RowStorage(
        guarded(storage.words), storage.bases, storage.lengths, storage.row_clusters
    )
    for start, stop in ((0, n), (n // 2 - 1, n - 1)):
        out = guarded(torch.full((stop - start, row_bytes), 0xA5, dtype=torch.uint8))
        kernels.decode_rows(guarded_words, case.layout, None, start, out, facts)
        assert torch.equal(out, case.rows[start:stop])
    ids = torch.from_numpy(np.random.default_rng(seed).integers(-n, n, 13))
    out = guarded(torch.full((len(ids), row_bytes), 0xA5, dtype=torch.uint8))
    kernels.decode_rows(guarded_words, case.layout, ids, 0, out, facts)
    assert torch.equal(out, case.rows[ids])
    assert runner.mailbox[0] == NO_ERROR
    return {used for used in runner.launched if used[1].startswith("decode")}


@pytest.mark.parametrize("n_rows", [9, 31])
@pytest.mark.parametrize(
    "variant",
    [
        Variant("decode", 2, 1, True, True, 8, words=True),
        Variant("decode", 2, 3, True, True, 8, byte_field=True),
        Variant("decode", 4, 3, True, True, 4),
    ],
    ids=by_name,
)
def test_lanes_without_a_row_read_nothing_behind_the_stage(variant, n_rows):
    """In groups of eight lanes, next to rows of a last block that is the largest one."""
    mask = 0x8000 if variant.words else None
    for seed in range(2):
        case = make_case(variant, n_rows=n_rows, row_bytes=1024, seed=seed, mask=mask)
        assert_decodes(case, *pack_on_cpu(case), seed)


@pytest.mark.drawn(7)
@pytest.mark.parametrize("variant", DECODERS, ids=by_name)
def test_decode_kernel_rebuilds_every_row(variant):
    for clusters in profiles_of(variant):
        for seed in range(2):
            case = make_case(variant, clusters=clusters, n_rows=45, seed=seed)
            used = assert_decodes(case, *pack_on_cpu(case), seed)
            short = variant.vector >= MIN_SHORT_VECTOR and case.rows.shape[1] <= most_bytes(variant)
            assert used == {(variant, "decode_short_rows" if short else "decode_rows")}


def most_bytes(variant: Variant) -> int:
    """Rows up to which eight lanes take one."""
    return SHORT_ROW_BYTES if variant.uniform else NARROW_ROW_BYTES


#: A plan for every mask that is applied to whole words; all of them with ``BITSLAB_FULL=1``.
WORD_PLANS = [
    (width, mask, 1 + (i + j) % 3, j)
    for width, masks in WORD_MASKS.items()
    for i, mask in enumerate(masks)
    for j in range(3 if pairwise.FULL else 1)
]


def variant_of_word_plan(file: str, width: int, mask: int, code_bits: int) -> Variant:
    byte_field = (mask, code_bits) == (0x7F80, 3)  # which has kernels of its own
    vector = 1 if file == "encode" else 16 // width
    words = not byte_field
    return Variant(file, width, code_bits, False, True, vector, byte_field, words=words)


@pytest.mark.drawn(5)
@pytest.mark.parametrize("grouped", [False, True], ids=["plain", "grouped"])
@pytest.mark.parametrize(
    ("width", "mask", "code_bits", "seed"), WORD_PLANS, ids=lambda given: f"{given:x}"
)
def test_masks_are_applied_to_whole_words(width, mask, code_bits, seed, grouped):
    variant = variant_of_word_plan("decode", width, mask, code_bits)
    variant = replace(variant, grouped=grouped)
    # Eight lanes decode the shorter rows.
    for row_bytes, kernel in ((16 * 23, "decode_short_rows"), (16 * 81, "decode_rows")):
        case = make_case(variant, n_rows=40, row_bytes=row_bytes, seed=seed, mask=mask)
        used = assert_decodes(case, *pack_on_cpu(case), seed)
        assert used == {(variant, kernel)}


@pytest.mark.drawn(6)
@pytest.mark.parametrize(
    ("width", "mask", "code_bits", "seed"), WORD_PLANS, ids=lambda given: f"{given:x}"
)
def test_rows_are_packed_by_whole_words(width, mask, code_bits, seed):
    variant = variant_of_word_plan("encode", width, mask, code_bits)
    # The last but one is not packed by words, the last one not in shared memory.
    for n_rows, row_bytes in ((40, 16 * 23), (40, 16 * 81), (9, 16 * 81 + width), (6, 16 * 401)):
        case = make_case(variant, n_rows=n_rows, row_bytes=row_bytes, seed=seed, mask=mask)
        assert_packs(variant, case, seed)


def assert_packs(variant: Variant, case: Case, seed: int):
    expected, _ = pack_on_cpu(case)
    case.rows = guarded(case.rows)
    kernels, runner = simt_kernels(seed)
    got, _ = pack(kernels, case)
    assert torch.equal(got.lengths, expected.lengths)
    assert torch.equal(got.words, expected.words)
    assert {each for each, _ in runner.launched} == {variant}
    return set(runner.launched)


@pytest.mark.parametrize("width", [2, 4])
def test_long_rows_of_byte_fields_are_packed_in_place(width):
    variant = Variant("encode", width, 3, False, True, byte_field=True)
    case = make_case(variant, n_rows=7, row_bytes=16 * 401)
    case.rows[3].random_()  # a row kept raw
    assert_packs(variant, case, 0)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("variant", "row_bytes", "kernel"),
    [
        (Variant("encode", 2, 3, False, True, byte_field=True), 256, "encode_short_rows"),
        (Variant("encode", 4, 3, False, True, byte_field=True), 128, "encode_short_rows"),
        (Variant("encode", 4, 3, False, True, byte_field=True), 48, "encode_short_rows"),
        (Variant("encode", 4, 3, False, True, byte_field=True), 272, "encode_rows"),
        (Variant("encode", 1, 3, False, True, words=True), 64, "encode_short_rows"),
        (Variant("encode", 1, 2, False, True, words=True), 256, "encode_short_rows"),
        (Variant("encode", 2, 3, False, True, words=True), 80, "encode_short_rows"),
        (Variant("encode", 2, 1, False, True, words=True), 16, "encode_short_rows"),
        (Variant("encode", 1, 3, False, True, words=True), 272, "encode_rows"),
        (Variant("encode", 1, 3, False, True, words=True), 56, "encode_rows"),
    ],
    ids=[
        "2B-256",
        "4B-128",
        "4B-48",
        "4B-272",
        "1B-64",
        "1B-256",
        "2B-80",
        "2B-16",
        "1B-272",
        "1B-56",
    ],
)
def test_a_warp_packs_several_short_rows(variant, row_bytes, kernel, seed):
    warps = BLOCKS * SimtRunner.multiprocessors * WARPS
    # With enough rows a warp takes several rounds of a block after each other.
    rounds = 32 // short_lanes(variant)
    many = 4 * warps * 2 * rounds + 45 if seed == 0 else 45
    case = make_case(variant, n_rows=many, row_bytes=row_bytes, seed=seed)
    case.rows[-2].random_()  # a row kept raw
    measured = "packed_words_of_short_rows" if kernel == "encode_short_rows" else "packed_words"
    assert {name for _, name in assert_packs(variant, case, seed)} == {measured, kernel}


def many_short_rows(n_rows: int) -> tuple[Case, RowStorage, dict[str, int]]:
    variant = Variant("decode", 4, 3, False, True, 4, byte_field=True)
    case = make_case(variant, n_rows=n_rows, row_bytes=64)
    return case, *pack_on_cpu(case)


@pytest.mark.parametrize("blocks", [2, 4], ids=["64-rows", "128-rows"])
def test_many_short_rows_are_decoded_in_tiles_of_several_blocks(blocks):
    kernels, runner = simt_kernels()
    at_once = runner.multiprocessors * 4 * WAVES
    n = 32 * blocks * at_once + 45
    case, storage, facts = many_short_rows(n)
    assert run_shape(case.layout.format, facts, n // at_once).tile_rows == 32 * blocks
    for start, stop in ((0, n), (75, n - 1)):
        out = guarded(torch.full((stop - start, 64), 0xA5, dtype=torch.uint8))
        guarded_words = replace(storage, words=guarded(storage.words))
        kernels.decode_rows(guarded_words, case.layout, None, start, out, facts)
        assert torch.equal(out, case.rows[start:stop])
    assert runner.mailbox[0] == NO_ERROR
    assert {name for _, name in runner.launched} == {"decode_short_rows"}


@pytest.mark.parametrize("change_words", [-5, 3, 1 << 40], ids=["less", "more", "far-more"])
@pytest.mark.parametrize("block", [0, 1, 2, 5])
def test_damaged_bases_among_several_blocks_of_a_tile_are_reported(block, change_words):
    kernels, runner = simt_kernels()
    n = 32 * 4 * runner.multiprocessors * 4 * WAVES
    case, storage, facts = many_short_rows(n)
    bases = storage.bases.clone()
    bases[block] += change_words
    damaged = replace(storage, bases=guarded(bases), words=guarded(storage.words))
    out = guarded(torch.zeros_like(case.rows))
    kernels.decode_rows(damaged, case.layout, None, 0, out, facts)
    assert runner.mailbox[0] == DAMAGED_ERROR
    assert torch.equal(out[256:], case.rows[256:])


@pytest.mark.parametrize("sm_budget", [None, 2], ids=["all", "two-multiprocessors"])
def test_prepared_decodes_read_what_is_there_when_they_start(sm_budget):
    case = make_case(Variant("decode", 2, 3, False, True, 8, byte_field=True), n_rows=45)
    storage, facts = pack_on_cpu(case)
    words = torch.zeros_like(storage.words)
    staged = RowStorage(words, storage.bases, storage.lengths, storage.row_clusters)
    kernels, runner = simt_kernels()
    out = guarded(torch.zeros_like(case.rows))
    decode = kernels.prepare_decode(staged, case.layout, out, facts, sm_budget)
    for _ in range(2):
        words.copy_(storage.words)
        out.fill_(0xA5)
        decode()
        assert torch.equal(out, case.rows)
        words.zero_()
    assert runner.mailbox[0] == NO_ERROR


def test_prepared_decodes_refuse_places_that_a_kernel_cannot_use():
    case = make_case(Variant("decode", 2, 3, False, True, 8, byte_field=True), n_rows=8)
    storage, facts = pack_on_cpu(case)
    kernels, _ = simt_kernels()
    n_bytes = case.rows.numel()
    out = torch.zeros(n_bytes + 1, dtype=torch.uint8)[1:].view(case.rows.shape)
    with pytest.raises(ArgumentError, match="out: starts at no multiple of 2 bytes"):
        kernels.prepare_decode(storage, case.layout, out, facts)
    words = torch.cat([storage.words, storage.words[:1]])[1:]
    moved = RowStorage(words, storage.bases, storage.lengths, storage.row_clusters)
    with pytest.raises(ArgumentError, match="words start at no multiple of 16 bytes"):
        kernels.prepare_decode(moved, case.layout, torch.zeros_like(case.rows), facts)
    nothing = kernels.prepare_decode(storage, case.layout, torch.zeros_like(case.rows[:0]), facts)
    nothing()


@pytest.mark.drawn(8)
@pytest.mark.pairwise
@pytest.mark.parametrize("variant", ENCODERS, ids=by_name)
@pytest.mark.parametrize("row_bytes", [None, 16 * 37], ids=["odd-rows", "aligned-rows"])
def test_encode_kernels_write_the_bytes_of_their_twins(variant, row_bytes):
    for clusters in (1, 3):
        for seed in range(2):
            case = make_case(variant, clusters=clusters, n_rows=45, row_bytes=row_bytes, seed=seed)
            kernels, _ = simt_kernels(seed)
            expected, _ = pack_on_cpu(case)
            case.rows = guarded(case.rows)
            got, _ = pack(kernels, case)
            assert torch.equal(got.lengths, expected.lengths)
            assert torch.equal(got.row_clusters, expected.row_clusters)
            assert torch.equal(got.words, expected.words)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_count_kernel_counts_like_its_twin(width):
    rows = torch.randint(0, 256, (150, 40), dtype=torch.uint8)
    kernels, _ = simt_kernels()
    assert torch.equal(kernels.count_bits(rows, width), cpu.count_bits(rows, width))


# Rows of several kilobytes: warps share a row; above the stage, rows are read where they are.
LARGE = {"two-warps-a-row": 9 << 10, "block-a-row": 24 << 10, "longer-than-the-stage": 64 << 10}


@pytest.mark.pairwise
@pytest.mark.parametrize("row_bytes", LARGE.values(), ids=LARGE)
@pytest.mark.parametrize("grouped", [False, True], ids=["plain", "grouped"])
@pytest.mark.parametrize("uniform", [False, True], ids=["positional", "uniform"])
@pytest.mark.parametrize("vector", [1, 4], ids=["narrow", "wide"])
def test_large_rows_are_shared_by_warps(row_bytes, grouped, uniform, vector):
    if vector == 1:
        row_bytes += 4
    variant = Variant("decode", 4, 3, grouped, uniform, vector)
    case = make_case(variant, n_rows=6, row_bytes=row_bytes)
    case.rows[3].random_()  # a row kept raw, the longest there can be
    kernels, _ = simt_kernels()
    storage, facts = pack(kernels, case)
    expected, _ = pack_on_cpu(case)
    assert torch.equal(storage.words, expected.words)
    kernel = "decode_long_rows" if row_bytes > STAGE_BYTES else "decode_rows"
    assert {name for _, name in assert_decodes(case, storage, facts, 0)} == {kernel}


def test_bad_id_leaves_the_output_untouched_and_is_reported():
    case = make_case(Variant("decode", 4, 3, False, True, 4))
    storage, facts = pack_on_cpu(case)
    kernels, runner = simt_kernels()
    out = torch.full((3, case.rows.shape[1]), 0xA5, dtype=torch.uint8)
    kernels.decode_rows(storage, case.layout, torch.tensor([0, -71, 99]), 0, out, facts)
    assert (out == 0xA5).all()
    assert runner.mailbox.tolist() == [INDEX_ERROR, 1, -71, 70]


@pytest.mark.drawn(8)
@pytest.mark.pairwise(variant=settings_of)
@pytest.mark.parametrize("variant", DECODERS, ids=by_name)
@pytest.mark.parametrize("part", ["words", "bases", "lengths", "row_clusters"])
def test_damaged_rows_never_reach_outside_the_buffers(variant, part):
    if part == "row_clusters":
        variant = replace(variant, vector=1, byte_field=False)
    rng = np.random.default_rng([3, *variant.name.encode()])
    case = make_case(variant, clusters=3 if part == "row_clusters" else 1, n_rows=40)
    storage, facts = pack_on_cpu(case)
    reported = 0
    for trial in range(12):
        parts = {
            "words": storage.words.clone(),
            "bases": storage.bases.clone(),
            "lengths": storage.lengths.clone(),
            "row_clusters": storage.row_clusters.clone(),
        }
        damaged = parts[part].view(torch.uint8)
        where = torch.from_numpy(rng.integers(0, damaged.numel(), 1 + 8 * (trial % 3)))
        damaged[where] ^= torch.from_numpy(rng.integers(1, 256, len(where), dtype=np.uint8))
        parts = {name: guarded(t) if t.numel() else t for name, t in parts.items()}
        kernels, runner = simt_kernels(trial)
        out = guarded(torch.zeros_like(case.rows))
        kernels.decode_rows(RowStorage(**parts), case.layout, None, 0, out, facts)
        ids = torch.arange(0, 40, 3)
        out = guarded(torch.zeros(len(ids), case.rows.shape[1], dtype=torch.uint8))
        kernels.decode_rows(RowStorage(**parts), case.layout, ids, 0, out, facts)
        reported += int(runner.mailbox[0]) == DAMAGED_ERROR
    assert reported > 0 or part == "words"


@pytest.mark.parametrize("ids", [None, torch.arange(40)], ids=["in-order", "by-id"])
@pytest.mark.parametrize("uniform", [False, True], ids=["positional", "uniform"])
def test_a_row_of_a_cluster_that_is_not_there_looks_at_no_profile(uniform, ids):
    case = make_case(Variant("decode", 2, 1, False, uniform, 1), clusters=3, n_rows=40)
    storage, facts = pack_on_cpu(case)
    layout = case.layout
    layout = replace(layout, tables=guarded(layout.tables), starts=guarded(layout.starts))
    for row, cluster in ((7, 3), (39, 255)):
        clusters = storage.row_clusters.clone()
        clusters[row] = cluster
        kernels, runner = simt_kernels()
        out = torch.zeros_like(case.rows)
        damaged = replace(storage, row_clusters=clusters)
        kernels.decode_rows(damaged, layout, ids, 0, out, facts)
        assert runner.mailbox[0] == DAMAGED_ERROR
        good = torch.arange(40) != row
        assert torch.equal(out[good], case.rows[good])


@pytest.mark.parametrize("row_bytes", [64, 4096], ids=["tiles-of-32", "tiles-of-fewer"])
@pytest.mark.parametrize("base", [1, 2, 3], ids=["second", "third", "end"])
@pytest.mark.parametrize("change_words", [-5, 1 << 40], ids=["less", "far-more"])
def test_a_base_that_does_not_continue_the_lengths_before_it_is_reported(
    row_bytes, base, change_words
):
    case = make_case(Variant("decode", 4, 3, False, True, 4), n_rows=70, row_bytes=row_bytes)
    storage, facts = pack_on_cpu(case)
    bases = storage.bases.clone()
    bases[base] += change_words
    damaged = replace(storage, bases=guarded(bases), words=guarded(storage.words))
    kernels, runner = simt_kernels()
    out = guarded(torch.zeros_like(case.rows))
    kernels.decode_rows(damaged, case.layout, None, 0, out, facts)
    assert runner.mailbox[0] == DAMAGED_ERROR
    assert cpu.decode_rows(damaged, case.layout, None, 0, out.clone()) == 32 * (base - 1)
    # The rows before the block in front of it are reported by neither.
    before = out[: 32 * (base - 1)]
    runner.mailbox[0] = NO_ERROR
    if len(before):
        kernels.decode_rows(damaged, case.layout, None, 0, before, facts)
        assert runner.mailbox[0] == NO_ERROR
        assert torch.equal(before, case.rows[: len(before)])
        assert cpu.decode_rows(damaged, case.layout, None, 0, before) == -1


@pytest.mark.parametrize("change_words", [1 << 20, 1 << 30, (1 << 31) - 75])
def test_damaged_lengths_of_four_bytes_do_not_wrap_around(change_words):
    variant = Variant("decode", 4, 1, True, True, 4)
    case = make_case(variant, n_rows=8, row_bytes=(256 << 10) + 16)
    case.rows[:] = torch.from_numpy(np.full(case.rows.shape[1] // 4, 7, np.uint32).view(np.uint8))
    masks = np.full((1, 1), 0xFFFFFFFF, np.uint32)
    layout = build_layout(case.layout.format, masks, np.full((1, 1, 1), 7, np.uint32))
    case.layout = layout
    storage, facts = pack_on_cpu(case)
    assert storage.lengths.dtype == torch.int32
    storage.lengths[0] += change_words
    storage.lengths[3] -= change_words
    kernels, runner = simt_kernels()
    for ids in (None, torch.arange(8)):
        out = guarded(torch.zeros_like(case.rows))
        kernels.decode_rows(storage, layout, ids, 0, out, facts)
    assert runner.mailbox[0] == DAMAGED_ERROR


@pytest.mark.parametrize("width", [2, 4, 8])
def test_output_at_an_odd_address_is_decoded(width):
    case = make_case(Variant("decode", width, 1, False, True, 1), n_rows=40)
    storage, facts = pack_on_cpu(case)
    kernels, _ = simt_kernels()
    n, row_bytes = case.rows.shape
    buffer = torch.zeros(n * row_bytes + 1, dtype=torch.uint8)
    out = buffer[1:].view(n, row_bytes)
    kernels.decode_rows(storage, case.layout, None, 0, out, facts)
    assert torch.equal(out, case.rows)
    kernels.decode_rows(storage, case.layout, torch.arange(n), 0, out, facts)
    assert torch.equal(out, case.rows)
