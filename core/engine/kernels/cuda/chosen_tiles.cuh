// Tiles of rows chosen by id, fetched and decoded in turn: what the kernels that store whole rows share
// (gather.cu, join.cu). Needs chosen_rows.cuh before it.

// Decode the tiles `begin`, `begin + blocks` and so on: this block is one of so many.
template <bool STAGED, int LANES>
__device__ __forceinline__ void gather_all(const Args& a, const Table& t, i64* counters, u32* shared, i64 begin,
                                           i64 blocks) {
  __shared__ TileRow fetched[2][32];
  __shared__ int part_bits[WARPS];
  const i64 last = (t.n - 1) / a.tile_rows;
  const Kept kept = prepare<LANES>(a);
  Counts counts = {0, 0};
  // Of short rows, ids are loaded two turns before the rows are fetched, and the lines of the map that
  // they lead to are called for one turn before: a turn is over before these loads would be. Longer
  // rows gain nothing by it. The turn before a block's first tile only fetches it.
  constexpr bool AHEAD = LANES < 32;
  Wanted next, after;
  if (AHEAD) {
    next = positive(a, t, load_wanted(a, t, begin));
    after = load_wanted(a, t, begin + blocks);
  }
  int half = 0;
  for (i64 tile = begin - blocks; tile <= last; tile += blocks) {
    if (STAGED) copy_async_wait<0>();
    // Behind this barrier the tile is there, and no warp looks at the one before it any more.
    __syncthreads();
    if (tile + blocks <= last) {
      if (!AHEAD) next = positive(a, t, load_wanted(a, t, tile + blocks));
      fetch_chosen<STAGED>(a, t, next, fetched[half ^ 1], shared + (half ^ 1) * a.stage_words, counts);
    }
    if (STAGED) copy_async_commit();
    if (AHEAD) {
      next = positive(a, t, after);
      if (t.entries != nullptr && next.row >= 0) prefetch_bucket(t.entries, t.bucket_mask, next.row);
      after = load_wanted(a, t, tile + 3 * blocks);
    }
    if (tile >= begin) decode_tile<STAGED, LANES>(a, kept, 0, fetched[half], shared + half * a.stage_words, part_bits);
    half ^= 1;
  }
  const int lane = threadIdx.x & 31;
  if (counters != nullptr && lane <= HOST_SOURCE && counts.rows) {
    atomicAdd((u64*)counters + lane, (u64)counts.rows);
    atomicAdd((u64*)counters + MAX_SLABS + 1 + lane, (u64)counts.words);
  }
}
