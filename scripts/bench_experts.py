"""A decode step and a prefill of 256 tokens through experts: kvant's native Qwen3-MoE, mlx-lm's
model with kvant's cache (bridged), and mlx-lm's model with its own.

Run: python scripts/bench_experts.py [rounds]    (default: 5)

Each engine has its own cache in full precision, float32 arithmetic and the same BLAS. Engines take turns in one run;
times are medians, and a ratio is the median over rounds of an engine's time divided by mlx-lm's of the same round.
"""

import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import kvant.blas  # isort: skip  (before MLX: it loads a faster one)

import mlx.core as mx
import mlx_lm
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from kvant.bridge.rope import rotate_by_matrices
from kvant.models import load_decoder
from kvant.tools.bench.shapes import Shape, write_random

PROMPT, STEPS = 256, 16  # tokens
TINY = Shape(
    "tiny, 8 experts", "qwen3_moe", 64, 2, 4, 2, 32, 128, 1000, True,
    num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64,
)  # fmt: skip
SHAPES = [
    TINY,
    replace(
        TINY, name="64 experts", hidden_size=512, num_hidden_layers=4, num_attention_heads=8, head_dim=64,
        intermediate_size=512, num_experts=64, num_experts_per_tok=8, moe_intermediate_size=256,
    ),
]  # fmt: skip
BASELINE = "mlx-lm"


class Engine(Protocol):
    """A model with a fresh cache for each round."""

    def start(self) -> Callable[[mx.array], mx.array]:
        """A function (1, S) token ids -> logits (1, S, vocab), which appends to its cache."""


class Native:
    """kvant's decoder and cache."""

    def __init__(self, folder: Path) -> None:
        self._model = load_decoder(folder)

    def start(self) -> Callable[[mx.array], mx.array]:
        """As :class:`Engine`."""
        cache = self._model.make_cache(PROMPT + STEPS, quant_bit=0)
        return lambda ids: self._model(ids, cache=cache)


class MLXLM:
    """mlx-lm's model and cache, in float32: its products of experts know no other dtype on a CPU."""

    def __init__(self, folder: Path) -> None:
        self._model: Any = load_model(folder)[0]
        self._model.set_dtype(mx.float32)
        mx.eval(self._model.parameters())

    def start(self) -> Callable[[mx.array], mx.array]:
        """As :class:`Engine`."""
        cache = make_prompt_cache(self._model)
        return lambda ids: self._model(ids, cache=cache)


class Bridged(MLXLM):
    """mlx-lm's model as kvant bridges a folder: its cache, and positions turned by matrices."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        rotate_by_matrices(self._model)

    def start(self) -> Callable[[mx.array], mx.array]:
        """As :class:`Engine`."""
        cache = kvant.make_prompt_cache(self._model, PROMPT + STEPS, kv_bits=0)
        return lambda ids: self._model(ids, cache=cache)


ENGINES: dict[str, Callable[[Path], Engine]] = {BASELINE: MLXLM, "bridged": Bridged, "kvant": Native}


def one_round(engine: Engine) -> tuple[float, float]:
    """Milliseconds of the prefill, and the median of a step's."""
    step = engine.start()
    started = time.perf_counter()
    token = step(mx.array([[7 * i % 1000 for i in range(PROMPT)]]))[:, -1:].argmax(axis=-1)
    mx.eval(token)
    prefill = time.perf_counter() - started
    times = []
    for _ in range(STEPS):
        started = time.perf_counter()
        token = step(token)[:, -1:].argmax(axis=-1)
        mx.eval(token)
        times.append(time.perf_counter() - started)
    return prefill * 1e3, statistics.median(times) * 1e3


def main() -> None:
    """Print a row for each shape, weight format and engine."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    print(f"{time.strftime('%Y-%m-%d')}, {mx.device_info()['device_name']}, {platform.machine()} {platform.system()}")
    print(f"MLX {mx.__version__}, mlx-lm {mlx_lm.__version__}, BLAS {kvant.blas.loaded()}, {rounds} rounds")
    print(f"{'shape':16} {'weights':8} {'engine':8} {'prefill, ms':>12} {'ratio':>6} {'step, ms':>9} {'ratio':>6}")
    for shape in SHAPES:
        for bits in (0, 4):
            with tempfile.TemporaryDirectory() as name:
                write_random(shape, Path(name), bits=bits)
                engines = {engine: make(Path(name)) for engine, make in ENGINES.items()}
            for engine in engines.values():
                one_round(engine)  # to warm up
            found: dict[str, list[tuple[float, float]]] = {engine: [] for engine in engines}
            for number in range(rounds):
                for engine in engines if number % 2 else reversed(engines):
                    found[engine].append(one_round(engines[engine]))
            for engine, times in found.items():
                row = f"{shape.name:16} {f'{bits} bits' if bits else 'float32':8} {engine:8}"
                for place, width in ((0, 12), (1, 9)):
                    ratios = [mine[place] / theirs[place] for mine, theirs in zip(times, found[BASELINE], strict=True)]
                    row += f" {statistics.median(t[place] for t in times):{width}.2f} {statistics.median(ratios):6.2f}"
                print(row, flush=True)


if __name__ == "__main__":
    main()
