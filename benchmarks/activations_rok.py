"""Planned activations: predictions beside what was measured, and throughput over peak.

python benchmarks/activations_rok.py --only predictions rok       # Llama, GPT-2 and BERT shapes
python benchmarks/activations_rok.py --only rok --models llama --hidden 4096 --layers 16

Predictions: three models of transformers with random weights, and limits of memory between the
least possible and that of keeping everything. Of each plan the step (forward and backward pass)
and the peak that were predicted, and the fastest step and highest peak measured behind it, at
first and after corrections; steps are counted in pairs, as the planner compares them. On a GPU the
peak is the allocator's, on a CPU that of saved tensors.

ROK (recompute, offload, keep; figure 5.12 of SSDTrain's chapter): tokens a second over the peak by
batch size, for keeping all, checkpointing each layer, `save_on_cpu`, moving all raw, and the
planner at the peak of each of these, of a CPU at three quarters of it. Each way has a model of its
own and fresh ids in each step; the fastest step counts. On a CPU the peak is what torch has
allocated since the step began.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from timing import add_output, print_tables, run_parts
from torch import nn

import bitslab
from bitslab.activations import planned
from bitslab.engine.advisor.planning import Correction, MeasuredStep, Plan, Solver, Timeline

Rows = list[dict[str, Any]]
Report = Callable[[str], None]
MODELS = ("llama", "gpt2", "bert")
#: Of the way from the least possible to keeping everything, by model: ten plans.
SHARES = {"llama": (0.1, 0.3, 0.5, 0.8), "gpt2": (0.2, 0.4, 0.7), "bert": (0.2, 0.4, 0.7)}
VOCABULARY = 1000
#: Tensors that are smaller are kept: of small models on a CPU, and on a GPU.
MIN_BYTES = {"cpu": 16 << 10, "cuda": 256 << 10}


def make_model(name: str, arguments: argparse.Namespace) -> nn.Module:
    """Return a model with random weights, on its device."""
    import transformers

    hidden, layers, sequence = arguments.hidden, arguments.layers, arguments.sequence
    heads = max(1, hidden // arguments.head_dim)
    torch.manual_seed(0)
    config: Any
    model: Any
    if name == "llama":
        config = transformers.LlamaConfig(
            hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
            intermediate_size=int(hidden * 11 / 4), vocab_size=VOCABULARY,
            max_position_embeddings=sequence,
        )  # fmt: skip
        model = transformers.LlamaModel(config)
    elif name == "gpt2":
        config = transformers.GPT2Config(
            n_embd=hidden, n_layer=layers, n_head=heads, vocab_size=VOCABULARY,
            n_positions=sequence, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        model = transformers.GPT2Model(config)
    else:
        config = transformers.BertConfig(
            hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
            intermediate_size=4 * hidden, vocab_size=VOCABULARY, max_position_embeddings=sequence,
        )  # fmt: skip
        model = transformers.BertModel(config, add_pooling_layer=False)
    config.use_cache = False  # layers that fill caches cannot be computed again
    dtype = torch.bfloat16 if arguments.device == "cuda" else torch.float32
    found: nn.Module = model.to(arguments.device, dtype).train()
    return found


class Job:
    """A model in training, with fresh ids in each step."""

    def __init__(
        self,
        name: str,
        batch: int,
        arguments: argparse.Namespace,
        make: Callable[[str, argparse.Namespace], nn.Module] = make_model,
    ) -> None:
        self.name, self.batch, self.arguments = name, batch, arguments
        self.device = torch.device(arguments.device)
        self.model: nn.Module = make(name, arguments)
        self._draw = torch.Generator().manual_seed(1)

    def step(self, context: AbstractContextManager[Any] | None = None) -> float:
        """Run a forward and a backward pass; return their seconds."""
        shape = self.batch, self.arguments.sequence
        ids = torch.randint(0, VOCABULARY, shape, generator=self._draw).to(self.device)
        self.model.zero_grad(set_to_none=False)
        self._wait()
        begin = time.perf_counter()
        with context or nullcontext():
            loss = self.model(input_ids=ids).last_hidden_state.float().square().mean()
        loss.backward()
        self._wait()
        return time.perf_counter() - begin

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def peak_bytes(self, step: Callable[[], object]) -> int:
        """Return the most bytes of the device during a step."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            step()
            self._wait()
            return torch.cuda.max_memory_allocated()
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
            step()
        now = most = 0
        for event in found.profiler.kineto_results.events():
            if event.name() == "[memory]":
                now += event.nbytes()
                most = max(most, now)
        return most

    def close(self) -> None:
        """Give the model back."""
        self.model = nn.Module()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


@contextmanager
def compared() -> Iterator[list[tuple[Plan, list[MeasuredStep], Correction]]]:
    """Collect what the planner compares."""
    module: Any = planned
    original, found = module.compare, []

    def compare(plan: Plan, steps: Sequence[MeasuredStep], **options: Any) -> Correction:
        said: Correction = original(plan, steps, **options)
        found.append((plan, list(steps), said))
        return said

    module.compare = compare
    try:
        yield found
    finally:
        module.compare = original


def attach(job: Job, **options: Any) -> bitslab.ActivationOffload:
    return bitslab.offload_activations(
        job.model, min_bytes=MIN_BYTES[job.device.type], profile_every=4, **options
    )


def limits_of(job: Job, shares: Sequence[float]) -> list[int]:
    """Return limits of memory between the least possible and that of keeping everything."""
    offload = attach(job, memory=1 << 50)
    for _ in range(8):
        job.step()
        if offload.step_profile is not None:
            break
    assert offload.step_profile is not None
    timeline = Timeline(offload.step_profile)
    most = timeline.predict(timeline.keep_all()).peak_bytes
    least = Solver(timeline).least().prediction.peak_bytes
    offload.detach()
    return [int(least + share * (most - least)) for share in shares]


def prediction_rows(name: str, arguments: argparse.Namespace, report: Report) -> Rows:
    """Return the rows of a model."""
    job = Job(name, arguments.batch, arguments)
    rows = []
    for share, limit in zip(SHARES[name], limits_of(job, SHARES[name]), strict=True):
        report(f"{name}, {share:.0%}: {limit / 1e6:,.0f} MB")
        with compared() as found:
            offload = attach(job, memory=limit)
            for _ in range(arguments.steps):
                job.step()
            offload.detach()
        if not found:
            continue
        first, last = found[0], [each for each in found if each[0] == found[-1][0]]
        steps = [step for each in last for step in each[1]]
        plan = last[-1][0]
        rows.append(
            {
                "model": name,
                "limit MB": round(limit / 1e6, 1),
                "first: step": off(first[0].prediction.step_s, min(s.step_s for s in first[1])),
                "predicted ms": round(plan.prediction.step_s * 1e3, 1),
                "measured ms": round(min(s.step_s for s in steps) * 1e3, 1),
                "step": off(plan.prediction.step_s, min(s.step_s for s in steps)),
                "predicted MB": round(plan.prediction.peak_bytes / 1e6, 1),
                "measured MB": round(max(s.peak_bytes for s in steps) / 1e6, 1),
                "peak": off(plan.prediction.peak_bytes, max(s.peak_bytes for s in steps)),
                "outcome": last[-1][2].outcome,
                "what": what_of(plan),
            }
        )
    job.close()
    return rows


def off(predicted: float, measured: float) -> str:
    """Return how far a prediction was off what was measured."""
    return f"{predicted / measured - 1:+.1%}"


def what_of(plan: Plan) -> str:
    """Return the bytes of a plan by what becomes of them."""
    found: dict[str, int] = {}
    for each in plan.sites:
        found[str(each.candidate)] = found.get(str(each.candidate), 0) + each.nbytes
    return ", ".join(f"{what} {nbytes / 1e6:.0f}" for what, nbytes in sorted(found.items()))


def predictions(arguments: argparse.Namespace, report: Report) -> dict[str, Rows]:
    """Return the table of predictions."""
    rows = [row for name in arguments.models for row in prediction_rows(name, arguments, report)]
    return {f"predictions: {shape_of(arguments, arguments.batch)}": rows}


def shape_of(arguments: argparse.Namespace, batch: int | str) -> str:
    return (
        f"hidden {arguments.hidden} x {arguments.layers} layers, batch {batch}, "
        f"{arguments.sequence} tokens, {arguments.device}"
    )


def checkpoint_layers(model: nn.Module) -> None:
    """Have each layer computed again, as users of transformers do."""
    new = getattr(model, "activation_checkpointing_enable", None)
    (new or model.gradient_checkpointing_enable)()  # type: ignore[operator]


def way_point(job: Job, way: str, limit: int | None, repetitions: int) -> tuple[float, int, str]:
    """Return the seconds of a step, its peak in bytes, and what was planned."""
    offload, said = None, ""
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    if way == "checkpoint":
        checkpoint_layers(job.model)
    elif way == "save_on_cpu":
        pinned = job.device.type == "cuda"
        context = lambda: torch.autograd.graph.save_on_cpu(pin_memory=pinned)  # noqa: E731
    elif way == "raw":
        offload = attach(job, policy="raw")
    elif way.startswith("planned"):
        offload = attach(job, memory=limit)
    for _ in range(10 if way.startswith("planned") else 3):
        job.step(context())
    seconds = min(job.step(context()) for _ in range(repetitions))
    peak = job.peak_bytes(lambda: job.step(context()))
    if offload is not None:
        if offload.plan is not None:
            said = what_of(offload.plan)
        offload.detach()
    return seconds, peak, said


def rok(arguments: argparse.Namespace, report: Report) -> dict[str, Rows]:
    """Return the tables of throughput over peak."""
    tables = {}
    for name in arguments.models:
        rows: Rows = []
        for batch in arguments.batches:
            points: dict[str, tuple[float, int, str]] = {}
            ways = ["keep", "checkpoint", "save_on_cpu", "raw"]
            while ways:
                way = ways.pop(0)
                peer = way.partition(" at ")[2]
                limit = None if not peer else planned_limit(points, peer, arguments.device)
                report(f"{name}, batch {batch}, {way}")
                job = Job(name, batch, arguments)
                try:
                    points[way] = way_point(job, way, limit, arguments.repetitions)
                except torch.OutOfMemoryError:
                    points.pop(way, None)
                job.close()
                if not ways and not peer:
                    ways = [f"planned at {other}" for other in points if other != "raw"]
            tokens = batch * arguments.sequence
            keep = points.get("keep")
            for way, (seconds, peak, said) in points.items():
                row = {"batch": batch, "way": way, "peak MB": round(peak / 1e6, 1)}
                row["step ms"] = round(seconds * 1e3, 1)
                row["tokens/s"] = round(tokens / seconds)
                row["of keep"] = "" if keep is None else f"{keep[0] / seconds:.2f}"
                rows.append(row | {"planned MB": said})
        tables[f"rok: {name}, {shape_of(arguments, 'as shown')}"] = rows
    return tables


def planned_limit(points: dict[str, tuple[float, int, str]], peer: str, device: str) -> int:
    """Return the limit for the planner: a peer's peak; of a CPU the share of it that is saved."""
    peak = points[peer][1]
    return peak if device == "cuda" else max(1, peak * 3 // 4)


PARTS = {"predictions": predictions, "rok": rok}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of both parts."""
    add = parser.add_argument
    device = "cuda" if torch.cuda.is_available() else "cpu"
    gpu = device == "cuda"
    add("--device", default=device, help="cuda or cpu (default: %(default)s)")
    add("--models", nargs="+", choices=MODELS, default=list(MODELS), help="shapes (default: all)")
    add("--hidden", type=int, default=4096 if gpu else 128, help="width (default: %(default)s)")
    add("--layers", type=int, default=8 if gpu else 4, help="number (default: %(default)s)")
    add("--head-dim", type=int, default=128 if gpu else 32, help="of a head (default: %(default)s)")
    add("--sequence", type=int, default=1024 if gpu else 128, help="tokens (default: %(default)s)")
    add("--batch", type=int, default=8, help="of predictions (default: %(default)s)")
    add(
        "--batches", type=int, nargs="+", default=[4, 8, 16, 32] if gpu else [4, 8],
        help="of the ROK curve (default: %(default)s)",
    )  # fmt: skip
    add("--steps", type=int, default=24, help="of each plan (default: %(default)s)")
    add("--repetitions", type=int, default=5, help="timed steps (default: %(default)s)")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the script."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts")
    add_options(parser)
    add_output(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    arguments = make_parser().parse_args(argv)
    warnings.simplefilter("ignore", UserWarning)
    print_tables(run_parts(PARTS, arguments), arguments.json, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
