"""Small graphs, a sampler of neighbours in plain torch, and comparison bit for bit."""

from __future__ import annotations

from typing import Any

import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import BaseSampler, HeteroSamplerOutput, SamplerOutput

from bitslab.integrations.pyg import compress_features

N, E = 40, 160
WRITES, CITES = ("author", "writes", "paper"), ("paper", "cites", "paper")
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def features(n: int, width: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Make rows that pack well; among them are NaNs of their own payloads, -0.0 and infinity."""
    x = torch.randn(n, width, generator=torch.Generator().manual_seed(seed)).round().to(dtype)
    raw = x.view(INTEGERS[x.element_size()])
    raw[1, 0] = raw.new_tensor(-3)  # a NaN with a sign and nearly all bits set
    x[2, 0], x[n - 1, 0] = -0.0, float("inf")
    return x


def packed_graph(data: Any, names: Any = None, **options: Any) -> Any:
    """Compress features of a graph and return it."""
    compress_features(data, names, **options)
    return data


def homogeneous(dtype: torch.dtype = torch.float32) -> Data:
    generator = torch.Generator().manual_seed(1)
    edges = torch.randint(N, (2, E), generator=generator)
    return Data(
        x=features(N, 6, dtype),
        edge_index=edges,
        edge_attr=features(E, 3, dtype, seed=2),
        y=torch.arange(N) % 4,
        train_mask=torch.arange(N) < N // 2,
    )


def heterogeneous(dtype: torch.dtype = torch.float32) -> HeteroData:
    generator = torch.Generator().manual_seed(3)
    data = HeteroData()
    data["paper"].x = features(N, 6, dtype)
    data["paper"].y = torch.arange(N)
    data["author"].x = features(10, 5, dtype, seed=4)
    data[WRITES].edge_index = torch.stack(
        [torch.randint(n, (E // 2,), generator=generator) for n in (10, N)]
    )
    data[WRITES].edge_attr = features(E // 2, 2, dtype, seed=5)
    data[CITES].edge_index = torch.randint(N, (2, E), generator=generator)
    return data


def bits(t: torch.Tensor) -> torch.Tensor:
    """View a plain copy of a tensor as bytes."""
    assert isinstance(t, torch.Tensor)
    return t.view(t.shape).cpu().contiguous().reshape(-1).view(torch.uint8)


def same(a: Any, b: Any) -> bool:
    """Return whether two tensors have the same dtype, shape and bits."""
    return bool(a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b)))


def assert_same_graphs(a: Any, b: Any) -> None:
    """Compare everything that two graphs hold."""
    assert type(a) is type(b)
    assert len(a.stores) == len(b.stores)
    for mine, other in zip(a.stores, b.stores, strict=True):
        assert list(mine.keys()) == list(other.keys())
        for key, value in mine.items():
            if isinstance(value, torch.Tensor):
                assert same(value, other[key]), key
            else:
                assert value == other[key], key


class Neighbours(BaseSampler):  # type: ignore[misc]
    """Take up to `fanout` edges that lead to each node, two hops deep, without random numbers.

    Edges are kept ordered by target, as PyG's own sampler keeps them, so that there is an
    `edge_permutation`.
    """

    def __init__(self, data: Any, fanout: int = 3):
        self.fanout = fanout
        self.typed = isinstance(data, HeteroData)
        if self.typed:
            self.edges = {kind: data[kind].edge_index for kind in data.edge_types}
        else:
            self.edges = {("", "to", ""): data.edge_index}
        self.order = {kind: torch.argsort(e[1], stable=True) for kind, e in self.edges.items()}

    @property
    def edge_permutation(self):
        return self.order if self.typed else self.order["", "to", ""]

    def sample_from_nodes(self, index, **kwargs):
        return self._sample({index.input_type or "": index.node}, (index.input_id, None))

    def sample_from_edges(self, index, neg_sampling=None):
        ends = torch.stack([index.row, index.col])
        seeds, position = ends.unique(return_inverse=True)
        return self._sample({"": seeds}, (index.input_id, position, index.label, None))

    def _sample(self, seeds, metadata):
        nodes = {kind: ids.tolist() for kind, ids in seeds.items()}
        found: dict[Any, list[list[int]]] = {kind: [[], [], []] for kind in self.edges}
        frontier = {kind: list(ids) for kind, ids in nodes.items()}
        for _ in range(2):
            fresh: dict[Any, list[int]] = {}
            for kind, order in self.order.items():
                sources, targets = self.edges[kind][:, order]
                for node in frontier.get(kind[2], []):
                    for edge in (targets == node).nonzero().flatten()[: self.fanout].tolist():
                        known = nodes.setdefault(kind[0], [])
                        source = int(sources[edge])
                        if source not in known:
                            known.append(source)
                            fresh.setdefault(kind[0], []).append(source)
                        positions = (known.index(source), nodes[kind[2]].index(node), edge)
                        for column, position in zip(found[kind], positions, strict=True):
                            column.append(position)
            frontier = fresh
        node = {kind: torch.tensor(ids) for kind, ids in nodes.items()}
        row, col, edge = (
            {kind: torch.tensor(lists[i], dtype=torch.int64) for kind, lists in found.items()}
            for i in range(3)
        )
        if self.typed:
            return HeteroSamplerOutput(node=node, row=row, col=col, edge=edge, metadata=metadata)
        (one,) = self.edges
        return SamplerOutput(
            node=node[""], row=row[one], col=col[one], edge=edge[one], metadata=metadata
        )
