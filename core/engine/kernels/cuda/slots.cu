// Slots of a cache for the rows of a batch: rows that have none get free ones. claim_slots says which
// rows those are; then they are fetched, and give_slots writes the slots of all rows of the batch.
//
// slot_of[N] is the slot of each row, or NO_SLOT; between the two launches CLAIMED - k for the k-th of
// the rows that are to come. Without it each row lies in the slot of its own number. An id out of range
// stands for the first or the last row. claims: how many rows are to come, and the first position of an
// id out of range or all ones; give_slots sets them back.
#include "bits.cuh"
#include "ids.cuh"
#include "mailbox.cuh"

#define THREADS 256
#define CLAIMING (NO_SLOT - 1)
#define CLAIMED (NO_SLOT - 2)

__device__ __forceinline__ i64 in_range(i64 id, i64 n_rows) { return id < 0 ? 0 : id < n_rows ? id : n_rows - 1; }

// wanted: gets the rows that are to come, in any order.
extern "C" __global__ void __launch_bounds__(THREADS)
    claim_slots(const void* __restrict__ ids, int id_bytes, i64 n, i64 n_rows, int* slot_of, i64* wanted,
                u64* claims) {
  const int lane = threadIdx.x & 31;
  const i64 stride = (i64)gridDim.x * THREADS;
  for (i64 first = (i64)blockIdx.x * THREADS + threadIdx.x - lane; first < n; first += stride) {
    bool won = false;
    i64 row = 0;
    if (first + lane < n) {
      const i64 id = load_id(ids, first + lane, id_bytes);
      row = in_range(id, n_rows);
      if (row != id) atomicMin(claims + 1, (u64)(first + lane));
      if (slot_of != nullptr && slot_of[row] == NO_SLOT) won = atomicCAS(slot_of + row, NO_SLOT, CLAIMING) == NO_SLOT;
    }
    const u32 winners = __ballot_sync(FULL, won);
    if (!winners) continue;
    u64 begin = 0;
    if (lane == 0) begin = atomicAdd(claims, (u64)__popc(winners));
    begin = __shfl_sync(FULL, begin, 0);
    if (won) {
      const u64 k = begin + __popc(winners & ((1u << lane) - 1));
      wanted[k] = row;
      slot_of[row] = CLAIMED - (int)k;
    }
  }
}

// slots, kept: get the slot of each id, twice. The rows to come lie from slot `first` on. seen: for each
// slot the number of the last batch that had it. uses, if any, is raised by one for each id of a slot
// with `adds`, and becomes the number of the batch without. counts, zeros: gets the different rows that
// had a slot, and those that had none; miss_count, in host memory that the CPU can read at any time, the latter.
extern "C" __global__ void __launch_bounds__(THREADS)
    give_slots(const void* __restrict__ ids, int id_bytes, i64 n, i64 n_rows, int* slot_of, int first, i64* slots,
               i64* kept, int* seen, int number, u64* uses, int adds, u64* counts, volatile i64* miss_count, u64* claims,
               i64* mailbox) {
  const i64 stride = (i64)gridDim.x * THREADS;
  u32 different = 0;
  for (i64 i = (i64)blockIdx.x * THREADS + threadIdx.x; i < n; i += stride) {
    const i64 row = in_range(load_id(ids, i, id_bytes), n_rows);
    int slot = (int)row;
    if (slot_of != nullptr) {
      const int there = *(volatile int*)(slot_of + row);  // another thread may just have written it
      slot = there >= 0 ? there : first + (CLAIMED - there);
      if (there < 0) slot_of[row] = slot;
    }
    slots[i] = slot;
    kept[i] = slot;
    if (seen[slot] != number && atomicExch(seen + slot, number) != number) ++different;
    if (uses != nullptr) {
      if (adds) atomicAdd(uses + slot, 1ull);
      else uses[slot] = (u64)number;
    }
  }
  different = __reduce_add_sync(FULL, different);
  if ((threadIdx.x & 31) == 0 && different) atomicAdd(counts, (u64)different);
  if (blockIdx.x || threadIdx.x) return;
  const u64 missed = claims[0], bad = claims[1];
  claims[0] = 0;
  claims[1] = ~0ull;
  counts[1] = missed;
  atomicAdd(counts, 0ull - missed);
  if (miss_count != nullptr) *miss_count = (i64)missed;
  if (bad < (u64)n) report(mailbox, ERROR_INDEX, (i64)bad, load_id(ids, (i64)bad, id_bytes), n_rows);
}
