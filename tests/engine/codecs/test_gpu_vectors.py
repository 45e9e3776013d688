"""vlz and vlzq on a real GPU: the bytes of the CPU, many tensors at once, and no wait."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import bitslab
from bitslab.engine.codecs import Blob, BlobCodec, BoundedVectorCodec, VectorLzCodec
from bitslab.engine.codecs.vectors import decode_body
from bitslab.engine.kernels.cuda import kernels_on
from bitslab.engine.kernels.vector_chunks import VectorOptions, send_bytes
from tests.engine.codecs.test_blob_contract import tensor_of
from tests.helpers import dtype_id, refusal_on_gpu, same_bits

pytestmark = pytest.mark.gpu

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
OTHERS = (torch.float64, torch.uint8, torch.int16, torch.int64, torch.complex128, torch.bool)
SHAPES = [(), (0,), (3, 0, 2), (1,), (5, 7), (4096,), (2, 3, 4097), (300, 64)]
CODECS: tuple[BlobCodec, ...] = (
    VectorLzCodec(),
    VectorLzCodec(255),
    VectorLzCodec(references=False),
    BoundedVectorCodec(0.01),
    BoundedVectorCodec(0.03, relative=True),
    BoundedVectorCodec(0.3, window=32),
)

each_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.describe())


def rows_of(n: int, row: int, distinct: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(distinct, row, generator=generator)
    return table[torch.randint(distinct, (n,), generator=generator)]


def assert_like_the_cpu(codec: BlobCodec, t: torch.Tensor, budget: int | None = None) -> None:
    wanted = codec.encode(t).trimmed()
    blob = codec.encode(t.cuda(), sm_budget=budget)
    assert torch.equal(blob.trimmed().data.cpu(), wanted.data)
    decoded = codec.decode(wanted.to("cuda"), sm_budget=budget)
    bitslab.raise_pending_errors()
    assert same_bits(decoded.cpu(), codec.decode(wanted))


@each_codec
@pytest.mark.parametrize("dtype", [*FLOATS, *OTHERS], ids=dtype_id)
def test_gpu_writes_and_reads_like_the_cpu(codec, dtype):
    if not codec.takes(dtype):
        return
    for shape in SHAPES:
        assert_like_the_cpu(codec, tensor_of(dtype, shape))
    for distinct in (1, 40, 900, 5000):
        t = (3 * rows_of(5000, 64, distinct)).to(dtype)
        assert_like_the_cpu(codec, t)
        assert_like_the_cpu(codec, t[1:].t())
    for budget in (1, 7):
        assert_like_the_cpu(codec, t, budget)


@each_codec
def test_any_alignment_of_a_given_output(codec):
    t = rows_of(2003, 9, 500)
    blob = codec.encode(t.cuda())
    memory = torch.full((t.numel() + 4,), 7.0, device="cuda")
    for begin in range(4):
        out = memory[begin : begin + t.numel()].view(t.shape)
        memory.fill_(7)
        assert codec.decode(blob, out) is out
        assert same_bits(out.cpu(), codec.decode(codec.encode(t)))
        assert (memory[:begin] == 7).all() and (memory[begin + t.numel() :] == 7).all()
    bitslab.raise_pending_errors()


@each_codec
def test_nothing_waits_and_graphs_are_captured(codec, run_ahead):
    t = rows_of(20_000, 64, 5000).cuda()
    most = codec.max_encoded_bytes(t.shape, t.dtype)
    data, out = torch.empty(most, dtype=torch.uint8, device="cuda"), torch.empty_like(t)
    sizes = torch.zeros((), dtype=torch.int64, device="cuda")

    def there_and_back() -> None:
        blob = codec.encode(t, data)
        sizes.copy_(blob.used_bytes)  # known on the device alone
        codec.decode(blob, out)

    there_and_back()  # warm
    expected, wanted = codec.encode(t).nbytes, out.clone()
    out.zero_()
    run_ahead(there_and_back)
    assert same_bits(out, wanted) and int(sizes) == expected
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        there_and_back()
    for seed in range(3):
        given = rows_of(20_000, 64, 7000, seed)
        t.copy_(given)
        graph.replay()
        torch.cuda.synchronize()
        on_cpu = codec.encode(given).trimmed()
        assert same_bits(out.cpu(), codec.decode(on_cpu)) and int(sizes) == len(on_cpu.data)
    bitslab.raise_pending_errors()


def test_many_tensors_are_encoded_and_decoded_at_once(run_ahead):
    tensors = [rows_of(n, 64, d, n).cuda() for n, d in ((2048, 300), (1, 1), (777, 777), (4000, 9))]
    tensors *= 30
    options = [VectorOptions(), VectorOptions(0.03, relative=True), VectorOptions(0.1, window=32)]
    given = [options[i % 3] for i in range(len(tensors))]
    out = torch.empty(send_bytes(tensors), dtype=torch.uint8, device="cuda")
    kernels = kernels_on(torch.device("cuda", torch.cuda.current_device()))
    encoded: list[tuple[torch.Tensor, torch.Tensor]] = []

    def encode() -> None:
        encoded.append(kernels.encode_vectors(tensors, given, out))

    encode()  # warm
    torch.cuda.synchronize()
    run_ahead(encode)
    offsets, sizes = encoded[-1]
    starts, bodies = offsets.tolist(), sizes.tolist()
    received = [out[a : a + n] for a, n in zip(starts, bodies, strict=False)]
    outs = [torch.empty_like(t) for t in tensors]
    bounded = [each.bounded for each in given]
    kernels.decode_vectors(received, outs, bounded)  # warm
    torch.cuda.synchronize()
    for found in outs:
        found.zero_()
    run_ahead(lambda: kernels.decode_vectors(received, outs, bounded))
    bitslab.raise_pending_errors()
    for t, body, found, each in zip(tensors, received, outs, given, strict=True):
        wanted = torch.empty_like(t, device="cpu")
        decode_body(body.cpu().numpy(), wanted, bounded=each.bounded)
        assert same_bits(found.cpu(), wanted)
        assert each.bounded or same_bits(found, t)


@each_codec
def test_damaged_blobs_are_refused_or_contained(codec):
    t = rows_of(600, 64, 300)
    blob = codec.encode(t).trimmed()
    generator = torch.Generator().manual_seed(5)
    refused = 0
    places = [  # most of what says where rows and bits stand is in front
        torch.randint(n, (40,), generator=generator) for n in (200, len(blob.data))
    ]
    for place in torch.cat(places).tolist():
        data = blob.data.clone()
        data[place] ^= 1 << place % 8
        memory = torch.full((t.numel() + 200,), 7.0, device="cuda")
        out = memory[100:-100].view(t.shape)
        damaged = Blob(data.cuda(), t.shape, t.dtype)
        if refusal_on_gpu(functools.partial(codec.decode, damaged, out)):
            refused += 1
            assert bool((out == 7).all())
        assert (memory[:100] == 7).all() and (memory[-100:] == 7).all()
    assert refused > 10


def test_equal_rows_in_flight_on_several_streams_do_not_disturb_each_other():
    tensors = [rows_of(3000 + i, 64, 100 * i + 1).cuda() for i in range(8)]
    codec = VectorLzCodec()
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    results: list[Any] = []
    for i, t in enumerate(tensors):
        with torch.cuda.stream(streams[i % 4]):
            results.append(codec.decode(codec.encode(t, sm_budget=2), sm_budget=2))
    torch.cuda.synchronize()
    for t, found in zip(tensors, results, strict=True):
        assert torch.equal(found, t)
