// What the forms of kept_format.py share: from the numbers of units that rows keep to the header.
#include "bits.cuh"
#include "mailbox.cuh"
#include "kept.cuh"

#define THREADS 1024
#define ITEMS 8  // rows of a thread at a time

// Sum the numbers of the rows over those before, in place, and write the header. When the parts are not
// shorter than the tensor's own bytes, it is raw: then a later kernel overwrites the sums. One block.
extern "C" __global__ void __launch_bounds__(THREADS)
    place_rows(i64 rows, i64 elements, int form, int element_bytes, int unit_bytes, int place_bytes, i64 before_bytes,
               i64 starts_at, i64 values_at, i64 raw_bytes, u8* __restrict__ out) {
  __shared__ int of_warps[THREADS / 32];
  i64* starts = (i64*)(out + starts_at);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  i64 total = 0;
  for (i64 begin = 0; begin < rows; begin += THREADS * ITEMS) {
    const i64 first = begin + threadIdx.x * ITEMS;
    int own[ITEMS], sum = 0;
#pragma unroll
    for (int k = 0; k < ITEMS; ++k) {
      own[k] = first + k < rows ? (int)starts[first + k] : 0;
      sum += own[k];
    }
    const int up_to_me = inclusive_scan(sum, lane);
    if (lane == 31) of_warps[warp] = up_to_me;
    __syncthreads();
    if (warp == 0) of_warps[lane] = inclusive_scan(of_warps[lane], lane);
    __syncthreads();
    i64 at = total + (warp ? of_warps[warp - 1] : 0) + up_to_me - sum;
#pragma unroll
    for (int k = 0; k < ITEMS; ++k) {
      if (first + k < rows) starts[first + k] = at;
      at += own[k];
    }
    total += of_warps[THREADS / 32 - 1];
    __syncthreads();
  }
  if (threadIdx.x) return;
  const i64 used = used_bytes(total, unit_bytes, place_bytes, before_bytes, values_at);
  const bool raw = used >= raw_bytes;
  i64* header = (i64*)out;
  header[0] = raw ? raw_bytes : used;
  header[1] = elements;
  header[2] = (i64)element_bytes << 32 | form;
  header[3] = raw ? RAW : total;
  if (raw || total == 0) return;
  starts[rows] = total;
  for (i64 i = before_bytes; i < starts_at; ++i) out[i] = 0;
  for (i64 i = starts_at + 8 * (rows + 1); i < values_at; ++i) out[i] = 0;
  const i64 end = values_at + total * unit_bytes;
  for (i64 i = end; i < aligned_bytes(end); ++i) out[i] = 0;
}
