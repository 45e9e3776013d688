// Indices out of range, found before any row is decoded.
#include "bits.cuh"

// first_bad[0] starts as all ones and becomes the first position of an id out of range.
extern "C" __global__ void check_ids(const i64* __restrict__ ids, i64 n, i64 n_rows, u64* first_bad) {
  const i64 stride = (i64)gridDim.x * blockDim.x;
  for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += stride)
    if (ids[i] < -n_rows || ids[i] >= n_rows) atomicMin(first_bad, (u64)i);
}
