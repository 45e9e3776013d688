"""Tensor parallelism on two ranks: DTensors are moved by their local tensors."""

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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel, RowwiseParallel, SequenceParallel, PrepareModuleInput, parallelize_module,
)
import bitslab
from bitslab.activations.disk import DiskRates, tier

rates = DiskRates(64 << 10, 2, 2, 1e9, 1e9, 1e9, 1e9, direct=True)
tier.disk_rates = lambda path: rates
torch.set_num_threads(1)
dist.init_process_group(
    "gloo", store=dist.FileStore(folder + "/store", 2), rank=rank, world_size=2,
    timeout=timedelta(seconds=60),
)
mesh = init_device_mesh("cpu", (2,))
kept = {"use_local_output": False}

def make():
    torch.manual_seed(5)
    block = lambda: nn.Sequential(
        nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)
    )
    model = nn.Sequential(block(), block())
    for i in range(2):
        plan = {
            "0": SequenceParallel(sequence_dim=0),
            "1": ColwiseParallel(input_layouts=Shard(0), **kept),
            "3": RowwiseParallel(output_layouts=Shard(0), **kept),
        }
        parallelize_module(model[i], mesh, plan)
    return model

def train(options):
    model = make()
    offload = None
    if options is not None:
        offload = bitslab.offload_activations(model, min_bytes=64, **options)
    generator = torch.Generator().manual_seed(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    found = []
    for _ in range(7):
        optimizer.zero_grad()
        x = torch.randn(17, 32, generator=generator)  # uneven shards
        x = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
        out = model(x)
        out.redistribute(mesh, [Replicate()]).to_local().square().mean().backward()
        optimizer.step()
        found += [x.grad.to_local().clone()]
        found += [p.grad.full_tensor().clone() for p in model.parameters()]
    if offload is None:
        return found, {}, []
    stats = offload.stats()
    sites = [site.unit.name for site in offload.report().sites if site.tensors]
    offload.close()
    return found, stats, sites

plain = train(None)[0]
seen = {}
for name, options in {
    "raw": {"policy": "raw", "in_flight_bytes": 0, "verify": True},
    "static": {"policy": "static", "codecs": "zvc", "in_flight_bytes": 0},
    "disk": {"policy": "raw", "disk": folder, "in_flight_bytes": 0, "verify": True},
    "planned": {"memory": 12_000, "codecs": []},
}.items():
    found, stats, sites = train(options)
    seen[name] = [all(torch.equal(a, b) for a, b in zip(found, plain, strict=True)), stats, sites]

model = nn.Sequential(*(m for _ in range(2) for m in (
    nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))))
whole = bitslab.offload_activations(model, policy="raw", min_bytes=64)
for _ in range(7):
    model(torch.randn(17, 32)).square().mean().backward()
seen["whole_bytes"] = whole.stats()["moved_out_bytes"]
whole.close()

# Changed in place after it was saved: refused, as by torch itself.
x = distribute_tensor(torch.randn(64, 64), mesh, [Shard(0)]).requires_grad_()
said = []
for offload in (None, bitslab.ActivationOffload("raw", min_bytes=64, in_flight_bytes=0)):
    with offload or torch.enable_grad():
        h = x * 2
        loss = (h * h).to_local().sum()
    with torch.no_grad():
        h.add_(1)
    try:
        loss.backward()
    except RuntimeError as error:
        said.append(str(error)[:70])
# Changed in place before it was saved: kept, and right.
grads = []
for offload in (None, bitslab.ActivationOffload("raw", min_bytes=64, in_flight_bytes=0)):
    x.grad = None
    with offload or torch.enable_grad():
        h = x * 2
        first = h.exp()
        h.add_(1)
        loss = (first + h * h).to_local().sum()
    loss.backward()
    grads.append(x.grad.to_local().clone())
seen["inplace"] = [said, torch.equal(*grads)]
print(json.dumps(seen))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what two ranks saw."""
    return seen_by_two_ranks(RANK, tmp_path_factory.mktemp("sharded"))


@pytest.mark.parametrize("way", ["raw", "static", "disk", "planned"])
def test_gradients_of_dtensors(ranks: list[dict[str, Any]], way: str) -> None:
    for equal, stats, sites in (seen[way] for seen in ranks):
        assert equal
        assert stats["moved_tensors"] > 0
        # What the second linear layer saves of each block; named by modules, as other tensors.
        assert {"0.3:0", "1.3:0"} & set(sites) or way == "planned"
        if way == "disk":
            assert stats["disk_written_bytes"] > 0


def test_what_is_moved_is_a_ranks_own_part(ranks: list[dict[str, Any]]) -> None:
    # Of what one device would move: half of the hidden columns, and half of the rows.
    for seen in ranks:
        assert 0 < seen["raw"][1]["moved_out_bytes"] < 0.7 * seen["whole_bytes"]


def test_changes_in_place_of_dtensors(ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        said, equal = seen["inplace"]
        assert len(said) == 2 and said[0] == said[1]
        assert "has been modified" in said[0]
        assert equal
