"""Sums, dot products and softmax over the entries of sparse matrices, on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..format import ceil_div
from .parameters import Address, Int32, Int64, Parameters, Value
from .runner import Runner
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
    CPU. What is called often is prepared: what does not change is bound to the kernel once.

    Parameters
    ----------
    runner : Runner
        Of the device.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

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
        rows, values, device = len(starts) - 1, heads * width, starts.device
        of_result = (rows, *((heads, width) if shape is None else shape))

        @functools.cache
        def start(vector: int) -> Callable[..., None]:
            lanes = _lanes(values // vector)
            return self._bind(
                SumSegments, dtype, vector, rows * lanes,
                starts=starts, rows=rows, columns=columns, edges=edges, heads=heads, width=width,
                lanes=lanes,
            )  # fmt: skip

        most = _vector(width, dtype)

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
        n, device = len(rows), rows.device
        of_result = (n_edges, *((heads,) if shape is None else shape))
        make = torch.empty if each else torch.zeros

        @functools.cache
        def start(vector: int) -> Callable[..., None]:
            lanes = _lanes(width // vector)
            return self._bind(
                DotEntries, dtype, vector, n * heads * lanes,
                rows=rows, columns=columns, edges=edges, entries=n, heads=heads, width=width,
                lanes=lanes,
            )  # fmt: skip

        most = _vector(width, dtype)

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
        factor = None if slope == 1 else torch.full((1,), slope, dtype=dtype, device=device)
        fixed: dict[str, Value] = {
            "starts": starts, "rows": rows, "x_rows": x_rows, "y_rows": y_rows,
            "multiplied": multiplied, "slope": factor, "heads": heads,
        }  # fmt: skip
        threads = 32 * rows * heads if entries else 0
        forward = self._bind(SoftmaxSegments, dtype, 1, threads, **fixed)
        backward = self._bind(SoftmaxSegmentsGradient, dtype, 1, threads, **fixed)

        def run(*terms: torch.Tensor) -> torch.Tensor:
            out = torch.empty(of_result, dtype=dtype, device=device)
            terms = tuple([each.contiguous() for each in terms])
            x_at, y_at = [*[each.data_ptr() for each in terms], 0][:2]
            forward(x_at, y_at, out.data_ptr())
            return out

        def gradient(p: torch.Tensor, g: torch.Tensor, *terms: torch.Tensor) -> torch.Tensor:
            out = torch.empty(of_result, dtype=dtype, device=device)
            p, g = p.contiguous(), g.contiguous()
            terms = tuple([each.contiguous() for each in terms])
            x_at, y_at = [*[each.data_ptr() for each in terms], 0, 0][:2]
            backward(p.data_ptr(), g.data_ptr(), x_at, y_at, out.data_ptr())
            return out

        return run, gradient

    def _bind(
        self,
        parameters: type[Parameters],
        dtype: torch.dtype,
        vector: int,
        threads: int,
        **fixed: Value,
    ) -> Callable[..., None]:
        """Return a kernel that has use for so many threads; it takes what is not fixed."""
        if not threads:
            return lambda *changing: None
        variant = segment_sums_variant(dtype.itemsize, vector)
        launch = self._runner.bind(variant, parameters, THREADS, **fixed)
        most = BLOCKS * self._runner.multiprocessors
        return functools.partial(launch, min(ceil_div(threads, THREADS), most))


def _vector(width: int, dtype: torch.dtype) -> int:
    """Return how many values of rows of `width` are loaded at once: 16 bytes of them, or one."""
    return 1 if width * dtype.itemsize % 16 else 16 // dtype.itemsize


def _lanes(vectors: int) -> int:
    """Return the lanes that take a row of so many vectors: a power of two, up to a warp."""
    return min(32, 1 << max(0, vectors - 1).bit_length())
