"""Read a checkpoint's experts, which are stored stacked, one by one, or stacked with gate and up joined.

Published checkpoints store experts one by one, mlx-lm stacks them, and transformers 5 may join gate and up of
a stack. Quantized experts come from mlx-lm and are stacked.
"""

from collections.abc import Iterator, Sequence

import mlx.core as mx

from kvant.errors import CheckpointError
from kvant.models.architectures.table import Parameter
from kvant.models.config import ModelConfig
from kvant.models.share import Share
from kvant.models.tensors import FLOATS, Expected, Piece, TensorFiles


def stored_otherwise(config: ModelConfig, tensors: TensorFiles, path: str, row: Parameter) -> Expected | None:
    """Return the tensors of one projection of a layer's experts, or None if it is stacked at ``path``."""
    prefix = path.removesuffix(row.path)
    if row.joined is not None and prefix + row.joined in tensors:
        return {prefix + row.joined: (_joined_shape(config, config.architecture.of_role(row.role)), FLOATS)}
    names = _each(config, prefix, row)
    if not any(name in tensors for name in names):
        return None
    for name in names:  # check now: the number of experts is only a claim of config.json
        if name not in tensors:
            raise CheckpointError(f"tensor {name} is missing")
    return dict.fromkeys(names, (config.shape(row)[1:], FLOATS))


def take_stacked(
    config: ModelConfig, tensors: TensorFiles, prefix: str, rows: Sequence[Parameter], share: Share
) -> list[mx.array]:
    """Return a rank's piece of the floating-point stacks (experts, out, in) of a role's projections."""
    joined = rows[0].joined
    if joined is not None and prefix + joined in tensors:
        piece = joined_piece(config, rows, share)
        whole = tensors.take(prefix + joined, _joined_shape(config, rows), piece=piece)
        bounds = [sum(share.shape(config, row)[1] for row in rows[:i]) for i in range(1, len(rows))]
        return [*mx.split(whole, bounds, axis=1)] if bounds else [whole]
    return [_stack(config, tensors, prefix, row, share) for row in rows]


def joined_piece(config: ModelConfig, rows: Sequence[Parameter], share: Share) -> Piece | None:
    """Return a rank's piece of the tensor with a role's matrices concatenated; None: all of it."""
    parts = [share.piece(config, row, config.shape(row)) for row in rows]
    if len(rows) == 1 or parts[0] is None:
        return parts[0]
    ranges = []
    start = 0
    for row in rows:
        first, last = share.range(config, row)
        ranges.append((start + first, start + last))
        start += config.shape(row)[1]
    return Piece(1, tuple(ranges))


def expert_roles(config: ModelConfig) -> Iterator[tuple[str, list[Parameter]]]:
    """Yield the prefix of each layer with experts and the rows of each role of its experts."""
    table = config.architecture
    roles = dict.fromkeys(row.role for row in table.experts if row.each is not None)
    for layer in range(config.num_hidden_layers):
        if config.has_experts(layer):
            yield from ((table.layers.format(layer), table.of_role(role)) for role in roles)


def expert_tensors(config: ModelConfig, prefix: str, rows: Sequence[Parameter]) -> Iterator[str]:
    """Yield every possible name of a tensor of these projections of a layer's experts."""
    for row in rows:
        yield from (f"{prefix}{row.path}.weight", *_each(config, prefix, row))
        if row.joined is not None:
            yield prefix + row.joined


def _stack(config: ModelConfig, tensors: TensorFiles, prefix: str, row: Parameter, share: Share) -> mx.array:
    shape = config.shape(row)
    names = _each(config, prefix, row)
    if names and names[0] in tensors:
        piece = share.piece(config, row, shape[1:])
        return mx.stack([tensors.take(name, shape[1:], piece=piece) for name in names])
    return tensors.take(f"{prefix}{row.path}.weight", shape, piece=share.piece(config, row, shape))


def _each(config: ModelConfig, prefix: str, row: Parameter) -> list[str]:
    if row.each is None:
        return []
    return [f"{prefix}{row.each.format(number)}.weight" for number in range(config.shape(row)[0])]


def _joined_shape(config: ModelConfig, rows: Sequence[Parameter]) -> tuple[int, ...]:
    experts, _, width = config.shape(rows[0])
    return experts, sum(config.shape(row)[1] for row in rows), width
