"""One way of generating for each engine: load, then greedy tokens one by one, to the very end of --max-tokens.

Every adapter computes the same: the prompt, then one step for every token, the step after the last one included, for
mlx-lm queues it before it hands that token over; kvant is made to do so too.
"""

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx

from kvant.cache import FullKVCache, ModelCache, QuantizedKVCache
from kvant.engine.run import Run
from kvant.engine.sampling import greedy, sample
from kvant.errors import CheckpointError
from kvant.files import read_json
from kvant.models.checkpoint import check_folder, load_decoder
from kvant.tools.bench import bytes as model
from kvant.tools.bench.bytes import AttentionStep, Traffic
from kvant.tools.bench.engines import EngineSpec

Tokens = Generator[int, None, None]


@dataclass(frozen=True, slots=True)
class CacheSize:
    """Bytes a cache holds after a run, and bytes one decode step reads of it for each cached token."""

    nbytes: int
    nbytes_per_token: float


class Adapter(Protocol):
    """A loaded engine."""

    @property
    def dtype(self) -> str:
        """What activations are computed in."""

    @property
    def weight_bytes(self) -> tuple[int, int]:
        """Bytes of all weights, and of those one decode step reads."""

    def tokens(self, prompt: Sequence[int], max_tokens: int) -> Tokens:
        """At least ``max_tokens`` greedy tokens, whatever they are; the cache is made when the first is asked for."""

    def cache_size(self) -> CacheSize:
        """Of the cache of the last run; waits until the device has done all it was given."""

    def attention_traffic(self, rows: int) -> Traffic | None:
        """What attention of all layers moves in one decode step over ``rows`` cached tokens; None: not modelled."""


def load_adapter(spec: EngineSpec, folder: Path, prefill_step_size: int) -> Adapter:
    """Load the model as this engine runs it.

    Raises:
        KvantError: a folder kvant cannot load.
        Exception: whatever mlx-lm raises for one.
    """
    if spec.name == "mlx-lm":
        return MLXLM(spec, folder, prefill_step_size)
    kind = Recompute if spec.name == "none" else Kvant
    return kind(spec, folder, prefill_step_size)


class Kvant:
    """kvant's decoder with its own cache, or, as ``concat``, with the one that grows by concatenation."""

    def __init__(self, spec: EngineSpec, folder: Path, prefill_step_size: int) -> None:
        self._model = load_decoder(folder)
        self._spec = spec
        self._prefill_step_size = prefill_step_size
        self._cache: ModelCache | None = None

    @property
    def dtype(self) -> str:
        """The decoder's."""
        return dtype_name(self._model.dtype)

    @property
    def weight_bytes(self) -> tuple[int, int]:
        """As the decoder holds them."""
        return self._model.nbytes, self._model.nbytes_read

    def tokens(self, prompt: Sequence[int], max_tokens: int) -> Tokens:
        """Prefill and decode, without text."""
        self._cache = None  # the last run's, before the next is reserved
        cache = self._cache = self._make_cache(len(prompt) + max_tokens)
        # One more than is taken, so that the step after the last token is queued.
        run = Run(self._model, prompt, cache, max_tokens=max_tokens + 1, prefill_step_size=self._prefill_step_size)
        for token, _ in run:
            yield token

    def cache_size(self) -> CacheSize:
        """Exact; biases that are the same for every token are not read once for each."""
        mx.synchronize()
        per_token = 0.0
        for layer in self._cache or ():
            if isinstance(layer, FullKVCache):
                per_token += layer.nbytes / max(1, layer.offset)
            elif isinstance(layer, QuantizedKVCache):
                tables = [] if layer.bias_split is None else [layer.bias_split.rotation]
                parts = [part for part in (layer.cache, layer.scale, *tables) if part is not None]
                per_token += sum(part.nbytes for part in parts) / layer.max_seq_len
        return CacheSize(sum(layer.nbytes for layer in self._cache or ()), per_token)

    def attention_traffic(self, rows: int) -> Traffic | None:
        """By the path a layer takes; that in MLX operations is compiled on a GPU, where MLX joins some of them."""
        on_gpu = mx.default_device().type == mx.gpu
        traffic = Traffic()
        for layer in self._cache or ():
            step = AttentionStep(
                heads=self._model.config.num_attention_heads,
                kv_heads=self._model.config.num_key_value_heads,
                head_dim=self._model.config.head_dim,
                rows=rows,
                max_rows=layer.max_seq_len or rows,
                dtype=self._model.dtype,
                on_gpu=on_gpu,
            )
            if isinstance(layer, FullKVCache):
                traffic += model.total(model.concatenated(step))
                continue
            assert isinstance(layer, QuantizedKVCache)
            fused = layer.backend is not None
            if on_gpu and not fused:
                return None
            pairs = None if layer.bias_split is None else len(layer.bias_split.pairs)
            step = replace(step, bits=layer.quant_bit, group=layer.quant_group, pairs=pairs)
            traffic += model.total(model.fused(step) if fused else model.unfused(step))
        return traffic

    def _make_cache(self, max_seq_len: int) -> ModelCache:
        if self._spec.name == "concat":
            return ModelCache([FullKVCache() for _ in self._model.layers])
        bits, group = self._spec.kv_bits, self._spec.kv_group_size
        assert bits is not None  # kvant's spec has it
        if group is None:
            return self._model.make_cache(max_seq_len, quant_bit=bits, kernels=self._spec.kernels)
        return self._model.make_cache(max_seq_len, quant_bit=bits, quant_group=group, kernels=self._spec.kernels)


class Recompute(Kvant):
    """kvant's decoder without a cache: every token computes the whole sequence."""

    def tokens(self, prompt: Sequence[int], max_tokens: int) -> Tokens:
        """Each from the whole sequence before it; nothing to queue ahead, for nothing can be reused."""
        ids = list(prompt)
        for _ in range(max_tokens):
            logits = self._model.logits(self._model.hidden_states(mx.array(ids)[None])[:, -1])
            token, _ = sample(logits, None, greedy, ())
            ids.append(int(token.item()))  # type: ignore[arg-type]
            yield ids[-1]

    def attention_traffic(self, rows: int) -> None:
        """Not modelled: it is no decode step."""


class MLXLM:
    """mlx-lm's model, caches and generation step; with a dtype, its weights cast to that."""

    def __init__(self, spec: EngineSpec, folder: Path, prefill_step_size: int) -> None:
        from mlx_lm.utils import load_model

        config, tensors = check_folder(folder)
        unnamed = {*folder.glob("model*.safetensors")} - {*tensors.files}
        if unnamed:  # mlx-lm reads whatever is named like this, unchecked
            raise CheckpointError(f"{min(unnamed)}: not among the model's files; mlx-lm would read it")
        # Of the two places where config.json may have the rotary positions, 0.32.2 mostly reads one (docs/parity.md).
        raw = read_json(folder / "config.json")
        rope = {"rope_theta": config.rope.theta}
        scaling = raw.get("rope_scaling") or raw.get("rope_parameters")
        self._model, _ = load_model(folder, model_config=rope | ({"rope_scaling": scaling} if scaling else {}))
        if spec.dtype is not None:
            self._model.set_dtype(getattr(mx, spec.dtype))
            mx.eval(self._model.parameters())
        self._spec = spec
        self._prefill_step_size = prefill_step_size
        self._cache: list[Any] = []

    @property
    def dtype(self) -> str:
        """Of the last norm's weights, as it is of all that mlx-lm does not quantize."""
        return dtype_name(self._model.model.norm.weight.dtype)

    @property
    def weight_bytes(self) -> tuple[int, int]:
        """Of the parameters; an embedding table is read whole where it is the head too."""
        from mlx.utils import tree_flatten

        arrays: dict[str, mx.array] = dict(tree_flatten(self._model.parameters()))
        sizes = {name: array.nbytes for name, array in arrays.items()}
        total = sum(sizes.values())
        has_head = any(name.startswith("lm_head.") for name in sizes)
        table = sum(size for name, size in sizes.items() if name.startswith("model.embed_tokens."))
        return total, total - table if has_head else total

    def tokens(self, prompt: Sequence[int], max_tokens: int) -> Tokens:
        """mlx-lm's own loop, with the memory limit that its stream_generate sets on a Mac."""
        from mlx_lm.generate import generate_step, generation_stream, wired_limit
        from mlx_lm.models.cache import make_prompt_cache

        self._cache = []
        cache = self._cache = make_prompt_cache(self._model)  # quantized layers replace their own in this list
        quantization: dict[str, Any] = {}
        if self._spec.kv_bits:
            quantization = {"kv_bits": self._spec.kv_bits, "kv_group_size": self._spec.kv_group_size}
        steps = generate_step(
            mx.array(list(prompt)),
            self._model,
            max_tokens=max_tokens,
            sampler=greedy,
            prompt_cache=cache,
            prefill_step_size=self._prefill_step_size,
            quantized_kv_start=0,
            **quantization,
        )
        with wired_limit(self._model, [generation_stream]), closing(steps):
            for token, _ in steps:
                yield token

    def cache_size(self) -> CacheSize:
        """Of the buffers, which grow 256 tokens at a time."""
        from mlx_lm.generate import generation_stream

        mx.synchronize(generation_stream)
        per_token = 0.0
        for layer in self._cache or ():
            keys = layer.keys if isinstance(layer.keys, mx.array) else layer.keys[0]  # levels, scales, biases
            per_token += layer.nbytes / keys.shape[2]
        return CacheSize(sum(layer.nbytes for layer in self._cache or ()), per_token)

    def attention_traffic(self, rows: int) -> Traffic | None:
        """Of its quantized pair of products or of MLX's attention."""
        bits, group = self._spec.kv_bits or 0, self._spec.kv_group_size or 1
        traffic = Traffic()
        for layer in self._cache or ():
            keys, kind = (layer.keys[0], layer.keys[1]) if bits else (layer.keys, layer.keys)
            step = AttentionStep(
                heads=self._model.args.num_attention_heads,
                kv_heads=keys.shape[1],
                head_dim=keys.shape[3] * (32 // bits if bits else 1),
                rows=rows,
                max_rows=rows,
                bits=bits,
                group=group,
                dtype=kind.dtype,
                on_gpu=mx.default_device().type == mx.gpu,
            )
            traffic += model.total(model.mlx_lm_quantized(step) if bits else model.mlx_rows(step))
        return traffic


def dtype_name(dtype: mx.Dtype) -> str:
    """float32 rather than mlx.core.float32."""
    return str(dtype).removeprefix("mlx.core.")
