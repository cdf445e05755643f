// Metal's language on the host, in one of two faces. The text that MLX generates is compiled once with each:
// METAL_HOST_SPACES  real address spaces and the compiler's own 16-bit types: is every pointer qualified? Compiled, never run.
// otherwise          plain pointers, whose every load and store the compiler reports to worker.cpp: run.
// Two faces, because neither sanitizer instruments an access through an address space.
#pragma once

#include "types.h"

#ifdef METAL_HOST_SPACES
#define device __attribute__((address_space(1)))
#define constant const __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
typedef _Float16 half;
typedef __bf16 bfloat;
typedef half half2 __attribute__((ext_vector_type(2)));
typedef half half4 __attribute__((ext_vector_type(4)));
template <class T> constexpr bool metal_host_is_float = __is_same(T, float) || __is_same(T, half) || __is_same(T, bfloat);
#else
#define device
#define constant const
#define threadgroup
#include "half.h"
#endif
#define thread
#define METAL_FUNC inline
#define __METAL__ 1

typedef half float16_t;
typedef bfloat bfloat16_t;

template <class To, class From> inline To as_type(From x) {
  static_assert(sizeof(To) == sizeof(From), "as_type: sizes differ");
  return __builtin_bit_cast(To, x);
}

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define M_PI_F 3.14159274101257324219f
#define M_LOG2E_F 1.44269502162933349609f
#define M_LN2_F 0.693147182464599609375f

#include "functions.h"
#include "simd.h"

#ifndef METAL_HOST_SPACES
#include "thread.h"
#endif

using namespace metal;

// What Metal has not.
#pragma GCC poison double std printf new delete try throw catch goto virtual dynamic_cast typeid malloc free
