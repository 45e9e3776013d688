// Bags of rows: their sum, mean or largest values, and the offsets that say where bags begin.
//
// Bag b has the ids from offsets[b] to offsets[b + 1], the last one those up to the end. Offsets that do
// not begin with 0, fall, or go beyond the ids are reported in the mailbox: the position of one of
// them and how many ids there are. No id outside is read for them. Of several errors any may be reported.
//
// value_t is float or double, VECTOR of them are loaded at once; the host says which.
#include "bits.cuh"
#include "exact.cuh"
#include "ids.cuh"
#include "mailbox.cuh"

#define THREADS 256
#define CHECK_THREADS 1024
#define UNDER_WAY (32 / VALUE_BYTES)  // rows of a bag, as many as registers hold
enum { MODE_SUM = 0, MODE_MEAN = 1, MODE_MAX = 2 };  // torch's numbers

#if VALUE_BYTES == 8
typedef double value_t;
#else
typedef float value_t;
#endif

struct __align__(VALUE_BYTES * VECTOR) values_t {
  value_t v[VECTOR];
};

// Whether offset b of `entries`, all but the last the begin of a bag and that one too unless it is the
// end, is what it can be after the one before it.
__device__ __forceinline__ bool sound_offset(i64 before, i64 offset, i64 b, i64 entries, i64 n, bool last_is_end) {
  if (b == 0 && offset != 0) return false;
  if (last_is_end && b == entries - 1 && offset != n) return false;
  return before <= offset && offset <= n;
}

// A thread takes VECTOR values of one bag after another, added up in the order of the ids as torch does,
// so that results have the same bits. index[n]: rows of matrix[n_rows], `width` vectors each; those that
// are `padding` count for nothing, and neither do those out of range, which are reported.
extern "C" __global__ void __launch_bounds__(THREADS)
    pool_bags(const values_t* __restrict__ matrix, i64 n_rows, int width, const void* __restrict__ index, int index_bytes, i64 n,
              i64 padding, const void* __restrict__ offsets, int offset_bytes, i64 entries, int last_is_end, int mode,
              values_t* __restrict__ out, i64* mailbox) {
  const i64 units = (entries - last_is_end) * width;
  const i64 stride = (i64)gridDim.x * THREADS;
  const i64 first = (i64)blockIdx.x * THREADS + threadIdx.x;
  if (first == 0 && last_is_end && entries == 1 && load_id(offsets, 0, offset_bytes) != n)
    report(mailbox, ERROR_OFFSETS, 0, 0, n);
  for (i64 i = first; i < units; i += stride) {
    const i64 bag = i / width;
    const int at = (int)(i - bag * width);
    const i64 from = load_id(offsets, bag, offset_bytes);
    i64 to = n;
    bool sound = sound_offset(0, from, bag, entries, n, last_is_end);
    if (bag + 1 < entries) {
      to = load_id(offsets, bag + 1, offset_bytes);
      sound = sound && sound_offset(from, to, bag + 1, entries, n, last_is_end);
    }
    values_t sum;
#pragma unroll
    for (int k = 0; k < VECTOR; ++k) sum.v[k] = 0;
    i64 count = 0;
    if (!sound) {
      if (at == 0) report(mailbox, ERROR_OFFSETS, bag, 0, n);
      to = from;
    }
    // Several rows under way at once, added up one after another.
    for (i64 first_id = from; first_id < to; first_id += UNDER_WAY) {
      i64 row[UNDER_WAY];
      values_t x[UNDER_WAY];
#pragma unroll
      for (int u = 0; u < UNDER_WAY; ++u) {
        const i64 j = first_id + u;
        row[u] = j < to ? load_id(index, j, index_bytes) : padding;
        if (row[u] == padding || (row[u] >= 0 && row[u] < n_rows)) continue;
        if (at == 0) report(mailbox, ERROR_INDEX, j, row[u], n_rows);
        row[u] = padding;
      }
#pragma unroll
      for (int u = 0; u < UNDER_WAY; ++u)
        if (row[u] != padding) x[u] = matrix[row[u] * width + at];
#pragma unroll
      for (int u = 0; u < UNDER_WAY; ++u) {
        if (row[u] == padding) continue;
#pragma unroll
        for (int k = 0; k < VECTOR; ++k) {
          if (mode != MODE_MAX) sum.v[k] = add_exact(sum.v[k], x[u].v[k]);
          else if (count == 0 || is_greater(x[u].v[k], sum.v[k])) sum.v[k] = x[u].v[k];
        }
        ++count;
      }
    }
    if (mode == MODE_MEAN && count) {
#pragma unroll
      for (int k = 0; k < VECTOR; ++k) sum.v[k] = divide_exact(sum.v[k], (value_t)count);
    }
    out[i] = sum;
  }
}

// Copy offsets, or where they are not sound give each bag but the last one no id. One block.
extern "C" __global__ void __launch_bounds__(CHECK_THREADS)
    sound_offsets(const void* __restrict__ offsets, int offset_bytes, i64 entries, i64 n, int last_is_end,
                  i64* __restrict__ out, i64* mailbox) {
  __shared__ u64 bad;
  if (threadIdx.x == 0) bad = ~0ull;
  __syncthreads();
  for (i64 b = threadIdx.x; b < entries; b += CHECK_THREADS) {
    const i64 offset = load_id(offsets, b, offset_bytes);
    const i64 before = b ? load_id(offsets, b - 1, offset_bytes) : 0;
    out[b] = offset;
    if (!sound_offset(before, offset, b, entries, n, last_is_end)) atomicMin(&bad, (u64)b);
  }
  __syncthreads();
  if (bad == ~0ull) return;
  for (i64 b = threadIdx.x; b < entries; b += CHECK_THREADS) out[b] = last_is_end && b == entries - 1 ? n : 0;
  if (threadIdx.x == 0) report(mailbox, ERROR_OFFSETS, (i64)bad, 0, n);
}
