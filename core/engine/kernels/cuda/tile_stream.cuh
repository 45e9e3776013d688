// Coded tiles that a warp reads: where one lies, its words on their way through a ring in shared memory,
// and its codes as halves in the order of the matrix instruction. Values that are not coded.
//
// GROUPS of 16 tokens, LOSSLESS and VALUE_KIND (0 bfloat16, 1 float16, 2 float32) come from the host.
typedef unsigned short u16;

#define TOKENS (16 * GROUPS)
#define PIECE 512         // bytes that are asked for at once
#define RING (3 * PIECE)  // bytes of a warp's ring; another piece behind them mirrors the first one
#define AHEAD 512         // bytes that a warp takes between refills at most: eight units a lane
#define RING_ROOM (RING + PIECE + 16)  // lanes that take none look at what comes next
#define SHORT_BITS 8      // as in tile_format.py: up to that many, lanes ask before every second symbol
#if VALUE_KIND == 2
#define VALUE_SIZE 4
#else
#define VALUE_SIZE 2
#endif
#define EIGHT_WORDS (2 * VALUE_SIZE)  // words of eight values
#define EXCEPTION_WORDS (VALUE_SIZE / 2)

// ---------------------------------------------------------------- values

__device__ __forceinline__ float value_of_bits(u32 bits) {
#if VALUE_KIND == 0
  return __int_as_float((int)(bits << 16));
#elif VALUE_KIND == 1
  return half_to_float((u16)bits);
#else
  return __int_as_float((int)bits);
#endif
}
__device__ __forceinline__ float value_at(const void* from, i64 i) {
#if VALUE_KIND == 2
  return __ldg((const float*)from + i);
#else
  return value_of_bits(__ldg((const u16*)from + i));
#endif
}
__device__ __forceinline__ void load_eight(const u32* from, float (&x)[8]) {
#pragma unroll
  for (int i = 0; i < EIGHT_WORDS; ++i) {
    const u32 word = __ldg(from + i);
#if VALUE_KIND == 2
    x[i] = __int_as_float((int)word);
#else
    x[2 * i] = value_of_bits(word & 0xffff);
    x[2 * i + 1] = value_of_bits(word >> 16);
#endif
  }
}
__device__ __forceinline__ u16 bits_of_value(float x) {
#if VALUE_KIND == 1
  return float_to_half(x);
#else
  const u32 bits = (u32)__float_as_int(x);
  if ((bits & 0x7fffffff) > 0x7f800000) return (u16)(bits >> 16 | 0x40);  // remains no number
  return (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
#endif
}

// ---------------------------------------------------------------- tiles

struct Source {  // coded tiles of K or of V
  const u32* words;
  i64 n_words;
  const i64* bases;
  const void* lengths;
  int length_bytes;
  i64 n_rows;
  const int* ids;
  int fixed_words;  // of a tile beside its header, units and exceptions
};
struct Coder {  // what a block knows of their symbols, in shared memory
  const char* tables;  // of K and V: one address, so that it stands in no register
  int first;           // where those of this one begin, a multiple of the largest
  // Of each block of positions: where its table begins, a multiple of its size; the mask of an entry's place
  // in it; the bits that a lane needs at an ask; and how symbols are read, above five bits that say by how
  // much what the lane has is turned to the right: turned by `left` - needed bits in addition, the next
  // code's highest bit is that of the mask. See attend_tables.py.
  const int4* blocks;
};
// Symbols by the bits of the longest code, short or long. Codes of wide pairs are bytes, others halves, of
// lossless tiles, which have singles alone, the bits of values that are coded.
// As in attend_tables.py, whose tests compare.
enum { SHORT_PAIRS = 0, LONG_PAIRS = 1, SHORT_SINGLES = 2, LONG_SINGLES = 3, WIDE_PAIRS = 4 };

struct Tile {
  const u32* words;  // null: there is none to be had
  u32 length;        // 0: raw
  u32 units, exceptions;
};

__device__ __forceinline__ u32 load_length(const void* lengths, int bytes, i64 row) {
  if (bytes == 1) return __ldg((const u8*)lengths + row);
  if (bytes == 2) return __ldg((const u16*)lengths + row);
  return __ldg((const u32*)lengths + row);
}

__device__ __forceinline__ void prefetch_line(const void* at) {
#ifndef SIMT_HOST
  asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
#endif
}
// Where the tiles of K and of V lie whose ids have that number; a warp calls it. What the header of each says
// fits into the words that are its own. Loads of both are under way together, and so are their first words.
__device__ __forceinline__ void find_tiles(const Source (&from)[2], i64 number, int dim, Tile (&tiles)[2],
                                           i64* mailbox) {
  const int lane = threadIdx.x & 31;
  const u32 raw_words = TOKENS * dim * VALUE_SIZE / 4;
  i64 id[2], begin[2];
  u32 mine[2], header[2];
#pragma unroll
  for (int s = 0; s < 2; ++s) id[s] = __ldg(from[s].ids + number);
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    const bool known = id[s] >= 0 && id[s] < from[s].n_rows;
    mine[s] = known && lane <= (id[s] & 31) ? load_length(from[s].lengths, from[s].length_bytes, (id[s] & ~31ll) + lane) : 0;
    begin[s] = known ? __ldg(from[s].bases + (id[s] >> 5)) : -1;
  }
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    const int at = id[s] & 31;
    const u32 before = __reduce_add_sync(FULL, lane < at ? (mine[s] ? mine[s] : raw_words) : 0);
    const u32 length = __shfl_sync(FULL, mine[s], at);
    const bool sound = begin[s] >= 0 && begin[s] + before + (length ? length : raw_words) <= from[s].n_words;
    tiles[s].words = sound ? from[s].words + begin[s] + before : 0;
    tiles[s].length = length;
    if (sound && 16 * lane < length) prefetch_line(tiles[s].words + 16 * lane);
  }
#pragma unroll
  for (int s = 0; s < 2; ++s) header[s] = tiles[s].words && tiles[s].length ? __ldg(tiles[s].words) : 0;
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    tiles[s].units = header[s] & 0xffff;
    tiles[s].exceptions = header[s] >> 16;
    if (tiles[s].length && 1 + from[s].fixed_words + (tiles[s].units + 1) / 2 + tiles[s].exceptions * EXCEPTION_WORDS >
                               tiles[s].length)
      tiles[s].words = 0;
    if (tiles[s].words || lane != 0) continue;
    const bool known = id[s] >= 0 && id[s] < from[s].n_rows;
    if (known) report(mailbox, ERROR_DAMAGED, id[s], 0, 0);
    else report(mailbox, ERROR_INDEX, -1, id[s], from[s].n_rows);
  }
}

// ---------------------------------------------------------------- streams

// The units of a tile on their way: they pass through a ring of the warp. All but `bits` and `state`
// are the same in all lanes; `bits` are a lane's last two units, of which the lower `left` bits are not
// used yet, and the lower half of `state` is left - needed bits. There are 31 at the most: a lane asks
// with 15 or less.
struct Stream {
  char* ring;
  const char* tables;
  const char* from;  // the piece that is asked for next, on 16 bytes
  const char* last;  // behind the units
  u32 next, end;     // place of the unit that comes next, and behind what is asked for
  u32 ring_end;      // place
  u32 slot, asked;   // of the next piece in the ring; bytes that were asked for
  u32 bits, state;
  u32 turned;  // `bits` as of the last ask: see Coder
};

// Ask for another piece. The room is free: no lane reads there any more.
__device__ __forceinline__ void ask(Stream& s) {
  const int part = 16 * (threadIdx.x & 31);
  if (s.from + part < s.last) {
    copy_async_16(s.ring + s.slot + part, s.from + part);
    if (s.slot == 0) copy_async_16(s.ring + RING + part, s.from + part);
  }
  copy_async_commit();
  s.from += PIECE;
  s.asked += PIECE;
  s.end += PIECE;
  s.slot = s.slot == RING - PIECE ? 0 : s.slot + PIECE;
}
__device__ __forceinline__ void begin_stream(Stream& s, char* ring, const Tile& tile, int parameter_words) {
  const u64 first = (u64)(tile.words + 1 + parameter_words);
  s.ring = ring;
  s.from = (const char*)(first & ~15ull);
  s.last = (const char*)first + 4 * ((tile.units + 1) / 2);
  s.end = place_of(ring);
  s.ring_end = s.end + RING;
  s.next = s.end + (u32)(first & 15);
  s.slot = s.asked = s.bits = s.state = 0;
#pragma unroll 1
  for (int i = 0; i < RING / PIECE; ++i) ask(s);
  copy_async_wait<1>();
  __syncwarp();
}
// See to it that AHEAD bytes are there: the last piece may be under way.
__device__ __forceinline__ void refill(Stream& s) {
  if (s.next >= s.ring_end) {
    s.next -= RING;
    s.end -= RING;
  }
  if (s.end - s.next < PIECE + AHEAD) {
    __syncwarp();
    ask(s);
    copy_async_wait<1>();
    __syncwarp();
  }
}
// The units that were taken.
__device__ __forceinline__ u32 end_stream(const Stream& s, const Tile& tile, int parameter_words) {
  copy_async_wait<0>();
  __syncwarp();
  const u32 skipped = (u32)((u64)(tile.words + 1 + parameter_words) & 15);
  return (s.asked - (s.end - s.next) - skipped) / 2;
}
struct Class {  // what a block's Coder says, in registers
  u32 table, mask, turn;
};
// SEVERAL symbols follow an ask: what the lane has is turned once for all of them, else on the way to the one.
template <bool SEVERAL>
__device__ __forceinline__ void ask_units(Stream& s, const Class& c, u32 below) {
  s.next += 2 * __popc(take_units(s.bits, s.state, s.next, below));
  if (SEVERAL) s.turned = __funnelshift_r(s.bits, s.bits, c.turn);
}
// The entry of the next symbol: minus its bits in the lower half, codes in the upper one.
template <bool SEVERAL>
__device__ __forceinline__ u32 next_symbol(Stream& s, const Class& c) {
  const u32 from = SEVERAL ? s.turned : s.bits, by = SEVERAL ? s.state : s.state + c.turn;
  const u32 entry = *(const u32*)(s.tables + ((__funnelshift_r(from, from, by) & c.mask) | c.table));
  s.state += entry;
  return entry;
}
// The halves of two codes, for pair number i. Those up to 8 are whole in the upper byte of a half.
template <int SYMBOLS>
__device__ __forceinline__ u32 next_pair(Stream& s, const Class& c, int i, bool always, u32 below) {
  constexpr bool SEVERAL = SYMBOLS != LONG_PAIRS && SYMBOLS != LONG_SINGLES;
  if (SYMBOLS == SHORT_SINGLES || SYMBOLS == LONG_SINGLES) {
    ask_units<SEVERAL>(s, c, below);
    const u32 first = next_symbol<SEVERAL>(s, c);
    if (SYMBOLS == LONG_SINGLES) ask_units<SEVERAL>(s, c, below);
    return __byte_perm(first, next_symbol<SEVERAL>(s, c), 0x7632);
  }
  if (SYMBOLS == LONG_PAIRS || i % 2 == 0 || (SYMBOLS == WIDE_PAIRS && always)) ask_units<SEVERAL>(s, c, below);
  const u32 entry = next_symbol<SEVERAL>(s, c);
  if (SYMBOLS != WIDE_PAIRS) return __byte_perm(entry, 0, 0x3424);
  return subtract_halves(__byte_perm(entry, 0x64646464u, 0x4342), 0x64806480u);  // 1024 + 128 + code
}
// On sm_90 two values take some 11 instructions as a pair of a short code, 16 of a long one, 21 and 32 as
// singles: two look-ups 4 each, an ask 11.
template <int SYMBOLS, class Taker>
__device__ __forceinline__ void decode_block(Stream& s, const Class& c, bool always, u32 below, Taker& taker) {
  const int groups = SYMBOLS == SHORT_PAIRS ? 4 : SYMBOLS == LONG_SINGLES ? 1 : 2;  // of at most eight units a lane
#pragma unroll
  for (int j = 0; j < GROUPS; ++j) {
    u32 a[4];
    if (j % groups == 0) refill(s);
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = next_pair<SYMBOLS>(s, c, i, always, below);
    taker.take(j, a);
  }
}

// Decode a tile. take(j, a) gets the operand of each group j of a block of positions, after begin(b)
// and before finish(b). Returns whether the stream was damaged.
template <class Taker>
__device__ __forceinline__ bool decode_tile(const Tile& tile, const Coder& coder, int blocks, int parameter_words,
                                            char* ring, Taker& taker) {
  const u32 below = (1u << (threadIdx.x & 31)) - 1;
  Stream s;
  begin_stream(s, ring, tile, parameter_words);
  s.tables = coder.tables;
  u32 wrong = 0;
  int needed = 0;
#pragma unroll 1
  for (int b = 0; b < blocks; ++b) {
    const int4 block = coder.blocks[b];
    // The lowest lanes are never all 32: adds nothing, but makes the compiler keep the table in a lane's
    // register. From a uniform one it copies it for each symbol, as it cannot combine two of them.
    const Class c = {(u32)(coder.first + block.x) | below >> 31, (u32)block.y, (u32)block.w};
    const int symbols = block.w >> 5;
    s.state += needed - block.z;
    needed = block.z;
    taker.begin(b);
    if (LOSSLESS) {
      if (symbols == SHORT_SINGLES) decode_block<SHORT_SINGLES>(s, c, false, below, taker);
      else decode_block<LONG_SINGLES>(s, c, true, below, taker);
    } else if (symbols == SHORT_PAIRS) decode_block<SHORT_PAIRS>(s, c, false, below, taker);
    else if (symbols == LONG_PAIRS) decode_block<LONG_PAIRS>(s, c, true, below, taker);
    else if (symbols == SHORT_SINGLES) decode_block<SHORT_SINGLES>(s, c, false, below, taker);
    else if (symbols == LONG_SINGLES) decode_block<LONG_SINGLES>(s, c, true, below, taker);
    else decode_block<WIDE_PAIRS>(s, c, c.mask >> (SHORT_BITS + 2) != 0, below, taker);
    taker.finish(b);
    wrong |= (s.state + 32) & 0xffc0;  // bits where no code begins count in steps of 64
  }
  wrong |= end_stream(s, tile, parameter_words) ^ tile.units;
  return __any_sync(FULL, wrong != 0);
}
