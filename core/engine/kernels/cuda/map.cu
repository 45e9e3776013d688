// Filling and reading the map from ids to locations; see map.cuh for its layout.
#include "bits.cuh"
#include "map.cuh"

__device__ __forceinline__ i64 load_id(const void* ids, i64 position, int id_bytes) {
  return id_bytes == 8 ? ((const i64*)ids)[position] : (i64)((const int*)ids)[position];
}

// Put ids and their locations into the map; an id that is there gets the new location, of an id
// given twice either location is kept. failed[0] grows by the ids for which no entry was free, and by
// negative ones.
//
// Entries are only ever filled, and everybody tries the first free one of a bucket that lacks the
// id: whoever finds it taken looks again, so that no id has two entries. A reader at the
// same time finds an id without its location, NOT_CACHED, at worst.
extern "C" __global__ void __launch_bounds__(256)
    insert_ids(longlong2* entries, u32 bucket_mask, const void* __restrict__ ids, int id_bytes,
               const i64* __restrict__ locations, i64 n, u64* failed) {
  const int lane = threadIdx.x & 31, first_lane = lane & ~7;
  const i64 warp = ((i64)blockIdx.x * blockDim.x + threadIdx.x) >> 5;
  const i64 stride = ((i64)gridDim.x * blockDim.x >> 5) * 4;
  for (i64 first = warp * 4; first < n; first += stride) {
    const i64 i = first + (lane >> 3);
    const i64 id = i < n ? load_id(ids, i, id_bytes) : NO_ID;
    u32 bucket = (u32)mix(id) & bucket_mask, left = bucket_mask;
    bool looking = id >= 0, full = i < n && id < 0;
    while (__any_sync(FULL, looking)) {
      longlong2* entry = entries + (u64)bucket * 8 + (lane & 7);
      // Volatile: loaded anew in every round, and not from the first-level cache, which does not see
      // what other multiprocessors write.
      i64 there = NO_ID;
      if (looking) there = *(const volatile i64*)&entry->x;
      const u32 here = __ballot_sync(FULL, looking && there == id) >> first_lane & 255;
      const u32 free = __ballot_sync(FULL, there == NO_ID) >> first_lane & 255;
      const int chosen = __ffs(here ? here : free) - 1;
      bool placed = false;
      if (looking && (lane & 7) == chosen) {
        if (!here) there = (i64)atomicCAS((u64*)&entry->x, (u64)NO_ID, (u64)id);
        placed = there == NO_ID || there == id;
        if (placed) entry->y = locations[i];
      }
      const bool done = (__ballot_sync(FULL, placed) >> first_lane & 255) != 0;
      if (looking && chosen < 0) {
        full = left-- == 0;
        bucket = (bucket + 1) & bucket_mask;
      }
      looking = looking && !done && !full;
    }
    if (full && (lane & 7) == 0) atomicAdd(failed, 1ull);
  }
}

// The locations of ids, NOT_CACHED for one that is not in the map.
extern "C" __global__ void __launch_bounds__(256)
    find_ids(const longlong2* __restrict__ entries, u32 bucket_mask, const void* __restrict__ ids, int id_bytes,
             i64 n, i64* __restrict__ locations) {
  const int lane = threadIdx.x & 31;
  const i64 warp = ((i64)blockIdx.x * blockDim.x + threadIdx.x) >> 5;
  const i64 stride = ((i64)gridDim.x * blockDim.x >> 5) * 4;
  for (i64 first = warp * 4; first < n; first += stride) {
    const i64 i = first + (lane >> 3);
    const i64 location = find_location(entries, bucket_mask, i < n ? load_id(ids, i, id_bytes) : NO_ID, lane);
    if (i < n && (lane & 7) == 0) locations[i] = location;
  }
}
