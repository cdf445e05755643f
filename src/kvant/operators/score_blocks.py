"""When MLX's attention materializes a score matrix, and attention in blocks of queries, which bounds it."""

from collections.abc import Callable, Sequence
from typing import Literal

import mlx.core as mx

Device = Literal["cpu", "metal", "cuda"]
Mask = Literal["none", "causal", "boolean", "added"]

# Scores that one block of queries may materialize on a GPU. MLX keeps about ten operations in flight there,
# which is a few blocks. (Read from its source; no GPU was measured.)
GPU_BLOCK_SCORES = 64 * 1024 * 1024


def device_kind(on_cpu: bool) -> Device:
    """Return the device that MLX computes on, assuming Metal if no GPU is present."""
    if on_cpu:
        return "cpu"
    return "cuda" if mx.cuda.is_available() else "metal"


def makes_scores(
    device: Device, query: Sequence[int], tokens: Sequence[int], mask: Mask, dtype: mx.Dtype = mx.float32
) -> bool:
    """Return whether ``mx.fast.scaled_dot_product_attention`` materializes the scores (S, T) of every head.

    The conditions are those of MLX 0.32.4. For widths of 256 and 512 with 1,024 queries or more the answer
    depends on the GPU's generation; this function then says True. Sinks make no difference.

    Args:
        query: H, S and D.
        tokens: K, T and the width of values. S <= T.
        dtype: of queries, keys and values.
    """
    H, S, key_dim = query
    K, T, value_dim = tokens
    widths = (key_dim, value_dim)
    alike = key_dim == value_dim
    if device == "metal":
        if S > 8:  # MLX has kernels for 192 and 256, but considers materialized scores faster
            return not (alike and key_dim in (64, 72, 80, 96, 128)) and widths != (96, 64)
        if widths == (512, 512):
            return S > 1 or H != 8 * K or T < 1024 or mask in ("boolean", "added")
        known = (alike and key_dim in (64, 96, 128, 256)) or widths in ((96, 64), (192, 128))
        return not known or S * (H // K) > 32
    if device == "cuda":
        if mask == "boolean":  # MLX turns it into an added mask for every head
            return True
        in_half = dtype in (mx.float16, mx.bfloat16)
        if S > 1 and in_half and all(width % 8 == 0 and width <= 128 for width in widths):
            return False
        return not (alike and key_dim in (64, 96, 128)) or S > 3 or mask == "added"
    return True


def in_blocks(
    attend: Callable[[mx.array, int, int], mx.array],
    query: mx.array,
    tokens: int,
    *,
    block: int,
    causal: bool,
) -> mx.array:
    """Compute attention (B, H, S, Dv) of queries (B, H, S, D) to T tokens, ``block`` queries at a time.

    Args:
        attend: takes a block of queries, the index of its first query, and the number of leading tokens to
            attend to.
        causal: no query sees tokens after its own. The last query belongs to the last token.
    """
    S = query.shape[2]
    outputs: list[mx.array] = []
    for first in range(0, S, block):
        queries = query[:, :, first : first + block]
        if outputs:  # without this dependency MLX computes the scores of many blocks before it uses the first
            queries = mx.depends([queries], [outputs[-1]])[0]
        # later keys come after every query of this block
        outputs.append(attend(queries, first, tokens - S + first + queries.shape[2] if causal else tokens))
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=2)
