// Rows that leave the slots of a cache, packed into the table on the host that they belong to: one warp a row.
// A row that fits into its place there is packed into it; another one goes raw into the overflow area, where it
// keeps its place until it fits again. See TableStorage in format.py, and OverflowPlaces in rewriting.py.
#include "bits.cuh"
#include "encode.cuh"

// The next free place of the overflow area: one that was free before this launch, or the next behind those used.
__device__ __forceinline__ u32 take_place(const u32* free_places, i64* state) {
  const i64 turn = (i64)atomicAdd((u64*)state + TAKEN, 1ull), n_free = state[FREE];
  return turn < n_free ? free_places[n_free - 1 - turn] : (u32)(state[USED] + turn - n_free);
}
// Places that become free stand behind those that were: none is taken again in this launch.
__device__ __forceinline__ void free_place(u32 place, u32* free_places, i64* state) {
  free_places[state[FREE] + (i64)atomicAdd((u64*)state + FREED, 1ull)] = place;
}

// leaving[k]: the number of the row in slots[k], NO_ROW for none; coming[0]: how many k there are. `words` and
// `overflow` may lie in memory of the host, `report` does. Of a compact table flags is null, of one in place
// bases, lengths and moved are.
extern "C" __global__ void __launch_bounds__(256) rewrite_rows(
    const stored_t* __restrict__ rows, const i64* __restrict__ slots, const i64* __restrict__ leaving,
    const i64* __restrict__ coming, i64 n_rows, int chunks, int row_words, int row_bytes, int clusters,
    const chunk_t* __restrict__ tables, const int* __restrict__ starts, u32* words, const i64* __restrict__ bases,
    const void* __restrict__ lengths, int length_bytes, u8* row_clusters, u32* flags, u32* moved, u32* overflow,
    u32* free_places, i64* state, i64* report, int stage_words) {
  extern __shared__ __align__(128) u32 shared[];
  __shared__ u8 codes[1 << MOST_FIELD_BITS];
  __shared__ bool is_last;
  const Field f = find_field(tables, clusters, codes);
  const int lane = threadIdx.x & 31;
  const int positions = UNIFORM ? 1 : chunks;
  const bool wide = ((u64)rows & 15) == 0 && chunks % WIDE == 0;
  u32* stage = shared + (threadIdx.x >> 5) * stage_words;
#if QUADS
  const bool quads = in_quads(rows, chunks);
#endif
  for (int j = lane; j < stage_words; j += 32) stage[j] = 0;
  __syncwarp();
  const i64 count = coming[0], warps = ((i64)gridDim.x * blockDim.x) >> 5;
  i64 written = 0;
  for (i64 k = ((i64)blockIdx.x * blockDim.x + threadIdx.x) >> 5; k < count; k += warps) {
    const i64 r = leaving[k];
    if (r < 0) continue;
    ++written;
    const stored_t* row = rows + slots[k] * chunks;
    i64 at = r * row_words;
    int room = row_words - 1;  // words of the longest packed row that fits; 0 for a row that the table keeps raw
    if (bases != nullptr) {
      const i64 block = r >> 5, peer = block * 32 + lane;
      const u32 length_of_peer = peer < n_rows ? load_length(lengths, peer, length_bytes) : 0;
      const u32 before = lane < (int)(r & 31) ? (length_of_peer ? length_of_peer : row_words) : 0;
      at = bases[block] + __reduce_add_sync(FULL, before);
      room = __shfl_sync(FULL, length_of_peer, (int)(r & 31));
    }
    int cluster;
    const int length = measure_best(row, chunks, row_words, clusters, tables, starts, f, wide, lane, cluster);
    const u32 bit = 1u << (r & 31);
    u32* to = words + at;
    const bool outside = bases != nullptr && moved[r >> 5] & bit;
    if (length > room) {  // raw
      if (flags != nullptr) {
        if (lane == 0) atomicAnd(flags + (r >> 5), ~bit);
      } else if (room) {
        u32 place = 0;
        if (lane == 0) {
          if (outside) {
            place = *to;
          } else {
            place = take_place(free_places, state);
            *to = place;
            atomicOr(moved + (r >> 5), bit);
          }
        }
        to = overflow + (i64)__shfl_sync(FULL, place, 0) * row_words;
      }
      for (int j = lane; j < row_words; j += 32) to[j] = raw_word((const u8*)row, row_bytes, j);
      continue;
    }
    if (lane == 0) {
      if (outside) {
        free_place(*to, free_places, state);
        atomicAnd(moved + (r >> 5), ~bit);
      }
      if (flags != nullptr) atomicOr(flags + (r >> 5), bit);
      if (row_clusters != nullptr) row_clusters[r] = (u8)cluster;
    }
    const chunk_t* table = tables + (i64)cluster * SECTIONS * positions;
    const int* start = starts + (i64)cluster * (positions + 1);
#if QUADS
    if (quads) encode_quads(row, chunks, start, f, stage, lane, length);
    else
#endif
      encode_row(row, chunks, table, start, f, stage, lane, length);
    __syncwarp();
    for (int j = lane; j < length; j += 32) {
      to[j] = stage[j];
      stage[j] = 0;
    }
    __syncwarp();
  }
  if (lane == 0 && written) atomicAdd((u64*)state + REWRITTEN, (u64)written);
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    is_last = atomicAdd((u64*)state + DONE, 1ull) == gridDim.x - 1;
    __threadfence();
  }
  __syncthreads();
  if (!is_last) return;
  // The last block closes the gap that the places taken leave among the free ones.
  volatile i64* now = state;
  volatile u32* places = free_places;
  const i64 taken = now[TAKEN], freed = now[FREED], n_free = now[FREE];
  const i64 reused = taken < n_free ? taken : n_free, gap = reused < freed ? reused : freed;
  for (i64 j = threadIdx.x; j < gap; j += blockDim.x)
    places[n_free - reused + j] = places[n_free + freed - 1 - j];
  __syncthreads();
  if (threadIdx.x == 0) {
    now[USED] += taken - reused;
    now[FREE] = n_free - reused + freed;
    now[TAKEN] = now[FREED] = now[DONE] = 0;
    now[LAUNCHES] += 1;
    volatile i64* said = report;
    said[1] = now[REWRITTEN];
    __threadfence_system();
    said[0] = now[LAUNCHES] << 32 | now[USED];
  }
}
