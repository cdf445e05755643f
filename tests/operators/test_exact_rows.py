"""Attention to quantized tokens with an exact tail, against attention in float64.

A query at position p reads the first 4 tokens and those from p - 107 on as they were computed, the others as
they are quantized. H query heads, K kv heads, D head_dim, S new tokens.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support import oracle
from support.counts import count
from support.exact_tails import PAGE, POISON, SINKS, TAIL, exact_row, in_bfloat16, read_exactly
from support.oracle import Array

from kvant.cache.exact_tail import place_exact
from kvant.cache.layer_format import DTYPE_NAMES, DTYPES, LayerFormat
from kvant.operators import cpu_decode, cpu_paged_attention, cpu_prefill, paged_attention
from kvant.operators.bias_split import BiasSplit
from kvant.operators.exact_rows import ExactSpan
from kvant.operators.paged_attention import append, multi_head_cache_attention
from kvant.operators.paged_rows import PagedRows
from kvant.operators.row_runs import Run, cut_runs

on_cpu = pytest.mark.skipif(mx.default_device().type != mx.cpu, reason="a GPU attends in another way")

K, D, GROUP = 2, 32, 16
PAIRS = (1, 7, 11)
GAP = 40  # rows between the two runs of a sequence
TOLERANCE = {mx.float32: 2e-5, mx.float16: 3e-3, mx.bfloat16: 2e-2}  # of the largest output


@dataclass(frozen=True)
class Case:
    """Sequences of some lengths, and new tokens of each.

    ``first_rows`` and ``start`` are the exact rows that the sequences have: of their first tokens, and of
    the others from ``start`` on.
    """

    before: tuple[int, ...] = (500,)
    new: int = 1
    heads: int = 6
    bits: tuple[int, int] = (4, 4)
    value_dim: int = D
    window: int | None = None
    split: bool = False
    sinks: bool = False
    mask: bool = False
    first_rows: int = SINKS
    start: int = SINKS
    padding: int = 0
    dtype: mx.Dtype = mx.float32

    def __str__(self) -> str:
        default = Case()
        changed = {name: value for name, value in vars(self).items() if value != getattr(default, name)}
        return "-".join(f"{name}={value}" for name, value in changed.items()).replace(" ", "") or "default"


@dataclass
class Layer:
    """The arrays of a layer before a step. What no query of the step may read exactly holds NaN.

    Quantized rows are read whole by some paths, so only rows of other sequences are NaN there.
    """

    case: Case
    seed: int = 0
    arrays: list[mx.array] = field(init=False)
    exact: list[mx.array] = field(init=False)
    lacking: int | None = field(default=None, init=False)  # a sequence without the first exact rows
    by_chunk: bool = field(default=False, init=False)  # all new tokens are read exactly, as by a GPU

    def __post_init__(self) -> None:
        case = self.case
        self.rng = np.random.default_rng(self.seed)
        self.format = LayerFormat.of_rows(
            K,
            D,
            case.value_dim,
            case.bits[0],
            GROUP,
            DTYPE_NAMES[case.dtype],
            window=case.window,
            max_seq_len=10_000,
            value_bits=case.bits[1],
            has_tail=True,
        )
        self.room = max(case.before) + case.new + GAP
        B = len(case.before)
        rows = B * self.room
        angle = self._normal(len(PAIRS), self.room)
        self.rotation = np.stack([np.cos(angle), np.sin(angle)])
        self.key_bias = 3 * self._normal(K, 2, len(PAIRS))
        self.value_bias = self._normal(K, case.value_dim)
        self.learned = self._normal(case.heads) if case.sinks else None
        self.query = self._rounded(self._normal(B + case.padding, case.heads, case.new, D))
        # (R, K, T, D) of every token, with the new ones behind those of before
        self.keys = self._rounded(self._normal(B + case.padding, K, self.room, D))
        self.values = self._rounded(self._normal(B + case.padding, K, self.room, case.value_dim))
        self.added = np.where(self.rng.random((case.new, self.room)) < 0.2, -3.0, 0.0).astype(np.float32)
        self.arrays = [mx.zeros(shape, DTYPES[dtype]) for dtype, shape in self.format.arrays(rows).values()]
        self.arrays[1][:] = float("nan")
        self.exact = [mx.full(shape, POISON, DTYPES[dtype]) for dtype, shape in self.format.tail_pages(B + 1)]
        self.exact[0][:, :, :PAGE] = float("nan")  # nobody's
        self._fill()

    def _normal(self, *shape: int) -> Array:
        return self.rng.standard_normal(shape).astype(np.float32)

    def _rounded(self, x: Array) -> Array:
        """Return numbers that the case's dtype represents."""
        return np.array(mx.array(x).astype(self.case.dtype).astype(mx.float32))

    def rows(self, b: int, first: int, end: int) -> list[Run]:
        """Return where tokens of a sequence are: two runs, the second one in front."""
        middle = self.case.before[b] // 3 + 1
        base = b * self.room
        behind = self.room - middle - GAP + 1
        assert end - middle < behind
        every = [(base + behind + GAP - 1, base + behind + GAP - 1 + middle), (base, base + behind)]
        return cut_runs(every, first, end)

    def page(self, b: int) -> int:
        """Return the page of a sequence's exact rows; page 0 is nobody's."""
        return len(self.case.before) - b

    def _fill(self) -> None:
        """Write the tokens before the step."""
        for b, length in enumerate(self.case.before):
            if not length:
                continue
            places = PagedRows(self.rows(b, 0, length), [self.rows(b, 0, length)], [0], None)
            keys, values = (mx.array(x[b : b + 1, :, :length]) for x in (self.keys, self.values))
            append(keys, values, self.arrays, places, **self.format.operands)
            needed = read_exactly(length, self.case.first_rows, self.case.start)[:length]
            for position in np.flatnonzero(needed).tolist():
                row = self.page(b) * PAGE + exact_row(position)
                both = [x[b, :, position] for x in (self.keys, self.values)]
                token = mx.array(np.stack(both) if self.case.value_dim == D else np.hstack(both)[None])
                self.exact[0][:, :, row] = mx.clip(token, -65504, 65504)
        mx.eval(self.arrays, self.exact)

    def first_rows(self, b: int) -> int:
        """Return how many of the first tokens of a sequence have exact rows."""
        if not self.case.before[b]:
            return SINKS
        return 0 if b == self.lacking else self.case.first_rows

    def spans(self) -> list[ExactSpan]:
        """Return which exact rows the sequences have."""
        case = self.case
        return [
            ExactSpan(
                self.page(b),
                self.first_rows(b),
                max(SINKS, min(case.start, length), length - 124),
            )
            for b, length in enumerate(case.before)
        ]

    def step(self, new: int, done: int = 0, only: Sequence[int] | None = None) -> mx.array:
        """Attend from some new tokens behind the first ``done`` new ones, of all sequences or of some."""
        case = self.case
        chosen = range(len(case.before)) if only is None else only
        lengths = [case.before[b] + done for b in chosen]
        spans = [self.spans()[b] for b in chosen]
        firsts = [0 if case.window is None else max(0, length + 1 - case.window) for length in lengths]
        written: list[Run] | mx.array = self.rows(chosen[0], lengths[0], lengths[0] + new)
        if len(chosen) > 1:
            runs = [self.rows(b, length, length + new) for b, length in zip(chosen, lengths, strict=True)]
            written = mx.array([row for own in runs for run in own for row in range(*run)], mx.int32)
        read = [
            self.rows(b, first, length + new)
            for b, first, length in zip(chosen, firsts, lengths, strict=True)
        ]
        rows = PagedRows(
            written,
            read,
            firsts,
            case.window,
            exact=place_exact(spans, lengths, new, fused=False),
        )
        return self._attend(rows, new, done, chosen, lengths)

    def step_that_waits(self) -> mx.array:
        """Attend from all new tokens, whose quantized rows are written later too."""
        (length,) = self.case.before
        assert self.case.window is not None
        first = max(0, length + 1 - self.case.window)
        exact = place_exact(self.spans(), [length], self.case.new, fused=False)
        rows = PagedRows(None, [self.rows(0, first, length)], [first], self.case.window, exact=exact)
        return self._attend(rows, self.case.new, 0, [0], [length])

    def _attend(
        self, rows: PagedRows, new: int, done: int, chosen: Iterable[int], lengths: Sequence[int]
    ) -> mx.array:
        case = self.case
        padding = range(len(case.before), len(case.before) + case.padding)
        both = [*zip(chosen, lengths, strict=True), *((b, 0) for b in padding)]
        keys = np.stack([self.keys[b][:, length : length + new] for b, length in both])
        values = np.stack([self.values[b][:, length : length + new] for b, length in both])
        query = np.stack([self.query[b][:, done : done + new] for b, _ in both])
        heads = [mx.array(x).astype(case.dtype) for x in (query, keys, values)]
        split = BiasSplit(mx.array(self.key_bias), PAIRS, mx.array(self.rotation), mx.array(self.value_bias))
        mask = mx.array(self.added[done : done + new, : lengths[0] + new]) if case.mask else None
        output, self.waiting = multi_head_cache_attention(
            *heads,
            self.arrays,
            rows,
            **self.format.operands,
            mask=mask,
            bias_split=split if case.split else None,
            sinks=None if self.learned is None else mx.array(self.learned),
            exact_arrays=self.exact,
        )
        mx.eval(output, self.arrays, self.exact)
        return output

    def quantized(self, b: int) -> list[Array]:
        """Return keys and values (T, K, D) in float64 of a sequence, as they are quantized."""
        end = self.case.before[b] + self.case.new
        places = [row for run in self.rows(b, 0, end) for row in range(*run)]
        stored = [np.asarray(memoryview(array))[:, :, places] for array in self.arrays]
        if self.waiting.stored:
            for array, new in zip(stored, self.waiting.stored, strict=True):
                array[:, :, self.case.before[b] :] = np.asarray(memoryview(new))
        return [side.swapaxes(0, 1) for side in oracle.sides(*stored, D, self.case.bits, GROUP)]

    def expected(self, b: int, number: int, quantized: Sequence[Array]) -> Array:
        """Return the attention (H, Dv) of one of the new tokens of a sequence, in float64."""
        case = self.case
        position = case.before[b] + number
        is_exact = read_exactly(
            case.before[b] if self.by_chunk else position,
            self.first_rows(b),
            max(SINKS, min(case.start, case.before[b])),
        )
        is_exact = np.append(is_exact, np.ones(position + 1 - len(is_exact), bool))
        sides = []
        for own, stored in zip((self.keys, self.values), quantized, strict=True):
            floats = own[b, :, : position + 1].swapaxes(0, 1)  # (K, T, D) -> (T, K, D)
            exact = floats.astype(np.float64) if case.dtype == mx.float16 else in_bfloat16(floats)
            sides.append(np.where(is_exact[:, None, None], exact, stored[: position + 1]))
        keys, values = sides
        if case.split:
            cosine, sine = self.rotation[:, :, : position + 1].swapaxes(1, 2).astype(np.float64)
            keys = keys + oracle.turned_bias(self.key_bias, PAIRS, cosine, sine, D)
            values = values + self.value_bias.astype(np.float64)
        output = oracle.attend(
            self.query[b, :, number][None, None],
            keys[None],
            values[None],
            attn_mask=self.added[number : number + 1, : position + 1] if case.mask else None,
            window=case.window,
            sinks=self.learned,
        )
        return output[0, 0]

    def check(self, output: mx.array) -> None:
        """Compare an output (R, H, S, Dv) with what is expected."""
        case = self.case
        B = len(case.before)
        assert output.dtype == case.dtype
        given = np.array(output.astype(mx.float32))
        assert np.isfinite(given).all()
        assert not given[B:].any()
        for b in range(B):
            quantized = self.quantized(b)
            some = {0, 1, case.new - 1, case.new // 2, *self.rng.integers(case.new, size=6).tolist()}
            for number in some & {*range(case.new)}:
                expected = self.expected(b, number, quantized)
                error = np.abs(given[b, :, number] - expected).max()
                assert error < TOLERANCE[case.dtype] * np.abs(expected).max(), (b, number)


@pytest.fixture
def tiled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have more than a few queries attend in small tiles; return the number of tokens of each call."""
    calls: list[int] = []
    attend: Callable[..., mx.array] = cpu_prefill.attend_tiles

    def counted(query: mx.array, arrays: Any, runs: list[Run], *given: Any, **own: Any) -> mx.array:
        calls.append(sum(stop - start for start, stop in runs))
        return attend(query, arrays, runs, *given, **own)

    monkeypatch.setattr(cpu_prefill, "attend_tiles", counted)
    monkeypatch.setattr(cpu_prefill, "TILE_ROWS", 60)
    monkeypatch.setattr(cpu_prefill, "BLOCK_TOKENS", 64)
    monkeypatch.setattr(cpu_paged_attention, "TILED_SCORES", 1)
    return calls


@pytest.fixture
def long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a few queries attend block by block to as few as 50 tokens."""
    monkeypatch.setattr(cpu_paged_attention, "LONG_TOKENS", 50)
    monkeypatch.setattr(cpu_decode, "BLOCK_TOKENS", 64)


LENGTHS = [0, 2, 3, 5, 100, *range(107, 114), *range(123, 131), 500]
NEW = [1, 3, 8, 17, 18, 40, 300]
SIZES = [(length, new) for i, length in enumerate(LENGTHS) for new in count(NEW[i % 2 :: 2], NEW)]
RAGGED = (500, 0, 130, 3, 110)
FORMS = [
    Case(),
    Case(bits=(8, 8), heads=2),
    Case(bits=(8, 4), split=True),
    Case(bits=(4, 8), sinks=True),
    Case(value_dim=48),
    Case(value_dim=48, bits=(8, 4), split=True, sinks=True),
    Case(mask=True, split=True),
    Case(window=20),
    Case(window=TAIL, split=True),
    Case(window=TAIL + 1, sinks=True),
    Case(window=300, split=True, sinks=True),
    Case(window=1000, mask=True),
    Case(window=60, mask=True, split=True),
    Case(first_rows=0, start=400),
    Case(first_rows=0, start=500, split=True),
    Case(start=450, sinks=True),
    Case(start=480, window=200),
    Case(first_rows=0, start=495, window=60),
    Case(before=RAGGED),
    Case(before=RAGGED, window=300, split=True, padding=2),
    Case(before=(500, 400, 300), window=200, split=True, sinks=True),
    Case(before=RAGGED, first_rows=0, start=90, sinks=True),
    Case(before=(1, 2, 0), first_rows=0, split=True),
    Case(before=RAGGED, window=50, bits=(8, 4), padding=1),
    Case(dtype=mx.float16, split=True),
    Case(dtype=mx.float16, window=130, sinks=True),
    Case(dtype=mx.bfloat16, before=(200, 130)),
]
SOME = [1, 9, 3, 18, 8, 17, 40]
EVERY = [
    replace(form, new=new)
    for i, form in enumerate(FORMS)
    for new in count(SOME if len(form.before) > 1 else SOME[i % 2 :: 2], SOME)
]
EVERY += [replace(form, before=(130,), new=300) for form in FORMS[: 14 : count(3, 1)]]


def _checked(case: Case) -> None:
    layer = Layer(case)
    layer.check(layer.step(case.new))


@pytest.mark.parametrize(("before", "new"), SIZES)
def test_every_length_reads_its_own_first_and_last_tokens(before: int, new: int) -> None:
    _checked(Case((before,), new))


@pytest.mark.parametrize("case", EVERY, ids=str)
def test_unfused_attention_agrees_with_float64(case: Case) -> None:
    _checked(case)


@on_cpu
@pytest.mark.parametrize("case", [case for case in EVERY if case.new > 8], ids=str)
def test_tiles_agree_with_float64(tiled: list[int], case: Case) -> None:
    _checked(case)
    assert bool(tiled) == (not case.mask)


@on_cpu
@pytest.mark.parametrize(("before", "new"), [size for size in SIZES if size[1] > 8])
def test_tiles_of_every_length(tiled: list[int], before: int, new: int) -> None:
    _checked(Case((before,), new, split=True))
    assert tiled == [before + new]


@on_cpu
@pytest.mark.parametrize("case", [case for case in EVERY if case.new <= 8], ids=str)
@pytest.mark.usefixtures("long")
def test_long_contexts_agree_with_float64(case: Case) -> None:
    _checked(case)


@on_cpu
@pytest.mark.parametrize(("before", "new"), [size for size in SIZES if size[1] <= 8])
@pytest.mark.usefixtures("long")
def test_long_contexts_of_every_length(before: int, new: int) -> None:
    _checked(Case((before,), new, split=True))


@pytest.mark.parametrize("before", [2045, 2100, 4093, 4096 + 50, 4096 + TAIL - 2])
@pytest.mark.parametrize("form", [Case(split=True), Case(bits=(8, 4), sinks=True, start=4000)], ids=str)
def test_contexts_that_are_long_in_fact(before: int, form: Case) -> None:
    """Where a block of 4,096 tokens ends inside the tail, just behind it, and just before it."""
    _checked(replace(form, before=(before,), new=4))


@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("window", [20, TAIL, 300])
@pytest.mark.parametrize("new", [18, 40, 300])
def test_quantized_rows_that_wait(request: pytest.FixtureRequest, new: int, window: int, tiles: bool) -> None:
    if tiles:
        request.getfixturevalue("tiled")
    for before in (500, 110, 3, 0):
        layer = Layer(Case((before,), new, window=window, split=True, bits=(8, 4)))
        layer.check(layer.step_that_waits())


@pytest.mark.parametrize("start", [20, 93, 104])
@pytest.mark.parametrize("first_rows", [0, SINKS])
@pytest.mark.parametrize("new", [9, 17, 18, 30])
def test_a_partial_tail_that_all_new_tokens_read(start: int, first_rows: int, new: int) -> None:
    """Exact rows and quantized ones together are every token once, but not in the order of positions."""
    _checked(Case((104,), new, split=True, start=start, first_rows=first_rows))


@pytest.mark.parametrize("lacking", [0, 1])
@pytest.mark.parametrize("new", [9, 20])
def test_sequences_of_one_length_with_other_exact_rows(new: int, lacking: int) -> None:
    """The layers of a step share masks, which depend on the exact rows that a sequence has."""
    layer = Layer(Case((200, 200), new))
    layer.lacking = lacking
    layer.check(layer.step(new))


@pytest.mark.parametrize("new", [1, 9, 18])
def test_a_key_beyond_float16_stays_finite(new: int) -> None:
    """An infinite key would make a NaN of every score."""
    for changed in (0, 1):
        layer = Layer(Case((200,), new))
        tokens = (layer.keys, layer.values)[changed]
        tokens[0, 0, 200, 3] = 1e5
        tokens[0, 1, 200, 5] = -1e5
        if changed == 0:
            layer.query[:, :, :, [3, 5]] *= 1e-4
        layer.check(layer.step(new))


@on_cpu
@pytest.mark.parametrize("before", count([0, 3, 105, 106, 109, 124, 500], [*range(5), *range(100, 130), 500]))
@pytest.mark.parametrize(
    "form",
    [Case(), Case(bits=(8, 4), split=True, sinks=True), Case(window=150, split=True), Case(window=30)],
    ids=str,
)
@pytest.mark.parametrize("is_long", [False, True])
def test_a_few_queries_have_the_bits_of_each_alone(
    request: pytest.FixtureRequest, before: int, form: Case, is_long: bool
) -> None:
    if is_long:
        request.getfixturevalue("long")
    _check_bits(replace(form, before=(before, 77, 300), new=4))


@on_cpu
@pytest.mark.parametrize("before", count([4093], [2046, 2048, 4093]))
def test_a_few_queries_of_a_long_context_have_the_bits_of_each_alone(before: int) -> None:
    _check_bits(Case((before, 40), 4, split=True))


def _check_bits(case: Case) -> None:
    """Four new tokens of all sequences, and of each, have the bits of one new token after another."""
    together = np.array(Layer(case).step(case.new))
    singly = Layer(case)
    for b in range(len(case.before)):
        own = np.array(Layer(case).step(case.new, only=[b]))
        np.testing.assert_array_equal(own[0], together[b])
        for number in range(case.new):
            one = np.array(singly.step(1, number, [b]))
            np.testing.assert_array_equal(one[0, :, 0], together[b, :, number])


@on_cpu
@pytest.mark.parametrize(
    ("before", "new", "window"),
    [
        ((300,), 9, None),
        ((300,), 40, None),
        ((0,), 30, None),
        ((2,), 20, None),
        ((200, 3, 130), 20, None),
        ((300, 200), 12, 50),
        ((300, 200), 200, 150),
    ],
)
@pytest.mark.parametrize(("bits", "value_dim"), [((4, 4), D), ((8, 4), D), ((4, 4), 2 * D)])
def test_what_a_gpu_reads_unfused(
    monkeypatch: pytest.MonkeyPatch,
    before: tuple[int, ...],
    new: int,
    window: int | None,
    bits: tuple[int, int],
    value_dim: int,
) -> None:
    """More than a few new tokens share one tail: that of the first of them, and all new ones."""
    monkeypatch.setattr(paged_attention, "attend_rows_on_cpu", paged_attention._attend_unfused)
    layer = Layer(Case(before, new, bits=bits, value_dim=value_dim, window=window))
    layer.by_chunk = True
    layer.check(layer.step(new))


@on_cpu
def test_what_a_gpu_reads_unfused_of_tokens_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_attention, "attend_rows_on_cpu", paged_attention._attend_unfused)
    for split in (False, True):
        layer = Layer(Case((300,), 40, window=150, split=split))
        layer.by_chunk = True
        layer.check(layer.step_that_waits())


@on_cpu
@pytest.mark.parametrize("new", [1, 3, 8])
def test_what_a_gpu_reads_unfused_of_a_few_tokens(monkeypatch: pytest.MonkeyPatch, new: int) -> None:
    """Each its own tail, as on a CPU."""
    monkeypatch.setattr(paged_attention, "attend_rows_on_cpu", paged_attention._attend_unfused)
    layer = Layer(Case((300, 2, 120), new))
    layer.check(layer.step(new))
