"""The key/value cache of a model of mlx-lm's: what mlx-lm's model expects at each place, in kvant's memory."""

from collections import Counter
from collections.abc import Collection, Sequence
from functools import partial

from kvant.bridge.pool import BridgedBatch, BridgedPool, CacheBytes, reserve
from kvant.bridge.probe import Attention, Entry, Model, leaves_of, probe
from kvant.cache import ModelCache
from kvant.cache.layer_format import DTYPES, LayerFormat, State, describe_formats
from kvant.cache.options import DEFAULT_OPTIONS, CacheOptions
from kvant.cache.pool import check_sizes, rows_alone, sizes_alone
from kvant.sizes import format_bytes


class BridgedCache(ModelCache, BridgedBatch):
    """A model's cache for kvant's loop, whose :attr:`entries` mlx-lm's model takes as its own.

    A step is :meth:`begin`, a call of the model with the entries, and :meth:`commit`.
    """

    pool: BridgedPool

    def __init__(self, pool: BridgedPool, kv_group_size: int, absent: Collection[int] = ()) -> None:
        """``kv_group_size``: that was asked for. ``absent`` is as in :func:`make_model_cache`."""
        super().__init__(pool)
        self._group = kv_group_size
        held = [entry for number, entry in enumerate(pool.entries) if number not in absent]
        self._num_states = len(leaves_of(held, State))

    @property
    def used(self) -> CacheBytes:
        """:attr:`nbytes` by kind."""
        return CacheBytes(self.keys_values, self.nbytes - self.keys_values)

    def describe(self) -> list[str]:
        """What it is made of, a line for each kind of layer, and where a group is not the one asked for."""
        held = [layer for layer in self.pool.layers if layer.format.num_kv_heads]
        kinds = Counter(_described(layer.format, self.max_seq_len, layer.nbytes) for layer in held)
        now = f"state, mlx-lm's own, {format_bytes(self.used.state)}" if self.used.state else "state, mlx-lm's own"
        groups = Counter(layer.format.kv_group_size for layer in held if layer.format.kv_bits)
        return [
            *(f"{_counted(count)}: {kind}" for kind, count in kinds.items()),
            *([f"{_counted(self._num_states)}: {now}"] if self._num_states else []),
            *(
                f"groups of {group} in {_counted(count)}: {self._group} does not divide every width there"
                for group, count in groups.items()
                if group != self._group
            ),
        ]


def make_model_cache(
    model: Model,
    max_seq_len: int,
    options: CacheOptions = DEFAULT_OPTIONS,
    *,
    found: Sequence[Entry] | None = None,
    absent: Collection[int] = (),
) -> BridgedCache:
    """A cache of mlx-lm's model for kvant's loop; errors as :func:`kvant.make_prompt_cache` has them.

    Args:
        found: by a probe of the model; None: it is probed.
        absent: the numbers of the model's caches that hold nothing here, because another process computes their layers.
            Offsets and masks are as in the others.
    """
    check_sizes(max_seq_len=max_seq_len)
    found = probe(model) if found is None else found
    dtype = next((leaf.dtype for leaf in leaves_of(found, Attention)), "F32")
    make_cache = partial(make_model_cache, model, options=options, found=found, absent=absent)
    pool = reserve(found, sizes_alone(max_seq_len), options, dtype=DTYPES[dtype], make_cache=make_cache, absent=absent)
    return BridgedCache(pool, options.kv_group_size, absent)


def _counted(layers: int) -> str:
    return "1 layer" if layers == 1 else f"{layers} layers"


def _described(own: LayerFormat, max_seq_len: int, nbytes: int) -> str:
    kind = "chunks" if own.kind == "chunks" else "a window"
    seen = "" if own.window is None else f" for {kind} of {own.window} tokens"
    how = describe_formats([own]).partition(",")[0] if own.kv_bits else "not quantized"
    return f"{rows_alone(own.window, max_seq_len)} rows{seen}, {how}, {format_bytes(nbytes)}"
