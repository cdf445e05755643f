"""Tokenizers compared by content: what counts as the same, and the first difference by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvant.engine.model_drafts import check_folders
from kvant.errors import ModelError
from kvant.text.tokenizer import Tokenizer, check_same, load_tokenizer

Change = Callable[[dict[str, Any]], object]
FLAGS: dict[str, Any] = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
MORE = {"id": 12, "content": "<more>", "special": False, **FLAGS}


def _write(folder: Path, raw: dict[str, Any], *, indent: int | None = None) -> Path:
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(raw, indent=indent), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


def _raw() -> dict[str, Any]:
    vocabulary = {letter: place for place, letter in enumerate("abcdefgh")} | {"ab": 8, "cd": 9, "abcd": 10}
    by_bytes = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "vocab": vocabulary, "merges": ["a b", "c d", "ab cd"], "continuing_subword_prefix": None}
    return {
        "version": "1.0",
        "added_tokens": [{"id": 11, "content": "<end>", "special": True, **FLAGS}],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {**by_bytes, "add_prefix_space": False},
        "post_processor": None,
        "decoder": {**by_bytes, "add_prefix_space": True},
        "model": {**model, "ignore_merges": False},
    }


def _same(raw: dict[str, Any]) -> None:
    """Another way to write it, and what ids and text do not depend on."""
    model = raw["model"]
    model["merges"] = [merge.split() for merge in model["merges"]]
    model["vocab"] = dict(reversed(model["vocab"].items()))
    model["continuing_subword_prefix"] = ""
    raw["normalizer"] = {"type": "Sequence", "normalizers": [raw["normalizer"]]}
    raw["pre_tokenizer"]["trim_offsets"] = False
    raw["decoder"]["use_regex"] = False
    raw["added_tokens"][0]["special"] = False
    raw["post_processor"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}


DIFFERENT: dict[str, Change] = {
    "token 6 is 'h' there and 'g' here": lambda raw: raw["model"]["vocab"].update(g=7, h=6),
    "token 11 is '<stop>' there and '<end>' here": lambda raw: raw["added_tokens"][0].update(content="<stop>"),
    "token 12 is '<more>' there and missing here": lambda raw: raw["added_tokens"].append(MORE),
    "its merges are not the same": lambda raw: raw["model"]["merges"].reverse(),
    "its model is another": lambda raw: raw["model"].update(ignore_merges=True),
    "its added tokens are not the same": lambda raw: raw["added_tokens"][0].update(lstrip=True),
    "its normalizer is another": lambda raw: raw.update(normalizer=None),
    "its pre-tokenizer is another": lambda raw: raw["pre_tokenizer"].update(use_regex=False),
    "its decoder is another": lambda raw: raw.update(decoder={"type": "Fuse"}),
}


def test_the_same_content(tmp_path: Path) -> None:
    changed = _raw()
    _same(changed)
    folders = _write(tmp_path / "a", _raw()), _write(tmp_path / "b", changed, indent=1)
    check_folders(*folders)
    (folders[0] / "tokenizer_config.json").unlink()  # files alike are not loaded
    check_folders(folders[0], _write(tmp_path / "c", _raw()))


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The model's."""
    return load_tokenizer(_write(tmp_path_factory.mktemp("here") / "model", _raw()))


@pytest.mark.parametrize("said", DIFFERENT)
def test_the_first_difference(here: Tokenizer, tmp_path: Path, said: str) -> None:
    changed = _raw()
    DIFFERENT[said](changed)
    with pytest.raises(ModelError) as refused:
        check_same(load_tokenizer(_write(tmp_path / "there", changed)), here)
    assert str(refused.value) == f"the draft model's tokenizer differs: {said}"
