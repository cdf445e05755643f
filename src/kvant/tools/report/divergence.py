"""Measure how far predictions are from a reference: KL divergence (KLD), perplexity, agreement."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from kvant.tools.statistics import percentile


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures over all positions; infinite if a prediction was not finite."""

    positions: int  # number of predictions compared
    non_finite: int  # predictions with a NaN, a +inf, or only -inf; their KLD and loss count as infinite
    perplexity: float  # exp of the mean loss of the tokens that follow
    mean_kld_nats: float  # KLD of the predicted from the expected distribution
    median_kld_nats: float
    p99_kld_nats: float
    p999_kld_nats: float  # the 99.9th percentile
    top1: float  # share of positions at which both have the same likeliest token


@dataclass(slots=True)
class Tally:
    """Accumulate figures over positions; stores a few floats per position, never logits."""

    klds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    same: int = 0
    non_finite: int = 0

    def add(self, expected: mx.array, predicted: mx.array, following: Sequence[int]) -> None:
        """Count positions.

        Args:
            expected, predicted: (S, vocab) log-probabilities from :func:`log_probabilities`.
            following: the S tokens that really follow.
        """
        finite = are_finite(predicted)
        kld = mx.where(finite, divergence(expected, predicted), math.inf)
        same = finite & (mx.argmax(expected, axis=-1) == mx.argmax(predicted, axis=-1))
        tokens = mx.array(list(following))[:, None]
        loss = mx.where(finite, -mx.take_along_axis(predicted, tokens, axis=-1)[:, 0], math.inf)
        self.losses += loss.tolist()  # type: ignore[arg-type]
        self.klds += kld.tolist()  # type: ignore[arg-type]
        self.same += int(same.sum().item())  # type: ignore[arg-type]
        self.non_finite += len(predicted) - int(finite.sum().item())  # type: ignore[arg-type]

    def figures(self) -> Figures:
        """Return the figures; at least one position must have been counted."""
        loss = math.fsum(self.losses) / len(self.losses)
        return Figures(
            positions=len(self.klds),
            non_finite=self.non_finite,
            perplexity=math.exp(loss) if loss < 700 else math.inf,  # exp would overflow
            mean_kld_nats=math.fsum(self.klds) / len(self.klds),
            median_kld_nats=percentile(self.klds, 50),
            p99_kld_nats=percentile(self.klds, 99),
            p999_kld_nats=percentile(self.klds, 99.9),
            top1=self.same / len(self.klds),
        )


def log_probabilities(logits: mx.array) -> mx.array:
    """Convert (S, vocab) logits to float32 log-probabilities. :func:`are_finite` detects invalid rows."""
    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def are_finite(log_probabilities: mx.array) -> mx.array:
    """Return for each row whether its logits had no NaN and no +inf, and not only -inf."""
    return ~mx.isnan(log_probabilities).any(axis=-1)


def divergence(expected: mx.array, predicted: mx.array) -> mx.array:
    """Return KL(expected || predicted) of each row, in nats.

    Computed as the sum of p (log p - log q) - p + q, whose terms are never negative. p and q each sum to 1,
    so the result is the same, but rounding errors in these sums, which would hide a small divergence, cancel.
    If log p and log q are close, a term is p (d + expm1(-d)) with d = log p - log q.

    Args:
        expected, predicted: (S, vocab) float32 log-probabilities. A row's result is infinite if ``predicted``
            rules out a token that ``expected`` allows.
    """
    p = mx.exp(expected)
    q = mx.exp(predicted)
    # -inf - -inf would be NaN; a token with p = 0 contributes only q
    d = mx.where(p > 0, expected - predicted, 0.0)
    near = p * (d + mx.expm1(-mx.clip(d, -1.0, 1.0)))
    far = p * d - p + q
    return mx.where(mx.abs(d) < 1.0, mx.where(p > 0, near, q), far).sum(axis=-1)
