"""``kvant generate``: one prompt, one text."""

import json
import math
import sys
from dataclasses import replace
from typing import Annotated

import typer

from kvant.cli import options, terminal
from kvant.cli import prompt_cache_file as cache_file
from kvant.cli.defaults import OF_THE_TEMPLATE
from kvant.cli.options import BadValueError
from kvant.cli.progress import LateProgress
from kvant.cli.prompt import check_first_word, read_prompt, split_arguments
from kvant.cli.session import RunOptions, Session, open_session
from kvant.cli.statistics import RunStatistics
from kvant.cli.template import render_begun
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
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL] [PROMPT]",
            help="One argument is the prompt, two are the model and the prompt; with --prompt one is the model. "
            "Text that is piped in goes before the prompt, or is it; - reads all of it from standard input.",
            autocompletion=options.complete_models,
        ),
    ] = None,
    *,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="The prompt, instead of an argument.")] = None,
    run: RunOptions,
    sampling: SamplingOptions,
    ignore_chat_template: Annotated[
        bool, typer.Option("--ignore-chat-template", help="Continue the prompt as it is, without the chat template.")
    ] = False,
    prefill: Annotated[
        str | None,
        typer.Option("--prefill-response", metavar="TEXT", help="The answer begins with this text, and goes on."),
    ] = None,
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
    if ignore_chat_template:
        for name, given in (*((name, getattr(run, name)) for name in OF_THE_TEMPLATE), ("prefill_response", prefill)):
            if given is not None:
                flag = options.flag(name)
                raise BadValueError(f"{flag} needs the chat template that --ignore-chat-template leaves out")
    options.check_counts(n=n)
    options.check_text(prefill_response=prefill, prompt_cache_file=prompt_cache_file)
    model, text = split_arguments(words or (), prompt)
    run = replace(run, model=options.choose_model(context, model, run.model))
    if model is not None and text is not None:
        check_first_word(model)
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
        else _chat_ids(session, question, run.system_prompt, prefill)
    )
    ids = cache_file.take(prompt_cache_file, session.cache, ids, quiet=run.quiet)
    output = _Output(session, run, n, prefill or "", json_lines)
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

    def __init__(self, session: Session, run: RunOptions, n: int, begun: str, json_lines: bool) -> None:
        """``begun``: how each answer begins."""
        self._session, self._run, self._n, self._begun, self._json_lines = session, run, n, begun, json_lines
        self._number = 0
        self._statistics = RunStatistics()

    def write(self, number: int, response: GenerationResponse) -> None:
        """The next token of an answer."""
        if number != self._number:
            self.end()
            self._number, self._statistics = number, RunStatistics()
        if self._statistics.last is None and not self._json_lines:
            if number:
                print(flush=True)  # an empty line between two texts
            if self._n > 1 and not self._run.quiet:
                print(f"--- {number + 1} of {self._n} ---", file=sys.stderr, flush=True)
            terminal.write_generated(self._begun, raw=self._run.raw)
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


def _chat_ids(session: Session, question: str, system_prompt: str | None, prefill: str | None) -> list[int]:
    system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    if not session.tokenizer.has_chat_template:
        raise PromptError("the model has no chat template; --ignore-chat-template continues the prompt as it is")
    messages = [*system, {"role": "user", "content": question}]
    if prefill is None:
        rendered = render_chat(session.tokenizer, messages, session.template_variables)
    else:
        rendered = render_begun(session.tokenizer, messages, prefill, session.template_variables)
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
