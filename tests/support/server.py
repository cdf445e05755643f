"""A server in this process: uvicorn in a thread, as ``kvant serve`` runs it, on a free port of loopback."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest

from kvant.server.app import make_app
from kvant.server.run import Server, bind, url_of
from kvant.server.service import Service
from kvant.server.settings import Settings


@dataclass(frozen=True, slots=True)
class Running:
    """A server that answers.

    Attributes:
        client: of this server; it keeps no environment's proxies.
    """

    url: str
    client: httpx2.Client
    service: Service
    server: Server


@contextmanager
def running(service: Service) -> Iterator[Running]:
    """Serve, and end both the server and the service."""
    said = threading.Event()
    with bind(service.settings) as bound:
        bound.listen(1024)
        server = Server(make_app(service), service, lambda line: said.set())
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, name="server")
        thread.start()
        try:
            assert said.wait(30)
            url = url_of(bound)
            with httpx2.Client(base_url=url, trust_env=False, timeout=60) as client:
                yield Running(url, client, service, server)
        finally:
            server.should_exit = server.force_exit = True
            thread.join(30)
            assert not thread.is_alive()
            service.close()


@pytest.fixture(scope="session")
def server(pocket: Any) -> Iterator[Running]:
    """Pocket, 4 sequences of 512 tokens, no key."""
    settings = Settings(port=0, sequences=4, max_kv_size=512, max_queue=16)
    with running(Service.start(settings, *pocket)) as found:
        yield found
