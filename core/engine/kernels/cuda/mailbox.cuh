// How a kernel reports an error to the host: four words in host memory that the CPU can read at any
// time, {kind, position or row, id, rows or ids}.
enum { ERROR_NONE = 0, ERROR_INDEX = 1, ERROR_DAMAGED = 2, ERROR_OFFSETS = 3, ERROR_SLOTS = 4, ERROR_BLOB = 5 };

__device__ void report(volatile i64* mailbox, i64 kind, i64 where, i64 id, i64 n_rows) {
  mailbox[1] = where;
  mailbox[2] = id;
  mailbox[3] = n_rows;
  __threadfence_system();
  mailbox[0] = kind;
}
