"""``kvant serve``: one model over HTTP for many clients at once, as OpenAI's and Anthropic's clients
speak.
"""

import logging
from dataclasses import replace
from functools import partial
from typing import Annotated

import typer

from kvant.cache.disk import QUEUE_BYTES
from kvant.cli import options, ranks, terminal
from kvant.cli.fitting import named_format
from kvant.cli.options import BadValueError, RunOptions, Without
from kvant.cli.session import bound_memory, drafts_for_pool, follow, load_session
from kvant.engine.model_drafts import PooledDrafts
from kvant.errors import KvantError
from kvant.files import read_user_file
from kvant.installation import install_command
from kvant.plan import MemoryPlan
from kvant.plan.memory import as_record
from kvant.sizes import format_bytes

MAX_KEY = 1000  # characters
MAX_KEYS_BYTES = 1 << 20
# of 32 MiB of bodies, their texts and tokens; and the server's libraries: measured
REQUEST_BYTES = 150_000_000

# What a request says, or what has no use without a text to print.
NOT_OF_A_SERVER = Without(
    ["preset", "max_tokens", "stop", "extra_eos_token", "ignore_eos", "system_prompt", "raw", "origins"]
)


@options.with_options
def serve(
    context: typer.Context,
    model_argument: options.ModelArgument = None,
    *,
    run: Annotated[RunOptions, NOT_OF_A_SERVER],
    alias: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Let clients use this name for the model, too, or any name that fits this pattern; "
            "repeatable.",
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
    """Serve a model over HTTP: /v1/chat/completions, /v1/messages, /v1/responses and others, and a chat
    page.
    """
    try:
        from kvant.server.run import bind
        from kvant.server.run import serve as serve_until_signalled
        from kvant.server.service import Service, make_pool
        from kvant.server.settings import Settings
    except ImportError as error:
        raise KvantError(f"kvant serve needs the extra 'serve': {error}", install_command("serve")) from error
    run = replace(run, model=options.choose_model(context, model_argument, run.model))
    options.check_counts(sequences=sequences, max_queue=max_queue)
    if deterministic:
        options.check_deterministic(run)
    ranks.refuse(run.draft_model, disk_cache=disk_cache)
    follow(run, bounded=True)
    disk = options.disk_cache(disk_cache, disk_cache_size)
    other_bytes = REQUEST_BYTES + (0 if disk is None else QUEUE_BYTES)
    settings = Settings(
        model=run.model,
        aliases=tuple(alias or ()),
        host=host,
        port=port,
        sequences=sequences,
        cache=run.cache,
        prefill_step_size=run.prefill_step_size,
        deterministic=deterministic,
        draft=run.draft if run.draft_model is None else "model",
        max_queue=max_queue,
        strict=strict,
        api_keys=read_keys(api_key_file),
        allow_origins=tuple(allow_origin or ()),
    )

    say = partial(terminal.say, quiet=run.quiet)
    with bind(settings) as bound:
        wanted = options.kv_size(run.max_kv_size or options.AUTO)
        session = load_session(
            run,
            context.obj,
            max_kv_size=wanted,
            sequences=sequences,
            requests=other_bytes,
            hashes=disk is not None,
        )
        planned = session.plan()
        say(f"memory: {describe_plan(planned, other_bytes)}")
        settings = replace(
            settings,
            cache=session.settings.cache,
            max_kv_size=planned.max_kv_size,
            template_variables=dict(session.template_variables),
        )
        bound_memory(planned.arrays, planned.scratch)
        with named_format(session.settings):
            pool = make_pool(settings, session.model)
        drafts = drafts_for_pool(session, run, pool, deterministic=deterministic)
        if disk is not None:
            pool.use_disk(disk, is_exact=deterministic)
        with options.named("--deterministic"):
            pooled = drafts if isinstance(drafts, PooledDrafts) else None
            service = Service(settings, session.model, session.tokenizer, pool, as_record(planned), pooled)
        session.say_cache(pool.describe(), run.quiet)
        if disk is not None:
            say(f"disk cache: {disk.describe()}")
        if not run.quiet:
            show_requests()
        code = serve_until_signalled(service, bound, lambda line: say(f"kvant serve: {line}"))
    raise typer.Exit(code)


def show_requests() -> None:
    """Print a line for each request to standard error."""
    requests = logging.getLogger("kvant.server.requests")
    requests.addHandler(logging.StreamHandler())
    requests.setLevel(logging.INFO)
    requests.propagate = False


def read_keys(path: str | None) -> tuple[str, ...]:
    """The keys of a file, one a line."""
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


def describe_plan(planned: MemoryPlan, other_bytes: int) -> str:
    """Describe a server's memory in a line; ``other_bytes``: for requests, and for writes to disk."""
    parts = {
        "weights": planned.weights,
        "cache": planned.cache,
        "state": planned.state,
        "scratch": planned.scratch,
    }
    parts |= {"draft weights": planned.draft_weights, "draft cache": planned.draft_cache}
    # neither is a GPU's memory
    parts |= {"process": planned.process, "requests": other_bytes if planned.process else 0}
    total = planned.total + parts["requests"]
    listed = ", ".join(f"{name} {format_bytes(count)}" for name, count in parts.items() if count)
    return f"{format_bytes(total)} planned at most: {listed}"
