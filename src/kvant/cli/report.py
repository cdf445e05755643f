"""``kvant report``: the cost in quality of a cache format, on a model and a text."""

from pathlib import Path
from typing import Annotated

import typer

from kvant.cli import options, terminal
from kvant.cli.options import BadValueError
from kvant.cli.progress import LateProgress
from kvant.engine.load import POCKET, find_model, load_folder
from kvant.errors import KvantError

DEFAULT_TOKENS = 4096


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
            help="Cache formats: bits, g, group, :nosplit for biases in the cache, such as 8g32,4g64:nosplit; 0 is the "
            "reference; default: 8 and 4 bits in groups of 32 and 64, with and without the bias split.",
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="A UTF-8 text; default: built-in conversations; for pocket also recall questions."
        ),
    ] = None,
    tokens: Annotated[
        int, typer.Option(help="At most so many tokens of the text, and of pocket's recall questions.")
    ] = DEFAULT_TOKENS,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png|svg", help="Draw KLD against bytes a token; needs matplotlib.")
    ] = None,
    json_object: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress.")] = False,
) -> None:
    """Measure the quality of cache formats against a cache that is not quantized.

    Perplexity, KLD, agreement, each layer's attention error, bytes and time a token; the text is fed through every
    cache as generation reads it.
    """
    model = options.choose_model(context, model_argument, model)
    if tokens < 2:
        raise BadValueError(f"--tokens is {tokens}; expected at least 2")
    options.check_text(adapter_path=adapter_path, text=None if text is None else str(text))
    options.check_kernels()

    from kvant.tools.drawing import check_plot_path
    from kvant.tools.report.formats import check_formats, default_formats, parse_formats
    from kvant.tools.report.measure import figures_json, measure
    from kvant.tools.report.runs import timing_room
    from kvant.tools.report.texts import built_in_text, recall_dialogues, text_file

    with options.named("--formats"):
        wanted = None if formats is None else parse_formats(formats)
    if plot is not None:
        with options.named("--plot"):
            check_plot_path(plot)

    folder = find_model(model)
    with LateProgress("loading", quiet=quiet) as progress:
        decoder, tokenizer = load_folder(folder, progress.update, adapter_path=adapter_path)
    if wanted is None:
        wanted = default_formats(decoder)
    with options.named("--formats"):
        check_formats(wanted, decoder)
    config = decoder.config
    limit = config.max_position_embeddings
    length = tokens if limit is None else min(tokens, limit - timing_room(decoder))
    if length < 2:
        raise KvantError(f"the model's context is {limit} tokens; the report needs {2 + timing_room(decoder)}")
    if text is None:
        read = built_in_text(tokenizer, length, tokens)
    else:
        read = text_file(text, tokenizer, config.vocab_size, length, tokens)
    recall = recall_dialogues(tokenizer, tokens) if text is None and folder == find_model(POCKET) else []
    name = model if adapter_path is None else f"{model} with {adapter_path}"
    with LateProgress("measuring", quiet=quiet) as progress:
        found = measure(name, decoder, read, wanted, recall=recall, progress=progress.update)

    from kvant.tools.report.output import describe, table

    terminal.show(figures_json(found), [*describe(found), table(found)], as_json=json_object)
    if plot is not None:
        from kvant.tools.report.output import plot as draw

        draw(found, plot)
