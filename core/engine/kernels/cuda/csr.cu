// Compressed sparse rows: the units that are not zero, and their columns. See kept_format.py.
#include "bits.cuh"
#include "mailbox.cuh"
#include "kept.cuh"

struct NotZero {
  __device__ __forceinline__ static bool keeps(const Row& row, int k, const stored_t*, int) { return row.x[k] != 0; }
};

extern "C" __global__ void __launch_bounds__(ROW_THREADS) count_csr(const stored_t* __restrict__ x, i64 units,
                                                                    i64* counts) {
  count_rows<NotZero>(x, units, counts);
}

extern "C" __global__ void __launch_bounds__(ROW_THREADS)
    pack_csr(const stored_t* __restrict__ x, i64 units, i64 starts_at, i64 values_at, u8* __restrict__ out) {
  pack_rows<NotZero, true>(x, units, starts_at, values_at, out, nullptr);
}

// A row is put together in shared memory. Of a damaged row some units are left 0, or wrong.
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
    decode_csr(const u8* __restrict__ data, i64 data_bytes, i64 elements, int element_bytes, i64 starts_at,
               i64 values_at, stored_t* __restrict__ out, i64* mailbox) {
  __shared__ __align__(16) stored_t line[ROW_UNITS];
  const i64 kept = sound_kept(data, data_bytes, elements, CSR_FORM, element_bytes, COLUMN_BYTES, HEADER_BYTES, values_at);
  if (kept == DAMAGED) {
    if (blockIdx.x == 0 && threadIdx.x == 0) report(mailbox, ERROR_BLOB, -1, 0, 0);
    return;
  }
  const i64 units = elements * (element_bytes / CHUNK_BYTES);
  if (kept == RAW) {
    copy_units((const stored_t*)(data + HEADER_BYTES), out, units);
    return;
  }
  const i64* starts = (const i64*)(data + starts_at);
  const stored_t* values = (const stored_t*)(data + values_at);
  const unsigned short* columns = (const unsigned short*)(data + values_at + aligned_bytes(kept * CHUNK_BYTES));
  const bool wide = ((u64)out & 15) == 0;
  for (i64 r = blockIdx.x; r * ROW_UNITS < units; r += gridDim.x) {
    const int count = units_of(r, units);
    for (int j = threadIdx.x; j < ROW_UNITS * CHUNK_BYTES / 16; j += ROW_THREADS)
      ((uint4*)line)[j] = make_uint4(0, 0, 0, 0);
    __syncthreads();
    if (kept) {
      const bool sound = put_row<4>(starts, values, columns, r, count, kept, units, line);
      if (!sound) report(mailbox, ERROR_BLOB, r, 0, 0);
      __syncthreads();
    }
    stored_t* to = out + r * ROW_UNITS;
    if (wide && count == ROW_UNITS) {
      for (int j = threadIdx.x; j < ROW_UNITS * CHUNK_BYTES / 16; j += ROW_THREADS) ((uint4*)to)[j] = ((uint4*)line)[j];
    } else {
#pragma unroll 1
      for (int j = threadIdx.x; j < count; j += ROW_THREADS) to[j] = line[j];
    }
    __syncthreads();
  }
}
