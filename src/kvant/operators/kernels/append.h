// Quantizes new keys and values. A thread makes one word of packed values; GROUP_THREADS threads share a group.
// A simdgroup makes up to 32 words of one token's key or value.
//
// Inputs: key (B, K, S, D) T, value (B, K, S, Dv) T. GROUP divides D and Dv.
// Outputs: quantized (B, 2, K, S, D * BITS / 32) uint; scales (B, 2, K, S, D / GROUP) SCALE.
// Of different widths: (B, 1, K, S, ...), each token's key before its value.
//
// With FIT, of 4 bits, the value of the largest magnitude becomes -8, and the scale is then sum(x q) / sum(q q) of the
// group's values x and quantized values q, in float32. The sums have their own order: a scale may differ by an ulp.
//
// Without it every result is rounded to T, as by the unfused operator. In half precision a quotient of two floats is rounded
// twice, with the same result. A NaN makes its group's scale NaN.

constexpr int MAX_QUANTIZED = BITS == 8 ? 127 : 7;
constexpr int LEAST = FIT ? -8 : -MAX_QUANTIZED;
constexpr int VALUES_PER_WORD = 32 / BITS;
// A power of two up to 32. The threads of a group are neighbours in the simdgroup.
constexpr int GROUP_THREADS = GROUP / VALUES_PER_WORD;
constexpr float TINY = 1e-30f;  // keeps a group of zeros from 0/0

const bool of_value = threadgroup_position_in_grid.z % 2 == 1;
const uint batch = threadgroup_position_in_grid.z / 2;
const uint tokens = uint(key_shape[1]) * uint(key_shape[2]);  // of a sequence, in all its heads
const uint token = threadgroup_position_in_grid.y;
const uint word = thread_position_in_grid.x;  // of the key or value
const uint key_words = uint(key_shape[3]) / VALUES_PER_WORD;
const uint value_words = uint(value_shape[3]) / VALUES_PER_WORD;
const uint words = of_value ? value_words : key_words;
const bool exists = word < words;

const size_t source = ((size_t(batch) * tokens + token) * words + word) * VALUES_PER_WORD;
float x[VALUES_PER_WORD];
KVANT_UNROLL
for (int e = 0; e < VALUES_PER_WORD; e++) {
    x[e] = !exists ? 0.0f : float(of_value ? value[source + e] : key[source + e]);
}
float high = FIT ? x[0] : 0.0f;  // of all magnitudes, or with FIT of the values
float low = x[0];
KVANT_UNROLL
for (int e = 0; e < VALUES_PER_WORD; e++) {
    high = kvant_larger(high, FIT ? x[e] : abs(x[e]));
    low = -kvant_larger(-low, -x[e]);
}
KVANT_UNROLL
for (uint other = GROUP_THREADS / 2; other > 0; other /= 2) {
    high = kvant_larger(high, simd_shuffle_xor(high, other));
    if (FIT) {
        low = -kvant_larger(-low, -simd_shuffle_xor(low, other));
    }
}
const float group_scale = FIT
    ? (high > -low ? high : low) * -0.125f + TINY
    : kvant_larger(float(T(high / float(MAX_QUANTIZED))), float(T(1e-5f)));
uint packed = 0;
float products = 0.0f;
float squares = 0.0f;
KVANT_UNROLL
for (int e = 0; e < VALUES_PER_WORD; e++) {
    const float quotient = x[e] / group_scale;
    const float rounded = rint(FIT ? quotient : float(T(quotient)));
    // A NaN gives LEAST; its scale is NaN, so the value does not matter.
    const int clamped = rounded > float(LEAST) ? int(min(rounded, float(MAX_QUANTIZED))) : LEAST;
    packed |= (uint(clamped) & (0xffffffffu >> (32 - BITS))) << (BITS * e);
    if (FIT) {
        products += quotient * float(clamped);
        squares += float(clamped * clamped);
    }
}
if (FIT) {
    KVANT_UNROLL
    for (uint other = GROUP_THREADS / 2; other > 0; other /= 2) {
        products += simd_shuffle_xor(products, other);
        squares += simd_shuffle_xor(squares, other);
    }
}
if (exists) {
    const size_t stored = key_words == value_words
        ? ((size_t(batch) * 2 + of_value) * tokens + token) * words + word
        : (size_t(batch) * tokens + token) * (key_words + value_words) + (of_value ? key_words : 0) + word;
    quantized[stored] = packed;
    if (word % GROUP_THREADS == 0) {
        scales[stored / GROUP_THREADS] =
            SCALE(FIT ? group_scale * (products / max(squares, 1.0f)) : group_scale);
    }
}
