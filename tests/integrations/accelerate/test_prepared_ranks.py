"""`offload_activations` of what a real `Accelerator` prepared on two ranks of gloo: DDP and FSDP2.

accelerate 1.15 gives FSDP to GPUs alone: of ranks on CPUs it makes DistributedDataParallel, even
with a plugin for FSDP2. Its state is changed to what it is on GPUs, and its own `prepare` shards.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.activations.rank_pairs import seen_by_two_ranks

pytest.importorskip("accelerate")

RANK = """
import json, os, sys
root, rank, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
sys.path.insert(0, root)
os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
os.environ |= {"LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
from datetime import timedelta
import torch, torch.distributed as dist
from torch import nn
torch.set_num_threads(1)
dist.init_process_group(
    "gloo", store=dist.FileStore(folder + "/store", 2), rank=rank, world_size=2,
    timeout=timedelta(seconds=60),
)
from accelerate import Accelerator, DistributedType
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin
from bitslab.integrations.accelerate import offload_activations

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(self.act(self.up(x)))

def make():
    torch.manual_seed(5)
    return nn.Sequential(*(Layer() for _ in range(3)))

def accelerator_of(kind):
    AcceleratorState._reset_state(True)
    if kind == "ddp":
        return Accelerator(cpu=True, gradient_accumulation_steps=2)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Layer"],
    )
    made = Accelerator(cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=2)
    seen["plugin on cpus"] = str(made.distributed_type.value)
    # Both states have it, and what is made later reads it from the second.
    made.state.distributed_type, made.state.fsdp_plugin = DistributedType.FSDP, plugin
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    return made

def train(kind, options):
    accelerator, model = accelerator_of(kind), make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    offload = None
    if options is not None:
        offload = offload_activations(accelerator, model, min_bytes=64, **options)
    generator, found = torch.Generator().manual_seed(rank), []
    for _ in range(16):
        with accelerator.accumulate(model):
            loss = model(torch.randn(16, 32, generator=generator)).square().mean()
            accelerator.backward(loss)
            found += [loss.detach()]
            if accelerator.sync_gradients:
                grads = [p.grad for p in model.parameters()]
                assert len(grads) == 12
                grads = [g.to_local() if hasattr(g, "to_local") else g for g in grads]
                found += [g.clone() for g in grads]
            optimizer.step()
            optimizer.zero_grad()
    shown = {
        "accelerator": str(accelerator.distributed_type.value),
        "fsdp2": accelerator.is_fsdp2,
        "model": type(model).__name__,
        "sharded": any(hasattr(p, "to_local") for p in model.parameters()),
    }
    if offload is not None:
        shown["moved"] = offload.stats()["moved_tensors"]
        if "memory" in options:
            shown["declined"] = offload.plan is None or offload.plan.declined
            shown["what"] = sorted({str(s.candidate) for s in offload.plan.sites})
        offload.detach()
    return found, shown

seen = {}
for kind in ("ddp", "fsdp2"):
    plain, _ = train(kind, None)
    for name, options in {
        "raw": {"policy": "raw", "in_flight_bytes": 0, "verify": True},
        "static": {"policy": "static", "codecs": "zvc", "in_flight_bytes": 0},
        "planned": {"memory": 30_000, "codecs": []},
    }.items():
        found, shown = train(kind, options)
        equal = all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
        seen[kind + " " + name] = {"equal": equal, **shown}
print(json.dumps(seen))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what two ranks saw."""
    return seen_by_two_ranks(RANK, tmp_path_factory.mktemp("prepared"))


@pytest.mark.parametrize("way", ["raw", "static", "planned"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_losses_and_gradients_of_prepared_ranks(
    ranks: list[dict[str, Any]], kind: str, way: str
) -> None:
    for seen in ranks:
        found = seen[f"{kind} {way}"]
        assert found["equal"]
        assert found["fsdp2"] is found["sharded"] is (kind == "fsdp2")
        assert (found["accelerator"], found["model"]) == {
            "ddp": ("MULTI_CPU", "DistributedDataParallel"),
            "fsdp2": ("FSDP", "FSDPSequential"),
        }[kind]
        if way == "planned":
            assert not found["declined"] and set(found["what"]) != {"keep"}
        else:
            assert found["moved"] > 0


def test_ranks_on_cpus_are_never_prepared_for_fsdp(ranks: list[dict[str, Any]]) -> None:
    # Where this fails, accelerate shards on CPUs, too, and its state needs no change above.
    assert {seen["plugin on cpus"] for seen in ranks} == {"MULTI_CPU"}
