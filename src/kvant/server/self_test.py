"""``kvant serve --self-test``: a server on a free port of loopback, asked for all that it offers and refuses."""

import copy
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import httpx2

from kvant.errors import one_line
from kvant.server.app import make_app
from kvant.server.run import Server, bind, url_of
from kvant.server.self_checks import CHECKS, Check
from kvant.server.self_target import CheckError, RefusalError, Target
from kvant.server.service import Service
from kvant.server.settings import Settings

MOST_WAITING = 8  # so that a full queue needs few requests
HEADER_S = 0.5  # that the second server waits for a request's headers
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a check found.

    Attributes:
        name: of the check.
        promise: what it is about, a sentence.
        result: "refused": the model cannot do it, and the server says so, as it must.
        detail: in a few words; of a failure, what is wrong.
    """

    name: str
    promise: str
    result: Literal["ok", "refused", "failed"]
    detail: str
    seconds: float


def loopback_settings(settings: Settings) -> Settings:
    """Settings to test with: on a free port of loopback, without a key, and with a short queue."""
    waiting = min(settings.max_queue, MOST_WAITING)
    return replace(settings, host="127.0.0.1", port=0, api_keys=(), allow_origins=(), max_queue=waiting)


def self_test(
    service: Service, tell: Callable[[str], None] = lambda name: None, checks: Sequence[Check] = CHECKS
) -> list[Outcome]:
    """Every check, in order; ``tell`` hears its name before it begins. The service has :func:`loopback_settings`."""
    key = secrets.token_urlsafe(24)
    keyed = copy.copy(service)  # on the same engine
    limits = replace(service.settings.limits, header_s=HEADER_S)
    keyed.settings = replace(service.settings, api_keys=(key,), limits=limits)
    with ExitStack() as stack:
        client, other = (stack.enter_context(_serving(each)) for each in (service, keyed))
        target = Target(service, client, other, key, HEADER_S)
        return [_outcome(check, target, tell) for check in checks]


def _outcome(check: Check, target: Target, tell: Callable[[str], None]) -> Outcome:
    name, promise = check.__name__.replace("_", " "), (check.__doc__ or "").strip()
    tell(name)
    started = time.monotonic()

    def found(result: Any, detail: str) -> Outcome:
        return Outcome(name, promise, result, detail, time.monotonic() - started)

    try:
        return found("ok", check(target))
    except RefusalError as refusal:
        return found("refused", str(refusal))
    except CheckError as wrong:
        return found("failed", str(wrong))
    except Exception as error:  # an answer of another shape than it should have
        return found("failed", one_line(error))


@contextmanager
def _serving(service: Service) -> Iterator[httpx2.Client]:
    """A client of a server in a thread of its own, which ends with the ``with``."""
    begun = threading.Event()
    with bind(service.settings) as bound:
        bound.listen(1024)
        server = Server(make_app(service), service, lambda line: begun.set())
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, name="kvant-self-test", daemon=True)
        thread.start()
        try:
            if not begun.wait(30):
                raise RuntimeError("the server did not start within 30 s")
            with httpx2.Client(base_url=url_of(bound), trust_env=False, timeout=TIMEOUT_S) as client:
                yield client
        finally:
            server.should_exit = server.force_exit = True
            thread.join(10)
