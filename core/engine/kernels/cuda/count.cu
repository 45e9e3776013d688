// Set bits per position: counts[chunk][bit] over all rows.
#include "bits.cuh"

#define COLUMNS 32  // chunks of a block

extern "C" __global__ void __launch_bounds__(256) count_bits(
    const stored_t* __restrict__ rows, i64 n_rows, int chunks, u64* __restrict__ counts) {
  // Of the block, so that it adds to each count in global memory once. The odd length of a line keeps the banks
  // apart, both where lanes have neighbouring chunks and where they have neighbouring bits.
  __shared__ u32 sums[CHUNK_BITS][COLUMNS + 1];
  const int thread = threadIdx.y * COLUMNS + threadIdx.x, threads = blockDim.y * COLUMNS;
  const int first = blockIdx.x * COLUMNS, chunk = first + threadIdx.x;
  for (int i = thread; i < CHUNK_BITS * COLUMNS; i += threads) sums[i / COLUMNS][i % COLUMNS] = 0;
  __syncthreads();
  if (chunk < chunks) {
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
    for (int b = 0; b < CHUNK_BITS; ++b) atomicAdd(&sums[b][threadIdx.x], set[b]);
  }
  __syncthreads();
  const int here = min(COLUMNS, chunks - first) * CHUNK_BITS;
  for (int i = thread; i < here; i += threads) {
    const u32 sum = sums[i % CHUNK_BITS][i / CHUNK_BITS];
    if (sum) atomicAdd(counts + (i64)first * CHUNK_BITS + i, (u64)sum);
  }
}
