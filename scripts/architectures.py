"""The table of docs/data/architectures.md: every architecture of mlx-lm through kvant's cache.

Run: python scripts/architectures.py (needs the extra ``test``; a minute). It measures, records the figures in
scripts/results/architectures.json and writes the page. With --page it writes the page from what is recorded.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from statistics import median_high as median
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import kvant  # noqa: E402  # isort: skip  (before MLX: it loads a faster BLAS)

import mlx.core as mx  # noqa: E402
from mlx import nn  # noqa: E402
from mlx_lm.generate import maybe_quantize_kv_cache  # noqa: E402
from mlx_lm.models import cache as theirs  # noqa: E402
from support.tiny_models import build  # noqa: E402

from kvant.bridge.architectures import ALLOWED, NEEDS_METAL, REFUSED, REMAPPED, REMAPPED_BY_CLASS  # noqa: E402
from kvant.models.architectures import ARCHITECTURES  # noqa: E402

RECORDED = ROOT / "scripts" / "results" / "architectures.json"
PAGE = ROOT / "docs" / "data" / "architectures.md"

PROMPT = [(7 + 31 * i) % 97 for i in range(24)]
FEEDS = (13, 11, *[1] * 20)  # tokens a call: two chunks of the prompt, then steps
TOKENS = sum(FEEDS)
GROUP = 32
# The reference is mlx-lm's own cache, fed as kvant's is, or all tokens in one call. Both agree for most
# architectures.
ONE_CALL = {"plamo3": "mlx-lm's mask shows one token more than its cache keeps"}
AS_FED = {
    "phi3small": "mlx-lm adds its boolean mask to the scores, so that a token sees those after it in its call"
}
WITHOUT_METAL = "allowed, not tried: some of its layers are Metal kernels alone, so it needs a Mac"
TINY = 1e-5  # what rounding alone makes


def measured() -> list[str]:
    """The architectures that a machine without Metal can run, sorted as the page is."""
    return sorted(ALLOWED - NEEDS_METAL, key=str.lower)


def kvant_cache(model: nn.Module, bits: int) -> list[Any]:
    """kvant's cache for the tokens of a run, not one more, which are read as they are quantized."""
    return kvant.make_prompt_cache(model, TOKENS, kv_bits=bits, kv_group_size=GROUP, kv_tail=False)


def run(
    model: nn.Module,
    cache: list[Any],
    tokens: list[int] | None = None,
    after: Callable[[], None] = lambda: None,
) -> tuple[list[int], mx.array]:
    """Feed a text of TOKENS tokens in calls of FEEDS; None: PROMPT, then the likeliest token after each call.

    Returns the text, and the logits (21, vocab) after the prompt and each of the 20 steps.
    """
    fed = list(PROMPT if tokens is None else tokens)
    logits, start = [], 0
    for count in FEEDS:
        last = finite(model(mx.array([fed[start : start + count]]), cache=cache)[0, -1])
        mx.eval(last)
        after()
        start += count
        if start >= len(PROMPT):
            logits.append(last)
            if start == len(fed):
                fed.append(int(last.argmax().item()))
    return fed[:TOKENS], mx.stack(logits)


def finite(logits: mx.array) -> mx.array:
    """Logits with 0 for those that a model rules out."""
    return mx.where(mx.isinf(logits), 0, logits).astype(mx.float32)


def reference(name: str, model: nn.Module) -> tuple[list[int], mx.array]:
    """A text that mlx-lm's model continues with its own cache, and the logits that kvant's cache is to
    have.
    """
    tokens, logits = run(model, theirs.make_prompt_cache(model))
    return tokens, in_one_call(model, tokens) if name in ONE_CALL else logits


def in_one_call(model: nn.Module, tokens: list[int]) -> mx.array:
    """The logits of :func:`run` from all tokens at once and mlx-lm's own cache: no row of an earlier call
    is read.
    """
    logits = model(mx.array([tokens]), cache=theirs.make_prompt_cache(model))
    return finite(logits[0, len(PROMPT) - 1 :])


def errors(logits: mx.array, expected: mx.array) -> list[float]:
    """The largest difference at each place, as a part of the largest logit there; sorted."""
    difference = mx.abs(logits - expected).max(axis=-1) / mx.abs(expected).max(axis=-1)
    return sorted(difference.tolist())


def worst(found: list[float]) -> float:
    """The largest of sorted errors."""
    return found[-1]


def leaves(caches: list[Any]) -> Iterator[Any]:
    """The caches of a model, with those inside a CacheList one by one."""
    for cache in caches:
        if isinstance(cache, theirs.CacheList):
            yield from leaves(list(cache.caches))
        else:
            yield cache


def holds_rows(cache: Any) -> bool:
    """Whether a cache holds keys and values, and not the state of a linear or convolution layer."""
    return not isinstance(cache, theirs.ArraysCache)


def key_value_bytes(caches: list[Any]) -> list[int]:
    """Bytes of each cache of keys and values."""
    return [cache.nbytes for cache in leaves(caches) if holds_rows(cache)]


def kinds(model: nn.Module) -> dict[str, int]:
    """How many caches of each kind mlx-lm makes for a model."""
    names = {
        theirs.KVCache: "full",
        theirs.ConcatenateKVCache: "full",
        theirs.RotatingKVCache: "window",
        theirs.ChunkedKVCache: "chunk",
        theirs.ArraysCache: "state",
    }
    return dict(Counter(names[type(cache)] for cache in leaves(theirs.make_prompt_cache(model))))


def windows(model: nn.Module) -> list[int]:
    """Tokens of each window and chunk that mlx-lm's caches of a model have."""
    found = []
    for cache in leaves(theirs.make_prompt_cache(model)):
        if isinstance(cache, theirs.RotatingKVCache):
            found.append(cache.max_size)
        elif isinstance(cache, theirs.ChunkedKVCache):
            found.append(cache.chunk_size)
    return found


def has_sinks(model: nn.Module) -> bool:
    """Whether a model gives learned sinks to MLX's attention."""
    plain, seen = mx.fast.scaled_dot_product_attention, []

    def watched(*given: Any, **named: Any) -> mx.array:
        seen.append(named.get("sinks") is not None)
        return plain(*given, **named)

    mx.fast.scaled_dot_product_attention = watched
    try:
        model(mx.array([PROMPT[:2]]), cache=theirs.make_prompt_cache(model))
    finally:
        mx.fast.scaled_dot_product_attention = plain
    return any(seen)


def their_quantized(model: nn.Module, tokens: list[int], expected: mx.array) -> float | str:
    """The median error of mlx-lm's own 8-bit cache, as ``mlx_lm.generate --kv-bits 8`` makes it; or what
    goes wrong.
    """
    cache = theirs.make_prompt_cache(model)
    if not key_value_bytes(cache):
        return "nothing to quantize"
    try:
        _, logits = run(model, cache, tokens, lambda: maybe_quantize_kv_cache(cache, 0, GROUP, 8))
    except (NotImplementedError, AttributeError, TypeError, ValueError) as error:
        return f"raises {type(error).__name__}: {str(error).splitlines()[0].split('. ')[0]}"
    kept = [not isinstance(layer, theirs.QuantizedKVCache) for layer in leaves(cache) if holds_rows(layer)]
    if any(kept):
        return f"{sum(kept)} of {len(kept)} stay at full precision"
    return median(errors(logits, expected))


def measure(name: str) -> dict[str, Any]:
    """All figures of one architecture."""
    model, _ = build(name)
    tokens, expected = reference(name, model)
    found: dict[str, Any] = {"caches": kinds(model), "sinks": has_sinks(model)}
    for bits, figure in ((0, worst), (8, median), (4, median)):
        _, logits = run(model, kvant_cache(model, bits), tokens)
        found[f"error at {bits} bits"] = round_to_two(figure(errors(logits, expected)))
        if bits == 0:
            found["same tokens at 0 bits"] = (
                logits.argmax(axis=-1).tolist() == expected.argmax(axis=-1).tolist()
            )
    quantized = their_quantized(model, tokens, expected)
    found["mlx-lm at 8 bits"] = quantized if isinstance(quantized, str) else round_to_two(quantized)
    return found


def round_to_two(number: float) -> float:
    """Two significant digits."""
    return float(f"{number:.1e}")


def record() -> dict[str, Any]:
    """Measure every architecture."""
    mx.disable_compile()  # it would call a C++ compiler for parts of many models: minutes, the first time
    names = measured()
    results = {}
    for name in names:
        results[name] = measure(name)
        print(f"{len(results)}/{len(names)} {name}: {json.dumps(results[name])}", file=sys.stderr)
    return {
        "versions": {package: version(package) for package in ("mlx", "mlx-lm")},
        "architectures": results,
    }


def page(recorded: dict[str, Any]) -> str:
    """docs/data/architectures.md, from what is recorded."""
    rows, versions = recorded["architectures"], recorded["versions"]
    keeping = [row for row in rows.values() if has_rows(row)]
    both = [row for row in keeping if not isinstance(row["mlx-lm at 8 bits"], str)]
    ratios = sorted(row["error at 8 bits"] / row["mlx-lm at 8 bits"] for row in both)
    raising = sum(str(row["mlx-lm at 8 bits"]).startswith("raises") for row in keeping)
    furthest = max(row["error at 0 bits"] for row in rows.values())
    same = sum(row["same tokens at 0 bits"] for row in rows.values())
    return f"""# Every mlx-lm architecture through kvant's cache

<!-- Written by `python scripts/architectures.py`. tests/bridge/test_table.py measures it again. -->

mlx-lm {versions["mlx-lm"]} has {len(ALLOWED | REFUSED.keys())} architectures. kvant loads {len(ALLOWED)} of them and \
refuses {len(REFUSED)}. {len(rows)} are measured here.
Without quantization the worst error of all, against mlx-lm's own cache, is {furthest:.1e}. {same} of {len(rows)} \
choose the same token everywhere.
{len(keeping)} of them keep keys and values. mlx-lm's own 8-bit cache runs {len(both)} of these. It raises for \
{raising}, and leaves keys and values of {len(keeping) - len(both) - raising} at full precision without a word.
Where both run, kvant's error at 8 bits is {median(ratios):.1f} times mlx-lm's (median).

**How.** Each is a tiny model with random float32 weights, on a CPU with MLX {versions["mlx"]}. A prompt of \
{len(PROMPT)} tokens is fed in two chunks, then {len(FEEDS) - 2} tokens one by one.
The same text goes through mlx-lm's own full-precision cache and through \
`kvant.make_prompt_cache(model, {TOKENS}, kv_bits=..., kv_group_size={GROUP})`.
An error is the largest difference of any logit, as a part of the largest logit.
Windows and chunks hold 8 tokens, so the text runs past them.
The weights are random. The errors compare caches and architectures; they do not tell a trained model's quality.

- **way**: native (kvant's own model) or bridged (mlx-lm's model with kvant's cache). Here the figures of native ones \
are those of mlx-lm's model with kvant's cache, too.
- **caches**: those mlx-lm makes for the tiny model. full: all tokens; window: the last ones; chunk: those of the \
current chunk; state: what a linear or convolution layer carries on. State stays mlx-lm's own.
- **sinks**: whether its attention has learned sinks.
- **0 bits**: the worst place. **8 bits** and **4 bits**: the median place. A dash: it keeps no keys and values.
- **mlx-lm, 8 bits**: the median with mlx-lm's own 8-bit cache (`mlx_lm.generate --kv-bits 8`), or what happens.

| name | way | caches | window | sinks | 0 bits | 8 bits | 4 bits | mlx-lm, 8 bits |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
{lines(table_row(name, row) for name, row in rows.items())}

The reference agrees with mlx-lm's model in one call over all tokens, but for these:

| name | reference | why |
| --- | --- | --- |
{lines(f"| {name} | one call | {reason} |" for name, reason in ONE_CALL.items())}
{lines(f"| {name} | mlx-lm's cache, the same calls | {reason} |" for name, reason in AS_FED.items())}

## Not measured

| name | why |
| --- | --- |
{lines(f"| {name} | {WITHOUT_METAL} |" for name in sorted(NEEDS_METAL))}
{lines(f"| {name} | refused: {reason} |" for name, reason in sorted(REFUSED.items()))}

## Other names

mlx-lm takes these names in config.json for another architecture. So does kvant, where it has no model of its own.

| model_type | architecture |
| --- | --- |
{lines(f"| {name} | {other(name)} |" for name in sorted(REMAPPED))}
{lines(f"| {kind} of the class {name} | {module} |" for (kind, name), module in sorted(REMAPPED_BY_CLASS.items()))}
"""


def lines(given: Iterable[str]) -> str:
    """Lines as one text."""
    return "\n".join(given)


def other(name: str) -> str:
    """What mlx-lm takes a name for; a native architecture stands for itself."""
    return "native" if name in ARCHITECTURES else REMAPPED[name]


def has_rows(row: dict[str, Any]) -> bool:
    """Whether an architecture keeps keys and values."""
    return row["caches"].keys() != {"state"}


def table_row(name: str, row: dict[str, Any]) -> str:
    """One architecture's line of the table."""
    caches, theirs_8 = row["caches"], row["mlx-lm at 8 bits"]
    figures = [row[f"error at {bits} bits"] for bits in (0, 8, 4)] + [theirs_8]
    shown = [figure if isinstance(figure, str) else f"{figure:.1e}" for figure in figures]
    cells = [
        name,
        "native" if name in ARCHITECTURES else "bridged",
        ", ".join(f"{count} {kind}" for kind, count in sorted(caches.items())),
        "sliding" if "window" in caches else "chunked" if "chunk" in caches else "",
        "yes" if row["sinks"] else "",
        *(shown if has_rows(row) else ["-"] * 4),
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Measure, record and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", action="store_true", help="write the page from the recorded figures")
    if not parser.parse_args().page:
        RECORDED.write_text(json.dumps(record(), indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(json.loads(RECORDED.read_text("utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()
