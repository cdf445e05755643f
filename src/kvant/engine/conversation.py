"""A conversation whose history stays in the cache, so that a turn feeds only new tokens if it can."""

import json
import time
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from kvant.cache import KVCache
from kvant.cache.pool import Pool
from kvant.cache.snapshot import read_header
from kvant.engine.cache_scheduler import CacheScheduler
from kvant.engine.drafts import Drafts
from kvant.engine.model_drafts import ModelDrafts, PooledDrafts, asked_drafts
from kvant.engine.processors import LogitsProcessor
from kvant.engine.request import PREFILL_STEP_SIZE, PromptProgress, Request, check_stops, limit_in_words
from kvant.engine.sampler import Sampler
from kvant.engine.stream import GenerationResponse, TextRequest, responses
from kvant.errors import ContextError, PromptError, SnapshotError
from kvant.files import unique_keys
from kvant.models import LanguageModel
from kvant.models.language_model import context_limit
from kvant.text.prompt import KnownText, Message, render_chat
from kvant.text.thinking import Thinking
from kvant.text.tokenizer import Tokenizer

Overflow = Literal["forget", "stop"]
KEY = "conversation"  # of the messages in a snapshot's metadata
ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class Prompt:
    """Messages that end with a question, rendered for the model."""

    messages: list[Message]
    text: str  # the rendered messages
    ids: list[int]  # token ids of the text
    answer: list[int]  # ids of the answer so far, fed after the text

    def __len__(self) -> int:
        return len(self.ids) + len(self.answer)


class Conversation:
    """Messages, and their tokens in the cache.

    A model's thinking is separated from its answer by the template's marks, if it has any. A message has the
    answer as "content" and the thinking as "reasoning_content", and the template decides what the model sees
    again.

    Attributes:
        messages: the turns so far, for the chat template.
        reused_tokens: how many tokens of the last turn's prompt were in the cache already.
        forgotten: how many messages the last turn dropped because the context was full.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        cache: Sequence[KVCache],
        *,
        system_prompt: str | None = None,
        overflow: Overflow = "stop",
        template_variables: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin a conversation.

        Args:
            model, tokenizer: from :func:`kvant.load`.
            cache: of one sequence, from ``model.make_cache``; it is emptied.
            system_prompt: a system message before the turns.
            overflow: what to do when the context is full. "forget": drop the oldest turns with their answers,
                feed the others again and continue, even in the middle of an answer; the system prompt and the
                last question stay. This changes positions and so the random numbers of a seeded sampler.
                "stop": refuse the question, or end the answer.
            template_variables: further variables of the chat template, such as ``enable_thinking``.
        """
        if overflow not in get_args(Overflow):
            raise ValueError(
                f"overflow is {overflow!r}; expected {' or '.join(map(repr, get_args(Overflow)))}"
            )
        self._model = model
        self._tokenizer = tokenizer
        self._overflow = overflow
        self._cache = model.check_cache(cache)
        self._variables = dict(template_variables or {})
        self._answering: Generator[GenerationResponse, None, None] | None = None
        self._drafts: PooledDrafts | None = None  # of the last turn that had a draft model
        self.messages: list[Message] = []
        self.set_system_prompt(system_prompt)
        self.reset()

    def reset(self) -> None:
        """Forget all turns, but not the system prompt."""
        self._end_turn()
        self.messages = self.messages[: self.system_prompt is not None]
        self.reused_tokens = self.forgotten = 0
        self._known = KnownText(self._tokenizer)
        self._prompt_text = ""
        self._cache.reset()

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens in the cache."""
        return self._cache.offset

    @property
    def limit(self) -> int | None:
        """Return how many tokens fit the reservation and the model's context; None: any number."""
        return context_limit(self._model, self._cache.max_seq_len)

    @property
    def system_prompt(self) -> str | None:
        """Return the system message before the turns."""
        first = self.messages[0] if self.messages else {"role": ""}
        return first["content"] if first["role"] == "system" else None

    def set_system_prompt(self, text: str | None) -> None:
        """Replace or remove the system message; the turns stay, and are fed again with the next one."""
        self._end_turn()
        others = self.messages[self.system_prompt is not None :]
        self.messages = others if text is None else [{"role": "system", "content": text}, *others]

    def send(self, text: str, **options: Any) -> Iterator[GenerationResponse]:
        """Ask a question and iterate over the answer.

        Iteration may stop or be interrupted anywhere; the turn is then the answer so far. A turn without an
        answer is forgotten.

        Args:
            text: the question.
            options: max_tokens, sampler, logits_processors, stop, prefill_step_size, prompt_progress_callback
                and draft, draft_model and num_draft_tokens, with the defaults of
                :func:`kvant.stream_generate`. A draft model's cache is kept for the next turn.

        Raises:
            ContextError: the conversation or the question no longer fits; the conversation is unchanged.
        """
        self._end_turn()
        return self._ask(self.messages, text, **options)

    def retry(self, **options: Any) -> Iterator[GenerationResponse]:
        """Answer the last question again, with the options and errors of :meth:`send`.

        The old answer stays until the first token of the new one. Raises a PromptError without a question.
        """
        self._end_turn()
        return self.edit(self.messages[self._last_question()]["content"], **options)

    def edit(self, text: str, **options: Any) -> Iterator[GenerationResponse]:
        """Replace the last question and answer it; otherwise like :meth:`retry`."""
        self._end_turn()
        return self._ask(self.messages[: self._last_question()], text, **options)

    def undo(self) -> str | None:
        """Remove the last question and its answer, also from the cache.

        Returns the question, or None if there was none.
        """
        self._end_turn()
        if not (starts := questions(self.messages)):
            return None
        question = self.messages[starts[-1]]["content"]
        self.messages = self.messages[: starts[-1]]
        if len(starts) == 1:
            self._cache.reset()
            return question
        with suppress(PromptError):  # a template may reject messages that end with an answer
            text = render_chat(self._tokenizer, self.messages, self._variables)
            self._cache.keep_common(self._known.encode(text))
        return question

    def save(self, path: str | Path) -> None:
        """End a running turn, and save the messages and the cache's tokens to a file, replacing it.

        Raises:
            SnapshotError: it cannot be written; an old file is unchanged.
        """
        self._end_turn()
        metadata = as_metadata(self.messages)
        messages_of(path, metadata)  # checks that it can be loaded again
        self._cache.save(path, metadata)

    def load(self, path: str | Path) -> None:
        """Replace this conversation, including the system prompt, by a saved one.

        Raises:
            SnapshotError: the file has no conversation, or one with another model or cache format. This
                conversation then stays; the cache may be empty, and the next turn feeds all.
        """
        self._end_turn()
        messages = messages_of(path, read_header(Path(path)).metadata)
        self._cache.load(path)
        self.messages = messages
        self.reused_tokens = self.forgotten = 0
        self._known = KnownText(self._tokenizer)
        self._known.restore(self._cache.ids)

    def thinking(self) -> Thinking | None:
        """Return a splitter for the current answer, or None if the template has no thinking marks."""
        return Thinking.of(self._tokenizer, self._prompt_text)

    def _ask(
        self,
        before: Sequence[Message],
        text: str,
        *,
        max_tokens: int = 256,
        sampler: Sampler | None = None,
        logits_processors: Sequence[LogitsProcessor] | None = None,
        stop: str | Sequence[str] | None = None,
        prefill_step_size: int = PREFILL_STEP_SIZE,
        prompt_progress_callback: PromptProgress | None = None,
        draft: str | Drafts = "none",
        draft_model: LanguageModel | None = None,
        num_draft_tokens: int | None = None,
    ) -> Iterator[GenerationResponse]:
        """Begin a turn after these messages; see :meth:`send`."""
        started = time.perf_counter()
        stops = check_stops(stop)
        drafts = asked_drafts(draft, draft_model, num_draft_tokens, self._model, self._tokenizer)
        scheduler = CacheScheduler(self._model, self._cache, prefill_step_size=prefill_step_size)
        pool_drafts = None if drafts is None else self._drafts_for_pool(drafts, self._cache.pool)
        whole = [*before, {"role": "user", "content": text}]
        prompts = [self._fit(whole, [])]  # all prompts of this turn; the model answers the last one

        def request(max_tokens: int) -> Request:
            prompt = prompts[-1]
            self.forgotten = len(whole) - len(prompt.messages)
            return Request(
                [*prompt.ids, *prompt.answer],
                max_tokens,
                sampler,
                tuple(logits_processors or ()),
                self._tokenizer.eos_token_ids,
                drafts=pool_drafts,
                begun=prompt.answer,
                progress=prompt_progress_callback,
                keep_logprobs=True,
            )

        def go_on(answer: list[int]) -> Callable[[], Request] | None:
            try:
                shorter = self._fit(prompts[-1].messages, answer)
            except ContextError:
                return None

            def following() -> Request:
                prompts.append(shorter)
                return request(-1 if max_tokens == -1 else max_tokens - len(answer))

            return following

        first = request(max_tokens)
        self.reused_tokens = self._cache.keep_common(prompts[0].ids)
        answer = responses(scheduler, [TextRequest(first, stops, following=go_on)], self._tokenizer, started)
        self._prompt_text = prompts[0].text
        self._answering = self._record(prompts, answer)
        return self._answering

    def _drafts_for_pool(self, drafts: Drafts | ModelDrafts, pool: Pool) -> Drafts:
        """Return the drafts for the cache's pool; a draft model's cache is kept for the next turn."""
        if isinstance(drafts, Drafts):
            return drafts
        known = self._drafts
        if known is None or known.model is not drafts.model or known.most != drafts.most:
            self._drafts = None  # frees its cache
            self._drafts = known = drafts.for_pool(pool)
        return known

    def _fit(self, messages: list[Message], answer: Sequence[int]) -> Prompt:
        """Return the prompt of these messages and the answer so far, without the oldest turns if allowed."""

        def make(messages: list[Message]) -> Prompt:
            text = render_chat(self._tokenizer, messages, self._variables)
            return Prompt(messages, text, self._known.encode(text), list(answer))

        prompt = make(messages)
        limit = self.limit
        if limit is None or len(prompt) <= limit:
            return prompt
        room = limit_in_words(self._model, limit)
        if self._overflow == "stop":
            raise ContextError(f"the conversation would have {len(prompt)} tokens; {room}")
        prompt = newest_turns(messages, make, limit)
        if len(prompt) > limit:
            also = ", with the system prompt," if self.system_prompt is not None else ""
            raise ContextError(f"the question alone{also} has {len(prompt)} tokens; {room}")
        return prompt

    def _record(
        self, prompts: Sequence[Prompt], answer: Iterator[GenerationResponse]
    ) -> Generator[GenerationResponse, None, None]:
        pieces: list[str] = []
        tokens: list[int] = []
        last = None
        try:
            for response in answer:
                pieces.append(response.text)
                tokens.append(response.token)
                # record the turn before the last response, as the caller may not ask for more
                if response.finish_reason:
                    last = response
                    break
                yield response
        finally:
            if pieces:
                prompt = prompts[-1]
                text = "".join(pieces)
                has_end = tokens[-1] in self._tokenizer.eos_token_ids
                self._known.answered(prompt.text, prompt.ids, tokens[:-1] if has_end else tokens)
                splitter = Thinking.of(self._tokenizer, prompt.text)
                thought, content = ("", text) if splitter is None else splitter.split(text)
                reasoning = {"reasoning_content": thought} if thought else {}
                self.messages = [*prompt.messages, {"role": "assistant", "content": content, **reasoning}]
            else:
                self.forgotten = 0
        if last is not None:
            yield last

    def _end_turn(self) -> None:
        """Record a suspended turn, if any."""
        if self._answering is not None:
            self._answering.close()
            self._answering = None

    def _last_question(self) -> int:
        """Return the index of the message that begins the last turn."""
        if starts := questions(self.messages):
            return starts[-1]
        raise PromptError("nothing was asked yet; ask a question first")


def questions(messages: Sequence[Message]) -> list[int]:
    """Return the indices of questions, which begin the turns."""
    return [place for place, message in enumerate(messages) if message["role"] == "user"]


def newest_turns(messages: Sequence[Message], make: Callable[[list[Message]], Prompt], limit: int) -> Prompt:
    """Return the prompt of the newest turns that fit; messages before the first turn stay.

    It leaves half of the room after the last question free. Otherwise every turn would forget something and
    feed all others again. If nothing else fits, it has only the last question, however long that is.
    """
    starts = questions(messages)
    head = messages[: starts[0]]

    def without(turns: int) -> Prompt:
        return make([*head, *messages[starts[turns] :]])

    shortest = without(len(starts) - 1)
    target = (limit + len(shortest)) // 2
    if len(starts) < 3 or len(shortest) > limit:
        return shortest
    drops = range(1, len(starts) - 1)
    place = bisect_left(drops, True, key=lambda turns: len(without(turns)) <= target)
    return without(drops[place]) if place < len(drops) else shortest


def as_metadata(messages: Sequence[Message]) -> dict[str, str]:
    """Return messages as a snapshot's metadata."""
    return {KEY: json.dumps([dict(message) for message in messages])}


def messages_of(path: str | Path, metadata: Mapping[str, str]) -> list[Message]:
    """Parse the messages in a snapshot's metadata."""
    if KEY not in metadata:
        raise SnapshotError(
            f"{path}: it holds no conversation; expected a file that a conversation was saved to"
        )
    try:
        messages = json.loads(metadata[KEY], object_pairs_hook=unique_keys)
        if not isinstance(messages, list):
            raise ValueError(f"a JSON {type(messages).__name__}; expected a list")
        fields = {"role", "content", "reasoning_content"}
        for number, raw in enumerate(messages):
            if not isinstance(raw, dict) or not {"role", "content"} <= raw.keys() <= fields:
                raise ValueError(
                    f"message {number} is not an object of a role, a content and perhaps a reasoning_content"
                )
            if not all(isinstance(value, str) for value in raw.values()):
                raise ValueError(f"message {number} has a value that is not text")
            if raw["role"] not in ROLES or (raw["role"] == "system" and number):
                raise ValueError(
                    f"message {number} has the role {raw['role'][:20]!r}; expected user or assistant"
                )
            for value in raw.values():
                value.encode()  # half a surrogate pair raises a UnicodeEncodeError, which is a ValueError
    except (ValueError, RecursionError) as error:
        raise SnapshotError(f"{path}: its conversation is malformed: {error}") from error
    return [*messages]
