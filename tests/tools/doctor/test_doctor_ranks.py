"""The doctor's check of a group: what it measures, and which rank it names when one is wrong."""

import json
from dataclasses import replace
from typing import Any

import pytest
from support.counts import count
from support.ranks import run_script

from kvant.cli.doctor import _group_parts
from kvant.machine import environment
from kvant.tools.doctor.ranks import RankDiagnosis, RankFindings

HERE = environment()
SOUND = RankFindings(0, "mini", HERE, 2**34, True, 0.05)

# In turns: nothing is wrong; rank 1's sums are.
SCRIPT = """
import json, os
from kvant.ranks.environment import find_place
from kvant.ranks.group import Ranks, connect
from kvant.tools.doctor import ranks as doctor

class WrongSums(Ranks):
    def all_sum(self, x):
        return super().all_sum(x) + (self.rank == 1)

ranks = connect(find_place(os.environ).backend)
doctor.ROUND_TRIPS, doctor.SUMS = 3, 1
found = [doctor.check_ranks(ranks), doctor.check_ranks(WrongSums(ranks.group))]
print(json.dumps([each.as_json() for each in found], allow_nan=False))
"""


@pytest.mark.parametrize("size", count([2], [2, 3, 4]))
def test_a_group(size: int) -> None:
    outputs = [json.loads(text) for text in run_script(size, SCRIPT)]
    right, wrong = outputs[0]
    assert all(other[0]["ranks"] == right["ranks"] for other in outputs)
    assert (right["healthy"], right["problems"]) == (True, [])
    assert [each["rank"] for each in right["ranks"]] == list(range(size))
    assert all(each["host"] and each["memory_bytes"] > 2**28 for each in right["ranks"])
    trips = [each["round_trip_ms"] for each in right["ranks"]]
    assert [trip is not None for trip in trips] == ([True, False] if size == 2 else [True] * size)  # each cable once
    assert (right["sum_bytes"], right["sum_ms"] > 0) == (16 * 2**20, True)
    assert not wrong["healthy"]
    assert wrong["problems"] == [f"rank 1 ({right['ranks'][1]['host']}) gets a wrong sum of whole numbers"]


def group(**wrong: Any) -> RankDiagnosis:
    """Three ranks, of which the last is wrong."""
    ranks = [SOUND, replace(SOUND, rank=1), replace(SOUND, rank=2, host="studio", **wrong)]
    return RankDiagnosis(ranks, 2**24, 16.0)


def test_what_is_wrong_is_named_and_printed() -> None:
    found = group(environment=replace(HERE, versions=HERE.versions | {"mlx": "0.31.0"}))
    assert found.problems == [f"rank 2 (studio) has mlx 0.31.0; rank 0 has {HERE.versions['mlx']}"]
    _, *lines = _group_parts(group(sum_right=False))
    assert lines == [
        *(f"4 bytes from rank {rank} to rank {(rank + 1) % 3} and back: 0.050 ms" for rank in range(3)),
        "sum of 16.78 MB: 16.0 ms, 1.05 GB/s",
        "wrong: rank 2 (studio) gets a wrong sum of whole numbers",
        "the 3 ranks do not agree",
    ]
