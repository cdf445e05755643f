"""What ``kvant doctor`` finds out under a launcher: how fast the ranks reach each other, and whether they agree."""

import hashlib
import math
import platform
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import mlx.core as mx

from kvant.engine.load import POCKET, find_model
from kvant.engine.run import prefill
from kvant.machine import Environment, default_device, environment
from kvant.models import load_decoder
from kvant.ranks.group import Ranks
from kvant.ranks.guard import Guard
from kvant.sizes import physical_memory

DEADLINE_S = 120.0  # of everything; 2 ranks on the loopback take a second
ROUND_TRIPS, GUARD_TRIPS = 100, 20  # measured, after one that is not
SUM_REPEATS, BUDGET_MS = 15, 1000.0  # of sums: at most so many, and about so long
LARGE = 4 * 1024 * 1024  # numbers: 16 MiB of float32
# What two sums in each layer add up in a token's step: layers and hidden size of the models' config.json.
STEPS = (("Qwen2.5-0.5B", 24, 896), ("Qwen2.5-7B", 28, 3584), ("Qwen2.5-72B", 80, 8192))
# The digest of _integers() as NumPy computes it; whole numbers have no rounding, so every device has the same.
INTEGERS = "b6cee7ced55d7b6f"
INTEGER_BITS = 16  # of a summand: float32 adds up to 256 of them without rounding
PROMPT = list(range(3, 67))
# Logits that two devices may differ by, as a share of the largest. Between bfloat16 and float32 it is 0.010.
ALLOWED = 0.05


@dataclass(frozen=True, slots=True)
class RankFindings:
    """One rank.

    Attributes:
        host: the machine's name.
        integers_right: whether it computes whole numbers as every device should.
        sum_right: whether an all-sum of whole numbers gave it their sum.
        sum_digest: of an all-sum of fractions, which are rounded.
        logits_digest: of the embedded model's logits, which it computes alone.
        logits_off: the largest difference of these from the reference rank's, as a share of the largest logit.
        round_trip_ms: 4 bytes to the next rank and back; None: the rank before has measured this cable.
    """

    rank: int
    host: str
    environment: Environment
    memory_bytes: int
    integers_right: bool
    sum_right: bool
    sum_digest: str
    logits_digest: str
    logits_off: float
    round_trip_ms: float | None


@dataclass(frozen=True, slots=True)
class StepSums:
    """The sums of a token's step: a chain, with a multiplication on the device after each, as rank 0 has it."""

    shape: str
    sums: int
    bytes: int  # of all of them
    ms: float


@dataclass(frozen=True, slots=True)
class RankDiagnosis:
    """What ``kvant doctor`` prints of a group.

    Attributes:
        dtype: of the step's sums; that of activations.
        large_bytes, large_ms: of one all-sum.
        guard_ms: rank 0 tells all others, and all have answered.
        problems: what is wrong, by rank.
        notes: what is not wrong, and good to know.
    """

    ranks: list[RankFindings]
    dtype: str
    steps: list[StepSums]
    large_bytes: int
    large_ms: float
    guard_ms: float
    problems: list[str]
    notes: list[str]

    @property
    def healthy(self) -> bool:
        """Whether the ranks agree."""
        return not self.problems

    @property
    def large_gb_per_s(self) -> float:
        """1e9 bytes of an array that are summed in a second."""
        return self.large_bytes / self.large_ms / 1e6

    def as_json(self) -> dict[str, Any]:
        """For a program."""
        found = asdict(self) | {"healthy": self.healthy, "large_gb_per_s": self.large_gb_per_s}
        for each in found["ranks"]:
            each["logits_off"] = each["logits_off"] if math.isfinite(each["logits_off"]) else None
        return found


def check_ranks(ranks: Ranks, guard: Guard) -> RankDiagnosis | None:
    """Measure the connections and compare what the ranks compute. All ranks call it; the others get None.

    A rank that does not get through it in time ends the run, as the guard ends one.
    """
    with guard.within(DEADLINE_S, "checking the ranks"):
        guard_ms = _time_guard(guard)
        round_trip_ms = _time_round_trips(ranks)
        dtype = mx.float32 if default_device() == "cpu" else mx.bfloat16
        steps = [_time_step(ranks, *step, dtype) for step in STEPS]
        own, large_ms, logits = _examine(ranks, round_trip_ms)
        gathered = guard.gather(asdict(own))
    if guard.rank:
        return None
    found = with_logits([_findings(values) for values in gathered], logits)
    problems, notes = judge(found)
    return RankDiagnosis(
        ranks=found,
        dtype=str(dtype).removeprefix("mlx.core."),
        steps=steps,
        large_bytes=LARGE * mx.float32.size,
        large_ms=large_ms,
        guard_ms=guard_ms,
        problems=problems,
        notes=notes,
    )


def judge(found: Sequence[RankFindings]) -> tuple[list[str], list[str]]:
    """What is wrong, and what is only to be known."""
    problems, notes = [], []
    first, usual_sum = found[0].environment, _most([each.sum_digest for each in found])
    reference = next(each for each in found if each.logits_digest == _most([each.logits_digest for each in found]))
    for each in found:
        name = f"rank {each.rank} ({each.host})"
        for package, version in each.environment.versions.items():
            if (expected := first.versions.get(package)) != version:
                problems.append(f"{name} has {package} {version}; rank 0 has {expected}")
        if not each.integers_right:
            problems.append(f"{name} computes whole numbers wrong: its memory or its device is broken")
        if not each.sum_right:
            problems.append(f"{name} gets a wrong sum of whole numbers from the back end")
        if each.sum_digest != usual_sum:
            problems.append(f"{name} gets other bits of a sum than the other ranks")
        if not each.logits_off <= ALLOWED:  # true for NaN too
            problems.append(
                f"{name} computes other logits than rank {reference.rank}: off by {each.logits_off:.2g} of the "
                f"largest; expected at most {ALLOWED}"
            )
        elif each.logits_digest != reference.logits_digest:
            if each.environment == reference.environment:
                problems.append(
                    f"{name} computes other bits than rank {reference.rank}, with the same device and versions"
                )
            else:
                notes.append(
                    f"{name} rounds otherwise than rank {reference.rank}, on another device or system (off by "
                    f"{each.logits_off:.1g}): a text may differ from that of one machine"
                )
    return problems, notes


def with_logits(found: Sequence[RankFindings], logits: mx.array) -> list[RankFindings]:
    """The findings with digests and differences of the ranks' logits (ranks, vocab)."""
    digests = [_digest(row) for row in logits]
    reference = logits[digests.index(_most(digests))]
    largest = mx.abs(reference).max()
    off = [float((mx.abs(row - reference).max() / largest).item()) for row in logits]  # type: ignore[arg-type]
    return [
        replace(each, logits_digest=digest, logits_off=share)
        for each, digest, share in zip(found, digests, off, strict=True)
    ]


# ---- what every rank computes ----------------------------------------------------------------------------------------


def _examine(ranks: Ranks, round_trip_ms: float | None) -> tuple[RankFindings, float, mx.array]:
    """This rank's findings, milliseconds of a large sum, and all ranks' logits (ranks, vocab)."""
    integers = _integers()
    own = _summand(integers, ranks.rank)
    expected = sum((_summand(integers, rank) for rank in range(1, ranks.size)), _summand(integers, 0))
    mx.eval(own, expected)
    large_ms = _time_sums(ranks, lambda: mx.eval(ranks.all_sum(own)))
    whole = ranks.all_sum(own)
    fractions = ranks.all_sum(own[: LARGE // 64] / (3 + ranks.rank))
    logits = ranks.all_gather(_logits()[None])
    mx.eval(whole, fractions, logits)
    findings = RankFindings(
        rank=ranks.rank,
        host=platform.node(),
        environment=environment(),
        memory_bytes=physical_memory(),
        integers_right=_digest(integers) == INTEGERS,
        sum_right=bool(mx.array_equal(whole, expected)),
        sum_digest=_digest(fractions),
        logits_digest="",
        logits_off=0.0,
        round_trip_ms=round_trip_ms,
    )
    return findings, large_ms, logits


def _integers() -> mx.array:
    """0, 1, 2... with their bits mixed, by Knuth's multiplicative hashing: (LARGE,) uint32."""
    factor = mx.array(2654435761, mx.uint32)
    x = mx.arange(LARGE, dtype=mx.uint32) * factor
    x = (x ^ (x >> 15)) * factor
    return x ^ (x >> 13)


def _summand(integers: mx.array, rank: int) -> mx.array:
    """What a rank adds to the large sum: whole numbers of INTEGER_BITS bits, other ones in each rank."""
    numbers: mx.array = (integers >> rank % (32 - INTEGER_BITS)) & (2**INTEGER_BITS - 1)
    return numbers.astype(mx.float32)


def _logits() -> mx.array:
    """Of the embedded model after a prompt, without the fused kernel: (vocab,) float32."""
    model = load_decoder(find_model(POCKET))
    cache = model.make_cache(len(PROMPT), kernels="unfused")
    return prefill(model, PROMPT, cache)[0].astype(mx.float32)


# ---- times -----------------------------------------------------------------------------------------------------------


def _time_guard(guard: Guard) -> float:
    """Milliseconds until all others were told something and have answered."""

    def ask() -> None:
        if guard.rank:
            guard.receive()
        else:
            guard.tell({"doctor": "are you there?"})
        guard.gather(None)

    return _median_ms(ask, GUARD_TRIPS)


def _time_round_trips(ranks: Ranks) -> float | None:
    """Milliseconds of 4 bytes to the next rank and back. Neighbours take turns around the ring."""
    measured = None
    number = mx.array([1.0], mx.float32)
    for first in range(ranks.size if ranks.size > 2 else 1):
        second = (first + 1) % ranks.size
        if ranks.rank == first:
            measured = _median_ms(lambda to=second: _there_and_back(ranks, number, to), ROUND_TRIPS)  # type: ignore[misc]
        elif ranks.rank == second:
            for _ in range(1 + ROUND_TRIPS):
                received = ranks.receive((1,), mx.float32, first)
                mx.eval(received)
                mx.eval(ranks.send(received, first))
    return measured


def _there_and_back(ranks: Ranks, number: mx.array, to: int) -> None:
    mx.eval(ranks.send(number, to))
    mx.eval(ranks.receive((1,), mx.float32, to))


def _time_step(ranks: Ranks, shape: str, layers: int, hidden_size: int, dtype: mx.Dtype) -> StepSums:
    """Two sums a layer of a token's activations (1, 1, hidden_size), each of what the one before gave."""
    start = mx.ones((1, 1, hidden_size), dtype)

    def step() -> None:
        x = start
        for _ in range(2 * layers):
            x = ranks.all_sum(x) * (1 / ranks.size)
        mx.eval(x)

    return StepSums(shape, 2 * layers, 2 * layers * start.nbytes, _time_sums(ranks, step))


def _time_sums(ranks: Ranks, work: Callable[[], object]) -> float:
    """Median milliseconds of work in which all ranks take part. All repeat it as often: the slowest one says.

    The first time counts for nothing, unless it took so long that it is the only one.
    """
    slowest = float(ranks.all_max(mx.array(_ms(work))).item())  # type: ignore[arg-type]
    repeats = min(SUM_REPEATS, int(BUDGET_MS / slowest))
    return median(_ms(work) for _ in range(repeats)) if repeats else slowest


def _median_ms(work: Callable[[], object], repeats: int) -> float:
    """Of the calls after the first, which fills caches and wakes threads."""
    work()
    return median(_ms(work) for _ in range(repeats))


def _ms(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1e3


def _digest(x: mx.array) -> str:
    return hashlib.sha256(memoryview(x)).hexdigest()[:16]  # type: ignore[arg-type]


def _most(values: Sequence[str]) -> str:
    """The value that most ranks have; of as many, the lowest rank's."""
    return Counter(values).most_common(1)[0][0]


def _findings(values: dict[str, Any]) -> RankFindings:
    """What another rank has sent."""
    return RankFindings(**values | {"environment": Environment(**values["environment"])})
