// Decoding tiles of packed rows: see row_cursor.cuh. Needs rebuild.cuh and rebuild_words.cuh.

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

#if UNIFORM && !GROUPED
// Chunks of code 0 in a group.
__device__ __forceinline__ int missed_in_group(const u32* codes) {
#if CODE_BITS == 1
  return __popc(~codes[0]);
#elif CODE_BITS == 2
  const u32 a = codes[0] | codes[0] >> 1, b = codes[1] | codes[1] >> 1;
  return __popc(~a & 0x55555555u) + __popc(~b & 0x55555555u);
#else  // the bits of a code come together at its lowest
  const u32 a = codes[0], b = codes[1], c = codes[2];
  const u32 x = a | __funnelshift_r(a, b, 1) | __funnelshift_r(a, b, 2);
  const u32 y = b | __funnelshift_r(b, c, 1) | __funnelshift_r(b, c, 2);
  const u32 z = c | c >> 1 | c >> 2;
  return __popc(~x & 0x49249249u) + __popc(~y & 0x92492492u) + __popc(~z & 0x24924924u);
#endif
}
#endif

// Bits of the exceptions in the steps begin..end of a row.
__device__ __forceinline__ int count_exceptions(Cursor c, const CodeOffsets& at, int positions, int groups, int chunks,
                                                int begin, int end, int lane) {
  int bits = 0;
#if UNIFORM && !GROUPED
  const u32* codes = c.p + at.code_at;
#if PACKED  // typed products have no registers for several groups at once
#pragma unroll 1
#endif
  for (int g = begin * VECTOR + lane; g < min(groups, end * VECTOR); g += 32) bits += missed_in_group(codes + g * CODE_BITS);
  bits *= CHUNK_BITS - at.starts[1];
#else
  for (int step = begin; step < end; ++step) {
    const int i = (step * 32 + lane) * VECTOR;
    const codes_t codes = next_codes<32>(c, at.group_at, at.code_at, groups, step, lane, i < chunks);
    for (int v = 0; v < VECTOR; ++v)
      if (i < chunks && ((codes >> (v * CODE_BITS)) & CODE_MASK) == 0) bits += POPC(__ldg(at.table + PLACE(i + v)));
  }
#endif
  return __reduce_add_sync(FULL, bits);
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
#elif WORDS
  Words words;
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
#elif WORDS
  k.words = load_words(a.tables);
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
        bits = count_exceptions(c, offsets, positions, groups, a.chunks, kept.step_begin, kept.step_end, lane);
      if (lane == 0) part_bits[warp] = bits;
      __syncthreads();
      for (int before = warp - kept.part; before < warp; ++before) c.exception_bit += part_bits[before];
      __syncthreads();
    }
    if (LANES == 32 && TURNS == 1 && cursors[0].length < 0) continue;
    if (LANES < 32 && !__any_sync(FULL, cursors[0].length > 0)) continue;
    // Lanes without a row read group bits along with those that have one: of the begin of the stage.
    if (LANES < 32 && GROUPED && cursors[0].length < 0) cursors[0].p = stage;
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
#elif WORDS
        uint4 x;
        rebuild_words<LANES>(c, kept.words, codes, inside ? i : 0, lane, a.longest_words, x);
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

