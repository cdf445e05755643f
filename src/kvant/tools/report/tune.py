"""Tuning a cache's format for a model: parts of the key transform, and bits of keys and values, chosen by
divergence a byte.
"""

from bisect import bisect_left
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx

from kvant.cache.kv_format import MAX_EXPONENT, KVFormat, LayerChoice
from kvant.cache.options import CacheOptions
from kvant.models import LanguageModel
from kvant.models.checkpoint import Progress
from kvant.operators.key_transform import KeyTransform
from kvant.operators.quantization import FITTED_BITS
from kvant.tools.report.divergence import Figures
from kvant.tools.report.formats import REFERENCE, CacheFormat
from kvant.tools.report.runs import CacheReader, Fed, feed, read_legs
from kvant.tools.report.texts import Text

MORE_BITS = 8  # of keys and values that get more than the others
AT_ONCE = 16  # formats that have caches at once
WORTH = 0.97  # a further part has to leave at most this much of the divergence
WORTH_APART = 0.85  # and keys and values with bits of their own at most this much of the further bytes
PARTS = ("", "center", "rotate", "balance", "center+rotate", "center+balance", "center+balance+rotate")
SIDES = ("keys", "values")
Side = tuple[int, str]  # a layer's keys or values


@dataclass(frozen=True, slots=True, eq=False)
class Watched(KeyTransform):
    """A key transform that changes nothing and counts what goes through.

    Attributes:
        sums: by name, of each kv head and channel, (K, 1, D) float32: "tokens", "keys" and "key squares",
            which are less "base", the first tokens' mean, and "query squares" of the query heads that read a
            kv head.
    """

    sums: dict[str, Any] = field(default_factory=dict)

    def query_key(self, both: mx.array, num_heads: int) -> mx.array:
        if num_heads:
            squares = mx.square(both[0, :num_heads].astype(mx.float32))
            self._add("query squares", squares.sum(axis=1, keepdims=True))
        if num_heads < both.shape[1]:
            wide = both[0, num_heads:].astype(mx.float32)
            base = self.sums.setdefault("base", wide.mean(axis=1, keepdims=True))
            self._add("tokens", mx.array(wide.shape[1]))
            self._add("keys", (wide - base).sum(axis=1, keepdims=True))
            self._add("key squares", mx.square(wide - base).sum(axis=1, keepdims=True))
        return both

    def _add(self, name: str, more: mx.array) -> None:
        self.sums[name] = self.sums[name] + more if name in self.sums else more
        mx.eval(self.sums[name])


@dataclass(frozen=True, slots=True)
class Statistics:
    """Of a layer's keys and queries. Each (K, D) of kv heads and channels."""

    mean: mx.array  # of keys
    spread: mx.array  # their standard deviation
    queries: mx.array  # the root mean square of the queries that read them
    # rotary, whose biases are split off: the balance has to be the same for both elements
    pairs: tuple[int, ...]
    rotates_values: bool  # as of kvant's default 4 bits

    @classmethod
    def of(cls, watched: Watched, rotates_values: bool) -> "Statistics":
        sums = watched.sums
        split = watched.bias_split
        tokens = sums["tokens"]
        K = sums["base"].shape[0]
        mean = sums["keys"] / tokens
        spread = mx.sqrt(mx.maximum(sums["key squares"] / tokens - mx.square(mean), 1e-12))
        # Of a model that attends in its own way no queries are seen.
        squares = (
            sums.get("query squares", tokens * mx.ones_like(mean)).reshape(K, -1, mean.shape[-1]).mean(axis=1)
        )
        found = (mean + sums["base"]).squeeze(1), spread.squeeze(1), mx.sqrt(squares / tokens)
        return cls(*found, () if split is None else split.pairs, rotates_values)

    def choice(self, keys: int, values: int, group: int, parts: str) -> LayerChoice:
        """How a layer stores tokens with bits of keys and of values, and some of center, balance and
        rotate.
        """
        names = parts.split("+")
        means: Any = self.mean.tolist()
        center = [[float(f"{x:.4g}") for x in row] for row in means] if "center" in names else []
        return LayerChoice(
            keys,
            group,
            rotates="rotate" in names and not self.pairs,
            center=tuple(map(tuple, center)),
            balance=tuple(map(tuple, self._exponents("center" in names))) if "balance" in names else (),
            value_bits=values,
            rotates_values=self.rotates_values and values == FITTED_BITS,
        )

    def _exponents(self, centered: bool) -> list[list[int]]:
        """Of the factors s that make ``sum(k^2 / s^2) sum(q^2 s^2)``, a rotated group's error, the least."""
        size = self.spread if centered else mx.sqrt(mx.square(self.spread) + mx.square(self.mean))
        factor = mx.log2(mx.maximum(size, 1e-6) / mx.maximum(self.queries, 1e-6)) / 2
        exponents = mx.round(factor - mx.median(factor, axis=-1, keepdims=True))
        if self.pairs:
            halves = exponents.reshape(len(exponents), 2, -1).max(axis=1, keepdims=True)
            exponents = mx.tile(halves, (1, 2, 1)).reshape(exponents.shape)
        found: list[list[int]] = mx.clip(exponents, -MAX_EXPONENT, MAX_EXPONENT).astype(mx.int32).tolist()  # type: ignore[assignment]
        return found


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    bytes_per_token: int  # of the cache, divided by the tokens it is reserved for
    cache_bytes: int  # of the cache of a piece; layers with a window count in it
    figures: Figures


def tune(
    model: LanguageModel,
    text: Text,
    *,
    kv_bits: int,
    kv_group_size: int,
    max_kld: float,
    kv_tail: bool | None = None,
    progress: Progress = lambda done, total: None,
) -> tuple[KVFormat, list[Row]]:
    """Choose a key transform for all layers, then layers with 8 bits, until the divergence is small enough.

    As many layers get 8 bits as ``max_kld``, in nats, takes, those first that gain most a byte; or keys and
    values of single layers, if that takes much less. ``kv_tail``: as of CacheOptions.
    ``progress`` is called with (tokens fed, tokens to be fed at most). Returns the format, and all that was
    tried, in order.
    """
    seen = statistics(model, text)
    digest = "" if model.identity is None else model.identity.model
    done = 0
    singles = 3 * len(seen)
    halvings = 2 * len(seen).bit_length() + 3
    total = text.tokens * (len(PARTS) + singles + singles // AT_ONCE + 3 + 2 * halvings)

    def fed(count: int) -> None:
        nonlocal done
        done += count
        progress(min(done, total), total)

    def made(parts: str, more: Collection[Side] = ()) -> CacheFormat:
        layers = []
        for n, own in enumerate(seen):
            keys, values = (MORE_BITS if (n, side) in more else kv_bits for side in SIDES)
            layers.append(own.choice(keys, values, kv_group_size, parts))
        return CacheFormat(kv_format=KVFormat(digest, tuple(layers)), tail=kv_tail)

    allowed = [own for own in PARTS if "center" not in own or not getattr(model, "has_sinks", False)]
    tried = measured(model, text, {own or "plain": made(own) for own in allowed}, fed)
    best = tried[0]
    parts = ""
    for row, own in zip(tried, allowed, strict=True):
        if row.figures.mean_kld_nats < WORTH * best.figures.mean_kld_nats:
            best = row
            parts = own
    last = best
    more = set[Side]()
    if best.figures.mean_kld_nats > max_kld and kv_bits < MORE_BITS:
        kld = best.figures.mean_kld_nats
        size = best.cache_bytes

        def measure(given: Mapping[str, Collection[Side]]) -> list[Row]:
            names = {f"{name} at {MORE_BITS} bits": made(parts, own) for name, own in given.items()}
            tried.extend(measured(model, text, names, fed))
            return tried[-len(given) :]

        def least(singles: Mapping[str, set[Side]]) -> tuple[Row, set[Side]]:
            """The fewest of them that leave little enough, those first that gain most a byte; all, if none
            do.
            """
            rows = dict(zip(singles, measure(singles), strict=True))
            costs = {name: row.cache_bytes - size for name, row in rows.items() if row.cache_bytes > size}
            order = sorted(costs, key=lambda name: (rows[name].figures.mean_kld_nats - kld) / costs[name])
            found = {1: (rows[order[0]], singles[order[0]])}

            def first(count: int) -> tuple[Row, set[Side]]:
                if count not in found:
                    some = set[Side]().union(*(singles[name] for name in order[:count]))
                    keys, values = (sum(own == side for _, own in some) for side in SIDES)
                    found[count] = measure({f"keys of {keys}, values of {values} layers": some})[0], some
                return found[count]

            counts = range(1, len(order))  # the more of them, the less they leave
            return first(
                1 + bisect_left(counts, True, key=lambda n: first(n)[0].figures.mean_kld_nats <= max_kld)
            )

        last, more = least({f"layer {n}": {(n, side) for side in SIDES} for n in range(len(seen))})
        row, apart = least({f"{side} of layer {n}": {(n, side)} for n in range(len(seen)) for side in SIDES})
        if row.cache_bytes - size <= WORTH_APART * (last.cache_bytes - size):
            last = row
            more = apart
    chosen = made(parts, more).kv_format
    assert chosen is not None
    return replace(
        chosen, figures={"tokens": text.tokens, "mean_kld_nats": last.figures.mean_kld_nats}
    ), tried


def measured(
    model: LanguageModel, text: Text, formats: Mapping[str, CacheFormat], fed: Fed = lambda _: None
) -> list[Row]:
    """Of each format by its name: its figures on a text, against a cache that is not quantized."""
    rows = []
    for start in range(0, len(formats), AT_ONCE):
        some = [*formats.items()][start : start + AT_ONCE]
        longest = len(text.pieces[0])
        readers = [
            CacheReader(model, own.make_cache(model, longest)) for own in (REFERENCE, *dict(some).values())
        ]
        tallies, _ = read_legs(readers, text, fed=fed)
        for (name, _), reader, tally in zip(some, readers[1:], tallies[1:], strict=True):
            per_token = round(reader.nbytes / longest)
            rows.append(Row(name, per_token, reader.nbytes, tally.figures()))
    return rows


def statistics(model: LanguageModel, text: Text) -> list[Statistics]:
    """Of each layer that keeps keys and values."""
    default = model.reserve_cache(1, CacheOptions(FITTED_BITS)).pool.layers
    cache = model.reserve_cache(len(text.pieces[0]), CacheOptions(0))
    watched = []
    for layer in cache.pool.layers:
        counting = Watched("watched", layer.transform.bias_split)
        layer.watch(counting)
        watched.append(counting)
    reader = CacheReader(model, cache)
    for number, piece in enumerate(text.pieces):
        reader.begin(number)
        for _ in feed(reader, piece):
            pass
    return [
        Statistics.of(own, layer.transform.rotates_values)
        for own, layer in zip(watched, default, strict=True)
    ]
