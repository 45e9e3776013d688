"""LZ4 on a real GPU by nvCOMP: blocks that the CPU reads, and the other way round."""

from __future__ import annotations

import pytest
import torch

import bitslab
from bitslab.engine.codecs import Blob, Lz4Codec
from bitslab.engine.codecs.lz4 import CHUNK_BYTES
from bitslab.engine.kernels.cuda.nvcomp import is_installed
from tests.engine.codecs.test_blob_contract import tensor_of
from tests.helpers import dtype_id, same_bits

pytestmark = pytest.mark.gpu

SHAPES = [(), (0,), (1,), (5, 7), (CHUNK_BYTES,), (3, 70_001), (1 << 20,)]


@pytest.fixture
def codec() -> Lz4Codec:
    pytest.importorskip("nvidia.libnvcomp")
    return Lz4Codec()


def compressible(n: int) -> torch.Tensor:
    """Integers in runs, and in the middle noise that does not shrink."""
    t = torch.arange(n, dtype=torch.int32) // 37
    noise = torch.randint(
        -(1 << 31), 1 << 31, (n // 3,), generator=torch.Generator().manual_seed(n)
    )
    t[n // 3 : n // 3 + len(noise)] = noise.to(torch.int32)
    return t


def test_without_nvcomp_the_error_names_the_extra():
    t = torch.zeros(100, device="cuda")
    if is_installed():
        assert "cuda" in Lz4Codec().device_types
        assert int(Lz4Codec().encode(t).used_bytes) < 100
    else:
        assert Lz4Codec().device_types == ("cpu",)
        with pytest.raises(bitslab.MissingExtraError, match=r"bitslab\[lz4-cuda1\d\]"):
            Lz4Codec().encode(t)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=dtype_id)
def test_each_reads_what_the_other_wrote(codec, dtype):
    tensors = [tensor_of(dtype, shape) for shape in SHAPES]
    tensors += [compressible(n).view(dtype) for n in (1000, 300_001)]
    for t in tensors:
        of_cpu, of_gpu = codec.encode(t), codec.encode(t.cuda())
        assert of_gpu.nbytes <= codec.max_encoded_bytes(t.shape, dtype)
        assert same_bits(codec.decode(of_gpu.to("cpu")), t)
        assert same_bits(codec.decode(of_gpu.trimmed()).cpu(), t)
        assert same_bits(codec.decode(of_cpu.trimmed().to("cuda")).cpu(), t)
        bitslab.raise_pending_errors()
    assert codec.encode(compressible(1 << 20).cuda()).nbytes < 3 << 20


def test_any_alignment_and_strides(codec):
    t = compressible(200_003)
    blob = codec.encode(t.cuda()[1:])
    assert torch.equal(codec.decode(blob.to("cpu")), t[1:])
    memory = torch.full((len(t) + 4,), 7, dtype=torch.int32, device="cuda")
    for begin in range(4):
        memory.fill_(7)
        codec.decode(blob, memory[begin : begin + len(t) - 1])
        assert torch.equal(memory[begin : begin + len(t) - 1].cpu(), t[1:])
        assert (memory[:begin] == 7).all() and (memory[begin + len(t) - 1 :] == 7).all()
    matrix = compressible(90_000).view(300, 300).cuda()
    assert torch.equal(codec.decode(codec.encode(matrix.t())), matrix.t())


def test_nothing_waits(codec, run_ahead):
    t = compressible(1 << 20).cuda()
    data = torch.empty(codec.max_encoded_bytes(t.shape, t.dtype), dtype=torch.uint8, device="cuda")
    out = torch.empty_like(t)

    def there_and_back():
        codec.decode(codec.encode(t, data, sm_budget=4), out, sm_budget=4)

    there_and_back()  # warm
    out.zero_()
    run_ahead(there_and_back)
    assert torch.equal(out, t)


def test_graphs_are_captured(codec):
    t = compressible(1 << 20).cuda()
    out = torch.empty_like(t)
    codec.decode(codec.encode(t), out)  # warm
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        codec.decode(codec.encode(t), out)
    t.copy_(torch.arange(len(t), device="cuda") // 5)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, t)


def test_damage_is_reported_later_and_contained_in_the_tensor(codec):
    t = compressible(60_001)
    blob = codec.encode(t.cuda()).trimmed().to("cpu")
    n = len(blob.data)
    generator = torch.Generator().manual_seed(1)
    places = [*range(24), *torch.randint(24, n, (80,), generator=generator).tolist()]
    cut = [blob.data[:end].clone() for end in (0, 31, 40, 48, 64, n // 2, n - 1)]
    damaged = []
    for place in places:
        data = blob.data.clone()
        data[place] ^= 1 << (place % 8)
        damaged.append(data)
    for i, data in enumerate(cut + damaged):
        memory = torch.full((len(t) + 200,), 7, dtype=torch.int32, device="cuda")
        refused = False
        try:
            codec.decode(Blob(data.cuda(), t.shape, t.dtype), memory[100:-100])
            bitslab.raise_pending_errors()
        except bitslab.CorruptedDataError as error:
            refused = True
            assert str(error).startswith("blob: ")
        assert (memory[:100] == 7).all() and (memory[-100:] == 7).all()
        assert refused or i >= len(cut) + 24
    assert torch.equal(codec.decode(blob.to("cuda")).cpu(), t)
    bitslab.raise_pending_errors()
