"""A model that is served: what every request needs, made once and ended once."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

from kvant.cache.pages import PAGE_SIZE, pages_for
from kvant.cache.pool import Pool
from kvant.engine.batch_engine import BatchEngine, Deliver
from kvant.engine.drafts import Drafts, ServedSource
from kvant.engine.head_drafts import HeadDrafts, drafts_of
from kvant.engine.load import find_model
from kvant.engine.model_drafts import PooledDrafts
from kvant.engine.request import Request
from kvant.engine.sampling import read_model_sampling
from kvant.engine.scheduler import Counts
from kvant.errors import ArgumentError, ContextError
from kvant.models import LanguageModel
from kvant.models.caches import DEFAULT_RESERVATION
from kvant.models.language_model import context_limit
from kvant.server.errors import ApiError
from kvant.server.live import Live
from kvant.server.metrics import Metrics
from kvant.server.settings import Settings
from kvant.server.turn_queue import TurnQueue
from kvant.text.grammar import Grammars
from kvant.text.prompt import system_place
from kvant.text.tokenizer import Tokenizer
from kvant.text.tool_forms import tool_format

LONG_TOKEN = 128  # bytes; the longest of most vocabularies are so many spaces
MIN_CHARACTERS = 65536  # that any prompt may have: they are encoded in some milliseconds


class Service:
    """A loaded model, its pool and its engine."""

    def __init__(
        self,
        settings: Settings,
        model: LanguageModel,
        tokenizer: Tokenizer,
        pool: Pool,
        metrics: Metrics,
        planned: Mapping[str, int] | None = None,
        drafts: PooledDrafts | HeadDrafts | None = None,
    ) -> None:
        """Start the engine on a pool.

        Args:
            settings: with the model's name, its cache and its reservation.
            model, tokenizer: loaded.
            pool: nobody uses it yet.
            metrics: count the tokens of every request.
            planned: bytes by name, as the memory was planned; empty or None: it was not.
            drafts: those of a draft model.
        """
        if settings.draft == "model" and drafts is None:
            raise ArgumentError("draft", "is 'model'; expected it with", "draft_model")
        self.drafts = drafts  # of a draft model, or of the model's head; None: there is neither
        folder = find_model(settings.model)
        self.settings = settings
        self.model = model
        self.tokenizer = tokenizer
        self.pool = pool
        # the model's own options
        self.sampling = read_model_sampling(folder, vocab_size=model.config.vocab_size)
        # of the model's tool calls; None: its template takes no tools
        self.tool_format = tool_format(tokenizer)
        self.system_place = system_place(tokenizer)  # where its template takes system messages
        self.grammars = Grammars(tokenizer, model.config.vocab_size)  # that answers can be held to
        self.compiling = TurnQueue("kvant-grammar")  # of grammars
        limit = context_limit(model, pool.max_seq_len)
        assert limit is not None
        self.max_seq_len = limit  # tokens that a prompt and its answer can have together
        self.planned = dict(planned or {})
        self.metrics = metrics
        self.live = Live(pool)
        self.engine = BatchEngine(
            model,
            pool,
            max_batch=settings.sequences,
            max_queue=settings.max_queue,
            deterministic=settings.deterministic,
            stall_after=settings.limits.stall_s,
            observe=self.live.observe,
        )

    def drafts_of(self, asked: ServedSource | None) -> Drafts | None:
        """What a request's answers draft from; None: nothing. If it asks for nothing, the server's default
        holds.
        """
        source = asked or self.settings.draft
        if source in ("none", "prompt"):
            return drafts_of(source, self.model)
        kind, flag = (HeadDrafts, "--draft mtp") if source == "mtp" else (PooledDrafts, "--draft-model")
        if not isinstance(self.drafts, kind):
            expected = f"expected 'none' or 'prompt': this server was started without {flag}"
            raise ApiError(f"draft is {source!r}; {expected}", param="draft")
        return self.drafts

    @cached_property
    def max_characters(self) -> int:
        """Of a prompt: more of them do not fit, each token being the longest of the vocabulary."""
        longest = max(map(len, self.tokenizer.token_bytes() or [b" " * LONG_TOKEN]))
        return max(MIN_CHARACTERS, self.max_seq_len * longest)

    @property
    def counts(self) -> Counts:
        """What there is to do; requests that wait for a grammar are among those that wait."""
        counts = self.engine.counts
        return counts._replace(waiting=counts.waiting + self.compiling.waiting)

    @property
    def alive(self) -> bool:
        """Whether requests are answered."""
        return self.engine.alive and self.engine.age <= self.settings.limits.stall_s

    def check_length(self, prompt: str | Sequence[int]) -> None:
        """Refuse a prompt that is too long whatever its tokens are, before time and memory go into it."""
        most = self.max_seq_len
        what = "tokens"
        if isinstance(prompt, str):
            # A short one is spared the look at the whole vocabulary.
            most = MIN_CHARACTERS if len(prompt) <= MIN_CHARACTERS else self.max_characters
            what = "characters"
        if len(prompt) > most:
            room = f"there is room for {self.max_seq_len} tokens, the answer's included"
            raise ContextError(f"the prompt has {len(prompt)} {what}; {room}")

    def submit(self, request: Request, deliver: Deliver) -> None:
        """Take a request in; its tokens are counted and go to ``deliver``, in the engine's thread."""
        self.engine.submit(request, self.metrics.counting(request, deliver))

    def close(self, timeout: float | None = 10.0) -> bool:
        """End the engine and what is under way. Returns whether it has ended."""
        ended = self.engine.close(drain=False, timeout=timeout)
        self.grammars.close()
        return ended


def model_names(name: str) -> tuple[str, ...]:
    """Return the names that clients may use for a model: the one that was given, and its last part.

    The last part of a path comes first: answers carry it, and a path says more about the machine than a
    client needs.
    """
    is_path = name.startswith(("/", ".", "~")) or Path(name).is_dir()
    last = find_model(name).absolute().name if is_path else name.partition("@")[0].rpartition("/")[2]
    return tuple(dict.fromkeys([last, name] if is_path else [name, last]))


def make_pool(settings: Settings, model: LanguageModel) -> Pool:
    """The pool of a server."""
    context = model.config.max_position_embeddings
    tokens = settings.max_kv_size or min(DEFAULT_RESERVATION, context or DEFAULT_RESERVATION)
    if context is not None and tokens > context:
        raise ContextError(f"--max-kv-size is {tokens}; the model's context is {context} tokens")
    return model.make_pool(
        settings.sequences * pages_for(tokens) * PAGE_SIZE,
        sequences=settings.sequences,
        max_seq_len=tokens,
        prefill_step_size=settings.prefill_step_size,
        options=settings.cache,
    )
