"""What the CPU emulation promises of matrix.cuh and units.cuh."""

import numpy as np
import pytest

from tests.simt.module import SimtError, SimtModule

SEEDS = range(6)


MATRIX = r"""
extern "C" __global__ void multiply(const unsigned* a, const unsigned* b, float* c,
                                    const unsigned* x, unsigned* y) {
  const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
  const unsigned left[4] = {a[g * 8 + t], a[(g + 8) * 8 + t], a[g * 8 + 4 + t],
                            a[(g + 8) * 8 + 4 + t]};
  const unsigned right[2] = {b[g * 8 + t], b[g * 8 + 4 + t]};  // of a column, rows 2 t and 2 t + 8
  float sum[4];
  for (int i = 0; i < 4; ++i) sum[i] = c[(g + 8 * (i / 2)) * 8 + 2 * t + i % 2];
  multiply_halves(sum, left, right);
  for (int i = 0; i < 4; ++i) c[(g + 8 * (i / 2)) * 8 + 2 * t + i % 2] = sum[i];
  y[lane] = transposed_halves(x[lane]);
}
extern "C" __global__ void some_lanes(unsigned* y) {
  if (threadIdx.x < 8) return;
  y[threadIdx.x] = transposed_halves(1);
}
extern "C" __global__ void conversions(const float* x, unsigned short* to, float* back,
                                       unsigned* less) {
  const int i = threadIdx.x;
  to[i] = float_to_half(x[i]);
  back[i] = half_to_float(to[i]);
  less[i] = subtract_halves(to[i] | 0x40000000u, 0x3c00u | to[i] << 16);
}
"""


@pytest.fixture(scope="module")
def matrix():
    return SimtModule(MATRIX, {}, ["multiply", "some_lanes", "conversions"])


@pytest.mark.parametrize("seed", SEEDS)
def test_a_product_of_halves_is_that_of_matrices(matrix, seed):
    generator = np.random.default_rng(seed)
    a, b = (generator.normal(size=shape).astype(np.float16) for shape in ((16, 16), (16, 8)))
    c = generator.normal(size=(16, 8)).astype(np.float32)
    x = generator.normal(size=(8, 8)).astype(np.float16)
    expected = c + a.astype(np.float64) @ b.astype(np.float64)
    columns, y = np.ascontiguousarray(b.T).view(np.uint32), np.zeros(32, np.uint32)
    words = a.view(np.uint32), columns, c, x.view(np.uint32), y
    matrix.launch("multiply", 1, 32, words, seed=seed)
    np.testing.assert_allclose(c, expected, rtol=1e-5, atol=1e-5)
    assert np.array_equal(y.view(np.float16).reshape(8, 8), x.T)


def test_a_product_takes_all_lanes_of_a_warp(matrix):
    with pytest.raises(SimtError, match="movmatrix with lanes ffffff00 only"):
        matrix.launch("some_lanes", 1, 32, [np.zeros(32, np.uint32)])


def test_halves_round_as_numpy_does(matrix):
    generator = np.random.default_rng(0)
    x = (generator.normal(size=256) * 10.0 ** generator.integers(-9, 6, 256)).astype(np.float32)
    x[:4] = 65519, 65520, np.inf, 2.0**-25
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16)
        less = np.stack([expected - np.float16(1), np.float16(2) - expected], axis=1)
    to, back = np.zeros(256, np.uint16), np.zeros(256, np.float32)
    found = np.zeros(256, np.uint32)
    matrix.launch("conversions", 1, 256, [x, to, back, found])
    assert np.array_equal(to.view(np.float16), expected)
    assert np.array_equal(back, expected.astype(np.float32))
    assert np.array_equal(found.view(np.float16).reshape(256, 2), less)


UNITS = r"""
extern "C" __global__ void take(unsigned* bits, unsigned* state, unsigned* asking) {
  extern __shared__ unsigned short units[];
  const int lane = threadIdx.x;
  for (int i = lane; i < 64; i += 32) units[i] = 0x1000 + i;
  __syncwarp();
  asking[lane] = take_units(bits[lane], state[lane], place_of(units + 5), (1u << lane) - 1);
  __syncwarp();
  asking[32 + lane] = load_place(place_of(units) + 4 * lane);
#if OUTSIDE
  load_place(place_of(units) + 128);
#endif
}
"""


@pytest.mark.parametrize("seed", SEEDS)
def test_lanes_take_units_in_their_order(seed):
    generator = np.random.default_rng(seed)
    bits, state = (generator.integers(1 << 32, size=32, dtype=np.uint32) for _ in range(2))
    need = state >> 5 & 1
    expected = np.where(need, bits << 16 | 0x1005 + np.cumsum(need) - need, bits)
    states, asking = state + 16 * need, np.zeros(64, np.uint32)
    module = SimtModule(UNITS, {"OUTSIDE": 0}, ["take"])
    module.launch("take", 1, 32, [bits, state, asking], shared_bytes=128, seed=seed)
    assert np.array_equal(bits, expected.astype(np.uint32)) and np.array_equal(state, states)
    assert (asking[:32] == (need << np.arange(32, dtype=np.uint32)).sum()).all()
    assert np.array_equal(asking[32:].view(np.uint16), 0x1000 + np.arange(64, dtype=np.uint16))


def test_a_place_outside_of_shared_memory_is_an_error():
    module = SimtModule(UNITS, {"OUTSIDE": 1}, ["take"])
    buffers = [np.zeros(32, np.uint32), np.zeros(32, np.uint32), np.zeros(64, np.uint32)]
    with pytest.raises(SimtError, match="read of shared memory at 128"):
        module.launch("take", 1, 32, buffers, shared_bytes=128)
