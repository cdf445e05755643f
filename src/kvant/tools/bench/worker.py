"""The process of one engine: ``python -m kvant.tools.bench.worker``, JSON lines in and out, one answer to each line.

    {"command": "load", "engine": an EngineSpec's attributes, "model": folder, "prefill_step_size"}
        -> {"kind": "ready", "dtype", "weight_bytes", "weight_bytes_read"}
    {"command": "run", "prompt": token ids, "text": the same as text or null, "max_tokens"}
        -> {"kind": "done", "latencies_ms", "token_ids", "tokens", "peak_memory_bytes", "cache_bytes",
            "cache_bytes_per_token", "attention_bytes_read", "attention_bytes_written", "attention_launches"}
        -> {"kind": "interrupted", "latencies_ms"} after a SIGINT
    anything that fails -> {"kind": "error", "message"}

Latencies are sent when the run has ended, so that nobody works while it is measured. Between runs the process waits
for a line. It ends when its standard input does, also in the middle of a run: it never outlives who started it.
"""

import gc
import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from kvant.errors import BenchError, one_line
from kvant.tools.bench.lines import ATTENTION

EVENTS_A_TOKEN = 0.9  # at least: a character of several tokens comes in one

Message = dict[str, Any]


@dataclass(slots=True)
class Timing:
    """What was generated, tokens or pieces of text, as far as it came."""

    items: list[Any] = field(default_factory=list)
    latencies_ms: list[float] = field(default_factory=list)


def time_items(
    items: Generator[Any, None, None], count: int | None, timing: Timing, clock: Callable[[], float] = time.perf_counter
) -> None:
    """Take ``count`` items, no more, or all, and note how long each took: the first since the call.

    Args:
        items: does nothing before the first is asked for; closed afterwards.
        timing: filled as the items come.
        clock: seconds.
    """
    with closing(items):
        previous = clock()
        for item in islice(items, count):
            now = clock()
            timing.latencies_ms.append((now - previous) * 1e3)
            timing.items.append(item)
            previous = now


class LocalEngine:
    """An engine that computes in this process."""

    def __init__(self, command: Message) -> None:
        from kvant.tools.bench.adapters import load_adapter
        from kvant.tools.bench.engines import EngineSpec

        self._adapter = load_adapter(
            EngineSpec(**command["engine"]), Path(command["model"]), command["prefill_step_size"]
        )

    def describe(self) -> Message:
        """What is known of the loaded model."""
        total, read = self._adapter.weight_bytes
        return {"dtype": self._adapter.dtype, "weight_bytes": total, "weight_bytes_read": read}

    def run(self, command: Message, timing: Timing) -> Message:
        """One measured run: no garbage of the last one, and no garbage collection while it lasts."""
        import mlx.core as mx

        count = command["max_tokens"]

        gc.collect()
        gc.disable()
        mx.clear_cache()
        mx.reset_peak_memory()
        try:
            time_items(self._adapter.tokens(command["prompt"], count), count, timing)
        finally:
            gc.enable()
        cache = self._adapter.cache_size()
        # The step that makes the token of position p attends to p tokens; positions are counted from the prompt's end.
        traffic = self._adapter.attention_traffic(len(command["prompt"]) + count // 2)
        if len(timing.items) < count:
            raise BenchError(f"generated {len(timing.items)} tokens; expected {count}")
        return {
            "token_ids": timing.items,
            "tokens": count,
            "peak_memory_bytes": mx.get_peak_memory(),
            "cache_bytes": cache.nbytes,
            "cache_bytes_per_token": cache.nbytes_per_token,
            "attention_bytes_read": None if traffic is None else traffic.bytes_read,
            "attention_bytes_written": None if traffic is None else traffic.bytes_written,
            "attention_launches": None if traffic is None else traffic.launches,
        }


class ServerEngine:
    """A server that streams text; what it holds is not known."""

    def __init__(self, command: Message) -> None:
        from kvant.tools.bench.streaming import StreamingServer

        self._server = StreamingServer(command["engine"]["url"], model=command["engine"]["server_model"])

    def describe(self) -> Message:
        """Nothing is known."""
        return {"dtype": None, "weight_bytes": None, "weight_bytes_read": None}

    def run(self, command: Message, timing: Timing) -> Message:
        """One completion, a latency an event; it may be shorter than asked for where a server cannot be told to go on.

        Raises:
            BenchError: the server read another number of tokens, or its events are not one token each.
        """
        wanted = len(command["prompt"])
        time_items(self._server.pieces(command["text"], command["max_tokens"]), None, timing)
        summary, events = self._server.summary, len(timing.items)
        if summary.prompt_tokens is not None and abs(summary.prompt_tokens - wanted) > 1:  # one that begins a text
            raise BenchError(
                f"the server read {summary.prompt_tokens} tokens; expected {wanted}: is the model another?"
            )
        tokens = events if summary.completion_tokens is None else summary.completion_tokens
        if not EVENTS_A_TOKEN * tokens <= events <= tokens <= command["max_tokens"]:
            raise BenchError(
                f"the server sent {events} events for {tokens} tokens, of {command['max_tokens']} asked for; "
                "a token's latency can only be measured where an event is a token"
            )
        unknown = ("token_ids", "peak_memory_bytes", "cache_bytes", "cache_bytes_per_token", *ATTENTION)
        return {"tokens": tokens} | dict.fromkeys(unknown)


def serve(commands: "queue.SimpleQueue[Message]", channel: TextIO) -> None:
    """Answer commands for ever."""
    engine: LocalEngine | ServerEngine | None = None
    while True:
        command = commands.get()
        timing = Timing()
        answer: Message
        try:
            if command["command"] == "load":
                server = command["engine"]["name"] == "server"
                engine = ServerEngine(command) if server else LocalEngine(command)
                answer = {"kind": "ready"} | engine.describe()
            else:
                assert engine is not None, "a run before a load"
                signal.signal(signal.SIGINT, signal.default_int_handler)
                figures = engine.run(command, timing)
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                answer = {"kind": "done", "latencies_ms": timing.latencies_ms} | figures
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            answer = {"kind": "interrupted", "latencies_ms": timing.latencies_ms}
        except Exception as error:  # of a model's files, another library, or a device: all are a line for the user
            answer = {"kind": "error", "message": one_line(error)}
        print(json.dumps(answer), file=channel, flush=True)


def _claim_stdout() -> TextIO:
    """Standard output for answers alone; what libraries print goes to standard error."""
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return channel


def _read_commands(stream: BinaryIO, commands: "queue.SimpleQueue[Message]") -> None:
    """Pass commands on; at the end of the stream end the process, whatever it is doing."""
    for line in stream:
        commands.put(json.loads(line))
    os._exit(0)


def main() -> None:
    """Serve standard input; in a main thread that is the engine's, which mlx-lm needs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # for runs alone
    channel = _claim_stdout()
    commands: queue.SimpleQueue[Message] = queue.SimpleQueue()
    threading.Thread(target=_read_commands, args=(sys.stdin.buffer, commands), daemon=True).start()
    serve(commands, channel)


if __name__ == "__main__":
    main()
