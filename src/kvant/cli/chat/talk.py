"""A conversation as the command holds it: the model, the cache, what the user set, and how an answer is
shown.
"""

import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Literal

from kvant.cli import terminal
from kvant.cli.options import RunOptions
from kvant.cli.progress import LateProgress
from kvant.cli.session import Session
from kvant.cli.statistics import RunStatistics
from kvant.engine.conversation import Conversation, Overflow
from kvant.engine.sampler import for_answer
from kvant.engine.sampling import SamplingOptions
from kvant.engine.stream import GenerationResponse
from kvant.errors import ContextError, PromptError
from kvant.sizes import format_bytes
from kvant.text.thinking import marks_of

View = Literal["markdown", "plain", "unchanged"]


def notice(text: str, quiet: bool = False) -> None:
    """Lines for the user, on standard error; on a terminal with whole words at the margin."""
    if sys.stderr.isatty():
        columns = shutil.get_terminal_size().columns - 1
        text = "\n".join(
            textwrap.fill(line, columns, subsequent_indent="  ", break_on_hyphens=False)
            for line in text.split("\n")
        )
    terminal.say(text, quiet)


class Talk:
    def __init__(
        self, run: RunOptions, wanted: SamplingOptions, session: Session, view: View, overflow: Overflow
    ) -> None:
        """Begin; ``view`` is how answers are shown, ``overflow`` as in :class:`Conversation`."""
        if not session.tokenizer.has_chat_template:
            raise PromptError(
                "the model has no chat template; kvant generate --ignore-chat-template continues a prompt"
            )
        self.run, self.wanted, self.session = run, wanted, session  # the first two are what /set replaces
        self._sampling = session.sampling(wanted)
        self.conversation = Conversation(
            session.model,
            session.tokenizer,
            session.cache,
            system_prompt=run.system_prompt,
            overflow=overflow,
            template_variables=session.template_variables,
        )
        marks = marks_of(session.tokenizer)
        of_thinking = "" if marks is None else "".join((*marks.starts, marks.end, *marks.left_out))
        # --ignore-eos is for seeing what comes after an answer's end
        special = () if run.ignore_eos else session.tokenizer.special_tokens.items()
        self._hidden = {token: text for token, text in special if text not in of_thinking}
        self.statistics = RunStatistics()  # of the last answer
        self.file: Path | None = None  # that /save may replace: it was saved, loaded or asked about
        self.draft = ""  # what stands in the next line of input, to be edited
        self._answers = 0
        self._view, self._overflow = view, overflow

    def set_sampling(self, wanted: SamplingOptions) -> None:
        """Sample with these options from the next answer on; an error leaves everything as it is."""
        self._sampling = self.session.sampling(wanted)
        self.wanted = wanted

    def status(self, columns: int) -> str:
        """The model, the context used of the reserved one, the cache, the speed of the last answer; as
        fits.
        """
        reserved, used = self.conversation.limit, str(self.conversation.num_tokens)
        parts = [
            self.session.name.rstrip("/").rsplit("/", 1)[-1],
            f"{f'{used}/{reserved}' if reserved else used} tokens",
            f"cache {format_bytes(self.session.cache.keys_values)}",
        ]
        last = self.statistics.last
        if last is not None and last.generation_tps:
            parts.append(f"{last.generation_tps:.0f} tokens/s")
        while len(parts) > 2 and len(" · ".join(parts)) > columns - 2:
            parts.pop(2 if len(parts) > 3 else 0)
        return " · ".join(parts)

    def answer(self, ask: Callable[..., Iterator[GenerationResponse]]) -> None:
        """Show the answer as it comes to ``ask``, such as the conversation's send with a text."""
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
                        show(self._visible(response))
        except KeyboardInterrupt:
            notice("stopped")
        except ContextError as error:
            notice("; ".join([f"error: {error}", *self._more_room(refused=True)]))
        if forgotten := self.conversation.forgotten:
            notice(f"the oldest {forgotten} messages were forgotten: the context is full")
        reason = None if statistics.last is None else statistics.last.finish_reason
        if reason == "context":
            notice("; ".join(["cut: the reserved context is full", *self._more_room()]))
        elif reason == "length":
            notice(f"cut at max_tokens, {self.run.max_tokens}; /set max_tokens changes it")

    def _more_room(self, *, refused: bool = False) -> list[str]:
        """What the user can do about a full context, or about a message that was ``refused``."""
        context, limit = self.session.model.config.max_position_embeddings, self.conversation.limit
        ways = []
        if self._overflow == "stop" and self.conversation.messages:
            ways.append("/reset forgets the conversation")
        elif refused:
            ways.append("send a shorter message")
        if limit is not None and limit != context:
            ways.append("--max-kv-size reserves more")
        return ways

    def _visible(self, response: GenerationResponse) -> str:
        """The response's text without a special token that the model wrote."""
        return response.text.removesuffix(self._hidden.get(response.token, ""))

    @contextmanager
    def _shown(self) -> Iterator[Callable[[str], None]]:
        """A function that shows the next piece of an answer."""
        if self._view == "unchanged":
            statistics = self.statistics
            try:
                yield lambda text: terminal.write_generated(text, raw=self.run.raw)
            finally:
                if statistics.last is not None:
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
