"""The file of llama.cpp's predictions, written here as its source says, and the report that compares with
it.
"""

import json
import struct
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.command import call, refusal
from support.oracle import Array

from kvant.errors import KvantError
from kvant.models import Decoder
from kvant.tools.report.file_reader import FileReader
from kvant.tools.report.reference import read_reference
from kvant.tools.report.texts import Text, built_in_text

Pocket = tuple[Decoder, Any]
LENGTH = 64


def write_llama(path: Path, pieces: Any, logits: list[Array]) -> None:
    """What llama-perplexity writes: tools/perplexity/perplexity.cpp, the second log_softmax."""
    length, (_, vocabulary) = len(pieces[0]), logits[0].shape
    data = b"_logits_" + struct.pack("<3i", length, vocabulary, len(pieces))
    data += np.array(pieces, np.int32).tobytes()
    for rows in logits:
        for row in rows[length // 2 : -1].astype(np.float32):
            most = row.max()
            least = max(row.min(), most - 16)
            scale = (most - least) / np.float32(65535)
            places = np.where(row > least, np.rint((row - least) / scale), 0).astype(np.uint16)
            log_sum = np.log(np.exp((row - most).astype(np.float64)).sum())
            data += struct.pack("<2f", scale, least - most - log_sum)
            data += np.pad(places, (0, vocabulary % 2)).tobytes()
    path.write_bytes(data)


@pytest.fixture(scope="module")
def text(pocket: Pocket) -> Text:
    return built_in_text(pocket[1], LENGTH, 2 * LENGTH)


@pytest.fixture(scope="module")
def file(pocket: Pocket, text: Text, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama") / "base.kld"
    write_llama(path, text.pieces, [np.array(pocket[0](mx.array([piece]))[0]) for piece in text.pieces])
    return path


def test_what_was_written_is_read(pocket: Pocket, text: Text, file: Path) -> None:
    found = read_reference(file, 1280, None)
    assert found.text.pieces == text.pieces
    for number, piece in enumerate(text.pieces):
        logits = np.array(pocket[0](mx.array([piece]))[0], np.float64)[LENGTH // 2 : -1]
        expected = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        given = np.array(found.rows(number))
        likely = expected > -15
        assert np.abs(given - expected)[likely].max() < 1e-3
        assert (given[expected < -17] == -np.inf).all()
    begun = read_reference(file, 1280, 7).text.pieces
    assert [piece[0] for piece in begun] == [7, 7]
    assert [piece[1:] for piece in begun] == [piece[1:] for piece in text.pieces]


def test_a_file_is_read_from_any_piece(text: Text, file: Path) -> None:
    """Beginning a piece again does not go on to the next one."""
    found = read_reference(file, 1280, None)
    reader = FileReader(found, found)
    for number in (1, 0, 0, 1):
        reader.begin(number)
        given = reader.read(text.pieces[number][:-1])
        expected = found.comparable_rows(found.rows(number), number)
        assert mx.array_equal(given[-len(expected) :], expected).item()


def test_an_odd_vocabulary(tmp_path: Path) -> None:
    logits = np.random.default_rng(0).normal(size=(8, 5)).astype(np.float32)
    write_llama(tmp_path / "base", [list(range(4)) * 2], [logits])
    found = read_reference(tmp_path / "base", 5, None)
    expected = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    assert found.rows(0).shape == (3, 5)
    np.testing.assert_allclose(np.array(found.rows(0)), expected[4:-1], atol=1e-3)


def test_the_report(pocket: Pocket, file: Path) -> None:
    """The model that wrote it is as near as 16 bits; a coarse cache is as far as from its own reference."""
    done = call("report", "--reference", str(file), "--formats", "0,4g32:notail", "--json", "-q")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    exact, coarse = said["formats"]
    assert said["compared_with"] == str(file)
    assert exact["decode"]["positions"] == LENGTH // 4
    assert exact["prefill"]["positions"] == 2 * (LENGTH - 1 - LENGTH // 2) - LENGTH // 4
    for leg in ("prefill", "decode"):
        assert 0 < exact[leg]["mean_kld_nats"] < 1e-5
        assert coarse[leg]["mean_kld_nats"] > 10 * exact[leg]["mean_kld_nats"]
        assert said["reference"][leg]["mean_kld_nats"] == exact[leg]["mean_kld_nats"]
    assert said["reference"]["recall"]["asked"] == 0
    table = call("report", "--reference", str(file), "--formats", "4g32:notail", "-q").stdout
    assert f"predictions of the second half of each piece in {file}" in table.replace("\n", " ")


def test_what_another_cache_predicted(pocket: Pocket, text: Text, file: Path, tmp_path: Path) -> None:
    """A second file, written with kvant's 4-bit cache, is as far from the first as that cache's own row."""
    path = tmp_path / "q4_0.kld"
    caches = [pocket[0].make_cache(LENGTH, kv_bits=4, kv_group_size=32, kv_tail=False) for _ in text.pieces]
    logits = [
        np.array(pocket[0](mx.array([piece]), cache=cache)[0])
        for piece, cache in zip(text.pieces, caches, strict=True)
    ]
    write_llama(path, text.pieces, logits)
    flags = ("--reference", str(file), "--compare", str(path), "--formats", "4g32:notail", "-q")
    done = call("report", *flags, "--json", "--plot", str(tmp_path / "a.svg"))
    assert done.returncode == 0, done.stderr
    own, theirs = json.loads(done.stdout)["formats"]
    assert (theirs["format"], theirs["bits"], theirs["bytes_per_token"]) == ("q4_0", None, None)
    for leg in ("prefill", "decode"):
        assert theirs[leg]["positions"] == own[leg]["positions"]
        for figure in ("mean_kld_nats", "p99_kld_nats", "perplexity"):
            assert theirs[leg][figure] == pytest.approx(own[leg][figure], rel=0.1, abs=2e-5)
    assert "q4_0" in (tmp_path / "a.svg").read_text()  # among those not drawn
    write_llama(path, text.pieces[::-1], logits)
    assert "its text differs" in refusal(1, "report", *flags)
    assert "needs --reference" in refusal(2, "report", "--compare", str(path))


def test_what_is_refused(file: Path, tmp_path: Path) -> None:
    data = file.read_bytes()
    other = tmp_path / "other"
    for changed, said in (
        (b"", "not a file of llama-perplexity"),
        (b"x" + data[1:], "not a file of llama-perplexity"),
        (data[:-1], "incomplete"),
        (data + b"\0", "incomplete"),
        (data[:20] + struct.pack("<i", 5000) + data[24:], "not in the vocabulary"),
        (data[:20] + struct.pack("<i", -1) + data[24:], "not in the vocabulary"),
    ):
        other.write_bytes(changed)
        with pytest.raises(KvantError, match=said):
            read_reference(other, 1280, None)
    with pytest.raises(KvantError, match="from a model with 1280 tokens in its vocabulary; expected 5"):
        read_reference(file, 5, None)
    assert "cannot be read" in refusal(1, "report", "--reference", str(tmp_path / "none"))
    assert "leave out --text" in refusal(2, "report", "--reference", str(file), "--text", "x")
    refused = refusal(2, "report", "--reference", str(file), "--reserve", "32")
    assert "--reserve is 32" in refused
    assert "pieces of 64 tokens" in refused
    assert "leave out --tune" in refusal(2, "report", "--reference", str(file), "--tune", str(tmp_path / "x"))
