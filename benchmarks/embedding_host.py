"""Host time of steps of training on a GPU, with nothing launched: no GPU is needed.

The CPU stands for the GPU. Lookups take the way of ids on a GPU, but each launch of this library
returns at once. Batches are so small that what torch computes takes no time. Microseconds of each
part of a step with sparse SGD, the fastest tenth of many:

- ``nn.EmbeddingBag``: torch's, all of whose work is in C++.
- ``Function``: a lookup whose pooling and whose backward pass are one launch each, as a fused
  backward pass would have them: what torch.autograd.Function and the sparse gradient cost alone.
- ``all resident`` and ``20 % resident``: CachedEmbeddingBag.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from typing import Any

import torch

from bitslab import CompressedTable
from bitslab.embedding.device_access import DEVICES, DeviceAccess
from bitslab.engine.kernels.cuda import CudaKernels
from bitslab.engine.kernels.cuda.parameters import Parameters, Value, split
from bitslab.engine.kernels.cuda.runner import MAILBOX_WORDS, Launch
from bitslab.engine.kernels.cuda.source import AnyVariant
from bitslab.engine.memory.host import HostBuffer
from bitslab.integrations.embedding import CachedEmbeddingBag

Rows = list[dict[str, Any]]
N_ROWS, DIM, IDS = 1000, 32, 16
STEPS, WARM_UP = 1000, 50


class Nothing:
    """A runner of kernels that do nothing, but that slots and offsets are such as torch takes."""

    multiprocessors, shared_bytes_per_multiprocessor = 132, 227 << 10

    def __init__(self) -> None:
        self.mailbox = torch.zeros(MAILBOX_WORDS, dtype=torch.int64)

    def bind(
        self,
        variant: AnyVariant,
        parameters: type[Parameters],
        threads: int | tuple[int, int, int],
        shared_bytes: int = 0,
        /,
        **fixed: Value,
    ) -> Launch:
        """Return what takes the place of a kernel."""
        names = list(split(parameters, fixed)[0])
        if parameters.kernel not in ("keep_slots", "give_slots"):
            return lambda blocks, *changing, stream=None: None
        slots, n, sound = (names.index(name) for name in ("slots", "n", "sound"))
        entries = names.index("entries")
        whole = torch.arange(IDS)

        def launch(
            blocks: int | tuple[int, int, int], *changing: int, stream: int | None = None
        ) -> None:
            ctypes.memset(changing[slots], 0, 8 * changing[n])
            if changing[sound]:
                ctypes.memmove(changing[sound], whole.data_ptr(), 8 * changing[entries])

        return launch


class NoDevice(DeviceAccess):
    """The CPU in the place of a GPU that does nothing."""

    def __init__(self) -> None:
        self._kernels = CudaKernels(Nothing())

    def kernels(self, device: torch.device, *, raise_errors: bool = True) -> CudaKernels:
        """Return kernels that do nothing."""
        return self._kernels

    def reads_memory(self, buffer: HostBuffer) -> bool:
        """Return True: nothing is read."""
        return True

    def reads_table(self, table: CompressedTable) -> bool:
        """Return True: nothing is read."""
        return True

    def raw_rows(self, table: CompressedTable) -> torch.Tensor | None:
        """Return the rows, which are raw."""
        return table._parts.raw_rows()


class Pooled(torch.autograd.Function):
    """Rows of bags and their gradient, neither of which is computed."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return memory for a row of each bag."""
        ctx.index, ctx.shape = index, weight.shape
        return weight.new_empty(index.shape[0], weight.shape[1])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return a sparse gradient of the weight."""
        return torch.sparse_coo_tensor(
            ctx.index[None], grads[0], ctx.shape, check_invariants=False
        ), None


class PooledBag(torch.nn.Module):
    """What looks rows up by `Pooled`."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Return a row of each bag."""
        out: torch.Tensor = Pooled.apply(self.weight, ids)  # type: ignore[no-untyped-call]
        return out


def run(arguments: argparse.Namespace) -> dict[str, Rows]:
    """Measure each way in turns, and keep the better of two times."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    DEVICES["cpu"] = NoDevice()
    try:
        weight = torch.randn(N_ROWS, DIM)
        ways: dict[str, torch.nn.Module] = {
            "nn.EmbeddingBag": torch.nn.EmbeddingBag.from_pretrained(
                weight.clone(), freeze=False, mode="sum", sparse=True
            ),
            "Function": PooledBag(weight.clone()),
            "all resident": _cached(weight, 1.0),
            "20 % resident": _cached(weight, 0.2),
        }
        runs = [{name: _parts(bag) for name, bag in ways.items()} for _ in range(2)]
    finally:
        del DEVICES["cpu"]
        torch.set_num_threads(threads)
    found: Rows = []
    for name in ways:
        best = {part: min(each[name][part] for each in runs) for part in runs[0][name]}
        found.append({"way": name} | best | {"step us": sum(best.values())})
    for line in found:
        line["more than nn us"] = line["step us"] - found[0]["step us"]
    return {"Host time of a step of sparse SGD, nothing launched, microseconds": found}


def _cached(weight: torch.Tensor, ratio: float) -> CachedEmbeddingBag:
    return CachedEmbeddingBag.from_pretrained(
        weight,
        freeze=False,
        mode="sum",
        sparse=True,
        cache_ratio=ratio,
        warmup_ratio=1.0,
        codec="raw",
        device="cpu",
    )


def _parts(bag: torch.nn.Module) -> dict[str, float]:
    """Return microseconds of each part of a step."""
    optimizer = torch.optim.SGD(bag.parameters(), lr=0.01)
    offsets = torch.arange(IDS)
    times: dict[str, list[float]] = {"zero_grad": [], "lookup": [], "backward": [], "optimizer": []}
    for i in range(WARM_UP + STEPS):
        ids = torch.randint(N_ROWS, (IDS,))
        marks = [time.perf_counter()]
        optimizer.zero_grad()
        marks.append(time.perf_counter())
        loss: Any = bag(ids, offsets).sum()
        marks.append(time.perf_counter())
        loss.backward()
        marks.append(time.perf_counter())
        optimizer.step()
        marks.append(time.perf_counter())
        del loss
        if i >= WARM_UP:
            for part, begin, end in zip(times.values(), marks, marks[1:], strict=False):
                part.append(end - begin)
    return {f"{name} us": 1e6 * sorted(each)[STEPS // 10] for name, each in times.items()}
