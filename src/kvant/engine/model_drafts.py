"""What a request asks of drafts, a draft model among them."""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import mlx.core as mx

from kvant.cache.options import DEFAULT_KV_GROUP_SIZE, DEFAULT_OPTIONS, CacheOptions
from kvant.cache.pages import PAGE_SIZE, pages_for
from kvant.cache.pool import Pool
from kvant.cache.single import SinglePool
from kvant.engine.drafting.choice import MOST
from kvant.engine.drafting.drafts import Drafts, drafts_of
from kvant.engine.drafting.same_tokenizer import check_draft_model
from kvant.engine.pooled_drafts import PooledDrafts
from kvant.engine.request import check_drafts
from kvant.errors import ArgumentError
from kvant.models import LanguageModel
from kvant.models.caches import default_reservation
from kvant.models.language_model import context_limit
from kvant.text.tokenizer import Tokenizer

DEFAULT_DRAFT_TOKENS, MOST_DRAFT_TOKENS = 3, MOST


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDrafts(Drafts):
    """What is asked of a model that drafts; :meth:`beside` makes the drafts.

    Attributes:
        model: drafts; its tokenizer was compared.
        vocab_size: of the model that is drafted for.
        num_draft_tokens: a step, at most.
        options: of its cache, whose bits and groups are those of the model's.
    """

    side_by_side: ClassVar[bool] = False

    source: str = "model"
    model: LanguageModel
    vocab_size: int
    num_draft_tokens: int = DEFAULT_DRAFT_TOKENS
    options: CacheOptions = DEFAULT_OPTIONS

    @property
    def asked(self) -> tuple[str, str]:
        """The argument that asks for them, and its value in words; for a refusal."""
        return "draft_model", "is given"

    @property
    def most(self) -> int:
        """Tokens that are drafted a step, at most."""
        return self.num_draft_tokens

    def beside(self, pool: Pool | SinglePool) -> PooledDrafts:
        """These drafts for the sequences of a pool: as many are reserved for the draft model, in the same format.

        Each has as many tokens as one of the pool's, at most the draft model's own context.
        """
        check_drafts(self, pool)
        config, formats = self.model.config, [layer.format for layer in pool.layers]
        chosen = draft_format(
            config,
            replace(
                self.options,
                kv_bits=max((own.kv_bits for own in formats), default=0),
                kv_group_size=max((own.kv_group_size for own in formats), default=0) or DEFAULT_KV_GROUP_SIZE,
            ),
        )
        made: Pool | SinglePool
        if isinstance(pool, SinglePool):
            tokens = context_limit(self.model, pool.cache.max_seq_len) or default_reservation(config)
            made = SinglePool(self.model.make_cache(tokens, **chosen.fields), pool.prefill_step_size)
            if (back := made.takes_back(self.num_draft_tokens)) < self.num_draft_tokens:
                which = "states cannot" if not back else f"windows take back {back}"
                raise ArgumentError(
                    "draft_model",
                    f"has {config.model_type}'s layers; rejected drafts of {self.num_draft_tokens} tokens are taken "
                    f"back from its cache, and its {which}",
                )
        else:
            tokens = context_limit(self.model, pool.max_seq_len) or pool.max_seq_len
            made = self.model.make_pool(
                pool.max_sequences * pages_for(tokens) * PAGE_SIZE,
                sequences=pool.max_sequences,
                max_seq_len=tokens,
                prefill_step_size=pool.prefill_step_size,
                **chosen.fields,
            )
            if not made.takes_back:
                raise ArgumentError(
                    "draft_model",
                    f"has {config.model_type}'s layers; side by side expected a model that kvant computes without "
                    "mlx-lm",
                )
        mx.eval(self.model.arrays)  # a thread cannot compute what another one left undone
        most = self.num_draft_tokens
        return PooledDrafts(model=self.model, pool=made, vocab_size=self.vocab_size, num_draft_tokens=most)


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
