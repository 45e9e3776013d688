"""The sampler in plain torch: neighbours without repeats, the same for a seed, evenly drawn."""

from __future__ import annotations

import pytest
import torch
from graphsage.datasets import Graph, from_edges
from graphsage.sampler import ALL, NeighbourSampler


def made(n_nodes: int = 80, n_edges: int = 900, seed: int = 0) -> Graph:
    """Make a graph whose last node has no neighbours."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randint((n_nodes - 1) ** 2, (n_edges,), generator=generator).unique()
    zeros = torch.zeros(n_nodes, dtype=torch.int64)
    return from_edges(
        "made", keys // (n_nodes - 1), keys % (n_nodes - 1), torch.zeros(n_nodes, 1), zeros
    )


@pytest.mark.parametrize("fanouts", [[25, 10], [3, 2, 1], [ALL, 2], [ALL]], ids=str)
def test_neighbourhood_is_part_of_the_graph(fanouts: list[int]) -> None:
    graph = made()
    seeds = torch.tensor([79, 5, 40])
    sampled = NeighbourSampler(graph.indptr, graph.indices, fanouts).sample(seeds, 3)
    nodes = sampled.nodes
    assert torch.equal(nodes[:3], seeds)
    assert len(nodes.unique()) == len(nodes) == sum(sampled.nodes_per_hop)
    assert len(sampled.edges.unique()) == len(sampled.edges) == sum(sampled.edges_per_hop)
    assert torch.equal(graph.indices[sampled.edges], nodes[sampled.source])
    assert torch.equal(graph.targets[sampled.edges], nodes[sampled.target])
    assert torch.equal(sampled.target.sort().values, sampled.target)
    degrees = graph.indptr.diff()
    begin = found = 0
    for hop, fanout in enumerate(fanouts):
        hop_nodes = nodes[found : found + sampled.nodes_per_hop[hop]]
        targets = sampled.target[begin : begin + sampled.edges_per_hop[hop]]
        drawn = torch.bincount(targets - found, minlength=len(hop_nodes))
        wanted = degrees[hop_nodes] if fanout == ALL else degrees[hop_nodes].clamp(max=fanout)
        assert torch.equal(drawn, wanted)
        begin, found = begin + sampled.edges_per_hop[hop], found + len(hop_nodes)
        fresh = nodes[found : found + sampled.nodes_per_hop[hop + 1]]
        assert set(fresh.tolist()) == set(nodes[sampled.source[:begin]].tolist()) - set(
            nodes[:found].tolist()
        )


def test_same_for_a_seed_and_other_for_another() -> None:
    graph = made()
    seeds = torch.arange(20)
    drawn = [
        NeighbourSampler(graph.indptr, graph.indices, [3, 2]).sample(seeds, seed).edges
        for seed in (5, 5, 6)
    ]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0].sort().values, drawn[2].sort().values)


def test_a_node_gets_the_same_neighbours_in_any_batch() -> None:
    graph = made()
    sampler = NeighbourSampler(graph.indptr, graph.indices, [4])
    whole = sampler.sample(torch.arange(40), 9)
    parts = [sampler.sample(ids, 9) for ids in torch.arange(40).split(20)]
    assert torch.equal(whole.edges, torch.cat([part.edges for part in parts]))


@pytest.mark.parametrize("by", ["node", "seed"])
def test_every_neighbour_is_as_likely(by: str) -> None:
    n, fanout, draws = 12, 5, 6000
    indptr = torch.arange(draws + 1) * n
    sampler = NeighbourSampler(indptr, torch.arange(draws * n) % draws, [fanout])
    if by == "node":
        edges = sampler.sample(torch.arange(draws), 1).edges
    else:
        ids, seeds = torch.arange(20), range(draws // 20)
        edges = torch.cat([sampler.sample(ids, seed).edges for seed in seeds])
    drawn = (edges % n).view(draws, fanout)
    share = fanout / n
    counts = torch.bincount(drawn.flatten(), minlength=n)
    # Five standard deviations of a binomial count.
    assert ((counts - draws * share).abs() < 5 * (draws * share * (1 - share)) ** 0.5).all()
    both = share * (fanout - 1) / (n - 1)
    pairs = torch.bincount((drawn[:, :, None] * n + drawn[:, None, :]).flatten(), minlength=n * n)
    pairs = pairs.view(n, n)[~torch.eye(n, dtype=torch.bool)]
    assert ((pairs - draws * both).abs() < 5 * (draws * both * (1 - both)) ** 0.5).all()


def test_no_seeds() -> None:
    graph = made()
    for fanout in (2, ALL):
        sampler = NeighbourSampler(graph.indptr, graph.indices, [fanout])
        sampled = sampler.sample(torch.empty(0, dtype=torch.int64), 0)
        assert sampled.nodes_per_hop == [0, 0]


@pytest.mark.parametrize("fanouts", [[], [0], [3, -2]], ids=str)
def test_refused_fanouts(fanouts: list[int]) -> None:
    graph = made()
    with pytest.raises(ValueError, match="fanouts"):
        NeighbourSampler(graph.indptr, graph.indices, fanouts)


@pytest.mark.gpu
def test_gpu_draws_what_the_cpu_draws() -> None:
    graph = made()
    seeds = torch.arange(20)
    sampled = NeighbourSampler(graph.indptr, graph.indices, [3, 2]).sample(seeds, 4)
    on_gpu = NeighbourSampler(graph.indptr.cuda(), graph.indices.cuda(), [3, 2]).sample(
        seeds.cuda(), 4
    )
    for name in ("nodes", "source", "target", "edges"):
        assert torch.equal(getattr(on_gpu, name).cpu(), getattr(sampled, name))
