"""Ranks of a training that share a machine, and thus its SSDs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

#: Which variables launchers set: the rank on the machine, and how many there are. torchrun and
#: accelerate, DeepSpeed, Open MPI, MPICH and Intel MPI, Slurm.
_VARIABLES = (
    ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("LOCAL_RANK", "LOCAL_SIZE"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
)


class LocalRanks(NamedTuple):
    """A process among the ranks of its machine.

    Parameters
    ----------
    rank : int
        From 0.
    ranks : int
        How many there are.
    """

    rank: int
    ranks: int


def local_ranks(environment: Mapping[str, str] = os.environ) -> LocalRanks:
    """Return this process's rank on its machine, as its launcher says; one of one else."""
    for rank, ranks in _VARIABLES:
        try:
            found = LocalRanks(int(environment[rank]), int(environment[ranks]))
        except (KeyError, ValueError):
            continue
        if 0 <= found.rank < found.ranks:
            return found
    return LocalRanks(0, 1)
