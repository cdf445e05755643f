"""pydantic-ai: agents with tools and typed results, over chat completions, responses and messages."""

import asyncio

from checks import MODEL, STORY, TOOL_RESULT, URL, WEATHER, WEATHER_SCHEMA, Animal, main, raises
from pydantic_ai import Agent, ModelHTTPError, NativeOutput, ToolDefinition, ToolOutput
from pydantic_ai.direct import model_request_sync
from pydantic_ai.messages import ModelRequest, ToolCallPart, ToolReturnPart
from pydantic_ai.models import ModelRequestParameters
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
    """The call is forced, and goes back with its result; an answer in words follows."""
    tool = ToolDefinition(name="weather", description="Weather.", parameters_json_schema=WEATHER_SCHEMA)
    forced = ModelRequestParameters(function_tools=[tool], allow_text_output=False)
    asked = ModelRequest.user_text_prompt(WEATHER)
    first = model_request_sync(model, [asked], model_settings=SETTINGS, model_request_parameters=forced)
    [call] = [part for part in first.parts if isinstance(part, ToolCallPart)][:1]
    assert (call.tool_name, call.args_as_dict()["city"] in ("Rome", "Oslo")) == ("weather", True)
    results = [
        ToolReturnPart(each.tool_name, TOOL_RESULT, tool_call_id=each.tool_call_id)
        for each in first.parts
        if isinstance(each, ToolCallPart)
    ]
    turns = [asked, first, ModelRequest(parts=results)]
    assert model_request_sync(model, turns, model_settings=SETTINGS).usage.output_tokens


def check_chat():
    _talk(chat)


def check_chat_typed():
    _typed(chat, Animal, ToolOutput(Animal), NativeOutput(Animal))


def check_tools():
    for model in (chat, responses, messages):
        _use_tools(model)


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
        assert (
            raises(ModelHTTPError, lambda agent=agent: agent.run_sync(STORY), "temperature").status_code
            == 400
        )


main(globals())
