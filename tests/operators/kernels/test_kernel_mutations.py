"""Twenty small mistakes in the kernels' text, each of a kind of its own: the host's checks or the numbers catch it.

A third is tried, all of them in the long run, which a change to a kernel needs. The host does not see that a constant
outside of a function must be in Metal's address space `constant`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
import pytest
from support.counts import count
from support.kernel_cases import KernelCase, check, kernels_on_host
from support.metal_host import FORWARD, REVERSE, HostError, host_pytest_skip
from support.metal_host.errors import (
    CompileFailed,
    Divergence,
    OutOfBounds,
    Race,
    Undefined,
    Uninitialised,
    Unreadable,
)

from kvant.operators.kernels import launch
from kvant.operators.kernels.attend import quantize_tokens
from kvant.operators.quantization import quantize

pytestmark = host_pytest_skip

# Without AddressSanitizer an access far outside of a buffer may fall into another one: what is said depends on which.
OUTSIDE = (OutOfBounds, Unreadable, Uninitialised, Race)
NUMBERS = AssertionError  # of the comparison with the oracle
Kind = type[HostError] | type[AssertionError]

# A query group of four simdgroups and 3 queries. Several steps in each of two splits; the last split is short.
ALONE = KernelCase(ratio=3, head_dim=64, offset=140, max_tokens=150, batch=2, pairs=3, splits=2)
EMPTY = replace(ALONE, offset=9, splits=4)  # splits without rows
RAGGED = replace(ALONE, shorter=100)  # sequences of 141 and 41 tokens
MASKED = replace(ALONE, pairs=None, mask="float", seed=5, knows_rows=True)  # some queries keep nothing
NIBBLES = replace(ALONE, quant_bit=4, quant_group=16)
PAGES = replace(ALONE, layout="pages", offset=300, shorter=100)
# With 96 elements four lanes of 16 are idle. New tokens see different tokens.
WIDE = KernelCase(ratio=2, head_dim=96, new_tokens=2, offset=70, max_tokens=80, batch=2, quant_group=16, splits=2)
# A window that begins in the second 64 rows; a ring of 90 rows with sequences of 192 and 132 tokens.
WINDOW = replace(WIDE, head_dim=64, offset=140, max_tokens=150, window=20)
RING = replace(WINDOW, max_tokens=90, window=70, offset=190, shorter=60, pairs=3, mask="float")
# Two query groups of four for seven queries, two simdgroups each.
SEVEN = KernelCase(ratio=7, head_dim=64, offset=100, max_tokens=110, batch=2, pairs=3, mask="float", splits=2)
# Keys and values beside each other.
BESIDE = KernelCase(ratio=2, head_dim=192, value_dim=128, offset=70, max_tokens=75, batch=2, splits=2)
CASES = [ALONE, EMPTY, RAGGED, MASKED, NIBBLES, PAGES, WIDE, WINDOW, RING, SEVEN, BESIDE]


def quantized(data: Callable[[], mx.array], quant_bit: int) -> Callable[[dict[str, str], int], None]:
    """A check that keys and values, quantized by the text and by the operator, are the same to the bit."""

    def run(texts: dict[str, str], order: int) -> None:
        both, options = data(), {"quant_bit": quant_bit, "quant_group": 8, "scale_dtype": mx.float16}
        with kernels_on_host(texts=texts, orders=(order,)):
            words, scale = quantize_tokens(both[:, 0], both[:, 1], **options, backend="metal")
        wanted, wanted_scale = quantize(both, **options)
        np.testing.assert_array_equal(np.array(scale[0]), np.array(wanted_scale))
        if np.isfinite(np.array(scale)).all():
            np.testing.assert_array_equal(np.array(words[0]), np.array(mx.view(wanted, mx.uint32)))

    return run


def normal() -> mx.array:
    """20 words of a token's key at 8 bits, 10 at 4: a simdgroup is not full."""
    return mx.array(np.random.default_rng(7).standard_normal((2, 2, 5, 3, 80)).astype(np.float32))


def half() -> mx.array:
    return normal().astype(mx.float16)


def with_nan() -> mx.array:
    x = np.array(normal())
    x[0, 0, 1, 1, 9] = np.nan
    return mx.array(x)


@dataclass(frozen=True)
class Mutant:
    """A mistake, what runs it, and what must be said. ``nth`` of ``places`` where the text is."""

    kind: str
    file: str
    old: str
    new: str
    case: KernelCase | Callable[[dict[str, str], int], None]
    said: tuple[Kind, ...]
    nth: int = 0
    places: int = 1

    def texts(self) -> dict[str, str]:
        """The file with the mistake in it. Fails if the text is not what the mutant was written for."""
        parts = launch._text(self.file).split(self.old)
        assert len(parts) == self.places + 1, f"{self.file} has {len(parts) - 1} of {self.old!r}"
        kept = self.old.join(parts[: self.nth + 1]), self.old.join(parts[self.nth + 1 :])
        return {self.file: self.new.join(kept)}

    def run(self) -> None:
        """Without AddressSanitizer some mistakes show in one order of the threads alone. Races are found in any."""
        for order in (FORWARD, REVERSE):
            if isinstance(self.case, KernelCase):
                check(self.case, self.texts(), (order,))
            else:
                self.case(self.texts(), order)


MUTANTS = [
    Mutant("a barrier that is not there", "attend.h",
            "    KVANT_BARRIER;\n    const int g", "    const int g", ALONE, OUTSIDE),
    Mutant("no address space", "attend.h",
            "const KVANT_DEVICE uint* keys", "const uint* keys", ALONE, (CompileFailed,)),
    Mutant("threadgroup memory too small", "attend.h",
            "GATHERED = VALUE_DIM + 2;", "GATHERED = VALUE_DIM + 1;", ALONE, OUTSIDE),
    Mutant("a row behind the last", "attend.h",
            "min(max(row, rows.low), end - 1)", "max(row, rows.low)", ALONE, OUTSIDE, 0, 3),
    Mutant("a row before the window", "attend.h",
            "min(max(row, rows.low), end - 1)", "min(row, end - 1)", WINDOW, OUTSIDE, 0, 3),
    Mutant("another sequence's length", "attend.h", "offset[batch % offset_shape[0]]", "offset[0]", RAGGED, OUTSIDE),
    Mutant("another sequence's pages", "attend.h",
            "pages[batch * pages_shape[1] + base", "pages[base", PAGES, (NUMBERS,)),
    Mutant("rows of keys beside values", "attend.h", "BESIDE ? DIM + VALUE_DIM : DIM;", "DIM;", BESIDE, OUTSIDE),
    Mutant("a query that does not exist", "attend.h",
            "a = min(first_query + j, head_queries - 1)", "a = first_query + j", ALONE, OUTSIDE),
    Mutant("idle lanes count", "attend.h", "chunk < KEY_CHUNKS ? score_scale : 0.0f", "score_scale", WIDE, (NUMBERS,)),
    Mutant("a token too few is seen", "attend.h", "position <= last_seen;", "position < last_seen;", WIDE, (NUMBERS,)),
    Mutant("a ring in no order", "attend.h", "row > newest_row ? max_rows - keep : 0", "0", RING, (NUMBERS,)),
    Mutant("a mask read where nothing is", "attend.h", "if (MASK && seen) {", "if (MASK) {", MASKED, OUTSIDE),
    Mutant("lanes that diverge", "attend.h", "+ n / OWN * REPEAT", "+ n * REPEAT", ALONE, (Divergence,)),
    Mutant("sums that keep an old maximum", "attend.h", "sum *= rescale;", "", ALONE, (NUMBERS,), 0, 2),
    Mutant("another query group's sums", "attend.h",
            "group = simdgroup_index - sharer", "group = simdgroup_index", SEVEN, OUTSIDE),
    Mutant("the odd nibbles' factor", "load.h", "e % 2 == 1 ? 0.0625f", "e % 2 == 0 ? 0.0625f", NIBBLES, (NUMBERS,)),
    Mutant("a split without rows", "combine.h",
            "int split = lane; split < rows.used", "int split = lane; split < settings[KVANT_SPLITS]", EMPTY, OUTSIDE),
    Mutant("a rounding that is left out", "append.h",
            "float(T(x[e] / group_scale))", "x[e] / group_scale", quantized(half, 8), (NUMBERS,)),
    Mutant("a NaN made an integer", "append.h",
            "rounded > -float(MAX_QUANTIZED) ? int(min(rounded, float(MAX_QUANTIZED))) : -MAX_QUANTIZED",
           "int(rounded)", quantized(with_nan, 8), (Undefined,)),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES[:: count(4, 1)], ids=str)
def test_the_text_as_it_is_passes(case: KernelCase) -> None:
    check(case)


def test_the_append_as_it_is_passes() -> None:
    for data, bits in ((normal, 4), (half, 8), (with_nan, 8)):
        quantized(data, bits)({}, FORWARD)


def test_the_mistakes_are_ones_that_the_text_allows() -> None:
    """Those of the long run too; and the cases are what they are for: query groups, simdgroups, queries, rings."""
    assert all(mutant.texts() for mutant in MUTANTS)
    assert [case.shape for case in (ALONE, WIDE, SEVEN)] == [(1, 1, 4, 4), (1, 1, 4, 4), (1, 2, 2, 4)]
    assert all(end > RING.max_tokens for end in RING.ends)


@pytest.mark.parametrize("mutant", MUTANTS[:: count(3, 1)], ids=lambda mutant: mutant.kind)
def test_a_mistake_is_caught(mutant: Mutant) -> None:
    with pytest.raises(mutant.said):
        mutant.run()
