// Fixed-rate zfp in blocks of four values, and what is not finite beside it. See zfp_format.py and its
// twin, cpu/zfp.py. FRACTION_BITS, EXPONENT_BITS and INT_BITS say what values are, HEAD_BITS what a
// block's exponent takes. Integers alone are computed with, so that no rounding mode matters.
//
// A warp takes 32 blocks at a time, a block of the stream a lane: their bits are whole words.
#include "bits.cuh"
#include "mailbox.cuh"
#include "kept.cuh"

#define GROUP_VALUES 128                         // of a warp
#define STAGE_WORDS (MOST_BLOCK_BITS + 2)        // of a group's stream; the last ones may be read too
#define LOOKUP_ENTRIES (5 << PLANE_BITS)
#define MAGNITUDE (((u64)1 << (FRACTION_BITS + EXPONENT_BITS)) - 1)
#define INFINITE ((stored_t)((((u64)1 << EXPONENT_BITS) - 1) << FRACTION_BITS))
#define BIAS ((1 << (EXPONENT_BITS - 1)) - 1)
#if INT_BITS == 64
typedef u64 whole_t;  // an integer of a block, of two's complement
typedef i64 signed_t;
#define BLOCK_BIAS 1023
#define NEGABINARY 0xaaaaaaaaaaaaaaaaull
__device__ __forceinline__ int bit_length(u64 x) { return 64 - __clzll((i64)x); }
#else
typedef u32 whole_t;
typedef int signed_t;
#define BLOCK_BIAS 127
#define NEGABINARY 0xaaaaaaaau
__device__ __forceinline__ int bit_length(u32 x) { return 32 - __clz((int)x); }
#endif

__device__ __forceinline__ whole_t half_of(whole_t x) { return (whole_t)((signed_t)x >> 1); }
__device__ __forceinline__ bool is_infinite(stored_t x) { return (x & INFINITE) == INFINITE; }

struct NotFinite {
  __device__ __forceinline__ static bool keeps(const Row& row, int k, const stored_t*, int) {
    return is_infinite(row.x[k]);
  }
};

// The code of a plane behind `known` values, as zfp_format.code_of_plane: bits, their number from bit 8
// on, values known from bit 12 on.
__device__ __forceinline__ u32 code_of_plane(int known, u32 plane) {
  u32 code = plane & ((1u << known) - 1), rest = plane >> known;
  int bits = known;
  while (known < 4) {
    const u32 more = rest != 0;
    code |= more << bits++;
    if (!more) break;
    while (known < 3) {
      code |= (rest & 1) << bits++;
      if (rest & 1) break;
      rest >>= 1;
      ++known;
    }
    rest >>= 1;
    ++known;
  }
  return code | bits << 8 | known << 12;
}

// A plane whose four values are known to be at work is four bits: eight such planes are a word. Bits of a word are
// numbered by planes and values, iii vv, those of bytes by value and plane, vv iii; these two functions exchange
// them by swapping bits of the number. The values of the four bytes are 0, 2, 1, 3.
__device__ __forceinline__ u32 swap_bits(u32 x, u32 lower, int distance) {
  const u32 differ = (x >> distance ^ x) & lower;
  return x ^ differ ^ differ << distance;
}
__device__ __forceinline__ u32 bytes_of_planes(u32 x) {
  return swap_bits(swap_bits(swap_bits(x, 0x0a0a0a0au, 3), 0x00cc00ccu, 6), 0x0000f0f0u, 12);
}
__device__ __forceinline__ u32 planes_of_bytes(u32 x) {
  return swap_bits(swap_bits(swap_bits(x, 0x0000f0f0u, 12), 0x00cc00ccu, 6), 0x0a0a0a0au, 3);
}
// The eight bits of x below bit k, the highest one first; k is 1 at the least.
__device__ __forceinline__ u32 bits_below(whole_t x, int k) {
  return __brev((u32)(x << (INT_BITS - k) >> (INT_BITS - 32))) & 255;
}
// The same back.
__device__ __forceinline__ whole_t bits_from(u32 x, int k) {
  return (whole_t)__brev(x) << (INT_BITS - 32) >> (INT_BITS - k);
}

// The lowest plane that zfp keeps of a block.
__device__ __forceinline__ int least_plane(int exponent) {
  return max(0, INT_BITS - max(0, exponent - LEAST_EXPONENT + 4));
}

// A value as an integer in units of its block's exponent, cut off towards 0.
__device__ __forceinline__ whole_t aligned_value(stored_t x, int shift) {
  int field = (int)((x & MAGNITUDE) >> FRACTION_BITS);
  whole_t fraction = (whole_t)(x & (((stored_t)1 << FRACTION_BITS) - 1));
  if (field) fraction |= (whole_t)1 << FRACTION_BITS;
  else field = 1;
  const int by = field + shift;
  const whole_t y = by >= 0 ? fraction << by : by > -INT_BITS ? fraction >> -by : 0;
  return x >> (FRACTION_BITS + EXPONENT_BITS) & 1 ? 0 - y : y;
}

// Bits that are appended to a lane's part of the stream in shared memory, which is zeroed.
struct Writer {
  u32* word;
  u64 carry;
  int filled;

  __device__ __forceinline__ void put(u32 bits, int count) {  // at most 32
    carry |= (u64)bits << filled;
    filled += count;
    if (filled >= 32) {
      atomicOr(word++, (u32)carry);
      carry >>= 32;
      filled -= 32;
    }
  }
  __device__ __forceinline__ void skip(int count) {  // zeros
    filled += count;
    while (filled >= 32) {
      if ((u32)carry) atomicOr(word, (u32)carry);
      ++word;
      carry >>= 32;
      filled -= 32;
    }
  }
  __device__ __forceinline__ void end() {
    if ((u32)carry) atomicOr(word, (u32)carry);
  }
};

__device__ __forceinline__ void encode_block(stored_t v0, stored_t v1, stored_t v2, stored_t v3, int block_bits,
                                             const unsigned short* codes, Writer& to) {
  const stored_t magnitude = (stored_t)MAGNITUDE;
  const stored_t a = v0 & magnitude, b = v1 & magnitude, c = v2 & magnitude, d = v3 & magnitude;
  const stored_t ab = a > b ? a : b, cd = c > d ? c : d;
  const stored_t most = ab > cd ? ab : cd;
  if (most == 0) return;  // zeros
  int field = (int)(most >> FRACTION_BITS);
  whole_t fraction = (whole_t)(most & (((stored_t)1 << FRACTION_BITS) - 1));
  if (field) fraction |= (whole_t)1 << FRACTION_BITS;
  else field = 1;
  const int exponent = max(bit_length(fraction) + field - BIAS - FRACTION_BITS, 1 - BLOCK_BIAS);
  to.put(2 * (u32)(exponent + BLOCK_BIAS) + 1, HEAD_BITS);
  int left = block_bits - HEAD_BITS;
  const int shift = INT_BITS - 2 - exponent - BIAS - FRACTION_BITS;
  whole_t p0 = aligned_value(v0, shift), p1 = aligned_value(v1, shift);
  whole_t p2 = aligned_value(v2, shift), p3 = aligned_value(v3, shift);
  p0 = half_of(p0 + p3);
  p3 -= p0;
  p2 = half_of(p2 + p1);
  p1 -= p2;
  p0 = half_of(p0 + p2);
  p2 -= p0;
  p3 = half_of(p3 + p1);
  p1 -= p3;
  p3 += half_of(p1);
  p1 -= half_of(p3);
  p0 = (p0 + NEGABINARY) ^ NEGABINARY;
  p1 = (p1 + NEGABINARY) ^ NEGABINARY;
  p2 = (p2 + NEGABINARY) ^ NEGABINARY;
  p3 = (p3 + NEGABINARY) ^ NEGABINARY;
  const int least = least_plane(exponent);
  int k = max(bit_length(p0 | p1 | p2 | p3), least);
  const int skipped = min(INT_BITS - k, left);  // a bit 0 for each plane above the highest bit
  left -= skipped;
  to.skip(skipped);
  int known = 0;
  while (left > 0 && k > least && known < 4) {
    --k;
    const u32 plane = (u32)(p0 >> k & 1) | (u32)(p1 >> k & 1) << 1 | (u32)(p2 >> k & 1) << 2 | (u32)(p3 >> k & 1) << 3;
    const u32 entry = codes[known << 4 | plane];
    const int count = min((int)(entry >> 8 & 15), left);
    known = (int)(entry >> 12);
    left -= count;
    to.put(entry & ((1u << count) - 1), count);
  }
  while (left > 0 && k > least) {
    const int planes = min(8, k - least), count = min(4 * planes, left);
    const u32 bytes =
        bits_below(p0, k) | bits_below(p2, k) << 8 | bits_below(p1, k) << 16 | bits_below(p3, k) << 24;
    to.put(planes_of_bytes(bytes) & FULL >> (32 - count), count);
    k -= planes;
    left -= count;
  }
}

// Four values from position i of n on, filled up as zfp does.
__device__ __forceinline__ void load_values(const stored_t* __restrict__ x, i64 i, i64 n, stored_t (&v)[4]) {
  if (i + 4 <= n) {
    if (((u64)x & (4 * CHUNK_BYTES - 1) & 15) == 0) {
#if CHUNK_BYTES == 8
      const ulonglong2 low = *(const ulonglong2*)(x + i), high = *(const ulonglong2*)(x + i + 2);
      v[0] = low.x, v[1] = low.y, v[2] = high.x, v[3] = high.y;
#elif CHUNK_BYTES == 4
      const uint4 all = *(const uint4*)(x + i);
      v[0] = all.x, v[1] = all.y, v[2] = all.z, v[3] = all.w;
#else
      const uint2 all = *(const uint2*)(x + i);
      v[0] = (stored_t)all.x, v[1] = (stored_t)(all.x >> 16), v[2] = (stored_t)all.y, v[3] = (stored_t)(all.y >> 16);
#endif
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) v[j] = x[i + j];
    }
  } else {
    v[0] = x[i];
    v[1] = i + 1 < n ? x[i + 1] : v[0];
    v[2] = i + 2 < n ? x[i + 2] : v[1];
    v[3] = v[0];
  }
}

// Write the stream, and how many values of each row are not finite: those are 0 in the stream.
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
    encode_zfp(const stored_t* __restrict__ x, i64 n, int block_bits, u32* __restrict__ stream, i64 stream_words,
               i64* __restrict__ counts) {
  __shared__ unsigned short codes[80];
  __shared__ u32 stages[ROW_WARPS][STAGE_WORDS];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  if (threadIdx.x < 80) codes[threadIdx.x] = (unsigned short)code_of_plane(threadIdx.x >> 4, threadIdx.x & 15);
  __syncthreads();
  u32* stage = stages[warp];
  for (i64 row = blockIdx.x; row * ROW_UNITS < n; row += gridDim.x) {
    int bad = 0;
    for (int g = warp; g < ROW_UNITS / GROUP_VALUES; g += ROW_WARPS) {
      const i64 group = row * (ROW_UNITS / GROUP_VALUES) + g;
      if (group * GROUP_VALUES >= n) break;
      for (int j = lane; j < block_bits + 2; j += 32) stage[j] = 0;
      __syncwarp();
      const i64 i = group * GROUP_VALUES + 4 * lane;
      if (i < n) {
        stored_t v[4];
        load_values(x, i, n, v);
#pragma unroll
        for (int j = 0; j < 4; ++j)
          if (is_infinite(v[j])) {
            bad += i + j < n;
            v[j] = 0;
          }
        const int bit = lane * block_bits;
        Writer to = {stage + (bit >> 5), 0, bit & 31};
        encode_block(v[0], v[1], v[2], v[3], block_bits, codes, to);
        to.end();
      }
      __syncwarp();
      // Behind the last group the stream may have one word more, of zeros.
      const i64 at = group * block_bits;
      const int words = (group + 1) * GROUP_VALUES >= n ? (int)min(stream_words - at, (i64)block_bits + 2) : block_bits;
      for (int j = lane; j < words; j += 32) stream[at + j] = stage[j];
      __syncwarp();
    }
    bad = sum_of_block(bad);
    if (threadIdx.x == 0) counts[row] = bad;
  }
}

extern "C" __global__ void __launch_bounds__(ROW_THREADS)
    pack_zfp(const stored_t* __restrict__ x, i64 units, i64 starts_at, i64 values_at, u8* __restrict__ out) {
  pack_rows<NotFinite, true>(x, units, starts_at, values_at, out, nullptr);
}

// The bits of y times two to the power of `unit`, rounded to nearest, ties to even; what is too large
// becomes the largest finite value. Exponents are below 2^8 (2^11), so that all fits in an integer of a block.
__device__ __forceinline__ stored_t value_of(whole_t y, int unit) {
  const bool negative = (signed_t)y < 0;
  const whole_t size = negative ? 0 - y : y;
  if (size == 0) return 0;
  const int count = bit_length(size);
  const int above = max(count - 1 + unit + BIAS - 1, 0);  // of the least normal exponent
  const int shift = above - BIAS + 1 - FRACTION_BITS - unit;
  whole_t fraction;
  if (shift <= 0) {
    fraction = size << -shift;
  } else if (shift > count || shift >= INT_BITS) {
    // Less than half of the least number, or half: of all bits of an integer only the highest is set.
    fraction = 0;
  } else {
    const whole_t rest = size & (((whole_t)1 << shift) - 1), half = (whole_t)1 << (shift - 1);
    fraction = size >> shift;
    fraction += rest > half || (rest == half && (fraction & 1));
  }
  whole_t bits = ((whole_t)above << FRACTION_BITS) + fraction;
  const whole_t infinite = (((whole_t)1 << EXPONENT_BITS) - 1) << FRACTION_BITS;
  if (bits >= infinite) bits = infinite - 1;
  return (stored_t)(bits | (whole_t)negative << (FRACTION_BITS + EXPONENT_BITS));
}

// A lane's part of the stream in shared memory.
struct BitReader {
  const u32* stage;
  int bit;

  __device__ __forceinline__ u32 next() const {  // 32 bits
    return __funnelshift_r(stage[bit >> 5], stage[(bit >> 5) + 1], bit & 31);
  }
};

// A plane when `left` bits may not hold its code; it ends with them. Where they end among the bits up
// to a further 1, that 1 is taken to come next.
__device__ __forceinline__ u32 last_plane(u32 bits, int& known, int& left) {
  const int count = min(known, left);
  u32 plane = bits & ((1u << count) - 1);
  bits >>= count;
  left -= count;
  while (left > 0 && known < 4) {
    --left;
    const u32 more = bits & 1;
    bits >>= 1;
    if (!more) break;
    while (left > 0 && known < 3) {
      --left;
      const u32 found = bits & 1;
      bits >>= 1;
      if (found) break;
      ++known;
    }
    plane |= 1u << known++;
  }
  return plane;
}

__device__ __forceinline__ void decode_block(BitReader from, int block_bits, const unsigned short* lookup,
                                             stored_t (&v)[4]) {
  v[0] = v[1] = v[2] = v[3] = 0;
  const u32 head = from.next();
  if (!(head & 1)) return;
  const int exponent = (int)(head >> 1 & ((1u << (HEAD_BITS - 1)) - 1)) - BLOCK_BIAS;
  from.bit += HEAD_BITS;
  int left = block_bits - HEAD_BITS, known = 0, k = INT_BITS;
  const int least = least_plane(exponent);
  whole_t p0 = 0, p1 = 0, p2 = 0, p3 = 0;
  while (left > 0 && k > least && known < 4) {
    const u32 bits = from.next();
    u32 plane;
    if (known == 0 && !(bits & 1)) {  // planes of zeros
      const int zeros = min(min(bits ? __ffs((int)bits) - 1 : 32, left), k - least);
      k -= zeros;
      left -= zeros;
      from.bit += zeros;
      continue;
    }
    --k;
    if (left >= PLANE_BITS) {
      const u32 entry = lookup[known << PLANE_BITS | (bits & ((1u << PLANE_BITS) - 1))];
      plane = entry & 15;
      known = (int)(entry >> 12);
      left -= (int)(entry >> 8 & 15);
      from.bit += (int)(entry >> 8 & 15);
    } else {
      const int before = left;
      plane = last_plane(bits, known, left);
      from.bit += before - left;
    }
    p0 |= (whole_t)(plane & 1) << k;
    p1 |= (whole_t)(plane >> 1 & 1) << k;
    p2 |= (whole_t)(plane >> 2 & 1) << k;
    p3 |= (whole_t)(plane >> 3) << k;
  }
  while (left > 0 && k > least) {
    const int planes = min(8, k - least), count = min(4 * planes, left);
    const u32 bytes = bytes_of_planes(from.next() & FULL >> (32 - count));
    p0 |= bits_from(bytes & 255, k);
    p2 |= bits_from(bytes >> 8 & 255, k);
    p1 |= bits_from(bytes >> 16 & 255, k);
    p3 |= bits_from(bytes >> 24, k);
    from.bit += count;
    k -= planes;
    left -= count;
  }
  p0 = (p0 ^ NEGABINARY) - NEGABINARY;
  p1 = (p1 ^ NEGABINARY) - NEGABINARY;
  p2 = (p2 ^ NEGABINARY) - NEGABINARY;
  p3 = (p3 ^ NEGABINARY) - NEGABINARY;
  p1 += half_of(p3);
  p3 -= half_of(p1);
  p1 += p3;
  p3 = (p3 << 1) - p1;
  p2 += p0;
  p0 = (p0 << 1) - p2;
  p1 += p2;
  p2 = (p2 << 1) - p1;
  p3 += p0;
  p0 = (p0 << 1) - p3;
  const int unit = exponent - (INT_BITS - 2);
  v[0] = value_of(p0, unit);
  v[1] = value_of(p1, unit);
  v[2] = value_of(p2, unit);
  v[3] = value_of(p3, unit);
}

__device__ __forceinline__ void store_values(stored_t* __restrict__ out, i64 i, i64 n, const stored_t (&v)[4]) {
  if (i + 4 <= n && ((u64)out & (4 * CHUNK_BYTES - 1) & 15) == 0) {
#if CHUNK_BYTES == 8
    *(ulonglong2*)(out + i) = make_ulonglong2(v[0], v[1]);
    *(ulonglong2*)(out + i + 2) = make_ulonglong2(v[2], v[3]);
#elif CHUNK_BYTES == 4
    *(uint4*)(out + i) = make_uint4(v[0], v[1], v[2], v[3]);
#else
    *(uint2*)(out + i) = make_uint2((u32)v[0] | (u32)v[1] << 16, (u32)v[2] | (u32)v[3] << 16);
#endif
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (i + j < n) out[i + j] = v[j];
  }
}

extern "C" __global__ void __launch_bounds__(ROW_THREADS)
    decode_zfp(const u8* __restrict__ data, i64 data_bytes, i64 n, int block_bits, i64 stream_words, i64 starts_at,
               i64 values_at, stored_t* __restrict__ out, i64* mailbox) {
  __shared__ unsigned short lookup[LOOKUP_ENTRIES];
  __shared__ u32 stages[ROW_WARPS][STAGE_WORDS];
  const i64 kept = sound_kept(data, data_bytes, n, ZFP_FORM, CHUNK_BYTES, COLUMN_BYTES,
                              HEADER_BYTES + 4 * stream_words, values_at);
  if (kept == DAMAGED) {
    if (blockIdx.x == 0 && threadIdx.x == 0) report(mailbox, ERROR_BLOB, -1, 0, 0);
    return;
  }
  if (kept == RAW) {
    copy_units((const stored_t*)(data + HEADER_BYTES), out, n);
    return;
  }
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  // Each code of a plane, and whatever bits follow it, up to PLANE_BITS.
  for (int e = threadIdx.x; e < 80; e += ROW_THREADS) {
    const u32 entry = code_of_plane(e >> 4, e & 15);
    const int count = (int)(entry >> 8 & 15);
    for (u32 rest = 0; rest < 1u << (PLANE_BITS - count); ++rest)
      lookup[(e >> 4) << PLANE_BITS | rest << count | (entry & 255)] = (unsigned short)((entry & 0xff00) | (e & 15));
  }
  __syncthreads();
  const u32* stream = (const u32*)(data + HEADER_BYTES);
  const i64* starts = (const i64*)(data + starts_at);
  const stored_t* values = (const stored_t*)(data + values_at);
  const unsigned short* columns = (const unsigned short*)(data + values_at + aligned_bytes(kept * CHUNK_BYTES));
  u32* stage = stages[warp];
  for (i64 row = blockIdx.x; row * ROW_UNITS < n; row += gridDim.x) {
    for (int g = warp; g < ROW_UNITS / GROUP_VALUES; g += ROW_WARPS) {
      const i64 group = row * (ROW_UNITS / GROUP_VALUES) + g;
      if (group * GROUP_VALUES >= n) break;
      const i64 at = group * block_bits;
      for (int j = lane; j < block_bits + 2; j += 32) stage[j] = j < block_bits && at + j < stream_words ? stream[at + j] : 0;
      __syncwarp();
      const i64 i = group * GROUP_VALUES + 4 * lane;
      if (i < n) {
        stored_t v[4];
        decode_block(BitReader{stage, lane * block_bits}, block_bits, lookup, v);
        store_values(out, i, n, v);
      }
      __syncwarp();
    }
    if (kept == 0) continue;
    __syncthreads();
    const int count = units_of(row, n);
    const bool sound = put_row<1>(starts, values, columns, row, count, kept, n, out + row * ROW_UNITS);
    if (!sound) report(mailbox, ERROR_BLOB, row, 0, 0);
  }
}
