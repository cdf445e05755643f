"""Bridged models: folders recorded from transformers (scripts/golden_bridged.py), mlx-lm's own, and tiny
ones.
"""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import quantize_model
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from kvant.bridge.config import BridgedConfig
from kvant.bridge.model import BridgedModel
from kvant.bridge.pool import BridgedCache, reserve
from kvant.bridge.probe import Attention
from kvant.bridge.prompt_cache import PromptCacheLayer, SequenceLayers
from kvant.cache import CacheOptions, ModelCache
from kvant.cache.layer_format import DTYPE_NAMES
from kvant.cache.options import DEFAULT_OPTIONS
from kvant.cache.pool import single_sizes
from support.tiny_models import build

BRIDGED = Path(__file__).parents[1] / "data" / "bridged"
NAMES = sorted(path.name for path in BRIDGED.iterdir() if path.is_dir())
IDS: list[int] = json.loads((BRIDGED / "ids.json").read_text())["ids"]
# append only; windows; sinks; a linear layer's state; latent attention; chunks; shared rows; a state beside
# keys
KINDS = ["qwen3", "gemma3_text", "gpt_oss", "qwen3_next", "deepseek_v32", "llama4", "gemma3n", "falcon_h1"]
WITH_STATE = ["qwen3_next", "falcon_h1"]
# Every architecture that computes some attention in its own way.
OWN_ATTENTION = {
    *(
        "bailing_hybrid",
        "bailing_moe_v3",
        "deepseek_v3",
        "deepseek_v32",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "kimi_k25",
    ),
    *("kimi_k3", "kimi_linear", "kimi_vl", "longcat_flash", "longcat_flash_ngram", "mistral4", "plamo"),
    *("plamo2", "stablelm"),
}
# Every architecture whose model has no such step, and what the error says.
REFUSED = {
    "llama4": "attends in chunks",
    "minimax_m3_vl": "selects blocks of keys",  # mlx-lm's own batch of long texts is wrong, too
    "afm7": "logits would differ",  # the position from the number of rows that it reads
    "recurrent_gemma": "logits would differ",  # its first token is not one after a state of zeros
    "gemma2": "ValueError",  # a mask of four axes added to scores of five
    "phi3small": "ValueError",  # a boolean mask that is added
    "gpt_bigcode": "convert",  # the offset as a Python number
    "internlm3": "convert",
}
LONG = [(7 + 31 * i) % 97 for i in range(600)]
PROMPT = LONG[:30]
TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


def copy_folder(name: str, place: Path, *, tokenizer: bool = False, **changes: Any) -> Path:
    """A recorded folder somewhere else, with changes of its config.json (None takes a key out) and a
    tokenizer.
    """
    folder = place / name
    shutil.copytree(BRIDGED / name, folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    write_config(
        folder, {key: value for key, value in config.items() if value is not None or key not in changes}
    )
    if tokenizer:
        write_words(folder, 64)
    return folder


def write_config(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config))


def write_words(folder: Path, size: int) -> None:
    """A tokenizer of ``size`` words, w2 and so on, with a chat template."""
    words = ["<unk>", "<end>", *(f"w{number}" for number in range(2, size))]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens([AddedToken("<end>", special=True)])
    made.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_mlx_lm(folder: Path, name: str, bits: int = 0) -> Path:
    """A tiny model as mlx-lm saves it, its matrices quantized where ``bits`` is not 0."""
    model, config = build(name)
    if bits:
        model, config = quantize_model(model, config, 32, bits)
    folder.mkdir()
    write_config(folder, config)
    weights: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


def bridged(name: str, **changes: Any) -> BridgedModel:
    """A tiny model of an architecture of mlx-lm, for ids of any vocabulary."""
    return BridgedModel(build(name, **changes)[0], BridgedConfig(name, 2**17, None), mx.float32)


def make_model_cache(module: Any, max_seq_len: int, options: CacheOptions = DEFAULT_OPTIONS) -> BridgedCache:
    """The cache of one of mlx-lm's models for kvant's loop."""
    model = BridgedModel(module, BridgedConfig("", 2**17, None), mx.float32)
    return model.reserve_cache(max_seq_len, options)


def alone(
    max_kv_size: int,
    widths: tuple[int, int] = (64, 64),
    *,
    window: int | None = None,
    chunk: int | None = None,
    dtype: mx.Dtype = mx.float32,
    **options: Any,
) -> PromptCacheLayer:
    """A layer of a prompt cache, of 2 kv heads, with no other beside it."""
    leaf = Attention(2, *widths, DTYPE_NAMES[dtype], window, chunk, value_is_key=False, shared=False)
    pool = reserve(
        [leaf], single_sizes(max_kv_size), CacheOptions(**options), dtype=dtype, make_cache=ModelCache
    )
    return PromptCacheLayer(ModelCache(pool), SequenceLayers())


def layers_of(cache: Iterable[Any]) -> list[PromptCacheLayer]:
    """kvant's layers of a prompt cache, which mlx-lm may have in lists."""
    parts = [part for entry in cache for part in getattr(entry, "caches", [entry])]
    return [part for part in parts if isinstance(part, PromptCacheLayer)]


def feed(model: Any, cache: Any, tokens: list[int], *, commits: bool = True) -> mx.array:
    """The logits (1, S, vocab) of a step, which is committed if the cache has steps."""
    inputs = mx.array([tokens])
    if not isinstance(cache, BridgedCache):
        logits: mx.array = model(inputs, cache=cache)
        mx.eval(logits, [layer.state for layer in cache])
        return logits
    cache.batch.begin(inputs)
    logits = model(inputs, cache=cache.batch.entries)
    mx.eval(logits, cache.batch.state)
    if commits:
        cache.commit()
    return logits
