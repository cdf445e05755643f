// Loads elements 8 i to 8 i + 7 of one head's key or value as floats. `stored` is where that key or value starts.
// BITS 4 or 8: signed quantized values, two or one in a byte. BITS 0: elements of type C.
// One load of 32, 64 or 128 bits; two of 128 for float.

KVANT_CONSTANT int KVANT_WIDTH = 8;

// The larger of two, or NaN if one is NaN. max() may drop a NaN.
KVANT_FUNCTION float kvant_larger(float x, float y) { return x >= y || x != x ? x : y; }

template <int BITS, typename C>
struct Eight {
    KVANT_FUNCTION void read(const KVANT_DEVICE uint* stored, uint i, KVANT_THREAD float* x) {
        const uint4 words = reinterpret_cast<const KVANT_DEVICE uint4*>(stored)[i];
        x[0] = kvant_low(words.x, C()), x[1] = kvant_high(words.x, C());
        x[2] = kvant_low(words.y, C()), x[3] = kvant_high(words.y, C());
        x[4] = kvant_low(words.z, C()), x[5] = kvant_high(words.z, C());
        x[6] = kvant_low(words.w, C()), x[7] = kvant_high(words.w, C());
    }
};

template <>
struct Eight<0, float> {
    KVANT_FUNCTION void read(const KVANT_DEVICE uint* stored, uint i, KVANT_THREAD float* x) {
        for (uint half_index = 0; half_index < 2; half_index++) {
            const uint4 words = reinterpret_cast<const KVANT_DEVICE uint4*>(stored)[2 * i + half_index];
            x[4 * half_index] = kvant_float(words.x), x[4 * half_index + 1] = kvant_float(words.y);
            x[4 * half_index + 2] = kvant_float(words.z), x[4 * half_index + 3] = kvant_float(words.w);
        }
    }
};

template <typename C>
struct Eight<8, C> {
    KVANT_FUNCTION void read(const KVANT_DEVICE uint* stored, uint i, KVANT_THREAD float* x) {
        const uint2 words = reinterpret_cast<const KVANT_DEVICE uint2*>(stored)[i];
        for (int e = 0; e < 4; e++) {
            x[e] = float(int(words.x << (24 - 8 * e)) >> 24);
            x[4 + e] = float(int(words.y << (24 - 8 * e)) >> 24);
        }
    }
};

template <typename C>
struct Eight<4, C> {
    KVANT_FUNCTION void read(const KVANT_DEVICE uint* stored, uint i, KVANT_THREAD float* x) {
        const uint word = stored[i];
        for (int e = 0; e < 8; e++) {
            x[e] = float(int(word << (28 - 4 * e)) >> 28);
        }
    }
};
