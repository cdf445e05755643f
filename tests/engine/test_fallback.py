"""A fused kernel that fails in the middle of an answer: the same tokens as without it, one warning, a right cache."""

import gc
import warnings
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.sample_utils import make_logits_processors
from mlx_lm.sample_utils import make_sampler as mlx_lm_sampler
from support.counts import count
from support.drafts import KnownDrafts
from support.failing_kernel import WORDS, FailingKernel, cannot_be_evaluated
from support.fused_path import unfused_append
from support.kinds import Loaded
from support.metal_host import host_pytest_skip

from kvant.cache import ModelCache, QuantizedKVCache
from kvant.engine import fallback
from kvant.engine.conversation import Conversation
from kvant.engine.drafted_run import DraftedRun
from kvant.engine.fallback import fused_layers
from kvant.engine.model_drafter import ModelDrafter
from kvant.engine.run import Run
from kvant.engine.sampling import make_sampler
from kvant.models import Decoder
from kvant.operators import dispatch, fused_attention
from kvant.operators.kernels import attend

pytestmark = host_pytest_skip

LAYERS = 4
PROMPT = [(7 * i) % 1000 for i in range(100)]
TOKENS = count(40, 120)
FAILING = (
    LAYERS * (TOKENS - 21) + 3
)  # a layer in the middle: those before it were written, those behind it have lost their rows

Fail = Callable[..., FailingKernel]


@pytest.fixture
def fail(checked_gpu: None, monkeypatch: pytest.MonkeyPatch) -> Fail:
    """A function that puts a failing kernel in place."""

    def put(how: str, first: int = FAILING) -> FailingKernel:
        kernel = FailingKernel(how, first)
        monkeypatch.setattr(fused_attention, "attend", kernel)
        monkeypatch.setattr(attend, "launch", unfused_append)
        return kernel

    return put


def answer(model: Decoder, cache: ModelCache, prompt: list[int] = PROMPT, **options: Any) -> list[int]:
    return [token for token, _ in Run(model, prompt, cache, max_tokens=TOKENS, **options)]


@pytest.fixture(scope="module")
def expected(pocket: tuple[Decoder, Any]) -> tuple[list[int], list[int]]:
    """The tokens of an unfused run, and of a second one behind them in the same cache."""
    cache = pocket[0].make_cache(512, kernels="unfused")
    return answer(pocket[0], cache), answer(pocket[0], cache, [5, 6, 7] * 4)


@pytest.mark.parametrize("how", ["build", "eval"])
@pytest.mark.parametrize("look_ahead", [0, 1])
def test_the_answer_goes_on(
    pocket: tuple[Decoder, Any], fail: Fail, expected: tuple[list[int], list[int]], how: str, look_ahead: int
) -> None:
    model, _ = pocket
    kernel = fail(how)
    cache = model.make_cache(512)
    assert len(fused_layers(cache)) == LAYERS
    with pytest.warns(RuntimeWarning, match=f"failed in a run: .*{WORDS[how]}.*unfused operator instead") as caught:
        tokens = answer(model, cache, look_ahead=look_ahead)
    assert len(caught) == 1
    assert tokens == expected[0]
    assert FAILING <= kernel.calls <= FAILING + LAYERS
    assert not fused_layers(cache)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert answer(model, cache, [5, 6, 7] * 4) == expected[1]  # what the cache holds is right
        assert not fused_layers(model.make_cache(512))  # the kernel was given up


@pytest.mark.parametrize(
    ("how", "first", "sampler"),
    [("build", 19, "greedy"), ("eval", 38, "greedy"), ("eval", 43, "foreign"), ("build", 60, "foreign")],
)
def test_drafts_go_on(
    pocket: tuple[Decoder, Any], fail: Fail, expected: tuple[list[int], list[int]], how: str, first: int, sampler: str
) -> None:
    """Where a step fails that verifies tokens, or one behind it, with some of them handed out."""
    model, _ = pocket
    fail(how, first)
    cache = model.make_cache(512)
    picks: dict[str, Any] = {} if sampler == "greedy" else {"sampler": lambda logprobs: mx.argmax(logprobs, axis=-1)}
    run = DraftedRun(model, PROMPT, cache, max_tokens=TOKENS, drafts=KnownDrafts(text=PROMPT + expected[0]), **picks)
    with pytest.warns(RuntimeWarning, match="failed in a run"):
        seen = [(token, cache.ids[0]) for token, _ in run]
    assert seen == [(token, PROMPT + expected[0][:number]) for number, token in enumerate(expected[0])]
    assert not fused_layers(cache)


@pytest.mark.parametrize(("how", "first"), [("build", 5), ("eval", 3 * LAYERS + 1)])
def test_a_draft_model_goes_on(
    pocket: tuple[Decoder, Any], fail: Fail, expected: tuple[list[int], list[int]], how: str, first: int
) -> None:
    """Where its own step fails: in the prompt, or with some tokens of a draft read. What it drafts is the same text."""
    model, _ = pocket
    fail(how, first)
    cache = model.make_cache(512)
    drafter = ModelDrafter(model, cache, model.config.vocab_size)
    drafter.extend(PROMPT)
    with pytest.warns(RuntimeWarning, match="failed in a run"):
        drafted = drafter.propose(7)
    assert drafted == expected[0][:7]
    assert not fused_layers(cache)
    drafter.extend(expected[0][:4])
    assert drafter.propose(5) == expected[0][4:9]


@pytest.mark.parametrize("kind", ["seeded", "global", "processed"])
def test_nothing_is_drawn_otherwise(pocket: tuple[Decoder, Any], fail: Fail, kind: str) -> None:
    """The same random numbers, whoever keeps them, and the same tokens before the processors."""
    model, _ = pocket

    seen: list[list[int]] = []

    def seeing(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append(tokens.tolist())  # type: ignore[arg-type]
        return logits

    def sampled(cache: ModelCache) -> list[int]:
        mx.random.seed(7)
        options: dict[str, Any] = {"sampler": make_sampler(2.0, 0.95, seed=5)}
        if kind == "global":
            options = {"sampler": mlx_lm_sampler(temp=2.0)}
        if kind == "processed":
            options["logits_processors"] = [*make_logits_processors(None, 1.5, 20), seeing]
        return [*answer(model, cache, **options), *mx.random.uniform(shape=(2,)).tolist()]  # type: ignore[misc]

    unfused = sampled(model.make_cache(512, kernels="unfused"))
    fail("eval")
    cache = model.make_cache(512)
    with pytest.warns(RuntimeWarning, match="failed in a run"):
        assert sampled(cache) == unfused
    assert not fused_layers(cache)
    text = PROMPT + unfused[:TOKENS]
    assert all(tokens == text[: len(tokens)] for tokens in seen)


@pytest.mark.parametrize("how", ["build", "eval"])
def test_a_prompt_is_fed_again(
    pocket: tuple[Decoder, Any], fail: Fail, expected: tuple[list[int], list[int]], how: str
) -> None:
    """Behind an answer, so that the cache goes back to it; in the last chunk, which alone is short enough."""
    model, _ = pocket
    fail(how, LAYERS * (TOKENS - 1) + 2)
    cache, prompt = model.make_cache(512), [5, 6, 7] * 4
    assert answer(model, cache) == expected[0]
    seen: list[tuple[int, int]] = []
    with pytest.warns(RuntimeWarning, match="failed in a run"):
        tokens = answer(model, cache, prompt, prefill_step_size=11, progress=lambda *fed: seen.append(fed))
    assert tokens == expected[1]
    assert seen == [(0, 12), (11, 12), (0, 12), (11, 12), (12, 12)]


@pytest.mark.parametrize("how", ["build", "eval"])
def test_the_last_token_is_kept(pocket: tuple[Decoder, Any], fail: Fail, how: str) -> None:
    """mlx-lm's caches hold the last token too: it is fed behind the answer."""
    model, _ = pocket
    found = []
    for kernels in ("unfused", None):
        kernel, cache = fail(how, 10**6), model.make_cache(512, kernels=kernels)
        run = Run(model, PROMPT, cache, max_tokens=5)
        list(run)
        kernel.first = kernel.calls + 2
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run.keep_last()
        assert len(caught) == (kernels is None)
        assert cache.offset == len(PROMPT) + 5
        found.append(answer(model, cache, [5, 6, 7] * 4))
    assert found[0] == found[1]


def test_a_conversation_goes_on(pocket: tuple[Decoder, Any], fail: Fail) -> None:
    model, tokenizer = pocket

    def said(kernels: str | None) -> list[str]:
        conversation = Conversation(model, tokenizer, model.make_cache(1024, kernels=kernels))
        questions = ["Tell me a story about a fox named Pip.", "And then what did the fox do?", "Is it true?"]
        return ["".join(r.text for r in conversation.send(question, max_tokens=40)) for question in questions]

    unfused = said("unfused")
    fail("eval", LAYERS * 50)
    with pytest.warns(RuntimeWarning, match="failed in a run") as caught:
        assert said(None) == unfused
    assert len(caught) == 1


@pytest.mark.parametrize("loaded", ["mistral", "gpt_oss", "qwen3_next", "llama4"], indirect=True)
def test_every_kind_of_cache_is_brought_back(
    loaded: Loaded, checked_gpu: None, without_compilation: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows, sinks, states and chunks that have moved on. The kernel is only said to be there."""
    monkeypatch.setattr(QuantizedKVCache, "backend_for", lambda *_: None)
    model, _ = loaded
    prompt, count = [6 + (5 * i) % 90 for i in range(40)], 20
    tokens = [[t for t, _ in Run(model, prompt, model.make_cache(128, quant_bit=0), max_tokens=count)]]
    cache = model.make_cache(128, quant_bit=0)
    rows = [layer for layer in cache.layers if isinstance(layer, QuantizedKVCache)]
    for layer in rows:
        layer.backend = "metal"
    calls = []

    def losing(inputs: mx.array, given: Any) -> mx.array:
        logits = type(model).next_logits(model, inputs, given)
        calls.append(inputs)
        if len(calls) == 12 and fused_layers(cache):
            logits = logits + cannot_be_evaluated()
            for layer in rows[len(rows) // 2 :]:
                layer.arrays[0] = layer.arrays[0] + cannot_be_evaluated()
        return logits

    monkeypatch.setattr(model, "next_logits", losing)
    with pytest.warns(RuntimeWarning, match="failed in a run"):
        tokens.append([token for token, _ in Run(model, prompt, cache, max_tokens=count)])
    assert tokens[1] == tokens[0]
    assert len(calls) > 12


def test_the_memory_of_the_lost_cache_is_freed_first(
    pocket: tuple[Decoder, Any], fail: Fail, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = pocket
    fail("eval", LAYERS * 4 + 2)
    cache = model.make_cache(16_384)
    active = mx.get_active_memory()
    renew, peaks = fallback._renew, []

    def measured(cache: ModelCache) -> None:
        mx.reset_peak_memory()
        renew(cache)
        peaks.append(mx.get_peak_memory() - active)

    monkeypatch.setattr(fallback, "_renew", measured)
    with pytest.warns(RuntimeWarning, match="failed in a run"):
        list(Run(model, PROMPT, cache, max_tokens=10))
    gc.collect()
    assert peaks[0] < cache.nbytes / LAYERS
    assert mx.get_active_memory() - active < cache.nbytes / 100


def test_an_interruption_is_not_a_failure(pocket: tuple[Decoder, Any], fail: Fail) -> None:
    model, _ = pocket
    kernel = fail("build", LAYERS * 3 + 2)
    cache = model.make_cache(512)
    run = Run(model, PROMPT, cache, max_tokens=10)
    kernel.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        list(run)
    assert len(fused_layers(cache)) == LAYERS
    assert cache.offset == len(PROMPT) + len(run.generated) - 1


@pytest.mark.parametrize("by_argument", [True, False])
def test_a_kernel_that_was_asked_for_raises(
    pocket: tuple[Decoder, Any], fail: Fail, monkeypatch: pytest.MonkeyPatch, by_argument: bool
) -> None:
    model, _ = pocket
    fail("eval", LAYERS * 3 + 2)
    if not by_argument:
        monkeypatch.setenv(dispatch.VARIABLE, "fused")
    cache = model.make_cache(512, kernels="fused" if by_argument else None)
    with pytest.raises(RuntimeError, match=WORDS["eval"]):
        answer(model, cache)
    assert all(layer.backend is not None for layer in cache)


@pytest.mark.parametrize("kind", [RuntimeError, ValueError, ZeroDivisionError])
def test_an_error_of_somebody_else_is_raised(pocket: tuple[Decoder, Any], fail: Fail, kind: type[Exception]) -> None:
    """It comes again without the kernel. So nothing is said of the kernel, which stays."""
    model, _ = pocket
    fail("eval", 10**6)
    cache, calls = model.make_cache(512), []

    def sampler(logprobs: mx.array) -> mx.array:
        calls.append(logprobs.max().item())
        if len(calls) >= 5:
            raise kind("the sampler fails")
        return mx.argmax(logprobs, axis=-1)

    run = Run(model, PROMPT, cache, max_tokens=10, sampler=sampler)
    with pytest.raises(kind, match="the sampler fails"):
        list(run)
    assert len(calls) == (6 if kind is not ZeroDivisionError else 5)
    assert len(run.generated) == 3  # the fifth token is drawn before the fourth is handed out
    assert cache.offset == len(PROMPT) + 2
    assert len(fused_layers(cache)) == LAYERS
    assert dispatch.choose().backend == "metal"


def test_tokens_without_ids_cannot_be_fed_again(pocket: tuple[Decoder, Any], fail: Fail) -> None:
    model, _ = pocket
    fail("eval", LAYERS * 3 + 2)
    cache = model.make_cache(512)
    run = Run(model, PROMPT, cache, max_tokens=10)
    next(run)
    for own in cache.layers[0].sequences._ids:
        own[:] = []
    with pytest.raises(RuntimeError, match="the ids of 3 of the cache's 103 tokens are known; it is empty now"):
        list(run)
