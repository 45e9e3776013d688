"""Whole exchanges over links: two ranks of gloo, one link slowed, or two GPUs and NCCL's links.

Called by `all_to_all.py --only links`, which starts this file on two ranks by torchrun.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from all_to_all_gpu import emb_1
from torch.distributed import distributed_c10d

from bitslab.distributed import CompressedAllToAll, Table
from bitslab.distributed.buffers import Buffers
from bitslab.distributed.device import DeviceExchange
from bitslab.distributed.faults import Faults
from bitslab.distributed.helpers import helper_of
from bitslab.distributed.layout import Rows
from bitslab.distributed.pairs import Pairs
from bitslab.distributed.stats import Counters
from bitslab.distributed.wire import DESCRIPTOR_BYTES
from bitslab.engine.codecs import BoundedVectorCodec

RANKS = 2
RELATIVE = 0.03
SLOW_GB_PER_S = 0.1
#: Tables of a step, as in the paper's model, rows of each, and copies that make 16 MB of one.
TABLES, ROWS, COPIES = 26, 2048, 32
REPEATS = 11
#: Between two exchanges of a GPU.
IDLE_S = 0.002
#: Of all ranks' work on a link; a link that hangs does not take the others' time.
MOST_SECONDS = 150
#: At least so much faster than raw over the slowed link.
TARGET = 3.0
#: Where 'auto' is off it takes at most this share, or as many ms, longer than torch's own.
OFF_SHARE, OFF_MS = 0.01, 0.01
#: On sockets: the share of what equation 2 gives, and by ratio the paper's speed-ups.
OF_EQUATION_2 = 0.8
PAPER = {11.2: 6.2, 19.9: 8.6}
#: Pieces of an exchange that are compared.
PIECES = (1, 2, 4, 8)
#: Rows of a table of the payloads with those ratios.
LARGE_ROWS = 16384
#: Of the example's steps on each link.
EXAMPLE = (
    "--lines 40000 --batch-size 2048 --epochs 3 --embedding-dim 64 --decay-steps 1 "
    "--exchange raw lossless adaptive --codec auto"
)
#: Of these the first in which ranks have decided, and what the decision made warm.
DECIDED = 20
#: Of the model.
MODEL_RANKS, MODEL_GB_PER_S = (8, 32), (4, 12.5, 25, 50)
#: Links of two GPUs of one host, by what NCCL is given.
NCCL_LINKS = {
    "NVLink": {},
    "no peer access": {"NCCL_P2P_DISABLE": "1"},
    "sockets": {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket"},
}

Line = dict[str, Any]
#: In lines of exchanges in pieces alone.
PIECES_KEY = "1 piece ms"


def links(names: Sequence[str] | None = None) -> dict[str, list[Line]]:
    """Start the ranks for each link; return tables of what rank 0 measured, and of the model.

    Without names, for all links of this machine.
    """
    there = ["gloo"]
    if torch.cuda.device_count() >= RANKS:
        there = [*NCCL_LINKS, "gloo"]
    if missing := set(names or ()) - set(there):
        raise SystemExit(f"--links: {sorted(missing)} need {RANKS} GPUs; here: {there}")
    # Multicast over NVLink is left off.
    of_nccl = {n: {"NCCL_NVLS_ENABLE": "0", **each} for n, each in NCCL_LINKS.items()}
    chosen = {name: of_nccl.get(name, {}) for name in there if not names or name in names}
    measured: list[Line] = []
    steps: list[Line] = []
    for name, variables in chosen.items():
        for what, into, run in (("exchanges", measured, _run), ("steps", steps, _example_on)):
            print(f"{name}: {what}", file=sys.stderr)
            try:
                found = run(name, variables)
            except (subprocess.SubprocessError, OSError) as error:
                # The other links' figures are not lost with it.
                print(f"{name}: {what}: left out: {error}", file=sys.stderr)
                continue
            print(json.dumps(found), file=sys.stderr, flush=True)
            into += found
    if not measured:
        raise SystemExit("--only links: no link was measured")
    in_pieces = [line for line in measured if PIECES_KEY in line]
    measured = [line for line in measured if PIECES_KEY not in line]
    for line in measured:
        line["speed-up"] = line["raw ms"] / line["compressed ms"]
        line["target"] = "; ".join(_targets(line))
    order = (
        *("link", "payload", "raw ms", "raw GB/s", "compressed ms", "speed-up", "equation 2"),
        *("auto ms", "auto is", "ratio"),
        *("encode ms", "sizes ms", "payload ms", "decode ms", "target"),
    )
    table = [{key: line[key] for key in order} for line in measured]
    return {
        f"Exchanges between {RANKS} ranks, within {RELATIVE} of the range": table,
        f"The same in pieces, codec 'compressed', and 'auto' with pieces={PIECES[-1]}": in_pieces,
        f"The example's whole step on {RANKS} ranks, codec auto": steps,
        "MODEL, not measured: speed-up by equation 2 from rates measured here": _model(measured),
    }


def _targets(line: Line) -> list[str]:
    """Return what is asked of a line, and whether it was reached."""
    link, speed_up = line["link"], line["speed-up"]

    def said(what: str, reached: bool) -> str:
        return f"{what}: {'ok' if reached else 'missed'}"

    found = []
    if link.startswith("gloo at"):
        found.append(said(f">= {TARGET:g}x", speed_up >= TARGET))
    if link == "NVLink":
        longer = line["auto ms"] - line["raw ms"]
        reached = longer <= max(OFF_MS, OFF_SHARE * line["raw ms"])
        found.append(said("off, <= 1 % or 10 us", reached and line["auto is"] == "plain"))
    if link == "sockets":
        least = OF_EQUATION_2 * line["equation 2"]
        found.append(said(f">= {OF_EQUATION_2:g} of equation 2", speed_up >= least))
        for ratio, times in PAPER.items():
            if line["payload"].endswith(f"ratio {ratio}"):
                found.append(said(f">= {times}x", speed_up >= times))
    return found


def _example_on(link: str, variables: dict[str, str]) -> list[Line]:
    """Return the seconds of a step of the example by way of exchanging."""
    script = Path(__file__).parents[1] / "examples" / "train_dlrm_distributed.py"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "it.json")
        options = [*EXAMPLE.split(), "--json", str(out)]
        options += ["--device", "cpu" if link == "gloo" else "cuda"]
        _torchrun([str(script), *options], variables)
        runs = json.loads(out.read_text())["runs"]
    steps = {run["way"]: [step["seconds"] for step in run["steps"][DECIDED:]] for run in runs}
    ms = {way: 1e3 * statistics.median(seconds) for way, seconds in steps.items()}
    return [
        {
            "link": link,
            "exchange": run["way"],
            "ms a step": ms[run["way"]],
            "times as fast as raw": ms["raw"] / ms[run["way"]],
            "ratio forward": run["ratio"]["forward"],
            "AUC": run["auc"],
        }
        for run in runs
    ]


def _torchrun(arguments: list[str], variables: dict[str, str]) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={RANKS}", *arguments]
    with subprocess.Popen(command, env=environment, stdout=sys.stderr) as process:
        try:
            status = process.wait(MOST_SECONDS)
        except BaseException:
            process.terminate()  # it ends its ranks, which would keep the GPUs
            raise
    if status:
        raise subprocess.CalledProcessError(status, command)


def _run(link: str, variables: dict[str, str]) -> list[Line]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "lines.json")
        _torchrun([__file__, "--out", str(out)], {"BITSLAB_LINK_NAME": link, **variables})
        found: list[Line] = json.loads(out.read_text())
    return found


def _model(measured: list[Line]) -> list[Line]:
    """Return the speed-up of exchanges between more ranks over faster links.

    Messages are smaller there, and so is what they gain: ratios are those of EMB_1 to as many
    destinations.
    """
    from all_to_all import message_bytes

    rows = emb_1()
    codec = BoundedVectorCodec(RELATIVE, relative=True)
    # By a GPU's rates where there is one; those of a link do not matter for coding.
    lines = [m for m in measured if m["payload"] == f"{TABLES} tables as EMB_1"]
    line = next((m for m in lines if m["link"] in NCCL_LINKS), lines[-1])
    coding = 1e-6 / line["encode MB/s"] + 1e-6 / line["decode MB/s"]
    found = []
    for ranks in MODEL_RANKS:
        ratio = rows.nbytes / (message_bytes(codec, rows, ranks) + DESCRIPTOR_BYTES * ranks)
        entry: Line = {"ranks": ranks, "encode MB/s": line["encode MB/s"]}
        entry |= {"decode MB/s": line["decode MB/s"], "ratio": ratio}
        for gb_per_s in MODEL_GB_PER_S:
            # Seconds of a byte for other ranks; those for the own one are not coded.
            raw = 1e-9 / gb_per_s
            entry[f"{gb_per_s} GB/s"] = raw / (raw / ratio + coding)
        found.append(entry)
    return found


@contextmanager
def slowed_link(gb_per_s: float | None) -> Iterator[None]:
    """Let what crosses take as long as a link of that rate would, each way at once.

    torch's all-to-all, and what pairs of ranks send each other without it.
    """
    if gb_per_s is None:
        yield
        return
    # Where the package finds it: what others put in the place of torch's name is none of its.
    of_torch, of_pairs = distributed_c10d.all_to_all_single, Pairs.cross

    def wait_for(n_bytes: int, started: float) -> None:
        left = n_bytes / (gb_per_s * 1e9) - (time.perf_counter() - started)
        time.sleep(max(0.0, left))

    def slowed(
        output: torch.Tensor,
        given: torch.Tensor,
        output_sizes: Any = None,
        input_sizes: Any = None,
        *args: Any,
        **options: Any,
    ) -> Any:
        started = time.perf_counter()
        done = of_torch(output, given, output_sizes, input_sizes, *args, **options)
        wait_for(max(_to_others(output, output_sizes), _to_others(given, input_sizes)), started)
        return done

    def slowed_pairs(pairs: Pairs, sent: Mapping[int, torch.Tensor]) -> None:
        # Of what comes the other rank waits, and the slower of both is measured.
        started = time.perf_counter()
        of_pairs(pairs, sent)
        wait_for(sum(len(data) for data in sent.values()), started)

    setattr(distributed_c10d, "all_to_all_single", slowed)  # noqa: B010 - mypy
    setattr(Pairs, "cross", slowed_pairs)  # noqa: B010 - mypy
    try:
        yield
    finally:
        setattr(distributed_c10d, "all_to_all_single", of_torch)  # noqa: B010 - mypy
        setattr(Pairs, "cross", of_pairs)  # noqa: B010 - mypy


def _to_others(t: torch.Tensor, sizes: list[int] | None) -> int:
    if not len(t):
        return 0
    own = sizes[dist.get_rank()] if sizes else len(t) // dist.get_world_size()
    return (len(t) - own) * (t.nbytes // len(t))


def _planned(
    payload: Payload, device: torch.device
) -> tuple[dict[str, torch.Tensor], list[Table], dict[str, list[int]]]:
    """Return a payload's rows on a device, their tables, and rows of each for each rank."""
    size = dist.get_world_size()
    tables = {name: t.to(device) for name, t in payload.tables.items()}
    planned = [Table(name, t.shape[1]) for name, t in tables.items()]
    return tables, planned, {name: [len(t) // size] * size for name, t in tables.items()}


def measure(payload: Payload, link: str, device: torch.device) -> Line:
    """Return what an exchange of tables' rows takes, raw, compressed and as it is decided."""
    tables, planned, sizes = _planned(payload, device)
    ways = {
        codec: CompressedAllToAll(
            tables=planned,
            error_bound=None if codec == "raw" else payload.bound,
            codec=codec,
            decide_every=4,
        )
        for codec in ("raw", "compressed", "auto")
    }
    found: Line = {"link": link, "payload": payload.name}
    raw_bytes = sum(t.nbytes - sizes[name][0] * t[0].nbytes for name, t in tables.items())

    def step(of: CompressedAllToAll) -> None:
        of.exchange_tables(tables, sizes, sizes)

    for exchange in ways.values():
        for _ in range(6):  # compiles, fills caches, decides
            step(exchange)
    before = ways["compressed"].stats()["forward"]
    # In turns: a machine's minutes differ.
    steps = {codec: partial(step, exchange) for codec, exchange in ways.items()}
    for codec, seconds in _median_s(steps, device).items():
        found[f"{codec} ms"] = 1e3 * seconds
    after = ways["compressed"].stats()["forward"]
    took = {key: after[key] - before[key] for key in after}
    found["ratio"] = took["raw_bytes"] / took["moved_bytes"]
    for stage in ("encode", "sizes", "payload", "decode"):
        found[f"{stage} ms"] = 1e3 * took[f"{stage}_s"] / REPEATS
    coding = {s: took[f"{s}_s"] / REPEATS for s in ("encode", "decode")}
    found["auto is"] = ways["auto"].stats()["modes"]["forward"]
    if device.type == "cuda":
        coding = _coding_s(tables, sizes, payload.bound)
    for stage, seconds in coding.items():
        found[f"{stage} MB/s"] = raw_bytes / 1e6 / seconds
    raw_s = found["raw ms"] / 1e3
    found["raw GB/s"] = raw_bytes / 1e9 / raw_s
    # 1 / (1 / ratio + rate * (1 / encode + 1 / decode)), of this rank's bytes.
    found["equation 2"] = raw_s / (raw_s / found["ratio"] + sum(coding.values()))
    return found if dist.get_rank() == 0 else {}


def measure_pieces(payload: Payload, link: str, device: torch.device) -> Line:
    """Return what an exchange takes in pieces, of which one crosses while another is encoded."""
    tables, planned, sizes = _planned(payload, device)

    def made(codec: str, pieces: int) -> CompressedAllToAll:
        options: dict[str, Any] = {"codec": codec, "pieces": pieces}
        return CompressedAllToAll(tables=planned, error_bound=payload.bound, **options)

    def step(of: CompressedAllToAll) -> None:
        of.exchange_tables(tables, sizes, sizes)

    ways = {f"{n} piece{'s' * (n > 1)} ms": made("compressed", n) for n in PIECES}
    ways["auto ms"] = made("auto", PIECES[-1])
    for exchange in ways.values():
        for _ in range(10):  # the ninth call decides
            step(exchange)
    steps = {name: partial(step, exchange) for name, exchange in ways.items()}
    found: Line = {"link": link, "payload": payload.name}
    found |= {name: 1e3 * seconds for name, seconds in _median_s(steps, device).items()}
    found["auto is"] = ways["auto ms"].stats()["modes"]["forward"]
    found["1 piece/best"] = found[PIECES_KEY] / min(found[name] for name in list(ways)[:-1])
    return found if dist.get_rank() == 0 else {}


def _coding_s(
    tables: dict[str, torch.Tensor], sizes: dict[str, list[int]], bound: float
) -> dict[str, float]:
    """Return the seconds of a GPU that encoding and decoding rows for other ranks take."""
    world = dist.group.WORLD
    assert world is not None
    helper = helper_of(world, torch.device("cuda", torch.cuda.current_device()))
    rows = [
        Rows(t, torch.empty_like(t), sizes[name], sizes[name], bound, relative=True)
        for name, t in tables.items()
    ]
    faults = Faults(lasting=False)
    given = DeviceExchange(helper, rows, Counters(), faults, buffers=Buffers(), lane=helper.stream)
    trial = given.trial()
    return {"encode": trial.encode_s, "decode": trial.decode_s}


def _median_s(steps: Mapping[str, Callable[[], None]], device: torch.device) -> dict[str, float]:
    """Return the median seconds of steps on the slowest rank."""
    took: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(REPEATS):
        for name, work in steps.items():
            if device.type == "cuda":
                # What a helper's thread still does for the exchange before is none of this one's.
                time.sleep(IDLE_S)
            dist.barrier()
            _wait(device)
            started = time.perf_counter()
            work()
            _wait(device)
            seconds = torch.tensor([time.perf_counter() - started], device=device)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            took[name].append(float(seconds))
    return {name: statistics.median(seconds) for name, seconds in took.items()}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Payload:
    """Rows by table that a rank sends, and their bound as a share of the range."""

    name: str
    tables: dict[str, torch.Tensor]
    bound: float = RELATIVE
    #: Whether it is exchanged in pieces, too.
    pieces: bool = True


def payloads(device: torch.device) -> Iterator[Payload]:
    """Yield EMB_1 alone, and as many tables as a step has, in other orders.

    Also rows without repeats: on a CPU a table of 16 MB, on a GPU tables as large as a step's, with
    bounds by which their messages shrink as the paper's.
    """
    rows = emb_1()
    generator = torch.Generator().manual_seed(dist.get_rank())
    order = [torch.randperm(ROWS, generator=generator) for _ in range(TABLES)]
    yield Payload("EMB_1", {"EMB_1": rows}, pieces=False)
    yield Payload("EMB_1, tiled to 16 MB", {"EMB_1": rows.repeat(COPIES, 1)})
    yield Payload(f"{TABLES} tables as EMB_1", {str(i): rows[order[i]] for i in range(TABLES)})
    if device.type == "cpu":
        # Rows whose coding and crossing take alike on the slowed link.
        yield Payload("16 MB without repeats", {"rows": torch.randn(1 << 16, 64)})
    if device.type == "cuda":
        for ratio in PAPER:
            drawn = [torch.randn(LARGE_ROWS, 64, generator=generator) for _ in range(TABLES)]
            tables = {str(i): t for i, t in enumerate(drawn)}
            yield Payload(f"{TABLES} large tables, ratio {ratio}", tables, bound_of(ratio))


def bound_of(ratio: float) -> float:
    """Return the relative bound by which normally distributed rows shrink so many times."""
    rows = torch.randn(LARGE_ROWS // RANKS, 64, generator=torch.Generator().manual_seed(0))
    low, high = 1e-4, 0.5
    for _ in range(12):
        bound = (low * high) ** 0.5
        blob = BoundedVectorCodec(bound, relative=True).encode(rows)
        low, high = (bound, high) if rows.nbytes / blob.nbytes < ratio else (low, bound)
    return high


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="file for the figures, as JSON")
    options = parser.parse_args()
    link = os.environ.get("BITSLAB_LINK_NAME", "gloo")
    lines = []
    device = torch.device("cpu")
    rates: tuple[float | None, ...] = (SLOW_GB_PER_S, None)
    if link in NCCL_LINKS:
        device, rates = torch.device("cuda", int(os.environ["LOCAL_RANK"])), (None,)
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.set_num_threads(1)
    for gb_per_s in rates:
        # Figures of a slowed link are kept where nobody else finds them.
        os.environ["BITSLAB_CACHE"] = str(options.out.parent / str(gb_per_s))
        name = link if gb_per_s is None else f"{link} at {gb_per_s} GB/s"
        for payload in payloads(device):
            with slowed_link(gb_per_s):
                lines.append(measure(payload, name, device))
                if payload.pieces:
                    lines.append(measure_pieces(payload, name, device))
    if dist.get_rank() == 0:
        options.out.write_text(json.dumps(lines))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
