"""Each of these small mistakes in the kernels' text is caught, by the host's checks or by the numbers.

Some are tried, all of them in the long run, which a change to a kernel needs. A mutant names the call that must catch
it, and how. append's min() is left out: no quotient reaches it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest
from support import kernel_mutants
from support.counts import count
from support.kernel_cases import KernelCase, check, draw, kernels_on_host
from support.kernel_mutants import (
    ALONE,
    EIGHT,
    KEEP,
    LARGE,
    MASKED,
    MUTANTS,
    NUMBERS,
    ONE,
    OUTSIDE,
    PAGES_WINDOW,
    PAIRS,
    PARTS,
    RING,
    SEVEN,
    TILES,
    WIDE,
    Kind,
    Mutant,
)
from support.metal_host import FORWARD, REVERSE, host_pytest_skip
from support.metal_host.errors import Race, Undefined

from kvant.operators.kernels.attend import quantize_tokens
from kvant.operators.quantization import quantize

pytestmark = host_pytest_skip

CASES = {name: case for name, case in vars(kernel_mutants).items() if name.isupper() and isinstance(case, KernelCase)}


def test_the_cases_are_what_they_are_for() -> None:
    """Tiles, query groups of a tile, simdgroups of a query group, queries of a simdgroup; masks; rings."""
    assert [case.shape for case in (ALONE, WIDE, SEVEN)] == [(1, 1, 4, 4), (1, 1, 4, 4), (1, 2, 2, 4)]
    assert [case.shape for case in (TILES, PAIRS)] == [(2, 5, 1, 4), (2, 2, 2, 4)]
    assert [case.shape for case in (ONE, EIGHT)] == [(1, 1, 4, 1), (1, 1, 4, 8)]
    assert [case.shape for case in (LARGE, PARTS)] == [(1, 1, 2, 8), (1, 1, 4, 2)]
    mask = draw(MASKED).mask
    assert mask is not None
    assert mask.shape[0] == 2
    assert mask.shape[-1] > MASKED.num_keys
    assert np.isneginf(mask[..., : MASKED.num_keys]).all(axis=-1).any()
    assert PAGES_WINDOW.firsts == [256, 128]
    assert all(end > case.max_tokens for case in (RING, KEEP) for end in case.ends)


@pytest.mark.parametrize("name", [*CASES][:: count(4, 1)])
def test_the_text_as_it_is_passes(name: str) -> None:
    check(CASES[name])


def check_in_each_order(mutant: Mutant) -> None:
    """Without AddressSanitizer some mistakes show in one order of the threads alone. Races are found in any."""
    for order in (FORWARD, REVERSE):
        check(mutant.case, mutant.texts(), (order,))


def test_the_mistakes_are_ones_that_the_text_allows() -> None:
    """Those of the long run too."""
    assert all(mutant.texts() for mutant in MUTANTS)
    assert all(mutant.texts() for mutant in map(_of_append, APPEND))


@pytest.mark.parametrize("mutant", MUTANTS[:: count(12, 1)], ids=str)
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
    with kernels_on_host(texts=texts, orders=(FORWARD, REVERSE)):
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


@pytest.mark.parametrize("mutant", APPEND[:: count(3, 1)], ids=str)
def test_a_mistake_in_append_is_caught(mutant: AppendMutant) -> None:
    with pytest.raises(mutant.kinds):
        check_append(mutant.data(), mutant.quant_bit, 8, _of_append(mutant).texts())
