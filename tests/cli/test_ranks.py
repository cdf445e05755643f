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
from support.command import COMMAND, call, run
from support.counts import count
from support.ranks import SRC, run_ranks

import kvant
from kvant.cli.launch import free_ports
from kvant.sample_utils import make_sampler

KVANT = [sys.executable, "-c", "from kvant_command import main; main()"]
MLX_LAUNCH = [sys.executable, "-c", "from mlx._distributed_utils.launch import main; main()"]
STORY = ["Tell me a story", "--max-tokens", "150", "--ignore-eos", "--temp", "0.8", "--seed", "3"]


def each(commands: list[list[str]]) -> list[subprocess.CompletedProcess[str]]:
    """Ranks with a command each."""
    return run_ranks([[*KVANT, *command] for command in commands])


@pytest.mark.parametrize(("ranks", "parallel", "bits"), [(count(3, 4), "pipeline", "8"), (2, "tensor", "0")])
def test_the_same_tokens_as_one_process(ranks: int, parallel: str, bits: str) -> None:
    words = ["generate", *STORY, "--json", "--kv-bits", bits]
    alone, divided = call(*words), run("launch", "-n", str(ranks), "--", *words, "--parallel", parallel)
    assert divided.returncode == 0, divided.stderr
    tokens = [[json.loads(line)["token"] for line in done.stdout.splitlines()] for done in (alone, divided)]
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) == 150
    exchanged = "0 sums, 2 messages, 2.05 kB" if parallel == "pipeline" else "8 sums, 0 messages, 8.19 kB"
    assert f"ranks: {ranks}, {parallel}; {exchanged} in the last step" in divided.stderr
    assert divided.stderr.count("sampling:") == 1  # rank 0 alone prints


def test_a_conversation() -> None:
    """Which ends with its input, as in one process."""
    command = ["chat", "--temp", "0", "--max-tokens", "12", "-q", "--kv-bits", "0"]
    said = "Hi there\nTell me a story\n/undo\nAnd now?"
    alone = call(*command, stdin=said)
    divided = run("launch", "-n", "2", "--", *command, "--draft", "prompt", stdin=said)
    assert divided.returncode == alone.returncode == 0
    assert divided.stdout == alone.stdout
    assert len(alone.stdout.splitlines()) >= 3


def test_a_server(tmp_path: Path) -> None:
    port = free_ports(1)
    words = ["serve", "--port", str(port), "-q", "--parallel", "tensor", "--draft", "prompt"]
    with subprocess.Popen([*COMMAND, "launch", "-n", "2", "--", *words], stdin=subprocess.DEVNULL) as server:
        try:
            url = f"http://127.0.0.1:{port}"
            while server.poll() is None:
                try:
                    urlopen(f"{url}/health", timeout=60).close()
                    break
                except OSError:
                    time.sleep(0.1)
            model, tokenizer = kvant.load("pocket")
            for seed in (1, 2):
                body = {"prompt": "Once upon a time", "max_tokens": 20, "temperature": 1, "seed": seed, "top_p": 1}
                data = json.dumps(body | {"model": "pocket", "top_k": 0}).encode()
                asked = Request(f"{url}/v1/completions", data, {"Content-Type": "application/json"})
                with urlopen(asked, timeout=60) as answer:
                    text = json.load(answer)["choices"][0]["text"]
                sampler = make_sampler(temp=1.0, seed=seed)
                assert text == kvant.generate(model, tokenizer, "Once upon a time", max_tokens=20, sampler=sampler)
            server.terminate()
            assert server.wait(20) in (0, 143)
        finally:
            server.kill()


def test_the_doctor() -> None:
    done = run("launch", "-n", "2", "--", "doctor", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert (found["healthy"], found["problems"]) == (True, [])


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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["models"], "'models' is started as 2 ranks"),
        (["generate", "Hi", "--prompt-cache-file", "file"], "--prompt-cache-file is given"),
        (["generate", "-"], "standard input reaches no rank"),
        (["generate"], "standard input reaches no rank"),
    ],
)
def test_what_is_refused(words: list[str], said: str) -> None:
    first, other = each([words] * 2)
    assert first.returncode == other.returncode == 2
    assert first.stderr.startswith("kvant: error: ")
    assert said in first.stderr
    assert first.stderr.count("\n") == 1
    assert (other.stdout, other.stderr) == ("", "")


def test_under_mlx_launch() -> None:
    command = [*MLX_LAUNCH, "-n", "2", "-p", str(free_ports(3) + 1), "--env", f"PYTHONPATH={SRC}", "--", *KVANT]
    done = subprocess.run(
        [*command, "generate", *STORY, "-q"],
        env=os.environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == call("generate", *STORY, "-q").stdout
    assert done.stderr.count("cut at --max-tokens") == 1
