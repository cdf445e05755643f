"""``kvant stop``: unload models of the servers that this user runs. The servers go on."""

from typing import Annotated

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
    is_offered = all_models
    stopped = 0
    for server in servers:
        if not all_models:
            models = server.ask("/control/models")["models"]
            offered += [each["name"] for each in models]
            if not any(model in each["names"] for each in models):
                continue
            is_offered = True
        for each in server.ask("/control/unload", {} if all_models else {"model": model})["models"]:
            later = f"it is unloaded when its {each['requests']} requests have ended"
            say(f"{each['name']} at {server.url}: {'unloaded' if each['unloaded'] else later}")
            stopped += 1
    if not is_offered:
        raise KvantError(f"no running server has the model {model!r}; expected one of {', '.join(offered)}")
    if not stopped:
        say("all models are unloaded" if all_models else f"{model} is not loaded")
