// Packed sizes and packing, one warp a row.
#include "bits.cuh"
#include "encode.cuh"

extern "C" __global__ void __launch_bounds__(256) packed_words(
    const stored_t* __restrict__ rows, i64 n_rows, int chunks, int row_words, int clusters,
    const chunk_t* __restrict__ tables, const int* __restrict__ starts, void* __restrict__ lengths,
    int length_bytes, u8* __restrict__ row_clusters) {
  __shared__ u8 codes[1 << MOST_FIELD_BITS];
  const Field f = find_field(tables, clusters, codes);
  const int lane = threadIdx.x & 31;
  const bool wide = ((u64)rows & 15) == 0 && chunks % WIDE == 0;
  const i64 warps = ((i64)gridDim.x * blockDim.x) >> 5;
  for (i64 r = ((i64)blockIdx.x * blockDim.x + threadIdx.x) >> 5; r < n_rows; r += warps) {
    const stored_t* row = rows + r * chunks;
    int cluster;
    const int best = measure_best(row, chunks, row_words, clusters, tables, starts, f, wide, lane, cluster);
    if (lane == 0) {
      const u32 length = best < row_words ? best : 0;
      if (length_bytes == 1) ((u8*)lengths)[r] = (u8)length;
      else if (length_bytes == 2) ((unsigned short*)lengths)[r] = (unsigned short)length;
      else ((u32*)lengths)[r] = length;
      if (row_clusters) row_clusters[r] = (u8)cluster;
    }
  }
}

// `words` is zeroed. Rows of at most stage_words words are put together in shared memory, longer
// ones (stage_words = 0) in place.
extern "C" __global__ void __launch_bounds__(256, 4) encode_rows(
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
  const bool quads = in_quads(rows, chunks);
#endif
  for (int j = lane; j < stage_words; j += 32) stage[j] = 0;
  __syncwarp();
  for (i64 r = ((i64)blockIdx.x * blockDim.x + threadIdx.x) >> 5; r < n_rows; r += warps) {
    const i64 block = r >> 5;
    const i64 peer = block * 32 + lane;
    const u32 length_of_peer = peer < n_rows ? load_length(lengths, peer, length_bytes) : 0;
    const u32 before = lane < (int)(r & 31) ? (length_of_peer ? length_of_peer : row_words) : 0;
    const i64 at = bases[block] + __reduce_add_sync(FULL, before);
    const int length = __shfl_sync(FULL, length_of_peer, (int)(r & 31));
    const stored_t* row = rows + r * chunks;
    if (length == 0) {
      for (int j = lane; j < row_words; j += 32) words[at + j] = raw_word((const u8*)row, row_bytes, j);
      continue;
    }
    const i64 cluster = row_clusters ? row_clusters[r] : 0;
    const chunk_t* table = tables + cluster * SECTIONS * positions;
    const int* start = starts + cluster * (positions + 1);
    if (stage_words == 0) {
      encode_row(row, chunks, table, start, f, words + at, lane);
      continue;
    }
#if QUADS
    if (quads) encode_quads(row, chunks, start, f, stage, lane);
    else
#endif
      encode_row(row, chunks, table, start, f, stage, lane);
    __syncwarp();
    for (int j = lane; j < length; j += 32) {
      words[at + j] = stage[j];
      stage[j] = 0;
    }
    __syncwarp();
  }
}
