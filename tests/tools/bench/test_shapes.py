"""Random models of known shapes: what is on disk, through both engines, and what is left when writing
fails.
"""

import shutil
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model
from support.numbers import relative_error
from support.pinned_configs import pinned_facts

from kvant.engine.load import POCKET, find_model
from kvant.errors import KvantError
from kvant.models import ModelConfig, load_decoder
from kvant.models.architectures import ARCHITECTURES
from kvant.tools.bench.shapes import SHAPES, Shape, random_model, shape_bytes, write_random

QWEN2 = Shape("tiny", "qwen2", 256, 2, 4, 2, 64, 384, 500, True, large_key_bias=True)
QWEN3 = Shape("tiny3", "qwen3", 128, 2, 4, 2, 64, 384, 500, True)
UNTIED = replace(QWEN2, name="untied", tie_word_embeddings=False)
OTHERS = [  # four layers, of which SmolLM3's last does not rotate
    Shape(kind, kind, 256, 4, 4, 2, 64, 384, 500, kind != "olmo2")
    for kind in ARCHITECTURES
    if "qwen" not in kind
]


STORED = [(shape, *to) for shape in (QWEN2, QWEN3, UNTIED, *OTHERS) for to in ((0, 64), (4, 32))]
STORED += [(QWEN2, 8, 128), (UNTIED, 8, 64)]


@pytest.mark.parametrize(
    ("shape", "bits", "group_size"), STORED, ids=lambda value: getattr(value, "name", None)
)
def test_both_engines_read_it_and_agree(tmp_path: Path, shape: Shape, bits: int, group_size: int) -> None:
    write_random(shape, tmp_path, bits=bits, group_size=group_size, seed=3)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == shape.num_hidden_layers + 2
    headers = sum(8 + int.from_bytes(file.read_bytes()[:8], "little") for file in files)
    assert sum(file.stat().st_size for file in files) - headers == shape_bytes(shape, bits, group_size)
    model = load_decoder(tmp_path)
    reference, _ = load_model(tmp_path)
    mx.random.seed(0)
    ids = mx.random.randint(0, shape.vocab_size, (1, 24))
    own = reference(ids)
    assert mx.isfinite(own).all()  # as mlx-lm runs it, in bfloat16
    assert 0.7 < mx.std(own.astype(mx.float32)).item() < 1.4
    reference.set_dtype(model.dtype)
    tolerance = 1e-4 if model.dtype == mx.float32 else 0.1
    assert relative_error(model(ids)[0].astype(mx.float32), reference(ids)[0].astype(mx.float32)) < tolerance
    assert len({int(row.argmax()) for row in own[0]}) > 8  # the answer depends on the token


def test_a_seed_writes_the_same_bytes_again(tmp_path: Path) -> None:
    found = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        (tmp_path / name).mkdir()
        write_random(QWEN2, tmp_path / name, bits=4, seed=seed)
        found.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
    assert found[0] == found[1]
    assert all(
        found[0][name] != found[2][name] for name in found[0] if "-0000" in name and "4-of" not in name
    )


def test_one_key_pair_a_layer_is_as_large_as_qwen2s(tmp_path: Path) -> None:
    write_random(QWEN2, tmp_path, bits=4)
    assert [layer.self_attn.qkv_bias.pairs for layer in load_decoder(tmp_path).layers] == [(31,), (31,)]
    (tmp_path / "other").mkdir()
    write_random(replace(QWEN2, large_key_bias=False), tmp_path / "other", bits=4)
    assert [layer.self_attn.qkv_bias.pairs for layer in load_decoder(tmp_path / "other").layers] == [(), ()]


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_those_of_config_json(name: str) -> None:
    config = ModelConfig.from_folder(find_model(POCKET)) if name == POCKET else pinned_facts(name)
    raw = asdict(config) | {"rope_theta": config.rope.theta} if isinstance(config, ModelConfig) else config
    shape = asdict(SHAPES[name])
    given = shape.keys() & raw.keys() - ({"max_position_embeddings"} if name == POCKET else set())
    assert {field: shape[field] for field in given} == {field: raw[field] for field in given}
    assert len(given) >= 10
    assert SHAPES[POCKET].max_position_embeddings >= 8192


@pytest.mark.parametrize(
    ("bits", "group_size", "message"), [(3, 64, "bits is 3"), (4, 48, "group_size is 48")]
)
def test_formats_that_cannot_be_written(tmp_path: Path, bits: int, group_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        write_random(QWEN2, tmp_path, bits=bits, group_size=group_size)
    with pytest.raises(ValueError, match="a divisor of"):
        shape_bytes(replace(QWEN2, intermediate_size=96), 4, 64)


def test_a_disk_that_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10**9))
    with pytest.raises(KvantError, match=r"qwen2.5-7b needs 4.29 GB of disk; 1.00 GB are free"):
        write_random(SHAPES["qwen2.5-7b"], tmp_path, bits=4)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("[write] Unable to write 3 bytes to file.")

    monkeypatch.setattr(mx, "save_safetensors", fail)
    with pytest.raises(KvantError, match=r"tiny cannot be written: .* Unable to write 3 bytes"):
        write_random(QWEN2, tmp_path, bits=4)


def test_a_temporary_model_goes_when_it_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def interrupted() -> None:
        with random_model(QWEN2, bits=4) as folder:
            load_decoder(folder)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []
