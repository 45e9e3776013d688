// How a warp reads the streams of a coded tile (tile_format.py): its words come to a ring in shared memory
// by asynchronous copies, from device or mapped host memory, some hundred bytes ahead. LOOKUP_BITS, the
// bits of the longest code, come from the host. Needs async_copy.cuh and bits.cuh.
#define RING_WORDS 256    // of a warp
#define RING_UNITS (2 * RING_WORDS)
#define CHUNK_UNITS 128   // 256 bytes, which are fetched together; the ring holds four

// The words of one tile. Units are numbered from a line of 32 words on, in which the tile begins.
struct Ring {
  u32* shared;
  const u32* line;
  int begin, end;  // of the tile, in pieces of 16 bytes
  int chunk;       // the one that holds the next unit, and those behind it up to chunk + 2 are there

  // Copy a chunk; what lies outside the tile is not touched.
  __device__ __forceinline__ void fetch(int number, int lane) {
    const int piece = CHUNK_UNITS / 8 * number + lane;
    if (lane < CHUNK_UNITS / 8 && piece >= begin && piece < end)
      copy_async_16(shared + (4 * piece & (RING_WORDS - 1)), line + 4 * piece);
    copy_async_commit();
  }
  // Begin to fetch the words from `at` of `words`; no lane looks at the ring any more. Of no words,
  // nothing is fetched.
  __device__ __forceinline__ void start(const u32* words, i64 at, int length, int lane) {
    const int first = (int)(at & 31);
    line = words + (at - first);
    begin = first >> 2;
    end = length ? (first + length + 3) >> 2 : begin;
    chunk = 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) fetch(k, lane);
  }
  // Wait for what was started.
  __device__ __forceinline__ void wait() {
    copy_async_wait<1>();
    __syncwarp();
  }
  // See to it that 256 units are there from `unit` on, which is at most so many behind the one before:
  // more than a warp takes while each lane decodes eight symbols, of ten bits at the most.
  __device__ __forceinline__ void advance(int unit, int lane) {
    while (unit / CHUNK_UNITS > chunk) {
      __syncwarp();
      ++chunk;
      fetch(chunk + 3, lane);
      wait();
    }
  }
  __device__ __forceinline__ u32 unit(int number) const {
    return ((const unsigned short*)shared)[number & (RING_UNITS - 1)];
  }
  __device__ __forceinline__ u32 word(int number) const { return shared[number & (RING_WORDS - 1)]; }
};

// A lane's stream, and the units that the warp has taken.
struct Reader {
  u32 bits;   // the next ones, from the highest on; behind them 0
  int left;   // how many
  int next;   // unit, of the ring
  u32 least;  // of the entries looked up: 0 when a code did not exist

  // The entry of the next symbol in a table: of a class whose longest code has `longest` bits.
  __device__ __forceinline__ u32 take(const Ring& ring, const u32* table, int longest, u32 below) {
    const bool asks = left < longest;
    const u32 votes = __ballot_sync(FULL, asks);
    if (asks) {
      bits |= ring.unit(next + __popc(votes & below)) << (16 - left);
      left += 16;
    }
    next += __popc(votes);
    const u32 entry = table[bits >> (32 - LOOKUP_BITS)];
    const int count = (int)(entry >> 24);
    bits <<= count;
    left -= count;
    least = min(least, entry);
    return entry;
  }
};
