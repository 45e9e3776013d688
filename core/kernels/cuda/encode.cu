// Packed sizes and packing. One warp a row, one lane a chunk, one step a group of 32 chunks.
#include "bits.cuh"

struct Code {
  int code;       // participation code; 1 for chunks behind the end of the row
  chunk_t mask;
};

__device__ __forceinline__ Code code_of(
    chunk_t x, const chunk_t* __restrict__ table, int positions, int i, bool inside) {
  const chunk_t* at = table + (UNIFORM ? 0 : i);
  Code c;
  c.code = 1;
  c.mask = 0;
  if (inside) {
    c.mask = __ldg(at);
    const chunk_t masked = x & c.mask;
    c.code = 0;
#pragma unroll
    for (int j = (int)CODE_MASK; j >= 1; --j)  // downwards, so that the first match wins
      if (masked == __ldg(at + j * positions)) c.code = j;
  }
  return c;
}
__device__ __forceinline__ int payload_words_of(const int* starts, int chunks) {
  return ((UNIFORM ? starts[1] * chunks : starts[chunks]) + 31) >> 5;
}

extern "C" __global__ void __launch_bounds__(256) packed_words(
    const stored_t* __restrict__ rows, i64 n_rows, int chunks, int row_words, int clusters,
    const chunk_t* __restrict__ tables, const int* __restrict__ starts, void* __restrict__ lengths,
    int length_bytes, u8* __restrict__ row_clusters) {
  const int lane = threadIdx.x & 31;
  const int positions = UNIFORM ? 1 : chunks;
  const i64 warps = ((i64)gridDim.x * blockDim.x) >> 5;
  for (i64 r = ((i64)blockIdx.x * blockDim.x + threadIdx.x) >> 5; r < n_rows; r += warps) {
    const stored_t* row = rows + r * chunks;
    int best = row_words, cluster = 0;
    for (int c = 0; c < clusters; ++c) {
      const chunk_t* table = tables + (i64)c * SECTIONS * positions;
      int missed = 0, stored = 0;
      for (int first = 0; first < chunks; first += 32) {
        const int i = first + lane;
        const bool inside = i < chunks;
        const Code p = code_of(inside ? row[i] : 0, table, positions, i, inside);
        if (p.code == 0) missed += POPC(p.mask);
        if (!GROUPED || !__all_sync(FULL, p.code == 1)) ++stored;
      }
      missed = __reduce_add_sync(FULL, missed);
      const int groups = (chunks + 31) >> 5;
      const int words = payload_words_of(starts + (i64)c * (positions + 1), chunks) +
                        (GROUPED ? (groups + 31) >> 5 : 0) + stored * CODE_BITS +
                        ((missed + 31) >> 5);
      if (words < best) {
        best = words;
        cluster = c;
      }
    }
    if (lane == 0) {
      const u32 length = best < row_words ? best : 0;
      if (length_bytes == 1) ((u8*)lengths)[r] = (u8)length;
      else if (length_bytes == 2) ((unsigned short*)lengths)[r] = (unsigned short)length;
      else ((u32*)lengths)[r] = length;
      if (row_clusters) row_clusters[r] = (u8)cluster;
    }
  }
}

// Or the low `count` bits of x, whose other bits are 0, into the zeroed words at `bit`.
__device__ __forceinline__ void put_bits(u32* to, int bit, chunk_t x, int count) {
  if (count == 0) return;
  const int i = bit >> 5, shift = bit & 31;
  atomicOr(to + i, (u32)x << shift);
#if CHUNK_BYTES == 8
  if (shift + count > 32) atomicOr(to + i + 1, (u32)(x >> (32 - shift)));
  if (shift + count > 64) atomicOr(to + i + 2, (u32)(x >> (64 - shift)));
#else
  if (shift + count > 32) atomicOr(to + i + 1, x >> (32 - shift));
#endif
}

// Pack one row into zeroed words.
__device__ void encode_row(const stored_t* __restrict__ row, int chunks,
                           const chunk_t* __restrict__ table, const int* __restrict__ starts,
                           u32* to, int lane) {
  const int positions = UNIFORM ? 1 : chunks;
  const int groups = (chunks + 31) >> 5;
  const int group_at = payload_words_of(starts, chunks);
  const int code_at = group_at + (GROUPED ? (groups + 31) >> 5 : 0);
  int stored = groups;
  if (GROUPED) {  // the exceptions lie behind the codes: count those first
    stored = 0;
    for (int first = 0; first < chunks; first += 32) {
      const int i = first + lane;
      const bool inside = i < chunks;
      const Code p = code_of(inside ? row[i] : 0, table, positions, i, inside);
      if (!__all_sync(FULL, p.code == 1)) ++stored;
    }
  }
  int exception_bit = (code_at + stored * CODE_BITS) * 32;
  int next_code = code_at;
  for (int group = 0; group < groups; ++group) {
    const int i = group * 32 + lane;
    const bool inside = i < chunks;
    const chunk_t x = inside ? row[i] : 0;
    const Code p = code_of(x, table, positions, i, inside);
    const chunk_t* at = table + (UNIFORM || !inside ? 0 : i);
    if (inside) {
      const int bit = UNIFORM ? i * starts[1] : starts[i];
      put_bits(to, bit, extract(x & ~p.mask, at, KEEP_SECTION, positions),
               CHUNK_BITS - POPC(p.mask));
    }
    if (GROUPED && __all_sync(FULL, p.code == 1)) {
      if (lane == 0) atomicOr(to + group_at + (group >> 5), 1u << (group & 31));
      continue;
    }
#if CODE_BITS == 1
    const u32 word = __ballot_sync(FULL, p.code);
    if (lane == 0) to[next_code] = word;
#else
    const int place = lane * CODE_BITS;
#pragma unroll
    for (int w = 0; w < CODE_BITS; ++w) {
      const int shift = place - 32 * w;  // the part of this lane's code that falls into word w
      u32 part = 0;
      if (shift >= 0 && shift < 32) part = (u32)p.code << shift;
      if (shift < 0 && shift > -CODE_BITS) part = (u32)p.code >> -shift;
      part = __reduce_or_sync(FULL, part);
      if (lane == 0) to[next_code + w] = part;
    }
#endif
    next_code += CODE_BITS;
    const int bits = p.code == 0 ? POPC(p.mask) : 0;
    if (__any_sync(FULL, bits)) {
      const int up_to_me = inclusive_scan(bits, lane);
      if (bits)
        put_bits(to, exception_bit + up_to_me - bits,
                 extract(x & p.mask, at, MASK_SECTION, positions), bits);
      exception_bit += __shfl_sync(FULL, up_to_me, 31);
    }
  }
}

// Word j of a raw row; the bytes behind its end are 0.
__device__ __forceinline__ u32 raw_word(const u8* row, int row_bytes, int j) {
  u32 x = 0;
  if (((u64)row & 3) == 0 && 4 * j + 4 <= row_bytes) return ((const u32*)row)[j];
  for (int b = 0; b < 4 && 4 * j + b < row_bytes; ++b) x |= (u32)row[4 * j + b] << (8 * b);
  return x;
}

// `words` is zeroed. Rows of at most stage_words words are put together in shared memory, longer
// ones (stage_words = 0) in place, with atomics.
extern "C" __global__ void __launch_bounds__(256) encode_rows(
    const stored_t* __restrict__ rows, i64 n_rows, int chunks, int row_words, int row_bytes,
    const chunk_t* __restrict__ tables, const int* __restrict__ starts,
    const void* __restrict__ lengths, int length_bytes, const u8* __restrict__ row_clusters,
    const i64* __restrict__ bases, u32* __restrict__ words, int stage_words) {
  extern __shared__ u32 shared[];
  const int lane = threadIdx.x & 31;
  const int positions = UNIFORM ? 1 : chunks;
  u32* stage = shared + (threadIdx.x >> 5) * stage_words;
  const i64 warps = ((i64)gridDim.x * blockDim.x) >> 5;
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
      encode_row(row, chunks, table, start, words + at, lane);
      continue;
    }
    encode_row(row, chunks, table, start, stage, lane);
    __syncwarp();
    for (int j = lane; j < length; j += 32) {
      words[at + j] = stage[j];
      stage[j] = 0;
    }
    __syncwarp();
  }
}
