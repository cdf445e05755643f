"""The plan of a prompt that is continued several times: a second cache where windows or states cannot go back."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from support.command import call
from support.kinds import KINDS, load_kind

from kvant.cli.fitting import plan_that_fits
from kvant.errors import ContextError
from kvant.tools.machine import this_machine
from kvant.tools.plan import Settings, plan, read_folder


@pytest.fixture(scope="module", autouse=True)
def _without_compilation() -> Iterator[None]:
    """It would call a C++ compiler, the first time."""
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [8, 0])
def test_it_counts_what_a_fork_holds(kind: str, bits: int, tmp_path: Path) -> None:
    model, _ = load_kind(kind, tmp_path / "model")
    checkpoint = read_folder(tmp_path / "model")
    for tokens in (8, 200):
        cache = model.make_cache(tokens, quant_bit=bits)
        model(mx.array([[5, 6, 7]]), cache=cache)
        alone, forked = (
            plan(checkpoint, max_kv_size=tokens, settings=Settings(kv_bits=bits, forks=forks), device="cpu")
            for forks in (False, True)
        )
        assert alone.fork == 0
        assert forked.fork == (0 if cache.goes_back else cache.fork().nbytes)
        assert forked.total in (alone.total, alone.total + forked.fork, alone.loading + alone.process)
    assert cache.goes_back is (kind == "qwen2")
    assert forked.fork or cache.goes_back


def test_a_plan_that_does_not_fit_says_so(tmp_path: Path) -> None:
    load_kind("mistral", tmp_path / "model")
    checkpoint = read_folder(tmp_path / "model")
    fits = plan(checkpoint, max_kv_size=1024, settings=Settings(), device="cpu")
    machine = this_machine()
    machine = replace(machine, device="cpu", limit_bytes=fits.total)
    assert plan_that_fits(checkpoint, Settings(), 1024, machine).total == fits.total
    with pytest.raises(ContextError, match="a second cache for --n"):
        plan_that_fits(checkpoint, Settings(forks=True), 1024, machine)


def test_the_command_says_it_has_two(tmp_path: Path) -> None:
    load_kind("mistral", tmp_path / "model")
    flags = ["w10 w11", "--model", str(tmp_path / "model"), "--temp", "1", "-m", "3", "--ignore-chat-template"]
    assert "a second cache for --n: " in call("generate", *flags, "--n", "2").stderr
    assert "a second cache" not in call("generate", *flags).stderr
    assert "a second cache" not in call("generate", *flags, "--n", "2", "--max-kv-size", "8").stderr
