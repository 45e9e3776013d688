// How many elements of a tensor are zero: all bits 0. The element is of CHUNK_BYTES.
#include "bits.cuh"

#define AHEAD 4  // pieces of 16 bytes that a thread has under way
#define PIECE_ELEMENTS (16 / CHUNK_BYTES)

// Elements of a word that are zero; of eight bytes half an element, so that the caller looks at two.
__device__ __forceinline__ int zeros_of(u32 x) {
#if CHUNK_BYTES == 1
  return __popc(~(((x & 0x7f7f7f7fu) + 0x7f7f7f7fu) | x | 0x7f7f7f7fu));
#elif CHUNK_BYTES == 2
  return __popc(~(((x & 0x7fff7fffu) + 0x7fff7fffu) | x | 0x7fff7fffu));
#else
  return x == 0;
#endif
}
__device__ __forceinline__ int zeros_of(uint4 x) {
#if CHUNK_BYTES == 8
  return zeros_of(x.x | x.y) + zeros_of(x.z | x.w);
#else
  return zeros_of(x.x) + zeros_of(x.y) + zeros_of(x.z) + zeros_of(x.w);
#endif
}

extern "C" __global__ void __launch_bounds__(256) count_zeros(const stored_t* __restrict__ x, i64 n,
                                                              u64* __restrict__ count) {
  __shared__ u32 of_warps[8];
  // Elements before the first piece, which begins at a multiple of 16 bytes, and behind the last one.
  const i64 before = min((i64)((0 - (u64)x) & 15) / CHUNK_BYTES, n);
  const i64 pieces = (n - before) / PIECE_ELEMENTS;
  const uint4* aligned = (const uint4*)(x + before);
  const i64 thread = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  const i64 threads = (i64)gridDim.x * blockDim.x;
  u32 zeros = 0;
  i64 i = thread;
  for (; i + (AHEAD - 1) * threads < pieces; i += AHEAD * threads) {
    uint4 ahead[AHEAD];
#pragma unroll
    for (int k = 0; k < AHEAD; ++k) ahead[k] = __ldg(aligned + i + k * threads);
#pragma unroll
    for (int k = 0; k < AHEAD; ++k) zeros += zeros_of(ahead[k]);
  }
  for (; i < pieces; i += threads) zeros += zeros_of(__ldg(aligned + i));
  if (thread < before) zeros += x[thread] == 0;
  const i64 last = before + pieces * PIECE_ELEMENTS + thread;
  if (last < n) zeros += x[last] == 0;
  zeros = __reduce_add_sync(FULL, zeros);
  if ((threadIdx.x & 31) == 0) of_warps[threadIdx.x >> 5] = zeros;
  __syncthreads();
  if (threadIdx.x == 0) {
    u64 sum = 0;
    for (int w = 0; w < 8; ++w) sum += of_warps[w];
    if (sum) atomicAdd(count, sum);
  }
}
