"""What every command that runs a model does first: load it, reserve its cache, say what was reserved."""

import gc
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvant.cache import QuantizedKVCache
from kvant.cli.options import BadValueError
from kvant.cli.progress import LateProgress
from kvant.engine.load import find_model, load_folder
from kvant.errors import ContextError
from kvant.models import Decoder

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

DEFAULT_MAX_KV_SIZE = 4096


@dataclass(frozen=True, slots=True)
class Session:
    """A loaded model with its reserved cache."""

    model: Decoder
    tokenizer: "TokenizerWrapper"
    cache: list[QuantizedKVCache]
    load_s: float

    @property
    def cache_bytes(self) -> int:
        """Bytes reserved in all layers; they never change."""
        return sum(layer.nbytes for layer in self.cache)

    def describe_cache(self) -> str:
        """The reservation in a line."""
        first = self.cache[0]
        kind = f"{first.quant_bit} bits in groups of {first.quant_group}" if first.quant_bit else f"{self.model.dtype}"
        return (
            f"{first.max_seq_len} tokens reserved, {kind.removeprefix('mlx.core.')}, {format_bytes(self.cache_bytes)}"
        )


def open_session(
    model_name: str,
    *,
    adapter_path: str | None,
    kv_bits: int,
    kv_group_size: int,
    kv_bias_split: bool,
    max_kv_size: int | None,
    kernels: str | None,
    quiet: bool,
) -> Session:
    """Load a model and reserve its cache; the reservation is printed before the first token is computed.

    Raises:
        ModelError: a model or adapter that cannot be loaded.
        ContextError: more tokens asked for than the model's context.
        BadValueError: a group size that does not divide the model's head dimension, or a format that a kernel asked
            for does not take.
    """
    started = time.perf_counter()
    # Collecting garbage while transformers is imported takes a tenth of that time and finds none; frozen, what it left
    # is not gone through again between tokens.
    gc.disable()
    try:
        with LateProgress("loading", quiet=quiet) as progress:
            model, tokenizer = load_folder(find_model(model_name), progress.update, adapter_path=adapter_path)
    finally:
        gc.freeze()
        gc.enable()
    context = model.config.max_position_embeddings
    if max_kv_size is not None and max_kv_size > context:
        raise ContextError(f"--max-kv-size is {max_kv_size}; the model's context is {context} tokens")
    try:
        tokens = max_kv_size or min(DEFAULT_MAX_KV_SIZE, context)
        cache = model.make_cache(
            tokens, quant_bit=kv_bits, quant_group=kv_group_size, bias_split=kv_bias_split, kernels=kernels
        )
    except ValueError as error:
        raise BadValueError(f"--kv-bits {kv_bits} --kv-group-size {kv_group_size}: {error}") from error
    session = Session(model, tokenizer, cache, time.perf_counter() - started)
    if not quiet:
        print(f"cache: {session.describe_cache()}", file=sys.stderr)
    return session


def format_bytes(count: int) -> str:
    """Decimal units, as Activity Monitor counts."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} bytes"
