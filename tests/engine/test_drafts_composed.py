"""Drafts with everything else, of one answer and of many: texts, tokens and caches are those without
drafts.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from support.conversations import conversation_of, count_fed, text_of
from support.counts import count
from support.drafts import draft_by_chance
from support.kinds import Loaded
from support.openblas import has_small_products
from support.runs import Run
from support.schemas import problem

from kvant import batch_generate, stream_generate
from kvant.cache import CacheOptions
from kvant.engine.drafts import Drafts
from kvant.engine.model_drafts import ModelDrafts
from kvant.engine.request import Request
from kvant.engine.scheduler import Scheduler
from kvant.errors import ArgumentError
from kvant.models import Decoder, LanguageModel
from kvant.sample_utils import make_sampler
from kvant.text.grammar import Grammars

Pocket = tuple[Decoder, Any]
REPEATING = "Tom had a red ball. Sam had a blue ball. " * 4
NAMES = '["red ball","blue ball","red ball","blue ball","red ball","blue ball","blue ball"]' * 2
# texts, tokens, ids of the caches, drafted tokens
Made = tuple[list[str], list[list[int]], list[list[int]], int]


def _one(pocket: Pocket, prompts: Sequence[str], **options: Any) -> Made:
    texts, tokens, ids, drafted = [], [], [], 0
    for prompt in prompts:
        cache = pocket[0].make_cache(400, kv_bits=0)
        responses = list(stream_generate(*pocket, prompt, prompt_cache=cache, **options))
        assert (responses[-1].drafts is None) == (not {"draft", "draft_model"} & {*options})
        texts.append("".join(response.text for response in responses))
        tokens.append([response.token for response in responses])
        ids += cache.ids
        drafted += sum(response.from_draft for response in responses)
    return texts, tokens, ids, drafted


def _many(pocket: Pocket, prompts: Sequence[str], **options: Any) -> Made:
    made = batch_generate(
        *pocket, prompts, return_token_ids=True, return_prompt_caches=True, kv_bits=0, **options
    )
    assert (made.stats.drafts is None) == (not {"draft", "draft_model"} & {*options})
    ids = [cache.ids for cache in made.caches or () if cache is not None]
    return (
        made.texts,
        made.token_ids or [],
        ids,
        0 if made.stats.drafts is None else made.stats.drafts.accepted,
    )


WAYS = pytest.mark.parametrize("answer", [_one, _many])
DRAFTS: dict[str, Callable[[LanguageModel], dict[str, Any]]] = {
    "prompt": lambda model: {"draft": "prompt"},
    "model": lambda model: {"draft_model": model, "num_draft_tokens": 7},
    "mtp": lambda model: {"draft": "mtp", "num_draft_tokens": 7},
}


@pytest.fixture
def paying(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts seem to pay, whatever this machine is doing."""
    draft_by_chance(monkeypatch, 7)


@WAYS
@pytest.mark.usefixtures("paying")
def test_stop_strings_and_grammars(pocket: Pocket, headed: Pocket, answer: Any) -> None:
    """A text, and its cache, ends where it does without drafts; the grammar sees every token."""
    drafts = {name: asked(pocket[0]) for name, asked in DRAFTS.items()}
    drafted = dict.fromkeys(DRAFTS, 0)
    options: dict[str, Any] = {"max_tokens": 60, "sampler": make_sampler(0.8, seed=4)}
    prompts = [REPEATING, "Once upon a time"]
    models = dict.fromkeys(DRAFTS, pocket) | {"mtp": headed}
    plain = answer(pocket, prompts, **options)
    for stop in (plain[0][0][40:46], plain[0][0][-8:-2]):
        options["stop"] = stop
        expected = answer(pocket, prompts, **options)
        for name, asked in drafts.items():
            made = answer(models[name], prompts, **options, **asked)
            assert made[:3] == expected[:3], name
            drafted[name] += made[3]
    assert all(drafted.values()), drafted
    names = {"type": "array", "items": {"enum": ["red ball", "blue ball"]}, "minItems": 6, "maxItems": 9}
    grammar = Grammars(pocket[1], pocket[0].config.vocab_size).compile("json_schema", names)
    options |= {"stop": None, "logits_processors": [grammar]}
    expected = answer(pocket, [NAMES], **options)
    assert problem(json.loads(expected[0][0]), names) is None
    for name, asked in drafts.items():
        made = answer(models[name], [NAMES], **options, **asked)
        assert made[:3] == expected[:3], name
        assert made[3], name


@WAYS
@pytest.mark.parametrize("kind", DRAFTS)
def test_by_what_pays_on_this_machine(headed: Pocket, small: LanguageModel, answer: Any, kind: str) -> None:
    prompts = [" ".join(str(1 + (i + n) % 5) for i in range(18)) for n in range(2)]
    plain, drafted = (answer(headed, prompts, max_tokens=40, **asked) for asked in ({}, DRAFTS[kind](small)))
    assert drafted[:3] == plain[:3]


REFUSED: list[tuple[dict[str, Any], str]] = [
    *(
        ({"draft_model": ..., "num_draft_tokens": n}, f"num_draft_tokens is {n}; expected 1")
        for n in (0, 8, True, 2.5)
    ),
    ({"num_draft_tokens": 3}, "num_draft_tokens is 3, .*without"),
    ({"draft_model": ..., "draft": "prompt"}, "draft is 'prompt'; expected 'none'"),
    ({"draft_model": "pocket"}, "draft_model is a str; expected a model"),
    ({"draft": "promt"}, "draft is 'promt'; expected 'none' or 'prompt' or 'mtp'"),
    ({"draft": "mtp"}, r"draft is 'mtp'; the model was loaded without its head: load\(..., mtp=True\)"),
]


@WAYS
@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_refused(pocket: Pocket, answer: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        answer(
            pocket, ["a"], **{name: pocket[0] if value is ... else value for name, value in options.items()}
        )


@pytest.mark.parametrize("loaded", ["falcon_h1"], indirect=True)
def test_refused_by_the_model(pocket: Pocket, headed: Pocket, loaded: Loaded) -> None:
    """States cannot go back; side by side, nor with determinism; ranks have no part of a draft model."""
    (states, _), (model, _) = loaded, pocket
    own = ModelDrafts(model=model)
    for target, drafts, words in (
        (model, ModelDrafts(model=states), "draft_model has falcon_h1's layers; its states cannot"),
    ):
        with pytest.raises(ArgumentError, match=words):
            Run(target, [5], target.make_cache(64), drafts=drafts)
    for target, given, deterministic, words in (
        (states, Drafts(), False, "a model that kvant computes"),
        (model, Drafts(), True, "deterministic"),
        (model, own, False, "draft_model is not for this pool"),
    ):
        pool = target.make_pool(256, sequences=1, options=CacheOptions(kv_bits=0))
        with pytest.raises(ArgumentError, match=words):
            Scheduler(target, pool, max_batch=1, deterministic=deterministic).submit(
                Request([5], drafts=given)
            )
    for options in DRAFTS.values():
        with pytest.raises(ArgumentError, match=r"draft.* is .*deterministic"):
            _many(headed, ["a"], deterministic=True, **options(model))
    cache = model.make_cache(64)
    cache.pool.divided = True
    with pytest.raises(ArgumentError, match="several ranks draft only from prompt and answer"):
        stream_generate(*pocket, "Hello", draft_model=model, prompt_cache=cache)


@pytest.mark.usefixtures("paying")
def test_a_conversation(pocket: Pocket, headed: Pocket) -> None:
    """Turns, one of them left suspended, and one that goes on where the context is full."""
    said = []
    for draft in ("none", "prompt", "mtp"):
        model = headed if draft == "mtp" else pocket
        conversation = conversation_of(model, 160, overflow="forget", template_variables={})
        options: dict[str, Any] = {"max_tokens": 40, "sampler": make_sampler(0.5, seed=1), "draft": draft}
        list(conversation.send("Say: red ball, red ball, red ball, red ball.", **options))
        left = conversation.send("Say it again: red ball, red ball.", **options)
        for _ in range(7):
            next(left)
        list(conversation.retry(**options))
        last = list(conversation.send("Tell me a story about a fox named Pip.", **options))
        said.append(conversation.messages)
        assert (last[-1].drafts is None) == (draft == "none")
    assert said[0] == said[1] == said[2]


@pytest.mark.usefixtures("paying")
def test_a_conversation_keeps_the_draft_models_cache(pocket: Pocket, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second turn's prompt has both; neither model reads more than what is new."""
    fed, said = count_fed(monkeypatch), []
    for options in ({}, {"draft_model": pocket[0], "num_draft_tokens": 2}):
        conversation = conversation_of(pocket, 400, 8)
        said.append(text_of(conversation.send("Tell me a story about a fox.", max_tokens=40, **options)))
        fed.clear()
        said.append(text_of(conversation.send("And now one about a goat.", max_tokens=20, **options)))
        assert max(fed) < 30
    assert said[:2] == said[2:]


@pytest.mark.usefixtures("paying")
@pytest.mark.parametrize("bits", [0, 8, 4])
@pytest.mark.parametrize("draft", ["prompt", "mtp"])
def test_many_texts(pocket: Pocket, headed: Pocket, draft: str, bits: int) -> None:
    """A story told again, with three samplers: every text is the same where products round alike for any
    rows.

    Elsewhere every text of a float cache is, and at least 99 of 100 of others: where two tokens are about as
    likely, a step of several may round to the other one.
    """
    model, tokenizer = headed if draft == "mtp" else pocket
    texts, samplers = count(1, 67), ({}, {"temp": 0.7}, {"temp": 1.0, "top_p": 0.95})
    same = drafted = 0
    for number in range(texts):
        question = {"role": "user", "content": f"Tell me a story about a fox named P{number}p."}
        story = f"Once upon a time there was a fox named P{number}p who lived in the field. One day P{number}p went out."
        asked = [question, {"role": "assistant", "content": story}, question]
        ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True)
        for settings in samplers:
            sampler = make_sampler(**settings, seed=number)
            options: dict[str, Any] = {"max_tokens": count(50, 150), "sampler": sampler, "kv_bits": bits}
            plain, other = (
                list(stream_generate(model, tokenizer, ids, draft=source, **options))
                for source in ("none", draft)
            )
            same += [each.token for each in plain] == [each.token for each in other]
            drafted += sum(each.from_draft for each in other)
    assert drafted > 5 * texts
    assert same >= (0.99 if bits and not has_small_products() else 1) * texts * len(samplers)
