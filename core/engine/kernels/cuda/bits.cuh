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
// Bits of `a` where `where` has ones, of `b` elsewhere. In PTX, since the compiler takes two instructions
// where `where` is a constant.
__device__ __forceinline__ u32 choose(u32 where, u32 a, u32 b) {
#ifdef SIMT_HOST
  return (a & where) | (b & ~where);
#else
  u32 x;
  asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(x) : "r"(where), "r"(a), "r"(b));
  return x;
#endif
}
// The bytes of a (0..3) and b (4..7) that the low four nibbles of `selectors` name. Of a nibble with bit 3
// set, which names none, the byte may be anything: the compiler's __byte_perm clears these bits first.
__device__ __forceinline__ u32 pick_bytes(u32 a, u32 b, u32 selectors) {
#ifdef SIMT_HOST
  return __byte_perm(a, b, selectors);
#else
  u32 x;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(x) : "r"(a), "r"(b), "r"(selectors));
  return x;
#endif
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
// The same in fewer instructions, where there are registers for it. In PTX, since the compiler does not ask
// the shuffle which lanes got something.
template <int LANES = 32>
__device__ __forceinline__ int quick_scan(int v, int lane) {
#ifdef SIMT_HOST
  return inclusive_scan<LANES>(v, lane);
#else
#pragma unroll
  for (int d = 1; d < LANES; d <<= 1)
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        ".reg .s32 below;\n"
        "shfl.sync.up.b32 below|p, %0, %1, %2, 0xffffffff;\n"
        "@p add.s32 %0, %0, below;\n"
        "}\n"
        : "+r"(v)
        : "r"(d), "r"((32 - LANES) << 8));
  return v;
#endif
}
// The sum of a warp or of each LANES of its lanes, which all of them get.
template <int LANES = 32>
__device__ __forceinline__ int sum_of_lanes(int v) {
#pragma unroll
  for (int d = 1; d < LANES; d <<= 1) v += __shfl_xor_sync(FULL, v, d);
  return v;
}
template <>
__device__ __forceinline__ int sum_of_lanes<32>(int v) { return __reduce_add_sync(FULL, v); }
__device__ __forceinline__ u32 load_length(const void* lengths, i64 row, int length_bytes) {
  if (length_bytes == 1) return ((const u8*)lengths)[row];
  if (length_bytes == 2) return ((const unsigned short*)lengths)[row];
  return ((const u32*)lengths)[row];
}
