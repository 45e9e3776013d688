"""Bounds, their schedules, and classes of tables."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any, cast

import numpy as np
import pytest
import torch

import bitslab
from bitslab.distributed import (
    AdaptiveBound,
    CompressedAllToAll,
    ErrorBound,
    all_to_all_single,
    bound_classes,
    constant,
    drop,
    homogenisation_index,
    linear,
    logarithmic,
    stepwise,
)
from bitslab.distributed.rounding import round_to_codes
from bitslab.distributed.selection import PLAIN
from bitslab.engine.codecs import BoundedVectorCodec
from tests.helpers import same_bits


@pytest.mark.parametrize("make", [linear, logarithmic, stepwise, drop], ids=lambda f: f.__name__)
def test_a_schedule_falls_from_its_start_to_one(make):
    factor = make(100, start=3.0)
    values = [factor(i) for i in range(150)]
    assert values[0] == 3.0 and values[100:] == [1.0] * 50
    assert all(a >= b for a, b in zip(values, values[1:], strict=False))
    assert all(1.0 <= v <= 3.0 for v in values)


def test_schedules_fall_in_their_own_ways():
    assert linear(100)(50) == 1.5
    assert logarithmic(100)(50) < 1.2
    assert len({stepwise(100, steps=4)(i) for i in range(101)}) == 5
    assert drop(100)(99) == 2.0
    assert constant()(7) == 1.0


def test_a_bound_is_a_share_of_the_range_of_finite_elements():
    t = torch.tensor([[-1.0, 3.0], [math.nan, math.inf]])
    quarter: Any = np.float32(0.25)
    assert ErrorBound(0.25).absolute(t) == ErrorBound(quarter).absolute(t) == 1.0
    assert ErrorBound(0.25, "absolute").absolute(t) == 0.25
    assert ErrorBound(0.25, schedule=linear(4)).absolute(t, 2) == 1.5
    assert ErrorBound(0.25).absolute(torch.full((3, 3), 2.0)) == 0.0


def test_the_index_is_the_share_of_distinct_rows_that_merge():
    rows = torch.tensor([[0.0, 0.0], [0.01, 0.0], [1.0, 1.0], [1.0, 1.0], [2.0, 0.0]])
    assert homogenisation_index(rows, 0.1) == pytest.approx(1 / 4)
    assert homogenisation_index(rows, 1e-4) == 0.0
    assert homogenisation_index(rows[:0], 0.1) == 0.0


@pytest.mark.parametrize("bound", [1e-3, 0.07, 3.0, 1e39])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_are_rounded_as_the_codec_delivers_them(dtype: torch.dtype, bound: float) -> None:
    codec = BoundedVectorCodec(bound)
    # Of few values, so that the codec does not keep them as they are.
    rows = torch.randn(40, 6, generator=torch.Generator().manual_seed(3)).to(dtype).repeat(20, 1)
    rows[3, :3] = torch.tensor([math.nan, math.inf, -1e-40])
    delivered = codec.decode(codec.encode(rows))
    found = round_to_codes(rows, bound)
    assert same_bits(found + 0.0, delivered + 0.0)  # -0.0 comes as the code 0


def test_tables_are_classified_without_compiling_kernels_of_the_cpu() -> None:
    program = (
        "import sys, torch; from bitslab.distributed import AdaptiveBound; "
        "print(AdaptiveBound().classify(torch.randn(100, 8))[1]); "
        "assert 'numba' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip() in AdaptiveBound.CLASSES, done.stderr


@pytest.mark.usefixtures("group_of_one")
def test_bounds_are_not_looked_for_where_all_bytes_cross(monkeypatch: pytest.MonkeyPatch) -> None:
    def absolute(*args: Any) -> float:
        raise AssertionError("elements were read")

    monkeypatch.setattr(ErrorBound, "absolute", absolute)
    rows = torch.randn(4, 3)
    for bound in (0.1, AdaptiveBound()):
        exchange = CompressedAllToAll(error_bound=bound)
        exchange._caller.decision.modes[:] = PLAIN, PLAIN
        assert torch.equal(exchange(rows), rows)


def test_tables_that_merge_much_get_a_small_bound():
    indices = {"flat": 0.0, "usual": 0.1, "merging": 0.6}
    found = bound_classes(indices, 0.03, thresholds=(0.05, 0.5))
    assert {k: round(b.value, 6) for k, b in found.items()} == {
        "flat": 0.05,
        "usual": 0.03,
        "merging": 0.01,
    }
    assert {b.kind for b in found.values()} == {"relative"}


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: ErrorBound(0.0), "error_bound: 0.0"),
        (lambda: ErrorBound(math.inf), "error_bound: inf"),
        (lambda: ErrorBound(0.1, "sometimes"), "kind: 'sometimes', accepted are relative, absolu"),
        (lambda: ErrorBound(0.1, schedule=cast(Any, 3)), "schedule: expected a callable"),
        (lambda: ErrorBound(0.1, schedule=lambda i: 0.0).at(0), "schedule: 0.0 for iteration 0"),
        (lambda: linear(0), "iterations: 0, accepted are integers from 1"),
        (lambda: linear(3, start=-1.0), "start: -1.0"),
        (lambda: stepwise(3, steps=0), "steps: 0"),
        (lambda: bound_classes({}, 0.1, thresholds=(1, 0)), "thresholds: (1, 0)"),
        (lambda: bound_classes({}, 0.1, thresholds=(0, 1), beta=0.5), "beta: 0.5"),
        (lambda: homogenisation_index(torch.ones(3), 0.1), "rows: [3] torch.float32"),
        (lambda: homogenisation_index(torch.ones(3, 2).long(), 0.1), "rows: [3, 2] torch.int64"),
        (lambda: CompressedAllToAll(error_bound=-1.0), "error_bound: -1.0"),
        (lambda: CompressedAllToAll().load_state_dict({"version": 2}), "state: {'version': 2}"),
        (
            lambda: all_to_all_single(torch.ones(2), torch.ones(2)),
            "group: torch.distributed is not initialised",
        ),
    ],
    ids=lambda x: x.split(":")[0] if isinstance(x, str) else None,
)
def test_bad_arguments_are_refused(call, text):
    with pytest.raises(bitslab.BitslabError) as caught:
        call()
    assert text in str(caught.value)
