"""scripts/record_terminal.py: what a screen showed is in the picture, as long as it was there."""

from xml.etree import ElementTree

import pytest
from record_terminal import HOLD, IDLE, Cell, Piece, spans, svg


def cells(text: str) -> list[Cell]:
    return [(char, "default") for char in text.ljust(9)]


def test_a_row_that_grows_keeps_its_pieces_and_a_long_pause_is_cut() -> None:
    cursor: Piece = (0, 3, "█", "default")
    rest: list[Cell] = [*cells("> a <b")[:6], *[(char, "brightblack") for char in "dim"]]
    frames = [
        (7.0, [cells("> a"), cells("")], {cursor}),
        (7.5, [list(rest), cells("x")], set[Piece]()),
        (7.5 + 10 * IDLE, [cells(""), cells("x")], set[Piece]()),
    ]
    seen = spans(frames)
    end = 0.5 + IDLE + HOLD
    assert {span: sorted(found) for span, found in seen.items()} == {
        (0.0, 0.5): [cursor],
        (0.0, 0.5 + IDLE): [(0, 0, "> a", "default")],
        (0.5, 0.5 + IDLE): [(0, 4, "<b", "default"), (0, 6, "dim", "brightblack")],
        (0.5, end): [(1, 0, "x", "default")],
    }
    picture = ElementTree.fromstring(svg(seen))
    assert sorted(each.text or "" for each in picture.iterfind(".//{*}text")) == ["<b", "> a", "dim", "x", "█"]
    assert [each.get("class") for each in picture.iterfind("{*}g")].count("end") == 1
    assert f"animation:{end:.2f}s" in picture.find("{*}style").text  # type: ignore[union-attr,operator]


def test_a_screen_that_never_changes_is_held() -> None:
    [((since, until), found)] = spans([(3.0, [cells("$")], set())]).items()
    assert (since, until, found) == (0.0, pytest.approx(HOLD), [(0, 0, "$", "default")])
