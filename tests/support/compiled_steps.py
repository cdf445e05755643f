"""Compiled steps of several tokens, for tests/engine/test_steps.py: part of support/compiled_runs.py."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from kvant.cache import ModelCache
from kvant.engine.drafted_run import DraftedRun
from kvant.engine.draw import Sampler, greedy
from kvant.engine.row_sampling import Row, sample_rows
from kvant.engine.run import Run, prefill
from kvant.engine.step import CompiledStep
from kvant.models import Decoder
from kvant.sample_utils import make_logits_processors, make_sampler
from support.drafts import KnownDrafts
from support.numbers import relative_error

PROMPT = [(7 * i) % 1000 for i in range(100)]
SIZES = [1, 2, 3, 8, 4, 7]  # 3 is padded to 4, 7 to 8
SAMPLERS: list[Sampler] = [greedy, make_sampler(2.0, 0.99, 0.001, top_k=900, xtc_probability=0.3, seed=3)]


def prefilled(model: Decoder, rows: int = 512, bits: int = 8, **options: Any) -> ModelCache:
    """A cache that holds the prompt."""
    cache = model.make_cache(rows, kv_bits=bits, **options)
    if not bits:  # loud stale rows: whoever reads one has no number left
        for layer in cache:
            layer.arrays[0] = mx.full(layer.arrays[0].shape, float("nan"), layer.arrays[0].dtype)
    prefill(model, PROMPT, cache)
    return cache


def compared(model: Decoder, sampler: Sampler, **options: Any) -> dict[str, Any]:
    """Steps of all sizes, of each the first half committed: their logits and rows against steps that are not compiled.

    What a second one draws, against each row of the logits by itself, with the key of its position.
    """
    plain = prefilled(model, kernels="unfused", **options)
    caches = [prefilled(model, **options) for _ in range(2)]
    steps = [
        CompiledStep(model, cache, sampler, processed=processed, most_tokens=8)
        for cache, processed in zip(caches, (True, False), strict=True)
    ]
    worst, drawn = 0.0, []
    for i, size in enumerate(SIZES):
        ids, kept, offset = [(31 * (i + j)) % 1000 for j in range(size)], -(-size // 2), plain.offset
        expected = model(mx.array([ids]), cache=plain)[0]
        plain.trim(size - kept)
        (logits,), (tokens, logprobs) = (step(ids) for step in steps)
        worst = max(worst, relative_error(logits, expected))
        rows = [sample_rows(logits[j : j + 1], [Row(sampler, (), offset + 1 + j, ())]) for j in range(size)]
        alone = [mx.concatenate([token for token, _ in rows]), mx.stack([row for _, row in rows])]
        drawn.append(all(map(mx.array_equal, (tokens, logprobs.reshape(alone[1].shape)), alone)))
        for cache in caches:
            cache.commit(kept)
    differ = [
        mx.mean(mx.abs(mine[..., -window:, :] - theirs[..., -window:, :]) > 1e-4).item()
        for layer, other in zip(caches[0], plain, strict=True)
        for window in [layer.window or plain.offset]
        for mine, theirs in zip(layer.stored(), other.stored(), strict=True)
    ]
    return {
        "worst": worst,
        "drawn": drawn,
        "ids": caches[0].ids == caches[1].ids == plain.ids,
        "differ": max(differ),
        "compilations": [step.compilations for step in steps],
        "trims": [cache.can_trim_to(cache.offset - back) for cache in (plain, caches[0]) for back in (13, 14)],
    }


def discarded(model: Decoder) -> dict[str, Any]:
    """A step that another one replaces before it is evaluated: arrays, tokens, and bytes above what was active."""
    cache, plain = prefilled(model, 32_768), prefilled(model, 32_768)
    first, second = (CompiledStep(model, each, greedy, processed=False, most_tokens=4) for each in (cache, plain))
    peaks, tokens = [], []
    for ids in ([5, 6, 7, 8], [9]) * 2:
        mx.eval([layer.arrays for layer in cache])
        active = mx.get_active_memory()
        mx.reset_peak_memory()
        held = cache.hold()
        first([1])
        cache.put_back(held)
        del held
        result = first(ids)
        mx.eval(result)
        peaks.append(mx.get_peak_memory() - active)
        expected = second(ids)
        tokens.append(mx.array_equal(result[0], expected[0]).item())
        for each in (cache, plain):
            each.commit()
        del result, expected
    same_rows = all(
        mx.array_equal(a, b)
        for layer, other in zip(cache, plain, strict=True)
        for a, b in zip(layer.arrays, other.arrays, strict=True)
    )
    return {
        "peak": max(peaks),
        "tokens": tokens,
        "rows": same_rows,
        "cache": cache.nbytes,
    }


def drafted(
    model: Decoder, sampler: Sampler, rows: int = 8192, *, processed: bool = False, compiled: bool = True
) -> dict[str, Any]:
    """A run with drafts to the end of its reservation: the text without them, compilations, bytes above the start."""
    options: dict[str, Any] = {"sampler": sampler, "compiled": compiled, "max_tokens": 30}
    if processed:
        options["logits_processors"] = make_logits_processors({30: 1.0}, repetition_penalty=1.2)
    plain = [token for token, _ in Run(model, PROMPT, model.make_cache(rows, kv_bits=0), **options)]
    cache = model.make_cache(rows, kv_bits=0)
    drafts = KnownDrafts(text=[*PROMPT, *plain], mistakes=0.1)
    run = DraftedRun(model, PROMPT, cache, drafts=drafts, **options)
    tokens = [next(run)[0] for _ in range(10)]
    mx.eval([layer.arrays for layer in cache])
    active = mx.get_active_memory()
    mx.reset_peak_memory()
    tokens += [token for token, _ in run]
    peak, step = mx.get_peak_memory() - active, run._step_function
    assert run.drafts is not None
    return {
        "same": tokens == plain,
        "held": cache.ids[0] == [*PROMPT, *plain[:-1]],
        "compilations": step.compilations if step is not None else 0,
        "peak": peak,
        "steps": run.drafts.steps / len(plain),
    }


def interrupted(model: Decoder, trace: int) -> bool:
    """Whether a run whose trace of that number is broken off leaves a cache that another one goes on with."""
    options: dict[str, Any] = {"compiled": True, "max_tokens": 12}
    plain = [token for token, _ in Run(model, PROMPT, model.make_cache(256), **options)]
    cache = model.make_cache(256)
    run = DraftedRun(model, PROMPT, cache, drafts=KnownDrafts(text=[*PROMPT, *plain], mistakes=0.1), **options)
    step_logits, calls, tokens = model.step_logits, [], []

    def broken_off(*arguments: Any) -> mx.array:
        calls.append(step_logits(*arguments))
        if len(calls) == trace:
            raise KeyboardInterrupt
        return calls[-1]

    model.step_logits = broken_off  # type: ignore[method-assign]
    try:
        for token, _ in run:
            tokens.append(token)
    except KeyboardInterrupt:
        held = cache.ids[0] == ([*PROMPT, *tokens[:-1]] if tokens else [])
        calls.clear()
    else:
        held = False
    finally:
        del model.step_logits
    rest = [token for token, _ in Run(model, tokens[-1:] or PROMPT, cache, **options)]
    return held and [*tokens, *rest][:12] == plain


def several(model: Decoder, rings: Decoder, bits: Sequence[int] = (8, 4, 0)) -> dict[str, Any]:
    """Steps through caches of some widths, and through rings."""
    found = {f"{each} bits": compared(model, SAMPLERS[each != 4], bits=each) for each in bits}
    return found | {"windowed": compared(rings, SAMPLERS[1], bias_split=False)}


def with_drafts(model: Decoder) -> dict[str, Any]:
    """Runs with drafts, in a large reservation and in one that they fill."""
    found = {"seeded": drafted(model, SAMPLERS[1]), "processed": drafted(model, SAMPLERS[1], processed=True)}
    found["not compiled"] = drafted(model, greedy, compiled=False)
    found["interrupted"] = [interrupted(model, trace) for trace in (1, 3)]
    return found | {"full": drafted(model, greedy, len(PROMPT) + 20)}
