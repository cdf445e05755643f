"""What ranks send each other, and how it is counted."""

import json

import pytest
from support.ranks import run_script

from kvant.errors import RanksError
from kvant.ranks.group import connect

SCRIPT = """
import json
from kvant.ranks.group import connect
import mlx.core as mx
ranks = connect("ring")
total = ranks.all_sum(mx.full((2, 3), float(ranks.rank + 1)))
most = ranks.all_max(mx.array([ranks.rank, -ranks.rank]))
parts = ranks.all_gather(mx.array([[ranks.rank]]))
mx.eval(total, most, parts)
right, left = (ranks.rank + 1) % ranks.size, (ranks.rank - 1) % ranks.size
if ranks.rank == 0:
    mx.eval(ranks.send(mx.array([7.0]), right))
    seen = ranks.receive((1,), mx.float32, left)
else:
    seen = ranks.receive((1,), mx.float32, left)
    mx.eval(ranks.send(seen + 1, right))
traffic = ranks.traffic
counts = [traffic.sums, traffic.messages, traffic.bytes]
print(json.dumps([total.tolist(), most.tolist(), parts.tolist(), seen.tolist(), counts]))
"""


@pytest.mark.parametrize("count", [2, 3])
def test_collectives(count: int) -> None:
    found = [json.loads(out) for out in run_script(count, SCRIPT)]
    total = [[count * (count + 1) / 2] * 3] * 2
    parts = [[rank] for rank in range(count)]
    item = 4
    for rank, (summed, most, gathered, seen, counts) in enumerate(found):
        assert summed == total
        assert most == [count - 1, 0]
        assert gathered == parts
        assert seen == [7.0 + (rank - 1) % count]
        assert counts == [3, 2, item * (6 + 2 + count + 2)]


def test_no_ring() -> None:
    with pytest.raises(RanksError, match="back end 'ring' does not start"):
        connect("ring")
