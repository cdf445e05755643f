"""Each of these small mistakes in the kernels' text is caught, by the host's checks or by the numbers.

Each third is tried, all of them in the long run, which a change to a kernel needs. A mutant names the call that must
catch it, and how. Five mistakes are left out because nothing changes but time:
a split of fewer than MIN_SPLIT_TOKENS tokens; an empty split's output written; a second pass that takes the maximum of
too few splits; ALiBi counted from another position, which adds the same to all scores of a query; append's min(), which
no quotient reaches.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
import pytest
from support.counts import count
from support.kernel_cases import KernelCase, check, draw, kernels_on_host
from support.metal_host import FORWARD, REVERSE, HostError, host_pytest_skip
from support.metal_host.errors import CompileFailed, OutOfBounds, Race, Undefined, Uninitialised, Unreadable

from kvant.operators.kernels import launch as launch_module
from kvant.operators.kernels.attend import quantize_tokens, threadgroup_shape
from kvant.operators.quantization import quantize

pytestmark = host_pytest_skip

# Without AddressSanitizer an access far outside of a buffer may fall into another one: what is said depends on which.
OUTSIDE = (OutOfBounds, Unreadable, Uninitialised, Race)
# No mistake needs a second thread order: races are found in any.
ORDERS = (FORWARD, REVERSE)
NUMBERS = AssertionError  # of the comparison with the oracle
Kind = type[HostError] | type[AssertionError]

# One query group of four simdgroups, nothing staged. Several steps in each of two splits; the last split is short.
ALONE = KernelCase(ratio=3, head_dim=64, offset=140, max_tokens=150, batch=2, pairs=3, splits=2)
# The same with few tokens: empty splits.
EMPTY = replace(ALONE, offset=9, splits=4)
# With 96 elements four lanes of 16 are idle. New tokens see different tokens.
WIDE = KernelCase(ratio=2, head_dim=96, new_tokens=2, offset=70, max_tokens=80, batch=2, quant_group=16, splits=2)
# Two query groups of four for seven queries, two simdgroups each, tokens staged.
STAGED = KernelCase(ratio=7, head_dim=64, offset=100, max_tokens=110, batch=2, pairs=3, mask="float", splits=2)
# Two tiles of 20 for 35 queries.
TILES = KernelCase(ratio=7, new_tokens=5, head_dim=64, offset=30, max_tokens=37, pairs=3, is_alibi=True)
# A mask for each sequence. Some queries keep nothing.
MASKED = replace(ALONE, pairs=None, mask="float", seed=3)
ALIBI = replace(ALONE, pairs=None, is_alibi=True)
NIBBLES = replace(ALONE, quant_bit=4, quant_group=16)
FLOATS = replace(ALONE, quant_bit=0, cache_dtype="float32")
HALVES = replace(FLOATS, cache_dtype="float16")
# Sequences of 140 and 70 tokens.
RAGGED = replace(ALONE, shorter=70)
# Scores far below 0, where a maximum that starts with 0 would stay.
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


def load(old: str, new: str, case: KernelCase, *kinds: Kind, nth: int = 0, places: int = 1) -> Mutant:
    return Mutant("load.h", old, new, case, kinds, nth, places)


FIRST_PASS = [
    # barriers
    attend("    KVANT_BARRIER;\n}\n", "}\n", ALONE, Race, Uninitialised),
    attend("KVANT_BARRIER;  // the last step's", "// the last step's", STAGED, Race),
    attend("        KVANT_BARRIER;\n    }\n\n", "    }\n\n", STAGED, Race, Uninitialised),
    attend("KVANT_BARRIER;  // its last", "// its last", ALONE, Race),
    attend(
        "        KVANT_BARRIER;\n        if (simdgroup_index == 0)",
        "        if (simdgroup_index == 0)",
        ALONE,
        Race,
        Uninitialised,
    ),
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
        load("const KVANT_DEVICE uint4*", "const uint4*", case, CompileFailed, nth=nth, places=2)
        for nth, case in enumerate((HALVES, FLOATS))
    ),
    load("const KVANT_DEVICE uint2*", "const uint2*", ALONE, CompileFailed),
    *(
        load("KVANT_THREAD float* x", "float* x", case, CompileFailed, nth=nth, places=4)
        for nth, case in enumerate((HALVES, FLOATS, ALONE, NIBBLES))
    ),
    Mutant("metal.h", "#define KVANT_DEVICE device", "#define KVANT_DEVICE", ALONE, (CompileFailed,)),
    # which tokens
    attend("offset[batch]", "offset[0]", RAGGED, Unreadable),
    attend("offset[batch]", "offset[1 - batch]", RAGGED, Unreadable),
    attend("offset[batch]", "offset[head]", RAGGED, Unreadable, NUMBERS),
    attend("start + NEW_TOKENS;", "start + NEW_TOKENS + 1;", ALONE, Unreadable),
    attend("start + NEW_TOKENS;", "start + NEW_TOKENS - 1;", ALONE, NUMBERS),
    attend("min(first + split_tokens, tokens)", "first + split_tokens", ALONE, *OUTSIDE),
    attend("(tokens + SPLITS - 1) / SPLITS", "tokens / SPLITS", ALONE, NUMBERS),
    attend("int(split) * split_tokens", "int(split) * (split_tokens - 1)", ALONE, NUMBERS),
    attend("base += STEP", "base += STEP / 2", ALONE, NUMBERS),
    attend("base += STEP", "base += 2 * STEP", ALONE, NUMBERS),
    attend("(base + r < last)", "(base + r <= last)", STAGED, Unreadable),
    attend("if (active && position < last) {", "if (active) {", ALONE, Unreadable, nth=0, places=2),
    attend("if (active && position < last) {", "if (active) {", ALONE, Unreadable, nth=1, places=2),
    attend("if (active && position < last) {", "if (position < last) {", WIDE, *OUTSIDE, nth=0, places=2),
    attend("if (active && position < last) {", "if (position < last) {", WIDE, *OUTSIDE, nth=1, places=2),
    attend("position >= last || ", "", ALONE, NUMBERS),
    attend("position >= last || ", "", MASKED, *OUTSIDE),
    attend("position > start + new_token", "position >= start + new_token", WIDE, NUMBERS),
    attend("position > start + new_token", "position > start", WIDE, NUMBERS),
    attend(" || (CAUSAL && position > start + new_token)", "", WIDE, NUMBERS),
    attend("a % NEW_TOKENS", "a / NEW_TOKENS", WIDE, NUMBERS),
    attend("size_t(batch) * 2 * heads", "size_t(batch) * heads", ALONE, NUMBERS),
    attend("first_key + size_t(heads) * max_tokens", "first_key + max_tokens", ALONE, NUMBERS),
    attend("* 2 * heads + head) * max_tokens", "* 2 * heads) * max_tokens", ALONE, NUMBERS),
    attend("words + first_key * STORED_WORDS", "words + first_value * STORED_WORDS", ALONE, NUMBERS),
    *(
        attend("(u * SIMDGROUPS + int(simdgroup_index))", "(u * SIMDGROUPS)", ALONE, NUMBERS, nth=nth, places=2)
        for nth in (0, 1)
    ),
    *(attend("+ int(lane_group);", ";", ALONE, NUMBERS, nth=nth, places=2) for nth in (0, 1)),
    # which queries
    attend("active && a < HEAD_QUERIES ?", "active ?", STAGED, *OUTSIDE),
    attend("active && a < HEAD_QUERIES ?", "a < HEAD_QUERIES ?", WIDE, *OUTSIDE),
    attend(" && query_tile * TILE_QUERIES + i / PAIRS_OR_ONE < HEAD_QUERIES;", ";", STAGED, *OUTSIDE),
    attend("a < HEAD_QUERIES && position < last)", "a < HEAD_QUERIES)", ALONE, *OUTSIDE),
    attend("PAIRS > 0 && a < HEAD_QUERIES && position", "PAIRS > 0 && position", STAGED, Uninitialised),
    attend("a >= HEAD_QUERIES || ", "", replace(STAGED, mask="none", is_alibi=True), *OUTSIDE),
    attend("lane_group == 0 && a < HEAD_QUERIES)", "lane_group == 0)", STAGED, *OUTSIDE),
    attend("threadgroup_position_in_grid.x / QUERY_TILES", "threadgroup_position_in_grid.x", TILES, *OUTSIDE, NUMBERS),
    attend("query_tile * TILE_QUERIES + first_in_tile", "first_in_tile", TILES, Race, Uninitialised, NUMBERS),
    attend("(query_tile * TILE_QUERIES + own) * DIM", "own * DIM", TILES, NUMBERS),
    # scales
    *(attend(" + chunk * KVANT_WIDTH / GROUP]", "]", ALONE, NUMBERS, nth=nth, places=2) for nth in (0, 1)),
    attend(" + c * KVANT_WIDTH / GROUP]", "]", STAGED, NUMBERS),
    attend("scale[(first_key + position)", "scale[(first_value + position)", ALONE, NUMBERS),
    attend("scale[(first_value + position)", "scale[(first_key + position)", ALONE, NUMBERS),
    attend("(is_value ? first_value : first_key)", "first_key", STAGED, NUMBERS),
    attend("dot *= group_scale;", "", ALONE, NUMBERS),
    attend("score[j][u] * group_scale", "score[j][u]", ALONE, NUMBERS),
    attend("x[e] *= group_scale;", "", STAGED, NUMBERS),
    # the bias split, the mask, ALiBi
    attend("q1 = query_scale * float", "q1 = float", ALONE, NUMBERS),
    attend("q2 = query_scale * float", "q2 = float", ALONE, NUMBERS),
    attend("q2 * b1 - q1 * b2", "q2 * b1 + q1 * b2", ALONE, NUMBERS),
    attend("key_bias[(head * 2) * PAIRS", "key_bias[(head * 0) * PAIRS", ALONE, NUMBERS),
    attend("key_bias[(head * 2 + 1)", "key_bias[(head * 2)", ALONE, NUMBERS),
    attend("bias_weights[index + PAIRS]", "bias_weights[index]", ALONE, NUMBERS),
    attend("(first_in_tile + j) * 2 * PAIRS", "j * 2 * PAIRS", STAGED, NUMBERS),
    attend("int p = int(chunk); p < PAIRS", "int p = 0; p < PAIRS", ALONE, NUMBERS),
    attend("rotation[sine]", "rotation[cosine]", ALONE, NUMBERS),
    attend("batch % mask_shape[0]", "0", MASKED, NUMBERS),
    attend("query_head % mask_shape[1]", "0", MASKED, NUMBERS),
    attend("masked * NEW_TOKENS + new_token", "masked * NEW_TOKENS", replace(WIDE, mask="float"), NUMBERS),
    attend("slopes[query_head]", "slopes[head]", ALIBI, NUMBERS),
    # adding up
    attend("LANES / 2; other > 0", "LANES / 4; other > 0", ALONE, NUMBERS),
    attend("other = LANES; other < 32", "other = 2 * LANES; other < 32", ALONE, NUMBERS),
    attend("max_score[j] = LOWEST;", "max_score[j] = 0.0f;", LOW, NUMBERS),
    attend("max_score[j] = top;", "", ALONE, NUMBERS, nth=0, places=3),
    attend("max_score[j] = top;", "", ALONE, NUMBERS, nth=1, places=3),
    *(attend("sum[j] *= rescale;", "", ALONE, NUMBERS, nth=nth, places=2) for nth in (0, 1)),
    *(attend("o[j][e] *= rescale;", "", ALONE, NUMBERS, nth=nth, places=2) for nth in (0, 1)),
    attend("shared[others + DIM + 1] * rescale_others", "shared[others + DIM + 1]", ALONE, NUMBERS),
    attend("CHUNKS + chunk] * rescale_others", "CHUNKS + chunk]", ALONE, NUMBERS),
    attend("sum[j] * rescale + shared", "sum[j] + shared", ALONE, NUMBERS),
    attend("o[j][e] * rescale + shared", "o[j][e] + shared", ALONE, NUMBERS),
    attend("int other = 1; other < SIMDGROUPS", "int other = 2; other < SIMDGROUPS", ALONE, NUMBERS),
    # who writes what, where
    attend("lane_group == 0 && active", "lane_group == 0", WIDE, *OUTSIDE),
    attend("lane_group == 0 && active", "active", ALONE, Race),
    attend("if (lane == 0) {\n            shared", "if (true) {\n            shared", ALONE, Race),
    attend("simdgroup_index_in_threadgroup * (DIM + 2)", "simdgroup_index * (DIM + 2)", STAGED, Race),
    attend("simdgroup_index == 0 && lane_group == 0", "lane_group == 0", ALONE, Race),
    attend("simdgroup_index == 0 && lane_group == 0", "simdgroup_index == 0", ALONE, Race),
    attend("if (active && first < last)", "if (first < last)", WIDE, *OUTSIDE),
    attend("* SPLITS + split", "* SPLITS", ALONE, Race, NUMBERS, Unreadable, Uninitialised),
    attend("shared[is_value * STEP * DIM + ", "shared[", STAGED, Race, Uninitialised),
    attend("shared[STEP * DIM + ", "shared[", STAGED, NUMBERS),
    # quantized values
    load("float(int(word << (28 - 4 * e)) >> 28)", "float(word << (28 - 4 * e) >> 28)", NIBBLES, NUMBERS),
    load("float(int(words.y << (24 - 8 * e)) >> 24)", "float(words.y << (24 - 8 * e) >> 24)", ALONE, NUMBERS),
    load("[2 * i + half_index]", "[i + half_index]", FLOATS, NUMBERS),
    load("x[1] = kvant_high(words.x", "x[1] = kvant_low(words.x", HALVES, NUMBERS),
]

SECOND_PASS = [
    combine("sum += weight * sums[at]", "sum += sums[at]", ALONE, NUMBERS),
    combine("o += weight * partial", "o += partial", ALONE, NUMBERS),
    combine("kvant_exp(max_scores[at] - top)", "1.0f", ALONE, NUMBERS),
    combine("if (sums[at] != 0.0f)", "if (true)", EMPTY, Unreadable),
    combine("uint i = 0; i < splits; i++) {\n    const", "uint i = 1; i < splits; i++) {\n    const", ALONE, NUMBERS),
    combine("if (sum != 0.0f)", "if (true)", MASKED, NUMBERS),
    combine("query / partial_shape[2] % heads", "query % heads", replace(WIDE, pairs=0), NUMBERS),
    combine("head / (heads / value_bias_shape[0])", "head", ALONE, *OUTSIDE, NUMBERS),
    combine("o /= sum;", "", ALONE, NUMBERS),
    combine("const uint at = query * splits + i", "const uint at = query * splits", ALONE, NUMBERS),
]


def test_the_cases_are_what_they_are_for() -> None:
    shapes = {ALONE: (1, 1, 4, 3), WIDE: (1, 1, 4, 4), STAGED: (1, 2, 2, 4), TILES: (2, 5, 1, 4)}
    for case, shape in shapes.items():
        assert threadgroup_shape(case.ratio * case.new_tokens, case.pairs or 0, case.backend) == shape
    mask = draw(MASKED).mask
    assert mask is not None
    assert mask.shape[0] == 2
    assert np.isneginf(mask[..., : MASKED.num_keys]).all(axis=-1).any()


@pytest.mark.parametrize(
    "case", [ALONE, EMPTY, WIDE, STAGED, TILES, MASKED, ALIBI, NIBBLES, FLOATS, HALVES, LOW], ids=range(11)
)
def test_the_text_as_it_is_passes(case: KernelCase) -> None:
    check(case)


def check_in_each_order(mutant: Mutant) -> None:
    """Without AddressSanitizer some mistakes show in one order of the threads alone."""
    for order in ORDERS:
        check(mutant.case, mutant.texts(), (order,))


MUTANTS = [*FIRST_PASS, *SECOND_PASS]


def test_the_mistakes_are_ones_that_the_text_allows() -> None:
    """Those of the long run too."""
    assert all(mutant.texts() for mutant in MUTANTS)
    assert all(mutant.texts() for mutant in map(_of_append, APPEND))


@pytest.mark.parametrize("mutant", MUTANTS[:: count(3, 1)], ids=str)
def test_a_mistake_in_attention_is_caught(mutant: Mutant) -> None:
    with pytest.raises(mutant.kinds):
        check_in_each_order(mutant)


# ---- append ----------------------------------------------------------------------------------------------------------


def check_append(both: mx.array, quant_bit: int, quant_group: int, texts: dict[str, str]) -> None:
    """Keys and values, quantized by the text and by the operator, are the same to the bit.

    ``both``: (B, 2, K, S, D), or side by side (B, 1, K, S, 80 + Dv).
    """
    options = {"quant_bit": quant_bit, "quant_group": quant_group, "scale_dtype": mx.float16}
    key, value = (both[:, 0], both[:, 1]) if both.shape[1] == 2 else (both[:, 0, ..., :80], both[:, 0, ..., 80:])
    with kernels_on_host(texts=texts, orders=ORDERS):
        words, scale = quantize_tokens(key, value, **options, backend="metal")
    wanted, wanted_scale = quantize(both, **options)
    np.testing.assert_array_equal(np.array(scale[0]), np.array(wanted_scale))
    if np.isfinite(np.array(scale)).all():
        np.testing.assert_array_equal(np.array(words[0]), np.array(mx.view(wanted, mx.uint32)))


def normal(dtype: mx.Dtype = mx.float32) -> mx.array:
    """20 words of a token's key at 8 bits, 10 at 4: a simdgroup is not full."""
    return mx.array(np.random.default_rng(7).standard_normal((2, 2, 5, 3, 80))).astype(dtype)


def wide() -> mx.array:
    """Keys of 80 beside values of 168, 42 words at 8 bits: a second simdgroup."""
    return mx.array(np.random.default_rng(7).standard_normal((2, 1, 5, 3, 248)).astype(np.float32))


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
    data: Callable[[], mx.array]
    quant_bit: int
    kinds: tuple[Kind, ...]
    file: str = "append.h"

    def __str__(self) -> str:
        return f"{self.old.strip()[:40]}->{self.new.strip()[:40]}"


def half() -> mx.array:
    return normal(mx.float16)


APPEND = [
    # who writes what
    AppendMutant("!exists ? 0.0f : float", "float", normal, 8, (*OUTSIDE,)),
    AppendMutant("if (exists) {", "if (true) {", normal, 8, (*OUTSIDE,)),
    AppendMutant("if (word % GROUP_THREADS == 0)", "if (true)", normal, 8, (Race,)),
    AppendMutant("word < words", "word < key_words", wide, 8, (NUMBERS, *OUTSIDE)),
    AppendMutant("of_value ? value[source + e] : key[source + e]", "key[source + e]", normal, 8, (NUMBERS,)),
    AppendMutant("threadgroup_position_in_grid.z % 2 == 1", "false", normal, 8, (Race, *OUTSIDE)),
    AppendMutant("batch = threadgroup_position_in_grid.z / 2", "batch = 0", normal, 8, (NUMBERS, *OUTSIDE)),
    AppendMutant("uint(key_shape[1]) * uint(key_shape[2])", "uint(key_shape[2])", normal, 8, (NUMBERS, *OUTSIDE)),
    AppendMutant("uint(value_shape[3]) / ", "uint(key_shape[3]) / ", wide, 8, (NUMBERS, *OUTSIDE)),
    AppendMutant("+ token) * words + word) * VALUES", "+ token) * key_words + word) * VALUES", wide, 8, (NUMBERS,)),
    AppendMutant("= thread_position_in_grid.x", "= thread_position_in_grid.x % 32", wide, 8, (Race, *OUTSIDE)),
    AppendMutant("source = ((size_t(batch) * tokens", "source = ((size_t(batch)", normal, 8, (NUMBERS,)),
    AppendMutant("* 2 + of_value) * tokens", "* 2) * tokens", normal, 8, (Race, *OUTSIDE)),
    AppendMutant("key_words == value_words\n", "true\n", wide, 8, (Race, NUMBERS, *OUTSIDE)),
    AppendMutant("key_words == value_words\n", "false\n", normal, 8, (NUMBERS,)),
    AppendMutant("(key_words + value_words)", "(2 * key_words)", wide, 8, (Race, *OUTSIDE)),
    AppendMutant("(of_value ? key_words : 0)", "(of_value ? value_words : 0)", wide, 8, (Race, *OUTSIDE)),
    AppendMutant("stored / GROUP_THREADS", "word / GROUP_THREADS", normal, 8, (Race, *OUTSIDE)),
    # numbers
    AppendMutant("GROUP_THREADS / 2; other > 0", "GROUP_THREADS / 4; other > 0", normal, 8, (NUMBERS,)),
    AppendMutant("float(T(largest / float(MAX_QUANTIZED)))", "largest / float(MAX_QUANTIZED)", half, 4, (NUMBERS,)),
    AppendMutant("float(T(x[e] / group_scale))", "x[e] / group_scale", half, 8, (NUMBERS,)),
    AppendMutant("float(T(1e-5f))", "0.0f", lambda: mx.zeros((1, 2, 1, 1, 64)), 8, (NUMBERS, Undefined)),
    AppendMutant("rint(", "metal::floor(0.5f + ", ties, 4, (NUMBERS,)),
    AppendMutant("abs(x[e])", "x[e]", normal, 8, (NUMBERS,)),
    AppendMutant("(0xffffffffu >> (32 - BITS))", "0xffffffffu", normal, 4, (NUMBERS,)),
    AppendMutant("<< (BITS * e)", "<< (BITS * (VALUES_PER_WORD - 1 - e))", normal, 4, (NUMBERS,)),
    AppendMutant(
        "rounded > -float(MAX_QUANTIZED) ? int(min(rounded, float(MAX_QUANTIZED))) : -MAX_QUANTIZED",
        "int(rounded)",
        with_nan,
        8,
        (Undefined,),
    ),
    AppendMutant("|| x != x ? x : y", "? x : y", with_nan, 8, (NUMBERS,), "load.h"),
    AppendMutant("x >= y || x != x ? x : y", "max(x, y)", with_nan, 8, (NUMBERS,), "load.h"),
]


@pytest.mark.parametrize("data", [normal, half, wide, ties, with_nan])
def test_the_append_as_it_is_passes(data: Callable[[], mx.array]) -> None:
    for bits in (8, 4):
        check_append(data(), bits, 8, {})


def _of_append(mutant: AppendMutant) -> Mutant:
    return Mutant(mutant.file, mutant.old, mutant.new, ALONE, mutant.kinds)


@pytest.mark.parametrize("mutant", APPEND[:: count(2, 1)], ids=str)
def test_a_mistake_in_append_is_caught(mutant: AppendMutant) -> None:
    with pytest.raises(mutant.kinds):
        check_append(mutant.data(), mutant.quant_bit, 8, _of_append(mutant).texts())
