"""The memory of a run before it begins: weights, cache, and scratch."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from kvant.engine.drafts import MOST
from kvant.engine.model_drafts import draft_format
from kvant.fields import MAX_SIZE
from kvant.machine import Device, Machine, default_device
from kvant.models import Decoder, LanguageModel
from kvant.plan.bridged import BridgedCheckpoint
from kvant.plan.decoder import FLOAT32, LOGITS_COPIES
from kvant.plan.memory import DEFAULT_SETTINGS, AnyCheckpoint, DraftModel, MemoryPlan, Settings
from kvant.plan.needs import needs

# Memory of the process without arrays, if it shares the arrays' memory: interpreter, libraries, MLX's buffers
# for reuse; and the bytes per token of a tokenizer while it is read. Measured, docs/measuring.md.
PROCESS_BYTES = 170_000_000
TOKENIZER_BYTES = 1_700
# With mlx-lm and its libraries: 300 MB for a tiny model, where a decoder takes 70.
BRIDGED_PROCESS_BYTES = 400_000_000
# MLX's ring touches two buffers of 8 MiB for each of the two neighbours when it starts (ring.cpp).
RING_BYTES = 4 * 8 * 2**20


@dataclass(frozen=True, slots=True)
class LongestContext:
    """The longest context that fits: tokens, 0 if none does, and its limit."""

    tokens: int
    ended_by: Literal["memory", "the model's context", "kvant's limit"]


def plan(
    checkpoint: AnyCheckpoint,
    *,
    max_kv_size: int,
    settings: Settings = DEFAULT_SETTINGS,
    device: Device | None = None,
    split_pairs: Sequence[int] | None = None,
) -> MemoryPlan:
    """Plan the memory of loading a model and running it until its cache is full.

    On a CPU everything is computed in float32, and the planned arrays were never below MLX's count in tests.
    A GPU computes in the checkpoint's dtype; its scratch has not been measured yet. The scratch of a bridged
    model is an estimate on both.

    Args:
        checkpoint: the model's facts, from :func:`kvant.plan.read_folder` or :func:`read_facts`.
        max_kv_size: tokens reserved in the cache; all of them are used.
        settings: of the run.
        device: "cpu" or "gpu"; default: MLX's default device.
        split_pairs: the rotary pairs of each layer whose key bias stays out of the cache, from
            :func:`split_pairs` of a loaded model; default: a guess of one in sixteen. It only matters for
            models with biased keys.

    Raises:
        ValueError: the model does not support the settings.
    """
    if max_kv_size < 1:
        raise ValueError(f"max_kv_size is {max_kv_size}; expected at least 1")
    return planner(checkpoint, settings, device, split_pairs)(max_kv_size)


def longest_context(
    checkpoint: AnyCheckpoint,
    machine: Machine,
    settings: Settings = DEFAULT_SETTINGS,
    split_pairs: Sequence[int] | None = None,
) -> LongestContext:
    """Return the longest context whose plan fits a machine; other arguments as in :func:`plan`."""
    planned = planner(checkpoint, settings, machine.device, split_pairs)
    limit = machine.limit_bytes
    return longest(checkpoint.config.max_position_embeddings, lambda tokens: planned(tokens).total <= limit)


def longest(own_context: int | None, fits: Callable[[int], bool]) -> LongestContext:
    """Return the most tokens that fit, at most the model's ``own_context``."""
    context = own_context or MAX_SIZE
    tokens = bisect_left(range(1, context + 1), True, key=lambda tokens: not fits(tokens))
    if tokens < context:
        return LongestContext(tokens, "memory")
    return LongestContext(tokens, "kvant's limit" if own_context is None else "the model's context")


def split_pairs(model: LanguageModel) -> list[int]:
    """Return how many rotary pairs' key bias stays out of the cache in each layer; empty if bridged."""
    if not isinstance(model, Decoder):
        return []
    biases = (layer.self_attn.qkv_bias for layer in model.layers)
    return [0 if bias is None else len(bias.pairs) for bias in biases]


def planner(
    checkpoint: AnyCheckpoint,
    settings: Settings,
    device: Device | None,
    split_pairs: Sequence[int] | None = None,
) -> Callable[[int], MemoryPlan]:
    """Return :func:`plan` as a function of reserved tokens, which computes everything else once."""
    on_cpu = (device or default_device()) == "cpu"
    run = needs(checkpoint, settings, on_cpu=on_cpu, split_pairs=split_pairs)
    loading = checkpoint.loading(on_cpu=on_cpu)
    weights_read = checkpoint.read_bytes(on_cpu=on_cpu)
    process = process_bytes(checkpoint) if on_cpu else 0
    draft = None if settings.draft_model is None else _draft_planner(settings.draft_model, settings, device)

    def planned(tokens: int) -> MemoryPlan:
        made = replace(
            run(tokens),
            weights=loading.resident,
            weights_read=weights_read,
            loading=loading.peak,
            process=process,
        )
        return made if draft is None else _with_draft(made, draft(tokens), checkpoint)

    return planned


def _draft_planner(
    draft: DraftModel, settings: Settings, device: Device | None
) -> Callable[[int], MemoryPlan]:
    """Return a draft model's own plan as a function of the main model's reserved tokens."""
    config = draft.checkpoint.config
    chosen = Settings(draft_format(config, settings.cache), settings.prefill_step_size, settings.sequences)
    planned = planner(draft.checkpoint, chosen, device, draft.split_pairs)
    return lambda tokens: planned(min(tokens, config.max_position_embeddings or tokens))


def _with_draft(made: MemoryPlan, draft: MemoryPlan, checkpoint: AnyCheckpoint) -> MemoryPlan:
    """Add a draft model to a plan. The two compute alternately, while sampled logits stay in memory."""
    rows = (
        (MOST + 1) * LOGITS_COPIES * FLOAT32 * checkpoint.config.vocab_size * (made.settings.sequences or 1)
    )
    return replace(
        made,
        scratch=max(made.scratch, draft.scratch) + rows,
        loading=max(made.loading, made.weights + draft.loading),
        process=max(made.process, draft.process),
        draft_weights=draft.weights,
        draft_cache=draft.cache + draft.state,
    )


def process_bytes(checkpoint: AnyCheckpoint) -> int:
    """Return the process's bytes without MLX's arrays. Of several ranks only the first has a tokenizer."""
    shard = checkpoint.shard
    libraries = BRIDGED_PROCESS_BYTES if isinstance(checkpoint, BridgedCheckpoint) else PROCESS_BYTES
    tokenizer = TOKENIZER_BYTES * checkpoint.config.vocab_size if shard is None or shard.rank == 0 else 0
    return libraries + tokenizer + (0 if shard is None else RING_BYTES)
