"""Anthropic's own client: messages, streams, tools, counts, and its exception classes."""

import anthropic
from checks import (
    KEY,
    KEYED_URL,
    LONG,
    MODEL,
    NOTHING,
    STORY,
    TOOL_RESULT,
    URL,
    WEATHER,
    WEATHER_SCHEMA,
    Animal,
    main,
    raises,
)

client = anthropic.Anthropic(base_url=URL, api_key="any", max_retries=0, timeout=120)
TOOL = {"name": "weather", "description": "Weather.", "input_schema": WEATHER_SCHEMA}
CLOCK = {"name": "clock", "input_schema": NOTHING}


GREEDY = {"extra_body": {"temperature": 0}}  # this version of the client has no argument for it


def ask(text=STORY, **options):
    """A greedy answer, unless something else is said."""
    given = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 40}
    return client.messages.create(**given | GREEDY | options)


def fed(answer):
    """Tokens of the prompt, those of another's beginning included."""
    return answer.usage.input_tokens + answer.usage.cache_read_input_tokens


def hot(**options):
    """Options of sampling, of which the client has no arguments."""
    return {"extra_body": {"temperature": 1} | options}


def check_message():
    answer = ask()
    [block] = answer.content
    assert block.type == "text"
    assert "Pip" in block.text
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", MODEL)
    assert (answer.stop_reason, answer.stop_sequence) == ("max_tokens", None)
    assert answer.usage.output_tokens == 40
    assert answer.id.startswith("msg_")
    ended = ask(max_tokens=1000)
    assert ended.stop_reason == "end_turn"
    assert ended.usage.output_tokens < 1000


def check_system_and_blocks():
    blocks = [{"type": "text", "text": text} for text in ("Tell me a story", "about a fox named Pip.")]
    system = [{"type": "text", "text": "You tell stories.", "cache_control": {"type": "ephemeral"}}]
    plain = ask("Tell me a story\nabout a fox named Pip.", system="You tell stories.")
    answer = ask(messages=[{"role": "user", "content": blocks}], system=system)
    assert answer.content[0].text == plain.content[0].text
    assert fed(answer) == fed(plain) > fed(ask())


def check_stream():
    events = list(ask(stream=True))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    text = "".join(event.delta.text for event in events if event.type == "content_block_delta")
    assert text == ask().content[0].text
    assert kinds.count("content_block_delta") > 20
    assert events[-2].delta.stop_reason == "max_tokens"
    assert events[-2].usage.output_tokens == 40


def check_stream_helper():
    messages = [{"role": "user", "content": STORY}]
    with client.messages.stream(model=MODEL, messages=messages, max_tokens=40, **GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == ask().content[0].text
    assert final.usage.output_tokens == 40


def check_count_tokens():
    messages = [{"role": "user", "content": STORY}]
    given = {"model": MODEL, "messages": messages, "system": "You tell stories."}
    counted = client.messages.count_tokens(**given).input_tokens
    assert counted == fed(ask(system="You tell stories."))
    assert client.messages.count_tokens(**given, tools=[TOOL]).input_tokens > counted


def check_stop_sequences():
    plain = ask().content[0].text
    word = plain.split()[6]
    answer = ask(stop_sequences=[word, "never said"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", word)
    assert answer.content[0].text == plain[: plain.index(word)]


def check_sampling():
    assert len({ask(**hot()).content[0].text for _ in range(4)}) > 1
    assert ask(**hot(top_k=1)).content[0].text == ask().content[0].text


def check_tools():
    one = {"type": "any", "disable_parallel_tool_use": True}
    answer = ask(WEATHER, tools=[TOOL], tool_choice=one, max_tokens=200)
    calls = [block for block in answer.content if block.type == "tool_use"]
    assert (answer.stop_reason, [call.name for call in calls]) == ("tool_use", ["weather"])
    assert calls[0].input["city"] in ("Rome", "Oslo")
    named = ask(WEATHER, tools=[TOOL, CLOCK], tool_choice={"type": "tool", "name": "clock"}, max_tokens=200)
    assert {block.name for block in named.content if block.type == "tool_use"} == {"clock"}
    silent = ask(WEATHER, tools=[TOOL], tool_choice={"type": "none"})
    assert [block.type for block in silent.content] == ["text"]


def check_a_loop_with_a_tool():
    messages = [{"role": "user", "content": WEATHER}]
    one = {"type": "any", "disable_parallel_tool_use": True}
    first = ask(messages=messages, tools=[TOOL], tool_choice=one, max_tokens=200)
    [call] = [block for block in first.content if block.type == "tool_use"]
    messages.append({"role": "assistant", "content": first.content})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": TOOL_RESULT}
    messages.append({"role": "user", "content": [result, {"type": "text", "text": "So?"}]})
    second = ask(messages=messages, tools=[TOOL], tool_choice={"type": "none"})
    assert second.content[0].text


def check_streamed_tools():
    given = {"model": MODEL, "messages": [{"role": "user", "content": WEATHER}], "max_tokens": 200} | GREEDY
    one = {"type": "any", "disable_parallel_tool_use": True}
    with client.messages.stream(**given, tools=[TOOL], tool_choice=one) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    [call] = [block for block in final.content if block.type == "tool_use"]
    assert call.input["city"] in ("Rome", "Oslo")
    assert "input_json" in kinds
    assert final.stop_reason == "tool_use"


def check_structure():
    messages = [{"role": "user", "content": STORY}]
    answer = client.messages.parse(
        model=MODEL, messages=messages, max_tokens=200, output_format=Animal, **GREEDY
    )
    assert isinstance(answer.parsed_output, Animal)
    assert answer.stop_reason == "end_turn"


def check_cached_tokens():
    given = {"system": f"anthropic. {LONG}"}
    first = ask(**given)
    assert first.usage.cache_read_input_tokens < 128
    messages = [
        {"role": "user", "content": STORY},
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": "And then?"},
    ]
    second = ask(messages=messages, **given)
    assert second.usage.cache_read_input_tokens >= 256
    counted = client.messages.count_tokens(model=MODEL, messages=messages, **given).input_tokens
    assert counted == fed(second)


def check_left_out():
    given = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": STORY}]}
    answered = client.messages.with_raw_response.create(**given, extra_body={"tokens_that_nobody_knows": 1})
    assert answered.headers["x-kvant-ignored"] == "tokens_that_nobody_knows"


def check_errors():
    for words, options in (
        ("temperature", {"extra_body": {"temperature": 9}}),
        ("max_tokens", {"max_tokens": 0}),
        ("tool_choice", {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "nothing"}}),
        ("messages", {"messages": []}),
    ):
        error = raises(anthropic.BadRequestError, lambda options=options: ask(**options), words)
        assert error.body["type"] == "error"
        assert error.body["error"]["type"] == "invalid_request_error"
    raises(anthropic.BadRequestError, lambda: ask(LONG * 40), "context")
    raises(anthropic.NotFoundError, lambda: ask(model="claude"))
    error = raises(anthropic.RequestTooLargeError, lambda: ask("x" * (9 << 20)))
    assert error.body["error"]["type"] == "request_too_large"


def check_keys():
    messages = [{"role": "user", "content": STORY}]
    given = {"model": MODEL, "messages": messages, "max_tokens": 4}
    keyed = anthropic.Anthropic(base_url=KEYED_URL, api_key=KEY, max_retries=0)
    assert keyed.messages.create(**given).usage.output_tokens == 4
    bearer = anthropic.Anthropic(base_url=KEYED_URL, api_key=None, auth_token=KEY, max_retries=0)
    assert bearer.messages.create(**given).usage.output_tokens == 4
    wrong = keyed.with_options(api_key="wrong")
    error = raises(anthropic.AuthenticationError, lambda: wrong.messages.create(**given))
    assert error.body["error"]["type"] == "authentication_error"
    raises(anthropic.AuthenticationError, lambda: wrong.messages.count_tokens(model=MODEL, messages=messages))


main(globals())
