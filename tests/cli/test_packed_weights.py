"""--weights: how a CPU holds quantized weights, as the plan counts, the start says and a session loads
them.
"""

import json
from pathlib import Path

import mlx.core as mx
import pytest
from support.bridged import write_mlx_lm
from support.checkpoints import llama_config, write_reference
from support.command import call, refusal

from kvant import blas

pytestmark = pytest.mark.skipif(
    mx.default_device().type != mx.cpu or blas.sgemv() is None,
    reason="only a CPU with OpenBLAS unpacks weights",
)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, _ = write_reference(tmp_path_factory.mktemp("weights") / "model", llama_config(), 4, 32)
    return folder


def planned(*arguments: str) -> dict[str, int]:
    done = call("plan", *arguments, "--json")
    found: dict[str, int] = json.loads(done.stdout)["bytes"]
    return found


def test_the_plan_counts_what_is_held(packed: Path) -> None:
    model = str(packed)
    by_default, floats, as_stored = (
        planned(model, *flags) for flags in ([], ["--weights", "float32"], ["--weights", "packed"])
    )
    assert by_default == floats
    assert floats["weights"] > 4 * as_stored["weights"]
    assert "4 bits, groups of 32, unpacked to float32, tied" in call("plan", model).stdout
    assert "unpacked" not in call("plan", model, "--weights", "packed").stdout
    assert json.loads(call("plan", model, "--json").stdout)["unpacked"] is True


def test_without_half_of_the_memory_they_stay_packed(packed: Path) -> None:
    model, enough = str(packed), 2 * planned(str(packed))["total"]
    assert planned(model, "--memory", f"{enough // 2**20 + 1}MB")["weights"] == planned(model)["weights"]
    as_stored = planned(model, "--weights", "packed")["weights"]
    assert planned(model, "--memory", f"{enough // 2**20 - 1}MB")["weights"] == as_stored
    assert planned(model, "--memory", "64GB", "--device", "gpu")["weights"] < planned(model)["weights"]


def test_without_openblas_they_stay_packed(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_stored = planned(str(packed), "--weights", "packed")["weights"]
    monkeypatch.setattr(blas, "_library", None)
    assert planned(str(packed))["weights"] == as_stored


def test_what_is_refused(packed: Path, tmp_path: Path) -> None:
    model = str(packed)
    assert "--weights is 'int4'; expected packed or float32" in refusal(2, "plan", model, "--weights", "int4")
    said = refusal(2, "plan", model, "--weights", "float32", "--device", "gpu", "--memory", "8GB")
    assert "a GPU multiplies quantized weights as they are stored" in said
    assert "on several ranks" in refusal(2, "plan", model, "--weights", "float32", "--ranks", "2")
    assert "are not quantized" in refusal(2, "plan", "pocket", "--weights", "packed")
    bridged = write_mlx_lm(tmp_path / "bridged", "gemma3_text")
    assert "runs as mlx-lm's class" in refusal(2, "plan", str(bridged), "--weights", "float32")


def test_the_start_says_what_is_unpacked(pocket_folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "pocket-4bit"
    assert call("convert", "--hf-path", str(pocket_folder), "--mlx-path", str(target), "-q").returncode == 0
    flags = ["generate", "Once", "--model", str(target), "--temp", "0", "-m", "8"]
    unpacked, as_stored = call(*flags), call(*flags, "--weights", "packed")
    assert unpacked.stdout == as_stored.stdout
    assert "unpacked to float32 for speed; --weights packed holds" in unpacked.stderr
    assert "unpacked" not in as_stored.stderr
    floats = call("generate", "Once", "--temp", "0", "-m", "8", "--weights", "float32")
    assert floats.returncode == 0
    assert "unpacked" not in floats.stderr
