"""Ollama's manifests: the GGUF file behind a name, and manifests that lead nowhere."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from support.hostile import one_line

from kvant.errors import WeightsError
from kvant.tools.gguf.ollama import find_ollama

DIGEST = hashlib.sha256(b"model").hexdigest()
MODEL = {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{DIGEST}", "size": 5}
TEMPLATE = {"mediaType": "application/vnd.ollama.image.template", "digest": "sha256:" + "1" * 64}
ADAPTER = {"mediaType": "application/vnd.ollama.image.adapter", "digest": "sha256:" + "2" * 64}


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "models"))
    return tmp_path / "models"


def _write(models: Path, place: str, content: Any) -> None:
    manifest = models / "manifests" / place
    manifest.parent.mkdir(parents=True)
    manifest.write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.mark.parametrize(
    ("text", "place", "name"),
    [
        ("tiny", "registry.ollama.ai/library/tiny/latest", "tiny"),
        ("tiny:1b", "registry.ollama.ai/library/tiny/1b", "tiny"),
        ("somebody/tiny:1b", "registry.ollama.ai/somebody/tiny/1b", "tiny"),
        ("hf.co/somebody/Tiny-GGUF:Q4_0", "hf.co/somebody/Tiny-GGUF/Q4_0", "Tiny-GGUF"),
        ("localhost:5000/somebody/tiny", "localhost:5000/somebody/tiny/latest", "tiny"),
    ],
)
def test_a_name_leads_to_its_file(models: Path, text: str, place: str, name: str) -> None:
    _write(models, place, {"schemaVersion": 2, "layers": [TEMPLATE, MODEL]})
    assert find_ollama(text) == (name, models / "blobs" / f"sha256-{DIGEST}")


def test_its_usual_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    _write(tmp_path / ".ollama/models", "registry.ollama.ai/library/tiny/latest", {"layers": [MODEL]})
    assert find_ollama("tiny")[1].parent == tmp_path / ".ollama/models/blobs"


@pytest.mark.parametrize(
    "text", ["", "a b", "../../etc/passwd", "..", "a/../b:c", "a:b:c:d", "/tiny", "tiny:", "a\0b"]
)
def test_what_is_no_name(models: Path, text: str) -> None:
    with one_line(WeightsError, r"is not an Ollama name; expected NAME\[:TAG\]"):
        find_ollama(text)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"not JSON"),
        ("[]", r"a JSON list; expected an object"),
        ("{}", r"layers is not a list of objects"),
        ({"layers": [1]}, r"layers is not a list of objects"),
        ({"layers": [TEMPLATE]}, r"0 layers with a model; expected one"),
        ({"layers": [MODEL, MODEL]}, r"2 layers with a model; expected one"),
        ({"layers": [MODEL, ADAPTER]}, r"has an adapter"),
        (
            {"layers": [{**MODEL, "digest": "sha256:../../../etc/passwd"}]},
            r"is not a digest; expected sha256",
        ),
        ({"layers": [{**MODEL, "digest": None}]}, r"'None' is not a digest"),
        ({"layers": [{**MODEL, "digest": f"sha256:{DIGEST}\n"}]}, r"is not a digest"),
        (" " * 2**21, r"2097152 bytes; expected at most"),
    ],
)
def test_a_manifest_that_leads_nowhere(models: Path, content: Any, message: str) -> None:
    _write(models, "registry.ollama.ai/library/tiny/latest", content)
    with one_line(WeightsError, message):
        find_ollama("tiny")
