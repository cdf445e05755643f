"""Files that are refused: one line that names what was given and what was expected, and nothing left
behind.
"""

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import Keys
from support.checkpoints import llama_config
from support.gguf_files import Content, export, random_weights
from support.hostile import one_line

from kvant.errors import ConvertError
from kvant.tools.gguf import reader
from kvant.tools.gguf.importer import import_gguf
from kvant.tools.gguf.reader import open_gguf

SIZES = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 704, "num_hidden_layers": 1}
CONFIG = llama_config(
    **SIZES, num_attention_heads=2, num_key_value_heads=1, head_dim=32, attention_bias=False
)
CONFIG["mlp_bias"] = False
Change = Callable[[Content], None]


def content() -> Content:
    return export(CONFIG, random_weights(CONFIG), lambda name, values: "Q8_0", "smollm2")


def _refused(path: Path, message: str) -> None:
    before = sorted(os.listdir(path.parent))
    with one_line(ConvertError, message) as caught:
        import_gguf(path, path.parent / "folder")
    assert path.name in str(caught.value)
    assert sorted(os.listdir(path.parent)) == before


def _key(key: str, value: Any) -> Change:
    def change(content: Content) -> None:
        content.metadata[content.key(key)] = value

    return change


def _without(key: str) -> Change:
    return lambda content: content.metadata.pop(content.key(key))


def _tensor(name: str, kind: str, *shape: int) -> Change:
    def change(content: Content) -> None:
        content.tensors[name] = (np.ones(shape, np.float32), kind)

    return change


def _drop(name: str) -> Change:
    return lambda content: content.tensors.pop(name)


def _architecture(content: Content) -> None:
    content.architecture = "gpt_neox"


def _bad_scale(content: Content) -> None:
    blocks = np.zeros((64, 68), np.uint8)
    blocks[7, :2] = np.array([np.inf], np.float16).view(np.uint8)
    content.tensors["blk.0.attn_q.weight"] = (blocks, "Q8_0")


REFUSED: list[tuple[Change, str]] = [
    (_architecture, r"general.architecture is 'gpt_neox'; expected llama, qwen2, qwen3, qwen3moe"),
    (
        _key(Keys.Attention.SLIDING_WINDOW, 64),
        r"llama.attention.sliding_window is 64, a setting that kvant does not",
    ),
    (_key(Keys.Split.LLM_KV_SPLIT_COUNT, 3), r"split.count is 3; expected one file"),
    (_key(Keys.LLM.EXPERT_COUNT, 8), r"llama.expert_count is 8, a setting"),
    (_key(Keys.Attention.HEAD_COUNT, [2, 2]), r"head_count is \[2, 2\]; expected one number for every layer"),
    (_key(Keys.Attention.HEAD_COUNT_KV, [1, 1]), r"num_key_value_heads is .*; expected"),
    (_key(Keys.Attention.HEAD_COUNT, "two"), r"head_count is two"),
    (_key(Keys.Attention.KEY_LENGTH, "wide"), r"value_length is 32; expected the width of a key, wide"),
    (_key(Keys.Attention.VALUE_LENGTH, 16), r"value_length is 16; expected the width of a key, 32"),
    (_key(Keys.Rope.DIMENSION_COUNT, 16), r"dimension_count is 16; expected the width of a key, 32"),
    (_key(Keys.Rope.FREQ_BASE, float("nan")), r"rope_theta is"),
    (_key(Keys.Rope.FREQ_BASE, "x"), r"rope_theta is"),
    (_key(Keys.Attention.LAYERNORM_RMS_EPS, float("nan")), r"rms_norm_eps is"),
    (_key(Keys.Rope.SCALING_TYPE, "longrope"), r"scaling.type is 'longrope'; expected none, linear or yarn"),
    (_key(Keys.Rope.SCALING_TYPE, "linear"), r"factor is"),
    (_key(Keys.LLM.BLOCK_COUNT, 2**31), r"num_hidden_layers is"),
    (_key(Keys.LLM.BLOCK_COUNT, 2), r"tensor blk.1.attn_q.weight is missing"),
    (_without(Keys.LLM.EMBEDDING_LENGTH), r"llama.embedding_length is missing"),
    (_without(Keys.Attention.LAYERNORM_RMS_EPS), r"layer_norm_rms_epsilon is missing"),
    (_without(Keys.Tokenizer.LIST), r"tokenizer.ggml.tokens is not a list of texts"),
    (_drop("token_embd.weight"), r"tensor token_embd.weight is missing"),
    (_drop("blk.0.ffn_up.weight"), r"tensor blk.0.ffn_up.weight is missing"),
    (_tensor("blk.0.ffn_up.weight", "Q8_0", 64, 32), r"ffn_up.weight is \(64, 32\); expected \(64, 64\)"),
    (_tensor("token_embd.weight", "Q8_0", 100, 64), r"tokens has \d+ tokens; the embedding has 100 rows"),
    (_tensor("blk.0.attn_norm.weight", "Q8_0", 64), r"attn_norm.weight is Q8_0; expected floats"),
    (
        _tensor("blk.0.attn_sinks.weight", "F32", 2),
        r"tensor 'blk.0.attn_sinks.weight' does not belong to a llama model",
    ),
    (
        _tensor("rope_freqs.weight", "F32", 16),
        r"rope_freqs.weight matches no known scaling of Llama 3",
    ),
    (
        _tensor("rope_freqs.weight", "F32", 8),
        r"rope_freqs.weight is F32 \(8,\); expected one float32 per pair",
    ),
    (_tensor("rope_freqs.weight", "F16", 16), r"rope_freqs.weight is F16"),
    (_bad_scale, r"tensor blk.0.attn_q.weight has a scale that is not a finite float16"),
    (_tensor("blk.0.ffn_up.weight", "TQ1_0", 64, 256), r"is of type TQ1_0; expected F32, F16, Q4_0"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_a_model_that_is_not_imported(tmp_path: Path, change: Change, message: str) -> None:
    changed = content()
    change(changed)
    if change is _architecture:
        changed.metadata = {
            key: value for key, value in changed.metadata.items() if not key.startswith("llama.")
        }
    _refused(changed.write(tmp_path / "file.gguf"), message)


def test_positions_that_are_scaled_in_two_ways(tmp_path: Path) -> None:
    changed = content()
    changed.metadata |= {
        changed.key(Keys.Rope.SCALING_TYPE): "linear",
        changed.key(Keys.Rope.SCALING_FACTOR): 2.0,
    }
    changed.tensors["rope_freqs.weight"] = (np.ones(16, np.float32), "F32")
    _refused(changed.write(tmp_path / "file.gguf"), r"rope_freqs.weight")


def test_an_infinite_scale_times_nothing(tmp_path: Path) -> None:
    """Times a 6-bit 0 it is no number, of which NumPy would warn."""
    config = {**CONFIG, "hidden_size": 256}
    changed = export(config, random_weights(config), lambda name, values: "Q8_0", "smollm2")
    blocks = np.zeros((64, 144), np.uint8)
    blocks[:, 1] = 0x7C
    changed.tensors["blk.0.ffn_up.weight"] = (blocks, "Q4_K")
    _refused(
        changed.write(tmp_path / "file.gguf"), "blk.0.ffn_up.weight has a scale that is not a finite float16"
    )


def _text(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def _file(
    tmp_path: Path,
    metadata: bytes = b"",
    keys: int = 0,
    tensors: list[tuple[str, tuple[int, ...], int, int]] | None = None,
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    count: int | None = None,
    data: bytes = bytes(4096),
) -> Path:
    """A file made byte by byte. tensors: name, dimensions as stored, number of the type, offset."""
    tensors = tensors or []
    made = magic + struct.pack("<IQQ", version, len(tensors) if count is None else count, keys) + metadata
    for name, shape, kind, offset in tensors:
        made += _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
    path = tmp_path / "file.gguf"
    path.write_bytes(made + bytes(-len(made) % 32) + data)
    return path


U8, TEXT, ARRAY = 0, 8, 9


def _value(kind: int, data: bytes, key: str = "a") -> bytes:
    return _text(key) + struct.pack("<I", kind) + data


HUGE = 2**63
SPOILED: list[tuple[dict[str, Any], str]] = [
    ({"magic": b"GGML"}, r"not a GGUF file"),
    ({"version": 1}, r"GGUF version 1; expected 2 or 3"),
    ({"version": 3 << 24}, r"GGUF version 50331648; expected 2 or 3, little-endian"),
    ({"count": HUGE}, rf"{HUGE} tensors; expected at most 65536"),
    ({"count": 60_000}, r"text|dimensions|cut short"),
    ({"keys": HUGE}, rf"{HUGE} metadata keys; expected at most 4096"),
    ({"keys": 4000}, r"metadata key '' is there twice"),
    ({"keys": 1, "metadata": struct.pack("<Q", HUGE)}, rf"{HUGE} bytes of text; expected at most 1024"),
    ({"keys": 1, "metadata": struct.pack("<Q", 1000), "data": b""}, r"cut short: 1000 bytes are expected"),
    ({"keys": 1, "metadata": _text(b"\xff")}, r"text that is not UTF-8"),
    ({"keys": 1, "metadata": _value(TEXT, struct.pack("<Q", HUGE))}, r"bytes of text; expected at most"),
    ({"keys": 1, "metadata": _value(13, b"")}, r"value of type 13; expected a number, text or an array"),
    (
        {"keys": 1, "metadata": _value(ARRAY, struct.pack("<IQ", U8, HUGE))},
        r"elements of an array; expected at most",
    ),
    ({"keys": 1, "metadata": _value(ARRAY, struct.pack("<IQ", U8, 2**20))}, r"cut short: 1048576 bytes"),
    ({"keys": 1, "metadata": _value(ARRAY, struct.pack("<IQ", 13, 1))}, r"value of type 13"),
    (
        {"keys": 1, "metadata": _value(ARRAY, struct.pack("<IQIQ", ARRAY, 1, ARRAY, 1))},
        r"value of type 9; expected",
    ),
    ({"keys": 2, "metadata": _value(U8, b"\1") * 2}, r"metadata key 'a' is there twice"),
    ({"tensors": [("t", (0,), 0, 0)]}, r"is \(0,\); expected rows of whole blocks"),
    ({"tensors": [("t", (33,), 8, 0)]}, r"is \(33,\); expected rows of whole blocks of 32"),
    ({"tensors": [("t", (1,) * 5, 0, 0)]}, r"has 5 dimensions; expected 1 to 4"),
    ({"tensors": [("t", (), 0, 0)]}, r"has 0 dimensions; expected 1 to 4"),
    ({"tensors": [("t", (2**62, 2**62, 2**62, 2**62), 0, 0)]}, r"ends at byte \d+; the file has"),
    ({"tensors": [("t", (32,), 0, HUGE)]}, r"ends at byte \d+; the file has"),
    ({"tensors": [("t", (32,), 0, 4)]}, r"has offset 4; expected a multiple of 32"),
    ({"tensors": [("t", (32,), 0, 0)] * 2}, r"tensor 't' is there twice"),
    ({"tensors": [("t", (32,), 0, 0), ("u", (32,), 0, 32)]}, r"tensor 'u' begins within another one"),
    (
        {"keys": 1, "metadata": _value(U8, b"\0", "general.alignment")},
        r"alignment is 0; expected an int from 1",
    ),
    (
        {"keys": 1, "metadata": _value(TEXT, _text("x"), "general.alignment")},
        r"general.alignment is x; expected",
    ),
    ({"keys": 1, "metadata": _value(7, b"\1", "general.alignment")}, r"general.alignment is True; expected"),
]


@pytest.mark.parametrize(("spoiled", "message"), SPOILED)
def test_a_file_that_breaks_the_format(tmp_path: Path, spoiled: dict[str, Any], message: str) -> None:
    _refused(_file(tmp_path, **spoiled), message)


def test_arrays_share_one_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elements become Python's objects, each many times larger than in the file."""
    monkeypatch.setattr(reader, "MAX_ELEMENTS", 50)
    arrays = [_value(ARRAY, struct.pack("<IQ", U8, 20) + bytes(20), name) for name in "abc"]
    with open_gguf(_file(tmp_path, b"".join(arrays[:2]), 2)) as file:
        assert file.metadata == {"a": [0] * 20, "b": [0] * 20}
    _refused(_file(tmp_path, b"".join(arrays), 3), "20 elements of an array; expected at most 10")


def test_a_number_of_every_type(tmp_path: Path) -> None:
    forms = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
    values = {kind: -1 if form in "bhiq" else 1.5 if form in "fd" else 1 for kind, form in forms.items()}
    metadata, keys = b"", 0
    for kind, form in forms.items():
        data = struct.pack(f"<{form}", values[kind])
        metadata += _value(kind, data, f"one {kind}")
        metadata += _value(ARRAY, struct.pack("<IQ", kind, 3) + 3 * data, f"three {kind}")
        metadata += _value(ARRAY, struct.pack("<IQ", kind, 0), f"none {kind}")
        keys += 3
    metadata += _value(ARRAY, struct.pack("<IQ", TEXT, 2) + _text("a") + _text("é"), "texts")
    with open_gguf(_file(tmp_path, metadata, keys + 1)) as file:
        for kind, value in values.items():
            assert file.metadata[f"one {kind}"] == value
            assert file.metadata[f"three {kind}"] == [value] * 3
            assert file.metadata[f"none {kind}"] == []
        assert file.metadata["texts"] == ["a", "é"]


@pytest.mark.parametrize("end", ["/dev/zero", "pipe", "folder", "nothing", "loop", "empty", "self"])
def test_what_is_no_regular_file(tmp_path: Path, end: str) -> None:
    path = tmp_path / "file.gguf"
    if end == "pipe":
        os.mkfifo(path)
    elif end == "folder":
        path.mkdir()
    elif end == "empty":
        path.touch()
    elif end in ("loop", "self"):
        path.symlink_to(path)
    elif end == "/dev/zero":
        path.symlink_to(end)
    _refused(path, "not a GGUF file" if end == "empty" else "not a regular file|cannot be read")


def test_every_cut_of_a_file_is_refused(tmp_path: Path) -> None:
    data = content().write(tmp_path / "whole.gguf").read_bytes()
    last = len(data) - 4096  # not only padding is missing
    step = max(last // 100, 1)
    for size in [*range(64), *range(64, last, step)]:
        path = tmp_path / "file.gguf"
        path.write_bytes(data[:size])
        _refused(path, "cut short|ends at byte|not a GGUF file")


def test_a_link_leads_to_a_file_of_the_hubs_cache(tmp_path: Path) -> None:
    """There a model's files are links to blobs."""
    content().write(tmp_path / "blob")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model.gguf").symlink_to("../blob")
    assert import_gguf(tmp_path / "snapshot" / "model.gguf", tmp_path / "folder")


@pytest.mark.parametrize("there", ["file", "folder", "link"])
def test_a_destination_in_use_stays(tmp_path: Path, there: str) -> None:
    path = content().write(tmp_path / "file.gguf")
    dest = tmp_path / "folder"
    if there == "file":
        dest.write_text("mine")
    elif there == "folder":
        dest.mkdir()
        (dest / "mine").touch()
    else:
        dest.symlink_to("nowhere")
    with one_line(ConvertError, "exists already; expected a new folder"):
        import_gguf(path, dest)
    assert sorted(os.listdir(tmp_path)) == ["file.gguf", "folder"]


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = content().write(tmp_path / "file.gguf")
    monkeypatch.setattr("shutil.disk_usage", lambda folder: _Usage(10))
    with one_line(ConvertError, r"kB are needed, 10 bytes are free"):
        import_gguf(path, tmp_path / "folder")
    assert os.listdir(tmp_path) == ["file.gguf"]


class _Usage:
    def __init__(self, free: int) -> None:
        self.free = free


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("write failed")])
def test_a_write_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    path = content().write(tmp_path / "file.gguf")

    def fail(*arguments: Any) -> None:
        raise error

    monkeypatch.setattr("mlx.core.save_safetensors", fail)
    with one_line(ConvertError, r"folder: cannot be written: .*(No space left|write failed)"):
        import_gguf(path, tmp_path / "folder")
    assert os.listdir(tmp_path) == ["file.gguf"]


def test_a_file_that_is_cut_while_it_is_imported(tmp_path: Path) -> None:
    """By somebody else: what is read afterwards is missing, and nothing of a memory map is touched."""
    path = content().write(tmp_path / "file.gguf")
    size = path.stat().st_size

    def cut(done: int, total: int) -> None:
        os.truncate(path, size // 2)

    with one_line(ConvertError, r"file.gguf: is cut short: \d+ bytes are expected at byte \d+"):
        import_gguf(path, tmp_path / "folder", cut)
    assert os.listdir(tmp_path) == ["file.gguf"]
    with open_gguf(content().write(path)) as file:
        os.truncate(path, size // 2)
        last = max(file.tensors.values(), key=lambda tensor: tensor.offset)
        with pytest.raises(ConvertError, match="is cut short"):
            file.blocks(last)
