"""A good model folder to spoil, and what is asked of one that was: one clear line."""

import json
import math
import os
import re
import shutil
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import kvant
from kvant.engine.load import POCKET, find_model
from kvant.errors import ModelError
from support.checkpoints import qwen2_config, write_reference

SETTINGS = ["config.json", "generation_config.json", "tokenizer_config.json"]
OPENED = [*SETTINGS, "tokenizer.json", "model.safetensors", "chat_template.jinja", "special_tokens_map.json"]
OPENED += ["added_tokens.json", "additional_chat_templates/tool_use.jinja"]
MESSAGES = [{"role": "user", "content": "Hello!"}]


def good_model(folder: Path) -> Path:
    """A tiny model with every file kvant opens."""
    write_reference(folder, qwen2_config(vocab_size=1280, hidden_size=64, intermediate_size=64))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(find_model(POCKET) / name, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "chat_template.jinja").write_text(settings["chat_template"])
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tool_use.jinja").write_text("{{ messages }}")
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<|im_end|>"}')
    (folder / "added_tokens.json").write_text("{}")
    return folder


def refused(folder: Path, kind: type[ModelError], message: str) -> None:
    """One printable line, soon, and no array made for it."""
    mx.clear_cache()
    mx.reset_peak_memory()
    before, started = mx.get_active_memory(), time.process_time()
    with one_line(kind, message) as caught:
        kvant.load(folder)
    assert len(f"kvant: error: {caught.value}") <= 3 * 80
    assert mx.get_peak_memory() - before < 10_000_000
    assert time.process_time() - started < 30  # nothing that grows with a number of the folder


@contextmanager
def one_line(kind: type[Exception], message: str) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """An error of this kind, whose text is one printable line."""
    with pytest.raises(kind, match=message) as caught:
        yield caught
    assert str(caught.value).isprintable()


def said(key: str, value: object) -> str:
    """A pattern of how a message names a key and the value it cannot have."""
    shown = {form[:8] for form in (repr(value), str(value), str(value).lower())}
    return rf"\b{key} is ({'|'.join(map(re.escape, sorted(shown)))})"


def change(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def tensor(*shape: int, start: int = 0, dtype: str = "F32") -> dict[str, Any]:
    """What a header says of a tensor of four bytes an element, whose data begins at ``start``."""
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, start + 4 * math.prod(shape)]}


def file_bytes(header: object, data_bytes: int, claim: int | None = None) -> bytes:
    """A safetensors file, which may claim another length of its header; ``data_bytes`` zeros after that."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if claim is None else claim) + text + bytes(data_bytes)


def sparse(folder: Path, shapes: dict[str, tuple[int, ...]], **last: Any) -> None:
    """A file that has these tensors, says something else of the last, and has next to no bytes on the
    disk.
    """
    header, end = {}, 0
    for name, shape in shapes.items():
        header[name] = tensor(*shape, start=end)
        end = header[name]["data_offsets"][1]
    header[name] |= last
    data = file_bytes(header, 0)
    (folder / "model.safetensors").write_bytes(data)
    os.truncate(folder / "model.safetensors", len(data) + end)
