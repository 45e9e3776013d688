// Raw rows by id, from device or mapped host memory. Threads take aligned units of the rows, one after
// another across all rows, so that small rows share a warp.
//
// Host memory is read at full rate only where each group of neighbouring threads covers one aligned
// line. Rows that do not consist of whole lines would start somewhere inside a group; therefore such
// a row is turned: thread t takes unit (t + s) mod units, with s such that the numbers of thread and
// unit agree modulo a line. Only the row's two ends then share a group, or are cut by its bounds.
//
// UNIT_BYTES are loaded at once and PIECE_BYTES stored, both aligned; PIECE_BYTES divides the
// addresses and sizes of all rows. A row that starts inside a unit may touch one unit more than
// another row: all get threads for as many as any needs, of which some then do nothing.
#include "bits.cuh"
#include "host_load.cuh"
#include "ids.cuh"
#include "mailbox.cuh"

#define THREADS 256
#define UNROLL 4  // units of a thread that are under way at once
#define TILE (THREADS * UNROLL)
#define LINE_UNITS (LINE_BYTES / UNIT_BYTES)
#define PIECES (UNIT_BYTES / PIECE_BYTES)

#if PIECE_BYTES == 1
typedef u8 piece_t;
#elif PIECE_BYTES == 2
typedef unsigned short piece_t;
#elif PIECE_BYTES == 4
typedef u32 piece_t;
#elif PIECE_BYTES == 8
typedef uint2 piece_t;
#else
typedef uint4 piece_t;
#endif

__device__ __forceinline__ u32 word_of(u32 x, int) { return x; }
__device__ __forceinline__ u32 word_of(uint4 x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }
__device__ __forceinline__ piece_t piece_of(unit_t x, int p) {
#if PIECE_BYTES == UNIT_BYTES
  return x;
#elif PIECE_BYTES == 8
  return make_uint2(word_of(x, 2 * p), word_of(x, 2 * p + 1));
#else
  return (piece_t)(word_of(x, p * PIECE_BYTES / 4) >> 8 * (p * PIECE_BYTES % 4));
#endif
}

// The k-th row taken is row order[k] of `out`, or row k without an order, from that id. A block goes
// through tiles of TILE units; step_rows rows and step_units units lie between two of its tiles. A
// number t below 2^31 divided by `units` is the high word of t * multiplier, shifted right by `shift`;
// for a single unit, whose multiplier would not fit, multiplier is 0. See division in copy.py.
// For first_bad and lowest see bad_position. A row whose id is NO_ROW is left as it is.
extern "C" __global__ void __launch_bounds__(THREADS, 4)
    copy_rows(const u8* __restrict__ rows, u32 stride_bytes, i64 n_rows, int row_bytes, const void* __restrict__ ids,
              int id_bytes, const u32* __restrict__ order, i64 n, int units, u32 multiplier, int shift, int turned,
              i64 step_rows, int step_units, u8* __restrict__ out, const u64* __restrict__ first_bad, i64 lowest,
              i64* mailbox) {
  const u64 bad = bad_position(first_bad, ids, id_bytes, n, lowest, n_rows);
  if (bad != ~0ull) {
    if (blockIdx.x == 0 && threadIdx.x == 0)
      report(mailbox, ERROR_INDEX, (i64)bad, load_id(ids, (i64)bad, id_bytes), n_rows);
    return;
  }
  const u32 first = blockIdx.x * TILE;
  i64 row = first / (u32)units;  // of the tile's first unit
  int unit = first % (u32)units;
  for (; row < n; row += step_rows) {
    const u32 left = (u32)min(n - row, (i64)TILE);
    bool wanted[UNROLL];
    int u[UNROLL];   // the thread's number in its row, then its unit
    u32 at[UNROLL];  // its row of `out`
#pragma unroll
    for (int j = 0; j < UNROLL; ++j) {
      const u32 t = unit + threadIdx.x + j * THREADS;
      const u32 rows_on = multiplier ? __umulhi(t, multiplier) >> shift : t;
      u[j] = t - rows_on * units;
      wanted[j] = rows_on < left;
      at[j] = (u32)row + rows_on;
      if (order != nullptr && wanted[j]) at[j] = order[row + rows_on];
    }
    i64 id[UNROLL];
#pragma unroll
    for (int j = 0; j < UNROLL; ++j) {
      id[j] = 0;
      if (wanted[j]) id[j] = load_id(ids, at[j], id_bytes);
    }
    unit_t x[UNROLL];
#pragma unroll
    for (int j = 0; j < UNROLL; ++j) {
      if (id[j] < 0) id[j] += n_rows;
      if (id[j] < 0) {  // NO_ROW
        wanted[j] = false;
        id[j] = 0;
      }
      const u8* from = rows + (u64)id[j] * stride_bytes;
      const int offset = PIECES == 1 ? 0 : (u32)(u64)from % UNIT_BYTES;
      const unit_t* aligned = (const unit_t*)(from - offset);
#if SHIFT
      if (turned) {
        // How many threads, and units, of the row come before its first whole line of them. Tiles
        // start at multiples of a line.
        const int threads_before = (u[j] - threadIdx.x) % LINE_UNITS;
        const int units_before = (0u - (u32)((u64)aligned / UNIT_BYTES)) % LINE_UNITS;
        u[j] += units_before - threads_before;
        if (u[j] < 0) u[j] += units;
        if (u[j] >= units) u[j] -= units;
      }
#endif
      aligned += u[j];
      u[j] = u[j] * UNIT_BYTES - offset;  // the unit's first byte in the row
      if (PIECES > 1) wanted[j] = wanted[j] && u[j] < row_bytes;
      x[j] = load_unit(aligned, wanted[j]);
    }
#pragma unroll
    for (int j = 0; j < UNROLL; ++j) {
      if (!wanted[j]) continue;
      u8* to = out + (u64)at[j] * (u32)row_bytes + u[j];
#pragma unroll
      for (int p = 0; p < PIECES; ++p) {
        const int begin = u[j] + p * PIECE_BYTES;
        if (PIECES == 1 || (begin >= 0 && begin < row_bytes)) *(piece_t*)(to + p * PIECE_BYTES) = piece_of(x[j], p);
      }
    }
    unit += step_units;
    if (unit >= units) {
      unit -= units;
      ++row;
    }
  }
}
