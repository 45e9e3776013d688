// Rebuilding a lane's chunks of a packed row by operations on whole words of them, where one mask serves
// all chunks and is a field. Needs row_cursor.cuh and words.cuh.

#if FIELD_LOW >= 0
// The same where the mask is one byte wide and codes have three bits: the exponents of float32 and
// bfloat16. Four exponents at a time, in the bytes of registers.
struct Bytes {
  u32 low, high;  // the values of codes 0..3 and 4..7, a byte each
};
__device__ __forceinline__ Bytes load_bytes(const chunk_t* table) {
  Bytes b;
  b.low = b.high = 0;
#pragma unroll
  for (int j = 1; j < 8; ++j) {
    const u32 value = __ldg(table + j) >> FIELD_LOW & 255;
    if (j < 4) b.low |= value << (8 * j);
    else b.high |= value << (8 * (j - 4));
  }
  return b;
}
template <int LANES>
__device__ __forceinline__ void rebuild_bytes(Cursor& c, const Bytes& values, u32 codes, int i, int lane, bool inside,
                                              int longest_words, uint4& out) {
  // From three bits a code to four, by halves: the selectors of byte_perm.
#if VECTOR == 8
  codes = (codes & 0xfff) | (codes & 0xfff000) << 4;
#else
  codes &= 0xfff;
#endif
  codes = (codes & 0x003f003f) | (codes & 0x0fc00fc0) << 2;
  codes = (codes & 0x07070707) | (codes & 0x38383838) << 1;
  u32 exponents[VECTOR / 4];
#pragma unroll
  for (int h = 0; h < VECTOR / 4; ++h) exponents[h] = __byte_perm(values.low, values.high, codes >> (16 * h));
  // Bit 3 of every nibble that is 0.
  u32 missed = inside ? ~(codes + 0x77777777u) & (VECTOR == 8 ? 0x88888888u : 0x8888u) : 0;
  const u32 lanes = __ballot_sync(FULL, missed);
  if (lanes) {
    const u32 below = (1u << lane) - 1, mine = votes_of_row<LANES>(lanes);
    int before = __popc(mine & below), total = __popc(mine);
    const int more = __popc(missed) - 1;  // lanes with several are rare
    if (__any_sync(FULL, more > 0)) {
#pragma unroll
      for (int b = 0; b < 3; ++b) {
        const u32 has = votes_of_row<LANES>(__ballot_sync(FULL, more > 0 && more >> b & 1));
        before += __popc(has & below) << b;
        total += __popc(has) << b;
      }
    }
    if (total && !reaches<LANES>(c, c.exception_bit + 8 * total, longest_words, lane)) {
      c.length = DAMAGED;
      missed = 0;
    }
    const u8* from = (const u8*)c.p + (c.exception_bit >> 3) + before;
    while (missed) {
      const int v = __ffs(missed) >> 2;  // bit 4 v + 3 is the (4 v + 4)th: v + 1
      const int shift = 8 * ((v - 1) & 3);
      const u32 field = 255u << shift, byte = (u32)*from++ << shift;
      if (VECTOR == 8 && v > 4) exponents[VECTOR / 4 - 1] = (exponents[VECTOR / 4 - 1] & ~field) | byte;
      else exponents[0] = (exponents[0] & ~field) | byte;
      missed &= missed - 1;
    }
    c.exception_bit += 8 * total;
  }
  if (inside) {
    u32 w[4];
#if CHUNK_BYTES == 2
    const u32* from = c.p + i / 4;  // a byte of sign and mantissa a chunk
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const u32 kept = from[h];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const u32 twice = __byte_perm(kept, 0, j ? 0x3322 : 0x1100);  // the byte, low and high
        const u32 exponent = __byte_perm(exponents[h], 0, j ? 0x4342 : 0x4140) << 7;
        w[2 * h + j] = (twice & 0x807f807fu) | exponent;
      }
    }
#else
    const u32* from = c.p + i / 4 * 3;  // three bytes a chunk, the highest taken twice
    const u32 a = from[0], b = from[1], d = from[2];
    const u32 kept[4] = {__byte_perm(a, b, 0x2210), __byte_perm(a, b, 0x5543), __byte_perm(b, d, 0x4432),
                         __byte_perm(d, 0, 0x3321)};
    const u32 e = exponents[0];
    const u32 shifted[4] = {e << 23, e << 15, e << 7, e >> 1};
#pragma unroll
    for (int j = 0; j < 4; ++j) w[j] = (kept[j] & 0x807fffffu) | (shifted[j] & 0x7f800000u);
#endif
    out = make_uint4(w[0], w[1], w[2], w[3]);
  }
}
#endif

#if WORDS
// The same where a chunk is one byte or two: 32 bits of chunks at a time (words.cuh).
//
// Bits move between packed fields and bytes or halves of a word in two steps, by `choose`: what then
// stands outside a field is not cleared but left out when the word is put together.
#define SETS (VECTOR / 8)  // of eight chunks: their codes are the nibbles of a word

// The codes of eight chunks, a nibble each.
__device__ __forceinline__ u32 nibbles_of(u32 codes) {
  codes = choose(0xffff0000u, codes << (4 * (4 - CODE_BITS)), codes);
  codes = choose(0xff00ff00u, codes << (2 * (4 - CODE_BITS)), codes);
  codes = choose(0xf0f0f0f0u, codes << (4 - CODE_BITS), codes);
  return codes & (0x11111111u * CODE_MASK);
}
// Four packed fields in a byte each.
__device__ __forceinline__ u32 four_bytes(u32 x, int field_bits) {
  x = choose(0xffff0000u, x << (16 - 2 * field_bits), x);
  return choose(0xff00ff00u, x << (8 - field_bits), x);
}

// Of the exceptions of a lane, `from` on, the four from `rank` on, and the next four if there are so many.
__device__ __forceinline__ uint2 eight_exceptions(const u32* p, int from, int bits, int rank, int count) {
  uint2 x = make_uint2(0, 0);
  x.x = four_bytes(read_word(p, from + rank * bits), bits);
  if (count > rank + 4) x.y = four_bytes(read_word(p, from + (rank + 4) * bits), bits);
  return x;
}
// Of four chunks the bytes of those that are exceptions, in the bits of `mask`, a byte in byte 1. Nibbles say
// which are exceptions, and which of the eight bytes is each one's.
__device__ __forceinline__ u32 placed(uint2 exceptions, u32 ranks, u32 missed, u32 mask) {
  return pick_bytes(exceptions.x, exceptions.y, ranks) & pick_bytes(mask, 0, missed);
}

// Rebuild a lane's 16 bytes of chunks, from chunk i on, of a packed row. All lanes of the warp take part,
// those of no row, and those behind its end, with i = 0 and no exceptions.
template <int LANES>
__device__ __forceinline__ void rebuild_words(Cursor& c, const Words& q, codes_t codes, int i, int lane,
                                              int longest_words, uint4& out) {
  u32 kept[4] = {0, 0, 0, 0};
  if (q.bits) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {  // two words of chunks are at most two words of the payload
      const int bit = i * q.bits + h * (VECTOR / 2) * q.bits;
      const u32* from = c.p + (bit >> 5);
      const u32 middle = from[1];
      kept[2 * h] = __funnelshift_r(from[0], middle, bit);
      kept[2 * h + 1] = __funnelshift_rc(kept[2 * h], __funnelshift_r(middle, from[2], bit), VECTOR / 4 * q.bits);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) kept[j] = choose(0xffff0000u, kept[j] << q.first, kept[j]);
    if (CHUNK_BYTES == 1 || q.second) {
#pragma unroll
      for (int j = 0; j < 4; ++j) kept[j] = choose(0xff00ff00u, kept[j] << q.second, kept[j]);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) kept[j] = choose(q.above, kept[j] << q.field_bits, kept[j]);
  }
  u32 selectors[SETS], missed[SETS], ranks[SETS];  // nibbles; ranks: exceptions of this lane before a chunk
  int count = 0;
#pragma unroll
  for (int s = 0; s < SETS; ++s) {
    selectors[s] = nibbles_of((u32)(codes >> (8 * CODE_BITS * s)));
    missed[s] = ~(selectors[s] + 0x77777777u) >> 3 & 0x11111111u;
    ranks[s] = missed[s] * 0x11111110u + (u32)count * 0x11111111u;
    count += __popc(missed[s]);
  }
#if CHUNK_BYTES == 1
  u32 w[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) w[j] = pick_bytes(q.low.x, q.low.y, selectors[j / 2] >> (16 * (j & 1)));
#else
  u32 low[2], high[2], w[4];  // the bytes of four chunks
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    low[h] = pick_bytes(q.low.x, q.low.y, selectors[0] >> (16 * h));
    high[h] = pick_bytes(q.high.x, q.high.y, selectors[0] >> (16 * h));
  }
#endif
  int from = 0;
  if (__any_sync(FULL, count)) {
    const int up_to_me = quick_scan<LANES>(count, lane);
    const int total_bits = __shfl_sync(FULL, up_to_me, LANES - 1, LANES) * q.exception_bits;
    from = c.exception_bit + (up_to_me - count) * q.exception_bits;
    if (total_bits && !reaches<LANES>(c, c.exception_bit + total_bits, longest_words, lane)) {
      c.length = DAMAGED;
      count = 0;
    }
    c.exception_bit += total_bits;
#if CHUNK_BYTES == 1
#pragma unroll 1  // more than one turn is rare
    for (int rank = 0; rank < count; rank += 8) {
      const uint2 exceptions = eight_exceptions(c.p, from, q.exception_bits, rank, count);
      const uint2 shifted = make_uint2(exceptions.x << q.low_left, exceptions.y << q.low_left);
#pragma unroll
      for (int s = 0; s < SETS; ++s) {
        const u32 mine = ranks[s] ^ (rank ? 0x88888888u : 0);  // bit 3 of a nibble: not among these eight
        const u32 here = missed[s] & ~(mine >> 3);
        w[2 * s] |= placed(shifted, mine, here, q.low_mask);
        w[2 * s + 1] |= placed(shifted, mine >> 16, here >> 16, q.low_mask);
      }
    }
#else
    if (count && q.exception_bits <= 8) {
      const uint2 exceptions = eight_exceptions(c.p, from, q.exception_bits, 0, count);
      const uint2 to_high = make_uint2(exceptions.x << q.high_left >> q.high_right,
                                       exceptions.y << q.high_left >> q.high_right);
#pragma unroll
      for (int h = 0; h < 2; ++h)
        high[h] |= placed(to_high, ranks[0] >> (16 * h), missed[0] >> (16 * h), q.high_mask);
      if (q.low_mask) {
        const uint2 to_low = make_uint2(exceptions.x << q.low_left, exceptions.y << q.low_left);
#pragma unroll
        for (int h = 0; h < 2; ++h)
          low[h] |= placed(to_low, ranks[0] >> (16 * h), missed[0] >> (16 * h), q.low_mask);
      }
    }
#endif
  }
#if CHUNK_BYTES == 2
#pragma unroll
  for (int j = 0; j < 4; ++j) w[j] = __byte_perm(low[j / 2], high[j / 2], j & 1 ? 0x7362 : 0x5140);
  if (count && q.exception_bits > 8) {  // whole chunks
    const unsigned short* each = (const unsigned short*)c.p + (from >> 4);
#pragma unroll
    for (int v = 0; v < VECTOR; ++v)
      if (missed[0] >> (4 * v) & 1) w[v / 2] |= (u32)*each++ << (16 * (v & 1));
  }
#endif
#pragma unroll
  for (int j = 0; j < 4; ++j) w[j] |= kept[j] & q.keep;
  out = make_uint4(w[0], w[1], w[2], w[3]);
}
#endif
