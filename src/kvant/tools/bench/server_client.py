"""A client for OpenAI-compatible streaming servers: llama-server, Ollama, LM Studio, vllm-mlx."""

import json
import os
import time
from collections.abc import Generator, Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx2

from kvant.errors import KvantError

API_KEY = "OPENAI_API_KEY"  # the environment variable
DONE = "[DONE]"  # the last data of a stream
MAX_LINE_BYTES = 1024 * 1024
MAX_SHOWN = 200  # characters of a server's message
# Extensions of OpenAI's protocol: generate to the end, and do not reuse the last request's prompt. If a
# server refuses one by name, the request is repeated without it.
EXTRAS = {"ignore_eos": True, "cache_prompt": False}


class StreamingServer:
    """Greedy completions from ``{url}/v1/completions``, each over a new connection.

    The key in OPENAI_API_KEY is sent only to this server and never shown. ``usage`` has the server's token
    counts of the last completion, by OpenAI's names; it is empty if the server does not count.
    """

    def __init__(self, url: str, *, model: str | None = None, timeout_s: float = 600.0) -> None:
        """``url`` may end in ``/v1``; ``model`` None: name none; ``timeout_s``: longest wait for text."""
        self.usage: dict[str, int] = {}
        self._url = url
        self._timeout_s = timeout_s
        self._extras = dict(EXTRAS)
        self._model = {} if model is None else {"model": model}
        # Ignore the environment: no proxy and no login from ~/.netrc. Redirects are not followed.
        limits = httpx2.Limits(max_keepalive_connections=0)
        self._client = httpx2.Client(timeout=timeout_s, trust_env=False, limits=limits)

    def pieces(self, prompt: str, max_tokens: int) -> Generator[str, None, None]:
        """Yield text as it arrives, one piece per event; raise a KvantError if the stream is not complete."""
        url = f"{self._url.rstrip('/').removesuffix('/v1')}/v1/completions"
        # No seed: sampling is greedy, and mlx_lm.server does not batch a request that has a seed.
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True, **self._model}
        body["stream_options"] = {"include_usage": True}
        try:
            while True:
                with self._client.stream(
                    "POST", url, json=body | self._extras, headers=_headers()
                ) as response:
                    if not self._refuses_an_extra(response):
                        yield from self._read(response, max_tokens)
                        return
        except (httpx2.TimeoutException, TimeoutError) as error:
            raise self._error(f"nothing came for {self._timeout_s:g} s") from error
        except (httpx2.TransportError, httpx2.InvalidURL, UnicodeError) as error:  # odd host names: the last
            raise self._error(f"the connection failed: {error}") from error

    def _refuses_an_extra(self, response: httpx2.Response) -> bool:
        """Drop the extras that an error names and return True; raise for any other response but a stream."""
        kind = response.headers.get("Content-Type", "no type")
        if response.status_code == 200 and kind.lower().startswith("text/event-stream"):
            return False
        text = next(response.iter_raw(MAX_LINE_BYTES), b"").decode(errors="replace")
        refused = [name for name in self._extras if name in text]
        if response.status_code in (400, 422) and refused:
            self._extras = {name: value for name, value in self._extras.items() if name not in refused}
            return True
        raise self._error(f"answered {response.status_code} {response.reason_phrase} with {kind}: {text}")

    def _read(self, response: httpx2.Response, max_tokens: int) -> Generator[str, None, None]:
        count = 0
        self.usage = {}
        useful_at = time.monotonic()
        for data in self._events(response):
            if time.monotonic() - useful_at > self._timeout_s:  # for example, only comments arrive
                raise TimeoutError
            if data == DONE:
                break
            if not data:
                continue
            try:
                chunk: dict[str, Any] = json.loads(data)
                self.usage = chunk.get("usage") or self.usage
                text = chunk["choices"][0]["text"] if chunk.get("choices") or "error" in chunk else ""
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                raise self._error(f"sent an event that is not a completion: {data}") from None
            if not text:
                continue
            count += 1
            if count > 2 * max_tokens + 16:  # servers that split tokens in two are detected at the end
                raise self._error(f"sent {count} events for {max_tokens} tokens, and did not end")
            yield text
            useful_at = time.monotonic()
        else:
            raise self._error(f"the stream was cut off after {count} events, before {DONE}")
        if not count:
            raise self._error("ended the stream without any text")

    def _events(self, response: httpx2.Response) -> Iterator[str]:
        """Yield each line's data as it comes, or an empty string: OpenAI's events have one line of data."""
        rest = b""
        try:
            for chunk in response.iter_raw():  # no decoding: we asked for no compression
                *lines, rest = (rest + chunk).split(b"\n")
                if len(rest) > MAX_LINE_BYTES:
                    raise self._error(f"sent a line of more than {MAX_LINE_BYTES} bytes")
                ended = rest.endswith(DONE.encode())  # do not wait for the end of the line
                for line in [*lines, rest if ended else b""]:
                    name, _, value = line.decode(errors="replace").partition(":")
                    # llama-server used to send the field "error"
                    yield value.strip() if name in ("data", "error") else ""
        except httpx2.RemoteProtocolError:  # cut off
            return

    def _error(self, text: str) -> KvantError:
        """Make an error of one printable line that does not contain the key."""
        key = _api_key()
        text = text.replace(key, "***") if len(key) >= 8 else text  # shorter keys are not secrets
        text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
        return KvantError(f"{self._url}: {text if len(text) <= MAX_SHOWN else f'{text[:MAX_SHOWN]}...'}")


def check_url(url: str) -> None:
    """Raise a ValueError, which shows no password, for a URL that does not work for http or https."""
    if "@" in url:  # first, so that no message shows a password
        raise ValueError(
            f"server URL has a user name or password, which is not supported; put the key into {API_KEY}"
        )
    try:
        parts = urlsplit(url)
        sound = (
            parts.scheme in ("http", "https") and parts.hostname and not parts.query and not parts.fragment
        )
        sound = sound and parts.port != 0 and url.isprintable() and url.isascii() and " " not in url
    except ValueError:  # a port that is not a number, an unclosed bracket
        sound = False
    if not sound:
        raise ValueError(
            f"server URL is {url!r}; expected http:// or https:// and a host, like http://127.0.0.1:8080"
        )


def _headers() -> dict[str, str]:
    key = _api_key()
    if not (key.isascii() and key.isprintable()):
        raise KvantError(f"{API_KEY} has characters that are not allowed in a key")
    authorization = {"Authorization": f"Bearer {key}"} if key else {}
    return {"Accept": "text/event-stream", "Accept-Encoding": "identity", **authorization}


def _api_key() -> str:
    return os.environ.get(API_KEY, "").strip()
