// What the decoder of packed rows does not look at in the buffer of a whole tensor: its header, the end of its
// words, and the bytes behind the last row. PackedLayout in blob_format.py says where the parts are.
#include "bits.cuh"
#include "blob.cuh"
#include "mailbox.cuh"

#define THREADS 256

// One block. data_bytes are at least words_at and those of PAD_WORDS. With `counted` only the rows are there that
// hold the value bytes that the header says. `tail` gets its bytes where the header is sound.
extern "C" __global__ void __launch_bounds__(THREADS)
    unpack_rest(const u8* data, i64 data_bytes, i64 n_rows, int row_bytes, int tail_bytes, int counted, i64 elements,
                int element_bytes, int form, i64 bases_at, i64 tail_at, i64 words_at, u8* tail, i64* mailbox) {
  const u64* const header = (const u64*)data;
  const i64* const bases = (const i64*)(data + bases_at);
  i64 present = n_rows;
  if (counted) {
    const u64 value_bytes = header[VALUE_BYTES_AT / 8];
    const u64 held = value_bytes / (u32)row_bytes + (value_bytes % (u32)row_bytes != 0);
    if (held < (u64)n_rows) present = (i64)held;
  }
  const i64 least = words_at + 4 * PAD_WORDS;
  const u64 words = (u64)bases[(present + 31) >> 5];
  const bool sound = sound_header((const u32*)data, elements, element_bytes, form, least, data_bytes) &&
                     bases[0] == 0 && header[0] == (u64)least + 4 * words;
  if (!sound) {
    if (threadIdx.x == 0) report(mailbox, ERROR_BLOB, -1, 0, 0);
    return;
  }
  for (int i = threadIdx.x; i < tail_bytes; i += THREADS) tail[i] = data[tail_at + i];
}
