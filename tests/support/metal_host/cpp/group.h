// A threadgroup's threads, taken in turn; barriers and simdgroup operations let nobody on before all have come.
#pragma once

#include "memory.h"
#include "types.h"
#include "thread.h"

namespace metal_host {

struct Exchange {  // as in simd.h, which the kernel includes
  uint64_t values[SIMD];
  uint32_t lanes, lane;
};

inline Exchange exchanges[MAX_THREADS / SIMD][2];  // a thread may be one operation ahead of its neighbours
inline uint32_t num_threads, ended, waiting_at_barrier, waiting_in_simd[MAX_THREADS / SIMD];
inline uint32_t barrier_flags;
inline Entry entry;
inline void* buffers[64];
inline Attributes attributes;
inline uint64_t random_state;

inline uint32_t random_below(uint32_t n) {
  random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
  return uint32_t((random_state >> 33) % n);
}

// Fills order with 0..n-1: forward (0), reverse (1), or shuffled from the seed that `kind` is.
inline void make_order(uint32_t* order, uint32_t n, uint32_t kind) {
  for (uint32_t i = 0; i < n; i++) order[i] = kind == 1 ? n - 1 - i : i;
  for (uint32_t i = n; kind > 1 && i > 1; i--) {
    uint32_t j = random_below(i), x = order[i - 1];
    order[i - 1] = order[j];
    order[j] = x;
  }
}

inline uint32_t lanes_of(uint32_t simdgroup) {
  uint32_t left = num_threads - simdgroup * SIMD;
  return left < SIMD ? left : SIMD;
}

inline void wait_here(State state, const char* operation, int line) {
  Fiber& self = fibers[current];
  self.state = state;
  self.operation = operation;
  self.line = line;
}

inline void leave() { switch_fiber(fibers[current], scheduler_fiber); }

inline void release(uint32_t first, uint32_t count) {
  for (uint32_t t = first; t < first + count; t++) fibers[t].state = State::READY;
}

// Who is where: "threads 0-15 wait at threadgroup_barrier, line 12; threads 16-31 have ended".
[[noreturn]] inline void fail_divergence(const char* why) {
  char text[3072];
  size_t n = 0;
  for (uint32_t t = 0, first = 0; t < num_threads && n + 200 < sizeof text; t++) {
    Fiber &f = fibers[t], &next = fibers[t + 1];
    if (t + 1 < num_threads && next.state == f.state &&
        (f.state == State::ENDED || (next.line == f.line && next.operation == f.operation)))
      continue;
    n += snprintf(text + n, sizeof text - n, first == t ? "%sthread %u" : "%sthreads %u to %u", n ? "; " : "", first, t);
    if (f.state == State::ENDED) n += snprintf(text + n, sizeof text - n, " ended");
    if (f.state == State::READY) n += snprintf(text + n, sizeof text - n, " elsewhere");
    if (f.state == State::AT_BARRIER || f.state == State::AT_SIMD)
      n += snprintf(text + n, sizeof text - n, " at %s, line %d", f.operation, f.line);
    first = t + 1;
  }
  fail("Divergence", nullptr, "%s: %s", why, text);
}

inline void at_barrier(uint32_t flags, int line) {
  wait_here(State::AT_BARRIER, "threadgroup_barrier", line);
  for (uint32_t t = 0; waiting_at_barrier && t < num_threads; t++)
    if (fibers[t].state == State::AT_BARRIER) {
      if (fibers[t].line != line) fail_divergence("threads wait at different barriers");
      break;
    }
  barrier_flags = waiting_at_barrier ? barrier_flags & flags : flags;
  if (++waiting_at_barrier < num_threads) return leave();
  waiting_at_barrier = 0;
  if (barrier_flags & 2) epochs[SHARED]++;
  release(0, num_threads);
}

// True for the last of the simdgroup's threads to come.
inline bool all_in_simd(const char* operation, int line) {
  uint32_t simdgroup = uint32_t(current) / SIMD, first = simdgroup * SIMD, lanes = lanes_of(simdgroup);
  wait_here(State::AT_SIMD, operation, line);
  for (uint32_t t = first; waiting_in_simd[simdgroup] && t < first + lanes; t++)
    if (fibers[t].state == State::AT_SIMD && (fibers[t].line != line || strcmp(fibers[t].operation, operation)))
      fail_divergence("a simdgroup's threads are at different operations");
  if (++waiting_in_simd[simdgroup] < lanes) return false;
  waiting_in_simd[simdgroup] = 0;
  release(first, lanes);
  return true;
}

inline Exchange* exchange(uint64_t value, const char* operation, int line) {
  Fiber& self = fibers[current];
  uint32_t simdgroup = uint32_t(current) / SIMD, lane = uint32_t(current) % SIMD;
  Exchange* e = &exchanges[simdgroup][self.simd_operations++ % 2];
  e->values[lane] = value;
  if (all_in_simd(operation, line)) {
    e->lanes = lanes_of(simdgroup);
  } else {
    leave();
  }
  e->lane = lane;
  return e;
}

inline uint3 position(uint32_t index, uint3 size) {
  return uint3{index % size.x, index / size.x % size.y, index / size.x / size.y};
}

inline void run_thread() {
  uint32_t t = uint32_t(current);
  Attributes a = attributes;
  a.thread_index_in_threadgroup = t;
  a.thread_index_in_simdgroup = t % SIMD;
  a.simdgroup_index_in_threadgroup = t / SIMD;
  a.thread_index_in_quadgroup = t % 4;
  a.quadgroup_index_in_threadgroup = t / 4;
  a.thread_position_in_threadgroup = position(t, a.threads_per_threadgroup);
  a.thread_position_in_grid =
      a.threadgroup_position_in_grid * a.dispatch_threads_per_threadgroup + a.thread_position_in_threadgroup;
  entry(buffers, a);
  fibers[t].state = State::ENDED;
  ended++;
  switch_fiber(fibers[t], scheduler_fiber, true);
}

inline void run_group(uint3 at, uint3 size, uint32_t order_kind) {
  static uint32_t order[MAX_THREADS];
  num_threads = size.x * size.y * size.z;
  for (int i = 0; i < 3; i++) group_position[i] = at[i], group_size[i] = size[i];
  attributes.threadgroup_position_in_grid = at;
  attributes.threads_per_threadgroup = size;
  attributes.simdgroups_per_threadgroup = (num_threads + SIMD - 1) / SIMD;
  attributes.quadgroups_per_threadgroup = (num_threads + 3) / 4;
  for (int s = 0; s < SPACES; s++) group_start[s] = ++epochs[s];
  forget_shared();
  ended = waiting_at_barrier = 0;
  memset(waiting_in_simd, 0, sizeof waiting_in_simd);
  for (uint32_t t = 0; t < num_threads; t++) prepare_fiber(t);
  make_order(order, num_threads, order_kind);
  while (ended < num_threads) {
    bool anybody = false;
    for (uint32_t i = 0; i < num_threads; i++) {
      if (fibers[order[i]].state != State::READY) continue;
      anybody = true;
      current = int32_t(order[i]);
      switch_fiber(scheduler_fiber, fibers[current]);
      current = NOBODY;
    }
    if (!anybody) fail_divergence("threads wait for others that never come");
    if (order_kind > 1) make_order(order, num_threads, order_kind);
  }
}

}  // namespace metal_host
