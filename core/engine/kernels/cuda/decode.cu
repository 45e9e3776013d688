// Unpacking rows in order: a tile is one run of words. See decode.cuh.
#include "async_copy.cuh"
#include "bits.cuh"
#include "mailbox.cuh"
#define GATHER 0
#include "row_cursor.cuh"
#include "words.cuh"
#include "rebuild.cuh"
#include "rebuild_words.cuh"
#include "decode.cuh"

// Where the rows lie.
struct Run {
  const u32* words;
  i64 n_words;
  const i64* bases;
  const void* lengths;
  int length_bytes;
  i64 row_begin, n;
};

// Describe the rows of the tile and start the copies of its words: rows in order, one run of words. Tiles
// of more than 32 rows are several blocks of 32, of which each is looked at by a warp of its own.
template <bool STAGED, int TILE_ROWS>
__device__ __forceinline__ void fetch_run(const Args& a, const Run& run, i64 tile, TileRow* fetched, u32* stage) {
  const int lane = threadIdx.x & 31;
  const i64 first = tile * a.tile_rows;
  const int from = (int)(first & 31), last = from + a.tile_rows - 1;
  // The blocks' warps look at the rows, the others only at the tile's ends.
  const int blocks = TILE_ROWS > 32 ? a.tile_rows >> 5 : 1;
  const int mine = ((threadIdx.x >> 5) - (int)tile * blocks) & (WARPS - 1);
  const bool looks = mine < blocks;
  i64 begin_block = first >> 5, end_block = begin_block + 1;
  const i64 block = begin_block + (looks ? mine : 0);
  if (TILE_ROWS > 32) {  // only blocks with rows that are wanted
    end_block = min(begin_block + blocks, (run.row_begin + run.n + 31) >> 5);
    begin_block = max(begin_block, run.row_begin >> 5);
  }
  i64 base = run.bases[begin_block];
  i64 begin = base, end = run.bases[end_block];
  int length = 0, size = 0;
  if (looks || a.tile_rows < 32) {
    const i64 row = block * 32 + lane;
    if (row < a.n_rows) {
      length = load_length(run.lengths, row, run.length_bytes);
      size = size_of(length, a.row_words);
    }
  }
  if (a.tile_rows < 32) {
    begin = base + __reduce_add_sync(FULL, lane < from ? size : 0);
    end = begin + __reduce_add_sync(FULL, lane >= from && lane <= last ? size : 0);
  }
  const i64 origin = begin & ~(i64)31;
  const bool sound = begin >= 0 && begin <= end && end <= run.n_words && (!STAGED || end - origin + 4 <= a.stage_words);
  if (looks) {
    bool in_run = true;
    if (TILE_ROWS > 32) {
      in_run = block >= begin_block && block < end_block;
      if (in_run) base = run.bases[block];
      in_run = in_run && base >= begin && run.bases[block + 1] <= end;
    }
    const int up_to_me = inclusive_scan(size, lane);
    // The lengths of a block must fill it: of a whole one the other warps copy what the bases say.
    const bool agrees = !__any_sync(FULL, too_long(length, a.row_words)) && sound && in_run &&
                        run.bases[block + 1] - base == __shfl_sync(FULL, up_to_me, 31);
    if (TILE_ROWS > 32 || (lane >= from && lane <= last)) {
      const i64 row = block * 32 + lane;
      const bool wanted = row >= run.row_begin && row < run.row_begin + run.n;
      TileRow s;
      const i64 at = base + up_to_me - size;
      s.at = STAGED ? at - origin : (i64)(run.words + at);
      s.length = agrees && wanted ? length : NO_ROW;
      s.cluster = CLUSTERED && a.row_clusters && wanted ? a.row_clusters[row] : 0;
      const bool known = s.cluster < a.clusters;
      if (!known) {
        s.length = NO_ROW;
        s.cluster = 0;  // whose profile is there to be looked at
      }
      fetched[TILE_ROWS > 32 ? mine * 32 + lane : lane - from] = s;
      if (wanted && !(agrees && known)) report(a.mailbox, ERROR_DAMAGED, row, 0, a.n_rows);
    }
  }
  if (STAGED && sound) copy_words(stage, run.words, origin, begin, end, threadIdx.x, 32 * WARPS);
}

template <bool STAGED, int LANES, int TILE_ROWS>
__device__ __forceinline__ void decode_all(const Args& a, const Run& run, u32* shared) {
  __shared__ TileRow fetched[2][TILE_ROWS];
  __shared__ int part_bits[WARPS];
  const i64 first = run.row_begin / a.tile_rows;
  const i64 last = (run.row_begin + run.n - 1) / a.tile_rows;
  const Kept kept = prepare<LANES>(a);
  // The turn before a block's first tile only fetches it.
  const i64 begin = first + blockIdx.x;
  int half = 0;
  for (i64 tile = begin - gridDim.x; tile <= last; tile += gridDim.x) {
    if (STAGED) copy_async_wait<0>();
    // Behind this barrier the tile is there, and no warp looks at the one before it any more.
    __syncthreads();
    const i64 next = tile + gridDim.x;
    if (next <= last)
      fetch_run<STAGED, TILE_ROWS>(a, run, next, fetched[half ^ 1], shared + (half ^ 1) * a.stage_words);
    if (STAGED) copy_async_commit();
    if (tile >= begin)
      decode_tile<STAGED, LANES>(a, kept, tile * a.tile_rows - run.row_begin, fetched[half],
                                 shared + half * a.stage_words, part_bits);
    half ^= 1;
  }
}

// Of n_rows rows those that hold value_bytes; all without. In a chain of codecs the device alone knows them.
__device__ __forceinline__ i64 rows_present(const u64* value_bytes, int row_bytes, i64 n_rows) {
  if (value_bytes == nullptr) return n_rows;
  const u64 present = *value_bytes / (u32)row_bytes + (*value_bytes % (u32)row_bytes != 0);
  return (u64)n_rows < present ? n_rows : (i64)present;
}

#define DECODE_PARAMETERS                                                                                        \
  const u32 *__restrict__ words, i64 n_words, const i64 *__restrict__ bases, const void *__restrict__ lengths,    \
      int length_bytes, i64 row_begin, i64 n, const u8 *__restrict__ row_clusters,                                \
      const chunk_t *__restrict__ tables, const int *__restrict__ starts, i64 n_rows, int chunks, int row_words,  \
      int row_bytes, int clusters, int tile_rows, int stride_words, int stage_words, int longest_words,           \
      const u64 *value_bytes, u8 *__restrict__ out, i64 *mailbox
// What is counted takes registers that the others, whose kernels spill none, do not have.
#if COUNTED
#define COUNT_ROWS                                                                                                \
  const i64 present = rows_present(value_bytes, row_bytes, n_rows);                                                \
  if (present <= row_begin) return;                                                                               \
  const i64 count = min(n, present - row_begin);
#else
#define COUNT_ROWS const i64 present = n_rows, count = n;
#endif
#define DECODE_BODY(STAGED, LANES, TILE_ROWS)                                                                     \
  extern __shared__ __align__(128) u32 shared[];                                                                  \
  COUNT_ROWS                                                                                                      \
  const Args a = {row_clusters, tables,    starts,     present,     chunks, row_words, row_bytes,                 \
                  clusters,     tile_rows, stride_words, stage_words, longest_words, out, mailbox};                \
  const Run run = {words, n_words, bases, lengths, length_bytes, row_begin, count};                               \
  decode_all<STAGED, LANES, TILE_ROWS>(a, run, shared);

// Rows whose tiles fit the stage.
extern "C" __global__ void __launch_bounds__(32 * WARPS, MIN_BLOCKS) decode_rows(DECODE_PARAMETERS) {
  DECODE_BODY(true, 32, 32)
}
// Rows longer than the stage: read where they are.
extern "C" __global__ void __launch_bounds__(32 * WARPS, MIN_BLOCKS) decode_long_rows(DECODE_PARAMETERS) {
  DECODE_BODY(false, 32, 32)
}
#if VECTOR >= 4
// Short rows: eight lanes a row, four rows a warp at once, in tiles of at least 32.
extern "C" __global__ void __launch_bounds__(32 * WARPS, MIN_BLOCKS) decode_short_rows(DECODE_PARAMETERS) {
  DECODE_BODY(true, 8, MAX_TILE_ROWS)
}
#endif
