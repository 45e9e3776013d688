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
#include "chosen_tiles.cuh"

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
  gather_all<STAGED, LANES>(a, t, counters, shared, blockIdx.x, gridDim.x);

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
