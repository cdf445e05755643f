"""The process of one engine: ``python -m kvant.tools.bench.worker``. It answers each JSON line with another.

    {"command": "load", "engine": an EngineSpec's attributes, "model": folder, "prefill_step_size"}
        -> {"dtype", "weight_bytes", "weight_bytes_read"}
    {"command": "run", "prompts": token ids of each request, "texts": the same as text, or nulls,
     "max_tokens", "together": whether to use the engine's way of serving several requests}
        -> the attributes of a recording's Run from arrivals_ms on
    {"command": "bandwidth"} -> {"gb_s"}
    any failure -> {"error": message}

Times are sent after a run has ended, so that the parent does not work during the measurement. Between runs
the process waits for a line. It ends when its standard input does, even in the middle of a run, so it never
outlives its parent.
"""

import gc
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

from kvant.errors import BenchError, one_line
from kvant.tools.bench.engines import EngineSpec

if TYPE_CHECKING:
    from kvant.tools.bench.adapters import MLXLM, Kvant
    from kvant.tools.bench.server_client import StreamingServer

EVENTS_A_TOKEN = 0.9  # at least; a character made of several tokens arrives in one event

Message = dict[str, Any]


class LocalEngine:
    def __init__(self, adapter: "Kvant | MLXLM") -> None:
        self._adapter = adapter
        total, read = adapter.weight_bytes
        self.ready = {"dtype": adapter.dtype, "weight_bytes": total, "weight_bytes_read": read}

    def run(
        self, prompts: list[list[int]], texts: list[str | None], max_tokens: int, together: bool
    ) -> Message:
        import mlx.core as mx

        arrivals: list[list[float]] = [[] for _ in prompts]
        token_ids: list[list[int]] = [[] for _ in prompts]
        adapter = self._adapter
        with _quiet():
            if together:
                tokens = adapter.streams(prompts, max_tokens)
            else:
                tokens = ((0, token) for token in adapter.tokens(prompts[0], max_tokens))
            with closing(tokens):
                started = time.perf_counter()
                cpu_started = time.process_time()
                for number, token in tokens:
                    arrivals[number].append((time.perf_counter() - started) * 1e3)
                    token_ids[number].append(token)
                cpu_ms = (time.process_time() - cpu_started) * 1e3
        figures: Message = {"arrivals_ms": arrivals, "token_ids": token_ids, "cpu_ms": cpu_ms}
        if not together:
            nbytes, room = adapter.cache_size()
            figures |= {"cache_bytes": nbytes, "cache_bytes_per_token": nbytes / room}
            if (drafts := adapter.drafts) is not None and drafts.steps:
                figures["drafts"] = {
                    name: getattr(drafts, name) for name in ("steps", "drafted", "accepted", "off")
                }
        if any(len(ids) != max_tokens for ids in token_ids):
            raise BenchError(
                f"generated {[len(ids) for ids in token_ids]} tokens; expected {max_tokens} each"
            )
        return figures | {"peak_memory_bytes": mx.get_peak_memory()}


@contextmanager
def _quiet() -> Iterator[None]:
    """Run the body without garbage from the previous run, and with garbage collection off."""
    import mlx.core as mx

    gc.collect()
    gc.disable()
    mx.clear_cache()
    mx.reset_peak_memory()
    try:
        yield
    finally:
        gc.enable()


class ServerEngine:
    """A server that streams text; its memory is unknown."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._clients: list[StreamingServer] = []  # one per request; each remembers what the server refuses
        self.ready = dict.fromkeys(("dtype", "weight_bytes", "weight_bytes_read"))  # unknown

    def run(self, prompts: list[list[int]], texts: list[str], max_tokens: int, together: bool) -> Message:
        """Request all completions at once, with a thread each; a server may end one early."""
        from kvant.tools.bench.server_client import StreamingServer

        while len(self._clients) < len(texts):
            self._clients.append(StreamingServer(self._spec.url or "", model=self._spec.server_model))
        started = time.perf_counter()

        def read(client: StreamingServer, text: str) -> list[float]:
            return [(time.perf_counter() - started) * 1e3 for _ in client.pieces(text, max_tokens)]

        with ThreadPoolExecutor(len(texts)) as threads:
            arrivals = list(threads.map(read, self._clients, texts))
        for client, prompt, times in zip(self._clients, prompts, arrivals, strict=False):
            _check(client, len(prompt), len(times), max_tokens)
        return {"arrivals_ms": arrivals}


def _check(client: "StreamingServer", prompt_tokens: int, events: int, max_tokens: int) -> None:
    read, written = (client.usage.get(f"{kind}_tokens") for kind in ("prompt", "completion"))
    if read is not None and abs(read - prompt_tokens) > 1:  # a beginning-of-text token may be added
        raise BenchError(
            f"the server read {read} tokens; expected {prompt_tokens}: does it serve another model?"
        )
    tokens = events if written is None else written
    if not EVENTS_A_TOKEN * tokens <= events <= tokens <= max_tokens:
        raise BenchError(
            f"the server sent {events} events for {tokens} tokens, of {max_tokens} requested; a token's "
            "latency can only be measured if every event is one token"
        )


def serve(commands: "queue.SimpleQueue[Message]", channel: TextIO) -> None:
    """Answer commands forever."""
    engine: LocalEngine | ServerEngine
    answer: Message
    while True:
        command = commands.get()
        try:
            kind = command.pop("command")
            if kind == "bandwidth":
                from kvant.tools.bench.bandwidth import copy_bandwidth_gb_s

                answer = {"gb_s": round(copy_bandwidth_gb_s(), 3)}
            elif kind == "load":
                engine = _load(
                    EngineSpec(**command["engine"]), Path(command["model"]), command["prefill_step_size"]
                )
                answer = engine.ready
            else:
                answer = engine.run(**command)
        except Exception as error:  # model files, libraries and devices raise anything; report one line
            answer = {"error": one_line(error)}
        print(json.dumps(answer), file=channel, flush=True)


def _load(spec: EngineSpec, folder: Path, prefill_step_size: int) -> LocalEngine | ServerEngine:
    if spec.name == "server":
        return ServerEngine(spec)
    from kvant.tools.bench.adapters import MLXLM, Kvant

    return LocalEngine((MLXLM if spec.name == "mlx-lm" else Kvant)(spec, folder, prefill_step_size))


def _claim_stdout() -> TextIO:
    """Return standard output for answers only; redirect what libraries print to standard error."""
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return channel


def _read_commands(stream: BinaryIO, commands: "queue.SimpleQueue[Message]") -> None:
    """Pass commands on; end the process at the end of the stream, whatever it is doing."""
    for line in stream:
        commands.put(json.loads(line))
    os._exit(0)


def main() -> None:
    """Serve standard input; the engine runs on the main thread, which mlx-lm needs."""
    channel = _claim_stdout()
    commands: queue.SimpleQueue[Message] = queue.SimpleQueue()
    threading.Thread(target=_read_commands, args=(sys.stdin.buffer, commands), daemon=True).start()
    serve(commands, channel)


if __name__ == "__main__":
    main()
