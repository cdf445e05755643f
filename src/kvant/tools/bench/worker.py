"""The process of one engine: ``python -m kvant.tools.bench.worker``, JSON lines in and out, one answer to each line.

    {"command": "load", "engine": an EngineSpec's attributes, "model": folder, "prefill_step_size"}
        -> {"kind": "ready", "dtype", "weight_bytes", "weight_bytes_read"}
    {"command": "run", "prompt": token ids, "text": the same as text or null, "max_tokens", "answer": token ids to
     generate; without it the likeliest}
        -> {"kind": "done", "latencies_ms", "token_ids", "tokens", "peak_memory_bytes", "cache_bytes",
            "cache_bytes_per_token", "drafts": what they did, where there are any}
        -> {"kind": "interrupted", "latencies_ms"} after a SIGINT
    {"command": "streams", "prompts": token ids of each, "texts": the same as text or null, "max_tokens"}
        -> {"kind": "done", "arrivals_ms", "token_ids", "cpu_ms", "peak_memory_bytes"}
    any failure -> {"kind": "error", "message"}

Latencies are sent when the run has ended, so that nobody works while it is measured. Between runs the process waits
for a line. It ends when its standard input does, also in the middle of a run: it never outlives its parent.
"""

import gc
import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

from kvant.errors import BenchError, one_line
from kvant.tools.bench.engines import EngineSpec
from kvant.tools.bench.latency import timed

if TYPE_CHECKING:
    from kvant.tools.bench.adapters import MLXLM, Kvant
    from kvant.tools.bench.streaming import StreamingServer

EVENTS_A_TOKEN = 0.9  # at least: a character of several tokens comes in one

Message = dict[str, Any]
Taken = list[tuple[Any, float]]  # tokens or pieces of text, each with its latency in ms


def take(items: Generator[Any, None, None], count: int | None, taken: Taken) -> None:
    """Take ``count`` items, no more, or all of them; close ``items``. An interruption leaves ``taken`` as it is."""
    with closing(items):
        for pair in timed(islice(items, count)):
            taken.append(pair)


class LocalEngine:
    """An engine that computes in this process."""

    def __init__(self, adapter: "Kvant | MLXLM") -> None:
        self._adapter = adapter

    def describe(self) -> Message:
        """The loaded model's type and sizes."""
        total, read = self._adapter.weight_bytes
        return {"dtype": self._adapter.dtype, "weight_bytes": total, "weight_bytes_read": read}

    def run(self, command: Message, taken: Taken) -> Message:
        """One measured run."""
        import mlx.core as mx

        count = command["max_tokens"]
        with _quiet():
            answer = {"answer": command["answer"]} if "answer" in command else {}
            take(self._adapter.tokens(command["prompt"], count, **answer), count, taken)
        nbytes, room = self._adapter.cache_size()
        if len(taken) < count:
            raise BenchError(f"generated {len(taken)} tokens; expected {count}")
        drafts = self._adapter.drafts
        kept = ("steps", "drafted", "accepted", "off")  # the tokens are counted here
        more = {} if drafts is None else {"drafts": {name: getattr(drafts, name) for name in kept}}
        memory = {"peak_memory_bytes": mx.get_peak_memory(), "cache_bytes": nbytes}
        ids = [token for token, _ in taken]
        return {"token_ids": ids, "tokens": count, **memory, "cache_bytes_per_token": nbytes / room, **more}

    def streams(self, command: Message) -> Message:
        """One measured run of several requests at once."""
        import mlx.core as mx

        prompts, count = command["prompts"], command["max_tokens"]
        arrivals: list[list[float]] = [[] for _ in prompts]
        token_ids: list[list[int]] = [[] for _ in prompts]
        with _quiet(), closing(self._adapter.streams(prompts, count)) as tokens:
            started, cpu_started = time.perf_counter(), time.process_time()
            for number, token in tokens:
                arrivals[number].append(round((time.perf_counter() - started) * 1e3, 3))
                token_ids[number].append(token)
            cpu_ms = (time.process_time() - cpu_started) * 1e3
        if any(len(ids) != count for ids in token_ids):
            raise BenchError(f"generated {[len(ids) for ids in token_ids]} tokens; expected {count} each")
        peak = mx.get_peak_memory()
        return {"arrivals_ms": arrivals, "token_ids": token_ids, "cpu_ms": cpu_ms, "peak_memory_bytes": peak}


@contextmanager
def _quiet() -> Iterator[None]:
    """A ``with`` for a measured run: no garbage of the last one, and no garbage collection while it lasts."""
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
    """A server that streams text; its memory is not known."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._clients: list[StreamingServer] = []  # one a stream; each remembers what the server refuses

    def describe(self) -> Message:
        """Nothing is known."""
        return dict.fromkeys(("dtype", "weight_bytes", "weight_bytes_read"))

    def run(self, command: Message, taken: Taken) -> Message:
        """One completion, a latency an event; shorter than asked for if the server cannot be told to go on.

        Raises:
            BenchError: the server read another number of tokens, or its events are not one token each.
        """
        [client] = self._connected(1)
        take(client.pieces(command["text"], command["max_tokens"]), None, taken)
        tokens = self._checked(client, len(command["prompt"]), len(taken), command["max_tokens"])
        unknown = ("token_ids", "peak_memory_bytes", "cache_bytes", "cache_bytes_per_token")
        return {"tokens": tokens} | dict.fromkeys(unknown)

    def streams(self, command: Message) -> Message:
        """Completions that are asked for at once, each by a thread of its own.

        Raises:
            BenchError: as those of :meth:`run`.
        """
        prompts, texts, count = command["prompts"], command["texts"], command["max_tokens"]
        clients = self._connected(len(texts))
        arrivals: list[list[float]] = [[] for _ in texts]
        started = time.perf_counter()

        def read(number: int) -> None:
            for _ in clients[number].pieces(texts[number], count):
                arrivals[number].append(round((time.perf_counter() - started) * 1e3, 3))

        with ThreadPoolExecutor(len(texts)) as threads:
            list(threads.map(read, range(len(texts))))
        for client, prompt, times in zip(clients, prompts, arrivals, strict=True):
            self._checked(client, len(prompt), len(times), count)
        return {"arrivals_ms": arrivals} | dict.fromkeys(("token_ids", "cpu_ms", "peak_memory_bytes"))

    def _connected(self, count: int) -> "list[StreamingServer]":
        """So many clients."""
        from kvant.tools.bench.streaming import StreamingServer

        while len(self._clients) < count:
            self._clients.append(StreamingServer(self._spec.url or "", model=self._spec.server_model))
        return self._clients[:count]

    @staticmethod
    def _checked(client: "StreamingServer", wanted: int, events: int, max_tokens: int) -> int:
        """Tokens of a completion.

        Args:
            wanted: tokens of the prompt.
            events: that came.
        """
        usage = client.usage
        if usage.prompt_tokens is not None and abs(usage.prompt_tokens - wanted) > 1:  # one that begins a text
            raise BenchError(f"the server read {usage.prompt_tokens} tokens; expected {wanted}: is the model another?")
        tokens = events if usage.completion_tokens is None else usage.completion_tokens
        if not EVENTS_A_TOKEN * tokens <= events <= tokens <= max_tokens:
            raise BenchError(
                f"the server sent {events} events for {tokens} tokens, of {max_tokens} asked for; "
                "a token's latency can only be measured where an event is a token"
            )
        return tokens


def serve(commands: "queue.SimpleQueue[Message]", channel: TextIO) -> None:
    """Answer commands for ever."""
    engine: LocalEngine | ServerEngine | None = None
    while True:
        command = commands.get()
        taken: Taken = []
        answer: Message
        try:
            if command["command"] == "load":
                engine = _load(command)
                answer = {"kind": "ready"} | engine.describe()
            else:
                assert engine is not None, "a run before a load"
                signal.signal(signal.SIGINT, signal.default_int_handler)
                together = command["command"] == "streams"
                figures = engine.streams(command) if together else engine.run(command, taken)
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                answer = {"kind": "done", "latencies_ms": [ms for _, ms in taken]} | figures
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            answer = {"kind": "interrupted", "latencies_ms": [ms for _, ms in taken]}
        except Exception as error:  # of a model's files, another library, or a device: all are a line for the user
            answer = {"kind": "error", "message": one_line(error)}
        print(json.dumps(answer), file=channel, flush=True)


def _load(command: Message) -> LocalEngine | ServerEngine:
    spec = EngineSpec(**command["engine"])
    if spec.name == "server":
        return ServerEngine(spec)
    from kvant.tools.bench.adapters import MLXLM, Kvant

    adapter = MLXLM if spec.name == "mlx-lm" else Kvant
    return LocalEngine(adapter(spec, Path(command["model"]), command["prefill_step_size"]))


def _claim_stdout() -> TextIO:
    """Standard output for answers alone; text that libraries print goes to standard error."""
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return channel


def _read_commands(stream: BinaryIO, commands: "queue.SimpleQueue[Message]") -> None:
    """Pass commands on; at the end of the stream end the process, whatever it is doing."""
    for line in stream:
        commands.put(json.loads(line))
    os._exit(0)


def main() -> None:
    """Serve standard input; the engine has the main thread, which mlx-lm needs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # for runs alone
    channel = _claim_stdout()
    commands: queue.SimpleQueue[Message] = queue.SimpleQueue()
    threading.Thread(target=_read_commands, args=(sys.stdin.buffer, commands), daemon=True).start()
    serve(commands, channel)


if __name__ == "__main__":
    main()
