"""Models that Ollama downloaded: the GGUF file behind a name.

Ollama keeps a manifest for each model, JSON that names blobs by their digests. The layer of the media type
below is a GGUF file as its author published it. Ollama's prompt template, in another layer, is written in
Go's language and is not used: the GGUF file has its own, in Jinja. Source:
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
DEFAULT_HOST, DEFAULT_OWNER, DEFAULT_TAG = "registry.ollama.ai", "library", "latest"
DIGEST = re.compile(r"sha256:([0-9a-f]{64})")


def find_ollama(text: str) -> tuple[str, Path]:
    """Return name and GGUF file of a model as Ollama writes it: ``NAME[:TAG]``, with an owner or a host
    before it.

    Raises:
        WeightsError: no such name or model here, or a manifest without a GGUF file.
    """
    match = NAME.fullmatch(text)
    if match is None or ".." in text:
        raise WeightsError(f"{text[:100]!r} is no name of Ollama's; expected NAME[:TAG] or OWNER/NAME[:TAG]")
    folder = Path(os.environ.get("OLLAMA_MODELS") or "~/.ollama/models").expanduser()
    host, owner = match["host"] or DEFAULT_HOST, match["owner"] or DEFAULT_OWNER
    manifest = folder / "manifests" / host / owner / match["name"] / (match["tag"] or DEFAULT_TAG)
    if not manifest.is_file():
        raise WeightsError(f"{text}: Ollama has no such model in {folder}; `ollama list` names those it has")
    layers = read_json(manifest, MAX_MANIFEST_BYTES, WeightsError).get("layers")
    if not isinstance(layers, list) or not all(isinstance(layer, dict) for layer in layers):
        raise WeightsError(f"{manifest}: layers is no list of objects; expected one of Ollama's manifests")
    if any(layer.get("mediaType") == ADAPTER_LAYER for layer in layers):
        raise WeightsError(f"{manifest}: has an adapter beside the model; kvant imports models without one")
    digests = [layer.get("digest") for layer in layers if layer.get("mediaType") == MODEL_LAYER]
    if len(digests) != 1:
        raise WeightsError(f"{manifest}: {len(digests)} layers with a model; expected one, a GGUF file")
    digest = DIGEST.fullmatch(str(digests[0]))
    if digest is None:
        raise WeightsError(
            f"{manifest}: {str(digests[0])[:80]!r} is no digest; expected sha256 and 64 digits"
        )
    return match["name"], folder / "blobs" / f"sha256-{digest[1]}"
