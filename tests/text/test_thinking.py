"""Thinking and answers are told apart whatever the pieces, and marks are gone."""

import random
from pathlib import Path

import pytest
from support.tokenizers_made import write_tokenizer

from kvant.text.thinking import HARMONY, HARMONY_TOKENS, Marks, Thinking, marks_of
from kvant.text.tokenizer import load_tokenizer

THINK = Marks(("<think>",), "</think>")
CHANNEL = Marks(("<|channel>thought",), "<channel|>")
# Marks, the end of the prompt, the model's text, its thinking, its answer.
CASES = [
    (THINK, "assistant\n", "<think>\nlet me see\n\nyes\n</think>\n\nSunny.\n", "let me see\n\nyes", "Sunny.\n"),
    (THINK, "assistant\n", "\n <think>a</think>b", "a", "b"),
    (THINK, "assistant\n<think>\n", "let me see\n</think>\n\nSunny.", "let me see", "Sunny."),
    (THINK, "assistant\n<think>\n\n</think>\n\n", "Sunny.", "", "Sunny."),
    (THINK, "assistant\n", "Sunny.", "", "Sunny."),
    (THINK, "assistant\n", "  Sunny <think> and </think>.", "", "  Sunny <think> and </think>."),
    (THINK, "<think> in the question\nassistant\n", "No.", "", "No."),
    (THINK, "assistant\n", "<think>a < b </thin k\n", "a < b </thin k", ""),
    (THINK, "assistant\n", " \n", "", " \n"),
    (THINK, "assistant\n", "<think>a</thi", "a</thi", ""),
    (THINK, "assistant\n", "<thin", "", "<thin"),
    (THINK, "assistant\n", "<think>\n\n</think>\n\nSunny.", "", "Sunny."),
    (THINK, "assistant\n", "<think>a</think>\n<think>b</think>\nSunny.", "ab", "Sunny."),
    (THINK, "assistant\n", "", "", ""),
    (CHANNEL, "<|turn>model\n", "<|channel>thought\nhm\n<channel|>Sunny.", "hm", "Sunny."),
    (HARMONY, "<|start|>assistant",
     "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Sunny.", "hm", "Sunny."),
    (HARMONY, "<|start|>assistant", "<|channel|>final<|message|>Sunny.", "", "Sunny."),
]  # fmt: skip


@pytest.mark.parametrize(("marks", "prompt", "text", "thinking", "answer"), CASES)
def test_pieces_of_any_size(marks: Marks, prompt: str, text: str, thinking: str, answer: str) -> None:
    assert Thinking(marks, prompt).split(text) == (thinking, answer)
    rng = random.Random(0)
    for attempt in range(30):
        splitter, found, place = Thinking(marks, prompt), [], 0
        while place < len(text):
            size = 1 if attempt == 0 else rng.randrange(1, 9)
            found += splitter.add(text[place : place + size])
            place += size
        found += splitter.finish()
        assert all(piece for _, piece in found)
        assert "".join(piece for is_thinking, piece in found if is_thinking) == thinking
        assert "".join(piece for is_thinking, piece in found if not is_thinking) == answer


def test_what_is_certain_comes_at_once() -> None:
    splitter = Thinking(THINK, "assistant\n")
    assert splitter.add("<think>") == []
    assert splitter.add("one") == [(True, "one")]
    assert splitter.add("\n") == []
    assert splitter.add("two </") == [(True, "\ntwo ")]
    assert splitter.add("think>\n\nSun") == [(False, "Sun")]
    assert splitter.add("ny.") == [(False, "ny.")]


@pytest.mark.parametrize(
    ("tokens", "marks"), [(["<think>", "</think>"], THINK), ([], None), (list(HARMONY_TOKENS), HARMONY)]
)
def test_marks_are_those_of_the_vocabulary(tmp_path: Path, tokens: list[str], marks: Marks | None) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, "qwen3", extra_special_tokens=tokens))
    assert marks_of(tokenizer) == marks
    assert (Thinking.of(tokenizer, "") is None) is (marks is None)
