"""Decode steps as compiled functions: model, cache update and sampling, the same for every token."""

from collections.abc import Sequence

import mlx.core as mx

from kvant.cache import ModelCache, QuantizedKVCache
from kvant.engine.draw import Sampler, SeededSampler, draw_keys, greedy
from kvant.engine.row_sampling import draw_rows
from kvant.models import LanguageModel

SMALLEST_BUCKET = 256
STEP_SIZES = (1, 2, 4, 8)  # tokens of a compiled step, S; the fused kernel takes up to 8


def should_compile() -> bool:
    """Whether compiling the step is worth it: on a GPU.

    On a CPU the step is built while the last one runs, which takes as long (measured, docs/performance.md); a compiled
    one reads the rest of a bucket too, and its fused kernels need a C++ compiler and 11 seconds of it the first time.
    """
    return mx.default_device().type == mx.gpu


def can_compile(model: LanguageModel, cache: ModelCache, wanted: bool | None) -> bool:
    """Whether the step through a cache is to be compiled, and can be; ``wanted``: None: where that is faster."""
    can = (should_compile() if wanted is None else wanted) and model.can_compile(cache)
    if wanted and not can:
        raise ValueError("compiled is True; the model's step through this cache is not the same for every token")
    return can


def bucket_size(num_tokens: int, max_seq_len: int) -> int:
    """Tokens a step reads where ``num_tokens`` are needed: the next of 256, 512, ... 2048, then 4 sizes per octave."""
    size = max(SMALLEST_BUCKET, 1 << max(0, (num_tokens - 1).bit_length() - 3))
    return min(-(-num_tokens // size) * size, max_seq_len)


def step_size(num_tokens: int) -> int | None:
    """Tokens of the compiled step that so many are padded to; None: there is none."""
    return next((size for size in STEP_SIZES if size >= num_tokens), None)


class CompiledStep:
    """A function of tokens and offset that changes the cache. Traced once for each S and bucket of cached tokens.

    With the fused kernel, which reads the offset itself, it is traced once for each S. Greedy and seeded sampling are
    part of it. Any other sampler may look at values or keep state: it runs after the step, uncompiled, and so do logits
    processors.

    Attributes:
        samples: whether sampling is part of it.
    """

    def __init__(
        self, model: LanguageModel, cache: ModelCache, sampler: Sampler, *, processed: bool, most_tokens: int = 1
    ) -> None:
        """For a model, a cache (``model.can_compile``) and a sampler.

        Args:
            model, cache, sampler: of one run.
            processed: there are processors.
            most_tokens: of a step. A model that has to be tried out with more than one is tried now.
        """
        is_seeded = isinstance(sampler, SeededSampler)
        self.samples = samples = (is_seeded or sampler is greedy) and not processed
        self._sampler = sampler
        self._cache = cache
        # Whether every layer finds its last row by itself. A bridged model may attend without the kernel in places.
        self._reads_all = model.always_fuses and all(
            isinstance(layer, QuantizedKVCache) and layer.backend is not None for layer in cache
        )
        sizes = STEP_SIZES[: STEP_SIZES.index(step_size(most_tokens) or STEP_SIZES[-1]) + 1]
        self._sizes = [size for size in sizes if size == 1 or model.can_compile(cache, size)]
        self._traces = traces = [0]

        # A closure without self: MLX's compiled functions don't take part in garbage collection, a cycle would stay.
        def traced(tokens: mx.array, offset: mx.array, bucket: int, keys: mx.array | None) -> tuple[mx.array, ...]:
            traces[0] += 1
            logits = model.step_logits(tokens, offset, cache, bucket)
            if not samples:
                return (logits,)
            drawn, logprobs = draw_rows(logits.astype(mx.float32), [sampler] * len(tokens), keys)
            return drawn, logprobs.squeeze(0) if len(tokens) == 1 else logprobs

        self._function = mx.compile(traced, inputs=cache.compiled_state, outputs=cache.compiled_state)

    @property
    def compilations(self) -> int:
        """How often the step was traced."""
        return self._traces[0]

    def takes(self, num_tokens: int) -> bool:
        """Whether a step of so many tokens can be one of these: the model can, and with its padding there is room."""
        size, reserved = step_size(num_tokens), self._cache.max_seq_len
        return size in self._sizes and reserved is not None and self._cache.offset + size <= reserved

    def __call__(self, tokens: mx.array | Sequence[int]) -> tuple[mx.array, ...]:
        """Begin the step of S tokens of one sequence, in place of one begun before; see :meth:`ModelCache.commit`.

        Args:
            tokens: (S,), or ids; so many that :meth:`takes` takes them. They are padded to 1, 2, 4 or 8. The padding is
                written behind them and cannot be committed.

        Returns:
            where :attr:`samples`, the token after each one (S,) and their log-probabilities (S, vocab), of one token
            (vocab,); else the logits (S, vocab).
        """
        if not isinstance(tokens, mx.array):
            tokens = mx.array(list(tokens), mx.uint32)  # as argmax has them: another dtype would be another trace
        count = len(tokens)
        size = step_size(count)
        if size is None:
            raise ValueError(f"{count} tokens; a compiled step takes up to {STEP_SIZES[-1]}")
        # This checks the room, in Python: past the reservation a compiled write would be lost without a word.
        (offset,) = self._cache.begin(tokens[None], size)
        if size > count:
            tokens = mx.pad(tokens, (0, size - count))
        reserved = self._cache.max_seq_len
        assert reserved is not None
        bucket = reserved if self._reads_all else bucket_size(offset + size, reserved)
        held = [list(arrays) for arrays in self._cache.compiled_state]
        keys = None
        if self.samples and isinstance(self._sampler, SeededSampler):
            # An input of the function: as a constant it would be every draw's key.
            keys = draw_keys([self._sampler] * size, range(offset + 1, offset + size + 1))
        try:
            result: tuple[mx.array, ...] = self._function(tokens, mx.array(offset), bucket, keys)
        except BaseException:  # Ctrl-C while it is traced: MLX leaves the trace's placeholders in all it captured
            for arrays, before in zip(self._cache.compiled_state, held, strict=True):
                arrays[:] = before
            raise
        return result if size == count else tuple(part[:count] for part in result)
