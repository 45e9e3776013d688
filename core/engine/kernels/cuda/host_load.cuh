// Loads of a table's rows, which may lie in mapped host memory. Every lane calls load_unit in every
// step, also the lanes that load nothing: run on a CPU, the function comes from the test harness,
// which counts the steps and can tell which lines the lanes of a warp touched in each.
#if UNIT_BYTES == 16
typedef uint4 unit_t;
#elif UNIT_BYTES == 4
typedef unsigned int unit_t;
#endif
#ifndef SIMT_HOST
// Rows are not written while they are read, so the read-only path is right; caches keep them as
// ever, since ids may come twice.
__device__ __forceinline__ unit_t load_unit(const unit_t* from, bool wanted) {
  unit_t x = {};
  if (wanted) x = __ldg(from);
  return x;
}
#endif
