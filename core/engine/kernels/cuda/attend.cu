// Attention of a few queries over coded tiles (see tile_format.py), which are decoded in registers on
// the way from shared memory to the matrix instruction. K's tiles have steps of channels, V's steps of
// tokens by levels.
//
// A block serves one K/V head of one sequence and a share of its tokens. A warp takes tiles of
// 16 * GROUPS tokens, K then V, or 16 tokens that are not coded, and keeps for each query row r (query
// heads of the K/V head times query tokens) the greatest exponent so far, the sum of weights and the
// output, all relative to that exponent. The warps of a block are merged in shared memory, the blocks
// of a head by merge_splits. Lane 4 g + t has scores of tokens g and g + 8 of 16, and outputs of
// channels g and g + 8 of a block, both of the rows t, t + 4, ... of NT groups of four.
//
// S = K Q^T: codes are the left operand. The query takes K's steps, and each of its rows stands in two
// neighbouring columns as the sum of two halves, the second one scaled by 2^11, or, where values have 16
// bits and there are more than four rows, in one column: its rounding, 2^-12, is far below that of K and V.
// O^T = V^T P^T: weights take V's steps as a part of their exponent and stand in columns likewise.
//
// What limits it, of K and V of 64 tokens and 128 channels at 2.5 bits a value on an H200 (32 KB in bfloat16):
// 5.1 KB of words take a multiprocessor's share of the memory 0.14 us, 31 TB/s of bfloat16 in all; 8,192
// pairs of values, 256 a lane at 11 instructions (short codes) to 17 (long ones), and some 400 for softmax,
// take its four issue slots 0.46 to 0.68 us, 9.4 to 6.4 TB/s; look-ups that meet in a bank three times, and
// units, take its shared memory 0.66 us, 6.6 TB/s; two POPC for each ask of long codes 0.58 us, 7.4 TB/s.
//
// GROUPS, NT, SETS and VALUE_KIND (0 bfloat16, 1 float16, 2 float32) come from the host.
#include "bits.cuh"
#include "async_copy.cuh"
#include "mailbox.cuh"
#include "matrix.cuh"
#include "units.cuh"
#include "tile_stream.cuh"
#include "attend_rows.cuh"

#define MERGE_THREADS 128
#define MAX_CLASSES 8  // as in tile_format.py
#define WHOLE_CODE 8   // codes up to that are whole in the upper byte of a half
#define MAX_DIM 256

// Fill the lookup tables, and what each block of positions takes of them. They begin `first` bytes behind
// `tables`, which is a multiple of the largest: larger ones come first, so that each begins at a multiple of
// its size. What is known of classes is loaded at once, since a block has no other work meanwhile.
__device__ void load_coder(const int* __restrict__ block_class, const int* __restrict__ radius,
                           const int* __restrict__ class_bits, const u32* __restrict__ lookup, int classes,
                           int code_bits, int blocks, char* tables, int first, int4* of_blocks) {
  int bits[MAX_CLASSES], reach[MAX_CLASSES], begin[MAX_CLASSES], entries = 0;
#pragma unroll
  for (int c = 0; c < MAX_CLASSES; ++c) {
    bits[c] = c < classes ? __ldg(class_bits + c) : 0;
    reach[c] = c < classes ? __ldg(radius + c) : 0;
  }
#pragma unroll
  for (int c = 0; c < MAX_CLASSES; ++c) {
    begin[c] = 0;
#pragma unroll
    for (int d = 0; d < MAX_CLASSES; ++d)
      if (d < classes && (bits[d] > bits[c] || (bits[d] == bits[c] && d < c))) begin[c] += 1 << bits[d];
    if (c < classes) entries += 1 << bits[c];
  }
  for (int b = threadIdx.x; b < blocks; b += blockDim.x) {
    const int mine = block_class[b];
    int4 found = make_int4(0, 0, 0, 0);
#pragma unroll
    for (int c = 0; c < MAX_CLASSES; ++c)
      if (c == mine) found = about_class(first + 4 * begin[c], bits[c], reach[c], WHOLE_CODE);
    of_blocks[b] = found;
  }
  u32* to = (u32*)(tables + first);
#pragma unroll 8
  for (int i = threadIdx.x; i < entries; i += blockDim.x) {
    int from = 0, farthest = 0;
#pragma unroll
    for (int c = 0; c < MAX_CLASSES; ++c)
      if (c < classes && i >= begin[c] && i - begin[c] < 1 << bits[c]) {
        from = (c << code_bits) + ((i - begin[c]) << (code_bits - bits[c]));
        farthest = reach[c];
      }
    const u32 entry = __ldg(lookup + from), length = entry >> 24;
    u32 codes = entry << 16;
    if (farthest <= WHOLE_CODE) {
      const u32 one = float_to_half((float)(int)(entry & 255) - 128);
      const u32 other = float_to_half((float)(int)(entry >> 8 & 255) - 128);
      codes = farthest ? (one << 8 & 0xff0000) | (other << 16 & 0xff000000) : one << 16;
    }
    to[i] = length ? codes | (0u - length & 0xffff) : 64;  // no code: counts as damage
  }
}

__device__ __forceinline__ char* take_shared(char*& at, int bytes) {
  char* mine = at;
  at += (bytes + 15) & ~15;
  return mine;
}

// Queries [batches, heads * group, n, dim] by strides in values: row r of head h is token r % n of query
// head h * group + r / n. Blocks: `splits`, then heads * batches. ids[batches][heads][tiles] of K and V;
// keys and values that are not coded come in up to two runs, [batches, heads, tokens, dim] by strides
// that both share. out_parts[slot][batches * heads][rows][dim] and out_stats: output, greatest exponent
// and sum of weights of each split, from slot `first_slot` on. k_entries: entries of K's lookup tables, a
// multiple of V's largest one.
extern "C" __global__ void __launch_bounds__(MAX_THREADS, 1)
    attend_tiles(const void* __restrict__ query, i64 query_batch, i64 query_head, i64 query_token, int heads, int group,
                 int n, int dim, int query_position, const int* __restrict__ first_valid, int scaling_bits,
                 int softcap_bits, int tiles, int first_token, int tokens, const u32* __restrict__ k_words,
                 i64 k_n_words, const i64* __restrict__ k_bases, const void* __restrict__ k_lengths, int k_length_bytes,
                 i64 k_n_rows, const int* __restrict__ k_ids, int k_heads, const int* __restrict__ k_order,
                 const float* __restrict__ k_steps, const float* __restrict__ k_centers,
                 const int* __restrict__ k_block_class, const int* __restrict__ k_radius,
                 const int* __restrict__ k_class_bits, const u32* __restrict__ k_lookup, int k_classes, int k_code_bits,
                 int k_entries, const u32* __restrict__ v_words, i64 v_n_words, const i64* __restrict__ v_bases,
                 const void* __restrict__ v_lengths, int v_length_bytes, i64 v_n_rows, const int* __restrict__ v_ids,
                 int v_heads, const int* __restrict__ v_order, const int* __restrict__ v_block_class,
                 const int* __restrict__ v_radius, const int* __restrict__ v_class_bits,
                 const u32* __restrict__ v_lookup, int v_classes, int v_code_bits, int v_entries,
                 const void* __restrict__ a_keys, const void* __restrict__ a_values, i64 a_batch, i64 a_head,
                 i64 a_token, int a_first, int a_tokens, const void* __restrict__ b_keys,
                 const void* __restrict__ b_values, i64 b_batch, i64 b_head, i64 b_token, int b_first, int b_tokens,
                 int splits, int first_slot, float* __restrict__ out_parts, float2* __restrict__ out_stats,
                 i64* mailbox) {
  extern __shared__ __align__(16) char shared[];
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  const int split = blockIdx.x % splits, pair = blockIdx.x / splits, pairs = gridDim.x / splits;
  const int batch = pair / heads, head = pair - batch * heads;
  const int rows = group * n, blocks = dim >> 4;

  char* at = shared + ((4 * (k_entries + v_entries) + 15) & ~15);  // behind the lookup tables
  int4* k_blocks = (int4*)take_shared(at, 16 * blocks);
  int4* v_blocks = (int4*)take_shared(at, 16 * blocks);
  float* q = (float*)take_shared(at, 4 * ROWS * dim);      // by channel
  float* centers = (float*)take_shared(at, 4 * dim);       // of K, by channel
  int* channels = (int*)take_shared(at, 4 * dim);          // of V, by position
  int* positions = (int*)take_shared(at, 4 * dim);         // of V, by channel
  float2* of_rows = (float2*)take_shared(at, 8 * ROWS);    // what scores are multiplied by, and what is added
  float2* stats = (float2*)take_shared(at, 8 * ROWS * warps);
  u16* operands = (u16*)take_shared(at, 256 * blocks * SETS);
  char* ring = take_shared(at, RING_ROOM * warps) + RING_ROOM * warp;
  float2* out = (float2*)take_shared(at, 256 * blocks * NT * warps);
  float2* my_out = out + 32 * blocks * NT * warp;

  const int k_head = tiles ? head % k_heads : 0, v_head = tiles ? head % v_heads : 0;
  if (tiles) {
    load_coder(k_block_class + k_head * blocks, k_radius, k_class_bits, k_lookup, k_classes, k_code_bits, blocks, shared,
               0, k_blocks);
    load_coder(v_block_class + v_head * blocks, v_radius, v_class_bits, v_lookup, v_classes, v_code_bits, blocks, shared,
               4 * k_entries, v_blocks);
  }
  for (int p = threadIdx.x; p < dim; p += blockDim.x) {
    const int channel = tiles ? v_order[v_head * dim + p] : p;
    channels[p] = channel;
    positions[channel] = p;
    if (tiles) centers[k_order[k_head * dim + p]] = k_centers[k_head * dim + p];
  }
  // Rows of the query with K's steps, as large as halves can be.
  for (int r = warp; r < ROWS; r += warps) {
    const int token = r % n;
    const i64 from = batch * query_batch + (i64)(head * group + r / n) * query_head + token * query_token;
    float largest = 0, sum = 0;
    for (int p = lane; p < dim; p += 32) {
      const int channel = tiles ? k_order[k_head * dim + p] : p;
      const float x = r < rows ? value_at(query, from + channel) : 0;
      q[r * dim + channel] = x;
      if (tiles) {
        largest = fmaxf(largest, fabsf(x * k_steps[k_head * dim + p]));
        sum += x * k_centers[k_head * dim + p];
      }
    }
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(FULL, largest, by));
      sum += __shfl_xor_sync(FULL, sum, by);
    }
    int exponent = 140 - (__float_as_int(largest) >> 23);  // brings the largest to 2^13
    exponent = largest == 0 ? 0 : max(-120, min(120, exponent));
    const float scale = __int_as_float((127 + exponent) << 23);
    if (lane == 0) of_rows[r] = make_float2(__int_as_float((127 - exponent) << 23), sum);
    __syncwarp();
    if (tiles)
      for (int p = lane; p < dim; p += 32) {
        const float x = q[r * dim + k_order[k_head * dim + p]] * k_steps[k_head * dim + p] * scale;
        const u16 high = float_to_half(x);
        const int k = p & 15;
#if IN_TWO_HALVES
        const int column = 2 * (r & 3), set = r >> 2;
#else
        const int column = 2 * (r & 3) + (r >> 2 & 1), set = r >> 3;
#endif
        u16* to = operands + ((((p >> 4) * SETS + set) * 32 + 4 * column + (k & 7) / 2) * 4) + k / 8 * 2 + (k & 1);
        to[0] = high;
#if IN_TWO_HALVES
        to[16] = float_to_half((x - half_to_float(high)) * 2048);  // four lanes further
#endif
      }
  }
  for (int i = lane; i < 32 * blocks * NT; i += 32) my_out[i] = make_float2(0, 0);
  __syncthreads();

  Mask mask;
  Sums sums;
  mask.first = first_valid ? first_valid[batch] : 0;
  mask.scaling = __int_as_float(scaling_bits);
  mask.softcap = __int_as_float(softcap_bits);
#pragma unroll
  for (int i = 0; i < NT; ++i) {
    const int r = 4 * i + t;
    mask.last[i] = r < rows ? query_position + r % n : -1;
    sums.most[i] = NO_WEIGHT;
    sums.sum[i] = 0;
  }
  const Source keys = {k_words, k_n_words, k_bases, k_lengths, k_length_bytes, k_n_rows};
  const Source values = {v_words, v_n_words, v_bases, v_lengths, v_length_bytes, v_n_rows};
  const Coder k_coder = {shared, k_blocks}, v_coder = {shared, v_blocks};
  const int a_parts = (a_tokens + 15) / 16, b_parts = (b_tokens + 15) / 16;
  for (int item = split + warp * splits; item < tiles + a_parts + b_parts; item += splits * warps) {
    if (item >= tiles) {
      const int part = item - tiles;
      const bool second = part >= a_parts;
      const int from = 16 * (second ? part - a_parts : part);
      const int here = min(16, (second ? b_tokens : a_tokens) - from);
      const i64 stride = second ? b_token : a_token;
      const i64 begin = batch * (second ? b_batch : a_batch) + head * (second ? b_head : a_head) + from * stride;
      const char* k = (const char*)(second ? b_keys : a_keys) + begin * VALUE_SIZE;
      const char* v = (const char*)(second ? b_values : a_values) + begin * VALUE_SIZE;
      const int position = (second ? b_first : a_first) + from;
      if (position + here <= mask.first || position >= query_position + n) continue;
      float s[1][2][NT], decay[NT];
      const float step[1][2] = {{0, 0}};
      raw_products(g < here ? (const u32*)(k + g * stride * VALUE_SIZE) : 0,
                   g + 8 < here ? (const u32*)(k + (g + 8) * stride * VALUE_SIZE) : 0, dim, q, s[0]);
      to_exponents(s, position, here, mask);
      to_weights(s, step, sums, decay);
      add_raw_values(v, stride, here, blocks, channels, s[0], decay, (float*)ring, my_out);
      continue;
    }
    const int position = first_token + TOKENS * item, here = min(TOKENS, tokens - TOKENS * item);
    if (here <= 0 || position + here <= mask.first || position >= query_position + n) continue;
    const Tile k_tile = find_tile(keys, k_ids[(i64)pair * tiles + item], dim, 0, mailbox);
    const Tile v_tile = find_tile(values, v_ids[(i64)pair * tiles + item], dim, TOKENS / 4, mailbox);
    if (!k_tile.words || !v_tile.words) continue;
    float s[GROUPS][2][NT];
    if (k_tile.length) {
      KeyTaker taker((const uint2*)operands);
      if (decode_tile(k_tile, k_coder, blocks, 0, ring, taker)) {
        if (lane == 0) report(mailbox, ERROR_DAMAGED, k_ids[(i64)pair * tiles + item], 0, 0);
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
      const u32* exception = k_tile.words + 1 + (k_tile.units + 1) / 2;
      u32 least = 0;
      for (u32 e = 0; e < k_tile.exceptions; ++e, exception += EXCEPTION_WORDS) {
        const u32 word = __ldg(exception);
        const u32 place = EXCEPTION_WORDS == 2 ? word : word & 0xffff;
        const float x = value_of_bits(EXCEPTION_WORDS == 2 ? __ldg(exception + EXCEPTION_WORDS - 1) : word >> 16);
        const u32 token = place / dim, channel = place - token * dim;
        if (token >= TOKENS || place < least) {
          if (lane == 0) report(mailbox, ERROR_DAMAGED, k_ids[(i64)pair * tiles + item], 0, 0);
          break;
        }
        least = place + 1;
        const float more = x - centers[channel];
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
    float step[GROUPS][2], decay[NT];
#pragma unroll
    for (int j = 0; j < GROUPS; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int level = v_tile.length ? __ldg((const u8*)(v_tile.words + 1) + 16 * j + 8 * h + g) : LEVEL_ZERO;
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
          const u16 high = float_to_half(s[j][h][i]);
          const u16 next = float_to_half((s[j][h][i] - half_to_float(high)) * 2048);
#else
          const u16 high = float_to_half(s[j][h][2 * i]), next = float_to_half(s[j][h][2 * i + 1]);
#endif
          weights[j][i][h] = transposed_halves(high | (u32)next << 16);
        }
    ValueTaker taker(my_out, decay, weights);
    if (decode_tile(v_tile, v_coder, blocks, TOKENS / 4, ring, taker) && lane == 0)
      report(mailbox, ERROR_DAMAGED, v_ids[(i64)pair * tiles + item], 0, 0);
    const u32* exception = v_tile.words + 1 + TOKENS / 4 + (v_tile.units + 1) / 2;
    u32 least = 0;
    for (u32 e = 0; e < v_tile.exceptions; ++e, exception += EXCEPTION_WORDS) {
      const u32 word = __ldg(exception);
      const u32 place = EXCEPTION_WORDS == 2 ? word : word & 0xffff;
      const float x = value_of_bits(EXCEPTION_WORDS == 2 ? __ldg(exception + EXCEPTION_WORDS - 1) : word >> 16);
      const u32 token = place / dim, channel = place - token * dim;
      if (token >= TOKENS || place < least) {
        if (lane == 0) report(mailbox, ERROR_DAMAGED, v_ids[(i64)pair * tiles + item], 0, 0);
        break;
      }
      least = place + 1;
      const int p = positions[channel];
#pragma unroll
      for (int i = 0; i < NT; ++i) {
        float weight = 0;
#pragma unroll
        for (int j = 0; j < GROUPS; ++j)
#pragma unroll
          for (int h = 0; h < 2; ++h)
            if (token >> 3 == 2 * j + h) weight = s[j][h][i] * exp2f(-step[j][h] - WEIGHT_SHIFT);
        weight = __shfl_sync(FULL, weight, 4 * (token & 7) + t);
        if (g == (p & 7) && weight != 0) {
          float2& o = my_out[((p >> 4) * NT + i) * 32 + lane];
          if (p & 8) o.y += weight * x;
          else o.x += weight * x;
        }
      }
    }
    __syncwarp();
  }

  // The warps of the block, then its part of the output.
#pragma unroll
  for (int i = 0; i < NT; ++i) {
#pragma unroll
    for (int by = 4; by < 32; by *= 2) sums.sum[i] += __shfl_xor_sync(FULL, sums.sum[i], by);
    if (g == 0) stats[warp * ROWS + 4 * i + t] = make_float2(sums.most[i], sums.sum[i]);
  }
  __syncthreads();
  const i64 to = ((i64)(first_slot + split) * pairs + pair) * rows;
  for (int r = warp; r < rows; r += warps) {
    float most = NO_WEIGHT, sum = 0;
    for (int w = 0; w < warps; ++w) most = fmaxf(most, stats[w * ROWS + r].x);
    const float from = most == NO_WEIGHT ? 0 : most;
    for (int w = 0; w < warps; ++w) sum += stats[w * ROWS + r].y * exp2f(stats[w * ROWS + r].x - from);
    if (lane == 0) out_stats[to + r] = make_float2(most, sum);
    for (int p = lane; p < dim; p += 32) {
      const int place = ((p >> 4) * NT + (r >> 2)) * 32 + 4 * (p & 7) + (r & 3);
      float total = 0;
      for (int w = 0; w < warps; ++w) {
        const float decay = exp2f(stats[w * ROWS + r].x - from);
        const float2 o = out[32 * blocks * NT * w + place];
        if (decay != 0) total += decay * (p & 8 ? o.y : o.x);
      }
      out_parts[(to + r) * dim + channels[p]] = total;
    }
  }
}

// Merge `slots` parts of attend_tiles. sinks[heads * group], null for none: exponents that take weight
// and have no value. out[batches, n, heads * group, dim] by strides in values. A block takes one row.
extern "C" __global__ void __launch_bounds__(MERGE_THREADS)
    merge_splits(const float* __restrict__ parts, const float2* __restrict__ stats, int slots, int pairs, int heads,
                 int group, int n, int dim, const float* __restrict__ sinks, void* __restrict__ out, i64 out_batch,
                 i64 out_token) {
  __shared__ float decays[MERGE_THREADS], of_warps[2 * (MERGE_THREADS / 32)];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int rows = group * n, r = blockIdx.x % rows, pair = blockIdx.x / rows;
  const int batch = pair / heads, query_head = (pair - batch * heads) * group + r / n;
  const i64 stride = (i64)pairs * rows, first = (i64)pair * rows + r;
  const float sink = sinks ? sinks[query_head] * LOG2E : NO_WEIGHT;
  float most = sink;
  for (int k = threadIdx.x; k < slots; k += MERGE_THREADS) most = fmaxf(most, stats[first + k * stride].x);
#pragma unroll
  for (int by = 1; by < 32; by *= 2) most = fmaxf(most, __shfl_xor_sync(FULL, most, by));
  if (lane == 0) of_warps[warp] = most;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < MERGE_THREADS / 32; ++w) most = fmaxf(most, of_warps[w]);
  const float from = most == NO_WEIGHT ? 0 : most;
  float sum = 0, total[MAX_DIM / MERGE_THREADS];
#pragma unroll
  for (int i = 0; i < MAX_DIM / MERGE_THREADS; ++i) total[i] = 0;
  for (int begin = 0; begin < slots; begin += MERGE_THREADS) {
    const int here = min(MERGE_THREADS, slots - begin);
    __syncthreads();
    if (threadIdx.x < here) {
      const float2 mine = stats[first + (begin + threadIdx.x) * stride];
      decays[threadIdx.x] = exp2f(mine.x - from);
      sum += mine.y * decays[threadIdx.x];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < MAX_DIM / MERGE_THREADS; ++i) {
      const int c = i * MERGE_THREADS + threadIdx.x;
      if (c >= dim) continue;
#pragma unroll 8
      for (int k = 0; k < here; ++k) {
        const float part = parts[(first + (begin + k) * stride) * dim + c];
        if (decays[k] != 0) total[i] += decays[k] * part;
      }
    }
  }
#pragma unroll
  for (int by = 1; by < 32; by *= 2) sum += __shfl_xor_sync(FULL, sum, by);
  if (lane == 0) of_warps[MERGE_THREADS / 32 + warp] = sum;
  __syncthreads();
  sum = exp2f(sink - from);
#pragma unroll
  for (int w = 0; w < MERGE_THREADS / 32; ++w) sum += of_warps[MERGE_THREADS / 32 + w];
  const float share = sum == 0 ? 0 : 1 / sum;  // a row that sees nothing is zeros
  const i64 to = batch * out_batch + (r % n) * out_token + (i64)query_head * dim;
#pragma unroll
  for (int i = 0; i < MAX_DIM / MERGE_THREADS; ++i) {
    const int c = i * MERGE_THREADS + threadIdx.x;
    if (c >= dim) continue;
    const float x = total[i] * share;
#if VALUE_KIND == 2
    ((float*)out)[to + c] = x;
#else
    ((u16*)out)[to + c] = bits_of_value(x);
#endif
  }
}
