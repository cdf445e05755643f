"""Find this user's running servers: ``kvant serve`` records where each one listens."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvant.errors import KvantError
from kvant.files import user_cache
from kvant.private import read_record, write_record

MAX_BYTES = 4096
TIMEOUT_S = 10.0
# Fields of a model in an answer -> their types.
UNLOADED_FIELDS = {"name": str, "unloaded": bool, "requests": int}
MODEL_FIELDS = {
    "name": str,
    "names": list,
    "state": str,
    "context": int,
    "planned_bytes": int,
    "requests": int,
    "idle_s": float | int | None,
}


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A running server and its control routes."""

    url: str
    pid: int
    token: str

    def models(self) -> list[dict[str, Any]]:
        """Return the state of each model; raises as :meth:`unload`."""
        return self._ask("/control/models", MODEL_FIELDS)

    def unload(self, model: str | None) -> list[dict[str, Any]]:
        """Unload a model, or all (None); return those that were loaded, and whether each is unloaded now.

        Raises:
            KvantError: the server does not answer, refuses, or is not kvant's.
        """
        return self._ask("/control/unload", UNLOADED_FIELDS, {"model": model})

    def _ask(
        self, path: str, fields: Mapping[str, Any], body: dict[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        """Return the models of an answer after checking their fields; POST if there is a body."""
        import httpx2

        headers = {"authorization": f"Bearer {self.token}"}
        try:
            with httpx2.Client(trust_env=False, timeout=TIMEOUT_S, headers=headers) as client:
                url = f"{self.url}{path}"
                answer = client.get(url) if body is None else client.post(url, json=body)
        except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as error:
            raise KvantError(f"the server at {self.url} does not answer: {error}") from error
        if not answer.is_success:
            try:
                message = answer.json()["error"]["message"]
            except (ValueError, KeyError, TypeError):
                message = f"HTTP status {answer.status_code}"
            raise KvantError(f"the server at {self.url} refused: {message}")
        # If the server was killed, another program may have its process id and port.
        try:
            models = answer.json()["models"]
            for model in models:
                if not all(isinstance(model[name], kind) for name, kind in fields.items()):
                    raise TypeError
        except (ValueError, KeyError, TypeError):
            raise KvantError(f"the server at {self.url} is not kvant's, or of another version") from None
        return list(models)


@contextmanager
def recorded(url: str, token: str) -> Iterator[None]:
    """Let ``kvant ps`` and ``kvant stop`` find this process's server inside the context."""
    running_servers()  # removes the records of servers that were killed
    path = _folder() / f"{os.getpid()}.json"
    write_record(path, {"url": url, "pid": os.getpid(), "token": token})
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()


def running_servers() -> list[RunningServer]:
    """Return the running servers; remove records of processes that have ended."""
    servers = []
    for path in sorted(_folder().glob("*.json")):
        match read_record(path, MAX_BYTES):
            case {"url": str(url), "pid": int(pid), "token": str(token)} if pid > 0 and _runs(pid):
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
        return False  # another user's process, or not a process id
    return True


def _folder() -> Path:
    return user_cache() / "servers"
