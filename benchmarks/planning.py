"""Measure what choosing a codec costs, and what the codec saves.

python benchmarks/planning.py --only cpu                 # InvariantCodec.fit on one core
python benchmarks/planning.py --only gpu --gpu-bytes 1073741824
python benchmarks/planning.py --only first               # processes with empty and filled caches
python benchmarks/before_after.py main . -- "planning.py --only cpu"    # beside another version

Each fit gets rows that it has not seen. "ratio" is raw bytes over packed rows, their offsets and
lengths and the profile, of all rows. "pack ms" is what packing the same rows takes with the codec,
"compress ms" all of `bitslab.compress`. With a GPU, "device copy ms" is one copy of the rows there.
Where a version has `PlanCache`, "again ms" is a fit beside a plan for rows of the same kind, and
"again ratio" what that codec saves.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from codec_ratio import sources
from timing import add_output, print_tables

import bitslab
import bitslab.engine.codecs
from bitslab import InvariantCodec

Rows = list[dict[str, Any]]
Make = Callable[[int, int, torch.Generator], torch.Tensor]  # n, columns, generator

FIRST = """
import json, time, torch, bitslab
device = "cuda" if torch.cuda.is_available() and {gpu} else "cpu"
torch.set_num_threads(1)
x = [(torch.randn(4096, 1024) * 0.02).bfloat16().to(device) for _ in range(3)]
times = []
for rows in x:
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    bitslab.InvariantCodec.fit(rows)
    times.append(1e3 * (time.perf_counter() - begin))
print(json.dumps(times))
"""


def normal(dtype: torch.dtype, scale: float = 0.02) -> Make:
    """Return what makes normal values."""

    def make(n: int, columns: int, g: torch.Generator) -> torch.Tensor:
        x = torch.randn(n, columns, generator=g, device=g.device) * scale
        return x.round().clamp(-128, 127).to(dtype) if dtype == torch.int8 else x.to(dtype)

    return make


def relu(n: int, columns: int, g: torch.Generator) -> torch.Tensor:
    """Return normal values of which half are 0."""
    return torch.randn(n, columns, generator=g, device=g.device).relu().bfloat16()


def ids(limit: int, dtype: torch.dtype) -> Make:
    """Return what makes uniform ids."""
    return lambda n, columns, g: torch.randint(
        0, limit, (n, columns), generator=g, device=g.device
    ).to(dtype)


def flags(n: int, columns: int, g: torch.Generator) -> torch.Tensor:
    """Return bools of which a tenth are set."""
    return torch.rand(n, columns, generator=g, device=g.device) < 0.1


def words(n: int, columns: int, g: torch.Generator) -> torch.Tensor:
    """Return float32 bags of words: a hundredth of the values are not 0, all of a row alike."""
    rows = (torch.rand(n, columns, generator=g, device=g.device) < 0.01).float()
    return rows / rows.sum(1, keepdim=True).clamp(min=1)


def keys(n: int, columns: int, g: torch.Generator) -> torch.Tensor:
    """Return bfloat16 like keys of attention: each channel has a mean and a scale of its own."""
    channel = torch.Generator().manual_seed(1)
    mean = torch.randn(128, generator=channel) * torch.rand(128, generator=channel) ** 4 * 20
    scale = torch.rand(128, generator=channel) + 0.1
    repeated = columns // 128
    x = torch.randn(n, columns, generator=g, device=g.device)
    mean, scale = (each.repeat(repeated).to(g.device) for each in (mean, scale))
    return (mean + scale * x).bfloat16()


def sparse_floats(n: int, columns: int, g: torch.Generator) -> torch.Tensor:
    """Return small whole numbers in float32, most of them 0."""
    shape = (n, columns)
    counts = torch.randint(1, 20, shape, generator=g, device=g.device).float()
    return counts * (torch.rand(shape, generator=g, device=g.device) < 0.2)


def noise(n: int, columns: int, g: torch.Generator) -> torch.Tensor:
    """Return random bytes."""
    return torch.randint(0, 256, (n, columns), generator=g, device=g.device).to(torch.uint8)


def mixed(n: int, columns: int, g: torch.Generator) -> torch.Tensor:
    """Return int32 columns of very different ranges, as tables of a data base have them."""
    limits = torch.tensor([2, 7, 100, 3000, 10**6, 2**31 - 1]).repeat(columns)[:columns]
    x = torch.rand(n, columns, generator=g, device=g.device, dtype=torch.float64)
    return (x * limits.to(g.device)).to(torch.int32)


BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
F8 = torch.float8_e4m3fn
#: Name, bytes of a row, bytes of an element, what makes rows.
KINDS: list[tuple[str, int, int, Make]] = [
    ("float32 normal", 64, 4, normal(F32)),
    ("float32 normal", 1024, 4, normal(F32)),
    ("float32 normal", 32768, 4, normal(F32)),
    ("bfloat16 normal", 256, 2, normal(BF16)),
    ("bfloat16 normal", 1024, 2, normal(BF16)),
    ("bfloat16 normal", 2048, 2, normal(BF16)),
    ("bfloat16 normal", 32768, 2, normal(BF16)),
    ("float16 normal", 2048, 2, normal(F16)),
    ("float8 normal", 4096, 1, normal(F8)),
    ("int8 normal", 64, 1, normal(torch.int8, 20)),
    ("int8 normal", 1024, 1, normal(torch.int8, 20)),
    ("bfloat16 relu", 4096, 2, relu),
    ("bfloat16 keys", 256, 2, keys),
    ("bfloat16 keys", 2048, 2, keys),
    ("int64 ids", 1024, 8, ids(10**6, torch.int64)),
    ("int64 ids", 8192, 8, ids(50_000, torch.int64)),
    ("int32 ids", 256, 4, ids(10**5, torch.int32)),
    ("int16 ids", 512, 2, ids(1000, torch.int16)),
    ("int32 mixed columns", 240, 4, mixed),
    ("bool", 1024, 1, flags),
    ("float32 counts, sparse", 512, 4, sparse_floats),
    ("float32 bags of words", 14812, 4, words),
    ("float64 normal", 1024, 8, normal(torch.float64)),
    ("float32 of bfloat16", 1024, 4, lambda n, c, g: normal(BF16)(n, c, g).float()),
    ("random bytes", 1024, 1, noise),
]


def stored_bytes(codec: InvariantCodec, rows: torch.Tensor) -> int:
    """Return what must be kept of rows: packed rows, their metadata and the profile."""
    packed = int(codec.packed_bytes(rows).sum())
    return packed + codec.row_metadata_bytes(rows.shape[0]) + codec.profile_bytes


def milliseconds(run: Callable[[], Any], device: str) -> tuple[float, Any]:
    """Return the time of a call with all that it starts on the device, and its result."""
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    result = run()
    if device == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begin), result


def planned(
    name: str, make: Callable[[int], torch.Tensor], repetitions: int, device: str
) -> dict[str, Any]:
    """Measure fits of one kind of rows; each repetition takes rows of its own."""
    times: dict[str, list[float]] = {}

    def take(what: str, run: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        took, result = milliseconds(lambda: run(*arguments, **options), device)
        times.setdefault(what, []).append(took)
        return result

    cache = getattr(bitslab.engine.codecs, "PlanCache", None)
    plans = None if cache is None else cache()
    ratios: dict[str, float] = {}
    codec: InvariantCodec | None = None
    for repetition in range(repetitions + 1):
        rows = make(repetition)
        codec = take("fit ms", InvariantCodec.fit, rows)
        take("pack ms", codec.encode, rows)
        if device == "cuda":
            take("compress ms", bitslab.compress, rows)
            take("device copy ms", rows.clone)
        if repetition == 1:
            ratios["ratio"] = rows.nbytes / stored_bytes(codec, rows)
        if plans is not None:
            again = take("again ms", InvariantCodec.fit, rows, plans=plans)
            if repetition == 1:
                ratios["again ratio"] = rows.nbytes / stored_bytes(again, rows)
    assert codec is not None
    best = {what: min(each[1:]) for what, each in times.items()}
    shown = {"rows": name, "plan": codec.describe(), "first fit ms": times["fit ms"][0]}
    return shown | {"fit ms": best.pop("fit ms")} | ratios | best


def kinds(n_bytes: int, repetitions: int, device: str, only: str) -> Rows:
    """Measure all kinds of rows."""
    found: Rows = []
    for name, row_bytes, number, make in KINDS:
        label = f"{name}, {row_bytes} B"
        if only and only not in label:
            continue

        def rows_of(
            repetition: int, make: Make = make, row_bytes: int = row_bytes, number: int = number
        ) -> torch.Tensor:
            generator = torch.Generator(device).manual_seed(repetition)
            return make(max(1, n_bytes // row_bytes), row_bytes // number, generator)

        found.append(planned(label, rows_of, repetitions, device))
    return found


def real(repetitions: int, only: str) -> Rows:
    """Measure real data; a repetition takes the next tensor, or the same rows in another order."""
    found: Rows = []
    for name, load in sources():
        if only and only not in name:
            continue
        try:
            tensors = load()
        except (FileNotFoundError, ImportError) as error:
            print(f"{name}: left out, not found: {error}", file=sys.stderr)
            continue
        if isinstance(tensors, torch.Tensor):
            tensors = [tensors]

        def rows_of(repetition: int, tensors: list[torch.Tensor] = tensors) -> torch.Tensor:
            t = tensors[repetition % len(tensors)]
            generator = torch.Generator().manual_seed(repetition)
            return t if len(tensors) > 1 else t[torch.randperm(len(t), generator=generator)]

        found.append(planned(name, rows_of, repetitions, "cpu"))
        del tensors, rows_of
    return found


def first(gpu: bool) -> Rows:
    """Measure fits of new processes: with empty caches of kernels, then with filled ones."""
    found: Rows = []
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "NUMBA_CACHE_DIR": f"{folder}/numba",
            "CUPY_CACHE_DIR": f"{folder}/cupy",
            "BITSLAB_CACHE": f"{folder}/bitslab",
        }
        for process in ("first", "second"):
            command = [sys.executable, "-c", FIRST.format(gpu=gpu)]
            done = subprocess.run(
                command, env=environment, stdout=subprocess.PIPE, text=True, check=True
            )
            times = [float(x) for x in done.stdout.strip().splitlines()[-1][1:-1].split(",")]
            names = ("first fit ms", "second fit ms", "third fit ms")
            found.append({"process": process, **dict(zip(names, times, strict=True))})
    return found


def main() -> int:
    """Run the requested parts and print one table each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", choices=("cpu", "gpu", "real", "first"), help="run one part")
    parser.add_argument("--kind", default="", help="rows whose name has this in it")
    parser.add_argument("--repetitions", type=int, default=3, help="timed fits of each row")
    parser.add_argument("--threads", type=int, default=1, help="threads of the CPU parts")
    parser.add_argument("--cpu-bytes", type=int, default=16 << 20, help="bytes of rows on the CPU")
    parser.add_argument("--gpu-bytes", type=int, default=1 << 30, help="bytes of rows on a GPU")
    add_output(parser)
    arguments = parser.parse_args()
    n, kind, gpu = arguments.repetitions, arguments.kind, torch.cuda.is_available()
    tables: dict[str, Rows] = {}
    torch.set_num_threads(arguments.threads)
    if arguments.only in (None, "cpu"):
        tables["Planning on the CPU"] = kinds(arguments.cpu_bytes, n, "cpu", kind)
    if arguments.only in (None, "real"):
        tables["Planning on the CPU, real data"] = real(n, kind)
    if arguments.only == "gpu" or (arguments.only is None and gpu):
        tables["Planning on the GPU"] = kinds(arguments.gpu_bytes, n, "cuda", kind)
    if arguments.only in (None, "first"):
        tables["Planning in a new process"] = first(gpu)
    print_tables(tables, arguments.json, arguments.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
