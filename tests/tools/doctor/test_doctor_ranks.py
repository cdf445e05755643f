"""The doctor's check of a group: what it measures, and which rank it names when one is wrong."""

import hashlib
import json
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.counts import count
from support.ranks import run_script

from kvant.cli.doctor import _print_group
from kvant.machine import environment
from kvant.tools.doctor import ranks
from kvant.tools.doctor.ranks import ALLOWED, RankDiagnosis, RankFindings, StepSums, judge, with_logits

HERE = environment()
OTHER = replace(HERE, device="another processor (cpu)")
SOUND = RankFindings(0, "mini", HERE, 2**34, True, True, "sum", "logits", 0.0, 0.05)

# In turns: nothing is wrong; rank 1's sums are; so are the logits that it computes.
SCRIPT = """
import json, os
import kvant
from kvant.ranks.environment import find_place
from kvant.ranks.group import Ranks, connect
from kvant.ranks.guard import Ended, Guard
from kvant.tools.doctor import ranks as doctor

class WrongSums(Ranks):
    def all_sum(self, x):
        return super().all_sum(x) + (self.rank == 1)

place = find_place(os.environ)
guard = Guard.join(place, {})
ranks = connect(place.backend)
doctor.STEPS, doctor.ROUND_TRIPS, doctor.SUM_REPEATS = (("small", 2, 64),), 3, 1
logits = doctor._logits
found = [doctor.check_ranks(ranks, guard), doctor.check_ranks(WrongSums(ranks.group), guard)]
if ranks.rank == 1:
    doctor._logits = lambda: logits() * 1.5
found.append(doctor.check_ranks(ranks, guard))
if ranks.rank == 0:
    print(json.dumps([each.as_json() for each in found], allow_nan=False))
    guard.end(0)
else:
    print(json.dumps(found))
    try:
        guard.receive()
    except Ended as end:
        raise SystemExit(end.code)
"""


@pytest.mark.parametrize("size", count([2], [2, 3, 4]))
def test_a_group(size: int) -> None:
    first, *others = map(json.loads, run_script(size, SCRIPT))
    assert others == [[None] * 3] * (size - 1)
    right, sums, logits = first
    assert (right["healthy"], right["problems"], right["notes"]) == (True, [], [])
    assert [each["rank"] for each in right["ranks"]] == list(range(size))
    assert all(each["host"] and each["memory_bytes"] > 2**28 for each in right["ranks"])
    trips = [each["round_trip_ms"] for each in right["ranks"]]
    assert [trip is not None for trip in trips] == ([True, False] if size == 2 else [True] * size)  # each cable once
    assert all(0 < trip < 10_000 for trip in trips if trip is not None)
    [step] = right["steps"]
    assert (step["shape"], step["sums"]) == ("small", 4)
    assert step["bytes"] == 4 * 64 * {"float32": 4, "bfloat16": 2}[right["dtype"]]
    assert right["large_bytes"] == 16 * 2**20
    assert right["large_gb_per_s"] == pytest.approx(right["large_bytes"] / right["large_ms"] / 1e6)
    assert min(step["ms"], right["large_ms"], right["guard_ms"]) > 0

    host = right["ranks"][1]["host"]
    assert sums["problems"] == [
        f"rank 1 ({host}) gets a wrong sum of whole numbers from the back end",
        f"rank 1 ({host}) gets other bits of a sum than the other ranks",
    ]
    [problem] = logits["problems"]
    assert problem.startswith(f"rank 1 ({host}) computes other logits than rank 0: off by 0.5 of the largest")
    assert not sums["healthy"]
    assert not logits["healthy"]


def test_the_integers_are_what_numpy_computes() -> None:
    x = np.arange(ranks.LARGE, dtype=np.uint32) * np.uint32(2654435761)
    x = (x ^ (x >> 15)) * np.uint32(2654435761)
    x ^= x >> 13
    assert hashlib.sha256(x.tobytes()).hexdigest()[:16] == ranks.INTEGERS
    assert np.array_equal(np.array(ranks._integers()), x)
    for rank in (0, 1, 16):
        expected = (x >> (rank % 16)) & 0xFFFF
        assert np.array_equal(np.array(ranks._summand(mx.array(x), rank)), expected)


def group(**wrong: Any) -> list[RankFindings]:
    """Three ranks, of which the last is wrong."""
    return [SOUND, replace(SOUND, rank=1), replace(SOUND, rank=2, host="studio", **wrong)]


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"integers_right": False}, "computes whole numbers wrong: its memory or its device is broken"),
        ({"sum_right": False}, "gets a wrong sum of whole numbers from the back end"),
        ({"sum_digest": "other"}, "gets other bits of a sum than the other ranks"),
        ({"logits_digest": "other"}, "computes other bits than rank 0, with the same device and versions"),
        ({"logits_off": 0.06}, "computes other logits than rank 0: off by 0.06 of the largest; expected at most 0.05"),
        ({"logits_off": float("nan"), "environment": OTHER}, "computes other logits than rank 0: off by nan of"),
        (
            {"environment": replace(HERE, versions=HERE.versions | {"mlx": "0.31.0"})},
            f"has mlx 0.31.0; rank 0 has {HERE.versions['mlx']}",
        ),
    ],
)
def test_the_rank_that_is_wrong_is_named(wrong: dict[str, Any], problem: str) -> None:
    [found], notes = judge(group(**wrong))
    assert found.startswith(f"rank 2 (studio) {problem}")
    assert notes == []


def test_the_first_rank_is_named_where_the_others_agree() -> None:
    found = [replace(SOUND, sum_digest="other", logits_digest="other", logits_off=0.5), *group()[1:]]
    problems, _ = judge(found)
    assert [text.partition(" (")[0] for text in problems] == ["rank 0", "rank 0"]


def test_another_device_may_round_otherwise() -> None:
    problems, [note] = judge(group(logits_digest="other", logits_off=0.01, environment=OTHER))
    assert problems == []
    assert note.startswith("rank 2 (studio) rounds otherwise than rank 0, on another device or system (off by 0.01)")


def test_logits_are_compared_with_those_of_most_ranks() -> None:
    usual = mx.array([1.0, -4.0, 2.0])
    found = with_logits(group(), mx.stack([usual + 0.5, usual, usual]))
    assert [each.logits_off for each in found] == [0.125, 0.0, 0.0]
    assert found[0].logits_digest != found[1].logits_digest == found[2].logits_digest
    broken = with_logits(group(), mx.stack([usual, usual, usual * float("nan")]))
    assert [each.logits_off <= ALLOWED for each in broken] == [True, True, False]


def test_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    found = group(sum_right=False)
    problems, _ = judge(found)
    step = StepSums("Qwen2.5-7B", 56, 802_816, 4.25)
    _print_group(RankDiagnosis(found, "float32", [step], 2**24, 16.0, 0.5, problems, ["a note"]))
    lines = capsys.readouterr().out.splitlines()
    assert lines[-9:] == [
        "4 bytes from rank 0 to rank 1 and back: 0.050 ms",
        "4 bytes from rank 1 to rank 2 and back: 0.050 ms",
        "4 bytes from rank 2 to rank 0 and back: 0.050 ms",
        "guard: all ranks have answered after 0.50 ms",
        "sums of a token of Qwen2.5-7B's shape in tensor mode, float32: 4.25 ms (56 sums, 802.82 kB)",
        "sum of 16.78 MB: 16.0 ms, 1.05 GB/s",
        "note: a note",
        "wrong: rank 2 (studio) gets a wrong sum of whole numbers from the back end",
        "the 3 ranks do not agree",
    ]
    assert "studio" in "".join(lines[:-9])
