"""The settings of a run, and the plan of its memory."""

from dataclasses import dataclass, fields
from typing import Any

from kvant.cache.kv_format import PMX
from kvant.cache.options import DEFAULT_OPTIONS, CacheOptions
from kvant.cache.pages import PAGE_SIZE, pages_for
from kvant.engine.request import PREFILL_STEP_SIZE
from kvant.plan.bridged import BridgedCheckpoint
from kvant.plan.stored import Checkpoint

AnyCheckpoint = Checkpoint | BridgedCheckpoint


@dataclass(frozen=True, slots=True)
class DraftModel:
    checkpoint: AnyCheckpoint
    # as in :func:`kvant.plan.plan`; None: unknown
    split_pairs: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Settings:
    """The user's settings of a run, named like the flags."""

    cache: CacheOptions = DEFAULT_OPTIONS
    prefill_step_size: int = PREFILL_STEP_SIZE  # prompt tokens fed at a time
    sequences: int | None = None  # of a pool, at once; None: a cache of one sequence
    # total tokens of the pool; None: max_kv_size for each sequence
    pool_tokens: int | None = None
    caches: int = 0  # of conversations, in addition to a pool
    # has its own cache, or a pool of as many sequences and tokens
    draft_model: DraftModel | None = None

    def in_pool(self, tokens: int) -> int:
        """Return the total tokens of a pool whose sequences have at most ``tokens``."""
        return self.pool_tokens or (self.sequences or 1) * page_rows(tokens)


DEFAULT_SETTINGS = Settings()


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory of a run in bytes."""

    max_kv_size: int  # tokens reserved in the cache; in a pool the most of one sequence
    settings: Settings
    cache: int  # quantized values, scales and bias tables of all layers; reserved before the first token
    scratch: int  # an upper bound of the additional memory of a prompt chunk or a decoding step
    state: int = 0  # of a bridged model's linear and convolution layers, allocated at the first prefill
    caches: int = 0  # of conversations' caches and their states, in addition to a pool
    # what one more sequence of max_kv_size tokens would add to a pool's cache
    sequence: int = 0
    draft_weights: int = 0
    draft_cache: int = 0  # of the draft model's cache or pool and states, at most its own context
    weights: int = 0  # in memory; what exists twice is counted twice
    weights_read: int = 0  # the weights that one token reads, with only a few experts
    loading: int = 0  # the peak while the weights are loaded, before there is a cache
    # interpreter, libraries, tokenizer, MLX's buffers for reuse; 0 if the GPU has its own memory
    process: int = 0

    @property
    def arrays(self) -> int:
        """Return an upper bound of ``mx.get_peak_memory`` after a run of the full context."""
        drafts = self.draft_weights + self.draft_cache
        return max(self.weights + self.cache + self.state + self.caches + drafts + self.scratch, self.loading)

    @property
    def total(self) -> int:
        return self.arrays + self.process


def page_rows(tokens: int) -> int:
    """Return the rows of the whole pages for this many tokens."""
    return pages_for(tokens) * PAGE_SIZE


def as_record(plan: MemoryPlan) -> dict[str, int]:
    """Return a plan's bytes and sums by name, without those of a missing pool or draft model."""
    left_out = {
        "max_kv_size",
        "settings",
        "caches",
        *(["sequence"] if plan.settings.sequences is None else []),
    }
    left_out |= {"draft_weights", "draft_cache"} if plan.settings.draft_model is None else set()
    names = [field.name for field in fields(plan) if field.name not in left_out]
    return {name: getattr(plan, name) for name in (*names, "arrays", "total")}


def settings_record(settings: Settings) -> dict[str, Any]:
    """Return the settings that are flags of ``kvant plan``, by name."""
    cache = settings.cache
    stored: dict[str, Any] = {
        "kv_bits": cache.kv_bits,
        "kv_group_size": cache.group_size,
        "kv_bias_split": cache.bias_split,
    }
    if cache.kv_format is not None or not cache.rotates:
        stored["kv_format"] = PMX if cache.kv_format is None else cache.kv_format.path
    fed = {"checkpoints": cache.checkpoints, "prefill_step_size": settings.prefill_step_size}
    return stored | fed | {"sequences": settings.sequences}
