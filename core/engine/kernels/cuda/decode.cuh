// What the decoders of rows in order (decode.cu) and of rows chosen by id (gather.cu) share. A block
// takes tiles of up to 32 rows: while it decodes one tile from shared memory, the packed words of
// the next arrive there asynchronously, from device or mapped host memory. LANES lanes decode a row:
// a warp, or fewer for short rows, of which a warp then works on several at once. Rows too large for
// eight of them to fit the stage are shared by several warps.
//
// A lane owns VECTOR consecutive chunks of each step, so that it stores up to 16 bytes at once.
// The payload's position is known from the profile; only exceptions need a sum over lanes.
//
// The including file defines GATHER: 1 when every row has an offset in `out` of its own, and may turn
// out to be longer than what was fetched of it. Then raw rows may begin at any byte, and of a row that
// several items share one may be wanted alone; the decoders of one chunk a lane are for such rows.
#define WARPS 8
#define LANES_PER_GROUP (32 / VECTOR)
#define PLACE(i) (UNIFORM ? 0 : (i))
// Rows with clusters take the decoder of one chunk a lane; the wide ones know their one profile.
#define CLUSTERED (VECTOR == 1)
#define BY_BYTES (GATHER && VECTOR == 1)

enum { NO_ROW = -1, DAMAGED = -2, RAW_OUTSIDE = -3 };

struct Args {
  const u8* row_clusters;
  const chunk_t* tables;
  const int* starts;
  i64 n_rows;
  int chunks, row_words, row_bytes, clusters, tile_rows, stride_words, stage_words;
  int longest_words;  // words of the longest row, packed or raw
  u8* out;
  i64* mailbox;
#if GATHER
  int item_bytes;  // of a row of `out`
#endif
};

struct alignas(16) TileRow {  // a row of a tile
  i64 at;                  // its first word: in the stage, or, where it is not staged, its address
  int length;              // words; 0: raw; RAW_OUTSIDE: raw, but too long for the stage; NO_ROW
  int cluster;
#if GATHER
  const u32* source;  // of a row in place, which may be longer than `length`; else null
  u32 out;            // its row of `out`
  u32 skip;           // bytes before what is wanted: of a raw row as it lies, of a packed one decoded
#endif
};

__device__ __forceinline__ int size_of(int length, int row_words) { return length ? length : row_words; }
// A packed row is shorter than a raw one; a longer one is damaged, whatever else it may be.
__device__ __forceinline__ bool too_long(int length, int row_words) { return (u32)length >= (u32)row_words; }

// Copy the words from..end of `words` to the stage, whose first word stands for word `origin`, a
// multiple of 32. Both sides then agree modulo 128 bytes: where they do not, the hardware splits
// every line in two, which halves the rate at which host memory is read.
__device__ __forceinline__ void copy_words(u32* stage, const u32* words, i64 origin, i64 from, i64 end, int thread,
                                           const int threads) {
  const u32* line = words + origin + thread * 4;
  u32* to = stage + thread * 4;
  const int units = (int)(end - origin + 3) >> 2;  // of 16 bytes
  if (thread < units && thread >= (int)(from - origin) >> 2) copy_async_16(to, line);
  for (int u = thread + threads; u < units; u += 4 * threads) {
    line += 4 * threads;
    to += 4 * threads;
#pragma unroll
    for (int k = 0; k < 4; ++k)
      if (u + k * threads < units) copy_async_16(to + k * 4 * threads, line + k * 4 * threads);
    line += 12 * threads;
    to += 12 * threads;
  }
}

// The lanes of a warp that work on this lane's row.
template <int LANES> __device__ __forceinline__ u32 lanes_of_row() {
  if (LANES == 32) return FULL;
  return ((1u << (LANES & 31)) - 1) << (threadIdx.x & 31 & ~(LANES - 1));
}
// Of a ballot, the votes of these lanes, the first in bit 0.
template <int LANES> __device__ __forceinline__ u32 votes_of_row(u32 ballot) {
  if (LANES == 32) return ballot;
  return ballot >> (threadIdx.x & 31 & ~(LANES - 1)) & ((1u << (LANES & 31)) - 1);
}

#if GATHER
// A packed row in place is fetched up to a typical length only. Fetch what lies beyond `have` words,
// up to word `need` and at most up to `limit`, and return the words that are there then.
template <int LANES>
__device__ __noinline__ int fetch_on(const u32* source, u32* p, int have, int need, int limit, int lane) {
  // Whole 16 bytes, for the words that readers look ahead.
  const int end = (min(limit, need) + 4) & ~3;
  for (int j = have + lane; j < end; j += LANES) p[j] = source[j];
  __syncwarp(lanes_of_row<LANES>());
  return min(limit, need);
}
#endif

// VECTOR neighbouring entries of a table, 16 bytes at once where VECTOR > 1.
__device__ __forceinline__ void load_entries(const chunk_t* from, chunk_t (&to)[VECTOR]) {
#if VECTOR == 1
  to[0] = __ldg(from);
#else
#pragma unroll
  for (int v = 0; v < VECTOR; v += 16 / (int)sizeof(chunk_t)) {
    const uint4 x = __ldg((const uint4*)(from + v));
#if CHUNK_BYTES == 8
    to[v] = (u64)x.y << 32 | x.x;
    to[v + 1] = (u64)x.w << 32 | x.z;
#else
    to[v] = x.x;
    to[v + 1] = x.y;
    to[v + 2] = x.z;
    to[v + 3] = x.w;
#endif
  }
#endif
}

// Store a lane's chunks, at an address that is a multiple of their size together.
__device__ __forceinline__ void store_chunks(u8* to, const chunk_t (&x)[VECTOR]) {
#if VECTOR == 1
  *(stored_t*)to = (stored_t)x[0];
#else
  u32 w[VECTOR * CHUNK_BYTES / 4];
#pragma unroll
  for (int j = 0; j < VECTOR * CHUNK_BYTES / 4; ++j) {
#if CHUNK_BYTES == 8
    w[j] = (u32)(x[j / 2] >> (32 * (j & 1)));
#else
    w[j] = 0;
#pragma unroll
    for (int b = 0; b < 4 / CHUNK_BYTES; ++b)
      w[j] |= (u32)x[j * (4 / CHUNK_BYTES) + b] << (b * CHUNK_BITS % 32);
#endif
  }
#if VECTOR * CHUNK_BYTES == 16
  *(uint4*)to = make_uint4(w[0], w[1], w[2], w[3]);
#elif VECTOR * CHUNK_BYTES == 8
  *(uint2*)to = make_uint2(w[0], w[1]);
#else
  *(u32*)to = w[0];
#endif
#endif
}

__device__ __forceinline__ chunk_t raw_chunk(const u32* p, int i) {
#if CHUNK_BYTES == 8
  return (u64)p[2 * i + 1] << 32 | p[2 * i];
#elif CHUNK_BYTES == 4
  return p[i];
#else
  const int bit = i * CHUNK_BITS;
  return p[bit >> 5] >> (bit & 31) & ((1u << CHUNK_BITS) - 1);
#endif
}

#if CODE_BITS * VECTOR > 32
typedef u64 codes_t;
#else
typedef u32 codes_t;
#endif

// A packed row that a warp works on, and how far it has come.
struct Cursor {
  const u32* p;
  int length;         // words; NO_ROW; DAMAGED once more exceptions were asked for than there are
  int exception_bit;  // of the next exception
  int stored;         // stored groups before this step
#if GATHER
  const TileRow* row;
#endif
};

// Whether the row has words for all bits before `end_bit`.
template <int LANES>
__device__ __forceinline__ bool reaches(Cursor& c, int end_bit, int longest_words, int lane) {
  if (end_bit <= c.length * 32) return true;
#if GATHER
  if (c.row->source != nullptr) {
    c.length = fetch_on<LANES>(c.row->source, (u32*)c.p, c.length, (end_bit + 31) >> 5, longest_words, lane);
    return end_bit <= c.length * 32;
  }
#endif
  return false;
}

// The codes of a lane's chunks in a step; steps come in order, `c.stored` moves on.
template <int LANES>
__device__ __forceinline__ codes_t next_codes(Cursor& c, int group_at, int code_at, int groups, int step, int lane,
                                              bool inside) {
  codes_t codes = (codes_t)FIRST_CODES;
#if GROUPED
  constexpr int GROUPS = VECTOR * LANES / 32;  // of a step, in one word
  const int first = step * GROUPS;
  u32 open = ~(c.p[group_at + (first >> 5)] >> (first & 31)) & ((1u << GROUPS) - 1);
  if (groups - first < GROUPS) open &= (1u << (groups - first)) - 1;
  const int mine = lane / LANES_PER_GROUP;
  const bool stored = inside && open >> mine & 1;
  const int bit = (code_at + (c.stored + __popc(open & ((1u << mine) - 1))) * CODE_BITS) * 32 +
                  lane % LANES_PER_GROUP * VECTOR * CODE_BITS;
  c.stored += __popc(open);
#else
  const bool stored = inside;
  const int bit = code_at * 32 + (step * LANES + lane) * VECTOR * CODE_BITS;
#endif
  if (stored) codes = sizeof(codes_t) == 8 ? (codes_t)read_pair(c.p, bit) : (codes_t)read_word(c.p, bit);
  return codes;
}

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
// // those of no row, and those behind its end, with i = 0 and no exceptions. There is no branch by lane
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

// Bits of the exceptions in the steps begin..end of a row.
__device__ __forceinline__ int count_exceptions(Cursor c, const chunk_t* table, int positions, int group_at,
                                                int code_at, int groups, int chunks, int begin, int end, int lane) {
  int bits = 0;
  for (int step = begin; step < end; ++step) {
    const int i = (step * 32 + lane) * VECTOR;
    const codes_t codes = next_codes<32>(c, group_at, code_at, groups, step, lane, i < chunks);
    for (int v = 0; v < VECTOR; ++v)
      if (i < chunks && ((codes >> (v * CODE_BITS)) & CODE_MASK) == 0) bits += POPC(__ldg(table + PLACE(i + v)));
  }
  return __reduce_add_sync(FULL, bits);
}

// Stored groups before `group`, and in all. With fewer lanes a row's group bits are one word.
template <int LANES>
__device__ __forceinline__ int2 count_stored(const u32* group_words, int groups, int group, int lane) {
  if (LANES < 32) {
    const u32 open = ~group_words[0] & (groups < 32 ? (1u << groups) - 1 : FULL);
    return make_int2(0, __popc(open));
  }
  int before = 0, all = 0;
  for (int j = lane; j < (groups + 31) >> 5; j += 32) {
    u32 open = ~group_words[j];
    if (groups - 32 * j < 32) open &= (1u << (groups - 32 * j)) - 1;
    all += __popc(open);
    if (group >= 32 * j + 32) before += __popc(open);
    else if (group > 32 * j) before += __popc(open & ((1u << (group - 32 * j)) - 1));
  }
  return make_int2(__reduce_add_sync(FULL, before), __reduce_add_sync(FULL, all));
}

// Where the parts of a packed row begin.
struct CodeOffsets {
  const chunk_t* table;
  const int* starts;
  int group_at, code_at;  // words
};
__device__ __forceinline__ CodeOffsets code_offsets_of(const Args& a, int cluster) {
  const int positions = UNIFORM ? 1 : a.chunks;
  CodeOffsets q;
  q.table = a.tables + (i64)cluster * SECTIONS * positions;
  q.starts = a.starts + (i64)cluster * (positions + 1);
  q.group_at = ((UNIFORM ? q.starts[1] * a.chunks : q.starts[a.chunks]) + 31) >> 5;
  q.code_at = q.group_at + (GROUPED ? (((a.chunks + 31) >> 5) + 31) >> 5 : 0);
  return q;
}

// What a warp keeps over its tiles.
struct Kept {
  CodeOffsets offsets;
  int team;                 // warps that share a row: one, unless a tile has fewer rows than warps
  int first_row, part;      // this warp's first row of a tile, and its part of it
  int step_begin, step_end; // its steps of a row
#if UNIFORM && !CLUSTERED
#if FIELD_LOW >= 0
  Bytes bytes;
#else
  Positions positions;
#endif
#endif
};
template <int LANES> __device__ __forceinline__ Kept prepare(const Args& a) {
  Kept k;
  const int warp = threadIdx.x >> 5;
  const int steps = (a.chunks + LANES * VECTOR - 1) / (LANES * VECTOR);
  k.offsets = code_offsets_of(a, 0);
  k.team = a.tile_rows < WARPS ? WARPS / a.tile_rows : 1;
  k.first_row = warp / k.team;
  k.part = warp % k.team;
  const int part_steps = (steps + k.team - 1) / k.team;
  k.step_begin = min(steps, k.part * part_steps);
  k.step_end = min(steps, k.step_begin + part_steps);
#if UNIFORM && !CLUSTERED
#if FIELD_LOW >= 0
  k.bytes = load_bytes(a.tables);
#else
  k.positions = load_positions(a.tables, a.starts, 1, 0);
#endif
#endif
  return k;
}

__device__ __forceinline__ void report_damage(const Args& a, int lane) {
  if (lane == 0) report(a.mailbox, ERROR_DAMAGED, -1, 0, a.n_rows);
}

// Copy this lane's chunks of a raw row.
template <int LANES>
__device__ __forceinline__ void copy_raw(const Args& a, const Kept& kept, const u32* p, u8* to, int lane) {
  constexpr int STEP_CHUNKS = LANES * VECTOR;
  const int end = min(a.chunks, kept.step_end * STEP_CHUNKS);
  for (int i = (kept.step_begin * LANES + lane) * VECTOR; i < end; i += STEP_CHUNKS) {
    chunk_t x[VECTOR];
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) x[v] = raw_chunk(p, i + v);
    store_chunks(to, x);
    to += STEP_CHUNKS * CHUNK_BYTES;
  }
}

#if GATHER
// The same for one that is not in the stage; rare, so its registers are not to burden the others.
template <int LANES> __device__ __noinline__ void copy_outside(const u32* p, u8* to, int chunks, int lane) {
  for (int i = lane; i < chunks; i += LANES) *((stored_t*)to + i) = (stored_t)raw_chunk(p, i);
}
#endif

#if BY_BYTES
// Whether a row is not wanted whole, or does not begin at a word.
__device__ __forceinline__ bool is_cut(const Args& a, const TileRow& s) { return a.item_bytes != a.row_bytes || s.skip; }

// The same for what is wanted of a row that is cut.
__device__ __noinline__ void copy_cut(const u8* from, u8* to, int bytes, int thread, int threads) {
  for (int i = thread; i < bytes; i += threads) to[i] = from[i];
}

// Store of a chunk of a decoded row, `at` bytes behind the row's begin, what belongs to the item wanted.
__device__ __forceinline__ void store_cut(const Args& a, const TileRow& s, u8* to, chunk_t x, int at) {
#pragma unroll
  for (int b = 0; b < CHUNK_BYTES; ++b) {
    const int in_item = at + b - (int)s.skip;
    if (in_item >= 0 && in_item < a.item_bytes) *(to + b - (int)s.skip) = (u8)(x >> (8 * b));
  }
}
#endif

// Decode the rows of a tile. In order, `first_out` is the row of `out` of the tile's first row.
template <bool STAGED, int LANES>
__device__ __forceinline__ void decode_tile(const Args& a, const Kept& kept, i64 first_out, const TileRow* fetched,
                                            const u32* stage, int* part_bits) {
  const int lane = threadIdx.x & (LANES - 1), warp = threadIdx.x >> 5;
  constexpr int STEP_CHUNKS = LANES * VECTOR;
  // Rows that a warp works on at once, WARPS apart: one after another, or one for some of its lanes.
  constexpr int TURNS = LANES == 32 ? ROWS : 1, SIDE_BY_SIDE = 32 / LANES;
  const int positions = UNIFORM ? 1 : a.chunks;
  const int groups = (a.chunks + 31) >> 5;
  for (int begin = kept.first_row; begin < a.tile_rows; begin += TURNS * SIDE_BY_SIDE * WARPS) {
    const int first = begin + ((threadIdx.x & 31) / LANES) * WARPS;  // of this lane
    CodeOffsets offsets = kept.offsets;
    Cursor cursors[TURNS];
    // This lane's chunks in the first step.
    const i64 lane_bytes = (i64)(kept.step_begin * LANES + lane) * VECTOR * CHUNK_BYTES;
#if GATHER
    u8* outs[TURNS];
    for (int j = 0; j < TURNS; ++j) outs[j] = a.out;
#define OUT(j) outs[j]
#else
    u8* out = a.out + (first_out + first) * a.row_bytes + lane_bytes;
#define OUT(j) (out + (i64)(j) * WARPS * a.row_bytes)
#endif
#pragma unroll
    for (int j = 0; j < TURNS; ++j) {
      Cursor& c = cursors[j];
      c.length = NO_ROW;
      c.exception_bit = c.stored = 0;
      c.p = stage;
      if (first + j * WARPS < a.tile_rows) {
        const TileRow& s = fetched[first + j * WARPS];
        c.length = s.length;
        c.p = STAGED ? stage + (int)s.at : (const u32*)s.at;
#if GATHER && (FIELD_LOW < 0 || GROUPED)
        // Lanes without a row read along with those that have one, so they need an address to read.
        if (STAGED && LANES < 32 && s.length == RAW_OUTSIDE) c.p = stage;
#endif
#if GATHER
        c.row = &s;
        outs[j] = a.out + (i64)s.out * a.item_bytes + lane_bytes;
#endif
        if (CLUSTERED && a.row_clusters) offsets = code_offsets_of(a, s.cluster);
      }
#if BY_BYTES
      if (c.length == 0 && is_cut(a, *c.row)) {
        const int thread = kept.part * LANES + lane;
        copy_cut((const u8*)c.p + c.row->skip, OUT(j) - lane_bytes, a.item_bytes, thread, kept.team * LANES);
        c.length = NO_ROW;
      }
#endif
      if (c.length == 0) {
        copy_raw<LANES>(a, kept, c.p, OUT(j), lane);
        c.length = NO_ROW;
      }
#if GATHER
      if (STAGED && c.length == RAW_OUTSIDE) {
        // The first of the warps that share a row copies all of it.
        if (kept.part == 0) {
          const TileRow& s = fetched[first + j * WARPS];
#if BY_BYTES
          if (is_cut(a, s)) copy_cut((const u8*)s.at + s.skip, OUT(j) - lane_bytes, a.item_bytes, lane, LANES);
          else
#endif
            copy_outside<LANES>((const u32*)s.at, OUT(j) - lane_bytes, a.chunks, lane);
        }
        c.length = NO_ROW;
      }
#endif
      if (c.length > 0) {
        int stored = groups;
        if (GROUPED && offsets.code_at <= c.length) {
          const int2 count = count_stored<LANES>(c.p + offsets.group_at, groups, kept.step_begin * VECTOR, lane);
          c.stored = count.x;
          stored = count.y;
        }
        c.exception_bit = (offsets.code_at + stored * CODE_BITS) * 32;
        if (!reaches<LANES>(c, c.exception_bit, a.longest_words, lane)) {
          report_damage(a, lane);
          c.length = NO_ROW;
        }
      }
    }
    if (LANES == 32 && kept.team > 1) {  // every warp has one row or none
      Cursor& c = cursors[0];
      int bits = 0;
      if (c.length > 0)
        bits = count_exceptions(c, offsets.table, positions, offsets.group_at, offsets.code_at, groups, a.chunks,
                                kept.step_begin, kept.step_end, lane);
      if (lane == 0) part_bits[warp] = bits;
      __syncthreads();
      for (int before = warp - kept.part; before < warp; ++before) c.exception_bit += part_bits[before];
      __syncthreads();
    }
    if (LANES == 32 && TURNS == 1 && cursors[0].length < 0) continue;
    if (LANES < 32 && !__any_sync(FULL, cursors[0].length > 0)) continue;
    for (int step = kept.step_begin; step < kept.step_end; ++step) {
      const int i = (step * LANES + lane) * VECTOR;
      const bool inside = i < a.chunks && (LANES == 32 || cursors[0].length > 0);
#if FIELD_LOW < 0 && !(UNIFORM && !CLUSTERED)
      const Positions own = load_positions(offsets.table, offsets.starts, positions, inside ? i : 0);
#endif
#pragma unroll
      for (int j = 0; j < TURNS; ++j) {
        Cursor& c = cursors[j];
        if (TURNS > 1 && c.length < 0) continue;
        const codes_t codes = next_codes<LANES>(c, offsets.group_at, offsets.code_at, groups, step, lane, inside);
        u8* to = OUT(j);
#if FIELD_LOW >= 0
        uint4 x;
        rebuild_bytes<LANES>(c, kept.bytes, codes, i, lane, inside, a.longest_words, x);
        if (inside) *(uint4*)to = x;
#else
#if UNIFORM && !CLUSTERED
        const Positions& own = kept.positions;
#endif
        chunk_t x[VECTOR];
        rebuild<LANES>(c, own, offsets.table, positions, codes, inside ? i : 0, lane, a.longest_words, x);
#if BY_BYTES
        if (a.item_bytes != a.row_bytes) {
          if (inside) store_cut(a, *c.row, to, x[0], i * CHUNK_BYTES);
        } else
#endif
          if (inside) store_chunks(to, x);
#endif
        if (LANES == 32 && TURNS == 1 && c.length < 0) step = kept.step_end;
      }
#if GATHER
#pragma unroll
      for (int j = 0; j < TURNS; ++j) outs[j] += STEP_CHUNKS * CHUNK_BYTES;
#else
      out += STEP_CHUNKS * CHUNK_BYTES;
#endif
    }
#pragma unroll
    for (int j = 0; j < TURNS; ++j)
      if (cursors[j].length == DAMAGED) report_damage(a, lane);
  }
}

