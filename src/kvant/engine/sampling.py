"""Logits to the next token, with mlx-lm's samplers and logits processors."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

Sampler = Callable[[mx.array], mx.array]  # log-probabilities (B, vocab) -> tokens (B,)
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]  # tokens so far (T,), logits (B, vocab) -> logits


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """What a user can ask of sampling; the defaults pick the most probable token.

    Raises:
        ValueError: a value outside its range.
    """

    temp: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    repetition_context_size: int | None = None  # None: mlx-lm's 20
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None

    def __post_init__(self) -> None:
        self._check("temp", "0, or from 0.001 on", self.temp == 0 or 1e-3 <= self.temp < math.inf)
        self._check("top_p", "above 0, at most 1", 0 < self.top_p <= 1)
        self._check("min_p", "from 0 to 1", 0 <= self.min_p <= 1)
        self._check("top_k", "0 (off) or more", self.top_k >= 0)
        self._check("repetition_penalty", "above 0", 0 < self.repetition_penalty < math.inf)
        size = self.repetition_context_size
        self._check("repetition_context_size", "at least 1", size is None or size >= 1)
        self._check(
            "repetition_context_size", "a repetition_penalty with it", size is None or self.repetition_penalty != 1
        )
        self._check("logit_bias", "finite numbers", all(map(math.isfinite, self.logit_bias.values())))
        if self.temp == 0:
            for name, off in (("top_p", 1.0), ("min_p", 0.0), ("top_k", 0), ("seed", None)):
                if getattr(self, name) != off:
                    raise ValueError(
                        f"{name} is {getattr(self, name)}, but temp 0 always picks the likeliest token; set temp too"
                    )

    def _check(self, name: str, expected: str, holds: bool) -> None:
        if not holds:
            raise ValueError(f"{name} is {getattr(self, name)}; expected {expected}")

    def build(self, vocab_size: int) -> tuple[Sampler, list[LogitsProcessor]]:
        """mlx-lm's sampler and processors for these options; seeds MLX's random state where a seed is given.

        Raises:
            ValueError: a top_k or a biased token the vocabulary does not have.
        """
        from mlx_lm.sample_utils import make_logits_processors, make_sampler

        if self.top_k >= vocab_size:
            raise ValueError(f"top_k is {self.top_k}; expected less than the vocabulary of {vocab_size}")
        for token in self.logit_bias:
            if not 0 <= token < vocab_size:
                raise ValueError(f"logit_bias has token {token}; the model knows 0 to {vocab_size - 1}")
        if self.seed is not None:
            mx.random.seed(self.seed)
        sampler = make_sampler(temp=self.temp, top_p=self.top_p, min_p=self.min_p, top_k=self.top_k)
        penalty = None if self.repetition_penalty == 1 else self.repetition_penalty
        processors = make_logits_processors(dict(self.logit_bias) or None, penalty, self.repetition_context_size or 20)
        return sampler, processors


def greedy(logprobs: mx.array) -> mx.array:
    """The most probable token: (B, vocab) -> (B,)."""
    return mx.argmax(logprobs, axis=-1)


def is_pure(sampler: Sampler) -> bool:
    """Whether a sampler is known to depend on its argument and MLX's random state alone: kvant's and mlx-lm's are."""
    return sampler is greedy or getattr(sampler, "__module__", None) == "mlx_lm.sample_utils"


def sample(
    logits: mx.array, tokens: mx.array | None, sampler: Sampler, processors: Sequence[LogitsProcessor]
) -> tuple[mx.array, mx.array]:
    """One step of sampling.

    Args:
        logits: (1, vocab), of the last position.
        tokens: (T,) the prompt and everything generated, where there are processors.
        sampler: picks from log-probabilities.
        processors: applied to the logits in order.

    Returns:
        The token (1,) and its log-probabilities (vocab,).
    """
    logits = logits.astype(mx.float32)
    for processor in processors:
        logits = processor(tokens if tokens is not None else mx.array([], mx.int32), logits)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return sampler(logprobs), logprobs.squeeze(0)
