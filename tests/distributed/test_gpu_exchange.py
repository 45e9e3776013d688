"""Exchanges of tensors on GPUs, over NCCL."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bitslab.distributed import ErrorBound
from bitslab.distributed.buffers import Buffers
from bitslab.distributed.rounding import round_stochastically
from tests.distributed.device_ranks import ON_DEVICE
from tests.distributed.ranks import run_ranks
from tests.helpers import same_bits

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("ranks", [1, 2])
def test_rows_on_gpus_cross_by_nccl(ranks: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    for seen in run_ranks("nccl", ranks, tmp_path, timeout_s=120):
        assert "a CUDA graph is being captured" in seen.pop("capture")
        stats = seen.pop("stats")
        assert all(seen.values()), seen
        for way in ("forward", "backward"):
            assert stats[way]["calls"] + stats[way]["plain_calls"] == 5
        if ranks > 1:
            assert stats["forward"]["calls"] >= 2
            assert stats["forward"]["moved_bytes"] < stats["forward"]["raw_bytes"]


@pytest.fixture(scope="module")
def seen_by(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[Any]]:
    """What so many ranks saw, of one those whose rows for itself cross."""

    @functools.cache
    def seen(ranks: int) -> list[Any]:
        if torch.cuda.device_count() < ranks:
            pytest.skip(f"needs {ranks} GPUs")
        return run_ranks("nccl_paths", ranks, tmp_path_factory.mktemp("ranks"), timeout_s=120)

    return seen


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("check", ON_DEVICE)
def test_what_exchanges_on_gpus_can_do(
    check: str, ranks: int, seen_by: Callable[[int], list[Any]]
) -> None:
    for seen in seen_by(ranks):
        assert seen[check] and all(seen[check].values()), seen[check]


def test_stochastic_rounding_draws_the_bits_of_the_cpu() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        rows = torch.randn(500, 33, generator=torch.Generator().manual_seed(1)).to(dtype)
        rows[0, :4] = torch.tensor([float("nan"), float("inf"), 1e-40, 0.0])
        for bound in (1e-6, 0.03, 5.0):
            expected = round_stochastically(rows, bound, 3, 1 << 40)
            there = torch.tensor(bound, dtype=torch.float64, device="cuda")
            for given in (bound, there):
                found = round_stochastically(rows.cuda(), given, 3, 1 << 40)
                assert same_bits(found.cpu(), expected)
        share = ErrorBound(0.03)
        on_device = share.where_rows_are([rows.cuda()])
        assert isinstance(on_device, torch.Tensor)
        assert float(on_device) == share.absolute(rows)


def test_buffers_are_used_again_behind_what_was_queued() -> None:
    device, other = torch.device("cuda", torch.cuda.current_device()), torch.cuda.Stream()
    kept = Buffers()
    first = kept.take(1 << 20, device)
    address = first.data_ptr()
    first.fill_(1)
    mark = torch.cuda.Event()
    torch.cuda._sleep(10_000_000)
    seen = first.clone()
    mark.record()
    kept.give(first, mark=mark)
    with torch.cuda.stream(other):
        again = kept.take(1 << 20, device)
        again.fill_(2)
    assert again.data_ptr() == address and kept.nbytes == again.nbytes
    torch.cuda.synchronize()
    assert bool((seen == 1).all()) and bool((again == 2).all())
