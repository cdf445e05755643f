"""The attention benchmark end to end at tiny sizes: all variants, tables, JSON; a wrong one is not timed."""

import json
from pathlib import Path
from statistics import median
from typing import Any

import attention_variants
import bench_attention
import pytest
from support.fused_path import host_kernel
from support.metal_host import host_pytest_skip

from kvant.operators.kernels import launch as launching

VARIANTS = [
    "MLX float32",
    "mlx-lm 8-bit",
    "mlx-lm 4-bit",
    *(f"kvant {bits}-bit unfused" for bits in (0, 8, 4)),
]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_attention, "CHAIN_BYTES", {"cpu": 1, "gpu": 1})
    monkeypatch.setattr(bench_attention, "SAMPLE_S", 0.0)
    monkeypatch.setattr(bench_attention, "copy_bandwidth_gb_s", lambda size: 10.0)


def measured(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    output = folder / "a.json"
    assert bench_attention.main(["--shapes", "qwen2.5-0.5b", *arguments, "--output", str(output)]) == 0
    results: list[dict[str, Any]] = json.loads(output.read_text())["results"]
    return results


def test_the_script_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = measured(tmp_path, "--contexts", "16,40,65536", "--memory-gb", "0.1", "--rounds", "3")
    printed = capsys.readouterr().out
    cases = [(r["context"], r["variant"]) for r in results]
    assert cases == [(context, variant) for context in (16, 40) for variant in VARIANTS]
    for result in results:
        elements = 2 * 2 * 64 * result["context"]
        nbytes = elements * 4
        if result["bits"]:  # mlx-lm: scale and bias of 64, in float32; kvant: a scale of 32, in float16
            scales = elements // 64 * 8 if result["path"] == "mlx-lm" else elements // 32 * 2
            nbytes = elements * result["bits"] // 8 + scales
        assert result["cache_bytes"] == nbytes
        assert len(result["ms"]) == 3
        assert result["gb_per_s"] == pytest.approx(nbytes / median(result["ms"]) / 1e6)
        assert result["copy_share"] == pytest.approx(result["gb_per_s"] / 10)
        assert result["error"]["own_cache"] < 1e-5
    assert printed.count("kvant 8-bit unfused |") == 2
    assert printed.count(": not measured") == 3
    assert "left out: qwen2.5-0.5b at 65,536: needs" in printed


@pytest.mark.parametrize(
    ("wrong", "variant"),
    [("attend_tokens", "kvant 8-bit unfused"), ("quantized_scaled_dot_product_attention", "mlx-lm 8-bit")],
)
def test_a_wrong_variant_is_not_timed(
    wrong: str, variant: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = getattr(attention_variants, wrong)
    monkeypatch.setattr(attention_variants, wrong, lambda *given: right(*given) * 1.01)
    flags = ["--contexts", "8", "--shapes", "qwen2.5-0.5b", "--rounds", "1", "--bits", "8"]
    assert bench_attention.main(flags) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert f"{variant} is wrong: its error to own_cache is 0.01" in err


@host_pytest_skip
def test_the_fused_path_on_the_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The kernel's Metal text, run by the host: the same rows as the other variants."""
    monkeypatch.setattr(launching, "_kernel", host_kernel)
    monkeypatch.setattr(bench_attention, "gpu_backend", lambda: "metal")
    flags = ["--contexts", "200", "--rounds", "1", "--bits", "8", "--paths", "fused,unfused", "--paged"]
    results = {result["variant"]: result for result in measured(tmp_path, *flags)}
    kinds = ["fused", "unfused", "fused, pages"]
    assert list(results) == ["MLX float32", "mlx-lm 8-bit", *(f"kvant 8-bit {kind}" for kind in kinds)]
    unfused = results["kvant 8-bit unfused"]
    for kind in kinds:
        result = results[f"kvant 8-bit {kind}"]
        assert result["error"]["own_cache"] < 1e-5
        assert result["error"]["unquantized"] == pytest.approx(unfused["error"]["unquantized"], rel=1e-3)
        assert result["cache_bytes"] == unfused["cache_bytes"]
