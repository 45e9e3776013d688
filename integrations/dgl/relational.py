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

from bitslab.relational import (
    HGT,
    TYPED_SUM,
    WEIGHTED_SUM,
    KeptByTensors,
    LayerReport,
    blend,
    calls_of,
    check_no_packed,
    count_call,
    forget_calls,
    or_own_code,
    overridden,
    run_on_edges,
)

_edge_indices = KeptByTensors()
_rows = KeptByTensors()


def _graph_reason(g: Any, *types: Any) -> str:
    """Return why a graph or types are not covered, or ''."""
    if not isinstance(g, dgl.DGLGraph):
        return f"a graph of {type(g).__name__}"
    if len(g.canonical_etypes) != 1:
        return f"a graph of {len(g.canonical_etypes)} edge types"
    if any(not isinstance(t, torch.Tensor) or t.dtype is torch.bool for t in types):
        return "types that are not tensors of integers"
    return ""


def _rows_reason(x: Any) -> str:
    """Return why features are not covered, or ''."""
    if type(x) not in (torch.Tensor, nn.Parameter) or x.ndim != 2 or not x.is_floating_point():
        return "features that are not rows of floats"
    return ""


def _edges(g: Any) -> torch.Tensor:
    """Return sources and destinations of a graph's edges ``[2, E]``, the same tensor each time."""
    ends = g.edges(form="uv", order="eid")
    if torch.compiler.is_compiling():
        return torch.stack(ends)
    return _edge_indices.find(ends, None, lambda: torch.stack(ends))


def _to_itself(types: torch.Tensor) -> torch.Tensor:
    """Return the edges of rows to themselves ``[2, N]``."""
    index = torch.arange(len(types), device=types.device)
    return torch.stack([index, index])


def _by_type(x: torch.Tensor, types: torch.Tensor, weight: torch.Tensor, n: int) -> torch.Tensor:
    """Return each row of x times the weight of its type: each row is an edge to itself."""
    if torch.compiler.is_compiling():
        edges = _to_itself(types)
    else:
        edges = _rows.find((types,), None, lambda: _to_itself(types))
    sizes = (len(types), len(types))
    found: torch.Tensor = run_on_edges(TYPED_SUM, edges, types, sizes, n, x, weight)
    return found


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

    Rows of floats run compiled, with any regularizer; no weight is copied by row.
    """

    @or_own_code
    def forward(self, x: Any, x_type: Any, sorted_by_type: bool = False) -> Any:
        """Run the layer; arguments and result are DGL's."""
        reason = _rows_reason(x)
        if not reason and (not isinstance(x_type, torch.Tensor) or x_type.dtype is torch.bool):
            reason = "types that are not a tensor of integers"
        if reason:
            check_no_packed({"x": x}, reason)
        count_call(self, reason)
        if reason:
            return super().forward(x, x_type, sorted_by_type)
        if self.regularizer == "bdd":
            rows = x.reshape(len(x), self.num_bases, self.submat_in)
            return _by_type(rows, x_type, _blocks(self), self.num_types).flatten(1)
        return _by_type(x, x_type, self.get_weight(), self.num_types)


class RelGraphConv(_Compiled, dnn.RelGraphConv):  # type: ignore[misc]
    """DGL's RelGraphConv, compiled; arguments, parameters and results are DGL's.

    Graphs and blocks of one edge type with features of floats run compiled, with any regularizer,
    norm, self-loop, layer norm, activation and dropout; ``presorted`` changes nothing.
    """

    @or_own_code
    def forward(
        self, g: Any, feat: Any, etypes: Any, norm: Any = None, *, presorted: bool = False
    ) -> Any:
        """Run the layer; arguments and result are DGL's."""
        reason = self.overridden_hook or _graph_reason(g, etypes) or _rows_reason(feat)
        if not reason and norm is None and "norm" in g.edata:
            reason = "a norm that the graph has"
        if not reason and norm is not None and norm.numel() != g.num_edges():
            reason = f"a norm of shape {list(norm.shape)}"
        if reason:
            check_no_packed({"feat": feat}, reason)
        count_call(self, reason)
        if reason:
            return super().forward(g, feat, etypes, norm, presorted=presorted)
        typed, x = self.linear_r, feat
        if typed.regularizer == "bdd":
            weight = _blocks(typed)
            x = feat.reshape(len(feat), typed.num_bases, typed.submat_in)
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
            rows = feat[: g.num_dst_nodes()]
            if torch.is_autocast_enabled(h.device.type):  # which would round h for addmm
                h = h + rows @ self.loop_weight
            else:
                h = torch.addmm(h, rows, self.loop_weight)
        return self.dropout(self.activation(h) if self.activation else h)


class HGTConv(_Compiled, dnn.HGTConv):  # type: ignore[misc]
    """DGL's HGTConv, compiled; arguments, parameters and results are DGL's.

    Graphs and blocks of one edge type run compiled, for any number of heads; ``presorted`` changes
    nothing.
    """

    @or_own_code
    def forward(self, g: Any, x: Any, ntype: Any, etype: Any, *, presorted: bool = False) -> Any:
        """Run the layer; arguments and result are DGL's."""
        reason = self.overridden_hook or _graph_reason(g, ntype, etype) or _rows_reason(x)
        if reason:
            check_no_packed({"x": x}, reason)
        count_call(self, reason)
        if reason:
            return super().forward(g, x, ntype, etype, presorted=presorted)
        n_dst, heads = g.num_dst_nodes(), (-1, self.num_heads, self.head_size)
        x_dst, dst_type = (x[:n_dst], ntype[:n_dst]) if g.is_block else (x, ntype)
        k, v = (_projected(lin, x, ntype).view(heads) for lin in (self.linear_k, self.linear_v))
        q = _projected(self.linear_q, x_dst, dst_type).view(heads)
        keys, values = (
            torch.stack([lin.get_weight() for lin in matrices], 1)
            for matrices in (self.relation_att, self.relation_msg)
        )
        prior = torch.stack(list(self.relation_pri), 1)[:, :, None] / self.sqrt_d
        edges = (_edges(g), etype, (g.num_src_nodes(), n_dst), len(keys))
        h = run_on_edges(HGT, *edges, k, q, v, keys, values, prior).flatten(1)
        h = self.drop(_projected(self.linear_a, h, dst_type))
        residual = x_dst if x_dst.shape == h.shape else x_dst @ self.residual_w
        h = blend(residual, h, self.skip[dst_type].sigmoid()[:, None])
        return self.norm(h) if self.use_norm else h


def _projected(layer: Any, x: torch.Tensor, types: torch.Tensor) -> torch.Tensor:
    """Return rows times the weight of their type."""
    return _by_type(x, types, layer.get_weight(), layer.num_types)


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
