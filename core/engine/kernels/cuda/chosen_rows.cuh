// Rows chosen by id, out of a table and, for rows that its map holds, out of the cache's slabs: what
// finds and fetches them for the kernels that decode them (gather.cu, join.cu, typed_gemm.cu). Needs decode.cuh
// with GATHER 1, ids.cuh, mailbox.cuh and map.cuh before it.
#define HOST_SOURCE MAX_SLABS

struct Table {  // see TableStorage and CacheStorage in format.py
  const u32* words;
  i64 n_words;
  const i64* bases;
  const void* lengths;
  int length_bytes;
  const u32* flags;
  const u32* moved;
  const u32* overflow;
  i64 overflow_rows;
  int typical_words;
  const longlong2* entries;
  u32 bucket_mask;
  const i64* slabs;
  const void* ids;
  int id_bytes;
  const u32* order;
  i64 n;
  i64 n_items;
  int items_per_row;
  int items_cached;  // whether the map knows items, which the slabs hold raw, not rows
#if JOIN
  u32 head_rows, row_tokens;   // rows of a head; items of `out` that a row is
  u32 head_stride, first;      // items of a head in `out`, and those before its first row
#endif
};

struct Counts {  // of the source that this lane counts: a slab, or HOST_SOURCE
  i64 rows, words;
};

__device__ __forceinline__ bool bit_of(const u32* bits, i64 row) { return bits[row >> 5] >> (row & 31) & 1; }

// The words of the rows before row `mine` of a block of 32, and the length of row `mine` itself, out of
// four rows a lane of eight: what this lane adds to them.
__device__ __forceinline__ void look_at_lengths(const Args& a, const Table& t, i64 row, int lane8, int& before,
                                                int& own) {
  const i64 first = (row & ~(i64)31) + 4 * lane8;
  int lengths[4];
  if (first + 4 <= a.n_rows) {
    if (t.length_bytes == 1) {
      const u32 four = *(const u32*)((const u8*)t.lengths + first);
#pragma unroll
      for (int k = 0; k < 4; ++k) lengths[k] = (int)(four >> (8 * k) & 255);
    } else if (t.length_bytes == 2) {
      const uint2 four = *(const uint2*)((const unsigned short*)t.lengths + first);
      lengths[0] = (int)(four.x & 65535);
      lengths[1] = (int)(four.x >> 16);
      lengths[2] = (int)(four.y & 65535);
      lengths[3] = (int)(four.y >> 16);
    } else {
      const uint4 four = *(const uint4*)((const u32*)t.lengths + first);
      lengths[0] = (int)four.x;
      lengths[1] = (int)four.y;
      lengths[2] = (int)four.z;
      lengths[3] = (int)four.w;
    }
  } else {
#pragma unroll
    for (int k = 0; k < 4; ++k)
      lengths[k] = first + k < a.n_rows ? (int)load_length(t.lengths, first + k, t.length_bytes) : 0;
  }
  const int mine = (int)(row & 31) - 4 * lane8;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if (k < mine) before += size_of(lengths[k], a.row_words);
    if (k == mine) own = lengths[k];
  }
}

// A row that eight lanes look after: its number, or NOTHING, and its row of `out`. NO_ROW among ids that
// are known to be good is NOTHING too: its row of `out` is left as it is.
#define NOTHING (-0x7fffffffffffffffLL - 1)
struct Wanted {
  i64 row;
  u32 out;
#if BY_BYTES
  u32 skip;  // bytes of the row before the item
  i64 item;
#endif
};

// The row of a tile that falls to this lane and its seven neighbours.
__device__ __forceinline__ Wanted load_wanted(const Args& a, const Table& t, i64 tile) {
  const int j = (threadIdx.x >> 5) + ((threadIdx.x & 31) >> 3) * WARPS;
  const i64 position = tile * a.tile_rows + j;
  Wanted w = {};
  w.row = NOTHING;
  if (j < a.tile_rows && position < t.n) {
#if JOIN
    w.row = load_id(t.ids, position, t.id_bytes);
    const u32 head = (u32)position / t.head_rows;
    w.out = head * t.head_stride + t.first + ((u32)position - head * t.head_rows) * t.row_tokens;
#else
    w.out = t.order != nullptr ? t.order[position] : (u32)position;
    w.row = load_id(t.ids, w.out, t.id_bytes);
#endif
  }
  return w;
}

// Count a negative id from the end, and find the row of an item; apart from the id's load, so that this
// is not waited for too early.
__device__ __forceinline__ Wanted positive(const Args& a, const Table& t, Wanted w) {
  if (w.row < 0 && w.row != NOTHING) w.row += t.n_items;
#if BY_BYTES
  w.item = w.row;
  if (t.items_per_row > 1 && w.row >= 0) {
    w.row = w.item / t.items_per_row;
    w.skip = (u32)(w.item - w.row * t.items_per_row) * a.item_bytes;
  }
#endif
  return w;
}

// Describe the rows of a tile and start the copies of its words. Eight lanes look after a row, so that a warp
// finds and fetches four at once; where a tile has but one row a warp, all its lanes copy that.
template <bool STAGED>
__device__ __forceinline__ void fetch_chosen(const Args& a, const Table& t, Wanted wanted, TileRow* fetched, u32* stage,
                                             Counts& counts) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, lane8 = lane & 7;
  const int j = warp + (lane >> 3) * WARPS;
  const i64 row = wanted.row;
  i64 where = NOT_CACHED;
#if BY_BYTES
  const i64 key = t.items_cached ? wanted.item : row;
#else
  const i64 key = row;
#endif
  if (t.entries != nullptr) where = find_location(t.entries, t.bucket_mask, key, lane);
  int before = 0, own = 0;
  const bool in_table = row >= 0 && where == NOT_CACHED;
  if (t.bases != nullptr && __any_sync(FULL, in_table)) {
    if (in_table) look_at_lengths(a, t, row, lane8, before, own);
#pragma unroll
    for (int d = 4; d; d >>= 1) before += __shfl_xor_sync(FULL, before, d);
    own = __shfl_sync(FULL, own, (lane & 24) + ((int)(row & 31) >> 2));
  }
  TileRow s;
  s.at = 0;
  s.length = NO_ROW;
  s.cluster = 0;
  s.source = nullptr;
  s.out = wanted.out;
  s.skip = 0;
#if BY_BYTES
  s.skip = wanted.skip;
#endif
  const u32* p = nullptr;
  int size = 0, counted = 0, from = HOST_SOURCE, lead = 0;
  if (row >= 0) {
    int most;
    bool sound;
    if (where != NOT_CACHED) {
      from = (int)((u64)where >> SLAB_SHIFT);
      const i64 slab = t.slabs[from];
      p = (const u32*)(slab + (i64)((u64)where << (64 - SLAB_SHIFT) >> (64 - SLAB_SHIFT + OFFSET_SHIFT)));
      most = size = (int)(where & ((1u << PACKED_BIT) - 1));
      s.length = where >> PACKED_BIT & 1 ? size : 0;
#if BY_BYTES
      const int bytes = t.items_cached ? a.item_bytes : a.row_bytes;
      const int before = (int)((u64)p & 3);  // of the row, in its first word
      sound = slab != 0 && (s.length ? before == 0 && !too_long(size, a.row_words) : size == (bytes + 3) >> 2);
      if (s.length == 0) {
        p = (const u32*)((const u8*)p - before);
        s.skip = before + (t.items_cached ? 0 : wanted.skip);
        most = size = (before + bytes + 3) >> 2;
        if (t.items_cached) counted = (bytes + 3) >> 2;
      }
#else
      sound = slab != 0 && (s.length ? !too_long(size, a.row_words) : size == a.row_words);
#endif
    } else {
      i64 at;
      if (t.bases != nullptr) {
        at = t.bases[row >> 5] + before;
        s.length = own;
        most = size = size_of(own, a.row_words);
      } else {
        const bool packed = t.flags != nullptr && bit_of(t.flags, row);
        at = row * a.row_words;
        s.length = packed ? (STAGED ? t.typical_words : a.longest_words) : 0;
        size = size_of(s.length, a.row_words);
        most = packed ? a.longest_words : size;
#if BY_BYTES
        if (t.flags == nullptr) {  // a raw table, whose rows lie byte after byte
          at = row * a.row_bytes >> 2;
          s.skip = (u32)(row * a.row_bytes & 3);
          most = size = ((int)s.skip + a.row_bytes + 3) >> 2;
        }
#endif
      }
      sound = at >= 0 && at <= t.n_words - size && !too_long(s.length, a.row_words + (t.bases == nullptr));
      p = t.words + at;
      if (STAGED && most > size) s.source = p;
      if (sound && t.moved != nullptr && bit_of(t.moved, row)) {
        const u32 position = *p;
        sound = position < (u64)t.overflow_rows;
        p = t.overflow + (i64)position * a.row_words;
        s.length = 0;
        most = size = a.row_words;
      }
    }
    if (counted == 0) counted = min(size, a.row_words);
    if (CLUSTERED && a.row_clusters) s.cluster = a.row_clusters[row];
    lead = (int)((u64)p >> 2) & 31;  // words from the line's begin
    const bool fits = !STAGED || lead + most + 4 <= a.stride_words;
    // Strides in the stage are as long as packed rows are; a raw row among them may be longer.
    if (sound && !fits && s.length == 0) {
      s.length = RAW_OUTSIDE;
      s.at = (i64)p;
    } else if (!sound || s.cluster >= a.clusters || !fits) {
      s.length = NO_ROW;
      s.cluster = 0;  // whose profile is there to be looked at
      if (lane8 == 0) report(a.mailbox, ERROR_DAMAGED, row * t.items_per_row, 0, t.n_items);
    } else {
      s.at = STAGED ? lead + j * a.stride_words : (i64)p;
    }
  }
  const bool found = s.length != NO_ROW, staged = found && s.length != RAW_OUTSIDE;
  if (STAGED) {
    if (a.tile_rows > WARPS) {
      if (staged) copy_words(stage + j * a.stride_words, p - lead, 0, lead, lead + size, lane8, 8);
    } else if (__shfl_sync(FULL, (int)staged, 0)) {
      const u32* line = (const u32*)__shfl_sync(FULL, (i64)(p - lead), 0);
      const int begin = __shfl_sync(FULL, lead, 0), end = begin + __shfl_sync(FULL, size, 0);
      copy_words(stage + warp * a.stride_words, line, 0, begin, end, lane, 32);
    }
  }
  if (lane8 == 0 && j < a.tile_rows) fetched[j] = s;
  // One turn for each source that this warp's rows come from, which is one as a rule.
  for (u32 left = __ballot_sync(FULL, found && lane8 == 0); left;) {
    const int source = __shfl_sync(FULL, from, __ffs(left) - 1);
    const u32 same = __ballot_sync(FULL, left >> lane & 1 && from == source);
    const int words = __reduce_add_sync(FULL, same >> lane & 1 ? counted : 0);
    if (lane == source) {
      counts.rows += __popc(same);
      counts.words += words;
    }
    left &= ~same;
  }
}
