"""Print answers of ``kvant generate``: text or JSON to standard output, statistics to standard error."""

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from kvant.cli import terminal
from kvant.cli.options import RunOptions
from kvant.cli.question import Question
from kvant.cli.session import Session
from kvant.cli.statistics import RunStatistics
from kvant.engine.drafts import DraftCounts
from kvant.engine.sampler import SeededSampler
from kvant.engine.stream import GenerationResponse
from kvant.errors import printable
from kvant.sizes import format_bytes


@dataclass(slots=True)
class _Answer:
    """An answer with the text that is not printed yet."""

    number: int
    question: Question
    heading: str
    text: str = ""
    begun: bool = False  # whether some of it is printed
    statistics: RunStatistics = field(default_factory=RunStatistics)

    @property
    def ended(self) -> bool:
        return self.statistics.last is not None and self.statistics.last.finish_reason is not None


class AnswerOutput:
    """Print answers in order, as text one after another; as JSON each token, or each answer of a file."""

    def __init__(
        self,
        session: Session,
        run: RunOptions,
        questions: Sequence[Question],
        n: int,
        begun: str,
        *,
        json_lines: bool,
        of_a_file: bool,
    ) -> None:
        """Expect ``n`` answers to each question, each beginning with the text ``begun``."""
        self._session = session
        self._run = run
        self._json_lines = json_lines
        self._of_a_file = of_a_file
        self._answers = []
        for number, question in enumerate(question for question in questions for _ in range(n)):
            heading = (
                printable(str(question.line.id)) if of_a_file else f"{number + 1} of {n}" if n > 1 else ""
            )
            self._answers.append(_Answer(number, question, heading, begun))
        self._current = 0  # the answer to print next
        self._printed = False
        self._drafts: DraftCounts | None = None  # of all answers
        self._started = time.perf_counter()
        self.finished = 0

    def write(self, number: int, response: GenerationResponse) -> None:
        answer = self._answers[number]
        answer.statistics.add(response)
        self._drafts = response.drafts
        if self._json_lines and not self._of_a_file:
            terminal.write_generated(_token_line(number, response), raw=self._run.raw)
        else:
            answer.text += response.text
        self.finished += answer.ended
        while self._current < len(self._answers) and self._show(self._answers[self._current]):
            self._current += 1

    def end(self) -> None:
        """Finish after the last token. For a file, also print answers that wait for an unfinished one."""
        waiting = self._answers[self._current :]
        if self._of_a_file:
            for answer in waiting:
                self._show(answer)
        elif waiting:
            self._finish(waiting[0])
        if self._of_a_file or len(self._answers) > 1:
            terminal.say("\n".join(self._totals()), self._run.quiet)

    def _show(self, answer: _Answer) -> bool:
        """Print the available text of an answer. Return whether it has ended."""
        if answer.statistics.last is None or (self._of_a_file and not answer.ended):
            return False
        if not self._json_lines:
            if not answer.begun:
                if self._printed:
                    print(flush=True)  # an empty line between two texts
                if answer.heading:
                    terminal.say(f"--- {answer.heading} ---", self._run.quiet)
            answer.begun = self._printed = True
            text = answer.text
            answer.text = ""
            terminal.write_generated(text, raw=self._run.raw)
        if answer.ended:
            self._finish(answer)
        return answer.ended

    def _finish(self, answer: _Answer) -> None:
        statistics = answer.statistics
        if self._json_lines and self._of_a_file:
            terminal.write_generated(_answer_line(answer), raw=self._run.raw)
            return
        if statistics.last is not None and not self._json_lines:
            print(flush=True)
        if not self._of_a_file:
            lines = statistics.lines(self._session, is_single=len(self._answers) == 1)
            # Only the first answer shows statistics of the prompt and of loading.
            terminal.say("\n".join(lines[1:2] if answer.number else lines), self._run.quiet)
        if not self._json_lines and (cut := statistics.cut(answer.question.max_tokens, self._session)):
            terminal.say(cut)  # even with --quiet, since a truncated answer looks complete

    def _totals(self) -> list[str]:
        """Return statistics of all answers, one per line."""
        begun = [answer.statistics for answer in self._answers if answer.statistics.last is not None]
        tokens = sum(len(each.latencies_ms) for each in begun)
        counts = []
        if (drafts := self._drafts) is not None:
            counts = [f"{drafts.tokens_a_step:.2f} tokens a step of an answer; {drafts.describe()}"]
        if not self._of_a_file:
            seconds = max((sum(each.latencies_ms) for each in begun), default=0) / 1e3
            return [f"together: {tokens} tokens, {tokens / (seconds or 1):.1f} tokens/s", *counts]
        seconds = time.perf_counter() - self._started
        fed = sum(each.last.prompt_tokens for each in begun if each.last)
        asked = f"prompts: {self.finished} of {len(self._answers)} answered, {fed} tokens fed"
        return [
            f"{asked}, after {self._session.load_s:.2f} s of loading",
            f"generated: {tokens} tokens in {seconds:.2f} s, {tokens / seconds:.1f} tokens/s in all",
            *counts,
            f"peak memory: {format_bytes(mx.get_peak_memory())}",
        ]


def _answer_line(answer: _Answer) -> str:
    last = answer.statistics.last
    sampler = answer.question.sampler_of(answer.number)
    assert last is not None
    return json_text(
        {
            "id": answer.question.line.id,
            "text": answer.text,
            "finish_reason": last.finish_reason,
            "prompt_tokens": len(answer.question.ids),
            "generation_tokens": last.generation_tokens,
            "seed": sampler.seed if isinstance(sampler, SeededSampler) else None,
            "first_token_ms": round(answer.statistics.latencies_ms[0], 3),
            "latency_ms": round(sum(answer.statistics.latencies_ms), 3),
        }
    )


def _token_line(number: int, response: GenerationResponse) -> str:
    logprob = response.logprob
    record = {
        "choice": number,
        "index": response.generation_tokens - 1,
        "token": response.token,
        "text": response.text,
        "logprob": round(logprob, 6) if math.isfinite(logprob) else None,
        "latency_ms": round(response.latency_ms, 3),
        "finish_reason": response.finish_reason,
    }
    if response.drafts is not None:
        record["from_draft"] = response.from_draft
    return json_text(record)


def json_text(record: Mapping[str, object]) -> str:
    """Write a record on one line. A terminal gets escapes, so that text cannot control it."""
    return json.dumps(record, ensure_ascii=sys.stdout.isatty(), allow_nan=False) + "\n"
