"""litellm as a client of both interfaces, with its own exception classes."""

import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it is fetched

import litellm
from checks import KEY, KEYED_URL, LONG, MODEL, STORY, URL, WEATHER, WEATHER_SCHEMA, Animal, main, raises

litellm.suppress_debug_info = True
OPENAI = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "any", "num_retries": 0}
ANTHROPIC = {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": "any", "num_retries": 0}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Weather.", "parameters": WEATHER_SCHEMA},
}


def ask(server, text=STORY, **options):
    given = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 40}
    return litellm.completion(**server, **given | options)


def check_both_interfaces():
    found = []
    for server in (OPENAI, ANTHROPIC):
        answer = ask(server)
        assert answer.usage.completion_tokens == 40
        assert answer.choices[0].finish_reason == "length"
        text = answer.choices[0].message.content
        assert "".join(chunk.choices[0].delta.content or "" for chunk in ask(server, stream=True)) == text
        found.append(text)
    assert found[0] == found[1]
    assert "Pip" in found[0]


def check_tools():
    for server in (OPENAI, ANTHROPIC):
        answer = ask(server, WEATHER, tools=[TOOL], tool_choice="required", max_tokens=300)
        call = answer.choices[0].message.tool_calls[0]
        assert (answer.choices[0].finish_reason, call.function.name) == ("tool_calls", "weather")
        assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")


def check_structure():
    answer = ask(OPENAI, response_format=Animal, max_tokens=200)
    assert Animal.model_validate_json(answer.choices[0].message.content)


def check_embeddings():
    found = litellm.embedding(input=[STORY, WEATHER], **OPENAI)
    first, second = (each["embedding"] for each in found.data)
    assert len(first) == len(second) == 256
    assert found.usage.prompt_tokens > 10
    few = {"dimensions": 8, "allowed_openai_params": ["dimensions"]}  # it knows them of OpenAI's own alone
    (short,) = litellm.embedding(input=[STORY], **few, **OPENAI).data
    assert len(short["embedding"]) == 8


def check_errors():
    raises(litellm.BadRequestError, lambda: ask(OPENAI, temperature=9))
    raises(litellm.ContextWindowExceededError, lambda: ask(OPENAI, LONG * 40))
    raises(litellm.NotFoundError, lambda: ask(OPENAI | {"model": "openai/gpt-none"}))
    wrong = {"api_base": f"{KEYED_URL}/v1", "api_key": "wrong"}
    raises(litellm.AuthenticationError, lambda: ask(OPENAI | wrong))
    assert ask(OPENAI | wrong | {"api_key": KEY}).choices[0].message.content


main(globals())
