"""Known text is encoded as the tokenizer encodes all of it, but for answers that were written in other tokens."""

from pathlib import Path

import pytest
from support.tokenizers_made import strings, write_tokenizer

from kvant.text.prompt import KnownText
from kvant.text.tokenizer import Tokenizer, load_tokenizer


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
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, family))
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
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, "qwen2"))
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
