"""``kvant generate``: one prompt, one text; or several texts, or the prompts of a file."""

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, TypedDict

import typer

from kvant.cli import options, ranks
from kvant.cli import prompt_cache_file as cache_file
from kvant.cli.answer_output import AnswerOutput
from kvant.cli.defaults import OF_THE_TEMPLATE
from kvant.cli.follow import follow
from kvant.cli.options import BadValueError, RunOptions
from kvant.cli.progress import LateProgress
from kvant.cli.prompt import check_first_word, read_prompt, split_arguments
from kvant.cli.session import Session, load_session, open_session
from kvant.cli.template import chat_ids
from kvant.engine.drafted_run import make_run
from kvant.engine.draw import Sampler, greedy
from kvant.engine.generate import responses
from kvant.engine.processors import LogitsProcessor
from kvant.engine.response import GenerationResponse
from kvant.engine.run import PromptProgress
from kvant.engine.sampling import SamplingOptions
from kvant.text.prompt import encode_prompt

if TYPE_CHECKING:
    from kvant.cli.statistics import Generated

SEQUENCES = 8  # at once, where nobody says how many


class SideBySide(TypedDict):
    """How answers are computed together; see :func:`kvant.cli.many.reserve_pool`."""

    at_once: int
    deterministic: bool


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
    prompts_file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Answer many prompts: a JSON object a line, with prompt or messages, and with id, max_tokens, stop "
            "and options of sampling where they are its own; - reads them from standard input.",
        ),
    ] = None,
    sequences: Annotated[
        int | None,
        typer.Option(help=f"Of --prompts-file and --n: so many answers at once, at most; default: {SEQUENCES}."),
    ] = None,
    deterministic: Annotated[
        bool,
        typer.Option("--deterministic", help="An answer is the same whatever runs beside it; slower."),
    ] = False,
    prompt_cache_file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Keep prompt and answer in this file. Where it exists, only what differs from it is read.",
        ),
    ] = None,
) -> None:
    """Answer one prompt, or the prompts of a file: text to standard output, statistics to standard error."""
    if ignore_chat_template:
        for name, given in (*((name, getattr(run, name)) for name in OF_THE_TEMPLATE), ("prefill_response", prefill)):
            if given is not None:
                flag = options.flag(name)
                raise BadValueError(f"{flag} needs the chat template that --ignore-chat-template leaves out")
    options.check_counts(n=n, sequences=sequences)
    options.check_text(prefill_response=prefill, prompt_cache_file=prompt_cache_file, prompts_file=prompts_file)
    together = n > 1 or deterministic
    if sequences is not None and not together and prompts_file is None:
        raise BadValueError(f"--sequences is {sequences}, which has no effect without --prompts-file or --n")
    if deterministic:
        options.check_deterministic(run.prefill_step_size, run.draft, run.draft_model)
    ranks.refuse_draft_model(run.draft_model)
    side: SideBySide = {"at_once": sequences or SEQUENCES, "deterministic": deterministic}
    if prompts_file is not None:
        one = {"--prompt": prompt, "--n": n if n > 1 else None, "--prefill-response": prefill}
        for flag, given in (one | {"--prompt-cache-file": prompt_cache_file}).items():
            if given is not None:
                raise BadValueError(f"{flag} is {given!r:.80}; beside --prompts-file it is not supported")
        model, _ = split_arguments(words or (), prompts_file, "--prompts-file")
        run = replace(run, model=options.choose_model(context, model, run.model))
        if model is not None:
            check_first_word(model, "--prompts-file")
        follow(run)
        from kvant.cli.lines import answer_lines  # with what a single prompt does not need

        answer_lines(
            prompts_file, run, sampling, context.obj, **side, plain=ignore_chat_template, json_lines=json_lines
        )
        return
    model, text = split_arguments(words or (), prompt)
    run = replace(run, model=options.choose_model(context, model, run.model))
    if model is not None and text is not None:
        check_first_word(model)
    ranks.refuse(prompt_cache_file=prompt_cache_file)
    follow(run)
    question = read_prompt(text, prompt)
    cache_file.check(prompt_cache_file)
    if together:  # how much is reserved depends on the prompt
        session = load_session(run, context.obj, sampling, max_kv_size=1, sequences=1)
    else:
        session = open_session(run, context.obj, sampling)
    sampler, processors = session.sampling(sampling)
    if n > 1 and sampler is greedy:
        raise BadValueError(f"--n is {n}; with --temp 0 every answer is the same")
    if not run.quiet:
        print(session.sampling_line, file=sys.stderr)
    if ignore_chat_template:
        ids = encode_prompt(session.tokenizer, question, session.model.config.vocab_size)
    else:
        question_alone = [{"role": "user", "content": question}]
        ids = chat_ids(session.tokenizer, question_alone, run.system_prompt, prefill, session.template_variables)
    output = AnswerOutput(session, run, n, prefill or "", json_lines)
    with LateProgress("reading the prompt", quiet=run.quiet) as progress:
        answers: Iterator[tuple[int, Generated]]
        if together:
            from kvant.cli.answers import answer_several

            answers = answer_several(session, run, ids, n, sampler, processors, **side, file=prompt_cache_file)
        else:
            answers = _answer(session, run, ids, sampler, processors, prompt_cache_file, progress.update)
        try:
            for number, response in answers:
                progress.stop()
                output.write(number, response)
        finally:
            progress.stop()
            output.end()


def _answer(
    session: Session,
    run: RunOptions,
    ids: Sequence[int],
    sampler: Sampler,
    processors: Sequence[LogitsProcessor],
    file: str | None,
    progress: PromptProgress,
) -> Iterator[tuple[int, GenerationResponse]]:
    """One answer, number 0, through the session's cache; what the file holds of the prompt is not read again."""
    rest = cache_file.take(file, session.cache, ids, quiet=run.quiet)
    started = time.perf_counter()
    reading = make_run(
        session.drafts,
        session.model,
        rest,
        session.cache,
        max_tokens=run.max_tokens,
        sampler=sampler,
        logits_processors=processors,
        stop_tokens=session.tokenizer.eos_token_ids,
        prefill_step_size=run.prefill_step_size,
        progress=progress,
    )

    def answer() -> Iterator[tuple[int, GenerationResponse]]:
        for response in responses(reading, session.tokenizer, run.stop or (), started):
            yield 0, response
        if file is not None:
            session.cache.save(file)

    return answer()
