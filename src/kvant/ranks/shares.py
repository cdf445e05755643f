"""The division of a model among ranks: whole heads, and features of the MLP in whole quantization groups.

Key and value heads go with their query heads. If there are more ranks than kv heads, several ranks have the
same one and divide its query heads.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

from kvant.errors import ModelError
from kvant.models.config import ModelConfig
from kvant.models.share import Range, Share

# Unit in which features of an MLP in floating point are dealt if there are enough, for round matrix sizes.
FEATURES = 64


def shares(config: ModelConfig, ranks: int) -> list[Share]:
    """Return each rank's share, as equal as whole heads and whole quantization groups allow."""
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
            queries=queries[rank],
            keys=keys[rank],
            counts_keys=keys[rank] not in keys[:rank],
            inner=inner[rank],
            expert_inner=expert_inner[rank],
            vocabulary=vocabulary[rank],
        )
        for rank in range(ranks)
    ]


def _divided(count: int, parts: int, unit: int = 1) -> list[Range]:
    """Divide ``count`` into ranges of whole units that differ by at most one; the last unit may be less."""
    units = -(-count // unit)
    bounds = [min(count, units * number // parts * unit) for number in range(parts + 1)]
    return list(pairwise(bounds))


def _heads(config: ModelConfig, ranks: int) -> tuple[list[Range], list[Range]]:
    """Return the query heads and kv heads of each rank."""
    H = config.num_attention_heads
    K = config.num_key_value_heads
    D = config.head_dim
    if ranks > H:
        raise ModelError(f"{ranks} ranks cannot divide {H} query heads: each needs one")
    per = H // K
    group = _group_size(config, "output")
    if ranks <= K:
        # number of kv heads dealt together, so that their outputs end with a group of o_proj's columns
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
            f"quantization groups of {group}: a group would be cut"
        )
    return queries, keys


def _features(config: ModelConfig, ranks: int, name: str, role: str) -> list[Range]:
    """Return each rank's features of an MLP, which are whole groups of columns of ``role``'s projection."""
    rows = config.architecture.of_role(role)
    count = config.shape(rows[0])[-1]
    group = _group_size(config, role)
    if group == 1 and count // FEATURES >= ranks:
        group = math.gcd(count, FEATURES)
    if -(-count // group) < ranks:
        groups = f" in {count // group} quantization groups of {group}" if group > 1 else ""
        raise ModelError(f"{ranks} ranks cannot divide {name} {count}{groups}: each needs one")
    return _divided(count, ranks, group)


def _group_size(config: ModelConfig, role: str) -> int:
    """Return the number of elements in a row that quantization keeps together for a role in all layers."""
    table = config.architecture
    prefixes = [table.layers.format(layer) for layer in range(config.num_hidden_layers)]
    formats = {
        config.quantization_of(prefix + row.path) for prefix in prefixes for row in table.of_role(role)
    }
    return math.lcm(*(each.group_size for each in formats if each is not None))
