"""mlx-lm's functions of a prompt cache on kvant's; a file is read by the first model that uses it."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kvant  # isort: skip  (before MLX: it loads a faster BLAS)
import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache
from mlx_lm.models.cache import save_prompt_cache as save_mlx_lm_cache
from support.runs import Run
from support.tiny_models import build

from kvant.bridge.config import BridgedConfig
from kvant.bridge.model import BridgedModel
from kvant.errors import ContextError, SnapshotError
from kvant.models import Decoder, load_decoder

Pocket = tuple[Decoder, Any]
IDS = [(7 + 31 * i) % 900 for i in range(70)]


@pytest.mark.parametrize(
    "options",
    [{"kv_bits": 8}, {"kv_bits": 4, "kv_group_size": 16}, {"kv_bits": 0}, {"bias_split": False}],
    ids=str,
)
def test_a_saved_cache_goes_on(pocket: Pocket, tmp_path: Path, options: dict[str, Any]) -> None:
    model, _ = pocket
    cache = model.make_cache(128, **options)
    model(mx.array([IDS]), cache=cache)
    assert kvant.trim_prompt_cache(cache, 4) == 4
    path = tmp_path / "saved.safetensors"
    kvant.save_prompt_cache(path, cache, {"a.b": "c", "d": ""})
    loaded, metadata = kvant.load_prompt_cache(path, return_metadata=True)
    assert metadata == {"a.b": "c", "d": ""}
    given, expected = (list(Run(model, [5, 6], one, max_tokens=20)) for one in (loaded, cache))
    assert [token for token, _ in given] == [token for token, _ in expected]
    assert all(mx.array_equal(a, b) for (_, a), (_, b) in zip(given, expected, strict=True))
    path.unlink()  # it is not needed any more
    held = loaded.cache
    assert (held.ids, held.max_seq_len, held.nbytes) == (cache.ids, cache.max_seq_len, cache.nbytes)
    assert [type(layer) for layer in loaded] == [type(layer) for layer in cache]
    assert kvant.can_trim_prompt_cache(loaded)
    assert kvant.trim_prompt_cache(loaded, 2) == kvant.trim_prompt_cache(cache, 2) == 2
    kvant.save_prompt_cache(path, loaded)  # as any other
    assert mx.array_equal(
        *(model(mx.array([[7, 8]]), cache=c) for c in (kvant.load_prompt_cache(str(path)), cache))
    )


def test_mlx_lms_file_is_refused_with_a_way_out(tmp_path: Path) -> None:
    """It has no token ids, so that kvant could not say what of a prompt it has."""
    file = tmp_path / "theirs.safetensors"
    caches = [KVCache() for _ in range(4)]
    for cache in caches:
        cache.update_and_fetch(mx.zeros((1, 2, 9, 64)), mx.zeros((1, 2, 9, 64)))
    save_mlx_lm_cache(str(file), caches, {"title": "Pip"})
    said = r"theirs\.safetensors: mlx-lm's prompt cache.* with kvant and save .*mlx_lm\.models\.cache\."
    with pytest.raises(SnapshotError, match=said):
        kvant.load_prompt_cache(file)
    mx.save_safetensors(str(file), {"0": mx.zeros((1,))}, {"0.0": "256", "2.0": "KVCache"})  # an older one
    with pytest.raises(SnapshotError, match=said):
        kvant.load_prompt_cache(file)


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # whoever opened it would wait for ever
    (tmp_path / "device").symlink_to("/dev/zero")
    for name in ("pipe", "device", "."):
        with pytest.raises(SnapshotError, match="not a regular file"):
            kvant.load_prompt_cache(tmp_path / name)
    with pytest.raises(SnapshotError, match="No such file"):
        kvant.load_prompt_cache(tmp_path / "missing")


@pytest.mark.parametrize("name", ["decoder", "gemma3_text", "qwen3_next", "mimo_v2_flash"])
def test_windows_and_states(
    name: str, make_checkpoint: Callable[..., tuple[Path, Any]], tmp_path: Path
) -> None:
    """And widths of which a group is divided by its own divisor."""
    if name == "decoder":
        model = load_decoder(
            make_checkpoint(use_sliding_window=True, sliding_window=24, max_window_layers=1)[0]
        )
    else:
        model = BridgedModel(build(name)[0], BridgedConfig(name, 97, None), mx.float32)
    cache = model.make_cache(64, kv_group_size=48 if name != "decoder" else 32)
    for start in (0, 15, 30):
        mx.eval(model(mx.array([IDS[start : start + 15]]) % 97, cache=cache))
    kvant.save_prompt_cache(tmp_path / "saved", cache)
    loaded = kvant.load_prompt_cache(tmp_path / "saved", max_kv_size=50)
    assert mx.array_equal(*(model(mx.array([[7, 8]]), cache=one) for one in (loaded, cache)))
    assert loaded.cache.pool.formats == cache.pool.formats
    assert loaded.cache.max_seq_len == 50


def test_another_model_is_refused(pocket: Pocket, tmp_path: Path) -> None:
    model, _ = pocket
    cache = model.make_cache(64)
    model(mx.array([IDS[:9]]), cache=cache)
    path = tmp_path / "saved.safetensors"
    kvant.save_prompt_cache(path, cache)
    folder = tmp_path / "other"
    shutil.copytree(Path(kvant.__file__).parent / "pocket", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 777.0}))
    loaded = kvant.load_prompt_cache(path)
    bridged = BridgedModel(build("qwen3")[0], BridgedConfig("qwen3", 97, None), mx.float32)
    for wrong in (kvant.load(folder)[0], load_decoder(folder), bridged) * 2:  # the second time too
        with pytest.raises(SnapshotError, match=rf"^{path}: .*of another"):
            wrong(mx.array([[5]]), cache=loaded)
    model(mx.array([[5]]), cache=loaded)  # the right one can still use it
    assert loaded.cache.offset == 10
    with pytest.raises(ValueError, match="tokens of another model"):
        kvant.load(folder)[0](mx.array([[5]]), cache=loaded)


def test_before_a_model_has_used_it(pocket: Pocket, tmp_path: Path) -> None:
    model, _ = pocket
    path = tmp_path / "saved"
    cache = model.make_cache(16)
    model(mx.array([IDS[:9]]), cache=cache)
    cache.save(path)
    loaded = kvant.load_prompt_cache(path, max_kv_size=2**40)
    assert len(loaded) == len(model.layers)
    for use in (lambda: kvant.trim_prompt_cache(loaded, 1), lambda: kvant.save_prompt_cache(path, loaded)):
        with pytest.raises(ValueError, match="has not been read"):
            use()
    with pytest.raises(ContextError, match="this machine has"):
        model(mx.array([[5]]), cache=loaded)
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)
    with pytest.raises(SnapshotError, match="altered"):
        model(mx.array([[5]]), cache=kvant.load_prompt_cache(path))
