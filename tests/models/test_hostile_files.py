"""Files of a model folder made to do harm: one clear line each, no large allocation."""

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import reference_model, save_checkpoint
from support.hostile import MESSAGES, SETTINGS, change, file_bytes, refused, sparse, tensor

import kvant
from kvant.errors import CheckpointError, KvantError, ModelError, PromptError
from kvant.models import ModelConfig, load_decoder
from kvant.models.parameters import matrices, vectors
from kvant.text.tokenizer import load_tokenizer
from kvant.tools.bench.adapters import MLXLM
from kvant.tools.bench.engines import EngineSpec

# Safetensors.


TWO = tensor(2)
ONE = json.dumps(TWO).encode()
BAD_HEADERS = {
    "no bytes": (b"", "not a whole safetensors file"),
    "less than a length": (bytes(7), "not a whole safetensors file"),
    "half a header": (file_bytes({"a": TWO}, 8)[:40], "not a whole safetensors file"),
    "a hole": (file_bytes({"a": tensor(2, start=4)}, 12), "overlap, at byte 0"),
    "an overlap": (file_bytes({"a": TWO, "b": tensor(2, start=4)}, 12), "overlap, at byte 4"),
    "two tensors in the same place": (file_bytes({"a": TWO, "b": TWO}, 8), "overlap, at byte 0"),
    "data nobody names": (file_bytes({"a": TWO}, 12), "have 8 bytes; 12 are there"),
    "less data": (file_bytes({"a": TWO}, 4), "have 8 bytes; 4 are there"),
    "negative offsets": (file_bytes({"a": tensor(2, start=-8)}, 8), "no lists of counts"),
    "offsets the wrong way": (file_bytes({"a": TWO | {"data_offsets": [8, 0]}}, 8), "other bytes than"),
    "a shape of other bytes": (file_bytes({"a": TWO | {"shape": [3]}}, 8), "other bytes than"),
    "a negative size": (file_bytes({"a": TWO | {"shape": [-2]}}, 8), "no lists of counts"),
    "a product that overflows": (file_bytes({"a": TWO | {"shape": [2**32, 2**32]}}, 8), "other bytes than"),
    "one that overflows to nothing": (file_bytes({"a": tensor(0) | {"shape": [2**32] * 2}}, 0), "other bytes than"),
    "ten gigabytes claimed": (file_bytes({"a": tensor(2_500_000_000)}, 8), "have 10000000000 bytes; 8 are there"),
    "a header longer than the file": (file_bytes({"a": TWO}, 8, claim=10**10), "10000000000 bytes in a file of"),
    "the longest header": (file_bytes({"a": TWO}, 8, claim=2**64 - 1), "a header of 1844674407370955"),
    "a header of nothing": (file_bytes(b"", 0), "a header of 0 bytes"),
    "a tensor twice": (file_bytes(b'{"a":' + ONE + b',"a":' + ONE + b"}", 8), "'a' is there twice"),
    "a shape twice": (file_bytes(b'{"a":' + ONE[:-1] + b',"shape":[1,2]}}', 8), "'shape' is there twice"),
    "deep JSON": (file_bytes(b'{"a":' + b"[" * 100_000, 8), "recursion"),
    "deep metadata": (file_bytes(b'{"__metadata__":' + b'{"a":' * 900 + b"1" + b"}" * 901, 8), "object of strings"),
    "a name that is no UTF-8": (file_bytes(b'{"\xff":' + ONE + b"}", 8), "utf-8"),
    "a list": (file_bytes(b"[]", 0), "a JSON list; expected an object"),
    "an unknown dtype": (file_bytes({"a": tensor(2, dtype="F33")}, 8), "dtype 'F33'; expected one of F64"),
    "an escape in a name": (file_bytes({"\x1b[2J": TWO}, 8), r"unexpected tensor \\x1b\[2J"),
}


@pytest.mark.parametrize(("data", "message"), BAD_HEADERS.values(), ids=BAD_HEADERS.keys())
def test_bad_headers(folder: Path, data: bytes, message: str) -> None:
    (folder / "model.safetensors").write_bytes(data)
    refused(folder, CheckpointError, message)


def test_a_header_that_is_too_long_is_not_read(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 50_000_000))
    os.truncate(path, 60_000_000)
    refused(folder, CheckpointError, "a header of 50000000 bytes; expected at most 16777216")


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    config = ModelConfig.from_folder(folder)
    shapes: dict[str, tuple[int, ...]] = {name: (size,) for name, size in vectors(config).items()}
    return shapes | {f"{path}.weight": size for path, size in matrices(config).items() if path != "lm_head"}


def test_shapes_are_refused_before_anything_is_read(folder: Path) -> None:
    """The last tensor of a file of 40 GB is wrong."""
    change(folder / "config.json", vocab_size=2**24, hidden_size=600, num_attention_heads=1, num_key_value_heads=1)
    sparse(folder, _shapes(folder) | {"model.norm.weight": (7,)})
    refused(folder, CheckpointError, r"model\.norm\.weight has shape \(7,\); expected \(600,\)")


def test_more_bytes_than_memory(folder: Path) -> None:
    """Files and config agree; there is only no machine for them."""
    change(folder / "config.json", vocab_size=2**24, hidden_size=2**15)
    sparse(folder, _shapes(folder))
    refused(folder, CheckpointError, "the tensors have 2[0-9]{3}.[0-9]{2} GB; this machine has")


@pytest.mark.parametrize("shape", [(0,), (0, 64), (64, 0), (), (1, 64)])
def test_odd_shapes(folder: Path, shape: tuple[int, ...]) -> None:
    sparse(folder, _shapes(folder) | {"model.norm.weight": shape})
    refused(folder, CheckpointError, r"model\.norm\.weight has shape .*; expected \(64,\)")


@pytest.mark.parametrize(("dtype", "length"), [("F64", 32), ("I32", 64), ("F8_E8M0", 256), ("U32", 64)])
def test_a_wrong_dtype_at_the_end(folder: Path, dtype: str, length: int) -> None:
    shapes = _shapes(folder)
    last = {"model.norm.weight": shapes.pop("model.norm.weight")}
    sparse(folder, shapes | last, dtype=dtype, shape=[length])
    refused(folder, CheckpointError, r"model\.norm\.weight has (dtype|shape)")


# Indices.


@pytest.fixture
def index(folder: Path) -> Path:
    """The index of the model in two shards."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "model.safetensors").unlink()
    save_checkpoint(folder, config, reference_model(config), shards=2)
    return folder / "model.safetensors.index.json"


BAD_MAPS: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda names: [*names], "no weight_map"),
    (lambda names: {}, "no weight_map"),
    (lambda names: "model.safetensors", "no weight_map"),
    (lambda names: names | {"x": "../x.safetensors"}, r"shard '\.\./x\.safetensors'"),
    (lambda names: names | {"x": "/x.safetensors"}, r"shard '/x\.safetensors'"),
    (lambda names: names | {"x": "x\0.safetensors"}, "shard 'x"),
    (lambda names: names | {"x": ["x.safetensors"]}, "shard \\['x"),
    (lambda names: names | {"x": "x" * 300 + ".safetensors"}, "no such file|cannot be read"),
    (lambda names: names | {"x": names["model.norm.weight"]}, "tensor x is missing; the index says it is there"),
    (
        lambda names: names | {"model.norm.weight": next(n for n in names.values() if n != names["model.norm.weight"])},
        r"model\.norm\.weight is missing; the index says",
    ),
]


@pytest.mark.parametrize(("change", "message"), BAD_MAPS)
def test_bad_indices(index: Path, change: Callable[[dict[str, Any]], Any], message: str) -> None:
    raw = json.loads(index.read_text())
    index.write_text(json.dumps(raw | {"weight_map": change(raw["weight_map"])}))
    refused(index.parent, CheckpointError, message)


BAD_JSON = {
    "deep": ("[" * 100_000, "not JSON"),
    "deep objects": ('{"a":' * 5000 + "1" + "}" * 5000, "recursion|not JSON|weight_map|is missing|is not supported"),
    "a key twice": ('{"weight_map": {}, "a": {"b": 1, "b": 2}}', "'b' is there twice"),
    "a mark of byte order": ('\ufeff{"a": 1}', "BOM"),
    "no UTF-8": (b'{"a": "\xff"}', "not text"),
    "a number of 10,000 digits": ('{"a": ' + "9" * 10_000 + "}", "not JSON: Exceeds the limit"),
    "a list": ("[]", "a JSON list; expected an object"),
    "nothing": ("", "not JSON"),
}


@pytest.mark.parametrize(("text", "message"), BAD_JSON.values(), ids=BAD_JSON.keys())
def test_bad_json_in_the_index(index: Path, text: str | bytes, message: str) -> None:
    index.write_bytes(text if isinstance(text, bytes) else text.encode())
    refused(index.parent, CheckpointError, message)


@pytest.mark.parametrize("name", [*SETTINGS, "tokenizer.json", "special_tokens_map.json"])
@pytest.mark.parametrize(("text", "message"), [v for k, v in BAD_JSON.items() if k != "deep objects"])
def test_bad_json(folder: Path, name: str, text: str | bytes, message: str) -> None:
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    refused(folder, ModelError, f"{name}: .*{message}")


@pytest.mark.parametrize(("name", "limit"), [("config.json", 2**22), ("tokenizer.json", 2**26)])
def test_files_that_are_too_long(folder: Path, name: str, limit: int) -> None:
    os.truncate(folder / name, 10**12)
    refused(folder, ModelError, f"{name}: 1000000000000 bytes; expected at most {limit}")


def test_an_index_that_is_too_long(index: Path) -> None:
    os.truncate(index, 10**12)
    refused(index.parent, CheckpointError, "1000000000000 bytes; expected at most")


def test_a_shard_nobody_names_is_not_opened(index: Path) -> None:
    (index.parent / "model-00003-of-00002.safetensors").write_bytes(b"no safetensors")
    assert load_decoder(index.parent).config.vocab_size == 1280
    with pytest.raises(CheckpointError, match=r"model-00003-of-00002\.safetensors: not among the model's files"):
        MLXLM(EngineSpec("mlx-lm", 0), index.parent, 512)


# Tokenizers.


def test_an_absurd_token_id_makes_no_table(folder: Path) -> None:
    path = folder / "tokenizer.json"
    raw = json.loads(path.read_text())
    raw["model"]["vocab"]["a"] = 2**32 - 1
    path.write_text(json.dumps(raw))
    refused(folder, ModelError, "token id 4294967295; expected an int from 0 to 16777215")
    raw["model"]["vocab"]["a"] = 5
    raw["added_tokens"][0]["id"] = 10**12
    path.write_text(json.dumps(raw))
    refused(folder, ModelError, "token id 1000000000000")


BAD_TOKENIZERS: list[tuple[str, dict[str, Any], str]] = [
    ("tokenizer.json", {"model": []}, "no model"),
    ("tokenizer.json", {"added_tokens": [5]}, "added_tokens is not a list of objects"),
    ("tokenizer.json", {"normalizer": json.loads("[" * 300 + "]" * 300)}, "cannot be loaded"),
    ("tokenizer.json", {"version": "3.0"}, "cannot be loaded"),
    ("tokenizer_config.json", {"chat_template": 5}, "chat_template is a JSON int; expected a string"),
    ("tokenizer_config.json", {"chat_template": [{"name": "default"}]}, "objects of a name and a template"),
    ("tokenizer_config.json", {"eos_token": {"content": "x", "color": "red"}}, "a token has 'color'"),
    ("tokenizer_config.json", {"eos_token": 5}, "a token is a JSON int; expected a string"),
    ("tokenizer_config.json", {"added_tokens_decoder": {"x": {"content": "a"}}}, "not an object of tokens by id"),
    ("tokenizer_config.json", {"added_tokens_decoder": {"5": {}}}, "a token has no content"),
    ("tokenizer_config.json", {"additional_special_tokens": "abc"}, "no list of tokens"),
    ("added_tokens.json", {"x": "y"}, "expected an id for every token"),
]


@pytest.mark.parametrize(("name", "changes", "message"), BAD_TOKENIZERS)
def test_bad_tokenizers(folder: Path, capfd: pytest.CaptureFixture[str], name: str, changes: Any, message: str) -> None:
    change(folder / name, **changes)
    refused(folder, ModelError, message)
    assert capfd.readouterr().out == ""


def test_replacements_in_deep_sequences(folder: Path) -> None:
    path = folder / "tokenizer.json"
    raw = json.loads(path.read_text()) | {"normalizer": "HERE"}
    deep = '{"type": "Sequence", "normalizers": [' * 450 + "]}" * 450
    path.write_text(json.dumps(raw).replace('"HERE"', deep))
    refused(folder, ModelError, r"nested too deeply|recursion")


def test_a_list_of_templates(folder: Path) -> None:
    for path in (folder / "chat_template.jinja", *(folder / "additional_chat_templates").iterdir()):
        path.unlink()
    named = [{"name": "default", "template": "first"}, {"name": "other", "template": "{{ 'a' * 10**10 }}"}]
    change(folder / "tokenizer_config.json", chat_template=named)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.apply_chat_template(MESSAGES, tokenize=False) == "first"
    with pytest.raises(KvantError, match="too much memory"):
        tokenizer.apply_chat_template(MESSAGES, chat_template="other")


def test_an_empty_template_makes_an_empty_prompt(folder: Path) -> None:
    """It was an AssertionError."""
    (folder / "chat_template.jinja").write_text("")
    shutil.rmtree(folder / "additional_chat_templates")
    model, tokenizer = kvant.load(folder)
    assert tokenizer.apply_chat_template(MESSAGES, tokenize=False) == ""
    with pytest.raises(PromptError, match="the prompt is empty"):
        kvant.generate(model, tokenizer, tokenizer.apply_chat_template(MESSAGES))
