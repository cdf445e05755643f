"""Recordings made up for tests: every latency is known."""

from collections.abc import Callable, Sequence
from typing import Any

from kvant.tools.bench.recording import Engine, Header, Recorder, Recording, Run, Token

HEADER: dict[str, Any] = {
    "date": "2026-01-31T12:00:00+00:00",
    "kvant": "0.1.0",
    "mlx": "0.32.4",
    "mlx_lm": "0.32.2",
    "python": "3.11.7",
    "system": "Linux x86_64",
    "device": "a processor",
    "cores": 2,
    "copy_bandwidth_gb_s": 10.0,
    "command": "bench --model pocket",
    "model": "pocket",
    "blas": "OpenBLAS",
    "seed": 0,
    "baseline": "slow",
}
ENGINE: dict[str, Any] = {
    "name": "kvant",
    "kv_bits": 8,
    "kv_group_size": 32,
    "dtype": "float32",
    "weight_bytes": 12_000_000,
    "weight_bytes_read": 10_000_000,
}
RUN: dict[str, Any] = {
    "token_ids": None,
    "peak_memory_bytes": 30_000_000,
    "cache_bytes": 4_000_000,
    "cache_bytes_per_token": 2000.0,
}

Latency = Callable[[str, int, int, int], float]  # of engine, run, context, position


def record(
    recorder: Recorder,
    latency: Latency,
    *,
    engines: Sequence[str] = ("fast", "slow"),
    rounds: int = 3,
    contexts: Sequence[int] = (8,),
    tokens: int = 6,
    **header: Any,
) -> Recording:
    """Write a whole recording of these engines, with the latencies that the function gives."""
    recorder.write(Header(**HEADER | header))
    for label in engines:
        recorder.write(Engine(engine=label, **ENGINE))
    for run in range(rounds):
        for context in contexts:
            for label in engines:
                write_tokens(
                    recorder,
                    label,
                    run,
                    context,
                    [latency(label, run, context, p) for p in range(context, context + tokens)],
                )
                recorder.write(Run(engine=label, run=run, context=context, tokens=tokens, **RUN))
    return recorder.recording


def write_tokens(recorder: Recorder, label: str, run: int, context: int, latencies_ms: Sequence[float]) -> None:
    """One run's tokens, without its end."""
    for position, latency_ms in enumerate(latencies_ms, start=context):
        recorder.write(Token(engine=label, run=run, context=context, position=position, latency_ms=latency_ms))
