"""The processes that train together under torchrun; one alone otherwise."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Ranks:
    """Rank, number of processes, and their group (None for a single process)."""

    rank: int = 0
    size: int = 1
    group: Any = None

    def wrapped(self, model: torch.nn.Module) -> torch.nn.Module:
        """Wrap the model so that ranks average its gradients."""
        if self.group is None:
            return model
        return torch.nn.parallel.DistributedDataParallel(model, process_group=self.group)

    def summed(self, numbers: Sequence[float], device: torch.device) -> list[float]:
        """Sum each number over the ranks."""
        if self.group is None:
            return list(numbers)
        total = torch.tensor(numbers, dtype=torch.float64, device=device)
        dist.all_reduce(total, group=self.group)
        return [float(number) for number in total]

    def distinct(self, text: str) -> int:
        """Count how many different texts the ranks have."""
        texts: list[Any] = [text]
        if self.group is not None:
            texts *= self.size
            dist.all_gather_object(texts, text, group=self.group)
        return len(set(texts))

    def part(self, ids: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a batch, whose length is a multiple of `size`."""
        return ids.view(self.size, -1)[self.rank]


def wanted_size() -> int:
    """Return how many processes torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """Return which process of its machine this is."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_size() -> int:
    """Return how many processes torchrun started on this machine; 1 without it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


@contextmanager
def started(device: torch.device) -> Iterator[Ranks]:
    """Join the processes that torchrun started: NCCL between GPUs, gloo between CPUs."""
    if wanted_size() == 1:
        yield Ranks()
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # gloo in addition to NCCL: ranks exchange host memory too.
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
    finally:
        # Models whose gradients the group averages go first: one that outlives it ends the group's
        # threads while it holds the interpreter's lock, for which they may wait.
        gc.collect()
        dist.destroy_process_group()
