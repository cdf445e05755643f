"""Reporting and recording of the fused kernel's failures in a step."""

from collections.abc import Iterator
from contextlib import contextmanager

from kvant.cache.pool import Pool
from kvant.errors import KernelError, one_line
from kvant.operators import kernel_record


@contextmanager
def kernel_failures(pool: Pool) -> Iterator[None]:
    """Raise MLX's errors in a step as a KernelError, if the pool uses the fused kernel.

    MLX raises a plain RuntimeError or ValueError for any failure. Arrays that the step changed may be lost.
    The failure is recorded, so that later caches of these formats, in any process, avoid the kernel.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if type(error) not in (RuntimeError, ValueError) or pool.backend is None:
            raise
        problem = f"a step failed: {one_line(error)}"
        kernel_record.keep(
            {layer.use: problem for layer in pool.layers if layer.backend is not None}, pool.backend
        )
        raise KernelError(
            f"{problem}; if that is the fused kernel, --kernels unfused (KVANT_KERNELS=unfused) computes "
            f"without it"
        ) from error
