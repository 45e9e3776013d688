"""The codec on a GPU: decode and encode in device memory, and over the link, compared with peers.

Every repetition works on another of several inputs, drawn at the start, each many times the size
of the GPU's cache, and every result is compared with its input bit for bit.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from timing import gpu_seconds

from bitslab.engine.codecs.base import PackedRows
from bitslab.engine.codecs.invariant.codec import InvariantCodec
from bitslab.engine.codecs.invariant.profile import Profile
from bitslab.engine.kernels.format import RowFormat
from bitslab.engine.transfer.across import Via

Rows = list[dict[str, Any]]
PUBLISHED: dict[str, Any] = {
    "chunk_bytes": 4,
    "code_bits": 1,
    "grouped": False,
    "uniform": False,
}
SETS = 3  # inputs that the repetitions rotate through
#: Calls of nvCOMP before those that are timed.
NVCOMP_WARM_UP = 20


def normal(n: int, columns: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return normal values of deviation 0.02, the size of trained weights."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(n, columns, device="cuda", generator=generator) * 0.02).to(dtype)


def activations(n: int, columns: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return normal values after ReLU."""
    return normal(n, columns, dtype, seed).relu()


def quantised(n: int, columns: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return normal values of deviation 20 as integers of eight bits."""
    generator = torch.Generator("cuda").manual_seed(seed)
    values = torch.randn(n, columns, device="cuda", generator=generator) * 20
    return values.round().clamp(-127, 127).to(dtype)


def sparse(n: int, columns: int, seed: int) -> torch.Tensor:
    """Return float32 rows like bag-of-words features: 0.9 % ones, scaled to sum to 1."""
    generator = torch.Generator("cuda").manual_seed(seed)
    ones = (torch.rand(n, columns, device="cuda", generator=generator) < 0.009).float()
    return ones / ones.sum(1, keepdim=True).clamp(min=1)


def masked(codec: InvariantCodec, n: int, seed: int) -> torch.Tensor:
    """Return float32 rows, random but for the bits in the codec's masks, which are 0."""
    generator = torch.Generator("cuda").manual_seed(seed)
    columns = codec.row_shape[0]
    x = torch.randint(
        -(2**31), 2**31, (n, columns), dtype=torch.int64, device="cuda", generator=generator
    ).to(torch.int32)
    masks = torch.from_numpy(codec.profile.masks[0].view(np.int32)).cuda()
    return (x & ~masks).view(torch.float32)


def masked_codec(row_bytes: int, saved: float, seed: int) -> InvariantCodec:
    """Return a codec with random positional masks that saves this share, codes counted."""
    columns = row_bytes // 4
    rng = np.random.default_rng(seed)
    bits = np.zeros(32 * columns, np.uint8)
    bits[rng.choice(bits.size, round((saved + 1 / 32) * bits.size), replace=False)] = 1
    masks = np.packbits(bits.reshape(columns, 32), axis=1, bitorder="little").view(np.uint32)
    fmt = RowFormat(row_bytes, 4, 1, False, False)
    profile = Profile(fmt, masks.reshape(1, columns), np.zeros((1, columns, 1), np.uint32))
    return InvariantCodec(profile, (columns,), torch.float32)


def check(codec: InvariantCodec, got: torch.Tensor, expected: torch.Tensor) -> None:
    """Stop unless two tensors have the same bits."""
    if not torch.equal(got.view(torch.uint8), expected.view(torch.uint8)):
        raise SystemExit(f"{codec}: decoded rows differ from the input")


def copy_gbps(nbytes: int, repetitions: int) -> float:
    """Return the device's copy rate in GB/s, bytes read plus bytes written."""
    sources = [torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda") for _ in range(3)]
    target = torch.empty_like(sources[0])
    seconds = gpu_seconds(lambda i: target.copy_(sources[i % 3]), repetitions)
    return 2 * nbytes / seconds / 1e9


def device_row(
    label: str, make: Callable[[int], torch.Tensor], codec: InvariantCodec, copy: float, reps: int
) -> dict[str, Any]:
    """Measure decode and encode of data on the device."""
    inputs = [make(seed) for seed in range(SETS)]
    packed = [codec.encode(x) for x in inputs]
    raw_bytes = inputs[0].nbytes
    moved = sum(p.nbytes for p in packed) / SETS
    out = torch.empty_like(inputs[0])
    for x, p in zip(inputs, packed, strict=True):
        out.view(torch.uint8).fill_(0xA5)
        check(codec, codec.decode(p, out=out), x)
    decode = gpu_seconds(lambda i: codec.decode(packed[i % SETS], out=out), reps)
    encode = gpu_seconds(lambda i: codec.encode(inputs[i % SETS]), reps)
    both = (raw_bytes + moved) / decode / 1e9
    return {
        "data": label,
        "plan": codec.describe(),
        "ratio": raw_bytes / moved,
        "decode GB/s": raw_bytes / decode / 1e9,
        "read+write GB/s": both,
        "of copy": f"{100 * both / copy:.0f} %",
        "encode GB/s": raw_bytes / encode / 1e9,
    }


def on_device(nbytes: int, reps: int) -> Rows:
    """Measure packed data that is on the device already."""
    copy = copy_gbps(nbytes, reps)
    rows: Rows = [{"data": "plain copy", "plan": "", "read+write GB/s": copy, "of copy": "100 %"}]
    for label, dtype, row_bytes in (
        ("float32 normal, 1 KB rows", torch.float32, 1024),
        ("bfloat16 normal, 2 KB rows", torch.bfloat16, 2048),
        ("float32 normal, 4 KB rows", torch.float32, 4096),
        ("bfloat16 normal, 256 B rows", torch.bfloat16, 256),
        ("bfloat16 normal, 8 KB rows", torch.bfloat16, 8192),
        ("float16 normal, 2 KB rows", torch.float16, 2048),
    ):
        columns = row_bytes // dtype.itemsize
        codec = InvariantCodec.fit(
            normal(4096, columns, dtype, 99), chunk_bytes=dtype.itemsize, uniform=True
        )
        make = partial(normal, nbytes // row_bytes, columns, dtype)
        rows.append(device_row(label, make, codec, copy, reps))
    for label, draw, dtype, row_bytes in (
        ("float8 (e4m3) normal, 4 KB rows", normal, torch.float8_e4m3fn, 4096),
        ("float8 (e5m2) normal, 4 KB rows", normal, torch.float8_e5m2, 4096),
        ("int8 normal, 1 KB rows", quantised, torch.int8, 1024),
        ("bfloat16 after ReLU, 4 KB rows", activations, torch.bfloat16, 4096),
        ("float32 normal, 128 B rows", normal, torch.float32, 128),
        ("bfloat16 normal, 22 KB rows", normal, torch.bfloat16, 22 << 10),
    ):
        columns = row_bytes // dtype.itemsize
        codec = InvariantCodec.fit(draw(4096, columns, dtype, 99))
        make = partial(draw, nbytes // row_bytes, columns, dtype)
        rows.append(device_row(label, make, codec, copy, reps))
    for row_bytes in (1024, 256, 4096):
        for saved in (0.12, 0.25, 0.5, 0.75, 0.9):
            codec = masked_codec(row_bytes, saved, 7)
            make = partial(masked, codec, nbytes // row_bytes)
            rows.append(
                device_row(f"{row_bytes} B rows, {saved:.0%} saved", make, codec, copy, reps)
            )
    codec = InvariantCodec.fit(normal(4096, 256, torch.float32, 99), **PUBLISHED)
    make = partial(normal, nbytes // 1024, 256, torch.float32)
    rows.append(device_row("float32 normal, 1 KB rows", make, codec, copy, reps))
    for options, label in (
        ({}, "sparse float32, 14.8 KB rows"),
        (PUBLISHED, "sparse float32, 14.8 KB rows"),
    ):
        codec = InvariantCodec.fit(sparse(2048, 3703, 99), **options)
        make = partial(sparse, nbytes // (4 * 3703), 3703)
        rows.append(device_row(label, make, codec, copy, reps))
    return rows


def chosen_row(label: str, x: torch.Tensor, reps: int) -> dict[str, Any]:
    """Measure the decoding of random rows, compared with torch's index_select on the raw tensor."""
    codec = InvariantCodec.fit(x[:4096], chunk_bytes=x.element_size(), uniform=True)
    packed = codec.encode(x)
    n = len(x) // 4
    ids = [torch.randint(0, len(x), (n,), device="cuda") for _ in range(reps + 2)]
    out = torch.empty(n, x.shape[1], dtype=x.dtype, device="cuda")
    check(codec, codec.decode(packed, ids[0], out=out), x[ids[0]])
    mine = gpu_seconds(lambda i: codec.decode(packed, ids[i], out=out), reps)
    peer = gpu_seconds(lambda i: torch.index_select(x, 0, ids[i], out=out), reps)
    return {
        "data": label,
        "rows": f"{n:,} random",
        "decode GB/s": out.nbytes / mine / 1e9,
        "raw index_select GB/s": out.nbytes / peer / 1e9,
        "ratio of rates": peer / mine,
    }


def chosen_rows(nbytes: int, reps: int) -> Rows:
    """Measure rows chosen by index."""
    return [
        chosen_row(label, normal(nbytes // row_bytes, row_bytes // dtype.itemsize, dtype, 5), reps)
        for label, dtype, row_bytes in (
            ("float32 normal, 1 KB rows", torch.float32, 1024),
            ("bfloat16 normal, 2 KB rows", torch.bfloat16, 2048),
            ("bfloat16 normal, 256 B rows", torch.bfloat16, 256),
        )
    ]


def nvcomp_row(
    nvcomp: Any, label: str, algorithm: str, kind: str, inputs: list[torch.Tensor], reps: int
) -> dict[str, Any]:
    """Measure one of nvCOMP's codecs."""
    stream = torch.cuda.current_stream().cuda_stream
    codec = nvcomp.Codec(algorithm=algorithm, data_type=kind, cuda_stream=stream)
    arrays = [nvcomp.as_array(x) for x in inputs]
    encoded = [codec.encode(array) for array in arrays]
    # The first calls of a process take several times as long.
    encode = gpu_seconds(lambda i: codec.encode(arrays[i % SETS]), reps, NVCOMP_WARM_UP)
    decode = gpu_seconds(lambda i: codec.decode(encoded[i % SETS]), reps, NVCOMP_WARM_UP)
    raw_bytes = inputs[0].nbytes
    return {
        "data": label,
        "plan": f"nvCOMP {algorithm}",
        "ratio": raw_bytes * SETS / sum(e.buffer_size for e in encoded),
        "decode GB/s": raw_bytes / decode / 1e9,
        "encode GB/s": raw_bytes / encode / 1e9,
    }


def nvcomp_rows(nbytes: int, reps: int) -> Rows:
    """Measure nvCOMP's codecs on the same values, or nothing when it is not installed."""
    try:
        from nvidia import nvcomp
    except ImportError:
        return []
    rows: Rows = []
    for label, dtype, view, kinds in (
        ("bfloat16 normal", torch.bfloat16, torch.int16, {"ANS": "<f2", "Bitcomp": "<u2"}),
        ("float32 normal", torch.float32, torch.float32, {"ANS": "<f4", "Bitcomp": "<f4"}),
    ):
        columns = 1024 // dtype.itemsize
        inputs = [normal(nbytes // 1024, columns, dtype, s).view(view) for s in range(SETS)]
        for algorithm, kind in kinds.items():
            rows.append(nvcomp_row(nvcomp, label, algorithm, kind, inputs, reps))
    return rows


def pinned(packed: PackedRows) -> PackedRows:
    """Return packed rows in page-locked host memory."""
    return packed.to("cpu").pin_memory()


def over_link(nbytes: int, reps: int) -> Rows:
    """Measure packed data in page-locked host memory that arrives decoded on the device."""
    target = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    host = [torch.empty(nbytes, dtype=torch.uint8).random_().pin_memory() for _ in range(2)]
    engine = (
        nbytes / gpu_seconds(lambda i: target.copy_(host[i % 2], non_blocking=True), reps) / 1e9
    )
    rows: Rows = [{"data": "plain copy engine", "packed GB/s": engine, "of engine": "100 %"}]

    def seconds_of(
        codec: InvariantCodec, packed: list[PackedRows], out: torch.Tensor, via: Via
    ) -> float:
        return gpu_seconds(lambda i: codec.decode(packed[i % len(packed)], out=out, via=via), reps)

    def measure(label: str, codec: InvariantCodec, make: Callable[[int], torch.Tensor]) -> None:
        inputs = [make(seed) for seed in range(2)]
        packed = [pinned(codec.encode(x)) for x in inputs]
        out = torch.empty_like(inputs[0])
        rates = {}
        for via in ("copy-engine", "zero-copy"):
            out.view(torch.uint8).fill_(0xA5)
            check(codec, codec.decode(packed[1], out=out, via=via), inputs[1])
            rates[via] = packed[0].nbytes / seconds_of(codec, packed, out, via) / 1e9
        ratio = out.nbytes / packed[0].nbytes
        rows.append(
            {
                "data": label,
                "ratio": ratio,
                "engine out GB/s": ratio * rates["copy-engine"],
                "packed GB/s": rates["copy-engine"],
                "of engine": f"{100 * rates['copy-engine'] / engine:.1f} %",
                "zero-copy out GB/s": ratio * rates["zero-copy"],
                "zero-copy packed GB/s": rates["zero-copy"],
                "of zero-copy": f"{100 * rates['zero-copy'] / zero_copy:.1f} %",
            }
        )

    # The kernel's own reads: the same kernel on rows that are all kept raw.
    raw_codec = masked_codec(1024, 0.5, 3)
    noise = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda")
    noise = noise.view(torch.float32).view(-1, 256)
    raw = pinned(raw_codec.encode(noise))
    out = torch.empty_like(noise)
    zero_copy = raw.nbytes / seconds_of(raw_codec, [raw], out, "zero-copy") / 1e9
    check(raw_codec, out, noise)
    rows[0]["zero-copy packed GB/s"] = zero_copy
    rows[0]["of zero-copy"] = "100 %"

    for label, dtype, row_bytes in (
        ("float32 normal, 1 KB rows", torch.float32, 1024),
        ("bfloat16 normal, 2 KB rows", torch.bfloat16, 2048),
    ):
        columns = row_bytes // dtype.itemsize
        codec = InvariantCodec.fit(
            normal(4096, columns, dtype, 99), chunk_bytes=dtype.itemsize, uniform=True
        )
        measure(
            label,
            codec,
            partial(normal, nbytes // row_bytes, columns, dtype),
        )
    for row_bytes in (256, 1024, 4096):
        for saved in (0.12, 0.5, 0.75, 0.9):
            codec = masked_codec(row_bytes, saved, 7)
            # Enough rows that the packed bytes fill several pieces at every saving.
            n = int(nbytes / row_bytes / (1 - saved) / 2)
            measure(
                f"{row_bytes} B rows, {saved:.0%} saved",
                codec,
                partial(masked, codec, n),
            )
    return rows


def run(arguments: argparse.Namespace) -> dict[str, Rows]:
    """Run the GPU part and return its tables by title."""
    nbytes = arguments.gpu_bytes
    name = torch.cuda.get_device_name()
    tables = {f"On the device: {name}": on_device(nbytes, arguments.repetitions)}
    tables["Random rows out of packed rows on the device"] = chosen_rows(
        nbytes, arguments.repetitions
    )
    peers = nvcomp_rows(min(nbytes, 256 << 20), arguments.repetitions)
    if peers:
        tables["nvCOMP on the same values, on the device"] = peers
    tables["Over the link, from page-locked host memory"] = over_link(
        nbytes // 2, arguments.repetitions
    )
    return tables
