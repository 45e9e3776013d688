// Units of 16 bits that the lanes of a warp take from one run of them in shared memory. Places are
// addresses in shared memory, of 32 bits.
// Run on a CPU, the functions come from the test harness instead.
#ifndef SIMT_HOST
__device__ __forceinline__ unsigned place_of(const void* shared) { return (unsigned)__cvta_generic_to_shared(shared); }
__device__ __forceinline__ unsigned load_place(unsigned place) {
  unsigned x;
  asm volatile("ld.shared.u32 %0, [%1];\n" : "=r"(x) : "r"(place) : "memory");
  return x;
}
// Lanes with bit 5 of `state` set take a unit each, in the order of lanes from place `next` on: into the
// lower half of `bits`, whose lower half moves up, and 16 more in `state`. `below`: the lower lanes.
// Returns which took one. In PTX, since the compiler tests the bit twice and keeps both sides of the
// branch; lanes that take none load as well, which ends the life of a register.
__device__ __forceinline__ unsigned take_units(unsigned& bits, unsigned& state, unsigned next, unsigned below) {
  unsigned asking;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      ".reg .u32 need, rank, place, unit;\n"
      "and.b32 need, %2, 32;\n"
      "setp.ne.u32 p, need, 0;\n"
      "vote.sync.ballot.b32 %0, p, 0xffffffff;\n"
      "and.b32 rank, %0, %4;\n"
      "popc.b32 rank, rank;\n"
      "mad.lo.u32 place, rank, 2, %3;\n"
      "ld.shared.u16 unit, [place];\n"
      "@p prmt.b32 %1, %1, unit, 0x1054;\n"
      "@p add.u32 %2, %2, 16;\n"
      "}\n"
      : "=&r"(asking), "+r"(bits), "+r"(state)
      : "r"(next), "r"(below)
      : "memory");
  return asking;
}
#endif
