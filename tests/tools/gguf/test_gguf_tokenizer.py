"""Imported tokenizers give the ids that transformers' tokenizer of the same vocabulary gives."""

import heapq
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from gguf import Keys, TokenType
from support.counts import count
from support.gguf_files import Content, tokenizer_metadata
from support.tokenizers_made import loaded, strings, write_tokenizer
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import generate_merges

from kvant.errors import ConvertError
from kvant.text.tokenizer import Tokenizer
from kvant.tools.gguf.reader import open_gguf
from kvant.tools.gguf.tokenizer import build_tokenizer, end_ids

T = Keys.Tokenizer
STRINGS = count(300, 10_000)
Json = dict[str, Any]
# As Mistral-Nemo's and GPT-2's tokenizer.json have them.
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
SPLIT = {"type": "Split", "pattern": {"Regex": TEKKEN}, "behavior": "Isolated", "invert": False}


def _imported(folder: Path, metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a file with these keys."""
    folder.mkdir()
    path = Content("llama", dict(metadata)).write(folder / "file.gguf")
    with open_gguf(path) as file:
        tokenizer, config = build_tokenizer(file.metadata)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return loaded(folder)


def _compare(found: Tokenizer, expected: Any, specials: Sequence[str]) -> None:
    for text in strings(STRINGS, 1, [*specials]):
        ids = found.encode(text)
        assert ids == expected.encode(text), repr(text)
        assert found.decode(ids) == expected.decode(ids), repr(text)


@pytest.mark.parametrize("family", ["smollm2", "llama3", "qwen2"])
def test_byte_level_vocabularies(tmp_path: Path, family: str) -> None:
    # Of SmolLM2 the class is not the declared one, GPT-2's: transformers 5 does not split digits with that.
    declared = {"tokenizer_class": "PreTrainedTokenizerFast"} if family == "smollm2" else {}
    expected = AutoTokenizer.from_pretrained(write_tokenizer(tmp_path / "reference", family, **declared))
    found = _imported(tmp_path / "imported", tokenizer_metadata(family))
    assert found.eos_token_id == expected.eos_token_id
    assert found.bos_token_id == expected.bos_token_id
    assert found.pad_token_id == expected.pad_token_id or expected.pad_token is None
    _compare(found, expected, list(expected.get_added_vocab()))


@pytest.mark.parametrize(
    ("pre", "family", "steps", "whole"),
    [
        ("gpt-2", "smollm2", [{**BYTES, "use_regex": True}], False),
        ("tekken", "llama3", [SPLIT, BYTES], True),
    ],
)
def test_other_ways_to_split(tmp_path: Path, pre: str, family: str, steps: list[Json], whole: bool) -> None:
    """The vocabulary of a family, split as another family does."""
    reference = write_tokenizer(tmp_path / "reference", family, tokenizer_class="PreTrainedTokenizerFast")
    raw = json.loads((reference / "tokenizer.json").read_text())
    raw["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    raw["model"]["ignore_merges"] = whole
    (reference / "tokenizer.json").write_text(json.dumps(raw))
    expected = AutoTokenizer.from_pretrained(reference)
    found = _imported(tmp_path / "imported", tokenizer_metadata(family, pre=pre))
    _compare(found, expected, list(expected.get_added_vocab()))


def test_a_vocabulary_of_sentence_pieces(tmp_path: Path) -> None:
    """Against transformers with the merges that its own converter makes of the scores."""
    reference = write_tokenizer(
        tmp_path / "reference", "llama2-legacy", tokenizer_class="PreTrainedTokenizerFast"
    )
    metadata = tokenizer_metadata("llama2-legacy")
    raw = json.loads((reference / "tokenizer.json").read_text())
    scores = dict(zip(metadata[Keys.Tokenizer.LIST], metadata[Keys.Tokenizer.SCORES], strict=True))
    raw["model"]["merges"] = generate_merges(raw["model"]["vocab"], scores)
    (reference / "tokenizer.json").write_text(json.dumps(raw))
    expected = AutoTokenizer.from_pretrained(reference)
    found = _imported(tmp_path / "imported", metadata)
    _compare(found, expected, ["<s>", "</s>"])
    assert found.encode("a fox")[0] == found.bos_token_id


def test_pieces_are_joined_by_their_scores(tmp_path: Path) -> None:
    """Against SentencePiece's own rule: of all neighbours join those whose piece scores best, from the
    left.
    """
    metadata = tokenizer_metadata("llama2-legacy") | {Keys.Tokenizer.ADD_BOS: False}
    tokens = metadata[Keys.Tokenizer.LIST]
    scores = dict(zip(tokens, metadata[Keys.Tokenizer.SCORES], strict=True))
    found = _imported(tmp_path / "imported", metadata)
    for text in strings(STRINGS, 2, []):
        if text:
            expected = _sentence_pieces("▁" + text.replace(" ", "▁"), scores)
            assert found.encode(text) == [tokens.index(piece) for piece in expected], repr(text)


def _sentence_pieces(text: str, scores: Mapping[str, float]) -> list[str]:
    pieces: list[str | None] = [*text]
    after = {at: at + 1 for at in range(len(pieces))}
    before = {at: at - 1 for at in range(len(pieces) + 1)}
    waiting: list[tuple[float, int, str]] = []

    def look(left: int) -> None:
        right = after.get(left, len(pieces))
        if left >= 0 and right < len(pieces) and (joined := f"{pieces[left]}{pieces[right]}") in scores:
            heapq.heappush(waiting, (-scores[joined], left, joined))

    for at in range(len(pieces)):
        look(at)
    while waiting:
        _, left, joined = heapq.heappop(waiting)
        right = after[left] if pieces[left] is not None else len(pieces)
        if right < len(pieces) and f"{pieces[left]}{pieces[right]}" == joined:
            pieces[left], pieces[right] = joined, None
            after[left] = after[right]
            before[after[left]] = left
            look(left)
            if before[left] >= 0:
                look(before[left])
    found = [piece for piece in pieces if piece is not None]
    return [part for piece in found for part in ([piece] if piece in scores else _bytes(piece))]


def _bytes(piece: str) -> list[str]:
    return [f"<0x{byte:02X}>" for byte in piece.encode()]


def test_no_text_becomes_a_byte_or_a_control_token(tmp_path: Path) -> None:
    """SentencePiece's rule: pieces of those types are not joined, even if their parts are pieces."""
    metadata = tokenizer_metadata("llama2-legacy") | {Keys.Tokenizer.ADD_BOS: False}
    tokens, kinds = [*metadata[T.LIST]], [*metadata[T.TOKEN_TYPE]]
    scores = [*metadata[T.SCORES]]
    more = {*"<0x41>", "<0", "x4", "1>", "x41>"} - {*tokens}
    tokens += sorted(more)
    kinds += [int(TokenType.NORMAL)] * len(more)
    scores += [-1.0] * len(more)
    found = _imported(
        tmp_path / "imported", metadata | {T.LIST: tokens, T.TOKEN_TYPE: kinds, T.SCORES: scores}
    )
    ids = found.encode("<0x41>")
    assert tokens.index("<0x41>") not in ids
    assert found.decode(ids) == "<0x41>"


@pytest.mark.parametrize(
    ("family", "said", "begins"),
    [
        ("smollm2", None, False),
        ("smollm2", True, True),
        ("llama3", None, True),  # llama.cpp's default for this name
        ("llama3", False, False),
        ("llama2-legacy", None, True),
        ("llama2-legacy", False, False),
    ],
)
def test_whether_a_text_begins_with_a_token(
    tmp_path: Path, family: str, said: bool | None, begins: bool
) -> None:
    more = {} if said is None else {Keys.Tokenizer.ADD_BOS: said}
    found = _imported(tmp_path / "imported", tokenizer_metadata(family) | more)
    assert (found.encode("fox")[0] == found.bos_token_id) == begins


def test_without_a_space_before_the_text(tmp_path: Path) -> None:
    metadata = tokenizer_metadata("llama2-legacy") | {
        Keys.Tokenizer.ADD_PREFIX: False,
        Keys.Tokenizer.ADD_BOS: False,
    }
    found = _imported(tmp_path / "imported", metadata)
    assert found.decode(found.encode("fox")) == "fox"
    assert not found.convert_ids_to_tokens(found.encode("fox"))[0].startswith("▁")


def test_the_ends_of_an_answer() -> None:
    """Those that the file names, and tokens that are known as ends if they are control tokens."""
    metadata = tokenizer_metadata("llama3")
    tokens = metadata[Keys.Tokenizer.LIST]
    metadata[Keys.Tokenizer.EOS_ID] = tokens.index("<|end_of_text|>")
    assert end_ids(metadata) == sorted(map(tokens.index, ("<|end_of_text|>", "<|eot_id|>")))
    metadata[Keys.Tokenizer.EOM_ID] = 77
    assert 77 in end_ids(metadata)
    metadata[Keys.Tokenizer.TOKEN_TYPE] = [1] * len(tokens)
    assert end_ids(metadata) == sorted([tokens.index("<|end_of_text|>"), 77])


def test_chat_templates(tmp_path: Path) -> None:
    templates = {Keys.Tokenizer.CHAT_TEMPLATE: "{{ messages[0].content }}!"}
    found = _imported(tmp_path / "one", tokenizer_metadata("smollm2") | templates)
    messages = [{"role": "user", "content": "Hi"}]
    assert found.apply_chat_template(messages, tokenize=False) == "Hi!"
    templates[Keys.Tokenizer.CHAT_TEMPLATE_N.format(name="tool_use")] = "{{ tools|length }} tools"
    found = _imported(tmp_path / "two", tokenizer_metadata("smollm2") | templates)
    assert found.apply_chat_template(messages, tokenize=False) == "Hi!"
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert found.apply_chat_template(messages, tools=tools, tokenize=False) == "1 tools"


def test_without_types_every_token_is_text(tmp_path: Path) -> None:
    """But those that the file names for a use."""
    metadata = tokenizer_metadata("llama3") | {Keys.Tokenizer.ADD_BOS: False}
    del metadata[Keys.Tokenizer.TOKEN_TYPE]
    found = _imported(tmp_path / "imported", metadata)
    assert len(found.encode("<|start_header_id|>")) > 1
    assert len(found.encode("<|eot_id|>")) == 1


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("smollm2", {T.MODEL: "bert"}, r"model is 'bert'; expected gpt2 or llama"),
        ("smollm2", {T.MODEL: 3}, r"model is '3'; expected gpt2 or llama"),
        ("smollm2", {T.PRE: "falcon"}, r"pre is 'falcon'; expected gpt-2, smollm, llama-bpe"),
        ("smollm2", {T.PRE: None}, r"pre is 'None'; expected gpt-2"),
        ("smollm2", {T.MERGES: None}, r"merges is not a list of texts"),
        ("smollm2", {T.MERGES: ["a"]}, r"merges has an entry that is not two tokens"),
        ("smollm2", {T.LIST: ["a", "a"]}, r"tokens has a token twice"),
        ("smollm2", {T.LIST: [1, 2]}, r"tokens is not a list of texts"),
        ("smollm2", {T.LIST: None}, r"tokens is not a list of texts"),
        ("smollm2", {T.TOKEN_TYPE: [1, 2]}, r"token_type does not list one number for each of \d+ tokens"),
        ("smollm2", {T.EOS_ID: 10**6}, r"eos_token_id is 1000000; expected a token from 0 to"),
        ("smollm2", {T.BOS_ID: "x"}, r"bos_token_id is x; expected a token"),
        ("smollm2", {T.ADD_EOS: True}, r"add_eos_token is true"),
        ("smollm2", {T.CHAT_TEMPLATE: 3}, r"chat_template is not text"),
        ("llama2-legacy", {T.SCORES: None}, r"scores does not list one number for each of \d+ tokens"),
        ("llama2-legacy", {T.SCORES: ["a"] * 900}, r"scores does not list one number"),
        ("llama2-legacy", {T.LIST: ["a" * 257]}, r"one of 257 characters; expected at most 256"),
    ],
)
def test_refused(family: str, changes: Json, message: str) -> None:
    metadata = {
        key: value for key, value in (tokenizer_metadata(family) | changes).items() if value is not None
    }
    if family == "llama2-legacy" and T.LIST in changes:
        metadata |= {T.SCORES: [0.0], T.TOKEN_TYPE: [1]}
    with pytest.raises(ConvertError, match=message):
        build_tokenizer(metadata)
