"""A neighbour sampler in plain torch: no compiled extras, CPU or GPU, the same bits every time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

ALL = -1
_MIX = 0xD1342543DE82EF95 - (1 << 64)  # as an int64, which wraps around


@dataclass
class Sampled:
    """The neighbourhood of some seed nodes; tensors are int64 on the sampler's device.

    `nodes` ``[n]`` are ids in the graph, the seeds first, then those that each hop found.
    `source` and `target` ``[m]`` are the ends of the sampled edges as positions in `nodes`, those
    of the first hop first; `edges` ``[m]`` are the edges' numbers in the graph.
    """

    nodes: torch.Tensor
    source: torch.Tensor
    target: torch.Tensor
    edges: torch.Tensor
    nodes_per_hop: list[int]
    edges_per_hop: list[int]


class NeighbourSampler:
    """Draws neighbours without replacement, hop by hop, evenly.

    What is drawn for a node depends on nothing but the seed, the hop and the node's number: not on
    the other nodes of the batch, the thread, or the device.

    Parameters
    ----------
    indptr, indices : torch.Tensor
        int64 ``[N + 1]`` and ``[E]``: for each node, the nodes with an edge to it. Their device is
        where the sampler works.
    fanouts : sequence of int
        Neighbours for each node, hop by hop from the seeds; ALL for all of them. As in PyG, a hop
        goes on from the nodes that the last one found first.
    """

    def __init__(self, indptr: torch.Tensor, indices: torch.Tensor, fanouts: Sequence[int]) -> None:
        if not fanouts or any(fanout < 1 and fanout != ALL for fanout in fanouts):
            raise ValueError(f"fanouts: {list(fanouts)}, accepted are numbers from 1 and {ALL}")
        self.indptr, self.indices, self.fanouts = indptr, indices, list(fanouts)

    def sample(self, seeds: torch.Tensor, seed: int) -> Sampled:
        """Sample around some nodes.

        Parameters
        ----------
        seeds : torch.Tensor
            int64 ``[s]`` on the sampler's device, none of them twice.
        seed : int
            Of this draw; give each batch one of its own.
        """
        # Position of each node of the graph among the sampled ones.
        position = torch.full((len(self.indptr) - 1,), -1, dtype=torch.int64, device=seeds.device)
        position[seeds] = torch.arange(len(seeds), device=seeds.device)
        nodes, source, target, edges = [seeds], [], [], []
        frontier, total = seeds, len(seeds)
        for hop, fanout in enumerate(self.fanouts):
            to, drawn = self._draw(frontier, fanout, seed * len(self.fanouts) + hop)
            neighbours = self.indices[drawn]
            # -2 marks the new ones; nonzero gives each once, in order, without sorting.
            fresh = neighbours[position[neighbours] < 0]
            position[fresh] = -2
            found = (position == -2).nonzero().flatten()
            position[found] = torch.arange(total, total + len(found), device=seeds.device)
            source.append(position[neighbours])
            target.append(position[frontier][to])
            edges.append(drawn)
            nodes.append(found)
            frontier, total = found, total + len(found)
        return Sampled(
            torch.cat(nodes),
            torch.cat(source),
            torch.cat(target),
            torch.cat(edges),
            [len(part) for part in nodes],
            [len(part) for part in edges],
        )

    def _draw(
        self, nodes: torch.Tensor, fanout: int, seed: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw edges to some nodes: positions in `nodes` and numbers of edges, by node.

        Floyd's way to draw k of n without a repeat: for j from n - k to n - 1, draw a number up to
        j, and take j itself if that was drawn before. Its cost does not depend on n, which for the
        nodes that a sampler meets is large.
        """
        begins = self.indptr[nodes]
        degrees = self.indptr[nodes + 1] - begins
        if fanout == ALL:
            fanout = int(degrees.max()) if len(nodes) else 0
            taken = torch.arange(fanout, device=nodes.device).expand(len(nodes), fanout)
        else:
            steps = torch.arange(fanout, device=nodes.device)
            small = (degrees <= fanout)[:, None]
            # Nodes with no more than `fanout` neighbours take them all: 0, 1, 2, ...
            last = torch.where(small, steps, degrees[:, None] - fanout + steps)
            numbers = _hash(nodes[:, None], steps, seed * fanout) % (last + 1)
            taken = torch.where(small, last, numbers)
            for step in range(1, fanout):
                number = taken[:, step]
                repeated = (taken[:, :step] == number[:, None]).any(1)
                taken[:, step] = torch.where(repeated, last[:, step], number)
        there = taken < degrees[:, None]
        to = torch.arange(len(nodes), device=nodes.device)[:, None].expand_as(taken)[there]
        return to, (begins[:, None] + taken)[there]


def _hash(numbers: torch.Tensor, steps: torch.Tensor, seed: int) -> torch.Tensor:
    """Mix numbers and steps with a seed to even 62-bit ones (splitmix64), int64 alike."""
    mixed = numbers * -7046029254386353131 + (steps + seed) * _MIX + 1
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        # >> keeps the sign, so the bits shifted in are masked.
        mixed = (mixed ^ ((mixed >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return (mixed ^ ((mixed >> 31) & ((1 << 33) - 1))) & ((1 << 62) - 1)
