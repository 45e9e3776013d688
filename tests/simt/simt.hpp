// Runs CUDA C kernels on the CPU: g++ -include simt.hpp compiles the same text as NVRTC.
//
// Every CUDA thread is a fiber; all fibers of a block share one OS thread and blocks run one after
// another in blockIdx order, so a kernel may wait for lower block numbers but not for higher ones.
// A lane leaves the processor only in a warp collective, a barrier, an atomic or __nanosleep; which
// lane runs next is ring order (seed 0) or drawn from the seed, and that is what makes a forgotten
// __syncwarp visible. A broken rule ends the launch with one text: kernel, block, thread, what
// happened, and what every lane of the block was doing.
//
// Not modelled: weak memory order, blocks that run at the same time, half types, inline PTX (headers
// that have some leave it to functions here). A
// kernel that waits in a loop without an atomic or __nanosleep never ends. Static shared memory is
// bounded only where it is indexed as an array; __launch_bounds__ is not compared with the launch.
#pragma once
#include <link.h>
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <bit>
#include <source_location>
#include <type_traits>
#include <utility>

#if !defined(__x86_64__)
#define SIMT_UCONTEXT   // the portable context switch, some seven times slower
#endif

#define SIMT_HOST 1   // for kernel text that must know, such as a header of inline PTX
#define __CUDA_ARCH__ 900
#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
// Thread-local, because that gathers the static shared memory of every kernel, templates included,
// in one segment whose address and size the loader knows: it can be poisoned and recognised.
#define __shared__ static thread_local

// NVRTC text defines its own 64-bit names, always as long long; glibc has them as long.
typedef long long simt_int64_t;
typedef unsigned long long simt_uint64_t;
#define int64_t simt_int64_t
#define uint64_t simt_uint64_t

#define SIMT_VECTOR2(name, T)                          \
  struct alignas(2 * sizeof(T)) name { T x, y; };      \
  inline name make_##name(T x, T y) { return {x, y}; }
#define SIMT_VECTOR4(name, T)                                            \
  struct alignas(sizeof(T) < 4 ? 4 * sizeof(T) : 16) name { T x, y, z, w; }; \
  inline name make_##name(T x, T y, T z, T w) { return {x, y, z, w}; }
SIMT_VECTOR2(uchar2, unsigned char) SIMT_VECTOR4(uchar4, unsigned char)
SIMT_VECTOR2(ushort2, unsigned short) SIMT_VECTOR4(ushort4, unsigned short)
SIMT_VECTOR2(int2, int) SIMT_VECTOR4(int4, int)
SIMT_VECTOR2(uint2, unsigned) SIMT_VECTOR4(uint4, unsigned)
SIMT_VECTOR2(float2, float) SIMT_VECTOR4(float4, float)
SIMT_VECTOR2(longlong2, long long) SIMT_VECTOR2(ulonglong2, unsigned long long)
struct uint3 { unsigned x, y, z; };
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
  constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
};
constexpr int warpSize = 32;

namespace simt {

constexpr unsigned kMaxThreads = 1024;
constexpr size_t kStackBytes = 128 << 10;  // of which the lowest page is a guard
constexpr size_t kGuard = 64 << 10;        // no smaller than any system's page
constexpr size_t kMaxShared = 227 << 10;   // what one block may have on sm_90
constexpr size_t kSharedArena = 256 << 10;
constexpr unsigned kMaxCopies = 256;       // asynchronous copies one thread may have under way
constexpr int kPoison = 0xCD;              // fills shared memory that nobody has written

using Location = std::source_location;
#define SIMT_HERE ::simt::Location at = ::simt::Location::current()

struct Lane;
// Computes the result of every lane present in a collective.
using Resolve = void (*)(Lane* warp, unsigned present);

enum class State : uint8_t { Exited, Ready, InCollective, AtBarrier };

struct Lane {
  void* stack_pointer = nullptr;
  uint3 index{};
  unsigned linear = 0;
  State state = State::Exited;
  // The collective or barrier that the lane waits in.
  const char* operation = nullptr;
  Location at;
  unsigned mask = 0, bytes = 0;
  int source = 0;
  unsigned long long value = 0, result = 0;
  Resolve resolve = nullptr;
  // Asynchronous copies issued and not yet retired; groups are numbered by the thread's commits.
  unsigned copies = 0, committed = 0;
  unsigned steps = 0;   // calls of load_unit so far
#ifdef SIMT_UCONTEXT
  ucontext_t context;
#endif
};

struct Copy { void* to; const void* from; unsigned bytes, group; };

// A traced load. Loads of one step are those that the lanes of a warp make with one instruction.
struct Load { unsigned block, thread, step, bytes; unsigned long long address; };

struct Machine {
  Lane lanes[kMaxThreads], host;
  Copy copies[kMaxThreads][kMaxCopies];
  unsigned ready[kMaxThreads / 32];        // one bit for every lane that could run now
  Lane* current = nullptr;                 // null between launches
  const char* kernel = nullptr;
  void (*invoke)(void**) = nullptr;
  void** values = nullptr;
  unsigned threads = 0, live = 0, random = 0;
  uint3 block{};
  dim3 block_dim, grid_dim;
  unsigned arrived = 0, arrived_true = 0, released = 0, released_true = 0;   // the barrier
  char *stacks = nullptr, *shared_arena = nullptr;
  char *dynamic_shared = nullptr, *static_shared = nullptr;
  size_t dynamic_bytes = 0, static_bytes = 0;
  sigjmp_buf escape;                       // where an error leaves the fibers
  pthread_t os_thread;
  bool tracing = false;
  Load* loads = nullptr;                   // of the last traced launch
  size_t n_loads = 0, loads_room = 0;
  char error[8192];
  size_t error_length = 0;
};
inline Machine machine;

// ------------------------------------------------------------------ errors

__attribute__((format(printf, 1, 2))) inline void say(const char* format, ...) {
  const size_t room = sizeof machine.error - machine.error_length;
  va_list arguments;
  va_start(arguments, format);
  const int n = vsnprintf(machine.error + machine.error_length, room, format, arguments);
  va_end(arguments);
  if (n > 0) machine.error_length += size_t(n) < room ? size_t(n) : room - 1;
}

inline const char* base_name(const char* path) {
  const char* slash = strrchr(path, '/');
  return slash ? slash + 1 : path;
}

// What the lanes of the block were doing; lanes of a warp that do the same share a line.
inline void say_lanes() {
  for (Lane* warp = machine.lanes; warp < machine.lanes + machine.threads; warp += 32) {
    const unsigned count = machine.threads - warp->linear;
    unsigned left = count >= 32 ? ~0u : (1u << count) - 1;
    while (left) {
      const Lane& first = warp[std::countr_zero(left)];
      unsigned same = 0;
      for (unsigned m = left; m; m &= m - 1) {
        const Lane& lane = warp[std::countr_zero(m)];
        const bool waits = lane.state == State::InCollective || lane.state == State::AtBarrier;
        if (lane.state == first.state &&
            (!waits || (lane.mask == first.mask && lane.at.line() == first.at.line() &&
                        lane.operation == first.operation)))
          same |= m & -m;
      }
      left &= ~same;
      say("\n  warp %u lanes %08x: ", warp->linear / 32, same);
      if (first.state == State::Exited) say("exited");
      if (first.state == State::Ready) say("can run");
      if (first.state == State::InCollective)
        say("wait in %s with mask %08x", first.operation, first.mask);
      if (first.state == State::AtBarrier) say("wait in %s", first.operation);
      if (first.state == State::InCollective || first.state == State::AtBarrier)
        say(" at %s:%u", base_name(first.at.file_name()), unsigned(first.at.line()));
    }
  }
}

[[noreturn]] inline void leave() { siglongjmp(machine.escape, 1); }

inline void say_where() {
  const uint3 b = machine.block, t = machine.current->index;
  say("kernel %s, block (%u,%u,%u), ", machine.kernel, b.x, b.y, b.z);
  say("thread (%u,%u,%u): ", t.x, t.y, t.z);
}

#define SIMT_FAIL(...) \
  (::simt::say_where(), ::simt::say(__VA_ARGS__), ::simt::say_lanes(), ::simt::leave())

// A hardware trap in a fiber. A fault of anybody else goes to the handler that was there before.
struct FaultGuard {
  static constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
  inline static struct sigaction previous[4];
  inline static char stack[64 << 10];   // a fiber that overflowed its own has no room for a handler
  stack_t previous_stack;

  FaultGuard() {
    stack_t mine{};
    mine.ss_sp = stack;
    mine.ss_size = sizeof stack;
    sigaltstack(&mine, &previous_stack);
    struct sigaction action {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (int i = 0; i < 4; ++i) sigaction(kSignals[i], &action, &previous[i]);
  }
  ~FaultGuard() {
    for (int i = 0; i < 4; ++i) sigaction(kSignals[i], &previous[i], nullptr);
    sigaltstack(&previous_stack, nullptr);
  }

  static void on_fault(int signal, siginfo_t* info, [[maybe_unused]] void* context) {
    if (!machine.current || !pthread_equal(pthread_self(), machine.os_thread)) {
      for (int i = 0; i < 4; ++i)
        if (kSignals[i] == signal) sigaction(signal, &previous[i], nullptr);
      return;   // the instruction runs again and faults for its owner
    }
    const char* address = static_cast<char*>(info->si_addr);
    say_where();
    if (signal != SIGSEGV && signal != SIGBUS) {
      say("%s", signal == SIGFPE ? "integer division fault" : "illegal instruction");
    } else if (info->si_code == SI_KERNEL) {
      say("access to a misaligned or impossible address");
    } else if (address >= machine.stacks && address < machine.stacks + kMaxThreads * kStackBytes) {
      say("stack overflow: a thread has %zu KiB of local memory", kStackBytes >> 10);
    } else {
      const char* what = "access to";
#if defined(__x86_64__)
      const auto flags = static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_ERR];
      what = flags & 2 ? "write to" : "read of";
#endif
      say("%s memory that is not the kernel's, address %p", what, info->si_addr);
    }
    leave();
  }
};

// ------------------------------------------------------------------ fibers

[[noreturn]] void fiber_main();

#if !defined(SIMT_UCONTEXT)
// swapcontext makes a system call to save the signal mask, which nothing here needs.
extern "C" __attribute__((visibility("hidden"))) void simt_switch(void** save, void* load);
asm(R"(.text
.type simt_switch,@function
simt_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp,(%rdi); movq %rsi,%rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
.size simt_switch,.-simt_switch
)");
inline void switch_lane(Lane* from, Lane* to) {
  simt_switch(&from->stack_pointer, to->stack_pointer);
}
inline void make_fiber(Lane& lane, char* stack, size_t bytes) {
  void** top = reinterpret_cast<void**>(stack + bytes) - 2;
  *--top = nullptr;                                    // the return address of fiber_main: none
  *--top = reinterpret_cast<void*>(&fiber_main);
  for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
  lane.stack_pointer = top;
}
#else
inline void switch_lane(Lane* from, Lane* to) { swapcontext(&from->context, &to->context); }
inline void make_fiber(Lane& lane, char* stack, size_t bytes) {
  getcontext(&lane.context);
  lane.context.uc_stack.ss_sp = stack;
  lane.context.uc_stack.ss_size = bytes;
  makecontext(&lane.context, fiber_main, 0);
}
#endif

inline void run(Lane* next) {
  Lane* self = machine.current;
  if (next == self) return;
  machine.current = next;
  switch_lane(self, next);
}

inline void set_state(Lane& lane, State state) {
  lane.state = state;
  const unsigned bit = 1u << lane.linear % 32;
  unsigned& word = machine.ready[lane.linear / 32];
  word = state == State::Ready ? word | bit : word & ~bit;
}

// The next lane in ring order that can run, from the one after this or from a random one.
inline Lane* next_ready() {
  Machine& m = machine;
  unsigned start = m.current == &m.host ? 0 : (m.current->linear + 1) % m.threads;
  if (m.random) {
    m.random ^= m.random << 13, m.random ^= m.random >> 17, m.random ^= m.random << 5;
    start = m.random % m.threads;
  }
  const unsigned words = (m.threads + 31) / 32;
  unsigned word = start / 32, bits = m.ready[word] & (~0u << start % 32);
  for (unsigned tries = 0; tries <= words; ++tries) {
    if (bits) return &m.lanes[word * 32 + std::countr_zero(bits)];
    word = (word + 1) % words;
    bits = m.ready[word];
  }
  return nullptr;
}

inline void yield() {
  if (Lane* next = next_ready()) return run(next);
  const char* kind = machine.arrived
      ? "divergent barrier: some threads wait at a barrier that others do not come to"
      : "deadlock: lanes wait for lanes of their mask that do not come";
  SIMT_FAIL("%s", kind);
}

// ------------------------------------------------------------------ warp collectives

// Finishes the collective of `mask` if every lane of it that has not exited waits in it.
inline bool try_complete(Lane* warp, unsigned mask) {
  if (machine.ready[warp->linear / 32] & mask) return false;
  unsigned present = 0;
  const Lane* first = nullptr;
  for (unsigned m = mask; m; m &= m - 1) {
    const Lane& lane = warp[std::countr_zero(m)];
    if (lane.state == State::Exited) continue;
    if (lane.state != State::InCollective || lane.mask != mask) return false;
    if (!first) first = &lane;
    if (lane.resolve != first->resolve || lane.bytes != first->bytes ||
        strcmp(lane.operation, first->operation))
      SIMT_FAIL("mixed collectives: lanes of one mask are in different operations");
    present |= m & -m;
  }
  if (!first) return false;
  first->resolve(warp, present);
  for (unsigned m = present; m; m &= m - 1) set_state(warp[std::countr_zero(m)], State::Ready);
  return true;
}

template <class T>
T collective(const char* operation, unsigned mask, T value, Resolve resolve, Location at,
             int source = 0) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 8);
  Lane& self = *machine.current;
  const unsigned number = self.linear % 32;
  if (!(mask >> number & 1))
    SIMT_FAIL("%s at %s:%u with mask %08x, which does not name the calling lane %u", operation,
              base_name(at.file_name()), unsigned(at.line()), mask, number);
  self.operation = operation;
  self.at = at;
  self.mask = mask;
  self.bytes = sizeof(T);
  self.source = source;
  self.resolve = resolve;
  self.value = 0;
  memcpy(&self.value, &value, sizeof(T));
  set_state(self, State::InCollective);
  // In seeded order the lane that came last has no right to go on first.
  if (!try_complete(&self - number, mask) || machine.random) yield();
  T result;
  memcpy(&result, &self.result, sizeof(T));
  return result;
}

template <class T>
T value_of(const Lane& lane) {
  T value;
  memcpy(&value, &lane.value, sizeof(T));
  return value;
}
template <class F>
void for_lanes(Lane* warp, unsigned mask, F function) {
  for (; mask; mask &= mask - 1) function(warp[std::countr_zero(mask)]);
}
inline unsigned votes(Lane* warp, unsigned present) {
  unsigned bits = 0;
  for_lanes(warp, present, [&](Lane& lane) { bits |= unsigned(lane.value) << lane.linear % 32; });
  return bits;
}
inline void give(Lane* warp, unsigned present, unsigned long long result) {
  for_lanes(warp, present, [=](Lane& lane) { lane.result = result; });
}
inline void resolve_nothing(Lane*, unsigned) {}
inline void resolve_ballot(Lane* w, unsigned present) { give(w, present, votes(w, present)); }
inline void resolve_all(Lane* w, unsigned present) {
  give(w, present, votes(w, present) == present);
}
inline void resolve_any(Lane* w, unsigned present) { give(w, present, votes(w, present) != 0); }
inline void resolve_match(Lane* warp, unsigned present) {
  for_lanes(warp, present, [=](Lane& self) {
    self.result = 0;
    for_lanes(warp, present, [&](Lane& lane) {
      if (lane.value == self.value) self.result |= 1u << lane.linear % 32;
    });
  });
}
// The hardware leaves a shuffle from a lane outside the mask undefined; here it is never right.
inline void resolve_shuffle(Lane* warp, unsigned present) {
  for_lanes(warp, present, [=](Lane& lane) {
    lane.result = present >> lane.source & 1 ? warp[lane.source].value : 0xDEADBEEFDEADBEEFull;
  });
}
template <class T, auto combine>
void resolve_reduce(Lane* warp, unsigned present) {
  T total = value_of<T>(warp[std::countr_zero(present)]);
  for_lanes(warp, present & (present - 1),
            [&](Lane& lane) { total = combine(total, value_of<T>(lane)); });
  unsigned long long bits = 0;
  memcpy(&bits, &total, sizeof total);
  give(warp, present, bits);
}

// The lane arithmetic of PTX shfl: only five bits of the operand count, and a lane that would leave
// its segment of `width` lanes reads its own value.
template <class T>
T shuffle(const char* operation, char mode, unsigned mask, T value, int operand, int width,
          Location at) {
  static_assert(std::is_arithmetic_v<T>, "shuffles move scalars of at most eight bytes");
  if (width < 1 || width > 32 || (width & (width - 1)))
    SIMT_FAIL("%s with width %d, which is not a power of two up to 32", operation, width);
  const int self = machine.current->linear % 32, first = self & -width, last = self | (width - 1);
  const int amount = operand & 31;
  int from = self;
  if (mode == 'i') from = first | (amount & (width - 1));
  if (mode == 'u' && self - amount >= first) from = self - amount;
  if (mode == 'd' && self + amount <= last) from = self + amount;
  if (mode == 'x' && (self ^ amount) <= last) from = self ^ amount;
  return collective(operation, mask, value, resolve_shuffle, at, from);
}

// ------------------------------------------------------------------ barriers, exit

inline void release_barrier() {
  Machine& m = machine;
  m.released = m.arrived, m.released_true = m.arrived_true;
  m.arrived = m.arrived_true = 0;
  for (unsigned i = 0; i < m.threads; ++i)
    if (m.lanes[i].state == State::AtBarrier) set_state(m.lanes[i], State::Ready);
}

// Threads that meet at two different calls would pass on most hardware; the language forbids it.
inline void barrier(const char* operation, bool predicate, Location at) {
  Machine& m = machine;
  Lane& self = *m.current;
  if (m.arrived) {
    const Lane* other = m.lanes;
    while (other->state != State::AtBarrier) ++other;
    if (other->at.line() != at.line() || strcmp(other->at.file_name(), at.file_name()))
      SIMT_FAIL("divergent barrier: this thread is in %s at line %u, thread %u in %s at line %u",
                operation, unsigned(at.line()), other->linear, other->operation,
                unsigned(other->at.line()));
  }
  self.operation = operation;
  self.at = at;
  self.mask = 0;
  set_state(self, State::AtBarrier);
  ++m.arrived;
  m.arrived_true += predicate;
  const bool complete = m.arrived == m.live;
  if (complete) release_barrier();
  if (!complete || m.random) yield();
}

inline void fiber_main() {
  Machine& m = machine;
  m.invoke(m.values);
  Lane& self = *m.current;
  if (self.copies)
    SIMT_FAIL("the thread exits with %u asynchronous copies pending", self.copies);
  set_state(self, State::Exited);
  --m.live;
  // Nobody waits for an exited thread: whoever did may be complete now.
  if (m.live && m.arrived == m.live) release_barrier();
  Lane* warp = &self - self.linear % 32;
  for (int i = 0; i < 32; ++i)
    if (warp[i].state == State::InCollective && warp[i].mask >> self.linear % 32 & 1)
      try_complete(warp, warp[i].mask);
  if (m.live) yield();
  run(&m.host);
  __builtin_unreachable();
}

// ------------------------------------------------------------------ shared memory

inline bool is_shared(const void* pointer) {
  const char* p = static_cast<const char*>(pointer);
  return (p >= machine.dynamic_shared && p < machine.dynamic_shared + machine.dynamic_bytes) ||
         (p >= machine.static_shared && p < machine.static_shared + machine.static_bytes);
}

// What `extern __shared__ T name[];` becomes. Its end, rounded up to 128, touches a guard page.
inline void* dynamic_shared() {
  if (!machine.dynamic_bytes) SIMT_FAIL("dynamic shared memory in a launch with shared_bytes=0");
  return machine.dynamic_shared;
}

inline thread_local char shared_anchor;

inline int find_static_shared(dl_phdr_info* object, size_t, void*) {
  const uintptr_t inside = reinterpret_cast<uintptr_t>(&machine) - object->dlpi_addr;
  bool ours = false;
  size_t bytes = 0;
  for (int i = 0; i < object->dlpi_phnum; ++i) {
    const auto& segment = object->dlpi_phdr[i];
    if (segment.p_type == PT_LOAD) ours |= inside - segment.p_vaddr < segment.p_memsz;
    if (segment.p_type == PT_TLS) bytes = segment.p_memsz;
  }
  if (!ours) return 0;
  machine.static_shared = static_cast<char*>(object->dlpi_tls_data);
  machine.static_bytes = bytes;
  return 1;
}

// ------------------------------------------------------------------ launch

// What threads and blocks have for themselves: a stack for each thread, with a guard page below, and
// shared memory with a guard behind. The loader maps it once for the launches of all modules: guard
// pages that are made, and pages that are touched first, take longer than most launches. Each module
// with stacks of its own would exceed the mappings that a process may have.
struct Memory {
  char *stacks, *shared_arena;
};

struct Shape {
  unsigned grid[3], block[3], seed, shared_bytes, traced;
  Memory memory;
};

inline char* map(size_t bytes) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
  return p == MAP_FAILED ? nullptr : static_cast<char*>(p);
}

inline bool map_memory(Memory& memory) {
  const Memory mapped{map(kMaxThreads * kStackBytes), map(kSharedArena + kGuard)};
  if (!mapped.stacks || !mapped.shared_arena) return false;
  const size_t page = size_t(sysconf(_SC_PAGESIZE));
  for (unsigned i = 0; i < kMaxThreads; ++i)
    if (mprotect(mapped.stacks + i * kStackBytes, page, PROT_NONE)) return false;
  if (mprotect(mapped.shared_arena + kSharedArena, kGuard, PROT_NONE)) return false;
  memory = mapped;
  return true;
}

inline bool prepare_shared(size_t dynamic_bytes) {
  Machine& m = machine;
  m.dynamic_bytes = dynamic_bytes;
  m.dynamic_shared = m.shared_arena + kSharedArena - ((dynamic_bytes + 127) & ~size_t(127));
  *const_cast<volatile char*>(&shared_anchor) = 0;   // this OS thread's segment exists from here on
  return dl_iterate_phdr(find_static_shared, nullptr) && m.static_shared;
}

inline void run_block(uint3 block) {
  Machine& m = machine;
  m.block = block;
  m.live = m.threads;
  m.arrived = m.arrived_true = 0;
  memset(m.dynamic_shared, kPoison, m.shared_arena + kSharedArena - m.dynamic_shared);
  memset(m.static_shared, kPoison, m.static_bytes);
  for (unsigned i = 0; i < (m.threads + 31) / 32 * 32; ++i) {
    Lane& lane = m.lanes[i];
    lane.linear = i;
    lane.copies = lane.committed = lane.steps = 0;
    if (i >= m.threads) { set_state(lane, State::Exited); continue; }
    lane.index = {i % m.block_dim.x, i / m.block_dim.x % m.block_dim.y,
                  i / (m.block_dim.x * m.block_dim.y)};
    // The tops are staggered: stacks at equal offsets would all fight for the same cache sets.
    make_fiber(lane, m.stacks + i * kStackBytes, kStackBytes - (i * 320u & 0xfc0u));
    set_state(lane, State::Ready);
  }
  run(next_ready());
}

// Returns null, or the text of the error. One launch at a time in a process: the loader sees to it.
inline const char* launch(const char* kernel, void (*invoke)(void**), void** values,
                          const Shape& s) {
  Machine& m = machine;
  const unsigned long long threads = 1ull * s.block[0] * s.block[1] * s.block[2];
  if (threads == 0 || threads > kMaxThreads) return "a block has 1 to 1024 threads";
  if (s.shared_bytes > kMaxShared) return "a block has at most 227 KiB of shared memory";
  m.stacks = s.memory.stacks, m.shared_arena = s.memory.shared_arena;
  if (!prepare_shared(s.shared_bytes)) return "the module's static shared memory is not found";
  m.kernel = kernel, m.invoke = invoke, m.values = values;
  m.threads = unsigned(threads);
  m.random = s.seed * 2654435761u;   // spread: seeds 1, 2, 3 must differ from the first draw on
  m.block_dim = {s.block[0], s.block[1], s.block[2]};
  m.grid_dim = {s.grid[0], s.grid[1], s.grid[2]};
  m.error_length = 0;
  m.tracing = s.traced;
  m.n_loads = 0;
  m.os_thread = pthread_self();
  const FaultGuard guard;
  if (sigsetjmp(m.escape, 1) == 0)
    for (unsigned z = 0; z < s.grid[2]; ++z)
      for (unsigned y = 0; y < s.grid[1]; ++y)
        for (unsigned x = 0; x < s.grid[0]; ++x) {
          m.current = &m.host;
          run_block({x, y, z});
        }
  m.current = nullptr;
  return m.error_length ? m.error : nullptr;
}

template <class... P>
void invoke(void (*kernel)(P...), void** values) {
  auto load = []<class T>(std::type_identity<T>, const void* from) {
    T value;
    memcpy(&value, from, sizeof(T));
    return value;
  };
  [&]<size_t... I>(std::index_sequence<I...>) {
    kernel(load(std::type_identity<std::remove_cv_t<P>>{}, values[I])...);
  }(std::index_sequence_for<P...>{});
}

// The parameters as the loader checks them: p8 a pointer, i4 an integer of 4 bytes, f4 a float.
template <class... P>
const char* signature(void (*)(P...)) {
  static char text[8 * sizeof...(P) + 1];
  char* end = text;
  auto kind = []<class T>(std::type_identity<T>) {
    return std::is_pointer_v<T> ? 'p' : std::is_floating_point_v<T> ? 'f' : 'i';
  };
  ((end += sprintf(end, "%c%zu ", kind(std::type_identity<P>{}), sizeof(P))), ...);
  return text;
}

#define SIMT_PUBLIC extern "C" __attribute__((visibility("default")))
SIMT_PUBLIC const Load* simt_loads(size_t* n) {
  *n = machine.n_loads;
  return machine.loads;
}
SIMT_PUBLIC bool simt_map_memory(Memory* memory) { return map_memory(*memory); }
#define SIMT_EXPORT(kernel)                                                                    \
  SIMT_PUBLIC const char* simt_signature_##kernel() { return simt::signature(&kernel); }       \
  SIMT_PUBLIC const char* simt_launch_##kernel(const simt::Shape* shape, void** values) {      \
    return simt::launch(#kernel, [](void** v) { simt::invoke(&kernel, v); }, values, *shape);  \
  }

}  // namespace simt

// The compiler's own checks, reported as a launch error. The loader asks for those that matter on a
// GPU: it faults on a misaligned access, and shifts by 32 or more differ between processors. It asks
// for those that do not come back (-fno-sanitize-recover), which take less code.
struct SimtCheck { const char* file; unsigned line, column; };
#define SIMT_CHECK(name, format, ...)                                                         \
  extern "C" [[noreturn]] inline __attribute__((used)) void __ubsan_handle_##name##_abort(    \
      SimtCheck* check, [[maybe_unused]] long long a, [[maybe_unused]] long long b) {         \
    SIMT_FAIL(format " at %s:%u", __VA_ARGS__ simt::base_name(check->file), check->line);     \
  }
SIMT_CHECK(type_mismatch_v1, "misaligned access to address %#llx", a,)
SIMT_CHECK(out_of_bounds, "index %lld is outside its array", a,)
SIMT_CHECK(shift_out_of_bounds, "shift by %lld, not less than the width of the type", b,)
SIMT_CHECK(divrem_overflow, "division by zero",)

// ------------------------------------------------------------------ the CUDA names

#define threadIdx (::simt::machine.current->index)
#define blockIdx (::simt::machine.block)
#define blockDim (::simt::machine.block_dim)
#define gridDim (::simt::machine.grid_dim)

inline void __syncthreads(SIMT_HERE) { simt::barrier("__syncthreads", false, at); }
#define SIMT_BARRIER(name, result)                                       \
  inline int name(int predicate, SIMT_HERE) {                            \
    simt::barrier(#name, predicate, at);                                 \
    const auto& m = simt::machine;                                       \
    return int(result);                                                  \
  }
SIMT_BARRIER(__syncthreads_or, m.released_true != 0)
SIMT_BARRIER(__syncthreads_and, m.released_true == m.released)
SIMT_BARRIER(__syncthreads_count, m.released_true)

inline unsigned __activemask() { return simt::machine.ready[simt::machine.current->linear / 32]; }
inline void __syncwarp(unsigned mask = ~0u, SIMT_HERE) {
  simt::collective("__syncwarp", mask, 0, simt::resolve_nothing, at);
}
#define SIMT_VOTE(name, R, resolve)                                          \
  inline R name(unsigned mask, int predicate, SIMT_HERE) {                   \
    return simt::collective(#name, mask, R(predicate != 0), resolve, at);    \
  }
SIMT_VOTE(__ballot_sync, unsigned, simt::resolve_ballot)
SIMT_VOTE(__all_sync, int, simt::resolve_all)
SIMT_VOTE(__any_sync, int, simt::resolve_any)
template <class T>
unsigned __match_any_sync(unsigned mask, T value, SIMT_HERE) {
  unsigned long long bits = 0;
  memcpy(&bits, &value, sizeof(T));
  return unsigned(simt::collective("__match_any_sync", mask, bits, simt::resolve_match, at));
}
#define SIMT_SHUFFLE(name, mode, Operand)                                                 \
  template <class T>                                                                      \
  T name(unsigned mask, T value, Operand operand, int width = 32, SIMT_HERE) {            \
    return simt::shuffle(#name, mode, mask, value, int(operand), width, at);              \
  }
SIMT_SHUFFLE(__shfl_sync, 'i', int)
SIMT_SHUFFLE(__shfl_up_sync, 'u', unsigned)
SIMT_SHUFFLE(__shfl_down_sync, 'd', unsigned)
SIMT_SHUFFLE(__shfl_xor_sync, 'x', int)
#define SIMT_REDUCE(name, T, expression)                                                    \
  inline T name(unsigned mask, T value, SIMT_HERE) {                                        \
    return simt::collective(#name, mask, value,                                             \
                            simt::resolve_reduce<T, [](T a, T b) { return T(expression); }>, at); \
  }
SIMT_REDUCE(__reduce_add_sync, int, a + b)
SIMT_REDUCE(__reduce_add_sync, unsigned, a + b)
SIMT_REDUCE(__reduce_min_sync, int, a < b ? a : b)
SIMT_REDUCE(__reduce_min_sync, unsigned, a < b ? a : b)
SIMT_REDUCE(__reduce_max_sync, int, a > b ? a : b)
SIMT_REDUCE(__reduce_max_sync, unsigned, a > b ? a : b)
SIMT_REDUCE(__reduce_and_sync, unsigned, a & b)
SIMT_REDUCE(__reduce_or_sync, unsigned, a | b)
SIMT_REDUCE(__reduce_xor_sync, unsigned, a ^ b)

// An atomic lets other lanes run first, so a lane may spin on one until another lane of its block
// has answered.
template <class T>
concept SimtAtomic = std::is_same_v<T, int> || std::is_same_v<T, unsigned> ||
                     std::is_same_v<T, unsigned long long>;
#define SIMT_ATOMIC(name, expression)                                  \
  template <SimtAtomic T>                                              \
  T name(T* address, std::type_identity_t<T> value) {                  \
    simt::yield();                                                     \
    const T old = *address;                                            \
    *address = T(expression);                                          \
    return old;                                                        \
  }
SIMT_ATOMIC(atomicAdd, old + value)
SIMT_ATOMIC(atomicMax, old > value ? old : value)
SIMT_ATOMIC(atomicMin, old < value ? old : value)
SIMT_ATOMIC(atomicOr, old | value)
SIMT_ATOMIC(atomicAnd, old & value)
SIMT_ATOMIC(atomicXor, old ^ value)
SIMT_ATOMIC(atomicExch, value)
template <SimtAtomic T>
T atomicCAS(T* address, std::type_identity_t<T> expected, std::type_identity_t<T> value) {
  simt::yield();
  const T old = *address;
  if (old == expected) *address = value;
  return old;
}

// Asynchronous copies as late as the hardware may be: the bytes move when the issuing thread's wait
// retires their group. As early as it may be, too: the destination is lost from the issue on, so a
// reader of the old contents that was not synchronised before sees poison.
inline void simt_copy_async(void* to, const void* from, unsigned bytes) {
  simt::Lane& self = *simt::machine.current;
  if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % bytes)
    SIMT_FAIL("misaligned copy_async_%u from %p to %p", bytes, from, to);
  if (!simt::is_shared(to) || !simt::is_shared(static_cast<char*>(to) + bytes - 1) ||
      simt::is_shared(from))
    SIMT_FAIL("copy_async_%u from %p to %p is not from global to shared memory", bytes, from, to);
  if (self.copies == simt::kMaxCopies)
    SIMT_FAIL("more than %u asynchronous copies pending in one thread", simt::kMaxCopies);
  static_cast<void>(*static_cast<const volatile char*>(from));   // a wild source faults here
  memset(to, simt::kPoison, bytes);
  simt::machine.copies[self.linear][self.copies++] = {to, from, bytes, self.committed};
}
inline void copy_async_16(void* to, const void* from) { simt_copy_async(to, from, 16); }
inline void copy_async_8(void* to, const void* from) { simt_copy_async(to, from, 8); }
inline void copy_async_4(void* to, const void* from) { simt_copy_async(to, from, 4); }
inline void copy_async_commit() { ++simt::machine.current->committed; }
template <int N>
void copy_async_wait() {
  static_assert(N >= 0);
  simt::Lane& self = *simt::machine.current;
  simt::Copy* pending = simt::machine.copies[self.linear];
  unsigned kept = 0;
  for (unsigned i = 0; i < self.copies; ++i) {
    if (pending[i].group + N < self.committed)
      memcpy(pending[i].to, pending[i].from, pending[i].bytes);
    else
      pending[kept++] = pending[i];
  }
  self.copies = kept;
}

// What host_load.cuh is on a GPU. Every lane calls it in every step, so that the numbers of the calls
// tell which loads are one instruction of a warp.
template <class T>
T load_unit(const T* from, bool wanted) {
  simt::Machine& m = simt::machine;
  simt::Lane& self = *m.current;
  const unsigned step = self.steps++;
  if (!wanted) return {};
  if (m.tracing) {
    if (m.n_loads == m.loads_room) {
      m.loads_room = 2 * m.loads_room + 4096;
      m.loads = static_cast<simt::Load*>(realloc(m.loads, m.loads_room * sizeof(simt::Load)));
      if (!m.loads) SIMT_FAIL("no memory to trace loads");
    }
    m.loads[m.n_loads++] = {m.block.x, self.linear, step, sizeof(T),
                            reinterpret_cast<uintptr_t>(from)};
  }
  return *from;
}

// What matrix.cuh is on a GPU. _Float16 rounds as the hardware does; the sums of a product are made in
// float32 in the order of k, which the hardware does not promise.
inline float half_to_float(unsigned short x) { return float(std::bit_cast<_Float16>(x)); }
inline unsigned short float_to_half(float x) {
  return std::bit_cast<unsigned short>(static_cast<_Float16>(x));
}
inline unsigned subtract_halves(unsigned a, unsigned b) {
  auto subtracted = [](unsigned x, unsigned y) {
    return float_to_half(half_to_float((unsigned short)x) - half_to_float((unsigned short)y));
  };
  return subtracted(a & 0xffff, b & 0xffff) | unsigned(subtracted(a >> 16, b >> 16)) << 16;
}
namespace simt {
inline void need_all_lanes(Lane* warp, unsigned present, const char* what) {
  if (present == ~0u) return;
  (void)warp;
  SIMT_FAIL("%s with lanes %08x only: all 32 of a warp take part", what, present);
}
struct MatrixOperands { float* c; const unsigned *a, *b; };
inline void resolve_transpose(Lane* warp, unsigned present) {
  need_all_lanes(warp, present, "movmatrix");
  for (int lane = 0; lane < 32; ++lane) {
    const int row = lane / 4, column = 2 * (lane % 4);
    unsigned result = 0;
    for (int k = 0; k < 2; ++k)  // element (column + k, row) of what was given
      result |= (unsigned(warp[4 * (column + k) + row / 2].value) >> 16 * (row % 2) & 0xffff) << 16 * k;
    warp[lane].result = result;
  }
}
template <bool BFLOAT>
inline void resolve_multiply(Lane* warp, unsigned present) {
  need_all_lanes(warp, present, "mma");
  const MatrixOperands* of[32];
  for (int lane = 0; lane < 32; ++lane)
    of[lane] = reinterpret_cast<const MatrixOperands*>(uintptr_t(warp[lane].value));
  auto half = [](unsigned x, int which) {
    const auto bits = (unsigned short)(x >> 16 * which);
    return BFLOAT ? std::bit_cast<float>(unsigned(bits) << 16) : half_to_float(bits);
  };
  float a[16][16], b[16][8];
  for (int r = 0; r < 16; ++r)
    for (int k = 0; k < 16; ++k)
      a[r][k] = half(of[4 * (r % 8) + k % 8 / 2]->a[r / 8 + 2 * (k / 8)], k % 2);
  for (int k = 0; k < 16; ++k)
    for (int n = 0; n < 8; ++n) b[k][n] = half(of[4 * n + k % 8 / 2]->b[k / 8], k % 2);
  for (int r = 0; r < 16; ++r)
    for (int n = 0; n < 8; ++n) {
      float& c = of[4 * (r % 8) + n / 2]->c[2 * (r / 8) + n % 2];
      for (int k = 0; k < 16; ++k) c += a[r][k] * b[k][n];
    }
}
}  // namespace simt
inline unsigned transposed_halves(unsigned x, SIMT_HERE) {
  return simt::collective("movmatrix", ~0u, x, simt::resolve_transpose, at);
}
template <bool BFLOAT>
void simt_multiply(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2], const simt::Location& at) {
  // The operands stay on the lanes' stacks until the last lane has come.
  const simt::MatrixOperands operands{c, a, b};
  const auto address = (unsigned long long)(uintptr_t)&operands;
  simt::collective("mma", ~0u, address, simt::resolve_multiply<BFLOAT>, at);
  asm volatile("" ::: "memory");
}
inline void multiply_halves(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2], SIMT_HERE) {
  simt_multiply<false>(c, a, b, at);
}
inline void multiply_bfloats(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2], SIMT_HERE) {
  simt_multiply<true>(c, a, b, at);
}

// What units.cuh is on a GPU. A place is counted from the dynamic shared memory on.
inline unsigned place_of(const void* shared) {
  return unsigned(static_cast<const char*>(shared) - simt::machine.dynamic_shared);
}
template <class T>
T simt_at_place(unsigned place) {
  const char* at = simt::machine.dynamic_shared + place;
  if (!simt::is_shared(at) || place % sizeof(T)) SIMT_FAIL("read of shared memory at %u", place);
  return *reinterpret_cast<const T*>(at);
}
inline unsigned load_place(unsigned place) { return simt_at_place<unsigned>(place); }
inline unsigned take_units(unsigned& bits, unsigned& state, unsigned next, unsigned below, SIMT_HERE) {
  const bool need = state & 32;
  const unsigned asking = simt::collective("take_units", ~0u, unsigned(need), simt::resolve_ballot, at);
  if (need) {
    bits = bits << 16 | simt_at_place<unsigned short>(next + 2 * std::popcount(asking & below));
    state += 16;
  }
  return asking;
}

inline void __threadfence() { asm volatile("" ::: "memory"); }
inline void __threadfence_block() { __threadfence(); }
inline void __threadfence_system() { __threadfence(); }
inline void __nanosleep(unsigned) { simt::yield(); }
#define __trap() SIMT_FAIL("__trap() at line %d", __LINE__)
#define __builtin_assume(x) ((x) ? void() : SIMT_FAIL("a false assumption at line %d", __LINE__))
#define __assume(x) __builtin_assume(x)

inline int __popc(unsigned x) { return std::popcount(x); }
inline int __popcll(unsigned long long x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(unsigned(x)); }
inline int __clzll(long long x) { return std::countl_zero((unsigned long long)x); }
inline int __ffs(int x) { return x ? std::countr_zero(unsigned(x)) + 1 : 0; }
inline int __ffsll(long long x) { return x ? std::countr_zero((unsigned long long)x) + 1 : 0; }
inline unsigned __brev(unsigned x) {
  unsigned r = 0;
  for (int i = 0; i < 32; ++i) r |= (x >> i & 1) << (31 - i);
  return r;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned(1ull * a * b >> 32); }
// PTX prmt: three bits of a nibble choose the byte, the fourth asks for its sign in all eight bits.
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const unsigned long long bytes = (unsigned long long)b << 32 | a;
  unsigned r = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned nibble = selector >> 4 * i & 15;
    unsigned byte = unsigned(bytes >> 8 * (nibble & 7)) & 255;
    if (nibble & 8) byte = byte & 128 ? 255 : 0;
    r |= byte << 8 * i;
  }
  return r;
}
// The 64 bits hi:lo shifted, and the high (left) or low (right) word kept; lc and rc clamp at 32.
#define SIMT_FUNNEL(name, expression)                             \
  inline unsigned name(unsigned lo, unsigned hi, unsigned by) {   \
    const unsigned long long word = (unsigned long long)hi << 32 | lo; \
    return unsigned(expression);                                  \
  }
SIMT_FUNNEL(__funnelshift_l, word << (by & 31) >> 32)
SIMT_FUNNEL(__funnelshift_r, word >> (by & 31))
SIMT_FUNNEL(__funnelshift_lc, word << (by < 32 ? by : 32) >> 32)
SIMT_FUNNEL(__funnelshift_rc, word >> (by < 32 ? by : 32))

inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }

#define SIMT_LOAD(name) template <class T> T name(const T* from) { return *from; }
SIMT_LOAD(__ldg) SIMT_LOAD(__ldcs) SIMT_LOAD(__ldcg) SIMT_LOAD(__ldca) SIMT_LOAD(__ldcv)
#define SIMT_STORE(name) \
  template <class T> void name(T* to, std::type_identity_t<T> value) { *to = value; }
SIMT_STORE(__stcs) SIMT_STORE(__stcg) SIMT_STORE(__stwb) SIMT_STORE(__stwt)

#define SIMT_MIN_MAX(R, A, B)                                          \
  inline R min(A a, B b) { return (R)a < (R)b ? (R)a : (R)b; }         \
  inline R max(A a, B b) { return (R)a > (R)b ? (R)a : (R)b; }
#define SIMT_MIN_MAX_FAMILY(S, U) \
  SIMT_MIN_MAX(S, S, S) SIMT_MIN_MAX(U, U, U) SIMT_MIN_MAX(U, S, U) SIMT_MIN_MAX(U, U, S)
SIMT_MIN_MAX_FAMILY(int, unsigned)
SIMT_MIN_MAX_FAMILY(long, unsigned long)
SIMT_MIN_MAX_FAMILY(long long, unsigned long long)
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }

// CUDA takes `__shared__ alignas(16) T name[n]`; g++ takes only its own attribute in that place.
#define alignas(bytes) __attribute__((aligned(bytes)))
