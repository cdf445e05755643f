"""A pool with the fused kernel: a layer against the float64 oracle, whole models against the unfused pool."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.metal_host import host_pytest_skip
from support.pool_oracle import OracleLayer, rows_of
from support.pools import close, tiny_model

from kvant.cache import ModelCache
from kvant.cache.layer_format import LayerFormat, stored_dtype
from kvant.cache.pool import Pool, PoolSequence
from kvant.engine.batch_engine import BatchEngine
from kvant.engine.request import Request
from kvant.models import Decoder
from kvant.operators.bias_split import BiasSplit, rotation_table
from kvant.operators.rotary import Rotary

pytestmark = host_pytest_skip

H, K, D, MOST = 4, 2, 64, 400
ROTARY = Rotary.plain(D, 10000.0)
LENGTHS = (2, 126, 259)  # of the sequences before the steps


class _Layer:
    """A pool of one layer, and what NumPy makes of each of its sequences."""

    def __init__(self, bits: int, window: int | None = None, *, split: bool = False, sinks: bool = False) -> None:
        pairs = (1, 4, 30) if split else None
        stored = (stored_dtype(bits), "F16") if bits else ("F32", "")
        own = LayerFormat("quantized", K, D, D, bits, 16 if bits else 0, *stored, window=window, split_pairs=pairs)
        self.split = _split(pairs) if pairs else None
        self.sinks = mx.random.normal((H,), key=mx.random.key(3)) if sinks else None
        sizes = {"tokens": 2048, "sequences": 5, "max_seq_len": MOST, "prefill_step_size": 512}
        self.pool = Pool([own], [self.split], **sizes, make_cache=_no_cache)
        self.pool.layers[0].arrays[-1][:] = float("nan")  # a row that is read before it is written shows
        self.sequences: list[PoolSequence] = []
        self.oracles: list[OracleLayer] = []
        for number, length in enumerate(LENGTHS):
            self.sequences.append(self.pool.sequence(MOST - 60 * number))
            self.oracles.append(OracleLayer(self.pool.layers[0].format, self.split, np.array(ROTARY.frequencies)))
            self.check_step(length, [number])

    def check_step(self, S: int, numbers: list[int], rows: int | None = None) -> mx.array:
        """S new tokens of some sequences. Returns their attention, compared with the oracle's."""
        sequences = [self.sequences[number] for number in numbers]
        lengths = [sequence.length for sequence in sequences]
        keys = [mx.random.key(1000 * n + length) for n, length in zip(numbers, lengths, strict=True)]
        heads = [mx.random.normal((1, H + 2 * K, S, D), key=key) for key in keys]
        padding = mx.ones(((rows or len(numbers)) - len(numbers), H + 2 * K, S, D))
        query, key, value = mx.split(mx.concatenate([*heads, padding]), [H, H + K], axis=1)
        batch = self.pool.batch(sequences, rows)
        batch.begin(mx.ones((len(query), S), mx.int32))
        given = batch[0].attend(query, key, value, sinks=self.sinks)
        mx.eval(given)
        batch.commit()
        for b, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
            oracle = self.oracles[numbers[b]]
            (oracle.written,) = rows_of(self.pool, sequence, length, length + S)
            one = slice(b, b + 1)
            expected = oracle.attend(query[one], key[one], value[one], sinks=self.sinks)
            assert close(given[one], expected, 4e-6)
        assert not mx.any(given[len(numbers) :]).item()
        return given[: len(numbers)]


def _no_cache(tokens: int) -> ModelCache:
    raise AssertionError("no cache of one sequence is made here")


def _split(pairs: tuple[int, ...]) -> BiasSplit:
    key_bias = 2 * mx.random.normal((K, 2, len(pairs)), key=mx.random.key(1))
    value_bias = mx.random.normal((K, D), key=mx.random.key(2))
    return BiasSplit(key_bias, pairs, rotation_table(ROTARY, pairs, MOST), value_bias)


@pytest.mark.parametrize(
    ("bits", "window", "split", "sinks"), [(8, None, True, False), (4, 40, False, True), (0, 150, True, True)]
)
def test_the_kernels_text_is_the_oracle(
    launches: list[Any], bits: int, window: int | None, split: bool, sinks: bool
) -> None:
    """Metal's text, run on the host."""
    layer = _Layer(bits, window, split=split, sinks=sinks)
    first = layer.check_step(1, [0, 2, 1], rows=4)
    layer.check_step(3, [0, 2, 1])
    layer.check_step(9, [0, 1])  # unfused, as the texts before; the first of two tokens is not
    assert [name for name, _ in launches if name != "append"] == ["attend", "combine"] * 3
    other = _Layer(bits, window, split=split, sinks=sinks)
    for place, number in enumerate((0, 2, 1)):
        assert mx.array_equal(other.check_step(1, [number])[0], first[place])


PROMPTS = [[(7 + 31 * i + 5 * b) % 290 for i in range(length)] for b, length in enumerate((3, 127, 256))]


def test_an_engine_on_the_kernels_text(tmp_path: Path, launches: list[Any]) -> None:
    """Metal's text, run on the host: the tokens of the unfused pool."""
    model = tiny_model(tmp_path, (None, 40), hidden_size=H * D)
    found = []
    for kernels in ("unfused", None):
        assert not launches
        pool = model.make_pool(1024, sequences=3, kv_group_size=16, kernels=kernels)
        engine = BatchEngine(model, pool, max_batch=3)
        answers = [engine.submit(Request(ids, 3)) for ids in PROMPTS]
        found.append([[token.token for token in answer] for answer in answers])
        assert engine.close(drain=True, timeout=60)
    assert found[0] == found[1]
    assert launches


def test_which_layers_are_fused(tmp_path: Path, fused_calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def backends(model: Decoder, **options: Any) -> set[str | None]:
        pool = model.make_pool(512, sequences=1, kv_group_size=16, **options)
        return {pool.backend, *(layer.backend for layer in pool.layers)}

    wide, narrow = tiny_model(tmp_path / "wide", (None, 40), hidden_size=H * D), tiny_model(tmp_path / "narrow")
    assert backends(wide) == backends(wide, kernels="fused") == {"metal"}
    assert backends(wide, kernels="unfused") == backends(narrow) == {None}
    with pytest.raises(ValueError, match="does not take head_dim 16; it takes 64"):
        backends(narrow, kernels="fused")
    monkeypatch.setenv("KVANT_KERNELS", "unfused")
    assert backends(wide) == {None}
    assert backends(wide, kernels="fused") == {"metal"}
