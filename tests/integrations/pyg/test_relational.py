"""PyG's relational layers compiled: results, gradients and state are those of PyG's own."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from typing import Any

import pytest
import torch
import torch_geometric.nn as gnn
from torch import nn
from torch_geometric.utils import coalesce, to_torch_csc_tensor

from bitslab.errors import ArgumentTypeError, IndexRangeError
from bitslab.integrations import pyg
from bitslab.integrations.pyg import compile_relational, relational_calls, restore_relational
from bitslab.relational.products import Products
from bitslab.relational.steps import Costs
from tests.helpers import options_id
from tests.integrations.pyg.relational_layers import (
    EDGE_TYPES,
    EDGES,
    METADATA,
    NODES,
    TYPES,
    both,
    close,
    compare,
    graph,
    hetero,
)

RGCN = [
    {},
    {"aggr": "add"},
    {"aggr": "sum", "root_weight": False},
    {"bias": False},
    {"num_bases": 3},
    {"num_blocks": 4},
    {"num_blocks": 2, "aggr": "add"},
    {"is_sorted": True},
]


@pytest.mark.parametrize("kwargs", RGCN, ids=options_id)
@pytest.mark.parametrize("name", ["RGCNConv", "FastRGCNConv"])
def test_rgcn(name, kwargs):
    plain, ours = both(name, 8, 12, TYPES, **kwargs)
    compare(plain, ours, {"x": torch.randn(NODES, 8)}, *graph())


def test_rgcn_of_pairs_of_features():
    plain, ours = both("RGCNConv", (8, 6), 12, TYPES)
    features = {"x": torch.randn(30, 8), "y": torch.randn(20, 6)}
    compare(plain, ours, features, *graph(30, 20))


RGAT = [
    {},
    {"heads": 2},
    {"heads": 3, "concat": False, "bias": False},
    {"num_bases": 2, "negative_slope": 0.1},
    {"heads": 2, "dropout": 0.4},
]


@pytest.mark.parametrize("kwargs", RGAT, ids=options_id)
def test_rgat(kwargs):
    plain, ours = both("RGATConv", 8, 12, TYPES, **kwargs)
    nn.init.normal_(plain.bias) if plain.bias is not None else None
    ours.load_state_dict(plain.state_dict())
    compare(plain, ours, {"x": torch.randn(NODES, 8)}, *graph(), return_attention_weights=True)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_rgat_with_features_of_edges(dropout):
    plain, ours = both("RGATConv", 8, 12, TYPES, heads=2, edge_dim=3, dropout=dropout)
    edge_attr = torch.randn(EDGES, 3)
    compare(plain, ours, {"x": torch.randn(NODES, 8)}, *graph(), edge_attr)


@pytest.mark.parametrize("kwargs", [{}, {"num_blocks": 4}], ids=options_id)
@pytest.mark.parametrize("name", ["RGCNConv", "FastRGCNConv"])
@pytest.mark.parametrize("dst", [0, 5])
def test_no_source_nodes(name, kwargs, dst):
    plain, ours = both(name, 8, 12, TYPES, **kwargs)
    features = {"x": torch.randn(0, 8)} | ({"y": torch.randn(dst, 8)} if dst else {})
    compare(plain, ours, features, *graph(0, dst, edges=0))


@pytest.mark.parametrize("edges", [0, 1])
@pytest.mark.parametrize("name", ["RGCNConv", "RGATConv"])
def test_few_edges(name, edges):
    plain, ours = both(name, 8, 12, TYPES)
    plain.requires_grad_(False)
    x, (index, kind) = torch.randn(NODES, 8), graph(edges=edges)
    close(ours(x, index, kind), plain(x, index, kind))


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("out", [8, 16])
def test_hgt(heads, out):
    x, edges = hetero()
    sizes = {t: v.shape[1] for t, v in x.items()}
    plain, ours = both("HGTConv", sizes, out, METADATA, heads=heads)
    for layer in (plain, ours):
        torch.manual_seed(8)
        for p in layer.p_rel.parameters():
            nn.init.normal_(p)
    compare(plain, ours, x, edges)


@pytest.fixture
def counted_products(monkeypatch):
    """Products of weights. Operations alone count: layers this small are left as they are else."""
    monkeypatch.setattr(
        "bitslab.relational.steps.COSTS", dict.fromkeys(("cpu", "cuda"), Costs(1.0))
    )
    products, multiply = [], Products.weight_product

    def counted(self, step, weight, matrix):
        products.append(step)
        return multiply(self, step, weight, matrix)

    monkeypatch.setattr(Products, "weight_product", counted)
    return products


def of_one_width():
    sizes = {"paper": 500, "author": 300, "field": 40}
    x = {t: torch.randn(n, 8) for t, n in sizes.items()}
    edges = {t: graph(sizes[t[0]], sizes[t[2]], 30, seed=i)[0] for i, t in enumerate(EDGE_TYPES)}
    return x, edges


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("out", [8, 16])
def test_hgt_of_features_of_one_width_multiplies_weights_first(heads, out, counted_products):
    x, edges = of_one_width()
    plain, ours = both("HGTConv", 8, out, METADATA, heads=heads)
    compare(plain, ours, x, edges)
    assert len(counted_products) == 4  # of keys and values, forward and backward
    del edges[EDGE_TYPES[1]]
    plain, ours = both("HGTConv", 8, out, METADATA, heads=heads)
    compare(plain, ours, x, edges)


HOOKS = {
    "forward": lambda module, given, out: out * 2,
    "forward_pre": lambda module, given: (given[0] * 2,),
    "full_backward": lambda module, given, out: tuple(None if g is None else g * 2 for g in given),
    "full_backward_pre": lambda module, out: (out[0] * 2,),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_hgt_keeps_hooks_of_its_projections(kind, counted_products):
    x, edges = of_one_width()
    plain, ours = both("HGTConv", 8, 8, METADATA)
    compare(plain, ours, x, edges)
    assert counted_products  # without a hook the program projects
    counted_products.clear()
    plain, ours = both("HGTConv", 8, 8, METADATA)
    for layer in (plain, ours):
        getattr(layer.kqv_lin.lins["paper"], f"register_{kind}_hook")(HOOKS[kind])
    compare(plain, ours, x, edges)
    assert not counted_products


@pytest.mark.parametrize("part", ["kqv_lin", "one of its layers"])
def test_hgt_calls_a_replaced_forward_of_its_projections(part, counted_products):
    """As accelerate replaces them."""
    x, edges = of_one_width()
    plain, ours = both("HGTConv", 8, 8, METADATA)
    for layer in (plain, ours):
        module = layer.kqv_lin if part == "kqv_lin" else layer.kqv_lin.lins["paper"]

        def replaced(*given, own=module.forward):
            out = own(*given)
            return {k: 2 * v for k, v in out.items()} if isinstance(out, dict) else 2 * out

        module.forward = replaced
    compare(plain, ours, x, edges)
    assert not counted_products


def test_hgt_with_lazy_sizes_and_missing_edge_types():
    x, edges = hetero()
    plain, ours = both_lazy()
    del edges[EDGE_TYPES[1]]
    results = []
    for layer in (plain, ours):
        torch.manual_seed(9)
        results.append(layer(x, edges))
    assert list(results[0]) == list(results[1])
    for name, out in results[0].items():
        close(results[1][name], out)


def test_hgt_leaves_edge_types_that_are_not_in_a_call_without_a_gradient():
    x, edges = hetero()
    plain, ours = both("HGTConv", {t: v.shape[1] for t, v in x.items()}, 8, METADATA)
    none = torch.empty(2, 0, dtype=torch.int64)
    edges = {EDGE_TYPES[0]: edges[EDGE_TYPES[0]], EDGE_TYPES[2]: none}
    compare(plain, ours, x, edges)
    name = "__".join(EDGE_TYPES[1])
    assert ours.p_rel[name].grad is None and ours.p_rel["__".join(EDGE_TYPES[0])].grad is not None
    before = ours.p_rel[name].detach().clone()
    torch.optim.AdamW(ours.parameters(), lr=0.1, weight_decay=0.5).step()
    assert torch.equal(ours.p_rel[name], before)


@pytest.mark.drawn(4)
@pytest.mark.parametrize("way", ["on a CPU", "as on a GPU", "torch.compile"])
@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("where", ["behind the last", "before the first"])
def test_hgt_refuses_nodes_that_their_own_type_does_not_have(
    where, row, way, fresh_compiler, monkeypatch
):
    x, edges = hetero()
    kind = EDGE_TYPES[1]
    name, before_first, compiled = kind[2 * row], where == "before the first", way[:5] == "torch"
    if way == "as on a GPU":
        monkeypatch.setattr("bitslab.relational.graph.read_at_once", lambda device: True)
    # The layer's order of types: a node out of range would be one of another type.
    x = dict(sorted(x.items(), key=lambda item: (item[0] == name) is before_first))
    _, ours = both("HGTConv", {t: v.shape[1] for t, v in x.items()}, 8, METADATA)
    wrong = -1 if before_first else len(x[name])
    layer = torch.compile(ours, fullgraph=True, backend="aot_eager") if compiled else ours
    layer(x, edges)
    edges[kind][row, 3] = wrong
    named = f"has {wrong}; accepted are 0 to {len(x[name]) - 1}, as x_dict"
    match = "has -1; accepted are 0 to" if compiled else named
    for _ in range(2):
        with pytest.raises(IndexRangeError, match=match) as caught:
            layer(x, edges)
        assert compiled or f"edge_index_dict[{kind}][{row}]" in str(caught.value)
    edges[kind][row, 3] = 0
    layer(x, edges)


def both_lazy():
    for module in (gnn, pyg):
        torch.manual_seed(4)
        yield module.HGTConv(-1, 8, METADATA, heads=2)


def test_hgt_finds_its_edges_again_and_sees_changes():
    x, edges = hetero()
    plain, ours = both("HGTConv", {t: v.shape[1] for t, v in x.items()}, 8, METADATA)
    for _ in range(2):
        for name, out in plain(x, edges).items():
            close(ours(x, edges)[name], out)
        edges[EDGE_TYPES[0]][1] = edges[EDGE_TYPES[0]][1].flip(0)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = gnn.RGCNConv(8, 16, TYPES)
        self.two = nn.ModuleList([gnn.RGATConv(16, 4, TYPES, heads=2), nn.Linear(8, 3)])

    def forward(self, x, edge_index, edge_type):
        hidden = self.one(x, edge_index, edge_type).relu()
        return self.two[1](self.two[0](hidden, edge_index, edge_type))


def test_one_line_compiles_a_model_and_one_restores_it():
    torch.manual_seed(0)
    model, x, edges = Model(), torch.randn(NODES, 8), graph()
    expected, objects = model(x, *edges), list(model.modules())
    state = {k: v.clone() for k, v in model.state_dict().items()}
    attributes = {k: set(vars(m)) for k, m in model.named_modules()}
    report = compile_relational(model)
    assert report.compiled == {"one": "RGCNConv", "two.0": "RGATConv"} and not report.left
    assert "one: RGCNConv, compiled" in str(report)
    assert list(map(id, model.modules())) == list(map(id, objects))
    close(model(x, *edges), expected)
    assert relational_calls(model) == {"one": {"": 1}, "two.0": {"": 1}}
    assert compile_relational(model).compiled.keys() == report.compiled.keys()
    assert restore_relational(model) is model
    assert type(model.one) is gnn.RGCNConv and type(model.two[0]) is gnn.RGATConv
    assert {k: set(vars(m)) for k, m in model.named_modules()} == attributes
    assert torch.equal(model(x, *edges), expected)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


class Derived(gnn.RGCNConv):  # type: ignore[misc]
    pass


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: gnn.RGCNConv(4, 4, 2, aggr="max"), "RGCNConv with aggr='max'"),
        (lambda: gnn.RGCNConv(4, 4, 2, flow="target_to_source"), "flow='target_to_source'"),
        (lambda: gnn.RGATConv(4, 4, 2, num_blocks=2), "num_blocks=2"),
        (lambda: gnn.RGATConv(4, 4, 2, mod="scaled"), "mod='scaled'"),
        (
            lambda: gnn.RGATConv(4, 4, 2, attention_mode="multiplicative-self-attention"),
            "attention_mode='multiplicative-self-attention'",
        ),
        (
            lambda: gnn.RGATConv(4, 4, 2, attention_mechanism="within-relation"),
            "attention_mechanism='within-relation'",
        ),
        (lambda: Derived(4, 4, 2), "Derived is derived from PyG's class"),
    ],
)
def test_options_that_are_not_covered_are_reported(make, why):
    layer = make()
    report = compile_relational(layer)
    assert not report.compiled and why in report.left[""]
    assert type(layer) is type(make())
    if type(layer) is not Derived:  # ours runs PyG's code
        for parameter in layer.parameters():  # PyG leaves some of mod= as memory was
            torch.nn.init.normal_(parameter)
        ours = copy.deepcopy(layer)
        ours.__class__ = getattr(pyg, type(layer).__name__)
        index, kind = graph(types=2)
        x = torch.randn(NODES, 4)
        assert torch.equal(ours(x, index, kind), layer(x, index, kind))
        assert why.split(" with ")[-1] in next(iter(relational_calls(ours)[""]))


def test_calls_that_are_not_covered_run_pygs_code():
    index, kind = graph()
    ids = torch.arange(NODES)
    plain, ours = both("RGCNConv", NODES, 12, TYPES)
    for x in (None, ids):
        close(ours(x, index, kind), plain(x, index, kind))
    assert relational_calls(ours) == {"": {"features that are not rows of floats": 2}}
    plain, ours = both("RGCNConv", 8, 12, TYPES)
    seen = []
    ours.register_message_forward_hook(lambda *args: seen.append(1))
    x = torch.randn(NODES, 8)
    close(ours(x, index, kind), plain(x, index, kind))
    assert seen and "hooks of message passing" in relational_calls(ours)[""]


def test_deepcopy_pickle_and_double():
    _, ours = both("RGATConv", 8, 12, TYPES, heads=2)
    x, edges = torch.randn(NODES, 8), graph()
    expected = ours(x, *edges)
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    for layer in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), again):
        assert type(layer) is pyg.RGATConv
        assert torch.equal(layer(x, *edges), expected)
    close(ours.double()(x.double(), *edges).float(), expected)


def derived(base: Any) -> Any:
    """Return a class with a message of its own, which takes what the base's does not."""

    class Doubled(base):  # type: ignore[misc]
        def message(self, x_j, edge_type_ptr, index):
            return 2 * x_j + 0 * index[:, None]

    class Deeper(Doubled):
        pass

    return Doubled, Deeper


@pytest.mark.parametrize("depth", [0, 1])
def test_derived_classes_with_hooks_of_their_own_run_pygs_code(depth):
    plain, ours = derived(gnn.RGCNConv)[depth], derived(pyg.RGCNConv)[depth]
    layers = []
    for kind in (plain, ours):
        torch.manual_seed(3)
        layers.append(kind(8, 12, TYPES))
    assert type(layers[1]) is ours
    compare(*layers, {"x": torch.randn(NODES, 8)}, *graph(), reason="Doubled defines message")
    # The class that it is derived from is as it was.
    compare(*both("RGCNConv", 8, 12, TYPES), {"x": torch.randn(NODES, 8)}, *graph())


def test_mixed_in_updates_run_pygs_code_and_forward_passes_do_not():
    class Mixin:
        def update(self, inputs):
            return inputs.abs()

    class Mixed(Mixin, pyg.HGTConv):
        pass

    class Plain(Mixin, gnn.HGTConv):  # type: ignore[misc]
        pass

    class Twice(pyg.HGTConv):
        def forward(self, x_dict, edge_index_dict):
            return {k: 2 * v for k, v in super().forward(x_dict, edge_index_dict).items()}

    x, edges = hetero()
    layers = []
    for kind in (Plain, Mixed, gnn.HGTConv, Twice):
        torch.manual_seed(3)
        layers.append(kind({t: v.shape[1] for t, v in x.items()}, 8, METADATA))
    compare(*layers[:2], x, edges, reason="Mixin defines update")
    for name, rows in layers[2](x, edges).items():
        close(layers[3](x, edges)[name], 2 * rows)
    assert relational_calls(layers[3]) == {"": {"": 2}}


def test_errors_name_what_is_wrong():
    index, kind = graph()
    _, ours = both("RGATConv", 8, 12, TYPES)
    with pytest.raises(ArgumentTypeError, match="edge_dim is None"):
        ours(torch.randn(NODES, 8), index, kind, torch.randn(EDGES, 3))
    _, ours = both("RGCNConv", 8, 12, TYPES - 1)
    with pytest.raises(IndexRangeError, match="edge_type has 4; accepted are 0 to 3"):
        ours(torch.randn(NODES, 8), index, kind)
    x, edges = hetero()
    _, ours = both("HGTConv", {t: v.shape[1] for t, v in x.items()}, 8, METADATA)
    del x["author"]
    with pytest.raises(ArgumentTypeError, match="no features of 'author'"):
        ours(x, edges)


def test_hetero_conv_around_compiled_layers():
    index, kind = graph()
    plain, ours = both("RGCNConv", 8, 12, TYPES)
    x = {"a": torch.randn(NODES, 8)}
    results = [
        gnn.HeteroConv({("a", "to", "a"): layer})(
            x, {("a", "to", "a"): index}, edge_type_dict={("a", "to", "a"): kind}
        )["a"]
        for layer in (plain, ours)
    ]
    close(results[1], results[0])


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_sparse_adjacencies_run_pygs_code():
    x = {t: torch.randn(n, 8) for t, n in {"paper": 12, "author": 7}.items()}
    kinds = [("author", "writes", "paper"), ("paper", "by", "author")]
    plain, ours = both("HGTConv", 8, 8, (list(x), kinds))
    index, sparse = {}, {}
    for kind in kinds:
        sizes = len(x[kind[0]]), len(x[kind[-1]])
        index[kind] = coalesce(graph(*sizes, edges=20)[0])
        sparse[kind] = to_torch_csc_tensor(index[kind], size=sizes).t()
    expected = plain(x, index)
    for edges in (index, sparse):
        found = ours(x, edges)
        for name, rows in expected.items():
            close(found[name], rows)
    (reason,) = (why for why in relational_calls(ours)[""] if why)
    assert reason == "edges of layout torch.sparse_csr"


def test_inside_hetero_conv():
    x = {"paper": torch.randn(NODES, 8), "author": torch.randn(20, 6)}
    index, kind = graph(src=20)
    edges = {("author", "writes", "paper"): index, ("paper", "by", "author"): index.flip(0)}
    types = {k: kind for k in edges}
    found = []
    for module in (gnn, pyg):
        torch.manual_seed(3)
        layers = {
            name: module.RGCNConv((x[name[0]].shape[1], x[name[2]].shape[1]), 4, TYPES)
            for name in edges
        }
        found.append(gnn.HeteroConv(layers)(x, edges, edge_type_dict=types)["paper"])
    close(found[1], found[0])


def test_trained_by_data_parallel_ranks(tmp_path):
    """One rank of gloo: buckets, hooks of gradients and the wrapper's forward pass."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        grads = []
        index, kind = graph()
        x = torch.randn(NODES, 8, generator=torch.Generator().manual_seed(0))
        for layer in both("RGATConv", 8, 12, TYPES, heads=2):
            wrapped = nn.parallel.DistributedDataParallel(layer, find_unused_parameters=True)
            for _ in range(2):
                wrapped(x, index, kind).square().sum().backward()
            grads.append([p.grad for p in layer.parameters()])
    finally:
        torch.distributed.destroy_process_group()
    for a, b in zip(*grads, strict=True):
        if a is not None:
            close(b, a)


@pytest.mark.parametrize("types", [TYPES, 12], ids=["few types", "many types"])
@pytest.mark.parametrize("aggr", ["mean", "add"])
def test_one_column_comes_out_as_pygs(aggr, types):
    plain, ours = both("RGCNConv", 6, 1, types, aggr=aggr)
    compare(plain, ours, {"x": torch.randn(NODES, 6)}, *graph(types=types))


def without_memory(*args):
    raise MemoryError("Unable to allocate 8 GiB")


@pytest.mark.parametrize("late", [False, True], ids=["pairs", "order of rows"])
@pytest.mark.parametrize("name", ["RGCNConv", "RGATConv"])
def test_without_memory_for_a_plan_pygs_code_runs(name, late, monkeypatch):
    plain, ours = both(name, 8, 8, TYPES)
    x, (index, kinds) = torch.randn(NODES, 8), graph()
    made = []

    def fail(*args):
        held = torch.zeros(5)
        made.append(weakref.ref(held))
        return without_memory()

    def pygs(layer, *args):
        gc.collect()
        assert all(ref() is None for ref in made)  # PyG's code has the memory of the plan
        return own(layer, *args)

    own = vars(getattr(gnn, name))["forward"]
    with monkeypatch.context() as patched:
        if late:
            patched.setattr("bitslab.relational.rows.EdgeHop._sorted", fail)
        else:
            patched.setattr("bitslab.engine.kernels.cpu.segment_sums.survey_edges", fail)
        patched.setattr(getattr(gnn, name), "forward", pygs)
        assert torch.equal(ours(x, index, kinds), plain(x, index, kinds))
    assert made
    assert relational_calls(ours) == {"": {"no memory for a plan": 1}}
    torch.testing.assert_close(ours(x, index, kinds), plain(x, index, kinds), rtol=1e-4, atol=1e-5)
    assert relational_calls(ours) == {"": {"no memory for a plan": 1, "": 1}}
