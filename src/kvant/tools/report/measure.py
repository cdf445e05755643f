"""One run of the report: every format's figures, and the smallest format that is good enough."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvant.cache import ModelCache
from kvant.machine import Environment, environment
from kvant.models import Decoder, LanguageModel
from kvant.tools.report.divergence import Figures, Tally
from kvant.tools.report.findings import Finding, find
from kvant.tools.report.formats import REFERENCE, CacheFormat
from kvant.tools.report.layers import run_layers
from kvant.tools.report.questions import Dialogue, Score, answer, score
from kvant.tools.report.teacher import Fed, compare
from kvant.tools.report.texts import Text
from kvant.tools.report.timing import STEPS, step_ms, timing_room

LAYER_TOKENS = 1024  # of the first piece, for the layers' errors

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class FormatResult:
    """A cache format's figures.

    Attributes:
        bytes_per_token: in all layers.
        ms_per_token: of a decode step with the first piece in the cache.
        figures: of the text, against the reference.
        layer_errors: the attention's relative error in each layer, given that layer's inputs without quantization;
            zeros for the reference, by definition. Empty for a bridged model, whose layers are mlx-lm's.
        scores: exact answers, where questions were asked.
    """

    format: CacheFormat
    bytes_per_token: int
    ms_per_token: float
    figures: Figures
    layer_errors: list[float]
    scores: list[Score]


@dataclass(frozen=True, slots=True)
class Report:
    """A model's cache formats on a text.

    Attributes:
        model: its name.
        dtype: of activations and of the reference's cache.
        reference: without quantization, keys and values as the model computes them.
        results: of the formats asked for, in their order.
        key_range: of each layer's keys as they are stored, see :class:`kvant.tools.report.layers.LayerRun`.
        findings: layers that are out of line. Both are empty for a bridged model.
        environment: what it was measured on and with.
    """

    model: str
    dtype: str
    text: Text
    reference: FormatResult
    results: list[FormatResult]
    key_range: list[float]
    findings: list[Finding]
    environment: Environment


def measure(
    name: str,
    model: LanguageModel,
    text: Text,
    formats: Sequence[CacheFormat],
    *,
    questions: dict[str, list[Dialogue]] | None = None,
    progress: Progress = lambda done, total: None,
) -> Report:
    """Measure every format on the text, and on questions where there are any.

    Args:
        name: the model's.
        formats: checked by ``check_formats``; the reference among them is not measured twice.
        questions: conversations by set.
        progress: called with (tokens fed, tokens to be fed), through all caches.

    Raises:
        ContextError: caches larger than this machine's memory.
        KvantError: logits of the reference that are not finite.
    """
    questions = questions or {}
    measured = [f for f in formats if f != REFERENCE]
    first = text.pieces[0]
    conversations = [c for own in questions.values() for c in own]
    room = max(len(first), STEPS + 1, *(len(c.ids) for c in conversations))
    layers = model.layers if isinstance(model, Decoder) else ()
    splits = [s for s in (True, False) if layers and any(f.split == s for f in measured)]

    done = 0
    total = (text.tokens + sum(len(c.ids) for c in conversations)) * (1 + len(measured))
    total += len(splits) * len(first[:LAYER_TOKENS])

    def fed(tokens: int) -> None:
        nonlocal done
        done += tokens
        progress(done, total)

    progress(0, total)
    caches = [f.make_cache(model, room + timing_room(model)) for f in (REFERENCE, *measured)]
    tallies = [Tally() for _ in caches]
    times: list[float] = []
    for piece in text.pieces:
        compare(model, piece, caches, tallies, fed=fed)
        times = times or step_ms(model, caches)
    errors: dict[CacheFormat, list[float]] = {}
    key_range: list[float] = []
    for split in splits:  # with the split first: its key range is that of the default cache
        assert isinstance(model, Decoder)
        exact = CacheFormat(0, split=split).make_cache(model, len(first[:LAYER_TOKENS]))
        own = {f: cache for f, cache in zip(measured, caches[1:], strict=True) if f.split == split}
        run = run_layers(model, first[:LAYER_TOKENS], exact, list(own.values()), fed=fed)
        errors |= zip(own, run.errors, strict=True)
        key_range = key_range or run.key_range
    scores = [_scores(model, cache, questions, fed) for cache in caches]
    results = [
        FormatResult(f, f.bytes_per_token(model), ms, tally.figures(), errors.get(f, [0.0] * len(layers)), own)
        for f, ms, tally, own in zip((REFERENCE, *measured), times, tallies, scores, strict=True)
    ]
    by_format = {result.format: result for result in results}
    return Report(
        model=name,
        dtype=str(model.dtype).removeprefix("mlx.core."),
        text=text,
        reference=results[0],
        results=[by_format[f] for f in formats],
        key_range=key_range,
        findings=find(model, key_range, list(errors.items())) if isinstance(model, Decoder) and key_range else [],
        environment=environment(),
    )


def suggest(results: Sequence[FormatResult], max_kld_nats: float) -> FormatResult | None:
    """The result with the fewest bytes a token, then the lowest KLD, among those of at most this mean KLD; or None."""
    fitting = [r for r in results if r.figures.mean_kld_nats <= max_kld_nats]
    return min(fitting, key=lambda r: (r.bytes_per_token, r.figures.mean_kld_nats), default=None)


def figures_json(report: Report) -> dict[str, Any]:
    """The report as one JSON object; an infinite figure is null, beside a count of predictions that are not finite."""
    text = report.text
    return {
        "model": report.model,
        "dtype": report.dtype,
        "text": {
            "name": text.name,
            "tokens": text.tokens,
            "pieces": len(text.pieces),
            "tokens_left_out": text.left_out,
        },
        **asdict(report.environment),
        "reference": _result_json(report.reference),
        "formats": [_result_json(result) for result in report.results],
        "layers": {
            "tokens": len(text.pieces[0][:LAYER_TOKENS]),
            "key_range": report.key_range,
            "findings": [asdict(finding) for finding in report.findings],
        },
    }


def _result_json(result: FormatResult) -> dict[str, Any]:
    cache = result.format
    return {
        "format": cache.label,
        "flags": cache.flags,
        "bits": cache.bits,
        "group": cache.group if cache.bits else None,
        "bias_split": cache.split,
        "bytes_per_token": result.bytes_per_token,
        "ms_per_token": round(result.ms_per_token, 4),
        **{name: _finite(value) for name, value in asdict(result.figures).items()},
        "layer_attention_errors": [_finite(error) for error in result.layer_errors],
        "answers": [asdict(own) for own in result.scores],
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _scores(model: LanguageModel, cache: ModelCache, questions: dict[str, list[Dialogue]], fed: Fed) -> list[Score]:
    return [
        bucket
        for name, own in questions.items()
        for bucket in score(name, own, [answer(model, cache, conversation, fed=fed) for conversation in own])
    ]
