"""OpenAI's own client: responses, whole and as the events of a stream."""

import json

import openai
from checks import MODEL, STORY, TOOL_RESULT, URL, WEATHER, WEATHER_SCHEMA, Animal, main, raises

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="any", max_retries=0, timeout=120)
RESPONSES_TOOL = {"type": "function", "name": "weather", "parameters": WEATHER_SCHEMA, "strict": True}


def check_responses():
    answer = client.responses.create(model=MODEL, input=STORY, temperature=0, max_output_tokens=40)
    assert "Pip" in answer.output_text
    assert (answer.object, answer.status, answer.incomplete_details.reason) == (
        "response",
        "incomplete",
        "max_output_tokens",
    )
    assert (answer.usage.output_tokens, answer.usage.output_tokens_details.reasoning_tokens) == (40, 0)
    messages = [{"role": "user", "content": STORY}]
    chat = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=40)
    assert answer.output_text == chat.choices[0].message.content
    whole = client.responses.create(model=MODEL, instructions="You tell stories.", input=STORY, temperature=0)
    assert (whole.status, whole.incomplete_details, whole.error) == ("completed", None, None)
    conversation = [
        {"role": "user", "content": [{"type": "input_text", "text": STORY}]},
        *whole.output,
        {"role": "user", "content": "And then?"},
    ]
    assert client.responses.create(
        model=MODEL, input=conversation, temperature=0, max_output_tokens=20
    ).output_text


def check_streamed_responses():
    plain = client.responses.create(model=MODEL, input=STORY, temperature=0, max_output_tokens=40)
    events = list(
        client.responses.create(model=MODEL, input=STORY, temperature=0, max_output_tokens=40, stream=True)
    )
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.incomplete"
    order = [
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
    ]
    places = [kinds.index(f"response.{kind}") for kind in [*order, "output_item.done"]]
    assert places == sorted(places)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == plain.output_text == events[-1].response.output_text
    with client.responses.stream(model=MODEL, input=STORY, temperature=0) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text.startswith(text)


def check_responses_tools_and_structure():
    given = {"model": MODEL, "temperature": 0}
    parsed = client.responses.parse(**given, input=STORY, text_format=Animal)
    assert isinstance(parsed.output_parsed, Animal)
    first = client.responses.create(**given, input=WEATHER, tools=[RESPONSES_TOOL], tool_choice="required")
    calls = [item for item in first.output if item.type == "function_call"]
    assert [call.name for call in calls] == ["weather"]
    assert json.loads(calls[0].arguments)["city"] in ("Rome", "Oslo")
    result = {"type": "function_call_output", "call_id": calls[0].call_id, "output": TOOL_RESULT}
    conversation = [{"role": "user", "content": WEATHER}, *first.output, result]
    second = client.responses.create(
        **given, input=conversation, tools=[RESPONSES_TOOL], tool_choice="none", max_output_tokens=20
    )
    assert second.output_text
    kinds = [
        event.type
        for event in client.responses.create(
            **given, input=WEATHER, tools=[RESPONSES_TOOL], tool_choice="required", stream=True
        )
    ]
    assert kinds[-1] == "response.completed"
    assert "response.function_call_arguments.delta" in kinds
    assert "response.function_call_arguments.done" in kinds


def check_responses_errors():
    for words, options in (
        ("temperature", {"temperature": -1}),
        ("previous_response_id", {"previous_response_id": "resp_1"}),
        ("background", {"background": True}),
    ):
        raises(
            openai.BadRequestError,
            lambda options=options: client.responses.create(model=MODEL, input=STORY, **options),
            words,
        )
    raises(openai.NotFoundError, lambda: client.responses.create(model="gpt-4", input=STORY))


main(globals())
