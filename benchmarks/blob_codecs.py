"""Rates of csr, rle, zfp, lz4 and counted zeros on whole tensors, beside zfpy and a plain copy.

Half of the values are zero, as behind a ReLU, in runs of some eight elements. Rates are gigabytes
of the tensor for a second; every repetition takes another tensor. `of_copy` is the share of the
rate at which the device copies the same bytes, `max()` that of reading them, in the same run.
"""
# ruff: noqa: B023 - what is measured is called before the loop goes on

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from timing import cpu_seconds_in_turn, gpu_seconds, print_tables

from bitslab.engine.codecs import BlobCodec, CsrCodec, Lz4Codec, RleCodec, ZfpCodec, count_zeros

Rows = list[dict[str, Any]]
INPUTS = 3


def inputs_of(dtype: torch.dtype, n_bytes: int, device: str) -> list[torch.Tensor]:
    """Return tensors of which half is zero, in runs, and the rest normal."""
    n = n_bytes // dtype.itemsize
    made = []
    for _ in range(INPUTS):
        t = torch.randn(n, device=device, dtype=torch.float32).abs()
        kept = torch.rand(-(-n // 8), device=device) < 0.5
        t *= kept.repeat_interleave(8)[:n]
        made.append(t.to(dtype))
    return made


def gpu_rows(n_bytes: int, repetitions: int) -> Rows:
    """Measure on a GPU, data on the device."""
    rows: Rows = []
    bits = (20, 32, 64)
    for dtype in (torch.float32, torch.bfloat16):
        inputs = inputs_of(dtype, n_bytes, "cuda")
        out = torch.empty_like(inputs[0])

        def rate(run: Callable[[int], object]) -> float:
            return n_bytes / 1e9 / gpu_seconds(lambda i: run(i % INPUTS), repetitions)

        copy = rate(lambda i: out.copy_(inputs[i]))
        name = str(dtype).removeprefix("torch.")
        rows.append({"what": f"copy, {name}", "encode": copy})
        read = rate(lambda i: inputs[i].view(torch.int32).max())
        counted = rate(lambda i: count_zeros(inputs[i]))
        rows.append({"what": f"count_zeros, {name}", "encode": counted, "max()": read})
        codecs: list[BlobCodec] = [CsrCodec(), RleCodec(), *(ZfpCodec(b) for b in bits)]
        for codec in codecs:
            most = codec.max_encoded_bytes(out.shape, dtype)
            data = [torch.empty(most, dtype=torch.uint8, device="cuda") for _ in inputs]
            encode = rate(lambda i: codec.encode(inputs[i], data[i]))
            blobs = [codec.encode(t, d) for t, d in zip(inputs, data, strict=True)]
            decode = rate(lambda i: codec.decode(blobs[i], out))
            rows.append(
                {
                    "what": f"{codec.describe()}, {name}",
                    "ratio": blobs[0].raw_nbytes / blobs[0].nbytes,
                    "encode": encode,
                    "decode": decode,
                    "of_copy": encode / copy,
                }
            )
    return rows


def cpu_rows(n_bytes: int, repetitions: int) -> Rows:
    """Measure on the CPU with torch's threads; zfpy and lz4 on one."""
    import zfpy

    rows: Rows = []
    inputs = inputs_of(torch.float32, n_bytes, "cpu")
    out = torch.empty_like(inputs[0])
    n = out.numel()
    codecs: list[BlobCodec] = [CsrCodec(), RleCodec(), Lz4Codec()]
    codecs += [ZfpCodec(bits) for bits in (16, 32, 64, 96)]
    for codec in codecs:
        blobs = [codec.encode(t) for t in inputs]
        runs: dict[str, Callable[[int], object]] = {
            "encode": lambda i: codec.encode(inputs[i % INPUTS]),
            "decode": lambda i: codec.decode(blobs[i % INPUTS], out),
        }
        if isinstance(codec, ZfpCodec):
            rate = codec.block_bits / 4
            streams = [
                zfpy.compress_numpy(t.numpy(), rate=rate, write_header=False) for t in inputs
            ]
            kind = zfpy.dtype_to_ztype(inputs[0].numpy().dtype)
            runs["zfpy encode"] = lambda i: zfpy.compress_numpy(
                inputs[i % INPUTS].numpy(),
                rate=rate,
                write_header=False,
            )
            runs["zfpy decode"] = lambda i: zfpy._decompress(
                streams[i % INPUTS],
                kind,
                (n,),
                rate=rate,
            )
        times = cpu_seconds_in_turn(runs, repetitions)
        row = {"what": codec.describe(), "ratio": blobs[0].raw_nbytes / blobs[0].nbytes}
        rows.append(row | {name: n_bytes / 1e9 / seconds for name, seconds in times.items()})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=["cpu", "gpu"], help="one part; all that there are else")
    parser.add_argument("--mb", type=int, default=256, help="size of a tensor on a GPU")
    parser.add_argument("--cpu-mb", type=int, default=32, help="size of a tensor on the CPU")
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, help="file for the tables in Markdown")
    arguments = parser.parse_args()
    tables: dict[str, Rows] = {}
    if arguments.only != "cpu" and torch.cuda.is_available():
        device = torch.cuda.get_device_name()
        rows = gpu_rows(arguments.mb << 20, arguments.repetitions)
        tables[f"Whole tensors of {arguments.mb} MB on {device}, GB/s"] = rows
    if arguments.only != "gpu":
        rows = cpu_rows(arguments.cpu_mb << 20, arguments.repetitions)
        threads = torch.get_num_threads()
        tables[f"{arguments.cpu_mb} MB of float32 on the CPU, {threads} threads, GB/s"] = rows
    print_tables(tables, arguments.json, arguments.out)


if __name__ == "__main__":
    main()
