// Second pass: adds up the splits of a query. One threadgroup of DIM threads for each query.
//
// Inputs: partial (B, H, NEW_TOKENS, SPLITS, DIM), sums, max_scores (B, H, NEW_TOKENS, SPLITS) of the first pass;
// value_bias (K, DIM) float, where VALUE_BIAS. Output: out (B, H, NEW_TOKENS, DIM) T.
// Sizes are read from the shapes, so that few instances serve every call.

const uint query = threadgroup_position_in_grid.x;
const uint element = thread_index_in_threadgroup;
const uint heads = partial_shape[1];
const uint splits = partial_shape[3];
const uint dim = partial_shape[4];

float top = -3.402823466e+38f;
for (uint i = 0; i < splits; i++) {
    top = max(top, max_scores[query * splits + i]);
}
float sum = 0.0f;
float o = 0.0f;
for (uint i = 0; i < splits; i++) {
    const uint at = query * splits + i;
    if (sums[at] != 0.0f) {  // 0: the split is empty and its output not written. A NaN must come out
        const float weight = kvant_exp(max_scores[at] - top);
        sum += weight * sums[at];
        o += weight * partial[size_t(at) * dim + element];
    }
}
if (sum != 0.0f) {  // 0: every token is masked for this query
    o /= sum;
    if (VALUE_BIAS) {
        const uint head = query / partial_shape[2] % heads;
        o += value_bias[head / (heads / value_bias_shape[0]) * dim + element];
    }
}
out[size_t(query) * dim + element] = T(o);
