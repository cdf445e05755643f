"""``kvant generate``: one prompt, one text."""

import json
import math
import sys
from typing import Annotated

import typer

from kvant.cli import options, terminal
from kvant.cli import prompt_cache_file as cache_file
from kvant.cli.options import BadValueError
from kvant.cli.progress import LateProgress
from kvant.cli.prompt import read_prompt
from kvant.cli.session import RunOptions, Session, open_session
from kvant.cli.statistics import RunStatistics
from kvant.engine.choices import stream_choices
from kvant.engine.draw import greedy
from kvant.engine.generate import GenerationResponse
from kvant.engine.sampling import SamplingOptions
from kvant.errors import PromptError
from kvant.sizes import format_bytes
from kvant.text.prompt import encode_prompt, encode_rendered, render_chat


@options.with_options
def generate(
    context: typer.Context,
    text: Annotated[
        str | None,
        typer.Argument(
            metavar="[PROMPT]", help="The prompt, after text that is piped in; - reads all of it from standard input."
        ),
    ] = None,
    *,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="The prompt, instead of the argument.")] = None,
    run: RunOptions,
    sampling: SamplingOptions,
    ignore_chat_template: Annotated[
        bool, typer.Option("--ignore-chat-template", help="Continue the prompt as it is, without the chat template.")
    ] = False,
    json_lines: Annotated[bool, typer.Option("--json", help="Print one JSON object a token instead of text.")] = False,
    n: Annotated[
        int, typer.Option("--n", help="Answer so many times, each with its own seed; read the prompt once.")
    ] = 1,
    prompt_cache_file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Keep prompt and answer in this file. Where it exists, only what differs from it is read.",
        ),
    ] = None,
) -> None:
    """Answer one prompt: text to standard output, statistics to standard error."""
    if ignore_chat_template and run.system_prompt is not None:
        raise BadValueError("--system-prompt needs the chat template that --ignore-chat-template leaves out")
    options.check_counts(n=n)
    options.check_text(prompt_cache_file=prompt_cache_file)
    question = read_prompt(text, prompt)
    cache_file.check(prompt_cache_file)
    session = open_session(run, context.obj, sampling, forks=n > 1)
    sampler, processors = session.sampling(sampling)
    if n > 1 and sampler is greedy:
        raise BadValueError(f"--n is {n}; with --temp 0 every answer is the same")
    if not run.quiet:
        print(session.sampling_line, file=sys.stderr)
        if n > 1 and not session.cache.goes_back:
            print(f"a second cache for --n: {format_bytes(session.cache.nbytes)}", file=sys.stderr)
    ids = (
        encode_prompt(session.tokenizer, question, session.model.config.vocab_size)
        if ignore_chat_template
        else _chat_ids(session, question, run.system_prompt)
    )
    ids = cache_file.take(prompt_cache_file, session.cache, ids, quiet=run.quiet)
    output = _Output(session, run, n, json_lines)
    with LateProgress("reading the prompt", quiet=run.quiet) as progress:
        responses = stream_choices(
            session.model,
            session.tokenizer,
            ids,
            n,
            max_tokens=run.max_tokens,
            sampler=sampler,
            logits_processors=processors,
            prompt_cache=session.cache,
            prefill_step_size=run.prefill_step_size,
            stop=run.stop,
            prompt_progress_callback=progress.update,
        )
        try:
            for number, response in responses:
                progress.stop()
                output.write(number, response)
        finally:
            progress.stop()
            output.end()
    if prompt_cache_file is not None:
        session.cache.save(prompt_cache_file)


class _Output:
    """Answers one after another: their text to standard output, all else to standard error."""

    def __init__(self, session: Session, run: RunOptions, n: int, json_lines: bool) -> None:
        self._session, self._run, self._n, self._json_lines = session, run, n, json_lines
        self._number = 0
        self._statistics = RunStatistics()

    def write(self, number: int, response: GenerationResponse) -> None:
        """The next token of an answer."""
        if number != self._number:
            self.end()
            self._number, self._statistics = number, RunStatistics()
        if self._statistics.last is None and self._n > 1 and not self._json_lines:
            if number:
                print(flush=True)  # an empty line between two texts
            if not self._run.quiet:
                print(f"--- {number + 1} of {self._n} ---", file=sys.stderr, flush=True)
        self._statistics.add(response)
        terminal.write_generated(_json_line(number, response) if self._json_lines else response.text, raw=self._run.raw)

    def end(self) -> None:
        """After the last token of an answer."""
        statistics = self._statistics
        if statistics.last is not None and not self._json_lines:
            print(flush=True)
        if not self._run.quiet:
            lines = statistics.lines(self._session)
            # The prompt, and loading, are the first one's alone.
            print("\n".join(lines[1:2] if self._number else lines), file=sys.stderr)
        if not self._json_lines and (cut := statistics.cut(self._run.max_tokens, self._session)):
            print(cut, file=sys.stderr)  # with --quiet too: half an answer looks like a whole one


def _chat_ids(session: Session, question: str, system_prompt: str | None) -> list[int]:
    system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    if not session.tokenizer.has_chat_template:
        raise PromptError("the model has no chat template; --ignore-chat-template continues the prompt as it is")
    rendered = render_chat(session.tokenizer, [*system, {"role": "user", "content": question}])
    return encode_rendered(session.tokenizer, rendered)


def _json_line(number: int, response: GenerationResponse) -> str:
    logprob = float(response.logprobs[response.token].item())  # type: ignore[arg-type]
    record = {
        "choice": number,
        "index": response.generation_tokens - 1,
        "token": response.token,
        "text": response.text,
        "logprob": round(logprob, 6) if math.isfinite(logprob) else None,
        "latency_ms": round(response.latency_ms, 3),
        "finish_reason": response.finish_reason,
    }
    return json.dumps(record, ensure_ascii=sys.stdout.isatty(), allow_nan=False) + "\n"
