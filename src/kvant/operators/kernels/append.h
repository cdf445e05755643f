// Quantizes new keys and values. A thread handles eight elements: one word at 4 bits, two at 8. GROUP_THREADS threads
// share a group. A simdgroup handles up to 256 elements of one token's key or value.
//
// Inputs: key (B, K, S, D) T, value (B, K, S, Dv) T. GROUP divides D and Dv.
// Outputs: quantized (B, 2, K, S, D * BITS / 32) uint; scales (B, 2, K, S, D / GROUP) SCALE.
// If keys and values differ in width or bits: (B, 1, K, S, ...), each token's key before its value.
//
// With FIT, at 4 bits, the value of the largest magnitude becomes -8, and the scale is sum(x q) / sum(q q) over the
// group's values x and quantized values q, in float32. The sums have another order, so a scale may differ by an ulp.
//
// Without FIT every result is rounded to T, as by the unfused operator. In half precision a quotient of two floats is
// rounded twice, with the same result. A NaN makes its group's scale NaN.

// A power of two up to 16. The threads of a group are adjacent in the simdgroup.
constexpr int GROUP_THREADS = GROUP / KVANT_WIDTH;
constexpr float TINY = 1e-30f;  // keeps a group of zeros from 0/0

const bool of_value = threadgroup_position_in_grid.z % 2 == 1;
const int bits = of_value ? VALUE_BITS : BITS;
const bool fit = FIT && bits == 4;
const int most = bits == 8 ? 127 : 7;
const int least = fit ? -8 : -most;
const uint batch = threadgroup_position_in_grid.z / 2;
const uint tokens = uint(key_shape[1]) * uint(key_shape[2]);  // of a sequence, in all its heads
const uint token = threadgroup_position_in_grid.y;
const uint chunk = thread_position_in_grid.x;  // of the key or value
const uint key_width = uint(key_shape[3]);
const uint value_width = uint(value_shape[3]);
const uint chunks = (of_value ? value_width : key_width) / KVANT_WIDTH;
const bool exists = chunk < chunks;

const size_t source = ((size_t(batch) * tokens + token) * chunks + chunk) * KVANT_WIDTH;
float x[KVANT_WIDTH];
KVANT_UNROLL
for (int e = 0; e < KVANT_WIDTH; e++) {
    x[e] = !exists ? 0.0f : float(of_value ? value[source + e] : key[source + e]);
}
float high = fit ? x[0] : 0.0f;  // of all magnitudes, or with FIT of the values
float low = x[0];
KVANT_UNROLL
for (int e = 0; e < KVANT_WIDTH; e++) {
    high = kvant_larger(high, fit ? x[e] : abs(x[e]));
    low = -kvant_larger(-low, -x[e]);
}
KVANT_UNROLL
for (uint other = GROUP_THREADS / 2; other > 0; other /= 2) {
    high = kvant_larger(high, simd_shuffle_xor(high, other));
    if (fit) {
        low = -kvant_larger(-low, -simd_shuffle_xor(low, other));
    }
}
const float group_scale = fit
    ? (high > -low ? high : low) * -0.125f + TINY
    : kvant_larger(float(T(high / float(most))), float(T(1e-5f)));
uint first = 0;
uint second = 0;  // word
float products = 0.0f;
float squares = 0.0f;
KVANT_UNROLL
for (int e = 0; e < KVANT_WIDTH; e++) {
    const float quotient = x[e] / group_scale;
    const float rounded = rint(fit ? quotient : float(T(quotient)));
    // A NaN becomes the least value, which does not matter because its scale is NaN.
    const int clamped = rounded > float(least) ? int(min(rounded, float(most))) : least;
    const uint packed = (uint(clamped) & (0xffffffffu >> (32 - bits))) << (bits * e % 32);
    first |= bits * e < 32 ? packed : 0;
    second |= bits * e < 32 ? 0 : packed;
    if (fit) {
        products += quotient * float(clamped);
        squares += float(clamped * clamped);
    }
}
if (fit) {
    KVANT_UNROLL
    for (uint other = GROUP_THREADS / 2; other > 0; other /= 2) {
        products += simd_shuffle_xor(products, other);
        squares += simd_shuffle_xor(squares, other);
    }
}
if (exists) {
    const bool beside = key_width != value_width || BITS != VALUE_BITS;
    const size_t row = beside ? size_t(batch) * tokens + token : (size_t(batch) * 2 + of_value) * tokens + token;
    const uint before = beside && of_value ? key_width : 0;  // elements of the row
    const uint row_bits = key_width * BITS + (beside ? value_width * VALUE_BITS : 0);
    const size_t stored = row * (row_bits / 32) + before * BITS / 32 + chunk * bits / 4;
    quantized[stored] = first;
    if (bits == 8) {
        quantized[stored + 1] = second;
    }
    if (chunk % GROUP_THREADS == 0) {
        const uint row_width = beside ? key_width + value_width : key_width;
        scales[row * (row_width / GROUP) + (before + chunk * KVANT_WIDTH) / GROUP] =
            SCALE(fit ? group_scale * (products / max(squares, 1.0f)) : group_scale);
    }
}
