"""Calls on which the fused kernel is checked: a few before it is used, and random ones for `kvant doctor`."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx

from kvant.operators.kernels.attend import GROUPS, HEAD_DIMS, MAX_NEW_TOKENS, PAGE_SIZE
from kvant.operators.quantization import FLOAT_DTYPES

MOST_ROWS = 6000
MOST_ELEMENTS = 2**24  # of a random case's keys


@dataclass(frozen=True, slots=True)
class KernelCase:
    """A call: B sequences with ``offset`` cached and S new tokens, H query heads and K kv heads of D elements.

    Attributes:
        max_seq_len: rows of a sequence. Fewer than its tokens are a ring. Not used with pages.
        shorter: each sequence has this many cached tokens fewer than the one before, at least none.
        pairs: rotary pairs of a bias split. None: no bias split.
        value_dim: of values; None: D.
        window, keep, softcap, score_scale: as :func:`kvant.operators.kernels.attend.attend` takes them.
    """

    B: int
    H: int
    K: int
    D: int
    S: int
    offset: int
    max_seq_len: int
    quant_bit: int
    quant_group: int
    dtype: mx.Dtype
    shorter: int = 0
    is_alibi: bool = False
    pairs: tuple[int, ...] | None = None
    seed: int = 0
    value_dim: int | None = None
    window: int | None = None
    keep: int = 0
    is_paged: bool = False
    has_mask: bool = False
    has_sinks: bool = False
    softcap: float = 0.0
    score_scale: float | None = None

    @property
    def offsets(self) -> tuple[int, ...]:
        """Cached tokens of each sequence."""
        return tuple(max(0, self.offset - self.shorter * b) for b in range(self.B))

    @property
    def is_ring(self) -> bool:
        """Whether rows are written again."""
        return not self.is_paged and self.offset + self.S > self.max_seq_len

    @property
    def has_unfused(self) -> bool:
        """Whether the unfused operator takes the call as it is."""
        others = (self.value_dim, self.window, self.score_scale)
        return not (self.is_paged or self.softcap or self.is_ring) and others == (None, None, None)

    def first(self, b: int) -> int:
        """The position of sequence b's first row: with pages, those that nobody sees are left out."""
        offset = self.offsets[b]
        if not self.is_paged or self.keep:
            return 0
        unseen = offset // 2 if self.window is None else max(0, offset + 1 - self.window)
        return unseen // PAGE_SIZE * PAGE_SIZE

    def row(self, b: int, position: int) -> int:
        """The row of a position of sequence b."""
        if self.is_paged or position < self.keep or self.offsets[b] + self.S <= self.max_seq_len:
            return position - self.first(b)
        return self.keep + (position - self.keep) % (self.max_seq_len - self.keep)

    def positions(self, b: int) -> list[int]:
        """The position that each row of sequence b holds once the new tokens are written."""
        held = {self.row(b, position): position for position in range(self.first(b), self.offsets[b] + self.S)}
        return [held[row] for row in sorted(held)]

    def __str__(self) -> str:
        batch = f"{self.B} x " if self.B > 1 else ""
        kind = f"{self.quant_bit} bits g{self.quant_group}" if self.quant_bit else "floats"
        kinds = (
            (f"values of {self.value_dim}", self.value_dim is not None),
            ("several lengths", self.shorter),
            ("pages", self.is_paged),
            ("ring", self.is_ring),
            (f"window {self.window}", self.window is not None),
            (f"first {self.keep}", self.keep),
            ("ALiBi", self.is_alibi),
            ("mask", self.has_mask),
            ("sinks", self.has_sinks),
            ("softcap", self.softcap),
            ("scale", self.score_scale is not None),
            ("bias split", self.pairs is not None),
        )
        extras = [name for name, on in kinds if on]
        dtype = str(self.dtype).removeprefix("mlx.core.")
        heads = f"{self.H}/{self.K} heads of {self.D}"
        return ", ".join([f"{batch}{self.offset}+{self.S} tokens", heads, kind, dtype, *extras])


# As few instances as they can be, 10: an attention of each lane layout (D 64, 128, 256, 512) with its second pass, and
# an append of 8 and of 4 bits. On Metal they have two query groups; four tiles of eight groups; one group of four
# queries; one of two. Sequences end inside a split, and inside a step of a threadgroup.
SELF_CHECK = (
    KernelCase(1, 14, 2, 64, 1, 301, 1100, 8, 32, mx.float16, pairs=(5, 31), seed=1),
    KernelCase(2, 16, 1, 128, 8, 261, 0, 4, 32, mx.bfloat16, shorter=194, is_paged=True, has_sinks=True, seed=2),
    KernelCase(
        1, 8, 2, 256, 1, 211, 101, 0, 32, mx.float16, window=81, keep=4, softcap=20.0, score_scale=1 / 16, seed=3
    ),
    KernelCase(2, 4, 2, 512, 1, 70, 80, 0, 32, mx.float32, shorter=31, is_alibi=True, has_mask=True, seed=4),
)


def random_cases(count: int, seed: int) -> Iterator[KernelCase]:
    """Cases of every kind the kernel takes. The same seed gives the same cases."""
    draw = random.Random(seed)
    for _ in range(count):
        B, K = draw.choice((1, 1, 2, 4)), draw.choice((1, 2, 4, 8))
        D = draw.choice(HEAD_DIMS)
        value_dim = draw.choice([width for width in HEAD_DIMS if width != D]) if draw.random() < 0.15 else None
        S = draw.choice((1, 1, 1, draw.randint(2, MAX_NEW_TOKENS)))
        rows = draw.randint(S, min(MOST_ROWS, MOST_ELEMENTS // (B * K * max(D, value_dim or 0))))
        is_paged = draw.random() < 0.3
        window = draw.randint(1, rows) if draw.random() < 0.4 else None
        keep = draw.choice((0, 4)) if window is not None else 0
        if window is not None and not is_paged and draw.random() < 0.7:  # a ring, where its tokens are more
            tokens, rows = rows, keep + window + S - 1 + draw.randint(0, 16)
        else:
            tokens = rows
        yield KernelCase(
            B=B,
            H=K * draw.choice((1, 2, 4, 7, 8)),
            K=K,
            D=D,
            S=S,
            offset=draw.randint(0, tokens - S),
            max_seq_len=rows,
            quant_bit=draw.choice((8, 4, 0)),
            quant_group=draw.choice([g for g in GROUPS if D % g == 0 and (value_dim or D) % g == 0]),
            dtype=draw.choice(FLOAT_DTYPES),
            shorter=draw.choice((0, draw.randint(1, 500))),
            is_alibi=draw.random() < 0.2,
            pairs=tuple(draw.sample(range(D // 2), draw.randint(0, 6))) if draw.random() < 0.3 else None,
            seed=draw.getrandbits(32),
            value_dim=value_dim,
            window=window,
            keep=keep,
            is_paged=is_paged,
            has_mask=draw.random() < 0.2,
            has_sinks=draw.random() < 0.2,
            softcap=draw.choice((0.0, 0.0, 20.0)),
            score_scale=draw.choice((None, None, 0.1)),
        )
