"""How much memory a run takes, before it begins: weights, cache, and what a prompt's chunks need beside
them.
"""

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

# What the process takes beside the arrays if it comes out of the same memory: interpreter, libraries, MLX's
# buffers for reuse; and while it is read, a tokenizer for each of its tokens. Measured, docs/measuring.md.
PROCESS_BYTES = 170_000_000
TOKENIZER_BYTES = 1_700
# With mlx-lm and the libraries that it imports: 300 MB with a tiny model, where a decoder takes 70.
BRIDGED_PROCESS_BYTES = 400_000_000
# MLX's ring has two buffers of 8 MiB for each of the two neighbours, filled with zeros when it begins
# (ring.cpp).
RING_BYTES = 4 * 8 * 2**20


@dataclass(frozen=True, slots=True)
class LongestContext:
    """The longest context that fits: tokens, 0 if none does, and what ends it."""

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
    """The memory of loading a model and running it until its cache is full; a ValueError for settings it
    cannot have.

    On a CPU everything is computed in float32, and the arrays are never fewer bytes than MLX counted in
    tests. A GPU computes in the checkpoint's dtype; nobody has measured its scratch yet. The scratch of a
    bridged model is an estimate on both.

    Args:
        checkpoint: what is known of the model: :func:`kvant.plan.read_folder` or :func:`read_facts`.
        max_kv_size: tokens reserved in the cache; all of them are used.
        settings: of the run.
        device: "cpu" or "gpu"; default: what MLX computes on here.
        split_pairs: of each layer, the rotary pairs whose key bias stays out of the cache,
            :func:`split_pairs` of a loaded model; default: one in sixteen, a guess. It only matters for
            models with biased keys.
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
    """The tokens whose plan fits into a machine if one more doesn't; other arguments as those of
    :func:`plan`.
    """
    planned, limit = planner(checkpoint, settings, machine.device, split_pairs), machine.limit_bytes
    return longest(checkpoint.config.max_position_embeddings, lambda tokens: planned(tokens).total <= limit)


def longest(own_context: int | None, fits: Callable[[int], bool]) -> LongestContext:
    """The tokens that fit if one more doesn't, or the model has no more; ``own_context``: of the model."""
    context = own_context or MAX_SIZE
    tokens = bisect_left(range(1, context + 1), True, key=lambda tokens: not fits(tokens))
    if tokens < context:
        return LongestContext(tokens, "memory")
    return LongestContext(tokens, "kvant's limit" if own_context is None else "the model's context")


def split_pairs(model: LanguageModel) -> list[int]:
    """Of each layer of a loaded model, the rotary pairs whose key bias stays out of the cache; empty if
    bridged.
    """
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
    """:func:`plan` by tokens reserved; what does not depend on them is added up once."""
    on_cpu = (device or default_device()) == "cpu"
    run = needs(checkpoint, settings, on_cpu=on_cpu, split_pairs=split_pairs)
    loading, weights_read = checkpoint.loading(on_cpu=on_cpu), checkpoint.read_bytes(on_cpu=on_cpu)
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
    """The plan of a draft model alone, by the tokens reserved for the model that it drafts for."""
    config = draft.checkpoint.config
    chosen = Settings(draft_format(config, settings.cache), settings.prefill_step_size, settings.sequences)
    planned = planner(draft.checkpoint, chosen, device, draft.split_pairs)
    return lambda tokens: planned(min(tokens, config.max_position_embeddings or tokens))


def _with_draft(made: MemoryPlan, draft: MemoryPlan, checkpoint: AnyCheckpoint) -> MemoryPlan:
    """A plan with a draft model beside. The two compute in turns; what the larger step sampled is held
    meanwhile.
    """
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
    """What the process takes beside MLX's arrays. Of several ranks the first alone has a tokenizer."""
    part = checkpoint.part
    own = BRIDGED_PROCESS_BYTES if isinstance(checkpoint, BridgedCheckpoint) else PROCESS_BYTES
    tokenizer = TOKENIZER_BYTES * checkpoint.config.vocab_size if part is None or part.rank == 0 else 0
    return own + tokenizer + (0 if part is None else RING_BYTES)
