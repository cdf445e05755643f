"""Find the GGUF file of a model that Ollama downloaded.

Ollama stores a JSON manifest per model, which names blobs by their digests. The layer with the media type
below is a GGUF file as its author published it. Ollama's prompt template, in another layer, is written in
Go's template language; kvant uses the Jinja template in the GGUF file instead. Source:
https://github.com/ollama/ollama/tree/main/manifest.
"""

import os
import re
from pathlib import Path

from kvant.errors import WeightsError
from kvant.files import read_json

MODEL_LAYER = "application/vnd.ollama.image.model"
ADAPTER_LAYER = "application/vnd.ollama.image.adapter"
MAX_MANIFEST_BYTES = 2**20
# [host/][owner/]name[:tag]
NAME = re.compile(
    r"(?:(?P<host>[\w.-]+(?::\d+)?)/)??(?:(?P<owner>[\w.-]+)/)?(?P<name>[\w.-]+)(?::(?P<tag>[\w.-]+))?",
    re.ASCII,
)
DEFAULT_HOST = "registry.ollama.ai"
DEFAULT_OWNER = "library"
DEFAULT_TAG = "latest"
DIGEST = re.compile(r"sha256:([0-9a-f]{64})")


def find_ollama(text: str) -> tuple[str, Path]:
    """Return the name and the GGUF file of a model that Ollama calls ``[HOST/][OWNER/]NAME[:TAG]``.

    Raises:
        WeightsError: the name is malformed, Ollama has no such model, or it is not a single GGUF file.
    """
    match = NAME.fullmatch(text)
    if match is None or ".." in text:
        raise WeightsError(f"{text[:100]!r} is not an Ollama name; expected NAME[:TAG] or OWNER/NAME[:TAG]")
    folder = Path(os.environ.get("OLLAMA_MODELS") or "~/.ollama/models").expanduser()
    host = match["host"] or DEFAULT_HOST
    owner = match["owner"] or DEFAULT_OWNER
    manifest = folder / "manifests" / host / owner / match["name"] / (match["tag"] or DEFAULT_TAG)
    if not manifest.is_file():
        raise WeightsError(f"{text}: Ollama has no such model in {folder}; `ollama list` names those it has")
    layers = read_json(manifest, MAX_MANIFEST_BYTES, WeightsError).get("layers")
    if not isinstance(layers, list) or not all(isinstance(layer, dict) for layer in layers):
        raise WeightsError(f"{manifest}: layers is not a list of objects; expected an Ollama manifest")
    if any(layer.get("mediaType") == ADAPTER_LAYER for layer in layers):
        raise WeightsError(f"{manifest}: has an adapter; kvant imports only models without one")
    digests = [layer.get("digest") for layer in layers if layer.get("mediaType") == MODEL_LAYER]
    if len(digests) != 1:
        raise WeightsError(f"{manifest}: {len(digests)} layers with a model; expected one GGUF file")
    digest = DIGEST.fullmatch(str(digests[0]))
    if digest is None:
        raise WeightsError(
            f"{manifest}: {str(digests[0])[:80]!r} is not a digest; expected sha256 and 64 digits"
        )
    return match["name"], folder / "blobs" / f"sha256-{digest[1]}"
