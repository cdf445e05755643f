// Quantizes new keys and values. A thread makes one word of packed values; GROUP_THREADS threads share a group.
//
// Inputs: key, value (B, K, S, DIM) T.
// Outputs: quantized (B, 2, K, S, DIM * BITS / 32) uint; scales (B, 2, K, S, DIM / GROUP) SCALE.
//
// Every result is rounded to T, as by the unfused operator. In half precision a quotient of two floats is rounded
// twice, with the same result. A NaN makes its group's scale NaN.

constexpr int MAX_QUANTIZED = BITS == 8 ? 127 : 7;
constexpr int VALUES_PER_WORD = 32 / BITS;
// A power of two up to 32. The threads of a group are neighbours in a simdgroup.
constexpr int GROUP_THREADS = GROUP / VALUES_PER_WORD;
constexpr int STORED_WORDS = DIM / VALUES_PER_WORD;

const uint word = thread_position_in_grid.x;
const uint heads = key_shape[1];
const uint count = key_shape[2];
const uint stored_index = word / STORED_WORDS;
const uint flat_head = stored_index / count;  // (batch * 2 + of_value) * heads + head
const uint head = flat_head % heads;
const bool of_value = flat_head / heads % 2 == 1;
const uint batch = flat_head / heads / 2;
const bool exists = batch < uint(key_shape[0]);

float x[VALUES_PER_WORD];
float largest = 0.0f;
for (int e = 0; e < VALUES_PER_WORD; e++) {
    const size_t source =
        ((size_t(batch) * heads + head) * count + stored_index % count) * DIM +
        word % STORED_WORDS * VALUES_PER_WORD + e;
    x[e] = !exists ? 0.0f : float(of_value ? value[source] : key[source]);
    largest = kvant_larger(largest, abs(x[e]));
}
for (uint other = GROUP_THREADS / 2; other > 0; other /= 2) {
    largest = kvant_larger(largest, simd_shuffle_xor(largest, other));
}
const float group_scale = kvant_larger(float(T(largest / float(MAX_QUANTIZED))), float(T(1e-5f)));
if (exists) {
    uint packed = 0;
    for (int e = 0; e < VALUES_PER_WORD; e++) {
        const float rounded = rint(float(T(x[e] / group_scale)));
        // A NaN gives -MAX_QUANTIZED; its scale is NaN, so the value does not matter.
        const int clamped = rounded > -float(MAX_QUANTIZED) ? int(min(rounded, float(MAX_QUANTIZED))) : -MAX_QUANTIZED;
        packed |= (uint(clamped) & (0xffffffffu >> (32 - BITS))) << (BITS * e);
    }
    quantized[word] = packed;
    if (word % GROUP_THREADS == 0) {
        scales[word / GROUP_THREADS] = SCALE(group_scale);
    }
}
