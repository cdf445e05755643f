"""What a rank reads of a model: parts of tensors, whole heads, whole quantization groups, and no other
bytes.
"""

import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from support.adapters import adapter_config, save_adapter
from support.checkpoints import (
    change_tensors,
    llama_config,
    olmo2_config,
    qwen2_config,
    qwen3_moe_config,
    save_checkpoint,
    stored_by_transformers,
    write_reference,
)
from support.counts import count
from support.hostile import one_line

from kvant.errors import CheckpointError, ModelError
from kvant.models import Decoder, ModelConfig, load_decoder
from kvant.models.checkpoint import check_folder, load_shard
from kvant.models.share import everything, local_config
from kvant.models.tensors import Piece, TensorFiles
from kvant.ranks.shares import shares

DTYPES = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16, "U32": mx.uint32, "U8": mx.uint8}


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_part_is_a_slice_and_nothing_else_is_read(tmp_path: Path, dtype: str) -> None:
    rng = np.random.default_rng(sum(dtype.encode()))
    shapes = {"a": (12,), "b": (5, 16), "c": (3, 10, 8)}
    arrays = {
        name: mx.array(rng.integers(0, 200, shape)).astype(DTYPES[dtype]) for name, shape in shapes.items()
    }
    mx.save_safetensors(str(tmp_path / "model.safetensors"), arrays)
    for name, shape in shapes.items():
        for axis, size in enumerate(shape):
            bounds = sorted(rng.choice(size + 1, 2 if size < 5 else 4, replace=False).tolist())
            ranges = tuple(pairwise(bounds))[::2]
            tensors = TensorFiles(tmp_path)
            given = tensors.take(name, shape, (dtype,), Piece(axis, ranges))
            index = [slice(None)] * axis
            expected = mx.concatenate([arrays[name][(*index, slice(*each))] for each in ranges], axis=axis)
            assert given.dtype == expected.dtype
            assert mx.array_equal(given, expected)
            assert tensors.bytes_read == tensors.piece_bytes(name, Piece(axis, ranges)) == expected.nbytes


@pytest.mark.parametrize("ranges", [((0, 13),), ((4, 4),), ((6, 8), (2, 4)), ()])
def test_a_part_outside_of_the_tensor(tmp_path: Path, ranges: tuple[tuple[int, int], ...]) -> None:
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"a": mx.ones((12,))})
    with pytest.raises(ValueError, match=r"ranges .* of an axis of 12"):
        TensorFiles(tmp_path).take("a", (12,), piece=Piece(0, ranges))


def _replace(path: Path) -> None:
    os.replace(shutil.copy(path, path.with_name("other.safetensors")), path)


LATER: list[Callable[[Path], object]] = [
    _replace,
    lambda path: os.utime(path, ns=(1, 1)),
    lambda path: os.truncate(path, path.stat().st_size - 8),
]


@pytest.mark.parametrize("change", LATER)
def test_a_file_that_changes_after_its_header_was_read(
    tmp_path: Path, change: Callable[[Path], object]
) -> None:
    path = tmp_path / "model.safetensors"
    mx.save_safetensors(str(path), {"a": mx.ones((4, 4))})
    tensors = TensorFiles(tmp_path)
    change(path)
    for part in (None, Piece(0, ((1, 2),))):
        with one_line(CheckpointError, r"model\.safetensors: (changed while it was read|MLX cannot read it)"):
            tensors.take("a", (4, 4), piece=part)


def _config(heads: int, kv_heads: int, inner: int = 256, group: int = 0, **changes: Any) -> ModelConfig:
    """Heads of 32 elements, and quantization in groups of so many."""
    raw = llama_config(
        num_attention_heads=heads, num_key_value_heads=kv_heads, intermediate_size=inner, head_dim=32
    )
    quantization = {"quantization": {"group_size": group, "bits": 4}} if group else {}
    return ModelConfig.from_dict(raw | quantization | changes)


def test_shares_of_many_shapes() -> None:
    """Every head, feature and token is one rank's, evenly; a query head is with its kv head, and no group
    is cut.
    """
    rng = np.random.default_rng(18)
    divided = 0
    for _ in range(count(400, 20_000)):
        K, per, ranks = (int(rng.integers(1, most)) for most in (9, 9, 9))
        group, D = int(rng.choice([32, 64, 128])), int(rng.choice([32, 64, 128]))
        inner = group * int(rng.integers(1, 12))
        is_quantized = rng.random() < 0.7 and K * per * D % group == 0
        config = replace(_config(K * per, K, inner, group if is_quantized else 0), head_dim=D)
        try:
            made = shares(config, ranks)
        except ModelError:
            continue
        divided += 1
        heads = per * max(1, group // D if is_quantized else 1)  # that stay together
        for name, most, unit in (
            ("queries", K * per, heads),
            ("inner", inner, max(64, group)),
            ("vocabulary", 300, 1),
        ):
            ranges = [getattr(share, name) for share in made]
            assert [ranges[0][0], ranges[-1][1]] == [0, most]
            sizes = [own[1] - own[0] for own in ranges]
            assert 0 < min(sizes) <= max(sizes) <= min(sizes) + unit
            assert all(own[1] == following[0] for own, following in pairwise(ranges))
        for share in made:
            local = local_config(config, share)
            assert local.num_attention_heads % local.num_key_value_heads == 0
            wanted = [head // per for head in range(*share.queries)]
            assert (min(wanted), max(wanted) + 1) == share.keys
            assert is_quantized or inner % 64 or inner < 64 * ranks or share.inner[0] % 64 == 0  # round sizes
            own = [wanted.count(key) for key in range(*share.keys)]
            assert len(set(own)) == 1  # grouped attention has as many query heads for each
            if config.quantization is not None:
                assert share.queries[0] * D % group == share.inner[0] % group == 0
        assert sum(share.counts_keys * (share.keys[1] - share.keys[0]) for share in made) == K
    assert divided > count(100, 5000)


MOE = qwen3_moe_config(moe_intermediate_size=64, quantization={"group_size": 64, "bits": 4})


@pytest.mark.parametrize("config", [_config(4, 2), ModelConfig.from_dict(MOE)], ids=["dense", "experts"])
def test_one_process_has_the_share_of_a_single_rank(config: ModelConfig) -> None:
    assert [everything(config).share] == shares(config, 1)


REFUSED: list[tuple[ModelConfig, int, str]] = [
    (_config(4, 2), 5, "4 query heads: each needs one"),
    (
        _config(4, 4, group=128),
        2,
        "4 kv heads of 32 elements in o_proj's quantization groups of 128: a group would be",
    ),
    (_config(8, 8, group=128), 3, "8 query heads .* of 128"),
    (_config(12, 12, group=128), 3, "intermediate_size 256 in 2 quantization groups of 128: each needs one"),
    (_config(4, 4, inner=2), 3, "intermediate_size 2: each needs one"),
    (
        ModelConfig.from_dict(MOE),
        2,
        "moe_intermediate_size 64 in 1 quantization groups of 64: each needs one",
    ),
    (_config(4, 2, vocab_size=3), 4, "a vocabulary of 3 tokens"),
]


@pytest.mark.parametrize(("config", "ranks", "message"), REFUSED)
def test_models_that_cannot_be_divided(config: ModelConfig, ranks: int, message: str) -> None:
    with one_line(ModelError, f"{ranks} ranks cannot divide .*{message}"):
        shares(config, ranks)


def _made(folder: Path, config: dict[str, Any], bits: int = 0, way: str = "stacked") -> Path:
    _, model = write_reference(folder, config, *((bits, 32) if bits else ()))
    if way != "stacked":
        save_checkpoint(folder, config, stored_by_transformers(dict(tree_flatten(model.parameters())), way))
    return folder


BIG = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4}
COUNTED = [
    ("qwen2", qwen2_config(**BIG, num_hidden_layers=4), 0, "stacked"),
    ("llama", llama_config(**BIG, num_hidden_layers=4, tie_word_embeddings=False), 4, "stacked"),
    ("olmo2", olmo2_config(**BIG), 0, "stacked"),
    *(
        (f"moe, {way}", qwen3_moe_config(**BIG, head_dim=32, moe_intermediate_size=256), 0, way)
        for way in ("stacked", "each", "joined")
    ),
]
# What ranks divide evenly here. A bias of o or down is the first rank's.
DIVIDED_NAMES = r"(q|k|v|o|gate|up|down|gate_up)_proj\b|lm_head"


def _expected_bytes(folder: Path, rank: int, ranks: int, norms: bool) -> int:
    """Of the file's tensors by their names: those that are divided count for one of ``ranks``."""
    total = 0
    divided = DIVIDED_NAMES + (r"|(q|k)_norm\.weight" if norms else "")
    for name, array in mx.load(str(folder / "model.safetensors")).items():
        if name.endswith(("o_proj.bias", "down_proj.bias")):
            total += array.nbytes * (rank == 0)
        else:
            total += array.nbytes // (ranks if re.search(divided, name) else 1)
    return total


@pytest.mark.parametrize(("name", "config", "bits", "way"), COUNTED)
def test_only_the_share_is_read(
    tmp_path: Path, name: str, config: dict[str, Any], bits: int, way: str
) -> None:
    """Exactly the tensors' bytes; of the files, by the process's own count, at most 1 % and the headers
    more.
    """
    folder = _made(tmp_path / "model", config, bits, way)
    parsed, tensors = check_folder(folder)
    for ranks in (2, 4):
        for rank, share in enumerate(shares(parsed, ranks)):
            before = _bytes_read_by_this_process()
            parts = load_shard(folder, share=share)
            read = _bytes_read_by_this_process() - before
            expected = _expected_bytes(folder, rank, ranks, norms=name == "olmo2")
            assert parts.bytes_read == expected
            if sys.platform == "linux":
                most = expected + 0.01 * tensors.nbytes / ranks
                assert expected <= read <= most + 3 * _header_bytes(folder)
    assert expected < 0.55 * tensors.nbytes  # of four ranks


def _bytes_read_by_this_process() -> int:
    """By its threads, on Linux; the process's own count has those of processes that it waited for, too."""
    return sum(int(counts.read_text().split()[1]) for counts in Path("/proc/self/task").glob("*/io"))


def _header_bytes(folder: Path) -> int:
    """config.json and the tensors' header, which are read whole."""
    header = (folder / "model.safetensors").read_bytes()[:8]
    return int.from_bytes(header, "little") + (folder / "config.json").stat().st_size


LAYERED = {
    "tied": qwen2_config(num_hidden_layers=3),
    "untied": qwen3_moe_config(num_hidden_layers=3),
    "4 bits": llama_config(num_hidden_layers=3, tie_word_embeddings=False),
}


@pytest.mark.parametrize("name", LAYERED)
def test_layers_of_a_model(tmp_path: Path, name: str) -> None:
    """Two parts after each other are the whole, bitwise, and nothing else is read."""
    folder = _made(tmp_path / "model", LAYERED[name], 4 if name == "4 bits" else 0)
    whole, ids = load_decoder(folder), mx.array([[5, 7, 11]])
    first = load_shard(folder, layers=range(1))
    last = load_shard(folder, layers=range(1, 3), embedding=False, head=False)
    assert (first.config.num_hidden_layers, last.config.num_hidden_layers) == (1, 2)
    assert last.config.windows == whole.config.windows[1:]
    assert last.embed_tokens is last.norm is last.lm_head is None
    joined = Decoder(replace(first, config=whole.config, layers=(*first.layers, *last.layers)))
    assert mx.array_equal(joined(ids), whole(ids))

    tensors = mx.load(str(folder / "model.safetensors"))
    sizes = [(key, array.nbytes) for key, array in tensors.items()]
    assert last.bytes_read == sum(n for key, n in sizes if "layers.1." in key or "layers.2." in key)
    assert first.bytes_read == sum(n for key, n in sizes) - last.bytes_read
    # The ends: the embedding alone, and the head alone, which is the embedding if that is tied.
    embeds = load_shard(folder, layers=range(0), head=False)
    heads = load_shard(folder, layers=range(0), embedding=False)
    assert (embeds.embed_tokens is None, embeds.norm, embeds.lm_head) == (False, None, None)
    assert (heads.embed_tokens is None, heads.lm_head is None) == (name != "tied", name == "tied")
    assert heads.norm is not None
    assert heads.bytes_read == embeds.bytes_read + heads.norm.nbytes


def test_a_part_fits_where_the_whole_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _made(tmp_path / "model", qwen2_config(**BIG))
    parsed, tensors = check_folder(folder)
    monkeypatch.setattr("kvant.models.tensors.physical_memory", lambda: tensors.nbytes // 2 + 10**6)
    with pytest.raises(CheckpointError, match="this machine has"):
        load_decoder(folder)
    assert load_shard(folder, share=shares(parsed, 2)[1]).bytes_read < tensors.nbytes // 2 + 10**6


def _adapted(folder: Path, *settings: Any, **changes: Any) -> tuple[Path, Path]:
    made, model = write_reference(folder / "model", qwen2_config())
    return made, save_adapter(folder / "adapter", adapter_config(*settings, **changes), model)


def test_an_adapter_of_other_ranks_layers(tmp_path: Path) -> None:
    """It changes the last layer only. The first layer's rank takes it too, and asks all ranks whether it
    is zero.
    """
    folder, adapter = _adapted(tmp_path, num_layers=1)
    whole, ids = load_decoder(folder, adapter=adapter), mx.array([[5, 7, 11]])
    asked: list[float] = []

    def all_sum(x: mx.array) -> mx.array:
        asked.append(float(x.item()))  # type: ignore[arg-type]
        return mx.array([1.0])

    first = load_shard(folder, layers=range(1), adapter=adapter, all_sum=all_sum)
    last = load_shard(
        folder, layers=range(1, 2), embedding=False, head=False, adapter=adapter, all_sum=all_sum
    )
    assert asked == [0.0, 1.0]
    joined = Decoder(replace(first, config=whole.config, layers=(*first.layers, *last.layers)))
    assert mx.array_equal(joined(ids), whole(ids))
    with one_line(CheckpointError, "every lora_a or lora_b is zero"):
        load_shard(folder, layers=range(1), adapter=adapter, all_sum=lambda x: x)


def test_an_adapters_embedding_changes_the_tied_head_of_another_rank(tmp_path: Path) -> None:
    folder, adapter = _adapted(tmp_path, ["model.embed_tokens"])
    heads = load_shard(folder, layers=range(0), embedding=False, adapter=adapter)
    assert heads.embed_tokens is not None
    x = mx.random.normal((1, 128), key=mx.random.key(1))
    assert mx.array_equal(heads.embed_tokens.project(x), load_decoder(folder, adapter=adapter).logits(x))
    assert not mx.allclose(heads.embed_tokens.project(x), load_decoder(folder).logits(x))


def test_a_wrong_tensor_is_refused_before_a_part_is_counted(tmp_path: Path) -> None:
    folder = _made(tmp_path / "model", qwen2_config())
    share = shares(check_folder(folder)[0], 2)[1]
    change_tensors(
        folder / "model.safetensors", {"model.layers.1.mlp.up_proj.weight": mx.zeros((256, 128, 2))}
    )
    with one_line(CheckpointError, r"up_proj.weight has shape .*; expected \(256, 128\)"):
        load_shard(folder, share=share)
