"""Commands on several ranks, from the outside: what one process says, and differences between ranks refused by name."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from support.checkpoints import qwen2_config, reference_model, save_checkpoint
from support.command import call, run
from support.counts import count
from support.ranks import SRC, run_each, start_ranks

import kvant
from kvant.ranks.hosts import free_ports
from kvant.sample_utils import make_sampler

KVANT = [sys.executable, "-c", "from kvant_command import main; main()"]
MLX_LAUNCH = [sys.executable, "-c", "from mlx._distributed_utils.launch import main; main()"]
STORY = ["Tell me a story", "--max-tokens", "24", "--temp", "0.8", "--seed", "3"]


def each(commands: list[list[str]]) -> list[subprocess.CompletedProcess[str]]:
    """Ranks with a command each."""
    return run_each([[*KVANT, *command] for command in commands])


@pytest.mark.parametrize(("ranks", "parallel", "bits"), [(count(3, 4), "pipeline", "8"), (2, "tensor", "0")])
def test_the_same_tokens_as_one_process(ranks: int, parallel: str, bits: str) -> None:
    alone = call("generate", *STORY, "--json", "--kv-bits", bits)
    divided = run(
        "launch", "-n", str(ranks), "--", "generate", *STORY, "--json", "--kv-bits", bits, "--parallel", parallel
    )
    assert divided.returncode == 0, divided.stderr
    tokens = [[json.loads(line)["token"] for line in done.stdout.splitlines()] for done in (alone, divided)]
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) == 24
    said = f"ranks: {ranks}, {parallel}; "
    said += "0 sums, 2 messages, 2.05 kB" if parallel == "pipeline" else "8 sums, 0 messages, 8.19 kB"
    assert f"{said} in the last step" in divided.stderr
    assert divided.stderr.count("sampling:") == 1  # rank 0 alone prints


def test_a_conversation() -> None:
    command = ["chat", "--temp", "0", "--max-tokens", "12", "-q", "--kv-bits", "0"]
    said = "Hi there\nTell me a story\n/undo\nAnd now?\n"
    alone = call(*command, stdin=said)
    divided = run("launch", "-n", "2", "--", *command, "--draft", "prompt", stdin=said)
    assert divided.returncode == alone.returncode == 0
    assert divided.stdout == alone.stdout
    assert len(alone.stdout.splitlines()) >= 3


def test_a_reader_that_goes_away_is_no_lost_rank(tmp_path: Path) -> None:
    """``| head``: as silent as one process."""
    command = [*KVANT, "generate", *STORY[:1], "-m", "2000", "--ignore-eos", "-q"]
    first, other = start_ranks(2, command, tmp_path)
    assert first.stdout is not None
    assert first.stdout.read(5)
    first.stdout.close()
    first.stdout = None
    for process in (first, other):
        assert process.communicate(timeout=60)[1] == ""
        assert process.returncode == 1


def _fetch(url: str, body: bytes | None = None) -> bytes:
    asked = Request(url, body, {"Content-Type": "application/json"})
    with urlopen(asked, timeout=60) as answer:
        return bytes(answer.read())


def _wait(url: str, server: "subprocess.Popen[str]") -> None:
    """Until the server answers."""
    while server.poll() is None:
        try:
            _fetch(f"{url}/health")
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise AssertionError(f"the server has ended: {server.communicate()[1]}")


def test_a_server(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with subprocess.Popen(
        [
            *KVANT,
            "launch",
            "-n",
            "2",
            "--",
            "serve",
            "--port",
            str(port),
            "-q",
            "--parallel",
            "tensor",
            "--draft",
            "prompt",
        ],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(url, server)
            model, tokenizer = kvant.load("pocket")
            for seed in (1, 2):
                body = {
                    "model": "pocket",
                    "prompt": "Once upon a time",
                    "max_tokens": 20,
                    "temperature": 1,
                    "seed": seed,
                }
                body |= {"top_p": 1, "top_k": 0}
                answer = json.loads(_fetch(f"{url}/v1/completions", json.dumps(body).encode()))
                sampler = make_sampler(temp=1.0, seed=seed)
                expected = kvant.generate(model, tokenizer, "Once upon a time", max_tokens=20, sampler=sampler)
                assert answer["choices"][0]["text"] == expected
            server.terminate()
            assert server.wait(20) in (0, 143)
        finally:
            server.kill()


def test_what_differs_is_named(tmp_path: Path) -> None:
    config = qwen2_config()
    for seed in (0, 1):
        folder = tmp_path / str(seed)
        save_checkpoint(folder, config, reference_model(config, seed))
        (folder / "tokenizer.json").write_text("{}")
    question = ["generate", "Hi", "--model"]
    for commands, named in [
        ([[*question, str(tmp_path / "0")], [*question, str(tmp_path / "1")]], "rank 1: the model's digest is "),
        ([[*question, "pocket"], [*question, "pocket", "--kv-bits", "4"]], "rank 1: --kv-bits is 4; rank 0 has 8"),
        ([[*question, "pocket"], ["chat"]], "rank 1: the command is chat; rank 0 has generate"),
    ]:
        first, other = each(commands)
        assert first.returncode == other.returncode == 1
        assert named in first.stderr
        assert first.stderr.count("\n") == 1
        assert (other.stdout, other.stderr) == ("", "")


def test_what_is_refused(tmp_path: Path) -> None:
    pair = lambda *words: [list(words)] * 2  # noqa: E731
    for commands, code, said in [
        (pair("models"), 2, "'models' is started as 2 ranks"),
        (pair("generate", "Hi", "--prompt-cache-file", str(tmp_path / "file")), 2, "--prompt-cache-file is given"),
        (pair("generate", "-"), 2, "standard input is mlx.launch's"),
    ]:
        first, other = each(commands)
        assert first.returncode == code
        assert first.stderr.startswith("kvant: error: ")
        assert said in first.stderr
        assert first.stderr.count("\n") == 1
        assert other.returncode == code
        assert (other.stdout, other.stderr) == ("", "")
    alone = call("generate", "Hi", "--parallel", "tensor")
    assert alone.returncode == 2
    assert "--parallel is 'tensor', which has no effect in one process" in alone.stderr


def test_under_mlx_launch() -> None:
    done = subprocess.run(
        [*MLX_LAUNCH, "-n", "2", "--env", f"PYTHONPATH={SRC}", "--", *KVANT, "generate", *STORY, "-q"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == call("generate", *STORY, "-q").stdout
    assert done.stderr.count("cut at --max-tokens") == 1
