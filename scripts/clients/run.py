"""Start kvant serve on the embedded model, with a key and without one, and run clients of others against it.

Usage: python scripts/clients/run.py PYTHON [NODE_FOLDER]
PYTHON is the interpreter of an environment of requirements.txt. NODE_FOLDER has a node_modules of
package.json; the Node programs are run in it, and without it they are not run. Ends with exit code 1 when a
check fails, when a server has died, kept a page, or wrote the key or a prompt down.
"""

import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx2

HERE = Path(__file__).resolve().parent
# The model is pocket, the default, unless the arguments behind it name another one.
SERVE = [sys.executable, "-m", "kvant", "serve", "--port", "0", "--sequences", "4"]
SERVE += ["--max-queue", "16", "--pooling", "mean"]
START_S, PROGRAM_S = 60.0, 300.0
ENDED = re.compile(r"^(ok    |FAILED) ", re.MULTILINE)
WRITTEN = re.compile(r"named Pip|weather in Rome|Once upon", re.IGNORECASE)  # of prompts and answers


def main() -> None:
    """Every program against the two servers."""
    python, *node = sys.argv[1:]
    key = secrets.token_urlsafe(24)
    passed = failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        key_file = Path(scratch) / "keys"
        key_file.write_text(key + "\n")
        with (
            serving(Path(scratch) / "open.log") as url,
            serving(Path(scratch) / "keyed.log", "--api-key-file", str(key_file)) as keyed,
        ):
            environment = os.environ | {"KVANT_URL": url, "KVANT_KEYED_URL": keyed, "KVANT_KEY": key}
            environment |= {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
            for command in programs(python, *node):
                print(f"== {Path(command[-1]).name}", flush=True)
                found, wrong = run(command, environment)
                passed, failed = passed + found, failed + wrong
            for name, where, headers in (("open", url, {}), ("keyed", keyed, {"x-api-key": key})):
                wrong_now = still(where, headers)
                print(f"{'FAILED' if wrong_now else 'ok    '} the {name} server afterwards {wrong_now}")
                passed, failed = passed + (not wrong_now), failed + bool(wrong_now)
        for name in ("open", "keyed"):
            said = (Path(scratch) / f"{name}.log").read_text(errors="replace")
            leaked = [text for text in (key, *WRITTEN.findall(said)) if text in said]
            print(f"{'FAILED' if leaked else 'ok    '} the {name} server's log has no prompt and no key")
            passed, failed = passed + (not leaked), failed + bool(leaked)
            if failed:
                print(f"-- the {name} server said:\n{said.replace(key, '***')[-3000:]}")
    print(f"{passed} passed, {failed} failed")
    sys.exit(1 if failed else 0)


def programs(python: str, node_folder: str | None = None) -> Iterator[list[str]]:
    """The command of each program. Node finds packages beside a program, so those are copied to its
    folder.
    """
    for path in sorted(HERE.glob("*_*.py")):
        yield [python, "-W", "error::UserWarning:checks", str(path)]
    if node_folder is not None:
        for path in sorted(HERE.glob("*.mjs")):
            shutil.copy(path, node_folder)
        for path in sorted(HERE.glob("*_*.mjs")):
            yield ["node", str(Path(node_folder) / path.name)]


def run(command: Sequence[str], environment: dict[str, str]) -> tuple[int, int]:
    """Checks that passed and that failed, of one program; one that ends otherwise is a failed check, too."""
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PROGRAM_S,
        )
    except subprocess.TimeoutExpired as error:
        said = (
            error.output.decode(errors="replace") if isinstance(error.output, bytes) else error.output or ""
        )
        print(f"{said[-5000:]}\nFAILED it did not end within {PROGRAM_S:g} s")
        return 0, 1
    print(done.stdout[-20000:], end="")
    kinds = ENDED.findall(done.stdout)
    failed = kinds.count("FAILED")
    if (done.returncode != 0) != bool(failed) or not kinds:
        print(f"FAILED it ended with exit code {done.returncode}")
        failed += 1
    return kinds.count("ok    "), failed


@contextmanager
def serving(log: Path, *arguments: str) -> Iterator[str]:
    """The URL of a server, which is ended with SIGTERM and has to end well."""
    with log.open("wb") as said, subprocess.Popen([*SERVE, *arguments], stdout=said, stderr=said) as process:
        try:
            deadline = time.monotonic() + START_S
            while not (found := re.search(r"http://127\.0\.0\.1:\d+", log.read_text(errors="replace"))):
                if process.poll() is not None or time.monotonic() > deadline:
                    sys.exit(f"kvant serve did not start:\n{log.read_text(errors='replace')[-3000:]}")
                time.sleep(0.05)
            yield found[0]
            assert process.poll() is None, f"kvant serve ended with exit code {process.returncode}"
            process.terminate()
            assert process.wait(40) == 0, (
                f"after SIGTERM kvant serve ended with exit code {process.returncode}"
            )
        finally:
            process.kill()


def still(url: str, headers: dict[str, str]) -> str:
    """What is wrong with a server that has nothing to do: nothing, or a text."""
    with httpx2.Client(base_url=url, headers=headers, trust_env=False) as client:
        health = client.get("/health")
        if health.status_code != 200 or health.json()["running"] or health.json()["waiting"]:
            return health.text
        samples = figures(client)
    pages, free = samples["kvant_pages"], samples["kvant_pages_free"]
    return "" if pages == free else f"{free:g} of {pages:g} pages are free"


def figures(client: httpx2.Client) -> dict[str, float]:
    """The samples of a server's /metrics, by name and labels."""
    lines = client.get("/metrics").text.splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


if __name__ == "__main__":
    main()
