"""Rates of the codecs of whole tensors, and of counting zeros, beside their peers in the same run.

Half of the values are zero, as behind a ReLU, "scattered" one by one or in "runs" of some eight.
Rates are gigabytes of the tensor for a second; every repetition takes another tensor. `of_copy` is
the share of the rate at which the device copies the same bytes, `max()` that of reading them.
Peers: on a GPU nvCOMP's LZ4, Bitcomp and Cascaded (by `nvidia.nvcomp`, whose calls allocate their
output), on the CPU rows of ibp, zfpy, lz4 and zstd, the last three on one thread.
"""
# ruff: noqa: B023 - what is measured is called before the loop goes on

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import numpy
import torch
from timing import add_output, cpu_seconds_in_turn, gpu_seconds, print_tables

import bitslab
from bitslab.engine.codecs import (
    BlobCodec,
    ChainCodec,
    CsrCodec,
    InvariantBlobCodec,
    InvariantCodec,
    Lz4Codec,
    RleCodec,
    ZfpCodec,
    ZvcCodec,
    count_zeros,
)

Rows = list[dict[str, Any]]
INPUTS = 3
#: Codecs of nvCOMP, and whether they take bytes, or numbers of the elements' width. Bitcomp's
#: "sparse" algorithm ended in an illegal access on an H200 (nvCOMP 6.0).
NVCOMP_BYTES = {"LZ4": True, "Bitcomp": False, "Cascaded": False}
RUNS = {"scattered": 1, "runs": 8}  # neighbours that are zero together, or not


def inputs_of(dtype: torch.dtype, n_bytes: int, device: str, run: int) -> list[torch.Tensor]:
    """Return tensors of which half is zero, in runs, and the rest normal."""
    n = n_bytes // dtype.itemsize
    made = []
    for _ in range(INPUTS):
        t = torch.randn(n, device=device, dtype=torch.float32).abs()
        kept = torch.rand(-(-n // run), device=device) < 0.5
        t *= kept if run == 1 else kept.repeat_interleave(run)[:n]
        made.append(t.to(dtype))
    return made


def codecs_for(sample: torch.Tensor, bits: tuple[int, ...]) -> Iterator[BlobCodec]:
    """Yield the codecs of whole tensors, those that learn fitted to a tensor."""
    yield ZvcCodec()
    yield InvariantBlobCodec.fit(sample)
    yield ChainCodec.fit(sample)
    yield CsrCodec()
    yield RleCodec()
    yield Lz4Codec()
    yield from map(ZfpCodec, bits)


def gpu_rows(n_bytes: int, repetitions: int) -> Rows:
    """Measure on a GPU, data on the device."""
    rows: Rows = []
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        for kind, run in RUNS.items():
            inputs = inputs_of(dtype, n_bytes, "cuda", run)
            out = torch.empty_like(inputs[0])

            def rate(work: Callable[[int], object]) -> float:
                return n_bytes / 1e9 / gpu_seconds(lambda i: work(i % INPUTS), repetitions)

            copy = rate(lambda i: out.copy_(inputs[i]))
            if run == 1:
                rows.append({"what": f"copy, {name}", "encode": copy})
                read = rate(lambda i: inputs[i].view(torch.int32).max())
                counted = rate(lambda i: count_zeros(inputs[i]))
                row = {"what": f"count_zeros, {name}", "encode": counted, "max()": read}
                rows.append(row | {"of max()": counted / read})
            for codec in codecs_for(inputs[0], (20, 32, 64) if run > 1 else ()):
                what = {"what": f"{codec.describe()}, {name}, {kind}"}
                try:
                    rows.append(what | gpu_row(codec, inputs, out, rate, copy))
                except (bitslab.MissingExtraError, bitslab.ArgumentTypeError) as error:
                    print(f"{what['what']}: left out: {error}", file=sys.stderr)
            rows += nvcomp_rows(dtype, n_bytes, kind, repetitions)
        rows += dense_rows(name, out, rate, copy)
    return rows


def dense_rows(
    name: str,
    out: torch.Tensor,
    rate: Callable[[Callable[[int], object]], float],
    copy: float,
) -> Rows:
    """Measure ibp on a GPU on normal values without zeros, as a blob and as rows of 2 KiB."""
    inputs = [torch.empty_like(out).normal_(std=0.02) for _ in range(INPUTS)]
    codec = InvariantBlobCodec.fit(inputs[0])
    blob = {"what": f"{codec.describe()}, {name}, dense", **gpu_row(codec, inputs, out, rate, copy)}
    rows = [t.view(-1, 2048 // t.element_size()) for t in inputs]
    by_rows = InvariantCodec.fit(rows[0])
    packed = [by_rows.encode(r) for r in rows]
    encode = rate(lambda i: by_rows.encode(rows[i]))
    decode = rate(lambda i: by_rows.decode(packed[i], out=out.view(rows[0].shape)))
    row = {"what": f"{by_rows.describe()} as rows, {name}, dense", "encode": encode}
    return [blob, row | {"decode": decode, "of_copy": encode / copy}]


def gpu_row(
    codec: BlobCodec,
    inputs: list[torch.Tensor],
    out: torch.Tensor,
    rate: Callable[[Callable[[int], object]], float],
    copy: float,
) -> dict[str, Any]:
    """Measure one codec on a GPU, into buffers that are there."""
    most = codec.max_encoded_bytes(out.shape, out.dtype)
    data = [torch.empty(most, dtype=torch.uint8, device="cuda") for _ in inputs]
    blobs = [codec.encode(t, d) for t, d in zip(inputs, data, strict=True)]
    for t, blob in zip(inputs, blobs, strict=True):
        same = torch.equal(codec.decode(blob, out), t)
        assert same or codec.error_bound is not None, f"{codec.describe()}: not the same values"
    encode = rate(lambda i: codec.encode(inputs[i], data[i]))
    decode = rate(lambda i: codec.decode(blobs[i], out))
    ratio = blobs[0].raw_nbytes / blobs[0].nbytes
    return {"ratio": ratio, "encode": encode, "decode": decode, "of_copy": encode / copy}


def nvcomp_rows(dtype: torch.dtype, n_bytes: int, kind: str, repetitions: int) -> Rows:
    """Measure nvCOMP's codecs of bytes and numbers on such tensors, each in a process of its own.

    A kernel of theirs that ends in an illegal access takes the process along.
    """
    rows: Rows = []
    for algorithm in NVCOMP_BYTES:
        what = f"nvCOMP {algorithm}, {str(dtype).removeprefix('torch.')}, {kind}"
        try:
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as child:
                row = child.submit(
                    nvcomp_row, algorithm, dtype, n_bytes, RUNS[kind], repetitions
                ).result()
        except (Exception, BrokenProcessPool) as error:  # a peer's own trouble ends no run
            print(f"{what}: left out: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        rows.append({"what": what, **row})
    return rows


def nvcomp_row(
    algorithm: str, dtype: torch.dtype, n_bytes: int, run: int, repetitions: int
) -> dict[str, Any]:
    """Measure one codec of nvCOMP, which allocates what it returns."""
    from nvidia import nvcomp

    inputs = inputs_of(dtype, n_bytes, "cuda", run)
    by_bytes = NVCOMP_BYTES[algorithm]
    view = torch.uint8 if by_bytes else torch.int32 if dtype.itemsize == 4 else torch.int16
    data_type = "|u1" if by_bytes else f"<u{dtype.itemsize}"
    # Its work and its memory are on its own stream, which every copy from it waits for.
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    codec = nvcomp.Codec(algorithm=algorithm, cuda_stream=stream.cuda_stream, data_type=data_type)
    arrays = [nvcomp.as_array(t.view(view)) for t in inputs]
    encoded = [codec.encode(array) for array in arrays]
    decoded = codec.decode(encoded[0])
    torch.cuda.synchronize()
    found = torch.from_numpy(numpy.asarray(decoded.cpu())).view(torch.uint8)
    assert torch.equal(found.reshape(-1), inputs[0].cpu().view(torch.uint8)), "not the same bytes"
    out = torch.empty_like(inputs[0])

    def rate(work: Callable[[int], object]) -> float:
        with torch.cuda.stream(stream):
            return n_bytes / 1e9 / gpu_seconds(lambda i: work(i % INPUTS), repetitions)

    encode = rate(lambda i: codec.encode(arrays[i]))
    decode = rate(lambda i: codec.decode(encoded[i]))
    copy = rate(lambda i: out.copy_(inputs[i]))
    ratio = inputs[0].nbytes / encoded[0].buffer_size
    return {"ratio": ratio, "encode": encode, "decode": decode, "of_copy": encode / copy}


def cpu_rows(n_bytes: int, repetitions: int) -> Rows:
    """Measure on the CPU with torch's threads; zfpy, lz4 and zstd on one."""
    rows: Rows = []
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        for kind, run in RUNS.items():
            inputs = inputs_of(dtype, n_bytes, "cpu", run)
            out = torch.empty_like(inputs[0])
            bits = (16, 32, 64, 96) if dtype == torch.float32 and run > 1 else ()
            for codec in codecs_for(inputs[0], bits):
                blobs = [codec.encode(t) for t in inputs]
                runs: dict[str, Callable[[int], object]] = {
                    "encode": lambda i: codec.encode(inputs[i % INPUTS]),
                    "decode": lambda i: codec.decode(blobs[i % INPUTS], out),
                }
                if isinstance(codec, ZvcCodec):
                    runs |= ibp_runs(inputs)
                if isinstance(codec, ZfpCodec):
                    runs |= zfpy_runs(codec, inputs)
                times = cpu_seconds_in_turn(runs, repetitions)
                ratio = blobs[0].raw_nbytes / blobs[0].nbytes
                row: dict[str, Any]
                row = {"what": f"{codec.describe()}, {name}, {kind}", "ratio": ratio}
                row |= {name: n_bytes / 1e9 / seconds for name, seconds in times.items()}
                for peer in ("ibp", "zfpy"):
                    for way in ("encode", "decode"):
                        if f"{peer} {way}" in row:
                            row[f"{way} / {peer}"] = row[way] / row.pop(f"{peer} {way}")
                rows.append(row)
            rows.append(zstd_row(f"zstd 1, {name}, {kind}", inputs, repetitions))
    return rows


def ibp_runs(inputs: list[torch.Tensor]) -> dict[str, Callable[[int], object]]:
    """Return ibp's work on the same tensors as rows of 1 KiB."""
    rows = [t.view(-1, 1024 // t.element_size()) for t in inputs]
    codec = InvariantCodec.fit(rows[0])
    packed = [codec.encode(r) for r in rows]
    out = torch.empty_like(rows[0])
    return {
        "ibp encode": lambda i: codec.encode(rows[i % INPUTS]),
        "ibp decode": lambda i: codec.decode(packed[i % INPUTS], out=out),
    }


def zfpy_runs(codec: ZfpCodec, inputs: list[torch.Tensor]) -> dict[str, Callable[[int], object]]:
    """Return zfpy's work on the same tensors, at the same rate."""
    import zfpy

    rate, n = codec.block_bits / 4, inputs[0].numel()
    streams = [zfpy.compress_numpy(t.numpy(), rate=rate, write_header=False) for t in inputs]
    kind = zfpy.dtype_to_ztype(inputs[0].numpy().dtype)
    return {
        "zfpy encode": lambda i: zfpy.compress_numpy(
            inputs[i % INPUTS].numpy(), rate=rate, write_header=False
        ),
        "zfpy decode": lambda i: zfpy._decompress(streams[i % INPUTS], kind, (n,), rate=rate),
    }


def zstd_row(what: str, inputs: list[torch.Tensor], repetitions: int) -> dict[str, Any]:
    """Measure zstd at its fastest usual level."""
    import zstandard

    raw = [t.view(torch.uint8).numpy().data for t in inputs]
    packer, unpacker = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()
    packed = [packer.compress(r) for r in raw]
    runs: dict[str, Callable[[int], object]] = {
        "encode": lambda i: packer.compress(raw[i % INPUTS]),
        "decode": lambda i: unpacker.decompress(packed[i % INPUTS]),
    }
    times = cpu_seconds_in_turn(runs, repetitions)
    rates = {name: raw[0].nbytes / 1e9 / seconds for name, seconds in times.items()}
    return {"what": what, "ratio": raw[0].nbytes / len(packed[0]), **rates}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=["cpu", "gpu"], help="one part; all that there are else")
    parser.add_argument("--mb", type=int, default=256, help="size of a tensor on a GPU")
    parser.add_argument("--cpu-mb", type=int, default=32, help="size of a tensor on the CPU")
    parser.add_argument("--repetitions", type=int, default=9)
    add_output(parser)
    arguments = parser.parse_args()
    tables: dict[str, Rows] = {}
    if arguments.only != "cpu" and torch.cuda.is_available():
        device = torch.cuda.get_device_name()
        rows = gpu_rows(arguments.mb << 20, arguments.repetitions)
        tables[f"Whole tensors of {arguments.mb} MB on {device}, GB/s"] = rows
    if arguments.only != "gpu":
        rows = cpu_rows(arguments.cpu_mb << 20, arguments.repetitions)
        threads = torch.get_num_threads()
        tables[f"Whole tensors of {arguments.cpu_mb} MB on the CPU, {threads} threads, GB/s"] = rows
    print_tables(tables, arguments.json, arguments.out)


if __name__ == "__main__":
    main()
