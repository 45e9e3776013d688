// Rows of which equal ones are kept once: what the kernels that write and those that read bodies share.
// vector_format.py says what a body is; VectorChunk in vector_chunks.py has the fields of a Chunk in this
// order. Needs bits.cuh.
struct Chunk {
  i64 data, data_bytes;  // the body, or the buffer with header and body; decoded: its bytes
  i64 values;            // the tensor
  i64 rows, row;         // its rows, elements of each
  i64 flags;             // FLAG_*, and from bit WINDOW_AT on the window
  i64 form;              // what a header has at byte 16
  i64 bound;             // the bits of a double, or the address of one
  // Scratch memory. Where there are two, the first is that of decoding.
  i64 state;       // Body; Draft
  i64 tables;      // two to look codes up in; codes, counts, ranges
  i64 row_starts;  // words before each piece; with outliers before each
  i64 references;  // words before each piece of references; their section
  i64 ranks;       // references before each 32 rows; the distinct rows
  i64 places;      // of each row its distinct row; the same, and two arrays more
  i64 symbols;     // of elements
  i64 slots;       // a hash table of rows
};

// How distinct rows, and references, are written.
enum { CODING_RAW = 0, CODING_FIXED = 1, CODING_HUFFMAN = 2, CODING_SPLIT = 3 };
enum { REFERENCES_NONE = 0, REFERENCES_INDEX = 1, REFERENCES_WINDOW = 2, REFERENCES_CODED = 3 };

#define CODE_LIMIT (1 << CODE_LIMIT_BITS)  // entries of a table that codes are looked up in
#define INFINITE 0x7f800000u               // the bits of an infinite float32

__device__ __forceinline__ i64 ceil_div(i64 n, i64 by) { return (n + by - 1) / by; }
__device__ __forceinline__ i64 field_words(i64 count, i64 bits) { return ceil_div(count * bits, 32); }
__device__ __forceinline__ i64 pieces_of(i64 codes) { return ceil_div(codes, PIECE_CODES); }
__device__ __forceinline__ i64 size_words(i64 codes) { return ceil_div(pieces_of(codes), 2); }
// Real numbers in an element.
__device__ __forceinline__ i64 parts_of(const Chunk& chunk) { return chunk.flags & FLAG_COMPLEX ? 2 : 1; }

// The sum of v over the threads before this one of a block of so many warps, and that over all of them.
// Every thread of the block calls it.
template <int WARPS_OF_BLOCK>
__device__ __forceinline__ u32 sum_before(u32 v, u32* sums, u32& total) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const u32 up_to_me = (u32)inclusive_scan((int)v, lane);
  if (lane == 31) sums[warp] = up_to_me;
  __syncthreads();
  u32 before = 0;
  total = 0;
#pragma unroll
  for (int w = 0; w < WARPS_OF_BLOCK; ++w) {
    if (w < warp) before += sums[w];
    total += sums[w];
  }
  __syncthreads();
  return before + up_to_me - v;
}

// A field of `width` bits, at most 32, among those from `words` on.
__device__ __forceinline__ u32 read_field(const u32* words, i64 field, int width) {
  if (width == 0) return 0;
  const i64 bit = field * width;
  const i64 word = bit >> 5;
  const int shift = (int)(bit & 31);
  u64 found = words[word];
  if (shift + width > 32) found |= (u64)words[word + 1] << 32;
  return (u32)(found >> shift) & (u32)((1ull << width) - 1);
}

// The bits of a real number among those that begin on a word.
__device__ __forceinline__ stored_t load_number(const u8* numbers, i64 at) {
#if CHUNK_BYTES == 8
  const u32* const words = (const u32*)numbers + 2 * at;
  return words[0] | (u64)words[1] << 32;
#else
  return ((const stored_t*)numbers)[at];
#endif
}
