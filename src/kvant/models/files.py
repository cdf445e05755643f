"""Small files of a model folder, read with care."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvant.errors import ModelError, one_line

MAX_CONFIG_BYTES = 4 * 1024 * 1024


def read_json(path: Path) -> Mapping[str, Any]:
    """A JSON object.

    Raises:
        ModelError: a file that is missing, too large, or no JSON object.
    """
    if not path.is_file():
        raise ModelError(f"{path}: no such file; a model folder holds config.json, tokenizer files and safetensors")
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise ModelError(f"{path}: {path.stat().st_size} bytes; expected at most {MAX_CONFIG_BYTES}")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not JSON: {one_line(error)}") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path}: a JSON {type(raw).__name__}; expected an object")
    return raw
