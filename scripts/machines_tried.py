"""The page of machines that were tried, docs/machines-tried.md, from the files of ``kvant doctor --bench``.

Run: python scripts/machines_tried.py      after a file was put into scripts/results/machines
"""

import json
from pathlib import Path
from typing import Any

import kvant  # noqa: F401  # isort: skip  (before MLX: it loads a faster BLAS)

from kvant.sizes import format_bytes
from kvant.tools.doctor.bench import figures

REPOSITORY = Path(__file__).parents[1]
RECORDS = REPOSITORY / "scripts" / "results" / "machines"
PAGE = REPOSITORY / "docs" / "machines-tried.md"
HEAD = """# Machines that were tried

Made by `scripts/machines_tried.py` from the files in `scripts/results/machines`.
**No Mac is among them yet: nobody has run kvant on a Metal GPU.**

To add a machine, with nothing else running on it:

```sh
kvant doctor --bench my-machine.json      # ten minutes
```

Open an issue or a pull request with the file. It has the versions, the system, the device and every round's times.
A ratio is the median over rounds, with its range: below 1 kvant is faster, or takes less.
"""


def page(records: dict[str, dict[str, Any]]) -> str:
    """The page of records by the names of their files."""
    return HEAD + "".join(map(section, records, records.values()))


def section(name: str, record: dict[str, Any]) -> str:
    """One machine's facts and figures."""
    here, uses = record["environment"], [*record["kernels"], *record["uses"]]
    wrong = sum(each["problem"] is not None for each in uses)
    versions = ", ".join(f"{package} {version}" for package, version in here["versions"].items())
    rows = [
        ("date", f"{record['date'][:10]}, a load of {record['load_average']} before it"),
        ("system", f"{here['system']}, {here['cores']} cores, {format_bytes(record['machine']['memory_bytes'])}"),
        ("versions", versions),
        ("fused kernel", f"{len(uses) - wrong} of {len(uses)} cases right" if uses else "no GPU: it did not run"),
        *figures(record),
        *(("left out", text) for text in record["left_out"]),
    ]
    lines = "\n".join(f"| {what} | {figure} |" for what, figure in rows)
    return f"\n## {here['device']}\n\n[{name}](../scripts/results/machines/{name})\n\n| | |\n| --- | --- |\n{lines}\n"


def read() -> dict[str, dict[str, Any]]:
    """The records by the names of their files."""
    return {path.name: json.loads(path.read_text("utf-8")) for path in sorted(RECORDS.glob("*.json"))}


if __name__ == "__main__":
    PAGE.write_text(page(read()), encoding="utf-8")
