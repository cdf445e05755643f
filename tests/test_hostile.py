"""Model folders made to do harm: one clear line each, nothing executed, no large allocation."""

import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from checkpoints import qwen2_config, reference_model, save_checkpoint
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

import kvant
from kvant.bench.adapters import load_adapter
from kvant.bench.engines import EngineSpec
from kvant.engine.load import POCKET, find_model, load_tokenizer
from kvant.errors import CheckpointError, KvantError, ModelError, PromptError
from kvant.models import ModelConfig, load_decoder
from kvant.models.parameters import matrices, vectors

SETTINGS = ["config.json", "generation_config.json", "tokenizer_config.json"]
OPENED = [*SETTINGS, "tokenizer.json", "model.safetensors", "chat_template.jinja", "special_tokens_map.json"]
OPENED += ["added_tokens.json", "merges.txt", "additional_chat_templates/tool_use.jinja"]
MESSAGES = [{"role": "user", "content": "Hello!"}]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with every file kvant opens, or has transformers open."""
    config = qwen2_config(vocab_size=1280, hidden_size=64, intermediate_size=64)
    folder = save_checkpoint(tmp_path_factory.mktemp("good") / "model", config, reference_model(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(find_model(POCKET) / name, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "chat_template.jinja").write_text(settings["chat_template"])
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tool_use.jinja").write_text("{{ messages }}")
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<|im_end|>"}')
    (folder / "added_tokens.json").write_text("{}")
    (folder / "merges.txt").touch()
    return folder


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(good, tmp_path / "model"))


def _refused(folder: Path, kind: type[ModelError], message: str) -> None:
    """One printable line of this kind, and no array made for it."""
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    with pytest.raises(ModelError, match=message) as caught:
        kvant.load(folder)
    assert type(caught.value) is kind
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1100
    if kind is CheckpointError:
        assert mx.get_peak_memory() - before < 1_000_000


def _change(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_the_good_folder_is_good(folder: Path) -> None:
    model, tokenizer = kvant.load(folder)
    ids = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)
    assert len(list(kvant.stream_generate(model, tokenizer, ids, max_tokens=2))) > 0


# Files that are none, and links.


def _pipe(path: Path) -> None:
    os.mkfifo(path)  # whoever opened it would wait for ever


def _link_out(path: Path) -> None:
    shutil.copy(path.with_name(path.name + ".was"), path.parents[2] / "outside")
    path.symlink_to(path.parents[2] / "outside")


BAD_FILES = {
    "a pipe": (_pipe, "not a regular file"),
    "a folder": (Path.mkdir, "not a regular file"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "a link out of the model folder, to /dev/zero"),
    "a link out": (_link_out, "a link out of the model folder, to .*/outside"),
    "a loop": (lambda path: path.symlink_to(path.name), "cannot be read"),
    "a link to nothing": (lambda path: path.symlink_to("nothing"), "a link to nothing, which is not there"),
}


@pytest.mark.parametrize("name", OPENED)
@pytest.mark.parametrize(("make", "message"), BAD_FILES.values(), ids=BAD_FILES.keys())
def test_files_that_are_none(folder: Path, name: str, make: Callable[[Path], None], message: str) -> None:
    path = folder / name
    path.rename(path.with_name(path.name + ".was"))
    make(path)
    kind = CheckpointError if name == "model.safetensors" else ModelError
    _refused(folder, kind, f"{path.name}: {message}")


def _hub(folder: Path, blobs: Path) -> Path:
    """The folder as the Hugging Face cache has it: every file a link to a blob."""
    snapshot = folder.parent / "hub/models--owner--name/snapshots/0123abc"
    for number, path in enumerate(sorted(path for path in folder.rglob("*") if path.is_file())):
        link = snapshot / path.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        blobs.mkdir(parents=True, exist_ok=True)
        path.rename(blobs / str(number))
        link.symlink_to(os.path.relpath(blobs / str(number), link.parent))
    return snapshot


def test_the_hub_cache_is_accepted(folder: Path) -> None:
    snapshot = _hub(folder, folder.parent / "hub/models--owner--name/blobs")
    assert not (folder / "config.json").exists()
    _, tokenizer = kvant.load(snapshot)
    assert tokenizer.apply_chat_template(MESSAGES, tokenize=False).startswith("<|im_start|>user")


def test_another_repository_of_the_hub_cache_is_not_this_one(folder: Path) -> None:
    snapshot = _hub(folder, folder.parent / "hub/models--somebody--else/blobs")
    _refused(snapshot, ModelError, r"config\.json: a link out of the model folder")


def test_links_within_the_folder(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "weights")
    (folder / "model.safetensors").symlink_to("weights")
    link = folder.with_name("link")
    link.symlink_to(folder)
    assert load_decoder(link).config.vocab_size == 1280


# Safetensors.


def _tensor(*shape: int, start: int = 0, dtype: str = "F32") -> dict[str, Any]:
    size = 4
    for length in shape:
        size *= length
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, start + size]}


def _file(header: object, data_bytes: int, claim: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if claim is None else claim) + text + bytes(data_bytes)


ONE = json.dumps(_tensor(2)).encode()
BAD_HEADERS = {
    "a hole": (_file({"a": _tensor(2, start=4)}, 12), "invalid offset"),
    "an overlap": (_file({"a": _tensor(2), "b": _tensor(2, start=4)}, 12), "invalid offset"),
    "two tensors in the same place": (_file({"a": _tensor(2), "b": _tensor(2)}, 8), "invalid offset"),
    "data nobody names": (_file({"a": _tensor(2)}, 12), "not fully covered"),
    "less data": (_file({"a": _tensor(2)}, 4), "not fully covered"),
    "negative offsets": (_file({"a": _tensor(2, start=-8)}, 8), "invalid value"),
    "offsets the wrong way": (_file({"a": _tensor(2) | {"data_offsets": [8, 0]}}, 8), "invalid offset"),
    "a shape of other bytes": (_file({"a": _tensor(2) | {"shape": [3]}}, 8), "invalid shape"),
    "a negative size": (_file({"a": _tensor(2) | {"shape": [-2]}}, 8), "invalid value"),
    "a product that overflows": (_file({"a": _tensor(2) | {"shape": [2**32, 2**32]}}, 8), "overflow"),
    "a product that overflows to nothing": (
        _file({"a": _tensor(0) | {"shape": [2**32, 2**32]}}, 0),
        "overflow",
    ),
    "ten gigabytes claimed": (_file({"a": _tensor(2_500_000_000)}, 8), "not fully covered"),
    "a header longer than the file": (_file({"a": _tensor(2)}, 8, claim=10 * 10**9), "header too large"),
    "the longest header": (_file({"a": _tensor(2)}, 8, claim=2**64 - 1), "header too large"),
    "a header of nothing": (_file(b"", 0), "Expecting value"),
    "a tensor twice": (_file(b'{"a":' + ONE + b',"a":' + ONE + b"}", 8), "'a' is there twice"),
    "a shape twice": (_file(b'{"a":' + ONE[:-1] + b',"shape":[1,2]}}', 8), "'shape' is there twice"),
    "deep JSON": (_file(b'{"a":' + b"[" * 100_000, 8), "recursion"),
    "deep metadata": (_file(b'{"__metadata__":' + b'{"a":' * 900 + b"1" + b"}" * 901, 8), "expected a string"),
    "a name that is no UTF-8": (_file(b'{"\xff":' + ONE + b"}", 8), "utf-8"),
    "a list": (_file(b"[]", 0), "invalid type"),
    "an unknown dtype": (_file({"a": _tensor(2, dtype="F33")}, 8), "unknown variant"),
    "an escape in a name": (_file({"\x1b[2J": _tensor(2)}, 8), r"unexpected tensor \\x1b\[2J"),
}


@pytest.mark.parametrize(("data", "message"), BAD_HEADERS.values(), ids=BAD_HEADERS.keys())
def test_bad_headers(folder: Path, data: bytes, message: str) -> None:
    (folder / "model.safetensors").write_bytes(data)
    _refused(folder, CheckpointError, message)


def test_a_header_that_is_too_long_is_not_read(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 50_000_000))
    os.truncate(path, 60_000_000)
    _refused(folder, CheckpointError, "a header of 50000000 bytes; expected at most 16777216")


def _sparse(folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """A file that has these tensors and next to no bytes on the disk."""
    header, end = {}, 0
    for name, shape in shapes.items():
        header[name] = _tensor(*shape, start=end)
        end = header[name]["data_offsets"][1]
    data = _file(header, 0)
    (folder / "model.safetensors").write_bytes(data)
    os.truncate(folder / "model.safetensors", len(data) + end)


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    config = ModelConfig.from_folder(folder)
    shapes: dict[str, tuple[int, ...]] = {name: (size,) for name, size in vectors(config).items()}
    return shapes | {f"{path}.weight": size for path, size in matrices(config).items() if path != "lm_head"}


def test_shapes_are_refused_before_anything_is_read(folder: Path) -> None:
    """The last tensor of a file of 40 GB is wrong."""
    _change(folder / "config.json", vocab_size=2**24, hidden_size=600, num_attention_heads=1, num_key_value_heads=1)
    _sparse(folder, _shapes(folder) | {"model.norm.weight": (7,)})
    _refused(folder, CheckpointError, r"model\.norm\.weight has shape \(7,\); expected \(600,\)")


def test_more_bytes_than_memory(folder: Path) -> None:
    """Files and config agree; there is only no machine for them."""
    _change(folder / "config.json", vocab_size=2**24, hidden_size=2**15)
    _sparse(folder, _shapes(folder))
    _refused(folder, CheckpointError, "the tensors have 2[0-9]{12} bytes; this machine's memory has")


@pytest.mark.parametrize("shape", [(0,), (0, 64), (64, 0), (), (1, 64)])
def test_odd_shapes(folder: Path, shape: tuple[int, ...]) -> None:
    _sparse(folder, _shapes(folder) | {"model.norm.weight": shape})
    _refused(folder, CheckpointError, r"model\.norm\.weight has shape .*; expected \(64,\)")


@pytest.mark.parametrize("dtype", ["F64", "I32", "F8_E8M0", "U32"])
def test_a_wrong_dtype_at_the_end(folder: Path, dtype: str) -> None:
    _sparse(folder, _shapes(folder))
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    entry = header["model.norm.weight"]
    size = {"F64": 8, "F8_E8M0": 1}.get(dtype, 4)
    entry |= {"dtype": dtype, "shape": [(entry["data_offsets"][1] - entry["data_offsets"][0]) // size]}
    path.write_bytes(_file(header, len(data) - 8 - length))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has (dtype|shape)"):
        load_decoder(folder)


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
    _refused(index.parent, CheckpointError, message)


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
    _refused(index.parent, CheckpointError, message)


@pytest.mark.parametrize("name", [*SETTINGS, "tokenizer.json", "special_tokens_map.json"])
@pytest.mark.parametrize(("text", "message"), [v for k, v in BAD_JSON.items() if k != "deep objects"])
def test_bad_json(folder: Path, name: str, text: str | bytes, message: str) -> None:
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    _refused(folder, ModelError, f"{name}: .*{message}")


@pytest.mark.parametrize(("name", "limit"), [("config.json", 2**22), ("tokenizer.json", 2**26)])
def test_files_that_are_too_long(folder: Path, name: str, limit: int) -> None:
    os.truncate(folder / name, 10**12)
    _refused(folder, ModelError, f"{name}: 1000000000000 bytes; expected at most {limit}")


def test_an_index_that_is_too_long(index: Path) -> None:
    os.truncate(index, 10**12)
    _refused(index.parent, CheckpointError, "1000000000000 bytes; expected at most")


def test_a_shard_nobody_names_is_not_opened(index: Path) -> None:
    (index.parent / "model-00003-of-00002.safetensors").write_bytes(b"no safetensors")
    assert load_decoder(index.parent).config.vocab_size == 1280
    with pytest.raises(CheckpointError, match=r"model-00003-of-00002\.safetensors: not among the model's files"):
        load_adapter(EngineSpec("mlx-lm", 0), index.parent, 512)


# Code.


class Marker:
    """Unpickled, it would write a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def marker(folder: Path) -> Iterator[Path]:
    """A folder that whatever is executed of the model's makes; it is never there."""
    path = folder.parent / "executed"
    code = f"import os; os.mkdir({str(path)!r})\nclass Model: pass\nclass ModelArgs: pass\nclass Tokenizer: pass\n"
    for name in ("evil", "tokenization_evil", "json", "typing", "jinja2", "kvant", "sitecustomize", "__init__"):
        (folder / f"{name}.py").write_text(code)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Marker(path)))
    (folder / "training_args.bin").write_bytes(pickle.dumps(Marker(path)))
    yield path
    assert not path.exists()


CODE: list[tuple[str, dict[str, Any], str]] = [
    ("config.json", {"auto_map": {"AutoModelForCausalLM": "evil.Model"}}, "auto_map names code"),
    ("config.json", {"auto_map": "evil.Model", "trust_remote_code": True}, "auto_map names code"),
    ("config.json", {"model_file": "evil.py"}, "model_file names code"),
    ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}}, "auto_map names code"),
    ("tokenizer_config.json", {"auto_map": ["evil.Tokenizer", "evil.Tokenizer"]}, "auto_map names code"),
    ("tokenizer_config.json", {"chat_template_type": "../evil"}, "cannot be loaded: No module named"),
    ("tokenizer_config.json", {"tool_parser_type": ".evil"}, "cannot be loaded"),
    ("tokenizer_config.json", {"fast_tokenizer_files": ["tokenizer.1.json"]}, "fast_tokenizer_files names other"),
]


@pytest.mark.parametrize(("name", "changes", "message"), CODE)
def test_code_is_refused(folder: Path, marker: Path, name: str, changes: dict[str, Any], message: str) -> None:
    _change(folder / name, **changes)
    _refused(folder, ModelError, message)
    if name == "config.json":
        for engine in ("kvant", "mlx-lm"):
            with pytest.raises(ModelError, match=message):
                load_adapter(EngineSpec(engine, 0), folder, 512)


@pytest.mark.parametrize("name", ["tokenization_evil.Tokenizer", "Tokenizer", "Qwen2TokenizerFast"])
def test_code_and_pickles_beside_a_model_stay_closed(folder: Path, marker: Path, name: str) -> None:
    _change(folder / "tokenizer_config.json", tokenizer_class=name, trust_remote_code=True)
    model, tokenizer = kvant.load(folder)
    ids = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)
    assert kvant.generate(model, tokenizer, ids, max_tokens=2) is not None


def test_a_folder_of_pickles(folder: Path, marker: Path) -> None:
    (folder / "model.safetensors").unlink()
    _refused(
        folder, CheckpointError, r"neither model\.safetensors nor .*; pytorch_model\.bin is a pickle.*never opened"
    )


# Tokenizers.


def test_an_absurd_token_id_makes_no_table(folder: Path) -> None:
    path = folder / "tokenizer.json"
    raw = json.loads(path.read_text())
    raw["model"]["vocab"]["a"] = 2**32 - 1
    path.write_text(json.dumps(raw))
    _refused(folder, ModelError, "token id 4294967295; expected an int from 0 to 16777215")
    raw["model"]["vocab"]["a"] = 5
    raw["added_tokens"][0]["id"] = 10**12
    path.write_text(json.dumps(raw))
    _refused(folder, ModelError, "token id 1000000000000")


DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
LONG = {"type": "Replace", "pattern": {"Regex": "."}, "content": "a" * 65}
BAD_TOKENIZERS: list[tuple[str, dict[str, Any], str]] = [
    ("tokenizer.json", {"model": []}, "no model"),
    ("tokenizer.json", {"added_tokens": [5]}, "added_tokens is not a list of objects"),
    ("tokenizer.json", {"normalizer": json.loads("[" * 300 + "]" * 300)}, "cannot be loaded"),
    (
        "tokenizer.json",
        {"normalizer": {"type": "Sequence", "normalizers": [DOUBLE] * 40}},
        r"normalizer makes .* 1\.1e\+12",
    ),
    ("tokenizer.json", {"decoder": {"type": "Sequence", "decoders": [LONG]}}, "decoder makes a text up to 65 times"),
    ("tokenizer.json", {"version": "3.0"}, "cannot be loaded"),
    ("tokenizer_config.json", {"chat_template": 5}, "chat_template is a JSON int; expected a string"),
    ("tokenizer_config.json", {"chat_template": [{"name": "default"}]}, "objects of a name and a template"),
    ("tokenizer_config.json", {"eos_token": {"content": "x", "color": "red"}}, "a token has 'color'"),
    ("tokenizer_config.json", {"init_inputs": [1, 2, 3]}, "cannot be loaded"),
]


@pytest.mark.parametrize(("name", "changes", "message"), BAD_TOKENIZERS)
def test_bad_tokenizers(folder: Path, capfd: pytest.CaptureFixture[str], name: str, changes: Any, message: str) -> None:
    _change(folder / name, **changes)
    _refused(folder, ModelError, message)
    assert capfd.readouterr().out == ""


def test_replacements_in_deep_sequences(folder: Path) -> None:
    path = folder / "tokenizer.json"
    raw = json.loads(path.read_text()) | {"normalizer": "HERE"}
    deep = '{"type": "Sequence", "normalizers": [' * 450 + "]}" * 450
    path.write_text(json.dumps(raw).replace('"HERE"', deep))
    _refused(folder, ModelError, r"nested too deeply|recursion")


def test_a_pattern_that_never_comes_to_an_end(folder: Path) -> None:
    """Oniguruma gives up, and tokenizers panics: in Python that is no Exception."""
    model, tokenizer = kvant.load(folder)
    # What tokenizer.json says, for another class of tokenizer: Qwen2's has a pattern of its own.
    tokenizer._tokenizer.backend_tokenizer.pre_tokenizer = Split(Regex("(a+)+$"), "isolated")
    with pytest.raises(PromptError, match=r"the prompt cannot be encoded: .*retry-limit"):
        kvant.generate(model, tokenizer, "a" * 40 + "b")


def test_a_list_of_templates(folder: Path) -> None:
    for path in (folder / "chat_template.jinja", *(folder / "additional_chat_templates").iterdir()):
        path.unlink()
    named = [{"name": "default", "template": "first"}, {"name": "other", "template": "{{ 'a' * 10**10 }}"}]
    _change(folder / "tokenizer_config.json", chat_template=named)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.apply_chat_template(MESSAGES, tokenize=False) == "first"
    with pytest.raises(KvantError, match="too much memory"):
        tokenizer.apply_chat_template(MESSAGES, chat_template="other")


# From the command line.


def _run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    kvant_program = "import sys; from kvant.cli import main; sys.exit(main())"
    command = [sys.executable, "-P", "-c", kvant_program, *arguments]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(Path(kvant.__file__).parents[1])}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=cwd, env=environment)


def _spoil_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ 'a' * 10**10 }}")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_spoil_template, "the chat template failed: it needs too much memory"),
        (lambda folder: _sparse(folder, {"a": (2**40,)}), "unexpected tensor a"),
        (lambda folder: _change(folder / "config.json", model_file="evil.py"), "model_file names code"),
    ],
)
def test_the_command_says_one_line(folder: Path, marker: Path, spoil: Callable[[Path], None], message: str) -> None:
    spoil(folder)
    done = _run("generate", "Hello!", "--model", ".", "-q", cwd=folder)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("kvant: error: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr


def test_engines_of_a_benchmark_import_nothing_from_the_current_folder(folder: Path, marker: Path) -> None:
    arguments = [
        "--engine",
        "kvant",
        "--kv-bits",
        "8",
        "--repeats",
        "1",
        "--max-tokens",
        "2",
        "--prompt-tokens",
        "8",
        "--model",
        ".",
    ]
    done = _run("bench", *arguments, cwd=folder)
    assert done.returncode == 0, done.stderr


# Messages, and the fuzzer.


def test_messages_are_one_printable_line() -> None:
    assert str(ModelError("a\nb\x1b[2Jc\ud800 ü")) == r"a\nb\x1b[2Jc\ud800 ü"
    assert len(str(ModelError("x" * 10**6))) == 1003


def test_the_fuzzer_finds_nothing_in_a_few_folders_and_sees_what_goes_wrong(tmp_path: Path) -> None:
    program = """
import os, sys, time
from pathlib import Path
import fuzz
def work(kind):
    if kind == "raise": raise ValueError("no KvantError")
    if kind == "abort": os.abort()
    if kind == "print": os.write(1, b"words")
    if kind == "hang": time.sleep(100)
    if kind == "memory": b"x" * 700_000_000
fuzz.LIMIT_BYTES = 700_000_000
for kind in ("raise", "abort", "hang", "memory", "print"):
    fuzz.LIMIT_S = 1 if kind == "hang" else 60
    print(fuzz.run(Path(sys.argv[1]) / "log", lambda folder: work(kind)))
fuzz.LIMIT_BYTES = 1_500_000_000
sys.argv[1:] = ["--seconds", "100", "--count", "4"]
raise SystemExit(fuzz.main())
"""
    root = Path(__file__).parents[1]
    paths = [str(Path(kvant.__file__).parents[1]), str(root / "scripts")]
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )
    lines = done.stdout.splitlines()
    assert lines[0] == "raised: ValueError: no KvantError"
    assert lines[1].startswith("died of SIGABRT")
    assert lines[2] == "hung"
    assert lines[3].startswith("took ")
    assert lines[4] == "wrote to standard output: 'words'"
    assert lines[-1].startswith("seeds 0 to 3: ")
    assert done.returncode == 0, done.stdout
