"""``kvant serve`` and ``mlx_lm.server`` on one model, in turns: what their clients wait for.

Run: python scripts/bench_servers.py [options of kvant bench]
     (default: --streams 1,4,8 --prompt-tokens 128 --max-tokens 64 --repeats 5)

Starts both on loopback, each with room for 8 requests at once, and measures them by ``kvant bench --server``.
mlx-lm is there twice: "mlx-lm" as shipped, and "mlx-lm float32" with float32 weights and kvant's BLAS, as
half precision and MLX's own BLAS are slow on a CPU. mlx_lm.server knows no ignore_eos, so its folders name an
end of text that the model does not generate: all answers have --max-tokens tokens.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx2

from kvant import blas
from kvant.engine.load import POCKET, find_model

import mlx.core as mx  # isort: skip  (after kvant, which loads a faster BLAS)

DEFAULTS = ["--streams", "1,4,8", "--prompt-tokens", "128", "--max-tokens", "64", "--repeats", "5"]
MOST_STREAMS = 8
NEVER = 10**6  # an id that the vocabulary does not have
START_S = 60.0
MLX_LM = "import sys, kvant; from mlx_lm.server import main; sys.argv[0] = 'mlx_lm.server'; main()"
KVANT = ["-m", "kvant", "serve", "--model", POCKET, "--sequences", str(MOST_STREAMS)]


def main() -> None:
    """Start the servers, measure, and stop them."""
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        shipped, cast = _folder(scratch / "shipped", cast=False), _folder(scratch / "float32", cast=True)
        own = {blas.VARIABLE: blas.MLX_BLAS}
        urls = [
            f"kvant={stack.enter_context(server(KVANT, {}))}",
            f"mlx-lm={stack.enter_context(server(['-c', MLX_LM, '--model', str(shipped)], own))}",
            f"mlx-lm float32={stack.enter_context(server(['-c', MLX_LM, '--model', str(cast)], {}))}",
        ]
        models = (POCKET, "default_model", "default_model")
        names = [
            text
            for url, name in zip(urls, models, strict=True)
            for text in ("--server", url, "--server-model", name)
        ]
        command = [sys.executable, "-m", "kvant", "bench", *names, "--baseline", "mlx-lm float32"]
        if os.geteuid() == 0:  # a client that waits for a processor would see several tokens come at once
            command = ["nice", "-n", "-15", *command]
        print(f"load before: {os.getloadavg()[0]:.1f}", file=sys.stderr)
        sys.exit(subprocess.run([*command, *(sys.argv[1:] or DEFAULTS)], check=False).returncode)


@contextmanager
def server(arguments: Sequence[str], environment: Mapping[str, str]) -> Iterator[str]:
    """The URL of a server that answers; it ends with the ``with``."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    command = [sys.executable, *arguments, "--port", str(port)]
    with (
        tempfile.TemporaryFile() as said,
        subprocess.Popen(command, env={**os.environ, **environment}, stdout=said, stderr=said) as process,
    ):
        try:
            url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_S
            while process.poll() is None and time.monotonic() < deadline:
                try:
                    if httpx2.get(f"{url}/health", trust_env=False).status_code == 200:
                        yield url
                        return
                except httpx2.TransportError:
                    time.sleep(0.1)
            said.seek(0)
            sys.exit(f"{' '.join(command)} does not answer:\n{said.read().decode(errors='replace')[-2000:]}")
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def _folder(folder: Path, *, cast: bool) -> Path:
    """A copy of the embedded model that mlx_lm.server does not end early, in float32 if it is to be cast."""
    shutil.copytree(find_model(POCKET), folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    never = {"eos_token_id": NEVER}
    for name, other in (
        ("config", never),
        ("generation_config", never),
        ("tokenizer_config", {"eos_token": None}),
    ):
        path = folder / f"{name}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | other))
    if cast:
        file = str(folder / "model.safetensors")
        weights = {name: array.astype(mx.float32) for name, array in mx.load(file).items()}
        mx.eval(weights)
        mx.save_safetensors(file, weights, {"format": "mlx"})
    return folder


if __name__ == "__main__":
    main()
