// What a warp does with query rows: products with keys, exponents, weights, sums of values; coded tiles
// by the matrix instruction, other tokens one by one in float32.
//
// LOSSLESS, NT groups of four query rows and SETS of right operands come from the host. An operand has eight columns:
// of four rows two halves each, which are as exact as float32; or, with half as many sets as groups, of eight
// rows one half. A lane's columns 2 t and 2 t + 1 of set m are row 4 m + t, or rows 8 m + t and 8 m + t + 4.
#define ROWS (4 * NT)
#define IN_TWO_HALVES (SETS == NT)
#define LEVEL_ZERO 192  // as in tile_format.py, whose tests compare
#define LOG2E 1.4426950408889634f
#define NO_WEIGHT (-__int_as_float(0x7f800000))

// Operands are halves: codes, or values of lossless tiles; of bfloat16 values they are such.
#define BRAIN_OPERANDS (LOSSLESS && VALUE_KIND == 0)

// Of halves weights are 2^15 at the most, and second halves are scaled by 2^11: so small ones remain. bfloat16
// has the exponents of float32, sums of large values must not exceed which: there is no scale.
#if BRAIN_OPERANDS
#define WEIGHT_SHIFT 0.0f
#define WEIGHT_UNIT 1.0f  // 2^-WEIGHT_SHIFT
#define SECOND_SCALE 1.0f
#else
#define WEIGHT_SHIFT 15.0f
#define WEIGHT_UNIT (1.0f / (1 << 15))
#define SECOND_SCALE 2048.0f
#endif

__device__ __forceinline__ u16 operand_of(float x) {
  return BRAIN_OPERANDS ? bits_of_value(x) : float_to_half(x);
}
__device__ __forceinline__ float value_of_operand(u16 x) {
  return BRAIN_OPERANDS ? value_of_bits(x) : half_to_float(x);
}
__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
#if BRAIN_OPERANDS
  multiply_bfloats(c, a, b);
#else
  multiply_halves(c, a, b);
#endif
}

// What an exception of a lossless tile counts as among its operands: its byte of the plane, without coded bits. That
// is subnormal, so that what is added in its stead is the value itself, or of float16 off by 2^-17 at the most.
__device__ __forceinline__ float as_coded(u32 bits) { return value_of_bits(bits & 0x807f); }

#if LOSSLESS
// Hands operands of a lossless tile to a taker: the bits that are coded, and those of the plane behind the units,
// which are asked for a block ahead.
template <class Taker> struct Joined {
  Taker& taker;
  const u32* next;  // the lane's first word of the next block
  int left;         // blocks from that one on
  u32 low[GROUPS][2];

  __device__ __forceinline__ Joined(Taker& taker, const Tile& tile, int parameter_words, int blocks)
      : taker(taker),
        next(tile.words + 1 + parameter_words + (tile.units + 1) / 2 + (threadIdx.x & 31)),
        left(blocks) {
#pragma unroll
    for (int j = 0; j < GROUPS; ++j) load(j);
    pass();
  }
  __device__ __forceinline__ void load(int j) {
    low[j][0] = __ldg(next + 64 * j);
    low[j][1] = __ldg(next + 64 * j + 32);
  }
  __device__ __forceinline__ void pass() {
    next += 64 * GROUPS;
    --left;
  }
  __device__ __forceinline__ void begin(int b) { taker.begin(b); }
  __device__ __forceinline__ void take(int j, const u32 (&a)[4]) {
    u32 x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = a[i] | (__byte_perm(low[j][i >> 1], 0, i & 1 ? 0x3322 : 0x1100) & 0x807f807fu);
    taker.take(j, x);
    if (left > 0) load(j);
  }
  __device__ __forceinline__ void finish(int b) {
    taker.finish(b);
    pass();
  }
};
#else
// Hands operands to a taker.
template <class Taker> struct Joined {
  Taker& taker;
  __device__ __forceinline__ Joined(Taker& taker, const Tile&, int, int) : taker(taker) {}
  __device__ __forceinline__ void begin(int b) { taker.begin(b); }
  __device__ __forceinline__ void take(int j, const u32 (&a)[4]) { taker.take(j, a); }
  __device__ __forceinline__ void finish(int b) { taker.finish(b); }
};
#endif

// The sum of row 4 i + t, of a set's sums of one row of the left operand.
__device__ __forceinline__ float sum_of_row(const float (&sums)[SETS][4], int i, int h) {
#if IN_TWO_HALVES
  return sums[i][2 * h] + sums[i][2 * h + 1] * (1.0f / SECOND_SCALE);
#else
  return sums[i / 2][2 * h + (i & 1)];
#endif
}

struct KeyTaker {
  const uint2* query;  // operands, [blocks][SETS][32]
  u32 q[SETS][2];
  float sum[GROUPS][SETS][4];

  __device__ __forceinline__ KeyTaker(const uint2* query) : query(query) {
#pragma unroll
    for (int j = 0; j < GROUPS; ++j)
#pragma unroll
      for (int n = 0; n < SETS; ++n)
#pragma unroll
        for (int k = 0; k < 4; ++k) sum[j][n][k] = 0;
  }
  __device__ __forceinline__ void begin(int b) {
#pragma unroll
    for (int n = 0; n < SETS; ++n) {
      const uint2 x = query[(b * SETS + n) * 32 + (threadIdx.x & 31)];
      q[n][0] = x.x;
      q[n][1] = x.y;
    }
  }
  __device__ __forceinline__ void take(int j, const u32 (&a)[4]) {
#pragma unroll
    for (int n = 0; n < SETS; ++n) multiply(sum[j][n], a, q[n]);
  }
  __device__ __forceinline__ void finish(int) {}
};

struct ValueTaker {
  float2* out;  // of the warp, [blocks][NT][32]
  const float (&decay)[NT];
  const u32 (&weights)[GROUPS][SETS][2];
  float sum[SETS][4];

  __device__ __forceinline__ ValueTaker(float2* out, const float (&decay)[NT], const u32 (&weights)[GROUPS][SETS][2])
      : out(out), decay(decay), weights(weights) {}
  __device__ __forceinline__ void begin(int) {
#pragma unroll
    for (int n = 0; n < SETS; ++n)
#pragma unroll
      for (int k = 0; k < 4; ++k) sum[n][k] = 0;
  }
  __device__ __forceinline__ void take(int j, const u32 (&a)[4]) {
#pragma unroll
    for (int n = 0; n < SETS; ++n) multiply(sum[n], a, weights[j][n]);
  }
  __device__ __forceinline__ void finish(int b) {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      float2& o = out[(b * NT + n) * 32 + (threadIdx.x & 31)];
#if IN_TWO_HALVES
      const float low = WEIGHT_UNIT / SECOND_SCALE;
      o.x = sum[n][0] * WEIGHT_UNIT + (sum[n][1] * low + o.x * decay[n]);
      o.y = sum[n][2] * WEIGHT_UNIT + (sum[n][3] * low + o.y * decay[n]);
#else
      o.x = sum[n / 2][n & 1] * WEIGHT_UNIT + o.x * decay[n];
      o.y = sum[n / 2][2 + (n & 1)] * WEIGHT_UNIT + o.y * decay[n];
#endif
    }
  }
};

// Codes of a tile of V that one warp decodes and another multiplies: two bytes for a pair of them,
// [blocks][GROUPS][32]. The bytes are the upper ones of halves where a class has its codes whole in
// them, else the codes + 128. Of lossless tiles they are the bits that are coded.
__device__ __forceinline__ bool in_upper_bytes(const int4* about, int b) { return about[b].w >> 5 <= LONG_PAIRS; }

struct StageTaker {
  uint2* to;
  const int4* about;  // as in Coder
  bool upper;

  __device__ __forceinline__ StageTaker(uint2* stage, const int4* about) : to(stage + (threadIdx.x & 31)), about(about) {}
  __device__ __forceinline__ void begin(int b) { upper = in_upper_bytes(about, b); }
  __device__ __forceinline__ void take(int j, const u32 (&a)[4]) {
    uint2 bytes;
    if (LOSSLESS) {
      bytes = make_uint2(__byte_perm(a[0] << 1, a[1] << 1, 0x7531), __byte_perm(a[2] << 1, a[3] << 1, 0x7531));
    } else if (upper) {
      bytes = make_uint2(__byte_perm(a[0], a[1], 0x7531), __byte_perm(a[2], a[3], 0x7531));
    } else {
      u32 x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = subtract_halves(a[i], 0xe480e480u);  // 1024 + 128 + code
      bytes = make_uint2(__byte_perm(x[0], x[1], 0x6420), __byte_perm(x[2], x[3], 0x6420));
    }
    to[32 * j] = bytes;
  }
  __device__ __forceinline__ void finish(int) { to += 32 * GROUPS; }
};

template <class Taker>
__device__ __forceinline__ void take_staged(const uint2* stage, const int4* about, int blocks, Taker& taker) {
  const uint2* from = stage + (threadIdx.x & 31);
#pragma unroll 1
  for (int b = 0; b < blocks; ++b, from += 32 * GROUPS) {
    const bool upper = in_upper_bytes(about, b);
    taker.begin(b);
#pragma unroll
    for (int j = 0; j < GROUPS; ++j) {
      const uint2 bytes = from[32 * j];
      u32 a[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const u32 two = i < 2 ? bytes.x : bytes.y;
        if (LOSSLESS) a[i] = __byte_perm(two, 0, i & 1 ? 0x3424 : 0x1404) >> 1;
        else if (upper) a[i] = __byte_perm(two, 0, i & 1 ? 0x3424 : 0x1404);
        else a[i] = subtract_halves(__byte_perm(two, 0x64646464u, i & 1 ? 0x4342 : 0x4140), 0x64806480u);
      }
      taker.take(j, a);
    }
    taker.finish(b);
  }
}

// ---------------------------------------------------------------- softmax

struct Mask {
  int first;        // position that counts
  int last[NT];     // of each row of the lane: the last one that it sees; -1: no row
  float scaling, softcap;
};
struct Sums {  // of the rows of a lane; `sum` of its tokens alone
  float most[NT], sum[NT];
};

// Turn products into exponents: scaled, capped, in powers of two, those that are masked -infinity.
template <int N>
__device__ __forceinline__ void to_exponents(float (&s)[N][2][NT], int first_token, int tokens, const Mask& mask) {
  const int g = (threadIdx.x & 31) >> 2;
#pragma unroll
  for (int j = 0; j < N; ++j)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int token = 16 * j + 8 * h + g, position = first_token + token;
      const bool counts = token < tokens && position >= mask.first;
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        float x = s[j][h][n] * mask.scaling;
        if (mask.softcap != 0) x = mask.softcap * tanhf(x / mask.softcap);
        s[j][h][n] = counts && position <= mask.last[n] ? x * LOG2E : NO_WEIGHT;
      }
    }
}
// Take tokens at positions from `begin` to `end` out of those that count: another run has them.
template <int N>
__device__ __forceinline__ void hide(float (&s)[N][2][NT], int first_token, int begin, int end) {
  const int g = (threadIdx.x & 31) >> 2;
#pragma unroll
  for (int j = 0; j < N; ++j)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int position = first_token + 16 * j + 8 * h + g;
      if (position < begin || position >= end) continue;
#pragma unroll
      for (int n = 0; n < NT; ++n) s[j][h][n] = NO_WEIGHT;
    }
}
// Turn exponents into weights 2^(exponent + step - greatest one + WEIGHT_SHIFT), steps being logarithms.
template <int N>
__device__ __forceinline__ void to_weights(float (&s)[N][2][NT], const float (&step)[N][2], Sums& sums,
                                           float (&decay)[NT]) {
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    float most = sums.most[n];
#pragma unroll
    for (int j = 0; j < N; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h) most = fmaxf(most, s[j][h][n] + step[j][h]);
#pragma unroll
    for (int by = 4; by < 32; by *= 2) most = fmaxf(most, __shfl_xor_sync(FULL, most, by));
    const float from = most == NO_WEIGHT ? 0 : most;
    decay[n] = exp2f(sums.most[n] - from);
    sums.most[n] = most;
    float sum = sums.sum[n] * decay[n];
#pragma unroll
    for (int j = 0; j < N; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        s[j][h][n] = exp2f(s[j][h][n] + step[j][h] - from + WEIGHT_SHIFT);
        sum += s[j][h][n] * exp2f(-step[j][h] - WEIGHT_SHIFT);
      }
    sums.sum[n] = sum;
  }
}

// ---------------------------------------------------------------- values that are not coded

// Products of the query with tokens g and g + 8, whose keys begin at first and second (null: none).
__device__ __forceinline__ void raw_products(const u32* first, const u32* second, int dim, const float* query,
                                             float (&s)[2][NT]) {
  const int t = threadIdx.x & 3;
  const u32* from[2] = {first, second};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float sum[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) sum[r] = 0;
    if (from[h]) {
      for (int c = t; c < dim / 8; c += 4) {
        float x[8];
        load_eight(from[h] + c * EIGHT_WORDS, x);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
          const float4* q = (const float4*)(query + r * dim + 8 * c);
          const float4 u = q[0], v = q[1];
          sum[r] += x[0] * u.x + x[1] * u.y + x[2] * u.z + x[3] * u.w + x[4] * v.x + x[5] * v.y + x[6] * v.z + x[7] * v.w;
        }
      }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      sum[r] += __shfl_xor_sync(FULL, sum[r], 1);
      sum[r] += __shfl_xor_sync(FULL, sum[r], 2);
    }
#pragma unroll
    for (int n = 0; n < NT; ++n)
      s[h][n] = t & 2 ? (t & 1 ? sum[4 * n + 3] : sum[4 * n + 2]) : (t & 1 ? sum[4 * n + 1] : sum[4 * n]);
  }
}
// Add up to 16 tokens of V, `stride` values apart, to the output. `room` holds 16 * ROWS floats.
__device__ __forceinline__ void add_raw_values(const void* values, i64 stride, int tokens, int blocks, const int* order,
                                               const float (&weight)[2][NT], const float (&decay)[NT], float* room,
                                               float2* out) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  __syncwarp();
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int n = 0; n < NT; ++n) room[(8 * h + g) * ROWS + 4 * n + t] = weight[h][n] * WEIGHT_UNIT;
  __syncwarp();
  for (int b = 0; b < blocks; ++b) {
    const int first = order[16 * b + g], second = order[16 * b + 8 + g];
    float2 o[NT];
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      o[n] = out[(b * NT + n) * 32 + lane];
      o[n].x *= decay[n];
      o[n].y *= decay[n];
    }
#pragma unroll 4
    for (int k = 0; k < tokens; ++k) {
      const float x = value_at(values, k * stride + first), y = value_at(values, k * stride + second);
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        const float w = room[k * ROWS + 4 * n + t];
        if (w != 0) {  // what is masked may be no number
          o[n].x += w * x;
          o[n].y += w * y;
        }
      }
    }
#pragma unroll
    for (int n = 0; n < NT; ++n) out[(b * NT + n) * 32 + lane] = o[n];
  }
}
