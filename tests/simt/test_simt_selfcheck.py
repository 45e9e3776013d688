"""What the CPU emulation of CUDA promises to the tests of the kernels, one promise a test."""

import numpy as np
import pytest
import torch

from tests.simt.module import (
    ModuleSpec,
    SimtCompileError,
    SimtError,
    SimtModule,
    compile_many,
    guarded,
)

SEEDS = range(6)

COLLECTIVES = r"""
extern "C" __global__ void shuffles(const int* x, int* out, int by, int width) {
  const int i = threadIdx.x, n = blockDim.x;
  out[i] = __shfl_sync(~0u, x[i], by, width);
  out[i + n] = __shfl_up_sync(~0u, x[i], by, width);
  out[i + 2 * n] = __shfl_down_sync(~0u, x[i], by, width);
  out[i + 3 * n] = __shfl_xor_sync(~0u, x[i], by, width);
}
extern "C" __global__ void outside(int* out) {
  if (threadIdx.x < 16) out[threadIdx.x] = __shfl_sync(0xffffu, int(threadIdx.x), threadIdx.x * 2);
}
extern "C" __global__ void votes(const int* x, unsigned* out) {
  const int i = threadIdx.x, n = blockDim.x;
  out[i] = __ballot_sync(~0u, x[i] & 1);
  out[i + n] = __any_sync(~0u, x[i] > 9) + 2 * __all_sync(~0u, x[i] >= 0);
  out[i + 2 * n] = __match_any_sync(~0u, x[i]);
  out[i + 3 * n] = __reduce_add_sync(~0u, x[i]);
  out[i + 4 * n] = __reduce_min_sync(~0u, x[i] - 5);
  out[i + 5 * n] = __reduce_max_sync(~0u, unsigned(x[i] - 5));
  out[i + 6 * n] = __reduce_and_sync(~0u, unsigned(x[i]));
  out[i + 7 * n] = __reduce_or_sync(~0u, unsigned(x[i]));
  out[i + 8 * n] = __reduce_xor_sync(~0u, unsigned(x[i]));
  // Two halves of a warp on paths of their own.
  if (i & 16)
    out[i + 9 * n] = __reduce_add_sync(0xffff0000u, x[i]);
  else
    out[i + 9 * n] = __reduce_add_sync(0x0000ffffu, x[i]);
}
extern "C" __global__ void barriers(const int* x, int* out) {
  const int i = threadIdx.x, n = blockDim.x;
  out[i] = __syncthreads_count(x[i] & 1);
  out[i + n] = __syncthreads_or(x[i] > 9);
  out[i + 2 * n] = __syncthreads_and(x[i] >= 0);
}
template <typename T> __device__ T neighbour(unsigned thread, T value) {
  __shared__ alignas(16) T shared[256];
  shared[thread] = value;
  __syncthreads();
  return shared[thread ^ 1];
}
extern "C" __global__ void places(uint3* out) {
  const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  const unsigned i = block * blockDim.x * blockDim.y * blockDim.z + thread;
  out[i] = {neighbour(thread, i), blockIdx.x + 10 * blockIdx.y + 100 * blockIdx.z,
            threadIdx.x + 10 * threadIdx.y + 100 * threadIdx.z};
}
"""

BROKEN = r"""
extern "C" __global__ void half_barrier(int* x) {
  if (threadIdx.x & 1)
    __syncthreads();
  else
    x[threadIdx.x] = __any_sync(~0u, 1);
}
extern "C" __global__ void two_barriers(int* x) {
  if (threadIdx.x < 32)
    __syncthreads();
  else
    __syncthreads();
}
extern "C" __global__ void not_in_mask(int* x) { x[threadIdx.x] = __any_sync(0xfffeu, 1); }
extern "C" __global__ void mixed(int* x) {
  x[threadIdx.x] = threadIdx.x < 5 ? __any_sync(~0u, 1) : __all_sync(~0u, 1);
}
extern "C" __global__ void half_warp(int* x) {
  if (threadIdx.x % 32 < 8)
    x[threadIdx.x] = __shfl_sync(~0u, 1, 0);
  else
    __syncwarp(0xffffff00u), __syncwarp(0xffffff80u);
}
extern "C" __global__ void trap(int* x) { if (threadIdx.x == 3) __trap(); }
extern "C" __global__ void assume(int* x) { __builtin_assume(threadIdx.x < 60); }
extern "C" __global__ void misaligned(int* x) {
  reinterpret_cast<uint4*>(reinterpret_cast<char*>(x) + 8)[0] = make_uint4(1, 2, 3, 4);
}
extern "C" __global__ void index(int* x) {
  __shared__ int s[8];
  s[threadIdx.x] = 1;
  x[0] = s[7];
}
extern "C" __global__ void shift(int* x) { x[0] = 1 << (threadIdx.x + 1); }
extern "C" __global__ void divide(int* x) { x[0] = 7 / (int(threadIdx.x) - 2); }
extern "C" __global__ void stack(int* x) {
  volatile int deep[1 << 15];
  for (int i = 0; i < 1 << 15; ++i) deep[i] = i;
  x[0] = deep[5];
}
"""

MEMORY = r"""
extern "C" __global__ void no_syncwarp(const int* x, int* out) {
  __shared__ int s[32];
  s[threadIdx.x] = x[threadIdx.x];
#if SYNCED
  __syncwarp();
#endif
  out[threadIdx.x] = s[max(int(threadIdx.x) - 1, 0)];
}
extern "C" __global__ void dynamic(const unsigned char* x, unsigned char* out, int n) {
  extern __shared__ __align__(128) unsigned char bytes[];
  const int i = threadIdx.x;
  if (i == 0) out[n] = reinterpret_cast<unsigned long long>(bytes) % 128 == 0 ? bytes[n - 1] : 0;
  __syncthreads();
  bytes[i] = x[i] + blockIdx.x;
  __syncthreads();
  out[i] = bytes[n - 1 - i];
}
template <int N> __device__ int left_behind() {
  __shared__ int s[N];
  const int found = s[0];
  s[0] = N;
  return found;
}
extern "C" __global__ void stale(int* out) { out[blockIdx.x] = left_behind<3>(); }
extern "C" __global__ void touch(unsigned* x, long long at, unsigned* out) {
  if (out) out[0] = x[at + threadIdx.x]; else x[at + threadIdx.x] = 1;
}
extern "C" __global__ void count(const unsigned* x, unsigned* bins, unsigned long long* wide,
                                 int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  atomicAdd(&bins[x[i] & 7], 1u);
  const unsigned long long v = (unsigned long long)x[i] << 20;
  atomicAdd(&wide[0], v);
  atomicMax(&wide[1], v);
  atomicMin(&wide[2], v);
  atomicXor(&wide[3], v);
  atomicOr(&wide[4], v);
  atomicAnd(&wide[5], ~v);
  unsigned long long seen = wide[6], last;
  do { last = seen; seen = atomicCAS(&wide[6], last, last + v); } while (seen != last);
}
"""

ASYNC = r"""
extern "C" __global__ void pipeline(const uint4* x, uint4* out, int wait, int sync) {
  __shared__ uint4 stage[2][64];
  const int i = threadIdx.x, n = blockDim.x;
  copy_async_16(&stage[0][i], x + i);
  copy_async_commit();
  copy_async_16(&stage[1][i], x + n + i);
  copy_async_commit();
  if (wait) copy_async_wait<1>();
  if (sync) __syncthreads();
  out[i] = stage[0][i ^ 1];
  out[n + i] = stage[1][i];
  copy_async_wait<0>();
  out[2 * n + i] = stage[1][i];
}
extern "C" __global__ void pending(const unsigned* x, int commit) {
  __shared__ unsigned stage[64];
  copy_async_4(&stage[threadIdx.x], x + threadIdx.x);
  if (commit) copy_async_commit();
  copy_async_wait<0>();
}
extern "C" __global__ void unaligned(const unsigned* x) {
  __shared__ alignas(16) unsigned stage[64];
  copy_async_16(stage, x + 1);
}
"""

SCALARS = r"""
extern "C" __global__ void permute(const uint4* x, uint2* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const uint4 v = __ldg(x + i);
  __stcs(out + 4 * i, make_uint2(__byte_perm(v.x, v.y, v.z), __brev(v.x)));
  __stcs(out + 4 * i + 1, {__funnelshift_l(v.x, v.y, v.w), __funnelshift_r(v.x, v.y, v.w)});
  __stcs(out + 4 * i + 2, {__funnelshift_lc(v.x, v.y, v.w), __funnelshift_rc(v.x, v.y, v.w)});
  out[4 * i + 3] = {unsigned(__clz(int(v.x >> (v.w & 31))) * 64 + __popc(v.x)),
                    unsigned(__ffs(int(v.x << (v.w & 31))))};
}
extern "C" __global__ void mixed_minimum(int a, unsigned b, float f, unsigned long long w,
                                         unsigned long long* out) {
  out[0] = min(a, b);
  out[1] = max(a, 3);
  out[2] = min(f, 2.0f) == f;
  out[3] = min(w, 5ull);
  out[4] = __popcll(w) + 100 * __clzll(w) + 10000 * __ffsll(w);
}
"""


@pytest.fixture(scope="module")
def modules() -> dict[str, SimtModule]:
    """All modules of this file, compiled two at a time."""
    specs = {
        "collectives": ModuleSpec(
            COLLECTIVES, {}, ["shuffles", "outside", "votes", "barriers", "places"]
        ),
        "broken": ModuleSpec(BROKEN, {}, [case[0] for case in BROKEN_RULES]),
        "memory": ModuleSpec(
            MEMORY, {"SYNCED": 0}, ["no_syncwarp", "dynamic", "stale", "touch", "count"]
        ),
        "synced": ModuleSpec(MEMORY, {"SYNCED": 1}, ["no_syncwarp"]),
        "async": ModuleSpec(ASYNC, {}, ["pipeline", "pending", "unaligned"]),
        "scalars": ModuleSpec(SCALARS, {}, ["permute", "mixed_minimum"]),
    }
    return dict(zip(specs, compile_many(specs.values(), workers=2), strict=True))


def numbers(n, high=10, dtype=np.int32):
    """Return n random integers below `high`."""
    return np.random.default_rng(n).integers(0, high, n).astype(dtype)


@pytest.mark.drawn(24)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("width", [32, 8, 1])
@pytest.mark.parametrize("by", [0, 3, 31, 33])
def test_shuffles_follow_the_ptx_lane_arithmetic(modules, by, width, seed):
    """Only five bits of the operand count; a lane that would leave its segment keeps its value."""
    x = numbers(96, 1000)
    out = np.zeros((4, 96), np.int32)
    arguments = [x, out, np.int32(by), np.int32(width)]
    modules["collectives"].launch("shuffles", 1, 96, arguments, seed=seed)
    lane, d = np.arange(96), by % 32
    first, last = lane // width * width, lane // width * width + width - 1
    xor = lane // 32 * 32 + (lane % 32 ^ d)
    sources = [
        first + d % width,
        np.where(lane - d >= first, lane - d, lane),
        np.where(lane + d <= last, lane + d, lane),
        np.where(xor <= last, xor, lane),
    ]
    np.testing.assert_array_equal(out, x[np.stack(sources)])


def test_a_shuffle_from_outside_the_mask_gives_poison(modules):
    """Such a value is undefined on a GPU, so it must not happen to be right here."""
    out = np.zeros(16, np.uint32)
    modules["collectives"].launch("outside", 1, 32, [out])
    assert out.tolist() == [2 * i if i < 8 else 0xDEADBEEF for i in range(16)]


def test_a_traced_launch_tells_every_wanted_load_and_its_step():
    """Lanes that load nothing count the step, so that a step remains one instruction of a warp."""
    text = r"""
    extern "C" __global__ void every_other(const unsigned* x, unsigned* out) {
      const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
      unsigned sum = load_unit(x + i, i % 2 == 0);
      sum += load_unit(x + 2 * i, i % 4 == 1);
      out[i] = sum;
    }
    """
    module = SimtModule(text, {}, ["every_other"])
    x, out = np.arange(20, dtype=np.uint32) + 7, np.zeros(10, np.uint32)
    for seed in range(3):
        loads = module.launch("every_other", 2, 5, [x, out], seed=seed, traced=True)
        assert loads is not None
        places = (loads["address"] - x.ctypes.data) // 4
        found = {
            (int(load["block"]), int(load["thread"]), int(load["step"]), int(place))
            for load, place in zip(loads, places, strict=True)
        }
        first = {(i // 5, i % 5, 0, i) for i in range(0, 10, 2)}
        second = {(i // 5, i % 5, 1, 2 * i) for i in (1, 5, 9)}
        assert found == first | second
        assert set(loads["bytes"].tolist()) == {4}
        assert len(loads) == 8
        assert out.tolist() == [7, 9, 9, 0, 11, 17, 13, 0, 15, 25]
    assert module.launch("every_other", 2, 5, [x, out]) is None


@pytest.mark.parametrize("seed", SEEDS)
def test_votes_matches_and_reductions_equal_numpy(modules, seed):
    """In any lane order, and for signed and unsigned reductions alike."""
    x = numbers(64)
    out = np.zeros((10, 64), np.uint32)
    modules["collectives"].launch("votes", 1, 64, [x, out], seed=seed)
    bit = 1 << np.arange(32, dtype=np.uint64)
    for warp, w in zip(np.split(out, 2, axis=1), np.split(x, 2), strict=True):
        assert (warp[0] == (bit * (w & 1)).sum()).all()
        assert (warp[1] == (w > 9).any() + 2 * (w >= 0).all()).all()
        assert warp[2].tolist() == [(bit * (w == v)).sum() for v in w]
        assert (warp[3] == w.sum()).all()
        assert (warp[4].astype(np.int32) == (w - 5).min()).all()
        assert (warp[5] == (w - 5).astype(np.uint32).max()).all()
        assert (warp[6] == np.bitwise_and.reduce(w)).all()
        assert (warp[7] == np.bitwise_or.reduce(w)).all()
        assert (warp[8] == np.bitwise_xor.reduce(w)).all()
        assert warp[9].tolist() == [w[:16].sum()] * 16 + [w[16:].sum()] * 16


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("threads", [1, 33, 256, 1024])
def test_barriers_count_the_whole_block(modules, threads, seed):
    """Whatever the number of threads in the last warp."""
    x = numbers(threads)
    out = np.zeros((3, threads), np.int32)
    modules["collectives"].launch("barriers", 1, threads, [x, out], seed=seed)
    assert (out == [[(x & 1).sum()], [(x > 9).any()], [(x >= 0).all()]]).all()


def test_indices_have_three_dimensions(modules):
    """Threads and blocks are numbered x first, and a template has its own shared memory."""
    out = np.zeros((24, 24, 3), np.uint32)
    modules["collectives"].launch("places", (2, 3, 4), (4, 3, 2), [out])
    place = [x + 10 * y + 100 * z for z in range(4) for y in range(3) for x in range(2)]
    thread = [x + 10 * y + 100 * z for z in range(2) for y in range(3) for x in range(4)]
    assert (out[..., 0] == np.arange(576).reshape(24, 24) ^ 1).all()
    assert (out[..., 1] == np.array(place)[:, None]).all()
    assert (out[..., 2] == np.array(thread)).all()


DIVIDE_LINE = BROKEN[: BROKEN.index("7 / (")].count("\n") + 1
BROKEN_RULES = [
    (
        "half_barrier",
        "divergent barrier.*warp 0 lanes aaaaaaaa: wait in __syncthreads at kernel.cu",
    ),
    ("two_barriers", "divergent barrier: .* line \\d+, thread .* line \\d+"),
    ("not_in_mask", "__any_sync at kernel.cu:\\d+ with mask 0000fffe, which does not name .* lane"),
    ("mixed", "mixed collectives"),
    ("half_warp", "deadlock.*lanes 000000ff: wait in __shfl_sync with mask ffffffff at kernel.cu"),
    ("trap", r"thread \(3,0,0\): __trap"),
    ("assume", "false assumption"),
    ("misaligned", "misaligned access to address .* at kernel.cu:\\d+"),
    ("index", "index .* is outside its array at kernel.cu:\\d+"),
    ("shift", "shift by .* at kernel.cu:\\d+"),
    ("divide", rf"thread \(2,0,0\): division by zero at kernel.cu:{DIVIDE_LINE}"),
    ("stack", "stack overflow"),
]


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("kernel", "message"), BROKEN_RULES, ids=[c[0] for c in BROKEN_RULES])
def test_a_broken_rule_is_an_error_that_says_where(modules, kernel, message, seed):
    """And the module works as before after it."""
    x = guarded(np.zeros(64, np.int32))
    with pytest.raises(SimtError, match=f"(?s)^kernel {kernel}, block .0,0,0., .*{message}"):
        modules["broken"].launch(kernel, 1, 64, [x], seed=seed)
    assert modules["broken"].launch("shift", 1, 8, [x]) is None


def test_a_missing_syncwarp_shows_in_some_lane_order(modules):
    """Ring order may hide it, as here; the kernel that has it is right in every order."""
    x = numbers(32)
    wrong: dict[str, list[int]] = {"memory": [], "synced": []}
    for name, seeds in wrong.items():
        for seed in SEEDS:
            out = np.zeros_like(x)
            modules[name].launch("no_syncwarp", 1, 32, [x, out], seed=seed)
            if not np.array_equal(out, x[[0, *range(31)]]):
                seeds.append(seed)
    assert wrong["memory"] == [1, 2, 3, 4, 5]
    assert wrong["synced"] == []


def test_dynamic_shared_memory_is_poisoned_aligned_and_bounded(modules):
    """Every block starts with poison; a launch without it, or one that leaves it, is an error."""
    launch, x, out = modules["memory"].launch, numbers(256, 200, np.uint8), np.zeros(257, np.uint8)
    launch("dynamic", 3, 256, [x, out, np.int32(256)], shared_bytes=256)
    np.testing.assert_array_equal(out, [*(x[::-1] + 2), 0xCD])
    with pytest.raises(SimtError, match="shared_bytes=0"):
        launch("dynamic", 1, 256, [x, out, np.int32(256)])
    with pytest.raises(SimtError, match=r"thread \(255,0,0\): .* memory that is not the kernel's"):
        launch("dynamic", 1, 256, [x, out, np.int32(128)], shared_bytes=128)
    with pytest.raises(SimtError, match="227 KiB"):
        launch("dynamic", 1, 256, [x, out, np.int32(128)], shared_bytes=(227 << 10) + 1)


def test_static_shared_memory_is_poisoned_before_each_block(modules):
    """Also that of a template; a block finds nothing of the block before it."""
    out = np.zeros(3, np.uint32)
    modules["memory"].launch("stale", 3, 1, [out])
    assert out.tolist() == [0xCDCDCDCD] * 3


@pytest.mark.parametrize("reads", [True, False], ids=["read", "write"])
@pytest.mark.parametrize(("side", "at", "thread"), [("end", 1000, 24), ("start", -3, 0)])
def test_an_access_outside_a_guarded_buffer_is_reported(modules, side, at, thread, reads):
    """With kernel, block, thread and address, in a process that lives on."""
    x = guarded(numbers(1024, dtype=np.uint32), side=side)
    out = np.zeros(1, np.uint32) if reads else None
    address = x.ctypes.data + 4 * (at + thread)
    where = rf"kernel touch, block \(0,0,0\), thread \({thread},0,0\): "
    with pytest.raises(SimtError, match=f"{where}(read of|write to|access to) .* {address:#x}"):
        modules["memory"].launch("touch", 2, 64, [x, np.int64(at), out])
    modules["memory"].launch("touch", 1, 64, [x, np.int64(960 if side == "end" else 0), out])


@pytest.mark.parametrize("side", ["end", "start"])
@pytest.mark.parametrize("shape", [(0,), (), (1,), (3, 5), (16,), (4096,), (33, 1000)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.float64, torch.bool])
def test_guarded_copies_values_shape_and_kind(dtype, shape, side):
    """A size that is a multiple of 16 bytes is aligned to 16."""
    x = (torch.arange(np.prod(shape, dtype=int)) % 7).to(dtype).reshape(shape)
    copy = guarded(x, side=side)
    assert copy.dtype == dtype
    assert copy.numel() == 0 or copy.data_ptr() != x.data_ptr()
    assert torch.equal(copy, x)
    if dtype is not torch.bfloat16:
        array = guarded(x.numpy(), side=side)
        assert array.dtype == x.numpy().dtype
        np.testing.assert_array_equal(array, x.numpy())
    if x.nbytes % 16 == 0 or side == "start":
        assert copy.data_ptr() % 16 == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_atomics_of_32_and_64_bits_lose_nothing(modules, seed):
    """Also in a compare-and-swap loop that other lanes interrupt."""
    x = numbers(300, 2**31, np.uint32)
    bins = torch.zeros(8, dtype=torch.int32)
    wide = np.zeros(7, np.uint64)
    wide[2] = wide[5] = 2**64 - 1
    modules["memory"].launch("count", 3, 128, [x, bins, wide, np.int32(300)], seed=seed)
    v = x.astype(np.uint64) << 20
    assert bins.tolist() == np.bincount(x & 7, minlength=8).tolist()
    either, each = np.bitwise_or.reduce(v), np.bitwise_xor.reduce(v)
    assert wide.tolist() == [v.sum(), v.max(), v.min(), each, either, ~either, v.sum()]


@pytest.mark.parametrize("seed", SEEDS)
def test_an_asynchronous_copy_arrives_at_its_wait_and_no_sooner(modules, seed):
    """Without the wait the data is wrong; with it, only the groups waited for are there."""
    x = numbers(512, 2**31, np.uint32).reshape(2, 64, 4)
    swapped = x[0, np.arange(64) ^ 1]
    for wait, sync in [(1, 1), (0, 1), (1, 0)]:
        out = np.zeros((3, 64, 4), np.uint32)
        arguments = [guarded(x), out, np.int32(wait), np.int32(sync)]
        modules["async"].launch("pipeline", 1, 64, arguments, seed=seed)
        assert np.array_equal(out[0], swapped) == bool(wait and sync)
        assert (out[1] == 0xCDCDCDCD).all()
        np.testing.assert_array_equal(out[2], x[1])


def test_a_wrong_asynchronous_copy_is_an_error(modules):
    """One that is never committed, one from a misaligned or forbidden address."""
    launch, x = modules["async"].launch, guarded(numbers(64, dtype=np.uint32))
    with pytest.raises(SimtError, match="exits with 1 asynchronous copies pending"):
        launch("pending", 1, 64, [x, np.int32(0)])
    with pytest.raises(SimtError, match="misaligned copy_async_16"):
        launch("unaligned", 1, 64, [x])
    with pytest.raises(SimtError, match=r"thread \(63,0,0\): .* memory that is not the kernel's"):
        launch("pending", 1, 64, [x[1:], np.int32(1)])


def test_byte_permutes_and_funnel_shifts_equal_their_definitions(modules):
    """In plain Python integers, over random words, selectors and shifts."""
    n = 2000
    x = np.random.default_rng(0).integers(0, 2**32, (n, 4)).astype(np.uint32)
    x[:, 3] &= 63
    out = np.zeros((n, 8), np.uint32)
    modules["scalars"].launch("permute", 16, 128, [guarded(x), guarded(out), np.int32(n)])
    modules["scalars"].launch("permute", 16, 128, [x, out, np.int32(n)])
    for (a, b, selector, by), row in zip(x.tolist(), out.tolist(), strict=True):
        word, low32 = b << 32 | a, 2**32 - 1
        chosen = [word >> 8 * (selector >> 4 * i & 7) & 255 for i in range(4)]
        signs = [selector >> 4 * i & 8 for i in range(4)]
        picked = [255 * (c >> 7) if s else c for c, s in zip(chosen, signs, strict=True)]
        assert row[0] == int.from_bytes(bytes(picked), "little")
        assert row[1] == int(f"{a:032b}"[::-1], 2)
        assert row[2:4] == [(word << by % 32) >> 32 & low32, word >> by % 32 & low32]
        assert row[4:6] == [(word << min(by, 32)) >> 32 & low32, word >> min(by, 32) & low32]
        assert row[6] == (32 - (a >> by % 32).bit_length()) * 64 + a.bit_count()
        shifted = a << by % 32 & low32
        assert row[7] == (shifted & -shifted).bit_length()


def test_minimum_of_mixed_signs_is_unsigned_as_in_cuda(modules):
    """And the 64-bit scalars count in 64 bits."""
    out = torch.zeros(5, dtype=torch.int64)
    values = [np.int32(-1), np.uint32(7), np.float32(1.5), np.uint64(3 << 40), out]
    modules["scalars"].launch("mixed_minimum", 1, 1, values)
    assert out.tolist() == [7, 3, 1, 5, 2 + 100 * 22 + 10000 * 41]


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (3, TypeError, "argument 1 of touch is a int, whose size is ambiguous"),
        (3.0, TypeError, "ambiguous"),
        (np.int32(3), TypeError, "8-byte integer, not a int32"),
        (np.float64(3), TypeError, "8-byte integer, not a float64"),
        (None, TypeError, "not a pointer"),
        (torch.zeros(1), TypeError, "not a pointer"),
    ],
)
def test_an_argument_that_does_not_fit_is_refused(modules, bad, error, message):
    """Before anything runs."""
    with pytest.raises(error, match=message):
        modules["memory"].launch("touch", 1, 1, [np.zeros(1), bad, None])


def test_other_launch_errors_are_python_errors(modules):
    """Names, numbers and sizes."""
    launch, x = modules["memory"].launch, np.zeros(64, np.uint32)
    with pytest.raises(ValueError, match="no kernel 'nothing'"):
        launch("nothing", 1, 1, [])
    with pytest.raises(TypeError, match="takes 3 arguments, 1 given"):
        launch("touch", 1, 1, [x])
    with pytest.raises(TypeError, match="is a pointer, not a int64"):
        launch("touch", 1, 1, [np.int64(5), np.int64(0), None])
    with pytest.raises(ValueError, match="grid must be"):
        launch("touch", (1, 0), 1, [x, np.int64(0), None])
    with pytest.raises(SimtError, match="1 to 1024 threads"):
        launch("touch", 1, 1025, [x, np.int64(0), None])
    with pytest.raises(ValueError, match="is on meta"):
        launch("touch", 1, 1, [torch.zeros(1, device="meta"), np.int64(0), None])


def test_a_compile_error_carries_the_compilers_message(tmp_path, monkeypatch):
    """With the line of the kernel text; a text that compiles is compiled once."""
    monkeypatch.setenv("BITSLAB_SIMT_CACHE", str(tmp_path))
    with pytest.raises(SimtCompileError, match="kernel.cu:2:.*nonsense"):
        SimtModule('\nextern "C" __global__ void k() { nonsense(); }', {}, ["k"])
    with pytest.raises(ValueError, match="cannot rewrite"):
        SimtModule("extern __shared__ int a[4];", {}, [])
    # The emulator's header may be there too: what compiles first in a process makes it.
    assert not list(tmp_path.glob("*.so")) and not list(tmp_path.glob("compile-*"))
    text = 'extern "C" __global__ void k(int* x) { *x = VALUE; }'
    for value in (1, 2, 1):
        x = np.zeros(1, np.int32)
        SimtModule(text, {"VALUE": value}, ["k"]).launch("k", 1, 1, [x])
        assert x == value
    assert len(list(tmp_path.glob("*.so"))) == 2
