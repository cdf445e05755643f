"""Find out how a model uses its layers' caches, from one call that is never evaluated."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as mlx_lm_cache

from kvant.bridge import hook
from kvant.cache.layer_format import DTYPE_NAMES, State, stored_of

PROBE_TOKENS = 16  # enough to fill the longest convolution or n-gram state
Model = Callable[..., mx.array]  # mlx-lm's nn.Module, called with token ids (B, S) and cache=
KINDS = "KVCache, RotatingKVCache, ChunkedKVCache, ArraysCache and CacheList"


@dataclass(frozen=True, slots=True)
class Attention:
    """A layer's keys and values."""

    num_kv_heads: int
    key_dim: int
    value_dim: int  # 0: no values are stored
    dtype: str  # of the keys, by its name in safetensors
    window: int | None  # tokens that a query sees, including its own; None: all
    keep: int = field(default=0, init=False)  # part of saved layouts
    chunk: int | None  # tokens of a chunk, if a query sees only its own chunk
    value_is_key: bool  # the model passes one array for both
    shared: bool  # other layers read what was fetched
    # in calls of mlx-lm's attention function; 0: the model attends in its own way
    query_heads: int = field(default=0, compare=False)
    # the model always passes masks as arrays
    takes_array: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class Unused:
    """A cache that the model creates but does not use."""


Leaf = Attention | State | Unused
Entry = Leaf | tuple[Leaf, ...]
KIND_NAMES = {Attention: "attention", State: "state", Unused: "unused"}


def probe(model: Model) -> list[Entry]:
    """Return the use of each cache that ``model`` creates. A tuple stands for a layer's list of caches."""
    hook.install()
    with _nothing_read(model):
        probes, _ = called(model)
    windows: dict[int, int] = {}
    entries = [
        tuple(cache.caches) if isinstance(cache, mlx_lm_cache.CacheList) else cache for cache in probes
    ]
    for leaf in leaves_of(entries, _Probe):
        if leaf.asked is not None and leaf.ring is not None:
            windows[leaf.ring] = max(leaf.asked, windows.get(leaf.ring, 0))
    return _each(entries, partial(_leaf_of, windows=windows))


def called(model: Model) -> tuple[list[Any], mx.array]:
    """Call ``model`` without evaluating it. Return the caches, with what they received, and the logits."""
    # The class's method: kvant may have replaced the instance's.
    make_cache = getattr(type(model), "make_cache", None)
    made = (
        [mlx_lm_cache.KVCache() for _ in model.layers]  # type: ignore[attr-defined]
        if make_cache is None
        else make_cache(model)
    )
    probes = [_probe_of(cache, number) for number, cache in enumerate(made)]
    return probes, model(mx.zeros((1, PROBE_TOKENS), mx.int32), cache=probes)


@contextmanager
def _nothing_read(model: Model) -> Iterator[None]:
    """Make dbrx's module use the first experts: it would evaluate the weights to choose them."""
    module: Any = sys.modules[type(model).__module__]
    if module.__name__ != "mlx_lm.models.dbrx":
        yield
        return

    first_ones = {"argpartition": lambda x, **_: mx.zeros(x.shape, mx.uint32)}
    module.mx = SimpleNamespace(**vars(mx) | first_ones)
    try:
        yield
    finally:
        module.mx = mx


def leaves_of(entries: Iterable[Any], kind: Any = object) -> list[Any]:
    """Return the entries of a kind, with tuples flattened."""
    leaves = (leaf for entry in entries for leaf in (entry if isinstance(entry, tuple) else (entry,)))
    return [leaf for leaf in leaves if isinstance(leaf, kind)]


def as_text(entries: Sequence[Entry]) -> str:
    """Return entries as JSON: an object with its kind for each cache, a list of them for a tuple."""

    def one(leaf: Leaf) -> dict[str, Any]:
        stored = {each.name: getattr(leaf, each.name) for each in fields(leaf) if each.compare}
        return {"kind": KIND_NAMES[type(leaf)], **stored}

    return json.dumps(_each(entries, one))


def caches_of(entries: Iterable[Entry], make: Callable[[Any], Any]) -> list[Any]:
    """Return caches for mlx-lm's model: ``make`` of each entry, or mlx-lm's cache for an unused one."""
    made = _each(entries, lambda leaf: mlx_lm_cache.KVCache() if isinstance(leaf, Unused) else make(leaf))
    return [mlx_lm_cache.CacheList(*entry) if isinstance(entry, tuple) else entry for entry in made]


def _each(entries: Iterable[Any], one: Callable[[Any], Any]) -> list[Any]:
    return [tuple(map(one, entry)) if isinstance(entry, tuple) else one(entry) for entry in entries]


@dataclass(eq=False)
class _Probe:
    """Poses as an empty cache of keys and values and records how it is used."""

    ring: int | None = None  # max_size of mlx-lm's rotating cache
    chunk: int | None = None
    asked: int | None = None  # the window of the mask
    fetched: tuple[mx.array, mx.array] | None = None
    # A model may read these, make them depend on other arrays and assign them.
    keys: mx.array | None = None
    values: mx.array | None = None
    shared: bool = False
    query_heads: int = 0
    takes_array: bool = False
    offset = start_position = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.fetched = self.keys, self.values = keys, values
        hook.remember(self, keys, values)
        return keys, values

    def attend_fetched(
        self, query: mx.array, key: mx.array, value: mx.array, *, mask: Any, **options: Any
    ) -> None:
        """Record the call. mlx-lm computes the attention."""
        as_array = isinstance(mask, mx.array)
        self.takes_array |= as_array
        of_heads = as_array and mask.ndim > 2 and mask.shape[-3] > 1  # it has scores that the model computes
        self.query_heads = 0 if of_heads else query.shape[1]

    def keys_and_values(self) -> tuple[mx.array, mx.array] | None:
        self.shared = True
        return self.fetched

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        self.asked = window_size
        return mlx_lm_cache.create_attention_mask(N, 0, return_array, window_size)

    def maybe_trim_front(self) -> None:
        """Do nothing: there is nothing to trim."""


def _probe_of(cache: Any, number: int) -> Any:
    kind = type(cache)
    name = kind.__name__ if kind.__module__ in (mlx_lm_cache.__name__, "mlx_vlm.models.cache") else ""
    if name == "KVCache":
        return _Probe()
    if name == "RotatingKVCache":
        if cache.keep:
            raise ValueError(
                f"layer {number} keeps the first {cache.keep} tokens of a window; kvant has no pages for them"
            )
        return _Probe(ring=cache.max_size)
    if kind is mlx_lm_cache.ChunkedKVCache:
        return _Probe(chunk=cache.chunk_size)
    if kind is mlx_lm_cache.ArraysCache:
        return cache
    if kind is mlx_lm_cache.CacheList:
        return mlx_lm_cache.CacheList(*(_probe_of(each, number) for each in cache.caches))
    raise ValueError(f"the cache of layer {number} is a {kind.__name__}; kvant's stands for mlx-lm's {KINDS}")


def _leaf_of(probed: Any, windows: dict[int, int]) -> Leaf:
    if isinstance(probed, mlx_lm_cache.ArraysCache):
        return State(probed.nbytes, stored_of(probed.cache))
    if probed.fetched is None:
        return Unused()
    key, value = probed.fetched
    return Attention(
        num_kv_heads=key.shape[1],
        key_dim=key.shape[3],
        value_dim=0 if value is key else value.shape[3],
        dtype=DTYPE_NAMES[key.dtype],
        # The mask has the model's window. PLaMo 3 masks one token more than its cache stores.
        window=windows.get(probed.ring, probed.ring),
        chunk=probed.chunk,
        value_is_key=value is key,
        shared=probed.shared,
        query_heads=probed.query_heads,
        takes_array=probed.takes_array,
    )
