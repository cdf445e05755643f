// New keys and values as the cache stores them: a thread quantizes and packs a word of levels, LANES threads a group.
//
// Inputs: key, value (B, K, S, DIM) T. Outputs: levels (B, 2, K, S, DIM * BITS / 32) uint; scales (B, 2, K, S, DIM / GROUP) SCALE.
// Every result is rounded to T, as those of the unfused operator are; for half precision a quotient of two floats is
// rounded twice with the same result. A NaN makes its group's scale NaN.

constexpr int TOP = BITS == 8 ? 127 : 7;
constexpr int PER_WORD = 32 / BITS;
constexpr int LANES = GROUP / PER_WORD;  // a power of two up to 32: a group's threads are neighbours in a simdgroup
constexpr int ROW_WORDS = DIM / PER_WORD;

const uint word = thread_position_in_grid.x;
const uint heads = key_shape[1];
const uint count = key_shape[2];
const uint row = word / ROW_WORDS;
const uint of_head = row / count;  // (b * 2 + which) * heads + head
const uint head = of_head % heads;
const bool of_value = of_head / heads % 2 == 1;
const uint batch = of_head / heads / 2;
const bool exists = batch < uint(key_shape[0]);

float x[PER_WORD];
float largest = 0.0f;
for (int e = 0; e < PER_WORD; e++) {
    const size_t source = ((size_t(batch) * heads + head) * count + row % count) * DIM + word % ROW_WORDS * PER_WORD + e;
    x[e] = !exists ? 0.0f : float(of_value ? value[source] : key[source]);
    largest = kvant_larger(largest, abs(x[e]));
}
for (uint other = LANES / 2; other > 0; other /= 2) {
    largest = kvant_larger(largest, simd_shuffle_xor(largest, other));
}
const float by = kvant_larger(float(T(largest / float(TOP))), float(T(1e-5f)));
if (exists) {
    uint packed = 0;
    for (int e = 0; e < PER_WORD; e++) {
        const float level = rint(float(T(x[e] / by)));
        const int kept = level > -float(TOP) ? int(min(level, float(TOP))) : -TOP;  // a NaN's level means nothing
        packed |= (uint(kept) & (0xffffffffu >> (32 - BITS))) << (BITS * e);
    }
    levels[word] = packed;
    if (word % LANES == 0) {
        scales[word / LANES] = SCALE(by);
    }
}
