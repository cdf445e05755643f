"""The digests that tell models and tokenizers apart."""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import kvant  # isort: skip  (before MLX: it loads a faster BLAS)
import mlx.core as mx
import pytest
from support.adapters import adapter_config, save_adapter
from support.bridged import copy_folder
from support.checkpoints import load_reference

from kvant.models.identity import BLOCK_BYTES, BLOCKS, WHOLE, identify

Make = Callable[..., tuple[Path, Any]]


@pytest.fixture
def folder(make_checkpoint: Make) -> Path:
    """A model of more than is read whole, with a tokenizer."""
    made, _ = make_checkpoint(vocab_size=3000, intermediate_size=512)
    assert (made / "model.safetensors").stat().st_size > 2 * WHOLE
    (made / "tokenizer.json").write_text("{}")
    return made


def test_it_is_by_the_files_and_not_by_the_folder(folder: Path, tmp_path: Path) -> None:
    before = identify(folder)
    assert before.tokenizer == hashlib.sha256(b"{}").hexdigest()
    folder.rename(tmp_path / "moved")
    assert identify(tmp_path / "moved") == before


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_what_it_covers(folder: Path) -> None:
    """config.json, a tensor's name, its size, and the sampled bytes: the first block and the last among them."""
    weights = folder / "model.safetensors"
    size = weights.stat().st_size
    header = 8 + int.from_bytes(weights.read_bytes()[:8], "little")
    second = (size - BLOCK_BYTES) // (BLOCKS - 1)
    before = identify(folder)
    seen = {before.model}
    for at in (0, header - 10, header, second + 7, size - 1):
        _flip(weights, at)
        seen.add(identify(folder).model)
        _flip(weights, at)
    _flip(weights, second + BLOCK_BYTES + 1)  # a byte between the samples, as its docstring says
    assert identify(folder) == before
    (folder / "tokenizer.json").write_text("{ }")
    assert identify(folder) == replace(before, tokenizer=hashlib.sha256(b"{ }").hexdigest())
    for path in (folder / "config.json", weights):
        path.write_bytes(path.read_bytes() + b" ")
        seen.add(identify(folder).model)
    assert len(seen) == 8
    mx.save_safetensors(str(weights), {"a": mx.zeros((100_000,))})  # in a small file every byte counts
    before = identify(folder)
    _flip(weights, 200_001)
    assert identify(folder) != before


def test_an_adapter_counts(pocket_folder: Path, tmp_path: Path) -> None:
    model, _ = kvant.load("pocket")
    adapter = save_adapter(tmp_path / "adapter", adapter_config(), load_reference(pocket_folder))
    adapted, _ = kvant.load("pocket", adapter_path=adapter)
    assert adapted.identity == replace(model.identity, model=adapted.identity.model) != model.identity
    assert adapted.make_cache(8).pool.identity == adapted.identity


def test_a_bridged_model_has_one(tmp_path: Path) -> None:
    folder = copy_folder("gemma3", tmp_path, tokenizer=True)
    model, _ = kvant.load(folder)
    assert model.identity == identify(folder) == model.make_cache(8).pool.identity
