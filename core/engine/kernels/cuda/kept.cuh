// Forms that keep some units of a tensor (kept_format.py): rows of ROW_UNITS units, one block of
// ROW_THREADS threads each, a unit in CHUNK_BYTES. HEADER_BYTES, ALIGN_BYTES, RAW and the sizes come
// from the host. Needs bits.cuh and mailbox.cuh.
#define ROW_THREADS 256
#define ROW_STEPS (ROW_UNITS / ROW_THREADS)
#define ROW_WORDS (ROW_UNITS / 32)
#define ROW_WARPS (ROW_THREADS / 32)
#define DAMAGED (-2)

__device__ __forceinline__ i64 aligned_bytes(i64 n) { return (n + ALIGN_BYTES - 1) / ALIGN_BYTES * ALIGN_BYTES; }

// Bytes that are used when so many units are kept.
__device__ __forceinline__ i64 used_bytes(i64 kept, int unit_bytes, int place_bytes, i64 before_bytes, i64 values_at) {
  return kept ? values_at + aligned_bytes(kept * unit_bytes) + kept * place_bytes : before_bytes;
}

// Units of a row.
__device__ __forceinline__ int units_of(i64 row, i64 units) { return (int)min(units - row * ROW_UNITS, (i64)ROW_UNITS); }

// The sum of a number of each thread of the block, for thread 0. Every thread calls it.
__device__ __forceinline__ int sum_of_block(int x) {
  __shared__ int of_warps[ROW_WARPS];
  x = __reduce_add_sync(FULL, x);
  if ((threadIdx.x & 31) == 0) of_warps[threadIdx.x >> 5] = x;
  __syncthreads();
  int sum = 0;
  if (threadIdx.x == 0)
    for (int w = 0; w < ROW_WARPS; ++w) sum += of_warps[w];
  __syncthreads();
  return sum;
}

// Replace popcounts of the words of a row by their sums over the words before. Every thread calls it,
// after a barrier; another one ends it.
__device__ __forceinline__ void sum_marks(const u32* marks, int* before) {
  if (threadIdx.x < 32) {
    int own[ROW_WORDS / 32], sum = 0;
#pragma unroll
    for (int k = 0; k < ROW_WORDS / 32; ++k) {
      own[k] = sum;
      sum += __popc(marks[threadIdx.x * (ROW_WORDS / 32) + k]);
    }
    const int first = inclusive_scan(sum, threadIdx.x) - sum;
#pragma unroll
    for (int k = 0; k < ROW_WORDS / 32; ++k) before[threadIdx.x * (ROW_WORDS / 32) + k] = first + own[k];
  }
  __syncthreads();
}

// Copy units between addresses that are multiples of a unit; all blocks of the grid take part.
__device__ __forceinline__ void copy_units(const stored_t* __restrict__ from, stored_t* __restrict__ to, i64 units) {
  const i64 thread = (i64)blockIdx.x * blockDim.x + threadIdx.x, threads = (i64)gridDim.x * blockDim.x;
  i64 done = 0;
  if ((((u64)from | (u64)to) & 15) == 0) {
    const i64 pieces = units / (16 / CHUNK_BYTES);
    for (i64 i = thread; i < pieces; i += threads) ((uint4*)to)[i] = __ldg((const uint4*)from + i);
    done = pieces * (16 / CHUNK_BYTES);
  }
  for (i64 i = done + thread; i < units; i += threads) to[i] = from[i];
}

// A row in registers: unit k * ROW_THREADS + threadIdx.x is x[k], and 0 behind the last one.
struct Row {
  stored_t x[ROW_STEPS];

  __device__ __forceinline__ void load(const stored_t* __restrict__ units, int count) {
    if (count == ROW_UNITS) {
#pragma unroll
      for (int k = 0; k < ROW_STEPS; ++k) x[k] = units[k * ROW_THREADS + threadIdx.x];
    } else {
#pragma unroll
      for (int k = 0; k < ROW_STEPS; ++k) {
        const int i = k * ROW_THREADS + threadIdx.x;
        x[k] = i < count ? units[i] : (stored_t)0;
      }
    }
  }
};

// Which units a row keeps, as marks in shared memory; the barrier that makes them visible is the
// caller's. Rule::keeps(row, k, units, count) tells of unit k * ROW_THREADS + threadIdx.x.
template <class Rule>
__device__ __forceinline__ void mark_row(const Row& row, const stored_t* __restrict__ units, int count, u32* marks) {
#pragma unroll
  for (int k = 0; k < ROW_STEPS; ++k) {
    const u32 word = __ballot_sync(FULL, Rule::keeps(row, k, units, count));
    if ((threadIdx.x & 31) == 0) marks[k * ROW_WARPS + (threadIdx.x >> 5)] = word;
  }
}

// Count the units that the rows keep.
template <class Rule>
__device__ __forceinline__ void count_rows(const stored_t* __restrict__ x, i64 units, i64* counts) {
  for (i64 r = blockIdx.x; r * ROW_UNITS < units; r += gridDim.x) {
    Row row;
    const int count = units_of(r, units);
    row.load(x + r * ROW_UNITS, count);
    int kept = 0;
#pragma unroll
    for (int k = 0; k < ROW_STEPS; ++k) kept += Rule::keeps(row, k, x + r * ROW_UNITS, count);
    kept = sum_of_block(kept);
    if (threadIdx.x == 0) counts[r] = kept;
  }
}

// Write the values that the rows keep, and their columns where `columns` says so; else `heads` of
// shared memory gets the columns of each row in turn and `counts` the distance to the next one, less
// one. Or the tensor's own bytes, when the header says that it is raw. Rows that keep nothing are not
// looked at.
template <class Rule, bool COLUMNS>
__device__ __forceinline__ void pack_rows(const stored_t* __restrict__ x, i64 units, i64 starts_at, i64 values_at,
                                          u8* __restrict__ out, unsigned short* heads) {
  __shared__ u32 marks[ROW_WORDS];
  __shared__ int before[ROW_WORDS];
  const i64 kept = *(const i64*)(out + 24);
  if (kept == RAW) {
    copy_units(x, (stored_t*)(out + HEADER_BYTES), units);
    return;
  }
  if (kept == 0) return;
  const i64* starts = (const i64*)(out + starts_at);
  stored_t* values = (stored_t*)(out + values_at);
  u8* places = out + values_at + aligned_bytes(kept * CHUNK_BYTES);
  const u32 below = (1u << (threadIdx.x & 31)) - 1;
  for (i64 r = blockIdx.x; r * ROW_UNITS < units; r += gridDim.x) {
    const i64 first = starts[r];
    const int kept_here = (int)(starts[r + 1] - first);
    if (kept_here == 0) continue;
    Row row;
    const int count = units_of(r, units);
    row.load(x + r * ROW_UNITS, count);
    mark_row<Rule>(row, x + r * ROW_UNITS, count, marks);
    __syncthreads();
    sum_marks(marks, before);
#pragma unroll
    for (int k = 0; k < ROW_STEPS; ++k) {
      const int word = k * ROW_WARPS + (threadIdx.x >> 5);
      if (marks[word] >> (threadIdx.x & 31) & 1) {
        const int rank = before[word] + __popc(marks[word] & below);
        if (rank >= kept_here) continue;  // of a row that others have changed since it was counted
        values[first + rank] = row.x[k];
        const unsigned short column = (unsigned short)(k * ROW_THREADS + threadIdx.x);
        if (COLUMNS) ((unsigned short*)places)[first + rank] = column;
        else heads[rank] = column;
      }
    }
    __syncthreads();
    if (!COLUMNS) {
      for (int j = threadIdx.x; j < kept_here; j += ROW_THREADS) {
        const int next = j + 1 < kept_here ? heads[j + 1] : count;
        places[first + j] = (u8)(next - heads[j] - 1);
      }
      __syncthreads();
    }
  }
}

// How many units a buffer keeps, RAW, or DAMAGED when its header cannot be.
__device__ __forceinline__ i64 sound_kept(const u8* __restrict__ data, i64 data_bytes, i64 elements, int form,
                                          int element_bytes, int place_bytes, i64 before_bytes, i64 values_at) {
  const i64* header = (const i64*)data;
  const i64 used = header[0], kept = header[3];
  const i64 units = elements * (element_bytes / CHUNK_BYTES);
  if (used > data_bytes || header[1] != elements || header[2] != ((i64)element_bytes << 32 | form)) return DAMAGED;
  if (kept == RAW) return used == HEADER_BYTES + units * CHUNK_BYTES ? RAW : DAMAGED;
  if (kept < 0 || kept > units) return DAMAGED;
  return used == used_bytes(kept, CHUNK_BYTES, place_bytes, before_bytes, values_at) ? kept : DAMAGED;
}

// Whether the starts of a row are such as can be.
__device__ __forceinline__ bool sound_starts(const i64* starts, i64 row, int count, i64 kept, i64 units) {
  const i64 first = starts[row], end = starts[row + 1];
  const bool whole = (row > 0 || first == 0) && (row * ROW_UNITS + count < units || end == kept);
  return whole && first >= 0 && first <= end && end <= kept && end - first <= count;
}

// Write the units that a row of `count` keeps to their columns; return whether it is sound. Every thread
// of the block calls it. What is not sound may be written in part. BATCH units of a thread are loaded together.
template <int BATCH>
__device__ __forceinline__ bool put_row(const i64* starts, const stored_t* __restrict__ values,
                                        const unsigned short* __restrict__ columns, i64 row, int count, i64 kept,
                                        i64 units, stored_t* to) {
  bool sound = sound_starts(starts, row, count, kept, units);
  if (!sound) return false;
  const i64 first = starts[row];
  const int kept_here = (int)(starts[row + 1] - first);
  values += first;
  columns += first;
  for (int begin = threadIdx.x; begin < kept_here; begin += BATCH * ROW_THREADS) {
    int column[BATCH], before[BATCH];
    stored_t value[BATCH];
#pragma unroll
    for (int k = 0; k < BATCH; ++k) {
      const int j = begin + k * ROW_THREADS;
      column[k] = before[k] = -1;
      value[k] = 0;
      if (j < kept_here) {
        column[k] = columns[j];
        if (j > 0) before[k] = columns[j - 1];
        value[k] = values[j];
      }
    }
#pragma unroll
    for (int k = 0; k < BATCH; ++k) {
      if (begin + k * ROW_THREADS >= kept_here) break;
      if (before[k] < column[k] && column[k] < count) to[column[k]] = value[k];
      else sound = false;
    }
  }
  return sound;
}
