"""The command that installs an extra: of the folder, file or repository that kvant was installed from."""

import json
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest

from kvant.installation import install_command


@pytest.mark.parametrize(
    ("record", "command"),
    [
        (None, "pip install 'kvant[serve]'"),
        ({"url": "file:///home/me/kvant", "dir_info": {}}, "pip install '/home/me/kvant[serve]'"),
        (
            {"url": "file:///home/my%20code/kvant", "dir_info": {"editable": True}},
            "pip install -e '/home/my code/kvant[serve]'",
        ),
        (
            {"url": "file:///tmp/kvant-0.1.0-py3-none-any.whl", "archive_info": {}},
            "pip install '/tmp/kvant-0.1.0-py3-none-any.whl[serve]'",
        ),
        (
            {"url": "https://git.example/kvant", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "pip install 'kvant[serve] @ git+https://git.example/kvant@abc'",
        ),
    ],
)
def test_the_command_of_an_installation(
    record: dict[str, Any] | None, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = None if record is None else json.dumps(record)
    monkeypatch.setattr(metadata, "distribution", lambda _: SimpleNamespace(read_text=lambda _: text))
    assert install_command("serve") == command


def test_without_any_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    assert install_command("plot") == "pip install 'kvant[plot]'"
