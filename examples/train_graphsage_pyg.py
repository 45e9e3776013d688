"""Train GraphSAGE or GAT with PyG from features that are compressed, and compare with raw ones."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from graphsage.datasets import DatasetError, Graph, from_edges
from graphsage.modes import COMPRESSED, Column, compress_options, placed
from graphsage.options import GAT_HEADS
from graphsage.sampler import NeighbourSampler, Sampled
from graphsage.script import Framework, run
from graphsage.training import Fetched, Seeds, Trainer
from torch_geometric.data import Data
from torch_geometric.loader import NodeLoader
from torch_geometric.nn import GATConv, SAGEConv
from torch_geometric.sampler import BaseSampler, NodeSamplerInput, SamplerOutput
from torch_geometric.utils import scatter

from bitslab.integrations.pyg import compress_features


class Network(torch.nn.Module):
    """GraphSAGE with means, or GAT; edge features join each layer by the mean of a node's edges."""

    def __init__(self, model: str, widths: list[int], edge_columns: int) -> None:
        super().__init__()
        pairs = list(zip(widths, widths[1:], strict=False))
        self.attends = model == "gat"
        if self.attends:
            heads = [*[GAT_HEADS] * (len(pairs) - 1), 1]
            self.convs = torch.nn.ModuleList(
                GATConv((a, a), b // n, heads=n, add_self_loops=False)
                for (a, b), n in zip(pairs, heads, strict=True)
            )
        else:
            self.convs = torch.nn.ModuleList(SAGEConv((a, a), b) for a, b in pairs)
        self.edges = torch.nn.ModuleList(
            torch.nn.Linear(edge_columns, b) for _, b in pairs if edge_columns
        )

    def forward(
        self, hops: Hops, x: torch.Tensor, edge_rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        h = x.float()
        for i, conv in enumerate(self.convs):
            # Layer by layer fewer nodes are needed: those nearest to the seeds come first.
            links, source, targets = hops.layers[i]
            pair = h, h[: len(links)]
            h = conv(pair, torch.stack([source, targets]) if self.attends else links)
            if edge_rows is not None:
                rows = edge_rows[: len(targets)].float()
                mean = scatter(rows, targets, dim_size=len(links), reduce="mean")
                h = h + self.edges[i](mean)
            if i + 1 < len(self.convs):
                h = h.relu()
        return h


class Hops:
    """The sampled edges as each layer needs them; `source` and `target` are ordered by target."""

    def __init__(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        nodes_per_hop: list[int],
        edges_per_hop: list[int],
    ) -> None:
        ones = torch.ones(len(source), device=source.device)
        counts = torch.bincount(target, minlength=sum(nodes_per_hop))
        begins = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        self.layers = []
        for layer in range(len(edges_per_hop)):
            used = len(edges_per_hop) - layer
            n_targets, n_nodes = sum(nodes_per_hop[:used]), sum(nodes_per_hop[: used + 1])
            n_edges = sum(edges_per_hop[:used])
            # Sparse, so that no row is made for each edge. Not checked, because the sources of a
            # node need no order here, and torch's check wants one.
            links = torch.sparse_csr_tensor(
                begins[: n_targets + 1],
                source[:n_edges],
                ones[:n_edges],
                (n_targets, n_nodes),
                check_invariants=False,
            )
            self.layers.append((links, source[:n_edges], target[:n_edges]))

        self.parts = (source, target, ones, begins)

    def record_stream(self, stream: Any) -> None:
        for part in self.parts:
            part.record_stream(stream)


class SeededSampler(BaseSampler):  # type: ignore[misc]
    """Adapts a sampler in plain torch to PyG's loaders; PyG's own samplers need pyg-lib."""

    def __init__(self, sampler: NeighbourSampler, batches: Sequence[Seeds]) -> None:
        self.sampler, self.batches = sampler, batches
        self.size = len(batches[0].ids)

    def sample_from_nodes(self, index: NodeSamplerInput, **_: Any) -> SamplerOutput:
        batch = self.batches[int(index.input_id[0]) // self.size]
        sampled = self.sampler.sample(index.node, batch.seed)
        return SamplerOutput(
            sampled.nodes,
            sampled.source,
            sampled.target,
            sampled.edges,
            num_sampled_nodes=sampled.nodes_per_hop,
            num_sampled_edges=sampled.edges_per_hop,
            metadata=(index.input_id, index.time),
        )

    def sample_from_edges(self, index: Any, neg_sampling: Any = None) -> SamplerOutput:
        raise NotImplementedError("this sampler begins at nodes")


class SampleFirst(NodeLoader):  # type: ignore[misc]
    """A loader of PyG that leaves fetching to its user, so that each can be timed."""

    def filter_fn(self, out: SamplerOutput) -> SamplerOutput:
        return out

    def fetch(self, out: SamplerOutput) -> Data:
        return super().filter_fn(out)


class PygTrainer(Trainer):
    """Samples and fetches with PyG's NodeLoader; on a GPU both are done there, without it."""

    def prepare(self) -> dict[str, Column]:
        graph = self.graph
        compress = self.mode in COMPRESSED
        self.data = Data(
            x=graph.x if compress else placed(graph.x, self.mode),
            edge_index=torch.stack([graph.indices, graph.targets]),
            y=graph.y,
        )
        names = ["x"]
        if graph.e is not None:
            self.data.edge_attr = graph.e if compress else placed(graph.e, self.mode)
            names.append("edge_attr")
        if compress:
            compress_features(
                self.data,
                names,
                device=self.device,
                group=self.ranks.group,
                **compress_options(self.mode, self.options.cache_ratio),
            )
        links = (graph.indptr.to(self.device), graph.indices.to(self.device))
        self.sampler = NeighbourSampler(*links, self.options.fanouts)
        self.labels = graph.y.to(self.device)
        rows = {name: self.data[name] for name in names}
        return {name: Column(getattr(row, "feature", row)) for name, row in rows.items()}

    def make_model(self) -> torch.nn.Module:
        hidden = [self.options.hidden] * (len(self.options.fanouts) - 1)
        widths = [self.graph.x.shape[1], *hidden, self.graph.n_classes]
        edge_columns = 0 if self.graph.e is None else self.graph.e.shape[1]
        return Network(self.options.model, widths, edge_columns)

    def sampled(self, batches: Sequence[Seeds]) -> Iterator[Any]:
        if self.device.type == "cuda":
            for batch in batches:
                ids = batch.ids.to(self.device)
                yield ids, self.sampler.sample(ids, batch.seed)
            return
        self.loader = SampleFirst(
            self.data,
            SeededSampler(self.sampler, batches),
            input_nodes=torch.cat([batch.ids for batch in batches]),
            batch_size=len(batches[0].ids),
            num_workers=self.options.workers,
            filter_per_worker=False,
        )
        yield from self.loader

    def fetch(self, sampled: Any) -> Fetched:
        if self.device.type == "cuda":
            return self.fetch_on_gpu(*sampled)
        batch = self.loader.fetch(sampled)
        source, target = batch.edge_index
        hops = Hops(source, target, batch.num_sampled_nodes, batch.num_sampled_edges)
        rows = [batch[name] for name in self.columns]
        counts = {name: len(batch[name]) for name in self.columns}
        return Fetched((hops, *rows), batch.y[: batch.batch_size], counts)

    def fetch_on_gpu(self, seeds: torch.Tensor, sampled: Sampled) -> Fetched:
        ids = {"x": sampled.nodes, "edge_attr": sampled.edges}
        rows = [column.fetch(ids[name], self.device) for name, column in self.columns.items()]
        hops = Hops(sampled.source, sampled.target, sampled.nodes_per_hop, sampled.edges_per_hop)
        counts = {name: len(ids[name]) for name in self.columns}
        return Fetched((hops, *rows), self.labels[seeds], counts)


def own_loader(name: str, root: Path | None) -> Graph:
    """Load one of PyG's datasets: one of Planetoid, a class, or Class:name as in Amazon:Photo."""
    from torch_geometric import datasets

    planetoid = {"citeseer": "CiteSeer", "cora": "Cora", "pubmed": "PubMed"}
    known = {key.lower(): value for key, value in vars(datasets).items() if isinstance(value, type)}
    class_name, _, which = name.partition(":")
    if name.lower() in planetoid:
        class_name, which = "Planetoid", planetoid[name.lower()]
    named = known.get(class_name.lower())
    if named is None:
        raise DatasetError(
            f"--dataset {name}: not digits, normal, citeseer, cora or pubmed, and "
            f"torch_geometric.datasets has no class {class_name}"
        )
    parameters = inspect.signature(named).parameters
    given: dict[str, str] = {"name": which} if which else {}
    if "name" in parameters and not which and parameters["name"].default is inspect.Parameter.empty:
        raise DatasetError(
            f"--dataset {name}: {named.__name__} has several graphs; give --dataset "
            f"{named.__name__}:NAME, with a name that its documentation lists"
        )
    if "root" in parameters:
        folder = Path.home() / ".cache" / "torch_geometric" / (which or named.__name__)
        given["root"] = str(root or folder)
    try:
        data = named(**given)[0]
    except Exception as error:  # what a download or a reader raises has no common class
        raise DatasetError(
            f"--dataset {name}: it did not load ({type(error).__name__}: {error}); PyG downloads "
            "its files, which needs the network; offline, give --root FOLDER (for citeseer and "
            "cora: of Planetoid files) or --dataset digits"
        ) from error
    if not isinstance(data, Data) or data.x is None or data.y is None:
        raise DatasetError(
            f"--dataset {name}: no graph with one kind of nodes that have features and labels"
        )
    masks = [
        data[mask].nonzero().flatten() if mask in data and data[mask].ndim == 1 else None
        for mask in ("train_mask", "val_mask")
    ]
    source, target = data.edge_index
    return from_edges(name, source, target, data.x, data.y.flatten().long(), *masks)


FRAMEWORK = Framework("PyG", PygTrainer, own_loader)


def main(arguments: Sequence[str] | None = None) -> int:
    # The warning that CSR tensors are in beta, and one that torch 2.11 gives without checks.
    warnings.filterwarnings("ignore", message="Sparse (CSR|invariant)")
    return run(
        FRAMEWORK,
        __doc__ or "",
        "train_graphsage_pyg.py",
        'bitslab.integrations.pyg.compress_features(data, ["x"], ...)',
        arguments,
    )


if __name__ == "__main__":
    sys.exit(main())
