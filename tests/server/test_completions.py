"""OpenAI's completions over HTTP: prompts as text and ids, one or several, in the older shape."""

from typing import Any

import pytest
from support.interfaces import CHAT, COMPLETIONS
from support.server import Running, sse_events

TEXT = "Once upon a time there was a fox"


def ask(server: Running, prompt: Any = TEXT, tokens: int | None = 12, **fields: Any) -> dict[str, Any]:
    return COMPLETIONS.ask(server, prompt, tokens, **fields)


def texts_of(answer: dict[str, Any]) -> list[str]:
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(answer["choices"])))
    return [choice["text"] for choice in answer["choices"]]


def test_prompts_in_every_form(server: Running) -> None:
    tokenizer = server.service.tokenizer
    other = "The bear had a red"
    ids, other_ids = tokenizer.encode(TEXT), tokenizer.encode(other)
    alone, other_alone = texts_of(ask(server)), texts_of(ask(server, other))
    assert texts_of(ask(server, [TEXT])) == texts_of(ask(server, ids)) == texts_of(ask(server, [ids])) == alone
    assert len({*alone, *other_alone}) == 2
    answer = ask(server, [TEXT, other_ids, other], n=2)
    assert texts_of(answer) == [*alone, *alone, *other_alone * 4]
    assert answer["usage"]["prompt_tokens"] == len(ids) + 2 * len(other_ids)
    assert texts_of(ask(server, [TEXT, ids], echo=True)) == [TEXT + alone[0]] * 2
    assert ask(server, tokens=None)["usage"]["completion_tokens"] <= 16  # OpenAI's default
    assert answer["object"] == "text_completion"
    assert {choice["finish_reason"] for choice in answer["choices"]} <= {"length", "stop"}


def test_many_prompts_are_more_than_run_at_once(server: Running) -> None:
    prompts = [f"A fox and {number} bears" for number in range(2 * server.service.settings.max_queue)]
    answer = ask(server, prompts, 2, echo=True)
    assert all(text.startswith(prompt) for text, prompt in zip(texts_of(answer), prompts, strict=True))


def test_log_probabilities_are_those_of_chat(server: Running) -> None:
    messages = [{"role": "user", "content": "Tell me a story."}]
    prompt = server.service.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    chat = CHAT.ask(server, messages, 12, logprobs=True, top_logprobs=3)["choices"][0]
    choice = ask(server, prompt, logprobs=3)["choices"][0]
    assert choice["text"] == chat["message"]["content"]
    told, content = choice["logprobs"], chat["logprobs"]["content"]
    assert told["tokens"] == [each["token"] for each in content]
    assert told["token_logprobs"] == pytest.approx([each["logprob"] for each in content], abs=1e-4)
    tops = [[other["token"] for other in each["top_logprobs"]] for each in content]
    assert [list(each) for each in told["top_logprobs"]] == tops
    at = 0
    for token, offset in zip(told["tokens"], told["text_offset"], strict=True):
        assert offset == at
        assert choice["text"].startswith(token, at)
        at += len(token)
    assert ask(server, prompt, logprobs=0)["choices"][0]["logprobs"]["top_logprobs"] == [None] * len(content)
    assert ask(server, prompt)["choices"][0]["logprobs"] is None


def test_a_stream_is_the_whole(server: Running) -> None:
    fields = {"prompt": [TEXT, "The bear"], "n": 2, "seed": 3, "temperature": 1.1, "logprobs": 1, "stop": "the"}
    whole = ask(server, **fields)
    body = COMPLETIONS.body(tokens=12, stream_options={"include_usage": True}, **fields)
    chunks = sse_events(server, COMPLETIONS.path, body)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    for choice in whole["choices"]:
        own = [chunk["choices"][0] for chunk in chunks[:-1] if chunk["choices"][0]["index"] == choice["index"]]
        assert "".join(each["text"] for each in own) == choice["text"]
        assert [each["finish_reason"] for each in own if each["finish_reason"]] == [choice["finish_reason"]]
        told = {key: [item for each in own for item in each["logprobs"][key]] for key in choice["logprobs"]}
        whole_told = choice["logprobs"]
        # Which answers are computed together is a matter of time, and the last digits with it.
        assert told.pop("token_logprobs") == pytest.approx(whole_told.pop("token_logprobs"), abs=1e-3)
        for found, expected in zip(told.pop("top_logprobs"), whole_told.pop("top_logprobs"), strict=True):
            assert found == pytest.approx(expected, abs=1e-3)
        assert told == whole_told
