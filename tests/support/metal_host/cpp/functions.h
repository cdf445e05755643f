// The functions of metal::, metal::fast:: and metal::precise:: that kernels call: the host's float functions, rounded to the argument's type.
// As in Metal, max(1.0f, 2) is refused: the two types must be one.
#pragma once

namespace metal {
namespace precise {
#define METAL_HOST_FUNCTION(name)                                                                \
  template <class T> inline T name(T x) {                                                        \
    static_assert(metal_host_is_float<T>, #name " takes float, half or bfloat");                 \
    return T(__builtin_##name##f(float(x)));                                                     \
  }
METAL_HOST_FUNCTION(exp)
METAL_HOST_FUNCTION(tanh)
METAL_HOST_FUNCTION(rint)
}  // namespace precise
namespace fast {
using namespace precise;
}
using namespace precise;

template <class T> inline T abs(T x) { return x < T(0) ? T(-x) : x; }
template <class T> inline T max(T x, T y) { return x < y ? y : x; }
template <class T> inline T min(T x, T y) { return y < x ? y : x; }
}  // namespace metal
