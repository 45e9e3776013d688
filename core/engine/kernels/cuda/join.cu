// The tokens of a layer of a K/V cache in one launch, K's and V's: packed ones are decoded to where they
// belong among all tokens `[batch, heads, length, dim]`; the tail, which is not packed, and new tokens are
// copied behind them; and the memory of the tail gets the new tokens, or all, where it is another than
// the tail lies in. A row is one or several consecutive tokens of a head. See gather.cu, whose decoder of
// short rows this is.
#include "async_copy.cuh"
#include "bits.cuh"
#include "ids.cuh"
#include "mailbox.cuh"
#include "map.cuh"
#define GATHER 1
#define JOIN 1
#include "row_cursor.cuh"
#include "words.cuh"
#include "rebuild.cuh"
#include "rebuild_words.cuh"
#include "decode.cuh"
#include "chosen_rows.cuh"
#include "chosen_tiles.cuh"

// Tokens of K or V that are not packed. Strides in bytes; `out` and `memory` lie without gaps.
struct Unpacked {
  u8* out;
  i64 length;  // tokens of `out`, of which these are the last
  const u8* tail;
  i64 tail_batch, tail_head, tail_token;
  int tail_tokens;
  u8* memory;
  i64 memory_tokens;  // that it has room for
  const u8* fresh;
  i64 new_batch, new_head, new_token;
  int new_tokens, token_bytes;
};

// Copy tokens, 16 bytes at a time: this thread is the `begin`-th of `step`.
__device__ __forceinline__ void copy_unpacked(const Unpacked& x, int heads, i64 pairs, i64 begin, i64 step) {
  const u32 tokens = x.tail_tokens + x.new_tokens, units = (u32)x.token_bytes / 16, of_pair = tokens * units;
  const i64 end = pairs * of_pair, first = x.length - tokens;
  const bool moves = x.memory != x.tail;
#pragma unroll 2
  for (i64 i = begin; i < end; i += step) {
    const i64 pair = i / of_pair, batch = pair / heads, head = pair - batch * heads;
    const u32 within = (u32)(i - pair * of_pair), token = within / units, at = (within - token * units) * 16;
    const bool is_new = token >= (u32)x.tail_tokens;
    const u8* from = is_new ? x.fresh + batch * x.new_batch + head * x.new_head + (token - x.tail_tokens) * x.new_token
                            : x.tail + batch * x.tail_batch + head * x.tail_head + token * x.tail_token;
    const uint4 unit = *(const uint4*)(from + at);
    *(uint4*)(x.out + (pair * x.length + first + token) * x.token_bytes + at) = unit;
    if (is_new || moves) *(uint4*)(x.memory + (pair * x.memory_tokens + token) * x.token_bytes + at) = unit;
  }
}

// Packed tokens of K and of V, `head_rows` rows of a head; the first goes to token `first`. Of each as many
// blocks take part as it says, behind those that copy.
#define K_PARAMETERS                                                                                              \
  const u32 *k_words, i64 k_n_words, const i64 *__restrict__ k_bases, const void *__restrict__ k_lengths,         \
  int k_length_bytes, const int *__restrict__ k_ids, i64 k_n, const chunk_t *__restrict__ k_tables,               \
  const int *__restrict__ k_starts, i64 k_n_rows, int k_chunks, int k_row_words, int k_row_bytes,                 \
  int k_tile_rows, int k_stride_words, int k_stage_words, int k_longest_words, int k_token_bytes,                 \
  int k_row_tokens, int k_head_rows, int k_first, int k_blocks
#define V_PARAMETERS                                                                                              \
  const u32 *v_words, i64 v_n_words, const i64 *__restrict__ v_bases, const void *__restrict__ v_lengths,         \
  int v_length_bytes, const int *__restrict__ v_ids, i64 v_n, const chunk_t *__restrict__ v_tables,               \
  const int *__restrict__ v_starts, i64 v_n_rows, int v_chunks, int v_row_words, int v_row_bytes,                 \
  int v_tile_rows, int v_stride_words, int v_stage_words, int v_longest_words, int v_token_bytes,                 \
  int v_row_tokens, int v_head_rows, int v_first, int v_blocks
// What changes from call to call.
#define K_TOKENS_PARAMETERS                                                                                       \
  u8 *k_out, i64 k_length, const u8 *k_tail, i64 k_tail_batch, i64 k_tail_head, i64 k_tail_token,                 \
  int k_tail_tokens, u8 *k_memory, i64 k_memory_tokens, const u8 *k_new, i64 k_new_batch, i64 k_new_head,         \
  i64 k_new_token, int k_new_tokens
#define V_TOKENS_PARAMETERS                                                                                       \
  u8 *v_out, i64 v_length, const u8 *v_tail, i64 v_tail_batch, i64 v_tail_head, i64 v_tail_token,                 \
  int v_tail_tokens, u8 *v_memory, i64 v_memory_tokens, const u8 *v_new, i64 v_new_batch, i64 v_new_head,         \
  i64 v_new_token, int v_new_tokens
#define UNPACKED(s)                                                                                               \
  {s##_out,    s##_length,        s##_tail, s##_tail_batch, s##_tail_head, s##_tail_token, s##_tail_tokens,       \
   s##_memory, s##_memory_tokens, s##_new,  s##_new_batch,  s##_new_head,  s##_new_token,  s##_new_tokens,        \
   s##_token_bytes}
#define SIDE(name) (values ? v_##name : k_##name)

extern "C" __global__ void __launch_bounds__(32 * WARPS, MIN_BLOCKS)
    join_rows(K_PARAMETERS, V_PARAMETERS, int heads, i64 pairs, i64* mailbox, int copy_blocks, K_TOKENS_PARAMETERS,
              V_TOKENS_PARAMETERS) {
  extern __shared__ __align__(128) u32 shared[];
  int block = blockIdx.x;
  if (block < copy_blocks) {
    const i64 begin = (i64)block * (32 * WARPS) + threadIdx.x, step = (i64)copy_blocks * (32 * WARPS);
    const Unpacked of_k = UNPACKED(k), of_v = UNPACKED(v);
    copy_unpacked(of_k, heads, pairs, begin, step);
    copy_unpacked(of_v, heads, pairs, begin, step);
    return;
  }
  block -= copy_blocks;
  const bool values = block >= k_blocks;
  if (values) block -= k_blocks;
  const Args a = {nullptr,
                  SIDE(tables),
                  SIDE(starts),
                  SIDE(n_rows),
                  SIDE(chunks),
                  SIDE(row_words),
                  SIDE(row_bytes),
                  1,
                  SIDE(tile_rows),
                  SIDE(stride_words),
                  SIDE(stage_words),
                  SIDE(longest_words),
                  SIDE(out),
                  mailbox,
                  SIDE(token_bytes)};
  Table t = {SIDE(words), SIDE(n_words), SIDE(bases), SIDE(lengths), SIDE(length_bytes)};
  t.ids = SIDE(ids);
  t.id_bytes = 4;
  t.n = SIDE(n);
  t.n_items = a.n_rows;
  t.items_per_row = 1;
  t.head_rows = SIDE(head_rows);
  t.row_tokens = SIDE(row_tokens);
  t.head_stride = (u32)SIDE(length);
  t.first = SIDE(first);
  gather_all<true, 8>(a, t, nullptr, shared, block, SIDE(blocks));
}
