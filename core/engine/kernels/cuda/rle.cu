// Runs of equal units: the value and the count of each. See kept_format.py.
#include "bits.cuh"
#include "mailbox.cuh"
#include "kept.cuh"

// A head differs from the unit before, or has a number that is a multiple of RUN_UNITS.
struct Head {
  __device__ __forceinline__ static bool keeps(const Row& row, int k, const stored_t* units, int count) {
    const int i = k * ROW_THREADS + threadIdx.x;
    chunk_t before = __shfl_up_sync(FULL, (chunk_t)row.x[k], 1);
    if ((threadIdx.x & 31) == 0 && i % RUN_UNITS && i < count) before = units[i - 1];
    return i < count && (i % RUN_UNITS == 0 || before != row.x[k]);
  }
};

extern "C" __global__ void __launch_bounds__(ROW_THREADS) count_rle(const stored_t* __restrict__ x, i64 units,
                                                                    i64* counts) {
  count_rows<Head>(x, units, counts);
}

extern "C" __global__ void __launch_bounds__(ROW_THREADS)
    pack_rle(const stored_t* __restrict__ x, i64 units, i64 starts_at, i64 values_at, u8* __restrict__ out) {
  __shared__ unsigned short heads[ROW_UNITS];
  pack_rows<Head, false>(x, units, starts_at, values_at, out, heads);
}

// Heads are marked in shared memory; a unit then counts those up to it. A damaged row is left as it is.
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
    decode_rle(const u8* __restrict__ data, i64 data_bytes, i64 elements, int element_bytes, i64 starts_at,
               i64 values_at, stored_t* __restrict__ out, i64* mailbox) {
  __shared__ u32 marks[ROW_WORDS];
  __shared__ int before[ROW_WORDS];
  __shared__ int of_warps[ROW_WARPS];
  const i64 kept = sound_kept(data, data_bytes, elements, RLE_FORM, element_bytes, COUNT_BYTES, HEADER_BYTES, values_at);
  const i64 units = elements * (element_bytes / CHUNK_BYTES);
  if (kept == DAMAGED || (kept == 0 && units > 0)) {
    if (blockIdx.x == 0 && threadIdx.x == 0) report(mailbox, ERROR_BLOB, -1, 0, 0);
    return;
  }
  if (kept == RAW) {
    copy_units((const stored_t*)(data + HEADER_BYTES), out, units);
    return;
  }
  const i64* starts = (const i64*)(data + starts_at);
  const stored_t* values = (const stored_t*)(data + values_at);
  const u8* counts = data + values_at + aligned_bytes(kept * CHUNK_BYTES);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const u32 up_to_me = FULL >> (31 - lane);
  for (i64 r = blockIdx.x; r * ROW_UNITS < units; r += gridDim.x) {
    const int count = units_of(r, units);
    if (!sound_starts(starts, r, count, kept, units)) {  // the same for all threads
      if (threadIdx.x == 0) report(mailbox, ERROR_BLOB, r, 0, 0);
      continue;
    }
    const i64 first = starts[r];
    const int runs = (int)(starts[r + 1] - first);
    const int each = (runs + ROW_THREADS - 1) / ROW_THREADS;  // runs of a thread, neighbours
    const int begin = min(runs, (int)threadIdx.x * each), end = min(runs, begin + each);
    int sum = 0;
    for (int j = begin; j < end; ++j) sum += counts[first + j] + 1;
    const int scanned = inclusive_scan(sum, lane);
    if (lane == 31) of_warps[warp] = scanned;
    if (threadIdx.x < ROW_WORDS) marks[threadIdx.x] = 0;
    __syncthreads();
    int at = scanned - sum, total = 0;
    for (int w = 0; w < ROW_WARPS; ++w) {
      if (w < warp) at += of_warps[w];
      total += of_warps[w];
    }
    if (total == count) {  // the same for all threads; then every head is within the row
      for (int j = begin; j < end; ++j) {
        atomicOr(marks + (at >> 5), 1u << (at & 31));
        at += counts[first + j] + 1;
      }
    } else if (threadIdx.x == 0) {
      report(mailbox, ERROR_BLOB, r, 0, 0);
    }
    __syncthreads();
    if (total == count) {
      sum_marks(marks, before);
      stored_t* to = out + r * ROW_UNITS;
#pragma unroll 4
      for (int k = 0; k < ROW_STEPS; ++k) {
        const int i = k * ROW_THREADS + threadIdx.x, word = k * ROW_WARPS + warp;
        if (i < count) to[i] = values[first + before[word] + __popc(marks[word] & up_to_me) - 1];
      }
    }
    __syncthreads();
  }
}
