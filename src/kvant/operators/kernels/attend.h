// Attention of a few new tokens to a cache, first pass: one threadgroup for a kv head and a split of its rows; PARTS of
// them where a kv head has more queries than one threadgroup takes.
//
// Inputs: query (B, H, NEW, DIM) T; cache (1, B, 2, K, MaxS, stored); scale (1, B, 2, K, MaxS, DIM / GROUP), any array
// where BITS is 0; offset (B,) int: rows before the new ones, which are in the cache already; and where they are used
// mask (1 or B, 1 or H, NEW, columns) float; key_bias (K, 2, PAIRS) float, pairs (PAIRS,) int, rotation (2, PAIRS, rows) float;
// slopes (H,) float.
// Outputs, float: partial (B, H, NEW, SPLITS, DIM), the sum of values by weight exp(score - most); sums, most (B, H, NEW, SPLITS).
//
// A simdgroup has QUERIES queries, their outputs and SLOTS rows at a time in its registers; LANES lanes share a row. TEAMS
// simdgroups share the rows of the same queries. Where one simdgroup can't have all queries of the threadgroup, CREWS of
// them do, and the rows are turned to float once, in threadgroup memory.

constexpr int ALL = HEADS * NEW;  // queries of a kv head
constexpr int HERE = CREWS * QUERIES;  // of a threadgroup; the last may have places without a query
constexpr int LANES = DIM <= 64 ? 8 : (DIM <= 128 ? 16 : 32);  // of 96 elements' lanes four are idle
constexpr int SLOTS = 32 / LANES;
constexpr int STEP = TEAMS * SLOTS * AHEAD;  // rows between two looks at the maximum
constexpr int THREADS = 32 * TEAMS * CREWS;
constexpr bool STAGED = CREWS > 1;
constexpr int ELEMENT_BITS = BITS ? BITS : 8 * int(sizeof(C));
constexpr int ROW_WORDS = DIM * ELEMENT_BITS / 32;
constexpr int CHUNKS = DIM / KVANT_WIDTH;
constexpr int STAGE = STAGED ? 2 * STEP * DIM : 0;
constexpr int GATHER = TEAMS > 1 ? TEAMS * CREWS * (DIM + 2) : 0;
constexpr int SHARED = STAGE > GATHER ? STAGE : GATHER;
constexpr int SOME_PAIRS = PAIRS > 0 ? PAIRS : 1;  // to divide by
constexpr float LEAST = -3.402823466e+38f;

// Element e of all chunks lies together, in both uses: a simdgroup's lanes read words that follow each other.
threadgroup float shared[SHARED > 0 ? SHARED : 1];
threadgroup float angles[PAIRS > 0 ? HERE * 2 * PAIRS : 1];  // what cosines and sines of the split-off bias are multiplied with

const uint me = thread_index_in_threadgroup;
const uint lane = thread_index_in_simdgroup;
const uint team = simdgroup_index_in_threadgroup % TEAMS;
const uint crew = simdgroup_index_in_threadgroup / TEAMS;
const uint slot = lane / LANES;
const uint chunk = lane % LANES;
const bool active = chunk < CHUNKS;
const uint head = threadgroup_position_in_grid.x / PARTS;
const int part = int(threadgroup_position_in_grid.x % PARTS);
const uint batch = threadgroup_position_in_grid.y;
const uint split = threadgroup_position_in_grid.z;
const uint heads = cache_shape[3];
const uint room = cache_shape[4];
const uint group = batch * heads + head;

const int start = offset[batch];
const int rows = start + NEW;
const int share = max((rows + SPLITS - 1) / SPLITS, LEAST_ROWS);
const int first = int(split) * share;
const int last = min(first + share, rows);

const size_t key_row = (size_t(batch) * 2 * heads + head) * room;
const size_t value_row = key_row + size_t(heads) * room;
const KVANT_DEVICE uint* words = reinterpret_cast<const KVANT_DEVICE uint*>(cache);
const KVANT_DEVICE uint* keys = words + key_row * ROW_WORDS;
const KVANT_DEVICE uint* values = words + value_row * ROW_WORDS;

const float by = 1.0f / sqrt(float(DIM));
const KVANT_DEVICE T* queries = query + size_t(group) * ALL * DIM;
float q[QUERIES][KVANT_WIDTH];
float o[QUERIES][KVANT_WIDTH];
float most_so_far[QUERIES];
float sum[QUERIES];
const int my_query = int(crew) * QUERIES;  // the first, in the threadgroup
const int first_query = part * HERE + my_query;  // the same, of the kv head's
for (int j = 0; j < QUERIES; j++) {
    const int a = first_query + j;
    for (int e = 0; e < KVANT_WIDTH; e++) {
        q[j][e] = active && a < ALL ? by * float(queries[a * DIM + int(chunk) * KVANT_WIDTH + e]) : 0.0f;
        o[j][e] = 0.0f;
    }
    most_so_far[j] = LEAST;
    sum[j] = 0.0f;
}
if (PAIRS > 0) {
    for (int i = int(me); i < HERE * PAIRS && part * HERE + i / SOME_PAIRS < ALL; i += THREADS) {
        const int mine = i / SOME_PAIRS;
        const int p = i % SOME_PAIRS;
        const int pair = (part * HERE + mine) * DIM + pairs[p];
        const float q1 = by * float(queries[pair]);
        const float q2 = by * float(queries[pair + DIM / 2]);
        const float b1 = key_bias[(head * 2) * PAIRS + p];
        const float b2 = key_bias[(head * 2 + 1) * PAIRS + p];
        angles[mine * 2 * PAIRS + p] = q1 * b1 + q2 * b2;
        angles[mine * 2 * PAIRS + PAIRS + p] = q2 * b1 - q1 * b2;
    }
    KVANT_BARRIER;
}

for (int base = first; base < last; base += STEP) {
    if (STAGED) {
        KVANT_BARRIER;  // the rows before these have been used
        for (int i = int(me); i < 2 * STEP * CHUNKS; i += THREADS) {
            const int which = i / (STEP * CHUNKS);
            const int r = i / CHUNKS % STEP;
            const int c = i % CHUNKS;
            float x[KVANT_WIDTH];
            for (int e = 0; e < KVANT_WIDTH; e++) {
                x[e] = 0.0f;
            }
            if (base + r < last) {
                Eight<BITS, C>::read((which ? values : keys) + size_t(base + r) * ROW_WORDS, c, x);
                if (BITS) {
                    const size_t row = (which ? value_row : key_row) + base + r;
                    const float by_scale = float(scale[row * (DIM / GROUP) + c * KVANT_WIDTH / GROUP]);
                    for (int e = 0; e < KVANT_WIDTH; e++) {
                        x[e] *= by_scale;
                    }
                }
            }
            for (int e = 0; e < KVANT_WIDTH; e++) {
                shared[which * STEP * DIM + (e * STEP + r) * CHUNKS + c] = x[e];
            }
        }
        KVANT_BARRIER;
    }

    float score[QUERIES][AHEAD];
    for (int u = 0; u < AHEAD; u++) {
        const int r = (u * TEAMS + int(team)) * SLOTS + int(slot);  // in the stage
        const int row = base + r;
        float x[KVANT_WIDTH];
        float by_scale = 1.0f;
        for (int e = 0; e < KVANT_WIDTH; e++) {
            x[e] = 0.0f;
        }
        if (active && row < last) {
            if (STAGED) {
                for (int e = 0; e < KVANT_WIDTH; e++) {
                    x[e] = shared[(e * STEP + r) * CHUNKS + int(chunk)];
                }
            } else {
                Eight<BITS, C>::read(keys + size_t(row) * ROW_WORDS, chunk, x);
                if (BITS) {
                    by_scale = float(scale[(key_row + row) * (DIM / GROUP) + chunk * KVANT_WIDTH / GROUP]);
                }
            }
        }
        for (int j = 0; j < QUERIES; j++) {
            const int a = first_query + j;
            float dot = 0.0f;
            for (int e = 0; e < KVANT_WIDTH; e++) {
                dot += q[j][e] * x[e];
            }
            dot *= by_scale;
            if (PAIRS > 0 && a < ALL && row < last) {
                for (int p = int(chunk); p < PAIRS; p += LANES) {
                    const size_t cosine = size_t(p) * rotation_shape[2] + row;
                    const size_t sine = cosine + size_t(PAIRS) * rotation_shape[2];
                    const int angle = (my_query + j) * 2 * PAIRS + p;
                    dot += angles[angle] * rotation[cosine] + angles[angle + PAIRS] * rotation[sine];
                }
            }
            for (uint other = LANES / 2; other > 0; other /= 2) {
                dot += simd_shuffle_xor(dot, other);
            }
            const int token = a % NEW;
            if (a >= ALL || row >= last || (CAUSAL && row > start + token)) {
                dot = kvant_float(0xff800000u);  // minus infinity
            } else {
                const uint query_head = head * HEADS + a / NEW;
                if (ALIBI) {
                    dot += slopes[query_head] * float(row - start - token);
                }
                if (MASK) {
                    const size_t masked = (batch % mask_shape[0]) * mask_shape[1] + query_head % mask_shape[1];
                    dot += mask[(masked * NEW + token) * mask_shape[3] + row];
                }
            }
            score[j][u] = dot;
        }
    }

    for (int j = 0; j < QUERIES; j++) {
        float top = most_so_far[j];
        for (int u = 0; u < AHEAD; u++) {
            top = max(top, score[j][u]);
        }
        const float shrink = kvant_exp(most_so_far[j] - top);
        most_so_far[j] = top;
        sum[j] *= shrink;
        for (int e = 0; e < KVANT_WIDTH; e++) {
            o[j][e] *= shrink;
        }
        for (int u = 0; u < AHEAD; u++) {
            score[j][u] = kvant_exp(score[j][u] - top);
            sum[j] += score[j][u];
        }
    }

    for (int u = 0; u < AHEAD; u++) {
        const int r = (u * TEAMS + int(team)) * SLOTS + int(slot);
        const int row = base + r;
        float x[KVANT_WIDTH];
        float by_scale = 1.0f;
        if (active && row < last) {
            if (STAGED) {
                for (int e = 0; e < KVANT_WIDTH; e++) {
                    x[e] = shared[STEP * DIM + (e * STEP + r) * CHUNKS + int(chunk)];
                }
            } else {
                Eight<BITS, C>::read(values + size_t(row) * ROW_WORDS, chunk, x);
                if (BITS) {
                    by_scale = float(scale[(value_row + row) * (DIM / GROUP) + chunk * KVANT_WIDTH / GROUP]);
                }
            }
            for (int j = 0; j < QUERIES; j++) {
                const float weight = score[j][u] * by_scale;
                for (int e = 0; e < KVANT_WIDTH; e++) {
                    o[j][e] += weight * x[e];
                }
            }
        }
    }
}

// The slots of a simdgroup, then the teams: sums and outputs brought to the larger maximum and added.
for (int j = 0; j < QUERIES; j++) {
    for (uint other = LANES; other < 32; other *= 2) {
        const float top = max(most_so_far[j], simd_shuffle_xor(most_so_far[j], other));
        const float shrink = kvant_exp(most_so_far[j] - top);
        most_so_far[j] = top;
        sum[j] *= shrink;
        sum[j] += simd_shuffle_xor(sum[j], other);
        for (int e = 0; e < KVANT_WIDTH; e++) {
            o[j][e] *= shrink;
            o[j][e] += simd_shuffle_xor(o[j][e], other);
        }
    }
}
for (int j = 0; j < QUERIES; j++) {
    const int a = first_query + j;
    if (TEAMS > 1) {
        const uint mine = simdgroup_index_in_threadgroup * (DIM + 2);
        KVANT_BARRIER;  // what was there has been read
        if (slot == 0 && active) {
            for (int e = 0; e < KVANT_WIDTH; e++) {
                shared[mine + e * CHUNKS + chunk] = o[j][e];
            }
        }
        if (lane == 0) {
            shared[mine + DIM] = most_so_far[j];
            shared[mine + DIM + 1] = sum[j];
        }
        KVANT_BARRIER;
        if (team == 0) {
            for (int other = 1; other < TEAMS; other++) {
                const uint theirs = mine + other * (DIM + 2);
                const float top = max(most_so_far[j], shared[theirs + DIM]);
                const float shrink = kvant_exp(most_so_far[j] - top);
                const float shrink_theirs = kvant_exp(shared[theirs + DIM] - top);
                most_so_far[j] = top;
                sum[j] = sum[j] * shrink + shared[theirs + DIM + 1] * shrink_theirs;
                if (active) {
                    for (int e = 0; e < KVANT_WIDTH; e++) {
                        o[j][e] = o[j][e] * shrink + shared[theirs + e * CHUNKS + chunk] * shrink_theirs;
                    }
                }
            }
        }
    }
    if (team == 0 && slot == 0 && a < ALL) {
        const size_t out = (size_t(group) * ALL + a) * SPLITS + split;
        if (lane == 0) {
            most[out] = most_so_far[j];
            sums[out] = sum[j];
        }
        if (active && first < last) {  // an empty split's output is not read
            for (int e = 0; e < KVANT_WIDTH; e++) {
                partial[out * DIM + int(chunk) * KVANT_WIDTH + e] = o[j][e];
            }
        }
    }
}
