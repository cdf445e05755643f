"""Folders with tokenizers of every family kvant loads, trained here on a little text, as published ones
are set up.
"""

import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from kvant.text.process import TextError
from kvant.text.tokenizer import Tokenizer as Loaded
from kvant.text.tokenizer import begin_loading
from kvant.text.worker import Worker

TEXT = [
    "The quick brown fox jumps over the lazy dog, isn't it? We'll see: 1234567890 times!",
    "Ein Bär trinkt Öl; l'été arrive à 12:30. ¿Qué tal? Straße, naïve, coöperate.",
    "Съешь ещё этих мягких французских булок. 敏捷的棕色狐狸跳过懒狗。 こんにちは世界 안녕하세요",
    "def f(x):\n    return {'a': [1, 2, 3], \"b\": x ** 2}\n\n\t# comment\r\n",
    "🦊🐻‍❄️ emoji 👩‍👩‍👧 and maths ∑∫√ ≤ ≥  double  spaces   triple",
] * 20
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = QWEN.replace("N}|", "N}{1,3}|")
Config = dict[str, Any]


def _byte_level(pattern: str | None, specials: list[str]) -> Tokenizer:
    made = Tokenizer(models.BPE())
    split: Any = pre_tokenizers.Digits(individual_digits=True)
    if pattern is not None:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    made.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_])
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.ByteLevel(trim_offsets=True)
    _train(made, trainers.BpeTrainer, 700, specials, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    return made


def _train(made: Tokenizer, kind: Any, vocab_size: int, specials: list[str], **options: Any) -> None:
    trainer = kind(vocab_size=vocab_size, show_progress=False, special_tokens=specials, **options)
    made.train_from_iterator(TEXT, trainer)


def qwen2() -> tuple[Tokenizer, Config]:
    """As Qwen2.5: NFC, special tokens listed in tokenizer_config.json, no beginning of text."""
    made = _byte_level(QWEN, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    made.normalizer = normalizers.NFC()
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    made.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    keys = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    known = made.get_added_tokens_decoder().items()
    named = {
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "add_prefix_space": False,
    }
    plain = {"clean_up_tokenization_spaces": False, "split_special_tokens": False}
    added = {str(i): {key: getattr(token, key) for key in keys} for i, token in known}
    specials = {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"], "added_tokens_decoder": added}
    return made, {"tokenizer_class": "Qwen2Tokenizer", **named, **plain, **specials}


def llama3() -> tuple[Tokenizer, Config]:
    """As Llama 3: begins a text with a token of its own."""
    specials = [
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|eot_id|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
    ]
    made = _byte_level(LLAMA3, specials)
    named = [("<|begin_of_text|>", made.token_to_id("<|begin_of_text|>"))]
    pair = "<|begin_of_text|> $A $B"
    template = processors.TemplateProcessing(single="<|begin_of_text|> $A", pair=pair, special_tokens=named)
    made.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    ends = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
    return made, {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": True, **ends}


def _gpt2(made: Tokenizer, bos: str, eos: str, pad: str, **others: Any) -> tuple[Tokenizer, Config]:
    named = {"bos_token": bos, "eos_token": eos, "pad_token": pad, "unk_token": "<|endoftext|>"}
    settings = {
        "tokenizer_class": "GPT2Tokenizer",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
    }
    return made, settings | named | others


def smollm2() -> tuple[Tokenizer, Config]:
    """As SmolLM2: GPT-2's class around digits one by one."""
    made = _byte_level(None, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    marks = ["<|im_start|>", "<|im_end|>"]
    return _gpt2(made, *marks, "<|im_end|>", additional_special_tokens=marks)


def olmo2() -> tuple[Tokenizer, Config]:
    """As OLMo 2: GPT-2's class declared, which transformers does not believe, around another way to split
    words.
    """
    return _gpt2(
        _byte_level(LLAMA3, ["<|endoftext|>", "<|pad|>"]), "<|endoftext|>", "<|endoftext|>", "<|pad|>"
    )


def _sentencepiece(kind: str) -> Tokenizer:
    """As SentencePiece models are converted: spaces become ▁, what is unknown becomes bytes."""
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    is_unigram = kind == "unigram"
    bpe = models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    made = Tokenizer(models.Unigram() if is_unigram else bpe)
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    if is_unigram:
        _train(made, trainers.UnigramTrainer, 900, specials, unk_token="<unk>")
    else:
        _train(made, trainers.BpeTrainer, 900, specials, limit_alphabet=60)
    raw = json.loads(made.to_str())
    raw["added_tokens"] = [token for token in raw["added_tokens"] if not token["content"].startswith("<0x")]
    if is_unigram:
        raw["model"]["byte_fallback"] = True
    made = Tokenizer.from_str(json.dumps(raw))
    named = [("<s>", made.token_to_id("<s>"))]
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=named
    )
    return made


def llama2(**others: Any) -> tuple[Tokenizer, Config]:
    """As Mistral 7B and TinyLlama: byte fallback; around the latter transformers puts a pipeline of its
    own.
    """
    named = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
    }
    settings = {
        "tokenizer_class": "LlamaTokenizer",
        "add_bos_token": True,
        "add_eos_token": False,
        "legacy": False,
    }
    return _sentencepiece("bpe"), settings | named | others


def llama2_legacy() -> tuple[Tokenizer, Config]:
    """The older setting: a space before every piece of text, after special tokens too."""
    return llama2(legacy=True)


def unigram() -> tuple[Tokenizer, Config]:
    """Unigram with byte fallback."""
    return _sentencepiece("unigram"), {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"}


def wordpiece() -> tuple[Tokenizer, Config]:
    """As BERT: lower case, words split at punctuation, spaces cleaned up."""
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece(cleanup=False)
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    _train(made, trainers.WordPieceTrainer, 600, specials)
    ids = [("[CLS]", made.token_to_id("[CLS]")), ("[SEP]", made.token_to_id("[SEP]"))]
    made.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ids)
    named: Config = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    named["mask_token"] = {"content": "[MASK]", "lstrip": True, "__type": "AddedToken"}
    return made, {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": True, **named}


# Family -> what makes it, and config.json's model_type.
FAMILIES: dict[str, tuple[Callable[[], tuple[Tokenizer, Config]], str]] = {
    "qwen2": (qwen2, "qwen2"),
    "qwen3": (qwen2, "qwen3"),
    "llama3": (llama3, "llama"),
    "smollm2": (smollm2, "llama"),
    "mistral": (llama2, "mistral"),
    "smollm3": (llama3, "smollm3"),
    "olmo2": (olmo2, "olmo2"),
    "llama2": (llama2, "llama"),
    "llama2-legacy": (llama2_legacy, "llama"),
    "unigram": (unigram, "llama"),
    "wordpiece": (wordpiece, "llama"),
}


@cache
def made(family: str) -> tuple[Tokenizer, Config]:
    """A family's tokenizer and its tokenizer_config.json; training anew gives other merges."""
    return FAMILIES[family][0]()


def write_tokenizer(folder: Path, family: str, **config: Any) -> Path:
    """A folder with tokenizer.json, tokenizer_config.json and as much of a config.json as a tokenizer
    needs.
    """
    tokenizer, settings = made(family)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, **config}))
    (folder / "config.json").write_text(json.dumps({"model_type": FAMILIES[family][1]}))
    return folder


class _Here:
    """In place of a TextProcess: what it would be asked is done in this process."""

    def __init__(self) -> None:
        self._worker = Worker()

    def load(self, request: dict[str, Any], payload: bytes) -> Callable[[], dict[str, Any]]:
        found = self.ask(request, payload)
        return lambda: found

    def ask(self, request: dict[str, Any], payload: bytes = b"") -> Any:
        answer = self._worker.answer(json.loads(json.dumps(request)), payload)
        if "error" in answer:
            raise TextError(answer["error"])
        return json.loads(json.dumps(answer["result"]))


def loaded(folder: Path) -> Loaded:
    """kvant's tokenizer of a folder, whose process is this one: it spares the start of another."""
    process: Any = _Here()
    return begin_loading(folder, process)()


def make_tokenizer(folder: Path, family: str, **config: Any) -> Loaded:
    return loaded(write_tokenizer(folder, family, **config))


def strings(count: int, seed: int, specials: list[str]) -> list[str]:
    """Texts of every kind: words, whitespace, scripts, numbers, marks, broken and joined characters,
    special tokens.
    """
    rng = random.Random(seed)
    words = [word for line in TEXT[:5] for word in line.split(" ")]
    spaces = [" ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u3000", "\u200b", "\u2028", "\v", ""]
    marks = [
        "e\u0301",
        "\u0301",
        "A\u030a",
        "ﬁ",
        "①",
        "½",
        "\ufeff",
        "\u200d",
        "\U0001f98a",
        "\x00",
        "\x7f",
        "▁",
        "Ġ",
    ]

    blocks = [(0x20, 0x250), (0x370, 0x600), (0x900, 0xD00), (0x3040, 0xA000), (0x1F300, 0x1FAFF)]

    def piece() -> str:
        block = rng.choice(blocks)
        some = "".join(chr(rng.randrange(*block)) for _ in range(rng.randrange(1, 6)))
        number = str(rng.randrange(10 ** rng.randrange(1, 12)))
        special = rng.choice(specials) if specials else ""
        three = [rng.choice(words) for _ in range(3)]
        return rng.choice([*three, rng.choice(spaces), rng.choice(marks), special, number, some])

    return ["".join(piece() + rng.choice(spaces) for _ in range(rng.randrange(12))) for _ in range(count)]
