"""What rotating keys, and values too, before they are quantized to 4 bits gives, on a model and texts.

Run: python scripts/rotation.py MODEL TEXT...    (MODEL: a folder or a name; TEXT: a UTF-8 file, or
    "built-in")

Prints JSON. Each text's formats are compared with a cache that is not quantized: on 1,536 tokens, most read in
chunks, the last ones token by token.
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
from kvant.tools.report.formats import REFERENCE, CacheFormat, has_bias, parse_formats
from kvant.tools.report.measure import LEGS
from kvant.tools.report.runs import CacheReader, read_legs
from kvant.tools.report.texts import Text, built_in_text, text_file

FORMATS = "8g32,4g32,4g32:pmx"
TOKENS, DECODED = 1536, 192


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


def figures(model: Any, text: Text, formats: Sequence[CacheFormat]) -> dict[str, list[dict[str, Any]]]:
    """Compare each format with the reference, by leg."""
    readers = [CacheReader(model, own.make_cache(model, TOKENS)) for own in (REFERENCE, *formats)]
    legs = dict(zip(LEGS, read_legs(readers, text, DECODED), strict=True))
    sizes = [round(reader.nbytes / TOKENS) for reader in readers]
    return {
        leg: [
            {"bytes_per_token": size, **asdict(tally.figures())}
            for size, tally in zip(sizes, tallies, strict=True)
        ]
        for leg, tallies in legs.items()
    }


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
        plain = figures(model, text, formats)
        rows = {leg: dict(zip(names, own, strict=True)) for leg, own in plain.items()}
        if not has_bias(model):  # a bias that is split off would be rotated with the output
            with rotated_values():
                for leg, (_, both, values) in figures(model, text, formats[1:]).items():
                    rows[leg] |= {"4g32, values rotated too": both, "4g32:pmx, values rotated": values}
        digest = None if path == "built-in" else hashlib.sha256(Path(path).read_bytes()).hexdigest()
        found[Path(path).name] = {"sha256": digest, "tokens": len(text.pieces[0]), **rows}
    weights = hashlib.sha256((find_model(name) / "model.safetensors").read_bytes()).hexdigest()
    record = {**asdict(environment()), "model": Path(name).name, "weights_sha256": weights, "texts": found}
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
