// The map from ids to locations: buckets of eight entries, each bucket one line of 128 bytes. An id
// lies in the first bucket with a free entry from bucket mix(id) on, around the end; ids are never
// taken out, so a bucket with a free entry ends every search. The number of buckets is
// a power of two up to 2^32, bucket_mask that number less one. Needs bits.cuh; BUCKET_ENTRIES,
// NO_ID (the id of a free entry) and NOT_CACHED (the location of an id that has none) come from the host.

static_assert(BUCKET_ENTRIES == 8, "eight lanes look at a bucket at once");

// The finaliser of splitmix64: neighbouring ids come to buckets that have nothing in common.
__device__ __forceinline__ u64 mix(i64 id) {
  u64 x = (u64)id;
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9ull;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebull;
  return x ^ x >> 31;
}

// Call for the line that a search for an id begins with.
__device__ __forceinline__ void prefetch_bucket(const longlong2* entries, u32 bucket_mask, i64 id) {
#ifndef SIMT_HOST
  const longlong2* line = entries + (u64)((u32)mix(id) & bucket_mask) * 8;
  asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
#endif
}

// Look up four ids at once, each by eight lanes: lane is 0..31, all lanes of the warp take part, and
// the eight lanes from a multiple of eight on have the same id. Every lane gets its id's location.
// A negative id is not looked for. With one id in the whole warp, the warp looks up that one.
__device__ __forceinline__ i64 find_location(const longlong2* __restrict__ entries, u32 bucket_mask, i64 id,
                                             int lane) {
  const int first_lane = lane & ~7;
  u32 bucket = (u32)mix(id) & bucket_mask;
  i64 location = NOT_CACHED;
  bool looking = id >= 0;
  for (u32 left = bucket_mask;; --left) {
    longlong2 entry;
    entry.x = NO_ID;
    entry.y = NOT_CACHED;
    if (looking) entry = __ldg(entries + (u64)bucket * 8 + (lane & 7));
    const u32 here = __ballot_sync(FULL, looking && entry.x == id) >> first_lane & 255;
    const u32 free = __ballot_sync(FULL, entry.x == NO_ID) >> first_lane & 255;
    const i64 found = __shfl_sync(FULL, entry.y, here ? first_lane + __ffs(here) - 1 : lane);
    if (here) location = found;
    looking = looking && !here && !free;
    if (left == 0 || !__any_sync(FULL, looking)) return location;
    bucket = (bucket + 1) & bucket_mask;
  }
}
