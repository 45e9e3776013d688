"""Every way DGL reads, cuts, joins, copies, stores and computes with columns, raw and compressed.

Each function below is run on two graphs that differ in nothing but that the columns of one are
compressed; what it returns must be the same to the last bit.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import dgl
import dgl.function as fn
import dgl.nn.pytorch as nn
import pytest
import torch

from bitslab.integrations.dgl import CompressedColumn, compress_features, feature_stats
from tests.integrations.dgl.graphs import (
    FLOW,
    LIKE,
    assert_same,
    assert_same_graph,
    columns,
    compressed,
    heterogeneous,
    homogeneous,
    packed_graph,
)

IDS = torch.tensor([3, 0, 17, 3])


def update_all(graph):
    graph.edata["three"] = graph.edata["w"][:, 2:3]
    graph.update_all(fn.u_mul_e("feat", "three", "m"), fn.sum("m", "out"))
    graph.update_all(fn.copy_e("w", "m"), fn.mean("m", "edges"))
    return graph


def message_functions(graph):
    graph.update_all(
        lambda edges: {"m": edges.src["feat"] + edges.dst["feat"] * edges.data["w"][:, :1]},
        lambda nodes: {"out": nodes.mailbox["m"].sum(1) + nodes.data["feat"]},
    )
    return graph


def some_messages(graph):
    graph.send_and_recv(IDS[:3], fn.copy_u("feat", "m"), fn.max("m", "out"))
    graph.pull([1, 2], fn.copy_u("feat", "m"), fn.sum("m", "pulled"))
    graph.push([1, 2], fn.copy_u("feat", "m"), fn.sum("m", "pushed"))
    return graph


def apply_edges(graph):
    graph.apply_edges(fn.u_dot_v("feat", "feat", "dot"))
    graph.apply_edges(lambda edges: {"sum": edges.src["feat"].sum(1) + edges.data["one"]})
    graph.apply_nodes(lambda nodes: {"twice": nodes.data["feat"] * 2}, v=IDS[:3])
    return graph


def layer(graph):
    torch.manual_seed(0)
    return nn.SAGEConv(9, 4, "mean")(graph, graph.ndata["feat"])


def layer_with_gradient(graph):
    torch.manual_seed(0)
    conv = nn.GATConv(9, 4, 2)
    x = graph.ndata["feat"].nan_to_num(0.0, 1.0, 1.0)
    conv(dgl.add_self_loop(graph), x).sum().backward()
    return [p.grad for p in conv.parameters()]


def local_scope(graph):
    with graph.local_scope():
        graph.ndata["feat"] = graph.ndata["feat"] + 1
        graph.edata.pop("w")
        inside = graph.ndata["feat"]
    return inside, graph


def local_var(graph):
    local = graph.local_var()
    local.ndata["feat"] = torch.zeros(30, 2)
    local.edata["new"] = graph.edata["w"] * 2
    return local, graph


def rows_updated(graph):
    graph.nodes[IDS[:3]].data["feat"] = torch.ones(3, 9)
    graph.edges[torch.tensor([5, 7])].data["w"] = torch.zeros(2, 5)
    graph.ndata["half"][IDS]
    return graph


def replaced(graph):
    graph.ndata["feat"] = torch.ones(30, 2)
    graph.edata.update({"w": torch.zeros(120)})
    return graph


def popped(graph):
    first = graph.ndata.pop("feat")
    del graph.edata["w"]
    return first, graph, list(graph.ndata), "w" in graph.edata


def dictionary(graph):
    views = [graph.ndata, graph.edata, graph.srcdata, graph.dstdata]
    return [dict(view) for view in views], [repr(view) for view in views], repr(graph)


def nodes_added(graph):
    graph.add_nodes(2, {"feat": torch.ones(2, 9)})
    graph.add_edges([0, 1], [30, 31])
    return graph


def nodes_removed(graph):
    graph.remove_nodes([0, 4])
    graph.remove_edges([1, 2, 3])
    return graph


def readout(graph):
    graph.edata["column"] = graph.edata["one"].view(-1, 1)
    return [
        dgl.sum_nodes(graph, "feat"),
        dgl.mean_edges(graph, "one", "column"),
        dgl.topk_nodes(graph, "feat", 3, sortby=2),
        dgl.softmax_edges(graph, "one"),
        dgl.broadcast_nodes(graph, torch.ones(1, 2)),
    ]


def _with_types(graph):
    graph.ndata[dgl.NTYPE] = torch.arange(30) % 2
    graph.edata[dgl.ETYPE] = torch.zeros(120, dtype=torch.int64)
    source, destination = graph.edges()
    keep = (source % 2 == 0) & (destination % 2 == 1)
    return dgl.edge_subgraph(graph, keep, relabel_nodes=False)


def _propagated(graph):
    graph.prop_nodes([[1, 2], [3]], fn.copy_u("feat", "m"), fn.sum("m", "out"))
    return graph


# Of a homogeneous graph.
WAYS: dict[str, Any] = {
    "whole": lambda g: [g.ndata["feat"], g.edata["w"], g.ndata["label"]],
    "some rows": lambda g: [g.nodes[IDS].data["feat"], g.edges[IDS].data["w"]],
    "some rows by a list": lambda g: [g.nodes[[1, 2]].data["feat"], g.nodes[4].data["half"]],
    "edges by their ends": lambda g: g.edges[g.edges()[0][:4], g.edges()[1][:4]].data["w"],
    "views": dictionary,
    "schemes": lambda g: [g.node_attr_schemes(), g.edge_attr_schemes()],
    "subgraph": lambda g: g.subgraph([5, 1, 9, 2]),
    "subgraph by mask": lambda g: g.subgraph(torch.arange(30) % 3 == 0),
    "subgraph of subgraph": lambda g: g.subgraph(torch.arange(20)).subgraph([3, 2, 9]),
    "edge subgraph": lambda g: g.edge_subgraph([9, 4, 4 + 30], relabel_nodes=False),
    "edge subgraph, new nodes": lambda g: g.edge_subgraph([9, 4, 40]),
    "in and out": lambda g: [dgl.in_subgraph(g, [1, 2]), dgl.out_subgraph(g, [1, 2])],
    "in, new nodes": lambda g: dgl.in_subgraph(g, [1, 2], relabel_nodes=True),
    "hops": lambda g: [dgl.khop_in_subgraph(g, 3, 2), dgl.khop_out_subgraph(g, 3, 1)],
    "parts": lambda g: [*dgl.topological_nodes_generator(g.subgraph([1, 2]))],
    "reverse": lambda g: dgl.reverse(g, copy_edata=True),
    "self loops": lambda g: dgl.add_self_loop(g, fill_data=0.5, edge_feat_names=["w"]),
    "no self loops": lambda g: dgl.remove_self_loop(dgl.add_self_loop(g)),
    "simple": lambda g: dgl.to_simple(g, copy_ndata=True, copy_edata=True),
    "simple, summed": lambda g: dgl.to_simple(g, copy_edata=True, aggregator="sum"),
    "both ways": lambda g: dgl.to_bidirected(g, copy_ndata=True),
    "reverse edges": lambda g: dgl.add_reverse_edges(g, copy_ndata=True, copy_edata=True),
    "line graph": lambda g: dgl.line_graph(g, shared=True),
    "renumbered": lambda g: dgl.reorder_graph(
        g, "custom", permute_config={"nodes_perm": range(30)}
    ),
    "compacted": lambda g: dgl.compact_graphs(g.edge_subgraph([3, 4], relabel_nodes=False)),
    "block": lambda g: dgl.to_block(dgl.in_subgraph(g, [1, 2]), [1, 2]),
    "block of all": lambda g: dgl.to_block(g, g.nodes()),
    "graph of a block": lambda g: dgl.block_to_graph(dgl.to_block(g, g.nodes())),
    "batch": lambda g: dgl.batch([g, g.subgraph([1, 2, 3])], ndata=["feat"], edata=["w"]),
    "unbatch": lambda g: dgl.unbatch(dgl.batch([g, g])),
    "slice of a batch": lambda g: dgl.slice_batch(dgl.batch([g, g]), 1),
    "merge": lambda g: dgl.merge([g, g]),
    "local scope": local_scope,
    "local variable": local_var,
    "clone": lambda g: g.clone(),
    "int32": lambda g: g.int(),
    "formats": lambda g: [g.formats(["coo", "csc"]), g.formats()],
    "half": lambda g: g.half() if hasattr(g, "half") else dgl.to_half(g),
    "double and back": lambda g: dgl.to_float(dgl.to_double(g)),
    "half of a subgraph": lambda g: dgl.to_half(g.subgraph([1, 4, 3])),
    "to the CPU": lambda g: [g.to("cpu"), g.cpu()],
    "pickle": lambda g: pickle.loads(pickle.dumps(g)),
    "pickle of a subgraph": lambda g: pickle.loads(pickle.dumps(g.subgraph([1, 3]))),
    "pickle of a converted one": lambda g: pickle.loads(pickle.dumps(dgl.to_half(g))),
    "copy": copy.copy,
    "deep copy": copy.deepcopy,
    "deep copy of a subgraph": lambda g: copy.deepcopy(g.subgraph([1, 3])),
    "update_all": update_all,
    "functions of nodes and edges": message_functions,
    "some messages": some_messages,
    "apply_edges": apply_edges,
    "layer": layer,
    "gradient": layer_with_gradient,
    "readout": readout,
    "rows updated": rows_updated,
    "replaced": replaced,
    "popped": popped,
    "nodes added": nodes_added,
    "nodes removed": nodes_removed,
    "adjacency": lambda g: g.adj_external(scipy_fmt="coo").sum(),
    "filter": lambda g: g.filter_nodes(lambda nodes: nodes.data["feat"][:, 2] > 0),
    "networkx": lambda g: len(dgl.to_networkx(g, node_attrs=["feat"], edge_attrs=["w"])),
    "to heterograph": lambda g: dgl.to_heterogeneous(
        _with_types(g), ["a", "b"], ["x", "y"], metagraph=None
    ),
    "propagated": _propagated,
    "masked": lambda g: dgl.FeatMask(0.0, node_feat_names=["feat"])(g),
    "transform": lambda g: dgl.AddReverse(copy_edata=True)(g),
}


@pytest.mark.drawn(33)
@pytest.mark.parametrize("way", WAYS)
def test_homogeneous(way):
    graph = packed_graph(homogeneous())
    assert len(compressed(graph)) == 4
    assert_same(WAYS[way](homogeneous()), WAYS[way](graph))


def multi_update_all(graph):
    graph.edges[LIKE].data["w"] = graph.edges[LIKE].data["w"][:, :1]
    graph.multi_update_all(
        {
            "likes": (fn.u_add_e("feat", "w", "m"), fn.sum("m", "out")),
            "follows": (fn.copy_e("w", "m"), fn.max("m", "out")),
        },
        "sum",
    )
    return graph


def hetero_rows_changed(graph):
    graph.ndata["feat"] = {"user": torch.ones(12, 2)}
    graph.add_nodes(1, ntype="item")
    graph.remove_edges([0], etype=FLOW)
    return graph


HETERO: dict[str, Any] = {
    "whole": lambda g: [g.nodes["user"].data["feat"], g.ndata["feat"], g.edata["w"]],
    "some rows": lambda g: [g.nodes["item"].data["feat"][2:], g.edges[LIKE].data["w"]],
    "views": lambda g: [repr(g), repr(g.ndata), repr(g.edges["likes"].data)],
    "relation": lambda g: [g["likes"], g[FLOW]],
    "types": lambda g: [
        g.node_type_subgraph(["user", "item"]),
        g.edge_type_subgraph([LIKE]),
        dgl.metapath_reachable_graph(g, ["follows", "likes"]),
    ],
    "subgraph": lambda g: g.subgraph({"user": [3, 4, 1], "item": [0, 6]}),
    "edge subgraph": lambda g: g.edge_subgraph({LIKE: [3, 4], FLOW: [0]}),
    "in": lambda g: dgl.in_subgraph(g, {"item": [1, 2], "user": [0]}),
    "block": lambda g: dgl.to_block(dgl.in_subgraph(g, {"item": [1, 2]}), {"item": [1, 2]}),
    "homogeneous": lambda g: dgl.to_homogeneous(
        g.node_type_subgraph(["user", "item"]), ndata=["feat"], edata=["w"]
    ),
    "batch": lambda g: dgl.unbatch(dgl.batch([g, g])),
    "reverse": lambda g: dgl.reverse(g, copy_edata=True),
    "pickle": lambda g: pickle.loads(pickle.dumps(g)),
    "deep copy": copy.deepcopy,
    "compacted": lambda g: dgl.compact_graphs(g.edge_subgraph({LIKE: [3]}, relabel_nodes=False)),
    "local variable": lambda g: g.local_var(),
    "multi_update_all": multi_update_all,
    "rows changed": hetero_rows_changed,
}


@pytest.mark.parametrize("way", HETERO)
def test_heterogeneous(way):
    graph = packed_graph(heterogeneous())
    assert len(compressed(graph)) == 5
    assert_same(HETERO[way](heterogeneous()), HETERO[way](graph))


@pytest.mark.parametrize("make", [homogeneous, heterogeneous])
def test_graphs_are_saved_and_loaded(make, tmp_path):
    graph = packed_graph(make())
    for name, each in {"raw": make(), "packed": graph}.items():
        dgl.save_graphs(str(tmp_path / name), [each, each], {"y": torch.arange(2)})
    assert (tmp_path / "raw").stat().st_size == (tmp_path / "packed").stat().st_size
    loaded, labels = dgl.load_graphs(str(tmp_path / "packed"))
    assert labels["y"].tolist() == [0, 1]
    assert_same_graph(loaded[1], make())


# What remains compressed

COMPRESSED = {
    "local variable": lambda g: g.local_var(),
    "clone": lambda g: g.clone(),
    "formats": lambda g: g.formats(["coo"]),
    "int32": lambda g: g.int(),
    "converted": dgl.to_half,
    "pickle": lambda g: pickle.loads(pickle.dumps(g)),
    "deep copy": copy.deepcopy,
    "subgraph": lambda g: g.subgraph([1, 2]),
    "subgraph of subgraph": lambda g: g.subgraph([1, 2, 5]).subgraph([0, 1]),
    "edge subgraph": lambda g: g.edge_subgraph([1, 2]),
    "block": lambda g: dgl.to_block(dgl.in_subgraph(g, [1, 2]), [1, 2]),
    "sampled": lambda g: dgl.sampling.sample_neighbors(g, [1, 2], 2),
}


@pytest.mark.parametrize("way", COMPRESSED)
def test_nothing_is_decoded_until_it_is_read(way):
    graph = packed_graph(homogeneous())
    made = COMPRESSED[way](graph)
    found = [c for c in columns(made).values() if isinstance(c, CompressedColumn)]
    assert len(found) >= 4
    for column in found:
        stats = column.storage.stats()
        assert stats["materialised_bytes"] == stats["gathered_rows"] == 0
        assert "CompressedFeature" in repr(column)


def test_reading_a_subgraph_decodes_its_rows_alone():
    graph = packed_graph(homogeneous())
    part = graph.subgraph([4, 7])
    assert torch.equal(part.ndata["half"], homogeneous().ndata["half"][[4, 7]])
    stats = feature_stats(graph)["_N"]["half"]
    assert (stats["gathered_rows"], stats["materialised_bytes"]) == (2, 0)
    column = part.get_node_storage("half")
    assert type(column) is dgl.frame.Column  # what was read is a plain column
    part.ndata["half"][0] = 5  # and belongs to the subgraph
    assert torch.equal(graph.ndata["half"][4], homogeneous().ndata["half"][4])


def test_reading_a_whole_column_is_reported_once():
    graph = packed_graph(homogeneous())
    for _ in range(2):
        nn.GraphConv(9, 2)(dgl.add_self_loop(graph), graph.ndata["feat"])
    stats = feature_stats(graph)["_N"]["feat"]
    assert stats["materialised_bytes"] == 30 * 9 * 4
    assert [note for note in stats["notes"] if note.startswith("materialised")]
    assert len(stats["notes"]) == 1


def test_a_pickle_of_a_subgraph_is_small():
    graph = dgl.rand_graph(2000, 100)
    graph.ndata["x"] = torch.randn(2000, 16)
    compress_features(graph)
    whole, part = pickle.dumps(graph), pickle.dumps(graph.subgraph([0, 1]))
    assert len(whole) > 50_000 > 10 * len(part)


def test_copies_are_independent():
    graph, raw = packed_graph(homogeneous()), homogeneous()
    deep, local = copy.deepcopy(graph), graph.local_var()
    assert local.get_node_storage("feat").storage is graph.get_node_storage("feat").storage
    assert deep.get_node_storage("feat").storage is not graph.get_node_storage("feat").storage
    for each in (deep, local):
        each.nodes[[0]].data["feat"] = torch.ones(1, 9)
        each.edata["w"] = torch.zeros(120)
    assert_same_graph(raw, graph)
