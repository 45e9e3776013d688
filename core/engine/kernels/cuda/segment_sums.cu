// Loops over the entries of the rows of sparse matrices: sums, dot products, softmax. No atomics: each
// result is summed by one group of lanes, or one block, in an order that is the same from run to run.
// REAL_BYTES: 4 for float32, 8 for float64; VECTOR of them are loaded at once.
#include "bits.cuh"

#if REAL_BYTES == 8
typedef double real_t;
#define EXP exp
#else
typedef float real_t;
#define EXP expf
#endif
#define THREADS 256
#define LONG_ROW 256  // entries, beyond which all groups of a block sum a row together
#define UNDER_WAY 4   // entries whose rows are loaded at once

struct alignas(VECTOR * REAL_BYTES) Reals {
  real_t x[VECTOR];
};

struct Entries {
  const i64 *columns, *edges;
  const real_t *weights, *x;
  int heads, width;
};

// The sum of the entries from..end, `step` apart, of values `at` and on of their rows.
__device__ __forceinline__ Reals sum_entries(const Entries& s, i64 from, i64 end, int step, int at) {
  Reals sum = {};
  const int head = at / s.width, row_values = s.heads * s.width;
  for (i64 i = from; i < end; i += UNDER_WAY * step) {
    Reals x[UNDER_WAY];
    real_t w[UNDER_WAY];
#pragma unroll
    for (int k = 0; k < UNDER_WAY; ++k) {
      const i64 entry = i + k * step;
      x[k] = Reals{};
      w[k] = 1;
      if (entry < end) {
        x[k] = *(const Reals*)(s.x + s.columns[entry] * row_values + at);
        if (s.weights != nullptr) {
          const i64 edge = s.edges[entry];
          if (edge >= 0) w[k] = s.weights[edge * s.heads + head];
        }
      }
    }
#pragma unroll
    for (int k = 0; k < UNDER_WAY; ++k)
      if (i + k * step < end)
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) sum.x[v] += w[k] * x[k].x[v];
  }
  return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    sum_segments(const i64 *__restrict__ starts, i64 rows, const i64 *__restrict__ columns,
                 const i64 *__restrict__ edges, const real_t *__restrict__ weights, const real_t *__restrict__ x,
                 int heads, int width, int lanes, real_t *__restrict__ out) {
  __shared__ Reals parts[THREADS];
  const Entries s = {columns, edges, weights, x, heads, width};
  const int groups = THREADS / lanes, group = threadIdx.x / lanes, lane = threadIdx.x & (lanes - 1);
  const int row_values = heads * width;
  for (i64 first = (i64)blockIdx.x * groups; first < rows; first += (i64)gridDim.x * groups) {
    const i64 row = first + group;
    const i64 begin = row < rows ? starts[row] : 0, end = row < rows ? starts[row + 1] : 0;
    const bool together = end - begin > LONG_ROW;
    if (row < rows && !together)
      for (int at = lane * VECTOR; at < row_values; at += lanes * VECTOR)
        *(Reals*)(out + row * row_values + at) = sum_entries(s, begin, end, 1, at);
    if (!__syncthreads_or(together)) continue;
    for (int g = 0; g < groups && first + g < rows; ++g) {
      const i64 from = starts[first + g], to = starts[first + g + 1];
      if (to - from <= LONG_ROW) continue;
      for (int base = 0; base < row_values; base += lanes * VECTOR) {
        const int at = base + lane * VECTOR;
        if (at < row_values) parts[threadIdx.x] = sum_entries(s, from + group, to, groups, at);
        __syncthreads();
        if (group == 0 && at < row_values) {
          Reals sum = parts[lane];
          for (int other = 1; other < groups; ++other)
#pragma unroll
            for (int v = 0; v < VECTOR; ++v) sum.x[v] += parts[other * lanes + lane].x[v];
          *(Reals*)(out + (first + g) * row_values + at) = sum;
        }
        __syncthreads();
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    dot_entries(const i64 *__restrict__ rows, const i64 *__restrict__ columns, const i64 *__restrict__ edges,
                i64 entries, const real_t *__restrict__ g, const real_t *__restrict__ x, int heads, int width,
                int lanes, real_t *__restrict__ out) {
  const int groups = THREADS / lanes, group = threadIdx.x / lanes, lane = threadIdx.x & (lanes - 1);
  const i64 n = entries * heads;
  for (i64 first = (i64)blockIdx.x * groups; first < n; first += (i64)gridDim.x * groups) {
    const i64 mine = first + group, entry = mine / heads;
    const int head = (int)(mine - entry * heads);
    const i64 edge = mine < n ? edges[entry] : -1;
    real_t sum = 0;
    if (edge >= 0) {
      const real_t* a = g + (rows[entry] * heads + head) * width;
      const real_t* b = x + (columns[entry] * heads + head) * width;
      for (int at = lane * VECTOR; at < width; at += lanes * VECTOR) {
        const Reals left = *(const Reals*)(a + at), right = *(const Reals*)(b + at);
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) sum += left.x[v] * right.x[v];
      }
    }
    for (int d = lanes >> 1; d; d >>= 1) sum += __shfl_xor_sync(FULL, sum, d);
    if (edge >= 0 && lane == 0) out[edge * heads + head] = sum;
  }
}

__device__ __forceinline__ real_t warp_sum(real_t x) {
#pragma unroll
  for (int d = 16; d; d >>= 1) x += __shfl_xor_sync(FULL, x, d);
  return x;
}

// A value of each entry and head: x, or x and y together, each of the row that an index gives or of the
// entry itself; where it is not positive times the slope.
struct Logits {
  const real_t* x;
  const i64* x_rows;
  const real_t* y;
  const i64* y_rows;
  bool multiplied;
  const real_t* slope;
  int heads;
};
__device__ __forceinline__ real_t logit(const Logits& s, i64 entry, int head) {
  real_t value = s.x[(s.x_rows != nullptr ? s.x_rows[entry] : entry) * s.heads + head];
  if (s.y != nullptr) {
    const real_t other = s.y[(s.y_rows != nullptr ? s.y_rows[entry] : entry) * s.heads + head];
    value = s.multiplied ? value * other : value + other;
  }
  return s.slope == nullptr || value > 0 ? value : value * *s.slope;
}

#define LOGIT_PARAMETERS                                                                                          \
  const real_t *__restrict__ x, const i64 *__restrict__ x_rows, const real_t *__restrict__ y,                     \
      const i64 *__restrict__ y_rows, int multiplied, const real_t *__restrict__ slope, int heads

// A warp takes a column of a row's entries.
extern "C" __global__ void __launch_bounds__(THREADS)
    softmax_segments(const i64 *__restrict__ starts, i64 rows, LOGIT_PARAMETERS, real_t *__restrict__ out) {
  const Logits s = {x, x_rows, y, y_rows, multiplied != 0, slope, heads};
  const int lane = threadIdx.x & 31;
  const i64 warps = (i64)gridDim.x * (THREADS / 32);
  for (i64 mine = ((i64)blockIdx.x * THREADS + threadIdx.x) >> 5; mine < rows * heads; mine += warps) {
    const i64 row = mine / heads, begin = starts[row], end = starts[row + 1];
    const int head = (int)(mine - row * heads);
    if (begin == end) continue;
    real_t largest = logit(s, begin, head);
    for (i64 i = begin + lane; i < end; i += 32) {
      const real_t each = logit(s, i, head);
      largest = each > largest || each != each ? each : largest;
    }
#pragma unroll
    for (int d = 16; d; d >>= 1) {
      const real_t other = __shfl_xor_sync(FULL, largest, d);
      largest = other > largest || other != other ? other : largest;
    }
    real_t sum = 0;
    for (i64 i = begin + lane; i < end; i += 32) {
      const real_t each = EXP(logit(s, i, head) - largest);
      out[i * heads + head] = each;
      sum += each;
    }
    sum = warp_sum(sum);
    for (i64 i = begin + lane; i < end; i += 32) out[i * heads + head] /= sum;
  }
}

// The gradient of the logits before the slope, from that of the result p; without a slope x is not read.
extern "C" __global__ void __launch_bounds__(THREADS)
    softmax_segments_gradient(const i64 *__restrict__ starts, i64 rows, const real_t *__restrict__ p,
                              const real_t *__restrict__ g, LOGIT_PARAMETERS, real_t *__restrict__ out) {
  const Logits s = {x, x_rows, y, y_rows, multiplied != 0, slope, heads};
  const int lane = threadIdx.x & 31;
  const i64 warps = (i64)gridDim.x * (THREADS / 32);
  for (i64 mine = ((i64)blockIdx.x * THREADS + threadIdx.x) >> 5; mine < rows * heads; mine += warps) {
    const i64 row = mine / heads, begin = starts[row], end = starts[row + 1];
    const int head = (int)(mine - row * heads);
    real_t sum = 0;
    for (i64 i = begin + lane; i < end; i += 32) sum += p[i * heads + head] * g[i * heads + head];
    sum = warp_sum(sum);
    for (i64 i = begin + lane; i < end; i += 32) {
      const i64 at = i * heads + head;
      const real_t found = p[at] * (g[at] - sum);
      out[at] = slope == nullptr || logit(s, i, head) > 0 ? found : found * *slope;
    }
  }
}
