"""A conversation as the command holds it: the model, the cache, what the user set, and how an answer is shown."""

import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Literal

from kvant.cache.single import SinglePool
from kvant.cli import terminal
from kvant.cli.options import RunOptions
from kvant.cli.progress import LateProgress
from kvant.cli.session import Session
from kvant.cli.statistics import RunStatistics
from kvant.engine.conversation import Conversation, Overflow
from kvant.engine.draw import for_answer
from kvant.engine.request import check_drafts
from kvant.engine.response import GenerationResponse
from kvant.engine.sampling import SamplingOptions
from kvant.errors import ContextError, PromptError
from kvant.sizes import format_bytes

View = Literal["markdown", "plain", "unchanged"]


def notice(text: str, quiet: bool = False) -> None:
    """Lines for the user, on standard error; on a terminal with whole words at the margin."""
    if quiet:
        return
    if sys.stderr.isatty():
        columns = shutil.get_terminal_size().columns - 1
        text = "\n".join(
            textwrap.fill(line, columns, subsequent_indent="  ", break_on_hyphens=False) for line in text.split("\n")
        )
    print(text, file=sys.stderr, flush=True)


class Talk:
    """One conversation.

    Attributes:
        run: the command's flags; ``/set max_tokens`` replaces its own.
        wanted: the options of sampling as the user set them.
        session: the model that is loaded.
        conversation: its messages and tokens.
        statistics: of the last answer.
        draft: what stands in the next line of input, to be edited.
    """

    def __init__(
        self,
        run: RunOptions,
        wanted: SamplingOptions,
        session: Session,
        view: View,
        overflow: Overflow = "forget",
    ) -> None:
        """Begin; ``view`` is how answers are shown, ``overflow`` as in :class:`Conversation`."""
        if not session.tokenizer.has_chat_template:
            raise PromptError(
                "the model has no chat template; kvant generate --ignore-chat-template continues a prompt"
            )
        check_drafts(session.drafts, SinglePool(session.cache, run.prefill_step_size))
        self.run, self.wanted, self.session = run, wanted, session
        self._sampling = session.sampling(wanted)
        self.conversation = Conversation(
            session.model,
            session.tokenizer,
            session.cache,
            system_prompt=run.system_prompt,
            overflow=overflow,
            template_variables=session.template_variables,
        )
        self.statistics = RunStatistics()
        self.draft = ""
        self._answers = 0
        self._view, self._overflow = view, overflow

    def set_sampling(self, wanted: SamplingOptions) -> None:
        """Sample with these options from the next answer on; an error leaves everything as it is."""
        self._sampling = self.session.sampling(wanted)
        self.wanted = wanted

    def set_max_tokens(self, count: int) -> None:
        """Generate at most so many tokens an answer; an error leaves everything as it is."""
        self.run = replace(self.run, max_tokens=count)

    def forget(self) -> None:
        """Forget every turn."""
        self.conversation.reset()
        self.statistics = RunStatistics()

    @property
    def turns(self) -> int:
        """Questions so far."""
        return sum(message["role"] == "user" for message in self.conversation.messages)

    def send(self, text: str) -> None:
        """Ask, and show the answer."""
        self._answer(lambda **options: self.conversation.send(text, **options))

    def edit(self, text: str) -> None:
        """Ask in place of the last question, and show the answer."""
        self._answer(lambda **options: self.conversation.edit(text, **options))

    def retry(self) -> None:
        """Answer the last question again, and show the answer."""
        self._answer(self.conversation.retry)

    @property
    def greeting(self) -> str:
        """The model, the cache, the sampling in force and the way to help, in a line."""
        session = self.session
        return f"{session.name} · {session.describe_cache()} · {session.sampling_line} · /help lists the commands"

    def status(self, columns: int) -> str:
        """The model, the context used of the reserved one, the cache, the speed of the last answer; as fits."""
        reserved = self.conversation.limit
        parts = [
            self.session.name.rstrip("/").rsplit("/", 1)[-1],
            f"{self.conversation.num_tokens}/{reserved} tokens"
            if reserved
            else f"{self.conversation.num_tokens} tokens",
            f"cache {format_bytes(self.session.cache_bytes)}",
        ]
        last = self.statistics.last
        if last is not None and last.generation_tps:
            parts.append(f"{last.generation_tps:.0f} tokens/s")
        while len(parts) > 2 and len(" · ".join(parts)) > columns - 2:
            parts.pop(2 if len(parts) > 3 else 0)
        return " · ".join(parts)

    def _answer(self, ask: Callable[..., Iterator[GenerationResponse]]) -> None:
        """Show one answer as it comes. What the model cannot answer is one line, and the conversation goes on."""
        self.statistics = statistics = RunStatistics()
        sampler, processors = self._sampling
        self._answers += 1
        try:
            with LateProgress("reading", quiet=self.run.quiet) as progress:
                # Closed whatever happens, so that the turn is recorded with the answer until then.
                responses = ask(
                    max_tokens=self.run.max_tokens,
                    sampler=for_answer(sampler, self._answers - 1),
                    logits_processors=processors,
                    stop=self.run.stop or (),
                    prefill_step_size=self.run.prefill_step_size,
                    prompt_progress_callback=progress.update,
                    draft=self.session.drafts or "none",
                )
                with closing(responses), self._shown() as show:  # type: ignore[type-var]
                    for response in responses:
                        progress.stop()
                        statistics.add(response)
                        show(response.text)
        except KeyboardInterrupt:
            notice("stopped")
        except ContextError as error:
            notice("; ".join([str(error), *self._more_room()]))
        self._say_what_was_left_out(statistics)

    def _say_what_was_left_out(self, statistics: RunStatistics) -> None:
        forgotten = self.conversation.forgotten
        if forgotten:
            notice(f"the oldest {forgotten} messages were forgotten: the context is full")
        reason = None if statistics.last is None else statistics.last.finish_reason
        if reason == "context":
            notice("; ".join(["cut: the reserved context is full", *self._more_room()]))
        elif reason == "length":
            notice(f"cut at max_tokens, {self.run.max_tokens}; /set max_tokens changes it")

    def _more_room(self) -> list[str]:
        """What the user can do about a full context."""
        context, limit = self.session.model.config.max_position_embeddings, self.conversation.limit
        more = ["--max-kv-size reserves more"] if limit is not None and limit != context else []
        return ["/reset forgets the conversation", *more] if self._overflow == "stop" and self.turns else more

    @contextmanager
    def _shown(self) -> Iterator[Callable[[str], None]]:
        """A function that shows the next piece of an answer."""
        if self._view == "unchanged":
            written = False

            def write(text: str) -> None:
                nonlocal written
                written = True
                terminal.write_generated(text, raw=self.run.raw)

            try:
                yield write
            finally:
                if written:
                    print(flush=True)
            return
        from kvant.cli.chat.screen import Screen

        screen = Screen(sys.stdout, markdown=self._view == "markdown")
        thinking = self.conversation.thinking()

        def show(text: str) -> None:
            for is_thinking, piece in [(False, text)] if thinking is None else thinking.add(text):
                screen.write(piece, is_thinking=is_thinking)

        try:
            yield show
        finally:
            for is_thinking, piece in [] if thinking is None else thinking.finish():
                screen.write(piece, is_thinking=is_thinking)
            screen.close()
