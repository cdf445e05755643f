"""Any order of what can be done with a pool, against sequences that are kept apart in NumPy."""

import tempfile
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.counts import count
from support.oracle import Array
from support.pool_oracle import PAGE, OracleSequence, rows_of
from support.pools import check_pages, close, tiny_model

from kvant.cache.pool import PoolSequence
from kvant.cache.prefix import digests
from kvant.errors import ContextError
from kvant.models import Decoder

MOST, STEP = 20, 160
TEXTS = [[(5 * i * i + 11 * i + 97 * text) % 290 for i in range(600)] for text in range(2)]
WINDOWS: dict[str, tuple[int | None, ...]] = {"all": (None, None), "mixed": (None, 40, 200), "windows": (150, 150)}


@cache
def _model(kind: str, head_dim: int) -> Decoder:
    with tempfile.TemporaryDirectory() as folder:
        return tiny_model(Path(folder), WINDOWS[kind], hidden_size=4 * head_dim)


class _Machine(RuleBasedStateMachine):
    """Sequences of one pool. What each holds is known twice."""

    kind, bits, head_dim = "all", 0, 16

    @initialize(pages=st.integers(6, 40), bias=st.booleans())
    def make(self, pages: int, bias: bool) -> None:
        self.model = _model(self.kind, self.head_dim)
        stored = {"kv_bits": self.bits, "kv_group_size": 16, "bias_split": bias}
        self.pool = self.model.make_pool(pages * PAGE, sequences=MOST, prefill_step_size=STEP, **stored)
        for layer in self.pool.layers:  # a row that is read before it is written shows
            layer.arrays[-1][:] = float("nan")
        self.open: list[tuple[PoolSequence, OracleSequence]] = []
        self.shared: dict[tuple[int, bytes], dict[int, tuple[list[Array], list[Array]]]] = {}

    def _some(self, data: st.DataObject) -> tuple[PoolSequence, OracleSequence]:
        return self.open[data.draw(st.integers(0, len(self.open) - 1))]

    @rule(
        text=st.integers(0, 1),
        length=st.integers(1, 420),
        extra=st.integers(1, 150),
        salt=st.sampled_from([b"", b"", b"a"]),
        shares=st.booleans(),
    )
    def begin(self, text: int, length: int, extra: int, salt: bytes, shares: bool) -> None:
        prompt, size = TEXTS[text][:length], length + extra
        fits = self.pool.fits(size)
        try:
            sequence = self.pool.sequence(size, prompt, salt=salt)
        except ContextError:
            assert not fits
            return
        held = sequence.length
        assert held % PAGE == 0
        assert held == 0 or held < length
        assert sequence.ids == prompt[:held]
        oracle = OracleSequence(self.model, self.pool)
        oracle.ids = prompt[:held]
        shapes = [array.shape[:2] + array.shape[3:] for array in self.pool.layers[0].arrays]
        values, scales = np.zeros(shapes[0], np.uint8), np.full(shapes[-1], np.nan)  # the scale says that it is unknown
        unknown = [values if self.bits else scales] * PAGE, [scales] * PAGE
        for number, part in enumerate(self.pool.parts):
            for page, digest in enumerate(digests(prompt[:held], salt)):
                seen = page * PAGE + PAGE > part.first_seen(held)
                for layer in map(self.pool.layers.index, part.layers):
                    held_values, held_scales = self.shared[number, digest][layer] if seen else unknown
                    oracle.layers[layer].values += held_values
                    oracle.layers[layer].scales += held_scales
        self.open.append((sequence, oracle))
        while sequence.length < length:
            ids = [prompt[sequence.length : sequence.length + STEP]]
            begun = self._step(self.open[-1:], ids, 0)
            assert begun is not None, "nobody shares these pages"
            self._count(*begun, self.open[-1:], ids, None)
            if shares:
                self._share(sequence, oracle, None)

    def _step(self, some: list[tuple[PoolSequence, OracleSequence]], ids: list[list[int]], padding: int) -> Any:
        """A step that is begun and computed; None: there is no page for a copy."""
        sequences = [sequence for sequence, _ in some]
        batch = self.pool.batch(sequences, rows=len(sequences) + padding)
        padded = ids + [[0] * len(ids[0])] * padding
        lengths = [sequence.length for sequence in sequences]
        try:
            logits = self.model.logits(self.model.hidden_states(mx.array(padded), cache=batch))
        except ContextError:
            assert lengths == [sequence.length for sequence in sequences]
            return None
        mx.eval(logits)
        return batch, logits

    def _count(self, batch: Any, logits: mx.array, some: Any, ids: list[list[int]], kept: list[int] | None) -> None:
        for b, (sequence, oracle) in enumerate(some):
            start = sequence.length
            expected = oracle.step(self.model, rows_of(self.pool, sequence, start, start + len(ids[b])), ids[b])
            assert close(logits[b], expected)
            if kept is not None:
                oracle.trim_to(start + kept[b])
        batch.commit(kept)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), tokens=st.integers(1, STEP), text=st.integers(0, 1))
    def prefill(self, data: st.DataObject, tokens: int, text: int) -> None:
        own = self._some(data)
        start = own[0].length
        ids = [TEXTS[text][start : min(start + tokens, own[0].max_tokens)]]
        if ids[0] and (begun := self._step([own], ids, 0)) is not None:
            self._count(*begun, [own], ids, None)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), padding=st.integers(0, 2), tokens=st.sampled_from([1, 1, 1, 3]), abandon=st.booleans())
    def decode(self, data: st.DataObject, padding: int, tokens: int, abandon: bool) -> None:
        some = [own for own in self.open if own[0].length + tokens <= own[0].max_tokens]
        some = [own for own in some if data.draw(st.integers(0, 3))]
        if not some:
            return
        ids = [[data.draw(st.integers(0, 289)) for _ in range(tokens)] for _ in some]
        if (begun := self._step(some, ids, padding)) is None or abandon:
            return
        kept = None if tokens == 1 else [data.draw(st.integers(0, tokens)) for _ in some]
        self._count(*begun, some, ids, kept)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), back=st.sampled_from([1, 5, 30, 130, 200, 600]))
    def trim(self, data: st.DataObject, back: int) -> None:
        sequence, oracle = self._some(data)
        length = max(0, sequence.length - back)
        if sequence.can_trim_to(length):
            sequence.trim_to(length)
            oracle.trim_to(length)
        else:
            assert self.kind != "all"
            with pytest.raises(ValueError, match="were given back"):
                sequence.trim_to(length)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), extra=st.integers(0, 150))
    def fork(self, data: st.DataObject, extra: int) -> None:
        sequence, oracle = self._some(data)
        try:
            made = sequence.fork(max(1, sequence.length + extra))
        except ContextError:
            return
        self.open.append((made, oracle.fork()))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), upto=st.none() | st.integers(0, 400))
    def share(self, data: st.DataObject, upto: int | None) -> None:
        self._share(*self._some(data), upto)

    def _share(self, sequence: PoolSequence, oracle: OracleSequence, upto: int | None) -> None:
        chain = digests(oracle.ids[:upto], sequence.salt)
        absent = [[digest not in part.prefix for digest in chain] for part in self.pool.parts]
        sequence.share_prefix(upto)
        for number, part in enumerate(self.pool.parts):
            for page, digest in enumerate(chain):
                if absent[number][page] and digest in part.prefix:
                    layers = [self.pool.layers.index(layer) for layer in part.layers]
                    self.shared[number, digest] = {layer: oracle.layers[layer].page(page) for layer in layers}

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        own = self._some(data)
        own[0].release()
        self.open.remove(own)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def there_and_back(self, data: st.DataObject) -> None:
        (sequence, oracle), (target, emptied) = self._some(data), self._some(data)
        cache, copy = sequence.to_cache(), oracle.fork()
        if self.pool.fits(sequence.max_tokens):
            self.open.append((self.pool.sequence(sequence.max_tokens), copy))
            self.open[-1][0].load(cache)
        elif target.max_tokens >= cache.offset:
            target.trim_to(0)
            emptied.trim_to(0)
            try:
                target.load(cache)
            except ContextError:
                return
            self.open[self.open.index((target, emptied))] = (target, copy)

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "open"):
            check_pages(self.pool, [sequence for sequence, _ in self.open])
            assert all(sequence.ids == oracle.ids for sequence, oracle in self.open)


@pytest.mark.parametrize(
    ("kind", "bits"), count([("all", 0), ("mixed", 8), ("windows", 4)], list(product(WINDOWS, (0, 8, 4))))
)
def test_any_order_of_what_a_pool_can_do(kind: str, bits: int) -> None:
    _run(kind, bits, 16, count(3, 40))


@pytest.mark.parametrize(("kind", "bits"), count([("mixed", 8)], list(product(WINDOWS, (0, 8, 4)))))
def test_any_order_with_the_fused_kernel(kind: str, bits: int, fused_calls: list[Any]) -> None:
    """Its stand-in. Steps of one and three tokens are fused, and the last few of a prompt."""
    _run(kind, bits, 64, count(1, 40))
    assert fused_calls


def _run(kind: str, bits: int, head_dim: int, examples: int) -> None:
    own = {"kind": kind, "bits": bits, "head_dim": head_dim}
    case = type(f"Machine_{kind}_{bits}_{head_dim}", (_Machine,), own).TestCase
    case.settings = settings(
        max_examples=examples, stateful_step_count=count(20, 50), deadline=None, derandomize=count(True, False)
    )
    case().runTest()
