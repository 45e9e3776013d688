// Zero-value compression of whole tensors; ZvcLayout in blob_format.py says where the parts are. A block
// of threads takes BLOCK_BYTES of the tensor, a warp a run of them, 32 neighbours at a step: a ballot is
// then a word of the bitmap, and what is loaded and stored is coalesced at any address.
#include "bits.cuh"
#include "blob.cuh"
#include "mailbox.cuh"

#define WARPS (THREADS / 32)
#define BLOCK_UNITS (BLOCK_BYTES / CHUNK_BYTES)
#define WARP_UNITS (BLOCK_UNITS / WARPS)
#define STEPS (WARP_UNITS / 32)  // of a warp, at most 32: a lane keeps the word of a step
#define ALIGN_UNITS (ALIGN_BYTES / CHUNK_BYTES)

// Pieces of ALIGN_BYTES that values take.
__device__ __forceinline__ u32 pieces_of(u32 count) { return (count + ALIGN_UNITS - 1) / ALIGN_UNITS; }

// Words up to a multiple of ALIGN_BYTES.
__device__ __forceinline__ i64 aligned_words(i64 n) {
  const int step = ALIGN_BYTES / 4;
  return (n + step - 1) / step * step;
}

// The values of the warps before this one, and those of all.
__device__ __forceinline__ u32 values_before(const u32* counts, int warp, u32& total) {
  u32 before = 0;
  total = 0;
#pragma unroll 4
  for (int w = 0; w < WARPS; ++w) {
    if (w < warp) before += counts[w];
    total += counts[w];
  }
  return before;
}

// The values go to `values`, and behind the last ones zeros up to a multiple of fill_bytes, of ALIGN_BYTES.
// states[0] counts the blocks that were taken, where there are more than the grid has; the others are those
// of the look-back. All are 0 at the start.
extern "C" __global__ void __launch_bounds__(THREADS, ENCODE_BLOCKS)
    encode_zvc(const stored_t* __restrict__ x, i64 units, i64 blocks, i64 elements, int element_bytes, int form,
               i64 starts_at, i64 bitmap_at, i64 values_at, int fill_bytes, u32* __restrict__ data,
               uint4* __restrict__ values, u64* states) {
  __shared__ __align__(16) stored_t stage[BLOCK_UNITS];
  __shared__ u32 counts[WARPS];
  __shared__ u32 first_piece;
  __shared__ i64 taken;
  u32* const starts = data + starts_at / 4;
  u32* const bitmap = data + bitmap_at / 4;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const u32 below = (1u << lane) - 1;
  if (blocks == 0 && blockIdx.x == 0 && threadIdx.x == 0)
    write_header(data, (u64)values_at, elements, element_bytes, form, 0);
  // Blocks of a grid start in order. Those of a smaller one are taken in order, so that each waits only for
  // such as are running.
  const bool one_each = (i64)gridDim.x >= blocks;
  i64 block = blockIdx.x;
  while (true) {
    if (!one_each) {
      if (threadIdx.x == 0) taken = (i64)atomicAdd(states, 1ull);
      __syncthreads();
      block = taken;
    }
    if (block >= blocks) return;
    const i64 first = block * BLOCK_UNITS + warp * WARP_UNITS;
    const i64 left = units - first;
    stored_t v[STEPS];
    if (left >= WARP_UNITS) {
#pragma unroll
      for (int j = 0; j < STEPS; ++j) v[j] = __ldcs(x + first + 32 * j + lane);
    } else {
#pragma unroll
      for (int j = 0; j < STEPS; ++j) {
        v[j] = 0;
        if (32 * j + lane < left) v[j] = __ldcs(x + first + 32 * j + lane);
      }
    }
    u32 word = 0;  // of the step with the lane's number
    bool others = false;
#pragma unroll
    for (int j = 0; j < STEPS; ++j) {
      const u32 found = __ballot_sync(FULL, v[j] != 0);
      if (lane == j) word = found;
      if (CHUNK_BYTES == 1) others = others || v[j] > 1;
    }
    if (lane < STEPS && 32 * lane < left) bitmap[first / 32 + lane] = word;
    const u32 count = __reduce_add_sync(FULL, (u32)__popc(word));
    if (lane == 0) counts[warp] = count;
    const bool ones = !__syncthreads_or(others) && CHUNK_BYTES == 1;
    u32 total;
    u32 at = values_before(counts, warp, total);
    const bool flagged = ones && total != 0;
    const u32 pieces = flagged ? 0 : pieces_of(total);
    if (threadIdx.x == 0) publish_size(states + 1, block, pieces);
    if (pieces) {
#pragma unroll
      for (int j = 0; j < STEPS; ++j) {
        const u32 found = __ballot_sync(FULL, v[j] != 0);
        if (v[j] != 0) stage[at + __popc(found & below)] = v[j];
        at += __popc(found);
      }
      // Up to the end of the last piece.
      if (threadIdx.x < ALIGN_UNITS && total + threadIdx.x < pieces * ALIGN_UNITS) stage[total + threadIdx.x] = 0;
    }
    if (warp == 0) {
      const u32 before = sizes_before(states + 1, block, pieces, lane);
      if (lane == 0) {
        first_piece = before;
        starts[block] = flagged ? before | ONES : before;
        if (block == blocks - 1) {
          const u64 value_bytes = (u64)(before + pieces) * ALIGN_BYTES;
          // A bitmap that comes first ends the buffer where there are no values.
          const i64 used = value_bytes || starts_at < bitmap_at ? values_at + (i64)value_bytes : starts_at;
          write_header(data, (u64)used, elements, element_bytes, form, value_bytes);
        }
      }
      if (block == blocks - 1) {  // the zeros up to the next part
        const i64 words = (units + 31) / 32;
        if (blocks + lane < aligned_words(blocks)) starts[blocks + lane] = 0;
        if (words + lane < aligned_words(words)) bitmap[words + lane] = 0;
      }
    }
    __syncthreads();
    uint4* const to = values + first_piece;
    for (u32 i = threadIdx.x; i < pieces; i += THREADS) __stcs(to + i, ((const uint4*)stage)[i]);
    if (block == blocks - 1) {
      const u32 end = first_piece + pieces, fill = fill_bytes / ALIGN_BYTES;
      for (u32 i = end + threadIdx.x; i < (end + fill - 1) / fill * fill; i += THREADS)
        values[i] = make_uint4(0, 0, 0, 0);
    }
    if (one_each) return;
    __syncthreads();
  }
}

// data_bytes are at least values_at, or starts_at where the bitmap comes first. `values` lie behind it in `data`,
// or, as many bytes as value_room, elsewhere. A damaged block is reported, and its part of `out` is left as it is.
extern "C" __global__ void __launch_bounds__(THREADS, DECODE_BLOCKS)
    decode_zvc(const u32* __restrict__ data, i64 data_bytes, i64 units, i64 blocks, i64 elements, int element_bytes,
               int form, i64 starts_at, i64 bitmap_at, i64 values_at, const u8* __restrict__ values, i64 value_room,
               stored_t* __restrict__ out, i64* mailbox) {
  __shared__ u32 counts[WARPS];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const u32 below = (1u << lane) - 1;
  const u64 value_bytes = ((const u64*)data)[VALUE_BYTES_AT / 8];
  bool bare = false;  // bits alone, with no starts
  if (CHUNK_BYTES == 1 && starts_at > bitmap_at) {
    if (data[4] == ZVC_FORM) {  // of an earlier version
      form = ZVC_FORM;
      bitmap_at = HEADER_BYTES + values_at - starts_at;
      starts_at = HEADER_BYTES;
    } else {
      bare = value_bytes == 0;
    }
  }
  const i64 least = bare ? starts_at : values_at;
  const u32* const starts = data + starts_at / 4;
  const u32* const bitmap = data + bitmap_at / 4;
  const bool here_too = values == (const u8*)data + values_at;
  const bool known = sound_header(data, elements, element_bytes, form, least, data_bytes) &&
                     value_bytes <= (u64)value_room && value_bytes % ALIGN_BYTES == 0 &&
                     (!here_too || ((const u64*)data)[0] == (u64)least + value_bytes);
  const u64 pieces = known ? value_bytes / ALIGN_BYTES : 0;
  if (blocks == 0 && (!known || value_bytes) && blockIdx.x == 0 && threadIdx.x == 0)
    report(mailbox, ERROR_BLOB, -1, 0, 0);
  // What is loaded below does not wait for the header.
  const bool no_starts = CHUNK_BYTES == 1 && (bare || data_bytes < values_at);
  for (i64 block = blockIdx.x; block < blocks; block += gridDim.x) {
    const i64 first = block * BLOCK_UNITS + warp * WARP_UNITS;
    const i64 left = units - first;
    const u32 given = no_starts ? ONES : starts[block];
    const u32 following = !no_starts && block + 1 < blocks ? starts[block + 1] : 0;
    const u64 next = block + 1 == blocks ? pieces : CHUNK_BYTES == 1 ? following & ~ONES : following;
    u32 word = 0;
    if (lane < STEPS && 32 * lane < left) word = bitmap[first / 32 + lane];
    // Bits of elements behind the last one.
    const i64 here = left - 32 * lane;
    const bool stray = here > 0 && here < 32 && word >> here;
    const int count = __popc(word);
    const int up_to_me = inclusive_scan(count, lane);
    if (lane == 31) counts[warp] = (u32)up_to_me;
    const bool strays = __syncthreads_or(stray);
    u32 total;
    const u32 before = values_before(counts, warp, total);
    const bool ones = CHUNK_BYTES == 1 && given >= ONES;
    const u64 start = ones ? given & ~ONES : given;
    const u64 end = start + (ones ? 0 : pieces_of(total));
    if (!known || strays || end != next || end > pieces || (block == 0 && start != 0)) {
      if (threadIdx.x == 0) report(mailbox, ERROR_BLOB, known ? block : -1, 0, 0);
    } else {
      const stored_t* const own = (const stored_t*)(values + start * ALIGN_BYTES);
      stored_t v[STEPS];
#pragma unroll
      for (int j = 0; j < STEPS; ++j) {
        const u32 bits = __shfl_sync(FULL, word, j);
        const u32 at = before + (u32)__shfl_sync(FULL, up_to_me - count, j) + __popc(bits & below);
        v[j] = 0;
        if (bits >> lane & 1) v[j] = ones ? (stored_t)1 : __ldg(own + at);
      }
#pragma unroll
      for (int j = 0; j < STEPS; ++j)
        if (32 * j + lane < left) out[first + 32 * j + lane] = v[j];
    }
    __syncthreads();
  }
}
