"""Token ids, text and special tokens, against transformers on the same folders: every family, and settings
by turns.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.counts import count
from support.tokenizers_made import FAMILIES, loaded, strings, write_tokenizer
from transformers import AutoTokenizer

from kvant.engine.load import POCKET, find_model
from kvant.text.tokenizer import Tokenizer, load_tokenizer

Files = dict[str, dict[str, Any]]  # a folder's JSON files by name
CONFIG, SPECIAL, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
WORDS = ["<|a|>", "<b>", "c d", "fox", "quick", "<extra_0>"]  # some of them are in the texts, too
FLAGS = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}


def same_facts(ours: Tokenizer, reference: Any) -> None:
    assert ours.special_tokens_map == reference.special_tokens_map
    assert ours.all_special_tokens == reference.all_special_tokens
    # an empty one
    assert ours.all_special_ids == [token for token in reference.all_special_ids if token is not None]
    assert (len(ours), ours.vocab_size) == (len(reference), reference.vocab_size)
    for name in ("bos", "eos", "unk", "pad"):
        assert getattr(ours, f"{name}_token") == getattr(reference, f"{name}_token")
        assert getattr(ours, f"{name}_token_id") == getattr(reference, f"{name}_token_id")


def same_texts(ours: Tokenizer, reference: Any, texts: list[str]) -> None:
    for text in texts:
        plain = reference.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False) == plain, text
        ids = reference.encode(text)
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == reference.decode(ids), text
        assert ours.decode(ids, skip_special_tokens=True) == reference.decode(
            ids, skip_special_tokens=True
        ), text


@pytest.fixture(scope="module", params=[*FAMILIES, POCKET])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    """kvant's tokenizer of a family, and transformers'."""
    name = request.param
    folder = (
        find_model(POCKET)
        if name == POCKET
        else write_tokenizer(tmp_path_factory.mktemp("family") / name, name)
    )
    return load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)


def test_ids_and_text(pair: tuple[Tokenizer, Any]) -> None:
    ours, reference = pair
    same_texts(ours, reference, strings(count(120, 10_000), 1, list(reference.get_added_vocab())))
    assert ours.encode("") == reference.encode("")
    assert ours.decode([]) == reference.decode([]) == ""
    assert ours.decode(5) == reference.decode(5)
    ids = reference.encode("one , two . isn 't it ?")
    for options in ({"clean_up_tokenization_spaces": True}, {"clean_up_tokenization_spaces": False}):
        assert ours.decode(ids, **options) == reference.decode(ids, **options)


def test_any_ids(pair: tuple[Tokenizer, Any]) -> None:
    ours, reference = pair
    rng = random.Random(2)
    for _ in range(count(60, 10_000)):
        ids = [rng.randrange(len(reference) + 2) for _ in range(rng.randrange(20))]
        skip = rng.random() < 0.5
        assert ours.decode(ids, skip_special_tokens=skip) == reference.decode(
            ids, skip_special_tokens=skip
        ), ids


def test_vocabulary(pair: tuple[Tokenizer, Any]) -> None:
    ours, reference = pair
    same_facts(ours, reference)
    assert ours.get_vocab() == reference.get_vocab()
    ids = list(range(len(reference) + 2))
    pieces = reference.convert_ids_to_tokens(ids)
    assert ours.convert_ids_to_tokens(ids) == pieces
    assert ours.convert_ids_to_tokens(7) == pieces[7]
    names = [*filter(None, pieces), "no token", ""]
    assert ours.convert_tokens_to_ids(names) == reference.convert_tokens_to_ids(names)
    assert ours.convert_tokens_to_ids("no token") == reference.convert_tokens_to_ids("no token")


def older(files: Files) -> None:
    """special_tokens_map.json and added_tokens.json instead of added_tokens_decoder."""
    config, raw = files[CONFIG], files["tokenizer.json"]
    config.pop("added_tokens_decoder", None)
    named = {
        name: value for name, value in config.items() if name.endswith("_token") and isinstance(value, str)
    }
    plain = {name: value for name, value in FLAGS.items() if name != "special"}
    files[SPECIAL] = {name: {"content": value, **plain, "rstrip": True} for name, value in named.items()}
    files[SPECIAL] |= {"additional_special_tokens": ["<|a|>", "fox"], "video_token": "<video>"}
    first = 1 + max(token["id"] for token in [*raw["added_tokens"], {"id": len(raw["model"]["vocab"]) - 1}])
    files[ADDED] = {"<|x1|>": first + 1, "<|x0|>": first, "fox": first + 2}
    files[ADDED] |= {token["content"]: token["id"] for token in raw["added_tokens"][:2]}


def listed(files: Files) -> None:
    """added_tokens_decoder, with a token more, and one described otherwise."""
    raw = files["tokenizer.json"]
    tokens = {
        str(token["id"]): {k: v for k, v in token.items() if k != "id"} for token in raw["added_tokens"]
    }
    first = 1 + max([*map(int, tokens), len(raw["model"]["vocab"]) - 1])
    tokens[str(raw["added_tokens"][-1]["id"])]["lstrip"] = True
    files[CONFIG]["added_tokens_decoder"] = {**tokens, str(first): {"content": "<|new|>", **FLAGS}}


def objects(files: Files) -> None:
    """Tokens with a role given as objects."""
    for name in ("eos_token", "pad_token", "mask_token"):
        value = files[CONFIG].get(name)
        content = value if isinstance(value, str) else "<|a|>"
        files[CONFIG][name] = {"content": content, "__type": "AddedToken", "lstrip": name == "mask_token"}


def not_special(files: Files) -> None:
    """tokenizer.json does not call its tokens special; those with a role are, all the same."""
    for token in files["tokenizer.json"]["added_tokens"]:
        token["special"] = False


def lengths(files: Files) -> None:
    """Truncation and padding left from training: not applied, but padding's token is the tokenizer's."""
    cut = {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}
    fill = {
        "strategy": {"Fixed": 9},
        "direction": "Left",
        "pad_to_multiple_of": 8,
        "pad_id": 0,
        "pad_type_id": 0,
    }
    files["tokenizer.json"] |= {"truncation": cut, "padding": {**fill, "pad_token": "<padding>"}}


def no_space_said(files: Files) -> None:
    """Null, which transformers' GPT-2 and GPT-NeoX refuse."""
    if "GPT" not in str(files[CONFIG].get("tokenizer_class")):
        files[CONFIG]["add_prefix_space"] = None


def fast(files: Files) -> None:
    name = files[CONFIG].get("tokenizer_class", "PreTrainedTokenizer")
    files[CONFIG]["tokenizer_class"] = name.removesuffix("Fast") + "Fast"


def setting(name: str, value: Any, file: str = CONFIG, only: str = "") -> Callable[[Files], None]:
    """One key of a file; ``only`` with vocabularies that classes rebuild, or that have this token."""

    def change(files: Files) -> None:
        model = files["tokenizer.json"]["model"]
        if not only or model["type"] == only or only in model["vocab"]:
            files[file][name] = value

    return change


def tokenizer_class(name: str, file: str = CONFIG, only: str = "BPE") -> Callable[[Files], None]:
    return setting("tokenizer_class", name, file, only)


VARIANTS: dict[str, Callable[[Files], object]] = {
    "older": older,
    "listed": listed,
    "objects": objects,
    "not special": not_special,
    "truncation and padding": lengths,
    "extra list": setting(
        "extra_special_tokens", ["fox", {"content": "<b>", "__type": "AddedToken", "lstrip": True}]
    ),
    "extra roles": setting("extra_special_tokens", {"boi_token": "<|a|>", "vision": "c d"}),
    "additional": setting("additional_special_tokens", ["quick", "<extra_0>"]),
    "own role": setting("image_token", "<image>"),
    "own role, object": setting("image_token", {"content": "fox", "__type": "AddedToken", "special": True}),
    "another end": setting("eos_token", "<b>"),
    "no beginning": setting("bos_token", None),
    "empty token": setting("cls_token", ""),
    "split": setting("split_special_tokens", True),
    "space": setting("add_prefix_space", True),
    "no space": setting("add_prefix_space", False),
    "legacy": setting("legacy", True),
    "not legacy": setting("legacy", False),
    "clean": setting("clean_up_tokenization_spaces", True),
    "not clean": setting("clean_up_tokenization_spaces", False),
    "begin and end": lambda files: files[CONFIG].update(add_bos_token=False, add_eos_token=True),
    "no class": lambda files: files[CONFIG].pop("tokenizer_class"),
    "fast": fast,
    "unknown class": tokenizer_class("FooTokenizer"),
    "base class": tokenizer_class("PreTrainedTokenizer"),
    "Llama's class": tokenizer_class("LlamaTokenizerFast"),
    "Qwen2's class": tokenizer_class("Qwen2TokenizerFast"),
    "GPT-2's class": tokenizer_class("GPT2TokenizerFast"),
    "GPT-NeoX's class": tokenizer_class("GPTNeoXTokenizerFast"),
    "Code Llama's class": tokenizer_class("CodeLlamaTokenizer", only="<unk>"),
    "class of config.json": tokenizer_class("LlamaTokenizer", "config.json"),
    "qwen2": setting("model_type", "qwen2", "config.json", "BPE"),
    "space not said": no_space_said,
    "no config": lambda files: files.pop(CONFIG),
}
KINDS = ["qwen2", "llama2", "wordpiece"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Files]:
    """Every family's files."""
    made = {}
    for name in FAMILIES:
        folder = write_tokenizer(tmp_path_factory.mktemp("files") / name, name)
        made[name] = {path.name: json.loads(path.read_text()) for path in folder.iterdir()}
    return made


def compare(folder: Path, files: Files, changes: list[str], seed: int) -> None:
    """A changed folder, by kvant and by transformers."""
    files = json.loads(json.dumps(files))
    for name in sorted(changes, key=list(VARIANTS).index):  # a file is left out last
        VARIANTS[name](files)
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    reference = AutoTokenizer.from_pretrained(folder)
    ours = loaded(folder)
    same_facts(ours, reference)
    known = reference.get_added_vocab().keys() - {"<FILL_ME>"}  # Code Llama's makes two texts of one there
    same_texts(ours, reference, strings(15, seed, sorted(known) + WORDS))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_setting(files: dict[str, Files], tmp_path: Path, variant: str) -> None:
    for family in KINDS:
        compare(tmp_path / family, files[family], [variant], 3)


def test_settings_together(files: dict[str, Files], tmp_path: Path) -> None:
    for seed in range(count(40, 3000)):
        rng = random.Random(seed)
        family = rng.choice(list(FAMILIES))
        changes = rng.sample(list(VARIANTS), rng.randrange(5))
        print(family, changes)  # shown where it fails
        compare(tmp_path / str(seed), files[family], changes, seed)
