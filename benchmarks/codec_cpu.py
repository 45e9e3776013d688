"""The codec on the CPU compared with a plain copy, zstd and ZipNN: speed, random access, memory.

Every repetition works on an input of its own, drawn at the start, so that no cache holds it; every
result is compared with its input bit for bit. Outputs of decoding and copying are allocated
before; those of encoding are part of its time. zstd and ZipNN are slow: they get the first PEER_MB
of each input, and their shares are of a copy of the whole. Threads are torch's; zstd decodes a
frame with one thread only. Takes about 2 GB of memory.

Memory is measured in a process of its own: the kernel's high-water mark of resident memory
(VmHWM) is reset (clear_refs) before the call, and after it the mark, less what was resident
before and less the bytes of the result, is the extra. The call has run before, on a few rows, so
that loading and compiling are not in it. Linux with glibc only; left out elsewhere.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import multiprocessing
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from timing import cpu_seconds

from bitslab.engine.codecs.invariant.codec import InvariantCodec

Rows = list[dict[str, Any]]
PEER_MB = 32
GATHERED = 10_000
PLANS = ("best plan", "published options")


@dataclass(frozen=True)
class Data:
    """A kind of rows: how many, and how to draw them."""

    label: str
    dtype: torch.dtype
    rows: int
    columns: int
    density: float = 1.0

    def draw(self, seed: int, rows: int | None = None) -> torch.Tensor:
        """Return ``[rows, columns]``: normal values of deviation 0.02, or rows that add up to 1."""
        shape = (rows or self.rows, self.columns)
        generator = torch.Generator().manual_seed(seed)
        if self.density == 1:
            return torch.randn(shape, generator=generator).mul_(0.02).to(self.dtype)
        found = torch.rand(shape, generator=generator) < self.density
        counts = found.sum(1, keepdim=True).clamp_(min=1)
        return torch.where(found, 1 / counts, 0).to(self.dtype)

    def fit(self, plan: str) -> InvariantCodec:
        """Fit a codec to rows that are not among those measured."""
        sample = self.draw(1 << 20, min(self.rows, 4096))
        if plan == "best plan":
            return InvariantCodec.fit(sample, n_rows=self.rows)
        return InvariantCodec.fit(
            sample,
            chunk_bytes=2 if self.dtype == torch.bfloat16 else 4,
            code_bits=1,
            grouped=False,
            uniform=False,
            n_rows=self.rows,
        )


DATA = (
    Data("float32 normal, 1 KB rows", torch.float32, 100_000, 256),
    Data("bfloat16 normal, 2 KB rows", torch.bfloat16, 50_000, 1024),
    Data("float32 0.9 % non-zero, 14.8 KB rows", torch.float32, 6_600, 3703, 0.009),
)


def check(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Stop unless two tensors have the same bits."""
    if not torch.equal(got.view(torch.uint8), expected.view(torch.uint8)):
        raise SystemExit(f"{what}: decoded rows differ from the input")


class Table:
    """Rows of one kind of data; each is compared with the plain copy of the same run."""

    def __init__(self, data: Data, repetitions: int) -> None:
        self.data = data
        self.repetitions = repetitions
        self.inputs = [data.draw(seed) for seed in range(repetitions + 1)]
        self.out = torch.empty_like(self.inputs[0])
        self.copy = self.speed(lambda i: self.out.copy_(self.inputs[i]), self.out.nbytes)
        self.rows: Rows = []
        self.add("plain copy", self.out.nbytes, 1.0, self.copy, self.copy)

    def speed(self, run: Callable[[int], object], nbytes: int) -> float:
        """Return MB/s of raw bytes."""
        return nbytes / cpu_seconds(run, self.repetitions) / 1e6

    def add(self, codec: str, nbytes: int, ratio: float, encode: float, decode: float) -> None:
        """Add a row."""
        self.rows.append(
            {
                "data": self.data.label,
                "codec": codec,
                "input MB": nbytes / 1e6,
                "ratio": ratio,
                "encode MB/s": encode,
                "encode of copy": f"{100 * encode / self.copy:.0f} %",
                "decode MB/s": decode,
                "decode of copy": f"{100 * decode / self.copy:.0f} %",
            }
        )

    def bitslab(self, plan: str) -> dict[str, Any]:
        """Measure a plan; return its row of the table of random access."""
        codec = self.data.fit(plan)
        nbytes = self.out.nbytes
        encode = self.speed(lambda i: codec.encode(self.inputs[i]), nbytes)
        packed = [codec.encode(x) for x in self.inputs]
        for p, x in zip(packed, self.inputs, strict=True):
            self.out.view(torch.uint8).fill_(0xA5)
            check(codec.decode(p, out=self.out), x, plan)
        decode = self.speed(lambda i: codec.decode(packed[i], out=self.out), nbytes)
        self.add(f"bitslab {codec.describe()}", nbytes, nbytes / packed[0].nbytes, encode, decode)

        generator = torch.Generator().manual_seed(7)
        n = min(GATHERED, self.data.rows)
        ids = [
            torch.randint(0, self.data.rows, (n,), generator=generator)
            for _ in range(self.repetitions + 1)
        ]
        out = torch.empty(n, self.data.columns, dtype=self.data.dtype)
        for i, x in enumerate(self.inputs):
            check(codec.decode(packed[i], ids[i], out=out), x[ids[i]], plan)
        ours = self.speed(lambda i: codec.decode(packed[i], ids[i], out=out), out.nbytes)
        plain = self.speed(
            lambda i: torch.index_select(self.inputs[i], 0, ids[i], out=out), out.nbytes
        )
        return {
            "data": self.data.label,
            "plan": codec.describe(),
            "rows": n,
            "gather MB/s": ours,
            "index_select MB/s": plain,
            "of index_select": f"{100 * ours / plain:.0f} %",
        }

    def peer(
        self,
        name: str,
        encode: Callable[[torch.Tensor], Any],
        decode: Callable[[Any], torch.Tensor],
    ) -> None:
        """Measure a peer on the first PEER_MB of each input."""
        rows = max(1, PEER_MB * 1_000_000 // self.inputs[0][0].nbytes)
        parts = [x[:rows] for x in self.inputs]
        encoded = [encode(x) for x in parts]
        for e, x in zip(encoded, parts, strict=True):
            check(decode(e).view(x.shape), x, name)
        nbytes = parts[0].nbytes
        self.add(
            name,
            nbytes,
            nbytes / len(encoded[0]),
            self.speed(lambda i: encode(parts[i]), nbytes),
            self.speed(lambda i: decode(encoded[i]), nbytes),
        )

    def peers(self) -> None:
        """Measure the peers that are installed."""
        try:
            import zstandard
        except ImportError:
            print("zstd: left out, zstandard is not installed", file=sys.stderr)
        else:
            unpack = zstandard.ZstdDecompressor()

            def restore(frame: bytes) -> torch.Tensor:
                raw = bytearray(unpack.decompress(frame))
                return torch.frombuffer(raw, dtype=self.data.dtype)

            def packer(level: int) -> Callable[[torch.Tensor], bytes]:
                pack = zstandard.ZstdCompressor(level=level, threads=torch.get_num_threads())
                return lambda x: pack.compress(x.view(torch.uint8).numpy().data)

            for level in (1, 3):
                self.peer(f"zstd {level}", packer(level), restore)
        try:
            import zipnn
        except ImportError:
            print("ZipNN: left out, zipnn is not installed", file=sys.stderr)
        else:
            # It reorders the bits of its input in place, so it gets a copy.
            coder = zipnn.ZipNN(input_format="torch", threads=torch.get_num_threads())
            self.peer("ZipNN", lambda x: coder.compress(x.clone()), coder.decompress)


def resident(mark: str) -> int:
    """Return a line of /proc/self/status in bytes: VmRSS, or VmHWM, its highest value so far."""
    text = Path("/proc/self/status").read_text()
    line = next(line for line in text.splitlines() if line.startswith(mark + ":"))
    return int(line.split()[1]) * 1024


def extra_bytes(call: Callable[[], Any]) -> tuple[int, Any]:
    """Return the peak of memory in a call beyond what was in use and its result; and the result."""
    gc.collect()
    # Freed memory that the process still holds would hide what the call takes.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # reset the high-water mark
    before = resident("VmRSS")
    result = call()
    return max(0, resident("VmHWM") - before - result.nbytes), result


def measure_memory(data: Data, plan: str, threads: int) -> tuple[float, float]:
    """Return the extra memory of encode and decode in percent of the input, in this process."""
    torch.set_num_threads(threads)
    codec = data.fit(plan)
    # As many rows as make the threads start.
    few = data.draw(1, 1 + (4 << 20) // codec.row_bytes)
    codec.decode(codec.encode(few))
    x = data.draw(0)
    encode, packed = extra_bytes(lambda: codec.encode(x))
    decode, decoded = extra_bytes(lambda: codec.decode(packed))
    check(decoded, x, plan)
    return 100 * encode / x.nbytes, 100 * decode / x.nbytes


def memory_row(data: Data, plan: str) -> dict[str, Any]:
    """Measure extra memory in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        encode, decode = pool.apply(measure_memory, (data, plan, torch.get_num_threads()))
    return {
        "data": data.label,
        "plan": plan,
        "encode extra %": encode,
        "decode extra %": decode,
        "asked": f"< 10 %: {'ok' if max(encode, decode) < 10 else 'missed'}",
    }


def run(arguments: argparse.Namespace) -> dict[str, Rows]:
    """Run the CPU part and return its tables by title."""
    speed: Rows = []
    gather: Rows = []
    for data in DATA:
        table = Table(data, arguments.repetitions)
        gather += [table.bitslab(plan) for plan in PLANS]
        table.peers()
        speed += table.rows
    threads = torch.get_num_threads()
    tables = {
        f"On the CPU: {threads} threads": speed,
        f"Random rows on the CPU: {threads} threads": gather,
    }
    if Path("/proc/self/clear_refs").exists():
        memory = [memory_row(data, plan) for data in DATA for plan in PLANS]
        tables["Peak memory beyond input and output, % of the input"] = memory
    return tables
