"""How much memory a run takes, before it begins: weights, cache, and what a prompt's chunks need beside them."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal

import mlx.core as mx

from kvant.cache.pages import PAGE_SIZE, pages_for
from kvant.cache.window import SLACK
from kvant.engine.drafted_run import LARGEST_STEP
from kvant.engine.model_drafts import draft_format
from kvant.engine.run import PREFILL_STEP_SIZE
from kvant.fields import MAX_SIZE
from kvant.machine import Device, default_device
from kvant.models import Decoder, LanguageModel
from kvant.models.caches import pool_size
from kvant.models.config import ModelConfig
from kvant.operators.quantization import check_quantization
from kvant.tools.plan.bridged import BridgedCheckpoint
from kvant.tools.plan.scratch import FLOAT32, scratch_bytes
from kvant.tools.plan.stored import Checkpoint

SCALE_BYTES = 2  # float16
# What the process takes beside the arrays where it comes out of the same memory: interpreter, libraries, MLX's buffers
# for reuse; and while it is read, a tokenizer for each of its tokens. Measured, docs/memory-plan.md.
PROCESS_BYTES = 170_000_000
TOKENIZER_BYTES = 1_700
# With mlx-lm and the libraries that it imports: 300 MB with a tiny model, where a decoder takes 70.
BRIDGED_PROCESS_BYTES = 400_000_000
# MLX's ring has two buffers of 8 MiB for each of the two neighbours, filled with zeros when it begins (ring.cpp).
RING_BYTES = 4 * 8 * 2**20
# Copies of the logits in sampling: float32, log-probabilities and what they are made from.
LOGITS_COPIES = 5
# Where ranks have a part of each logit row: padded to one width, gathered, put into one row.
GATHERED_COPIES = 3
# Of the stream, what comes from another rank and what goes to one; or the sums of a layer's two products.
SENT_COPIES = 2
# Rotary pairs a layer whose key bias stays out of the cache, where the weights that decide it were not read: 1 in 16.
GUESSED_PAIRS = 1 / 16


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A model that drafts for another one.

    Attributes:
        checkpoint: what is known of it.
        split_pairs: as in :func:`plan`, of its layers; None: they were not read.
    """

    checkpoint: Checkpoint | BridgedCheckpoint
    split_pairs: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user chooses of a run; as the flags of the same names.

    Attributes:
        kv_bits: 8, 4, or 0 for a cache in the compute dtype.
        kv_group_size: elements of a head that share one scale; without meaning at 0 bits.
        kv_bias_split: the projections' biases stay out of the cache.
        prefill_step_size: prompt tokens fed at a time.
        sequences: of a pool, at once; None: a cache of one sequence.
        pool_tokens: that the pool is reserved for in all; None: each sequence has max_kv_size of them.
        caches: of conversations that are held beside a pool.
        draft_model: what drafts, with a cache of its own, or a pool of as many sequences, each of as many tokens; None:
            no model does.
    """

    kv_bits: int = 8
    kv_group_size: int = 32
    kv_bias_split: bool = True
    prefill_step_size: int = PREFILL_STEP_SIZE
    sequences: int | None = None
    pool_tokens: int | None = None
    caches: int = 0
    draft_model: DraftModel | None = None


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory of a run in bytes.

    Attributes:
        max_kv_size: tokens reserved in the cache; in a pool the most that one sequence has.
        settings: of the run.
        weights: as they are held, whatever is held twice counted twice.
        weights_read: the part of them that one token reads: of the experts a few.
        cache: quantized values, scales and bias tables of all layers; reserved before the first token.
        scratch: an upper bound of what a chunk of the prompt, or a step of decoding, takes beside them.
        loading: the most while the weights are loaded, before there is a cache.
        state: of a bridged model's linear and convolution layers, which mlx-lm allocates at the first prefill.
        process: interpreter, libraries, tokenizer and MLX's buffers for reuse; 0 where it isn't the GPU's memory.
        caches: of conversations' caches and their states, beside a pool.
        sequence: of a pool, the part of the cache that one more sequence of max_kv_size tokens would add.
        draft_weights: of a draft model.
        draft_cache: of its cache or pool, and states; a sequence has at most its own context.
    """

    max_kv_size: int
    settings: Settings
    weights: int
    weights_read: int
    cache: int
    scratch: int
    loading: int
    process: int
    state: int = 0
    caches: int = 0
    sequence: int = 0
    draft_weights: int = 0
    draft_cache: int = 0

    @property
    def arrays(self) -> int:
        """An upper bound of what ``mx.get_peak_memory`` says after a run of the full context."""
        drafts = self.draft_weights + self.draft_cache
        return max(self.weights + self.cache + self.state + self.caches + drafts + self.scratch, self.loading)

    @property
    def total(self) -> int:
        """All of it."""
        return self.arrays + self.process


@dataclass(frozen=True, slots=True)
class LongestContext:
    """The longest context that fits: tokens, 0 where none does, and what ends it."""

    tokens: int
    ended_by: Literal["memory", "the model's context", "kvant's limit"]


def plan(
    checkpoint: Checkpoint | BridgedCheckpoint,
    *,
    max_kv_size: int,
    settings: Settings | None = None,
    device: Device | None = None,
    split_pairs: Sequence[int] | None = None,
) -> MemoryPlan:
    """The memory of loading a model and running it until its cache is full.

    On a CPU everything is computed in float32, and the arrays are never fewer bytes than MLX counted in tests. A GPU
    computes in the checkpoint's dtype; nobody has measured its scratch yet. The scratch of a bridged model is an
    estimate on both.

    Args:
        checkpoint: what is known of the model: :func:`kvant.tools.plan.read_folder` or :func:`read_facts`.
        max_kv_size: tokens reserved in the cache; all of them are used.
        settings: of the run; default: those of ``kvant generate``.
        device: "cpu" or "gpu"; default: what MLX computes on here.
        split_pairs: of each layer, the rotary pairs whose key bias stays out of the cache, :func:`split_pairs` of a
            loaded model; default: one in sixteen, a guess. It only matters for models with biased keys.

    Raises:
        ValueError: a max_kv_size or prefill_step_size below 1, or a cache format the model cannot have.
    """
    settings = settings or Settings()
    if max_kv_size < 1:
        raise ValueError(f"max_kv_size is {max_kv_size}; expected at least 1")
    return planner(checkpoint, settings, device, split_pairs)(max_kv_size)


def longest_context(
    checkpoint: Checkpoint | BridgedCheckpoint,
    limit_bytes: int,
    *,
    settings: Settings | None = None,
    device: Device | None = None,
    split_pairs: Sequence[int] | None = None,
) -> LongestContext:
    """The tokens whose plan fits into ``limit_bytes`` where one more doesn't, or the model has no more.

    A longer context reads its prompt in more and smaller blocks, so that a little past the end one may fit again.
    Other arguments as those of :func:`plan`.
    """
    planned = planner(checkpoint, settings or Settings(), device, split_pairs)
    return longest(checkpoint.config.max_position_embeddings, lambda tokens: planned(tokens).total <= limit_bytes)


def longest(own_context: int | None, fits: Callable[[int], bool]) -> LongestContext:
    """The tokens that fit where one more doesn't, or the model has no more; ``own_context``: of the model."""
    context = own_context or MAX_SIZE
    if fits(context):
        return LongestContext(context, "kvant's limit" if own_context is None else "the model's context")
    below, above = 0, context  # what fits, and what doesn't
    while above - below > 1:
        middle = (below + above) // 2
        if fits(middle):
            below = middle
        else:
            above = middle
    return LongestContext(below, "memory")


def split_pairs(model: LanguageModel) -> list[int]:
    """Of each layer of a loaded model, the rotary pairs whose key bias stays out of the cache; empty if bridged."""
    if not isinstance(model, Decoder):
        return []
    biases = (layer.self_attn.qkv_bias for layer in model.layers)
    return [0 if bias is None else len(bias.pairs) for bias in biases]


@dataclass(frozen=True, slots=True)
class RunBytes:
    """What a run takes beside the weights; as the attributes of :class:`MemoryPlan`."""

    cache: int
    scratch: int
    state: int = 0
    caches: int = 0
    sequence: int = 0

    @property
    def total(self) -> int:
        """All that is there at once."""
        return self.cache + self.scratch + self.state + self.caches


Run = Callable[[int], RunBytes]  # by tokens reserved, all of them used


def planner(
    checkpoint: Checkpoint | BridgedCheckpoint,
    settings: Settings,
    device: Device | None,
    split_pairs: Sequence[int] | None = None,
) -> Callable[[int], MemoryPlan]:
    """:func:`plan` by tokens reserved; what does not depend on them is added up once."""
    on_cpu = (device or default_device()) == "cpu"
    run = run_bytes(checkpoint, settings, on_cpu=on_cpu, split_pairs=split_pairs)
    loading, weights_read = checkpoint.loading(on_cpu=on_cpu), checkpoint.read_bytes(on_cpu=on_cpu)
    process = process_bytes(checkpoint) if on_cpu else 0
    draft = None if settings.draft_model is None else _draft_planner(settings.draft_model, settings, device)

    def planned(tokens: int) -> MemoryPlan:
        needed = run(tokens)
        made = MemoryPlan(
            max_kv_size=tokens,
            settings=settings,
            weights=loading.held,
            weights_read=weights_read,
            cache=needed.cache,
            scratch=needed.scratch,
            loading=loading.peak,
            process=process,
            state=needed.state,
            caches=needed.caches,
            sequence=needed.sequence,
        )
        return made if draft is None else _with_draft(made, draft(tokens), checkpoint)

    return planned


def _draft_planner(draft: DraftModel, settings: Settings, device: Device | None) -> Callable[[int], MemoryPlan]:
    """The plan of a draft model alone, by the tokens reserved for the model that it drafts for."""
    config = draft.checkpoint.config
    bits, group = draft_format(config, settings.kv_bits, settings.kv_group_size)
    chosen = Settings(bits, group, settings.kv_bias_split, settings.prefill_step_size, settings.sequences)
    planned = planner(draft.checkpoint, chosen, device, draft.split_pairs)
    return lambda tokens: planned(min(tokens, config.max_position_embeddings or tokens))


def _with_draft(made: MemoryPlan, draft: MemoryPlan, checkpoint: Checkpoint | BridgedCheckpoint) -> MemoryPlan:
    """A plan with a draft model beside. The two compute in turns; what the larger step sampled is held meanwhile."""
    rows = LARGEST_STEP * LOGITS_COPIES * FLOAT32 * checkpoint.config.vocab_size * (made.settings.sequences or 1)
    return replace(
        made,
        scratch=max(made.scratch, draft.scratch) + rows,
        loading=max(made.loading, made.weights + draft.loading),
        process=max(made.process, draft.process),
        draft_weights=draft.weights,
        draft_cache=draft.cache + draft.state,
    )


def process_bytes(checkpoint: Checkpoint | BridgedCheckpoint) -> int:
    """What the process takes beside MLX's arrays. Of several ranks the first alone has a tokenizer."""
    part = checkpoint.part
    own = BRIDGED_PROCESS_BYTES if isinstance(checkpoint, BridgedCheckpoint) else PROCESS_BYTES
    tokenizer = TOKENIZER_BYTES * checkpoint.config.vocab_size if part is None or part.rank == 0 else 0
    return own + tokenizer + (0 if part is None else RING_BYTES)


def run_bytes(
    checkpoint: Checkpoint | BridgedCheckpoint,
    settings: Settings,
    *,
    on_cpu: bool,
    split_pairs: Sequence[int] | None = None,
) -> Run:
    """What a run takes beside the weights, by tokens reserved; arguments and errors as :func:`plan` has them."""
    if isinstance(checkpoint, BridgedCheckpoint):
        return _bridged_run(checkpoint, settings, on_cpu)
    config, part = checkpoint.config, checkpoint.part
    check_quantization(settings.kv_bits, settings.kv_group_size, config.head_dim)
    if settings.prefill_step_size < 1:
        raise ValueError(f"prefill_step_size is {settings.prefill_step_size}; expected at least 1")
    itemsize = checkpoint.itemsize(on_cpu=on_cpu)
    dtype = mx.float32 if itemsize == FLOAT32 else mx.bfloat16  # or float16, of as many bytes
    pairs = _pairs(config, settings, split_pairs)
    widest = max(pairs) if pairs else None
    row = _row_bytes(config, settings, itemsize)
    logits = _logits_bytes(checkpoint)

    def needed(tokens: int) -> RunBytes:
        def chunk(new: int, tokens: int = tokens, sequences: int | None = None) -> int:
            """The layers take turns; only what windows put off until a step is committed is there at once."""
            waiting = sum(window is not None and window < tokens for window in config.windows) * new * row
            sent = 0 if part is None else SENT_COPIES * config.hidden_size * itemsize * new * (sequences or 1)
            return (
                sent
                + waiting * (sequences is None)
                + max(
                    scratch_bytes(
                        config,
                        itemsize=itemsize,
                        on_cpu=on_cpu,
                        kv_bits=settings.kv_bits,
                        kv_group_size=settings.kv_group_size,
                        pairs=widest,
                        adapted=checkpoint.adapter_bytes > 0 and config.quantization is not None,
                        new=new,
                        tokens=tokens,
                        window=window,
                        sequences=sequences,
                    )
                    for window in {*config.windows}
                )
            )

        prefill = min(settings.prefill_step_size, tokens)
        caches = settings.caches * _cache_bytes(config, tokens, row, pairs)
        if (count := settings.sequences) is None:
            scratch = max(chunk(prefill), chunk(1) + logits)
            return RunBytes(_cache_bytes(config, tokens, row, pairs), scratch, caches=caches)
        in_all = pool_tokens(settings, tokens)
        cache, more = (
            _pool_bytes(config, settings, dtype, pairs, tokens, in_all + further * page_rows(tokens), count + further)
            for further in (0, 1)
        )
        each = min(tokens, -(-in_all // count))  # of the sequences of a step, on average
        scratch = max(chunk(prefill, tokens, 1), chunk(1, each, count) + count * logits)
        return RunBytes(cache, scratch, caches=caches, sequence=more - cache)

    return needed


def _bridged_run(checkpoint: BridgedCheckpoint, settings: Settings, on_cpu: bool) -> Run:
    needs = checkpoint.needs(
        kv_bits=settings.kv_bits,
        kv_group_size=settings.kv_group_size,
        prefill_step_size=settings.prefill_step_size,
        on_cpu=on_cpu,
        sequences=settings.sequences,
        pool_tokens=partial(pool_tokens, settings),
    )

    def needed(tokens: int) -> RunBytes:
        own = needs(tokens)
        return RunBytes(own.cache, own.scratch, own.state, settings.caches * own.one_cache, own.sequence)

    return needed


def _logits_bytes(checkpoint: Checkpoint) -> int:
    """Of a sequence in the making: what sampling takes, where it is done, and gathering where ranks divide the head."""
    part, row = checkpoint.part, FLOAT32 * checkpoint.config.vocab_size
    sampled = LOGITS_COPIES * row if part is None or part.rank == 0 else 0
    return sampled + (GATHERED_COPIES * row if part is not None and part.divided and not checkpoint.tied else 0)


def _pairs(config: ModelConfig, settings: Settings, known: Sequence[int] | None) -> list[int] | None:
    """The pairs that each layer splits off; None: there is no bias to split off, or it is to stay in."""
    if not config.attention_bias or not settings.kv_bias_split:
        return None
    if known is None:
        return [max(1, round(config.head_dim / 2 * GUESSED_PAIRS))] * config.num_hidden_layers
    return list(known)


def _row_bytes(config: ModelConfig, settings: Settings, itemsize: int) -> int:
    """Bytes of a token's keys and values in one layer's cache."""
    K, D, bits = config.num_key_value_heads, config.head_dim, settings.kv_bits
    return 2 * K * (D * bits // 8 + D // settings.kv_group_size * SCALE_BYTES if bits else D * itemsize)


def _cache_bytes(config: ModelConfig, tokens: int, row: int, pairs: Sequence[int] | None) -> int:
    """Bytes of what the caches of :mod:`kvant.cache` allocate for every layer."""
    K, D = config.num_key_value_heads, config.head_dim
    total = 0
    for (window, split), count in _kinds(config, pairs).items():
        rows = tokens if window is None or window >= tokens else min(tokens, window + SLACK)
        total += count * row * rows
        if split is not None:  # keys' bias, cosines and sines, values' bias
            total += count * FLOAT32 * (K * 2 * split + 2 * split * rows + K * D)
    return total


def _kinds(config: ModelConfig, pairs: Sequence[int] | None) -> Counter[tuple[int | None, int | None]]:
    """Layers by their window and the pairs that they split off: those that are alike take alike."""
    splits: Sequence[int | None] = [None] * len(config.windows) if pairs is None else pairs
    return Counter(zip(config.windows, splits, strict=True))


def page_rows(tokens: int) -> int:
    """Rows of the whole pages that so many tokens take."""
    return pages_for(tokens) * PAGE_SIZE


def pool_tokens(settings: Settings, tokens: int) -> int:
    """Tokens that a pool is reserved for in all, where a sequence has ``tokens`` at most."""
    return settings.pool_tokens or (settings.sequences or 1) * page_rows(tokens)


def _pool_bytes(
    config: ModelConfig,
    settings: Settings,
    dtype: mx.Dtype,
    pairs: Sequence[int] | None,
    tokens: int,
    in_all: int,
    sequences: int,
) -> int:
    """Bytes of what ``model.make_pool`` allocates for sequences of ``tokens`` at most and ``in_all`` together."""
    return sum(
        count
        * pool_size(
            replace(config, num_hidden_layers=1, windows=(window,)),
            tokens=in_all,
            sequences=sequences,
            dtype=dtype,
            quant_bit=settings.kv_bits,
            quant_group=settings.kv_group_size,
            max_seq_len=tokens,
            prefill_step_size=settings.prefill_step_size,
            split_pairs=None if split is None else [split],
        )
        for (window, split), count in _kinds(config, pairs).items()
    )


def as_record(plan: MemoryPlan) -> dict[str, int]:
    """A plan's bytes by name, with the sums; "sequence" of a pool alone, and so with a draft model's."""
    left_out = {"max_kv_size", "settings", "caches", *(["sequence"] if plan.settings.sequences is None else [])}
    left_out |= {"draft_weights", "draft_cache"} if plan.settings.draft_model is None else set()
    names = [field.name for field in fields(plan) if field.name not in left_out]
    return {name: getattr(plan, name) for name in (*names, "arrays", "total")}


def settings_record(settings: Settings) -> dict[str, Any]:
    """The settings that are flags of ``kvant plan``, by name."""
    left_out = ("pool_tokens", "caches", "draft_model")
    return {field.name: getattr(settings, field.name) for field in fields(settings) if field.name not in left_out}
