// Rows as kernels that encode them compare them, and the distinct ones as they write them. Needs
// vector_draft.cuh.
// What rows are compared by: codes, two at once where a row has an even number, or the bits of numbers.
struct Rows {
  const short* codes;  // null: numbers
  const stored_t* numbers;
  i64 units;           // of a row
  bool paired;
  __device__ __forceinline__ u64 unit(i64 row, i64 at) const {
    if (codes == nullptr) return numbers[row * units + at];
    return paired ? ((const u32*)codes)[row * units + at] : (unsigned short)codes[row * units + at];
  }
  // Whether a unit has no code.
  __device__ __forceinline__ bool outlies(u64 unit) const {
    if (codes == nullptr) return false;
    return (unit & CODE_MASK_16) == NO_CODE_BITS || (paired && unit >> 16 == NO_CODE_BITS);
  }
};
__device__ __forceinline__ Rows rows_of(const Chunk& chunk, const Draft& draft) {
  const bool coded = is_coded(chunk, draft), paired = coded && chunk.row % 2 == 0;
  return Rows{coded ? (const short*)chunk.symbols : nullptr, (const stored_t*)chunk.values,
              paired ? chunk.row / 2 : chunk.row * parts_of(chunk), paired};
}
__device__ __forceinline__ u32 mixed(u64 unit, i64 at) {
  u32 x = (u32)unit * 0x9E3779B1u ^ (u32)(unit >> 32) * 0x85EBCA77u ^ ((u32)at + 1) * 0xC2B2AE3Du;
  x ^= x >> 15;
  x *= 0x27D4EB2Fu;
  return x ^ x >> 13;
}

// The distance back to the nearest equal row of a window, 0: there is none. Called by a whole warp.
__device__ u32 distance_back(const Rows& rows, const u32* hashes, i64 i, i64 window) {
  const int lane = threadIdx.x & 31;
  const u32 hash = hashes[i];
  if (hash == MARKED) return 0;
  for (i64 back = 1; back <= window && back <= i; back += 32) {
    const i64 apart = back + lane;
    u32 alike = __ballot_sync(FULL, apart <= window && apart <= i && hashes[apart <= i ? i - apart : 0] == hash);
    for (; alike; alike &= alike - 1) {
      const i64 other = i - back - (__ffs((int)alike) - 1);
      bool differs = false;
      for (i64 k = lane; k < rows.units; k += 32) differs = differs || rows.unit(i, k) != rows.unit(other, k);
      if (!__any_sync(FULL, differs)) return (u32)(i - other);
    }
  }
  return 0;
}

// Numbers of the distinct rows by their place among them.
struct Kept {
  const u32* literals;  // null: every row is one
  const short* codes;   // null: numbers
  const stored_t* numbers;
  u32 row, least;
  i64 count;
  __device__ __forceinline__ i64 source(i64 place) const {
    if (literals == nullptr) return place;
    const u32 distinct = (u32)place / row;
    return (i64)literals[distinct] * row + ((u32)place - distinct * row);
  }
  __device__ __forceinline__ u32 symbol(i64 place) const {
    const i64 at = source(place);
    if (codes == nullptr) return (u32)(numbers[at] >> (CHUNK_BITS - 8));
    const int code = codes[at];
    return code == NO_CODE ? 0 : (u32)(code - (int)least);
  }
};
__device__ __forceinline__ Kept kept_of(const Chunk& chunk, const Draft& draft) {
  const i64 row = chunk.row * parts_of(chunk);
  return Kept{draft.references == REFERENCES_NONE ? nullptr : (const u32*)chunk.ranks,
              is_coded(chunk, draft) ? (const short*)chunk.symbols : nullptr,
              (const stored_t*)chunk.values,
              (u32)row,
              (u32)draft.least,
              (i64)draft.distinct * row};
}

// The symbols of the distinct rows' code, 0: too many for one.
__device__ __forceinline__ int symbols_of(const Chunk& chunk, const Draft& draft) {
  if (chunk.flags & FLAG_NO_HUFFMAN) return 0;
  if (!is_coded(chunk, draft)) return BYTE_SYMBOLS;
  const int symbols = draft.largest - draft.least + 1;
  return symbols <= MOST_SYMBOLS ? symbols : 0;
}

// Write numbers, and zeros up to a word; by all blocks of a chunk.
__device__ __forceinline__ void write_numbers(const Kept& kept, u8* out, i64 me, i64 stride) {
  for (i64 k = me; k < kept.count; k += stride) {
    const stored_t number = kept.numbers[kept.source(k)];
#if CHUNK_BYTES == 8
    ((u32*)out)[2 * k] = (u32)number;
    ((u32*)out)[2 * k + 1] = (u32)(number >> 32);
#else
    ((stored_t*)out)[k] = number;
#endif
  }
  if (me == 0)
    for (i64 k = kept.count * CHUNK_BYTES; k % 4; ++k) out[k] = 0;
}
