"""``kvant report``: measure how a cache format affects quality, with a model and a text."""

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from kvant.cache.kv_format import PMX
from kvant.cli import options, terminal
from kvant.cli.options import BadValueError
from kvant.cli.progress import LateProgress
from kvant.engine.load import POCKET, find_model, load_folder
from kvant.errors import KvantError
from kvant.operators.packing import PACKINGS
from kvant.operators.quantization import FITTED_BITS
from kvant.text.tokenizer import Tokenizer

DEFAULT_TOKENS = 8192
DEFAULT_MAX_KLD = 0.005
DEFAULT_SAMPLES = 10
DEFAULT_SEED = 0
PIECES = 4  # pieces of a text for tuning; half of them check the result


@options.with_options
def report(
    context: typer.Context,
    model_argument: options.ModelArgument = None,
    *,
    model: options.Model = POCKET,
    adapter_path: options.AdapterPath = None,
    formats: Annotated[
        str | None,
        typer.Option(
            metavar="F,F...",
            help="Cache formats, such as 8g32,4g64:nosplit,4g32:notail: bits, g and the group size, "
            "then :nosplit for biases in the cache, :pmx for keys that are not rotated, :tail "
            "or :notail for exact first and last tokens or none; 0 is the reference. Default: 8 "
            "and 4 bits in groups of 32 and 64, with and without the bias split.",
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A UTF-8 text; default: built-in conversations; for pocket also recall questions.",
        ),
    ] = None,
    tokens: Annotated[
        int,
        typer.Option(help="Read at most this many tokens of text, and of pocket's recall questions."),
    ] = DEFAULT_TOKENS,
    decode_tokens: Annotated[
        int | None,
        typer.Option(
            help="Read this many tokens at the end of the first piece one by one, at most a quarter "
            "of it; default: 256."
        ),
    ] = None,
    reserve: Annotated[
        int | None,
        typer.Option(
            help="Reserve each cache for this many tokens, the largest possible piece of the text; "
            "default: the whole text, or the model's context."
        ),
    ] = None,
    compare: Annotated[
        list[str] | None,
        typer.Option(
            metavar="mlx-lm|FILE",
            help="Also measure mlx-lm's caches, with mlx-lm's model: 8 and 4 bits in groups of 32 "
            "and 64. With --reference: another FILE that llama-perplexity wrote with a "
            "quantized cache; repeatable.",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png|svg", help="Draw KLD against the bytes of a token; needs matplotlib."),
    ] = None,
    reference: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Compare with the predictions that `llama-perplexity --kl-divergence-base FILE` wrote, on "
            "its tokens.",
        ),
    ] = None,
    kv_format: options.KvFormat = None,
    tune: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Choose a transform for the keys, and the bits of keys and values for each layer, "
            "on one half of the text; measure the choice on the other half; write FILE for "
            "--kv-format.",
        ),
    ] = None,
    kv_bits: Annotated[
        int | None, typer.Option(help="With --tune: the bits to begin with; default: 4.")
    ] = None,
    max_kld: Annotated[
        float | None,
        typer.Option(
            help="With --tune: give layers 8 bits until the mean KLD is at most this; default: 0.005."
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="N,N...",
            help="Also let every format answer generated tasks: needles in a text, variables, common "
            "words. Prompt and answer have at most N tokens; the text is --text, or built-in "
            "stories.",
        ),
    ] = None,
    samples: Annotated[
        int | None, typer.Option(help="With --tasks: this many of each kind and length; default: 10.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="With --tasks: the seed for drawing them; default: 0.")
    ] = None,
    json_object: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of tables.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress.")] = False,
) -> None:
    """Measure the quality that cache formats cost.

    Each format is compared with a cache that is not quantized. The command measures perplexity, KLD and
    agreement, for tokens read in chunks and for tokens read one by one after them, each layer's attention
    error, and bytes per token.
    """
    model = options.choose_model(context, model_argument, model)
    options.check_text(adapter_path=adapter_path, text=None if text is None else str(text))
    options.check_kernels()
    if tune is None:
        options.refuse("it needs --tune", kv_bits=kv_bits, max_kld=max_kld)
    else:
        _check_tuning(tune, kv_bits, max_kld, formats or kv_format)
    if tasks is None:
        options.refuse("it needs --tasks", samples=samples, seed=seed)
    options.check_counts(samples=samples, decode_tokens=decode_tokens)
    lengths = [] if tasks is None else options.whole_numbers("--tasks", tasks)
    if reference is not None and (text is not None or tune is not None):
        raise BadValueError(
            f"--reference {reference} has its own text; leave out {'--text' if text else '--tune'}"
        )

    from kvant.tools.drawing import check_plot_path
    from kvant.tools.report.formats import (
        DEFAULT_BITS,
        DEFAULT_GROUPS,
        CacheFormat,
        check_formats,
        default_formats,
        parse_formats,
    )
    from kvant.tools.report.measure import DECODED, LEAST_TOKENS, figures_json, measure
    from kvant.tools.report.mlx_lm_reader import MLX_LM
    from kvant.tools.report.reference import read_reference
    from kvant.tools.report.tasks import answer_samples, haystack, make_samples, task_rows
    from kvant.tools.report.texts import built_in_text, halves, recall_dialogues, text_file
    from kvant.tools.report.tune import Row
    from kvant.tools.report.tune import tune as tune_format

    for flag, count in (("--tokens", tokens), ("--reserve", reserve)):
        if count is not None and count < LEAST_TOKENS:
            raise BadValueError(f"{flag} is {count}; expected at least {LEAST_TOKENS}")
    paths = [Path(name) for name in compare or () if name != MLX_LM]
    if paths and reference is None:
        raise BadValueError(f"--compare {paths[0]} needs --reference; expected {MLX_LM} without it")
    if compare and adapter_path is not None:
        raise BadValueError(f"--compare {compare[0]} does not support --adapter-path; leave one out")
    with options.named("--formats"):
        chosen = None if formats is None else parse_formats(formats)
    if kv_format is not None:
        bits, group = (FITTED_BITS, DEFAULT_GROUPS[0]) if kv_format == PMX else (None, None)
        added = CacheFormat.from_keywords(kv_bits=bits, kv_group_size=group, kv_format=kv_format)
        if chosen is not None and added in chosen:
            raise BadValueError(f"--kv-format is {kv_format}, which --formats has as {added.label}")
        chosen = [*(chosen or []), added]
    if plot is not None:
        with options.named("--plot"):
            check_plot_path(plot)

    folder = find_model(model)
    with LateProgress("loading", quiet=quiet) as progress:
        decoder, tokenizer = load_folder(folder, progress.update, adapter_path=adapter_path)
    if chosen is None:
        chosen = default_formats(decoder)
    with options.named("--formats" if kv_format is None else "--formats, --kv-format"):
        check_formats(chosen, decoder)
    config = decoder.config
    limit = config.max_position_embeddings
    most = tokens if tune is None else tokens // PIECES
    if reserve is not None and reserve > (limit or math.inf):
        raise BadValueError(f"--reserve is {reserve}; the model's context is {limit} tokens")
    length = min([most, *(size for size in (limit, reserve) if size is not None)])
    if length < LEAST_TOKENS:
        raise KvantError(f"pieces of {length} tokens; the report needs {LEAST_TOKENS} or more --tokens")
    if max(lengths, default=0) > (limit or math.inf):
        raise BadValueError(f"--tasks has {max(lengths)}; the model's context is {limit} tokens")
    drawn = []
    if lengths:
        with options.named("--tasks"):
            drawn = make_samples(
                tokenizer, haystack(text), lengths, samples or DEFAULT_SAMPLES, seed or DEFAULT_SEED
            )
    others = None
    files = []
    if reference is not None:
        others, *files = (
            read_reference(path, config.vocab_size, _first_token(tokenizer)) for path in (reference, *paths)
        )
        for file in files:
            if file.text.pieces != others.text.pieces:
                raise KvantError(f"{file.path}: its text differs from that of {reference}")
        read = replace(others.text, pieces=others.text.pieces[: max(1, tokens // len(others.text.pieces[0]))])
        if len(read.pieces[0]) > (limit or math.inf):
            raise KvantError(
                f"{reference} has pieces of {len(read.pieces[0])} tokens; the model's context is {limit}"
            )
        if len(read.pieces[0]) > (reserve or math.inf):
            raise BadValueError(
                f"--reserve is {reserve}; {reference} has pieces of {len(read.pieces[0])} tokens"
            )
    elif text is None:
        read = built_in_text(tokenizer, length, tokens)
    else:
        read = text_file(text, tokenizer, config.vocab_size, length, tokens)
    if len(read.pieces[0]) < LEAST_TOKENS:
        raise KvantError(f"{read.name}: {read.tokens} tokens; the report needs {LEAST_TOKENS}")
    is_built_in = text is None and reference is None and folder == find_model(POCKET)
    recall = recall_dialogues(tokenizer, tokens) if is_built_in else []
    tried: list[Row] = []
    if tune is not None:
        chooses, read = halves(read)
        tune_group = chosen[0].group_size
        tune_bits = kv_bits or DEFAULT_BITS[-1]
        with LateProgress("tuning", quiet=quiet) as progress:
            kld = DEFAULT_MAX_KLD if max_kld is None else max_kld
            tuned, tried = tune_format(
                decoder,
                chooses,
                kv_bits=tune_bits,
                kv_group_size=tune_group,
                max_kld=kld,
                progress=progress.update,
            )
        tuned.write(tune)
        chosen = [
            CacheFormat.from_keywords(kv_format=tune),
            *(CacheFormat(each, tune_group) for each in sorted({tune_bits, *DEFAULT_BITS})),
        ]
    name = model if adapter_path is None else f"{model} with {adapter_path}"
    with LateProgress("measuring", quiet=quiet) as progress:
        result = measure(
            name,
            decoder,
            read,
            chosen,
            decoded=decode_tokens or DECODED,
            reserved=reserve,
            recall=recall,
            others=others,
            mlx_lm=folder if MLX_LM in (compare or ()) else None,
            files=files,
            progress=progress.update,
        )
    rows: list[dict[str, Any]] = []
    if drawn:
        with LateProgress("answering", quiet=quiet) as progress:
            rows = task_rows(drawn, answer_samples(decoder, tokenizer, drawn, chosen, progress.update))

    from kvant.tools.report.output import describe, tables, tuning

    lines: list[Any] = [*describe(result), *([tuning(tried)] if tune is not None else []), *tables(result)]
    record = figures_json(result) | ({"tried": [asdict(row) for row in tried]} if tried else {})
    if rows:
        lines.append(_tasks_table(rows))
        record |= {"seed": seed or DEFAULT_SEED, "tasks": rows}
    terminal.show(record, lines, as_json=json_object)
    if plot is not None:
        from kvant.tools.report.output import plot as draw

        draw(result, plot)


def _tasks_table(rows: list[dict[str, Any]]) -> Any:
    """Show scores by task and length; the last row is the share of answers equal to the full cache's."""
    names = [cell["format"].replace(":nosplit", "\n:no-\nsplit") for cell in rows[0]["formats"]]
    cells = [
        [row["kind"], str(row["tokens"]), *(f"{cell['score_percent']:.1f}" for cell in row["formats"])]
        for row in rows
    ]
    same = [
        sum(cell["same_answers"] for cell in column)
        for column in zip(*(row["formats"] for row in rows), strict=True)
    ]
    each = rows[0]["samples"]
    cells.append(["same answer", "", *(f"{100 * count / (each * len(rows)):.1f}" for count in same)])
    caption = (
        f"Percent of the expected strings in {each} answers; "
        "the last row: of answers that equal the full cache's."
    )
    shown: dict[str, Any] = {
        "title": "Tasks",
        "title_justify": "left",
        "caption": caption,
        "caption_justify": "left",
    }
    return terminal.table(["task", "tokens", *names], cells, right=["tokens", *names], padding=0, **shown)


def _first_token(tokenizer: Tokenizer) -> int | None:
    """Return the beginning-of-text token if the tokenizer begins every text with it, or None."""
    first: int = tokenizer.encode("a")[0]
    return first if first == tokenizer.bos_token_id else None


def _check_tuning(tune: Path, kv_bits: int | None, max_kld: float | None, formats: str | None) -> None:
    """Refuse values out of range, or a file that could not be written."""
    if formats is not None:
        raise BadValueError(f"{formats!r:.40} is a format, but --tune chooses its own; leave one out")
    if kv_bits not in (None, *PACKINGS):
        raise BadValueError(f"--kv-bits is {kv_bits}; expected {' or '.join(map(str, PACKINGS))}")
    if max_kld is not None and not 0 < max_kld < math.inf:
        raise BadValueError(f"--max-kld is {max_kld}; expected more than 0")
    if not tune.parent.is_dir():
        raise BadValueError(f"--tune: the folder of {tune} does not exist")
