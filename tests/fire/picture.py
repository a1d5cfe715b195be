"""The fire as a picture: when what burned, who ran meanwhile, who was told, who died, and what should not have been."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests.fire.checker import Finding, History, Run, read

LANES = 14
_INK, _PALE, _BAD, _FIRE = "#1c2128", "#69707c", "#e5484d", "#f5a623"
_COLOURS = ("#4f83e6", "#23a58f", "#9b6bd6", "#8a8f98")
_HEIGHT = 0.8


def draw(history: History, findings: Sequence[Finding], title: str, path: Path) -> None:
    """Write the timeline as SVG: the faults, and the keys on which most happened."""
    runs = [run for run in read(history.events) if run.ran and run.kind.exclusive]
    origin = min((event.at for event in history.events), default=0.0)
    lanes = _lanes(runs, findings)
    faults = _faults(history, origin)
    rows = len(lanes) + len(faults) + 2
    with mpl.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": "fire", "font.size": 8, "text.color": _INK, "axes.edgecolor": _PALE}
    ):
        figure = Figure(figsize=(15, 1.2 + rows * 0.24), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(len(faults) + 1, len(lanes) * 1.4 + 1))
        _draw_faults(above, faults)
        _draw_lanes(below, lanes, runs, origin)
        _draw_findings(below, lanes, findings, origin)
        above.set_title(title, loc="left", fontweight="bold")
        below.set_xlabel("seconds")
        figure.savefig(path, format="svg", metadata={"Date": None})


def _lanes(runs: Sequence[Run], findings: Sequence[Finding]) -> list[str]:
    """The keys with findings, and those with most bodies."""
    accused = list(dict.fromkeys(finding.key for finding in findings if finding.key))
    busiest = [label for label, _ in Counter(run.label for run in runs).most_common(LANES)]
    return list(dict.fromkeys([*accused, *busiest]))[: LANES + 6]


def _faults(history: History, origin: float) -> list[tuple[str, float, float]]:
    """What, since when and until when: one after another, so each is healed by the next line that says so."""
    begun = [event for event in history.events if event.name == "fault"]
    healed = [event.at for event in history.events if event.name == "healed"]
    return [
        (fault.facts["what"], fault.at - origin, until - origin) for fault, until in zip(begun, healed, strict=False)
    ]


def _draw_faults(axes: Axes, faults: Sequence[tuple[str, float, float]]) -> None:
    latest = max((until for _, _, until in faults), default=1.0)
    for row, (what, since, until) in enumerate(faults):
        axes.broken_barh([(since, max(until - since, latest / 400))], (row, _HEIGHT), color=_FIRE)
        on_the_left = since > latest / 2
        place = {"x": since - latest / 150, "ha": "right"} if on_the_left else {"x": until + latest / 150, "ha": "left"}
        axes.text(y=row + _HEIGHT / 2, s=what, va="center", fontsize=7, **place)
    axes.set_ylim(len(faults), -0.3)
    axes.set_yticks([])
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _draw_lanes(axes: Axes, lanes: Sequence[str], runs: Sequence[Run], origin: float) -> None:
    pids = {pid: number for number, pid in enumerate(dict.fromkeys(run.pid for run in runs))}
    latest = max((run.end for run in runs if run.end < float("inf")), default=origin) - origin
    for row, label in enumerate(lanes):
        for run in [run for run in runs if run.label == label]:
            since, until = run.entered - origin, min(run.end - origin, latest)
            colour = _COLOURS[pids[run.pid] % len(_COLOURS)]
            axes.broken_barh([(since, max(until - since, latest / 1500))], (row, _HEIGHT), color=colour, alpha=0.75)
            if run.died < run.left:
                axes.plot(until, row + _HEIGHT / 2, marker="x", color=_BAD, markersize=6)
            if run.told < float("inf"):
                axes.plot(run.told - origin, row + _HEIGHT / 2, marker="|", color=_INK, markersize=8)
    axes.set_ylim(len(lanes), -0.3)
    axes.set_yticks([row + _HEIGHT / 2 for row in range(len(lanes))], lanes)
    axes.grid(axis="x", color="#e3e6ea")
    axes.set_axisbelow(True)
    axes.text(1.0, 1.01, "x died   | was told", transform=axes.transAxes, ha="right", color=_PALE)


def _draw_findings(axes: Axes, lanes: Sequence[str], findings: Sequence[Finding], origin: float) -> None:
    for finding in findings:
        if finding.key in lanes:
            row = lanes.index(finding.key)
            axes.plot(finding.at - origin, row + _HEIGHT / 2, marker="v", color=_BAD, markersize=9)
