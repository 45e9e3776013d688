"""Sums, dot products and softmax over the entries of sparse matrices, on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..format import ceil_div
from .parameters import Address, Int32, Int64, Parameters
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
    """Parameters of `softmax_segments`: int64 `starts`."""

    kernel = "softmax_segments"

    starts: Address
    rows: Int64
    x: Address
    heads: Int32
    out: Address


@dataclass(init=False)
class SoftmaxSegmentsGradient(Parameters):
    """Parameters of `softmax_segments_gradient`: int64 `starts`."""

    kernel = "softmax_segments_gradient"

    starts: Address
    rows: Int64
    y: Address
    g: Address
    heads: Int32
    out: Address


class SegmentKernels:
    """The kernels of segment_sums.cu on one GPU: the functions of `kernels.cpu.segment_sums`.

    Arguments and results are theirs, on the GPU. Sums are the same from run to run; those of a long
    row are added in another order than on the CPU.

    Parameters
    ----------
    runner : Runner
        Of the device.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._launches: dict[tuple[int, int, type[Parameters]], Launch] = {}

    def sum_segments(
        self,
        starts: torch.Tensor,
        columns: torch.Tensor,
        edges: torch.Tensor,
        weights: torch.Tensor,
        x: torch.Tensor,
    ) -> torch.Tensor:
        """See `cpu.segment_sums.sum_segments`."""
        _, heads, width = x.shape
        out = x.new_empty(len(starts) - 1, heads, width)
        vector = _vector(x, width, out)
        lanes = _lanes(heads * width // vector)
        weights_at = weights.data_ptr() if len(weights) else 0
        self._start(
            SumSegments, x, vector, len(out) * lanes,
            starts.data_ptr(), len(out), columns.data_ptr(), edges.data_ptr(), weights_at,
            x.data_ptr(), heads, width, lanes, out.data_ptr(),
        )  # fmt: skip
        return out

    def dot_entries(
        self,
        rows: torch.Tensor,
        columns: torch.Tensor,
        edges: torch.Tensor,
        g: torch.Tensor,
        x: torch.Tensor,
        n_edges: int,
    ) -> torch.Tensor:
        """See `cpu.segment_sums.dot_entries`."""
        _, heads, width = x.shape
        out = x.new_zeros(n_edges, heads)
        vector = _vector(x, width, g)
        lanes = _lanes(width // vector)
        self._start(
            DotEntries, x, vector, len(rows) * heads * lanes,
            rows.data_ptr(), columns.data_ptr(), edges.data_ptr(), len(rows), g.data_ptr(),
            x.data_ptr(), heads, width, lanes, out.data_ptr(),
        )  # fmt: skip
        return out

    def softmax_segments(self, starts: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """See `cpu.segment_sums.softmax_segments`."""
        out, rows = torch.empty_like(x), len(starts) - 1
        heads = x.shape[1]
        values = (starts.data_ptr(), rows, x.data_ptr(), heads, out.data_ptr())
        self._start(SoftmaxSegments, x, 1, 32 * rows * heads, *values)
        return out

    def softmax_segments_gradient(
        self, starts: torch.Tensor, y: torch.Tensor, g: torch.Tensor
    ) -> torch.Tensor:
        """See `cpu.segment_sums.softmax_segments_gradient`."""
        out, rows = torch.empty_like(y), len(starts) - 1
        heads = y.shape[1]
        values = (starts.data_ptr(), rows, y.data_ptr(), g.data_ptr(), heads, out.data_ptr())
        self._start(SoftmaxSegmentsGradient, y, 1, 32 * rows * heads, *values)
        return out

    def _start(
        self, parameters: type[Parameters], x: torch.Tensor, vector: int, threads: int, *values: int
    ) -> None:
        """Start a kernel that has use for so many threads."""
        if not threads:
            return
        key = (x.element_size(), vector, parameters)
        launch = self._launches.get(key)
        if launch is None:
            variant = segment_sums_variant(x.element_size(), vector)
            launch = self._launches[key] = self._runner.bind(variant, parameters, THREADS)
        launch(min(ceil_div(threads, THREADS), BLOCKS * self._runner.multiprocessors), *values)


def _vector(x: torch.Tensor, width: int, other: torch.Tensor) -> int:
    """Return how many values of rows of `width` are loaded at once: 16 bytes of them, or one."""
    size = x.element_size()
    whole = (x.data_ptr() | other.data_ptr() | width * size) % 16 == 0
    return 16 // size if whole else 1


def _lanes(vectors: int) -> int:
    """Return the lanes that take a row of so many vectors: a power of two, up to a warp."""
    return min(32, 1 << max(0, vectors - 1).bit_length())
