// Which rows of a sequence are read, and how they are divided into splits: the same in both passes.

KVANT_CONSTANT int KVANT_SPLIT_ROWS = 64;  // of a split; a multiple. A step of a threadgroup divides it, it divides a page

// What does not change from call to call, as the array `settings` holds it.
KVANT_CONSTANT int KVANT_CAUSAL = 0, KVANT_WINDOW = 1, KVANT_SPLITS = 2, KVANT_SHARING = 3;

struct KvantRows {
    int low;  // the first row that a query sees
    int begin;  // where the first split begins, at most low
    int held;  // behind the last row
    int split_rows;
    int used;  // splits that have rows

    // Of `start` tokens before the new ones. Row 0 holds position `first`.
    KVANT_FUNCTION KvantRows of(int start, int new_tokens, int first, int window, int splits) {
        KvantRows rows;
        rows.held = start + new_tokens - first;
        rows.low = window > 0 ? max(start + 1 - window - first, 0) : 0;
        rows.begin = rows.low / KVANT_SPLIT_ROWS * KVANT_SPLIT_ROWS;
        const int share = (rows.held - rows.begin + splits - 1) / splits;
        rows.split_rows = (share + KVANT_SPLIT_ROWS - 1) / KVANT_SPLIT_ROWS * KVANT_SPLIT_ROWS;
        rows.used = (rows.held - rows.begin + rows.split_rows - 1) / rows.split_rows;
        return rows;
    }
};
