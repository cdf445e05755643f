"""Compile the grammar that a request's answers must follow, one request at a time."""

import asyncio
from collections.abc import Sequence
from typing import Literal

from kvant.server.errors import ApiError
from kvant.server.generation import Generation, Tool
from kvant.server.service import Service
from kvant.server.turns import as_shown
from kvant.text.grammar import Grammar, build_tool_grammar
from kvant.text.grammar_source import Kind, Source, unknown_formats


async def grammar_of(service: Service, generation: Generation, prompt: str) -> Grammar | None:
    """Return the grammar that a request's answers must follow, or None if there is none.

    A grammar that was compiled recently for the same salt is returned at once.

    Args:
        service: compiles it, one grammar at a time.
        generation: the request.
        prompt: the rendered chat, or the text to continue.

    Raises:
        ApiError: ``ignore_eos`` is combined with a format.
        GrammarError: the grammar cannot be compiled.
        QueueFullError: the maximum number of requests is waiting.
    """
    if generation.format is None and not _bound_tools(generation):
        return None
    kind, document = await asyncio.to_thread(_document, service, generation, prompt)
    if (compiled := service.grammars.compiled(document, generation.salt)) is not None:
        return compiled
    client = (generation.salt, generation.client)
    room = service.settings.max_queue - service.engine.counts.waiting
    build = service.grammars.compile_document
    return await service.compiling.run(client, len(document), room, build, kind, document, generation.salt)


def unheld_formats(generation: Generation) -> set[str]:
    """Return the ``format`` names in an answer's schemas that the grammar does not enforce."""
    schemas: list[object] = [tool.parameters for tool in _bound_tools(generation)]
    if generation.format is not None and generation.format.kind == "json_schema":
        schemas.append(generation.format.source)
    return unknown_formats(schemas)


def _callable_tools(generation: Generation) -> Sequence[Tool]:
    """Return the tools that an answer may call."""
    if isinstance(generation.tool_choice, Tool):
        return [generation.tool_choice]
    return () if generation.tool_choice == "none" else generation.tools


def _bound_tools(generation: Generation) -> list[Tool]:
    """Return the tools whose calls must satisfy their schemas."""
    all_are = generation.tool_choice != "auto" or generation.format is not None
    return [tool for tool in _callable_tools(generation) if tool.strict or all_are]


def _document(service: Service, generation: Generation, prompt: str) -> tuple[Kind, str]:
    """Return the kind of the grammar and its document."""
    if generation.ignore_eos:
        message = "ignore_eos is true; expected false with a format, which determines where the text ends"
        raise ApiError(message, param="ignore_eos")
    rendered = None if generation.messages is None else prompt
    tools = _callable_tools(generation)
    text: tuple[Kind, Source] | None = None
    if generation.format is not None:
        text = (generation.format.kind, generation.format.source)
        if not tools:
            return generation.format.kind, service.grammars.document(*text, rendered)
    assert service.tool_format is not None  # the prompt was rendered with tools
    shown = [as_shown(tool) for tool in tools]
    for tool, made in zip(tools, shown, strict=True):
        made["function"] |= {"strict": tool.strict, "grammar": tool.grammar if tool.strict else ""}
    choice: Literal["auto", "required"] = "auto" if generation.tool_choice == "auto" else "required"
    source = build_tool_grammar(service.tool_format, shown, choice, generation.parallel_tool_calls, text)
    return "tool_calls", service.grammars.document("tool_calls", source, rendered)
