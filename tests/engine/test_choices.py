"""Several continuations of one prompt: read once, each what a run of its own with that seed gives."""

import pytest
from support.conversations import QUESTIONS, asking, count_fed, prompt_ids
from support.counts import count
from support.kinds import KINDS, Loaded

import kvant
from kvant.cache import ModelCache
from kvant.engine.choices import stream_choices
from kvant.engine.sampling import make_sampler
from kvant.errors import ContextError
from kvant.models import Decoder
from kvant.text.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("without_compilation")
Pocket = tuple[Decoder, Tokenizer]
PROMPT = [10 + (7 * at) % 100 for at in range(40)]


def _continued(model: object, tokenizer: Tokenizer, prompt: list[int], n: int, **options: object) -> list[list[int]]:
    tokens: list[list[int]] = [[] for _ in range(n)]
    last = 0
    for number, response in stream_choices(model, tokenizer, prompt, n, **options):  # type: ignore[arg-type]
        assert last <= number
        last = number
        assert response.prompt_tokens == (0 if number else len(prompt))
        tokens[number].append(response.token)
        assert response.generation_tokens == len(tokens[number])
    return tokens


@pytest.mark.parametrize("bits", [8, 0])
def test_each_is_a_run_with_the_next_seed(pocket: Pocket, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = pocket
    prompt = prompt_ids(tokenizer, [asking(QUESTIONS[0])])
    alone = []
    for number in range(4):
        sampler = make_sampler(temp=0.9, seed=2**64 - 2 + number if number < 2 else number - 2)
        cache = model.make_cache(128, quant_bit=bits)
        responses = kvant.stream_generate(
            model, tokenizer, prompt, sampler=sampler, max_tokens=30, prompt_cache=cache, prefill_step_size=8
        )
        alone.append([response.token for response in responses])
    monkeypatch.setattr(ModelCache, "fork", None)  # a cache that can go back needs no second one
    cache = model.make_cache(128, quant_bit=bits)
    before, fed = cache.nbytes, count_fed(monkeypatch)
    sampler = make_sampler(temp=0.9, seed=2**64 - 2)
    assert (
        _continued(model, tokenizer, prompt, 4, sampler=sampler, max_tokens=30, prompt_cache=cache, prefill_step_size=8)
        == alone
    )
    generated = sum(map(len, alone))
    assert len(prompt) + generated - 4 <= sum(fed) <= len(prompt) + generated  # the prompt once
    assert cache.nbytes == before
    assert cache.ids[0] == prompt + alone[-1][:-1]


@pytest.mark.parametrize("loaded", count(["mistral", "gemma3_text", "qwen3_next", "llama4"], KINDS), indirect=True)
def test_windows_and_states_are_forked(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt and the answers run past the windows. Two caches are held, however many answers there are."""
    model, tokenizer = loaded
    tokenizer.eos_token_ids = set()
    cache = model.make_cache(128, quant_bit=8)
    assert not cache.goes_back
    forked: list[ModelCache] = []
    fork = type(cache).fork

    def counting(cache: ModelCache) -> ModelCache:
        assert all(not other.nbytes for other in forked)  # given back before the next is made
        forked.append(fork(cache))
        return forked[-1]

    monkeypatch.setattr(type(cache), "fork", counting)
    sampler = make_sampler(temp=0.7, seed=3)
    fed = count_fed(monkeypatch)
    given = _continued(
        model, tokenizer, PROMPT, 4, sampler=sampler, max_tokens=30, prompt_cache=cache, prefill_step_size=16
    )
    assert len(PROMPT) <= sum(fed) - 4 * 29 <= len(PROMPT) + 4
    assert len(forked) == 3
    for number, tokens in enumerate(given):
        responses = kvant.stream_generate(
            model,
            tokenizer,
            PROMPT,
            sampler=make_sampler(temp=0.7, seed=3 + number),
            max_tokens=30,
            prompt_cache=model.make_cache(128, quant_bit=8),
            prefill_step_size=16,
        )
        assert tokens == [response.token for response in responses]
    assert cache.ids[0] == PROMPT + given[-1][:-1]


def test_a_choice_that_is_left_leaves_a_cache_that_works(pocket: Pocket) -> None:
    model, tokenizer = pocket
    prompt = prompt_ids(tokenizer, [asking(QUESTIONS[0])])
    cache = model.make_cache(128)
    choices = stream_choices(model, tokenizer, prompt, 3, sampler=make_sampler(temp=1, seed=1), prompt_cache=cache)
    tokens = [(number, response.token) for number, response in (next(choices) for _ in range(5))]
    del choices
    assert cache.ids[0] == prompt + [token for _, token in tokens[:-1]]
    cache.trim_to(len(prompt) - 1)
    rest = kvant.stream_generate(model, tokenizer, prompt[-1:], prompt_cache=cache, max_tokens=8)
    fresh = kvant.stream_generate(model, tokenizer, prompt, max_tokens=8)
    assert [response.token for response in rest] == [response.token for response in fresh]


def test_everything_is_checked_when_it_is_called(pocket: Pocket) -> None:
    model, tokenizer = pocket
    for n, options, kind, words in (
        (0, {}, ValueError, "n is 0; expected at least 1"),
        (2, {"max_tokens": 0}, ValueError, "max_tokens is 0"),
        (2, {"stop": [""]}, ValueError, "none empty"),
        (2, {"prompt_cache": model.make_cache(2)}, ContextError, "2 are reserved"),
    ):
        with pytest.raises(kind, match=words):
            stream_choices(model, tokenizer, [5, 6, 7], n, **options)  # type: ignore[arg-type]
