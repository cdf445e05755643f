"""What many tests share: the embedded model, loaded once, and held-out texts it was not trained on."""

import gc
import io
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import kvant  # isort: skip  (before MLX: it loads a faster BLAS)
import mlx.nn as nn
import pytest
from hypothesis import HealthCheck, settings
from support.checkpoints import load_reference, qwen2_config, reference_model, save_checkpoint
from support.completions import served  # noqa: F401, a fixture
from support.counts import count
from support.fused_path import checked_gpu, fused_calls, gpu, launches  # noqa: F401, fixtures
from support.metal_host import summary
from support.pull_machine import files, hub, machine, pulling  # noqa: F401, fixtures
from support.selection import DEFAULT, is_left_out, markers

from kvant.engine.load import POCKET, find_model
from kvant.models import Decoder
from kvant.tools.report.texts import heldout_documents

# The gate draws the same examples every time: it goes by no luck. The long run draws others.
# A busy machine is no finding.
settings.register_profile(
    "gate", derandomize=count(True, False), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("gate")

TESTS = Path(__file__).parent
HOST_RUNS = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[HOST_RUNS] = []
    os.environ["KVANT_CONFIG"] = ""  # the settings of whoever runs the tests count for nothing
    os.environ.pop("KVANT_MODEL", None)
    # as of a job in a shell's background: tests send Ctrl-C
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # as under nohup: what the tests start is to heed it
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)


def pytest_report_header(config: pytest.Config) -> str:
    return f'selected: {config.option.markexpr or "every test"} (pytest -m "" runs every test)'


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A plain ``pytest`` does not even import the files that it runs no test of, unless they are asked for
    by name.
    """
    is_named = any(collection_path == Path(name.partition("::")[0]).resolve() for name in config.args)
    if config.option.markexpr != DEFAULT or is_named or collection_path.suffix != ".py":
        return None
    return is_left_out(collection_path.relative_to(TESTS).as_posix()) or None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks what a plain ``pytest`` leaves out."""
    for marker in markers(item.nodeid.removeprefix("tests/")):
        item.add_marker(marker)


def pytest_collection_finish() -> None:
    """Garbage is looked for among what the tests make, and not in modules and tests: a search takes a
    tenth.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _nothing_is_piped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command in this process finds an empty standard input."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker process tells the one that started it what it ran."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["host_run"] = summary()


@pytest.hookimpl(optionalhook=True)  # pytest-xdist's
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[HOST_RUNS].append(getattr(node, "workeroutput", {}).get("host_run", ""))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Says with which compiler Metal kernels ran on the host, for .ci/run to check that they did."""
    for line in filter(None, [*config.stash[HOST_RUNS], summary()]):
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def pocket_folder() -> Path:
    """The embedded model's folder."""
    return find_model(POCKET)


@pytest.fixture(scope="session")
def pocket(pocket_folder: Path) -> tuple[Decoder, Any]:
    """The embedded model and its tokenizer."""
    return kvant.load(POCKET)


@pytest.fixture(scope="session")
def headed() -> tuple[Decoder, Any]:
    """The embedded model with its head for drafts, and its tokenizer."""
    return kvant.load(POCKET, mtp=True)


@pytest.fixture(scope="session")
def pocket_mlx_lm(pocket_folder: Path) -> nn.Module:
    """mlx-lm's model on the embedded weights, in float32."""
    return load_reference(pocket_folder)


@pytest.fixture(scope="session")
def heldout() -> list[dict[str, Any]]:
    """Held-out documents, by kind."""
    return list(heldout_documents())


@pytest.fixture(scope="session")
def heldout_ids(pocket: tuple[Decoder, Any], heldout: list[dict[str, Any]]) -> list[int]:
    """1,024 tokens of held-out text, conversations through the chat template."""
    _, tokenizer = pocket
    render = partial(tokenizer.apply_chat_template, tokenize=False)
    texts = (
        render(document["messages"]) if "messages" in document else document["text"] for document in heldout
    )
    encoded = (tokenizer.encode(text, add_special_tokens=False) for text in texts)
    ids = list(islice(chain.from_iterable(encoded), 1024))
    assert len(ids) == 1024, "there are fewer tokens of held-out text"
    return ids


@pytest.fixture
def make_checkpoint(tmp_path: Path) -> Callable[..., tuple[Path, nn.Module]]:
    """A function (config changes) -> (folder of a random checkpoint, mlx-lm's model with its weights)."""

    def make(shards: int = 1, **changes: Any) -> tuple[Path, nn.Module]:
        config = qwen2_config(**changes)
        model = reference_model(config)
        return save_checkpoint(tmp_path / "model", config, model, shards), model

    return make
