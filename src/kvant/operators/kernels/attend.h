// Attention of a few new tokens to a cache, first pass. A threadgroup handles one kv head and one split of its rows.
// A kv head with more queries than a threadgroup can hold takes several threadgroups for each split: tiles.
//
// Inputs:
//   query (B, H, S, DIM) T
//   cache (1, B, 2, K, rows, stored), or of a pool (2, K, rows, stored), including the new tokens. Keys and values of
//     different widths or bits share rows: 1 in place of 2
//   scale: the same, with (DIM / GROUP) in place of stored; any array if BITS is 0
//   offset (1 or B,) int: tokens before the new ones
//   pages (B, pages), first (B,) int: if PAGE is not 0, a sequence's pages, and the position of its first row
//   settings (4,) int: see rows.h. KVANT_SHARING is the number of simdgroups that share the rows of the same queries
//   numbers (2,) float: the scores' scale, and the cap of SOFTCAP
//   mask (1 or B, 1 or H, S, columns) float, with MASK; a column is a row of the sequence
//   key_bias (K, 2, pairs) float, pairs (pairs,) int, rotation (2, pairs, columns) float, with BIAS,
//     which is the number of floats that a threadgroup has for it
//   slopes (H,) float, with ALIBI
//   spans (B, 4) int, with TAIL: the sinks, start and end of each sequence's exact tail, and a number that is not read
// TAIL 1: sequences have exact tails, and these are the quantized rows. TAIL 2: `cache` and `pages` are of the exact
// rows, which have BITS 0. Both are causal and without MASK and ALIBI.
// Outputs, float:
//   partial (B, H, S, splits, VALUE_DIM): the sum of the values times exp(score - max_score); element e of all chunks
//     together
//   sums, max_scores (B, H, S, splits): the sum of exp(score - max_score), and max_score
// Splits without rows are not written.
//
// A simdgroup has QUERIES queries (a power of two) and their outputs in its registers: a query group. It reads
// LANE_GROUPS rows at a time, and loads UNROLL times as many before it uses the first. A lane group is LANES lanes that
// share a row. Its rows have UNROLL * QUERIES scores, numbered query * UNROLL + row. Each lane adds up OWN of them and
// turns them into weights; if there are fewer scores than lanes, REPEAT lanes do the same one.

using Key = Eight<BITS, C>;
using Value = Eight<VALUE_BITS, C>;
constexpr int KEY_CHUNKS = DIM / KVANT_WIDTH;
constexpr int VALUE_CHUNKS = VALUE_DIM / KVANT_WIDTH;
constexpr int CHUNKS = KEY_CHUNKS > VALUE_CHUNKS ? KEY_CHUNKS : VALUE_CHUNKS;
constexpr int LANES = CHUNKS <= 8 ? 8 : (CHUNKS <= 16 ? 16 : 32);  // with 96 elements four of 16 are idle
constexpr int LANE_GROUPS = 32 / LANES;
constexpr int KEY_PARTS = (KEY_CHUNKS + LANES - 1) / LANES;  // chunks of a lane
constexpr int VALUE_PARTS = (VALUE_CHUNKS + LANES - 1) / LANES;
constexpr bool BESIDE = DIM != VALUE_DIM || BITS != VALUE_BITS;  // keys and values are in the same rows
constexpr int ELEMENT_BITS = BITS ? BITS : 8 * int(sizeof(C));  // of a key
constexpr int KEY_WORDS = DIM * ELEMENT_BITS / 32;
constexpr int VALUE_WORDS = VALUE_DIM * (VALUE_BITS ? VALUE_BITS : ELEMENT_BITS) / 32;
constexpr int ROW_WORDS = KEY_WORDS + (BESIDE ? VALUE_WORDS : 0);
constexpr int ROW_SCALES = (BESIDE ? DIM + VALUE_DIM : DIM) / GROUP;
constexpr int LANE_WORDS = KEY_PARTS * KVANT_WIDTH * ELEMENT_BITS / 32;
constexpr int UNROLL = LANE_WORDS > 8 ? 1 : (LANE_WORDS > 4 || QUERIES > 4 ? 2 : 4);
constexpr int SCORES = QUERIES * UNROLL;
constexpr int OWN = SCORES > LANES ? SCORES / LANES : 1;
constexpr int REPEAT = LANES > SCORES ? LANES / SCORES : 1;
constexpr int QUERY_LANES = LANES / QUERIES;  // that have scores of the same query
constexpr int PAGE_OR_ONE = PAGE ? PAGE : 1;  // a divisor
constexpr int GATHERED = VALUE_DIM + 2;  // of a query: its output, maximum and sum
constexpr float LOWEST = -3.402823466e+38f;

// Of the simdgroups that share rows.
constexpr int SHARERS = QUERIES * CHUNKS > 128 ? 2 : 4;
threadgroup float gathered[SHARERS * QUERIES * GATHERED];
// Factors of the cosines and sines of the split-off key bias.
threadgroup float bias_weights[BIAS ? BIAS : 1];

const int sharing = settings[KVANT_SHARING];
const int query_groups = int(simdgroups_per_threadgroup) / sharing;
const int lane = int(thread_index_in_simdgroup);
const int simdgroup_index = int(simdgroup_index_in_threadgroup);
const int sharer = simdgroup_index % sharing;
const int lane_group = lane / LANES;
const int lane_chunk = lane % LANES;
const int heads = cache_shape[PAGE ? 1 : 3];
const int max_rows = cache_shape[PAGE ? 2 : 4];
const int tiles = int(threadgroups_per_grid.x) / heads;
const int head = int(threadgroup_position_in_grid.x) / tiles;
const int tile = int(threadgroup_position_in_grid.x) % tiles;
const int batch = int(threadgroup_position_in_grid.y);
const int split = int(threadgroup_position_in_grid.z);
const int splits = int(threadgroups_per_grid.z);
const int new_tokens = query_shape[2];
const int query_heads = query_shape[1] / heads;  // of a kv head
const int head_queries = query_heads * new_tokens;

const int start = offset[batch % offset_shape[0]];
const int first_position = PAGE ? first[batch] : 0;
const int window = WINDOW ? settings[KVANT_WINDOW] : 0;
KvantTail tail = {};
KvantRows rows;
if (TAIL) {
    tail = KvantTail::of(spans[batch * 4], spans[batch * 4 + 1], spans[batch * 4 + 2], start, window);
}
if (TAIL == 2) {
    rows = KvantRows::between(0, KVANT_SINKS + KVANT_RING, KVANT_TAIL_SPLITS);
} else if (TAIL == 1) {
    rows = KvantRows::before_tail(tail, start, new_tokens, first_position, settings[KVANT_SPLITS]);
} else {
    rows = KvantRows::of(start, new_tokens, first_position, window, settings[KVANT_SPLITS]);
}
const int begin = rows.begin + split * rows.split_rows;
const int end = min(begin + rows.split_rows, rows.held);
if (begin >= end) {
    return;
}

const size_t first_key = (size_t(PAGE ? 0 : batch) * (BESIDE ? 1 : 2) * heads + head) * max_rows;
const size_t first_value = BESIDE ? first_key : first_key + size_t(heads) * max_rows;
const KVANT_DEVICE uint* words = reinterpret_cast<const KVANT_DEVICE uint*>(cache);
const KVANT_DEVICE uint* keys = words + first_key * ROW_WORDS;
const KVANT_DEVICE uint* values = words + first_value * ROW_WORDS + (BESIDE ? KEY_WORDS : 0);

const float score_scale = numbers[0];
const KVANT_DEVICE T* queries = query + (size_t(batch) * heads + head) * head_queries * DIM;
const int first_in_tile = simdgroup_index / sharing * QUERIES;  // the first one's number in the threadgroup
const int tile_queries = query_groups * QUERIES;
const int first_query = tile * tile_queries + first_in_tile;  // its number in the kv head
float q[QUERIES][KEY_PARTS][KVANT_WIDTH];
float o[QUERIES][VALUE_PARTS][KVANT_WIDTH];
KVANT_UNROLL
for (int j = 0; j < QUERIES; j++) {
    const int a = min(first_query + j, head_queries - 1);
    KVANT_UNROLL
    for (int part = 0; part < KEY_PARTS; part++) {
        const int chunk = lane_chunk + part * LANES;
        const int element = a * DIM + min(chunk, KEY_CHUNKS - 1) * KVANT_WIDTH;
        const float factor = chunk < KEY_CHUNKS ? score_scale : 0.0f;
        KVANT_UNROLL
        for (int e = 0; e < KVANT_WIDTH; e++) {
            q[j][part][e] = factor * kvant_factor<BITS>(e) * float(queries[element + e]);
        }
    }
    KVANT_UNROLL
    for (int part = 0; part < VALUE_PARTS; part++) {
        KVANT_UNROLL
        for (int e = 0; e < KVANT_WIDTH; e++) {
            o[j][part][e] = 0.0f;
        }
    }
}
// The query whose scores this lane turns into weights.
const int own_query = first_query + lane_chunk / QUERY_LANES;
const bool exists = own_query < head_queries;
const int new_token = own_query % new_tokens;
const int query_head = head * query_heads + min(own_query, head_queries - 1) / new_tokens;
const int query_position = start + new_token;
const int last_seen = !exists ? -1 : (settings[KVANT_CAUSAL] ? query_position : start + new_tokens - 1);
const int first_score = lane_chunk / REPEAT * OWN % UNROLL;  // its first row of a step
float max_score = LOWEST;
float sum = 0.0f;  // of its own rows
const int num_pairs = BIAS ? pairs_shape[0] : 0;
if (BIAS) {
    const int threads = 32 * int(simdgroups_per_threadgroup);
    for (int i = int(thread_index_in_threadgroup); i < tile_queries * num_pairs; i += threads) {
        const int own = i / num_pairs;
        const int p = i % num_pairs;
        const int a = tile * tile_queries + own;
        const int pair = min(a, head_queries - 1) * DIM + pairs[p];
        const float q1 = score_scale * float(queries[pair]);
        const float q2 = score_scale * float(queries[pair + DIM / 2]);
        const float b1 = key_bias[head * 2 * num_pairs + p];
        const float b2 = key_bias[(head * 2 + 1) * num_pairs + p];
        bias_weights[own * 2 * num_pairs + p] = q1 * b1 + q2 * b2;
        bias_weights[own * 2 * num_pairs + num_pairs + p] = q2 * b1 - q1 * b2;
    }
    KVANT_BARRIER;
}

for (int base = begin; base < end; base += sharing * LANE_GROUPS * UNROLL) {
    // A step's rows are in one page. Instead of a missing row the nearest existing one is read, with weight 0.
    const int moved = PAGE ? pages[batch * pages_shape[1] + base / PAGE_OR_ONE] * PAGE - base / PAGE_OR_ONE * PAGE : 0;
    typename Key::Raw key_raw[UNROLL][KEY_PARTS];
    float key_scale[UNROLL][KEY_PARTS];
    KVANT_UNROLL
    for (int u = 0; u < UNROLL; u++) {
        const int row = base + (u * sharing + sharer) * LANE_GROUPS + lane_group;
        const uint stored = uint(moved + (TAIL == 2 ? kvant_row_read(row, tail) : min(max(row, rows.low), end - 1)));
        KVANT_UNROLL
        for (int part = 0; part < KEY_PARTS; part++) {
            const uint chunk = uint(min(lane_chunk + part * LANES, KEY_CHUNKS - 1));
            key_raw[u][part] = Key::load(keys + stored * ROW_WORDS, chunk);
            key_scale[u][part] =
                BITS ? float(scale[first_key * ROW_SCALES + stored * ROW_SCALES + chunk * KVANT_WIDTH / GROUP]) : 1.0f;
        }
    }
    float score[SCORES];
    KVANT_UNROLL
    for (int u = 0; u < UNROLL; u++) {
        KVANT_UNROLL
        for (int j = 0; j < QUERIES; j++) {
            score[j * UNROLL + u] = 0.0f;
        }
        KVANT_UNROLL
        for (int part = 0; part < KEY_PARTS; part++) {
            float x[KVANT_WIDTH];
            Key::floats(key_raw[u][part], x);
            KVANT_UNROLL
            for (int j = 0; j < QUERIES; j++) {
                float dot = 0.0f;
                KVANT_UNROLL
                for (int e = 0; e < KVANT_WIDTH; e++) {
                    dot += q[j][part][e] * x[e];
                }
                score[j * UNROLL + u] += dot * key_scale[u][part];
            }
        }
    }

    // Values are loaded while scores are added up.
    typename Value::Raw value_raw[UNROLL][VALUE_PARTS];
    float value_scale[UNROLL][VALUE_PARTS];
    KVANT_UNROLL
    for (int u = 0; u < UNROLL; u++) {
        const int row = base + (u * sharing + sharer) * LANE_GROUPS + lane_group;
        const uint stored = uint(moved + (TAIL == 2 ? kvant_row_read(row, tail) : min(max(row, rows.low), end - 1)));
        KVANT_UNROLL
        for (int part = 0; part < VALUE_PARTS; part++) {
            const uint chunk = uint(min(lane_chunk + part * LANES, VALUE_CHUNKS - 1));
            value_raw[u][part] = Value::load(values + stored * ROW_WORDS, chunk);
            const uint group = ((BESIDE ? DIM : 0) + chunk * KVANT_WIDTH) / GROUP;
            value_scale[u][part] =
                BITS ? float(scale[first_value * ROW_SCALES + stored * ROW_SCALES + group]) : 1.0f;
        }
    }

    if (BIAS) {
        const int columns = rotation_shape[2];
        KVANT_UNROLL
        for (int u = 0; u < UNROLL; u++) {
            const int row = base + (u * sharing + sharer) * LANE_GROUPS + lane_group;
            KVANT_ROLLED
            for (int p = lane_chunk; p < num_pairs; p += LANES) {
                const int held = first_position + min(max(row, rows.low), end - 1);
                const int cosine = p * columns + (TAIL == 2 ? kvant_position_read(row, tail) : held);
                const float c = rotation[cosine];
                const float s = rotation[cosine + num_pairs * columns];
                KVANT_UNROLL
                for (int j = 0; j < QUERIES; j++) {
                    const int weight = (first_in_tile + j) * 2 * num_pairs + p;
                    score[j * UNROLL + u] += bias_weights[weight] * c + bias_weights[weight + num_pairs] * s;
                }
            }
        }
    }

    // Sums over the lanes of a group. A lane passes on half of the scores and keeps the others, down to its own ones.
    // This form keeps scores in registers: clang needs no branch after the inner loop, nvcc a constant end of it.
    KVANT_UNROLL
    for (int other = LANES / 2; SCORES * other >= LANES; other /= 2) {
        const int half = SCORES * other / LANES;
        const bool upper = (lane_chunk & other) != 0;
        KVANT_UNROLL
        for (int n = 0; n < SCORES / 2; n++) {
            if (n < half) {
                const float a = score[n];  // read both before choosing: choosing an index would put the array in memory
                const float b = score[half + n];
                score[n] = (upper ? b : a) + simd_shuffle_xor(upper ? a : b, uint(other));
            }
        }
    }
    KVANT_UNROLL
    for (int other = REPEAT / 2; other > 0; other /= 2) {
        score[0] += simd_shuffle_xor(score[0], uint(other));
    }

    float top = max_score;
    KVANT_UNROLL
    for (int n = 0; n < OWN; n++) {
        const int row = base + ((first_score + n) * sharing + sharer) * LANE_GROUPS + lane_group;
        const int position = TAIL == 2 ? kvant_exact_position(row, tail) : first_position + row;
        if (SOFTCAP) {
            const float grown = kvant_exp(2.0f / numbers[1] * score[n]);
            score[n] = numbers[1] - 2.0f * numbers[1] / (grown + 1.0f);  // the cap times tanh(score / cap)
        }
        bool seen = row < end && position <= last_seen;
        if (WINDOW) {
            seen = seen && position > query_position - window;
        }
        if (TAIL) {
            const bool exact = position < tail.sinks || position >= kvant_tail_start(query_position, tail);
            seen = seen && exact == (TAIL == 2);
        }
        if (ALIBI) {
            score[n] += slopes[query_head] * float(position - query_position);
        }
        if (MASK && seen) {
            const int masked = batch % mask_shape[0] * mask_shape[1] + query_head % mask_shape[1];
            score[n] += mask[size_t(masked * new_tokens + new_token) * mask_shape[3] + row];
        }
        score[n] = seen ? score[n] : kvant_float(0xff800000u);  // minus infinity
        top = max(top, score[n]);
    }
    KVANT_UNROLL
    for (int other = REPEAT; other < QUERY_LANES; other *= 2) {
        top = max(top, simd_shuffle_xor(top, uint(other)));
    }
    const float rescale = kvant_exp(max_score - top);
    max_score = top;
    sum *= rescale;
    KVANT_UNROLL
    for (int n = 0; n < OWN; n++) {
        score[n] = kvant_exp(score[n] - top);
        sum += score[n];
    }
    KVANT_UNROLL
    for (int j = 0; j < QUERIES; j++) {
        const float own = simd_shuffle(rescale, uint(lane_group * LANES + j * QUERY_LANES));
        KVANT_UNROLL
        for (int part = 0; part < VALUE_PARTS; part++) {
            KVANT_UNROLL
            for (int e = 0; e < KVANT_WIDTH; e++) {
                o[j][part][e] *= own;
            }
        }
    }

    KVANT_UNROLL
    for (int u = 0; u < UNROLL; u++) {
        float weight[QUERIES];
        KVANT_UNROLL
        for (int j = 0; j < QUERIES; j++) {
            const int n = j * UNROLL + u;
            weight[j] = simd_shuffle(score[n % OWN], uint(lane_group * LANES + n / OWN * REPEAT));
        }
        KVANT_UNROLL
        for (int part = 0; part < VALUE_PARTS; part++) {
            float x[KVANT_WIDTH];
            Value::floats(value_raw[u][part], x);
            KVANT_UNROLL
            for (int j = 0; j < QUERIES; j++) {
                const float scaled = weight[j] * value_scale[u][part];
                KVANT_UNROLL
                for (int e = 0; e < KVANT_WIDTH; e++) {
                    o[j][part][e] += scaled * x[e];
                }
            }
        }
    }
}

// Add up sums and outputs, rescaled to the larger maximum: first over the lane groups of a simdgroup.
KVANT_UNROLL
for (int other = REPEAT; other < QUERY_LANES; other *= 2) {
    sum += simd_shuffle_xor(sum, uint(other));
}
KVANT_UNROLL
for (int other = LANES; other < 32; other *= 2) {
    const float top = max(max_score, simd_shuffle_xor(max_score, uint(other)));
    const float rescale = kvant_exp(max_score - top);
    max_score = top;
    sum *= rescale;
    sum += simd_shuffle_xor(sum, uint(other));
    KVANT_UNROLL
    for (int j = 0; j < QUERIES; j++) {
        const float own = simd_shuffle(rescale, uint(lane_group * LANES + j * QUERY_LANES));
        KVANT_UNROLL
        for (int part = 0; part < VALUE_PARTS; part++) {
            KVANT_UNROLL
            for (int e = 0; e < KVANT_WIDTH; e++) {
                o[j][part][e] *= own;
                o[j][part][e] += simd_shuffle_xor(o[j][part][e], uint(other));
            }
        }
    }
}
// Then over the simdgroups that share rows.
const bool alone = sharing == 1;
const size_t first_out = ((size_t(batch) * heads + head) * head_queries + first_query) * splits + split;
const int first_gathered = simdgroup_index * QUERIES * GATHERED;
if (lane_group == 0) {
    KVANT_UNROLL
    for (int j = 0; j < QUERIES; j++) {
        KVANT_UNROLL
        for (int part = 0; part < VALUE_PARTS; part++) {
            const int chunk = lane_chunk + part * LANES;
            if (chunk < VALUE_CHUNKS && first_query + j < head_queries) {
                KVANT_UNROLL
                for (int e = 0; e < KVANT_WIDTH; e++) {
                    const float total = o[j][part][e] * kvant_factor<VALUE_BITS>(e);
                    const int element = e * VALUE_CHUNKS + chunk;
                    if (alone) {
                        partial[(first_out + size_t(j) * splits) * VALUE_DIM + element] = total;
                    } else {
                        gathered[first_gathered + j * GATHERED + element] = total;
                    }
                }
            }
        }
    }
    if (exists && lane_chunk % QUERY_LANES == 0) {
        const int j = lane_chunk / QUERY_LANES;
        if (alone) {
            max_scores[first_out + size_t(j) * splits] = max_score;
            sums[first_out + size_t(j) * splits] = sum;
        } else {
            gathered[first_gathered + j * GATHERED + VALUE_DIM] = max_score;
            gathered[first_gathered + j * GATHERED + VALUE_DIM + 1] = sum;
        }
    }
}
if (sharing > 1) {
    KVANT_BARRIER;
    const int group = simdgroup_index - sharer;  // its first simdgroup
    for (int j = sharer; j < QUERIES && first_query + j < head_queries; j += sharing) {
        const int own = (group * QUERIES + j) * GATHERED;
        const size_t out = first_out + size_t(j) * splits;
        float top = LOWEST;
        for (int other = 0; other < sharing; other++) {
            top = max(top, gathered[own + other * QUERIES * GATHERED + VALUE_DIM]);
        }
        for (int element = lane; element <= VALUE_DIM; element += 32) {  // the last one is the sum
            float total = 0.0f;
            for (int other = 0; other < sharing; other++) {
                const int others = own + other * QUERIES * GATHERED;
                const int at = element < VALUE_DIM ? element : VALUE_DIM + 1;
                total += gathered[others + at] * kvant_exp(gathered[others + VALUE_DIM] - top);
            }
            if (element < VALUE_DIM) {
                partial[out * VALUE_DIM + element] = total;
            } else {
                max_scores[out] = top;
                sums[out] = total;
            }
        }
    }
}
