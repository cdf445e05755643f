"""A bridged model's cache made of what a snapshot says of itself: no model is needed until it is used."""

import json
from collections.abc import Iterator
from typing import Any

from mlx_lm.models.cache import ArraysCache, CacheList
from mlx_lm.models.cache import KVCache as MlxLmKVCache

from kvant.bridge import hook
from kvant.bridge.cache import BridgedCache, Layer
from kvant.bridge.layers import BridgedChunkCache, BridgedKVCache, BridgedWindowCache
from kvant.bridge.state_layer import StateCache
from kvant.cache.layer_format import LayerFormat, parse_stored
from kvant.cache.snapshot_header import SnapshotHeader
from kvant.cache.without_model import check_reservation, layer_options


def make_cache(header: SnapshotHeader, max_seq_len: int | None) -> BridgedCache:
    """An empty cache for a bridged model's snapshot.

    Args:
        header: of the snapshot; it has a layout.
        max_seq_len: the reservation.

    Raises:
        ValueError: a layout that is none, layers that are not those of the layout, or more than this machine's memory;
            nothing was allocated.
    """
    batch = len(header.lengths)
    if max_seq_len is None:
        raise ValueError("reservation is None; expected a number of tokens")
    check_reservation(header.layers, batch, max_seq_len)
    formats: Iterator[LayerFormat] = iter(header.layers)
    layers: list[Layer] = []

    def one(place: Any, outer: bool = True) -> Any:
        if isinstance(place, list) and outer:
            return CacheList(*(one(part, outer=False) for part in place))
        kind = place.get("kind") if isinstance(place, dict) else None
        if kind == "unused":
            return MlxLmKVCache()
        form = next(formats, None)
        if form is None or (form.kind == "state") != (kind == "state") or kind not in ("state", "attention"):
            raise ValueError("its layers are not those of its layout")
        if kind == "state":
            shapes = place.get("shapes")
            if not isinstance(shapes, list) or len(shapes) != len(form.state):
                raise ValueError("its layout has a state with other arrays than its layers")
            expected = tuple(map(parse_stored, shapes))
            layers.append(StateCache(ArraysCache(len(shapes)), max_seq_len, batch=batch, shapes=expected))
            return layers[-1].arrays
        layers.append(make_layer(form, max_seq_len, batch))
        return layers[-1]

    places = json.loads(header.layout)
    if not isinstance(places, list):
        raise ValueError("its layout is no list")
    entries = list(map(one, places))
    if next(formats, None) is not None:
        raise ValueError("its layers are not those of its layout")
    hook.install()
    return BridgedCache(entries, layers, layout=header.layout)


def make_layer(form: LayerFormat, max_seq_len: int, batch: int) -> BridgedKVCache:
    """An empty layer of a format.

    Raises:
        ValueError: a format that no bridged layer has.
    """
    options: dict[str, Any] = layer_options(form, batch) | {"shared": form.shared}
    if form.split_pairs is not None or form.kind not in ("quantized", "chunks"):
        raise ValueError(f"a layer of kind {form.kind!r} in a bridged model's cache")
    if form.window is not None:
        options |= {"window": form.window, "keep": form.keep, "slack": form.slack}
    elif form.kind == "chunks":
        raise ValueError("chunks without a length")
    kind = BridgedKVCache if form.window is None else BridgedWindowCache
    kind = BridgedChunkCache if form.kind == "chunks" else kind
    return kind(max_seq_len, form.num_kv_heads, form.head_dim, **options)
