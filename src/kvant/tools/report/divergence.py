"""How far predictions are from those they should be: KLD, perplexity, agreement."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from kvant.tools.statistics import percentile


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures over all positions; infinite if a prediction was not finite."""

    positions: int  # predictions compared
    non_finite: int  # of them with a NaN, a +inf, or nothing but -inf; their KLD and loss count as infinite
    perplexity: float  # exp of the mean loss of the tokens that follow
    mean_kld_nats: float  # of the expected distribution against the given one
    median_kld_nats: float
    p99_kld_nats: float
    p999_kld_nats: float  # the 99.9th percentile
    top1: float  # share of positions with the same likeliest token


@dataclass(slots=True)
class Tally:
    """Positions counted so far, a few floats each: logits are never kept."""

    klds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    same: int = 0
    non_finite: int = 0

    def add(self, expected: mx.array, given: mx.array, following: Sequence[int]) -> None:
        """Count positions.

        Args:
            expected, given: (S, vocab) log-probabilities, from :func:`log_probabilities`.
            following: the S tokens that follow.
        """
        finite = are_finite(given)
        kld = mx.where(finite, divergence(expected, given), math.inf)
        same = finite & (mx.argmax(expected, axis=-1) == mx.argmax(given, axis=-1))
        tokens = mx.array(list(following))[:, None]
        loss = mx.where(finite, -mx.take_along_axis(given, tokens, axis=-1)[:, 0], math.inf)
        self.losses += loss.tolist()  # type: ignore[arg-type]
        self.klds += kld.tolist()  # type: ignore[arg-type]
        self.same += int(same.sum().item())  # type: ignore[arg-type]
        self.non_finite += len(given) - int(finite.sum().item())  # type: ignore[arg-type]

    def figures(self) -> Figures:
        """The figures of the positions counted, at least one."""
        loss = math.fsum(self.losses) / len(self.losses)
        return Figures(
            positions=len(self.klds),
            non_finite=self.non_finite,
            perplexity=math.exp(loss) if loss < 700 else math.inf,  # more than a float can hold
            mean_kld_nats=math.fsum(self.klds) / len(self.klds),
            median_kld_nats=percentile(self.klds, 50),
            p99_kld_nats=percentile(self.klds, 99),
            p999_kld_nats=percentile(self.klds, 99.9),
            top1=self.same / len(self.klds),
        )


def log_probabilities(logits: mx.array) -> mx.array:
    """(S, vocab) logits -> float32 log-probabilities. A row that :func:`are_finite` refuses has a NaN."""
    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def are_finite(log_probabilities: mx.array) -> mx.array:
    """Which rows are those of logits without a NaN or a +inf, and with more than -inf."""
    return ~mx.isnan(log_probabilities).any(axis=-1)


def divergence(expected: mx.array, given: mx.array) -> mx.array:
    """KL(expected || given) of each row, in nats.

    Computed as sum of p (log p - log q) - p + q, whose terms are none below 0: p and q sum to 1, so it is the
    same, and rounding in their sums, which would hide a small divergence, cancels. Where the two are close a
    term is p (d + expm1(-d)) with d = log p - log q.

    Args:
        expected, given: (S, vocab) float32 log-probabilities. A row is infinite if something expected is
            given none.
    """
    p = mx.exp(expected)
    q = mx.exp(given)
    # -inf - -inf would be NaN; an unexpected token counts as q alone
    d = mx.where(p > 0, expected - given, 0.0)
    near = p * (d + mx.expm1(-mx.clip(d, -1.0, 1.0)))
    far = p * d - p + q
    return mx.where(mx.abs(d) < 1.0, mx.where(p > 0, near, q), far).sum(axis=-1)
