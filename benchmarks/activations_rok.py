"""Planned activations: predictions beside what was measured, and throughput over peak.

python benchmarks/activations_rok.py --only predictions rok       # Llama, GPT-2 and BERT shapes
python benchmarks/activations_rok.py --only rok --models llama --hidden 4096 --layers 16
python benchmarks/activations_rok.py --only rok --plot rok.svg

Predictions: three models of transformers with random weights, and limits of memory between the
least possible and that of keeping everything. Of each plan the step (forward and backward pass)
and the peak that were predicted, and the fastest step and highest peak measured behind it: at
first, and of the plan that was followed last. Of that one it is what was predicted half-way through
its comparisons, which follows the steps of the first half, and the steps that were measured since
("new steps", counted in pairs as the planner compares them): it shows whether predictions are
right later, while "first" is of a plan that no step has followed yet. "steps vary" is by how much
the fastest of one pair of steps was slower than that of another pair of the same plan: where that
is much, as on a host whose speed changes while a GPU waits for it, no prediction can be right. On a
GPU the peak is the allocator's, on a CPU that of saved tensors.

ROK (recompute, offload, keep; figure 5.12 of SSDTrain's chapter): tokens a second over the peak by
batch size, for keeping all, checkpointing each layer, `save_on_cpu`, moving all raw, and the
planner at the peak of each of these, of a CPU at three quarters of it. Each way has a model of its
own and fresh ids in each step; the fastest step counts. On a CPU the peak is what torch has
allocated since the step began. Rows "planned at keep's peak" have the memory that keeping takes for
the largest of the batches, and batches that grow until a step takes more: the last that fits is the
largest one, "of keep" its tokens a second over those of keeping with the batch that memory is for.
--plot draws the curves.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from activations_pictures import ROK, draw
from timing import add_output, print_tables, run_parts
from torch import nn

import bitslab
from bitslab.activations import planned
from bitslab.engine.advisor.planning import Correction, MeasuredStep, Plan, Solver, Timeline

Rows = list[dict[str, Any]]
Report = Callable[[str], None]
#: Seconds of a step, its peak in bytes, and what was planned.
Point = tuple[float, int, str]
MODELS = ("llama", "gpt2", "bert")
#: Of the way from the least possible to keeping everything, by model: ten plans.
SHARES = {"llama": (0.1, 0.3, 0.5, 0.8), "gpt2": (0.2, 0.4, 0.7), "bert": (0.2, 0.4, 0.7)}
#: Batches of the planner, over the largest that is kept: finer about what is asked for.
GROWTH = (1.25, 1.5, 1.8, 2, 2.25, 2.5, 3, 4, 6, 8)
AT_KEEPS_PEAK = "planned at keep's peak"
ROK_WAYS = ("keep", "checkpoint", "save_on_cpu", "raw")
VOCABULARY = 1000
#: Seconds of steps on a GPU before those that are timed, at least.
WARM_SECONDS = 8.0
#: Tensors that are smaller are kept: of small models on a CPU, and on a GPU.
MIN_BYTES = {"cpu": 16 << 10, "cuda": 256 << 10}


@contextmanager
def made_on(device: str) -> Iterator[None]:
    """Make models on a device, of which a CPU would take minutes; bfloat16 on a GPU."""
    before = torch.get_default_dtype()
    if device == "cuda":
        torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def make_model(name: str, arguments: argparse.Namespace) -> nn.Module:
    """Return a model with random weights, on its device."""
    with made_on(arguments.device):
        model = _model(name, arguments)
    model.config.use_cache = False  # layers that fill caches cannot be computed again
    found: nn.Module = model.train()
    return found


def _model(name: str, arguments: argparse.Namespace) -> Any:
    import transformers

    hidden, layers, sequence = arguments.hidden, arguments.layers, arguments.sequence
    heads = max(1, hidden // arguments.head_dim)
    torch.manual_seed(0)
    config: Any
    if name == "llama":
        config = transformers.LlamaConfig(
            hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
            intermediate_size=int(hidden * 11 / 4), vocab_size=VOCABULARY,
            max_position_embeddings=sequence,
        )  # fmt: skip
        return transformers.LlamaModel(config)
    if name == "gpt2":
        config = transformers.GPT2Config(
            n_embd=hidden, n_layer=layers, n_head=heads, vocab_size=VOCABULARY,
            n_positions=sequence, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        return transformers.GPT2Model(config)
    config = transformers.BertConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=4 * hidden, vocab_size=VOCABULARY, max_position_embeddings=sequence,
    )  # fmt: skip
    return transformers.BertModel(config, add_pooling_layer=False)


class Job:
    """A model in training, with fresh ids in each step.

    The loss weighs channels: behind a norm the sum of all squares is constant, and its gradient
    nothing but rounding.

    Attributes
    ----------
    backward_within : bool
        Whether contexts of steps span the backward pass, too.
    """

    backward_within = False

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
        self._channels = torch.linspace(0, 2, arguments.hidden, device=self.device)

    def step(self, context: AbstractContextManager[Any] | None = None) -> float:
        """Run a forward and a backward pass; return their seconds."""
        shape = self.batch, self.arguments.sequence
        ids = torch.randint(0, VOCABULARY, shape, generator=self._draw).to(self.device)
        self.model.zero_grad(set_to_none=False)
        self._wait()
        begin = time.perf_counter()
        with context or nullcontext():
            states = self.model(input_ids=ids).last_hidden_state
            loss = (states.float().square() @ self._channels).mean()
            if self.backward_within:
                loss.backward()
        if not self.backward_within:
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
    """Collect what the planner compares: a plan, the steps that it had not seen, what it says."""
    module: Any = planned
    original, found = module.compare, []
    seen: list[MeasuredStep] = []

    def compare(plan: Plan, steps: Sequence[MeasuredStep], **options: Any) -> Correction:
        said: Correction = original(plan, steps, **options)
        new = [step for step in steps if not any(step is each for each in seen)]
        seen.extend(new)
        found.append((plan, new, said))
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
    timeline = profiled(offload, job.step)
    most = timeline.predict(timeline.keep_all()).peak_bytes
    least = Solver(timeline).least().prediction.peak_bytes
    offload.detach()
    return [int(least + share * (most - least)) for share in shares]


def profiled(offload: bitslab.ActivationOffload, step: Callable[[], object]) -> Timeline:
    """Run steps until one was profiled; return its timeline."""
    for _ in range(8):
        step()
        if offload.step_profile is not None:
            return Timeline(offload.step_profile)
    raise RuntimeError("no step was profiled")


def kept_bytes(model: nn.Module, step: Callable[[], object]) -> int:
    """Return the peak of saved tensors when all are kept, as a planner sees it."""
    offload = bitslab.offload_activations(model, memory=1 << 50)
    timeline = profiled(offload, step)
    offload.detach()
    return int(timeline.predict(timeline.keep_all()).peak_bytes)


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
        first, last = found[0], last_plan(found)
        # What was predicted by the first half of its comparisons, and what steps took since.
        held_out = last[len(last) // 2 :]
        plan, steps = held_out[0][0], [step for each in held_out for step in each[1]]
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
                "steps vary": vary(found),
                "outcome": last[-1][2].outcome,
                "new steps": len(steps),
                "what": what_of(plan),
            }
        )
        report(", ".join(f"{key} {value}" for key, value in rows[-1].items()))
    job.close()
    return rows


def last_plan(
    found: Sequence[tuple[Plan, list[MeasuredStep], Correction]],
) -> list[tuple[Plan, list[MeasuredStep], Correction]]:
    """Return the comparisons of the plan that was followed last, without other plans in between."""
    last = found[-1][0].choices()
    same = takewhile(lambda each: each[0].choices() == last, reversed(found))
    return list(same)[::-1]


def vary(found: Sequence[tuple[Plan, list[MeasuredStep], Correction]]) -> str:
    """Return how far pairs of steps of one plan are apart: of the plan that was compared most."""
    pairs: dict[str, list[float]] = {}
    for plan, steps, _ in found:
        pairs.setdefault(str(plan.choices()), []).append(min(s.step_s for s in steps))
    most = max(pairs.values(), key=len)
    return f"{max(most) / min(most) - 1:.1%}" if len(most) > 1 else "-"


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


def warm_up(
    job: Job, context: Callable[[], AbstractContextManager[Any]], steps: int
) -> Iterator[None]:
    """Run steps before those that are timed, and yield after each; a GPU's take a while.

    Under load its clocks fall within seconds, so that a way with few such steps would seem faster.
    """
    least_s = job.arguments.warm_seconds if job.device.type == "cuda" else 0.0
    begin = time.perf_counter()
    done = 0
    while done < steps or time.perf_counter() - begin < least_s:
        job.step(context())
        done += 1
        yield


def way_point(job: Job, way: str, limit: int | None, repetitions: int) -> Point:
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
    for _ in warm_up(job, context, 10 if way.startswith("planned") else 3):
        pass
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
        kept: dict[int, Point] = {}
        for batch in arguments.batches:
            points: dict[str, Point] = {}
            ways = list(arguments.rok_ways)
            while ways:
                way = ways.pop(0)
                peer = way.partition(" at ")[2]
                limit = None if not peer else planned_limit(points[peer][1], arguments.device)
                point = point_of(name, batch, way, limit, arguments, report)
                if point is not None:
                    points[way] = point
                if not ways and not peer:
                    ways = [f"planned at {other}" for other in points if other != "raw"]
            if "keep" in points:
                kept[batch] = points["keep"]
            keep_s = kept[batch][0] / batch if batch in kept else None
            rows += [rok_row(batch, *each, keep_s, arguments) for each in points.items()]
        if kept:
            largest = max(kept)
            rows += larger_batches(name, largest, kept[largest], arguments, report)
        tables[f"{ROK}{name}, {shape_of(arguments, 'as shown')}"] = rows
    return tables


def point_of(
    name: str,
    batch: int,
    way: str,
    limit: int | None,
    arguments: argparse.Namespace,
    report: Report,
) -> Point | None:
    """Return what a model of its own takes, or None where the device is too small for it."""
    report(f"{name}, batch {batch}, {way}")
    job = Job(name, batch, arguments)
    try:
        found = way_point(job, way, limit, arguments.repetitions)
        seconds, peak, said = found
        report(
            f"{name}, batch {batch}, {way}: {seconds * 1e3:,.1f} ms, {peak / 1e6:,.0f} MB {said}"
        )
        return found
    except torch.OutOfMemoryError:
        return None
    finally:
        job.close()


def rok_row(
    batch: int, way: str, point: Point, keep_s: float | None, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Return a row; `keep_s` are the seconds of keeping for one sequence."""
    seconds, peak, said = point
    return {
        "batch": batch,
        "way": way,
        "peak MB": round(peak / 1e6, 1),
        "step ms": round(seconds * 1e3, 1),
        "tokens/s": round(batch * arguments.sequence / seconds),
        "of keep": "" if keep_s is None else f"{keep_s * batch / seconds:.2f}",
        "planned MB": said,
    }


def larger_batches(
    name: str, kept_batch: int, kept: Point, arguments: argparse.Namespace, report: Report
) -> Rows:
    """Return rows of larger batches, planned in the memory that keeping takes for its largest.

    The first that takes more ends them, and is reported but no row.
    """
    rows: Rows = []
    keep_s, peak = kept[0] / kept_batch, kept[1]
    limit = planned_limit(peak, arguments.device)
    for batch in dict.fromkeys(math.ceil(kept_batch * by) for by in arguments.growth):
        point = point_of(name, batch, AT_KEEPS_PEAK, limit, arguments, report)
        if point is None or point[1] > peak:
            took = "more than there is" if point is None else f"{point[1] / 1e6:,.1f} MB"
            report(f"{name}, batch {batch}: {took}, where keeping takes {peak / 1e6:,.1f} MB")
            break
        row = rok_row(batch, AT_KEEPS_PEAK, point, keep_s, arguments)
        rows.append(row | {"times keep's batch": f"{batch / kept_batch:.2f}"})
    return rows


def planned_limit(peak_bytes: int, device: str) -> int:
    """Return the limit for the planner: the peak; of a CPU the share of it that is saved."""
    return peak_bytes if device == "cuda" else max(1, peak_bytes * 3 // 4)


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
    add(
        "--rok-ways", nargs="+", choices=ROK_WAYS, default=list(ROK_WAYS),
        help="of the ROK curve, besides the planner at the peak of each (default: all)",
    )  # fmt: skip
    add(
        "--growth", nargs="+", type=float, default=list(GROWTH), metavar="TIMES",
        help="batches in the memory that keeping takes, over its largest (default: ten, 1.25 to 8)",
    )  # fmt: skip
    add("--plot", type=Path, metavar="FILE", help="draw the ROK curves, such as rok.svg")
    add("--steps", type=int, default=24, help="of each plan (default: %(default)s)")
    add("--repetitions", type=int, default=5, help="timed steps (default: %(default)s)")
    add(
        "--warm-seconds", type=float, default=WARM_SECONDS,
        help="of a GPU before a way is timed, until its clocks have fallen (default: %(default)s)",
    )  # fmt: skip


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the script."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts")
    add_options(parser)
    add_output(parser)
    return parser


def show(
    parser: argparse.ArgumentParser,
    parts: Mapping[str, Callable[..., Any]],
    argv: Sequence[str] | None,
) -> None:
    """Run the parts that arguments name, print their tables, and draw what is asked for."""
    arguments = parser.parse_args(argv)
    if arguments.plot and "rok" not in arguments.only:
        parser.error("argument --plot: it draws the part rok, which --only leaves out")
    tables = run_parts(parts, arguments)
    print_tables(tables, arguments.json, arguments.out)
    if arguments.plot:
        draw(tables, arguments.plot)


def main(argv: Sequence[str] | None = None) -> int:
    warnings.simplefilter("ignore", UserWarning)
    show(make_parser(), PARTS, argv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
