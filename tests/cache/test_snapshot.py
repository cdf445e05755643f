"""A cache saved, loaded and forked: what follows is what an uninterrupted cache gives, bit by bit."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import kvant  # isort: skip  (before MLX: it loads a faster BLAS)
import mlx.core as mx
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file
from support import snapshot_writer
from support.counts import count
from support.numbers import peak_bytes
from support.pools import TEXT

from kvant.cache import ModelCache
from kvant.cache.snapshot import read_header
from kvant.models import Decoder
from kvant.operators.quantization import dequantize

Pocket = tuple[Decoder, Any]
IDS = [(7 + 31 * i) % 900 for i in range(70)]
MORE = [[5], [6, 7, 8], [9], list(range(10, 40)), [11]]
FORMATS: list[dict[str, Any]] = [
    {"kv_bits": 8},
    {"kv_bits": 4, "kv_group_size": 16},
    {"kv_bits": 0},
    {"kv_bits": 8, "bias_split": False},
    {"kv_bits": 4, "kernels": "unfused"},
]


def _logits(model: Decoder, cache: ModelCache) -> list[mx.array]:
    return [model(mx.array([ids]), cache=cache) for ids in MORE]


def _same(one: list[mx.array], other: list[mx.array]) -> bool:
    return all(map(mx.array_equal, one, other))


@pytest.mark.parametrize("options", FORMATS, ids=str)
@pytest.mark.parametrize("reserved", [128, 110, 300])
def test_the_next_tokens_are_those_of_an_uninterrupted_run(
    pocket: Pocket, tmp_path: Path, options: dict[str, Any], reserved: int
) -> None:
    model, _ = pocket
    first = model.make_cache(128, **options)
    model(mx.array([IDS]), cache=first)
    assert first.trim(4) == 4
    first.save(tmp_path / "saved", {"title": "A fox", "größe": "\n"})
    loaded, forked = model.make_cache(reserved, **options), first.fork()
    model(mx.array([[800, 801, 802]]), cache=loaded)  # it is emptied first
    assert loaded.load(tmp_path / "saved") == {"title": "A fox", "größe": "\n"}
    assert loaded.ids == forked.ids == first.ids == IDS[:-4]
    assert (loaded.max_seq_len, forked.max_seq_len) == (reserved, 128)
    assert (forked.nbytes, forked.pool.identity) == (first.nbytes, first.pool.identity)
    assert first.pool.identity is not None
    expected = _logits(model, first)
    assert _same(_logits(model, loaded), expected)
    assert _same(_logits(model, forked), expected)


def test_a_fork_reserves_its_memory_at_once(pocket: Pocket) -> None:
    model, _ = pocket
    first = model.make_cache(2048)
    model(mx.array([IDS]), cache=first)
    rows = sum(
        array.nbytes for layer in first.pool.layers for array in layer.arrays
    )  # not the tables, which are only read
    mx.synchronize()
    before = mx.get_active_memory()
    fork = first.fork()
    assert rows * 0.99 < mx.get_active_memory() - before < rows * 1.05
    model(mx.array([[5]]), cache=fork)
    mx.synchronize()
    assert mx.get_active_memory() - before < rows * 1.05


def test_any_reader_reads_it(pocket: Pocket, tmp_path: Path) -> None:
    """safetensors' own reader, and NumPy: the digests, the ids, and keys as attention reads them."""
    model, _ = pocket
    cache = model.make_cache(2048)
    model(mx.array([IDS]), cache=cache)
    path = tmp_path / "saved"
    cache.save(path, {"a": "b"})
    data = path.read_bytes()
    assert hashlib.sha256(data[:-32]).digest() == data[-32:]
    header = 8 + int.from_bytes(data[:8], "little")
    assert hashlib.sha256(data[:header]).digest() == data[header : header + 32]
    with safe_open(path, "np") as file:
        text = file.metadata()
        assert len(list(file.keys())) == 3 + 4 * len(model.layers)
    assert (text["version"], text["kvant"]) == ("2", kvant.__version__)
    assert json.loads(text["metadata"]) == {"a": "b"}
    facts = json.loads(text["cache"])
    assert (facts["reservation"], facts["lengths"]) == (2048, [len(IDS)])
    tokenizer = (Path(kvant.__file__).parent / "pocket" / "tokenizer.json").read_bytes()
    assert facts["identity"]["tokenizer"] == hashlib.sha256(tokenizer).hexdigest()
    stored = load_file(path)
    assert stored["ids.0"].tolist() == IDS
    expected = dequantize(*cache.pool.layers[1].arrays, quant_bit=8, quant_group=32)[:, :, : len(IDS)]
    values, scales = (
        stored[f"layers.1.sequences.0.{name}"].astype(np.float32) for name in ("cache", "scale")
    )
    np.testing.assert_allclose(values * np.repeat(scales, 32, axis=-1), np.array(expected), rtol=1e-3)
    # Only rows in use are stored: 70 of 2,048.
    assert len(data) < cache.nbytes * 70 / 2048 + 20_000


@pytest.mark.parametrize(("length", "lost"), [(30, 0), (300, 0), (300, 9), (700, 4)])
def test_of_a_window_a_file_has_the_rows_that_it_always_had(
    windows: Decoder, tmp_path: Path, length: int, lost: int
) -> None:
    """Version 1: those of the window and 16 tokens before it, and of a longer text that it was, in their
    order.
    """
    cache, loaded = (windows.make_cache(900, kv_bits=0) for _ in range(2))
    windows(mx.array([TEXT[:length]]), cache=cache)
    cache.trim(lost)
    cache.save(tmp_path / "saved")
    header, stored = read_header(tmp_path / "saved"), load_file(tmp_path / "saved")
    assert length - lost <= header.written <= length
    loaded.load(tmp_path / "saved")
    for number, window in enumerate((None, 40, 200)):
        first = 0 if window is None else max(0, header.written - window - 16)
        rows = stored[f"layers.{number}.sequences.0.cache"]
        layer = cache.pool.layers[number]
        for expected in (
            cache.sequence.copied_rows(layer, first),
            loaded.sequence.copied_rows(loaded.pool.layers[number], first),
        ):
            np.testing.assert_array_equal(rows, np.array(expected[0]))
    assert loaded.can_trim_to(max(0, header.written - 17))
    assert _same(_logits(windows, loaded), _logits(windows, cache))


def test_a_file_is_its_owners_and_nothing_is_left_beside_it(pocket: Pocket, tmp_path: Path) -> None:
    """A link is followed to be read, and replaced when it is written."""
    model, _ = pocket
    cache = model.make_cache(64)
    model(mx.array([IDS[:5]]), cache=cache)
    path, link = tmp_path / "saved", tmp_path / "link"
    path.write_text("what was there before")
    path.chmod(0o644)
    before = os.umask(0)
    try:
        cache.save(str(path))
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["saved"]
    link.symlink_to("saved")
    cache.load(link)
    cache.trim(2)
    cache.save(link)
    assert not link.is_symlink()
    assert [read_header(name).length for name in (path, link)] == [5, 3]


@pytest.mark.parametrize("free", [0, 1000])
def test_no_second_copy_is_held(tmp_path: Path, free: int) -> None:
    """Saving and loading take about a layer more than the reservation, whether it is full or not."""
    layers, tokens = 12, count(20_000, 100_000)

    caches = [snapshot_writer.make(tokens + free, layers)]
    caches[0].batch.begin(mx.zeros((1, tokens), mx.int32))
    caches[0].commit()
    nbytes = caches[0].nbytes
    assert peak_bytes(lambda: caches[0].save(tmp_path / "saved")) < nbytes / layers * 1.5
    caches.clear()
    assert (
        abs(peak_bytes(lambda: caches.append(snapshot_writer.make(tokens + free, layers))) - nbytes)
        < nbytes * 0.02
    )
    assert peak_bytes(lambda: caches[0].load(tmp_path / "saved")) < nbytes / layers * 1.5
    assert caches[0].offset == tokens
