"""Model folders made to do harm: links, code, the command line, the fuzzer. Their files: test_hostile_files.py."""

import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.command import call
from support.counts import count
from support.hostile import MESSAGES, OPENED, change, one_line, refused, sparse

import kvant
from kvant.errors import CheckpointError, ModelError
from kvant.models import load_decoder
from kvant.tools.bench.adapters import MLXLM, Kvant
from kvant.tools.bench.engines import EngineSpec


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
    refused(folder, kind, f"{path.name}: {message}")


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
    refused(snapshot, ModelError, r"config\.json: a link out of the model folder")


def test_links_within_the_folder(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "weights")
    (folder / "model.safetensors").symlink_to("weights")
    link = folder.with_name("link")
    link.symlink_to(folder)
    assert load_decoder(link).config.vocab_size == 1280


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
    ("tokenizer_config.json", {"fast_tokenizer_files": ["tokenizer.1.json"]}, "fast_tokenizer_files names other"),
]


@pytest.mark.parametrize(("name", "changes", "message"), CODE)
def test_code_is_refused(folder: Path, marker: Path, name: str, changes: dict[str, Any], message: str) -> None:
    change(folder / name, **changes)
    refused(folder, ModelError, message)
    if name == "config.json":
        for engine, kind in (("kvant", Kvant), ("mlx-lm", MLXLM)):
            with one_line(ModelError, message):
                kind(EngineSpec(engine, 0), folder, 512)


@pytest.mark.parametrize("name", ["tokenization_evil.Tokenizer", "Tokenizer", "Qwen2TokenizerFast"])
def test_code_and_pickles_beside_a_model_stay_closed(folder: Path, marker: Path, name: str) -> None:
    change(folder / "tokenizer_config.json", tokenizer_class=name, trust_remote_code=True)
    model, tokenizer = kvant.load(folder)
    ids = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)
    assert kvant.generate(model, tokenizer, ids, max_tokens=2) is not None


def test_a_folder_of_pickles(folder: Path, marker: Path) -> None:
    (folder / "model.safetensors").unlink()
    refused(folder, CheckpointError, r"neither model\.safetensors nor .*; pytorch_model\.bin is a pickle.*never opened")


# From the command line.


SIZES = ("hidden_size", "intermediate_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim")
ABSURD = {**dict.fromkeys(SIZES, 2**24), "max_position_embeddings": 2**24}
ABSURD["num_hidden_layers"] = count(256, 4096)  # tests/tools/plan plans 4096
ABSURD["quantization"] = {"bits": 3, "group_size": 32}  # planned part by part


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: sparse(folder, {"a": (2**40,)}), "unexpected tensor a"),
        (lambda folder: change(folder / "config.json", model_file="evil.py"), "model_file names code"),
        (lambda folder: change(folder / "config.json", **ABSURD), "no context fits, whatever the cache"),
    ],
)
def test_the_command_says_one_line(
    folder: Path, marker: Path, spoil: Callable[[Path], None], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(folder)
    monkeypatch.chdir(folder)
    done = call("generate", "Hello!", "--model", ".", "-q")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert message in done.stderr


def test_its_processes_import_nothing_from_the_current_folder(folder: Path, marker: Path) -> None:
    """The one that reads text, and the engines of a benchmark."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        program = "import sys; from kvant.cli import main; sys.exit(main())"
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(Path(kvant.__file__).parents[1])}
        command = [sys.executable, "-P", "-c", program, *arguments, "--model", "."]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=folder, env=environment)

    options = ["--engine", "kvant", "--kv-bits", "8", "--repeats", "1", "--max-tokens", "2", "--prompt-tokens", "8"]
    done = run("bench", *options)
    assert done.returncode == 0, done.stderr
    (folder / "chat_template.jinja").write_text("{{ 'a' * 10**10 }}")
    done = run("generate", "Hello!", "-q")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "the chat template failed: it needs too much memory" in done.stderr


# The fuzzer.


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
sys.argv[1:] = ["--seconds", "100", "--count", "2"]
raise SystemExit(fuzz.main())
"""
    root = Path(__file__).parents[2]
    paths = [str(Path(kvant.__file__).parents[1]), str(root / "scripts")]
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )
    lines = done.stdout.splitlines()
    for line, begins in zip(lines, ("raised: ValueError", "died of SIGABRT", "hung", "took ", "wrote"), strict=False):
        assert line.startswith(begins)
    assert lines[-1].startswith("seeds 0 to 1: ")
    assert done.returncode == 0, done.stdout
