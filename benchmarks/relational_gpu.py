"""What `relational.py` measures on a GPU: layers beside peers, and products of packed rows.

Rows are printed as they are measured, graphs from small to large, until the seconds are used up.
"""

from __future__ import annotations

import copy
import functools
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from relational_graphs import PYKEEN, real
from timing import cpu_seconds_in_turn, gpu_seconds, markdown, say
from torch import nn
from torch_geometric import nn as gnn

from bitslab import CompressedTable, SlabCache
from bitslab.engine.kernels.cuda import kernels_on
from bitslab.engine.kernels.cuda.typed_gemm import TypedTiles
from bitslab.engine.kernels.typed_products import SCHEDULES, schedules_of
from bitslab.integrations import pyg
from bitslab.relational import (
    TYPED_SUM,
    CompiledProgram,
    NodeTypes,
    Passes,
    RelationalGraph,
    hgt_of_features,
    rgat,
)

Table = list[dict[str, Any]]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # tests have no GPU

#: Nodes, edges and relations of data sets, from their own descriptions (table 1 of R-GCN for AIFB,
#: MUTAG, BGS and AM), and distinct (source, relation) pairs over edges: of FB15k-237 and AM those
#: of the thesis, of mag-0.1 as counted, else a half.
SIZES = {
    "AIFB": (8_285, 29_043, 45, 0.5),
    "MUTAG": (23_644, 74_227, 23, 0.5),
    "FB15k-237": (14_541, 310_116, 237, 0.26),
    "mag-0.1": (132_000, 345_172, 6, 0.412),
    "BGS": (333_845, 916_199, 103, 0.5),
    "BioKG": (93_773, 5_088_434, 51, 0.5),
    "AM": (1_666_764, 5_988_321, 133, 0.57),
    "WikiKG2": (2_500_604, 17_137_181, 535, 0.5),
    "ogbn-mag": (1_939_743, 21_111_007, 4, 0.5),
}
#: Issue 23: geometric means over graphs against the best of PyG's layers, inference and training.
TARGETS = {"RGCN": (1.79, 2.59), "RGAT": (8.56, 11.34), "HGT": (2.87, 8.02)}


class Printer:
    """Prints the rows of a table as they come, and keeps them; beside JSON to standard error."""

    def __init__(self, title: str, json: bool = False) -> None:
        self.title, self.rows = title, Table()
        self.file = sys.stderr if json else sys.stdout

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        lines = markdown(self.title, [row]).strip().splitlines()
        shown = lines if len(self.rows) == 1 else lines[-1:]
        print("\n".join(shown), file=self.file, flush=True)


@dataclass
class Clock:
    """How long the parts may still take."""

    end: float

    def over(self) -> bool:
        return time.monotonic() > self.end


@dataclass
class Drawn:
    """A graph on the GPU, drawn or real; edges are sorted by relation for plain torch."""

    name: str
    nodes: int
    relations: int
    edges: torch.Tensor
    types: torch.Tensor

    def by_type(self) -> dict[Any, torch.Tensor]:
        bounds = torch.searchsorted(
            self.types, torch.arange(self.relations + 1, device=self.types.device)
        ).tolist()
        return {
            ("n", f"r{r}", "n"): self.edges[:, low:high]
            for r, (low, high) in enumerate(itertools.pairwise(bounds))
        }


def graph_of(name: str) -> Drawn:
    """Return a graph by name: a data set whose files are found, else one drawn with its sizes."""
    found = real(name)
    if found is None:
        return drawn(name)
    types, order = torch.sort(found.types.to(DEVICE), stable=True)
    edges = found.edges.to(DEVICE)[:, order]
    return Drawn(name, found.nodes, found.relations, edges, types)


def drawn(name: str, sizes: tuple[int, int, int, float] | None = None) -> Drawn:
    """Draw a graph: edges share (source, relation) pairs; relations and destinations are skewed."""
    nodes, n, relations, ratio = sizes or SIZES[name]
    draw = torch.Generator(device=DEVICE).manual_seed(0)

    def uniform(count: int) -> torch.Tensor:
        return torch.rand(count, device=DEVICE, generator=draw)

    pairs = int(n * ratio)
    pair_src = (uniform(pairs) * nodes).long()
    pair_type = (uniform(pairs).square() * relations).long()
    pair = torch.cat([torch.arange(pairs, device=DEVICE), (uniform(n - pairs) * pairs).long()])
    dst = (uniform(n).square() * nodes).long()
    types, order = torch.sort(pair_type[pair], stable=True)
    return Drawn(name, nodes, relations, torch.stack([pair_src[pair][order], dst[order]]), types)


def has_grouped_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch has a kernel for groups of rows; else it loops, and the host waits."""
    if dtype is not torch.bfloat16 or device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) in ((9, 0), (10, 0), (10, 3))


def grouped_mm(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return rows ``[n, K]`` times the weight of their group, ``[groups, K, M]``."""
    # torch.nn.functional has it from torch 2.10 on.
    run = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    found: torch.Tensor = run(rows.contiguous(), weight.contiguous(), offs=ends)
    return found


class Plain(nn.Module):
    """The layers in plain torch: edges sorted by relation, one product a relation, index_add.

    With `grouped` the products are those of torch's grouped_mm.
    """

    def __init__(self, model: str, layer: Any, graph: Drawn, grouped: bool = False) -> None:
        super().__init__()
        self.model, self.graph, self.grouped = model, graph, grouped
        self.layer: Any = layer
        at = torch.arange(graph.relations + 1, device=DEVICE)
        self.bounds = torch.searchsorted(graph.types, at).tolist()
        src, dst = graph.edges
        key = dst * graph.relations + graph.types
        _, inverse, counts = torch.unique(key, return_inverse=True, return_counts=True)
        self.ends = torch.tensor(self.bounds[1:], dtype=torch.int32, device=DEVICE)
        self.norm = counts[inverse].float().reciprocal()[:, None].to(next(layer.parameters()).dtype)

    def products(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if self.grouped:
            return grouped_mm(rows, weight, self.ends)
        parts = [
            rows[low:high] @ weight[r]
            for r, (low, high) in enumerate(itertools.pairwise(self.bounds))
        ]
        return torch.cat(parts)

    def summed(self, messages: torch.Tensor) -> torch.Tensor:
        out = messages.new_zeros(self.graph.nodes, messages.shape[1])
        return out.index_add(0, self.graph.edges[1], messages)

    def softmax(self, score: torch.Tensor) -> torch.Tensor:
        dst = self.graph.edges[1]
        largest = score.new_full((self.graph.nodes,), -torch.inf)
        largest = largest.scatter_reduce(0, dst, score.detach(), "amax")
        score = (score - largest[dst]).exp()
        return score / score.new_zeros(self.graph.nodes).index_add(0, dst, score)[dst]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        src, dst = self.graph.edges
        layer = self.layer
        if self.model == "RGCN":
            messages = self.products(x[src], layer.weight) * self.norm
            out: torch.Tensor = self.summed(messages) + x @ layer.root + layer.bias
            return out
        if self.model == "RGAT":
            message = self.products(x[src], layer.weight)
            score = message @ layer.k + self.products(x[dst], layer.weight) @ layer.q
            attention = self.softmax(nn.functional.leaky_relu(score[:, 0], layer.negative_slope))
            out = self.summed(attention[:, None] * message) + layer.bias
            return out
        k, q, v = layer.kqv_lin({"n": x})["n"].chunk(3, 1)
        prior = torch.cat([layer.p_rel["__".join(t)][0] for t in layer.edge_types])
        key = self.products(k[src], layer.k_rel.weight)
        score = (key * q[dst]).sum(1) * prior[self.graph.types] / x.shape[1] ** 0.5
        messages = self.products(v[src], layer.v_rel.weight)
        out = self.summed(self.softmax(score)[:, None] * messages)
        out = layer.out_lin({"n": nn.functional.gelu(out)})["n"]
        return torch.lerp(x, out, layer.skip["n"].sigmoid())


def models(
    graph: Drawn, dim: int, wanted: list[str], dtype: torch.dtype
) -> Iterator[tuple[str, dict[str, Callable[..., Any]]]]:
    """Yield each model with the ways to run it on features, all with the same parameters."""
    edges = (graph.edges, graph.types)
    by_type = graph.by_type()
    meta = (["n"], list(by_type))
    for name, plain, compiled in (
        ("RGCN", gnn.RGCNConv, pyg.RGCNConv),
        ("RGAT", gnn.RGATConv, pyg.RGATConv),
        ("HGT", gnn.HGTConv, pyg.HGTConv),
    ):
        if name not in wanted:
            continue
        given = (meta,) if name == "HGT" else (graph.relations,)
        peer = plain(dim, dim, *given).to(DEVICE, dtype)
        ours = compiled(dim, dim, *given).to(DEVICE, dtype)
        ours.load_state_dict(peer.state_dict())

        def run(layer: Any, name: str = name) -> Callable[..., Any]:
            if name == "HGT":
                return lambda x: layer({"n": x}, by_type)["n"]
            return lambda x: layer(x, *edges)

        ways: dict[str, Callable[..., Any]] = {
            "ours": run(ours),
            "PyG": run(peer),
            "torch": Plain(name, copy.deepcopy(peer), graph),
        }
        if has_grouped_kernel(DEVICE, dtype):  # else it is a loop that the host waits for
            ways["grouped"] = Plain(name, copy.deepcopy(peer), graph, grouped=True)
        yield name, ways


def wall_seconds(run: Callable[[], Any], repetitions: int = 5) -> float:
    """Return the median time of a run with its launches, the GPU idle before and after."""
    times = []
    for i in range(repetitions + 2):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        if i > 1:
            times.append(time.perf_counter() - begin)
    return statistics.median(times)


def measured(run: Callable[[], Any]) -> tuple[float, float] | None:
    """Return milliseconds and MiB of peak memory beyond what is held; None where there is none."""
    try:
        run()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        peak = (torch.cuda.max_memory_allocated() - held) / 2**20
        return 1e3 * wall_seconds(run), peak
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return None


def layers(arguments: Any, clock: Clock) -> Table:
    """Measure the layers beside PyG's and plain torch: milliseconds, and MiB of peak memory."""
    on, dtype = torch.cuda.get_device_name(), getattr(torch, arguments.dtype)
    title = f"Layers on {on}, dims {arguments.dim}, {arguments.dtype}, ms (peak MiB)"
    table = Printer(title, arguments.json)
    small = [name for name in PYKEEN if real(name) is not None]
    for name in arguments.graphs or [*small, *SIZES]:
        if clock.over():
            say(f"left out: {name} and larger graphs (--seconds-limit)")
            break
        graph = graph_of(name)
        sizes = (graph.nodes, graph.relations)
        plan = functools.partial(RelationalGraph, graph.edges, graph.types, *sizes)
        plan_ms = 1e3 * wall_seconds(plan)
        for model, ways in models(graph, arguments.dim, arguments.models, dtype):
            begun = {"graph": name, "model": model, "plan ms": plan_ms}
            x = torch.randn(graph.nodes, arguments.dim, device=DEVICE).to(dtype)
            table.add(begun | layer_row(ways, x, clock))
    for model, goals in TARGETS.items():
        for goal, what in zip(goals, ("inference", "step"), strict=True):
            of_model = [r[f"PyG/ours {what}"] for r in table.rows if r["model"] == model]
            ratios = [float(ratio) for ratio in of_model if ratio != "-"]
            if ratios:
                mean = statistics.geometric_mean(ratios)
                verdict = "ok" if mean >= goal else "missed"
                say(f"{model}, {what}: {mean:.2f} times PyG's (>= {goal}: {verdict})")
    return table.rows


def layer_row(ways: dict[str, Callable[..., Any]], x: torch.Tensor, clock: Clock) -> dict[str, Any]:
    """Measure one layer: ours, PyG's and those of plain torch."""
    leaf = x.clone().requires_grad_()

    def infer(run: Callable[..., Any]) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = run(x)
            return found

    def step(run: Callable[..., Any]) -> None:
        leaf.grad = None
        run(leaf).square().mean().backward()

    row: dict[str, Any] = {}
    expected = infer(ways["torch"])
    error = float((infer(ways["ours"]) - expected).abs().max() / expected.abs().max())
    row["error"] = f"{error:.0e}"
    del expected
    found: dict[tuple[str, str], float] = {}
    for (way, run), (what, work) in itertools.product(
        ways.items(), (("inference", infer), ("step", step))
    ):
        took = None if clock.over() else measured(functools.partial(work, run))
        if took is not None:
            found[way, what] = took[0]
        row[f"{way} {what}"] = "-" if took is None else f"{took[0]:.3f} ({took[1]:.0f})"
    peers = [way for way in ways if way != "ours"]
    for what, way in itertools.product(("inference", "step"), peers):
        both = found.get((way, what)), found.get(("ours", what))
        row[f"{way}/ours {what}"] = both[0] / both[1] if both[0] and both[1] else "-"
    return row


def passes(arguments: Any, clock: Clock) -> Table:
    """Measure programs with each pass off (table 3.5 of the thesis)."""
    table = Printer("Passes on a GPU, ms", arguments.json)
    wanted = {m: run for m, run in layer_programs().items() if m in arguments.models}
    for name in arguments.graphs or ("AIFB", "FB15k-237", "AM"):
        if clock.over():
            say(f"left out: {name} (--seconds-limit)")
            break
        graph = graph_of(name)
        for model, program in wanted.items():
            for what, row in pass_rows(graph, program, arguments.dim).items():
                table.add({"graph": name, "model": model, "what": what} | row)
    return table.rows


def layer_programs() -> dict[str, CompiledProgram]:
    """Return the sums of RGCN, and RGAT and HGT whole, of nodes of one type."""
    attended, hgt = rgat(1, 0.2, False, False), hgt_of_features(1, True)
    assert attended is not None and hgt is not None
    return {"RGCN": TYPED_SUM, "RGAT": attended, "HGT": hgt}


def of_one_type(graph: Drawn) -> RelationalGraph:
    """Return a graph whose nodes are all of one type."""
    types = NodeTypes((0, graph.nodes), (0,) * graph.relations, (0,) * graph.relations)
    return RelationalGraph(graph.edges, graph.types, graph.nodes, graph.relations, types)


def drawn_inputs(graph: Drawn, program: CompiledProgram, dim: int) -> dict[str, torch.Tensor]:
    """Draw a program's inputs, by their names."""
    shapes = {
        "x": (graph.nodes, dim),
        "y": (graph.nodes, dim),
        "weight": (graph.relations, dim, dim),
        "q": (dim, 1),
        "k": (dim, 1),
        "keys": (graph.relations, 1, dim, dim),
        "values": (graph.relations, 1, dim, dim),
        "prior": (graph.relations, 1, 1),
    }
    shapes |= {name: (1, dim, dim) for name in ("wk", "wq", "wv")}
    shapes |= {name: (1, dim) for name in ("bk", "bq", "bv")}
    return {name: torch.randn(*shapes[name], device=DEVICE) for name in program.program.names}


PASSES = ("reorder", "compact", "sides", "fuse")


def without_each(
    program: CompiledProgram, plan: RelationalGraph, inputs: Sequence[torch.Tensor]
) -> tuple[dict[str, CompiledProgram], list[str]]:
    """Return a program with all passes and without each, and the passes that change no step."""
    ways = {"": program.program.compile()}
    same = []
    steps = ways[""].explain(plan, *inputs)
    for off in PASSES:
        ways[off] = program.program.compile(Passes(**{off: False}))
        if ways[off].explain(plan, *inputs) == steps:
            del ways[off]
            same.append(off)
    return ways, same


def pass_rows(graph: Drawn, program: CompiledProgram, dim: int) -> dict[str, dict[str, Any]]:
    """Measure inference and a training step with all passes, and without each, in turn.

    "same" stands for a pass that changes no step of the program on this graph, "-" for one without
    which there is too little memory.
    """
    plan = of_one_type(graph)
    inputs = list(drawn_inputs(graph, program, dim).values())
    leaves = [t.clone().requires_grad_() for t in inputs]

    def infer(compiled: CompiledProgram) -> None:
        with torch.no_grad():
            compiled(plan, *inputs)

    def step(compiled: CompiledProgram) -> None:
        for t in leaves:
            t.grad = None
        out = compiled(plan, *leaves)
        (out[0] if isinstance(out, tuple) else out).square().mean().backward()

    both = (("inference", infer, inputs), ("step", step, leaves))
    return {what: pass_row(plan, program, run, given) for what, run, given in both}


def pass_row(
    plan: RelationalGraph,
    program: CompiledProgram,
    run: Callable[[CompiledProgram], None],
    given: Sequence[torch.Tensor],
) -> dict[str, Any]:
    """Measure a run of a program with all passes, and without each, in turn."""
    ways, same = without_each(program, plan, given)
    runs, slowest = {}, 0.0

    def finished(compiled: CompiledProgram, _: int = 0) -> None:
        run(compiled)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()

    for off, compiled in ways.items():
        try:
            finished(compiled)
            begin = time.perf_counter()
            finished(compiled)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            continue
        slowest = max(slowest, time.perf_counter() - begin)
        runs[off] = functools.partial(finished, compiled)
    # About half a second for each.
    found = cpu_seconds_in_turn(runs, min(max(5, int(0.5 / max(slowest, 1e-3))), 100))
    row = {off: 1e3 * found[off] if off in found else "-" for off in ("", *PASSES)}
    row |= dict.fromkeys(same, "same")
    return {f"no {off}" if off else "all": row[off] for off in row}


def decode(arguments: Any, clock: Clock) -> Table:
    """Measure products over packed rows beside those over raw rows, and beside decoding alone."""
    table = Printer("Typed products of packed rows, 64 columns, 8 relations: ms", arguments.json)
    sizes = (1024, 2048, 256, 512)
    for dtype, row_bytes in itertools.product((torch.float32, torch.bfloat16), sizes):
        if clock.over():
            say("left out: more rows of packed products (--seconds-limit)")
            break
        n = (arguments.mib << 20) // row_bytes
        table.add(decode_row(dtype, row_bytes, n, arguments.schedules))
    return table.rows


def decode_row(dtype: torch.dtype, row_bytes: int, n: int, wanted: Sequence[int]) -> dict[str, Any]:
    """Measure products of n rows of a length, by the usual schedule and those that are wanted.

    "raw" and "packed" are those of the fastest one.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    kernels = kernels_on(device).typed
    depth = row_bytes // dtype.itemsize
    x = (0.02 * torch.randn(n, depth, generator=torch.Generator().manual_seed(0))).to(dtype)
    host = CompressedTable.from_tensor(x, progress=False)
    cache = SlabCache(host, int(1.05 * x.nbytes))
    cache.fill(torch.arange(n))
    raw = x.to(device)
    index = torch.randperm(n, device=device)
    weight = torch.randn(8, depth, 64, device=device).to(dtype)
    bounds = [i * n // 8 for i in range(9)]
    tiles = TypedTiles(bounds, device)
    out = torch.empty(n, 64, dtype=dtype, device=device)
    rows = torch.empty_like(raw)

    def by_table(source: CompressedTable | SlabCache, schedule: int = 0) -> None:
        with source.read_by_products(device) as packed:
            if packed is None or not kernels.takes(packed, depth, schedule):
                raise SystemExit(f"{host!r} is not taken by typed products")
            kernels.product(packed, weight, tiles, out, index=index, schedule=schedule)

    def of_packed(schedule: int, _: int) -> None:
        by_table(cache, schedule)

    def of_raw(schedule: int, _: int) -> None:
        kernels.product(raw, weight, tiles, out, index=index, schedule=schedule)

    def in_two_steps(_: int) -> None:
        cache.gather(index, out=rows)
        kernels.product(rows, weight, tiles, out)

    def by_torch(_: int) -> None:
        torch.index_select(raw, 0, index, out=rows)
        for r, (low, high) in enumerate(itertools.pairwise(bounds)):
            torch.mm(rows[low:high], weight[r], out=out[low:high])

    def ms(run: Callable[[int], Any]) -> float:
        return 1e3 * gpu_seconds(run, 7)

    torch_ms = ms(by_torch)
    of_raw(0, 0)
    expected, same = out.clone(), True
    by_schedule: dict[str, float] = {}
    for number in sorted({0, *wanted}):
        name = SCHEDULES[number].name
        by_schedule[f"raw, {name}"] = ms(functools.partial(of_raw, number))
        same = same and torch.equal(out, expected)
        if number in schedules_of(dtype.itemsize, packed=True):
            by_schedule[f"packed, {name}"] = ms(functools.partial(of_packed, number))
            same = same and torch.equal(out, expected)
    raw_ms, packed_ms = (
        min(took for name, took in by_schedule.items() if name.startswith(kind))
        for kind in ("raw", "packed")
    )
    decode_ms = ms(lambda _: cache.gather(index, out=rows))
    two_ms = ms(in_two_steps)
    host_ms = ms(lambda _: by_table(host))
    gather_ms = ms(lambda _: host.gather(index, out=rows, sort=False))
    limit = raw_ms if row_bytes >= 1024 else max(raw_ms, decode_ms)
    packed_bytes = host.nbytes
    row = {
        "dtype": str(dtype).removeprefix("torch."),
        "row": f"{row_bytes} B",
        "ratio": host.ratio,
        "raw": raw_ms,
        "torch": torch_ms,
        "decode alone": decode_ms,
        "packed": packed_ms,
        "packed/limit (<= 1.15)": packed_ms / limit,
        "two steps": two_ms,
        "two steps/packed (>= 1.3)": two_ms / packed_ms,
        "host gather": gather_ms,
        "host packed": host_ms,
        "host rate (>= 0.9)": gather_ms / host_ms,
        "GB/s packed": packed_bytes / host_ms / 1e6,
        "same bits": "yes" if same else "NO",
        **dict.fromkeys((f"{k}, {s.name}" for k in ("raw", "packed") for s in SCHEDULES), "-"),
        **by_schedule,
    }
    cache.close()
    host.close()
    return row


def run(arguments: Any) -> dict[str, Table]:
    """Run the parts that are asked for; their tables by title."""
    clock = Clock(time.monotonic() + arguments.seconds_limit)
    parts: dict[str, Callable[[Any, Clock], Table]] = {
        "decode": decode,
        "gpu": layers,
        "passes": passes,
    }
    wanted = [name for name in parts if name in arguments.only]
    tables = {}
    for place, name in enumerate(wanted):
        # What is left is shared by the parts that are left.
        left = clock.end - time.monotonic()
        mine = Clock(time.monotonic() + left / (len(wanted) - place))
        tables[name] = parts[name](arguments, mine)
    return tables
