"""Bags of rows: the pooling kernel against torch.embedding_bag, and offsets that are not sound."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bitslab.engine.kernels.cpu import bags as twin
from bitslab.engine.kernels.cuda.bags import NO_PADDING, POOLED_DTYPES, BagKernels
from bitslab.engine.kernels.cuda.runner import INDEX_ERROR, NO_ERROR, OFFSETS_ERROR
from tests.helpers import dtype_id, same_bits
from tests.simt.module import guarded
from tests.simt.runner import SimtRunner

MODES = ("sum", "mean", "max")
N_ROWS, N_IDS = 50, 70
SOUND = {
    "one-each": list(range(N_IDS)),
    "some-empty": [0, 0, 3, 3, 3, 20, 64, 70, 70],
    "one-bag": [0],
}


def made(dim: int, dtype: torch.dtype, seed: int = 0):
    """Return rows of whole numbers, which all sums are exact of, and ids."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(-99, 99, (N_ROWS, dim), generator=generator).to(dtype)
    return guarded(rows), guarded(torch.randint(N_ROWS, (N_IDS,), generator=generator))


@pytest.mark.drawn(10)
@pytest.mark.pairwise
@pytest.mark.parametrize("by_warps", [False, True], ids=["threads", "warps"])
@pytest.mark.parametrize("include_last", [False, True], ids=["", "with-end"])
@pytest.mark.parametrize("padding", [None, 7], ids=["", "padding"])
@pytest.mark.parametrize("dim", [1, 3, 8, 200])
@pytest.mark.parametrize("mode", range(3), ids=MODES)
@pytest.mark.parametrize("dtype", POOLED_DTYPES, ids=dtype_id)
@pytest.mark.parametrize("bags", SOUND)
def test_bags_are_those_of_torch(bags, dtype, mode, dim, padding, include_last, by_warps):
    rows, ids = made(dim, dtype)
    ids[::5] = 7
    offsets = torch.tensor(SOUND[bags] + [N_IDS] * include_last)
    expected = torch.nn.functional.embedding_bag(
        ids, rows, offsets, mode=MODES[mode], padding_idx=padding, include_last_offset=include_last
    )
    runner = SimtRunner(1)
    for kind in (torch.int64, torch.int32):
        index, begins = guarded(ids.to(kind)), guarded(offsets.to(kind))
        found = BagKernels(runner).pool(
            rows,
            index,
            begins,
            mode,
            padding=padding,
            include_last=include_last,
            by_warps=by_warps,
        )
        assert same_bits(found, expected)
    assert not runner.mailbox.any()


@pytest.mark.drawn(6)
@pytest.mark.parametrize("by_warps", [False, True], ids=["threads", "warps"])
@pytest.mark.parametrize("include_last", [False, True], ids=["", "with-end"])
@pytest.mark.parametrize("mode", range(3), ids=MODES)
@pytest.mark.parametrize(
    ("dtype", "id_dtype"),
    [(torch.float32, torch.int64), (torch.float64, torch.int32)],
    ids=["float32", "float64"],
)
def test_sums_that_round_are_those_of_the_twin(dtype, id_dtype, mode, include_last, by_warps):
    generator = torch.Generator().manual_seed(mode)
    rows = guarded(torch.randn(N_ROWS, 8, generator=generator, dtype=dtype))
    for k, value in enumerate((0.0, -0.0, float("inf"), 1e-310, 1e-42)):
        rows[k::17] = value
    ids = torch.randint(N_ROWS, (N_IDS,), generator=generator).to(id_dtype)
    ids[::5] = 7
    for values in SOUND.values():
        offsets = torch.tensor(values + [N_IDS] * include_last, dtype=id_dtype)
        found = BagKernels(SimtRunner(mode)).pool(
            rows,
            guarded(ids),
            guarded(offsets),
            mode,
            padding=7,
            include_last=include_last,
            by_warps=by_warps,
        )
        out = torch.empty_like(found)
        arrays = (rows.numpy(), ids.numpy(), 7, offsets.numpy(), include_last, mode, out.numpy())
        assert twin.pool_bags(*arrays) == (-1, -1)
        assert same_bits(out, found)


@pytest.mark.parametrize("by_warps", [False, True], ids=["threads", "warps"])
def test_rows_at_odd_addresses_are_pooled_one_value_at_a_time(by_warps):
    rows, ids = made(9, torch.float32)
    rows = guarded(rows.flatten())[1:9].view(2, 4)
    ids, offsets = ids % 2, torch.tensor([0, 5, 60])
    runner = SimtRunner()
    found = BagKernels(runner).pool(rows, ids, offsets, 0, by_warps=by_warps)
    assert same_bits(found, torch.nn.functional.embedding_bag(ids, rows, offsets, mode="sum"))
    assert runner.launched[0][0].defines()["VECTOR"] == 1


@pytest.mark.parametrize("by_warps", [False, True], ids=["threads", "warps"])
def test_more_bags_than_threads_are_all_pooled(by_warps):
    rows, _ = made(4, torch.float32)
    ids = torch.arange(9000) % N_ROWS
    found = BagKernels(SimtRunner()).pool(rows, ids, torch.arange(9000), 0, by_warps=by_warps)
    assert same_bits(found, rows[ids])


UNSOUND = {
    "begins-late": ([1, 5], False),
    "falls": ([0, 9, 8, 10], False),
    "beyond": ([0, 5, N_IDS + 1, N_IDS + 2], False),
    "last-beyond": ([0, N_IDS + 1], False),
    "negative": ([0, -3, 5], False),
    "ends-early": ([0, 5, N_IDS - 1], True),
    "end-alone": ([3], True),
    "ends-late": ([0, N_IDS + 4], True),
}


@pytest.mark.pairwise
@pytest.mark.parametrize("by_warps", [False, True], ids=["threads", "warps"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("case", UNSOUND)
def test_offsets_that_are_not_sound_are_reported_and_nothing_beyond_the_ids_is_read(
    case, dtype, by_warps
):
    values, include_last = UNSOUND[case]
    rows, ids = made(8, torch.float32)
    offsets = guarded(torch.tensor(values, dtype=dtype))
    for mode in range(3):
        runner = SimtRunner(mode)
        out = BagKernels(runner).pool(
            rows, ids, offsets, mode, include_last=include_last, by_warps=by_warps
        )
        kind, where, _, n_ids = runner.mailbox.tolist()
        assert (kind, n_ids) == (OFFSETS_ERROR, N_IDS) and 0 <= where < len(values)
        assert out.shape[0] == len(values) - include_last
    runner = SimtRunner()
    found = BagKernels(runner).sound_offsets(offsets, N_IDS, include_last=include_last)
    assert found.tolist() == [0] * (len(values) - include_last) + [N_IDS] * include_last
    kind, where, _, n_ids = runner.mailbox.tolist()
    assert (kind, n_ids) == (OFFSETS_ERROR, N_IDS)
    rising = [0, *values]
    first_bad = next(
        b
        for b in range(len(values))
        if not rising[b] <= values[b] <= N_IDS
        or (b == 0 and values[b])
        or (include_last and b == len(values) - 1 and values[b] != N_IDS)
    )
    assert where == first_bad
    copied = torch.empty_like(found)
    bad = twin.sound_offsets(offsets.numpy(), N_IDS, include_last, copied.numpy())
    assert bad == first_bad and torch.equal(copied, found)
    for mode in range(3):
        out = BagKernels(SimtRunner()).pool(
            rows, ids, offsets, mode, include_last=include_last, by_warps=by_warps
        )
        pooled = torch.empty_like(out)
        bad_bag, bad_id = twin.pool_bags(
            rows.numpy(),
            ids.numpy(),
            NO_PADDING,
            offsets.numpy(),
            include_last,
            mode,
            pooled.numpy(),
        )
        assert 0 <= bad_bag < len(values) and bad_id == -1
        assert same_bits(pooled, out)


@pytest.mark.parametrize("n", [0, 1, 1024, 5000])
@pytest.mark.parametrize("include_last", [False, True], ids=["", "with-end"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_sound_offsets_are_copied(n, include_last, dtype):
    generator = torch.Generator().manual_seed(n)
    offsets = torch.randint(9000, (n,), generator=generator).sort().values
    offsets[:1] = 0
    offsets = torch.cat([offsets, torch.tensor([9000])]) if include_last else offsets
    if include_last and n == 0:
        offsets[0] = 0
    n_ids = 9000 if n else 0
    runner = SimtRunner()
    given = guarded(offsets.to(dtype))
    found = BagKernels(runner).sound_offsets(given, n_ids, include_last=include_last)
    assert torch.equal(found, offsets) and found.dtype == torch.int64
    copied = torch.empty_like(found)
    assert twin.sound_offsets(given.numpy(), n_ids, include_last, copied.numpy()) == -1
    assert torch.equal(copied, found)
    assert runner.mailbox[0] == NO_ERROR


@pytest.mark.parametrize("by_warps", [False, True], ids=["threads", "warps"])
@pytest.mark.parametrize("bad", [-1, N_ROWS, -(1 << 40)])
def test_ids_out_of_range_are_reported_and_count_for_nothing(bad, by_warps):
    rows, ids = made(8, torch.float32)
    given = ids.clone()
    given[10] = bad
    runner = SimtRunner()
    begins = torch.tensor([0, 10, 11])
    found = BagKernels(runner).pool(rows, guarded(given), begins, 0, by_warps=by_warps)
    assert runner.mailbox.tolist() == [INDEX_ERROR, 10, bad, N_ROWS]
    assert same_bits(found[0], rows[ids[:10]].sum(0)) and not found[1].any()
    out, offsets = torch.empty_like(found), np.array([0, 10, 11])
    arrays = (rows.numpy(), given.numpy(), NO_PADDING, offsets, False, 0, out.numpy())
    assert twin.pool_bags(*arrays) == (-1, 10)
    assert same_bits(out, found)


@pytest.mark.parametrize("mode", range(3), ids=MODES)
@pytest.mark.parametrize("dim", [4, 64], ids=["a-value-each", "vectors"])
def test_bags_are_those_of_the_twin_whatever_a_thread_takes(dim, mode):
    generator = torch.Generator().manual_seed(mode)
    rows = guarded(torch.randn(N_ROWS, dim, generator=generator))
    ids = torch.randint(N_ROWS, (1300,), generator=generator)
    ids[::7] = 5
    check_by_twin(rows, ids, torch.arange(0, 1300, 13), mode, False, 1 if dim == 4 else 4)


@pytest.mark.parametrize("mode", range(3), ids=MODES)
@pytest.mark.parametrize(
    ("dim", "dtype", "vector"),
    [
        (4, torch.float32, 4),
        (7, torch.float32, 1),
        (72, torch.float32, 4),
        (34, torch.float64, 2),
        (33, torch.float64, 1),
    ],
    ids=["narrow", "narrow-odd", "slices", "doubles", "doubles-odd"],
)
def test_long_bags_are_those_of_the_twin(dim, dtype, vector, mode):
    generator = torch.Generator().manual_seed(mode)
    rows = guarded(torch.randn(N_ROWS, dim, generator=generator, dtype=dtype))
    rows[::11] = -0.0
    ids = torch.randint(N_ROWS, (1500,), generator=generator)
    ids[::7] = 5
    ids[160:224] = 5  # a stage in which no row counts
    # Around the ends of a stage, of all stages, and of what comes after them.
    offsets = torch.tensor([0, 0, 31, 63, 96, 640, 767, 895, 1024, 1024, 1153])
    check_by_twin(rows, ids, offsets, mode, True, vector)


def check_by_twin(rows, ids, offsets, mode, by_warps, vector):
    runner = SimtRunner(mode)
    found = BagKernels(runner).pool(rows, guarded(ids), guarded(offsets), mode, padding=5)
    out = torch.empty_like(found)
    arrays = rows.numpy(), ids.numpy(), 5, offsets.numpy(), False, mode, out.numpy()
    assert twin.pool_bags(*arrays) == (-1, -1)
    assert same_bits(out, found)
    variant, kernel = runner.launched[0]
    assert kernel == ("pool_long_bags" if by_warps else "pool_bags")
    assert variant.defines()["VECTOR"] == vector


def test_bad_ids_of_long_bags_are_reported_once_for_all_slices():
    rows, _ = made(100, torch.float32)
    ids = torch.arange(400) % N_ROWS
    ids[333] = N_ROWS + 3
    runner = SimtRunner(3)
    found = BagKernels(runner).pool(rows, guarded(ids), torch.tensor([0, 50]), 0)
    assert runner.launched[0][1] == "pool_long_bags"
    assert runner.mailbox.tolist() == [INDEX_ERROR, 333, N_ROWS + 3, N_ROWS]
    counted = ids[ids < N_ROWS]
    assert same_bits(found[1], rows[counted[50:]].sum(0))
