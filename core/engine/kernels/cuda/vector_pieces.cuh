// Books, and pieces of streams, that warps make of symbols. Needs vectors.cuh.
// The words of a book and a stream, about: pieces end with a word.
__device__ __forceinline__ u64 words_about(i64 symbols, i64 codes, u64 bits) {
  return field_words(symbols, LENGTH_BITS) + size_words(codes) + (bits + 16 * pieces_of(codes) + 31) / 32;
}

// Write the lengths of a book, by all threads of a block.
__device__ __forceinline__ void write_lengths(const u32* table, int symbols, u32* out) {
  for (int word = threadIdx.x; word < field_words(symbols, LENGTH_BITS); word += blockDim.x) {
    u32 found = 0;
    for (int k = 0; k < 8; ++k)
      if (8 * word + k < symbols) found |= (table[8 * word + k] >> 16) << 4 * k;
    out[word] = found;
  }
}

// Words of a piece that a warp makes.
struct Piece {
  unsigned short symbols[PIECE_CODES + PIECE_CODES / 16];  // those of a lane begin in a bank of its own
  u32 words[PIECE_CODES / 2];
};
__device__ __forceinline__ int staged(int k) { return k + k / LANE_CODES * 2; }

// Put `count` staged symbols into words; `width`: bits of each, 0: as the table says. Return how many words.
__device__ __forceinline__ u32 fill_piece(Piece& piece, const u32* table, int count, int width) {
  const int lane = threadIdx.x & 31;
  const int first = lane * LANE_CODES, last = min(count, first + LANE_CODES);
  __syncwarp();
  u32 bits = 0;
  for (int k = first; k < last; ++k) bits += width ? width : table[piece.symbols[staged(k)]] >> 16;
  const u32 up_to_me = (u32)inclusive_scan((int)bits, lane);
  const u32 words = (__shfl_sync(FULL, up_to_me, 31) + 31) / 32;
  for (u32 k = lane; k < words; k += 32) piece.words[k] = 0;
  __syncwarp();
  u32 word = (up_to_me - bits) >> 5, held_bits = (up_to_me - bits) & 31;
  u64 held = 0;
  for (int k = first; k < last; ++k) {
    const u32 symbol = piece.symbols[staged(k)], entry = width ? symbol : table[symbol];
    held |= (u64)(entry & CODE_MASK_16) << held_bits;
    held_bits += width ? width : entry >> 16;
    if (held_bits >= 32) {
      atomicOr(&piece.words[word++], (u32)held);
      held >>= 32;
      held_bits -= 32;
    }
  }
  if (held) atomicOr(&piece.words[word], (u32)held);
  __syncwarp();
  return words;
}

// Write references of a Huffman code, by a block of ROW_THREADS; return their words.
__device__ u32 write_coded(const Chunk& chunk, const u32* places, const u32* table, int symbols, Piece* pieces,
                           u32* sums) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  u32* const out = (u32*)chunk.references;
  write_lengths(table, symbols, out);
  unsigned short* const sizes = (unsigned short*)(out + field_words(symbols, LENGTH_BITS));
  u32* const words = (u32*)sizes + size_words(chunk.rows);
  if (threadIdx.x == 0) words[-1] = 0;  // what no size fills
  __syncthreads();
  u32 before = 0;
  for (i64 first = 0; first < pieces_of(chunk.rows); first += PIECE_WARPS) {
    const i64 piece = first + warp;
    const i64 begin = piece * PIECE_CODES;
    const int count = warp >= PIECE_WARPS || begin >= chunk.rows ? 0 : (int)min((i64)PIECE_CODES, chunk.rows - begin);
    u32 bits = 0;
    for (int k = lane; k < count; k += 32) bits += table[places[begin + k]] >> 16;
    const u32 size = (__reduce_add_sync(FULL, bits) + 31) / 32;
    u32 total;
    const u32 at = before + sum_before<ROW_THREADS / 32>(lane == 0 ? size : 0, sums, total);
    const u32 start = __shfl_sync(FULL, at, 0);
    if (lane == 0 && count) sizes[piece] = (unsigned short)size;
    before += total;
    if (count == 0) continue;
    for (int k = lane; k < count; k += 32) pieces[warp].symbols[staged(k)] = (unsigned short)places[begin + k];
    fill_piece(pieces[warp], table, count, 0);
    for (u32 k = lane; k < size; k += 32) words[start + k] = pieces[warp].words[k];
    __syncwarp();
  }
  return (u32)(words - out) + before;
}

// Sum up what stands in `sizes`, so that each is the sum of those before it; the sum of all comes last.
__device__ __forceinline__ u32 sum_up(u32* sizes, i64 n, u32* sums) {
  u32 before = 0;
  for (i64 first = 0; first < n; first += THREADS) {
    const i64 k = first + threadIdx.x;
    const u32 size = k < n ? *(volatile u32*)(sizes + k) : 0;
    u32 total;
    const u32 found = before + sum_before<WARPS>(size, sums, total);
    if (k < n) sizes[k] = found;
    before += total;
  }
  if (threadIdx.x == 0) sizes[n] = before;
  return before;
}
