"""The key/value cache of a model of mlx-lm's: what mlx-lm's model expects at each place, in kvant's memory."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList
from mlx_lm.models.cache import KVCache as MlxLmKVCache

from kvant.bridge import hook
from kvant.bridge.layers import BridgedChunkCache, BridgedKVCache, BridgedWindowCache
from kvant.bridge.probe import Attention, Entry, Leaf, Model, State, Unused, as_text, leaves_of, probe
from kvant.bridge.state_layer import StateCache
from kvant.cache import ModelCache
from kvant.cache.options import CacheOptions
from kvant.cache.window import SLACK
from kvant.models.caches import check_memory
from kvant.sizes import format_bytes

Layer = BridgedKVCache | StateCache


@dataclass(frozen=True, slots=True)
class CacheBytes:
    """Bytes of a model's cache.

    Attributes:
        keys_values: reserved when the cache is made.
        state: of linear and convolution layers, which mlx-lm allocates at the first prefill.
    """

    keys_values: int
    state: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.keys_values + self.state


class BridgedCache(ModelCache):
    """A model's cache for kvant's loop, that mlx-lm's model takes as its own.

    An index gives what mlx-lm's model expects there: a layer, a list of layers, or the arrays of a state. Lengths,
    trims and steps are those of all layers together. A step is :meth:`begin`, a call of the model, and :meth:`commit`.
    """

    def __init__(
        self, entries: Sequence[Any], layers: Sequence[Layer], notes: Sequence[str] = (), layout: str = ""
    ) -> None:
        """``entries``: for mlx-lm's model, whose :func:`layout_of` is ``layout``. ``layers``: those in them.

        ``notes``: what :meth:`describe` adds.
        """
        super().__init__(layers)
        self._sequence.layout = layout
        self._entries = tuple(entries)
        self._bridged = tuple(layers)
        self._notes = tuple(notes)

    def __getitem__(self, index: int | slice) -> Any:
        return self._entries[index]

    def __len__(self) -> int:
        return len(self._entries)

    def __add__(self, more: list[Any]) -> list[Any]:
        """Gemma 4 adds an entry for each layer that has no keys and values of its own."""
        return [*self._entries, *more]

    @property
    def layout(self) -> str:
        """:func:`layout_of` the model that it is for."""
        return self._sequence.layout

    @property
    def layers(self) -> tuple[Layer, ...]:
        """All layers that hold something, in order, those of lists too."""
        return self._bridged

    @property
    def state(self) -> list[mx.array]:
        """Every array of every layer: computed, the step is, whether its logits are or not."""
        return [array for layer in self._bridged for array in layer.buffers]

    @property
    def used(self) -> CacheBytes:
        """Bytes held now."""
        state = sum(layer.nbytes for layer in self._bridged if isinstance(layer, StateCache))
        return CacheBytes(self.nbytes - state, state)

    def begin(self, inputs: mx.array) -> tuple[int, ...]:
        """As :meth:`ModelCache.begin`; states and windows are as the last committed step left them."""
        self.end_step()
        return super().begin(inputs)

    def commit(
        self, num_tokens: int | Sequence[int] | None = None, *, ids: Sequence[Sequence[int]] | None = None
    ) -> None:
        if isinstance(num_tokens, Sequence):
            (num_tokens,) = num_tokens
        step = self.step
        has_state = any(isinstance(layer, StateCache) for layer in self._bridged)
        if has_state and step is not None and num_tokens not in (None, step.shape[1]):
            raise ValueError(
                f"num_tokens is {num_tokens}; the step has {step.shape[1]}, and the state of a linear layer takes all "
                "of a step"
            )
        super().commit(num_tokens, ids=ids)

    def end_step(self) -> None:
        """Drop a step that was begun and is not committed."""
        super().end_step()
        for layer in self._bridged:
            layer.begin()

    def reset(self) -> None:
        """Forget every token; the memory stays reserved, states are given back."""
        super().reset()
        for layer in self._bridged:
            layer.begin()

    def fork(self) -> "BridgedCache":
        with self.turn:
            layers: Sequence[Any] = self._forked()
            # What mlx-lm's model sees of a layer, to the same of its copy.
            seen = {id(_seen(old)): _seen(new) for old, new in zip(self._bridged, layers, strict=True)}

            def copied(entry: Any) -> Any:
                if isinstance(entry, CacheList):
                    return CacheList(*map(copied, entry.caches))
                return seen.get(id(entry)) or MlxLmKVCache()  # one that the model does not use

            return BridgedCache([copied(entry) for entry in self._entries], layers, self._notes, self.layout)

    def describe(self) -> list[str]:
        """What it is made of, a line for each kind of layer, and where a group is not the one asked for."""
        kinds = Counter(_described(layer) for layer in self._bridged if not layer.absent)
        lines = [f"{_counted(count)}: {kind}" for kind, count in kinds.items()]
        return [*lines, *self._notes]


def make_prompt_cache(model: Model, max_kv_size: int, *, kv_bits: int = 8, kv_group_size: int = 32) -> list[Any]:
    """A prompt cache for mlx-lm's own loops that is reserved now, quantized, and never grows.

    ``mlx_lm.generate(model, tokenizer, prompt, prompt_cache=kvant.make_prompt_cache(model, 4096))``

    The states of linear and convolution layers stay mlx-lm's own. Attention to the cache's tokens is computed by kvant
    where that is faster; every other call stays mlx-lm's.

    Args:
        model: any of mlx-lm's.
        max_kv_size: tokens it can hold. More are a ContextError.
        kv_bits: 8, 4, or 0 for no quantization.
        kv_group_size: elements that share a scale. Where it does not divide a head's width, their greatest common
            divisor is used.

    Returns:
        a cache for each place where the model's ``make_cache`` has one.

    Raises:
        ContextError: more than this machine's memory; nothing was allocated.
        ValueError: an argument out of range, or a model with a kind of cache that kvant has nothing for.
    """
    if hasattr(model, "check_cache") or not (hasattr(model, "layers") or hasattr(model, "make_cache")):
        raise ValueError(
            f"model is a {type(model).__name__}; expected mlx-lm's own. A model of kvant.load has make_cache"
        )
    options = CacheOptions(kv_bits, kv_group_size)
    check_format({"max_kv_size": max_kv_size}, options)
    entries, layers = _make(probe(model), max_kv_size, options)
    # Each layer counts for itself. None goes back further than all of them can.
    limits = frozenset(limit for layer in layers for limit in layer.limits)
    for layer in layers:
        layer.sequence.limits = limits
    return entries


def make_model_cache(
    model: Model, max_seq_len: int, options: CacheOptions | None = None, *, absent: Collection[int] = ()
) -> BridgedCache:
    """A cache of mlx-lm's model for kvant's loop; arguments and errors as :func:`make_prompt_cache` has them.

    Args:
        absent: the numbers of the model's caches that hold nothing here, because another process computes their layers.
            Offsets and masks are as in the others.
    """
    options = options or CacheOptions()
    check_format({"max_seq_len": max_seq_len}, options)
    found = probe(model)
    entries, layers = _make(found, max_seq_len, options, absent=absent)
    kinds = [layer for layer in layers if isinstance(layer, BridgedKVCache) and options.kv_bits and not layer.absent]
    notes = [
        f"groups of {group} in {_counted(count)}: {options.kv_group_size} does not divide every width there"
        for group, count in Counter(layer.kv_group_size for layer in kinds).items()
        if group != options.kv_group_size
    ]
    return BridgedCache(entries, layers, notes, as_text(found))


def layout_of(model: Model) -> str:
    """What a model asks of its caches, as JSON; those of another layout are for another model."""
    return as_text(probe(model))


def cache_bytes(model: Model, max_seq_len: int, options: CacheOptions) -> CacheBytes:
    """What :func:`make_model_cache` would allocate, and mlx-lm for states. Nothing is allocated for it."""
    return entries_bytes(probe(model), max_seq_len, options)


def entries_bytes(entries: Sequence[Entry], max_seq_len: int, options: CacheOptions) -> CacheBytes:
    """:func:`cache_bytes` of what a probe of the model found."""
    check_format({"max_seq_len": max_seq_len}, options)
    keys_values = state = 0
    for leaf in leaves_of(entries):
        if isinstance(leaf, State):
            state += leaf.nbytes
        elif isinstance(leaf, Attention):
            keys_values += leaf.num_kv_heads * rows_of(leaf, max_seq_len) * _token_bytes(leaf, options)
    return CacheBytes(keys_values, state)


def _make(
    found: Sequence[Entry], max_seq_len: int, chosen: CacheOptions, *, absent: Collection[int] = ()
) -> tuple[list[Any], list[Layer]]:
    """A cache for each place that a probe found in the model, and the layers of kvant's in them."""
    layers: list[Layer] = []

    def one(leaf: Leaf, is_absent: bool) -> Any:
        if isinstance(leaf, Unused):
            return MlxLmKVCache()
        if isinstance(leaf, State):
            arrays = ArraysCache(len(leaf.shapes))
            layers.append(StateCache(arrays, max_seq_len, shapes=leaf.shapes, absent=is_absent))
            return arrays
        options: dict[str, Any] = {
            "kv_bits": chosen.kv_bits,
            "kv_group_size": leaf.group(chosen.kv_group_size) if chosen.kv_bits else chosen.kv_group_size,
            "value_head_dim": leaf.value_dim,
            "dtype": leaf.dtype,
            "kernels": chosen.kernels,
            "shared": leaf.shared,
        }
        kind: Callable[..., BridgedKVCache] = BridgedKVCache
        if leaf.chunk is not None:
            kind, options["window"] = BridgedChunkCache, leaf.chunk
        elif leaf.window is not None:
            kind, options["window"], options["keep"] = BridgedWindowCache, leaf.window, leaf.keep
        layers.append(kind(max_seq_len, 0 if is_absent else leaf.num_kv_heads, leaf.key_dim, **options))
        return layers[-1]

    def entry(each: Entry, is_absent: bool) -> Any:
        return CacheList(*(one(leaf, is_absent) for leaf in each)) if isinstance(each, tuple) else one(each, is_absent)

    own = [each for number, each in enumerate(found) if number not in absent]
    check_memory(max_seq_len, entries_bytes(own, max_seq_len, chosen).total)
    entries = [entry(each, number in absent) for number, each in enumerate(found)]
    hook.install()
    return entries, layers


def check_format(sizes: dict[str, int], options: CacheOptions) -> None:
    """Raise a ValueError that names the first size out of range, or a group that no width is divided by."""
    for name, number in sizes.items():
        if type(number) is not int or number < 1:
            raise ValueError(f"{name} is {number!r}; expected a positive int")
    if options.kv_group_size % 8:
        raise ValueError(f"kv_group_size is {options.kv_group_size}; expected a multiple of 8")


def rows_of(leaf: Attention, max_seq_len: int) -> int:
    """Rows of a layer's arrays that a sequence has."""
    window = leaf.chunk or leaf.window
    return max_seq_len if window is None else min(max_seq_len, leaf.keep + window + SLACK)


def _token_bytes(leaf: Attention, options: CacheOptions) -> int:
    """Bytes of one token's key and value, of one head."""
    width, bits = leaf.key_dim + leaf.value_dim, options.kv_bits
    if not bits:
        return width * leaf.dtype.size
    return width * bits // 8 + width // leaf.group(options.kv_group_size) * mx.float16.size


def _seen(layer: Layer) -> Any:
    """What mlx-lm's model is given for a layer."""
    return layer.arrays if isinstance(layer, StateCache) else layer


def _counted(layers: int) -> str:
    return "1 layer" if layers == 1 else f"{layers} layers"


def _described(layer: Layer) -> str:
    if isinstance(layer, StateCache):
        return f"state, mlx-lm's own, {format_bytes(layer.nbytes)}" if layer.nbytes else "state, mlx-lm's own"
    rows = f"{layer.num_rows} rows"
    if isinstance(layer, BridgedChunkCache):
        rows += f" for chunks of {layer.window} tokens"
    elif isinstance(layer, BridgedWindowCache):
        rows += f" for a window of {layer.window} tokens"
    how = f"{layer.kv_bits} bits in groups of {layer.kv_group_size}" if layer.kv_bits else "not quantized"
    return f"{rows}, {how}, {format_bytes(layer.nbytes)}"
