"""A bridged model's pool: sequences of different lengths in one step, against mlx-lm's own caches and
kvant's.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import architectures as table
import mlx.core as mx
import pytest
from mlx_lm.models import cache as mlx_lm_cache
from support.bridged import LONG, OWN_ATTENTION, REFUSED, bridged
from support.counts import count
from support.numbers import peak_bytes, relative_error

from kvant.bridge.model import BridgedModel
from kvant.bridge.pool import BridgedPool
from kvant.cache import CacheOptions
from kvant.cache.kv_format import KVFormat, LayerChoice
from kvant.cache.pool import PoolSequence
from kvant.engine.request import Request
from kvant.engine.scheduler import Scheduler
from kvant.errors import ContextError, ModelError

LENGTHS = (5, 126, 20)  # one reaches its second page
PROMPTS = [[(7 + 31 * i + 5 * b) % 97 for i in range(length)] for b, length in enumerate(LENGTHS)]
STEPS = 5
AGREE = 1e-4  # of the largest logit
QUANTIZED_AGREE = 2e-2  # rounding flips a quantized value now and then
# windows and learned sinks; windows of layers that keep all tokens; states; states beside keys; lists, an
# indexer and latent attention; shared layers; states that are shorter at first
SOME = ["gpt_oss", "qwen3_next", "deepseek_v32", "gemma3n", "longcat_flash_ngram"]


def _pool(model: BridgedModel, bits: int = 0, **changes: Any) -> BridgedPool:
    sizes: dict[str, Any] = {"tokens": 1024, "sequences": 4, "max_seq_len": 512, "prefill_step_size": 64}
    stored = {name: changes.pop(name) for name in ("kv_group_size", "kernels") if name in changes}
    return model.make_pool(**sizes | changes, options=CacheOptions(bits, **stored))


def _fed(
    model: BridgedModel,
    pool: BridgedPool,
    sequences: Sequence[PoolSequence],
    ids: list[list[int]],
    rows: int = 0,
) -> mx.array:
    """The logits (B, vocab) after a committed step of (B, S) ids."""
    batch = pool.batch(sequences, rows or None)
    padded = ids + [[0] * len(ids[0])] * (batch.rows - len(ids))
    logits = table.finite(model.next_logits(mx.array(padded), batch))
    mx.eval(logits)
    batch.commit()
    return logits[: len(ids)]


def _opened(
    model: BridgedModel, pool: BridgedPool, prompt: list[int], max_tokens: int = 200
) -> tuple[Any, mx.array]:
    """A sequence that holds a prompt, and the logits (1, vocab) after it."""
    sequence = pool.sequence(max_tokens, prompt)
    for first in range(sequence.length, len(prompt), pool.prefill_step_size):
        logits = _fed(model, pool, [sequence], [prompt[first : first + pool.prefill_step_size]])
    return sequence, logits


def _in_company(
    model: BridgedModel,
    pool: BridgedPool,
    texts: list[list[int]],
    rows: int = 0,
    prompts: Sequence[list[int]] = PROMPTS,
) -> list[mx.array]:
    """The logits (STEPS + 1, vocab) of each prompt of a batch that goes on with the given tokens."""
    opened = [_opened(model, pool, prompt) for prompt in prompts]
    logits = [mx.concatenate([first for _, first in opened])]
    for step in range(STEPS):
        sequences = [sequence for sequence, _ in opened]
        logits.append(_fed(model, pool, sequences, [[text[step]] for text in texts], rows))
    for sequence, _ in opened:
        sequence.release()
    assert pool.num_free == pool.num_pages
    return list(mx.stack(logits, axis=1))


def _alone(
    name: str, model: BridgedModel, prompt: list[int], text: list[int] | None = None, cache: Any = None
) -> tuple[list[int], mx.array]:
    """Tokens, the likeliest where none are given, and the logits (STEPS + 1, vocab), with mlx-lm's cache
    or kvant's.
    """
    module = model.module if cache is None else model
    kept = cache or mlx_lm_cache.make_prompt_cache(module)
    tokens, logits, fed = list(text or []), [], list(prompt)
    for i in range(STEPS + 1):
        if cache is None and name in table.ONE_CALL:
            last = module(mx.array([fed]), cache=mlx_lm_cache.make_prompt_cache(module))
        else:
            last = module(mx.array([fed if i == 0 else fed[-1:]]), cache=kept)
        logits.append(table.finite(last[0, -1]))
        if i < STEPS:
            if text is None:
                tokens.append(int(logits[-1].argmax().item()))
            fed.append(tokens[i])
    return tokens, mx.stack(logits)


@pytest.mark.parametrize("name", count(SOME, sorted(set(table.measured()) - REFUSED.keys())))
def test_sequences_of_different_lengths_are_what_each_is_alone(name: str) -> None:
    model = bridged(name)
    # the tiny gpt2 has 128 positions
    prompts = [prompt[: 100 if name == "gpt2" else None] for prompt in PROMPTS]
    references = [_alone(name, model, prompt) for prompt in prompts]
    texts = [tokens for tokens, _ in references]
    for bits in count((0, 4), (0, 8, 4)):
        pool = _pool(model, bits)
        assert pool.attends_separately == (name not in OWN_ATTENTION)  # that is from padded rows
        given = _in_company(model, pool, texts, prompts=prompts)
        for logits, prompt, (text, expected) in zip(given, prompts, references, strict=True):
            if bits == 0:
                assert table.worst(table.errors(logits, expected)) < AGREE
                assert logits[:-1].argmax(axis=-1).tolist() == text
                continue
            _, own = _alone(name, model, prompt, text, model.make_cache(200, kv_bits=bits))
            # Where rounding differs, a number may be quantized to its neighbour.
            assert table.median(table.errors(logits, own)) < 2 * AGREE
            assert table.worst(table.errors(logits, own)) < QUANTIZED_AGREE


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_next", "deepseek_v32"])
def test_values_with_bits_of_their_own_in_company(name: str) -> None:
    """In a window, beside states, and where there are no values: as alone, and about as near as 4 bits that
    are not rotated either, or nearer.
    """
    model = bridged(name)
    kinds = itertools.cycle([LayerChoice(8, 32, value_bits=4), LayerChoice(4, 32, value_bits=8)])
    layers = model.make_cache(8, kv_bits=0).formats
    tuned = KVFormat("", tuple(choice for choice, _ in zip(kinds, layers, strict=False)))
    pool = model.make_pool(
        1024,
        sequences=4,
        max_seq_len=512,
        prefill_step_size=64,
        options=CacheOptions.from_keywords(kv_format=tuned, kv_tail=False),
    )
    apart = [own.kv_bits != own.value_bits for own in (layer.format for layer in pool.layers)]
    assert apart == [own.value_head_dim > 0 for own in layers]
    references = [_alone(name, model, prompt) for prompt in PROMPTS]
    given = _in_company(model, pool, [tokens for tokens, _ in references])
    for logits, prompt, (text, expected) in zip(given, PROMPTS, references, strict=True):
        alone, four = (
            _alone(name, model, prompt, text, model.make_cache(200, **own))[1]
            for own in ({"kv_format": tuned, "kv_tail": False}, {"kv_bits": 4, "kv_format": "pmx"})
        )
        assert table.median(table.errors(logits, alone)) < AGREE
        assert table.worst(table.errors(logits, alone)) < QUANTIZED_AGREE
        assert table.median(table.errors(alone, expected)) < 1.5 * table.median(table.errors(four, expected))


@pytest.mark.parametrize("name", count(["llama4", "minimax_m3_vl", "afm7", "gemma2"], sorted(REFUSED)))
def test_a_model_without_such_a_step_is_refused(name: str) -> None:
    model = bridged(name)
    with pytest.raises(ModelError, match=f"^{name} .*one sequence at a time works") as error:
        _pool(model)
    assert REFUSED[name] in str(error.value)
    assert "\n" not in str(error.value)


def test_the_page_names_them() -> None:
    page = (table.ROOT / "docs" / "models.md").read_text("utf-8")
    page = page.partition("## Many sequences")[2].partition("\n## ")[0]
    assert all(name in page for name in OWN_ATTENTION | REFUSED.keys())
    apart = len(table.measured()) - len(OWN_ATTENTION) - len(REFUSED)
    assert [f"| {number} |" in page for number in (apart, len(OWN_ATTENTION), len(REFUSED))] == [True] * 3


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_next", "mixtral", "mamba2"])
@pytest.mark.parametrize("bits", [0, 8])
def test_with_as_many_rows_a_token_is_the_same_in_any_company(name: str, bits: int) -> None:
    model = bridged(name)
    texts = [[(3 * i + b) % 97 for i in range(STEPS)] for b in range(len(PROMPTS))]
    pool = _pool(model, bits)
    together = _in_company(model, pool, texts, rows=4)
    for b, prompt in enumerate(PROMPTS):
        sequence, logits = _opened(model, pool, prompt)
        alone = [logits, *(_fed(model, pool, [sequence], [[token]], rows=4) for token in texts[b])]
        assert mx.array_equal(mx.concatenate(alone), together[b])
        sequence.release()


@pytest.mark.parametrize(
    ("name", "deterministic"), [("gpt_oss", True), ("qwen3_next", True), ("deepseek_v3", False)]
)
def test_the_engine_runs_requests_of_different_lengths(name: str, deterministic: bool) -> None:
    model = bridged(name)
    pool = _pool(model, tokens=2048, prefill_step_size=128)
    scheduler = Scheduler(model, pool, max_batch=3, deterministic=deterministic)
    requests = [Request(prompt, STEPS) for prompt in PROMPTS]
    for request in requests:
        scheduler.submit(request)
    given: dict[Request, list[int]] = {request: [] for request in requests}
    while not scheduler.idle:
        for token in scheduler.step():
            given[token.request].append(token.token)
    for request, prompt in zip(requests, PROMPTS, strict=True):
        assert given[request] == _alone(name, model, prompt)[0]
    assert pool.num_free == pool.num_pages


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "falcon_h1", "mamba"])
def test_forks_steps_that_do_not_count_and_trims(name: str) -> None:
    model = bridged(name)
    pool = _pool(model)
    has_states = bool(pool.states)
    (one, _), (other, _) = (_opened(model, pool, prompt) for prompt in PROMPTS[:2])
    fork = one.fork()
    batch = pool.batch([other, fork])
    model.next_logits(mx.array([[90], [91]]), batch)  # given up
    batch.end_step()
    with pytest.raises(RuntimeError, match="no step to commit"):
        batch.commit()
    ids = [[11], [12], [11]]
    together = _fed(model, pool, [one, other, fork], ids)
    assert relative_error(together[2], together[0]) < 1e-5
    expected = [
        model.module(mx.array([prompt + new]))[0, -1] for prompt, new in zip(PROMPTS[:2], ids, strict=False)
    ]
    assert relative_error(together[:2], mx.stack(expected)) < AGREE
    batch = pool.batch([one, other])
    model.next_logits(mx.array([[5, 6], [5, 6]]), batch)
    if has_states:
        assert not one.can_trim_to(3)
        with pytest.raises(ValueError, match="the state of a linear layer takes all of a step"):
            batch.commit(1)
    else:
        batch.commit([1, 0])
        one.trim(1)
    assert (one.length, other.length) == (LENGTHS[0] + 1, LENGTHS[1] + 1)
    batch.end_step()
    one.trim_to(0)
    again = _fed(model, pool, [one], [PROMPTS[2]])
    assert relative_error(again, model.module(mx.array([PROMPTS[2]]))[:, -1]) < AGREE


def test_prefixes_are_shared_where_no_layer_has_a_state() -> None:
    text = LONG[:150]
    for name, shared in (("qwen3", 128), ("gpt_oss", 128), ("qwen3_next", 0)):
        model = bridged(name)
        pool = _pool(model)
        sequence, _ = _opened(model, pool, text[:128])
        sequence.share_prefix()
        second = pool.sequence(200, text)
        assert second.length == shared
        logits = _fed(model, pool, [second], [text[shared : shared + 64]])
        if shared:
            assert relative_error(logits, model.module(mx.array([text]))[:, -1]) < AGREE


@pytest.mark.parametrize(("name", "bits"), [("llama", 4), ("qwen3_next", 8), ("mamba", 0)])
def test_bytes_are_those_of_rows_and_of_the_states_that_fit(name: str, bits: int) -> None:
    model = bridged(name)
    pool = _pool(model, bits)
    opened = [_opened(model, pool, PROMPTS[2])[0] for _ in range(4)]
    rows = sum(array.nbytes for layer in pool.layers for array in (*layer.arrays, *layer.exact_arrays))
    states = sum(a.nbytes for one in opened for state in one.states for a in state if a is not None)
    assert pool.nbytes == rows + states
    with pytest.raises(ContextError, match="the pool is for 4 sequences"):
        pool.sequence(1)


def _step_bytes(model: BridgedModel, pool: BridgedPool, sequences: list[Any]) -> int:
    return peak_bytes(lambda: _fed(model, pool, sequences, [[3]] * len(sequences)))


@pytest.mark.parametrize("name", ["llama", "deepseek_v32", "qwen3_next"])
def test_a_step_copies_nothing_of_the_pool(name: str) -> None:
    """Not where the model ties an array to another one and puts it back, either: DeepSeek V3.2."""
    model = bridged(name)
    peaks = []
    for tokens in (1024, 102400):
        pool = _pool(model, tokens=tokens)
        opened = [_opened(model, pool, prompt)[0] for prompt in PROMPTS]
        _fed(model, pool, opened, [[3]] * 3)
        peaks.append(_step_bytes(model, pool, opened))
    # MLX's threads differ by a third; a copy would take a hundred times as much
    assert peaks[1] < 2 * peaks[0]


def test_rows_are_not_padded_for_attention_of_mlx_lms() -> None:
    """One long sequence among short ones: as many rows as there are tokens become floats."""
    model = bridged("qwen3")
    pool = _pool(model, tokens=12 * 1024, sequences=8, max_seq_len=10_000, prefill_step_size=512)
    long = pool.sequence(8200)
    long.commit([1] * 8000)  # as if they had been fed: its rows are zeros
    used = _step_bytes(model, pool, [long, *(_opened(model, pool, PROMPTS[0])[0] for _ in range(7))])
    floats = 8000 * 2 * 2 * 32 * 4  # of the long one, in one layer
    assert used < 4 * floats < 8 * floats


def test_what_is_refused() -> None:
    model = bridged("qwen3")
    bad = [{"kernels": "fused"}]
    bad += [
        {name: 0} for name in ("tokens", "sequences", "max_seq_len", "prefill_step_size", "kv_group_size")
    ]
    for changes in bad:
        ((name, value),) = changes.items()
        with pytest.raises(ValueError, match=f"{name} is {value!r}"):
            _pool(model, **changes)
    with pytest.raises(ContextError, match="this machine has"):
        _pool(model, tokens=2**40)
    pool = _pool(model)
    with pytest.raises(ValueError, match="the pool is for a model with other layers"):
        bridged("llama").next_logits(mx.array([[1]]), pool.batch([pool.sequence(10)]))
    with pytest.raises(ValueError, match="the cache is for a model with other layers"):
        pool.sequence(200).load(bridged("gpt_oss").make_cache(64).sequence)
    padded = bridged("deepseek_v3")
    with pytest.raises(ValueError, match="deterministic is not possible with deepseek_v3"):
        Scheduler(padded, _pool(padded, prefill_step_size=128), max_batch=2, deterministic=True)


def test_a_layer_takes_the_step_s_tokens_once() -> None:
    pool = _pool(bridged("qwen3"))
    batch = pool.batch([pool.sequence(10)])
    batch.begin(mx.array([[1]]))
    layer, row = batch.entries[0], mx.zeros((1, 2, 1, 32))
    with pytest.raises(ValueError, match="the step's are"):
        layer.update_and_fetch(mx.zeros((1, 2, 2, 32)), mx.zeros((1, 2, 2, 32)))
    with pytest.raises(ValueError, match="a mask of 2 tokens is asked for; the step has 1"):
        layer.make_mask(2)
    layer.update_and_fetch(row, row)
    with pytest.raises(RuntimeError, match="twice in one step"):
        layer.update_and_fetch(row, row)
