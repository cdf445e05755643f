"""Who may ask a server: hosts, origins and keys, as web pages and strangers would try them."""

import hashlib
import hmac
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from support.counts import half
from support.server import Running, served

from kvant.errors import ArgumentError
from kvant.server.settings import Settings

KEYS = ("sk-first", "sk-second", "sk-third")
PAGE = "https://notes.example:8443"


async def salt(request: Request) -> Response:
    """What prefixes are shared by, and what is no API's."""
    return JSONResponse({"salt": request.state.salt.hex()})


async def fail(request: Request) -> Response:
    raise ZeroDivisionError(await request.body())


@pytest.fixture(scope="module")
def locked(pocket: Any) -> Iterator[Running]:
    """A server with keys, that a web page may use."""
    with served(*pocket, routes=[Route("/salt", salt)], api_keys=KEYS, allow_origins=(PAGE,)) as found:
        yield found


def _raw(server: Running, *headers: str) -> int:
    lines = "\r\n".join(["GET /health HTTP/1.1", *headers, "Connection: close"])
    return int(server.exchange(f"{lines}\r\n\r\n".encode("latin-1")).split(b" ", 2)[1])


OWN = ["127.0.0.1", "127.0.0.1:8080", "localhost", "localhost:1", "LocalHost:8080", "[::1]", "[::1]:65535"]
REBOUND = [
    "evil.example", "evil.example:8080", "127.0.0.1.evil.example", "localhost.evil.example", "evil-localhost",
    "localhost:80@evil.example", "evil.example#localhost", "127.0.0.2", "0.0.0.0", "[::]", "::1", "2130706433",
    "localhost.", "localhost:", "localhost:99999999", "", "127.0.0.1, evil.example", "localhost/evil.example",
]  # fmt: skip


@pytest.mark.parametrize(
    ("host", "status"), [*((each, 200) for each in OWN), *((each, 403) for each in REBOUND)]
)
def test_only_own_hosts(server: Running, host: str, status: int) -> None:
    assert _raw(server, f"Host: {host}") == status


def test_a_request_with_no_host_or_two(server: Running) -> None:
    assert _raw(server, "Host: localhost", "Host: evil.example") in (400, 403)
    assert (
        _raw(server, "Host: evil.example", "X-Forwarded-Host: localhost", "Forwarded: host=localhost") == 403
    )
    assert server.exchange(b"GET /health HTTP/1.0\r\n\r\n").split(b" ", 2)[1] == b"403"


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example", "null", "http://localhost:3000", "http://127.0.0.1", "file://", "https://localhost",
        "http://127.0.0.1:{port}.evil.example", "http://127.0.0.1:{port}@evil.example", "127.0.0.1:{port}", "*",
    ],
)  # fmt: skip
def test_pages_of_other_origins_are_refused(server: Running, origin: str) -> None:
    origin = origin.format(port=server.url.rpartition(":")[2])
    for ask in (server.client.get, server.client.post, server.client.options):
        answer = ask("/health", headers={"origin": origin, "access-control-request-method": "POST"})
        assert answer.status_code == 403
        assert answer.json()["error"]["message"].startswith("the Origin header is ")
        assert not [name for name in answer.headers if name.startswith("access-control-")]
    answer = server.client.get("/health", headers={"origin": server.url})
    assert answer.status_code == 200
    assert not [name for name in answer.headers if name.startswith("access-control-")]


def test_a_page_that_was_allowed(locked: Running) -> None:
    asked = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, x-api-key",
    }
    first = locked.client.options("/v1/models", headers={"origin": PAGE, **asked})
    assert (first.status_code, first.headers["access-control-allow-origin"]) == (200, PAGE)
    assert "authorization" in first.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in first.headers
    for key, status in ((KEYS[0], 200), ("wrong", 401)):
        answer = locked.client.get("/v1/models", headers={"origin": PAGE, "x-api-key": key})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, PAGE)
    other = {"origin": PAGE.replace("https", "http"), "x-api-key": KEYS[0]}
    assert locked.client.get("/v1/models", headers=other).status_code == 403


def _ways(key: str) -> list[dict[str, str]]:
    return [{"authorization": f"Bearer {key}"}, {"authorization": f"bearer  {key}"}, {"x-api-key": key}]


def test_a_key_is_needed_on_every_route(locked: Running) -> None:
    paths = {getattr(route, "path", "") for route in locked.server.config.app.routes}  # type: ignore[union-attr]
    assert paths >= {"/health", "/metrics", "/props", "/live", "/v1/models", "/tokenize", "/", "/page/{name}"}
    asked = [*sorted(paths - {"/", "/page/{name}"}), "/nothing", "/v1/messages/batches", "/pages", "/page"]
    refused = ({}, {"x-api-key": "wrong"}, {"authorization": "Basic !!"}, {"authorization": KEYS[0]})
    for path, method, headers in half(asked, ("GET", "POST", "HEAD", "OPTIONS", "DELETE"), refused):
        answer = locked.client.request(method, path, headers=headers)
        # the control routes take no client's key
        assert answer.status_code == (403 if path.startswith("/control/") else 401), (method, path, headers)
    for key in KEYS:
        for headers in _ways(key):
            assert locked.client.get("/health", headers=headers).status_code == 200


WRONG = ["sk-firs", "sk-first0", "SK-FIRST", "sk-first,sk-second", "sk-firs\xf4", "x" * 10_000, "*", "None"]


@pytest.mark.parametrize("key", WRONG)
def test_wrong_keys(locked: Running, key: str) -> None:
    for headers in _ways(key):
        encoded = {name: value.encode("latin-1") for name, value in headers.items()}
        answer = locked.client.get("/health", headers=encoded)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert key not in answer.text


def test_how_a_missing_key_is_told(locked: Running) -> None:
    answer = locked.client.get("/v1/models")
    assert answer.headers["www-authenticate"] == "Bearer"
    assert "Authorization: Bearer KEY" in answer.json()["error"]["message"]
    error = locked.client.post("/v1/messages", json={}).json()
    assert (error["error"]["type"], error["request_id"][:4]) == ("authentication_error", "req_")


def test_keys_are_compared_in_constant_time(locked: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests of one length, each of them, wherever a match is."""
    compared: list[tuple[int, int]] = []
    real = hmac.compare_digest

    def compare(given: bytes, known: bytes) -> bool:
        compared.append((len(given), len(known)))
        return real(given, known)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    for key in (*KEYS, "wrong", "x" * 5000, ""):
        compared.clear()
        locked.client.get("/health", headers={"x-api-key": key})
        assert compared == [(32, 32)] * len(KEYS)


def test_prefixes_are_shared_by_key(locked: Running, pocket: Any) -> None:
    """Who has another key cannot learn from an answer's time what was asked. Without keys nobody is told
    apart.
    """
    salts = {locked.client.get("/salt", headers={"x-api-key": key}).json()["salt"] for key in KEYS}
    assert salts == {hashlib.sha256(key.encode()).hexdigest() for key in KEYS}
    asked = {"model": "pocket", "prompt": "The bear went home. " * 40, "max_tokens": 2}
    for keys, expected in ((KEYS, [False, True, False]), ((), [False, True, True])):
        with served(*pocket, routes=[Route("/salt", salt)], max_kv_size=512, api_keys=keys) as opened:
            told = []
            for key in (KEYS[0], KEYS[0], KEYS[1]):
                answer = opened.client.post("/v1/completions", json=asked, headers={"x-api-key": key}).json()
                told.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 128)
            assert told == expected
            assert keys or opened.client.get("/salt", headers={"x-api-key": "a"}).json() == {"salt": ""}


def test_an_error_that_nobody_expected_tells_nothing(pocket: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Neither to the client nor to the log: its text may be a prompt."""
    with served(*pocket, routes=[Route("/fail", fail, methods=["POST"])]) as opened:
        answer = opened.client.post(
            "/fail", content=b"a secret prompt", headers={"x-api-key": "a secret key"}
        )
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "server_error"
        assert opened.client.get("/health").status_code == 200
    assert "secret" not in answer.text + caplog.text
    assert "ZeroDivisionError at test_security.py:" in caplog.text


def test_an_address_that_others_reach_needs_a_key() -> None:
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.org", "127.0.0.1.nip.io", "[::]"):
        with pytest.raises(ArgumentError, match=r"^host is .*, which other machines reach"):
            Settings(host=host)
        assert not Settings(host=host, api_keys=("k",)).is_loopback
    for host in ("127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost", "LOCALHOST"):
        assert Settings(host=host).is_loopback
    assert KEYS[0] not in repr(Settings(api_keys=KEYS))


def test_a_server_on_all_addresses(pocket: Any) -> None:
    """It does not know under which it is reached. A name can be rebound, an address cannot."""
    with served(*pocket, host="0.0.0.0", api_keys=KEYS) as opened:
        port = opened.url.rpartition(":")[2]
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
            for host, status in (("192.168.1.5:80", 200), ("[fe80::1]", 200), ("evil.example", 403)):
                headers = {"host": host, "x-api-key": KEYS[0]}
                assert client.get("/health", headers=headers).status_code == status


def test_origins_that_cannot_be_allowed() -> None:
    for origin in ("*", "null", "example.org", "https://a.example/", "https://a.example/x", "https://"):
        with pytest.raises(ArgumentError, match=r"^allow_origin is .*; expected scheme://host"):
            Settings(allow_origins=(origin,))


@pytest.mark.parametrize(
    "path", ["//health", "/./health", "/page/../health", "/page/%2e%2e/health", "/%2fhealth", "*"]
)
def test_no_spelling_of_a_path_passes_the_key(locked: Running, path: str) -> None:
    answer = locked.exchange(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    assert answer.split(b" ", 2)[1] in (b"401", b"404")
    assert b"waiting" not in answer
