// Products of small matrices of half values by a warp, and conversions. Registers hold two halves
// each, the first in the lower half; lane 4 g + t. Every lane of a warp calls the first three.
// Run on a CPU, all of these come from the test harness instead.
#ifndef SIMT_HOST
// c += a b, a of 16 x 16, b of 16 x 8, c of 16 x 8 in float32.
// a[i] holds row g + 8 (i % 2), columns 2 t + 8 (i / 2) and the next one; b[i] rows 2 t + 8 i and the
// next one of column g; c[i] row g + 8 (i / 2), column 2 t + i % 2.
__device__ __forceinline__ void multiply_halves(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// The same of bfloat16 values.
__device__ __forceinline__ void multiply_bfloats(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// Transpose an 8 x 8 matrix of halves: a lane gives columns 2 t and 2 t + 1 of row g, and gets those
// of row g of the result.
__device__ __forceinline__ unsigned transposed_halves(unsigned x) {
  unsigned y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\n" : "=r"(y) : "r"(x));
  return y;
}
__device__ __forceinline__ unsigned subtract_halves(unsigned a, unsigned b) {
  unsigned c;
  asm("sub.rn.f16x2 %0, %1, %2;\n" : "=r"(c) : "r"(a), "r"(b));
  return c;
}
__device__ __forceinline__ float half_to_float(unsigned short x) {
  float y;
  asm("cvt.f32.f16 %0, %1;\n" : "=f"(y) : "h"(x));
  return y;
}
__device__ __forceinline__ unsigned short float_to_half(float x) {
  unsigned short y;
  asm("cvt.rn.f16.f32 %0, %1;\n" : "=h"(y) : "f"(x));
  return y;
}
#endif
