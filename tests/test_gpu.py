"""The kernels on a real GPU: the cases of tests/simt, and tests that need a GPU."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

import bitslab
from bitslab.engine.codecs.invariant.codec import InvariantCodec
from bitslab.engine.kernels.cuda import kernels_on
from bitslab.engine.kernels.cuda.source import Variant
from bitslab.engine.kernels.cuda.variants import all_variants
from tests.engine.kernels.cases import TABLE_KINDS, cache_of, make_case, table_of
from tests.helpers import random_bits, same_bits

pytestmark = pytest.mark.gpu  # tests/conftest.py skips these where there is no GPU

VARIANTS = [v for v in all_variants() if isinstance(v, Variant)]
GATHERERS = [v for v in VARIANTS if v.file == "gather"]
LONG_ROWS = 300_000
PLANS: dict[str, dict[str, Any]] = {
    "planned": {},
    "positional": {"code_bits": 1, "uniform": False, "grouped": False},
    "grouped": {"code_bits": 3, "uniform": True, "grouped": True},
}
ROW_BYTES = {"three-warps-a-row": 12 << 10, "block-a-row": 24 << 10, "long": 48 << 10}


def assert_gpu_equals_cpu(case) -> None:
    codec, rows = case.codec, case.rows
    on_cpu, on_gpu = codec.encode(rows), codec.encode(rows.cuda())
    assert on_gpu.facts == on_cpu.facts
    for name, part in on_cpu.parts.items():
        assert torch.equal(on_gpu.parts[name].cpu(), part), name
    n = len(rows)
    for start, stop in ((0, n), (n // 2 - 1, n - 1)):
        out = torch.full((stop - start, rows.shape[1]), 0xA5, dtype=torch.uint8, device="cuda")
        codec.decode(on_gpu, out=out, start=start, stop=stop)
        assert torch.equal(out.cpu(), rows[start:stop])
    ids = torch.randint(-n, n, (41,))
    assert torch.equal(codec.decode(on_gpu, ids.cuda()).cpu(), rows[ids])
    assert torch.equal(codec.decode(on_gpu, ids).cpu(), rows[ids])


@pytest.mark.parametrize("clusters", [1, 3], ids=["one-profile", "three-clusters"])
@pytest.mark.parametrize(
    "variant", [v for v in VARIANTS if v.file == "decode"], ids=lambda v: v.name
)
def test_gpu_packs_and_unpacks_like_the_cpu(variant, clusters):
    for seed in range(2):
        assert_gpu_equals_cpu(make_case(variant, clusters=clusters, seed=seed))


def long_table(dtype: torch.dtype, row_bytes: int) -> torch.Tensor:
    """Return rows enough for warps that take several after each other and for tiles of the largest.

    Values are near to each other, one of 256 is any; rows repeat, here and there and after each
    other, and some thousand are of random bits, which are kept raw.
    """
    generator = torch.Generator().manual_seed(row_bytes)
    columns = row_bytes // dtype.itemsize
    x = torch.randn(LONG_ROWS, columns, generator=generator)
    x = (x * (0.02 if dtype.is_floating_point else 4)).bfloat16().to(dtype)
    drawn = random_bits(dtype, (LONG_ROWS, columns), seed=row_bytes)
    x = torch.where(torch.rand(LONG_ROWS, columns, generator=generator) < 1 / 256, drawn, x)
    x[::50] = x[3]
    x[50_001:54_000] = x[4]
    x[100_001:104_000] = drawn[100_001:104_000]
    return x


def assert_gpu_equals_cpu_on_long(x: torch.Tensor, codec: InvariantCodec) -> None:
    on_cpu, on_gpu = codec.encode(x), codec.encode(x.cuda())
    kept_raw = int((on_cpu.parts["lengths"] == 0).sum())
    assert 3000 < kept_raw < LONG_ROWS // 10, "not about the random rows alone"
    assert on_gpu.facts == on_cpu.facts
    for name, part in on_cpu.parts.items():
        assert torch.equal(on_gpu.parts[name].cpu(), part), name
    for start, stop in ((0, LONG_ROWS), (99_999, LONG_ROWS - 1)):
        out = torch.zeros_like(x[start:stop], device="cuda")
        codec.decode(on_gpu, out=out, start=start, stop=stop)
        assert same_bits(out.cpu(), x[start:stop])
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(-LONG_ROWS, LONG_ROWS, (200_001,), generator=generator)
    for wanted in (ids, ids.int(), ids.sort().values):
        expected = codec.decode(on_cpu, wanted)
        assert same_bits(expected, x[wanted.long()])
        assert same_bits(codec.decode(on_gpu, wanted.cuda()).cpu(), expected)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("row_bytes", [64, 256])
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int8, torch.float64],
    ids=str,
)
def test_gpu_packs_and_unpacks_long_tables_like_the_cpu(dtype, row_bytes, plan):
    x = long_table(dtype, row_bytes)
    assert_gpu_equals_cpu_on_long(x, InvariantCodec.fit(x[:30_000], **plan))


@pytest.mark.parametrize("row_bytes", [64, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
def test_gpu_packs_and_unpacks_long_tables_of_clusters_like_the_cpu(dtype, row_bytes):
    x = long_table(dtype, row_bytes)
    for kind in (1, 2):  # which other columns tell from the first
        columns = x[kind::3, kind::3]
        columns.copy_(columns / 16**kind if dtype.is_floating_point else columns % 2 + 32 * kind)
    codec = InvariantCodec.fit(x[:30_000], clusters=3)
    assert codec.profile.format.clusters == 3
    assert_gpu_equals_cpu_on_long(x, codec)


@pytest.mark.parametrize("layout", ["compact", "inplace"])
@pytest.mark.parametrize("row_bytes", [64, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gpu_gathers_from_long_tables_in_host_memory(dtype, row_bytes, layout):
    x = long_table(dtype, row_bytes)
    table = bitslab.CompressedTable.from_tensor(x, layout, "ibp")
    ids = torch.randint(-LONG_ROWS, LONG_ROWS, (200_001,))
    expected = table.gather(ids)
    assert same_bits(expected, x[ids])
    for sort in (False, True):
        assert same_bits(table.gather(ids, device="cuda", sort=sort).cpu(), expected)
        assert same_bits(table.gather(ids.cuda(), sort=sort).cpu(), expected)


@pytest.mark.parametrize("row_bytes", ROW_BYTES.values(), ids=ROW_BYTES)
@pytest.mark.parametrize("grouped", [False, True], ids=["plain", "grouped"])
@pytest.mark.parametrize("uniform", [False, True], ids=["positional", "uniform"])
@pytest.mark.parametrize("code_bits", [1, 3])
def test_gpu_shares_large_rows_between_warps(row_bytes, grouped, uniform, code_bits):
    variant = Variant("decode", 4, code_bits, grouped, uniform, 4)
    assert_gpu_equals_cpu(make_case(variant, n_rows=40, row_bytes=row_bytes))


def to_gpu(storage):
    """Move all tensors of a TableStorage or CacheStorage to the GPU."""
    moved = {
        field.name: getattr(storage, field.name).cuda()
        for field in fields(storage)
        if isinstance(getattr(storage, field.name), torch.Tensor)
    }
    if "addresses" in moved:
        moved["slabs"] = tuple(slab.cuda() for slab in storage.slabs)
        for number, slab in enumerate(moved["slabs"]):
            moved["addresses"][number] = slab.data_ptr()
    return replace(storage, **moved)


@pytest.mark.parametrize("variant", GATHERERS, ids=lambda v: v.name)
def test_gpu_gathers_from_every_kind_of_table_and_cache(variant):
    kernels = kernels_on(torch.device("cuda", torch.cuda.current_device()))
    for seed, kind in enumerate(TABLE_KINDS):
        clusters = 3 if variant.vector == 1 and seed % 2 else 1
        case = make_case(variant, clusters=clusters, n_rows=200, seed=seed)
        table, layout = table_of(case, kind, seed), case.layout.to(torch.device("cuda"))
        ids = torch.randint(-200, 200, (777,), dtype=(torch.int64, torch.int32)[seed % 2])
        for cache in (None, cache_of(case, table, torch.randperm(200)[:90], slabs=3)):
            out = torch.zeros(777, case.rows.shape[1], dtype=torch.uint8, device="cuda")
            there = None if cache is None else to_gpu(cache)
            kernels.gather_rows(to_gpu(table), layout, ids.cuda(), out, cache=there)
            assert torch.equal(out.cpu(), case.rows[ids.long()])


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_gpu_counts_bits_like_the_cpu(width):
    from bitslab.engine.kernels import cpu, kernels_for

    rows = torch.randint(0, 256, (1000, 264), dtype=torch.uint8)
    counts = kernels_for(torch.device("cuda")).count_bits(rows.cuda(), width)
    assert torch.equal(counts.cpu(), cpu.count_bits(rows, width))


def weights(n=4096, columns=256, dtype=torch.bfloat16):
    return (torch.randn(n, columns) * 0.02).to(dtype)


@pytest.mark.parametrize("via", ["copy-engine", "zero-copy"])
@pytest.mark.parametrize("pieces", ["one-piece", "many-pieces"])
def test_rows_in_host_memory_arrive_decoded(via, pieces, monkeypatch):
    if pieces == "many-pieces":
        monkeypatch.setattr("bitslab.engine.transfer.across.PIECE_BYTES", 50_000)
    x = weights()
    codec = InvariantCodec.fit(x)
    packed = codec.encode(x).pin_memory()
    for start, stop in ((0, 4096), (77, 3001)):
        out = torch.zeros(stop - start, 256, dtype=x.dtype, device="cuda")
        codec.decode(packed, out=out, start=start, stop=stop, via=via)
        assert torch.equal(out.cpu(), x[start:stop])


def test_indices_read_page_locked_rows_over_the_link():
    x = weights()
    codec = InvariantCodec.fit(x)
    ids = torch.randint(0, 4096, (999,))
    out = torch.zeros(999, 256, dtype=x.dtype, device="cuda")
    codec.decode(codec.encode(x).pin_memory(), ids.cuda(), out=out)
    assert torch.equal(out.cpu(), x[ids])
    with pytest.raises(bitslab.ArgumentTypeError, match="pin_memory"):
        codec.decode(codec.encode(x), ids, out=out)


def test_bad_index_on_the_gpu_leaves_the_output_untouched_and_is_reported_later():
    x = weights()
    codec = InvariantCodec.fit(x)
    packed = codec.encode(x.cuda())
    ids = torch.tensor([1, 2, 4096, 9999], device="cuda")
    out = torch.full((4, 256), 7.0, dtype=x.dtype, device="cuda")
    codec.decode(packed, ids, out=out)
    with pytest.raises(bitslab.IndexRangeError, match="index 4096 at position 2"):
        bitslab.raise_pending_errors()
    assert (out == 7).all()
    codec.decode(packed, ids, out=out)
    torch.cuda.synchronize()
    with pytest.raises(bitslab.IndexRangeError):
        codec.decode(packed, ids[:1], out=out[:1])


def test_damaged_words_on_the_gpu_are_reported_and_cause_no_access_outside_the_buffers():
    x = weights()
    codec = InvariantCodec.fit(x)
    generator = torch.Generator().manual_seed(0)
    for part in ("words", "bases", "lengths", "row_clusters"):
        if part == "row_clusters":
            case = make_case(Variant("decode", 2, 1, False, False, 1), clusters=3, n_rows=4096)
            codec, x = case.codec, case.rows
        packed = codec.encode(x.cuda())
        damaged = packed.parts[part].view(torch.uint8)
        where = torch.randint(0, damaged.numel(), (64,), generator=generator).cuda()
        damaged[where] ^= 0x80
        codec.decode(packed)
        try:
            bitslab.raise_pending_errors()
        except bitslab.CorruptedDataError:
            pass  # flips in payload bits cannot be noticed; flips in metadata are
        else:
            assert part == "words"


def test_decode_follows_the_current_stream_and_can_be_captured_in_a_graph():
    x = weights()
    codec = InvariantCodec.fit(x)
    packed = codec.encode(x.cuda())
    ids = torch.arange(0, 4096, 3, device="cuda")
    out = torch.zeros_like(x, device="cuda")
    rows = torch.zeros(len(ids), 256, dtype=x.dtype, device="cuda")
    codec.decode(packed, out=out)
    codec.decode(packed, ids, out=rows)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        codec.decode(packed, out=out)
        codec.decode(packed, ids, out=rows)
    out.zero_()
    rows.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out.cpu(), x)
    assert torch.equal(rows.cpu(), x[::3])
    out.zero_()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        codec.decode(packed, out=out)
        copied = out.clone()
    side.synchronize()
    assert torch.equal(copied.cpu(), x)


def test_decode_does_not_wait_for_the_gpu(no_waiting):
    x = weights()
    codec = InvariantCodec.fit(x)
    packed = codec.encode(x.cuda())
    ids = torch.arange(0, 4096, 3, device="cuda")
    out = torch.zeros_like(x, device="cuda")
    codec.decode(packed, ids)
    codec.decode(packed, out=out)
    with no_waiting():
        codec.decode(packed, ids)
        codec.decode(packed, out=out)


def test_offsets_beyond_four_gigabytes():
    n, columns = 5 << 20, 512  # 5 GiB of bfloat16, 3.6 GiB packed; and rows beyond 2**32 bytes out
    x = torch.empty(n, columns, dtype=torch.bfloat16, device="cuda")
    for part in x.split(1 << 19):
        part.normal_(std=0.02)
    codec = InvariantCodec.fit(x[: 1 << 13])
    packed = codec.encode(x)
    assert packed.parts["words"].numel() * 4 > 3 << 30
    out = codec.decode(packed)
    assert torch.equal(out.view(torch.int16), x.view(torch.int16))
    ids = torch.randint(0, n, (10_000,), device="cuda")
    assert torch.equal(codec.decode(packed, ids).view(torch.int16), x[ids].view(torch.int16))
    del out
    raw = InvariantCodec(codec.profile, codec.row_shape, codec.dtype)
    noise = torch.randint(-(2**31), 2**31, (n, columns // 2), device="cuda", dtype=torch.int64)
    noise = noise.to(torch.int32).view(torch.bfloat16)
    kept = raw.encode(noise)
    assert kept.parts["words"].numel() * 4 > 1 << 32
    assert torch.equal(raw.decode(kept).view(torch.int16), noise.view(torch.int16))


def test_rows_are_decoded_to_an_odd_address():
    x = torch.zeros(1000, 64, dtype=torch.float16)
    x[::7] = 1.5
    codec = InvariantCodec.fit(x)
    assert codec.profile.format.chunk_bytes > 2
    packed = codec.encode(x.cuda())
    for ids in (None, torch.arange(1000, device="cuda")):
        out = torch.zeros(64_001, dtype=x.dtype, device="cuda")[1:].view(1000, 64)
        assert torch.equal(codec.decode(packed, ids, out=out).cpu(), x)


def test_page_locked_rows_are_kept_while_the_gpu_reads_them():
    x = weights()
    codec = InvariantCodec.fit(x)
    out = torch.zeros_like(x, device="cuda")
    packed = codec.encode(x)
    for _ in range(20):
        torch.cuda._sleep(5_000_000)
        codec.decode(packed.pin_memory(), out=out, via="zero-copy")
        for part in packed.parts.values():  # takes what the pinned allocator has free
            torch.zeros_like(part).pin_memory()
        assert torch.equal(out.cpu(), x)


def test_packed_rows_put_together_by_hand_are_decoded():
    x = weights()
    codec = InvariantCodec.fit(x)
    packed = codec.encode(x.cuda())
    by_hand = bitslab.PackedRows(packed.n_rows, packed.parts)
    assert torch.equal(codec.decode(by_hand).cpu(), x)


def test_compressed_tensor_lives_on_the_gpu():
    x = weights(1000, 128).view(10, 100, 128)
    ct = bitslab.compress(x.cuda())
    assert ct.device.type == "cuda" and ct.ratio > 1.2
    assert torch.equal(ct.decompress().cpu(), x)
    assert torch.equal(ct[3].cpu(), x[3])
    assert torch.equal(ct[torch.tensor([9, -10])].cpu(), x[[9, 0]])
    assert torch.equal(ct.to("cpu").decompress(), x)
    assert torch.equal(bitslab.compress(x).to("cuda").decompress().cpu(), x)
