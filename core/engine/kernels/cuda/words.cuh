// Masks that are applied to whole words of chunks of one or two bytes: a field of at most eight bits, or the
// same field in both bytes of a chunk, of up to four bits or all (`word_field` in tiles.py). Needs bits.cuh.
#if WORDS
struct Words {
  u32 keep, above;            // of all chunks: bits in the payload; bits from the field's lowest on
  u32 packed;                 // of all chunks, or all bytes: as many low bits as are in the payload
  int bits, exception_bits;   // of a chunk
  int first, second;          // how far packed bits move up: the upper half of a word, odd bytes
  int field_bits;             // of a chunk, or of each of its bytes
  uint2 low;                  // the low bytes of the values of codes 0..3 and 4..7
  u32 low_mask;               // the mask's low byte, in byte 1
  int low_left;               // its lowest bit
#if CHUNK_BYTES == 2
  uint2 high;
  u32 high_mask;
  int high_left, high_right;  // where the bits of an exception that are in the high byte go
#endif
};

__device__ __forceinline__ uint2 bytes_of_values(const chunk_t* table, int shift) {
  uint2 b = make_uint2(0, 0);
#pragma unroll
  for (int j = 1; j <= (int)CODE_MASK; ++j) {
    const u32 value = __ldg(table + j) >> shift & 255;
    if (j < 4) b.x |= value << (8 * j);
    else b.y |= value << (8 * (j - 4));
  }
  return b;
}

__device__ __forceinline__ Words load_words(const chunk_t* table) {
  Words q;
  const u32 mask = __ldg(table);
  q.exception_bits = __popc(mask);
  q.bits = CHUNK_BITS - q.exception_bits;
  const int lowest = __ffs(mask) - 1;
  q.low = bytes_of_values(table, 0);
  q.low_left = lowest;
  q.low_mask = (mask & 255) << 8;
#if CHUNK_BYTES == 1
  const u32 all = mask * 0x01010101u;
  q.field_bits = q.exception_bits;
  q.first = 16 - 2 * q.bits;
  q.second = 8 - q.bits;
  q.above = (255u << lowest & 255) * 0x01010101u;
  q.packed = ((1u << q.bits) - 1) * 0x01010101u;
#else
  const u32 all = mask * 0x00010001u;
  q.high = bytes_of_values(table, 8);
  q.high_mask = mask & 0xff00u;
  const bool repeated = (mask & 255) == mask >> 8;
  const int moved = repeated ? lowest - q.exception_bits / 2 : lowest - 8;
  q.high_left = max(moved, 0);
  q.high_right = max(-moved, 0);
  q.field_bits = repeated ? q.exception_bits / 2 : q.exception_bits;
  q.first = 16 - q.bits;
  q.second = repeated ? 8 - q.bits / 2 : 0;
  q.above = repeated ? (255u << lowest & 255) * 0x01010101u : (0xffffu << lowest & 0xffff) * 0x00010001u;
  q.packed = repeated ? ((1u << q.bits / 2) - 1) * 0x01010101u : ((1u << q.bits) - 1) * 0x00010001u;
#endif
  q.keep = ~all;
  return q;
}
#endif
