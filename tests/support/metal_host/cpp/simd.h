// Barriers and simdgroup functions: every one is a place where the threads wait for each other. `line` says which place.
#pragma once

namespace metal {
enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }
}  // namespace metal

namespace metal_host {
struct Exchange {  // one simd operation of one simdgroup
  uint64_t values[32];
  uint64_t result;
  uint lanes, lane;  // how many threads the simdgroup has; the asking thread's place, set before exchange() returns
  bool reduced;
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

template <class T, class F> METAL_HOST_UNSEEN T reduce(T x, F combine, const char* operation, int line) {
  Exchange* e = metal_host_exchange(bits_of(x), operation, line);
  if (!e->reduced) {  // the first thread that goes on works it out for all, as a tree
    T tree[32];
    for (uint i = 0; i < e->lanes; i++) tree[i] = from_bits<T>(e->values[i]);
    for (uint half_width = 16; half_width > 0; half_width /= 2)
      for (uint i = 0; i < half_width && i + half_width < e->lanes; i++) tree[i] = combine(tree[i], tree[i + half_width]);
    e->result = bits_of(tree[0]);
    e->reduced = true;
  }
  return from_bits<T>(e->result);
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

#define METAL_HOST_REDUCTION(name, expression)                                             \
  template <class T> inline T name(T x, METAL_HOST_LINE) {                                 \
    return metal_host::reduce(x, [](T a, T b) { return T(expression); }, #name, line);     \
  }
METAL_HOST_REDUCTION(simd_sum, a + b)
METAL_HOST_REDUCTION(simd_max, max(a, b))

template <class T> inline T simd_shuffle(T x, ushort lane, METAL_HOST_LINE) {
  return metal_host::shuffle(x, [=](uint, uint) { return uint(lane); }, "simd_shuffle", line);
}
template <class T> inline T simd_shuffle_xor(T x, ushort mask, METAL_HOST_LINE) {
  return metal_host::shuffle(x, [=](uint lane, uint) { return lane ^ mask; }, "simd_shuffle_xor", line);
}
}  // namespace metal
