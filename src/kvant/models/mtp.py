"""Draft with a head for multi-token prediction (MTP), which predicts the token after the next one.

A head projects two normalized inputs, a hidden state of the model and the embedding of the following token,
and passes the result through a layer, a norm and the model's output head. For the next draft, its output
replaces the hidden state (DeepSeek-V3 Technical Report, arXiv:2412.19437, section 2.2; in vLLM
deepseek_mtp.py, glm4_moe_mtp.py, qwen3_next_mtp.py, qwen3_5_mtp.py and mimo_mtp.py).

The head's keys and values are an additional layer of the model's cache. Row j depends on token j and on the
hidden state before it. That state is zeros for the first token, and after tokens of a cache that were
computed elsewhere; this affects only drafts. Every step of the model writes the rows of its tokens. Drafting
writes rows past the committed tokens, and the step that verifies the draft overwrites them.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import mlx.core as mx

from kvant.cache.pool_batch import PoolBatch
from kvant.errors import ArgumentError
from kvant.models.architectures.table import HEAD, HEAD_PREFIX
from kvant.models.config import ModelConfig
from kvant.models.matrix import Linear
from kvant.models.tensors import TensorFiles
from kvant.operators.normalization import rms_norm

if TYPE_CHECKING:
    from kvant.models.decoder import Block


class HeadedModel(ABC):
    """A :class:`kvant.models.LanguageModel` with a head. B batch, S tokens of a draft, V vocabulary."""

    def draft(self, first: Sequence[int], count: int, batch: PoolBatch) -> mx.array:
        """Begin to draft ``count`` tokens after ``first``, each sequence's next token to feed.

        Return the drafted ids (B, count), not evaluated. Nothing is committed.
        """
        # Each pass computes the rows of earlier tokens again, because reading the weights dominates.
        ids = mx.array(list(first))[:, None]
        hidden = self.hidden_before_of(batch)
        for _ in range(count):
            batch.begin(ids)
            logits, output = self.guess(ids, hidden, batch)
            hidden = mx.concatenate([hidden, output[:, None]], axis=1)
            ids = mx.concatenate([ids, mx.argmax(logits, axis=-1)[:, None].astype(ids.dtype)], axis=1)
            batch.end_step()
        return ids[:, 1:]

    @abstractmethod
    def hidden_before_of(self, batch: PoolBatch) -> mx.array:
        """Return the hidden states (B, 1, hidden) of the sequences' last committed tokens."""

    @abstractmethod
    def guess(self, ids: mx.array, hidden: mx.array, batch: PoolBatch) -> tuple[mx.array, mx.array]:
        """Return the head's logits (B, V) after (B, S) ids, and its output (B, hidden) for the next draft.

        ``hidden`` (B, S, hidden) are the states before each id.
        """


@dataclass(frozen=True, slots=True)
class Head:
    """A decoder's head. Its block is the last one of the decoder."""

    input_proj: Linear
    hidden_norm: mx.array
    token_norm: mx.array
    final_norm: mx.array
    block: "Block"
    rms_norm_eps: float

    def inputs(self, hidden: mx.array, embeddings: mx.array) -> mx.array:
        """Return the block's input (B, S, hidden) from the states before the tokens and their embeddings."""
        both = [
            rms_norm(hidden, self.hidden_norm, self.rms_norm_eps),
            rms_norm(embeddings, self.token_norm, self.rms_norm_eps),
        ]
        return self.input_proj(mx.concatenate(both, axis=-1))

    @property
    def arrays(self) -> list[mx.array]:
        return [*self.input_proj.arrays, self.hidden_norm, self.token_norm, self.final_norm]


def with_head(config: ModelConfig, tensors: TensorFiles) -> ModelConfig:
    """Return the config with the head's layer appended; rename the layer's tensors to match."""
    paths = [row.path for row in HEAD]
    refuse_headless(paths, tensors)
    place = config.architecture.layers.format(config.num_hidden_layers)
    for name in sorted(tensors.names):
        if name.startswith(HEAD_PREFIX) and name.rpartition(".")[0] not in paths:
            tensors.rename(name, place + name.removeprefix(HEAD_PREFIX))
    experts = config.experts
    if experts is not None:
        experts = replace(experts, layers=(*experts.layers, experts.layers[-1]))
    return replace(
        config,
        num_hidden_layers=config.num_hidden_layers + 1,
        rotates=(*config.rotates, True),
        windows=(*config.windows, None),
        experts=experts,
        has_head=True,
    )


def refuse_headless(paths: Sequence[str], tensors: TensorFiles) -> None:
    """Raise an ArgumentError if the checkpoint lacks one of a head's modules."""
    for path in paths:
        if f"{path}.weight" not in tensors:
            raise ArgumentError(
                "draft",
                f"is 'mtp'; the checkpoint has no head to draft with: tensor {path}.weight is missing",
            )
