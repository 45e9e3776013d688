// Few rows of input times a weight whose rows are packed: y = x W^T + bias, in bfloat16, summed in
// float32. Rows of W are rebuilt in registers, as operands of the matrix instruction; nothing of W is
// written to device memory. Of packed rows those of the usual plan of trained weights: the exponent as a
// uniform mask, codes of three bits, not grouped.
//
// What bounds it on an H200, for codes of 3 bits and 2.5 % exceptions:
// - bytes: 1.4 a weight. At 4.2 TB/s 3.0 weights a ns; plain bfloat16 at the same rate are 2.1.
// - instructions, counted in the machine code of a whole round (sm_90, CUDA 13.0): 8.2 a weight with up to
//   8 rows of x, 9.6 with up to 16, of which 5.0 and 5.6 are for the integer units, whose rate is 64 a
//   clock and multiprocessor: at 1.75 GHz 3.0 and 2.6 weights a ns. Groups of 32 with more than four
//   exceptions, which one warp in 23 meets, add 0.2.
// Either lies above the rate of plain bfloat16. These are counts: it was not timed yet.
//
// A block takes ROWS rows of W. Its warps share the columns: in each round a warp takes STEPS of 128,
// whose payload and codes it copied to its stage one round before. A lane takes 32 neighbouring
// columns, a whole group of codes, of rows g and g + 8 of each 16: lane 4 g + t, groups t of each step.
// Products sum over all columns, so any lane's columns may stand at any k of the matrix instruction,
// as long as x stands there too. Where a row's exceptions begin for a lane is known once all warps
// have counted theirs: one barrier a round.
#include "async_copy.cuh"
#include "bits.cuh"
#include "exact.cuh"
#include "floats.cuh"
#include "mailbox.cuh"
#include "matrix.cuh"

#define ROWS (16 * ROW_TILES)
#define STEPS (2 / ROW_TILES)  // of 128 columns, in a round of a warp
#define STEP_GROUPS 4
#define COLUMN_TILES (X_ROWS / 8)
#define SETS (2 * ROW_TILES)  // rows of a lane
#define PIECES (PAYLOAD_PIECES + CODE_PIECES)
#define CODES_AT (4 * PAYLOAD_PIECES)
static_assert(COUNTED_WARPS == 8 && MAX_WARPS <= 8, "four lanes add the counts of a row");

enum { NO_ROW, RAW, PACKED };
enum { NOTHING = -0x40000000 };  // an end that no word is before

// What the lanes of a row know of it.
struct Row {
  int at, kind;          // its first word, from `lines` on
  int available, used;   // bytes of exceptions: in all, and before this round
};

struct Args {
  const u32* lines;  // a multiple of 16 bytes
  const unsigned short* x;
  i64 x_stride;
  u32 low, high;     // of each code the exponent, rotated right by one bit
  int groups;        // of 32 columns
  int code_at, exception_at, exception_words, x_rows;
};

// Exponents one bit to the right, the last bit first: so halves of two bytes need no shift.
__device__ __forceinline__ u32 rotated_bytes(u32 x) {
  return (x >> 1 & 0x7f7f7f7fu) | (x << 7 & 0x80808080u);
}
// The bits of `a` where those of `mask` are 1, and those of `b` where they are 0. One instruction, of which
// the compiler makes two where it knows the mask.
__device__ __forceinline__ u32 select_bits(u32 mask, u32 a, u32 b) {
#ifdef SIMT_HOST
  return (a & mask) | (b & ~mask);
#else
  u32 c;
  asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(c) : "r"(mask), "r"(a), "r"(b));
  return c;
#endif
}
// Copy 16 bytes that many bytes behind two addresses, which instructions hold beside the registers.
template <int TO, int FROM> __device__ __forceinline__ void copy_16_behind(void* to, const void* from) {
#ifdef SIMT_HOST
  copy_async_16((u8*)to + TO, (const u8*)from + FROM);
#else
  const u32 place = (u32)__cvta_generic_to_shared(to);
  asm volatile("cp.async.cg.shared.global [%0 + %2], [%1 + %3], 16;\n" ::"r"(place), "l"(from), "n"(TO), "n"(FROM)
               : "memory");
#endif
}
// Eight codes of three bits as nibbles, the selectors of byte_perm. Bits that are too many on the way are
// left where the next step does not look.
__device__ __forceinline__ u32 nibbles_of(u32 codes) {
  codes = select_bits(0x0000ffff, codes, codes << 4);
  codes = select_bits(0x00ff00ff, codes, codes << 2);
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

// Copy the pieces of a row that fall to this lane, from number I of them on.
template <bool WHOLE, int I>
__device__ __forceinline__ void fetch_pieces(const Args& a, u32* to, int payload, int code, int payload_end,
                                             int code_end) {
  const int p = 8 * I + (threadIdx.x & 7);
  const bool of_codes = 8 * I + 7 >= PAYLOAD_PIECES && p >= PAYLOAD_PIECES;
  const int word = of_codes ? code : payload;
  bool wanted = 8 * I + 7 < PIECES || p < PIECES;
  if (!WHOLE) wanted &= word + 32 * I < (of_codes ? code_end : payload_end);
  if (wanted) copy_16_behind<128 * I, 128 * I>(to, a.lines + word);
  if constexpr (8 * (I + 1) < PIECES) fetch_pieces<WHOLE, I + 1>(a, to, payload, code, payload_end, code_end);
}

// Copy payload and codes of a warp's next columns to its stage, eight lanes a row. Where rounds are
// WHOLE all pieces are copied: those behind a row's end are of the next, or of what pads the last.
template <bool WHOLE>
__device__ __forceinline__ void fetch(const Args& a, u32* stage, const Row (&rows)[SETS], int first_group) {
  const int lane = threadIdx.x & 31, end_group = min(a.groups, first_group + STEP_GROUPS * STEPS);
  if (first_group < a.groups) {
#pragma unroll
    for (int pass = 0; pass < ROWS / 4; ++pass) {
      const int place = WHOLE || rows[pass / 2].kind == PACKED ? rows[pass / 2].at : -1;
      const int at = __shfl_sync(FULL, place, 16 * (pass & 1) + 4 * (lane >> 3)), codes = at + a.code_at;
      // Words that this lane copies first: of the payload, and, as far behind it in the slot, of codes.
      const int payload = ((at + 8 * first_group) & ~3) + 4 * (lane & 7);
      const int code = ((codes + 3 * first_group) & ~3) + 4 * (lane & 7) - 4 * PAYLOAD_PIECES;
      // Of a row that is not packed nothing is copied: its first word would be that before `lines`.
      const int payload_end = at < 0 ? NOTHING : at + 8 * end_group;
      const int code_end = at < 0 ? NOTHING : codes + 3 * end_group;
      u32* to = stage + (4 * pass + (lane >> 3)) * SLOT_WORDS + 4 * (lane & 7);
      fetch_pieces<WHOLE, 0>(a, to, payload, code, payload_end, code_end);
    }
  }
  copy_async_commit();
}

// A lane's codes of a step, out of a row's slot; those of no row and behind the last column are no 0.
template <bool WHOLE>
__device__ __forceinline__ void load_codes(const Args& a, const u32* slot, const Row& row, int first_group, int step,
                                           u32 (&w)[3]) {
  const int group = STEP_GROUPS * step + (threadIdx.x & 3);
  const bool there = WHOLE || (row.kind == PACKED && first_group + group < a.groups);
  const u32* p = slot + CODES_AT + ((row.at + a.code_at) & 3) + 3 * group;
#pragma unroll
  for (int i = 0; i < 3; ++i) w[i] = there ? p[i] : FULL;
}

// A lane's values of x, 32 columns of each step; behind the last column zeros, since they are multiplied too.
template <bool WHOLE>
__device__ __forceinline__ void load_x(const Args& a, const uint4* const (&of_lane)[COLUMN_TILES], int first_group,
                                       uint4 (&x)[COLUMN_TILES][4 * STEPS]) {
#pragma unroll
  for (int n = 0; n < COLUMN_TILES; ++n)
#pragma unroll
    for (int i = 0; i < 4 * STEPS; ++i) {
      const int group = first_group + STEP_GROUPS * (i >> 2);
      x[n][i] = make_uint4(0, 0, 0, 0);
      if (WHOLE || group + (int)(threadIdx.x & 3) < a.groups) x[n][i] = __ldg(of_lane[n] + 4 * group + (i & 3));
    }
}

// The four bytes from byte `index` of a row's exceptions on. `staged` has all of them where rounds are
// WHOLE, else the first ones. Of a damaged row, which asks for more than it has, any bytes of it.
template <bool WHOLE>
__device__ __forceinline__ u32 exceptions_at(const Args& a, const u32* staged, const Row& row, int index) {
  const int begin = row.at + a.exception_at, byte = 4 * (begin & 3) + min(index, row.available), word = byte >> 2;
  const u32* p = staged + word;
  if (!WHOLE && word + 2 > a.exception_words) p = a.lines + (begin & ~3) + word;
  return __funnelshift_r(p[0], p[1], 8 * byte);
}

// Put a group's `n` exceptions, from byte `index` of the row's on, where codes are 0.
template <bool WHOLE>
__device__ __forceinline__ void patch(const Args& a, const u32* staged, const Row& row, const u32 (&codes)[4],
                                      int index, int n, u32 (&exponents)[8]) {
  u32 bytes = 0;
  if (WHOLE || n) bytes = rotated_bytes(exceptions_at<WHOLE>(a, staged, row, index));
  // The first four are put in with no branch: nibbles add up how many there were so far, and select the
  // next of `bytes`, which stand behind a word's own four.
  u32 before = 0x33333333u;
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const u32 missed = missed_of(codes[q]), field = missed * 15;
    const u32 counted = missed * 0x11111111u + before;
    const u32 selector = (counted & field) | (0x32103210u & ~field);
    exponents[2 * q] = __byte_perm(exponents[2 * q], bytes, selector);
    exponents[2 * q + 1] = __byte_perm(exponents[2 * q + 1], bytes, selector >> 16);
    before = (counted >> 28) * 0x11111111u;
  }
  if (n <= 4) return;
  // The others, one by one; all of them where there are more than a nibble counts.
  const bool counts = n <= 12;
  u32 left[4];
  before = 0x33333333u;
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const u32 missed = missed_of(codes[q]), counted = missed * 0x11111111u + before;
    left[q] = counts ? missed & counted >> 3 : missed;
    before = (counted >> 28) * 0x11111111u;
  }
  if (counts) n -= 4, index += 4;
  for (; n; --n, ++index) {
    const u32 byte = rotated_bytes(exceptions_at<WHOLE>(a, staged, row, index)) & 255;
    bool found = false;
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const u32 here = left[q], v = __ffs(here) >> 2, mask = 255u << (8 * (v & 3));
      const bool next = here != 0 && !found;
#pragma unroll
      for (int h = 0; h < 2; ++h)
        if (next && v >> 2 == h) exponents[2 * q + h] = (exponents[2 * q + h] & ~mask) | (byte * 0x01010101u & mask);
      if (next) left[q] = here & (here - 1);
      found |= next;
    }
  }
}

// Multiply all columns, and return whether a row asked for more exceptions than it has. WHOLE: all rows of
// the block are packed, their exceptions are staged, and no step ends behind the last column.
template <bool WHOLE>
__device__ __forceinline__ bool multiply(const Args& a, Row (&rows)[SETS], u32* stages, const u32* staged,
                                         unsigned short (*counts)[ROWS][COUNTED_WARPS],
                                         float (&sums)[ROW_TILES][COLUMN_TILES][4]) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  const int round_groups = STEP_GROUPS * STEPS * warps;
  // Each lane of a row adds the counts of two warps: of those before this one, in the lower half, and all.
  const u32 earlier = 2 * t + 1 < warp ? FULL : 2 * t < warp ? 0xffffu : 0;
  int first_group = warp * STEP_GROUPS * STEPS;
  fetch<WHOLE>(a, stages, rows, first_group);
  fetch<WHOLE>(a, stages + STAGE_WORDS, rows, first_group + round_groups);
  // Lanes of rows that x does not have read the last one: what they compute is not stored.
  const uint4* x_of_lane[COLUMN_TILES];
#pragma unroll
  for (int n = 0; n < COLUMN_TILES; ++n)
    x_of_lane[n] = (const uint4*)(a.x + min(8 * n + g, a.x_rows - 1) * a.x_stride + 32 * t);
  for (int round = 0; round * round_groups < a.groups; ++round, first_group += round_groups) {
    const u32* stage = stages + (round & 1) * STAGE_WORDS;
    const bool active = first_group < a.groups;
    uint4 x[COLUMN_TILES][4 * STEPS];
    // x comes while the warp waits and counts.
    if (active) load_x<WHOLE>(a, x_of_lane, first_group, x);
    copy_async_wait<1>();
    __syncwarp();
    int before[SETS * STEPS] = {}, n_missed[SETS * STEPS] = {};
#pragma unroll
    for (int set = 0; set < SETS; ++set) {
      const int j = 8 * set + g;
      int total = 0;
      if (active) {
        const u32* slot = stage + j * SLOT_WORDS;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
          const int q = set * STEPS + step;
          u32 codes[3];
          load_codes<WHOLE>(a, slot, rows[set], first_group, step, codes);
          n_missed[q] = count_missed(codes);
          const int up_to_me = inclusive_scan<4>(n_missed[q], t);
          before[q] = total + up_to_me - n_missed[q];
          total += __shfl_sync(FULL, up_to_me, 3, 4);
        }
      }
      if (t == 0) counts[round & 1][j][warp] = (unsigned short)total;
    }
    __syncthreads();
#pragma unroll
    for (int set = 0; set < SETS; ++set) {
      const u32 two = *(const u32*)&counts[round & 1][8 * set + g][2 * t], mine = two & earlier;
      u32 sums_of_warps = (mine & 0xffff) + (mine >> 16) + (two << 16) + (two & 0xffff0000u);
      sums_of_warps += __shfl_xor_sync(FULL, sums_of_warps, 1);
      sums_of_warps += __shfl_xor_sync(FULL, sums_of_warps, 2);
#pragma unroll
      for (int step = 0; step < STEPS; ++step)
        before[set * STEPS + step] += rows[set].used + (int)(sums_of_warps & 0xffff);
      rows[set].used += (int)(sums_of_warps >> 16);
    }
    if (active) {
#pragma unroll
      for (int tile = 0; tile < ROW_TILES; ++tile)
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
          u32 exponents[2][8];
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const int set = 2 * tile + h, q = set * STEPS + step;
            u32 w[3];
            load_codes<WHOLE>(a, stage + (8 * set + g) * SLOT_WORDS, rows[set], first_group, step, w);
            const u32 nibbles[4] = {nibbles_of(w[0]), nibbles_of(__funnelshift_r(w[0], w[1], 24)),
                                    nibbles_of(__funnelshift_r(w[1], w[2], 16)), nibbles_of(w[2] >> 8)};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              exponents[h][2 * i] = __byte_perm(a.low, a.high, nibbles[i]);
              exponents[h][2 * i + 1] = __byte_perm(a.low, a.high, nibbles[i] >> 16);
            }
            patch<WHOLE>(a, staged + (8 * set + g) * a.exception_words, rows[set], nibbles, before[q], n_missed[q],
                  exponents[h]);
          }
#pragma unroll
          for (int k = 0; k < 8; ++k) {
            u32 of_w[4];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              const Row& row = rows[2 * tile + h];
              const int j = 16 * tile + 8 * h + g, group = STEP_GROUPS * step + t;
              u32 kept = 0;  // sign and mantissa of four values
              if (WHOLE || (row.kind == PACKED && first_group + group < a.groups))
                kept = stage[j * SLOT_WORDS + (row.at & 3) + 8 * group + k];
              const u32 e = exponents[h][k];
              const u32 upper = select_bits(0x80808080u, kept, e), lower = select_bits(0x80808080u, e, kept);
              of_w[h] = __byte_perm(lower, upper, 0x5140);
              of_w[2 + h] = __byte_perm(lower, upper, 0x7362);
              if (!WHOLE && (row.kind != PACKED || first_group + group >= a.groups)) {
                of_w[h] = of_w[2 + h] = 0;
                if (row.kind == RAW && first_group + group < a.groups) {
                  const u32* raw = a.lines + row.at + 16 * (first_group + group) + 2 * k;
                  of_w[h] = raw[0];
                  of_w[2 + h] = raw[1];
                }
              }
            }
#pragma unroll
            for (int n = 0; n < COLUMN_TILES; ++n) {
              const uint4 four = x[n][4 * step + (k >> 1)];
              const u32 of_x[2] = {k & 1 ? four.z : four.x, k & 1 ? four.w : four.y};
              multiply_bfloats(sums[tile][n], of_w, of_x);
            }
          }
        }
    }
    __syncwarp();  // before the stage is filled again
    fetch<WHOLE>(a, stages + (round & 1) * STAGE_WORDS, rows, first_group + 2 * round_groups);
  }
  copy_async_wait<0>();
  bool damaged = false;
#pragma unroll
  for (int set = 0; set < SETS; ++set) damaged |= rows[set].kind == PACKED && rows[set].used > rows[set].available;
  return damaged;
}

extern "C" __global__ void __launch_bounds__(32 * MAX_WARPS, MIN_BLOCKS)
    multiply_packed(const u32 *words, i64 n_words, const i64 *__restrict__ bases, const void *__restrict__ lengths,
                    int length_bytes, const u32 *__restrict__ table, i64 n_rows, int row_words, int groups,
                    int exception_words, i64 *mailbox, const unsigned short *__restrict__ x, int x_rows, i64 x_stride,
                    const unsigned short *__restrict__ bias, unsigned short *__restrict__ out, i64 out_stride) {
  extern __shared__ __align__(128) u32 shared[];
  __shared__ __align__(16) unsigned short counts[2][ROWS][COUNTED_WARPS];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  // Warps that the block does not have count nothing.
  for (int i = threadIdx.x; i < 2 * ROWS * COUNTED_WARPS; i += blockDim.x)
    if (i % COUNTED_WARPS >= warps) (&counts[0][0][0])[i] = 0;

  Args a;
  a.x = x;
  a.x_stride = x_stride;
  a.x_rows = x_rows;
  a.groups = groups;
  a.code_at = 8 * groups;
  a.exception_at = 11 * groups;
  a.exception_words = exception_words;
  a.low = a.high = 0;
#pragma unroll
  for (int j = 1; j < 8; ++j) {
    const u32 exponent = __ldg(table + j) >> 7 & 255;
    if (j < 4) a.low |= exponent << (8 * j);
    else a.high |= exponent << (8 * (j - 4));
  }
  a.low = rotated_bytes(a.low);
  a.high = rotated_bytes(a.high);

  // A lane a row: where the 32 rows lie that share an entry of `bases`, and with it those of the block.
  const i64 first = (i64)blockIdx.x * ROWS, begin = first & ~(i64)31;
  const i64 base = bases[first >> 5];
  int at, kind = NO_ROW, available = 0;
  {
    int length = 0, size = 0;
    if (begin + lane < n_rows) {
      length = (int)load_length(lengths, begin + lane, length_bytes);
      kind = length ? PACKED : RAW;
      if ((u32)length >= (u32)row_words) kind = NO_ROW;  // no packed row is so long
      else size = length ? length : row_words;
    }
    at = inclusive_scan(size, lane) - size;
    if (base < 0 || base > n_words - at - size || (kind == PACKED && length < a.exception_at)) kind = NO_ROW;
    available = 4 * (length - a.exception_at);
    const bool mine = begin + lane >= first && begin + lane < min(first + ROWS, n_rows);
    if (mine && kind == NO_ROW && warp == 0) report(mailbox, ERROR_DAMAGED, begin + lane, 0, n_rows);
    at += (int)(base & 3);
  }
  a.lines = words + (base & ~(i64)3);
  const int origin = (int)(first - begin);
  bool whole = groups % (STEP_GROUPS * STEPS) == 0;
  Row rows[SETS];
#pragma unroll
  for (int set = 0; set < SETS; ++set) {
    const int from = origin + 8 * set + (lane >> 2);
    rows[set].at = __shfl_sync(FULL, at, from);
    rows[set].kind = __shfl_sync(FULL, kind, from);
    rows[set].available = __shfl_sync(FULL, available, from);
    rows[set].used = 0;
    const int exception_words_here = (rows[set].available >> 2) + 5;  // with those before and behind them
    whole &= __all_sync(FULL, rows[set].kind == PACKED && exception_words_here <= exception_words) != 0;
  }
  u32* stages = shared + 2 * warp * STAGE_WORDS;
  u32* staged = shared + 2 * warps * STAGE_WORDS;
  // Exceptions of the rows, as far as there is room: eight lanes a row, with the first columns.
  for (int row = 0; row < ROWS; row += 4 * warps) {
    const int j = row + 4 * warp + (lane >> 3), from = (origin + j) & 31;
    const int row_at = __shfl_sync(FULL, at, from), bytes = __shfl_sync(FULL, available, from);
    const int row_kind = __shfl_sync(FULL, kind, from);
    if (row_kind != PACKED || j >= ROWS) continue;
    const int line = (row_at + a.exception_at) & ~3, end = row_at + a.exception_at + (bytes >> 2);
    for (int word = 4 * (lane & 7); word < exception_words && line + word < end; word += 32)
      copy_async_16(staged + j * exception_words + word, a.lines + line + word);
  }

  float sums[ROW_TILES][COLUMN_TILES][4] = {};
  const bool damaged = whole ? multiply<true>(a, rows, stages, staged, counts, sums)
                             : multiply<false>(a, rows, stages, staged, counts, sums);
  if (damaged) report(mailbox, ERROR_DAMAGED, -1, 0, n_rows);

  // Sums of the warps, in their order.
  __syncthreads();
  float* parts = (float*)shared;
#pragma unroll
  for (int tile = 0; tile < ROW_TILES; ++tile)
#pragma unroll
    for (int n = 0; n < COLUMN_TILES; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        parts[(warp * ROWS + 16 * tile + 8 * (i >> 1) + (lane >> 2)) * X_ROWS + 8 * n + 2 * (lane & 3) + (i & 1)] =
            sums[tile][n][i];
  __syncthreads();
  for (int i = threadIdx.x; i < ROWS * x_rows; i += blockDim.x) {
    const int j = i % ROWS, m = i / ROWS;
    if (first + j >= n_rows) continue;
    float y = 0;
    for (int w = 0; w < warps; ++w) y = add_exact(y, parts[(w * ROWS + j) * X_ROWS + m]);
    if (bias != nullptr) y = add_exact(y, float_of_brain(bias[first + j]));
    const bool is_nan = (__float_as_uint(y) & 0x7fffffffu) > 0x7f800000u;
    out[m * out_stride + first + j] = (unsigned short)(is_nan ? 0x7fffu : brain_bits(y));
  }
}
