"""Gathers to a GPU: raw and packed rows out of host memory, and out of a cache, and peers.

"Ideal" is the rate at which the same kernel reads rows in order out of page-locked memory
(zero-copy) in the same run. "Row B of lines" is the share of the lines of 128 bytes that a row
touches which is the row's: a bound, if every line cost the same. Every repetition has ids of its
own, drawn before; the rows of one repetition are compared with the input bit for bit. Times are of
CUDA events and include checking and ordering ids.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from codec_gpu import masked, masked_codec
from timing import cpu_seconds, gpu_seconds

import bitslab
from bitslab.engine.advisor import pays_to_sort_rows
from bitslab.engine.codecs.invariant.codec import InvariantCodec
from bitslab.engine.memory.host import HostBuffer
from bitslab.engine.transfer.gather import gather_copied_rows
from bitslab.tables.parts import Layout

Rows = list[dict[str, Any]]
GIB = 1 << 30
WARM_UP = 2


def drawn(n_rows: int, n: int, reps: int) -> list[torch.Tensor]:
    """Return ids for every run, warm-up included, on the GPU."""
    return [torch.randint(n_rows, (n,), device="cuda") for _ in range(reps + WARM_UP)]


def copied(rows: torch.Tensor, ids: list[torch.Tensor], reps: int, sort: bool | None) -> float:
    """Return the seconds of a gather of raw rows, and check one; None sorts where that pays."""
    n = len(ids[0])
    out = torch.empty(n, rows.shape[1], dtype=torch.uint8, device="cuda")

    def gather(i: int) -> None:
        pays = pays_to_sort_rows(out.device, rows, len(rows), n) if sort is None else sort
        gather_copied_rows(rows, rows.shape[1], ids[i], out, sort=pays)

    seconds = gpu_seconds(gather, reps, WARM_UP)
    last = ids[reps + WARM_UP - 1]
    if not torch.equal(out[::997].cpu(), rows[last[::997].cpu()]):
        raise SystemExit("raw gather: rows differ from the table")
    return seconds


class HostBytes:
    """Page-locked host memory of random bytes, cut into rows of any size."""

    def __init__(self, nbytes: int) -> None:
        self.buffer = HostBuffer.allocate(nbytes)
        for piece in self.buffer.tensor.split(256 << 20):
            noise = torch.randint(-(2**31), 2**31, (len(piece) // 4,), device="cuda")
            piece.copy_(noise.to(torch.int32).view(torch.uint8))

    def rows(self, nbytes: int, row_bytes: int, offset: int = 0) -> torch.Tensor:
        """View the first `nbytes`, from an offset on, as rows."""
        n = (nbytes - offset) // row_bytes
        return self.buffer.tensor[offset : offset + n * row_bytes].view(n, row_bytes)


def ideal_gbps(host: HostBytes, reps: int) -> float:
    """Return the rate at which rows are read in order, GB/s."""
    rows = host.rows(GIB // 2, 1024)
    ids = [torch.arange(len(rows), device="cuda")] * (reps + WARM_UP)
    return GIB / 2 / copied(rows, ids, reps, sort=False) / 1e9


def raw_rows(host: HostBytes, ideal: float, reps: int, largest: float) -> Rows:
    """Measure raw gathers by table size and row size."""
    found: Rows = []
    for gib in (0.5, 1, 4, 8, 16):
        if gib > largest:
            continue
        for row_bytes in (128, 256, 512, 1024):
            rows = host.rows(int(gib * GIB), row_bytes)
            for n in (200_000, 1_000_000):
                ids = drawn(len(rows), n, reps)
                line: dict[str, Any] = {"table GiB": gib, "row B": row_bytes, "ids": n}
                for name, sort in (("as drawn", False), ("sorted", True), ("chosen", None)):
                    rate = n * row_bytes / copied(rows, ids, reps, sort=sort) / 1e9
                    line[f"{name} GB/s"] = rate
                    line[f"{name} of ideal"] = f"{100 * rate / ideal:.0f} %"
                found.append(line)
    return found


def by_the_cpu(rows: torch.Tensor, ids: list[torch.Tensor], reps: int) -> float:
    """Return the seconds of the CPU's gather into page-locked memory and a copy to the GPU."""
    on_cpu = [each.cpu() for each in ids]
    staged = torch.empty(len(ids[0]), *rows.shape[1:], dtype=rows.dtype, pin_memory=True)
    out = staged.cuda()

    def gather(i: int) -> None:
        torch.index_select(rows, 0, on_cpu[i], out=staged)
        out.copy_(staged)
        torch.cuda.synchronize()

    return cpu_seconds(gather, reps)


def thread_counts() -> list[int]:
    """Return powers of two up to the threads that torch has here, and those."""
    most = torch.get_num_threads()
    return sorted({most, *(1 << k for k in range(most.bit_length()))})


def alignment(host: HostBytes, ideal: float, reps: int) -> Rows:
    """Measure raw gathers of rows that do not line up with 128 bytes, and the CPU's of the same."""
    found: Rows = []
    base = 0.0
    cases = [(2048, 0), *((2048 + k, 0) for k in range(4, 32, 4)), (2048, 4), (2048, 1)]
    for row_bytes, offset in [*cases, (1024, 0), (1028, 0), (602, 0), (301, 0), (300, 0), (44, 0)]:
        rows = host.rows(GIB // 2, row_bytes, offset)
        n = min(400_000, (256 << 20) // row_bytes) if row_bytes > 256 else 1_000_000
        ids = drawn(len(rows), n, reps)
        rate = n * row_bytes / copied(rows, ids, reps, sort=False) / 1e9
        by_cpu = n * row_bytes / by_the_cpu(rows, ids, reps) / 1e9
        base = base or rate
        starts = (offset + torch.arange(len(rows)) * row_bytes) % 128
        lines = float(((starts + row_bytes + 127) // 128).double().mean())
        found.append(
            {
                "row B": row_bytes,
                "begins at": offset,
                "GB/s": rate,
                "of ideal": f"{100 * rate / ideal:.0f} %",
                "of 2048 B aligned": f"{100 * rate / base:.0f} %",
                "by the CPU GB/s": by_cpu,
                "times the CPU's": rate / by_cpu,
                "row B of lines": f"{100 * row_bytes / 128 / lines:.0f} %",
            }
        )
    return found


def gathered(
    source: bitslab.CompressedTable | bitslab.SlabCache,
    ids: list[torch.Tensor],
    out: torch.Tensor,
    reps: int,
) -> float:
    """Return the seconds of a gather of decoded rows."""
    return gpu_seconds(lambda i: source.gather(ids[i], out=out), reps, WARM_UP)


def masked_batches(codec: InvariantCodec, n_rows: int) -> Iterator[torch.Tensor]:
    """Yield random rows of which this codec saves its share."""
    for begin in range(0, n_rows, 1 << 18):
        yield masked(codec, min(1 << 18, n_rows - begin), seed=begin)


def packed_case(
    gib: float, row_bytes: int, saved: float, ideal: float, reps: int
) -> dict[str, Any]:
    """Measure one size of table, rows and saving, raw and in both layouts."""
    n_rows = int(gib * GIB) // row_bytes
    n = 1_000_000 if row_bytes <= 512 else 400_000 if row_bytes == 1024 else 100_000
    codec = masked_codec(row_bytes, saved, seed=1)
    ids = drawn(n_rows, n, reps)
    out = torch.empty(n, row_bytes // 4, device="cuda")
    line: dict[str, Any] = {"table GiB": gib, "row B": row_bytes, "saved": f"{100 * saved:.0f} %"}
    seconds = {}
    plans: list[tuple[str, Layout, str | InvariantCodec]] = [
        ("raw", "compact", "raw"),
        ("compact", "compact", codec),
        ("in place", "inplace", codec),
    ]
    for name, layout, plan in plans:
        rows = masked_batches(codec, n_rows)
        with bitslab.CompressedTable.from_tensor(rows, layout, plan, progress=False) as table:
            if name == "compact":
                line["ratio"] = table.stats()["ratio"]
            seconds[name] = gathered(table, ids, out, reps)
            some = ids[reps + WARM_UP - 1][::997]
            expected = table.gather(some.cpu()).view(torch.int32)
            if not torch.equal(out[::997].cpu().view(torch.int32), expected):
                raise SystemExit(f"{table}: rows differ between CPU and GPU")
    for name, taken in seconds.items():
        line[f"{name} GB/s"] = n * row_bytes / taken / 1e9
    for name in ("compact", "in place"):
        of_ideal = n * row_bytes / seconds[name] / 1e9 / ideal / line["ratio"]
        line[f"{name} of ideal x ratio"] = f"{100 * of_ideal:.0f} %"
    line["compact is faster"] = f"{seconds['raw'] / seconds['compact']:.2f}x"
    return line


def packed_rows(ideal: float, reps: int, largest: float) -> Rows:
    """Measure gathers out of tables whose rows are this much smaller packed."""
    cases = [(0.5, 1024, s) for s in (0.12, 0.25, 0.5, 0.75, 0.9)]
    cases += [(0.5, 512, 0.25), (0.5, 4096, 0.25)] + [(8, 512, s) for s in (0.25, 0.5)]
    return [
        packed_case(gib, row_bytes, saved, ideal, reps)
        for gib, row_bytes, saved in cases
        if gib <= largest
    ]


def copy_gbps(reps: int) -> float:
    """Return the device's copy rate in GB/s, bytes read plus bytes written."""
    source = torch.randint(0, 256, (GIB,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * GIB / gpu_seconds(lambda i: target.copy_(source), reps) / 1e9


def cached_case(label: str, x: torch.Tensor, codec: str, copy: float, reps: int) -> Rows:
    """Measure gathers of which all, or nine of ten, find their rows in a slab."""
    found: Rows = []
    n = min(len(x), 1_000_000)
    ids = drawn(len(x), n, reps)
    out = torch.empty(n, *x.shape[1:], dtype=x.dtype, device="cuda")
    selected = gpu_seconds(lambda i: torch.index_select(x, 0, ids[i], out=out), reps, WARM_UP)
    for share in (1.0, 0.9):
        with bitslab.CompressedTable.from_tensor(x, codec=codec, progress=False) as table:
            cache = bitslab.SlabCache(table, int(1.1 * GIB * share))
            cache.fill(torch.arange(int(share * len(x))))
            taken = gathered(cache, ids, out, reps)
            last = ids[reps + WARM_UP - 1]
            if not torch.equal(out.view(torch.uint8), x[last].view(torch.uint8)):
                raise SystemExit(f"{cache}: rows differ from the input")
            stats = cache.stats()
            moved = stats["local_bytes"] / max(1, stats["hits"]) + out[0].nbytes
            found.append(
                {
                    "rows": label,
                    "hit rate": stats["hit_rate"],
                    "plan": table.codec.describe(),
                    "GB/s": out.nbytes / taken / 1e9,
                    "read+write GB/s": n * moved / taken / 1e9,
                    "of device copy": f"{100 * n * moved / taken / 1e9 / copy:.0f} %",
                    "index_select of raw on device GB/s": out.nbytes / selected / 1e9,
                }
            )
    return found


def cached_rows(reps: int) -> Rows:
    """Measure gathers out of a slab by kind and size of rows."""
    copy = copy_gbps(reps)
    found: Rows = [{"rows": "plain copy on the device", "read+write GB/s": copy}]
    for label, dtype, columns in (
        ("bfloat16 normal, 256 B", torch.bfloat16, 128),
        ("float32 normal, 256 B", torch.float32, 64),
        ("bfloat16 normal, 512 B", torch.bfloat16, 256),
        ("float32 normal, 512 B", torch.float32, 128),
        ("bfloat16 normal, 1 KB", torch.bfloat16, 512),
        ("float32 normal, 1 KB", torch.float32, 256),
        ("bfloat16 normal, 2 KB", torch.bfloat16, 1024),
        ("float32 normal, 4 KB", torch.float32, 1024),
    ):
        n_rows = GIB // 2 // (columns * dtype.itemsize)
        x = (torch.randn(n_rows, columns, device="cuda") * 0.02).to(dtype)
        found += cached_case(label, x, "auto", copy, reps)
    x = torch.randn(GIB // 2 // 512, 128, device="cuda")
    return found + cached_case("float32, 512 B, kept raw", x, "raw", copy, reps)


def peers(reps: int) -> Rows:
    """Measure existing libraries on one table."""
    found: Rows = []
    n_rows, columns, n = 2 << 20, 256, 200_000
    x = torch.empty(n_rows, columns)
    for part in x.split(1 << 18):
        part.copy_(torch.randn(len(part), columns, device="cuda") * 0.02)
    ids = drawn(n_rows, n, reps)
    out = torch.empty(n, columns, device="cuda")

    def line(name: str, seconds: float) -> None:
        found.append({"how": name, "GB/s": out.nbytes / seconds / 1e9, "ms": 1e3 * seconds})

    most = torch.get_num_threads()
    for threads in thread_counts():
        torch.set_num_threads(threads)
        how = f"CPU gather by {threads} threads into page-locked memory, then copy"
        line(how, by_the_cpu(x, ids, reps))
    torch.set_num_threads(most)
    u = bitslab.unified(x)
    line("unified tensor, u[ids]", gpu_seconds(lambda i: u[ids[i]], reps))
    with bitslab.CompressedTable.from_tensor(x, device="cuda", progress=False) as table:
        line(
            f"CompressedTable, {table.codec.describe()}",
            gpu_seconds(lambda i: table.gather(ids[i], out=out), reps),
        )
        cache = bitslab.SlabCache(table, x.nbytes // 10)
        cached = cache.fill(torch.arange(n_rows))
        taken = gpu_seconds(lambda i: cache.gather(ids[i], out=out), reps)
        line(f"SlabCache of a tenth of the raw bytes ({100 * cached / n_rows:.0f} % hits)", taken)
    on_device = x.cuda()
    line(
        "torch.index_select, all on the device",
        gpu_seconds(lambda i: torch.index_select(on_device, 0, ids[i], out=out), reps),
    )
    return found


def run(arguments: argparse.Namespace) -> dict[str, Rows]:
    """Measure on torch's current GPU."""
    reps, largest, parts = arguments.repetitions, arguments.largest_gib, arguments.parts
    host = HostBytes(int(max(1, largest if "raw" in parts else 1) * GIB))
    ideal = ideal_gbps(host, reps)
    name = torch.cuda.get_device_name()
    tables: dict[str, Rows] = {f"{name}: zero-copy, rows in order": [{"ideal GB/s": ideal}]}
    if "raw" in parts:
        tables["Raw rows out of page-locked memory"] = raw_rows(host, ideal, reps, largest)
    if "alignment" in parts:
        tables["Raw rows that do not line up, table of 0.5 GiB"] = alignment(host, ideal, reps)
    host.buffer.close()
    if "packed" in parts:
        tables["Packed rows out of page-locked memory"] = packed_rows(ideal, reps, largest)
    if "cache" in parts:
        tables["Rows out of a slab in device memory"] = cached_rows(reps)
    if "peers" in parts:
        tables["200,000 rows of 1 KB float32 out of 2 GiB, compared with peers"] = peers(reps)
    return tables
