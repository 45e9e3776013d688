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
from .rows import BATCH_RELATIONS, tiles_of_survey
from .steps import BY_INDEX, Step
from .type_sums import levels_of

if TYPE_CHECKING:
    from ..engine.kernels.cuda import CudaKernels

Run = Callable[..., Any]
#: Returns what runs a step on a graph.
Bind = Callable[[RelationalGraph], Run]
#: Dtypes that are summed as float32.
NARROW = (torch.float16, torch.bfloat16)


class KernelSteps:
    """Prepares steps for the kernels of a GPU; what is prepared is bound to each graph.

    What depends on the shapes of rows alone is found out once, for all graphs that share steps:
    sampled graphs come once, and on a GPU they wait for the host.

    Parameters
    ----------
    kernels : CudaKernels
        Those of the GPU.
    dtype : torch.dtype
        Of all values.
    tf32 : bool
        Whether torch multiplies float32 by tensor cores, which the kernels do not use.
    """

    def __init__(self, kernels: CudaKernels, dtype: torch.dtype, tf32: bool) -> None:
        self.kernels, self.dtype, self.tf32 = kernels, dtype, tf32
        self._wide = torch.float32 if dtype in NARROW else dtype

    def prepared(self, step: Step, graph: RelationalGraph, gathers: bool) -> Bind | None:
        """Return what binds a step to a graph, None where torch is to run it.

        What it returns takes tensors of any shape: only their memory is read, row by row.

        Parameters
        ----------
        step : Step
            The step.
        graph : RelationalGraph
            One of those that it is bound to: they have the same relations and types.
        gathers : bool
            Whether a GEMM reads its first argument by index, as the `gather` in front of it would.
        """
        if any([math.prod(each.shape) == 0 for each in (step, *step.args)]):
            return None
        if step.op in BY_INDEX:
            return self._product(step, graph, gathers)
        if step.op == "type_sum":
            return self._converted(functools.partial(self._type_sum, step))
        if step.op == "hop_sum":
            return self._converted(self._hop_sum(step))
        if step.op == "hop_dot":
            return self._converted(self._hop_dot(step))
        if step.op == "softmax":
            return self._converted(self._softmax(step, step.args, False))
        if step.op == "softmax_grad":
            return self._converted(self._softmax(step, step.args[2:], True))
        return None

    def _converted(self, bind: Bind) -> Bind:
        if self.dtype is self._wide:
            return bind

        def converted(graph: RelationalGraph) -> Run:
            run = bind(graph)
            return lambda *values: run(*[value.float() for value in values]).to(self.dtype)

        return converted

    def _hop_sum(self, step: Step) -> Bind:
        name, transposed = step.attrs
        heads = step.args[1].width if len(step.args) > 1 else 1
        width = step.width // heads
        prepare = self.kernels.segments.prepare_sum

        def bind(graph: RelationalGraph) -> Run:
            entries = graph.hop(name).by_row(transposed)
            return prepare(*entries, heads, width, self._wide, step.shape)

        return bind

    def _type_sum(self, step: Step, graph: RelationalGraph) -> Run:
        runs = [
            self.kernels.segments.prepare_sum(
                starts, columns, columns, 1, step.width, self._wide, step.shape
            )
            for starts, columns in levels_of(graph, step.args[0].space)
        ]
        return lambda g: functools.reduce(lambda rows, run: run(rows), runs, g)

    def _hop_dot(self, step: Step) -> Bind:
        (name,) = step.attrs
        heads, width = step.width, step.args[0].width // step.width
        prepare = self.kernels.segments.prepare_dots

        def bind(graph: RelationalGraph) -> Run:
            hop = graph.hop(name)
            entries = (*hop.entries(), hop.n_edges)
            return prepare(*entries, heads, width, self._wide, step.shape, hop.has_all_edges)

        return bind

    def _softmax(self, step: Step, terms: tuple[Step, ...], gradient: bool) -> Bind:
        spaces = [term.space for term in terms]
        multiplied, slope = step.attrs
        prepare = self.kernels.segments.prepare_softmax

        def bind(graph: RelationalGraph) -> Run:
            x_rows, y_rows = [*map(graph.rows_of_edges, spaces), None, None][:2]
            run, run_gradient = prepare(
                graph.starts, graph.num_edges, step.width, self._wide, x_rows, y_rows,
                multiplied, slope, step.shape,
            )  # fmt: skip
            return run_gradient if gradient else run

        return bind

    def _product(self, step: Step, graph: RelationalGraph, gathers: bool) -> Bind | None:
        x = step.args[0]
        source = x.args[0] if x.op == "gather" else x
        bounds = graph.bounds(x.space)
        if bounds is None or source.op == "packed":
            return None
        if not gathers and (self.tf32 or len(bounds) - 1 < BATCH_RELATIONS):
            return None
        rows = torch.empty(0, dtype=self.dtype, device="meta")
        if not takes(self.kernels, graph.device, rows, x.shape[-1]):
            return None
        numbers = [n for n in range(len(SCHEDULES)) if self.kernels.typed.takes(rows, x.width, n)]
        return functools.partial(self._typed, step, source if gathers else x, gathers, numbers)

    def _typed(
        self, step: Step, read: Step, gathers: bool, schedules: list[int], graph: RelationalGraph
    ) -> Run:
        """Return the kernel of a product that reads the rows of a step."""
        x, typed = step.args[0], self.kernels.typed
        index = graph.gather_index(x.attrs[0], x.space) if gathers else None
        bounds = graph.bounds(x.space)
        assert bounds is not None
        tiles = tiles_of(graph, x.space, bounds)
        if step.op == "weight_grad":
            width = step.args[1].shape[-1]
            return typed.prepare_gradient(tiles, x.shape, width, self.dtype, index)
        shape = (bounds[-1], x.shape, step.shape[-1], self.dtype)
        if bounds[-1] < product_ways.LARGE_ROWS or len(x.shape) != 1:
            return typed.prepare_product(tiles, *shape, index)
        ways: dict[str, Any] = {
            SCHEDULES[number].name: functools.partial(
                typed.prepare_product, tiles, *shape, schedule=number
            )
            for number in schedules
        }
        sizes = (graph.row_count(read.space), x.width, step.width)
        return product_ways.fastest_product(ways, sizes, bounds, self.dtype, graph.device, index)


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
    given = None if graph.survey is None else tiles_of_survey(graph.survey, space)
    make = functools.partial(TypedTiles, bounds, graph.device, graph.uploads, given)
    return graph.once(("tiles", space), make)
