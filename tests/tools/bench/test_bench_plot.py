"""The plot shows the medians and bands that it says it shows."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.recordings import record, streams

from kvant.errors import KvantError
from kvant.tools.bench.plot import POINTS, plot
from kvant.tools.bench.recording import Recording
from kvant.tools.drawing import check_plot_path


def _recording(**options: Any) -> Recording:
    return record(lambda _, run, context, position: (1 + run) * (500 if position == context else 2), **options)


def test_what_cannot_be_drawn(tmp_path: Path) -> None:
    (tmp_path / "x.png").mkdir()
    for name, message in (
        ("a.txt", r"ends in \.png or \.svg"),
        ("a", r"\.png or \.svg"),
        ("no/a.png", "does not exist"),
        ("x.png", "cannot be written"),
    ):
        for call in (check_plot_path, lambda path: plot(_recording(), path)):
            with pytest.raises(ValueError, match=message):
                call(tmp_path / name)
    with pytest.raises(KvantError, match="nothing to draw"):
        plot(_recording(tokens=1), tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(KvantError, match=r"pip install 'kvant\[plot\]'"):
        check_plot_path(tmp_path / "a.png")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What the last figure shows, in the data's own units: lines, band, scale and caption."""
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    seen, save = SimpleNamespace(), Figure.savefig

    def savefig(figure: Figure, *args: Any, **options: Any) -> None:
        axes = figure.axes[0]
        labels = [text.get_text() for text in figure.legends[0].get_texts()]
        points = [list(zip(*(x.tolist() for x in line.get_data()), strict=True)) for line in axes.lines]
        seen.lines = dict(zip(labels, points, strict=True))
        if axes.collections:
            corners = axes.collections[0].get_paths()[0].vertices[:, 1]
            seen.band = (corners.min(), corners.max())
        seen.scale, seen.caption = axes.get_yscale(), figure.get_supxlabel()
        save(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return seen


def test_an_svg_has_a_label_an_engine_and_is_the_same_again(tmp_path: Path, drawn: SimpleNamespace) -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    labels = ["fast", "slow", "$x$_[b] & <c>"]
    for name in ("a.svg", "b.svg", "a.PNG"):
        plot(_recording(engines=labels, contexts=(8, 32)), tmp_path / name)
    assert dict(matplotlib.rcParams) == before
    assert (tmp_path / "a.PNG").read_bytes().startswith(b"\x89PNG\r\n")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    texts = re.findall(r"<text[^>]*>(.*?)</text>", (tmp_path / "a.svg").read_text(), re.DOTALL)
    for label in ("fast", "slow", "$x$_[b] &amp; &lt;c&gt;", "latency, ms a token"):
        assert texts.count(label) == 1
    assert [t for t in texts if "prompt of" in t] == [f"position, tokens (prompt of {c})" for c in (8, 32)]
    assert "pocket on a processor, 2 cores" in texts


def test_lines_are_medians_over_runs_in_a_band(tmp_path: Path, drawn: SimpleNamespace) -> None:
    """Runs of 2, 4 and 6 ms; then of five, whose quartiles are 4 and 8. The first token's 500 ms are nowhere."""
    plot(_recording(rounds=3), tmp_path / "a.png")
    assert drawn.lines["fast"] == [(position, 4.0) for position in range(9, 14)]
    assert drawn.band == (2.0, 6.0)
    assert drawn.caption == "line: median over 3 runs; band: lowest to highest; first tokens left out"
    plot(_recording(rounds=5), tmp_path / "a.png")
    assert drawn.lines["slow"] == [(position, 6.0) for position in range(9, 14)]
    assert drawn.band == (4.0, 8.0)
    assert "25th to 75th percentile" in drawn.caption


def test_many_positions_are_put_together(tmp_path: Path, drawn: SimpleNamespace) -> None:
    """By threes, here: one slow token in three is not seen, and the places are those of the middle ones."""
    plot(record(lambda label, run, context, p: 90.0 if p % 3 == 0 else 2.0, tokens=2 * POINTS + 1), tmp_path / "a.png")
    assert drawn.lines["fast"][:3] == [(10, 2.0), (13, 2.0), (16, 2.0)]
    assert len(drawn.lines["fast"]) <= POINTS
    assert "3 neighboring positions" in drawn.caption


def test_the_axis_is_logarithmic_if_engines_are_far_apart(tmp_path: Path, drawn: SimpleNamespace) -> None:
    for pace, scale in ((7.0, "linear"), (9.0, "log")):
        plot(record(lambda label, *_, pace=pace: pace if label == "slow" else 1.0), tmp_path / "a.png")
        assert drawn.scale == scale


def test_streams(tmp_path: Path, drawn: SimpleNamespace) -> None:
    plot(streams(), tmp_path / "a.svg")
    assert drawn.lines["kvant"] == [(2, 75.0)]  # tokens a second in all
    text = (tmp_path / "a.svg").read_text()
    assert "tokens a second, all streams" in text
    assert "kvant, one by one" in text
