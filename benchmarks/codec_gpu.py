"""The codec on a GPU: decode and encode in device memory, and over the link, beside peers.

Every repetition works on another of several inputs, drawn at the start, each many times the size
of the GPU's cache, and every result is compared with its input bit for bit.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from timing import gpu_seconds

from bitslab.codecs.base import PackedRows
from bitslab.codecs.invariant.codec import InvariantCodec
from bitslab.codecs.invariant.profile import Profile
from bitslab.kernels.format import RowFormat

Rows = list[dict[str, Any]]
PUBLISHED: dict[str, Any] = {
    "chunk_bytes": 4,
    "code_bits": 1,
    "grouped": False,
    "uniform": False,
}
SETS = 3  # inputs that the repetitions rotate through


def normal(n: int, columns: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return normal values of deviation 0.02, the size of trained weights."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(n, columns, device="cuda", generator=generator) * 0.02).to(dtype)


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
        make = lambda seed, c=columns, d=dtype, r=row_bytes: normal(nbytes // r, c, d, seed)  # noqa: E731
        rows.append(device_row(label, make, codec, copy, reps))
    for row_bytes in (1024, 256, 4096):
        for saved in (0.12, 0.25, 0.5, 0.75, 0.9):
            codec = masked_codec(row_bytes, saved, 7)
            make = lambda seed, c=codec, r=row_bytes: masked(c, nbytes // r, seed)  # noqa: E731
            rows.append(
                device_row(f"{row_bytes} B rows, {saved:.0%} saved", make, codec, copy, reps)
            )
    codec = InvariantCodec.fit(normal(4096, 256, torch.float32, 99), **PUBLISHED)
    make = lambda seed: normal(nbytes // 1024, 256, torch.float32, seed)  # noqa: E731
    rows.append(device_row("float32 normal, 1 KB rows", make, codec, copy, reps))
    for options, label in (
        ({}, "sparse float32, 14.8 KB rows"),
        (PUBLISHED, "sparse float32, 14.8 KB rows"),
    ):
        codec = InvariantCodec.fit(sparse(2048, 3703, 99), **options)
        make = lambda seed: sparse(nbytes // (4 * 3703), 3703, seed)  # noqa: E731
        rows.append(device_row(label, make, codec, copy, reps))
    return rows


def chosen_rows(nbytes: int, reps: int) -> Rows:
    """Measure the decoding of random rows, beside torch's index_select on the raw tensor."""
    rows: Rows = []
    for label, dtype, row_bytes in (
        ("float32 normal, 1 KB rows", torch.float32, 1024),
        ("bfloat16 normal, 2 KB rows", torch.bfloat16, 2048),
        ("bfloat16 normal, 256 B rows", torch.bfloat16, 256),
    ):
        columns = row_bytes // dtype.itemsize
        x = normal(nbytes // row_bytes, columns, dtype, 5)
        codec = InvariantCodec.fit(x[:4096], chunk_bytes=dtype.itemsize, uniform=True)
        packed = codec.encode(x)
        n = len(x) // 4
        ids = [torch.randint(0, len(x), (n,), device="cuda") for _ in range(reps + 2)]
        out = torch.empty(n, columns, dtype=dtype, device="cuda")
        codec.decode(packed, ids[0], out=out)
        check(codec, out, x[ids[0]])
        mine = gpu_seconds(
            lambda i, c=codec, p=packed, o=out, j=ids: c.decode(p, j[i], out=o), reps
        )
        peer = gpu_seconds(lambda i, t=x, o=out, j=ids: torch.index_select(t, 0, j[i], out=o), reps)
        rows.append(
            {
                "data": label,
                "rows": f"{n:,} random",
                "decode GB/s": out.nbytes / mine / 1e9,
                "raw index_select GB/s": out.nbytes / peer / 1e9,
                "ratio of rates": peer / mine,
            }
        )
    return rows


def nvcomp_rows(nbytes: int, reps: int) -> Rows:
    """Measure nvCOMP's codecs on the same values, or nothing when it is not installed."""
    try:
        from nvidia import nvcomp
    except ImportError:
        return []
    rows: Rows = []
    for label, dtype, kind in (
        ("bfloat16 normal", torch.bfloat16, "<u2"),
        ("float32 normal", torch.float32, "<f4"),
    ):
        inputs = [normal(nbytes // 1024, 1024 // dtype.itemsize, dtype, s) for s in range(SETS)]
        views = [x.view(torch.int16 if dtype.itemsize == 2 else torch.float32) for x in inputs]
        ans_kind = "<f2" if dtype.itemsize == 2 else "<f4"
        for algorithm in ("ANS", "Bitcomp"):
            stream = torch.cuda.current_stream().cuda_stream
            codec = nvcomp.Codec(
                algorithm=algorithm,
                data_type=ans_kind if algorithm == "ANS" else kind,
                cuda_stream=stream,
            )
            arrays = [nvcomp.as_array(v) for v in views]
            encoded = [codec.encode(a) for a in arrays]
            size = sum(e.buffer_size for e in encoded) / SETS
            encode = gpu_seconds(lambda i, c=codec, a=arrays: c.encode(a[i % SETS]), reps)
            decode = gpu_seconds(lambda i, c=codec, e=encoded: c.decode(e[i % SETS]), reps)
            raw_bytes = inputs[0].nbytes
            rows.append(
                {
                    "data": label,
                    "plan": f"nvCOMP {algorithm}",
                    "ratio": raw_bytes / size,
                    "decode GB/s": raw_bytes / decode / 1e9,
                    "encode GB/s": raw_bytes / encode / 1e9,
                }
            )
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
    del host
    rows: Rows = [{"data": "plain copy engine", "packed GB/s": engine, "of engine": "100 %"}]

    def measure(label: str, codec: InvariantCodec, make: Callable[[int], torch.Tensor]) -> None:
        inputs = [make(seed) for seed in range(2)]
        packed = [pinned(codec.encode(x)) for x in inputs]
        out = torch.empty_like(inputs[0])
        row: dict[str, Any] = {"data": label, "ratio": inputs[0].nbytes / packed[0].nbytes}
        for via, name in (("copy-engine", "engine"), ("zero-copy", "zero-copy")):
            out.view(torch.uint8).fill_(0xA5)
            check(codec, codec.decode(packed[1], out=out, via=via), inputs[1])
            seconds = gpu_seconds(
                lambda i, v=via: codec.decode(packed[i % 2], out=out, via=v), reps
            )
            row[f"{name} out GB/s"] = out.nbytes / seconds / 1e9
            row["packed GB/s" if name == "engine" else "zero-copy packed GB/s"] = (
                packed[0].nbytes / seconds / 1e9
            )
            if name == "engine":
                row["of engine"] = f"{100 * packed[0].nbytes / seconds / 1e9 / engine:.1f} %"
            else:
                row["of zero-copy"] = f"{100 * packed[0].nbytes / seconds / 1e9 / zero_copy:.1f} %"
        rows.append(row)

    # The kernel's own reads: the same kernel on rows that are all kept raw.
    raw_codec = masked_codec(1024, 0.5, 3)
    noise = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda")
    noise = noise.view(torch.float32).view(-1, 256)
    raw = pinned(raw_codec.encode(noise))
    out = torch.empty_like(noise)
    zero_copy = (
        raw.nbytes
        / gpu_seconds(lambda i: raw_codec.decode(raw, out=out, via="zero-copy"), reps)
        / 1e9
    )
    check(raw_codec, out, noise)
    rows[0]["zero-copy packed GB/s"] = zero_copy
    rows[0]["of zero-copy"] = "100 %"
    del raw, out, noise

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
            lambda seed, c=columns, d=dtype, r=row_bytes: normal(nbytes // r, c, d, seed),
        )
    for row_bytes in (256, 1024, 4096):
        for saved in (0.12, 0.5, 0.75, 0.9):
            codec = masked_codec(row_bytes, saved, 7)
            # Enough rows that the packed bytes fill several pieces at every saving.
            n = int(nbytes / row_bytes / (1 - saved) / 2)
            measure(
                f"{row_bytes} B rows, {saved:.0%} saved",
                codec,
                lambda seed, c=codec, m=n: masked(c, m, seed),
            )
    keys = list(dict.fromkeys(k for row in rows[::-1] for k in row))
    return [{k: row.get(k, "") for k in keys} for row in rows]


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
