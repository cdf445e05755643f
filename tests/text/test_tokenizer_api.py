"""The tokenizer in use: mlx-lm's functions take it, its ends of text can be set, two of them are compared."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, NaiveStreamingDetokenizer, TokenizerWrapper
from support.hostile import MESSAGES, change, good_model
from support.tokenizers_made import loaded, make_tokenizer, write_tokenizer

import kvant
from kvant.engine.model_drafts import check_folders
from kvant.errors import ModelError, PromptError
from kvant.models import Decoder
from kvant.text.tokenizer import Tokenizer, check_same, load_tokenizer

STORY = [{"role": "user", "content": "Tell me a story about a fox."}]


@pytest.fixture
def fresh(pocket: tuple[Decoder, Tokenizer], pocket_folder: Path) -> tuple[Decoder, Tokenizer]:
    """Pocket with a tokenizer that a test may change."""
    tokenizer = loaded(pocket_folder)
    tokenizer.eos_token_ids = pocket[1].eos_token_ids
    return pocket[0], tokenizer


def texts(
    model: Any, tokenizer: Any, prompt: list[int], stream: Any, max_tokens: int = 40
) -> list[tuple[int, str]]:
    return [(r.token, r.text) for r in stream(model, tokenizer, prompt, max_tokens=max_tokens)]


@pytest.mark.parametrize("detokenizer", [NaiveStreamingDetokenizer, BPEStreamingDetokenizer])
def test_mlx_lms_wrapper(
    fresh: tuple[Decoder, Tokenizer], pocket_mlx_lm: nn.Module, detokenizer: Any
) -> None:
    model, tokenizer = fresh
    wrapped = TokenizerWrapper(tokenizer, detokenizer, eos_token_ids=[5])
    assert wrapped.eos_token_ids == {5, tokenizer.eos_token_id}
    assert (wrapped.has_chat_template, wrapped.has_thinking) == (True, False)
    assert (len(wrapped), wrapped.vocab_size) == (len(tokenizer), tokenizer.vocab_size)
    prompt = wrapped.apply_chat_template(STORY, add_generation_prompt=True)
    assert prompt == tokenizer.apply_chat_template(STORY, add_generation_prompt=True)
    given = texts(pocket_mlx_lm, wrapped, prompt, mlx_lm.stream_generate)
    whole = "".join(text for _, text in given)
    assert whole == tokenizer.decode([token for token, _ in given])
    assert "fox" in whole
    assert whole == kvant.generate(model, tokenizer, prompt, max_tokens=40)
    assert whole == mlx_lm.generate(pocket_mlx_lm, tokenizer, prompt, max_tokens=40)  # which wraps it itself


@pytest.mark.parametrize(
    ("marks", "found"),
    [(["<think>", "</think>"], True), (["<think>"], False), (["<|channel>", "<channel|>"], True),
     (["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"], True)],
)  # fmt: skip
def test_marks_of_thinking(tmp_path: Path, marks: list[str], found: bool) -> None:
    tokenizer = make_tokenizer(tmp_path, "qwen3", extra_special_tokens=marks)
    wrapped = TokenizerWrapper(tokenizer)
    assert tokenizer.has_thinking is wrapped.has_thinking is found
    assert (tokenizer.think_start, tokenizer.think_end) == (wrapped.think_start, wrapped.think_end)


def test_an_empty_set_never_stops(fresh: tuple[Decoder, Tokenizer], pocket_mlx_lm: nn.Module) -> None:
    model, tokenizer = fresh
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Hi!"}], add_generation_prompt=True)
    stopped = list(kvant.stream_generate(model, tokenizer, prompt, max_tokens=60))
    assert stopped[-1].finish_reason == "stop"
    tokenizer.eos_token_ids = set()
    going_on = list(kvant.stream_generate(model, tokenizer, prompt, max_tokens=60))
    assert (len(going_on), going_on[-1].finish_reason) == (60, "length")
    tokens = [response.token for response in going_on]
    assert tokens[: len(stopped)] == [response.token for response in stopped]
    wrapped = TokenizerWrapper(tokenizer, BPEStreamingDetokenizer)
    wrapped.eos_token_ids = None
    assert tokens[:50] == [
        token for token, _ in texts(pocket_mlx_lm, wrapped, prompt, mlx_lm.stream_generate, 50)
    ]


def test_ends_can_be_added_and_set(fresh: tuple[Decoder, Tokenizer]) -> None:
    model, tokenizer = fresh
    prompt = tokenizer.apply_chat_template(STORY, add_generation_prompt=True)
    tokens = [token for token, _ in texts(model, tokenizer, prompt, kvant.stream_generate)]
    tokenizer.add_eos_token(tokenizer.convert_ids_to_tokens(tokens[7]))
    cut = list(kvant.stream_generate(model, tokenizer, prompt, max_tokens=40))
    assert [response.token for response in cut] == tokens[: tokens.index(tokens[7]) + 1]
    assert cut[-1].finish_reason == "stop"
    tokenizer.eos_token_ids = [tokens[3]]
    tokenizer.add_eos_token(str(tokens[2]))
    assert tokenizer.eos_token_ids == {tokens[2], tokens[3]}
    tokenizer.eos_token_ids = None
    assert tokenizer.eos_token_ids == set()


@pytest.mark.parametrize("family", ["qwen2", "llama2"])  # the latter has a token for what it does not know
def test_an_end_that_is_no_token(tmp_path: Path, family: str) -> None:
    tokenizer = make_tokenizer(tmp_path, family)
    with pytest.raises(ValueError, match="'<no token>' is not a token"):
        tokenizer.add_eos_token("<no token>")


def test_no_end_in_the_models_configuration(tmp_path: Path) -> None:
    folder = good_model(tmp_path / "model")
    (folder / "generation_config.json").unlink()
    change(folder / "config.json", eos_token_id=None)
    tokenizer = kvant.load(folder)[1]
    assert tokenizer.eos_token_ids == {tokenizer.eos_token_id}
    change(folder / "tokenizer_config.json", eos_token=None)
    for name in ("special_tokens_map.json", "added_tokens.json"):
        (folder / name).unlink()
    model, tokenizer = kvant.load(folder)
    assert tokenizer.eos_token is tokenizer.eos_token_id is None
    assert tokenizer.eos_token_ids == set()
    prompt = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)
    assert len(list(kvant.stream_generate(model, tokenizer, prompt, max_tokens=4))) == 4


def test_ids_of_other_types(pocket: tuple[Decoder, Tokenizer]) -> None:
    tokenizer = pocket[1]
    ids = tokenizer.encode("a fox")
    assert (
        tokenizer.decode(mx.array(ids))
        == tokenizer.decode(np.array(ids))
        == tokenizer.decode(tuple(ids))
        == "a fox"
    )
    assert tokenizer.decode(ids[0]) == tokenizer.decode(np.int64(ids[0]))
    assert tokenizer.convert_ids_to_tokens(mx.array(ids)) == tokenizer.convert_ids_to_tokens(ids)


@pytest.mark.parametrize("ids", [[-1], -1, [2**32], ["a"], "5", None, 3.5, [1.5], [[1]], {"a": 1}])
def test_what_is_no_id(pocket: tuple[Decoder, Tokenizer], ids: Any) -> None:
    for method in (pocket[1].decode, pocket[1].convert_ids_to_tokens):
        with pytest.raises(ValueError, match=r"^token ids? .{,180}; expected"):
            method(ids)


@pytest.mark.parametrize("text", [None, b"a", 5, ["a"], "a fox \ud83e"])
def test_what_is_no_text(pocket: tuple[Decoder, Tokenizer], text: Any) -> None:
    with pytest.raises(PromptError, match=r"^the prompt (is a|has) .*; expected"):
        pocket[1].encode(text)


def test_a_folder_without_tokenizer_json(tmp_path: Path) -> None:
    (write_tokenizer(tmp_path, "llama2") / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"no tokenizer\.json; .*AutoTokenizer"):
        load_tokenizer(tmp_path)


Change = Callable[[dict[str, Any]], object]
FLAGS: dict[str, Any] = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
MORE = {"id": 12, "content": "<more>", "special": False, **FLAGS}


def write_raw(folder: Path, raw: dict[str, Any], *, indent: int | None = None) -> Path:
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(raw, indent=indent), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


def raw_tokenizer() -> dict[str, Any]:
    vocabulary = {letter: place for place, letter in enumerate("abcdefgh")} | {"ab": 8, "cd": 9, "abcd": 10}
    by_bytes = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
    model = {
        "type": "BPE",
        "vocab": vocabulary,
        "merges": ["a b", "c d", "ab cd"],
        "continuing_subword_prefix": None,
    }
    return {
        "version": "1.0",
        "added_tokens": [{"id": 11, "content": "<end>", "special": True, **FLAGS}],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {**by_bytes, "add_prefix_space": False},
        "post_processor": None,
        "decoder": {**by_bytes, "add_prefix_space": True},
        "model": {**model, "ignore_merges": False},
    }


def written_otherwise(raw: dict[str, Any]) -> None:
    """Another way to write it, and what ids and text do not depend on."""
    model = raw["model"]
    model["merges"] = [merge.split() for merge in model["merges"]]
    model["vocab"] = dict(reversed(model["vocab"].items()))
    model["continuing_subword_prefix"] = ""
    raw["normalizer"] = {"type": "Sequence", "normalizers": [raw["normalizer"]]}
    raw["pre_tokenizer"]["trim_offsets"] = False
    raw["decoder"]["use_regex"] = False
    raw["added_tokens"][0]["special"] = False
    raw["post_processor"] = {
        "type": "ByteLevel",
        "add_prefix_space": True,
        "trim_offsets": True,
        "use_regex": True,
    }


STRIP = {"type": "Strip", "content": "x", "start": 1, "stop": 0}
DIFFERENT: dict[str, Change] = {
    "token 6 is 'h' there and 'g' here": lambda raw: raw["model"]["vocab"].update(g=7, h=6),
    "token 11 is '<stop>' there and '<end>' here": lambda raw: raw["added_tokens"][0].update(
        content="<stop>"
    ),
    "token 12 is '<more>' there and missing here": lambda raw: raw["added_tokens"].append(MORE),
    "its merges are not the same": lambda raw: raw["model"]["merges"].reverse(),
    "its model is not the same": lambda raw: raw["model"].update(ignore_merges=True),
    "its added tokens are not the same": lambda raw: raw["added_tokens"][0].update(lstrip=True),
    "its normalizer is not the same": lambda raw: raw.update(normalizer=None),
    "its pre-tokenizer is not the same": lambda raw: raw["pre_tokenizer"].update(use_regex=False),
    "its decoder is not the same": lambda raw: raw.update(
        decoder={"type": "Sequence", "decoders": [raw["decoder"], STRIP]}
    ),
}


def test_the_same_content(tmp_path: Path) -> None:
    changed = raw_tokenizer()
    written_otherwise(changed)
    folders = write_raw(tmp_path / "a", raw_tokenizer()), write_raw(tmp_path / "b", changed, indent=1)
    check_folders(*folders)
    (folders[0] / "tokenizer_config.json").unlink()  # files alike are not loaded
    check_folders(folders[0], write_raw(tmp_path / "c", raw_tokenizer()))


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The model's."""
    return loaded(write_raw(tmp_path_factory.mktemp("here") / "model", raw_tokenizer()))


@pytest.mark.parametrize("said", DIFFERENT)
def test_the_first_difference(here: Tokenizer, tmp_path: Path, said: str) -> None:
    changed = raw_tokenizer()
    DIFFERENT[said](changed)
    with pytest.raises(ModelError) as refused:
        check_same(loaded(write_raw(tmp_path / "there", changed)), here)
    assert str(refused.value) == f"the draft model's tokenizer differs: {said}"
