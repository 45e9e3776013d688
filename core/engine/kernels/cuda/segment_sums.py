"""Sums, dot products and softmax over the entries of sparse matrices, on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..format import ceil_div
from .parameters import Address, Int32, Int64, Parameters, Value, number_of
from .runner import Launch, Runner
from .source import segment_sums_variant

THREADS = 256  # of a block
BLOCKS = 8  # of a multiprocessor


@dataclass(init=False)
class SumSegments(Parameters):
    """Parameters of `sum_segments`: int64 `starts`, `columns` and `edges`; `weights` or None."""

    kernel = "sum_segments"

    starts: Address
    rows: Int64
    columns: Address
    edges: Address
    weights: Address
    x: Address
    heads: Int32
    width: Int32
    lanes: Int32
    out: Address


@dataclass(init=False)
class DotEntries(Parameters):
    """Parameters of `dot_entries`: int64 `rows`, `columns` and `edges`."""

    kernel = "dot_entries"

    rows: Address
    columns: Address
    edges: Address
    entries: Int64
    g: Address
    x: Address
    heads: Int32
    width: Int32
    lanes: Int32
    out: Address


@dataclass(init=False)
class SoftmaxSegments(Parameters):
    """Parameters of `softmax_segments`: int64 `starts`, `x_rows` and `y_rows`.

    `x_rows`, `y`, `y_rows` and `slope`, one value of the dtype, may be None.
    """

    kernel = "softmax_segments"

    starts: Address
    rows: Int64
    x: Address
    x_rows: Address
    y: Address
    y_rows: Address
    multiplied: Int32
    slope: Address
    heads: Int32
    out: Address


@dataclass(init=False)
class SoftmaxSegmentsGradient(Parameters):
    """Parameters of `softmax_segments_gradient`: as `softmax_segments`, with p and g."""

    kernel = "softmax_segments_gradient"

    starts: Address
    rows: Int64
    p: Address
    g: Address
    x: Address
    x_rows: Address
    y: Address
    y_rows: Address
    multiplied: Int32
    slope: Address
    heads: Int32
    out: Address


#: A kernel of which all but addresses of tensors is fixed: takes tensors, returns a new one.
Prepared = Callable[..., torch.Tensor]


class SegmentKernels:
    """The kernels of segment_sums.cu on one GPU: the functions of `kernels.cpu.segment_sums`.

    Sums are the same from run to run; those of a long row are added in another order than on the
    CPU. What is called often is prepared. Kernels are bound once for the shapes of rows, and take
    what belongs to a graph at each start: sampled graphs come once.

    Parameters
    ----------
    runner : Runner
        Of the device.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._most_blocks = BLOCKS * runner.multiprocessors
        self._launches: dict[Any, Launch] = {}
        self._slopes: dict[tuple[float, torch.dtype, torch.device], torch.Tensor] = {}

    def prepare_sum(
        self,
        starts: torch.Tensor,
        columns: torch.Tensor,
        edges: torch.Tensor,
        heads: int,
        width: int,
        dtype: torch.dtype,
        shape: tuple[int, ...] | None = None,
    ) -> Prepared:
        """Return `cpu.segment_sums.sum_segments` for these entries, as ``run(x, weights=None)``.

        Parameters
        ----------
        starts, columns, edges
            As there.
        heads, width : int
            Of the rows of x.
        dtype : torch.dtype
            Of x, weights and the result.
        shape : tuple of int
            Of a row of the result; ``[heads, width]`` by default.
        """
        rows, device, most = len(starts) - 1, starts.device, _vector(width, dtype)
        of_result = (rows, *((heads, width) if shape is None else shape))

        @functools.cache
        def start(vector: int) -> Callable[..., None]:
            lanes = _lanes(heads * width // vector)
            launch = self._launch(SumSegments, dtype, vector, heads, width=width, lanes=lanes)
            return self._begun(launch, rows * lanes, starts, rows, columns, edges)

        def run(x: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
            out = torch.empty(of_result, dtype=dtype, device=device)
            x = x.contiguous()
            weights = None if weights is None else weights.contiguous()
            scale = 0 if weights is None else weights.data_ptr()
            x_at, out_at = x.data_ptr(), out.data_ptr()
            start(1 if (x_at | out_at) & 15 else most)(scale, x_at, out_at)
            return out

        return run

    def prepare_dots(
        self,
        rows: torch.Tensor,
        columns: torch.Tensor,
        edges: torch.Tensor,
        n_edges: int,
        heads: int,
        width: int,
        dtype: torch.dtype,
        shape: tuple[int, ...] | None = None,
        each: bool = False,
    ) -> Prepared:
        """Return `cpu.segment_sums.dot_entries` for these entries, as ``run(g, x)``.

        Parameters
        ----------
        rows, columns, edges, n_edges
            As there.
        heads, width, dtype, shape
            As for `prepare_sum`; ``[heads]`` by default.
        each : bool
            Whether each edge has an entry: others have no 0 written then.
        """
        n, device, most = len(rows), rows.device, _vector(width, dtype)
        of_result = (n_edges, *((heads,) if shape is None else shape))
        make = torch.empty if each else torch.zeros

        @functools.cache
        def start(vector: int) -> Callable[..., None]:
            lanes = _lanes(width // vector)
            launch = self._launch(DotEntries, dtype, vector, heads, width=width, lanes=lanes)
            return self._begun(launch, n * heads * lanes, rows, columns, edges, n)

        def run(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            out = make(of_result, dtype=dtype, device=device)
            g, x = g.contiguous(), x.contiguous()
            g_at, x_at = g.data_ptr(), x.data_ptr()
            start(1 if (g_at | x_at) & 15 else most)(g_at, x_at, out.data_ptr())
            return out

        return run

    def prepare_softmax(
        self,
        starts: torch.Tensor,
        entries: int,
        heads: int,
        dtype: torch.dtype,
        x_rows: torch.Tensor | None = None,
        y_rows: torch.Tensor | None = None,
        multiplied: bool = False,
        slope: float = 1.0,
        shape: tuple[int, ...] | None = None,
    ) -> tuple[Prepared, Prepared]:
        """Return the softmax of logits ``run(*terms)`` and its gradient ``run(p, g, *terms)``.

        They are those of `cpu.segment_sums`, whose arguments are the others, for tensors of
        `dtype`; results have rows of a shape, ``[heads]`` by default. The terms, x
        and y, are those of the softmax; without a slope none is needed.
        """
        device, rows = starts.device, len(starts) - 1
        of_result = (entries, *((heads,) if shape is None else shape))
        threads = 32 * rows * heads if entries else 0
        fixed: dict[str, Value] = {
            "multiplied": multiplied,
            "slope": None if slope == 1 else self._slope(slope, dtype, device),
        }

        @functools.cache
        def start(kernel: type[Parameters]) -> Callable[..., None]:
            launch = self._launch(kernel, dtype, 1, heads, **fixed)
            return self._begun(launch, threads, starts, rows)

        def run(*terms: torch.Tensor) -> torch.Tensor:
            out = torch.empty(of_result, dtype=dtype, device=device)
            terms = tuple([each.contiguous() for each in terms])
            x_at, y_at = [*[each.data_ptr() for each in terms], 0][:2]
            x_rows_at = 0 if x_rows is None else x_rows.data_ptr()
            y_rows_at = 0 if y_rows is None else y_rows.data_ptr()
            start(SoftmaxSegments)(x_at, x_rows_at, y_at, y_rows_at, out.data_ptr())
            return out

        def gradient(p: torch.Tensor, g: torch.Tensor, *terms: torch.Tensor) -> torch.Tensor:
            out = torch.empty(of_result, dtype=dtype, device=device)
            p, g = p.contiguous(), g.contiguous()
            terms = tuple([each.contiguous() for each in terms])
            x_at, y_at = [*[each.data_ptr() for each in terms], 0, 0][:2]
            x_rows_at = 0 if x_rows is None else x_rows.data_ptr()
            y_rows_at = 0 if y_rows is None else y_rows.data_ptr()
            ends = (x_at, x_rows_at, y_at, y_rows_at)
            start(SoftmaxSegmentsGradient)(p.data_ptr(), g.data_ptr(), *ends, out.data_ptr())
            return out

        return run, gradient

    def _begun(self, launch: Launch, threads: int, *first: Value) -> Callable[..., None]:
        """Return a kernel that has use for so many threads, with its first parameters given.

        Tensors among them are the caller's to keep.
        """
        if not threads:
            return lambda *changing: None
        blocks = min(ceil_div(threads, THREADS), self._most_blocks)
        return functools.partial(launch, blocks, *map(number_of, first))

    def _slope(self, slope: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a slope as kernels read it, one value of the dtype."""
        key = (slope, dtype, device)
        found = self._slopes.get(key)
        if found is None:
            # Copied before this returns, so that any stream may read it.
            found = torch.tensor([slope], dtype=dtype, device="cpu").to(device)
            found = self._slopes.setdefault(key, found)
        return found

    def _launch(
        self,
        parameters: type[Parameters],
        dtype: torch.dtype,
        vector: int,
        heads: int,
        **fixed: Value,
    ) -> Launch:
        """Return a kernel for rows of a shape; it takes what is not fixed."""
        key = (parameters, dtype, vector, heads, *fixed.values())
        found = self._launches.get(key)
        if found is None:
            variant = segment_sums_variant(dtype.itemsize, vector)
            found = self._runner.bind(variant, parameters, THREADS, heads=heads, **fixed)
            found = self._launches.setdefault(key, found)
        return found


def _vector(width: int, dtype: torch.dtype) -> int:
    """Return how many values of rows of `width` are loaded at once: 16 bytes of them, or one."""
    return 1 if width * dtype.itemsize % 16 else 16 // dtype.itemsize


def _lanes(vectors: int) -> int:
    """Return the lanes that take a row of so many vectors: a power of two, up to a warp."""
    return min(32, 1 << max(0, vectors - 1).bit_length())
