"""One run of the report: every format's figures."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvant.machine import Environment, environment
from kvant.models import Decoder, LanguageModel
from kvant.models.checkpoint import Progress
from kvant.tools.report.divergence import Figures, Tally
from kvant.tools.report.formats import REFERENCE, CacheFormat
from kvant.tools.report.reference import Reference
from kvant.tools.report.runs import (
    STEPS,
    answer,
    answer_after_hit,
    compare,
    layer_errors,
    step_ms,
    timing_room,
)
from kvant.tools.report.texts import Dialogue, Text

LAYER_TOKENS = 1024  # of the first piece, for the layers' errors


@dataclass(frozen=True, slots=True)
class FormatResult:
    format: CacheFormat
    bytes_per_token: int  # in all layers
    # of a decode step with the first piece in the cache; infinite if no token can be drawn
    ms_per_token: float
    figures: Figures  # of the text, against the reference
    # The attention's relative error in each layer, given that layer's inputs without quantization; zeros for
    # the reference, by definition. Empty for a bridged model, whose layers are mlx-lm's.
    layer_errors: list[float]
    recalled: list[bool]  # each answer of the recall questions was exact; empty if none was asked
    # the same, of those whose facts were read from pages that another sequence had filled
    after_hit: list[bool]


@dataclass(frozen=True, slots=True)
class Report:
    model: str
    dtype: str  # of activations and of the reference's cache
    text: Text
    reference: FormatResult  # without quantization, keys and values as the model computes them
    compared_with: str  # the file of another engine's predictions; "": those of the reference
    results: list[FormatResult]  # of the formats asked for, in their order
    environment: Environment


def measure(
    name: str,
    model: LanguageModel,
    text: Text,
    formats: Sequence[CacheFormat],
    *,
    recall: Sequence[Dialogue] = (),
    others: Reference | None = None,
    progress: Progress = lambda done, total: None,
) -> Report:
    """Measure every format on the text, and on recall questions if there are any.

    Args:
        others: predictions of another engine, which all formats are compared with, on its ``text``.
        formats: checked by ``check_formats``; the reference among them is not measured twice.
        progress: called with (tokens fed, tokens to be fed), through all caches.
    """
    measured = [f for f in formats if f != REFERENCE]
    first = text.pieces[0]
    room = max(len(first), STEPS + 1, *(len(dialogue.ids) for dialogue in recall))
    layers = model.layers if isinstance(model, Decoder) else ()
    splits = [s for s in (True, False) if layers and any(f.bias_split == s for f in measured)]

    done = 0
    total = (text.tokens + 2 * sum(len(dialogue.ids) for dialogue in recall)) * (1 + len(measured))
    total += len(splits) * len(first[:LAYER_TOKENS])

    def fed(tokens: int) -> None:
        nonlocal done
        done += tokens
        progress(done, total)

    progress(0, total)
    caches = [f.make_cache(model, room + timing_room(model)) for f in (REFERENCE, *measured)]
    tallies = [Tally() for _ in caches]
    times: list[float] = []
    for number, piece in enumerate(text.pieces):
        compare(
            model, piece, caches, tallies, expected=None if others is None else others.rows(number), fed=fed
        )
        times = times or step_ms(model, caches)
    errors: dict[CacheFormat, list[float]] = {}
    for split in splits:
        assert isinstance(model, Decoder)
        exact = CacheFormat(0, bias_split=split).make_cache(model, len(first[:LAYER_TOKENS]))
        own = {f: cache for f, cache in zip(measured, caches[1:], strict=True) if f.bias_split == split}
        errors |= zip(
            own, layer_errors(model, first[:LAYER_TOKENS], exact, list(own.values()), fed=fed), strict=True
        )
    results = [
        FormatResult(
            format=f,
            bytes_per_token=f.bytes_per_token(model),
            ms_per_token=ms,
            figures=tally.figures(),
            layer_errors=errors.get(f, [0.0] * len(layers)),
            recalled=[right for dialogue in recall for right in answer(model, cache, dialogue, fed=fed)],
            after_hit=answer_after_hit(model, f, recall, fed=fed),
        )
        for f, cache, ms, tally in zip((REFERENCE, *measured), caches, times, tallies, strict=True)
    ]
    by_format = {result.format: result for result in results}
    return Report(
        model=name,
        dtype=str(model.dtype).removeprefix("mlx.core."),
        text=text,
        reference=results[0],
        compared_with="" if others is None else str(others.path),
        results=[by_format[f] for f in formats],
        environment=environment(),
    )


def figures_json(report: Report) -> dict[str, Any]:
    """The report as one JSON object; an infinite figure is null, beside a count of predictions that are
    not finite.
    """
    text = report.text
    pieces = {"pieces": len(text.pieces), "tokens_left_out": text.left_out}
    return {
        "model": report.model,
        "dtype": report.dtype,
        "text": {"name": text.name, "tokens": text.tokens, **pieces},
        **asdict(report.environment),
        "compared_with": report.compared_with or None,
        "layer_tokens": len(text.pieces[0][:LAYER_TOKENS]),
        "reference": _result_json(report.reference),
        "formats": [_result_json(result) for result in report.results],
    }


def _result_json(result: FormatResult) -> dict[str, Any]:
    cache = result.format
    return {
        "format": cache.label,
        "flags": cache.flags,
        "bits": cache.kv_bits,
        "group": cache.kv_group_size if cache.kv_bits else None,
        "bias_split": cache.bias_split,
        "bytes_per_token": result.bytes_per_token,
        "ms_per_token": _finite(round(result.ms_per_token, 4)),
        **{name: _finite(value) for name, value in asdict(result.figures).items()},
        "layer_attention_errors": [_finite(error) for error in result.layer_errors],
        "recall": {"right": sum(result.recalled), "asked": len(result.recalled)},
        "recall_after_hit": {"right": sum(result.after_hit), "asked": len(result.after_hit)},
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
