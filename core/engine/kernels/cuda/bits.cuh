// Chunks and bit streams. CHUNK_BYTES, LEVELS and the section numbers come from the host, which
// takes them from format.py.
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
typedef unsigned char u8;

#if CHUNK_BYTES == 8
typedef u64 chunk_t;  // a chunk in a register and in the tables
#define POPC(x) __popcll(x)
#else
typedef u32 chunk_t;
#define POPC(x) __popc(x)
#endif
#if CHUNK_BYTES == 1
typedef unsigned char stored_t;  // a chunk in memory
#elif CHUNK_BYTES == 2
typedef unsigned short stored_t;
#elif CHUNK_BYTES == 4
typedef u32 stored_t;
#else
typedef u64 stored_t;
#endif

#define FULL 0xffffffffu
#define CHUNK_BITS (8 * CHUNK_BYTES)
#define CODE_MASK ((1u << CODE_BITS) - 1)

__device__ __forceinline__ u32 read_word(const u32* p, int bit) {
  const int i = bit >> 5;
  return __funnelshift_r(p[i], p[i + 1], bit);
}
__device__ __forceinline__ u64 read_pair(const u32* p, int bit) {
  const int i = bit >> 5;
  const u32 middle = p[i + 1];
  return (u64)__funnelshift_r(middle, p[i + 2], bit) << 32 | __funnelshift_r(p[i], middle, bit);
}
__device__ __forceinline__ chunk_t read_chunk_bits(const u32* p, int bit) {
#if CHUNK_BYTES == 8
  return read_pair(p, bit);
#else
  return read_word(p, bit);
#endif
}

// One step of a bit move towards the high end: the bits in `step` take what lies `distance` below.
__device__ __forceinline__ chunk_t spread_step(chunk_t x, chunk_t step, int distance) {
  return (x & ~step) | ((x << distance) & step);
}
__device__ __forceinline__ chunk_t gather_step(chunk_t x, chunk_t step, int distance) {
  const chunk_t moved = x & step;
  return (x ^ moved) | (moved >> distance);
}
// Spread the low bits of x by the steps at table[(section + level) * positions].
__device__ __forceinline__ chunk_t deposit(chunk_t x, const chunk_t* table, int section, int positions) {
#pragma unroll
  for (int level = LEVELS - 1; level >= 0; --level)
    x = spread_step(x, __ldg(table + (section + level) * positions), 1 << level);
  return x;
}
__device__ __forceinline__ chunk_t extract(chunk_t x, const chunk_t* table, int section, int positions) {
#pragma unroll
  for (int level = 0; level < LEVELS; ++level)
    x = gather_step(x, __ldg(table + (section + level) * positions), 1 << level);
  return x;
}
// The sum over this lane and those before it, of a warp or of each LANES of its lanes.
template <int LANES = 32>
__device__ __forceinline__ int inclusive_scan(int v, int lane) {
#pragma unroll
  for (int d = 1; d < LANES; d <<= 1) {
    const int below = __shfl_up_sync(FULL, v, d, LANES);
    if (lane >= d) v += below;
  }
  return v;
}
__device__ __forceinline__ u32 load_length(const void* lengths, i64 row, int length_bytes) {
  if (length_bytes == 1) return ((const u8*)lengths)[row];
  if (length_bytes == 2) return ((const unsigned short*)lengths)[row];
  return ((const u32*)lengths)[row];
}
