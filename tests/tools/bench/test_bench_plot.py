"""The plot shows the medians and bands that it says it shows."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.recordings import record, write_tokens

from kvant.errors import KvantError
from kvant.tools.bench.plot import POINTS, plot
from kvant.tools.bench.recording import Recorder, Recording
from kvant.tools.drawing import check_plot_path


def _recording(**options: object) -> Recording:
    with Recorder() as recorder:
        return record(
            recorder,
            lambda label, run, context, position: (1 + run) * (500 if position == context else 2),
            **options,  # type: ignore[arg-type]
        )


def test_a_name_that_is_no_picture(tmp_path: Path) -> None:
    for name in ("a.txt", "a", "a.svgz", ".png"):
        for call in (lambda path: check_plot_path(path), lambda path: plot(_recording(), path)):
            with pytest.raises(ValueError, match=r"expected a name that ends in \.png or \.svg"):
                call(tmp_path / name)
    with pytest.raises(ValueError, match="its folder does not exist"):
        check_plot_path(tmp_path / "no" / "a.png")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "x.png").mkdir()
    with pytest.raises(ValueError, match="cannot be written"):
        check_plot_path(tmp_path / "x.png")


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for call in (lambda path: check_plot_path(path), lambda path: plot(_recording(), path)):
        with pytest.raises(KvantError, match=r"pip install 'kvant\[plot\]'"):
            call(tmp_path / "a.png")


def test_the_package_starts_without_matplotlib() -> None:
    code = "import kvant.tools.bench.plot, sys; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.fixture
def _matplotlib() -> None:
    pytest.importorskip("matplotlib")


@pytest.mark.usefixtures("_matplotlib")
class TestDrawn:
    """What needs the extra `plot`."""

    def test_png(self, tmp_path: Path) -> None:
        path = tmp_path / "a.PNG"
        check_plot_path(path)
        plot(_recording(), path)
        assert path.read_bytes().startswith(b"\x89PNG\r\n")

    def test_svg_has_a_label_an_engine_and_says_what_it_shows(self, tmp_path: Path) -> None:
        path = tmp_path / "a.svg"
        labels = ["fast", "slow", "$x$_[b] & <c>"]
        plot(_recording(engines=labels, contexts=(8, 32)), path)
        texts = re.findall(r"<text[^>]*>(.*?)</text>", path.read_text(), re.DOTALL)
        for label in ("fast", "slow", "$x$_[b] &amp; &lt;c&gt;"):
            assert texts.count(label) == 1
        assert "latency, ms a token" in texts
        assert [t for t in texts if "prompt of" in t] == [f"position, tokens (prompt of {c})" for c in (8, 32)]
        assert "pocket on a processor, 2 cores" in texts
        assert "line: median over 3 runs; band: lowest to highest; first tokens left out" in texts

    def test_the_same_recording_is_the_same_svg(self, tmp_path: Path) -> None:
        for name in ("a.svg", "b.svg"):
            plot(_recording(), tmp_path / name)
        assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
        assert "dc:date" not in (tmp_path / "a.svg").read_text()

    def test_no_setting_of_the_caller_changes(self, tmp_path: Path) -> None:
        import matplotlib

        before = dict(matplotlib.rcParams)
        plot(_recording(), tmp_path / "a.svg")
        assert dict(matplotlib.rcParams) == before

    def test_lines_are_medians_over_runs_in_a_band(self, tmp_path: Path, drawn: "Drawn") -> None:
        """Runs of 2, 4 and 6 ms; then of five, whose quartiles are 4 and 8. The first token's 500 ms are nowhere."""
        plot(_recording(rounds=3), tmp_path / "a.png")
        assert drawn.lines["fast"] == [(position, 4.0) for position in range(9, 14)]
        assert drawn.band == (2.0, 6.0)
        plot(_recording(rounds=5), tmp_path / "a.png")
        assert drawn.lines["slow"] == [(position, 6.0) for position in range(9, 14)]
        assert drawn.band == (4.0, 8.0)
        assert "5 runs; band: 25th to 75th percentile" in drawn.caption
        plot(_recording(rounds=1), tmp_path / "a.png")
        assert drawn.caption == "one run; first tokens left out"

    def test_many_positions_are_put_together(self, tmp_path: Path, drawn: "Drawn") -> None:
        """By threes, here: one slow token in three is not seen, and the places are those of the middle ones."""
        with Recorder() as recorder:
            recording = record(
                recorder,
                lambda label, run, context, p: 90.0 if p % 3 == 0 else 2.0,
                contexts=(8,),
                tokens=2 * POINTS + 1,
            )
        plot(recording, tmp_path / "a.png")
        assert drawn.lines["fast"][:3] == [(10, 2.0), (13, 2.0), (16, 2.0)]
        assert len(drawn.lines["fast"]) <= POINTS
        assert "medians of up to 3 neighboring positions" in drawn.caption

    @pytest.mark.parametrize(("pace", "scale"), [(7.0, "linear"), (9.0, "log")])
    def test_the_axis_is_logarithmic_where_engines_are_far_apart(
        self, pace: float, scale: str, tmp_path: Path, drawn: "Drawn"
    ) -> None:
        with Recorder() as recorder:
            recording = record(recorder, lambda label, *_: pace if label == "slow" else 1.0)
        plot(recording, tmp_path / "a.png")
        assert drawn.scale == scale

    def test_interrupted_runs_are_not_drawn(self, tmp_path: Path, drawn: "Drawn") -> None:
        with Recorder() as recorder:
            record(recorder, lambda *_: 2.0)
            write_tokens(recorder, "fast", 3, 8, [900.0] * 6)
        plot(recorder.recording, tmp_path / "a.png")
        assert drawn.lines["fast"] == [(position, 2.0) for position in range(9, 14)]
        assert drawn.band == (2.0, 2.0)

    def test_nothing_to_draw(self, tmp_path: Path) -> None:
        with pytest.raises(KvantError, match="no completed run has a second token"):
            plot(_recording(tokens=1), tmp_path / "a.png")
        assert not (tmp_path / "a.png").exists()


class Drawn:
    """What the last figure shows, in the data's own units."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from matplotlib.figure import Figure

        save = Figure.savefig

        def savefig(figure: Figure, *args: object, **options: object) -> None:
            axes = figure.axes[0]
            (legend,) = figure.legends
            labels = [text.get_text() for text in legend.get_texts()]
            self.lines = {
                label: list(zip(*(x.tolist() for x in line.get_data()), strict=True))
                for label, line in zip(labels, axes.lines, strict=True)
            }
            corners = axes.collections[0].get_paths()[0].vertices[:, 1]
            self.band = (corners.min(), corners.max())
            self.scale = axes.get_yscale()
            self.caption = figure.get_supxlabel()
            save(figure, *args, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(Figure, "savefig", savefig)


@pytest.fixture
def drawn(_matplotlib: None, monkeypatch: pytest.MonkeyPatch) -> Drawn:
    return Drawn(monkeypatch)
