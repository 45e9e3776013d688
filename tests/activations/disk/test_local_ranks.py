"""Ranks of a machine share its disk: rates, write budget and folders."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import bitslab
from bitslab.activations.disk import DiskRates, DiskTier, known_rates
from bitslab.activations.disk.local_ranks import LocalRanks, local_ranks
from tests.quick_measuring import measure_quickly

RATES = DiskRates(64 << 10, 2, 2, 4e9, 8e9, 1e9, 1e9, direct=True)


@pytest.mark.parametrize(
    ("environment", "right"),
    [
        ({}, (0, 1)),
        ({"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"}, (2, 4)),
        ({"LOCAL_RANK": "1", "LOCAL_SIZE": "2"}, (1, 2)),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "7", "OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, (7, 8)),
        ({"MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}, (0, 2)),
        ({"SLURM_LOCALID": "3", "SLURM_NTASKS_PER_NODE": "4"}, (3, 4)),
        ({"LOCAL_RANK": "4", "LOCAL_WORLD_SIZE": "4"}, (0, 1)),
        ({"LOCAL_RANK": "one", "LOCAL_WORLD_SIZE": "4"}, (0, 1)),
        ({"LOCAL_RANK": "1"}, (0, 1)),
    ],
)
def test_ranks_are_those_that_launchers_name(
    environment: dict[str, str], right: tuple[int, int]
) -> None:
    assert local_ranks(environment) == LocalRanks(*right)


def test_each_rank_has_a_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    tier = DiskTier(folders, rates=RATES, write_budget=2.0)
    assert tier.write_bytes_per_s == 2 * 4e9 / 4
    assert tier.read_bytes_per_s == 2 * 8e9 / 4
    assert tier.budget_bytes_per_s == pytest.approx(0.5e12 / 86400)
    assert tier.stats()["local_ranks"] == 4
    ticket = tier.store(tier.host_buffer(4096).fill_(1))
    assert ticket is not None and tier.drain(30)
    # The second rank begins in the second folder.
    assert [stripe.used_bytes for stripe in tier._stripes] == [0, 4096]
    tier.close()
    offload = bitslab.ActivationOffload("raw", disk=tmp_path / "a", min_bytes=1024)
    with offload:
        loss = torch.randn(64, 64, requires_grad=True).sin().sum()
    loss.backward()
    assert any("4 ranks of this machine share" in note for note in offload.report().notes)
    offload.close()


def test_ranks_that_begin_together_measure_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure_quickly(monkeypatch, tmp_path / "cache")
    running: list[int] = []
    most: list[int] = []

    def measure(folder: Any) -> DiskRates:
        running.append(1)
        most.append(len(running))
        time.sleep(0.05)
        running.pop()
        return RATES

    monkeypatch.setattr(known_rates, "measure_and_choose", measure)
    threads = [threading.Thread(target=known_rates.disk_rates, args=(tmp_path,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]  # the others found what it had written
    assert known_rates.disk_rates(tmp_path, again=True) == RATES
    assert most == [1, 1]
