"""A draft model: the text of a run without it, its own cache, and what is refused."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kvant  # isort: skip  (before MLX: it loads a faster BLAS)
import mlx.core as mx
import pytest
from support.counts import count
from support.draft_models import ChanceModelDrafts, save_draft_model
from support.interruption import Interruption
from support.kinds import load_kind

from kvant.cache import ModelCache
from kvant.engine import model_drafter
from kvant.engine.conversation import Conversation
from kvant.engine.drafted_run import DraftedRun
from kvant.engine.drafting.choice import StepCosts
from kvant.engine.model_drafter import ModelDrafter
from kvant.engine.model_drafts import ModelChoice, ModelDrafts
from kvant.engine.run import Run
from kvant.errors import ArgumentError, ModelError
from kvant.models import Decoder, LanguageModel
from kvant.sample_utils import make_sampler
from kvant.text.tokenizer import Tokenizer

Pocket = tuple[Decoder, Tokenizer]
PROMPT = [(7 * i) % 1000 + 20 for i in range(40)]
TOKENS = 16
SAMPLERS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temp": 0.9, "seed": 3},
    "filtered": {"temp": 1.3, "top_p": 0.95, "seed": 8},
}


@pytest.fixture(scope="module")
def small(pocket: Pocket, pocket_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    """A random model with pocket's tokenizer; its vocabulary is padded to another size."""
    size = pocket[0].config.vocab_size + 64
    folder = save_draft_model(tmp_path_factory.mktemp("small") / "model", pocket_folder, vocab_size=size)
    return kvant.load(folder)[0]


@pytest.mark.parametrize("bits", [0, 8, 4])
def test_the_same_text(pocket: Pocket, small: LanguageModel, bits: int) -> None:
    """Where the cache is quantized, rounding may decide a draw: a step of several tokens and several steps differ."""
    model, _ = pocket
    differing = 0
    cases = [("greedy", model), ("filtered", model), ("seeded", small), ("greedy", small)]
    for sampler, draft_model in cases[:: 1 if bits == 8 else 2]:
        settings: dict[str, Any] = {"max_tokens": TOKENS, "sampler": make_sampler(**SAMPLERS[sampler])}
        plain = list(Run(model, PROMPT, model.make_cache(80, kv_bits=bits), **settings))
        text = [token for token, _ in plain]
        cache = model.make_cache(80, kv_bits=bits)
        drafts = ChanceModelDrafts(model=draft_model, vocab_size=model.config.vocab_size)
        run = DraftedRun(model, PROMPT, cache, drafts=drafts, **settings)
        for number, (token, logprobs) in enumerate(run):
            assert mx.abs(mx.exp(logprobs) - mx.exp(plain[number][1])).max() < {0: 1e-4, 8: 0.05, 4: 0.1}[bits]
            if token != text[number]:
                differing += 1
                break
            assert cache.ids[0] == PROMPT + text[:number]
        counts = run.drafts
        assert counts is not None
        assert counts.drafted > number // 2
        if draft_model is model and sampler == "greedy":
            assert counts.accepted > 0.9 * counts.drafted
            assert counts.steps < 0.6 * TOKENS
    assert differing <= (bits > 0)


@pytest.mark.usefixtures("without_compilation")
@pytest.mark.parametrize("compiled", [False, True])
def test_what_it_proposes_and_takes_back(pocket: Pocket, monkeypatch: pytest.MonkeyPatch, *, compiled: bool) -> None:
    """After any tokens, those it drafted and others, the model's greedy continuation without a cache."""
    monkeypatch.setattr(model_drafter, "should_compile", lambda: compiled)
    model, _ = pocket
    rng = random.Random(4)
    cache = model.make_cache(64, kv_bits=0)
    drafter = ModelDrafter(model, cache, model.config.vocab_size, prefill_step_size=4)
    text: list[int] = []
    drafter.extend([])
    new = PROMPT[:11]
    for _ in range(6):
        drafter.extend(new)
        text += new
        wanted = rng.randint(1, 7)
        drafted = drafter.propose(wanted)
        assert len(drafted) == wanted
        logits = model(mx.array([text + drafted[:-1]]))[0, len(text) - 1 :]
        assert drafted == mx.argmax(logits, axis=-1).tolist()
        assert cache.ids[0] == text + drafted[:-1]
        kept = rng.randint(0, min(wanted, 3))
        new = [*drafted[:kept], *rng.choices(range(20, 1000), k=rng.randint(0 if kept else 1, 2))]
    assert len(text) > 18
    assert (drafter._compiled is not None) == compiled


def test_it_feeds_only_what_it_has_not_seen(pocket: Pocket, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = pocket
    fed: list[int] = []
    begin = ModelCache.begin

    def counting(cache: ModelCache, inputs: mx.array, *rest: Any) -> tuple[int, ...]:
        fed.append(inputs.shape[1])
        return begin(cache, inputs, *rest)

    monkeypatch.setattr(ModelCache, "begin", counting)
    drafter = ModelDrafter(model, model.make_cache(64), model.config.vocab_size, prefill_step_size=16)
    drafter.extend(PROMPT)
    assert not fed
    first = drafter.propose(4)
    assert fed == [16, 16, 8, 1, 1, 1]
    for new, expected in (([*first, 50], [2, 1]), ([60], [1, 1]), ([61, 62, 63], [3, 1])):
        fed.clear()
        drafter.extend(new)
        drafter.propose(2)
        assert fed == expected


def test_no_id_that_the_model_does_not_have(small: LanguageModel) -> None:
    size = small.config.vocab_size // 2  # so that many ids are beyond it
    whole = ModelDrafter(small, small.make_cache(64, kv_bits=0), small.config.vocab_size)
    cut = ModelDrafter(small, small.make_cache(64, kv_bits=0), size)
    beyond = 0
    for start in range(12):
        tokens = [(37 * start + 11 * n) % size for n in range(3)]
        proposals = []
        for drafter in (whole, cut):
            drafter.extend(tokens)
            proposals.append(drafter.propose(4))
        known = next((n for n, token in enumerate(proposals[0]) if token >= size), 4)
        assert proposals[1] == proposals[0][:known]
        beyond += known < 4
    assert 0 < beyond < 12
    cut.extend([small.config.vocab_size])
    assert cut.propose(3) == []
    assert cut.ended == f"token {small.config.vocab_size} is not in the draft model's vocabulary"


def test_its_context_ends_before_the_models(pocket: Pocket, pocket_folder: Path, tmp_path: Path) -> None:
    model, _ = pocket
    folder = save_draft_model(
        tmp_path / "m", pocket_folder, vocab_size=model.config.vocab_size, max_position_embeddings=48
    )
    short = kvant.load(folder)[0]
    cache = model.make_cache(128)
    drafts = ModelDrafts(model=short, vocab_size=model.config.vocab_size)
    run = DraftedRun(model, PROMPT, cache, drafts=drafts, max_tokens=TOKENS)
    made = run._drafter
    assert isinstance(made, ModelDrafter)
    plain = [token for token, _ in Run(model, PROMPT, model.make_cache(128), max_tokens=TOKENS)]
    assert [token for token, _ in run] == plain
    made.extend(range(48))
    assert made.propose(3) == []
    choice = drafts.choice(StepCosts(), made)
    assert not choice.may_draft(1)
    assert choice.counts.off == "the draft model's context, 48 tokens, is full"


def test_windows_and_states(pocket: Pocket, tmp_path: Path) -> None:
    """A window goes back far enough; a state cannot, and is refused by name."""
    model, _ = load_kind("mistral", tmp_path / "window")
    drafts = ChanceModelDrafts(model=model, vocab_size=128, num_draft_tokens=7)
    prompt = [n % 100 + 6 for n in range(40)]
    cache = model.make_cache(128)
    run = DraftedRun(model, prompt, cache, drafts=drafts, max_tokens=TOKENS)
    assert [t for t, _ in run] == [t for t, _ in Run(model, prompt, model.make_cache(128), max_tokens=TOKENS)]
    assert run.drafts is not None
    assert run.drafts.accepted
    states, _ = load_kind("falcon_h1", tmp_path / "states")
    with pytest.raises(ArgumentError, match=r"draft_model has falcon_h1's layers; .* its states cannot"):
        ModelDrafts(model=states, vocab_size=128).make_cache()
    drafts = ModelDrafts(model=model, vocab_size=128, tokens=64)
    with pytest.raises(ArgumentError, match=r"draft_model is given; .* this model's linear or convolution layers"):
        DraftedRun(states, prompt, states.make_cache(64), drafts=drafts)


@pytest.mark.parametrize(
    ("each", "accepted", "size", "off"),
    [
        (0.1, 5, 5, None),
        (0.1, 1, 1, None),
        (1.2, 5, 0, "a step with one drafted token took 2.2 plain ones, "),
        (0.2, 0, 0, "a step with one drafted token took 1.2 plain ones, 0 of "),
    ],
)
def test_the_choice(each: float, accepted: int, size: int, off: str | None) -> None:
    """It drafts what pays and says why nothing does. ``each``: a drafted token's cost in plain steps."""
    costs = StepCosts()
    for _ in range(3):
        costs.add_single(1.0)
    drafter: Any = SimpleNamespace(ended=None)
    made = ModelChoice(costs, (1, 3, 5), drafter)
    for _ in range(20):
        if not made.may_draft(1):
            break
        drafted = made.count(0, 7)
        made.counts.drafted += drafted
        made.counts.accepted += min(drafted, accepted)
        made.verified(drafted, min(drafted, accepted), 1.0 + each * drafted)
    assert made.count(0, 7) == size
    assert made.count(0, 2) == min(size, 1)
    assert made.counts.off is None if off is None else str(made.counts.off).startswith(off)
    assert off is None or made.counts.drafted < 20


def test_a_conversation_keeps_its_cache(pocket: Pocket, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = pocket
    read: list[int] = []
    prefill = model_drafter.prefill

    def reading(of: Any, tokens: Any, cache: Any, **options: Any) -> mx.array:
        read.append(len(tokens))
        return prefill(of, tokens, cache, **options)

    monkeypatch.setattr(model_drafter, "prefill", reading)
    monkeypatch.setattr(ModelDrafts, "choice", ChanceModelDrafts.choice)
    monkeypatch.setattr(ModelDrafts, "seed", 1, raising=False)

    def talk(**options: Any) -> list[str]:
        conversation = Conversation(model, tokenizer, model.make_cache(400))
        return [
            "".join(r.text for r in conversation.send(text, max_tokens=20, **options))
            for text in ("Tell me a story about a fox.", "And now one about a goat who lived on a hill.")
        ]

    plain = talk()
    assert not read
    assert talk(draft_model=model, num_draft_tokens=2) == plain
    longest = sorted(read)[-2:]
    assert longest[-1] < 40  # the second turn's prompt has both; only what is new is read


def test_interrupted(pocket: Pocket, small: LanguageModel) -> None:
    """Anywhere: the model's cache has prompt and answer but the last, and the draft model's can be used again."""
    model, _ = pocket
    runs, interrupted = count(5, 300), 0
    plain = [token for token, _ in Run(model, PROMPT, model.make_cache(80), max_tokens=6)]
    kept = {id(draft): draft.make_cache(80) for draft in (model, small)}

    def make(number: int) -> tuple[DraftedRun, ModelCache]:
        draft_model = (model, small)[number % 2]
        drafts = ChanceModelDrafts(
            model=draft_model, vocab_size=model.config.vocab_size, cache=kept[id(draft_model)], seed=number
        )
        cache = model.make_cache(80)
        return DraftedRun(model, PROMPT, cache, drafts=drafts, max_tokens=6), cache

    counted = Interruption(0)
    counted.of(lambda: list(make(0)[0]))
    for number in range(runs):
        run, cache = make(number)
        at = random.Random(number).randint(counted.lines // 3, counted.lines)
        heard: list[int] = []
        interrupted += Interruption(at).of(lambda run=run, heard=heard: heard.extend(t for t, _ in run))  # type: ignore[misc]
        assert run.generated == plain[: len(run.generated)]
        assert run.generated[: len(heard)] == heard
        # A token that was counted and not handed out is not in the cache.
        ends = {max(0, len(run.generated) - 1), len(run.generated), max(0, len(heard) - 1), len(heard)}
        assert cache.ids[0] in [PROMPT, *(PROMPT + plain[:end] for end in ends), *([] if heard else [[]])]
        assert [token for token, _ in make(number)[0]] == plain
    assert interrupted > runs // 2


def test_refused(pocket: Pocket, tmp_path: Path, pocket_folder: Path) -> None:
    model, tokenizer = pocket

    def ask(**options: Any) -> None:
        kvant.stream_generate(model, tokenizer, PROMPT, max_tokens=4, **options)

    for number in (0, 8, True, 2.5):
        with pytest.raises(ArgumentError, match=f"num_draft_tokens is {number}; expected 1 to 7"):
            ask(draft_model=model, num_draft_tokens=number)
    with pytest.raises(ArgumentError, match="has no effect without draft_model"):
        ask(num_draft_tokens=3)
    with pytest.raises(ArgumentError, match="draft is 'prompt'; expected 'none' beside a draft_model"):
        ask(draft_model=model, draft="prompt")
    with pytest.raises(ArgumentError, match="draft_model is a str; expected a model"):
        ask(draft_model="pocket")
    other, _ = load_kind("qwen2", tmp_path / "other")
    for _ in range(2):
        with pytest.raises(
            ModelError, match=r"the draft model's tokenizer differs: token 0 is '<unk>' there and '.*' here"
        ):
            ask(draft_model=other)
    (tmp_path / "other" / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="was changed after the draft model was loaded"):
        ask(draft_model=other)
    other.identity = None
    with pytest.raises(
        ModelError, match=f"vocabulary has 128 tokens, and the model's {model.config.vocab_size}; a draft"
    ):
        ask(draft_model=other)


def test_generate_takes_it(pocket: Pocket) -> None:
    model, tokenizer = pocket
    prompt = "Once upon a time"
    expected = kvant.generate(model, tokenizer, prompt, max_tokens=30)
    assert kvant.generate(model, tokenizer, prompt, max_tokens=30, draft_model=model, num_draft_tokens=7) == expected
    responses = list(kvant.stream_generate(model, tokenizer, prompt, 30, model))
    last = responses[-1].drafts
    assert last is not None
    assert sum(response.from_draft for response in responses) == last.accepted
