"""The loop: tokens against mlx-lm's, how it ends, what it feeds, and what it leaves in the cache."""

import gc
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_logits_processors, make_sampler

import kvant
from kvant import generate, stream_generate
from kvant.cache import FullKVCache, QuantizedKVCache
from kvant.engine.sampling import SamplingOptions
from kvant.errors import ContextError, ModelError, PromptError
from kvant.models import Decoder
from kvant.text.stream import TextStream

Pocket = tuple[Decoder, Any]
QUESTION = "Tell me a story about a fox named Pip."


@pytest.fixture(scope="module")
def prompt(pocket: Pocket) -> list[int]:
    _, tokenizer = pocket
    return tokenizer.apply_chat_template([{"role": "user", "content": QUESTION}], add_generation_prompt=True)


def _without_end(tokenizer: Any) -> Any:
    """A logits processor that makes end-of-text tokens impossible, so that a run has the length asked for."""
    return make_logits_processors(dict.fromkeys(tokenizer.eos_token_ids, -1000000000.0))


def test_200_greedy_tokens_are_mlx_lms(pocket: Pocket, pocket_mlx_lm: nn.Module, prompt: list[int]) -> None:
    model, tokenizer = pocket
    steps = generate_step(mx.array(prompt), pocket_mlx_lm, max_tokens=200, logits_processors=_without_end(tokenizer))
    expected = [(int(token), logprobs) for token, logprobs in steps]
    given = stream_generate(
        model,
        tokenizer,
        prompt,
        max_tokens=200,
        prompt_cache=model.make_cache(len(prompt) + 200, kv_bits=0),
        logits_processors=_without_end(tokenizer),
    )
    tokens = [response.token for response in given]
    assert len(tokens) == len(expected) == 200
    for at, (token, (wanted, logprobs)) in enumerate(zip(tokens, expected, strict=True)):
        if token != wanted:
            second, first = mx.sort(logprobs)[-2:].tolist()
            assert first - second <= 1e-4, f"token {at} is {token}; mlx-lm's is {wanted}"
            break  # from here on the two texts are about different things


def test_tokens_that_end_the_text_are_never_printed(pocket: Pocket, prompt: list[int]) -> None:
    model, tokenizer = pocket
    assert len(tokenizer.eos_token_ids) == 2
    for end in tokenizer.eos_token_ids:
        forced = make_logits_processors({end: 1e9})
        responses = list(stream_generate(model, tokenizer, prompt, max_tokens=9, logits_processors=forced))
        assert [(r.text, r.token, r.finish_reason) for r in responses] == [("", end, "stop")]


def test_the_end_after_some_tokens(pocket: Pocket, prompt: list[int]) -> None:
    model, tokenizer = pocket
    end = min(tokenizer.eos_token_ids)

    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        bias = 1e9 if tokens.size == len(prompt) + 5 else -1e9
        return logits.at[:, sorted(tokenizer.eos_token_ids)].add(bias * mx.array([1.0, 0.5]))

    responses = list(stream_generate(model, tokenizer, prompt, logits_processors=[processor]))
    assert [r.finish_reason for r in responses] == [None] * 5 + ["stop"]
    assert responses[-1].token == end
    text = "".join(r.text for r in responses)
    assert text == tokenizer.decode([r.token for r in responses[:-1]])


def test_max_tokens_and_a_full_context(pocket: Pocket, prompt: list[int]) -> None:
    model, tokenizer = pocket
    endless = {"logits_processors": _without_end(tokenizer)}
    responses = list(stream_generate(model, tokenizer, prompt, max_tokens=7, **endless))
    assert [r.finish_reason for r in responses] == [None] * 6 + ["length"]
    cache = model.make_cache(len(prompt) + 4)
    responses = list(stream_generate(model, tokenizer, prompt, max_tokens=50, prompt_cache=cache, **endless))
    # The four tokens there is room for are fed; the last of five is sampled from the fourth.
    assert [r.finish_reason for r in responses] == [None] * 4 + ["context"]
    assert cache[0].offset == len(prompt) + 4
    cache = model.make_cache(len(prompt))
    responses = list(stream_generate(model, tokenizer, prompt, max_tokens=-1, prompt_cache=cache, **endless))
    assert [r.finish_reason for r in responses] == ["context"]


def test_stop_strings(pocket: Pocket, prompt: list[int]) -> None:
    model, tokenizer = pocket
    whole = generate(model, tokenizer, prompt, max_tokens=60)
    at = len(whole) // 2
    stop = whole[at : at + 9]
    expected = whole[: whole.index(stop)]
    assert generate(model, tokenizer, prompt, max_tokens=60, stop=stop) == expected
    assert generate(model, tokenizer, prompt, max_tokens=60, stop=["never in a story", stop]) == expected
    responses = list(stream_generate(model, tokenizer, prompt, max_tokens=60, stop=[stop]))
    assert responses[-1].finish_reason == "stop"
    assert generate(model, tokenizer, prompt, max_tokens=60, stop="never in a story") == whole


class _Bytes:
    """A tokenizer whose tokens are bytes, with mlx-lm's detokenizer."""

    def __init__(self) -> None:
        from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        table = bytes_to_unicode()
        detokenizer = BPEStreamingDetokenizer.__new__(BPEStreamingDetokenizer)
        detokenizer.tokenmap = [table[i] for i in range(256)]
        detokenizer.reset()
        self.detokenizer = detokenizer


@pytest.mark.parametrize("text", ["naïve café", "fox 🦊 and 犬", "a👩‍👩‍👧b", "no stop: STO", "ST", "héS"])
def test_text_is_never_cut_inside_a_character(text: str) -> None:
    stream = TextStream(_Bytes(), stop=["STOP", "TOPS"])  # type: ignore[arg-type]
    pieces = [stream.add(byte) for byte in text.encode()]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) + stream.finish() == text
    assert not stream.stopped


@pytest.mark.parametrize(
    ("text", "expected"), [("one STOP two", "one "), ("aSTSTOPb", "aST"), ("xTOPSTOP", "x"), ("STOP", "")]
)
def test_text_before_the_first_stop_string(text: str, expected: str) -> None:
    stream = TextStream(_Bytes(), stop=["STOP", "TOPS"])  # type: ignore[arg-type]
    assert "".join(stream.add(byte) for byte in text.encode()) + stream.finish() == expected
    assert stream.stopped


def test_only_the_last_token_is_fed_in_decode(
    pocket: Pocket, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = pocket
    fed: list[tuple[int, int]] = []
    plain = Decoder.hidden_states

    def spy(self: Decoder, inputs: mx.array, offset: int | None = None, cache: Any = None) -> mx.array:
        fed.append((cache[0].offset, inputs.shape[1]))
        return plain(self, inputs, offset, cache)

    monkeypatch.setattr(Decoder, "hidden_states", spy)
    cache = model.make_cache(len(prompt) + 8)
    endless = _without_end(tokenizer)
    list(
        stream_generate(
            model, tokenizer, prompt, max_tokens=4, prompt_cache=cache, prefill_step_size=8, logits_processors=endless
        )
    )
    n = len(prompt)
    chunks = [(first, min(8, n - first)) for first in range(0, n, 8)]
    assert fed == [*chunks, (n, 1), (n + 1, 1), (n + 2, 1), (n + 3, 1)]
    assert cache[0].offset == n + 4


def test_a_prompt_cache_is_continued(pocket: Pocket, prompt: list[int]) -> None:
    model, tokenizer = pocket
    for cache in (model.make_cache(len(prompt) + 20, kv_bits=0), [FullKVCache() for _ in model.layers]):
        whole = generate(model, tokenizer, prompt, max_tokens=20, prompt_cache=cache)
        for layer in cache:
            layer.reset()
        first = list(stream_generate(model, tokenizer, prompt[:7], max_tokens=1, prompt_cache=cache))
        assert len(first) == 1
        assert cache[0].offset == 8
        for layer in cache:
            layer.trim(1)
        assert generate(model, tokenizer, prompt[7:], max_tokens=20, prompt_cache=cache) == whole


def test_an_abandoned_run_leaves_what_was_yielded(pocket: Pocket, prompt: list[int]) -> None:
    model, tokenizer = pocket
    cache = model.make_cache(len(prompt) + 20)
    run = stream_generate(model, tokenizer, prompt, prompt_cache=cache, logits_processors=_without_end(tokenizer))
    for _ in range(3):
        next(run)
    run.close()
    assert [layer.offset for layer in cache] == [len(prompt) + 2] * len(cache)


@pytest.mark.parametrize("failing", [1, 2, 6])
def test_a_run_that_fails_leaves_what_was_yielded(pocket: Pocket, prompt: list[int], failing: int) -> None:
    """It left the last yielded token too, which whoever continues with that token would have had twice.

    A run that fails before its first token leaves nothing.
    """
    model, tokenizer = pocket
    calls = iter(range(1, 100))

    def sampler(logprobs: mx.array) -> mx.array:
        if next(calls) == failing:
            raise KeyboardInterrupt
        return mx.argmax(logprobs, axis=-1)

    cache = model.make_cache(len(prompt) + 20)
    processors = _without_end(tokenizer)
    run = stream_generate(model, tokenizer, prompt, prompt_cache=cache, sampler=sampler, logits_processors=processors)
    with pytest.raises(KeyboardInterrupt):
        list(run)
    assert [layer.offset for layer in cache] == [[0, len(prompt), len(prompt) + failing - 3][min(failing - 1, 2)]] * len(cache)


def test_a_suspended_run_gives_way_to_the_next(pocket: Pocket, prompt: list[int]) -> None:
    """Whoever keeps the iterator of an earlier run cannot harm a later one on the same cache, and is told."""
    model, tokenizer = pocket
    cache = model.make_cache(200, kv_bits=0)
    endless = {"prompt_cache": cache, "logits_processors": _without_end(tokenizer)}
    expected = []
    for keep in (False, True):
        cache[0].reset()
        for layer in cache:
            layer.reset()
        first = stream_generate(model, tokenizer, prompt, **endless)
        heard = [next(first).token for _ in range(4)]
        if not keep:
            first.close()
        expected.append(heard + [r.token for r in stream_generate(model, tokenizer, [5, 6], max_tokens=9, **endless)])
        if keep:
            with pytest.raises(RuntimeError, match="the run was ended"):
                next(first)
        assert list(first) == []
        first.close()
        assert cache[0].offset == len(prompt) + 3 + 2 + 9
    assert expected[0] == expected[1]


def test_the_last_response_leaves_the_cache_ready(pocket: Pocket, prompt: list[int]) -> None:
    model, tokenizer = pocket
    cache = model.make_cache(200)
    forced = make_logits_processors({2: 1e9})
    run = stream_generate(model, tokenizer, prompt, prompt_cache=cache, logits_processors=forced)
    assert next(run).finish_reason == "stop"
    assert cache[0].offset == len(prompt)


def test_a_cache_is_freed_with_its_last_user(pocket: Pocket, prompt: list[int]) -> None:
    model, tokenizer = pocket
    mx.synchronize()
    before = mx.get_active_memory()
    run = stream_generate(model, tokenizer, prompt, prompt_cache=model.make_cache(2048, kv_bits=0))
    next(run)
    assert mx.get_active_memory() - before > 2**20
    del run
    gc.collect()
    mx.synchronize()
    assert mx.get_active_memory() - before < 2**18


@pytest.mark.parametrize("picked", [10**8, -1])
def test_a_sampler_that_picks_no_token(pocket: Pocket, prompt: list[int], picked: int) -> None:
    with pytest.raises(ValueError, match=f"the sampler picked token {picked}"):
        generate(*pocket, prompt, sampler=lambda _: mx.array([picked]))


def test_caches_that_do_not_fit_are_refused_at_the_call(pocket: Pocket) -> None:
    model, tokenizer = pocket
    one = model.make_cache(64)[0]
    depth = len(model.layers)
    for cache, message in (
        (model.make_cache(64)[:2], "the cache has 2 layers"),
        ([one] * depth, "none twice"),
        ([QuantizedKVCache(64, 2, 32) for _ in range(depth)], "a head_dim of 32"),
        ([object() for _ in range(depth)], "the cache holds a object"),
    ):
        with pytest.raises(ValueError, match=message):
            stream_generate(model, tokenizer, [1, 2], prompt_cache=cache)  # type: ignore[arg-type]


def test_the_models_context_bounds_any_cache(pocket: Pocket) -> None:
    model, tokenizer = pocket
    context = model.config.max_position_embeddings
    for cache in (model.make_cache(context + 500), [FullKVCache() for _ in model.layers]):
        with pytest.raises(ContextError, match=f"{context + 1} tokens; {context} are the model's context"):
            stream_generate(model, tokenizer, [1] * (context + 1), prompt_cache=cache)


def test_prompts_of_other_kinds(pocket: Pocket) -> None:
    model, tokenizer = pocket
    ids = [5, 6, 7]
    expected = generate(model, tokenizer, ids, max_tokens=5)
    assert generate(model, tokenizer, np.array(ids), max_tokens=5) == expected  # type: ignore[arg-type]
    assert generate(model, tokenizer, mx.array(ids), max_tokens=5) == expected
    bad: list[Any] = [b"hello", None, 5, {"role": "user"}, [{"role": "user", "content": "x"}], "\ud800"]
    for prompt in bad:
        with pytest.raises(PromptError):
            generate(model, tokenizer, prompt)


def test_a_long_prompt_takes_no_more_memory_than_a_short_one(pocket: Pocket) -> None:
    """Chunk by chunk: what a chunk leaves behind is in the cache, which was there before."""
    model, tokenizer = pocket

    def peak(tokens: int) -> int:
        cache = model.make_cache(2048)
        mx.synchronize()
        mx.clear_cache()
        resting = mx.get_active_memory()
        mx.reset_peak_memory()
        generate(model, tokenizer, [5] * tokens, max_tokens=1, prompt_cache=cache, prefill_step_size=128)
        return mx.get_peak_memory() - resting

    rows = 4 * 2 * 2 * 64 * (1792 - 256)  # one layer's longer past, dequantized: float32 keys and values of 2 heads
    # 8.2 MB measured; 22.6 MB when chunks are not evaluated in turn.
    assert peak(1792) < 1.3 * peak(256) + 3 * rows


def test_an_interrupted_prefill_leaves_the_cache_as_it_was(pocket: Pocket, prompt: list[int]) -> None:
    model, tokenizer = pocket
    cache = model.make_cache(len(prompt) + 20)

    def interrupt(done: int, total: int) -> None:
        if done >= 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(model, tokenizer, prompt, prompt_cache=cache, prefill_step_size=4, prompt_progress_callback=interrupt)
    assert [layer.offset for layer in cache] == [0] * len(cache)


def test_chunks_do_not_matter_and_progress_is_reported(pocket: Pocket, prompt: list[int]) -> None:
    model, tokenizer = pocket
    seen: list[tuple[int, int]] = []
    texts = []
    for step in (1, 5, 512):
        cache = model.make_cache(len(prompt) + 30, kv_bits=0)
        texts.append(
            generate(
                model,
                tokenizer,
                prompt,
                max_tokens=30,
                prompt_cache=cache,
                prefill_step_size=step,
                prompt_progress_callback=lambda done, total: seen.append((done, total)),
            )
        )
    assert texts[0] == texts[1] == texts[2]
    n = len(prompt)
    assert seen[: n + 1] == [(done, n) for done in range(n + 1)]
    assert seen[-2:] == [(0, n), (n, n)]


def test_the_reservation_is_prompt_and_max_tokens(
    pocket: Pocket, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = pocket
    asked: list[int] = []
    plain = Decoder.make_cache

    def spy(self: Decoder, max_seq_len: int, **options: Any) -> Any:
        asked.append(max_seq_len)
        assert options == {"kv_bits": 8, "kv_group_size": 32}
        return plain(self, max_seq_len, **options)

    monkeypatch.setattr(Decoder, "make_cache", spy)
    next(stream_generate(model, tokenizer, prompt, max_tokens=11))
    next(stream_generate(model, tokenizer, prompt, max_tokens=10**6))
    next(stream_generate(model, tokenizer, prompt, max_tokens=-1))
    context = model.config.max_position_embeddings
    next(stream_generate(model, tokenizer, prompt, max_kv_size=len(prompt) + 5))
    next(stream_generate(model, tokenizer, prompt, max_tokens=3, max_kv_size=1000))
    next(stream_generate(model, tokenizer, prompt, max_tokens=-1, max_kv_size=10**6))
    assert asked == [len(prompt) + 11, context, context, len(prompt) + 5, len(prompt) + 3, context]


def _bad_calls() -> Iterator[tuple[dict[str, Any], type[Exception], str]]:
    yield {"temperature": 0.5}, TypeError, "temperature"
    yield {"kv_start": 8}, TypeError, "kv_start"
    yield {"max_tokens": 0}, ValueError, "max_tokens is 0"
    yield {"max_tokens": -2}, ValueError, "max_tokens is -2"
    yield {"max_tokens": 1.5}, ValueError, "max_tokens is 1.5"
    yield {"prefill_step_size": 0}, ValueError, "prefill_step_size is 0"
    yield {"stop": ["a", ""]}, ValueError, "none empty"
    yield {"prompt_cache": []}, ValueError, "the cache has 0 layers; expected 4"
    yield {"prompt": []}, PromptError, "empty"
    yield {"prompt": ""}, PromptError, "empty"
    yield {"prompt": [1, 10**6]}, PromptError, "token id 1000000"
    yield {"prompt": [1, -1]}, PromptError, "token id -1"
    yield {"prompt": mx.array([[1, 2]])}, PromptError, "shape"
    yield {"prompt": [1] * 2049}, ContextError, "the prompt has 2049 tokens; the model's context is 2048"


@pytest.mark.parametrize(("arguments", "error", "message"), list(_bad_calls()))
def test_bad_arguments_are_refused_at_the_call(
    pocket: Pocket, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        stream_generate(*pocket, **({"prompt": [1, 2]} | arguments))


def test_a_prompt_longer_than_the_room_left(pocket: Pocket) -> None:
    model, tokenizer = pocket
    cache = model.make_cache(10)
    generate(model, tokenizer, [1, 2, 3], max_tokens=1, prompt_cache=cache)
    with pytest.raises(ContextError, match="the prompt has 8 tokens; 10 are reserved, 4 of them used"):
        generate(model, tokenizer, [1] * 8, prompt_cache=cache)
    assert cache[0].offset == 4


def test_load_refuses_what_it_cannot_apply() -> None:
    with pytest.raises(ValueError, match="revision is 'main'"):
        kvant.load("pocket", revision="main")
    with pytest.raises(ModelError, match="adapter 'x' is not a folder"):
        kvant.load("pocket", adapter_path="x")
    with pytest.raises(ModelError, match=r"'\./no/such' is not a folder"):
        kvant.load("./no/such")


def test_mlx_lms_samplers_and_processors_are_applied(pocket: Pocket, prompt: list[int]) -> None:
    model, tokenizer = pocket
    greedy = generate(model, tokenizer, prompt, max_tokens=40)
    assert generate(model, tokenizer, prompt, max_tokens=40, sampler=make_sampler(temp=1.0, top_k=1)) == greedy
    assert generate(model, tokenizer, prompt, max_tokens=40, sampler=make_sampler(temp=1.0, min_p=1.0)) == greedy
    seen: list[list[int]] = []

    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append(tokens.tolist())
        return logits

    run = stream_generate(model, tokenizer, prompt, max_tokens=4, logits_processors=[processor])
    tokens = [response.token for response in run]
    assert seen == [prompt + tokens[:n] for n in range(len(seen))]
    _, penalized = SamplingOptions(repetition_penalty=5.0, repetition_context_size=64).build(model.config.vocab_size)
    text = generate(model, tokenizer, prompt, max_tokens=40, logits_processors=penalized)
    assert text != greedy


def test_statistics_of_a_run(pocket: Pocket, prompt: list[int]) -> None:
    model, tokenizer = pocket
    responses = list(stream_generate(model, tokenizer, prompt, max_tokens=5, logits_processors=_without_end(tokenizer)))
    assert [r.generation_tokens for r in responses] == [1, 2, 3, 4, 5]
    assert {r.prompt_tokens for r in responses} == {len(prompt)}
    assert not any(r.from_draft for r in responses)
    assert all(r.latency_ms > 0 for r in responses)
    assert responses[0].generation_tps == 0
    seconds = sum(r.latency_ms for r in responses[1:]) / 1e3
    assert responses[-1].generation_tps == pytest.approx(4 / seconds)
    assert responses[0].prompt_tps == pytest.approx(len(prompt) / (responses[0].latency_ms / 1e3))
    assert responses[-1].peak_memory * 1e9 > model.nbytes
    for response in responses:
        assert response.logprobs.shape == (model.config.vocab_size,)
        assert mx.exp(response.logprobs).sum().item() == pytest.approx(1, abs=1e-4)


def test_verbose_prints_the_text(pocket: Pocket, prompt: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    text = generate(*pocket, prompt, max_tokens=5, verbose=True)
    assert capsys.readouterr().out.startswith(text + "\nPrompt: ")
