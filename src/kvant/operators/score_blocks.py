"""When MLX's attention makes a score matrix, and attention in blocks of queries, which bounds it."""

from collections.abc import Callable, Sequence
from typing import Literal

import mlx.core as mx

Device = Literal["cpu", "metal", "cuda"]
Mask = Literal["none", "causal", "boolean", "added"]

# Scores that one block of queries may make on a GPU. MLX has about ten of its operations under way there,
# which is a few blocks. (By its source; no GPU was measured.)
GPU_BLOCK_SCORES = 64 * 1024 * 1024


def device_kind(on_cpu: bool) -> Device:
    """What MLX computes on; of a GPU that is not here, a Mac's."""
    if on_cpu:
        return "cpu"
    return "cuda" if mx.cuda.is_available() else "metal"


def makes_scores(
    device: Device, query: Sequence[int], tokens: Sequence[int], mask: Mask, dtype: mx.Dtype = mx.float32
) -> bool:
    """Whether ``mx.fast.scaled_dot_product_attention`` makes an array of queries times tokens for every query
    head.

    The conditions are those of MLX 0.32.4. Some further cases of no scores are not counted on: widths of 256
    and 512 with 1,024 queries or more, which depend on the GPU's generation. Sinks change nothing.

    Args:
        query: H, S and D.
        tokens: K, T and the width of values. S <= T.
        dtype: of queries, keys and values.
    """
    (H, S, key_dim), (K, T, value_dim) = query, tokens
    widths, alike = (key_dim, value_dim), key_dim == value_dim
    if device == "metal":
        if S > 8:  # kernels for 192 and 256 are there, and MLX takes scores to be faster
            return not (alike and key_dim in (64, 72, 80, 96, 128)) and widths != (96, 64)
        if widths == (512, 512):
            return S > 1 or H != 8 * K or T < 1024 or mask in ("boolean", "added")
        known = (alike and key_dim in (64, 96, 128, 256)) or widths in ((96, 64), (192, 128))
        return not known or S * (H // K) > 32
    if device == "cuda":
        if mask == "boolean":  # it becomes an added one of every head
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
    """Attention (B, H, S, Dv) of queries (B, H, S, D) to T tokens, ``block`` queries at a time.

    Args:
        attend: attention of some queries, of which it is told the first, to the first so many tokens.
        causal: no query sees a token behind its own. The last query belongs to the last token.
    """
    S = query.shape[2]
    outputs: list[mx.array] = []
    for first in range(0, S, block):
        own = query[:, :, first : first + block]
        if outputs:  # without this dependency MLX makes the scores of many blocks before it uses the first
            own = mx.depends([own], [outputs[-1]])[0]
        # later keys follow every query of this block
        outputs.append(attend(own, first, tokens - S + first + own.shape[2] if causal else tokens))
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=2)
