// Places in shared memory as 32-bit addresses, which are kept in registers: the compiler computes those of
// arrays anew at each use. Bytes are counted. Copies are those of async_copy.cuh.
#ifdef SIMT_HOST
typedef u8* place_t;
__device__ __forceinline__ place_t place_of(void* shared) { return (u8*)shared; }
__device__ __forceinline__ u32 load_shared_1(place_t from) { return *(const u32*)from; }
__device__ __forceinline__ uint4 load_shared_4(place_t from) { return *(const uint4*)from; }
__device__ __forceinline__ void store_shared_4(place_t to, uint4 x) { *(uint4*)to = x; }
__device__ __forceinline__ void copy_word(place_t to, const void* from) { copy_async_4(to, from); }
#else
typedef u32 place_t;
__device__ __forceinline__ place_t place_of(void* shared) {
  place_t place = (u32)__cvta_generic_to_shared(shared);
  asm volatile("" : "+r"(place));
  return place;
}
__device__ __forceinline__ u32 load_shared_1(place_t from) {
  u32 x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(from) : "memory");
  return x;
}
__device__ __forceinline__ uint4 load_shared_4(place_t from) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(from)
               : "memory");
  return x;
}
__device__ __forceinline__ void store_shared_4(place_t to, uint4 x) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}
__device__ __forceinline__ void copy_word(place_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;\n" ::"r"(to), "l"(from) : "memory");
}
#endif
