"""The kernel that joins the tokens of a K/V layer, run on the CPU, gives what its twin gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bitslab.engine.kernels.cpu.join import join_rows
from bitslab.engine.kernels.cuda.join import JoinKernels
from bitslab.engine.kernels.cuda.runner import DAMAGED_ERROR, NO_ERROR
from bitslab.engine.kernels.cuda.source import Variant
from bitslab.engine.kernels.joins import PackedRun, SideTokens
from tests.engine.kernels.cases import make_case
from tests.engine.kernels.join_cases import BATCH, HEADS, runs_of, side_of
from tests.simt.module import guarded
from tests.simt.runner import SimtRunner, simt_kernels
from tests.simt.variants import variants_drawn

BFLOAT16 = Variant("join", 2, 3, False, True, 8, byte_field=True)
NAMED = [
    BFLOAT16,
    Variant("join", 4, 1, False, False, 4),
    Variant("join", 1, 1, True, True, 16),
    Variant("join", 4, 3, False, True, 4, byte_field=True),
]
JOINERS = variants_drawn("join", NAMED)


def join_and_compare(
    k_runs: list[PackedRun],
    v_runs: list[PackedRun],
    token_bytes: tuple[int, int],
    unpacked: tuple[tuple[int, int, int | None], tuple[int, int, int | None]],
    seed: int = 0,
) -> SimtRunner:
    kernels, runner = simt_kernels(seed)
    sides = [
        [
            side_of(nbytes, sum(run.tokens for run in runs), *sizes, seed=seed + i, place=guarded)
            for i, (nbytes, runs, sizes) in enumerate(
                zip(token_bytes, (k_runs, v_runs), unpacked, strict=True)
            )
        ]
        for _ in range(2)
    ]
    for runs, side in zip((k_runs, v_runs), sides[0], strict=True):
        assert join_rows(runs, side) == -1
    prepared = kernels.prepare_join((k_runs, v_runs), BATCH, HEADS, token_bytes)
    prepared(*sides[1])
    assert runner.mailbox[0] == NO_ERROR
    for expected, found in zip(*sides, strict=True):
        assert torch.equal(found.out, expected.out)
        assert torch.equal(found.memory, expected.memory)
    assert {kernel for _, kernel in runner.launched} == {"join_rows"}
    return runner


@pytest.mark.drawn(4)
@pytest.mark.parametrize("number", range(len(JOINERS)), ids=[v.name for v in JOINERS])
def test_one_launch_joins_keys_and_values(number: int) -> None:
    variant = JOINERS[number]
    keys, values = (
        make_case(variant, n_rows=45, row_bytes=nbytes, seed=number)
        for nbytes in ((16, 128), (256, 64), (1024, 320))[number % 3]
    )
    each = 1 << number % 3  # tokens of a row
    sizes = [case.rows.shape[1] // each for case in (keys, values)]
    unpacked = ((5, 1, 3), (70, 2, None)) if number % 2 else ((0, 1, None), (9, 1, 0))
    runner = join_and_compare(
        runs_of(keys, [33], each, seed=number, place=guarded),
        runs_of(values, [7], each, seed=number + 1, place=guarded),
        (sizes[0], sizes[1]),
        unpacked,
        seed=number,
    )
    assert runner.launched == [(variant, "join_rows")]


def test_the_twin_puts_tokens_in_order() -> None:
    case = make_case(BFLOAT16, n_rows=45, row_bytes=64)
    (run,) = runs_of(case, [4], place=guarded)
    side = side_of(64, 4, 3, 2, 5, seed=1)
    before = side.memory.clone()
    assert join_rows([run], side) == -1
    packed = case.rows[run.ids.long()].view(BATCH, HEADS, 4, 64)
    assert torch.equal(side.out, torch.cat([packed, before[:, :, :3], side.new], dim=2))
    assert torch.equal(side.memory[:, :, 3:5], side.new)
    for kept in (slice(0, 3), slice(5, None)):
        assert torch.equal(side.memory[:, :, kept], before[:, :, kept])


def test_sides_that_are_packed_otherwise_take_a_launch_each() -> None:
    keys = make_case(BFLOAT16, n_rows=45, row_bytes=128)
    values = make_case(NAMED[1], n_rows=45, row_bytes=64)
    runner = join_and_compare(
        runs_of(keys, [40, 9], place=guarded),
        runs_of(values, [6], place=guarded),
        (128, 64),
        ((3, 1, 1), (4, 1, None)),
    )
    assert [variant.name for variant, _ in runner.launched] == [
        BFLOAT16.name,
        BFLOAT16.name,
        NAMED[1].name,
    ]
    others = make_case(BFLOAT16, n_rows=45, row_bytes=64)
    runner = join_and_compare(
        runs_of(keys, [40, 9], place=guarded),
        runs_of(others, [6], place=guarded),
        (128, 64),
        ((3, 1, 1), (46, 1, 2)),
    )
    assert len(runner.launched) == 2


@pytest.mark.parametrize("side", [0, 1])
def test_one_side_alone_may_be_packed(side: int) -> None:
    case = make_case(BFLOAT16, n_rows=45, row_bytes=128)
    runs = [runs_of(case, [40], place=guarded) if i == side else [] for i in range(2)]
    token_bytes = (256, 128) if side else (128, 256)
    join_and_compare(runs[0], runs[1], token_bytes, ((3, 1, 1), (46, 1, None)), seed=3)


def test_many_new_tokens_are_joined() -> None:
    case = make_case(BFLOAT16, n_rows=45, row_bytes=512)
    runs = runs_of(case, [50], row_tokens=2, place=guarded)
    join_and_compare(runs, runs, (256, 256), ((30, 65, None), (30, 65, 0)))


def test_no_sequences_take_no_launch() -> None:
    case = make_case(BFLOAT16, n_rows=45, row_bytes=128)
    (run,) = runs_of(case, [40])
    none = replace(run, ids=run.ids[:0])
    kernels, runner = simt_kernels()
    some = side_of(128, 40, 3, 1, 1, 0)
    side = SideTokens(some.tail[:0], some.tail_tokens, some.new[:0], some.memory[:0], some.out[:0])
    kernels.prepare_join(([none], [none]), 0, HEADS, (128, 128))(side, side)
    assert not runner.launched


def test_a_damaged_row_is_reported() -> None:
    case = make_case(BFLOAT16, n_rows=45, row_bytes=128)
    (run,) = runs_of(case, [40], place=guarded)
    kernels, runner = simt_kernels()
    bases = run.table.bases
    assert bases is not None
    damaged = replace(run, table=replace(run.table, bases=bases + (1 << 40)))
    side = side_of(128, 40, 3, 1, 1, seed=0)
    kernels.prepare_join(([damaged], []), BATCH, HEADS, (128, 128))(side, side)
    assert runner.mailbox[0] == DAMAGED_ERROR


@pytest.mark.parametrize(
    ("variant", "clusters", "row_bytes", "token_bytes", "served"),
    [
        (BFLOAT16, 1, 256, 256, True),
        (BFLOAT16, 1, 256, 64, True),
        (BFLOAT16, 1, 192, 24, False),
        (BFLOAT16, 1, 1024, 1024, True),
        (BFLOAT16, 1, 1040, 1040, False),
        (NAMED[3], 1, 1024, 1024, True),
        (Variant("join", 8, 1, False, True, 2), 1, 64, 64, False),
        (Variant("join", 2, 3, False, True, 1), 1, 66, 66, False),
        (Variant("join", 2, 3, False, True, 1), 3, 64, 64, False),
    ],
)
def test_what_is_served(
    variant: Variant, clusters: int, row_bytes: int, token_bytes: int, served: bool
) -> None:
    case = make_case(variant, clusters=clusters, n_rows=5, row_bytes=row_bytes)
    assert JoinKernels.serves(case.layout, token_bytes) is served
