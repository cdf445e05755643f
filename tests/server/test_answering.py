"""A prompt through templates that differ from pocket's, an answer's tokens to text, and thinking's budget."""

import copy
import json
import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from support.checkpoints import qwen3_config, reference_model, save_checkpoint
from support.interfaces import CHAT, COMPLETIONS, MESSAGES, pieces, text_of
from support.server import SOON, Running, served, sse_events, wait
from support.tokenizers_made import write_tokenizer

from kvant.engine.request import Request, Token
from kvant.models import Decoder
from kvant.server.answering import AnswerText, Prompt, read_prompt
from kvant.server.anthropic import MessagesBody, messages_generation
from kvant.server.body import decode
from kvant.server.errors import ApiError
from kvant.server.generation import Call, Generation, Text
from kvant.server.left_out import LeftOut
from kvant.server.openai import ChatBody, CompletionsAnswers, CompletionsBody, chat_generation
from kvant.server.settings import Settings
from kvant.server.turns import ThinkingBudget, shown_tools
from kvant.text import guidance
from kvant.text.answer_parts import AnswerParts
from kvant.text.detokenizer import BYTES, ByteDetokenizer, WindowDetokenizer
from kvant.text.prompt import system_place
from kvant.text.tokenizer import Tokenizer
from kvant.text.tool_forms import Kimi, Mistral, tool_format

Pocket = tuple[Decoder, Any]
ASKED: Any = [{"role": "user", "content": "Hi"}]
LOOK = {"type": "function", "function": {"name": "look", "arguments": '{"at": [1, "é"]}'}, "id": "call_1"}
RESULT = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
CALLED: Any = [
    {"role": "assistant", "tool_calls": [LOOK], "reasoning_content": "hm"},
    {"role": "tool", "tool_call_id": "call_1", "content": RESULT},
]
TOOLS = [{"type": "function", "function": {"name": "look", "description": "d"}}]


def service_of(pocket: Pocket, template: str, form: Any = None, **settings: Any) -> Any:
    """What is asked of a service to read a prompt."""
    tokenizer = copy.copy(pocket[1])
    tokenizer.chat_template = template
    found = Settings(**settings)
    return SimpleNamespace(
        model=pocket[0],
        tokenizer=tokenizer,
        tool_format=form,
        settings=found,
        check_length=lambda text: None,
        system_place=system_place(tokenizer),
    )


def prompt_of(service: Any, messages: Any = ASKED, **fields: Any) -> str:
    body = json.dumps({"model": "m", "messages": messages, **fields}).encode()
    return str(read_prompt(service, chat_generation(decode(body, ChatBody), service, LeftOut())).text)


def test_messages_reach_the_template_whole(pocket: Pocket) -> None:
    service = service_of(pocket, "[{{ messages | tojson }}, {{ tools | tojson }}]", tool_format(pocket[1]))
    (called, result), (tool,) = json.loads(prompt_of(service, CALLED, tools=TOOLS))
    assert called["tool_calls"][0]["function"] == {"name": "look", "arguments": {"at": [1, "é"]}}
    assert called["reasoning_content"] == "hm"
    assert result == {"role": "tool", "name": "look", "tool_call_id": "call_1", "content": "a\nb"}
    shown = {"name": "look", "description": "d", "parameters": {"type": "object", "properties": {}}}
    assert tool == {"type": "function", "function": shown}


def test_tools_that_a_search_found_do_not_change_the_beginning_of_a_prompt(pocket: Pocket) -> None:
    """So what was read of the conversation is shared. Their calls are calls all the same."""
    template = "{{ tools | tojson }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    service = service_of(pocket, template, tool_format(pocket[1]))
    schema: Any = {"type": "object", "properties": {}}
    first, later = ({"name": name, "input_schema": schema} for name in ("first", "later"))
    use = {"type": "tool_use", "id": "a", "name": "first", "input": {}}
    found = {
        "type": "tool_result",
        "tool_use_id": "a",
        "content": [{"type": "tool_reference", "tool_name": "later"}],
    }
    searched = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [found]}]
    prompts = []
    for tools, messages in (
        ([first], ASKED),
        ([{**later, "defer_loading": True}, first], [*ASKED, *searched]),
    ):
        body = json.dumps({"model": "m", "max_tokens": 9, "tools": tools, "messages": messages}).encode()
        generation = messages_generation(decode(body, MessagesBody), service, LeftOut())
        prompts.append(read_prompt(service, generation).text)
    assert prompts[1].startswith(prompts[0])
    assert prompts[1].count('"later"') == 1
    _, events = read(
        pocket[1],
        pocket[1].encode(
            '<tool_call>\n{"name": "later", "arguments": {}}\n</tool_call>', add_special_tokens=False
        ),
        tools=shown_tools(service, generation),
        format=service.tool_format,
    )
    assert events == [Call(0, 0, "later", "{}")]


def test_ids_of_calls_are_as_the_template_wants_them(pocket: Pocket) -> None:
    template = (
        "{% for m in messages %}{{ m.tool_calls[0].id if m.tool_calls else m.tool_call_id }} {% endfor %}"
    )
    mistral = service_of(pocket, template, Mistral())
    first, second = prompt_of(mistral, CALLED).split()
    assert first == second
    assert (len(first), first.isalnum()) == (9, True)
    kept = json.loads(json.dumps(CALLED).replace("call_1", "abcdeFGH9"))
    assert prompt_of(mistral, kept).split() == ["abcdeFGH9"] * 2
    assert prompt_of(service_of(pocket, template, tool_format(pocket[1])), CALLED).split() == ["call_1"] * 2
    twice = [*CALLED, *json.loads(json.dumps(CALLED[-2:]).replace("call_1", "call_2"))]
    told = prompt_of(service_of(pocket, template, Kimi()), twice).split()
    assert told[-4:] == ["functions.look:0", "functions.look:0", "functions.look:1", "functions.look:1"]


def test_a_template_without_tools_refuses_them(pocket: Pocket) -> None:
    service = service_of(pocket, "{{ messages[0].content }}x")
    for messages, fields, param in ((ASKED, {"tools": TOOLS}, "tools"), (CALLED, {}, "messages[0]")):
        with pytest.raises(ApiError, match="takes no tools") as raised:
            prompt_of(service, messages, **fields)
        assert raised.value.param == param
    assert prompt_of(service, tools=TOOLS, tool_choice="none") == "Hix"  # none are shown


def test_variables_of_the_template(pocket: Pocket) -> None:
    service = service_of(pocket, "{{ mood }} {{ reasoning_effort }}", template_variables={"mood": "calm"})
    assert prompt_of(service) == "calm "
    assert prompt_of(service, chat_template_kwargs={"mood": "wild"}) == "wild "
    assert prompt_of(service, reasoning_effort="low") == "calm low"
    with pytest.raises(ApiError, match="both set reasoning_effort"):
        prompt_of(service, reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "high"})
    switch = service_of(pocket, "{{ 'off' if enable_thinking is false else 'on' }}")
    assert prompt_of(switch, reasoning_effort="none") == "off"
    # left out
    assert prompt_of(switch, reasoning_effort="high", chat_template_kwargs={"colour": "red"}) == "on"


FIRST = "{% if not loop.first %}{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
LOOP = "{%% for m in messages %%}{%% if m.role == 'system' %%}%s{%% endif %%}<{{ m.role }}>{{ m.content }}{%% endfor %%}"
PLACES = {
    "anywhere": (LOOP % "", "<system>a<user>b<assistant>c<system>d<user>e<system>f"),
    "first": (LOOP % FIRST, "<system>a<user>b<assistant>c<user>d|e|f"),
    "nowhere": (LOOP % "{{ raise_exception('no system') }}", "<user>a|b<assistant>c<user>d|e|f"),
    "left out": (
        "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}",
        "<user>a|b<assistant>c<user>d|e|f",
    ),
}


@pytest.mark.parametrize(("template", "rendered"), PLACES.values(), ids=PLACES)
def test_system_messages_go_where_the_template_takes_them(
    pocket: Pocket, template: str, rendered: str
) -> None:
    said = (
        ("system", "a"),
        ("user", "b"),
        ("assistant", "c"),
        ("system", "d"),
        ("user", "e"),
        ("developer", "f"),
    )
    service = service_of(pocket, template)
    assert prompt_of(service, [{"role": role, "content": text} for role, text in said]) == rendered.replace(
        "|", "\n"
    )
    alone = [
        {"role": "assistant", "content": "c"},
        {"role": "system", "content": "a"},
        {"role": "system", "content": "b"},
    ]
    expected = "<assistant>c<system>a\nb" if service.system_place == "anywhere" else "<assistant>c<user>a\nb"
    assert prompt_of(service, alone) == expected  # neighbours are one


def test_a_template_that_fails(pocket: Pocket) -> None:
    with pytest.raises(ApiError, match="no two of a role") as raised:
        prompt_of(service_of(pocket, "{{ raise_exception('no two of a role') }}"))
    assert (raised.value.status, raised.value.param) == (400, "messages")


REQUEST = Request([1])
LOOK_TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
}


def with_marks(tokenizer: Tokenizer, start: str, end: str) -> Tokenizer:
    thinker = copy.copy(tokenizer)
    thinker.think_start, thinker.think_end = start, end
    return thinker


def read(
    tokenizer: Tokenizer, ids: Sequence[int], stop: Sequence[str] = (), **parts: Any
) -> tuple[AnswerText, list[Any]]:
    """An answer of these tokens, which then ends: log-probabilities are minus the token's place."""
    text = AnswerText(0, tokenizer, AnswerParts(tokenizer, "", **parts), stop, logprobs=True)
    events: list[Any] = []
    for place, token in enumerate(ids):
        if text.stop is None:
            events += text.take(Token(REQUEST, 0, token, -place, [(token, -place)]))
    if text.stop is None:
        events += text.take(Token(REQUEST, 0, 2, -0.5, finish_reason="stop"))
    return text, events


def places(event: Text) -> list[int]:
    return [-int(token.logprob) for token in event.logprobs]


def test_a_character_of_several_tokens(pocket: Pocket) -> None:
    known = {pocket[1].detokenizer.token_bytes(token): token for token in range(len(pocket[1]))}
    pieces = [b"a", b"\xe2", b"\x82", b"\xac", b"b", b"\xe2", b"\x82"]
    text, events = read(pocket[1], [known[piece] for piece in pieces])
    assert [event.text for event in events[:3]] == ["a", "€", "b"]
    assert "".join(event.text for event in events[3:]) == "\ufffd"
    assert [place for event in events for place in places(event)] == list(range(7))
    assert places(events[1]) == [1, 2, 3]
    assert [token.bytes for token in events[1].logprobs] == [b"\xe2", b"\x82", b"\xac"]
    assert [token.text for token in events[1].logprobs] == ["\ufffd"] * 3
    assert [token.top[0].bytes for token in events[1].logprobs] == [b"\xe2", b"\x82", b"\xac"]
    assert text.tokens == 8  # with the end of text


def test_stop_texts_by_chance(pocket: Pocket) -> None:
    """The text is cut before the first one; the log-probabilities are of the tokens that are whole in it."""
    random_ = random.Random(0)
    tokenizer = pocket[1]
    for _ in range(60):
        written = "".join(random_.choice(["fox ", "bear, ", "ab", "a", "é€", "\n"]) for _ in range(12))
        ids = tokenizer.encode(written, add_special_tokens=False)
        stops = [
            written[(at := random_.randrange(len(written) - 1)) : at + random_.randrange(1, 5)]
            for _ in range(2)
        ]
        text, events = read(tokenizer, ids, stops)
        _, end, stop = min((written.find(stop) + len(stop), written.find(stop), stop) for stop in stops)
        assert (text.stop, "".join(event.text for event in events)) == (stop, written[:end])
        told = [place for event in events for place in places(event)]
        assert told == list(range(len(told)))
        lengths = [len(tokenizer.detokenizer.token_bytes(token)) for token in ids]
        whole = len(written[:end].encode())
        assert sum(lengths[: len(told)]) <= whole < sum(lengths[: len(told) + 1])


class Lettered(Tokenizer):
    """A tokenizer of these pieces; of bytes, or of text with byte fallback, whose first space goes."""

    pieces: Sequence[str]
    byte_level = True

    @property
    def detokenizer(self) -> ByteDetokenizer:
        return ByteDetokenizer(self.pieces, byte_level=self.byte_level, strips=not self.byte_level)


def lettered(tokenizer: Tokenizer, pieces: Sequence[str], *, byte_level: bool = True) -> Tokenizer:
    made = copy.copy(tokenizer)
    made.__class__ = Lettered
    made.pieces, made.byte_level = pieces, byte_level  # type: ignore[attr-defined]
    return made


def completed(
    tokenizer: Tokenizer, prompt: str, ids: Sequence[int], read: int, *stop: str
) -> list[dict[str, Any]]:
    """The choice of /v1/completions: whole, and of its stream's chunks put together; ``read`` ids are the
    prompt's.
    """
    fields = {"model": "m", "prompt": "a", "logprobs": 1, "echo": True}
    body = decode(json.dumps(fields).encode(), CompletionsBody)
    encoder = CompletionsAnswers("m", body, [Generation(logprobs=True)], SimpleNamespace())  # type: ignore[arg-type]
    text = AnswerText(0, tokenizer, AnswerParts(tokenizer, None), stop, logprobs=True)
    events: list[Any] = []
    if read:
        others = [(token, -0.5, [(token, -0.5)]) for token in ids[1:read]]
        events.append(Text(0, prompt, logprobs=text.read(Prompt(prompt, [*ids[:read]]), others)))
    for token in ids[read:]:
        if text.stop is None:
            events += text.take(Token(REQUEST, 0, token, -0.5, [(token, -0.5)]))
    if text.stop is None:
        events += text.take(Token(REQUEST, 0, 0, -0.5, finish_reason="stop"))
    chunks = [told["choices"][0] for event in events for told in encoder.add(event)]
    joined = {
        "text": "".join(chunk["text"] for chunk in chunks),
        "logprobs": {
            name: [each for chunk in chunks for each in chunk["logprobs"][name]]
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        },
    }
    (whole,) = encoder.whole()["choices"]
    return [{name: whole[name] for name in joined}, joined]


def test_where_the_text_of_each_token_begins(pocket: Pocket) -> None:
    """Tokens that cut characters anywhere, as byte-level vocabularies have them; the bytes before each are
    counted.
    """
    letters = {byte: letter for letter, byte in BYTES.items()}
    random_ = random.Random(0)
    for _ in range(200):
        written = "".join(random_.choice(["日", "本", "é", "🎉", "fox ", "a", "\n"]) for _ in range(12))
        given = written.encode()
        cuts = sorted({0, len(given), *random_.sample(range(1, len(given)), random_.randrange(len(given)))})
        tokens = [given[start:end] for start, end in pairwise(cuts)]
        tokenizer = lettered(pocket[1], ["".join(letters[byte] for byte in token) for token in tokens])
        whole = [
            place
            for place, cut in enumerate(cuts)
            if given[:cut].decode(errors="ignore").encode() == given[:cut]
        ]
        read = random_.choice(whole[:-1])
        stop = random_.choice([(), (written[-3:-1],)])
        expected = [len(given[:cut].decode(errors="ignore")) for cut in cuts]
        for choice in completed(tokenizer, given[: cuts[read]].decode(), range(len(tokens)), read, *stop):
            offsets = choice["logprobs"]["text_offset"]
            assert written.startswith(choice["text"])
            assert stop or len(offsets) == len(tokens)
            assert offsets == expected[: len(offsets)]


def test_tokens_that_are_no_part_of_the_text_have_its_place(pocket: Pocket) -> None:
    """A first token and a first space are not in the text; a character that breaks off is one in it."""
    pieces = ["<s>", "▁Go", "▁", "<0xE6>", "<0x97>", "<0xA5>", "▁on", "<0xE6>", "<0x97>"]
    tokenizer = lettered(pocket[1], pieces, byte_level=False)
    for choice in completed(tokenizer, "Go 日 on", range(9), 7):
        assert choice["logprobs"]["text_offset"] == [0, 0, 2, 3, 3, 3, 4, 7, 7]
        assert choice["text"].startswith("Go 日 on\ufffd")
    for choice in completed(tokenizer, "", range(1, 9), 0):
        assert choice["logprobs"]["text_offset"] == [0, 2, 3, 3, 3, 4, 7, 7]


@pytest.mark.parametrize("stop", [(), ("hm",), ("</think>",), ("es",)])
def test_thinking(pocket: Pocket, stop: Sequence[str]) -> None:
    tokenizer = with_marks(pocket[1], "<think>", "</think>")
    pieces = ["<think>", "\n", "hm", "\n", "</think>", "\n\n", "Yes", ", fox"]
    ids = [tokenizer.encode(piece, add_special_tokens=False) for piece in pieces]
    text, events = read(tokenizer, [token for piece in ids for token in piece], stop)
    thought = [event for event in events if event.thinking]
    said = [event for event in events if not event.thinking]
    assert "".join(event.text for event in thought) == "hm"
    assert "".join(event.text for event in said) == ("Y" if stop == ("es",) else "Yes, fox")
    before = sum(map(len, ids[:6]))
    assert text.thinking_tokens == before
    first = len(ids[6]) + len(ids[7])
    told = [place for event in said for place in places(event)]
    assert told == list(range(before, before + (len(told) if stop == ("es",) else first)))


def test_calls(pocket: Pocket) -> None:
    tokenizer = pocket[1]
    form = tool_format(tokenizer)
    written = 'So.\n<tool_call>\n{"name": "look", "arguments": {"a": "é"}}\n</tool_call> <tool_call> no'
    ids = tokenizer.encode(written, add_special_tokens=False)
    text, events = read(tokenizer, ids, ["é"], tools=[LOOK_TOOL], format=form)
    calls = [event for event in events if isinstance(event, Call)]
    assert calls == [Call(0, 0, "look", '{"a":"é"}')]
    assert "".join(event.text for event in events if isinstance(event, Text)) == "So.<tool_call> no"
    # Log-probabilities are those of the tokens before the call, and of the last ones.
    told = [token for event in events if isinstance(event, Text) for token in event.logprobs]
    assert b"".join(token.bytes for token in told).decode() == "So.<tool_call> no"
    first = len(tokenizer.encode("So.", add_special_tokens=False))
    rest = len(told) - first
    assert [-int(token.logprob) for token in told] == [*range(first), *range(len(ids) - rest, len(ids))]
    assert text.calls == 1
    assert text.stop is None


class Windowed(Tokenizer):
    """A tokenizer whose tokens are not bytes: its process decodes."""

    @property
    def detokenizer(self) -> WindowDetokenizer:
        return WindowDetokenizer(self.decode)


def test_a_tokenizer_that_decodes_in_its_process(server: Running, pocket: Pocket) -> None:
    windowed = copy.copy(pocket[1])
    windowed.__class__ = Windowed
    asked: Any = ("Once upon a time", 30)
    with served(pocket[0], windowed) as found:
        answer = COMPLETIONS.ask(found, *asked, logprobs=2)["choices"]
        assert answer == COMPLETIONS.ask(server, *asked, logprobs=2)["choices"]


@pytest.fixture(scope="module")
def thinker(pocket: Pocket) -> Iterator[Running]:
    """pocket, said to think from "Once" to "time": its stories begin so."""
    tokenizer = with_marks(pocket[1], "Once", "time")
    with served(pocket[0], tokenizer, sequences=2, max_kv_size=256) as found:
        yield found


def test_thinking_over_http(thinker: Running) -> None:
    body = CHAT.body("Tell me a story about a fox.", 20, logprobs=True)
    answer = CHAT.ask(thinker, tokens=20, logprobs=True)
    message, told = answer["choices"][0]["message"], answer["choices"][0]["logprobs"]["content"]
    assert message["reasoning_content"] == " upon a "
    assert message["content"].startswith(" there was a fox")
    assert "".join(each["token"] for each in told) == message["content"]
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 20 - len(told)
    deltas = [event["choices"][0]["delta"] for event in sse_events(thinker, CHAT.path, body)]
    for name in ("reasoning_content", "content"):
        assert "".join(delta.get(name) or "" for delta in deltas) == message[name]
    # A format is what follows the thinking. Continued text is not split.
    wanted = {"structured_outputs": {"regex": " there were [0-9]{2}"}}
    assert text_of(CHAT.ask(thinker, tokens=60, **wanted)).startswith(" there were ")
    answer = COMPLETIONS.ask(thinker, "Once upon a time", 4, echo=True)
    assert text_of(answer).startswith("Once upon a time")
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


TEMPLATE = """
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n<think>\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
SCHEMA = {"type": "object", "properties": {"sure": {"type": "boolean"}}, "required": ["sure"]}


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder: Path = tmp_path_factory.mktemp("thinking") / "model"
    config = qwen3_config(vocab_size=768, eos_token_id=None)
    save_checkpoint(folder, config, reference_model(config))
    write_tokenizer(folder, "qwen3", extra_special_tokens=["<think>", "</think>"], chat_template=TEMPLATE)
    (folder / "config.json").write_text(json.dumps(config))
    with served(model=str(folder), sequences=2, max_kv_size=256) as found:
        yield found


def _ask(server: Running, **fields: Any) -> tuple[list[dict[str, Any]], int, int]:
    """The blocks of an answer, its tokens, and those of its thinking."""
    answer = MESSAGES.ask(server, "Hi", 40, model=server.registry.models[0].name, **fields)
    usage = answer["usage"]
    return answer["content"], usage["output_tokens"], usage["output_tokens_details"]["thinking_tokens"]


@pytest.mark.parametrize("budget", [8, 16])
def test_thinking_ends_with_its_budget(endless: Running, budget: int) -> None:
    content, *tokens = _ask(endless, thinking={"type": "enabled", "budget_tokens": budget})
    assert tokens == [40, budget]
    assert content[-1]["type"] == "text"
    (longer, *_), _, _ = _ask(endless, thinking={"type": "enabled", "budget_tokens": 39})
    assert longer["thinking"].startswith("".join(block.get("thinking", "") for block in content))


@pytest.mark.parametrize(("kind", "thought"), [(None, 40), ("adaptive", 40), ("disabled", 0)])
def test_without_a_budget_it_thinks_on(endless: Running, kind: str | None, thought: int) -> None:
    content, *tokens = _ask(endless, thinking={"type": kind} if kind else None)
    assert tokens == [40, thought]
    assert [block["type"] for block in content] == ["thinking" if thought else "text"]


def test_an_answer_under_a_schema_after_it(endless: Running) -> None:
    form = {"type": "json_schema", "schema": {**SCHEMA, "additionalProperties": False}}
    fields = {"thinking": {"type": "enabled", "budget_tokens": 8}, "output_config": {"format": form}}
    content, _, thought = _ask(endless, **fields)
    assert thought == 8
    assert content[-1]["text"] in ('{"sure":true}', '{"sure":false}')
    for budget in (0, 40):  # it has to be less than all
        thinking = {"type": "enabled", "budget_tokens": budget}
        answered = MESSAGES.post(endless, "Hi", 40, model=endless.registry.models[0].name, thinking=thinking)
        assert answered.status_code == 400
        assert "thinking.budget_tokens" in answered.json()["error"]["message"]


def test_where_thinking_is_open() -> None:
    """Token 7 begins it and 9 ends it; the prompt has two tokens, which may have the same ids."""
    logits = mx.random.normal((1, 12), key=mx.random.key(0))

    def forced(answer: list[int], start: int | None = 7) -> bool:
        found = ThinkingBudget(2, 4, start, 9)(mx.array([7, 9, *answer]), logits)
        if mx.array_equal(found, logits):
            return False
        assert found.argmax().item() == 9
        assert mx.sum(found > -mx.inf).item() == 1
        return True

    assert [forced(each) for each in ([7, 1], [7, 1, 1], [7, 1, 1, 1], [1, 7, 1])] == [
        False,
        True,
        True,
        True,
    ]
    assert not any(forced(each) for each in ([1, 1, 1, 1, 7], [7, 1, 9, 1], [7, 9, 7, 1, 1, 1]))
    assert [forced(each, None) for each in ([1, 1], [1, 1, 1], [1, 9, 1, 1])] == [False, True, False]


def _of_one(name: str) -> dict[str, Any]:
    """The format of an object with one property."""
    schema = {"type": "object", "properties": {name: {"type": "null"}}, "required": [name]}
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def test_grammars_wait_in_a_bounded_line(pocket: Pocket, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was compiled lately passes. A plain json_object once waited 37 s behind twelve large
    schemas.
    """
    known: dict[str, Any] = {"response_format": {"type": "json_object"}, "tokens": 2}
    gate = threading.Event()
    compiled = guidance.compiled

    def gated(vocabulary: Any, text: str) -> Any:
        assert "large" not in text or gate.wait(SOON)
        return compiled(vocabulary, text)

    with (
        served(*pocket, sequences=4, max_kv_size=512, max_queue=2) as server,
        ThreadPoolExecutor(4) as threads,
    ):
        before = CHAT.ask(server, **known)
        monkeypatch.setattr(guidance, "compiled", gated)
        try:
            asked = [threads.submit(CHAT.post, server, **_of_one(f"large{number}")) for number in range(3)]
            wait(lambda: server.client.get("/health").json()["waiting"] == 2)
            refused = threads.submit(CHAT.post, server, **_of_one("large3")).result(SOON)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert refused.json()["error"]["code"] == "rate_limit_exceeded"
            assert "kvant_requests_waiting 2.0" in server.client.get("/metrics").text
            passed = threads.submit(CHAT.ask, server, **known).result(SOON)
        finally:
            gate.set()
        assert pieces(passed) == pieces(before)
        for number, each in enumerate(asked):
            answered = each.result(SOON)
            assert answered.status_code == 200
            assert json.loads(pieces(answered.json())[0]["text"]) == {f"large{number}": None}
        assert server.client.get("/health").json()["waiting"] == 0
