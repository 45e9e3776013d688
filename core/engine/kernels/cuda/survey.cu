// The edges of a small graph in the order of their destinations, and their pairs of nodes and kinds, by one
// block, as the loop of kernels/cpu/segments.py finds them. Its warps sort entries of a key, in the upper 16
// bits, and a place, in the lower ones. Each takes a part of consecutive entries, 32 at once, so that all
// loads but those by place are of neighbours.
#include "bits.cuh"

#define THREADS 1024
#define WARPS (THREADS / 32)
#define MOST_BITS 8  // of a key that are sorted by at once
#define PLACE 0xffffu

struct Shared {
  int counts[WARPS << MOST_BITS];  // by digit, then warp
  int sums[WARPS];
  i64 limits[6][WARPS];
};

// The sum of the values of all threads in front.
__device__ __forceinline__ int scan_block(int value, Shared& s) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int up = value;
#pragma unroll
  for (int k = 1; k < 32; k *= 2) {
    const int other = __shfl_up_sync(FULL, up, k);
    if (lane >= k) up += other;
  }
  if (lane == 31) s.sums[warp] = up;
  __syncthreads();
  int before = lane < warp ? s.sums[lane] : 0;
#pragma unroll
  for (int k = 16; k; k /= 2) before += __shfl_xor_sync(FULL, before, k);
  __syncthreads();
  return before + up - value;
}

// Lowest and highest of each column, to six words; returns whether one is not 0 to its count - 1.
__device__ __forceinline__ bool find_limits(const i64* const (&columns)[3], const int (&counts)[3], int n,
                                            i64* limits, Shared& s) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  bool out = false;
#pragma unroll
  for (int c = 0; c < 3; ++c) {
    i64 low = columns[c][0], others = ~low;  // the highest is the one whose complement is lowest
    for (int i = threadIdx.x; i < n; i += THREADS) {
      const i64 x = columns[c][i];
      low = min(low, x);
      others = min(others, ~x);
    }
    out |= low < 0 || ~others >= counts[c];
#pragma unroll
    for (int k = 16; k; k /= 2) {
      const i64 low_there = __shfl_xor_sync(FULL, low, k), others_there = __shfl_xor_sync(FULL, others, k);
      low = min(low, low_there);
      others = min(others, others_there);
    }
    if (lane == 0) {
      s.limits[2 * c][warp] = low;
      s.limits[2 * c + 1][warp] = others;
    }
  }
  out = __syncthreads_or(out);
  if (warp < 6) {
    i64 least = s.limits[warp][lane];
#pragma unroll
    for (int k = 16; k; k /= 2) {
      const i64 there = __shfl_xor_sync(FULL, least, k);
      least = min(least, there);
    }
    if (lane == 0) limits[warp] = warp & 1 ? ~least : least;
  }
  return out;
}

// The entries of a warp: a multiple of 32 of them, but at the end.
struct Part {
  int begin, end;
};
__device__ __forceinline__ Part part_of_warp(int n) {
  const int each = (n + THREADS - 1) / THREADS * 32, begin = min(n, (int)(threadIdx.x >> 5) * each);
  return {begin, min(n, begin + each)};
}

// Sorts entries by `bits` bits of theirs from `shift` on, stably.
__device__ __forceinline__ void sort_digit(const u32* in, u32* out, int n, int shift, int bits, Shared& s) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, counts = WARPS << bits;
  const u32 digits = (1u << bits) - 1, lower = (1u << lane) - 1;
  const Part part = part_of_warp(n);
  for (int i = threadIdx.x; i < counts; i += THREADS) s.counts[i] = 0;
  __syncthreads();
  for (int first = part.begin; first < part.end; first += 32) {
    const int i = first + lane;
    const u32 digit = i < part.end ? in[i] >> shift & digits : digits + 1;
    const u32 peers = __match_any_sync(FULL, digit);
    if (digit <= digits && (peers & lower) == 0) s.counts[digit * WARPS + warp] += __popc(peers);
    __syncwarp();
  }
  __syncthreads();
  const int each = (counts + THREADS - 1) / THREADS, begin = threadIdx.x * each;
  int sum = 0;
  if (begin < counts)
    for (int k = 0; k < each; ++k) sum += s.counts[begin + k];
  int at = scan_block(sum, s);
  if (begin < counts)
    for (int k = 0; k < each; ++k) {
      const int count = s.counts[begin + k];
      s.counts[begin + k] = at;
      at += count;
    }
  __syncthreads();
  for (int first = part.begin; first < part.end; first += 32) {
    const int i = first + lane;
    const u32 entry = i < part.end ? in[i] : 0, digit = i < part.end ? entry >> shift & digits : digits + 1;
    const u32 peers = __match_any_sync(FULL, digit);
    int* next = s.counts + digit * WARPS + warp;
    if (digit <= digits) out[*next + __popc(peers & lower)] = entry;
    __syncwarp();
    if (digit <= digits && (peers & lower) == 0) *next += __popc(peers);
    __syncwarp();
  }
  __syncthreads();
}

// Sorts entries by their keys of 0 to count - 1, stably. `spare` is as long; where they are then is returned,
// and `spare` is the other one.
__device__ __forceinline__ u32* sort_entries(u32* entries, u32*& spare, int n, int count, Shared& s) {
  const int bits = count > 1 ? 32 - __clz(count - 1) : 0;
  const int passes = (bits + MOST_BITS - 1) / MOST_BITS;
  for (int pass = 0, done = 0; pass < passes; ++pass) {
    const int now = (bits - done + passes - pass - 1) / (passes - pass);
    sort_digit(entries, spare, n, 16 + done, now, s);
    u32* sorted = spare;
    spare = entries;
    entries = sorted;
    done += now;
  }
  return entries;
}

// Writes where each of `count` keys begins among sorted entries, and their end.
__device__ __forceinline__ void find_starts(const u32* entries, int n, int count, i64* starts) {
  for (int key = threadIdx.x; key <= count; key += THREADS) {
    int low = 0, high = n;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (entries[middle] < (u32)key << 16)
        low = middle + 1;
      else
        high = middle;
    }
    starts[key] = low;
  }
}

// Gives numbers to the pairs of a kind and a node of edges that `entries` have sorted by both, the kind as key;
// `of_kinds` is where each kind begins there.
__device__ __forceinline__ void number_pairs(const u32* entries, int n, const i64* node_of, const i64* of_kinds,
                                             int n_kinds, int width, i64* columns, i64* bounds, Shared& s) {
  i64 *of_edge = columns, *node = of_edge + width, *kind = node + width, *order = kind + width;
  i64* starts = order + width;
  const int lane = threadIdx.x & 31;
  const Part part = part_of_warp(n);
  int firsts = 0, pairs = 0;
  for (int counted = 0; counted < 2; ++counted) {
    for (int first = part.begin; first < part.end; first += 32) {
      const int i = first + lane;
      const u32 entry = i < part.end ? entries[i] : 0, before = 0 < i && i < part.end ? entries[i - 1] : 0;
      const i64 of = i < part.end ? node_of[entry & PLACE] : 0;
      const bool begins = i < part.end && (i == 0 || before >> 16 != entry >> 16 || node_of[before & PLACE] != of);
      const u32 all = __ballot_sync(FULL, begins);
      if (counted && i < part.end) {
        const int pair = firsts + __popc(all & (FULL >> (31 - lane))) - 1;
        of_edge[entry & PLACE] = pair;
        order[i] = entry & PLACE;
        if (begins) {
          node[pair] = of;
          kind[pair] = entry >> 16;
          starts[pair] = i;
        }
      }
      firsts += __popc(all);
    }
    if (counted) break;
    const int own = firsts;
    firsts = scan_block(lane == 0 ? own : 0, s);  // of lane 0: those of the warps in front
    firsts = __shfl_sync(FULL, firsts, 0);
  }
  if (threadIdx.x == THREADS - 1) s.sums[0] = firsts;  // of the last warp: all
  __syncthreads();
  pairs = s.sums[0];
  if (threadIdx.x == 0) starts[pairs] = n;
  for (int k = threadIdx.x; k <= n_kinds; k += THREADS) {
    const i64 place = of_kinds[k];
    bounds[k] = place < n ? of_edge[entries[place] & PLACE] : pairs;
  }
  __syncthreads();
}

// Cuts the entries of each kind, from its bound to the next, into tiles: kind, first entry, end of the kind's.
__device__ __forceinline__ void write_tiles(const i64* bounds, int n_kinds, i64* tiles, Shared& s) {
  int before = 0;
  for (int first = 0; first < n_kinds; first += THREADS) {
    const int k = first + threadIdx.x;
    const i64 begin = k < n_kinds ? bounds[k] : 0, end = k < n_kinds ? bounds[k + 1] : 0;
    const int count = (int)((end - begin + TILE_ROWS - 1) / TILE_ROWS), at = before + scan_block(count, s);
    for (int t = 0; t < count; ++t) {
      i64* const tile = tiles + 3 * (at + t);
      tile[0] = k;
      tile[1] = begin + t * TILE_ROWS;
      tile[2] = end;
    }
    if (threadIdx.x == THREADS - 1) s.sums[0] = at + count;
    __syncthreads();
    before = s.sums[0];
    __syncthreads();
  }
}

// `block` is that of an EdgeSurvey; `found` has its limits, and its bounds of edges and of pairs of both sides,
// 0 where an edge is out of range. `scratch` is 2 n. `tiles` are those of edges and of pairs of both sides, each in
// front of `most_tiles`.
extern "C" __global__ void __launch_bounds__(THREADS)
    survey_edges(const i64* __restrict__ ends, const i64* __restrict__ kinds, int n, int n_src, int n_dst,
                 int n_kinds, int width, i64* block, i64* found, u32* scratch, i64* tiles,
                 int most_tiles) {
  __shared__ Shared s;
  i64 *order = block, *src = order + width, *dst = src + width, *kind = dst + width, *numbers = kind + width;
  i64 *place = numbers + width, *kind_of = place + width, *pairs = kind_of + width;
  i64 *starts = pairs + 10 * (i64)width, *bounds = found + 6;
  const i64* const given[3] = {ends, ends + n, kinds};
  const int counts[3] = {n_src, n_dst, n_kinds};
  if (find_limits(given, counts, n, found, s)) {
    for (int i = threadIdx.x; i < 3 * (n_kinds + 1); i += THREADS) bounds[i] = 0;
    return;
  }
  u32 *entries = scratch, *spare = scratch + n;
  for (int i = threadIdx.x; i < n; i += THREADS) entries[i] = (u32)ends[n + i] << 16 | i;
  __syncthreads();
  entries = sort_entries(entries, spare, n, n_dst, s);
  find_starts(entries, n, n_dst, starts);
  for (int i = threadIdx.x; i < n; i += THREADS) {
    const int edge = entries[i] & PLACE;
    const i64 of = kinds[edge];
    order[i] = edge;
    src[i] = ends[edge];
    dst[i] = entries[i] >> 16;
    kind[i] = of;
    numbers[i] = i;
    spare[i] = (u32)of << 16 | i;
  }
  __syncthreads();
  u32* sorted = sort_entries(spare, entries, n, n_kinds, s);
  find_starts(sorted, n, n_kinds, bounds);
  for (int i = threadIdx.x; i < n; i += THREADS) {
    place[sorted[i] & PLACE] = i;
    kind_of[i] = sorted[i] >> 16;
  }
  __syncthreads();
  // Edges are in the order of their destinations: by kind they are in that of both.
  number_pairs(sorted, n, dst, bounds, n_kinds, width, pairs + 5 * (i64)width, bounds + 2 * (n_kinds + 1), s);
  for (int i = threadIdx.x; i < n; i += THREADS) entries[i] = (u32)src[i] << 16 | i;
  __syncthreads();
  spare = sorted;
  sorted = sort_entries(entries, spare, n, n_src, s);
  for (int i = threadIdx.x; i < n; i += THREADS) sorted[i] = (u32)kind[sorted[i] & PLACE] << 16 | (sorted[i] & PLACE);
  __syncthreads();
  sorted = sort_entries(sorted, spare, n, n_kinds, s);
  number_pairs(sorted, n, src, bounds, n_kinds, width, pairs, bounds + n_kinds + 1, s);
  for (int of = 0; of < 3; ++of) write_tiles(bounds + of * (n_kinds + 1), n_kinds, tiles + 3 * of * (i64)most_tiles, s);
}
