"""Any order of what can be done with pools, of many sequences and of one, against attention to all in
float64.
"""

import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.counts import count
from support.exact_tails import POISON, RING, SINKS, TAIL
from support.oracle import Array
from support.pool_oracle import NUMBERS, PAGE, OracleLayer, check_rows, numbers_of
from support.pools import check_pages

from kvant.cache import ModelCache
from kvant.cache.layer_format import LayerFormat, stored_dtype
from kvant.cache.pool import Pool, PoolSequence, single_sizes
from kvant.errors import ContextError
from kvant.operators import cpu_decode, cpu_paged_attention, cpu_prefill, paged_rows
from kvant.operators.bias_split import BiasSplit, rotation_table
from kvant.operators.key_transform import KeyTransform
from kvant.operators.rotary import Rotary

KEPT = 3  # places of a text alone
H, K, RESERVED, MOST, ALONE = 4, 2, 1200, 20, 4  # ALONE: pools of one at once
SLACK = 16  # tokens that a sequence goes back at least
ROTARY, PAIRS = 100.0, (0, 3, 11)
TEXTS = [[(5 * i * i + 11 * i + 97 * text) % 290 for i in range(RESERVED)] for text in range(2)]
WINDOWS = [8, None, 300, 20, 1, 90]
TOLERANCE, FITTED = 1e-5, 1e-3  # of the largest; a fitted scale may differ by an ulp of float16
NEW = st.sampled_from([129, 1, 2, 3, 8, 17, 18, 40, 257, 400])
FEW = st.sampled_from([3, 1, 20])
FATES = st.sampled_from(["committed", "committed", "committed", "in part", "abandoned"])


@dataclass(eq=False)
class _Text:
    """A sequence and what it must hold. ``floor``: it goes back to this length, and to longer ones.

    ``sinks``: how many of the first tokens have exact rows. Those of the others are there from ``exact_from``
    on, as far as they are among the last 124 of the ``most`` tokens that it had since.
    """

    sequence: PoolSequence
    ids: list[int]
    salt: bytes = b""
    cache: ModelCache | None = None  # the pool of one that it is in
    floor: int = 0
    kept: set[int] = field(default_factory=set)  # lengths that it can go back to besides
    sinks: int = SINKS
    exact_from: int = SINKS
    most: int = 0
    kept_from: dict[int, int] = field(default_factory=dict)  # exact_from by the lengths in kept

    @property
    def latest_start(self) -> int:
        """The latest position from which on it has exact rows."""
        return max(self.exact_from, min(self.most - RING, len(self.ids)))

    def copy(self, made: PoolSequence | ModelCache, back: int = RESERVED) -> "_Text":
        """The same text elsewhere, where it goes back ``back`` tokens at most."""
        floor = max(self.floor, len(self.ids) - back)
        tail = {"sinks": self.sinks, "exact_from": self.latest_start, "most": len(self.ids)}
        if isinstance(made, ModelCache):
            return _Text(made.sequence, list(self.ids), self.salt, made, floor, **tail)
        return _Text(made, list(self.ids), self.salt, floor=floor, **tail)


def _is_there(sequence: PoolSequence, length: int) -> bool:
    """Whether all rows are there that the next query sees after so many tokens."""
    parts = zip(sequence.pool.groups, sequence.tables, strict=True)
    return all(
        part.window is None or table.first <= max(0, length - part.window + 1) for part, table in parts
    )


class _Machine(RuleBasedStateMachine):
    """Texts in one pool of many, and in pools of one. Every layer's attention and every row's bytes are
    compared.
    """

    head_dim = 32
    may_have_tails = True

    @initialize(
        seed=st.integers(0, 2**32 - 1),
        bits=st.sampled_from([(0, 0), (8, 8), (4, 4), (8, 4), (4, 8)]),  # of keys and of values
        windows=st.lists(st.sampled_from(WINDOWS), min_size=2, max_size=3),
        tail=st.booleans(),
        split=st.booleans(),
        sinks=st.booleans(),
        transform=st.booleans(),
        pages=st.sampled_from([40, 60, 12, 6]),
        step=st.sampled_from([64, 400]),
        tokens=st.sampled_from([300, 700, 0, 20]),
        read_bytes=st.sampled_from([paged_rows.READ_BYTES, 1, 32 << 10]),
        long_tokens=st.sampled_from([cpu_paged_attention.LONG_TOKENS, 1, 50]),
        block_tokens=st.sampled_from([cpu_decode.BLOCK_TOKENS, 64]),
        tiled_scores=st.sampled_from([cpu_paged_attention.TILED_SCORES, 1]),
    )
    def make(
        self,
        seed: int,
        bits: tuple[int, int],
        windows: list[int | None],
        tail: bool,
        split: bool,
        sinks: bool,
        transform: bool,
        pages: int,
        step: int,
        tokens: int,
        read_bytes: int,
        long_tokens: int,
        block_tokens: int,
        tiled_scores: int,
    ) -> None:
        paged_rows.READ_BYTES = read_bytes
        cpu_paged_attention.LONG_TOKENS, cpu_decode.BLOCK_TOKENS = long_tokens, block_tokens
        cpu_paged_attention.TILED_SCORES, cpu_prefill.BLOCK_TOKENS = tiled_scores, block_tokens
        self.rng = np.random.default_rng(seed)
        self.step_size = step
        D = self.head_dim
        stored = (bits[0], 16, stored_dtype(*bits), "F16") if bits[0] else (0, 0, "F32", "")
        plain = LayerFormat(
            "quantized",
            K,
            D,
            D,
            *stored,
            split_pairs=PAIRS if split else None,
            value_bits=bits[1],
            tail_dtype="BF16" if tail and bits[0] and self.may_have_tails else "",
        )
        self.layers = []
        for number, window in enumerate(windows):
            own = replace(plain, window=window, slack=0 if window is None else SLACK)
            balance = (
                np.tile(2.0 ** self.rng.integers(-2, 3, (K, 1, D // 2)), 2).astype(np.float32)
                if transform
                else None
            )
            center = 3 * self._normal(K, 1, D) if transform and not sinks else None
            parts = {"center": center is not None, "balance": transform}
            own = replace(
                own,
                transform_name="+".join(name for name, has in parts.items() if has)
                + f":{number}" * transform,
            )
            both, biases = (
                self._normal(2, K, NUMBERS, D),
                (self._normal(K, 2, len(PAIRS)), self._normal(K, D)),
            )
            bias = BiasSplit(mx.array(biases[0]), PAIRS, mx.zeros(0), mx.array(biases[1])) if split else None
            frequencies = ROTARY ** (-2 * np.arange(D // 2) / D)
            self.layers.append(
                OracleLayer(own, both, frequencies, bias, self._normal(H) if sinks else None, center, balance)
            )
        self.texts: list[_Text] = []
        self.pool = self._pool(RESERVED, tokens=pages * PAGE, sequences=MOST, prefill_step_size=step)
        self.texts.append(_Text((cache := self._cache(RESERVED)).sequence, [], cache=cache))
        self._append(self.texts[:], tokens, 0)
        for length in (130, 257):
            self.admit(0, length, 150, salt=b"", whole_pages=True, shares=True)
        if pages <= 12:  # a beginning that nobody reads now
            self._release(self.many[0])

    def _normal(self, *shape: int) -> Array:
        return self.rng.standard_normal(shape).astype(np.float32)

    def _pool(self, max_seq_len: int, **sizes: Any) -> Pool:
        """A pool in which a row that is read before it is written shows."""
        formats, transforms = [], []
        table = rotation_table(Rotary.plain(self.head_dim, ROTARY), PAIRS, max_seq_len)
        for layer in self.layers:
            seen = (layer.format.window or max_seq_len) < max_seq_len  # else no sequence outgrows the window
            formats.append(layer.format if seen else replace(layer.format, window=None, slack=0))
            arrays = (None if array is None else mx.array(array) for array in (layer.center, layer.balance))
            transforms.append(
                KeyTransform(
                    layer.format.transform_name, layer.split and replace(layer.split, rotation=table), *arrays
                )
            )
        options = {"make_cache": self._cache, "dtype": mx.float32, "num_heads": H}
        options |= {} if sizes else {"checkpoints": KEPT}
        sizes = {"max_seq_len": max_seq_len} | sizes if sizes else single_sizes(max_seq_len)
        pool = Pool(formats, transforms, **sizes, **options)
        for own in pool.layers:
            own.arrays[-1][:] = float("nan")
            for array in own.exact_arrays:
                array[:] = POISON
        return pool

    def _cache(self, max_seq_len: int) -> ModelCache:
        return ModelCache(self._pool(max_seq_len))

    @property
    def many(self) -> list[_Text]:
        return [text for text in self.texts if text.cache is None]

    @property
    def alone(self) -> list[_Text]:
        return [text for text in self.texts if text.cache is not None]

    def _any(self, data: st.DataObject, texts: list[_Text] | None = None) -> _Text:
        texts = self.texts if texts is None else texts
        return texts[data.draw(st.integers(0, len(texts) - 1))]

    def _step(
        self,
        texts: list[_Text],
        ids: list[list[int]],
        fate: str = "committed",
        padding: int = 0,
        masked: bool = False,
    ) -> bool:
        """A step of new tokens of texts of one pool; False: there is no page for the copy of a shared one."""
        S, B, starts = len(ids[0]), len(texts), tuple(len(text.ids) for text in texts)
        sequences = [text.sequence for text in texts]
        batch = sequences[0].pool.batch(sequences, rows=B + padding)
        for text in texts:
            text.floor = max(text.floor, len(text.ids) - SLACK)
        try:
            assert batch.begin(mx.array(ids + [[0] * S] * padding)) == (*starts, *[0] * padding)
        except ContextError:
            assert any(part.pages.num_shared for part in self.pool.groups)
            return False
        for text, start in zip(texts, starts, strict=True):
            text.most = max(text.most, start + S) if S <= SLACK + 1 else text.most
        exact = [
            text.sequence.tail and (text.sequence.tail.sinks, text.sequence.tail.start) for text in texts
        ]
        numbers = [numbers_of(text.ids + new, text.salt) for text, new in zip(texts, ids, strict=True)]
        mask = (
            np.where(self.rng.random((S, len(numbers[0]))) < 0.2, -3.0, 0.0).astype(np.float32)
            if masked
            else None
        )
        looked = np.unique([0, S - 1, *self.rng.integers(S, size=20)])  # queries that are compared
        for view, layer in zip(batch, self.layers, strict=True):
            query = self._normal(B + padding, H, S, self.head_dim)
            heads = np.full((2, B + padding, K, S, self.head_dim), np.nan, np.float32)
            for b in range(B):
                heads[:, b] = layer.new(numbers[b][-S:])
            sinks = None if layer.sinks is None else mx.array(layer.sinks)
            changed = (
                view.transform.queries(mx.array(query)),
                view.transform.keys(mx.array(heads[0])),
                mx.array(heads[1]),
            )
            given = view.multi_head_cache_attention(*changed, None if mask is None else mx.array(mask), sinks)
            mx.eval(given)
            assert not np.array(given[B:]).any()
            for b in range(B):
                places = looked + starts[b]
                expected = layer.attend(
                    query[b][:, looked],
                    places,
                    numbers[b],
                    None if mask is None else mask[looked],
                    exact[b] if layer.format.tail_dtype else None,
                )
                least = FITTED if 4 in layer.format.bits else TOLERANCE
                assert np.abs(np.array(given[b])[:, looked] - expected).max() < least * np.abs(expected).max()
        if fate == "abandoned":
            return True
        kept = [int(self.rng.integers(S + 1)) if fate == "in part" else S for _ in texts]
        if fate == "one is released" and B > 1:
            self._release(texts[0])
        batch.commit(*([kept] if fate == "in part" else []))
        for text, new, number in zip(texts, ids, kept, strict=True):
            text.ids += new[:number]
            text.most = max(text.most, len(text.ids) - number + S) if number else text.most
            text.floor = max(text.floor, len(text.ids) - SLACK - 1)
        return True

    def _release(self, text: _Text) -> None:
        self.texts.remove(text)
        text.sequence.release()
        text.sequence.release()
        if text.cache is not None:
            text.cache.release()

    def _append(self, some: list[_Text], new: int, text: int, **how: Any) -> None:
        some = [own for own in some if len(own.ids) + new <= own.sequence.max_tokens]
        if some and new:
            self._step(some, [TEXTS[text][len(own.ids) :][:new] for own in some], **how)

    def _go_on(self, own: _Text, new: int, text: int) -> None:
        """Append a few tokens to a text, and to those that are in the same pool."""
        self._append(self.many if own.cache is None else [own], new, text)

    @rule(data=st.data(), new=NEW, text=st.integers(0, 1), fate=FATES, masked=st.booleans())
    def append(self, data: st.DataObject, new: int, text: int, fate: str, masked: bool) -> None:
        own = self._any(data)
        new = new if own.cache is not None else min(new, self.step_size)
        self._append([own], new, text, fate=fate, masked=masked)

    @precondition(lambda self: self.many)
    @rule(
        new=st.sampled_from([1, 1, 3, 30]),
        text=st.integers(0, 1),
        fate=st.one_of(FATES, st.just("one is released")),
        padding=st.integers(0, 2),
        most=st.sampled_from([MOST, 3, 2]),
    )
    def append_to_many(self, new: int, text: int, fate: str, padding: int, most: int) -> None:
        self._append(self.many[:most], new, text, fate=fate, padding=padding)

    @rule(
        text=st.integers(0, 1),
        length=st.sampled_from([300, 1, 30, 128, 129, 256, 257, 420, 700, 900]),
        extra=st.sampled_from([150, 700, 1, 40]),
        salt=st.sampled_from([b"", b"", b"a"]),
        whole_pages=st.booleans(),
        shares=st.booleans(),
    )
    def admit(self, text: int, length: int, extra: int, salt: bytes, whole_pages: bool, shares: bool) -> None:
        prompt, size = TEXTS[text][:length], min(length + extra, RESERVED)
        fits = self.pool.fits(size)
        try:
            sequence = self.pool.sequence(size, prompt, salt=salt, whole_pages=whole_pages)
        except ContextError:
            assert not fits
            return
        held = sequence.length
        assert held == 0 or held < length
        assert held % PAGE == 0 or not whole_pages
        self.texts.append(own := _Text(sequence, prompt[:held], salt, floor=held))
        if held:
            own.sinks, own.exact_from = 0, max(SINKS, held)
        while len(own.ids) < length:
            assert self._step([own], [prompt[len(own.ids) :][: self.step_size]]), "nobody shares these pages"
            if shares:
                sequence.share_prefix(last_page=not whole_pages)

    @precondition(lambda self: self.alone)
    @rule(
        data=st.data(), text=st.integers(0, 1), length=st.sampled_from([500, 1, 30, 140, 700, 900]), new=FEW
    )
    def keep_common(self, data: st.DataObject, text: int, length: int, new: int) -> None:
        """A pool of one begins another text: with what it has of it, or with nothing."""
        own, prompt = self._any(data, self.alone), TEXTS[text][:length]
        pairs = zip(own.ids, prompt[:-1], strict=False)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(own.ids), length - 1))
        left = same if own.sequence.can_trim_to(same) else max((n for n in own.kept if n < same), default=0)
        assert left == same or same < own.floor
        assert own.cache is not None
        now = own.cache.keep_common(prompt)
        if now != left:  # the exact rows that the next token reads are gone
            assert left - RING < own.latest_start or own.most - RING > left - TAIL
            assert own.sequence.tail is not None
            assert now in (max(0, left - TAIL), *own.kept)
            assert now < left
        self._cut(own, now)
        self._append([own], new, text)

    @rule(
        data=st.data(),
        back=st.sampled_from([130, 17, 0, 1, 16, 18, 40, 200, 300, 1300]),
        by_layers=st.booleans(),
        new=FEW,
    )
    def trim(self, data: st.DataObject, back: int, by_layers: bool, new: int) -> None:
        """What cannot be gone back to is refused, and nothing changes."""
        own = self._any(data)
        length = len(own.ids)
        left = max(0, length - back)
        cache: Any = own.cache or own.sequence
        trims = [layer.trim for layer in own.cache] if by_layers and own.cache is not None else [cache.trim]
        if cache.can_trim_to(left):
            assert [trim(back) for trim in trims] == [min(back, length)] * len(trims)
            self._cut(own, left)
            self._go_on(own, new, 1)
            return
        assert 0 < left < own.floor
        for trim in trims:
            with pytest.raises(
                ValueError, match=f"{back} of {length} tokens: .* than to {own.sequence.oldest} tok"
            ):
                trim(back)

    def _cut(self, own: _Text, length: int) -> None:
        start = min(own.latest_start, max(SINKS, length))
        if length in own.kept:
            start = max(own.kept_from[length], length + 1 - TAIL)
        own.most, own.exact_from = (length, start) if length else (0, SINKS)
        own.sinks = own.sinks if length else SINKS
        del own.ids[length:]
        own.floor = min(own.floor, length)
        own.kept = {each for each in own.kept if each <= length}

    @precondition(lambda self: self.alone)
    @rule(data=st.data(), new=NEW)
    def keep(self, data: st.DataObject, new: int) -> None:
        """A place that can be gone back to, whatever comes behind it."""
        own = self._any(data, self.alone)
        own.sequence.share_prefix(last_page=True)
        if own.ids and len(own.ids) not in own.kept:
            own.kept.add(len(own.ids))
            own.kept_from[len(own.ids)] = own.latest_start
        if len(own.kept) > KEPT:
            own.kept.remove(sorted(own.kept)[1])
        self._append([own], new, 0)

    @rule(data=st.data(), text=st.integers(0, 1), new=NEW)
    def reset(self, data: st.DataObject, text: int, new: int) -> None:
        own = self._any(data)
        (own.sequence.trim_to if own.cache is None else own.cache.trim_to)(0)
        self._cut(own, 0)
        self._append([own], min(new, self.step_size), text)

    @precondition(lambda self: len(self.alone) < ALONE)
    @rule(data=st.data(), extra=st.integers(0, 150), new=FEW)
    def fork(self, data: st.DataObject, extra: int, new: int) -> None:
        own = self._any(data)
        try:
            made = (
                own.cache.fork() if own.cache is not None else own.sequence.fork(max(1, len(own.ids) + extra))
            )
        except ContextError:
            assert own.cache is None
            return
        self.texts.append(own.copy(made, SLACK if own.cache is not None else RESERVED))
        self._go_on(self.texts[-1], new, 0)
        self._append([own], new, 1)

    @precondition(lambda self: self.many)
    @rule(data=st.data(), upto=st.none() | st.integers(0, 900), last_page=st.booleans())
    def share(self, data: st.DataObject, upto: int | None, last_page: bool) -> None:
        self._any(data, self.many).sequence.share_prefix(upto, last_page=last_page)

    @precondition(lambda self: len(self.texts) > 1)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self._release(self._any(data))

    @precondition(lambda self: len(self.alone) < ALONE)
    @rule(data=st.data(), extra=st.integers(0, 300), alone=st.booleans(), new=FEW)
    def load(self, data: st.DataObject, extra: int, alone: bool, new: int) -> None:
        """From one pool into another, of another reservation; the first one stays as it is."""
        own = self._any(data)
        size = min(max(1, len(own.ids) + extra), RESERVED)
        alone = alone or not self.pool.fits(size)
        made = own.sequence.pool.make_cache(size) if alone else self.pool.sequence(size, salt=own.salt)
        self.texts.append(own.copy(made, SLACK))
        self.texts[-1].sequence.load(own.sequence)
        self._go_on(self.texts[-1], new, 0)

    @precondition(lambda self: self.alone)
    @rule(data=st.data(), extra=st.none() | st.integers(0, 40), new=FEW)
    def save_and_load(self, data: st.DataObject, extra: int | None, new: int) -> None:
        """Into the same room, or into as much as the tokens need and a little more; and back."""
        own = self._any(data, self.alone)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "saved"
            for size in (RESERVED if extra is None else max(1, len(own.ids) + extra), RESERVED):
                assert own.cache is not None
                own.cache.save(path)
                made = self._cache(min(size, RESERVED))
                made.load(path)
                self.texts[self.texts.index(own)] = own = own.copy(made, SLACK)
        self._append([own], new, 1)

    @invariant()
    def adds_up(self) -> None:
        """Every page is free or held, every row's bytes are those that were given, and it goes back far
        enough.
        """
        for text in getattr(self, "texts", []):
            assert (text.sequence.ids, text.sequence.length) == (text.ids, len(text.ids))
            for length in {
                text.floor,
                *text.kept,
                *(len(text.ids) - back for back in (1, 18, 40, 130, 300, 600)),
            }:
                if 0 < length <= len(text.ids):
                    can = length in text.kept or _is_there(text.sequence, length)
                    assert text.sequence.can_trim_to(length) == can
            assert text.floor > len(text.ids) or _is_there(text.sequence, text.floor)
            if (tail := text.sequence.tail) is not None:
                assert tail.sinks == text.sinks
                assert SINKS <= tail.start <= max(SINKS, text.latest_start)
            if text.cache is not None:
                self._check(text.cache.pool, [text])
        if hasattr(self, "texts"):
            self._check(self.pool, self.many)

    def _check(self, pool: Pool, texts: list[_Text]) -> None:
        check_pages(pool, [text.sequence for text in texts])
        check_rows(pool, self.layers, [(text.sequence, numbers_of(text.ids, text.salt)) for text in texts])


def _run(case: type[_Machine], examples: int, steps: int) -> None:
    case.TestCase.settings = settings(max_examples=examples, stateful_step_count=steps, print_blob=True)
    case.TestCase().runTest()


@pytest.fixture(autouse=True)
def _sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they were, when a test has ended."""
    monkeypatch.setattr(paged_rows, "READ_BYTES", paged_rows.READ_BYTES)
    monkeypatch.setattr(cpu_paged_attention, "LONG_TOKENS", cpu_paged_attention.LONG_TOKENS)
    monkeypatch.setattr(cpu_paged_attention, "TILED_SCORES", cpu_paged_attention.TILED_SCORES)
    for module in (cpu_decode, cpu_prefill):
        monkeypatch.setattr(module, "BLOCK_TOKENS", module.BLOCK_TOKENS)


@pytest.mark.parametrize("examples", [8, count(20, 2000)])
def test_any_order(examples: int) -> None:
    _run(type("Any", (_Machine,), {}), examples, count(25, 50))


def test_any_order_with_the_fused_kernel(fused_calls: list[Any]) -> None:
    """Its stand-in. Steps of up to eight tokens without a mask are fused."""
    _run(type("Fused", (_Machine,), {"head_dim": 64, "may_have_tails": False}), count(4, 400), count(20, 50))
    assert fused_calls
