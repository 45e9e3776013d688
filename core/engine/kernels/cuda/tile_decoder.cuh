// How a warp finds and decodes a tile: see quantized.cu, which includes this.

// A table of tiles, back to back, and those of it that are wanted.
struct Source {
  const u32* words;
  i64 n_words;
  const i64* bases;
  const void* lengths;
  int length_bytes;
  i64 n_rows;
  const void* ids;  // or null: the tiles from `begin` on
  int id_bytes;
  i64 begin;
};

enum { NOTHING = -1 };

struct Wanted {
  i64 row, at;  // its first word
  int length;   // in words; 0: raw; NOTHING
};

// Find tile `position` of those that are wanted.
__device__ __forceinline__ Wanted locate(const Source& s, i64 position, i64* mailbox, int lane) {
  Wanted w = {0, 0, NOTHING};
  i64 row = s.begin + position;
  if (s.ids != nullptr) {
    row = load_id(s.ids, position, s.id_bytes);
    if (row == NO_ROW) return w;
    if (row < 0) row += s.n_rows;
  }
  w.row = row;
  if (row < 0 || row >= s.n_rows) {
    if (lane == 0) report(mailbox, ERROR_INDEX, position, row, s.n_rows);
    return w;
  }
  const i64 peer = (row & ~(i64)31) + lane;
  const u32 length_of_peer = peer < s.n_rows ? load_length(s.lengths, peer, s.length_bytes) : 0;
  const u32 before = lane < (int)(row & 31) ? (length_of_peer ? length_of_peer : ROW_WORDS) : 0;
  w.at = s.bases[row >> 5] + __reduce_add_sync(FULL, before);
  const u32 length = __shfl_sync(FULL, length_of_peer, (int)(row & 31));
  const i64 size = length ? length : ROW_WORDS;
  const bool sound = w.at >= 0 && w.at <= s.n_words - size && (length == 0 || length > PARAMETER_WORDS);
  if (sound) w.length = (int)length;
  else if (lane == 0) report(mailbox, ERROR_DAMAGED, row, 0, s.n_rows);
  return w;
}

// Write steps and centers of a tile from its parameters, which begin at a byte of the ring.
__device__ __forceinline__ void read_scales(const Tables& t, int head, const Scales& s, Ring& ring, int byte, int lane) {
#if GRANULARITY == CHANNEL
  for (int p = lane; p < DIM; p += 32) {
    const int channel = __ldg(t.order + head * DIM + p);
    s.steps[channel] = __ldg(t.steps + head * DIM + p);
    s.centers[channel] = __ldg(t.centers + head * DIM + p);
  }
#elif GRANULARITY != LOSSLESS
#pragma unroll 1
  for (int first = 0; first < PARAMETER_WORDS; first += 32) {
    ring.advance(byte + 4 * first, lane);
    const int k = first + lane;
    if (k >= PARAMETER_WORDS) continue;
    const u32 word = ring.word(byte + 4 * k);
#if GRANULARITY == TOKEN_LEVEL
#pragma unroll
    for (int b = 0; b < 4; ++b) s.steps[4 * k + b] = __ldg(t.level_steps + (word >> (8 * b) & 255));
#else
    const int place = BY_CHANNEL ? __ldg(t.order + head * DIM + k) : k;
    s.steps[place] = float_of_brain(word >> 16);
    s.centers[place] = float_of_brain(word & 0xffff);
#endif
  }
#endif
}

// Read the codes of a block of positions to the stage. ALWAYS: lanes ask before each symbol.
template <bool PAIRED, bool ALWAYS>
__device__ __forceinline__ void read_block(Reader& reader, const u32* table, int enough, const Places& places, Ring& ring,
                                           u8* group, u32 below, int lane) {
#pragma unroll 1
  for (int j = 0; j < TOKENS / 16; ++j, group += 16 * STRIDE) {
    ring.advance(reader.next, lane);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (ALWAYS || !PAIRED || i % 2 == 0) reader.ask(ring, enough, below);
      const u32 entry = reader.take(table);
      group[places.of(i, 0)] = (u8)entry;
      if (!PAIRED && ALWAYS) reader.ask(ring, enough, below);
      group[places.of(i, 1)] = (u8)(PAIRED ? entry >> 8 : reader.take(table));
    }
  }
}

// Read the codes of a tile to the stage; return whether it is sound. On sm_90 two values take some 20
// instructions as a pair of a short code, 29 of a long one, 33 and 51 as singles, and write_values 10 more. Of
// shared memory, two values take two byte stores, whose eight tokens lie in banks of their own (see
// stage_at), but channels of one token may meet; the look-ups meet as chance has it.
__device__ __forceinline__ bool read_codes(const Tables& t, int head, const u32* lookup, Ring& ring, int byte,
                                           int units, u8* stage, int lane) {
  const int mine = about_block(t, head, lane);
  const u32 below = lanes_below();
  Reader reader = {0, 16, byte, ~0u};
#pragma unroll 1
  for (int b = 0; b < BLOCKS; ++b) {
    const int block = __shfl_sync(FULL, mine, b);
    const int longest = block >> 8 & 255, enough = 16 - bits_needed(longest);
    const bool is_short = LOOKUP_BITS <= SHORT_BITS || longest <= SHORT_BITS;
    const u32* table = lookup + ((block & 255) << LOOKUP_BITS);
    const Places places(t.order + head * DIM, b, lane);
    if (block >> 16) {
      if (is_short) read_block<true, false>(reader, table, enough, places, ring, stage, below, lane);
      else read_block<true, true>(reader, table, enough, places, ring, stage, below, lane);
    } else {
      if (is_short) read_block<false, false>(reader, table, enough, places, ring, stage, below, lane);
      else read_block<false, true>(reader, table, enough, places, ring, stage, below, lane);
    }
  }
  copy_async_wait<0>();
  __syncwarp();
  return __all_sync(FULL, reader.least != 0) && reader.next == byte + 2 * units;
}

#if GRANULARITY == LOSSLESS
// Read the plane of a tile to a stage.
__device__ __forceinline__ void read_plane(const Tables& t, int head, const u32* plane, u8* stage, int lane) {
#pragma unroll 1
  for (int b = 0; b < BLOCKS; ++b) {
    const Places places(t.order + head * DIM, b, lane);
    u8* group = stage;
#pragma unroll 4
    for (int j = 0; j < TOKENS / 16; ++j, group += 16 * STRIDE, plane += 64) {
      const u32 words[2] = {plane[lane], plane[32 + lane]};
#pragma unroll
      for (int k = 0; k < 8; ++k) group[places.of(k >> 1, k & 1)] = (u8)(words[k >> 2] >> (8 * (k & 3)));
    }
  }
}

// Two values of codes + 128 in bytes 2 k and 2 k + 1 of a word and what the plane has of them in those of another.
__device__ __forceinline__ u32 join_two(u32 codes, u32 low, int k) {
  const u32 fields = __byte_perm(codes, 0, k ? 0x4342 : 0x4140) - (ZERO_SYMBOL - FIELD_BIAS) * 0x10001u;
  return fields << FIELD_AT | (__byte_perm(low, 0, k ? 0x3322 : 0x1100) & 0x807f807fu);
}

// Write the values of both stages.
__device__ __forceinline__ void write_joined(const u8* stage, uint4* out, int lane) {
#pragma unroll 2
  for (int piece = lane; piece < ROW_PIECES; piece += 32) {
    const u8* from = stage + stage_at(piece / PIECES, piece % PIECES * VECTOR);
    const uint2 codes = *(const uint2*)from, low = *(const uint2*)(from + STAGE_BYTES);
    out[piece] = make_uint4(join_two(codes.x, low.x, 0), join_two(codes.x, low.x, 1), join_two(codes.y, low.y, 0),
                            join_two(codes.y, low.y, 1));
  }
}
#endif

// Byte k of four as a float: the code. The bits of 2 ** 23 + byte, less that and ZERO_SYMBOL.
__device__ __forceinline__ float code_of(u32 bytes, int k) {
  return __uint_as_float(__byte_perm(bytes, 0x4b000000, 0x7440 + k)) - (8388608.f + ZERO_SYMBOL);
}

// Write the values of the codes in the stage.
__device__ __forceinline__ void write_values(const Scales& s, const u8* stage, uint4* out, int lane) {
  Vector q;
  const int fixed = lane % PIECES * VECTOR;
  if (SAME_CHANNELS && !BY_TOKEN) q.load<false>(s, 0, fixed);
#pragma unroll 2
  for (int piece = lane; piece < ROW_PIECES; piece += 32) {
    const int token = piece / PIECES, channel = SAME_CHANNELS ? fixed : piece % PIECES * VECTOR;
    if (!SAME_CHANNELS || BY_TOKEN) q.load<false>(s, token, channel);
    const u32* from = (const u32*)(stage + stage_at(token, channel));
    float x[VECTOR];
#if VECTOR == 8
    const uint2 both = *(const uint2*)from;
#pragma unroll
    for (int v = 0; v < 8; ++v) x[v] = code_of(v < 4 ? both.x : both.y, v & 3);
#else
    const u32 four = *from;
#pragma unroll
    for (int v = 0; v < 4; ++v) x[v] = code_of(four, v);
#endif
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) {
      x[v] = multiply_exact(q.step[v], x[v]);
      if (GRANULARITY != TOKEN_LEVEL) x[v] = add_exact(q.center[v], x[v]);
    }
#if VECTOR == 8
    out[piece] = make_uint4(pack_two(x[0], x[1]), pack_two(x[2], x[3]), pack_two(x[4], x[5]), pack_two(x[6], x[7]));
#else
    out[piece] = make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3]));
#endif
  }
}

__device__ __forceinline__ u32 position_of(const u32* exceptions, int e) {
  return VALUE_BYTES == 4 ? exceptions[2 * e] : exceptions[e] & 0xffff;
}

// Whether exceptions lie in the tile, one behind the other.
__device__ __forceinline__ bool sound_exceptions(const u32* exceptions, int count, int lane) {
  bool sound = true;
  for (int e = lane; e < count; e += 32) {
    const u32 position = position_of(exceptions, e);
    sound = sound && position < VALUES && (e == 0 || position_of(exceptions, e - 1) < position);
  }
  return __all_sync(FULL, sound);
}
