"""Small vocabularies as model folders had them before tokenizer.json, trained on the spot, and texts to tokenize."""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import sentencepiece
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

WORDS = (
    "the a fox and bear in old house was red Pip said look! it's 1234 3.14 naïve Über çay 東京 Привет שלום 🦊🎉 e\u0301"
)
SPACES = [" ", "  ", "   ", "\n", "\n\n", "\t", "\r\n", "\u00a0", "\u3000", ""]


def corpus() -> list[str]:
    """Sentences of a few words."""
    rng, words = random.Random(0), WORDS.split()
    return [" ".join(rng.choices(words, k=12)) + "." for _ in range(400)]


def strings(count: int, special: Iterable[str], seed: int = 1) -> list[str]:
    """Texts of words, any characters, bytes no vocabulary has, whitespace and special tokens."""
    rng, words, tokens = random.Random(seed), WORDS.split(), list(special)
    made = ["", " ", "  a", "a  ", "\n", "▁a ▁▁b", *tokens, *(f" {token} a{token}b " for token in tokens)]

    def piece() -> str:
        kind = rng.random()
        if kind < 0.5:
            return rng.choice(words)
        if kind < 0.65:
            return rng.choice(tokens)
        if kind < 0.85:
            return "".join(chr(rng.randrange(32, 0x500)) for _ in range(rng.randrange(1, 6)))
        character = rng.randrange(0x10FFFF)
        return "\ufffd" if 0xD800 <= character < 0xE000 else chr(character)

    while len(made) < count:
        made.append("".join(piece() + rng.choice(SPACES) for _ in range(rng.randrange(1, 9))))
    return made[:count]


def byte_level(folder: Path, tokens: list[str]) -> None:
    """vocab.json and merges.txt of byte-level BPE; the tokens are in the vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=tokens, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.model.save(str(folder))


def word_piece(folder: Path, tokens: list[str]) -> None:
    """vocab.txt of WordPiece."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=tokens, show_progress=False)
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.model.save(str(folder))


def sentence_piece(folder: Path, **changes: Any) -> None:
    """tokenizer.model of a SentencePiece BPE as Llama's and Mistral's were trained."""
    text = folder / "corpus.txt"
    text.write_text("\n".join(corpus()), encoding="utf-8")
    settings = {
        "model_type": "bpe",
        "vocab_size": 420,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "split_digits": True,
        "allow_whitespace_only_pieces": True,
        "character_coverage": 0.99,
        "minloglevel": 2,
    }
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(folder / "tokenizer"), **settings | changes
    )
    (folder / "tokenizer.vocab").unlink()
    text.unlink()


def settings(folder: Path, **values: Any) -> None:
    """tokenizer_config.json."""
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
