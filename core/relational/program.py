"""Programs as users have them: traced, compiled for a graph at the first call, differentiable."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ArgumentError, ArgumentTypeError
from ..tables import CompressedFeature, CompressedTable, SlabCache
from .execute import Machine, Schedule
from .gradient import differentiated, kept_of
from .graph import RelationalGraph
from .passes import InputInfo, Lowering, Passes, lowered
from .steps import Step
from .trace import Value, described, in_order, trace

PACKED = (CompressedTable, CompressedFeature, SlabCache)
Packed = CompressedTable | CompressedFeature | SlabCache
_numbers = itertools.count()
#: Compiled programs by their number.
PROGRAMS: weakref.WeakValueDictionary[int, CompiledProgram] = weakref.WeakValueDictionary()


class Program:
    """A traced program; `compile` makes it callable on tensors.

    Parameters
    ----------
    function : callable
        Takes the graph, then inputs by position; returns a value or a tuple of them.

    Raises
    ------
    ProgramError
        When it does what cannot be compiled, with the line.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.__name__, self.__doc__ = function.__name__, function.__doc__
        self.names, self.outputs, self.single = trace(function)

    def compile(self, passes: Passes | None = None, backend: str = "auto") -> CompiledProgram:
        """Return the program as a function of a graph and tensors.

        Parameters
        ----------
        passes : Passes, optional
            Which passes run; all by default.
        backend : {"auto", "torch"}
            What runs products and traversals: with "auto" compiled loops on a CPU and kernels on a
            GPU, else torch's operators.
        """
        return CompiledProgram(self, passes or Passes(), backend)

    def __str__(self) -> str:
        return described(self.outputs)


def program(function: Callable[..., Any]) -> Program:
    """Trace a function as a relational program; see `bitslab.relational`."""
    return Program(function)


@dataclass(frozen=True)
class Plan:
    """A program's steps for one graph and the shapes of its inputs.

    Attributes
    ----------
    reordered : sequence of Value
        The program after linear operators were exchanged.
    forward : Schedule
        Gives the outputs, and what the backward program reads.
    backward : Schedule or None
        Gives the gradients of `wanted`.
    leaves : list of Step
        The inputs that the forward program reads.
    kept, seeds : list of Step
        What the backward program reads of the forward program, and the gradients of outputs.
    wanted : tuple of str
        Inputs that take a gradient.
    n_outputs : int
        How many of the results of `forward` are outputs.
    """

    reordered: Sequence[Value]
    forward: Schedule
    backward: Schedule | None
    leaves: list[Step]
    kept: list[Step]
    seeds: list[Step]
    wanted: tuple[str, ...]
    n_outputs: int
    lowering: Lowering


class CompiledProgram:
    """A program that runs on tensors, with gradients.

    Threads may share it. The steps are chosen anew for each graph and for new shapes.

    Parameters
    ----------
    program : Program
        The program.
    passes : Passes
        Which passes run.
    backend : {"auto", "torch"}
        As for `Program.compile`.
    """

    def __init__(self, program: Program, passes: Passes, backend: str) -> None:
        if backend not in ("auto", "torch"):
            raise ArgumentError(f'backend is {backend!r}; accepted are "auto" and "torch"')
        self.program, self.passes, self.backend = program, passes, backend
        #: Names it where only a number can, inside `torch.compile`.
        self.number = next(_numbers)
        PROGRAMS[self.number] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledProgram:
        """Return itself: nothing in it changes."""
        return self

    def __call__(self, graph: RelationalGraph, *inputs: torch.Tensor | Packed) -> Any:
        """Return the outputs for a graph.

        Parameters
        ----------
        graph : RelationalGraph
            The graph, on the device of the inputs.
        *inputs : torch.Tensor or CompressedTable or CompressedFeature or SlabCache
            Of one floating dtype, in the order of the program's parameters. Rows of a packed input
            are decoded as they are multiplied; it takes no gradient. On a GPU kernels rebuild them
            in shared memory, out of host memory or the slabs of a cache; rows that these do not
            take are decoded in blocks.

        Returns
        -------
        torch.Tensor or tuple of torch.Tensor
            ``[N_dst, ...]`` for a nodewise output, ``[E, ...]`` for an edgewise one, whose rows
            stand in the order of the edges as they were given.

        Raises
        ------
        ArgumentError
            For a wrong number of inputs or a shape that does not fit; the message has the line.
        ArgumentTypeError
            For a dtype or a device that does not fit.
        ModifiedInPlaceError
            When the graph's tensors were changed in place.
        """
        graph.check_unchanged()
        values = self._checked(graph, inputs)
        device, dtype = graph.device.type, values[0].dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            values = [v.to(dtype) if isinstance(v, torch.Tensor) else v for v in values]
        plan = self.plan(graph, values)
        machine = Machine(graph, dtype, self.backend == "auto")
        with torch.autocast(device, enabled=False):
            outputs = _Run.apply(  # type: ignore[no-untyped-call]
                plan,
                machine,
                dict(zip(self.program.names, values, strict=True)),
                *[v for v in values if isinstance(v, torch.Tensor)],
            )
        return outputs[0] if self.program.single else tuple(outputs)

    def plan(self, graph: RelationalGraph, values: Sequence[torch.Tensor | Packed]) -> Plan:
        """Return the steps for a graph and inputs, made at the first call of their shapes."""
        names = self.program.names
        wanted = tuple(
            name
            for name, v in zip(names, values, strict=True)
            if torch.is_grad_enabled() and isinstance(v, torch.Tensor) and v.requires_grad
        )
        # Of plain tuples: this is looked up at each call.
        shapes = tuple([(tuple(v.shape), isinstance(v, torch.Tensor)) for v in values])
        return graph.once((self, shapes, wanted), lambda: self._make(graph, shapes, wanted))

    def _make(
        self,
        graph: RelationalGraph,
        shapes: Sequence[tuple[tuple[int, ...], bool]],
        wanted: tuple[str, ...],
    ) -> Plan:
        infos = {
            name: InputInfo(shape, not plain)
            for name, (shape, plain) in zip(self.program.names, shapes, strict=True)
        }
        lowering, values = lowered(graph, infos, self.passes, self.program.outputs)
        outputs, fuse = lowering.outputs, self.passes.fuse
        gradients: list[Step | None] = []
        kept: list[Step] = []
        seeds: list[Step] = []
        backward = None
        if wanted:
            gradients, seeds = differentiated(lowering.steps, outputs, wanted)
            kept = kept_of(outputs, [g for g in gradients if g is not None])
            backward = Schedule(gradients, [*kept, *seeds], fuse)
        leaves = [s for s in in_order(outputs) if s.op in ("input", "packed")]
        forward = Schedule([*outputs, *kept], leaves, fuse)
        return Plan(values, forward, backward, leaves, kept, seeds, wanted, len(outputs), lowering)

    def _checked(self, graph: RelationalGraph, inputs: Sequence[Any]) -> list[Any]:
        names = self.program.names
        if len(inputs) != len(names):
            raise ArgumentError(
                f"{len(inputs)} inputs; accepted are {len(names)}: {', '.join(names)}"
            )
        first = None
        for name, x in zip(names, inputs, strict=True):
            if not isinstance(x, (torch.Tensor, *PACKED)):
                raise ArgumentTypeError(
                    f"input {name!r} is {type(x).__name__}; accepted are tensors and packed tables"
                )
            if isinstance(x, torch.Tensor) and x.device != graph.device:
                raise ArgumentTypeError(
                    f"input {name!r} is on {x.device}, the graph on {graph.device}; accepted is "
                    "one device for both"
                )
            if not x.dtype.is_floating_point or (first is not None and x.dtype != first[1]):
                other = f", {first[0]!r} is {first[1]}" if first else ""
                raise ArgumentTypeError(
                    f"input {name!r} is {x.dtype}{other}; accepted is one floating dtype for all"
                )
            first = first or (name, x.dtype)
        return list(inputs)

    def explain(self, graph: RelationalGraph, *inputs: torch.Tensor | Packed) -> str:
        """Return both levels of the program for a graph, with rows and bytes of each step.

        Parameters
        ----------
        graph : RelationalGraph
            The graph.
        *inputs : torch.Tensor or packed rows
            As for a call; only their shapes and dtypes are read.
        """
        values = self._checked(graph, inputs)
        plan = self.plan(graph, values)
        element = values[0].dtype.itemsize if values else 4
        lines = [f"program {self.program.__name__} on {graph!r}", "", str(self.program), ""]
        if plan.reordered is not self.program.outputs:
            lines += ["with linear operators reordered", "", described(plan.reordered), ""]
        names: dict[int, str] = {id(s): f"grad{i}" for i, s in enumerate(plan.seeds)}
        names |= {id(s): s.attrs[0] for s in plan.leaves}
        for title, schedule in (("forward", plan.forward), ("backward", plan.backward)):
            if schedule is not None:
                lines += [title, *_listing(schedule, plan.lowering, names, element), ""]
        return "\n".join(lines)


def _listing(
    schedule: Schedule, lowering: Lowering, names: dict[int, str], element: int
) -> list[str]:
    lines = []
    for step in schedule.order:
        arguments = [names[id(a)] for a in schedule.reads(step)]
        names.setdefault(id(step), f"%{len(names)}")
        arguments += [str(a) for a in step.attrs]
        if schedule.gathers(step):
            arguments.append(f"rows by {step.args[0].attrs[0]}")
        rows = lowering.steps.rows(step.space)
        lines.append(
            f"  {step.template:<9} {names[id(step)]} = {step.op}({', '.join(arguments)})"
            f"  # {step.space} {rows} x {list(step.shape)}, {rows * step.width * element} B"
        )
    return lines


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, plan: Plan, machine: Machine, inputs: dict[str, Any], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        values = {id(leaf): inputs[leaf.attrs[0]] for leaf in plan.leaves}
        results = machine.run(plan.forward, values)
        kept = results[plan.n_outputs :]
        saved = [t for t in kept if isinstance(t, torch.Tensor)]
        ctx.save_for_backward(*saved)
        ctx.packed = [None if isinstance(t, torch.Tensor) else t for t in kept]
        ctx.plan, ctx.machine = plan, machine
        ctx.wanted = [
            name if isinstance(inputs[name], torch.Tensor) and name in plan.wanted else None
            for name in inputs
            if isinstance(inputs[name], torch.Tensor)
        ]
        return tuple(t for t in results[: plan.n_outputs] if t is not None)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        plan: Plan = ctx.plan
        assert plan.backward is not None
        saved = iter(ctx.saved_tensors)
        kept = [next(saved) if p is None else p for p in ctx.packed]
        values = {id(step): value for step, value in zip(plan.kept, kept, strict=True)}
        values |= {id(s): g for s, g in zip(plan.seeds, gradients, strict=True)}
        found = dict(zip(plan.wanted, ctx.machine.run(plan.backward, values), strict=True))
        return (None, None, None, *(found.get(name) for name in ctx.wanted))
