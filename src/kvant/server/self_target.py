"""A server under test, and how it is asked: errors that say what is wrong. See self_test."""

import json
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx2

from kvant.server.service import Service
from kvant.tools.bench.event_stream import DONE, events

STORY = "Tell me a short story."
FEW = 8  # tokens of an answer
WAIT_S = 10.0

Body = Mapping[str, Any]


class CheckError(Exception):
    """A server that does not do what it should."""


class RefusalError(Exception):
    """What this model, or its settings, cannot do, and the server refused by name."""


def expect(holds: object, said: object) -> None:
    """Raise :class:`CheckError` unless it holds."""
    if not holds:
        raise CheckError(f"{said}"[:300])


@dataclass(frozen=True, slots=True)
class Target:
    """A server under test, and a second one on the same engine that wants a key and gives little time.

    Attributes:
        header_s: that the second one waits for a request's headers.
    """

    service: Service
    client: httpx2.Client
    keyed: httpx2.Client
    key: str
    header_s: float

    @property
    def model(self) -> str:
        """The name that it is served by."""
        return self.service.names[0]

    def get(self, path: str) -> Any:
        """The JSON of a route that answers."""
        answer = self.client.get(path)
        expect(answer.status_code == 200, f"{path}: {answer.status_code} {answer.text}")
        return answer.json()

    def post(self, path: str, body: Body) -> Any:
        """The JSON of an answer."""
        return self._checked(path, self.client.post(path, json=body)).json()

    def stream(self, path: str, body: Body) -> list[Any]:
        """The JSON of every event of a stream, which has to be whole."""
        with self.client.stream("POST", path, json={**body, "stream": True}) as answer:
            if answer.status_code != 200:
                answer.read()
            self._checked(path, answer)
            data = [text for _, text in events(answer.iter_raw())]
        expect(data, "no events")
        if path != "/v1/messages" and path != "/v1/responses":
            expect(data[-1] == DONE, f"the last event is {data[-1]}")
        found = [json.loads(text) for text in data if text != DONE]
        expect(not any(each.get("error") for each in found), f"an error among the events: {found[-1]}")
        return found

    def refused(self, path: str, body: Body | bytes, *words: str, status: int = 400) -> None:
        """The request is refused with this status, and with a message that has the words."""
        sent: Any = {"content": body} if isinstance(body, bytes) else {"json": body}
        answer = self.client.post(path, **sent)
        expect(answer.status_code == status, f"{path}: {answer.status_code}, expected {status}: {answer.text}")
        said = answer.json()["error"]["message"]
        expect("\n" not in said and all(word in said for word in words), f"expected {words} in: {said}")

    def chat(self, **options: Any) -> dict[str, Any]:
        """The body of a chat request: greedy, of a few tokens, that does not end before them."""
        messages = [{"role": "user", "content": STORY}]
        given = {"model": self.model, "messages": messages, "temperature": 0, "max_tokens": FEW, "ignore_eos": True}
        return given | options

    def completion(self, **options: Any) -> dict[str, Any]:
        """The same without a template."""
        given = {"model": self.model, "prompt": "Once upon a time", "temperature": 0, "max_tokens": FEW}
        return given | {"ignore_eos": True} | options

    def health(self) -> dict[str, Any]:
        """What /health says; it has to be well."""
        found: dict[str, Any] = self.get("/health")
        return found

    def idle(self) -> bool:
        """Whether nothing runs and nothing waits."""
        said = self.health()
        return not (said["running"] or said["waiting"])

    def free_pages(self) -> int:
        """Pages that new requests could have."""
        return self.service.engine.counts.free_pages

    def until(self, holds: Callable[[], bool], wanted: str) -> float:
        """Wait for something; the seconds it took."""
        started = time.monotonic()
        while not holds():
            expect(time.monotonic() < started + WAIT_S, f"after {WAIT_S:g} s still not: {wanted}")
            time.sleep(0.01)
        return time.monotonic() - started

    def connect(self, base: httpx2.Client) -> socket.socket:
        """A bare connection to one of the servers."""
        parts = urlsplit(str(base.base_url))
        return socket.create_connection((parts.hostname or "", parts.port or 0), timeout=WAIT_S)

    def send(self, path: str, body: Body) -> socket.socket:
        """A connection on which a request was sent, and nothing read."""
        text = json.dumps(body).encode()
        connection = self.connect(self.client)
        host = str(self.client.base_url).split("/")[2]
        connection.sendall(
            f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(text)}\r\n\r\n".encode() + text
        )
        return connection

    def _checked(self, path: str, answer: httpx2.Response) -> httpx2.Response:
        if answer.status_code == 400:
            said = answer.json()["error"]["message"]
            if not self.service.tokenizer.has_chat_template and "template" in said:
                raise RefusalError(said)
        if answer.status_code != 200:
            raise CheckError(f"{path}: {answer.status_code} {answer.text}"[:300])
        return answer


def text_of(message: Mapping[str, Any]) -> str:
    """An answer's text with its thinking."""
    return (message.get("reasoning_content") or "") + (message.get("content") or "")
