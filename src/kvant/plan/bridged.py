"""The memory of a bridged model, from the shapes of mlx-lm's class, which is made lazily."""

from collections import Counter
from collections.abc import Callable, Mapping
from copy import copy
from functools import cache, partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvant.bridge.config import BridgedConfig, check, is_bridged
from kvant.cache.layer_format import DTYPES, MAX_NUMBER, State
from kvant.cache.options import CacheOptions
from kvant.errors import ModelError, library_errors
from kvant.files import read_json
from kvant.plan.decoder import FLOAT32, LOGITS_COPIES
from kvant.plan.facts import Facts, Layer
from kvant.plan.stored import Checkpoint, Loading, Shard

if TYPE_CHECKING:
    import mlx.core as mx
    from mlx.nn.layers.base import Module

    from kvant.bridge.probe import Entry

# Copies of each projection's output, processed forms and sums. (MLX 0.32.4, 2026-11-29: with 2 the lowest
# plan was 0.90 of its peak.)
OUTPUT_COPIES = 3
# Jamba makes states for all tokens of a chunk: 13 with everything else. (MLX 0.32.4, 2026-11-29.)
STATES_OF_A_TOKEN = {"jamba": 10}
HEADS_KEYS = ("num_attention_heads", "n_head", "n_heads", "num_heads")


class BridgedCheckpoint:
    """The facts that decide a bridged model's memory, as :class:`kvant.plan.Checkpoint` for decoders."""

    def __init__(self, raw: Mapping[str, Any], config: BridgedConfig, make: "Callable[[], Module]") -> None:
        """``make``: returns the lazy module, with parameters in stored form."""
        from kvant.bridge.folder import build, compute_in_float32, describe_formats, main_dtype
        from kvant.bridge.probe import probe
        from kvant.ranks.layer_list import list_layers

        def module(on_cpu: bool) -> "Module":
            made = make()
            if on_cpu:
                compute_in_float32(made)
            return made

        self.config = config
        self.has_head = False  # whether the last of its caches is that of the head for drafts
        self.shard: Shard | None = None  # of one rank; None: the whole model
        self._raw = raw
        self._layers: range | None = None
        # Each is made once on demand; a stage shares those of the whole model.
        self.module = cache(module)
        self._probed = cache(lambda on_cpu: probe(self.module(on_cpu)))  # the model's cache entries
        self._list = cache(lambda: list_layers(build(raw)[0], config.model_type))
        self._by_number = cache(self._grouped)
        self.float_bytes = main_dtype(self.module(False)).size
        # how weights are stored; {} stands for the bits of the compute dtype
        self.described = describe_formats(raw) or "{} bits"

    @classmethod
    def from_folder(cls, folder: Path, *, head: bool = False) -> "BridgedCheckpoint":
        """Make it from a model folder's config.json and tensor headers.

        ``head``: include the head for drafts.
        """
        from kvant.bridge.config import read_folder
        from kvant.bridge.folder import check_bridged

        # the plan itself decides whether it fits
        check = partial(check_bridged, folder, whole=False, head=head)
        module, config = check()
        ready = [module]
        made = cls(read_folder(folder), config, lambda: ready.pop() if ready else check()[0])
        made.has_head = head
        return made

    @classmethod
    def from_facts(cls, raw: Mapping[str, Any]) -> "BridgedCheckpoint":
        """Make it from a parsed config.json; matrices are quantized as by mlx-lm's converter."""
        import mlx.core as mx

        from kvant.bridge.folder import build, quantize_modules

        check(raw)
        text = raw.get("text_config")
        holders = [raw, *([text] if isinstance(text, dict) else [])]
        said = [holder.get(key) for holder in holders for key in ("dtype", "torch_dtype") if holder.get(key)]
        dtype = {"float32": mx.float32, "float16": mx.float16}.get(str(said[0]) if said else "", mx.bfloat16)

        def make() -> "Module":
            module, _ = build(raw)
            module.apply(
                lambda array: array.astype(dtype) if mx.issubdtype(array.dtype, mx.floating) else array
            )
            with library_errors(ModelError, f"config.json: MLX cannot quantize a {raw['model_type']} so"):
                quantize_modules(module, raw)
            return module

        return cls(raw, build(raw)[1], make)

    def adapted(self, folder: Path) -> "BridgedCheckpoint":
        """Raise a ModelError, like loading."""
        raise ModelError(
            f"{folder}: adapters are applied to architectures of kvant's own; this model is mlx-lm's"
        )

    def quantized(self, bits: int, group_size: int) -> "BridgedCheckpoint":
        """Raise a ModelError, like ``kvant convert``."""
        raise ModelError(
            "`kvant convert` quantizes architectures of kvant's own; this model is mlx-lm's: mlx_lm.convert"
        )

    @property
    def num_layers(self) -> int:
        """Return the layers of a pipeline; raise a ModelError if mlx-lm's model has no list of layers."""
        return len(self._list().paths)

    def stage(self, rank: int, layers: range) -> "BridgedCheckpoint":
        """Return a pipeline rank's shard: these layers and, on rank 0, everything outside of layers."""
        made = copy(self)
        made.shard = Shard(rank)
        made._layers = layers
        return made

    def layer_kind(self, layer: int) -> "tuple[Entry, ...]":
        """Return the layer's cache entries, which decide the bytes of a run."""
        return tuple(self._probed(False)[number] for number in self._list().caches[layer])

    @property
    def moves_on(self) -> bool:
        """Return whether sequences cannot go back to every place, because layers have states or windows."""
        from kvant.bridge.probe import Attention, leaves_of

        leaves = leaves_of(self._probed(False))
        return any(not isinstance(leaf, Attention) or (leaf.window or leaf.chunk) for leaf in leaves)

    def itemsize(self, *, on_cpu: bool) -> int:
        """Return the bytes of a number of the compute dtype."""
        return 4 if on_cpu else self.float_bytes

    def loading(self, *, on_cpu: bool) -> Loading:
        """Return the bytes of weights and of loading them: a layer's tensors stored, combined, and cast."""
        sizes = (sum(array.nbytes for array in group.values()) for group in self._groups(on_cpu))
        return reduce(Loading.then, (Loading(size, 3 * size) for size in sizes), Loading())

    def read_bytes(self, *, on_cpu: bool) -> int:
        """Return the bytes of weights that one token reads."""
        from kvant.bridge.model import bytes_read

        names = {name for group in self._groups(on_cpu) for name in group}
        return bytes_read(self.module(on_cpu), self.config.experts_used, names)

    def resident_entries(self, on_cpu: bool) -> "list[Entry]":
        """Return the cache entries of the shard's layers; rank 0 has those outside of layers."""
        entries = self._probed(on_cpu)
        if self._layers is None:
            return entries
        caches = self._list().caches
        resident = {entry for number in self._layers for entry in caches[number]}
        if self.shard is not None and self.shard.has_ends:
            resident |= set(range(len(entries))) - {entry for each in caches for entry in each}
        return [entries[entry] for entry in sorted(resident)]

    def _groups(self, on_cpu: bool) -> "list[dict[str, mx.array]]":
        """Return the shard's arrays by layer, in the order in which they are read."""
        from kvant.bridge.model import by_layer

        if self._layers is None:
            return list(by_layer(self.module(on_cpu)).values())
        has_ends = self.shard is not None and self.shard.has_ends
        return [self._by_number(on_cpu)[number] for number in (*([None] if has_ends else []), *self._layers)]

    def _grouped(self, on_cpu: bool) -> "dict[int | None, dict[str, mx.array]]":
        """Return all arrays by the number of their layer, or None."""
        from kvant.bridge.model import parameters

        numbers = {path: number for number, path in enumerate(self._list().paths)}
        grouped: dict[int | None, dict[str, mx.array]] = {
            None: {},
            **{number: {} for number in numbers.values()},
        }
        for name, array in parameters(self.module(on_cpu)).items():
            parts = name.split(".")
            above = (numbers.get(".".join(parts[:length])) for length in range(1, len(parts)))
            grouped[next((number for number in above if number is not None), None)][name] = array
        return grouped

    def heads(self) -> int:
        """Return the number of query heads of a layer."""
        text = self._raw.get("text_config")
        for holder in (self._raw, text if isinstance(text, dict) else {}):
            for key in HEADS_KEYS:
                if type(holder.get(key)) is int:
                    return int(holder[key])
        return 32


def bridged_facts(
    checkpoint: BridgedCheckpoint, cache: CacheOptions, *, on_cpu: bool, in_pool: bool
) -> Facts:
    """Return the facts; raise a ModelError if the model does not support a pool."""
    from kvant.bridge.pool import check_entries, formats_of
    from kvant.bridge.probe import Attention, leaves_of

    config = checkpoint.config
    shard = checkpoint.shard
    entries = checkpoint.resident_entries(on_cpu)
    module = checkpoint.module(on_cpu)
    if in_pool and shard is not None:
        raise ModelError(f"{config.model_type} on several machines takes one sequence at a time")
    if in_pool:
        check_entries(entries, module, config.model_type)
    formats = iter(formats_of(entries, MAX_NUMBER, cache))

    def layer(leaf: "Attention") -> Layer:
        layer_format = next(formats)
        return Layer(
            layer_format,
            leaf.query_heads or checkpoint.heads(),
            DTYPES[leaf.dtype],
            by_rows=bool(layer_format.tail_dtype),
            takes_mask=leaf.takes_array,
            makes_scores=not leaf.query_heads,
        )

    layers = [layer(leaf) if isinstance(leaf, Attention) else None for leaf in leaves_of(entries)]
    return Facts(
        layers,
        lambda max_seq_len: Counter(formats_of(entries, max_seq_len, cache)),
        token_bytes=FLOAT32 * OUTPUT_COPIES * _widest_layer(module, config.experts_used),
        sampled_bytes=LOGITS_COPIES * FLOAT32 * config.vocab_size * (shard is None or shard.rank == 0),
        states=leaves_of(entries, State),
        states_of_a_token=STATES_OF_A_TOKEN.get(config.model_type, 0),
    )


def _widest_layer(module: "Module", experts_used: int | None) -> int:
    """Return the largest number of a token's products in a layer, counting only the experts used."""
    from kvant.bridge.model import by_layer

    def outputs(arrays: "Mapping[str, mx.array]") -> int:
        matrices = [a.shape for name, a in arrays.items() if name.endswith("weight") and a.ndim > 1]
        return sum(shape[-2] * ((experts_used or shape[0]) if len(shape) == 3 else 1) for shape in matrices)

    # Embedding and head are outside of layers; a head's products are counted as logits.
    return max((outputs(arrays) for layer, arrays in by_layer(module).items() if layer), default=0)


def read_folder(folder: Path, *, head: bool = False) -> Checkpoint | BridgedCheckpoint:
    """Read a model folder's facts, without reading tensors; raise a ModelError if it is not supported.

    ``head``: include the head for drafts.
    """
    if is_bridged(read_json(folder / "config.json")):
        return BridgedCheckpoint.from_folder(folder, head=head)
    return Checkpoint.from_folder(folder, head=head)


def read_facts(raw: Mapping[str, Any], file_bytes: int | None = None) -> Checkpoint | BridgedCheckpoint:
    """Return the facts for a parsed config.json and the total bytes of its safetensors files, if known."""
    return BridgedCheckpoint.from_facts(raw) if is_bridged(raw) else Checkpoint.from_facts(raw, file_bytes)
