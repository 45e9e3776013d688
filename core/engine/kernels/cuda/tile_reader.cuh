// How a warp reads the streams of a coded tile (tile_format.py): its words come to a ring in shared memory
// by asynchronous copies, from device or mapped host memory, some hundred bytes ahead. LOOKUP_BITS, the
// bits of the longest code, come from the host. Needs async_copy.cuh and bits.cuh.
#define RING_BYTES 1024  // of a warp
#define FETCH_BYTES 256  // that are fetched together; the ring holds four

// The words of one tile. Bytes are numbered from a line of 128 on, in which the tile begins.
struct Ring {
  u8* shared;  // of the block
  int at;      // where the ring lies there, a multiple of its size
  const u32* line;
  int begin, end;  // of the tile, in pieces of 16 bytes
  int chunk;       // that of the next unit; it is there, and so are the two behind it

  // Copy a chunk; what lies outside the tile is not touched.
  __device__ __forceinline__ void fetch(int number, int lane) {
    const int piece = FETCH_BYTES / 16 * number + lane;
    if (lane < FETCH_BYTES / 16 && piece >= begin && piece < end)
      copy_async_16(shared + ((16 * piece & (RING_BYTES - 1)) | at), line + 4 * piece);
    copy_async_commit();
  }
  // Begin to fetch the words from `first` of `words`; no lane looks at the ring any more. Of no words,
  // nothing is fetched.
  __device__ __forceinline__ void start(const u32* words, i64 first, int length, int lane) {
    const int before = (int)(first & 31);
    line = words + (first - before);
    begin = before >> 2;
    end = length ? (before + length + 3) >> 2 : begin;
    chunk = 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) fetch(k, lane);
  }
  // Wait for what was started.
  __device__ __forceinline__ void wait() {
    copy_async_wait<1>();
    __syncwarp();
  }
  // See to it that 512 bytes are there from `byte` on, which is at most so many behind the one before:
  // more than a warp takes while each lane decodes eight symbols, of ten bits at the most.
  __device__ __forceinline__ void advance(int byte, int lane) {
#pragma unroll 1
    while (byte / FETCH_BYTES > chunk) {
      __syncwarp();
      ++chunk;
      fetch(chunk + 3, lane);
      wait();
    }
  }
  __device__ __forceinline__ u32 unit(int byte) const {
    return *(const unsigned short*)(shared + ((byte & (RING_BYTES - 1)) | at));
  }
  __device__ __forceinline__ u32 word(int byte) const {
    return *(const u32*)(shared + ((byte & (RING_BYTES - 1)) | at));
  }
};

// The lanes before this one. Written out, so that it is kept and not worked out each time.
__device__ __forceinline__ u32 lanes_below() {
#ifdef SIMT_HOST
  return (1u << (threadIdx.x & 31)) - 1;
#else
  u32 lanes;
  asm("mov.u32 %0, %%lanemask_lt;" : "=r"(lanes));
  return lanes;
#endif
}

// A lane's stream, and the units that the warp has taken.
struct Reader {
  u32 bits;   // the next ones, from the highest on; behind them 0
  int room;   // 16 less their number: where the next unit belongs
  int next;   // the byte of the next unit
  u32 least;  // of the entries looked up: 0 when a code did not exist

  // Take the next unit, unless 16 - `enough` bits are there.
  __device__ __forceinline__ void ask(const Ring& ring, int enough, u32 below) {
    const bool asks = room > enough;
    const u32 votes = __ballot_sync(FULL, asks);
    // All lanes load, so that there is no branch; those that do not ask, what the next one takes.
    const u32 unit = ring.unit(next + 2 * __popc(votes & below));
    bits |= __funnelshift_l(0, asks ? unit : 0, room);  // a shift modulo 32
    room += asks ? -16 : 0;
    next += 2 * __popc(votes);
  }
  // The entry of the next symbol in a table.
  __device__ __forceinline__ u32 take(const u32* table) {
    const u32 entry = table[bits >> (32 - LOOKUP_BITS)];
    const int count = (int)(entry >> 24);
    bits <<= count;
    room += count;
    least = min(least, entry);
    return entry;
  }
};
