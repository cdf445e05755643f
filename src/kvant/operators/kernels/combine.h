// Second pass: adds up the splits of a query. Each query has a threadgroup, whose simdgroups take splits alternately.
//
// Inputs: partial (B, H, S, splits, DIM), sums, max_scores (B, H, S, splits), and offset, first, settings of the first
// pass; sinks (H,), scores without a value, or minus infinity (1,); value_bias (K, DIM) float or zero (1, 1).
// With TAIL, partial is of quantized rows, and tail_partial, tail_sums and tail_max_scores are of exact rows; spans is
// as in the first pass.
// Output: out (B, H, S, DIM) T.

constexpr int PARTS = (DIM + 31) / 32;  // elements of a lane
constexpr int CHUNKS = DIM / KVANT_WIDTH;

threadgroup float gathered[MAX_SIMDGROUPS * (DIM + 1)];

const int query = int(threadgroup_position_in_grid.x);
const int lane = int(thread_index_in_simdgroup);
const int simdgroup_index = int(simdgroup_index_in_threadgroup);
const int simdgroups = int(simdgroups_per_threadgroup);
const int heads = partial_shape[1];
const int new_tokens = partial_shape[2];
const int head = query / new_tokens % heads;
const int batch = query / new_tokens / heads;
const int start = offset[batch % offset_shape[0]];
const int first_position = first[batch % first_shape[0]];
const int window = settings[KVANT_WINDOW];
KvantRows rows;
if (TAIL) {
    const KvantTail tail =
        KvantTail::of(spans[batch * 4], spans[batch * 4 + 1], spans[batch * 4 + 2], start, window);
    rows = KvantRows::before_tail(tail, start, new_tokens, first_position, settings[KVANT_SPLITS]);
} else {
    rows = KvantRows::of(start, new_tokens, first_position, window, settings[KVANT_SPLITS]);
}
const size_t first_split = size_t(query) * partial_shape[3];
const size_t first_tail_split = size_t(query) * tail_partial_shape[3];

const float sink = float(sinks[head % sinks_shape[0]]);
float top = max(-3.402823466e+38f, sink);
for (int split = lane; split < rows.used; split += 32) {
    top = max(top, max_scores[first_split + split]);
}
if (TAIL) {
    KVANT_UNROLL
    for (int split = 0; split < KVANT_TAIL_SPLITS; split++) {
        top = max(top, tail_max_scores[first_tail_split + split]);
    }
}
KVANT_UNROLL
for (int other = 16; other > 0; other /= 2) {
    top = max(top, simd_shuffle_xor(top, uint(other)));
}
float sum = 0.0f;
float o[PARTS];
KVANT_UNROLL
for (int part = 0; part < PARTS; part++) {
    o[part] = 0.0f;
}
KVANT_UNROLL_BY_4
for (int split = simdgroup_index; split < rows.used; split += simdgroups) {
    const float weight = kvant_exp(max_scores[first_split + split] - top);
    sum += weight * sums[first_split + split];
    KVANT_UNROLL
    for (int part = 0; part < PARTS; part++) {
        const int element = min(part * 32 + lane, DIM - 1);
        o[part] += weight * partial[(first_split + split) * DIM + element];
    }
}
if (TAIL) {
    // Assign these to the simdgroups with the fewest other splits.
    for (int split = (simdgroup_index + simdgroups - rows.used % simdgroups) % simdgroups; split < KVANT_TAIL_SPLITS;
         split += simdgroups) {
        const float weight = kvant_exp(tail_max_scores[first_tail_split + split] - top);
        sum += weight * tail_sums[first_tail_split + split];
        KVANT_UNROLL
        for (int part = 0; part < PARTS; part++) {
            const int element = min(part * 32 + lane, DIM - 1);
            o[part] += weight * tail_partial[(first_tail_split + split) * DIM + element];
        }
    }
}
KVANT_UNROLL
for (int part = 0; part < PARTS; part++) {
    if (part * 32 + lane < DIM) {
        gathered[simdgroup_index * (DIM + 1) + part * 32 + lane] = o[part];
    }
}
if (lane == 0) {
    gathered[simdgroup_index * (DIM + 1) + DIM] = sum;
}
KVANT_BARRIER;
float tokens = 0.0f;
for (int other = 0; other < simdgroups; other++) {
    tokens += gathered[other * (DIM + 1) + DIM];
}
const float total = tokens + kvant_exp(sink - top);
for (int at = int(thread_index_in_threadgroup); at < DIM; at += 32 * simdgroups) {
    float output = 0.0f;
    for (int other = 0; other < simdgroups; other++) {
        output += gathered[other * (DIM + 1) + at];
    }
    const int element = at % CHUNKS * KVANT_WIDTH + at / CHUNKS;  // the first pass puts element e of all chunks together
    if (total != 0.0f) {  // 0: every token is masked for this query
        const int kv_head = head / (heads / value_bias_shape[0]);
        output = output / total + value_bias[kv_head * value_bias_shape[1] + element % value_bias_shape[1]] * (tokens / total);
    }
    out[size_t(query) * DIM + element] = T(output);
}
