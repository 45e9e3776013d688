"""TorchRec's own sharded models, each beside one whose messages are compressed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan

from bitslab.integrations.torchrec import CommunicationReport, compress_communication
from tests.integrations.torchrec.batches import bag_configs, batch, configs
from tests.integrations.torchrec.ranks import OPTIMIZERS, WORLD, device, gather

#: Of training: the second one sees what the first one changed.
STEPS = 2
TABLES = ("t1", "t2", "t3")
PLANS: dict[str, dict[str, Callable[..., Any]]] = {
    "table_wise": {"t1": table_wise(rank=0), "t2": table_wise(rank=1), "t3": table_wise(rank=0)},
    "one_rank": {t: table_wise(rank=1) for t in TABLES},
    "column_wise": {
        "t1": column_wise(ranks=[0, 1]),
        "t2": column_wise(ranks=[1, 0]),
        "t3": column_wise(ranks=[0, 1, 0, 1]),
    },
    "row_wise": {t: row_wise() for t in TABLES},
    "mixed": {"t1": row_wise(), "t2": table_wise(rank=1), "t3": column_wise(ranks=[1, 0])},
    "columns": {t: column_wise(ranks=[1, 0]) for t in TABLES},
}


def sharded(
    plan: dict[str, Callable[..., Any]],
    *,
    sequences: bool = False,
    optimizer: str = "sgd",
    make: Callable[[], Any] | None = None,
    is_weighted: bool = False,
    registry: Any = None,
) -> DistributedModelParallel:
    """Return TorchRec's own sharded model; the tables have the same rows whatever the plan."""
    tables = (make or (configs if sequences else bag_configs))()
    inner: Any
    if sequences:
        inner = EmbeddingCollection(tables=tables)
    else:
        inner = EmbeddingBagCollection(tables=tables, is_weighted=is_weighted)
    model = torch.nn.ModuleDict({"tables": inner})
    kind: Any = EmbeddingCollectionSharder if sequences else EmbeddingBagCollectionSharder
    sharder = kind(fused_params=OPTIMIZERS[optimizer][0], qcomm_codecs_registry=registry)
    part = construct_module_sharding_plan(
        inner, plan, sharder, local_size=WORLD, world_size=WORLD, device_type=device().type
    )
    for sharding in part.values():
        sharding.compute_kernel = "dense" if optimizer == "dense" else "fused"
        if sharding.sharding_type == "data_parallel":
            sharding.compute_kernel = "dense"
    made = DistributedModelParallel(
        model, plan=ShardingPlan({"tables": part}), sharders=[sharder], device=device()
    )
    owner = "embeddings" if sequences else "embedding_bags"
    generator = torch.Generator().manual_seed(1)
    rows = {
        f"tables.{owner}.{config.name}.weight": torch.randn(
            config.num_embeddings, config.embedding_dim, generator=generator
        )
        for config in tables
    }
    state = made.state_dict()
    for key, value in state.items():
        if not hasattr(value, "local_shards"):
            value.copy_(rows[key])
            continue
        for shard in value.local_shards():
            (row, column), (n, dim) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            shard.tensor.copy_(rows[key][row : row + n, column : column + dim])
    made.load_state_dict(state)
    return made


def compress(model: Any, *arguments: Any, **options: Any) -> CommunicationReport:
    """Compress what a model sends.

    On GPUs whatever the link: over NVLink "auto" leaves all as it is.
    """
    if device().type == "cuda":
        options = {"codec": "compressed", **options}
    return compress_communication(model, *arguments, **options)


class Pair:
    """TorchRec's own sharded model, and the same with compressed messages."""

    def __init__(self, plan: str, bound: Any = None, **options: Any) -> None:
        self.plain = sharded(PLANS[plan], **options)
        self.compressed = sharded(PLANS[plan], **options)
        self.report = compress(self.compressed, bound)
        factory = OPTIMIZERS[options.get("optimizer", "sgd")][1]
        self.optimizers = []
        if options.get("optimizer") == "dense":
            self.optimizers = [factory(m.parameters()) for m in (self.plain, self.compressed)]

    def step(self, features: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Train both with a batch of this rank; return what both looked up."""
        outs = [looked_up(model, features) for model in (self.plain, self.compressed)]
        for out in outs:
            weighed(out).backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return outs[0].detach(), outs[1].detach()

    def states(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each table of both."""
        states = [model.state_dict() for model in (self.plain, self.compressed)]
        for key in states[0]:
            plain, compressed = (state[key] for state in states)
            if hasattr(plain, "gather"):
                plain, compressed = gather(plain), gather(compressed)
            yield plain, compressed

    def check_trained_alike(self) -> None:
        for plain, compressed in self.states():
            torch.testing.assert_close(compressed, plain, rtol=1e-5, atol=1e-6)

    def moved(self) -> dict[str, tuple[float, float, float, float]]:
        """Return raw and moved bytes, forward and back, of each message."""
        return {
            f"{sharding}: {name}": (
                part["raw_bytes"],
                part["moved_bytes"],
                part["backward_raw_bytes"],
                part["backward_moved_bytes"],
            )
            for sharding, stats in self.report.stats().items()
            for name, part in stats["tables"].items()
        }


def weighed(out: torch.Tensor) -> torch.Tensor:
    """Return a sum of which each element has a gradient of its own."""
    return (out * torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape)).sum()


def output_of(model: Any, features: KeyedJaggedTensor) -> Any:
    """Return what a model gives a rank for each feature."""
    return model.module["tables"](features.to(device())).wait()


def looked_up(model: Any, features: KeyedJaggedTensor) -> torch.Tensor:
    """Return all that a rank gets, of bags and of sequences."""
    out = output_of(model, features)
    if isinstance(out, dict):
        return torch.cat([out[key].values() for key in sorted(out)])
    return torch.cat([out[key] for key in sorted(out.keys())], 1)


def features_of(seed: int, *, uneven: int = 0, **drawn: Any) -> KeyedJaggedTensor:
    """Return a batch of this rank; the ranks draw different ones."""
    rank = dist.get_rank()
    return batch(WORLD * seed + rank, bags=5 + uneven * rank, **drawn)
