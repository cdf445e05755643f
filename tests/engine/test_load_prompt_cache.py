"""mlx-lm's functions of a prompt cache on kvant's, and kvant.load_prompt_cache, which needs no model."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kvant  # isort: skip  (before MLX: it loads a faster BLAS)
import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import (
    KVCache,
    can_trim_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)

from kvant.cache import FullKVCache, ModelCache
from kvant.engine.run import Run
from kvant.errors import SnapshotError
from kvant.models import Decoder, load_decoder

Pocket = tuple[Decoder, Any]
Save = Callable[[Path, ModelCache], None]
IDS = [(7 + 31 * i) % 900 for i in range(70)]


def _ours(path: Path, cache: ModelCache) -> None:
    cache.save(path, {"a.b": "c", "d": ""})


def _theirs(path: Path, cache: ModelCache) -> None:
    save_prompt_cache(str(path), cache, {"a.b": "c", "d": ""})


saves = pytest.mark.parametrize("save", [_ours, _theirs])


@saves
@pytest.mark.parametrize(
    "options", [{"quant_bit": 8}, {"quant_bit": 4, "quant_group": 16}, {"quant_bit": 0}, {"bias_split": False}], ids=str
)
def test_a_saved_cache_goes_on(pocket: Pocket, tmp_path: Path, save: Save, options: dict[str, Any]) -> None:
    model, _ = pocket
    cache = model.make_cache(128, **options)
    model(mx.array([IDS]), cache=cache)
    assert can_trim_prompt_cache(cache)
    assert trim_prompt_cache(cache, 4) == 4
    path = tmp_path / "saved.safetensors"
    save(path, cache)
    loaded, metadata = kvant.load_prompt_cache(path, return_metadata=True)
    assert metadata == {"a.b": "c", "d": ""}
    assert isinstance(loaded, ModelCache)
    assert (loaded.ids, loaded.max_seq_len, loaded.nbytes) == (cache.ids, cache.max_seq_len, cache.nbytes)
    assert [type(layer) for layer in loaded] == [type(layer) for layer in cache]
    assert can_trim_prompt_cache(loaded)
    assert trim_prompt_cache(loaded, 2) == trim_prompt_cache(cache, 2) == 2
    path.unlink()  # it is not needed any more
    given, expected = (list(Run(model, [5, 6], one, max_tokens=20)) for one in (loaded, cache))
    assert [token for token, _ in given] == [token for token, _ in expected]
    assert all(mx.array_equal(a, b) for (_, a), (_, b) in zip(given, expected, strict=True))
    assert loaded.identity == model.identity
    _ours(path, loaded)  # and it is saved like any other
    assert kvant.load_prompt_cache(str(path)).ids == cache.ids


@saves
def test_sequences_of_different_lengths(pocket: Pocket, tmp_path: Path, save: Save) -> None:
    model, _ = pocket
    cache = model.make_cache(128, batch=3)
    model(mx.array([IDS, IDS[::-1], IDS]), cache=cache)
    cache.trim([3, 70, 41])
    save(tmp_path / "saved.safetensors", cache)
    loaded = kvant.load_prompt_cache(tmp_path / "saved.safetensors", max_kv_size=90)
    assert (loaded.ids, loaded.max_seq_len) == (cache.ids, 90)
    step = mx.array([[5, 6], [7, 8], [9, 10]])
    assert mx.array_equal(*(model(step, cache=one) for one in (loaded, cache)))


@saves
def test_windows_and_full_precision(
    make_checkpoint: Callable[..., tuple[Path, Any]], tmp_path: Path, save: Save
) -> None:
    folder, _ = make_checkpoint(use_sliding_window=True, sliding_window=24, max_window_layers=1)
    model = load_decoder(folder)
    for cache in (model.make_cache(200), ModelCache([FullKVCache(window) for window in model.config.windows])):
        for start in range(0, 99, 33):
            model(mx.array([IDS[:33]]) % 200 + start, cache=cache)
        cache.trim(2)
        save(tmp_path / "saved.safetensors", cache)
        loaded = kvant.load_prompt_cache(tmp_path / "saved.safetensors")
        assert loaded.identity is None
        for back in (0, 5):
            assert cache.trim(back) == loaded.trim(back) == back
            assert mx.array_equal(*(model(mx.array([[7, 8]]), cache=one) for one in (loaded, cache)))


@saves
def test_the_first_model_that_uses_it_is_compared(
    pocket: Pocket, make_checkpoint: Callable[..., tuple[Path, Any]], tmp_path: Path, save: Save
) -> None:
    model, _ = pocket
    cache = model.make_cache(64)
    model(mx.array([IDS[:9]]), cache=cache)
    path = tmp_path / "saved.safetensors"
    save(path, cache)
    folder = tmp_path / "other"
    shutil.copytree(Path(kvant.__file__).parent / "pocket", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 777.0}))
    renamed, _ = kvant.load(folder)
    bare, other = load_decoder(folder), load_decoder(make_checkpoint()[0])
    for wrong, message in (
        (renamed, "of another model: the model's digest is [0-9a-f]{64}; expected"),
        (bare, "of another model: RoPE's frequency of pair 1 is"),
    ):
        loaded = kvant.load_prompt_cache(path)
        for _ in range(2):  # the second time too
            with pytest.raises(SnapshotError, match=message) as error:
                wrong(mx.array([[5]]), cache=loaded)
            assert str(error.value).startswith(f"{path}: ")
        assert loaded.offset == 9
        model(mx.array([[5]]), cache=loaded)  # the right one can still use it
    with pytest.raises(ValueError, match="the cache has 4 layers; expected 2"):
        other(mx.array([[5]]), cache=kvant.load_prompt_cache(path))


def test_biases_are_compared(make_checkpoint: Callable[..., tuple[Path, Any]], tmp_path: Path) -> None:
    """Two models of one shape, neither with a known identity."""
    folder, reference = make_checkpoint()
    model = load_decoder(folder)
    model.make_cache(16).save(tmp_path / "saved")
    cache = kvant.load_prompt_cache(tmp_path / "saved")
    model(mx.array([[5, 6]]), cache=cache)
    reference.model.layers[1].self_attn.v_proj.bias += 1
    mx.save_safetensors(
        str(folder / "model.safetensors"),
        {name: array for name, array in _flat(reference).items() if name != "lm_head.weight"},
    )
    changed = load_decoder(folder)
    with pytest.raises(SnapshotError, match="value_bias of layer 1 has other numbers"):
        changed(mx.array([[5, 6]]), cache=kvant.load_prompt_cache(tmp_path / "saved"))


def _flat(model: Any) -> dict[str, mx.array]:
    from mlx.utils import tree_flatten

    return dict(tree_flatten(model.parameters()))  # type: ignore[arg-type]


def test_mlx_lms_loop_goes_on(pocket: Pocket, tmp_path: Path) -> None:
    model, _ = pocket
    cache = make_prompt_cache(model, 100)
    tokens = [token for token, _ in generate_step(mx.array(IDS), model, max_tokens=30, prompt_cache=model.make_cache())]
    given = [token for token, _ in generate_step(mx.array(IDS), model, max_tokens=11, prompt_cache=cache)]
    held = cache.ids[0]
    save_prompt_cache(str(tmp_path / "saved.safetensors"), cache)
    loaded = kvant.load_prompt_cache(tmp_path / "saved.safetensors")
    trim_prompt_cache(loaded, len(held) - len(IDS) - 10)
    rest = generate_step(mx.array(given[10:]), model, max_tokens=19, prompt_cache=loaded)
    assert given + [token for token, _ in rest] == tokens


def test_its_state_is_small_and_leaves_the_buffers_alone(pocket: Pocket, tmp_path: Path) -> None:
    """mlx-lm evaluates ``state`` after every chunk of a prompt."""
    model, _ = pocket
    cache = model.make_cache(2048)
    model(mx.array([IDS]), cache=cache)
    mx.eval([layer.state for layer in cache])
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for token in range(5, 15):
        model(mx.array([[token]]), cache=cache)
        mx.eval([layer.state for layer in cache])
    assert mx.get_active_memory() - before < 2**16
    assert mx.get_peak_memory() - before < cache[0].nbytes  # no layer's buffer is copied
    save_prompt_cache(str(tmp_path / "saved.safetensors"), cache)
    assert (tmp_path / "saved.safetensors").stat().st_size < cache.nbytes / 4


def test_mlx_lms_own_caches_are_mlx_lms(tmp_path: Path) -> None:
    path = tmp_path / "saved.safetensors"
    cache = KVCache()
    cache.update_and_fetch(mx.zeros((1, 1, 2, 8)), mx.zeros((1, 1, 2, 8)))
    save_prompt_cache(str(path), [cache])
    with pytest.raises(SnapshotError, match=r"the KVCache at 0 is not kvant's; mlx_lm.models.cache.load_prompt_cache"):
        kvant.load_prompt_cache(path)
    save_prompt_cache(str(path), [KVCache()])
    with pytest.raises(SnapshotError, match="it holds no cache of kvant's"):
        kvant.load_prompt_cache(path)
    mx.save_safetensors(str(path), {"a": mx.zeros(3)})
    with pytest.raises(SnapshotError, match="neither a snapshot of a cache nor a file of mlx-lm's save_prompt_cache"):
        kvant.load_prompt_cache(path)


def _with_text(text: dict[str, str], change: Callable[[dict[str, Any]], object]) -> dict[str, str]:
    facts = json.loads(text["cache"])
    change(facts)
    return text | {"cache": json.dumps(facts)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: _with_text(text, lambda f: f.update(lengths=[5], written=[5])), "its layers are of several"),
        (lambda text: _with_text(text, lambda f: f["layers"][0].update(num_kv_heads=3)), "tensor .* is .*; expected"),
        (lambda text: _with_text(text, lambda f: f.update(identity=None)), "its layers are of several caches"),
        (lambda text: _with_text(text, lambda f: f.update(reservation=2)), "lengths has 9; reservation is 2"),
        (lambda text: _with_text(text, lambda f: f["layers"].append(7)), "a layer's format has other fields"),
        (lambda text: text | {"version": "2"}, "version '2' of the format"),
        (lambda text: text | {"shared": "False"}, "its layers are of several caches"),
        (lambda text: [1], "says nothing of itself"),
        (lambda text: "{", "Expecting value|Expecting property"),
    ],
)
def test_what_a_layer_says_of_itself_is_checked(
    pocket: Pocket, tmp_path: Path, change: Callable[[Any], Any], message: str
) -> None:
    """mlx-lm's file has no digest; a stranger may have made it."""
    model, _ = pocket
    cache = model.make_cache(64)
    model(mx.array([IDS[:9]]), cache=cache)

    class Told:
        def __init__(self, state: list[Any]) -> None:
            self.state = state

    def told(number: int) -> Any:
        text, *arrays = cache[number].state
        if number == 1:
            changed = change(json.loads(text))
            text = changed if isinstance(changed, str) else json.dumps(changed)
        return type("QuantizedKVCache", (Told,), {})([text, *arrays])

    path = tmp_path / "saved.safetensors"
    save_prompt_cache(str(path), [told(number) for number in range(len(cache))])
    with pytest.raises(SnapshotError, match=message):
        kvant.load_prompt_cache(path)


def test_names_and_places_of_a_strangers_file(tmp_path: Path) -> None:
    path = tmp_path / "saved.safetensors"
    text = {"1.0": "QuantizedKVCache", "2.0": "", "2.1.0": "0.0", "2.1.1": "string"}
    for tensors, metadata in (
        ({}, text),
        ({"0.0": mx.zeros(3)}, text),
        ({"0.0": mx.array([2**31 - 1])}, text),
        ({"0.0": mx.array([-1])}, text),
        ({"0.0": mx.array([123]), "0.7": mx.zeros(1)}, text),
        ({"0.0": mx.array([123])}, text | {"1.0": "CacheList"}),
        ({"0.0": mx.array([123])}, text | {"1.5": "QuantizedKVCache"}),
        ({"0.0": mx.array([123])}, text | {"1.x": "QuantizedKVCache"}),
        ({"0.0.0": mx.array([123])}, text | {"1.0": "ArraysCache"}),
        ({"0.0.0": mx.zeros(1), "0.0.1": mx.array([65])}, text | {"1.0": "CacheList", "2.1.0": "0.0.1"}),
    ):
        mx.save_safetensors(str(path), {**tensors, "1.0": mx.zeros(1)}, metadata)
        with pytest.raises(SnapshotError) as error:
            kvant.load_prompt_cache(path)
        assert str(error.value).startswith(f"{path}: ")
