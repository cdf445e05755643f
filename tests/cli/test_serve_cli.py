"""``kvant serve``: what it refuses before it serves."""

import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.bridged import write_mlx_lm, write_words
from support.command import call

from kvant.cli import session


@pytest.mark.parametrize("content", [b"", b"\n \r\n", b"two words", b"schl\xc3\xbcssel", b"ok\nk\x00ey", b"x" * 1001])
def test_files_that_hold_no_keys(content: bytes, tmp_path: Path) -> None:
    """The message names the line, and never says what is in it."""
    path = tmp_path / "keys"
    path.write_bytes(content)
    done = call("serve", "--port", "0", "--api-key-file", str(path))
    assert done.returncode == 2
    assert "--api-key-file" in done.stderr
    for word in content.split():
        assert word.decode("latin-1") not in done.stderr.partition("--api-key-file")[2].partition("line")[2]


def test_a_port_that_is_taken_is_told_before_a_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = call("serve", "no-such-model", "--port", str(port))
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1 port {port}: " in done.stderr
    assert "another process listens there" in done.stderr


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    for name in [name for name in sys.modules if name.startswith("kvant.server")]:
        monkeypatch.delitem(sys.modules, name)
    done = call("serve", "--port", "0")
    assert done.returncode == 1
    assert "kvant serve needs the extra 'serve'" in done.stderr


def test_memory_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan says what would fit, before a weight is read."""
    real = session.this_machine()
    monkeypatch.setattr(session, "this_machine", lambda device=None: replace(real, limit_bytes=500_000_000))
    done = call("serve", "--port", "0", "--sequences", "200", "--max-kv-size", "2048")
    assert done.returncode == 1
    assert "200 sequences of 2048 tokens need " in done.stderr
    assert "less 150.00 MB for requests" in done.stderr
    assert "would fit" in done.stderr


def test_a_model_that_has_no_pool(tmp_path: Path) -> None:
    """Llama 4's chunks have no pages. It is told by name, before anything listens."""
    folder = write_mlx_lm(tmp_path / "chunks", "llama4")
    write_words(folder, 64)
    done = call("serve", str(folder), "--port", "0", "--max-kv-size", "16")
    assert done.returncode == 1
    assert "llama4 attends in chunks, which a pool has no pages for" in done.stderr
    assert "one sequence at a time works" in done.stderr
    assert "http://" not in done.stderr
