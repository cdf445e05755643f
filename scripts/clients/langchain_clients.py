"""langchain-openai and langchain-anthropic: messages, streams, tools, structure, and a second turn."""

import os
from typing import Literal

os.environ["LANGSMITH_TRACING"] = "false"

import anthropic
import openai
from checks import MODEL, STORY, TOOL_RESULT, URL, WEATHER, Animal, main, raises
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

common = {"model": MODEL, "api_key": "any", "max_retries": 0, "temperature": 0, "max_tokens": 40}
openai_chat = ChatOpenAI(base_url=f"{URL}/v1", **common)
responses = ChatOpenAI(base_url=f"{URL}/v1", use_responses_api=True, **common)
anthropic_chat = ChatAnthropic(base_url=URL, **common)


@tool
def weather(city: Literal["Rome", "Oslo"]) -> str:
    """Weather of a city."""
    return TOOL_RESULT


def _talk(model):
    answer = model.invoke([SystemMessage("You tell stories."), HumanMessage(STORY)])
    assert isinstance(answer, AIMessage)
    assert answer.text
    assert answer.usage_metadata["output_tokens"] == 40
    assert answer.usage_metadata["input_tokens"] > 10
    assert "Pip" in model.invoke(STORY).text
    assert "".join(chunk.text for chunk in model.stream(STORY)) == model.invoke(STORY).text
    history = [HumanMessage(STORY), AIMessage("Pip was a fox."), HumanMessage("And then?")]
    assert model.invoke(history).text


def _use_tools(model):
    """A call is forced, and goes back with its result."""
    model = _roomy(model)
    first = model.bind_tools([weather], tool_choice="any", parallel_tool_calls=False).invoke(WEATHER)
    [call] = first.tool_calls
    assert (call["name"], type(call["args"]["city"])) == ("weather", str)
    result = weather.invoke(call)
    assert isinstance(result, ToolMessage)
    second = model.bind_tools([weather], tool_choice="none").invoke([HumanMessage(WEATHER), first, result])
    assert second.text
    assert second.tool_calls == []


def check_openai_chat():
    _talk(openai_chat)


def check_openai_tools():
    _use_tools(openai_chat)


def _roomy(model):
    return model.model_copy(update={"max_tokens": 300})


def check_openai_structure():
    for method in ("json_schema", "function_calling"):
        assert isinstance(
            _roomy(openai_chat).with_structured_output(Animal, method=method).invoke(STORY), Animal
        ), method


def check_openai_logprobs_and_batches():
    answer = openai_chat.bind(logprobs=True, top_logprobs=2).invoke(STORY)
    assert len(answer.response_metadata["logprobs"]["content"]) == 40
    assert len(openai_chat.batch([STORY, WEATHER])) == 2


def check_openai_completions():
    assert OpenAI(base_url=f"{URL}/v1", **common).invoke("Once upon a time")


def check_openai_embeddings():
    """As text: else the client sends the ids of OpenAI's own tokenizer."""
    model = OpenAIEmbeddings(
        base_url=f"{URL}/v1", model=MODEL, api_key="any", check_embedding_ctx_length=False
    )
    first, second = model.embed_documents([STORY, WEATHER])
    again = model.embed_query(STORY)
    assert len(first) == len(second) == len(again) == 256
    assert max(abs(a - b) for a, b in zip(first, again, strict=True)) < 1e-5
    assert max(abs(a - b) for a, b in zip(first, second, strict=True)) > 1e-2


def check_openai_responses():
    _talk(responses)


def check_openai_responses_structure():
    assert isinstance(
        _roomy(responses).with_structured_output(Animal, method="json_schema").invoke(STORY), Animal
    )


def check_anthropic():
    _talk(anthropic_chat)


def check_anthropic_tools():
    model = _roomy(anthropic_chat)
    first = model.bind_tools([weather], tool_choice="any").invoke(WEATHER)
    call = first.tool_calls[0]
    assert (call["name"], type(call["args"]["city"])) == ("weather", str)
    results = [weather.invoke(each) for each in first.tool_calls]
    assert (
        model.bind_tools([weather])
        .invoke([HumanMessage(WEATHER), first, *results])
        .usage_metadata["output_tokens"]
    )
    assert anthropic_chat.get_num_tokens_from_messages([HumanMessage(STORY)]) > 10


def check_anthropic_structure():
    for method in ("json_schema", "function_calling"):
        assert isinstance(
            _roomy(anthropic_chat).with_structured_output(Animal, method=method).invoke(STORY), Animal
        ), method


def check_errors():
    raises(openai.BadRequestError, lambda: openai_chat.model_copy(update={"temperature": 9}).invoke(STORY))
    raises(openai.NotFoundError, lambda: openai_chat.model_copy(update={"model_name": "gpt-4"}).invoke(STORY))
    raises(anthropic.BadRequestError, lambda: anthropic_chat.bind(top_p=7).invoke(STORY))


main(globals())
