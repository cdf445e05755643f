// Which rows of a sequence are read, and how they are divided into splits: the same in both passes.

KVANT_CONSTANT int KVANT_SPLIT_ROWS = 64;  // of a split; a multiple. A step of a threadgroup divides it, it divides a page

// What does not change from call to call, as the array `settings` holds it.
KVANT_CONSTANT int KVANT_CAUSAL = 0, KVANT_WINDOW = 1, KVANT_KEEP = 2, KVANT_ROWS = 3, KVANT_SPLITS = 4, KVANT_SHARING = 5;

struct KvantRows {
    int low;  // the first row that a query sees
    int begin;  // where the first split begins, at most low
    int held;  // behind the last row
    int split_rows;
    int used;  // splits that have rows

    // Of `start` tokens before the new ones. Row 0 holds position `first`. Of more than max_rows tokens rows are a ring.
    KVANT_FUNCTION KvantRows of(
        int start, int new_tokens, int first, int max_rows, int window, int keep, int splits) {
        const int tokens = start + new_tokens - first;
        KvantRows rows;
        rows.held = min(tokens, max_rows);
        rows.low = window > 0 && keep == 0 && tokens <= max_rows ? max(start + 1 - window - first, 0) : 0;
        rows.begin = rows.low / KVANT_SPLIT_ROWS * KVANT_SPLIT_ROWS;
        const int share = (rows.held - rows.begin + splits - 1) / splits;
        rows.split_rows = (share + KVANT_SPLIT_ROWS - 1) / KVANT_SPLIT_ROWS * KVANT_SPLIT_ROWS;
        rows.used = (rows.held - rows.begin + rows.split_rows - 1) / rows.split_rows;
        return rows;
    }
};
