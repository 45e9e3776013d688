"""Schedules of large typed products of plain rows: the fastest is measured once, and kept.

All give the same bits.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..engine.advisor import fastest_way

#: Rows from which on a product is large: of fewer, what its ways differ by is less than a launch,
#: and some seconds go into compiling the schedules before the first is measured.
LARGE_ROWS = 1 << 16

Run = Callable[..., Any]
#: Gets an index as products do; returns what runs.
Bind = Callable[[torch.Tensor | None], Run]


def can_measure(device: torch.device) -> bool:
    """Return whether ways may be timed now: on a GPU, not while a CUDA graph is captured."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):  # whose current stream is asked for
        return not torch.cuda.is_current_stream_capturing()


def fastest_product(
    kernels: Mapping[str, Bind],
    shape: tuple[int, int, int],
    bounds: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    index: torch.Tensor | None,
) -> Run:
    """Return what runs a product of rows by type in the least time.

    Parameters
    ----------
    kernels : mapping of str to callable
        What binds the product's kernel to an index, by schedule, the usual one first.
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
    way = next(iter(kernels))
    if n >= LARGE_ROWS and len(kernels) > 1 and can_measure(device):
        # Of rows that are read by index a part is drawn: a graph may have very many.
        drawn_rows = n_source if index is None else min(n_source, LARGE_ROWS)

        def prepare(_: int) -> dict[str, Callable[[], object]]:
            shapes = (drawn_rows, depth), (len(bounds) - 1, depth, width)
            reads = index if index is None or drawn_rows == n_source else index % drawn_rows
            drawn = torch.Generator(device).manual_seed(0)  # torch's is the caller's
            given = [
                torch.randn(shape, dtype=dtype, device=device, generator=drawn) for shape in shapes
            ]
            return {name: functools.partial(bind(reads), *given) for name, bind in kernels.items()}

        # By powers of two: sampled graphs have other types, and rows, at each step.
        types = sum(low < high for low, high in itertools.pairwise(bounds)).bit_length()
        how = "in order" if index is None else f"by index of {drawn_rows.bit_length()} bits"
        product = f"{dtype} rows {how}, types of {types} bits, {depth} x {width}"
        way = fastest_way(tuple(kernels), product, n, device, prepare)
    return kernels[way](index)
