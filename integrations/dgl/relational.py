"""DGL's relational layers, compiled: RelGraphConv, HGTConv and TypedLinear.

The classes derive from DGL's: arguments, parameters, initial values and state dicts are theirs.
Forward passes that the compiler does not cover run DGL's own code; `compile_relational` reports
options that never are covered, `relational_calls` counts calls by reason.
"""

from __future__ import annotations

from typing import Any

import dgl
import torch
from dgl.nn import pytorch as dnn
from torch import nn

from bitslab.errors import ArgumentError
from bitslab.relational import (
    ADDED_OF_NODES,
    HGT,
    OF_NODES,
    TYPED_SUM,
    WEIGHTED_SUM,
    KeptByTensors,
    LayerReport,
    NodeTypes,
    blend,
    calls_of,
    check_no_packed,
    count_call,
    first_rows,
    forget_calls,
    hgt_of_features,
    or_own_code,
    overridden,
    projects_in_program,
    rows_of,
    run_on_edges,
)
from bitslab.tensors import FeatureTensor

_edge_indices = KeptByTensors()
_rows = KeptByTensors()
_node_types = KeptByTensors()


def _graph_reason(g: Any, *types: Any) -> str:
    """Return why a graph or types are not covered, or ''."""
    if not isinstance(g, dgl.DGLGraph):
        return f"a graph of {type(g).__name__}"
    if len(g.canonical_etypes) != 1:
        return f"a graph of {len(g.canonical_etypes)} edge types"
    if any(not isinstance(t, torch.Tensor) or t.dtype is torch.bool for t in types):
        return "types that are not tensors of integers"
    return ""


#: Why features are not covered.
_NO_ROWS = "features that are not rows of floats"


def _features(x: Any) -> Any:
    """Return features that a program takes, or None; packed ones take no gradient."""
    if isinstance(x, FeatureTensor):
        return None if x.requires_grad else rows_of(x.feature)
    return rows_of(x)


def _fits(norm: torch.Tensor, rows: Any) -> bool:
    """Return whether a norm is of the rows' dtype, or is cast to one with them."""
    if torch.is_autocast_enabled(norm.device.type):
        return norm.is_floating_point()
    return norm.dtype is rows.dtype


def _edges(g: Any) -> torch.Tensor:
    """Return sources and destinations of a graph's edges ``[2, E]``, the same tensor each time."""
    ends = g.edges(form="uv", order="eid")
    if torch.compiler.is_compiling():
        return torch.stack(ends)
    return _edge_indices.find(ends, None, lambda: torch.stack(ends))


def _types_of_nodes(
    edges: torch.Tensor, node_type: torch.Tensor, edge_type: torch.Tensor, n: int, relations: int
) -> NodeTypes | None:
    """Return node types that stand in order and follow from relations; None for others.

    It takes one host read, for a graph and its types that are not changed in place.
    """
    if torch.compiler.is_compiling() or not n or not relations:
        return None

    def make() -> NodeTypes | None:
        nodes, kinds = node_type.long(), edge_type.long().clamp(0, relations - 1)
        tables, wrong = [], (nodes[1:] < nodes[:-1]).any() | (nodes < 0).any() | (nodes >= n).any()
        for end in edges:
            types = nodes[end].clamp(0, n - 1)
            table = types.new_zeros(relations).index_copy_(0, kinds, types)
            wrong = wrong | (table[kinds] != types).any()
            tables.append(table)
        bounds = torch.searchsorted(nodes, torch.arange(n + 1, device=nodes.device))
        numbers = torch.cat([wrong[None], bounds, *tables]).tolist()
        return None if numbers[0] else NodeTypes.of_numbers(numbers[1:], relations)

    return _node_types.find((edges, node_type, edge_type), (n, relations), make)


def _to_itself(types: torch.Tensor) -> torch.Tensor:
    """Return the edges of rows to themselves ``[2, N]``."""
    index = torch.arange(len(types), device=types.device)
    return torch.stack([index, index])


def _by_type(x: Any, types: torch.Tensor, weight: torch.Tensor, n: int) -> torch.Tensor:
    """Return the first rows of x times the weight of their type: each is an edge to itself."""
    if torch.compiler.is_compiling():
        edges = _to_itself(types)
    else:
        edges = _rows.find((types,), None, lambda: _to_itself(types))
    sizes = (x.shape[0], types.shape[0])
    found: torch.Tensor = run_on_edges(TYPED_SUM, edges, types, sizes, n, x, weight)
    return found


def _typed(layer: Any, x: Any, types: torch.Tensor) -> torch.Tensor:
    """Return what a TypedLinear makes of the first rows of x, one for each type."""
    if layer.regularizer != "bdd":
        return _by_type(x, types, layer.get_weight(), layer.num_types)
    return _by_type(_in_blocks(layer, x), types, _blocks(layer), layer.num_types).flatten(1)


def _in_blocks(layer: Any, x: Any) -> Any:
    """Return rows for `_blocks`; packed rows are cut as they are decoded."""
    if not isinstance(x, torch.Tensor):
        return x
    return x.reshape(len(x), layer.num_bases, layer.submat_in)


class _Compiled:
    """What the compiled layers share."""

    #: Which hook a derived class defines, so that DGL's code runs, or ''.
    overridden_hook = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.overridden_hook = overridden(cls, ("message",))


def _blocks(layer: Any) -> torch.Tensor:
    """Return the weights of a layer with the regularizer bdd: ``[types, blocks, in, out]``."""
    shape = (layer.num_types, layer.num_bases, layer.submat_in, layer.submat_out)
    return torch.reshape(layer.W, shape)


class TypedLinear(_Compiled, dnn.TypedLinear):  # type: ignore[misc]
    """DGL's TypedLinear, compiled; arguments, parameters and results are DGL's.

    Rows of floats run compiled, with any regularizer; no weight is copied by row. Packed rows are
    decoded as they are multiplied: those of `compress_features`, or a table or a cache as x.
    """

    @or_own_code
    def forward(self, x: Any, x_type: Any, sorted_by_type: bool = False) -> Any:
        """Run the layer; arguments and result are DGL's."""
        rows = _features(x)
        reason = "" if rows is not None else _NO_ROWS
        if not reason and (not isinstance(x_type, torch.Tensor) or x_type.dtype is torch.bool):
            reason = "types that are not a tensor of integers"
        if reason:
            check_no_packed({"x": x}, reason)
        count_call(self, reason)
        if reason:
            return super().forward(x, x_type, sorted_by_type)
        if len(x_type) != len(rows):
            raise ArgumentError(
                f"x_type has shape {list(x_type.shape)}, x {list(rows.shape)}; accepted are as "
                "many types as rows"
            )
        return _typed(self, rows, x_type)


class RelGraphConv(_Compiled, dnn.RelGraphConv):  # type: ignore[misc]
    """DGL's RelGraphConv, compiled; arguments, parameters and results are DGL's.

    Graphs and blocks of one edge type with features of floats run compiled, with any regularizer,
    norm, self-loop, layer norm, activation and dropout; ``presorted`` changes nothing. Packed rows
    are decoded as they are multiplied, by the weights of types and by that of the self-loop.
    """

    @or_own_code
    def forward(
        self, g: Any, feat: Any, etypes: Any, norm: Any = None, *, presorted: bool = False
    ) -> Any:
        """Run the layer; arguments and result are DGL's."""
        rows = _features(feat)
        reason = self.overridden_hook or _graph_reason(g, etypes)
        if not reason and rows is None:
            reason = _NO_ROWS
        if not reason and norm is None and "norm" in g.edata:
            reason = "a norm that the graph has"
        if not reason and norm is not None and norm.numel() != g.num_edges():
            reason = f"a norm of shape {list(norm.shape)}"
        if not reason and norm is not None and not _fits(norm, rows):
            reason = f"a norm of {norm.dtype}"
        if reason:
            check_no_packed({"feat": feat}, reason)
        count_call(self, reason)
        if reason:
            return super().forward(g, feat, etypes, norm, presorted=presorted)
        typed, x = self.linear_r, rows
        if typed.regularizer == "bdd":
            weight, x = _blocks(typed), _in_blocks(typed, rows)
        else:
            weight = typed.get_weight()
        sizes = (g.num_src_nodes(), g.num_dst_nodes())
        edges = (_edges(g), etypes, sizes, typed.num_types)
        if norm is None:
            h = run_on_edges(TYPED_SUM, *edges, x, weight)
        else:
            h = run_on_edges(WEIGHTED_SUM, *edges, x, weight, norm.reshape(-1))
        h = h.flatten(1)
        if self.layer_norm:
            h = self.layer_norm_weight(h)
        if self.bias:
            h = h + self.h_bias
        if self.self_loop:
            h = self._with_loop(h, rows, edges)
        return self.dropout(self.activation(h) if self.activation else h)

    def _with_loop(self, h: torch.Tensor, rows: Any, edges: tuple[Any, ...]) -> torch.Tensor:
        rounds = torch.is_autocast_enabled(h.device.type)  # which would round h for addmm
        plain, found = isinstance(rows, torch.Tensor), h
        if rounds and plain:
            found = h + rows[: len(h)] @ self.loop_weight
        elif rounds:
            found = h + run_on_edges(OF_NODES, *edges, rows, self.loop_weight)
        elif plain:
            found = torch.addmm(h, rows[: len(h)], self.loop_weight)
        else:
            found = run_on_edges(ADDED_OF_NODES, *edges, h, rows, self.loop_weight)
        return found


class HGTConv(_Compiled, dnn.HGTConv):  # type: ignore[misc]
    """DGL's HGTConv, compiled; arguments, parameters and results are DGL's.

    Graphs and blocks of one edge type run compiled, for any number of heads; ``presorted`` changes
    nothing. Packed rows are decoded as they are projected to keys, queries and values; the skip
    connection of rows that are as wide as the output reads them once more, decoded.
    """

    @or_own_code
    def forward(self, g: Any, x: Any, ntype: Any, etype: Any, *, presorted: bool = False) -> Any:
        """Run the layer; arguments and result are DGL's."""
        rows = _features(x)
        reason = self.overridden_hook or _graph_reason(g, ntype, etype)
        if not reason and rows is None:
            reason = _NO_ROWS
        if reason:
            check_no_packed({"x": x}, reason)
        count_call(self, reason)
        if reason:
            return super().forward(g, x, ntype, etype, presorted=presorted)
        n_dst, n_src = g.num_dst_nodes(), g.num_src_nodes()
        if not len(rows) == len(ntype) == n_src:
            raise ArgumentError(
                f"x has {len(rows)} rows and ntype {len(ntype)}; accepted are {n_src} of both, one "
                "for each source node"
            )
        dst_type = ntype[:n_dst] if g.is_block else ntype
        linears = (self.linear_k, self.linear_v, self.linear_q)
        node_types, program = None, HGT
        size = (n_src, rows.shape[1], self.num_heads * self.head_size)
        plain = isinstance(rows, torch.Tensor) and not g.is_block
        if plain and projects_in_program(*size, g.device):
            sizes = (linears[0].num_types, self.relation_att[0].num_types)
            node_types = _types_of_nodes(_edges(g), ntype, etype, *sizes)
        of_features = hgt_of_features(self.num_heads, False) if node_types is not None else None
        if of_features is not None:
            program = of_features
            given = (rows, *[linears[i].get_weight() for i in (0, 2, 1)])
        elif g.is_block:
            k, v = self._projected(linears[:2], rows, ntype)
            (q,) = self._projected(linears[2:], rows, dst_type)
        else:
            k, v, q = self._projected(linears, rows, ntype)
        keys, values = (
            torch.stack([lin.get_weight() for lin in matrices], 1)
            for matrices in (self.relation_att, self.relation_msg)
        )
        prior = torch.stack(list(self.relation_pri), 1)[:, :, None] / self.sqrt_d
        if of_features is None:
            given = (k, q, v)
        edges = (_edges(g), etype, (n_src, n_dst), len(keys))
        inputs = (*given, keys, values, prior)
        h = run_on_edges(program, *edges, *inputs, node_types=node_types).flatten(1)
        h = self.drop(_typed(self.linear_a, h, dst_type))
        if rows.shape[1] == h.shape[1]:
            residual = first_rows(rows, n_dst, h.device)
        elif isinstance(rows, torch.Tensor):
            residual = rows[:n_dst] @ self.residual_w
        else:
            residual = run_on_edges(OF_NODES, *edges, rows, self.residual_w)
        h = blend(residual, h, self.skip[dst_type].sigmoid()[:, None])
        return self.norm(h) if self.use_norm else h

    def _projected(self, linears: Any, rows: Any, types: torch.Tensor) -> list[torch.Tensor]:
        """Return what each of the layers makes of rows, ``[n, heads, size]``: read once for all."""
        weight = torch.cat([linear.get_weight() for linear in linears], -1)
        found = _by_type(rows, types, weight, linears[0].num_types)
        shape = (len(types), len(linears), self.num_heads, self.head_size)
        return list(found.view(shape).transpose(0, 1).contiguous().unbind())


_COMPILED: dict[type, type] = {
    dnn.RelGraphConv: RelGraphConv,
    dnn.HGTConv: HGTConv,
    dnn.TypedLinear: TypedLinear,
}
_PLAIN = {compiled: plain for plain, compiled in _COMPILED.items()}


def compile_relational(model: nn.Module) -> LayerReport:
    """Compile DGL's relational layers of a model, in place.

    Parameters
    ----------
    model : torch.nn.Module
        A model, or a layer. Each RelGraphConv, HGTConv and TypedLinear in it becomes the class of
        this module; the objects and their parameters are the same.

    Returns
    -------
    LayerReport
        Layers that are compiled, and those that are left because their class is derived from DGL's.
    """
    report = LayerReport()
    for name, layer in model.named_modules():
        kind = type(layer)
        if kind in _COMPILED:
            layer.__class__ = _COMPILED[kind]
        elif kind not in _PLAIN and isinstance(layer, tuple(_COMPILED)):
            report.left[name] = f"{kind.__name__} is derived from DGL's class"
        if type(layer) in _PLAIN:
            report.compiled[name] = kind.__name__
    return report


def restore_relational(model: nn.Module) -> nn.Module:
    """Return a model with DGL's own layers again, the same objects."""
    for layer in model.modules():
        if type(layer) in _PLAIN:
            layer.__class__ = _PLAIN[type(layer)]
            forget_calls(layer)
    return model


def relational_calls(model: nn.Module) -> dict[str, dict[str, int]]:
    """Return for each compiled layer of a model its calls by reason.

    "" counts those that ran compiled, any other reason those that ran DGL's own code.
    """
    return calls_of(model)
