"""Programs as users have them: traced, compiled for a graph at the first call, differentiable."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..errors import ArgumentError, ArgumentTypeError, BitslabError
from ..tables import CompressedFeature, CompressedTable, SlabCache
from .execute import Calls, Machine, Prepared, Schedule
from .gradient import differentiated, kept_of
from .graph import RelationalGraph
from .packed_changes import Packed, PackedWatch, naming_closed
from .passes import InputInfo, Passes, check_rows, lowered
from .steps import Step, Steps, costs_of
from .symbolic import ASSUMED, symbolic_inputs
from .trace import Value, described, in_order, trace

PACKED = (CompressedTable, CompressedFeature, SlabCache)
_numbers = itertools.count()
#: Compiled programs by their number.
PROGRAMS: weakref.WeakValueDictionary[int, CompiledProgram] = weakref.WeakValueDictionary()


class SecondDerivativeError(BitslabError, RuntimeError):
    """A gradient of a program is to be differentiated again."""


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
        Gives the gradients of inputs that take one, from what it reads of the forward program and
        the gradients of outputs.
    n_outputs : int
        How many of the results of `forward` are outputs.
    run_forward, run_backward : Calls or None
        The schedules, bound to the graph.
    dtype : torch.dtype
        In which it computes.
    reads : list of int
        The places of the inputs that the forward program reads.
    gradients : list of int or None
        For each tensor among the inputs which result of `run_backward` is its gradient.
    packed : list of tuple of str and int
        Name and place of each packed input.
    read_again : list of tuple of str and int
        The same of those that the backward program reads.
    """

    reordered: Sequence[Value]
    forward: Schedule
    backward: Schedule | None
    n_outputs: int
    run_forward: Calls
    run_backward: Calls | None
    dtype: torch.dtype
    reads: list[int]
    gradients: list[int | None]
    packed: list[tuple[str, int]]
    read_again: list[tuple[str, int]]


class Schedules(NamedTuple):
    """The steps of a program, for any graph that has its spaces.

    Attributes
    ----------
    forward : Schedule
        Gives the outputs, and what the backward program reads, its last results.
    backward : Schedule or None
        Gives gradients of inputs. What it is given begins with what it reads of `forward`.
    """

    forward: Schedule
    backward: Schedule | None


class Chosen(NamedTuple):
    """What was chosen for graphs of like sizes: for inference and training alike.

    Attributes
    ----------
    reordered : sequence of Value
        The program after linear operators were exchanged.
    outputs : list of Step
        The steps of its outputs.
    made : dict
        All steps that were made (`Steps`).
    placed : list of Value
        The inputs that have rows of a graph.
    schedules : dict
        By the inputs that take gradients.
    prepared : dict
        Of these, by the dtype and the device too: what plans have in common.
    """

    reordered: Sequence[Value]
    outputs: list[Step]
    made: dict[Any, Step]
    placed: list[Value]
    schedules: dict[tuple[str, ...], Schedules]
    prepared: dict[Any, tuple[dict[str, Any], Prepared, Prepared | None]]


#: Up to so many edges steps are those of a graph of like sizes: to choose them takes a CPU 0.8
#: (RGCN) to 2.1 ms (RGAT), and sampled blocks, each a graph, differ little.
LIKE_EDGES = 1 << 16
#: Kept for each program.
LIKE_LIMIT = 64


def like(graph: RelationalGraph, by_pairs: bool) -> tuple[Any, ...] | None:
    """Return what graphs have in common that share their steps; None for a large one.

    `by_pairs`: the distinct pairs of nodes and relations count too.
    """
    if graph.num_edges > LIKE_EDGES:
        return None
    sizes = [graph.num_src, graph.num_dst, graph.num_edges]
    if by_pairs:
        sizes += [graph.row_count(space) for space in ("pair_src", "pair_dst")]
    types = None if graph.node_types is None else graph.node_types.count
    lengths = tuple([n.bit_length() for n in sizes])
    return graph.device.type, costs_of(graph.device), graph.num_relations, types, lengths


class CompiledProgram:
    """A program that runs on tensors, with gradients.

    Threads may share it. Steps are chosen for each graph and for new shapes of rows, and once for
    small graphs of like sizes.

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
        inner = in_order(program.outputs)
        #: Inputs that all rows share: steps depend on their whole shapes.
        self._shared = {v.args[0].attrs[0] for v in inner if v.op == "shared"}
        self._by_pairs = any(v.op == "typed_linear" for v in inner)
        #: Steps for small graphs, by `like` and what is known of inputs; those used last.
        self._of_like: OrderedDict[Any, Chosen] = OrderedDict()
        self._lock = threading.Lock()
        #: Names it where only a number can, inside `torch.compile`.
        self.number = next(_numbers)
        PROGRAMS[self.number] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return CompiledProgram, (self.program, self.passes, self.backend)

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
            Of one floating dtype, in the order of the program's parameters; inside torch.autocast
            of any, and cast to its dtype unless one is float64, which autocast leaves. Rows of a
            packed input are decoded as they are multiplied; it takes no gradient. On a GPU kernels
            rebuild them in shared memory, out of host memory or the slabs of a cache; rows that
            these do not take are decoded in blocks.

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
            When the graph's tensors were changed in place; by a backward pass that reads packed
            rows again, when these were changed after the forward pass.
        BitslabError
            When a packed input is closed, now or in the backward pass.
        """
        graph.check_unchanged()
        plan = self.plan(graph, inputs)
        values: Sequence[Any] = inputs
        device = graph.device.type
        if torch.is_autocast_enabled(device):
            values = cast_tensors(inputs, plan.dtype)
            with torch.autocast(device, enabled=False):
                outputs = _run_packed(plan, values) if plan.packed else _run(plan, values)
        else:
            outputs = _run_packed(plan, values) if plan.packed else _run(plan, values)
        return outputs[0] if self.program.single else tuple(outputs)

    def plan(self, graph: RelationalGraph, inputs: Sequence[torch.Tensor | Packed]) -> Plan:
        """Return the steps for a graph and inputs, made at the first call of their kind."""
        device = graph.device.type
        graded = torch.is_grad_enabled()
        # Whatever a check or a plan depends on: inputs are looked at once for each of these.
        key = (
            self,
            autocast_dtype(device, inputs) if torch.is_autocast_enabled(device) else None,
            device == "cuda" and tf32_allowed(),
            tuple([
                (x.shape, x.dtype, x.device, graded and x.requires_grad)
                if isinstance(x, torch.Tensor)
                else (type(x), getattr(x, "shape", None), getattr(x, "dtype", None))
                for x in inputs
            ]),
        )  # fmt: skip
        return graph.plan(key, lambda rows: self._make(rows, inputs, graded, key[1], key[2]))

    def _make(
        self,
        graph: RelationalGraph,
        inputs: Sequence[Any],
        graded: bool,
        autocast: torch.dtype | None,
        tf32: bool,
    ) -> Plan:
        self._check(graph, inputs, mixed=autocast is not None)
        names = self.program.names
        plain = {n: x for n, x in zip(names, inputs, strict=True) if isinstance(x, torch.Tensor)}
        infos = {
            name: InputInfo(tuple(x.shape), name not in plain)
            for name, x in zip(names, inputs, strict=True)
        }
        wanted = [name for name, x in plain.items() if graded and x.requires_grad]
        chosen = self._chosen(graph, infos)
        forward, backward = self._schedules(graph, chosen, wanted)
        dtype = autocast or inputs[0].dtype
        machine = Machine(graph, dtype, self.backend == "auto", tf32 and dtype is torch.float32)
        key = (tuple(wanted), tuple(plain), dtype, tf32, machine.kernels)
        prepared = chosen.prepared.get(key)
        if prepared is None:
            given = (forward, backward, wanted, list(plain), machine)
            prepared = chosen.prepared.setdefault(key, self._prepared(chosen, *given))
        facts, run_forward, run_backward = prepared
        return Plan(
            **facts,
            run_forward=run_forward.on(machine),
            run_backward=None if run_backward is None else run_backward.on(machine),
        )

    def _prepared(
        self,
        chosen: Chosen,
        forward: Schedule,
        backward: Schedule | None,
        wanted: Sequence[str],
        plain: Sequence[str],
        machine: Machine,
    ) -> tuple[dict[str, Any], Prepared, Prepared | None]:
        """Return what plans of graphs that share their steps have in common, and the steps."""
        names = self.program.names
        kept = [] if backward is None else backward.given
        facts = {
            "reordered": chosen.reordered,
            "forward": forward,
            "backward": backward,
            "n_outputs": len(chosen.outputs),
            "dtype": machine.dtype,
            "reads": [names.index(leaf.attrs[0]) for leaf in forward.given],
            "gradients": [wanted.index(name) if name in wanted else None for name in plain],
            "packed": [(name, place) for place, name in enumerate(names) if name not in plain],
            "read_again": [
                (name, names.index(name))
                for name in dict.fromkeys(s.attrs[0] for s in kept if s.op == "packed")
            ],
        }
        of_backward = None if backward is None else Prepared(backward, machine)
        return facts, Prepared(forward, machine), of_backward

    def _chosen(self, graph: RelationalGraph, infos: Mapping[str, InputInfo]) -> Chosen:
        """Return the steps for a graph: of a small one those that one like it was given before.

        Steps hold no rows. They are right for any graph, and fast for those of about its sizes.
        """
        key = like(graph, self._by_pairs)
        if key is None:
            return self._cheapest(graph, infos)
        shapes = tuple([
            (info.shape if name in self._shared else info.shape[1:], info.packed)
            for name, info in infos.items()
        ])  # fmt: skip
        key = (*key, shapes)
        with self._lock:
            found = self._of_like.get(key)
            if found is not None:
                self._of_like.move_to_end(key)
        if found is None:
            found = self._cheapest(graph, infos)
            with self._lock:
                found = self._of_like.setdefault(key, found)
                if len(self._of_like) > LIKE_LIMIT:
                    self._of_like.popitem(last=False)
            return found
        for value in found.placed:
            check_rows(value, infos[value.args[0].attrs[0]], graph)
        return found

    def _cheapest(self, graph: RelationalGraph, infos: Mapping[str, InputInfo]) -> Chosen:
        """Return the steps that are predicted to cost least on a graph."""
        lowering, values = lowered(graph, infos, self.passes, self.program.outputs)
        return Chosen(values, lowering.outputs, lowering.steps.made, lowering.placed, {}, {})

    def _schedules(
        self, graph: RelationalGraph, chosen: Chosen, wanted: Sequence[str]
    ) -> Schedules:
        """Return the steps with those of the gradients of some inputs."""
        key = tuple(wanted)
        with self._lock:
            if key not in chosen.schedules:
                chosen.schedules[key] = self._scheduled(Steps(graph, chosen.made), chosen, key)
            return chosen.schedules[key]

    def _scheduled(self, steps: Steps, chosen: Chosen, wanted: Sequence[str]) -> Schedules:
        outputs, fuse = chosen.outputs, self.passes.fuse
        kept: list[Step] = []
        backward = None
        if wanted:
            gradients, seeds = differentiated(steps, outputs, wanted)
            kept = kept_of(outputs, [g for g in gradients if g is not None])
            backward = Schedule(gradients, [*kept, *seeds], fuse)
        leaves = [s for s in in_order(outputs) if s.op in ("input", "packed")]
        return Schedules(Schedule([*outputs, *kept], leaves, fuse), backward)

    def _symbolic(
        self, graph: RelationalGraph
    ) -> tuple[dict[str, InputInfo], Sequence[Value], Schedules]:
        """Return shapes that inputs may have, and the steps for these."""
        given, reason = (self.program.names, self.program.outputs, graph), None
        for numbers in ("er", ""):  # factors of edges and relations are numbers, or vectors
            try:
                infos = symbolic_inputs(*given, numbers)
                chosen = self._chosen(graph, infos)
                return infos, chosen.reordered, self._schedules(graph, chosen, list(infos))
            except ArgumentError as error:
                reason = error
        raise ArgumentError(
            f"explain of a graph alone: shapes of inputs do not follow from {self.program.__name__}"
            f" ({reason}); accepted are the inputs too"
        ) from reason

    def _check(self, graph: RelationalGraph, inputs: Sequence[Any], mixed: bool) -> None:
        """Raise an error for inputs that do not fit; `mixed`: they are cast to one dtype later."""
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
            other_dtype = first is not None and x.dtype != first[1] and not mixed
            if not x.dtype.is_floating_point or other_dtype:
                other = f", {first[0]!r} is {first[1]}" if first else ""
                raise ArgumentTypeError(
                    f"input {name!r} is {x.dtype}{other}; accepted is one floating dtype for all"
                )
            first = first or (name, x.dtype)

    def explain(self, graph: RelationalGraph, *inputs: torch.Tensor | Packed) -> str:
        """Return both levels of the program for a graph, with rows and bytes of each step.

        Parameters
        ----------
        graph : RelationalGraph
            The graph.
        *inputs : torch.Tensor or packed rows
            As for a call; only their shapes and dtypes are read. With none of them shapes follow
            from the program: sizes that only inputs have are symbols (F1, F2, ...), steps are
            chosen as for 64 of each, all inputs take gradients, and bytes are those of torch's
            default dtype.

        Raises
        ------
        ArgumentError
            As for a call; with no inputs also where shapes do not follow from the program.
        """
        lines = [f"program {self.program.__name__} on {graph!r}", "", str(self.program), ""]
        if inputs:
            plan = self.plan(graph, inputs)
            reordered, forward, backward = plan.reordered, plan.forward, plan.backward
            dtype = plan.dtype
        else:
            infos, reordered, (forward, backward) = self._symbolic(graph)
            dtype = torch.get_default_dtype()
            shapes = ", ".join(f"{name} {list(info.shape)}" for name, info in infos.items())
            lines += [f"for {shapes}, of {dtype}, steps as for {ASSUMED} of each F", ""]
        if reordered is not self.program.outputs:
            lines += ["with linear operators reordered", "", described(reordered), ""]
        given = [*forward.given, *(backward.given if backward else ())]
        leaves = [s for s in given if s.op in ("input", "packed")]
        names: dict[int, str] = {id(s): s.attrs[0].replace(" ", "") for s in leaves}
        for title, schedule in (("forward", forward), ("backward", backward)):
            if schedule is not None:
                lines += [title, *_listing(schedule, graph, dtype, names), ""]
        return "\n".join(lines)


def tf32_allowed() -> bool:
    """Return whether torch may multiply float32 as TF32 on a GPU: only where it is asked to.

    By ``torch.backends.cuda.matmul.allow_tf32`` or ``fp32_precision``, or by
    ``torch.set_float32_matmul_precision``.
    """
    matmul = torch.backends.cuda.matmul
    try:
        return bool(matmul.allow_tf32)
    except RuntimeError:  # it was set by fp32_precision, and torch reads it by that alone then
        return bool(matmul.fp32_precision == "tf32")


def autocast_dtype(device: str, inputs: Sequence[Any]) -> torch.dtype | None:
    """Return the dtype that torch.autocast gives to inputs; None without it and for float64.

    As in torch's operators: float64 is not cast, and must be the dtype of all inputs then.
    """
    if not torch.is_autocast_enabled(device):
        return None
    if any([getattr(x, "dtype", None) is torch.float64 for x in inputs]):
        return None
    return torch.get_autocast_dtype(device)


def cast_tensors(inputs: Sequence[Any], dtype: torch.dtype) -> list[Any]:
    """Return inputs with tensors of floats in a dtype; packed rows are cast as they are decoded."""
    return [
        x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in inputs
    ]


def _listing(
    schedule: Schedule, graph: RelationalGraph, dtype: torch.dtype, names: dict[int, str]
) -> list[str]:
    lines = []
    for step in schedule.order:
        arguments = [names[id(a)] for a in schedule.reads(step)]
        names.setdefault(id(step), f"%{len(names)}")
        arguments += [str(a) for a in step.attrs]
        if schedule.gathers(step):
            arguments.append(f"rows by {step.args[0].attrs[0]}")
        rows = 1 if step.space == "shared" else graph.row_count(step.space)
        n_bytes = rows * dtype.itemsize * step.width
        lines.append(
            f"  {step.template:<9} {names[id(step)]} = {step.op}({', '.join(arguments)})"
            f"  # {step.space} {rows} x {list(step.shape)}, {n_bytes} B"
        )
    return lines


def _run_packed(plan: Plan, values: Sequence[Any]) -> Sequence[torch.Tensor]:
    with naming_closed([(name, values[place]) for name, place in plan.packed]):
        return _run(plan, values)


def _run(plan: Plan, values: Sequence[Any]) -> Sequence[torch.Tensor]:
    """Return the outputs of a plan; where gradients are wanted, as autograd knows them."""
    if plan.run_backward is None:
        found: Any = plan.run_forward.run([values[place] for place in plan.reads])
    else:
        tensors = [v for v in values if isinstance(v, torch.Tensor)]
        found = _Run.apply(plan, values, *tensors)  # type: ignore[no-untyped-call]
    outputs: Sequence[torch.Tensor] = found
    return outputs


def _run_watched(calls: Calls, given: Sequence[Any], watches: Sequence[PackedWatch]) -> list[Any]:
    """Run calls that read packed rows again, if these are what they were."""
    for watch in watches:
        watch.check()
    with naming_closed([(watch.name, watch.x) for watch in watches]):
        found = calls.run(given)
    for watch in watches:  # another thread may have changed rows meanwhile
        watch.check()
    return found


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, plan: Plan, values: Sequence[Any], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        # Before the first read: rows that change while the forward pass runs are noticed too.
        ctx.watches = ()
        if plan.read_again:
            ctx.watches = [PackedWatch(name, values[place]) for name, place in plan.read_again]
        results: list[Any] = plan.run_forward.run([values[place] for place in plan.reads])
        kept = results[plan.n_outputs :]
        ctx.save_for_backward(*[t for t in kept if isinstance(t, torch.Tensor)])
        ctx.packed = [None if isinstance(t, torch.Tensor) else t for t in kept]
        ctx.plan = plan
        return tuple(results[: plan.n_outputs])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            # `once_differentiable` would be silent where torch.autograd.grad looks for a way to
            # inputs: what it returns is on none, and other ways would give a part of the result.
            raise SecondDerivativeError(
                "create_graph=True asks for gradients that can be differentiated, and relational "
                "programs have no second derivative; restore_relational returns a model with the "
                "framework's own layers, which have one"
            )
        plan: Plan = ctx.plan
        assert plan.run_backward is not None
        saved = iter(ctx.saved_tensors)
        kept = [next(saved) if p is None else p for p in ctx.packed]
        given = [*kept, *gradients]
        watches: Sequence[PackedWatch] = ctx.watches
        if watches:
            found = _run_watched(plan.run_backward, given, watches)
        else:
            found = plan.run_backward.run(given)
        return (None, None, *[None if at is None else found[at] for at in plan.gradients])
