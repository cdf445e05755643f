"""Measures how many queries a simdgroup of the fused kernel should hold on this device, and records it."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from statistics import median

import mlx.core as mx

from kvant.cache.atomic import atomic_file
from kvant.errors import ModelError, one_line
from kvant.operators.kernels.attend import attend
from kvant.operators.kernels.launch import Backend
from kvant.operators.kernels.queries import CHOICES, device_key, new_record, queries_here, read_records, record_path
from kvant.operators.quantization import quantized_dtype
from kvant.operators.self_check import TOLERANCE, self_check

SHAPES = ((14, 2, 64), (28, 4, 128), (32, 8, 128))  # query heads, kv heads, head_dim
BITS = (8, 4)
ROWS = 4096
# Of the cache that a call reads: as many sequences as that takes. A call is to take longer than its launch.
CASE_BYTES = 64 * 1024 * 1024
GROUP = 32
ROUNDS, CALLS = 9, 4  # calls that are queued together in a round
DTYPE = mx.bfloat16
MARGIN = 0.97  # a number replaces the one in use where it takes less than this share of its time; more may be noise

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class QueriesCase:
    """Median milliseconds of the first number of queries, and of the other."""

    case: str
    first_ms: float
    second_ms: float

    @property
    def ratio(self) -> float:
        """The second's time divided by the first's."""
        return self.second_ms / self.first_ms


@dataclass(frozen=True, slots=True)
class QueriesMeasured:
    """What was measured, and what follows from it.

    Attributes:
        numbers: the two that were compared, the default first.
        cases: empty where the kernel failed.
        used: the number that is used from now on.
        reason: why.
        problem: what failed; None: nothing.
    """

    numbers: tuple[int, int]
    cases: list[QueriesCase]
    used: int
    reason: str
    problem: str | None

    @property
    def ratio(self) -> float | None:
        """The geometric mean of the cases' ratios."""
        return prod(case.ratio for case in self.cases) ** (1 / len(self.cases)) if self.cases else None


def measure_queries(
    backend: Backend, progress: Callable[[int, int], None], clock: Clock = time.perf_counter
) -> QueriesMeasured:
    """Measure both numbers and record the one to use; ``progress`` is called with (cases done, in all).

    The number in use stays unless the other is faster by more than noise and passes the self-check. So two runs on one
    device do not disagree.
    """
    numbers, before = CHOICES[backend], queries_here(backend)
    shapes = [(shape, bits) for shape in SHAPES for bits in BITS]
    cases: list[QueriesCase] = []
    try:
        for shape, bits in shapes:
            progress(len(cases), len(shapes))
            cases.append(_measure(shape, bits, numbers, backend, clock))
        found = QueriesMeasured(numbers, cases, before.number, "", None)
        assert found.ratio is not None
        ratio = found.ratio if before.number == numbers[0] else 1 / found.ratio
        other = numbers[1] if before.number == numbers[0] else numbers[0]
        number = other if ratio < MARGIN else before.number
        if number != before.number and (problem := self_check(backend, queries=number)) is not None:
            raise ArithmeticError(f"{number} queries a simdgroup: {problem}")
    except Exception as error:  # of a compiler or a driver: any
        mx.clear_cache()
        return QueriesMeasured(numbers, [], before.number, before.reason, one_line(error))
    mx.clear_cache()
    try:
        _record(backend, number)
    except (OSError, ModelError) as error:
        unwritten = f"{before.reason}; {number} could not be recorded: {one_line(error)}"
        return QueriesMeasured(numbers, cases, before.number, unwritten, None)
    queries_here.cache_clear()
    after = queries_here(backend)
    return QueriesMeasured(numbers, cases, after.number, after.reason, None)


def _measure(
    shape: tuple[int, int, int], bits: int, numbers: tuple[int, int], backend: Backend, clock: Clock
) -> QueriesCase:
    """Both in turns, forwards and backwards: a drift favors none."""
    H, K, D = shape
    elements = ROWS * 2 * K * D
    B = max(1, round(CASE_BYTES / (elements * bits / 8)))
    query = mx.random.normal((B, H, 1, D), key=mx.random.key(0)).astype(DTYPE)
    stored, width = quantized_dtype(bits), D * bits // 8
    cache = mx.view(mx.random.randint(0, 2**32, (1, B, 2, K, ROWS, width // 4), mx.uint32, mx.random.key(1)), stored)
    scale = mx.full((1, B, 2, K, ROWS, D // GROUP), 2.0 ** (1 - bits), mx.float16)
    offset = mx.array([ROWS - 1], mx.int32)
    mx.eval(query, cache, scale, offset)

    def attended(number: int) -> mx.array:
        return attend(
            *(query, cache, scale, offset),
            quant_bit=bits,
            quant_group=GROUP,
            rows=ROWS,
            queries=number,
            backend=backend,
        )

    first, second = (attended(number).astype(mx.float32) for number in numbers)  # compiles both
    error = float((mx.abs(first - second).max() / mx.abs(first).max()).item())  # type: ignore[arg-type]
    if not error <= TOLERANCE[DTYPE]:  # true for NaN too
        raise ArithmeticError(f"outputs with {numbers[0]} and {numbers[1]} queries a simdgroup differ by {error:.2g}")
    times: dict[int, list[float]] = {number: [] for number in numbers}
    order = [partial(_time, attended, number, times[number], clock) for number in numbers]
    for _ in range(ROUNDS):
        for measure in order:
            measure()
        order.reverse()
    label = f"{H}/{K} heads of {D}, {bits} bits, {B} x {ROWS:,} rows"
    return QueriesCase(label, median(times[numbers[0]]), median(times[numbers[1]]))


def _time(attended: Callable[[int], mx.array], number: int, times: list[float], clock: Clock) -> None:
    outputs = [attended(number) for _ in range(CALLS)]  # before: only the device's time is wanted
    mx.synchronize()
    started = clock()
    _run(outputs)
    times.append((clock() - started) * 1e3 / CALLS)


def _run(outputs: list[mx.array]) -> None:
    mx.eval(outputs)
    mx.synchronize()


def _record(backend: Backend, number: int) -> None:
    """Add this device's to the records, or put it in the place of a broken file.

    Raises:
        OSError: it cannot be written.
    """
    path = record_path()
    try:
        records = dict(read_records(path))
    except ModelError:
        records = {}
    records[device_key(backend)] = new_record(backend, number)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        file.write((json.dumps(records, indent=1) + "\n").encode())
