// Coded tiles, one warp a tile; see tile_format.py. Its codes stand in shared memory as bytes, code + 128,
// by token and channel; 0 stands for an exception.
//
// The host says KIND (floats.cuh), TOKENS, DIM, GRANULARITY, TOKEN_PAIRS and LOOKUP_BITS, the bits of the
// longest code, STRIDE, the bytes from a token to the next, and the numbers of tile_format.py.
#include "async_copy.cuh"
#include "bits.cuh"
#include "exact.cuh"
#include "floats.cuh"
#include "ids.cuh"
#include "mailbox.cuh"
#include "tile_reader.cuh"

#define CHANNEL 0
#define TOKEN_LEVEL 1
#define BLOCK_RANGE 2
#define CHANNEL_RANGE 3
#define TOKEN_RANGE 4
#define LOSSLESS 5
#define BY_CHANNEL (GRANULARITY == CHANNEL || GRANULARITY == CHANNEL_RANGE)
#define BY_TOKEN (GRANULARITY == TOKEN_LEVEL || GRANULARITY == TOKEN_RANGE)
#define SPAN (BY_CHANNEL ? DIM : BY_TOKEN ? TOKENS : 1)  // steps of a tile

#define BLOCKS (DIM / 16)
#define VALUES (TOKENS * DIM)
#define ROW_WORDS (VALUES * VALUE_BYTES / 4)
#define EXCEPTION_WORDS (VALUE_BYTES == 4 ? 2 : 1)
#define VECTOR (16 / VALUE_BYTES)         // values of 16 bytes
#define PIECES (DIM / VECTOR)             // of 16 bytes, of a token
#define ROW_PIECES (TOKENS * PIECES)      // a multiple of 32
#define SAME_CHANNELS (32 % PIECES == 0)  // whether all pieces of a lane have the same channels

// Of lossless tiles the decoder has a second stage, of the bytes that are not coded.
#define PLANE_WORDS (GRANULARITY == LOSSLESS ? VALUES / 4 : 0)
#define STAGE_BYTES (TOKENS * STRIDE)
#define DECODE_STAGES (GRANULARITY == LOSSLESS ? 2 : 1)

#define CODE_FIELD 10  // bits of a code in the encoders' tables; above, how many of them it has

struct Tables {  // see TileTables
  const int* order;
  const float* steps;
  const float* centers;
  const float* level_steps;
  const float* level_squares;
  const int* block_class;
  const int* radius;
  const int* class_bits;
  int heads;
  i64 rows_per_head;
  float scale, inverse_dim;
};

__device__ __forceinline__ int head_of(const Tables& t, i64 row) { return (int)(row / t.rows_per_head % t.heads); }

// What a lane knows of block `lane` of a head: its class, the bits of the class's longest code, its radius.
__device__ __forceinline__ int about_block(const Tables& t, int head, int lane) {
  if (lane >= BLOCKS) return 0;
  const int c = __ldg(t.block_class + head * BLOCKS + lane);
  return c | __ldg(t.class_bits + c) << 8 | __ldg(t.radius + c) << 16;
}

// Bits that a lane sees to at an ask: of two codes, or of one where codes are long.
__device__ __forceinline__ int bits_needed(int longest) { return longest <= SHORT_BITS ? 2 * longest : longest; }

#define SWAPPED (DIM == 32 || DIM == 64 || DIM == 128 || DIM == 256)  // tokens fill banks evenly

// Where the code of a channel of a token stands in the stage. Eight neighbouring tokens, which a warp reads and
// writes at once, have the same channel in banks of their own: by STRIDE, or with pieces of 16 bytes swapped.
__device__ __forceinline__ int stage_at(int token, int channel) {
  const u32 lines = DIM < 128 ? (u32)token / (128 / DIM) : (u32)token, pieces = DIM < 128 ? DIM / 16 : 8;
  return token * STRIDE + (SWAPPED ? channel ^ (int)(lines % pieces) * 16 : channel);
}

// Where a lane's values of a block stand among the codes of the first sixteen tokens.
struct Places {
  int at[2][2];
  __device__ __forceinline__ Places(const int* order, int block, int lane) {
    const int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int k = 0; k < 2; ++k)
        at[h][k] = TOKEN_PAIRS ? stage_at(2 * t + k, __ldg(order + 16 * block + g + 8 * h))
                               : stage_at(g, __ldg(order + 16 * block + 2 * t + 8 * h + k));
    }
  }
  // Value k of the i-th two.
  __device__ __forceinline__ int of(int i, int k) const {
    return TOKEN_PAIRS ? at[i & 1][k] + (i >> 1) * 8 * STRIDE : at[i >> 1][k] + (i & 1) * 8 * STRIDE;
  }
};

// Steps, centers and what goes with them: of the channels, tokens or the tile.
struct Scales {
  float *steps, *centers, *inverses, *limits;
};

#if VALUE_BYTES == 2
typedef unsigned short value_t;
#else
typedef u32 value_t;
#endif

// The scales of VECTOR neighbouring channels of a token.
struct Vector {
  float step[VECTOR], center[VECTOR], inverse[VECTOR], limit[VECTOR];
  template <bool ENCODES> __device__ __forceinline__ void load(const Scales& s, int token, int channel) {
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) {
      const int at = BY_CHANNEL ? channel + v : BY_TOKEN ? token : 0;
      step[v] = s.steps[at];
      if (ENCODES || GRANULARITY != TOKEN_LEVEL) center[v] = s.centers[at];  // of levels they are 0
      if (ENCODES) inverse[v] = s.inverses[at];
    }
  }
  __device__ __forceinline__ void load_limits(const Scales& s, int channel) {
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) limit[v] = s.limits[channel + v];
  }
};

#include "tile_decoder.cuh"
#include "tile_encoder.cuh"

// Shared memory of the encoders: the codes of all classes, and for each warp stage, scales, parameters.
struct Encoder {
  unsigned short* codes;
  u8* stage;
  Scales scales;
  u32* parameters;
  __device__ __forceinline__ Encoder(u32* shared, const int* table, int classes, int warp_bytes) {
    codes = (unsigned short*)shared;
    for (int i = threadIdx.x; i < classes * MAX_SYMBOLS; i += blockDim.x) {
      const int entry = table[i];
      codes[i] = (unsigned short)((entry & 0xffff) | entry >> 16 << CODE_FIELD);
    }
    u8* mine = (u8*)(codes + classes * MAX_SYMBOLS) + (threadIdx.x >> 5) * warp_bytes;
    stage = mine;
    scales.steps = (float*)(mine + STAGE_BYTES);
    scales.centers = scales.steps + SPAN;
    scales.inverses = scales.centers + SPAN;
    scales.limits = scales.inverses + SPAN;
    parameters = (u32*)(scales.limits + DIM);
    __syncthreads();
  }
};

// Bring the codes of a tile into the warp's stage; return this lane's exceptions.
__device__ __forceinline__ int stage_tile(const Tables& t, int head, const Encoder& e, const value_t* row, int lane) {
#if GRANULARITY == LOSSLESS
  return stage_fields(row, e.stage, lane);
#else
  find_scales(t, head, row, e.scales, e.parameters, lane);
  return quantise(row, e.scales, e.stage, lane);
#endif
}

// The words that a tile in the stage takes. This lane's exceptions then are also those of symbols without a code,
// which the stage marks as such.
__device__ __forceinline__ int words_of_tile(const Tables& t, int head, const Encoder& e, int lane, int& exceptions) {
  Counter counter;
  write_symbols(t, head, e.codes, e.stage, lane, counter, exceptions);
  const int units = __reduce_add_sync(FULL, counter.units);
  return 1 + PARAMETER_WORDS + ((units + 1) >> 1) + PLANE_WORDS + __reduce_add_sync(FULL, exceptions) * EXCEPTION_WORDS;
}

// Code the tile in the stage at `to`; return its words. What is written takes slot_words of TileKernels at the
// most: where the words are as many as the raw ones, plane and exceptions are left out.
__device__ __forceinline__ int write_tile(const Tables& t, int head, const Encoder& e, const value_t* row, u32* to,
                                          int lane, int exceptions) {
  for (int k = lane; k < PARAMETER_WORDS; k += 32) to[1 + k] = e.parameters[k];
  u32* streams = to + 1 + PARAMETER_WORDS;
  Writer writer;
  writer.units = (unsigned short*)streams;
  writer.below = (1u << lane) - 1;
  write_symbols(t, head, e.codes, e.stage, lane, writer, exceptions);
  writer.finish();
  exceptions = __reduce_add_sync(FULL, exceptions);
  if (lane == 0) {
    *to = (u32)writer.next | (u32)exceptions << 16;
    if (writer.next & 1) writer.units[writer.next] = 0;
  }
  __syncwarp();
  const int before = ((writer.next + 1) >> 1) + PLANE_WORDS;
  const int words = 1 + PARAMETER_WORDS + before + exceptions * EXCEPTION_WORDS;
  if (exceptions && words < ROW_WORDS) write_exceptions(row, e.stage, streams + before, lane);
  __syncwarp();
#if GRANULARITY == LOSSLESS
  if (words < ROW_WORDS) write_plane(t, head, row, e.stage, streams + before - PLANE_WORDS, lane);
#endif
  return words;
}

__device__ __forceinline__ void store_length(void* lengths, int length_bytes, i64 row, int words) {
  const u32 length = words < ROW_WORDS ? words : 0;
  if (length_bytes == 1) ((u8*)lengths)[row] = (u8)length;
  else if (length_bytes == 2) ((unsigned short*)lengths)[row] = (unsigned short)length;
  else ((u32*)lengths)[row] = length;
}

// The first word of a tile among packed ones, and its length, in all lanes.
__device__ __forceinline__ i64 place_of(const void* lengths, int length_bytes, i64 n_rows, const i64* bases, i64 row,
                                        int lane, int& length) {
  const i64 peer = (row & ~(i64)31) + lane;
  const u32 length_of_peer = peer < n_rows ? load_length(lengths, peer, length_bytes) : 0;
  const u32 before = lane < (int)(row & 31) ? (length_of_peer ? length_of_peer : ROW_WORDS) : 0;
  length = __shfl_sync(FULL, length_of_peer, (int)(row & 31));
  return bases[row >> 5] + __reduce_add_sync(FULL, before);
}

#define TABLES                                                                                                      \
  {order, steps, centers, level_steps, level_squares, block_class, radius, class_bits, heads, rows_per_head,        \
   __uint_as_float(scale), __uint_as_float(inverse_dim)}

extern "C" __global__ void __launch_bounds__(32 * ENCODE_WARPS, 1)
    measure_tiles(const value_t* __restrict__ rows, i64 n_rows, const int* __restrict__ order,
                  const float* __restrict__ steps, const float* __restrict__ centers,
                  const float* __restrict__ level_steps, const float* __restrict__ level_squares,
                  const int* __restrict__ block_class, const int* __restrict__ radius, const int* __restrict__ class_bits,
                  const int* __restrict__ codes, int classes, int heads, i64 rows_per_head, u32 scale, u32 inverse_dim,
                  int warp_bytes,
                  void* __restrict__ lengths, int length_bytes) {
  extern __shared__ __align__(128) u32 shared[];
  const Tables t = TABLES;
  const Encoder e(shared, codes, classes, warp_bytes);
  const int lane = threadIdx.x & 31;
  const i64 warps = ((i64)gridDim.x * blockDim.x) >> 5;
  for (i64 r = ((i64)blockIdx.x * blockDim.x + threadIdx.x) >> 5; r < n_rows; r += warps) {
    const int head = head_of(t, r);
    int exceptions = stage_tile(t, head, e, rows + r * VALUES, lane);
    const int words = words_of_tile(t, head, e, lane, exceptions);
    if (lane == 0) store_length(lengths, length_bytes, r, words);
  }
}

// The lengths are those that measure_tiles found; `words` is zeroed.
extern "C" __global__ void __launch_bounds__(32 * ENCODE_WARPS, 1)
    encode_tiles(const value_t* __restrict__ rows, i64 n_rows, const int* __restrict__ order,
                  const float* __restrict__ steps, const float* __restrict__ centers,
                  const float* __restrict__ level_steps, const float* __restrict__ level_squares,
                  const int* __restrict__ block_class, const int* __restrict__ radius, const int* __restrict__ class_bits,
                  const int* __restrict__ codes, int classes, int heads, i64 rows_per_head, u32 scale, u32 inverse_dim,
                  int warp_bytes,
                 const void* __restrict__ lengths, int length_bytes, const i64* __restrict__ bases,
                 u32* __restrict__ words) {
  extern __shared__ __align__(128) u32 shared[];
  const Tables t = TABLES;
  const Encoder e(shared, codes, classes, warp_bytes);
  const int lane = threadIdx.x & 31;
  const i64 warps = ((i64)gridDim.x * blockDim.x) >> 5;
  for (i64 r = ((i64)blockIdx.x * blockDim.x + threadIdx.x) >> 5; r < n_rows; r += warps) {
    const value_t* row = rows + r * VALUES;
    const bool raw = load_length(lengths, r, length_bytes) == 0;
    int exceptions = 0, found = 0, length;
    if (!raw) {
      exceptions = stage_tile(t, head_of(t, r), e, row, lane);
      found = words_of_tile(t, head_of(t, r), e, lane, exceptions);
    }
    u32* to = words + place_of(lengths, length_bytes, n_rows, bases, r, lane, length);
    // A tile that others have changed since it was measured may not fit: it is left out, and damaged.
    if (!raw && found == length) write_tile(t, head_of(t, r), e, row, to, lane, exceptions);
    if (raw)
      for (int j = lane; j < ROW_WORDS; j += 32) to[j] = __ldg((const u32*)row + j);
    __syncwarp();
  }
}

// Tiles from row_begin to n_rows, each coded in a slot of its own; their lengths are found.
extern "C" __global__ void __launch_bounds__(32 * ENCODE_WARPS, 1)
    pack_tiles(const value_t* __restrict__ rows, i64 n_rows, const int* __restrict__ order,
               const float* __restrict__ steps, const float* __restrict__ centers,
               const float* __restrict__ level_steps, const float* __restrict__ level_squares,
               const int* __restrict__ block_class, const int* __restrict__ radius, const int* __restrict__ class_bits,
               const int* __restrict__ codes, int classes, int heads, i64 rows_per_head, u32 scale, u32 inverse_dim,
               int warp_bytes, void* __restrict__ lengths, int length_bytes, i64 row_begin, u32* __restrict__ slots,
               i64 slot_words) {
  extern __shared__ __align__(128) u32 shared[];
  const Tables t = TABLES;
  const Encoder e(shared, codes, classes, warp_bytes);
  const int lane = threadIdx.x & 31;
  const i64 warps = ((i64)gridDim.x * blockDim.x) >> 5;
  for (i64 r = row_begin + (((i64)blockIdx.x * blockDim.x + threadIdx.x) >> 5); r < n_rows; r += warps) {
    const value_t* row = rows + r * VALUES;
    const int head = head_of(t, r), exceptions = stage_tile(t, head, e, row, lane);
    const int words = write_tile(t, head, e, row, slots + (r - row_begin) * slot_words, lane, exceptions);
    if (lane == 0) store_length(lengths, length_bytes, r, words);
  }
}

// Move the tiles that pack_tiles coded together, raw ones from the rows, with PAD_WORDS of 0 behind the last
// one. row_begin is a multiple of 32.
extern "C" __global__ void __launch_bounds__(32 * MOVE_WARPS)
    move_tiles(const value_t* __restrict__ rows, i64 n_rows, const void* __restrict__ lengths, int length_bytes,
               i64 row_begin, const u32* __restrict__ slots, i64 slot_words, const i64* __restrict__ bases,
               u32* __restrict__ words) {
  const int lane = threadIdx.x & 31;
  const i64 warps = ((i64)gridDim.x * blockDim.x) >> 5;
  for (i64 r = row_begin + (((i64)blockIdx.x * blockDim.x + threadIdx.x) >> 5); r < n_rows; r += warps) {
    int length;
    u32* to = words + place_of(lengths, length_bytes, n_rows, bases, r, lane, length);
    const u32* from = length ? slots + (r - row_begin) * slot_words : (const u32*)(rows + r * VALUES);
    const int size = length ? length : ROW_WORDS;
#pragma unroll 8
    for (int j = lane; j < size; j += 32) to[j] = __ldg(from + j);
    if (r == n_rows - 1 && lane < PAD_WORDS) to[size + lane] = 0;
  }
}

// ids[n], or null for the tiles from row_begin on. Tiles that are damaged are reported, and their rows of
// `out` are left as they are.
extern "C" __global__ void __launch_bounds__(32 * DECODE_WARPS, 1)
    decode_tiles(const u32* __restrict__ words, i64 n_words, const i64* __restrict__ bases,
                 const void* __restrict__ lengths, int length_bytes, i64 n_rows, const void* __restrict__ ids,
                 int id_bytes, i64 row_begin, i64 n, const int* __restrict__ order, const float* __restrict__ steps, const float* __restrict__ centers,
                  const float* __restrict__ level_steps, const float* __restrict__ level_squares,
                  const int* __restrict__ block_class, const int* __restrict__ radius, const int* __restrict__ class_bits,
                  const int* __restrict__ codes, int classes, int heads, i64 rows_per_head, u32 scale, u32 inverse_dim,
                  int warp_bytes, uint4* __restrict__ out,
                 const u64* first_bad, i64 lowest, i64* mailbox) {
  extern __shared__ __align__(128) u32 shared[];
  if (ids != nullptr) {
    const u64 bad = bad_position(first_bad, ids, id_bytes, n, lowest, n_rows);
    if (bad != ~0ull) {
      if (blockIdx.x == 0 && threadIdx.x == 0)
        report(mailbox, ERROR_INDEX, (i64)bad, load_id(ids, (i64)bad, id_bytes), n_rows);
      return;
    }
  }
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  // The rings come first: each lies at a multiple of its size.
  u32* lookup = shared + RING_BYTES / 4 * (blockDim.x >> 5);
  for (int i = threadIdx.x; i < classes << LOOKUP_BITS; i += blockDim.x) lookup[i] = (u32)__ldg(codes + i);
  __syncthreads();
  const Tables t = TABLES;
  const Source source = {words, n_words, bases, lengths, length_bytes, n_rows, ids, id_bytes, row_begin};
  Ring ring;
  ring.shared = (u8*)shared;
  ring.at = RING_BYTES * warp;
  u8* stage = (u8*)(lookup + (classes << LOOKUP_BITS)) + warp * warp_bytes;
  Scales scales;
  scales.steps = (float*)(stage + DECODE_STAGES * STAGE_BYTES);
  scales.centers = scales.steps + SPAN;
  const i64 warps = ((i64)gridDim.x * blockDim.x) >> 5;
  i64 position = ((i64)blockIdx.x * blockDim.x + threadIdx.x) >> 5;
  if (position >= n) return;
  Wanted w = locate(source, position, mailbox, lane);
  ring.start(words, w.at, max(w.length, 0), lane);
  while (true) {
    // The next one is looked for before this one is decoded, and fetched while this one is delivered.
    const i64 following = position + warps;
    Wanted next = {0, 0, NOTHING};
    if (following < n) next = locate(source, following, mailbox, lane);
    const int head = head_of(t, w.row);
    const u32* exceptions = nullptr;
    int count = 0;
    bool sound = w.length > 0;
    ring.wait();
    if (sound) {
      const int first = 4 * (int)(w.at & 31);
      const u32 header = ring.word(first);
      const int units = (int)(header & 0xffff);
      count = (int)(header >> 16);
      const int before = 1 + PARAMETER_WORDS + ((units + 1) >> 1) + PLANE_WORDS;
      sound = before + count * EXCEPTION_WORDS <= w.length;
      if (sound) {
        exceptions = words + w.at + before;
#if GRANULARITY == LOSSLESS
        read_plane(t, head, exceptions - PLANE_WORDS, stage + STAGE_BYTES, lane);
#endif
        read_scales(t, head, scales, ring, first + 4, lane);
        sound = read_codes(t, head, lookup, ring, first + 4 + 4 * PARAMETER_WORDS, units, stage, lane) &&
                sound_exceptions(exceptions, count, lane);
      }
      if (!sound && lane == 0) report(mailbox, ERROR_DAMAGED, w.row, 0, n_rows);
    }
    copy_async_wait<0>();
    __syncwarp();
    ring.start(words, next.at, max(next.length, 0), lane);
    uint4* to = out + position * ROW_PIECES;
    if (w.length == 0) {
      for (int j = lane; j < ROW_WORDS; j += 32) ((u32*)to)[j] = words[w.at + j];
    } else if (sound) {
#if GRANULARITY == LOSSLESS
      write_joined(stage, to, lane);
#else
      write_values(scales, stage, to, lane);
#endif
      if (count) {
        __syncwarp();
        for (int e = lane; e < count; e += 32)
          ((value_t*)to)[position_of(exceptions, e)] =
              (value_t)(VALUE_BYTES == 4 ? exceptions[2 * e + 1] : exceptions[e] >> 16);
      }
    }
    __syncwarp();
    if (following >= n) break;
    position = following;
    w = next;
  }
  copy_async_wait<0>();
}
