"""What is planned: the settings of a run, and its memory."""

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
    # as in :func:`kvant.plan.plan`; None: they were not read
    split_pairs: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user chooses of a run; as the flags of the same names."""

    cache: CacheOptions = DEFAULT_OPTIONS
    prefill_step_size: int = PREFILL_STEP_SIZE  # prompt tokens fed at a time
    sequences: int | None = None  # of a pool, at once; None: a cache of one sequence
    # that the pool is reserved for in all; None: max_kv_size for each sequence
    pool_tokens: int | None = None
    caches: int = 0  # of conversations that are held beside a pool
    # with a cache of its own, or a pool of as many sequences and tokens
    draft_model: DraftModel | None = None

    def in_pool(self, tokens: int) -> int:
        """Tokens that a pool is reserved for in all, if a sequence has ``tokens`` at most."""
        return self.pool_tokens or (self.sequences or 1) * page_rows(tokens)


DEFAULT_SETTINGS = Settings()


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory of a run in bytes."""

    max_kv_size: int  # tokens reserved in the cache; in a pool the most that one sequence has
    settings: Settings
    cache: int  # quantized values, scales and bias tables of all layers; reserved before the first token
    scratch: int  # an upper bound of what a chunk of the prompt, or a step of decoding, takes beside them
    state: int = 0  # of a bridged model's linear and convolution layers, allocated at the first prefill
    caches: int = 0  # of conversations' caches and their states, beside a pool
    # of a pool, the part of the cache that one more sequence of max_kv_size tokens would add
    sequence: int = 0
    draft_weights: int = 0
    draft_cache: int = 0  # of its cache or pool, and states; a sequence has at most its own context
    weights: int = 0  # as they are held, whatever is held twice counted twice
    weights_read: int = 0  # the part of them that one token reads: of the experts a few
    loading: int = 0  # the most while the weights are loaded, before there is a cache
    # interpreter, libraries, tokenizer, MLX's buffers for reuse; 0 if it isn't the GPU's memory
    process: int = 0

    @property
    def arrays(self) -> int:
        """An upper bound of what ``mx.get_peak_memory`` says after a run of the full context."""
        drafts = self.draft_weights + self.draft_cache
        return max(self.weights + self.cache + self.state + self.caches + drafts + self.scratch, self.loading)

    @property
    def total(self) -> int:
        return self.arrays + self.process


def page_rows(tokens: int) -> int:
    """Rows of the whole pages that so many tokens take."""
    return pages_for(tokens) * PAGE_SIZE


def as_record(plan: MemoryPlan) -> dict[str, int]:
    """A plan's bytes by name, with the sums; "sequence" of a pool alone, and so with a draft model's."""
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
    """The settings that are flags of ``kvant plan``, by name."""
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
