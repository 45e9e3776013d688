// Slots of a cache for the rows of a batch: rows that have none take those of rows that leave.
//
// Four launches on one stream: claim_slots finds the rows of the batch that have no slot, count_slots
// counts how much the rows that may leave are worth, choose_slots takes the slots of those that are worth
// least; then these rows are exchanged, see exchange.cu; give_slots
// changes the map, and writes the slots of all ids of the batch. The host knows none of the numbers.
//
// slot_of[N] is the slot of each row, or NO_SLOT; between the first and the last launch CLAIMED - k for
// the k-th of the rows that are to come. An id out of range stands for the first or the last row.
//
// claims: rows to come, the first position of an id out of range or all ones, that of an offset that is not
// sound or all ones, slots taken whose rows are worth as much as the last ones that leave, slots taken, and
// whether rows were exchanged. give_slots of a batch sets the claims and bins of the next one, which are
// others.
//
// Offsets of the batch's bags, of which there may be no entries, are checked on the way: `sound` gets a copy,
// or where one is not sound no id for each bag but the last one, and the mailbox the error.
//
// A row may leave unless a batch from `oldest` on had it or its slot is pinned. row_in: the row in each
// slot, or NO_ROW; seen: the last batch that had it; since: the batch that fetched it; keys: see
// `evict`; changed: 0 where it is as on the host, its optimizer state too.
#include "bits.cuh"
#include "ids.cuh"
#include "mailbox.cuh"
#include "offsets.cuh"

#define THREADS 256
#define CLAIMING (NO_SLOT - 1)
#define CLAIMED (NO_SLOT - 2)
enum { BY_ORDER = 0, BY_USES = 1, BY_LAST_USE = 2 };  // which row leaves first
enum { MISSING = 0, BAD = 1, BAD_OFFSET = 2, TAKEN_LAST = 3, TAKEN = 4, MOVED = 5 };

__device__ __forceinline__ i64 in_range(i64 id, i64 n_rows) { return id < 0 ? 0 : id < n_rows ? id : n_rows - 1; }

// wanted: gets the rows that are to come, in any order. counts, zeros: gets the different rows that had a slot.
// changed: gets `mark` in the slots marked[n_marked], of which a gradient has come since the batch before.
extern "C" __global__ void __launch_bounds__(THREADS)
    claim_slots(const void* __restrict__ ids, int id_bytes, i64 n, i64 n_rows, int* slot_of, int* seen, int number,
                i64* wanted, u64* counts, u64* claims, int* changed, const i64* __restrict__ marked, i64 n_marked,
                int mark, const void* __restrict__ offsets, int offset_bytes, i64 entries, int last_is_end,
                i64* __restrict__ sound) {
  const int lane = threadIdx.x & 31;
  const i64 begin_of_thread = (i64)blockIdx.x * THREADS + threadIdx.x, stride = (i64)gridDim.x * THREADS;
  for (i64 i = begin_of_thread; i < n_marked; i += stride) changed[marked[i]] = mark;
  copy_offsets(offsets, offset_bytes, entries, n, last_is_end, sound, claims + BAD_OFFSET, begin_of_thread, stride);
  u32 hits = 0;
  for (i64 first = begin_of_thread - lane; first < n; first += stride) {
    bool won = false;
    i64 row = 0;
    if (first + lane < n) {
      const i64 id = load_id(ids, first + lane, id_bytes);
      row = in_range(id, n_rows);
      if (row != id) atomicMin(claims + BAD, (u64)(first + lane));
      const int slot = *(volatile int*)(slot_of + row);
      if (slot >= 0) {
        if (seen[slot] != number && atomicExch(seen + slot, number) != number) ++hits;
      } else if (slot == NO_SLOT) {
        won = atomicCAS(slot_of + row, NO_SLOT, CLAIMING) == NO_SLOT;
      }
    }
    const u32 winners = __ballot_sync(FULL, won);
    if (!winners) continue;
    u64 begin = 0;
    if (lane == 0) begin = atomicAdd(claims + MISSING, (u64)__popc(winners));
    begin = __shfl_sync(FULL, begin, 0);
    if (won) {
      const u64 k = begin + __popc(winners & ((1u << lane) - 1));
      wanted[k] = row;
      slot_of[row] = CLAIMED - (int)k;
    }
  }
  hits = __reduce_add_sync(FULL, hits);
  if (lane == 0 && hits) atomicAdd(counts, (u64)hits);
}

// Of a cache that has every row in the slot of its own number: slots gets those of the ids. seen, number,
// counts and counting as elsewhere. The position that is reported is one of an id out of range.
// progress: blocks that are done with the offsets, 0, and the first position of one that is not sound, all
// ones; they are that again afterwards.
extern "C" __global__ void __launch_bounds__(THREADS)
    keep_slots(const void* __restrict__ ids, int id_bytes, i64 n, i64 n_rows, i64* keys, int* seen, int counting,
               int number, i64* slots, u64* counts, const void* __restrict__ offsets, int offset_bytes, i64 entries,
               int last_is_end, i64* sound, u64* progress, i64* mailbox) {
  __shared__ u64 bad;
  const i64 begin = (i64)blockIdx.x * THREADS + threadIdx.x, stride = (i64)gridDim.x * THREADS;
  u32 hits = 0;
  for (i64 i = begin; i < n; i += stride) {
    const i64 id = load_id(ids, i, id_bytes), row = in_range(id, n_rows);
    slots[i] = row;
    if (row != id) report(mailbox, ERROR_INDEX, i, id, n_rows);
    if (seen[row] != number && atomicExch(seen + row, number) != number) ++hits;
    if (counting == BY_USES) atomicAdd((u64*)keys + row, 1ull);
    else if (counting == BY_LAST_USE) keys[row] = number;
  }
  hits = __reduce_add_sync(FULL, hits);
  if ((threadIdx.x & 31) == 0 && hits) atomicAdd(counts, (u64)hits);
  if (entries == 0) return;
  copy_offsets(offsets, offset_bytes, entries, n, last_is_end, sound, progress + 1, begin, stride);
  __syncthreads();
  if (threadIdx.x == 0) {
    bad = ~0ull;
    __threadfence();
    if (atomicAdd(progress, 1ull) == gridDim.x - 1) {  // the others have copied theirs
      __threadfence();
      bad = *(volatile u64*)(progress + 1);
      progress[0] = 0;
      progress[1] = ~0ull;
    }
  }
  __syncthreads();
  if (bad == ~0ull) return;
  empty_bags(entries, n, last_is_end, sound, threadIdx.x, THREADS);
  if (threadIdx.x == 0) report(mailbox, ERROR_OFFSETS, (i64)bad, 0, n);
}

// Numbers that rise with x, one for each up to 1023, then 32 for each power of two.
__device__ __forceinline__ int steps_up_to(u64 x) {
  if (x < 1024) return (int)x;
  const int top = 63 - __clzll((i64)x);
  const int step = 1024 + (top - 10) * 32 + (int)(x >> (top - 5) & 31);
  return step < BINS - 2 ? step : BINS - 2;
}

// The bin of a slot whose row may leave, those of lower ones first: 0 for a slot that holds none.
__device__ __forceinline__ int bin_of(i64 row, i64 key, int evict, int number, i64 n_rows) {
  if (row < 0) return 0;
  if (evict == BY_USES) return 1 + steps_up_to((u64)key);
  if (evict == BY_LAST_USE) return BINS - 1 - steps_up_to((u64)(number - key));
  const u64 unused = (u64)(n_rows - 1 + key);  // the key is minus the rank, 0 for the most used row
  return 1 + (int)(n_rows < BINS ? unused : unused * (BINS - 1) / (u64)n_rows);
}

__device__ __forceinline__ bool may_leave(const int* seen, const u8* pinned, int oldest, i64 slot) {
  return seen[slot] < oldest && (pinned == nullptr || !pinned[slot]);
}

// bins: gets how many rows of each bin may leave; they were zeros.
extern "C" __global__ void __launch_bounds__(THREADS)
    count_slots(i64 n_slots, i64 n_rows, const i64* row_in, const i64* keys, const int* seen, const u8* pinned,
                int evict, int number, int oldest, u32* bins, const u64* claims) {
  __shared__ u32 counted[BINS];
  if (claims[MISSING] == 0) return;
  for (int b = threadIdx.x; b < BINS; b += THREADS) counted[b] = 0;
  __syncthreads();
  const int lane = threadIdx.x & 31;
  const i64 stride = (i64)gridDim.x * THREADS;
  for (i64 first = (i64)blockIdx.x * THREADS + threadIdx.x - lane; first < n_slots; first += stride) {
    const i64 slot = first + lane;
    int bin = -1;
    if (slot < n_slots && may_leave(seen, pinned, oldest, slot))
      bin = bin_of(row_in[slot], keys[slot], evict, number, n_rows);
    // Most slots have a bin in common.
    const u32 leaves = __ballot_sync(FULL, bin >= 0);
    if (!leaves) continue;
    const int common = __shfl_sync(FULL, bin, __ffs(leaves) - 1);
    const u32 alike = __ballot_sync(FULL, bin == common);
    if (lane == __ffs(leaves) - 1) atomicAdd(counted + common, (u32)__popc(alike));
    if (bin >= 0 && bin != common) atomicAdd(counted + bin, 1u);
  }
  __syncthreads();
  for (int b = threadIdx.x; b < BINS; b += THREADS)
    if (counted[b]) atomicAdd(bins + b, counted[b]);
}

// victims: gets a slot for each of the wanted rows. leaving: gets the row in it where that has changed, else
// NO_ROW. order: ranks of rows, for BY_ORDER; that of the ids where it is left out. counts[2] gets the rows
// that are to be written back.
extern "C" __global__ void __launch_bounds__(THREADS)
    choose_slots(i64 n_slots, i64 n_rows, const i64* row_in, i64* keys, int* seen, int* since, const int* changed,
                 const u8* pinned, const void* order, int order_bytes, int evict, int number, int oldest,
                 const u32* bins, const i64* wanted, i64* victims, i64* leaving, u64* counts, u64* claims) {
  constexpr int EACH = BINS / THREADS;
  __shared__ u32 before[THREADS];
  __shared__ int last_bin;
  __shared__ u32 of_last;
  const u64 missing = claims[MISSING];
  if (missing == 0) return;
  // The last bin that rows leave from, and how many of it leave.
  u32 own = 0;
#pragma unroll
  for (int k = 0; k < EACH; ++k) own += bins[threadIdx.x * EACH + k];
  if (threadIdx.x == 0) {
    last_bin = BINS;
    of_last = 0;
  }
  before[threadIdx.x] = own;
  __syncthreads();
  for (int step = 1; step < THREADS; step *= 2) {
    const u32 more = (int)threadIdx.x >= step ? before[threadIdx.x - step] : 0;
    __syncthreads();
    before[threadIdx.x] += more;
    __syncthreads();
  }
  u64 sum = before[threadIdx.x] - own;
  if (sum < missing && missing <= sum + own) {
    int bin = threadIdx.x * EACH;
    while (sum + bins[bin] < missing) sum += bins[bin++];
    last_bin = bin;
    of_last = (u32)(missing - sum);
  }
  __syncthreads();
  const int lane = threadIdx.x & 31;
  const i64 stride = (i64)gridDim.x * THREADS;
  u32 written = 0;
  for (i64 first = (i64)blockIdx.x * THREADS + threadIdx.x - lane; first < n_slots; first += stride) {
    const i64 slot = first + lane;
    bool takes = false, is_last = false;
    i64 row = NO_ROW;
    if (slot < n_slots && may_leave(seen, pinned, oldest, slot)) {
      row = row_in[slot];
      const int bin = bin_of(row, keys[slot], evict, number, n_rows);
      takes = bin < last_bin;
      is_last = bin == last_bin;
    }
    const u32 last_ones = __ballot_sync(FULL, is_last);
    if (last_ones) {
      u64 before_us = 0;
      if (lane == 0) before_us = *(volatile u64*)(claims + TAKEN_LAST);
      before_us = __shfl_sync(FULL, before_us, 0);
      if (before_us < of_last) {
        if (lane == 0) before_us = atomicAdd(claims + TAKEN_LAST, (u64)__popc(last_ones));
        before_us = __shfl_sync(FULL, before_us, 0);
        if (is_last) takes = before_us + __popc(last_ones & ((1u << lane) - 1)) < of_last;
      }
    }
    const u32 taking = __ballot_sync(FULL, takes);
    if (!taking) continue;
    u64 begin = 0;
    if (lane == 0) begin = atomicAdd(claims + TAKEN, (u64)__popc(taking));
    begin = __shfl_sync(FULL, begin, 0);
    if (!takes) continue;
    const u64 k = begin + __popc(taking & ((1u << lane) - 1));
    const i64 to_come = wanted[k];
    const bool writes = row >= 0 && changed[slot];
    victims[k] = slot;
    leaving[k] = writes ? row : NO_ROW;
    written += writes;
    keys[slot] = evict == BY_USES ? 0 : evict == BY_LAST_USE ? number
                 : order == nullptr ? -to_come : -load_id(order, to_come, order_bytes);
    seen[slot] = number;
    since[slot] = number;
  }
  written = __reduce_add_sync(FULL, written);
  if (lane == 0 && written) atomicAdd(counts + 2, (u64)written);
}

// slots, and kept where there is one: get the slot of each id. counting: BY_USES raises the key of a slot by
// one for each id there, BY_LAST_USE makes it the number of the batch, BY_ORDER leaves it. counts: gets the
// different rows that had no slot. wanted and leaving are NO_ROW again afterwards. Rows for which no slot was
// free, which the host rules out, stand for the one in slot 0 and are reported.
extern "C" __global__ void __launch_bounds__(THREADS)
    give_slots(const void* __restrict__ ids, int id_bytes, i64 n, i64 n_rows, int* slot_of, i64* row_in, i64* keys,
               int* changed, int counting, int number, i64* wanted, const i64* victims, i64* leaving, i64* slots,
               i64* kept, u64* counts, const u64* claims, u64* next_claims, u32* next_bins, i64 entries,
               int last_is_end, i64* sound, i64* mailbox) {
  const i64 stride = (i64)gridDim.x * THREADS;
  const i64 begin = (i64)blockIdx.x * THREADS + threadIdx.x;
  const i64 missing = (i64)claims[MISSING], taken = (i64)claims[TAKEN];
  for (i64 i = begin; i < n; i += stride) {
    const i64 row = in_range(load_id(ids, i, id_bytes), n_rows);
    const int there = *(volatile int*)(slot_of + row);  // another thread may just have written it
    const i64 k = (i64)CLAIMED - there;
    const int slot = there >= 0 ? there : k >= 0 && k < taken ? (int)victims[k] : 0;
    slots[i] = slot;
    if (kept != nullptr) kept[i] = slot;
    if (counting == BY_USES) atomicAdd((u64*)keys + slot, 1ull);
    else if (counting == BY_LAST_USE) keys[slot] = number;
  }
  for (i64 k = begin; k < missing; k += stride) {
    if (k >= taken) {
      slot_of[wanted[k]] = NO_SLOT;
      wanted[k] = NO_ROW;
      continue;
    }
    const i64 slot = victims[k], row = wanted[k], gone = row_in[slot];
    if (gone >= 0) slot_of[gone] = NO_SLOT;
    row_in[slot] = row;
    changed[slot] = 0;
    slot_of[row] = (int)slot;
    wanted[k] = NO_ROW;
    leaving[k] = NO_ROW;
  }
  for (i64 b = begin; b < BINS; b += stride) next_bins[b] = 0;
  const u64 bad = claims[BAD], bad_offset = claims[BAD_OFFSET];
  if (bad_offset != ~0ull) empty_bags(entries, n, last_is_end, sound, begin, stride);
  if (begin) return;
  counts[1] = (u64)missing;
  next_claims[MISSING] = next_claims[TAKEN_LAST] = next_claims[TAKEN] = next_claims[MOVED] = 0;
  next_claims[BAD] = next_claims[BAD_OFFSET] = ~0ull;
  if (taken < missing) report(mailbox, ERROR_SLOTS, taken, missing, n_rows);
  if (bad_offset != ~0ull) report(mailbox, ERROR_OFFSETS, (i64)bad_offset, 0, n);
  if (bad < (u64)n) report(mailbox, ERROR_INDEX, (i64)bad, load_id(ids, (i64)bad, id_bytes), n_rows);
}
