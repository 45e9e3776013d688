"""The programs of the layers that integrations compile, and what they share."""

from __future__ import annotations

from typing import Any

import torch

from .packed_changes import Packed
from .program import PACKED, CompiledProgram, program
from .steps import costs_of
from .trace import (
    Graph,
    Value,
    dot,
    leaky_relu,
    shared,
    softmax_by_dst,
    split,
    sum_to_dst,
    transposed,
    typed_linear,
)


@program
def _typed_sum(g: Graph, x: Value, weight: Value) -> Value:
    return sum_to_dst(typed_linear(g.src(x), weight))


@program
def _typed_mean(g: Graph, x: Value, weight: Value) -> Value:
    return sum_to_dst(g.inverse_counts * typed_linear(g.src(x), weight))


@program
def _weighted_sum(g: Graph, x: Value, weight: Value, norm: Value) -> Value:
    return sum_to_dst(norm * typed_linear(g.src(x), weight))


@program
def _of_nodes(g: Graph, x: Value, weight: Value) -> Value:
    return g.dst(x) @ weight


@program
def _added_of_nodes(g: Graph, rest: Value, x: Value, weight: Value) -> Value:
    return g.dst(rest) + g.dst(x) @ weight


@program
def _biased_of_nodes(g: Graph, bias: Value, x: Value, weight: Value) -> Value:
    return shared(bias) + g.dst(x) @ transposed(weight)


def _attention(
    g: Graph, k: Value, q: Value, v: Value, keys: Value, values: Value, prior: Value
) -> Value:
    score = dot(typed_linear(k, keys), q) * g.relation(prior)
    return sum_to_dst(softmax_by_dst(score) * typed_linear(v, values))


@program
def _hgt(g: Graph, k: Value, q: Value, v: Value, keys: Value, values: Value, prior: Value) -> Value:
    return _attention(g, g.src(k), g.dst(q), g.src(v), keys, values, prior)


# Made once: `torch.compile` can look a program up, and cannot make one.

#: RGCN's messages, summed: inputs x and weight.
TYPED_SUM = _typed_sum.compile()
#: The same, and a destination takes the mean over the edges of each relation.
TYPED_MEAN = _typed_mean.compile()
#: The same with weights of edges: inputs x, weight, norm.
WEIGHTED_SUM = _weighted_sum.compile()
#: Rows of destinations, which may be packed, times a weight: inputs x and weight. Packed rows may
#: be those of all sources, of which the destinations are the first.
OF_NODES = _of_nodes.compile()
#: The same, added to other rows: inputs rest, x and weight.
ADDED_OF_NODES = _added_of_nodes.compile()
#: The same, added to one row: inputs bias, x and weight ``[N, K]``, that of torch.nn.Linear.
BIASED_OF_NODES = _biased_of_nodes.compile()
#: HGT's attention: k and v ``[N_src, H, D]``, q ``[N_dst, H, D]``, the relations' matrices keys and
#: values ``[R, H, D, D]``, and prior ``[R, H, 1]``; rows ``[H, D]`` of destinations.
HGT = _hgt.compile()


def rows_of(x: Any, width: int | None = None) -> Any:
    """Return a layer's features as programs take them, None for what is no rows of floats.

    Packed are tables and caches of rows; with a `width`, those of another one are not taken. Inside
    `torch.compile` only tensors are.
    """
    if isinstance(x, PACKED):
        rows = x.ndim == 2 and x.dtype.is_floating_point and width in (None, x.shape[1])
        return x if rows and not torch.compiler.is_compiling() else None
    if not isinstance(x, torch.Tensor) or x.ndim != 2 or not x.is_floating_point():
        return None
    return x if x.layout is torch.strided else None


def first_rows(x: torch.Tensor | Packed, n: int, device: torch.device) -> torch.Tensor:
    """Return the first rows of features as a tensor, of packed ones decoded."""
    if isinstance(x, torch.Tensor):
        return x[:n]
    return x.gather(torch.arange(n, device=device))


def blend(start: torch.Tensor, end: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Return start + share * (end - start), also of several dtypes, which torch.lerp refuses.

    Inside torch.autocast they are: products come out in its dtype, parameters are what they were.
    """
    if start.dtype is end.dtype is share.dtype:
        return torch.lerp(start, end, share)
    return share * end + (1 - share) * start


Outputs = Value | tuple[Value, Value]
_rgat: dict[tuple[int, float, bool, bool, bool], CompiledProgram] = {}
_hgt_of_features: dict[tuple[int, bool], CompiledProgram] = {}


#: Operators that `hgt_of_features` has more than `HGT` after one product for keys, queries, values.
_MORE_CALLS = 8


def projects_in_program(rows: int, depth: int, width: int, device: torch.device) -> bool:
    """Return whether products of weights may save more than what `hgt_of_features` adds.

    They save at most the projections of keys and values: of `rows` nodes, `depth` features to
    `width`. Which of them they save is counted for the graph, when its steps are chosen.
    """
    costs = costs_of(device)
    multiply, call = costs.multiply_ns, costs.call_ns
    return 2 * rows * depth * width * multiply > _MORE_CALLS * call


def hgt_of_features(heads: int, biased: bool) -> CompiledProgram | None:
    """Return the program of HGT with the projections of node types, on a graph with `NodeTypes`.

    Inputs are x, the projections wk, wq and wv ``[types, K, heads * D]``, where `biased` bk, bq and
    bv ``[types, heads * D]``, then keys, values and prior as `HGT` takes them. Where that costs
    less, projections are multiplied by the matrices of relations, and rows by the products alone.
    None while `torch.compile` traces, if it was not asked for before.
    """
    key = (heads, biased)
    if key not in _hgt_of_features:
        if torch.compiler.is_compiling():
            return None
        _hgt_of_features[key] = _make_hgt(*key)
    return _hgt_of_features[key]


def _make_hgt(heads: int, biased: bool) -> CompiledProgram:
    def plain(
        g: Graph, x: Value, wk: Value, wq: Value, wv: Value, keys: Value, values: Value,
        prior: Value,
    ) -> Value:  # fmt: skip
        k, v = (typed_linear(g.src(x), w, g.src_type) for w in (wk, wv))
        q = typed_linear(g.dst(x), wq, g.dst_type)
        k, q, v = (split(part, heads) for part in (k, q, v))
        return _attention(g, k, q, v, keys, values, prior)

    def with_bias(
        g: Graph, x: Value, wk: Value, wq: Value, wv: Value, bk: Value, bq: Value, bv: Value,
        keys: Value, values: Value, prior: Value,
    ) -> Value:  # fmt: skip
        k = typed_linear(g.src(x), wk, g.src_type) + g.src_type(bk)
        v = typed_linear(g.src(x), wv, g.src_type) + g.src_type(bv)
        q = typed_linear(g.dst(x), wq, g.dst_type) + g.dst_type(bq)
        k, q, v = (split(part, heads) for part in (k, q, v))
        return _attention(g, k, q, v, keys, values, prior)

    return program(with_bias if biased else plain).compile()


def rgat(
    heads: int, slope: float, logits: bool, masked: bool, attention: bool = False
) -> CompiledProgram | None:
    """Return the program of relational attention: inputs x, y, weight, q, k, then e and mask.

    x and y are the features of sources and destinations, e logits of edges that are added where
    `logits`, and mask what attention is multiplied by where `masked`. It returns rows
    ``[heads, D]`` of destinations, and where `attention` this too, ``[heads]`` of edges. None while
    `torch.compile` traces, if it was not asked for before.
    """
    key = (heads, slope, logits, masked, attention)
    if key not in _rgat:
        if torch.compiler.is_compiling():
            return None
        _rgat[key] = _make_rgat(*key)
    return _rgat[key]


def _make_rgat(
    heads: int, slope: float, logits: bool, masked: bool, returned: bool
) -> CompiledProgram:
    def attended(
        g: Graph, x: Value, y: Value, weight: Value, q: Value, k: Value, e: Value | None,
        mask: Value | None,
    ) -> Outputs:  # fmt: skip
        message = typed_linear(g.src(x), weight)
        score = typed_linear(g.dst(y), weight) @ q + message @ k
        attention = softmax_by_dst(leaky_relu(score if e is None else score + e, slope))
        weights = attention if mask is None else attention * mask
        rows = sum_to_dst(split(weights, heads) * split(message, heads))
        return (rows, attention) if returned else rows

    def plain(g: Graph, x: Value, y: Value, weight: Value, q: Value, k: Value) -> Outputs:
        return attended(g, x, y, weight, q, k, None, None)

    def with_logits(
        g: Graph, x: Value, y: Value, weight: Value, q: Value, k: Value, e: Value
    ) -> Outputs:
        return attended(g, x, y, weight, q, k, e, None)

    def with_mask(
        g: Graph, x: Value, y: Value, weight: Value, q: Value, k: Value, mask: Value
    ) -> Outputs:
        return attended(g, x, y, weight, q, k, None, mask)

    def with_both(
        g: Graph, x: Value, y: Value, weight: Value, q: Value, k: Value, e: Value, mask: Value
    ) -> Outputs:
        return attended(g, x, y, weight, q, k, e, mask)

    chosen = (with_both if masked else with_logits) if logits else with_mask if masked else plain
    return program(chosen).compile()
