"""Ids of what was looked up on a GPU: those of the CPU, without waiting for them."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("torchrec", reason="torchrec is not installed")

from torchrec import KeyedJaggedTensor

from bitslab.integrations.torchrec.row_ids import Column, bag_ids, value_ids
from tests.gpu import waiting_raises

pytestmark = pytest.mark.gpu


def test_ids_are_found_on_the_gpu_without_waiting_for_it() -> None:
    for bags in (20, 20, 7, 31):  # batches that differ, of which nothing is known before
        _check_ids(bags)


def _check_ids(bags: int) -> None:
    generator = torch.Generator().manual_seed(bags)
    lengths = torch.randint(3, (3 * bags,), generator=generator)
    values = torch.randint(9, (int(lengths.sum()),), generator=generator)
    columns = [
        Column("a", 0, 4, True, torch.float32),
        Column("b", 1, 4, False, torch.float32),
        Column("a", 0, 4, True, torch.float32),
    ]
    on_host = KeyedJaggedTensor(["x", "y", "z"], values, lengths=lengths)
    on_device = on_host.to(torch.device("cuda"))
    for function in (bag_ids, value_ids):
        expected = function(on_host, columns)
        with waiting_raises():
            found = function(on_device, columns)
        assert torch.equal(found.cpu(), expected)
