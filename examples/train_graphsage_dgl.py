"""Train GraphSAGE or GAT with DGL from features that are compressed, and compare with raw ones."""

from __future__ import annotations

import inspect
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("DGLBACKEND", "pytorch")  # otherwise DGL writes a config file

import dgl  # noqa: E402
import torch  # noqa: E402
from dgl import function  # noqa: E402
from dgl.nn.pytorch import GATConv, SAGEConv  # noqa: E402
from graphsage.datasets import DatasetError, Graph, from_edges  # noqa: E402
from graphsage.modes import COMPRESSED, Column, compress_options, placed  # noqa: E402
from graphsage.options import GAT_HEADS  # noqa: E402
from graphsage.script import Framework, run  # noqa: E402
from graphsage.training import Fetched, Seeds, Trainer  # noqa: E402

from bitslab.integrations.dgl import compress_features  # noqa: E402


class Network(torch.nn.Module):
    """GraphSAGE with means, or GAT; edge features join each layer by the mean of a node's edges."""

    def __init__(self, model: str, widths: list[int], edge_columns: int) -> None:
        super().__init__()
        pairs = list(zip(widths, widths[1:], strict=False))
        if model == "gat":
            heads = [*[GAT_HEADS] * (len(pairs) - 1), 1]
            self.convs = torch.nn.ModuleList(
                GATConv(a, b // n, n, allow_zero_in_degree=True)
                for (a, b), n in zip(pairs, heads, strict=True)
            )
        else:
            self.convs = torch.nn.ModuleList(SAGEConv(a, b, "mean") for a, b in pairs)
        self.edges = torch.nn.ModuleList(
            torch.nn.Linear(edge_columns, b) for _, b in pairs if edge_columns
        )

    def forward(self, blocks: list[Any], x: torch.Tensor, *edge_rows: torch.Tensor) -> torch.Tensor:
        h = x.float()
        for i, (block, conv) in enumerate(zip(blocks, self.convs, strict=True)):
            h = conv(block, h).flatten(1)  # of GAT's heads
            if edge_rows:
                h = h + self.edges[i](mean_of_edges(block, edge_rows[i].float()))
            if i + 1 < len(blocks):
                h = h.relu()
        return h


def mean_of_edges(block: Any, rows: torch.Tensor) -> torch.Tensor:
    with block.local_scope():
        block.edata["e"] = rows
        block.update_all(function.copy_e("e", "m"), function.mean("m", "mean"))
        mean: torch.Tensor = block.dstdata["mean"]
        return mean


class SeededSampler(dgl.dataloading.NeighborSampler):  # type: ignore[misc]
    """DGL's sampler, which draws the same for a batch each time it is asked."""

    def sample(self, g: Any, batch: Seeds, exclude_eids: Any = None) -> Any:
        # DGL has a generator for each thread, and its threads share work as they come.
        threads = dgl.utils.get_num_threads()
        dgl.utils.set_num_threads(1)
        try:
            dgl.seed(batch.seed)
            return super().sample(g, batch.ids, exclude_eids)
        finally:
            dgl.utils.set_num_threads(threads)


class Batches(list[Seeds]):
    """A dataset for DGL's loader: one item a batch, with the device of its ids."""

    device = torch.device("cpu")


class DglTrainer(Trainer):
    """Samples with DGL's DataLoader, and fetches as it does, from the columns of the graph."""

    def prepare(self) -> dict[str, Column]:
        graph = self.graph
        self.g = dgl.graph(("csc", (graph.indptr, graph.indices, [])))
        self.g.create_formats_()
        compress = self.mode in COMPRESSED
        self.g.ndata["feat"] = graph.x if compress else placed(graph.x, self.mode)
        names = ["feat"]
        if graph.e is not None:
            self.g.edata["weight"] = graph.e if compress else placed(graph.e, self.mode)
            names.append("weight")
        if compress:
            compress_features(
                self.g,
                names,
                device=self.device,
                group=self.ranks.group,
                **compress_options(self.mode, self.options.cache_ratio),
            )
        self.storages = {
            name: (self.g.get_node_storage if name == "feat" else self.g.get_edge_storage)(name)
            for name in names
        }
        return {name: Column(storage.storage) for name, storage in self.storages.items()}

    def make_model(self) -> torch.nn.Module:
        hidden = [self.options.hidden] * (len(self.options.fanouts) - 1)
        widths = [self.graph.x.shape[1], *hidden, self.graph.n_classes]
        edge_columns = 0 if self.graph.e is None else self.graph.e.shape[1]
        return Network(self.options.model, widths, edge_columns)

    def sampled(self, batches: Sequence[Seeds]) -> Iterator[Any]:
        # DGL names fanouts from the outermost hop to the seeds.
        sampler = SeededSampler(self.options.fanouts[::-1])
        return iter(
            dgl.dataloading.DataLoader(
                self.g, Batches(batches), sampler, num_workers=self.options.workers
            )
        )

    def fetch(self, sampled: Any) -> Fetched:
        input_nodes, seeds, blocks = sampled
        asked = [("feat", input_nodes)]
        if "weight" in self.storages:
            asked += [("weight", block.edata[dgl.EID]) for block in blocks]
        # All begin before one is waited for, as in DGL's loader.
        under_way = [self.storages[name].fetch(ids, self.device) for name, ids in asked]
        rows = [part.wait() if hasattr(part, "wait") else part for part in under_way]
        counts = dict.fromkeys(self.storages, 0)
        for name, ids in asked:
            counts[name] += len(ids)
        return Fetched(
            ([block.to(self.device) for block in blocks], *rows),
            self.graph.y[seeds].to(self.device),
            counts,
        )


def own_loader(name: str, root: Path | None) -> Graph:
    """Load one of DGL's datasets by the name of its class, or that name's beginning."""
    classes = {
        key.lower(): getattr(dgl.data, key) for key in dir(dgl.data) if key.endswith("Dataset")
    }
    named = next(
        (
            classes[key]
            for key in (name.lower(), f"{name}graphdataset".lower(), f"{name}dataset".lower())
            if key in classes
        ),
        None,
    )
    if named is None:
        raise DatasetError(
            f"--dataset {name}: not digits, normal, citeseer, cora or pubmed, and dgl.data has "
            f"no {name}, {name}GraphDataset or {name}Dataset"
        )
    try:
        folder = {"raw_dir": str(root)} if root is not None else {}
        keeps_files = "raw_dir" in inspect.signature(named).parameters
        graph = (named(**folder) if keeps_files else named())[0]
    except Exception as error:  # what a download or a reader raises has no common class
        raise DatasetError(
            f"--dataset {name}: {named.__name__} did not load ({type(error).__name__}: {error}); "
            "it downloads its files, which needs the network; offline, give --root FOLDER (for "
            "citeseer and cora: of Planetoid files) or --dataset digits"
        ) from error
    if not isinstance(graph, dgl.DGLGraph) or not {"feat", "label"} <= graph.ndata.keys():
        raise DatasetError(
            f"--dataset {name}: {named.__name__} is no graph with one kind of nodes that have "
            "features and labels"
        )
    masks = [
        graph.ndata[mask].bool().nonzero().flatten() if mask in graph.ndata else None
        for mask in ("train_mask", "val_mask")
    ]
    source, target = graph.edges()
    data = graph.ndata
    return from_edges(
        name, source.long(), target.long(), data["feat"], data["label"].long(), *masks
    )


FRAMEWORK = Framework("DGL", DglTrainer, own_loader)


def main(arguments: Sequence[str] | None = None) -> int:
    # The caller chooses the cores of a process.
    warnings.filterwarnings("ignore", message="Dataloader CPU affinity")
    return run(
        FRAMEWORK,
        __doc__ or "",
        "train_graphsage_dgl.py",
        'bitslab.integrations.dgl.compress_features(graph, ["feat"], ...)',
        arguments,
    )


if __name__ == "__main__":
    sys.exit(main())
