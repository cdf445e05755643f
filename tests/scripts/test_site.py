"""The documentation site: what would ask another machine is found. Broken links are refused by Sphinx
itself.
"""

import runpy
from pathlib import Path

import pytest

CONF = Path(__file__).parents[2] / "docs" / "site" / "conf.py"
outside_requests = runpy.run_path(str(CONF))["outside_requests"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.html", '<script async src="https://cdn.example/x.js"></script>'),
        ("a.html", "<img alt='' src='//cdn.example/x.png'>"),
        ("a.html", '<link rel="preconnect" href="https://fonts.example">'),
        ("deep/a.css", '@import url("https://fonts.example/x");'),
        ("a.css", "b { background: url( //cdn.example/x.png) }"),
        ("a.js", "const x = await fetch('https://cdn.example/x.json')"),
        ("a.svg", '<image href="https://cdn.example/x.png"/>'),
    ],
)
def test_a_request_to_another_machine_is_found(tmp_path: Path, name: str, text: str) -> None:
    page = tmp_path / name
    page.parent.mkdir(exist_ok=True)
    page.write_text(text)
    [found] = outside_requests(tmp_path)
    assert found.startswith(f"{name}: ")


@pytest.mark.parametrize(
    "text",
    [
        '<a href="https://example.org">a link</a><svg xmlns="http://www.w3.org/2000/svg"/>',
        '<script src="_static/x.js"></script><link rel="stylesheet" href="_static/x.css">',
        '<link rel="canonical" href="https://example.org/a.html"><code>&lt;img '
        'src="https://example.org"&gt;</code>',
        "<style>b { background: url(data:image/png;base64,AA//) }</style>",
    ],
)
def test_what_asks_nobody_is_left_alone(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.html").write_text(text)
    assert outside_requests(tmp_path) == []
