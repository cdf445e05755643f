"""Forty small mistakes in the kernels' text, each of a kind of its own: the host's checks or the numbers
catch it.

A third is tried, all of them in the long run, which a change to a kernel needs. The host does not see that a
constant outside of a function must be in Metal's address space `constant`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from support.counts import count
from support.kernel_cases import KernelCase, check, check_append
from support.metal_host import FORWARD, REVERSE, HostError, host_pytest_skip

from kvant.operators.kernels import launch

pytestmark = host_pytest_skip

# Without AddressSanitizer an access far outside of a buffer may fall into another one: what is said depends
# on which.
OUTSIDE = "OutOfBounds|Unreadable|Uninitialised|Race"
NUMBERS = (
    # of the comparison with the oracle
    "\nNot equal to tolerance|\nArrays are not equal|the output is not finite"
)

# A query group of four simdgroups and 3 queries. Several steps in each of two splits; the last split is
# short.
ALONE = KernelCase(ratio=3, head_dim=64, offset=140, max_tokens=150, batch=2, pairs=3, splits=2)
EMPTY = replace(ALONE, offset=9, splits=4)  # splits without rows
RAGGED = replace(ALONE, shorter=100)  # sequences of 141 and 41 tokens
MASKED = replace(ALONE, pairs=None, mask="float", seed=5, knows_rows=True)  # some queries keep nothing
NIBBLES = replace(ALONE, quant_bit=4, quant_group=16)
PAGES = replace(ALONE, layout="pages", offset=300, shorter=100)
# With 96 elements four lanes of 16 are idle. New tokens see different tokens.
WIDE = KernelCase(
    ratio=2, head_dim=96, new_tokens=2, offset=70, max_tokens=80, batch=2, quant_group=16, splits=2
)
# A window that begins in the second 64 rows.
WINDOW = replace(WIDE, head_dim=64, offset=140, max_tokens=150, window=20)
# Two query groups of four for seven queries, two simdgroups each.
SEVEN = KernelCase(ratio=7, head_dim=64, offset=100, max_tokens=110, batch=2, pairs=3, mask="float", splits=2)
# Keys and values beside each other.
BESIDE = KernelCase(ratio=2, head_dim=192, value_dim=128, offset=70, max_tokens=75, batch=2, splits=2)
APART = replace(ALONE, value_bit=4)  # keys of 8 bits
# An exact tail whose ring has turned, of sequences of 302 and 202 tokens; one without the first tokens; and one of
# sequences that have no quantized row left to read.
EXACT = replace(
    PAGES,
    quant_bit=4,
    quant_group=16,
    new_tokens=2,
    max_tokens=302,
    splits=4,
    tail="float16",
    knows_rows=True,
)
LATE = replace(EXACT, tail_sinks=0)
ALL_EXACT = replace(EXACT, offset=70, shorter=30, max_tokens=72)
CASES = [
    ALONE,
    EMPTY,
    RAGGED,
    MASKED,
    NIBBLES,
    PAGES,
    WIDE,
    WINDOW,
    SEVEN,
    BESIDE,
    APART,
    EXACT,
    LATE,
    ALL_EXACT,
]


Check = Callable[..., Any]


def quantized(
    dtype: mx.Dtype,
    quant_bit: int = 8,
    *,
    nan: bool = False,
    group: int = 8,
    fit: bool = False,
    value_bit: int = 0,
) -> Check:
    """The append's check. A token's key takes ten threads: a simdgroup is not full."""
    x = np.random.default_rng(7).standard_normal((2, 2, 5, 3, 80)).astype(np.float32)
    if nan:
        x[0, 0, 1, 1, 9] = np.nan
    key, value = (mx.array(side).astype(dtype) for side in x)
    form = {"quant_bit": quant_bit, "value_bit": value_bit, "quant_group": group}
    return partial(check_append, key, value, **form, fit=fit)


class Mutant(NamedTuple):
    """A mistake: what runs it, what must be said, and the text that is another."""

    kind: str
    case: KernelCase | Check
    said: str
    old: str
    new: str
    file: str = "attend.h"

    def texts(self) -> dict[str, str]:
        """The file with the mistake in it. Fails if the text is not what the mutant was written for."""
        text = launch._text(self.file)
        assert self.old in text, f"{self.file} has no {self.old!r}"
        return {self.file: text.replace(self.old, self.new, 1)}


def run(case: KernelCase | Check, texts: dict[str, str]) -> None:
    """Without AddressSanitizer some mistakes show in one order of the threads alone. Races are found in
    any.
    """
    call = partial(check, case) if isinstance(case, KernelCase) else case
    for order in (FORWARD, REVERSE):
        call(texts=texts, orders=(order,))


MUTANTS = [
    Mutant("a barrier that is not there", ALONE, OUTSIDE, "    KVANT_BARRIER;\n    const int "
                                                          "g", "    const int g"),
    Mutant("no address space", ALONE, "CompileFailed", "const KVANT_DEVICE uint* keys", "const uint* keys"),
    Mutant("threadgroup memory too small", ALONE, OUTSIDE, "GATHERED = VALUE_DIM + "
                                                           "2;", "GATHERED = VALUE_DIM + 1;"),
    Mutant("a row behind the last", ALONE, OUTSIDE, "min(max(row, rows.low), end - 1)", "max(row, rows.low)"),
    Mutant("a row before the window", WINDOW, OUTSIDE, "min(max(row, rows.low), end - 1)", "min(row, end - "
                                                                                           "1)"),
    Mutant("another sequence's length", RAGGED, OUTSIDE, "offset[batch % offset_shape[0]]", "offset[0]"),
    Mutant("another sequence's pages", PAGES, NUMBERS, "pages[batch * pages_shape[1] + base", "pages[base"),
    Mutant("rows of keys beside values", BESIDE, OUTSIDE, "KEY_WORDS + (BESIDE ? VALUE_WORDS : "
                                                          "0);", "KEY_WORDS;"),
    Mutant("a query that does not exist", ALONE, OUTSIDE,
           "a = min(first_query + j, head_queries - 1)", "a = first_query + j"),
    Mutant("idle lanes count", WIDE, NUMBERS, "chunk < KEY_CHUNKS ? score_scale : 0.0f", "score_scale"),
    Mutant("a token too few is seen", WIDE, NUMBERS, "position <= last_seen;", "position < last_seen;"),
    Mutant("a token too many is seen", WINDOW, NUMBERS,
           "position > query_position - window", "position >= query_position - window"),
    Mutant("a mask read where nothing is", MASKED, OUTSIDE, "if (MASK && seen) {", "if (MASK) {"),
    Mutant("lanes that diverge", ALONE, "Divergence", "+ n / OWN * REPEAT", "+ n * REPEAT"),
    Mutant("sums that keep an old maximum", ALONE, NUMBERS, "sum *= rescale;", ""),
    Mutant("another query group's sums", SEVEN, OUTSIDE, "group = simdgroup_index - "
                                                         "sharer", "group = simdgroup_index"),
    Mutant("the odd nibbles' factor", NIBBLES, NUMBERS, "e % 2 == 1 ? 0.0625f", "e % 2 == 0 ? 0.0625f", "load.h"),
    Mutant("a split without rows", EMPTY, OUTSIDE,
           "int split = lane; split < rows.used", "int split = lane; split < "
                                                  "settings[KVANT_SPLITS]", "combine.h"),
    Mutant("a rounding that is left out", quantized(mx.float16), NUMBERS,
           "float(T(quotient))", "quotient", "append.h"),
    Mutant("a NaN made an integer", quantized(mx.float32, nan=True), "Undefined",
           "rounded > float(least) ? int(min(rounded, float(most))) : least",
           "int(rounded)", "append.h"),
    Mutant("a fit to one thread's values", quantized(mx.float32, 4, group=16, fit=True), NUMBERS,
           "products += simd_shuffle_xor(products, other);", "", "append.h"),
    Mutant("a fit to quotients that are rounded twice", quantized(mx.float32, 4, fit=True), NUMBERS,
           "products += quotient *", "products += rounded *", "append.h"),
    Mutant("the largest value in place of the largest magnitude", quantized(mx.float32, 4, fit=True), NUMBERS,
           "high > -low ? high : low", "high", "append.h"),
    Mutant("the least of one thread's values", quantized(mx.float32, 4, group=16, fit=True), NUMBERS,
           "low = -kvant_larger(-low, -simd_shuffle_xor(low, other));", "", "append.h"),
    Mutant("values of the keys' bits", APART, f"{NUMBERS}|{OUTSIDE}", "Eight<VALUE_BITS, "
                                                                      "C>;", "Eight<BITS, C>;"),
    Mutant("the keys' factor for values", APART, NUMBERS, "kvant_factor<VALUE_BITS>(e)", "kvant_factor<BITS>(e)"),
    Mutant("the keys' groups for values", APART, NUMBERS, "(BESIDE ? DIM : 0) + chunk", "chunk"),
    Mutant("bits that are swapped", quantized(mx.float32, 8, value_bit=4, fit=True), f"{NUMBERS}|{OUTSIDE}",
           "of_value ? VALUE_BITS : BITS", "of_value ? BITS : VALUE_BITS", "append.h"),
    Mutant("a quantized row that the tail stands for", EXACT, OUTSIDE,
           "min(start + new_tokens, kvant_tail_start(start + new_tokens - 1, tail)) - "
           "first", "start + new_tokens - first", "rows.h"),
    Mutant("quantized first tokens", EXACT, OUTSIDE,
           "max(max(tail.first_seen, tail.sinks) - first, 0)", "max(tail.first_seen - first, 0)", "rows.h"),
    Mutant("splits of rows that none is left of", ALL_EXACT, NUMBERS,
           "rows.used = held > low ? rows.used : 0;", "", "rows.h"),
    Mutant("the tail of the first query for all", EXACT, NUMBERS,
           "kvant_tail_start(query_position, tail)", "kvant_tail_start(start, tail)"),
    Mutant("exact rows alone", EXACT, NUMBERS, "exact == (TAIL == 2)", "exact"),
    Mutant("a row of the ring's last turn", EXACT, f"{NUMBERS}|{OUTSIDE}",
           "row > tail.last_row ? KVANT_RING", "row >= tail.last_row ? KVANT_RING", "rows.h"),
    Mutant("an exact row that no query sees", EXACT, OUTSIDE,
           "kvant_exact_position(row, tail) ? row : tail.last_row", "kvant_exact_position(row, tail) ? "
                                                                    "row : row", "rows.h"),
    Mutant("first tokens that are not there", LATE, OUTSIDE,
           "(position < tail.sinks ||", "(position < KVANT_SINKS ||", "rows.h"),
    Mutant("another sequence's tail", EXACT, f"{NUMBERS}|{OUTSIDE}", "spans[batch * 4 + 2]", "spans[2]"),
    Mutant("an exact row's number for its position", EXACT, f"{NUMBERS}|{OUTSIDE}",
           "(TAIL == 2 ? kvant_position_read(row, tail) : held)", "held"),
    Mutant("one split of two", EXACT, NUMBERS,
           "% simdgroups; split < KVANT_TAIL_SPLITS;", "% simdgroups; split < 1;", "combine.h"),
    Mutant("another query's exact rows", EXACT, NUMBERS,
           "size_t(query) * tail_partial_shape[3]", "size_t(0)", "combine.h"),
]  # fmt: skip


APPENDS = [
    quantized(mx.float32, 4), quantized(mx.float16), quantized(mx.float32, nan=True), quantized(mx.float16, 4, fit=True)
]  # fmt: skip


@pytest.mark.parametrize("case", [*CASES[:: count(4, 1)], *APPENDS])
def test_the_text_as_it_is_passes(case: KernelCase | Check) -> None:
    run(case, {})


def test_the_mistakes_are_ones_that_the_text_allows() -> None:
    """Those of the long run too; and the cases are what they are for: query groups, simdgroups, queries."""
    assert all(mutant.texts() for mutant in MUTANTS)
    assert [case.shape for case in (ALONE, WIDE, SEVEN)] == [(1, 1, 4, 4), (1, 1, 4, 4), (1, 2, 2, 4)]


@pytest.mark.parametrize("mutant", MUTANTS[:: count(3, 1)], ids=lambda mutant: mutant.kind)
def test_a_mistake_is_caught(mutant: Mutant) -> None:
    with pytest.raises((HostError, AssertionError), match=rf"^({mutant.said})"):
        run(mutant.case, mutant.texts())
