"""Tune a cache format for a model: choose a key transform and the bits of keys and values."""

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

MORE_BITS = 8  # for keys and values that get more bits than the others
AT_ONCE = 16  # formats whose caches exist at the same time
WORTH = 0.97  # another step of the transform must leave at most this share of the divergence
WORTH_SINGLE = 0.85  # choosing keys and values separately must take at most this share of the extra bytes
PARTS = ("", "center", "rotate", "balance", "center+rotate", "center+balance", "center+balance+rotate")
SIDES = ("keys", "values")
Side = tuple[int, str]  # a layer's number, and "keys" or "values"


@dataclass(frozen=True, slots=True, eq=False)
class Watched(KeyTransform):
    """A key transform that changes nothing and gathers statistics.

    Attributes:
        sums: by name, per kv head and channel, (K, 1, D) float32: "tokens", "keys", "key squares" and "query
            squares". "base" is the mean of the first tokens, which is subtracted from keys; query squares are
            summed over the query heads that read a kv head.
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
    """Statistics of a layer's keys and queries, each (K, D): kv heads and channels."""

    mean: mx.array  # mean of the keys
    spread: mx.array  # standard deviation of the keys
    queries: mx.array  # root mean square of the queries that read them
    # rotary pairs whose biases are split off; both elements of a pair then need the same balance
    pairs: tuple[int, ...]
    rotates_values: bool  # as in kvant's default 4-bit format

    @classmethod
    def of(cls, watched: Watched, rotates_values: bool) -> "Statistics":
        sums = watched.sums
        split = watched.bias_split
        tokens = sums["tokens"]
        K = sums["base"].shape[0]
        mean = sums["keys"] / tokens
        spread = mx.sqrt(mx.maximum(sums["key squares"] / tokens - mx.square(mean), 1e-12))
        # A model with its own attention passes no queries.
        squares = (
            sums.get("query squares", tokens * mx.ones_like(mean)).reshape(K, -1, mean.shape[-1]).mean(axis=1)
        )
        mean = (mean + sums["base"]).squeeze(1)
        pairs = () if split is None else split.pairs
        return cls(mean, spread.squeeze(1), mx.sqrt(squares / tokens), pairs, rotates_values)

    def choice(self, keys: int, values: int, group: int, parts: str) -> LayerChoice:
        """Return a layer's format with these bits, and with some of center, balance and rotate."""
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
        """Exponents of the s that minimize ``sum(k^2 / s^2) sum(q^2 s^2)``, a rotated group's error."""
        size = self.spread if centered else mx.sqrt(mx.square(self.spread) + mx.square(self.mean))
        factor = mx.log2(mx.maximum(size, 1e-6) / mx.maximum(self.queries, 1e-6)) / 2
        exponents = mx.round(factor - mx.median(factor, axis=-1, keepdims=True))
        if self.pairs:
            halves = exponents.reshape(len(exponents), 2, -1).max(axis=1, keepdims=True)
            exponents = mx.tile(halves, (1, 2, 1)).reshape(exponents.shape)
        exponents = mx.clip(exponents, -MAX_EXPONENT, MAX_EXPONENT).astype(mx.int32)
        clipped: list[list[int]] = exponents.tolist()  # type: ignore[assignment]
        return clipped


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    bytes_per_token: int  # the cache's bytes divided by its reserved tokens
    cache_bytes: int  # bytes of a cache for one piece, including layers with a window
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

    Layers get 8 bits in the order of their gain per byte, until the mean KLD is at most ``max_kld``, in nats.
    Keys and values of single layers get them instead if that takes much less memory. ``kv_tail`` is
    CacheOptions' ``tail``. ``progress`` is called with (tokens fed, tokens to be fed at most). Returns the
    format, and a row for everything tried, in order.
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
        for n, layer in enumerate(seen):
            keys, values = (MORE_BITS if (n, side) in more else kv_bits for side in SIDES)
            layers.append(layer.choice(keys, values, kv_group_size, parts))
        return CacheFormat(kv_format=KVFormat(digest, tuple(layers)), tail=kv_tail)

    allowed = [each for each in PARTS if "center" not in each or not getattr(model, "has_sinks", False)]
    tried = measured(model, text, {each or "plain": made(each) for each in allowed}, fed)
    best = tried[0]
    parts = ""
    for row, candidate in zip(tried, allowed, strict=True):
        if row.figures.mean_kld_nats < WORTH * best.figures.mean_kld_nats:
            best = row
            parts = candidate
    last = best
    more = set[Side]()
    if best.figures.mean_kld_nats > max_kld and kv_bits < MORE_BITS:
        kld = best.figures.mean_kld_nats
        size = best.cache_bytes

        def measure(choices: Mapping[str, Collection[Side]]) -> list[Row]:
            names = {f"{name} at {MORE_BITS} bits": made(parts, sides) for name, sides in choices.items()}
            tried.extend(measured(model, text, names, fed))
            return tried[-len(choices) :]

        def least(singles: Mapping[str, set[Side]]) -> tuple[Row, set[Side]]:
            """Pick the fewest singles that suffice, those with the largest gain per byte first, or all."""
            rows = dict(zip(singles, measure(singles), strict=True))
            costs = {name: row.cache_bytes - size for name, row in rows.items() if row.cache_bytes > size}
            order = sorted(costs, key=lambda name: (rows[name].figures.mean_kld_nats - kld) / costs[name])
            results = {1: (rows[order[0]], singles[order[0]])}

            def first(count: int) -> tuple[Row, set[Side]]:
                if count not in results:
                    some = set[Side]().union(*(singles[name] for name in order[:count]))
                    keys, values = (sum(which == side for _, which in some) for side in SIDES)
                    results[count] = measure({f"keys of {keys}, values of {values} layers": some})[0], some
                return results[count]

            counts = range(1, len(order))  # bisectable: more of them leave less divergence
            return first(
                1 + bisect_left(counts, True, key=lambda n: first(n)[0].figures.mean_kld_nats <= max_kld)
            )

        last, more = least({f"layer {n}": {(n, side) for side in SIDES} for n in range(len(seen))})
        row, sides = least({f"{side} of layer {n}": {(n, side)} for n in range(len(seen)) for side in SIDES})
        if row.cache_bytes - size <= WORTH_SINGLE * (last.cache_bytes - size):
            last = row
            more = sides
    chosen = made(parts, more).kv_format
    assert chosen is not None
    return replace(
        chosen, figures={"tokens": text.tokens, "mean_kld_nats": last.figures.mean_kld_nats}
    ), tried


def measured(
    model: LanguageModel, text: Text, formats: Mapping[str, CacheFormat], fed: Fed = lambda _: None
) -> list[Row]:
    """Measure each named format on a text, against a cache that is not quantized."""
    rows = []
    for start in range(0, len(formats), AT_ONCE):
        some = [*formats.items()][start : start + AT_ONCE]
        longest = len(text.pieces[0])
        readers = [
            CacheReader(model, form.make_cache(model, longest)) for form in (REFERENCE, *dict(some).values())
        ]
        tallies, _ = read_legs(readers, text, fed=fed)
        for (name, _), reader, tally in zip(some, readers[1:], tallies[1:], strict=True):
            per_token = round(reader.nbytes / longest)
            rows.append(Row(name, per_token, reader.nbytes, tally.figures()))
    return rows


def statistics(model: LanguageModel, text: Text) -> list[Statistics]:
    """Gather statistics of each layer that caches keys and values."""
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
        Statistics.of(sums, layer.transform.rotates_values)
        for sums, layer in zip(watched, default, strict=True)
    ]
