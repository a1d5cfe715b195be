"""The README's chart: what a lock costs a task, beside plain Celery."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.candidates import OURS
from benchmarks.comparison import ADDED, COLUMNS, ROOT, added, thousands, times
from benchmarks.libraries import OURS_QUEUED
from benchmarks.report import PUBLISHED_AND_RUN, TASK_TRIPS, text

PATH = ROOT / "docs" / "costs.svg"
PANELS = {
    ADDED: "thousand instructions added",
    PUBLISHED_AND_RUN: "share of plain Celery's rate",
    TASK_TRIPS: "round trips to Redis",
}
# Legible on white and on black.
INK, OTHERS, MINE = "#7d8590", "#8b949e", "#3b82f6"


def draw(tasks: Mapping[str, Any], path: Path = PATH) -> None:
    """Write the chart of one run."""
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "costs", "font.size": 9, "font.family": "sans-serif"})
    labels = [label for label in reversed(COLUMNS) if label not in tasks["problems"]]
    rows = {row["what"]: row["values"] for row in tasks["rows"]}
    rows[ADDED] = {label: dict.fromkeys(("low", "median", "high"), added(label)) for label in labels}
    figure = Figure(figsize=(9, 2.4), layout="constrained")
    for axes, (what, title) in zip(figure.subplots(1, len(PANELS), sharey=True), PANELS.items(), strict=True):
        _bars(axes, [rows[what][label] for label in labels], title)
        axes.set_yticks(range(len(labels)), [label.replace(", ", ",\n") for label in labels], color=INK)
        for number, label in enumerate(labels):
            axes.patches[number].set_color(MINE if label in {OURS, OURS_QUEUED} else OTHERS)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="svg", transparent=True, metadata={"Date": None, "Creator": None})


def _bars(axes: Axes, spreads: list[Mapping[str, float]], title: str) -> None:
    medians = [spread["median"] for spread in spreads]
    errors = [
        [spread["median"] - spread["low"] for spread in spreads],
        [spread["high"] - spread["median"] for spread in spreads],
    ]
    axes.barh(range(len(spreads)), medians, height=0.6, xerr=errors, ecolor=INK, error_kw={"elinewidth": 1})
    for number, spread in enumerate(spreads):
        axes.annotate(
            _told(spread),
            (spread["high"], number),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            color=INK,
        )
    axes.margins(x=0.25)
    axes.set_title(title, color=INK, fontsize=9, loc="left")
    axes.tick_params(length=0, colors=INK)
    axes.xaxis.set_visible(False)
    for side in axes.spines.values():
        side.set_visible(False)


def _told(spread: Mapping[str, float]) -> str:
    if spread["low"] != spread["high"]:
        return times(spread["median"])
    return thousands(spread["median"]) if spread["median"] >= 100 else text(spread["median"])
