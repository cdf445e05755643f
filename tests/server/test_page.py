"""The page's files: what is served is what lies in its folder, and it refers to nothing elsewhere."""

import re
from pathlib import Path

import pytest
from support.server import Running

from kvant.server import page

FILES = sorted(page.FOLDER.iterdir())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_each_file(path: Path, server: Running) -> None:
    response = server.client.get(f"/page/{path.name}")
    assert response.content == path.read_bytes()
    assert response.headers["content-type"].split(";")[0] == page.TYPES[path.suffix]
    assert response.headers["content-security-policy"] == page.POLICY
    assert response.headers["x-content-type-options"] == "nosniff"
    again = server.client.get(f"/page/{path.name}", headers={"if-none-match": response.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["content-security-policy"] == page.POLICY


def test_the_first_one_and_no_other_file(server: Running) -> None:
    response = server.client.get("/")
    assert response.content == (page.FOLDER / "index.html").read_bytes()
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert server.client.head("/").status_code == 200
    assert server.client.post("/").status_code == 405
    for name in ("nothing.js", "..%2fpage.py", "%2e%2e/live.py", "page.py"):
        assert server.client.get(f"/page/{name}").status_code == 404


def test_the_policy_lets_in_nothing_but_the_servers_own() -> None:
    rules = dict(rule.strip().split(" ", 1) for rule in page.POLICY.split(";"))
    assert set(rules.values()) <= {"'none'", "'self'", "'script'"}
    assert rules["default-src"] == "'none'"


def test_nothing_is_absolute() -> None:
    for path in FILES:
        text = path.read_text()
        found = set(re.findall(r"\b(?:https?|wss?):/*[\w.]+", text))
        assert found <= {"http://www.w3.org"}, path.name  # the namespace of SVG
        assert not re.search(r"""(?:src|href|fetch|import|from)\s*[=(]?\s*["'`]/""", text), path.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text)
    index = (page.FOLDER / "index.html").read_text()
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?! type=\"module\" src=)", index)
