"""Measure the figures of every format in one run of the report."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvant.machine import Environment, environment
from kvant.models import Decoder, LanguageModel
from kvant.models.checkpoint import Progress
from kvant.tools.report.divergence import Figures
from kvant.tools.report.file_reader import FileFormat, FileReader
from kvant.tools.report.formats import REFERENCE, CacheFormat, Format
from kvant.tools.report.mlx_lm_reader import mlx_lm_readers
from kvant.tools.report.reference import Reference
from kvant.tools.report.runs import (
    CacheReader,
    Reader,
    answer,
    answer_after_hit,
    layer_errors,
    read_legs,
)
from kvant.tools.report.texts import Dialogue, Text

LEGS = ("prefill", "decode")
LAYER_TOKENS = 1024  # tokens of the first piece that are used for layer errors
DECODED = 256  # tokens read one by one
LEAST_TOKENS = 8  # of the first piece, so that both legs have some


@dataclass(frozen=True, slots=True)
class FormatResult:
    format: Format
    bytes_per_token: int  # the cache's bytes divided by its reserved tokens; 0 if unknown
    prefill: Figures  # for text read in chunks, against the reference
    decode: Figures  # for tokens read one by one
    # Relative error of each layer's attention, computed from that layer's unquantized inputs. Zeros for the
    # reference; empty for mlx-lm's models and formats.
    layer_errors: list[float]
    recalled: list[bool]  # whether each answer to a recall question was exact; empty if there are none
    # the same for questions whose facts were read from pages that another sequence had filled
    after_hit: list[bool]

    @property
    def legs(self) -> dict[str, Figures]:
        return dict(zip(LEGS, (self.prefill, self.decode), strict=True))


@dataclass(frozen=True, slots=True)
class Report:
    model: str
    dtype: str  # the dtype of activations and of the reference's cache
    text: Text
    reserved: int  # tokens reserved in each cache
    prompt: int  # tokens before those that are read one by one
    reference: FormatResult  # unquantized: keys and values as the model computes them
    compared_with: str  # the file of another engine's predictions; "": the reference's are used
    results: list[FormatResult]  # the requested formats in order, then mlx-lm's and llama.cpp's
    environment: Environment


def measure(
    name: str,
    model: LanguageModel,
    text: Text,
    formats: Sequence[CacheFormat],
    *,
    decoded: int = DECODED,
    reserved: int | None = None,
    recall: Sequence[Dialogue] = (),
    others: Reference | None = None,
    mlx_lm: Path | None = None,
    files: Sequence[Reference] = (),
    progress: Progress = lambda done, total: None,
) -> Report:
    """Measure every format on the text, and on recall questions if there are any.

    Args:
        formats: checked by ``check_formats``; the reference among them is not measured twice.
        decoded: tokens to read one by one, at the end of the first piece; at most a quarter of the piece.
        reserved: tokens to reserve in each cache, at least those of the first piece; None: only those.
        recall: dialogues with questions; those longer than the reservation are skipped.
        others: another engine's predictions on ``text``, with which all formats are compared.
        mlx_lm: the model's folder, to measure mlx-lm's formats too.
        files: further predictions of another engine on the text, to compare with ``others``.
        progress: called with (tokens fed, tokens in all), summed over all caches.
    """
    measured = [f for f in formats if f != REFERENCE]
    first = text.pieces[0]
    decoded = min(decoded, len(first) // 4)
    reserved = max(reserved or 0, len(first))
    recall = [dialogue for dialogue in recall if len(dialogue.ids) <= reserved]
    layers = model.layers if isinstance(model, Decoder) else ()
    splits = [s for s in (True, False) if layers and any(f.bias_split == s for f in measured)]
    theirs: dict[Format, Reader] = {}
    if mlx_lm is not None:
        theirs |= mlx_lm_readers(mlx_lm, model, reserved)
    if others is not None:
        theirs |= {FileFormat(file.path): FileReader(file, others) for file in files}

    done = 0
    total = (text.tokens - len(text.pieces)) * (1 + len(measured) + len(theirs))
    total += sum(len(dialogue.ids) for dialogue in recall) * (2 + 2 * len(measured) + len(theirs))
    total += len(splits) * len(first[:LAYER_TOKENS])

    def fed(tokens: int) -> None:
        nonlocal done
        done += tokens
        progress(done, total)

    progress(0, total)
    ours = {f: CacheReader(model, f.make_cache(model, reserved)) for f in (REFERENCE, *measured)}
    named: list[Format] = [*ours, *theirs]
    readers: list[Reader] = [*ours.values(), *theirs.values()]
    prefill, decode = read_legs(readers, text, decoded, others=others, fed=fed)
    errors: dict[Format, list[float]] = {REFERENCE: [0.0] * len(layers)}
    for split in splits:
        assert isinstance(model, Decoder)
        exact = CacheFormat(0, bias_split=split).make_cache(model, len(first[:LAYER_TOKENS]))
        caches = {f: ours[f].cache for f in measured if f.bias_split == split}
        split_errors = layer_errors(model, first[:LAYER_TOKENS], exact, list(caches.values()), fed=fed)
        errors |= zip(caches, split_errors, strict=True)
    hits: dict[Format, list[bool]] = {f: answer_after_hit(model, f, recall, fed=fed) for f in ours}
    results = [
        FormatResult(
            format=f,
            bytes_per_token=round(reader.nbytes / reserved),
            prefill=chunks.figures(),
            decode=singles.figures(),
            layer_errors=errors.get(f, []),
            recalled=[right for dialogue in recall for right in answer(reader, dialogue, fed=fed)],
            after_hit=hits.get(f, []),
        )
        for f, reader, chunks, singles in zip(named, readers, prefill, decode, strict=True)
    ]
    by_format: dict[object, FormatResult] = {result.format: result for result in results}
    return Report(
        model=name,
        dtype=str(model.dtype).removeprefix("mlx.core."),
        text=text,
        reserved=reserved,
        prompt=len(first) - 1 - decoded,
        reference=results[0],
        compared_with="" if others is None else str(others.path),
        results=[by_format[f] for f in (*formats, *theirs)],
        environment=environment(),
    )


def figures_json(report: Report) -> dict[str, Any]:
    """Return the report as a JSON object. Infinite figures become null; ``non_finite`` counts predictions."""
    text = report.text
    pieces = {"pieces": len(text.pieces), "tokens_left_out": text.left_out}
    return {
        "model": report.model,
        "dtype": report.dtype,
        "text": {"name": text.name, "tokens": text.tokens, **pieces},
        "reserved_tokens": report.reserved,
        "prompt_tokens": report.prompt,
        **asdict(report.environment),
        "compared_with": report.compared_with or None,
        "layer_tokens": len(text.pieces[0][:LAYER_TOKENS]),
        "reference": _result_json(report.reference),
        "formats": [_result_json(result) for result in report.results],
    }


def _result_json(result: FormatResult) -> dict[str, Any]:
    cache = result.format
    legs = {
        name: {figure: _finite(value) for figure, value in asdict(figures).items()}
        for name, figures in result.legs.items()
    }
    return {
        "format": cache.label,
        "flags": cache.flags,
        "bits": cache.kv_bits,
        "group": cache.kv_group_size if cache.kv_bits else None,
        "bias_split": cache.bias_split,
        "bytes_per_token": result.bytes_per_token or None,
        **legs,
        "layer_attention_errors": [_finite(error) for error in result.layer_errors],
        "recall": {"right": sum(result.recalled), "asked": len(result.recalled)},
        "recall_after_hit": {"right": sum(result.after_hit), "asked": len(result.after_hit)},
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
