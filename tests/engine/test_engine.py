"""The loop: tokens against mlx-lm's, how it ends, what it feeds and leaves in the cache, and the memory it
takes.
"""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from support.conversations import endless
from support.counts import count as scaled
from support.grammars import spelled
from support.numbers import peak_bytes
from support.runs import Run

from kvant import batch_generate, generate, stream_generate
from kvant.errors import ContextError, PromptError
from kvant.models import Decoder, load_decoder
from kvant.text.stream import TextPart, TextStream

pytestmark = pytest.mark.usefixtures("without_compilation")  # of mlx-lm's samplers
Pocket = tuple[Decoder, Any]
QUESTION = "Tell me a story about a fox named Pip."
LONG = [(7 * i) % 1000 for i in range(1900)]


@pytest.fixture(scope="module")
def prompt(pocket: Pocket) -> list[int]:
    _, tokenizer = pocket
    return tokenizer.apply_chat_template([{"role": "user", "content": QUESTION}], add_generation_prompt=True)


def test_200_greedy_tokens_and_log_probabilities_are_mlx_lms(
    pocket: Pocket, pocket_mlx_lm: nn.Module, prompt: list[int]
) -> None:
    model, tokenizer = pocket
    without_end = make_logits_processors(dict.fromkeys(tokenizer.eos_token_ids, -1e9))
    steps = generate_step(mx.array(prompt), pocket_mlx_lm, max_tokens=200, logits_processors=without_end)
    given = list(stream_generate(model, tokenizer, prompt, 200, logits_processors=without_end, kv_bits=0))
    assert len(given) == 200
    for at, (response, (wanted, logprobs)) in enumerate(zip(given, steps, strict=True)):
        apart = mx.abs(response.logprobs - logprobs)
        assert (apart / mx.maximum(1, mx.abs(logprobs))).max().item() < 1e-4
        if response.token != wanted:
            second, first = mx.sort(logprobs)[-2:].tolist()
            assert first - second <= 1e-4, f"token {at} is {response.token}; mlx-lm's is {wanted}"
            break  # from here on the two texts are about different things


@pytest.mark.parametrize("which", [0, 1])
def test_the_end_after_some_tokens_is_never_printed(pocket: Pocket, prompt: list[int], which: int) -> None:
    model, tokenizer = pocket
    ends = sorted(tokenizer.eos_token_ids)
    assert len(ends) == 2

    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        bias = 1e9 if tokens.size == len(prompt) + 5 else -1e9
        return logits.at[:, [ends[which], ends[1 - which]]].add(bias * mx.array([1.0, 0.5]))

    cache = model.make_cache(200)
    responses = []
    for response in stream_generate(
        model, tokenizer, prompt, prompt_cache=cache, logits_processors=[processor]
    ):
        responses.append(response)
        assert cache.offset == len(prompt) + len(responses) - 1  # with the last one too
    assert [r.finish_reason for r in responses] == [None] * 5 + ["stop"]
    assert responses[-1].token == ends[which]
    assert "".join(r.text for r in responses) == tokenizer.decode([r.token for r in responses[:-1]])


# The tokens there is room for are fed, and one more is sampled from the last.
@pytest.mark.parametrize(
    ("max_tokens", "room", "finish", "count"),
    [
        (7, 20, "length", 7),
        (50, 4, "context", 5),
        (-1, 0, "context", 1),
        (4, 4, "length", 4),
        (5, 4, "length", 5),
    ],
)
def test_max_tokens_and_a_full_context(
    pocket: Pocket, prompt: list[int], max_tokens: int, room: int, finish: str, count: int
) -> None:
    model, tokenizer = pocket
    cache = model.make_cache(len(prompt) + room)
    options: dict[str, Any] = {"prompt_cache": cache} | endless(tokenizer)
    responses = list(stream_generate(model, tokenizer, prompt, max_tokens=max_tokens, **options))
    assert [r.finish_reason for r in responses] == [None] * (count - 1) + [finish]
    assert cache.offset == len(prompt) + min(count, room)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *((text, text) for text in ("naïve café", "fox 🦊 and 犬", "a👩‍👩‍👧b", "no stop: STO", "ST", "héS")),
        *(("one STOP two", "one "), ("aSTSTOPb", "aST"), ("xTOPSTOP", "x"), ("STOP", "")),
    ],
)
def test_text_is_cut_before_the_first_stop_string_and_in_no_character(
    pocket: Pocket, text: str, expected: str
) -> None:
    stream = TextStream(pocket[1], stop=["STOP", "TOPS"])
    parts = [part for byte in spelled(pocket[1], text) for part in stream.add(byte)]
    pieces = [part.text for part in [*parts, *stream.finish()] if isinstance(part, TextPart)]
    assert "\ufffd" not in "".join(pieces[: len(parts)])
    assert "".join(pieces) == expected
    assert (stream.stop is not None) == (expected != text)


def test_a_suspended_run_gives_way_to_the_next(pocket: Pocket, prompt: list[int]) -> None:
    """Whoever keeps the iterator of an earlier run cannot harm a later one on the same cache, and is told."""
    cache, fresh = (pocket[0].make_cache(200, kv_bits=0) for _ in range(2))
    first = stream_generate(*pocket, prompt, prompt_cache=cache)
    before = prompt + [next(first).token for _ in range(4)][:-1] + [5, 6]
    later, expected = (
        [response.token for response in stream_generate(*pocket, ids, 9, prompt_cache=each)]
        for ids, each in (([5, 6], cache), (before, fresh))
    )
    assert later == expected
    with pytest.raises(RuntimeError, match="the prompt cache changed"):
        next(first)
    assert list(first) == []
    first.close()  # type: ignore[attr-defined]
    assert cache.ids == before + later
    closed = stream_generate(*pocket, [7], prompt_cache=cache)
    told = [next(closed).token for _ in range(3)]
    closed.close()  # type: ignore[attr-defined]
    assert cache.ids == [*before, *later, 7, *told[:2]]


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


def test_a_cache_that_does_not_fit_is_refused_at_the_call(
    pocket: Pocket, make_checkpoint: Callable[..., tuple[Path, Any]]
) -> None:
    model, tokenizer = pocket
    narrow = load_decoder(
        make_checkpoint(num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)[0]
    )
    with pytest.raises(ValueError, match=r"a head_dim of \(2, 32\); expected \(2, 64\)"):
        stream_generate(model, tokenizer, [1, 2], prompt_cache=narrow.make_cache(64))


def test_the_models_context_bounds_any_cache(pocket: Pocket) -> None:
    model, tokenizer = pocket
    context = model.config.max_position_embeddings
    for cache in (model.make_cache(context + 500), list(model.make_cache(context + 500))):
        with pytest.raises(ContextError, match=f"{context + 1} tokens; {context} are the model's context"):
            stream_generate(model, tokenizer, [1] * (context + 1), prompt_cache=cache)


def test_prompts_of_other_kinds(pocket: Pocket) -> None:
    ids = [5, 6, 7]
    given: list[Any] = [ids, np.array(ids), mx.array(ids)]
    assert len({generate(*pocket, prompt, max_tokens=5) for prompt in given}) == 1


@pytest.mark.parametrize("bits", [8, 0])
def test_active_memory_does_not_grow(pocket: Pocket, bits: int) -> None:
    model, tokens, active = pocket[0], scaled(120, 1020), []
    for _ in Run(model, LONG[:100], model.make_cache(tokens + 100, kv_bits=bits), max_tokens=tokens):
        mx.synchronize()
        active.append(mx.get_active_memory())
    assert len(active) == tokens
    assert max(active[20:]) - active[20] < 2**16  # a step's own arrays; a cached token takes 4 kB at 0 bits


def test_a_long_prefill_peaks_no_higher_than_mlx_lms_with_its_default_cache(
    pocket: Pocket, pocket_mlx_lm: nn.Module
) -> None:
    """Into a quantized cache."""

    def mlx_lm() -> None:
        options = {"prompt_cache": make_prompt_cache(pocket_mlx_lm), "prefill_step_size": 512}
        next(generate_step(mx.array(LONG), pocket_mlx_lm, max_tokens=1, **options))

    ours = peak_bytes(
        lambda: next(Run(pocket[0], LONG, pocket[0].make_cache(len(LONG) + 1, kv_bits=8), max_tokens=1))
    )
    assert ours <= peak_bytes(mlx_lm)


def test_a_long_prompt_takes_no_more_memory_than_a_short_one(pocket: Pocket) -> None:
    """Chunk by chunk: what a chunk leaves behind is in the cache, which was there before; MLX keeps none
    of it.
    """
    model, tokenizer = pocket
    kept: list[int] = []

    def progress(done: int, total: int) -> None:
        kept.extend([mx.get_cache_memory()] * (0 < done < total))

    def peak(tokens: int) -> int:
        options: dict[str, Any] = {"prefill_step_size": 128, "prompt_progress_callback": progress}
        options |= {"max_tokens": 1, "prompt_cache": model.make_cache(2048)}
        return peak_bytes(lambda: generate(model, tokenizer, [5] * tokens, **options))

    # one layer's longer past, dequantized: float32 keys and values of 2 heads
    rows = 4 * 2 * 2 * 64 * (1792 - 256)
    # 9.2 to 11 MB measured, by the order in which MLX computes; 22.6 MB when chunks are not evaluated in
    # turn.
    assert peak(1792) < 1.4 * peak(256) + 5 * rows
    assert len(kept) > 10
    assert max(kept) < 100_000  # without giving it back: megabytes


def test_chunks_do_not_matter_and_progress_is_reported(pocket: Pocket, prompt: list[int]) -> None:
    model, tokenizer = pocket
    seen: list[tuple[int, int]] = []
    texts = []
    for step in (1, 5, 512):
        options: dict[str, Any] = {"kv_bits": 0, "prefill_step_size": step}
        options["prompt_progress_callback"] = lambda done, total: seen.append((done, total))
        texts.append(generate(model, tokenizer, prompt, max_tokens=30, **options))
    assert texts[0] == texts[1] == texts[2]
    n = len(prompt)
    assert seen[: n + 1] == [(done, n) for done in range(n + 1)]
    assert seen[-2:] == [(0, n), (n, n)]


def test_the_reservation_is_prompt_and_max_tokens(
    pocket: Pocket, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = pocket
    asked: list[int] = []
    plain = Decoder.reserve_cache
    monkeypatch.setattr(
        Decoder, "reserve_cache", lambda self, n, options: asked.append(n) or plain(self, n, options)
    )
    context, n = model.config.max_position_embeddings, len(prompt)
    for max_tokens, max_kv_size, expected in (
        (11, None, n + 11),
        (10**6, None, context),
        (-1, None, context),
        (256, n + 5, n + 5),
        (3, 1000, n + 3),
        (-1, 10**6, context),
    ):
        next(stream_generate(model, tokenizer, prompt, max_tokens=max_tokens, max_kv_size=max_kv_size))
        assert asked.pop() == expected


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"max_tokens": 0}, ValueError, "max_tokens is 0"),
        ({"max_tokens": -2}, ValueError, "max_tokens is -2"),
        ({"max_tokens": 1.5}, ValueError, "max_tokens is 1.5"),
        ({"prefill_step_size": 0}, ValueError, "prefill_step_size is 0"),
        ({"stop": ["a", ""]}, ValueError, "none empty"),
        ({"prompt": []}, PromptError, "empty"),
        ({"prompt": ""}, PromptError, "empty"),
        ({"prompt": [1, 10**6]}, PromptError, "token id 1000000"),
        ({"prompt": [1, -1]}, PromptError, "token id -1"),
        ({"prompt": mx.array([[1, 2]])}, PromptError, "shape"),
        *(
            ({"prompt": bad}, PromptError, "prompt (is a|has) ")
            for bad in (b"a", None, 5, {}, [{"role": 5}], "\ud800")
        ),
        ({"prompt": [1] * 2049}, ContextError, "the prompt has 2049 tokens; the model's context is 2048"),
    ],
)
def test_bad_arguments_are_refused_at_the_call(
    pocket: Pocket, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    options = {"prompt": [1, 2]} | arguments
    with pytest.raises(error, match=message):
        stream_generate(*pocket, **options)
    with pytest.raises(error, match=message):
        batch_generate(*pocket, [[5], options.pop("prompt")], **options)


def test_a_prompt_longer_than_the_room_left(pocket: Pocket) -> None:
    model, tokenizer = pocket
    cache = model.make_cache(10)
    generate(model, tokenizer, [1, 2, 3], max_tokens=1, prompt_cache=cache)
    with pytest.raises(ContextError, match="the prompt has 8 tokens; 10 are reserved, 4 of them used"):
        generate(model, tokenizer, [1] * 8, prompt_cache=cache)
    assert cache[0].offset == 4


def test_mlx_lms_samplers_are_applied(pocket: Pocket, prompt: list[int]) -> None:
    model, tokenizer = pocket
    greedy = generate(model, tokenizer, prompt, max_tokens=40)
    for options in ({"top_k": 1}, {"min_p": 1.0}):
        sampler = make_sampler(temp=1.0, **options)  # type: ignore[arg-type]
        assert generate(model, tokenizer, prompt, max_tokens=40, sampler=sampler) == greedy


def test_statistics_of_a_run(pocket: Pocket, prompt: list[int]) -> None:
    model, tokenizer = pocket
    responses = list(stream_generate(model, tokenizer, prompt, max_tokens=5, **endless(tokenizer)))
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


def test_verbose_prints_the_text(
    pocket: Pocket, prompt: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    text = generate(*pocket, prompt, max_tokens=5, verbose=True)
    assert capsys.readouterr().out.startswith(text + "\nPrompt: ")
