"""A draft model: what it proposes, what it reads, when it stops, and which one is refused."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kvant  # isort: skip  (before MLX: it loads a faster BLAS)
import mlx.core as mx
import pytest
from kvant.engine.drafted_run import DraftedRun
from kvant.engine.model_drafter import ModelDrafter
from support.conversations import count_fed
from support.kinds import load_kind

from kvant.engine import model_drafter
from kvant.engine.drafting.choice import StepCosts
from kvant.engine.model_drafts import ModelChoice, ModelDrafts
from kvant.engine.run import Run
from kvant.errors import ModelError
from kvant.models import Decoder, LanguageModel
from kvant.text.tokenizer import Tokenizer

Pocket = tuple[Decoder, Tokenizer]
PROMPT = [(7 * i) % 1000 + 20 for i in range(40)]
TOKENS = 16


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
    model, fed = pocket[0], count_fed(monkeypatch)
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


def test_its_context_ends_before_the_models(pocket: Pocket, small: LanguageModel) -> None:
    model, _ = pocket
    prompt, options = PROMPT * 4, {"max_tokens": TOKENS}
    drafts = ModelDrafts(model=small, vocab_size=model.config.vocab_size)
    run = DraftedRun(model, prompt[:140], model.make_cache(256), drafts=drafts, **options)
    plain = [token for token, _ in Run(model, prompt[:140], model.make_cache(256), **options)]
    assert [token for token, _ in run] == plain
    made = ModelDrafter(small, small.make_cache(146), model.config.vocab_size)
    made.extend(prompt[:147])
    assert made.propose(3) == []
    choice = drafts.choice(StepCosts(), made)
    assert not choice.may_draft(1)
    assert choice.counts.off == "the draft model's context, 146 tokens, is full"


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


def test_another_tokenizer_is_refused(pocket: Pocket, tmp_path: Path) -> None:
    model, tokenizer = pocket
    other, _ = load_kind("qwen2", tmp_path / "other")

    def ask() -> None:
        kvant.stream_generate(model, tokenizer, PROMPT, max_tokens=4, draft_model=other)

    for _ in range(2):
        with pytest.raises(ModelError, match="tokenizer differs: token 0 is '<unk>' there and"):
            ask()
    (tmp_path / "other" / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="was changed after the draft model was loaded"):
        ask()
    other.identity = None
    with pytest.raises(ModelError, match=f"has 128 tokens, and the model's {model.config.vocab_size}"):
        ask()
