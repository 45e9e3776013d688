// How a warp codes a tile: see quantized.cu, which includes this.

// Integers in the order of the floats of these bits.
__device__ __forceinline__ int key_of(float x) {
  const int bits = __float_as_int(x);
  return bits ^ (bits >> 31 & 0x7fffffff);
}
__device__ __forceinline__ float float_of_key(int key) { return __int_as_float(key ^ (key >> 31 & 0x7fffffff)); }
__device__ __forceinline__ u32 magnitude(float x) { return __float_as_uint(x) & 0x7fffffff; }

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

// The mean square of a token times the square of the scale, in all lanes.
__device__ __forceinline__ float scaled_square(const Tables& t, const value_t* token, int lane) {
  float sum = 0;
#pragma unroll
  for (int c = 0; c < DIM; c += 32) {
    if (c + lane >= DIM) break;
    const float x = float_of(__ldg(token + c + lane));
    if (magnitude(x) < 0x7f800000) sum = add_exact(sum, multiply_exact(x, x));
  }
#pragma unroll
  for (int d = 16; d; d >>= 1) sum = add_exact(sum, __shfl_xor_sync(FULL, sum, d));
  return multiply_exact(multiply_exact(sum, t.inverse_dim), t.scale);
}

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
  for (int first = 0; first < TOKENS; first += 32) {
    const int count = min(32, TOKENS - first);
#if GRANULARITY == TOKEN_LEVEL
    float square = 0;
#else
    Range range;
#endif
#pragma unroll 4
    for (int k = 0; k < count; ++k) {
      const value_t* token = row + (first + k) * DIM;
#if GRANULARITY == TOKEN_LEVEL
      const float found = scaled_square(t, token, lane);
      if (k == lane) square = found;
#else
      Range part;
      for (int c = lane; c < DIM; c += 32) part.add(__ldg(token + c));
      part.least = __reduce_min_sync(FULL, part.least);
      part.largest = __reduce_max_sync(FULL, part.largest);
      if (k == lane) range = part;
#endif
    }
    if (lane < count) {
#if GRANULARITY == TOKEN_LEVEL
      const int level = level_of(t, square);
      ((u8*)parameters)[first + lane] = (u8)level;
      set_scale(s, first + lane, __ldg(t.level_steps + level), 0.f);
#else
      const u32 word = parameters[first + lane] = range.word(t.scale);
      set_range(s, first + lane, word);
#endif
    }
  }
#elif GRANULARITY == BLOCK_RANGE
  Range range;
#pragma unroll 4
  for (int i = lane; i < VALUES; i += 32) range.add(__ldg(row + i));
  range.least = __reduce_min_sync(FULL, range.least);
  range.largest = __reduce_max_sync(FULL, range.largest);
  if (lane == 0) {
    parameters[0] = range.word(t.scale);
    set_range(s, 0, parameters[0]);
  }
#endif
  __syncwarp();
}

// The byte of a value: its code + 128, or 0 for an exception.
__device__ __forceinline__ u32 quantised(u32 bits, float step, float center, float inverse, float limit) {
  const float x = float_of(bits);
  const float code = rintf(multiply_exact(subtract_exact(x, center), inverse));
  bool fits = fabsf(code) <= limit;  // not where it is NaN
  const float decoded = rounded(add_exact(center, multiply_exact(step, fits ? code : 0.f)));
  // Compared as integers: -ftz would take subnormal ones for zero.
  const float largest = __uint_as_float(max(magnitude(decoded), LEAST_NORMAL));
  const float allowed = add_exact(multiply_exact(0.5f, step), multiply_exact(ROUNDING, largest));
  fits = fits && magnitude(subtract_exact(decoded, x)) <= magnitude(allowed) && magnitude(decoded) < 0x7f800000;
  return fits ? (u32)((int)code + ZERO_SYMBOL) : 0;
}

// Write the bytes of a tile to the stage; return how many of this lane's are exceptions.
__device__ __forceinline__ int quantise(const value_t* row, const Scales& s, u8* stage, int lane) {
  Vector q;
  const int fixed = lane % PIECES * VECTOR;
  if (SAME_CHANNELS) q.load_limits(s, fixed);
  if (SAME_CHANNELS && !BY_TOKEN) q.load<true>(s, 0, fixed);
  int exceptions = 0;
#pragma unroll 2
  for (int piece = lane; piece < ROW_PIECES; piece += 32) {
    const int token = piece / PIECES, channel = SAME_CHANNELS ? fixed : piece % PIECES * VECTOR;
    if (!SAME_CHANNELS) q.load_limits(s, channel);
    if (!SAME_CHANNELS || BY_TOKEN) q.load<true>(s, token, channel);
    const uint4 x = __ldg((const uint4*)row + piece);
    const u32 words[4] = {x.x, x.y, x.z, x.w};
    u32 bytes[VECTOR / 4];
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) {
      const u32 bits = VALUE_BYTES == 4 ? words[v & 3] : words[v >> 1] >> (16 * (v & 1)) & 0xffff;
      const u32 byte = quantised(bits, q.step[v], q.center[v], q.inverse[v], q.limit[v]);
      exceptions += byte == 0;
      if (v % 4 == 0) bytes[v >> 2] = byte;
      else bytes[v >> 2] |= byte << (8 * (v & 3));
    }
    u32* to = (u32*)(stage + token * STRIDE + channel);
#if VECTOR == 8
    *(uint2*)to = make_uint2(bytes[0], bytes[1]);
#else
    *to = bytes[0];
#endif
  }
  __syncwarp();
  return exceptions;
}

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

// The code of a symbol; where it has none, that of zeros, and its values become exceptions.
__device__ __forceinline__ u32 entry_of(const unsigned short* table, int symbol, int zero, u8* first, u8* second,
                                        int& exceptions) {
  const u32 entry = table[symbol];
  if (entry) return entry;
  if (*first) ++exceptions;
  *first = 0;
  if (*second) ++exceptions;
  *second = 0;
  return table[zero];
}

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
        const int x = *first ? *first - ZERO_SYMBOL : 0, y = *second ? *second - ZERO_SYMBOL : 0;
        if (radius) {
          const int symbol = (x + radius) * (2 * radius + 1) + y + radius;
          if (always || i % 2 == 0) writer.ask(need);
          writer.put(entry_of(table, symbol, radius * (2 * radius + 2), first, second, exceptions));
        } else {
          writer.ask(need);
          writer.put(entry_of(table, x + ZERO_SYMBOL, ZERO_SYMBOL, first, first, exceptions));
          if (always) writer.ask(need);
          writer.put(entry_of(table, y + ZERO_SYMBOL, ZERO_SYMBOL, second, second, exceptions));
        }
      }
    }
  }
}

// Write the exceptions of a tile: those of its bytes that are 0, by position.
__device__ __forceinline__ void write_exceptions(const value_t* row, const u8* stage, u32* to, int lane) {
  for (int first = 0; first < VALUES; first += 128) {
    const int position = first + 4 * lane;
    const u32 bytes = *(const u32*)(stage + position / DIM * STRIDE + position % DIM);
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
