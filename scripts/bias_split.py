"""What the bias split is worth: the embedded model made Qwen2-like by a large key bias, its quality by cache format.

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

import mlx.core as mx

from kvant.engine.generate import generate
from kvant.engine.load import POCKET, find_model, load_folder
from kvant.engine.prompt import encode_rendered, render_chat
from kvant.models import Decoder

CONSTANT = 300.0
SWEEP = (0.0, 3.0, 10.0, 30.0, 100.0, 300.0, 900.0)
BITS, GROUPS = (8, 4), (8, 32, 64)
HELDOUT = Path(__file__).parents[1] / "tests" / "data" / "heldout.jsonl"
TOKENS = 2048  # of held-out text, in pieces of the context below
PIECE = 1024
QUESTIONS = 20  # of either kind, asked where the table shows them


@dataclass(frozen=True, slots=True)
class Quality:
    """Against the unchanged model's full-precision cache: nats, and shares of positions or questions."""

    constant: float
    bits: int
    group: int
    split: bool
    perplexity: float
    mean_kld: float
    p99_kld: float
    top1: float
    questions: float | None
    recall: float | None


def plant(source: Path, folder: Path, constant: float) -> Path:
    """A copy of a checkpoint with ``constant`` added to every head's key bias in its lowest-frequency pair."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    head_dim = json.loads((folder / "config.json").read_text())["head_dim"]
    weights = {name: mx.array(x) for name, x in mx.load(str(source / "model.safetensors")).items()}
    for name, x in weights.items():
        if name.endswith("k_proj.bias"):
            bias = x.astype(mx.float32).reshape(-1, 2, head_dim // 2)
            bias[:, :, -1] += constant
            weights[name] = bias.flatten()
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


def texts(tokenizer: object) -> list[list[int]]:
    """Held-out conversations as token ids, in pieces of one context."""
    ids: list[int] = []
    for line in HELDOUT.read_text(encoding="utf-8").splitlines():
        document = json.loads(line)
        text = document.get("text") or tokenizer.apply_chat_template(document["messages"], tokenize=False)  # type: ignore[attr-defined]
        ids += encode_rendered(tokenizer, text)  # type: ignore[arg-type]
    return [ids[first : first + PIECE] for first in range(0, TOKENS, PIECE)]


def logprobs(model: Decoder, ids: list[int], **cache_format: object) -> mx.array:
    """Log-probabilities after every token of a piece, fed in two halves so that the second reads the cache's past."""
    cache = model.make_cache(len(ids), **cache_format)  # type: ignore[arg-type]
    halves = [model(mx.array([ids[part]]), cache=cache)[0] for part in (slice(PIECE // 2), slice(PIECE // 2, None))]
    logits = mx.concatenate(halves)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def answered(model: Decoder, tokenizer: object, kinds: tuple[str, ...], **cache_format: object) -> float:
    """Share of held-out questions of these kinds whose greedy answer is exact."""
    documents = [json.loads(line) for line in HELDOUT.read_text(encoding="utf-8").splitlines()]
    fitting = [d for d in documents if d["kind"].startswith(kinds)]
    asked = fitting[:: len(fitting) // QUESTIONS][:QUESTIONS]  # of every kind among them
    right = 0
    for document in asked:
        ids = encode_rendered(tokenizer, render_chat(tokenizer, document["messages"]))  # type: ignore[arg-type]
        cache = model.make_cache(len(ids) + 24, **cache_format)  # type: ignore[arg-type]
        right += generate(model, tokenizer, ids, max_tokens=24, prompt_cache=cache).strip() == document["answer"]  # type: ignore[arg-type]
    return right / len(asked)


def measure(
    model: Decoder, tokenizer: object, expected: list[mx.array], constant: float, bits: int, group: int, split: bool
) -> Quality:
    """Quality of one cache format; answers only where the table shows them: they take the time."""
    ask = tabled(constant)
    cache_format = {"quant_bit": bits, "quant_group": group, "bias_split": split}
    klds, same, losses = [], [], []
    for ids, reference in zip(texts(tokenizer), expected, strict=True):
        given = logprobs(model, ids, **cache_format)
        klds.append((mx.exp(reference) * (reference - given)).sum(axis=-1))
        same.append(mx.argmax(reference, axis=-1) == mx.argmax(given, axis=-1))
        losses.append(-mx.take_along_axis(given[:-1], mx.array(ids[1:])[:, None], axis=-1))
    kld = mx.sort(mx.concatenate(klds))
    return Quality(
        constant, bits, group, split,
        perplexity=mx.exp(mx.concatenate(losses).mean()).item(),
        mean_kld=kld.mean().item(),
        p99_kld=kld[int(0.99 * kld.size)].item(),
        top1=mx.concatenate(same).astype(mx.float32).mean().item(),
        questions=answered(model, tokenizer, ("questions", "facts"), **cache_format) if ask else None,
        recall=answered(model, tokenizer, ("recall",), **cache_format) if ask else None,
    )  # type: ignore[arg-type]  # fmt: skip


def tabled(constant: float) -> bool:
    """Whether the table has rows for this constant; the plot has all."""
    return constant in (0.0, CONSTANT)


def main() -> None:
    """Print the table; write it, the JSON lines and the plot."""
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "results" / "bias-split"
    target.mkdir(parents=True, exist_ok=True)
    source = find_model(POCKET)
    plain, tokenizer = load_folder(source)
    expected = [logprobs(plain, ids, quant_bit=0) for ids in texts(tokenizer)]
    rows: list[Quality] = []
    with tempfile.TemporaryDirectory() as scratch:
        for constant in SWEEP:
            model, _ = load_folder(plant(source, Path(scratch) / f"{constant:g}", constant))
            groups = GROUPS if tabled(constant) else (32,)
            cases = [(0, 32, False), *((b, g, s) for b in BITS for g in groups for s in (True, False))]
            for case in cases:
                rows.append(measure(model, tokenizer, expected, constant, *case))
                print(rows[-1], file=sys.stderr, flush=True)
    with (target / "quality.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(row)) + "\n" for row in rows)
    table = "\n".join(markdown(row) for row in rows if tabled(row.constant))
    print(
        "| key bias added | bits | group | split | perplexity | mean KLD | p99 KLD | same top-1 | questions | recall |"
    )
    print("| --- " * 10 + "|\n" + table)
    plot(rows, target / "error-against-bias.svg")


def markdown(row: Quality) -> str:
    """One row of the table."""
    format_ = (str(row.bits), str(row.group), "on" if row.split else "off") if row.bits else ("none", "", "off")
    numbers = f"{row.perplexity:.4f} | {row.mean_kld:.1e} | {row.p99_kld:.1e} | {row.top1:.4f}"
    answers = " | ".join("" if share is None else f"{share:.2f}" for share in (row.questions, row.recall))
    return f"| {row.constant:g} | {' | '.join(format_)} | {numbers} | {answers} |"


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
