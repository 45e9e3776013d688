// Counting for a planner, of many candidates at once; CandidateTable says what a candidate is. Its
// numbers lie COLUMNS to a candidate, by the defines WIDTH, UNIFORM and so on. A chunk has the width that
// its candidate says, and is counted in 64 bits. Candidates of TABLE 1 are counted on the other rows.
//
// `found` has all masks and values, of position i of a candidate at FIRST + i, and STRIDE apart.
//
// Values are counted in hash tables of keys and counts: of a position in shared memory, of all positions
// in global memory. A table has a power of two of places, more than there are different values, and one
// behind them for the value that is also the mark of a free place. Keys are kept inverted, so that memory
// of zeros is a table of no values.
#include "bits.cuh"

#define THREADS 256
#define COLUMN_THREADS 128  // of a block that counts a position
#define FREE (~0ull)  // kept as 0

__device__ __forceinline__ u64 load_chunk(const void* rows, i64 i, int width) {
  if (width == 1) return ((const u8*)rows)[i];
  if (width == 2) return ((const unsigned short*)rows)[i];
  if (width == 4) return ((const u32*)rows)[i];
  return ((const u64*)rows)[i];
}
__device__ __forceinline__ bool agrees(u64 set, u64 all, u64 agreed) {
  return (set > all - set ? set : all - set) >= agreed;
}

// counts: of each bit of a row, the rows that have it set.
extern "C" __global__ void __launch_bounds__(THREADS)
    agreed_masks(const u64* __restrict__ counts, const u64* __restrict__ other_counts, const i64* __restrict__ numbers,
                 u64* __restrict__ found) {
  __shared__ u64 sums[THREADS];
  __shared__ u32 halves[2];
  const i64* c = numbers + (i64)blockIdx.y * COLUMNS;
  if (c[TABLE]) counts = other_counts;
  const int bits = 8 * (int)c[WIDTH], chunks = (int)c[CHUNKS];
  const u64 agreed = (u64)c[AGREED], n_rows = (u64)c[COUNTED];
  u64* mine = found + c[FIRST];
  if (!c[UNIFORM]) {
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < chunks; i += gridDim.x * THREADS) {
      u64 mask = 0;
      for (int b = 0; b < bits; ++b)
        if (agrees(counts[(i64)i * bits + b], n_rows, agreed)) mask |= 1ull << b;
      mine[i] = mask | (u64)c[FIELD];
    }
    return;
  }
  if (blockIdx.x) return;
  // The bits of a chunk divide the threads: each of these adds up one bit of some chunks.
  const int bit = threadIdx.x % bits;
  u64 sum = 0;
  for (int i = threadIdx.x / bits; i < chunks; i += THREADS / bits) sum += counts[(i64)i * bits + bit];
  sums[threadIdx.x] = sum;
  if (threadIdx.x < 2) halves[threadIdx.x] = 0;
  __syncthreads();
  if (threadIdx.x < bits) {
    sum = 0;
    for (int t = threadIdx.x; t < THREADS; t += bits) sum += sums[t];
    if (agrees(sum, n_rows * chunks, agreed)) atomicOr(&halves[bit >> 5], 1u << (bit & 31));
  }
  __syncthreads();
  if (threadIdx.x == 0) mine[0] = ((u64)halves[1] << 32 | halves[0]) | (u64)c[FIELD];
}

// Count `more` chunks x in a table.
__device__ __forceinline__ void count_value(u64* keys, u32* counts, u32 places, u64 x, u32 more) {
  u32 place = places;  // of the mark itself
  if (x != FREE) {
    // The upper bits of the product: chunks may differ in their upper bits alone, which the others lack.
    place = (u32)((x * 0x9E3779B97F4A7C15ull) >> (33 + __clz((int)places)));
    while (true) {
      // Volatile: another thread may just have taken the place.
      u64 there = ~*(volatile u64*)(keys + place);
      if (there == FREE) there = ~atomicCAS(keys + place, ~FREE, ~x);
      if (there == FREE || there == x) break;
      place = (place + 1) & (places - 1);
    }
  }
  atomicAdd(counts + place, more);
}

// Whether a value comes before another one: by count, then the smaller one.
__device__ __forceinline__ bool comes_before(u32 count, u64 key, u32 other_count, u64 other_key) {
  return count > other_count || (count == other_count && key < other_key);
}

// The next of a table's values after the one that was found before, in every thread of the block; a
// count of 0: there is none. Of places begin to end.
template <int SIZE, class Keys, class Counts>
__device__ __forceinline__ void find_next(Keys keys, Counts counts, u32 begin, u32 end, u32& count, u64& key) {
  __shared__ u32 warp_counts[SIZE / 32];
  __shared__ u64 warp_keys[SIZE / 32];
  u32 best_count = 0;
  u64 best_key = ~0ull;
  for (u32 place = begin + threadIdx.x; place < end; place += SIZE) {
    const u32 n = counts[place];
    if (n == 0 || n > count) continue;
    const u64 x = ~keys[place];
    if (comes_before(count, key, n, x) && comes_before(n, x, best_count, best_key)) best_count = n, best_key = x;
  }
#pragma unroll
  for (int d = 16; d; d >>= 1) {
    const u32 n = __shfl_xor_sync(FULL, best_count, d);
    const u64 x = __shfl_xor_sync(FULL, best_key, d);
    if (comes_before(n, x, best_count, best_key)) best_count = n, best_key = x;
  }
  if ((threadIdx.x & 31) == 0) {
    warp_counts[threadIdx.x >> 5] = best_count;
    warp_keys[threadIdx.x >> 5] = best_key;
  }
  __syncthreads();
  for (int w = 0; w < SIZE / 32; ++w)
    if (comes_before(warp_counts[w], warp_keys[w], best_count, best_key))
      best_count = warp_counts[w], best_key = warp_keys[w];
  __syncthreads();
  count = best_count;
  key = best_key;
}

// The most frequent values of positional candidates, one block a position. `places` of the table lie in
// shared memory.
extern "C" __global__ void __launch_bounds__(COLUMN_THREADS)
    frequent_by_position(const void* __restrict__ rows, const void* __restrict__ other_rows, int n_rows,
                         int other_n_rows, const i64* __restrict__ numbers, u32 places, u64* __restrict__ found) {
  extern __shared__ __align__(16) u64 keys[];
  u32* counts = (u32*)(keys + places + 1);
  const i64* c = numbers + (i64)blockIdx.y * COLUMNS;
  if (c[UNIFORM]) return;
  if (c[TABLE]) rows = other_rows, n_rows = other_n_rows;
  const int width = (int)c[WIDTH], chunks = (int)c[CHUNKS];
  const i64 stride = c[STRIDE];
  for (int i = blockIdx.x; i < chunks; i += gridDim.x) {
    for (u32 place = threadIdx.x; place <= places; place += COLUMN_THREADS) keys[place] = ~FREE, counts[place] = 0;
    __syncthreads();
    u64* mine = found + c[FIRST] + i;
    const u64 mask = mine[0];
    for (int r = threadIdx.x; r < n_rows; r += COLUMN_THREADS)
      count_value(keys, counts, places, load_chunk(rows, (i64)r * chunks + i, width) & mask, 1);
    __syncthreads();
    u32 count = ~0u;
    u64 key = 0, first = 0;
    for (int rank = 0; rank < VALUES; ++rank) {
      find_next<COLUMN_THREADS>(keys, counts, 0, places + 1, count, key);
      if (rank == 0) first = key;
      if (threadIdx.x == 0) mine[(rank + 1) * stride] = count ? key : first;
    }
  }
}

// Count the masked chunks of uniform candidates in tables of their own. tables: for each candidate its
// first place and the places, 0 of a positional one.
extern "C" __global__ void __launch_bounds__(THREADS)
    count_values(const void* __restrict__ rows, const void* __restrict__ other_rows, i64 n_rows, i64 other_n_rows,
                 const i64* __restrict__ numbers, const i64* __restrict__ tables, const u64* __restrict__ found,
                 u64* keys, u32* counts) {
  const i64* c = numbers + (i64)blockIdx.y * COLUMNS;
  const i64 first = tables[2 * blockIdx.y];
  const u32 places = (u32)tables[2 * blockIdx.y + 1];
  if (!places) return;
  if (c[TABLE]) rows = other_rows, n_rows = other_n_rows;
  const int width = (int)c[WIDTH], lane = threadIdx.x & 31;
  const i64 n = n_rows * c[CHUNKS], stride = (i64)gridDim.x * THREADS;
  const u64 mask = found[c[FIRST]];
  for (i64 begin = (i64)blockIdx.x * THREADS + (threadIdx.x & ~31); begin < n; begin += stride) {
    const i64 i = begin + lane;
    const u32 present = __ballot_sync(FULL, i < n);
    if (i >= n) continue;
    const u64 x = load_chunk(rows, i, width) & mask;
    // Most chunks take few values: equal ones of a warp are counted at once.
    const u32 alike = __match_any_sync(present, x);
    if (lane == __ffs(alike) - 1) count_value(keys + first, counts + first, places, x, __popc(alike));
  }
}

// The most frequent values of tables, one slice a block: VALUES keys and counts each to top_keys and
// top_counts, of which the last block of a candidate that is `done` finds the most frequent ones. `tables`: as
// of count_values.
extern "C" __global__ void __launch_bounds__(THREADS)
    top_values(const u64* __restrict__ keys, const u32* __restrict__ counts, const i64* __restrict__ tables,
               volatile u64* top_keys, volatile u32* top_counts, u32* done, const i64* __restrict__ numbers,
               u64* __restrict__ found) {
  __shared__ bool last;
  const i64 start = tables[2 * blockIdx.y];
  const u32 places = (u32)tables[2 * blockIdx.y + 1];
  if (!places) return;
  const u32 all = places + 1, slice = (all + gridDim.x - 1) / gridDim.x;
  const u32 begin = min(all, slice * blockIdx.x), end = min(all, begin + slice);
  const i64 tops = (i64)blockIdx.y * gridDim.x * VALUES;
  u32 count = ~0u;
  u64 key = 0, first = 0;
  for (int rank = 0; rank < VALUES; ++rank) {
    find_next<THREADS>(keys + start, counts + start, begin, end, count, key);
    if (threadIdx.x) continue;
    top_keys[tops + blockIdx.x * VALUES + rank] = ~key;
    top_counts[tops + blockIdx.x * VALUES + rank] = count;
  }
  if (threadIdx.x == 0) {
    __threadfence();  // what this block found is there before it counts as done
    last = atomicAdd(done + blockIdx.y, 1) == gridDim.x - 1;
    __threadfence();
  }
  __syncthreads();
  if (!last) return;
  const i64* c = numbers + (i64)blockIdx.y * COLUMNS;
  count = ~0u, key = 0;
  for (int rank = 0; rank < VALUES; ++rank) {
    find_next<THREADS>(top_keys + tops, top_counts + tops, 0, gridDim.x * VALUES, count, key);
    if (rank == 0) first = key;
    if (threadIdx.x == 0) found[c[FIRST] + (rank + 1) * c[STRIDE]] = count ? key : first;
  }
}

// totals: for each candidate nine sums over all rows, of code_bits 1 to 3 each: the sizes not grouped and
// grouped, in units of 1 << unit_shift bits, and the rows with exceptions; and the masks that are not that of
// the first position.
extern "C" __global__ void __launch_bounds__(THREADS)
    sizes_by_option(const void* __restrict__ rows, i64 n_rows, const i64* __restrict__ numbers,
                    const u64* __restrict__ found, int unit_shift, u64* totals) {
  const i64* c = numbers + (i64)blockIdx.y * COLUMNS;
  const int width = (int)c[WIDTH], chunks = (int)c[CHUNKS], groups = (chunks + 31) >> 5;
  const int uniform = (int)c[UNIFORM], lane = threadIdx.x & 31;
  const i64 first = c[FIRST], entries = c[STRIDE], stride = (i64)gridDim.x * (THREADS / 32);
  const u64* values = found + entries;
  const int rest = (1 << unit_shift) - 1, row_bits = 8 * width * chunks;
  const i64 raw = (row_bits + rest) >> unit_shift;
  u64 sums[SUMS] = {0};
  const int place = blockIdx.x * THREADS + threadIdx.x;
  if (!uniform)
    for (int i = place; i < chunks; i += gridDim.x * THREADS) sums[DIFFERING] += found[first + i] != found[first];
  sums[DIFFERING] = __reduce_add_sync(FULL, (u32)sums[DIFFERING]);
  for (i64 r = (i64)blockIdx.x * (THREADS / 32) + (threadIdx.x >> 5); r < n_rows; r += stride) {
    int masked = 0, stored = 0;
    int miss[3] = {0, 0, 0};  // masked bits of chunks without a code
    for (int g = 0; g < groups; ++g) {
      const int i = 32 * g + lane;
      bool is_first = true;
      if (i < chunks) {
        const i64 p = first + (uniform ? 0 : i);
        const u64 mask = found[p], x = load_chunk(rows, r * chunks + i, width) & mask;
        const int bits = __popcll(mask);
        is_first = x == values[p];
        const bool three = is_first || x == values[p + entries] || x == values[p + 2 * entries];
        bool seven = three;
#pragma unroll
        for (int j = 3; j < VALUES; ++j) seven = seven || x == values[p + j * entries];
        masked += bits;
        if (!is_first) miss[0] += bits;
        if (!three) miss[1] += bits;
        if (!seven) miss[2] += bits;
      }
      stored += !__all_sync(FULL, is_first);
    }
    masked = __reduce_add_sync(FULL, masked);
    const i64 payload = (row_bits - masked + rest) >> unit_shift;
#pragma unroll
    for (int k = 1; k <= 3; ++k) {
      const int missed = __reduce_add_sync(FULL, miss[k - 1]);
      const i64 size = payload + ((missed + rest) >> unit_shift);
      const i64 code = (i64)k * (32 >> unit_shift), plain = size + groups * code;
      const i64 grouped = size + ((groups + rest) >> unit_shift) + stored * code;
      sums[3 * k - 3] += (u64)(plain < raw ? plain : raw);
      sums[3 * k - 2] += (u64)(grouped < raw ? grouped : raw);
      sums[3 * k - 1] += missed != 0;
    }
  }
  if (lane) return;
#pragma unroll
  for (int j = 0; j < SUMS; ++j)
    if (sums[j]) atomicAdd(totals + (i64)blockIdx.y * SUMS + j, sums[j]);
}
