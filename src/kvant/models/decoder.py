"""The block stack: token ids in, logits out. B batch, S new tokens, H query heads, K kv heads, D head_dim."""

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import mlx.core as mx

from kvant.cache import AttentionCache, KVCache, ModelCache
from kvant.cache.identity import Identity
from kvant.cache.layer_format import narrow_window
from kvant.cache.options import DEFAULT_OPTIONS, CacheOptions, check_cache_options
from kvant.cache.pool import Pool, check_sizes, pool_bytes, single_sizes
from kvant.cache.pool_batch import PoolBatch
from kvant.models.bias import ProjectionBias
from kvant.models.caches import (
    check_batch,
    check_cache,
    check_memory,
    default_reservation,
    layer_choice,
    longest_sequence,
    pool_format,
)
from kvant.models.config import ModelConfig
from kvant.models.inputs import Cached, Offset, check_ids, check_offset, check_shape
from kvant.models.language_model import CacheMaker
from kvant.models.matrix import Linear, Matrix
from kvant.models.mlp import MLP, Experts
from kvant.operators.attention import attend_tokens
from kvant.operators.key_transform import PLAIN
from kvant.operators.masks import window_mask
from kvant.operators.normalization import rms_norm
from kvant.operators.rotary import Rotate
from kvant.threads import check_process

Pair = tuple[mx.array, mx.array]
Caches = Iterable[AttentionCache | None]  # what each layer attends through


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention with rotary positions, through a cache."""

    config: ModelConfig
    qkv_proj: Linear
    qkv_bias: ProjectionBias | None
    head_norm: mx.array | None  # (H + K, 1, D) weights of an RMSNorm of each query and key head by itself
    # (H D,) and (K D,), of an RMSNorm of a token's queries together, and of its keys
    projection_norms: Pair | None
    o_proj: Linear
    rotates: bool  # queries and keys turn to their positions
    window: int | None  # the last tokens that a query sees, its own included; None: it sees all
    is_balanced: bool  # the norms are :func:`kvant.models.key_norms.balance_norms`'

    def __call__(self, x: mx.array, rotate: Rotate, cache: AttentionCache | None) -> mx.array:
        """(B, S, hidden) -> (B, S, hidden); ``rotate`` turns heads to their positions."""
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
        if self.head_norm is not None:  # one pass for both, then each head's own weight
            query_key = mx.fast.rms_norm(query_key, None, config.rms_norm_eps) * self.head_norm
        if self.rotates:  # queries and keys turn by the same angles: one call for both
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
        """Queries (B, S, H D) and keys (B, S, K D), those of a token together."""
        eps = self.config.rms_norm_eps
        return rms_norm(query, weights[0], eps), rms_norm(key, weights[1], eps)


@dataclass(frozen=True, slots=True)
class Block:
    """One layer: attention, and an MLP or experts, each added to the stream."""

    self_attn: Attention
    mlp: MLP | Experts
    # The RMSNorms it has, (hidden,), by their role in the architecture's table: ``before_attention``,
    # ``after_attention`` (before it is added), ``before_mlp`` and ``after_mlp``.
    norms: Mapping[str, mx.array]
    rms_norm_eps: float

    def __call__(self, x: mx.array, rotate: Rotate, cache: AttentionCache | None) -> mx.array:
        """(B, S, hidden) -> (B, S, hidden)."""
        attended = self._summed(self.self_attn(self._norm(x, "before_attention"), rotate, cache))
        x = x + self._norm(attended, "after_attention")
        fed = self._summed(self.mlp(self._norm(x, "before_mlp")))
        return x + self._norm(fed, "after_mlp")

    def _summed(self, part: mx.array) -> mx.array:
        """What is added to the stream, of attention or MLP; a rank's part of a layer gives an addend of
        it.
        """
        return part

    def _norm(self, x: mx.array, role: str) -> mx.array:
        weight = self.norms.get(role)
        return x if weight is None else rms_norm(x, weight, self.rms_norm_eps)

    @property
    def linears(self) -> list[Linear]:
        """Its projections, but a router's."""
        attention = self.self_attn
        return [attention.qkv_proj, attention.o_proj, self.mlp.gate_up_proj, self.mlp.down_proj]

    @property
    def arrays(self) -> list[mx.array]:
        attention = self.self_attn
        return [
            *(a for part in (attention.qkv_proj, attention.o_proj, self.mlp) for a in part.arrays),
            *([] if attention.qkv_bias is None else attention.qkv_bias.arrays),
            *([] if attention.head_norm is None else [attention.head_norm]),
            *(attention.projection_norms or ()),
            *self.norms.values(),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderParts:
    """What a decoder is made of; a rank's may lack some."""

    config: ModelConfig  # of the rank's model: its layers, heads and features
    dtype: mx.Dtype  # of activations
    # None: the rank neither embeds tokens nor has a head that is tied to the embedding
    embed_tokens: Matrix | None
    layers: tuple[Block, ...]
    norm: mx.array | None  # before the output head; None: another rank has both
    lm_head: Matrix | None  # None: tied to the embedding, or another rank's
    bytes_read: int  # of the model's tensors
    slices: tuple[range, range]  # numbers of the layers and of the key and value heads in the whole model


class Decoder(CacheMaker):
    """A :class:`kvant.models.LanguageModel` of one of :data:`kvant.models.architectures.ARCHITECTURES`."""

    all_windows: Sequence[int | None] = ()  # of the whole model's layers, if these are a rank's alone
    feeds_last_token_separately = False
    divided = False  # other ranks hold a part of the model, and of its caches

    def __init__(self, parts: DecoderParts) -> None:
        """``parts``: with both ends of the model."""
        assert parts.embed_tokens is not None
        assert parts.norm is not None
        self.config, self.dtype, self.layers = parts.config, parts.dtype, parts.layers
        self.identity: Identity | None = None
        self._slices = parts.slices
        self._rotary = self.config.rope.rotary(self.config.head_dim)
        self._embed_tokens, self._norm, self._lm_head = parts.embed_tokens, parts.norm, parts.lm_head

    def __call__(self, inputs: mx.array, offset: Offset = None, cache: Cached = None) -> mx.array:
        """Logits of every position; the step is committed.

        Args:
            inputs: (B, S) token ids: S new tokens of each of B sequences.
            offset: tokens already in the cache: an int where all sequences have as many, or an integer array
                (B,). It can only confirm the cache's own count, which None takes.
            cache: from :meth:`make_cache`, or a batch of a pool from :meth:`make_pool`, appended to; None:
                plain causal attention, nothing kept.

        Returns:
            (B, S, vocab) in the compute dtype.

        Raises:
            ValueError: an offset that disagrees with the cache, a cache of other depth, ids that are not (B,
                S) or not in the vocabulary.
            ContextError: more tokens than the cache has room for.
            RuntimeError: another thread uses the cache, or this process was forked from one that had loaded a
                model.
        """
        check_process()
        check_ids(inputs, self.config.vocab_size)
        if cache is None:
            return self.logits(self.hidden_states(inputs, offset))
        batch = self._checked(cache)
        with batch.lock:
            hidden = self.hidden_states(inputs, offset, batch)
            if threading.active_count() > 1:  # computed while no other thread may write to the cache
                mx.eval(hidden)
            batch.commit()
        return self.logits(hidden)

    def hidden_states(self, inputs: mx.array, offset: Offset = None, cache: Cached = None) -> mx.array:
        """The normalized stream after the last layer, (B, S, hidden): what :meth:`logits` reads.

        As :meth:`__call__`, but the step is left for ``cache.commit``, and ids are not looked at: one outside
        the vocabulary would be read out of bounds.
        """
        return self.states(inputs, *self.begin(inputs, offset, cache))

    def begin(
        self, inputs: mx.array, offset: Offset = None, cache: Cached = None
    ) -> tuple[int | mx.array, Caches]:
        """Begin a step, as :meth:`hidden_states` does. Returns what :meth:`states` takes beside the ids."""
        check_shape(inputs)
        if cache is None:
            check_offset(offset, (0,) * inputs.shape[0])
            return 0, [None] * len(self.layers)
        batch = self._checked(cache)
        check_offset(offset, batch.lengths)
        lengths = batch.begin(inputs)
        # In a shared pool it is always an array: a token's logits must not depend on the lengths of other
        # sequences.
        return lengths[0] if batch.pool.single else mx.array(lengths), batch

    def states(self, inputs: mx.array, start: int | mx.array, caches: Caches) -> mx.array:
        """:meth:`hidden_states` through anything that attends.

        Args:
            inputs: (B, S) token ids.
            start: position of the first new token: an int for all sequences, or an integer array (B,).
            caches: what each layer attends through; None: the tokens themselves.
        """
        check_process()
        rows = caches.embeddings if isinstance(caches, PoolBatch) else None
        x = (self._embed_tokens.rows(inputs) if rows is None else rows).astype(self.dtype)
        return rms_norm(self.through_layers(x, start, caches), self._norm, self.config.rms_norm_eps)

    def through_layers(self, x: mx.array, start: int | mx.array, caches: Caches) -> mx.array:
        """The stream (B, S, hidden) after all layers, from that before them; arguments as those of
        :meth:`states`.
        """
        rotate = self._rotary.at(start, x.shape[1], self.dtype)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, rotate, cache)
        return x

    def check_cache(self, cache: Sequence[KVCache]) -> ModelCache:
        return check_cache(cache, self.config, self.identity, self.reserve_cache)

    def _checked(self, cache: Sequence[KVCache] | PoolBatch) -> PoolBatch:
        if isinstance(cache, PoolBatch):
            return check_batch(cache, self.config)
        return self.check_cache(cache).batch

    def reserve_cache(self, max_seq_len: int | None, options: CacheOptions) -> ModelCache:
        if max_seq_len is None:
            max_seq_len = default_reservation(self.config)
        return ModelCache(self.make_pool(**single_sizes(max_seq_len), options=options))

    def make_pool(
        self,
        tokens: int,
        *,
        sequences: int,
        max_seq_len: int | None = None,
        prefill_step_size: int = 512,
        single: bool = False,
        options: CacheOptions = DEFAULT_OPTIONS,
    ) -> Pool:
        check_process()
        check_cache_options(options)
        given = {"max_seq_len": max_seq_len or 1} if single else {"tokens": tokens}
        check_sizes(**given, sequences=sequences, prefill_step_size=prefill_step_size)
        max_seq_len = longest_sequence(self.config, tokens, max_seq_len)
        biases = [layer.self_attn.qkv_bias if options.bias_split else None for layer in self.layers]
        layer_numbers, head_numbers = self._slices
        if options.kv_format is not None:
            options.kv_format.check(self.identity, len(self.all_windows) or len(self.layers))
        options = options.fitted(self.config.head_dim)
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
        sizes: dict[str, Any] = {
            "tokens": tokens,
            "sequences": sequences,
            "max_seq_len": max_seq_len,
            "prefill_step_size": prefill_step_size,
            "checkpoints": options.checkpoints,
            "single": single,
        }
        check_memory(tokens, pool_bytes(formats, **sizes))
        splits = [None if bias is None else bias.split(self.config, max_seq_len) for bias in biases]
        transforms = []
        for number, split in zip(layer_numbers, splits, strict=True):
            choice = layer_choice(self.config, options, number, None if split is None else split.pairs)
            transforms.append(choice.transform(head_numbers, self.config.head_dim, split))
        return Pool(
            formats,
            transforms,
            **sizes,
            make_cache=partial(self.reserve_cache, options=options),
            identity=self.identity,
            kernels=options.kernels,
            dtype=self.dtype,
            num_heads=self.config.num_attention_heads,
            windows=[narrow_window(window, max_seq_len) for window in self.all_windows],
            made_for=self.config,
            rotary=self._rotary,
            divided=self.divided,
            has_tails=options.any_tail,
        )

    def feed(self, inputs: mx.array, cache: PoolBatch) -> list[mx.array]:
        return [self.hidden_states(inputs, cache=cache)[:, -1]]

    def next_logits(self, inputs: mx.array, cache: PoolBatch) -> mx.array:
        return self.logits(self.hidden_states(inputs, cache=cache)[:, -1])

    def every_logits(self, inputs: mx.array, cache: PoolBatch) -> mx.array:
        return self.logits(self.hidden_states(inputs, cache=cache))

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
        # Of a table that only embeds next to nothing is read, and few of the experts.
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
