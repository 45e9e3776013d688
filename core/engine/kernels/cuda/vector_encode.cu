// Rows to bodies in which equal ones are kept once: all tables and destinations of a step at once, and nobody waits
// for a size. Each block of threads takes parts of a chunk (blockIdx.x) of those that blockIdx.y gives it.
//
// begin_chunks finds ranges and clears what the others count in; quantise_rows makes codes; find_rows puts rows
// into a hash table whose slots keep the first of equal ones; number_rows, a block for each chunk, numbers the
// distinct ones and writes the references; count_codes counts what is left, and the last block of a chunk makes the
// code; measure_pieces measures each piece, and the last block finds where each begins; place_bodies finds where each
// body begins; write_bodies writes them.
#include "bits.cuh"
#include "floats.cuh"
#include "exact.cuh"
#include "vectors.cuh"
#include "vector_book.cuh"

#define THREADS 256
#define WARPS (THREADS / 32)
#define ROW_THREADS 512  // of a block that numbers the rows of a chunk
#define PIECE_WARPS 8    // of them, those that write pieces
#define NO_SLOT FULL
#define MARKED FULL      // in place of the hash of a row with outliers
#define LANE_CODES (PIECE_CODES / 32)
#define LANE_UNITS 8     // units of a row that a lane compares, before the row takes more lanes
#define AT_ONCE 4        // numbers that a thread loads before it looks at them
#define CODE_MASK_16 0xffffu
#define NO_CODE_BITS 0x8000u  // those of NO_CODE

#include "vector_draft.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    begin_chunks(const Chunk* chunks, int count, Chunk* described, i64 data, i64 data_bytes, i64 values, i64 rows,
                 i64 row, i64 flags, i64 form, i64 bound, i64 state, i64 tables, i64 row_starts, i64 references,
                 i64 ranks, i64 places, i64 symbols, i64 slots) {
#if HAS_CODES
  __shared__ u32 least_of_warp[WARPS], largest_of_warp[WARPS];
#endif
  const i64 me = (i64)blockIdx.x * THREADS + threadIdx.x, stride = (i64)gridDim.x * THREADS;
  for (int number = blockIdx.y; number < count; number += gridDim.y) {
    const Chunk chunk = chunks != nullptr
                            ? chunks[number]
                            : Chunk{data, data_bytes, values, rows, row, flags, form, bound, state, tables,
                                    row_starts, references, ranks, places, symbols, slots};
    if (chunks == nullptr && me == 0) *described = chunk;
    for (i64 k = me; k < MOST_SYMBOLS; k += stride) counts_of(chunk)[k] = 0;
    if (chunk.flags & FLAG_REFERENCES && chunk.flags >> WINDOW_AT == 0)
      for (i64 k = me, n = slots_for(chunk.rows); k < n; k += stride) ((u32*)chunk.slots)[k] = NO_SLOT;
    if (me == 0) {
      Draft draft = {};
      draft.range_parts = gridDim.x;
      draft.least = MOST_CODE;
      draft.largest = -MOST_CODE;
      *(Draft*)chunk.state = draft;
    }
#if HAS_CODES
    if (chunk.flags & FLAG_RELATIVE) {
      const i64 elements = chunk.rows * chunk.row;
      u32 least = FULL, largest = 0;
      for (i64 first = me; first < elements; first += AT_ONCE * stride) {
        stored_t bits[AT_ONCE];
        load_numbers(chunk, first, stride, elements, bits);
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) {
          const float value = float_of(bits[j]);
          if (first + j * stride >= elements || (__float_as_uint(value) & INFINITE) == INFINITE) continue;
          least = min(least, ordered(value));
          largest = max(largest, ordered(value));
        }
      }
      least = __reduce_min_sync(FULL, least);
      largest = __reduce_max_sync(FULL, largest);
      if ((threadIdx.x & 31) == 0) {
        least_of_warp[threadIdx.x >> 5] = least;
        largest_of_warp[threadIdx.x >> 5] = largest;
      }
      __syncthreads();
      if (threadIdx.x == 0) {
        for (int warp = 0; warp < WARPS; ++warp) {
          least = min(least, least_of_warp[warp]);
          largest = max(largest, largest_of_warp[warp]);
        }
        ranges_of(chunk)[2 * blockIdx.x] = least;
        ranges_of(chunk)[2 * blockIdx.x + 1] = largest;
      }
      __syncthreads();
    }
#endif
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) quantise_rows(const Chunk* chunks, int count) {
#if HAS_CODES
  const i64 me = (i64)blockIdx.x * THREADS + threadIdx.x, stride = (i64)gridDim.x * THREADS;
  for (int number = blockIdx.y; number < count; number += gridDim.y) {
    const Chunk& chunk = chunks[number];
    if (!(chunk.flags & FLAG_BOUNDED)) continue;
    Draft* const draft = (Draft*)chunk.state;
    const double bound = bound_of(chunk, draft);
    const float step = step_of(bound);
    if (!(step > 0)) continue;
    if (me == 0) draft->step = __float_as_uint(step);
    const float inverse = reciprocal_exact(step);
    const i64 elements = chunk.rows * chunk.row;
    int least = MOST_CODE, largest = -MOST_CODE;
    u32 outliers = 0;
    for (i64 first = me; first < elements; first += AT_ONCE * stride) {
      stored_t bits[AT_ONCE];
      load_numbers(chunk, first, stride, elements, bits);
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j) {
        const i64 k = first + j * stride;
        if (k >= elements) break;
        const float value = float_of(bits[j]);
        const float scaled = rintf(multiply_exact(value, inverse));
        int code = NO_CODE;
        if (fabsf(scaled) <= (float)MOST_CODE) {  // not of NaN
          const float decoded = rounded(multiply_exact(scaled, step));
          if (fabs(widened(value) - widened(decoded)) <= bound) code = (int)scaled;
        }
        if (code == NO_CODE) {
          ++outliers;
        } else {
          least = min(least, code);
          largest = max(largest, code);
        }
        ((short*)chunk.symbols)[k] = (short)code;
      }
    }
    least = __reduce_min_sync(FULL, least);
    largest = __reduce_max_sync(FULL, largest);
    outliers = __reduce_add_sync(FULL, outliers);
    if ((threadIdx.x & 31) == 0) {
      if (least <= largest) {
        atomicMin(&draft->least, least);
        atomicMax(&draft->largest, largest);
      }
      if (outliers) atomicAdd(&draft->outliers, outliers);
    }
  }
#endif
}

#include "vector_rows.cuh"

// Whether references are looked for.
__device__ __forceinline__ bool refers(const Chunk& chunk) { return chunk.flags & FLAG_REFERENCES && chunk.rows > 1; }

extern "C" __global__ void __launch_bounds__(THREADS, 3) find_rows(const Chunk* chunks, int count) {
  const int lane = threadIdx.x & 31;
  for (int number = blockIdx.y; number < count; number += gridDim.y) {
    const Chunk& chunk = chunks[number];
    if (!refers(chunk)) continue;
    const Rows rows = rows_of(chunk, *(const Draft*)chunk.state);
    // Lanes that take a row: few, so that a warp has several on their way, of all but long ones.
    int lanes = 1;
    while (lanes < 32 && LANE_UNITS * lanes < rows.units) lanes *= 2;
    const int first_lane = lane & -lanes, warp_rows = 32 / lanes;
    const u32 group = lanes == 32 ? FULL : ((1u << lanes) - 1) << first_lane;
    const bool leads = lane == first_lane;
    const bool windowed = chunk.flags >> WINDOW_AT;
    u32* const slots = (u32*)chunk.slots;
    u32* const found = (u32*)chunk.places;
    const u32 mask = slots_for(chunk.rows) - 1;
    const i64 stride = (i64)gridDim.x * WARPS * warp_rows;
    i64 first = ((i64)blockIdx.x * WARPS + (threadIdx.x >> 5)) * warp_rows;
    for (; first < chunk.rows; first += stride) {
      const i64 i = first + first_lane / lanes;
      const bool here = i < chunk.rows;
      u32 hash = 0;
      bool marked = false;
#pragma unroll 4
      for (i64 at = lane - first_lane; here && at < rows.units; at += lanes) {
        const u64 unit = rows.unit(i, at);
        marked = marked || rows.outlies(unit);
        hash += mixed(unit, at);
      }
      for (int apart = 1; apart < lanes; apart *= 2) hash += __shfl_xor_sync(FULL, hash, apart);
      marked = (__ballot_sync(FULL, marked) & group) != 0;
      if (here && leads && (marked || windowed)) found[i] = marked ? MARKED : hash & (MARKED >> 1);
      bool done = !here || marked || windowed;
      u32 at = (hash ^ hash >> 16) & mask;
      while (__any_sync(FULL, !done)) {
        u32 other = 0;
        if (leads && !done) {
          other = *(volatile u32*)(slots + at);
          if (other == NO_SLOT) {
            other = atomicCAS(slots + at, NO_SLOT, (u32)i);
            if (other == NO_SLOT) other = (u32)i;
          }
        }
        other = __shfl_sync(FULL, other, first_lane);
        bool differs = false;
        if (!done && other != (u32)i)
#pragma unroll 4
          for (i64 k = lane - first_lane; k < rows.units; k += lanes)
            differs = differs || rows.unit(i, k) != rows.unit(other, k);
        differs = (__ballot_sync(FULL, differs) & group) != 0;
        if (!done && !differs) {
          // The row with the least number is kept: any other has the same content.
          if (leads) {
            if (other > (u32)i) atomicMin(slots + at, (u32)i);
            found[i] = at;
          }
          done = true;
        }
        at = (at + 1) & mask;
      }
    }
  }
}

#include "vector_pieces.cuh"

extern "C" __global__ void __launch_bounds__(ROW_THREADS, 1) number_rows(const Chunk* chunks, int count) {
  __shared__ __align__(16) u8 shared[PIECE_WARPS * sizeof(Piece)];
  Piece* const pieces = (Piece*)shared;
  BookMaking& making = *(BookMaking*)shared;
  __shared__ u32 table[MOST_SYMBOLS];
  __shared__ u32 sums[ROW_THREADS / 32];
  for (int number = blockIdx.x; number < count; number += gridDim.x) {
    const Chunk& chunk = chunks[number];
    Draft* const draft = (Draft*)chunk.state;
    const u32 n = (u32)chunk.rows, window = (u32)(chunk.flags >> WINDOW_AT);
    u32 kind = REFERENCES_NONE, index_bits = 0, distinct = n, words = 0;
    if (refers(chunk)) {
      u32* const found = (u32*)chunk.places;
      u32* const numbers = found + n;  // of distinct rows; of a window distances
      u32* const fields = numbers + n;
      u32* const literals = (u32*)chunk.ranks;
      const u32* const slots = (const u32*)chunk.slots;
      const Rows rows = rows_of(chunk, *draft);
      if (window) {
        for (u32 i = threadIdx.x >> 5; i < n; i += ROW_THREADS / 32) {
          const u32 distance = distance_back(rows, found, i, window);
          if ((threadIdx.x & 31) == 0) numbers[i] = distance;
        }
        __syncthreads();
      }
      distinct = 0;
      for (u32 first = 0; first < n; first += ROW_THREADS * AT_ONCE) {
        const u32 begin = first + threadIdx.x * AT_ONCE;
        u32 seen[AT_ONCE], here = 0;  // here: bit j of row begin + j, where it is distinct
#pragma unroll
        for (u32 j = 0; j < AT_ONCE; ++j) seen[j] = begin + j < n ? (window ? numbers : found)[begin + j] : 0;
#pragma unroll
        for (u32 j = 0; j < AT_ONCE; ++j) {
          const u32 i = begin + j;
          const bool literal = i < n && (window ? seen[j] == 0 : seen[j] == MARKED || slots[seen[j]] == i);
          here |= (u32)literal << j;
        }
        u32 total;
        u32 before = distinct + sum_before<ROW_THREADS / 32>((u32)__popc(here), sums, total);
#pragma unroll
        for (u32 j = 0; j < AT_ONCE; ++j) {
          const u32 i = begin + j;
          if (i >= n) break;
          const bool literal = here >> j & 1;
          if (window && !literal) fields[i - before] = seen[j] - 1;
          if (!window) numbers[i] = literal ? before : i - before;  // its number, or the number of its field
          if (literal) literals[before++] = i;
        }
        distinct += total;
      }
      __syncthreads();
      if (distinct < n) {
        const bool few = !window && distinct <= MOST_SYMBOLS;
        for (u32 k = threadIdx.x; k < MOST_SYMBOLS; k += ROW_THREADS) table[k] = 0;
        __syncthreads();
        for (u32 begin = threadIdx.x; !window && begin < n; begin += ROW_THREADS * AT_ONCE) {
          u32 first[AT_ONCE], place[AT_ONCE];  // the first row with the content of a row, and its number
#pragma unroll
          for (u32 j = 0; j < AT_ONCE; ++j) {
            const u32 i = begin + j * ROW_THREADS;
            first[j] = i < n ? found[i] : MARKED;
            first[j] = first[j] == MARKED ? min(i, n - 1) : slots[first[j]];
          }
#pragma unroll
          for (u32 j = 0; j < AT_ONCE; ++j) place[j] = numbers[first[j]];
#pragma unroll
          for (u32 j = 0; j < AT_ONCE; ++j) {
            const u32 i = begin + j * ROW_THREADS;
            if (i >= n) break;
            if (first[j] != i) fields[numbers[i]] = place[j];
            found[i] = place[j];
            if (few) atomicAdd(&table[place[j]], 1u);
          }
        }
        __syncthreads();
        kind = window ? REFERENCES_WINDOW : REFERENCES_INDEX;
        index_bits = bits_for(window ? window - 1 : distinct - 1);
        const u32 bitmap_words = (n + 31) / 32;
        words = bitmap_words + (u32)field_words(n - distinct, index_bits);
        u32* const out = (u32*)chunk.references;
        // No code of less than a bit.
        if (few && field_words(distinct, LENGTH_BITS) + bitmap_words <= words) {
          make_book(making, table, (int)distinct, table);
          if (words_about(distinct, n, making.bits) < words) {
            kind = REFERENCES_CODED;
            index_bits = 0;
          }
          __syncthreads();
        }
        if (kind == REFERENCES_CODED) {
          words = write_coded(chunk, found, table, (int)distinct, pieces, sums);
        } else {
#pragma unroll 4
          for (u32 first = 0; first < n; first += ROW_THREADS) {
            const u32 i = first + threadIdx.x;
            bool refers_back = false;
            if (i < n) refers_back = window ? numbers[i] != 0 : literals[found[i]] != i;
            const u32 bits = __ballot_sync(FULL, refers_back);
            if ((threadIdx.x & 31) == 0 && i < n) out[i / 32] = bits;
          }
          // 32 fields are whole words.
          const u32 references = n - distinct;
          for (u32 first = 32 * threadIdx.x; first < references; first += 32 * ROW_THREADS) {
            u32* to = out + bitmap_words + (i64)first * index_bits / 32;
            u64 held = 0;
            u32 bits = 0;
            for (u32 k = first; k < min(references, first + 32); ++k) {
              held |= (u64)fields[k] << bits;
              bits += index_bits;
              if (bits >= 32) {
                *to++ = (u32)held;
                held >>= 32;
                bits -= 32;
              }
            }
            if (bits) *to = (u32)held;
          }
        }
        // What a row takes that is none, about.
        const u64 row_bits = rows.codes != nullptr ? 2 * chunk.row : 4 * rows.units * CHUNK_BYTES;
        if (32 * (u64)words >= (n - distinct) * row_bits) kind = REFERENCES_NONE;
      }
      if (kind == REFERENCES_NONE) {
        distinct = n;
        index_bits = words = 0;
      }
    }
    if (threadIdx.x == 0) {
      draft->references = kind;
      draft->index_bits = index_bits;
      draft->distinct = distinct;
      draft->reference_words = words;
    }
    __syncthreads();
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) count_codes(const Chunk* chunks, int count) {
  __shared__ __align__(16) u8 shared[sizeof(BookMaking)];
  __shared__ u32 counts[MOST_SYMBOLS];
  __shared__ u32 last;
  const i64 me = (i64)blockIdx.x * THREADS + threadIdx.x, stride = (i64)gridDim.x * THREADS;
  for (int number = blockIdx.y; number < count; number += gridDim.y) {
    const Chunk& chunk = chunks[number];
    Draft* const draft = (Draft*)chunk.state;
    const Kept kept = kept_of(chunk, *draft);
    const int symbols = symbols_of(chunk, *draft);
    if (symbols) {
      for (int s = threadIdx.x; s < MOST_SYMBOLS; s += THREADS) counts[s] = 0;
      __syncthreads();
      // Lanes whose symbols are equal wait for each other: of few symbols there are several counts.
      int copies = 32;
      while (copies * symbols > MOST_SYMBOLS) copies /= 2;
      const int mine = threadIdx.x & (copies - 1);
      for (i64 k = me; k < kept.count; k += stride) atomicAdd(&counts[kept.symbol(k) * copies + mine], 1u);
      __syncthreads();
      for (int s = threadIdx.x; s < symbols; s += THREADS) {
        u32 found = 0;
        for (int copy = 0; copy < copies; ++copy) found += counts[s * copies + ((copy + s) & (copies - 1))];
        if (found) atomicAdd(counts_of(chunk) + s, found);
      }
    }
    if (is_last(&draft->counted, &last)) {
      const bool coded = kept.codes != nullptr;
      const u32 width = coded ? bits_for((u32)(draft->largest - draft->least)) : 0;
      const u64 others = coded ? 0 : ceil_div(kept.count * (CHUNK_BYTES - 1), 4);
      u64 words = coded ? field_words(kept.count, width) : ceil_div(kept.count * CHUNK_BYTES, 4);
      u32 coding = coded ? CODING_FIXED : CODING_RAW;
      if (symbols) {
        BookMaking& making = *(BookMaking*)shared;
        for (int s = threadIdx.x; s < symbols; s += THREADS) counts[s] = *(volatile u32*)(counts_of(chunk) + s);
        __syncthreads();
        make_book(making, counts, symbols, codes_of(chunk));
        if (words_about(symbols, kept.count, making.bits) + others < words)
          coding = coded ? CODING_HUFFMAN : CODING_SPLIT;
      }
      if (threadIdx.x == 0) {
        draft->coding = coding;
        draft->code_bits = coding == CODING_FIXED ? width : 0;
        draft->symbols = coding == CODING_HUFFMAN ? symbols : 0;
        draft->row_words = words;
      }
    }
    __syncthreads();
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) measure_pieces(const Chunk* chunks, int count) {
  __shared__ u32 table[MOST_SYMBOLS];
  __shared__ u32 sums[WARPS];
  __shared__ u32 last;
  const int lane = threadIdx.x & 31;
  for (int number = blockIdx.y; number < count; number += gridDim.y) {
    const Chunk& chunk = chunks[number];
    Draft* const draft = (Draft*)chunk.state;
    const Kept kept = kept_of(chunk, *draft);
    const bool streamed = draft->coding == CODING_HUFFMAN || draft->coding == CODING_SPLIT;
    const u32 outliers = kept.codes != nullptr ? draft->outliers : 0;
    const i64 pieces = pieces_of(kept.count);
    u32* const words = (u32*)chunk.row_starts;
    u32* const strays = words + pieces + 1;  // outliers of each piece
    if (streamed)
      for (int s = threadIdx.x; s < MOST_SYMBOLS; s += THREADS) table[s] = codes_of(chunk)[s] >> 16;
    __syncthreads();
    i64 piece = (i64)blockIdx.x * WARPS + (threadIdx.x >> 5);
    for (; (streamed || outliers) && piece < pieces; piece += (i64)gridDim.x * WARPS) {
      u32 bits = 0, found = 0;
      const i64 first = piece * PIECE_CODES;
      const int here = (int)min((i64)PIECE_CODES, kept.count - first);
#pragma unroll 1
      for (int k = lane; k < here; k += 32) {
        if (streamed) bits += table[kept.symbol(first + k)];
        if (outliers) found += kept.codes[kept.source(first + k)] == NO_CODE;
      }
      bits = __reduce_add_sync(FULL, bits);
      found = __reduce_add_sync(FULL, found);
      if (lane == 0) {
        words[piece] = (bits + 31) / 32;
        strays[piece] = found;
      }
    }
    if (is_last(&draft->measured, &last)) {
      u64 row_words = draft->row_words;
      if (streamed) {
        const u32 total = sum_up(words, pieces, sums);
        const bool split = draft->coding == CODING_SPLIT;
        row_words = field_words(split ? BYTE_SYMBOLS : (i64)draft->symbols, LENGTH_BITS) + size_words(kept.count) + total;
        if (split) row_words += ceil_div(kept.count * (CHUNK_BYTES - 1), 4);
      }
      if (outliers) sum_up(strays, pieces, sums);
      if (threadIdx.x == 0) {
        const bool coded = kept.codes != nullptr;
        const i64 head = BODY_HEADER_BYTES + (coded ? CODE_HEADER_BYTES : 0);
        const i64 raw = BODY_HEADER_BYTES + chunk.rows * chunk.row * parts_of(chunk) * CHUNK_BYTES;
        const i64 of_outliers = outliers + ceil_div((i64)outliers * CHUNK_BYTES, 4);
        const i64 bytes = head + 4 * (draft->reference_words + of_outliers + (i64)row_words);
        draft->raw = bytes >= raw;
        draft->bytes = bytes >= raw ? raw : bytes;
      }
    }
    __syncthreads();
  }
}

// Find where each body begins, at multiples of ALIGN_BYTES, and how long it is.
extern "C" __global__ void __launch_bounds__(THREADS)
    place_bodies(const Chunk* chunks, int count, i64* offsets, i64* sizes) {
  __shared__ u32 sums[WARPS];
  u64 before = 0;
  for (int first = 0; first < count; first += THREADS) {
    const int number = first + threadIdx.x;
    const i64 bytes = number < count ? ((const Draft*)chunks[number].state)->bytes : 0;
    u32 total;
    const u32 found = sum_before<WARPS>((u32)ceil_div(bytes, ALIGN_BYTES), sums, total);
    if (number < count) {
      offsets[number] = (i64)(before + found) * ALIGN_BYTES;
      sizes[number] = bytes;
    }
    before += total;
  }
  if (threadIdx.x == 0) offsets[count] = (i64)before * ALIGN_BYTES;
}

// Without `out`, each body goes to its chunk's buffer, behind a header.
extern "C" __global__ void __launch_bounds__(THREADS)
    write_bodies(const Chunk* chunks, int count, u8* out, const i64* offsets) {
  __shared__ __align__(16) u8 shared[WARPS * sizeof(Piece)];
  __shared__ u32 table[MOST_SYMBOLS];
  const int lane = threadIdx.x & 31;
  const i64 me = (i64)blockIdx.x * THREADS + threadIdx.x, stride = (i64)gridDim.x * THREADS;
  Piece& piece = ((Piece*)shared)[threadIdx.x >> 5];
  for (int number = blockIdx.y; number < count; number += gridDim.y) {
    const Chunk& chunk = chunks[number];
    const Draft draft = *(const Draft*)chunk.state;
    u8* body = out + (out != nullptr ? offsets[number] : 0);
    if (chunk.flags & FLAG_FRAMED) {
      if (me == 0) {
        u64* const header = (u64*)chunk.data;
        header[0] = HEADER_BYTES + (u64)draft.bytes;
        header[1] = (u64)(chunk.rows * chunk.row);
        header[2] = (u64)chunk.form;
        header[3] = (u64)chunk.row;
      }
      body = (u8*)chunk.data + HEADER_BYTES;
    }
    u32* const head = (u32*)body;
    if (draft.raw) {
      if (me == 0) {
        head[0] = CODING_RAW | REFERENCES_NONE << 8;
        head[1] = (u32)chunk.rows;
      }
      const i64 numbers = chunk.rows * chunk.row * parts_of(chunk);
      const stored_t* const from = (const stored_t*)chunk.values;
      stored_t* const to = (stored_t*)(body + BODY_HEADER_BYTES);
      for (i64 k = me; k < numbers; k += stride) to[k] = from[k];
      continue;
    }
    const Kept kept = kept_of(chunk, draft);
    const bool coded = kept.codes != nullptr;
    const u32 outliers = coded ? draft.outliers : 0;
    if (me == 0) {
      head[0] = draft.coding | draft.references << 8 | draft.code_bits << 16 | draft.index_bits << 24;
      head[1] = draft.distinct;
      if (coded) {
        head[2] = outliers;
        head[3] = draft.step;
        head[4] = (u32)draft.least;
        head[5] = draft.symbols;
      }
    }
    u32* section = head + (BODY_HEADER_BYTES + (coded ? CODE_HEADER_BYTES : 0)) / 4;
    for (i64 k = me; k < draft.reference_words; k += stride) section[k] = ((const u32*)chunk.references)[k];
    section += draft.reference_words;
    u32* const outlier_places = section;
    stored_t* const outlier_bits = (stored_t*)(section + outliers);
    section += outliers + ceil_div((i64)outliers * CHUNK_BYTES, 4);
    if (me == 0)
      for (i64 k = (i64)outliers * CHUNK_BYTES; k % 4; ++k) ((u8*)outlier_bits)[k] = 0;
    if (draft.coding == CODING_RAW) {
      write_numbers(kept, (u8*)section, me, stride);
      continue;
    }
    const i64 pieces = pieces_of(kept.count);
    const u32* const starts = (const u32*)chunk.row_starts;
    const u32* const strays = starts + pieces + 1;
    const bool streamed = draft.coding != CODING_FIXED;
    if (streamed) {
      __syncthreads();
      for (int s = threadIdx.x; s < MOST_SYMBOLS; s += THREADS) table[s] = codes_of(chunk)[s];
      __syncthreads();
      const int symbols = draft.coding == CODING_SPLIT ? BYTE_SYMBOLS : (int)draft.symbols;
      if (blockIdx.x == 0) write_lengths(table, symbols, section);
      section += field_words(symbols, LENGTH_BITS);
      unsigned short* const sizes = (unsigned short*)section;
      for (i64 k = me; k < 2 * size_words(kept.count); k += stride)
        sizes[k] = (unsigned short)(k < pieces ? starts[k + 1] - starts[k] : 0);
      section += size_words(kept.count);
    }
    const int width = (int)draft.code_bits;
    for (i64 p = (i64)blockIdx.x * WARPS + (threadIdx.x >> 5); p < pieces; p += (i64)gridDim.x * WARPS) {
      const i64 first = p * PIECE_CODES;
      const int here = (int)min((i64)PIECE_CODES, kept.count - first);
      u32 stray = outliers ? strays[p] : 0;
      for (int k = lane; k < (here + 31) / 32 * 32; k += 32) {
        u32 symbol = 0;
        bool outlies = false;
        i64 source = 0;
        if (k < here) {
          symbol = kept.symbol(first + k);
          if (outliers) {
            source = kept.source(first + k);
            outlies = kept.codes[source] == NO_CODE;
          }
          piece.symbols[staged(k)] = (unsigned short)symbol;
        }
        if (outliers) {
          const u32 found = __ballot_sync(FULL, outlies);
          if (outlies) {
            const u32 at = stray + __popc(found & ((1u << lane) - 1));
            outlier_places[at] = (u32)(first + k);
            outlier_bits[at] = kept.numbers[source];
          }
          stray += __popc(found);
        }
      }
      if (!streamed && width == 0) continue;
      u32 words = fill_piece(piece, table, here, streamed ? 0 : width);
      // Numbers that others have changed since they were measured may take more.
      if (streamed) words = min(words, starts[p + 1] - starts[p]);
      u32* const to = section + (streamed ? (i64)starts[p] : p * PIECE_CODES / 32 * width);
      for (u32 k = lane; k < words; k += 32) to[k] = piece.words[k];
      __syncwarp();
    }
    if (draft.coding == CODING_SPLIT && CHUNK_BYTES > 1) {
      u32* const rest = section + starts[pieces];
      const i64 bytes = kept.count * (CHUNK_BYTES - 1);
      for (i64 word = me; word < ceil_div(bytes, 4); word += stride) {
        u32 found = 0;
        for (int k = 0; k < 4 && 4 * word + k < bytes; ++k) {
          const i64 byte = 4 * word + k, place = byte / (CHUNK_BYTES > 1 ? CHUNK_BYTES - 1 : 1);
          const u64 bits = kept.numbers[kept.source(place)];
          found |= (u32)(bits >> 8 * (byte - place * (CHUNK_BYTES - 1)) & 255) << 8 * k;
        }
        rest[word] = found;
      }
    }
  }
}
