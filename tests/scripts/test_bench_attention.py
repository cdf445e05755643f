"""The attention benchmark end to end at tiny sizes: all variants, tables, JSON, plot; what is wrong is not timed."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import attention_report
import attention_variants
import bench_attention
import mlx.core as mx
import pytest
from support.metal_host import FORWARD, host_pytest_skip, on_host

from kvant.operators.kernels import launch as launching

SCRIPT = Path(bench_attention.__file__)
VARIANTS = [
    "MLX float32",
    "mlx-lm 8-bit",
    "mlx-lm 4-bit",
    "kvant 0-bit unfused",
    "kvant 8-bit unfused",
    "kvant 4-bit unfused",
]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer, one call a sample, no copy measured."""
    monkeypatch.setattr(bench_attention, "CHAIN_BYTES", {"cpu": 1, "gpu": 1})
    monkeypatch.setattr(bench_attention, "SAMPLE_S", 0.0)
    monkeypatch.setattr(bench_attention, "copy_bandwidth_gb_s", lambda size: 10.0)


@pytest.mark.usefixtures("small")
def test_the_script_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, plot = tmp_path / "a.json", tmp_path / "a.svg"
    flags = ["--contexts", "16,40", "--shapes", "qwen2.5-0.5b", "--rounds", "3"]
    code = bench_attention.main([*flags, "--output", str(output), "--plot", str(plot)])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    recording = json.loads(output.read_text())
    cases = [(r["shape"], r["context"], r["variant"]) for r in recording["results"]]
    assert cases == [("qwen2.5-0.5b", context, variant) for context in (16, 40) for variant in VARIANTS]
    for result in recording["results"]:
        elements = 2 * 2 * 64 * result["context"]
        group = result["group"]
        cache = elements * 4
        if result["bits"]:  # mlx-lm: scale and bias a group, in float32; kvant: a scale, in float16
            cache = elements * result["bits"] // 8 + elements // group * (8 if result["path"] == "mlx-lm" else 2)
        assert result["cache_bytes"] == cache
        ms = result["ms"]
        assert 0 < ms["minimum"] <= ms["median"] <= ms["maximum"]
        assert (ms["count"], result["ratio"]["count"]) == (3, 3)
        assert result["gb_per_s"] == pytest.approx(cache / ms["median"] / 1e6)
        assert result["copy_share"] == pytest.approx(result["gb_per_s"] / recording["copy_bandwidth_gb_s"])
        assert result["error"]["own_cache"] < 1e-5
    assert [goal["met"] for goal in recording["goals"]] == [None] * 3
    for name in ("date", "command", "device", "mlx", "mlx_lm", "kvant", "blas", "dtype", "copy_bandwidth_gb_s"):
        assert recording[name], name
    assert printed.out.count("kvant 8-bit unfused |") == 2
    assert printed.out.count(": not measured") == 3
    assert "fused kernel does not run here" in printed.err
    drawing = plot.read_text()
    assert all(label in drawing for label in [*VARIANTS, "its cache read once at", "14 / 2 heads of 64"])


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = bench_attention.main(["--contexts", "8", "--shapes", "qwen2.5-0.5b", "--rounds", "1", *arguments])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


@pytest.mark.usefixtures("small")
def test_json_to_standard_output_and_a_png(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plot = tmp_path / "a.png"
    flags = ["--shapes", "qwen2.5-0.5b,qwen3-4b", "--bits", "8", "--dtype", "float16", "--plot", str(plot)]
    code, out, _ = _run(capsys, "--json", *flags)
    assert code == 0
    variants = [result["variant"] for result in json.loads(out)["results"]]
    assert variants == ["MLX float16", "mlx-lm 8-bit", "kvant 8-bit unfused"] * 2
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("small")
def test_what_does_not_fit_is_left_out_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = _run(capsys, "--contexts", "8,65536", "--memory-gb", "0.1", "--bits", "8")
    assert code == 0
    assert re.search(r"left out: qwen2.5-0.5b at 65,536: needs \d+\.\d GB, the limit is 0.1", out)
    assert "left out" in err
    assert "| 8 | MLX" in out
    code, out, err = _run(capsys, "--contexts", "65536", "--memory-gb", "0.1")
    assert (code, out) == (1, "")
    assert "nothing was measured" in err


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("wrong", ["attend_tokens", "quantized_scaled_dot_product_attention"])
def test_a_wrong_variant_is_not_timed(
    wrong: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = getattr(attention_variants, wrong)
    monkeypatch.setattr(attention_variants, wrong, lambda *given: right(*given) * 1.01)
    code, out, err = _run(capsys, "--bits", "8")
    assert (code, out) == (1, "")
    variant = "kvant 8-bit unfused" if wrong == "attend_tokens" else "mlx-lm 8-bit"
    assert f"qwen2.5-0.5b at 8: {variant} is wrong: its error to own_cache is 0.01" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--contexts", "1k,x"], "--contexts is '1k,x'; expected numbers"),
        (["--contexts", "0"], "--contexts is '0'; expected numbers above 0"),
        (["--contexts", "8,8"], "each once"),
        (["--shapes", "gpt2"], "--shapes is ['gpt2']; expected some of qwen2.5-0.5b"),
        (["--bits", "3"], "--bits is [3]; expected some of 0, 8, 4"),
        (["--paths", "fused"], "--paths has fused, but the default device is a CPU"),
        (["--paths", "slow"], "--paths is ['slow']; expected some of unfused, fused"),
        (["--queries", "4"], "--queries is of the fused kernel; --paths is unfused"),
        (["--paged"], "--paged is of the fused kernel; --paths is unfused"),
        (["--group", "48"], "--group is 48; expected a divisor"),
        (["--mlx-lm-group", "16"], "--mlx-lm-group is 16; expected 32 or 64"),
        (["--rounds", "0"], "--rounds"),
        (["--memory-gb", "0"], "--memory-gb"),
        (["--output", "nowhere/a.json"], "its folder does not exist"),
        (["--plot", "a.pdf"], "expected a name that ends in .png or .svg"),
    ],
)
def test_what_cannot_be_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_attention, "gpu_backend", lambda: None)
    with pytest.raises(SystemExit) as caught:
        bench_attention.main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def _recording(kind: str, dtype: str, eight: float, four: float, share: float) -> dict[str, Any]:
    case = {"shape": "qwen3-4b", "context": 32768, "path": "fused", "detail": ""}
    results = [
        case | {"bits": 8, "ratio": {"median": 9.0}, "copy_share": 0.0, "detail": "pages"},
        case | {"bits": 8, "ratio": {"median": eight}, "copy_share": share},
        case | {"bits": 4, "ratio": {"median": four}, "copy_share": 0.1},
        case | {"bits": 8, "ratio": {"median": 9.0}, "copy_share": 0.0, "path": "unfused"},
        case | {"bits": 8, "ratio": {"median": 9.0}, "copy_share": 0.0, "detail": "4 queries"},
        case | {"bits": 8, "ratio": {"median": 9.0}, "copy_share": 0.0, "context": 1024},
    ]
    return {"kind": kind, "dtype": dtype, "results": results}


def test_goals() -> None:
    def met(*given: Any) -> list[bool | None]:
        return [goal["met"] for goal in attention_report.goals(_recording(*given))]

    assert met("gpu", "bfloat16", 0.6, 0.4, 0.61) == [True, True, True]
    assert met("gpu", "bfloat16", 0.61, 0.41, 0.6) == [False, False, False]
    assert met("cpu", "bfloat16", 0.1, 0.1, 0.9) == [None] * 3
    assert met("gpu", "float32", 0.1, 0.1, 0.9) == [None] * 3


@host_pytest_skip
@pytest.mark.usefixtures("small")
def test_the_fused_path_on_the_host(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The kernel's Metal text, run by the host: the same rows as the other variants, in tables and JSON."""
    make = launching._kernel
    templates: list[dict[str, Any]] = []

    def kernel(name: str, backend: str) -> Any:
        def run(*, template: list[tuple[str, Any]], **rest: Any) -> list[mx.array]:
            templates.append(dict(template))
            return host(name, backend)(template=template, **rest)

        return run

    host = cache(lambda name, backend: on_host(make(name, backend), orders=(FORWARD,)))
    monkeypatch.setattr(launching, "_kernel", kernel)
    monkeypatch.setattr(bench_attention, "gpu_backend", lambda: "metal")
    flags = ["--paths", "fused,unfused", "--queries", "4,2", "--paged"]
    code, out, err = _run(capsys, "--contexts", "200", "--bits", "8", *flags, "--json")
    assert code == 0, err
    recording = json.loads(out)
    assert (recording["queries_used"], recording["queries"], recording["paged"]) == (4, [4, 2], True)
    results = {result["variant"]: result for result in recording["results"]}
    kinds = ["fused", "unfused", "fused, 4 queries", "fused, 2 queries", "fused, pages"]
    assert list(results) == ["MLX float32", "mlx-lm 8-bit", *(f"kvant 8-bit {kind}" for kind in kinds)]
    unfused = results["kvant 8-bit unfused"]
    for kind in kinds:
        result = results[f"kvant 8-bit {kind}"]
        assert result["error"]["own_cache"] < 1e-5
        assert result["error"]["unquantized"] == pytest.approx(unfused["error"]["unquantized"], rel=1e-3)
        assert result["cache_bytes"] == unfused["cache_bytes"]
    first = {(template["QUERIES"], template["PAGE"]) for template in templates if "QUERIES" in template}
    assert first == {(4, 0), (2, 0), (4, 128)}
    code, _, err = _usage(capsys, "--paths", "fused", "--queries", "3")
    assert (code, "--queries is '3'; expected some of (4, 2)" in err) == (2, True)


def _usage(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        bench_attention.main(arguments)
    printed = capsys.readouterr()
    assert isinstance(caught.value.code, int)
    return caught.value.code, printed.out, printed.err


def test_a_compiled_chain_is_the_same() -> None:
    """As on a GPU, where the chain is compiled; MLX's attention and mlx-lm's products have nothing to join."""
    plan = {"dtype": "float32", "bits": [8], "paths": ["unfused"], "kind": "cpu", "backend": None, "seed": 0}
    plan |= {"queries": [], "paged": False}
    variants = attention_variants.make_variants("qwen2.5-0.5b", 8, 2, plan | {"group": 32, "mlx_lm_group": 64})
    query = mx.random.normal((1, 14, 1, 64), key=mx.random.key(9))
    for variant in variants[:2]:
        chains = [bench_attention._chain(variant, compiled)(query, variant.layers) for compiled in (False, True)]
        assert mx.allclose(*chains, rtol=1e-6, atol=1e-6).item()
