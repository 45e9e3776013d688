// Offsets of bags as kernels get them: int32 or int64, offset_bytes says which. Needs bits.cuh and ids.cuh.

// Whether offset b of `entries`, all but the last the begin of a bag and that one too unless it is the
// end, is what it can be after the one before it.
__device__ __forceinline__ bool sound_offset(i64 before, i64 offset, i64 b, i64 entries, i64 n, bool last_is_end) {
  if (b == 0 && offset != 0) return false;
  if (last_is_end && b == entries - 1 && offset != n) return false;
  return before <= offset && offset <= n;
}

// Copy the offsets that a thread gets by `begin` and `stride`. first_bad, all ones: gets the position of the
// first that is not sound.
__device__ __forceinline__ void copy_offsets(const void* __restrict__ offsets, int offset_bytes, i64 entries, i64 n,
                                             bool last_is_end, i64* __restrict__ out, u64* first_bad, i64 begin,
                                             i64 stride) {
  for (i64 b = begin; b < entries; b += stride) {
    const i64 offset = load_id(offsets, b, offset_bytes);
    const i64 before = b ? load_id(offsets, b - 1, offset_bytes) : 0;
    out[b] = offset;
    if (!sound_offset(before, offset, b, entries, n, last_is_end)) atomicMin(first_bad, (u64)b);
  }
}

// Give each bag but the last one no id; `begin` and `stride` as for copy_offsets.
__device__ __forceinline__ void empty_bags(i64 entries, i64 n, bool last_is_end, i64* out, i64 begin, i64 stride) {
  for (i64 b = begin; b < entries; b += stride) out[b] = last_is_end && b == entries - 1 ? n : 0;
}
