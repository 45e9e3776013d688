"""Ids of what was looked up: numbers of features reach a device without a wait."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("torchrec", reason="torchrec is not installed")

from torchrec import KeyedJaggedTensor

from bitslab.integrations.torchrec import row_ids
from bitslab.integrations.torchrec.row_ids import Column, bag_ids, numbers_on, value_ids


def test_numbers_go_to_a_device_from_page_locked_memory() -> None:
    locked, moved = list[torch.Tensor](), list[Any]()
    to = torch.Tensor.to

    def pin(t: torch.Tensor) -> torch.Tensor:
        locked.append(t)
        return t

    def move(t: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        moved.append((t, options))
        return to(t, *args, **options)

    with (
        mock.patch.object(torch.Tensor, "pin_memory", pin),
        mock.patch.object(torch.Tensor, "to", move),
    ):
        found = numbers_on([[1, 2], [3, 4]], torch.device("meta"))
    assert found.device.type == "meta" and found.shape == (2, 2) and found.dtype == torch.int64
    ((given, options),) = moved
    assert len(locked) == 1 and locked[0] is given and given.tolist() == [[1, 2], [3, 4]]
    assert options == {"non_blocking": True}


def test_batches_of_other_sizes_in_each_step_take_one_upload_each() -> None:
    columns = [Column("a", 0, 4, True, torch.float32), Column("b", 1, 4, True, torch.float32)]
    made: list[Any] = []
    numbers = numbers_on

    def once(*given: Any) -> torch.Tensor:
        made.append(given)
        return numbers(*given)

    with mock.patch.object(row_ids, "numbers_on", once):
        for bags in range(1, 4):
            features = KeyedJaggedTensor(
                ["x", "y"],
                torch.arange(3 * bags),
                lengths=torch.tensor([1] * bags + [2] * bags),
            )
            assert bag_ids(features, columns).tolist()[:bags] == [2 * n for n in range(bags)]
            assert value_ids(features, columns).tolist() == [
                *(2 * n for n in range(bags)),
                *(2 * n + 1 for n in range(bags, 3 * bags)),
            ]
    assert len(made) == 2 * 3


def test_a_rank_without_columns_has_no_ids() -> None:
    features = KeyedJaggedTensor([], torch.empty(0), lengths=torch.empty(0, dtype=torch.int64))
    assert bag_ids(features, []).tolist() == value_ids(features, []).tolist() == []
