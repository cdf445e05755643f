"""The instances of the kernel that commands make on a GPU: when nothing is recorded, and when the trials
are.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from support.command import call
from support.drafts import draft_by_chance
from support.fused_path import begin_process, unfused_append
from support.metal_host import host_pytest_skip
from support.server import served

from kvant.operators import dispatch, paged_kernel, probe
from kvant.operators.kernels import attend

pytestmark = host_pytest_skip

# more tokens than the kernel takes
QUESTION = "Tell me a story about a small fox who lives in the deep forest."
# Kernels, and queries of a simdgroup. Pocket has two query heads for a kv head.
TOKEN = [("append", None), ("attend", 2), ("combine", None)]
TRIED = [("append", None), ("attend", 2), ("attend", 4), ("combine", None)]


@pytest.fixture
def instances(fused_calls: Any, monkeypatch: pytest.MonkeyPatch) -> set[Any]:
    """All that makes each instance that is launched. The stand-in computes the numbers."""
    made: set[Any] = set()
    stand_in = paged_kernel.attend

    def launched(
        name: str, backend: str, inputs: Any, *, template: dict[str, Any], outputs: Any, **sizes: Any
    ) -> list[mx.array]:
        made.add((name, template.get("QUERIES"), *template.items(), *((x.dtype, x.size < 8) for x in inputs)))
        if name == "append":
            return unfused_append(name, backend, inputs, template=template)
        return [mx.zeros(shape, dtype) for shape, dtype in outputs]

    def attended(*arguments: Any, **options: Any) -> mx.array:
        attend.attend(*arguments, **options)
        return stand_in(*arguments, **options)

    monkeypatch.setattr(attend, "launch", launched)
    monkeypatch.setattr(paged_kernel, "attend", attended)
    monkeypatch.setattr(dispatch, "probe_failure", probe.probe_failure)
    return made


def _named(instances: set[Any]) -> list[tuple[str, int | None]]:
    return sorted(instance[:2] for instance in instances)


def _command(*arguments: str, stdin: str = "") -> str:
    done = call(*arguments, "--temp", "0", "-m", "40", stdin=stdin)
    assert done.returncode == 0, done.stderr
    return done.stderr


def _serve() -> str:
    """Two answers at once."""
    with served(model="pocket", sequences=2, max_kv_size=256) as server:
        body = {"model": "pocket", "prompt": QUESTION, "max_tokens": 12, "temperature": 0, "n": 2}
        assert server.client.post("/v1/completions", json=body).is_success
    return CHECKING


CHECKING = "checking the fused kernel on this GPU; "
COMMANDS: dict[str, Callable[[], str]] = {
    "generate": lambda: _command("generate", QUESTION),
    "chat": lambda: _command("chat", stdin=f"{QUESTION}\n"),
    "serve": _serve,
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_later_start_makes_what_a_token_takes(instances: set[Any], name: str) -> None:
    assert COMMANDS[name]().count(CHECKING) == 1
    assert _named(instances) == TRIED
    instances.clear()
    begin_process()
    assert (CHECKING in COMMANDS[name]()) == (name == "serve")
    assert _named(instances) == TOKEN


def test_a_draft_asks_for_one_more(instances: set[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    draft_by_chance(monkeypatch, 1)
    COMMANDS["generate"]()
    instances.clear()
    begin_process()
    _command("generate", "Say it twice: a red ball, a red ball, a red ball, a red ball.", "--draft", "prompt")
    assert _named(instances) == TRIED
