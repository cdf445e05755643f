"""``kvant generate``: one prompt, one text."""

import json
import math
import sys
from typing import Annotated

import typer

from kvant.cli import options, terminal
from kvant.cli.options import BadValueError
from kvant.cli.progress import LateProgress
from kvant.cli.prompt import read_prompt
from kvant.cli.session import RunOptions, Session, open_session
from kvant.cli.statistics import RunStatistics
from kvant.engine.generate import GenerationResponse, stream_generate
from kvant.engine.sampling import SamplingOptions
from kvant.errors import PromptError
from kvant.text.prompt import encode_rendered, render_chat


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
) -> None:
    """Answer one prompt: text to standard output, statistics to standard error."""
    if ignore_chat_template and run.system_prompt is not None:
        raise BadValueError("--system-prompt needs the chat template that --ignore-chat-template leaves out")
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
            question if ignore_chat_template else _chat_ids(session, question, run.system_prompt),
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


def _chat_ids(session: Session, question: str, system_prompt: str | None) -> list[int]:
    system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    if not session.tokenizer.has_chat_template:
        raise PromptError("the model has no chat template; --ignore-chat-template continues the prompt as it is")
    rendered = render_chat(session.tokenizer, [*system, {"role": "user", "content": question}])
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
