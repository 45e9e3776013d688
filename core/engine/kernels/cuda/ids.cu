// What is done with ids before rows are gathered by them: the search for one out of range, and the
// order in which rows are read one neighbourhood of the table after another. A neighbourhood is a
// bin: the ids that agree but for their lowest `shift` bits, below BINS of them in a table.
//
// To order, three launches: reset_order, count_ids, order_ids. Ids are good from `lowest`, which is
// -n_rows or 0, to n_rows - 1; negative ones count from the end. first_bad[0] is all ones, or the first
// position of a bad id; then nothing is ordered.
//
// And ids of several small tables whose rows lie back to back: rows_of_keys.
#include "bits.cuh"
#include "ids.cuh"
#include "mailbox.cuh"

static_assert((BINS & (BINS - 1)) == 0, "threads share the bins evenly");

#define THREADS 256
#define CHECK_THREADS 1024  // at most, of a block of check_ids
#define BINS_PER_THREAD (BINS / THREADS)

// first_bad[0] starts as all ones, unless there is one block only.
extern "C" __global__ void __launch_bounds__(CHECK_THREADS)
    check_ids(const void* __restrict__ ids, int id_bytes, i64 n, i64 lowest, i64 n_rows, u64* first_bad) {
  const i64 begin = (i64)blockIdx.x * blockDim.x + threadIdx.x, stride = (i64)gridDim.x * blockDim.x;
  const u64 found = first_outside(ids, id_bytes, begin, stride, n, lowest, n_rows);
  if (threadIdx.x) return;
  if (gridDim.x == 1) *first_bad = found;
  else if (found != ~0ull) atomicMin(first_bad, found);
}

// bins: the ids of each bin, then the positions of each bin that are given away.
extern "C" __global__ void __launch_bounds__(THREADS) reset_order(u32* bins, u64* first_bad) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < 2 * BINS) bins[i] = 0;
  if (i == 0) first_bad[0] = ~0ull;
}

// Check the ids and count them by bin.
extern "C" __global__ void __launch_bounds__(THREADS)
    count_ids(const void* __restrict__ ids, int id_bytes, i64 n, i64 lowest, i64 n_rows, int shift, u32* bins,
              u64* first_bad) {
  __shared__ u32 counts[BINS];
  for (int b = threadIdx.x; b < BINS; b += THREADS) counts[b] = 0;
  __syncthreads();
  const i64 stride = (i64)gridDim.x * THREADS;
  for (i64 i = (i64)blockIdx.x * THREADS + threadIdx.x; i < n; i += stride) {
    const i64 id = load_id(ids, i, id_bytes);
    if (id < lowest || id >= n_rows) atomicMin(first_bad, (u64)i);
    else atomicAdd(&counts[(id < 0 ? id + n_rows : id) >> shift], 1u);
  }
  __syncthreads();
  for (int b = threadIdx.x; b < BINS; b += THREADS)
    if (counts[b]) atomicAdd(&bins[b], counts[b]);
}

// Write the positions of all ids to `order`, bin after bin, in any sequence within a bin.
extern "C" __global__ void __launch_bounds__(THREADS)
    order_ids(const void* __restrict__ ids, int id_bytes, i64 n, i64 n_rows, int shift, u32* bins,
              const u64* first_bad, u32* __restrict__ order) {
  __shared__ u32 next_of_bin[BINS];  // ids of this block by bin; then where the next of them goes
  __shared__ u32 warp_totals[THREADS / 32];
  if (first_bad[0] != ~0ull) return;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  for (int b = threadIdx.x; b < BINS; b += THREADS) next_of_bin[b] = 0;
  // Each thread takes a run of bins; their starts follow from the totals of the runs before it.
  const int first_bin = threadIdx.x * BINS_PER_THREAD;
  u32 totals[BINS_PER_THREAD], total = 0;
#pragma unroll
  for (int b = 0; b < BINS_PER_THREAD; ++b) totals[b] = bins[first_bin + b];
#pragma unroll
  for (int b = 0; b < BINS_PER_THREAD; ++b) total += totals[b];
  const u32 up_to_me = (u32)inclusive_scan((int)total, lane);
  if (lane == 31) warp_totals[warp] = up_to_me;
  __syncthreads();
  const i64 stride = (i64)gridDim.x * THREADS;
  for (i64 i = (i64)blockIdx.x * THREADS + threadIdx.x; i < n; i += stride) {
    i64 id = load_id(ids, i, id_bytes);
    if (id < 0) id += n_rows;
    atomicAdd(&next_of_bin[id >> shift], 1u);
  }
  u32 start = up_to_me - total;
  for (int w = 0; w < warp; ++w) start += warp_totals[w];
  __syncthreads();
  // Every block takes its share of a bin at once: one atomic a bin, not one an id, and a thread's
  // atomics all under way before the first answer is used.
  u32 taken[BINS_PER_THREAD];
#pragma unroll
  for (int b = 0; b < BINS_PER_THREAD; ++b) {
    const u32 mine = next_of_bin[first_bin + b];
    taken[b] = 0;
    if (mine) taken[b] = atomicAdd(&bins[BINS + first_bin + b], mine);
  }
#pragma unroll
  for (int b = 0; b < BINS_PER_THREAD; ++b) {
    next_of_bin[first_bin + b] = start + taken[b];
    start += totals[b];
  }
  __syncthreads();
  for (i64 i = (i64)blockIdx.x * THREADS + threadIdx.x; i < n; i += stride) {
    i64 id = load_id(ids, i, id_bytes);
    if (id < 0) id += n_rows;
    order[atomicAdd(&next_of_bin[id >> shift], 1u)] = (u32)i;
  }
}

// Write the rows that ids name in tables back to back. The ids of a key, all of one table, follow each
// other; keys: for each one the position behind its last id, then the first row of its table, then the
// rows of that. An id out of range is reported, and stands for the first or the last row of the table.
extern "C" __global__ void __launch_bounds__(THREADS)
    rows_of_keys(const void* __restrict__ ids, int id_bytes, i64 n, const i64* __restrict__ keys, int n_keys,
                 i64* __restrict__ rows, i64* mailbox) {
  const i64 stride = (i64)gridDim.x * THREADS;
  for (i64 i = (i64)blockIdx.x * THREADS + threadIdx.x; i < n; i += stride) {
    int key = 0, last = n_keys - 1;
    while (key < last) {
      const int middle = (key + last) >> 1;
      if (keys[middle] > i) last = middle;
      else key = middle + 1;
    }
    const i64 size = keys[2 * n_keys + key], id = load_id(ids, i, id_bytes);
    i64 row = id;
    if (id < 0 || id >= size) {
      report(mailbox, ERROR_INDEX, i, id, size);
      row = id < 0 || size == 0 ? 0 : size - 1;
    }
    rows[i] = keys[n_keys + key] + row;
  }
}
