"""The worth of the bias split: the embedded model made Qwen2-like by a large key bias, its quality by cache format.

Run: python scripts/bias_split.py [folder for the results]   (needs the extra `plot`)

A constant is added to k_proj.bias in every head's lowest-frequency rotary pair. There R_j b hardly moves within the
context, so the softmax cancels it and the model's function stays: the first row of the table checks that.
"""

import json
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean

import kvant.blas  # noqa: F401  # isort: skip  (before MLX: it loads a faster one)

import mlx.core as mx

from kvant.engine.load import POCKET, find_model, load_folder
from kvant.models import Decoder
from kvant.tools.report.divergence import Tally
from kvant.tools.report.formats import REFERENCE, CacheFormat
from kvant.tools.report.runs import answer, compare
from kvant.tools.report.texts import Dialogue, Text, built_in_text, recall_dialogues

CONSTANT = 300.0
SWEEP = (0.0, 3.0, 10.0, 30.0, 100.0, 300.0, 900.0)
BITS, GROUPS = (8, 4), (8, 32, 64)
TOKENS = 2048  # of held-out text, in pieces of the context below
PIECE = 1024
RECALL_TOKENS = 4096  # of questions, asked where the table shows them


@dataclass(frozen=True, slots=True)
class Quality:
    """Against the unchanged model's full-precision cache: nats, and shares of positions or answers."""

    constant: float
    bits: int
    group: int
    split: bool
    perplexity: float
    mean_kld: float
    p99_kld: float
    top1: float
    recall: float | None


def plant(source: Path, folder: Path, constant: float) -> Path:
    """A copy of a checkpoint with ``constant`` added to every head's key bias in its lowest-frequency pair."""
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
) -> list[Quality]:
    """Quality of cache formats. Answers only where the table shows them, because they take most of the time."""
    longest = max(PIECE, *(len(dialogue.ids) for dialogue in recall))
    caches = [REFERENCE.make_cache(plain, PIECE), *(f.make_cache(model, longest) for f in formats)]
    tallies = [Tally() for _ in caches]
    for piece in text.pieces:
        compare(model, piece, caches, tallies, reference=plain)
    rows = []
    for cache_format, cache, tally in zip(formats, caches[1:], tallies[1:], strict=True):
        asked = recall if tabled(constant) else []
        right = [exact for dialogue in asked for exact in answer(model, cache, dialogue)]
        found = tally.figures()
        rows.append(
            Quality(
                constant, cache_format.bits, cache_format.group, cache_format.split, found.perplexity,
                found.mean_kld_nats, found.p99_kld_nats, found.top1, mean(right) if right else None,
            )
        )  # fmt: skip
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def tabled(constant: float) -> bool:
    """Whether the table has rows for this constant; the plot has all."""
    return constant in (0.0, CONSTANT)


def main() -> None:
    """Print the table; write it, the JSON lines and the plot."""
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "results" / "bias-split"
    target.mkdir(parents=True, exist_ok=True)
    source = find_model(POCKET)
    plain, tokenizer = load_folder(source)
    text = built_in_text(tokenizer, PIECE, TOKENS)
    recall = recall_dialogues(tokenizer, RECALL_TOKENS)
    rows: list[Quality] = []
    with tempfile.TemporaryDirectory() as scratch:
        for constant in SWEEP:
            model, _ = load_folder(plant(source, Path(scratch) / f"{constant:g}", constant))
            groups = GROUPS if tabled(constant) else (32,)
            formats = [REFERENCE, *(CacheFormat(b, g, s) for b in BITS for g in groups for s in (True, False))]
            rows += measure(plain, model, text, recall, constant, formats)
    with (target / "quality.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(row)) + "\n" for row in rows)
    table = "\n".join(markdown(row) for row in rows if tabled(row.constant))
    print("| key bias added | bits | group | split | perplexity | mean KLD | p99 KLD | same top-1 | recall |")
    print("| --- " * 9 + "|\n" + table)
    plot(rows, target / "error-against-bias.svg")


def markdown(row: Quality) -> str:
    """One row of the table."""
    format_ = (str(row.bits), str(row.group), "on" if row.split else "off") if row.bits else ("none", "", "off")
    numbers = f"{row.perplexity:.4f} | {row.mean_kld:.1e} | {row.p99_kld:.1e} | {row.top1:.4f}"
    recall = "" if row.recall is None else f"{row.recall:.2f}"
    return f"| {row.constant:g} | {' | '.join(format_)} | {numbers} | {recall} |"


def plot(rows: list[Quality], path: Path) -> None:
    """Mean KLD against the size of the key bias, at groups of 32."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for bits, color in zip(BITS, ("tab:blue", "tab:red"), strict=True):
        for split, style in ((False, "--"), (True, "-")):
            line = [r for r in rows if (r.bits, r.group, r.split) == (bits, 32, split)]
            label = f"{bits} bits, split {'on' if split else 'off'}"
            axes.plot(
                [r.constant for r in line], [r.mean_kld for r in line], style, marker="o", color=color, label=label
            )
    exact = [r for r in rows if r.bits == 0]
    axes.plot([r.constant for r in exact], [r.mean_kld for r in exact], ":", color="gray", label="not quantized")
    axes.set(
        xscale="symlog", yscale="log", xlabel="constant added to the keys' lowest-frequency pair",
        ylabel="mean KLD to the unchanged model, nats", title="Key bias and quantized cache, groups of 32",
    )  # fmt: skip
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path)


if __name__ == "__main__":
    main()
