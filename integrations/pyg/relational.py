"""PyG's relational layers, compiled: RGCNConv, FastRGCNConv, RGATConv and HGTConv.

The classes derive from PyG's: arguments, parameters, initial values and state dicts are theirs.
Forward passes that the compiler does not cover run PyG's own code; `compile_relational` reports
options that never are covered, `relational_calls` counts calls by reason.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch_geometric.nn as gnn
from torch import nn
from torch.nn.parameter import is_lazy

from bitslab import CompressedFeature, CompressedTable, SlabCache
from bitslab.errors import ArgumentTypeError, IndexRangeError
from bitslab.relational import (
    ADDED_OF_NODES,
    BIASED_OF_NODES,
    HGT,
    OF_NODES,
    TYPED_MEAN,
    TYPED_SUM,
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
    rgat,
    rows_of,
    run_on_edges,
    run_on_nodes,
)
from bitslab.tensors import FeatureTensor

#: Features whose rows are packed.
PACKED_FEATURES = (CompressedFeature, CompressedTable, SlabCache, FeatureTensor)
_HOOKED = ("propagate", "message", "aggregate", "message_and_aggregate", "edge_update")
#: Where PyG's layers keep the hooks of their parts.
_HOOKS = tuple(f"_{name}_forward_{kind}hooks" for name in _HOOKED for kind in ("", "pre_"))
_OF_MODULES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
#: Methods that PyG's forward passes call, and ours do not; `propagate` is last, as `_Constructed`
#: gives one to classes that define another of them.
_CALLED = (
    *("message", "aggregate", "message_and_aggregate", "update", "edge_update", "edge_updater"),
    *("explain_message", "_cat", "_construct_src_node_feat", "propagate"),
)


def _conv_reason(conv: Any) -> str:
    """Return why a layer's class or options are not covered, or ''."""
    if getattr(conv, "overridden_hook", ""):
        return str(conv.overridden_hook)
    if conv.flow != "source_to_target":
        return f"flow={conv.flow!r}"
    if conv.decomposed_layers > 1:
        return f"decomposed_layers={conv.decomposed_layers}"
    return ""


def _call_reason(conv: Any, *indices: Any) -> str:
    """Return why a call is not covered, by what it was given and by hooks, or ''."""
    if conv.explain:
        return "explain mode"
    if any([getattr(conv, hooks) for hooks in _HOOKS]):
        return "hooks of message passing"
    for index in indices:
        if type(index) is not torch.Tensor:
            return f"edges as {type(index).__name__}"
        if index.layout is not torch.strided:
            return f"edges of layout {index.layout}"
    return ""


def _pair(x: Any) -> Any:
    """Return the features of sources and destinations, packed ones without their tensors."""
    pair = x if isinstance(x, tuple) else (x, x)
    return tuple([each.feature if isinstance(each, FeatureTensor) else each for each in pair])


class _Constructed:
    """Makes a layer as PyG's class: PyG generates code from the source of the class it meets.

    A derived class that defines hooks of PyG's is made as itself, with PyG's `propagate` that is
    not generated: the generated one passes what the hooks of PyG's own class take.
    """

    #: Which hook a derived class defines, so that PyG's code runs, or ''.
    overridden_hook = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.overridden_hook = overridden(cls, _CALLED)
        if cls.overridden_hook and "propagate" not in vars(cls):
            owner: Any = next(each for each in cls.__mro__ if "propagate" in vars(each))
            found = gnn.MessagePassing if owner in _COMPILED else owner
            cls.propagate = _not_generated(found.propagate)  # type: ignore[attr-defined]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with self._as_plain() as plain:
            plain.__init__(self, *args, **kwargs)
        if not self.overridden_hook:
            _prepare(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy or a pickle as PyG's class, whose code with masks is not ours."""
        with self._as_plain() as plain:
            plain.__setstate__(self, state)
        if not self.overridden_hook:
            _prepare(self)

    @contextlib.contextmanager
    def _as_plain(self) -> Iterator[Any]:
        """Give the object PyG's class while it is made, unless its own class defines hooks."""
        kind = type(self)
        plain = next(_PLAIN[base] for base in kind.__mro__ if base in _PLAIN)
        if kind.overridden_hook:
            yield plain
            return
        self.__class__ = plain
        try:
            yield plain
        finally:
            self.__class__ = kind


def _not_generated(propagate: Any) -> Any:
    """Return PyG's `propagate` as another object, which PyG takes for the user's and leaves."""

    @functools.wraps(propagate)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return propagate(self, *args, **kwargs)

    return run


class _RelationalConv(_Constructed):
    """RGCN's forward pass, for both of PyG's classes."""

    in_channels_l: int
    weight: Any
    comp: Any
    root: Any
    bias: Any
    num_bases: Any
    num_blocks: Any
    num_relations: int
    out_channels: int
    aggr: Any

    def relational_reason(self) -> str:
        """Return why this layer's options are not covered, or ''."""
        if self.aggr not in ("mean", "add", "sum"):
            return f"aggr={self.aggr!r}"
        return _conv_reason(self)

    @or_own_code
    def forward(self, x: Any, edge_index: Any, edge_type: Any = None) -> Any:
        """Run the layer; arguments and result are PyG's."""
        reason = self.relational_reason() or _call_reason(self, edge_index, edge_type)
        pair = _pair(x)
        source = rows_of(pair[0], self.in_channels_l)
        target = rows_of(pair[1], None if self.root is None else self.root.shape[0])
        if not reason and (source is None or target is None):
            reason = "features that are not rows of floats"
        if reason:
            check_no_packed({"x": x}, reason)
        count_call(self, reason)  # type: ignore[arg-type]
        if reason:
            return super().forward(x, edge_index, edge_type)  # type: ignore[misc]
        weight = self.weight
        if self.num_bases is not None:
            mixed = self.comp @ weight.flatten(1)
            weight = mixed.view(self.num_relations, self.in_channels_l, self.out_channels)
        if self.num_blocks is not None and isinstance(source, torch.Tensor):
            width = source.shape[1] // self.num_blocks
            source = source.view(len(source), self.num_blocks, width)
        sizes = (source.shape[0], target.shape[0])
        edges = (edge_index, edge_type, sizes, self.num_relations)
        program = TYPED_MEAN if self.aggr == "mean" else TYPED_SUM
        out = run_on_edges(program, *edges, source, weight)
        out = self._started(out.flatten(1))
        if self.root is not None:
            out = self._with_root(out, target, edges)
        return out if self.bias is None else out + self.bias

    def _started(self, out: torch.Tensor) -> torch.Tensor:
        """Return sums in the dtype that PyG makes them in."""
        return out

    def _with_root(self, out: torch.Tensor, target: Any, edges: tuple[Any, ...]) -> torch.Tensor:
        # Autocast would round `out` for addmm.
        added = out.dtype is self.root.dtype and not torch.is_autocast_enabled(out.device.type)
        plain, found = isinstance(target, torch.Tensor), out
        if added and plain:
            found = torch.addmm(out, target, self.root)
        elif added:
            found = run_on_edges(ADDED_OF_NODES, *edges, out, target, self.root)
        elif plain:
            found = out + target @ self.root
        else:
            found = out + run_on_edges(OF_NODES, *edges, target, self.root)
        return found


class RGCNConv(_RelationalConv, gnn.RGCNConv):  # type: ignore[misc]
    """PyG's RGCNConv, compiled; arguments, parameters and results are PyG's.

    Sums (``aggr`` "mean", "add" or "sum") over features of floats run compiled, with ``num_bases``,
    ``num_blocks``, pairs of features and packed rows, which are decoded as they are multiplied:
    those of `compress_features`, or a table or a cache of rows as x. Other aggregations, indices as
    features, sparse adjacencies, PyG's hooks and explanations run PyG's own code.
    """

    def _started(self, out: torch.Tensor) -> torch.Tensor:
        # PyG adds to zeros of torch's default dtype.
        dtype = torch.promote_types(out.dtype, torch.get_default_dtype())
        return out if out.dtype is dtype else out.to(dtype)


class FastRGCNConv(_RelationalConv, gnn.FastRGCNConv):  # type: ignore[misc]
    """PyG's FastRGCNConv, compiled as `RGCNConv` is: no weight is copied by edge."""


class RGATConv(_Constructed, gnn.RGATConv):  # type: ignore[misc]
    """PyG's RGATConv, compiled; arguments, parameters and results are PyG's.

    Additive attention across relations runs compiled, with ``num_bases``, ``edge_dim``, dropout and
    any number of heads. Other attention, ``mod``, ``num_blocks``, indices as features and sparse
    adjacencies run PyG's own code.
    """

    def relational_reason(self) -> str:
        """Return why this layer's options are not covered, or ''."""
        for name, covered in (
            ("attention_mode", "additive-self-attention"),
            ("attention_mechanism", "across-relation"),
            ("mod", None),
            ("num_blocks", None),
        ):
            if getattr(self, name) != covered:
                return f"{name}={getattr(self, name)!r}"
        if self.aggr not in ("add", "sum"):
            return f"aggr={self.aggr!r}"
        return _conv_reason(self)

    @or_own_code
    def forward(
        self,
        x: Any,
        edge_index: Any,
        edge_type: Any = None,
        edge_attr: Any = None,
        size: Any = None,
        return_attention_weights: Any = None,
    ) -> Any:
        """Run the layer; arguments and result are PyG's."""
        reason = self.relational_reason() or _call_reason(self, edge_index, edge_type)
        pair = _pair(x)
        source, target = rows_of(pair[0], self.in_channels), rows_of(pair[1], self.in_channels)
        if not reason and (source is None or target is None):
            reason = "features that are not rows of floats"
        if not reason and size is not None and tuple(size) != (len(source), len(target)):
            reason = f"size={tuple(size)}"
        masked = self.training and self.dropout > 0
        returned = isinstance(return_attention_weights, bool)
        program = rgat(self.heads, self.negative_slope, edge_attr is not None, masked, returned)
        if program is None:
            reason = reason or "torch.compile before the first call"
        if edge_attr is not None:
            check_no_packed({"edge_attr": edge_attr})
        if reason:
            check_no_packed({"x": x}, reason)
        count_call(self, reason)
        if reason or program is None:
            arguments = (x, edge_index, edge_type, edge_attr, size, return_attention_weights)
            return super().forward(*arguments)
        weight = self._typed_weight()
        more = []
        if edge_attr is not None:
            more.append(self._edge_logits(edge_attr))
        if masked:
            ones = weight.new_ones(edge_type.shape[0], self.heads)
            more.append(nn.functional.dropout(ones, self.dropout))
        edges = (edge_index, edge_type, (source.shape[0], target.shape[0]), self.num_relations)
        inputs = (source, target, weight, self.q, self.k, *more)
        found = run_on_edges(program, *edges, *inputs)
        out = found[0] if returned else found
        out = out.flatten(1) if self.concat else out.mean(1)
        if self.bias is not None:
            out = out + self.bias
        if returned:
            return out, (edge_index, found[1])
        return out

    def _typed_weight(self) -> torch.Tensor:
        if self.num_bases is None:
            weight: torch.Tensor = self.weight
            return weight
        mixed = self.att @ self.basis.flatten(1)
        return torch.reshape(mixed, (self.num_relations, *self.basis.shape[1:]))

    def _edge_logits(self, edge_attr: torch.Tensor) -> torch.Tensor:
        """Return what features of edges add to the logits: ``[E, heads]``."""
        if self.lin_edge is None:
            raise ArgumentTypeError(
                "edge_attr is given and edge_dim is None; accepted is edge_attr=None, or a layer "
                "with edge_dim=edge_attr.shape[-1]"
            )
        rows = edge_attr.view(-1, 1) if edge_attr.dim() == 1 else edge_attr
        return torch.matmul(rows, self.lin_edge.weight.t() @ self.e)


_merged = KeptByTensors()


class HGTConv(_Constructed, gnn.HGTConv):  # type: ignore[misc]
    """PyG's HGTConv, compiled; arguments, parameters and results are PyG's.

    Attention over all edge types runs as one program. Packed rows are decoded as they are projected
    to keys, queries and values; the skip connection of a node type whose rows are as wide as the
    output reads its rows once more, decoded. Sparse adjacencies, PyG's hooks and explanations run
    PyG's own code.
    """

    def relational_reason(self) -> str:
        """Return why this layer's options are not covered, or ''."""
        return _conv_reason(self)

    @or_own_code
    def forward(self, x_dict: Any, edge_index_dict: Any) -> Any:
        """Run the layer; arguments and result are PyG's."""
        reason = self.relational_reason() or _call_reason(self, *edge_index_dict.values())
        if not reason and not edge_index_dict:
            reason = "no edge types"
        if reason:
            check_no_packed({"x_dict": x_dict}, reason)
        count_call(self, reason)
        if reason:
            return super().forward(x_dict, edge_index_dict)
        heads, dim = self.heads, self.out_channels // self.heads
        packed: dict[str, Any] = {}
        if any([isinstance(x, PACKED_FEATURES) for x in x_dict.values()]):
            packed = self._packed(x_dict)
        features = {} if packed else self._equally_wide(x_dict)
        program = None
        if features:
            program = hgt_of_features(
                heads, self.kqv_lin.lins[next(iter(features))].bias is not None
            )
        if program is None:
            program = HGT
            features = self._projected(x_dict, packed) if packed else self.kqv_lin(x_dict)
        counts = {name: len(rows) for name, rows in features.items()}
        rows = list(features.values())
        x = rows[0] if len(rows) == 1 else torch.cat(rows)
        if program is HGT:
            x = x.view(-1, 3, heads, dim)
            inputs, node_types = x.transpose(0, 1).contiguous().unbind(), None
        else:
            inputs = (x, *self._projections(counts))
            node_types = NodeTypes.of_names(counts, self.edge_types)
        edge_index, edge_type = self._edges(edge_index_dict, counts)
        relations = len(self.edge_types)
        keys, values = (
            lin.weight.view(heads, relations, dim, dim).transpose(0, 1)
            for lin in (self.k_rel, self.v_rel)
        )
        # In the order of edge types. Each by its name would cost as much as the layer.
        priors = self.p_rel.named_parameters(recurse=False, remove_duplicate=False)
        # As in PyG, edge types that are not in the call get no gradient: a gradient of 0 would let
        # optimizers decay them.
        chosen = [
            each if kind in edge_index_dict else each.detach()
            for kind, (_, each) in zip(self.edge_types, priors, strict=True)
        ]
        prior = torch.cat(chosen) / math.sqrt(dim)
        total = sum(counts.values())
        inputs = (*inputs, keys, values, prior[:, :, None])
        edges = (edge_index, edge_type, (total, total), relations)
        try:
            out = run_on_edges(program, *edges, *inputs, node_types=node_types).flatten(1)
        except IndexRangeError:
            _check_ranges(edge_index_dict, counts)
            raise
        by_type = dict(zip(counts, out.split(list(counts.values())), strict=True))
        names = [t for t in by_type if t in self.dst_node_types]
        found = self.out_lin({name: nn.functional.gelu(by_type[name]) for name in names})
        for name in names:
            x = x_dict[name]
            if found[name].shape[-1] == x.shape[-1]:
                if name in packed:
                    x = first_rows(packed[name], counts[name], found[name].device)
                share = self.skip[name].sigmoid()
                found[name] = blend(x, found[name], share)
        return {name: found[name] for name in names}

    def _equally_wide(self, x_dict: Any) -> dict[str, torch.Tensor]:
        """Return features that one program projects, by node type; none where PyG's layers do.

        These are features of one width and dtype, and PyG's own layers without hooks and with their
        own `forward`.
        """
        rows = list(x_dict.values())
        plain = all([type(x) is torch.Tensor and x.ndim == 2 for x in rows])
        one = plain and len({(x.shape[1], x.dtype) for x in rows}) == 1
        if not one:
            return {}
        n, (_, depth) = sum(map(len, rows)), rows[0].shape
        if not projects_in_program(n, depth, self.out_channels, rows[0].device):
            return {}
        lins = self.kqv_lin.lins
        features = {name: x_dict[name] for name in lins if name in x_dict}
        used = [self.kqv_lin, *map(lins.__getitem__, features)]
        own = type(self.kqv_lin) is gnn.HeteroDictLinear
        own = own and all([type(lin) is gnn.Linear for lin in used[1:]])
        own = own and not any(["forward" in vars(part) for part in used])
        if not own or any([getattr(part, kind) for part in used for kind in _OF_MODULES]):
            return {}
        return features

    def _projections(self, names: Iterable[str]) -> list[torch.Tensor]:
        """Return the weights of keys, queries and values ``[types, K, F]``, then their biases."""
        lins = [self.kqv_lin.lins[name] for name in names]
        weight = torch.stack([lin.weight.t() for lin in lins])
        if lins[0].bias is None:
            return list(weight.chunk(3, -1))
        bias = torch.stack([lin.bias for lin in lins])
        return [*weight.chunk(3, -1), *bias.chunk(3, -1)]

    def _packed(self, x_dict: Any) -> dict[str, Any]:
        """Return the packed features by node type."""
        found = {}
        for name, x in x_dict.items():
            if isinstance(x, PACKED_FEATURES) and name in self.kqv_lin.lins:
                lin = self.kqv_lin.lins[name]
                width = None if is_lazy(lin.weight) else lin.in_channels
                rows = rows_of(x.feature if isinstance(x, FeatureTensor) else x, width)
                if rows is not None:
                    found[name] = rows
        check_no_packed({"x_dict": {k: x for k, x in x_dict.items() if k not in found}})
        return found

    def _projected(self, x_dict: Any, packed: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Return keys, queries and values by node type, of packed rows as they are decoded."""
        lins = self.kqv_lin.lins
        if any(is_lazy(lin.weight) for lin in lins.values()):
            # PyG takes the widths from tensors.
            device = lins[next(iter(packed))].weight.device
            one = {k: torch.zeros(1, x.shape[1], device=device) for k, x in x_dict.items()}
            with torch.no_grad():
                self.kqv_lin(one)
        plain = {name: x for name, x in x_dict.items() if name not in packed}
        projected = self.kqv_lin(plain) if plain else {}
        for name, x in packed.items():
            lin = lins[name]
            on = (len(x), lin.weight.device)
            projected[name] = run_on_nodes(BIASED_OF_NODES, *on, lin.bias, x, lin.weight)
        return {name: projected[name] for name in lins if name in projected}

    def _edges(
        self, edge_index_dict: Any, counts: dict[str, int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all edges as those of one graph, whose nodes stand type after type."""

        def merge() -> tuple[torch.Tensor, torch.Tensor]:
            first = dict(
                zip(counts, itertools.accumulate(counts.values(), initial=0), strict=False)
            )
            edges, kinds = [], []
            for edge_type, index in edge_index_dict.items():
                _check_ends(edge_type, counts)
                ends = (edge_type[0], edge_type[-1])
                shift, n = torch.tensor(
                    [[first[e] for e in ends], [counts[e] for e in ends]], device=index.device
                )[:, :, None]
                # Moved as it is, a node that its type does not have would be one of the next type.
                # -1 is of none: the graph reports it, without a wait of its own for a GPU.
                inside = (index >= 0) & (index < n)
                edges.append(torch.where(inside, index + shift, -1))
                kinds.append(torch.full_like(index[0], self.edge_types_map[edge_type]))
            return torch.cat(edges, 1), torch.cat(kinds)

        if torch.compiler.is_compiling():
            return merge()
        kinds = tuple(map(self.edge_types_map.__getitem__, edge_index_dict))
        more = (tuple(edge_index_dict), kinds, tuple(counts.items()))
        return _merged.find(tuple(edge_index_dict.values()), more, merge)


def _check_ends(edge_type: Any, counts: dict[str, int]) -> None:
    for name in (edge_type[0], edge_type[-1]):
        if name not in counts:
            raise ArgumentTypeError(
                f"edge_index_dict has {edge_type}, and x_dict no features of {name!r}; accepted "
                f"are edges between {sorted(counts)}"
            )


def _check_ranges(edge_index_dict: Any, counts: dict[str, int]) -> None:
    """Raise an error for the first node that its type does not have."""
    for edge_type, index in edge_index_dict.items():
        for row, name in enumerate((edge_type[0], edge_type[-1])):
            if not index.shape[1]:
                continue
            low, high = (end.item() for end in torch.aminmax(index[row]))
            if low < 0 or high >= counts[name]:
                raise IndexRangeError(
                    f"edge_index_dict[{edge_type}][{row}] has {low if low < 0 else high}; accepted "
                    f"are 0 to {counts[name] - 1}, as x_dict[{name!r}] has {counts[name]} rows"
                )


def _prepare(layer: Any) -> None:
    """Make the programs of a layer that may be traced by `torch.compile` before it is called."""
    if isinstance(layer, gnn.HGTConv):
        for biased in (False, True):
            hgt_of_features(layer.heads, biased)
    if isinstance(layer, gnn.RGATConv):
        for logits in {False, layer.edge_dim is not None}:
            for masked in {False, layer.dropout > 0}:
                for returned in (False, True):
                    rgat(layer.heads, layer.negative_slope, logits, masked, returned)


_COMPILED: dict[type, type] = {
    gnn.RGCNConv: RGCNConv,
    gnn.FastRGCNConv: FastRGCNConv,
    gnn.RGATConv: RGATConv,
    gnn.HGTConv: HGTConv,
}
_PLAIN = {compiled: plain for plain, compiled in _COMPILED.items()}


def compile_relational(model: nn.Module) -> LayerReport:
    """Compile PyG's relational layers of a model, in place.

    Parameters
    ----------
    model : torch.nn.Module
        A model, or a layer. Each RGCNConv, FastRGCNConv, RGATConv and HGTConv in it becomes the
        class of this module; the objects and their parameters are the same.

    Returns
    -------
    LayerReport
        Layers that are compiled, and those that are left, with the reason: an option that is not
        covered, or a class derived from PyG's.
    """
    report = LayerReport()
    for name, layer in model.named_modules():
        kind = type(layer)
        if kind in _COMPILED:
            reason = _COMPILED[kind].relational_reason(layer)  # type: ignore[attr-defined]
            if reason:
                report.left[name] = f"{kind.__name__} with {reason}"
                continue
            layer.__class__ = _COMPILED[kind]
            _prepare(layer)
        elif kind not in _PLAIN and isinstance(layer, tuple(_COMPILED)):
            report.left[name] = f"{kind.__name__} is derived from PyG's class"
            continue
        if type(layer) in _PLAIN:
            report.compiled[name] = kind.__name__
    return report


def restore_relational(model: nn.Module) -> nn.Module:
    """Return a model with PyG's own layers again, the same objects."""
    for layer in model.modules():
        if type(layer) in _PLAIN:
            layer.__class__ = _PLAIN[type(layer)]
            forget_calls(layer)
    return model


def relational_calls(model: nn.Module) -> dict[str, dict[str, int]]:
    """Return for each compiled layer of a model its calls by reason.

    "" counts those that ran compiled, any other reason those that ran PyG's own code. Calls inside
    `torch.compile` are not counted.
    """
    return calls_of(model)
