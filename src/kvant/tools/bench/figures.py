"""Compute the figures of a recording: one row for every engine in every case."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from kvant.tools.bench.engines import DRAFTS, ONE_BY_ONE
from kvant.tools.bench.recording import Recording, Run
from kvant.tools.statistics import Spread, paired_ratio, percentile

Runs = Mapping[int, Run]  # by round


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One engine's figures in one case; None if unknown. A ratio pairs equal rounds; below 1 is faster.

    With drafts, the tokens of a step arrive together. So an engine with drafts has no percentiles and no
    bytes read, and for every engine in its recording the time per token is the mean, not the median.
    """

    engine: str  # the label
    context: int  # tokens of the longest prompt
    streams: int | None  # requests that came at once; None: they came one after another
    runs: int  # number of runs
    first_token_ms: float  # median over requests and runs
    # the context divided by the first token's time, median over runs
    prefill_tokens_per_s: float | None = None
    latency_p50_ms: float | None = None  # between two tokens of a request, over all runs
    latency_p95_ms: float | None = None
    latency_p99_ms: float | None = None
    tokens_per_s: float | None = None  # one divided by a run's mean time between tokens, median over runs
    # over all streams, from the arrival of the requests to the last token, median
    total_tokens_per_s: float | None = None
    # processor time, including the prompts', divided by all tokens, median
    cpu_ms_per_token: float | None = None
    peak_memory_bytes: int | None = None  # the largest of all runs
    cache_bytes: int | None = None
    # weights and cached tokens that one decode step reads, on average
    bytes_read_per_token: float | None = None
    achieved_gb_per_s: float | None = None  # bytes_read_per_token divided by the median latency
    copy_bandwidth_share: float | None = None  # achieved_gb_per_s divided by the device's copy bandwidth
    # tokens after the first divided by the steps that made them, over all runs
    tokens_per_step: float | None = None
    draft_acceptance: float | None = None  # the share of drafted tokens that were accepted
    drafts_off: int | None = None  # runs in which drafts did not pay and were switched off
    ratio: Spread | None = None  # a token's time divided by the baseline's
    first_token_ratio: Spread | None = None
    total_ratio: Spread | None = None  # the total time of all streams divided by the baseline's
    cpu_ratio: Spread | None = None  # the processor time divided by the baseline's
    plain_ratio: Spread | None = None  # divided by the same engine's without drafts, or one by one
    plain_cpu_ratio: Spread | None = None


def gaps_ms(run: Run) -> list[float]:
    """Return the times between two tokens of a request, for all requests."""
    return [after - before for times in run.arrivals_ms for before, after in pairwise(times)]


def summarize(recording: Recording) -> list[Summary]:
    """Return the figures ordered by case, then by engine."""
    cases: dict[tuple[int, ...], dict[str, dict[int, Run]]] = {}
    for run in recording.runs:
        cases.setdefault(run.prompt_tokens, {}).setdefault(run.engine, {})[run.run] = run
    time = _mean_ms if any(run.drafts for run in recording.runs) else lambda run: _middle(gaps_ms(run))
    summaries = []
    for lengths in sorted(cases, key=lambda lengths: (len(lengths), lengths)):
        engines = cases[lengths]
        for label in (label for label in recording.engines if label in engines):
            runs = engines[label]
            base = engines.get(recording.header.baseline, {})
            plain = engines.get(
                label.removesuffix(DRAFTS) if label.endswith(DRAFTS) else label + ONE_BY_ONE, {}
            )
            together = next(iter(runs.values())).together
            figures: dict[str, Any] = {
                "first_token_ms": median(times[0] for run in runs.values() for times in run.arrivals_ms),
                "peak_memory_bytes": max(run.peak_memory_bytes or 0 for run in runs.values()) or None,
                "cache_bytes": max(run.cache_bytes or 0 for run in runs.values()) or None,
                "ratio": _ratio(runs, base, time),
                "plain_ratio": _ratio(runs, plain, _total_ms if together else time),
            }
            if not (drafts := _drafts(runs)):
                gaps = [gap for run in runs.values() for gap in gaps_ms(run)]
                figures |= {
                    f"latency_p{percent}_ms": percentile(gaps, percent) for percent in (50, 95, 99) if gaps
                }
            if together:
                figures["total_tokens_per_s"] = median(1e3 / _total_ms(run) for run in runs.values())
                figures["cpu_ms_per_token"] = _middle(_cpu_ms(run) for run in runs.values())
                figures["total_ratio"] = _ratio(runs, base, _total_ms)
                figures["cpu_ratio"] = _ratio(runs, base, _cpu_ms)
                figures["plain_cpu_ratio"] = _ratio(runs, plain, _cpu_ms)
            else:
                figures["first_token_ratio"] = _ratio(runs, base, _first_ms)
                figures["prefill_tokens_per_s"] = median(
                    lengths[0] / _first_ms(run) * 1e3 for run in runs.values()
                )
                figures["tokens_per_s"] = _middle(
                    1e3 / mean for run in runs.values() if (mean := _mean_ms(run))
                )
                figures |= drafts or _bytes_read(runs, recording, label)
            streams = len(lengths) if together else None
            summaries.append(
                Summary(engine=label, context=max(lengths), streams=streams, runs=len(runs), **figures)
            )
    return summaries


def _bytes_read(runs: Runs, recording: Recording, label: str) -> dict[str, float]:
    weights = recording.engines[label].weight_bytes_read
    per_cached = _middle(run.cache_bytes_per_token for run in runs.values())
    middle = _middle(gap for run in runs.values() for gap in gaps_ms(run))
    if weights is None or per_cached is None or not middle:
        return {}
    # The step that makes the token at position p attends to p cached tokens.
    read = weights + per_cached * fmean(r.prompt_tokens[0] + len(r.arrivals_ms[0]) / 2 for r in runs.values())
    achieved = read / middle / 1e6
    share = achieved / recording.header.copy_bandwidth_gb_s
    return {"bytes_read_per_token": read, "achieved_gb_per_s": achieved, "copy_bandwidth_share": share}


def _drafts(runs: Runs) -> dict[str, float | None]:
    counts = [run.drafts for run in runs.values() if run.drafts]
    if not counts:
        return {}
    steps, drafted, accepted = (
        sum(each[name] for each in counts) for name in ("steps", "drafted", "accepted")
    )
    return {
        "tokens_per_step": sum(len(run.arrivals_ms[0]) - 1 for run in runs.values()) / steps,
        "draft_acceptance": accepted / drafted if drafted else None,
        "drafts_off": sum(each["off"] is not None for each in counts),
    }


def _ratio(runs: Runs, others: Runs, figure: Callable[[Run], float | None]) -> Spread | None:
    ours, theirs = ({n: ms for n, run in each.items() if (ms := figure(run))} for each in (runs, others))
    return paired_ratio(ours, theirs)


def _mean_ms(run: Run) -> float | None:
    return fmean(gaps) if (gaps := gaps_ms(run)) else None


def _first_ms(run: Run) -> float:
    return median(times[0] for times in run.arrivals_ms)


def _total_ms(run: Run) -> float:
    return max(times[-1] for times in run.arrivals_ms) / sum(map(len, run.arrivals_ms))


def _cpu_ms(run: Run) -> float | None:
    return None if run.cpu_ms is None else run.cpu_ms / sum(map(len, run.arrivals_ms))


def _middle(values: Iterable[float | None]) -> float | None:
    """Return the median of the known values."""
    known = [value for value in values if value is not None]
    return median(known) if known else None
