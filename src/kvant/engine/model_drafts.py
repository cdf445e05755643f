"""What a request asks of drafts, a draft model among them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import mlx.core as mx

from kvant.cache import ModelCache, QuantizedKVCache
from kvant.cache.options import DEFAULT_KV_GROUP_SIZE, DEFAULT_OPTIONS, CacheOptions
from kvant.cache.pages import PAGE_SIZE, pages_for
from kvant.cache.pool import Pool
from kvant.engine.drafting.choice import SIZES, Choice, StepCosts
from kvant.engine.drafting.drafter import Drafter
from kvant.engine.drafting.drafts import Drafts, drafts_of
from kvant.engine.drafting.same_tokenizer import check_draft_model
from kvant.engine.model_drafter import ModelDrafter
from kvant.engine.pooled_drafts import PooledDrafts
from kvant.engine.run import PREFILL_STEP_SIZE
from kvant.errors import ArgumentError
from kvant.models import LanguageModel
from kvant.models.caches import default_reservation
from kvant.models.language_model import context_limit
from kvant.sizes import format_bytes
from kvant.text.tokenizer import Tokenizer

DEFAULT_DRAFT_TOKENS, MOST_DRAFT_TOKENS = 3, SIZES[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDrafts(Drafts):
    """Drafts of a model.

    Attributes:
        model: drafts; its tokenizer was compared.
        vocab_size: of the model that is drafted for.
        num_draft_tokens: a step, at most.
        tokens: that its cache is reserved for, at most its own context: past them nothing is drafted.
        options: of the model's cache; see :func:`draft_format`.
        prefill_step_size: prompt tokens fed at a time.
        cache: that is kept from one text to the next; None: each drafter makes its own.
    """

    side_by_side: ClassVar[bool] = False

    source: str = "model"
    model: LanguageModel
    vocab_size: int
    num_draft_tokens: int = DEFAULT_DRAFT_TOKENS
    tokens: int | None = None
    options: CacheOptions = DEFAULT_OPTIONS
    prefill_step_size: int = PREFILL_STEP_SIZE
    cache: ModelCache | None = None

    @property
    def asked(self) -> tuple[str, str]:
        """The argument that asks for them, and its value in words; for a refusal."""
        return "draft_model", "is given"

    @property
    def most(self) -> int:
        """Tokens that are drafted a step, at most."""
        return self.num_draft_tokens

    def beside_pool(self, pool: Pool) -> PooledDrafts:
        """These drafts for the sequences of a pool: one for the draft model is reserved, of the same format.

        Each of its sequences has as many tokens as one of the pool's, at most the draft model's own context.
        """
        if pool.divided:
            raise ArgumentError("draft_model", "is given; several ranks draft from prompt and answer alone")
        formats = [layer.format for layer in pool.layers]
        chosen = replace(
            self.options,
            kv_bits=max((own.kv_bits for own in formats), default=0),
            kv_group_size=max((own.kv_group_size for own in formats), default=0) or DEFAULT_KV_GROUP_SIZE,
        )
        tokens = context_limit(self.model, pool.max_seq_len) or pool.max_seq_len
        made = self.model.make_pool(
            pool.max_sequences * pages_for(tokens) * PAGE_SIZE,
            sequences=pool.max_sequences,
            max_seq_len=tokens,
            prefill_step_size=pool.prefill_step_size,
            **draft_format(self.model.config, chosen).fields,
        )
        if not made.takes_back:
            raise ArgumentError(
                "draft_model",
                f"has {self.model.config.model_type}'s layers; side by side expected a model that kvant computes "
                "without mlx-lm",
            )
        mx.eval(self.model.arrays)  # a thread cannot compute what another one left undone
        most = self.num_draft_tokens
        return PooledDrafts(model=self.model, pool=made, vocab_size=self.vocab_size, num_draft_tokens=most)

    def beside(self, cache: ModelCache, tokens: int) -> "ModelDrafts":
        """These drafts, where nobody said otherwise with a cache of the same format and as many tokens as the model's.

        Args:
            cache: the model's.
            tokens: where that grows: that the sequence will have at most.
        """
        if self.tokens is not None or self.cache is not None:
            return self
        bits = {layer.kv_bits for layer in cache.layers if isinstance(layer, QuantizedKVCache)}
        group = max(cache.groups, default=DEFAULT_KV_GROUP_SIZE)
        return replace(
            self,
            tokens=cache.max_seq_len or min(tokens, default_reservation(self.model.config)),
            options=replace(self.options, kv_bits=max(bits, default=0), kv_group_size=group),
        )

    def make_cache(self) -> ModelCache:
        """Reserve a cache for the draft model."""
        tokens = context_limit(self.model, self.tokens) or default_reservation(self.model.config)
        cache = self.model.make_cache(tokens, **draft_format(self.model.config, self.options).fields)
        back = min((limit.tokens for layer in cache.layers for limit in layer.limits), default=MOST_DRAFT_TOKENS)
        if back < self.num_draft_tokens:
            which = "states cannot" if not back else f"windows take back {back}"
            raise ArgumentError(
                "draft_model",
                f"has {self.model.config.model_type}'s layers; rejected drafts of {self.num_draft_tokens} tokens are "
                f"taken back from its cache, and its {which}",
            )
        return cache

    def describe_cache(self) -> str:
        """The reservation of :attr:`cache` in a line."""
        assert self.cache is not None
        return f"{self.cache.max_seq_len} tokens reserved, {format_bytes(self.cache.nbytes)}"

    def drafter(self) -> Drafter:
        """A drafter for one sequence; of :attr:`cache` only one at a time can be used."""
        cache = self.make_cache() if self.cache is None else self.cache
        return ModelDrafter(self.model, cache, self.vocab_size, self.prefill_step_size)

    def choice(self, costs: StepCosts, drafter: Drafter) -> Choice:
        """What decides for one sequence how many tokens are drafted."""
        assert isinstance(drafter, ModelDrafter)
        sizes = sorted({size for size in SIZES if size < self.num_draft_tokens} | {self.num_draft_tokens})
        return ModelChoice(costs, sizes, drafter)


class ModelChoice(Choice):
    """How many tokens a model drafts. It is asked for as many as pay; each place in a draft has its own acceptance."""

    def __init__(self, costs: StepCosts, sizes: Sequence[int], drafter: ModelDrafter) -> None:
        super().__init__(costs, sizes, is_free=False)
        self._drafter = drafter

    def may_draft(self, longest: int) -> bool:
        """Whether anything would be drafted."""
        counts = self.counts
        if counts.off is None and self._drafter.ended is not None:
            counts.off = self._drafter.ended
        if self.count(0, 1):
            return True
        if counts.off is None and counts.drafted:
            single = self._costs.get(2)
            cost = "" if single is None else f"a step with one drafted token took {single:.2g} plain ones, "
            counts.off = f"{cost}{counts.accepted} of {counts.drafted} were accepted"
        return False

    def verified(self, drafted: int, accepted: int, seconds: float) -> None:
        """A step verified a draft, of which so many tokens were accepted; ``seconds``: with the drafting."""
        self.saw_draft(drafted, accepted)
        super().verified(drafted, accepted, seconds)


def draft_format(config: Any, options: CacheOptions) -> CacheOptions:
    """The options of a draft model's cache: the run's, with the largest group that divides its heads too."""
    head_dim = getattr(config, "head_dim", None)
    return options if head_dim is None else replace(options, kv_group_size=math.gcd(options.kv_group_size, head_dim))


def asked_drafts(
    draft: object,
    draft_model: object,
    num_draft_tokens: int | None,
    model: LanguageModel,
    tokenizer: Tokenizer,
) -> Drafts | None:
    """What a request asks for; None: no drafts.

    Args:
        draft: "prompt" or "none"; or drafts that were made before.
        draft_model: another model; None: none drafts.
        num_draft_tokens: that it drafts a step; None: 3.
        model, tokenizer: that it drafts for.
    """
    if isinstance(draft, Drafts):
        return draft
    found = drafts_of(draft)
    check_draft_tokens(num_draft_tokens, has_model=draft_model is not None)
    if draft_model is None:
        return found
    if found is not None:
        raise ArgumentError("draft", f"is {draft!r}; expected 'none' beside a", "draft_model")
    if not hasattr(draft_model, "every_logits"):  # a path, or a model of mlx-lm's
        raise ArgumentError("draft_model", f"is a {type(draft_model).__name__}; expected a model of kvant.load")
    chosen = cast(LanguageModel, draft_model)
    check_draft_model(model, tokenizer, chosen)
    return ModelDrafts(
        model=chosen,
        vocab_size=model.config.vocab_size,
        num_draft_tokens=DEFAULT_DRAFT_TOKENS if num_draft_tokens is None else num_draft_tokens,
    )


def check_draft_tokens(num_draft_tokens: int | None, *, has_model: bool) -> None:
    """Refuse a number of drafted tokens that is none, or that would have no effect."""
    if num_draft_tokens is None:
        return
    if type(num_draft_tokens) is not int or not 1 <= num_draft_tokens <= MOST_DRAFT_TOKENS:
        raise ArgumentError("num_draft_tokens", f"is {num_draft_tokens!r}; expected 1 to {MOST_DRAFT_TOKENS}")
    if not has_model:
        raise ArgumentError("num_draft_tokens", f"is {num_draft_tokens}, which has no effect without", "draft_model")
