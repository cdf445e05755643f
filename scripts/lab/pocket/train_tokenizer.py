"""Train the byte-level BPE tokenizer of the pocket model and write it in the Hugging Face form."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from corpus import SHORT_MIX, documents
from lexicon import ANIMALS, COLOURS, HOMES, LETTERS, NAMES, PEOPLE, SPOTS, THINGS
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

#: Special tokens; their ids come first.
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
#: How text is cut into words before byte pairs are merged, as in Qwen2.
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
#: ChatML. Tools, calls and results are in the form of Qwen2.5's templates, Hermes'.
CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\\n' }}"
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + '\\n\\n' }}{% endif %}"
    "{{ 'Tools:\\n<tools>' }}{% for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}"
    '{{ \'\\n</tools>\\nA call of a tool:\\n<tool_call>\\n{"name": NAME, "arguments": OBJECT}\\n</tool_call>\' }}'
    "{{ '<|im_end|>\\n' }}{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}"
    "{% if loop.first or loop.previtem['role'] != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\\n<tool_response>\\n' + message['content'] + '\\n</tool_response>' }}"
    "{% if loop.last or loop.nextitem['role'] != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"
    "{% elif message['tool_calls'] %}"
    "{{ '<|im_start|>' + message['role'] }}{% if message['content'] %}{{ '\\n' + message['content'] }}{% endif %}"
    "{% for call in message['tool_calls'] %}"
    "{{ '\\n<tool_call>\\n{\"name\": \"' + call['function']['name'] + '\", \"arguments\": ' }}"
    "{{ call['function']['arguments'] | tojson }}{{ '}\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}"
    "{% elif not (tools and loop.first and message['role'] == 'system') %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def _text(count: int) -> Iterator[str]:
    """Yield training text, and every word of the lexicon often enough to become one token."""
    for document in islice(documents(1, SHORT_MIX), count):
        for piece, _ in document.pieces():
            yield piece
    singles = [*NAMES, *THINGS, *COLOURS, *LETTERS, *ANIMALS, *PEOPLE]
    singles += [phrase.split()[-1] for phrase in (*HOMES, *SPOTS)]
    for word in singles:
        yield f" {word}" * (count // 4)


def build(size: int, count: int) -> Tokenizer:
    """Train the tokenizer on `count` documents of the corpus."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(SPECIALS), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_text(count), trainer)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 2048,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    """Train and write the tokenizer, and say which words of the lexicon take more than one token."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--documents", type=int, default=8000)
    args = parser.parse_args()
    tokenizer = build(args.size, args.documents)
    save(tokenizer, args.folder)
    words = [*NAMES, *THINGS, *COLOURS, *LETTERS, *ANIMALS, *PEOPLE]
    print("more than one token:", [word for word in words if len(tokenizer.encode(f" {word}").ids) > 1])


if __name__ == "__main__":
    main()
