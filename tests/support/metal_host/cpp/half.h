// Metal's half and bfloat as classes that round after every operation, as a GPU with such registers does.
// A half is made from any number; a bfloat only when asked for, T(x), which Metal requires too.
#pragma once

struct bfloat;

template <class T> constexpr bool metal_host_is_number = __is_arithmetic(T);

struct half {
  __fp16 value;
  half() = default;
  template <class N, bool ok = metal_host_is_number<N>, __SIZE_TYPE__ = sizeof(char[ok ? 1 : -1])>
  constexpr half(N n) : value((__fp16)(float)n) {}
  operator float() const { return (float)value; }
};

struct bfloat {
  unsigned short bits;
  bfloat() = default;
  template <class N, bool ok = metal_host_is_number<N>, __SIZE_TYPE__ = sizeof(char[ok ? 1 : -1])>
  explicit constexpr bfloat(N n) : bits(round(__builtin_bit_cast(unsigned, (float)n))) {}
  explicit bfloat(half h) : bfloat(float(h)) {}
  operator float() const { return __builtin_bit_cast(float, unsigned(bits) << 16); }

 private:
  static constexpr unsigned short round(unsigned u) {  // to nearest, ties to even
    if ((u & 0x7fffffffu) > 0x7f800000u) return (unsigned short)((u >> 16) | 0x40u);
    return (unsigned short)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
  }
};

template <class T> constexpr bool metal_host_is_small = __is_same(T, half) || __is_same(T, bfloat);
template <class T> constexpr bool metal_host_is_float = __is_same(T, float) || metal_host_is_small<T>;

// small op small, small op integer: small. small op float: float. half op bfloat: refused.
template <class A, class B> struct metal_host_result {};
template <> struct metal_host_result<half, half> { typedef half type; };
template <> struct metal_host_result<bfloat, bfloat> { typedef bfloat type; };
template <class S> struct metal_host_result<S, float> { typedef float type; };
template <class S> struct metal_host_result<float, S> { typedef float type; };
template <> struct metal_host_result<float, float> {};
#define METAL_HOST_INTEGER(I)                                             \
  template <> struct metal_host_result<half, I> { typedef half type; };   \
  template <> struct metal_host_result<I, half> { typedef half type; };   \
  template <> struct metal_host_result<bfloat, I> { typedef bfloat type; }; \
  template <> struct metal_host_result<I, bfloat> { typedef bfloat type; };
METAL_HOST_INTEGER(bool)
METAL_HOST_INTEGER(char)
METAL_HOST_INTEGER(signed char)
METAL_HOST_INTEGER(unsigned char)
METAL_HOST_INTEGER(short)
METAL_HOST_INTEGER(unsigned short)
METAL_HOST_INTEGER(int)
METAL_HOST_INTEGER(unsigned)
METAL_HOST_INTEGER(long)
METAL_HOST_INTEGER(unsigned long)

template <bool> struct metal_host_if {};
template <> struct metal_host_if<true> { typedef int type; };
#define METAL_HOST_OPERATOR(op)                                                                                \
  template <class A, class B, typename metal_host_if<metal_host_is_small<A> || metal_host_is_small<B>>::type = 0> \
  inline auto operator op(A a, B b) -> typename metal_host_result<A, B>::type {                                \
    typedef typename metal_host_result<A, B>::type R;                                                          \
    return R(float(R(a)) op float(R(b)));                                                                      \
  }                                                                                                            \
  template <class A, class B, typename metal_host_if<metal_host_is_small<A>>::type = 0>                          \
  inline A& operator op##=(A& a, B b) {                                                                        \
    return a = A(a op b);                                                                                      \
  }
METAL_HOST_OPERATOR(+)
METAL_HOST_OPERATOR(-)
METAL_HOST_OPERATOR(*)
METAL_HOST_OPERATOR(/)
template <class A, typename metal_host_if<metal_host_is_small<A>>::type = 0> inline A operator-(A a) { return A(-float(a)); }

struct half2 { half x, y; };  // to be taken apart, no arithmetic
struct half4 { half x, y, z, w; };
