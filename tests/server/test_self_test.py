"""``kvant serve --self-test``: a sound server passes, one with a fault fails by name, a smaller model is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.command import call

from kvant.engine.load import find_model, load_folder
from kvant.server import answer_limits, security, self_checks, self_target
from kvant.server.self_test import loopback_settings, self_test
from kvant.server.service import Service
from kvant.server.settings import Settings

SETTINGS = loopback_settings(Settings(sequences=2, max_kv_size=512))


def results(service: Service, *checks: self_checks.Check) -> dict[str, tuple[str, str]]:
    try:
        return {each.name: (each.result, each.detail) for each in self_test(service, checks=checks)}
    finally:
        service.close()


def test_pocket_passes() -> None:
    done = call("serve", "--self-test", "--max-kv-size", "512")
    assert done.returncode == 0, done.stdout
    last = done.stdout.splitlines()[-1]
    assert last == f"{len(self_checks.CHECKS)} ok, 0 refused as they must be, 0 failed"
    assert "trying: structure" in done.stderr


def test_it_fails_where_the_server_does(pocket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security.Guard, "_refusal", lambda *_: None)
    monkeypatch.setattr(security.hmac, "compare_digest", lambda *_: True)
    monkeypatch.setattr(answer_limits, "MAX_STOPS", 10**6)
    monkeypatch.setattr(Service, "cancel", lambda *_: None)
    monkeypatch.setattr(self_target, "WAIT_S", 0.5)
    checks = (self_checks.hosts, self_checks.keys, self_checks.errors, self_checks.leaving, self_checks.seeds)
    found = results(Service.start(SETTINGS, *pocket), *checks)
    assert [result for result, _ in found.values()] == ["failed"] * 4 + ["ok"]
    assert "evil.example gave 200" in found["hosts"][1]
    assert "its pages are free" in found["leaving"][1]


def test_what_a_model_cannot_do_is_refused_by_name(tmp_path: Path) -> None:
    """Without a chat template there are no conversations and no tools."""
    folder = tmp_path / "plain"
    shutil.copytree(find_model("pocket"), folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "chat_template"}))
    settings = loopback_settings(Settings(model=str(folder), sequences=2, max_kv_size=64))
    service = Service.start(settings, *load_folder(folder))
    found = results(service, self_checks.chat, self_checks.tools, self_checks.prefix, self_checks.completions)
    assert [result for result, _ in found.values()] == ["refused"] * 3 + ["ok"], found


def test_options_that_would_do_nothing_are_refused() -> None:
    for option in (("--port", "80"), ("--host", "::1"), ("--max-queue", "3"), ("--allow-origin", "http://x")):
        done = call("serve", "--self-test", *option)
        assert (done.returncode, done.stdout) == (2, "")
        assert f"{option[0]} is given, but --self-test" in done.stderr
