"""What a running server is asked to prove that it does what it should, whatever model it has. See self_test."""

import json
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, closing

from kvant.server.self_target import FEW, STORY, WAIT_S, RefusalError, Target, expect, text_of

MANY = 400  # tokens of an answer that is not waited for
ANIMAL = {
    "type": "object",
    "properties": {"name": {"enum": ["Pip", "Max"]}, "legs": {"type": "integer", "minimum": 2, "maximum": 4}},
    "required": ["name", "legs"],
    "additionalProperties": False,
}
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Weather of a city.", "parameters": CITY}}

# The checks: what each is called, and what it found, in a few words.


def routes(target: Target) -> str:
    """/health, /props, /metrics, /v1/models, /tokenize and the page answer."""
    expect(target.health()["status"] == "ok", "not well")
    expect(target.get("/props")["pool"]["pages"] == target.service.pool.num_pages, "other pages")
    expect("kvant_pages_free" in target.client.get("/metrics").text, "no pages among the metrics")
    names = [each["id"] for each in target.get("/v1/models")["data"]]
    expect(target.model in names and target.get(f"/v1/models/{target.model}")["id"] == target.model, names)
    counted = target.post("/tokenize", {"prompt": "Once upon a time"})
    expect(counted["count"] == len(counted["tokens"]) > 0, counted)
    page = target.client.get("/")
    expect(page.status_code == 200 and "<html" in page.text, f"/: {page.status_code}")
    return f"{target.model}, {target.service.pool.num_pages} pages"


def chat(target: Target) -> str:
    """A chat completion has as many tokens as asked for, and the stream of it has the same text."""
    whole = target.post("/v1/chat/completions", target.chat())
    text, usage = text_of(whole["choices"][0]["message"]), whole["usage"]
    expect(usage["completion_tokens"] == FEW and whole["choices"][0]["finish_reason"] == "length", whole)
    chunks = target.stream("/v1/chat/completions", target.chat(stream_options={"include_usage": True}))
    streamed = "".join(text_of(choice["delta"]) for chunk in chunks for choice in chunk["choices"])
    expect(streamed == text, f"{streamed!r} in the stream, {text!r} without")
    expect(chunks[-1]["usage"]["completion_tokens"] == FEW, chunks[-1])
    return f"{usage['prompt_tokens']} + {FEW} tokens"


def completions(target: Target) -> str:
    """A completion, its stream, and one of token ids are the same; log-probabilities are of its tokens."""
    path = "/v1/completions"
    whole = target.post(path, target.completion(logprobs=2))["choices"][0]
    streamed = target.stream(path, target.completion())
    expect("".join(c["choices"][0]["text"] for c in streamed if c["choices"]) == whole["text"], "another in the stream")
    ids = target.post("/tokenize", {"prompt": "Once upon a time"})["tokens"]
    expect(target.post(path, target.completion(prompt=ids))["choices"][0]["text"] == whole["text"], "another of ids")
    expect(target.post(path, target.completion(echo=True))["choices"][0]["text"].endswith(whole["text"]), "no echo")
    found = whole["logprobs"]["token_logprobs"]
    expect(len(found) == FEW and all(each <= 0 for each in found), found)
    return ""


def responses(target: Target) -> str:
    """A response and its stream have the text of the chat completion."""
    body = {"model": target.model, "input": STORY, "temperature": 0, "max_output_tokens": FEW}
    whole = target.post("/v1/responses", body)
    expect(whole["status"] in ("completed", "incomplete"), whole)
    found = target.stream("/v1/responses", body)
    expect(found[0]["type"] == "response.created", found[0])
    expect([each["sequence_number"] for each in found] == list(range(len(found))), "events without their numbers")
    ended = found[-1]["response"]
    expect(ended["usage"]["output_tokens"] == whole["usage"]["output_tokens"], ended["usage"])
    texts = [
        [part.get("text") for item in each["output"] for part in item.get("content") or ()] for each in (whole, ended)
    ]
    expect(texts[0] == texts[1], f"{texts[1]} in the stream, {texts[0]} without")
    pieces = "".join(each["delta"] for each in found if each["type"].endswith("text.delta"))
    expect(pieces == "".join(map(str, texts[0])), f"the pieces are {pieces!r}, the text is {texts[0]}")
    return str(whole["status"])


def messages(target: Target) -> str:
    """A message, its stream, and the count of its tokens."""
    given = [{"role": "user", "content": STORY}]
    body = {"model": target.model, "messages": given, "temperature": 0, "max_tokens": FEW}
    whole = target.post("/v1/messages", body)
    usage = whole["usage"]
    counted = target.post("/v1/messages/count_tokens", {"model": target.model, "messages": given})["input_tokens"]
    expect(counted == usage["input_tokens"] + usage["cache_read_input_tokens"], f"{counted} counted, {usage}")
    found = target.stream("/v1/messages", body)
    kinds = [each["type"] for each in found]
    expect((kinds[0], kinds[-1]) == ("message_start", "message_stop"), kinds)
    pieces = [each["delta"] for each in found if each["type"] == "content_block_delta"]
    streamed = "".join(each.get("text", each.get("thinking", "")) for each in pieces)
    text = "".join(block.get("text", block.get("thinking", "")) for block in whole["content"])
    expect(streamed == text, f"{streamed!r} in the stream, {text!r} without")
    return str(whole["stop_reason"])


def seeds(target: Target) -> str:
    """The same seed draws the same, another one something else; so does each of n answers."""
    path, hot = "/v1/completions", {"temperature": 1, "top_p": 1, "max_tokens": 4 * FEW}
    same = {target.post(path, target.completion(seed=5, **hot))["choices"][0]["text"] for _ in range(2)}
    expect(len(same) == 1, f"one seed, two texts: {same}")
    others = {target.post(path, target.completion(seed=seed, **hot))["choices"][0]["text"] for seed in range(3)}
    expect(len(others) > 1, f"three seeds, one text: {others}")
    n = min(3, target.service.settings.sequences)
    several = target.post(path, target.completion(n=n, seed=5, **hot))["choices"]
    expect([choice["index"] for choice in several] == list(range(n)), several)
    expect(n == 1 or len({choice["text"] for choice in several}) > 1, several)
    return f"n = {n}"


def stops(target: Target) -> str:
    """A text of stop ends an answer and is no part of it; a banned token does not come."""
    path = "/v1/completions"
    whole = target.post(path, target.completion(logprobs=1))["choices"][0]
    text = whole["text"]
    middle = text[len(text) // 2 :][:2]
    if middle:
        stopped = target.post(path, target.completion(stop=[middle]))["choices"][0]
        expect(stopped["text"] == text[: text.index(middle)] and stopped["finish_reason"] == "stop", stopped)
    first = target.post("/tokenize", {"prompt": whole["logprobs"]["tokens"][0]})["tokens"][0]
    other = target.post(path, target.completion(logit_bias={str(first): -100}, logprobs=1))["choices"][0]
    expect(other["logprobs"]["tokens"][0] != whole["logprobs"]["tokens"][0], "the banned token came")
    return repr(middle)


def structure(target: Target) -> str:
    """Answers keep to a JSON schema, a regular expression, a choice, and JSON; a schema that is none is refused."""
    path, free = "/v1/chat/completions", {"ignore_eos": False, "max_tokens": 200}
    schema = {"type": "json_schema", "json_schema": {"name": "animal", "schema": ANIMAL, "strict": True}}
    for options in ({}, {"temperature": 1, "seed": 1}):
        answer = target.post(path, target.chat(response_format=schema, **free | options))["choices"][0]
        expect(answer["finish_reason"] == "stop", f"it did not end: {answer}")
        found = json.loads(answer["message"]["content"])
        expect(found["name"] in ("Pip", "Max") and found["legs"] in (2, 3, 4) and len(found) == 2, found)
    for form, sound in ((({"regex": "[0-9]{3}-[a-f]{2}"}), "0123456789abcdef-"), ({"choice": ["yes"]}, "yes")):
        text = target.post(path, target.chat(structured_outputs=form, **free))["choices"][0]["message"]["content"]
        expect(text and len(text) in (3, 6) and set(text) <= set(sound), f"{form} gave {text!r}")
    answer = target.post(path, target.chat(response_format={"type": "json_object"}, **free))["choices"][0]
    expect(answer["message"]["content"].startswith("{"), answer)
    if answer["finish_reason"] == "stop":
        json.loads(answer["message"]["content"])
    wrong = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
    target.refused(path, target.chat(response_format=wrong, **free), "nothing")
    return json.dumps(found)


def tools(target: Target) -> str:
    """A call that is forced comes whole and keeps to the tool's schema, in all interfaces."""
    path, forced = "/v1/chat/completions", {"tools": [TOOL], "tool_choice": "required", "ignore_eos": False}
    forced |= {"max_tokens": 200, "parallel_tool_calls": False}
    if target.service.tool_format is None:
        target.refused(path, target.chat(**forced), "tools")
        raise RefusalError("the model's chat template takes no tools")
    answer = target.post(path, target.chat(**forced))["choices"][0]
    expect(answer["finish_reason"] == "tool_calls", answer)
    [call] = answer["message"]["tool_calls"]
    found = json.loads(call["function"]["arguments"])
    expect(call["function"]["name"] == "weather" and found["city"] in ("Rome", "Oslo"), call)
    calls = [
        each
        for chunk in target.stream(path, target.chat(**forced))
        for choice in chunk["choices"]
        for each in choice["delta"].get("tool_calls") or ()
    ]
    expect(json.loads("".join(each["function"].get("arguments", "") for each in calls)) == found, calls)
    result = {"role": "tool", "tool_call_id": call["id"], "content": "It is sunny."}
    turns = [{"role": "user", "content": "What is the weather?"}, answer["message"], result]
    expect(text_of(target.post(path, target.chat(messages=turns))["choices"][0]["message"]), "no answer to a result")
    tool = {"name": "weather", "input_schema": CITY}
    body = {"model": target.model, "messages": [{"role": "user", "content": STORY}], "max_tokens": 200, "tools": [tool]}
    message = target.post("/v1/messages", body | {"tool_choice": {"type": "any"}})
    uses = [block for block in message["content"] if block["type"] == "tool_use"]
    expect(uses and uses[0]["input"]["city"] in ("Rome", "Oslo"), message)
    named = {"type": "function", "name": "weather"}
    item = {"type": "function", "name": "weather", "parameters": CITY}
    given = {"model": target.model, "input": STORY, "tools": [item], "tool_choice": named, "max_output_tokens": 200}
    output = target.post("/v1/responses", given)["output"]
    expect([each["name"] for each in output if each["type"] == "function_call"][:1] == ["weather"], output)
    return str(call["function"]["arguments"])


def prefix(target: Target) -> str:
    """A prompt whose beginning was fed is not fed again, and answers the same."""
    page = target.service.pool.page_size
    ids = target.post("/tokenize", {"prompt": STORY})["tokens"]
    prompt = (ids * page)[: page + 8]
    body = target.completion(prompt=prompt, max_tokens=4)
    if len(prompt) + 4 > target.service.max_seq_len:
        target.refused("/v1/completions", body, status=400)
        raise RefusalError(f"a sequence has no room for a page of {page} tokens and more")
    first, second = (target.post("/v1/completions", body) for _ in range(2))
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    expect(cached >= page, f"{cached} tokens of {len(prompt)} were there")
    expect(first["choices"][0]["text"] == second["choices"][0]["text"], "another answer")
    return f"{cached} of {len(prompt)} tokens"


def errors(target: Target) -> str:
    """What is wrong with a request is a 400 or a 404 that names it, in the shape of each interface."""
    chats, others = "/v1/chat/completions", ("/v1/completions", "/v1/responses", "/v1/messages")
    for words, options in (
        (("nobody_knows",), {"nobody_knows": 1}),
        (("temperature",), {"temperature": -1}),
        (("top_p",), {"top_p": 2}),
        (("n",), {"n": target.service.settings.sequences + 1}),
        (("stop",), {"stop": ["x"] * 100}),
        (("top_logprobs",), {"logprobs": True, "top_logprobs": 10_000}),
        (("logit_bias",), {"logit_bias": {str(number): 1 for number in range(5000)}}),
        (("messages",), {"messages": []}),
        (("max_tokens",), {"max_tokens": 0}),
    ):
        target.refused(chats, target.chat(**options), *words)
    for path in (chats, *others):
        target.refused(path, b"{")
        target.refused(path, b"[" * 100_000)
        target.refused(path, b'{"temperature": NaN}')
    target.refused(chats, target.chat(model="another"), "another", status=404)
    long = [1] * (target.service.max_seq_len + 1)
    target.refused("/v1/completions", target.completion(prompt=long), str(len(long)))
    anthropic = target.client.post("/v1/messages", json={"model": target.model}).json()
    expect(anthropic["type"] == "error" and anthropic["error"]["type"] == "invalid_request_error", anthropic)
    for method, path, status in (("GET", "/nothing", 404), ("GET", chats, 405), ("PUT", "/health", 405)):
        answer = target.client.request(method, path)
        expect(answer.status_code == status, f"{method} {path}: {answer.status_code}")
    return ""


def hosts(target: Target) -> str:
    """Requests under another host's name, or from a stranger's page, are refused."""
    for name in ("Host", "Origin"):
        for value in ("evil.example", "http://evil.example", "127.0.0.1.evil.example"):
            answer = target.client.get("/health", headers={name: value})
            expect(answer.status_code == 403, f"{name}: {value} gave {answer.status_code}")
    plain = target.client.get("/health")
    expect("access-control-allow-origin" not in plain.headers, "other origins may read the answers")
    return ""


def keys(target: Target) -> str:
    """With a key configured, no route but the page's files answers without it, and no answer has it."""
    body = target.chat()
    for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": target.key[:-1]}):
        for path in ("/health", "/metrics", "/props", "/v1/models", "/live"):
            answer = target.keyed.get(path, headers=headers)
            expect(answer.status_code == 401 and target.key not in answer.text, f"{path}: {answer.status_code}")
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/tokenize"):
            answer = target.keyed.post(path, json=body, headers=headers)
            expect(answer.status_code == 401 and target.key not in answer.text, f"{path}: {answer.status_code}")
    for headers in ({"authorization": f"Bearer {target.key}"}, {"x-api-key": target.key}):
        answer = target.keyed.get("/v1/models", headers=headers)
        expect(answer.status_code == 200, f"with the key: {answer.status_code}")
    return ""


def sizes(target: Target) -> str:
    """A body over the limit is a 413; a client that takes its time with a request's headers is let go."""
    limit = target.service.settings.limits.body_bytes
    target.refused("/v1/chat/completions", b" " * (limit + 1), status=413)
    with closing(target.connect(target.keyed)) as slow:
        slow.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0")
        started = time.monotonic()
        said = slow.recv(4096)
        expect(not said or b" 408 " in said.partition(b"\r\n")[0], said)
        took = time.monotonic() - started
    expect(took < target.header_s + WAIT_S / 2, f"let go after {took:.1f} s, expected {target.header_s:g} s")
    return f"{limit >> 20} MiB, {took:.1f} s"


def leaving(target: Target) -> str:
    """A client that closes its connection gives its pages back at once."""
    target.until(target.idle, "nothing is under way")
    before = target.free_pages()
    tokens = min(MANY, target.service.max_seq_len - 64)
    took = 0.0
    for path, body in (
        ("/v1/completions", target.completion(max_tokens=tokens, stream=True)),
        ("/v1/completions", target.completion(max_tokens=tokens)),
    ):
        with closing(target.send(path, body)):
            target.until(lambda: target.health()["running"] == 1, "the request runs")
        took = max(took, target.until(lambda: target.free_pages() == before, "its pages are free"))
    return f"after {took * 1e3:.0f} ms"


def full(target: Target) -> str:
    """More requests than may wait are a 429 that says when to come again; all get their pages back."""
    settings = target.service.settings
    target.until(target.idle, "nothing is under way")
    before, room = target.free_pages(), settings.sequences + settings.max_queue
    tokens = min(MANY, target.service.max_seq_len - 64)
    body = target.completion(max_tokens=tokens, stream=True)
    refused, slowest = 0, 0.0
    with ExitStack() as stack:
        sent = [stack.enter_context(closing(target.send("/v1/completions", body))) for _ in range(room + 8)]
        deadline = time.monotonic() + WAIT_S
        while not refused and time.monotonic() < deadline:
            started = time.monotonic()
            target.health()
            slowest = max(slowest, time.monotonic() - started)
            for connection in sent:
                connection.setblocking(False)
                try:
                    head = connection.recv(4096, socket.MSG_PEEK).lower()
                except BlockingIOError:
                    continue
                status = head.split(b" ", 2)[1:2]
                expect(status in ([b"200"], [b"429"]), head)
                if status == [b"429"]:
                    expect(b"\r\nretry-after: " in head, head)
                    refused += 1
        expect(refused, f"{room + 8} requests, and none was refused")
    target.until(lambda: target.idle() and target.free_pages() == before, "all pages are free")
    return f"{refused} of {room + 8} refused, /health within {slowest * 1e3:.0f} ms"


def slow_reader(target: Target) -> str:
    """Clients that do not read what they asked for hold nobody up."""
    tokens = min(MANY, target.service.max_seq_len - 64)
    unread = max(1, target.service.settings.sequences - 1)
    with ExitStack() as stack:
        for _ in range(unread):
            stack.enter_context(
                closing(target.send("/v1/completions", target.completion(max_tokens=tokens, stream=True)))
            )
        target.until(lambda: target.health()["running"] >= 1, "their requests run")
        started = time.monotonic()
        if target.service.settings.sequences > 1:
            target.post("/v1/completions", target.completion())
        took = time.monotonic() - started
    return f"{unread} of them, another's answer after {took:.1f} s"


def afterwards(target: Target) -> str:
    """The server is well, and every page is free."""
    target.until(target.idle, "nothing is under way")
    free, pages = target.free_pages(), target.service.pool.num_pages
    expect(free == pages, f"{free} of {pages} pages are free")
    return f"{free} of {pages} pages"


Check = Callable[[Target], str]

CHECKS: tuple[Check, ...] = (
    routes, chat, completions, responses, messages, seeds, stops, structure, tools, prefix, errors, hosts, keys, sizes,
    leaving, slow_reader, full, afterwards,
)  # fmt: skip
