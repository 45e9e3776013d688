// Arithmetic that keeps subnormals. cupy compiles with -ftz=true, which takes float32 ones for zero;
// instructions written out are left as they are. Of doubles none is ever taken for zero.
__device__ __forceinline__ double add_exact(double x, double y) { return x + y; }
__device__ __forceinline__ double divide_exact(double x, double y) { return x / y; }
__device__ __forceinline__ bool is_greater(double x, double y) { return x > y; }
#ifdef SIMT_HOST
__device__ __forceinline__ float add_exact(float x, float y) { return x + y; }
__device__ __forceinline__ float divide_exact(float x, float y) { return x / y; }
__device__ __forceinline__ float multiply_exact(float x, float y) { return x * y; }
__device__ __forceinline__ bool is_greater(float x, float y) { return x > y; }
#else
__device__ __forceinline__ float add_exact(float x, float y) {
  float sum;
  asm("add.rn.f32 %0, %1, %2;" : "=f"(sum) : "f"(x), "f"(y));
  return sum;
}
__device__ __forceinline__ float divide_exact(float x, float y) {
  float quotient;
  asm("div.rn.f32 %0, %1, %2;" : "=f"(quotient) : "f"(x), "f"(y));
  return quotient;
}
__device__ __forceinline__ float multiply_exact(float x, float y) {
  float product;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(product) : "f"(x), "f"(y));
  return product;
}
__device__ __forceinline__ bool is_greater(float x, float y) {
  int greater;
  asm("{ .reg .pred p; setp.gt.f32 p, %1, %2; selp.s32 %0, 1, 0, p; }" : "=r"(greater) : "f"(x), "f"(y));
  return greater;
}
#endif
