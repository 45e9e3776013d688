// The used bytes of an encoded tensor, between device and host memory: its header says how many there are,
// so that nobody has to know on the host. `bytes` are those of the smaller buffer; both begin at multiples
// of 16. What lies before `first_byte`, a multiple of 16, is there already.
#include "bits.cuh"

#define THREADS 512
#define UNDER_WAY 4  // copies of a thread

extern "C" __global__ void __launch_bounds__(THREADS) copy_blob(const u8* source, u8* target, i64 bytes,
                                                                 i64 first_byte) {
  __shared__ u64 header;
  if (threadIdx.x == 0) header = *(const u64*)source;  // once a block: it may come over the link
  __syncthreads();
  const i64 used = header > (u64)bytes ? bytes : (i64)header;
  const i64 units = used / 16, stride = (i64)gridDim.x * THREADS;
  const uint4* units_from = (const uint4*)source;
  uint4* units_to = (uint4*)target;
  for (i64 first = first_byte / 16 + (i64)blockIdx.x * THREADS + threadIdx.x; first < units;
       first += UNDER_WAY * stride) {
    uint4 value[UNDER_WAY];
#pragma unroll
    for (int j = 0; j < UNDER_WAY; ++j)
      if (first + j * stride < units) value[j] = units_from[first + j * stride];
#pragma unroll
    for (int j = 0; j < UNDER_WAY; ++j)
      if (first + j * stride < units) units_to[first + j * stride] = value[j];
  }
  const i64 last = units * 16 + threadIdx.x;
  if (blockIdx.x == 0 && last >= first_byte && last < used) target[last] = source[last];
}
