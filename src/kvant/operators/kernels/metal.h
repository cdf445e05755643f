// The names the kernels use, for Metal. cuda.h has the same names.
#define KVANT_FUNCTION static inline __attribute__((always_inline))
#define KVANT_DEVICE device
#define KVANT_THREAD thread
#define KVANT_CONSTANT constant constexpr
#define KVANT_BARRIER threadgroup_barrier(mem_flags::mem_threadgroup)
// Before every loop over an array in registers: an index that is not constant would put the array in memory.
// ROLLED is for loops of unknown length, whose copies would only take registers.
#define KVANT_UNROLL _Pragma("clang loop unroll(full)")
#define KVANT_ROLLED _Pragma("clang loop unroll(disable)")
#define KVANT_UNROLL_BY_4 _Pragma("clang loop unroll_count(4)")

KVANT_FUNCTION float kvant_exp(float x) { return metal::fast::exp(x); }
KVANT_FUNCTION float kvant_float(uint bits) { return as_type<float>(bits); }
KVANT_FUNCTION float kvant_low(uint word, float16_t) { return float(as_type<half2>(word).x); }
KVANT_FUNCTION float kvant_high(uint word, float16_t) { return float(as_type<half2>(word).y); }
KVANT_FUNCTION float kvant_low(uint word, bfloat16_t) { return as_type<float>(word << 16); }
KVANT_FUNCTION float kvant_high(uint word, bfloat16_t) { return as_type<float>(word & 0xffff0000u); }
// The two halves of a word less an integer, exactly.
KVANT_FUNCTION void kvant_two(uint word, float less, KVANT_THREAD float& low, KVANT_THREAD float& high) {
    low = float(as_type<half2>(word).x) - less;
    high = float(as_type<half2>(word).y) - less;
}
