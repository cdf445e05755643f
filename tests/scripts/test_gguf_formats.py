"""The table of imported GGUF files in docs/models.md is that of the recording; the types are those of
llama.cpp.
"""

import json
from collections import Counter
from pathlib import Path

import pytest
from gguf_formats import FILES, kind_of

ROOT = Path(__file__).parents[2]
RECORD = json.loads((ROOT / "scripts/results/gguf-smollm2-cpu.json").read_text())["files"]
FIDELITIES = ("exact", "scales rounded to float16", "requantized to 8 bits")


@pytest.mark.parametrize("name", RECORD)
def test_a_row(name: str) -> None:
    census, check = RECORD[name]["census"], RECORD[name]["check"]
    tensors: Counter[str] = Counter()
    for row in census:
        tensors[row["fidelity"]] += row["tensors"]
    sizes = [f"{sum(row[key] for row in census) / 1e6:.1f}" for key in ("bytes_before", "bytes_after")]
    counts = " / ".join(str(tensors[fidelity]) for fidelity in FIDELITIES)
    page = (ROOT / "docs/models.md").read_text()
    (line,) = (line for line in page.splitlines() if line.startswith(f"| {name}") and line.endswith("% |"))
    cells = [cell.strip() for cell in line.strip("|").split("|")][1:]
    assert cells[:3] == [counts, *sizes]
    assert float(cells[3]) == pytest.approx(check["mean_kld_nats"], rel=0.2)
    assert float(cells[4].removesuffix(" %")) == pytest.approx(100 * check["top1"], abs=0.05)


def test_the_types_that_llama_cpp_takes() -> None:
    most, better = FILES["Q4_K_M"]
    kinds = [
        kind_of(f"blk.{layer}.ffn_down.weight", 1536, 30, most, better, "output.weight")
        for layer in range(30)
    ]
    assert [layer for layer, kind in enumerate(kinds) if kind == "Q6_K"] == [
        0,
        1,
        2,
        5,
        8,
        11,
        14,
        17,
        20,
        23,
        *range(26, 30),
    ]
    assert kind_of("blk.5.attn_q.weight", 576, 30, most, better, "output.weight") == "Q5_0"
    assert kind_of("blk.5.attn_v.weight", 576, 30, most, better, "output.weight") == "Q8_0"
    assert kind_of("output.weight", 2048, 30, most, better, "output.weight") == "Q6_K"
    assert kind_of("token_embd.weight", 2048, 30, most, better, "output.weight") == "Q4_K"
    assert {
        kind_of(name, 64, 1, *FILES["Q8_0"], "output.weight")
        for name in ("output.weight", "blk.0.ffn_up.weight")
    } == {"Q8_0"}
