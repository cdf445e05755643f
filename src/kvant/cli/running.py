"""The servers that this user runs on this machine: ``kvant serve`` writes where each one listens."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvant.errors import KvantError
from kvant.files import user_cache
from kvant.private import read_record, write_record

MAX_BYTES = 4096
TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server and how to ask it."""

    url: str
    pid: int
    token: str

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return the JSON of an answer; POST if there is a body.

        Raises:
            KvantError: the server does not answer, or refuses.
        """
        import httpx2

        headers = {"authorization": f"Bearer {self.token}"}
        try:
            with httpx2.Client(trust_env=False, timeout=TIMEOUT_S, headers=headers) as client:
                url = f"{self.url}{path}"
                answer = client.get(url) if body is None else client.post(url, json=body)
        except httpx2.HTTPError as error:
            raise KvantError(f"the server at {self.url} does not answer: {error}") from error
        if not answer.is_success:
            try:
                message = answer.json()["error"]["message"]
            except (ValueError, KeyError, TypeError):
                message = f"HTTP status {answer.status_code}"
            raise KvantError(f"the server at {self.url} refused: {message}")
        return answer.json()


@contextmanager
def recorded(url: str, token: str) -> Iterator[None]:
    """Let ``kvant ps`` and ``kvant stop`` find this process's server while the block runs."""
    path = _folder() / f"{os.getpid()}.json"
    write_record(path, {"url": url, "pid": os.getpid(), "token": token})
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()


def running_servers() -> list[RunningServer]:
    """Return the servers that run; records of processes that have ended are removed."""
    servers = []
    for path in sorted(_folder().glob("*.json")):
        match read_record(path, MAX_BYTES):
            case {"url": str(url), "pid": int(pid), "token": str(token)} if _runs(pid):
                servers.append(RunningServer(url, pid, token))
            case _:
                with suppress(OSError):
                    path.unlink()
    return servers


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return False  # another user's, or not the number of a process
    return True


def _folder() -> Path:
    return user_cache() / "servers"
