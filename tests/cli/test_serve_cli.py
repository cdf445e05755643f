"""``kvant serve``: what it refuses before it serves."""

import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from support.bridged import write_mlx_lm, write_words
from support.command import call


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--host", "0.0.0.0"], "--host is 0.0.0.0, which other machines reach; it is refused without --api-key-file"),
        (["--host", "::"], "--host is ::, which other machines reach"),
        (["--host", "a b"], "--host is 'a b'; expected an address or a name"),
        (["--port", "65536"], "--port is 65536; expected 0 to 65535"),
        (["--sequences", "0"], "--sequences is 0; expected at least 1"),
        (["--sequences", "257"], "--sequences is 257; expected 1 to 256"),
        (["--max-queue", "0"], "--max-queue is 0; expected at least 1"),
        (["--max-kv-size", "0"], "--max-kv-size is 0; expected at least 1"),
        (["--kv-bits", "3"], "--kv-bits is 3; expected 8, 4, or 0"),
        (["--kv-bits", "0", "--kv-group-size", "32"], "--kv-group-size is 32, but --kv-bits 0 does not quantize"),
        (["--kv-group-size", "7"], "--kv-bits 8 --kv-group-size 7: "),
        (["--allow-origin", "*"], "--allow-origin is '*'; expected scheme://host[:port]"),
        (["--alias", " "], "--alias is ' '; expected a name"),
        (["--kernels", "fused"], "--kernels is 'fused'; MLX's default device is no GPU"),
        (["--wired"], "--wired: only a Mac's GPU has memory to wire"),
        (["--deterministic", "--prefill-step-size", "64"], "--deterministic reads prompts in chunks of 128"),
        (["--chat-template-config", "{"], "--chat-template-config is '{': not JSON"),
        (["--chat-template-config", '{"nothing": 1}'], "'nothing', which the chat template does not mention"),
        (["--temp", "0"], "--temp"),  # of a request
    ],
)
def test_values_that_no_server_can_have(arguments: list[str], said: str) -> None:
    done = call("serve", "--port", "0", *arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--max-kv-size", "5000"], "--max-kv-size is 5000; the model's context is 2048 tokens"),
        (["no-such-model"], "model 'no-such-model' is not a folder"),
        (["--adapter-path", "no/such"], "adapter 'no/such' is not a folder"),
        (["--api-key-file", "no/such"], "no/such"),
        (["--host", "192.0.2.1", "--api-key-file", "keys"], "cannot listen on 192.0.2.1 port 0: "),
    ],
)
def test_what_cannot_be_had(arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("keys").write_text("key\n")
    done = call("serve", "--port", "0", *arguments)
    assert done.returncode == 1
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


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
    from dataclasses import replace

    from kvant.cli import session

    real = session.this_machine

    def small(*arguments: Any) -> Any:
        return replace(real(*arguments), limit_bytes=500_000_000)

    monkeypatch.setattr(session, "this_machine", small)
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
