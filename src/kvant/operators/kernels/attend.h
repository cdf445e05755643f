// Attention of a few new tokens to a cache, first pass. A threadgroup takes one kv head and one split of its tokens.
// A kv head with more queries than a threadgroup holds takes QUERY_TILES threadgroups for each split.
//
// Inputs:
//   query (B, H, NEW_TOKENS, DIM) T
//   cache (1, B, 2, K, MaxS, stored); it holds the new tokens already
//   scale (1, B, 2, K, MaxS, DIM / GROUP); any array where BITS is 0
//   offset (B,) int: tokens before the new ones
//   mask (1 or B, 1 or H, NEW_TOKENS, columns) float, where MASK
//   key_bias (K, 2, PAIRS) float, pairs (PAIRS,) int, rotation (2, PAIRS, positions) float, where PAIRS > 0
//   slopes (H,) float, where ALIBI
// Outputs, float:
//   partial (B, H, NEW_TOKENS, SPLITS, DIM): the sum of the values times exp(score - max_score)
//   sums, max_scores (B, H, NEW_TOKENS, SPLITS): the sum of exp(score - max_score), and max_score
//
// A simdgroup holds QUERIES queries and their outputs in its registers. It reads LANE_GROUPS tokens at a time; a lane
// group is LANES lanes that share a token. SIMDGROUPS simdgroups share the tokens of the same queries: a query group.
// A threadgroup has QUERY_GROUPS query groups. With more than one, tokens are turned to float once, in threadgroup
// memory.

constexpr int HEAD_QUERIES = HEADS * NEW_TOKENS;  // queries of a kv head
constexpr int TILE_QUERIES = QUERY_GROUPS * QUERIES;  // of a threadgroup; the last tile may have fewer
constexpr int LANES = DIM <= 64 ? 8 : (DIM <= 128 ? 16 : 32);  // with 96 elements four of 16 are idle
constexpr int LANE_GROUPS = 32 / LANES;
constexpr int STEP = SIMDGROUPS * LANE_GROUPS * UNROLL;  // tokens between two updates of the maximum
constexpr int THREADS = 32 * SIMDGROUPS * QUERY_GROUPS;
constexpr bool STAGED = QUERY_GROUPS > 1;
constexpr int ELEMENT_BITS = BITS ? BITS : 8 * int(sizeof(C));
constexpr int STORED_WORDS = DIM * ELEMENT_BITS / 32;
constexpr int CHUNKS = DIM / KVANT_WIDTH;
constexpr int STAGE = STAGED ? 2 * STEP * DIM : 0;
constexpr int GATHER = SIMDGROUPS > 1 ? SIMDGROUPS * QUERY_GROUPS * (DIM + 2) : 0;
constexpr int SHARED = STAGE > GATHER ? STAGE : GATHER;
constexpr int PAIRS_OR_ONE = PAIRS > 0 ? PAIRS : 1;  // a divisor
constexpr float LOWEST = -3.402823466e+38f;

// Element e of all chunks is stored together, in both uses: the lanes of a simdgroup then read consecutive words.
threadgroup float shared[SHARED > 0 ? SHARED : 1];
// Factors of the cosines and sines of the split-off key bias.
threadgroup float bias_weights[PAIRS > 0 ? TILE_QUERIES * 2 * PAIRS : 1];

const uint thread_index = thread_index_in_threadgroup;
const uint lane = thread_index_in_simdgroup;
const uint simdgroup_index = simdgroup_index_in_threadgroup % SIMDGROUPS;
const uint query_group = simdgroup_index_in_threadgroup / SIMDGROUPS;
const uint lane_group = lane / LANES;
const uint chunk = lane % LANES;
const bool active = chunk < CHUNKS;
const uint head = threadgroup_position_in_grid.x / QUERY_TILES;
const int query_tile = int(threadgroup_position_in_grid.x % QUERY_TILES);
const uint batch = threadgroup_position_in_grid.y;
const uint split = threadgroup_position_in_grid.z;
const uint heads = cache_shape[3];
const uint max_tokens = cache_shape[4];
const uint flat_head = batch * heads + head;

const int start = offset[batch];
const int tokens = start + NEW_TOKENS;
const int split_tokens = max((tokens + SPLITS - 1) / SPLITS, MIN_SPLIT_TOKENS);
const int first = int(split) * split_tokens;
const int last = min(first + split_tokens, tokens);

const size_t first_key = (size_t(batch) * 2 * heads + head) * max_tokens;
const size_t first_value = first_key + size_t(heads) * max_tokens;
const KVANT_DEVICE uint* words = reinterpret_cast<const KVANT_DEVICE uint*>(cache);
const KVANT_DEVICE uint* keys = words + first_key * STORED_WORDS;
const KVANT_DEVICE uint* values = words + first_value * STORED_WORDS;

const float query_scale = 1.0f / sqrt(float(DIM));
const KVANT_DEVICE T* queries = query + size_t(flat_head) * HEAD_QUERIES * DIM;
float q[QUERIES][KVANT_WIDTH];
float o[QUERIES][KVANT_WIDTH];
float max_score[QUERIES];
float sum[QUERIES];
const int first_in_tile = int(query_group) * QUERIES;  // the first one's number in the threadgroup
const int first_query = query_tile * TILE_QUERIES + first_in_tile;  // its number in the kv head
for (int j = 0; j < QUERIES; j++) {
    const int a = first_query + j;
    for (int e = 0; e < KVANT_WIDTH; e++) {
        const int element = a * DIM + int(chunk) * KVANT_WIDTH + e;
        q[j][e] = active && a < HEAD_QUERIES ? query_scale * float(queries[element]) : 0.0f;
        o[j][e] = 0.0f;
    }
    max_score[j] = LOWEST;
    sum[j] = 0.0f;
}
if (PAIRS > 0) {
    for (int i = int(thread_index);
         i < TILE_QUERIES * PAIRS && query_tile * TILE_QUERIES + i / PAIRS_OR_ONE < HEAD_QUERIES; i += THREADS) {
        const int own = i / PAIRS_OR_ONE;
        const int p = i % PAIRS_OR_ONE;
        const int pair = (query_tile * TILE_QUERIES + own) * DIM + pairs[p];
        const float q1 = query_scale * float(queries[pair]);
        const float q2 = query_scale * float(queries[pair + DIM / 2]);
        const float b1 = key_bias[(head * 2) * PAIRS + p];
        const float b2 = key_bias[(head * 2 + 1) * PAIRS + p];
        bias_weights[own * 2 * PAIRS + p] = q1 * b1 + q2 * b2;
        bias_weights[own * 2 * PAIRS + PAIRS + p] = q2 * b1 - q1 * b2;
    }
    KVANT_BARRIER;
}

for (int base = first; base < last; base += STEP) {
    if (STAGED) {
        KVANT_BARRIER;  // the last step's tokens have been used
        for (int i = int(thread_index); i < 2 * STEP * CHUNKS; i += THREADS) {
            const int is_value = i / (STEP * CHUNKS);
            const int r = i / CHUNKS % STEP;
            const int c = i % CHUNKS;
            float x[KVANT_WIDTH];
            for (int e = 0; e < KVANT_WIDTH; e++) {
                x[e] = 0.0f;
            }
            if (base + r < last) {
                Eight<BITS, C>::read((is_value ? values : keys) + size_t(base + r) * STORED_WORDS, c, x);
                if (BITS) {
                    const size_t position = (is_value ? first_value : first_key) + base + r;
                    const float group_scale = float(scale[position * (DIM / GROUP) + c * KVANT_WIDTH / GROUP]);
                    for (int e = 0; e < KVANT_WIDTH; e++) {
                        x[e] *= group_scale;
                    }
                }
            }
            for (int e = 0; e < KVANT_WIDTH; e++) {
                shared[is_value * STEP * DIM + (e * STEP + r) * CHUNKS + c] = x[e];
            }
        }
        KVANT_BARRIER;
    }

    float score[QUERIES][UNROLL];
    for (int u = 0; u < UNROLL; u++) {
        const int r = (u * SIMDGROUPS + int(simdgroup_index)) * LANE_GROUPS + int(lane_group);  // number in the step
        const int position = base + r;
        float x[KVANT_WIDTH];
        float group_scale = 1.0f;
        for (int e = 0; e < KVANT_WIDTH; e++) {
            x[e] = 0.0f;
        }
        if (active && position < last) {
            if (STAGED) {
                for (int e = 0; e < KVANT_WIDTH; e++) {
                    x[e] = shared[(e * STEP + r) * CHUNKS + int(chunk)];
                }
            } else {
                Eight<BITS, C>::read(keys + size_t(position) * STORED_WORDS, chunk, x);
                if (BITS) {
                    group_scale = float(scale[(first_key + position) * (DIM / GROUP) + chunk * KVANT_WIDTH / GROUP]);
                }
            }
        }
        for (int j = 0; j < QUERIES; j++) {
            const int a = first_query + j;
            float dot = 0.0f;
            for (int e = 0; e < KVANT_WIDTH; e++) {
                dot += q[j][e] * x[e];
            }
            dot *= group_scale;
            if (PAIRS > 0 && a < HEAD_QUERIES && position < last) {
                for (int p = int(chunk); p < PAIRS; p += LANES) {
                    const size_t cosine = size_t(p) * rotation_shape[2] + position;
                    const size_t sine = cosine + size_t(PAIRS) * rotation_shape[2];
                    const int index = (first_in_tile + j) * 2 * PAIRS + p;
                    dot += bias_weights[index] * rotation[cosine] + bias_weights[index + PAIRS] * rotation[sine];
                }
            }
            for (uint other = LANES / 2; other > 0; other /= 2) {
                dot += simd_shuffle_xor(dot, other);
            }
            const int new_token = a % NEW_TOKENS;
            if (a >= HEAD_QUERIES || position >= last || (CAUSAL && position > start + new_token)) {
                dot = kvant_float(0xff800000u);  // minus infinity
            } else {
                const uint query_head = head * HEADS + a / NEW_TOKENS;
                if (ALIBI) {
                    dot += slopes[query_head] * float(position - start - new_token);
                }
                if (MASK) {
                    const size_t masked = (batch % mask_shape[0]) * mask_shape[1] + query_head % mask_shape[1];
                    dot += mask[(masked * NEW_TOKENS + new_token) * mask_shape[3] + position];
                }
            }
            score[j][u] = dot;
        }
    }

    for (int j = 0; j < QUERIES; j++) {
        float top = max_score[j];
        for (int u = 0; u < UNROLL; u++) {
            top = max(top, score[j][u]);
        }
        const float rescale = kvant_exp(max_score[j] - top);
        max_score[j] = top;
        sum[j] *= rescale;
        for (int e = 0; e < KVANT_WIDTH; e++) {
            o[j][e] *= rescale;
        }
        for (int u = 0; u < UNROLL; u++) {
            score[j][u] = kvant_exp(score[j][u] - top);
            sum[j] += score[j][u];
        }
    }

    for (int u = 0; u < UNROLL; u++) {
        const int r = (u * SIMDGROUPS + int(simdgroup_index)) * LANE_GROUPS + int(lane_group);
        const int position = base + r;
        float x[KVANT_WIDTH];
        float group_scale = 1.0f;
        if (active && position < last) {
            if (STAGED) {
                for (int e = 0; e < KVANT_WIDTH; e++) {
                    x[e] = shared[STEP * DIM + (e * STEP + r) * CHUNKS + int(chunk)];
                }
            } else {
                Eight<BITS, C>::read(values + size_t(position) * STORED_WORDS, chunk, x);
                if (BITS) {
                    group_scale = float(scale[(first_value + position) * (DIM / GROUP) + chunk * KVANT_WIDTH / GROUP]);
                }
            }
            for (int j = 0; j < QUERIES; j++) {
                const float weight = score[j][u] * group_scale;
                for (int e = 0; e < KVANT_WIDTH; e++) {
                    o[j][e] += weight * x[e];
                }
            }
        }
    }
}

// Add up sums and outputs, rescaled to the larger maximum: first over the lane groups of a simdgroup, then over the
// simdgroups of a query group.
for (int j = 0; j < QUERIES; j++) {
    for (uint other = LANES; other < 32; other *= 2) {
        const float top = max(max_score[j], simd_shuffle_xor(max_score[j], other));
        const float rescale = kvant_exp(max_score[j] - top);
        max_score[j] = top;
        sum[j] *= rescale;
        sum[j] += simd_shuffle_xor(sum[j], other);
        for (int e = 0; e < KVANT_WIDTH; e++) {
            o[j][e] *= rescale;
            o[j][e] += simd_shuffle_xor(o[j][e], other);
        }
    }
}
for (int j = 0; j < QUERIES; j++) {
    const int a = first_query + j;
    if (SIMDGROUPS > 1) {
        const uint own = simdgroup_index_in_threadgroup * (DIM + 2);
        KVANT_BARRIER;  // its last contents have been read
        if (lane_group == 0 && active) {
            for (int e = 0; e < KVANT_WIDTH; e++) {
                shared[own + e * CHUNKS + chunk] = o[j][e];
            }
        }
        if (lane == 0) {
            shared[own + DIM] = max_score[j];
            shared[own + DIM + 1] = sum[j];
        }
        KVANT_BARRIER;
        if (simdgroup_index == 0) {
            for (int other = 1; other < SIMDGROUPS; other++) {
                const uint others = own + other * (DIM + 2);
                const float top = max(max_score[j], shared[others + DIM]);
                const float rescale = kvant_exp(max_score[j] - top);
                const float rescale_others = kvant_exp(shared[others + DIM] - top);
                max_score[j] = top;
                sum[j] = sum[j] * rescale + shared[others + DIM + 1] * rescale_others;
                if (active) {
                    for (int e = 0; e < KVANT_WIDTH; e++) {
                        o[j][e] = o[j][e] * rescale + shared[others + e * CHUNKS + chunk] * rescale_others;
                    }
                }
            }
        }
    }
    if (simdgroup_index == 0 && lane_group == 0 && a < HEAD_QUERIES) {
        const size_t out = (size_t(flat_head) * HEAD_QUERIES + a) * SPLITS + split;
        if (lane == 0) {
            max_scores[out] = max_score[j];
            sums[out] = sum[j];
        }
        if (active && first < last) {  // an empty split's output is not read
            for (int e = 0; e < KVANT_WIDTH; e++) {
                partial[out * DIM + int(chunk) * KVANT_WIDTH + e] = o[j][e];
            }
        }
    }
}
