"""``kvant generate``: one prompt, one text."""

import json
import math
import sys
from typing import Annotated

import typer

from kvant.cli import options, terminal
from kvant.cli.options import BadValueError
from kvant.cli.progress import LateProgress
from kvant.cli.sampling import build_sampling, with_sampling
from kvant.cli.session import Session, open_session
from kvant.cli.statistics import RunStatistics
from kvant.engine.generate import GenerationResponse, stream_generate
from kvant.engine.load import POCKET
from kvant.engine.sampling import SamplingOptions
from kvant.errors import PromptError
from kvant.text.prompt import encode_rendered, render_chat
from kvant.tools.plan import Settings


@with_sampling
def generate(
    context: typer.Context,
    text: Annotated[str | None, typer.Argument(metavar="[PROMPT]", help="The prompt; - reads standard input.")] = None,
    *,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="The prompt, instead of the argument.")] = None,
    model: options.Model = POCKET,
    adapter_path: options.AdapterPath = None,
    max_tokens: options.MaxTokens = 256,
    sampling: SamplingOptions,
    stop: options.Stop = None,
    system_prompt: options.SystemPrompt = None,
    ignore_chat_template: Annotated[
        bool, typer.Option("--ignore-chat-template", help="Continue the prompt as it is, without the chat template.")
    ] = False,
    kv_bits: options.KvBits = 8,
    kv_group_size: options.KvGroupSize = None,
    kv_bias_split: options.KvBiasSplit = True,
    max_kv_size: options.MaxKvSize = None,
    kernels: options.Kernels = None,
    prefill_step_size: options.PrefillStepSize = 512,
    wired: options.Wired = False,
    json_lines: Annotated[bool, typer.Option("--json", help="Print one JSON object a token instead of text.")] = False,
    raw: options.Raw = False,
    quiet: options.Quiet = False,
) -> None:
    """Answer one prompt: text to standard output, statistics to standard error."""
    options.check_counts(max_tokens=max_tokens, prefill_step_size=prefill_step_size)
    reserved = options.kv_size(max_kv_size)
    group_size = options.check_kv_format(kv_bits, kv_group_size)
    options.check_kernels(kernels)
    options.check_text(model=model, adapter_path=adapter_path, system_prompt=system_prompt)
    stops = options.check_stop(stop)
    if ignore_chat_template and system_prompt is not None:
        raise BadValueError("--system-prompt needs the chat template that --ignore-chat-template leaves out")
    question = _read_prompt(text, prompt)

    session = open_session(
        model,
        Settings(kv_bits, group_size, kv_bias_split, prefill_step_size),
        adapter_path=adapter_path,
        max_kv_size=reserved,
        kernels=kernels,
        wired=wired,
        quiet=quiet,
        process=context.obj,
    )
    sampler, processors = build_sampling(sampling, session)
    run = RunStatistics()
    with LateProgress("reading the prompt", quiet=quiet) as progress:
        responses = stream_generate(
            session.model,
            session.tokenizer,
            question if ignore_chat_template else _chat_ids(session, question, system_prompt),
            max_tokens=max_tokens,
            sampler=sampler,
            logits_processors=processors,
            prompt_cache=session.cache,
            prefill_step_size=prefill_step_size,
            stop=stops,
            prompt_progress_callback=progress.update,
        )
        try:
            for response in responses:
                progress.stop()
                run.add(response)
                terminal.write_generated(_json_line(response) if json_lines else response.text, raw=raw)
        finally:
            progress.stop()
            if run.last is not None and not json_lines:
                print(flush=True)
            if not quiet:
                print("\n".join(run.lines(session)), file=sys.stderr)


def _read_prompt(argument: str | None, option: str | None) -> str:
    if argument is not None and option is not None:
        raise BadValueError("the prompt is given twice, as an argument and with --prompt")
    prompt = option if argument is None else argument
    if prompt is None:
        raise BadValueError("no prompt; give it as an argument, with --prompt, or - for standard input")
    if prompt == "-":
        try:
            prompt = sys.stdin.buffer.read().decode("utf-8")
        except UnicodeDecodeError as error:
            raise PromptError(f"standard input is not UTF-8: {error}") from error
    options.check_text(the_prompt=prompt)
    if not prompt.strip():
        raise PromptError("the prompt is empty")
    return prompt


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
