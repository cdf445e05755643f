"""Where a plan's facts come from: a model's folder, or a config.json and the sizes of its files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvant.bridge.config import is_bridged
from kvant.files import read_json
from kvant.tools.plan.bridged import BridgedCheckpoint
from kvant.tools.plan.stored import Checkpoint


def read_folder(folder: Path) -> Checkpoint | BridgedCheckpoint:
    """From a model folder; no tensor is read.

    Raises:
        ModelError: a config.json that is missing or malformed, or a model kvant does not support.
    """
    if is_bridged(read_json(folder / "config.json")):
        return BridgedCheckpoint.from_folder(folder)
    return Checkpoint.from_folder(folder)


def read_facts(raw: Mapping[str, Any], file_bytes: int | None = None) -> Checkpoint | BridgedCheckpoint:
    """From a config.json already parsed.

    Args:
        raw: config.json.
        file_bytes: of all safetensors files together; None: not known. See :meth:`Checkpoint.from_facts`.

    Raises:
        ModelError: a model kvant does not support.
    """
    return BridgedCheckpoint.from_facts(raw) if is_bridged(raw) else Checkpoint.from_facts(raw, file_bytes)
