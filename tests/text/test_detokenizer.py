"""Text as its tokens come, against the whole sequence decoded at once, and against mlx-lm's streaming detokenizers."""

import random
import re
from itertools import groupby
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    NaiveStreamingDetokenizer,
    SPMStreamingDetokenizer,
    StreamingDetokenizer,
)
from support.counts import count
from support.tokenizers_made import FAMILIES, strings, write_tokenizer

from kvant.engine.load import POCKET, find_model
from kvant.text.tokenizer import Tokenizer, load_tokenizer

BYTE_FALLBACK = ["mistral", "llama2", "llama2-legacy", "unigram"]
UNKNOWN = "\ufffd"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    """Every family's tokenizer."""
    folder = tmp_path_factory.mktemp("made")
    families = {name: load_tokenizer(write_tokenizer(folder / name, name)) for name in FAMILIES}
    return {**families, POCKET: load_tokenizer(find_model(POCKET))}


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
        assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids, clean_up_tokenization_spaces=False), ids


@pytest.mark.parametrize("family", BYTE_FALLBACK)
def test_segments_of_any_bytes(made: dict[str, Tokenizer], family: str) -> None:
    """If a run of bytes is no UTF-8, the library replaces all of it: Python's codec is the oracle then."""
    tokenizer, rng = made[family], random.Random(7)
    bytes_ = [token for token in range(len(tokenizer)) if tokenizer.convert_ids_to_tokens(token).startswith("<0x")]
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
        assert (detokenizer.text, detokenizer.tokens, detokenizer.offset, detokenizer.last_segment) == ("", [], 0, "")
