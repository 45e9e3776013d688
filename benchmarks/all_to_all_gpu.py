"""How fast a GPU encodes and decodes all messages of a step: ``all_to_all.py --only gpu``.

Rates are bytes of float32 rows by the time of the kernels, the median of several steps whose rows
differ. Beside them the same codec, table by table and destination by destination, and nvCOMP's
codecs over the same codes where `nvidia.nvcomp` is installed; they allocate what they return.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from codec_ratio import find
from timing import gpu_seconds

import bitslab
from bitslab.engine.codecs import BoundedVectorCodec, VectorLzCodec
from bitslab.engine.kernels.cuda import kernels_on
from bitslab.engine.kernels.vector_chunks import VectorOptions, VectorPlan, send_bytes

TABLES, DESTINATIONS, ROW = 26, 8, 64
RELATIVE = 0.03
#: Steps whose rows differ, so that no cache holds those of the next one.
STEPS = 4
REPETITIONS = 20
#: By rows of a table: the least rates, GB/s, of rows with repeats and of rows without.
TARGETS = {16384: ((250, 500), (150, 200)), 2048: ((120, 200), (120, 200))}
#: Chunks of 8 MB in all, encoded at once at least so many times as fast as one by one.
FEW, FEW_BYTES, TIMES_AS_FAST = 16, 8 << 20, 2.0
PEERS = ("LZ4", "Deflate", "ANS")

Table = list[dict[str, Any]]


@dataclass(frozen=True)
class Step:
    """What a rank sends: for each table and destination rows ``[n, ROW]``, float32 on the GPU."""

    rows: list[torch.Tensor]
    options: list[VectorOptions]

    @property
    def nbytes(self) -> int:
        """Bytes of the rows."""
        return sum(t.nbytes for t in self.rows)


class Pipeline:
    """All messages of a step, encoded and decoded at once.

    Parameters
    ----------
    step : Step
        Its rows.
    """

    def __init__(self, step: Step) -> None:
        self.step = step
        self.kernels = kernels_on(step.rows[0].device)
        self.sent = torch.empty(send_bytes(step.rows), dtype=torch.uint8, device="cuda")
        self.outs = [torch.empty_like(t) for t in step.rows]
        shapes, dtype = [t.shape for t in step.rows], step.rows[0].dtype
        self.encoding = VectorPlan.encoding(shapes, dtype, step.options)
        bounded = [each.bounded for each in step.options]
        self.decoding = VectorPlan.decoding(shapes, dtype, bounded)
        offsets, sizes = self.encode()
        self.used = int(sizes.sum())
        places = zip(offsets.tolist(), sizes.tolist(), strict=False)
        received = self.sent.clone()
        self.bodies = [received[begin : begin + n] for begin, n in places]
        self.decode()
        bitslab.raise_pending_errors()
        for t, found, options in zip(step.rows, self.outs, step.options, strict=True):
            bound = options.bound * float(t.max() - t.min()) if options.bound else 0.0
            assert float((found.double() - t.double()).abs().max()) <= bound

    def encode(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Encode the step."""
        return self.kernels.encode_vectors(self.step.rows, self.encoding, self.sent)

    def decode(self) -> None:
        """Decode the step."""
        self.kernels.decode_vectors(self.bodies, self.outs, self.decoding)


@cache
def emb_1() -> torch.Tensor:
    """Return the rows of EMB_1 ``[2048, ROW]``; without the file, rows that repeat as often."""
    try:
        rows = torch.from_numpy(np.fromfile(find("recsys", "EMB_1_iter_20.bin"), np.float32))
        return rows.view(-1, ROW)
    except FileNotFoundError as error:
        print(f"{error}: rows are drawn that repeat as often", file=sys.stderr)
        generator = torch.Generator().manual_seed(0)
        distinct = torch.randn(950, ROW, generator=generator)
        return distinct[(950 * torch.rand(2048, generator=generator) ** 1.5).long()]


def with_repeats(n: int, generator: torch.Generator) -> torch.Tensor:
    """Return n rows of EMB_1 in another order."""
    table = emb_1()
    order = torch.randperm(len(table), generator=generator)
    return table[order.repeat(-(-n // len(order)))[:n]]


def step_of(rows: int, repeats: bool, bound: float, seed: int) -> Step:
    """Return a step of so many rows a table."""
    generator = torch.Generator().manual_seed(seed)
    parts: list[torch.Tensor] = []
    for _ in range(TABLES):
        if repeats:
            per_rank = rows // DESTINATIONS
            given = [with_repeats(per_rank, generator) for _ in range(DESTINATIONS)]
        else:
            given = list(torch.randn(rows, ROW, generator=generator).chunk(DESTINATIONS))
        parts += [t.cuda() for t in given]
    return Step(parts, [VectorOptions(bound, relative=bound > 0)] * len(parts))


def repeated(work: Callable[[], Any]) -> Callable[[int], Any]:
    """Return what `gpu_seconds` runs, of work that is the same each time."""
    return lambda _: work()


def host_us(work: Callable[[], Any]) -> float:
    """Return the microseconds that the host takes to start some work."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(REPETITIONS):
        work()
    took = time.perf_counter() - begin
    torch.cuda.synchronize()
    return took / REPETITIONS * 1e6


def rates(rows: int, repeats: bool, bound: float) -> dict[str, Any]:
    """Measure steps of so many rows a table."""
    steps = [Pipeline(step_of(rows, repeats, bound, seed)) for seed in range(STEPS)]
    n_bytes = steps[0].step.nbytes
    encode = n_bytes / 1e9 / gpu_seconds(lambda i: steps[i % STEPS].encode(), REPETITIONS)
    decode = n_bytes / 1e9 / gpu_seconds(lambda i: steps[i % STEPS].decode(), REPETITIONS)
    row: dict[str, Any] = {
        "rows": f"{TABLES} x {rows:,} x {ROW}, {'as EMB_1' if repeats else 'no repeats'}",
        "codec": f"vlzq {bound} rel" if bound else "vlz",
        "ratio": n_bytes / steps[0].used,
        "encode GB/s": encode,
        "decode GB/s": decode,
        "host us to encode": host_us(steps[0].encode),
        "host us to decode": host_us(steps[0].decode),
        "target": "",
    }
    if bound:
        least_encode, least_decode = TARGETS[rows][0 if repeats else 1]
        ok = encode >= least_encode and decode >= least_decode
        row["target"] = f">= {least_encode}, {least_decode}: {'ok' if ok else 'missed'}"
    return row


def one_by_one() -> Table:
    """Measure the same codec at once and chunk by chunk, FEW chunks of FEW_BYTES in all."""
    table: Table = []
    rows = FEW_BYTES // FEW // (4 * ROW)
    for bound in (RELATIVE, 0.0):
        generator = torch.Generator().manual_seed(7)
        parts = [with_repeats(rows, generator).cuda() for _ in range(FEW)]
        options = VectorOptions(bound, relative=bound > 0)
        codec = BoundedVectorCodec(bound, relative=True) if bound else VectorLzCodec()
        step = Pipeline(Step(parts, [options] * FEW))
        most = codec.max_encoded_bytes(parts[0].shape, parts[0].dtype)
        buffers = [torch.empty(most, dtype=torch.uint8, device="cuda") for _ in parts]
        blobs = [codec.encode(t, out) for t, out in zip(parts, buffers, strict=True)]

        def encode(codec: Any = codec, parts: Any = parts, buffers: Any = buffers) -> None:
            for t, out in zip(parts, buffers, strict=True):
                codec.encode(t, out)

        def decode(codec: Any = codec, blobs: Any = blobs, outs: Any = step.outs) -> None:
            for blob, out in zip(blobs, outs, strict=True):
                codec.decode(blob, out)

        for what, all_at_once, each in (
            ("encode", step.encode, encode),
            ("decode", step.decode, decode),
        ):
            together = gpu_seconds(repeated(all_at_once), REPETITIONS)
            apart = gpu_seconds(repeated(each), REPETITIONS)
            ok = "ok" if apart / together >= TIMES_AS_FAST else "missed"
            table.append(
                {
                    "what": f"{what}, {codec.describe()}",
                    "at once GB/s": FEW_BYTES / 1e9 / together,
                    "one by one GB/s": FEW_BYTES / 1e9 / apart,
                    "times": apart / together,
                    "target": f">= {TIMES_AS_FAST}: {ok}",
                }
            )
    return table


def peers() -> Table:
    """Measure nvCOMP over the codes of a step: int16, one array for each message."""
    try:
        from nvidia import nvcomp
    except ImportError:
        print("nvCOMP: left out: nvidia.nvcomp is not installed", file=sys.stderr)
        return []
    table: Table = []
    stream = torch.cuda.current_stream().cuda_stream
    for repeats in (True, False):
        step = step_of(16384, repeats, RELATIVE, 0)
        codes = []
        for t in step.rows:
            span = 2 * RELATIVE * float(t.max() - t.min())
            codes.append((t / span).round().to(torch.int16))
        for algorithm in PEERS:
            kind = "<f2" if algorithm == "ANS" else "|u1"
            view = torch.int16 if algorithm == "ANS" else torch.uint8
            try:
                codec = nvcomp.Codec(algorithm=algorithm, data_type=kind, cuda_stream=stream)
                arrays = nvcomp.as_arrays([t.view(view) for t in codes])
                encoded = codec.encode(arrays)
                encode = gpu_seconds(repeated(partial(codec.encode, arrays)), REPETITIONS)
                decode = gpu_seconds(repeated(partial(codec.decode, encoded)), REPETITIONS)
            except Exception as error:  # a peer's own trouble ends no run
                print(f"nvCOMP {algorithm}: left out: {error!s:.300}", file=sys.stderr)
                continue
            table.append(
                {
                    "rows": f"{TABLES} x 16,384 x {ROW}, {'as EMB_1' if repeats else 'no repeats'}",
                    "codec": f"nvCOMP {algorithm} of codes",
                    "ratio": step.nbytes / sum(encoded[i].buffer_size for i in range(len(encoded))),
                    "encode GB/s": step.nbytes / 1e9 / encode,
                    "decode GB/s": step.nbytes / 1e9 / decode,
                }
            )
    return table


def gpu() -> dict[str, Table]:
    """Return rates of a step on this GPU."""
    if not torch.cuda.is_available():
        raise SystemExit("--only gpu: torch sees no CUDA GPU")
    name = torch.cuda.get_device_name()
    return {
        f"All messages of a step to {DESTINATIONS} destinations on {name}": [
            rates(rows, repeats, bound)
            for rows in TARGETS
            for repeats in (True, False)
            for bound in (RELATIVE, 0.0)
        ]
        + peers(),
        f"{FEW} chunks of {FEW_BYTES >> 20} MiB in all": one_by_one(),
    }
