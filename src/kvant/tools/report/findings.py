"""Layers that are out of line, and the measured formats that help."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import mlx.core as mx

from kvant.models import Decoder
from kvant.models.bias import pair_sizes
from kvant.tools.report.formats import CacheFormat
from kvant.tools.report.layers import RANGE_GROUP

RANGE_FACTOR = 1.5  # of the median layer's key range; normal keys are at 2.3, one element that is all of a group at 5.7
BIAS_FACTOR = 2.0  # from which it is worth saying how many times the median layer's a bias is

Errors = Sequence[tuple[CacheFormat, Sequence[float]]]  # a format's attention error in every layer


@dataclass(frozen=True, slots=True)
class Finding:
    """A layer that is out of line.

    Attributes:
        layer: its number.
        kind: key_bias or key_range.
        value: the key bias of the rotary pair where it is largest compared with the projection's own part; or the
            keys' range, as in :class:`kvant.tools.report.layers.LayerRun`.
        times_median: ``value`` divided by the median layer's; None where that is 0.
        text: the finding in a line.
    """

    layer: int
    kind: str
    value: float
    times_median: float | None
    text: str


def find(model: Decoder, key_range: Sequence[float], errors: Errors) -> list[Finding]:
    """Layers whose key bias the bias split keeps out of the cache, or whose keys' range is out of line.

    Args:
        key_range: of each layer, of keys as they are stored.
        errors: of the formats that were measured.
    """
    found = [*_biases(model, errors), *_ranges(key_range, errors)]
    return sorted(found, key=lambda finding: finding.layer)


def _biases(model: Decoder, errors: Errors) -> list[Finding]:
    largest: list[float] = []
    against: list[float] = []
    for layer in model.layers:
        bias = layer.self_attn.qkv_bias
        if bias is None:
            return []
        size, typical = pair_sizes(model.config, layer.self_attn.qkv_proj, bias.whole, layer.norms["before_attention"])
        ratio = (size / mx.maximum(typical, 1e-30)).flatten()
        worst = mx.argmax(ratio)
        largest.append(float(size.flatten()[worst].item()))  # type: ignore[arg-type]
        against.append(float(ratio[worst].item()))  # type: ignore[arg-type]
    middle = median(largest)
    found = []
    for number, layer in enumerate(model.layers):
        assert layer.self_attn.qkv_bias is not None
        if not layer.self_attn.qkv_bias.pairs:
            continue
        times = largest[number] / middle if middle else None
        parts = [f"{against[number]:.3g} times what the projection adds"]
        if times is not None and times >= BIAS_FACTOR:
            parts.append(f"{times:.3g} times the median layer's")
        text = (
            f"layer {number}: key bias {largest[number]:.3g} in a rotary pair, {', '.join(parts)}; "
            f"--kv-bias-split keeps it out of the cache{_with_and_without(number, errors)}"
        )
        found.append(Finding(number, "key_bias", largest[number], times, text))
    return found


def _with_and_without(layer: int, errors: Errors) -> str:
    """The layer's error in the fewest bits that were measured both ways; empty if none was."""
    known = {(f.bits, f.group, f.split): own[layer] for f, own in errors}
    both = sorted((bits, group) for bits, group, split in known if split and (bits, group, False) in known)
    if not both:
        return ""
    bits, group = both[0]
    without, with_it = known[bits, group, False], known[bits, group, True]
    return f" (its {bits}g{group} attention error: {without:.2g} without, {with_it:.2g} with)"


def _ranges(key_range: Sequence[float], errors: Errors) -> list[Finding]:
    middle = median(key_range)
    found = []
    for number, value in enumerate(key_range):
        if value <= RANGE_FACTOR * middle:
            continue
        text = (
            f"layer {number}: within a group of keys the largest is {value:.2f} times their root mean square, "
            f"{value / middle:.2f} times the median layer's (groups of up to {RANGE_GROUP})"
        )
        # Formats without the split only if there are no others: its effect is part of the bias' finding.
        measured = [(f, own[number]) for f, own in errors if f.split] or [(f, own[number]) for f, own in errors]
        measured.sort(key=lambda pair: -pair[1])
        if measured:
            text += "; attention error " + ", ".join(f"{error:.2g} with {f.label}" for f, error in measured)
        if len(measured) > 1 and measured[-1][1] < measured[0][1]:
            text += f": {measured[-1][0].flags} is best"
        found.append(Finding(number, "key_range", value, value / middle, text))
    return found
