// What those that pack rows share (encode.cu, pack.cu, rewrite.cu): one warp packs a row.
#define AHEAD 4                  // groups whose chunks a warp has under way while it packs

// A uniform mask that is one run of at most MOST_FIELD_BITS gets its codes from a table in shared
// memory, and its bits move by shifts. The exponents of most floating-point dtypes are such, with the
// sign where all have the same.
#define MOST_FIELD_BITS 9
struct Field {
  const u8* codes;  // code of every value of the field, or null
  chunk_t mask, low;
  int shift, bits;  // lowest bit and width of a mask that is one run of ones, else bits = 0
  int kept_bits;    // bits of a chunk in the payload, of the first cluster
};

__device__ __forceinline__ Field find_field(const chunk_t* __restrict__ tables, int clusters, u8* codes) {
  Field f;
  f.codes = nullptr;
  f.bits = f.shift = 0;
  f.mask = f.low = 0;
  f.kept_bits = 0;
#if UNIFORM
  const chunk_t mask = __ldg(tables);
  const chunk_t lowest = mask & (~mask + 1);
  f.kept_bits = CHUNK_BITS - POPC(mask);
  if (clusters == 1 && mask != 0 && ((mask + lowest) & mask) == 0) {
    f.mask = mask;
    f.low = lowest - 1;
    f.shift = POPC(f.low);
    f.bits = POPC(mask);
    if (f.bits <= MOST_FIELD_BITS) {
      for (u32 x = threadIdx.x; x < 1u << f.bits; x += blockDim.x) {
        u8 code = 0;
        for (int j = (int)CODE_MASK; j >= 1; --j)  // downwards, so that the first match wins
          if ((__ldg(tables + j) >> f.shift) == x) code = (u8)j;
        codes[x] = code;
      }
      __syncthreads();
      f.codes = codes;
    }
  }
#endif
#if FIELD_LOW >= 0  // the same, known to the compiler: the exponents of float32 and bfloat16
  f.shift = FIELD_LOW;
  f.bits = 8;
  f.kept_bits = CHUNK_BITS - 8;
  f.low = ((chunk_t)1 << FIELD_LOW) - 1;
  f.mask = (chunk_t)255 << FIELD_LOW;
#endif
  return f;
}

// Participation code of a chunk; `at` points to its mask in the table.
__device__ __forceinline__ int code_of(chunk_t x, chunk_t mask, const chunk_t* __restrict__ at, int positions,
                                       const Field& f) {
  if (FIELD_LOW >= 0 || (UNIFORM && f.codes)) return f.codes[(x & mask) >> f.shift];
  const chunk_t masked = x & mask;
  int code = 0;
#pragma unroll
  for (int j = (int)CODE_MASK; j >= 1; --j)
    if (masked == __ldg(at + (i64)j * positions)) code = j;
  return code;
}
__device__ __forceinline__ chunk_t payload_of(chunk_t x, chunk_t mask, const chunk_t* at, int positions, const Field& f) {
  if (UNIFORM && f.bits) return f.bits == CHUNK_BITS ? 0 : (x & f.low) | ((x >> f.bits) & ~f.low);
  return extract(x & ~mask, at, KEEP_SECTION, positions);
}
__device__ __forceinline__ chunk_t exception_of(chunk_t x, chunk_t mask, const chunk_t* at, int positions,
                                                const Field& f) {
  if (UNIFORM && f.bits) return (x & mask) >> f.shift;
  return extract(x & mask, at, MASK_SECTION, positions);
}
// Bits of a chunk in the payload.
__device__ __forceinline__ int kept_bits_of(const Field& f, chunk_t mask) {
  return FIELD_LOW >= 0 ? f.kept_bits : CHUNK_BITS - POPC(mask);
}
__device__ __forceinline__ int payload_words_of(const int* starts, int chunks) {
  return ((UNIFORM ? starts[1] * chunks : starts[chunks]) + 31) >> 5;
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
// Store the low bytes of x.
__device__ __forceinline__ void put_bytes(u8* to, chunk_t x, int count) {
#pragma unroll
  for (int b = 0; b < CHUNK_BYTES; ++b)
    if (b < count) to[b] = (u8)(x >> (8 * b));
}

// Words of more than any row, where there is room for that; their bits are a number too.
#define ANY_ROW (1 << 25)

// Pack one row into zeroed words, and return how many it takes. One lane a chunk, so that a step is a group.
// `room`: words that may be written. A row that is changed by others meanwhile may take more than when it was
// measured, here between two looks, and is cut: what it is then, nobody wants.
__device__ __forceinline__ int encode_row(const stored_t* __restrict__ row, int chunks,
                                           const chunk_t* __restrict__ table, const int* __restrict__ starts,
                                           const Field& f, u32* to, int lane, int room) {
  const int positions = UNIFORM ? 1 : chunks;
  const int groups = (chunks + 31) >> 5;
  const int group_at = payload_words_of(starts, chunks);
  const int code_at = group_at + (GROUPED ? (groups + 31) >> 5 : 0);
  int stored = groups;
  if (GROUPED) {  // the exceptions lie behind the codes: count those first
    stored = 0;
    for (int i = lane; i < groups * 32; i += 32) {
      bool first = true;
      if (i < chunks) {
        const chunk_t* at = table + (UNIFORM ? 0 : i);
        first = code_of(row[i], UNIFORM && f.bits ? f.mask : __ldg(at), at, positions, f) == 1;
      }
      if (!__all_sync(FULL, first)) ++stored;
    }
  }
  const int exceptions_at = code_at + stored * CODE_BITS;
  int exception_bit = exceptions_at * 32;
  int next_code = code_at;
  for (int batch = 0; batch < groups; batch += AHEAD) {
    stored_t ahead[AHEAD];  // the chunks of several groups are loaded together
#pragma unroll
    for (int k = 0; k < AHEAD; ++k) {
      const int i = (batch + k) * 32 + lane;
      ahead[k] = i < chunks ? row[i] : 0;
    }
#pragma unroll
    for (int k = 0; k < AHEAD; ++k) {
      const int group = batch + k;
      if (group >= groups) break;
      const int i = group * 32 + lane;
      const chunk_t x = ahead[k];
      const chunk_t* at = table + (UNIFORM || i >= chunks ? 0 : i);
      chunk_t mask = 0;
      int code = 1;  // of the chunks missing from the last group
      if (i < chunks) {
        mask = UNIFORM && f.bits ? f.mask : __ldg(at);
        code = code_of(x, mask, at, positions, f);
        const chunk_t kept = payload_of(x, mask, at, positions, f);
        const int bits = kept_bits_of(f, mask);
        if (UNIFORM && bits % 8 == 0) put_bytes((u8*)to + i * (bits >> 3), kept, bits >> 3);
        else put_bits(to, UNIFORM ? i * bits : starts[i], kept, bits);
      }
      if (GROUPED && __all_sync(FULL, code == 1)) {
        if (lane == 0) atomicOr(to + group_at + (group >> 5), 1u << (group & 31));
        continue;
      }
      if (GROUPED && next_code + CODE_BITS > min(exceptions_at, room)) break;
#if CODE_BITS == 1
      const u32 word = __ballot_sync(FULL, code);
      if (lane == 0) to[next_code] = word;
#else
      // Eight codes make CODE_BITS bytes; every eighth lane collects its own and its neighbours'.
      u32 collected = code;
#pragma unroll
      for (int d = 1; d < 8; d <<= 1) collected |= __shfl_down_sync(FULL, collected, d) << (d * CODE_BITS);
      if ((lane & 7) == 0) {
#pragma unroll
        for (int b = 0; b < CODE_BITS; ++b)
          ((u8*)(to + next_code))[(lane >> 3) * CODE_BITS + b] = (u8)(collected >> (8 * b));
      }
#endif
      next_code += CODE_BITS;
      const bool missed = code == 0;
      if (__any_sync(FULL, missed)) {
        const int bits = missed ? POPC(mask) : 0;
        // Around the first one the compiler may copy this loop several times, which takes it 16 seconds.
        const int up_to_me = FIELD_LOW >= 0 ? inclusive_scan(bits, lane) : quick_scan(bits, lane);
        if (missed && exception_bit + up_to_me <= 32 * room)
          put_bits(to, exception_bit + up_to_me - bits, exception_of(x, mask, at, positions, f), bits);
        exception_bit += __shfl_sync(FULL, up_to_me, 31);
      }
    }
  }
  return (exception_bit + 31) >> 5;
}

#define WIDE (16 / CHUNK_BYTES)  // chunks of a lane when sizes are taken from aligned rows

template <int V> struct Chunks { stored_t x[V]; };
template <> struct alignas(16) Chunks<WIDE> { stored_t x[WIDE]; };

// Words of a packed row. V chunks a lane: WIDE when rows are aligned to 16 bytes, else 1. LANES lanes of the warp
// take the row, all of them where chunks are grouped; all lanes call, also those that have none.
template <int V, int LANES = 32>
__device__ __forceinline__ int measure_row(const stored_t* __restrict__ row, int chunks,
                                           const chunk_t* __restrict__ table, const int* __restrict__ starts,
                                           const Field& f, int lane, bool has_row = true) {
  const int positions = UNIFORM ? 1 : chunks;
  const int groups = (chunks + 31) >> 5;
  int missed = 0, stored = GROUPED ? 0 : groups;
  for (int first = 0; first < chunks; first += LANES * V) {
    const int i = first + lane * V;
    bool all_first = true;
    if (has_row && i < chunks) {
      const Chunks<V> c = *(const Chunks<V>*)(row + i);
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const chunk_t* at = table + (UNIFORM ? 0 : i + v);
        const chunk_t mask = UNIFORM && f.bits ? f.mask : __ldg(at);
        const int code = code_of(c.x[v], mask, at, positions, f);
        if (code != 1) all_first = false;
        if (code == 0) missed += UNIFORM ? 1 : POPC(mask);
      }
    }
    if (GROUPED) {  // a group is 32 / V lanes
      const u32 leaders = V == 1 ? 1u : FULL / ((1u << (32 / V % 32)) - 1);  // the first lane of each
      u32 full = __ballot_sync(FULL, all_first);
#pragma unroll
      for (int d = 1; d < 32 / V; d <<= 1) full &= full >> d;
      stored += V - __popc(full & leaders);
    }
  }
  missed = sum_of_lanes<LANES>(missed);
  if (UNIFORM) missed *= CHUNK_BITS - kept_bits_of(f, __ldg(table));
  return payload_words_of(starts, chunks) + (GROUPED ? (groups + 31) >> 5 : 0) + stored * CODE_BITS +
         ((missed + 31) >> 5);
}

// Words of a row packed by the cluster that packs it best, which is `cluster` then; row_words if none shortens it.
__device__ __forceinline__ int measure_best(const stored_t* __restrict__ row, int chunks, int row_words, int clusters,
                                            const chunk_t* __restrict__ tables, const int* __restrict__ starts,
                                            const Field& f, bool wide, int lane, int& cluster) {
  const int positions = UNIFORM ? 1 : chunks;
  int best = row_words;
  cluster = 0;
  for (int c = 0; c < clusters; ++c) {
    const chunk_t* table = tables + (i64)c * SECTIONS * positions;
    const int* start = starts + (i64)c * (positions + 1);
    const int words = wide ? measure_row<WIDE>(row, chunks, table, start, f, lane)
                           : measure_row<1>(row, chunks, table, start, f, lane);
    if (words < best) {
      best = words;
      cluster = c;
    }
  }
  return best;
}

#if FIELD_LOW >= 0 && !GROUPED
#define QUADS 1  // the exponents of float32 and bfloat16: a lane takes four chunks at once, whose parts are bytes
#if CHUNK_BYTES == 2
typedef uint2 four_chunks_t;
#else
typedef uint4 four_chunks_t;
#endif
#define QUADS_AHEAD (8 / CHUNK_BYTES)  // that a lane has under way; those of a row of 1 KB

// Whether rows from an address on can be loaded so.
__device__ __forceinline__ bool in_quads(const stored_t* rows, int chunks) {
  return ((u64)rows & (sizeof(four_chunks_t) - 1)) == 0 && chunks % 4 == 0;
}

// Pack one row into zeroed words, and return how many it takes: the words of encode_row, of which `room` may be
// written. LANES lanes of the warp take the row; all lanes call, also those that have none.
template <int LANES = 32>
__device__ __forceinline__ int encode_quads(const stored_t* __restrict__ row, int chunks, const int* __restrict__ starts,
                                             const Field& f, u32* to, int lane, int room, bool has_row = true) {
  const int groups = (chunks + 31) >> 5, quads = has_row ? chunks >> 2 : 0;
  const int code_at = payload_words_of(starts, chunks);
  u8* const codes_to = (u8*)(to + code_at);
  u8* const exceptions = (u8*)(to + code_at + groups * CODE_BITS);
  u8* const end = (u8*)(to + room);
  const four_chunks_t* const from = (const four_chunks_t*)row;
  int missed = 0;  // before this step
  for (int batch = 0; batch < groups * 8; batch += LANES * QUADS_AHEAD) {
    four_chunks_t ahead[QUADS_AHEAD];
#pragma unroll
    for (int k = 0; k < QUADS_AHEAD; ++k) {
      const int q = batch + LANES * k + lane;
      ahead[k] = four_chunks_t();
      if (q < quads) ahead[k] = __ldg(from + q);
    }
#pragma unroll
    for (int k = 0; k < QUADS_AHEAD; ++k) {
      if (batch + LANES * k >= groups * 8) break;
      const int q = batch + LANES * k + lane;
      const bool inside = q < quads;
      u32 exponents[4];
#if CHUNK_BYTES == 2
      const u32 low = ahead[k].x, high = ahead[k].y;
      exponents[0] = low >> FIELD_LOW & 255;
      exponents[1] = low >> (16 + FIELD_LOW) & 255;
      exponents[2] = high >> FIELD_LOW & 255;
      exponents[3] = high >> (16 + FIELD_LOW) & 255;
      const u32 kept_low = (low & 0x7f007fu) | (low >> 8 & 0x800080u);
      const u32 kept_high = (high & 0x7f007fu) | (high >> 8 & 0x800080u);
      if (inside) to[q] = __byte_perm(kept_low, kept_high, 0x6420);
#else
      const u32 x[4] = {ahead[k].x, ahead[k].y, ahead[k].z, ahead[k].w};
      u32 kept[4];
#pragma unroll
      for (int v = 0; v < 4; ++v) {
        exponents[v] = x[v] >> FIELD_LOW & 255;
        kept[v] = (x[v] & 0x7fffffu) | (x[v] >> 8 & 0x800000u);
      }
      if (inside) {
        to[3 * q] = kept[0] | kept[1] << 24;
        to[3 * q + 1] = kept[1] >> 8 | kept[2] << 16;
        to[3 * q + 2] = kept[2] >> 16 | kept[3] << 8;
      }
#endif
      u32 codes = 0, misses = 0;  // a bit for each chunk that has no code
#pragma unroll
      for (int v = 0; v < 4; ++v) {
        const u32 code = inside ? f.codes[exponents[v]] : 1;  // 1 for the chunks missing from the last group
        codes |= code << (CODE_BITS * v);
        misses |= (u32)(code == 0) << v;
      }
      // The codes of two lanes are three bytes.
      codes |= __shfl_down_sync(FULL, codes, 1) << (4 * CODE_BITS);
      if ((lane & 1) == 0 && q < groups * 8 && has_row) {
        u8* const at = codes_to + (q >> 1) * CODE_BITS;
#pragma unroll
        for (int b = 0; b < CODE_BITS; ++b) at[b] = (u8)(codes >> (8 * b));
      }
      if (__any_sync(FULL, misses)) {
        const int count = __popc(misses);
        const int up_to_me = inclusive_scan<LANES>(count, lane);
        u8* at = exceptions + missed + up_to_me - count;
#pragma unroll
        for (int v = 0; v < 4; ++v)
          if (misses >> v & 1 && at < end) *at++ = (u8)exponents[v];
        missed += __shfl_sync(FULL, up_to_me, LANES - 1, LANES);
      }
    }
  }
  return code_at + groups * CODE_BITS + ((missed + 3) >> 2);
}
#else
#define QUADS 0
#endif

// Word j of a raw row; the bytes behind its end are 0.
__device__ __forceinline__ u32 raw_word(const u8* row, int row_bytes, int j) {
  u32 x = 0;
  if (((u64)row & 3) == 0 && 4 * j + 4 <= row_bytes) return ((const u32*)row)[j];
  for (int b = 0; b < 4 && 4 * j + b < row_bytes; ++b) x |= (u32)row[4 * j + b] << (8 * b);
  return x;
}
