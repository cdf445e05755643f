"""What a model asks of its layers' caches, from one call of it that is never evaluated."""

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

PROBE_TOKENS = 16  # as many as fill the longest convolution or n-gram state
Model = Callable[..., mx.array]  # mlx-lm's: an nn.Module, called with token ids (B, S) and cache=
KINDS = "KVCache, RotatingKVCache, ChunkedKVCache, ArraysCache and CacheList"


@dataclass(frozen=True, slots=True)
class Attention:
    """A layer's keys and values."""

    num_kv_heads: int
    key_dim: int
    value_dim: int  # 0: no values are kept
    dtype: str  # of its keys, by its name in safetensors
    window: int | None  # tokens that a query sees, its own included; None: all
    keep: int = field(default=0, init=False)  # layouts that were saved have it
    chunk: int | None  # tokens of a chunk, where a query sees its own chunk only
    value_is_key: bool  # the model gives one array for both
    shared: bool  # other layers ask for what was fetched
    # that attend through mlx-lm's function; 0: in a way of its own
    query_heads: int = field(default=0, compare=False)
    # it is given masks as arrays, whatever the window
    takes_array: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class Unused:
    """A cache that the model makes and does not use."""


Leaf = Attention | State | Unused
Entry = Leaf | tuple[Leaf, ...]
KIND_NAMES = {Attention: "attention", State: "state", Unused: "unused"}


def probe(model: Model) -> list[Entry]:
    """What each of the caches that ``model`` makes is used for. A tuple stands for a list of caches of one
    layer.
    """
    hook.install()
    with _nothing_read(model):
        probes, _ = called(model)
    windows: dict[int, int] = {}
    entries = [
        tuple(found.caches) if isinstance(found, mlx_lm_cache.CacheList) else found for found in probes
    ]
    for leaf in leaves_of(entries, _Probe):
        if leaf.asked is not None and leaf.ring is not None:
            windows[leaf.ring] = max(leaf.asked, windows.get(leaf.ring, 0))
    return _each(entries, partial(_leaf_of, windows=windows))


def called(model: Model) -> tuple[list[Any], mx.array]:
    """The caches of a call of ``model`` that is never evaluated, which hold what they were given, and its
    logits.
    """
    # The class's own: a model may have been given kvant's caches in its place.
    own = getattr(type(model), "make_cache", None)
    made = [mlx_lm_cache.KVCache() for _ in model.layers] if own is None else own(model)  # type: ignore[attr-defined]
    probes = [_probe_of(cache, number) for number, cache in enumerate(made)]
    return probes, model(mx.zeros((1, PROBE_TOKENS), mx.int32), cache=probes)


@contextmanager
def _nothing_read(model: Model) -> Iterator[None]:
    """Let dbrx's module, which reads the experts of each token, take the first ones: reading computes its
    weights.
    """
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
    """What a probe found of a kind, the parts of lists one by one."""
    leaves = (leaf for entry in entries for leaf in (entry if isinstance(entry, tuple) else (entry,)))
    return [leaf for leaf in leaves if isinstance(leaf, kind)]


def as_text(entries: Sequence[Entry]) -> str:
    """What a probe found, as JSON: an object with its kind for each cache, a list of them for a list of
    caches.
    """

    def one(leaf: Leaf) -> dict[str, Any]:
        stored = {own.name: getattr(leaf, own.name) for own in fields(leaf) if own.compare}
        return {"kind": KIND_NAMES[type(leaf)], **stored}

    return json.dumps(_each(entries, one))


def caches_of(entries: Iterable[Entry], make: Callable[[Any], Any]) -> list[Any]:
    """What mlx-lm's model takes as its caches: ``make`` of each that it uses, and mlx-lm's own of the
    others.
    """
    made = _each(entries, lambda leaf: mlx_lm_cache.KVCache() if isinstance(leaf, Unused) else make(leaf))
    return [mlx_lm_cache.CacheList(*entry) if isinstance(entry, tuple) else entry for entry in made]


def _each(entries: Iterable[Any], one: Callable[[Any], Any]) -> list[Any]:
    return [tuple(map(one, entry)) if isinstance(entry, tuple) else one(entry) for entry in entries]


@dataclass(eq=False)
class _Probe:
    """Stands for a cache of keys and values, empty, and keeps nothing but what it was asked."""

    ring: int | None = None  # max_size of mlx-lm's rotating cache
    chunk: int | None = None
    asked: int | None = None  # the window of the mask
    fetched: tuple[mx.array, mx.array] | None = None
    # A model reads these, makes them depend on other arrays and puts them back.
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
        """Note the call, and leave attention to mlx-lm."""
        as_array = isinstance(mask, mx.array)
        self.takes_array |= as_array
        of_heads = as_array and mask.ndim > 2 and mask.shape[-3] > 1  # scores, which the model makes
        self.query_heads = 0 if of_heads else query.shape[1]

    def keys_and_values(self) -> tuple[mx.array, mx.array] | None:
        self.shared = True
        return self.fetched

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        self.asked = window_size
        return mlx_lm_cache.create_attention_mask(N, 0, return_array, window_size)

    def maybe_trim_front(self) -> None:
        """Nothing to trim."""


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
        return mlx_lm_cache.CacheList(*(_probe_of(part, number) for part in cache.caches))
    raise ValueError(f"the cache of layer {number} is a {kind.__name__}; kvant's stands for mlx-lm's {KINDS}")


def _leaf_of(found: Any, windows: dict[int, int]) -> Leaf:
    if isinstance(found, mlx_lm_cache.ArraysCache):
        return State(found.nbytes, stored_of(found.cache))
    if found.fetched is None:
        return Unused()
    key, value = found.fetched
    return Attention(
        num_kv_heads=key.shape[1],
        key_dim=key.shape[3],
        value_dim=0 if value is key else value.shape[3],
        dtype=DTYPE_NAMES[key.dtype],
        # The mask's window is the model's. PLaMo 3 masks one token more than its cache holds.
        window=windows.get(found.ring, found.ring),
        chunk=found.chunk,
        value_is_key=value is key,
        shared=found.shared,
        query_heads=found.query_heads,
        takes_array=found.takes_array,
    )
