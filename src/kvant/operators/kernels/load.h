// Loads elements 8 i to 8 i + 7 of one head's key or value in stored form, and converts them to floats. `stored` is the
// start of that key or value.
// BITS 4 or 8: signed quantized values, two or one in a byte. BITS 0: elements of type C.
// One load of 32, 64 or 128 bits; two of 128 for float.
//
// A quantized value is put into the mantissa of a half of 1,024, with its sign bit flipped so that it counts from 0,
// and the excess is subtracted. That is exact and takes no integer conversion. At 4 bits the odd elements come out 16
// times too large, because every second value is not shifted: multiply their sums by kvant_factor.

KVANT_CONSTANT int KVANT_WIDTH = 8;

// The larger of two, or NaN if one is NaN. max() may drop a NaN.
KVANT_FUNCTION float kvant_larger(float x, float y) { return x >= y || x != x ? x : y; }

// The factor for sums over element e of all chunks.
template <int BITS>
KVANT_FUNCTION float kvant_factor(int e) {
    return BITS == 4 && e % 2 == 1 ? 0.0625f : 1.0f;
}

template <int BITS, typename C>
struct Eight {
    using Raw = uint4;
    KVANT_FUNCTION Raw load(const KVANT_DEVICE uint* stored, uint i) {
        return reinterpret_cast<const KVANT_DEVICE uint4*>(stored)[i];
    }
    KVANT_FUNCTION void floats(Raw raw, KVANT_THREAD float* x) {
        x[0] = kvant_low(raw.x, C()), x[1] = kvant_high(raw.x, C());
        x[2] = kvant_low(raw.y, C()), x[3] = kvant_high(raw.y, C());
        x[4] = kvant_low(raw.z, C()), x[5] = kvant_high(raw.z, C());
        x[6] = kvant_low(raw.w, C()), x[7] = kvant_high(raw.w, C());
    }
};

template <>
struct Eight<0, float> {
    struct Raw {
        uint4 first, second;
    };
    KVANT_FUNCTION Raw load(const KVANT_DEVICE uint* stored, uint i) {
        const KVANT_DEVICE uint4* words = reinterpret_cast<const KVANT_DEVICE uint4*>(stored);
        return Raw{words[2 * i], words[2 * i + 1]};
    }
    KVANT_FUNCTION void floats(Raw raw, KVANT_THREAD float* x) {
        x[0] = kvant_float(raw.first.x), x[1] = kvant_float(raw.first.y);
        x[2] = kvant_float(raw.first.z), x[3] = kvant_float(raw.first.w);
        x[4] = kvant_float(raw.second.x), x[5] = kvant_float(raw.second.y);
        x[6] = kvant_float(raw.second.z), x[7] = kvant_float(raw.second.w);
    }
};

template <typename C>
struct Eight<8, C> {
    using Raw = uint2;
    KVANT_FUNCTION Raw load(const KVANT_DEVICE uint* stored, uint i) {
        return reinterpret_cast<const KVANT_DEVICE uint2*>(stored)[i];
    }
    KVANT_FUNCTION void floats(Raw raw, KVANT_THREAD float* x) {
        kvant_two((raw.x & 0x00ff00ffu) ^ 0x64806480u, 1152.0f, x[0], x[2]);
        kvant_two((raw.x >> 8 & 0x00ff00ffu) ^ 0x64806480u, 1152.0f, x[1], x[3]);
        kvant_two((raw.y & 0x00ff00ffu) ^ 0x64806480u, 1152.0f, x[4], x[6]);
        kvant_two((raw.y >> 8 & 0x00ff00ffu) ^ 0x64806480u, 1152.0f, x[5], x[7]);
    }
};

template <typename C>
struct Eight<4, C> {
    using Raw = uint;
    KVANT_FUNCTION Raw load(const KVANT_DEVICE uint* stored, uint i) { return stored[i]; }
    KVANT_FUNCTION void floats(Raw raw, KVANT_THREAD float* x) {
        kvant_two((raw & 0x000f000fu) ^ 0x64086408u, 1032.0f, x[0], x[4]);
        kvant_two((raw & 0x00f000f0u) ^ 0x64806480u, 1152.0f, x[1], x[5]);
        kvant_two((raw >> 8 & 0x000f000fu) ^ 0x64086408u, 1032.0f, x[2], x[6]);
        kvant_two((raw >> 8 & 0x00f000f0u) ^ 0x64806480u, 1152.0f, x[3], x[7]);
    }
};
