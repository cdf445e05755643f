// Eight elements of a cached row to float: element 8 i and on, of a row that starts at `row`.
// BITS 4 or 8: signed levels, two or one a byte; 0: elements of type C. One load of 32, 64 or 128 bits, two for float.

KVANT_CONSTANT int KVANT_WIDTH = 8;

// The larger of two, NaN if one is: max() may drop it.
KVANT_FUNCTION float kvant_larger(float x, float y) { return x >= y || x != x ? x : y; }

template <int BITS, typename C>
struct Eight {
    KVANT_FUNCTION void read(const KVANT_DEVICE uint* row, uint i, KVANT_THREAD float* x) {
        const uint4 words = reinterpret_cast<const KVANT_DEVICE uint4*>(row)[i];
        x[0] = kvant_low(words.x, C()), x[1] = kvant_high(words.x, C());
        x[2] = kvant_low(words.y, C()), x[3] = kvant_high(words.y, C());
        x[4] = kvant_low(words.z, C()), x[5] = kvant_high(words.z, C());
        x[6] = kvant_low(words.w, C()), x[7] = kvant_high(words.w, C());
    }
};

template <>
struct Eight<0, float> {
    KVANT_FUNCTION void read(const KVANT_DEVICE uint* row, uint i, KVANT_THREAD float* x) {
        for (uint half_row = 0; half_row < 2; half_row++) {
            const uint4 words = reinterpret_cast<const KVANT_DEVICE uint4*>(row)[2 * i + half_row];
            x[4 * half_row] = kvant_float(words.x), x[4 * half_row + 1] = kvant_float(words.y);
            x[4 * half_row + 2] = kvant_float(words.z), x[4 * half_row + 3] = kvant_float(words.w);
        }
    }
};

template <typename C>
struct Eight<8, C> {
    KVANT_FUNCTION void read(const KVANT_DEVICE uint* row, uint i, KVANT_THREAD float* x) {
        const uint2 words = reinterpret_cast<const KVANT_DEVICE uint2*>(row)[i];
        for (int e = 0; e < 4; e++) {
            x[e] = float(int(words.x << (24 - 8 * e)) >> 24);
            x[4 + e] = float(int(words.y << (24 - 8 * e)) >> 24);
        }
    }
};

template <typename C>
struct Eight<4, C> {
    KVANT_FUNCTION void read(const KVANT_DEVICE uint* row, uint i, KVANT_THREAD float* x) {
        const uint word = row[i];
        for (int e = 0; e < 8; e++) {
            x[e] = float(int(word << (28 - 4 * e)) >> 28);
        }
    }
};
