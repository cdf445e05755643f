"""Tokenizers compared by content: digests of the parts that say which ids a text becomes, or which text ids are.

Two files of one tokenizer differ in bytes where they were written at different times. What has no effect on ids or text
is left out: the order in a file, merges as text or as pairs, a sequence of one step, and whether a token is special.
What is put around a text is left out, too: a draft model is given ids.
"""

import hashlib
import json
from typing import Any

from tokenizers import Tokenizer

FLAGS = ("single_word", "lstrip", "rstrip", "normalized")  # of an added token
STEPS = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}


def digests(tokenizer: Tokenizer) -> dict[str, str]:
    """SHA-256 by the part's name, the vocabulary first: of what differs, the first part is named."""
    raw = json.loads(tokenizer.to_str())
    model = raw["model"]
    vocabulary = model.pop("vocab", None)
    scores = None if isinstance(vocabulary, dict) else vocabulary  # of a Unigram: pieces with a score each
    parts: dict[str, Any] = {
        "vocabulary": sorted((place, token) for token, place in tokenizer.get_vocab(with_added_tokens=True).items()),
        "merges": [scores, model.pop("merges", None)],
        "model": {key: value for key, value in model.items() if value not in (None, "", False)},
        "added tokens": sorted([each["id"], *(each[flag] for flag in FLAGS)] for each in raw["added_tokens"]),
    }
    for name, steps in STEPS.items():
        parts[name.replace("_", "-")] = _step(raw[name], steps)
    return {name: hashlib.sha256(json.dumps(part, sort_keys=True).encode()).hexdigest() for name, part in parts.items()}


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
