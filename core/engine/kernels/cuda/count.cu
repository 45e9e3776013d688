// Set bits per position: counts[chunk][bit] over all rows.
#include "bits.cuh"

extern "C" __global__ void __launch_bounds__(256) count_bits(
    const stored_t* __restrict__ rows, i64 n_rows, int chunks, u64* __restrict__ counts) {
  const int chunk = blockIdx.x * blockDim.x + threadIdx.x;
  if (chunk >= chunks) return;
  u32 set[CHUNK_BITS];
#pragma unroll
  for (int b = 0; b < CHUNK_BITS; ++b) set[b] = 0;
  const i64 stride = (i64)gridDim.y * blockDim.y;
  for (i64 r = (i64)blockIdx.y * blockDim.y + threadIdx.y; r < n_rows; r += stride) {
    const chunk_t x = rows[r * chunks + chunk];
#pragma unroll
    for (int b = 0; b < CHUNK_BITS; ++b) set[b] += (u32)(x >> b) & 1;
  }
#pragma unroll
  for (int b = 0; b < CHUNK_BITS; ++b)
    if (set[b]) atomicAdd(counts + (i64)chunk * CHUNK_BITS + b, (u64)set[b]);
}
