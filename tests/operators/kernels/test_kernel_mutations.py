"""The tests of the kernel can fail: each of these small mistakes in its text is caught, by the host or by the numbers.

A mutant names the call that must catch it and how. Not listed, because nothing changes but time: a split of fewer than
LEAST_ROWS rows; an empty split's output written; a second pass that takes the maximum of too few splits; ALiBi counted
from another row, which adds the same to all scores of a query; the append's min(), which no quotient reaches.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
import pytest
from support.kernel_cases import KernelCase, check, draw, kernels_on_host
from support.metal_host import HostError, host_pytest_skip
from support.metal_host.errors import CompileFailed, OutOfBounds, Race, Undefined, Uninitialised, Unreadable

from kvant.operators.kernels import launch as launch_module
from kvant.operators.kernels.attend import quantize_rows, threadgroup_shape
from kvant.operators.quantization import quantize

pytestmark = host_pytest_skip

# Without AddressSanitizer an access far outside of a buffer may fall into another one: what is said depends on which.
OUTSIDE = (OutOfBounds, Unreadable, Uninitialised, Race)
NUMBERS = AssertionError  # of the comparison with the oracle
Kind = type[HostError] | type[AssertionError]

# One crew of four teams, no stage; several steps in each of two splits, the last split short.
ALONE = KernelCase(ratio=3, head_dim=64, offset=140, max_rows=150, batch=2, pairs=3, splits=2)
# The same of a few rows: empty splits.
EMPTY = replace(ALONE, offset=9, splits=4)
# Of 96 elements' lanes four are idle; new tokens see different rows.
WIDE = KernelCase(ratio=2, head_dim=96, new_tokens=2, offset=70, max_rows=80, batch=2, quant_group=16, splits=2)
# Two crews of four places for seven queries, two teams, rows staged.
STAGED = KernelCase(ratio=7, head_dim=64, offset=100, max_rows=110, batch=2, pairs=3, mask="float", splits=2)
# Two parts of 20 places for 35 queries.
PARTS = KernelCase(ratio=7, new_tokens=5, head_dim=64, offset=30, max_rows=37, pairs=3, is_alibi=True)
# A mask for each batch row, of which some queries keep nothing.
MASKED = replace(ALONE, pairs=None, mask="float", seed=3)
ALIBI = replace(ALONE, pairs=None, is_alibi=True)
NIBBLES = replace(ALONE, quant_bit=4, quant_group=16)
FLOATS = replace(ALONE, quant_bit=0, cache_dtype="float32")
HALVES = replace(FLOATS, cache_dtype="float16")
# Sequences of 140 and 70 tokens.
RAGGED = replace(ALONE, shorter=70)
# Scores far under those that the maximum starts with, were it 0.
LOW = replace(MASKED, mask_shift=-200.0)


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


def rows(old: str, new: str, case: KernelCase, *kinds: Kind, nth: int = 0, places: int = 1) -> Mutant:
    return Mutant("rows.h", old, new, case, kinds, nth, places)


FIRST_PASS = [
    # barriers
    attend("    KVANT_BARRIER;\n}\n", "}\n", ALONE, Race, Uninitialised),
    attend("KVANT_BARRIER;  // the rows before", "// the rows before", STAGED, Race),
    attend("        KVANT_BARRIER;\n    }\n\n", "    }\n\n", STAGED, Race, Uninitialised),
    attend("KVANT_BARRIER;  // what was there", "// what was there", ALONE, Race),
    attend("        KVANT_BARRIER;\n        if (team == 0)", "        if (team == 0)", ALONE, Race, Uninitialised),
    # address spaces
    attend("const KVANT_DEVICE uint* words", "const uint* words", ALONE, CompileFailed),
    attend("reinterpret_cast<const KVANT_DEVICE uint*>", "reinterpret_cast<const uint*>", ALONE, CompileFailed),
    attend("const KVANT_DEVICE uint* keys", "const uint* keys", ALONE, CompileFailed),
    attend("const KVANT_DEVICE uint* values", "const uint* values", ALONE, CompileFailed),
    attend("const KVANT_DEVICE T* queries", "const T* queries", ALONE, CompileFailed),
    *(
        rows("const KVANT_DEVICE uint* row,", "const uint* row,", case, CompileFailed, nth=nth, places=4)
        for nth, case in enumerate((HALVES, FLOATS, ALONE, NIBBLES))
    ),
    *(
        rows("const KVANT_DEVICE uint4*", "const uint4*", case, CompileFailed, nth=nth, places=2)
        for nth, case in enumerate((HALVES, FLOATS))
    ),
    rows("const KVANT_DEVICE uint2*", "const uint2*", ALONE, CompileFailed),
    *(
        rows("KVANT_THREAD float* x", "float* x", case, CompileFailed, nth=nth, places=4)
        for nth, case in enumerate((HALVES, FLOATS, ALONE, NIBBLES))
    ),
    Mutant("metal.h", "#define KVANT_DEVICE device", "#define KVANT_DEVICE", ALONE, (CompileFailed,)),
    # which rows
    attend("offset[batch]", "offset[0]", RAGGED, Unreadable),
    attend("offset[batch]", "offset[1 - batch]", RAGGED, Unreadable),
    attend("offset[batch]", "offset[head]", RAGGED, Unreadable, NUMBERS),
    attend("start + NEW;", "start + NEW + 1;", ALONE, Unreadable),
    attend("start + NEW;", "start + NEW - 1;", ALONE, NUMBERS),
    attend("min(first + share, rows)", "first + share", ALONE, *OUTSIDE),
    attend("(rows + SPLITS - 1) / SPLITS", "rows / SPLITS", ALONE, NUMBERS),
    attend("int(split) * share", "int(split) * (share - 1)", ALONE, NUMBERS),
    attend("base += STEP", "base += STEP / 2", ALONE, NUMBERS),
    attend("base += STEP", "base += 2 * STEP", ALONE, NUMBERS),
    attend("(base + r < last)", "(base + r <= last)", STAGED, Unreadable),
    attend("if (active && row < last) {", "if (active) {", ALONE, Unreadable, nth=0, places=2),
    attend("if (active && row < last) {", "if (active) {", ALONE, Unreadable, nth=1, places=2),
    attend("if (active && row < last) {", "if (row < last) {", WIDE, *OUTSIDE, nth=0, places=2),
    attend("if (active && row < last) {", "if (row < last) {", WIDE, *OUTSIDE, nth=1, places=2),
    attend("row >= last || ", "", ALONE, NUMBERS),
    attend("row >= last || ", "", MASKED, *OUTSIDE),
    attend("row > start + token", "row >= start + token", WIDE, NUMBERS),
    attend("row > start + token", "row > start", WIDE, NUMBERS),
    attend(" || (CAUSAL && row > start + token)", "", WIDE, NUMBERS),
    attend("a % NEW", "a / NEW", WIDE, NUMBERS),
    attend("size_t(batch) * 2 * heads", "size_t(batch) * heads", ALONE, NUMBERS),
    attend("key_row + size_t(heads) * room", "key_row + room", ALONE, NUMBERS),
    attend("* 2 * heads + head) * room", "* 2 * heads) * room", ALONE, NUMBERS),
    attend("words + key_row * ROW_WORDS", "words + value_row * ROW_WORDS", ALONE, NUMBERS),
    *(attend("(u * TEAMS + int(team))", "(u * TEAMS)", ALONE, NUMBERS, nth=nth, places=2) for nth in (0, 1)),
    *(attend("+ int(slot);", ";", ALONE, NUMBERS, nth=nth, places=2) for nth in (0, 1)),
    # which queries
    attend("active && a < ALL ?", "active ?", STAGED, *OUTSIDE),
    attend("active && a < ALL ?", "a < ALL ?", WIDE, *OUTSIDE),
    attend(" && part * HERE + i / SOME_PAIRS < ALL;", ";", STAGED, *OUTSIDE),
    attend("a < ALL && row < last)", "a < ALL)", ALONE, *OUTSIDE),
    attend("PAIRS > 0 && a < ALL && row", "PAIRS > 0 && row", STAGED, Uninitialised),
    attend("a >= ALL || ", "", replace(STAGED, mask="none", is_alibi=True), *OUTSIDE),
    attend("slot == 0 && a < ALL)", "slot == 0)", STAGED, *OUTSIDE),
    attend("threadgroup_position_in_grid.x / PARTS", "threadgroup_position_in_grid.x", PARTS, *OUTSIDE, NUMBERS),
    attend("part * HERE + my_query", "my_query", PARTS, Race, Uninitialised, NUMBERS),
    attend("(part * HERE + mine) * DIM", "mine * DIM", PARTS, NUMBERS),
    # scales
    *(attend(" + chunk * KVANT_WIDTH / GROUP]", "]", ALONE, NUMBERS, nth=nth, places=2) for nth in (0, 1)),
    attend(" + c * KVANT_WIDTH / GROUP]", "]", STAGED, NUMBERS),
    attend("scale[(key_row + row)", "scale[(value_row + row)", ALONE, NUMBERS),
    attend("scale[(value_row + row)", "scale[(key_row + row)", ALONE, NUMBERS),
    attend("(which ? value_row : key_row)", "key_row", STAGED, NUMBERS),
    attend("dot *= by_scale;", "", ALONE, NUMBERS),
    attend("score[j][u] * by_scale", "score[j][u]", ALONE, NUMBERS),
    attend("x[e] *= by_scale;", "", STAGED, NUMBERS),
    # the bias split, the mask, ALiBi
    attend("q1 = by * float", "q1 = float", ALONE, NUMBERS),
    attend("q2 = by * float", "q2 = float", ALONE, NUMBERS),
    attend("q2 * b1 - q1 * b2", "q2 * b1 + q1 * b2", ALONE, NUMBERS),
    attend("key_bias[(head * 2) * PAIRS", "key_bias[(head * 0) * PAIRS", ALONE, NUMBERS),
    attend("key_bias[(head * 2 + 1)", "key_bias[(head * 2)", ALONE, NUMBERS),
    attend("angles[angle + PAIRS]", "angles[angle]", ALONE, NUMBERS),
    attend("(my_query + j) * 2 * PAIRS", "j * 2 * PAIRS", STAGED, NUMBERS),
    attend("int p = int(chunk); p < PAIRS", "int p = 0; p < PAIRS", ALONE, NUMBERS),
    attend("rotation[sine]", "rotation[cosine]", ALONE, NUMBERS),
    attend("batch % mask_shape[0]", "0", MASKED, NUMBERS),
    attend("query_head % mask_shape[1]", "0", MASKED, NUMBERS),
    attend("masked * NEW + token", "masked * NEW", replace(WIDE, mask="float"), NUMBERS),
    attend("slopes[query_head]", "slopes[head]", ALIBI, NUMBERS),
    # adding up
    attend("LANES / 2; other > 0", "LANES / 4; other > 0", ALONE, NUMBERS),
    attend("other = LANES; other < 32", "other = 2 * LANES; other < 32", ALONE, NUMBERS),
    attend("most_so_far[j] = LEAST;", "most_so_far[j] = 0.0f;", LOW, NUMBERS),
    attend("most_so_far[j] = top;", "", ALONE, NUMBERS, nth=0, places=3),
    attend("most_so_far[j] = top;", "", ALONE, NUMBERS, nth=1, places=3),
    *(attend("sum[j] *= shrink;", "", ALONE, NUMBERS, nth=nth, places=2) for nth in (0, 1)),
    *(attend("o[j][e] *= shrink;", "", ALONE, NUMBERS, nth=nth, places=2) for nth in (0, 1)),
    attend("shared[theirs + DIM + 1] * shrink_theirs", "shared[theirs + DIM + 1]", ALONE, NUMBERS),
    attend("CHUNKS + chunk] * shrink_theirs", "CHUNKS + chunk]", ALONE, NUMBERS),
    attend("sum[j] * shrink + shared", "sum[j] + shared", ALONE, NUMBERS),
    attend("o[j][e] * shrink + shared", "o[j][e] + shared", ALONE, NUMBERS),
    attend("int other = 1; other < TEAMS", "int other = 2; other < TEAMS", ALONE, NUMBERS),
    # who writes what, where
    attend("slot == 0 && active", "slot == 0", WIDE, *OUTSIDE),
    attend("slot == 0 && active", "active", ALONE, Race),
    attend("if (lane == 0) {\n            shared", "if (true) {\n            shared", ALONE, Race),
    attend("simdgroup_index_in_threadgroup * (DIM + 2)", "team * (DIM + 2)", STAGED, Race),
    attend("team == 0 && slot == 0", "slot == 0", ALONE, Race),
    attend("team == 0 && slot == 0", "team == 0", ALONE, Race),
    attend("if (active && first < last)", "if (first < last)", WIDE, *OUTSIDE),
    attend("* SPLITS + split", "* SPLITS", ALONE, Race, NUMBERS, Unreadable, Uninitialised),
    attend("shared[which * STEP * DIM + ", "shared[", STAGED, Race, Uninitialised),
    attend("shared[STEP * DIM + ", "shared[", STAGED, NUMBERS),
    # levels
    rows("float(int(word << (28 - 4 * e)) >> 28)", "float(word << (28 - 4 * e) >> 28)", NIBBLES, NUMBERS),
    rows("float(int(words.y << (24 - 8 * e)) >> 24)", "float(words.y << (24 - 8 * e) >> 24)", ALONE, NUMBERS),
    rows("[2 * i + half_row]", "[i + half_row]", FLOATS, NUMBERS),
    rows("x[1] = kvant_high(words.x", "x[1] = kvant_low(words.x", HALVES, NUMBERS),
]

SECOND_PASS = [
    combine("sum += weight * sums[at]", "sum += sums[at]", ALONE, NUMBERS),
    combine("o += weight * partial", "o += partial", ALONE, NUMBERS),
    combine("kvant_exp(most[at] - top)", "1.0f", ALONE, NUMBERS),
    combine("if (sums[at] != 0.0f)", "if (true)", EMPTY, Unreadable),
    combine("uint i = 0; i < splits; i++) {\n    const", "uint i = 1; i < splits; i++) {\n    const", ALONE, NUMBERS),
    combine("if (sum != 0.0f)", "if (true)", MASKED, NUMBERS),
    combine("query / partial_shape[2] % heads", "query % heads", replace(WIDE, pairs=0), NUMBERS),
    combine("head / (heads / value_bias_shape[0])", "head", ALONE, *OUTSIDE, NUMBERS),
    combine("o /= sum;", "", ALONE, NUMBERS),
    combine("const uint at = query * splits + i", "const uint at = query * splits", ALONE, NUMBERS),
]


def test_the_cases_are_what_they_are_for() -> None:
    shapes = {ALONE: (1, 1, 4, 3), WIDE: (1, 1, 4, 4), STAGED: (1, 2, 2, 4), PARTS: (2, 5, 1, 4)}
    for case, shape in shapes.items():
        assert threadgroup_shape(case.ratio * case.new_tokens, case.pairs or 0, case.crews) == shape
    mask = draw(MASKED).mask
    assert mask is not None
    assert mask.shape[0] == 2
    assert np.isneginf(mask[..., : MASKED.num_keys]).all(axis=-1).any()


@pytest.mark.parametrize(
    "case", [ALONE, EMPTY, WIDE, STAGED, PARTS, MASKED, ALIBI, NIBBLES, FLOATS, HALVES, LOW], ids=range(11)
)
def test_the_text_as_it_is_passes(case: KernelCase) -> None:
    check(case)


@pytest.mark.parametrize("mutant", [*FIRST_PASS, *SECOND_PASS], ids=str)
def test_a_mistake_in_attention_is_caught(mutant: Mutant) -> None:
    with pytest.raises(mutant.kinds):
        check(mutant.case, mutant.texts())


# ---- append ----------------------------------------------------------------------------------------------------------


def check_append(rows: mx.array, quant_bit: int, quant_group: int, texts: dict[str, str]) -> None:
    """Rows (B, 2, K, S, D), keys and values, quantized by the text and by the operator: the same to the bit."""
    options = {"quant_bit": quant_bit, "quant_group": quant_group, "scale_dtype": mx.float16}
    with kernels_on_host(texts=texts):
        levels, scale = quantize_rows(rows[:, 0], rows[:, 1], **options, backend="metal")
    wanted_levels, wanted_scale = quantize(rows, **options)
    np.testing.assert_array_equal(np.array(scale), np.array(wanted_scale))
    if np.isfinite(np.array(scale)).all():
        np.testing.assert_array_equal(np.array(levels), np.array(wanted_levels))


def normal(dtype: mx.Dtype = mx.float32) -> mx.array:
    """1,200 words at 8 bits, 600 at 4: the last threadgroup is not full."""
    return mx.array(np.random.default_rng(7).standard_normal((2, 2, 5, 3, 80))).astype(dtype)


def ties() -> mx.array:
    x = np.random.default_rng(7).integers(-14, 15, (2, 2, 5, 3, 80)) / 2
    x[..., ::8] = 7
    return mx.array(x.astype(np.float32))


def with_nan() -> mx.array:
    x = np.array(normal())
    x[0, 0, 1, 1, 9] = np.nan
    return mx.array(x)


@dataclass(frozen=True)
class AppendMutant:
    old: str
    new: str
    rows: Callable[[], mx.array]
    quant_bit: int
    kinds: tuple[Kind, ...]
    file: str = "append.h"

    def __str__(self) -> str:
        return f"{self.old.strip()[:40]}->{self.new.strip()[:40]}"


def half() -> mx.array:
    return normal(mx.float16)


APPEND = [
    AppendMutant("!exists ? 0.0f : float", "float", normal, 8, (*OUTSIDE,)),
    AppendMutant("if (exists) {", "if (true) {", normal, 8, (*OUTSIDE,)),
    AppendMutant("of_value ? value[source] : key[source]", "key[source]", normal, 8, (NUMBERS,)),
    AppendMutant("row % count) * DIM", "row) * DIM", normal, 8, (NUMBERS, *OUTSIDE)),
    AppendMutant("LANES / 2; other > 0", "LANES / 4; other > 0", normal, 8, (NUMBERS,)),
    AppendMutant("if (word % LANES == 0)", "if (true)", normal, 8, (Race,)),
    AppendMutant("float(T(largest / float(TOP)))", "largest / float(TOP)", half, 4, (NUMBERS,)),
    AppendMutant("float(T(x[e] / by))", "x[e] / by", half, 8, (NUMBERS,)),
    AppendMutant("float(T(1e-5f))", "0.0f", lambda: mx.zeros((1, 2, 1, 1, 64)), 8, (NUMBERS, Undefined)),
    AppendMutant("rint(", "metal::floor(0.5f + ", ties, 4, (NUMBERS,)),
    AppendMutant("abs(x[e])", "x[e]", normal, 8, (NUMBERS,)),
    AppendMutant("(0xffffffffu >> (32 - BITS))", "0xffffffffu", normal, 4, (NUMBERS,)),
    AppendMutant("<< (BITS * e)", "<< (BITS * (PER_WORD - 1 - e))", normal, 4, (NUMBERS,)),
    AppendMutant("level > -float(TOP) ? int(min(level, float(TOP))) : -TOP", "int(level)", with_nan, 8, (Undefined,)),
    AppendMutant("|| x != x ? x : y", "? x : y", with_nan, 8, (NUMBERS,), "rows.h"),
    AppendMutant("x >= y || x != x ? x : y", "max(x, y)", with_nan, 8, (NUMBERS,), "rows.h"),
]


@pytest.mark.parametrize("rows", [normal, half, ties, with_nan])
def test_the_append_as_it_is_passes(rows: Callable[[], mx.array]) -> None:
    for bits in (8, 4):
        check_append(rows(), bits, 8, {})


@pytest.mark.parametrize("mutant", APPEND, ids=str)
def test_a_mistake_in_append_is_caught(mutant: AppendMutant) -> None:
    texts = Mutant(mutant.file, mutant.old, mutant.new, ALONE, mutant.kinds).texts()
    with pytest.raises(mutant.kinds):
        check_append(mutant.rows(), mutant.quant_bit, 8, texts)
