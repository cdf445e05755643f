"""What rotating keys, and values too, before they are quantized to 4 bits gives and costs, on a model and
texts.

Run: python scripts/rotation.py MODEL TEXT...    (MODEL: a folder or a name; TEXT: a UTF-8 file, or
    "built-in")

Prints JSON. Each text's formats are compared with a cache that is not quantized twice: on 1,536 tokens fed in
chunks, and token by token behind a prompt of 768 tokens. Then the time of a token with both, caches in turns.
"""

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import kvant.blas  # isort: skip  (before MLX: it loads a faster one)

import mlx.core as mx

import kvant
from kvant.cache import pool_batch
from kvant.engine.load import find_model
from kvant.machine import environment
from kvant.operators.key_transform import rotated
from kvant.tools.report.divergence import Tally
from kvant.tools.report.formats import REFERENCE, CacheFormat, has_bias, parse_formats
from kvant.tools.report.runs import compare, step_ms
from kvant.tools.report.texts import Text, built_in_text, text_file

FORMATS = "8g32,4g32,4g32:pmx"
TOKENS, PROMPT, DECODED, TIMES = 1536, 768, 192, 5


@contextmanager
def rotated_values() -> Iterator[None]:
    """Rotate what every layer stores as values, and its output back."""
    view = pool_batch.PoolLayerView
    attend = view.multi_head_cache_attention

    def changed(self: Any, query: mx.array, key: mx.array, value: mx.array, *further: Any) -> mx.array:
        return rotated(attend(self, query, key, rotated(value), *further))

    view.multi_head_cache_attention = changed  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        view.multi_head_cache_attention = attend  # type: ignore[method-assign]


def figures(
    model: Any, text: Text, formats: Sequence[CacheFormat], *, by_token: bool
) -> list[dict[str, Any]]:
    """Compare each format with the reference, on all tokens or on those that are fed one by one."""
    caches = [own.make_cache(model, TOKENS) for own in (REFERENCE, *formats)]
    tallies = [Tally() for _ in caches]
    piece = list(text.pieces[0])
    if not by_token:
        compare(model, piece, caches, tallies)
    else:
        ids = mx.array([piece[:PROMPT]])
        for cache in caches:
            mx.eval(model(ids, cache=cache)[:, -1])
        for n in range(PROMPT, PROMPT + DECODED):
            given = [model(mx.array([[piece[n]]]), cache=cache)[0] for cache in caches]
            expected, *others = [logits - mx.logsumexp(logits, axis=-1, keepdims=True) for logits in given]
            for tally, log_probabilities in zip(tallies, [expected, *others], strict=True):
                tally.add(expected, log_probabilities, piece[n + 1 : n + 2])
    sizes = [own.bytes_per_token(model) for own in (REFERENCE, *formats)]
    return [
        {"bytes_per_token": size, **asdict(tally.figures())}
        for size, tally in zip(sizes, tallies, strict=True)
    ]


def main() -> None:
    name, *paths = sys.argv[1:]
    model, tokenizer = kvant.load(name)
    formats = parse_formats(FORMATS)
    names = ["0", *(own.label for own in formats)]
    found: dict[str, Any] = {}
    for path in paths:
        if path == "built-in":
            text = built_in_text(tokenizer, TOKENS, TOKENS)
        else:
            text = text_file(Path(path), tokenizer, model.config.vocab_size, TOKENS, TOKENS)
        rows: dict[str, dict[str, Any]] = {}
        for leg, by_token in (("chunks", False), ("token by token", True)):
            rows[leg] = dict(zip(names, figures(model, text, formats, by_token=by_token), strict=True))
            if not has_bias(model):  # a bias that is split off would be rotated with the output
                with rotated_values():
                    _, both, values = figures(model, text, formats[1:], by_token=by_token)
                rows[leg] |= {"4g32, values rotated too": both, "4g32:pmx, values rotated": values}
        digest = None if path == "built-in" else hashlib.sha256(Path(path).read_bytes()).hexdigest()
        found[Path(path).name] = {"sha256": digest, "tokens": len(text.pieces[0]), **rows}
    caches = [own.make_cache(model, TOKENS) for own in formats]
    for cache in caches:
        mx.eval(model(mx.array([[5] * PROMPT]), cache=cache)[:, -1])
    times = [step_ms(model, caches) for _ in range(TIMES)]
    weights = hashlib.sha256((find_model(name) / "model.safetensors").read_bytes()).hexdigest()
    record = {**asdict(environment()), "model": Path(name).name, "weights_sha256": weights, "texts": found}
    medians = [sorted(own)[TIMES // 2] for own in zip(*times, strict=True)]
    record["ms_per_token"] = dict(zip(names[1:], medians, strict=True))
    record["ms_ratio_4g32_to_pmx"] = [round(rotating / plain, 3) for _, rotating, plain in times]
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
