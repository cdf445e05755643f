"""The caches of mlx-lm's models: a pool for many sequences of different lengths, or for a single one."""

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

# sequence lengths that a model is tried with: none, fewer tokens than a state looks back, and more
TRIED = (0, 1, 21)
TRIAL = {
    "tokens": len(TRIED) * Pool.page_size,
    "sequences": len(TRIED),
    "max_seq_len": 64,
    "prefill_step_size": 32,
}
# Tolerance for a sequence's logits in a step with others, relative to the largest logit. Float32 differs by
# a millionth and half precision by a hundredth; a wrong position or another sequence's token by far more.
AGREE = 1e-3
AGREE_HALF = 0.05


class CacheBytes(NamedTuple):
    """Bytes of a model's caches."""

    keys_values: int  # reserved in advance
    state: int  # of linear and convolution layers; mlx-lm allocates it at the first prefill


class BridgedPool(Pool):
    """One reservation for the keys and values of many sequences. mlx-lm allocates states on demand.

    A model that attends in its own way receives padded rows and does not attend to each sequence separately.
    """

    may_have_sinks = True

    def __init__(
        self,
        entries: Sequence[Entry],
        formats: Sequence[LayerFormat],
        transforms: Sequence[KeyTransform],
        **options: Any,
    ) -> None:
        """``entries``: from a probe; ``formats``: of layers that store rows; ``options``: as for Pool."""
        super().__init__(formats, transforms, states=leaves_of(entries, State), **options)
        self.entries = tuple(entries)
        self.layout = as_text(entries)
        layers = iter(self.layers)
        # A state cannot take back tokens of a step. Several new tokens of several sequences are untested.
        self.takes_back = self.single and not self.states
        leaves = leaves_of(entries, Attention | State)
        self.saved = [leaf if isinstance(leaf, State) else next(layers) for leaf in leaves]

    def batch(self, sequences: Sequence[PoolSequence], rows: int | None = None) -> "BridgedBatch":
        return cast(BridgedBatch, super().batch(sequences, rows))

    def _new_batch(self, sequences: Sequence[PoolSequence], rows: int | None) -> "BridgedBatch":
        return BridgedBatch(self, sequences, rows)


class BridgedBatch(PoolBatch):
    """The cache for a model's step over sequences of different lengths."""

    pool: BridgedPool

    def __init__(self, pool: BridgedPool, sequences: Sequence[PoolSequence], rows: int | None = None) -> None:
        super().__init__(pool, sequences, rows)
        self._entries: list[Any] = []
        self.views: list[BridgedLayer] = []  # of layers that store rows, during a step
        self._states: list[ArraysCache] = []

    @property
    def entries(self) -> list[Any]:
        """The caches to pass to mlx-lm's model in this step."""
        if self.step is None:
            raise RuntimeError("no step was begun; expected begin before the model is called")
        return self._entries

    @property
    def state(self) -> list[mx.array]:
        """Every array that the step changes. Evaluating them evaluates the step, without its logits."""
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
            self._stacked(each) for each in zip(*(one.states for one in self.sequences), strict=True)
        ]
        layers = iter(self.views)
        states = iter(self._states)
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
                    f"num_tokens is {num_tokens}; expected {S}: "
                    "the state of a linear layer takes all of a step"
                )
            for b, sequence in enumerate(self.sequences):
                states: list[Arrays] = [state.cache for state in self._states]
                if self.rows > 1:
                    states = [[None if a is None else a[b : b + 1] for a in arrays] for arrays in states]
                sequence.will_have(sequence.length + S, states)
        super().commit(num_tokens, ids=ids)

    def end_step(self) -> None:
        super().end_step()
        self._entries = []
        self.views = []
        self._states = []

    def _stacked(self, each: Sequence[Arrays]) -> ArraysCache:
        """Stack the rows' states. Missing arrays are zeros, as in mlx-lm; shorter ones get zeros in front."""
        made = ArraysCache(len(each[0]))
        if self.rows == 1:
            made.cache = [*each[0]]
            return made
        for n, arrays in enumerate(zip(*each, strict=True)):
            known = [array for array in arrays if array is not None]
            if not known:
                continue
            most = tuple(map(max, *(array.shape for array in known), known[0].shape))
            zeros = mx.zeros(most, known[0].dtype)
            rows = [*arrays, *[None] * (self.rows - len(arrays))]
            made.cache[n] = mx.concatenate(
                [zeros if array is None else _padded(array, most) for array in rows]
            )
        return made


class BridgedCache(ModelCache):
    """The cache of one conversation. mlx-lm's model receives the entries of ``cache.batch``."""

    pool: BridgedPool
    batch: BridgedBatch

    def __init__(self, pool: BridgedPool, kv_group_size: int, absent: Collection[int] = ()) -> None:
        """``kv_group_size`` is the requested one, ``absent`` as in :func:`formats_of`."""
        super().__init__(pool)
        self._group = kv_group_size
        present = [entry for number, entry in enumerate(pool.entries) if number not in absent]
        self._num_states = len(leaves_of(present, State))

    @property
    def used(self) -> CacheBytes:
        """The parts of :attr:`nbytes`."""
        return CacheBytes(self.keys_values, self.nbytes - self.keys_values)

    def describe(self) -> list[str]:
        """Return a line for each kind of layer, and one for each group size that is not the requested one."""
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
    entries: Sequence[Entry],
    sizes: Mapping[str, Any],
    options: CacheOptions,
    *,
    dtype: mx.Dtype,
    make_cache: Callable[..., Any],
    absent: Collection[int] = (),
    **further: Any,
) -> BridgedPool:
    """Reserve a model's pool and install the attention hook. ContextError: the machine lacks the memory.

    ``absent`` is as in :func:`formats_of`. ``further`` are arguments of :class:`kvant.cache.pool.Pool`.
    """
    hook.install()
    present = [entry for number, entry in enumerate(entries) if number not in absent]
    check_memory(sizes["tokens"], sum(pool_needs(present, sizes, options)))
    formats = formats_of(entries, sizes["max_seq_len"], options, absent)
    transforms = [
        choice.transform(range(form.num_kv_heads), form.head_dim) if form.num_kv_heads else PLAIN
        for choice, form in zip(_choices(entries, options), formats, strict=True)
    ]
    further |= {
        "has_tails": options.any_tail,
        "checkpoints": options.checkpoints,
        "kernels": options.kernels,
        "dtype": dtype,
    }
    return BridgedPool(entries, formats, transforms, **sizes, **further, make_cache=make_cache)


def check_entries(entries: Sequence[Entry], model: Model, name: str) -> None:
    """Refuse a model whose layers or module do not support several sequences."""
    reason = ONE_AT_A_TIME.get(type(model).__module__.rpartition(".")[2])
    if any(leaf.chunk is not None for leaf in leaves_of(entries, Attention)):
        reason = "attends in chunks, which a pool has no pages for"
    if reason is not None:
        raise ModelError(f"{name} {reason}; one sequence at a time works")


def pool_needs(entries: Sequence[Entry], sizes: Mapping[str, Any], options: CacheOptions) -> CacheBytes:
    """Return the bytes of a pool and of its sequences' states. Arguments are as in :func:`reserve`."""
    one = sum(state.nbytes for state in leaves_of(entries, State))
    formats = formats_of(entries, sizes["max_seq_len"], options)
    rows = pool_bytes(formats, **sizes, checkpoints=options.checkpoints)
    return CacheBytes(rows, (sizes["sequences"] + options.checkpoints) * one)


def attends_separately(model: Model, name: str, entries: Sequence[Entry], dtype: mx.Dtype) -> bool:
    """Return whether a step attends to each of several sequences separately, after trying one.

    A ModelError is raised if the sequences disturb each other. Some models use one position for all, derive
    positions from the number of rows that they read, or add a boolean mask to the scores.
    """
    check_entries(entries, model, name)
    pool = reserve(entries, TRIAL, CacheOptions(0, kernels="unfused"), dtype=dtype, make_cache=BridgedCache)
    refused = f"{name} has no step of several sequences of different lengths; one sequence at a time works"
    texts = [[2 + (7 + 31 * i + 5 * b) % 59 for i in range(count + 1)] for b, count in enumerate(TRIED)]
    opened = [pool.sequence(pool.max_seq_len) for _ in texts]

    def logits(batch: BridgedBatch, rows: list[list[int]]) -> mx.array:
        inputs = mx.array(rows)
        batch.begin(inputs)
        last: mx.array = model(inputs, cache=batch.entries)[:, -1].astype(mx.float32)
        mx.eval(last, batch.state)
        return last

    separate = []
    for sequence, (*before, last) in zip(opened, texts, strict=True):
        batch = pool.batch([sequence])
        if before:
            logits(batch, [before])
            batch.commit()
        separate.append(logits(batch, [[last]]))
        batch.end_step()
    batch = pool.batch(opened)
    try:
        together = logits(batch, [[text[-1]] for text in texts])
    except (TypeError, ValueError, RuntimeError, AttributeError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise ModelError(f"{refused}. mlx-lm's model raised {type(error).__name__}: {reason}") from error
    agree = AGREE if dtype == mx.float32 else AGREE_HALF
    expected = mx.concatenate(separate)
    finite = mx.isfinite(expected)
    difference = mx.abs(mx.where(finite, together - expected, 0)).max()
    if not (difference <= agree * mx.abs(mx.where(finite, expected, 0)).max()).item():
        raise ModelError(f"{refused}. Its logits would differ from those of each sequence by itself")
    return all(layer.attends for layer in batch.views)


def formats_of(
    entries: Sequence[Entry], max_seq_len: int, options: CacheOptions, absent: Collection[int] = ()
) -> list[LayerFormat]:
    """Return the format of each layer that stores rows. A window that no sequence can outgrow is dropped.

    A group size that does not divide both widths becomes their greatest common divisor. ``absent`` has the
    indices of entries that another process computes; they have no heads here.
    """
    formats: list[LayerFormat] = []
    if options.group_size % 8:
        raise ValueError(f"kv_group_size is {options.kv_group_size}; expected a multiple of 8")
    if options.kv_format is not None:
        options.kv_format.check_layers(len(leaves_of(entries, Attention)))
    choices = iter(_choices(entries, options))
    for number, entry in enumerate(entries):
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


def _choices(entries: Sequence[Entry], options: CacheOptions) -> list[LayerChoice]:
    """Return the options of each layer that stores rows.

    Keys and values are rotated by default if the model attends with mlx-lm's function, where queries and
    outputs can be rotated too. For a model that attends in its own way, such as to latents that are both keys
    and values, the rotation would have to be undone at every step.
    """
    return [
        options.layer(
            number,
            can_rotate=_reads_stored_rows(leaf) and can_rotate(leaf.key_dim),
            can_rotate_values=_reads_stored_rows(leaf) and leaf.value_dim > 0 and can_rotate(leaf.value_dim),
        )
        for number, leaf in enumerate(leaves_of(entries, Attention))
    ]


def _reads_stored_rows(leaf: Attention) -> bool:
    """Return whether a layer attends with mlx-lm's function."""
    return leaf.query_heads > 0 and not leaf.value_is_key


def _attends_to_rows(leaf: Attention) -> bool:
    """Return whether attention to a layer can read exact rows instead of some quantized ones.

    A model that attends in its own way reads one array for all queries and has masks of its own.
    """
    return _reads_stored_rows(leaf) and leaf.value_dim > 0 and leaf.chunk is None


def _padded(array: mx.array, shape: tuple[int, ...]) -> mx.array:
    """Pad an array with zeros in front."""
    return mx.pad(array, [(most - size, 0) for size, most in zip(array.shape, shape, strict=True)])


def _counted(layers: int) -> str:
    return "1 layer" if layers == 1 else f"{layers} layers"


def _described(form: LayerFormat, max_seq_len: int, nbytes: int) -> str:
    kind = "chunks" if form.kind == "chunks" else "a window"
    seen = "" if form.window is None else f" for {kind} of {form.window} tokens"
    how = describe_formats([form]) if form.kv_bits else "not quantized"
    return f"{single_rows(form.window, max_seq_len)} rows{seen}, {how}, {format_bytes(nbytes)}"
