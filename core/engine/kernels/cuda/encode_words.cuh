// Packing rows by operations on whole words of chunks: see words.cuh. Needs encode.cuh.
#if WORDS
typedef unsigned short half_t;

// The field of four chunks in a byte each; of chunks of two bytes, x and y have two of them each.
__device__ __forceinline__ u32 four_fields(const Words& q, u32 x, u32 y) {
#if CHUNK_BYTES == 1
  return (x & ~q.keep) >> q.low_left;
#else
  const u32 low = __byte_perm(x, y, 0x6420) & (q.low_mask >> 8) * 0x01010101u;
  const u32 high = __byte_perm(x, y, 0x7531) & (q.high_mask >> 8) * 0x01010101u;
  return (low >> (q.low_left & 31)) | (high << q.high_right >> q.high_left);
#endif
}

// The codes of every field, for masks that are no run of ones, of which find_field makes no table.
__device__ __forceinline__ void find_codes(const chunk_t* __restrict__ table, const Words& q, const Field& f, u8* codes) {
  if (f.codes != nullptr || q.exception_bits > 8) return;  // all threads alike
  for (u32 x = threadIdx.x; x < 1u << q.exception_bits; x += blockDim.x) {
    u8 code = 0;
    for (int j = (int)CODE_MASK; j >= 1; --j)  // downwards, so that the first match wins
      if ((four_fields(q, __ldg(table + j), 0) & 255) == x) code = (u8)j;
    codes[x] = code;
  }
  __syncthreads();
}

#define SETS (WIDE / 8)  // of eight chunks
#define FIRST_EIGHT (((1u << 8 * CODE_BITS) - 1) / CODE_MASK)  // eight codes that are 1

// The codes of a lane's chunks, eight in a word, and their fields, four in a word.
struct Coded {
  u32 codes[SETS];
  u32 fields[WIDE / 4];
};
__device__ __forceinline__ Coded codes_of_words(const Words& q, const u8* codes, const u32 (&x)[4]) {
  Coded c;
#pragma unroll
  for (int s = 0; s < SETS; ++s) c.codes[s] = 0;
#if CHUNK_BYTES == 2
  if (q.exception_bits > 8) {  // whole chunks: at most a few values, so that no table is worth it
#pragma unroll
    for (int v = 0; v < WIDE; ++v) {
      const u32 chunk = x[v / 2] >> (16 * (v & 1)) & 0xffff;
      u32 code = 0;
#pragma unroll
      for (int j = (int)CODE_MASK; j >= 1; --j)
        if (chunk == (__byte_perm(j < 4 ? q.low.x : q.low.y, j < 4 ? q.high.x : q.high.y, (j & 3) | (4 + (j & 3)) << 4) & 0xffff))
          code = j;
      c.codes[0] |= code << (CODE_BITS * v);
    }
    c.fields[0] = c.fields[1] = 0;
    return c;
  }
#endif
#pragma unroll
  for (int j = 0; j < WIDE / 4; ++j) {
#if CHUNK_BYTES == 1
    c.fields[j] = four_fields(q, x[j], 0);
#else
    c.fields[j] = four_fields(q, x[2 * j], x[2 * j + 1]);
#endif
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const int v = 4 * j + b;
      c.codes[v / 8] |= (u32)codes[c.fields[j] >> (8 * b) & 255] << (CODE_BITS * (v & 7));
    }
  }
  return c;
}
// Bit CODE_BITS * v: chunk v of eight has no code.
__device__ __forceinline__ u32 missed_of(u32 codes) {
  u32 any = codes;
#pragma unroll
  for (int b = 1; b < CODE_BITS; ++b) any |= codes >> b;
  return ~any & FIRST_EIGHT;
}

// Of a lane's 16 bytes of chunks the bits in the payload, without gaps.
__device__ __forceinline__ uint4 payload_of_words(const Words& q, const u32 (&x)[4]) {
  u32 kept[4];
  const int bits = WIDE / 4 * q.bits;  // of a word
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    u32 z = choose(q.above, x[j] >> q.field_bits, x[j]) & q.packed;
    if (CHUNK_BYTES == 1 || q.second) z = (z & 0x00ff00ffu) | ((z & 0xff00ff00u) >> q.second);
    kept[j] = (z & 0xffffu) | ((z & 0xffff0000u) >> q.first);
  }
  const u64 low = kept[0] | (u64)kept[1] << bits, high = kept[2] | (u64)kept[3] << bits;
  // Two shifts, since the payload may be as wide as the chunks.
  const u64 a = low | high << bits << bits, b = bits ? high >> (63 - 2 * bits) >> 1 : 0;
  return make_uint4((u32)a, (u32)(a >> 32), (u32)b, (u32)(b >> 32));
}

// Pack one row into zeroed words, and return how many it takes: the words of encode_row, of which `room` may be
// written. Rows and their parts are multiples of 16 bytes; a lane takes 16 at once. LANES lanes of the warp take
// the row; all lanes call, also those that have none.
template <int LANES = 32>
__device__ __forceinline__ int encode_by_words(const stored_t* __restrict__ row, int chunks, const int* __restrict__ starts,
                                               const Words& q, const u8* codes, u32* to, int lane, int room,
                                               bool has_row = true) {
#if CHUNK_BYTES == 1
  typedef half_t piece_t;  // what a lane's bits in the payload and its codes are multiples of
#else
  typedef u8 piece_t;
#endif
  constexpr int PIECE_BITS = 8 * sizeof(piece_t);
  const int groups = (chunks + 31) >> 5;
  const int code_at = payload_words_of(starts, chunks);
  piece_t* const payload = (piece_t*)to;
  piece_t* const codes_to = (piece_t*)(to + code_at);
  const int exceptions_at = (code_at + groups * CODE_BITS) * 32;
  int missed_bits = 0;  // before this step
  const uint4* const from = (const uint4*)row;
  uint4 next = make_uint4(0, 0, 0, 0);
  if (has_row && lane * WIDE < chunks) next = __ldg(from + lane);
#pragma unroll 1
  for (int first = 0; first < groups * 32; first += LANES * WIDE) {
    const int lanes = first / WIDE + lane;  // before this one, of the row
    const bool inside = has_row && lanes * WIDE < chunks;
    const u32 x[4] = {next.x, next.y, next.z, next.w};
    if (has_row && (lanes + LANES) * WIDE < chunks) next = __ldg(from + lanes + LANES);
    if (inside && q.bits) {
      const uint4 kept = payload_of_words(q, x);
      const u32 words[4] = {kept.x, kept.y, kept.z, kept.w};
#pragma unroll
      for (int t = 0; t < 128 / PIECE_BITS; ++t)
        if (t < q.bits) payload[lanes * q.bits + t] = (piece_t)(words[t * PIECE_BITS / 32] >> (t * PIECE_BITS % 32));
    }
    Coded c = codes_of_words(q, codes, x);
    int count = 0;
    u32 missed[SETS];
    u64 all = 0;
#pragma unroll
    for (int s = 0; s < SETS; ++s) {
      if (!inside) c.codes[s] = FIRST_EIGHT;  // of the chunks missing from the last group
      missed[s] = missed_of(c.codes[s]);
      count += __popc(missed[s]);
      all |= (u64)c.codes[s] << (8 * CODE_BITS * s);
    }
    if (has_row && lanes * WIDE < groups * 32) {
#pragma unroll
      for (int t = 0; t < CODE_BITS; ++t) codes_to[lanes * CODE_BITS + t] = (piece_t)(all >> (t * PIECE_BITS));
    }
    if (__any_sync(FULL, count)) {
      const int up_to_me = quick_scan<LANES>(count, lane);
      int bit = exceptions_at + missed_bits + (up_to_me - count) * q.exception_bits;
      missed_bits += __shfl_sync(FULL, up_to_me, LANES - 1, LANES) * q.exception_bits;
#if CHUNK_BYTES == 2
      if (q.exception_bits > 8) {
        half_t* at = (half_t*)to + (bit >> 4);
#pragma unroll
        for (int v = 0; v < WIDE; ++v)
          if (missed[0] >> (CODE_BITS * v) & 1 && at < (half_t*)(to + room)) *at++ = (half_t)(x[v / 2] >> (16 * (v & 1)));
        continue;
      }
#endif
#pragma unroll
      for (int s = 0; s < SETS; ++s)
        for (u32 left = missed[s]; left; left &= left - 1) {
          const int v = (__ffs(left) - 1) / CODE_BITS;
          const u32 four = v < 4 ? c.fields[2 * s] : c.fields[2 * s + 1];
          const int at = bit;
          bit += q.exception_bits;
          if (bit <= 32 * room) put_bits(to, at, four >> (8 * (v & 3)) & 255, q.exception_bits);
        }
    }
  }
  return code_at + groups * CODE_BITS + ((missed_bits + 31) >> 5);
}

// Words of a packed row. LANES lanes of the warp take the row; all lanes call, also those that have none.
template <int LANES = 32>
__device__ __forceinline__ int measure_by_words(const stored_t* __restrict__ row, int chunks, const int* __restrict__ starts,
                                                const Words& q, const u8* codes, int lane, bool has_row = true) {
  int missed = 0;
  for (int i = has_row ? lane * WIDE : chunks; i < chunks; i += LANES * WIDE) {
    const uint4 four = __ldg((const uint4*)(row + i));
    const u32 x[4] = {four.x, four.y, four.z, four.w};
    const Coded c = codes_of_words(q, codes, x);
#pragma unroll
    for (int s = 0; s < SETS; ++s) missed += __popc(missed_of(c.codes[s]));
  }
  missed = sum_of_lanes<LANES>(missed) * q.exception_bits;
  return payload_words_of(starts, chunks) + ((chunks + 31) >> 5) * CODE_BITS + ((missed + 31) >> 5);
}
#endif
