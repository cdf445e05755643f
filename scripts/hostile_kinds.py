"""Kinds of harm that a model folder can do on purpose, for the fuzzer and the tests.

Each function of KINDS spoils a whole folder. The folder must then be refused in one line, or work. Nothing of
it may run, and neither time nor memory may grow. ``plant`` puts code beside the model that leaves a mark if
it runs.
"""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

Kind = Callable[[Path, random.Random], str]
CLASSES = ["AutoProcessor", "AutoFeatureExtractor", "MusicgenProcessor", "AutoTokenizer", "evil.Evil"]
CLASSES += ["ConvBertTokenizer"]
MODULES = ["evil", "tokenization_evil", "processing_evil", "json", "typing", "jinja2", "tokenizers", "kvant"]
MODULES += ["__init__"]
PATHS = ("vocab_file", "merges_file", "tokenizer_file", "sp_model", "vocab", "spm_file", "gguf_file")
BIG_TEXTS = ["{{ 'a b c d ' * 4000000 }}", "{{ '🦊' * 30000000 }}", "{{ ' ' * 33000000 }}"]
BIG_TEXTS += ["{% for i in range(10**6) %}a b {% endfor %}"]
PATTERNS = ["a*a*a*b", "(a+)+$", "(a|a)*b", "a{0,5000}{0,5000}b", "(?=(a+)+b)"]
GROWING = {
    "byte level": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    "prepend": {"type": "Prepend", "prepend": "a" * 1000},
    "decompose": {"type": "NFKD"},
    "replace": {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"},
}


def plant(folder: Path) -> Path:
    """Put code into the folder that leaves a mark beside it if it runs. Returns the mark, which must never
    exist.
    """
    mark = folder.parent / "executed"
    code = (
        f"import os; os.makedirs({str(mark)!r}, exist_ok=True)\n"
        + "class Evil: pass\nclass Tokenizer: pass\n"
    )
    for name in MODULES:
        (folder / f"{name}.py").write_text(code)
    return mark


def change(path: Path, **values: Any) -> None:
    """Set keys of a JSON file. A missing file is made."""
    raw = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(raw | values))


def settings(folder: Path, **values: Any) -> None:
    change(folder / "tokenizer_config.json", **values)


def tokenizer(folder: Path, template: str, **values: Any) -> None:
    """Parts of tokenizer.json, and the template whose text they are given."""
    change(folder / "tokenizer.json", **values)
    settings(folder, chat_template=template)


def foreign_class(folder: Path, rng: random.Random) -> str:
    """Classes of transformers that are no tokenizers, and load others by name."""
    name = rng.choice(CLASSES)
    evil = {"auto_map": {name: "evil.Evil"}}
    where = rng.choice(["tokenizer_config.json", "config.json"])
    if rng.random() < 0.7:
        (folder / "tokenizer_config.json").unlink()
    change(folder / where, tokenizer_class=name)
    files = ("processor_config.json", "preprocessor_config.json", "feature_extractor_config.json")
    for file in rng.choice([files[:1], files]):
        change(folder / file, **evil)
    if rng.random() < 0.2:
        change(folder / where, **evil)
    return f"{where}: {name}"


def init_inputs(folder: Path, rng: random.Random) -> str:
    """Arguments of a tokenizer's constructor that are paths."""
    os.mkfifo(folder / "pipe")
    path = rng.choice(["/dev/zero", "/proc/self/mem", str(folder / "pipe"), "/etc/passwd"])
    name = rng.choice(
        ["ConvBertTokenizer", "BertTokenizer", "Qwen2Tokenizer", "LlamaTokenizer", "ByT5Tokenizer"]
    )
    if rng.random() < 0.5:
        (folder / "tokenizer_config.json").unlink()
    settings(folder, tokenizer_class=name, init_inputs=[path] * rng.choice([1, 2]))
    if rng.random() < 0.3:
        settings(folder, **dict.fromkeys(PATHS, path))
    return f"{name}: {path}"


def growth(folder: Path, rng: random.Random) -> str:
    """Normalizers and pre-tokenizers that make a text longer, many of them."""
    name = rng.choice(sorted(GROWING))
    many = [GROWING[name]] * rng.choice([30, 300])
    text = "\\ufdfa" * 1000 if name == "decompose" else "aé " * 1000
    place, key = "normalizer", "normalizers"
    if name == "byte level" and rng.random() < 0.5:
        place, key = "pre_tokenizer", "pretokenizers"
    tokenizer(folder, f"{{{{ '{text}' * 100 }}}}", **{place: {"type": "Sequence", key: many}})
    return f"{len(many)} times {name}"


def expression(folder: Path, rng: random.Random) -> str:
    """Regular expressions that take for ever."""
    pattern, count = {"Regex": rng.choice(PATTERNS)}, rng.choice([40, 20_000, 3_000_000])
    step: dict[str, Any] = {"normalizer": {"type": "Replace", "pattern": pattern, "content": ""}}
    if rng.random() < 0.5:
        step = {
            "pre_tokenizer": {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
        }
    tokenizer(folder, f"{{{{ 'a' * {count} }}}}", **step)
    return f"{pattern} on {count}"


def added_tokens(folder: Path, rng: random.Random) -> str:
    """Very many tokens, in one of the places that list them."""
    names = [f"<t{number}>" for number in range(200_000)]
    where = rng.choice(
        ["additional_special_tokens", "extra_special_tokens", "added_tokens_decoder", "tokenizer.json"]
    )
    if where == "tokenizer.json":
        kind = dict.fromkeys(("single_word", "lstrip", "rstrip", "special"), False) | {"normalized": True}
        added = [{"id": 1280 + number, "content": name, **kind} for number, name in enumerate(names)]
        change(folder / "tokenizer.json", added_tokens=added)
    elif where == "added_tokens_decoder":
        listed = {str(1280 + number): {"content": name} for number, name in enumerate(names[:100_000])}
        settings(folder, added_tokens_decoder=listed)
    else:
        settings(folder, **{where: names})
    return where


def whole_model(folder: Path, template: str, **model: Any) -> None:
    """Another tokenizer's model, and nothing beside it."""
    nothing = dict.fromkeys(("pre_tokenizer", "normalizer", "decoder"))
    tokenizer(folder, template, model=model, added_tokens=[], **nothing)


def unigram(folder: Path, rng: random.Random) -> str:
    """Pieces that each fit at every place."""
    count = rng.choice([1000, 5000])
    pieces = [["<unk>", 0.0], *(["a" * size, -float(size)] for size in range(1, count))]
    whole_model(folder, "{{ 'a' * 2000000 }}", type="Unigram", unk_id=0, vocab=pieces, byte_fallback=False)
    return f"{count} pieces"


def word_piece(folder: Path, rng: random.Random) -> str:
    """Words of any length: the time grows with the square of the length."""
    longest, text = (
        rng.choice([10**9, 2**63 - 1]),
        f"{{{{ 'a' * {rng.choice([100_000, 5_000_000])} ~ 'b' }}}}",
    )
    model = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##"}
    model |= {
        "vocab": {"[UNK]": 0, "a": 1, "##a": 2, "##" + "a" * 50: 3},
        "max_input_chars_per_word": longest,
    }
    whole_model(folder, text, **model)
    return str(longest)


def long_file(folder: Path, rng: random.Random) -> str:
    """A tokenizer.json of 60 MB that takes a hundred times as much to read."""
    item, key = rng.choice(["{}", "[]", '{"a":[]}', "0"]), rng.choice(["added_tokens", "more", "model"])
    text = ",".join([item] * (60_000_000 // (len(item) + 1)))
    (folder / "tokenizer.json").write_text(f'{{"{key}": [{text}]}}')
    return f"{key}: {item}"


def big_text(folder: Path, rng: random.Random) -> str:
    """A template that writes a text of any size."""
    template = rng.choice(BIG_TEXTS)
    settings(folder, chat_template=template)
    return template


def hostile_config(folder: Path, rng: random.Random) -> str:
    """Values in config.json that are absurd, or no numbers: for `kvant models` too."""
    keys = ["num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size"]
    key = rng.choice([*keys, "max_position_embeddings"])
    value = rng.choice(
        ['"x"', "1e999", "NaN", "1" + "0" * 400, "-1", "true", "[]", "{}", '"9"', "0.5", "null"]
    )
    path = folder / "config.json"
    raw = json.loads(path.read_text()) | {key: "HERE"}
    if value == '"9"':
        raw |= dict.fromkeys(keys, 2**31) | {key: "HERE"}
    path.write_text(json.dumps(raw).replace('"HERE"', value))
    return f"{key} {value[:20]}"


ALL = (foreign_class, init_inputs, growth, expression, added_tokens, unigram, word_piece, long_file, big_text)
KINDS: dict[str, Kind] = {kind.__name__: kind for kind in (*ALL, hostile_config)}
