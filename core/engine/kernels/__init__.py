"""The kernels: tensors on a GPU go to CUDA C++, those on the CPU to its Numba twins.

| where | what |
|---|---|
| `format.py` | sizes, offsets and constants of the packed form, which both backends read |
| `cuda/NAME.cu` | kernels as text, compiled at first use; `.cuh` files are what they share |
| `cuda/NAME.py` | launches them: a class for each kernel that lists its parameters, and the grid |
| `cuda/kernels.py` | all launchers of one GPU together, which `kernels_for` returns |
| `cuda/parameters.py`, `runner.py`, `frames.py` | the one way from values by name to a launch |
| `uploads.py` | whether the host waits for tables that it copies to a GPU |
| `cpu/` | the twins, plain loops with the same results: what a kernel does is read there |

`kernels_for` chooses by device and offers what both have. What only a GPU has, such as ordering ids
before a gather, is reached by `cuda.kernels_on`. A new kernel: docs/extending.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from ...errors import ArgumentTypeError
from .blob_format import ALIGN_BYTES, ZvcLayout
from .candidates import CandidateTables, PlanMemory
from .format import RowLayout, RowStorage, shared_row_items

__all__ = ["Kernels", "RowLayout", "RowStorage", "kernels_for", "shared_row_items"]


class Kernels(Protocol):
    """What a backend offers; `kernels.cpu` documents each function."""

    def count_bits(self, rows: torch.Tensor, chunk_bytes: int) -> torch.Tensor:
        """Count set bits per position."""
        ...

    def count_zeros(self, data: torch.Tensor, unit_bytes: int) -> torch.Tensor:
        """Count units that are zero."""
        ...

    def encode_csr(
        self,
        x: torch.Tensor,
        element_bytes: int,
        out: torch.Tensor,
        sm_budget: int | None = None,
    ) -> None:
        """Write a tensor as compressed sparse rows."""
        ...

    def decode_csr(
        self,
        data: torch.Tensor,
        element_bytes: int,
        out: torch.Tensor,
        sm_budget: int | None = None,
    ) -> bool:
        """Read a tensor out of compressed sparse rows; return whether they are sound."""
        ...

    def encode_rle(
        self,
        x: torch.Tensor,
        element_bytes: int,
        out: torch.Tensor,
        sm_budget: int | None = None,
    ) -> None:
        """Write a tensor as runs of equal units."""
        ...

    def decode_rle(
        self,
        data: torch.Tensor,
        element_bytes: int,
        out: torch.Tensor,
        sm_budget: int | None = None,
    ) -> bool:
        """Read a tensor out of runs of equal units; return whether they are sound."""
        ...

    def encode_zfp(
        self,
        x: torch.Tensor,
        dtype: torch.dtype,
        block_bits: int,
        out: torch.Tensor,
        sm_budget: int | None = None,
    ) -> None:
        """Write a tensor as a stream of zfp's blocks."""
        ...

    def decode_zfp(
        self,
        data: torch.Tensor,
        dtype: torch.dtype,
        block_bits: int,
        out: torch.Tensor,
        sm_budget: int | None = None,
    ) -> bool:
        """Read a tensor out of a stream of zfp's blocks; return whether it is sound."""
        ...

    def plan_memory(self, rows: Sequence[torch.Tensor], candidates: CandidateTables) -> PlanMemory:
        """Return memory for what is counted of candidates of a plan."""
        ...

    def agreed_masks(
        self, counts: Sequence[torch.Tensor], candidates: CandidateTables, memory: PlanMemory
    ) -> None:
        """Write the masks of candidates."""
        ...

    def frequent_values(
        self, rows: Sequence[torch.Tensor], candidates: CandidateTables, memory: PlanMemory
    ) -> None:
        """Write the most frequent masked chunks of each position."""
        ...

    def sizes_by_option(
        self,
        rows: torch.Tensor,
        candidates: CandidateTables,
        memory: PlanMemory,
        unit_bits: int = 32,
    ) -> None:
        """Add up what rows take packed, under all options of each candidate of the last table."""
        ...

    def packed_words(
        self, rows: torch.Tensor, layout: RowLayout
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Measure packed rows and choose their clusters."""
        ...

    def encode_rows(
        self,
        rows: torch.Tensor,
        layout: RowLayout,
        lengths: torch.Tensor,
        row_clusters: torch.Tensor,
        bases: torch.Tensor,
        n_words: int,
    ) -> torch.Tensor:
        """Pack rows."""
        ...

    def decode_rows(
        self,
        storage: RowStorage,
        layout: RowLayout,
        ids: torch.Tensor | None,
        row_begin: int,
        out: torch.Tensor,
        facts: Mapping[str, int],
        sm_budget: int | None = None,
    ) -> int:
        """Unpack rows; return a damaged row, or -1."""
        ...

    def encode_zvc(
        self,
        x: torch.Tensor,
        layout: ZvcLayout,
        form: int,
        data: torch.Tensor,
        sm_budget: int | None = None,
        values: torch.Tensor | None = None,
        fill_bytes: int = ALIGN_BYTES,
    ) -> None:
        """Write a tensor in zero-value compression."""
        ...

    def decode_zvc(
        self,
        data: torch.Tensor,
        layout: ZvcLayout,
        form: int,
        out: torch.Tensor,
        sm_budget: int | None = None,
        values: torch.Tensor | None = None,
    ) -> None:
        """Write the tensor that was compressed."""
        ...


def kernels_for(device: torch.device) -> Kernels:
    """Return the backend for a device.

    Raises
    ------
    ArgumentTypeError
        For a device that is neither a CPU nor a CUDA GPU.
    """
    kind = device.type
    if kind == "cpu":
        return _cpu()
    if kind == "cuda":
        return _kernels_on()(device)
    raise ArgumentTypeError(f"device: {device}, accepted are cpu and cuda")


# Each is imported with its first use, and not looked for again: that takes as long as a launch.


@functools.cache
def _cpu() -> Kernels:
    from . import cpu

    return cpu


@functools.cache
def _kernels_on() -> Callable[[torch.device], Kernels]:
    from .cuda import kernels_on

    return kernels_on
