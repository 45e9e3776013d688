"""Typed products of plain rows by torch's grouped GEMM, where that was measured to be faster.

torch has a kernel of its own for bfloat16 on GPUs of capability 9.0 and 10; elsewhere, and for
other dtypes, its operator is a loop over groups whose ends the host reads. On two CPU cores that
loop took as long as one product a relation for 6 relations, and five times as long for 50.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..engine.advisor import fastest_way
from ..engine.kernels.cpu.typed_products import multiply_rows

#: Rows from which on a product is large: below it is bound by its launch.
LARGE_ROWS = 1 << 14
#: Bytes that rows in order, of a product that reads them by index, may take.
MAX_GATHERED_BYTES = 256 << 20

Run = Callable[..., Any]


@functools.cache
def has_grouped_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch has a kernel for groups of rows of a dtype."""
    if dtype is not torch.bfloat16 or device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) in ((9, 0), (10, 0), (10, 3))


def grouped_mm(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return rows ``[n, K]`` times the weight of their group ``[groups, K, M]``.

    `ends` has the end of each group, int32 ``[groups]``.
    """
    # torch.nn.functional has it from torch 2.10 on.
    run = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    found: torch.Tensor = run(rows, weight, offs=ends)
    return found


def grouped_where_faster(
    run: Run | None,
    shape: tuple[int, int, int],
    bounds: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    index: torch.Tensor | None,
) -> Run | None:
    """Return what runs a product of rows by type in the least time.

    Parameters
    ----------
    run : callable or None
        The product's kernel; None: torch multiplies relation by relation.
    shape : tuple of int
        Rows of x, K and M.
    bounds : sequence of int
        The first row of each type, and the end.
    dtype, device
        Of the rows.
    index : torch.Tensor or None
        int64: the rows of x that are multiplied; None: as they are.
    """
    n, (n_source, depth, width) = bounds[-1], shape
    # Rows of grouped GEMMs are whole 16 bytes.
    aligned = depth * dtype.itemsize % 16 == width * dtype.itemsize % 16 == 0
    gathered_bytes = 0 if index is None else n * depth * dtype.itemsize
    if n < LARGE_ROWS or not aligned or gathered_bytes > MAX_GATHERED_BYTES:
        return run
    if not has_grouped_kernel(device, dtype):
        return run
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return run  # nothing can be measured
    ends = torch.tensor(bounds[1:], dtype=torch.int32, device=device)

    def grouped(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, depth)
        rows = rows if index is None else rows.index_select(0, index)
        return grouped_mm(rows, weight.reshape(-1, depth, width), ends)

    def by_relation(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = torch.empty(n, width, dtype=dtype, device=device)
        multiply_rows(x, weight, bounds, out, index=index)
        return out

    def prepare(_: int) -> dict[str, Callable[[], object]]:
        x = torch.randn(n_source, depth, dtype=dtype, device=device)
        weight = torch.randn(len(bounds) - 1, depth, width, dtype=dtype, device=device)
        ways = {"typed": run or by_relation, "grouped": grouped}
        return {name: functools.partial(way, x, weight) for name, way in ways.items()}

    types = sum(low < high for low, high in itertools.pairwise(bounds))
    how = "in order" if index is None else f"of {n_source.bit_length()} bits by index"
    name = f"{dtype} rows {how}, {types} types, {depth} x {width}, {'torch' if run is None else ''}"
    try:
        faster = fastest_way(("typed", "grouped"), name, n, device, prepare) == "grouped"
    except torch.OutOfMemoryError:
        return run
    return grouped if faster else run
