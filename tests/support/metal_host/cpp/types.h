// Scalars and vectors by Metal's names; vectors of half and bfloat are in half.h and shim.h.
#pragma once

typedef signed char int8_t;
typedef unsigned char uint8_t, uchar;
typedef short int16_t;
typedef unsigned short uint16_t, ushort;
typedef int int32_t;
typedef unsigned int uint32_t, uint;
typedef long int64_t;
typedef unsigned long uint64_t, ulong, size_t;
static_assert(sizeof(long) == 8, "Metal's long has 64 bits");

#define METAL_HOST_VECTORS(T)                                                                            \
  typedef T T##2 __attribute__((ext_vector_type(2)));                                                    \
  typedef T T##3 __attribute__((ext_vector_type(3)));                                                    \
  typedef T T##4 __attribute__((ext_vector_type(4)));
METAL_HOST_VECTORS(char)
METAL_HOST_VECTORS(uchar)
METAL_HOST_VECTORS(short)
METAL_HOST_VECTORS(ushort)
METAL_HOST_VECTORS(int)
METAL_HOST_VECTORS(uint)
METAL_HOST_VECTORS(float)
