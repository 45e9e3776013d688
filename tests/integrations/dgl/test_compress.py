"""compress_features: which columns, which rows are hot, bad input, and the way back."""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

import dgl
import pytest
import torch

from bitslab import ArgumentError, ArgumentTypeError, MissingExtraError
from bitslab.integrations.dgl import (
    compress_features,
    decompress_features,
    feature_stats,
    raw_columns,
)
from bitslab.integrations.dgl.compress import degree_scores
from bitslab.tables.report import feature_name
from tests.helpers import same_bits, take
from tests.integrations.dgl.graphs import (
    FLOW,
    LIKE,
    SOLD,
    assert_same_graph,
    columns,
    compressed,
    features,
    heterogeneous,
    homogeneous,
    packed_graph,
)

ALL = {("user", "feat"), ("item", "feat"), ("shop", "size"), (LIKE, "w"), (FLOW, "w")}


# Which columns


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (None, ALL),
        ("feat", {("user", "feat"), ("item", "feat")}),
        ("label", {("user", "label")}),
        (["w", "size"], {(LIKE, "w"), (FLOW, "w"), ("shop", "size")}),
        (("size",), {("shop", "size")}),
        ({"user": "feat"}, {("user", "feat")}),
        ({"user": None, LIKE: None}, {("user", "feat"), (LIKE, "w")}),
        (
            {"likes": ["w"], "user": ["label", "feat"]},
            ALL - {("item", "feat"), ("shop", "size"), (FLOW, "w")} | {("user", "label")},
        ),
        ([], set()),
        ({}, set()),
    ],
    ids=lambda value: "" if isinstance(value, set) else str(value),
)
def test_columns_are_chosen(names, expected):
    graph = heterogeneous()
    report = compress_features(graph, names)
    assert compressed(graph) == expected
    assert report.compressed.keys() == {feature_name(*key) for key in expected}
    assert report.left.keys() == {feature_name(*key) for key in columns(graph).keys() - expected}
    assert all(report.left.values())
    stats = feature_stats(graph)
    assert {(type_, name) for type_ in stats for name in stats[type_]} == expected
    raw = raw_columns(graph)
    assert {(t, name) for t in raw for name in raw[t]} == columns(graph).keys() - expected
    assert_same_graph(graph, heterogeneous())


def test_what_is_left_has_a_reason():
    graph = homogeneous()
    graph.ndata["learned"] = torch.randn(30, 2, requires_grad=True)
    compress_features(graph)
    reasons = raw_columns(graph)
    assert reasons.keys() == {"_N"}
    assert "requires a gradient" in reasons["_N"]["learned"]
    assert "is torch.int64" in reasons["_N"]["label"]
    assert raw_columns(homogeneous())["_N"]["feat"] == ""  # nothing stands in the way


LEFT: dict[str, tuple[Any, str]] = {
    "integers": (torch.arange(30), "is torch.int64: only floating-point columns are compressed"),
    "masks": (torch.arange(30) > 3, "is torch.bool: only floating-point columns are compressed"),
    "gradient": (torch.randn(30, 2, requires_grad=True), "requires a gradient"),
    "sparse": (torch.eye(30).to_sparse(), "is sparse"),
    "placeholder": (dgl.frame.LazyFeature("feat"), "is a placeholder"),
}


@pytest.mark.parametrize("kind", LEFT)
def test_the_report_says_what_was_left_and_why(kind):
    value, reason = LEFT[kind]
    graph = dgl.rand_graph(30, 60)
    graph.ndata["x"] = value
    report = compress_features(graph)
    assert not report.compressed and report.left.keys() == {"_N.x"}
    assert reason in report.left["_N.x"]
    assert f"left alone:\n  _N.x: {report.left['_N.x']}" == str(report)


def test_the_report_is_for_people_and_for_machines():
    graph = heterogeneous()
    report = compress_features(graph, device="cpu", cache_ratio=0.5)
    text = str(report)
    assert text.splitlines()[0].split() == (
        "feature rows packed as raw MiB host MiB ratio cached".split()
    )
    for words in (
        "\nuser.feat ",
        "\nuser:likes:item.w ",
        "\nall ",
        "left alone:\n  user.label: is ",
    ):
        assert words in text
    content = json.loads(json.dumps(report.as_dict()))
    stats = feature_stats(graph)
    assert content["compressed"]["user.feat"] == json.loads(json.dumps(stats["user"]["feat"]))
    assert (
        content["raw_bytes"]
        == report.raw_bytes
        == sum(one["raw_bytes"] for some in stats.values() for one in some.values())
    )
    assert str(compress_features(dgl.rand_graph(3, 4))) == "no features"


def test_the_report_of_a_second_call_names_what_is_compressed_already():
    graph = packed_graph(homogeneous(), "feat")
    report = compress_features(graph, "half")
    assert list(report.compressed) == ["_N.half"]
    assert report.left["_N.feat"] == "is compressed already"
    assert report.left["_N:_E:_N.w"] == "was not named"


def test_a_placeholder_is_left():
    graph = homogeneous()
    graph.ndata["later"] = dgl.frame.LazyFeature("feat")
    compress_features(graph)
    assert "placeholder" in raw_columns(graph)["_N"]["later"]


def test_once_more_compresses_what_is_new():
    graph = packed_graph(homogeneous())
    kept = graph.get_node_storage("feat").storage
    graph.ndata["new"] = features(30, 4)
    compress_features(graph)
    assert ("_N", "new") in compressed(graph)
    assert graph.get_node_storage("feat").storage is kept


def test_a_subgraph_can_be_compressed():
    graph = homogeneous().subgraph([4, 2, 9])
    wanted = homogeneous().subgraph([4, 2, 9])
    compress_features(graph)
    assert ("_N", "feat") in compressed(graph)
    assert_same_graph(graph, wanted)


@pytest.mark.parametrize(
    "options",
    [
        {"layout": "inplace"},
        {"codec": "raw"},
        {"cache_bytes": 200},
        {"cache_ratio": 0.4},
        {"cache_ratio": 0.4, "codec": "raw", "cache_codec": "auto"},
    ],
    ids=str,
)
def test_options_change_no_bit(options):
    graph, raw = packed_graph(heterogeneous(), **options, device="cpu"), heterogeneous()
    for (type_, name), column in columns(graph).items():
        x = columns(raw)[type_, name].data
        ids = torch.arange(len(x)).flip(0)
        rows = column.fetch(ids, "cpu")
        assert same_bits(rows.wait() if hasattr(rows, "wait") else rows, take(x, ids))
    assert_same_graph(graph, raw)


# Bad input


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("nothing", r"no column 'nothing'; there are: 'feat' of 'item', 'size' of 'shop'"),
        (["feat", "x"], r"no column 'x'"),
        ({"item": "w"}, r"no column 'w'; there are: 'feat' of 'item'$"),
        ({SOLD: "w"}, r"no column 'w'; there are: none"),
        ({"nobody": "feat"}, r"'nobody' is no node or edge type; there are \['item', 'shop'"),
        ({("user", "buys", "item"): "w"}, "is no node or edge type"),
    ],
)
def test_columns_that_are_not_there(names, message):
    with pytest.raises(ArgumentError, match=message):
        compress_features(heterogeneous(), names)


def test_a_name_of_two_edge_types():
    graph = dgl.heterograph({("a", "to", "b"): ([0], [0]), ("b", "to", "a"): ([0], [0])})
    graph.edges[("a", "to", "b")].data["w"] = torch.ones(1, 2)
    with pytest.raises(ArgumentError, match="'to' stands for several edge types"):
        compress_features(graph, {"to": "w"})
    compress_features(graph, {("a", "to", "b"): "w"})
    assert compressed(graph) == {(("a", "to", "b"), "w")}


@pytest.mark.parametrize("names", [3, [None], [["feat"]], {"user": 1}], ids=str)
def test_names_of_another_kind(names):
    with pytest.raises(ArgumentTypeError, match="names: expected names of columns"):
        compress_features(heterogeneous(), names)


def test_a_column_that_is_compressed_already():
    graph = packed_graph(homogeneous(), "feat")
    with pytest.raises(ArgumentError, match="column 'feat' of node type '_N' is compressed alr"):
        compress_features(graph, ["half", "feat"])
    assert compressed(graph) == {("_N", "feat")}


def test_a_column_with_a_gradient():
    graph = homogeneous()
    graph.edata["w"] = torch.randn(120, 2, requires_grad=True)
    with pytest.raises(ArgumentError, match="column 'w' of edge type .* requires a gradient"):
        compress_features(graph, "w")
    assert not compressed(graph)


@pytest.mark.parametrize(
    "options",
    [{"layout": "dense"}, {"codec": "zip"}, {"cache_ratio": 2}, {"cache_bytes": 20}],
    ids=str,
)
def test_all_or_nothing(options):
    graph = heterogeneous()
    before = columns(graph)
    with pytest.raises(ArgumentError):
        # 20 bytes hold rows of the first column, not of the second.
        compress_features(graph, ["size", "feat"], **options)
    assert not compressed(graph)
    assert all(columns(graph)[key] is column for key, column in before.items())


@pytest.mark.parametrize("function", [compress_features, decompress_features, feature_stats])
def test_other_graphs(function):
    with pytest.raises(ArgumentTypeError, match=r"graph: expected a dgl.DGLGraph, got dict"):
        function({})
    with pytest.raises(ArgumentError, match=r"graph: is a block, .* that it was sampled from"):
        function(dgl.to_block(homogeneous()))


def test_a_graph_on_another_device(monkeypatch):
    graph = homogeneous()
    monkeypatch.setattr(dgl.DGLGraph, "device", torch.device("cuda:0"))
    with pytest.raises(ArgumentError, match=r"graph: on cuda:0, .* before it is moved"):
        compress_features(graph)


def test_columns_of_a_moved_graph_are_left():
    graph = homogeneous()
    frame = graph._node_frames[0]
    frame._columns["feat"] = frame._columns["feat"].to("cuda:0")
    assert "is on cuda:0" in raw_columns(graph)["_N"]["feat"]


def test_dgl_is_not_installed(monkeypatch):
    for name in list(sys.modules):
        if name == "bitslab.integrations.dgl" or name.startswith("bitslab.integrations.dgl."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "dgl", None)
    with pytest.raises(MissingExtraError, match=r'pip install "bitslab\[dgl\]"'):
        importlib.import_module("bitslab.integrations.dgl")


# Which rows are hot


def test_nodes_by_their_edges():
    graph = heterogeneous()
    counts = torch.zeros(12, dtype=torch.int64)
    for etype in (FLOW, LIKE):
        for u in graph.edges(etype=etype)[0].tolist():
            counts[u] += 1
    assert torch.equal(degree_scores(graph, "user"), counts)
    assert degree_scores(graph, "item").tolist() == [0] * 7  # no sampler comes from anywhere


def test_edges_by_their_destinations():
    graph = homogeneous(torch.int32)
    _, v = graph.edges()
    scores = degree_scores(graph, ("_N", "_E", "_N"))
    for edge in range(0, 120, 7):
        node = int(v[edge])
        met, drawn_of = 1 + int(graph.out_degrees(node)), int(graph.in_degrees(node))
        assert scores[edge] == torch.tensor(met / drawn_of)


def hot(graph, type_, name, n_rows):
    """Return the rows that a cache of `n_rows` rows holds, by gathering each."""
    column = columns(graph)[type_, name]
    found = []
    for row in range(len(column)):
        hits = column.storage.stats()["cache"]["hits"]
        column.fetch(torch.tensor([row]), "cpu").wait()
        if column.storage.stats()["cache"]["hits"] > hits:
            found.append(row)
    assert len(found) == n_rows
    return found


def star() -> dgl.DGLGraph:
    """Make a graph where node 5 points at all others, and node 3 at two."""
    graph = dgl.graph(([5] * 9 + [3, 3], [0, 1, 2, 3, 4, 6, 7, 8, 9, 1, 2]), num_nodes=10)
    graph.ndata["x"] = torch.randn(10, 8)
    graph.edata["y"] = torch.randn(11, 8)
    return graph


RAW: dict[str, Any] = {"codec": "raw", "device": "cpu", "cache_bytes": 2 * 32}


@pytest.mark.parametrize(
    ("hotness", "nodes", "edges"),
    [
        # Of the destinations, 3 alone points at others: edge 3 ends there; the first of the rest.
        ("degree", [3, 5], [0, 3]),
        ({"_N": torch.arange(10)}, [8, 9], [0, 3]),
        ({"_N": -torch.arange(10.0), "_E": torch.arange(11)}, [0, 1], [9, 10]),
        (lambda graph, type_: torch.arange(10 if type_ == "_N" else 11), [8, 9], [9, 10]),
    ],
    ids=["degree", "nodes given", "both given", "function"],
)
def test_hot_rows_are_cached(hotness, nodes, edges):
    graph = packed_graph(star(), hotness=hotness, **RAW)
    assert hot(graph, "_N", "x", 2) == nodes
    assert hot(graph, ("_N", "_E", "_N"), "y", 2) == edges


def test_one_tensor_for_one_type():
    graph = packed_graph(star(), "x", hotness=torch.arange(10), **RAW)
    assert hot(graph, "_N", "x", 2) == [8, 9]
    with pytest.raises(ArgumentError, match="hotness: one tensor for columns of 2 types"):
        compress_features(star(), hotness=torch.arange(10), **RAW)


def test_hotness_is_found_once_and_only_for_a_cache():
    calls = []

    def scores(graph, type_):
        calls.append(type_)
        return torch.arange(graph.num_nodes(type_))

    graph = star()
    graph.ndata["z"] = torch.randn(10, 8)
    compress_features(graph, ["x", "z"], hotness=scores)
    assert calls == []
    compress_features(decompress_features(graph), ["x", "z"], hotness=scores, **RAW)
    assert calls == ["_N"]


@pytest.mark.parametrize(
    ("hotness", "error", "message"),
    [
        ("pagerank", ArgumentError, "'pagerank', the only name accepted is 'degree'"),
        (3, ArgumentTypeError, "expected 'degree', a tensor, a mapping or a callable, got int"),
        ({"nobody": torch.ones(3)}, ArgumentError, "'nobody' is no node or edge type"),
        (torch.ones(9), ArgumentError, r"hotness of '_N': \[9\], expected one score .* \[10\]"),
        (lambda *_: [1], ArgumentTypeError, "hotness of '_N': expected a tensor, got list"),
        (torch.full((10,), float("nan")), ArgumentError, "NaN"),
    ],
)
def test_bad_hotness(hotness, error, message):
    graph = star()
    with pytest.raises(error, match=message):
        compress_features(graph, "x", hotness=hotness, **RAW)
    assert not compressed(graph)


# The way back


def test_columns_become_plain_again():
    graph = packed_graph(heterogeneous())
    assert decompress_features(graph) is graph
    assert not compressed(graph)
    assert_same_graph(graph, heterogeneous())
    graph.nodes["user"].data["feat"][0] = 1  # tensors of their own
    assert graph.nodes["user"].data["feat"][0].tolist() == [1] * 6
    decompress_features(graph)  # nothing is left to do


def test_some_columns_become_plain_again():
    graph = packed_graph(heterogeneous())
    part = graph.subgraph({"user": [3, 1]})
    decompress_features(graph, {"user": "feat", "likes": None})
    assert compressed(graph) == ALL - {("user", "feat"), (LIKE, "w")}
    decompress_features(part, "feat")
    assert same_bits(part.nodes["user"].data["feat"], features(12, 6)[[3, 1]])
    with pytest.raises(ArgumentError, match="column 'feat' of node type 'user' is not compressed"):
        decompress_features(graph, "feat")
    with pytest.raises(ArgumentError, match="no column 'x'"):
        decompress_features(graph, "x")
    assert ("item", "feat") in compressed(graph)
