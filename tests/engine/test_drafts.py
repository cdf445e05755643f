"""One answer with drafts, of a known text and of a draft model: the text and the cache of a run without
them.
"""

import random
from functools import partial
from typing import Any

import mlx.core as mx
import pytest
from support.counts import count
from support.drafts import KnownDrafts, draft_by_chance
from support.interruption import Interruption
from support.kinds import Loaded
from support.runs import Run

from kvant import stream_generate
from kvant.cache import ModelCache
from kvant.engine.drafts import Drafts
from kvant.engine.model_drafts import ModelDrafts
from kvant.models import Decoder, LanguageModel
from kvant.sample_utils import make_logits_processors, make_sampler

Pocket = tuple[Decoder, Any]
PROMPT = [(7 * i) % 1000 + 20 for i in range(40)]
TOKENS = 24
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "filtered": {"sampler": make_sampler(1.3, top_p=0.95, seed=8)},
    "processed": {
        "sampler": make_sampler(0.9, seed=3),
        "logits_processors": make_logits_processors({30: 1.0}, repetition_penalty=1.2, frequency_penalty=0.3),
    },
}


@pytest.fixture(autouse=True)
def _by_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    draft_by_chance(monkeypatch, 1)


def _drafts(kind: str, model: LanguageModel, small: Any, text: list[int]) -> Drafts:
    """Of the known text, or of the model itself, or of a smaller one."""
    if kind == "known":
        return KnownDrafts(text=text, seed=3)
    draft_model = model if kind == "own" else small
    return ModelDrafts(model=draft_model, num_draft_tokens=7)


def _handed_out(cache: ModelCache) -> list[int]:
    """What a cache holds, but for what a step verified and is to come."""
    assert 0 <= cache.sequence.lookahead <= 7
    return cache.ids[: cache.offset - cache.sequence.lookahead]


@pytest.mark.parametrize(
    ("kind", "bits", "settings"),
    [
        *[
            ("known", 0, "greedy"),
            ("known", 0, "filtered"),
            ("known", 8, "filtered"),
            ("known", 4, "processed"),
        ],
        *[("own", 0, "greedy"), ("own", 8, "filtered"), ("own", 4, "greedy")],
        *[("small", 0, "processed"), ("small", 8, "greedy")],
    ],
)
def test_the_same_text_and_cache(
    pocket: Pocket, small: LanguageModel, kind: str, bits: int, settings: str
) -> None:
    model, _ = pocket
    plain_cache, cache = (model.make_cache(128, kv_bits=bits) for _ in range(2))
    options: dict[str, Any] = {"max_tokens": TOKENS, **SETTINGS[settings]}
    plain_run = Run(model, PROMPT, plain_cache, **options)
    plain = list(plain_run)
    answer = [token for token, _ in plain]
    run = Run(model, PROMPT, cache, drafts=_drafts(kind, model, small, PROMPT + answer), **options)
    for number, (token, logprobs) in enumerate(run):
        assert token == answer[number]
        assert _handed_out(cache) == PROMPT + answer[:number]
        assert mx.abs(mx.exp(logprobs) - mx.exp(plain[number][1])).max() < {0: 1e-4, 8: 0.05, 4: 0.1}[bits]
    counts = run.drafts
    assert counts is not None
    assert plain_run.drafts is None
    assert counts.drafted > TOKENS / 3
    if kind == "known" or (kind, settings) == ("own", "greedy"):
        assert counts.steps < 0.6 * TOKENS
        assert 0 < counts.accepted <= counts.drafted - (kind == "known")
    if (kind, settings) == ("own", "greedy"):
        assert counts.accepted > 0.9 * counts.drafted
    for each in (run, plain_run):
        each.scheduler.keep_last()
    assert cache.ids == plain_cache.ids == PROMPT + answer
    after, expected = (mx.softmax(model(mx.array([[5, 6, 7]]), cache=each)) for each in (cache, plain_cache))
    assert mx.abs(after - expected).max() < {0: 1e-5, 8: 0.01, 4: 0.1}[bits]


def test_ends(pocket: Pocket) -> None:
    """A stop token, a stop string, a number of tokens, a full reservation; a stop or another run in a
    step's middle.
    """
    model, tokenizer = pocket
    sampler = make_sampler(1.3, seed=2)
    plain = [token for token, _ in Run(model, PROMPT, model.make_cache(60), sampler=sampler)]

    def drafted(cache: ModelCache, seed: int = 0, mistakes: float = 0.1, **options: Any) -> Run:
        drafts = KnownDrafts(text=[*PROMPT, *plain, *[1] * 20], mistakes=mistakes, seed=seed)
        return Run(model, PROMPT, cache, sampler=sampler, drafts=drafts, **options)

    run = drafted(model.make_cache(60), mistakes=0)
    assert [token for token, _ in run] == plain
    assert run.finish_reason == "context"
    num_lookahead = 0
    for end in range(1, 20, 3):
        stop = plain[end]
        answer = plain[: plain.index(stop) + 1]
        drafts: Any = KnownDrafts(text=PROMPT + plain, mistakes=0)
        told = stream_generate(
            *pocket, PROMPT, end + 3, sampler=sampler, draft=drafts, stop=tokenizer.decode([stop])
        )
        assert [response.finish_reason for response in told][-1] == "stop"
        for options, reason in (({"stop_tokens": {stop}}, "stop"), ({"max_tokens": len(answer)}, "length")):
            cache = model.make_cache(128)
            run = drafted(cache, end, **options)
            assert [token for token, _ in run] == answer
            assert run.finish_reason == reason
            assert cache.ids == [*PROMPT, *answer[:-1]]
            run.scheduler.keep_last()
            assert cache.ids == [*PROMPT, *answer]
        for stopped in (True, False):
            cache, fresh = model.make_cache(128), model.make_cache(128)
            run = drafted(cache, end)
            assert [next(run)[0] for _ in answer] == answer
            num_lookahead += cache.sequence.lookahead
            if stopped:
                run.scheduler.close()
                assert cache.ids == [*PROMPT, *answer[:-1]]
            list(Run(model, PROMPT, fresh, sampler=sampler, max_tokens=len(answer)))
            most = max(1, cache.sequence.lookahead - 1)  # so that the cache is as long as it was
            others = [
                [token for token, _ in Run(model, [5, 6], each, max_tokens=most)] for each in (cache, fresh)
            ]
            assert others[0] == others[1]
            assert cache.ids == fresh.ids
            if not stopped:
                with pytest.raises(RuntimeError, match="the prompt cache changed"):
                    list(run)
    assert num_lookahead > 5


WINDOWS = [("mistral", 8), ("gemma3_text", 8), ("gpt_oss", 0), ("llama4", 0)]
STATES = [("falcon_h1", 8, "known"), ("qwen3_next", 0, "known")]  # no draft model has them


@pytest.mark.parametrize(
    ("loaded", "bits", "kind"),
    [*((*each, kind) for each in WINDOWS for kind in ("known", "own")), *STATES],
    indirect=["loaded"],
)
def test_windows_states_and_bridged_models(loaded: Loaded, bits: int, kind: str) -> None:
    """Past the window, in steps of up to 8 of which some tokens are taken back; of states they are fed
    again.
    """
    model, _ = loaded
    prompt = [token % 100 + 20 for token in PROMPT]
    sampler = make_sampler(0.7, seed=2) if kind == "known" else None
    cache, another = (model.make_cache(128, kv_bits=bits) for _ in range(2))
    plain = [t for t, _ in Run(model, prompt, another, max_tokens=50, sampler=sampler)]
    drafts = _drafts(kind, model, None, prompt + plain)
    run = Run(model, prompt, cache, max_tokens=50, sampler=sampler, drafts=drafts)
    for number, (token, _) in enumerate(run):
        assert token == plain[number]
        assert _handed_out(cache) == prompt + plain[:number]
    assert run.drafts is not None
    assert run.drafts.tokens_a_step > (1.5 if kind == "known" else 1)


@pytest.mark.parametrize("kind", ["none", "known", "own", "small"])
def test_interrupted(pocket: Pocket, small: LanguageModel, kind: str) -> None:
    """At any line: the cache holds the tokens handed out but the last, or is as it was; a draft model's is
    used on.
    """
    model, first = pocket[0], [5, 6, 7]
    options: dict[str, Any] = {"max_tokens": 16, "prefill_step_size": 16}
    plain = [t for t, _ in Run(model, first + PROMPT, model.make_cache(80, kv_bits=0), **options)]
    drafts = None
    if kind != "none":
        drafts = _drafts(kind, model, small, [*first, *PROMPT, *plain])
        drafts = drafts.for_pool(model.make_cache(80, kv_bits=0).pool)

    def fed(cache: ModelCache, ids: list[int]) -> ModelCache:
        """In a run's steps: a product of several rows differs from that of one in its last bits."""
        prompt = ids[3 : 3 + len(PROMPT)]
        for step in (
            ids[:3],
            *(prompt[i : i + 16] for i in range(0, len(prompt), 16)),
            *([t] for t in ids[43:]),
        ):
            mx.eval(model(mx.array([step]), cache=cache))
        return cache

    def heard(cache: ModelCache) -> tuple[Run, list[int]]:
        return Run(model, PROMPT, cache, drafts=drafts, **options), []

    def listen(run: Run, heard: list[int]) -> None:
        heard.extend(token for token, _ in run)

    counted = Interruption(0)
    counted.of(partial(listen, *heard(fed(model.make_cache(80), first))))
    interrupted = in_answer = 0
    for seed in range(runs := count(20 if kind == "none" else 8, 200)):
        rng = random.Random(f"{kind} {seed}")
        bits, split = rng.choice([8, 4, 0]), rng.random() < 0.5
        cache, fresh = (model.make_cache(80, kv_bits=bits, bias_split=split) for _ in range(2))
        run, tokens = heard(fed(cache, first))
        begin = counted.lines // 3 if seed % 4 else 1  # behind the prompt, or in it
        interrupted += Interruption(rng.randint(begin, int(0.8 * counted.lines))).of(
            partial(listen, run, tokens)
        )
        assert run.generated[: len(tokens)] == tokens
        ids, told = _handed_out(cache), first + PROMPT + run.generated
        # a token may be lost on its way to the caller
        assert ids in (told, told[:-1] if run.generated else first)
        in_answer += len(ids) > len(first + PROMPT)
        cache.trim(cache.sequence.lookahead)
        after, expected = (
            mx.softmax(model(mx.array([[8, 9, 10]]), cache=each)) for each in (cache, fed(fresh, ids))
        )
        if kind == "none":
            assert mx.array_equal(after, expected)
        assert mx.abs(after - expected).max() < {8: 0.02, 4: 0.2}.get(bits or 0, 1e-4)
    assert interrupted > 0.7 * runs
    assert in_answer > 0.3 * runs
    assert [token for token, _ in heard(fed(model.make_cache(80, kv_bits=0), first))[0]] == plain
