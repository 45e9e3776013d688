// Rebuilding a lane's chunks of a packed row, whatever the plan. Needs row_cursor.cuh.

// What a lane knows about its chunks of a step before it looks at a row.
struct Positions {
#if !UNIFORM
  chunk_t keep[VECTOR];
  chunk_t steps[LEVELS][VECTOR];
#if CODE_BITS == 1
  chunk_t value[VECTOR];
#endif
  int bit;
#else
  chunk_t keep;
  chunk_t steps[LEVELS];
  chunk_t value;
  int bits;
  int field_low, field_bits;  // of a mask that is one run of ones, else field_bits = 0
#endif
};

__device__ __forceinline__ Positions load_positions(const chunk_t* table, const int* starts, int positions, int i) {
  Positions q;
  const chunk_t all = (chunk_t)~(chunk_t)0 >> (8 * sizeof(chunk_t) - CHUNK_BITS);
#if UNIFORM
  const chunk_t mask = __ldg(table);
  q.keep = ~mask & all;
  q.value = __ldg(table + 1);
  q.bits = starts[1];
#pragma unroll
  for (int l = 0; l < LEVELS; ++l) q.steps[l] = __ldg(table + KEEP_SECTION + l);
  const chunk_t lowest = mask & (~mask + 1);
  q.field_bits = mask != 0 && ((mask + lowest) & mask) == 0 ? POPC(mask) : 0;
  q.field_low = POPC(lowest - 1);
#else
  load_entries(table + i, q.keep);
#pragma unroll
  for (int v = 0; v < VECTOR; ++v) q.keep[v] = ~q.keep[v] & all;
#pragma unroll
  for (int l = 0; l < LEVELS; ++l) load_entries(table + (i64)(KEEP_SECTION + l) * positions + i, q.steps[l]);
#if CODE_BITS == 1
  load_entries(table + positions + i, q.value);
#endif
  q.bit = starts[i];
#endif
  return q;
}

// The position of a lane's next chunk in the payload, and how many bits it has there.
__device__ __forceinline__ chunk_t payload_chunk(const u32* p, const Positions& q, int v, int& bit) {
#if UNIFORM
  if (q.bits == 0) return 0;
  chunk_t y = read_chunk_bits(p, bit);
  bit += q.bits;
  if (q.field_bits) {
    const chunk_t low = ((chunk_t)1 << q.field_low) - 1;
    // Two shifts, since the field may be as wide as the chunk.
    y = (y & low) | ((y & ~low) << (q.field_bits - 1) << 1);
  } else {
#pragma unroll
    for (int l = LEVELS - 1; l >= 0; --l) y = spread_step(y, q.steps[l], 1 << l);
  }
  return y & q.keep;
#else
  chunk_t y = read_chunk_bits(p, bit);
  bit += POPC(q.keep[v]);
#pragma unroll
  for (int l = LEVELS - 1; l >= 0; --l) y = spread_step(y, q.steps[l][v], 1 << l);
  return y & q.keep[v];
#endif
}

// Rebuild a lane's VECTOR chunks, from chunk i on, of a packed row. All lanes of the warp take part,
// those of no row and those behind its end with i = 0 and no exceptions. There is no branch by lane
// on the common path, so that the loads of all chunks overlap.
template <int LANES>
__device__ __forceinline__ void rebuild(Cursor& c, const Positions& q, const chunk_t* table, int positions,
                                        codes_t codes, int i, int lane, int longest_words,
                                        chunk_t (&x)[VECTOR]) {
#if UNIFORM
  int bit = i * q.bits;
#else
  int bit = q.bit;
#endif
#pragma unroll
  for (int v = 0; v < VECTOR; ++v) x[v] = payload_chunk(c.p, q, v, bit);
  u32 missed = 0;  // bit v: chunk v is an exception; lanes of no row have codes that are all 1
#if CODE_BITS == 1
  missed = ~codes & ((1u << VECTOR) - 1);
#else
#pragma unroll
  for (int v = 0; v < VECTOR; ++v)
    if (((codes >> (v * CODE_BITS)) & CODE_MASK) == 0) missed |= 1u << v;
#endif
  const bool any = __any_sync(FULL, missed);
#if CODE_BITS == 1
  if (!any) {
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) {
#if UNIFORM
      x[v] |= q.value;
#else
      x[v] |= q.value[v];
#endif
    }
    return;
  }
#endif
#pragma unroll
  for (int v = 0; v < VECTOR; ++v) {
    const int code = (int)(codes >> (v * CODE_BITS)) & CODE_MASK;
    if (code) x[v] |= __ldg(table + (i64)code * positions + PLACE(i + v));
  }
  if (!any) return;
  int bits = 0;
#pragma unroll
  for (int v = 0; v < VECTOR; ++v)
#if UNIFORM
    if (missed >> v & 1) bits += CHUNK_BITS - q.bits;
#else
    if (missed >> v & 1) bits += CHUNK_BITS - POPC(q.keep[v]);
#endif
  const int up_to_me = inclusive_scan<LANES>(bits, lane);
  const int total = __shfl_sync(FULL, up_to_me, LANES - 1, LANES);
  if (total == 0) return;
  if (!reaches<LANES>(c, c.exception_bit + total, longest_words, lane)) {
    c.length = DAMAGED;
    return;
  }
  int from = c.exception_bit + up_to_me - bits;
#pragma unroll
  for (int v = 0; v < VECTOR; ++v)
    if (missed >> v & 1) {
      const chunk_t* at = table + PLACE(i + v);
      const chunk_t mask = __ldg(at);
      x[v] |= deposit(read_chunk_bits(c.p, from), at, MASK_SECTION, positions) & mask;
      from += POPC(mask);
    }
  c.exception_bit += total;
}
