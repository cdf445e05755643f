"""The worth of the bias split: the embedded model made Qwen2-like by a large key bias, its quality by cache
format.

Run: python scripts/bias_split.py > docs/data/bias-split/quality.jsonl

A constant is added to k_proj.bias in every head's lowest-frequency rotary pair. There R_j b hardly moves
within the context, so the softmax cancels it and the model's function stays: the first row of the table
checks that.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

import kvant.blas  # noqa: F401  # isort: skip  (before MLX: it loads a faster one)

import mlx.core as mx

from kvant.engine.load import POCKET, find_model, load_folder
from kvant.models import Decoder
from kvant.tools.report.formats import REFERENCE, CacheFormat
from kvant.tools.report.runs import CacheReader, answer, read_legs
from kvant.tools.report.texts import Dialogue, Text, built_in_text, recall_dialogues

CONSTANT = 300.0
SWEEP = (0.0, 3.0, 10.0, 30.0, 100.0, 300.0, 900.0)
BITS, GROUPS = (8, 4), (8, 32, 64)
TOKENS = 2048  # of held-out text, in pieces of the context below
PIECE = 1024
RECALL_TOKENS = 4096  # of questions, asked where the table shows them
ROW = "| {constant:g} | {bits} | {group} | {split} | {perplexity:.4f} | {mean_kld:.1e} | {p99_kld:.1e} | {top1:.4f} | "
ROW += "{recall:.2f} |"


def plant(source: Path, folder: Path, constant: float) -> Path:
    """A copy of a checkpoint with ``constant`` added to every head's key bias in its lowest-frequency
    pair.
    """
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__", "heldout.jsonl"))
    head_dim = json.loads((folder / "config.json").read_text())["head_dim"]
    weights = {name: mx.array(x) for name, x in mx.load(str(source / "model.safetensors")).items()}
    for name, x in weights.items():
        if name.endswith("k_proj.bias"):
            bias = x.astype(mx.float32).reshape(-1, 2, head_dim // 2)
            bias[:, :, -1] += constant
            weights[name] = bias.flatten()
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


def measure(
    plain: Decoder,
    model: Decoder,
    text: Text,
    recall: list[Dialogue],
    constant: float,
    formats: list[CacheFormat],
) -> list[dict[str, Any]]:
    """Quality of cache formats against the unchanged model's full-precision cache, in nats and shares.

    Answers only where the table shows them, because they take most of the time.
    """
    longest = max(PIECE, *(len(dialogue.ids) for dialogue in recall))
    readers = [CacheReader(plain, REFERENCE.make_cache(plain, PIECE))]
    readers += [CacheReader(model, f.make_cache(model, longest)) for f in formats]
    tallies, _ = read_legs(readers, text)
    rows = []
    for cache_format, reader, tally in zip(formats, readers[1:], tallies[1:], strict=True):
        asked = recall if tabled(constant) else []
        right = [exact for dialogue in asked for exact in answer(reader, dialogue)]
        bits, group, split = cache_format.kv_bits, cache_format.kv_group_size, cache_format.bias_split
        found, recalled = tally.figures(), mean(right) if right else None
        figures = {
            "perplexity": found.perplexity,
            "mean_kld": found.mean_kld_nats,
            "p99_kld": found.p99_kld_nats,
        }
        rows.append(
            {
                "constant": constant,
                "bits": bits,
                "group": group,
                "split": split,
                **figures,
                "top1": found.top1,
            }
            | {"recall": recalled}
        )
    return rows


def tabled(constant: float) -> bool:
    """Whether the table has rows for this constant."""
    return constant in (0.0, CONSTANT)


def main() -> None:
    """Print every figure as a JSON line, and the table for people to standard error."""
    source = find_model(POCKET)
    plain, tokenizer = load_folder(source)
    text = built_in_text(tokenizer, PIECE, TOKENS)
    recall = recall_dialogues(tokenizer, RECALL_TOKENS)
    print(
        "| key bias added | bits | group | split | perplexity | mean KLD | p99 KLD | same top-1 | recall |",
        file=sys.stderr,
    )
    print("| --- " * 9 + "|", file=sys.stderr)
    with tempfile.TemporaryDirectory() as scratch:
        for constant in SWEEP:
            model, _ = load_folder(plant(source, Path(scratch) / f"{constant:g}", constant))
            groups = GROUPS if tabled(constant) else (32,)
            formats = [
                REFERENCE,
                *(CacheFormat(b, g, s, rotates=False) for b in BITS for g in groups for s in (True, False)),
            ]
            for row in measure(plain, model, text, recall, constant, formats):
                print(json.dumps(row), flush=True)
                if tabled(constant):
                    shown = row | {"split": "on" if row["split"] else "off", "recall": row["recall"] or 0}
                    print(ROW.format(**shown), file=sys.stderr)


if __name__ == "__main__":
    main()
