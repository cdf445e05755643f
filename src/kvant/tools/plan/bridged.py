"""The memory of a model that mlx-lm's class computes: of the class itself, made lazily, whose shapes say everything."""

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvant.bridge.config import BridgedConfig, check
from kvant.errors import ModelError
from kvant.tools.plan.stored import Loading, Part

if TYPE_CHECKING:
    import mlx.core as mx
    from mlx.nn.layers.base import Module

    from kvant.bridge.layer_list import LayerList
    from kvant.bridge.probe import Entry

FLOAT32 = 4  # bytes
# What one call of attention on a CPU may hold: scores, with the mask, and their softmax.
SCORE_COPIES = 3
# Of each projection's output: as it came, as it goes on, and sums of it.
OUTPUT_COPIES = 3
# A linear layer goes from token to token. So many of its states are held by what MLX has queued.
QUEUED_STATES = 64
# A layer's keys and values are dequantized to float32, through as much again.
DEQUANTIZED_COPIES = 2
LOGITS_COPIES = 5
HEADS_KEYS = ("num_attention_heads", "n_head", "n_heads", "num_heads")


@dataclass(frozen=True, slots=True)
class BridgedNeeds:
    """Bytes of a run beside the weights; as the attributes of :class:`kvant.tools.plan.MemoryPlan`.

    ``one_cache``: of the keys, values and states of a conversation's cache.
    """

    cache: int
    state: int
    scratch: int
    one_cache: int
    sequence: int = 0


class BridgedCheckpoint:
    """The facts of a bridged model that decide its memory: what :class:`kvant.tools.plan.Checkpoint` is for others.

    Attributes:
        config: its facts.
        float_bytes: of a stored floating-point number.
        described: how its weights are stored, in words; {} is the bits of a number as it is computed with.
        part: that one rank of several has; None: it is the whole model.
    """

    def __init__(self, raw: Mapping[str, Any], config: BridgedConfig, make: "Callable[[], Module]") -> None:
        """``make``: the lazy module, with parameters as they are stored."""
        from kvant.bridge.folder import describe_formats, main_dtype

        self.config = config
        self.part: Part | None = None
        self._raw = raw
        self._make = make
        self._modules: dict[bool, Module] = {}
        self._entries: dict[bool, list[Entry]] = {}
        self._lists: list[LayerList] = []
        self._grouped: dict[bool, dict[int | None, dict[str, mx.array]]] = {}
        self._layers: range | None = None
        self.float_bytes = main_dtype(self._module(on_cpu=False)).size
        self.described = describe_formats(raw) or "{} bits"

    @classmethod
    def from_folder(cls, folder: Path) -> "BridgedCheckpoint":
        """From a model folder: config.json, and the headers of its tensors.

        Raises:
            ModelError, CheckpointError: as :func:`kvant.bridge.folder.check_bridged`.
        """
        from kvant.bridge.config import read_folder
        from kvant.bridge.folder import check_bridged

        module, config = check_bridged(folder, whole=False)  # whether it fits is what the plan says
        ready = [module]
        return cls(read_folder(folder), config, lambda: ready.pop() if ready else check_bridged(folder, whole=False)[0])

    @classmethod
    def from_facts(cls, raw: Mapping[str, Any]) -> "BridgedCheckpoint":
        """From a config.json already parsed: matrices count as quantized as mlx-lm's converter quantizes them.

        Raises:
            ModelError: a model kvant does not support.
        """
        import mlx.core as mx

        from kvant.bridge.folder import build, quantize_all

        check(raw)
        text = raw.get("text_config")
        holders = [raw, *([text] if isinstance(text, dict) else [])]
        said = [holder.get(key) for holder in holders for key in ("dtype", "torch_dtype") if holder.get(key)]
        dtype = {"float32": mx.float32, "float16": mx.float16}.get(str(said[0]) if said else "", mx.bfloat16)

        def make() -> "Module":
            module, _ = build(raw)
            module.apply(lambda array: array.astype(dtype) if mx.issubdtype(array.dtype, mx.floating) else array)
            quantize_all(module, raw)
            return module

        return cls(raw, build(raw)[1], make)

    def adapted(self, folder: Path) -> "BridgedCheckpoint":
        """Refused, as by loading."""
        raise ModelError(f"{folder}: adapters are applied to architectures of kvant's own; this model is mlx-lm's")

    def quantized(self, bits: int, group_size: int) -> "BridgedCheckpoint":
        """Refused, as by ``kvant convert``."""
        raise ModelError(
            "`kvant convert` quantizes architectures of kvant's own; this model is mlx-lm's: mlx_lm.convert"
        )

    @property
    def num_layers(self) -> int:
        """That a pipeline deals out.

        Raises:
            ModelError: mlx-lm's model has no list of layers that exchange hidden states alone.
        """
        return len(self._list().paths)

    def stage(self, rank: int, layers: range) -> "BridgedCheckpoint":
        """The part that a rank of a pipeline has: these layers, on rank 0 also all that is in no layer."""
        made = copy(self)
        made.part, made._layers = Part(rank, has_ends=rank == 0), layers
        return made

    def layer_kind(self, layer: int) -> "tuple[Entry, ...]":
        """What a run's bytes depend on: what the layer asks of its caches."""
        return tuple(self._probed(on_cpu=False)[cache] for cache in self._list().caches[layer])

    def itemsize(self, *, on_cpu: bool) -> int:
        """Bytes of a number as it is computed with."""
        return FLOAT32 if on_cpu else self.float_bytes

    def loading(self, *, on_cpu: bool) -> Loading:
        """The weights, and what it takes to load them: a layer's tensors as stored, put together, and cast."""
        sizes = (sum(array.nbytes for array in own.values()) for own in self._groups(on_cpu))
        return reduce(Loading.then, (Loading(size, 3 * size) for size in sizes), Loading())

    def read_bytes(self, *, on_cpu: bool) -> int:
        """Bytes of the weights that one token reads."""
        from kvant.bridge.model import bytes_read

        held = {name for group in self._groups(on_cpu) for name in group}
        return bytes_read(self._module(on_cpu), self.config.experts_used, held)

    def needs(
        self,
        *,
        kv_bits: int,
        kv_group_size: int,
        prefill_step_size: int,
        on_cpu: bool,
        sequences: int | None = None,
        pool_tokens: Callable[[int], int] = int,
    ) -> Callable[[int], BridgedNeeds]:
        """The bytes of a run by tokens reserved, all of them used. Cache and state are exact. Scratch is an estimate.

        Args:
            sequences: of a pool; None: a cache of one sequence.
            pool_tokens: the tokens of such a pool, by those of one sequence.

        Raises:
            ModelError: a pool of a model that has none, or of several machines, which have none for such models.
            ValueError: a cache format that is none, or a cache that kvant has nothing for.
        """
        from kvant.bridge.cache import entries_bytes
        from kvant.bridge.pool import check_entries, pool_needs
        from kvant.bridge.probe import Attention, State

        module, entries = self._module(on_cpu), self._held_entries(on_cpu)
        if sequences is not None and self.part is not None:
            raise ModelError(f"{self.config.model_type} on several machines takes one sequence at a time")
        if sequences is not None:
            check_entries(entries, module, self.config.model_type)
        leaves = [leaf for entry in entries for leaf in (entry if isinstance(entry, tuple) else (entry,))]
        row = max((a.num_kv_heads * (a.key_dim + a.value_dim) for a in leaves if isinstance(a, Attention)), default=0)
        state = max((leaf.nbytes for leaf in leaves if isinstance(leaf, State)), default=0)
        heads = self._heads()
        outputs = _widest_layer(module, self.config.experts_used)
        samples = self.part is None or self.part.rank == 0

        def chunk(new: int, tokens: int, count: int = 1) -> int:
            """Of ``count`` sequences."""
            numbers = OUTPUT_COPIES * outputs * new + SCORE_COPIES * heads * new * tokens
            return count * (FLOAT32 * (numbers + DEQUANTIZED_COPIES * row * tokens) + min(new, QUEUED_STATES) * state)

        def pool(tokens: int, in_all: int, count: int) -> tuple[int, int]:
            sizes = {"tokens": in_all, "sequences": count, "max_seq_len": tokens}
            sizes["prefill_step_size"] = prefill_step_size
            return pool_needs(entries, sizes, quant_bit=kv_bits, quant_group=kv_group_size)

        def needed(tokens: int) -> BridgedNeeds:
            one = entries_bytes(entries, tokens, quant_bit=kv_bits, quant_group=kv_group_size)
            logits = LOGITS_COPIES * FLOAT32 * self.config.vocab_size * samples
            prefill = chunk(min(prefill_step_size, tokens), tokens)
            if sequences is None:
                scratch = max(prefill, chunk(1, tokens) + logits) + one.state
                held = one.keys_values + one.state
                return BridgedNeeds(one.keys_values, one.state, scratch, held)
            in_all = pool_tokens(tokens)
            cache, states = pool(tokens, in_all, sequences)
            more = sum(pool(tokens, in_all + pool_tokens(tokens) // sequences, sequences + 1)) - cache - states
            each = min(tokens, -(-in_all // sequences))  # of the sequences of a step, on average
            scratch = max(prefill, chunk(1, each, sequences) + sequences * logits) + states
            return BridgedNeeds(cache, states, scratch, one.keys_values + one.state, sequence=more)

        return needed

    def _module(self, on_cpu: bool) -> "Module":
        from kvant.bridge.folder import compute_in_float32

        if on_cpu not in self._modules:
            self._modules[on_cpu] = self._make()
            if on_cpu:
                compute_in_float32(self._modules[on_cpu])
        return self._modules[on_cpu]

    def _probed(self, on_cpu: bool) -> "list[Entry]":
        """What the model asks of its caches."""
        from kvant.bridge.probe import probe

        if on_cpu not in self._entries:
            self._entries[on_cpu] = probe(self._module(on_cpu))
        return self._entries[on_cpu]

    def _list(self) -> "LayerList":
        from kvant.bridge.folder import build
        from kvant.bridge.layer_list import list_layers

        if not self._lists:
            self._lists.append(list_layers(build(self._raw)[0], self.config.model_type))
        return self._lists[0]

    def _held_entries(self, on_cpu: bool) -> "list[Entry]":
        """What the layers that are here ask of their caches; rank 0 has those of no layer."""
        entries = self._probed(on_cpu)
        if self._layers is None:
            return entries
        caches = self._list().caches
        own = {cache for number in self._layers for cache in caches[number]}
        if self.part is not None and self.part.has_ends:
            own |= set(range(len(entries))) - {cache for each in caches for cache in each}
        return [entries[cache] for cache in sorted(own)]

    def _groups(self, on_cpu: bool) -> "list[dict[str, mx.array]]":
        """The arrays that are here, by layer in the order in which they are read."""
        from kvant.bridge.model import by_layer, parameters

        module = self._module(on_cpu)
        if self._layers is None:
            return list(by_layer(module).values())
        # By the number of a layer; None: in none.
        if on_cpu not in self._grouped:
            numbers = {path: number for number, path in enumerate(self._list().paths)}
            grouped: dict[int | None, dict[str, mx.array]] = {None: {}, **{number: {} for number in numbers.values()}}
            for name, array in parameters(module).items():
                parts = name.split(".")
                above = (numbers.get(".".join(parts[:length])) for length in range(1, len(parts)))
                number = next((found for found in above if found is not None), None)
                grouped[number][name] = array
            self._grouped[on_cpu] = grouped
        has_ends = self.part is not None and self.part.has_ends
        return [self._grouped[on_cpu][number] for number in (*([None] if has_ends else []), *self._layers)]

    def _heads(self) -> int:
        text = self._raw.get("text_config")
        for holder in (self._raw, text if isinstance(text, dict) else {}):
            for key in HEADS_KEYS:
                if type(holder.get(key)) is int:
                    return int(holder[key])
        return 32


def _widest_layer(module: "Module", experts_used: int | None) -> int:
    """The numbers a token's products have in the layer that has most, of its experts those that are used."""
    from kvant.bridge.model import by_layer

    def outputs(arrays: Mapping[str, "mx.array"]) -> int:
        matrices = [a.shape for name, a in arrays.items() if name.endswith("weight") and a.ndim > 1]
        return sum(shape[-2] * ((experts_used or shape[0]) if len(shape) == 3 else 1) for shape in matrices)

    # An embedding is in no layer, nor is a head: its products are counted as logits.
    return max((outputs(arrays) for layer, arrays in by_layer(module).items() if layer), default=0)
