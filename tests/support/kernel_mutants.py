"""Small mistakes in the text of attention's kernel. A mutant names the call that must catch it, and how.

These mistakes are left out because no result changes:

- Only time: other LANES or UNROLL than the text chooses; `other = 1` where a maximum is found from REPEAT on; splits
  that begin with row 0 and not with the window's rows; a threadgroup without rows that does not end at once; a mask
  read, and a maximum taken, for queries that do not exist (`!exists`).
- The number of splits from the grid in place of `settings`: they differ only where a split has 64 rows either way.
- ALiBi counted from another position, which adds the same to all scores of a query.
- In the second pass the sink left out of the maximum, or LOWEST: a sink far above the scores leaves zeros in any case.
- `!PAGE` where rows of a ring become positions: with pages `newest_row` is the newest position, and nothing is added.

The host does not see that a constant outside of a function must be in Metal's address space `constant`.
"""

from dataclasses import dataclass, replace

from kvant.operators.kernels import launch as launch_module
from support.kernel_cases import KernelCase
from support.metal_host import HostError
from support.metal_host.errors import (
    CompileFailed,
    Divergence,
    OutOfBounds,
    Race,
    Undefined,
    Uninitialised,
    Unreadable,
)

# Without AddressSanitizer an access far outside of a buffer may fall into another one: what is said depends on which.
OUTSIDE = (OutOfBounds, Unreadable, Uninitialised, Race)
NUMBERS = AssertionError  # of the comparison with the oracle
Kind = type[HostError] | type[AssertionError]

# A query group of four simdgroups and 3 queries. Several steps in each of two splits; the last split is short.
ALONE = KernelCase(ratio=3, head_dim=64, offset=140, max_tokens=150, batch=2, pairs=3, splits=2)
# The same with few tokens: splits without rows.
EMPTY = replace(ALONE, offset=9, splits=4)
# 129 rows in two splits.
ONE_TOO_MANY = replace(ALONE, offset=128, pairs=None)
# More splits than a simdgroup has lanes. A score of the last ones is far above all others.
MANY = KernelCase(ratio=1, num_kv_heads=1, offset=2150, max_tokens=2200, splits=40, score_scale=30.0, seed=24)
# Scores far apart.
APART = replace(ALONE, pairs=None, score_scale=30.0)
# With 96 elements four lanes of 16 are idle. New tokens see different tokens.
WIDE = KernelCase(ratio=2, head_dim=96, new_tokens=2, offset=70, max_tokens=80, batch=2, quant_group=16, splits=2)
NOT_CAUSAL = replace(WIDE, is_causal=False)
# Two query groups of four for seven queries, two simdgroups each.
SEVEN = KernelCase(ratio=7, head_dim=64, offset=100, max_tokens=110, batch=2, pairs=3, mask="float", splits=2)
# Two tiles of 20 for 35 queries.
TILES = KernelCase(ratio=7, new_tokens=5, head_dim=64, offset=30, max_tokens=37, pairs=3, is_alibi=True)
# Two tiles of two query groups, as there are so many pairs.
PAIRS = KernelCase(ratio=9, num_kv_heads=1, head_dim=256, offset=9, pairs=128)
# A query of a kv head: a score for two lanes.
ONE = KernelCase(ratio=1, offset=140, max_tokens=150, splits=2, is_alibi=True)
# Eight queries of a simdgroup, one for each lane of a lane group.
EIGHT = KernelCase(ratio=8, offset=140, max_tokens=150, splits=2, backend="cuda", is_alibi=True)
# Two simdgroups, as four would take too much threadgroup memory.
LARGE = replace(EIGHT, head_dim=256, num_kv_heads=1, offset=60, is_alibi=False)
# Two chunks of a lane.
PARTS = KernelCase(ratio=2, head_dim=512, num_kv_heads=1, offset=60, max_tokens=70, batch=2, splits=2)
# 80 elements are no multiple of 32.
EIGHTY = KernelCase(ratio=2, head_dim=80, offset=70, max_tokens=75, batch=2, quant_group=16, splits=2)
# Keys and values beside each other: keys wider, values wider.
BESIDE = KernelCase(ratio=2, head_dim=192, value_dim=128, offset=70, max_tokens=75, batch=2, splits=2)
VALUES = replace(BESIDE, head_dim=64)
# A mask for each sequence. Some queries keep nothing.
MASKED = replace(ALONE, pairs=None, mask="float", seed=5, knows_rows=True)
# The same with a value bias, which a query that keeps nothing does not get.
LOST = replace(MASKED, pairs=3)
ALIBI = replace(ALONE, pairs=None, is_alibi=True)
NIBBLES = replace(ALONE, quant_bit=4, quant_group=16)
FLOATS = replace(ALONE, quant_bit=0, cache_dtype="float32")
HALVES = replace(FLOATS, cache_dtype="float16")
BFLOATS = replace(FLOATS, cache_dtype="bfloat16")
SINKS = replace(ALONE, sinks=True)
CAPPED = replace(ALONE, pairs=None, softcap=5.0)
# Sequences of 141 and 41 tokens.
RAGGED = replace(ALONE, shorter=100)
# Scores far below 0, where a maximum that starts with 0 would stay.
LOW = replace(MASKED, mask_shift=-200.0)
# Sequences of 301 and 201 tokens in pages.
PAGES = replace(ALONE, layout="pages", offset=300, shorter=100)
# Of them a window sees rows of the last page.
PAGES_WINDOW = replace(PAGES, ratio=2, new_tokens=2, window=20, mask="float", seed=1, knows_rows=True)
# A window that begins in the second 64 rows; two new tokens.
WINDOW = replace(WIDE, head_dim=64, offset=140, max_tokens=150, window=20)
# A window of more tokens than there are.
WIDE_WINDOW = replace(WINDOW, offset=9, window=200)
# A ring of 90 rows, and one that keeps the first 3. Sequences of 192 and 132 tokens.
RING = replace(WINDOW, max_tokens=90, window=70, offset=190, shorter=60, pairs=3, mask="float")
RING_ALIBI = replace(RING, is_alibi=True, mask="none")
KEEP = replace(RING, keep=3)
KEEP_ALIBI = replace(RING_ALIBI, keep=3)
# A ring at its first token too many.
FULL = replace(WINDOW, new_tokens=1, offset=40, max_tokens=40, window=30)
# Kept tokens and a window, before the rows wrap.
KEEP_FLAT = replace(WINDOW, keep=3)


@dataclass(frozen=True)
class Mutant:
    file: str
    old: str
    new: str
    case: KernelCase
    kinds: tuple[Kind, ...]
    nth: int = 0  # which of the places where `old` is
    places: int = 1  # how many there are

    def __str__(self) -> str:
        return f"{self.file}:{self.old.strip()[:40]}#{self.nth}->{self.new.strip()[:40]}"

    def texts(self) -> dict[str, str]:
        """The file with the mistake in it. Fails where the text is not what the mutant was written for."""
        parts = launch_module._text(self.file).split(self.old)
        assert len(parts) == self.places + 1, (
            f"{self.file} has {len(parts) - 1} of {self.old!r}; expected {self.places}"
        )
        kept = self.old.join(parts[: self.nth + 1]), self.old.join(parts[self.nth + 1 :])
        return {self.file: self.new.join(kept)}


def attend(old: str, new: str, case: KernelCase, *kinds: Kind, nth: int = 0, places: int = 1) -> Mutant:
    return Mutant("attend.h", old, new, case, kinds, nth, places)


def combine(old: str, new: str, case: KernelCase, *kinds: Kind) -> Mutant:
    return Mutant("combine.h", old, new, case, kinds)


def load(old: str, new: str, case: KernelCase, *kinds: Kind, nth: int = 0, places: int = 1) -> Mutant:
    return Mutant("load.h", old, new, case, kinds, nth, places)


def metal(old: str, new: str, case: KernelCase, *kinds: Kind) -> Mutant:
    return Mutant("metal.h", old, new, case, kinds)


def rows(old: str, new: str, case: KernelCase, *kinds: Kind) -> Mutant:
    return Mutant("rows.h", old, new, case, kinds)


FIRST_PASS = [
    # barriers
    attend("    KVANT_BARRIER;\n}\n", "}\n", ALONE, *OUTSIDE),
    attend("    KVANT_BARRIER;\n    const int group", "    const int group", ALONE, *OUTSIDE),
    # address spaces
    attend("const KVANT_DEVICE uint* words", "const uint* words", ALONE, CompileFailed),
    attend("reinterpret_cast<const KVANT_DEVICE uint*>", "reinterpret_cast<const uint*>", ALONE, CompileFailed),
    attend("const KVANT_DEVICE uint* keys", "const uint* keys", ALONE, CompileFailed),
    attend("const KVANT_DEVICE uint* values", "const uint* values", ALONE, CompileFailed),
    attend("const KVANT_DEVICE T* queries", "const T* queries", ALONE, CompileFailed),
    *(
        load("const KVANT_DEVICE uint* stored,", "const uint* stored,", case, CompileFailed, nth=nth, places=4)
        for nth, case in enumerate((HALVES, FLOATS, ALONE, NIBBLES))
    ),
    *(
        load("const KVANT_DEVICE uint4*>", "const uint4*>", case, CompileFailed, nth=nth, places=2)
        for nth, case in enumerate((HALVES, FLOATS))
    ),
    load("const KVANT_DEVICE uint4* words", "const uint4* words", FLOATS, CompileFailed),
    load("const KVANT_DEVICE uint2*", "const uint2*", ALONE, CompileFailed),
    *(
        load("KVANT_THREAD float* x", "float* x", case, CompileFailed, nth=nth, places=4)
        for nth, case in enumerate((HALVES, FLOATS, ALONE, NIBBLES))
    ),
    metal("#define KVANT_DEVICE device", "#define KVANT_DEVICE", ALONE, CompileFailed),
    # sizes
    attend("BESIDE ? DIM + VALUE_DIM : DIM;", "DIM;", BESIDE, *OUTSIDE),
    attend("8 * int(sizeof(C))", "16", FLOATS, *OUTSIDE),
    attend("ROW_SCALES = ROW / GROUP", "ROW_SCALES = DIM / GROUP", BESIDE, *OUTSIDE),
    attend("KEY_PARTS = (KEY_CHUNKS + LANES - 1) / LANES", "KEY_PARTS = KEY_CHUNKS / LANES", WIDE, NUMBERS),
    attend("VALUE_PARTS = (VALUE_CHUNKS + LANES - 1) / LANES", "VALUE_PARTS = 1", PARTS, *OUTSIDE),
    attend("GATHERED = VALUE_DIM + 2;", "GATHERED = VALUE_DIM + 1;", ALONE, *OUTSIDE),
    attend("> 128 ? 2 : 4", "> 128 ? 2 : 2", ALONE, *OUTSIDE),
    attend("> 128 ? 2 : 4", "> 128 ? 1 : 4", LARGE, *OUTSIDE),
    attend("bias_weights[BIAS ? BIAS : 1]", "bias_weights[1]", ALONE, *OUTSIDE),
    # who does what
    attend("sharing = settings[KVANT_SHARING]", "sharing = int(simdgroups_per_threadgroup)", SEVEN, NUMBERS),
    attend("int(simdgroups_per_threadgroup) / sharing", "int(simdgroups_per_threadgroup)", PAIRS, *OUTSIDE),
    attend("sharer = simdgroup_index % sharing", "sharer = simdgroup_index", SEVEN, NUMBERS),
    attend("lane_chunk = lane % LANES", "lane_chunk = lane", ALONE, NUMBERS),
    attend("cache_shape[PAGE ? 1 : 3]", "cache_shape[3]", PAGES, Undefined),
    attend("cache_shape[PAGE ? 2 : 4]", "cache_shape[4]", PAGES, *OUTSIDE),
    attend("threadgroup_position_in_grid.x) / tiles", "threadgroup_position_in_grid.x)", TILES, *OUTSIDE),
    attend("tile = int(threadgroup_position_in_grid.x) % tiles", "tile = 0", TILES, *OUTSIDE),
    attend("int(threadgroup_position_in_grid.y)", "0", ALONE, *OUTSIDE),
    attend("int(threadgroup_position_in_grid.z)", "0", ALONE, *OUTSIDE),
    attend("splits = int(threadgroups_per_grid.z)", "splits = settings[KVANT_SPLITS]", EMPTY, *OUTSIDE),
    attend("query_shape[2]", "query_shape[1] / heads", TILES, *OUTSIDE),
    attend("query_shape[1] / heads;", "query_shape[1];", ALONE, *OUTSIDE),
    # which rows
    attend("offset[batch % offset_shape[0]]", "offset[0]", RAGGED, *OUTSIDE),
    attend("offset[batch % offset_shape[0]]", "offset[batch]", ALONE, *OUTSIDE),
    attend("offset[batch % offset_shape[0]]", "offset[head % offset_shape[0]]", RAGGED, *OUTSIDE),
    attend("PAGE ? first[batch] : 0;", "PAGE ? first[0] : 0;", PAGES_WINDOW, Undefined),
    attend("PAGE ? first[batch] : 0;", "0;", PAGES_WINDOW, *OUTSIDE),
    attend("WINDOW ? settings[KVANT_WINDOW] : 0", "0", WINDOW, *OUTSIDE),
    attend("WINDOW ? settings[KVANT_WINDOW] : 0", "WINDOW ? settings[KVANT_WINDOW] + 1 : 0", WINDOW, *OUTSIDE),
    attend("WINDOW ? settings[KVANT_KEEP] : 0", "0", KEEP, NUMBERS),
    attend("settings[KVANT_ROWS]", "settings[KVANT_SPLITS]", ALONE, NUMBERS),
    attend("settings[KVANT_ROWS]", "1 << 30", RING, *OUTSIDE),
    attend("start, new_tokens, first_position, settings", "start, 1, first_position, settings", WIDE, NUMBERS),
    attend("begin = rows.begin + split * rows.split_rows", "begin = split * rows.split_rows", WINDOW, *OUTSIDE),
    attend("split * rows.split_rows;", "split * (rows.split_rows - 64);", ALONE, NUMBERS),
    attend("min(begin + rows.split_rows, rows.held)", "begin + rows.split_rows", ALONE, *OUTSIDE),
    attend("min(begin + rows.split_rows, rows.held)", "rows.held", ALONE, NUMBERS),
    attend("newest = start + new_tokens - 1", "newest = start", RING, NUMBERS),
    attend("newest >= max_rows ?", "newest > max_rows ?", FULL, NUMBERS),
    attend("? keep + (newest - keep) %", "? (newest - keep) %", KEEP, NUMBERS),
    attend("keep + (newest - keep) %", "keep + newest %", KEEP, NUMBERS),
    attend("% (max_rows - keep) : newest", "% max_rows : newest", KEEP, NUMBERS),
    attend("PAGE ? 0 : batch) *", "batch) *", PAGES, *OUTSIDE),
    attend("PAGE ? 0 : batch) *", "0) *", ALONE, NUMBERS),
    attend("(BESIDE ? 1 : 2) * heads", "2 * heads", BESIDE, *OUTSIDE),
    attend("(BESIDE ? 1 : 2) * heads", "heads", ALONE, NUMBERS),
    attend("* heads + head) * max_rows", "* heads) * max_rows", ALONE, NUMBERS),
    attend("BESIDE ? first_key : first_key +", "first_key +", BESIDE, *OUTSIDE),
    attend("first_key + size_t(heads) * max_rows", "first_key + max_rows", ALONE, NUMBERS),
    attend("words + first_key * ROW_WORDS", "words + first_value * ROW_WORDS", ALONE, NUMBERS),
    attend("words + first_value * ROW_WORDS", "words + first_key * ROW_WORDS", ALONE, NUMBERS),
    attend("base += sharing * LANE_GROUPS * UNROLL", "base += sharing * LANE_GROUPS * UNROLL / 2", ALONE, NUMBERS),
    attend("base += sharing * LANE_GROUPS * UNROLL", "base += 2 * sharing * LANE_GROUPS * UNROLL", ALONE, NUMBERS),
    attend("base += sharing * LANE_GROUPS", "base += LANE_GROUPS", ALONE, NUMBERS),
    *(
        attend("row = base + (u * sharing + sharer)", "row = base + (u * sharing)", ALONE, NUMBERS, nth=nth, places=3)
        for nth in range(3)
    ),
    *(
        attend("row = base + (u * sharing + sharer)", "row = base + (u + sharer)", ALONE, NUMBERS, nth=nth, places=3)
        for nth in range(3)
    ),
    *(attend("* LANE_GROUPS + lane_group;", "* LANE_GROUPS;", ALONE, NUMBERS, nth=nth, places=4) for nth in range(4)),
    attend("(first_score + n) * sharing + sharer", "(first_score + n) * sharing", ALONE, NUMBERS),
    attend("(first_score + n) * sharing + sharer", "(first_score + n) + sharer", ALONE, NUMBERS),
    *(
        attend("min(max(row, rows.low), end - 1)", "max(row, rows.low)", ALONE, *OUTSIDE, nth=nth, places=3)
        for nth in range(3)
    ),
    *(
        attend("min(max(row, rows.low), end - 1)", "min(row, end - 1)", WINDOW, *OUTSIDE, nth=nth, places=3)
        for nth in range(2)
    ),
    # pages
    attend("pages[batch * pages_shape[1] + base", "pages[base", PAGES, NUMBERS),
    attend("pages[batch * pages_shape[1] + base", "pages[batch + base", PAGES, *OUTSIDE),
    attend("+ base / PAGE_OR_ONE] * PAGE", "] * PAGE", PAGES, NUMBERS),
    attend("+ base / PAGE_OR_ONE] * PAGE", "+ begin / PAGE_OR_ONE] * PAGE", replace(PAGES, splits=1), NUMBERS),
    attend("+ base / PAGE_OR_ONE] * PAGE", "+ base / KVANT_SPLIT_ROWS] * PAGE", PAGES, *OUTSIDE),
    attend("+ base / PAGE_OR_ONE] * PAGE", "+ base / PAGE_OR_ONE] * KVANT_SPLIT_ROWS", PAGES, *OUTSIDE),
    attend("* PAGE - base / PAGE_OR_ONE * PAGE : 0", "* PAGE : 0", PAGES, *OUTSIDE),
    attend("* PAGE - base / PAGE_OR_ONE * PAGE : 0", "* PAGE - base : 0", PAGES, NUMBERS),
    *(attend("uint(moved + min", "uint(min", PAGES, *OUTSIDE, nth=nth, places=2) for nth in range(2)),
    # which queries
    attend("* heads + head) * head_queries * DIM", "* heads) * head_queries * DIM", ALONE, NUMBERS),
    attend("query + (size_t(batch) * heads", "query + (size_t(0) * heads", ALONE, NUMBERS),
    attend("simdgroup_index / sharing * QUERIES", "simdgroup_index * QUERIES", SEVEN, *OUTSIDE),
    attend("tile * tile_queries + first_in_tile", "first_in_tile", TILES, *OUTSIDE),
    attend("tile_queries = query_groups * QUERIES", "tile_queries = QUERIES", TILES, *OUTSIDE),
    attend("a = min(first_query + j, head_queries - 1)", "a = first_query + j", ALONE, *OUTSIDE),
    attend("min(chunk, KEY_CHUNKS - 1) * KVANT_WIDTH", "chunk * KVANT_WIDTH", WIDE, *OUTSIDE),
    attend("chunk < KEY_CHUNKS ? score_scale : 0.0f", "score_scale", WIDE, NUMBERS),
    attend("factor * kvant_factor<BITS>(e) *", "factor *", NIBBLES, NUMBERS),
    *(
        attend("lane_chunk + part * LANES", "lane_chunk", PARTS, *OUTSIDE, NUMBERS, nth=nth, places=4)
        for nth in range(4)
    ),
    attend("first_query + lane_chunk / QUERY_LANES", "first_query", MASKED, NUMBERS),
    attend("first_query + lane_chunk / QUERY_LANES", "first_query + lane_chunk % QUERIES", MASKED, NUMBERS),
    attend("own_query % new_tokens", "own_query / query_heads", WIDE, NUMBERS),
    attend("head * query_heads + min", "min", ALIBI, NUMBERS),
    attend("min(own_query, head_queries - 1) / new_tokens", "own_query / new_tokens", ALIBI, *OUTSIDE),
    attend(
        "min(own_query, head_queries - 1) / new_tokens",
        "min(own_query, head_queries - 1)",
        replace(WIDE, is_alibi=True),
        *OUTSIDE,
    ),
    attend("query_position = start + new_token", "query_position = start", WIDE, NUMBERS),
    attend("(settings[KVANT_CAUSAL] ? query_position : newest)", "newest", WIDE, NUMBERS),
    attend("(settings[KVANT_CAUSAL] ? query_position : newest)", "query_position", NOT_CAUSAL, NUMBERS),
    attend("lane_chunk / REPEAT * OWN % UNROLL", "lane_chunk * OWN % UNROLL", ONE, NUMBERS),
    attend("lane_chunk / REPEAT * OWN % UNROLL", "lane_chunk / REPEAT % UNROLL", ALIBI, NUMBERS),
    attend("lane_chunk / REPEAT * OWN % UNROLL", "lane_chunk / REPEAT * OWN", ALIBI, NUMBERS),
    # scales
    attend(
        "stored * ROW_SCALES + chunk * KVANT_WIDTH / GROUP])", "stored * ROW_SCALES])", ALONE, NUMBERS, nth=0, places=2
    ),
    attend(
        "stored * ROW_SCALES + chunk * KVANT_WIDTH / GROUP])", "stored * ROW_SCALES])", ALONE, NUMBERS, nth=1, places=2
    ),
    *(attend("+ stored * ROW_SCALES", "+ row * ROW_SCALES", PAGES, *OUTSIDE, nth=nth, places=2) for nth in (0, 1)),
    attend("scale[first_key * ROW_SCALES", "scale[first_value * ROW_SCALES", ALONE, NUMBERS),
    attend("scale[first_value * ROW_SCALES", "scale[first_key * ROW_SCALES", ALONE, NUMBERS),
    attend("dot * key_scale[u][part]", "dot", ALONE, NUMBERS),
    attend("weight[j] * value_scale[u][part]", "weight[j]", ALONE, NUMBERS),
    # keys and values
    attend("min(lane_chunk + part * LANES, KEY_CHUNKS - 1)", "lane_chunk + part * LANES", WIDE, *OUTSIDE),
    attend("min(lane_chunk + part * LANES, VALUE_CHUNKS - 1)", "lane_chunk + part * LANES", WIDE, *OUTSIDE),
    attend(
        "min(lane_chunk + part * LANES, VALUE_CHUNKS - 1)",
        "min(lane_chunk + part * LANES, KEY_CHUNKS - 1)",
        VALUES,
        NUMBERS,
    ),
    attend("+ (BESIDE ? KEY_CHUNKS : 0)", "", BESIDE, NUMBERS),
    attend("+ (BESIDE ? KEY_CHUNKS : 0)", "+ (BESIDE ? VALUE_CHUNKS : 0)", BESIDE, NUMBERS),
    attend("load(keys + stored * ROW_WORDS", "load(keys + row * ROW_WORDS", PAGES, *OUTSIDE),
    attend("load(values + stored * ROW_WORDS", "load(values + row * ROW_WORDS", PAGES, *OUTSIDE),
    attend("load(values + stored", "load(keys + stored", ALONE, NUMBERS),
    attend("floats(value_raw[u][part], x)", "floats(value_raw[0][part], x)", ALONE, NUMBERS),
    # the bias split
    attend("q1 = score_scale * float", "q1 = float", ALONE, NUMBERS),
    attend("q2 = score_scale * float", "q2 = float", ALONE, NUMBERS),
    attend("q1 * b1 + q2 * b2", "q1 * b1 - q2 * b2", ALONE, NUMBERS),
    attend("q2 * b1 - q1 * b2", "q2 * b1 + q1 * b2", ALONE, NUMBERS),
    attend("queries[pair + DIM / 2]", "queries[pair + 1]", ALONE, NUMBERS),
    attend("* DIM + pairs[p]", "* DIM + p", ALONE, NUMBERS),
    attend("key_bias[head * 2 * num_pairs + p]", "key_bias[p]", ALONE, NUMBERS),
    attend("key_bias[(head * 2 + 1)", "key_bias[(head * 2)", ALONE, NUMBERS),
    attend("i < tile_queries * num_pairs", "i < tile_queries * num_pairs - 1", PAIRS, *OUTSIDE),
    attend("i += threads", "i += 32", PAIRS, *OUTSIDE),
    attend("a = tile * tile_queries + own", "a = own", TILES, NUMBERS),
    attend("min(a, head_queries - 1) * DIM", "a * DIM", SEVEN, *OUTSIDE),
    attend(
        "bias_weights[own * 2 * num_pairs + num_pairs + p]", "bias_weights[own * 2 * num_pairs + p]", ALONE, *OUTSIDE
    ),
    attend("bias_weights[weight + num_pairs]", "bias_weights[weight]", ALONE, NUMBERS),
    attend("(first_in_tile + j) * 2 * num_pairs", "j * 2 * num_pairs", SEVEN, NUMBERS),
    attend("int p = lane_chunk; p < num_pairs", "int p = 0; p < num_pairs", ALONE, NUMBERS),
    attend("p += LANES", "p += 2 * LANES", PAIRS, NUMBERS),
    attend("first_position + batch % rotation", "batch % rotation", PAGES_WINDOW, *OUTSIDE),
    attend("batch % rotation_shape[0] * 2", "0 * 2", RING, NUMBERS),
    attend("batch % rotation_shape[0] * 2", "batch * 2", ALONE, *OUTSIDE),
    attend("rotation_shape[0] * 2 * num_pairs", "rotation_shape[0] * num_pairs", RING, NUMBERS),
    attend("columns = rotation_shape[3]", "columns = max_rows - 1", ALONE, *OUTSIDE),
    attend("table + p * columns", "table + p", ALONE, *OUTSIDE),
    attend("rotation[cosine + num_pairs * columns]", "rotation[cosine]", ALONE, NUMBERS),
    # adding up scores over the lanes
    attend("score[j * UNROLL + u] = 0.0f;", "score[j * UNROLL + u] = 1.0f;", SINKS, NUMBERS),
    attend("int other = LANES / 2;", "int other = LANES / 4;", ALONE, NUMBERS),
    attend("SCORES * other >= LANES", "SCORES * other > LANES", ONE, NUMBERS),
    attend("half = SCORES * other / LANES", "half = SCORES * other / LANES / 2", ALONE, NUMBERS),
    attend("(lane_chunk & other) != 0", "(lane_chunk & other) == 0", ALONE, NUMBERS),
    attend("(lane_chunk & other) != 0", "(lane_chunk & 1) != 0", ALONE, NUMBERS),
    attend("(upper ? b : a) +", "(upper ? a : b) +", ALONE, NUMBERS),
    attend("upper ? a : b, uint(other)", "upper ? b : a, uint(other)", ALONE, NUMBERS),
    attend("upper ? a : b, uint(other)", "upper ? a : b, uint(1)", ALONE, NUMBERS),
    attend("b = score[half + n]", "b = score[n + 1]", ALONE, NUMBERS),
    attend("if (n < half)", "if (n < 1)", ALONE, NUMBERS),
    attend("int other = REPEAT / 2;", "int other = REPEAT / 4;", ONE, NUMBERS),
    attend("int other = REPEAT / 2;", "int other = LANES / 2;", ALONE, NUMBERS),
    attend("OWN = SCORES > LANES ? SCORES / LANES : 1", "OWN = 1", ALONE, Divergence),
    attend("REPEAT = LANES > SCORES ? LANES / SCORES : 1", "REPEAT = 1", ONE, NUMBERS),
    attend("QUERY_LANES = LANES / QUERIES", "QUERY_LANES = LANES", ALONE, Divergence),
    attend("QUERY_LANES = LANES / QUERIES", "QUERY_LANES = 2", EIGHT, Divergence),
    # what is added to scores, and which count
    attend("position = first_position + row;", "position = row;", PAGES_WINDOW, NUMBERS),
    attend("&& row >= keep) {", ") {", KEEP_ALIBI, NUMBERS),
    attend("&& row >= keep) {", "&& row > keep) {", KEEP, NUMBERS),
    attend("if (WINDOW && !PAGE && row", "if (false && row", RING, NUMBERS),
    attend("position += newest - newest_row - (", "position += 0 - (", RING, NUMBERS),
    attend("row > newest_row ? max_rows - keep : 0", "0", RING, NUMBERS),
    attend("row > newest_row ? max_rows - keep : 0", "row >= newest_row ? max_rows - keep : 0", RING, NUMBERS),
    attend("row > newest_row ? max_rows - keep : 0", "row > newest_row ? max_rows : 0", KEEP, NUMBERS),
    attend("2.0f / numbers[1] * score[n]", "1.0f / numbers[1] * score[n]", CAPPED, NUMBERS),
    attend("numbers[1] - 2.0f * numbers[1] / (", "1.0f - 2.0f / (", CAPPED, NUMBERS),
    attend("(grown + 1.0f)", "(grown - 1.0f)", CAPPED, NUMBERS),
    attend("if (SOFTCAP) {", "if (false) {", CAPPED, NUMBERS),
    attend("score_scale = numbers[0]", "score_scale = 0.125f", replace(ALONE, score_scale=0.3), NUMBERS),
    attend("seen = row < end && position", "seen = position", RING, *OUTSIDE),
    attend("row < end && position <= last_seen;", "row < end;", WIDE, NUMBERS),
    attend("position <= last_seen;", "position < last_seen;", WIDE, NUMBERS),
    attend("position > query_position - window ||", "position >= query_position - window ||", WINDOW, NUMBERS),
    attend("position > query_position - window ||", "position > query_position - window + 1 ||", WINDOW, NUMBERS),
    attend("position > query_position - window ||", "position > start - window ||", WINDOW, NUMBERS),
    attend("position > query_position - window ||", "position > newest - window ||", WINDOW, NUMBERS),
    attend("|| position < keep)", ")", KEEP, NUMBERS),
    attend("|| position < keep)", "|| position <= keep)", KEEP_FLAT, NUMBERS),
    attend("if (WINDOW) {", "if (false) {", WINDOW, NUMBERS),
    attend("if (WINDOW) {", "if (false) {", RING, NUMBERS),
    attend("slopes[query_head]", "slopes[head]", ALIBI, NUMBERS),
    attend("float(position - query_position)", "float(query_position - position)", ALIBI, NUMBERS),
    attend("float(position - query_position)", "float(row - query_position)", RING_ALIBI, NUMBERS),
    attend("batch % mask_shape[0]", "0", MASKED, NUMBERS),
    attend("batch % mask_shape[0]", "batch", replace(MASKED, mask_rank=3), *OUTSIDE),
    attend("query_head % mask_shape[1]", "0", MASKED, NUMBERS),
    attend("query_head % mask_shape[1]", "query_head", replace(MASKED, mask_rank=2), *OUTSIDE),
    attend("masked * new_tokens + new_token", "masked * new_tokens", replace(WIDE, mask="float"), NUMBERS),
    attend("* mask_shape[3] + row", "* rows.held + row", MASKED, *OUTSIDE),
    attend("* mask_shape[3] + row", "* mask_shape[3] + position", PAGES_WINDOW, *OUTSIDE),
    attend("* mask_shape[3] + row", "* mask_shape[3] + position", RING, *OUTSIDE),
    attend("if (MASK && seen) {", "if (MASK) {", MASKED, *OUTSIDE),
    attend("seen ? score[n] : kvant_float(0xff800000u)", "score[n]", WIDE, NUMBERS),
    attend("kvant_float(0xff800000u)", "LOWEST", MASKED, NUMBERS),
    # weights and sums
    attend("float max_score = LOWEST;", "float max_score = 0.0f;", LOW, NUMBERS),
    attend("float max_score = LOWEST;", "float max_score = kvant_float(0xff800000u);", MASKED, NUMBERS),
    attend("float top = max_score;", "float top = LOWEST;", SEVEN, NUMBERS),
    attend("top = max(top, score[n]);", "top = score[n];", MASKED, NUMBERS),
    attend("top = max(top, score[n]);", "", APART, NUMBERS),
    attend(
        "other = REPEAT; other < QUERY_LANES",
        "other = 2 * REPEAT; other < QUERY_LANES",
        ALONE,
        NUMBERS,
        nth=0,
        places=2,
    ),
    attend(
        "other = REPEAT; other < QUERY_LANES", "other = REPEAT; other < QUERY_LANES / 2", ONE, NUMBERS, nth=0, places=2
    ),
    attend("other = REPEAT; other < QUERY_LANES", "other = REPEAT; other < LANES", APART, NUMBERS, nth=0, places=2),
    attend(
        "other = REPEAT; other < QUERY_LANES",
        "other = 2 * REPEAT; other < QUERY_LANES",
        ALONE,
        NUMBERS,
        nth=1,
        places=2,
    ),
    attend("other = REPEAT; other < QUERY_LANES", "other = 1; other < QUERY_LANES", ONE, NUMBERS, nth=1, places=2),
    attend("other = REPEAT; other < QUERY_LANES", "other = REPEAT; other < LANES", ALONE, NUMBERS, nth=1, places=2),
    attend(
        "max_score = top;\n    sum *= rescale;\n    KVANT_UNROLL\n    for (int n",
        "sum *= rescale;\n    KVANT_UNROLL\n    for (int n",
        ALONE,
        NUMBERS,
    ),
    attend("max_score = top;\n    sum *= rescale;\n    sum +=", "sum *= rescale;\n    sum +=", ALONE, NUMBERS),
    *(attend("sum *= rescale;", "", ALONE, NUMBERS, nth=nth, places=2) for nth in (0, 1)),
    *(attend("o[j][part][e] *= own;", "", ALONE, NUMBERS, nth=nth, places=2) for nth in (0, 1)),
    attend("score[n] = kvant_exp(score[n] - top);", "score[n] = kvant_exp(score[n]);", ALONE, NUMBERS),
    attend("sum += score[n];", "", ALONE, NUMBERS),
    attend("sum += score[n];", "sum += score[0];", ALONE, NUMBERS),
    *(
        attend("lane_group * LANES + j * QUERY_LANES", "j * QUERY_LANES", ALONE, NUMBERS, nth=nth, places=2)
        for nth in (0, 1)
    ),
    *(
        attend("lane_group * LANES + j * QUERY_LANES", "lane_group * LANES", ALONE, NUMBERS, nth=nth, places=2)
        for nth in (0, 1)
    ),
    attend("score[n % OWN]", "score[0]", ALONE, NUMBERS),
    attend("lane_group * LANES + n / OWN * REPEAT", "n / OWN * REPEAT", ALONE, NUMBERS),
    attend("+ n / OWN * REPEAT", "+ n * REPEAT", ALONE, Divergence),
    attend("+ n / OWN * REPEAT", "+ n / OWN", ONE, NUMBERS),
    attend("n = j * UNROLL + u", "n = u * QUERIES + j", ALONE, NUMBERS),
    attend("o[j][part][e] = 0.0f;", "o[j][part][e] = 1.0f;", LOST, NUMBERS),
    attend("float sum = 0.0f;", "float sum = 1.0f;", LOST, NUMBERS),
    # adding up over lane groups
    attend("other = LANES; other < 32", "other = 2 * LANES; other < 32", ALONE, NUMBERS),
    attend("other = LANES; other < 32", "other = LANES; other < 16", ALONE, NUMBERS),
    attend("top = max(max_score, simd_shuffle_xor(max_score, uint(other)));", "top = max_score;", ALONE, NUMBERS),
    attend("sum += simd_shuffle_xor(sum, uint(other));\n    KVANT", "KVANT", ALONE, NUMBERS),
    attend("o[j][part][e] += simd_shuffle_xor(o[j][part][e], uint(other));", "", ALONE, NUMBERS),
    # over simdgroups, and who writes what, where
    attend("* head_queries + first_query) * splits", "* head_queries) * splits", SEVEN, *OUTSIDE),
    attend("first_query) * splits + split;", "first_query) * splits;", ALONE, *OUTSIDE),
    attend("+ head) * head_queries + first_query", ") * head_queries + first_query", ALONE, *OUTSIDE),
    attend(
        "((size_t(batch) * heads + head) * head_queries + f",
        "((size_t(0) * heads + head) * head_queries + f",
        ALONE,
        *OUTSIDE,
    ),
    attend("simdgroup_index * QUERIES * GATHERED", "sharer * QUERIES * GATHERED", SEVEN, *OUTSIDE),
    attend("if (lane_group == 0) {", "if (true) {", ALONE, *OUTSIDE),
    attend("chunk < VALUE_CHUNKS && first_query", "first_query", WIDE, *OUTSIDE),
    attend("chunk < VALUE_CHUNKS && first_query + j < head_queries", "chunk < VALUE_CHUNKS", TILES, *OUTSIDE),
    attend("o[j][part][e] * kvant_factor<BITS>(e)", "o[j][part][e]", NIBBLES, NUMBERS),
    attend("e * VALUE_CHUNKS + chunk", "chunk * KVANT_WIDTH + e", ALONE, NUMBERS),
    attend("e * VALUE_CHUNKS + chunk", "e * KEY_CHUNKS + chunk", BESIDE, *OUTSIDE),
    attend(
        "partial[(first_out + size_t(j) * splits)",
        "partial[(first_out + size_t(j))",
        replace(TILES, splits=2, offset=70, max_tokens=80),
        *OUTSIDE,
    ),
    attend("first_gathered + j * GATHERED + element", "first_gathered + element", ALONE, *OUTSIDE),
    attend("if (exists && lane_chunk % QUERY_LANES == 0)", "if (lane_chunk % QUERY_LANES == 0)", TILES, *OUTSIDE),
    attend("if (exists && lane_chunk % QUERY_LANES == 0)", "if (exists)", ALONE, *OUTSIDE),
    attend("max_scores[first_out + size_t(j) * splits]", "max_scores[first_out]", TILES, *OUTSIDE),
    attend("sums[first_out + size_t(j) * splits]", "sums[first_out]", TILES, *OUTSIDE),
    attend("+ VALUE_DIM] = max_score", "+ VALUE_DIM] = 0.0f", ALONE, NUMBERS),
    attend("alone = sharing == 1", "alone = true", ALONE, *OUTSIDE),
    attend("group = simdgroup_index - sharer", "group = simdgroup_index", SEVEN, *OUTSIDE),
    attend("group = simdgroup_index - sharer", "group = 0", SEVEN, NUMBERS),
    attend("int j = sharer; j < QUERIES", "int j = 0; j < QUERIES", ALONE, *OUTSIDE),
    attend("j < QUERIES && first_query + j < head_queries;", "j < QUERIES;", ALONE, *OUTSIDE),
    attend("j += sharing)", "j += 4)", SEVEN, NUMBERS),
    attend(
        "int other = 0; other < sharing; other++) {\n            top",
        "int other = 1; other < sharing; other++) {\n            top",
        APART,
        NUMBERS,
    ),
    attend(
        "int other = 0; other < sharing; other++) {\n                const",
        "int other = 1; other < sharing; other++) {\n                const",
        ALONE,
        NUMBERS,
    ),
    attend("element <= VALUE_DIM", "element < VALUE_DIM", ALONE, NUMBERS),
    attend("element += 32", "element += 64", ALONE, NUMBERS),
    attend("element < VALUE_DIM ? element : VALUE_DIM + 1", "element", ALONE, NUMBERS),
    attend(" * kvant_exp(gathered[others + VALUE_DIM] - top)", "", ALONE, NUMBERS),
    attend("max_scores[out] = top;", "max_scores[out] = gathered[own + VALUE_DIM];", ALONE, NUMBERS),
    attend("out = first_out + size_t(j) * splits", "out = first_out + size_t(j)", ALONE, *OUTSIDE),
    # floats of stored values
    load("0x6408640", "0x6400640", NIBBLES, NUMBERS, nth=0, places=2),
    load("0x6408640", "0x6400640", NIBBLES, NUMBERS, nth=1, places=2),
    *(
        load("0x64806480u, 1152.0f", "0x64006400u, 1152.0f", case, NUMBERS, nth=nth, places=6)
        for nth, case in enumerate((*[ALONE] * 4, *[NIBBLES] * 2))
    ),
    *(
        load("0x64806480u, 1152.0f", "0x64806480u, 1024.0f", case, NUMBERS, nth=nth, places=6)
        for nth, case in enumerate((*[ALONE] * 4, *[NIBBLES] * 2))
    ),
    *(load("1032.0f", "1024.0f", NIBBLES, NUMBERS, nth=nth, places=2) for nth in (0, 1)),
    *(load("& 0x00ff00ffu) ^", ") ^", ALONE, NUMBERS, nth=nth, places=4) for nth in range(4)),
    *(load("& 0x000f000fu) ^", "& 0x00ff00ffu) ^", NIBBLES, NUMBERS, nth=nth, places=2) for nth in range(2)),
    *(load("& 0x00f000f0u) ^", "& 0x00ff00ffu) ^", NIBBLES, NUMBERS, nth=nth, places=2) for nth in range(2)),
    load("x[0], x[2]", "x[2], x[0]", ALONE, NUMBERS),
    load("x[5], x[7]", "x[7], x[5]", ALONE, NUMBERS),
    load("x[0], x[4]", "x[4], x[0]", NIBBLES, NUMBERS),
    load("x[3], x[7]", "x[7], x[3]", NIBBLES, NUMBERS),
    load("raw.x >> 8", "raw.x", ALONE, NUMBERS),
    load("raw.y >> 8", "raw.x >> 8", ALONE, NUMBERS),
    load("(raw >> 8 & 0x00f000f0u)", "(raw & 0x00f000f0u)", NIBBLES, NUMBERS),
    load("(raw >> 8 & 0x000f000fu)", "(raw & 0x000f000fu)", NIBBLES, NUMBERS),
    load("e % 2 == 1 ? 0.0625f", "e % 2 == 0 ? 0.0625f", NIBBLES, NUMBERS),
    load("0.0625f", "0.125f", NIBBLES, NUMBERS),
    load("BITS == 4 && e", "e", ALONE, NUMBERS),
    load("words[2 * i], words[2 * i + 1]", "words[i], words[i + 1]", FLOATS, NUMBERS),
    load("words[2 * i + 1]", "words[2 * i]", FLOATS, NUMBERS),
    load("x[3] = kvant_float(raw.first.w)", "x[3] = kvant_float(raw.second.w)", FLOATS, NUMBERS),
    load("x[1] = kvant_high(raw.x", "x[1] = kvant_low(raw.x", HALVES, NUMBERS),
    load("x[6] = kvant_low(raw.w", "x[6] = kvant_low(raw.z", HALVES, NUMBERS),
    metal("as_type<half2>(word).x); }", "as_type<half2>(word).y); }", HALVES, NUMBERS),
    metal("as_type<float>(word << 16)", "as_type<float>(word)", BFLOATS, NUMBERS),
    metal("word & 0xffff0000u", "word << 16", BFLOATS, NUMBERS),
    metal("high = float(as_type<half2>(word).y)", "high = float(as_type<half2>(word).x)", ALONE, NUMBERS),
    metal("low = float(as_type<half2>(word).x) - less", "low = float(as_type<half2>(word).x)", ALONE, NUMBERS),
    metal("metal::fast::exp(x)", "metal::fast::exp2(x)", ALONE, NUMBERS),
]

ROWS = [
    rows("tokens = start + new_tokens - first", "tokens = start + new_tokens", PAGES_WINDOW, *OUTSIDE),
    rows("tokens = start + new_tokens - first", "tokens = start + new_tokens - first + 1", ALONE, *OUTSIDE),
    rows("tokens = start + new_tokens - first", "tokens = start + new_tokens - first - 1", ALONE, NUMBERS),
    rows("rows.held = min(tokens, max_rows)", "rows.held = tokens", RING, *OUTSIDE),
    rows("window > 0 && keep", "keep", ALONE, NUMBERS),
    rows("keep == 0 && tokens", "tokens", KEEP_FLAT, NUMBERS),
    rows("&& tokens <= max_rows ?", "?", RING, NUMBERS),
    rows("&& tokens <= max_rows ?", "&& tokens < max_rows ?", replace(WINDOW, max_tokens=142), *OUTSIDE),
    rows("start + 1 - window - first", "start - window - first", WINDOW, *OUTSIDE),
    rows("start + 1 - window - first", "start + 2 - window - first", WINDOW, NUMBERS),
    rows("start + 1 - window - first", "start + new_tokens - window - first", WINDOW, NUMBERS),
    rows("start + 1 - window - first", "start + 1 - window", PAGES_WINDOW, Undefined),
    rows("max(start + 1 - window - first, 0)", "(start + 1 - window - first)", WIDE_WINDOW, *OUTSIDE),
    rows(
        "rows.low / KVANT_SPLIT_ROWS * KVANT_SPLIT_ROWS",
        "rows.low",
        replace(PAGES_WINDOW, window=70, offset=297),
        *OUTSIDE,
    ),
    rows("rows.low / KVANT_SPLIT_ROWS * KVANT_SPLIT_ROWS", "rows.low + KVANT_SPLIT_ROWS - 1", WINDOW, Undefined),
    rows("+ splits - 1) / splits", ") / splits", ONE_TOO_MANY, *OUTSIDE),
    rows("(share + KVANT_SPLIT_ROWS - 1) / KVANT_SPLIT_ROWS * KVANT_SPLIT_ROWS", "share", PAGES, NUMBERS),
    rows("(share + KVANT_SPLIT_ROWS - 1) / KVANT_SPLIT_ROWS", "share / KVANT_SPLIT_ROWS", EMPTY, Undefined),
    rows("rows.begin + rows.split_rows - 1) / rows.split_rows", "rows.begin) / rows.split_rows", ALONE, NUMBERS),
    rows("(rows.held - rows.begin + rows.split_rows", "(rows.held + rows.split_rows", WINDOW, *OUTSIDE),
    rows("(rows.held - rows.begin + rows.split_rows - 1) / rows.split_rows", "splits", EMPTY, *OUTSIDE),
    rows("KVANT_SPLIT_ROWS = 64", "KVANT_SPLIT_ROWS = 48", replace(PAGES, offset=180, shorter=0), *OUTSIDE),
    rows("KVANT_WINDOW = 1, KVANT_KEEP = 2", "KVANT_WINDOW = 2, KVANT_KEEP = 1", WINDOW, *OUTSIDE),
]

SECOND_PASS = [
    combine("sum += weight * sums", "sum += sums", ALONE, NUMBERS),
    combine("o[part] += weight * partial", "o[part] += partial", ALONE, NUMBERS),
    combine("kvant_exp(max_scores[first_split + split] - top)", "1.0f", ALONE, NUMBERS),
    combine("split = lane; split < rows.used", "split = lane; split < min(rows.used, 32)", MANY, NUMBERS),
    combine("split = lane; split < rows.used", "split = lane + 1; split < rows.used", APART, NUMBERS),
    combine("int split = lane; split < rows.used", "int split = lane; split < settings[KVANT_SPLITS]", EMPTY, *OUTSIDE),
    combine("other = 16; other > 0", "other = 16; other > 1", ALONE, NUMBERS),
    combine("other = 16; other > 0", "other = 8; other > 0", MANY, NUMBERS),
    combine(
        "split = simdgroup_index; split < rows.used", "split = simdgroup_index + 1; split < rows.used", ALONE, NUMBERS
    ),
    combine(
        "split = simdgroup_index; split < rows.used", "split = simdgroup_index; split < simdgroups", EMPTY, NUMBERS
    ),
    combine("split += simdgroups", "split += 2 * simdgroups", replace(MANY, score_scale=None), NUMBERS),
    combine("query / new_tokens % heads", "query % heads", replace(WIDE, sinks=True), NUMBERS),
    combine("query / new_tokens / heads", "query / heads", replace(WIDE, shorter=30), NUMBERS),
    combine("offset[batch % offset_shape[0]]", "offset[0]", RAGGED, NUMBERS),
    combine("offset[batch % offset_shape[0]]", "offset[batch]", ALONE, *OUTSIDE),
    combine("first[batch % first_shape[0]]", "first[0]", PAGES_WINDOW, Undefined),
    combine("first[batch % first_shape[0]]", "first[batch]", ALONE, *OUTSIDE),
    combine("settings[KVANT_ROWS]", "1 << 30", replace(RING, splits=4), *OUTSIDE),
    combine("settings[KVANT_WINDOW]", "0", replace(WINDOW, splits=4), NUMBERS),
    combine("settings[KVANT_KEEP]", "0", replace(KEEP_FLAT, splits=4), NUMBERS),
    combine("size_t(query) * partial_shape[3]", "size_t(query) * rows.used", EMPTY, NUMBERS),
    combine("sinks[head % sinks_shape[0]]", "sinks[0]", SINKS, NUMBERS),
    combine("sinks[head % sinks_shape[0]]", "sinks[head]", EIGHT, *OUTSIDE),
    combine("tokens + kvant_exp(sink - top)", "tokens", SINKS, NUMBERS),
    combine("tokens + kvant_exp(sink - top)", "tokens + kvant_exp(sink)", SINKS, NUMBERS),
    combine("min(part * 32 + lane, DIM - 1)", "part * 32 + lane", EIGHTY, *OUTSIDE),
    combine("if (part * 32 + lane < DIM) {", "if (true) {", EIGHTY, *OUTSIDE),
    combine("PARTS = (DIM + 31) / 32", "PARTS = DIM / 32", EIGHTY, *OUTSIDE),
    combine("gathered[MAX_SIMDGROUPS * (DIM + 1)]", "gathered[MAX_SIMDGROUPS * DIM]", MANY, *OUTSIDE),
    combine("gathered[simdgroup_index * (DIM + 1) + part", "gathered[simdgroup_index * DIM + part", ALONE, *OUTSIDE),
    combine("if (lane == 0) {", "if (true) {", ALONE, *OUTSIDE),
    combine("KVANT_BARRIER;", "", ALONE, *OUTSIDE),
    combine(
        "int other = 0; other < simdgroups; other++) {\n    tokens",
        "int other = 1; other < simdgroups; other++) {\n    tokens",
        ALONE,
        NUMBERS,
    ),
    combine(
        "int other = 0; other < simdgroups; other++) {\n        output",
        "int other = 1; other < simdgroups; other++) {\n        output",
        ALONE,
        NUMBERS,
    ),
    combine("at += 32 * simdgroups", "at += 64 * simdgroups", PARTS, NUMBERS),
    combine("at += 32 * simdgroups", "at += 32", ALONE, *OUTSIDE),
    combine("at % CHUNKS * KVANT_WIDTH + at / CHUNKS", "at", ALONE, NUMBERS),
    combine("at % CHUNKS * KVANT_WIDTH + at / CHUNKS", "at % KVANT_WIDTH * CHUNKS + at / KVANT_WIDTH", EIGHTY, NUMBERS),
    combine("if (total != 0.0f)", "if (true)", MASKED, NUMBERS),
    combine("output / total", "output", ALONE, NUMBERS),
    combine("output / total", "output / tokens", SINKS, NUMBERS),
    combine(" * (tokens / total)", "", SINKS, NUMBERS),
    combine("head / (heads / value_bias_shape[0])", "head", ALONE, *OUTSIDE),
    combine("kv_head * value_bias_shape[1]", "0", ALONE, NUMBERS),
    combine("element % value_bias_shape[1]", "element", MASKED, *OUTSIDE),
    combine(
        "value_bias[kv_head * value_bias_shape[1] + element",
        "value_bias[kv_head * value_bias_shape[1] + at",
        ALONE,
        NUMBERS,
    ),
    combine("out[size_t(query) * DIM + element]", "out[size_t(query) * DIM + at]", ALONE, NUMBERS),
]

MUTANTS = [*FIRST_PASS, *ROWS, *SECOND_PASS]
