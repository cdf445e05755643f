"""Grammars of answers: what a request asks for, compiled when it is its turn."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from kvant.server.errors import ApiError
from kvant.server.generation import Generation, Tool
from kvant.server.service import Service
from kvant.server.turns import as_shown
from kvant.text.grammar import Grammar, build_tool_grammar
from kvant.text.grammar_source import Kind, unknown_formats

# Of its own, and one: grammars that take long must not take the threads that others' prompts are read in.
COMPILING = ThreadPoolExecutor(1, "kvant-grammar")


async def grammar_of(service: Service, generation: Generation, prompt: str) -> Grammar | None:
    """The grammar that a request's answers follow; None: they are free. ``prompt``: rendered, or continued.

    One that was compiled lately does not wait.
    """
    if not _is_bound(generation):
        return None
    kind, document = await asyncio.to_thread(_document, service, generation, prompt)
    if (found := service.grammars.kept(document, generation.salt)) is not None:
        return found
    room = service.settings.max_queue - service.waiting
    async with service.compiling.turn((generation.salt, generation.client), len(document), room):
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(COMPILING, service.grammars.compile_document, kind, document, generation.salt)


def _is_bound(generation: Generation) -> bool:
    """Whether there is something that answers have to follow: a format of the text, or of calls."""
    tools, choice = generation.tools, generation.tool_choice
    calls = any(tool.strict for tool in tools) if choice == "auto" else bool(tools) and choice != "none"
    return generation.format is not None or calls


def unheld_formats(generation: Generation) -> set[str]:
    """Return the formats that the schemas of an answer name and no grammar holds it to."""
    choice, form = generation.tool_choice, generation.format
    tools = [choice] if isinstance(choice, Tool) else generation.tools if choice != "none" else ()
    bound = [tool.parameters for tool in tools if tool.strict or choice != "auto" or form is not None]
    text = [form.source] if form is not None and form.kind == "json_schema" else []
    return unknown_formats([*bound, *text])


def _document(service: Service, generation: Generation, prompt: str) -> tuple[Kind, str]:
    """The kind of a grammar, and its document."""
    if generation.ignore_eos:
        raise ApiError("ignore_eos is true; expected false where a format says how the text ends", param="ignore_eos")
    rendered = None if generation.messages is None else prompt
    choice, text = generation.tool_choice, None
    if generation.format is not None:
        text = generation.format.kind, generation.format.source
        if not generation.tools or choice == "none":
            return text[0], service.grammars.document(*text, rendered)
    assert service.tool_format is not None  # the prompt was rendered with tools
    tools = [choice] if isinstance(choice, Tool) else generation.tools
    shown = [as_shown(tool) for tool in tools]
    for tool, made in zip(tools, shown, strict=True):
        made["function"] |= {"strict": tool.strict, "grammar": tool.grammar if tool.strict else ""}
    source = build_tool_grammar(
        service.tool_format, shown, "auto" if choice == "auto" else "required", generation.parallel_tool_calls, text
    )
    return "tool_calls", service.grammars.document("tool_calls", source, rendered)
