"""Convert a GGUF file's vocabulary to tokenizer.json and tokenizer_config.json.

Two kinds are imported: ``gpt2``, byte-level byte pair encoding with merges, and ``llama``, SentencePiece
pieces with scores. The file does not say how text is split before byte pair encoding: ``tokenizer.ggml.pre``
is only a name, so ``SPLITS`` has the regular expressions for the names that are imported, from the
tokenizer.json files that the models' authors publish.
"""

from collections.abc import Mapping
from typing import Any

from kvant.errors import ConvertError

Json = dict[str, Any]

# Contractions, words, numbers, punctuation with line ends, line ends, spaces. Families differ in numbers.
_FAMILY = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|NUMBERS| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = _FAMILY.replace("NUMBERS", r"\p{N}{1,3}")
QWEN2 = _FAMILY.replace("NUMBERS", r"\p{N}")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
GPT2: Json = {**BYTES, "use_regex": True}  # tokenizers has its regular expression built in


def _split(pattern: str) -> Json:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


# tokenizer.ggml.pre -> the steps before byte pair encoding.
SPLITS: dict[str, list[Json]] = {
    "gpt-2": [GPT2],
    "smollm": [{"type": "Digits", "individual_digits": True}, GPT2],
    "llama-bpe": [_split(LLAMA3), BYTES],
    "qwen2": [_split(QWEN2), BYTES],
    "tekken": [_split(TEKKEN), BYTES],
}
# A word that is itself a token is not split and merged again, and texts begin with the beginning-of-text
# token unless the file says otherwise.
WHOLE_TOKENS = ("llama-bpe", "tekken")
NFC = ("qwen2",)
MAX_PIECE = 256  # characters of a SentencePiece token; each position in it may be a merge
SPACE = "▁"  # SentencePiece's
# tokenizer.ggml.token_type; 5 is an unused token
NORMAL = 1
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
BYTE = 6
ADDED = (UNKNOWN, CONTROL, USER_DEFINED)  # found in a text before it is split
NOT_MERGED = (UNKNOWN, CONTROL, BYTE)  # never produced from ordinary text
NAMED = {  # in tokenizer_config.json -> the key of its id
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
# Tokens that end an answer: metadata keys of ids, and tokens that end one in any model. Many files name only
# one.
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
END_TOKENS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|endoftext|>")
TEMPLATE = "tokenizer.chat_template"


def build_tokenizer(metadata: Mapping[str, Any]) -> tuple[Json, Json]:
    """Return tokenizer.json and tokenizer_config.json.

    Raises:
        ConvertError: the kind of vocabulary or splitting is not imported, or the metadata contradicts itself.
    """
    kind = metadata.get("tokenizer.ggml.model")
    builders = {"gpt2": _byte_pairs, "llama": _sentence_pieces}
    if not isinstance(kind, str) or kind not in builders:
        raise ConvertError(f"tokenizer.ggml.model is {str(kind)[:40]!r}; expected {' or '.join(builders)}")
    tokens = _texts(metadata, "tokens")
    if len({*tokens}) < len(tokens):
        raise ConvertError("tokenizer.ggml.tokens has a token twice")
    if metadata.get("tokenizer.ggml.add_eos_token"):
        raise ConvertError("tokenizer.ggml.add_eos_token is true; expected a model that continues its prompt")
    raw = {"version": "1.0", **builders[kind](metadata, tokens)}
    raw["model"] |= {"type": "BPE", "vocab": {token: number for number, token in enumerate(tokens)}}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    raw["added_tokens"] = [
        {"id": number, "content": tokens[number], **flags, "special": use != USER_DEFINED}
        for number, use in enumerate(_types(metadata, tokens))
        if use in ADDED
    ]
    named = {
        name: tokens[number]
        for name, key in NAMED.items()
        if (number := _id(metadata, key, tokens)) is not None
    }
    bos = named.get("bos_token")
    begins = kind == "llama" or metadata.get("tokenizer.ggml.pre") in WHOLE_TOKENS
    if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", begins):
        raw["post_processor"] = _put_before(bos, tokens.index(bos))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **named}
    if templates := _templates(metadata):
        config["chat_template"] = templates
    return raw, config


def end_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Return the ids that end an answer, for generation_config.json."""
    tokens = _texts(metadata, "tokens")
    types = _types(metadata, tokens)
    ids = {number for key in END_KEYS if (number := _id(metadata, key, tokens)) is not None}
    return sorted(ids | {i for i, token in enumerate(tokens) if token in END_TOKENS and types[i] == CONTROL})


def _byte_pairs(metadata: Mapping[str, Any], tokens: list[str]) -> Json:
    pre = metadata.get("tokenizer.ggml.pre")
    if not isinstance(pre, str) or pre not in SPLITS:
        raise ConvertError(f"tokenizer.ggml.pre is {str(pre)[:40]!r}; expected {', '.join(SPLITS)}")
    merges = [merge.split(" ") for merge in _texts(metadata, "merges")]
    if any(len(pair) != 2 for pair in merges):
        raise ConvertError(
            "tokenizer.ggml.merges has an entry that is not two tokens with a space between them"
        )
    return {
        "normalizer": {"type": "NFC"} if pre in NFC else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": SPLITS[pre]},
        "decoder": GPT2,
        "model": {"ignore_merges": pre in WHOLE_TOKENS, "merges": merges},
    }


def _sentence_pieces(metadata: Mapping[str, Any], tokens: list[str]) -> Json:
    scores = _numbers(metadata, "scores", len(tokens))
    longest = max(map(len, tokens), default=0)
    if longest > MAX_PIECE:
        raise ConvertError(
            f"tokenizer.ggml.tokens has one of {longest} characters; expected at most {MAX_PIECE}"
        )
    unknown = _id(metadata, "unknown_token_id", tokens)
    spaces: list[Json] = [{"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]
    decoders: list[Json] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        spaces.insert(0, {"type": "Prepend", "prepend": SPACE})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": spaces},
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "unk_token": None if unknown is None else tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": True,
            "merges": _merges_by_score(tokens, scores, _types(metadata, tokens)),
        },
    }


def _merges_by_score(tokens: list[str], scores: list[float], types: list[float]) -> list[list[str]]:
    """Rebuild the merges of SentencePiece's byte pair encoding, which prefers the piece with the best score.

    Pairs that make the same piece are ordered by their ids.
    """
    ids = {token: number for number, token in enumerate(tokens) if types[number] not in NOT_MERGED}
    scored: list[tuple[float, list[tuple[int, int]]]] = []
    for token, number in ids.items():
        cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
        pairs = sorted((ids[left], ids[right]) for left, right in cuts if left in ids and right in ids)
        scored.append((scores[number], pairs))
    scored.sort(key=lambda entry: -entry[0])  # stable: equal scores stay in the order of the vocabulary
    return [[tokens[left], tokens[right]] for _, pairs in scored for left, right in pairs]


def _put_before(token: str, number: int) -> Json:
    """Put a token before every text."""
    first = {"SpecialToken": {"id": token, "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }


def _templates(metadata: Mapping[str, Any]) -> str | list[Json]:
    """Return the chat template, or a list of named templates if there are several."""
    keys = [key for key in metadata if key == TEMPLATE or key.startswith(f"{TEMPLATE}.")]
    if not all(isinstance(metadata[key], str) for key in keys):
        raise ConvertError(f"{TEMPLATE} is not text")
    if keys == [TEMPLATE]:
        return str(metadata[TEMPLATE])
    return [
        {
            "name": "default" if key == TEMPLATE else key.removeprefix(f"{TEMPLATE}."),
            "template": metadata[key],
        }
        for key in keys
    ]


def _texts(metadata: Mapping[str, Any], key: str) -> list[str]:
    texts = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ConvertError(f"tokenizer.ggml.{key} is not a list of texts")
    return texts


def _numbers(metadata: Mapping[str, Any], key: str, count: int) -> list[float]:
    numbers = metadata.get(f"tokenizer.ggml.{key}")
    if (
        not isinstance(numbers, list)
        or len(numbers) != count
        or any(isinstance(number, str) for number in numbers)
    ):
        raise ConvertError(f"tokenizer.ggml.{key} does not list one number for each of {count} tokens")
    return numbers


def _types(metadata: Mapping[str, Any], tokens: list[str]) -> list[float]:
    if "tokenizer.ggml.token_type" not in metadata:
        return [NORMAL] * len(tokens)
    return _numbers(metadata, "token_type", len(tokens))


def _id(metadata: Mapping[str, Any], key: str, tokens: list[str]) -> int | None:
    number = metadata.get(f"tokenizer.ggml.{key}")
    if number is None:
        return None
    if type(number) is not int or not 0 <= number < len(tokens):
        raise ConvertError(
            f"tokenizer.ggml.{key} is {str(number)[:40]}; expected a token from 0 to {len(tokens) - 1}"
        )
    return number
