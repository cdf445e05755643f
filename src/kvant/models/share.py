"""What each of N ranks has of a model: whole heads, and features of the MLP in whole quantization groups.

Key and value heads are dealt out with their query heads. If ranks are more than key and value heads, a few
ranks have the same one, and its query heads are divided among them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import mlx.core as mx

from kvant.errors import ModelError
from kvant.models.architectures.table import Parameter
from kvant.models.config import ModelConfig
from kvant.models.tensors import Part

# of an MLP in floating point are dealt out together if there are enough: products of round sizes
FEATURES = 64

Range = tuple[int, int]  # first, last


@dataclass(frozen=True, slots=True)
class Share:
    """What a rank has, each from first to last."""

    rank: int
    ranks: int
    queries: Range  # query heads
    keys: Range  # key and value heads
    counts_keys: bool  # no rank before it has the same of these
    inner: Range  # features of an MLP
    expert_inner: Range  # features of each expert; (0, 0): the model is dense
    vocabulary: Range  # rows of an output head that is stored by itself

    def part(self, config: ModelConfig, row: Parameter, shape: Sequence[int]) -> Part | None:
        """The rank's part of one of a parameter's tensors; None: all of it is.

        ``shape``: of the whole tensor as it is stored: a weight, packed or not, scales, one expert's matrix,
            a bias.
        """
        if row.shard is None:
            return None
        size, (first, last) = config.shape(row)[row.shard], self.range(config, row)
        is_vector = len(shape) == 1  # a norm's weight, or a bias, which goes with the outputs
        if (first, last) == (0, size) or (is_vector and divides_inputs(row)):
            return None
        # Counted from the end: one expert's matrix lacks the first axis.
        axis = 0 if is_vector else row.shard - len(row.shape) + len(shape)
        stored = shape[axis]  # of a quantized row: words or groups, which are fewer than its elements
        return Part(axis, ((first * stored // size, last * stored // size),))

    def range(self, config: ModelConfig, row: Parameter) -> Range:
        """Where the rank's part of a parameter is along the axis that is divided, in elements."""
        assert row.shard is not None
        heads = {"queries": self.queries, "keys": self.keys}
        name = row.shape[row.shard]
        if name in heads:
            return heads[name][0] * config.head_dim, heads[name][1] * config.head_dim
        return {"inner": self.inner, "expert_inner": self.expert_inner, "vocabulary": self.vocabulary}[name]

    def shape(self, config: ModelConfig, row: Parameter) -> tuple[int, ...]:
        """The shape of the rank's part of a parameter."""
        whole = config.shape(row)
        if row.shard is None:
            return whole
        return Part(row.shard, (self.range(config, row),)).shape(whole)


@dataclass(frozen=True, slots=True)
class TensorSelection:
    """What a rank reads: the arguments of :func:`kvant.models.checkpoint.load_part`, each of them said."""

    share: Share
    layers: range
    embedding: bool  # for tokens, or as a tied output head
    head: bool
    all_sum: Callable[[mx.array], mx.array]

    def has(self, config: ModelConfig, row: Parameter, layer: int | None) -> bool:
        """Whether a parameter of a layer is read; layer None: it is in no layer."""
        if layer is not None:
            return layer in self.layers
        return self.embedding if row == config.architecture.embedding else self.head


def everything(config: ModelConfig) -> TensorSelection:
    """All of a model, for one process."""
    return TensorSelection(
        shares(config, 1)[0], range(config.num_hidden_layers), embedding=True, head=True, all_sum=lambda x: x
    )


def divides_inputs(row: Parameter) -> bool:
    """Whether ranks have a part of a projection's inputs each: its outputs are then a sum over the ranks."""
    return row.shard is not None and len(row.shape) > 1 and row.shard == len(row.shape) - 1


def shares(config: ModelConfig, ranks: int) -> list[Share]:
    """The share of each of ``ranks`` ranks, as even as whole heads and whole quantization groups are."""
    queries, keys = _heads(config, ranks)
    inner = _features(config, ranks, "intermediate_size", "down")
    expert_inner: Sequence[Range] = [(0, 0)] * ranks
    if config.experts is not None:
        expert_inner = _features(config, ranks, "moe_intermediate_size", "experts_down")
    if ranks > config.vocab_size:
        raise ModelError(f"{ranks} ranks cannot divide a vocabulary of {config.vocab_size} tokens")
    vocabulary = _divided(config.vocab_size, ranks)
    return [
        Share(
            rank=rank,
            ranks=ranks,
            queries=queries[rank],
            keys=keys[rank],
            counts_keys=keys[rank] not in keys[:rank],
            inner=inner[rank],
            expert_inner=expert_inner[rank],
            vocabulary=vocabulary[rank],
        )
        for rank in range(ranks)
    ]


def local_config(config: ModelConfig, share: Share | None = None, layers: range | None = None) -> ModelConfig:
    """The config of the model that a rank has: its heads and features, its layers. None: all of them.

    The vocabulary stays whole: every rank embeds tokens.
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


def _size(part: Range) -> int:
    return part[1] - part[0]


def _divided(count: int, parts: int, unit: int = 1) -> list[Range]:
    """``count`` in parts that differ by one unit at most, and end at whole units; the last unit may be
    smaller.
    """
    units = -(-count // unit)
    bounds = [min(count, units * part // parts * unit) for part in range(parts + 1)]
    return list(pairwise(bounds))


def _heads(config: ModelConfig, ranks: int) -> tuple[list[Range], list[Range]]:
    """Query heads and kv heads of each rank."""
    H, K, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    if ranks > H:
        raise ModelError(f"{ranks} ranks cannot divide {H} query heads: each needs one")
    per, group = H // K, _group_size(config, "output")
    if ranks <= K:
        # kv heads that are dealt out together, so that their outputs end with a group of o_proj's columns
        unit = min(K, math.lcm(per * D, group) // (per * D))
        keys = _divided(K, ranks, unit)
        queries = [(first * per, last * per) for first, last in keys]
    else:
        unit = min(per, math.lcm(D, group) // D)
        heads = [rank * K // ranks for rank in range(ranks)]
        keys = [(head, head + 1) for head in heads]
        queries = []
        for head in range(K):
            divided = _divided(per, heads.count(head), unit)
            queries += [(head * per + first, head * per + last) for first, last in divided]
    if any(first == last or first * D % group for first, last in queries):
        raise ModelError(
            f"{ranks} ranks cannot divide {H} query heads with {K} kv heads of {D} elements in o_proj's "
            f"quantization "
            f"groups of {group}: a group would be cut"
        )
    return queries, keys


def _features(config: ModelConfig, ranks: int, name: str, role: str) -> list[Range]:
    """Features of an MLP of each rank, in whole groups of the columns that they are in the projection of
    ``role``.
    """
    rows = config.architecture.of_role(role)
    count, group = config.shape(rows[0])[-1], _group_size(config, role)
    if group == 1 and count // FEATURES >= ranks:
        group = math.gcd(count, FEATURES)
    if -(-count // group) < ranks:
        groups = f" in {count // group} quantization groups of {group}" if group > 1 else ""
        raise ModelError(f"{ranks} ranks cannot divide {name} {count}{groups}: each needs one")
    return _divided(count, ranks, group)


def _group_size(config: ModelConfig, role: str) -> int:
    """Elements of a row that quantization keeps together in the projections of a role, of all layers; 1:
    any.
    """
    table = config.architecture
    prefixes = [table.layers.format(layer) for layer in range(config.num_hidden_layers)]
    formats = {
        config.quantization_of(prefix + row.path) for prefix in prefixes for row in table.of_role(role)
    }
    return math.lcm(*(own.group_size for own in formats if own is not None))
