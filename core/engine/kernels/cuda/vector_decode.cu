// Bodies of rows of which equal ones are kept once, to rows: all tables and destinations of a step at once.
// Each block of threads takes a part of a chunk (blockIdx.x) of those that blockIdx.y gives it.
//
// open_bodies checks headers and finds the sections, read_streams reads Huffman codes, a thread for each piece,
// find_places finds the distinct row of each row, and write_rows, alone, writes to the tensors, and only of
// chunks that nothing was wrong with.
#include "bits.cuh"
#include "mailbox.cuh"
#include "floats.cuh"
#include "exact.cuh"
#include "vectors.cuh"

#define THREADS 256
#define WARPS (THREADS / 32)
#define STREAM_THREADS 128
#define STREAM_PIECES 32  // of a block
// Numbers that a thread stores at once: more of the short ones take more registers than there are.
#define VECTOR (CHUNK_BYTES == 8 ? 2 : 4)
#if CHUNK_BYTES == 1
typedef u32 vector_t;
#elif CHUNK_BYTES == 2
typedef uint2 vector_t;
#else
typedef uint4 vector_t;
#endif
#define RESOLVED 0x80000000u
#define HAS_OUTLIERS 0x80000000u

// What is known of a chunk's body. Sections are addresses.
struct Body {
  // Of the header and sections, of a stream, of a reference or an outlier: a kernel only reads what those before
  // it found, so that all threads of a block see the same.
  u32 damaged, bad_stream, bad_place;
  u32 raw, coding, references, code_bits, index_bits, distinct, outliers, step, symbols;
  int least;
  u32 unused;
  i64 bitmap, fields, ref_stream, outlier_places, outlier_bits, stream, rest;
};

// Sections of a body, one after the other.
struct Sections {
  const u8* data;
  i64 at, bytes;
  bool fine;
  // The address of the next bytes.
  __device__ __forceinline__ i64 take(i64 count) {
    if (!fine || count > bytes - at) {
      fine = false;
      return 0;
    }
    const i64 found = (i64)(data + at);
    at += ceil_div(count, 4) * 4;
    return found;
  }
};

// What building a table takes.
struct Building {
  u8 lengths[MOST_SYMBOLS];
  unsigned short order[MOST_SYMBOLS];  // symbols by length, and then by number
  unsigned short one[CODE_LIMIT];      // the next symbol, and from bit 10 on the length of its code
  u32 count[16], first[16], base[16];  // by length: symbols, the first code, symbols before
  u32 sums[WARPS];
  u32 wrong;
};

// Build the table of a book: for each CODE_LIMIT_BITS bits, the first one lowest, the symbol, from bit 10 on the
// one after it, from bit 20 on the bits of both, and from bit 24 on those of the first: 0 where there is none.
__device__ bool build_table(Building& b, const u32* book, int symbols, u32* table) {
  if (threadIdx.x < 16) b.count[threadIdx.x] = 0;
  if (threadIdx.x == 0) b.wrong = 0;
  __syncthreads();
  for (int s = threadIdx.x; s < MOST_SYMBOLS; s += THREADS) {
    const u32 length = s < symbols ? book[s >> 3] >> 4 * (s & 7) & 15 : 0;
    b.lengths[s] = (u8)length;
    if (length) atomicAdd(&b.count[length], 1u);
    if (length > CODE_LIMIT_BITS) b.wrong = 1;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    u32 code = 0, before = 0;  // codes as numbers of CODE_LIMIT_BITS bits
    for (int length = 1; length <= CODE_LIMIT_BITS; ++length) {
      b.first[length] = code;
      b.base[length] = before;
      code += b.count[length] << (CODE_LIMIT_BITS - length);
      before += b.count[length];
    }
    if (code > CODE_LIMIT) b.wrong = 1;
  }
  __syncthreads();
  if (b.wrong) return false;
  if (threadIdx.x < 32) {
    const u32 below = (1u << threadIdx.x) - 1;
    for (int s = threadIdx.x; s < symbols + 31 - (symbols + 31) % 32 + (int)threadIdx.x; s += 32) {
      const u32 length = b.lengths[s];
      const u32 same = __match_any_sync(FULL, length);
      const u32 before = b.base[length];
      __syncwarp();
      if (length) {
        b.order[before + __popc(same & below)] = (unsigned short)s;
        if ((same & below) == 0) b.base[length] = before + __popc(same);
      }
      __syncwarp();
    }
  }
  __syncthreads();
  for (u32 bits = threadIdx.x; bits < CODE_LIMIT; bits += THREADS) {
    const u32 code = __brev(bits) >> (32 - CODE_LIMIT_BITS);
    u32 entry = 0;
    for (int length = 1; length <= CODE_LIMIT_BITS; ++length) {
      const u32 room = b.count[length] << (CODE_LIMIT_BITS - length), behind = code - b.first[length];
      // base is by now where the symbols of the length end.
      if (code >= b.first[length] && behind < room) {
        const u32 place = b.base[length] - b.count[length] + (behind >> (CODE_LIMIT_BITS - length));
        entry = b.order[place] | (u32)length << 10;
      }
    }
    b.one[bits] = (unsigned short)entry;
  }
  __syncthreads();
  for (u32 bits = threadIdx.x; bits < CODE_LIMIT; bits += THREADS) {
    const u32 one = b.one[bits], length = one >> 10;
    u32 entry = 0;
    if (length) {
      const u32 next = b.one[bits >> length], both = length + (next >> 10);
      entry = (one & 1023) | length << 20 | length << 24;
      if (next >> 10 && both <= CODE_LIMIT_BITS) entry = (one & 1023) | (next & 1023) << 10 | both << 20 | length << 24;
    }
    table[bits] = entry;
  }
  __syncthreads();
  return true;
}

// Take the book and the stream of so many symbols; return the stream.
__device__ i64 open_stream(Sections& sections, Building& building, i64 count, int symbols, u32* table, u32* starts) {
  const i64 book = sections.take(4 * field_words(symbols, LENGTH_BITS));
  if (!sections.fine) return 0;
  sections.fine = build_table(building, (const u32*)book, symbols, table);
  const i64 sizes = sections.take(4 * size_words(count));
  if (!sections.fine) return 0;
  const i64 pieces = pieces_of(count);
  u64 words = 0;
  for (i64 first = 0; first < pieces; first += THREADS) {
    const i64 piece = first + threadIdx.x;
    const u32 size = piece < pieces ? ((const unsigned short*)sizes)[piece] : 0;
    u32 total;
    const u32 before = sum_before<WARPS>(size, building.sums, total);
    if (piece < pieces) starts[piece] = (u32)(words + before);
    words += total;
  }
  if (threadIdx.x == 0) starts[pieces] = (u32)words;
  if (words >> 32) sections.fine = false;
  return sections.take(4 * (i64)words);
}

// Whether the numbers of a header fit each other and the chunk.
__device__ bool fits(const Chunk& chunk, const Body& body) {
  const bool coded = body.coding == CODING_FIXED || body.coding == CODING_HUFFMAN;
  const bool fields = body.references == REFERENCES_INDEX || body.references == REFERENCES_WINDOW;
  const i64 distinct = body.distinct;
  if (coded && !(HAS_CODES && chunk.flags & FLAG_BOUNDED)) return false;
  if (body.references == REFERENCES_NONE ? distinct != chunk.rows : distinct < 1 || distinct >= chunk.rows) return false;
  if (body.coding == CODING_HUFFMAN ? body.symbols < 1 || body.symbols > MOST_SYMBOLS : body.symbols != 0) return false;
  if (body.code_bits > (body.coding == CODING_FIXED ? 16u : 0u)) return false;
  if (body.index_bits > (fields ? 32u : 0u)) return false;
  if (body.references == REFERENCES_CODED && distinct > MOST_SYMBOLS) return false;
  if (coded && !(body.step > 0 && body.step < INFINITE && body.least <= MOST_CODE && body.least >= -MOST_CODE))
    return false;
  return body.outliers <= distinct * chunk.row;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    open_bodies(const Chunk* chunks, int count, Chunk* described, i64 data, i64 data_bytes, i64 values, i64 rows,
                i64 row, i64 flags, i64 form, i64 bound, i64 state, i64 tables, i64 row_starts, i64 references,
                i64 ranks, i64 places, i64 symbols, i64 slots) {
  __shared__ Building building;
  for (int number = blockIdx.x; number < count; number += gridDim.x) {
    const Chunk chunk = chunks != nullptr
                            ? chunks[number]
                            : Chunk{data, data_bytes, values, rows, row, flags, form, bound, state, tables,
                                    row_starts, references, ranks, places, symbols, slots};
    if (chunks == nullptr && threadIdx.x == 0) *described = chunk;
    const i64 numbers = chunk.rows * chunk.row * parts_of(chunk);
    Sections sections{(const u8*)chunk.data, 0, chunk.data_bytes, true};
    if (chunk.flags & FLAG_FRAMED) {
      const u64* const header = (const u64*)chunk.data;
      const u64 used = header[0];
      sections.fine = used >= HEADER_BYTES && used <= (u64)chunk.data_bytes &&
                      header[1] == (u64)(chunk.rows * chunk.row) && header[2] == (u64)chunk.form &&
                      header[3] == (u64)chunk.row;
      sections.data += HEADER_BYTES;
      sections.bytes = (i64)used - HEADER_BYTES;
    }
    Body body = {};
    const u32* const head = (const u32*)sections.take(BODY_HEADER_BYTES);
    if (sections.fine) {
      const u32 word = head[0];
      body.coding = word & 255;
      body.references = word >> 8 & 255;
      body.code_bits = word >> 16 & 255;
      body.index_bits = word >> 24;
      body.distinct = head[1];
      sections.fine = body.coding <= CODING_SPLIT && body.references <= REFERENCES_CODED;
    }
    if (body.coding == CODING_FIXED || body.coding == CODING_HUFFMAN) {
      const u32* const codes = (const u32*)sections.take(CODE_HEADER_BYTES);
      if (sections.fine) {
        body.outliers = codes[0];
        body.step = codes[1];
        body.least = (int)codes[2];
        body.symbols = codes[3];
      }
    }
    sections.fine = sections.fine && fits(chunk, body);
    if (sections.fine && sections.bytes == BODY_HEADER_BYTES + numbers * CHUNK_BYTES) {
      body.raw = 1;
      body.rest = sections.take(numbers * CHUNK_BYTES);
      sections.fine = body.coding == CODING_RAW && body.references == REFERENCES_NONE;
    } else if (sections.fine) {
      u32* const table = (u32*)chunk.tables;
      if (body.references == REFERENCES_CODED) {
        body.ref_stream = open_stream(sections, building, chunk.rows, (int)body.distinct, table, (u32*)chunk.references);
      } else if (body.references != REFERENCES_NONE) {
        const i64 words = ceil_div(chunk.rows, 32);
        body.bitmap = sections.take(4 * words);
        u32 found = 0;  // references so far
        for (i64 first = 0; sections.fine && first < words; first += THREADS) {
          const i64 word = first + threadIdx.x;
          u32 bits = word < words ? ((const u32*)body.bitmap)[word] : 0;
          if (word == words - 1 && chunk.rows % 32) bits &= (1u << chunk.rows % 32) - 1;
          u32 total;
          const u32 before = sum_before<WARPS>((u32)__popc(bits), building.sums, total);
          if (word < words) ((u32*)chunk.ranks)[word] = found + before;
          found += total;
        }
        const i64 references = chunk.rows - body.distinct;
        body.fields = sections.take(4 * field_words(references, body.index_bits));
        sections.fine = sections.fine && found == references;
      }
      const i64 kept = body.distinct * chunk.row * parts_of(chunk);
      body.outlier_places = sections.take(4 * (i64)body.outliers);
      body.outlier_bits = sections.take((i64)body.outliers * CHUNK_BYTES);
      if (body.coding == CODING_RAW) {
        body.rest = sections.take(kept * CHUNK_BYTES);
      } else if (body.coding == CODING_FIXED) {
        body.rest = sections.take(4 * field_words(kept, body.code_bits));
      } else {
        const int symbols_of_rows = body.coding == CODING_HUFFMAN ? (int)body.symbols : BYTE_SYMBOLS;
        if (sections.fine)
          body.stream = open_stream(sections, building, kept, symbols_of_rows, table + CODE_LIMIT, (u32*)chunk.row_starts);
        if (body.coding == CODING_SPLIT) body.rest = sections.take(kept * (CHUNK_BYTES - 1));
      }
      // Nothing may be left behind them.
      sections.fine = sections.fine && sections.bytes <= sections.at && sections.at < sections.bytes + 4;
    }
    body.damaged = !sections.fine;
    if (threadIdx.x == 0) *(Body*)chunk.state = body;
    __syncthreads();
  }
}

// Read the symbols of a piece to `out`, four at a time; return whether their codes end where the piece does.
template <typename out_t>
__device__ __forceinline__ bool read_piece(const u32* words, u32 at, u32 last, const u32* table, int left, out_t* out) {
  const i64 room = 32 * (i64)(last - at);
  u64 held = 0, waiting = 0;
  u32 bits = 0;
  i64 used = 0;
  int have = 0;  // symbols in `waiting`
  while (left > 0) {
    if (bits < 32) {
      if (at < last) held |= (u64)words[at++] << bits;
      bits += 32;
    }
    const u32 entry = table[held & (CODE_LIMIT - 1)];
    const u32 one = entry >> 24, both = entry >> 20 & 15;
    if (one == 0) return false;
    const bool two = both != one && left > 1;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      if (k == 1 && !two) break;
      waiting |= (u64)(entry >> 10 * k & 1023) << 16 * have;
      if (++have == 4) {
        if (sizeof(out_t) == 2) *(u64*)out = waiting;
        else *(uint4*)out = make_uint4((u32)waiting & 0xffff, (u32)waiting >> 16, (u32)(waiting >> 32) & 0xffff,
                                       (u32)(waiting >> 48));
        out += 4;
        waiting = 0;
        have = 0;
      }
    }
    const u32 step = two ? both : one;
    held >>= step;
    bits -= step;
    used += step;
    left -= two ? 2 : 1;
  }
  for (int k = 0; k < have; ++k) out[k] = (out_t)(waiting >> 16 * k & 0xffff);
  return used <= room && room - used < 32;
}

extern "C" __global__ void __launch_bounds__(STREAM_THREADS) read_streams(const Chunk* chunks, int count) {
  __shared__ __align__(16) u32 table[CODE_LIMIT];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  // A warp's lanes wait for each other: few of them a warp, and more warps.
  const int warp_pieces = STREAM_PIECES / (STREAM_THREADS / 32);
  for (int number = blockIdx.y; number < count; number += gridDim.y) {
    const Chunk& chunk = chunks[number];
    Body* const body = (Body*)chunk.state;
    if (body->damaged || body->raw) continue;
    const i64 coded_rows = body->references == REFERENCES_CODED ? chunk.rows : 0;
    const bool streamed = body->coding == CODING_HUFFMAN || body->coding == CODING_SPLIT;
    const i64 codes = streamed ? body->distinct * chunk.row * parts_of(chunk) : 0;
    const i64 ref_parts = ceil_div(pieces_of(coded_rows), STREAM_PIECES);
    const i64 parts = ref_parts + ceil_div(pieces_of(codes), STREAM_PIECES);
    for (i64 part = blockIdx.x; part < parts; part += gridDim.x) {
      const bool refers = part < ref_parts;
      const i64 total = refers ? coded_rows : codes;
      const uint4* const from = (const uint4*)((const u32*)chunk.tables + (refers ? 0 : CODE_LIMIT));
      __syncthreads();
      for (int i = threadIdx.x; i < CODE_LIMIT / 4; i += STREAM_THREADS) ((uint4*)table)[i] = from[i];
      __syncthreads();
      const i64 piece = (refers ? part : part - ref_parts) * STREAM_PIECES + warp * warp_pieces + lane;
      if (lane < warp_pieces && piece < pieces_of(total)) {
        const u32* const words = (const u32*)(refers ? body->ref_stream : body->stream);
        const u32* const starts = (const u32*)(refers ? chunk.references : chunk.row_starts) + piece;
        const i64 first = piece * PIECE_CODES, rest = total - first;
        const int left = rest < PIECE_CODES ? (int)rest : PIECE_CODES;
        const bool sound =
            refers ? read_piece(words, starts[0], starts[1], table, left, (u32*)chunk.places + first)
                   : read_piece(words, starts[0], starts[1], table, left, (unsigned short*)chunk.symbols + first);
        if (!sound) body->bad_stream = 1;
      }
    }
  }
}

// The first outlier whose place is not before `place`.
__device__ __forceinline__ u32 outlier_from(const Body* body, u64 place) {
  const u32* const places = (const u32*)body->outlier_places;
  u32 low = 0, high = body->outliers;
  while (low < high) {
    const u32 middle = low + (high - low) / 2;
    if (places[middle] < place) low = middle + 1;
    else high = middle;
  }
  return low;
}

// The number of a distinct row, marked where it has outliers.
__device__ __forceinline__ u32 marked(const Body* body, u32 distinct, i64 row) {
  if (body->outliers == 0) return distinct;
  const u32 at = outlier_from(body, (u64)distinct * row);
  const bool has = at < body->outliers && ((const u32*)body->outlier_places)[at] < (u64)(distinct + 1) * row;
  return has ? distinct | HAS_OUTLIERS : distinct;
}

// References of a window, which may lead to others: a tile of rows after the other.
__device__ void follow_window(const Chunk& chunk, Body* body, u32* tile) {
  u32* const places = (u32*)chunk.places;
  const u32* const bitmap = (const u32*)body->bitmap;
  const u32* const fields = (const u32*)body->fields;
  for (i64 first = 0; first < chunk.rows; first += THREADS) {
    const i64 i = first + threadIdx.x;
    u32 found = RESOLVED;
    if (i < chunk.rows) {
      const u32 bits = bitmap[i >> 5], bit = 1u << (i & 31);
      const u32 before = ((const u32*)chunk.ranks)[i >> 5] + __popc(bits & (bit - 1));
      if (bits & bit) {
        const i64 field = read_field(fields, before, (int)body->index_bits), from = i - field - 1;
        if (from < 0) body->bad_place = 1;
        else if (from < first) found = places[from] | RESOLVED;
        else found = (u32)(from - first);
      } else {
        found = (u32)(i - before) | RESOLVED;
      }
    }
    tile[threadIdx.x] = found;
    while (__syncthreads_or(!(found & RESOLVED))) {
      if (!(found & RESOLVED)) found = tile[found];
      __syncthreads();
      tile[threadIdx.x] = found;
    }
    if (i < chunk.rows) places[i] = marked(body, found & ~RESOLVED, chunk.row);
    __syncthreads();
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) find_places(const Chunk* chunks, int count) {
  __shared__ u32 tile[THREADS];
  const i64 me = (i64)blockIdx.x * THREADS + threadIdx.x, stride = (i64)gridDim.x * THREADS;
  for (int number = blockIdx.y; number < count; number += gridDim.y) {
    const Chunk& chunk = chunks[number];
    Body* const body = (Body*)chunk.state;
    if (body->damaged || body->bad_stream || body->raw) continue;
    const u64 kept = (u64)body->distinct * chunk.row;
    const u32* const outliers = (const u32*)body->outlier_places;
    bool wrong = false;
    for (i64 k = me; k < body->outliers; k += stride)
      wrong = wrong || outliers[k] >= kept || (k > 0 && outliers[k] <= outliers[k - 1]);
    u32* const places = (u32*)chunk.places;
    if (body->references == REFERENCES_WINDOW) {
      if (blockIdx.x == 0) follow_window(chunk, body, tile);
    } else if (body->references == REFERENCES_INDEX) {
      const u32* const bitmap = (const u32*)body->bitmap;
      for (i64 i = me; i < chunk.rows; i += stride) {
        const u32 bits = bitmap[i >> 5], bit = 1u << (i & 31);
        const u32 before = ((const u32*)chunk.ranks)[i >> 5] + __popc(bits & (bit - 1));
        u32 found = (u32)i - before;
        if (bits & bit) found = read_field((const u32*)body->fields, before, (int)body->index_bits);
        if (found >= body->distinct) wrong = true;
        else places[i] = marked(body, found, chunk.row);
      }
    } else if (body->outliers) {  // of CODED, places are there
      const bool coded = body->references == REFERENCES_CODED;
      for (i64 i = me; i < chunk.rows; i += stride) places[i] = marked(body, coded ? places[i] : (u32)i, chunk.row);
    }
    if (wrong) body->bad_place = 1;
  }
}

// A number of the distinct rows, by its place among them.
__device__ __forceinline__ stored_t kept_number(const Chunk& chunk, const Body& body, u64 place) {
  const u8* const rest = (const u8*)body.rest;
  if (body.coding == CODING_RAW) return load_number(rest, (i64)place);
  if (body.coding == CODING_SPLIT) {
    const u64 last = ((const unsigned short*)chunk.symbols)[place];
    u64 bits = last << 8 * (CHUNK_BYTES - 1);
#pragma unroll
    for (int k = 0; k < CHUNK_BYTES - 1; ++k) bits |= (u64)rest[place * (CHUNK_BYTES - 1) + k] << 8 * k;
    return (stored_t)bits;
  }
#if HAS_CODES
  const u32 symbol = body.coding == CODING_HUFFMAN ? ((const unsigned short*)chunk.symbols)[place]
                                                   : read_field((const u32*)rest, (i64)place, (int)body.code_bits);
  const float value = multiply_exact((float)(body.least + (int)symbol), __uint_as_float(body.step));
#if KIND == 2
  return __float_as_uint(value);
#elif KIND == 1
  return (stored_t)half_bits(value);
#else
  return (stored_t)brain_bits(value);
#endif
#else
  return 0;
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS) write_rows(const Chunk* chunks, int count, i64* mailbox) {
  for (int number = blockIdx.y; number < count; number += gridDim.y) {
    const Chunk& chunk = chunks[number];
    const Body body = *(const Body*)chunk.state;
    if (body.damaged || body.bad_stream || body.bad_place) {
      if (blockIdx.x == 0 && threadIdx.x == 0) report(mailbox, ERROR_BLOB, number, 0, 0);
      continue;
    }
    const u64 row = (u64)(chunk.row * parts_of(chunk)), numbers = (u64)chunk.rows * row;
    const u32* const places = (const u32*)chunk.places;
    stored_t* const out = (stored_t*)chunk.values;
    const bool wide = chunk.values % sizeof(vector_t) == 0;
    const bool follows = !body.raw && (body.references != REFERENCES_NONE || body.outliers);
    const u64 stride = (u64)gridDim.x * THREADS * VECTOR;
    for (u64 first = ((u64)blockIdx.x * THREADS + threadIdx.x) * VECTOR; first < numbers; first += stride) {
      union {
        stored_t each[VECTOR];
        vector_t all;
      } v;
      u64 i = 0, j = 0;
      u32 place = 0;
      if (follows) {
        // Fewer than 2^32: a division of half the length.
        i = (u32)first / (u32)row;
        j = first - i * row;
        place = places[i];
      }
#pragma unroll
      for (int k = 0; k < VECTOR; ++k) {
        if (first + k >= numbers) break;
        u64 at = first + k;
        if (follows) {
          if (j == row) {
            j = 0;
            place = places[++i];
          }
          at = (u64)(place & ~HAS_OUTLIERS) * row + j;
          ++j;
        }
        if (body.raw) {
          v.each[k] = load_number((const u8*)body.rest, (i64)at);
        } else {
          v.each[k] = kept_number(chunk, body, at);
          if (place & HAS_OUTLIERS) {
            const u32 outlier = outlier_from(&body, at);
            if (outlier < body.outliers && ((const u32*)body.outlier_places)[outlier] == at)
              v.each[k] = ((const stored_t*)body.outlier_bits)[outlier];
          }
        }
      }
      if (wide && first + VECTOR <= numbers) {
        *(vector_t*)(out + first) = v.all;
      } else {
#pragma unroll
        for (int k = 0; k < VECTOR; ++k)
          if (first + k < numbers) out[first + k] = v.each[k];
      }
    }
  }
}
