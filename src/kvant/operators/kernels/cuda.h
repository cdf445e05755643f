// The names the kernels use, for CUDA. metal.h has the same names.
#define KVANT_DEVICE
#define KVANT_THREAD
#define KVANT_CONSTANT constexpr
#define threadgroup __shared__
#define threadgroup_position_in_grid blockIdx
#define thread_position_in_grid uint3{blockIdx.x * blockDim.x + threadIdx.x, 0, 0}
#define thread_index_in_threadgroup threadIdx.x
#define thread_index_in_simdgroup (threadIdx.x & 31u)
#define simdgroup_index_in_threadgroup (threadIdx.x >> 5u)
#define KVANT_FUNCTION static __device__ __forceinline__
#define KVANT_BARRIER __syncthreads()
#define KVANT_UNROLL _Pragma("unroll")
using uint = unsigned int;

KVANT_FUNCTION float simd_shuffle_xor(float value, uint other) { return __shfl_xor_sync(0xffffffffu, value, other); }
KVANT_FUNCTION float kvant_exp(float x) { return __expf(x); }
KVANT_FUNCTION float kvant_float(uint bits) { return __uint_as_float(bits); }
KVANT_FUNCTION float kvant_low(uint word, __half) { return __half2float(__ushort_as_half(word & 0xffffu)); }
KVANT_FUNCTION float kvant_high(uint word, __half) { return __half2float(__ushort_as_half(word >> 16)); }
KVANT_FUNCTION float kvant_low(uint word, __nv_bfloat16) { return __uint_as_float(word << 16); }
KVANT_FUNCTION float kvant_high(uint word, __nv_bfloat16) { return __uint_as_float(word & 0xffff0000u); }
