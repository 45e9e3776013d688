// Packed sizes and packing, one warp a row.
#include "bits.cuh"
#include "encode.cuh"
#include "words.cuh"
#include "encode_words.cuh"

extern "C" __global__ void __launch_bounds__(256) packed_words(
    const stored_t* __restrict__ rows, i64 n_rows, int chunks, int row_words, int clusters,
    const chunk_t* __restrict__ tables, const int* __restrict__ starts, void* __restrict__ lengths,
    int length_bytes, u8* __restrict__ row_clusters) {
  __shared__ u8 codes[1 << MOST_FIELD_BITS];
  const Field f = find_field(tables, clusters, codes);
  const int lane = threadIdx.x & 31;
  const bool wide = ((u64)rows & 15) == 0 && chunks % WIDE == 0;
#if WORDS
  const Words q = load_words(tables);
  find_codes(tables, q, f, codes);
#endif
  const i64 warps = ((i64)gridDim.x * blockDim.x) >> 5;
  for (i64 r = ((i64)blockIdx.x * blockDim.x + threadIdx.x) >> 5; r < n_rows; r += warps) {
    const stored_t* row = rows + r * chunks;
    int cluster = 0, best;
#if WORDS
    if (wide) best = measure_by_words(row, chunks, starts, q, codes, lane);
    else
#endif
      best = measure_best(row, chunks, row_words, clusters, tables, starts, f, wide, lane, cluster);
    if (lane == 0) {
      const u32 length = best < row_words ? best : 0;
      if (length_bytes == 1) ((u8*)lengths)[r] = (u8)length;
      else if (length_bytes == 2) ((unsigned short*)lengths)[r] = (unsigned short)length;
      else ((u32*)lengths)[r] = length;
      if (row_clusters) row_clusters[r] = (u8)cluster;
    }
  }
}

#if QUADS
#define PACK_ROW(to)                                                          \
  if (wide) encode_quads(row, chunks, start, f, to, lane, length);            \
  else encode_row(row, chunks, table, start, f, to, lane, length)
#elif WORDS
#define PACK_ROW(to)                                                          \
  if (wide) encode_by_words(row, chunks, start, q, codes, to, lane, length);  \
  else encode_row(row, chunks, table, start, f, to, lane, length)
#else
#define PACK_ROW(to) encode_row(row, chunks, table, start, f, to, lane, length)
#endif

// Rows of at most stage_words words are put together in shared memory, longer ones (stage_words = 0) in
// place: then `words` is zeroed.
extern "C" __global__ void __launch_bounds__(256, MIN_BLOCKS) encode_rows(
    const stored_t* __restrict__ rows, i64 n_rows, int chunks, int row_words, int row_bytes, int clusters,
    const chunk_t* __restrict__ tables, const int* __restrict__ starts, const void* __restrict__ lengths,
    int length_bytes, const u8* __restrict__ row_clusters, const i64* __restrict__ bases, u32* __restrict__ words,
    int stage_words) {
  extern __shared__ __align__(128) u32 shared[];
  __shared__ u8 codes[1 << MOST_FIELD_BITS];
  const Field f = find_field(tables, clusters, codes);
  const int lane = threadIdx.x & 31;
  const int positions = UNIFORM ? 1 : chunks;
  u32* stage = shared + (threadIdx.x >> 5) * stage_words;
  const i64 warps = ((i64)gridDim.x * blockDim.x) >> 5;
#if QUADS
  const bool wide = in_quads(rows, chunks);
#endif
#if WORDS
  const bool wide = ((u64)rows & 15) == 0 && chunks % WIDE == 0;
  const Words q = load_words(tables);
  find_codes(tables, q, f, codes);
#endif
  for (int j = lane; j < stage_words; j += 32) stage[j] = 0;
  __syncwarp();
#if WORDS
  // A warp takes several rows of a block after each other, which it looks at once, if there are enough.
  const int run = 1 << (31 - __clz((int)max((i64)1, min((i64)32, n_rows / (4 * warps)))));
#else
  constexpr int run = 1;
#endif
  int length_of_peer = 0, before = 0;
  for (i64 r = (((i64)blockIdx.x * blockDim.x + threadIdx.x) >> 5) * run; r < n_rows;
       r += (r + 1) & (run - 1) ? 1 : (warps - 1) * run + 1) {
    const i64 block = r >> 5;
    if ((r & (run - 1)) == 0) {
      const i64 peer = block * 32 + lane;
      length_of_peer = peer < n_rows ? load_length(lengths, peer, length_bytes) : 0;
      const int size = length_of_peer ? length_of_peer : row_words;
#if WORDS
      before = inclusive_scan(size, lane) - size;
#else
      before = __reduce_add_sync(FULL, lane < (int)(r & 31) ? size : 0);
#endif
    }
#if WORDS
    const i64 at = bases[block] + __shfl_sync(FULL, before, (int)(r & 31));
#else
    const i64 at = bases[block] + before;
#endif
    const int length = __shfl_sync(FULL, length_of_peer, (int)(r & 31));
    const stored_t* row = rows + r * chunks;
    if (length == 0) {
      for (int k = lane; k < row_words; k += 32) words[at + k] = raw_word((const u8*)row, row_bytes, k);
      continue;
    }
    const i64 cluster = row_clusters ? row_clusters[r] : 0;
    const chunk_t* table = tables + cluster * SECTIONS * positions;
    const int* start = starts + cluster * (positions + 1);
    // Two calls, so that the compiler knows which memory each one stores to.
    if (stage_words == 0) {
      PACK_ROW(words + at);
      continue;
    }
    PACK_ROW(stage);
    __syncwarp();
    for (int k = lane; k < length; k += 32) {
      words[at + k] = stage[k];
      stage[k] = 0;
    }
    __syncwarp();
  }
}

#if SHORT_LANES  // that take a short row, so that a warp has several at once; a byte field's codes are whole groups
#if QUADS
#define PACK_SHORT_ROW encode_quads<SHORT_LANES>(row, chunks, starts, f, stage, lane_of_row, length, packed)
#define MEASURE_SHORT_ROW measure_row<WIDE, SHORT_LANES>(row, chunks, tables, starts, f, lane_of_row, r < n_rows)
#else
#define PACK_SHORT_ROW encode_by_words<SHORT_LANES>(row, chunks, starts, q, codes, stage, lane_of_row, length, packed)
#define MEASURE_SHORT_ROW measure_by_words<SHORT_LANES>(row, chunks, starts, q, codes, lane_of_row, r < n_rows)
#endif
#define SHORT_ROWS (32 / SHORT_LANES)  // of a warp at once

// Rows are aligned to 16 bytes; a byte holds a length.
extern "C" __global__ void __launch_bounds__(256) packed_words_of_short_rows(
    const stored_t* __restrict__ rows, i64 n_rows, int chunks, int row_words, int clusters,
    const chunk_t* __restrict__ tables, const int* __restrict__ starts, void* __restrict__ lengths,
    int length_bytes, u8* __restrict__ row_clusters) {
  __shared__ u8 codes[1 << MOST_FIELD_BITS];
  const Field f = find_field(tables, clusters, codes);
  const int lane = threadIdx.x & 31, lane_of_row = lane % SHORT_LANES;
#if WORDS
  const Words q = load_words(tables);
  find_codes(tables, q, f, codes);
#endif
  const i64 warps = ((i64)gridDim.x * blockDim.x) >> 5;
  const i64 step = warps * SHORT_ROWS;
  for (i64 first = (((i64)blockIdx.x * blockDim.x + threadIdx.x) >> 5) * SHORT_ROWS; first < n_rows; first += step) {
    const i64 r = first + lane / SHORT_LANES;
    const stored_t* row = rows + r * chunks;
    const int best = MEASURE_SHORT_ROW;
    if (lane_of_row == 0 && r < n_rows) ((u8*)lengths)[r] = (u8)(best < row_words ? best : 0);
  }
}

// Rows can be loaded as PACK_SHORT_ROW loads them.
extern "C" __global__ void __launch_bounds__(256, MIN_BLOCKS) encode_short_rows(
    const stored_t* __restrict__ rows, i64 n_rows, int chunks, int row_words, int row_bytes, int clusters,
    const chunk_t* __restrict__ tables, const int* __restrict__ starts, const void* __restrict__ lengths,
    int length_bytes, const u8* __restrict__ row_clusters, const i64* __restrict__ bases, u32* __restrict__ words,
    int stage_words) {
  extern __shared__ __align__(128) u32 shared[];
  __shared__ u8 codes[1 << MOST_FIELD_BITS];
  const Field f = find_field(tables, clusters, codes);
  const int lane = threadIdx.x & 31, lane_of_row = lane % SHORT_LANES;
  u32* stage = shared + threadIdx.x / SHORT_LANES * stage_words;
  const i64 warps = ((i64)gridDim.x * blockDim.x) >> 5;
#if WORDS
  const Words q = load_words(tables);
  find_codes(tables, q, f, codes);
#endif
  for (int k = lane_of_row; k < stage_words; k += SHORT_LANES) stage[k] = 0;
  __syncwarp();
  // Up to 32 rows of a block after each other, which are looked at once, if there are enough.
  const i64 rounds = n_rows / (4 * SHORT_ROWS * warps);
  const int run = SHORT_ROWS << (31 - __clz((int)max((i64)1, min((i64)(32 / SHORT_ROWS), rounds))));
  int length_of_peer = 0, before = 0;
  for (i64 first = (((i64)blockIdx.x * blockDim.x + threadIdx.x) >> 5) * run; first < n_rows;
       first += (first + SHORT_ROWS) & (run - 1) ? SHORT_ROWS : (warps - 1) * run + SHORT_ROWS) {
    const i64 block = first >> 5;
    if ((first & (run - 1)) == 0) {
      const i64 peer = block * 32 + lane;
      length_of_peer = peer < n_rows ? load_length(lengths, peer, length_bytes) : 0;
      const int size = length_of_peer ? length_of_peer : row_words;
      before = inclusive_scan(size, lane) - size;
    }
    const i64 r = first + lane / SHORT_LANES;
    const i64 at = bases[block] + __shfl_sync(FULL, before, (int)(r & 31));
    const int length = __shfl_sync(FULL, length_of_peer, (int)(r & 31));
    const bool packed = r < n_rows && length != 0;
    const stored_t* row = rows + r * chunks;
    if (r < n_rows && length == 0)
      for (int k = lane_of_row; k < row_words; k += SHORT_LANES) words[at + k] = raw_word((const u8*)row, row_bytes, k);
    PACK_SHORT_ROW;
    __syncwarp();
    if (packed)
      for (int k = lane_of_row; k < length; k += SHORT_LANES) {
        words[at + k] = stage[k];
        stage[k] = 0;
      }
    __syncwarp();
  }
}
#endif
