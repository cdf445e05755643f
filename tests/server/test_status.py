"""What a server says of itself."""

from support.server import Running


def test_health(server: Running) -> None:
    answer = server.client.get("/health")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok", "waiting": 0, "running": 0})
