"""Products with packed weights on a real GPU, against float64."""

from __future__ import annotations

import pytest
import torch

from bitslab.engine.codecs.invariant.codec import InvariantCodec
from bitslab.engine.kernels.cuda import raise_pending_errors
from bitslab.engine.kernels.format import RowStorage
from bitslab.errors import CorruptedDataError
from tests.simt.test_packed_linear import NONE, check, inputs, weight_of

pytestmark = pytest.mark.gpu  # tests/conftest.py skips these where there is no GPU

CUDA = torch.device("cuda")


def on_gpu(weight, sample=None):
    codec = InvariantCodec.fit(weight if sample is None else sample)
    packed = codec.encode(weight.cuda())
    parts = packed.parts
    storage = RowStorage(parts["words"], parts["bases"], parts["lengths"], NONE.cuda())
    multiply = codec.kernels(CUDA).prepare_linear(storage, weight.dtype, packed.facts)
    assert multiply is not None
    return multiply, storage


@pytest.mark.parametrize("x_rows", [1, 4, 8, 9, 16])
@pytest.mark.parametrize(
    ("n_rows", "depth"), [(4096, 4096), (1024, 14336), (4100, 1056), (33, 32)], ids=str
)
def test_products_are_those_of_the_weight(n_rows, depth, x_rows):
    weight, x = weight_of(n_rows, depth, seed=depth, raw=0.01), inputs(x_rows, depth)
    bias = inputs(1, n_rows, seed=2)[0]
    multiply, _ = on_gpu(weight, weight_of(64, depth, 1))
    runs = []
    for _ in range(3):  # what a race writes changes from run to run
        out = torch.full((x_rows, n_rows), float("nan"), dtype=torch.bfloat16, device=CUDA)
        multiply(x.cuda(), bias.cuda(), out)
        runs.append(out.cpu())
    check(runs[0], x, weight, bias)
    assert all(torch.equal(out, runs[0]) for out in runs)
    raise_pending_errors()


def test_subnormal_weights_are_multiplied_as_they_are():
    weight = weight_of(64, 512, exceptions=0.0)
    weight[:, 7] = torch.tensor(1e-39).bfloat16()
    x = torch.zeros(2, 512, dtype=torch.bfloat16)
    x[:, 7] = torch.tensor([1.0, 4.0])
    multiply, _ = on_gpu(weight, weight_of(64, 512, 1, 0.0))
    out = torch.empty(2, 64, dtype=torch.bfloat16, device=CUDA)
    multiply(x.cuda(), None, out)
    assert torch.equal(out.cpu(), x[:, 7:8] * weight[:, 7])


def test_products_can_be_captured_and_follow_the_current_stream():
    weight, x = weight_of(512, 1024), inputs(1, 1024).cuda()
    multiply, _ = on_gpu(weight)
    out = torch.zeros(1, 512, dtype=torch.bfloat16, device=CUDA)
    multiply(x, None, out)
    torch.cuda.synchronize()
    expected = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        multiply(x, None, out)
    out.zero_()
    graph.replay()
    assert torch.equal(out, expected)
    x.mul_(2)
    graph.replay()
    assert torch.equal(out, 2 * expected)


def test_damaged_rows_are_reported():
    weight = weight_of(40, 512)
    multiply, storage = on_gpu(weight)
    storage.lengths[33] = 11 * 16 - 1
    multiply(inputs(1, 512).cuda(), None, torch.empty(1, 40, dtype=torch.bfloat16, device=CUDA))
    with pytest.raises(CorruptedDataError):
        raise_pending_errors()
