"""An OpenAI-compatible streaming server as an engine: llama-server, Ollama, LM Studio, vllm-mlx."""

import json
import os
import time
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, IncompleteRead
from typing import Any
from urllib.parse import urlsplit

from kvant.errors import KvantError
from kvant.tools.bench.event_stream import DONE, events

API_KEY = "OPENAI_API_KEY"  # the environment variable
READ_BYTES = 65536
MAX_SHOWN = 200  # characters of a server's message
# What is not OpenAI's own: generate to the end, and do not reuse the last request's prompt. A server that refuses one
# by name is asked without it.
EXTRAS = {"ignore_eos": True, "cache_prompt": False}


@dataclass(frozen=True, slots=True)
class StreamSummary:
    """What a server said of one completion.

    Attributes:
        events: events that carried text.
        prompt_tokens: tokens of the prompt, as the server counted; None: it did not say.
        completion_tokens: tokens it generated; None: it did not say.
        finish_reason: "length", "stop" or the server's own; None: it did not say.
    """

    events: int
    prompt_tokens: int | None
    completion_tokens: int | None
    finish_reason: str | None

    @property
    def one_token_an_event(self) -> bool | None:
        """Whether an event's latency is a token's; False: it is not measurable; None: the server did not count."""
        if self.completion_tokens is None:
            return None
        silent = self.completion_tokens - self.events
        return silent == 0 or (silent == 1 and self.finish_reason == "stop")  # the end-of-text token has no text


class StreamingServer:
    """Completions from ``{url}/v1/completions``, greedy, each over a connection of its own.

    The key in OPENAI_API_KEY, where set, is sent to the server, and shown nowhere.
    """

    def __init__(self, url: str, *, model: str | None = None, timeout_s: float = 600.0) -> None:
        """Nothing is sent yet.

        Args:
            url: http or https, such as ``http://127.0.0.1:8080``, with or without a last ``/v1``.
            model: the name the server knows it by; None: left out, which servers of one model accept.
            timeout_s: the longest wait for the next text, the first included.

        Raises:
            ValueError: a URL that is not one.
        """
        self._url = url
        self._model = model
        self._timeout_s = timeout_s
        self._extras = dict(EXTRAS)
        self._scheme, self._host, self._port, self._path = _parse(url)
        self._summary: StreamSummary | None = None

    @property
    def summary(self) -> StreamSummary:
        """Of the last completion that came to its end."""
        if self._summary is None:
            raise ValueError("no completion has come to its end")
        return self._summary

    def pieces(self, prompt: str, max_tokens: int, *, seed: int = 0) -> Generator[str, None, None]:
        """Text as it arrives, one piece an event; the request is sent when the first is asked for.

        Close the generator to break off. After the last piece :attr:`summary` has the server's counts.

        Raises:
            KvantError: a server that cannot be reached, refuses, or answers anything but a whole stream of text.
        """
        self._summary = None
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "seed": seed, "stream": True}
        body |= {"stream_options": {"include_usage": True}}
        if self._model is not None:
            body["model"] = self._model
        kind = HTTPSConnection if self._scheme == "https" else HTTPConnection
        waiting = _Waiting(self._timeout_s)
        try:
            while True:
                with closing(kind(self._host, self._port, timeout=self._timeout_s)) as connection:
                    connection.request("POST", self._path, json.dumps(body | self._extras), _headers())
                    with connection.getresponse() as response:
                        if self._refuses_an_extra(response, waiting):
                            continue
                        yield from self._read(response, max_tokens, waiting)
                        return
        except TimeoutError as error:
            raise self._error(f"nothing came for {self._timeout_s:g} s") from error
        except HTTPException as error:
            raise self._error(f"not a whole HTTP answer: {type(error).__name__}") from error
        except OSError as error:
            raise self._error(f"the connection failed: {error.strerror or error}") from error
        except UnicodeError as error:  # what the socket module makes of an odd host name
            raise self._error("no such host") from error

    def _refuses_an_extra(self, response: HTTPResponse, waiting: "_Waiting") -> bool:
        """Forget the extras an answer names as what is wrong; raise for any other answer that is no stream."""
        if response.status == 200 and response.headers.get_content_type() == "text/event-stream":
            return False
        text = b""
        while len(text) < READ_BYTES and (more := waiting.read(response)):
            text += more
        message = _message(text)
        refused = [name for name in self._extras if name in message]
        if response.status in (400, 422) and refused:
            for name in refused:
                del self._extras[name]
            return True
        if response.status == 200:
            kind = response.headers.get_content_type()
            raise self._error(f"answered with {kind}, not a stream of events: {message}")
        raise self._error(f"answered {response.status} {response.reason}: {message}")

    def _read(self, response: HTTPResponse, max_tokens: int, waiting: "_Waiting") -> Generator[str, None, None]:
        count, finish_reason = 0, None
        usage: dict[str, Any] = {}
        for kind, data in events(lambda: waiting.read(response)):
            if data == DONE:
                break
            if kind == "error":
                raise self._error(f"reported an error: {_message(data.encode())}")
            chunk = _object(data)
            if chunk is None:
                raise self._error(f"sent an event that is not a JSON object: {data}")
            if chunk.get("error"):
                raise self._error(f"reported an error: {_message(data.encode())}")
            usage = chunk["usage"] if isinstance(chunk.get("usage"), dict) else usage
            text, reason = _choice(chunk)
            finish_reason = reason or finish_reason
            if not text:
                continue
            count += 1
            if count > 2 * max_tokens + 16:  # servers that cut a token in two are told apart at the end
                raise self._error(f"sent {count} events for {max_tokens} tokens, and did not end")
            yield text
            waiting.restart()
        else:
            raise self._error(f"the stream was cut off after {count} events, before {DONE}")
        if not count:
            raise self._error("ended the stream without any text")
        prompt_tokens, completion_tokens = (_count(usage.get(f"{part}_tokens")) for part in ("prompt", "completion"))
        self._summary = StreamSummary(count, prompt_tokens, completion_tokens, finish_reason)

    def _error(self, text: str) -> KvantError:
        """One line, of printable characters, without the key."""
        key = _api_key()
        text = text.replace(key, "***") if len(key) >= 8 else text  # shorter ones are no secrets
        text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
        shown = text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
        return KvantError(f"{self._url}: {shown.removesuffix(':')}")


class _Waiting:
    """Reads that end in a TimeoutError when too long ago something useful came, be there bytes or not."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self.restart()

    def restart(self) -> None:
        """Something useful came."""
        self._since = time.monotonic()

    def read(self, response: HTTPResponse) -> bytes:
        """What has arrived, waiting for the first byte; empty at the end, a proper one or not."""
        if time.monotonic() - self._since > self._timeout_s:
            raise TimeoutError
        try:
            return response.read1(READ_BYTES)
        except IncompleteRead:
            return b""


def _parse(url: str) -> tuple[str, str, int, str]:
    """Scheme, host, port and the path of completions."""
    expected = "expected http:// or https:// and a host, such as http://127.0.0.1:8080"
    if "@" in url:  # first, so that no message shows a password
        raise ValueError(f"server URL has a user name or password, which is not supported; a key goes into {API_KEY}")
    if not url.isprintable() or not url.isascii() or " " in url:
        raise ValueError(f"server URL is {url!r}; {expected}")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or {"http": 80, "https": 443}[parts.scheme]
    except (ValueError, KeyError) as error:
        raise ValueError(f"server URL is {url!r}; {expected}") from error
    if not host or parts.query or parts.fragment:
        raise ValueError(f"server URL is {url!r}; {expected}")
    return parts.scheme, host, port, f"{parts.path.rstrip('/').removesuffix('/v1')}/v1/completions"


def _headers() -> dict[str, str]:
    key = _api_key()
    if not (key.isascii() and key.isprintable()):
        raise KvantError(f"{API_KEY} has characters that no key has")
    authorization = {"Authorization": f"Bearer {key}"} if key else {}
    return {"Content-Type": "application/json", "Accept": "text/event-stream", **authorization}


def _api_key() -> str:
    return os.environ.get(API_KEY, "").strip()


def _object(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _choice(chunk: dict[str, Any]) -> tuple[str, str | None]:
    """Text and finish reason of the first choice; none where a chunk only counts."""
    choices = chunk.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else {}
    if not isinstance(first, dict):
        return "", None
    text, reason = first.get("text"), first.get("finish_reason")
    return text if isinstance(text, str) else "", reason if isinstance(reason, str) else None


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _message(body: bytes) -> str:
    """What a server says is wrong: the message within its JSON, or the text itself."""
    text = body.decode("utf-8", errors="replace")
    found: Any = _object(text)
    while isinstance(found, dict):
        found = next((found[name] for name in ("error", "message", "detail") if found.get(name)), text)
    return found if isinstance(found, str) else text
