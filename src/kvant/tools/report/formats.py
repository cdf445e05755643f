"""Cache formats: their names in the report, which ones fit a model, and their caches."""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from kvant.cache import ModelCache
from kvant.cache.kv_format import PMX
from kvant.cache.options import CacheOptions
from kvant.cache.pool import single_sizes
from kvant.models import Decoder, LanguageModel
from kvant.operators.packing import PACKINGS

_BITS = [str(bits) for bits in PACKINGS]
NOTATION = (
    f"0, or BITSgGROUP with {' or '.join(_BITS)} bits, such as 8g32, 4g64:nosplit, 4g32:pmx, 4g32:notail "
    f"or 8g32:tail"
)
DEFAULT_BITS = (8, 4)
DEFAULT_GROUPS = (32, 64)
MANY = 2**24  # tokens; more than any window has

_PATTERN = re.compile(
    rf"(?P<bits>{'|'.join(_BITS)})g(?P<group>\d{{1,6}})"
    r"(?P<whole>:nosplit)?(?P<pmx>:pmx)?(?P<tail>:tail|:notail)?"
)
TAILS = {None: None, ":tail": True, ":notail": False}  # suffix -> ``tail`` of CacheOptions


class Format(Protocol):
    """How a cache stores tokens."""

    @property
    def label(self) -> str: ...

    @property
    def flags(self) -> str:
        """The command-line flags that select it."""

    @property
    def kv_bits(self) -> int | None:
        """None if unknown."""

    @property
    def kv_group_size(self) -> int | None: ...

    @property
    def bias_split(self) -> bool: ...


class CacheFormat(CacheOptions):
    """Cache options with their name in the report."""

    @property
    def label(self) -> str:
        """The format as ``--formats`` names it: 8g32, 4g32:nosplit, 4g32:pmx, 0, or its file's name."""
        if self.kv_format is not None:
            return Path(self.kv_format.path).name or "tuned"
        whole = "" if self.bias_split else ":nosplit"
        pmx = "" if self.rotates else f":{PMX}"
        tail = "" if self.tail is None else ":tail" if self.tail else ":notail"
        return f"{self.kv_bits}g{self.kv_group_size}{whole}{pmx}{tail}" if self.kv_bits else "0"

    @property
    def flags(self) -> str:
        """The flags of ``kvant generate`` and ``kvant chat`` that select it."""
        if self.kv_format is not None:
            return f"--kv-format {self.kv_format.path}"
        if not self.kv_bits:
            return "--kv-bits 0"
        whole = "" if self.bias_split else " --no-kv-bias-split"
        pmx = "" if self.rotates else f" --kv-format {PMX}"
        tail = "" if self.tail is None else " --kv-tail" if self.tail else " --no-kv-tail"
        return f"--kv-bits {self.kv_bits} --kv-group-size {self.kv_group_size}{whole}{pmx}{tail}"

    def make_cache(self, model: LanguageModel, max_seq_len: int) -> ModelCache:
        return model.reserve_cache(max_seq_len, self)

    def marginal_bytes(self, model: LanguageModel) -> int:
        """Return the bytes that each further token takes in all layers, without any fixed size."""
        if isinstance(model, Decoder):
            one, two = (self.make_cache(model, tokens).nbytes for tokens in (1, 2))
            return two - one
        from kvant.bridge.model import BridgedModel  # already imported, since the model is mlx-lm's
        from kvant.bridge.pool import pool_needs

        assert isinstance(model, BridgedModel)
        one, two = (pool_needs(model.entries, single_sizes(MANY + more), self).keys_values for more in (0, 1))
        return two - one


# Every format is compared with this one: keys and values as the model computes them, in the compute dtype.
REFERENCE = CacheFormat(0, bias_split=False)


def parse_formats(text: str) -> list[CacheFormat]:
    """Parse distinct formats separated by commas."""
    formats: list[CacheFormat] = []
    for item in text.split(","):
        name = item.strip()
        match = _PATTERN.fullmatch(name)
        if name == "0":
            parsed = REFERENCE
        elif match:
            bits = int(match["bits"])
            split = match["whole"] is None
            rotates = match["pmx"] is None
            parsed = CacheFormat(bits, int(match["group"]), split, rotates=rotates, tail=TAILS[match["tail"]])
        else:
            raise ValueError(f"format {name[:40]!r} is unknown; expected {NOTATION}")
        if parsed in formats:
            raise ValueError(f"format {parsed.label} is there twice")
        formats.append(parsed)
    return formats


def check_formats(formats: Sequence[CacheFormat], model: LanguageModel) -> None:
    """Raise a ValueError that names the first format that does not fit the model."""
    # a bridged model's heads may differ; its cache reduces the group size to fit each of them
    for candidate in formats:
        head_dim = model.config.head_dim if isinstance(model, Decoder) else candidate.group_size
        try:
            candidate.check_head(head_dim)
        except ValueError as error:
            raise ValueError(f"format {candidate.label}: {error}") from error
        if candidate.kv_format is not None:
            candidate.make_cache(model, 1)  # raises if the format belongs to another model
        if candidate.kv_bits and not candidate.bias_split and not has_bias(model):
            raise ValueError(
                f"format {candidate.label}: the model's keys and values have no bias to split off"
            )


def default_formats(model: LanguageModel) -> list[CacheFormat]:
    """Return 8 and 4 bits in groups of 32 and 64 or one that fits, with and without a possible bias split."""
    if not isinstance(model, Decoder):
        formats = [CacheFormat(bits, group) for bits in DEFAULT_BITS for group in DEFAULT_GROUPS]
        # Groups are reduced to divide each width; of formats that then use equal bytes, measure one.
        distinct = {candidate.marginal_bytes(model): candidate for candidate in reversed(formats)}
        return list(distinct.values())[::-1]
    head_dim = model.config.head_dim
    groups = [group for group in DEFAULT_GROUPS if head_dim % group == 0] or [
        math.gcd(DEFAULT_GROUPS[0], head_dim)
    ]
    splits = (True, False) if has_bias(model) else (True,)
    return [CacheFormat(bits, group, split) for bits in DEFAULT_BITS for group in groups for split in splits]


def has_bias(model: LanguageModel) -> bool:
    """Whether keys and values have biases that can be stored outside the cache."""
    return isinstance(model, Decoder) and any(layer.self_attn.qkv_bias is not None for layer in model.layers)
