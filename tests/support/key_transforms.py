"""Formats with every part of a front, drawn for a model's layers."""

from typing import Any

import numpy as np

from kvant.cache.kv_format import KVFormat, LayerChoice


def drawn_format(
    model: Any,
    bits: int = 0,
    group: int = 16,
    *,
    seed: int = 0,
    rotates: bool = True,
    paired: bool = False,
    centers: bool = True,
) -> KVFormat:
    """Center, balance and rotation of every layer, and rotated values; 8 and 4 bits in turn where ``bits`` is 84.

    Where it is 48, layers have in turn 8 bits of keys and 4 of values, and the other way round.

    ``paired``: the balance is the same for both elements of a rotary pair.
    """
    rng = np.random.default_rng(seed)
    layers = []
    for number, own in enumerate(model.make_cache(8, kv_bits=0).formats):
        shape = own.num_kv_heads, own.head_dim
        balance = rng.integers(-2, 3, shape)
        if paired:
            balance[:, shape[1] // 2 :] = balance[:, : shape[1] // 2]
        layers.append(
            LayerChoice(
                (8, 4)[number % 2] if bits in (84, 48) else bits,
                group,
                rotates,
                tuple(map(tuple, rng.normal(0, 2, shape).round(3).tolist())) if centers else (),
                tuple(map(tuple, balance.tolist())),
                value_bits=(4, 8)[number % 2] if bits == 48 else -1,
                rotates_values=own.value_head_dim > 0,
            )
        )
    return KVFormat("" if model.identity is None else model.identity.model, tuple(layers))
