"""pydantic-ai: agents with tools and typed results, over chat completions, responses and messages."""

import asyncio
from typing import Literal

from checks import MODEL, STORY, TOOL_RESULT, URL, WEATHER, Animal, main, raises
from pydantic_ai import Agent, ModelHTTPError, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

there = OpenAIProvider(base_url=f"{URL}/v1", api_key="any")
chat = OpenAIChatModel(MODEL, provider=there)
responses = OpenAIResponsesModel(MODEL, provider=there)
messages = AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL, api_key="any"))
SETTINGS = {"temperature": 0, "max_tokens": 300}


def _talk(model):
    result = Agent(model, model_settings=SETTINGS).run_sync(STORY)
    assert "Pip" in result.output
    assert result.usage.output_tokens > 10
    again = Agent(model, instructions="You tell stories.", model_settings=SETTINGS)
    assert again.run_sync("And then?", message_history=result.all_messages()).output

    async def stream():
        async with Agent(model, model_settings=SETTINGS).run_stream(STORY) as run:
            return [text async for text in run.stream_text(delta=True, debounce_by=None)]

    pieces = asyncio.run(stream())
    assert "".join(pieces) == result.output
    assert len(pieces) > 10


def _typed(model, *kinds):
    for kind in kinds:
        result = Agent(model, output_type=kind, model_settings=SETTINGS).run_sync(STORY)
        assert isinstance(result.output, Animal), kind


def _use_tools(model):
    """The typed result is itself a tool, so the model has to call one each time until it is called."""
    asked = []
    agent = Agent(model, output_type=ToolOutput(Animal), model_settings=SETTINGS | {"temperature": 1})

    @agent.tool_plain
    def weather(city: Literal["Rome", "Oslo"]) -> str:
        """Weather of a city."""
        asked.append(city)
        return TOOL_RESULT

    for seed in range(8):
        result = agent.run_sync(WEATHER, model_settings={"seed": seed} if model is chat else None)
        assert isinstance(result.output, Animal)
        if asked:
            return
    raise AssertionError("in 8 runs the tool was never called")


def check_chat():
    _talk(chat)


def check_chat_typed():
    _typed(chat, Animal, ToolOutput(Animal), NativeOutput(Animal))


def check_chat_tools():
    _use_tools(chat)


def check_responses():
    _talk(responses)


def check_responses_typed():
    _typed(responses, ToolOutput(Animal), NativeOutput(Animal))


def check_messages():
    _talk(messages)


def check_messages_typed():
    _typed(messages, ToolOutput(Animal))


def check_errors():
    for model in (chat, responses, messages):
        agent = Agent(model, model_settings={"temperature": 9, "max_tokens": 10})
        assert raises(ModelHTTPError, lambda agent=agent: agent.run_sync(STORY), "temperature").status_code == 400


main(globals())
