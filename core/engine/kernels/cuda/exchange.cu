// Rows of a batch between the slots of a cache and memory of all rows on the host, over the link: those that
// leave and those that come at once, since the link carries both ways at the same time.
//
// arrays: for each of them six numbers: the address of rows by slot, those of rows by number where the ones
// that leave go (0: nowhere) and where those that come are, bytes of a row, bytes that are copied at once (16, 4, 2 or 1,
// which divide the addresses and the row), and whether the latter are those of the batch, one after another,
// instead. Block row y takes array y. coming: how many slots there are; then 1, once a row was moved. Into
// slots[k] comes row wanted[k], and the one there leaves as row leaving[k]; NO_ROW for none. No row does both.
#include "bits.cuh"

#define THREADS 256
#define UNDER_WAY 4  // places of a thread, each of which a value leaves and another comes to

template <typename unit_t>
__device__ __forceinline__ void move(const i64* array, const i64* slots, const i64* leaving, const i64* wanted,
                                     i64 count) {
  const i64 row_units = array[3] / (i64)sizeof(unit_t), units = count * row_units;
  unit_t* cached = (unit_t*)array[0];
  unit_t* out = (unit_t*)array[1];
  const unit_t* in = (const unit_t*)array[2];
  const bool by_position = array[5];
  const i64 stride = (i64)gridDim.x * THREADS;
  for (i64 first = (i64)blockIdx.x * THREADS + threadIdx.x; first < units; first += UNDER_WAY * stride) {
    unit_t* here[UNDER_WAY];
    unit_t* to[UNDER_WAY];
    const unit_t* from[UNDER_WAY];
    unit_t leaves[UNDER_WAY], comes[UNDER_WAY];
#pragma unroll
    for (int j = 0; j < UNDER_WAY; ++j) {
      const i64 unit = first + j * stride;
      to[j] = nullptr;
      from[j] = nullptr;
      if (unit >= units) continue;
      const i64 k = unit / row_units, at = unit - k * row_units, old_row = leaving[k], new_row = wanted[k];
      here[j] = cached + slots[k] * row_units + at;
      if (old_row >= 0 && out != nullptr) to[j] = out + (by_position ? k : old_row) * row_units + at;
      if (new_row >= 0) from[j] = in + (by_position ? k : new_row) * row_units + at;
    }
#pragma unroll
    for (int j = 0; j < UNDER_WAY; ++j)
      if (from[j] != nullptr) comes[j] = *from[j];
#pragma unroll
    for (int j = 0; j < UNDER_WAY; ++j)
      if (to[j] != nullptr) leaves[j] = *here[j];
#pragma unroll
    for (int j = 0; j < UNDER_WAY; ++j)
      if (to[j] != nullptr) *to[j] = leaves[j];
#pragma unroll
    for (int j = 0; j < UNDER_WAY; ++j)
      if (from[j] != nullptr) *here[j] = comes[j];
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    exchange_rows(const i64* arrays, const i64* slots, const i64* leaving, const i64* wanted, i64* coming) {
  const i64* array = arrays + 6 * blockIdx.y;
  const i64 count = coming[0];
  if (count && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) coming[1] = 1;
  switch ((int)array[4]) {
    case 16: move<uint4>(array, slots, leaving, wanted, count); break;
    case 4: move<u32>(array, slots, leaving, wanted, count); break;
    case 2: move<unsigned short>(array, slots, leaving, wanted, count); break;
    default: move<u8>(array, slots, leaving, wanted, count);
  }
}
