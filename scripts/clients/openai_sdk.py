"""OpenAI's own client: chat, completions, responses, tools, structure, and its exception classes."""

import asyncio
import json
import math
import threading

import openai
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
    until,
)
from pydantic import BaseModel

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="any", max_retries=0, timeout=120)
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Weather.", "parameters": WEATHER_SCHEMA},
}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": NOTHING}}


def ask(text=STORY, **options):
    """A greedy answer, unless something else is said."""
    given = {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": 40,
    }
    return client.chat.completions.create(**given | options)


def check_models():
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    raises(openai.NotFoundError, lambda: client.models.retrieve("nothing"))


def check_chat():
    answer = ask()
    [choice] = answer.choices
    assert "Pip" in choice.message.content
    assert (answer.object, answer.model, choice.index) == ("chat.completion", MODEL, 0)
    assert (choice.message.role, choice.finish_reason, choice.logprobs) == ("assistant", "length", None)
    assert answer.usage.completion_tokens == 40
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 40
    assert ask().choices[0].message.content == choice.message.content
    assert len(ask(max_tokens=None, max_completion_tokens=3, logprobs=True).choices[0].logprobs.content) == 3


def check_messages_of_all_roles_and_parts():
    parts = [{"type": "text", "text": "Tell me a story"}, {"type": "text", "text": " about a fox named Pip."}]
    system = {"role": "system", "content": "You tell stories."}
    assert "Pip" in ask(messages=[system, {"role": "user", "content": parts}]).choices[0].message.content
    answer = {"role": "assistant", "content": "Pip was a fox."}
    more = [{"role": "user", "content": STORY}, answer, {"role": "user", "content": "And then?"}]
    assert ask(messages=more).choices[0].message.content


def check_an_answer_that_ends_by_itself():
    answer = ask(max_tokens=1000)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens < 1000
    assert "<|" not in answer.choices[0].message.content


def check_seeds():
    def draw(seed):
        return ask(temperature=1, seed=seed, top_p=0.95).choices[0].message.content

    assert draw(7) == draw(7)
    assert len({draw(seed) for seed in range(4)}) == 4


def check_options_of_sampling_change_the_answer():
    plain = ask().choices[0].message.content
    for option in ({"frequency_penalty": 2.0}, {"presence_penalty": 2.0}, {"logit_bias": _ban_first_token()}):
        assert ask(**option).choices[0].message.content != plain, option


def _ban_first_token():
    first = ask(max_tokens=1).choices[0].message.content
    tokens = client.post("/../tokenize", body={"model": MODEL, "prompt": first}, cast_to=object)["tokens"]
    return {str(tokens[0]): -100}


def check_stream():
    chunks = list(ask(stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == ask().choices[0].message.content
    assert len(chunks) > 20
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == [
        "length"
    ]
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], 40)
    assert {chunk.usage for chunk in chunks[:-1]} == {None}
    assert len({chunk.id for chunk in chunks}) == 1


def check_stream_helper():
    messages = [{"role": "user", "content": STORY}]
    with client.chat.completions.stream(model=MODEL, messages=messages, temperature=0) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content == ask(max_tokens=None).choices[0].message.content


def check_many_at_once():
    """Answers side by side are those of one alone, from one client of asyncio."""

    async def together():
        async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="any") as many:
            questions = [f"Tell me about a {animal}." for animal in ("fox", "bear", "duck", "frog")]
            tasks = [
                many.chat.completions.create(
                    model=MODEL, messages=[{"role": "user", "content": q}], temperature=0, max_tokens=20
                )
                for q in questions
            ]
            return questions, await asyncio.gather(*tasks)

    for question, answer in zip(*asyncio.run(together()), strict=True):
        assert answer.choices[0].message.content == ask(question, max_tokens=20).choices[0].message.content


def check_stop():
    plain = ask().choices[0].message.content
    word = plain.split()[6]
    answer = ask(stop=[word, "never said"])
    assert answer.choices[0].message.content == plain[: plain.index(word)]
    assert answer.choices[0].finish_reason == "stop"
    streamed = "".join(c.choices[0].delta.content or "" for c in ask(stop=word, stream=True))
    assert streamed == plain[: plain.index(word)]


def check_n():
    several = ask(n=3, temperature=1, seed=5)
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in several.choices]
    assert len(set(texts)) == 3
    assert texts == [ask(temperature=1, seed=5 + i).choices[0].message.content for i in range(3)]
    assert several.usage.completion_tokens == sum(
        ask(temperature=1, seed=5 + i).usage.completion_tokens for i in range(3)
    )
    streamed = ["", "", ""]
    for chunk in ask(n=3, temperature=1, seed=5, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


def check_logprobs():
    choice = ask(logprobs=True, top_logprobs=3).choices[0]
    tokens = choice.logprobs.content
    assert len(tokens) == 40
    assert b"".join(bytes(t.bytes) for t in tokens).decode() == choice.message.content
    for token in tokens:
        assert token.logprob <= 0
        assert [t.logprob for t in token.top_logprobs] == sorted(
            (t.logprob for t in token.top_logprobs), reverse=True
        )
        assert (len(token.top_logprobs), token.top_logprobs[0].token) == (3, token.token)  # greedy
        assert sum(math.exp(t.logprob) for t in token.top_logprobs) <= 1.001
    streamed = [
        token
        for chunk in ask(logprobs=True, top_logprobs=1, stream=True)
        for choice in chunk.choices
        if choice.logprobs
        for token in choice.logprobs.content
    ]
    assert [t.token for t in streamed] == [t.token for t in tokens]


def check_json_object():
    answer = ask("Say JSON.", response_format={"type": "json_object"}, max_tokens=300).choices[0]
    if answer.finish_reason == "stop":
        assert isinstance(json.loads(answer.message.content), dict)
    else:
        assert (answer.finish_reason, answer.message.content[0]) == ("length", "{")


def check_parsed_structure():
    for temperature in (0, 1):
        answer = client.chat.completions.parse(
            model=MODEL,
            messages=[{"role": "user", "content": STORY}],
            response_format=Animal,
            temperature=temperature,
            seed=3 if temperature else None,
        )
        assert isinstance(answer.choices[0].message.parsed, Animal)
        assert answer.choices[0].finish_reason == "stop"
    with client.chat.completions.stream(
        model=MODEL, messages=[{"role": "user", "content": STORY}], response_format=Animal, temperature=0
    ) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Animal)


def check_structure_cut_short():
    """Under a schema the answer that has no room to end says so."""
    schema = {
        "name": "animal",
        "strict": True,
        "schema": {**Animal.model_json_schema(), "additionalProperties": False},
    }
    answer = ask(response_format={"type": "json_schema", "json_schema": schema}, max_tokens=3).choices[0]
    assert answer.finish_reason == "length"
    raises(
        openai.LengthFinishReasonError,
        lambda: client.chat.completions.parse(
            model=MODEL, messages=[{"role": "user", "content": STORY}], response_format=Animal, max_tokens=3
        ),
    )


def check_tools():
    answer = ask(WEATHER, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, max_tokens=200)
    [choice] = answer.choices
    [call] = choice.message.tool_calls
    assert (choice.finish_reason, call.type, call.function.name) == ("tool_calls", "function", "weather")
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    assert call.id
    named = ask(
        WEATHER,
        tools=[TOOL, CLOCK],
        tool_choice={"type": "function", "function": {"name": "clock"}},
        max_tokens=200,
    ).choices[0]
    assert [call.function.name for call in named.message.tool_calls] == ["clock"]
    assert json.loads(named.message.tool_calls[0].function.arguments) == {}
    silent = ask(WEATHER, tools=[TOOL], tool_choice="none").choices[0]
    assert silent.message.tool_calls is None
    assert silent.message.content


def check_a_loop_with_a_tool():
    """The call goes back with its result, and an answer in words follows."""
    messages = [{"role": "user", "content": WEATHER}]
    first = ask(
        messages=messages, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, max_tokens=200
    )
    [call] = first.choices[0].message.tool_calls
    messages.append(first.choices[0].message.to_dict())
    messages.append({"role": "tool", "tool_call_id": call.id, "content": TOOL_RESULT})
    second = ask(messages=messages, tools=[TOOL], tool_choice="none")
    assert second.choices[0].message.content


def check_streamed_tools():
    name = arguments = ""
    ids, reasons = set(), []
    options = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200}
    for chunk in ask(WEATHER, stream=True, **options):
        [choice] = chunk.choices
        reasons += [choice.finish_reason] if choice.finish_reason else []
        for call in choice.delta.tool_calls or []:
            assert call.index == 0
            ids |= {call.id} - {None}
            name += call.function.name or ""
            arguments += call.function.arguments or ""
    assert (name, reasons, len(ids)) == ("weather", ["tool_calls"], 1)
    assert json.loads(arguments)["city"] in ("Rome", "Oslo")
    given = {"model": MODEL, "messages": [{"role": "user", "content": WEATHER}], "temperature": 0}
    with client.chat.completions.stream(**given, **options) as stream:
        [call] = stream.get_final_completion().choices[0].message.tool_calls
    assert call.function.arguments == arguments


def check_a_tool_of_a_pydantic_class():
    class Weather(BaseModel):
        city: str

    tool = openai.pydantic_function_tool(Weather)
    tool["function"]["parameters"]["properties"]["city"]["enum"] = ["Rome", "Oslo"]
    answer = client.chat.completions.parse(
        model=MODEL, messages=[{"role": "user", "content": WEATHER}], tools=[tool], tool_choice="required"
    )
    assert isinstance(answer.choices[0].message.tool_calls[0].function.parsed_arguments, Weather)


def check_legacy_completions():
    given = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
    answer = client.completions.create(**given, logprobs=2)
    text = answer.choices[0].text
    assert (answer.object, answer.choices[0].finish_reason) == ("text_completion", "length")
    assert "".join(answer.choices[0].logprobs.tokens) == text
    assert len(answer.choices[0].logprobs.top_logprobs) == 8
    assert client.completions.create(**given, echo=True).choices[0].text == "Once upon a time" + text
    assert (
        "".join(c.choices[0].text for c in client.completions.create(**given, stream=True) if c.choices)
        == text
    )
    ids = client.post("/../tokenize", body={"model": MODEL, "prompt": "Once upon a time"}, cast_to=object)[
        "tokens"
    ]
    assert client.completions.create(**given | {"prompt": ids}).choices[0].text == text


def check_cached_tokens():
    """A second turn shares the first one's whole pages, and the answer is the same."""
    messages = [{"role": "system", "content": f"openai. {LONG}"}, {"role": "user", "content": STORY}]
    first = ask(messages=messages)
    assert first.usage.prompt_tokens_details.cached_tokens < 128
    assert first.usage.prompt_tokens > 256
    answer = {"role": "assistant", "content": first.choices[0].message.content}
    second = ask(messages=[*messages, answer, {"role": "user", "content": "And then?"}])
    assert second.usage.prompt_tokens_details.cached_tokens >= 256
    again = ask(messages=messages)
    assert again.usage.prompt_tokens_details.cached_tokens >= 256
    assert again.choices[0].message.content == first.choices[0].message.content


def check_left_out():
    given = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": STORY}]}
    answered = client.chat.completions.with_raw_response.create(
        **given, extra_body={"tokens_that_nobody_knows": 1}
    )
    assert answered.headers["x-kvant-ignored"] == "tokens_that_nobody_knows"


def check_bad_requests():
    for words, options in (
        ("temperature", {"temperature": 9}),
        ("top_p", {"top_p": 2}),
        ("max_tokens", {"max_tokens": -3}),
        ("top_logprobs", {"logprobs": True, "top_logprobs": 1000}),
        ("messages", {"messages": []}),
        ("role", {"messages": [{"role": "wizard", "content": "x"}]}),
        ("response_format", {"response_format": {"type": "yaml"}}),
        (
            "tool_choice",
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "nothing"}}},
        ),
    ):
        error = raises(openai.BadRequestError, lambda options=options: ask(**options), words)
        assert (error.status_code, error.type) == (400, "invalid_request_error")
        streamed = options | {"stream": True}
        raises(openai.BadRequestError, lambda options=streamed: ask(**options), words)
    too_long = raises(openai.BadRequestError, lambda: ask(LONG * 40))
    assert too_long.code == "context_length_exceeded"


def check_unknown_model_and_path():
    assert raises(openai.NotFoundError, lambda: ask(model="gpt-4")).code == "model_not_found"
    raises(openai.NotFoundError, lambda: client.images.generate(model=MODEL, prompt="x"))


def check_embeddings():
    """The client asks for base64 where nothing is said, and decodes it."""
    texts = [STORY, WEATHER, STORY]
    found = client.embeddings.create(model=MODEL, input=texts)
    vectors = [each.embedding for each in found.data]
    assert [each.index for each in found.data] == [0, 1, 2]
    assert (found.object, found.model) == ("list", MODEL)
    assert found.usage.prompt_tokens == found.usage.total_tokens > 20
    assert all(math.isclose(math.hypot(*vector), 1, rel_tol=1e-5) for vector in vectors)
    floats = client.embeddings.create(model=MODEL, input=texts, encoding_format="float")
    for vector, plain in zip(vectors, floats.data, strict=True):
        assert max(abs(a - b) for a, b in zip(vector, plain.embedding, strict=True)) < 1e-5
    assert max(abs(a - b) for a, b in zip(vectors[0], vectors[2], strict=True)) < 1e-5
    assert max(abs(a - b) for a, b in zip(vectors[0], vectors[1], strict=True)) > 1e-2


def check_embeddings_of_few_dimensions_and_of_ids():
    short = client.embeddings.create(model=MODEL, input=STORY, dimensions=8).data[0].embedding
    assert len(short) == 8
    assert math.isclose(math.hypot(*short), 1, rel_tol=1e-5)
    ids = client.post("/../tokenize", body={"model": MODEL, "prompt": STORY}, cast_to=object)["tokens"]
    text, given = (
        client.embeddings.create(model=MODEL, input=each).data[0].embedding for each in (STORY, ids)
    )
    assert max(abs(a - b) for a, b in zip(text, given, strict=True)) < 1e-5


def check_bad_requests_for_embeddings():
    for words, options in (
        ("dimensions", {"dimensions": 5000}),
        ("encoding_format", {"encoding_format": "hex"}),
        ("input", {"input": []}),
        ("empty", {"input": ""}),
    ):
        given = {"model": MODEL, "input": STORY} | options
        raises(openai.BadRequestError, lambda given=given: client.embeddings.create(**given), words)
    long = raises(openai.BadRequestError, lambda: client.embeddings.create(model=MODEL, input=LONG * 40))
    assert long.code == "context_length_exceeded"


def check_keys():
    keyed = openai.OpenAI(base_url=f"{KEYED_URL}/v1", api_key=KEY, max_retries=0)
    assert [model.id for model in keyed.models.list()] == [MODEL]
    for wrong in ("wrong", KEY[:-1], KEY + "x"):
        other = keyed.with_options(api_key=wrong)
        error = raises(openai.AuthenticationError, lambda other=other: other.models.list())
        assert KEY not in str(error)
        raises(
            openai.AuthenticationError,
            lambda other=other: other.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "x"}]
            ),
        )


def check_a_closed_stream_ends_its_request():
    """Its pages are free again at once, though hundreds of tokens were to come."""
    with ask(stream=True, max_tokens=1500, extra_body={"ignore_eos": True}) as stream:
        for _, chunk in zip(range(3), stream, strict=False):
            assert chunk.choices
        assert running() == 1
    until(lambda: running() == 0, 2, "the closed stream's request has ended")


def running():
    """Answers under way."""
    return client.get("/../health", cast_to=object)["running"]


def check_a_full_queue():
    """More than the server takes at once: each is answered, or is a RateLimitError that says when to come
    again.
    """
    found = []

    def one(number):
        try:
            found.append(ask(f"{number}: {STORY}", max_tokens=100, extra_body={"ignore_eos": True}))
        except openai.APIStatusError as error:
            found.append(error)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    refused = [each for each in found if isinstance(each, Exception)]
    assert len(found) == 40
    assert {type(each) for each in refused} == {openai.RateLimitError}, refused
    assert all(int(each.response.headers["Retry-After"]) >= 1 for each in refused)
    assert len(refused) < 40


main(globals())
