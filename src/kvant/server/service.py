"""A model that is served, with the objects that all of its requests share."""

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

LONG_TOKEN = 128  # bytes; in most vocabularies, the longest token is this many spaces
MIN_CHARACTERS = 65536  # allowed in any prompt, because encoding them takes milliseconds


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
            model, tokenizer: the loaded model and its tokenizer.
            pool: an unused pool.
            metrics: counts the tokens of every request.
            planned: planned bytes by name; empty or None: the memory was not planned.
            drafts: from a draft model or from the model's head.
        """
        if settings.draft == "model" and drafts is None:
            raise ArgumentError("draft", "is 'model'; expected it with", "draft_model")
        self.drafts = drafts  # None: there is neither a draft model nor a head
        folder = find_model(settings.model)
        self.settings = settings
        self.model = model
        self.tokenizer = tokenizer
        self.pool = pool
        # the model's default options
        self.sampling = read_model_sampling(folder, vocab_size=model.config.vocab_size)
        # None: the template does not support tools
        self.tool_format = tool_format(tokenizer)
        self.system_place = system_place(tokenizer)  # where the template accepts system messages
        self.grammars = Grammars(tokenizer, model.config.vocab_size)  # that constrain answers
        self.compiling = TurnQueue("kvant-grammar")  # of grammars
        limit = context_limit(model, pool.max_seq_len)
        assert limit is not None
        self.max_seq_len = limit  # the maximum tokens of a prompt and its answer
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
        """Return the drafts that a request asks for, by default the server's; None: no drafts."""
        source = asked or self.settings.draft
        if source in ("none", "prompt"):
            return drafts_of(source, self.model)
        kind, flag = (HeadDrafts, "--draft mtp") if source == "mtp" else (PooledDrafts, "--draft-model")
        if not isinstance(self.drafts, kind):
            expected = f"expected 'none' or 'prompt', because this server was started without {flag}"
            raise ApiError(f"draft is {source!r}; {expected}", param="draft")
        return self.drafts

    @cached_property
    def max_characters(self) -> int:
        """Return the maximum characters of a prompt; more exceed the context even with the longest tokens."""
        longest = max(map(len, self.tokenizer.token_bytes() or [b" " * LONG_TOKEN]))
        return max(MIN_CHARACTERS, self.max_seq_len * longest)

    @property
    def counts(self) -> Counts:
        """Return the current work, where ``waiting`` includes requests that wait for a grammar."""
        counts = self.engine.counts
        return counts._replace(waiting=counts.waiting + self.compiling.waiting)

    @property
    def alive(self) -> bool:
        """Return whether requests are answered."""
        return self.engine.alive and self.engine.age <= self.settings.limits.stall_s

    def check_length(self, prompt: str | Sequence[int]) -> None:
        """Raise a ContextError for a prompt that is too long whatever its tokens are, before encoding it."""
        most = self.max_seq_len
        what = "tokens"
        if isinstance(prompt, str):
            # Short prompts do not need max_characters, which reads the whole vocabulary.
            most = MIN_CHARACTERS if len(prompt) <= MIN_CHARACTERS else self.max_characters
            what = "characters"
        if len(prompt) > most:
            room = f"there is room for {self.max_seq_len} tokens, the answer's included"
            raise ContextError(f"the prompt has {len(prompt)} {what}; {room}")

    def submit(self, request: Request, deliver: Deliver) -> None:
        """Submit a request; its tokens are counted and passed to ``deliver`` in the engine's thread."""
        self.engine.submit(request, self.metrics.counting(request, deliver))

    def close(self, timeout: float | None = 10.0) -> bool:
        """End the engine and its requests; return whether it has ended."""
        ended = self.engine.close(drain=False, timeout=timeout)
        self.grammars.close()
        return ended


def model_names(name: str) -> tuple[str, ...]:
    """Return the names for a model that clients may use: its full name and the last component.

    For a path, the last component is first. It is in answers, because a path would reveal details of the
    machine.
    """
    is_path = name.startswith(("/", ".", "~")) or Path(name).is_dir()
    last = find_model(name).absolute().name if is_path else name.partition("@")[0].rpartition("/")[2]
    return tuple(dict.fromkeys([last, name] if is_path else [name, last]))


def make_pool(settings: Settings, model: LanguageModel) -> Pool:
    """Reserve the pool of a server."""
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
