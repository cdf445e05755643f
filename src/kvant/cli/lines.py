"""``kvant generate --prompts-file``: the prompts of a file, many at once; their answers in the order of the file."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import mlx.core as mx

from kvant.cli import terminal
from kvant.cli.answer_output import json_text
from kvant.cli.many import drafts_beside, most_tokens, reserve_pool
from kvant.cli.options import BadValueError, RunOptions
from kvant.cli.progress import LateProgress
from kvant.cli.prompts_file import Line, read_lines
from kvant.cli.sampling import drawn_seed
from kvant.cli.session import Session, load_session
from kvant.cli.statistics import RunStatistics
from kvant.cli.template import chat_ids
from kvant.engine.batch_stream import Piece, Wanted, stream_pieces
from kvant.engine.drafting.choice import DraftCounts
from kvant.engine.draw import SeededSampler, for_answer
from kvant.engine.limits import reservation
from kvant.engine.request import Request
from kvant.engine.sampling import SamplingOptions
from kvant.engine.scheduler import Scheduler
from kvant.errors import ArgumentError, ContextError, PromptError, printable
from kvant.sizes import format_bytes
from kvant.text.process import TextProcess
from kvant.text.prompt import encode_prompt


def answer_lines(
    path: str,
    run: RunOptions,
    sampling: SamplingOptions,
    process: TextProcess | None,
    *,
    at_once: int,
    deterministic: bool,
    plain: bool,
    json_lines: bool,
) -> None:
    """Answer the prompts of a file; every line is checked before anything is generated.

    Args:
        path: the file; ``-``: standard input.
        run, sampling: the command's flags, for lines that say nothing else.
        process: for the tokenizer.
        at_once, deterministic: as in :func:`kvant.cli.many.reserve_pool`.
        plain: continue prompts as they are, without the chat template.
        json_lines: print an object for each answer, else its text.

    Errors are those of ``read_lines``, ``load_session`` and ``reserve_pool``.
    """
    lines = read_lines(path, sampling)
    session = load_session(run, process, sampling, max_kv_size=1, sequences=min(at_once, len(lines)))
    seed = drawn_seed() if sampling.seed is None else sampling.seed
    session.sampling(sampling, seed)
    if not run.quiet:
        print(f"{session.sampling_line}, where a line says nothing else", file=sys.stderr)
    wanted = [_wanted(session, run, line, number, seed, plain) for number, line in enumerate(lines)]
    most, needs = most_tokens(session, run), []
    for line, each in zip(lines, wanted, strict=True):
        with _at(line):
            tokens = len(each.request.prompt)
            needs.append(reservation(session.model, tokens, each.request.max_tokens, most))
    pool = reserve_pool(session, run, needs, at_once, deterministic=deterministic)
    if (drafts := drafts_beside(session, run, pool)) is not None:
        wanted = [replace(each, request=replace(each.request, drafts=drafts)) for each in wanted]
    scheduler = Scheduler(session.model, pool, max_batch=pool.max_sequences, deterministic=deterministic)
    output = _Output(session, run, lines, wanted, json_lines)
    started = time.perf_counter()
    # On a terminal the answers themselves say how far it is.
    with LateProgress("answering", quiet=run.quiet or sys.stdout.isatty()) as progress:
        try:
            for piece in stream_pieces(scheduler, wanted, session.tokenizer):
                output.write(piece)
                progress.update(output.finished, len(lines))
        finally:
            progress.stop()
            output.end()
            if not run.quiet:
                print("\n".join(output.statistics(time.perf_counter() - started)), file=sys.stderr)


def _wanted(session: Session, run: RunOptions, line: Line, number: int, seed: int, plain: bool) -> Wanted:
    """A line's request. Line i draws with the seed + i, unless it has one of its own.

    Raises:
        PromptError: a prompt that cannot be used.
        BadValueError: options that the model cannot have.
    """
    with _at(line):
        if plain and not isinstance(line.prompt, str):
            raise ArgumentError(
                "messages", "are given; they need the chat template that --ignore-chat-template leaves out"
            )
        if plain:
            ids = encode_prompt(session.tokenizer, str(line.prompt), session.model.config.vocab_size)
        else:
            asked = [{"role": "user", "content": line.prompt}] if isinstance(line.prompt, str) else line.prompt
            ids = chat_ids(session.tokenizer, asked, run.system_prompt, variables=session.template_variables)
        sampler, processors = session.sampling(line.sampling, seed)
    request = Request(
        ids,
        max_tokens=line.max_tokens or run.max_tokens,
        sampler=sampler if line.has_seed else for_answer(sampler, number),
        logits_processors=tuple(processors),
        stop_tokens=session.tokenizer.eos_token_ids,
    )
    return Wanted(request, (run.stop or ()) if line.stop is None else line.stop)


@contextmanager
def _at(line: Line) -> Iterator[None]:
    """Errors of a line name it."""
    try:
        yield
    except (PromptError, ContextError) as error:
        raise type(error)(f"{line.where}: {error}") from error
    except ArgumentError as error:
        raise BadValueError(f"{line.where}: {error}") from error


@dataclass(slots=True)
class _Answer:
    """What came of a line's answer."""

    text: str = ""
    first_token_ms: float = 0.0
    last: Piece | None = None

    @property
    def ended(self) -> bool:
        """Whether there is no more of it."""
        return self.last is not None and self.last.finish_reason is not None


class _Output:
    """Answers in the order of their lines, each when it has ended, and all before it have."""

    def __init__(
        self, session: Session, run: RunOptions, lines: Sequence[Line], wanted: Sequence[Wanted], json_lines: bool
    ) -> None:
        self._session, self._run, self._lines, self._wanted = session, run, lines, wanted
        self._json_lines = json_lines
        self._answers: dict[int, _Answer] = {}
        self._next = 0  # to be printed
        self._printed = False
        self._fed = self._generated = self.finished = 0
        self._drafts: DraftCounts | None = None

    def write(self, piece: Piece) -> None:
        """The next token of an answer."""
        answer = self._answers.setdefault(piece.number, _Answer(first_token_ms=piece.since_start_ms))
        answer.text += piece.text
        answer.last = piece
        self._generated += 1
        self._drafts = piece.drafts
        if piece.generation_tokens == 1:
            self._fed += piece.prompt_tokens
        if piece.finish_reason is None:
            return
        self.finished += 1
        while (ready := self._answers.get(self._next)) and ready.ended:
            self._print(self._next)
            self._next += 1

    def end(self) -> None:
        """Where it was interrupted: what has ended, and waits for an answer that has not."""
        for number in sorted(self._answers):
            if self._answers[number].ended:
                self._print(number)

    def statistics(self, seconds: float) -> list[str]:
        """Of all answers, in so many seconds, a line each."""
        count, load_s = len(self._lines), self._session.load_s
        drafts = self._drafts
        return [
            f"prompts: {self.finished} of {count} answered, {self._fed} tokens fed, after {load_s:.2f} s of loading",
            f"generated: {self._generated} tokens in {seconds:.2f} s, {self._generated / seconds:.1f} tokens/s in all",
            *(
                []
                if drafts is None
                else [f"{drafts.tokens_a_step:.2f} tokens a step of an answer; {drafts.describe()}"]
            ),
            f"peak memory: {format_bytes(mx.get_peak_memory())}",
        ]

    def _print(self, number: int) -> None:
        line, request, answer = self._lines[number], self._wanted[number].request, self._answers.pop(number)
        last = answer.last
        assert last is not None
        if self._json_lines:
            seed = request.sampler.seed if isinstance(request.sampler, SeededSampler) else None
            record = {
                "id": line.id,
                "text": answer.text,
                "finish_reason": last.finish_reason,
                "prompt_tokens": len(request.prompt),
                "generation_tokens": last.generation_tokens,
                "seed": seed,
                "first_token_ms": round(answer.first_token_ms, 3),
                "latency_ms": round(last.since_start_ms, 3),
            }
            terminal.write_generated(json_text(record), raw=self._run.raw)
            return
        if self._printed:
            print(flush=True)  # an empty line between two texts
        self._printed = True
        if not self._run.quiet:
            print(f"--- {printable(str(line.id))} ---", file=sys.stderr, flush=True)
        terminal.write_generated(f"{answer.text}\n", raw=self._run.raw)
        statistics = RunStatistics(last=last)
        if cut := statistics.cut(request.max_tokens, self._session):
            print(cut, file=sys.stderr)
