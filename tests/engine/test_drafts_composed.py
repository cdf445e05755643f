"""Drafts with everything else: windows, bridged models, grammars, stop strings, caches that go on, conversations."""

import random
from typing import Any

import mlx.core as mx
import pytest
from support.counts import count
from support.drafts import KnownDrafts
from support.interruption import Interruption
from support.kinds import Loaded
from support.openblas import has_small_products

import kvant
from kvant.cache import FullKVCache, ModelCache
from kvant.engine.conversation import Conversation
from kvant.engine.drafted_run import DraftedRun
from kvant.engine.drafting.choice import StepCosts
from kvant.engine.response import GenerationResponse
from kvant.engine.run import Run, prefill
from kvant.errors import ArgumentError
from kvant.models import Decoder
from kvant.sample_utils import make_sampler
from kvant.text.grammar import Grammars

Pocket = tuple[Decoder, Any]
PROMPT = [(7 * i) % 100 + 20 for i in range(40)]
REPEATING = "Tom had a red ball. Sam had a blue ball. " * 4


@pytest.fixture
def paying(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draft seems to pay, whatever this machine is doing."""
    monkeypatch.setattr(StepCosts, "is_known", True)
    monkeypatch.setattr(StepCosts, "get", lambda costs, num_tokens: 1.0)
    monkeypatch.setattr(StepCosts, "add", lambda costs, num_tokens, seconds: None)


@pytest.mark.parametrize(
    ("loaded", "bits"), [("mistral", 8), ("gemma3_text", 8), ("gpt_oss", 0), ("llama4", 0)], indirect=["loaded"]
)
def test_windows_and_bridged_models(loaded: Loaded, bits: int) -> None:
    """Past the window, in steps of up to 8 of which some tokens are taken back."""
    model, _ = loaded
    sampler = make_sampler(0.7, seed=2)
    cache, another = (model.make_cache(128, kv_bits=bits) for _ in range(2))
    plain = [t for t, _ in Run(model, PROMPT, another, max_tokens=50, sampler=sampler)]
    drafts = KnownDrafts(text=PROMPT + plain)
    run = DraftedRun(model, PROMPT, cache, max_tokens=50, sampler=sampler, drafts=drafts)
    for number, (token, _) in enumerate(run):
        assert token == plain[number]
        assert cache.ids[0] == PROMPT + plain[:number]
    assert run.drafts is not None
    assert run.drafts.tokens_a_step > 1.5


@pytest.mark.parametrize("loaded", ["qwen3_next", "falcon_h1"], indirect=True)
def test_states_are_refused(loaded: Loaded) -> None:
    model, tokenizer = loaded
    with pytest.raises(ArgumentError, match=r"draft is 'prompt'; .*states that cannot"):
        kvant.stream_generate(model, tokenizer, PROMPT, draft="prompt")


def test_other_words_are_refused(pocket: Pocket) -> None:
    with pytest.raises(ArgumentError, match="draft is 'promt'; expected 'none' or 'prompt'"):
        kvant.stream_generate(*pocket, "Hello", draft="promt")


def test_a_draft_model_over_ranks_is_refused(pocket: Pocket) -> None:
    model, tokenizer = pocket
    cache = model.make_cache(64)
    cache.divided = True
    with pytest.raises(ArgumentError, match="several ranks draft from prompt and answer alone"):
        kvant.stream_generate(model, tokenizer, "Hello", draft_model=model, prompt_cache=cache)


@pytest.mark.usefixtures("paying")
@pytest.mark.parametrize("kind", ["stop", "schema"])
def test_stop_strings_and_grammars(pocket: Pocket, kind: str) -> None:
    """The text ends where it does without drafts, and the grammar sees every token."""
    model, tokenizer = pocket
    prompt, options = REPEATING, {"max_tokens": 60, "sampler": make_sampler(0.8, seed=4), "kv_bits": 0}
    if kind == "stop":
        options["stop"] = ["ball. Sam had"]
    else:
        names = {"type": "array", "items": {"enum": ["red ball", "blue ball"]}, "minItems": 6, "maxItems": 9}
        prompt = '["red ball","blue ball","red ball","blue ball","red ball","blue ball","blue ball"]' * 2
        options["logits_processors"] = [Grammars(tokenizer, model.config.vocab_size).compile("json_schema", names)]
    plain = list(kvant.stream_generate(model, tokenizer, prompt, **options))
    drafted = list(kvant.stream_generate(model, tokenizer, prompt, draft="prompt", **options))
    assert [(r.text, r.token, r.finish_reason) for r in drafted] == [(r.text, r.token, r.finish_reason) for r in plain]
    assert any(r.from_draft for r in drafted)
    assert not any(r.from_draft for r in plain)


@pytest.mark.usefixtures("paying")
@pytest.mark.parametrize("bits", [None, 8])
def test_a_cache_that_goes_on(pocket: Pocket, bits: int | None) -> None:
    """What it held is drafted from, and what it holds afterwards is prompt and answer."""
    model, tokenizer = pocket
    texts = []
    for draft in ("none", "prompt"):
        cache = ModelCache([FullKVCache() for _ in model.layers]) if bits is None else model.make_cache(512)
        held = tokenizer.encode(REPEATING)
        prefill(model, held, cache)
        responses: list[GenerationResponse] = []
        for prompt in ("Tom had", "\nOnce upon a time there was a fox. Tom had a red"):
            responses += list(
                kvant.stream_generate(model, tokenizer, prompt, max_tokens=30, prompt_cache=cache, draft=draft)
            )
            held += [*tokenizer.encode(prompt), *(r.token for r in responses[-30:])]
            assert cache.ids[0] == held
        texts.append([r.token for r in responses])
        if draft == "prompt":
            assert sum(r.from_draft for r in responses) > 4
    assert texts[0] == texts[1]


@pytest.mark.usefixtures("paying")
def test_a_conversation(pocket: Pocket) -> None:
    """Turns, one of them left suspended, and one that goes on where the context is full."""
    model, tokenizer = pocket
    said = []
    for draft in ("none", "prompt"):
        conversation = Conversation(
            model, tokenizer, model.make_cache(160, kv_bits=0), overflow="forget", template_variables={}
        )
        options: dict[str, Any] = {"max_tokens": 40, "sampler": make_sampler(0.5, seed=1), "draft": draft}
        list(conversation.send("Say: red ball, red ball, red ball, red ball.", **options))
        left = conversation.send("Say it again: red ball, red ball.", **options)
        for _ in range(7):
            next(left)
        list(conversation.retry(**options))
        last = list(conversation.send("Tell me a story about a fox named Pip.", **options))
        said.append(conversation.messages)
        counts = last[-1].drafts
        assert (counts is None) == (draft == "none")
    assert said[0] == said[1]


def test_interrupted_drafts(pocket: Pocket) -> None:
    """Ctrl-C at any line: the cache holds the tokens handed out but the last, as they are, or is as it was."""
    model, _ = pocket
    tokens, runs = 25, count(6, 300)
    plain = [t for t, _ in Run(model, PROMPT, model.make_cache(80, kv_bits=0), max_tokens=tokens)]

    def drafted(cache: ModelCache, seed: int) -> DraftedRun:
        return DraftedRun(model, PROMPT, cache, max_tokens=tokens, drafts=KnownDrafts(text=PROMPT + plain, seed=seed))

    counted = Interruption(0)
    counted.of(lambda: list(drafted(model.make_cache(80), 0)))
    interrupted = in_answer = 0
    for seed in range(runs):
        rng = random.Random(seed)
        bits = rng.choice([8, 4, 0, None])

        def make(bits: int | None = bits) -> ModelCache:
            return (
                ModelCache([FullKVCache() for _ in model.layers])
                if bits is None
                else model.make_cache(80, kv_bits=bits)
            )

        cache, heard = make(), list[int]()
        run = drafted(cache, seed)

        def listen(run: Run = run, heard: list[int] = heard) -> None:
            heard.extend(token for token, _ in run)

        interrupted += Interruption(rng.randint(1, int(0.8 * counted.lines))).of(listen)
        ids = cache.ids[0]
        allowed = [PROMPT + run.generated[: max(0, n - 1)] for n in (len(heard), len(run.generated)) if run.generated]
        assert ids in (allowed or [[]])
        in_answer += len(ids) > len(PROMPT)
        fresh = make()
        for step in (ids[: len(PROMPT)], *([token] for token in ids[len(PROMPT) :])):
            if step:
                prefill(model, step, fresh)
        after, expected = (mx.softmax(model(mx.array([[8, 9, 10]]), cache=each)) for each in (cache, fresh))
        assert mx.abs(after - expected).max() < {8: 0.02, 4: 0.2}.get(bits or 0, 1e-4)
    assert interrupted > 0.7 * runs
    assert in_answer > 0.5 * runs


@pytest.mark.usefixtures("paying")
@pytest.mark.parametrize("bits", [0, 8, 4])
def test_many_texts(pocket: Pocket, bits: int) -> None:
    """A story told again, with three samplers: every text is the same where products round alike for any rows.

    Elsewhere every text of a float cache is, and at least 99 of 100 of others: where two tokens are about as likely, a
    step of several may round to the other one.
    """
    model, tokenizer = pocket
    texts, samplers = count(1, 67), ({}, {"temp": 0.7}, {"temp": 1.0, "top_p": 0.95})
    same = drafted = 0
    for number in range(texts):
        question = {"role": "user", "content": f"Tell me a story about a fox named P{number}p."}
        story = (
            f"Once upon a time there was a fox named P{number}p who lived in the field. One day P{number}p went out."
        )
        asked = [question, {"role": "assistant", "content": story}, question]
        ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True)
        for settings in samplers:
            sampler = make_sampler(**settings, seed=number)
            options: dict[str, Any] = {"max_tokens": count(50, 150), "sampler": sampler, "kv_bits": bits}
            plain, other = (
                list(kvant.stream_generate(model, tokenizer, ids, draft=draft, **options))
                for draft in ("none", "prompt")
            )
            same += [each.token for each in plain] == [each.token for each in other]
            drafted += sum(each.from_draft for each in other)
    assert drafted > 5 * texts
    assert same >= (0.99 if bits and not has_small_products() else 1) * texts * len(samplers)
