// Bags of rows: their sum, mean or largest values, and the offsets that say where bags begin.
//
// Bag b has the ids from offsets[b] to offsets[b + 1], the last one those up to the end. Offsets that do
// not begin with 0, fall, or go beyond the ids are reported in the mailbox: the position of one of
// them and how many ids there are. No id outside is read for them. Of several errors any may be reported.
//
// value_t is float or double, VECTOR of them are loaded at once; the host says which.
#include "async_copy.cuh"
#include "bits.cuh"
#include "exact.cuh"
#include "ids.cuh"
#include "mailbox.cuh"
#include "offsets.cuh"

#define THREADS 256
#define CHECK_THREADS 1024
#define UNDER_WAY (32 / VALUE_BYTES)      // rows of a bag, as many as registers hold
#define MIN_BLOCKS (VECTOR == 1 ? 4 : 3)  // that registers have room for
#define LONG_THREADS 64                   // of a block for long bags; a warp has 16 KB of shared memory
#define STAGES (16 / VALUE_BYTES)         // of 32 rows each, of which a warp takes 32 values
#define PIECES (32 / VECTOR)              // vectors that hold them
#define LOADED 8                          // rows that are in registers together
enum { MODE_SUM = 0, MODE_MEAN = 1, MODE_MAX = 2 };  // torch's numbers

#if VALUE_BYTES == 8
typedef double value_t;
#else
typedef float value_t;
#endif

struct __align__(VALUE_BYTES * VECTOR) values_t {
  value_t v[VECTOR];
};

__device__ __forceinline__ void copy_async(values_t* shared_to, const values_t* from) {
  if constexpr (sizeof(values_t) == 16) copy_async_16(shared_to, from);
  else if constexpr (sizeof(values_t) == 8) copy_async_8(shared_to, from);
  else copy_async_4(shared_to, from);
}

// The ids of a bag, from `begin` to `end`: none where its offsets are not sound, which `tells` reports.
struct ids_t {
  i64 begin, end;
};
__device__ __forceinline__ ids_t ids_of_bag(i64 bag, const void* __restrict__ offsets, int offset_bytes, i64 entries, i64 n,
                                            bool last_is_end, bool tells, i64* mailbox) {
  const i64 begin = load_id(offsets, bag, offset_bytes);
  i64 end = n;
  bool sound = sound_offset(0, begin, bag, entries, n, last_is_end);
  if (bag + 1 < entries) {
    end = load_id(offsets, bag + 1, offset_bytes);
    sound = sound && sound_offset(begin, end, bag + 1, entries, n, last_is_end);
  }
  if (!sound && tells) report(mailbox, ERROR_OFFSETS, bag, 0, n);
  return {begin, sound ? end : begin};
}
// An end that is the only offset belongs to no bag.
__device__ __forceinline__ void check_lone_end(const void* offsets, int offset_bytes, i64 entries, i64 n, bool last_is_end,
                                               i64* mailbox) {
  if (blockIdx.x == 0 && threadIdx.x == 0 && last_is_end && entries == 1 && load_id(offsets, 0, offset_bytes) != n)
    report(mailbox, ERROR_OFFSETS, 0, 0, n);
}

// index[n]: rows of matrix[n_rows], `width` vectors each; those that are `padding` count for nothing, and
// neither do those out of range, which are reported.
#define POOL_PARAMETERS \
  const values_t* __restrict__ matrix, i64 n_rows, int width, const void* __restrict__ index, int index_bytes, i64 n, \
  i64 padding, const void* __restrict__ offsets, int offset_bytes, i64 entries, int last_is_end, int mode, \
  values_t* __restrict__ out, i64* mailbox

// A thread takes VECTOR values of one bag after another, added up in the order of the ids as torch does,
// so that results have the same bits.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) pool_bags(POOL_PARAMETERS) {
  const i64 units = (entries - last_is_end) * width;
  const i64 stride = (i64)gridDim.x * THREADS;
  check_lone_end(offsets, offset_bytes, entries, n, last_is_end, mailbox);
  for (i64 i = (i64)blockIdx.x * THREADS + threadIdx.x; i < units; i += stride) {
    const i64 bag = i / width;
    const int at = (int)(i - bag * width);
    const ids_t ids = ids_of_bag(bag, offsets, offset_bytes, entries, n, last_is_end, at == 0, mailbox);
    values_t sum;
#pragma unroll
    for (int k = 0; k < VECTOR; ++k) sum.v[k] = 0;
    i64 count = 0;
    // Several rows under way at once, added up one after another; the ids of the next ones come meanwhile.
    i64 row[UNDER_WAY];
#pragma unroll
    for (int u = 0; u < UNDER_WAY; ++u)
      row[u] = ids.begin + u < ids.end ? load_id(index, ids.begin + u, index_bytes) : padding;
    for (i64 first_id = ids.begin; first_id < ids.end; first_id += UNDER_WAY) {
      values_t x[UNDER_WAY];
      u32 counts = 0;
#pragma unroll
      for (int u = 0; u < UNDER_WAY; ++u) {
        if (row[u] == padding) continue;
        if (row[u] >= 0 && row[u] < n_rows) {
          counts |= 1u << u;
          x[u] = matrix[row[u] * width + at];
        } else if (at == 0) {
          report(mailbox, ERROR_INDEX, first_id + u, row[u], n_rows);
        }
      }
      const i64 next = first_id + UNDER_WAY;
      if (next < ids.end) {
#pragma unroll
        for (int u = 0; u < UNDER_WAY; ++u) row[u] = next + u < ids.end ? load_id(index, next + u, index_bytes) : padding;
      }
#pragma unroll
      for (int u = 0; u < UNDER_WAY; ++u) {
        if (!(counts >> u & 1)) continue;
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

// Start the copies of a slice of 32 rows to shared memory, lane l's row to place l; return a bit for each
// that counts. All lanes of a warp take part; position is that of this lane's id.
__device__ __forceinline__ u32 fetch_rows(values_t* stage, const values_t* __restrict__ matrix, i64 n_rows, int width,
                                          int first_piece, i64 row, i64 padding, i64 position, i64* mailbox) {
  const int lane = threadIdx.x & 31, piece = lane % PIECES;
  const bool named = row != padding, inside = row >= 0 && row < n_rows;
  const u32 outside = __ballot_sync(FULL, named && !inside);
  if (first_piece == 0 && lane == __ffs(outside) - 1) report(mailbox, ERROR_INDEX, position, row, n_rows);
  const u32 counts = __ballot_sync(FULL, named && inside);
  const int end = 32 - __clz(counts);
#pragma unroll 4
  for (int k = 0; k < end; k += VECTOR) {
    const int place = k + lane / PIECES;
    const i64 wanted = __shfl_sync(FULL, row, place);
    if ((counts >> place & 1) && first_piece + piece < width)
      copy_async(stage + place * PIECES + piece, matrix + wanted * width + first_piece + piece);
  }
  copy_async_commit();
  return counts;
}

// A warp takes 32 values of one bag after another, and a lane adds up one of them, in the order of the
// ids. Registers would hold few rows of a long bag, so these come through shared memory, STAGES * 32 of
// them under way at once; the ids of as many more come meanwhile.
extern "C" __global__ void __launch_bounds__(LONG_THREADS) pool_long_bags(POOL_PARAMETERS) {
  __shared__ values_t staged[LONG_THREADS / 32][STAGES][32 * PIECES];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, dim = width * VECTOR;
  const i64 slices = (width + PIECES - 1) / PIECES;
  const i64 units = (entries - last_is_end) * slices;
  const i64 stride = (i64)gridDim.x * (LONG_THREADS / 32);
  check_lone_end(offsets, offset_bytes, entries, n, last_is_end, mailbox);
  for (i64 i = (i64)blockIdx.x * (LONG_THREADS / 32) + warp; i < units; i += stride) {
    const i64 bag = i / slices;
    const int first_piece = (int)(i - bag * slices) * PIECES;
    const bool tells = first_piece == 0 && lane == 0;
    const ids_t ids = ids_of_bag(bag, offsets, offset_bytes, entries, n, last_is_end, tells, mailbox);
    i64 row[STAGES];
    u32 counts[STAGES];
#pragma unroll
    for (int s = 0; s < STAGES; ++s) {
      const i64 position = ids.begin + 32 * s + lane;
      row[s] = position < ids.end ? load_id(index, position, index_bytes) : padding;
    }
#pragma unroll
    for (int s = 0; s < STAGES; ++s) {
      const i64 position = ids.begin + 32 * s + lane, next = position + 32 * STAGES;
      counts[s] = fetch_rows(staged[warp][s], matrix, n_rows, width, first_piece, row[s], padding, position, mailbox);
      row[s] = next < ids.end ? load_id(index, next, index_bytes) : padding;
    }
    value_t sum = 0;
    i64 count = 0;
    for (i64 first_id = ids.begin; first_id < ids.end; first_id += 32 * STAGES) {
#pragma unroll
      for (int s = 0; s < STAGES; ++s) {
        copy_async_wait<STAGES - 1>();
        __syncwarp();
        const value_t* values = (const value_t*)staged[warp][s] + lane;
#pragma unroll
        for (int k = 0; k < 32; k += LOADED) {
          const u32 here = counts[s] >> k & ((1u << LOADED) - 1);
          if (here == 0) continue;
          // Of all of them, with no branch; what no row has been copied to is not added.
          value_t x[LOADED];
#pragma unroll
          for (int u = 0; u < LOADED; ++u) x[u] = values[32 * (k + u)];
#pragma unroll
          for (int u = 0; u < LOADED; ++u) {
            if (!(here >> u & 1)) continue;
            if (mode != MODE_MAX) sum = add_exact(sum, x[u]);
            else if (count == 0 || is_greater(x[u], sum)) sum = x[u];
            ++count;
          }
        }
        __syncwarp();
        const i64 position = first_id + 32 * (STAGES + s) + lane, next = position + 32 * STAGES;
        counts[s] = fetch_rows(staged[warp][s], matrix, n_rows, width, first_piece, row[s], padding, position, mailbox);
        row[s] = next < ids.end ? load_id(index, next, index_bytes) : padding;
      }
    }
    if (mode == MODE_MEAN && count) sum = divide_exact(sum, (value_t)count);
    const int at = first_piece * VECTOR + lane;
    if (at < dim) ((value_t*)out)[bag * dim + at] = sum;
  }
}

// Copy offsets, or where they are not sound give each bag but the last one no id. One block.
extern "C" __global__ void __launch_bounds__(CHECK_THREADS)
    sound_offsets(const void* __restrict__ offsets, int offset_bytes, i64 entries, i64 n, int last_is_end,
                  i64* __restrict__ out, i64* mailbox) {
  __shared__ u64 bad;
  if (threadIdx.x == 0) bad = ~0ull;
  __syncthreads();
  copy_offsets(offsets, offset_bytes, entries, n, last_is_end, out, &bad, threadIdx.x, CHECK_THREADS);
  __syncthreads();
  if (bad == ~0ull) return;
  empty_bags(entries, n, last_is_end, out, threadIdx.x, CHECK_THREADS);
  if (threadIdx.x == 0) report(mailbox, ERROR_OFFSETS, (i64)bad, 0, n);
}
