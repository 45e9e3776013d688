// Asynchronous copies from global (or mapped host) memory to shared memory.
// A thread sees its own copies after copy_async_wait; others after a barrier that follows it.
// Run on a CPU, these functions come from the test harness instead, which delays every copy
// to the wait that ends it.
#ifndef SIMT_HOST
__device__ __forceinline__ void copy_async_16(void* shared_to, const void* from) {
  const unsigned to = (unsigned)__cvta_generic_to_shared(shared_to);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy_async_8(void* shared_to, const void* from) {
  const unsigned to = (unsigned)__cvta_generic_to_shared(shared_to);
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;\n" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy_async_4(void* shared_to, const void* from) {
  const unsigned to = (unsigned)__cvta_generic_to_shared(shared_to);
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;\n" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy_async_commit() {
  asm volatile("cp.async.commit_group;\n" ::: "memory");
}
template <int N> __device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(N) : "memory");
}
#endif
