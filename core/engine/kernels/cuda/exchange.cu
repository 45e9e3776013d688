// Rows of a batch between the slots of a cache and memory of all rows on the host, over the link.
//
// arrays: for each of them five numbers: the address of rows by slot, that of rows by number, bytes of a
// row, bytes that are copied at once (16, 4, 2 or 1, which divide the addresses and the row), and whether
// the latter are those of the batch, one after another, instead. Block row y takes array y. *coming is
// how many rows there are: the k-th is rows[k], or NO_ROW for none, and lies in slots[k].
#include "bits.cuh"

#define THREADS 256
#define UNDER_WAY 4  // copies of a thread

template <typename unit_t>
__device__ __forceinline__ void move(const i64* array, const i64* slots, const i64* rows, i64 count, bool to_host) {
  const i64 row_units = array[2] / (i64)sizeof(unit_t), units = count * row_units;
  unit_t* cached = (unit_t*)array[0];
  unit_t* stored = (unit_t*)array[1];
  const bool by_position = array[4];
  const i64 stride = (i64)gridDim.x * THREADS;
  for (i64 first = (i64)blockIdx.x * THREADS + threadIdx.x; first < units; first += UNDER_WAY * stride) {
    const unit_t* from[UNDER_WAY];
    unit_t* to[UNDER_WAY];
    unit_t value[UNDER_WAY];
#pragma unroll
    for (int j = 0; j < UNDER_WAY; ++j) {
      const i64 unit = first + j * stride;
      to[j] = nullptr;
      if (unit >= units) continue;
      const i64 k = unit / row_units, at = unit - k * row_units, row = rows[k];
      if (row < 0) continue;
      unit_t* here = cached + slots[k] * row_units + at;
      unit_t* there = stored + (by_position ? k : row) * row_units + at;
      from[j] = to_host ? here : there;
      to[j] = to_host ? there : here;
    }
#pragma unroll
    for (int j = 0; j < UNDER_WAY; ++j)
      if (to[j] != nullptr) value[j] = *from[j];
#pragma unroll
    for (int j = 0; j < UNDER_WAY; ++j)
      if (to[j] != nullptr) *to[j] = value[j];
  }
}

// to_host: whether rows go from their slots to the host, or come.
extern "C" __global__ void __launch_bounds__(THREADS)
    exchange_rows(const i64* arrays, const i64* slots, const i64* rows, const i64* coming, int to_host) {
  const i64* array = arrays + 5 * blockIdx.y;
  const i64 count = *coming;
  switch ((int)array[3]) {
    case 16: move<uint4>(array, slots, rows, count, to_host); break;
    case 4: move<u32>(array, slots, rows, count, to_host); break;
    case 2: move<unsigned short>(array, slots, rows, count, to_host); break;
    default: move<u8>(array, slots, rows, count, to_host);
  }
}
