"""The kinds of rotary position embedding in config.json, computed as in transformers 5.23."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from kvant.errors import ModelError
from kvant.fields import MAX_SIZE, mapping, number, shown, size
from kvant.operators.rotary import Rotary, plain_frequencies

_ORIGINAL = "original_max_position_embeddings"
_YARN = (
    "factor",
    _ORIGINAL,
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
)
# The keys of each kind, besides rope_theta. Other keys are refused, as they could change the computation.
_KEYS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", _ORIGINAL, "low_freq_factor", "high_freq_factor"),
    "yarn": _YARN,
}


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotation of heads by position. Pair p rotates theta^(-2p/D) radians per token, adjusted by kind:

    - default: no change;
    - linear: divide by ``factor`` (kaiokendev's position interpolation, arXiv 2306.15595);
    - dynamic: theta grows with the length of the text (NTK-aware); here the length is the context limit;
    - llama3: divide slow pairs by ``factor``, leave fast ones, with a ramp between (Llama 3.1);
    - yarn: the same by pair number, and multiply all heads by ``attention_factor`` (arXiv 2309.00071).

    Slow pairs rotate fewer than ``low_freq_factor`` times in the original context, fast ones more often than
    ``high_freq_factor``. Yarn's limits are ``beta_slow`` and ``beta_fast``; ``truncate`` rounds the ends of
    the ramp outward to whole pairs.
    """

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_context: int = 1  # context in tokens before it was extended
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0

    def context(self, max_position_embeddings: int) -> int:
        """Return the context limit in tokens: config.json's, times ``factor`` if the kind is dynamic."""
        if self.kind != "dynamic":
            return max_position_embeddings
        context = self.factor * max_position_embeddings
        if context > MAX_SIZE:
            raise ModelError(
                f"config.json: rope factor {self.factor:g} makes a context of more than {MAX_SIZE} tokens"
            )
        return int(context)

    @lru_cache(maxsize=8)  # noqa: B019  # immutable and small
    def rotary(self, head_dim: int) -> Rotary:
        """Return the tables for heads of ``head_dim`` elements, which are cached."""
        if self.kind == "default":
            return Rotary.plain(head_dim, self.theta)
        return Rotary(self.frequencies(head_dim), self.attention_factor)

    def frequencies(self, head_dim: int) -> list[float]:
        """Return the (D/2) frequencies in radians per token, in float64."""
        plain = plain_frequencies(head_dim, self._theta(head_dim))
        if self.kind == "linear":
            return [f / self.factor for f in plain]
        if self.kind == "llama3":
            return [self._llama3(f) for f in plain]
        if self.kind == "yarn":
            return self._yarn(plain)
        return plain

    def _theta(self, head_dim: int) -> float:
        """Return the base. For dynamic, it is transformers' base for a text as long as the context limit.

        transformers recomputes the base as a text grows without rotating cached keys again, so its logits
        depend on how a prompt is split. A fixed base avoids that.
        """
        if self.kind != "dynamic":
            return self.theta
        growth = self.factor * self.context(self.original_context) / self.original_context - (self.factor - 1)
        return float(self.theta * growth ** (head_dim / (head_dim - 2)))

    def _llama3(self, frequency: float) -> float:
        rotations = self.original_context * frequency / (2 * math.pi)
        share = (rotations - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        share = min(max(share, 0.0), 1.0)
        return (1 - share) * frequency / self.factor + share * frequency

    def _yarn(self, plain: list[float]) -> list[float]:
        D = 2 * len(plain)

        def pair_with(turns: float) -> float:
            return D * math.log(self.original_context / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        first = pair_with(self.beta_fast)
        last = pair_with(self.beta_slow)
        if self.truncate:
            first = math.floor(first)
            last = math.ceil(last)
        first = max(first, 0)
        last = min(last, D - 1)
        if first == last:
            last += 0.001  # as transformers avoids a ramp of length 0
        divided = [min(max((p - first) / (last - first), 0.0), 1.0) for p in range(len(plain))]
        return [f / self.factor * d + f * (1 - d) for f, d in zip(plain, divided, strict=True)]


def read_rope(
    raw: Mapping[str, Any], head_dim: int, max_position_embeddings: int, default_theta: float = 10000.0
) -> Rope:
    """Return the RoPE of a config.json, from ``rope_parameters`` (transformers 5) or the older keys."""
    where, settings = _settings(raw)
    kind = _kind(where, settings)
    for name, value in settings.items():
        known = name in ("rope_type", "type", "rope_theta", *_KEYS[kind])
        if not known and (name, value) != ("partial_rotary_factor", 1.0):
            raise ModelError(
                f"config.json: {where} has {name} {shown(value)}, which is not supported for rope type "
                f"{kind!r}"
            )
    theta = number(
        settings if "rope_theta" in settings else raw, "rope_theta", default=default_theta, least=1.0
    )
    if kind == "default":
        return Rope(theta=theta)
    prefix = f"{where}."
    factor = number(settings, "factor", least=1.0, where=prefix)
    if kind == "linear":
        return Rope(kind, theta, factor)
    if kind == "dynamic":
        if head_dim < 4:
            raise ModelError(f"config.json: head_dim is {head_dim}; rope type 'dynamic' needs at least 4")
        rope = Rope(kind, theta, factor, max_position_embeddings)
        rope.context(max_position_embeddings)  # refuses one that is too large
        return rope
    # As in transformers, a top-level value overrides the object's.
    holder = raw if raw.get(_ORIGINAL) is not None else settings
    original = size(holder, _ORIGINAL, default=max_position_embeddings)
    if kind == "llama3":
        low, high = (number(settings, f"{name}_freq_factor", where=prefix) for name in ("low", "high"))
        if low >= high:
            raise ModelError(
                f"config.json: {prefix}low_freq_factor is {low:g}; expected less than high's, {high:g}"
            )
        return Rope(kind, theta, factor, original, low, high)
    return _read_yarn(settings, prefix, theta, factor, original)


def _settings(raw: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the key of the settings, and the settings that are not null."""
    older = mapping(raw, "rope_scaling")
    newer = mapping(raw, "rope_parameters")
    if older and newer and older != newer:
        raise ModelError("config.json: rope_scaling and rope_parameters differ; expected one of them")
    where = "rope_scaling" if older else "rope_parameters"
    return where, {name: value for name, value in (older or newer).items() if value is not None}


def _kind(where: str, rope: Mapping[str, Any]) -> str:
    kinds = [rope[name] for name in ("rope_type", "type") if name in rope] or ["default"]
    for kind in kinds:
        if not isinstance(kind, str) or kind not in _KEYS:
            raise ModelError(
                f"config.json: rope type {shown(kind)} is not supported; supported: "
                f"{', '.join(map(repr, _KEYS))}"
            )
        if kind != kinds[0]:
            raise ModelError(
                f"config.json: {where} has rope type {kinds[0]!r} and rope type {kind!r}; expected one"
            )
    return str(kinds[0])


def _read_yarn(rope: Mapping[str, Any], prefix: str, theta: float, factor: float, original: int) -> Rope:
    if theta == 1.0:
        raise ModelError("config.json: rope_theta is 1.0; rope type 'yarn' needs more")
    fast = number(rope, "beta_fast", default=32.0, least=1e-6, where=prefix)
    slow = number(rope, "beta_slow", default=1.0, least=1e-6, where=prefix)
    if fast < slow:
        raise ModelError(f"config.json: {prefix}beta_fast is {fast:g}; expected at least beta_slow, {slow:g}")
    truncate = rope.get("truncate", True)
    if not isinstance(truncate, bool):
        raise ModelError(f"config.json: {prefix}truncate is {shown(truncate)}; expected true or false")
    lengthening = 0.1 * math.log(factor)
    default = lengthening + 1
    if rope.get("mscale") and rope.get("mscale_all_dim"):  # only both have an effect
        above, below = (number(rope, name, where=prefix) for name in ("mscale", "mscale_all_dim"))
        default = (above * lengthening + 1) / (below * lengthening + 1)
    ends: dict[str, Any] = {"beta_fast": fast, "beta_slow": slow, "truncate": truncate}
    attention_factor = number(rope, "attention_factor", default=default, where=prefix)
    return Rope("yarn", theta, factor, original, **ends, attention_factor=attention_factor)
