"""Ways to run a large typed product of plain rows, of which the fastest is measured once, and kept.

These are the kernel's schedules, or torch's product of each relation, and torch's grouped GEMM. For
that torch has a kernel for bfloat16 on GPUs of capability 9.0 and 10; elsewhere, and for other
dtypes, its operator is a loop over groups whose ends the host reads. On two CPU cores that loop
took as long as one product a relation for 6 relations, and five times as long for 50.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..engine.advisor import fastest_way
from ..engine.kernels.cpu.typed_products import multiply_rows

#: Rows from which on a product is large: of fewer, what its ways differ by is less than a launch,
#: and some seconds go into compiling the schedules before the first is measured.
LARGE_ROWS = 1 << 16
#: Bytes that rows in order, of a product that reads them by index, may take.
MAX_GATHERED_BYTES = 256 << 20

#: What torch's grouped GEMM takes addresses and strides to be multiples of.
ALIGNED_BYTES = 16

Run = Callable[..., Any]
#: Gets an index as products do; returns what runs.
Bind = Callable[[torch.Tensor | None], Run]


@functools.cache
def has_grouped_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch has a kernel for groups of rows of a dtype."""
    if dtype is not torch.bfloat16 or device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) in grouped_capabilities(torch.__version__)


def grouped_capabilities(version: str) -> tuple[tuple[int, int], ...]:
    """Return the capabilities of GPUs that a version of torch has a grouped GEMM for."""
    newer = tuple(map(int, version.split(".")[:2])) >= (2, 9)
    return ((9, 0), (10, 0), (10, 3)) if newer else ((9, 0),)


def can_measure(device: torch.device) -> bool:
    """Return whether ways may be timed now: on a GPU, not while a CUDA graph is captured."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):  # whose current stream is asked for
        return not torch.cuda.is_current_stream_capturing()


def grouped_mm(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return rows ``[n, K]`` times the weight of their group ``[groups, K, M]``.

    `ends` has the end of each group, int32 ``[groups]``.
    """
    # torch.nn.functional has it from torch 2.10 on.
    run = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    found: torch.Tensor = run(_aligned(rows), _aligned(weight), offs=ends)
    return found


def _aligned(values: torch.Tensor) -> torch.Tensor:
    """Return values as torch's grouped GEMM takes them: in order, and aligned; copied if need be.

    Callers may give slices, expanded rows and permuted weights, which `reshape` leaves as they are.
    """
    strides = [stride * values.element_size() for stride in values.stride()[:-1]]
    if values.is_contiguous() and not any(
        at % ALIGNED_BYTES for at in (values.data_ptr(), *strides)
    ):
        return values
    return values.clone(memory_format=torch.contiguous_format)


def _runs(product: Callable[[], object]) -> bool:
    """Return whether torch runs a product, which it refuses for some GPUs and shapes."""
    try:
        product()
    except torch.OutOfMemoryError:  # another time there may be room
        raise
    except RuntimeError:
        return False
    return True


def fastest_product(
    kernels: Mapping[str, Bind],
    shape: tuple[int, int, int],
    bounds: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    index: torch.Tensor | None,
) -> Run | None:
    """Return what runs a product of rows by type in the least time; None: torch, by relation.

    Parameters
    ----------
    kernels : mapping of str to callable
        What binds the product's kernel to an index, by schedule, the usual one first; none where
        torch multiplies relation by relation.
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
    usual = next(iter(kernels), "torch")

    def by_relation(index: torch.Tensor | None) -> Run:
        def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            out = torch.empty(n, width, dtype=dtype, device=device)
            multiply_rows(x.reshape(-1, depth), weight, bounds, out, index=index)
            return out

        return run

    def grouped(index: torch.Tensor | None) -> Run:
        def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            rows = x.reshape(-1, depth)
            rows = rows if index is None else rows.index_select(0, index)
            return grouped_mm(rows, weight.reshape(-1, depth, width), ends)

        return run

    ways: dict[str, Bind] = dict(kernels) or {"torch": by_relation}
    aligned = not any(size * dtype.itemsize % ALIGNED_BYTES for size in (depth, width))
    # What was measured to be fastest may be another way in the next process, and a grouped GEMM
    # sums in an order of its own.
    aligned = aligned and not torch.are_deterministic_algorithms_enabled()
    gathered_bytes = 0 if index is None else n * depth * dtype.itemsize
    if aligned and gathered_bytes <= MAX_GATHERED_BYTES and has_grouped_kernel(device, dtype):
        ends = torch.tensor(bounds[1:], dtype=torch.int32, device=device)
        ways["grouped"] = grouped
    way = usual
    if n >= LARGE_ROWS and len(ways) > 1 and can_measure(device):
        # Of rows that are read by index a part is drawn: a graph may have very many.
        drawn_rows = n_source if index is None else min(n_source, LARGE_ROWS)

        def prepare(_: int) -> dict[str, Callable[[], object]]:
            shapes = (drawn_rows, depth), (len(bounds) - 1, depth, width)
            reads = index if index is None or drawn_rows == n_source else index % drawn_rows
            drawn = torch.Generator(device).manual_seed(0)  # torch's is the caller's
            given = [
                torch.randn(shape, dtype=dtype, device=device, generator=drawn) for shape in shapes
            ]
            ready = {name: functools.partial(bind(reads), *given) for name, bind in ways.items()}
            if "grouped" in ready and not _runs(ready["grouped"]):
                del ready["grouped"]
            return ready

        # By powers of two: sampled graphs have other types, and rows, at each step.
        types = sum(low < high for low, high in itertools.pairwise(bounds)).bit_length()
        how = "in order" if index is None else f"by index of {drawn_rows.bit_length()} bits"
        product = f"{dtype} rows {how}, types of {types} bits, {depth} x {width}"
        try:
            way = fastest_way(tuple(ways), product, n, device, prepare)
        except torch.OutOfMemoryError:  # no room to measure
            way = usual
    return None if way == "torch" else ways[way](index)
