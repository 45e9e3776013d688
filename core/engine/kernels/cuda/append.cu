// A new token of each sequence, put behind those that are there. Where that is device memory says, so that the
// replays of a captured launch put theirs one behind the other.
#include "bits.cuh"

#define THREADS 128

// New keys and values [batches, heads, words] and memory [batches, heads, tokens, words], in words of 4 bytes, as are
// strides; keys and values share those of the memory. The token becomes number k_last - *short_by of the keys and
// v_last - *short_by of the values. Where *short_by is below 0, as behind the last one, nothing is written.
extern "C" __global__ void __launch_bounds__(THREADS)
    append_token(const u32* __restrict__ new_keys, i64 k_batch, i64 k_head, const u32* __restrict__ new_values,
                 i64 v_batch, i64 v_head, int heads, int words, u32* __restrict__ keys, u32* __restrict__ values,
                 i64 to_batch, i64 to_head, i64 to_token, int k_last, int v_last, const int* __restrict__ short_by) {
  const int missing = *short_by;
  if (missing < 0 || missing > min(k_last, v_last)) return;
  const i64 batch = blockIdx.x / heads, head = blockIdx.x % heads;
  const u32 *k = new_keys + batch * k_batch + head * k_head, *v = new_values + batch * v_batch + head * v_head;
  const i64 to = batch * to_batch + head * to_head;
  u32 *k_to = keys + to + (k_last - missing) * to_token, *v_to = values + to + (v_last - missing) * to_token;
  for (int i = threadIdx.x; i < 2 * words; i += THREADS) {
    if (i < words) k_to[i] = k[i];
    else v_to[i - words] = v[i - words];
  }
}
