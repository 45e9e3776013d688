// What kernels that encode rows find out of a chunk, one after the other. Needs floats.cuh, exact.cuh and
// vectors.cuh.
// What is known of a chunk so far.
struct Draft {
  u32 range_parts;   // blocks that have found a range
  u32 step;          // bits of a float32, 0: there is none
  int least, largest;
  u32 outliers;
  u32 counted, measured;  // blocks that are done
  u32 references, index_bits, distinct, reference_words;
  u32 coding, code_bits, symbols;
  u32 raw;
  u32 unused;
  u64 row_words;     // of the distinct rows' section
  i64 bytes;         // of the body
};

__device__ __forceinline__ u32* codes_of(const Chunk& chunk) { return (u32*)chunk.tables; }
__device__ __forceinline__ u32* counts_of(const Chunk& chunk) { return codes_of(chunk) + MOST_SYMBOLS; }
__device__ __forceinline__ u32* ranges_of(const Chunk& chunk) { return codes_of(chunk) + 2 * MOST_SYMBOLS; }
__device__ __forceinline__ u32 slots_for(i64 rows) {
  u32 slots = 2;
  while (slots < 2 * rows) slots *= 2;
  return slots;
}
// The bits of numbers up to n.
__device__ __forceinline__ u32 bits_for(u32 n) { return n ? 32 - __clz((int)n) : 0; }

// Whether elements have codes: most of them are within the bound of one.
__device__ __forceinline__ bool is_coded(const Chunk& chunk, const Draft& draft) {
#if HAS_CODES
  const i64 elements = chunk.rows * chunk.row;
  return draft.step != 0 && draft.least <= draft.largest &&
         (i64)draft.outliers * (4 + CHUNK_BYTES) < elements * CHUNK_BYTES;
#else
  return false;
#endif
}

#if HAS_CODES
__device__ __forceinline__ double widened(float x) {
#ifdef SIMT_HOST
  return x;
#else
  double wide;
  asm("cvt.f64.f32 %0, %1;" : "=d"(wide) : "f"(x));
  return wide;
#endif
}
// Floats in the order of unsigned numbers.
__device__ __forceinline__ u32 ordered(float x) {
  const u32 bits = __float_as_uint(x);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ double unordered(u32 key) {
  return widened(__uint_as_float(key >> 31 ? key & 0x7fffffff : ~key));
}
// Load numbers that lie `stride` apart, 0 behind the last one.
__device__ __forceinline__ void load_numbers(const Chunk& chunk, i64 first, i64 stride, i64 count,
                                             stored_t (&bits)[AT_ONCE]) {
#pragma unroll
  for (int j = 0; j < AT_ONCE; ++j) {
    const i64 k = first + j * stride;
    bits[j] = k < count ? ((const stored_t*)chunk.values)[k] : 0;
  }
}
// The bound of a chunk; called by a whole warp.
__device__ double bound_of(const Chunk& chunk, const Draft* draft) {
  const bool there = chunk.flags & FLAG_BOUND_THERE;
  const double given = there ? *(const double*)chunk.bound : *(const double*)&chunk.bound;
  if (!(chunk.flags & FLAG_RELATIVE)) return given;
  u32 least = FULL, largest = 0;
  for (u32 part = threadIdx.x & 31; part < draft->range_parts; part += 32) {
    least = min(least, ranges_of(chunk)[2 * part]);
    largest = max(largest, ranges_of(chunk)[2 * part + 1]);
  }
  least = __reduce_min_sync(FULL, least);
  largest = __reduce_max_sync(FULL, largest);
  if (least > largest) return 0;
  const double low = unordered(least), high = unordered(largest);
  return high > low ? given * (high - low) : 0;
}
// The step of codes whose values are within a bound, 0 where float32 has none.
__device__ __forceinline__ float step_of(double bound) {
  const double wanted = 2 * bound * STEP_SHARE;
  if (!(wanted <= MOST_WANTED)) return 0;
  const float step = (float)wanted;
  return step >= LEAST_STEP ? step : 0;
}
#endif

// Whether this block is the last of a chunk's to come here; what the others wrote before is then there.
__device__ __forceinline__ bool is_last(u32* done, u32* shared) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) *shared = atomicAdd(done, 1u) == gridDim.x - 1;
  __syncthreads();
  const bool last = *shared;
  __threadfence();
  __syncthreads();
  return last;
}
