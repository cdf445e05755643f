"""The results of bench_attention.py: goals, tables, and the plot."""

from pathlib import Path
from typing import Any

from attention_variants import SHAPES

from kvant.tools.drawing import COLORS, drawing

# Of MLX's time, at the shape and context of GOAL; of copy bandwidth at 8 bits.
GOAL, GOAL_RATIOS, GOAL_SHARE = ("qwen3-4b", 32768), {8: 0.6, 4: 0.4}, 0.6


def goals(recording: dict[str, Any]) -> list[dict[str, Any]]:
    """The goals for a GPU with the figures measured; ``met`` is None if there are none."""
    shape, context = GOAL
    fused = {
        result["bits"]: result
        for result in recording["results"]
        if (result["shape"], result["context"], result["path"]) == (*GOAL, "fused") and recording["kind"] == "gpu"
        if recording["dtype"] == "bfloat16" and not result["detail"]
    }
    found = []
    for bits, most in GOAL_RATIOS.items():
        ratio = fused[bits]["ratio"]["median"] if bits in fused else None
        goal = f"{bits}-bit at most {most} of MLX's bfloat16 time, {shape} at {context:,}"
        found.append({"goal": goal, "measured": ratio, "met": None if ratio is None else ratio <= most})
    share = fused[8]["copy_share"] if 8 in fused else None
    goal = f"8-bit over {GOAL_SHARE:.0%} of copy bandwidth, {shape} at {context:,}"
    found.append({"goal": goal, "measured": share, "met": None if share is None else share > GOAL_SHARE})
    return found


def table(recording: dict[str, Any]) -> str:
    """All results, and the goals, as Markdown."""
    lines = [
        f"{recording['device']}, {recording['cores']} cores, load {recording['load_average']}; MLX {recording['mlx']}, "
        f"mlx-lm {recording['mlx_lm']}, kvant {recording['kvant']}, BLAS {recording['blas']}; {recording['dtype']}, "
        f"copies {recording['copy_bandwidth_gb_s']:.1f} GB/s, {recording['rounds']} rounds",
    ]
    columns = ("context", "variant", "ms a layer", "to MLX", "GB/s", "of copy")
    for shape in dict.fromkeys(result["shape"] for result in recording["results"]):
        heads, kv_heads, head_dim, _ = SHAPES[shape]
        lines += ["", f"{shape}: {heads} / {kv_heads} heads of {head_dim}", "", f"| {' | '.join(columns)} |"]
        lines += ["| --- | --- " + "| ---: " * (len(columns) - 2) + "|"]
        for result in recording["results"]:
            if result["shape"] != shape:
                continue
            cells = [
                f"{result['context']:,}",
                result["variant"],
                _spread(result["ms"], 3),
                _spread(result["ratio"], 2),
                f"{result['gb_per_s']:.3g}",
                f"{result['copy_share']:.0%}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *(f"left out: {reason}" for reason in recording["skipped"])]
    for goal in recording["goals"]:
        verdict = {None: "not measured", True: "met", False: "NOT MET"}[goal["met"]]
        measured = "" if goal["met"] is None else f", {goal['measured']:.2f}"
        lines.append(f"goal: {goal['goal']}: {verdict}{measured}")
    return "\n".join(lines)


def _spread(spread: dict[str, float], digits: int) -> str:
    middle, low, high = (f"{spread[name]:.{digits}g}" for name in ("median", "minimum", "maximum"))
    return middle if low == high else f"{middle} ({low}-{high})"


def draw(recording: dict[str, Any], path: Path) -> None:
    """Time against context, a panel a shape, a line a variant in a band from its fastest to its slowest round.

    Dotted: the time in which the bytes of a cache are read once at the measured copy bandwidth.

    Args:
        path: .svg or .png.
    """
    from matplotlib.ticker import FixedLocator, LogLocator, NullFormatter, NullLocator

    results = recording["results"]
    shapes = list(dict.fromkeys(result["shape"] for result in results))
    labels = list(dict.fromkeys(result["variant"] for result in results))
    caption = f"median of {recording['rounds']} rounds in turns; band: fastest to slowest"
    with drawing(path, max(7.0, 4.4 * len(shapes)), caption) as figure:
        panels = figure.subplots(1, len(shapes), sharey=True, squeeze=False)[0]
        lines: dict[str, Any] = {}
        for axes, shape in zip(panels, shapes, strict=True):
            contexts = sorted({result["context"] for result in results if result["shape"] == shape})
            floors: list[int] = []  # bits whose floor is drawn
            for number, label in enumerate(labels):
                own = [result for result in results if (result["shape"], result["variant"]) == (shape, label)]
                own.sort(key=lambda result: result["context"])
                places = [result["context"] for result in own]
                color = COLORS[number % len(COLORS)]
                low, middle, high = ([r["ms"][name] for r in own] for name in ("minimum", "median", "maximum"))
                axes.fill_between(places, low, high, color=color, alpha=0.15, linewidth=0)
                dashes = "--" if own and own[0]["path"] == "unfused" and "fused" in recording["paths"] else "-"
                dashes = ":" if own and own[0]["detail"] else dashes
                (lines[label],) = axes.plot(
                    places, middle, dashes, color=color, linewidth=1.6, marker="o", markersize=3
                )
                if own and own[0]["path"] in ("unfused", "fused") and own[0]["bits"] not in floors:
                    floors.append(own[0]["bits"])
                    floor = [r["cache_bytes"] / recording["copy_bandwidth_gb_s"] / 1e6 for r in own]
                    axes.plot(places, floor, ":", color=color, linewidth=1.2)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.xaxis.set_major_locator(FixedLocator(contexts))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1024:g}k" if x >= 1024 else f"{x:g}")
            axes.yaxis.set_major_locator(LogLocator(subs=(1,)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter(NullFormatter())
            heads, kv_heads, head_dim, _ = SHAPES[shape]
            axes.set_title(f"{shape}: {heads} / {kv_heads} heads of {head_dim}", fontsize=10)
            axes.set_xlabel("cached tokens")
        panels[0].set_ylabel("attention of one token, ms a layer")
        (floor_line,) = panels[0].plot([], [], ":", color="#555555", linewidth=1.2)
        figure.legend(
            [*lines.values(), floor_line],
            [*lines, f"its cache read once at {recording['copy_bandwidth_gb_s']:.0f} GB/s"],
            loc="outside upper center",
            ncols=4,
            frameon=False,
            title=f"{recording['device']}, {recording['cores']} cores",
            title_fontsize=12,
        )
