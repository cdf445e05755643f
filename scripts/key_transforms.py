"""Outliers planted in pocket's keys, and what 4 bits cost with them: PMX's formula, kvant's, and a tuned
format.

Run: python scripts/key_transforms.py [tokens]    (default: 16384)

The queries are changed with the keys, so that the model is the same without quantization, but for the last
two plants. A format is tuned on one half of the built-in text, and all are measured on the other. Prints
JSON: by plant and format bytes a token and the mean KLD in nats against a cache that is not quantized.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import kvant.blas  # isort: skip  (before MLX: it loads a faster one)

import mlx.core as mx

import kvant
from kvant.cache import pool_batch
from kvant.engine.load import POCKET
from kvant.machine import environment
from kvant.operators import stored_tokens
from kvant.tools.report.formats import CacheFormat
from kvant.tools.report.texts import Text, built_in_text, halves
from kvant.tools.report.tune import measured, tune

PIECE = 1024
HEADS, WIDTH = 2, 64  # of pocket's keys
LARGE = 18.0

# a factor, a constant, a factor by position
Plant = tuple[mx.array, mx.array, Callable[[mx.array], mx.array]]


def channels(factors: dict[int, float], rest: float = 1.0) -> mx.array:
    """(K, 1, D)."""
    return mx.broadcast_to(mx.array([factors.get(n, rest) for n in range(WIDTH)]), (HEADS, 1, WIDTH))


def pairs(*numbers: int, factor: float = LARGE) -> dict[int, float]:
    """Both elements of rotary pairs."""
    return {place: factor for pair in numbers for place in (pair, pair + WIDTH // 2)}


def everywhere(positions: mx.array) -> mx.array:
    return mx.ones((len(positions), 1))


def plants() -> dict[str, Plant]:
    """Each by its name."""
    one, none = channels({}), channels({}, 0.0)
    spread = mx.exp(mx.random.normal((HEADS, 1, WIDTH // 2), key=mx.random.key(1)))
    some = mx.array([float(n in (3, 17, 44)) for n in range(WIDTH)])
    return {
        "none": (one, none, everywhere),
        "two pairs x 18": (channels(pairs(20, 27)), none, everywhere),
        "two pairs x 32": (channels(pairs(20, 27, factor=32.0)), none, everywhere),
        "all pairs, log-normal": (mx.concatenate([spread, spread], axis=-1), none, everywhere),
        "a constant of 100 in a pair": (one, channels(pairs(30, factor=100.0), 0.0), everywhere),
        "three single channels x 18": (channels({3: LARGE, 17: LARGE, 44: LARGE}), none, everywhere),
        # Of every eighth token three channels are 18 times as large, of all queries as much smaller.
        "three channels x 18 at every 8th position": (
            channels({3: LARGE, 17: LARGE, 44: LARGE}),
            none,
            lambda at: mx.where((at % 8 == 0)[:, None], 1.0, 1 - some * (1 - 1 / LARGE)),
        ),
        "every 64th token's keys x 4": (one, none, lambda at: mx.where((at % 64 == 0)[:, None], 4.0, 1.0)),
    }


@contextmanager
def planted(
    factor: mx.array, constant: mx.array, by_position: Callable[[mx.array], mx.array]
) -> Iterator[None]:
    """Every layer's keys with a plant, and its queries."""
    view = pool_batch.PoolLayerView
    transform = view.transform

    def changed(self: Any) -> Any:
        own = self.layer.transform

        def query_key(both: mx.array, H: int) -> mx.array:
            at = self.batch.lengths[0] + mx.arange(both.shape[2])
            of_queries = mx.repeat(factor, H // len(factor), axis=0)
            key = both[:, H:] * factor * by_position(at) + constant
            return own.query_key(mx.concatenate([both[:, :H] / of_queries, key], axis=1), H)

        return SimpleNamespace(
            query_key=query_key, values=own.values, bias_split=own.bias_split, center=own.center
        )

    view.transform = property(changed)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        view.transform = transform  # type: ignore[method-assign]


def figures(model: Any, text: Text, formats: dict[str, CacheFormat]) -> dict[str, dict[str, float]]:
    """Of each format on a text."""
    rows = measured(model, text, formats)
    return {
        row.name: {"bytes_per_token": row.bytes_per_token, "mean_kld_nats": row.figures.mean_kld_nats}
        for row in rows
    }


def main() -> None:
    tokens = int(sys.argv[1]) if len(sys.argv) > 1 else 16384
    model, tokenizer = kvant.load(POCKET)
    chooses, other = halves(built_in_text(tokenizer, PIECE, tokens))
    found = {}
    for name, plant in plants().items():
        with planted(*plant):
            fitted, stored_tokens.FITTED_BITS = stored_tokens.FITTED_BITS, 0
            own = figures(
                model, other, {"8 bits": CacheFormat(8), "4 bits, PMX": CacheFormat(4, rotates=False)}
            )
            stored_tokens.FITTED_BITS = fitted
            formats = {"4 bits": CacheFormat(4, rotates=False), "4 bits, rotated": CacheFormat(4)}
            for kind, most in (("tuned, the same bytes", 100.0), ("tuned to 0.005", 0.005)):
                chosen, _ = tune(model, chooses, kv_bits=4, kv_group_size=32, max_kld=most)
                formats[kind] = CacheFormat(kv_format=chosen)
            found[name] = own | figures(model, other, formats)
    machine = environment()
    facts = {"command": "python scripts/key_transforms.py", "tokens": other.tokens, "device": machine.device}
    print(json.dumps(facts | {"versions": machine.versions, "plants": found}, indent=1))


if __name__ == "__main__":
    main()
