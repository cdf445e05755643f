"""A fused kernel that fails in the middle of an answer: the step is repeated without it, and the answer goes on."""

from collections.abc import Callable
from typing import Any, TypeVar

import mlx.core as mx

from kvant.cache import ModelCache, QuantizedKVCache
from kvant.cache.paged_layers import PoolLayer
from kvant.cache.pool import Pool
from kvant.engine.limits import go_back
from kvant.errors import one_line
from kvant.operators.dispatch import give_up, is_forced

T = TypeVar("T")


def repeated_unfused(work: Callable[[], T], cache: ModelCache | Pool, start_over: Callable[[], None]) -> T:
    """Do the work; where it fails through a cache that uses the fused kernel, once more without the kernel.

    What MLX raises is a RuntimeError or a ValueError itself, and is not told apart from others of that type. So only a
    repetition that succeeds blames the kernel: it is given up for the process, with one warning. Else its error is
    raised, and the layers stay as they are. Random numbers are drawn from the same state again.

    Args:
        work: MLX raises the errors of a kernel in it.
        cache: that it computes through. Where the kernel was asked for, its error is raised.
        start_over: brings everything back to where the work begins. Arrays that the failed step changed may be lost.
    """
    random_state: Any = mx.random.state[0]  # type: ignore[index]
    try:
        return work()
    except (RuntimeError, ValueError) as error:
        fused = [(layer, layer.backend) for layer in fused_layers(cache)]
        if type(error) not in (RuntimeError, ValueError) or not fused:
            raise
        failure = one_line(error)
    # Behind the handler: the error's traceback holds the arrays of the step that failed.
    for layer, _ in fused:
        layer.backend = None
    try:
        start_over()
        high, low = random_state.tolist()
        mx.random.seed(high << 32 | low)
        result = work()
    except BaseException:
        for layer, backend in fused:
            layer.backend = backend
        raise
    give_up(failure)
    return result


def bring_back(cache: ModelCache, num_tokens: int, feed: Callable[[list[int]], object]) -> None:
    """Have the first tokens of a cache of one sequence again, after a step that failed.

    MLX changes a cache in place. So an array whose change was not computed has lost what it held: the tokens are fed
    again then, into new arrays.

    Args:
        cache: without anything that holds its arrays.
        num_tokens: that it held and is to hold.
        feed: appends tokens and commits them.

    Raises:
        RuntimeError: the ids of the tokens are not known.
    """
    ids = cache.ids[0][:num_tokens]
    cache.end_step()
    try:
        mx.eval([layer.buffers for layer in cache.layers])
        is_whole = go_back(cache, num_tokens)
    except Exception:
        is_whole = False
        _renew(cache)
    if is_whole:
        return
    if len(ids) < num_tokens:
        raise RuntimeError(f"the ids of {len(ids)} of the cache's {num_tokens} tokens are known; it is empty now")
    if ids:
        feed(ids)


def fused_layers(cache: ModelCache | Pool) -> list[QuantizedKVCache | PoolLayer]:
    """The layers that use the fused kernel, unless it was asked for."""
    layers = [layer for layer in cache.layers if isinstance(layer, QuantizedKVCache | PoolLayer)]
    return [layer for layer in layers if layer.backend is not None and not is_forced(layer.kernels)]


def _renew(cache: ModelCache) -> None:
    """Have no tokens, in new arrays."""
    cache.reset()
    layers = [layer for layer in cache.layers if isinstance(layer, QuantizedKVCache)]
    for layer in layers:
        layer.settle()
        layer.arrays[:] = [mx.zeros(array.shape, array.dtype) for array in layer.arrays]
    mx.eval([layer.arrays for layer in layers])  # allocated when the last of the old ones is gone
