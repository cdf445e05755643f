"""Check kvant on a published model: SmolLM2-135M-Instruct with 4-bit weights, through every front door.

Usage: python scripts/real_model.py [CLIENTS_PYTHON]
Pulls smollm2-135m-q4 (93 MB) unless it is here. CLIENTS_PYTHON is the interpreter of an environment of
scripts/clients/requirements.txt; without it the server is asked without clients. Ends with exit code 1 if a
check fails.

At temperature 0 the model's first word to QUESTION hangs on 0.08 of a logit, and a cache of 8 bits changes
logits by more than that if sums are rounded in another order. So texts are compared where nothing is
quantized, or where both were computed in the same order.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kvant  # isort: skip  (before MLX: it loads a faster BLAS)
import httpx2
import mlx.core as mx
import numpy as np

MODEL = "smollm2-135m-q4"
QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
START_S, COMMAND_S = 60.0, 600.0
TOLERANCE = 1e-4  # of the largest logit, in float32
MAX_KLD = {
    "8g32": 2e-3,
    "4g32": 0.2,
}  # on 512 tokens, in nats: far above what was measured, far below a fault's
TEXT = (
    "A cache keeps the keys and values of all tokens read so far, so that the next token needs only its own. "
    * 3
)


def command(*arguments: str, text: str = "") -> str:
    """Run a command of kvant; return its standard output."""
    done = subprocess.run(
        [sys.executable, "-m", "kvant", *arguments],
        input=text,
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
    )
    assert done.returncode == 0, f"kvant {' '.join(arguments)}: {done.stderr[-500:]}"
    return done.stdout


def generate(*arguments: str) -> str:
    return command(
        "generate", "--model", MODEL, "--prompt", QUESTION, "--temp", "0", "--quiet", *arguments
    ).strip()


def check_pull() -> None:
    folder = command("pull", MODEL).strip()
    assert Path(folder, "config.json").is_file()
    assert any(line.split()[:2] == [MODEL, "yes"] for line in _lines(command("models")))
    assert "fits" in command("plan", MODEL)


def check_logits() -> None:
    """kvant's logits, mlx-lm's model on the same folder, and a float32 forward pass in NumPy."""
    from mlx_lm.utils import load_model

    model, tokenizer = kvant.load(MODEL)
    ids = tokenizer.encode(TEXT)
    found = np.array(model(mx.array([ids]))[0])
    folder = Path(command("pull", MODEL).strip())
    theirs, _ = load_model(folder)
    theirs.set_dtype(mx.float32)
    for name, expected in (("mlx-lm", np.array(theirs(mx.array([ids]))[0])), ("NumPy", forward(folder, ids))):
        error = np.abs(found - expected).max() / np.abs(expected).max()
        print(f"       {name}: {error:.1e} of the largest logit")
        assert error < TOLERANCE, f"{name}: {error}"


def forward(folder: Path, ids: list[int]) -> np.ndarray[Any, Any]:
    """The logits (S, vocab) of a Llama model, computed from its dequantized weights in float32."""
    config = json.loads((folder / "config.json").read_text())
    stored = {name: mx.array(value) for name, value in mx.load(str(folder / "model.safetensors")).items()}

    def weight(name: str) -> np.ndarray[Any, Any]:
        packed = stored[f"{name}.weight"]
        if f"{name}.scales" not in stored:
            return np.array(packed.astype(mx.float32))
        scales, biases = (stored[f"{name}.{part}"].astype(mx.float32) for part in ("scales", "biases"))
        bits = packed.shape[1] * 32 // (scales.shape[1] * 32)
        return np.array(mx.dequantize(packed, scales, biases, 32, bits))

    def norm(x: np.ndarray[Any, Any], name: str) -> np.ndarray[Any, Any]:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config["rms_norm_eps"]) * weight(name)

    H, K, D = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    angles = np.outer(np.arange(len(ids)), config["rope_theta"] ** (-np.arange(0, D, 2) / D))  # (S, D/2)
    cosines, sines = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    future = np.triu(np.full((len(ids), len(ids)), -np.inf, np.float32), 1)

    def turned(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Rotate the pairs p and p + D/2 of heads (heads, S, D)."""
        low, high = x[..., : D // 2], x[..., D // 2 :]
        return np.concatenate([low * cosines - high * sines, high * cosines + low * sines], axis=-1)

    embedding = weight("model.embed_tokens")
    x = embedding[ids]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        h = norm(x, prefix + "input_layernorm")
        # (S, heads * D) -> (heads, S, D)
        query, key, value = (
            (h @ weight(f"{prefix}self_attn.{name}_proj").T).reshape(len(ids), heads, D).swapaxes(0, 1)
            for name, heads in (("q", H), ("k", K), ("v", K))
        )
        key, value = (np.repeat(part, H // K, axis=0) for part in (turned(key), value))
        scores = turned(query) @ key.swapaxes(1, 2) / np.sqrt(D) + future
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        attended = (scores / scores.sum(-1, keepdims=True)) @ value
        x = x + attended.swapaxes(0, 1).reshape(len(ids), H * D) @ weight(prefix + "self_attn.o_proj").T
        h = norm(x, prefix + "post_attention_layernorm")
        gate = h @ weight(prefix + "mlp.gate_proj").T
        x = (
            x
            + (gate / (1 + np.exp(-gate)) * (h @ weight(prefix + "mlp.up_proj").T))
            @ weight(prefix + "mlp.down_proj").T
        )
    return norm(x, "model.norm") @ embedding.T


def check_generate() -> None:
    assert generate("--kv-bits", "0") == ANSWER
    assert "Paris" in generate()


def check_chat() -> None:
    said = command(
        "chat", "--model", MODEL, "--temp", "0", "--kv-bits", "0", text=f"{QUESTION}\nAnd of Italy?\n"
    )
    assert _lines(said)[:2] == [ANSWER, "The capital of Italy is Rome."], said


def check_batch() -> None:
    questions = [QUESTION, "What is the capital of Italy?", "Write one sentence about the sea."]
    single = [
        command(
            "generate", "--model", MODEL, "--prompt", each, "--temp", "0", "-q", "--deterministic", "-m", "24"
        )
        for each in questions
    ]
    lines = "".join(json.dumps({"prompt": each}) + "\n" for each in questions)
    together = (
        "generate",
        "--model",
        MODEL,
        "--prompts-file",
        "-",
        "--temp",
        "0",
        "-q",
        "--deterministic",
        "-m",
        "24",
    )
    answers = [json.loads(line) for line in _lines(command(*together, "--json", text=lines))]
    assert [answer["text"].strip() for answer in answers] == [text.strip() for text in single], answers


def check_drafts() -> None:
    assert generate("--kv-bits", "0", "--draft", "prompt") == ANSWER


def check_ranks() -> None:
    for kind in ("pipeline", "tensor"):
        started = (
            "launch",
            "-n",
            "2",
            "--",
            "generate",
            "--model",
            MODEL,
            "--prompt",
            QUESTION,
            "--temp",
            "0",
        )
        assert command(*started, "-q", "--kv-bits", "0", "--parallel", kind).strip() == ANSWER, kind


def check_snapshot() -> None:
    """A second command goes on from the file of the first."""
    with tempfile.TemporaryDirectory() as folder:
        for bits in ("0", "8"):
            keep = ("--kv-bits", bits, "--prompt-cache-file", str(Path(folder, f"{bits}.safetensors")))
            first, second = generate(*keep), generate(*keep)
            assert "Paris" in first, first
            assert second == first


def check_report() -> None:
    found = json.loads(command("report", MODEL, "--tokens", "512", "--formats", "8g32,4g32", "--json"))
    for own in found["formats"]:
        for leg in ("prefill", "decode"):
            kld, same = own[leg]["mean_kld_nats"], 100 * own[leg]["top1"]
            print(f"       {own['format']}, {leg}: KLD {kld:.1e}, same top token {same:.1f} %")
            assert kld < MAX_KLD[own["format"]], own["format"]


def check_serve(clients_python: str | None) -> None:
    with serving("--model", MODEL, "--kv-bits", "0") as url:
        messages = [{"role": "user", "content": QUESTION}]
        common = {"model": MODEL, "temperature": 0, "max_tokens": 24}
        bodies: dict[str, dict[str, Any]] = {
            "/v1/chat/completions": common | {"messages": messages},
            "/v1/messages": common | {"messages": messages},
            "/v1/responses": {"model": MODEL, "temperature": 0, "max_output_tokens": 24, "input": QUESTION},
        }
        for path, body in bodies.items():
            answer = httpx2.post(url + path, json=body, timeout=COMMAND_S)
            assert answer.status_code == 200, answer.text
            assert "Paris" in answer.text, (path, answer.text)
        if clients_python is not None:
            program = Path(__file__).parent / "clients" / "capital.py"
            environment = os.environ | {"KVANT_URL": url, "KVANT_MODEL": MODEL, "NO_PROXY": "127.0.0.1"}
            subprocess.run([clients_python, str(program)], env=environment, check=True, timeout=COMMAND_S)


def check_several_models() -> None:
    """Eight clients ask one server for two models in turns; every answer is what its model answers alone."""
    bodies = [
        {"model": model, "prompt": text, "temperature": 0, "max_tokens": 16, "ignore_eos": True}
        for model in (MODEL, "pocket")
        for text in ("Once upon a time", "The sea is", "A fox named Pip")
    ]

    def ask(url: str, body: dict[str, Any]) -> str:
        answer = httpx2.post(f"{url}/v1/completions", json=body, timeout=COMMAND_S)
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == body["model"]
        return str(answer.json()["choices"][0]["text"])

    flags = ("--max-kv-size", "256", "--deterministic")
    alone = []
    for model in (MODEL, "pocket"):
        with serving("--model", model, *flags) as url:
            alone += [ask(url, body) for body in bodies if body["model"] == model]
    # Each model is unloaded when no request uses it, so the clients load both again and again.
    together = ("--model", "pocket", "--model", MODEL, "--keep-alive", "0", *flags)
    with serving(*together) as url, ThreadPoolExecutor(8) as threads:
        places = [(3 * client + 5 * turn) % len(bodies) for client in range(8) for turn in range(4)]
        answers = [*threads.map(lambda place: ask(url, bodies[place]), places)]
        wrong = [bodies[place] for place, text in zip(places, answers, strict=True) if text != alone[place]]
        assert not wrong, f"{len(wrong)} of {len(places)} answers are wrong: {wrong[0]}"
        metrics = httpx2.get(f"{url}/metrics").text
    print(
        "       " + ", ".join(line for line in _lines(metrics) if line.startswith("kvant_model_loads_total"))
    )


@contextmanager
def serving(*flags: str) -> Iterator[str]:
    """Run a server; yield its address."""
    serve = [sys.executable, "-m", "kvant", "serve", "--port", "0", *flags]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(serve, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            end = time.monotonic() + START_S
            while True:
                log.seek(0)
                said = log.read()
                found = [word for word in said.split() if word.startswith("http://127.0.0.1:")]
                if found:
                    break
                assert process.poll() is None, f"the server ended: {said[-500:]}"
                assert time.monotonic() < end, "the server does not start"
                time.sleep(0.1)
            yield found[0].rstrip("/.,")
        finally:
            process.terminate()
            process.wait(START_S)


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


def main() -> None:
    clients_python = sys.argv[1] if len(sys.argv) > 1 else None
    checks: dict[str, Callable[[], None]] = {
        "pull, models, plan": check_pull,
        "logits": check_logits,
        "generate": check_generate,
        "chat": check_chat,
        "batch": check_batch,
        "drafts": check_drafts,
        "two ranks": check_ranks,
        "snapshots": check_snapshot,
        "report": check_report,
        "serve": lambda: check_serve(clients_python),
        "several models": check_several_models,
    }
    failed = 0
    for name, check in checks.items():
        try:
            check()
        except (AssertionError, subprocess.SubprocessError, httpx2.HTTPError) as error:
            print(f"FAILED {name}: {str(error)[:1000]}", flush=True)
            failed += 1
        else:
            print(f"ok     {name}", flush=True)
    print(f"{len(checks) - failed} passed, {failed} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
