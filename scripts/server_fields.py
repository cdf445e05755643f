"""The page of the fields that a server reads, docs/data/server-fields.md, from the types of its bodies.

Run: python scripts/server_fields.py      after a field was added or changed
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import kvant  # noqa: F401  # isort: skip  (before MLX: it loads a faster BLAS)

from msgspec import inspect

from kvant.server import anthropic, openai, responses
from kvant.server.app import TokenizeBody
from kvant.server.left_out import kinds

PAGE = Path(__file__).parents[1] / "docs" / "data" / "server-fields.md"
BODY = "the body"
# The objects of each route: its body, and the objects in those of its lists that it reads one by one.
SECTIONS: Mapping[str, Mapping[str, type]] = {
    "POST /v1/chat/completions": {
        BODY: openai.ChatBody,
        **{f"messages[].content[] {name}": part for name, part in openai.PARTS.items()},
        "tools[] function": openai.FunctionTool,
    },
    "POST /v1/completions": {BODY: openai.CompletionsBody},
    "POST /v1/responses": {
        BODY: responses.ResponsesBody,
        **{f"input[] {name}": item for name, item in responses.ITEMS.items()},
        **{f"input[].content[] {name}": part for name, part in responses.PARTS.items()},
        **{f"tools[] {name}": tool for name, tool in responses.OUTER_TOOLS.items()},
    },
    "POST /v1/messages": {
        BODY: anthropic.MessagesBody,
        **{f"messages[].content[] {name}": block for name, block in anthropic.BLOCKS.items()},
        "tools[]": anthropic.ToolBody,
    },
    "POST /tokenize": {BODY: TokenizeBody},
}
HEAD = """# The server's fields

Made by `scripts/server_fields.py` from the types in `src/kvant/server`. [The server](../server.md#fields) explains
what they do.

`[]` stands for the entries of a list, and a name after a space for the object's `type`. Texts in parentheses are
those that a field takes.

A field that is not here is left out, and so is an optional field with another text than those in parentheses, except
`draft`: the response's header `x-kvant-ignored` names them. With `--strict` the request is refused. The fields in the
last column are refused unless they are null; some optional ones are refused with certain values, as
[the server](../server.md#fields) says.
"""
COLUMNS = ("object", "required", "optional", "refused")


def page() -> str:
    """Return the page's text."""
    return HEAD + "".join(f"\n## {title}\n\n{_table(objects)}" for title, objects in SECTIONS.items())


def _table(objects: Mapping[str, type]) -> str:
    rows = [row for place, kind in objects.items() for row in _rows(inspect.type_info(kind), place)]
    return "".join(f"| {' | '.join(row)} |\n" for row in (COLUMNS, ["---"] * len(COLUMNS), *rows))


def _rows(node: inspect.Type, place: str) -> Iterator[tuple[str, ...]]:
    """Yield the row of an object, and those of the objects in it."""
    assert isinstance(node, inspect.StructType)
    fields = [field for field in node.fields if field.encode_name != "type" or " " not in place]
    null = [field for field in fields if isinstance(field.type, inspect.NoneType)]
    required = [field for field in fields if field.required]
    optional = [field for field in fields if field not in (*null, *required)]
    where = place if place == BODY else f"`{place}`"
    if fields:
        yield where, *(_names(each) for each in (required, optional, null))
    for field in fields:
        at = field.encode_name if place == BODY else f"{place}.{field.encode_name}"
        for struct, inner in _objects(field.type, at):
            yield from _rows(struct, inner)


def _objects(node: inspect.Type, place: str) -> Iterator[tuple[inspect.StructType, str]]:
    """Yield the objects that a field may be, or have in a list, with the place of each."""
    for kind in kinds(node):
        if isinstance(kind, inspect.StructType):
            yield kind, f"{place} {kind.tag}" if kind.tag else place
        elif isinstance(kind, inspect.ListType):
            yield from _objects(kind.item_type, f"{place}[]")


def _names(fields: Iterable[inspect.Field]) -> str:
    """Return fields by name, with their values if these are listed."""
    return ", ".join(f"`{field.encode_name}`{_values(field.type)}" for field in fields)


def _values(node: inspect.Type) -> str:
    named = [each.type if isinstance(each, inspect.Metadata) else each for each in kinds(node)]
    values = [value for each in named if isinstance(each, inspect.LiteralType) for value in each.values]
    return f" ({', '.join(json.dumps(value) for value in values)})" if values else ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
