// metal::, metal::fast:: and metal::precise:: functions: the host's float functions, rounded to the argument's type.
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
METAL_HOST_FUNCTION(exp2)
METAL_HOST_FUNCTION(log)
METAL_HOST_FUNCTION(log2)
METAL_HOST_FUNCTION(sqrt)
METAL_HOST_FUNCTION(sin)
METAL_HOST_FUNCTION(cos)
METAL_HOST_FUNCTION(tanh)
METAL_HOST_FUNCTION(floor)
METAL_HOST_FUNCTION(ceil)
METAL_HOST_FUNCTION(trunc)
METAL_HOST_FUNCTION(rint)
METAL_HOST_FUNCTION(round)
METAL_HOST_FUNCTION(fabs)
template <class T> inline T rsqrt(T x) { return T(1.0f / __builtin_sqrtf(float(x))); }
template <class T> inline T pow(T x, T y) { return T(__builtin_powf(float(x), float(y))); }
template <class T> inline T fma(T x, T y, T z) { return T(__builtin_fmaf(float(x), float(y), float(z))); }
template <class T> inline T fmax(T x, T y) { return T(__builtin_fmaxf(float(x), float(y))); }
template <class T> inline T fmin(T x, T y) { return T(__builtin_fminf(float(x), float(y))); }
}  // namespace precise
namespace fast {
using namespace precise;
}
using namespace precise;

template <class T> inline T max(T x, T y) { return x < y ? y : x; }
template <class T> inline T min(T x, T y) { return y < x ? y : x; }
template <class T> inline T clamp(T x, T low, T high) { return min(max(x, low), high); }
template <class T> inline T abs(T x) { return x < T(0) ? T(-x) : x; }
template <class T> inline T select(T no, T yes, bool which) { return which ? yes : no; }
template <class T> inline bool isnan(T x) { return __builtin_isnan(float(x)); }
template <class T> inline bool isinf(T x) { return __builtin_isinf(float(x)); }
template <class T> inline bool isfinite(T x) { return __builtin_isfinite(float(x)); }

template <class T> struct numeric_limits;
template <> struct numeric_limits<float> {
  static constexpr float infinity() { return __builtin_inff(); }
  static constexpr float quiet_NaN() { return __builtin_nanf(""); }
  static constexpr float max() { return __FLT_MAX__; }
  static constexpr float lowest() { return -__FLT_MAX__; }
  static constexpr float min() { return __FLT_MIN__; }
  static constexpr float epsilon() { return __FLT_EPSILON__; }
};
#define METAL_HOST_LIMITS(T, low, high)                     \
  template <> struct numeric_limits<T> {                    \
    static constexpr T max() { return T(high); }            \
    static constexpr T min() { return T(low); }             \
    static constexpr T lowest() { return T(low); }          \
  };
METAL_HOST_LIMITS(int8_t, -128, 127)
METAL_HOST_LIMITS(uint8_t, 0, 255)
METAL_HOST_LIMITS(int16_t, -32768, 32767)
METAL_HOST_LIMITS(uint16_t, 0, 65535)
METAL_HOST_LIMITS(int32_t, -__INT_MAX__ - 1, __INT_MAX__)
METAL_HOST_LIMITS(uint32_t, 0, __INT_MAX__ * 2u + 1u)
}  // namespace metal

// MLX's own: the infinities where the type has them.
template <class T> struct Limits;
template <> struct Limits<float> {
  static constexpr float max = __builtin_inff(), min = -__builtin_inff();
  static constexpr float finite_max = __FLT_MAX__, finite_min = -__FLT_MAX__;
};
