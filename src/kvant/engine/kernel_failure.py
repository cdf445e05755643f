"""A fused kernel that fails in the middle of an answer: one error that says how to go on without it."""

from collections.abc import Iterator
from contextlib import contextmanager

from kvant.cache import ModelCache
from kvant.cache.pool import Pool
from kvant.cache.single import SinglePool
from kvant.errors import KernelError, one_line


@contextmanager
def kernel_failures(cache: ModelCache | Pool | SinglePool) -> Iterator[None]:
    """Raise what MLX raises of a step as a KernelError, if the cache uses the fused kernel.

    MLX's errors are a RuntimeError or a ValueError itself, whatever failed. Arrays that the step changed may be lost.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if type(error) not in (RuntimeError, ValueError) or not uses_kernel(cache):
            raise
        raise KernelError(
            f"a step failed: {one_line(error)}; if that is the fused kernel, --kernels unfused (KVANT_KERNELS=unfused) "
            "computes without it"
        ) from error


def uses_kernel(cache: ModelCache | Pool | SinglePool) -> bool:
    """Whether a layer of it uses the fused kernel."""
    pool = cache if isinstance(cache, Pool) else cache.cache.pool if isinstance(cache, SinglePool) else cache.pool
    return any(layer.backend is not None for layer in pool.layers)
