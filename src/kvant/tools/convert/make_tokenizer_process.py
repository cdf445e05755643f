"""The program that makes a tokenizer.json. kvant.tools.convert.make_tokenizer starts it by its path.

It reads request.json and the vocabulary's files in its current folder. It writes tokenizer.json there, or error.txt
with a line that says why not.
"""

import json
import resource
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

CONTROL, USER_DEFINED, BYTE, BPE = 3, 4, 6, 2  # SentencePiece's numbers for kinds of pieces and of models


def qwen2(settings: dict[str, Any]) -> Any:
    """Byte-level BPE with Qwen2's pattern."""
    from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

    return Qwen2Tokenizer(vocab="vocab.json", merges="merges.txt", **settings)


def gpt2(settings: dict[str, Any]) -> Any:
    """Byte-level BPE with GPT-2's pattern; SmolLM2's."""
    from transformers.models.gpt2.tokenization_gpt2 import GPT2Tokenizer

    return GPT2Tokenizer(vocab="vocab.json", merges="merges.txt", **settings)


def bert(settings: dict[str, Any]) -> Any:
    """WordPiece."""
    from transformers.models.bert.tokenization_bert import BertTokenizer

    return BertTokenizer(vocab="vocab.txt", **settings)


def llama(settings: dict[str, Any]) -> Any:
    """BPE of a SentencePiece model, as Llama and Mistral have it."""
    check_sentencepiece(Path("tokenizer.model").read_bytes(), settings.get("add_prefix_space", True))
    from transformers.models.llama.tokenization_llama import LlamaTokenizer

    return LlamaTokenizer(**LlamaTokenizer.convert_to_native_format(vocab_file="tokenizer.model", **settings))


def check_sentencepiece(data: bytes, prefix: bool) -> None:
    """Refuse a SentencePiece model that LlamaTokenizer would read as another one: it looks at the pieces only."""
    try:
        from sentencepiece import sentencepiece_model_pb2 as protocol
    except ImportError as error:
        raise ValueError("the packages sentencepiece and protobuf are missing; pip install them") from error
    model = protocol.ModelProto()
    try:
        model.ParseFromString(data)
    except Exception as error:  # protobuf's own kinds
        raise ValueError("it is no SentencePiece model") from error
    normal = [piece for piece in model.pieces if piece.type not in (CONTROL, USER_DEFINED, BYTE)]
    scores = [piece.score for piece in normal[1:]]  # the first is the unknown token
    found = {
        "model_type": model.trainer_spec.model_type,
        "bytes": sum(piece.type == BYTE for piece in model.pieces),
        "normalizer": bool(model.normalizer_spec.precompiled_charsmap),
        "remove_extra_whitespaces": model.normalizer_spec.remove_extra_whitespaces,
        "add_dummy_prefix": model.normalizer_spec.add_dummy_prefix,
        "scores that fall": all(a >= b for a, b in pairwise(scores)),
    }
    expected = {
        "model_type": BPE,
        "bytes": 256,
        "normalizer": False,
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": prefix,
        "scores that fall": True,
    }
    for name, value in found.items():
        if value != expected[name]:
            raise ValueError(f"{name} is {value}; expected {expected[name]}, as Llama's and Mistral's have it")


MAKERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "Qwen2Tokenizer": qwen2,
    "GPT2Tokenizer": gpt2,
    "LlamaTokenizer": llama,
    "BertTokenizer": bert,
}


def make(request: dict[str, Any]) -> str:
    """The tokenizer as the tokenizers library writes it."""
    from tokenizers import AddedToken

    def token(value: Any, **more: bool) -> Any:
        return AddedToken(**value | more) if isinstance(value, dict) else value

    more = [token(value, special=True) for value in request["more"]]
    tokens = {key: token(value) for key, value in request["tokens"].items()}
    special = {str(value) for value in (*tokens.values(), *more) if value is not None}
    added = {
        number: AddedToken(value, normalized=value not in special, special=value in special)
        if isinstance(value, str)
        else token(value)
        for number, value in request["added"]
    }
    listed = {str(value): value for value in added.values()}
    settings = request["flags"] | {key: listed.get(str(value), value) for key, value in tokens.items()}
    if more:
        settings["extra_special_tokens"] = more
    made = MAKERS[request["class"]](settings | {"added_tokens_decoder": added})._tokenizer
    for number, value in added.items():
        if made.token_to_id(str(value)) != number:
            raise ValueError(f"token {str(value)[:80]!r} is {made.token_to_id(str(value))}; {number} is asked for")
    return str(made.to_str())


def limit(what: int, value: int) -> None:
    """Limit this process, unless it is limited more already."""
    _, most = resource.getrlimit(what)
    value = value if most == resource.RLIM_INFINITY else min(value, most)
    resource.setrlimit(what, (value, value))


def main(time_limit_s: float, memory_limit: int, max_bytes: int) -> int:
    """Make the file. The limit of processor time ends a process whose parent died."""
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_FSIZE, max_bytes)
    limit(resource.RLIMIT_CPU, int(time_limit_s) + 1)
    if memory_limit:
        limit(resource.RLIMIT_AS, memory_limit)
    try:
        text = make(json.loads(Path("request.json").read_text(encoding="utf-8")))
        Path("tokenizer.json").write_text(text, encoding="utf-8")
    except MemoryError:
        why = "it needs too much memory"
    except BaseException as error:  # a panic in Rust is no Exception
        lines = str(error).strip().splitlines()
        why = lines[0] if lines else type(error).__name__
    else:
        return 0
    Path("error.txt").write_text(why, encoding="utf-8", errors="replace")
    return 1


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
