"""Steps that are kernels of a GPU: bound once to a graph, replayed with addresses of tensors.

What a launch costs the host is mostly what is found out for it. All of it but the memory of values
is the same at each call of a plan, so it is found out when the plan is made.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..engine.kernels.cuda.product_source import staged
from ..engine.kernels.cuda.typed_gemm import TypedTiles
from ..engine.kernels.typed_products import PRODUCT_DTYPES, SCHEDULES, PackedRows
from . import product_ways
from .graph import RelationalGraph
from .rows import BATCH_RELATIONS
from .steps import BY_INDEX, Step
from .type_sums import levels_of

if TYPE_CHECKING:
    from ..engine.kernels.cuda import CudaKernels

Run = Callable[..., Any]
#: Dtypes that are summed as float32.
NARROW = (torch.float16, torch.bfloat16)


class KernelSteps:
    """Binds steps to the kernels of a graph's GPU.

    Parameters
    ----------
    graph : RelationalGraph
        The graph.
    kernels : CudaKernels
        Those of its GPU.
    dtype : torch.dtype
        Of all values.
    tf32 : bool
        Whether torch multiplies float32 by tensor cores, which the kernels do not use.
    """

    def __init__(
        self, graph: RelationalGraph, kernels: CudaKernels, dtype: torch.dtype, tf32: bool
    ) -> None:
        self.graph, self.kernels, self.dtype, self.tf32 = graph, kernels, dtype, tf32
        self._wide = torch.float32 if dtype in NARROW else dtype
        self._softmaxes: dict[Any, tuple[Run, Run]] = {}

    def bound(self, step: Step, index: torch.Tensor | None) -> Run | None:
        """Return what runs a step on its arguments, None where torch is to run it.

        It takes tensors of any shape: only their memory is read, row by row.

        Parameters
        ----------
        step : Step
            The step.
        index : torch.Tensor or None
            int64: the rows of its first argument that a GEMM reads; None: as they are.
        """
        if any(math.prod(each.shape) == 0 for each in (step, *step.args)):
            return None
        if step.op in BY_INDEX:
            return self._product(step, index)
        if step.op == "type_sum":
            return self._converted(self._type_sum(step))
        if step.op == "hop_sum":
            return self._converted(self._hop_sum(step))
        if step.op == "hop_dot":
            return self._converted(self._hop_dot(step))
        if step.op == "softmax":
            return self._converted(self._softmax(step, step.args)[0])
        if step.op == "softmax_grad":
            return self._converted(self._softmax(step, step.args[2:])[1])
        return None

    def _converted(self, run: Run) -> Run:
        if self.dtype is self._wide:
            return run
        return lambda *values: run(*[value.float() for value in values]).to(self.dtype)

    def _hop_sum(self, step: Step) -> Run:
        name, transposed = step.attrs
        heads = step.args[1].width if len(step.args) > 1 else 1
        entries = self.graph.hop(name).by_row(transposed)
        width = step.width // heads
        return self.kernels.segments.prepare_sum(*entries, heads, width, self._wide, step.shape)

    def _type_sum(self, step: Step) -> Run:
        found = levels_of(self.graph, step.args[0].space)
        runs = [
            self.kernels.segments.prepare_sum(
                starts, columns, columns, 1, step.width, self._wide, step.shape
            )
            for starts, columns in found
        ]
        return lambda g: functools.reduce(lambda rows, run: run(rows), runs, g)

    def _hop_dot(self, step: Step) -> Run:
        (name,) = step.attrs
        hop, width = self.graph.hop(name), step.args[0].width // step.width
        entries = (*hop.entries(), hop.n_edges)
        return self.kernels.segments.prepare_dots(
            *entries, step.width, width, self._wide, step.shape, hop.has_all_edges
        )

    def _softmax(self, step: Step, terms: tuple[Step, ...]) -> tuple[Run, Run]:
        spaces = tuple(term.space for term in terms)
        key = (spaces, step.attrs, step.shape)
        if key not in self._softmaxes:
            rows = [self.graph.rows_of_edges(space) for space in spaces]
            x_rows, y_rows = [*rows, None, None][:2]
            multiplied, slope = step.attrs
            self._softmaxes[key] = self.kernels.segments.prepare_softmax(
                self.graph.starts, self.graph.num_edges, step.width, self._wide, x_rows, y_rows,
                multiplied, slope, step.shape,
            )  # fmt: skip
        return self._softmaxes[key]

    def _product(self, step: Step, index: torch.Tensor | None) -> Run | None:
        x = step.args[0]
        bounds = self.graph.bounds(x.space)
        source = x.args[0] if x.op == "gather" else x
        if bounds is None or source.op == "packed":
            return None
        run = self._typed(step, bounds, index)
        small = bounds[-1] < product_ways.LARGE_ROWS
        if run is None or small or step.op == "weight_grad" or len(x.shape) != 1:
            return run
        rows = torch.empty(0, dtype=self.dtype, device="meta")
        ways: dict[str, Any] = {
            schedule.name: functools.partial(self._typed, step, bounds, schedule=number)
            for number, schedule in enumerate(SCHEDULES)
            if self.kernels.typed.takes(rows, x.width, number)
        }
        read = x if index is None else source
        shape = (self.graph.row_count(read.space), x.width, step.width)
        device = self.graph.device
        return product_ways.fastest_product(ways, shape, bounds, self.dtype, device, index)

    def _typed(
        self, step: Step, bounds: list[int], index: torch.Tensor | None, schedule: int = 0
    ) -> Run | None:
        """Return the kernel of a product, or None where torch is to run it."""
        x, other = step.args[:2]
        space, typed = x.space, self.kernels.typed
        if index is None and (self.tf32 or len(bounds) - 1 < BATCH_RELATIONS):
            return None
        rows = torch.empty(0, dtype=self.dtype, device="meta")
        if not takes(self.kernels, self.graph.device, rows, x.shape[-1]):
            return None
        tiles = tiles_of(self.graph, space, bounds)
        if step.op == "weight_grad":
            return typed.prepare_gradient(tiles, x.shape, other.shape[-1], self.dtype, index)
        n, width = bounds[-1], step.shape[-1]
        return typed.prepare_product(tiles, n, x.shape, width, self.dtype, index, schedule)


def takes(
    kernels: CudaKernels, device: torch.device, rows: torch.Tensor | PackedRows, depth: int
) -> bool:
    """Return whether the kernels of typed products take rows of `depth` elements.

    Where only the device's shared memory is too little, a warning says so, once for a device.

    Parameters
    ----------
    kernels : CudaKernels
        Those of the device.
    device : torch.device
        The GPU.
    rows : torch.Tensor or PackedRows
        Plain rows, of which only the dtype counts, or packed ones.
    depth : int
        Elements of a row.
    """
    if kernels.typed.takes(rows, depth):
        return True
    kernel = isinstance(rows, torch.Tensor) or staged(rows) is not None
    if kernel and rows.dtype in PRODUCT_DTYPES:
        _note_little_memory(device)
    return False


@functools.cache
def _note_little_memory(device: torch.device) -> None:
    warnings.warn(
        f"relational products on {device} whose rows do not fit its shared memory run torch's "
        "operators; `explain` has the shapes of products",
        stacklevel=2,
    )


def tiles_of(graph: RelationalGraph, space: str, bounds: Sequence[int]) -> TypedTiles:
    """Return how the rows of a space are cut for typed products."""
    return graph.once(("tiles", space), lambda: TypedTiles(bounds, graph.device, graph.uploads))
