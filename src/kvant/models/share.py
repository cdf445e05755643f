"""Select the tensors to read of a model: the heads and features of a rank, or everything."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from kvant.models.architectures.table import Parameter
from kvant.models.config import ModelConfig
from kvant.models.tensors import Piece

Range = tuple[int, int]  # first, end


@dataclass(frozen=True, slots=True)
class Share:
    """The ranges of a model's axes that a rank has."""

    rank: int
    queries: Range  # query heads
    keys: Range  # key and value heads
    counts_keys: bool  # no earlier rank has the same keys
    inner: Range  # features of an MLP
    expert_inner: Range  # features of each expert; (0, 0): the model is dense
    vocabulary: Range  # rows of a separate output head

    def piece(self, config: ModelConfig, row: Parameter, shape: Sequence[int]) -> Piece | None:
        """Return the rank's piece of one of a parameter's tensors, or None if it has all of it.

        ``shape`` is the stored shape of the whole tensor: a weight, packed or not, scales, one expert's
        matrix, or a bias.
        """
        if row.shard is None:
            return None
        size = config.shape(row)[row.shard]
        first, last = self.range(config, row)
        is_vector = len(shape) == 1  # a norm's weight, or a bias, which is divided like outputs
        if (first, last) == (0, size) or (is_vector and divides_inputs(row)):
            return None
        # Count axes from the end: one expert's matrix lacks the first axis.
        axis = 0 if is_vector else row.shard - len(row.shape) + len(shape)
        stored = shape[axis]  # a quantized row has fewer words or groups than elements
        return Piece(axis, ((first * stored // size, last * stored // size),))

    def range(self, config: ModelConfig, row: Parameter) -> Range:
        """Return the range, in elements, of the rank's piece along a parameter's divided axis."""
        assert row.shard is not None
        heads = {"queries": self.queries, "keys": self.keys}
        name = row.shape[row.shard]
        if name in heads:
            return heads[name][0] * config.head_dim, heads[name][1] * config.head_dim
        return {"inner": self.inner, "expert_inner": self.expert_inner, "vocabulary": self.vocabulary}[name]

    def shape(self, config: ModelConfig, row: Parameter) -> tuple[int, ...]:
        """Return the shape of the rank's piece of a parameter."""
        whole = config.shape(row)
        if row.shard is None:
            return whole
        return Piece(row.shard, (self.range(config, row),)).shape(whole)


@dataclass(frozen=True, slots=True)
class TensorSelection:
    """The tensors that a rank reads: arguments of :func:`kvant.models.checkpoint.load_shard`."""

    share: Share
    layers: range
    embedding: bool  # for tokens, or as a tied output head
    head: bool
    all_sum: Callable[[mx.array], mx.array]

    def has(self, config: ModelConfig, row: Parameter, layer: int | None) -> bool:
        """Return whether a parameter is read. ``layer`` None: it is not in a layer."""
        if layer is not None:
            return layer in self.layers
        return self.embedding if row == config.architecture.embedding else self.head


def everything(config: ModelConfig) -> TensorSelection:
    """Return the selection of a whole model, for one process."""
    whole = Share(
        rank=0,
        queries=(0, config.num_attention_heads),
        keys=(0, config.num_key_value_heads),
        counts_keys=True,
        inner=(0, config.intermediate_size),
        expert_inner=(0, 0 if config.experts is None else config.experts.inner_size),
        vocabulary=(0, config.vocab_size),
    )
    return TensorSelection(
        whole, range(config.num_hidden_layers), embedding=True, head=True, all_sum=lambda x: x
    )


def divides_inputs(row: Parameter) -> bool:
    """Return whether ranks divide a projection's inputs, so that they have to sum its outputs."""
    return row.shard is not None and len(row.shape) > 1 and row.shard == len(row.shape) - 1


def local_config(config: ModelConfig, share: Share | None = None, layers: range | None = None) -> ModelConfig:
    """Return the config of a rank's model, with the heads, features and layers it has. None: all of them.

    The vocabulary stays whole, because every rank embeds tokens.
    """
    experts = config.experts
    if layers is not None:
        if experts is not None:
            experts = replace(experts, layers=tuple(experts.layers[layer] for layer in layers))
        config = replace(
            config,
            num_hidden_layers=len(layers),
            rotates=tuple(config.rotates[layer] for layer in layers),
            windows=tuple(config.windows[layer] for layer in layers),
            experts=experts,
        )
    if share is None:
        return config
    return replace(
        config,
        num_attention_heads=_size(share.queries),
        num_key_value_heads=_size(share.keys),
        intermediate_size=_size(share.inner),
        experts=None if experts is None else replace(experts, inner_size=_size(share.expert_inner)),
    )


def _size(bounds: Range) -> int:
    return bounds[1] - bounds[0]
