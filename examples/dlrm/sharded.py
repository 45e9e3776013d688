"""DLRM whose tables are divided between ranks, and the loop that trains it."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from common.ranks import Ranks, local_rank  # next to this package
from common.report import Report
from common.reproducible import drawn_seed
from torch.nn import functional

from bitslab.distributed import AdaptiveBound

from .auc import auc
from .clicks import Batch, Clicks
from .exchanges import DIRECTIONS, STAGES, make_exchange
from .model import Dlrm
from .tables import Bags, TableOptions, Tables, Weights
from .torchrec_tables import CollectionTables
from .training import OPTIMIZERS


@dataclass
class ShardedRun:
    """Results of training with one way of exchanging, of all ranks together.

    Parameters
    ----------
    way : str
        How rows crossed.
    losses : list of float
        Of each step, the mean of the ranks.
    auc, test_loss : float
        Of the lines kept back.
    seconds : float
        Of all steps.
    tables : dict of str to dict
        Bytes that crossed of each table, and its class where bounds are adaptive.
    stages : dict of str to dict
        By direction, seconds of each stage.
    steps : list of dict
        Raw and moved bytes forward of each step, its seconds on the first rank, and what bounds
        were multiplied by.
    """

    way: str
    losses: list[float]
    auc: float
    test_loss: float
    seconds: float
    tables: dict[str, dict[str, Any]]
    stages: dict[str, dict[str, float]]
    steps: list[dict[str, float]] = field(default_factory=list)

    def total(self, what: str) -> float:
        """Return bytes of all tables."""
        return float(sum(counts[what] for counts in self.tables.values()))

    @property
    def ratios(self) -> dict[str, float]:
        """By direction, how much smaller what crossed is."""
        return {"forward": ratio_of(self.total), "backward": ratio_of(self.total, "backward_")}

    def as_dict(self) -> dict[str, Any]:
        return {
            "way": self.way,
            "losses": self.losses,
            "auc": self.auc,
            "test_loss": self.test_loss,
            "seconds": self.seconds,
            "ratio": self.ratios,
            "tables": self.tables,
            "stages": self.stages,
            "steps": self.steps,
        }


def ratio_of(bytes_of: Callable[[str], float], prefix: str = "") -> float:
    """Return raw by moved bytes, 1 where none moved.

    A plain exchange sends as many gradients as rows; of those that are summed by row first only the
    sums are counted, so that the raw bytes are those of the rows.
    """
    moved = bytes_of(f"{prefix}moved_bytes")
    return bytes_of("raw_bytes") / moved if moved else 1.0


def owners_of(table_rows: dict[str, int], ranks: int) -> dict[str, int]:
    """Return the rank of each table: the largest first, each to the rank with the fewest rows."""
    rows, owners = [0] * ranks, {}
    for name in sorted(table_rows, key=lambda name: (-table_rows[name], name)):
        owners[name] = rows.index(min(rows))
        rows[owners[name]] += table_rows[name]
    return owners


class ShardedTables(Tables):
    """Whole tables on one rank each; an exchange of its own for each.

    Every rank reads the ids of all lines, so that only rows cross.
    """

    def __init__(
        self,
        table_rows: dict[str, int],
        weights: Weights,
        options: argparse.Namespace,
        ranks: Ranks,
        way: str,
        bound: AdaptiveBound | None,
    ) -> None:
        self.ranks, self.row_ids = ranks, options.row_ids
        self.owners = owners_of(table_rows, ranks.size)
        kept = TableOptions(width=options.embedding_dim, dtype=torch.float32)
        super().__init__(table_rows, weights, device_of(options), kept)
        self.exchange = make_exchange(way, self.names, self.width, bound, options.codec)

    def make(self, weights: Weights) -> torch.nn.Module:
        mine = [name for name in self.table_rows if self.owners[name] == self.ranks.rank]
        return Bags(
            {
                name: torch.nn.EmbeddingBag.from_pretrained(
                    weights(name, self.table_rows[name]).to(self.device), freeze=False, mode="sum"
                )
                for name in mine
            }
        )

    def look_up(self, batch: Batch) -> torch.Tensor:
        """Return the sums of bags of this rank's lines of a batch of all ranks, ``[B, T, D]``."""
        sizes = part_sizes(len(batch.labels), self.ranks.size)
        inputs, send, receive, row_ids = {}, {}, {}, {}
        for name, (ids, offsets) in zip(self.names, batch.bags, strict=True):
            receive[name] = [0] * len(sizes)
            receive[name][self.owners[name]] = sizes[self.ranks.rank]
            if self.owners[name] != self.ranks.rank:
                grads = torch.is_grad_enabled()
                inputs[name] = torch.empty(0, self.width, device=self.device, requires_grad=grads)
                send[name] = [0] * len(sizes)
                continue
            rows = self.module.get_submodule(f"embedding_bags.{name}")(ids, offsets)
            if rows.requires_grad:
                # Each rank's loss is a mean of its own lines.
                rows.register_hook(lambda gradient: gradient / len(sizes))
            inputs[name], send[name] = rows, sizes
            if self.row_ids and len(ids) == len(batch.labels):
                row_ids[name] = ids  # one id for each line
        found = self.exchange.exchange_tables(inputs, receive, send, row_ids=row_ids)
        return torch.stack([found[name] for name in self.names], 1)

    def stats(self) -> dict[str, Any]:
        """Return what this rank sent."""
        return self.exchange.stats()


class TorchrecShardedTables(CollectionTables):
    """TorchRec's collection in a DistributedModelParallel, table-wise."""

    def __init__(
        self,
        table_rows: dict[str, int],
        weights: Weights,
        options: argparse.Namespace,
        ranks: Ranks,
        way: str,
        bound: AdaptiveBound | None,
    ) -> None:
        self.ranks, self.way, self.bound, self.row_ids = ranks, way, bound, options.row_ids
        self.codec = options.codec
        self.owners = owners_of(table_rows, ranks.size)
        self.sent_rows = dict.fromkeys(DIRECTIONS, 0)
        kept = TableOptions(width=options.embedding_dim, dtype=torch.float32)
        super().__init__(table_rows, weights, device_of(options), kept)

    def make(self, weights: Weights) -> torch.nn.Module:
        from torchrec.distributed import DistributedModelParallel
        from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
        from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
        from torchrec.distributed.types import ShardingPlan

        from bitslab.integrations.torchrec import compress_communication

        plain = super().make(weights)
        model = torch.nn.ModuleDict({"ebc": plain})
        sharder = EmbeddingBagCollectionSharder(qcomm_codecs_registry=_registry(self.way))
        size = self.ranks.size
        part = construct_module_sharding_plan(
            plain,
            {name: table_wise(rank=rank) for name, rank in self.owners.items()},
            sharder,
            local_size=size,
            world_size=size,
            device_type=self.device.type,
        )
        for sharding in part.values():
            sharding.compute_kernel = "dense"  # the optimizers are those of the other tables
        # Weights are loaded below: sharded modules draw their own.
        state = {f"ebc.{key}": value.clone() for key, value in plain.state_dict().items()}
        made: torch.nn.Module = DistributedModelParallel(
            model, plan=ShardingPlan({"ebc": part}), sharders=[sharder], device=self.device
        )
        own = made.state_dict()
        for key, value in own.items():
            for shard in value.local_shards():
                shard.tensor.copy_(state[key])
        made.load_state_dict(own)
        self.report = None
        if self.way in ("lossless", "adaptive"):
            self.report = compress_communication(
                made, self.bound, row_ids=self.row_ids, codec=self.codec
            )
        return made

    def look_up(self, batch: Batch) -> torch.Tensor:
        """Return the sums of bags of this rank's lines of a batch of all ranks, ``[B, T, D]``."""
        sizes = part_sizes(len(batch.labels), self.ranks.size)
        begin = sum(sizes[: self.ranks.rank])
        collection: Any = self.module.get_submodule("module.ebc")
        found = collection(_part(self, batch, begin, sizes[self.ranks.rank]))
        pooled = found.wait() if hasattr(found, "wait") else found
        others = sum(sizes) - sizes[self.ranks.rank]
        mine = sum(owner == self.ranks.rank for owner in self.owners.values())
        self.sent_rows["forward"] += others * mine
        if torch.is_grad_enabled():
            back = sizes[self.ranks.rank] * (len(self.owners) - mine)
            self.sent_rows["backward"] += back
        by_name = [pooled[name] for name in self.names]
        return torch.stack(by_name, 1)

    def stats(self) -> dict[str, Any]:
        """Return what this rank sent; where bitslab does not count, by arithmetic."""
        if self.report is not None:
            (stats,) = self.report.stats().values()
            return stats
        # TorchRec's bytes have a scale and a least number, of 4 bytes each, for 32 of them.
        int8_bytes = self.width // 32 * 40
        row_bytes = {"raw": 4 * self.width, "fp16": 2 * self.width, "int8": int8_bytes}
        counts = {}
        for prefix, rows in zip(("", "backward_"), self.sent_rows.values(), strict=True):
            counts[f"{prefix}raw_bytes"] = rows * 4 * self.width
            counts[f"{prefix}moved_bytes"] = rows * row_bytes[self.way]
        return {"forward": {}, "backward": {}, "tables": {"all": counts}}


def _registry(way: str) -> Any:
    """Return TorchRec's own codecs for halves and bytes."""
    if way not in ("fp16", "int8"):
        return None
    from torchrec.distributed.fbgemm_qcomm_codec import (
        CommType,
        QCommsConfig,
        get_qcomm_codecs_registry,
    )

    kind = CommType.FP16 if way == "fp16" else CommType.INT8
    return get_qcomm_codecs_registry(QCommsConfig(forward_precision=kind, backward_precision=kind))


def _part(tables: CollectionTables, batch: Batch, begin: int, size: int) -> Any:
    """Return some lines of a batch as TorchRec has them."""
    bags = []
    for ids, offsets in batch.bags:
        ends = torch.cat([offsets, offsets.new_tensor([len(ids)])])
        first, last = int(ends[begin]), int(ends[begin + size])
        bags.append((ids[first:last], offsets[begin : begin + size] - first))
    lines = slice(begin, begin + size)
    return tables.keyed(Batch(batch.dense[lines], batch.labels[lines], bags))


def part_sizes(lines: int, ranks: int) -> list[int]:
    """Return how many lines of a batch each rank has."""
    return [len(part) for part in torch.arange(lines).tensor_split(ranks)]


class ShardedTrainer:
    """Trains DLRM with tables on one rank each and perceptrons on all.

    Parameters
    ----------
    clicks : Clicks
        The same on every rank.
    tables : ShardedTables or TorchrecShardedTables
        The embeddings.
    options : argparse.Namespace
        Of the script.
    ranks : Ranks
        Who trains.
    """

    def __init__(
        self,
        clicks: Clicks,
        tables: ShardedTables | TorchrecShardedTables,
        options: argparse.Namespace,
        ranks: Ranks,
    ) -> None:
        self.clicks, self.tables, self.options, self.ranks = clicks, tables, options, ranks
        torch.manual_seed(options.seed)
        self.device = device_of(options)
        self.model = Dlrm(tables, clicks.dense.shape[1], options.bottom, options.top).to(
            self.device
        )
        for_tables, for_perceptrons = OPTIMIZERS["adagrad"]
        self.perceptrons = self.model.perceptrons()
        self.optimizers = [for_perceptrons(self.perceptrons, lr=options.lr)]
        mine = [parameter for parameter in tables.module.parameters() if parameter.requires_grad]
        if mine:
            self.optimizers.append(for_tables(mine, lr=options.lr))

    def train(self, way: str, bound: AdaptiveBound | None, report: Report | None) -> ShardedRun:
        """Train all epochs and test; return what all ranks found."""
        losses: list[torch.Tensor] = []
        steps: list[dict[str, float]] = []
        seconds = 0.0
        epochs = range(1, self.options.epochs + 1)
        n_steps = len(self.clicks.epoch(self.options.batch_size, torch.Generator())) * len(epochs)
        before = self._forward_bytes()
        for epoch in epochs:
            generator = torch.Generator().manual_seed(drawn_seed(self.options.seed, epoch))
            for lines in self.clicks.epoch(self.options.batch_size, generator):
                batch = self.clicks.batch(lines)
                self._wait()
                begin = time.perf_counter()
                losses.append(self._step(batch.to(self.device)))
                self._wait()
                took = time.perf_counter() - begin
                seconds += took
                now = self._forward_bytes()
                step = {"raw_bytes": now[0] - before[0], "moved_bytes": now[1] - before[1]}
                step["seconds"] = took
                before = now
                if bound is not None and bound.schedule is not None:
                    step["factor"] = bound.schedule(len(steps))
                steps.append(step)
                if report:
                    report(len(losses), n_steps)
        stats = self.tables.stats()
        test_loss, area = self._test()
        found = self._gathered({"stats": stats, "seconds": seconds, "steps": steps})
        means = self.ranks.summed([float(loss) / self.ranks.size for loss in losses], CPU)
        return ShardedRun(
            way,
            means,
            area,
            test_loss,
            max(part["seconds"] for part in found),
            _tables_of([part["stats"]["tables"] for part in found]),
            _stages_of([part["stats"] for part in found]),
            steps=[
                _summed(parts) for parts in zip(*(part["steps"] for part in found), strict=True)
            ],
        )

    def _wait(self) -> None:
        """Wait for a GPU, so that steps are measured as a whole."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _step(self, batch: Batch) -> torch.Tensor:
        lines = self._lines(batch)
        self.model.train()
        logits = self.model.scored(batch.dense[lines], self.tables.look_up(batch))
        loss = functional.binary_cross_entropy_with_logits(logits, batch.labels[lines])
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        gradients = torch.cat([_gradient(parameter).flatten() for parameter in self.perceptrons])
        if self.ranks.group is not None:
            dist.all_reduce(gradients, group=self.ranks.group)
        parts = torch.split(gradients / self.ranks.size, [p.numel() for p in self.perceptrons])
        for parameter, part in zip(self.perceptrons, parts, strict=True):
            parameter.grad = part.view_as(parameter)
        for optimizer in self.optimizers:
            optimizer.step()
        return loss.detach()

    def _test(self) -> tuple[float, float]:
        """Return the mean loss and the AUC of the lines kept back."""
        self.model.eval()
        logits = []
        with torch.no_grad():
            for lines in self.clicks.tested(self.options.batch_size):
                batch = self.clicks.batch(lines).to(self.device)
                mine = self._lines(batch)
                scored = self.model.scored(batch.dense[mine], self.tables.look_up(batch))
                logits.append(torch.cat(self._gathered(scored.cpu())))
        labels = self.clicks.labels[self.clicks.n_trained :]
        scores = torch.cat(logits)
        loss = functional.binary_cross_entropy_with_logits(scores, labels)
        return float(loss), auc(labels, scores)

    def _lines(self, batch: Batch) -> slice:
        sizes = part_sizes(len(batch.labels), self.ranks.size)
        begin = sum(sizes[: self.ranks.rank])
        return slice(begin, begin + sizes[self.ranks.rank])

    def _forward_bytes(self) -> tuple[float, float]:
        tables = self.tables.stats()["tables"].values()
        raw, moved = (sum(part[what] for part in tables) for what in ("raw_bytes", "moved_bytes"))
        return raw, moved

    def _gathered(self, part: Any) -> list[Any]:
        """Return what each rank has."""
        parts: list[Any] = [part] * self.ranks.size
        if self.ranks.group is not None:
            dist.all_gather_object(parts, part, group=self.ranks.group)
        return parts


CPU = torch.device("cpu")


def device_of(options: argparse.Namespace) -> torch.device:
    """Return where this rank computes."""
    return torch.device("cuda", local_rank()) if options.device == "cuda" else CPU


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _summed(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the bytes of all ranks; the factor is the same on all."""
    total = {name: sum(part[name] for part in parts) for name in ("raw_bytes", "moved_bytes")}
    return {**parts[0], **total}


def _tables_of(parts: Sequence[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return the bytes that all ranks sent of each table, and the class that its rank found."""
    found: dict[str, dict[str, Any]] = {}
    for name, counts in parts[0].items():
        found[name] = {
            what: sum(part[name][what] for part in parts)
            for what in counts
            if what.endswith("_bytes")
        }
        classes = [part[name].get("class") for part in parts]
        found[name]["class"] = next((kind for kind in classes if kind), None)
    return found


def _stages_of(parts: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the seconds of each stage, of all ranks together."""
    return {
        direction: {
            stage: sum(part[direction].get(stage, 0.0) for part in parts) for stage in STAGES
        }
        for direction in DIRECTIONS
    }
