"""Processes that save two caches over and over under one name, until they are killed.

    python snapshot_writer.py PATH

For each line of its input, a time in seconds, it starts such a process, kills it by SIGKILL after that time,
and prints a line. They are forks, which start at once: MLX has no work before.
"""

import os
import signal
import sys
import time

import kvant  # isort: skip  # noqa: F401  (before MLX: it loads a faster BLAS)
import mlx.core as mx

from kvant.cache import ModelCache
from kvant.cache.layer_format import LayerFormat
from kvant.cache.pool import Pool, single_sizes
from kvant.operators.key_transform import PLAIN

SIZES = (300, 700)  # tokens of the two; each token of a snapshot of n is n


def make(reserved: int = 1000, layers: int = 2) -> ModelCache:
    """An empty cache of two heads of 64."""
    own = LayerFormat("quantized", 2, 64, 64, 8, 32, "I8", "F16")
    return ModelCache(Pool([own] * layers, [PLAIN] * layers, **single_sizes(reserved), make_cache=make))


def caches() -> list[ModelCache]:
    made = []
    for size in SIZES:
        cache = make()
        cache.batch.begin(mx.zeros((1, size), mx.int32))
        x = mx.full((1, 2, size, 64), float(size))
        for layer in cache:
            mx.eval(layer.multi_head_cache_attention(x, x, x))
        cache.batch.commit(ids=[[size] * size])
        made.append(cache)
    return made


def write(path: str, ready: int) -> None:
    """Without an end; a byte says that it begins."""
    made = caches()
    os.write(ready, b"x")
    while True:
        for cache in made:
            cache.save(path, {"size": str(cache.offset)})


def main(path: str) -> None:
    for line in sys.stdin:
        first, last = os.pipe()
        pid = os.fork()
        if not pid:
            write(path, last)
        os.read(first, 1)
        time.sleep(float(line))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        print("killed", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
