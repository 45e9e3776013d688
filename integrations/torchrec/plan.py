"""Sharding plans whose tables are packed; TorchRec's planner makes none with a kernel like ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan

from bitslab.errors import ArgumentError
from bitslab.integrations.torchrec.sharding import KERNEL, PackedSharder

ROW_WISE, TABLE_WISE = "row_wise", "table_wise"


def packed_plan(
    model: torch.nn.Module,
    sharders: Sequence[Any],
    sharding: str | Mapping[str, str | int] = TABLE_WISE,
    *,
    world_size: int | None = None,
    local_size: int | None = None,
    device_type: str | None = None,
) -> ShardingPlan:
    """Return a plan for DistributedModelParallel that packs every table.

    Parameters
    ----------
    model : torch.nn.Module
        The unsharded model.
    sharders : sequence
        `CompressedEmbeddingBagCollectionSharder` and `CompressedEmbeddingCollectionSharder`: the
        collections that they shard are planned.
    sharding : str or mapping of str to str or int
        ``"table_wise"``: each table on one rank, the largest first, each where least bytes are.
        ``"row_wise"``: each table on all ranks. Or for each table one of these or a rank.
    world_size, local_size : int, optional
        Ranks, and those on one machine; of the default process group when left out.
    device_type : str, optional
        Where lookups happen; ``"cuda"`` where there is a GPU and ``"cpu"`` else, when left out.

    Returns
    -------
    ShardingPlan

    Raises
    ------
    ArgumentError
        When a sharding is not known, or a rank is out of range.
    """
    world = dist.get_world_size() if world_size is None else world_size
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    packing = [sharder for sharder in sharders if issubclass(type(sharder), PackedSharder)]
    by_type: dict[type[torch.nn.Module], Any] = {s.module_type: s for s in packing}
    if not by_type:
        raise ArgumentError("sharders: none of them packs tables")
    plan: dict[str, Any] = {}
    asked = set() if isinstance(sharding, str) else set(sharding)
    known: set[str] = set()
    loads = [0] * world
    for path, module in model.named_modules():
        sharder = by_type.get(type(module))
        if sharder is None:
            continue
        parameters = sharder.shardable_parameters(module)
        known |= parameters.keys()
        chosen: dict[str, Any] = {}
        for name, parameter in sorted(parameters.items(), key=lambda item: -item[1].nbytes):
            wanted = sharding if isinstance(sharding, str) else sharding.get(name, TABLE_WISE)
            if wanted == ROW_WISE:
                chosen[name] = row_wise(compute_kernel=KERNEL.value)
                continue
            if wanted == TABLE_WISE:
                rank = loads.index(min(loads))
            elif isinstance(wanted, int) and 0 <= wanted < world:
                rank = wanted
            else:
                raise ArgumentError(
                    f"sharding: {wanted!r:.60} for table {name!r}; accepted are 'table_wise', "
                    f"'row_wise' and ranks 0 to {world - 1}"
                )
            loads[rank] += parameter.nbytes
            chosen[name] = table_wise(rank=rank, compute_kernel=KERNEL.value)
        plan[path] = construct_module_sharding_plan(
            module,
            {name: chosen[name] for name in parameters},
            sharder=sharder,
            local_size=local_size or world,
            world_size=world,
            device_type=device_type,
        )
    if asked - known:
        raise ArgumentError(
            f"sharding: there is no table {min(asked - known)!r}; tables are {sorted(known)}"
        )
    if not plan:
        raise ArgumentError("model: has no collection that these sharders shard")
    return ShardingPlan(plan)
