"""Imported models compute what mlx-lm's model computes with the values that the gguf package reads from
the file.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from gguf import Keys
from support.checkpoints import (
    TOLERANCE,
    llama_config,
    mistral_config,
    mlx_lm_model,
    qwen2_config,
    qwen3_config,
    qwen3_moe_config,
    reference_logits,
)
from support.gguf_files import Array, Content, decode, export, random_weights
from support.numbers import relative_error

import kvant
from kvant.models import load_decoder
from kvant.tools.gguf.importer import import_gguf

IDS = [5, 290, 17, 41, 3, 411, 8, 8, 600, 77]
VOCABULARY = 704  # more rows than the tokenizers have tokens: published models pad theirs
SIZES = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": VOCABULARY, "rms_norm_eps": 1e-5}
WIDE = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
ATTENTION = {"attention_bias": True, "mlp_bias": False}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": llama_config(**SIZES, **WIDE, attention_bias=False, mlp_bias=False),
    "llama-untied": llama_config(**SIZES, **WIDE, **ATTENTION, tie_word_embeddings=False),
    "llama-biases": llama_config(**SIZES, **WIDE),
    "mistral": mistral_config(**SIZES, num_attention_heads=4, num_key_value_heads=1, head_dim=32),
    "qwen2": qwen2_config(**SIZES, num_attention_heads=4, num_key_value_heads=2),
    "qwen3": qwen3_config(**SIZES),
    "qwen3_moe": qwen3_moe_config(**SIZES, **WIDE, mlp_only_layers=[], moe_intermediate_size=256),
}
FAMILY = {"llama": "smollm2", "mistral": "llama3", "qwen2": "qwen2", "qwen3": "qwen2", "qwen3_moe": "qwen2"}


def content_of(
    config: dict[str, Any], kind_of: Callable[[str, Array], str] = lambda name, values: "Q8_0"
) -> Content:
    return export(config, random_weights(config), kind_of, FAMILY[config["model_type"]])


def _imported(tmp_path: Path, content: Content) -> Path:
    import_gguf(content.write(tmp_path / "file.gguf"), tmp_path / "folder")
    return tmp_path / "folder"


def _expected(config: dict[str, Any], kind_of: Callable[[str, Array], str]) -> mx.array:
    """Logits of mlx-lm's model with the values that are in the file."""
    reference = mlx_lm_model(config)
    weights = {}
    for name, values in random_weights(config).items():
        kind = "F32" if values.ndim == 1 else kind_of(name, values)
        weights[name] = mx.array(decode(values, kind).astype(np.float32))
    reference.load_weights(list(weights.items()))
    return reference_logits(reference, IDS)


def _check(
    tmp_path: Path, config: dict[str, Any], kind_of: Callable[[str, Array], str], tolerance: float
) -> Path:
    folder = _imported(tmp_path, content_of(config, kind_of))
    found = load_decoder(folder)(mx.array([IDS]))[0].astype(mx.float32)
    assert relative_error(found, _expected(config, kind_of)) < tolerance
    return folder


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kind", ["F32", "Q4_1"])
def test_an_architecture(tmp_path: Path, name: str, kind: str) -> None:
    folder = _check(tmp_path, CONFIGS[name], lambda name, values: kind, TOLERANCE)
    said = json.loads((folder / "config.json").read_text())
    assert said.get("quantization", {}).get("bits") == (4 if kind == "Q4_1" else None)
    assert said["rms_norm_eps"] == 1e-5
    assert said["vocab_size"] == VOCABULARY


# Of Q4_K and Q5_K scales are rounded to float16, of Q6_K values to 8 bits.
@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [
        *((kind, TOLERANCE) for kind in ("F16", "BF16", "Q4_0", "Q5_0", "Q5_1", "Q8_0")),
        *(("MXFP4", TOLERANCE), ("Q4_K", 3e-3), ("Q5_K", 3e-3), ("Q6_K", 3e-2)),
    ],
)
def test_a_type(tmp_path: Path, kind: str, tolerance: float) -> None:
    _check(tmp_path, CONFIGS["llama"], lambda name, values: kind, tolerance)


def test_types_side_by_side(tmp_path: Path) -> None:
    """As llama.cpp mixes them: the embedding in more bits, and half of two kinds of matrices."""

    def kind_of(name: str, values: Array) -> str:
        if "embd" in name or "embed_tokens" in name:
            return "Q8_0"
        return "Q5_0" if "blk.0" in name or "layers.0" in name else "Q4_1"

    folder = _check(tmp_path, CONFIGS["llama"], kind_of, TOLERANCE)
    said = json.loads((folder / "config.json").read_text())["quantization"]
    forms = {key: form["bits"] for key, form in said.items() if isinstance(form, dict)}
    assert forms["model.embed_tokens"] == 8
    assert len(forms) == 8
    assert {said["bits"], *forms.values()} == {4, 5, 8}


def test_a_router_in_float32_among_quantized_experts(tmp_path: Path) -> None:
    def kind_of(name: str, values: Array) -> str:
        return "F32" if name.endswith(("gate_inp.weight", "mlp.gate.weight")) else "Q8_0"

    _check(tmp_path, CONFIGS["qwen3_moe"], kind_of, TOLERANCE)


LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def _rope_factors(theta: float, head_dim: int, factor: float) -> Array:
    """As llama.cpp's converter computes rope_freqs.weight from Llama 3's settings."""
    found = []
    for pair in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * pair / head_dim)
        if wavelength < 8192 / 4.0:
            found.append(1.0)
        elif wavelength > 8192 / 1.0:
            found.append(factor)
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3_scales_its_positions(tmp_path: Path, factor: float) -> None:
    config = {**CONFIGS["llama"], "rope_theta": 500000.0, "max_position_embeddings": 131072}
    content = content_of(config)
    content.tensors["rope_freqs.weight"] = (_rope_factors(500000.0, 64, factor), "F32")
    said = json.loads((_imported(tmp_path, content) / "config.json").read_text())
    assert said["rope_scaling"] == {**LLAMA3, "factor": factor}
    assert said["rope_theta"] == 500000.0


@pytest.mark.parametrize(
    ("keys", "settings"),
    [
        ({Keys.Rope.SCALING_TYPE: "none"}, None),
        (
            {Keys.Rope.SCALING_TYPE: "linear", Keys.Rope.SCALING_FACTOR: 4.0},
            {"rope_type": "linear", "factor": 4.0},
        ),
        (
            {
                Keys.Rope.SCALING_TYPE: "yarn",
                Keys.Rope.SCALING_FACTOR: 4.0,
                Keys.Rope.SCALING_ORIG_CTX_LEN: 256,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
        ),
    ],
)
def test_positions_that_are_scaled(
    tmp_path: Path, keys: dict[str, Any], settings: dict[str, Any] | None
) -> None:
    config = CONFIGS["qwen3"]
    content = content_of(config)
    content.metadata |= {content.key(key): value for key, value in keys.items()}
    folder = _imported(tmp_path, content)
    assert json.loads((folder / "config.json").read_text()).get("rope_scaling") == settings
    kind = "Q8_0"
    expected = _expected({**config, "rope_scaling": settings}, lambda name, values: kind)
    assert relative_error(load_decoder(folder)(mx.array([IDS]))[0], expected) < TOLERANCE


def test_as_many_kv_heads_as_heads_if_the_file_does_not_say(tmp_path: Path) -> None:
    config = {**CONFIGS["qwen2"], "num_key_value_heads": 4}
    content = content_of(config)
    del content.metadata[content.key(Keys.Attention.HEAD_COUNT_KV)]
    folder = _imported(tmp_path, content)
    assert json.loads((folder / "config.json").read_text())["num_key_value_heads"] == 4


@pytest.mark.parametrize(
    ("matrices", "norm", "dtype"),
    [
        ("BF16", 1.5, mx.bfloat16),  # as float16 the activations would be float16, too
        ("Q8_0", 1.5, mx.float16),
        ("Q8_0", 1e-9, mx.float32),  # float16 would lose it
        ("F32", 1.5, mx.float32),
    ],
)
def test_dtypes_of_norms(tmp_path: Path, matrices: str, norm: float, dtype: mx.Dtype) -> None:
    content = content_of(CONFIGS["llama"], lambda name, values: matrices)
    values = np.full(256, np.float32(1.5))
    values[3] = norm
    content.tensors["output_norm.weight"] = (values, "F32")
    stored = mx.load(str(_imported(tmp_path, content) / "model.safetensors"))["model.norm.weight"]
    assert stored.dtype == dtype
    assert np.array_equal(np.array(stored.astype(mx.float32)), values)


def test_large_tensors_go_in_pieces_and_many_in_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = content_of(CONFIGS["llama-untied"]).write(tmp_path / "file.gguf")
    census = import_gguf(path, tmp_path / "whole")
    monkeypatch.setattr("kvant.tools.gguf.importer.SHARD_BYTES", 100_000)
    monkeypatch.setattr("kvant.tools.gguf.importer.PIECE_VALUES", 5000)
    seen: list[tuple[int, int]] = []
    assert import_gguf(path, tmp_path / "shards", lambda done, total: seen.append((done, total))) == census
    count = sum(row.tensors for row in census)
    assert seen == [(number, count) for number in range(1, count + 1)]
    whole = mx.load(str(tmp_path / "whole" / "model.safetensors"))
    shards: dict[str, mx.array] = {}
    for shard in sorted((tmp_path / "shards").glob("*.safetensors")):
        shards |= mx.load(str(shard))
    assert len([*(tmp_path / "shards").glob("*.safetensors")]) > 3
    assert {name: array.shape for name, array in whole.items()} == {
        name: x.shape for name, x in shards.items()
    }
    assert all(mx.array_equal(whole[name], shards[name]) for name in whole)
    assert (
        relative_error(*(load_decoder(tmp_path / name)(mx.array([IDS]))[0] for name in ("shards", "whole")))
        < 1e-6
    )


def test_the_census_counts_every_tensor(tmp_path: Path) -> None:
    def kind_of(name: str, values: Array) -> str:
        return {"token_embd.weight": "Q6_K", "blk.0.ffn_down.weight": "Q4_K"}.get(name, "Q4_0")

    content = content_of(CONFIGS["llama"], kind_of)
    path = content.write(tmp_path / "file.gguf")
    census = {row.kind: row for row in import_gguf(path, tmp_path / "folder")}
    assert {kind: row.fidelity for kind, row in census.items()} == {
        "Q6_K": "requantized to 8 bits",
        "Q4_K": "scales rounded to float16",
        "Q4_0": "exact",
        "F32": "exact",
    }
    assert sum(row.tensors for row in census.values()) == len(content.tensors)
    assert census["Q6_K"].bytes_before == VOCABULARY * 210
    assert census["Q6_K"].bytes_after == VOCABULARY * 288
    assert census["Q4_0"].bytes_after * 18 == census["Q4_0"].bytes_before * 20
    stored = mx.load(str(tmp_path / "folder" / "model.safetensors")).values()
    assert sum(row.bytes_after for row in census.values()) == sum(array.nbytes for array in stored)


def test_what_is_made_is_a_model_folder_as_any(tmp_path: Path) -> None:
    """It generates, through a quantized cache too, and mlx-lm's own class computes the same logits from
    it.
    """
    folder = _imported(tmp_path, content_of(CONFIGS["llama"]))
    model, tokenizer = kvant.load(folder)
    ids = tokenizer.encode("The quick brown fox")
    assert len([*kvant.stream_generate(model, tokenizer, ids, max_tokens=4, kv_bits=8)]) == 4
    from mlx_lm.utils import load_model

    reference, _ = load_model(folder)
    assert (
        relative_error(model(mx.array([IDS]))[0], reference_logits(reference, IDS).astype(mx.float32)) < 2e-2
    )
