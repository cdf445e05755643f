"""Files of a model folder made to do harm: one clear line each, no large allocation, and nothing of them
runs.
"""

import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from support.checkpoints import change_tensors, tensor_shapes
from support.hostile import OPENED, SETTINGS, change, file_bytes, refused, sparse, tensor

from kvant.errors import CheckpointError, ModelError
from kvant.models import ModelConfig

# What becomes of a file: other keys of its JSON, its content, or a function of its path.
Spoil = dict[str, Any] | str | bytes | Callable[[Path], object]
Harm = tuple[str, Spoil, str]  # and what is said
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TWO = tensor(2)
ONE = json.dumps(TWO).encode()
# test_checkpoint.py compares many more with what the safetensors library takes.
HEADERS: list[tuple[bytes, str]] = [
    (b"", "not a whole safetensors file"),
    (file_bytes({"a": TWO}, 8)[:40], "not a whole safetensors file"),
    (file_bytes({"a": TWO, "b": tensor(2, start=4)}, 12), "overlap, at byte 4"),
    (file_bytes({"a": TWO}, 4), "have 8 bytes; 4 are there"),
    (file_bytes({"a": tensor(2, start=-8)}, 8), "not lists of counts"),
    # and that overflows to nothing
    (file_bytes({"a": tensor(0) | {"shape": [2**32] * 2}}, 0), "other bytes than"),
    (file_bytes({"a": TWO}, 8, claim=10**10), "10000000000 bytes in a file of"),
    (file_bytes({"a": TWO}, 8, claim=2**64 - 1), "a header of 1844674407370955"),
    (file_bytes(b"", 0), "a header of 0 bytes"),
    (file_bytes(b'{"a":' + ONE + b',"a":' + ONE + b"}", 8), "'a' is there twice"),
    (file_bytes(b'{"a":' + b"[" * 100_000, 8), "recursion"),
    (file_bytes(b'{"__metadata__":' + b'{"a":' * 900 + b"1" + b"}" * 901, 8), "object of strings"),
    (file_bytes(b'{"\xff":' + ONE + b"}", 8), "utf-8"),
    (file_bytes(b"[]", 0), "a JSON list; expected an object"),
    (file_bytes({"a": tensor(2, dtype="F33")}, 8), "dtype 'F33'; expected one of F64"),
    (file_bytes({"\x1b[2J": TWO}, 8), r"unexpected tensor \\x1b\[2J"),
]


def _sparse(own: dict[str, tuple[int, ...]], config: dict[str, Any] | None = None, **last: Any) -> Spoil:
    """The model's tensors with others in place of some, which come last, in a file of next to no bytes."""

    def spoil(path: Path) -> None:
        change(path.with_name("config.json"), **config or {})
        shapes = tensor_shapes(ModelConfig.from_folder(path.parent))
        del shapes["lm_head.weight"]
        sparse(path.parent, {name: size for name, size in shapes.items() if name not in own} | own, **last)

    return spoil


def _long_header(path: Path) -> None:
    path.write_bytes(struct.pack("<Q", 50_000_000))
    os.truncate(path, 60_000_000)


NORM, SHAPED = "model.norm.weight", r"model\.norm\.weight has shape .*; expected \(64,\)"
LONG = {"hidden_size": 600, "num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": 2**24}
SCALES = {"model.embed_tokens.scales": mx.ones(3)}
TENSORS: list[tuple[Spoil, str]] = [
    (lambda path: change_tensors(path, SCALES), "no quantization for model.embed_tokens"),
    (_long_header, "a header of 50000000 bytes; expected at most 16777216"),
    # the last of 40 GB
    (_sparse({NORM: (7,)}, LONG), r"model\.norm\.weight has shape \(7,\); expected \(600,\)"),
    (
        _sparse({}, {"vocab_size": 2**24, "hidden_size": 2**15}),
        r"the tensors have 2\d{3}.\d\d GB; this machine has",
    ),
    *((_sparse({NORM: shape}), SHAPED) for shape in ((0,), (0, 64), (64, 0), (), (1, 64))),
    *(
        (_sparse({NORM: (64,)}, dtype=dtype, shape=[length]), r"model\.norm\.weight has (dtype|shape)")
        for dtype, length in (("F64", 32), ("I32", 64), ("F8_E8M0", 256), ("U32", 64))
    ),
]


def _map(made: Callable[[dict[str, Any]], Any]) -> Spoil:
    """Another weight_map, made of the one that is there."""
    return lambda path: change(path, weight_map=made(json.loads(path.read_text())["weight_map"]))


MAPS: list[tuple[Spoil, str]] = [
    (_map(lambda names: {}), "no weight_map"),
    (_map(lambda names: names | {"x": "../x.safetensors"}), r"shard '\.\./x\.safetensors'"),
    (_map(lambda names: names | {"x": "/x.safetensors"}), r"shard '/x\.safetensors'"),
    (_map(lambda names: names | {"x": "x\0.safetensors"}), "shard 'x"),
    (_map(lambda names: names | {"x": ["x.safetensors"]}), "shard \\['x"),
    (_map(lambda names: names | {"x": "x" * 300 + ".safetensors"}), "no such file|cannot be read"),
    (_map(lambda names: names | {"x": names[NORM]}), "tensor x is missing, although the index lists it"),
    (
        _map(lambda names: names | {NORM: min({*names.values()} - {names[NORM]})}),
        "norm.weight is missing, although the index",
    ),
]
NO_JSON: list[tuple[str | bytes, str]] = [
    ("[" * 100_000, "not JSON"),
    ('{"weight_map": {}, "a": {"b": 1, "b": 2}}', "'b' is there twice"),
    ('\ufeff{"a": 1}', "BOM"),
    (b'{"a": "\xff"}', "not text"),
    ('{"a": ' + "9" * 10_000 + "}", "not JSON: Exceeds the limit"),
    ("[]", "a JSON list; expected an object"),
]
DEEP = ('{"a":' * 5000 + "1" + "}" * 5000, "recursion|not JSON|weight_map|is missing|is not supported")


def _edit(*keys: str | int, to: Any) -> Spoil:
    """One value deep in a JSON file."""

    def spoil(path: Path) -> None:
        raw = holder = json.loads(path.read_text())
        for key in keys[:-1]:
            holder = holder[key]
        holder[keys[-1]] = to
        path.write_text(json.dumps(raw))

    return spoil


def _deep_sequences(path: Path) -> None:
    """Replacements inside each other, deeper than Python's parser goes."""
    change(path, normalizer="HERE")
    path.write_text(
        path.read_text().replace('"HERE"', '{"type": "Sequence", "normalizers": [' * 450 + "]}" * 450)
    )


TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
TOKENIZERS: list[Harm] = [
    (TOKENIZER, {"model": []}, "no model"),
    (TOKENIZER, {"added_tokens": [5]}, "added_tokens is not a list of objects"),
    (TOKENIZER, {"normalizer": json.loads("[" * 300 + "]" * 300)}, "cannot be loaded"),
    (TOKENIZER, {"version": "3.0"}, "cannot be loaded"),
    (TOKENIZER, _deep_sequences, "nested too deeply|recursion"),
    (
        TOKENIZER,
        _edit("model", "vocab", "a", to=2**32 - 1),
        "token id 4294967295; expected an int from 0 to 16777215",
    ),
    (TOKENIZER, _edit("added_tokens", 0, "id", to=10**12), "token id 1000000000000"),
    (TOKENIZER_CONFIG, {"chat_template": 5}, "chat_template is a JSON int; expected a string"),
    (TOKENIZER_CONFIG, {"chat_template": [{"name": "default"}]}, "objects of a name and a template"),
    (TOKENIZER_CONFIG, {"eos_token": {"content": "x", "color": "red"}}, "a token has 'color'"),
    (TOKENIZER_CONFIG, {"eos_token": 5}, "a token is a JSON int; expected a string"),
    (TOKENIZER_CONFIG, {"added_tokens_decoder": {"x": {"content": "a"}}}, "not an object of tokens by id"),
    (TOKENIZER_CONFIG, {"added_tokens_decoder": {"5": {}}}, "a token has no content"),
    (TOKENIZER_CONFIG, {"additional_special_tokens": "abc"}, "not a list of tokens"),
    ("added_tokens.json", {"x": "y"}, "expected an id for every token"),
]


def _link_out(path: Path) -> None:
    shutil.copy(path.with_name(path.name + ".was"), path.parents[2] / "outside")
    path.symlink_to(path.parents[2] / "outside")


NO_FILES: list[tuple[Callable[[Path], object], str]] = [
    (os.mkfifo, "not a regular file"),  # whoever opened it would wait for ever
    (Path.mkdir, "not a regular file"),
    (lambda path: path.symlink_to("/dev/zero"), "a link out of the model folder, to /dev/zero"),
    (_link_out, "a link out of the model folder, to .*/outside"),
    (lambda path: path.symlink_to(path.name), "cannot be read"),
    (lambda path: path.symlink_to("nothing"), "a link to nothing, which is not there"),
]


def _in_place(make: Callable[[Path], object]) -> Spoil:
    """What a function makes under the name of a file."""

    def spoil(path: Path) -> None:
        path.rename(path.with_name(path.name + ".was"))
        make(path)

    return spoil


class Marker:
    """Unpickled, it would write a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def _pickles(path: Path) -> None:
    path.unlink()
    for name in ("pytorch_model.bin", "training_args.bin"):
        path.with_name(name).write_bytes(pickle.dumps(Marker(path.parents[1] / "executed")))


def _pickles_for_shards(path: Path) -> None:
    for shard in path.parent.glob("*.safetensors"):
        shard.unlink()
    _pickles(path)


CODE: list[Harm] = [
    ("config.json", {"auto_map": {"AutoModelForCausalLM": "evil.Model"}}, "auto_map names code"),
    ("config.json", {"model_file": "evil.py"}, "model_file names code"),
    (TOKENIZER_CONFIG, {"auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}}, "auto_map names code"),
    (TOKENIZER_CONFIG, {"fast_tokenizer_files": ["tokenizer.1.json"]}, "fast_tokenizer_files names other"),
    (WEIGHTS, _pickles, r"neither model\.safetensors nor .*; pytorch_model\.bin is a pickle.*never opened"),
]
NATIVE: list[Harm] = [
    *((WEIGHTS, *harm) for harm in (*HEADERS, *TENSORS)),
    *(
        (name, text, f"{name}: .*{said}")
        for name in (*SETTINGS, TOKENIZER, OPENED[6])
        for text, said in NO_JSON
    ),
    *(
        (
            name,
            lambda path: os.truncate(path, 10**12),
            f"{name}: 1000000000000 bytes; expected at most {limit}",
        )
        for name, limit in (("config.json", 2**22), (TOKENIZER, 2**26))
    ),
    *TOKENIZERS,
    *((name, _in_place(make), f"{Path(name).name}: {said}") for name in OPENED for make, said in NO_FILES),
    *CODE,
]
SECOND = "model-00002-of-00002.safetensors"
SHARDS: list[Harm] = [
    (
        SECOND,
        lambda path: shutil.copy(path.with_name("model-00001-of-00002.safetensors"), path),
        "is also in",
    ),
    (SECOND, Path.unlink, f"{SECOND}: no such file"),
    (INDEX, _pickles_for_shards, r"neither model\.safetensors nor model\.s"),
    ("config.json", Path.unlink, r"config\.json: no such file"),
    *((INDEX, *harm) for harm in (*MAPS, *NO_JSON, DEEP)),
    (INDEX, lambda path: os.truncate(path, 10**12), "1000000000000 bytes; expected at most"),
]
LAYER_NORM, DOWN = "model.layers.0.input_layernorm.weight", "model.layers.0.mlp.experts.down_proj_blocks"
ROUTER = "model.layers.0.mlp.router.weight"
BRIDGED_TENSORS: list[tuple[dict[str, mx.array | None], str]] = [
    ({LAYER_NORM: None}, f"tensor {LAYER_NORM} is missing"),
    ({ROUTER: None}, f"{ROUTER} is missing"),
    ({"model.layers.7.x": mx.zeros(3)}, "tensor model.layers.7.x is unexpected"),
    ({LAYER_NORM: mx.zeros(5)}, rf"tensor {LAYER_NORM} has shape \(5,\); expected \(32,\)"),
    ({LAYER_NORM: mx.zeros(32, mx.int32)}, f"tensor {LAYER_NORM} has dtype int32; expected a float"),
    ({DOWN: mx.zeros((4, 32, 1, 9), mx.uint8)}, "the tensors do not fit a gpt_oss"),
]
NOT_TAKEN = "mlx-lm's class for gpt_oss rejects it"
NO_MODE: dict[str, Any] = {"quantization_config": None}
BRIDGED_SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "gpt_oss_2"}, "architecture gpt_oss_2 is not supported"),
    ({"model_type": "bitnet"}, "needs Metal kernels"),
    ({"model_file": "model.py"}, "model_file names code in the model folder"),
    ({"auto_map": {"AutoModel": "x.py"}}, "auto_map names code"),
    ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000; expected at most 1024"),
    ({"num_local_experts": 10**5}, "num_local_experts is 100000; expected at most 4096"),
    (
        {"num_hidden_layers": 900, "num_local_experts": 4000},
        "num_local_experts is 3600000; expected at most 131072",
    ),
    ({"vocab_size": 2**40}, "vocab_size is 1099511627776; expected at most 16777216"),
    ({"hidden_size": -(2**60)}, "hidden_size is -1152921504606846976"),
    ({"vocab_size": 2**24}, r"has shape \(64, 32\); expected \(16777216, 32\)"),
    ({"hidden_size": 2**24, "intermediate_size": 2**24}, "MLX has no such format"),
    ({"hidden_size": "32"}, NOT_TAKEN),
    ({"num_hidden_layers": 0}, "rejects it|is unexpected"),
    ({"layer_types": ["sliding_attention"] * 2}, NOT_TAKEN),
    ({"max_position_embeddings": -5}, "max_position_embeddings is -5"),
    ({"eos_token_id": "end"}, "eos_token_id is 'end'"),
    ({"quantization_config": {"quant_method": "awq"}}, "quantization method 'awq' is not supported"),
    (NO_MODE, "is unexpected"),
    (NO_MODE | {"quantization": {"bits": 7, "group_size": 64}}, "quantization bits is 7"),
    (NO_MODE | {"quantization": {"bits": 4, "group_size": 64, "mode": "x"}}, "mode 'x'"),
    ({"vocab_size": True}, "rejects it|vocab_size is True"),
]


def _without_a_tokenizer(path: Path) -> None:
    path.with_name(TOKENIZER).unlink()
    change(path, model_type="gpt_oss_2")


BRIDGED: list[Harm] = [
    *((WEIGHTS, lambda path, own=own: change_tensors(path, own), said) for own, said in BRIDGED_TENSORS),
    (WEIGHTS, lambda path: mx.save_safetensors(str(path), {"x": mx.zeros(1)}), "is missing"),
    *(("config.json", *harm) for harm in BRIDGED_SETTINGS),
    (TOKENIZER, Path.unlink, r"no such file|no tokenizer\.json"),
    # what else is wrong comes first
    ("config.json", _without_a_tokenizer, "architecture gpt_oss_2 is not supported"),
]
EMBEDDING = "model.embed_tokens"
MXFP4: list[Harm] = [
    (WEIGHTS, lambda path, own=own: change_tensors(path, own), said)
    for own, said in (
        ({f"{EMBEDDING}.scales": mx.ones((1280, 2))}, "scales has dtype F32; expected U8"),
        (
            {f"{EMBEDDING}.scales": mx.ones((1280, 1), mx.uint8)},
            r"scales has shape \(1280, 1\); expected \(1280, 2\)",
        ),
        (
            {f"{EMBEDDING}.weight": mx.ones((1280, 5), mx.uint32)},
            r"weight has shape \(1280, 5\); expected \(1280, 8\)",
        ),
        ({f"{EMBEDDING}.biases": mx.ones((1280, 2))}, f"unexpected tensor {EMBEDDING}.biases"),
    )
]
EVERY = {"native": NATIVE, "shards": SHARDS, "mxfp4": MXFP4, "bridged": BRIDGED}
HARMS = [(base, *harm) for base, harms in EVERY.items() for harm in harms]


@pytest.mark.parametrize(("folder", "name", "spoil", "said"), HARMS, indirect=["folder"])
def test_a_spoiled_file_is_refused_in_a_line(
    folder: Path, name: str, spoil: Spoil, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    path = folder / name
    if isinstance(spoil, dict):
        change(path, **spoil)
    elif isinstance(spoil, str | bytes):
        path.write_bytes(spoil if isinstance(spoil, bytes) else spoil.encode())
    else:
        spoil(path)
    refused(folder, CheckpointError if name in (WEIGHTS, INDEX, SECOND) else ModelError, said)
    assert capfd.readouterr().out == ""
