"""Quantized weights held as float32 on a CPU: the same bits as a float32 folder of the numbers they stand
for.
"""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from support.adapters import adapter_config, save_adapter
from support.checkpoints import (
    format_of,
    llama_config,
    qwen2_config,
    qwen3_config,
    qwen3_moe_config,
    write_reference,
)

import kvant
from kvant.engine.load import POCKET, load_model
from kvant.errors import ModelError
from kvant.models import Decoder, gemv
from kvant.models.matrix import AdaptedMatrix, DenseMatrix, QuantizedMatrix
from kvant.plan import read_folder

pytestmark = pytest.mark.skipif(mx.default_device().type != mx.cpu, reason="only a CPU unpacks weights")

MIXED = {"v_proj": format_of(8, 64), "o_proj": False}
CASES: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    "4 bits": (qwen2_config(), (4, 32)),
    "3 bits, untied": (llama_config(tie_word_embeddings=False), (3, 32)),
    "mxfp4": (qwen3_config(), (4, 32, "mxfp4")),
    "mixed": (llama_config(), (4, 32, "affine", MIXED)),
}


def _matrices(model: Decoder) -> list[Any]:
    return [matrix for layer in model.layers for linear in layer.linears for matrix in linear.matrices]


def _as_floats(folder: Path, target: Path) -> Path:
    """The folder with its quantized tensors replaced by the float32 numbers that MLX makes of them."""
    config = json.loads((folder / "config.json").read_text())
    formats = config.pop("quantization")
    config.pop("quantization_config", None)
    tensors = mx.load(str(folder / "model.safetensors"))
    assert isinstance(tensors, dict)
    found = {}
    for name, array in tensors.items():
        path, _, last = name.rpartition(".")
        scales = tensors.get(f"{path}.scales")
        if scales is None or last == "bias":
            found[name] = array
        elif last == "weight":
            own = formats.get(path, formats)
            form = {key: own[key] for key in ("bits", "group_size")} | {"mode": own.get("mode", "affine")}
            biases = tensors.get(f"{path}.biases")
            if biases is not None:
                scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
            found[name] = mx.dequantize(array, scales, biases, **form, dtype=mx.float32)
    target.mkdir()
    (target / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
    mx.save_safetensors(str(target / "model.safetensors"), found, metadata={"format": "mlx"})
    return target


@pytest.mark.parametrize("bits", [0, 8, 4])
@pytest.mark.parametrize("name", CASES)
def test_logits_are_bitwise_those_of_a_float_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, bits: int
) -> None:
    monkeypatch.setattr(gemv, "BREAK_EVEN_ELEMENTS", 0)
    config, quantized = CASES[name]
    folder, _ = write_reference(tmp_path / "packed", config, *quantized)
    ours = load_model(folder, weights="float32")
    floats = load_model(_as_floats(folder, tmp_path / "floats"))
    assert isinstance(ours, Decoder)
    assert not any(isinstance(matrix, QuantizedMatrix) for matrix in _matrices(ours))
    assert len(_matrices(ours)) == len(_matrices(floats))  # products of another width would round otherwise
    assert ours.nbytes == read_folder(folder).unpack().loading(on_cpu=True).resident  # type: ignore[union-attr]
    steps = [mx.array([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3]]), mx.array([[7]]), mx.array([[8, 9]])]
    logits = []
    for model in (ours, floats):
        cache = model.make_cache(64, kv_bits=bits, **({"kv_group_size": 16} if bits else {}))
        logits.append([model(ids, cache=cache) for ids in steps])
    for mine, theirs in zip(*logits, strict=True):
        assert mx.array_equal(mine, theirs)


def test_an_adapter_stays_beside(tmp_path: Path) -> None:
    folder, reference = write_reference(tmp_path / "model", llama_config(), 4, 32)
    save_adapter(folder / "adapter", adapter_config(), reference)
    packed, unpacked = (
        load_model(folder, None, folder / "adapter", weights=weights)  # type: ignore[arg-type]
        for weights in ("packed", "float32")
    )
    assert isinstance(unpacked, Decoder)
    adapted = [matrix for matrix in _matrices(unpacked) if isinstance(matrix, AdaptedMatrix)]
    assert adapted
    assert all(isinstance(matrix.base, DenseMatrix) for matrix in adapted)
    ids = mx.array([[3, 1, 4, 1, 5]])
    assert mx.allclose(packed(ids), unpacked(ids), rtol=1e-4, atol=1e-4)


def test_experts_stay_packed(tmp_path: Path) -> None:
    folder, _ = write_reference(tmp_path / "model", qwen3_moe_config(), 4, 32)
    packed, unpacked = load_model(folder, weights="packed"), load_model(folder, weights="float32")
    assert isinstance(unpacked, Decoder)
    kinds = {len(matrix.weight.shape): type(matrix) for matrix in _matrices(unpacked)}
    assert kinds == {2: DenseMatrix, 3: QuantizedMatrix}
    assert unpacked.nbytes == read_folder(folder).unpack().loading(on_cpu=True).resident  # type: ignore[union-attr]
    ids = mx.array([[3, 1, 4, 1, 5]])
    assert mx.allclose(packed(ids), unpacked(ids), rtol=1e-4, atol=1e-4)


def test_load_unpacks_where_half_of_the_memory_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = qwen2_config()
    folder, reference = write_reference(tmp_path / "model", config)
    weights = tree_flatten(reference.parameters())
    floats = sum(4 * array.size for _, array in weights if array.ndim == 2)
    folder, _ = write_reference(tmp_path / "packed", config, 4, 32)
    for memory, kind in ((2 * floats, DenseMatrix), (2 * floats - 1, QuantizedMatrix)):
        monkeypatch.setattr("kvant.engine.load.physical_memory", lambda memory=memory: memory)
        model = load_model(folder)
        assert isinstance(model, Decoder)
        assert {type(matrix) for matrix in _matrices(model)} == {kind}


def test_what_load_refuses() -> None:
    with pytest.raises(ValueError, match="weights is 'int8'; expected 'packed' or 'float32'"):
        kvant.load(POCKET, weights="int8")  # type: ignore[call-overload]


def test_a_bridged_model_keeps_its_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3_text"}))
    with pytest.raises(ModelError, match="mlx-lm's class computes this model"):
        load_model(tmp_path, weights="float32")
