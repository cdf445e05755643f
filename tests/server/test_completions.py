"""OpenAI's completions over HTTP: the numbers and shapes that mlx-lm and OpenAI's API have."""

import json
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from support.interfaces import CHAT, COMPLETIONS, FOX, Interface, pieces
from support.server import Running, sse_events

from kvant.models import Decoder

Pocket = tuple[Decoder, Any]
TEXT = "Once upon a time there was a fox"
ASKED = [{"role": "user", "content": FOX}]
ask = partial(CHAT.ask, temperature=None)


def text_of(answer: dict[str, Any], choice: int = 0) -> str:
    return str(answer["choices"][choice]["message"]["content"])


def test_log_probabilities_and_penalties(exact: Running, pocket: Pocket, pocket_mlx_lm: nn.Module) -> None:
    """Greedy tokens are those of the reference's logits less OpenAI's penalties, whose counts are of the
    answer.
    """
    ids = pocket[1].apply_chat_template(ASKED, add_generation_prompt=True)
    fields = {"presence_penalty": 0.6, "frequency_penalty": 1.1, "logit_bias": {"300": -3, "301": 2}}
    answer = CHAT.ask(exact, tokens=40, logprobs=True, top_logprobs=5, ignore_eos=True, **fields)
    told = answer["choices"][0]["logprobs"]["content"]
    by_bytes = {pocket[1].detokenizer.token_bytes(token): token for token in range(len(pocket[1]))}
    tokens = [by_bytes[bytes(each["bytes"])] for each in told]
    assert len(tokens) == 40
    assert b"".join(bytes(each["bytes"]) for each in told).decode() == text_of(answer)
    logits = np.array(pocket_mlx_lm(mx.array([ids + tokens[:-1]]))[0, len(ids) - 1 :], np.float64)
    counts = np.zeros(logits.shape[-1])
    plain = []
    for token, row, each in zip(tokens, logits, told, strict=True):
        plain.append(int(row.argmax()))
        changed = row - 1.1 * counts - 0.6 * (counts > 0)
        changed[300] -= 3
        changed[301] += 2
        logprobs = changed - changed.max() - np.log(np.exp(changed - changed.max()).sum())
        assert token == changed.argmax()
        assert each["logprob"] == pytest.approx(logprobs[token], abs=1e-4)
        best = np.argsort(-logprobs)[:5]
        assert [by_bytes[bytes(other["bytes"])] for other in each["top_logprobs"]] == best.tolist()
        assert [other["logprob"] for other in each["top_logprobs"]] == pytest.approx(logprobs[best], abs=1e-4)
        counts[token] += 1
    assert plain != tokens  # the penalties changed something


@pytest.mark.parametrize(
    ("to", "fields"),
    [
        (CHAT, {"n": 3, "seed": -7, "temperature": 1.2, "top_p": 0.9, "logprobs": True, "top_logprobs": 1}),
        (
            COMPLETIONS,
            {"asked": [TEXT, "The bear"], "n": 2, "seed": 3, "temperature": 1, "logprobs": 1, "stop": "the"},
        ),
    ],
    ids=str,
)
def test_a_stream_is_the_whole_answer(server: Running, to: Interface, fields: dict[str, Any]) -> None:
    whole = to.ask(server, **fields)
    chunks = sse_events(server, to.path, to.body(stream_options={"include_usage": True}, **fields))
    assert len({(chunk["id"], chunk["created"], chunk["object"]) for chunk in chunks}) == 1
    assert {chunk["usage"] is None for chunk in chunks[:-1]} == {True}
    assert chunks[-1]["choices"] == []
    for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert chunks[-1]["usage"][key] == whole["usage"][key]
    if to is CHAT:
        assert [chunk["choices"][0]["delta"] for chunk in chunks[:3]] == [
            {"role": "assistant", "content": ""}
        ] * 3
    for choice in whole["choices"]:
        own = [
            chunk["choices"][0] for chunk in chunks[:-1] if chunk["choices"][0]["index"] == choice["index"]
        ]
        assert len(own) > 5
        said = [each["delta"].get("content", "") if to is CHAT else each["text"] for each in own]
        assert "".join(said) == (text_of(whole, choice["index"]) if to is CHAT else choice["text"])
        assert [each["finish_reason"] for each in own if each["finish_reason"]] == [choice["finish_reason"]]
        expected = {key: value or [] for key, value in choice["logprobs"].items()}
        parts = [each["logprobs"] for each in own if each["logprobs"]]
        told = {key: [item for part in parts for item in part[key] or ()] for key in expected}
        # which answers are computed together is a matter of time, and the last digits with it
        if to is COMPLETIONS:
            assert told.pop("token_logprobs") == pytest.approx(expected.pop("token_logprobs"), abs=1e-3)
            for found, top in zip(told.pop("top_logprobs"), expected.pop("top_logprobs"), strict=True):
                assert found == pytest.approx(top, abs=1e-3)
        assert told == expected


def test_defaults_are_the_models(exact: Running) -> None:
    assert text_of(ask(exact, seed=3)) == text_of(ask(exact, seed=3, temperature=0.7, top_p=0.95))
    assert (
        text_of(ask(exact, seed=3, top_p=1e-9))
        == text_of(ask(exact, top_p=0))
        == text_of(ask(exact, temperature=0))
    )
    assert text_of(ask(exact, temperature=0, seed=1, top_k=5, min_p=0.1)) == text_of(
        ask(exact, temperature=1e-8)
    )


def test_what_cannot_change_an_answer_is_taken(server: Running) -> None:
    fields = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "prompt_cache_key": "k",
    }
    fields |= {
        "modalities": ["text"],
        "safety_identifier": "s",
        "verbosity": "medium",
        "parallel_tool_calls": True,
    }
    fields |= {
        "tools": None,
        "response_format": {"type": "text"},
        "audio": None,
        "stop": [],
        "n": 1,
        "stream": False,
    }
    answer = server.client.post(CHAT.path, json=CHAT.body() | fields).json()
    assert text_of(answer) == text_of(CHAT.ask(server))


IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]
BOTH = [{"role": "user", "content": [{"type": "text", "text": "x", "image_url": {"url": "data:,"}}]}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CALLED = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{"}}
CALLS = "messages[0].tool_calls"
REFUSED: list[tuple[dict[str, Any], str | None, str]] = [
    ({"messages": []}, "messages", "at least one message"),
    ({"messages": IMAGE}, "messages[0].content[0].type", "'image_url'"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "has no content"),
    ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role", "robot"),
    (
        {"messages": [{"role": "user", "content": "", "tool_calls": [CALLED]}]},
        "messages[0]",
        "of an assistant",
    ),
    ({"messages": [{"role": "assistant", "tool_calls": [CALLED]}]}, f"{CALLS}[0].function.arguments", "'{'"),
    (
        {"messages": [{"role": "tool", "content": "", "tool_call_id": "x"}]},
        "messages[0].tool_call_id",
        "no earlier call",
    ),
    ({"messages": [{"role": "tool", "content": ""}]}, "messages[0]", "expected tool_call_id"),
    ({"messages": [{"role": "user", "content": "a " * 40_000}]}, "messages", "room for 512 tokens"),
    ({"temperature": 2.5}, "temperature", "is 2.5; expected 0 to 2"),
    ({"temperature": "hot"}, "temperature", "Expected `float | null`"),
    ({"top_p": 1.5}, "top_p", "is 1.5; expected 0 to 1"),
    ({"presence_penalty": 3}, "presence_penalty", "is 3.0; expected -2 to 2"),
    ({"xtc_threshold": 0.1}, "xtc_threshold", "no effect without xtc_probability"),
    ({"seed": 2**64}, "seed", "expected -9223372036854775808 to"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "Expected `int`, got `str`"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5", "is 101.0; expected -100 to 100"),
    (
        {"repetition_penalty": 1e-38},
        "repetition_penalty",
        "is 1e-38; expected 0 (off), or from 0.001 to 1000",
    ),
    ({"repeat_penalty": 5e-324}, "repetition_penalty", "is 5e-324; expected 0 (off), or from"),
    ({"stop_token_ids": [1280]}, "stop_token_ids", "has token 1280; the model knows 0 to 1279"),
    ({"stop_token_ids": [1] * 1025}, "stop_token_ids", "has 1025 tokens; expected at most 1024"),
    ({"n": 5}, "n", "is 5; expected 1 to 4"),
    ({"max_tokens": 0}, "max_tokens", "is 0; expected at least 1"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "expected one of them"),
    ({"stop": [""]}, "stop", "a text of 0 characters; expected 1 to 256"),
    ({"stop": ["a"] * 17}, "stop", "has 17 texts; expected at most 16"),
    ({"top_logprobs": 3}, "top_logprobs", "no effect without logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "is 21; expected 0 to 20"),
    ({"modalities": ["audio"]}, "modalities[0]", "audio"),
    ({"functions": []}, "functions", "Expected `null`"),
    ({"chat_template_kwargs": {"tokenize": 1}}, "chat_template_kwargs", "kvant sets itself"),
    ({"tool_choice": "required"}, "tool_choice", "no effect without tools"),
    ({"tools": [TOOL, TOOL]}, "tools[1].function.name", "another tool has"),
    (
        {"tools": [{**TOOL, "function": {"name": "a b"}}]},
        "tools[0].function.name",
        "'a b'; expected 1 to 256 letters",
    ),
    ({"repeat_penalty": 1.1, "repetition_penalty": 1.2}, "repeat_penalty", "expected one of them"),
    ({"num_predict": 5, "max_tokens": 6}, "max_tokens", "max_tokens and num_predict differ"),
    ({"tools": [{"function": {"name": "a"}}]}, "tools[0].type", "has no type; expected function"),
    ({"draft": "suffix"}, "draft", '"model" or "mtp" or "none" or "prompt"'),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}},
        "tool_choice",
        "one of tools",
    ),
    ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
    ({"structured_outputs": {}}, "structured_outputs", "has nothing; expected one of"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "expected texts"),
    ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "structured_outputs", "has regex, grammar"),
]
REFUSED_PROMPTS: list[tuple[dict[str, Any], str | None, str]] = [
    ({"suffix": "end"}, "suffix", "only continues text"),
    ({"best_of": 2}, "best_of", "is 2; expected 1, which is n"),
    ({"logprobs": 6}, "logprobs", "is 6; expected 0 to 5"),
    ({"max_tokens": 0}, "max_tokens", "is 0; expected at least 1"),
    ({"prompt": []}, "prompt", "has 0 prompts; expected 1 to 128"),
    ({"prompt": ["a"] * 129}, "prompt", "has 129 prompts"),
    ({"prompt": [1, "a"]}, "prompt", "numbers beside prompts"),
    ({"prompt": ""}, "prompt", "the prompt is empty"),
    ({"prompt": ["fox", ""]}, "prompt", "the prompt is empty"),
    ({"prompt": [1280]}, "prompt", "token id 1280; the model knows 0 to 1279"),
    ({"prompt": ["fox", "a " * 600]}, "prompt", "512 are reserved"),
]
LEFT_OUT: dict[str, dict[str, Any]] = {
    "messages[0].content[0].image_url": {"messages": BOTH},
    "stream_options": {"stream_options": {"include_usage": True}},
    "store True, service_tier flex": {"store": True, "service_tier": "flex"},
    "reasoning_effort low": {"reasoning_effort": "low"},
    "chat_template_kwargs.thinking": {"chat_template_kwargs": {"thinking": 1}},
    "tools[0] custom": {"tools": [{"type": "custom", "custom": {"name": "a"}}, TOOL]},
    "verbosity low, num_ctx, keep_alive": {"verbosity": "low", "num_ctx": 9, "keep_alive": "5m"},
    "web_search_options, thinking": {"web_search_options": {}, "thinking": {"type": "enabled"}},
}


@pytest.mark.parametrize(("said", "fields"), LEFT_OUT.items())
def test_what_is_left_out_and_said(
    server: Running, strict: Running, said: str, fields: dict[str, Any]
) -> None:
    answered = server.client.post(CHAT.path, json=CHAT.body(tokens=2) | fields)
    assert (answered.status_code, answered.headers["x-kvant-ignored"]) == (200, said), answered.text
    refused = strict.client.post(CHAT.path, json=CHAT.body(tokens=2) | fields)
    param = said.partition(",")[0].partition(" ")[0]
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert param in refused.json()["error"]["message"]
    assert "leave it out" in refused.json()["error"]["message"]


def test_fields_of_others(server: Running) -> None:
    """-1 is no limit; a schema may stand beside json_object; a stream counts as it goes; Ollama's names
    are known.
    """
    ours = CHAT.ask(server, tokens=20, repetition_penalty=1.5, repetition_context_size=7)
    theirs = CHAT.ask(server, tokens=None, num_predict=20, repeat_penalty=1.5, repeat_last_n=7)
    assert text_of(ours) == text_of(theirs) != text_of(CHAT.ask(server, tokens=20))
    assert COMPLETIONS.ask(server, tokens=None, n_predict=3)["usage"]["completion_tokens"] == 3
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [7]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    asked = CHAT.body(tokens=-1, response_format={"type": "json_object", "schema": schema})
    assert json.loads(text_of(server.client.post(CHAT.path, json=asked).json())) == {"a": 7}
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = sse_events(server, CHAT.path, CHAT.body(stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert counts[len(counts) // 2] > 0
    assert counts[-1] == 24


def test_words_for_off(server: Running) -> None:
    fields: dict[str, Any] = {"temperature": 0.8, "seed": 5}
    free = text_of(CHAT.ask(server, **fields))
    for off in ({"top_k": -1}, {"repetition_penalty": 0}, {"repeat_penalty": 0.0, "top_k": 0}):
        assert text_of(CHAT.ask(server, **fields, **off)) == free


@pytest.mark.parametrize("to", [CHAT, COMPLETIONS], ids=str)
@pytest.mark.parametrize("fields", [{}, {"ignore_eos": True}, {"draft": "prompt"}], ids=str)
def test_stop_token_ids(server: Running, to: Interface, fields: dict[str, Any]) -> None:
    """vLLM's field: the token ends the answer, counts, and is no part of the text."""
    tokenizer = server.service.tokenizer
    whole = pieces(to.ask(server, **fields))[0]["text"]
    ids = tokenizer.encode(whole, add_special_tokens=False)
    stop = next(token for token in ids[4:] if token not in ids[:4])
    answered = to.ask(server, stop_token_ids=[stop, 0], **fields)
    first = ids.index(stop)
    assert pieces(answered)[0]["text"] == tokenizer.decode(ids[:first])
    assert answered["choices"][0]["finish_reason"] == "stop"
    assert answered["usage"]["completion_tokens"] == first + 1


@pytest.mark.parametrize(
    ("to", "stream"),
    [(CHAT, False), (CHAT, True), (COMPLETIONS, False)],
    ids=["chat", "stream", "completions"],
)
def test_what_is_wrong_is_refused_by_name(server: Running, to: Interface, stream: bool) -> None:
    for fields, param, part in REFUSED if to is CHAT else REFUSED_PROMPTS:
        if stream and "stream_options" in fields:
            continue
        answered = server.client.post(to.path, json=to.body(tokens=2, stream=stream) | fields)
        assert answered.status_code == 400, fields
        error = answered.json()["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", param), error
        assert part in error["message"], error
        assert "\n" not in error["message"]


def test_without_a_limit_an_answer_fills_the_context(server: Running) -> None:
    answer = CHAT.ask(server, "a " * 450, None, ignore_eos=True)
    # The last token is sampled and not fed.
    assert answer["usage"]["total_tokens"] == 513
    assert answer["choices"][0]["finish_reason"] == "length"


def complete(server: Running, prompt: Any = TEXT, tokens: int | None = 12, **fields: Any) -> dict[str, Any]:
    return COMPLETIONS.ask(server, prompt, tokens, **fields)


def texts_of(answer: dict[str, Any]) -> list[str]:
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(answer["choices"])))
    return [choice["text"] for choice in answer["choices"]]


def test_prompts_in_every_form(server: Running) -> None:
    tokenizer = server.service.tokenizer
    other = "The bear had a red"
    ids, other_ids = tokenizer.encode(TEXT), tokenizer.encode(other)
    alone, other_alone = texts_of(complete(server)), texts_of(complete(server, other))
    assert (
        texts_of(complete(server, [TEXT]))
        == texts_of(complete(server, ids))
        == texts_of(complete(server, [ids]))
        == alone
    )
    assert len({*alone, *other_alone}) == 2
    answer = complete(server, [TEXT, other_ids, other], n=2)
    assert texts_of(answer) == [*alone, *alone, *other_alone * 4]
    assert answer["usage"]["prompt_tokens"] == len(ids) + 2 * len(other_ids)
    assert texts_of(complete(server, [TEXT, ids], echo=True)) == [TEXT + alone[0]] * 2
    assert complete(server, tokens=None)["usage"]["completion_tokens"] <= 16  # OpenAI's default
    assert answer["object"] == "text_completion"
    assert {choice["finish_reason"] for choice in answer["choices"]} <= {"length", "stop"}


def test_many_prompts_are_more_than_run_at_once(server: Running) -> None:
    prompts = [f"A fox and {number} bears" for number in range(2 * server.service.settings.max_queue)]
    answer = complete(server, prompts, 2, echo=True)
    assert all(text.startswith(prompt) for text, prompt in zip(texts_of(answer), prompts, strict=True))


@pytest.mark.parametrize("tokens", [0, 1])
def test_log_probabilities_of_a_prompt(exact: Running, pocket_mlx_lm: nn.Module, tokens: int) -> None:
    """As evaluations ask for them: a prompt's own, the first token without one, by mlx-lm's logits of the
    same ids.
    """
    ids = exact.service.tokenizer.encode(
        "The fox and the bear went to the river, and there they saw a red boat. " * 8
    )
    logits = np.array(pocket_mlx_lm(mx.array([ids]))[0].astype(mx.float32), np.float64)
    logprobs = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
    logprobs -= logits.max(-1, keepdims=True)
    assert len(ids) > 128
    for _ in range(2):  # nothing is taken from an earlier request
        answer = complete(exact, ids, tokens, echo=True, logprobs=2)
        (choice,) = answer["choices"]
        told = choice["logprobs"]
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert (len(told["tokens"]), answer["usage"]["completion_tokens"]) == (len(ids) + tokens, tokens)
        assert (told["token_logprobs"][0], told["top_logprobs"][0]) == (None, None)
        own = [logprobs[place, token] for place, token in enumerate(ids[1:])]
        assert told["token_logprobs"][1 : len(ids)] == pytest.approx(own, abs=1e-4)
        for place, top in enumerate(told["top_logprobs"][1 : len(ids)]):
            assert sorted(top.values())[-2:] == pytest.approx(np.sort(logprobs[place])[-2:], abs=1e-4)
        assert "".join(told["tokens"])[: len(choice["text"])] == choice["text"]
        assert choice["finish_reason"] == "length"
    plain = complete(exact, ids, 1)["choices"][0]["text"]
    assert choice["text"] == exact.service.tokenizer.decode(ids) + (plain if tokens else "")


@pytest.mark.parametrize("tokens", [0, 1])
@pytest.mark.parametrize("length", [1, 2, 33])
def test_a_prompt_whose_last_token_is_fed_alone(
    exact: Running, pocket_mlx_lm: nn.Module, length: int, tokens: int
) -> None:
    """A prompt of one token has nothing that follows in it; of 33 the last is behind a chunk of 32."""
    ids = exact.service.tokenizer.encode(
        "The fox and the bear went to the river, and there they saw a red boat. " * 3
    )
    ids = ids[:length]
    assert len(ids) == length
    logits = np.array(pocket_mlx_lm(mx.array([ids]))[0].astype(mx.float32), np.float64)
    logits -= np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True)) + logits.max(
        -1, keepdims=True
    )
    own = [logits[place, token] for place, token in enumerate(ids[1:])]
    for prompt in (ids, [ids], exact.service.tokenizer.decode(ids)):
        (choice,) = complete(exact, prompt, tokens, echo=True, logprobs=1)["choices"]
        told = choice["logprobs"]["token_logprobs"]
        assert (len(told), told[0]) == (length + tokens, None)
        assert told[1:length] == pytest.approx(own, abs=1e-4)


def test_text_offsets_count_characters(server: Running) -> None:
    """The pieces of one character have its place, whole and streamed; the bytes before each are the
    reference.
    """
    prompt = "日本 🎉 x"
    fields: dict[str, Any] = {"echo": True, "logprobs": 1}
    (whole,) = complete(server, prompt, 3, **fields)["choices"]
    events = sse_events(server, COMPLETIONS.path, COMPLETIONS.body(prompt, 3, **fields))
    chunks = [event["choices"][0]["logprobs"] for event in events]
    tokenizer = server.service.tokenizer
    ids = tokenizer.encode(prompt)
    written = [tokenizer.detokenizer.token_bytes(token) for token in ids]
    assert b"".join(written).decode() == prompt
    expected = [len(b"".join(written[:place]).decode(errors="ignore")) for place in range(len(ids) + 1)]
    offsets = whole["logprobs"]["text_offset"]
    assert offsets[: len(ids) + 1] == expected
    assert offsets == sorted(offsets)
    assert [at for chunk in chunks for at in chunk["text_offset"]] == offsets


def test_log_probabilities_are_those_of_chat(server: Running) -> None:
    messages = [{"role": "user", "content": "Tell me a story."}]
    prompt = server.service.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    chat = CHAT.ask(server, messages, 12, logprobs=True, top_logprobs=3)["choices"][0]
    choice = complete(server, prompt, logprobs=3)["choices"][0]
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
    assert complete(server, prompt, logprobs=0)["choices"][0]["logprobs"]["top_logprobs"] == [None] * len(
        content
    )
    assert complete(server, prompt)["choices"][0]["logprobs"] is None
