"""The tokenizer of a folder, in the worker process: tokenizer.json by the tokenizers library, settings as
transformers applies them, so that the ids are those that transformers 5 gives.

Where transformers builds a class's own pipeline instead of the file's (DEFAULTS has their names), so does
this.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

# before the import: one text at a time needs no pool of threads
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from kvant.files import parse_json
from kvant.text.added import folder_tokens, token
from kvant.text.folder import check_token

Json = dict[str, Any]
FLAGS = ("single_word", "lstrip", "rstrip", "normalized")  # of an added token
STEPS = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}
MAX_ID = 2**24  # a token's id is a place in a table
# Tokens of a vocabulary -> the marks around its model's thoughts. The first entry whose tokens are there
# counts. From <think> on they are mlx-lm's, in its order.
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
# before them a word's space goes
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
DEFAULTS: dict[str, dict[str, str | None]] = {  # special tokens of a class where the folder names none
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
    """A loaded tokenizer; its methods answer the worker's requests."""

    def __init__(
        self, content: bytes, config: Json, special_tokens: Json, added_tokens: Json, model: Json
    ) -> None:
        """From the bytes of tokenizer.json, the folder's other files, and config.json's two words."""
        raw = parse_json(content, "tokenizer.json")
        _check(raw)
        self._decoder = raw.get("decoder")
        makes_bytes = _has_byte_level(raw.get("pre_tokenizer")) or _has_byte_level(raw.get("normalizer"))
        self._kind = str(raw["model"].get("type"))
        declared = config.get("tokenizer_class") or model.get("tokenizer_class")
        pipeline = pipeline_class(model.get("model_type"), declared, content, self._kind)
        present = {added["id"]: token(added) for added in raw.get("added_tokens") or ()}
        padding = raw.get("padding") or {}  # there is none; transformers takes its token
        listed = config.get("added_tokens_decoder")
        if pipeline is not None and listed is not None:
            described = {int(key): repr(token(value)) for key, value in listed.items()}
            # then the file's do not count
            if described != {key: repr(value) for key, value in present.items()}:
                content = json.dumps({**raw, "added_tokens": []}).encode()
        del raw
        self._tokenizer = Tokenizer.from_buffer(content)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        if pipeline is not None:
            self._rebuild(pipeline, config)
        elif makes_bytes and not _has_byte_level(self._decoder):
            self._decode_bytes()  # some conversions have SentencePiece's decoder there
        defaults = {"pad_token": padding.get("pad_token"), **DEFAULTS.get(pipeline or "", {})}
        self._named, self._extra, adding = folder_tokens(
            present, pipeline is not None, defaults, config, special_tokens, added_tokens
        )
        self._tokenizer.add_tokens(adding)
        self._finish(pipeline)
        self._tokenizer.encode_special_tokens = bool(config.get("split_special_tokens"))
        self._clean_up = bool(config.get("clean_up_tokenization_spaces"))

    def facts(self) -> dict[str, Any]:
        """Facts that the parent process need not ask for."""
        find = self._tokenizer.token_to_id
        # Clean-up looks at several tokens at once.
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
        """Text to token ids."""
        return list(self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def decode(self, ids: list[int], skip_special_tokens: bool, clean_up: bool | None) -> str:
        """Token ids to text; ``clean_up``: None is the folder's own choice, and byte pair encoding needs
        none.
        """
        text = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        if self._kind != "BPE" and (self._clean_up if clean_up is None else clean_up):
            for spaced in SPACES:
                text = text.replace(spaced, spaced.strip())
        return text

    def tokens(self, ids: list[int]) -> list[str | None]:
        """Token ids to the vocabulary's strings; None for an id it does not have."""
        return [self._tokenizer.id_to_token(token) for token in ids]

    def ids(self, tokens: list[str]) -> list[int | None]:
        """The vocabulary's strings to token ids; None for a string it does not have."""
        return [self._tokenizer.token_to_id(token) for token in tokens]

    def vocabulary(self) -> dict[str, int]:
        """Every token's id."""
        return self._tokenizer.get_vocab(with_added_tokens=True)

    def parts(self) -> dict[str, str]:
        """SHA-256 by the part's name, the vocabulary first: of what differs, the first part is named.

        What has no effect on ids or text is left out: the order in a file, merges as text or as pairs, a
        sequence of one step, whether a token is special. What is put around a text is left out, too: a draft
        model is given ids.
        """
        raw = json.loads(self._tokenizer.to_str())
        model = raw["model"]
        vocabulary = model.pop("vocab", None)
        # of a Unigram: pieces with a score each
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
            name: hashlib.sha256(json.dumps(part, sort_keys=True).encode()).hexdigest()
            for name, part in parts.items()
        }

    def _finish(self, name: str | None) -> None:
        """The last steps of some classes, after their tokens were added."""
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
        """The pipeline of a class of transformers around the file's vocabulary."""
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
            spaced = spaced or name == "CodeLlamaTokenizer"  # it always decodes so
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
    """The class for which transformers 5 builds a pipeline of its own; None: it takes tokenizer.json's.

    ``declared``: the folder's tokenizer_class. ``content``: tokenizer.json, whose model is of the type
        ``kind``.
    """
    name = declared.removesuffix("Fast") if isinstance(declared, str) else ""
    if model_type == "qwen2" or (model_type in ("qwen3", "qwen3_moe") and not name):
        name = "Qwen2Tokenizer"  # published ones declare others, wrongly
    if name not in DEFAULTS or model_type in ("mistral", "olmo2") or kind != "BPE":
        return None
    return None if name == "LlamaTokenizer" and b'"ByteLevel"' in content else name


def _step(step: Any, steps: str) -> Any:
    """A step without what has no effect."""
    if not isinstance(step, dict):
        return step
    if step["type"] == "Sequence":
        found = [_step(each, steps) for each in step[steps]]
        return found[0] if len(found) == 1 else found
    if step["type"] == "ByteLevel" and steps == "decoders":
        return {"type": "ByteLevel"}
    return {key: value for key, value in step.items() if key != "trim_offsets"}


def _has_byte_level(step: Any) -> bool:
    """Return whether a normalizer, a pre-tokenizer or a decoder is ByteLevel or has such a step."""
    if not isinstance(step, dict):
        return False
    return step.get("type") == "ByteLevel" or any(
        _has_byte_level(each) for steps in STEPS.values() for each in step.get(steps) or ()
    )


def decoder_kind(decoder: object) -> str:
    """How tokens become bytes: ``byte_level``, ``byte_fallback``, or ``other``: only the library can
    decode.
    """
    if not isinstance(decoder, dict):
        return "other"
    if decoder.get("type") == "ByteLevel":
        return "byte_level"
    steps = decoder.get("decoders") if decoder.get("type") == "Sequence" else None
    return "byte_fallback" if steps in (SPM, [*SPM, STRIP]) else "other"


def _check(raw: dict[str, Any]) -> None:
    """Refuse a file that the library would print about, or make an absurd table of."""
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
