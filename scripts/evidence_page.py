"""The page of what was measured, docs/data/evidence.md, from the files in scripts/results.

Run: python scripts/evidence_page.py      after a file was put there
"""

import json
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import kvant  # noqa: F401  # isort: skip  (before MLX: it loads a faster BLAS)

from kvant.sizes import format_bytes
from kvant.tools.evidence.measure import figures, shown
from kvant.tools.report.measure import LEGS
from kvant.tools.statistics import Spread

REPOSITORY = Path(__file__).parents[1]
REPORT_HEAD = (
    "read", "format", "bytes a token", "mean KLD", "median", "p99", "p99.9", "same top-1", "perplexity",
)  # fmt: skip
RESULTS = REPOSITORY / "scripts" / "results"
PAGE = REPOSITORY / "docs" / "data" / "evidence.md"
HEAD = """# Evidence

Made by `scripts/evidence_page.py` from the files in `scripts/results`, which have every round.
**No Mac is among the machines yet: nobody has run kvant on a Metal GPU.**

A ratio is the median over rounds, with its range: below 1 kvant is faster, or takes less. Rounds are in turns.

## Add your machine

With nothing else running on it, ten minutes at most:

```sh
kvant evidence --output my-machine.json
kvant evidence --check my-machine.json
```

Open an issue or a pull request with the file. It has the versions, the system, the device, the digests of the weights
and every round's times; no name of yours. For another model: `kvant evidence MODEL --output FILE`. `--check` says what
a file lacks, whether it was altered since it was written, and whether its figures are those of its rounds. Its digest
finds accidents and edits, and no forger. If later rounds are slower or faster than earlier ones, as of a machine that
becomes hot, the file says so: Mann's test, below 5 %.
"""


def page(results: Path = RESULTS) -> str:
    """The page of a folder of results."""
    machines = [_machine(path, _read(path)) for path in sorted((results / "evidence").glob("*.json"))]
    recordings = [(path.name, _read(path)) for path in sorted(results.glob("*.json"))]
    benches = [
        _bench(name, record) for name, record in recordings if "baseline" in record and "figures" in record
    ]
    reports = [_report(name, record) for name, record in recordings if "prompt_tokens" in record]
    sections = (
        "\n## Machines\n",
        *machines,
        "\n## Latency: `kvant bench`\n",
        *benches,
        "\n## Quality: `kvant report`\n",
    )
    return HEAD + "".join([*sections, *reports])


def _read(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))


def _machine(path: Path, record: Mapping[str, Any]) -> str:
    here, uses = record["environment"], [*record["kernels"], *record["uses"]]
    wrong = sum(each["problem"] is not None for each in uses)
    rows = [
        ("date", f"{record['date'][:10]}, a load of {record['load_average']} before it"),
        (
            "system",
            f"{here['system']}, {here['cores']} cores, {format_bytes(record['machine']['memory_bytes'])}",
        ),
        ("versions", ", ".join(f"{package} {version}" for package, version in here["versions"].items())),
        (
            "fused kernel",
            f"{len(uses) - wrong} of {len(uses)} cases right" if uses else "no GPU: it did not run",
        ),
        *figures(record),
        *(("left out", text) for text in record["left_out"]),
    ]
    return f"\n### {here['device']}\n\n{_file(f'evidence/{path.name}')}\n\n{_table(('', ''), rows)}"


def _bench(name: str, record: Mapping[str, Any]) -> str:
    rows = [
        (
            each["engine"],
            _prompts(each),
            _ms(each["first_token_ms"]),
            _ms(each.get("latency_p50_ms", each.get("between_p50_ms"))),
            _spread(each.get("first_token_ratio")),
            _spread(each.get("ratio")),
        )
        for each in record["figures"]
    ]
    said = f"{record['model']}, {record['date'][:10]}, {record['device']}, {record['cores']} cores, MLX {record['mlx']}"
    by = f"divided by {record['baseline']}'s"
    head = ("engine", "prompt tokens", "first token", "a token", f"first token, {by}", f"a token, {by}")
    return f"\n### {said}\n\n{_file(name)}: `{_command(record['command'])}`\n\n{_table(head, rows)}"


def _prompts(figures: Mapping[str, Any]) -> str:
    if not figures.get("streams"):
        return str(figures["context"])
    lengths = figures["prompt_tokens"]
    shortest, longest = min(lengths), max(lengths)
    return f"{figures['streams']} of {shortest}" + (f" to {longest}" if longest > shortest else "")


def _command(text: str) -> str:
    """A command without the files of the one who ran it."""
    words, kept = iter(shlex.split(text)), []
    for word in words:
        if word in ("--output", "--plot"):
            next(words, "")
        else:
            kept.append(word)
    return shlex.join(["kvant", *kept])


def _compared(record: Mapping[str, Any]) -> str:
    """Say what the formats were compared with, unless it is kvant's own full cache."""
    other = record.get("compared_with")
    return f" Compared with llama.cpp's predictions in {other}." if other else ""


def _report(name: str, record: Mapping[str, Any]) -> str:
    rows = []
    for leg in LEGS:
        for each in record["formats"]:
            own = each[leg]
            klds = [f"{own[f'{figure}_kld_nats']:.1e}" for figure in ("mean", "median", "p99", "p999")]
            # Files of llama.cpp's predictions say neither bytes nor a perplexity.
            size = each["bytes_per_token"] or ""
            perplexity = "" if own["perplexity"] is None else f"{own['perplexity']:.3f}"
            rows.append((leg, each["format"], size, *klds, f"{own['top1']:.2%}", perplexity))
    text, first = record["text"], record["reference"]
    source = text["name"].removeprefix("the tokens of ")
    said = f"{record['model']}, {text['tokens']:,} tokens of {source}, {record['device']}"
    legs = (
        f"{first['prefill']['positions']:,} predictions are of tokens read in chunks, {first['decode']['positions']:,} "
        f"of tokens read one by one behind {record['prompt_tokens']:,}; {record['reserved_tokens']:,} tokens reserved, "
        f"{record['dtype']}, perplexity {first['prefill']['perplexity']:.3f} and {first['decode']['perplexity']:.3f} "
        f"without quantization.{_compared(record)}"
    )
    return f"\n### {said}\n\n{_file(name)}: {legs}\n\n{_table(REPORT_HEAD, rows)}"


def _file(name: str) -> str:
    return f"[{name}](../../scripts/results/{name})"


def _table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    head = tuple(head)
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def _ms(number: float | None) -> str:
    return "-" if number is None else f"{number:.3g} ms" if number < 100 else f"{number:,.0f} ms"


def _spread(found: Mapping[str, Any] | None) -> str:
    return shown(None if found is None else Spread(**found))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
