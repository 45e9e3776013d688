// What stands around LZ4's blocks in the buffer of a whole tensor (codecs/lz4.py): header, sizes, and the blocks
// one after another, each at a multiple of ALIGN_BYTES. A block of as many bytes as its part of the tensor is that
// part. Others, which know blocks alone, compress and decode them between these kernels.
#include "bits.cuh"
#include "blob.cuh"
#include "mailbox.cuh"

#define PLACE_THREADS 1024
#define COPY_THREADS 256
#define CHECK_THREADS 32

__device__ __forceinline__ i64 aligned_bytes(i64 n) { return (n + ALIGN_BYTES - 1) / ALIGN_BYTES * ALIGN_BYTES; }
// Bytes of the tensor in a block.
__device__ __forceinline__ i64 part_bytes(i64 i, i64 bytes) { return min((i64)PART_BYTES, bytes - i * PART_BYTES); }

// The sum of x over the threads before this one, of a block of PLACE_THREADS; `total` is that of all. Every
// thread calls it.
__device__ __forceinline__ int sum_before(int x, int& total) {
  __shared__ int of_warps[PLACE_THREADS / 32];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int up_to_me = inclusive_scan(x, lane);
  if (lane == 31) of_warps[warp] = up_to_me;
  __syncthreads();
  if (warp == 0) of_warps[lane] = inclusive_scan(of_warps[lane], lane);
  __syncthreads();
  const int before = (warp ? of_warps[warp - 1] : 0) + up_to_me - x;
  total = of_warps[PLACE_THREADS / 32 - 1];
  __syncthreads();
  return before;
}

// Copy bytes between addresses that are multiples of 16. Every thread of the block calls it.
__device__ __forceinline__ void copy_bytes(const u8* __restrict__ from, u8* __restrict__ to, i64 bytes) {
  const i64 pieces = bytes / 16;
  for (i64 j = threadIdx.x; j < pieces; j += COPY_THREADS) ((uint4*)to)[j] = ((const uint4*)from)[j];
  for (i64 j = pieces * 16 + threadIdx.x; j < bytes; j += COPY_THREADS) to[j] = from[j];
}

// One block: header, sizes, and `places`, where each block begins in `data`. `found` are bytes of the compressed
// blocks, `statuses` 0 where they were.
extern "C" __global__ void __launch_bounds__(PLACE_THREADS)
    place_parts(const u64* __restrict__ found, const int* __restrict__ statuses, i64 count, i64 bytes, i64 elements,
                int element_bytes, u8* __restrict__ data, i64* __restrict__ places) {
  u32* const sizes = (u32*)(data + HEADER_BYTES);
  const i64 first = HEADER_BYTES + aligned_bytes(4 * count);
  i64 at = first;
  for (i64 begin = 0; begin < count; begin += PLACE_THREADS) {
    const i64 i = begin + threadIdx.x;
    int size = 0;
    if (i < count) {
      const i64 part = part_bytes(i, bytes);
      size = statuses[i] == 0 && found[i] < (u64)part ? (int)found[i] : (int)part;
      sizes[i] = (u32)size;
    }
    int total;
    const i64 place = at + sum_before((int)aligned_bytes(size), total);
    if (i < count) places[i] = place;
    if (i == count - 1) write_header((u32*)data, (u64)(place + size), elements, element_bytes, LZ4_FORM, 0);
    at += total;
  }
  if (count == 0 && threadIdx.x == 0) write_header((u32*)data, (u64)first, elements, element_bytes, LZ4_FORM, 0);
  if (threadIdx.x < (first - HEADER_BYTES) / 4 - count) sizes[count + threadIdx.x] = 0;
}

// Each block to its place, with zeros up to the next one. `slots` have the compressed blocks, slot_bytes apart.
extern "C" __global__ void __launch_bounds__(COPY_THREADS, 4)
    move_parts(const u8* __restrict__ x, i64 bytes, i64 count, const u8* __restrict__ slots, i64 slot_bytes,
               const i64* __restrict__ places, u8* __restrict__ data) {
  const u32* const sizes = (const u32*)(data + HEADER_BYTES);
  for (i64 i = blockIdx.x; i < count; i += gridDim.x) {
    const i64 size = sizes[i];
    u8* const to = data + places[i];
    copy_bytes(size == part_bytes(i, bytes) ? x + i * PART_BYTES : slots + i * slot_bytes, to, size);
    if (i + 1 < count && size + threadIdx.x < aligned_bytes(size)) to[size + threadIdx.x] = 0;
  }
}

// One block: of each block of the buffer its address and bytes, where its part of the tensor goes, and how many
// bytes that has. Parts that are as they were have their address in `raw`, the others 0. They, and all when the
// buffer is damaged, stand in `sources` as a block of one byte that goes to `spare`, of 32 bytes. data_bytes are
// at least those of header and sizes.
extern "C" __global__ void __launch_bounds__(PLACE_THREADS)
    find_parts(const u8* __restrict__ data, i64 data_bytes, i64 count, i64 bytes, i64 elements, int element_bytes,
               u8* out, u8* spare, u64* __restrict__ sources, u64* __restrict__ packed_bytes, u64* __restrict__ rooms,
               u64* __restrict__ targets, u64* __restrict__ raw, i64* mailbox) {
  const u64* const header = (const u64*)data;
  const u32* const sizes = (const u32*)(data + HEADER_BYTES);
  const i64 first = HEADER_BYTES + aligned_bytes(4 * count);
  const bool known =
      sound_header((const u32*)data, elements, element_bytes, LZ4_FORM, first, data_bytes) && header[3] == 0;
  const i64 used = known ? (i64)header[0] : 0;
  bool bad = !known || (count == 0 && used != first);
  i64 at = first;
  for (i64 begin = 0; begin < count; begin += PLACE_THREADS) {
    const i64 i = begin + threadIdx.x;
    i64 size = 0, part = 0;
    if (i < count) {
      size = sizes[i];
      part = part_bytes(i, bytes);
      if (size == 0 || size > part) {
        bad = true;
        size = 0;
      }
    }
    int total;
    const i64 place = at + sum_before((int)aligned_bytes(size), total);
    at += total;
    if (i < count) {
      if (place + size > used || (i == count - 1 && place + size != used)) bad = true;
      const bool packed = size < part;
      sources[i] = packed ? (u64)(data + place) : (u64)spare;
      packed_bytes[i] = packed ? (u64)size : 2;
      targets[i] = packed ? (u64)(out + i * PART_BYTES) : (u64)(spare + 16);
      rooms[i] = packed ? (u64)part : 16;
      raw[i] = packed ? 0 : (u64)(data + place);
    }
  }
  if (threadIdx.x == 0) {  // a literal, and no match
    spare[0] = 0x10;
    spare[1] = 0;
  }
  if (!__syncthreads_or(bad)) return;
  if (threadIdx.x == 0) report(mailbox, ERROR_BLOB, -1, 0, 0);
  for (i64 i = threadIdx.x; i < count; i += PLACE_THREADS) {
    sources[i] = (u64)spare;
    packed_bytes[i] = 2;
    targets[i] = (u64)(spare + 16);
    rooms[i] = 16;
    raw[i] = 0;
  }
}

// Add the bytes that follow a length of 15 to it; false where they do not end within the block or the length is
// beyond `most`.
__device__ __forceinline__ bool read_length(const u8* __restrict__ block, i64 size, i64& at, i64& length, i64 most) {
  for (int byte = 255; byte == 255;) {
    if (at >= size || length > most) return false;
    byte = block[at++];
    length += byte;
  }
  return true;
}

// Whether a block decodes to exactly `room` bytes, from these alone: the format's own rules.
__device__ __forceinline__ bool sound_block(const u8* __restrict__ block, i64 size, i64 room) {
  i64 at = 0, out = 0;
  while (at < size) {
    const int token = block[at++];
    i64 literals = token >> 4, match = token & 15;
    if (literals == 15 && !read_length(block, size, at, literals, room)) return false;
    if (literals > size - at || literals > room - out) return false;
    at += literals;
    out += literals;
    if (at == size) return out == room;  // the last sequence has no match
    if (size - at < 2) return false;
    const i64 offset = block[at] | block[at + 1] << 8;
    at += 2;
    if (offset == 0 || offset > out) return false;
    if (match == 15 && !read_length(block, size, at, match, room)) return false;
    match += 4;
    if (match > room - out) return false;
    out += match;
  }
  return false;
}

// A thread a block: the decoder writes beyond the room of a damaged one, so that it gets none. They are reported,
// and become the block of one byte, as in find_parts.
extern "C" __global__ void __launch_bounds__(CHECK_THREADS)
    check_parts(i64 count, u8* spare, u64* __restrict__ sources, u64* __restrict__ packed_bytes,
                u64* __restrict__ rooms, u64* __restrict__ targets, i64* mailbox) {
  const i64 i = (i64)blockIdx.x * CHECK_THREADS + threadIdx.x;
  if (i >= count || sources[i] == (u64)spare) return;
  if (sound_block((const u8*)sources[i], (i64)packed_bytes[i], (i64)rooms[i])) return;
  report(mailbox, ERROR_BLOB, i, 0, 0);
  sources[i] = (u64)spare;
  packed_bytes[i] = 2;
  targets[i] = (u64)(spare + 16);
  rooms[i] = 16;
}

// The parts that are as they were, and whether the others were decoded. `found` and `statuses` are of the decoder.
extern "C" __global__ void __launch_bounds__(COPY_THREADS, 4)
    finish_parts(i64 count, i64 bytes, const u64* __restrict__ found, const int* __restrict__ statuses,
                 const u64* __restrict__ rooms, const u64* __restrict__ targets, const u64* __restrict__ raw,
                 const u8* spare, u8* out, i64* mailbox) {
  for (i64 i = blockIdx.x; i < count; i += gridDim.x) {
    if (raw[i]) copy_bytes((const u8*)raw[i], out + i * PART_BYTES, part_bytes(i, bytes));
    else if (threadIdx.x == 0 && targets[i] != (u64)(spare + 16) && (statuses[i] != 0 || found[i] != rooms[i]))
      report(mailbox, ERROR_BLOB, i, 0, 0);
  }
}
