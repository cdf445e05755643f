"""Each layer by itself: its attention through each cache, given the inputs it has without quantization."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from kvant.cache import AttentionCache, ModelCache
from kvant.models import Decoder
from kvant.operators.bias_split import BiasSplit
from kvant.tools.report.teacher import STEP_SIZE, Fed

RANGE_GROUP = 32  # elements over which a key's range is looked at


@dataclass(frozen=True, slots=True)
class LayerRun:
    """The figures of a run through all layers, each list with a number a layer.

    Attributes:
        errors: for each cache, ||given - exact|| / ||exact|| of the attention's output over all positions.
        key_range: max |k| over a group of keys divided by the root of their mean square, mean over positions, of the
            group in which it is largest: about 2.3 for normally distributed keys, at most the root of the group's size.
    """

    errors: list[list[float]]
    key_range: list[float]


class SideBySide:
    """A layer's exact cache, which it attends through, and others that are given the same keys, values and queries.

    Attributes:
        squares: of the exact outputs, and of the differences of the others' from them; summed.
        key_ranges: (K, D/G) summed over positions.
        positions: how many those are.
    """

    def __init__(self, exact: AttentionCache, others: Sequence[AttentionCache]) -> None:
        self._exact = exact
        self._others = others
        self.squares = [0.0] * (1 + len(others))
        self.key_ranges = mx.array(0.0)
        self.positions = 0

    @property
    def bias_split(self) -> BiasSplit | None:
        """The exact cache's. The others must have one where it has."""
        return self._exact.bias_split

    def attend(
        self,
        query: mx.array,
        key: mx.array,
        value: mx.array,
        mask: mx.array | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Attend through all caches; return the exact one's output."""
        exact = self._exact.attend(query, key, value, mask, sinks)
        wide = exact.astype(mx.float32)
        squares = [mx.square(wide).sum()]
        for cache in self._others:
            given = cache.attend(query, key, value, mask, sinks).astype(mx.float32)
            squares.append(mx.square(given - wide).sum())
        self.key_ranges = self.key_ranges + _ranges(key).sum(axis=(0, 2))  # (B, K, S, D/G) -> (K, D/G)
        self.positions += key.shape[0] * key.shape[2]
        mx.eval(exact, squares, self.key_ranges)
        self.squares = [total + float(new.item()) for total, new in zip(self.squares, squares, strict=True)]  # type: ignore[arg-type]
        return exact


def run_layers(
    model: Decoder,
    piece: Sequence[int],
    exact: ModelCache,
    caches: Sequence[ModelCache],
    *,
    step_size: int = STEP_SIZE,
    fed: Fed = lambda _: None,
) -> LayerRun:
    """Feed a piece through ``exact`` and give every layer's queries, keys and values to the caches as well.

    Args:
        exact: a cache of 0 bits, with the bias split where ``caches`` have it, without where they do not.
        caches: emptied first, as ``exact`` is.
    """
    both = [SideBySide(layer, others) for layer, *others in zip(exact, *caches, strict=True)]
    for cache in (exact, *caches):
        cache.reset()
    for first in range(0, len(piece), step_size):
        chunk = mx.array([piece[first : first + step_size]])
        for cache in (exact, *caches):
            cache.begin(chunk)
        mx.eval(model.states(chunk, first, both))
        for cache in (exact, *caches):
            cache.commit()
        fed(chunk.shape[1])
    return LayerRun(
        errors=[[_relative(layer, 1 + number) for layer in both] for number in range(len(caches))],
        key_range=[float((layer.key_ranges / layer.positions).max().item()) for layer in both],  # type: ignore[arg-type]
    )


def _relative(layer: SideBySide, number: int) -> float:
    """A cache's error; infinite where its output was not finite."""
    exact, difference = layer.squares[0], layer.squares[number]
    if not math.isfinite(difference):
        return math.inf
    return math.sqrt(difference / exact) if exact else math.inf if difference else 0.0


def _ranges(key: mx.array) -> mx.array:
    """(B, K, S, D) -> (B, K, S, D/G): max |k| of each group divided by its root mean square; 1 for a group of zeros."""
    group = RANGE_GROUP if key.shape[-1] % RANGE_GROUP == 0 else key.shape[-1]
    groups = mx.unflatten(key.astype(mx.float32), -1, (-1, group))
    mean_square = mx.square(groups).mean(axis=-1)
    return mx.where(mean_square > 0, mx.abs(groups).max(axis=-1) * mx.rsqrt(mean_square), 1.0)
