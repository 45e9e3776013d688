"""Step times of CNNs whose saved tensors leave the device, beside plain training and peers.

A model is trained for some steps, and from there in each way anew: every step has other images, and
the ways of a model run one after the other in one process. `exposed` is what a step takes longer
than the plain one; `of raw` and `of save_on_cpu` are shares of what is exposed there. `forward`,
`backward`: until the device is done with it; `host`: until the host has queued all of a step, which
is far less than the step unless the host waits or is the limit. `out` is what left the device as it
was before packing, `crossed` what crossed for it, in GB; `link`: what that takes at the measured
rates, both ways together. Times are medians on a GPU, and the least on a CPU, where more runs.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from cnn.models import ACTIVATIONS, SIDES
from swap_decisions import compared, grid, tensors_of, time_model
from swap_job import (
    DENSE,
    LOSSY_BITS,
    MODELS,
    PEERS,
    POLICIES,
    SELECTS,
    SPARSE,
    STATIC_CODEC,
    Job,
    make_way,
    torchtune_offload,
)
from swap_profile import profile_rows

import bitslab
from bitslab.engine.advisor import SwapLink
from bitslab.engine.memory import host_arena

Rows = list[dict[str, Any]]
Report = Callable[[str], None]

#: Images of an epoch, as the paper has them.
EPOCH_IMAGES = {"imagenet": 1_281_167, "cifar": 50_000}
#: Ways of which a step is shown by stream and kernel.
PROFILED = ("raw", "static", "auto", "lossy")
#: Profiles of passes 0, 2, 4, 8 and 16, of which the first ones find codecs that are not fitted
#: yet, and steps as decided by the last.
WARM_UP = {"auto": 20, "lossy": 20}
LEAST_STEPS = 3
#: A way that is slower than that is timed for fewer steps.
WAY_SECONDS = 4.0
#: The step whose loss is shown: but for operators that add in no fixed order, it is the same in
#: every lossless way.
COMPARED_STEP = 2
#: Means over models in sections 6.1 and 6.2 of the paper and its abstract, and our columns.
PAPER = (
    ("exposed swap time below vDNN's (raw), %", SPARSE, "auto below raw %", 50.9),
    ("exposed swap time below vDNN's (raw), %", DENSE, "lossy below raw %", 46.1),
    ("throughput over vDNN's (raw)", SPARSE, "throughput, auto / raw", 1.25),
    ("throughput over vDNN's (raw)", DENSE, "throughput, lossy / raw", 1.225),
    ("throughput over vDNN++'s (host)", SPARSE, "throughput, auto / host", 2.9),
    ("throughput over SC's (static)", SPARSE, "throughput, auto / static", 1.055),
)


@dataclass
class Measured:
    """What was measured of one way; times in seconds."""

    way: str
    select: str
    step_s: float
    forward_s: float
    backward_s: float
    host_s: float
    host_forward_s: float
    warm_up_s: float
    steps: int
    loss: float
    device_bytes: int
    host_bytes: int
    out_bytes: float = 0.0
    crossed_out_bytes: float = 0.0
    crossed_in_bytes: float = 0.0
    tensors: float = 0.0
    notes: list[str] = field(default_factory=list)
    decisions: Rows = field(default_factory=list)
    sites: Rows = field(default_factory=list)
    agreement: dict[str, float] = field(default_factory=dict)
    profile: Rows = field(default_factory=list)

    @property
    def name(self) -> str:
        """The way, and which tensors."""
        return f"{self.way}, {self.select}" if self.select else self.way


class Budget:
    """Seconds that are left, shared between what is still to be measured."""

    def __init__(self, seconds: float | None, parts: int) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds
        self._parts = parts

    @property
    def is_spent(self) -> bool:
        """Whether nothing is left."""
        return self._end is not None and time.monotonic() >= self._end

    def take(self) -> float:
        """Return the moment at which the next part is to be over."""
        parts, self._parts = max(1, self._parts), self._parts - 1
        if self._end is None:
            return float("inf")
        now = time.monotonic()
        return now + max(0.0, self._end - now) / parts


def measure(job: Job, way: str, select: str, until: float) -> Measured:
    """Train in one way until a moment, and return the medians."""
    arguments = job.arguments
    job.restore()
    release(job)
    begin = time.perf_counter()
    used = make_way(job, way, select)
    try:
        first = [
            job.step(used.context())["loss"]
            for _ in range(WARM_UP.get(way.partition(":")[0], arguments.warm_up))
        ]
        warm_up_s = time.perf_counter() - begin
        until = min(until, time.monotonic() + WAY_SECONDS)
        before = used.counts()
        if job.on_gpu:
            torch.cuda.reset_peak_memory_stats(job.device)
        times: list[dict[str, float]] = []
        while len(times) < arguments.steps and (
            len(times) < LEAST_STEPS or time.monotonic() < until
        ):
            times.append(job.step(used.context()))
        device_bytes = torch.cuda.max_memory_allocated(job.device) if job.on_gpu else 0
        # Once more, with all sizes known before the backward pass, so that each is counted.
        held = []

        def between() -> None:
            job.wait()
            held.append(host_bytes(job))

        job.step(used.context(), between)
        after = used.counts()
        middle = statistics.median if job.on_gpu else min
        medians: dict[str, Any] = {name: middle(t[name] for t in times) for name in times[0]}
        measured = Measured(
            way=way,
            select=select,
            **medians | {"loss": first[min(COMPARED_STEP, len(first) - 1)]},
            warm_up_s=warm_up_s,
            steps=len(times),
            device_bytes=device_bytes,
            host_bytes=held[0],
        )
        if after:
            change = {name: after[name] - before[name] for name in after}
            steps = len(times) + 1
            measured.out_bytes = change["out"] / steps
            measured.crossed_out_bytes = change["crossed out"] / steps
            measured.crossed_in_bytes = change["crossed in"] / steps
            measured.tensors = change["tensors"] / steps
        known = used.report()
        if known is not None:
            notes = [note for note in known.notes if not note.startswith("What is computed")]
            measured.notes, measured.decisions = notes, [dict(row) for row in known.decisions]
        if arguments.profile and job.on_gpu and way in PROFILED:
            with going_on(arguments, f"profile of {measured.name}"):
                measured.profile = profile_rows(lambda: job.step(used.context()))
    finally:
        used.close()
    if way == "auto" and arguments.agreement and measured.decisions:
        last = [r for r in measured.decisions if r["profile"] == measured.decisions[-1]["profile"]]
        with going_on(arguments, f"measured times of the decisions of {measured.name}"):
            measured.sites, measured.agreement = compared(
                last, tensors_of(job, SELECTS[select]), time_model(job, last).predict, job.limits
            )
    return measured


@contextlib.contextmanager
def going_on(arguments: argparse.Namespace, what: str) -> Iterator[None]:
    """Report an error and go on: what else there is to measure is worth its time."""
    try:
        yield
    except Exception:
        print(f"FAILED: {what}\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        arguments.failed.append(what)


def release(job: Job) -> None:
    """Give back what the way before has left, but for our arena: page-locking takes seconds."""
    gc.collect()
    if job.on_gpu:
        torch.cuda.empty_cache()
        empty: Any = getattr(torch._C, "_host_emptyCache", None)
        if empty is not None:
            empty()


def host_bytes(job: Job) -> int:
    """Return the bytes of the host that saved tensors take at present, ours and those of torch."""
    held = host_arena().stats()["used_bytes"]
    stats: Any = getattr(torch.cuda, "host_memory_stats", None)
    if job.on_gpu and stats is not None:
        held += stats().get("allocated_bytes.current", 0)
    return held


def row_of(each: Measured, job: Job, plain: Measured, found: Mapping[str, Measured]) -> Any:
    """Return a row of the table of one model."""
    exposed = each.step_s - plain.step_s
    row: dict[str, Any] = {"way": each.name, "step": each.step_s * 1e3}
    if each is not plain:
        row["exposed"] = exposed * 1e3
        for title, name in (
            ("of raw", f"raw, {each.select}" if each.select else "raw, all"),
            ("of save_on_cpu", "save_on_cpu"),
        ):
            other = found.get(name)
            if other is not None and other is not each:
                row[title] = exposed / (other.step_s - plain.step_s)
    row |= {
        "forward": each.forward_s * 1e3,
        "backward": each.backward_s * 1e3,
        "host": each.host_s * 1e3,
        "host fwd": each.host_forward_s * 1e3,
        "images/s": job.batch_size / each.step_s,
        "h an epoch": EPOCH_IMAGES[job.arguments.shape] / job.batch_size * each.step_s / 3600,
        "tensors": each.tensors,
        "out GB": each.out_bytes / 1e9,
        "crossed out": each.crossed_out_bytes / 1e9,
        "crossed in": each.crossed_in_bytes / 1e9,
        "link": link_ms(each, job),
        "device GB": each.device_bytes / 1e9,
        "host GB": each.host_bytes / 1e9,
        "warm-up s": each.warm_up_s,
        "steps": each.steps,
        "loss": each.loss,
    }
    return row


def link_ms(each: Measured, job: Job) -> float:
    """Return the milliseconds that what crosses takes of the link, to the host and back."""
    if not each.out_bytes or not job.on_gpu:
        return 0.0
    link = SwapLink.measured(job.device)
    out_s = link.to_host_seconds(each.crossed_out_bytes)
    return 1e3 * (out_s + link.to_device_seconds(each.crossed_in_bytes))


def ways_of(arguments: argparse.Namespace, activation: str) -> list[tuple[str, str]]:
    """Return the ways to measure and which tensors they move."""
    ways = [("plain", "")]
    lossy = activation != SPARSE
    policies = [name for name in arguments.policies if name != "lossy" or lossy]
    ways += [
        (name, select)
        for i, select in enumerate(arguments.select)
        for name in policies
        if name != "host" or not i  # its CPU takes seconds a step
    ]
    return ways + [(name, "") for name in arguments.peers]


def usable(arguments: argparse.Namespace, report: Report) -> None:
    """Leave out the ways that are not to be had here, and say so."""
    from bitslab.errors import ArgumentError

    for name in list(arguments.policies):
        try:
            bitslab.ActivationOffload("auto" if name == "lossy" else name.partition(":")[0])
        except ArgumentError as error:
            report(f"left out: {name} ({error})")
            arguments.policies.remove(name)
    if "torchtune" in arguments.peers:
        try:
            torchtune_offload()
        except ImportError as error:
            report(f"left out: torchtune ({error})")
            arguments.peers.remove("torchtune")


def train(arguments: argparse.Namespace, report: Report) -> dict[str, Rows]:
    """Return tables of each model, and of all together."""
    usable(arguments, report)
    device = torch.device(arguments.device)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
    if arguments.shape is None:
        arguments.shape = "imagenet" if device.type == "cuda" else "cifar"
    models = [m for m in arguments.models or MODELS if m in MODELS]
    gridded = arguments.grid
    if gridded is None:
        gridded = ["vgg16"] if device.type == "cuda" and "vgg16" in models else []
    jobs = [(m, a) for m in models for a in arguments.activations]
    budget = Budget(
        arguments.seconds_limit,
        sum(1 + len(ways_of(arguments, activation)) for _, activation in jobs),
    )
    tables: dict[str, Rows] = {}
    summary: Rows = []
    with tuned():
        for model, activation in jobs:
            if budget.is_spent:
                report(f"left out: {model}, {activation} (--seconds-limit)")
                continue
            measure_model(model, activation, arguments, device, budget, report, tables, summary)
        for model in gridded:
            if budget.is_spent:
                report(f"left out: decisions of {model} by epoch (--seconds-limit)")
            else:
                report(f"{model}, {SPARSE}: decisions by epoch")
                with going_on(arguments, f"decisions of {model} by epoch"):
                    tables |= grid(model, Job(model, SPARSE, arguments, device))
    if summary:
        tables |= summaries(summary)
    return tables


def measure_model(
    model: str,
    activation: str,
    arguments: argparse.Namespace,
    device: torch.device,
    budget: Budget,
    report: Report,
    tables: dict[str, Rows],
    summary: Rows,
) -> None:
    """Measure one model in every way; add its tables and its rows of the summary."""
    job = Job(model, activation, arguments, device)
    found: dict[str, Measured] = {}
    for way, select in ways_of(arguments, activation):
        name = f"{way}, {select}" if select else way
        until = budget.take()
        if budget.is_spent and way != "plain":
            report(f"left out: {model}, {activation}: {name} (--seconds-limit)")
            continue
        with going_on(arguments, f"{model}, {activation}: {name}"):
            found[name] = measure(job, way, select, until)
        if "plain" not in found:
            return
        if name not in found:
            continue
        each = found[name]
        report(
            f"{model}, {activation}: {name}: {each.step_s * 1e3:.1f} ms a step, {each.steps} "
            f"steps, {each.warm_up_s:.1f} s of warm-up"
        )
    plain = found["plain"]
    if not budget.is_spent:  # has the machine become slower?
        again = found["plain, at the end"] = measure(job, "plain", "", budget.take())
        again.way = "plain, at the end"
    side = SIDES[arguments.shape]
    title = (
        f"{model}, {activation}, {job.batch_size} images of {side} x {side}, {arguments.dtype}, "
        f"width {job.width:g}, {device_name(device)}: ms a step"
    )
    tables[title] = [row_of(each, job, plain, found) for each in found.values()]
    for each in found.values():
        heading = f"{model}, {activation}: {each.name}"
        if each.profile:
            tables[f"{heading}: one step by stream and kernel"] = each.profile
        if each.decisions:
            tables[f"{heading}: decisions, by profile"] = decided(each.decisions)
        if each.sites and arguments.profile:
            tables[f"{heading}: decisions of the last profile, and by measured times"] = each.sites
        for note in each.notes:
            report(f"{heading}: {note:.300}")
    summary += summary_rows(model, activation, found, job)


def decided(decisions: Rows) -> Rows:
    """Return a row for each profile: its zeros, and how many bytes were decided to go which way."""
    rows: dict[int, dict[str, Any]] = {}
    for row in decisions:
        at = rows.setdefault(
            row["profile"], {"profile": row["profile"], "sites": 0, "zeros %": 0.0}
        )
        total = sum(r["nbytes"] for r in decisions if r["profile"] == row["profile"])
        at["sites"] += 1
        at["zeros %"] += 100 * (row["sparsity"] or 0.0) * row["nbytes"] / total
        what = row["codec"] or row["action"]
        at[what] = at.get(what, 0) + 1
        at[f"{what} GB"] = at.get(f"{what} GB", 0.0) + row["nbytes"] / 1e9
    return list(rows.values())


def summary_rows(model: str, activation: str, found: Mapping[str, Measured], job: Job) -> Rows:
    """Return a row for each choice of tensors."""
    plain = found["plain"].step_s
    rows = []
    for select in job.arguments.select:
        own = {e.way: e for e in found.values() if e.select == select}
        row: dict[str, Any] = {
            "model": model,
            "activation": activation,
            "tensors": select,
            "plain ms": plain * 1e3,
        }
        for name, each in own.items():
            row[f"{name} exposed"] = (each.step_s - plain) * 1e3
        both = [own[name].step_s for name in ("raw", "static") if name in own]
        for name in ("auto", "lossy"):
            if name in own and "raw" in own:
                row[f"{name} below raw %"] = 100 * (
                    1 - (own[name].step_s - plain) / (own["raw"].step_s - plain)
                )
        if "auto" in own and both:
            row["auto behind the better %"] = 100 * (own["auto"].step_s / min(both) - 1)
        if "auto" in own and "save_on_cpu" in found:
            row["auto of save_on_cpu"] = (own["auto"].step_s - plain) / (
                found["save_on_cpu"].step_s - plain
            )
        if "auto" in own and own["auto"].agreement:
            row |= {
                "sites": own["auto"].agreement["sites"],
                "decisions agree %": 100 * own["auto"].agreement["agreement"],
                "time model off %": 100 * own["auto"].agreement["model error"],
            }
        for name in ("auto", "lossy"):
            for peer in ("raw", "host", "static"):
                if name in own and peer in own:
                    row[f"throughput, {name} / {peer}"] = own[peer].step_s / own[name].step_s
        rows.append(row)
    return rows


def summaries(rows: Rows) -> dict[str, Rows]:
    """Return the summary, with means of the sparse and of the dense models."""
    means = []
    for activation, select in dict.fromkeys((row["activation"], row["tensors"]) for row in rows):
        own = [row for row in rows if (row["activation"], row["tensors"]) == (activation, select)]
        mean: dict[str, Any] = {"model": "mean", "activation": activation, "tensors": select}
        for key in dict.fromkeys(key for row in own for key in row):
            values = [row[key] for row in own if isinstance(row.get(key), float)]
            if values:
                mean[key] = sum(values) / len(values)
        means.append(mean)
    title = (
        "all models; asked: auto at most 2 % behind the better of raw and static; conv_inputs: "
        "auto 40 % below raw (sparse), lossy 35 % (dense); all: auto at most 0.5 of save_on_cpu; "
        "decisions agree with measured times in 93 %"
    )
    tables = {title: [*rows, *means]}
    beside = [
        {"figure": figure, "activation": activation, "paper": paper, "here": mean[key]}
        for figure, activation, key, paper in PAPER
        for mean in means
        if (mean["activation"], mean["tensors"]) == (activation, "conv_inputs") and key in mean
    ]
    if beside:
        tables["beside CSWAP+ on a V100, whose link moved 11 GB/s (means of conv_inputs)"] = beside
    return tables


@contextlib.contextmanager
def tuned() -> Iterator[None]:
    """Let cuDNN choose its fastest algorithms, as who trains does."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def device_name(device: torch.device) -> str:
    """Return what the device is."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this part."""
    add = parser.add_argument_group("train").add_argument
    add(
        "--activations",
        nargs="+",
        choices=ACTIVATIONS,
        default=[SPARSE, DENSE],
        metavar="NAME",
        help=f"{', '.join(ACTIVATIONS)} (default: {SPARSE} {DENSE})",
    )
    add(
        "--policies",
        nargs="*",
        default=list(POLICIES),
        metavar="POLICY[:CODEC,...]",
        help=f"of bitslab.offload_activations, with codecs; {STATIC_CODEC} for static, the usual "
        f"ones for auto; lossy is auto with zfp at P = {LOSSY_BITS} for what is dense (default: "
        f"{' '.join(POLICIES)})",
    )
    add(
        "--peers",
        nargs="*",
        choices=PEERS,
        default=list(PEERS),
        metavar="PEER",
        help=f"default: {' '.join(PEERS)}, where it imports",
    )
    add(
        "--select",
        nargs="+",
        choices=SELECTS,
        default=list(SELECTS),
        help="which tensors policies move; peers move all (default: both)",
    )
    add("--shape", choices=SIDES, help="default: imagenet on a GPU, else cifar")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="bfloat16: autocast")
    add("--train-batch", type=int, metavar="N", help="images a step (default: by model)")
    add(
        "--in-flight-mb",
        type=int,
        default=256,
        metavar="MB",
        help="of originals under way (default: %(default)s, a sixteenth of what a step saves; the "
        "library's own default keeps most of so small a step on a large GPU)",
    )
    add("--train-steps", type=int, default=20, help="plain ones beforehand (default: %(default)s)")
    add("--warm-up", type=int, default=3, help="steps of each way (default: %(default)s)")
    add("--steps", type=int, default=10, help="that are timed (default: %(default)s)")
    add(
        "--seconds-limit",
        type=float,
        metavar="S",
        help="leave out what does not fit; at first steps, then ways, then models",
    )
    add(
        "--grid",
        nargs="*",
        choices=MODELS,
        metavar="MODEL",
        help="with ReLU, decisions by layer and epoch (default: vgg16 on a GPU, if it is measured)",
    )
    add("--no-agreement", dest="agreement", action="store_false", help="no codecs timed by site")
    add("--no-profile", dest="profile", action="store_false", help="no kernels, no sites")
