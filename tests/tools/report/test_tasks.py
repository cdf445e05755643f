"""Generated tasks of `kvant report --tasks`: what is asked is in the text, and who reads it answers right."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.bridged import LONG, bridged
from support.command import call, refusal
from support.pools import with_layers
from support.tokenizers_made import make_tokenizer

from kvant.engine.generate import generate
from kvant.models import Decoder
from kvant.tools.report import tasks
from kvant.tools.report.formats import REFERENCE, CacheFormat
from kvant.tools.report.tasks import (
    COMMON,
    HOPS,
    KINDS,
    Sample,
    answer_samples,
    haystack,
    make_samples,
    score,
    task_rows,
)

Pocket = tuple[Decoder, Any]
TOKENS, SAMPLES = 600, 4


@pytest.fixture(scope="module")
def made(pocket: Pocket) -> list[tuple[Sample, str]]:
    """Samples of the built-in text, with their prompts."""
    _, tokenizer = pocket
    samples = make_samples(tokenizer, haystack(None), [TOKENS, 900], SAMPLES, 5)
    return [(sample, tokenizer.decode(list(sample.ids))) for sample in samples]


def resolved(text: str) -> dict[str, str]:
    """Each variable's value, by a reading of the assignments in their order."""
    values: dict[str, str] = {}
    for name, given in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", text):
        assert name not in values
        # one that is not there yet is a KeyError
        values[name] = given if given.isdecimal() else values[given]
    return values


def oracle(prompt: str) -> str:
    """The answer of somebody who reads the text, and knows nothing of how it was made."""
    if found := re.search(r"secret (?:number|4 numbers) of (\w+)\?", prompt):
        return ", ".join(re.findall(rf"A secret number of {found[1]} is (\d+)\.", prompt))
    if found := re.search(r"What does (\w+) have\?", prompt):
        return ", ".join(re.findall(rf"{found[1]} has the (\w+)\.", prompt))
    if found := re.search(r"Which \d variables have the value (\d+)", prompt):
        return ", ".join(name for name, value in resolved(prompt).items() if value == found[1])
    found = re.search(r"Here is a list\. ([\w, ]+)\.", prompt)
    assert found is not None
    return ", ".join(word for word, _ in Counter(found[1].split(", ")).most_common(COMMON))


@pytest.mark.parametrize(
    ("answer", "expected", "right"),
    [
        (" 12345.", ["12345"], 1),
        ("1234", ["12345"], 0),
        ("", ["12345"], 0),
        ("The KEY, and the lamp", ["key", "Lamp", "rope", "bell"], 0.5),
        ("AB = 1; CD", ["AB", "CD", "EF"], 2 / 3),
    ],
)
def test_a_score_by_hand(answer: str, expected: Sequence[str], right: float) -> None:
    assert score(answer, expected) == pytest.approx(right)


def test_rows_by_hand() -> None:
    two = Sample("a", 10, (1,), 5, ("x", "y")), Sample("a", 10, (2,), 5, ("z",))
    one = Sample("b", 10, (3,), 5, ("x",))
    first, second = task_rows(
        [*two, one], {REFERENCE: ["x", "z", "-"], CacheFormat(8, 32): ["x y", "z", "-"]}
    )
    assert (first["kind"], first["tokens"], first["samples"], second["samples"]) == ("a", 10, 2, 1)
    full, eight = first["formats"]
    assert full == {"format": "0", "score_percent": 75.0, "same_answers": 2}
    assert eight == {"format": "8g32", "score_percent": 100.0, "same_answers": 1}
    assert [each["same_answers"] for each in second["formats"]] == [1, 1]


def test_who_reads_the_text_answers_right_and_nobody_else(made: list[tuple[Sample, str]]) -> None:
    kinds = Counter((sample.kind, sample.tokens) for sample, _ in made)
    assert kinds == {(kind, tokens): SAMPLES for kind in KINDS for tokens in (TOKENS, 900)}
    for sample, prompt in made:
        answer = oracle(prompt)
        assert score(answer, sample.expected) == 1, (sample, answer)
        assert sorted(answer.split(", ")) == sorted(sample.expected)  # and nothing else could be meant
        assert score("It says the cat is with Ned, and 00000.", sample.expected) == 0


def test_what_is_expected_is_where_it_should_be(made: list[tuple[Sample, str]]) -> None:
    """Once in the text, at depths that are spread evenly; variables on a chain of their own."""
    depths: dict[str, list[float]] = {}
    for sample, prompt in made:
        words = Counter(re.findall(r"\w+", prompt))
        if sample.kind == "common":
            times = {words[each] for each in sample.expected}
            assert len(times) == 1
            assert min(times) > max(
                count for word, count in words.items() if len(word) == 8 and word not in sample.expected
            )
            continue
        if sample.kind == "variables":
            values = resolved(prompt)
            assert len(values) == 2 * (1 + HOPS)
            assert len(set(values.values())) == 2
            assert prompt.count("VAR ") == 2 * (1 + 2 * HOPS)
            continue
        verb = "has the" if sample.kind == "facts" else "is"
        for each in sample.expected:
            assert prompt.count(f" {verb} {each}.") == 1
        if sample.kind != "values" and sample.tokens == 900:
            depths.setdefault(sample.kind, []).append(
                prompt.index(f" {verb} {sample.expected[0]}.") / len(prompt)
            )
    for own in depths.values():
        assert own == pytest.approx([0.125, 0.375, 0.625, 0.875], abs=0.12)


def test_seeds(pocket: Pocket) -> None:
    _, tokenizer = pocket
    first, same, other = (make_samples(tokenizer, haystack(None), [500], 1, seed) for seed in (3, 3, 4))
    assert first == same
    assert not {sample.ids for sample in first} & {sample.ids for sample in other}


@pytest.mark.parametrize("family", ["llama2", "llama3"])
def test_a_prompt_and_its_answer_fill_the_length(family: str, tmp_path: Path) -> None:
    """Of a text that has no sentences and is repeated, and tokenizers that know few words, without a
    template.
    """
    tokenizer = make_tokenizer(tmp_path, family)
    (tmp_path / "a.txt").write_text(
        "The quick brown fox jumps over the lazy dog, isn't it? " * 9, encoding="utf-8"
    )
    text = haystack(tmp_path / "a.txt")
    for sample in make_samples(tokenizer, text, [700, 1100], 2, 0):
        size = len(sample.ids) + sample.max_tokens
        room = 30 if sample.kind == "common" else 16  # a word of the list, or a word
        assert sample.tokens - room <= size <= sample.tokens, sample
        assert sample.ids[0] == tokenizer.bos_token_id
        assert sample.max_tokens > len(tokenizer.encode(", ".join(sample.expected), add_special_tokens=False))


def test_answers_are_those_of_generation(pocket: Pocket) -> None:
    """Each sample's with nothing before it; the full cache's where the format is one."""
    model, tokenizer = pocket
    samples = [s for s in make_samples(tokenizer, haystack(None), [512], 2, 0) if s.kind in ("facts", "keys")]
    whole, eight = CacheFormat(0), CacheFormat(8, 32)
    seen: list[tuple[int, int]] = []
    found = answer_samples(model, tokenizer, samples, [eight, REFERENCE, whole], lambda *of: seen.append(of))
    assert [*found] == [REFERENCE, eight, whole]
    assert seen[-1] == (3 * sum(len(sample.ids) for sample in samples),) * 2
    for cache, texts in found.items():
        for sample, text in zip(samples, texts, strict=True):
            own = cache.make_cache(model, 512)
            assert text == generate(
                model, tokenizer, sample.ids, max_tokens=sample.max_tokens, prompt_cache=own
            )
    assert found[whole] == found[REFERENCE]
    rows = {row["kind"]: row["formats"] for row in task_rows(samples, found)}
    assert rows["facts"][0]["score_percent"] > 0  # it was trained on such questions
    assert [each["score_percent"] for each in rows["facts"]] == [rows["facts"][0]["score_percent"]] * 3
    assert [each["same_answers"] for each in rows["facts"]] == [2] * 3


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_next"])  # windows, states
def test_a_bridged_model(name: str, pocket: Pocket) -> None:
    model, tokenizer = bridged(name), pocket[1]
    samples = [Sample("needle", 80, tuple(LONG[first : first + 60]), 8, ("x",)) for first in (0, 90)]
    found = answer_samples(model, tokenizer, samples, [CacheFormat(8, 32), CacheFormat(4, 32)])
    for cache, texts in found.items():
        for sample, text in zip(samples, texts, strict=True):
            own = cache.make_cache(model, 80)
            assert text == generate(model, tokenizer, sample.ids, max_tokens=8, prompt_cache=own)


def test_a_format_that_forgets_is_found_out(pocket: Pocket) -> None:
    class Forgets(CacheFormat):
        def make_cache(self, model: Any, max_seq_len: int) -> Any:
            cache = super().make_cache(model, max_seq_len)
            return with_layers(cache, forgets)

    def forgets(number: int, layer: Any) -> None:
        layer.multi_head_cache_attention = lambda query, key, value, mask=None: 0.0 * query

    model, tokenizer = pocket
    samples = [s for s in make_samples(tokenizer, haystack(None), [512], 3, 0) if s.kind == "facts"]
    ((row),) = task_rows(samples, answer_samples(model, tokenizer, samples, [Forgets(8, 32)]))
    full, forgetful = (each["score_percent"] for each in row["formats"])
    assert full > forgetful == 0
    assert [each["same_answers"] for each in row["formats"]] == [3, 0]


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The fox went home. The bear had tea by the pond. " * 20, encoding="utf-8")
    flags = ("--text", str(text), "--tokens", "64", "--formats", "0,8g32", "--tasks", "448", "--samples", "1")
    flags += ("--seed", "7")
    made: list[Any] = []
    monkeypatch.setattr(
        tasks, "answer_samples", lambda *given: made.append(answer_samples(*given)) or made[0]
    )
    done = call("report", *flags, "--json")
    monkeypatch.setattr(tasks, "answer_samples", lambda *_: made[0])  # what is printed is what was found
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["seed"] == 7
    assert [(row["kind"], row["tokens"], row["samples"]) for row in found["tasks"]] == [
        (k, 448, 1) for k in KINDS
    ]
    assert all([each["format"] for each in row["formats"]] == ["0", "8g32"] for row in found["tasks"])
    assert all(row["formats"][0]["same_answers"] == 1 for row in found["tasks"])
    printed = call("report", *flags).stdout.splitlines()
    rows = [line.split() for line in printed if " 448 " in line]
    assert [row[0] for row in rows] == [*KINDS]
    assert {len(row) for row in rows} == {4}
    assert any(line.split()[:3] == ["same", "answer", "100.0"] for line in printed)


def test_a_seed_of_the_config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is one for generate, too: without tasks it does not count."""
    (tmp_path / "config.toml").write_text("seed = 7\n")
    monkeypatch.setenv("KVANT_CONFIG", str(tmp_path / "config.toml"))
    plain = call("report", "--tokens", "20", "--formats", "0", "--json")
    assert (plain.returncode, plain.stderr) == (0, "")
    assert not {"seed", "tasks"} & json.loads(plain.stdout).keys()
    done = call("report", "--tokens", "20", "--formats", "0", "--json", "--tasks", "448", "--samples", "1")
    assert json.loads(done.stdout)["seed"] == 7


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--tasks 512,4096", "--tasks has 4096; the model's context is 2048 tokens"),
        ("--tasks 64", "--tasks: 64 tokens; 'needle' takes "),
        ("--tasks -1", "--tasks: -1 tokens; 'needle' takes "),
        ("--tasks 512,512", "--tasks has 512 twice"),
        ("--tasks many", "--tasks is 'many'; expected whole numbers between commas"),
        ("--tasks 512 --samples 0", "--samples is 0; expected at least 1"),
        ("--samples 3", "--samples is 3; it needs --tasks"),
        ("--seed 0", "--seed is 0; it needs --tasks"),
    ],
)
def test_what_is_refused(flags: str, words: str) -> None:
    assert words in refusal(2, "report", *flags.split())
