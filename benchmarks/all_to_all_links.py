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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bitslab.distributed import CompressedAllToAll, Table

RANKS = 2
RELATIVE = 0.03
SLOW_GB_PER_S = 0.1
#: Tables of a step, as in the paper's model, and rows of each.
TABLES, ROWS, DIM = 26, 2048, 64
REPEATS = 7
#: At least so much faster than raw over the slowed link.
TARGET = 3.0
#: Of the model.
MODEL_RANKS, MODEL_GB_PER_S = (8, 32), (4, 12.5, 25, 50)
#: Links of two GPUs of one host, by what NCCL is given. NVLink multicast is left off.
NCCL_LINKS = {
    "NVLink": {},
    "no peer access": {"NCCL_P2P_DISABLE": "1"},
    "sockets": {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket"},
}

Line = dict[str, Any]


def links() -> dict[str, list[Line]]:
    """Start the ranks for each link; return tables of what rank 0 measured, and of the model."""
    measured = _run({"BITSLAB_LINK_NAME": "gloo"})
    if torch.cuda.device_count() >= RANKS:
        for name, variables in NCCL_LINKS.items():
            measured += _run({"BITSLAB_LINK_NAME": name, "NCCL_NVLS_ENABLE": "0", **variables})
    for line in measured:
        slowed = line["link"].startswith("gloo at") and line["payload"].startswith("26")
        speed_up = line["raw ms"] / line["compressed ms"]
        line["speed-up"] = speed_up
        ok = "ok" if speed_up >= TARGET else "missed"
        line["target"] = f">= {TARGET:g}x: {ok}" if slowed else ""
    order = (
        "link",
        "payload",
        "raw ms",
        "compressed ms",
        "speed-up",
        "auto ms",
        "auto is",
        "ratio",
    )
    stages = ("encode ms", "sizes ms", "payload ms", "decode ms", "target")
    table = [{key: line[key] for key in (*order, *stages)} for line in measured]
    return {
        f"Exchanges between {RANKS} ranks, within {RELATIVE} of the range": table,
        "MODEL, not measured: speed-up by equation 2 from rates measured here": _model(measured),
    }


def _run(variables: dict[str, str]) -> list[Line]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "lines.json")
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={RANKS}", __file__, "--out", str(out)]
        subprocess.run(command, check=True, env=environment, stdout=sys.stderr)
        found: list[Line] = json.loads(out.read_text())
    return found


def _model(measured: list[Line]) -> list[Line]:
    """Return the speed-up of exchanges between more ranks over faster links."""
    found = []
    for line in measured:
        if line["link"] != "gloo" or not line["payload"].startswith("26"):
            continue
        for ranks in MODEL_RANKS:
            entry: Line = {"ranks": ranks, "encode MB/s": line["encode MB/s"]}
            entry |= {"decode MB/s": line["decode MB/s"], "ratio": line["ratio"]}
            coding = 1e-6 / line["encode MB/s"] + 1e-6 / line["decode MB/s"]
            for gb_per_s in MODEL_GB_PER_S:
                # Seconds of a byte for other ranks; those for the own one are not coded.
                raw = 1e-9 / gb_per_s
                entry[f"{gb_per_s} GB/s"] = raw / (raw / line["ratio"] + coding)
            found.append(entry)
    return found


@contextmanager
def slowed_link(gb_per_s: float | None) -> Iterator[None]:
    """Let torch's all-to-all take as long as a link of that rate would, each way at once."""
    if gb_per_s is None:
        yield
        return
    of_torch = dist.all_to_all_single

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
        crossed = max(_to_others(output, output_sizes), _to_others(given, input_sizes))
        left = crossed / (gb_per_s * 1e9) - (time.perf_counter() - started)
        time.sleep(max(0.0, left))
        return done

    setattr(dist, "all_to_all_single", slowed)  # noqa: B010 - mypy
    try:
        yield
    finally:
        setattr(dist, "all_to_all_single", of_torch)  # noqa: B010 - mypy


def _to_others(t: torch.Tensor, sizes: list[int] | None) -> int:
    if not len(t):
        return 0
    own = sizes[dist.get_rank()] if sizes else len(t) // dist.get_world_size()
    return (len(t) - own) * (t.nbytes // len(t))


def measure(payload: str, tables: dict[str, torch.Tensor], link: str) -> Line:
    """Return what an exchange of tables' rows takes, raw, compressed and as it is decided."""
    size = dist.get_world_size()
    planned = [Table(name, t.shape[1]) for name, t in tables.items()]
    sizes = {name: [len(t) // size] * size for name, t in tables.items()}
    ways = {
        codec: CompressedAllToAll(
            tables=planned,
            error_bound=None if codec == "raw" else RELATIVE,
            codec=codec,
            decide_every=4,
        )
        for codec in ("raw", "compressed", "auto")
    }
    found: Line = {"link": link, "payload": payload}
    for codec, exchange in ways.items():

        def step(of: CompressedAllToAll = exchange) -> None:
            of.exchange_tables(tables, sizes, sizes)

        for _ in range(6):  # compiles, fills caches, decides
            step()
        before = exchange.stats()["forward"]
        found[f"{codec} ms"] = 1e3 * _median_s(step)
        after = exchange.stats()["forward"]
        if codec == "compressed":
            took = {key: after[key] - before[key] for key in after}
            found["ratio"] = took["raw_bytes"] / took["moved_bytes"]
            for stage in ("encode", "sizes", "payload", "decode"):
                found[f"{stage} ms"] = 1e3 * took[f"{stage}_s"] / REPEATS
            for stage in ("encode", "decode"):
                found[f"{stage} MB/s"] = took["raw_bytes"] / 1e6 / took[f"{stage}_s"]
        if codec == "auto":
            found["auto is"] = exchange.stats()["modes"]["forward"]
    return found


def _median_s(work: Callable[[], None]) -> float:
    """Return the median seconds of a step on the slowest rank."""
    took = []
    for _ in range(REPEATS):
        dist.barrier()
        started = time.perf_counter()
        work()
        seconds = torch.tensor([time.perf_counter() - started])
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        took.append(float(seconds))
    return statistics.median(took)


def payloads() -> dict[str, dict[str, torch.Tensor]]:
    """Return rows by table: EMB_1 alone, and as many tables as a step has, in other orders."""
    from all_to_all import payloads as of_files

    rows = of_files()["EMB_1"]
    generator = torch.Generator().manual_seed(dist.get_rank())
    order = [torch.randperm(ROWS, generator=generator) for _ in range(TABLES)]
    return {
        "EMB_1": {"EMB_1": rows},
        f"{TABLES} tables as EMB_1": {str(i): rows[order[i]] for i in range(TABLES)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="file for the figures, as JSON")
    options = parser.parse_args()
    link = os.environ.get("BITSLAB_LINK_NAME", "gloo")
    lines = []
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for gb_per_s in (SLOW_GB_PER_S, None):
        # Figures of a slowed link are kept where nobody else finds them.
        os.environ["BITSLAB_CACHE"] = str(options.out.parent / str(gb_per_s))
        name = link if gb_per_s is None else f"{link} at {gb_per_s} GB/s"
        for payload, tables in payloads().items():
            with slowed_link(gb_per_s):
                lines.append(measure(payload, tables, name))
    if dist.get_rank() == 0:
        options.out.write_text(json.dumps(lines))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
