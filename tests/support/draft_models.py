"""Draft models for tests: small random ones with another model's tokenizer, and drafts as many as chance says."""

import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvant.engine.drafting.choice import Choice, StepCosts
from kvant.engine.drafting.drafter import Drafter
from kvant.engine.model_drafts import ModelDrafts
from support.checkpoints import qwen2_config, reference_model, save_checkpoint
from support.drafts import Chance


def save_draft_model(folder: Path, tokenizer: Path, **changes: Any) -> Path:
    """A random model's folder, with the tokenizer of another folder."""
    sizes: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 64}
    config = qwen2_config(**(sizes | changes))
    save_checkpoint(folder, config, reference_model(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer / name, folder / name)
    return folder


@dataclass(frozen=True, slots=True, kw_only=True)
class ChanceModelDrafts(ModelDrafts):
    """As many tokens a step as chance says."""

    seed: int = 0

    def choice(self, costs: StepCosts, drafter: Drafter) -> Choice:
        return Chance(random.Random(self.seed))
