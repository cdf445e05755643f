"""Whether products have the same bits for any number of rows, which tests of exact equality need."""

import ctypes

import kvant.blas  # isort: skip  (before MLX: it loads a faster BLAS)
import mlx.core as mx


def has_small_products() -> bool:
    """Whether a row of a product is in the same bits for any number of rows, as of OpenBLAS's kernels for
    AVX-512.
    """
    if mx.default_device().type != mx.cpu or not kvant.blas.loaded().startswith("OpenBLAS"):
        return False
    core = ctypes.CDLL(None).scipy_openblas_get_corename
    core.restype = ctypes.c_char_p
    return core() in (b"SkylakeX", b"Cooperlake", b"SapphireRapids")
