"""DDP and FSDP2 on two ranks: gradients as without."""

from __future__ import annotations

from typing import Any

import pytest

from tests.activations.rank_pairs import seen_by_two_ranks

RANK = """
import json, sys
root, rank, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
sys.path.insert(0, root)
from datetime import timedelta
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
import bitslab

torch.set_num_threads(1)
dist.init_process_group(
    "gloo", store=dist.FileStore(folder + "/store", 2), rank=rank, world_size=2,
    timeout=timedelta(seconds=60),
)
seen = {}

def make():
    torch.manual_seed(5)
    return nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(32, 32), nn.ReLU())))

def sharded(model):
    mesh = init_device_mesh("cpu", (2,))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)

STATIC = {"policy": "static", "codecs": "zvc", "verify": True}

def train(wrap, offloaded, before, options=STATIC, steps=3):
    model = make()
    offload = None
    def attach(model):
        return bitslab.offload_activations(model, min_bytes=64, in_flight_bytes=0, **options)
    if offloaded and before:
        offload = attach(model)
    model = wrap(model)
    if offloaded and not before:
        offload = attach(model)
    generator = torch.Generator().manual_seed(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(16, 32, generator=generator)).square().mean().backward()
        optimizer.step()
    found = [p.detach() for p in model.parameters()]
    found = [p.to_local() if hasattr(p, "to_local") else p for p in found]
    sites = []
    if offload is not None:
        sites = [[s.choice, s.operation] for s in offload.report().sites]
        if options is STATIC:
            seen.setdefault("moved", []).append(offload.stats()["moved_tensors"])
        else:
            seen.setdefault("declined", []).append(offload.plan.declined)
        offload.detach()
    return [p.clone() for p in found], sites

for name, wrap in {"ddp": DistributedDataParallel, "fsdp2": sharded}.items():
    plain, _ = train(wrap, False, False)
    for before in (False, True) if name == "ddp" else (False,):
        found, sites = train(wrap, True, before)
        seen[f"{name} {before}"] = all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
        seen[f"{name} {before} sites"] = sites
    planned = {"memory": 5000, "codecs": [], "recompute": name == "ddp"}
    plain, _ = train(wrap, False, False, steps=7)
    found, sites = train(wrap, True, False, planned, 7)
    seen[f"{name} planned"] = all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
print(json.dumps(seen))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what two ranks saw."""
    return seen_by_two_ranks(RANK, tmp_path_factory.mktemp("ranks"), timeout_s=120)


@pytest.mark.parametrize("case", ["ddp False", "ddp True", "fsdp2 False"])
def test_gradients_on_two_ranks(ranks: list[dict[str, Any]], case: str) -> None:
    for seen in ranks:
        assert seen[case]
        # The input and three outputs of ReLUs: no parameter, gathered or not, is moved.
        assert len(seen[f"{case} sites"]) == 4
        assert all(choice == "zvc" for choice, _ in seen[f"{case} sites"])
        assert all(moved == 12 for moved in seen["moved"])


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_gradients_of_planned_steps_on_two_ranks(ranks: list[dict[str, Any]], name: str) -> None:
    for seen in ranks:
        assert seen[f"{name} planned"]
        assert seen["declined"] == [False, False]
