// New keys and values as the cache stores them: a thread quantizes a group of GROUP elements and packs it.
//
// Inputs: key, value (B, K, NEW, DIM) T. Outputs: levels (B, 2, K, NEW, DIM * BITS / 32) uint; scales (B, 2, K, NEW, DIM / GROUP) S.
// Every result is rounded to T, as those of the composed operator are; for half precision a quotient of two floats is
// rounded twice with the same result.

constexpr int TOP = BITS == 8 ? 127 : 7;
constexpr int GROUPS = DIM / GROUP;
constexpr int PER_WORD = 32 / BITS;

const uint at = thread_position_in_grid.x;
const uint heads = key_shape[1];
const uint row = at / GROUPS;
const uint of_head = row / NEW;  // (b * 2 + which) * heads + head
const uint head = of_head % heads;
const uint which = of_head / heads % 2;
const uint batch = of_head / heads / 2;
if (batch < uint(key_shape[0])) {
    const size_t source = ((size_t(batch) * heads + head) * NEW + row % NEW) * DIM + at % GROUPS * GROUP;
    float x[GROUP];
    float largest = 0.0f;
    for (int e = 0; e < GROUP; e++) {
        x[e] = float(which ? value[source + e] : key[source + e]);
        largest = max(largest, abs(x[e]));
    }
    const float by = max(float(T(largest / float(TOP))), float(T(1e-5f)));
    scales[at] = S(by);
    for (int w = 0; w < GROUP / PER_WORD; w++) {
        uint word = 0;
        for (int e = 0; e < PER_WORD; e++) {
            const float level = rint(float(T(x[w * PER_WORD + e] / by)));
            const int kept = int(min(max(level, -float(TOP)), float(TOP)));
            word |= (uint(kept) & (0xffffffffu >> (32 - BITS))) << (BITS * e);
        }
        levels[size_t(at) * (GROUP / PER_WORD) + w] = word;
    }
}
