"""``kvant doctor`` as ranks of one group, as its user meets it."""

import json
import subprocess
import sys
from collections.abc import Sequence

from support.ranks import run_ranks

KVANT = [sys.executable, "-W", "error", "-m", "kvant"]
# On two busy cores hundreds of sums take long.
FEW_SUMS = """
from kvant.cli import main
from kvant.tools.doctor import ranks
ranks.STEPS = (("small", 2, 64),)
main()
"""


def run(*arguments: str, program: Sequence[str] = KVANT) -> subprocess.CompletedProcess[str]:
    """The command as two ranks; what rank 0 returned and wrote. The other is silent and ends alike."""
    first, second = run_ranks(2, [*program, *arguments])
    assert (second.returncode, second.stdout, second.stderr) == (first.returncode, "", "")
    return first


def test_doctor() -> None:
    done = run("doctor", "--json", program=[sys.executable, "-W", "error", "-c", FEW_SUMS])
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert (found["healthy"], found["problems"]) == (True, [])
    assert [step["sums"] for step in found["steps"]] == [4]
    assert [len(found["ranks"]), found["ranks"][0]["rank"]] == [2, 0]
