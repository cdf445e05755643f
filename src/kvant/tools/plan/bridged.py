"""The memory of a model that mlx-lm's class computes: of the class itself, made lazily, whose shapes say everything."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvant.bridge.config import BridgedConfig, check
from kvant.errors import ModelError

if TYPE_CHECKING:
    import mlx.core as mx
    from mlx.nn.layers.base import Module

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
    """Bytes of a run; as the attributes of :class:`kvant.tools.plan.MemoryPlan`.

    ``one_cache``: of the keys, values and states of a conversation's cache.
    """

    weights: int
    weights_read: int
    cache: int
    state: int
    scratch: int
    loading: int
    one_cache: int
    sequence: int = 0


class BridgedCheckpoint:
    """The facts of a bridged model that decide its memory: what :class:`kvant.tools.plan.Checkpoint` is for others.

    Attributes:
        config: its facts.
        float_bytes: of a stored floating-point number.
        described: how its weights are stored, in words; {} is the bits of a number as it is computed with.
    """

    def __init__(self, raw: Mapping[str, Any], config: BridgedConfig, make: "Callable[[], Module]") -> None:
        """``make``: the lazy module, with parameters as they are stored."""
        from kvant.bridge.folder import describe_formats, main_dtype

        self.config = config
        self._raw = raw
        self._make = make
        self._modules: dict[bool, Module] = {}
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

        module, config = check_bridged(folder)
        ready = [module]
        return cls(read_folder(folder), config, lambda: ready.pop() if ready else check_bridged(folder)[0])

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
        """The bytes of a run by tokens reserved, all of them used. Cache and state are exact, and weights of a folder.
        Scratch and loading are estimates.

        Args:
            sequences: of a pool; None: a cache of one sequence.
            pool_tokens: the tokens of such a pool, by those of one sequence.

        Raises:
            ModelError: a pool of a model that has none.
            ValueError: a cache format that is none, or a cache that kvant has nothing for.
        """
        from kvant.bridge.cache import entries_bytes
        from kvant.bridge.model import by_layer, bytes_read
        from kvant.bridge.pool import check_entries, pool_needs
        from kvant.bridge.probe import Attention, State, probe

        module = self._module(on_cpu)
        entries = probe(module)
        if sequences is not None:
            check_entries(entries, module, self.config.model_type)
        leaves = [leaf for entry in entries for leaf in (entry if isinstance(entry, tuple) else (entry,))]
        layers = [sum(array.nbytes for array in own.values()) for own in by_layer(module).values()]
        weights, read = sum(layers), bytes_read(module, self.config.experts_used)
        loading = weights + 2 * max(layers, default=0)  # a layer's tensors as stored, put together, and cast
        row = max((a.num_kv_heads * (a.key_dim + a.value_dim) for a in leaves if isinstance(a, Attention)), default=0)
        state = max((leaf.nbytes for leaf in leaves if isinstance(leaf, State)), default=0)
        heads = self._heads()
        outputs = _widest_layer(module, self.config.experts_used)

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
            logits = LOGITS_COPIES * FLOAT32 * self.config.vocab_size
            prefill = chunk(min(prefill_step_size, tokens), tokens)
            if sequences is None:
                scratch = max(prefill, chunk(1, tokens) + logits) + one.state
                held = one.keys_values + one.state
                return BridgedNeeds(weights, read, one.keys_values, one.state, scratch, loading, held)
            in_all = pool_tokens(tokens)
            cache, states = pool(tokens, in_all, sequences)
            more = sum(pool(tokens, in_all + pool_tokens(tokens) // sequences, sequences + 1)) - cache - states
            each = min(tokens, -(-in_all // sequences))  # of the sequences of a step, on average
            scratch = max(prefill, chunk(1, each, sequences) + sequences * logits) + states
            return BridgedNeeds(
                weights, read, cache, states, scratch, loading, one.keys_values + one.state, sequence=more
            )

        return needed

    def _module(self, on_cpu: bool) -> "Module":
        from kvant.bridge.folder import compute_in_float32

        if on_cpu not in self._modules:
            self._modules[on_cpu] = self._make()
            if on_cpu:
                compute_in_float32(self._modules[on_cpu])
        return self._modules[on_cpu]

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
