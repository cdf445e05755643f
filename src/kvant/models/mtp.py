"""Heads for multi-token prediction (MTP), from which a model drafts: of the token after the next one.

A head is a layer of the model behind a projection of two normalized inputs, a hidden state of the model and
the embedding of the token that came after it. Its output goes through a norm and the model's output head. For
the next draft it takes the place of the hidden state (DeepSeek-V3 Technical Report, arXiv:2412.19437, section
2.2; in vLLM deepseek_mtp.py, glm4_moe_mtp.py, qwen3_next_mtp.py, qwen3_5_mtp.py and mimo_mtp.py).

The head's keys and values are one more layer of the model's cache. Its row j is of token j and of the hidden
state before it, which is zeros for the first token and where a cache begins with tokens that were computed
elsewhere: only drafts depend on it. Every step of the model writes the rows of its tokens. A draft's own rows
are written past the committed tokens, and the step that verifies the draft writes there again.
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
    """The part of a :class:`kvant.models.LanguageModel` with a head that does not depend on who computes its
    layers. B batch, S tokens of a draft, V vocabulary.
    """

    def draft(self, first: Sequence[int], count: int, batch: PoolBatch) -> mx.array:
        """Begin to draft ``count`` tokens behind the ``first`` ones, one of each sequence of the batch, which
        are not fed yet. Returns (B, count) ids, not evaluated. Nothing is committed.

        The rows of a draft's first tokens are computed again with every further one: they are few, and the
        weights are read for any number of them.
        """
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
        """Return the hidden states (B, 1, hidden) behind the sequences' last tokens."""

    @abstractmethod
    def guess(self, ids: mx.array, hidden: mx.array, batch: PoolBatch) -> tuple[mx.array, mx.array]:
        """Return the head's logits (B, V) behind (B, S) ids, each with the state before it, and its output
        (B, hidden), which stands for the next state.
        """


@dataclass(frozen=True, slots=True)
class Head:
    """A decoder's head. Its layer is the decoder's last."""

    input_proj: Linear
    hidden_norm: mx.array
    token_norm: mx.array
    final_norm: mx.array
    block: "Block"
    rms_norm_eps: float

    def inputs(self, hidden: mx.array, embeddings: mx.array) -> mx.array:
        """The layer's input (B, S, hidden), of the states before the tokens and the tokens' embeddings."""
        both = [
            rms_norm(hidden, self.hidden_norm, self.rms_norm_eps),
            rms_norm(embeddings, self.token_norm, self.rms_norm_eps),
        ]
        return self.input_proj(mx.concatenate(both, axis=-1))

    @property
    def arrays(self) -> list[mx.array]:
        return [*self.input_proj.arrays, self.hidden_norm, self.token_norm, self.final_norm]


def with_head(config: ModelConfig, tensors: TensorFiles) -> ModelConfig:
    """Return the config with the head's layer behind the model's, as which its tensors are renamed."""
    own = [row.path for row in HEAD]
    refuse_headless(own, tensors)
    place = config.architecture.layers.format(config.num_hidden_layers)
    for name in sorted(tensors.names):
        if name.startswith(HEAD_PREFIX) and name.rpartition(".")[0] not in own:
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
    """Refuse a checkpoint that lacks one of a head's modules, by its tensor's name."""
    for path in paths:
        if f"{path}.weight" not in tensors:
            raise ArgumentError(
                "draft",
                f"is 'mtp'; the checkpoint has no head to draft with: tensor {path}.weight is missing",
            )
