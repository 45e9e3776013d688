"""Plans of what becomes of saved tensors, beside those of other planners, on one timeline.

python benchmarks/activations_plan.py                         # drawn steps and a recorded one
python benchmarks/activations_plan.py --sites 12 40 500 --milp-seconds 20

A row is a step and a limit of memory, so far from the least possible to that of keeping everything.
Columns are what a way adds to the step by the timeline: the planner, a mixed integer program of the
same problem (scipy's HiGHS, up to 48 sites; `proved` is its bound for fluid queues), offloading all
raw bytes, packing and offloading all, checkpointing all layers, SSDTrain's formula for the link.
`-` is a way whose peak exceeds the limit. `seconds` is CPU time of the planner.

The recorded step is one of a small transformer on this CPU: sizes, moments and replays are
measured, the link takes twice the forward pass for all of its bytes, and codecs are assumed (a
share of 0.7 at 10 and 20 times the link's rate).
"""

from __future__ import annotations

import argparse
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from plan_milp import milp_plan
from timing import add_output, print_tables, say
from torch import nn
from torch.nn import functional as F

from bitslab.activations.replay import Replay, replayable
from bitslab.engine.advisor import SwapLink
from bitslab.engine.advisor.planning import (
    CHECKPOINT,
    Candidate,
    ModuleProfile,
    Packing,
    SiteProfile,
    Solver,
    StepProfile,
    Timeline,
    adaptive_offload,
    drawn_profile,
    offload_units,
)

Rows = list[dict[str, Any]]
SHARES = (0.1, 0.3, 0.6)
MOST_MILP_SITES = 48
LEAST_BYTES = 16 << 10


class Layer(nn.Module):
    """A layer with causal attention and SwiGLU."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, self.second = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.gate, self.up = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, 3 * hidden)
        self.down = nn.Linear(3 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.second(x)
        made: torch.Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return made


class Recorder:
    """Records a step of layers as a profile."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.sites: list[dict[str, Any]] = []
        self.parameters = {id(p.untyped_storage()) for each in layers for p in each.parameters()}
        self.by_storage: weakref.WeakKeyDictionary[Any, dict[str, Any]] = (
            weakref.WeakKeyDictionary()
        )
        self.layer = ""
        self.spans: dict[str, list[float]] = {}
        self.outside_s = 0.0  # what recording takes
        self.reading: list[str] | None = None
        for i, each in enumerate(layers):
            name = f"layer{i}"
            each.register_forward_pre_hook(lambda *_, n=name: self._enter(n))
            each.register_forward_hook(lambda *_: self._leave())
            each.register_full_backward_pre_hook(lambda *_, n=name: self._mark(n))
            each.register_full_backward_hook(lambda *_, n=name: self._mark(n))

    def now(self) -> float:
        return time.perf_counter() - self.outside_s

    def _mark(self, name: str) -> None:
        self.spans[name].append(self.now())

    def _enter(self, name: str) -> None:
        self.layer, self.spans[name] = name, [self.now()]

    def _leave(self) -> None:
        self.spans[self.layer].append(self.now())
        self.layer = ""

    def pack(self, t: torch.Tensor) -> Any:
        begin = time.perf_counter()
        storage = t.untyped_storage()
        site = self.by_storage.get(storage)
        if site is None and id(storage) not in self.parameters and storage.nbytes() >= LEAST_BYTES:
            site = self._site(t, storage, begin - self.outside_s)
            self.by_storage[storage] = site
            self.sites.append(site)
        packed = t.detach(), site
        self.outside_s += time.perf_counter() - begin
        return packed

    def _site(self, t: torch.Tensor, storage: Any, at_s: float) -> dict[str, Any]:
        site: dict[str, Any] = {
            "site": f"{self.layer}:{len(self.sites)}",
            "nbytes": storage.nbytes(),
            "saved_s": at_s,
            "module": self.layer,
        }
        self.reading = []  # what the replay reads
        root = t if t._base is None else t._base  # a linear layer saves a view of its input
        found = replayable(root) if root.nbytes == storage.nbytes() else None
        if found is not None:
            site |= {"replay_s": best_seconds(found), "replay_from": tuple({*self.reading})}
        self.reading = None
        weakref.finalize(storage, lambda: site.update(freed_s=self.now()))
        return site

    def unpack(self, packed: Any) -> torch.Tensor:
        t, site = packed
        if site is not None:
            if self.reading is not None:
                self.reading.append(site["site"])
            else:
                site.setdefault("read_s", self.now())
        assert isinstance(t, torch.Tensor)
        return t


def best_seconds(replay: Replay) -> float:
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        replay.tensor()
        times.append(time.perf_counter() - begin)
    return min(times)


def recorded_profile(n_layers: int, hidden: int = 128, tokens: int = 256) -> StepProfile:
    """Return the profile of a step of a transformer on this CPU, the third that it takes."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(Layer(hidden) for _ in range(n_layers)))
    recorder = None
    for _ in range(3):
        for module in layers.modules():
            for hooks in ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks"):
                getattr(module, hooks).clear()
            module._backward_pre_hooks.clear()
        x = torch.randn(4, tokens, hidden, requires_grad=True)
        recorder = Recorder(list(layers))
        begin = recorder.now()
        with torch.autograd.graph.saved_tensors_hooks(recorder.pack, recorder.unpack):
            loss = layers(x).square().mean()
        turn = recorder.now()
        loss.backward()
        end = recorder.now()
        del loss
    assert recorder is not None
    return _profile(recorder, begin, turn, end)


def _profile(recorder: Recorder, begin: float, turn: float, end: float) -> StepProfile:
    forward_s, total = turn - begin, sum(each["nbytes"] for each in recorder.sites)
    rate = total / (2 * forward_s)
    sites = []
    for each in recorder.sites:
        nbytes = each["nbytes"]
        read = min(max(each.get("read_s", end), turn), end)
        facts = each | {
            "saved_s": max(0.0, each["saved_s"] - begin),
            "read_s": read - begin,
            "freed_s": min(max(each.get("freed_s", end), read), end) - begin,
            "packings": {"codec": Packing(0.7, nbytes / (10 * rate), nbytes / (20 * rate))},
        }
        sites.append(SiteProfile(**facts))
    modules = []
    for name, span in recorder.spans.items():
        saved = [each for each in recorder.sites if each["module"] == name]
        entered, left, back, done = (moment - begin for moment in span[:4])
        modules.append(
            ModuleProfile(
                module=name,
                begin_s=entered,
                backward_begin_s=back,
                backward_end_s=min(done, end - begin),
                checkpoint_s=left - entered,
                checkpoint_bytes=min(each["nbytes"] for each in saved),
            )
        )
    return StepProfile(
        sites=tuple(sites),
        modules=tuple(modules),
        turn_s=turn - begin,
        end_s=end - begin,
        other_bytes=((0.0, total // 4),),
        link=SwapLink(rate, rate, 1e-5),
    )


def row_of(title: str, profile: StepProfile, share: float, milp_seconds: float) -> dict[str, Any]:
    """Return what each way adds to a step, at a limit."""
    timeline = Timeline(profile)
    solver = Solver(timeline)
    plain = timeline.predict(timeline.keep_all())
    least = solver.least().prediction.peak_bytes
    limit = least + share * (plain.peak_bytes - least)

    def added(step_s: float) -> str:
        return f"+{step_s / plain.step_s - 1:.1%}"

    def of(chosen: dict[str, Candidate]) -> str:
        found = timeline.predict(timeline.choices(chosen), limit_bytes=limit)
        return added(found.step_s) if found.peak_bytes <= limit + 0.5 else "-"

    begin = time.process_time()
    planned = solver.solve(limit)
    seconds = time.process_time() - begin
    row: dict[str, Any] = {
        "step": title,
        "sites": len(profile.sites),
        "peak": f"{limit / plain.peak_bytes:.0%} of {plain.peak_bytes / 1e6:,.0f} MB",
        "plain ms": round(plain.step_s * 1e3, 1),
        "planner": added(planned.prediction.step_s),
        "milp": "",
        "proved": "",
    }
    if len(profile.sites) <= MOST_MILP_SITES and milp_seconds > 0:
        found, least_s = milp_plan(timeline, limit, milp_seconds)
        row["milp"] = "-" if found is None else added(found.prediction.step_s)
        row["proved"] = added(least_s)
    named = list(zip(profile.sites, timeline.candidates, strict=True))
    host = Candidate("host")
    row["all raw"] = of({s.site: host for s, own in named if host in own})
    packed = {
        s.site: next((c for c in own if c.action == "host" and c.codec), host)
        for s, own in named
        if host in own
    }
    row["all packed"] = of(packed)
    row["checkpoint"] = of({s.site: CHECKPOINT for s in profile.sites if s.module})
    assert profile.link is not None
    formula = adaptive_offload(offload_units(profile), profile.turn_s, profile.link.d2h_bytes_per_s)
    moved = formula.choices(profile.sites, host)
    row["SSDTrain"] = of(moved)
    return row | {"seconds": round(seconds, 2)}


def problems(sizes: Sequence[int]) -> Iterator[tuple[str, StepProfile]]:
    """Yield drawn steps of so many sites, and a recorded one."""
    for n in sizes:
        for seed in (0, 1):
            yield f"drawn {seed}", drawn_profile(seed, n, disk=False)
    yield "transformer", recorded_profile(4)


def plan(arguments: argparse.Namespace, report: Callable[[str], None]) -> dict[str, Rows]:
    """Return the table of plans."""
    options = vars(arguments)
    rows = []
    for title, profile in problems(options.get("sites") or (12, 40, 500)):
        for share in SHARES:
            report(f"{title}, {len(profile.sites)} sites, {share:.0%}")
            rows.append(row_of(title, profile, share, options.get("milp_seconds", 10.0)))
    return {"plan: what each way adds to a step at a limit of memory": rows}


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the script."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--sites", type=int, nargs="*", default=[12, 40, 500], help="of drawn steps")
    add("--milp-seconds", type=float, default=10.0, help="of each program (0: none)")
    add_output(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    arguments = make_parser().parse_args(argv)
    tables = plan(arguments, say)
    print_tables(tables, arguments.json, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
