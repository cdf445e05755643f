"""`kvant report`: its formats, texts and questions, and the command as its user meets it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.nn as nn
import pytest
from support.adapters import adapter_config, save_adapter
from support.checkpoints import load_reference
from support.command import call, refusal
from support.pools import with_layers

from kvant.engine.generate import generate
from kvant.errors import PromptError
from kvant.models import Decoder, load_decoder
from kvant.operators.packing import PACKINGS
from kvant.text.prompt import encode_rendered, render_chat
from kvant.tools.report.formats import (
    NOTATION,
    REFERENCE,
    CacheFormat,
    check_formats,
    default_formats,
    parse_formats,
)
from kvant.tools.report.runs import CacheReader, answer, answer_after_hit
from kvant.tools.report.texts import (
    built_in_text,
    heldout_documents,
    read_dialogue,
    recall_dialogues,
    text_file,
)

Pocket = tuple[Decoder, Any]
FORMAT = CacheFormat(8, 32)


class TestFormats:
    @pytest.mark.parametrize("bits", PACKINGS)
    def test_every_packing_has_a_notation(self, bits: int) -> None:
        (found,) = parse_formats(f"{bits}g32")
        assert (found.kv_bits, found.kv_group_size, found.label) == (bits, 32, f"{bits}g32")
        assert str(bits) in NOTATION

    @pytest.mark.parametrize("name", ["5g32", "84g32", "g32", "8", "8g", "8g1234567"])
    def test_an_unknown_notation(self, name: str) -> None:
        with pytest.raises(ValueError, match="is unknown; expected 0, or"):
            parse_formats(name)

    def test_what_a_model_cannot_have(
        self, pocket: Pocket, make_checkpoint: Callable[..., tuple[Path, nn.Module]]
    ) -> None:
        folder, _ = make_checkpoint(
            architectures=["Qwen3ForCausalLM"], model_type="qwen3", head_dim=48, attention_bias=False
        )
        unbiased = load_decoder(folder)
        with pytest.raises(ValueError, match="8g16:nosplit: the model's keys and values have no bias"):
            check_formats([CacheFormat(8, 16, bias_split=False)], unbiased)
        assert [f.label for f in default_formats(unbiased)] == ["8g16", "4g16"]
        assert len(default_formats(pocket[0])) == 8


class TestQuestions:
    def test_an_answer_is_right_where_generation_writes_it(self, pocket: Pocket) -> None:
        """Scored in one pass they are those that are written greedily."""
        model, tokenizer = pocket
        documents = [d for d in heldout_documents() if d["kind"] in ("recall-2", "recall-4", "facts")][:4]
        found, written = [], []
        for document in documents:
            for given in (document["answer"], "It says Otto likes purple."):
                conversation = read_dialogue(tokenizer, document | {"answer": given})
                reader = CacheReader(model, FORMAT.make_cache(model, len(conversation.ids)))
                found.append(answer(reader, conversation)[-1])
                ids = encode_rendered(tokenizer, render_chat(tokenizer, document["messages"]))
                cache = FORMAT.make_cache(model, len(ids) + 24)
                written.append(
                    generate(model, tokenizer, ids, max_tokens=24, prompt_cache=cache).strip() == given
                )
        assert found == written
        assert {*found} == {True, False}

    def test_recall(self, pocket: Pocket) -> None:
        """All lengths are among them, within the tokens given; and a cache that forgets does not answer."""
        model, tokenizer = pocket
        dialogues = recall_dialogues(tokenizer, 4096)
        assert 3000 < sum(len(dialogue.ids) for dialogue in dialogues) <= 4096
        assert recall_dialogues(tokenizer, 100) == []
        places = [first for dialogue in dialogues for first, _ in dialogue.answers]
        assert min(places) < 64 < 512 <= max(places)
        short = sorted(dialogues, key=lambda dialogue: len(dialogue.ids))[:2]
        cache = FORMAT.make_cache(model, 400)
        assert all(right for dialogue in short for right in answer(CacheReader(model, cache), dialogue))

        for bits in (0, 4):  # of a prefix that was hit
            found = answer_after_hit(model, CacheFormat(bits), dialogues[:4])
            assert len(found) > 2
            assert all(found)

        def forgets(number: int, layer: Any) -> None:
            layer.multi_head_cache_attention = lambda query, key, value, mask=None: 0.0 * query

        reader = CacheReader(model, with_layers(cache, forgets))
        assert not any(right for dialogue in short for right in answer(reader, dialogue))


class TestTexts:
    def test_the_built_in_text(self, pocket: Pocket) -> None:
        _, tokenizer = pocket
        text = built_in_text(tokenizer, 100, 250)
        assert [len(piece) for piece in text.pieces] == [100, 100, 50]
        assert text.tokens == 250
        everything = built_in_text(tokenizer, 100, 10**9)
        assert everything.left_out == 0
        assert everything.tokens == text.tokens + text.left_out

    def test_a_file(self, pocket: Pocket, tmp_path: Path) -> None:
        _, tokenizer = pocket
        (tmp_path / "a.txt").write_text("\ufeffThe fox went home.", encoding="utf-8")
        ids = tokenizer.encode("The fox went home.", add_special_tokens=False)
        text = text_file(tmp_path / "a.txt", tokenizer, 1280, 3, 4)
        assert text.pieces == (tuple(ids[:3]), tuple(ids[3:4]))
        assert text.left_out == len(ids) - 4

    @pytest.mark.parametrize(
        ("data", "message"),
        [(b" \n", "empty"), (b"a", "1 token"), (b"abc \xff", "not UTF-8: .* at byte 4"),
         (b"9" * 20, "at most 16"), (None, "No such file")],
    )  # fmt: skip
    def test_files_that_cannot_be_read(
        self,
        pocket: Pocket,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        data: bytes | None,
        message: str,
    ) -> None:
        monkeypatch.setattr("kvant.tools.report.texts.MAX_FILE_BYTES", 16)
        if data is not None:
            (tmp_path / "a.txt").write_bytes(data)
        with pytest.raises(PromptError, match=message):
            text_file(tmp_path / "a.txt", pocket[1], 1280, 100, 100)


def report(*arguments: str) -> str:
    done = call("report", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_tables_and_a_plot(pocket: Pocket, tmp_path: Path) -> None:
    plot = tmp_path / "kld.svg"
    lines = report("--tokens", "300", "--formats", "8g32, 4g64", "--plot", str(plot)).splitlines()
    assert lines[0].startswith("pocket on built-in held-out conversations: 300 tokens; the ")
    rows = [line.split() for line in lines if line.startswith((" 0 ", " 8g32 ", " 4g64 "))]
    prefill, decode = rows[:3], rows[3:]
    sizes = [
        round(own.make_cache(pocket[0], 300).nbytes / 300)
        for own in (REFERENCE, CacheFormat(8), CacheFormat(4, 64))
    ]
    assert [(row[0], row[-1]) for row in prefill] == list(
        zip(("0", "8g32", "4g64"), map(str, sizes), strict=True)
    )
    assert [row[0] for row in decode] == ["0", "8g32", "4g64"]
    assert len({row[-1] for row in decode}) == 1  # of the first conversation every cache recalls as much
    assert "/" in decode[0][-1]
    titles = [line.strip() for line in lines]
    assert "Prefill: 224 predictions, read in chunks" in titles
    assert "Decode: 75 predictions, read one by one after 224 tokens" in titles
    assert "Recall of what was read from shared pages: 0 " in " ".join(map(str.strip, lines))
    assert all(len(line) <= 80 for line in lines[3:])
    drawn = plot.read_text()
    for text in ("8g32", "4g64", "KLD, nats", "prefill", "decode"):
        assert drawn.count(f">{text}<") == 1


def test_an_adapter(pocket_folder: Path, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", adapter_config(), load_reference(pocket_folder))
    arguments = ["--tokens", "32", "--formats", "8g32", "--json"]
    found = [json.loads(report(*arguments, *flags)) for flags in ([], ["--adapter-path", str(adapter)])]
    assert [one["model"] for one in found] == ["pocket", f"pocket with {adapter}"]
    assert found[0]["reference"]["prefill"] != found[1]["reference"]["prefill"]


def test_json_of_a_text(tmp_path: Path) -> None:
    text = tmp_path / "a text.txt"
    text.write_text("The fox went home. " * 20, encoding="utf-8")
    found = json.loads(
        report(
            "--text",
            str(text),
            "--tokens",
            "64",
            "--formats",
            "4g32:nosplit:notail,0,4g32:nosplit:pmx,4g32:nosplit",
            "--json",
        )
    )
    assert found["model"] == "pocket"
    assert found["text"] == {"name": str(text), "tokens": 64, "pieces": 1, "tokens_left_out": 101 - 64}
    assert found["versions"].keys() == {"kvant", "mlx", "mlx_lm", "transformers", "python"}
    assert (found["reserved_tokens"], found["prompt_tokens"]) == (64, 47)
    without, none, plain, four = found["formats"]
    assert plain["flags"] == f"{four['flags']} --kv-format pmx"
    assert without["flags"] == f"{four['flags']} --no-kv-tail"
    assert plain["bytes_per_token"] == without["bytes_per_token"]
    page = 128 * 4 * 2 * 2 * 64 * 2  # bytes: rows, layers, keys and values, kv heads, width, 16 bits
    assert four["bytes_per_token"] == without["bytes_per_token"] + page // 64
    assert none == found["reference"]
    assert four["format"] == "4g32:nosplit"
    assert four["flags"] == "--kv-bits 4 --kv-group-size 32 --no-kv-bias-split"
    for leg, positions in (("prefill", 47), ("decode", 16)):
        assert plain[leg]["mean_kld_nats"] != four[leg]["mean_kld_nats"]
        assert (four[leg]["positions"], four[leg]["non_finite"]) == (positions, 0)
        names = ("median_kld_nats", "p99_kld_nats", "p999_kld_nats")
        assert 0 == none[leg]["mean_kld_nats"] < four[leg]["mean_kld_nats"] < four[leg]["p99_kld_nats"]
        assert [four[leg][name] for name in names] == sorted(four[leg][name] for name in names)
    assert len(four["layer_attention_errors"]) == 4
    assert min(four["layer_attention_errors"]) > 0
    assert four["recall"] == four["recall_after_hit"] == {"right": 0, "asked": 0}


def test_a_text_of_several_pieces(make_checkpoint: Any, pocket_folder: Path) -> None:
    """A model of its own with pocket's tokenizer, whose context is shorter than the text."""
    folder, _ = make_checkpoint(vocab_size=1280, max_position_embeddings=24)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(pocket_folder / name, folder)
    printed = report("--model", str(folder), "--tokens", "60", "--formats", "8g64")
    assert " on built-in held-out conversations: 60 tokens in " in printed
    assert " pieces of up to 24; the " in printed


def test_a_reservation_cuts_the_text(pocket: Pocket) -> None:
    flags = ["--tokens", "300", "--reserve", "128", "--decode-tokens", "5", "--formats", "8g32", "--json"]
    found = json.loads(report(*flags))
    assert (found["text"]["pieces"], found["reserved_tokens"], found["prompt_tokens"]) == (3, 128, 122)
    (eight,) = found["formats"]
    assert (eight["prefill"]["positions"], eight["decode"]["positions"]) == (300 - 3 - 5, 5)
    nbytes = pocket[0].make_cache(128, kv_bits=8, kv_group_size=32).nbytes
    assert eight["bytes_per_token"] == round(nbytes / 128)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--reserve 4", "--reserve is 4; expected at least 8"),
        ("--reserve 4096", "--reserve is 4096; the model's context is 2048 tokens"),
        ("--decode-tokens 0", "--decode-tokens is 0; expected at least 1"),
    ],
)
def test_what_is_refused(flags: str, words: str) -> None:
    assert words in refusal(2, "report", *flags.split())


def test_a_text_too_short(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("The fox")
    assert "tokens; the report needs 8" in refusal(1, "report", "--text", str(tmp_path / "a.txt"))
