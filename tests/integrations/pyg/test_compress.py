"""compress_features: loaders, transforms and models of PyG give the same bits."""

from __future__ import annotations

import copy
import io
import json
import pickle
import re
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("torch_geometric", reason="torch-geometric is not installed")

import torch_geometric.transforms as T
from torch_geometric.data import Batch, Data, HeteroData, InMemoryDataset
from torch_geometric.loader import (
    DataLoader,
    LinkLoader,
    NeighborLoader,
    NodeLoader,
    PrefetchLoader,
    RandomNodeLoader,
)
from torch_geometric.nn import SAGEConv

from bitslab import ArgumentError, ArgumentTypeError, BitslabError, IndexRangeError
from bitslab.integrations.pyg import (
    compress_features,
    decompress_features,
    feature_stats,
    raw_columns,
)
from bitslab.integrations.pyg.hotness import hot_ids
from bitslab.tensors.feature_tensor import FeatureTensor
from tests.integrations.pyg.graphs import (
    CITES,
    WRITES,
    E,
    N,
    Neighbours,
    assert_same_graphs,
    features,
    heterogeneous,
    homogeneous,
    packed_graph,
    same,
)

MODES: dict[str, dict[str, Any]] = {
    "host": {},
    "raw": {"codec": "raw"},
    "cache": {"codec": "raw", "cache_codec": "auto", "cache_ratio": 0.3},
    "both": {"cache_ratio": 0.3},
}
ids = torch.tensor([3, 1, 2, 39])


def compressed(make=homogeneous, **options):
    return packed_graph(make(), device="cpu", **options)


def decoded(data):
    """Names of the tensors that were decoded whole."""
    stats = feature_stats(data)
    flat = stats.values() if isinstance(data, HeteroData) else [stats]
    return [name for some in flat for name, s in some.items() if s["materialised_bytes"]]


# What is compressed


@pytest.mark.drawn(16)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
)
@pytest.mark.parametrize("make", [homogeneous, heterogeneous], ids=["data", "hetero"])
def test_every_bit_comes_back(make, dtype, mode):
    data, raw = make(dtype), make(dtype)
    compress_features(data, device="cpu", **MODES[mode])
    for mine, other in zip(data.stores, raw.stores, strict=True):
        for key, value in other.items():
            floats = isinstance(value, torch.Tensor) and value.is_floating_point()
            assert isinstance(mine[key], FeatureTensor) == floats
            if floats:
                some = torch.arange(len(value)).flip(0)[::3]
                assert same(mine[key][some], value[some])
    assert not decoded(data)
    assert_same_graphs(data, raw)
    decompress_features(data)
    assert not any(isinstance(v, FeatureTensor) for store in data.stores for v in store.values())
    assert_same_graphs(data, raw)


def test_names_choose_columns_of_any_dtype():
    data = compressed(names=["edge_attr", "y"])
    assert isinstance(data.y, FeatureTensor) and isinstance(data.edge_attr, FeatureTensor)
    assert type(data.x) is torch.Tensor
    assert raw_columns(data) == {
        "x": "",
        "train_mask": "holds torch.bool, which is compressed only when it is named",
    }
    compress_features(data)
    assert sorted(feature_stats(data)) == ["edge_attr", "x", "y"]
    decompress_features(data, "y")
    assert type(data.y) is torch.Tensor and torch.equal(data.y, homogeneous().y)
    assert isinstance(data.x, FeatureTensor)
    compress_features(data)
    assert not compress_features(data).compressed  # nothing is left to do


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("x", {"paper": ["x"], "author": ["x"]}),
        ({"paper": ["x", "y"]}, {"paper": ["x", "y"]}),
        ({"author": None, WRITES: "edge_attr"}, {"author": ["x"], WRITES: ["edge_attr"]}),
        (None, {"paper": ["x"], "author": ["x"], WRITES: ["edge_attr"]}),
    ],
)
def test_names_choose_columns_by_type(names, expected):
    data = compressed(heterogeneous, names=names)
    assert {k: list(v) for k, v in feature_stats(data).items()} == expected
    decompress_features(data, names)
    assert_same_graphs(data, heterogeneous())


def test_strides_and_missing_rows_and_shared_tensors():
    wide = features(N, 12)
    data = Data(x=wide[:, ::2], z=wide[:, 6:], t=features(6, N).t(), edge_index=torch.zeros(2, 0))
    data.edge_attr = torch.zeros(0, 3)
    raw = copy.copy(data)
    compress_features(data)
    assert sorted(feature_stats(data)) == ["edge_attr", "t", "x", "z"]
    assert_same_graphs(data, raw)


def test_what_is_no_column_is_left():
    data = homogeneous()
    data.scale, data.weights = torch.tensor(2.0), torch.randn(7)
    data.embedding = torch.randn(N, 3, requires_grad=True)
    compress_features(data)
    assert sorted(feature_stats(data)) == ["edge_attr", "x"]
    assert "gradient" in raw_columns(data)["embedding"]
    assert type(data.scale) is torch.Tensor and type(data.weights) is torch.Tensor


LEFT: dict[str, tuple[Any, str]] = {
    "integers": (torch.arange(N), "holds torch.int64, which is compressed only when it is named"),
    "masks": (torch.arange(N) > 3, "holds torch.bool, which is compressed only when it is named"),
    "gradient": (torch.randn(N, 2, requires_grad=True), "requires a gradient"),
    "array": (np.ones((N, 2), np.float32), "is a NumPy ndarray, .* torch.from_numpy"),
    "sparse": (torch.eye(N).to_sparse(), "is no dense tensor"),
}


@pytest.mark.parametrize("kind", LEFT)
def test_the_report_says_what_was_left_and_why(kind):
    value, reason = LEFT[kind]
    data = Data(edge_index=torch.zeros(2, 1, dtype=torch.int64), num_nodes=N, x=value)
    typed = HeteroData({"paper": {"x": value, "num_nodes": N}})
    for each, name, raw in ((data, "x", dict), (typed, "paper.x", lambda r: r["paper"])):
        report = compress_features(each)
        assert not report.compressed and report.left.keys() == {name}
        assert re.match(reason, report.left[name])
        assert raw(raw_columns(each)) == {"x": report.left[name]}
        assert str(report) == f"left alone:\n  {name}: {report.left[name]}"
        with pytest.raises(ArgumentError, match=reason) if kind[0] not in "im" else nullcontext():
            compress_features(each, "x")


def test_a_memory_mapped_array_is_left_and_its_tensor_is_not(tmp_path):
    array = np.memmap(tmp_path / "x", np.float32, "w+", shape=(N, 3))
    array[:] = features(N, 3).numpy()
    data = Data(x=array, y=torch.arange(N), edge_index=torch.zeros(2, 1, dtype=torch.int64))
    report = compress_features(data)
    assert report.left.keys() == {"x", "y"} == raw_columns(data).keys()
    assert "NumPy memmap" in report.left["x"] and data.x is array
    data.x = torch.from_numpy(array)
    assert list(compress_features(data).compressed) == ["x"]
    assert same(data.x.clone(), features(N, 3))


def test_the_report_is_for_people_and_for_machines():
    data = heterogeneous()
    report = compress_features(data, ["x", "edge_attr"], device="cpu", cache_ratio=0.3)
    assert list(report.compressed) == ["paper.x", "author.x", "author:writes:paper.edge_attr"]
    content = json.loads(json.dumps(report.as_dict()))
    stats = feature_stats(data)
    assert content["compressed"]["paper.x"] == json.loads(json.dumps(stats["paper"]["x"]))
    lines = str(report).splitlines()
    assert lines[0].split() == "feature rows packed as raw MiB host MiB ratio cached".split()
    assert [line.split()[0] for line in lines[1:5]] == [*report.compressed, "all"]
    assert "paper.y" in report.left
    assert str(compress_features(Data())) == "no features"


def test_bag_of_words_shrinks_and_what_moves_with_it():
    generator = torch.Generator().manual_seed(6)
    x = (torch.rand(400, 512, generator=generator) < 0.01).float()
    data = packed_graph(Data(x=x, edge_index=torch.zeros(2, 1, dtype=torch.int64)))
    batch = torch.arange(0, 400, 3)
    assert same(data.x[batch], x[batch])
    stats = feature_stats(data)["x"]
    assert stats["ratio"] > 15 and stats["host_bytes"] < x.nbytes / 15
    # Of these rows; metadata, which a gather also reads, is not in it.
    assert stats["moved_bytes"] < stats["gathered_bytes"] / 15


# Hotness


def hottest(data, type_, name, hotness="degree"):
    from bitslab.integrations.pyg.columns import chosen_columns

    (column,) = [c for c, _ in chosen_columns(data, name) if c.type == type_]
    return hot_ids(data, column, hotness)


@pytest.mark.filterwarnings("ignore:Sparse (invariant checks|CSR tensor support)")
def test_degree_counts_how_often_a_node_is_a_neighbour():
    edges = torch.tensor([[4, 4, 4, 1, 1, 0], [0, 1, 2, 0, 4, 3]])
    data = Data(x=torch.zeros(5, 1), w=torch.zeros(6, 1), edge_index=edges)
    assert hottest(data, "nodes", "x").tolist() == [4, 1, 0, 2, 3]
    # Target 4 was a source three times, and one edge leads there: 4; then 1: 3; then 0: 2 / 2.
    assert hottest(data, "edges", "w").tolist() == [4, 1, 0, 2, 3, 5]
    sparse = T.ToSparseTensor(layout=torch.sparse_csr)(data.clone())
    assert hottest(sparse, "nodes", "x").tolist() == [4, 1, 0, 2, 3]
    typed = heterogeneous()
    counts = torch.bincount(typed[CITES].edge_index[0], minlength=N)
    order = hottest(typed, "paper", {"paper": "x"})
    assert counts[order].tolist() == counts.sort(descending=True).values.tolist()
    order = hottest(typed, WRITES, {WRITES: "edge_attr"})
    into = torch.bincount(typed[WRITES].edge_index[1], minlength=N)
    scores = ((1 + counts) / into)[typed[WRITES].edge_index[1]]
    assert torch.equal(scores[order], scores.sort(descending=True).values)


@pytest.mark.parametrize(
    "hotness",
    [
        torch.arange(N),
        {"nodes": torch.arange(N)},
        lambda data, type_: torch.arange(data.num_nodes) if type_ == "nodes" else None,
    ],
    ids=["tensor", "mapping", "function"],
)
def test_scores_say_what_is_cached(hotness):
    data = compressed(names="x", hotness=hotness, cache_bytes=24 * 8, codec="raw")
    assert data.x.feature.cache is not None
    data.x[torch.arange(N - 8, N)]
    assert feature_stats(data)["x"]["hit_rate"] == 1.0
    data.x[torch.arange(8)]
    assert feature_stats(data)["x"]["hit_rate"] == 0.5


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"hotness": "random"}, ArgumentError, "hotness: 'random'"),
        ({"hotness": 3}, ArgumentTypeError, "hotness: a int"),
        ({"hotness": torch.zeros(N)}, ArgumentError, "one tensor for rows of"),
        ({"hotness": {"nodes": torch.zeros(3)}}, ArgumentError, "3 scores for 40 rows of 'x'"),
        ({"cache_bytes": 5}, ArgumentError, "both"),
        ({"cache_ratio": 2.0}, ArgumentError, "cache_ratio"),
        ({"codec": "zip"}, ArgumentError, "zip"),
        ({"layout": "loose"}, ArgumentError, "layout"),
        ({"device": "moon"}, ArgumentError, "device"),
        ({"names": "z"}, ArgumentError, "'z' is not there; there are .*'edge_attr'"),
        ({"names": ["x", 3]}, ArgumentTypeError, "names: "),
        ({"names": 3}, ArgumentTypeError, "names: "),
        ({"names": {"paper": "x"}}, ArgumentError, "a Data has no types"),
        ({"names": ["x", "edge_index"]}, ArgumentError, "in the first dimension"),
        ({"names": ["x", "name"]}, ArgumentError, "'name' is a str"),
        ({"names": ["x", "odd"]}, ArgumentError, r"shape \[3\], which is not one row for each"),
        ({"names": ["x", "grown"]}, ArgumentError, "'grown' requires a gradient"),
        ({"names": ["x", "done"]}, ArgumentError, "'done' is compressed already"),
        ({"names": ["x", "sparse"]}, ArgumentError, "no dense tensor"),
    ],
)
def test_a_refusal_changes_nothing(options, error, match):
    data = homogeneous()
    data.name, data.odd = "graph", torch.zeros(3)
    data.grown, data.done = torch.zeros(N, 2, requires_grad=True), torch.zeros(N, 2)
    data.sparse = torch.eye(N).to_sparse()
    compress_features(data, "done")
    before = dict(data._store._mapping)
    with pytest.raises(error, match=match):
        compress_features(data, **({"cache_ratio": 0.5, "device": "cpu"} | options))
    assert all(data._store[key] is value for key, value in before.items())


def test_other_refusals():
    with pytest.raises(ArgumentTypeError, match="data: expected .* got builtins.dict"):
        compress_features({})
    with pytest.raises(ArgumentError, match="no type 'venue', there are"):
        compressed(heterogeneous, names={"venue": "x"})
    with pytest.raises(ArgumentError, match="'x' is not compressed"):
        decompress_features(homogeneous(), "x")
    data = Data(x=torch.zeros(N, 2))
    with pytest.raises(ArgumentError, match="'degree' needs edges"):
        compress_features(data, cache_ratio=0.5, device="cpu")


# Loaders


def loaders(data, **options):
    kind = {"input_nodes": ("paper", None)} if isinstance(data, HeteroData) else {}
    sampler = Neighbours(data)
    options = {"batch_size": 24} | kind | options
    return (
        NodeLoader(data, sampler, **options),
        NeighborLoader(data, num_neighbors=[3, 3], neighbor_sampler=sampler, **options),
    )


@pytest.mark.parametrize("mode", ["host", "both"])
@pytest.mark.parametrize("make", [homogeneous, heterogeneous], ids=["data", "hetero"])
def test_batches_of_sampled_neighbours(make, mode):
    data = compressed(make, **MODES[mode])
    for ours, theirs in zip(loaders(data), loaders(make()), strict=True):
        batches = list(ours)
        assert len(batches) == 2
        for batch, expected in zip(batches, theirs, strict=True):
            assert_same_graphs(batch, expected)
            assert not any(isinstance(v, FeatureTensor) for s in batch.stores for v in s.values())
    assert not decoded(data)


@pytest.mark.parametrize("per_worker", [True, False])
@pytest.mark.parametrize("make", [homogeneous, heterogeneous], ids=["data", "hetero"])
def test_batches_from_a_worker(make, per_worker):
    data = compressed(make, cache_ratio=0.3)
    options = {"num_workers": 1, "filter_per_worker": per_worker}
    ours, _ = loaders(data, **options)
    theirs, _ = loaders(make())
    for batch, expected in zip(ours, theirs, strict=True):
        assert_same_graphs(batch, expected)
        first = batch["paper"].x if isinstance(batch, HeteroData) else batch.x
        assert first.is_shared() == per_worker  # it was gathered into shared memory
    assert not decoded(data)


def link_loader(data):
    return LinkLoader(data, Neighbours(data), data.edge_index[:, :20], batch_size=10)


def random_loader(data):
    generator = torch.Generator().manual_seed(0)
    return RandomNodeLoader(data, num_parts=3, shuffle=True, generator=generator)


@pytest.mark.parametrize(
    "load",
    [link_loader, random_loader, lambda data: PrefetchLoader(loaders(data)[0], "cpu")],
    ids=["link", "random", "prefetch"],
)
def test_other_loaders(load):
    data = compressed()
    for batch, expected in zip(load(data), load(homogeneous()), strict=True):
        assert_same_graphs(batch, expected)
    assert not decoded(data)


def test_random_parts_of_a_typed_graph():
    data = compressed(heterogeneous)
    ours, theirs = random_loader(data), random_loader(heterogeneous())
    for batch, expected in zip(ours, theirs, strict=True):
        assert_same_graphs(batch, expected)


@pytest.mark.parametrize("workers", [0, 1])
def test_many_graphs_are_batched_and_taken_apart(workers):
    raw = [homogeneous() for _ in range(4)]
    graphs = [compressed() for _ in range(4)]
    ours, theirs = (DataLoader(g, 2, num_workers=workers) for g in (graphs, raw))
    for batch, expected in zip(ours, theirs, strict=True):
        assert_same_graphs(batch, expected)
        for one, other in zip(batch.to_data_list(), expected.to_data_list(), strict=True):
            assert_same_graphs(one, other)


class Graphs(InMemoryDataset):  # type: ignore[misc]
    def __init__(self, graphs):
        super().__init__()
        self.data, self.slices = self.collate(graphs)


@pytest.mark.filterwarnings("ignore:It is not recommended to directly access the internal storage")
def test_a_dataset_in_memory_is_compressed_as_one():
    sizes = (3, 5, 8)
    raw = [Data(x=features(n + 4, 3), edge_index=torch.tensor([[0], [1]])) for n in sizes]
    dataset = Graphs(raw)
    compress_features(dataset._data)
    assert isinstance(dataset._data.x, FeatureTensor)
    for i in (2, 0, 1):
        assert_same_graphs(dataset.get(i), raw[i])
    assert not decoded(dataset._data)
    batch = Batch.from_data_list([dataset[2], dataset[0]])
    assert same(batch.x, torch.cat([raw[2].x, raw[0].x]))


# What else is done to graphs


def test_subgraphs_decode_their_rows_alone():
    data, raw = compressed(), homogeneous()
    for subset in (raw.train_mask, ids):
        assert_same_graphs(data.subgraph(subset), raw.subgraph(subset))
    some = torch.tensor([5, 4])
    assert same(data.edge_subgraph(some).edge_attr, raw.edge_attr[some])
    typed, raw_typed = compressed(heterogeneous), heterogeneous()
    chosen = {"paper": ids, "author": torch.tensor([1, 0])}
    assert_same_graphs(typed.subgraph(chosen), raw_typed.subgraph(chosen))
    assert not decoded(data) and not decoded(typed)


@pytest.mark.parametrize("make", [homogeneous, heterogeneous], ids=["data", "hetero"])
def test_copies_of_graphs(make):
    data, raw = compressed(make), make()
    for shared in (copy.copy(data), data.to("cpu"), data.cpu(), data.contiguous(), data.detach()):
        for mine, other in zip(shared.stores, data.stores, strict=True):
            for key, value in mine.items():
                if isinstance(value, FeatureTensor):
                    assert value.feature is other[key].feature
    own = copy.deepcopy(data)
    assert feature_stats(own).keys() == feature_stats(data).keys()
    assert_same_graphs(own, raw)
    for plain in (data.clone(), pickle.loads(pickle.dumps(data)), through_a_file(data)):
        assert_same_graphs(plain, raw)
        assert not feature_stats(plain)  # tensors of its own
    assert data.share_memory_() is data and not decoded(data)
    assert data.is_cuda is False


def through_a_file(data):
    file = io.BytesIO()
    torch.save(data, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "transform",
    [
        T.ToUndirected(),
        T.NormalizeFeatures(),
        T.AddSelfLoops(attr="edge_attr", fill_value=1.0),
        T.RemoveIsolatedNodes(),
        T.OneHotDegree(60),
        T.ToDevice("cpu"),
        T.Constant(),
    ],
    ids=lambda t: type(t).__name__,
)
def test_transforms_give_the_same(transform):
    assert_same_graphs(transform(compressed()), transform(homogeneous()))


def test_a_typed_graph_becomes_one_of_one_type():
    def make():
        data = heterogeneous()
        data["author"].x = features(10, 6, seed=4)
        del data[WRITES].edge_attr
        return data

    data, raw = packed_graph(make()).to_homogeneous(), make().to_homogeneous()
    assert_same_graphs(data, raw)
    assert_same_graphs(packed_graph(data).to_heterogeneous(), raw.to_heterogeneous())


def test_a_layer_over_the_whole_graph_decodes_once_and_says_so():
    torch.manual_seed(0)
    layer = SAGEConv(6, 4)
    data, raw = compressed(names="x"), homogeneous()
    data.x, raw.x = packed_graph(Data(x=raw.x[4:36])).x, raw.x[4:36]  # no NaN, no infinity
    data.edge_index = raw.edge_index = raw.edge_index % 32
    outputs = []
    for graph in (data, raw):
        out = layer(graph.x, graph.edge_index)
        out.square().sum().backward()
        outputs += [out, layer.lin_l.weight.grad]
        layer.zero_grad()
    assert torch.equal(outputs[0], outputs[2]) and torch.equal(outputs[1], outputs[3])
    stats = feature_stats(data)["x"]
    assert stats["materialised_bytes"] == raw.x.nbytes
    assert any("materialised" in note for note in stats["notes"])


def test_features_are_replaced_not_written_to():
    data = compressed()
    with pytest.raises(BitslabError, match="read-only"):
        data.x[0] = 1.0
    with pytest.raises(BitslabError, match="read-only"):
        data.x += 1
    with pytest.raises(BitslabError, match="gradient"):
        data.x.requires_grad_()
    assert_same_graphs(data, homogeneous())
    data.x = torch.ones(N, 2)
    assert list(feature_stats(data)) == ["edge_attr"]
    with pytest.raises(IndexRangeError):
        data.edge_attr[torch.tensor([E])]
    loader = NodeLoader(data, Neighbours(data), torch.arange(4))
    assert same(next(iter(loader)).x, torch.ones(4, 2)[:1].expand(len(next(iter(loader)).x), 2))


def test_ids_beyond_the_features_are_reported_by_the_loader():
    data = compressed()
    sampler = Neighbours(data, fanout=2)
    data.x = packed_graph(Data(x=features(8, 2))).x
    for seeds in (torch.arange(1), torch.arange(8)):  # fewer ids than rows, and more
        with pytest.raises(IndexRangeError, match="out of range for 8 rows"):
            list(NodeLoader(data, sampler, seeds, batch_size=8))


@pytest.mark.gpu
def test_graphs_go_to_a_gpu_and_pinned_memory():
    for make in (homogeneous, heterogeneous):
        data, raw = compressed(make), make()
        assert_same_graphs(compressed(make).to("cuda"), raw)
        assert data.pin_memory() is data
        assert_same_graphs(data, raw)
        assert_same_graphs(packed_graph(make().to("cuda"), device="cuda"), raw)
        batches = PrefetchLoader(loaders(compressed(make))[0])
        for batch, expected in zip(batches, loaders(raw)[0], strict=True):
            assert_same_graphs(batch, expected)
