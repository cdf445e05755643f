"""``kvant generate``: answer one prompt, once or several times, or the prompts of a file."""

import sys
from dataclasses import replace
from typing import Annotated

import typer

from kvant.cache import ModelCache
from kvant.cli import options, ranks
from kvant.cli import prompt_cache_file as cache_file
from kvant.cli.answer_output import AnswerOutput
from kvant.cli.answering import answer
from kvant.cli.defaults import OF_THE_TEMPLATE
from kvant.cli.json_schema import SchemaGrammars, check_flags, read_schema
from kvant.cli.options import BadValueError, RunOptions, Without
from kvant.cli.progress import LateProgress
from kvant.cli.prompt import check_first_word, read_prompt, split_arguments
from kvant.cli.prompts_file import Line, read_lines
from kvant.cli.question import prepare
from kvant.cli.sampling import drawn_seed
from kvant.cli.session import follow, load_session, open_session
from kvant.cli.terminal import say
from kvant.engine.sampler import greedy
from kvant.engine.sampling import SamplingOptions

SEQUENCES = 8  # default of --sequences
MAX_ANSWERS = 10_000  # limit of --n


@options.with_options
def generate(
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL] [PROMPT]",
            help="The prompt; or the model and the prompt; or, with --prompt, the model. Text that "
            "is piped in comes before the prompt, or is the prompt. - reads the prompt from "
            "standard input.",
            autocompletion=options.complete_models,
        ),
    ] = None,
    *,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="The prompt, instead of an argument.")
    ] = None,
    run: Annotated[RunOptions, Without(["checkpoints"])],
    sampling: SamplingOptions,
    ignore_chat_template: Annotated[
        bool,
        typer.Option(
            "--ignore-chat-template", help="Continue the prompt as it is, without the chat template."
        ),
    ] = False,
    prefill: Annotated[
        str | None,
        typer.Option("--prefill-response", metavar="TEXT", help="Begin the answer with this text."),
    ] = None,
    json_lines: Annotated[
        bool, typer.Option("--json", help="Print a JSON object for each token instead of text.")
    ] = False,
    json_schema: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Give an answer that satisfies the JSON schema in this file."),
    ] = None,
    n: Annotated[int, typer.Option("--n", help="Give this many answers, each with its own seed.")] = 1,
    prompts_file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Answer the prompts in this file, a JSON object a line: prompt or messages, and "
            "perhaps id, max_tokens, stop and sampling options; - reads standard input.",
        ),
    ] = None,
    sequences: Annotated[
        int | None,
        typer.Option(
            help=f"Give at most this many answers at once, with --prompts-file or --n; default: {SEQUENCES}."
        ),
    ] = None,
    deterministic: options.Deterministic = False,
    prompt_cache_file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Keep the prompt and the answer in this file. If it exists, only what is new is read.",
        ),
    ] = None,
) -> None:
    """Answer one prompt, or the prompts of a file.

    Text goes to standard output, statistics to standard error.
    """
    if ignore_chat_template:
        for name, value in (
            *((name, getattr(run, name)) for name in OF_THE_TEMPLATE),
            ("prefill_response", prefill),
        ):
            if value is not None:
                flag = options.flag(name)
                raise BadValueError(f"{flag} needs the chat template, which --ignore-chat-template disables")
    options.check_counts(n=n, sequences=sequences)
    if n > MAX_ANSWERS:
        raise BadValueError(f"--n is {n}; expected at most {MAX_ANSWERS}")
    options.check_text(
        prefill_response=prefill,
        prompt_cache_file=prompt_cache_file,
        prompts_file=prompts_file,
        json_schema=json_schema,
    )
    check_flags(json_schema, run, prefill)
    of_a_file = prompts_file is not None
    together = n > 1 or deterministic or of_a_file
    if sequences is not None and not together:
        raise BadValueError(f"--sequences is {sequences}, which has no effect without --prompts-file or --n")
    if deterministic:
        options.check_deterministic(run)
    if prompts_file is not None:
        one = {"--prompt": prompt, "--n": n if n > 1 else None, "--prefill-response": prefill}
        for flag, value in (one | {"--prompt-cache-file": prompt_cache_file}).items():
            if value is not None:
                raise BadValueError(f"{flag} is {value!r:.80}; it is not supported with --prompts-file")
        model, text = split_arguments(words or (), prompts_file, "--prompts-file")
    else:
        model, text = split_arguments(words or (), prompt)
    run = replace(run, model=options.choose_model(context, model, run.model))
    if model is not None and (text is not None or prompts_file is not None):
        check_first_word(words or (), None if prompts_file is None else "--prompts-file")
    ranks.refuse(run.draft_model, prompt_cache_file=prompt_cache_file)
    follow(run)
    if prompts_file is not None:
        lines = read_lines(prompts_file, sampling)
    else:
        lines = [Line("", 1, read_prompt(text, prompt), None, None, sampling, has_seed=False)]
    cache_file.check(prompt_cache_file)
    schema = None if json_schema is None else read_schema(json_schema)
    at_once = sequences or SEQUENCES
    hashes = prompt_cache_file is not None
    if together:  # the reservation depends on the prompts
        session = load_session(
            run, context.obj, sampling, max_kv_size=1, sequences=min(at_once, len(lines)), hashes=hashes
        )
    else:
        session = open_session(run, context.obj, sampling, hashes=hashes)
    drawn = drawn_seed() if sampling.seed is None else sampling.seed
    if session.sampling(sampling, drawn)[0] is greedy and n > 1:
        raise BadValueError(f"--n is {n}; with --temp 0 every answer is the same")
    say(session.sampling_line + ", unless a line says otherwise" * of_a_file, run.quiet)
    grammars = None if schema is None else SchemaGrammars(session, schema)
    questions = [
        prepare(session, run, line, drawn, plain=ignore_chat_template, begun=prefill, schema=grammars)
        for line in lines
    ]
    if grammars is not None:
        grammars.close()
    # On a terminal the answers of a file show the progress themselves.
    quiet = run.quiet or (of_a_file and sys.stdout.isatty())
    with LateProgress("answering" if of_a_file else "reading the prompt", quiet=quiet) as progress:
        answers = answer(
            session,
            run,
            questions,
            n,
            at_once=at_once if together else None,
            deterministic=deterministic,
            file=prompt_cache_file,
            progress=None if of_a_file else progress.update,
        )
        output = AnswerOutput(
            session, run, questions, n, prefill or "", json_lines=json_lines, of_a_file=of_a_file
        )
        last_cache: ModelCache | None = None
        try:
            for number, response in answers:
                if of_a_file:
                    progress.update(output.finished, len(questions))
                else:
                    progress.stop()
                output.write(number, response)
                if number == n * len(questions) - 1:
                    last_cache = response.cache if together else session.cache
            if prompt_cache_file is not None and last_cache is not None:
                last_cache.save(prompt_cache_file)
        finally:
            progress.stop()
            output.end()
