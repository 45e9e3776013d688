// Unpacking rows chosen by id, out of a table and, for rows that its map holds, out of the cache's
// slabs: one launch for both. The warp that will decode a row finds and fetches it. See decode.cuh.
// Ids name items: rows, or, with items_per_row > 1 (BY_BYTES only), one of several that share a row.
#include "async_copy.cuh"
#include "bits.cuh"
#include "ids.cuh"
#include "mailbox.cuh"
#include "map.cuh"
#define GATHER 1
#include "row_cursor.cuh"
#include "words.cuh"
#include "rebuild.cuh"
#include "rebuild_words.cuh"
#include "decode.cuh"
#include "chosen_rows.cuh"

template <bool STAGED, int LANES>
__device__ __forceinline__ void gather_all(const Args& a, const Table& t, i64* counters, u32* shared) {
  __shared__ TileRow fetched[2][32];
  __shared__ int part_bits[WARPS];
  const i64 last = (t.n - 1) / a.tile_rows;
  const Kept kept = prepare<LANES>(a);
  Counts counts = {0, 0};
  // Of short rows, ids are loaded two turns before the rows are fetched, and the lines of the map that
  // they lead to are called for one turn before: a turn is over before these loads would be. Longer
  // rows gain nothing by it. The turn before a block's first tile only fetches it.
  constexpr bool AHEAD = LANES < 32;
  const i64 begin = blockIdx.x;
  Wanted next, after;
  if (AHEAD) {
    next = positive(a, t, load_wanted(a, t, begin));
    after = load_wanted(a, t, begin + gridDim.x);
  }
  int half = 0;
  for (i64 tile = begin - gridDim.x; tile <= last; tile += gridDim.x) {
    if (STAGED) copy_async_wait<0>();
    // Behind this barrier the tile is there, and no warp looks at the one before it any more.
    __syncthreads();
    if (tile + gridDim.x <= last) {
      if (!AHEAD) next = positive(a, t, load_wanted(a, t, tile + gridDim.x));
      fetch_chosen<STAGED>(a, t, next, fetched[half ^ 1], shared + (half ^ 1) * a.stage_words, counts);
    }
    if (STAGED) copy_async_commit();
    if (AHEAD) {
      next = positive(a, t, after);
      if (t.entries != nullptr && next.row >= 0) prefetch_bucket(t.entries, t.bucket_mask, next.row);
      after = load_wanted(a, t, tile + 3 * (i64)gridDim.x);
    }
    if (tile >= begin) decode_tile<STAGED, LANES>(a, kept, 0, fetched[half], shared + half * a.stage_words, part_bits);
    half ^= 1;
  }
  const int lane = threadIdx.x & 31;
  if (counters != nullptr && lane <= HOST_SOURCE && counts.rows) {
    atomicAdd((u64*)counters + lane, (u64)counts.rows);
    atomicAdd((u64*)counters + MAX_SLABS + 1 + lane, (u64)counts.words);
  }
}

#define GATHER_PARAMETERS                                                                                         \
  const u32 *words, i64 n_words, const i64 *__restrict__ bases, const void *__restrict__ lengths,                 \
      int length_bytes, const u32 *__restrict__ flags, const u32 *__restrict__ moved, const u32 *overflow,        \
      i64 overflow_rows, int typical_words, const longlong2 *__restrict__ entries, u32 bucket_mask,               \
      const i64 *__restrict__ slabs, const void *__restrict__ ids, int id_bytes, const u32 *__restrict__ order,   \
      i64 n, const u8 *__restrict__ row_clusters, const chunk_t *__restrict__ tables,                             \
      const int *__restrict__ starts, i64 n_rows, int chunks, int row_words, int row_bytes, int clusters,         \
      int tile_rows, int stride_words, int stage_words, int longest_words, u8 *__restrict__ out,                  \
      const u64 *first_bad, i64 lowest, i64 *counters, i64 *mailbox, int items_per_row, int item_bytes,           \
      i64 n_items, int items_cached
#define GATHER_BODY(STAGED, LANES)                                                                                \
  extern __shared__ __align__(128) u32 shared[];                                                                  \
  const u64 bad = bad_position(first_bad, ids, id_bytes, n, lowest, n_items);                                     \
  if (bad != ~0ull) {                                                                                             \
    if (blockIdx.x == 0 && threadIdx.x == 0)                                                                      \
      report(mailbox, ERROR_INDEX, (i64)bad, load_id(ids, (i64)bad, id_bytes), n_items);                          \
    return;                                                                                                       \
  }                                                                                                               \
  const Args a = {row_clusters, tables,    starts,     n_rows,      chunks,        row_words, row_bytes,          \
                  clusters,     tile_rows, stride_words, stage_words, longest_words, out,       mailbox,          \
                  item_bytes};                                                                                    \
  const Table t = {words,         n_words,       bases,   lengths, length_bytes, flags, moved,    overflow, \
                   overflow_rows, typical_words, entries, bucket_mask, slabs,    ids,   id_bytes, order,    n,    \
                   n_items,       items_per_row, items_cached};                                                   \
  gather_all<STAGED, LANES>(a, t, counters, shared);

// Rows whose tiles fit the stage, a warp a row.
extern "C" __global__ void __launch_bounds__(32 * WARPS, MIN_BLOCKS) gather_rows(GATHER_PARAMETERS) {
  GATHER_BODY(true, 32)
}
// Rows longer than the stage: read where they are.
extern "C" __global__ void __launch_bounds__(32 * WARPS, MIN_BLOCKS) gather_long_rows(GATHER_PARAMETERS) {
  GATHER_BODY(false, 32)
}
#if VECTOR >= 4
// Short rows: eight lanes a row, four rows a warp at once.
extern "C" __global__ void __launch_bounds__(32 * WARPS, MIN_BLOCKS) gather_short_rows(GATHER_PARAMETERS) {
  GATHER_BODY(true, 8)
}
#endif
