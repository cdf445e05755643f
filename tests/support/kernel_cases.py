"""Calls of the fused kernel that together cover pairs of options; how they run on the host, and what they must give.

B batch, S new tokens, T cached tokens read, H query heads, K kv heads, D head_dim, G group size, P rotary pairs.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kvant.operators.bias_split import BiasSplit
from kvant.operators.fused_attention import attend_fused
from kvant.operators.kernels import attend as attend_module
from kvant.operators.kernels import launch as launch_module
from kvant.operators.kernels.attend import GROUPS, HEAD_DIMS, threadgroup_shape
from support import oracle
from support.counts import count
from support.metal_host import FORWARD, REVERSE, on_host
from support.operator_cases import FLOATS, check_output, poisoned, to_mx
from support.oracle import Array, Spec

MOST_WORK = count(40_000, 100_000)  # elements of queries times tokens; 100,000 take about 0.2 s
FORMATS = [(bits, group) for bits in (8, 4) for group in GROUPS] + [(0, 0)]


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One call. It prints as what a failure message needs; its arrays come from its seed.

    splits and min_split_tokens replace the module's own, so that a few hundred tokens have many splits. backend: for
    whose registers the queries are distributed. The text is Metal's in both cases.
    """

    seed: int = 0
    batch: int = 1
    ratio: int = 4  # H / K
    num_kv_heads: int = 2
    head_dim: int = 64
    new_tokens: int = 1
    offset: int = 5  # of the first sequence
    shorter: int = 0  # cached tokens that each sequence has fewer than the one before, down to none
    max_tokens: int = 37
    dtype: str = "float32"
    quant_bit: int = 8
    quant_group: int = 32
    cache_dtype: str = "float16"  # at 0 bits
    scale_dtype: str = "float16"
    is_causal: bool = True
    is_alibi: bool = False
    mask: str = "none"  # none, bool, float
    mask_rank: int = 4
    mask_shift: float = 0.0  # added to every element of a float mask
    pairs: int | None = None  # None: no bias split
    backend: str = "metal"
    splits: int | None = 4
    min_split_tokens: int = 8

    @property
    def num_heads(self) -> int:
        return self.ratio * self.num_kv_heads

    @property
    def num_keys(self) -> int:
        return self.offset + self.new_tokens

    @property
    def offsets(self) -> list[int]:
        """Cached tokens of each sequence."""
        return [max(0, self.offset - self.shorter * b) for b in range(self.batch)]

    @property
    def ends(self) -> list[int]:
        """Tokens that each sequence reads."""
        return [offset + self.new_tokens for offset in self.offsets]

    @property
    def spec(self) -> Spec:
        stored = {8: "int8", 4: "uint8", 0: self.cache_dtype}[self.quant_bit]
        return Spec(self.dtype, stored, self.scale_dtype, 1, 0, self.quant_bit, self.quant_group, cache_layout=1)

    @property
    def step(self) -> int:
        """Tokens that a threadgroup reads between two updates of the maximum."""
        _, _, simdgroups, queries = threadgroup_shape(self.ratio * self.new_tokens, self.pairs or 0, self.backend)
        lanes = 8 if self.head_dim == 64 else 32 if self.head_dim == 256 else 16
        return simdgroups * (32 // lanes) * (2 if queries > 4 else 4)


@dataclass(frozen=True, slots=True)
class Drawn:
    """A case's arrays in NumPy. Positions past a sequence's own tokens are poison in cache and scale.

    So are positions of rotation and columns of mask past the longest sequence's.
    """

    query: Array  # (B, H, S, D)
    cache: Array  # (1, B, 2, K, MaxS, D')
    scale: Array | None  # (1, B, 2, K, MaxS, D/G)
    mask: Array | None
    key_bias: Array  # (K, 2, P)
    pairs: tuple[int, ...]
    rotation: Array  # (2, P, MaxS)
    value_bias: Array  # (K, D)


def draw(case: KernelCase) -> Drawn:
    rng = np.random.default_rng(case.seed)
    spec, (B, K, D) = case.spec, (case.batch, case.num_kv_heads, case.head_dim)
    shape = (B, case.num_keys, K, D)
    key, value = (oracle.cast(rng.standard_normal(shape), "float32") for _ in range(2))
    width = D // 2 if case.quant_bit == 4 else D
    cache = poisoned((1, B, 2, K, case.max_tokens, width), spec.cache_dtype)
    scale = poisoned((1, B, 2, K, case.max_tokens, D // case.quant_group), spec.scale_dtype) if case.quant_bit else None
    stored = oracle.store(key, value, 0, cache, scale, spec._replace(dtype="float32"))
    for b, end in enumerate(case.ends):
        for array, poison in zip(stored, (cache, scale), strict=True):
            if array is not None and poison is not None:
                array[0, b, :, :, end:] = poison[0, b, :, :, end:]
    cache, scale = stored
    pairs = tuple(sorted(rng.permutation(D // 2)[: case.pairs or 0].tolist()))
    angle = 10.0 ** rng.uniform(-3, 0, len(pairs))[:, None] * np.arange(case.max_tokens)
    rotation = np.stack([np.cos(angle), np.sin(angle)]).astype(np.float32)
    rotation[..., case.num_keys :] = np.nan
    return Drawn(
        query=oracle.cast(rng.standard_normal((B, case.num_heads, case.new_tokens, D)), case.dtype),
        cache=cache,
        scale=scale,
        mask=draw_mask(case, rng),
        key_bias=rng.standard_normal((K, 2, len(pairs))).astype(np.float32) * 3,
        pairs=pairs,
        rotation=rotation,
        value_bias=rng.standard_normal((K, D)).astype(np.float32),
    )


def draw_mask(case: KernelCase, rng: np.random.Generator) -> Array | None:
    """Most queries keep most keys, some keep none. Columns past the keys must not be read."""
    if case.mask == "none":
        return None
    batch = int(rng.choice([1, case.batch]))
    shape = (batch, case.num_heads, case.new_tokens, case.num_keys + int(rng.integers(3)))[-case.mask_rank :]
    keep = rng.random(shape) > 0.3
    keep[rng.random(shape[:-1]) < 0.15] = False
    if case.mask == "bool":
        return keep
    added = np.where(keep, rng.standard_normal(shape) + case.mask_shift, -np.inf).astype(np.float32)
    added[..., case.num_keys :] = np.nan
    return added


def expected(case: KernelCase, drawn: Drawn) -> Array:
    """(B, H, S, D) in float64. The kernel multiplies by scales in float32 and rounds no key or value to the dtype."""
    exact = case.spec._replace(dtype="float32", scale_dtype="float32")
    scale = None if drawn.scale is None else drawn.scale.astype(np.float32)
    key, value = (
        x.astype(np.float64) for x in oracle.fetch(case.batch, case.num_keys, drawn.cache, scale, exact)
    )  # (B, T, K, D)
    if case.pairs is not None:
        first = list(drawn.pairs)
        second = [p + case.head_dim // 2 for p in drawn.pairs]
        cosine, sine = drawn.rotation[..., : case.num_keys].astype(np.float64).swapaxes(1, 2)[:, :, None]  # (T, 1, P)
        b1, b2 = drawn.key_bias.astype(np.float64).swapaxes(0, 1)  # (K, P)
        key[..., first] += b1 * cosine - b2 * sine
        key[..., second] += b1 * sine + b2 * cosine
        value += drawn.value_bias
    outputs = [
        oracle.attend(
            drawn.query[b : b + 1].swapaxes(1, 2),
            key[b : b + 1, :end],
            value[b : b + 1, :end],
            is_causal=case.is_causal,
            is_alibi=case.is_alibi,
            attn_mask=mask_of(drawn.mask, b),
        )
        for b, end in enumerate(case.ends)
    ]
    return np.concatenate(outputs).swapaxes(1, 2)  # (B, S, H, D) -> (B, H, S, D)


def mask_of(mask: Array | None, b: int) -> Array | None:
    """The mask of one sequence."""
    return mask[b : b + 1] if mask is not None and mask.ndim == 4 and mask.shape[0] > 1 else mask


# ---- running ---------------------------------------------------------------------------------------------------------


@contextmanager
def kernels_on_host(
    forbidden: Mapping[str, Array] | None = None,
    texts: Mapping[str, str] | None = None,
    orders: Sequence[int] = (FORWARD, REVERSE),
) -> Iterator[None]:
    """In this context launches are host runs of Metal's text, in these thread orders.

    forbidden: for an input of the first pass, where it must not be read. Of the second, outputs of empty splits are.
    texts: a file's text in place of its own, by name.
    """

    def kernel(name: str, backend: str) -> Any:
        make = make_kernel(name, "metal")  # anew: the text may be another

        def run(*, inputs: list[mx.array], **launch: Any) -> list[mx.array]:
            unreadable = dict(forbidden or {}) if name == "attend" else {}
            if name == "combine":
                unreadable["partial"] = (np.array(inputs[1]) == 0)[..., None]
            return on_host(make, orders=orders, unreadable=unreadable)(inputs=inputs, **launch)

        return run

    make_kernel, text = launch_module._kernel.__wrapped__, launch_module._text
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch_module, "_kernel", kernel)
        patch.setattr(launch_module, "_text", lambda file: (texts or {}).get(file) or text(file))
        yield


def run(
    case: KernelCase,
    drawn: Drawn,
    texts: Mapping[str, str] | None = None,
    orders: Sequence[int] = (FORWARD, REVERSE),
) -> mx.array:
    """The kernel's output. Raises a HostError where it does what it must not."""
    dead = np.arange(case.max_tokens) >= np.array(case.ends).reshape(-1, 1, 1, 1)  # (B, 1, 1, MaxS)
    forbidden = {"cache": dead[..., None]}
    if case.quant_bit:
        forbidden["scale"] = dead[..., None]
    if drawn.pairs:
        forbidden["rotation"] = np.arange(case.max_tokens) >= case.num_keys
    if drawn.mask is not None:
        own = drawn.mask.ndim == 4 and drawn.mask.shape[0] > 1
        ends = np.array(case.ends).reshape(-1, 1, 1, 1) if own else case.num_keys
        forbidden["mask"] = np.arange(drawn.mask.shape[-1]) >= ends
    spec, split = case.spec, None
    if case.pairs is not None:
        split = BiasSplit(mx.array(drawn.key_bias), drawn.pairs, mx.array(drawn.rotation), mx.array(drawn.value_bias))
    with kernels_on_host(forbidden, texts, orders), pytest.MonkeyPatch.context() as patch:
        patch.setattr(attend_module, "MIN_SPLIT_TOKENS", case.min_split_tokens)
        if case.splits is not None:
            patch.setattr(attend_module, "num_splits", lambda *_: case.splits)
        return attend_fused(
            to_mx(drawn.query, case.dtype),
            to_mx(drawn.cache, spec.cache_dtype),
            None if drawn.scale is None else mx.array(drawn.scale),
            mx.array(case.offsets) if case.shorter else mx.array(case.offset),
            quant_bit=case.quant_bit,
            quant_group=case.quant_group,
            is_causal=case.is_causal,
            is_alibi=case.is_alibi,
            mask=None if drawn.mask is None else mx.array(drawn.mask),
            bias_split=split,
            backend=case.backend,
        )


def check(case: KernelCase, texts: Mapping[str, str] | None = None, orders: Sequence[int] = (FORWARD, REVERSE)) -> None:
    """The kernel's output is float64's, to the dtype's tolerance."""
    drawn = draw(case)
    check_output(run(case, drawn, texts, orders), expected(case, drawn), case.dtype)


# ---- cases -----------------------------------------------------------------------------------------------------------

# What a compiled instance depends on. Every two values of two options meet in one of the instances.
OPTIONS: dict[str, tuple[Any, ...]] = {
    "head_dim": HEAD_DIMS,
    "format": tuple(FORMATS),
    "dtype": FLOATS,
    "cache_dtype": FLOATS,
    "scale_dtype": ("float32", "float16"),
    "new_tokens": (1, 2, 3, 5, 8),
    "ratio": (1, 2, 4, 7, 8),
    "is_causal": (True, False),
    "is_alibi": (False, True),
    "mask": ("none", "bool", "float"),
    "pairs": (None, 0, 1, 9, 32),
    "backend": ("metal", "cuda"),
    "splits": (1, 2, 4),
}


def instances(seed: int = 6) -> list[KernelCase]:
    """Cases that together hold every pair of values of two options, but for groups that don't divide the head."""
    rng = np.random.default_rng(seed)
    names = list(OPTIONS)

    def fits(values: Mapping[str, Any]) -> bool:
        group = values.get("format", (0, 0))[1]
        return not group or values.get("head_dim", 128) % group == 0

    def pairs_of(values: Mapping[str, Any]) -> set[tuple[str, Any, str, Any]]:
        return {(a, values[a], b, values[b]) for a, b in combinations(names, 2)}

    missing = {
        (a, x, b, y)
        for a, b in combinations(names, 2)
        for x, y in product(OPTIONS[a], OPTIONS[b])
        if fits({a: x, b: y})
    }
    chosen: list[dict[str, Any]] = []
    while missing:
        a, x, b, y = min(missing, key=repr)
        best: dict[str, Any] = {}
        for _ in range(100):
            values = {name: OPTIONS[name][rng.integers(len(OPTIONS[name]))] for name in names} | {a: x, b: y}
            if fits(values) and (not best or len(pairs_of(values) & missing) > len(pairs_of(best) & missing)):
                best = values
        missing -= pairs_of(best)
        chosen.append(best)
    cases = []
    for number, values in enumerate(chosen):
        bits, group = values.pop("format")
        cases.append(KernelCase(seed=number, quant_bit=bits, quant_group=group, **values))
    return cases


def runs(case: KernelCase) -> list[KernelCase]:
    """Calls of one instance: one at offset 0 or 1 and two about the boundaries of splits and steps; of other sizes.

    Sequences are of one length in one of them, of several in the others.
    """
    rng = np.random.default_rng(case.seed)
    splits, least = case.splits or 1, case.min_split_tokens
    edges = {least, 2 * least, splits * least, case.step, splits * case.step}
    num_keys = {edge + beside for edge in edges for beside in (-1, 0, 1)}
    offsets = sorted(n - case.new_tokens for n in num_keys if n >= case.new_tokens)
    cases = []
    for offset in (case.seed % 2, *(int(x) for x in rng.choice(offsets, 2, replace=False))):
        batch, num_kv_heads = int(rng.choice([1, 2, 4])), int(rng.choice([1, 2, 3]))
        tokens = max(offset + case.new_tokens, 12 * splits)  # an empty split takes time too
        work = case.head_dim * case.ratio * case.new_tokens * tokens
        if batch * num_kv_heads * work > MOST_WORK:  # a host runs a thread at a time
            batch, num_kv_heads = (
                max(1, MOST_WORK // work // num_kv_heads),
                min(num_kv_heads, max(1, MOST_WORK // work)),
            )
        cases.append(
            replace(
                case,
                seed=1000 * case.seed + offset,
                offset=offset,
                shorter=0 if len(cases) % 2 else offset // 2 + 1,
                max_tokens=offset + case.new_tokens + int(rng.choice([0, 1, 6])),
                batch=batch,
                num_kv_heads=num_kv_heads,
                mask_rank=int(rng.integers(2, 5)),
            )
        )
    return cases
