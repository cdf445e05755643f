"""Snapshots that are refused: altered, truncated, made up, or of another model or format. The cache is empty then."""

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kvant  # isort: skip  (before MLX: it loads a faster BLAS)
import mlx.core as mx
import pytest
from support.counts import count

from kvant.cache import ModelCache, QuantizedKVCache, WindowKVCache
from kvant.cache.identity import Identity
from kvant.cache.snapshot import read_header
from kvant.errors import SnapshotError
from kvant.models import Decoder, load_decoder
from kvant.operators.bias_split import BiasSplit
from kvant.operators.rotary import Rotary

Change = Callable[[dict[str, Any]], object]
LENGTH = 6


def _layer(**changes: Any) -> QuantizedKVCache:
    options: dict[str, Any] = {"max_seq_len": 12, "num_kv_heads": 1, "head_dim": 16, "kv_group_size": 16} | changes
    if options.pop("window", None):
        return WindowKVCache(**options, window=8)
    return QuantizedKVCache(**options)


def _cache(layers: int = 1, fill: bool = False, rotary: Rotary | None = None, **changes: Any) -> ModelCache:
    cache = ModelCache([_layer(**changes) for _ in range(layers)])
    cache.identity = Identity("a" * 64, "b" * 64)
    cache.rotary = rotary or Rotary.plain(16, 10000.0)
    if fill:
        cache.begin(mx.zeros((1, LENGTH), mx.int32))
        for i, layer in enumerate(cache):
            x = mx.random.normal((1, 1, LENGTH, changes.get("head_dim", 16)), key=mx.random.key(i))
            mx.eval(layer.attend(x, x, x))
        cache.commit(ids=[list(range(LENGTH))])
    return cache


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A small snapshot."""
    _cache(fill=True).save(tmp_path / "saved", {"title": "x"})
    return tmp_path / "saved"


def _refused(path: Path, match: str, cache: ModelCache | None = None) -> None:
    """The load fails in one line that begins with the path; the cache is empty, and can be used."""
    cache = cache or _cache(fill=True)
    with pytest.raises(SnapshotError, match=match) as error:
        cache.load(path)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)
    assert (cache.offset, cache.ids, cache.step) == (0, [[]], None)
    form = cache[0].format
    cache.begin(mx.zeros((1, 1), mx.int32))
    for layer in cache:
        x = mx.ones((1, form.num_kv_heads or 1, 1, form.head_dim or 16))
        if isinstance(layer, QuantizedKVCache):
            mx.eval(layer.append(x, mx.ones((*x.shape[:3], layer.value_head_dim))))
        else:
            mx.eval(layer.attend(x, x, x))
    cache.commit()
    assert cache.offset == 1


def test_every_byte_of_the_header_and_sampled_bytes_of_the_body(saved: Path) -> None:
    data = saved.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little") + 32
    rng, path = random.Random(0), saved.with_name("flipped")

    def flip(at: int, bit: int) -> None:
        flipped = bytearray(data)
        flipped[at] ^= 1 << bit
        path.write_bytes(flipped)

    for at in range(header):
        for bit in count([rng.randrange(8)], range(8)):
            flip(at, bit)
            with pytest.raises(SnapshotError) as error:
                read_header(path)
            assert str(error.value).startswith(f"{path}: ")
    cache = _cache()
    for at in [*range(0, header, 11), *range(header, len(data))]:
        flip(at, rng.randrange(8))
        with pytest.raises(SnapshotError):
            cache.load(path)
        assert cache.offset == 0
    _refused(path, "altered: its SHA-256 is another")


def test_truncated_anywhere_and_longer(saved: Path) -> None:
    data = saved.read_bytes()
    path = saved.with_name("short")
    for length in [*range(60), *range(60, len(data), 7), *range(len(data) - 40, len(data))]:
        path.write_bytes(data[:length])
        with pytest.raises(SnapshotError, match="not a whole safetensors file"):
            _cache().load(path)
    _refused(path, "not a whole safetensors file")
    path.write_bytes(data + b"\0")
    _refused(path, "not a whole safetensors file")


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "bits": ({"kv_bits": 4}, "kv_bits is 8; expected 4, in layer 0"),
    "not quantized": ({"kv_bits": 0}, "kv_bits is 8; expected 0"),
    "group": ({"kv_group_size": 8}, "kv_group_size is 16; expected 8"),
    "heads": ({"num_kv_heads": 2}, "num_kv_heads is 1; expected 2"),
    "width": ({"head_dim": 32}, "head_dim is 16; expected 32"),
    "width of values": ({"value_head_dim": 32}, "value_head_dim is 16; expected 32"),
    "scales": ({"scale_dtype": mx.float32}, "scale_dtype is 'F16'; expected 'F32'"),
    "window": ({"window": True}, "window is None; expected 8"),
    "layers": ({"layers": 2}, "it has 1 layers; expected 2"),
    "room": ({"max_seq_len": 5}, "lengths has 6 tokens; the cache has 5 reserved"),
    "RoPE": ({"rotary": Rotary.plain(16, 20000.0)}, r"RoPE's frequency of pair 1 is 0.316\d+; expected 0.289\d+"),
    "factor of RoPE": (
        {"rotary": Rotary([10000.0 ** (-p / 8) for p in range(8)], 1.5)},
        "RoPE's factor is 1.0; expected 1.5",
    ),
    "bias split": (
        {"bias_split": BiasSplit(mx.zeros((1, 2, 1)), (3,), mx.zeros((2, 1, 12)), mx.zeros((1, 16)))},
        r"split_pairs is None; expected \(3,\)",
    ),
}


@pytest.mark.parametrize(("changes", "message"), OTHERS.values(), ids=OTHERS.keys())
def test_another_format(saved: Path, changes: dict[str, Any], message: str) -> None:
    _refused(saved, message, _cache(**changes))


def test_another_window(tmp_path: Path) -> None:
    for given, own, message in (
        ({"window": 8}, {"window": 9}, "window is 8; expected 9"),
        ({"window": 8, "keep": 2}, {"window": 8}, "keep is 2; expected 0"),
        ({"window": 8, "slack": 4}, {"window": 8}, "slack is 4; expected 16"),
    ):
        ModelCache([WindowKVCache(100, 1, 16, kv_group_size=16, **given)]).save(tmp_path / "saved")
        _refused(tmp_path / "saved", message, ModelCache([WindowKVCache(100, 1, 16, kv_group_size=16, **own)]))


def test_tokens_that_a_window_has_forgotten(tmp_path: Path) -> None:
    """Of 25 tokens a window of 8 keeps 24. A cache without a ring can go back to any, and would read the first."""
    ring = ModelCache([WindowKVCache(100, 1, 16, kv_group_size=16, window=8)])
    x = mx.ones((1, 1, 1, 16))
    for _ in range(25):
        ring.begin(mx.zeros((1, 1), mx.int32))
        ring[0].attend(x, x, x)
        ring.commit()
    ring.trim(17)
    ring.save(tmp_path / "saved")
    plain = ModelCache([QuantizedKVCache(8, 1, 16, kv_group_size=16)])
    _refused(tmp_path / "saved", "tokens before 1 are forgotten", plain)
    smaller = ModelCache([WindowKVCache(20, 1, 16, kv_group_size=16, window=8)])
    smaller.load(tmp_path / "saved")
    assert (smaller.offset, smaller.can_trim_to(7)) == (8, False)


@pytest.mark.parametrize("part", ["key_bias", "value_bias"])
def test_other_biases(tmp_path: Path, part: str) -> None:
    def made(**change: mx.array) -> ModelCache:
        tables = {"key_bias": mx.ones((1, 2, 1)), "value_bias": mx.ones((1, 16))} | change
        return _cache(bias_split=BiasSplit(pairs=(3,), rotation=mx.zeros((2, 1, 12)), **tables))

    made().save(tmp_path / "saved")
    shape = (1, 2, 1) if part == "key_bias" else (1, 16)
    _refused(tmp_path / "saved", f"{part} of layer 0 has other numbers", made(**{part: mx.zeros(shape)}))


def test_another_model_and_another_tokenizer(pocket: tuple[Decoder, Any], tmp_path: Path) -> None:
    model, _ = pocket
    cache = model.make_cache(32)
    model(mx.array([[5, 6]]), cache=cache)
    cache.save(tmp_path / "saved")
    folder = tmp_path / "other"
    shutil.copytree(Path(kvant.__file__).parent / "pocket", folder)
    config = json.loads((folder / "config.json").read_text())
    for name, change, message in (
        ("config.json", {"max_position_embeddings": 512}, "the model's digest is [0-9a-f]{64}; expected [0-9a-f]{64}"),
        ("tokenizer.json", {}, "the tokenizer's digest is [0-9a-f]{64}; expected"),
    ):
        before = (folder / name).read_bytes()
        (folder / name).write_text(json.dumps(config | change) if change else before.decode() + "\n")
        other, _ = kvant.load(folder)
        with pytest.raises(SnapshotError, match=message):
            other.make_cache(32).load(tmp_path / "saved")
        (folder / name).write_bytes(before)
    same, _ = kvant.load(folder)
    copy = same.make_cache(64)
    copy.load(tmp_path / "saved")
    assert copy.ids == [[5, 6]]


def test_a_model_without_a_known_identity(
    make_checkpoint: Callable[..., tuple[Path, Any]], pocket: tuple[Decoder, Any], tmp_path: Path
) -> None:
    """Its sizes are compared."""
    model, _ = pocket
    model.make_cache(32).save(tmp_path / "saved")
    decoder = load_decoder(make_checkpoint()[0])
    with pytest.raises(SnapshotError, match="of another model: it has 4 layers; expected 2"):
        decoder.make_cache(32).load(tmp_path / "saved")


def _made(path: Path, change: Change, text: Change = lambda text: None, extra: bytes = b"") -> None:
    """The snapshot again with another description and digests that are right: a stranger's."""
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    body = data[8 + int.from_bytes(data[:8], "little") + 32 : -32] + extra
    metadata = header["__metadata__"]
    facts = json.loads(metadata["cache"])
    change(facts)
    metadata["cache"] = json.dumps(facts)
    text(header)
    encoded = json.dumps(header).encode()
    start = len(encoded).to_bytes(8, "little") + encoded
    whole = start + hashlib.sha256(start).digest() + body
    path.write_bytes(whole + hashlib.sha256(whole).digest())


def _set(name: str, value: object) -> Change:
    return lambda facts: facts.update({name: value})


def _in_layer(name: str, value: object) -> Change:
    return lambda facts: facts["layers"][0].update({name: value})


HUGE = 2**62
MADE_UP: dict[str, tuple[Change, str]] = {
    "lengths beyond the file": (_set("lengths", [HUGE]), "expected an int from 0 to"),
    "a length beyond the file": (
        lambda facts: facts.update(lengths=[2**39], written=[2**39], reservation=2**39),
        "its tensors are not those of the cache it describes",
    ),
    "a length that is not there": (_set("written", [5]), "lengths has 6 where written has 5"),
    "more than was reserved": (_set("reservation", 5), "lengths has 6; reservation is 5"),
    "a sequence more": (lambda f: f.update(lengths=[6, 6], written=[6, 6]), "lengths has 2 numbers"),
    "no sequence": (lambda f: f.update(lengths=[], written=[]), "lengths has 0 numbers"),
    "lengths that are text": (_set("lengths", ["6"]), r"lengths\[0\] is '6'"),
    "lengths that are true": (_set("lengths", [True]), r"lengths\[0\] is True"),
    "lengths that are no list": (_set("lengths", 6), "lengths is 6; expected a list"),
    "heads beyond the file": (_in_layer("num_kv_heads", 2**24), "its tensors are not those"),
    "heads below 0": (_in_layer("num_kv_heads", -1), "num_kv_heads is -1"),
    "no heads": (_in_layer("num_kv_heads", 0), "0 kv heads"),
    "a width of 17": (_in_layer("head_dim", 17), "kv_group_size is 16; expected a divisor"),
    "3 bits": (_in_layer("quant_bit", 3), "a layer of 3 bits"),
    "a group of 0": (_in_layer("quant_group", 0), "kv_group_size is 0"),
    "another dtype": (_in_layer("dtype", "U8"), "dtype is 'U8' at 8 bits; expected I8"),
    "an unknown dtype": (_in_layer("dtype", "F64"), "dtype is 'F64'; expected one of"),
    "scales of another dtype": (_in_layer("scale_dtype", "F32"), "its tensors are not those"),
    "an unknown kind": (_in_layer("kind", "__import__"), "kind is '__import__'; expected one of"),
    "a kind that is a list": (_in_layer("kind", []), "kind is"),
    "a state": (_in_layer("kind", "state"), "has fields of another kind"),
    "pairs out of range": (_in_layer("split_pairs", [8]), "split_pairs is"),
    "pairs twice": (_in_layer("split_pairs", [1, 1]), "split_pairs is"),
    "an unknown field": (_in_layer("more", 1), "a layer's format has other fields"),
    "a missing field": (lambda facts: facts["layers"][0].pop("slack"), "a layer's format has other fields"),
    "no layers": (_set("layers", []), "layers is no list of formats"),
    "a layer that is none": (_set("layers", [7]), "a layer's format has other fields"),
    "an identity of other digits": (_set("identity", {"model": "x" * 64, "tokenizer": "b" * 64}), "no SHA-256"),
    "an identity that is text": (_set("identity", "aa"), "identity is no object"),
    "RoPE that is NaN": (_set("rope", {"frequencies": [float("nan")], "factor": 1.0}), "no number above 0"),
    "RoPE without a factor": (_set("rope", {"frequencies": [1.0]}), "rope is no object"),
    "a missing part": (lambda facts: facts.pop("layout"), "it has other fields than"),
    "a window that lost tokens": (
        lambda facts: (facts["layers"][0].update(window=1, slack=1), facts.update(written=[9])),
        "with a window of 1",
    ),
}


@pytest.mark.parametrize(("change", "message"), MADE_UP.values(), ids=MADE_UP.keys())
def test_a_strangers_file(saved: Path, change: Change, message: str) -> None:
    """Its digests are right; nothing that it claims is allocated or trusted."""
    _made(saved, lambda facts: None)
    _cache().load(saved)  # made again without a change it loads
    _made(saved, change)
    mx.synchronize()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    with pytest.raises(SnapshotError, match=message):
        read_header(saved)
    assert mx.get_peak_memory() - before < 2**20
    _refused(saved, message)
    with pytest.raises(SnapshotError, match=message):
        kvant.load_prompt_cache(saved)


def _text(name: str, value: str | None) -> Change:
    def change(header: dict[str, Any]) -> None:
        header["__metadata__"].pop(name)
        if value is not None:
            header["__metadata__"][name] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_text("version", "2"), r"version '2' of the format, written by kvant '\d.*'; this kvant reads version 1"),
        (_text("version", "9" * 5000), "version '99999999999999999999' of the format"),
        (_text("version", None), "version '' of the format"),
        (_text("format", "another"), "not a snapshot of a cache"),
        (_text("metadata", "{"), "Expecting property name"),
        (_text("metadata", '{"a": 1}'), "metadata is not an object of strings"),
        (_text("metadata", "[]"), "metadata is a JSON list"),
        (_text("cache", "[" * 100_000), "recursion"),
        (_text("kvant", None), "its text has other parts than"),
        (lambda header: header["ids.0"].update(dtype="I32"), "its tensors are not those of the cache it describes"),
        (
            lambda header: header.update({"layers.0.more": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}),
            "its t",
        ),
    ],
)
def test_another_version_and_other_text(saved: Path, change: Change, message: str) -> None:
    _made(saved, lambda facts: None, change)
    _refused(saved, message)


def test_a_reservation_that_no_machine_has(saved: Path) -> None:
    """It matters only where there is no cache yet."""
    _made(saved, _set("reservation", 2**40))
    _cache().load(saved)
    with pytest.raises(ValueError, match="max_kv_size is 0"):
        kvant.load_prompt_cache(saved, max_kv_size=0)


def test_what_is_no_snapshot(tmp_path: Path) -> None:
    mx.save_safetensors(str(tmp_path / "weights.safetensors"), {"a": mx.zeros(3)}, {"format": "mlx"})
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "text").write_text("# a model" * 100)
    (tmp_path / "huge").write_bytes((17 * 2**20).to_bytes(8, "little") + b" " * (18 * 2**20))
    for name, message in (
        ("weights.safetensors", "not a snapshot of a cache"),
        ("folder", "not a regular file"),
        ("pipe", "not a regular file"),
        ("device", "not a regular file"),
        ("loop", "not a regular file"),
        ("missing", "cannot be read: .*No such file"),
        ("text", "not a whole safetensors file"),
        ("huge", "a header of 17825792 bytes; expected at most 16777216"),
        ("n" * 300, "cannot be read"),
        ("a\0b", "cannot be read"),
    ):
        with pytest.raises(SnapshotError, match=message):
            _cache().load(tmp_path / name)
        if not name.startswith("weights"):
            with pytest.raises(SnapshotError, match=message):
                kvant.load_prompt_cache(tmp_path / name)


def test_metadata_that_is_no_text(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a dict of str to str"):
        _cache().save(tmp_path / "saved", {"a": 1})  # type: ignore[dict-item]
    with pytest.raises(SnapshotError, match="its header would have"):
        _cache().save(tmp_path / "saved", {"a": "x" * 17 * 2**20})
    assert not list(tmp_path.iterdir())


def test_a_released_cache(saved: Path) -> None:
    cache = _cache()
    cache.release()
    for use in (lambda: cache.save(saved), lambda: cache.load(saved), cache.fork):
        with pytest.raises(RuntimeError, match="the cache was released"):
            use()
    assert read_header(saved).length == LENGTH
