"""Read text through mlx-lm's quantized caches with mlx-lm's own model."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from kvant.errors import KvantError
from kvant.models import Decoder, LanguageModel
from kvant.tools.mlx_lm_model import load_mlx_lm
from kvant.tools.report.formats import Format
from kvant.tools.report.runs import STEP_SIZE, Reader, logits_at_once

MLX_LM = "mlx-lm"


@dataclass(frozen=True, slots=True)
class MlxLmFormat:
    """A format of mlx-lm's cache: affine, a scale and a bias per group. 0 bits: the compute dtype."""

    kv_bits: int
    kv_group_size: int

    @property
    def label(self) -> str:
        return f"{MLX_LM}:{self.kv_bits}g{self.kv_group_size}" if self.kv_bits else f"{MLX_LM}:0"

    @property
    def bias_split(self) -> bool:
        return False

    @property
    def flags(self) -> str:
        """The flags of ``mlx_lm.generate`` that select it."""
        bits = f"--kv-bits {self.kv_bits} --kv-group-size {self.kv_group_size} --quantized-kv-start 0"
        return bits if self.kv_bits else ""


MLX_LM_FORMATS = (MlxLmFormat(0, 0), *(MlxLmFormat(bits, group) for bits in (8, 4) for group in (32, 64)))


class FloatReads:
    """Make a quantized cache of mlx-lm return all its tokens as floats.

    mlx-lm then uses its float attention: on a CPU its attention over packed tokens takes an hour for 8,192
    tokens of a small model. Tokens are stored and rounded as in mlx-lm.
    """

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    @property
    def offset(self) -> int:
        return int(self.cache.offset)

    def make_mask(self, *arguments: Any, **options: Any) -> Any:
        return self.cache.make_mask(*arguments, **options)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, ...]:
        group = self.cache.group_size
        bits = self.cache.bits
        return tuple(
            mx.dequantize(packed, scales, biases, group_size=group, bits=bits)
            for packed, scales, biases in self.cache.update_and_fetch(keys, values)
        )


class MlxLmReader:
    """mlx-lm's model with a cache in one format."""

    def __init__(self, module: Any, vocab_size: int, cache_format: MlxLmFormat, reserved: int) -> None:
        self.vocab_size = vocab_size
        self.step_size = min(STEP_SIZE, logits_at_once(vocab_size))
        self._module = module
        self._format = cache_format
        self._reserved = reserved
        self.begin(0)

    def begin(self, piece: int) -> None:
        from mlx_lm.models.cache import KVCache, make_prompt_cache

        caches: list[Any] = make_prompt_cache(self._module)
        others = {type(cache).__name__ for cache in caches if type(cache) is not KVCache}
        if others:
            raise KvantError(
                f"mlx-lm does not quantize {', '.join(sorted(others))}, which layers of this model have; "
                f"leave out --compare {MLX_LM}"
            )
        if self._format.kv_bits:
            group = self._format.kv_group_size
            bits = self._format.kv_bits
            caches = [cache.to_quantized(group_size=group, bits=bits) for cache in caches]
        self._stored = caches
        self._read = [FloatReads(cache) for cache in caches] if self._format.kv_bits else caches

    def read(self, ids: Sequence[int]) -> mx.array:
        logits: mx.array = self._module(mx.array([list(ids)]), cache=self._read)[0]
        mx.eval(logits)
        return logits

    def logits(self, states: mx.array) -> mx.array:
        return states

    @property
    def nbytes(self) -> int:
        """Bytes for the reserved tokens; mlx-lm's cache grows by 256 tokens at a time.

        Scales and biases count as 16 bits, their size in a half-precision model.
        """
        total = 0
        for cache in self._stored:
            for stored in (cache.keys, cache.values):
                packed, *scales = stored if isinstance(stored, tuple) else (stored,)
                size = packed.nbytes + sum(2 * scale.size for scale in scales)
                total += math.ceil(self._reserved / cache.step) * cache.step * size // packed.shape[2]
        return total


def mlx_lm_readers(folder: Path, model: LanguageModel, reserved: int) -> dict[Format, Reader]:
    """Load the folder's model once for all formats whose groups divide a head.

    On a CPU its quantized weights are dequantized to floats, as kvant stores them: with packed weights mlx-lm
    takes 70 times as long.
    """
    module, _ = load_mlx_lm(folder, model.dtype)
    if mx.default_device().type == mx.cpu:
        from mlx_lm.utils import dequantize_model

        mx.eval(dequantize_model(module).parameters())
    width = model.config.head_dim if isinstance(model, Decoder) else 0
    return {
        each: MlxLmReader(module, model.config.vocab_size, each, reserved)
        for each in MLX_LM_FORMATS
        if not each.kv_bits or width % each.kv_group_size == 0
    }
