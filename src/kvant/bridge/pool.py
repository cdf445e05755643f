"""What mlx-lm's models are given as their caches: a pool for many sequences of different lengths, or for
one alone.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, cast

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from kvant.bridge import hook
from kvant.bridge.architectures import ONE_AT_A_TIME
from kvant.bridge.layers import BridgedLayer, StepRows
from kvant.bridge.probe import Attention, Entry, Model, as_text, caches_of, leaves_of
from kvant.cache import ModelCache
from kvant.cache.kv_format import LayerChoice
from kvant.cache.layer_format import Arrays, LayerFormat, State, describe_formats
from kvant.cache.options import CacheOptions
from kvant.cache.pool import Pool, pool_bytes, single_rows
from kvant.cache.pool_batch import PoolBatch
from kvant.cache.pool_sequence import PoolSequence
from kvant.errors import ModelError
from kvant.models.caches import check_memory
from kvant.operators.key_transform import PLAIN, KeyTransform, can_rotate
from kvant.sizes import format_bytes

# tokens of the sequences that a model is tried with: none, fewer than a state looks back, and more
TRIED = (0, 1, 21)
TRIAL = {
    "tokens": len(TRIED) * Pool.page_size,
    "sequences": len(TRIED),
    "max_seq_len": 64,
    "prefill_step_size": 32,
}
# Logits of a sequence in a step with others and alone, as a part of the largest. Float32 differs by a
# millionth, half precision by a hundredth. A wrong position or a token of another sequence is far off.
AGREE, AGREE_HALF = 1e-3, 0.05


class CacheBytes(NamedTuple):
    """Bytes of a model's caches."""

    keys_values: int  # reserved when they are made
    state: int  # of linear and convolution layers, which mlx-lm allocates at the first prefill


class BridgedPool(Pool):
    """One reservation for the keys and values of many sequences; states are allocated by mlx-lm as they come.

    A model that attends in its own way is given padded rows: then it does not attend apart.
    """

    may_have_sinks = True

    def __init__(
        self,
        found: Sequence[Entry],
        formats: Sequence[LayerFormat],
        transforms: Sequence[KeyTransform],
        **options: Any,
    ) -> None:
        """``found``: by a probe of the model. ``formats``: of its layers that keep rows. ``options``: as
        Pool has.
        """
        super().__init__(formats, transforms, states=leaves_of(found, State), **options)
        self.entries, self.layout = tuple(found), as_text(found)
        layers = iter(self.layers)
        # States take all of a step, and several new tokens of several sequences were not tried.
        self.takes_back = self.single and not self.states
        leaves = leaves_of(found, Attention | State)
        self.saved = [leaf if isinstance(leaf, State) else next(layers) for leaf in leaves]

    def batch(self, sequences: Sequence[PoolSequence], rows: int | None = None) -> "BridgedBatch":
        return cast(BridgedBatch, super().batch(sequences, rows))

    def _new_batch(self, sequences: Sequence[PoolSequence], rows: int | None) -> "BridgedBatch":
        return BridgedBatch(self, sequences, rows)


class BridgedBatch(PoolBatch):
    """The cache of a model's step, of sequences of different lengths."""

    pool: BridgedPool

    def __init__(self, pool: BridgedPool, sequences: Sequence[PoolSequence], rows: int | None = None) -> None:
        super().__init__(pool, sequences, rows)
        self._entries: list[Any] = []
        self.views: list[BridgedLayer] = []  # of the layers that keep rows, in a step
        self._states: list[ArraysCache] = []

    @property
    def entries(self) -> list[Any]:
        """What mlx-lm's model takes as its cache in the step."""
        if self.step is None:
            raise RuntimeError("no step was begun; expected begin before the model is called")
        return self._entries

    @property
    def state(self) -> list[mx.array]:
        """Every array that the step changes: computed, the step is, whether its logits are or not."""
        rows = [array for layer in self.pool.layers for array in (*layer.arrays, *layer.exact_arrays)]
        states = [array for state in self._states for array in state.cache if array is not None]
        return [*rows, *self.deferred.arrays, *states]

    def begin(self, inputs: mx.array) -> tuple[int, ...]:
        lengths = super().begin(inputs)
        steps = {group: StepRows.of(self, group, inputs.shape[1]) for group in self.pool.groups}
        self.views = [
            BridgedLayer(self.deferred, group, layer, steps[group]) for group, layer in self.pool.places
        ]
        self._states = [
            self._stacked(each) for each in zip(*(own.states for own in self.sequences), strict=True)
        ]
        layers, states = iter(self.views), iter(self._states)
        self._entries = caches_of(
            self.pool.entries, lambda leaf: next(states if isinstance(leaf, State) else layers)
        )
        return lengths

    def commit(
        self, num_tokens: int | Sequence[int] | None = None, *, ids: Sequence[Sequence[int]] | None = None
    ) -> None:
        if self._states and self.step is not None:
            S = self.step.shape[1]
            each = (
                num_tokens if isinstance(num_tokens, Sequence) else [S if num_tokens is None else num_tokens]
            )
            if any(count != S for count in each):
                raise ValueError(
                    f"num_tokens is {num_tokens}; the step has {S}, and the state of a linear layer takes "
                    f"all of a step"
                )
            for b, sequence in enumerate(self.sequences):
                own: list[Arrays] = [state.cache for state in self._states]
                if self.rows > 1:
                    own = [[None if a is None else a[b : b + 1] for a in arrays] for arrays in own]
                sequence.will_have(sequence.length + S, own)
        super().commit(num_tokens, ids=ids)

    def end_step(self) -> None:
        super().end_step()
        self._entries, self.views, self._states = [], [], []

    def _stacked(self, each: Sequence[Arrays]) -> ArraysCache:
        """One state of all rows. Nothing yet is zeros, as mlx-lm has it; so is what a shorter state lacks
        in front.
        """
        made = ArraysCache(len(each[0]))
        if self.rows == 1:
            made.cache = [*each[0]]
            return made
        for n, arrays in enumerate(zip(*each, strict=True)):
            known = [array for array in arrays if array is not None]
            if not known:
                continue
            most = tuple(map(max, *(array.shape for array in known), known[0].shape))
            zeros, rows = mx.zeros(most, known[0].dtype), [*arrays, *[None] * (self.rows - len(arrays))]
            made.cache[n] = mx.concatenate(
                [zeros if array is None else _padded(array, most) for array in rows]
            )
        return made


class BridgedCache(ModelCache):
    """The cache of a conversation with mlx-lm's model, which takes the entries of ``cache.batch`` as its
    own.
    """

    pool: BridgedPool
    batch: BridgedBatch

    def __init__(self, pool: BridgedPool, kv_group_size: int, absent: Collection[int] = ()) -> None:
        """``kv_group_size``: that was asked for. ``absent`` is as in :func:`formats_of`."""
        super().__init__(pool)
        self._group = kv_group_size
        present = [entry for number, entry in enumerate(pool.entries) if number not in absent]
        self._num_states = len(leaves_of(present, State))

    @property
    def used(self) -> CacheBytes:
        """:attr:`nbytes` by kind."""
        return CacheBytes(self.keys_values, self.nbytes - self.keys_values)

    def describe(self) -> list[str]:
        """What it is made of, a line for each kind of layer, and where a group is not the one asked for."""
        present = [layer for layer in self.pool.layers if layer.format.num_kv_heads]
        kinds = Counter(_described(layer.format, self.max_seq_len, layer.nbytes) for layer in present)
        now = (
            f"state, mlx-lm's own, {format_bytes(self.used.state)}"
            if self.used.state
            else "state, mlx-lm's own"
        )
        groups = Counter(layer.format.kv_group_size for layer in present if layer.format.kv_bits)
        return [
            *(f"{_counted(count)}: {kind}" for kind, count in kinds.items()),
            *([f"{_counted(self._num_states)}: {now}"] if self._num_states else []),
            *(
                f"groups of {group} in {_counted(count)}: {self._group} does not divide every width there"
                for group, count in groups.items()
                if group != self._group
            ),
        ]


def reserve(
    found: Sequence[Entry],
    sizes: Mapping[str, Any],
    options: CacheOptions,
    *,
    dtype: mx.Dtype,
    make_cache: Callable[..., Any],
    absent: Collection[int] = (),
    **further: Any,
) -> BridgedPool:
    """The pool of a model, whose attention is hooked; a ContextError if this machine lacks the memory.

    ``absent`` is as in :func:`formats_of`. ``further``: arguments of :class:`kvant.cache.pool.Pool`.
    """
    hook.install()
    own = [entry for number, entry in enumerate(found) if number not in absent]
    check_memory(sizes["tokens"], sum(pool_needs(own, sizes, options)))
    formats = formats_of(found, sizes["max_seq_len"], options, absent)
    transforms = [
        choice.transform(range(own.num_kv_heads), own.head_dim) if own.num_kv_heads else PLAIN
        for choice, own in zip(_choices(found, options), formats, strict=True)
    ]
    further |= {
        "has_tails": options.any_tail,
        "checkpoints": options.checkpoints,
        "kernels": options.kernels,
        "dtype": dtype,
    }
    return BridgedPool(found, formats, transforms, **sizes, **further, make_cache=make_cache)


def check_entries(found: Sequence[Entry], model: Model, name: str) -> None:
    """Refuse a model that no pool is for, by its layers or its module."""
    reason = ONE_AT_A_TIME.get(type(model).__module__.rpartition(".")[2])
    if any(leaf.chunk is not None for leaf in leaves_of(found, Attention)):
        reason = "attends in chunks, which a pool has no pages for"
    if reason is not None:
        raise ModelError(f"{name} {reason}; one sequence at a time works")


def pool_needs(found: Sequence[Entry], sizes: Mapping[str, Any], options: CacheOptions) -> CacheBytes:
    """Bytes of a pool and of its sequences' states; arguments as in :func:`reserve`."""
    one = sum(state.nbytes for state in leaves_of(found, State))
    formats = formats_of(found, sizes["max_seq_len"], options)
    rows = pool_bytes(formats, **sizes, checkpoints=options.checkpoints)
    return CacheBytes(rows, (sizes["sequences"] + options.checkpoints) * one)


def attends_separately(model: Model, name: str, found: Sequence[Entry], dtype: mx.Dtype) -> bool:
    """Whether attention in a step of several sequences is computed for each alone; a ModelError if they
    disturb it.

    Some models take one position for all sequences, or the position from the number of rows that they read,
    or add a boolean mask to the scores.
    """
    check_entries(found, model, name)
    pool = reserve(found, TRIAL, CacheOptions(0, kernels="unfused"), dtype=dtype, make_cache=BridgedCache)
    refused = f"{name} has no step of several sequences of different lengths; one sequence at a time works"
    texts = [[2 + (7 + 31 * i + 5 * b) % 59 for i in range(count + 1)] for b, count in enumerate(TRIED)]
    opened = [pool.sequence(pool.max_seq_len) for _ in texts]

    def logits(batch: BridgedBatch, rows: list[list[int]]) -> mx.array:
        inputs = mx.array(rows)
        batch.begin(inputs)
        found: mx.array = model(inputs, cache=batch.entries)[:, -1].astype(mx.float32)
        mx.eval(found, batch.state)
        return found

    alone = []
    for sequence, (*before, last) in zip(opened, texts, strict=True):
        batch = pool.batch([sequence])
        if before:
            logits(batch, [before])
            batch.commit()
        alone.append(logits(batch, [[last]]))
        batch.end_step()
    batch = pool.batch(opened)
    try:
        given = logits(batch, [[text[-1]] for text in texts])
    except (TypeError, ValueError, RuntimeError, AttributeError, NotImplementedError) as error:
        said = str(error).partition("\n")[0]
        raise ModelError(f"{refused}. mlx-lm's model raised {type(error).__name__}: {said}") from error
    agree, expected = AGREE if dtype == mx.float32 else AGREE_HALF, mx.concatenate(alone)
    finite = mx.isfinite(expected)
    difference = mx.abs(mx.where(finite, given - expected, 0)).max()
    if not (difference <= agree * mx.abs(mx.where(finite, expected, 0)).max()).item():
        raise ModelError(f"{refused}. Its logits would be others than alone")
    return all(layer.attends for layer in batch.views)


def formats_of(
    found: Sequence[Entry], max_seq_len: int, options: CacheOptions, absent: Collection[int] = ()
) -> list[LayerFormat]:
    """How each layer that keeps rows stores tokens. A window that no sequence outgrows is none.

    A group that does not divide both widths becomes their greatest common divisor. ``absent``: numbers of the
    entries whose layers another process computes; they have no heads here.
    """
    formats: list[LayerFormat] = []
    if options.group_size % 8:
        raise ValueError(f"kv_group_size is {options.kv_group_size}; expected a multiple of 8")
    if options.kv_format is not None:
        options.kv_format.check_layers(len(leaves_of(found, Attention)))
    choices = iter(_choices(found, options))
    for number, entry in enumerate(found):
        for leaf in leaves_of([entry], Attention):
            choice = next(choices)
            formats.append(
                LayerFormat.of_rows(
                    0 if number in absent else leaf.num_kv_heads,
                    leaf.key_dim,
                    leaf.value_dim,
                    choice.kv_bits,
                    math.gcd(choice.kv_group_size, leaf.key_dim, leaf.value_dim),
                    leaf.dtype,
                    window=leaf.chunk or leaf.window,
                    max_seq_len=max_seq_len,
                    value_bits=choice.value_bits,
                    has_tail=number not in absent and _attends_to_rows(leaf) and options.has_tail(choice),
                    kind="quantized" if leaf.chunk is None else "chunks",
                    shared=leaf.shared,
                    transform_name="" if number in absent else choice.name,
                )
            )
    return formats


def _choices(found: Sequence[Entry], options: CacheOptions) -> list[LayerChoice]:
    """Return how each layer that keeps rows stores tokens.

    Keys and values are rotated by default if queries meet them in mlx-lm's attention function, where queries
    and outputs are rotated too. A model that attends in its own way, such as to latents that are keys
    and values at once, would have them turned back at every step.
    """
    return [
        options.layer(
            number,
            can_rotate=_reads_stored_rows(leaf) and can_rotate(leaf.key_dim),
            can_rotate_values=_reads_stored_rows(leaf) and leaf.value_dim > 0 and can_rotate(leaf.value_dim),
        )
        for number, leaf in enumerate(leaves_of(found, Attention))
    ]


def _reads_stored_rows(leaf: Attention) -> bool:
    """Return whether queries meet a layer's keys in mlx-lm's attention function."""
    return leaf.query_heads > 0 and not leaf.value_is_key


def _attends_to_rows(leaf: Attention) -> bool:
    """Return whether attention to a layer can read exact rows in place of some of its quantized ones.

    A model that attends in its own way is given one array for all queries, and its own masks.
    """
    return _reads_stored_rows(leaf) and leaf.value_dim > 0 and leaf.chunk is None


def _padded(array: mx.array, shape: tuple[int, ...]) -> mx.array:
    """An array with zeros in front."""
    return mx.pad(array, [(most - own, 0) for own, most in zip(array.shape, shape, strict=True)])


def _counted(layers: int) -> str:
    return "1 layer" if layers == 1 else f"{layers} layers"


def _described(own: LayerFormat, max_seq_len: int, nbytes: int) -> str:
    kind = "chunks" if own.kind == "chunks" else "a window"
    seen = "" if own.window is None else f" for {kind} of {own.window} tokens"
    how = describe_formats([own]) if own.kv_bits else "not quantized"
    return f"{single_rows(own.window, max_seq_len)} rows{seen}, {how}, {format_bytes(nbytes)}"
