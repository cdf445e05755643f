"""What a rank other than 0 does with its part of the memory plan."""

from types import SimpleNamespace

import pytest

from kvant.cli import follow as module
from kvant.cli.options import RunOptions
from kvant.cli.parts import Arranged


@pytest.mark.parametrize(("wired", "bounded"), [(False, False), (True, False), (False, True)])
def test_options_of_memory_are_applied(wired: bool, bounded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on rank 0: --wired, and a server's bound."""
    done: list[tuple[str, object]] = []
    arranged = Arranged("pipeline", [range(1), range(1, 2)], total=30, arrays=20, scratch=10)
    monkeypatch.setattr(module.ranks, "guard", lambda: SimpleNamespace(rank=1))
    monkeypatch.setattr(module, "prepare", lambda run, folder: (None,) * 3)
    monkeypatch.setattr(module, "arrange", lambda *options: arranged)
    monkeypatch.setattr(module, "loader", lambda given: lambda *folder: done.append(("load", given)))
    monkeypatch.setattr(module, "compute", lambda part, guard: 0)
    monkeypatch.setattr(module, "wire", lambda count: done.append(("wire", count)))
    monkeypatch.setattr(module, "bound_memory", lambda *limits: done.append(("bound", limits)))
    module.follow(RunOptions(wired=wired), bounded=bounded)
    expected = [("wire", 30)] * wired + [("bound", (20, 10))] * bounded
    assert done == [*expected, ("load", arranged)]
