"""``kvant ps``: list the models of this user's running servers, and their states."""

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvant.cli import terminal
from kvant.cli.running import RunningServer, running_servers
from kvant.errors import KvantError
from kvant.sizes import format_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType


def ps(
    json_rows: Annotated[
        bool, typer.Option("--json", help="Print the list as JSON instead of a table.")
    ] = False,
) -> None:
    """List the models of running servers, and which of them are loaded."""
    rows = [row for server in running_servers() for row in _rows(server)]
    terminal.show(rows, _table(rows), as_json=json_rows)


def _rows(server: RunningServer) -> list[dict[str, Any]]:
    """Return a row for each model, or a single row with an error if the server does not answer."""
    where = {"server": server.url, "pid": server.pid}
    try:
        models = server.models()
    except KvantError as error:
        return [{**where, "error": str(error)}]
    return [{**where, **model} for model in models]


def _table(rows: list[dict[str, Any]]) -> "Iterator[RenderableType]":
    if not rows:
        yield "no server is running; kvant serve starts one"
    for (url, pid), of_server in groupby(rows, key=lambda row: (row["server"], row["pid"])):
        models = list(of_server)
        if "error" in models[0]:
            yield f"{url} (process {pid}): {models[0]['error']}"
            continue
        yield f"{url} (process {pid})"
        right = ["memory", "context", "requests", "idle"]
        texts = []
        for row in models:
            idle = "" if row["idle_s"] is None else f"{row['idle_s']:.0f} s"
            numbers = [format_bytes(row["planned_bytes"]), f"{row['context']:,}", str(row["requests"]), idle]
            texts.append([row["name"], row["state"], *numbers])
        yield terminal.table(["model", "state", *right], texts, right=right)
