"""The options of sampling in a model's generation_config.json."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from kvant.engine.model_sampling import read_model_sampling
from kvant.errors import ModelError


def _read(folder: Path, given: tuple[str, ...] = (), **settings: Any) -> dict[str, float]:
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return read_model_sampling(folder, given)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {}),
        ({"eos_token_id": 3, "max_new_tokens": 20, "temperature": None}, {}),
        ({"temperature": 0.7, "top_p": 0.8, "top_k": 20}, {"temp": 0.7, "top_p": 0.8, "top_k": 20}),
        ({"do_sample": True, "top_p": 0.8, "min_p": 0.05}, {"temp": 1.0, "top_p": 0.8, "min_p": 0.05}),
        ({"do_sample": True, "temperature": 1e-6, "repetition_penalty": 1.05}, {"temp": 0, "repetition_penalty": 1.05}),
        ({"do_sample": False, "temperature": 0.7, "repetition_penalty": 2}, {"temp": 0, "repetition_penalty": 2}),
        ({"temperature": 1, "top_k": 0}, {"temp": 1, "top_k": 0}),
    ],
)
def test_what_a_file_says(tmp_path: Path, settings: dict[str, Any], expected: dict[str, float]) -> None:
    assert _read(tmp_path, **settings) == expected


def test_the_names_are_transformers_own(tmp_path: Path) -> None:
    settings = {"temperature": 0.6, "top_p": 0.9, "top_k": 40, "min_p": 0.02, "repetition_penalty": 1.2}
    GenerationConfig(do_sample=True, **settings).save_pretrained(tmp_path)
    assert sorted(read_model_sampling(tmp_path).values()) == sorted(settings.values())


def test_no_file_says_nothing(tmp_path: Path) -> None:
    assert read_model_sampling(tmp_path) == {}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": "hot"}, "temperature is 'hot'; expected 0, or from 0.001 on; an option of yours overrides it"),
        ({"temperature": -1}, "temperature is -1; expected"),
        ({"top_p": 0.0}, "top_p is 0.0; expected above 0, at most 1"),
        ({"top_k": 2.5}, "top_k is 2.5; expected 0"),
        ({"repetition_penalty": True}, "repetition_penalty is True; expected above 0"),
        ({"do_sample": "yes"}, "do_sample is 'yes'; expected true or false"),
    ],
)
def test_a_mistake_in_it_is_named(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        _read(tmp_path, **settings)


def test_a_value_that_is_overridden_is_not_looked_at(tmp_path: Path) -> None:
    assert _read(tmp_path, ("temp",), temperature="hot", do_sample=True, top_p=0.5) == {"top_p": 0.5}


def test_a_file_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "elsewhere.json").write_text("{}")
    (folder / "generation_config.json").symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(ModelError, match="a link out of the model folder"):
        read_model_sampling(folder)
    (folder / "generation_config.json").unlink()
    os.mkfifo(folder / "generation_config.json")
    with pytest.raises(ModelError, match="not a regular file"):
        read_model_sampling(folder)


def test_a_top_k_of_the_whole_vocabulary_is_none(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"top_k": 50}')
    for vocab_size, expected in ((None, 50), (51, 50), (50, 0)):
        assert read_model_sampling(tmp_path, vocab_size=vocab_size)["top_k"] == expected
