// The names the kernels use, for CUDA. metal.h has the same names.
#define KVANT_DEVICE
#define KVANT_THREAD
#define KVANT_CONSTANT constexpr
#define threadgroup __shared__
#define threadgroup_position_in_grid blockIdx
#define threadgroups_per_grid gridDim
#define simdgroups_per_threadgroup (blockDim.x >> 5u)
#define thread_position_in_grid uint3{blockIdx.x * blockDim.x + threadIdx.x, 0, 0}
#define thread_index_in_threadgroup threadIdx.x
#define thread_index_in_simdgroup (threadIdx.x & 31u)
#define simdgroup_index_in_threadgroup (threadIdx.x >> 5u)
#define KVANT_FUNCTION static __device__ __forceinline__
#define KVANT_BARRIER __syncthreads()
#define KVANT_UNROLL _Pragma("unroll")
#define KVANT_ROLLED _Pragma("unroll 1")
#define KVANT_UNROLL_BY_4 _Pragma("unroll 4")
using uint = unsigned int;

KVANT_FUNCTION float simd_shuffle_xor(float value, uint other) { return __shfl_xor_sync(0xffffffffu, value, other); }
KVANT_FUNCTION float simd_shuffle(float value, uint lane) { return __shfl_sync(0xffffffffu, value, int(lane)); }
KVANT_FUNCTION float kvant_exp(float x) { return __expf(x); }
KVANT_FUNCTION float kvant_float(uint bits) { return __uint_as_float(bits); }
KVANT_FUNCTION float kvant_low(uint word, __half) { return __half2float(__ushort_as_half(word & 0xffffu)); }
KVANT_FUNCTION float kvant_high(uint word, __half) { return __half2float(__ushort_as_half(word >> 16)); }
KVANT_FUNCTION float kvant_low(uint word, __nv_bfloat16) { return __uint_as_float(word << 16); }
KVANT_FUNCTION float kvant_high(uint word, __nv_bfloat16) { return __uint_as_float(word & 0xffff0000u); }
// The two halves of a word less an integer, exactly.
KVANT_FUNCTION void kvant_two(uint word, float less, float& low, float& high) {
    __half2 both;
    *reinterpret_cast<uint*>(&both) = word;
    both = __hsub2(both, __float2half2_rn(less));
    low = __low2float(both);
    high = __high2float(both);
}
