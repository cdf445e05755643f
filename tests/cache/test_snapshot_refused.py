"""Snapshots that are refused: altered, truncated, made up, or of another model or format. The cache is
empty then.
"""

import hashlib
import json
import os
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import kvant  # isort: skip  # noqa: F401  (before MLX: it loads a faster BLAS)
import mlx.core as mx
import pytest
from safetensors.numpy import load_file
from support.counts import count
from support.numbers import peak_bytes

from kvant.cache import ModelCache
from kvant.cache.identity import Identity
from kvant.cache.layer_format import LayerFormat
from kvant.cache.pool import Pool, single_sizes
from kvant.cache.snapshot import read_header
from kvant.errors import SnapshotError
from kvant.operators.bias_split import BiasSplit
from kvant.operators.key_transform import KeyTransform
from kvant.operators.rotary import Rotary

Change = Callable[[dict[str, Any]], object]
LENGTH = 6
IDENTITY = Identity("a" * 64, "b" * 64)


def _cache(
    layers: int = 1,
    fill: bool = False,
    rotary: Rotary | None = None,
    identity: Identity | None = IDENTITY,
    max_seq_len: int = 12,
    bias_split: BiasSplit | None = None,
    **changes: Any,
) -> ModelCache:
    """A cache of one head; ``changes``: in the format."""
    own = LayerFormat("quantized", 1, 16, 16, 8, 16, "I8", "F16", split_pairs=bias_split and bias_split.pairs)
    formats, transforms = [replace(own, **changes)] * layers, [KeyTransform(bias_split=bias_split)] * layers
    cache = ModelCache(
        Pool(formats, transforms, **single_sizes(max_seq_len), make_cache=partial(_cache, layers))
    )
    cache.pool.identity, cache.pool.rotary = identity, rotary or Rotary.plain(16, 10000.0)
    if fill:
        _feed(cache, LENGTH)
    return cache


def _feed(cache: ModelCache, count: int) -> None:
    cache.batch.begin(mx.zeros((1, count), mx.int32))
    for layer in cache:
        widths = layer.layer.format.head_dim, layer.layer.format.head_dim, layer.layer.format.value_head_dim
        mx.eval(
            layer.multi_head_cache_attention(
                *[mx.random.normal((1, 1, count, width), key=mx.random.key(0)) for width in widths]
            )
        )
    cache.batch.commit(ids=[list(range(count))])


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    _cache(fill=True).save(tmp_path / "saved", {"title": "x"})
    return tmp_path / "saved"


def _refused(path: Path, match: str, cache: ModelCache | None = None) -> None:
    """The load fails in one line that begins with the path; the cache is empty, and can be used."""
    cache = cache or _cache(fill=True)
    with pytest.raises(SnapshotError, match=match) as error:
        cache.load(path)
    assert str(error.value).startswith(str(path).replace("\0", r"\x00") + ": ")
    assert "\n" not in str(error.value)
    assert (cache.offset, cache.ids, cache.batch.step) == (0, [], None)
    _feed(cache, 1)
    assert cache.offset == 1


def test_bits_that_flipped(saved: Path) -> None:
    data = saved.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little") + 32
    rng, path, cache = random.Random(0), saved.with_name("flipped"), _cache()

    def flip(at: int, bit: int) -> None:
        flipped = bytearray(data)
        flipped[at] ^= 1 << bit
        path.write_bytes(flipped)

    for at in range(0, header, count(3, 1)):
        for bit in count([rng.randrange(8)], range(8)):
            flip(at, bit)
            with pytest.raises(SnapshotError) as error:
                read_header(path)
            assert str(error.value).startswith(f"{path}: ")
    for at in [*range(0, header, 31), *range(header, len(data), count(3, 1))]:
        flip(at, rng.randrange(8))
        with pytest.raises(SnapshotError):
            cache.load(path)
        assert cache.offset == 0
    flip(len(data) - 1, 0)
    _refused(path, "altered: its SHA-256 is another")


def test_truncated_anywhere_and_longer(saved: Path) -> None:
    data, path = saved.read_bytes(), saved.with_name("short")
    cache = _cache()
    for length in [*range(60), *range(60, len(data), count(29, 1)), *range(len(data) - 40, len(data))]:
        path.write_bytes(data[:length])
        with pytest.raises(SnapshotError, match="not a whole safetensors file"):
            cache.load(path)
    for whole in (data[:-1], data + b"\0"):
        path.write_bytes(whole)
        _refused(path, "not a whole safetensors file")


def _split(key: float = 1.0, value: float = 1.0) -> BiasSplit:
    return BiasSplit(key * mx.ones((1, 2, 1)), (3,), mx.zeros((2, 1, 12)), value * mx.ones((1, 16)))


TURNED = Rotary([10000.0 ** (-p / 8) for p in range(8)], 1.5)
# What was saved, the cache that it is loaded into, and what is said.
OTHERS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"kv_bits": 4, "dtype": "U8"}, "kv_bits is 8; expected 4, in layer 0"),
    ({}, {"value_bits": 4, "dtype": "U8"}, "value_bits is 8; expected 4, in layer 0"),
    ({"value_bits": 4, "dtype": "U8"}, {}, "value_bits is 4; expected 8, in layer 0"),
    ({}, {"value_head_dim": 32}, "value_head_dim is 16; expected 32"),
    ({}, {"scale_dtype": "F32"}, "scale_dtype is 'F16'; expected 'F32'"),
    ({}, {"layers": 2}, "it has 1 layers; expected 2"),
    ({"fill": True}, {"max_seq_len": 5}, "lengths has 6 tokens; the cache has 5 reserved"),
    ({}, {"identity": Identity("c" * 64, "b" * 64)}, "the model's digest is a{64}; expected c{64}"),
    ({}, {"identity": Identity("a" * 64, "c" * 64)}, "the tokenizer's digest is b{64}; expected c{64}"),
    ({}, {"rotary": Rotary.plain(16, 20000.0)}, r"RoPE's frequency of pair 1 is 0.316\d+; expected 0.289\d+"),
    ({}, {"rotary": TURNED}, "RoPE's factor is 1.0; expected 1.5"),
    ({}, {"bias_split": _split()}, r"split_pairs is None; expected \(3,\)"),
    ({"bias_split": _split()}, {"bias_split": _split(key=0)}, "key_bias of layer 0 has other numbers"),
    ({"bias_split": _split()}, {"bias_split": _split(value=0)}, "value_bias of layer 0 has other numbers"),
    ({}, {"window": 8, "slack": 16}, "window is None; expected 8"),
    ({"window": 8, "slack": 4}, {"window": 8, "slack": 16}, "slack is 4; expected 16"),
]


@pytest.mark.parametrize(("given", "own", "message"), OTHERS, ids=[message for *_, message in OTHERS])
def test_another_model_or_format(
    tmp_path: Path, given: dict[str, Any], own: dict[str, Any], message: str
) -> None:
    _cache(**given).save(tmp_path / "saved")
    _refused(tmp_path / "saved", message, _cache(**own))


def test_tokens_that_a_ring_has_forgotten(tmp_path: Path) -> None:
    """Before caches had pages, a window of 8 kept 24 of 25 tokens. Without a window all are needed."""
    ring, whole = _cache(max_seq_len=100, window=8, slack=16), _cache(max_seq_len=100)
    _feed(whole, 8)
    (layer,), sequence = ring.pool.layers, ring.sequence
    rows = whole.sequence.copied_rows(whole.pool.layers[0], 1)
    with sequence.filling({layer: 1}, whole.ids):
        sequence.put(layer, rows, 8)
    ring.save(tmp_path / "saved")
    assert (read_header(tmp_path / "saved").written, ring.can_trim_to(7)) == (25, False)
    assert load_file(tmp_path / "saved")["layers.0.sequences.0.cache"].shape == (2, 1, 7, 16)
    _refused(tmp_path / "saved", "tokens before 1 are forgotten", _cache(max_seq_len=8))
    smaller = _cache(max_seq_len=20, window=8, slack=16)
    smaller.load(tmp_path / "saved")
    assert (smaller.offset, smaller.can_trim_to(7)) == (8, False)
    assert all(map(mx.array_equal, smaller.sequence.copied_rows(smaller.pool.layers[0], 1), rows))


def _forge(path: Path, change: Change) -> None:
    """The snapshot again with another header and digests that are right: a stranger's."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header["__metadata__"]["cache"] = json.loads(header["__metadata__"]["cache"])
    change(header)
    if isinstance((text := header["__metadata__"])["cache"], dict):
        text["cache"] = json.dumps(text["cache"])
    encoded = json.dumps(header).encode()
    start = len(encoded).to_bytes(8, "little") + encoded
    whole = start + hashlib.sha256(start).digest() + data[end + 32 : -32]
    path.write_bytes(whole + hashlib.sha256(whole).digest())


def _text(**values: Any) -> Change:
    """Change the text beside the tensors; None: it is not there."""

    def change(header: dict[str, Any]) -> None:
        text = header["__metadata__"] | values
        header["__metadata__"] = {name: value for name, value in text.items() if value is not None}

    return change


def _set(**values: Any) -> Change:
    return lambda header: header["__metadata__"]["cache"].update(values)


def _in_layer(**values: Any) -> Change:
    return lambda header: header["__metadata__"]["cache"]["layers"][0].update(values)


def _lost_by_a_window(header: dict[str, Any]) -> None:
    _in_layer(window=1, slack=1)(header)
    _set(written=[9])(header)


OTHER_TENSORS = "its tensors are not those of the cache it describes"
EMPTY = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
FORGED: list[tuple[Change, str]] = [
    (_set(lengths=[2**62]), "expected an int from 0 to"),
    (_set(lengths=[2**39], written=[2**39], reservation=2**39), OTHER_TENSORS),
    (_set(written=[5]), "lengths has 6, but written has 5"),
    (_set(reservation=5), "lengths has 6; reservation is 5"),
    (_set(lengths=[], written=[]), "lengths has 0 numbers"),
    (_set(lengths=[True]), r"lengths\[0\] is True"),
    (_set(lengths=6), "lengths is 6; expected a list"),
    (_in_layer(num_kv_heads=2**24), OTHER_TENSORS),
    (_in_layer(num_kv_heads=-1), "num_kv_heads is -1"),
    (_in_layer(head_dim=17), "kv_group_size is 16; expected a divisor"),
    (_in_layer(quant_bit=3), "a layer of 3 bits"),
    (_in_layer(value_bits=4), "dtype is 'I8' at 8 bits; expected U8"),
    (_in_layer(value_bits=0), "a layer of 8 bits of keys and 0 of values"),
    (_in_layer(value_bits=4, dtype="U8"), OTHER_TENSORS),
    (_in_layer(quant_group=0), "kv_group_size is 0"),
    (_in_layer(dtype="U8"), "dtype is 'U8' at 8 bits; expected I8"),
    (_in_layer(dtype="F64"), "dtype is 'F64'; expected one of"),
    (_in_layer(scale_dtype="F32"), OTHER_TENSORS),
    (_in_layer(kind="full"), "kind is 'full'; expected one of"),
    (_in_layer(kind="state"), "has fields of another kind"),
    (_in_layer(split_pairs=[8]), "split_pairs is"),
    (_in_layer(split_pairs=[1, 1]), "split_pairs is"),
    (
        lambda header: header["__metadata__"]["cache"]["layers"][0].pop("slack"),
        "a layer's format has other fields",
    ),
    (_set(layers=[]), "layers is not a list of formats"),
    (_set(identity={"model": "x" * 64, "tokenizer": "b" * 64}), "not a SHA-256"),
    (_set(identity="aa"), "identity is not an object"),
    (_set(rope={"frequencies": [float("nan")], "factor": 1.0}), "not a number above 0"),
    (_set(rope={"frequencies": [1.0]}), "rope is not an object"),
    (lambda header: header["__metadata__"]["cache"].pop("layout"), "it has other fields than"),
    (_lost_by_a_window, "with a window of 1"),
    (_text(version="1"), r"version '1' of the format, written by kvant '\d.*'; this kvant reads version 2"),
    (_text(version="3"), r"version '3' of the format, written by kvant '\d.*'; this kvant reads version 2"),
    (_text(version="9" * 5000), "version '99999999999999999999' of the format"),
    (_text(version=None), "version '' of the format"),
    (_text(format="another"), "not a snapshot of a cache"),
    (_text(metadata="{"), "Expecting property name"),
    (_text(metadata='{"a": 1}'), "metadata is not an object of strings"),
    (_text(cache="[" * 100_000), "recursion"),
    (_text(kvant=None), "its text has other parts than"),
    (lambda header: header["ids.0"].update(dtype="I32"), OTHER_TENSORS),
    (lambda header: header.update({"layers.0.more": EMPTY}), "its tensors"),
]


WRONG_TAIL = "expected one that .* tokens can have"
FLOATS = {"quant_bit": 0, "value_bits": 0, "quant_group": 0, "scale_dtype": "", "dtype": "F16"}
FORGED_TAILS: list[tuple[Change, str]] = [
    (_set(tail=None), "tail is None; expected a list"),
    (lambda header: header["__metadata__"]["cache"].pop("tail"), "tail is None; expected a list"),
    *((_set(tail=tail), WRONG_TAIL) for tail in ([], [4], [4, 4, 4], [3, 4], [5, 5], [4, 3], [4, 7], [0, 3])),
    (_set(tail=[-1, 4]), r"tail\[0\] is -1; expected an int from 0"),
    (_set(tail=[4, 2**50]), r"tail\[1\] is \d+; expected an int from 0"),
    (_set(tail=[True, 4]), r"tail\[0\] is True"),
    (_set(tail=[4, "4"]), r"tail\[1\] is '4'"),
    (_set(tail={"4": 4}), "tail is {'4': 4}; expected a list"),
    (_set(tail=[0, 4]), OTHER_TENSORS),
    (_set(tail=[4, 5]), OTHER_TENSORS),
    (_set(lengths=[300], written=[300], reservation=300), WRONG_TAIL),
    (_set(lengths=[2**39], written=[2**39], reservation=2**39, tail=[4, 2**39]), OTHER_TENSORS),
    (_set(lengths=[2], written=[2]), WRONG_TAIL),
    (_in_layer(tail_dtype="F32"), "tail_dtype is 'F32'; expected one of F16, BF16"),
    (_in_layer(tail_dtype=1), "tail_dtype is 1; expected one of"),
    (_in_layer(tail_dtype="BF16"), OTHER_TENSORS),
    (_in_layer(tail_dtype=""), "none of its layers has one"),
    (_in_layer(**FLOATS), "a layer that is not quantized has an exact tail"),
    (lambda header: header.pop("layers.0.sequences.0.tail"), "its tensors|not a whole"),
]


@pytest.mark.parametrize(
    ("change", "message"), FORGED_TAILS, ids=[f"{i} {message}" for i, (_, message) in enumerate(FORGED_TAILS)]
)
def test_a_strangers_tail(tmp_path: Path, change: Change, message: str) -> None:
    path = tmp_path / "saved"
    _cache(fill=True, tail_dtype="F16").save(path)
    _forge(path, change)

    def read() -> None:
        with pytest.raises(SnapshotError, match=message):
            read_header(path)

    assert peak_bytes(read) < 2**20
    for tail_dtype in ("F16", ""):
        _refused(path, message, _cache(fill=True, tail_dtype=tail_dtype))


def test_a_tail_of_a_cache_without_one(saved: Path) -> None:
    _forge(saved, _set(tail=[4, 4]))
    _refused(saved, "none of its layers has one")


def test_an_exact_row_that_was_altered(tmp_path: Path) -> None:
    """Its bytes are behind those of the quantized rows: nothing counts before the file's digest is right."""
    path = tmp_path / "saved"
    _cache(fill=True, tail_dtype="F16").save(path)
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)
    cache = _cache(tail_dtype="F16")
    _refused(path, "altered: its SHA-256 is another", cache)
    tail = cache.sequence.tail
    assert tail is not None
    assert (tail.sinks, tail.start) == (4, 4)


@pytest.mark.parametrize(
    ("change", "message"), FORGED, ids=[f"{i} {message}" for i, (_, message) in enumerate(FORGED)]
)
def test_a_strangers_file(saved: Path, change: Change, message: str) -> None:
    """Its digests are right; nothing that it claims is allocated or trusted."""
    _forge(saved, change)

    def read() -> None:
        with pytest.raises(SnapshotError, match=message):
            read_header(saved)

    assert peak_bytes(read) < 2**20
    _refused(saved, message)


def test_a_reservation_that_no_machine_has(saved: Path) -> None:
    """It matters only where there is no cache yet."""
    _forge(saved, _set(reservation=2**40))
    cache = _cache()
    cache.load(saved)
    assert (cache.offset, cache.max_seq_len) == (LENGTH, 12)


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
        _refused(tmp_path / name, message)


def test_metadata_that_is_no_text(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a dict of str to str"):
        _cache().save(tmp_path / "saved", {"a": 1})  # type: ignore[dict-item]
    with pytest.raises(SnapshotError, match="its header would have"):
        _cache().save(tmp_path / "saved", {"a": "x" * 17 * 2**20})
    assert not list(tmp_path.iterdir())


def test_caches_that_are_neither_saved_loaded_nor_forked(saved: Path) -> None:
    released, divided = _cache(), _cache()
    released.release()
    divided.pool.divided = True
    refused = [
        (released, RuntimeError, "was released"),
        (divided, SnapshotError, "divided over several ranks"),
    ]
    for cache, kind, message in refused:
        for use in (lambda cache=cache: cache.save(saved), lambda cache=cache: cache.load(saved), cache.fork):
            with pytest.raises(kind, match=message):
                use()
    assert read_header(saved).length == LENGTH
