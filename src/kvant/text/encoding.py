"""A folder's tokenizer, in the worker process: runs tokenizer.json as transformers 5 would.

The ids equal those of transformers 5. For classes whose pipeline transformers builds itself instead of using
the file's (see DEFAULTS), this module does the same.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

# Set before the import: one text at a time needs no thread pool.
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from kvant.files import parse_json
from kvant.text.added import folder_tokens, token
from kvant.text.folder import check_token

Json = dict[str, Any]
FLAGS = ("single_word", "lstrip", "rstrip", "normalized")  # settings of an added token
STEPS = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}
MAX_ID = 2**24  # ids index a table
# Tokens of a vocabulary -> the marks around its model's thoughts. The first entry whose tokens all exist is
# used. From <think> on, entries are mlx-lm's, in its order.
THINKING = {
    ("[THINK]", "[/THINK]"): ("[THINK]", "[/THINK]"),  # Magistral, Ministral 3
    ("<mm:think>", "</mm:think>"): ("<mm:think>", "</mm:think>"),  # MiniMax M3
    ("<seed:think>", "</seed:think>"): ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("<|inner_prefix|>", "<|inner_suffix|>"): ("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    ("<think>", "</think>"): ("<think>", "</think>"),
    ("<longcat_think>", "</longcat_think>"): ("<longcat_think>", "</longcat_think>"),
    ("<|think:start|>", "<|think:end|>"): ("<|think:start|>", "<|think:end|>"),
    ("<|channel>", "<channel|>"): ("<|channel>thought", "<channel|>"),
    ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"): ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
}
# the space before these is removed
SPACES = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")
SPM = [
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
END = "<|endoftext|>"
DEFAULTS: dict[str, dict[str, str | None]] = {  # special tokens of a class if the folder names none
    "Qwen2Tokenizer": {"unk_token": END, "eos_token": END, "pad_token": END},
    "LlamaTokenizer": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    "CodeLlamaTokenizer": {
        "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "prefix_token": "▁<PRE>",
        "middle_token": "▁<MID>", "suffix_token": "▁<SUF>", "eot_token": "▁<EOT>", "fill_token": "<FILL_ME>",
    },
    "GPTNeoXTokenizer": {"unk_token": END, "bos_token": END, "eos_token": END, "pad_token": "<|padding|>"},
    "GPT2Tokenizer": {"unk_token": END, "bos_token": END, "eos_token": END, "pad_token": None},
}  # fmt: skip


class Encoder:
    """A loaded tokenizer whose methods answer the worker's requests."""

    def __init__(
        self, content: bytes, config: Json, special_tokens: Json, added_tokens: Json, model: Json
    ) -> None:
        """Load tokenizer.json's bytes with the folder's other files and two strings of config.json."""
        raw = parse_json(content, "tokenizer.json")
        _check(raw)
        self._decoder = raw.get("decoder")
        makes_bytes = _has_byte_level(raw.get("pre_tokenizer")) or _has_byte_level(raw.get("normalizer"))
        self._kind = str(raw["model"].get("type"))
        declared = config.get("tokenizer_class") or model.get("tokenizer_class")
        pipeline = pipeline_class(model.get("model_type"), declared, content, self._kind)
        present = {added["id"]: token(added) for added in raw.get("added_tokens") or ()}
        padding = raw.get("padding") or {}  # transformers uses its token even without padding
        listed = config.get("added_tokens_decoder")
        if pipeline is not None and listed is not None:
            described = {int(key): repr(token(value)) for key, value in listed.items()}
            # if they differ, the added tokens of tokenizer.json do not count
            if described != {key: repr(value) for key, value in present.items()}:
                content = json.dumps({**raw, "added_tokens": []}).encode()
        del raw
        self._tokenizer = Tokenizer.from_buffer(content)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        if pipeline is not None:
            self._rebuild(pipeline, config)
        elif makes_bytes and not _has_byte_level(self._decoder):
            self._decode_bytes()  # some conversions have SentencePiece's decoder instead
        defaults = {"pad_token": padding.get("pad_token"), **DEFAULTS.get(pipeline or "", {})}
        self._named, self._extra, adding = folder_tokens(
            present, pipeline is not None, defaults, config, special_tokens, added_tokens
        )
        self._tokenizer.add_tokens(adding)
        self._finish(pipeline)
        self._tokenizer.encode_special_tokens = bool(config.get("split_special_tokens"))
        self._clean_up = bool(config.get("clean_up_tokenization_spaces"))

    def facts(self) -> dict[str, Any]:
        """Return facts that the parent process then need not ask for."""
        find = self._tokenizer.token_to_id
        # Clean-up needs several tokens at once.
        kind = decoder_kind(self._decoder) if not self._clean_up or self._kind == "BPE" else "other"
        added = self._tokenizer.get_added_tokens_decoder()
        last = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        return {
            "special": {name: [token, find(token)] for name, token in self._named.items()},
            "extra": self._extra,
            "size": self._tokenizer.get_vocab_size(with_added_tokens=True),
            "vocab_size": self._tokenizer.get_vocab_size(with_added_tokens=False),
            "thinking": next(
                (THINKING[tokens] for tokens in THINKING if None not in map(find, tokens)), None
            ),
            "decoder": kind,
            "pieces": [] if kind == "other" else self.tokens(list(range(last + 1))),
            # Marks such as <|im_end|> are more than text; added spaces and line breaks are text.
            "marks": sorted(place for place, each in added.items() if each.special or each.content.strip()),
            "special_tokens": [[place, each.content] for place, each in added.items() if each.special],
            "strips": isinstance(self._decoder, dict) and STRIP in self._decoder.get("decoders", ()),
        }

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Encode text to token ids."""
        return list(self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def decode(self, ids: list[int], skip_special_tokens: bool, clean_up: bool | None) -> str:
        """Decode token ids; ``clean_up`` None means the folder's setting. Byte pair encoding needs none."""
        text = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        if self._kind != "BPE" and (self._clean_up if clean_up is None else clean_up):
            for spaced in SPACES:
                text = text.replace(spaced, spaced.strip())
        return text

    def tokens(self, ids: list[int]) -> list[str | None]:
        """Return the vocabulary's strings of token ids, None for unknown ids."""
        return [self._tokenizer.id_to_token(token) for token in ids]

    def ids(self, tokens: list[str]) -> list[int | None]:
        """Return the ids of the vocabulary's strings, None for unknown strings."""
        return [self._tokenizer.token_to_id(token) for token in tokens]

    def vocabulary(self) -> dict[str, int]:
        """Return every token's id."""
        return self._tokenizer.get_vocab(with_added_tokens=True)

    def parts(self) -> dict[str, str]:
        """Return a SHA-256 of each part of the tokenizer by name, the vocabulary first.

        Two tokenizers that differ in ids or text differ in a part. Differences without effect are ignored:
        the order in a file, merges as text or as pairs, a sequence of one step, whether a token is special.
        So are tokens added around a text, because a draft model receives ids.
        """
        raw = json.loads(self._tokenizer.to_str())
        model = raw["model"]
        vocabulary = model.pop("vocab", None)
        # a Unigram vocabulary lists pieces with scores
        scores = None if isinstance(vocabulary, dict) else vocabulary
        parts: dict[str, Any] = {
            "vocabulary": sorted((place, token) for token, place in self.vocabulary().items()),
            "merges": [scores, model.pop("merges", None)],
            "model": {key: value for key, value in model.items() if value not in (None, "", False)},
            "added tokens": sorted(
                [each["id"], *(each[flag] for flag in FLAGS)] for each in raw["added_tokens"]
            ),
        }
        for name, steps in STEPS.items():
            parts[name.replace("_", "-")] = _step(raw[name], steps)
        return {
            name: hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
            for name, content in parts.items()
        }

    def _finish(self, name: str | None) -> None:
        """Apply the last steps of some classes, after their tokens were added."""
        tokenizer = self._tokenizer
        named = self._named
        if name == "Qwen2Tokenizer":
            names = [*named.values(), *self._extra]
            tokenizer.add_tokens([AddedToken(content, special=True) for content in names])
        elif name == "GPTNeoXTokenizer":
            tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
        elif name == "CodeLlamaTokenizer":
            bos = named.get("bos_token")
            ids = [(bos, tokenizer.token_to_id(bos))] if bos else []
            single = f"{bos} $A" if bos else "$A"
            tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)
            tokenizer.model.unk_token = named.get("unk_token")

    def _rebuild(self, name: str, config: Mapping[str, Any]) -> None:
        """Build a transformers class's pipeline around the file's vocabulary."""
        tokenizer = self._tokenizer
        model = tokenizer.model
        assert isinstance(model, BPE)
        model.dropout = None
        model.unk_token = None
        model.ignore_merges = False
        model.continuing_subword_prefix = ""
        model.end_of_word_suffix = ""
        model.fuse_unk = model.byte_fallback = "Llama" in name
        prefix = config.get("add_prefix_space")
        if "Llama" in name:
            spaced = prefix is None or bool(prefix)
            legacy = name == "LlamaTokenizer" and config.get("legacy")
            scheme = "never" if not spaced else "always" if legacy else "first"
            spaced = spaced or name == "CodeLlamaTokenizer"  # which always decodes so
            tokenizer.normalizer = None
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
                replacement="▁", prepend_scheme=scheme, split=False
            )
            steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
            tokenizer.decoder = decoders.Sequence(steps + [decoders.Strip(content=" ", left=1)] * spaced)
            self._decoder = {"type": "Sequence", "decoders": SPM + [STRIP] * spaced}
            return
        tokenizer.normalizer = None if name == "GPT2Tokenizer" else normalizers.NFC()
        by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=bool(prefix), use_regex=name != "Qwen2Tokenizer")
        split = pre_tokenizers.Split(Regex(QWEN), behavior="isolated", invert=False)
        tokenizer.pre_tokenizer = (
            pre_tokenizers.Sequence([split, by_bytes]) if name == "Qwen2Tokenizer" else by_bytes
        )
        self._decode_bytes()

    def _decode_bytes(self) -> None:
        self._tokenizer.decoder = decoders.ByteLevel()
        self._decoder = {"type": "ByteLevel"}


def pipeline_class(model_type: str | None, declared: object, content: bytes, kind: str) -> str | None:
    """Return the class whose pipeline transformers 5 builds itself; None if it uses tokenizer.json's.

    ``declared`` is the folder's tokenizer_class, ``kind`` the type of the model in tokenizer.json,
    ``content``.
    """
    name = declared.removesuffix("Fast") if isinstance(declared, str) else ""
    if model_type == "qwen2" or (model_type in ("qwen3", "qwen3_moe") and not name):
        name = "Qwen2Tokenizer"  # published folders wrongly declare others
    if name not in DEFAULTS or model_type in ("mistral", "olmo2") or kind != "BPE":
        return None
    return None if name == "LlamaTokenizer" and b'"ByteLevel"' in content else name


def _step(step: Any, steps: str) -> Any:
    """Return a step without settings that have no effect."""
    if not isinstance(step, dict):
        return step
    if step["type"] == "Sequence":
        normalized = [_step(each, steps) for each in step[steps]]
        return normalized[0] if len(normalized) == 1 else normalized
    if step["type"] == "ByteLevel" and steps == "decoders":
        return {"type": "ByteLevel"}
    return {key: value for key, value in step.items() if key != "trim_offsets"}


def _has_byte_level(step: Any) -> bool:
    """Whether a normalizer, pre-tokenizer or decoder is ByteLevel or has such a step."""
    if not isinstance(step, dict):
        return False
    return step.get("type") == "ByteLevel" or any(
        _has_byte_level(each) for steps in STEPS.values() for each in step.get(steps) or ()
    )


def decoder_kind(decoder: object) -> str:
    """Return how tokens become bytes: ``byte_level``, ``byte_fallback``, or ``other`` (library only)."""
    if not isinstance(decoder, dict):
        return "other"
    if decoder.get("type") == "ByteLevel":
        return "byte_level"
    steps = decoder.get("decoders") if decoder.get("type") == "Sequence" else None
    return "byte_fallback" if steps in (SPM, [*SPM, STRIP]) else "other"


def _check(raw: dict[str, Any]) -> None:
    """Refuse a file for which the library would print messages or allocate an absurd table."""
    if not isinstance(raw.get("model"), dict):
        raise ValueError("tokenizer.json: no model; expected a tokenizer as the tokenizers library writes it")
    added = raw.get("added_tokens") or []
    if not isinstance(added, list) or not all(isinstance(token, dict) for token in added):
        raise ValueError("tokenizer.json: added_tokens is not a list of objects")
    vocabulary = raw["model"].get("vocab")
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else []
    for item in added:
        check_token("tokenizer.json", item, {"id"})
        ids.append(item.get("id"))
    for place in ids:
        if type(place) is not int or not 0 <= place < MAX_ID:
            raise ValueError(
                f"tokenizer.json: token id {str(place)[:80]}; expected an int from 0 to {MAX_ID - 1}"
            )
