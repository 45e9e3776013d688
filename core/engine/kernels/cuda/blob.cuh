// What forms of whole tensors share: the header of a buffer (blob_format.py), and the prefix sum of
// sizes that blocks of threads make while they run.
__device__ __forceinline__ void write_header(u32* data, u64 used, i64 elements, int element_bytes, int form,
                                             u64 value_bytes) {
  ((u64*)data)[0] = used;
  ((u64*)data)[1] = (u64)elements;
  data[4] = (u32)form;
  data[5] = (u32)element_bytes;
  ((u64*)data)[3] = value_bytes;
}
// Whether a header is that of such a tensor; `used` lies between what every buffer has and its bytes.
__device__ __forceinline__ bool sound_header(const u32* data, i64 elements, int element_bytes, int form, i64 least,
                                             i64 bytes) {
  const u64 used = ((const u64*)data)[0];
  return used >= (u64)least && used <= (u64)bytes && ((const u64*)data)[1] == (u64)elements &&
         data[4] == (u32)form && data[5] == (u32)element_bytes;
}

// Decoupled look-back (Merrill and Garland 2016). The state of a block is 0 until its size is known, then
// OWN_SIZE with its size, then ALL_SIZES with the sum of its size and those of all blocks before it. States
// are one 64-bit word each, so nothing else has to be ordered with them.
#define OWN_SIZE (1ull << 62)
#define ALL_SIZES (2ull << 62)

__device__ __forceinline__ void publish_size(u64* states, i64 block, u32 size) {
  *(volatile u64*)(states + block) = (block == 0 ? ALL_SIZES : OWN_SIZE) | size;
}
// The sum of the sizes of the blocks before; called by a whole warp, when the block's own size is published.
// Sums are less than 2^32. Blocks before this one must be running, or done.
__device__ __forceinline__ u32 sizes_before(u64* states, i64 block, u32 size, int lane) {
  if (block == 0) return 0;
  u32 before = 0;
  for (i64 at = block - 1 - lane;; at -= 32) {
    u64 state;
    u32 whole, needed;
    while (true) {
      state = at >= 0 ? *(volatile u64*)(states + at) : ALL_SIZES;
      whole = __ballot_sync(FULL, (state >> 62) == 2);
      needed = whole ? (whole & (~whole + 1)) - 1 : FULL;  // the lanes behind the nearest sum
      if ((__ballot_sync(FULL, state == 0) & needed) == 0) break;
      __nanosleep(32);
    }
    const bool counts = (needed >> lane & 1) || (whole && lane == __ffs(whole) - 1);
    before += __reduce_add_sync(FULL, counts ? (u32)state : 0);
    if (whole) break;
  }
  if (lane == 0) *(volatile u64*)(states + block) = ALL_SIZES | (before + size);
  return before;
}
