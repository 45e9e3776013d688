// Values of the dtypes that models have, as float32 and back, to nearest, ties to even. KIND says which:
// 0 bfloat16, 1 float16, 2 float32. Subnormals are kept, whatever -ftz says. Needs bits.cuh.
#if KIND == 2
#define VALUE_BYTES 4
#define ROUNDING 5.9604644775390625e-8f  // half a unit in the last place of 1: 2 ** -24
#define LEAST_NORMAL 0x00800000u         // the least normal number, as bits of a float32: 2 ** -126
#elif KIND == 1
#define VALUE_BYTES 2
#define ROUNDING 4.8828125e-4f    // 2 ** -11
#define LEAST_NORMAL 0x38800000u  // 2 ** -14
#else
#define VALUE_BYTES 2
#define ROUNDING 3.90625e-3f  // 2 ** -8
#define LEAST_NORMAL 0x00800000u
#endif

// The bits of a float32 rounded to bfloat16. Of no NaN.
__device__ __forceinline__ u32 brain_bits(float x) {
  const u32 bits = __float_as_uint(x);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
__device__ __forceinline__ float float_of_brain(u32 bits) { return __uint_as_float(bits << 16); }

#if KIND == 1
#ifdef SIMT_HOST
__device__ __forceinline__ float float_of_half(u32 half) {
  u32 bits = (half & 0x7fff) << 13;
  if (bits >= 0x7c00u << 13) bits += 0x70000000;                                                // infinities, NaN
  else if (bits >= 0x400u << 13) bits += 0x38000000;
  else bits = __float_as_uint(__uint_as_float(bits + 0x38800000) - __uint_as_float(0x38800000));  // subnormal
  return __uint_as_float(bits | (half & 0x8000) << 16);
}
__device__ __forceinline__ u32 half_bits(float x) {
  const u32 bits = __float_as_uint(x), sign = bits >> 16 & 0x8000;
  u32 low = bits & 0x7fffffff;
  if (low > 0x7f800000) return 0x7fff;
  if (low >= 0x477ff000) return sign | 0x7c00;  // 65520 and more
  if (low < 0x38800000) return sign | (__float_as_uint(__uint_as_float(low) + 0.5f) - 0x3f000000);
  low += 0xfff + (low >> 13 & 1);
  return sign | (low - 0x38000000) >> 13;
}
#else
__device__ __forceinline__ float float_of_half(u32 half) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"((unsigned short)half));
  return x;
}
__device__ __forceinline__ u32 half_bits(float x) {
  unsigned short half;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(x));
  return half;
}
#endif
#endif

// A value of the dtype, whose bits are the lowest ones.
__device__ __forceinline__ float float_of(u32 bits) {
#if KIND == 0
  return float_of_brain(bits);
#elif KIND == 1
  return float_of_half(bits);
#else
  return __uint_as_float(bits);
#endif
}
// A value rounded to the dtype and back. Of no NaN.
__device__ __forceinline__ float rounded(float x) {
#if KIND == 0
  return float_of_brain(brain_bits(x));
#elif KIND == 1
  return float_of_half(half_bits(x));
#else
  return x;
#endif
}
#if VALUE_BYTES == 2
// Two values in a word, the first in the lower half.
__device__ __forceinline__ u32 pack_two(float first, float second) {
#ifdef SIMT_HOST
#if KIND == 0
  return brain_bits(first) | brain_bits(second) << 16;
#else
  return half_bits(first) | half_bits(second) << 16;
#endif
#else
  u32 both;
#if KIND == 0
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
#else
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
#endif
  return both;
#endif
}
#endif
