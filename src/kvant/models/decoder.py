"""The decoder, a stack of blocks. B batch, S new tokens, H query heads, K kv heads, D head_dim."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx

from kvant.cache import AttentionCache
from kvant.cache.layer_format import narrow_window
from kvant.cache.options import CacheOptions
from kvant.cache.pool import Pool, pool_bytes
from kvant.cache.pool_batch import PoolBatch
from kvant.models.bias import ProjectionBias
from kvant.models.cached_model import CachedModel
from kvant.models.caches import check_memory, layer_choice, pool_format
from kvant.models.config import ModelConfig
from kvant.models.inputs import Cached, Offset, check_offset, check_shape
from kvant.models.matrix import Linear, Matrix
from kvant.models.mlp import MLP, Experts
from kvant.models.mtp import Head
from kvant.operators.attention import attend_tokens
from kvant.operators.key_transform import PLAIN
from kvant.operators.masks import window_mask
from kvant.operators.normalization import rms_norm
from kvant.operators.rotary import Rotate
from kvant.threads import check_process

Pair = tuple[mx.array, mx.array]
Caches = Iterable[AttentionCache | None]  # of each layer; None: attend to the new tokens only


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention with rotary positions, through a cache."""

    config: ModelConfig
    qkv_proj: Linear
    qkv_bias: ProjectionBias | None
    head_norm: mx.array | None  # (H + K, 1, D), the RMSNorm weights of single query and key heads
    # (H D,) and (K D,), the RMSNorm weights of all query heads together, and of all key heads
    projection_norms: Pair | None
    o_proj: Linear
    rotates: bool  # whether queries and keys are rotated (RoPE)
    window: int | None  # number of last tokens that a query sees, including its own; None: all
    is_balanced: bool  # whether :func:`kvant.models.key_norms.balance_norms` changed the norms

    def __call__(self, x: mx.array, rotate: Rotate, cache: AttentionCache | None) -> mx.array:
        """(B, S, hidden) -> (B, S, hidden). ``rotate`` applies rotary positions."""
        config = self.config
        B, S, _ = x.shape
        H, K, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        qkv = self.qkv_proj(x)
        transform = PLAIN if cache is None else cache.transform
        if self.qkv_bias is not None:
            qkv = qkv + (self.qkv_bias.whole if transform.bias_split is None else self.qkv_bias.stored)
        if self.projection_norms is not None:
            query, key, value = mx.split(qkv, [H * D, (H + K) * D], axis=-1)
            qkv = mx.concatenate([*self._normalized(query, key, self.projection_norms), value], axis=-1)
        # (B, S, (H + 2K) D) -> (B, S, H + 2K, D) -> (B, H + 2K, S, D)
        qkv = qkv.reshape(B, S, H + 2 * K, D).transpose(0, 2, 1, 3)
        query_key = qkv[:, : H + K]
        if self.head_norm is not None:  # normalize queries and keys in one pass
            query_key = mx.fast.rms_norm(query_key, None, config.rms_norm_eps) * self.head_norm
        if self.rotates:  # the same angles for both, so one call
            query_key = rotate(query_key)
        query_key = transform.query_key(query_key, H)
        query, key, value = query_key[:, :H], query_key[:, H:], transform.values(qkv[:, H + K :])
        if cache is not None:
            output = transform.values(cache.multi_head_cache_attention(query, key, value))
        else:
            mask = None if self.window is None or self.window >= S else window_mask(S, S, self.window)
            output = attend_tokens(query, key, value, mask=mask)
        return self.o_proj(output.transpose(0, 2, 1, 3).reshape(B, S, H * D))  # (B, H, S, D) -> (B, S, H D)

    def _normalized(self, query: mx.array, key: mx.array, weights: Pair) -> Pair:
        """Normalize queries (B, S, H D) and keys (B, S, K D), each over all heads of a token."""
        eps = self.config.rms_norm_eps
        return rms_norm(query, weights[0], eps), rms_norm(key, weights[1], eps)


@dataclass(frozen=True, slots=True)
class Block:
    """One layer: attention, then an MLP or experts, each added to the hidden states."""

    self_attn: Attention
    mlp: MLP | Experts
    # RMSNorm weights (hidden,) by role: ``before_attention``, ``after_attention`` (before the addition),
    # ``before_mlp`` and ``after_mlp``. A layer has some of them.
    norms: Mapping[str, mx.array]
    rms_norm_eps: float

    def __call__(self, x: mx.array, rotate: Rotate, cache: AttentionCache | None) -> mx.array:
        """(B, S, hidden) -> (B, S, hidden)."""
        attended = self._summed(self.self_attn(self._norm(x, "before_attention"), rotate, cache))
        x = x + self._norm(attended, "after_attention")
        fed = self._summed(self.mlp(self._norm(x, "before_mlp")))
        return x + self._norm(fed, "after_mlp")

    def append(self, x: mx.array, rotate: Rotate, cache: AttentionCache) -> None:
        """Write the keys and values of (B, S, hidden) to the cache.

        The output is never evaluated, except that attention on a CPU may compute its output immediately.
        """
        self.self_attn(self._norm(x, "before_attention"), rotate, cache)

    def _summed(self, output: mx.array) -> mx.array:
        """Return the complete output of attention or MLP, which ranks have to sum."""
        return output

    def _norm(self, x: mx.array, role: str) -> mx.array:
        weight = self.norms.get(role)
        return x if weight is None else rms_norm(x, weight, self.rms_norm_eps)

    @property
    def linears(self) -> list[Linear]:
        """Return the projections, except a router's."""
        attention = self.self_attn
        return [attention.qkv_proj, attention.o_proj, self.mlp.gate_up_proj, self.mlp.down_proj]

    @property
    def arrays(self) -> list[mx.array]:
        attention = self.self_attn
        return [
            *(a for module in (attention.qkv_proj, attention.o_proj, self.mlp) for a in module.arrays),
            *([] if attention.qkv_bias is None else attention.qkv_bias.arrays),
            *([] if attention.head_norm is None else [attention.head_norm]),
            *(attention.projection_norms or ()),
            *self.norms.values(),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderParts:
    """The arguments of a decoder. Those of a rank may lack some."""

    config: ModelConfig  # with the rank's layers, heads and features
    dtype: mx.Dtype  # of activations
    # None: the rank needs no embedding, neither for tokens nor as a tied head
    embed_tokens: Matrix | None
    layers: tuple[Block, ...]
    norm: mx.array | None  # before the output head; None: another rank has the norm and the head
    lm_head: Matrix | None  # None: tied to the embedding, or on another rank
    bytes_read: int  # of the model's tensors
    slices: tuple[range, range]  # numbers of its layers and kv heads in the whole model
    head: Head | None = None  # for drafts; its layer is the last one


class Decoder(CachedModel):
    """A :class:`kvant.models.LanguageModel` of one of :data:`kvant.models.architectures.ARCHITECTURES`."""

    all_windows: Sequence[int | None] = ()  # of the whole model, if this is a rank's stage of it
    config: ModelConfig
    feeds_last_token_separately = False

    def __init__(self, parts: DecoderParts) -> None:
        """``parts`` must include the embedding and the final norm."""
        assert parts.embed_tokens is not None
        assert parts.norm is not None
        super().__init__(parts.config, parts.dtype)
        self.layers = parts.layers
        self._slices = parts.slices
        self._rotary = self.config.rope.rotary(self.config.head_dim)
        self._embed_tokens = parts.embed_tokens
        self._norm = parts.norm
        self._lm_head = parts.lm_head

    def hidden_states(self, inputs: mx.array, offset: Offset = None, cache: Cached = None) -> mx.array:
        """Return the normalized hidden states (B, S, hidden) after the last layer, for :meth:`logits`.

        Unlike :meth:`__call__`, this does not commit the step or check ids: one outside the vocabulary would
        read out of bounds.
        """
        check_shape(inputs)
        if offset is not None:
            check_offset(offset, (0,) * len(inputs) if cache is None else self._batch(cache).lengths)
        return self.states(inputs, *self.begin(inputs, cache))

    def _outputs(self, inputs: mx.array, cache: PoolBatch | None) -> mx.array:
        return self.hidden_states(inputs, cache=cache)

    def begin(self, inputs: mx.array, cache: Cached) -> tuple[int | mx.array, Caches]:
        """Begin a step; return the ``start`` and ``caches`` for :meth:`states`."""
        if cache is None:
            return 0, [None] * len(self.layers)
        batch = cache if isinstance(cache, PoolBatch) else self._batch(cache)
        if batch.pool.made_for is not self.config:  # otherwise this model made it
            self.check_pool(batch.pool)
        lengths = batch.begin(inputs)
        # Always an array in a shared pool: a token's logits must not depend on other sequences' lengths.
        return lengths[0] if batch.pool.single else mx.array(lengths), batch

    def states(self, inputs: mx.array, start: int | mx.array, caches: Caches) -> mx.array:
        """Return the hidden states as :meth:`hidden_states`, with any kind of cache.

        Args:
            inputs: (B, S) token ids.
            start: position of the first new token: an int for all sequences, or an integer array (B,).
            caches: one for each layer; None: its tokens attend to each other only.
        """
        check_process()
        rows = caches.embeddings if isinstance(caches, PoolBatch) else None
        x = (self._embed_tokens.rows(inputs) if rows is None else rows).astype(self.dtype)
        return rms_norm(self.through_layers(x, start, caches), self._norm, self.config.rms_norm_eps)

    def through_layers(self, x: mx.array, start: int | mx.array, caches: Caches) -> mx.array:
        """Pass hidden states ``x`` (B, S, hidden) through all layers; see :meth:`states`."""
        rotate = self._rotary.at(start, x.shape[1], self.dtype)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, rotate, cache)
        return x

    def check_pool(self, pool: Pool) -> None:
        name = "cache" if pool.single else "pool"
        formats = [layer.format for layer in pool.layers]
        if len(formats) != len(self.layers):
            raise ValueError(f"the {name} has {len(formats)} layers; expected {len(self.layers)}")
        expected = (self.config.num_key_value_heads, self.config.head_dim)
        for number, (layer_format, window) in enumerate(zip(formats, self.config.windows, strict=True)):
            sizes = (layer_format.num_kv_heads, layer_format.head_dim)
            if sizes != expected:
                raise ValueError(
                    f"layer {number} of the {name} has kv heads and a head_dim of {sizes}; "
                    f"expected {expected}"
                )
            if layer_format.window != narrow_window(window, pool.max_seq_len):
                raise ValueError(
                    f"layer {number} of the {name} has a window of {layer_format.window}; "
                    f"the model's has {window}"
                )

    def _new_pool(self, sizes: Mapping[str, Any], options: CacheOptions, **further: Any) -> Pool:
        max_seq_len = sizes["max_seq_len"]
        if options.kv_format is not None:
            options.kv_format.check(self.identity, len(self.all_windows) or len(self.layers))
        options = options.fitted(self.config.head_dim)
        biases = [layer.self_attn.qkv_bias if options.bias_split else None for layer in self.layers]
        layer_numbers, head_numbers = self._slices
        formats = [
            pool_format(
                self.config,
                options,
                dtype=self.dtype,
                max_seq_len=max_seq_len,
                window=window,
                pairs=None if bias is None else bias.pairs,
                layer=number,
                balanced=layer.self_attn.is_balanced,
            )
            for number, layer, bias, window in zip(
                layer_numbers, self.layers, biases, self.config.windows, strict=True
            )
        ]
        check_memory(sizes["tokens"], pool_bytes(formats, **sizes, checkpoints=options.checkpoints))
        splits = [None if bias is None else bias.split(self.config, max_seq_len) for bias in biases]
        transforms = []
        for number, split in zip(layer_numbers, splits, strict=True):
            choice = layer_choice(self.config, options, number, None if split is None else split.pairs)
            transforms.append(choice.transform(head_numbers, self.config.head_dim, split))
        return Pool(
            formats,
            transforms,
            **sizes,
            **further,
            checkpoints=options.checkpoints,
            kernels=options.kernels,
            has_tails=options.any_tail,
            dtype=self.dtype,
            num_heads=self.config.num_attention_heads,
            windows=[narrow_window(window, max_seq_len) for window in self.all_windows],
            rotary=self._rotary,
        )

    def feed(self, inputs: mx.array, cache: PoolBatch) -> list[mx.array]:
        return [self.hidden_states(inputs, cache=cache)[:, -1]]

    def next_logits(self, inputs: mx.array, cache: PoolBatch) -> mx.array:
        return self.logits(self.hidden_states(inputs, cache=cache)[:, -1])

    def logits(self, hidden_states: mx.array) -> mx.array:
        """(..., hidden) -> (..., vocab)."""
        return (self._lm_head or self._embed_tokens).project(hidden_states)

    @cached_property
    def computes_at_once(self) -> bool:
        matrices = [matrix for layer in self.layers for linear in layer.linears for matrix in linear.matrices]
        return any(matrix.computes_at_once for matrix in (self._lm_head or self._embed_tokens, *matrices))

    @property
    def embedding_size(self) -> int:
        return self.config.hidden_size

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.arrays)

    @property
    def nbytes_read(self) -> int:
        # A step reads hardly any of an untied embedding, and only some of the experts.
        embedding = 0 if self._lm_head is None else sum(a.nbytes for a in self._embed_tokens.arrays)
        idle = sum(layer.mlp.nbytes_idle for layer in self.layers if isinstance(layer.mlp, Experts))
        return self.nbytes - embedding - idle

    @property
    def arrays(self) -> list[mx.array]:
        head = [] if self._lm_head is None else self._lm_head.arrays
        return [
            *self._embed_tokens.arrays,
            *(a for layer in self.layers for a in layer.arrays),
            self._norm,
            *head,
        ]
