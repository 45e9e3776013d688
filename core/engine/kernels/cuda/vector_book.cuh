// Huffman codes of at most CODE_LIMIT_BITS bits, made by a block of threads: the lengths are those of
// codecs.huffman.code_lengths, symbol by symbol. Needs bits.cuh and vectors.cuh.
#define MERGED (2 * MOST_SYMBOLS)  // items of a level of package-merge at the most

struct BookMaking {
  union {
    u64 keys[MOST_SYMBOLS];  // the count of a symbol, and what puts a later symbol first
    u32 levels[2][MERGED];   // weights of the items of a level, and of the one before
  };
  u32 leaves[MOST_SYMBOLS];                          // counts that are not 0, rarest first
  u32 packages[CODE_LIMIT_BITS - 1][MERGED / 32];    // of each level, the items that are pairs
  unsigned short order[MOST_SYMBOLS];                // the symbol of each leaf
  u8 lengths[MOST_SYMBOLS];
  u32 taken[CODE_LIMIT_BITS];                        // leaves that are taken of each level
  u32 first[CODE_LIMIT_BITS + 1], count[CODE_LIMIT_BITS + 1];
  u32 used;
  u64 bits;
};

// Sort the counts, those of 0 last; equal ones by symbol, the last one first.
__device__ __forceinline__ void sort_counts(BookMaking& b, const u32* counts, int symbols) {
  int places = 2;
  while (places < symbols) places *= 2;
  if (threadIdx.x == 0) b.used = 0;
  __syncthreads();
  for (int s = threadIdx.x; s < places; s += blockDim.x) {
    const u32 found = s < symbols ? counts[s] : 0;
    b.keys[s] = found ? (u64)found << 32 | (MOST_SYMBOLS - 1 - s) : ~0ull;
    b.lengths[s] = 0;
    if (found) atomicAdd(&b.used, 1u);
  }
  __syncthreads();
  for (int size = 2; size <= places; size *= 2) {
    for (int apart = size / 2; apart > 0; apart /= 2) {
      for (int pair = threadIdx.x; pair < places / 2; pair += blockDim.x) {
        const int low = 2 * pair - (pair & (apart - 1)), high = low + apart;
        const u64 x = b.keys[low], y = b.keys[high];
        if ((x > y) == ((low & size) == 0)) {
          b.keys[low] = y;
          b.keys[high] = x;
        }
      }
      __syncthreads();
    }
  }
  for (u32 leaf = threadIdx.x; leaf < b.used; leaf += blockDim.x) {
    const u64 key = b.keys[leaf];
    b.leaves[leaf] = (u32)(key >> 32);
    b.order[leaf] = (unsigned short)(MOST_SYMBOLS - 1 - (u32)key);
  }
  __syncthreads();
}

// Merge leaves and pairs of the items before, level by level; of equal weights a leaf comes first.
__device__ __forceinline__ void merge_packages(BookMaking& b) {
  const u32 leaves = b.used;
  u32 size = leaves;
  for (u32 k = threadIdx.x; k < leaves; k += blockDim.x) b.levels[0][k] = b.leaves[k];
  for (int depth = 0; depth < CODE_LIMIT_BITS - 1; ++depth) {
    const u32* const before = b.levels[depth & 1];
    u32* const level = b.levels[~depth & 1];
    const u32 pairs = size / 2;
    for (int k = threadIdx.x; k < MERGED / 32; k += blockDim.x) b.packages[depth][k] = 0;
    __syncthreads();
    for (u32 k = threadIdx.x; k < leaves + pairs; k += blockDim.x) {
      const bool leaf = k < leaves;
      const u32 me = leaf ? k : k - leaves;
      const u32 weight = leaf ? b.leaves[me] : before[2 * me] + before[2 * me + 1];
      // How many of the others come before it.
      u32 low = 0, high = leaf ? pairs : leaves;
      while (low < high) {
        const u32 middle = (low + high) / 2;
        const bool first = leaf ? before[2 * middle] + before[2 * middle + 1] < weight : b.leaves[middle] <= weight;
        if (first) low = middle + 1;
        else high = middle;
      }
      level[me + low] = weight;
      if (!leaf) atomicOr(&b.packages[depth][(me + low) >> 5], 1u << ((me + low) & 31));
    }
    __syncthreads();
    size = leaves + pairs;
  }
  // The first items of the last level are taken, and what the pairs among them are made of.
  if (threadIdx.x < 32) {
    u32 most = 2 * leaves - 2;
    for (int depth = CODE_LIMIT_BITS - 2; depth >= 0; --depth) {
      u32 inside = 0;
      for (u32 word = threadIdx.x; 32 * word < most; word += 32) {
        const u32 left = most - 32 * word;
        inside += __popc(b.packages[depth][word] & (left < 32 ? (1u << left) - 1 : FULL));
      }
      inside = __reduce_add_sync(FULL, inside);
      if (threadIdx.x == 0) b.taken[depth] = most - inside;
      most = 2 * inside;
    }
    if (threadIdx.x == 0) b.taken[CODE_LIMIT_BITS - 1] = most;
  }
  __syncthreads();
  for (u32 leaf = threadIdx.x; leaf < leaves; leaf += blockDim.x) {
    u32 length = 0;
    for (int level = 0; level < CODE_LIMIT_BITS; ++level) length += b.taken[level] > leaf;
    b.lengths[b.order[leaf]] = (u8)length;
  }
  __syncthreads();
}

// Make the code of symbols that occur so often. `table` gets of each its code with the first bit lowest, and from
// bit 16 on its length; it may be `counts`. Their sum is less than 2^28, so that weights fit 32 bits. b.bits is what
// all codes take. Every thread of the block calls it.
__device__ void make_book(BookMaking& b, const u32* counts, int symbols, u32* table) {
  sort_counts(b, counts, symbols);
  if (threadIdx.x == 0) b.bits = 0;
  if (b.used > 1) merge_packages(b);
  else if (threadIdx.x == 0 && b.used == 1) b.lengths[b.order[0]] = 1;
  if (threadIdx.x <= CODE_LIMIT_BITS) b.count[threadIdx.x] = 0;
  __syncthreads();
  u64 bits = 0;
  for (int s = threadIdx.x; s < symbols; s += blockDim.x) {
    const u32 length = b.lengths[s];
    bits += (u64)counts[s] * length;
    if (length) atomicAdd(&b.count[length], 1u);
  }
  if (bits) atomicAdd(&b.bits, bits);
  __syncthreads();
  if (threadIdx.x == 0) {
    u32 code = 0;
    for (int length = 1; length <= CODE_LIMIT_BITS; ++length) {
      code = length == 1 ? 0 : (code + b.count[length - 1]) << 1;
      b.first[length] = code;
    }
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    const u32 below = (1u << threadIdx.x) - 1;
    for (int first = 0; first < symbols; first += 32) {
      const int s = first + threadIdx.x;
      const u32 length = s < symbols ? b.lengths[s] : 0;
      const u32 same = __match_any_sync(FULL, length);
      const u32 code = length ? b.first[length] + __popc(same & below) : 0;
      __syncwarp();
      if (length && (same & below) == 0) b.first[length] = code + __popc(same);
      __syncwarp();
      if (s < symbols) table[s] = length ? __brev(code) >> (32 - length) | length << 16 : 0;
    }
  }
  __syncthreads();
}
