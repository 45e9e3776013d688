// Few rows of input times a weight whose rows are packed: y = x W^T + bias, in bfloat16, summed in
// float32. Rows of W are rebuilt in registers, as operands of the matrix instruction; nothing of W is
// written to device memory. Of packed rows those of the usual plan of trained weights: the exponent as a
// uniform mask, codes of three bits, not grouped.
//
// What bounds it on an H200, for codes of 3 bits and 2.5 % exceptions:
// - bytes: 1.4 a weight. At 4.2 TB/s 3.0 weights a ns; plain bfloat16 at the same rate are 2.1.
// - instructions, counted in the machine code of a whole step (sm_90, CUDA 13.0): 8.3 a weight with one row of
//   x, 8.7 with 16, of which 4.6 are for the integer units, whose rate is 64 a clock and multiprocessor: at
//   1.75 GHz 3.2 weights a ns.
// These are counts: this form was not timed yet. One before it, whose warps waited for each other in each round
// of 256 columns and began each block of rows anew, took 1.4 to 1.6 times as long as cuBLAS.
//
// Warps need nothing of each other on the way: an index that is made once, of 4 bytes for each chunk of
// 1024 columns, says where a row begins and how many exceptions come before the chunk. A warp takes ROWS rows
// of W and some chunks of them, step after step of 2048 values, which it copied DEPTH steps before, across
// rows. A lane takes 32 neighbouring columns, a whole group of codes, of two rows: one of each set.
//
// Of the 16 rows of the matrix instruction SEGMENTS are of one row of W, 128 neighbouring columns of it each;
// of its 8 columns so many are of one row of x. x of segment i times W of segment j is a sum where i = j, and
// is dropped elsewhere. So the fewer rows x has, the longer the pieces of fewer rows of W that a warp reads.
#include "async_copy.cuh"
#include "bits.cuh"
#include "exact.cuh"
#include "floats.cuh"
#include "mailbox.cuh"
#include "matrix.cuh"
#include "shared_place.cuh"

#define SET_ROWS (8 / SEGMENTS)
#define ROWS (2 * SET_ROWS)  // of W, of a warp
#define STEPS SET_ROWS       // of a chunk
#define ROW_LANES (4 * SEGMENTS)
#define COPY_LANES (ROW_LANES / 2)  // that know of the same row when it is copied
#define X_TILES (X_ROWS * SEGMENTS / 8)
#define CHAINS (X_TILES == 1 ? 2 : 1)  // of sums, as an instruction waits for the one before
#define CHUNK_GROUPS 32
// A stage, of each set: payload, its pieces of 16 bytes in two halves, such that lanes read from banks of
// their own; codes.
#define HALF_WORDS 144
#define CODES_AT (HALF_WORDS + 128)
#define SET_BYTES (4 * (CODES_AT + 96))
#define STAGE_BYTES (2 * SET_BYTES)
// Of a chunk of a row: what the warp knows of it, and its first exceptions.
#define HEADER_BYTES 16
#define STAGED_WORDS 16
#define SLOT_BYTES (HEADER_BYTES + 4 * STAGED_WORDS)
#define SLOTS ((DEPTH - 2) / STEPS + 2)
#define WARP_BYTES (DEPTH * STAGE_BYTES + SLOTS * ROWS * SLOT_BYTES)
static_assert(4 * SHARED_WORDS == WARP_BYTES, "as the launcher counts them");

enum { PACKED, RAW, NO_ROW };
#define NO_PLACE FULL

struct Args {
  const u32* words;
  const u32* index;  // [n_rows, chunks]: the row's first word, then exceptions before each other chunk
  const void* lengths;
  i64 n_words, n_rows;
  i64* mailbox;
  int length_bytes, row_words, groups, chunks, first_chunk, end_chunk, tasks, split_bits;
  int lane;
};

// Exponents one bit to the right, the last bit first: so halves of two bytes need no shift.
__device__ __forceinline__ u32 rotated_bytes(u32 x) {
  return (x >> 1 & 0x7f7f7f7fu) | (x << 7 & 0x80808080u);
}
// Eight codes of three bits as nibbles, the selectors of byte_perm. Bits that are too many on the way are
// left where the next step does not look.
__device__ __forceinline__ u32 nibbles_of(u32 codes) {
  codes = choose(0x0000ffff, codes, codes << 4);
  codes = choose(0x00ff00ff, codes, codes << 2);
  return (codes & 0x07070707) | (codes << 1 & 0x70707070);
}
// 1 in each nibble that is 0.
__device__ __forceinline__ u32 missed_of(u32 nibbles) { return ~(nibbles + 0x77777777u) >> 3 & 0x11111111u; }
// How many of 32 codes of three bits are 0. Codes 0 to 10 begin at every third bit of the first word,
// 11 to 21 of the second, from its bit 1 on, 22 to 31 of the third, from its bit 2 on.
__device__ __forceinline__ int count_missed(const u32 (&w)[3]) {
  const u32 a = w[0] | __funnelshift_r(w[0], w[1], 1) | __funnelshift_r(w[0], w[1], 2);
  const u32 b = w[1] | __funnelshift_r(w[1], w[2], 1) | __funnelshift_r(w[1], w[2], 2);
  const u32 c = w[2] | w[2] >> 1 | w[2] >> 2;
  return 32 - __popc((a & 0x49249249u) | (b & 0x92492492u) | (c & 0x24924924u));
}


// What a warp copies next: a step of a chunk of a task, which is a set of rows of each warp of a block.
struct Cursor {
  int task, chunk, step;
  place_t slot;
  u32 at;            // of the lane's row the first word
  int available;     // its bytes of exceptions, or -kind
  bool whole;        // whether all rows of the warp are packed
  u32 start;         // exceptions before the next chunk
  u32 next_at, next_length, next_start;  // of the lane's row in the next task
};

// The thread's number, which no register is to hold from its last use on.
__device__ __forceinline__ int thread_here() {
#ifdef SIMT_HOST
  return threadIdx.x;
#else
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
#endif
}

// The row of W that a lane knows of, in a task.
__device__ __forceinline__ i64 row_of(const Args& a, int task) {
  const int warp = threadIdx.x >> 5;
  return ((i64)task * (WARPS >> a.split_bits) + (warp >> a.split_bits)) * ROWS + a.lane / COPY_LANES;
}

__device__ __forceinline__ void load_row(const Args& a, Cursor& c, int task) {
  const i64 row = row_of(a, task);
  c.next_at = NO_PLACE;
  c.next_length = c.next_start = 0;
  if (task < a.tasks && row < a.n_rows) {
    const u32* p = a.index + row * a.chunks;
    c.next_at = __ldg(p);
    if (a.first_chunk) c.next_start = __ldg(p + a.first_chunk);
    c.next_length = load_length(a.lengths, row, a.length_bytes);
  }
}

// Begin a task: what was loaded of the lane's row one task before, and load what is known of the next.
__device__ __forceinline__ void enter_task(const Args& a, Cursor& c) {
  const i64 row = row_of(a, c.task);
  const u32 length = c.next_length, exception_at = 11 * a.groups;
  int kind = NO_ROW;
  u32 size = 0;
  if (row < a.n_rows) {
    if (length == 0) kind = RAW, size = a.row_words;
    else if (length < (u32)a.row_words && length >= exception_at) kind = PACKED, size = length;
    if (c.next_at == NO_PLACE || (i64)c.next_at + size > a.n_words) kind = NO_ROW;
    if (kind == NO_ROW && a.lane % COPY_LANES == 0) report(a.mailbox, ERROR_DAMAGED, row, 0, a.n_rows);
  }
  c.at = c.next_at;
  c.start = c.next_start;
  c.available = kind == PACKED ? 4 * (int)(length - exception_at) : -kind;
  c.whole = __all_sync(FULL, kind == PACKED) != 0;
  load_row(a, c, c.task + gridDim.x);
}

// Begin a chunk: copy its exceptions, as far as there is room, and load where those of the next one begin.
__device__ __forceinline__ void enter_chunk(const Args& a, Cursor& c, bool whole) {
  const int lane = a.lane, start = min((int)c.start, max(c.available, 0));
  if (lane % COPY_LANES == 0)
    store_shared_4(c.slot + lane / COPY_LANES * SLOT_BYTES, make_uint4(c.at, start, c.available, whole));
  const u32 first = c.at + 11 * a.groups + (start >> 2);
  const int words = (c.available >> 2) - (start >> 2);
#pragma unroll
  for (int i = 0; i < ROWS / 2; ++i) {  // a half of the warp a row
    const int r = 2 * i + (lane >> 4), word = lane & 15;
    const u32 from = ROWS == 2 ? first : __shfl_sync(FULL, first, r * COPY_LANES);
    const int n = ROWS == 2 ? words : __shfl_sync(FULL, words, r * COPY_LANES);
    if (word < n) copy_word(c.slot + r * SLOT_BYTES + HEADER_BYTES + 4 * word, a.words + (from + word));
  }
  if (c.chunk + 1 < a.end_chunk && c.available >= 0)
    c.start = __ldg(a.index + ((u32)row_of(a, c.task) * a.chunks + c.chunk + 1));
}

// Copy payload and codes of a step; WHOLE: all rows are packed and have all its columns.
template <bool WHOLE>
__device__ __forceinline__ void fetch_step(const Args& a, const Cursor& c, place_t stage) {
  const int lane = a.lane, first_group = CHUNK_GROUPS * c.chunk + ROW_LANES * c.step;
  const int groups = c.available >= 0 ? max(0, a.groups - first_group) : 0;
  const u32 payload = 8 * first_group + lane, codes = 8 * a.groups + 3 * first_group;
  // Word 32 j + lane of a set's payload.
  const place_t to = stage + 4 * (HALF_WORDS * (lane >> 2 & 1) + 4 * (lane >> 3) + (lane & 3));
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const place_t of_set = to + SET_BYTES * (r / SET_ROWS);
    const u32 at = __shfl_sync(FULL, c.at, r * COPY_LANES);
    const int left = WHOLE ? 0 : 8 * __shfl_sync(FULL, groups, r * COPY_LANES);
    const u32* p = a.words + (at + payload);
#pragma unroll
    for (int j = 0; j < SEGMENTS; ++j)
      if (WHOLE || 32 * j + lane < left) copy_word(of_set + 64 * (r % SET_ROWS * SEGMENTS + j), p + 32 * j);
  }
#pragma unroll
  for (int set = 0; set < 2; ++set) {
    const u32* p = nullptr;
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      const int word = 32 * i + lane, r = word / (3 * ROW_LANES), of_row = word - r * (3 * ROW_LANES);
      const int from = (set * SET_ROWS + r) * COPY_LANES;
      const int left = WHOLE ? 0 : 3 * __shfl_sync(FULL, groups, from);
      if (SET_ROWS > 1 || i == 0) p = a.words + (__shfl_sync(FULL, c.at, from) + codes + of_row);
      const place_t there = stage + SET_BYTES * set + 4 * (CODES_AT + word);
      if (WHOLE || of_row < left) copy_word(there, SET_ROWS > 1 ? p : p + 32 * i);
    }
  }
}

__device__ __forceinline__ void fetch(const Args& a, Cursor& c, place_t stage, place_t slots) {
  if (c.task < a.tasks) {
    if (c.step == 0 && c.chunk == a.first_chunk) enter_task(a, c);
    const bool whole = c.whole && CHUNK_GROUPS * (c.chunk + 1) <= a.groups;
    if (c.step == 0) enter_chunk(a, c, whole);
    if (whole) fetch_step<true>(a, c, stage);
    else fetch_step<false>(a, c, stage);
    if (++c.step == STEPS) {
      c.step = 0;
      c.slot += ROWS * SLOT_BYTES;
      if (c.slot == slots + SLOTS * ROWS * SLOT_BYTES) c.slot = slots;
      if (++c.chunk == a.end_chunk) c.chunk = a.first_chunk, c.task += gridDim.x;
    }
  }
  copy_async_commit();
}

// What a warp knows of a lane's row in a chunk, in shared memory: as enter_chunk has written it.
struct Row {
  place_t header;
  int start;  // bytes of exceptions before the chunk

  __device__ __forceinline__ u32 at() const { return load_shared_1(header); }
  __device__ __forceinline__ int available() const { return (int)load_shared_1(header + 8); }
};

// Four bytes of a chunk's exceptions, of those that are staged.
__device__ __forceinline__ u32 staged_exceptions(const Row& row, int byte) {
  const place_t p = row.header + HEADER_BYTES + 4 * min(byte >> 2, STAGED_WORDS - 2);
  return __funnelshift_r(load_shared_1(p), load_shared_1(p + 4), 8 * byte);
}
// Exception `index` of a row. Of a damaged row, which asks for more than it has, any byte of it.
__device__ __forceinline__ u32 exception_at(const Args& a, const Row& row, int index) {
  index = min(index, row.available());
  return a.words[row.at() + 11 * a.groups + (index >> 2)] >> 8 * (index & 3) & 255;
}

// Put a group's `n` exceptions, from byte `index` of the chunk's on, where codes are 0.
__device__ __forceinline__ void patch(const Args& a, const Row& row, const u32 (&nibbles)[4], int index, int n,
                                      u32 (&exponents)[8]) {
  const int byte = (row.start & 3) + index;
  const u32 bytes = rotated_bytes(staged_exceptions(row, byte));
  // The first four are put in with no branch: nibbles add up how many there were so far, and select the
  // next of `bytes`, which stand behind a word's own four.
  u32 before = 0x33333333u;
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const u32 missed = missed_of(nibbles[q]), field = missed * 15;
    const u32 counted = missed * 0x11111111u + before;
    const u32 selector = choose(field, counted, 0x32103210u);
    exponents[2 * q] = pick_bytes(exponents[2 * q], bytes, selector);
    exponents[2 * q + 1] = pick_bytes(exponents[2 * q + 1], bytes, selector >> 16);
    before = (counted >> 28) * 0x11111111u;
  }
  const bool staged = byte < 4 * (STAGED_WORDS - 1);
  if (n <= 4 && (staged || n == 0)) return;
  // The others, one by one; all of them where they are not staged, or more than a nibble counts.
  const bool counts = staged && n <= 12;
  u32 left[4];
  before = 0x33333333u;
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const u32 missed = missed_of(nibbles[q]), counted = missed * 0x11111111u + before;
    left[q] = counts ? missed & counted >> 3 : missed;
    before = (counted >> 28) * 0x11111111u;
  }
  if (counts) n -= 4, index += 4;
  for (index += row.start; n > 0; --n, ++index) {
    const u32 exponent = rotated_bytes(exception_at(a, row, index));
    bool found = false;
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const u32 here = left[q], v = __ffs(here) >> 2, mask = 255u << (8 * (v & 3));
      const bool next = here != 0 && !found;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const u32 changed = next && v >> 2 == h ? mask : 0;
        exponents[2 * q + h] = choose(changed, exponent * 0x01010101u, exponents[2 * q + h]);
      }
      if (next) left[q] = here & (here - 1);
      found |= next;
    }
  }
}

// Where a piece of 16 bytes of x lies in shared memory: piece i of a group's four is swapped with another,
// such that eight lanes read from banks of their own.
__device__ __forceinline__ int swapped(int row, int group) {
  return SEGMENTS == 1 ? 2 * (row & 1) + (group >> 1 & 1) : group >> 1 & 3;
}
// A lane's pieces of x, of a group: piece i ^ swap, in shared or in device memory.
struct Inputs {
  const uint4* pieces;
  int swap;
};

__device__ __forceinline__ void load_x(const Inputs& inputs, int first_group, bool there, u32 (&x)[16]) {
  const uint4* of_step = inputs.pieces + 4 * first_group;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint4 four = make_uint4(0, 0, 0, 0);
    if (there) four = of_step[i ^ inputs.swap];
    x[4 * i] = four.x;
    x[4 * i + 1] = four.y;
    x[4 * i + 2] = four.z;
    x[4 * i + 3] = four.w;
  }
}

// Multiply the columns of a step. `used`: exceptions of the chunk before it, and then with it, of either
// set in a half. WHOLE: all rows are packed and have all columns of the chunk.
template <bool WHOLE>
__device__ __forceinline__ void multiply_step(const Args& a, const Row (&rows)[2], const Inputs (&inputs)[X_TILES],
                                              u32 low, u32 high, place_t stage, int first_group, u32& used,
                                              float (&sums)[CHAINS][X_TILES][4]) {
  const int lane_of_row = a.lane % ROW_LANES;
  const bool there = WHOLE || first_group + lane_of_row < a.groups;
  u32 nibbles[2][4];
  int n[2];
#pragma unroll
  for (int set = 0; set < 2; ++set) {
    const bool packed = WHOLE || (there && rows[set].available() >= 0);
    u32 c[3];
#pragma unroll
    for (int i = 0; i < 3; ++i)
      c[i] = packed ? load_shared_1(stage + SET_BYTES * set + 4 * (CODES_AT + 3 * a.lane + i)) : FULL;
    nibbles[set][0] = nibbles_of(c[0]);
    nibbles[set][1] = nibbles_of(__funnelshift_r(c[0], c[1], 24));
    nibbles[set][2] = nibbles_of(__funnelshift_r(c[1], c[2], 16));
    nibbles[set][3] = nibbles_of(c[2] >> 8);
    u32 missed = 0;  // a bit of each nibble for each word
#pragma unroll
    for (int q = 0; q < 4; ++q) missed |= missed_of(nibbles[set][q]) << q;
    n[set] = __popc(missed);
  }
  const u32 up_to_me = used + quick_scan<ROW_LANES>(n[0] + (n[1] << 16), lane_of_row);
  used = STEPS > 1 ? __shfl_sync(FULL, up_to_me, ROW_LANES - 1, ROW_LANES) : up_to_me;

  u32 w[2][16];
#pragma unroll
  for (int set = 0; set < 2; ++set) {
    const Row& row = rows[set];
    const bool packed = WHOLE || (there && row.available() >= 0);
    const int end = set ? up_to_me >> 16 : up_to_me & 0xffff;
    u32 exponents[8];
    const u32 of_low = packed ? low : 0, of_high = packed ? high : 0;
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      exponents[2 * q] = pick_bytes(of_low, of_high, nibbles[set][q]);
      exponents[2 * q + 1] = pick_bytes(of_low, of_high, nibbles[set][q] >> 16);
    }
    patch(a, row, nibbles[set], end - n[set], n[set], exponents);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint4 four = make_uint4(0, 0, 0, 0);
      if (packed) four = load_shared_4(stage + SET_BYTES * set + 4 * (HALF_WORDS * h + 4 * a.lane));
      const u32 kept[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const u32 exponent = exponents[4 * h + k];
        const u32 upper = choose(0x80808080u, kept[k], exponent);
        const u32 lower = choose(0x80808080u, exponent, kept[k]);
        w[set][8 * h + 2 * k] = pick_bytes(lower, upper, 0x5140);
        w[set][8 * h + 2 * k + 1] = pick_bytes(lower, upper, 0x7362);
      }
    }
    if (!WHOLE && there && row.available() == -RAW) {
#pragma unroll
      for (int i = 0; i < 16; ++i) w[set][i] = a.words[row.at() + 16 * (first_group + lane_of_row) + i];
    }
  }
  if (!WHOLE) __syncwarp();
#pragma unroll
  for (int tile = 0; tile < X_TILES; ++tile) {
    u32 x[16];
    load_x(inputs[tile], first_group, there, x);
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const u32 of_w[4] = {w[0][2 * k], w[1][2 * k], w[0][2 * k + 1], w[1][2 * k + 1]};
      const u32 of_x[2] = {x[2 * k], x[2 * k + 1]};
      multiply_bfloats(sums[k % CHAINS][tile], of_w, of_x);
    }
  }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, MIN_BLOCKS)
    multiply_packed(const u32 *words, i64 n_words, const u32 *__restrict__ index, const void *__restrict__ lengths,
                    int length_bytes, const u32 *__restrict__ table, i64 n_rows, int row_words, int groups, int tasks,
                    int split_bits, int x_staged, i64 *mailbox, const unsigned short *__restrict__ x, int x_rows,
                    i64 x_stride, const unsigned short *__restrict__ bias, unsigned short *__restrict__ out,
                    i64 out_stride) {
  extern __shared__ __align__(128) u32 shared[];
  __shared__ float parts[WARPS][ROWS * X_ROWS];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, split = warp & ((1 << split_bits) - 1);

  Args a;
  a.words = words;
  a.index = index;
  a.lengths = lengths;
  a.n_words = n_words;
  a.n_rows = n_rows;
  a.mailbox = mailbox;
  a.length_bytes = length_bytes;
  a.row_words = row_words;
  a.groups = groups;
  a.chunks = (groups + CHUNK_GROUPS - 1) / CHUNK_GROUPS;
  a.first_chunk = a.chunks * split >> split_bits;
  a.end_chunk = a.chunks * (split + 1) >> split_bits;
  a.tasks = tasks;
  a.split_bits = split_bits;
  a.lane = lane;

  const place_t base = place_of(shared), stages = base + warp * WARP_BYTES;
  const place_t stages_end = stages + DEPTH * STAGE_BYTES, slots = stages_end;
  const place_t slots_end = slots + SLOTS * ROWS * SLOT_BYTES;
  uint4* own_x = (uint4*)(shared + WARPS * SHARED_WORDS);
  Cursor cursor = {(int)blockIdx.x, a.first_chunk, 0, slots};
  load_row(a, cursor, cursor.task);
  if (x_staged)
    for (int i = threadIdx.x; i < x_rows * 4 * groups; i += 32 * WARPS) {
      const int row = i / (4 * groups), piece = i - row * 4 * groups;
      copy_async_16(own_x + (i ^ swapped(row, piece >> 2)), (const uint4*)(x + row * x_stride) + piece);
    }
  copy_async_commit();
#pragma unroll 1
  for (place_t to = stages; to < stages_end; to += STAGE_BYTES) fetch(a, cursor, to, slots);

  Inputs inputs[X_TILES];
#pragma unroll
  for (int tile = 0; tile < X_TILES; ++tile) {
    // Lanes of rows that x does not have read the last one: what they compute is not stored.
    const int m = min(lane / ROW_LANES + tile * SET_ROWS, x_rows - 1), group = lane % ROW_LANES;
    inputs[tile].swap = x_staged ? swapped(m, group) : 0;
    inputs[tile].pieces = x_staged ? own_x + 4 * (m * groups + group) : (const uint4*)(x + m * x_stride) + 4 * group;
  }
  u32 low = 0, high = 0;
#pragma unroll
  for (int j = 1; j < 8; ++j) {
    const u32 exponent = __ldg(table + j) >> 7 & 255;
    if (j < 4) low |= exponent << (8 * j);
    else high |= exponent << (8 * (j - 4));
  }
  low = rotated_bytes(low);
  high = rotated_bytes(high);
  copy_async_wait<DEPTH>();
  __syncthreads();  // x is there

  place_t stage = stages, slot = slots;
  for (int task = blockIdx.x; task < tasks; task += gridDim.x) {
    float sums[CHAINS][X_TILES][4] = {};
    for (int chunk = a.first_chunk; chunk < a.end_chunk; ++chunk) {
      Row rows[2];
      bool whole = false;
      u32 used = 0;
#pragma unroll 1
      for (int step = 0; step < STEPS; ++step) {
        copy_async_wait<DEPTH - 1>();
        __syncwarp();
        if (step == 0) {
#pragma unroll
          for (int set = 0; set < 2; ++set) {
            const place_t header = slot + (lane / ROW_LANES + set * SET_ROWS) * SLOT_BYTES;
            rows[set] = {header, (int)load_shared_1(header + 4)};
            whole = load_shared_1(header + 12) != 0;
          }
        }
        const int first_group = CHUNK_GROUPS * chunk + ROW_LANES * step;
        if (whole) multiply_step<true>(a, rows, inputs, low, high, stage, first_group, used, sums);
        else multiply_step<false>(a, rows, inputs, low, high, stage, first_group, used, sums);
        if (step == STEPS - 1) {
#pragma unroll
          for (int set = 0; set < 2; ++set) {
            const int end = rows[set].start + (set ? used >> 16 : used & 0xffff), available = rows[set].available();
            if (available >= 0 && end > available) report(mailbox, ERROR_DAMAGED, -1, 0, n_rows);
          }
        }
        __syncwarp();  // before the stage is filled again
        fetch(a, cursor, stage, slots);
        stage += STAGE_BYTES;
        if (stage == stages_end) stage = stages;
      }
      slot += ROWS * SLOT_BYTES;
      if (slot == slots_end) slot = slots;
    }

    // Element (m, n) of the product: row m / SEGMENTS of W, row n / SEGMENTS of x, of equal segments.
    const int thread = thread_here(), g = thread >> 2 & 7, t = thread & 3;
    float* part = parts[thread >> 5];
#pragma unroll
    for (int tile = 0; tile < X_TILES; ++tile)
#pragma unroll
      for (int set = 0; set < 2; ++set) {
        float y[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float sum = sums[0][tile][2 * set + i];
          if (CHAINS == 2) sum = add_exact(sum, sums[CHAINS - 1][tile][2 * set + i]);
          y[i] = g % SEGMENTS == (2 * t + i) % SEGMENTS ? sum : 0;
        }
#pragma unroll
        for (int i = 0; i < (SEGMENTS == 1 ? 2 : 1); ++i) {
          float sum = SEGMENTS == 1 ? y[i] : add_exact(y[0], y[1]);
#pragma unroll
          for (int d = 1; d < SEGMENTS / 2; d *= 2) sum = add_exact(sum, __shfl_xor_sync(FULL, sum, d));
#pragma unroll
          for (int d = 4; d < 4 * SEGMENTS; d *= 2) sum = add_exact(sum, __shfl_xor_sync(FULL, sum, d));
          const int r = g / SEGMENTS + set * SET_ROWS, m = (2 * t + i) / SEGMENTS + tile * SET_ROWS;
          if (g % SEGMENTS == 0 && (SEGMENTS < 4 || t % (SEGMENTS / 2) == 0)) part[r * X_ROWS + m] = sum;
        }
      }
    // Sums of the warps of some rows, in their order.
    if (split_bits) __syncthreads();
    else __syncwarp();
    const int first_warp = thread >> 5 & -(1 << split_bits);
    const i64 first_row = ((i64)task * (WARPS >> split_bits) + (first_warp >> split_bits)) * ROWS;
    for (int i = thread - 32 * first_warp; i < ROWS * X_ROWS; i += 32 << split_bits) {
      const int r = i % ROWS, m = i / ROWS;
      if (m >= x_rows || first_row + r >= n_rows) continue;
      float sum = 0;
      for (int s = 0; s < 1 << split_bits; ++s) sum = add_exact(sum, parts[first_warp + s][r * X_ROWS + m]);
      if (bias != nullptr) sum = add_exact(sum, float_of_brain(bias[first_row + r]));
      const bool is_nan = (__float_as_uint(sum) & 0x7fffffffu) > 0x7f800000u;
      out[m * out_stride + first_row + r] = (unsigned short)(is_nan ? 0x7fffu : brain_bits(sum));
    }
    if (split_bits) __syncthreads();
    else __syncwarp();
  }
  copy_async_wait<0>();
}

// Where packed rows lie: of each its first word, and the exceptions before each chunk but the first. A warp
// a row.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    index_exceptions(const u32 *words, i64 n_words, const i64 *__restrict__ bases, const void *__restrict__ lengths,
                     int length_bytes, i64 n_rows, int row_words, int groups, i64 *mailbox, u32 *index) {
  const int lane = threadIdx.x & 31, chunks = (groups + CHUNK_GROUPS - 1) / CHUNK_GROUPS;
  const i64 row = (i64)blockIdx.x * WARPS + (threadIdx.x >> 5), begin = row & ~(i64)31;
  if (row >= n_rows) return;
  int length = 0, size = 0;
  if (begin + lane < n_rows) {
    length = (int)load_length(lengths, begin + lane, length_bytes);
    if ((u32)length < (u32)row_words) size = length ? length : row_words;  // no packed row is so long
  }
  const i64 base = bases[row >> 5];
  const int from = (int)(row & 31), before = inclusive_scan(size, lane) - size;
  const i64 at = base + __shfl_sync(FULL, before, from);
  length = __shfl_sync(FULL, length, from);
  size = __shfl_sync(FULL, size, from);
  const bool there = size != 0 && base >= 0 && at <= n_words - size && (length == 0 || length >= 11 * groups);
  u32 used = 0;
  for (int chunk = 0; chunk < chunks; ++chunk) {
    if (lane == 0) index[row * chunks + chunk] = chunk ? used : there ? (u32)at : NO_PLACE;
    const int group = CHUNK_GROUPS * chunk + lane;
    int n = 0;
    if (there && length && group < groups) {
      const u32* p = words + at + 8 * groups + 3 * group;
      const u32 codes[3] = {p[0], p[1], p[2]};
      n = count_missed(codes);
    }
    used += __shfl_sync(FULL, inclusive_scan(n, lane), 31);
  }
  const bool sound = there && (length == 0 || used <= 4 * (u32)(length - 11 * groups));
  if (!sound && lane == 0) report(mailbox, ERROR_DAMAGED, row, 0, n_rows);
}
