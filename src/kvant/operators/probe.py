"""Runs what a cache needs of the fused kernel once, before the first token.

MLX compiles an instance of the kernel when it first runs. A text that this device's compiler refuses, or a threadgroup
that is too large for it, would end a run there. Small arrays show it: an instance depends on no size, except that MLX
keeps inputs of fewer than 8 elements in Metal's constant memory.
"""

from dataclasses import dataclass
from itertools import product
from typing import Any

import mlx.core as mx

from kvant.operators.bias_split import BiasSplit
from kvant.operators.cached_attention import stored_tokens
from kvant.operators.fused_attention import attend_fused
from kvant.operators.kernels.attend import MAX_NEW_TOKENS, PAGE_SIZE
from kvant.operators.kernels.launch import Backend
from kvant.operators.paged_kernel import step_pages
from kvant.operators.quantization import quantized_dtype

KV_HEADS = 4
ROWS = 512  # so many that the second pass has its largest threadgroup
ANY_HEADS = (1, 8)  # query heads of a kv head, where they are not known: they give every shape of a threadgroup


@dataclass(frozen=True, slots=True)
class KernelUse:
    """How a layer calls the kernel. Uses of layers that call it alike are equal.

    Attributes:
        head_dim, value_dim: of keys and of values.
        dtype: of queries, and at 0 bits of keys and values.
        quant_bit, quant_group, scale_dtype: of the cache.
        heads: query heads of a kv head, H/K; None: not known.
        pairs: rotary pairs of a bias split; None: there is none.
        mask: whether a mask is given.
        sinks: whether learned sinks may be given, in the queries' dtype. Tried besides.
        paged: whether the cache is a pool.
        options: further arguments of :func:`kvant.operators.fused_attention.attend_fused`, by name; no arrays.
    """

    head_dim: int
    value_dim: int
    dtype: mx.Dtype
    quant_bit: int
    quant_group: int
    scale_dtype: mx.Dtype = mx.float16
    heads: int | None = None
    pairs: int | None = None
    mask: bool = False
    sinks: bool = False
    paged: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        values = "" if self.value_dim == self.head_dim else f" with values of {self.value_dim}"
        kind = f"{self.quant_bit} bits g{self.quant_group}" if self.quant_bit else "floats"
        kinds = (("bias split", self.pairs is not None), ("mask", self.mask), ("pages", self.paged))
        extras = [*(name for name, on in kinds if on), *(name for name, _ in self.options)]
        dtype = str(self.dtype).removeprefix("mlx.core.")
        return ", ".join([f"heads of {self.head_dim}{values}", kind, dtype, *extras])


_tried: dict[tuple[KernelUse, Backend], str | None] = {}


def probe_failure(use: KernelUse, backend: Backend) -> str | None:
    """Why the kernel does not run as a layer uses it; None: it does. Each use is tried once in a process.

    Every number of new tokens that it takes is tried, on zeros.
    """
    key = (use, backend)
    if key not in _tried:
        heads = [use.heads] if use.heads else ANY_HEADS
        calls = product(heads, range(1, MAX_NEW_TOKENS + 1), {False, use.sinks})
        _tried[key] = next(filter(None, (_failure(use, *call, backend) for call in calls)), None)
    return _tried[key]


def first_words(error: Exception) -> str:
    """An error of a compiler or a driver in one line."""
    return " ".join(str(error).split())[:500] or type(error).__name__


def _failure(use: KernelUse, heads: int, new_tokens: int, sinks: bool, backend: Backend) -> str | None:
    try:
        mx.eval(_run(use, heads, new_tokens, sinks, backend))
        mx.synchronize()  # a failure is raised here, or when it was queued
    except Exception as error:  # of a compiler or a driver: any
        extra = ", sinks" if sinks else ""
        return f"{use}{extra}, {heads * new_tokens} queries of a kv head: {first_words(error)}"
    return None


def _run(use: KernelUse, heads: int, S: int, sinks: bool, backend: Backend) -> list[mx.array]:
    """Append and attend once, to all rows."""
    D, K, bits, group = use.head_dim, KV_HEADS, use.quant_bit, use.quant_group
    sides, width = (2, D) if use.value_dim == D else (1, D + use.value_dim)
    shape = (sides, K, ROWS) if use.paged else (1, 1, sides, K, ROWS)
    stored = [
        mx.zeros((*shape, width // 2 if bits == 4 else width), quantized_dtype(bits) if bits else use.dtype),
        *([mx.zeros((*shape, width // group), use.scale_dtype)] if bits else []),
    ]
    key, value = (mx.zeros((1, K, S, dim), use.dtype) for dim in (D, use.value_dim))
    appended = stored_tokens(key, value, stored, quant_bit=bits, quant_group=group, backend=backend)
    options: dict[str, Any] = dict(use.options)
    if use.value_dim != D:
        options["value_dim"] = use.value_dim
    offset = mx.array([ROWS - S], mx.int32)
    if use.paged:
        pages = step_pages([list(range(ROWS // PAGE_SIZE))], [0], [ROWS - S], ROWS, None)
        options |= {"pages": pages.table, "first": pages.first, "rows": pages.rows}
        offset = pages.offset
    if sinks:
        options["sinks"] = mx.zeros(max(ANY_HEADS) * K, use.dtype)  # not small, as a model's heads are not
    if use.mask:
        options["mask"] = mx.ones((S, ROWS), mx.bool_)
    if use.pairs is not None:
        options["bias_split"] = BiasSplit(
            mx.zeros((K, 2, use.pairs)),
            tuple(range(use.pairs)),
            mx.zeros((2, use.pairs, ROWS)),
            mx.zeros((K, use.value_dim)),
        )
    output = attend_fused(
        mx.zeros((1, heads * K, S, D), use.dtype),
        stored[0],
        stored[1] if bits else None,
        offset,
        quant_bit=bits,
        quant_group=group,
        backend=backend,
        **options,
    )
    return [*appended, output]
