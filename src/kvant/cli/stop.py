"""``kvant stop``: unload models of this user's running servers, which keep running."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from kvant.cli.options import BadValueError
from kvant.cli.running import running_servers
from kvant.cli.terminal import say
from kvant.errors import KvantError


def stop(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="A name that `kvant ps` lists.")
    ] = None,
    all_models: Annotated[bool, typer.Option("--all", help="Unload every model of every server.")] = False,
) -> None:
    """Unload a model of a running server.

    It is unloaded at once or when its requests have ended. The next request for the model loads it again.
    """
    if (model is None) is not all_models:
        raise BadValueError("expected either the name of a model or --all; `kvant ps` lists the models")
    servers = running_servers()
    if not servers:
        raise KvantError("no server is running")
    offered: list[str] = []
    errors: list[str] = []
    is_offered = all_models
    stopped = 0
    for server in servers:
        try:
            models = server.models()
            offered += [each["name"] for each in models]
            # Use the model's name: the user's may match another model's pattern.
            named = [None] if all_models else [each["name"] for each in models if model in each["names"]]
            is_offered = is_offered or bool(named)
            unloaded = [each for name in named for each in server.unload(name)]
        except KvantError as error:
            errors.append(str(error))
            continue
        for each in unloaded:
            say(f"{each['name']} at {server.url}: {_outcome(each)}")
            stopped += 1
    if errors:
        raise KvantError("; ".join(errors))
    if not is_offered:
        raise KvantError(f"no running server has the model {model!r}; expected one of {', '.join(offered)}")
    if not stopped:
        say("all models are unloaded" if all_models else f"{model} is not loaded")


def _outcome(model: Mapping[str, Any]) -> str:
    if model["unloaded"]:
        return "unloaded"
    if model["requests"]:
        return f"it is unloaded when its requests ({model['requests']}) have ended"
    return "it is unloaded when the running loads have ended"
