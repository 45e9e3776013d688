// Packing the rows of a whole tensor in one pass; PackedLayout in blob_format.py says where the parts are.
// A block of threads packs 32 rows in shared memory, a warp some of them back to back, and learns where
// they go from the sizes of the blocks before it: rows are read once, and nobody waits for their sizes.
#include "bits.cuh"
#include "blob.cuh"
#include "encode.cuh"

#define WARPS 8
#define WARP_ROWS (32 / WARPS)

__device__ __forceinline__ void store_length(void* lengths, int length_bytes, i64 row, u32 length) {
  if (length_bytes == 1) ((u8*)lengths)[row] = (u8)length;
  else if (length_bytes == 2) ((unsigned short*)lengths)[row] = (unsigned short)length;
  else ((u32*)lengths)[row] = length;
}
__device__ __forceinline__ void clear_bytes(u8* from, i64 count) {
  for (i64 i = threadIdx.x; i < count; i += 32 * WARPS) from[i] = 0;
}

// A warp has warp_words of shared memory: for its rows, and for what the last of them takes beyond row_words
// before that is known. With value_bytes only the rows that hold so many bytes are there, and the header but
// for the used bytes is written by others; else tail_bytes follow the rows. states as in zvc.cu.
extern "C" __global__ void __launch_bounds__(32 * WARPS, MIN_BLOCKS)
    pack_blob(const stored_t* __restrict__ rows, i64 n_rows, int chunks, int row_words, int row_bytes, int tail_bytes,
              const u64* value_bytes, const chunk_t* __restrict__ tables, const int* __restrict__ starts,
              int warp_words, i64 elements, int element_bytes, int form, i64 lengths_at, int length_bytes,
              i64 bases_at, i64 tail_at, i64 words_at, u8* data, u64* states) {
  extern __shared__ __align__(128) u32 shared[];
  __shared__ u8 codes[1 << MOST_FIELD_BITS];
  __shared__ u32 counts[WARPS];
  __shared__ u32 first_word;
  __shared__ i64 taken;
  const Field f = find_field(tables, 1, codes);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  void* const lengths = data + lengths_at;
  i64* const bases = (i64*)(data + bases_at);
  u32* const words = (u32*)(data + words_at);
  u32* const stage = shared + warp * warp_words;
  for (int j = lane; j < warp_words; j += 32) stage[j] = 0;
  __syncwarp();
  const i64 blocks = (n_rows + 31) >> 5;
  const i64 present = value_bytes ? min(n_rows, (i64)((*value_bytes + row_bytes - 1) / row_bytes)) : n_rows;
  const i64 filled = (present + 31) >> 5;
  if (blockIdx.x == 0) {  // the bytes between parts, and the tail
    clear_bytes((u8*)lengths + n_rows * length_bytes, bases_at - lengths_at - n_rows * length_bytes);
    clear_bytes((u8*)(bases + blocks + 1), tail_at - bases_at - 8 * (blocks + 1));
    const u8* const tail = (const u8*)rows + n_rows * row_bytes;
    for (int i = threadIdx.x; i < tail_bytes; i += 32 * WARPS) data[tail_at + i] = tail[i];
    clear_bytes(data + tail_at + tail_bytes, words_at - tail_at - tail_bytes);
    if (filled == 0 && threadIdx.x < PAD_WORDS) words[threadIdx.x] = 0;
    if (filled == 0 && threadIdx.x == 0) bases[0] = 0;
  }
  const i64 least = words_at + 4 * PAD_WORDS;  // that are used
  if (filled == 0 && blockIdx.x == 0 && threadIdx.x == 0) {
    if (value_bytes) *(u64*)data = (u64)least;
    else write_header((u32*)data, (u64)least, elements, element_bytes, form, 0);
  }
#if QUADS
  const bool quads = in_quads(rows, chunks);
#endif
  const bool one_each = (i64)gridDim.x >= blocks;  // as in zvc.cu
  i64 block = blockIdx.x;
  while (true) {
    if (!one_each) {
      if (threadIdx.x == 0) taken = (i64)atomicAdd(states, 1ull);
      __syncthreads();
      block = taken;
    }
    if (block >= blocks) return;
    u32 size = 0;  // of the warp's rows
    for (int i = 0; i < WARP_ROWS; ++i) {
      const i64 r = block * 32 + warp * WARP_ROWS + i;
      if (r >= n_rows) break;
      u32 length = 0;
      if (r < present) {
        const stored_t* const row = rows + r * chunks;
        u32* const to = stage + size;
#if QUADS
        if (quads) length = (u32)encode_quads(row, chunks, starts, f, to, lane, ANY_ROW);
        else
#endif
          length = (u32)encode_row(row, chunks, tables, starts, f, to, lane, ANY_ROW);
        size += min(length, (u32)row_words);
        __syncwarp();
        if (length >= (u32)row_words) {
          for (u32 j = lane; j < length; j += 32)
            to[j] = (int)j < row_words ? raw_word((const u8*)row, row_bytes, (int)j) : 0;
          length = 0;
          __syncwarp();
        }
      }
      if (lane == 0) store_length(lengths, length_bytes, r, length);
    }
    if (block >= filled) {  // no rows
      if (threadIdx.x == 0) bases[block + 1] = 0;
      if (one_each) return;
      __syncthreads();
      continue;
    }
    if (lane == 0) counts[warp] = size;
    __syncthreads();
    u32 total = 0, before = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      if (w < warp) before += counts[w];
      total += counts[w];
    }
    if (threadIdx.x == 0) publish_size(states + 1, block, total);
    if (warp == 0) {
      const u32 first = sizes_before(states + 1, block, total, lane);
      if (lane == 0) {
        first_word = first;
        bases[block] = first;
      }
      if (block == filled - 1) {
        const u32 end = first + total;
        if (lane < PAD_WORDS) words[(u64)end + lane] = 0;
        if (lane == 0) {
          bases[filled] = end;
          const u64 used = (u64)least + 4 * (u64)end;
          if (value_bytes) *(u64*)data = used;
          else write_header((u32*)data, used, elements, element_bytes, form, 0);
        }
      }
    }
    __syncthreads();
    u32* const to = words + first_word + before;
    for (u32 j = lane; j < size; j += 32) {
      __stcs(to + j, stage[j]);
      stage[j] = 0;
    }
    if (one_each) return;
    __syncthreads();
  }
}
