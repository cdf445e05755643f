// Barriers and simdgroup functions: every one is a place where the threads wait for each other. `line` says which place.
#pragma once

namespace metal {
enum class mem_flags : uint { mem_none = 0, mem_threadgroup = 2 };
}  // namespace metal

namespace metal_host {
struct Exchange {  // one simd operation of one simdgroup
  uint64_t values[32];
  uint lanes, lane;  // how many threads the simdgroup has; the asking thread's place, set before exchange() returns
};
extern "C" {
void metal_host_barrier(uint flags, int line);
Exchange* metal_host_exchange(uint64_t value, const char* operation, int line);
[[noreturn]] void metal_host_bad_lane(const char* operation, uint lane, int line);
}

#define METAL_HOST_UNSEEN __attribute__((no_sanitize("address", "thread", "undefined"), noinline))

template <class T> inline uint64_t bits_of(T x) {
  static_assert(sizeof(T) <= 8, "simdgroup functions take scalars");
  uint64_t bits = 0;
  __builtin_memcpy(&bits, &x, sizeof(T));
  return bits;
}
template <class T> inline T from_bits(uint64_t bits) {
  T x;
  __builtin_memcpy(&x, &bits, sizeof(T));
  return x;
}

// `from` maps a lane to the lane it reads.
template <class T, class F> METAL_HOST_UNSEEN T shuffle(T x, F from, const char* operation, int line) {
  Exchange* e = metal_host_exchange(bits_of(x), operation, line);
  uint lane = from(e->lane, e->lanes);
  if (lane >= e->lanes) metal_host_bad_lane(operation, lane, line);
  return from_bits<T>(e->values[lane]);
}
}  // namespace metal_host

namespace metal {
#define METAL_HOST_LINE int line = __builtin_LINE()
inline void threadgroup_barrier(mem_flags flags, METAL_HOST_LINE) { metal_host::metal_host_barrier(uint(flags), line); }

template <class T> inline T simd_shuffle(T x, ushort lane, METAL_HOST_LINE) {
  return metal_host::shuffle(x, [=](uint, uint) { return uint(lane); }, "simd_shuffle", line);
}
template <class T> inline T simd_shuffle_xor(T x, ushort mask, METAL_HOST_LINE) {
  return metal_host::shuffle(x, [=](uint lane, uint) { return lane ^ mask; }, "simd_shuffle_xor", line);
}
}  // namespace metal
