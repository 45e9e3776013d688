"""Graphs with features of many kinds, and comparison bit for bit."""

from __future__ import annotations

from typing import Any

import dgl
import torch

from bitslab.integrations.dgl import CompressedColumn, compress_features
from tests.helpers import same_bits

FLOW = ("user", "follows", "user")
LIKE = ("user", "likes", "item")
SOLD = ("shop", "sells", "item")


def features(n_rows: int, *row_shape: int, seed: int = 0, dtype=torch.float32) -> torch.Tensor:
    """Make numbers that pack well, and among them special values: NaN, -0.0, inf."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((n_rows, *row_shape), generator=generator).round().to(dtype)
    flat = x.view(-1)
    odd = torch.tensor([float("nan"), -0.0, float("inf"), -float("nan")], dtype=dtype)
    flat[: len(odd)] = odd[: flat.numel()]
    return x


def homogeneous(idtype=torch.int64) -> Any:
    """Make a graph of 30 nodes and 120 edges; every node has an edge in and one out."""
    generator = torch.Generator().manual_seed(7)
    ring = torch.arange(30)
    u = torch.cat([ring, torch.randint(30, (90,), generator=generator)])
    v = torch.cat([(ring + 1) % 30, torch.randint(30, (90,), generator=generator)])
    graph = dgl.graph((u, v), num_nodes=30, idtype=idtype)
    graph.ndata["feat"] = features(30, 9)
    graph.ndata["half"] = features(30, 3, 2, seed=1, dtype=torch.float16)
    graph.ndata["label"] = torch.arange(30) % 4
    graph.edata["w"] = features(120, 5, seed=2)
    graph.edata["one"] = torch.rand(120, generator=generator, dtype=torch.float64) + 0.5
    return graph


def heterogeneous() -> Any:
    """Make a graph of three node types and three edge types, one of which has no edges."""
    graph = dgl.heterograph(
        {
            FLOW: (torch.arange(12), torch.arange(1, 13) % 12),
            LIKE: (torch.arange(12).repeat(2), torch.arange(24) % 7),
            SOLD: (torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)),
        },
        num_nodes_dict={"user": 12, "item": 7, "shop": 2},
    )
    graph.nodes["user"].data["feat"] = features(12, 6)
    graph.nodes["item"].data["feat"] = features(7, 6, seed=1)
    graph.nodes["shop"].data["size"] = features(2, 3, seed=2, dtype=torch.bfloat16)
    graph.edges[LIKE].data["w"] = features(24, 4, seed=3)
    graph.edges[FLOW].data["w"] = features(12, 4, seed=4)
    graph.nodes["user"].data["label"] = torch.arange(12) % 3
    return graph


def packed_graph(graph: Any, names: Any = None, **options: Any) -> Any:
    """Compress features of a graph and return it."""
    compress_features(graph, names, **options)
    return graph


def columns(graph: Any) -> dict[tuple[Any, str], Any]:
    """Return every column of a graph by type and name."""
    types = [*graph.ntypes, *graph.canonical_etypes]
    frames = [*graph._node_frames, *graph._edge_frames]
    return {
        (type_, name): frame._columns[name]
        for type_, frame in zip(types, frames, strict=True)
        for name in frame
    }


def compressed(graph: Any) -> set[tuple[Any, str]]:
    """Return the names of the compressed columns of a graph."""
    return {key for key, col in columns(graph).items() if isinstance(col, CompressedColumn)}


def assert_same(a: Any, b: Any) -> None:
    """Compare results of DGL: graphs, tensors, numbers, and sequences of them, bit for bit."""
    if isinstance(a, torch.Tensor):
        assert same_bits(a, b)
    elif isinstance(a, dgl.DGLGraph):
        assert_same_graph(a, b)
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_same(one, other)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        assert_same(list(a.values()), list(b.values()))
    else:
        assert a == b


def assert_same_graph(a: Any, b: Any) -> None:
    """Compare two graphs: structure, schemes and every column."""
    assert a.ntypes == b.ntypes
    assert a.canonical_etypes == b.canonical_etypes
    assert a.idtype == b.idtype
    assert a.is_block == b.is_block
    for etype in a.canonical_etypes:
        assert_same(a.edges(etype=etype), b.edges(etype=etype))
    first, second = columns(a), columns(b)
    assert first.keys() == second.keys()
    for key, column in first.items():
        assert column.scheme == second[key].scheme
        assert len(column) == len(second[key])
        assert column.dtype == second[key].dtype
        assert same_bits(column.data, second[key].data), key
