// Every byte a kernel may touch, and who touched it last. An access outside, a write to an input, a read of what nobody
// wrote and two accesses that no barrier orders are errors.
#pragma once

#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <unistd.h>

#include "fiber.h"

namespace metal_host {

constexpr uint32_t THREADGROUP_MEMORY = 32 * 1024;  // what Metal grants
constexpr uint32_t ARENA_BYTES = 4 * THREADGROUP_MEMORY;
constexpr uint32_t ARENA_GAP = 64;
constexpr uint32_t SIMD = 32;
enum { NOBODY = -1, MANY = -2, BEFORE_THE_LAUNCH = -3 };
enum Space { DEVICE, SHARED, SPACES };

// When: the barriers passed so far by the threadgroup, never set back.
struct Access {
  int32_t thread;
  uint32_t epoch;
};
struct Cell {
  Access write, read;
};
struct Region {
  char name[64];
  uint8_t* base;
  size_t bytes;
  bool writable;
  Space space;
  uint32_t line;  // where a threadgroup array is declared
  Cell* cells;    // one a byte; none for an input that may be read all over
};

inline Region regions[128];
inline uint32_t num_regions, num_buffers;  // buffers first, then the threadgroup's arrays
inline uint8_t* arena;
inline Cell* arena_cells;
inline uint32_t arena_used, shared_bytes;

inline uint32_t epochs[SPACES], group_start[SPACES];
inline int32_t current = NOBODY;  // the running thread, by its index in the threadgroup
inline uint32_t group_position[3], group_size[3];
inline const char* kernel_name = "";

// Writes the answer that the Python side raises, and ends the process: no thread can be trusted any more.
[[noreturn]] inline void fail(const char* kind, void* pc, const char* format, ...) {
  char message[4096];
  int n = 0;
  if (current >= 0) {
    uint32_t t = uint32_t(current), x = group_size[0], y = group_size[1];
    n += snprintf(message, sizeof message, "thread (%u, %u, %u) of threadgroup (%u, %u, %u): ", t % x, t / x % y, t / x / y,
                  group_position[0], group_position[1], group_position[2]);
  }
  va_list arguments;
  va_start(arguments, format);
  n += vsnprintf(message + n, sizeof message - n, format, arguments);
  va_end(arguments);
  Dl_info info;
  size_t offset = pc && dladdr(pc, &info) ? size_t(pc) - size_t(info.dli_fbase) - 1 : 0;
  int line = current >= 0 ? fibers[current].line : 0;
  char head[64];
  int h = snprintf(head, sizeof head, "error %s %zu %d %d\n", kind, offset, line, n);
  if (write(1, head, h) != h || write(1, message, n) != n) _exit(4);
  _exit(3);
}

inline const char* thread_text(char* to, size_t size, int32_t thread) {
  if (thread < 0) {
    snprintf(to, size, "several threads");
  } else {
    uint32_t t = uint32_t(thread), x = group_size[0], y = group_size[1];
    snprintf(to, size, "thread (%u, %u, %u)", t % x, t / x % y, t / x / y);
  }
  return to;
}

inline Region* region_at(uintptr_t address) {
  static Region* last = regions;
  if (address - uintptr_t(last->base) < last->bytes && last < regions + num_regions) return last;
  for (Region* r = regions; r < regions + num_regions; r++)
    if (address - uintptr_t(r->base) < r->bytes) return last = r;
  return nullptr;
}

[[noreturn]] inline void fail_outside(uintptr_t address, size_t size, bool write, void* pc) {
  const char* what = write ? "write" : "read";
  const Region* nearest = nullptr;
  size_t distance = SIZE_MAX;
  const char* side = "";
  for (Region* r = regions; r < regions + num_regions; r++) {
    uintptr_t start = uintptr_t(r->base), end = start + r->bytes;
    size_t d = address < start ? start - address : address >= end ? address - end : 0;
    if (d >= distance) continue;
    distance = d, nearest = r;
    side = address < start ? "before the start" : address >= end ? "past the end" : "across the end";
  }
  if (!nearest || distance > (size_t(1) << 36))
    fail("OutOfBounds", pc, "%s of %zu bytes at %p, far from every buffer", what, size, (void*)address);
  fail("OutOfBounds", pc, "%s of %zu bytes, %zu bytes %s of `%s`, which has %zu bytes", what, size, distance, side,
       nearest->name, nearest->bytes);
}

// Did `before` happen in an earlier stretch between barriers, as seen by the running thread?
inline bool ordered(const Access& before, const Access& now, Space space) {
  if (before.epoch < group_start[space]) return space == SHARED;  // another threadgroup: nothing orders the two
  return before.epoch < now.epoch;
}

inline void record(Region& r, uintptr_t address, size_t size, bool write, void* pc) {
  Access now = {current, epochs[r.space]};
  size_t first = address - uintptr_t(r.base);
  char other[64];
  for (size_t i = first; i < first + size; i++) {
    Cell& cell = r.cells[i];
    bool own_write = cell.write.thread == current && cell.write.epoch >= group_start[r.space];
    if (cell.write.thread == NOBODY) {
      if (!write && !r.writable) fail("Unreadable", pc, "read of `%s` at byte %zu, which must not be read", r.name, i);
      if (!write) fail("Uninitialised", pc, "read of `%s` at byte %zu, which nobody has written", r.name, i);
    } else if (!own_write && cell.write.thread != BEFORE_THE_LAUNCH && !ordered(cell.write, now, r.space)) {
      fail("Race", pc, "%s of `%s` at byte %zu, which %s %s with no barrier in between", write ? "write" : "read", r.name, i,
           cell.write.epoch < group_start[r.space] ? "another threadgroup" : thread_text(other, sizeof other, cell.write.thread),
           "wrote");
    }
    Access& read = cell.read;
    bool same_time = read.thread != NOBODY && !ordered(read, now, r.space);
    if (write) {
      if (same_time && !(read.thread == current && read.epoch >= group_start[r.space]))
        fail("Race", pc, "write of `%s` at byte %zu, which %s read with no barrier in between", r.name, i,
             read.epoch < group_start[r.space] ? "another threadgroup" : thread_text(other, sizeof other, read.thread));
      cell.write = now;
    } else if (!same_time) {
      read = now;
    } else if (read.thread != current || read.epoch < group_start[r.space]) {
      read = {MANY, now.epoch};
    }
  }
}

// A constant table of the kernel's own, say: the compiler's index checks guard its bounds.
inline bool in_a_module(uintptr_t address) {
  static uintptr_t known[64];
  uintptr_t page = address >> 12;
  if (known[page % 64] == page) return true;
  Dl_info info;
  if (!dladdr((void*)address, &info)) return false;
  known[page % 64] = page;
  return true;
}

// Called for every load and store of the kernel that could reach memory other than a register's.
inline void touch(const void* pointer, size_t size, bool write, void* pc) {
  uintptr_t address = uintptr_t(pointer);
  if (on_a_stack(address)) return;
  Region* r = region_at(address);
  if (!r) {
    if (in_a_module(address)) return;
    fail_outside(address, size, write, pc);
  }
  if (address + size > uintptr_t(r->base) + r->bytes) fail_outside(address, size, write, pc);
  if (write && !r->writable) fail("WriteToInput", pc, "write of %zu bytes to `%s`, an input", size, r->name);
  if (r->cells) record(*r, address, size, write, pc);
}

inline void forget_shared() {
  num_regions = num_buffers;
  memset(arena, 0xff, arena_used);
  arena_used = shared_bytes = 0;
}

inline void* shared_array(const char* name, uint32_t line, size_t bytes, void* pc) {
  for (Region* r = regions + num_buffers; r < regions + num_regions; r++)
    if (r->line == line && r->bytes == bytes && !strncmp(r->name, name, sizeof r->name - 1)) return r->base;
  shared_bytes += bytes;
  if (shared_bytes > THREADGROUP_MEMORY)
    fail("ThreadgroupMemory", pc, "%u bytes of threadgroup arrays with `%s`; Metal grants %u", shared_bytes, name,
         THREADGROUP_MEMORY);
  Region& r = regions[num_regions++];
  if (num_regions >= sizeof regions / sizeof *regions) fail("ThreadgroupMemory", pc, "too many threadgroup arrays");
  snprintf(r.name, sizeof r.name, "%s", name);
  arena_used += ARENA_GAP;
  r.base = arena + arena_used;
  r.bytes = bytes;
  r.writable = true;
  r.space = SHARED;
  r.line = line;
  r.cells = arena_cells + arena_used;
  memset(r.base, 0xff, bytes);  // NaN, whatever the float type
  for (size_t i = 0; i < bytes; i++) r.cells[i].write.thread = r.cells[i].read.thread = NOBODY;
  arena_used += (uint32_t(bytes) + 15) & ~15u;
  return r.base;
}

}  // namespace metal_host
