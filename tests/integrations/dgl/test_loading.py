"""DGL's samplers and loaders on compressed graphs: every row that arrives is the raw one."""

from __future__ import annotations

from typing import Any

import dgl
import dgl.dataloading as dl
import pytest
import torch

from bitslab import IndexRangeError
from bitslab.integrations.dgl import CompressedColumn, feature_stats
from tests.helpers import same_bits, take
from tests.integrations.dgl.graphs import (
    FLOW,
    LIKE,
    compressed,
    heterogeneous,
    homogeneous,
    packed_graph,
)

SEEDS = torch.arange(0, 30, 3)


def loader(graph, sampler, seeds=SEEDS, **options) -> Any:
    return dl.DataLoader(graph, seeds, sampler, batch_size=4, **options)


def assert_rows_of(raw, part) -> int:
    """Compare each feature of a sampled graph with rows of the raw graph; count the features."""
    found = 0
    sides = [part.srcdata, part.dstdata] if part.is_block else [part.ndata]
    for data in sides:
        ids = data[dgl.NID] if dgl.NID in data else torch.arange(raw.num_nodes())
        for name in set(data) - {dgl.NID, dgl.EID}:
            assert same_bits(data[name], take(raw.ndata[name], ids)), name
            found += 1
    for name in set(part.edata) - {dgl.EID, "edge_weights"}:
        assert same_bits(part.edata[name], take(raw.edata[name], part.edata[dgl.EID])), name
        found += 1
    return found


def nodes_and_edges(**more):
    return {"prefetch_node_feats": ["feat", "half"], "prefetch_edge_feats": ["w"], **more}


BLOCKS = {
    "neighbour": lambda: dl.NeighborSampler([3, 2]),
    "neighbour, prefetched": lambda: dl.NeighborSampler(
        [3, 2], prefetch_node_feats=["feat", "half"], prefetch_labels=["label"]
    ),
    "edges prefetched": lambda: dl.NeighborSampler([2], prefetch_edge_feats=["w", "one"]),
    "by probability": lambda: dl.NeighborSampler([3], prob="one"),
    "full": lambda: dl.MultiLayerFullNeighborSampler(2, prefetch_node_feats=["feat"]),
    "labor": lambda: dl.LaborSampler([3, 2], prefetch_node_feats=["feat"]),
    "labor, by probability": lambda: dl.LaborSampler([3], prob="one"),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks(name):
    raw, graph = homogeneous(), packed_graph(homogeneous())
    n_batches = 0
    for inputs, outputs, blocks in loader(graph, BLOCKS[name]()):
        n_batches += 1
        assert torch.equal(blocks[0].srcdata[dgl.NID], inputs)
        assert torch.equal(blocks[-1].dstdata[dgl.NID], outputs)
        assert sum(assert_rows_of(raw, block) for block in blocks) >= 1
    assert n_batches == 3
    assert len(compressed(graph)) == 4
    # Probabilities are read whole by DGL, as any column that a sampler is given; features are not.
    assert feature_stats(graph)["_N"]["feat"]["materialised_bytes"] == 0


GRAPHS = {"prefetch_ndata": ["feat", "half"], "prefetch_edata": ["w"]}
WHOLE: dict[str, Any] = {
    "shadow": lambda g: loader(g, dl.ShaDowKHopSampler([3, 2], **nodes_and_edges())),
    "saint, nodes": lambda g: loader(g, dl.SAINTSampler("node", 8, **GRAPHS)),
    "saint, edges": lambda g: loader(g, dl.SAINTSampler("edge", 8)),
    "saint, walks": lambda g: loader(g, dl.SAINTSampler("walk", (3, 2), **GRAPHS)),
}


@pytest.mark.parametrize("name", WHOLE)
def test_subgraphs(name):
    raw, graph = homogeneous(), packed_graph(homogeneous())
    n_batches = 0
    for batch in WHOLE[name](graph):
        n_batches += 1
        part = batch[-1] if isinstance(batch, (list, tuple)) else batch
        assert assert_rows_of(raw, part) >= 3
    assert n_batches >= 3
    assert len(compressed(graph)) == 4


def test_clusters(tmp_path):
    raw, graph = homogeneous(), packed_graph(homogeneous())
    sampler = dl.ClusterGCNSampler(graph, 3, cache_path=str(tmp_path / "clusters"), **GRAPHS)
    parts = list(dl.DataLoader(graph, torch.arange(3), sampler, batch_size=1))
    assert sum(part.num_nodes() for part in parts) == 30
    for part in parts:
        assert assert_rows_of(raw, part) == 5


@pytest.mark.parametrize("negative", [None, "uniform", "global"])
def test_edge_prediction(negative):
    raw, graph = homogeneous(), packed_graph(homogeneous())
    samplers = {
        "uniform": dl.negative_sampler.Uniform(2),
        "global": dl.negative_sampler.GlobalUniform(2, replace=True),
    }
    sampler = dl.as_edge_prediction_sampler(
        dl.NeighborSampler([3, 2], prefetch_node_feats=["feat"]),
        negative_sampler=samplers.get(negative),
        prefetch_labels=["w"],
        exclude="self",
    )
    for inputs, pair, *negatives, blocks in loader(graph, sampler, torch.arange(0, 120, 11)):
        assert same_bits(blocks[0].srcdata["feat"], take(raw.ndata["feat"], inputs))
        assert same_bits(pair.edata["w"], take(raw.edata["w"], pair.edata[dgl.EID]))
        assert_rows_of(raw, pair)
        assert len(negatives) == (negative is not None)


def test_heterogeneous_graphs():
    raw, graph = heterogeneous(), packed_graph(heterogeneous())
    sampler = dl.NeighborSampler(
        [3, 2],
        prefetch_node_feats={"user": ["feat"], "item": ["feat"]},
        prefetch_edge_feats={LIKE: ["w"], FLOW: ["w"]},
    )
    seeds = {"item": torch.arange(7), "user": torch.tensor([1, 5])}
    for inputs, _, blocks in loader(graph, sampler, seeds):
        for ntype, ids in inputs.items():
            if ntype != "shop":
                got = blocks[0].srcnodes[ntype].data["feat"]
                assert same_bits(got, take(raw.nodes[ntype].data["feat"], ids))
        for block in blocks:
            for etype in (LIKE, FLOW):
                edges = block.edges[etype].data
                assert same_bits(edges["w"], take(raw.edges[etype].data["w"], edges[dgl.EID]))
    assert feature_stats(graph)["user"]["feat"]["materialised_bytes"] == 0


def test_int32_graphs():
    graph = packed_graph(homogeneous(torch.int32))
    sampler = dl.NeighborSampler([3], prefetch_node_feats=["feat"])
    for inputs, _, blocks in loader(graph, sampler, SEEDS.int()):
        assert inputs.dtype == torch.int32
        assert same_bits(blocks[0].srcdata["feat"], take(homogeneous().ndata["feat"], inputs))


@pytest.mark.parametrize("prefetch", [True, False])
def test_workers(prefetch):
    raw, graph = homogeneous(), packed_graph(homogeneous())
    graph = dgl.to_half(graph)  # so that conversions that wait travel too
    half = dgl.to_half(raw)
    sampler = dl.NeighborSampler([3, 2], **(nodes_and_edges() if prefetch else {}))
    n_rows = 0
    for inputs, _, blocks in loader(graph, sampler, num_workers=1):
        assert sum(assert_rows_of(half, block) for block in blocks) >= 2
        n_rows += len(inputs)
    # Workers send ids; the rows are decoded here, and no others.
    assert feature_stats(graph)["_N"]["feat"]["gathered_rows"] >= n_rows
    assert feature_stats(graph)["_N"]["feat"]["materialised_bytes"] == 0


def test_a_spawned_worker_shares_the_rows():
    graph = packed_graph(homogeneous(), ["feat"])
    sampler = dl.ShaDowKHopSampler([2])
    batches = loader(graph, sampler, num_workers=1, multiprocessing_context="spawn")
    for _, _, part in batches:
        assert assert_rows_of(homogeneous(), part) >= 2


def test_prefetch_thread():
    raw, graph = homogeneous(), packed_graph(homogeneous())
    sampler = dl.NeighborSampler([3], **nodes_and_edges())
    batches = loader(graph, sampler)
    batches.use_prefetch_thread = True  # DGL makes one for a GPU only; on a CPU it works as well
    assert sum(assert_rows_of(raw, blocks[0]) for *_, blocks in batches) == 24


def test_errors_of_a_prefetch_thread_arrive():
    graph = packed_graph(homogeneous())
    batches = loader(graph, dl.NeighborSampler([3], prefetch_node_feats=["nothing"]))
    batches.use_prefetch_thread = True
    with pytest.raises(KeyError, match="nothing"):
        next(iter(batches))


def test_a_loader_over_a_subgraph_decodes_what_it_needs():
    raw = homogeneous()
    graph = packed_graph(homogeneous()).subgraph(torch.arange(29, 9, -1))
    sampler = dl.NeighborSampler([2], prefetch_node_feats=["feat"])
    for inputs, _, blocks in loader(graph, sampler, torch.arange(5)):
        ids = graph.ndata[dgl.NID][inputs]
        assert same_bits(blocks[0].srcdata["feat"], take(raw.ndata["feat"], ids))
    assert isinstance(graph.get_node_storage("feat"), CompressedColumn)


@pytest.mark.parametrize("prefetch", [True, False])
def test_gradients_reach_a_feature_that_wants_them(prefetch):
    gradients = []
    for graph in (homogeneous(), packed_graph(homogeneous())):
        # DGL cannot prefetch a plain column that requires a gradient.
        fetched = isinstance(graph.get_node_storage("feat"), CompressedColumn) and prefetch
        names = {"prefetch_node_feats": ["feat"]} if fetched else {}
        x = graph.ndata["feat"].requires_grad_()
        for _, _, blocks in loader(graph, dl.MultiLayerFullNeighborSampler(1, **names)):
            (blocks[0].srcdata["feat"] * 2).sum().backward()
        (dgl.to_double(graph.subgraph([3, 4])).ndata["feat"] * 3).sum().backward()
        gradients.append(x.grad)
    assert int((gradients[0] >= 2).all(1).sum()) >= 24  # the seeds and their neighbours
    assert torch.equal(*gradients)


def test_columns_are_fetched_together():
    graph = packed_graph(homogeneous())
    ids = torch.tensor([4, 4, 0])
    futures = [graph.get_node_storage(name).fetch(ids, "cpu") for name in ("feat", "half")]
    futures.append(graph.get_edge_storage("w").fetch(ids, torch.device("cpu"), pin_memory=False))
    raw = homogeneous()
    wanted = [raw.ndata["feat"], raw.ndata["half"], raw.edata["w"]]
    for future, x in zip(futures, wanted, strict=True):
        assert same_bits(future.wait(), take(x, ids))


def test_a_cache_serves_hot_rows():
    raw = homogeneous()
    graph = packed_graph(homogeneous(), "feat", cache_ratio=0.3, device="cpu")
    sampler = dl.NeighborSampler([3], prefetch_node_feats=["feat"])
    n_rows = 0
    for inputs, _, blocks in loader(graph, sampler):
        assert same_bits(blocks[0].srcdata["feat"], take(raw.ndata["feat"], inputs))
        n_rows += len(inputs)
    stats = feature_stats(graph)["_N"]["feat"]
    assert stats["cache"]["hits"] + stats["cache"]["misses"] == stats["gathered_rows"] == n_rows
    assert stats["cache"]["cached_rows"] >= 30 * 0.3 - 1
    assert 0 < stats["hit_rate"] == stats["cache"]["hits"] / n_rows


RANGE = r"is out of range for 30 rows \(accepted are 0 to 29\)"


@pytest.mark.parametrize("of", ["column", "subgraph", "subsubgraph", "converted"])
@pytest.mark.parametrize("bad", [[0, 30], [-1], [2, -31]], ids=str)
def test_ids_beyond_the_table_are_refused_with_one_range(of, bad):
    graph = packed_graph(homogeneous())
    if of == "converted":
        graph = dgl.to_half(graph)
    for _ in range(of.count("sub")):
        graph = graph.subgraph(torch.arange(30))
    column = graph.get_node_storage("feat")
    ids = torch.tensor(bad)
    named = rf"index {bad[-1]} at position {len(bad) - 1} {RANGE}"
    for read in (
        lambda: column.fetch(ids, "cpu").wait(),
        lambda: column[ids],
        lambda: column.subcolumn(ids).data,
        lambda: column.subcolumn(ids).fetch(torch.tensor([0]), "cpu"),
        lambda: graph.nodes[ids].data["feat"],
        lambda: column.fetch(ids.int(), "cpu").wait(),
    ):
        with pytest.raises(IndexRangeError, match=f"^(indices|rowids): {named}$"):
            read()
