"""The options of sampling that a model's authors set: generation_config.json, in transformers' names."""

from collections.abc import Collection
from pathlib import Path

from kvant.engine.sampling import MIN_TEMP, OPTIONS, in_range
from kvant.errors import ModelError
from kvant.fields import shown
from kvant.files import read_optional

FILE = "generation_config.json"
KEYS = {  # in the file, and of SamplingOptions
    "temperature": "temp",
    "top_p": "top_p",
    "min_p": "min_p",
    "top_k": "top_k",
    "repetition_penalty": "repetition_penalty",
}


def read_model_sampling(folder: Path, given: Collection[str] = (), vocab_size: int | None = None) -> dict[str, float]:
    """A model's own options by their names in SamplingOptions; empty where its folder says nothing.

    ``do_sample: false`` is a temperature of 0, and so is one too small to divide by. ``do_sample: true`` without a
    temperature is 1, as in transformers. A file without either, and without a temperature, asks for no sampling.

    Args:
        folder: the model folder.
        given: names that the user gives a value. The file's is not looked at.
        vocab_size: of the model, where it is known. A top-k of so many tokens leaves nothing out, and becomes 0.
    """
    path = folder / FILE
    raw = read_optional(path)
    do_sample = raw.get("do_sample")
    if do_sample is not None and not isinstance(do_sample, bool):
        raise ModelError(f"{path}: do_sample is {shown(do_sample)}; expected true or false")
    found: dict[str, float] = {}
    for key, name in KEYS.items():
        value = raw.get(key)
        if value is None or name in given:
            continue
        if name == "temp" and isinstance(value, float) and 0 < value < MIN_TEMP:
            value = 0.0
        if not in_range(name, value):
            expected = OPTIONS[name].metadata["expected"]
            raise ModelError(f"{path}: {key} is {shown(value)}; expected {expected}; an option of yours overrides it")
        found[name] = value
    if vocab_size is not None and found.get("top_k", 0) >= vocab_size:
        found["top_k"] = 0
    if do_sample is False:
        return {name: value for name, value in found.items() if name == "repetition_penalty"} | {"temp": 0.0}
    if do_sample and "temp" not in given:
        found.setdefault("temp", 1.0)
    return found
