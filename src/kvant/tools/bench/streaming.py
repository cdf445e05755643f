"""An OpenAI-compatible streaming server as an engine: llama-server, Ollama, LM Studio, vllm-mlx."""

import json
import os
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx2

from kvant.errors import KvantError
from kvant.tools.bench.event_stream import DONE, events

API_KEY = "OPENAI_API_KEY"  # the environment variable
MAX_REFUSAL_BYTES = 65536  # read of an answer that is no stream
MAX_SHOWN = 200  # characters of a server's message
# Not OpenAI's own: generate to the end, and do not reuse the last request's prompt. A server that refuses one by name
# is asked without it.
EXTRAS = {"ignore_eos": True, "cache_prompt": False}


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens as the server counted them in one completion; None where it did not say."""

    prompt_tokens: int | None
    completion_tokens: int | None


class StreamingServer:
    """Completions from ``{url}/v1/completions``, greedy, each over a connection of its own.

    The key in OPENAI_API_KEY is sent to this server alone, and shown nowhere.
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
        check_url(url)
        self._url = url
        self._model = model
        self._timeout_s = timeout_s
        self._extras = dict(EXTRAS)
        self._usage: Usage | None = None
        self._useful_at = 0.0  # when something useful came last, on the monotonic clock
        # Without the environment: no proxy and no login of ~/.netrc. Redirects are not followed.
        limits = httpx2.Limits(max_keepalive_connections=0)
        self._client = httpx2.Client(timeout=timeout_s, trust_env=False, limits=limits)

    @property
    def usage(self) -> Usage:
        """Of the last completion that came to its end."""
        if self._usage is None:
            raise ValueError("no completion has come to its end")
        return self._usage

    def pieces(self, prompt: str, max_tokens: int) -> Generator[str, None, None]:
        """Text as it arrives, one piece an event; the request is sent when the first is asked for.

        Close the generator to break off. After the last piece :attr:`usage` has the server's counts.

        Raises:
            KvantError: a server that cannot be reached, refuses, or answers anything but a whole stream of text.
        """
        self._usage, self._useful_at = None, time.monotonic()
        url = f"{self._url.rstrip('/').removesuffix('/v1')}/v1/completions"
        # No seed: nothing is drawn, and mlx_lm.server does not batch a request that has one.
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        body |= {"stream_options": {"include_usage": True}} | ({"model": self._model} if self._model else {})
        try:
            while True:
                with self._client.stream("POST", url, json=body | self._extras, headers=_headers()) as response:
                    if self._refuses_an_extra(response):
                        continue
                    yield from self._read(response, max_tokens)
                    return
        except (httpx2.TimeoutException, TimeoutError) as error:
            raise self._error(f"nothing came for {self._timeout_s:g} s") from error
        except httpx2.ProtocolError as error:
            raise self._error(f"not a whole HTTP answer: {error}") from error
        except (httpx2.TransportError, httpx2.InvalidURL, UnicodeError) as error:  # UnicodeError: an odd host name
            raise self._error(f"the connection failed: {error}") from error

    def _refuses_an_extra(self, response: httpx2.Response) -> bool:
        """Forget the extras an answer names as wrong; raise for any other answer that is no stream."""
        status, kind = response.status_code, response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if status == 200 and kind == "text/event-stream":
            return False
        text = b""
        for chunk in self._arriving(response):
            text += chunk
            if len(text) > MAX_REFUSAL_BYTES:
                break
        message = _message(text)
        refused = [name for name in self._extras if name in message]
        if status in (400, 422) and refused:
            for name in refused:
                del self._extras[name]
            return True
        if status == 200:
            raise self._error(f"answered with {kind}, not a stream of events: {message}")
        raise self._error(f"answered {status} {response.reason_phrase}: {message}")

    def _read(self, response: httpx2.Response, max_tokens: int) -> Generator[str, None, None]:
        count = 0
        usage: dict[str, Any] = {}
        for kind, data in events(self._arriving(response)):
            if data == DONE:
                break
            chunk = _object(data)
            if kind == "error" or (chunk and chunk.get("error")):
                raise self._error(f"reported an error: {_message(data.encode())}")
            if chunk is None:
                raise self._error(f"sent an event that is not a JSON object: {data}")
            usage = chunk["usage"] if isinstance(chunk.get("usage"), dict) else usage
            text = _text(chunk)
            if not text:
                continue
            count += 1
            if count > 2 * max_tokens + 16:  # servers that cut a token in two are told apart at the end
                raise self._error(f"sent {count} events for {max_tokens} tokens, and did not end")
            yield text
            self._useful_at = time.monotonic()
        else:
            raise self._error(f"the stream was cut off after {count} events, before {DONE}")
        if not count:
            raise self._error("ended the stream without any text")
        self._usage = Usage(_count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens")))

    def _arriving(self, response: httpx2.Response) -> Iterator[bytes]:
        """Bytes as they come, to a proper end or not; a TimeoutError if nothing useful was among them for too long."""
        try:
            for chunk in response.iter_raw():  # not decoded: no compression was asked for
                if time.monotonic() - self._useful_at > self._timeout_s:
                    raise TimeoutError
                yield chunk
        except httpx2.RemoteProtocolError:
            return

    def _error(self, text: str) -> KvantError:
        """One line, of printable characters, without the key."""
        key = _api_key()
        text = text.replace(key, "***") if len(key) >= 8 else text  # shorter ones are no secrets
        text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
        shown = text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
        return KvantError(f"{self._url}: {shown.removesuffix(':')}")


def check_url(url: str) -> None:
    """Raise a ValueError, which shows no password, for a URL that is not one of http or https."""
    if "@" in url:  # first, so that no message shows a password
        raise ValueError(f"server URL has a user name or password, which is not supported; a key goes into {API_KEY}")
    try:
        parts = urlsplit(url)
        sound = parts.scheme in ("http", "https") and parts.hostname and not parts.query and not parts.fragment
        sound = sound and parts.port != 0 and url.isprintable() and url.isascii() and " " not in url
    except ValueError:  # a port that is no number, a bracket that is not closed
        sound = False
    if not sound:
        raise ValueError(
            f"server URL is {url!r}; expected http:// or https:// and a host, such as http://127.0.0.1:8080"
        )


def _headers() -> dict[str, str]:
    key = _api_key()
    if not (key.isascii() and key.isprintable()):
        raise KvantError(f"{API_KEY} has characters that no key has")
    authorization = {"Authorization": f"Bearer {key}"} if key else {}
    return {"Accept": "text/event-stream", "Accept-Encoding": "identity", **authorization}


def _api_key() -> str:
    return os.environ.get(API_KEY, "").strip()


def _object(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _text(chunk: dict[str, Any]) -> str:
    """Text of the first choice; none where a chunk only counts."""
    choices = chunk.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    text = first.get("text") if isinstance(first, dict) else None
    return text if isinstance(text, str) else ""


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _message(body: bytes) -> str:
    """The message within a server's JSON, or the text itself."""
    text = body.decode("utf-8", errors="replace")
    found: Any = _object(text)
    while isinstance(found, dict):
        found = next((found[name] for name in ("error", "message", "detail") if found.get(name)), text)
    return found if isinstance(found, str) else text
