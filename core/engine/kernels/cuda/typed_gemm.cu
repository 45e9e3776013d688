// Rows times the weight of their type, plus a row of the type where there is one, and the gradients of
// the weights. Rows are sorted by type and read by index; a block takes tiles of up to TILE_ROWS rows of
// one type. With PACKED the rows of a table are rebuilt in shared memory (decode.cuh) where the others are
// copied to it: from there on both forms are one text, so that their results are the same bits. No raw row
// is written to device memory.
// PRODUCT_BLOCKS and COARSENING are a schedule's (typed_products.py), and change no bit of the result.
// float32 is multiplied on the ordinary units, never as TF32; 16-bit values by tensor cores, summed in
// float32.
#include "async_copy.cuh"
#include "bits.cuh"
#include "ids.cuh"
#include "mailbox.cuh"
#include "map.cuh"
#include "matrix.cuh"
#if PACKED
#define GATHER 1
#include "row_cursor.cuh"
#include "words.cuh"
#include "rebuild.cuh"
#include "rebuild_words.cuh"
#include "decode.cuh"
#include "chosen_rows.cuh"
#else
#define WARPS 8
#endif
#define THREADS (32 * WARPS)
#define VALUE_BYTES CHUNK_BYTES
#define COARSENING (TILE_ROWS / 32)
static_assert(TILE_ROWS % 32 == 0 && TILE_COLUMNS == 64, "what the threads of a block take");

typedef stored_t value_t;  // float32, or 16 bits of float16 or bfloat16

struct Tile {
  i64 type, begin;  // its first row
  int n;
};
__device__ __forceinline__ Tile tile_at(const i64* tiles, i64 number) {
  Tile t;
  t.type = tiles[3 * number];
  t.begin = tiles[3 * number + 1];
  t.n = (int)min((i64)TILE_ROWS, tiles[3 * number + 2] - t.begin);
  return t;
}

// Tiles that a block takes, one after another.
struct Walk {
  const i64* tiles;
  i64 tile, end, step;
};

#if PACKED
typedef Args Layout;
struct Source {
  Layout a;
  Table t;
  const i64* index;
  TileRow (*fetched)[32];
  int* part_bits;
  u32* stage;
  i64* counters;
  Kept kept;
  Counts counts;
  int half;
};

// The row of a part of a tile that falls to this lane and its seven neighbours; see load_wanted.
__device__ __forceinline__ Wanted wanted_of(const Source& s, const Tile& t, int part) {
  const int j = (threadIdx.x >> 5) + ((threadIdx.x & 31) >> 3) * WARPS;
  const int in_tile = part * s.a.tile_rows + j;
  Wanted w = {};
  w.row = NOTHING;
  if (j < s.a.tile_rows && in_tile < t.n) {
    w.out = (u32)in_tile;
    w.row = s.index != nullptr ? s.index[t.begin + in_tile] : t.begin + in_tile;
  }
  return w;
}
__device__ __forceinline__ void fetch_part(Source& s, const Tile& t, int part, int half) {
  fetch_chosen<true>(s.a, s.t, wanted_of(s, t, part), s.fetched[half], s.stage + half * s.a.stage_words, s.counts);
}
// Fetch the packed words of a block's first rows.
__device__ __forceinline__ void begin_rows(Source& s, const Walk& walk) {
  s.half = 0;
  if (walk.tile < walk.end) fetch_part(s, tile_at(walk.tiles, walk.tile), 0, 0);
  copy_async_commit();
}
// Rebuild the rows of a tile in shared memory; meanwhile the packed words of what comes next arrive.
__device__ __forceinline__ void load_rows(Source& s, const Walk& walk, const Tile& t) {
  const int parts = (t.n + s.a.tile_rows - 1) / s.a.tile_rows;
  for (int part = 0; part < parts; ++part) {
    copy_async_wait<0>();
    // Behind this barrier the words are there, and no warp looks at the rows before them any more.
    __syncthreads();
    if (part + 1 < parts) fetch_part(s, t, part + 1, s.half ^ 1);
    else if (walk.tile + walk.step < walk.end)
      fetch_part(s, tile_at(walk.tiles, walk.tile + walk.step), 0, s.half ^ 1);
    copy_async_commit();
    decode_tile<true, 32>(s.a, s.kept, 0, s.fetched[s.half], s.stage + s.half * s.a.stage_words, s.part_bits);
    s.half ^= 1;
  }
  __syncthreads();
}

__device__ __forceinline__ void end_rows(Source& s) {
  const int lane = threadIdx.x & 31;
  if (s.counters != nullptr && lane <= HOST_SOURCE && s.counts.rows) {
    atomicAdd((u64*)s.counters + lane, (u64)s.counts.rows);
    atomicAdd((u64*)s.counters + MAX_SLABS + 1 + lane, (u64)s.counts.words);
  }
}
#else
struct Source {
  const u8* rows;
  i64 stride_bytes;
  int row_bytes, shared_stride;
  u8* out;
  const i64* index;
};
__device__ __forceinline__ void begin_rows(Source& s, const Walk& walk) {}
__device__ __forceinline__ void end_rows(Source& s) {}
// Copy the rows of a tile to shared memory.
__device__ __forceinline__ void load_rows(Source& s, const Walk& walk, const Tile& t) {
  __syncthreads();  // no warp looks at the tile before any more
  const bool vectors = (((u64)s.rows | (u64)s.stride_bytes | (u64)s.row_bytes) & 15) == 0;
  const int unit = vectors ? 16 : VALUE_BYTES, units = s.row_bytes / unit;
  for (int i = threadIdx.x; i < t.n * units; i += THREADS) {
    const int r = i / units, at = (i - r * units) * unit;
    const i64 row = s.index != nullptr ? s.index[t.begin + r] : t.begin + r;
    const u8* from = s.rows + row * s.stride_bytes + at;
    u8* to = s.out + r * s.shared_stride + at;
    if (vectors) copy_async_16(to, from);
    else *(value_t*)to = *(const value_t*)from;
  }
  copy_async_commit();
  copy_async_wait<0>();
  __syncthreads();
}
#endif

// Zeros behind each row, up to which products of whole steps go.
__device__ __forceinline__ void clear_ends(u8* rows, int row_bytes, int stride, int n_rows) {
  const int left = (stride - row_bytes) / VALUE_BYTES;
  for (int i = threadIdx.x; i < n_rows * left; i += THREADS)
    *(value_t*)(rows + i / left * stride + row_bytes + i % left * VALUE_BYTES) = 0;
}

__device__ __forceinline__ float value_of(value_t x, bool bfloat) {
#if VALUE_BYTES == 4
  return __uint_as_float(x);
#else
  return bfloat ? __uint_as_float((u32)x << 16) : half_to_float(x);
#endif
}
__device__ __forceinline__ value_t rounded(float x, bool bfloat) {
#if VALUE_BYTES == 4
  return __float_as_uint(x);
#else
  if (!bfloat) return float_to_half(x);
  const u32 bits = __float_as_uint(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (value_t)(bits >> 16 | 64);  // a NaN remains one
  return (value_t)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
#endif
}

// 16 bytes of a row of a matrix of `columns` values, zeros behind its end; `row` outside: zeros.
__device__ __forceinline__ uint4 load_16(const value_t* matrix, i64 stride, i64 row, bool inside, int column,
                                         int columns) {
  constexpr int VALUES = 16 / VALUE_BYTES;
  uint4 x = make_uint4(0, 0, 0, 0);
  if (!inside || column >= columns) return x;
  const value_t* from = matrix + row * stride + column;
  if (column + VALUES <= columns && ((u64)from & 15) == 0) return __ldg((const uint4*)from);
  u32 w[4] = {0, 0, 0, 0};
#pragma unroll
  for (int v = 0; v < VALUES; ++v)
    if (column + v < columns) w[v * VALUE_BYTES / 4] |= (u32)from[v] << (v * VALUE_BYTES * 8 % 32);
  return make_uint4(w[0], w[1], w[2], w[3]);
}

// Where a product goes, and what is added to it: a row of each type, or null.
struct Target {
  value_t* out;
  i64 stride;
  const i64* scatter;
  const value_t* scale;
  const value_t* bias;
  i64 bias_stride;
  int width;
  bool bfloat;
};
__device__ __forceinline__ float bias_at(const Target& to, const Tile& t, int column) {
  return column < to.width ? value_of(__ldg(to.bias + t.type * to.bias_stride + column), to.bfloat) : 0;
}
__device__ __forceinline__ void store_value(const Target& to, const Tile& t, int row, int column, float x) {
  if (row >= t.n || column >= to.width) return;
  const i64 from = t.begin + row, at = to.scatter != nullptr ? to.scatter[from] : from;
  if (to.scale != nullptr) x *= value_of(to.scale[from], to.bfloat);
  to.out[at * to.stride + column] = rounded(x, to.bfloat);
}

#define VALUES_16 (16 / VALUE_BYTES)
// A slice of the weight: DEPTH rows of TILE_COLUMNS, of which a thread loads some 16 bytes.
#define PIECES (SLICE_DEPTH * TILE_COLUMNS / VALUES_16 / THREADS)
struct Pieces {
  uint4 x[PIECES];
};
__device__ __forceinline__ Pieces load_slice(const value_t* weight, int k, int depth, int column, int width) {
  Pieces p;
#pragma unroll
  for (int i = 0; i < PIECES; ++i) {
    const int e = (threadIdx.x + i * THREADS) * VALUES_16, row = k + e / TILE_COLUMNS;
    p.x[i] = load_16(weight, width, row, row < depth, column + e % TILE_COLUMNS, width);
  }
  return p;
}
__device__ __forceinline__ void store_slice(value_t* slice, const Pieces& p) {
#pragma unroll
  for (int i = 0; i < PIECES; ++i) {
    const int e = (threadIdx.x + i * THREADS) * VALUES_16;
    *(uint4*)(slice + e / TILE_COLUMNS * SLICE_STRIDE + e % TILE_COLUMNS) = p.x[i];
  }
}

// The rows of a tile, in shared memory, times TILE_COLUMNS columns of the weight of their type.
__device__ __forceinline__ void multiply_tile(const u8* rows, int row_stride, value_t* slices, const value_t* weight,
                                              int depth, int column, const Tile& t, const Target& to) {
  const int warp = threadIdx.x >> 5;
  const int steps = (depth + SLICE_DEPTH - 1) / SLICE_DEPTH;
#if VALUE_BYTES == 4
  // Four rows, or COARSENING times as many, and four columns a thread; each half of the block takes half
  // of every slice.
  const int part = warp >> 2, row0 = threadIdx.x >> 4 & 7, mine = (threadIdx.x & 15) * 4;
  float sum[4 * COARSENING][4] = {};
#else
  // 16 rows and 16 columns a warp, COARSENING times.
  const int row0 = (warp & 1) * 16, mine = (warp >> 1) * 16, g = threadIdx.x >> 2 & 7, pair = 2 * (threadIdx.x & 3);
  float sum[COARSENING][2][4] = {};
#endif
  Pieces next = load_slice(weight, 0, depth, column, to.width);
  for (int step = 0; step < steps; ++step) {
    value_t* slice = slices + (step & 1) * SLICE_DEPTH * SLICE_STRIDE;
    store_slice(slice, next);
    __syncthreads();
    const int begin = step * SLICE_DEPTH;
    if (step + 1 < steps) next = load_slice(weight, begin + SLICE_DEPTH, depth, column, to.width);
#if VALUE_BYTES == 4
#pragma unroll
    for (int k = part * SLICE_DEPTH / 2; k < (part + 1) * SLICE_DEPTH / 2; k += 4) {
      if (begin + k >= depth) break;
      float4 b[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) b[j] = *(const float4*)(slice + (k + j) * SLICE_STRIDE + mine);
#pragma unroll
      for (int i = 0; i < 4 * COARSENING; ++i) {
        const float4 a = *(const float4*)(rows + (row0 + 8 * i) * row_stride + (begin + k) * VALUE_BYTES);
        const float of_a[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          sum[i][0] += of_a[j] * b[j].x;
          sum[i][1] += of_a[j] * b[j].y;
          sum[i][2] += of_a[j] * b[j].z;
          sum[i][3] += of_a[j] * b[j].w;
        }
      }
    }
#else
#pragma unroll
    for (int k = 0; k < SLICE_DEPTH; k += 16) {
      if (begin + k >= depth) break;
      u32 a[COARSENING][4], b[2];
#pragma unroll
      for (int c = 0; c < COARSENING; ++c)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          a[c][i] = *(const u32*)(rows + (32 * c + row0 + g + 8 * (i & 1)) * row_stride +
                                  (begin + k + pair + 8 * (i >> 1)) * VALUE_BYTES);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
          b[i] = transposed_halves(*(const u32*)(slice + (k + g + 8 * i) * SLICE_STRIDE + mine + 8 * n + pair));
#pragma unroll
        for (int c = 0; c < COARSENING; ++c)
          if (to.bfloat) multiply_bfloats(sum[c][n], a[c], b);
          else multiply_halves(sum[c][n], a[c], b);
      }
    }
#endif
  }
  // Not what sums begin with: the registers of its address would be taken all the while.
#if VALUE_BYTES == 4
  if (to.bias != nullptr && part == 0) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float added = bias_at(to, t, column + mine + j);
#pragma unroll
      for (int i = 0; i < 4 * COARSENING; ++i) sum[i][j] += added;
    }
  }
  // The second half of the block's sums are added to those of the first, four rows at a time.
  float* sums = (float*)slices + (threadIdx.x & 127) * 20;  // strides of 80 bytes: banks of their own
#pragma unroll
  for (int c = 0; c < 4 * COARSENING; c += 4) {
    __syncthreads();
    if (part == 1) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        *(float4*)(sums + 4 * i) = make_float4(sum[c + i][0], sum[c + i][1], sum[c + i][2], sum[c + i][3]);
    }
    __syncthreads();
    if (part == 0) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
          store_value(to, t, row0 + 8 * (c + i), column + mine + j, sum[c + i][j] + sums[4 * i + j]);
    }
  }
#else
  if (to.bias != nullptr) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float added = bias_at(to, t, column + mine + 8 * (i >> 1) + pair + (i & 1));
#pragma unroll
      for (int c = 0; c < COARSENING; ++c) {
        sum[c][i >> 1][i & 1] += added;
        sum[c][i >> 1][2 + (i & 1)] += added;
      }
    }
  }
#pragma unroll
  for (int c = 0; c < COARSENING; ++c)
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        store_value(to, t, 32 * c + row0 + g + 8 * (i >> 1), column + mine + 8 * n + pair + (i & 1), sum[c][n][i]);
#endif
  __syncthreads();  // before the slices of the next columns
}

#if VALUE_BYTES == 4
typedef float Sums[GRADIENT_DEPTH / 64][4][4];
#else
typedef float Sums[2][TILE_COLUMNS / 8][4];
#endif

// Add to `sums` the rows of a tile, transposed, times those of the gradient: GRADIENT_DEPTH columns of
// the rows from `from` on, times TILE_COLUMNS.
__device__ __forceinline__ void add_tile(const u8* rows, int row_stride, const value_t* slice, int from, int depth,
                                         bool bfloat, Sums& sums) {
#if VALUE_BYTES == 4
  const int k = from + (threadIdx.x >> 4) * 4, mine = (threadIdx.x & 15) * 4;
  for (int m = 0; m < TILE_ROWS; ++m) {
    const float4 b = *(const float4*)(slice + m * SLICE_STRIDE + mine);
    const u8* row = rows + m * row_stride;
#pragma unroll
    for (int j = 0; j < GRADIENT_DEPTH / 64; ++j) {
      if (k + 64 * j >= depth) continue;
      const float4 a = *(const float4*)(row + (k + 64 * j) * VALUE_BYTES);
      const float of_a[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sums[j][i][0] += of_a[i] * b.x;
        sums[j][i][1] += of_a[i] * b.y;
        sums[j][i][2] += of_a[i] * b.z;
        sums[j][i][3] += of_a[i] * b.w;
      }
    }
  }
#else
  const int lane = threadIdx.x & 31, g = lane >> 2, pair = 2 * (lane & 3);
  const int k = from + (threadIdx.x >> 5) * 32;
#pragma unroll
  for (int m = 0; m < TILE_ROWS; m += 16) {
    u32 a[2][4];
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      if (k + 16 * q >= depth) break;
#pragma unroll
      for (int i = 0; i < 4; ++i)
        a[q][i] = transposed_halves(*(const u32*)(rows + (m + g + 8 * (i >> 1)) * row_stride +
                                                  (k + 16 * q + 8 * (i & 1) + pair) * VALUE_BYTES));
    }
#pragma unroll
    for (int n = 0; n < TILE_COLUMNS / 8; ++n) {
      u32 b[2];
#pragma unroll
      for (int i = 0; i < 2; ++i)
        b[i] = transposed_halves(*(const u32*)(slice + (m + g + 8 * i) * SLICE_STRIDE + 8 * n + pair));
#pragma unroll
      for (int q = 0; q < 2; ++q) {
        if (k + 16 * q >= depth) break;
        if (bfloat) multiply_bfloats(sums[q][n], a[q], b);
        else multiply_halves(sums[q][n], a[q], b);
      }
    }
  }
#endif
}

#define SOURCE_PARAMETERS                                                                                         \
  const u32 *words, i64 n_words, const i64 *__restrict__ bases, const void *__restrict__ lengths,                 \
      int length_bytes, const u32 *__restrict__ flags, const u32 *__restrict__ moved, const u32 *overflow,        \
      i64 overflow_rows, int typical_words, const longlong2 *__restrict__ entries, u32 bucket_mask,               \
      const i64 *__restrict__ slabs, const chunk_t *__restrict__ tables, const int *__restrict__ starts,          \
      i64 n_rows, int chunks, int row_words, int row_bytes, int part_rows, int stride_words, int stage_words,     \
      int longest_words, i64 *counters, i64 *mailbox, i64 stride_bytes, const i64 *__restrict__ index,            \
      const i64 *__restrict__ tiles, int row_stride, int rows_at, int slices_at, int depth,         \
      int width, int bfloat
#if PACKED
#define SOURCE_BODY                                                                                               \
  extern __shared__ __align__(128) u32 shared[];                                                                  \
  __shared__ TileRow fetched[2][32];                                                                              \
  __shared__ int part_bits[WARPS];                                                                                \
  u8* rows = (u8*)shared + rows_at;                                                                               \
  value_t* slices = (value_t*)((u8*)shared + slices_at);                                                          \
  Source s;                                                                                                       \
  s.a = Args{nullptr, tables, starts, n_rows, chunks, row_words, row_bytes, 1, part_rows, stride_words,           \
             stage_words, longest_words, rows, mailbox, row_stride};                                              \
  s.t = Table{words, n_words, bases, lengths, length_bytes, flags, moved, overflow, overflow_rows,                \
              typical_words, entries, bucket_mask, slabs, nullptr, 0, nullptr, 0, n_rows, 1, 0};                  \
  s.index = index;                                                                                                \
  s.fetched = fetched;                                                                                            \
  s.part_bits = part_bits;                                                                                        \
  s.stage = shared;                                                                                               \
  s.counters = counters;                                                                                          \
  s.kept = prepare<32>(s.a);                                                                                      \
  s.counts = Counts{0, 0};                                                                                        \
  clear_ends(rows, row_bytes, row_stride, TILE_ROWS);
#else
#define SOURCE_BODY                                                                                               \
  extern __shared__ __align__(128) u32 shared[];                                                                  \
  u8* rows = (u8*)shared + rows_at;                                                                               \
  value_t* slices = (value_t*)((u8*)shared + slices_at);                                                          \
  Source s = {(const u8*)words, stride_bytes, row_bytes, row_stride, rows, index};                                \
  clear_ends(rows, row_bytes, row_stride, TILE_ROWS);
#endif

extern "C" __global__ void __launch_bounds__(THREADS, PRODUCT_BLOCKS)
    multiply_rows(SOURCE_PARAMETERS, i64 n_tiles, const value_t *__restrict__ weight, i64 weight_stride,
                  const value_t *__restrict__ bias, i64 bias_stride, const i64 *__restrict__ scatter,
                  const value_t *__restrict__ scale, value_t *__restrict__ out, i64 out_stride) {
  SOURCE_BODY
  const Target to = {out, out_stride, scatter, scale, bias, bias_stride, width, bfloat != 0};
  Walk walk = {tiles, blockIdx.x, n_tiles, gridDim.x};
  begin_rows(s, walk);
  for (; walk.tile < walk.end; walk.tile += walk.step) {
    const Tile t = tile_at(tiles, walk.tile);
    load_rows(s, walk, t);
    for (int column = 0; column < width; column += TILE_COLUMNS)
      multiply_tile(rows, row_stride, slices, weight + t.type * weight_stride, depth, column, t, to);
  }
  end_rows(s);
}

// Of each chunk of tiles of one type a part of the gradient, float32 [chunks, depth, width]: blocks by
// chunk, by GRADIENT_DEPTH rows and by TILE_COLUMNS columns of the weight.
extern "C" __global__ void __launch_bounds__(THREADS, GRADIENT_BLOCKS)
    multiply_gradient(SOURCE_PARAMETERS, const i64 *__restrict__ chunk_tiles, const value_t *__restrict__ g,
                      i64 g_stride, float *__restrict__ out) {
  SOURCE_BODY
  const int from = blockIdx.y * GRADIENT_DEPTH, column = blockIdx.z * TILE_COLUMNS;
  Walk walk = {tiles, chunk_tiles[2 * blockIdx.x], chunk_tiles[2 * blockIdx.x + 1], 1};
  Sums sums = {};
  begin_rows(s, walk);
  for (; walk.tile < walk.end; ++walk.tile) {
    const Tile t = tile_at(tiles, walk.tile);
    load_rows(s, walk, t);
    for (int i = threadIdx.x; i < TILE_ROWS * TILE_COLUMNS / VALUES_16; i += THREADS) {
      const int e = i * VALUES_16, r = e / TILE_COLUMNS;
      *(uint4*)(slices + r * SLICE_STRIDE + e % TILE_COLUMNS) =
          load_16(g, g_stride, t.begin + r, r < t.n, column + e % TILE_COLUMNS, width);
    }
    // Rows that are not there count for nothing, whatever was there before.
    for (int i = t.n * row_stride / 4 + threadIdx.x; i < TILE_ROWS * row_stride / 4; i += THREADS) ((u32*)rows)[i] = 0;
    __syncthreads();
    add_tile(rows, row_stride, slices, from, depth, bfloat != 0, sums);
    __syncthreads();
  }
  end_rows(s);
  float* to = out + (i64)blockIdx.x * depth * width;
#if VALUE_BYTES == 4
  const int k = from + (threadIdx.x >> 4) * 4, n = column + (threadIdx.x & 15) * 4;
#pragma unroll
  for (int j = 0; j < GRADIENT_DEPTH / 64; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int v = 0; v < 4; ++v)
        if (k + 64 * j + i < depth && n + v < width) to[(i64)(k + 64 * j + i) * width + n + v] = sums[j][i][v];
#else
  const int lane = threadIdx.x & 31, k = from + (threadIdx.x >> 5) * 32 + (lane >> 2);
  const int n = column + 2 * (lane & 3);
#pragma unroll
  for (int q = 0; q < 2; ++q)
#pragma unroll
    for (int j = 0; j < TILE_COLUMNS / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = k + 16 * q + 8 * (i >> 1), at = n + 8 * j + (i & 1);
        if (row < depth && at < width) to[(i64)row * width + at] = sums[q][j][i];
      }
#endif
}
