"""``kvant serve``: serve models over HTTP, with OpenAI's and Anthropic's interfaces."""

import logging
import math
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Annotated

import typer

from kvant.cache.disk import QUEUE_BYTES
from kvant.cli import options, ranks, terminal
from kvant.cli.defaults import source_of
from kvant.cli.options import BadValueError, RunOptions, Without
from kvant.cli.running import recorded
from kvant.cli.session import follow, machine_without
from kvant.engine.load import POCKET
from kvant.errors import KvantError
from kvant.files import read_user_file
from kvant.installation import install_command
from kvant.sizes import format_bytes
from kvant.text.pooling import PoolingKind

MAX_KEY = 1000  # characters
MAX_KEYS_BYTES = 1 << 20
# measured, for 32 MiB of bodies with their texts and tokens, and for the server's libraries
REQUEST_BYTES = 150_000_000

# Flags that a request replaces, or that only apply to printed text.
NOT_OF_A_SERVER = Without(
    [
        "model",
        "preset",
        "max_tokens",
        "stop",
        "extra_eos_token",
        "ignore_eos",
        "system_prompt",
        "raw",
        "origins",
    ]
)


@options.with_options
def serve(
    context: typer.Context,
    model_argument: options.ModelArgument = None,
    *,
    run: Annotated[RunOptions, NOT_OF_A_SERVER],
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODEL",
            help=f"{options.MODEL_HELP}; repeatable: a request's `model` chooses; KVANT_MODEL is another "
            "default.",
            autocompletion=options.complete_models,
        ),
    ] = None,
    models: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|NAMES",
            help="Serve every model folder in this folder, or these models, with commas between them.",
        ),
    ] = None,
    keep_alive: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="Unload a model that had no request for so long, such as 0, 90s or 5m; the next request "
            "loads it again.",
        ),
    ] = "forever",
    alias: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Let clients use this name for the model, too, or any name that fits this pattern; of "
            "several models for the first one, or NAME=MODEL; repeatable.",
        ),
    ] = None,
    host: Annotated[
        str,
        typer.Option(help="Listen on this address. One that other machines reach needs --api-key-file."),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Listen on this port; 0: any that is free.")] = 8080,
    sequences: Annotated[
        int, typer.Option(help="Answer at most this many requests at once; further ones wait.")
    ] = 4,
    max_queue: Annotated[
        int, typer.Option(help="Let at most this many requests wait; further ones are refused with 429.")
    ] = 64,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="Refuse a request with a field that is unknown or unsupported; default: ignore the "
            "field and say so.",
        ),
    ] = False,
    pooling: Annotated[
        PoolingKind | None,
        typer.Option(
            help="Make /v1/embeddings of the last token's state, or of the mean; default: as the model's "
            "sentence-transformers files say."
        ),
    ] = None,
    deterministic: options.Deterministic = False,
    disk_cache: options.DiskCacheFolder = None,
    disk_cache_size: options.DiskCacheSize = None,
    api_key_file: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Accept only the keys in this file, one a line; default: any key."),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN", help="Let web pages of this origin use the server; repeatable; default: none."
        ),
    ] = None,
) -> None:
    """Serve models over HTTP, to many clients at once.

    The server speaks as OpenAI's and Anthropic's clients expect, and has a chat page.
    """
    try:
        from kvant.cli.served_models import (
            aliases_by_model,
            chosen_models,
            keep_alive_seconds,
            offer,
            refuse_for_several,
        )
        from kvant.server.registry import Registry
        from kvant.server.run import bind, url_of
        from kvant.server.run import serve as serve_until_signalled
        from kvant.server.settings import Settings
    except ImportError as error:
        raise KvantError(f"kvant serve needs the extra 'serve': {error}", install_command("serve")) from error
    names = chosen_models(model_argument, chosen(context, model, model_argument, models), models)
    options.check_counts(sequences=sequences, max_queue=max_queue)
    run = replace(run, model=names[0])
    refuse_for_several(run, pooling, len(names))
    aliases = aliases_by_model(names, alias or ())
    if deterministic:
        options.check_deterministic(run)
    ranks.refuse(run.draft_model, disk_cache=disk_cache)
    if len(names) == 1:
        follow(run, bounded=True)
    disk = options.disk_cache(disk_cache, disk_cache_size)
    other_bytes = REQUEST_BYTES + (0 if disk is None else QUEUE_BYTES)
    settings = Settings(
        model=names[0],
        aliases=aliases[names[0]],
        host=host,
        port=port,
        sequences=sequences,
        cache=run.cache,
        prefill_step_size=run.prefill_step_size,
        deterministic=deterministic,
        draft=run.draft if run.draft_model is None else "model",
        max_queue=max_queue,
        strict=strict,
        keep_alive_s=keep_alive_seconds(keep_alive),
        pooling=pooling,
        api_keys=read_keys(api_key_file),
        allow_origins=tuple(allow_origin or ()),
    )
    say = partial(terminal.say, quiet=run.quiet)
    with bind(settings) as bound, ExitStack() as ending:
        machine = machine_without(other_bytes)
        offered = offer(
            names,
            run,
            settings,
            machine,
            aliases=aliases,
            other_bytes=other_bytes,
            disk=disk,
            process=context.obj,
        )
        registry = Registry(settings, offered, machine.limit_bytes if len(offered) > 1 else math.inf)
        registry.load_now(offered[0])
        for served in offered[1:]:
            size = format_bytes(served.planned["total"])
            say(f"{served.name}: {size} planned, {served.context} tokens; loaded at its first request")
        if disk is not None:
            ending.callback(disk.close)
            say(f"disk cache: {disk.describe()}")
        if not run.quiet:
            show_log()
        ending.enter_context(recorded(url_of(bound), settings.control_token))
        code = serve_until_signalled(registry, bound, lambda line: say(f"kvant serve: {line}"))
    raise typer.Exit(code)


def chosen(
    context: typer.Context, model: list[str] | None, argument: str | None, models: str | None
) -> list[str]:
    """Return the values of --model; its default is used only if no model is named in another way."""
    if source_of(context, "model") == "COMMANDLINE":
        return model or []
    return [] if argument is not None or models is not None else model or [POCKET]


def show_log() -> None:
    """Print a line for each request, and each model loaded or unloaded, to standard error."""
    for name in ("kvant.server.requests", "kvant.server.models"):
        logger = logging.getLogger(name)
        logger.addHandler(logging.StreamHandler())
        logger.setLevel(logging.INFO)
        logger.propagate = False


def read_keys(path: str | None) -> tuple[str, ...]:
    """Return the keys in a file, one a line."""
    if path is None:
        return ()
    options.check_text(api_key_file=path)
    keys = [line.strip() for line in read_user_file(path, MAX_KEYS_BYTES).splitlines()]
    if not any(keys):
        raise BadValueError(f"--api-key-file is {path[:200]!r}, which has no key; expected one a line")
    for number, key in enumerate(keys, 1):
        if len(key) > MAX_KEY or not all(0x21 <= byte <= 0x7E for byte in key):
            raise BadValueError(
                f"--api-key-file: line {number} is no key; expected up to {MAX_KEY} characters of ASCII "
                f"without spaces"
            )
    return tuple(dict.fromkeys(key.decode("ascii") for key in keys if key))
