// What the decoders of rows in order (decode.cu) and of rows chosen by id (gather.cu) share. A block
// takes tiles of up to 32 rows: while it decodes one tile from shared memory, the packed words of
// the next arrive there asynchronously, from device or mapped host memory. LANES lanes decode a row:
// a warp, or fewer for short rows, of which a warp then works on several at once. Rows too large for
// eight of them to fit the stage are shared by several warps.
//
// A lane owns VECTOR consecutive chunks of each step, so that it stores up to 16 bytes at once.
// The payload's position is known from the profile; only exceptions need a sum over lanes.
//
// The including file defines GATHER: 1 when every row has an offset in `out` of its own, and may turn
// out to be longer than what was fetched of it. Then raw rows may begin at any byte, and of a row that
// several items share one may be wanted alone; the decoders of one chunk a lane are for such rows.
#define WARPS 8
#define LANES_PER_GROUP (32 / VECTOR)
#define PLACE(i) (UNIFORM ? 0 : (i))
// Rows with clusters take the decoder of one chunk a lane; the wide ones know their one profile.
#define CLUSTERED (VECTOR == 1)
#define BY_BYTES (GATHER && VECTOR == 1)

enum { NO_ROW = -1, DAMAGED = -2, RAW_OUTSIDE = -3 };

struct Args {
  const u8* row_clusters;
  const chunk_t* tables;
  const int* starts;
  i64 n_rows;
  int chunks, row_words, row_bytes, clusters, tile_rows, stride_words, stage_words;
  int longest_words;  // words of the longest row, packed or raw
  u8* out;
  i64* mailbox;
#if GATHER
  int item_bytes;  // of a row of `out`
#endif
};

struct alignas(16) TileRow {  // a row of a tile
  i64 at;                  // its first word: in the stage, or, where it is not staged, its address
  int length;              // words; 0: raw; RAW_OUTSIDE: raw, but too long for the stage; NO_ROW
  int cluster;
#if GATHER
  const u32* source;  // of a row in place, which may be longer than `length`; else null
  u32 out;            // its row of `out`
  u32 skip;           // bytes before what is wanted: of a raw row as it lies, of a packed one decoded
#endif
};

__device__ __forceinline__ int size_of(int length, int row_words) { return length ? length : row_words; }
// A packed row is shorter than a raw one; a longer one is damaged, whatever else it may be.
__device__ __forceinline__ bool too_long(int length, int row_words) { return (u32)length >= (u32)row_words; }

// Copy the words from..end of `words` to the stage, whose first word stands for word `origin`, a
// multiple of 32. Both sides then agree modulo 128 bytes: where they do not, the hardware splits
// every line in two, which halves the rate at which host memory is read.
__device__ __forceinline__ void copy_words(u32* stage, const u32* words, i64 origin, i64 from, i64 end, int thread,
                                           const int threads) {
  const u32* line = words + origin + thread * 4;
  u32* to = stage + thread * 4;
  const int units = (int)(end - origin + 3) >> 2;  // of 16 bytes
  if (thread < units && thread >= (int)(from - origin) >> 2) copy_async_16(to, line);
  for (int u = thread + threads; u < units; u += 4 * threads) {
    line += 4 * threads;
    to += 4 * threads;
#pragma unroll
    for (int k = 0; k < 4; ++k)
      if (u + k * threads < units) copy_async_16(to + k * 4 * threads, line + k * 4 * threads);
    line += 12 * threads;
    to += 12 * threads;
  }
}

// The lanes of a warp that work on this lane's row.
template <int LANES> __device__ __forceinline__ u32 lanes_of_row() {
  if (LANES == 32) return FULL;
  return ((1u << (LANES & 31)) - 1) << (threadIdx.x & 31 & ~(LANES - 1));
}
// Of a ballot, the votes of these lanes, the first in bit 0.
template <int LANES> __device__ __forceinline__ u32 votes_of_row(u32 ballot) {
  if (LANES == 32) return ballot;
  return ballot >> (threadIdx.x & 31 & ~(LANES - 1)) & ((1u << (LANES & 31)) - 1);
}

#if GATHER
// A packed row in place is fetched up to a typical length only. Fetch what lies beyond `have` words,
// up to word `need` and at most up to `limit`, and return the words that are there then.
template <int LANES>
__device__ __noinline__ int fetch_on(const u32* source, u32* p, int have, int need, int limit, int lane) {
  // Whole 16 bytes, for the words that readers look ahead.
  const int end = (min(limit, need) + 4) & ~3;
  for (int j = have + lane; j < end; j += LANES) p[j] = source[j];
  __syncwarp(lanes_of_row<LANES>());
  return min(limit, need);
}
#endif

// VECTOR neighbouring entries of a table, 16 bytes at once where VECTOR > 1.
__device__ __forceinline__ void load_entries(const chunk_t* from, chunk_t (&to)[VECTOR]) {
#if VECTOR == 1
  to[0] = __ldg(from);
#else
#pragma unroll
  for (int v = 0; v < VECTOR; v += 16 / (int)sizeof(chunk_t)) {
    const uint4 x = __ldg((const uint4*)(from + v));
#if CHUNK_BYTES == 8
    to[v] = (u64)x.y << 32 | x.x;
    to[v + 1] = (u64)x.w << 32 | x.z;
#else
    to[v] = x.x;
    to[v + 1] = x.y;
    to[v + 2] = x.z;
    to[v + 3] = x.w;
#endif
  }
#endif
}

// Store a lane's chunks, at an address that is a multiple of their size together.
__device__ __forceinline__ void store_chunks(u8* to, const chunk_t (&x)[VECTOR]) {
#if VECTOR == 1
  *(stored_t*)to = (stored_t)x[0];
#else
  u32 w[VECTOR * CHUNK_BYTES / 4];
#pragma unroll
  for (int j = 0; j < VECTOR * CHUNK_BYTES / 4; ++j) {
#if CHUNK_BYTES == 8
    w[j] = (u32)(x[j / 2] >> (32 * (j & 1)));
#else
    w[j] = 0;
#pragma unroll
    for (int b = 0; b < 4 / CHUNK_BYTES; ++b)
      w[j] |= (u32)x[j * (4 / CHUNK_BYTES) + b] << (b * CHUNK_BITS % 32);
#endif
  }
#if VECTOR * CHUNK_BYTES == 16
  *(uint4*)to = make_uint4(w[0], w[1], w[2], w[3]);
#elif VECTOR * CHUNK_BYTES == 8
  *(uint2*)to = make_uint2(w[0], w[1]);
#else
  *(u32*)to = w[0];
#endif
#endif
}

__device__ __forceinline__ chunk_t raw_chunk(const u32* p, int i) {
#if CHUNK_BYTES == 8
  return (u64)p[2 * i + 1] << 32 | p[2 * i];
#elif CHUNK_BYTES == 4
  return p[i];
#else
  const int bit = i * CHUNK_BITS;
  return p[bit >> 5] >> (bit & 31) & ((1u << CHUNK_BITS) - 1);
#endif
}

#if CODE_BITS * VECTOR > 32
typedef u64 codes_t;
#else
typedef u32 codes_t;
#endif

// A packed row that a warp works on, and how far it has come.
struct Cursor {
  const u32* p;
  int length;         // words; NO_ROW; DAMAGED once more exceptions were asked for than there are
  int exception_bit;  // of the next exception
  int stored;         // stored groups before this step
#if GATHER
  const TileRow* row;
#endif
};

// Whether the row has words for all bits before `end_bit`.
template <int LANES>
__device__ __forceinline__ bool reaches(Cursor& c, int end_bit, int longest_words, int lane) {
  if (end_bit <= c.length * 32) return true;
#if GATHER
  if (c.row->source != nullptr) {
    c.length = fetch_on<LANES>(c.row->source, (u32*)c.p, c.length, (end_bit + 31) >> 5, longest_words, lane);
    return end_bit <= c.length * 32;
  }
#endif
  return false;
}

// The codes of a lane's chunks in a step; steps come in order, `c.stored` moves on.
template <int LANES>
__device__ __forceinline__ codes_t next_codes(Cursor& c, int group_at, int code_at, int groups, int step, int lane,
                                              bool inside) {
  codes_t codes = (codes_t)FIRST_CODES;
#if GROUPED
  constexpr int GROUPS = VECTOR * LANES / 32;  // of a step, in one word
  const int first = step * GROUPS;
  u32 open = ~(c.p[group_at + (first >> 5)] >> (first & 31)) & ((1u << GROUPS) - 1);
  if (groups - first < GROUPS) open &= (1u << (groups - first)) - 1;
  const int mine = lane / LANES_PER_GROUP;
  const bool stored = inside && open >> mine & 1;
  const int bit = (code_at + (c.stored + __popc(open & ((1u << mine) - 1))) * CODE_BITS) * 32 +
                  lane % LANES_PER_GROUP * VECTOR * CODE_BITS;
  c.stored += __popc(open);
#else
  const bool stored = inside;
  const int bit = code_at * 32 + (step * LANES + lane) * VECTOR * CODE_BITS;
#endif
  if (stored) codes = sizeof(codes_t) == 8 ? (codes_t)read_pair(c.p, bit) : (codes_t)read_word(c.p, bit);
  return codes;
}
