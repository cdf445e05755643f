"""The figures of a recording: every engine at every context, and whether the engines wrote the same tokens."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from kvant.tools.bench.engines import DRAFTS
from kvant.tools.bench.recording import Drafted, Engine, Recording, Run, Sent, Token
from kvant.tools.statistics import Spread, paired_ratio, percentile, theil_sen

Runs = list[tuple[Run, list[Token]]]
SLOPE_DISTANCE = 100  # positions: over fewer, a slope is noise


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One engine's figures at one context; None: not known.

    Attributes:
        engine, context: the label, and the tokens of the prompt.
        runs, interrupted: runs completed, from which all figures are, and runs left out.
        first_token_ms: median over runs.
        prefill_tokens_per_s: the context divided by the first token's time, median over runs.
        latency_p50_ms, latency_p95_ms, latency_p99_ms: over the tokens of all runs, the first of each left out.
        tokens_per_s: one divided by a run's mean latency without the first token, median over runs.
        slope_us_per_1k: microseconds a token more with every 1,000 tokens of context; one for all contexts of an
            engine.
        peak_memory_bytes, cache_bytes: the largest of the runs.
        bytes_read_per_token: of the weights and of the cached tokens that one decode step reads, on average.
        achieved_gb_per_s: that divided by the median latency, in 1e9 bytes.
        copy_bandwidth_share: that divided by the device's copy bandwidth.
        ranks, parallel: processes in all, and how the model is divided among them.
        sums_per_token, messages_per_token, sent_bytes_per_token: of rank 0 in a decode step, on average.
        ms_per_token: the time of the tokens after the first divided by their number, median over runs; where some
            engine drafts. The tokens of one step come at once, so an engine that drafts has no percentiles, no slope
            and no bytes.
        tokens_per_step, draft_acceptance: of an engine that drafts, the tokens after the first divided by the steps,
            and the share of drafted tokens that are in the text, over all runs; None: nothing was drafted.
        drafts_off: runs in which drafts did not pay and were switched off.
        draft_ratio: time a token divided by that of the same engine without drafts in the same round.
        ratio, first_token_ratio: this engine's median latency and first-token time to the baseline's of the same
            round; below 1 is faster.
    """

    engine: str
    context: int
    runs: int
    interrupted: int
    first_token_ms: float | None = None
    prefill_tokens_per_s: float | None = None
    latency_p50_ms: float | None = None
    latency_p95_ms: float | None = None
    latency_p99_ms: float | None = None
    tokens_per_s: float | None = None
    slope_us_per_1k: float | None = None
    peak_memory_bytes: int | None = None
    cache_bytes: int | None = None
    bytes_read_per_token: float | None = None
    achieved_gb_per_s: float | None = None
    copy_bandwidth_share: float | None = None
    ranks: int | None = None
    parallel: str | None = None
    sums_per_token: float | None = None
    messages_per_token: float | None = None
    sent_bytes_per_token: float | None = None
    ms_per_token: float | None = None
    tokens_per_step: float | None = None
    draft_acceptance: float | None = None
    drafts_off: int | None = None
    draft_ratio: Spread | None = None
    ratio: Spread | None = None
    first_token_ratio: Spread | None = None


def summarize(recording: Recording, baseline: str | None = None) -> list[Summary]:
    """The figures of every engine at every context, in the order of contexts and then of engines.

    Args:
        recording: as read or as just recorded.
        baseline: label of the engine that ratios are to; default: the recording's.

    Raises:
        ValueError: a baseline that the recording does not have.
    """
    if baseline is not None and baseline not in recording.engines:
        raise ValueError(f"baseline is {baseline!r}; expected one of {', '.join(recording.engines)}")
    baseline = baseline or recording.header.baseline
    runs: dict[tuple[int, str], Runs] = {}
    for run, tokens in recording.completed():
        runs.setdefault((run.context, run.engine), []).append((run, tokens))
    left_out = [(context, label) for label, _, context in recording.interrupted()]
    slopes = {label: _slope(runs, label) for label in recording.engines}
    bandwidth = recording.header.copy_bandwidth_gb_s
    order = list(recording.engines)
    summaries = []
    for context, label in sorted({*runs, *left_out}, key=lambda case: (case[0], order.index(case[1]))):
        own, others = runs.get((context, label), []), runs.get((context, baseline or ""), [])
        drafts = [found for run, _ in own if (found := recording.drafts.get((label, run.run, context)))]
        figures = _figures(own, recording.engines[label], bandwidth, drafted=bool(drafts)) if own else {}
        if recording.drafts and own:
            plain = runs.get((context, label.removesuffix(DRAFTS)), []) if drafts else []
            figures |= _drafts(own, drafts, plain)
        summaries.append(
            Summary(
                engine=label,
                context=context,
                runs=len(own),
                interrupted=left_out.count((context, label)),
                slope_us_per_1k=slopes[label] if own and not drafts else None,
                ratio=None if drafts else paired_ratio(_p50s(own), _p50s(others)),
                first_token_ratio=paired_ratio(_firsts(own), _firsts(others)),
                **figures,
                **_sent([sent for run, _ in own if (sent := recording.sent.get((label, run.run, context)))]),
            )
        )
    return summaries


def agreement(recording: Recording) -> str | None:
    """How many of every engine's runs have the baseline's tokens of the same round; None: there is none to compare.

    Greedy tokens of one model differ where rounding decides between two that are as likely; a quantized cache, or
    other dtypes, round more.
    """
    baseline = recording.header.baseline
    known = {(run.engine, run.run, run.context): run.token_ids for run in recording.runs if run.token_ids is not None}
    pairs: dict[str, list[bool]] = {}
    for (label, number, context), ids in known.items():
        others = known.get((baseline or "", number, context))
        if label != baseline and others is not None:
            pairs.setdefault(label, []).append(ids == others)
    counts = ", ".join(f"{label} in {sum(same)} of {len(same)}" for label, same in pairs.items())
    return f"Runs with the same tokens as {baseline}: {counts}." if pairs else None


def _figures(runs: Runs, engine: Engine, bandwidth: float | None, *, drafted: bool) -> dict[str, Any]:
    """The figures of one engine's completed runs at one context that need no other engine."""
    firsts = _firsts(runs).values()
    later = [token for _, tokens in runs for token in tokens[1:]]
    figures: dict[str, Any] = {
        "first_token_ms": median(firsts),
        "prefill_tokens_per_s": median(run.context / tokens[0].latency_ms * 1e3 for run, tokens in runs),
        "peak_memory_bytes": _largest(run.peak_memory_bytes for run, _ in runs),
        "cache_bytes": _largest(run.cache_bytes for run, _ in runs),
    }
    if not later:
        return figures
    figures["tokens_per_s"] = median(1e3 / mean for mean in _means(runs).values())
    if drafted:
        return figures
    latencies = [token.latency_ms for token in later]
    for percent in (50, 95, 99):
        figures[f"latency_p{percent}_ms"] = percentile(latencies, percent)
    per_cached = [run.cache_bytes_per_token for run, _ in runs if run.cache_bytes_per_token is not None]
    if engine.weight_bytes_read is not None and per_cached:
        # The step that makes the token of position p attends to p cached tokens.
        cached = sum(token.position for token in later) / len(later)
        figures["bytes_read_per_token"] = read = engine.weight_bytes_read + median(per_cached) * cached
        figures["achieved_gb_per_s"] = achieved = read / figures["latency_p50_ms"] / 1e6
        figures["copy_bandwidth_share"] = achieved / bandwidth if bandwidth else None
    return figures


def _drafts(runs: Runs, drafts: Sequence[Drafted], plain: Runs) -> dict[str, Any]:
    """What drafts did, and the time a token, which they are judged by; ``plain``: the runs without."""
    means = _means(runs)
    figures: dict[str, Any] = {"ms_per_token": median(means.values()) if means else None}
    if not drafts:
        return figures
    drafted = sum(each.drafted for each in drafts)
    later = sum(len(tokens) - 1 for _, tokens in runs)
    return figures | {
        "tokens_per_step": later / sum(each.steps for each in drafts),
        "draft_acceptance": sum(each.accepted for each in drafts) / drafted if drafted else None,
        "drafts_off": sum(each.off is not None for each in drafts),
        "draft_ratio": paired_ratio(means, _means(plain)),
    }


def _sent(runs: Sequence[Sent]) -> dict[str, Any]:
    """What a step sends; nothing where the engine is one process."""
    if not runs:
        return {}
    steps = sum(sent.steps for sent in runs)
    return {
        "ranks": runs[0].ranks,
        "parallel": runs[0].parallel,
        "sums_per_token": sum(sent.sums for sent in runs) / steps,
        "messages_per_token": sum(sent.messages for sent in runs) / steps,
        "sent_bytes_per_token": sum(sent.bytes for sent in runs) / steps,
    }


def _slope(runs: dict[tuple[int, str], Runs], label: str) -> float | None:
    """Microseconds per 1,000 tokens of context; None over so short a distance that it would be noise."""
    groups = [
        [(token.position, token.latency_ms) for _, tokens in own for token in tokens[1:]]
        for (_, engine), own in runs.items()
        if engine == label
    ]
    positions = [position for group in groups for position, _ in group]
    if not positions or max(positions) - min(positions) < SLOPE_DISTANCE:
        return None
    slope = theil_sen(groups)
    return None if slope is None else slope * 1e6  # ms a token -> us a thousand


def _firsts(runs: Runs) -> dict[int, float]:
    """First-token time by round."""
    return {run.run: tokens[0].latency_ms for run, tokens in runs}


def _p50s(runs: Runs) -> dict[int, float]:
    """Median latency by round, the first token left out."""
    return {run.run: median(t.latency_ms for t in tokens[1:]) for run, tokens in runs if tokens[1:]}


def _means(runs: Runs) -> dict[int, float]:
    """Mean latency by round, the first token left out."""
    return {run.run: fmean(t.latency_ms for t in tokens[1:]) for run, tokens in runs if tokens[1:]}


def _largest(values: Iterable[int | None]) -> int | None:
    """The largest of those that are known."""
    return max((value for value in values if value is not None), default=None)
