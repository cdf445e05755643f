"""A pool with the fused kernel: a layer against the float64 oracle, whole models against the unfused pool."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.batches import ids_of, run_all, scheduler_of
from support.metal_host import host_pytest_skip
from support.pool_oracle import OracleLayer, rows_of
from support.pools import close, decode, prefill, tiny_model

from kvant.cache import ModelCache
from kvant.cache.layer_format import LayerFormat, stored_dtype
from kvant.cache.pool import Pool, PoolSequence
from kvant.engine.batch_engine import BatchEngine
from kvant.engine.request import Request, Token
from kvant.models import Decoder
from kvant.operators import dispatch
from kvant.operators.bias_split import BiasSplit, rotation_table
from kvant.operators.rotary import Rotary
from kvant.sample_utils import make_sampler

pytestmark = host_pytest_skip

H, K, D, MOST = 4, 2, 64, 400
ROTARY = Rotary.plain(D, 10000.0)
LENGTHS = (2, 126, 259)  # of the sequences before the steps
FUSED_STEPS = (1, 3, 8, 1)  # new tokens; two sequences come to another page
Calls = list[tuple[int, ...]]
Tokens = dict[Request, list[Token]]


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
        for length in LENGTHS:
            self.open(length)

    def open(self, length: int) -> None:
        """One more sequence of so many tokens, fed in one step."""
        self.sequences.append(self.pool.sequence(MOST - 60 * len(self.sequences)))
        self.oracles.append(OracleLayer(self.pool.layers[0].format, self.split, np.array(ROTARY.frequencies)))
        self.check_step(length, [len(self.oracles) - 1])

    def check_step(self, S: int, numbers: list[int], rows: int | None = None) -> mx.array:
        """S new tokens of some sequences. Returns their attention, compared with the oracle's."""
        sequences = [self.sequences[number] for number in numbers]
        lengths = [sequence.length for sequence in sequences]
        heads = [
            mx.stack([_random(H + 2 * K, S, 1000 * n + length) for n, length in zip(numbers, lengths, strict=True)])
        ]
        if rows is not None:
            heads.append(mx.ones((rows - len(numbers), H + 2 * K, S, D)))
        query, key, value = mx.split(mx.concatenate(heads), [H, H + K], axis=1)
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


def _random(heads: int, S: int, seed: int) -> mx.array:
    return mx.random.normal((heads, S, D), key=mx.random.key(seed))


def _split(pairs: tuple[int, ...]) -> BiasSplit:
    key_bias = 2 * mx.random.normal((K, 2, len(pairs)), key=mx.random.key(1))
    value_bias = mx.random.normal((K, D), key=mx.random.key(2))
    return BiasSplit(key_bias, pairs, rotation_table(ROTARY, pairs, MOST), value_bias)


@pytest.mark.parametrize("bits", [8, 4, 0])
@pytest.mark.parametrize(("window", "split", "sinks"), [(None, True, False), (40, True, True), (150, False, True)])
def test_a_layer_is_the_oracle(fused_calls: Calls, bits: int, window: int | None, split: bool, sinks: bool) -> None:
    layer = _Layer(bits, window, split=split, sinks=sinks)
    for number, S in enumerate(FUSED_STEPS):
        layer.check_step(S, [0, 2, 1], rows=3 + number % 2)
    layer.check_step(9, [0, 1])
    # The step that opens the first sequence is fused too. A padded row is not computed, more than 8 tokens are not.
    assert fused_calls == [(1, H, 2, D), *((3, H, S, D) for S in FUSED_STEPS)]


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
    assert [name for name, _ in launches if name != "append"] == ["attend", "combine"] * 3
    other = _Layer(bits, window, split=split, sinks=sinks)
    for place, number in enumerate((0, 2, 1)):
        assert mx.array_equal(other.check_step(1, [number])[0], first[place])


@pytest.mark.parametrize("bits", [8, 0])
def test_a_sequence_is_the_same_in_any_company(fused_calls: Calls, bits: int) -> None:
    one, other = _Layer(bits, 40), _Layer(bits, 40)
    for S in FUSED_STEPS:
        together = one.check_step(S, [1, 2, 0], rows=4)
        for place, number in enumerate((1, 2, 0)):
            assert mx.array_equal(other.check_step(S, [number])[0], together[place])


def test_a_layer_that_is_switched_off_goes_on_unfused(fused_calls: Calls) -> None:
    layer = _Layer(8, 40, split=True)
    assert layer.pool.backend == layer.pool.layers[0].backend == "metal"
    layer.check_step(2, [0, 1, 2])
    layer.pool.layers[0].backend = None
    fused = len(fused_calls)
    for S in FUSED_STEPS:
        layer.check_step(S, [0, 1, 2])
    assert layer.pool.backend is None
    assert len(fused_calls) == fused


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """Layers of which some have windows, with biases that are split off."""
    return tiny_model(tmp_path_factory.mktemp("tiny"), (None, 40, 200), hidden_size=H * D)


PROMPTS = [[(7 + 31 * i + 5 * b) % 290 for i in range(length)] for b, length in enumerate((3, 127, 260, 64))]


def _pools(model: Decoder, bits: int = 0, **options: Any) -> list[Pool]:
    """The same pool fused and unfused."""
    sizes = {"tokens": 4096, "sequences": 6, "max_seq_len": 500} | options
    return [model.make_pool(**sizes, kv_bits=bits, kv_group_size=16, kernels=kernels) for kernels in (None, "unfused")]


def test_logits_are_those_of_the_unfused_pool(tiny: Decoder, fused_calls: Calls) -> None:
    """Forks, shared pages and pages that are copied among them."""
    found = []
    for pool in _pools(tiny):
        sequences = [pool.sequence(300, ids) for ids in PROMPTS]
        logits = [prefill(tiny, pool, *both) for both in zip(sequences, PROMPTS, strict=True)]
        sequences += [sequences[2].fork(290), sequences[1].fork(200)]
        texts = [[(17 * step + 3 * b) % 290 for b in range(len(sequences))] for step in range(4)]
        logits += [decode(tiny, pool, sequences, ids) for ids in texts]
        found.append(mx.concatenate(logits))
    assert close(*found)
    assert len(fused_calls) == 3 * (2 + 4)  # the prompt of 3 tokens and the last 4 of 260, too


def _answers(scheduler: Any, requests: list[Request]) -> list[list[int]]:
    told = run_all(scheduler, requests)
    return [ids_of(told[request], answer) for request in requests for answer in range(request.answers)]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("bits", [0, 8])
def test_the_engine_answers_as_with_the_unfused_pool(
    tiny: Decoder, fused_calls: Calls, bits: int, deterministic: bool
) -> None:
    """Answers of different lengths, some of one prompt, and prompts that begin like earlier ones."""
    found = []
    for kernels in (None, "unfused"):
        options = {"kv_group_size": 16, "kernels": kernels, "max_seq_len": 500}
        scheduler, pool = scheduler_of(tiny, bits, max_batch=4, deterministic=deterministic, pool=options)
        requests = [Request(ids, 6 + 3 * number) for number, ids in enumerate(PROMPTS)]
        requests.append(Request([*PROMPTS[2], 5], 5, make_sampler(temp=1.0, seed=4), answers=3))
        found.append(_answers(scheduler, requests))
        assert pool.num_free == pool.num_pages
    assert found[0] == found[1]
    assert [len(ids) for ids in found[0]] == [6, 9, 12, 15, 5, 5, 5]
    assert fused_calls


def test_an_engine_on_the_kernels_text(tmp_path: Path, launches: list[Any]) -> None:
    """Metal's text, run on the host: the tokens of the unfused pool."""
    model = tiny_model(tmp_path, (None, 40), hidden_size=H * D)
    found = []
    for kernels in ("unfused", None):
        assert not launches
        pool = model.make_pool(1024, sequences=3, kv_group_size=16, kernels=kernels)
        engine = BatchEngine(model, pool, max_batch=3)
        answers = [engine.submit(Request(ids, 3)) for ids in (PROMPTS[0], PROMPTS[1], PROMPTS[2][:256])]
        found.append([[token.token for token in answer] for answer in answers])
        assert engine.close(drain=True, timeout=60)
    assert found[0] == found[1]
    assert launches


def _traced(count: int) -> list[tuple[str, Any]]:
    """What a layer's step of one token each launches, in the graph that MLX traces; of a kernel its name too."""
    own = LayerFormat("quantized", K, D, D, 8, 16, stored_dtype(8), "F16")
    sizes = {"tokens": 128 * count, "sequences": count, "max_seq_len": MOST, "prefill_step_size": 512}
    pool = Pool([own], [None], **sizes, make_cache=_no_cache)
    batch = pool.batch([pool.sequence(100) for _ in range(count)])
    batch.begin(mx.ones((count, 1), mx.int32))
    arrays = pool.layers[0].arrays

    def step(query: mx.array, key: mx.array, value: mx.array, *given: mx.array) -> tuple[mx.array, ...]:
        arrays[:] = given
        return batch[0].attend(query, key, value), *arrays

    records: list[dict[str, Any]] = []
    mx.export_function(records.append, step, *(mx.ones((count, heads, 1, D)) for heads in (8, K, K)), *arrays)
    views = {"Broadcast", "ExpandDims", "Flatten", "Reshape", "Slice", "Squeeze", "Transpose", "View"}
    found = [record for record in records if record["type"] == "primitive" and record["name"] not in views]
    return [(each["name"], each["arguments"][0] if each["name"] == "CustomKernel" else None) for each in found]


def test_a_layer_takes_five_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """For any number of sequences. The kernels are the same ones: none is compiled as sequences come and go."""
    monkeypatch.setattr(dispatch, "gpu_backend", lambda: "metal")
    monkeypatch.setattr(dispatch, "probe_failure", lambda use, backend: None)
    kernels = set()
    for count in (1, 3, 9):
        traced = _traced(count)
        write = "SliceUpdate" if count == 1 else "ScatterAxis"
        assert [name for name, _ in traced] == [
            "CustomKernel", write, write, "CustomKernel", "CustomKernel"
        ]  # fmt: skip
        kernels.add(tuple(kernel for _, kernel in traced if kernel))
    assert len(kernels) == 1


def test_which_layers_are_fused(
    tiny: Decoder, tmp_path: Path, fused_calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    def backends(model: Decoder, **options: Any) -> set[str | None]:
        return {layer.backend for layer in model.make_pool(512, sequences=1, kv_group_size=16, **options).layers}

    assert backends(tiny) == backends(tiny, kernels="fused") == {"metal"}
    assert backends(tiny, kernels="unfused") == {None}
    narrow = tiny_model(tmp_path)
    assert backends(narrow) == {None}
    with pytest.raises(ValueError, match="does not take head_dim 16; it takes 64"):
        backends(narrow, kernels="fused")
    monkeypatch.setenv("KVANT_KERNELS", "unfused")
    assert backends(tiny) == {None}
    assert backends(tiny, kernels="fused") == {"metal"}
