"""The smallest format that is good enough."""

from collections.abc import Sequence

from kvant.tools.report.measure import FormatResult


def suggest(results: Sequence[FormatResult], max_kld_nats: float) -> FormatResult | None:
    """The result with the fewest bytes a token among those whose mean KLD is at most this; of equals the lowest KLD.

    None: no result is that good.
    """
    fitting = [r for r in results if r.figures.mean_kld_nats <= max_kld_nats]
    return min(fitting, key=lambda r: (r.bytes_per_token, r.figures.mean_kld_nats), default=None)
