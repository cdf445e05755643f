"""The record of the kernel's trials: who finds one, when it counts for nothing, and what changes it."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import pytest
from support.fused_path import begin_process

from kvant.operators import dispatch, kernel_record
from kvant.operators.kernel_record import RIGHT
from kvant.operators.probe import KernelUse

USE = KernelUse(64, 64, mx.float16, 8, 32, heads=7)
OTHER = KernelUse(128, 128, mx.float16, 8, 32, heads=4)


@pytest.fixture
def trials(gpu: None, monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Trials of the kernel; ``return_value`` is what each finds."""
    made = Mock(return_value=None)
    monkeypatch.setattr(dispatch, "probe_failure", made)
    return made


def resolved(kernels: str | None = None, *uses: KernelUse) -> str | None:
    """What a process decides that has just begun."""
    begin_process()
    return dispatch.resolve(kernels, uses=uses or [USE])


def test_what_a_process_found_others_find(trials: Mock) -> None:
    dispatch.say = say = Mock()
    assert resolved(None, USE, USE, OTHER) == "metal"
    assert [call.args for call in trials.call_args_list] == [(USE, "metal"), (OTHER, "metal")]
    path = kernel_record.path()
    say.assert_called_once_with(
        f"checking the fused kernel on this GPU; later starts find the result in {path}"
    )
    assert path.stat().st_mode & 0o777 == 0o600
    assert resolved("fused", OTHER, USE) == resolved() == "metal"
    assert (trials.call_count, say.call_count) == (2, 1)


def test_a_failure_is_kept_until_somebody_asks_for_the_kernel(trials: Mock) -> None:
    trials.return_value = "too large"
    for _ in range(2):
        with pytest.warns(RuntimeWarning, match="fails here: too large; .*`kvant doctor` tries again"):
            assert resolved() is None
    assert trials.call_count == 1
    with pytest.raises(RuntimeError, match="is asked for, but fails here: too large"):
        resolved("fused")
    with pytest.raises(RuntimeError, match="too large"):  # in the same process: once is enough
        dispatch.resolve("fused", uses=[USE])
    assert trials.call_count == 2
    trials.return_value = None
    assert resolved("fused") == resolved() == "metal"
    assert trials.call_count == 3


def test_a_later_failure_is_kept_as_a_trials_is(trials: Mock) -> None:
    """But a lack of memory, which says nothing of the kernel."""
    assert resolved(None, USE, OTHER) == "metal"
    short = "a step failed: [METAL] Command buffer execution failed: Insufficient Memory"
    kernel_record.keep({USE: "a step failed: no", OTHER: short}, "metal")
    for _ in range(2):  # in the same process, and in another one
        with pytest.warns(RuntimeWarning, match="fails here: a step failed: no"):
            assert dispatch.resolve(uses=[USE]) is None
        assert dispatch.resolve(uses=[OTHER]) == "metal"
        begin_process()
    assert trials.call_count == 2
    kernel_record.keep({OTHER: RIGHT}, "metal", anew=True)  # as `kvant doctor`
    assert resolved() == "metal"
    assert trials.call_count == 3


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def _linked(path: Path) -> None:
    os.link(path, path.with_name("other"))
    path.unlink()
    path.symlink_to(path.with_name("other"))


SPOILED: dict[str, Callable[[Path], object]] = {
    "cut": _cut,
    "empty": lambda path: path.write_bytes(b""),
    "another kind": lambda path: path.write_text("[]"),
    "of other things": lambda path: path.write_text(
        json.dumps(dict.fromkeys(json.loads(path.read_text()), 1))
    ),
    "nested": lambda path: path.write_text("[" * 10**5),
    "no text": lambda path: path.write_bytes(b"\xff\xfe{}"),
    "large": lambda path: path.write_text(
        f'{{"x": {{"y": "{"z" * kernel_record.MAX_BYTES}"}}, {path.read_text()[1:]}'
    ),
    "writable by a group": lambda path: path.chmod(0o660),
    "writable by all": lambda path: path.chmod(0o606),
    "a link": _linked,
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_file_that_is_no_record_of_ours_is_as_none(trials: Mock, name: str) -> None:
    resolved()
    SPOILED[name](kernel_record.path())
    for tries in (2, 2 if name not in ("a pipe", "a folder") else 3):  # it is written anew, if something may
        assert resolved() == "metal"
        assert trials.call_count == tries


def test_a_file_of_another_user_is_as_none(trials: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    resolved()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert resolved() == "metal"
    assert trials.call_count == 2


@pytest.mark.parametrize("what", ["device", "system", "mlx", "text"])
def test_another_device_system_mlx_or_text_is_tried_anew(
    trials: Mock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str
) -> None:
    """And what was found before stays in the file: a machine may have two versions in turn."""
    (tmp_path / "attend.h").write_text("another text")
    changes: dict[str, tuple[Any, str, Any]] = {
        "device": (mx, "device_info", lambda: {"device_name": "Apple M9", "architecture": "applegpu_g99"}),
        "system": (os, "uname", lambda: os.uname_result(("Darwin", "here", "99.1", "xnu", "arm64"))),
        "mlx": (kernel_record, "version", lambda name: "99.1"),
        "text": (kernel_record.resources, "files", lambda name: tmp_path),
    }
    for is_other, tries in ((False, 1), (True, 2), (True, 2), (False, 2)):
        with monkeypatch.context() as other:
            if is_other:
                other.setattr(*changes[what])
            assert resolved() == "metal"
        assert trials.call_count == tries


def test_the_record_is_bounded(trials: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    uses = [
        KernelUse(64, 64, mx.float16, 8, 32, window=width) for width in range(1, kernel_record.MOST_USES + 50)
    ]
    for number in range(kernel_record.MOST_DEVICES + 2):
        monkeypatch.setattr(kernel_record, "version", lambda name, number=number: f"99.{number}")
        begin_process()
        kernel_record.keep(dict.fromkeys(uses, "\x00" * 10**4), "metal")
    kept = json.loads(kernel_record.path().read_bytes())
    assert [key.split("mlx ")[1][:4] for key in kept] == [
        f"99.{n}" for n in range(2, kernel_record.MOST_DEVICES + 2)
    ]
    assert {len(own) for own in kept.values()} == {kernel_record.MOST_USES}
    assert all(repr(uses[-1]) in own for own in kept.values())


def test_a_folder_that_cannot_be_written_is_no_error(
    trials: Mock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(kernel_record, "user_cache", lambda: tmp_path / "file" / "kvant")
    assert resolved() == dispatch.resolve(uses=[USE]) == "metal"
    assert trials.call_count == 1
    assert kernel_record.describe("metal").endswith("kernels.json: 0 formats right on this device, 0 not")
