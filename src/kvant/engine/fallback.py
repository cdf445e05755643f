"""A fused kernel that fails in the middle of an answer: the step is repeated without it, and the answer goes on."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import mlx.core as mx

from kvant.cache import ModelCache
from kvant.engine.limits import go_back
from kvant.errors import one_line
from kvant.operators.dispatch import give_up
from kvant.operators.kernels.launch import Backend

T = TypeVar("T")


class FusedLayer(Protocol):
    """A layer whose attention is fused.

    Attributes:
        backend: runs the fused kernel; None: the layer is unfused.
    """

    backend: Backend | None


class Layers(Protocol):
    """A cache or a pool."""

    @property
    def fused_layers(self) -> Sequence[FusedLayer]:
        """The layers that use the fused kernel, unless it was asked for."""


def repeated_unfused(work: Callable[[], T], cache: Layers, start_over: Callable[[], None]) -> T:
    """Do the work; where it fails through a cache that uses the fused kernel, once more without the kernel.

    What MLX raises is a RuntimeError or a ValueError itself, and is not told apart from others of that type. So only a
    repetition that succeeds blames the kernel: it is given up for the process, with one warning. Else its error is
    raised, and the layers stay as they are. Random numbers are drawn from the same state again.

    Args:
        work: MLX raises the errors of a kernel in it.
        cache: that it computes through.
        start_over: brings everything back to where the work begins. Arrays that the failed step changed may be lost.
    """
    random_state: Any = mx.random.state[0]  # type: ignore[index]
    try:
        return work()
    except (RuntimeError, ValueError) as error:
        fused = [(layer, layer.backend) for layer in cache.fused_layers]
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
        cache.renew()
    if is_whole:
        return
    if len(ids) < num_tokens:
        raise RuntimeError(f"the ids of {len(ids)} of the cache's {num_tokens} tokens are known; it is empty now")
    if ids:
        feed(ids)
