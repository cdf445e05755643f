"""Compares the fused kernel with the unfused operator, on the device that runs the kernel."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx

from kvant.operators.bias_split import BiasSplit, rotation_table
from kvant.operators.cached_attention import append_and_attend, read_sequences, stored_tokens, write_tokens
from kvant.operators.kernels.attend import GROUPS, HEAD_DIMS, MAX_NEW_TOKENS
from kvant.operators.kernels.launch import Backend
from kvant.operators.probe import first_words
from kvant.operators.quantization import FLOAT_DTYPES, multiply_scale, quantized_dtype
from kvant.operators.ragged import attend_sequences
from kvant.operators.rotary import Rotary

# Of an output, relative to 1 + its expected magnitude: a few roundings of its dtype.
TOLERANCE = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 1.6e-2}
# A GPU may divide with an error of some ulps. A quotient halfway between two integers may then round to the other one.
MAX_STEPS_OFF = 1.1  # in scales. The last tenth is for the scale's own rounding
MAX_SHARE_OFF = 0.01


@dataclass(frozen=True, slots=True)
class KernelCase:
    """A call: B sequences with ``offset`` cached and S new tokens, H query heads and K kv heads of D elements.

    Attributes:
        shorter: each sequence has this many cached tokens fewer than the one before, at least none.
        pairs: rotary pairs of a bias split. None: no bias split.
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

    @property
    def offsets(self) -> tuple[int, ...]:
        """Cached tokens of each sequence."""
        return tuple(max(0, self.offset - self.shorter * b) for b in range(self.B))

    def __str__(self) -> str:
        batch = f"{self.B} x " if self.B > 1 else ""
        kind = f"{self.quant_bit} bits g{self.quant_group}" if self.quant_bit else "floats"
        kinds = (
            ("several lengths", self.shorter),
            ("ALiBi", self.is_alibi),
            ("bias split", self.pairs is not None),
        )
        extras = [name for name, on in kinds if on]
        dtype = str(self.dtype).removeprefix("mlx.core.")
        heads = f"{self.H}/{self.K} heads of {self.D}"
        return ", ".join([f"{batch}{self.offset}+{self.S} tokens", heads, kind, dtype, *extras])


SELF_CHECK = (
    # Offsets inside a split, and inside one step of a threadgroup.
    KernelCase(1, 14, 2, 64, 1, 301, 1100, 8, 32, mx.float16, pairs=(5, 31), seed=1),
    KernelCase(2, 8, 2, 128, 3, 70, 515, 4, 32, mx.bfloat16, shorter=33, seed=2),
    KernelCase(1, 4, 4, 64, 1, 129, 300, 8, 64, mx.float32, seed=3),
    KernelCase(1, 16, 2, 128, 1, 600, 1024, 0, 32, mx.float16, seed=4),
)


@dataclass(frozen=True, slots=True)
class Agreement:
    """The result of a comparison.

    Attributes:
        error: the output's largest, relative to 1 + the expected magnitude. NaN where either is NaN.
        tolerance: for this dtype.
        problem: the difference that is too large. None: there is none.
    """

    error: float
    tolerance: float
    problem: str | None


class Trial:
    """A case's arrays. Positions from a sequence's offset on hold NaN, so an output that reads them is NaN."""

    def __init__(self, case: KernelCase) -> None:
        self.case = case
        B, K, D, T = case.B, case.K, case.D, case.offset
        keys = mx.random.split(mx.random.key(case.seed), 7)
        with mx.stream(mx.cpu):  # the same numbers wherever it is asked

            def normal(i: int, *shape: int) -> mx.array:
                return mx.random.normal(shape, key=keys[i]).astype(case.dtype)

            self.query = normal(0, B, case.H, case.S, D)
            self.key, self.value = normal(1, B, K, case.S, D), normal(2, B, K, case.S, D)
            shape, poison = (1, B, 2, K, case.max_seq_len), float("nan")
            self.scale: mx.array | None = None
            if case.quant_bit:
                stored = D // 2 if case.quant_bit == 4 else D
                self.cache = mx.zeros((*shape, stored), quantized_dtype(case.quant_bit))
                self.scale = mx.full((*shape, D // case.quant_group), poison, mx.float16)
            else:
                self.cache = mx.full((*shape, D), poison, case.dtype)
            if T:
                past = normal(3, B, K, T, D), normal(4, B, K, T, D)
                write_tokens(*past, 0, self.cache, self.scale, quant_bit=case.quant_bit, quant_group=case.quant_group)
                floats = self.cache if self.scale is None else self.scale
                for b, offset in enumerate(case.offsets):
                    floats[0, b, :, :, offset:] = poison
            self.bias_split: BiasSplit | None = None
            if case.pairs is not None:
                table = rotation_table(Rotary.plain(D, 1e6), case.pairs, case.max_seq_len)
                key_bias = mx.random.normal((K, 2, len(case.pairs)), key=keys[5]) * 10
                self.bias_split = BiasSplit(key_bias, case.pairs, table, mx.random.normal((K, D), key=keys[6]))
                mx.eval(key_bias, table, self.bias_split.value_bias)
            mx.eval(self.query, self.key, self.value, self.cache, *([] if self.scale is None else [self.scale]))

    def run(self, backend: Backend | None) -> mx.array:
        """Append the new tokens and attend, by the kernel or, with None, by the unfused operator. Evaluated."""
        case = self.case
        output = append_and_attend(
            self.query,
            self.key,
            self.value,
            case.offsets if case.shorter else case.offset,
            self.cache,
            self.scale,
            is_alibi=case.is_alibi,
            quant_bit=case.quant_bit,
            quant_group=case.quant_group,
            bias_split=self.bias_split,
            backend=backend,
        )
        mx.eval(output, self.cache, *([] if self.scale is None else [self.scale]))
        mx.synchronize()  # a kernel's failure is raised here or when it was queued
        return output

    def agreement(self, backend: Backend) -> Agreement:
        """Run the kernel. Compare the tokens it stored, and its output, with the unfused operator's on the CPU.

        Not on the GPU: some multiply float32 matrices with fewer bits.
        """
        case = self.case
        given = self.run(backend)
        with mx.stream(mx.cpu):
            sequences = read_sequences(
                [offset + case.S for offset in case.offsets],
                self.cache,
                self.scale,
                quant_bit=case.quant_bit,
                dtype=case.dtype,
            )
            expected = attend_sequences(
                self.query, sequences, is_alibi=case.is_alibi, bias_split=self.bias_split
            ).astype(mx.float32)
            error = _number((mx.abs(given.astype(mx.float32) - expected) / (1 + mx.abs(expected))).max())
            problem = self._stored_problem()
        tolerance = TOLERANCE[case.dtype]
        if problem is None and not error <= tolerance:  # true for NaN too
            problem = f"the output is off by {error:.2g}; expected at most {tolerance:g}"
        return Agreement(error, tolerance, problem)

    def _stored_problem(self) -> str | None:
        """The difference in the new tokens as the kernel stored them; None: there is none."""
        case = self.case
        stored = [  # (B, 2, K, S, D' or D/G)
            mx.stack([x[0, b, :, :, offset : offset + case.S] for b, offset in enumerate(case.offsets)])
            for x in (self.cache, self.scale)
            if x is not None
        ]
        expected = stored_tokens(self.key, self.value, stored, quant_bit=case.quant_bit, quant_group=case.quant_group)
        if not case.quant_bit:
            return None if mx.array_equal(stored[0], expected[0]).item() else "the new tokens were not stored unchanged"
        given, wanted = (  # (B, 2, K, S, D/G, G)
            mx.unflatten(multiply_scale(quantized, scale, case.quant_bit, mx.float32), -1, (scale.shape[-1], -1))
            for quantized, scale in (stored, expected)
        )
        off = mx.abs(given - wanted) / expected[1].astype(mx.float32)[..., None]
        most, share = _number(off.max()), _number((off > 0.5).astype(mx.float32).mean())
        if most <= MAX_STEPS_OFF and share <= MAX_SHARE_OFF:
            return None
        return f"stored values are off by up to {most:.2g} scales, {share:.1%} of them"


def self_check(backend: Backend) -> str | None:
    """Run the kernel on a few small cases. Returns the first problem, an exception included; None: there is none."""
    for case in SELF_CHECK:
        try:
            problem = Trial(case).agreement(backend).problem
        except Exception as error:  # a kernel that does not compile raises when it runs
            problem = first_words(error)
        if problem is not None:
            return f"{case}: {problem}"
    return None


def random_cases(count: int, seed: int) -> Iterator[KernelCase]:
    """Cases of every kind the kernel takes. The same seed gives the same cases."""
    draw = random.Random(seed)
    for _ in range(count):
        K, ratio, D = draw.choice((1, 2, 4, 8)), draw.choice((1, 2, 4, 7, 8)), draw.choice(HEAD_DIMS)
        S = draw.choice((1, 1, 1, draw.randint(2, MAX_NEW_TOKENS)))
        max_seq_len = draw.randint(S, 6000)
        is_alibi = draw.random() < 0.2
        pairs = tuple(draw.sample(range(D // 2), draw.randint(0, 6))) if draw.random() < 0.4 else None
        yield KernelCase(
            B=draw.choice((1, 1, 2, 4)),
            H=K * ratio,
            K=K,
            D=D,
            S=S,
            offset=draw.randint(0, max_seq_len - S),
            max_seq_len=max_seq_len,
            quant_bit=draw.choice((8, 4, 0)),
            quant_group=draw.choice([g for g in GROUPS if D % g == 0]),
            dtype=draw.choice(FLOAT_DTYPES),
            is_alibi=is_alibi,
            pairs=pairs,
            seed=draw.getrandbits(32),
            shorter=draw.choice((0, draw.randint(1, 500))),
        )


def _number(x: mx.array) -> float:
    return float(x.item())  # type: ignore[arg-type]
