// Attention of a few queries over coded tiles (see tile_format.py), which are decoded in registers on
// the way from shared memory to the matrix instruction. K's tiles have steps of channels, V's steps of
// tokens by levels; or both are LOSSLESS: then operands are the values themselves, all steps 1, centers 0.
//
// A block serves one K/V head of one sequence and a share of its tokens. A warp takes tiles of
// 16 * GROUPS tokens, K then V, or 16 tokens that are not coded, and keeps for each query row r (query
// heads of the K/V head times query tokens) the greatest exponent so far, the sum of weights and the
// output, all relative to that exponent. The warps of a block are merged in shared memory, the blocks
// of a head by the one that comes last. Lane 4 g + t has scores of tokens g and g + 8 of 16, and outputs of
// channels g and g + 8 of a block, both of the rows t, t + 4, ... of NT groups of four.
//
// A tile takes a warp some 30 us by itself, K then V, as each symbol waits for the one before. Where a
// multiprocessor has few tiles, `stages` warps take them and as many decode V meanwhile, into shared memory.
//
// S = K Q^T: codes are the left operand. The query takes K's steps, and each of its rows stands in two
// neighbouring columns as the sum of two halves, the second one scaled by 2^11, or, where values have 16
// bits and there are more than four rows, in one column: its rounding, 2^-12, is far below that of quantised
// K and V. O^T = V^T P^T: weights take V's steps as a part of their exponent and stand in columns likewise.
// Operands of lossless tiles are of their dtype. Queries are so as they came; of more than four rows weights
// are rounded to it, by 2^-9 of bfloat16 at the most, 2^-12 of float16: that is the largest error there, and
// about that of the delivered dtype.
//
// What limits it, of K and V of 64 tokens and 128 channels at 2.5 bits a value on an H200 (32 KB in bfloat16):
// 5.1 KB of words take a multiprocessor's share of the memory 0.14 us, 31 TB/s of bfloat16 in all; 8,192
// pairs of values, 256 a lane at 11 instructions (short codes) to 16 (long ones), and some 400 for softmax,
// take its four issue slots 0.46 to 0.64 us, 9.4 to 6.8 TB/s; look-ups that meet in a bank three times, and
// units, take its shared memory 0.66 us, 6.6 TB/s; two POPC for each ask of long codes 0.58 us, 7.4 TB/s.
//
// GROUPS, NT, SETS, LOSSLESS and VALUE_KIND (0 bfloat16, 1 float16, 2 float32) come from the host.
#include "bits.cuh"
#include "async_copy.cuh"
#include "mailbox.cuh"
#include "matrix.cuh"
#include "units.cuh"
#include "tile_stream.cuh"
#include "attend_rows.cuh"

#define MAX_DIM 256
#define NO_ITEM 0x7fffffff
#define OWN_RUN -1  // as in spans.py, whose tests compare

__device__ __forceinline__ float largest_of_warp(float x) {
#pragma unroll
  for (int by = 1; by < 32; by *= 2) x = fmaxf(x, __shfl_xor_sync(FULL, x, by));
  return x;
}
__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
  for (int by = 1; by < 32; by *= 2) x += __shfl_xor_sync(FULL, x, by);
  return x;
}
// Begin to copy `bytes`, a multiple of 16, to shared memory by all threads of the block.
__device__ __forceinline__ void begin_copy(char* to, const void* from, int bytes) {
  for (int i = 16 * threadIdx.x; i < bytes; i += 16 * blockDim.x) copy_async_16(to + i, (const char*)from + i);
}

__device__ __forceinline__ char* take_shared(char*& at, int bytes) {
  char* mine = at;
  at += (bytes + 15) & ~15;
  return mine;
}

// Queries [batches, heads * group, n, dim] by strides in values: row r of head h is token r % n of query
// head h * group + r / n. Blocks: `splits`, then heads * batches. ids[batches][heads][tiles] of K and V;
// codes and blocks: attend_tables.py, `entries` of them; those of V at byte v_table of shared memory. Keys and values that are not coded come in up to
// two runs, [batches, heads, tokens, dim] by strides that both share. own_first[batches], null for none:
// there begin the tokens of each sequence that the run at position OWN_RUN has, up to own_tokens and before
// own_end; of all others these positions do not count. parts[slot][batches * heads][rows][dim]
// and stats: output, greatest exponent and sum of weights of each split, from slot `first_slot` of `slots`
// on. arrived[batches * heads], zeros before and behind: the blocks that have written theirs, of all
// launches; the last one merges them. sinks[heads * group], null for none: exponents that take weight and
// have no value. out[batches, n, heads * group, dim] by strides in values. `stages`: 0, or how many warps
// take tiles, each once at the most, while as many others decode V for them. `short_by`, null for 0: how many of the
// b_tokens are not there yet, the query's position being as much less; read here, so that replays of a captured launch
// see more and more of them.
extern "C" __global__ void __launch_bounds__(MAX_THREADS, 1)
    attend_tiles(const void* __restrict__ query, i64 query_batch, i64 query_head, i64 query_token, int heads, int group,
                 int n, int dim, int query_position, const int* __restrict__ first_valid,
                 const int* __restrict__ own_first, int own_tokens, int own_end, int scaling_bits, int softcap_bits,
                 int tiles, int first_token, int tokens, const u32* __restrict__ k_words,
                 i64 k_n_words, const i64* __restrict__ k_bases, const void* __restrict__ k_lengths, int k_length_bytes,
                 i64 k_n_rows, const int* __restrict__ k_ids, int k_heads, const int* __restrict__ k_order,
                 const float* __restrict__ k_steps, const float* __restrict__ k_centers,
                 const u32* __restrict__ k_codes, const int4* __restrict__ k_blocks, int k_entries,
                 const u32* __restrict__ v_words, i64 v_n_words, const i64* __restrict__ v_bases,
                 const void* __restrict__ v_lengths, int v_length_bytes, i64 v_n_rows, const int* __restrict__ v_ids,
                 int v_heads, const int* __restrict__ v_order, const u32* __restrict__ v_codes,
                 const int4* __restrict__ v_blocks, int v_entries, int v_table, const void* __restrict__ a_keys,
                 const void* __restrict__ a_values, i64 a_batch, i64 a_head, i64 a_token, int a_first, int a_tokens,
                 const void* __restrict__ b_keys, const void* __restrict__ b_values, i64 b_batch, i64 b_head,
                 i64 b_token, int b_first, int b_tokens, const int* __restrict__ short_by, int splits, int first_slot,
                 int slots, float* parts, float2* stats, int* arrived, const float* __restrict__ sinks,
                 void* __restrict__ out, i64 out_batch, i64 out_token, i64* mailbox, int stages) {
  extern __shared__ __align__(16) char shared[];
  const int missing = short_by ? min(max(*short_by, 0), b_tokens) : 0;
  b_tokens -= missing;
  query_position -= missing;
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  const int split = blockIdx.x % splits, pair = blockIdx.x / splits, pairs = gridDim.x / splits;
  const int batch = pair / heads, head = pair - batch * heads;
  const int rows = group * n, blocks = dim >> 4;
  const int level_words = LOSSLESS ? 0 : TOKENS / 4, plane_words = LOSSLESS ? TOKENS * dim / 4 : 0;

  char* at = shared + v_table + 4 * v_entries;
  int4* k_about = (int4*)take_shared(at, 16 * blocks);
  int4* v_about = (int4*)take_shared(at, 16 * blocks);
  float* q = (float*)take_shared(at, 4 * ROWS * dim);      // by channel
  float* centers = (float*)take_shared(at, 4 * dim);       // of K, by channel
  int* channels = (int*)take_shared(at, 4 * dim);          // of V, by position
  int* positions = (int*)take_shared(at, 4 * dim);         // of V, by channel
  float2* of_rows = (float2*)take_shared(at, 8 * ROWS);    // what scores are multiplied by, and what is added
  float2* of_warps = (float2*)take_shared(at, 8 * ROWS * warps);
  u16* operands = (u16*)take_shared(at, 256 * blocks * SETS);
  char* ring = take_shared(at, RING_ROOM * warps) + RING_ROOM * warp;
  float2* sums_of_warps = (float2*)take_shared(at, 256 * blocks * NT * warps);
  float2* my_out = sums_of_warps + 32 * blocks * NT * warp;
  char* staged = take_shared(at, TOKENS * dim * stages);  // codes of V, by warp
  volatile int* ready = (int*)take_shared(at, 4 * stages);  // of each: 1, or 2 where its tile is damaged

  const int k_head = tiles ? head % k_heads : 0, v_head = tiles ? head % v_heads : 0;
  if (tiles) {  // on their way while the query is worked out
    begin_copy(shared, k_codes, 4 * k_entries);
    begin_copy(shared + v_table, v_codes, 4 * v_entries);
    begin_copy((char*)k_about, k_blocks + k_head * blocks, 16 * blocks);
    begin_copy((char*)v_about, v_blocks + v_head * blocks, 16 * blocks);
  }
  copy_async_commit();
  // Rows of the query with K's steps, as large as halves can be. All that is loaded is asked for at once.
  for (int r = warp; r < ROWS; r += warps) {
    const i64 from = batch * query_batch + (i64)(head * group + r / n) * query_head + r % n * query_token;
    int channel[MAX_DIM / 32];
    float x[MAX_DIM / 32], step[MAX_DIM / 32], center[MAX_DIM / 32];
#pragma unroll
    for (int i = 0; i < MAX_DIM / 32; ++i) {
      const int p = 32 * i + lane, there = k_head * dim + p;
      const bool coded = tiles && p < dim;
      x[i] = r < rows && p < dim ? value_at(query, from + p) : 0;
      channel[i] = coded ? __ldg(k_order + there) : p;
      step[i] = LOSSLESS ? 1 : coded ? __ldg(k_steps + there) : 0;
      center[i] = !LOSSLESS && coded ? __ldg(k_centers + there) : 0;
    }
#pragma unroll
    for (int i = 0; i < MAX_DIM / 32; ++i)
      if (32 * i + lane < dim) q[r * dim + 32 * i + lane] = x[i];
    __syncwarp();
    float largest = 0, sum = 0;
#pragma unroll
    for (int i = 0; i < MAX_DIM / 32; ++i) {
      if (32 * i + lane >= dim) continue;
      x[i] = q[r * dim + channel[i]];
      largest = fmaxf(largest, fabsf(x[i] * step[i]));
      sum += x[i] * center[i];
      x[i] *= step[i];
      if (r == 0 && tiles) centers[channel[i]] = center[i];
    }
    largest = largest_of_warp(largest);
    sum = sum_of_warp(sum);
    int exponent = 140 - (__float_as_int(largest) >> 23);  // brings the largest to 2^13
    exponent = largest == 0 || BRAIN_OPERANDS ? 0 : max(-120, min(120, exponent));
    const float scale = __int_as_float((127 + exponent) << 23);
    if (lane == 0) of_rows[r] = make_float2(__int_as_float((127 - exponent) << 23), sum);
#if IN_TWO_HALVES
    const int column = 2 * (r & 3), set = r >> 2;
#else
    const int column = 2 * (r & 3) + (r >> 2 & 1), set = r >> 3;
#endif
#pragma unroll
    for (int i = 0; i < MAX_DIM / 32; ++i) {
      const int p = 32 * i + lane, k = p & 15;
      if (!tiles || p >= dim) continue;
      const float y = x[i] * scale;
      const u16 high = operand_of(y);
      u16* to = operands + ((((p >> 4) * SETS + set) * 32 + 4 * column + (k & 7) / 2) * 4) + k / 8 * 2 + (k & 1);
      to[0] = high;
#if IN_TWO_HALVES
      to[16] = operand_of((y - value_of_operand(high)) * SECOND_SCALE);  // four lanes further
#endif
    }
  }
  for (int p = threadIdx.x; p < dim; p += blockDim.x) {
    const int channel = tiles ? __ldg(v_order + v_head * dim + p) : p;
    channels[p] = channel;
    positions[channel] = p;
  }
  for (int i = lane; i < 32 * blocks * NT; i += 32) my_out[i] = make_float2(0, 0);
  if (threadIdx.x < stages) ready[threadIdx.x] = 0;
  copy_async_wait<0>();
  __syncthreads();

  Mask mask;
  Sums sums;
  mask.first = first_valid ? first_valid[batch] : 0;
  const int own_begin = own_first ? own_first[batch] : 0;
  const int own_stop = own_first ? min(own_begin + own_tokens, own_end) : 0;
  mask.scaling = __int_as_float(scaling_bits);
  mask.softcap = __int_as_float(softcap_bits);
#pragma unroll
  for (int i = 0; i < NT; ++i) {
    const int r = 4 * i + t;
    mask.last[i] = r < rows ? query_position + r % n : -1;
    sums.most[i] = NO_WEIGHT;
    sums.sum[i] = 0;
  }
  const Coder k_coder = {shared, 0, k_about}, v_coder = {shared, v_table, v_about};
  const Source sources[2] = {{k_words, k_n_words, k_bases, k_lengths, k_length_bytes, k_n_rows, k_ids, plane_words},
                             {v_words, v_n_words, v_bases, v_lengths, v_length_bytes, v_n_rows, v_ids,
                              level_words + plane_words}};
  const int a_parts = (a_tokens + 15) / 16, b_parts = (b_tokens + 15) / 16;
  const int takers = stages ? stages : warps;
  if (warp >= takers) {
    // Decode V of the tile that another warp takes meanwhile, which finds it and reports what is wrong.
    const int place = warp - takers, item = split + place * splits;
    const int position = first_token + TOKENS * item, here = min(TOKENS, tokens - TOKENS * item);
    if (item < tiles && here > 0 && position + here > mask.first && position < query_position + n) {
      Tile found[2];
      find_tiles(sources, (i64)pair * tiles + item, dim, found, mailbox);
      if (found[1].words && found[1].length) {
        StageTaker taker((uint2*)(staged + TOKENS * dim * place), v_about);
        const bool damaged = decode_tile(found[1], v_coder, blocks, level_words, ring, taker);
        __threadfence_block();
        __syncwarp();
        if (lane == 0) ready[place] = 1 + damaged;
      }
    }
  }
  for (int item = warp < takers ? split + warp * splits : NO_ITEM; item < tiles + a_parts + b_parts;
       item += splits * takers) {
    if (item >= tiles) {
      const int part = item - tiles;
      const bool second = part >= a_parts;
      const int from = 16 * (second ? part - a_parts : part), first = second ? b_first : a_first;
      const bool own = first == OWN_RUN;
      const int position = (own ? own_begin : first) + from;
      int here = min(16, (second ? b_tokens : a_tokens) - from);
      if (own) here = min(here, own_stop - position);
      const i64 stride = second ? b_token : a_token;
      const i64 begin = batch * (second ? b_batch : a_batch) + head * (second ? b_head : a_head) + from * stride;
      const char* k = (const char*)(second ? b_keys : a_keys) + begin * VALUE_SIZE;
      const char* v = (const char*)(second ? b_values : a_values) + begin * VALUE_SIZE;
      if (here <= 0 || position + here <= mask.first || position >= query_position + n) continue;
      float s[1][2][NT], decay[NT];
      const float step[1][2] = {{0, 0}};
      raw_products(g < here ? (const u32*)(k + g * stride * VALUE_SIZE) : 0,
                   g + 8 < here ? (const u32*)(k + (g + 8) * stride * VALUE_SIZE) : 0, dim, q, s[0]);
      to_exponents(s, position, here, mask);
      if (!own && position < own_stop && position + here > own_begin) hide(s, position, own_begin, own_stop);
      to_weights(s, step, sums, decay);
      add_raw_values(v, stride, here, blocks, channels, s[0], decay, (float*)ring, my_out);
      continue;
    }
    const int position = first_token + TOKENS * item, here = min(TOKENS, tokens - TOKENS * item);
    if (here <= 0 || position + here <= mask.first || position >= query_position + n) continue;
    const i64 number = (i64)pair * tiles + item;
    if (lane < 2 && item + splits * takers < tiles) prefetch_line((lane ? v_ids : k_ids) + number + splits * takers);
    Tile found[2];
    find_tiles(sources, number, dim, found, mailbox);
    const Tile &k_tile = found[0], &v_tile = found[1];
    if (!k_tile.words || !v_tile.words) continue;
    float s[GROUPS][2][NT];
    if (k_tile.length) {
      KeyTaker taker((const uint2*)operands);
      Joined<KeyTaker> joined(taker, k_tile, 0, blocks);
      if (decode_tile(k_tile, k_coder, blocks, 0, ring, joined)) {
        if (lane == 0) report(mailbox, ERROR_DAMAGED, k_ids[number], 0, 0);
        continue;
      }
#pragma unroll
      for (int i = 0; i < NT; ++i) {
        const float2 row = of_rows[4 * i + t];
#pragma unroll
        for (int j = 0; j < GROUPS; ++j)
#pragma unroll
          for (int h = 0; h < 2; ++h)
            s[j][h][i] = sum_of_row(taker.sum[j], i, h) * row.x + row.y;
      }
      const u32* exception = k_tile.words + 1 + (k_tile.units + 1) / 2 + plane_words;
      u32 least = 0;
      for (u32 e = 0; e < k_tile.exceptions; ++e, exception += EXCEPTION_WORDS) {
        const u32 word = __ldg(exception);
        const u32 place = EXCEPTION_WORDS == 2 ? word : word & 0xffff;
        const float x = value_of_bits(EXCEPTION_WORDS == 2 ? __ldg(exception + EXCEPTION_WORDS - 1) : word >> 16);
        const u32 token = place / dim, channel = place - token * dim;
        if (token >= TOKENS || place < least) {
          if (lane == 0) report(mailbox, ERROR_DAMAGED, k_ids[number], 0, 0);
          break;
        }
        least = place + 1;
        const float more = x - (LOSSLESS ? as_coded(word >> 16) : centers[channel]);
#pragma unroll
        for (int j = 0; j < GROUPS; ++j)
#pragma unroll
          for (int h = 0; h < 2; ++h)
            if (token == 16 * j + 8 * h + g) {
#pragma unroll
              for (int i = 0; i < NT; ++i) s[j][h][i] += q[(4 * i + t) * dim + channel] * more;
            }
      }
    } else {
#pragma unroll
      for (int j = 0; j < GROUPS; ++j) {
        const u32* first = k_tile.words + (16 * j + g) * dim * VALUE_SIZE / 4;
        raw_products(first, first + 2 * dim * VALUE_SIZE, dim, q, s[j]);
      }
    }
    to_exponents(s, position, here, mask);
    if (position < own_stop && position + here > own_begin) hide(s, position, own_begin, own_stop);
    float step[GROUPS][2], decay[NT];
#pragma unroll
    for (int j = 0; j < GROUPS; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const u8* level_of = (const u8*)(v_tile.words + 1) + 16 * j + 8 * h + g;
        const int level = !LOSSLESS && v_tile.length ? __ldg(level_of) : LEVEL_ZERO;
        step[j][h] = 0.125f * (level - LEVEL_ZERO);
      }
    to_weights(s, step, sums, decay);
    if (!v_tile.length) {
#pragma unroll 1
      for (int j = 0; j < GROUPS; ++j) {
        float weight[2][NT];
#pragma unroll
        for (int i = 0; i < NT; ++i) {
          weight[0][i] = weight[1][i] = 0;
#pragma unroll
          for (int k = 0; k < GROUPS; ++k)
            if (k == j) {
              weight[0][i] = s[k][0][i];
              weight[1][i] = s[k][1][i];
            }
          if (j) decay[i] = 1;
        }
        add_raw_values((const char*)v_tile.words + (i64)16 * j * dim * VALUE_SIZE, dim, min(16, max(0, here - 16 * j)), blocks,
                       channels, weight, decay, (float*)ring, my_out);
      }
      __syncwarp();
      continue;
    }
    u32 weights[GROUPS][SETS][2];
    __syncwarp();
#pragma unroll
    for (int j = 0; j < GROUPS; ++j)
#pragma unroll
      for (int i = 0; i < SETS; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#if IN_TWO_HALVES
          const u16 high = operand_of(s[j][h][i]);
          const u16 next = operand_of((s[j][h][i] - value_of_operand(high)) * SECOND_SCALE);
#else
          const u16 high = operand_of(s[j][h][2 * i]), next = operand_of(s[j][h][2 * i + 1]);
#endif
          weights[j][i][h] = transposed_halves(high | (u32)next << 16);
        }
    ValueTaker taker(my_out, decay, weights);
    Joined<ValueTaker> joined(taker, v_tile, level_words, blocks);
    bool damaged;
    if (stages) {
      while (!ready[warp]) __nanosleep(50);
      damaged = ready[warp] == 2;
      __threadfence_block();
      __syncwarp();
      take_staged((const uint2*)(staged + TOKENS * dim * warp), v_about, blocks, joined);
    } else {
      damaged = decode_tile(v_tile, v_coder, blocks, level_words, ring, joined);
    }
    if (damaged && lane == 0) report(mailbox, ERROR_DAMAGED, v_ids[number], 0, 0);
    const u32* exception = v_tile.words + 1 + level_words + (v_tile.units + 1) / 2 + plane_words;
    u32 least = 0;
    for (u32 e = 0; e < v_tile.exceptions; ++e, exception += EXCEPTION_WORDS) {
      const u32 word = __ldg(exception);
      const u32 place = EXCEPTION_WORDS == 2 ? word : word & 0xffff;
      float x = value_of_bits(EXCEPTION_WORDS == 2 ? __ldg(exception + EXCEPTION_WORDS - 1) : word >> 16);
      if (LOSSLESS) x -= as_coded(word >> 16);
      const u32 token = place / dim, channel = place - token * dim;
      if (token >= TOKENS || place < least) {
        if (lane == 0) report(mailbox, ERROR_DAMAGED, v_ids[number], 0, 0);
        break;
      }
      least = place + 1;
      const int p = positions[channel];
      // The weights of the token, as the products had them, without its step.
      const int level = LOSSLESS ? LEVEL_ZERO : __ldg((const u8*)(v_tile.words + 1) + token);
      const float without = exp2f(0.125f * (LEVEL_ZERO - level) - WEIGHT_SHIFT);
#pragma unroll
      for (int m = 0; m < SETS; ++m) {
        u32 pair_of = 0;
#pragma unroll
        for (int j = 0; j < GROUPS; ++j)
#pragma unroll
          for (int h = 0; h < 2; ++h)
            if (token >> 3 == 2 * j + h) pair_of = weights[j][m][h];
        const u32 high = __shfl_sync(FULL, pair_of, 8 * t + (token >> 1 & 3));
        const u32 next = __shfl_sync(FULL, pair_of, 8 * t + 4 + (token >> 1 & 3));
        const float first = value_of_operand((u16)(token & 1 ? high >> 16 : high));
        const float second = value_of_operand((u16)(token & 1 ? next >> 16 : next));
#if IN_TWO_HALVES
        const float weight[1] = {(first + second * (1.0f / SECOND_SCALE)) * without};
#else
        const float weight[2] = {first * without, second * without};
#endif
#pragma unroll
        for (int i = 0; i < NT / SETS; ++i)
          if (g == (p & 7) && weight[i] != 0) {
            float2& o = my_out[((p >> 4) * NT + NT / SETS * m + i) * 32 + lane];
            if (p & 8) o.y += weight[i] * x;
            else o.x += weight[i] * x;
          }
      }
    }
    __syncwarp();
  }

  // The warps of the block: its part of the output.
#pragma unroll
  for (int i = 0; i < NT; ++i) {
#pragma unroll
    for (int by = 4; by < 32; by *= 2) sums.sum[i] += __shfl_xor_sync(FULL, sums.sum[i], by);
    if (g == 0) of_warps[warp * ROWS + 4 * i + t] = make_float2(sums.most[i], sums.sum[i]);
  }
  __syncthreads();
  for (int r = warp; r < rows; r += warps) {
    const float2 mine = lane < warps ? of_warps[lane * ROWS + r] : make_float2(NO_WEIGHT, 0);
    const float most = largest_of_warp(mine.x), decay = exp2f(mine.x - (most == NO_WEIGHT ? 0 : most));
    const float sum = sum_of_warp(mine.y * decay);
    if (lane < warps) of_warps[lane * ROWS + r].x = decay;
    if (lane == 0) of_rows[r] = make_float2(most, sum);
  }
  __syncthreads();
  const i64 to = ((i64)(first_slot + split) * pairs + pair) * rows;
  for (int i = threadIdx.x; i < 32 * blocks * NT; i += blockDim.x) {
    const int r = 4 * (i / 32 % NT) + (i & 3), p = i / (32 * NT) * 16 + (i >> 2 & 7);
    if (r >= rows) continue;
    float2 total = make_float2(0, 0);
#pragma unroll 4
    for (int w = 0; w < warps; ++w) {
      const float decay = of_warps[w * ROWS + r].x;
      const float2 o = sums_of_warps[32 * blocks * NT * w + i];
      if (decay != 0) {
        total.x += decay * o.x;
        total.y += decay * o.y;
      }
    }
    parts[(to + r) * dim + channels[p]] = total.x;
    parts[(to + r) * dim + channels[p + 8]] = total.y;
  }
  if (threadIdx.x < rows) stats[to + threadIdx.x] = of_rows[threadIdx.x];

  // The block that comes last merges the parts of all.
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) positions[0] = atomicAdd(arrived + pair, 1) == slots - 1;
  __syncthreads();
  if (!positions[0]) return;
  __threadfence();
  if (threadIdx.x == 0) arrived[pair] = 0;
  const i64 stride = (i64)pairs * rows, first = (i64)pair * rows;
  for (int r = warp; r < rows; r += warps) {
    const float sink = sinks ? sinks[head * group + r / n] * LOG2E : NO_WEIGHT;
    float most = sink;
    for (int k = lane; k < slots; k += 32) most = fmaxf(most, __ldcg(stats + first + r + k * stride).x);
    most = largest_of_warp(most);
    const float from = most == NO_WEIGHT ? 0 : most;
    float sum = lane ? 0 : exp2f(sink - from);
    for (int k = lane; k < slots; k += 32) {
      const float2 there = __ldcg(stats + first + r + k * stride);
      sum += there.y * exp2f(there.x - from);
    }
    sum = sum_of_warp(sum);
    if (lane == 0) of_rows[r] = make_float2(from, sum == 0 ? 0 : 1 / sum);  // a row that sees nothing is zeros
  }
  __syncthreads();
  const int shares = max(1, min(warps / rows, slots));  // warps of a row
  float* merged = (float*)sums_of_warps;
  for (int u = warp; u < rows * shares; u += warps) {
    const int r = u / shares;
    const float from = of_rows[r].x;
    float total[MAX_DIM / 32];
#pragma unroll
    for (int i = 0; i < MAX_DIM / 32; ++i) total[i] = 0;
#pragma unroll 2
    for (int k = u - r * shares; k < slots; k += shares) {
      const i64 row = first + r + k * stride;
      const float decay = exp2f(__ldcg(stats + row).x - from);
#pragma unroll
      for (int i = 0; i < MAX_DIM / 32; ++i) {
        const float part = 32 * i + lane < dim ? __ldcg(parts + row * dim + 32 * i + lane) : 0;
        if (decay != 0) total[i] += decay * part;
      }
    }
#pragma unroll
    for (int i = 0; i < MAX_DIM / 32; ++i)
      if (32 * i + lane < dim) merged[u * dim + 32 * i + lane] = total[i];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < rows * dim; i += blockDim.x) {
    const int r = i / dim, c = i - r * dim;
    float total = 0;
    for (int k = 0; k < shares; ++k) total += merged[(r * shares + k) * dim + c];
    total *= of_rows[r].y;
    const i64 there = batch * out_batch + (r % n) * out_token + (i64)(head * group + r / n) * dim + c;
#if VALUE_KIND == 2
    ((float*)out)[there] = total;
#else
    ((u16*)out)[there] = bits_of_value(total);
#endif
  }
}
