"""csr, rle, zfp and counted zeros on a real GPU: the bytes of the CPU, and no wait for the host."""

from __future__ import annotations

import pytest
import torch

import bitslab
from bitslab.engine.codecs import Blob, BlobCodec, CsrCodec, RleCodec, ZfpCodec, count_zeros
from tests.engine.codecs.test_blob_contract import tensor_of
from tests.helpers import same_bits

pytestmark = pytest.mark.gpu

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
ALL = (*FLOATS, torch.uint8, torch.int16, torch.complex128, torch.bool)
CASES: list[tuple[BlobCodec, torch.dtype]] = [
    *((CsrCodec(), dtype) for dtype in ALL),
    *((RleCodec(), dtype) for dtype in ALL),
    *((ZfpCodec(bits), dtype) for bits in (20, 33, 64, 100) for dtype in FLOATS),
]
SHAPES = [(), (0,), (1,), (5, 7), (4096,), (3, 70_001)]


def assert_like_the_cpu(codec: BlobCodec, t: torch.Tensor) -> None:
    expected = codec.encode(t).trimmed()
    blob = codec.encode(t.cuda())
    assert torch.equal(blob.trimmed().data.cpu(), expected.data)
    decoded = codec.decode(blob)
    bitslab.raise_pending_errors()
    assert same_bits(decoded.cpu(), codec.decode(expected))
    assert same_bits(codec.decode(expected.to("cuda")).cpu(), codec.decode(expected))


@pytest.mark.parametrize(("codec", "dtype"), CASES, ids=lambda x: str(x).removeprefix("torch."))
def test_gpu_writes_and_reads_like_the_cpu(codec, dtype):
    for shape in SHAPES:
        t = tensor_of(dtype, shape)
        assert_like_the_cpu(codec, t)
        if t.numel() > 100:
            sparse = t.clone().view(-1)
            sparse[torch.rand(len(sparse)) < 0.8] = 0
            assert_like_the_cpu(codec, sparse)
            assert_like_the_cpu(codec, sparse[1:])  # at no multiple of 16 bytes


def test_large_tensors_are_placed_and_read():
    t = torch.randn(1 << 26, device="cuda").relu()  # more rows than one pass of one block takes
    for codec in (CsrCodec(), RleCodec()):
        blob = codec.encode(t)
        assert torch.equal(codec.decode(blob), t)
    assert int(count_zeros(t)) == int((t == 0).sum())
    lossy = ZfpCodec(32)
    errors = (lossy.decode(lossy.encode(t)) - t).abs()
    assert errors.double().sub(lossy.bounds(t)).max() <= 0


def test_zeros_are_counted_without_waiting(run_ahead):
    for dtype in (torch.uint8, torch.bfloat16, torch.float32, torch.int64):
        t = (torch.rand(1_000_003, device="cuda") < 0.5).to(dtype)
        for x in (t, t[1:], t[3:-5]):
            expected = int((x == 0).sum())
            assert int(count_zeros(x)) == expected
            found: list[torch.Tensor] = []
            run_ahead(lambda x=x, found=found: found.append(count_zeros(x)))
            assert int(found[0]) == expected


@pytest.mark.parametrize("codec", [CsrCodec(), RleCodec(), ZfpCodec(32)], ids=lambda c: c.name)
def test_nothing_waits_and_graphs_are_captured(codec, run_ahead):
    t = torch.randn(300_001, device="cuda").relu()
    t[7] = float("nan")
    data = torch.empty(codec.max_encoded_bytes(t.shape, t.dtype), dtype=torch.uint8, device="cuda")
    out = torch.empty_like(t)

    def there_and_back():
        codec.decode(codec.encode(t, data), out)

    there_and_back()  # warm
    expected = out.clone()
    out.zero_()
    run_ahead(there_and_back)
    assert same_bits(out, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        there_and_back()
    t.copy_(torch.randn_like(t).relu())
    graph.replay()
    torch.cuda.synchronize()
    assert same_bits(out.cpu(), codec.decode(codec.encode(t.cpu())))


@pytest.mark.parametrize("codec", [CsrCodec(), RleCodec(), ZfpCodec(32)], ids=lambda c: c.name)
def test_damage_is_reported_later_and_contained_in_the_tensor(codec):
    t = torch.randn(9_001).relu()
    t[7] = float("inf")
    blob = codec.encode(t).trimmed()
    generator = torch.Generator().manual_seed(1)
    refused = 0
    places = torch.randint(len(blob.data), (60,), generator=generator).tolist()
    for place in (*range(32), *places):
        data = blob.data.clone()
        data[place] ^= 1 << (place % 8)
        memory = torch.full((len(t) + 200,), 7.0, device="cuda")
        codec.decode(Blob(data.cuda(), t.shape, t.dtype), memory[100:-100])
        try:
            bitslab.raise_pending_errors()
        except bitslab.CorruptedDataError as error:
            refused += 1
            assert str(error).startswith("blob: ")
        assert (memory[:100] == 7).all() and (memory[-100:] == 7).all()
    assert refused >= 24
    with pytest.raises(bitslab.CorruptedDataError, match="header"):
        codec.decode(Blob(blob.data[:-1].clone().cuda(), t.shape, t.dtype))
        bitslab.raise_pending_errors()
