// Ids as kernels get them: int32 or int64, id_bytes says which. Needs bits.cuh.

__device__ __forceinline__ i64 load_id(const void* ids, i64 position, int id_bytes) {
  return id_bytes == 8 ? ((const i64*)ids)[position] : (i64)((const int*)ids)[position];
}

// Find the first position of an id below `lowest` or from n_rows on, among those that the threads of
// this block get by `begin` and `stride`, or all ones. All threads of the block take part, and get it.
__device__ __forceinline__ u64 first_outside(const void* ids, int id_bytes, i64 begin, i64 stride, i64 n, i64 lowest,
                                             i64 n_rows) {
  __shared__ u64 first;
  if (threadIdx.x == 0) first = ~0ull;
  __syncthreads();
  // Several under way at once: one after another, a few thousand would take longer than a launch.
  constexpr int UNDER_WAY = 8;
  for (i64 i = begin; i < n; i += UNDER_WAY * stride) {
    i64 id[UNDER_WAY];
#pragma unroll
    for (int k = 0; k < UNDER_WAY; ++k) {
      const i64 at = i + k * stride;
      id[k] = load_id(ids, at < n ? at : i, id_bytes);
    }
#pragma unroll
    for (int k = 0; k < UNDER_WAY; ++k)
      if (id[k] < lowest || id[k] >= n_rows) {
        const i64 at = i + k * stride;
        atomicMin(&first, (u64)(at < n ? at : i));
      }
  }
  __syncthreads();
  return first;
}

// What a gather needs to know before it writes: the first position of a bad id, or all ones. What was
// found before is in first_bad; without it, and with `lowest` at most 0, the block looks itself.
__device__ __forceinline__ u64 bad_position(const u64* first_bad, const void* ids, int id_bytes, i64 n, i64 lowest,
                                            i64 n_rows) {
  if (first_bad != nullptr) return *first_bad;
  if (lowest > 0) return ~0ull;
  return first_outside(ids, id_bytes, threadIdx.x, blockDim.x, n, lowest, n_rows);
}
