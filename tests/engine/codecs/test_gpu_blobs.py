"""zvc, ibp-blob and their chain on a real GPU: the bytes of the CPU, and no wait for the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import bitslab
from bitslab.engine.codecs import Blob, BlobCodec, ChainCodec, InvariantBlobCodec, ZvcCodec
from bitslab.engine.kernels import cpu
from bitslab.engine.kernels.blob_format import ZVC_FORM, ZvcLayout
from tests.engine.codecs.test_blob_contract import tensor_of
from tests.engine.codecs.test_gpu_kept import assert_like_the_cpu
from tests.helpers import bits_of, dtype_id, refusal_on_gpu, same_bits

pytestmark = pytest.mark.gpu

CLASSES: tuple[Any, ...] = (ZvcCodec, InvariantBlobCodec, ChainCodec)
DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.uint8,
    torch.int64,
    torch.complex128,
    torch.bool,
)
SHAPES = [(), (0,), (3, 0, 2), (1,), (5, 7), (4096,), (3, 70_001)]

each_class = pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.name)


def with_zeros(t: torch.Tensor, share: float, run: int = 1) -> torch.Tensor:
    """Return elements of which so many are zero, in runs of `run` neighbours or more."""
    t = t.flatten().clone()
    generator = torch.Generator().manual_seed(run)
    gone = torch.rand(-(-len(t) // run), generator=generator) < share
    t[gone.repeat_interleave(run)[: len(t)]] = 0
    return t


@each_class
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_gpu_writes_and_reads_like_the_cpu(cls, dtype):
    codec = cls.fit(tensor_of(dtype, (100, 100)))
    for shape in SHAPES:
        t = tensor_of(dtype, shape)
        assert_like_the_cpu(codec, t)
    for share, run in ((0.0, 1), (0.5, 1), (0.5, 8), (0.97, 64), (1.0, 1)):
        x = with_zeros(t, share, run)
        assert_like_the_cpu(codec, x)
        assert_like_the_cpu(codec, x[1:])  # at no multiple of 16 bytes
    matrix = t.reshape(-1)[:70_000].view(100, 700).t()
    assert_like_the_cpu(codec, matrix)
    # Blocks that are taken in turn, and a multiprocessor that has many of them.
    x = with_zeros(t, 0.5)
    for budget in (1, 7):
        blob = codec.encode(x.cuda(), sm_budget=budget)
        assert torch.equal(blob.trimmed().data.cpu(), codec.encode(x).trimmed().data)
        assert same_bits(codec.decode(blob, sm_budget=budget).cpu(), x)


@each_class
def test_options_of_every_width_have_the_bytes_of_the_cpu(cls):
    if cls is ZvcCodec:
        options: list[tuple[torch.dtype, dict[str, Any]]] = [(torch.int16, {})]
    else:
        options = [
            (torch.int8, {"chunk_bytes": 1, "code_bits": 2, "grouped": True}),
            (torch.bfloat16, {"chunk_bytes": 2, "code_bits": 3, "grouped": False}),
            (torch.float32, {"chunk_bytes": 4, "code_bits": 3, "grouped": False}),
            (torch.float32, {"chunk_bytes": 4, "code_bits": 3, "grouped": True}),
            (torch.float64, {"chunk_bytes": 8, "code_bits": 1, "grouped": False}),
        ]
    for dtype, given in options:
        t = (torch.randn(150_007, generator=torch.Generator().manual_seed(5)) * 3).to(dtype)
        noise = torch.randint(0, 256, (1 << 15,), dtype=torch.uint8)  # rows that do not shrink
        t[: len(noise) // dtype.itemsize] = noise.view(dtype)
        t[t == 0] = 1
        t = with_zeros(t, 0.3)
        codec = cls.fit(t, **given)
        assert_like_the_cpu(codec, t)
        assert_like_the_cpu(codec, t[1:])


def test_large_bools_take_a_bit_and_what_was_written_before_is_read():
    codec = ZvcCodec()
    for n in (1 << 16, 1_000_003):
        bits = torch.rand(n, generator=torch.Generator().manual_seed(n)) < 0.5
        odd = bits.to(torch.uint8)
        odd[n // 2] = 2
        for t in (bits, odd, odd.view(torch.bool), torch.zeros(n, dtype=torch.bool)):
            assert_like_the_cpu(codec, t)
            layout = ZvcLayout(n, 1)
            data = torch.zeros(layout.max_bytes, dtype=torch.uint8)
            cpu.encode_zvc(t.view(torch.uint8), layout, ZVC_FORM, data)
            old = Blob(data, t.shape, t.dtype).trimmed()
            assert same_bits(codec.decode(old), t)
            assert same_bits(codec.decode(old.to("cuda")).cpu(), t)
            bitslab.raise_pending_errors()
        assert codec.encode(bits.cuda()).nbytes <= n / 8 + 48


@each_class
def test_any_alignment_of_a_given_output(cls):
    t = with_zeros(torch.randn(20_003), 0.5)
    codec = cls.fit(t)
    blob = codec.encode(t.cuda())
    memory = torch.full((len(t) + 4,), 7.0, device="cuda")
    for begin in range(4):
        out = memory[begin : begin + len(t)]
        memory.fill_(7)
        assert codec.decode(blob, out) is out
        assert torch.equal(out.cpu(), t)
        assert (memory[:begin] == 7).all() and (memory[begin + len(t) :] == 7).all()
    matrix = torch.zeros((len(t), 2), device="cuda")
    codec.decode(blob, matrix[:, 0])
    assert torch.equal(matrix[:, 0].cpu(), t) and not matrix[:, 1].any()


@each_class
def test_large_tensors_come_back(cls):
    for n in (1 << 26, (1 << 26) + 13):
        t = torch.randn(n, device="cuda").relu()
        t = t if n % 2 == 0 else t.bfloat16()
        codec = cls.fit(t)
        blob = codec.encode(t)
        assert torch.equal(codec.decode(blob), t)
        bitslab.raise_pending_errors()
        small = codec.encode(t, sm_budget=3)  # of the blocks each takes many
        assert torch.equal(small.trimmed().data, blob.trimmed().data)


@each_class
def test_nothing_waits_and_graphs_are_captured(cls, run_ahead):
    for dtype, n in ((torch.float32, 300_001), (torch.bfloat16, 1 << 18)):
        t = torch.randn(n, device="cuda").relu().to(dtype)
        t[7] = float("nan")
        codec: BlobCodec = cls.fit(t)
        most = codec.max_encoded_bytes(t.shape, dtype)
        data = torch.empty(most, dtype=torch.uint8, device="cuda")
        out = torch.empty_like(t)
        sizes = torch.zeros((), dtype=torch.int64, device="cuda")

        def there_and_back(codec=codec, t=t, data=data, out=out, sizes=sizes):
            blob = codec.encode(t, data)
            sizes.copy_(blob.used_bytes)  # known on the device alone
            codec.decode(blob, out)

        there_and_back()  # warm
        expected = codec.encode(t).nbytes
        out.zero_()
        sizes.zero_()
        run_ahead(there_and_back)
        assert same_bits(out, t) and int(sizes) == expected
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            there_and_back()
        for _ in range(3):
            t.copy_(torch.randn_like(t).relu())
            graph.replay()
            torch.cuda.synchronize()
            assert same_bits(out, t) and int(sizes) == codec.encode(t).nbytes
        bitslab.raise_pending_errors()


@each_class
def test_many_encodings_in_flight_do_not_disturb_each_other(cls):
    tensors = [with_zeros(torch.randn(200_000 + i), i / 8).cuda() for i in range(8)]
    codec = cls.fit(tensors[4])
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    results: list[Any] = []
    for i, t in enumerate(tensors):
        with torch.cuda.stream(streams[i % 4]):
            results.append(codec.decode(codec.encode(t, sm_budget=2), sm_budget=2))
    torch.cuda.synchronize()
    for t, found in zip(tensors, results, strict=True):
        assert torch.equal(found, t)


def decoded_or_refused(codec: BlobCodec, data: torch.Tensor, t: torch.Tensor) -> bool:
    """Decode damaged data on the GPU; return whether it was refused, at once or later."""
    memory = torch.full((t.numel() + 200,), 7.0, dtype=t.dtype, device="cuda")
    blob = Blob(data.cuda(), t.shape, t.dtype)
    error = refusal_on_gpu(lambda: codec.decode(blob, memory[100:-100]))
    # Rows of ibp have the words of packed rows.
    assert not error or any(word in str(error) for word in ("blob: ", "row ", "damaged")), error
    assert (memory[:100] == 7).all() and (memory[-100:] == 7).all()
    return error is not None


@each_class
def test_damage_is_reported_later_and_contained_in_the_tensor(cls):
    t = torch.randn(9_001, generator=torch.Generator().manual_seed(2)).relu()
    t[7] = float("inf")
    codec = cls.fit(t)
    blob = codec.encode(t).trimmed()
    generator = torch.Generator().manual_seed(1)
    places = torch.randint(len(blob.data), (60,), generator=generator).tolist()
    for place in (*range(200), *places):
        data = blob.data.clone()
        data[place] ^= 1 << (place % 8)
        refused = decoded_or_refused(codec, data, t)
        assert refused or place >= 24, f"byte {place} of the header"
    # What follows is as if nothing had been.
    assert same_bits(codec.decode(blob.to("cuda")).cpu(), t)
    bitslab.raise_pending_errors()


@each_class
def test_truncated_and_random_blobs_are_refused_or_contained(cls):
    t = torch.randn(9_001, generator=torch.Generator().manual_seed(2)).relu()
    codec = cls.fit(t)
    blob = codec.encode(t).trimmed()
    n = len(blob.data)
    for end in (*range(0, 96, 5), *range(96, n, n // 40), n - 64, n - 5, n - 1):
        assert decoded_or_refused(codec, blob.data[:end].clone(), t), end
    generator = torch.Generator().manual_seed(3)
    for _ in range(20):
        noise = torch.randint(0, 256, (n,), generator=generator).to(torch.uint8)
        assert decoded_or_refused(codec, noise, t), "the header is noise"
        noise[:32] = blob.data[:32]
        decoded_or_refused(codec, noise, t)
    assert bits_of(codec.decode(blob)).equal(bits_of(t))
