"""A benchmark's worker with known figures. Its argument is a JSON object:

label, log: its name, and the file that gets a line when it starts and one for every run
first_ms, base_ms, slope_ms, round_ms: the latency of a run's first token; that of the others, at position p in
    round r, is base_ms + slope_ms * p + round_ms * r
fail: [the run, counted with warm-ups, how]
"""

import json
import os
import signal
import sys
import time
from typing import Any


def answer(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def fail(how: str, done: dict[str, Any], log: str) -> None:
    """Do what an engine should not do."""
    latencies = done["latencies_ms"]
    if how == "exits":
        print("noise\nout of memory", file=sys.stderr)
        sys.exit(3)
    elif how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "error":
        answer(kind="error", message="it cannot")
    elif how == "garbage":
        print("loading shards: 100%", flush=True)
    elif how == "short":
        answer(**done | {"latencies_ms": latencies[1:]})
    elif how == "lacking":
        answer(kind="done")
    elif how == "negative":
        answer(**done | {"latencies_ms": [-1.0, *latencies[1:]]})
    elif how == "unasked":
        answer(kind="ready")
    elif how in ("hangs", "hangs for good"):
        note(log, "hangs")
        if how == "hangs for good":
            time.sleep(600)
        signal.sigwait([signal.SIGINT])
        answer(kind="interrupted", latencies_ms=latencies[:3])


def note(log: str, *fields: Any) -> None:
    with open(log, "a", encoding="utf-8") as file:
        print(json.dumps(fields), file=file)


def main() -> None:
    """Answer until the input ends."""
    script = json.loads(sys.argv[1])
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    note(script["log"], "starts", script["label"], os.getpid())
    runs = 0
    rounds: dict[int, int] = {}  # by context; -1 is the warm-up
    for line in sys.stdin:
        command = json.loads(line)
        if command["command"] == "load":
            answer(kind="ready", dtype="float32", weight_bytes=3_000_000, weight_bytes_read=2_000_000)
            continue
        tokens, context = command["max_tokens"], len(command["prompt"])
        number = rounds.get(context, -1)
        rounds[context] = number + 1
        note(script["log"], "runs", script["label"], context, number, command["prompt"], tokens)
        drift = script["base_ms"] + script["round_ms"] * number
        done = {
            "kind": "done",
            "latencies_ms": [
                script["first_ms"],
                *(drift + script["slope_ms"] * (context + i) for i in range(1, tokens)),
            ],
            "token_ids": list(range(tokens)),
            "tokens": tokens,
            "peak_memory_bytes": 5_000_000,
            "cache_bytes": 64_000,
            "cache_bytes_per_token": 1000.0,
        }
        at, how = script["fail"]
        if runs == at:
            fail(how, done, script["log"])
        else:
            answer(**done)
        runs += 1


if __name__ == "__main__":
    main()
