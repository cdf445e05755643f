"""The figures of docs/models.md: kvant's logits against transformers' (tests/data/golden) and mlx-lm's.

Run: python scripts/parity.py (needs the extra ``test``)
"""

import json
import shutil
import sys
import tempfile
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import kvant.blas  # noqa: E402, F401  # isort: skip  (before MLX: it loads a faster one)

import mlx.core as mx  # noqa: E402
from support.checkpoints import (  # noqa: E402
    CONFIGS,
    load_reference,
    quantize_reference,
    reference_logits,
    reference_model,
    save_checkpoint,
)

from kvant.models import Decoder, load_decoder  # noqa: E402

GOLDEN = ROOT / "tests" / "data" / "golden"
FORMATS = [("affine", bits, group) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)]
FORMATS += [("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)]


def worst(model: Decoder, ids: list[int], expected: mx.array) -> float:
    """The largest difference, of the largest logit: in one pass, in chunks, and token by token through a
    cache.
    """
    runs = [model(mx.array([ids]))[0]]
    for bounds in ([0, 7, 9, len(ids)], list(range(len(ids) + 1))):
        cache = model.make_cache(len(ids), kv_bits=0)
        runs.append(
            mx.concatenate([model(mx.array([ids[a:b]]), cache=cache)[0] for a, b in pairwise(bounds)])
        )
    return max((mx.abs(run - expected).max() / mx.abs(expected).max()).item() for run in runs)


def main() -> None:
    """Print one line a row of the tables."""
    recorded = json.loads((GOLDEN / "cases.json").read_text())
    ids = recorded["ids"]
    errors: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for case, weights in recorded["weights"].items():
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            shutil.copy(GOLDEN / "weights" / f"{weights}.safetensors", folder / "model.safetensors")
            shutil.copy(GOLDEN / case.replace(" ", "-") / "config.json", folder)
            model = load_decoder(folder)
            golden = mx.array(np.load(GOLDEN / case.replace(" ", "-") / "logits.npy"))
            theirs = load_reference(folder)(mx.array([ids]))[0]
            config = model.config
            errors[f"{config.model_type:8} {config.rope.kind}"].append(
                (worst(model, ids, golden), (mx.abs(theirs - golden).max() / mx.abs(golden).max()).item())
            )
    print("model    positions  cases  kvant - transformers  mlx-lm - transformers")
    for row, found in errors.items():
        print(f"{row:18}  {len(found):5}  {max(e for e, _ in found):20.1e}  {max(e for _, e in found):21.1e}")
    print("format            kvant - mlx-lm, of all architectures")
    ids = [(7 + 31 * i) % 300 for i in range(24)]
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        found_errors = []
        for config in CONFIGS.values():
            reference = reference_model(config)
            reference.set_dtype(dtype)
            with tempfile.TemporaryDirectory() as name:
                folder = save_checkpoint(Path(name), config, reference)
                found_errors.append(
                    worst(load_decoder(folder), ids, load_reference(folder)(mx.array([ids]))[0])
                )
        print(f"{dtype} {max(found_errors):20.1e}")
    for mode, bits, group in FORMATS:
        found_errors = []
        for config in CONFIGS.values():
            reference = reference_model(config)
            said = quantize_reference(config, reference, bits, group, mode)
            with tempfile.TemporaryDirectory() as name:
                model = load_decoder(save_checkpoint(Path(name), said, reference))
                found_errors.append(worst(model, ids, reference_logits(reference, ids)))
        print(f"{mode} {bits} bits, {group:3}  {max(found_errors):20.1e}")


if __name__ == "__main__":
    main()
