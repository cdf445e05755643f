"""What a checkpoint's tensors say other than its config.json: the head, formats of single matrices, its
files.
"""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from support.adapters import adapted_reference, adapter_config, save_adapter
from support.checkpoints import (
    TOLERANCE,
    change_tensors,
    llama_config,
    quantize_reference,
    qwen2_config,
    reference_logits,
    reference_model,
    save_checkpoint,
)
from support.hostile import change, one_line
from support.numbers import relative_error

from kvant.errors import CheckpointError
from kvant.models import load_decoder
from kvant.models.as_stored import open_folder
from kvant.models.checkpoint import load_shard
from kvant.plan import plan, read_folder
from kvant.ranks.shares import shares

IDS = [5, 290, 17, 3, 88, 141, 60, 7, 299, 1, 44, 230]
HEAD, EMBEDDING = "lm_head", "model.embed_tokens"
WARNING = "ties the output head to the embedding, but the checkpoint has a different lm_head.weight"
SECOND = "model-00002-of-00002.safetensors"


def _untied(folder: Path, said: bool | None, *quantized: Any, shards: int = 1, **changes: Any) -> nn.Module:
    """mlx-lm's model with a head of its own, on disk beside a config.json that ties it, or says nothing of
    it.
    """
    config = llama_config(tie_word_embeddings=False, **changes)
    reference = reference_model(config)
    if quantized:
        config = quantize_reference(config, reference, *quantized)
    saved = config | {"tie_word_embeddings": said}
    save_checkpoint(
        folder, {key: value for key, value in saved.items() if value is not None}, reference, shards
    )
    return reference


def _check(folder: Path, reference: nn.Module) -> None:
    model = load_decoder(folder)
    assert relative_error(model(mx.array([IDS]))[0], reference_logits(reference, IDS)) < TOLERANCE
    planned = plan(read_folder(folder), max_kv_size=8, device="cpu")
    assert (planned.weights, planned.weights_read) == (model.nbytes, model.nbytes_read)


@pytest.mark.parametrize(
    ("quantized", "shards"), [((), 1), ((), 3), ((4, 32), 1), ((4, 32, "affine", {HEAD: False}), 2)], ids=str
)
def test_a_head_that_differs_is_used_though_config_json_ties_it(
    tmp_path: Path, quantized: Any, shards: int
) -> None:
    """As transformers does, with a warning."""
    reference = _untied(tmp_path, True, *quantized, shards=shards)
    with pytest.warns(UserWarning, match=WARNING):
        _check(tmp_path, reference)
    change(tmp_path / "config.json", tie_word_embeddings=False)
    _check(tmp_path, reference)  # and no warning


@pytest.mark.parametrize("quantized", [(), (4, 32)], ids=str)
def test_a_copy_of_the_embedding_is_no_second_matrix(tmp_path: Path, quantized: Any) -> None:
    config = llama_config()
    reference = reference_model(config)
    if quantized:
        config = quantize_reference(config, reference, *quantized)
    save_checkpoint(tmp_path, config, reference)
    before = load_decoder(tmp_path).nbytes
    stored = mx.load(str(tmp_path / "model.safetensors"))
    parts = {name: array for name, array in stored.items() if name.startswith(EMBEDDING)}
    mx.eval(parts)  # before their file is written
    change_tensors(
        tmp_path / "model.safetensors", {name.replace(EMBEDDING, HEAD): x for name, x in parts.items()}
    )
    _check(tmp_path, reference)
    assert load_decoder(tmp_path).nbytes == before
    # The last byte counts.
    name, last = next((name, array) for name, array in parts.items() if array.dtype == mx.float32)
    changed = mx.concatenate([last.flatten()[:-1], last.flatten()[-1:] + 1]).reshape(last.shape)
    change_tensors(tmp_path / "model.safetensors", {name.replace(EMBEDDING, HEAD): changed})
    with pytest.warns(UserWarning, match=WARNING):
        assert load_decoder(tmp_path).nbytes > before


@pytest.mark.parametrize("said", [True, None])
@pytest.mark.parametrize(
    "quantized", [(), (4, 32), (4, 32, "affine", {EMBEDDING: {"bits": 8, "group_size": 64}})], ids=str
)
def test_a_head_alone_is_the_embedding(tmp_path: Path, quantized: Any, said: bool | None) -> None:
    config = llama_config()
    reference = reference_model(config)
    if quantized:
        config = quantize_reference(config, reference, *quantized)
    stored = json.loads(json.dumps(config).replace(EMBEDDING, HEAD)) | {"tie_word_embeddings": said}
    save_checkpoint(tmp_path, {key: value for key, value in stored.items() if value is not None}, reference)
    tensors = mx.load(str(tmp_path / "model.safetensors"))
    moved = {name: array for name, array in tensors.items() if name.startswith(EMBEDDING)}
    mx.eval(moved)  # before their file is written
    renamed = {name.replace(EMBEDDING, HEAD): array for name, array in moved.items()}
    change_tensors(tmp_path / "model.safetensors", renamed | dict.fromkeys(moved))
    _check(tmp_path, reference)
    change(tmp_path / "config.json", tie_word_embeddings=False)
    with one_line(CheckpointError, rf"{EMBEDDING}\.weight is missing"):
        load_decoder(tmp_path)


@pytest.mark.filterwarnings("ignore:config.json ties the output head")
def test_ranks_and_adapters_know_the_head(tmp_path: Path) -> None:
    source = tmp_path / "source"
    reference = _untied(source, True)
    head = mx.array(reference.lm_head.weight)
    alone = load_shard(source, layers=range(0), embedding=False)
    assert (alone.embed_tokens, alone.lm_head is None) == (None, False)
    config, _ = open_folder(source)
    dealt = shares(config, 2)
    parts = [load_shard(source, share=share, layers=range(0)).lm_head for share in dealt]
    x = mx.random.normal((3, config.hidden_size))
    joined = mx.concatenate([part.project(x) for part in parts if part is not None], axis=-1)
    assert mx.allclose(joined, x @ head.T, atol=1e-4)

    adapter = save_adapter(
        tmp_path / "adapter", adapter_config([HEAD, "mlp.up_proj"]), reference_model(_config())
    )
    adapted = adapted_reference(reference_model(_config()), adapter)
    given = load_decoder(source, adapter=adapter)(mx.array([IDS]))[0]
    assert relative_error(given, reference_logits(adapted, IDS)) < TOLERANCE


def _config() -> dict[str, Any]:
    return llama_config(tie_word_embeddings=False)


def test_a_layer_with_other_bits_is_read_by_its_shapes(tmp_path: Path) -> None:
    """mlx-lm reads it so too. What config.json names and stores otherwise is refused, by its name and both
    formats.
    """
    path = "model.layers.1.mlp.down_proj"
    reference = reference_model(qwen2_config())
    config = quantize_reference(
        qwen2_config(), reference, 4, 64, "affine", {path: {"bits": 8, "group_size": 32}}
    )
    del config["quantization"][path]
    save_checkpoint(tmp_path, config, reference)
    _check(tmp_path, reference)
    config["quantization"][path] = {"bits": 4, "group_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with one_line(
        CheckpointError,
        rf"{path} is stored with 8 bits, groups of 32; config\.json says 4 bits, groups of 64",
    ):
        load_decoder(tmp_path)


def test_mxfp4_beside_affine(tmp_path: Path) -> None:
    path = "model.layers.0.mlp.up_proj"
    own = {path: {"bits": 4, "group_size": 32, "mode": "mxfp4"}}
    reference = reference_model(qwen2_config())
    config = quantize_reference(qwen2_config(), reference, 4, 64, "affine", own)
    del config["quantization"][path]
    save_checkpoint(tmp_path, config, reference)
    _check(tmp_path, reference)


class TestFiles:
    def test_shards_without_an_index(self, tmp_path: Path) -> None:
        reference = reference_model(qwen2_config())
        save_checkpoint(tmp_path, qwen2_config(), reference, shards=2)
        (tmp_path / "model.safetensors.index.json").unlink()
        _check(tmp_path, reference)
        (tmp_path / "model-extra.safetensors").write_bytes(b"not opened")
        _check(tmp_path, reference)
        (tmp_path / "model-00003-of-00003.safetensors").write_bytes(b"")
        with one_line(
            CheckpointError, r"model-00001-of-00002\.safetensors: unexpected shard; expected 3 shards"
        ):
            load_decoder(tmp_path)
        (tmp_path / "model-00003-of-00003.safetensors").unlink()
        stored = mx.load(str(tmp_path / SECOND))
        change_tensors(tmp_path / "model-00001-of-00002.safetensors", {min(stored): stored[min(stored)]})
        with one_line(CheckpointError, f"tensor {min(stored)} is also in model-00001-of-00002"):
            load_decoder(tmp_path)
        (tmp_path / SECOND).unlink()
        with one_line(CheckpointError, r"model-00002-of-00002\.safetensors: no such file; expected 2 shards"):
            load_decoder(tmp_path)

    def test_a_whole_file_beside_shards_of_an_index_is_refused(self, tmp_path: Path) -> None:
        """transformers reads the file alone, and mlx-lm everything, in no order."""
        reference = reference_model(qwen2_config())
        save_checkpoint(tmp_path, qwen2_config(), reference, shards=2)
        save_checkpoint(tmp_path, qwen2_config(), reference_model(qwen2_config(), seed=1))
        with one_line(CheckpointError, r"both model\.safetensors and model-00001-of-00002\.safetensors"):
            load_decoder(tmp_path)
        (tmp_path / "model.safetensors").unlink()
        _check(tmp_path, reference)

    def test_an_index_that_was_left_behind_or_names_the_whole_file(self, tmp_path: Path) -> None:
        reference = reference_model(qwen2_config())
        save_checkpoint(tmp_path, qwen2_config(), reference, shards=2)
        for shard in tmp_path.glob("*.safetensors"):
            shard.unlink()
        save_checkpoint(tmp_path, qwen2_config(), reference)
        _check(tmp_path, reference)
        names = mx.load(str(tmp_path / "model.safetensors"))
        index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        _check(tmp_path, reference)
