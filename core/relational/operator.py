"""Programs inside `torch.compile`: one operator of torch, with its fake and its gradient.

The operator finds its program by a number, and the graph by its tensors. Its backward pass runs
the forward pass again: an operator of torch keeps nothing but its inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from ..errors import ArgumentTypeError
from .graph import RelationalGraph
from .kept_graphs import forget_graph, graph_of
from .node_types import NodeTypes
from .packed_changes import Packed
from .plan_memory import PlanMemoryError
from .program import PROGRAMS, CompiledProgram, autocast_dtype, cast_tensors
from .steps import Shape, broadcast
from .trace import Value, in_order


def run_on_edges(
    program: CompiledProgram,
    edge_index: torch.Tensor,
    edge_type: torch.Tensor,
    num_nodes: tuple[int, int],
    num_relations: int,
    *inputs: torch.Tensor | Packed,
    node_types: NodeTypes | None = None,
) -> Any:
    """Return a program's outputs for plain tensors of edges; `torch.compile` sees one operator.

    The graphs of the last calls are kept, and found again by their tensors as long as these are
    not changed in place. Inputs and errors are those of a call and of `RelationalGraph`.
    """
    if not torch.compiler.is_compiling():
        graph = graph_of(edge_index, edge_type, num_nodes, num_relations, node_types)
        return _on_kept_graph(program, graph, inputs)
    numbers = [] if node_types is None else node_types.numbers()
    edges = (edge_index, edge_type, *num_nodes, num_relations, numbers)
    outputs = _traced(program, edges, inputs)
    return outputs[0] if program.program.single else tuple(outputs)


def run_on_nodes(
    program: CompiledProgram, n: int, device: torch.device, *inputs: torch.Tensor | Packed
) -> Any:
    """Return the outputs of a program that looks at no edge, of `n` destinations on a device."""
    return program(_without_edges(n, device), *inputs)


@functools.lru_cache(maxsize=64)
def _without_edges(n: int, device: torch.device) -> RelationalGraph:
    with torch.inference_mode(False):
        none = torch.empty(2, 0, dtype=torch.int64, device=device)
    return RelationalGraph(none, none[0], (0, n), 1)


def _on_kept_graph(
    program: CompiledProgram, graph: RelationalGraph, inputs: Sequence[torch.Tensor | Packed]
) -> Any:
    """Return a program's outputs; without memory for the plan, what there is of it is not kept."""
    try:
        return program(graph, *inputs)
    except PlanMemoryError:
        forget_graph(graph)
        raise


def _traced(
    program: CompiledProgram, edges: tuple[Any, ...], inputs: Sequence[Any]
) -> list[torch.Tensor]:
    for name, x in zip(program.program.names, inputs, strict=True):
        if not isinstance(x, torch.Tensor):
            raise ArgumentTypeError(
                f"input {name!r} is {type(x).__name__}; inside torch.compile accepted are tensors"
            )
    values = list(inputs)
    dtype = autocast_dtype(edges[0].device.type, values)
    if dtype is not None:
        values = cast_tensors(values, dtype)
    found: list[torch.Tensor] = torch.ops.bitslab.relational(values, *edges, program.number)
    return found


@torch.library.custom_op("bitslab::relational", mutates_args=())
def relational(
    inputs: Sequence[torch.Tensor],
    edge_index: torch.Tensor,
    edge_type: torch.Tensor,
    num_src: int,
    num_dst: int,
    num_relations: int,
    node_types: Sequence[int],
    program: int,
) -> list[torch.Tensor]:
    """Run a program; the result shares no memory with an input."""
    compiled = PROGRAMS[program]
    types = NodeTypes.of_numbers(node_types, num_relations)
    graph = graph_of(edge_index, edge_type, (num_src, num_dst), num_relations, types)
    with torch.no_grad():
        outputs = _on_kept_graph(compiled, graph, inputs)
    return _apart([outputs] if compiled.program.single else list(outputs), inputs)


@relational.register_fake
def _(
    inputs: Sequence[torch.Tensor],
    edge_index: torch.Tensor,
    edge_type: torch.Tensor,
    num_src: int,
    num_dst: int,
    num_relations: int,
    node_types: Sequence[int],
    program: int,
) -> list[torch.Tensor]:
    traced_program = PROGRAMS[program].program
    shapes = dict(zip(traced_program.names, (tuple(x.shape) for x in inputs), strict=True))
    rows = shapes_of(traced_program.outputs, shapes)
    counts = [num_dst if o.deps == {"d"} else edge_type.shape[0] for o in traced_program.outputs]
    return [inputs[0].new_empty(n, *shape) for n, shape in zip(counts, rows, strict=True)]


@torch.library.custom_op("bitslab::relational_grad", mutates_args=())
def relational_grad(
    gradients: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    edge_index: torch.Tensor,
    edge_type: torch.Tensor,
    num_src: int,
    num_dst: int,
    num_relations: int,
    node_types: Sequence[int],
    program: int,
) -> list[torch.Tensor]:
    """Return the gradients of all inputs."""
    compiled = PROGRAMS[program]
    types = NodeTypes.of_numbers(node_types, num_relations)
    graph = graph_of(edge_index, edge_type, (num_src, num_dst), num_relations, types)
    leaves = [x.detach().requires_grad_() for x in inputs]
    with torch.enable_grad():
        outputs = _on_kept_graph(compiled, graph, leaves)
    outputs = (outputs,) if compiled.program.single else outputs
    found = torch.autograd.grad(outputs, leaves, list(gradients), materialize_grads=True)
    return _apart(found, [*gradients, *inputs])


@relational_grad.register_fake
def _(gradients: Any, inputs: Any, *rest: Any) -> list[torch.Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]


def _apart(results: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return contiguous results, none of which shares memory with another or with what is given."""
    seen = {t.untyped_storage().data_ptr() for t in given}
    apart = []
    for t in results:
        shared = t.untyped_storage().data_ptr() in seen
        alone = t.clone(memory_format=torch.contiguous_format) if shared else t.contiguous()
        seen.add(alone.untyped_storage().data_ptr())
        apart.append(alone)
    return apart


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    tensors, edge_index, edge_type, *ctx.rest = inputs
    ctx.save_for_backward(edge_index, edge_type, *tensors)
    ctx.shapes = [o.shape for o in output]


def _gradients(ctx: Any, gradients: list[torch.Tensor | None]) -> Any:
    edge_index, edge_type, *tensors = ctx.saved_tensors
    given = [
        tensors[0].new_zeros(shape) if g is None else g.contiguous()
        for g, shape in zip(gradients, ctx.shapes, strict=True)
    ]
    found = torch.ops.bitslab.relational_grad(given, tensors, edge_index, edge_type, *ctx.rest)
    *_, node_types, _ = ctx.rest
    # For torch a list of numbers is one argument, and an empty one a list of none.
    return (found, *[None] * 5, None if node_types else [], None)


torch.library.register_autograd("bitslab::relational", _gradients, setup_context=_keep)


def shapes_of(outputs: Sequence[Value], inputs: dict[str, Shape]) -> list[Shape]:
    """Return the shapes of the rows of values, from the shapes of the inputs."""
    found: dict[int, Shape] = {}
    for value in in_order(outputs):
        args = [found[id(a)] for a in value.args]
        match value.op:
            case "input":
                shape = inputs[value.attrs[0]]
            case "place":
                shape = args[0][1:]
            case "inverse_counts":
                shape = ()
            case "typed_linear":
                shape = (*args[1][:-2], args[1][-1])
            case "t":
                shape = (*args[0][:-2], args[0][-1], args[0][-2])
            case "linear":
                shape = (*args[0][:-1], args[1][-1])
            case "dot":
                shape = (*broadcast(args[0], args[1], "dot", value.line)[:-1], 1)
            case "split":
                shape = (value.attrs[0], args[0][0] // value.attrs[0])
            case "flatten":
                shape = (torch.Size(args[0]).numel(),)
            case _:
                shape = args[0]
                for other in args[1:]:
                    shape = broadcast(shape, other, value.op, value.line)
        found[id(value)] = shape
    return [found[id(o)] for o in outputs]
