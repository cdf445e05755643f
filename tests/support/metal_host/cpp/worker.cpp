// Loads compiled kernels and runs them as asked on standard input, until it is closed. One request:
//   run LIBRARY GRID(3) THREADGROUP(3) ORDER BUFFERS \n  then for each buffer  NAME WRITABLE BYTES GIVEN MASKED \n, GIVEN bytes
//   of values and MASKED bytes, of which one that is not 0 forbids to read the byte at its place
// Answer: "ok\n" and the writable buffers' bytes, or "error KIND CODE_OFFSET LINE BYTES\n" and a message, and the end.
#include <signal.h>

#include "group.h"

using namespace metal_host;

extern "C" {
#define SEEN __attribute__((visibility("default"), used))
SEEN void metal_host_barrier(uint flags, int line) { at_barrier(flags, line); }
SEEN Exchange* metal_host_exchange(uint64_t value, const char* operation, int line) { return exchange(value, operation, line); }
SEEN void metal_host_bad_lane(const char* operation, uint lane, int line) {
  fail("Divergence", nullptr, "%s, line %d, asks lane %u, which the simdgroup has not", operation, line, lane);
}
SEEN void* metal_host_shared(const char* name, uint line, size_t bytes) {
  return shared_array(name, line, bytes, __builtin_return_address(0));
}

#define PC __builtin_return_address(0)
// The compiler was told to report accesses under this prefix. AddressSanitizer, where it is linked, judges first.
#ifdef METAL_HOST_ASAN
void __asan_loadN(const void*, uintptr_t);
void __asan_storeN(const void*, uintptr_t);
#define ASAN_TOO(function, ...) function(__VA_ARGS__)
#define ACCESS(n)                                                                                          \
  void __asan_load##n(const void*);                                                                        \
  void __asan_store##n(const void*);                                                                       \
  ACCESS_OF(n)
#else
#define ASAN_TOO(function, ...)
#define ACCESS(n) ACCESS_OF(n)
#endif
#define ACCESS_OF(n)                                                                                       \
  SEEN void metal_host_load##n(void* p) { ASAN_TOO(__asan_load##n, p); touch(p, n, false, PC); }           \
  SEEN void metal_host_store##n(void* p) { ASAN_TOO(__asan_store##n, p); touch(p, n, true, PC); }
ACCESS(1) ACCESS(2) ACCESS(4) ACCESS(8) ACCESS(16)
SEEN void metal_host_loadN(void* p, size_t n) { ASAN_TOO(__asan_loadN, p, n); touch(p, n, false, PC); }
SEEN void metal_host_storeN(void* p, size_t n) { ASAN_TOO(__asan_storeN, p, n); touch(p, n, true, PC); }
SEEN void* metal_host_memcpy(void* to, const void* from, size_t n) {
  ASAN_TOO(__asan_loadN, from, n);
  ASAN_TOO(__asan_storeN, to, n);
  touch(from, n, false, PC);
  touch(to, n, true, PC);
  return memmove(to, from, n);
}
SEEN void* metal_host_memmove(void* to, const void* from, size_t n) { return metal_host_memcpy(to, from, n); }
SEEN void* metal_host_memset(void* to, int byte, size_t n) {
  ASAN_TOO(__asan_storeN, to, n);
  touch(to, n, true, PC);
  return memset(to, byte, n);
}

#ifdef METAL_HOST_ASAN
// Printed above AddressSanitizer's report.
SEEN void __asan_on_error() {
  char text[64];
  if (current < 0) return;
  fprintf(stderr, "metal_host: %s of threadgroup (%u, %u, %u), last at line %d\n", thread_text(text, sizeof text, current),
          group_position[0], group_position[1], group_position[2], fibers[current].line);
}
#else
// What instrumented code wants of AddressSanitizer's library besides.
SEEN void __asan_init() {}
SEEN void __asan_version_mismatch_check_v8() {}
SEEN void __asan_handle_no_return() {}
SEEN void __asan_register_elf_globals(void*, void*, void*) {}
SEEN void __asan_unregister_elf_globals(void*, void*, void*) {}
// The undefined behaviour that the compiler itself looks for; every report begins with where in the text it is.
struct Place {
  const char* file;
  uint32_t line, column;
};
#define UNDEFINED(name, kind, what) \
  SEEN void __ubsan_handle_##name##_abort(Place* at) { fibers[current].line = int(at->line); fail(kind, nullptr, what); }
UNDEFINED(out_of_bounds, "OutOfBounds", "index outside an array")
SEEN void __ubsan_handle_local_out_of_bounds_abort() { fail("OutOfBounds", PC, "access outside a thread's own array"); }
UNDEFINED(type_mismatch_v1, "Undefined", "misaligned or null pointer")
UNDEFINED(shift_out_of_bounds, "Undefined", "shift by the width of the type or more")
UNDEFINED(divrem_overflow, "Undefined", "division by zero")
UNDEFINED(float_cast_overflow, "Undefined", "a float outside the integer's range")
UNDEFINED(add_overflow, "Undefined", "overflow of a signed sum")
UNDEFINED(sub_overflow, "Undefined", "overflow of a signed difference")
UNDEFINED(mul_overflow, "Undefined", "overflow of a signed product")
UNDEFINED(negate_overflow, "Undefined", "overflow of a signed negation")
#endif
}

static void run_grid(uint3 grid, uint3 threadgroup, uint32_t order_kind) {
  uint3 groups = (grid + threadgroup - 1u) / threadgroup;
  attributes = Attributes{};
  attributes.dispatch_threads_per_threadgroup = threadgroup;
  attributes.dispatch_simdgroups_per_threadgroup = (threadgroup.x * threadgroup.y * threadgroup.z + SIMD - 1) / SIMD;
  attributes.dispatch_quadgroups_per_threadgroup = (threadgroup.x * threadgroup.y * threadgroup.z + 3) / 4;
  attributes.thread_execution_width = attributes.threads_per_simdgroup = SIMD;
  attributes.grid_size = attributes.threads_per_grid = grid;
  attributes.threadgroups_per_grid = groups;
  uint32_t count = groups.x * groups.y * groups.z;
  uint32_t* order = (uint32_t*)malloc(count * sizeof *order);
  random_state = order_kind;
  make_order(order, count, order_kind);
  for (uint32_t g = 0; g < count; g++) {
    uint3 at = position(order[g], groups), size = threadgroup, left = grid - at * threadgroup;
    for (int i = 0; i < 3; i++) size[i] = left[i] < size[i] ? left[i] : size[i];  // the grid's edge may cut a threadgroup
    run_group(at, size, order_kind);
  }
  free(order);
}

static Entry load(const char* library) {
  static char loaded[64][1024];
  static Entry entries[64];
  static int next;
  for (int i = 0; i < 64; i++)
    if (!strcmp(loaded[i], library)) return entries[i];
  void* handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (!handle) fail("CompileFailed", nullptr, "%s", dlerror());
  int i = next++ % 64;
  snprintf(loaded[i], sizeof loaded[i], "%s", library);
  return entries[i] = (Entry)dlsym(handle, "metal_host_entry");
}

static void too_long(int) { fail("Hang", nullptr, "no end in sight"); }

int main() {
  allocate_stacks();
  arena = (uint8_t*)calloc(ARENA_BYTES, 1);
  arena_cells = (Cell*)calloc(ARENA_BYTES, sizeof(Cell));
  thread_main = run_thread;
  signal(SIGALRM, too_long);
  char library[1024];
  unsigned g[3], t[3], order_kind, seconds, count;
  while (scanf(" run %1023s %u %u %u %u %u %u %u %u %u", library, g, g + 1, g + 2, t, t + 1, t + 2, &order_kind, &seconds,
               &count) == 10) {
    num_buffers = num_regions = count;
    for (uint32_t i = 0; i < count; i++) {
      Region& r = regions[i];
      unsigned writable;
      size_t given, masked;
      if (scanf(" %63s %u %zu %zu %zu", r.name, &writable, &r.bytes, &given, &masked) != 5 || getchar() != '\n') return 2;
      buffers[i] = r.base = (uint8_t*)malloc(r.bytes);
      memset(r.base, 0xff, r.bytes);  // an output's poison: NaN, whatever the float type
      if (fread(r.base, 1, given, stdin) != given) return 2;
      r.writable = writable;
      r.space = DEVICE;
      r.cells = writable || masked ? (Cell*)malloc(r.bytes * sizeof(Cell)) : nullptr;
      for (size_t b = 0; r.cells && b < r.bytes; b++) {
        bool readable = given && (!masked || getchar() == 0);
        r.cells[b] = {{readable ? BEFORE_THE_LAUNCH : NOBODY, 0}, {NOBODY, 0}};
      }
    }
    memset(epochs, 0, sizeof epochs);
    entry = load(library);
    alarm(seconds);
    run_grid(uint3{g[0], g[1], g[2]}, uint3{t[0], t[1], t[2]}, order_kind);
    alarm(0);
    fputs("ok\n", stdout);
    for (uint32_t i = 0; i < count; i++) {
      if (regions[i].writable) fwrite(regions[i].base, 1, regions[i].bytes, stdout);
      free(regions[i].base);
      free(regions[i].cells);
    }
    fflush(stdout);
  }
  return 0;
}
