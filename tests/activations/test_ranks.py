"""DDP and FSDP2 on two ranks: gradients as without."""

from __future__ import annotations

from typing import Any

import pytest

from tests.activations.rank_pairs import seen_by_two_ranks

RANK = """
import json, os, sys
root, rank, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
sys.path.insert(0, root)
from datetime import timedelta
from pathlib import Path
import pytest
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
import bitslab
from tests.quick_measuring import measure_quickly

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

# So slow a link that auto packs, by measurements of milliseconds.
names = "host_to_device", "device_to_host", "zero_copy", "host_gather"
os.environ["BITSLAB_LINK"] = json.dumps({f"{name}_bytes_per_s": 1e4 for name in names})
measure_quickly(pytest.MonkeyPatch(), Path(folder, str(rank)))

POLICIES = {
    "auto": {"policy": "auto", "profile_every": 1},
    "raw": {"policy": "raw"},
    "static": {"policy": "static", "codecs": "zvc"},
    "host": {"policy": "host", "codecs": "zvc"},
    "keep": {"policy": "keep"},
}

def train(wrap, offloaded=False, before=False, steps=4, **options):
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
    figures = {}
    if offload is not None:
        figures["choices"] = [site.choice for site in offload.report().sites]
        figures["moved"] = offload.stats()["moved_tensors"]
        if "memory" in options:
            figures["declined"] = offload.plan.declined
        offload.detach()
    return [p.clone() for p in found], figures

def compare(case, plain, found, figures):
    same = all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    seen[case] = {"same": same, **figures}

def replayed(wrap):
    # How many may be replayed of what linear layers and GELUs return.
    torch.manual_seed(5)
    layers = (m for _ in range(3) for m in (nn.Linear(32, 32), nn.GELU()))
    model = wrap(nn.Sequential(*layers))
    offload = bitslab.offload_activations(model, min_bytes=64, memory=1 << 30, codecs=[])
    x = torch.randn(16, 32, requires_grad=True)
    while offload.step_profile is None:
        model(x * 2).square().mean().backward()
    sites = [s for s in offload.step_profile.sites if s.nbytes == 4 * 16 * 32]
    found = sum(s.replay_s is not None for s in sites)
    offload.detach()
    return found

def accumulated(offloaded):
    # Unsharded weights of a micro-batch remain for the next one, which empties them in its forward.
    torch.manual_seed(5)
    layers = (m for _ in range(3) for m in (nn.Linear(32, 32), nn.GELU()))
    model = sharded(nn.Sequential(*layers))
    offload = None
    if offloaded:
        offload = bitslab.offload_activations(model, min_bytes=64, memory=9000, codecs=[])
    generator = torch.Generator().manual_seed(rank)
    for i in range(12):
        model.set_reshard_after_backward(i % 3 == 2)
        model(torch.randn(16, 32, generator=generator) * 2).square().mean().backward()
    found = [p.grad.to_local().clone() for p in model.parameters()]
    if offload is not None:
        offload.detach()
    return found

for name, wrap in {"ddp": DistributedDataParallel, "fsdp2": sharded}.items():
    plain, _ = train(wrap)
    for before in (False, True) if name == "ddp" else (False,):
        for policy, options in POLICIES.items():
            case = f"{name} {'before' if before else 'after'} {policy}"
            compare(case, plain, *train(wrap, True, before, verify=True, **options))
    planned = {"memory": 5000, "codecs": [], "recompute": name == "ddp"}
    plain, _ = train(wrap, steps=7)
    compare(f"{name} planned", plain, *train(wrap, True, steps=7, **planned))
    seen[f"{name} replays"] = replayed(wrap)
compare("fsdp2 accumulated", accumulated(False), accumulated(True), {})
print(json.dumps(seen))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what two ranks saw."""
    return seen_by_two_ranks(RANK, tmp_path_factory.mktemp("ranks"), timeout_s=120)


@pytest.mark.parametrize("policy", ["auto", "raw", "static", "host", "keep"])
@pytest.mark.parametrize("wrapped", ["ddp after", "ddp before", "fsdp2 after"])
def test_gradients_on_two_ranks(ranks: list[dict[str, Any]], wrapped: str, policy: str) -> None:
    for seen in ranks:
        found = seen[f"{wrapped} {policy}"]
        assert found["same"]
        if policy == "keep":
            assert found["moved"] == 0 and set(found["choices"]) == {"keep"}
            continue
        # In four steps the input and three outputs of ReLUs: no parameter, gathered or not.
        assert found["moved"] == 16 and len(found["choices"]) == 4
        choices = set(found["choices"])
        if policy == "auto":
            assert choices - {"raw", "keep"}, "packed by a codec"
        else:
            assert choices == {"zvc" if policy == "static" else policy}


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_gradients_of_planned_steps_on_two_ranks(ranks: list[dict[str, Any]], name: str) -> None:
    for seen in ranks:
        assert seen[f"{name} planned"]["same"]
        assert not seen[f"{name} planned"]["declined"]


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_no_replay_reads_a_weight_that_is_gathered_for_its_layer(
    ranks: list[dict[str, Any]], name: str
) -> None:
    """It is given up behind the layer, and gathered again later than a replay may read it."""
    for seen in ranks:
        # Of each pair what the linear layer returns, and what GELU makes of it for what follows.
        assert seen[f"{name} replays"] == (5 if name == "ddp" else 2)


def test_gradients_of_micro_batches_whose_weights_are_emptied(ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        assert seen["fsdp2 accumulated"]["same"]
