"""Drafts for tests: of a text that is known, and of small random models, as many tokens as chance says."""

import math
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvant.cache.pool import PoolSequence
from kvant.engine.drafts import MOST, DraftChoice, Drafter, Drafts
from support.checkpoints import qwen2_config, write_reference


class KnownText(Drafter):
    """Proposes a text that is known, with mistakes."""

    match = MOST

    def __init__(self, text: Sequence[int], mistakes: float, rng: random.Random) -> None:
        self._taken = 0
        self._text, self._mistakes, self._rng = text, mistakes, rng

    def extend(self, tokens: Sequence[int]) -> None:
        self._taken += len(tokens)

    def propose(self, count: int) -> list[int]:
        guess = self._text[self._taken : self._taken + count]
        return [token if self._rng.random() >= self._mistakes else token ^ 1 for token in guess]


@dataclass(frozen=True, slots=True)
class KnownDrafts(Drafts):
    """Drafts of prompt and answer that are known."""

    text: Sequence[int] = ()
    mistakes: float = 0.2
    seed: int = 0

    def for_answer(self, salt: bytes, tokens: int, sequence: PoolSequence) -> Drafter:
        return KnownText(self.text, self.mistakes, random.Random(self.seed))


def draft_by_chance(
    monkeypatch: pytest.MonkeyPatch, seed: int, sizes: Sequence[int] = (0, 1, 3, 7, 7)
) -> None:
    """Have every answer draft one of these numbers of tokens, as far as there is room, whatever steps
    cost.
    """
    rng = random.Random(seed)
    monkeypatch.setattr(DraftChoice, "count", lambda self, drafter, most, **_: min(most, rng.choice(sizes)))
    monkeypatch.setattr("kvant.engine.drafts.LOSS", math.inf)


def save_draft_model(folder: Path, tokenizer: Path, **changes: Any) -> Path:
    """A random model's folder, with the tokenizer of another folder."""
    sizes: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 64}
    write_reference(folder, qwen2_config(**(sizes | changes)))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer / name, folder / name)
    return folder
