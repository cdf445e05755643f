"""``kvant bench``: every token's latency, engines side by side."""

import json
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from kvant.cli import bench_options, options, ranks, terminal
from kvant.cli.options import BadValueError
from kvant.engine.drafting.drafts import Source
from kvant.text.tokenizer import load_tokenizer
from kvant.tools.bench.engines import with_drafts
from kvant.tools.bench.prompts import Replay

if TYPE_CHECKING:
    from kvant.tools.bench.engines import EngineSpec
    from kvant.tools.bench.here import OverRanks
    from kvant.tools.bench.recording import Header, Recording


class BenchGroup(TyperGroup):
    """The model may be the first argument, as of the other commands."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """The arguments with --model before one that is no command of the group."""
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            if any(word.partition("=")[0] == "--model" for word in args[1:]):
                raise BadValueError(f"the model is given twice, as the argument {args[0]!r} and with --model")
            args = ["--model", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=BenchGroup, invoke_without_command=True, subcommand_metavar="[MODEL] | compare A B")


@app.callback()
def bench(
    context: typer.Context,
    *,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            help="kvant, kvant:unfused or kvant:fused (its kernels), mlx-lm, mlx-lm:float32 (its weights cast), "
            "or mlx-lm:openblas (kvant's BLAS lent to it); repeatable; default: kvant and mlx-lm."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help=f"{options.MODEL_HELP}, the default; or the first argument.", autocompletion=options.complete_models
        ),
    ] = None,
    random: Annotated[
        str | None,
        typer.Option(metavar="SHAPE", help=f"Random weights instead of a model: {bench_options.SHAPE_NAMES}."),
    ] = None,
    weight_bits: Annotated[
        int | None, typer.Option(help="Bits of the random weights: 4, 8, or 0 for bfloat16; default: 4.")
    ] = None,
    weight_group_size: Annotated[
        int | None, typer.Option(help="Random weights that share one scale; default: 64.")
    ] = None,
    prompt_tokens: Annotated[
        str | None,
        typer.Option(metavar="N,N...", help="Prompt lengths; default: those of 128,1024,4096 the model has room for."),
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-m", help="Tokens generated in every run.")] = 64,
    kv_bits: Annotated[
        str | None,
        typer.Option(metavar="N,N...", help="Bits of a cached key or value: 0 (not quantized), 8, 4; default: 0,8,4."),
    ] = None,
    kv_group_size: Annotated[
        int | None,
        typer.Option(help="Cached values that share one scale; default: each engine's, 32 of kvant, 64 of mlx-lm."),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Rounds: every engine runs every prompt length once in each.")] = 5,
    seed: Annotated[int, typer.Option(help="Seed of the prompts and of random weights.")] = 0,
    baseline: Annotated[
        str | None, typer.Option(metavar="LABEL", help="The engine others are divided by; default: the first mlx-lm.")
    ] = None,
    output: Annotated[Path | None, typer.Option(metavar="FILE.jsonl", help="Keep a line a token here.")] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png|svg", help="Draw latency against position; needs matplotlib.")
    ] = None,
    json_summaries: Annotated[
        bool, typer.Option("--json", help="Print the figures as JSON instead of tables.")
    ] = False,
    prefill_step_size: options.PrefillStepSize = 512,
    parallel: options.Parallel = None,
    draft: Annotated[
        Source,
        typer.Option(
            help="prompt: measure kvant with drafts of prompt and answer too, beside kvant without; default engine: "
            "kvant alone."
        ),
    ] = "none",
    draft_model: Annotated[
        str | None,
        typer.Option(
            help="Measure kvant with the drafts of this model too, instead of --draft prompt.",
            autocompletion=options.complete_models,
        ),
    ] = None,
    num_draft_tokens: options.NumDraftTokens = None,
    replay: Annotated[
        Replay | None,
        typer.Option(
            help="With --draft prompt, generate a text that is known instead of the likeliest tokens: edit, the prompt "
            "again with one of 100 tokens another; new, random tokens, which cannot be drafted."
        ),
    ] = None,
    streams: Annotated[
        str | None,
        typer.Option(
            metavar="N,N...",
            help="Measure so many requests at once: kvant's pool, kvant one by one, and mlx-lm's batches. Their "
            "prompts take the lengths of --prompt-tokens (default: 128) in turn. With --server: those servers, and "
            "engines that are named.",
        ),
    ] = None,
    server: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]URL",
            help="Also measure the OpenAI-compatible server there; repeatable, each with a NAME for the tables.",
        ),
    ] = None,
    server_model: Annotated[
        list[str] | None, typer.Option(help="The model's name at that server; of several, in their order.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress.")] = False,
) -> None:
    """Measure engines side by side, every token.

    Each has a process of its own, they run in turns, with the same prompts, and generate --max-tokens tokens each,
    greedily. `compare A B` sets two recordings side by side.

    Under `kvant launch` kvant is measured on all ranks together, in rank 0's own process.
    """
    if context.invoked_subcommand is not None:
        bench_options.refuse_all(context)
        return
    options.check_counts(
        max_tokens=max_tokens,
        repeats=repeats,
        prefill_step_size=prefill_step_size,
        kv_group_size=kv_group_size,
        weight_group_size=weight_group_size,
    )
    options.check_text(model=model)
    options.check_draft(draft, draft_model, num_draft_tokens)
    for url in server or []:
        options.check_text(server=url)
    for name in server_model or []:
        options.check_text(server_model=name)
    options.check_kernels()  # the workers' environment is this process's
    ranks.check_parallel(parallel)
    ranks.refuse_draft_model(draft_model)
    drafting = bench_options.check_draft(draft, draft_model, replay, streams, plot, random, engine or (), server or [])
    if ranks.guard() is not None:
        engine = bench_options.refuse_over_ranks(engine, random, streams, server or [])
    elif drafting is not None:
        engine = engine or ["kvant"]
    bench_options.check_seed(seed)
    if plot is not None and max_tokens == 1:
        raise BadValueError("--plot draws the tokens after the first, but --max-tokens is 1")
    source = bench_options.source(model, random, weight_bits, weight_group_size, seed)
    counts = [] if streams is None else bench_options.streams(streams)
    defaults = bench_options.DEFAULT_CONTEXTS[: 1 if counts else None]
    contexts = bench_options.contexts(prompt_tokens, max_tokens, source.sizes.max_position_embeddings, defaults)
    servers = bench_options.servers(server or [], server_model or [], source)
    only_servers = bool(counts and servers and not engine)
    if only_servers:
        bench_options.check_no_cache(kv_bits, kv_group_size)
    here = [] if only_servers else bench_options.specs(engine, kv_bits, kv_group_size, source.sizes, bool(counts))
    if drafting is not None:
        here = with_drafts(here, drafting, bench_options.draft_folder(draft_model, source), num_draft_tokens)
    specs = here + servers
    baseline = bench_options.baseline(baseline, specs)
    over_ranks = None
    if ranks.guard() is not None:
        tokens = max(contexts) + max_tokens
        over_ranks = _load_over_ranks(source.name, here, prefill_step_size, parallel, tokens, quiet=quiet)
    bench_options.check_files(output, plot)

    from kvant.tools.bench.prompts import random_prompts, with_answers, word_prompts
    from kvant.tools.bench.recording import Recorder
    from kvant.tools.bench.runner import Plan, measure

    # SIGTERM and a closed terminal count as Ctrl-C: the report is printed, and files made for the run are removed.
    # Under nohup the terminal's end stays ignored.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
        signal.signal(signal.SIGHUP, signal.default_int_handler)

    def progress(line: str) -> None:
        if not quiet:
            print(line, file=sys.stderr, flush=True)

    with Recorder(output) as recorder:
        if random is not None:
            progress(f"{source.name}: writing")
        with source.folder() as folder:
            if not servers:
                prompts = random_prompts(seed, source.sizes.vocab_size)
            else:
                prompts = word_prompts(seed, load_tokenizer(folder), source.sizes.vocab_size)
            if replay is not None:
                prompts = with_answers(prompts, replay, seed, source.sizes.vocab_size, max_tokens)
            progress("measuring the copy bandwidth")
            recorder.write(_header(source.name, seed, baseline))
            plan = Plan(specs, folder, prefill_step_size, contexts, max_tokens, repeats, prompts, counts)
            try:
                measure(plan, recorder, progress, over_ranks=over_ranks)
            finally:  # after an engine's failure or Ctrl-C too: the runs until then
                if recorder.recording.runs or recorder.recording.streams:
                    _report(recorder.recording, plot, json_summaries)


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="A recording, as --output keeps it.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another; ratios are its figures divided by A's.")],
) -> None:
    """Set two recordings side by side."""
    from kvant.tools.bench import report
    from kvant.tools.bench.recording import read_recording

    recordings = read_recording(a), read_recording(b)
    for path, recording in zip((a, b), recordings, strict=True):
        if recording.streams:
            raise BadValueError(f"{path} is a recording of --streams; compare takes those of single requests")
    console = terminal.console()
    console.print(f"A: {a}\nB: {b}\n", markup=False, highlight=False, soft_wrap=True)
    console.print(report.compare(*recordings))


def _load_over_ranks(
    model: str, specs: Sequence["EngineSpec"], prefill_step_size: int, parallel: str | None, tokens: int, *, quiet: bool
) -> "OverRanks":
    """The model on all ranks. Rank 0 goes on with it; another computes its part in here and ends with the run.

    Args:
        specs: the memory is planned with the widest of their caches.
        tokens: of the longest sequence.
    """
    from kvant.cli.follow import follow
    from kvant.cli.session import RunOptions, load_session
    from kvant.tools.bench.here import OverRanks

    bits, group = max(((spec.kv_bits or 0, spec.kv_group_size) for spec in specs), key=lambda found: found[0] or 16)
    run = RunOptions(
        model=model,
        kv_bits=bits,
        kv_group_size=group,
        prefill_step_size=prefill_step_size,
        parallel=parallel,
        quiet=quiet,
    )
    follow(run)
    session = load_session(run, max_kv_size=tokens)
    assert session.arranged is not None
    return OverRanks(session.model, ranks.connect(), session.arranged.parallel)


def _header(model: str, seed: int, baseline: str) -> "Header":
    """Model, machine and versions."""
    from datetime import UTC, datetime

    from kvant.machine import environment
    from kvant.tools.bench.bandwidth import measure_bandwidth
    from kvant.tools.bench.recording import Header

    here = environment()
    return Header(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        kvant=here.versions["kvant"],
        mlx=here.versions["mlx"],
        mlx_lm=here.versions["mlx_lm"],
        python=here.versions["python"],
        system=here.system,
        device=here.device,
        blas=here.blas,
        cores=here.cores,
        copy_bandwidth_gb_s=measure_bandwidth(),
        command=shlex.join(sys.argv[1:]),
        model=model,
        seed=seed,
        baseline=baseline,
    )


def _report(recording: "Recording", plot: Path | None, json_summaries: bool) -> None:
    """Print the figures of the runs that came to their end, and draw them."""
    from kvant.tools.bench import report
    from kvant.tools.bench.summary import agreement, summarize

    if recording.streams:
        _report_streams(recording, plot, json_summaries)
        return
    summaries = summarize(recording)
    if json_summaries:
        print(json.dumps([asdict(summary) for summary in summaries], indent=2, allow_nan=False))
    else:
        console = terminal.console()
        console.print("\n".join(report.describe(recording.header)), markup=False, highlight=False)
        console.print(report.table(summaries))
        same = agreement(recording)
        if same is not None:
            console.print(f"\n{same}", markup=False, highlight=False)
    if plot is not None:
        from kvant.tools.bench import plot as drawing

        drawing.plot(recording, plot)


def _report_streams(recording: "Recording", plot: Path | None, json_summaries: bool) -> None:
    """The same of several streams."""
    from kvant.tools.bench import report
    from kvant.tools.bench.streams import plot_streams, same_tokens, summarize_streams

    summaries = summarize_streams(recording)
    if json_summaries:
        print(json.dumps([asdict(summary) for summary in summaries], indent=2, allow_nan=False))
    else:
        console = terminal.console()
        console.print("\n".join(report.describe(recording.header)), markup=False, highlight=False)
        console.print(report.streams_table(summaries))
        same = same_tokens(recording)
        if same is not None:
            console.print(f"\n{same}", markup=False, highlight=False)
    if plot is not None:
        plot_streams(recording, plot)
