"""What ``kvant generate`` prints of answers: text or JSON to standard output, statistics to standard error."""

import json
import math
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvant.cli import terminal
from kvant.cli.options import RunOptions
from kvant.cli.session import Session
from kvant.cli.statistics import RunStatistics
from kvant.engine.drafting.choice import DraftCounts
from kvant.engine.response import GenerationResponse

if TYPE_CHECKING:
    from kvant.cli.statistics import Generated


class AnswerOutput:
    """Answers to one prompt: in text one after another, in JSON each token as it comes."""

    def __init__(self, session: Session, run: RunOptions, n: int, begun: str, json_lines: bool) -> None:
        """``n`` answers, each of which begins with the text ``begun``."""
        self._session, self._run, self._json_lines = session, run, json_lines
        self._pending = [begun] * n  # text that waits until the answers before it have ended
        self._statistics = [RunStatistics() for _ in range(n)]
        self._current = 0
        self._begun = False  # the current one
        self._drafts: DraftCounts | None = None  # of all answers

    def write(self, number: int, response: "Generated") -> None:
        """The next token of an answer."""
        self._statistics[number].add(response)
        self._drafts = response.drafts
        if self._json_lines:
            line = _json_line(number, response)
            terminal.write_generated(line, raw=self._run.raw)
        else:
            self._pending[number] += response.text
        self._go_on()

    def end(self) -> None:
        """After the last token; an answer that was interrupted ends where it is."""
        if self._current < len(self._statistics):
            self._finish(self._statistics[self._current])
        if len(self._statistics) > 1 and not self._run.quiet:
            tokens = sum(len(each.latencies_ms) for each in self._statistics)
            seconds = max(sum(each.latencies_ms) for each in self._statistics) / 1e3
            lines = [f"together: {tokens} tokens, {tokens / (seconds or 1):.1f} tokens/s"]
            if (drafts := self._drafts) is not None:
                lines.append(f"{drafts.tokens_a_step:.2f} tokens a step of an answer; {drafts.describe()}")
            print("\n".join(lines), file=sys.stderr)

    def _go_on(self) -> None:
        while self._current < len(self._statistics):
            statistics = self._statistics[self._current]
            if statistics.last is None:
                return
            if not self._json_lines:
                self._show(self._current)
            if statistics.last.finish_reason is None:
                return
            self._finish(statistics)
            self._current, self._begun = self._current + 1, False

    def _show(self, number: int) -> None:
        if not self._begun:
            if number:
                print(flush=True)  # an empty line between two texts
            if len(self._statistics) > 1 and not self._run.quiet:
                print(f"--- {number + 1} of {len(self._statistics)} ---", file=sys.stderr, flush=True)
            self._begun = True
        text, self._pending[number] = self._pending[number], ""
        terminal.write_generated(text, raw=self._run.raw)

    def _finish(self, statistics: RunStatistics) -> None:
        if statistics.last is not None and not self._json_lines:
            print(flush=True)
        if not self._run.quiet:
            lines = statistics.lines(self._session, alone=len(self._statistics) == 1)
            # The prompt, and loading, are the first one's alone.
            print("\n".join(lines[1:2] if self._current else lines), file=sys.stderr)
        if not self._json_lines and (cut := statistics.cut(self._run.max_tokens, self._session)):
            print(cut, file=sys.stderr)  # with --quiet too: half an answer looks like a whole one


def _json_line(number: int, response: "Generated") -> str:
    if isinstance(response, GenerationResponse):
        logprob = float(response.logprobs[response.token].item())  # type: ignore[arg-type]
    else:
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
    """A record on a line of its own. A terminal is shown escapes, which it cannot obey."""
    return json.dumps(record, ensure_ascii=sys.stdout.isatty(), allow_nan=False) + "\n"
