"""openai-agents: an agent with a tool and a typed result, over chat completions and responses."""

import asyncio
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from checks import MODEL, STORY, TOOL_RESULT, URL, WEATHER, Animal, main
from openai import AsyncOpenAI
from openai.types.responses import ResponseTextDeltaEvent

set_tracing_disabled(True)
there = AsyncOpenAI(base_url=f"{URL}/v1", api_key="any", max_retries=0)
chat, responses = (kind(MODEL, there) for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel))
SETTINGS = ModelSettings(temperature=0, max_tokens=300)
wait = asyncio.new_event_loop().run_until_complete  # one loop: the client's connections belong to it


def _talk(model):
    agent = Agent("teller", instructions="You tell stories.", model=model, model_settings=SETTINGS)
    result = wait(Runner.run(agent, STORY))
    assert "Pip" in result.final_output

    async def stream():
        run = Runner.run_streamed(agent, STORY)
        events = [event async for event in run.stream_events()]
        raw = [event.data for event in events if event.type == "raw_response_event"]
        return "".join(
            event.delta for event in raw if isinstance(event, ResponseTextDeltaEvent)
        ), run.final_output

    text, final = wait(stream())
    assert text == final == result.final_output
    second = wait(Runner.run(agent, [*result.to_input_list(), {"role": "user", "content": "And then?"}]))
    assert second.final_output


def _use_tools(model):
    """The call is forced; the framework answers it, and the second turn is in words."""
    asked = []

    @function_tool
    def weather(city: Literal["Rome", "Oslo"]) -> str:
        """Weather of a city."""
        asked.append(city)
        return TOOL_RESULT

    settings = ModelSettings(temperature=0, max_tokens=300, tool_choice="required", parallel_tool_calls=False)
    agent = Agent("teller", model=model, tools=[weather], model_settings=settings)
    assert wait(Runner.run(agent, WEATHER, max_turns=4)).final_output
    assert len(asked) >= 1


def _typed(model):
    agent = Agent("teller", model=model, model_settings=SETTINGS, output_type=Animal)
    assert isinstance(wait(Runner.run(agent, STORY)).final_output, Animal)


def check_chat():
    _talk(chat)


def check_chat_tools():
    _use_tools(chat)


def check_chat_typed():
    _typed(chat)


def check_responses():
    _talk(responses)


def check_responses_tools():
    _use_tools(responses)


def check_responses_typed():
    _typed(responses)


main(globals())
