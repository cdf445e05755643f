"""Text as its tokens come, against mlx-lm's streaming detokenizers; and text that is known already,
encoded.
"""

import json
import random
import re
import shutil
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    NaiveStreamingDetokenizer,
    SPMStreamingDetokenizer,
    StreamingDetokenizer,
)
from support.counts import count
from support.tokenizers_made import FAMILIES, loaded, make_tokenizer, strings, write_tokenizer
from transformers import AutoTokenizer

from kvant.engine.load import POCKET, find_model
from kvant.text.prompt import KnownText
from kvant.text.tokenizer import Tokenizer

BYTE_FALLBACK = ["mistral", "llama2", "llama2-legacy", "unigram"]
UNKNOWN = "\ufffd"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    """Every family's tokenizer."""
    folder = tmp_path_factory.mktemp("made")
    families = {name: make_tokenizer(folder / name, name) for name in FAMILIES}
    return {**families, POCKET: loaded(find_model(POCKET))}


def stream(tokenizer: Any, ids: list[int]) -> list[str]:
    """The segment after each token, and the last."""
    detokenizer = tokenizer.detokenizer
    segments = []
    for token in ids:
        detokenizer.add_token(token)
        segments.append(detokenizer.last_segment)
    detokenizer.finalize()
    segments.append(detokenizer.last_segment)
    assert detokenizer.text == "".join(segments)
    assert detokenizer.tokens == ids
    return segments


def any_ids(tokenizer: Tokenizer, rng: random.Random, bytes_: list[int]) -> list[int]:
    """Ids that need not form characters; many of them bytes; some that no token has."""
    size = len(tokenizer) + 2
    return [rng.choice([rng.randrange(size), rng.choice(bytes_)]) for _ in range(rng.randrange(1, 25))]


@pytest.mark.parametrize("family", [*FAMILIES, POCKET])
def test_segments(made: dict[str, Tokenizer], family: str) -> None:
    tokenizer, rng = made[family], random.Random(6)
    for text in strings(count(40, 10_000), 5, [*tokenizer.all_special_tokens, "\U0001f1e9\U0001f1ea"]):
        ids = tokenizer.encode(text)
        segments = stream(tokenizer, ids)
        assert "".join(segments) == tokenizer.decode(ids, clean_up_tokenization_spaces=False), text
        assert not any(segment.endswith(UNKNOWN) for segment in segments)
    for _ in range(0 if family in BYTE_FALLBACK else count(60, 10_000)):
        ids = any_ids(tokenizer, rng, list(range(5, 260)))
        assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids, clean_up_tokenization_spaces=False), (
            ids
        )


@pytest.mark.parametrize("family", BYTE_FALLBACK)
def test_segments_of_any_bytes(made: dict[str, Tokenizer], family: str) -> None:
    """If a run of bytes is no UTF-8, the library replaces all of it: Python's codec is the oracle then."""
    tokenizer, rng = made[family], random.Random(7)
    bytes_ = [
        token for token in range(len(tokenizer)) if tokenizer.convert_ids_to_tokens(token).startswith("<0x")
    ]
    assert len(bytes_) == 256
    exact = 0
    for number in range(count(150, 10_000)):
        some = bytes_[:128] if number % 2 else bytes_
        ids = [token for token in any_ids(tokenizer, rng, some) if token < len(tokenizer)]
        text, valid = by_runs(tokenizer.convert_ids_to_tokens(ids))
        given = "".join(stream(tokenizer, ids))
        if valid:
            exact += 1
            assert given == tokenizer.decode(ids) == text, ids
        else:
            assert re.sub(UNKNOWN + "+", UNKNOWN, given) == re.sub(UNKNOWN + "+", UNKNOWN, text), ids
    assert exact > 20


def by_runs(pieces: list[str]) -> tuple[str, bool]:
    """The text of pieces, each run of bytes decoded by itself, and whether all of them are UTF-8."""
    parts, valid = [], True
    for are_bytes, run in groupby(pieces, lambda piece: re.fullmatch("<0x[0-9A-F]{2}>", piece) is not None):
        if are_bytes:
            parts.append(bytes(int(piece[3:5], 16) for piece in run).decode("utf-8", "replace"))
            valid = valid and UNKNOWN not in parts[-1]
        else:
            parts += [piece.replace("▁", " ") for piece in run]
    return "".join(parts).removeprefix(" "), valid


STEPS = [
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


@pytest.mark.parametrize("way", ["alone", "behind a split", "as a normalizer"])
@pytest.mark.parametrize(
    "decoder",
    [
        {"type": "Sequence", "decoders": [*STEPS, STRIP]},
        {"type": "Sequence", "decoders": STEPS},
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": False},
        None,
    ],
)
def test_text_that_was_made_bytes_comes_back(tmp_path: Path, decoder: Any, way: str) -> None:
    """Some conversions have SentencePiece's decoder there. The oracle is transformers with the right one."""
    right = write_tokenizer(tmp_path / "right", "llama3", clean_up_tokenization_spaces=False)
    raw = json.loads((right / "tokenizer.json").read_text())
    steps = raw["pre_tokenizer"]["pretokenizers"]
    assert [step["type"] for step in steps] == ["Split", "ByteLevel"]
    if way == "alone":
        raw["pre_tokenizer"] = {**steps[1], "use_regex": True}
    elif way == "as a normalizer":
        raw |= {"normalizer": {"type": "ByteLevel"}, "pre_tokenizer": None}
    (right / "tokenizer.json").write_text(json.dumps(raw))
    wrong = shutil.copytree(right, tmp_path / "wrong")
    (wrong / "tokenizer.json").write_text(json.dumps({**raw, "decoder": decoder}))
    tokenizer, reference = loaded(wrong), AutoTokenizer.from_pretrained(right)
    assert "Ġ" in "".join(tokenizer.get_vocab())
    for text in ["Café\n\n  au lait, 日本 \U0001f98a", *strings(40, 8, tokenizer.all_special_tokens)]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == "".join(stream(tokenizer, ids)) == reference.decode(ids) == text
        pieces = tokenizer.token_bytes()
        assert pieces is not None
        assert b"".join(pieces[token] for token in ids) == text.encode()


@pytest.mark.parametrize(
    ("family", "reference"),
    [
        (POCKET, BPEStreamingDetokenizer),
        ("mistral", SPMStreamingDetokenizer),
        ("wordpiece", NaiveStreamingDetokenizer),
    ],
)
def test_the_interface_is_mlx_lms(
    made: dict[str, Tokenizer], family: str, reference: type[StreamingDetokenizer]
) -> None:
    ids = made[family].encode("Ein Bär \U0001f98a sees it", add_special_tokens=False)
    both = ours, theirs = made[family].detokenizer, reference(made[family])
    for detokenizer in both:
        detokenizer.reset()
        for token in ids:
            detokenizer.add_token(token)
        assert (detokenizer.tokens, detokenizer.offset) == (ids, 0)
        detokenizer.finalize()
    assert ours.text == theirs.text
    for segment in (ours.text, ""):
        assert ours.last_segment == theirs.last_segment == segment
    assert ours.offset == theirs.offset == len(ours.text)
    for detokenizer in both:
        detokenizer.reset()
        assert (detokenizer.text, detokenizer.tokens, detokenizer.offset, detokenizer.last_segment) == (
            "",
            [],
            0,
            "",
        )


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


# How a turn begins and how its answer does, in the manner of each family.
CHATML = ("<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n", "{}<|im_end|>\n")
FORMS = {
    "qwen2": CHATML,
    "smollm2": CHATML,
    "llama3": ("<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>", "{}<|eot_id|>"),
    "llama2": ("<s>[INST] {} [/INST]", " {} </s>"),
    "llama2-legacy": ("<s>[INST] {} [/INST]", " {} </s>"),
    "mistral": (" [INST] {}[/INST]", " {}</s>"),
    "olmo2": ("<|user|>\n{}\n<|assistant|>\n", "{}<|endoftext|>\n"),
    "wordpiece": ("user {} assistant ", "{} [SEP] "),
    "unigram": ("user {} assistant ", "{}</s>"),
}


@pytest.mark.parametrize("family", FORMS)
def test_it_is_the_encoding_of_the_whole(family: str, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, family)
    asks, answers = FORMS[family]
    words = strings(60, 3, [])
    remembered = 0
    for first in range(0, 60, 6):
        known, text = KnownText(tokenizer), ""
        for question, answer in zip(words[first : first + 3], words[first + 3 : first + 6], strict=True):
            text += asks.format(question)
            ids = known.encode(text)
            assert ids == _encode(tokenizer, text)
            whole = _encode(tokenizer, text + answers.format(answer))
            if whole[: len(ids)] != ids:
                break  # the answer's begin changes the prompt's last token: no model writes it so
            written = _encode(tokenizer, text + answers.format(answer).rstrip("\n"))[len(ids) :]
            if written and written[-1] in tokenizer.all_special_ids:
                written.pop()
            known.answered(text, ids, written)
            text += answers.format(answer)
            remembered += 1
    assert remembered > 5


def test_an_answer_in_other_tokens_keeps_them(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, "qwen2")
    asks, answers = FORMS["qwen2"]
    first = asks.format("Who?")
    letters = [_encode(tokenizer, letter)[0] for letter in "The quick"]
    assert letters != _encode(tokenizer, "The quick")
    known = KnownText(tokenizer)
    prompt = known.encode(first)
    known.answered(first, prompt, letters)
    after = answers.format("The quick") + asks.format("And?")
    expected = prompt + letters + _encode(tokenizer, after.removeprefix("The quick"))
    assert known.encode(first + after) == expected
    # A second turn, and what it had before: the first answer's tokens stay known.
    known.answered(first + after, expected, letters)
    end = _encode(tokenizer, answers.format(""))
    assert known.encode(first + after + answers.format("The quick")) == expected + letters + end
    again = known.encode(first + answers.format("The quick") + asks.format("Why?"))
    assert again[: len(prompt) + 9] == prompt + letters
    # In a word that goes on, or in another conversation, they are not the text's.
    assert known.encode(first + "The quicker") == _encode(tokenizer, first + "The quicker")
    assert known.encode("x" + first + after) == _encode(tokenizer, "x" + first + after)
    # Ids alone can be known.
    known.restore(letters)
    assert known.encode("The quick<|im_end|>")[:-1] == letters
    known.restore([])
    assert known.encode("The quick") == _encode(tokenizer, "The quick")
