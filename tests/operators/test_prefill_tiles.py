"""Attention of a prompt's chunk in tiles on a CPU, against attention in float64.

H query heads, K kv heads, D head_dim, S new tokens.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from support import oracle
from support.oracle import Array

from kvant import blas
from kvant.operators import cpu_paged_attention, cpu_prefill
from kvant.operators.bias_split import BiasSplit
from kvant.operators.paged_attention import attend_rows
from kvant.operators.paged_rows import PagedRows
from kvant.operators.row_runs import Run, cut_runs

pytestmark = pytest.mark.skipif(mx.default_device().type != mx.cpu, reason="tiles are computed on a CPU")

K, D, GROUP, ROWS = 2, 32, 16, 700
PAIRS = (1, 7, 11)
TOLERANCE = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 1.6e-2}  # of the largest output


class Case(NamedTuple):
    """What is attended to, and by how many queries."""

    heads: int = 6
    new: int = 77
    before: int = 150
    bits: tuple[int, int] = (0, 0)  # of keys and of values
    value_dim: int = D
    window: int | None = None
    split: bool = False
    sinks: bool = False
    dtype: mx.Dtype = mx.float32


SIZES = [Case(new=9, before=0), Case(new=64, before=64), Case(heads=2), Case(heads=10, new=130, before=3)]
CASES = [
    *SIZES,
    *(
        Case(bits=bits, window=window, split=split, sinks=sinks)
        for bits in [(0, 0), (8, 8), (4, 4), (8, 4), (4, 8)]
        for window in (None, 50)
        for split, sinks in [(False, False), (True, False), (False, True), (True, True)]
    ),
    *(Case(bits=bits, value_dim=48, split=True) for bits in [(0, 0), (8, 8), (4, 4)]),
    *(Case(window=window) for window in (1, 64, 150, 1000)),
    *(Case(dtype=dtype, sinks=True) for dtype in (mx.float16, mx.bfloat16)),
]


class Layer:
    """The arrays of a layer with one sequence. Rows that hold none of its tokens hold NaN."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)

        def normal(*shape: int) -> Array:
            return rng.standard_normal(shape).astype(np.float32)

        self.case = case
        self.first = 0 if case.window is None else max(0, case.before + 1 - case.window)
        self.count = case.before + case.new - self.first
        third = self.count // 3 + 1
        self.runs: list[Run] = [(400, 400 + third), (10, 10 + self.count - third)]
        self.query = mx.array(normal(1, case.heads, case.new, D)).astype(case.dtype)
        self.sinks = mx.array(normal(case.heads)) if case.sinks else None
        angle = normal(len(PAIRS), case.before + case.new)
        self.rotation = np.stack([np.cos(angle), np.sin(angle)])
        self.key_bias = 3 * normal(K, 2, len(PAIRS))
        self.value_bias = normal(K, case.value_dim)
        self.stored = self._stored(normal(K, self.count, D), normal(K, self.count, case.value_dim))
        self.arrays = [self._in_rows(tokens) for tokens in self.stored]

    def _stored(self, key: Array, value: Array) -> list[Array]:
        """Return the tokens as a cache stores them: numbers and scales (2, K, tokens, last)."""
        sides: list[tuple[Array, ...]] = []
        for tokens, bits in zip((key, value), self.case.bits, strict=True):
            spec = oracle.Spec(scale_dtype="float16", quant_bit=bits, quant_group=GROUP)
            rounded = np.array(mx.array(tokens).astype(self.case.dtype).astype(mx.float32))
            sides.append(oracle.quantize(tokens, spec) if bits else (rounded,))
        alike = self.case.value_dim == D and len({*self.case.bits}) == 1
        return [np.stack(pair) if alike else oracle.beside(*pair)[None] for pair in zip(*sides, strict=True)]

    def _in_rows(self, tokens: Array) -> mx.array:
        rows = np.full((*tokens.shape[:2], ROWS, tokens.shape[-1]), -1).astype(tokens.dtype)
        if tokens.dtype in (np.float16, np.float32):
            rows[:] = np.nan
        rows[:, :, [row for start, stop in self.runs for row in range(start, stop)]] = tokens
        array = mx.array(rows)
        return array if self.case.bits[0] else array.astype(self.case.dtype)

    @property
    def options(self) -> dict[str, Any]:
        """Return the options of attend_rows."""
        quant_bit, value_bit = self.case.bits
        split = BiasSplit(mx.array(self.key_bias), PAIRS, mx.array(self.rotation), mx.array(self.value_bias))
        return {
            "quant_bit": quant_bit,
            "value_bit": value_bit,
            "bias_split": split if self.case.split else None,
            "sinks": self.sinks,
        }

    def expected(self) -> Array:
        """Return the attention (1, H, S, Dv) in float64."""
        scales = self.stored[1] if self.case.bits[0] else None
        # (K, T, D) -> (T, K, D)
        key, value = (
            side.swapaxes(0, 1) for side in oracle.sides(self.stored[0], scales, D, self.case.bits, GROUP)
        )
        if self.case.split:
            cosine, sine = self.rotation[:, :, self.first :].swapaxes(1, 2).astype(np.float64)
            key = key + oracle.turned_bias(self.key_bias, PAIRS, cosine, sine, D)
            value = value + self.value_bias.astype(np.float64)
        query = np.array(self.query.astype(mx.float32)).swapaxes(1, 2)
        sinks = None if self.sinks is None else np.array(self.sinks)
        output = oracle.attend(query, key[None], value[None], window=self.case.window, sinks=sinks)
        return output.swapaxes(1, 2)

    def check(self, output: mx.array) -> None:
        """Compare an output with what is expected."""
        assert output.dtype == self.case.dtype
        expected = self.expected()
        error = np.abs(np.array(output.astype(mx.float32)) - expected).max()
        assert error < TOLERANCE[self.case.dtype] * np.abs(expected).max()


@pytest.fixture
def tiled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have more than a few queries attend in small tiles; return the number of tokens of each call."""
    calls: list[int] = []
    attend: Callable[..., mx.array] = cpu_prefill.attend_tiles

    def counted(
        query: mx.array, arrays: list[mx.array], runs: list[Run], *given: Any, **own: Any
    ) -> mx.array:
        calls.append(sum(stop - start for start, stop in runs))
        return attend(query, arrays, runs, *given, **own)

    monkeypatch.setattr(cpu_prefill, "attend_tiles", counted)
    monkeypatch.setattr(cpu_prefill, "TILE_ROWS", 60)
    monkeypatch.setattr(cpu_prefill, "BLOCK_TOKENS", 64)
    monkeypatch.setattr(cpu_paged_attention, "TILED_SCORES", 1)
    return calls


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tiles_agree_with_float64(tiled: list[int], case: Case) -> None:
    layer = Layer(case)
    rows = PagedRows([], [layer.runs], [layer.first], case.window)
    layer.check(attend_rows(layer.query, layer.arrays, rows, **layer.options))
    assert tiled == [layer.count]


@pytest.mark.parametrize("bits", [(0, 0), (8, 8), (8, 4)])
def test_tokens_that_are_not_written_yet_are_seen(tiled: list[int], bits: tuple[int, int]) -> None:
    case = Case(bits=bits, window=100)
    layer = Layer(case)
    written = layer.count - case.new
    rows = PagedRows(None, [cut_runs(layer.runs, 0, written)], [layer.first], case.window)
    waiting = [mx.array(tokens[:, :, written:]) for tokens in layer.stored]
    layer.check(attend_rows(layer.query, layer.arrays, rows, waiting=waiting, **layer.options))
    assert tiled == [layer.count]


def test_each_sequence_attends_to_its_own_tokens(tiled: list[int]) -> None:
    layers = [Layer(Case(before=before), seed=before) for before in (150, 4)]
    arrays = [mx.concatenate([layer.arrays[0] for layer in layers], axis=2)]
    runs = [
        [(ROWS * b + start, ROWS * b + stop) for start, stop in layer.runs] for b, layer in enumerate(layers)
    ]
    query = mx.concatenate([layer.query for layer in layers])
    output = attend_rows(query, arrays, PagedRows([], runs, [0, 0], None), quant_bit=0)
    for b, layer in enumerate(layers):
        layer.check(output[b : b + 1])
    assert tiled == [layer.count for layer in layers]


def test_without_a_library_numpy_multiplies(tiled: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "sgemm", lambda: None)
    layer = Layer(Case(bits=(8, 8), split=True))
    layer.check(
        attend_rows(layer.query, layer.arrays, PagedRows([], [layer.runs], [0], None), **layer.options)
    )
    assert tiled


def test_a_short_prompt_does_without_tiles(tiled: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(Case())
    rows = PagedRows([], [layer.runs], [0], None)
    scores = layer.case.heads * layer.case.new * layer.count
    for least, calls in ((scores + 1, 0), (scores, 1)):
        monkeypatch.setattr(cpu_paged_attention, "TILED_SCORES", least)
        layer.check(attend_rows(layer.query, layer.arrays, rows, **layer.options))
        assert len(tiled) == calls
