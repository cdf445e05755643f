"""Check the ranks of a launcher: the round trip over each connection, and one sum over all ranks."""

import json
import platform
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx

from kvant.machine import Environment, environment
from kvant.ranks.group import Ranks
from kvant.sizes import physical_memory
from kvant.tools.statistics import median_ms

# measured, after one warm-up
ROUND_TRIPS = 100
SUMS = 5
LARGE = 4 * 1024 * 1024  # numbers: 16 MiB of float32
FACTS_BYTES = 2048  # more than a rank's results take


@dataclass(frozen=True, slots=True)
class RankFindings:
    rank: int
    host: str  # the machine's name
    environment: Environment
    memory_bytes: int
    sum_right: bool  # whether this rank got the right sum of whole numbers over all ranks
    # for 4 bytes to the next rank and back; None if the previous rank measured this connection
    round_trip_ms: float | None


@dataclass(frozen=True, slots=True)
class RankDiagnosis:
    ranks: list[RankFindings]
    sum_bytes: int
    sum_ms: float  # time of one sum of that size on rank 0

    @property
    def problems(self) -> list[str]:
        problems = []
        expected = self.ranks[0].environment.versions
        for each in self.ranks:
            name = f"rank {each.rank} ({each.host})"
            for package, version in each.environment.versions.items():
                if version != expected.get(package):
                    problems.append(f"{name} has {package} {version}; rank 0 has {expected.get(package)}")
            if not each.sum_right:
                problems.append(f"{name} gets a wrong sum of whole numbers")
        return problems

    @property
    def healthy(self) -> bool:
        return not self.problems

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"problems": self.problems, "healthy": self.healthy}


def check_ranks(ranks: Ranks) -> RankDiagnosis:
    """Measure the connections and check a sum. All ranks must call this; all get the same results."""
    round_trip_ms = _time_round_trips(ranks)
    # float32 holds sums of 256 ranks' numbers below 2**16 without rounding.
    numbers = (mx.arange(LARGE) & 0xFFFF).astype(mx.float32)
    expected = numbers * ranks.size + ranks.size * (ranks.size - 1) // 2
    mx.eval(numbers, expected)
    sum_ms = median_ms(lambda: mx.eval(ranks.all_sum(numbers)), SUMS)
    sum_right = bool(mx.array_equal(ranks.all_sum(numbers + ranks.rank), expected))
    local = RankFindings(
        ranks.rank, platform.node(), environment(), physical_memory(), sum_right, round_trip_ms
    )
    findings = []
    for row in ranks.all_gather(
        mx.array([list(json.dumps(asdict(local)).encode().ljust(FACTS_BYTES))], mx.uint8)
    ):
        values = json.loads(bytes(memoryview(row)))  # type: ignore[arg-type]
        findings.append(RankFindings(**values | {"environment": Environment(**values["environment"])}))
    return RankDiagnosis(findings, numbers.nbytes, sum_ms)


def _time_round_trips(ranks: Ranks) -> float | None:
    """Time 4 bytes to the next rank and back, in ms. Pairs of neighbours go one after another."""
    measured = None
    number = mx.array([1.0], mx.float32)

    def there_and_back(to: int) -> None:
        mx.eval(ranks.send(number, to))
        mx.eval(ranks.receive((1,), mx.float32, to))

    for first in range(ranks.size if ranks.size > 2 else 1):
        second = (first + 1) % ranks.size
        if ranks.rank == first:
            measured = median_ms(lambda to=second: there_and_back(to), ROUND_TRIPS)  # type: ignore[misc]
        elif ranks.rank == second:
            for _ in range(1 + ROUND_TRIPS):
                mx.eval(received := ranks.receive((1,), mx.float32, first))
                mx.eval(ranks.send(received, first))
    return measured
