"""What an answer has to follow: a format of its text, or calls of tools, as a compiled grammar."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from kvant.errors import GrammarError
from kvant.server.errors import ApiError
from kvant.server.generation import Generation, Tool
from kvant.server.service import Service
from kvant.server.tools import as_shown
from kvant.text.grammar import Grammar, build_tool_grammar

# Of its own, and one: grammars that take long must not take the threads that others' prompts are read in.
COMPILING = ThreadPoolExecutor(1, "kvant-grammar")


async def grammar_of(service: Service, generation: Generation, prompt: str) -> Grammar | None:
    """The grammar that the answers follow; None: they are free.

    Args:
        prompt: the rendered messages.

    Raises:
        ApiError: 400: a format or tools that no grammar can be made for.
    """
    if not _is_bound(generation):
        return None
    if generation.ignore_eos:
        raise ApiError("ignore_eos is true; expected false where a format says how the text ends", param="ignore_eos")
    try:
        return await asyncio.get_running_loop().run_in_executor(COMPILING, _compile, service, generation, prompt)
    except GrammarError as error:
        raise ApiError(str(error)) from error


def _is_bound(generation: Generation) -> bool:
    """Whether there is something that answers have to follow."""
    if generation.format is not None:
        return True
    if not generation.tools or generation.tool_choice == "none":
        return False
    return generation.tool_choice != "auto" or any(tool.strict for tool in generation.tools)


def _compile(service: Service, generation: Generation, prompt: str) -> Grammar:
    """See :func:`grammar_of`; it waits for a process."""
    rendered = None if generation.messages is None else prompt
    choice, text = generation.tool_choice, None
    if generation.format is not None:
        text = generation.format.kind, generation.format.source
        if not generation.tools or choice == "none":
            return service.grammars.compile(*text, rendered)
    assert service.tool_format is not None  # the prompt was rendered with tools
    tools = [choice] if isinstance(choice, Tool) else generation.tools
    shown = [as_shown(tool) for tool in tools]
    for tool, made in zip(tools, shown, strict=True):
        made["function"]["strict"] = tool.strict
    source = build_tool_grammar(
        service.tool_format, shown, "auto" if choice == "auto" else "required", generation.parallel_tool_calls, text
    )
    return service.grammars.compile("tool_calls", source, rendered)
