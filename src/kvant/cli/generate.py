"""``kvant generate``: one prompt, one text."""

import json
import math
import sys
from dataclasses import replace
from typing import Annotated

import typer

from kvant.cli import options, terminal
from kvant.cli.defaults import OF_THE_TEMPLATE
from kvant.cli.options import BadValueError
from kvant.cli.progress import LateProgress
from kvant.cli.prompt import check_first_word, read_prompt, split_arguments
from kvant.cli.session import RunOptions, Session, open_session
from kvant.cli.statistics import RunStatistics
from kvant.cli.template import render_begun
from kvant.engine.generate import GenerationResponse, stream_generate
from kvant.engine.sampling import SamplingOptions
from kvant.errors import PromptError
from kvant.text.prompt import encode_rendered, render_chat


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
) -> None:
    """Answer one prompt: text to standard output, statistics to standard error."""
    if ignore_chat_template:
        for name, given in (*((name, getattr(run, name)) for name in OF_THE_TEMPLATE), ("prefill_response", prefill)):
            if given is not None:
                flag = options.flag(name)
                raise BadValueError(f"{flag} needs the chat template that --ignore-chat-template leaves out")
    options.check_text(prefill_response=prefill)
    model, text = split_arguments(words or (), prompt)
    run = replace(run, model=options.choose_model(context, model, run.model))
    if model is not None and text is not None:
        check_first_word(model)
    question = read_prompt(text, prompt)
    session = open_session(run, context.obj, sampling)
    sampler, processors = session.sampling(sampling)
    if not run.quiet:
        print(session.sampling_line, file=sys.stderr)
    statistics = RunStatistics()
    with LateProgress("reading the prompt", quiet=run.quiet) as progress:
        responses = stream_generate(
            session.model,
            session.tokenizer,
            question if ignore_chat_template else _chat_ids(session, question, run.system_prompt, prefill),
            max_tokens=run.max_tokens,
            sampler=sampler,
            logits_processors=processors,
            prompt_cache=session.cache,
            prefill_step_size=run.prefill_step_size,
            stop=run.stop,
            prompt_progress_callback=progress.update,
        )
        try:
            for response in responses:
                progress.stop()
                if statistics.last is None and prefill is not None and not json_lines:
                    terminal.write_generated(prefill, raw=run.raw)
                statistics.add(response)
                terminal.write_generated(_json_line(response) if json_lines else response.text, raw=run.raw)
        finally:
            progress.stop()
            if statistics.last is not None and not json_lines:
                print(flush=True)
            if not run.quiet:
                print("\n".join(statistics.lines(session)), file=sys.stderr)
            if not json_lines and (cut := statistics.cut(run.max_tokens)):
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


def _json_line(response: GenerationResponse) -> str:
    logprob = float(response.logprobs[response.token].item())  # type: ignore[arg-type]
    record = {
        "index": response.generation_tokens - 1,
        "token": response.token,
        "text": response.text,
        "logprob": round(logprob, 6) if math.isfinite(logprob) else None,
        "latency_ms": round(response.latency_ms, 3),
        "finish_reason": response.finish_reason,
    }
    return json.dumps(record, ensure_ascii=sys.stdout.isatty(), allow_nan=False) + "\n"
