"""``kvant bench``: measure the latency of every token, engines side by side."""

import shlex
import signal
import sys
from contextlib import ExitStack
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from kvant.cache.options import DEFAULT_KV_GROUP_SIZE
from kvant.cli import bench_options, options, terminal
from kvant.cli.options import BadValueError
from kvant.engine.drafts import Source
from kvant.tools.bench.engines import EngineSpec, with_drafts
from kvant.tools.bench.shapes import SHAPES


def bench(
    context: typer.Context,
    model_argument: options.ModelArgument = None,
    *,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            help="kvant, kvant:unfused or kvant:fused (its kernels), mlx-lm, mlx-lm:float32 (with "
            "its weights cast), or mlx-lm:openblas (with kvant's BLAS); repeatable; default: "
            "kvant and mlx-lm."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help=f"{options.MODEL_HELP}, the default.", autocompletion=options.complete_models),
    ] = None,
    random: Annotated[
        str | None,
        typer.Option(
            metavar="SHAPE", help=f"Use random weights of this shape instead of a model: {', '.join(SHAPES)}."
        ),
    ] = None,
    weight_bits: Annotated[
        int | None, typer.Option(help="Bits of the random weights: 4, 8, or 0 for bfloat16; default: 4.")
    ] = None,
    weight_group_size: Annotated[
        int | None, typer.Option(help="Random weights that share one scale; default: 64.")
    ] = None,
    prompt_tokens: Annotated[
        str | None,
        typer.Option(
            metavar="N,N...",
            help="Lengths of the prompts; default: 128,1024,4096, as far as the model has room.",
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-m", help="Generate this many tokens in every run.")
    ] = 64,
    kv_bits: Annotated[
        str | None,
        typer.Option(
            metavar="N,N...",
            help="Bits of each number in the cache: 0 (not quantized), 8, 4; default: 0,8,4.",
        ),
    ] = None,
    kv_group_size: Annotated[
        int | None,
        typer.Option(help="Numbers in the cache that share one scale; default: 32 for kvant, 64 for mlx-lm."),
    ] = None,
    kv_format: options.KvFormat = None,
    repeats: Annotated[
        int, typer.Option(help="Rounds; in each, every engine runs every prompt length once.")
    ] = 5,
    seed: Annotated[int, typer.Option(help="Seed of the prompts and of random weights.")] = 0,
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="LABEL", help="Divide the others' times by this engine's; default: the first mlx-lm."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE.jsonl", help="Write the time of every token to this file.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png|svg", help="Draw latency against position; needs matplotlib."),
    ] = None,
    json_figures: Annotated[
        bool, typer.Option("--json", help="Print the figures as JSON instead of tables.")
    ] = False,
    prefill_step_size: options.PrefillStepSize = 512,
    draft: Annotated[
        Source,
        typer.Option(
            help="Also measure kvant with tokens guessed from repeated text (prompt) or by the model's own "
            "head (mtp); the default engine is then only kvant."
        ),
    ] = "none",
    draft_model: Annotated[
        str | None,
        typer.Option(
            help="Also measure kvant with tokens guessed by this model, instead of --draft prompt.",
            autocompletion=options.complete_models,
        ),
    ] = None,
    num_draft_tokens: options.NumDraftTokens = None,
    streams: Annotated[
        str | None,
        typer.Option(
            metavar="N,N...",
            help="Measure this many requests at once: kvant's pool, kvant one by one, and mlx-lm's "
            "batches. Their prompts take the lengths of --prompt-tokens (default: 128) in turn. "
            "With --server: those servers, and the engines you name.",
        ),
    ] = None,
    server: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]URL",
            help="Also measure this OpenAI-compatible server; repeatable, each with a NAME for tables.",
        ),
    ] = None,
    server_model: Annotated[
        list[str] | None,
        typer.Option(help="The name of the model on that server; for several servers in their order."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress.")] = False,
) -> None:
    """Measure every token's latency, engines side by side.

    Each engine has its own process. They run in turn, with the same prompts, and generate --max-tokens tokens
    each, greedily.
    """
    model = options.choose_model(context, model_argument, model)
    options.check_counts(
        max_tokens=max_tokens,
        repeats=repeats,
        prefill_step_size=prefill_step_size,
        kv_group_size=kv_group_size,
        weight_group_size=weight_group_size,
    )
    for text in (*(server or []), *(server_model or [])):
        options.check_text(value=text)
    options.check_draft(draft, draft_model, num_draft_tokens)
    options.check_kernels()  # the workers' environment is this process's
    if plot is not None and max_tokens == 1:
        raise BadValueError("--plot draws the tokens after the first, but --max-tokens is 1")
    drafts = bench_options.drafts(draft, draft_model, num_draft_tokens, model)
    if drafts:
        options.refuse("drafts cannot be measured with it", streams=streams, plot=plot)
        options.refuse("a draft model needs text that a model writes", random=random if draft_model else None)
        engine = engine or ["kvant"]
    source = bench_options.source(model, random, weight_bits, weight_group_size, seed)
    counts = bench_options.streams(streams)
    contexts = bench_options.contexts(
        prompt_tokens, max_tokens, source.sizes.max_position_embeddings, bool(counts)
    )
    servers = bench_options.servers(server or [], server_model or [])
    if servers:
        options.refuse("--server needs --model, whose tokenizer writes its prompts", random=random)
    specs: list[EngineSpec] = []
    if counts and servers and not engine:
        why = "--streams with --server measures no other --engine"
        options.refuse(why, kv_bits=kv_bits, kv_group_size=kv_group_size, kv_format=kv_format)
    else:
        specs = bench_options.specs(engine, kv_bits, kv_group_size, source.sizes, bool(counts), kv_format)
    if drafts:
        specs = with_drafts(specs, **drafts)
        if not any(spec.name == "kvant" for spec in specs):
            raise BadValueError(f"--engine is {', '.join(engine or ())}; only kvant drafts")
    specs += servers
    baseline = bench_options.baseline(baseline, specs)
    bench_options.check_files(output, plot)

    from kvant.machine import environment
    from kvant.text.tokenizer import load_tokenizer
    from kvant.tools.bench.bandwidth import measure_bandwidth
    from kvant.tools.bench.figures import summarize
    from kvant.tools.bench.plot import plot as draw
    from kvant.tools.bench.prompts import random_prompts, word_prompts
    from kvant.tools.bench.recording import Header, Recording
    from kvant.tools.bench.runner import Plan, measure
    from kvant.tools.bench.table import describe, tables

    # SIGTERM and a closed terminal act like Ctrl-C, so that the report is printed and temporary files are
    # removed. Under nohup the terminal's end is still ignored.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
        signal.signal(signal.SIGHUP, signal.default_int_handler)

    progress = partial(terminal.say, quiet=quiet)
    for group in {spec.kv_group_size for spec in specs if spec.name == "kvant" and not spec.kv_format}:
        if group not in (None, kv_group_size, DEFAULT_KV_GROUP_SIZE):
            progress(f"kvant: groups of {group}; {DEFAULT_KV_GROUP_SIZE} does not divide the head dimension")
    with ExitStack() as stack:
        if random is not None:
            progress(f"{source.name}: writing")
        folder = stack.enter_context(source.folder)
        vocab_size = source.sizes.vocab_size
        prompts = (
            word_prompts(seed, load_tokenizer(folder), vocab_size)
            if servers
            else random_prompts(seed, vocab_size)
        )
        progress("measuring the copy bandwidth")
        header = Header(
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            command=shlex.join(sys.argv[1:]),
            model=source.name,
            seed=seed,
            baseline=baseline,
            copy_bandwidth_gb_s=measure_bandwidth(),
            machine=environment(),
        )
        file = None if output is None else stack.enter_context(output.open("x", encoding="utf-8"))
        recording = Recording(header, file)
        plan = Plan(specs, folder, prefill_step_size, contexts, max_tokens, repeats, prompts, counts)
        try:
            measure(plan, recording, progress)
        finally:  # even after a failure or Ctrl-C, report the runs so far
            if recording.runs:
                summaries = summarize(recording)
                parts: list[Any] = [*describe(recording.header), tables(summaries)]
                terminal.show([asdict(summary) for summary in summaries], parts, as_json=json_figures)
                if plot is not None:
                    draw(recording, plot)
