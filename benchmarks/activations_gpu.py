"""Steps and peaks of activations at the paper's shapes, beside peers.

python benchmarks/activations.py --only gpu                                  # on a GPU
python benchmarks/activations.py --only gpu --device cpu --shapes 64x2 --sequence 32 --batch 2

Shapes are those of SSDTrain's figure 5.11: hidden 8,192 x 4, 12,288 x 3 and 16,384 x 2 layers,
GPT-2, BERT and T5 (half of the layers decode), sequences of 1,024, bfloat16, random weights; Llama
where --gpu-models names it. Of a model one way after another trains: everything kept, each layer
checkpointed, `save_on_cpu`, the planner at its limits, and the peers that can be imported
(torchtune's and TRL's OffloadActivations, DeepSpeed's CheckpointHiddenStatesOffload, layers that
are compiled with an activation_memory_budget). "raw" moves what `save_on_cpu` does, while the GPU
computes.

The peak of activations is what the device held at most in a step beyond weights and gradients.
"planned 55%" has a limit at 55 % of what keeping takes, "planned 3%" the least memory found for 3 %
of a step ("disk": with the folder as the only tier), "planned, nothing to do" one far above the
peak; with --at-peaks the planner is also given the peak of every peer, and compiled layers where
that has them. The fastest step counts; each step has fresh ids. Gradients are those of the first
layer's parameters for the same ids and dropout, beside those of keeping; "keep" has those of
keeping once more, which differ where attention adds in any order.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import math
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from activations_rok import (
    VOCABULARY,
    Job,
    Report,
    Rows,
    attach,
    checkpoint_layers,
    made_on,
    make_model,
    warm_up,
    what_of,
)
from activations_turns import IDLE, LIMIT_BYTES, PLANNED_DISK
from torch import nn

import bitslab
from bitslab.engine.memory import host_arena

SHAPES = ("8192x4", "12288x3", "16384x2")
MODELS = ("gpt2", "bert", "t5", "llama")
#: Ways of the table; those behind "planned" are peers.
WAYS = (
    "keep", "checkpoint", "save_on_cpu", "raw", "planned 55%", "planned 3%", PLANNED_DISK, IDLE,
    "torchtune", "trl", "deepspeed", "compile",
)  # fmt: skip
#: Steps before those that are timed, and more where they are short: of the planner until its plans
#: were compared.
WARM_STEPS = {"planned": 24, "compile": 3}
LIMIT_SHARE, SLOWDOWN = 0.55, 0.03
#: Before the name of a peer: planned with its peak as the limit.
AT_PEAK = "planned at the peak of "
#: Share of a compiled layer's activations that may be kept.
COMPILE_BUDGET = 0.5
SEED = 7

Contexts = Callable[[], AbstractContextManager[Any]]


class ShapeJob(Job):
    """A model of a shape, which every way trains in its turn."""

    def step(self, context: AbstractContextManager[Any] | None = None) -> float:
        """Run a forward and a backward pass; return their seconds."""
        if self.name != "t5":
            return super().step(context)
        model, run = self.model, super().step
        self.model = Halves(model)
        try:
            return run(context)
        finally:
            self.model = model

    def gradients(self, context: AbstractContextManager[Any]) -> list[torch.Tensor]:
        """Return gradients of a step whose ids and dropout are always the same."""
        state = self._draw.get_state()
        self._draw.manual_seed(SEED)
        torch.manual_seed(SEED)
        self.step(context)
        self._draw.set_state(state)
        first = [p for p in self.model.parameters() if p.dim() > 1 and p.grad is not None][1:4]
        return [p.grad.detach().clone() for p in first if p.grad is not None]


class Halves(nn.Module):
    """A T5 model whose encoder and decoder read the same ids."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, input_ids: torch.Tensor) -> Any:
        return self.inner(input_ids=input_ids, decoder_input_ids=input_ids)


def shape_model(name: str, arguments: argparse.Namespace) -> nn.Module:
    """Return a model of a shape, made on its device."""
    if name != "t5":
        return make_model(name, arguments)
    with made_on(arguments.device):
        return _t5(arguments)


def _t5(arguments: argparse.Namespace) -> nn.Module:
    import transformers

    hidden, layers = arguments.hidden, arguments.layers
    torch.manual_seed(0)
    config: Any = transformers.T5Config(
        d_model=hidden, d_ff=4 * hidden, d_kv=arguments.head_dim, vocab_size=VOCABULARY,
        num_heads=max(1, hidden // arguments.head_dim), feed_forward_proj="gelu",
        num_layers=math.ceil(layers / 2), num_decoder_layers=max(1, layers // 2),
        use_cache=False,
    )  # fmt: skip
    model: nn.Module = transformers.T5Model(config).to(arguments.device).train()
    return model


@contextmanager
def entered(job: Job, way: str, limit_bytes: int) -> Iterator[tuple[Contexts, Any]]:
    """Train in a way; yield contexts of forward passes, and what plans.

    Parameters
    ----------
    job : Job
        The model.
    way : str
        One of `WAYS`, or `AT_PEAK` and one of them.
    limit_bytes : int
        Of "planned 55%" and `AT_PEAK`.
    """
    context: Contexts = nullcontext
    offload: bitslab.ActivationOffload | None = None
    made = PEERS[way]() if way in PEERS else None  # nothing is changed where it is missing
    if way in ("checkpoint", "deepspeed"):
        checkpoint_layers(job.model)
    if way == "save_on_cpu":
        pinned = job.device.type == "cuda"
        context = lambda: torch.autograd.graph.save_on_cpu(pin_memory=pinned)  # noqa: E731
    elif way == "planned 55%" or way.startswith(AT_PEAK):
        if way == AT_PEAK + "compile":  # the same layers, and the planner moves what these keep
            compile_layers(job.model, 1.0)
        offload = attach(job, memory=limit_bytes)
    elif way == "planned 3%":
        offload = attach(job, slowdown=SLOWDOWN)
    elif way == PLANNED_DISK:
        folder = job.arguments.folder or os.getcwd()
        offload = attach(job, slowdown=SLOWDOWN, disk=folder, tiers="disk")
    elif way == IDLE:
        offload = attach(job, memory=LIMIT_BYTES)
    elif way == "raw":
        offload = attach(job, policy="raw")
    elif way == "compile":
        compile_layers(job.model, COMPILE_BUDGET)
    elif made is not None:
        context = lambda: made  # noqa: E731
    job.backward_within = way == "deepspeed"  # which counts what was not read as lost
    try:
        yield context, offload
    finally:
        job.backward_within = False
        if offload is not None:
            offload.close()
        if way in ("checkpoint", "deepspeed"):
            off = getattr(job.model, "activation_checkpointing_disable", None)
            (off or job.model.gradient_checkpointing_disable)()  # type: ignore[operator]
        if way.endswith("compile"):
            for module in job.model.modules():
                module._compiled_call_impl = None
            torch._dynamo.reset()
        give_back(job.device)


def compile_layers(model: nn.Module, budget: float) -> None:
    """Compile each layer of a model, with a budget for what its backward pass keeps (1: all)."""
    import torch._functorch.config as functorch_config

    functorch_config.activation_memory_budget = budget
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    for layer in (layer for each in lists for layer in each if any(True for _ in layer.children())):
        layer.compile()


def torchtune_offload() -> Any:
    """Return torchtune's OffloadActivations; ImportError where it is not installed."""
    return importlib.import_module("torchtune.training").OffloadActivations()


def trl_offload() -> Any:
    """Return TRL's OffloadActivations; ImportError where it is not installed."""
    module = importlib.import_module("trl.models.activation_offloading")
    return module.OffloadActivations()


def deepspeed_offload() -> Any:
    """Return DeepSpeed's CheckpointHiddenStatesOffload; ImportError where it is not installed."""
    name = "deepspeed.runtime.activation_checkpointing.offload_activations"
    return importlib.import_module(name).CheckpointHiddenStatesOffload()


PEERS: dict[str, Callable[[], Any]] = {
    "torchtune": torchtune_offload,
    "trl": trl_offload,
    "deepspeed": deepspeed_offload,
}


def give_back(device: torch.device) -> None:
    """Give memory of the device and page-locked memory back, so that ways begin alike."""
    gc.collect()
    host_arena().trim()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        empty: Callable[[], None] | None = getattr(torch._C, "_host_emptyCache", None)
        if empty is not None:
            empty()


def base_of(job: Job) -> int:
    """Return the bytes that the device holds between steps: weights and gradients."""
    job.model.zero_grad(set_to_none=False)
    return torch.cuda.memory_allocated() if job.device.type == "cuda" else 0


def way_row(
    job: ShapeJob, way: str, arguments: argparse.Namespace, limit_bytes: int, report: Report
) -> tuple[dict[str, Any], int, list[torch.Tensor]]:
    """Return a row, the peak of activations in bytes, and the gradients to compare.

    `limit_bytes` is what a planned way may take of such a peak. Plans are reported as they are
    compared with the steps that followed them.
    """
    if all(p.grad is None for p in job.model.parameters()):
        job.step()  # the first way would count gradients among its activations
    base = base_of(job)
    if job.device.type == "cpu":  # the planner counts saved tensors there, the profiler all
        limit_bytes = limit_bytes * 3 // 4
    with entered(job, way, base + limit_bytes) as (context, offload):
        warm = next((n for name, n in WARM_STEPS.items() if way.startswith(name)), 2)
        said_before: set[str] = set()
        for _ in warm_up(job, context, warm):
            if offload is not None and offload.plan is not None:
                notes = {n for n in offload.report().notes if "were predicted" in n} - said_before
                said_before |= notes
                for note in notes:
                    report(f"{way}: {what_of(offload.plan)}: {note}")
        before = {} if offload is None else offload.stats()
        seconds = min(job.step(context()) for _ in range(arguments.repetitions))
        after = {} if offload is None else offload.stats()
        peak = job.peak_bytes(lambda: job.step(context()))
        found = job.gradients(context())
        moved = (
            after.get("crossed_out_bytes", 0) - before.get("crossed_out_bytes", 0)
        ) / arguments.repetitions
        said = ""
        if offload is not None and offload.plan is not None:
            said = what_of(offload.plan)
            if "Withdrawn" in "".join(offload.report().notes):
                said += " (withdrawn)"
    row = {
        "way": way,
        "step ms": seconds * 1e3,
        "activations MB": (peak - base) / 1e6,
        "moved MB": moved / 1e6,
        "GB/s": moved / seconds / 1e9,
        "written MB": (after.get("disk_written_bytes", 0) - before.get("disk_written_bytes", 0))
        / arguments.repetitions
        / 1e6,
        "waits ms": (after.get("stall_us", 0) - before.get("stall_us", 0))
        / arguments.repetitions
        / 1e3,
        "planned MB": said,
    }
    return row, peak - base, found


def difference(found: list[torch.Tensor], right: list[torch.Tensor]) -> str:
    """Return "equal", or how far gradients are off at most, over the largest."""
    if all(torch.equal(a, b) for a, b in zip(found, right, strict=True)):
        return "equal"
    off = max(
        float((a.float() - b.float()).abs().max() / b.float().abs().max().clamp_min(1e-30))
        for a, b in zip(found, right, strict=True)
    )
    return f"off by {off:.1e}"


def ways_of(arguments: argparse.Namespace) -> Iterator[str]:
    """Yield the ways of a table in their order."""
    for way in arguments.gpu_ways:
        yield way
        own = way in ("keep", "raw") or way.startswith("planned")
        if arguments.at_peaks and not own:
            yield AT_PEAK + way


def shape_rows(name: str, arguments: argparse.Namespace, report: Report) -> Rows:
    """Return the rows of a model of a shape, each reported when it is there."""
    job = ShapeJob(name, arguments.batch, arguments, shape_model)
    rows: Rows = []
    made: dict[str, tuple[dict[str, Any], int, list[torch.Tensor]]] = {}
    for way in ways_of(arguments):
        peer = way.removeprefix(AT_PEAK)
        limit_bytes = 1 << 50
        if peer != way:
            if peer not in made:
                continue
            limit_bytes = made[peer][1]
        elif "keep" in made:
            limit_bytes = int(LIMIT_SHARE * made["keep"][1])
        report(f"gpu: {name}, hidden {arguments.hidden} x {arguments.layers}: {way}")
        try:
            made[way] = way_row(job, way, arguments, limit_bytes, report)
        except ImportError as error:
            report(f"left out: {way} ({error})")
            continue
        except (torch.OutOfMemoryError, RuntimeError) as error:
            rows.append({"model": name, "way": way, "gradients": str(error).splitlines()[0][:80]})
            give_back(job.device)
            continue
        row = {"model": name, **made[way][0]}
        if "keep" in made:
            kept = made["keep"][0]
            row["times keep"] = row["step ms"] / kept["step ms"]
            row["lower"] = f"{1 - row['activations MB'] / kept['activations MB']:.0%}"
            found = job.gradients(nullcontext()) if way == "keep" else made[way][2]
            row["gradients"] = difference(found, made["keep"][2])
        if way == "raw":
            peer = "save_on_cpu"
        if peer != way and peer in made:
            row["times the peer"] = row["step ms"] / made[peer][0]["step ms"]
        rows.append(row)
        report(
            ", ".join(
                f"{k} {v:,.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()
            )
        )
    job.close()
    return rows


def gpu(arguments: argparse.Namespace, report: Report) -> dict[str, Rows]:
    """Return a table for each shape."""
    tables: dict[str, Rows] = {}
    for shape in arguments.shapes:
        hidden, layers = (int(n) for n in shape.split("x"))
        own = argparse.Namespace(**{**vars(arguments), "hidden": hidden, "layers": layers})
        own.batch = arguments.batch if arguments.gpu_batch is None else arguments.gpu_batch
        title = (
            f"hidden {hidden} x {layers} layers, batch {own.batch}, {own.sequence} tokens, "
            f"{own.device}"
        )
        tables[title] = [row for name in own.gpu_models for row in shape_rows(name, own, report)]
    return tables


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the part."""
    add = parser.add_argument
    add(
        "--shapes",
        nargs="+",
        default=list(SHAPES),
        help="gpu: hidden x layers (default: %(default)s)",
    )
    add(
        "--gpu-models",
        nargs="+",
        choices=MODELS,
        default=list(MODELS[:3]),
        help="gpu: (default: %(default)s)",
    )
    add("--gpu-ways", nargs="+", choices=WAYS, default=list(WAYS), help="gpu: (default: all)")
    add(
        "--at-peaks",
        action="store_true",
        help="gpu: also plan with the peak of every peer as the limit",
    )
    add("--gpu-batch", type=int, help="gpu: sequences of a step (default: --batch)")
