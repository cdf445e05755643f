"""Drafts of a model, which has its own pool and takes a step of all sequences per drafted token."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar, cast
from weakref import WeakKeyDictionary

import mlx.core as mx

from kvant.cache import ModelCache
from kvant.cache.options import DEFAULT_KV_GROUP_SIZE, DEFAULT_OPTIONS, CacheOptions
from kvant.cache.pages import PAGE_SIZE, pages_for
from kvant.cache.pool import Pool, PoolSequence
from kvant.engine.drafts import MOST, Drafter, Drafts
from kvant.engine.head_drafts import drafts_of
from kvant.engine.request import CHUNK
from kvant.errors import ArgumentError, ContextError, ModelError, one_line
from kvant.models import LanguageModel
from kvant.models.identity import tokenizer_digest
from kvant.models.language_model import context_limit
from kvant.sizes import format_bytes
from kvant.text.tokenizer import Tokenizer, check_same, load_tokenizer

DEFAULT_DRAFT_TOKENS = 3
MOST_DRAFT_TOKENS = MOST
MOST_BEHIND = 8  # tokens of a sequence that are fed with the step that drafts; more are fed before, in chunks
SAME = "a draft model needs the same tokenizer"

# digests of files that were found to be the same
_same: WeakKeyDictionary[Tokenizer, set[str]] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelDrafts:
    """The request for drafts of a model."""

    asked: ClassVar[tuple[str, str]] = "draft_model", "is given"

    model: LanguageModel  # drafts; its tokenizer was compared
    num_draft_tokens: int | None = None  # a step, at most; None: 3
    options: CacheOptions = DEFAULT_OPTIONS  # of its cache, whose bits and groups are those of the model's

    @property
    def most(self) -> int:
        """Return the maximum number of tokens drafted per step."""
        return self.num_draft_tokens or DEFAULT_DRAFT_TOKENS

    def for_pool(self, pool: Pool) -> "PooledDrafts":
        """Return the drafts for a pool, with as many sequences of the same format for the draft model.

        Each has as many tokens as one of the pool's, at most the draft model's own context.
        """
        check_drafts(self, pool)
        config = self.model.config
        formats = pool.formats
        bits = max((max(each.bits) for each in formats), default=0)
        group = max((each.kv_group_size for each in formats), default=0) or DEFAULT_KV_GROUP_SIZE
        chosen = draft_format(config, replace(self.options.at(bits), kv_group_size=group))
        tokens = context_limit(self.model, pool.max_seq_len) or pool.max_seq_len
        cache: ModelCache | None = None
        if pool.single:
            cache = self.model.reserve_cache(tokens, chosen)
            made = cache.pool
            refused = "its states cannot undo rejected drafts"
        else:
            made = self.model.make_pool(
                pool.max_sequences * pages_for(tokens) * PAGE_SIZE,
                sequences=pool.max_sequences,
                max_seq_len=tokens,
                prefill_step_size=pool.prefill_step_size,
                options=chosen,
            )
            refused = "for several sequences expected a model that kvant computes without mlx-lm"
        if not made.takes_back:
            raise ArgumentError("draft_model", f"has {config.model_type}'s layers; {refused}")
        mx.eval(self.model.arrays)  # a thread cannot evaluate another thread's lazy arrays
        return PooledDrafts(most=self.most, model=self.model, pool=made, cache=cache)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PooledDrafts(Drafts):
    """Drafts of a model for the sequences of one scheduler."""

    asked = ModelDrafts.asked

    model: LanguageModel
    pool: Pool  # the draft model's, of as many sequences as the other's; nobody else uses it
    cache: ModelCache | None = None  # keeps the sequence of a single pool open
    drafters: list["ModelDrafter"] = field(default_factory=list)  # of answers that have not ended

    def describe(self) -> str:
        """Return a line with the reservation."""
        pool = self.pool
        tokens = pool.max_seq_len if pool.single else pool.num_pages * pool.page_size
        return f"{tokens} tokens reserved, {format_bytes(pool.nbytes)}"

    def for_answer(self, salt: bytes, tokens: int, sequence: PoolSequence | None = None) -> "ModelDrafter":
        made = ModelDrafter(self, salt, min(tokens, self.pool.max_seq_len))
        self.drafters.append(made)
        return made

    def propose(self, drafters: Sequence["ModelDrafter"], counts: Sequence[int]) -> list[list[int]] | None:
        """Do as :meth:`Drafts.propose`. If it fails, no running answer drafts any more."""
        able = {each: count for each, count in zip(drafters, counts, strict=True) if each.opened()}
        drafts: dict[ModelDrafter, list[int]] = {}
        try:
            for each in able:
                if len(each.rest) > min(MOST_BEHIND, self.pool.prefill_step_size):
                    self._feed(each)
                    return None
            drafts = self._draft(able)
        except Exception as error:
            for each in [*self.drafters]:
                each.ended = f"the draft model failed: {one_line(error)}"
                each.release(failed=True)
        return [drafts.get(each, []) for each in drafters]

    def _feed(self, drafter: "ModelDrafter") -> None:
        ids = drafter.rest[:-1][: min(CHUNK, self.pool.prefill_step_size)]
        batch = self.pool.batch([drafter.sequence])
        mx.eval(self.model.feed(mx.array([ids]), batch))
        mx.clear_cache()  # as of a prompt's chunks
        batch.commit(ids=[ids])
        drafter.num_fed += len(ids)
        if drafter.num_fed + 1 == len(drafter.tokens):
            drafter.sequence.share_prefix()

    def _draft(self, counts: dict["ModelDrafter", int]) -> dict["ModelDrafter", list[int]]:
        drafts: dict[ModelDrafter, list[int]] = {each: [] for each in counts}
        rows = {each: each.rest for each in counts}
        widest = max(map(len, rows.values()), default=1)
        # Every sequence has to have room for as many; one near its end drafts no more.
        left = [each for each in counts if each.sequence.room >= widest]
        while left:
            fed = [rows[each] for each in left]
            batch = self.pool.batch([each.sequence for each in left])
            if widest == 1:
                logits = self.model.next_logits(mx.array(fed), batch)
            else:
                logits = self.model.every_logits(
                    mx.array([row + row[-1:] * (widest - len(row)) for row in fed]), batch
                )
                ends = mx.array([len(row) - 1 for row in fed])[:, None, None]
                # (B, S, vocab) -> (B, vocab), the last of each row's own
                logits = mx.take_along_axis(logits, ends, axis=1).squeeze(1)
            guesses = cast(list[int], mx.argmax(logits, axis=-1).tolist())
            batch.commit([len(row) for row in fed], ids=fed)
            for each, guess in zip(left, guesses, strict=True):
                rows[each] = [guess]
                drafts[each].append(guess)
            left = [each for each in left if len(drafts[each]) < counts[each] and each.sequence.room]
            widest = 1
        for each, draft in drafts.items():
            if draft:  # the last one drafted was not fed
                each.num_fed = len(each.tokens)
                each.drafted = draft[: each.sequence.length - each.num_fed]
        return drafts


class ModelDrafter(Drafter):
    """An answer's sequence in a draft model's pool, opened and computed when a draft is requested."""

    is_free = False

    def __init__(self, drafts: PooledDrafts, salt: bytes, reserved: int) -> None:
        """``salt``: it shares prompts with sequences of the same salt. ``reserved``: maximum tokens."""
        self.drafts = drafts
        self._salt = salt
        self._reserved = reserved
        self.tokens: list[int] = []  # of its answer
        self.num_fed = 0  # of these, the first that its sequence has
        self.drafted: Sequence[int] = ()  # tokens that its sequence has after them
        self._sequence: PoolSequence | None = None

    def extend(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        if (most := max(tokens, default=0)) >= self.drafts.model.config.vocab_size:
            self.ended = f"token {most} is not in the draft model's vocabulary"

    @property
    def sequence(self) -> PoolSequence:
        """Return its sequence in the draft model's pool, which must be open."""
        assert self._sequence is not None
        return self._sequence

    @property
    def rest(self) -> list[int]:
        """Return the tokens still to be fed."""
        return self.tokens[self.num_fed :]

    def opened(self) -> bool:
        """Open the sequence, or undo rejected drafts; return whether anything can be drafted."""
        if self.ended is None and len(self.tokens) > self._reserved:
            self.ended = f"the draft model's context, {self._reserved} tokens, is full"
        if self.ended is not None:
            return False
        if self._sequence is None:
            try:
                self._sequence = self.drafts.pool.sequence(
                    self._reserved, self.tokens, salt=self._salt, whole_pages=False
                )
            except ContextError as error:
                self.ended = str(error)
                return False
            self.num_fed = self._sequence.length
        came = takewhile(lambda pair: pair[0] == pair[1], zip(self.drafted, self.rest, strict=False))
        # One token must be fed to get logits.
        self.num_fed = min(self.num_fed + sum(1 for _ in came), len(self.tokens) - 1)
        self.drafted = ()
        self._sequence.trim_to(self.num_fed)
        return True

    def release(self, *, failed: bool = False) -> None:
        """Release its pages once; unless it failed, later sequences may start with its tokens."""
        if self in self.drafts.drafters:
            self.drafts.drafters.remove(self)
        sequence = self._sequence
        self._sequence = None
        self.ended = self.ended or "the answer has ended"
        if sequence is not None:
            if not failed:
                sequence.share_prefix(last_page=True)
            sequence.release()


def draft_format(config: Any, options: CacheOptions) -> CacheOptions:
    """Return the run's options for a draft model's cache, with the largest group that divides its heads."""
    head_dim = getattr(config, "head_dim", None)
    group = options.kv_group_size if head_dim is None else math.gcd(options.group_size, head_dim)
    return replace(options.at(options.kv_bits), kv_group_size=group, checkpoints=0)


def asked_drafts(
    draft: object,
    draft_model: object,
    num_draft_tokens: int | None,
    model: LanguageModel,
    tokenizer: Tokenizer,
) -> Drafts | ModelDrafts | None:
    """Return the drafts for these arguments, or ``draft`` itself if it was made before; None: no drafts."""
    if isinstance(draft, Drafts | ModelDrafts):
        return draft
    check_draft_tokens(num_draft_tokens, has_model=draft_model is not None or draft == "mtp")
    source = drafts_of(draft, model, num_draft_tokens)
    if draft_model is None:
        return source
    if source is not None:
        raise ArgumentError("draft", f"is {draft!r}; expected 'none' beside a", "draft_model")
    if not hasattr(draft_model, "every_logits"):  # a path, or a model of mlx-lm's
        raise ArgumentError(
            "draft_model", f"is a {type(draft_model).__name__}; expected a model of kvant.load"
        )
    chosen = cast(LanguageModel, draft_model)
    check_draft_model(model, tokenizer, chosen)
    return ModelDrafts(model=chosen, num_draft_tokens=num_draft_tokens)


def check_drafts(drafts: Drafts | ModelDrafts | None, pool: Pool, *, deterministic: bool = False) -> None:
    """Raise an ArgumentError if drafts cannot be verified with this pool.

    If states prevent undoing a part of a step, the accepted tokens are fed again, for one sequence only.
    """
    if drafts is None:
        return
    name, value = drafts.asked
    if deterministic:
        raise ArgumentError(
            name, f"{value}; a step of more tokens rounds differently: it is refused with", "deterministic"
        )
    if pool.divided and value != Drafts.asked[1]:
        raise ArgumentError(name, f"{value}; several ranks draft only from prompt and answer")
    if not (pool.takes_back or pool.single):
        raise ArgumentError(
            name, f"{value}; drafts for several sequences need a model that kvant computes without mlx-lm"
        )


def check_draft_tokens(num_draft_tokens: int | None, *, has_model: bool) -> None:
    """Raise an ArgumentError for an invalid number of drafted tokens, or one without effect."""
    if num_draft_tokens is None:
        return
    if type(num_draft_tokens) is not int or not 1 <= num_draft_tokens <= MOST_DRAFT_TOKENS:
        raise ArgumentError("num_draft_tokens", f"is {num_draft_tokens!r}; expected 1 to {MOST_DRAFT_TOKENS}")
    if not has_model:
        raise ArgumentError(
            "num_draft_tokens", f"is {num_draft_tokens}, which has no effect without", "draft_model"
        )


def check_draft_model(model: LanguageModel, tokenizer: Tokenizer, draft_model: LanguageModel) -> None:
    """Refuse a draft model with another tokenizer.

    Files are compared first; if they differ, the tokenizers' contents, once. The weights' vocabularies may be
    padded to different sizes. Of a draft model that was not loaded from a folder only the size of its
    vocabulary is known.
    """
    ours = model.identity
    theirs = draft_model.identity
    if draft_model is model:
        return
    if theirs is None or theirs.folder is None:
        sizes = draft_model.config.vocab_size, model.config.vocab_size
        if sizes[0] != sizes[1]:
            raise ModelError(
                f"the draft model's vocabulary has {sizes[0]} tokens, and the model's {sizes[1]}; {SAME}"
            )
        return
    if (ours is not None and ours.tokenizer == theirs.tokenizer) or theirs.tokenizer in _same.get(
        tokenizer, ()
    ):
        return
    if tokenizer_digest(theirs.folder) != theirs.tokenizer:
        raise ModelError(
            f"{theirs.folder}: tokenizer.json was changed after the draft model was loaded; {SAME}"
        )
    check_same(load_tokenizer(theirs.folder), tokenizer)
    _same.setdefault(tokenizer, set()).add(theirs.tokenizer)


def check_folders(folder: Path, draft_folder: Path) -> None:
    """Check like :func:`check_draft_model`, before anything is loaded."""
    if tokenizer_digest(folder) != tokenizer_digest(draft_folder):
        check_same(load_tokenizer(draft_folder), load_tokenizer(folder))
