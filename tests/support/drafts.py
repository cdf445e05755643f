"""Drafts for tests: of a text that is known, and of small random models, as many tokens as chance says."""

import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kvant.engine.drafting.batch_choice import BatchChoice

from kvant.engine.drafting.choice import Choice, StepCosts
from kvant.engine.drafting.drafter import Drafter
from kvant.engine.drafting.drafts import Drafts
from kvant.engine.model_drafts import ModelDrafts
from support.checkpoints import qwen2_config, reference_model, save_checkpoint


class KnownText:
    """Proposes a text that is known, with mistakes."""

    name, is_free, match = "known", True, 5

    def __init__(self, text: Sequence[int], mistakes: float, rng: random.Random) -> None:
        self.taken = 0
        self._text, self._mistakes, self._rng = text, mistakes, rng

    def extend(self, tokens: Sequence[int]) -> None:
        self.taken += len(tokens)

    def propose(self, count: int) -> list[int]:
        rng = self._rng
        guess = self._text[self.taken : self.taken + count]
        return [token if rng.random() >= self._mistakes else token ^ 1 for token in guess]


class Chance(Choice):
    """Drafts 0, 1, 3 or 7 tokens."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(StepCosts())
        self._rng = rng

    def count(self, match: int, most: int) -> int:
        wanted = min(most, self._rng.choice((0, 1, 3, 7, 7)))
        return max(size for size in (0, 1, 3, 7) if size <= wanted)

    def may_draft(self, longest: int) -> bool:
        return self._rng.random() < 0.8


@dataclass(frozen=True, slots=True)
class KnownDrafts(Drafts):
    """Drafts of prompt and answer that are known."""

    text: Sequence[int] = ()
    mistakes: float = 0.2
    seed: int = 0

    def drafter(self) -> Drafter:
        return KnownText(self.text, self.mistakes, random.Random(self.seed))

    def choice(self, costs: StepCosts, drafter: Drafter) -> Choice:
        return Chance(random.Random(self.seed + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChanceModelDrafts(ModelDrafts):
    """As many tokens a step as chance says."""

    seed: int = 0

    def choice(self, costs: StepCosts, drafter: Drafter) -> Choice:
        return Chance(random.Random(self.seed))


def save_draft_model(folder: Path, tokenizer: Path, **changes: Any) -> Path:
    """A random model's folder, with the tokenizer of another folder."""
    sizes: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 64}
    config = qwen2_config(**(sizes | changes))
    save_checkpoint(folder, config, reference_model(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer / name, folder / name)
    return folder


def draft_by_chance(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Have the answers of batches draft 0, 1, 3 or 7 tokens, as far as there is room."""
    rng = random.Random(seed)

    def size(self: BatchChoice, rows: int, drafting: object, most: int, *, kind: object) -> int:
        return max(number for number in (0, 1, 3, 7) if number <= min(most, rng.choice((0, 1, 3, 7, 7))))

    monkeypatch.setattr(BatchChoice, "size", size)
    monkeypatch.setattr(BatchChoice, "may_draft", lambda *_, **__: rng.random() < 0.8)
    monkeypatch.setattr(BatchChoice, "verified", lambda *_, **__: None)
