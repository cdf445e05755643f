"""The tokenizer of a folder, in the worker process: tokenizer.json by the tokenizers library, settings as transformers
applies them, so that the ids are those that transformers 5 gives.

Where transformers builds a class's own pipeline instead of the file's (Qwen2, Llama, GPT-2), so does this.
"""

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # before the import: one text at a time needs no pool of threads

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

MAX_ID = 2**24  # a token's id is a place in a table
TOKEN_KEYS = {"content", "single_word", "lstrip", "rstrip", "normalized", "special"}
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
THINKING = (("<think>", "</think>"), ("<longcat_think>", "</longcat_think>"), ("<|think:start|>", "<|think:end|>"))
SPACES = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")  # before them a word's space goes
SPM = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
DEFAULTS = {  # special tokens of a class where the folder names none
    "Qwen2Tokenizer": {"unk_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
    "LlamaTokenizer": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    "GPT2Tokenizer": {"unk_token": "<|endoftext|>", "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"},
}


class Encoder:
    """A loaded tokenizer; its methods answer the worker's requests.

    Raises:
        ValueError: files that are no tokenizer's.
    """

    def __init__(
        self,
        content: bytes,
        config: dict[str, Any],
        special_tokens: dict[str, Any],
        added_tokens: dict[str, Any],
        model_type: str | None,
        tokenizer_class: str | None,
    ) -> None:
        """From the bytes of tokenizer.json, what the folder's other files say, and config.json's two words."""
        raw = _parse(content)
        _check(raw)
        self._decoder = raw.get("decoder")
        self._kind = str(raw["model"].get("type"))
        pipeline = pipeline_class(model_type, config.get("tokenizer_class") or tokenizer_class, raw)
        present = {token["content"]: _token(token) for token in raw.get("added_tokens") or ()}
        del raw
        self._tokenizer = Tokenizer.from_buffer(content)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        if pipeline is not None:
            self._rebuild(pipeline, config)
        self._add_tokens(DEFAULTS.get(pipeline or "", {}), present, config, special_tokens, added_tokens)
        self._tokenizer.encode_special_tokens = bool(config.get("split_special_tokens"))
        self._clean_up = bool(config.get("clean_up_tokenization_spaces"))

    def facts(self) -> dict[str, Any]:
        """What the parent process knows without asking."""
        find = self._tokenizer.token_to_id
        # Clean-up looks at several tokens at once.
        kind = decoder_kind(self._decoder) if not self._clean_up or self._kind == "BPE" else "other"
        last = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        return {
            "special": {name: [token, find(token)] for name, token in self._named.items()},
            "extra": self._extra,
            "size": self._tokenizer.get_vocab_size(with_added_tokens=True),
            "vocab_size": self._tokenizer.get_vocab_size(with_added_tokens=False),
            "thinking": next((pair for pair in THINKING if all(find(token) is not None for token in pair)), None),
            "decoder": kind,
            "pieces": [] if kind == "other" else self.tokens(list(range(last + 1)))["tokens"],
            "strips": isinstance(self._decoder, dict) and STRIP in self._decoder.get("decoders", ()),
        }

    def encode(self, text: str, add_special_tokens: bool) -> dict[str, Any]:
        """Text to token ids."""
        return {"ids": self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids}

    def decode(self, ids: list[int], skip_special_tokens: bool, clean_up: bool | None) -> dict[str, Any]:
        """Token ids to text; ``clean_up``: None is the folder's own choice, and byte pair encoding needs none."""
        text = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        if self._kind != "BPE" and (self._clean_up if clean_up is None else clean_up):
            for spaced in SPACES:
                text = text.replace(spaced, spaced.strip())
        return {"text": text}

    def tokens(self, ids: list[int]) -> dict[str, Any]:
        """Token ids to the vocabulary's strings; None for an id it does not have."""
        return {"tokens": [self._tokenizer.id_to_token(token) for token in ids]}

    def ids(self, tokens: list[str]) -> dict[str, Any]:
        """The vocabulary's strings to token ids; None for what it does not have."""
        return {"ids": [self._tokenizer.token_to_id(token) for token in tokens]}

    def vocabulary(self) -> dict[str, Any]:
        """Every token's id."""
        return {"vocabulary": self._tokenizer.get_vocab(with_added_tokens=True)}

    def _rebuild(self, name: str, config: Mapping[str, Any]) -> None:
        """The pipeline of a class of transformers around the file's vocabulary."""
        tokenizer, model = self._tokenizer, self._tokenizer.model
        assert isinstance(model, BPE)
        model.dropout, model.unk_token, model.ignore_merges = None, None, False
        model.continuing_subword_prefix, model.end_of_word_suffix = "", ""
        model.fuse_unk = model.byte_fallback = name == "LlamaTokenizer"
        prefix = config.get("add_prefix_space")
        if name == "LlamaTokenizer":
            spaced = prefix is None or bool(prefix)
            scheme = "never" if not spaced else "always" if config.get("legacy") else "first"
            tokenizer.normalizer = None
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
            steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
            tokenizer.decoder = decoders.Sequence(steps + [decoders.Strip(content=" ", left=1)] * spaced)
            self._decoder = {"type": "Sequence", "decoders": SPM + [STRIP] * spaced}
            return
        tokenizer.normalizer = normalizers.NFC() if name == "Qwen2Tokenizer" else None
        split = pre_tokenizers.Split(Regex(QWEN), behavior="isolated", invert=False)
        if name == "Qwen2Tokenizer":
            last = pre_tokenizers.ByteLevel(add_prefix_space=bool(prefix), use_regex=False)
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, last])
        else:
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(prefix))
        tokenizer.decoder = decoders.ByteLevel()
        self._decoder = {"type": "ByteLevel"}

    def _add_tokens(
        self,
        defaults: Mapping[str, str],
        present: Mapping[str, AddedToken],
        config: Mapping[str, Any],
        special_tokens: Mapping[str, Any],
        added_tokens: Mapping[str, Any],
    ) -> None:
        """What the folder's other files add to the file's tokens, and which tokens they name."""
        settings = dict(config)
        listed = config.get("added_tokens_decoder")
        if listed is not None:
            adding = {
                item["content"]: _token(item) for _, item in sorted(listed.items(), key=lambda item: int(item[0]))
            }
        else:  # older folders
            settings |= special_tokens
            adding = dict(present)
        self._named: dict[str, str] = {}
        for name in NAMED:
            value = settings.get(name) if name in settings else defaults.get(name)
            if value is not None:
                self._named[name] = _content(value)
        if listed is None:
            for content in sorted(added_tokens, key=lambda content: int(added_tokens[content])):
                special = content in self._named.values()
                adding.setdefault(content, AddedToken(content, normalized=not special, special=special))
        more = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
        others = list(more.values()) if isinstance(more, dict) else list(more)
        others += [value for name, value in settings.items() if name.endswith("_token") and name not in NAMED]
        others = [value for value in others if isinstance(value, str | dict)]
        self._extra = [_content(value) for value in others]
        for value in [*(settings.get(name) or token for name, token in self._named.items()), *others]:
            adding.setdefault(_content(value), _token({"special": True, **value} if isinstance(value, dict) else value))
        for content in self._named.values():
            adding[content].special = True
        self._tokenizer.add_tokens(list(adding.values()))


def pipeline_class(model_type: str | None, declared: object, raw: Mapping[str, Any]) -> str | None:
    """The class whose own pipeline transformers 5 builds for a folder; None: it takes tokenizer.json's."""
    name = declared.removesuffix("Fast") if isinstance(declared, str) else ""
    if model_type == "qwen2" or (model_type == "qwen3" and not name):
        name = "Qwen2Tokenizer"  # published ones declare others, wrongly
    if name not in DEFAULTS or model_type == "mistral" or raw["model"].get("type") != "BPE":
        return None
    if name == "LlamaTokenizer" and '"ByteLevel"' in json.dumps([raw.get("pre_tokenizer"), raw.get("decoder")]):
        return None
    return name


def decoder_kind(decoder: object) -> str:
    """How tokens become bytes: ``byte_level``, ``byte_fallback``, or ``other``, which only the library knows."""
    if not isinstance(decoder, dict):
        return "other"
    if decoder.get("type") == "ByteLevel":
        return "byte_level"
    steps = decoder.get("decoders") if decoder.get("type") == "Sequence" else None
    return "byte_fallback" if steps in (SPM, [*SPM, STRIP]) else "other"


def unique_keys(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object's pairs as a dict; a key that is there twice is refused, for readers disagree which one counts."""
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"{key[:80]!r} is there twice")
        result[key] = value
    return result


def _parse(content: bytes) -> dict[str, Any]:
    try:
        raw = json.loads(content.decode(), object_pairs_hook=unique_keys)
    except UnicodeDecodeError as error:
        raise ValueError(f"tokenizer.json: not text: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"tokenizer.json: not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"tokenizer.json: a JSON {type(raw).__name__}; expected an object")
    return raw


def _check(raw: dict[str, Any]) -> None:
    """Refuse what the library would print about, or make an absurd table of."""
    if not isinstance(raw.get("model"), dict):
        raise ValueError("tokenizer.json: no model; expected a tokenizer as the tokenizers library writes it")
    added = raw.get("added_tokens") or []
    if not isinstance(added, list) or not all(isinstance(token, dict) for token in added):
        raise ValueError("tokenizer.json: added_tokens is not a list of objects")
    vocabulary = raw["model"].get("vocab")
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else []
    for token in added:
        unknown = sorted(token.keys() - TOKEN_KEYS - {"id"})
        if unknown or not isinstance(token.get("content"), str):
            what = f"{unknown[0]!r}" if unknown else "no content"
            raise ValueError(f"tokenizer.json: a token has {what}; expected id, {', '.join(sorted(TOKEN_KEYS))}")
        ids.append(token.get("id"))
    for token in ids:
        if type(token) is not int or not 0 <= token < MAX_ID:
            raise ValueError(f"tokenizer.json: token id {str(token)[:80]}; expected an int from 0 to {MAX_ID - 1}")


def _content(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _token(token: str | dict[str, Any]) -> AddedToken:
    if isinstance(token, str):
        return AddedToken(token, special=True)
    return AddedToken(**{key: value for key, value in token.items() if key in TOKEN_KEYS})
