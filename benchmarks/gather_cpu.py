"""Gathers on the CPU: rows of a CompressedTable compared with torch.index_select of the raw tensor.

Every repetition draws ids of its own; every result is compared with the raw rows bit for bit.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from timing import cpu_seconds

import bitslab
from bitslab.tables.parts import Layout

Rows = list[dict[str, Any]]
TABLE_BYTES = 400 << 20
GATHERED = 10_000
NARROW_ROWS = 200_000
PUBLISHED: dict[str, Any] = {
    "codec": "ibp",
    "chunk_bytes": 4,
    "code_bits": 1,
    "grouped": False,
    "uniform": False,
}


def normal(n: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Return normal values of deviation 0.02, the size of trained weights."""
    generator = torch.Generator().manual_seed(n)
    return torch.randn(n, columns, generator=generator).mul_(0.02).to(dtype)


def sparse(n: int, columns: int) -> torch.Tensor:
    """Return float32 rows like bag-of-words features: 0.9 % ones, scaled to sum to 1."""
    generator = torch.Generator().manual_seed(n)
    ones = (torch.rand(n, columns, generator=generator) < 0.009).float()
    return ones / ones.sum(1, keepdim=True).clamp(min=1)


def measure(label: str, x: torch.Tensor, reps: int, **options: Any) -> tuple[Rows, Rows]:
    """Return rates and memory of tables of `x`."""
    n = x.shape[0]
    batches = [torch.randint(n, (GATHERED,)) for _ in range(reps + 1)]
    out = torch.empty(GATHERED, *x.shape[1:], dtype=x.dtype)
    nbytes = out.nbytes
    seconds = cpu_seconds(lambda i: torch.index_select(x, 0, batches[i], out=out), reps)
    rates: Rows = [
        {
            "rows": label,
            "how": "torch.index_select, raw",
            "GB/s": nbytes / seconds / 1e9,
            "of it": 1.0,
        }
    ]
    memory: Rows = []
    tables: list[tuple[Layout, dict[str, Any]]] = [
        ("compact", options),
        ("inplace", options),
        ("compact", {"codec": "raw"}),
    ]
    for layout, codec in tables:
        with bitslab.CompressedTable.from_tensor(x, layout, **codec) as table:
            for ids in batches:
                if not torch.equal(
                    table.gather(ids, out=out).view(torch.uint8), x[ids].view(torch.uint8)
                ):
                    raise SystemExit(f"{table}: rows differ from the input")
            taken = cpu_seconds(lambda i: table.gather(batches[i], out=out), reps)
            plan = f"table, {layout}, {table.codec.describe()}"
            rates.append(
                {"rows": label, "how": plan, "GB/s": nbytes / taken / 1e9, "of it": seconds / taken}
            )
            stats = table.stats()
            own = stats["packed_bytes"] + stats["metadata_bytes"]
            memory.append(
                {
                    "rows": label,
                    "table": plan,
                    "raw MB": stats["raw_bytes"] / 1e6,
                    "words MB": stats["packed_bytes"] / 1e6,
                    "metadata B/row": stats["metadata_bytes"] / n,
                    "other bytes": stats["host_bytes"] - own,
                    "ratio": stats["ratio"],
                }
            )
    return rates, memory


def narrow(n: int) -> list[tuple[str, torch.Tensor]]:
    """Return columns of rows that are shorter than what finds a packed row, by name."""
    generator = torch.Generator().manual_seed(n)
    return [
        ("int64 labels, 8 B", torch.randint(7, (n,), generator=generator)),
        ("bfloat16 normal, 16 B", normal(n, 8, torch.bfloat16)),
        ("float16 normal, 6 B", normal(n, 3, torch.float16)),
    ]


def run(arguments: argparse.Namespace) -> dict[str, Rows]:
    """Measure on this machine's CPU."""
    rates: Rows = []
    memory: Rows = []
    for label, x, options in (
        ("float32 normal, 1 KB", normal(TABLE_BYTES // 1024, 256, torch.float32), {}),
        ("float32 normal, 1 KB, published", normal(100_000, 256, torch.float32), PUBLISHED),
        ("bfloat16 normal, 2 KB", normal(TABLE_BYTES // 2048, 1024, torch.bfloat16), {}),
        ("float32 sparse, 14.8 KB", sparse(20_000, 3703), {}),
    ):
        more_rates, more_memory = measure(label, x, arguments.repetitions, **options)
        rates += more_rates
        memory += more_memory
    # Packed together whether or not that saves enough for "auto".
    for label, x in narrow(NARROW_ROWS):
        more_rates, more_memory = measure(label, x, arguments.repetitions, codec="ibp")
        rates += more_rates
        memory += more_memory
    threads = torch.get_num_threads()
    return {
        f"CPU, {GATHERED:,} random rows into a given tensor, {threads} threads": rates,
        "Host memory of the same tables": memory,
    }
