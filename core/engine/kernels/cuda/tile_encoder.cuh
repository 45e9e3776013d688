// How a warp codes a tile: see quantized.cu, which includes this.

// Integers in the order of the floats of these bits.
__device__ __forceinline__ int key_of(float x) {
  const int bits = __float_as_int(x);
  return bits ^ (bits >> 31 & 0x7fffffff);
}
__device__ __forceinline__ float float_of_key(int key) { return __int_as_float(key ^ (key >> 31 & 0x7fffffff)); }
__device__ __forceinline__ u32 magnitude(float x) { return __float_as_uint(x) & 0x7fffffff; }

// The bits of value v of a piece of 16 bytes.
__device__ __forceinline__ u32 bits_of(const uint4& x, int v) {
  const u32 words[4] = {x.x, x.y, x.z, x.w};
  return VALUE_BYTES == 4 ? words[v & 3] : words[v >> 1] >> (16 * (v & 1)) & 0xffff;
}

struct Range {
  int least, largest;  // keys
  __device__ __forceinline__ Range() : least(0x7fffffff), largest(-0x7fffffff - 1) {}
  __device__ __forceinline__ void add(u32 bits) {
    const float x = float_of(bits);
    if (magnitude(x) >= 0x7f800000) return;
    least = min(least, key_of(x));
    largest = max(largest, key_of(x));
  }
  // The parameter: bfloat16 center in the lower half, step in the upper.
  __device__ __forceinline__ u32 word(float scale) const {
    u32 step = 0x3f80, center = 0;
    if (least <= largest) {
      const float low = float_of_key(least), high = float_of_key(largest);
      const u32 middle = brain_bits(add_exact(multiply_exact(0.5f, low), multiply_exact(0.5f, high)));
      if ((middle & 0x7fff) != 0 && (middle & 0x7f80) != 0x7f80) center = middle;
      const u32 found = brain_bits(multiply_exact(scale, subtract_exact(high, low)));
      if (found > 0 && found < 0x7f80) step = found;
    }
    return step << 16 | center;
  }
};

__device__ __forceinline__ void set_scale(const Scales& s, int at, float step, float center) {
  s.steps[at] = step;
  s.centers[at] = center;
  s.inverses[at] = reciprocal_exact(step);
}
__device__ __forceinline__ void set_range(const Scales& s, int at, u32 word) {
  set_scale(s, at, float_of_brain(word >> 16), float_of_brain(word & 0xffff));
}

// The level of a mean square times the square of the scale.
__device__ __forceinline__ int level_of(const Tables& t, float square) {
  int level = 0;
  for (int count = STEP_LEVELS - 1; count;) {
    const int half = count >> 1;
    if (__ldg(t.level_squares + level + half) <= square) {
      level += half + 1;
      count -= half + 1;
    } else {
      count = half;
    }
  }
  return level;
}

#if BY_TOKEN
#define TOKEN_LANES (32 / VECTOR)  // lanes that read a token, VECTOR neighbouring channels of 32 at a time

// What a lane has read of tokens, which is added up between the lanes that read the same ones.
#if GRANULARITY == TOKEN_LEVEL
struct Part {
  float sums[VECTOR] = {};  // of squares: of the channels of one lane of the format
  __device__ __forceinline__ void add(int v, u32 bits) {
    const float x = float_of(bits), finite = magnitude(x) < 0x7f800000 ? x : 0.f;
    sums[v] = add_exact(sums[v], multiply_exact(finite, finite));
  }
  __device__ __forceinline__ void add_other(const Part& theirs, int d) {
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) sums[v] = add_exact(sums[v], __shfl_xor_sync(FULL, theirs.sums[v], d));
  }
  // Times the square of the scale.
  __device__ __forceinline__ float mean_square(const Tables& t) {
#pragma unroll
    for (int d = VECTOR / 2; d; d >>= 1) {
#pragma unroll
      for (int v = 0; v < d; ++v) sums[v] = add_exact(sums[v], sums[v + d]);
    }
    return multiply_exact(multiply_exact(sums[0], t.inverse_dim), t.scale);
  }
};
#else
struct Part {
  Range range;
  __device__ __forceinline__ void add(int, u32 bits) { range.add(bits); }
  __device__ __forceinline__ void add_other(const Part& theirs, int d) {
    range.least = min(range.least, __shfl_xor_sync(FULL, theirs.range.least, d));
    range.largest = max(range.largest, __shfl_xor_sync(FULL, theirs.range.largest, d));
  }
};
#endif

// Find the scales of 32 tokens. VECTOR tokens are read at a time, by TOKEN_LANES lanes each. Between these
// lanes parts are added up as the format's butterfly does, its first steps with d times VECTOR for d; at each
// step a lane goes on with half of its tokens, and in the end has one. The last steps are within a lane.
__device__ __forceinline__ void find_token_scales(const Tables& t, const value_t* row, int first, const Scales& s,
                                                  u32* parameters, int lane) {
  Part parts[TOKEN_LANES];
  const int channel = lane % TOKEN_LANES * VECTOR;
#pragma unroll
  for (int k = 0; k < TOKEN_LANES; ++k) {
    const int token = first + k * VECTOR + lane / TOKEN_LANES;
    // A break that some lanes take would keep the loop from being unrolled, and loads from overlapping.
#pragma unroll
    for (int c = 0; c < DIM; c += 32) {
      if ((TOKENS % 32 == 0 || token < TOKENS) && (DIM % 32 == 0 || c + channel < DIM)) {
        const uint4 x = __ldg((const uint4*)(row + token * DIM + c + channel));
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) parts[k].add(v, bits_of(x, v));
      }
    }
  }
#pragma unroll
  for (int d = TOKEN_LANES / 2; d; d >>= 1) {
    const bool upper = lane & d;
#pragma unroll
    for (int k = 0; k < d; ++k) {
      const Part theirs = upper ? parts[k] : parts[k + d];
      if (upper) parts[k] = parts[k + d];
      parts[k].add_other(theirs, d);
    }
  }
  const int token = first + lane % TOKEN_LANES * VECTOR + lane / TOKEN_LANES;
  if (TOKENS % 32 && token >= TOKENS) return;
#if GRANULARITY == TOKEN_LEVEL
  const int level = level_of(t, parts[0].mean_square(t));
  ((u8*)parameters)[token] = (u8)level;
  set_scale(s, token, __ldg(t.level_steps + level), 0.f);
#else
  const u32 word = parameters[token] = parts[0].range.word(t.scale);
  set_range(s, token, word);
#endif
}
#endif

// Find parameters and scales of a tile, all lanes of a warp.
__device__ __forceinline__ void find_scales(const Tables& t, int head, const value_t* row, const Scales& s,
                                            u32* parameters, int lane) {
  const int* order = t.order + head * DIM;
  for (int p = lane; p < DIM; p += 32) {
    const int channel = __ldg(order + p);
    const int radius = __ldg(t.radius + __ldg(t.block_class + head * BLOCKS + (p >> 4)));
    s.limits[channel] = radius ? (float)radius : (float)MAX_CODE;
#if GRANULARITY == CHANNEL
    set_scale(s, channel, __ldg(t.steps + head * DIM + p), __ldg(t.centers + head * DIM + p));
#elif GRANULARITY == CHANNEL_RANGE
    Range range;
#pragma unroll 4
    for (int k = 0; k < TOKENS; ++k) range.add(__ldg(row + k * DIM + channel));
    const u32 word = parameters[p] = range.word(t.scale);
    set_range(s, channel, word);
#endif
  }
#if BY_TOKEN
#pragma unroll 1
  for (int first = 0; first < TOKENS; first += 32) find_token_scales(t, row, first, s, parameters, lane);
#elif GRANULARITY == BLOCK_RANGE
  Range range;
#pragma unroll 4
  for (int piece = lane; piece < ROW_PIECES; piece += 32) {
    const uint4 x = __ldg((const uint4*)row + piece);
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) range.add(bits_of(x, v));
  }
  range.least = __reduce_min_sync(FULL, range.least);
  range.largest = __reduce_max_sync(FULL, range.largest);
  if (lane == 0) {
    parameters[0] = range.word(t.scale);
    set_range(s, 0, parameters[0]);
  }
#endif
  __syncwarp();
}

// To the nearest integer, ties to even, with the code + 128 in the lowest byte of the bits: 1.5 * 2 ** 23 + 128.
// What is too large for that is no code either.
#define ROUNDER (12582912.f + ZERO_SYMBOL)

// Quantise the values of 16 bytes: return how many are exceptions. Of each the byte is its code + 128, or 0.
__device__ __forceinline__ int quantise_piece(const uint4& piece, const Vector& q, u32* bytes) {
  int exceptions = 0;
  u32 coded[VECTOR];
#pragma unroll
  for (int first = 0; first < VECTOR; first += 2) {
    float x[2], decoded[2];
    bool fits[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int v = first + k;
      x[k] = float_of(bits_of(piece, v));
      // The center of levels is 0, which changes no value but the sign of a zero.
      const float from = GRANULARITY == TOKEN_LEVEL ? x[k] : subtract_exact(x[k], q.center[v]);
      const float shifted = add_exact(multiply_exact(from, q.inverse[v]), ROUNDER);
      const float code = subtract_exact(shifted, ROUNDER);
      fits[k] = fabsf(code) <= q.limit[v];  // not where it is NaN
      coded[v] = __float_as_uint(shifted);
      const float scaled = multiply_exact(q.step[v], code);
      decoded[k] = GRANULARITY == TOKEN_LEVEL ? scaled : add_exact(q.center[v], scaled);
    }
#if VALUE_BYTES == 2
    const u32 both = pack_two(decoded[0], decoded[1]);
    decoded[0] = float_of(both & 0xffff);
    decoded[1] = float_of(both >> 16);
#endif
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int v = first + k;
      // Compared as integers: -ftz would take subnormal ones for zero.
      const u32 size = magnitude(decoded[k]);
      const float largest = __uint_as_float(max(size, LEAST_NORMAL));
      const float allowed = add_exact(multiply_exact(0.5f, q.step[v]), multiply_exact(ROUNDING, largest));
      const bool near = magnitude(subtract_exact(decoded[k], x[k])) <= __float_as_uint(allowed);
      const bool fitting = fits[k] & near & (size < 0x7f800000);
      if (!fitting) coded[v] = 0;
      exceptions += !fitting;
    }
  }
#pragma unroll
  for (int v = 0; v < VECTOR; v += 4)
    bytes[v >> 2] = __byte_perm(__byte_perm(coded[v], coded[v + 1], 0x0040),
                                __byte_perm(coded[v + 2], coded[v + 3], 0x0040), 0x5410);
  return exceptions;
}

// Write the bytes of a tile to the stage; return how many of this lane's are exceptions. Two pieces are on
// their way while one is quantised.
__device__ __forceinline__ int quantise(const value_t* row, const Scales& s, u8* stage, int lane) {
  const uint4* pieces = (const uint4*)row;
  uint4 next = __ldg(pieces + lane), after = next;
  if (ROW_PIECES > 32) after = __ldg(pieces + lane + 32);
  Vector q;
  const int fixed = lane % PIECES * VECTOR;
  if (SAME_CHANNELS) q.load_limits(s, fixed);
  if (SAME_CHANNELS && !BY_TOKEN) q.load<true>(s, 0, fixed);
  int exceptions = 0;
#pragma unroll 2
  for (int piece = lane; piece < ROW_PIECES; piece += 32) {
    const uint4 x = next;
    next = after;
    if (piece + 64 < ROW_PIECES) after = __ldg(pieces + piece + 64);
    const int token = piece / PIECES, channel = SAME_CHANNELS ? fixed : piece % PIECES * VECTOR;
    if (!SAME_CHANNELS) q.load_limits(s, channel);
    if (!SAME_CHANNELS || BY_TOKEN) q.load<true>(s, token, channel);
    u32 bytes[VECTOR / 4];
    exceptions += quantise_piece(x, q, bytes);
    u32* to = (u32*)(stage + stage_at(token, channel));
#if VECTOR == 8
    *(uint2*)to = make_uint2(bytes[0], bytes[1]);
#else
    *to = bytes[0];
#endif
  }
  __syncwarp();
  return exceptions;
}

#if GRANULARITY == LOSSLESS
#define LEAST_INFINITE (KIND == 1 ? 248 : 255)  // field of values that are not finite, and those above

// The lowest bytes of the halves of two words.
__device__ __forceinline__ u32 four_bytes(u32 first, u32 second) { return __byte_perm(first, second, 0x6420); }

// Write the codes of a tile to the stage, code + 128 or 0; return how many of this lane's are exceptions.
__device__ __forceinline__ int stage_fields(const value_t* row, u8* stage, int lane) {
  int exceptions = 0;
#pragma unroll 4
  for (int piece = lane; piece < ROW_PIECES; piece += 32) {
    const uint4 x = __ldg((const uint4*)row + piece);
    u32 words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const u32 fields = words[k] >> FIELD_AT & 0x00ff00ff;
      const bool first = (fields & 255) < LEAST_INFINITE, second = fields >> 16 < LEAST_INFINITE;
      exceptions += !first + !second;
      words[k] = fields + (ZERO_SYMBOL - FIELD_BIAS) * 0x10001u;
      words[k] &= (first ? 0xffu : 0) | (second ? 0xff0000u : 0);
    }
    *(uint2*)(stage + stage_at(piece / PIECES, piece % PIECES * VECTOR)) =
        make_uint2(four_bytes(words[0], words[1]), four_bytes(words[2], words[3]));
  }
  __syncwarp();
  return exceptions;
}

// Write the plane of a tile, by way of the stage, whose codes are not needed any more.
__device__ __forceinline__ void write_plane(const Tables& t, int head, const value_t* row, u8* stage, u32* to,
                                            int lane) {
#pragma unroll 4
  for (int piece = lane; piece < ROW_PIECES; piece += 32) {
    const uint4 x = __ldg((const uint4*)row + piece);
    u32 words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) words[k] = (words[k] & 0x007f007f) | (words[k] >> 8 & 0x00800080);
    *(uint2*)(stage + stage_at(piece / PIECES, piece % PIECES * VECTOR)) =
        make_uint2(four_bytes(words[0], words[1]), four_bytes(words[2], words[3]));
  }
  __syncwarp();
#pragma unroll 1
  for (int b = 0; b < BLOCKS; ++b) {
    const Places places(t.order + head * DIM, b, lane);
    const u8* group = stage;
#pragma unroll 2
    for (int j = 0; j < TOKENS / 16; ++j, group += 16 * STRIDE, to += 64) {
      u32 words[2] = {0, 0};
#pragma unroll
      for (int k = 0; k < 8; ++k) words[k >> 2] |= (u32)group[places.of(k >> 1, k & 1)] << (8 * (k & 3));
      to[lane] = words[0];
      to[32 + lane] = words[1];
    }
  }
  __syncwarp();
}
#endif

// Counts a lane's units.
struct Counter {
  int left = 0, units = 0;
  __device__ __forceinline__ void ask(int need) {
    if (left < need) {
      left += 16;
      ++units;
    }
  }
  __device__ __forceinline__ void put(u32 entry) { left -= (int)(entry >> CODE_FIELD); }
};

// Writes a lane's units where a reader will take them: it has the bits left that the reader has.
struct Writer {
  unsigned short* units;
  u32 below;  // the lanes before this one
  int left = 0, next = 0;
  u32 pending = 0;  // bits that are in no unit yet, from the highest on
  int filled = 0;
  int current = 0, following = 0, taken = 0;  // units taken and not yet written: two at the most
  __device__ __forceinline__ void ask(int need) {
    const bool asks = left < need;
    const u32 votes = __ballot_sync(FULL, asks);
    if (asks) {
      const int unit = next + __popc(votes & below);
      if (taken) following = unit;
      else current = unit;
      ++taken;
      left += 16;
    }
    next += __popc(votes);
  }
  __device__ __forceinline__ void put(u32 entry) {
    const int count = (int)(entry >> CODE_FIELD);
    pending |= (entry & ((1u << CODE_FIELD) - 1)) << (32 - filled - count);
    filled += count;
    left -= count;
    if (filled >= 16) {
      units[current] = (unsigned short)(pending >> 16);
      pending <<= 16;
      filled -= 16;
      current = following;
      --taken;
    }
  }
  __device__ __forceinline__ void finish() {
    if (taken) units[current] = (unsigned short)(pending >> 16);
    if (taken > 1) units[following] = 0;
  }
};

// The code of a symbol; where it has none, that of exceptions, as which its values then count.
__device__ __forceinline__ u32 entry_of(const unsigned short* table, int symbol, int escape, u8* first, u8* second,
                                        int& exceptions) {
  const u32 entry = table[symbol];
  if (entry) return entry;
  if (*first) ++exceptions;
  *first = 0;
  if (*second) ++exceptions;
  *second = 0;
  return table[escape];
}

#define ESCAPE (GRANULARITY == LOSSLESS ? ESCAPE_SYMBOL : ZERO_SYMBOL)  // the symbol of single codes of exceptions

// Give `writer` the symbols of the tile in the stage, in their order.
template <class W>
__device__ __forceinline__ void write_symbols(const Tables& t, int head, const unsigned short* codes, u8* stage, int lane,
                                              W& writer, int& exceptions) {
  const int mine = about_block(t, head, lane);
  for (int b = 0; b < BLOCKS; ++b) {
    const int block = __shfl_sync(FULL, mine, b);
    const int longest = block >> 8 & 255, need = bits_needed(longest), radius = block >> 16;
    const bool always = longest > SHORT_BITS;
    const unsigned short* table = codes + (block & 255) * MAX_SYMBOLS;
    const Places places(t.order + head * DIM, b, lane);
    u8* group = stage;
    for (int j = 0; j < TOKENS / 16; ++j, group += 16 * STRIDE) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        u8 *first = group + places.of(i, 0), *second = group + places.of(i, 1);
        const int x = (*first ? *first : ESCAPE) - ZERO_SYMBOL, y = (*second ? *second : ESCAPE) - ZERO_SYMBOL;
        if (radius) {
          const int symbol = (x + radius) * (2 * radius + 1) + y + radius;
          if (always || i % 2 == 0) writer.ask(need);
          writer.put(entry_of(table, symbol, radius * (2 * radius + 2), first, second, exceptions));
        } else {
          writer.ask(need);
          writer.put(entry_of(table, x + ZERO_SYMBOL, ESCAPE, first, first, exceptions));
          if (always) writer.ask(need);
          writer.put(entry_of(table, y + ZERO_SYMBOL, ESCAPE, second, second, exceptions));
        }
      }
    }
  }
}

// Write the exceptions of a tile: those of its bytes that are 0, by position.
__device__ __forceinline__ void write_exceptions(const value_t* row, const u8* stage, u32* to, int lane) {
  for (int first = 0; first < VALUES; first += 128) {
    const int position = first + 4 * lane;
    const u32 bytes = *(const u32*)(stage + stage_at(position / DIM, position % DIM));
    u32 missed = 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) missed |= (u32)((bytes >> (8 * k) & 255) == 0) << k;
    if (!__any_sync(FULL, missed)) continue;
    const int up_to_me = inclusive_scan(__popc(missed), lane);
    u32* mine = to + (up_to_me - __popc(missed)) * EXCEPTION_WORDS;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (!(missed >> k & 1)) continue;
#if VALUE_BYTES == 4
      *mine++ = position + k;
      *mine++ = row[position + k];
#else
      *mine++ = (u32)(position + k) | (u32)row[position + k] << 16;
#endif
    }
    to += __shfl_sync(FULL, up_to_me, 31) * EXCEPTION_WORDS;
  }
}
