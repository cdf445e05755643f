// The rows of a sequence to read, and their division into splits, which is the same in both passes.

KVANT_CONSTANT int KVANT_SPLIT_ROWS = 64;  // of a split; a multiple. A step of a threadgroup divides it, it divides a page

// Indices into the array `settings`, whose values do not change from call to call.
KVANT_CONSTANT int KVANT_CAUSAL = 0, KVANT_WINDOW = 1, KVANT_SPLITS = 2, KVANT_SHARING = 3;

// The exact tail: floats of a sequence's first and last tokens, in one page of rows. Position p is in row p, and after
// the first tokens in a ring. kvant/operators/exact_rows.py has the same numbers.
KVANT_CONSTANT int KVANT_SINKS = 4, KVANT_RING = 124, KVANT_TAIL_WINDOW = 108, KVANT_TAIL_SPLITS = 2;

struct KvantTail {
    int sinks;  // number of first tokens to read
    int start;  // the first position after them that has a row
    int end;  // the position after the last new token
    int last_row;  // the row of the last new token
    int first_seen;  // the first position that a query of the step sees
    int first_tail;  // the first position in the tail of such a query

    // For `start` tokens before the new ones.
    KVANT_FUNCTION KvantTail of(int sinks, int tail_start, int end, int start, int window) {
        KvantTail tail;
        tail.sinks = sinks;
        tail.start = tail_start;
        tail.end = end;
        tail.last_row = end <= KVANT_SINKS ? end - 1 : KVANT_SINKS + (end - 1 - KVANT_SINKS) % KVANT_RING;
        tail.first_seen = window > 0 ? start + 1 - window : 0;
        tail.first_tail = max(start + 1 - KVANT_TAIL_WINDOW, tail_start);
        return tail;
    }
};

// The start of the tail that the query at a position reads.
KVANT_FUNCTION int kvant_tail_start(int position, KvantTail tail) {
    return max(position + 1 - KVANT_TAIL_WINDOW, tail.start);
}

// The position of the token in an exact row; the end or more if the row has no token of this sequence.
KVANT_FUNCTION int kvant_exact_position(int row, KvantTail tail) {
    const int position = tail.end - 1 - tail.last_row + row - (row > tail.last_row ? KVANT_RING : 0);
    const int in_ring = position < KVANT_SINKS ? tail.end : position;
    return row < KVANT_SINKS ? row : in_ring;
}

// The position to read for an exact row: its own if a query of the step sees it, else that of the last new token.
KVANT_FUNCTION int kvant_position_read(int row, KvantTail tail) {
    const int position = kvant_exact_position(row, tail);
    const bool seen = position >= tail.first_seen && position < tail.end;
    return seen && (position < tail.sinks || position >= tail.first_tail) ? position : tail.end - 1;
}

KVANT_FUNCTION int kvant_row_read(int row, KvantTail tail) {
    return kvant_position_read(row, tail) == kvant_exact_position(row, tail) ? row : tail.last_row;
}

struct KvantRows {
    int low;  // the first row that a query sees
    int begin;  // the first row of the first split, at most low
    int held;  // the row after the last one
    int split_rows;
    int used;  // splits that have rows

    // For `start` tokens before the new ones. Row 0 has position `first`.
    KVANT_FUNCTION KvantRows of(int start, int new_tokens, int first, int window, int splits) {
        return between(window > 0 ? max(start + 1 - window - first, 0) : 0, start + new_tokens - first, splits);
    }

    // The quantized rows of a sequence with an exact tail. There may be none.
    KVANT_FUNCTION KvantRows before_tail(KvantTail tail, int start, int new_tokens, int first, int splits) {
        const int low = max(max(tail.first_seen, tail.sinks) - first, 0);
        const int held = min(start + new_tokens, kvant_tail_start(start + new_tokens - 1, tail)) - first;
        KvantRows rows = between(low, max(held, low + 1), splits);
        rows.held = held > low ? held : rows.begin;
        rows.used = held > low ? rows.used : 0;
        return rows;
    }

    KVANT_FUNCTION KvantRows between(int low, int held, int splits) {
        KvantRows rows;
        rows.low = low;
        rows.held = held;
        rows.begin = low / KVANT_SPLIT_ROWS * KVANT_SPLIT_ROWS;
        const int share = (held - rows.begin + splits - 1) / splits;
        rows.split_rows = (share + KVANT_SPLIT_ROWS - 1) / KVANT_SPLIT_ROWS * KVANT_SPLIT_ROWS;
        rows.used = (held - rows.begin + rows.split_rows - 1) / rows.split_rows;
        return rows;
    }
};
