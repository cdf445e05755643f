// Second pass: the splits of a query's rows brought together. One threadgroup of DIM threads a query.
// Inputs: partial, sums, most of the first pass; value_bias (K, DIM) float where VALUE_BIAS. Output: out (B, H, NEW, DIM) T.

const uint query = threadgroup_position_in_grid.x;
const uint element = thread_index_in_threadgroup;

float top = -3.402823466e+38f;
for (int i = 0; i < SPLITS; i++) {
    top = max(top, most[query * SPLITS + i]);
}
float sum = 0.0f;
float o = 0.0f;
for (int i = 0; i < SPLITS; i++) {
    const uint at = query * SPLITS + i;
    if (sums[at] > 0.0f) {
        const float weight = kvant_exp(most[at] - top);
        sum += weight * sums[at];
        o += weight * partial[size_t(at) * DIM + element];
    }
}
if (sum > 0.0f) {  // 0: every row of this query is masked
    o /= sum;
    if (VALUE_BIAS) {
        o += value_bias[query / (HEADS * NEW) % KV_HEADS * DIM + element];
    }
}
out[size_t(query) * DIM + element] = T(o);
