"""One decode step as a compiled function: model, cache update and sampling, the same for every token."""

import mlx.core as mx

from kvant.cache import ModelCache, QuantizedKVCache
from kvant.engine.draw import Sampler, SeededSampler, draw_key, greedy, sample
from kvant.models import LanguageModel

SMALLEST_BUCKET = 256


def should_compile() -> bool:
    """Whether compiling the step is worth it: on a GPU.

    On a CPU the step is built while the last one runs, which takes as long (measured, docs/decode-step.md); a compiled
    one reads the rest of a bucket too, and its fused kernels need a C++ compiler and 11 seconds of it the first time.
    """
    return mx.default_device().type == mx.gpu


def can_compile(model: LanguageModel, cache: ModelCache, wanted: bool | None) -> bool:
    """Whether the step through a cache is to be compiled, and can be; ``wanted``: None: where that is faster.

    Raises:
        ValueError: it was asked for, and cannot be.
    """
    can = (should_compile() if wanted is None else wanted) and model.can_compile(cache)
    if wanted and not can:
        raise ValueError("compiled is True; the model's step through this cache is not the same for every token")
    return can


def bucket_size(num_tokens: int, max_seq_len: int) -> int:
    """Tokens a step reads where ``num_tokens`` are needed: the next of 256, 512, ... 2048, then 4 sizes per octave."""
    size = max(SMALLEST_BUCKET, 1 << max(0, (num_tokens - 1).bit_length() - 3))
    return min(-(-num_tokens // size) * size, max_seq_len)


class CompiledStep:
    """A function of token and offset that changes the cache. Traced once per bucket of cached tokens. With the fused
    kernel, which reads the offset itself, once in all.

    Greedy and seeded sampling are part of it. Any other sampler may look at values or keep state: it runs after the
    step, uncompiled, and so do logits processors.

    Attributes:
        samples: whether sampling is part of it.
    """

    def __init__(self, model: LanguageModel, cache: ModelCache, sampler: Sampler, *, processed: bool) -> None:
        """For a model, a cache (``model.can_compile``) and a sampler; ``processed``: there are processors."""
        is_seeded = isinstance(sampler, SeededSampler)
        self.samples = samples = (is_seeded or sampler is greedy) and not processed
        self._sampler = sampler
        self._cache = cache
        # Whether every layer finds its last row by itself. A bridged model may attend without the kernel in places.
        self._reads_all = model.always_fuses and all(
            isinstance(layer, QuantizedKVCache) and layer.backend is not None for layer in cache
        )
        self._traces = traces = [0]

        # A closure without self: MLX's compiled functions don't take part in garbage collection, a cycle would stay.
        def traced(token: mx.array, offset: mx.array, bucket: int, key: mx.array | None) -> tuple[mx.array, ...]:
            traces[0] += 1
            logits = model.step_logits(token, offset, cache, bucket)
            return sample(logits, None, sampler, (), key) if samples else (logits,)

        self._function = mx.compile(traced, inputs=cache.compiled_state, outputs=cache.compiled_state)

    @property
    def compilations(self) -> int:
        """How often the step was traced."""
        return self._traces[0]

    def __call__(self, token: mx.array) -> tuple[mx.array, ...]:
        """Begin the step of a token (1,); see :meth:`kvant.cache.ModelCache.commit`.

        Returns:
            the next token (1,) and its log-probabilities (vocab,) where :attr:`samples`, else the logits (1, vocab).
        """
        # This checks the room, in Python: past the reservation a compiled write would be lost without a word.
        (offset,) = self._cache.begin(token[None])
        reserved = self._cache.max_seq_len
        assert reserved is not None
        bucket = reserved if self._reads_all else bucket_size(offset + 1, reserved)
        held = [list(arrays) for arrays in self._cache.compiled_state]
        # An input of the function: as a constant it would be every draw's key.
        key = draw_key(self._sampler, offset + 1) if self.samples else None
        try:
            result: tuple[mx.array, ...] = self._function(token, mx.array(offset), bucket, key)
        except BaseException:  # Ctrl-C while it is traced: MLX leaves the trace's placeholders in all it captured
            for arrays, before in zip(self._cache.compiled_state, held, strict=True):
                arrays[:] = before
            raise
        return result
