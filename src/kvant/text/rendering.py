"""Render chat templates in the worker process, with Jinja set up as in transformers.

The sandbox keeps a template from files and Python internals. Limits on time and memory are the process's.
"""

import json
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_TEXT = 32 * 1024 * 1024  # characters; more than the longest context


class Generation(Extension):
    """``{% generation %}`` marks the assistant's words for training. Here it just renders its content."""

    tags = {"generation"}  # noqa: RUF012, Jinja requires a set

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse the block as a macro call, which gives it its own scope."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return str(caller())


class PlainDict:
    """``dict(...)`` and ``dict.fromkeys(...)`` without the type's other attributes."""

    fromkeys = staticmethod(dict.fromkeys)

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)


class PlainNamespace(Namespace):
    """A namespace that refuses names of Python internals."""

    def __init__(*args: Any, **values: Any) -> None:  # a template may have a value named self
        self, *mappings = args
        Namespace.__init__(self)
        for name, value in dict(*mappings, **values).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace cannot hold {name!r}")
        super().__setitem__(name, value)


def raise_exception(message: object) -> None:
    """Let a template refuse messages."""
    raise TemplateError(str(message))


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON without Jinja's HTML escapes."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def strftime_now(form: str) -> str:
    """Format the current time."""
    return datetime.now().strftime(form)


def environment() -> ImmutableSandboxedEnvironment:
    """Set up Jinja as transformers does for chat templates; a test compares the two."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    made.filters["tojson"] = tojson
    made.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    made.globals |= {"dict": PlainDict(), "namespace": PlainNamespace}
    return made


@lru_cache(maxsize=8)
def compiled(source: str) -> Template:
    """Compile a template once."""
    return environment().from_string(source)


def render(template: str, variables: dict[str, Any]) -> str:
    """Render a template with variables."""
    pieces = []
    length = 0
    for piece in compiled(template).generate(**variables):
        length += len(piece)
        if length > MAX_TEXT:
            raise ValueError(f"it writes more than {MAX_TEXT} characters")
        pieces.append(piece)
    return "".join(pieces)
