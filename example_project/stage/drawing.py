"""Two histories as an SVG, to be shown to others."""

from collections.abc import Iterable, Sequence
from xml.etree import ElementTree as ET

from example_project.stage.history import History, Lane, Run
from example_project.stage.narration import narrate
from example_project.stage.timeline import BAD, COLOURS, STRANGER, overlaps_in_words

_WIDTH, _MARGIN, _LEFT, _RIGHT = 1120, 32, 200, 210
_BAR, _STEP, _STRIP = 14, 17, 14
_INK, _PALE, _GRID, _LANE, _GOOD = "#1c2128", "#69707c", "#e3e6ea", "#f6f7f9", "#1a7f4b"

_STYLE = f"""
text {{ font: 13px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; fill: {_INK}; }}
.mono {{ font: 12px ui-monospace, "DejaVu Sans Mono", monospace; }}
.pale {{ fill: {_PALE}; font-size: 12px; }}
.title {{ font-size: 20px; font-weight: 600; }}
.shop {{ font-size: 15px; font-weight: 600; }}
.good {{ font-size: 15px; font-weight: 600; fill: {_GOOD}; }}
.bad {{ font-size: 15px; font-weight: 600; fill: {BAD}; }}
"""
# Shapes rather than characters: who opens the file may lack the font.
_MARKS = {
    "skipped": "M-4,-4 L4,4 M-4,4 L4,-4",
    "rescheduled": "M-2,-4 L3,0 L-2,4",
    "raised": "M0,-5 V1 M0,4 V5",
    "superseded": "M-4,3 Q0,-7 4,3 M1,2 L4,3 L5,-1",
    "parked": "M-2,-4 V4 M2,-4 V4",
}


def draw(histories: Sequence[History]) -> str:
    """The timeline as SVG."""
    sheet = Sheet(seconds=max(history.latest for history in histories))
    sheet.text(_MARGIN, 22, "One shop, the same load, with and without the lock", "title")
    sheet.down(30)
    for history in histories:
        _shop(sheet, history)
    _axis(sheet)
    _legend(sheet)
    for at, sentence in narrate(histories[0]):
        sheet.text(_MARGIN + 46, 14, f"{at:.1f} s", "pale", anchor="end")
        sheet.text(_MARGIN + 60, 14, sentence)
        sheet.down(20)
    return sheet.finished()


class Sheet:
    """A page that is filled from the top down; seconds go to the right."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._y = float(_MARGIN)
        self._svg = ET.Element("svg", xmlns="http://www.w3.org/2000/svg")
        ET.SubElement(self._svg, "style").text = _STYLE
        self._paper = self.add("rect", width=_WIDTH, rx=10, fill="white", stroke=_GRID)
        self._hatching()

    def x(self, at: float) -> float:
        return _LEFT + at / self.seconds * (_WIDTH - _LEFT - _RIGHT)

    def down(self, pixels: float) -> None:
        self._y += pixels

    def add(self, tag: str, **attributes: object) -> ET.Element:
        named = {name.replace("_", "-"): _short(value) for name, value in attributes.items()}
        return ET.SubElement(self._svg, tag, named)

    def text(self, x: float, below: float, content: str, kind: str = "", anchor: str = "start") -> None:
        self.add("text", x=x, y=self._y + below, text_anchor=anchor, **{"class": kind}).text = content

    def block(self, since: float, until: float, below: float, height: float, **look: object) -> None:
        """A rectangle from one moment to another."""
        self.patch(self.x(since), max(self.x(until) - self.x(since), 3.0), below, height, **look)

    def patch(self, x: float, width: float, below: float, height: float, **look: object) -> None:
        self.add("rect", x=x, y=self._y + below, width=width, height=height, **look)

    def mark(self, x: float, below: float, outcome: str) -> None:
        place = f"translate({_short(x)} {_short(self._y + below)})"
        self.add("path", d=_MARKS[outcome], transform=place, fill="none", stroke=_INK, stroke_width=1.6)

    def upright(self, at: float, below: float, height: float, **look: object) -> None:
        """A line through everything that happened at one moment."""
        top = self._y + below
        self.add("line", x1=self.x(at), x2=self.x(at), y1=top, y2=top + height, **look)

    def finished(self) -> str:
        height = _short(self._y + _MARGIN - 10)
        self._paper.set("height", height)
        self._svg.set("viewBox", f"0 0 {_WIDTH} {height}")
        ET.indent(self._svg)
        return ET.tostring(self._svg, encoding="unicode") + "\n"

    def _hatching(self) -> None:
        pattern = self.add("pattern", id="orphaned", width=6, height=6, patternUnits="userSpaceOnUse")
        pattern.set("patternTransform", "rotate(45)")
        ET.SubElement(pattern, "rect", width="2", height="6", fill=BAD, opacity="0.55")


def _shop(sheet: Sheet, history: History) -> None:
    sheet.down(14)
    sheet.text(_MARGIN, 14, history.title, "shop")
    sheet.text(_LEFT, 14, f"overlaps: {history.overlaps}", "bad" if history.overlaps else "good")
    sheet.down(24)
    height = 0.0
    for key, lane in history.lanes.items():
        height += _lane(sheet, key, lane, history)
    for at, worker in history.kills:
        sheet.upright(at, -height, height, stroke=BAD, stroke_dasharray="4 3")
        sheet.text(sheet.x(at), -height - 5, f"worker {worker} killed", "pale", anchor="middle")


def _lane(sheet: Sheet, key: str, lane: Lane, history: History) -> float:
    """Draw one key and return how much height it took."""
    rows = _rows(lane.runs)
    height = max(1, len(rows)) * _STEP + (_STRIP if history.locked else 0) + 6
    sheet.block(0, sheet.seconds, 0, height - 3, fill=_LANE)
    for second in range(0, int(sheet.seconds) + 1, 5):
        sheet.upright(second, 0, height - 3, stroke=_GRID)
    sheet.text(_MARGIN, 15, key, "mono")
    _tally(sheet, lane)
    _overlaps(sheet, lane, height)
    _runs(sheet, rows)
    if history.locked:
        _keys_of_the_dead(sheet, lane, history.latest)
    for conflict in lane.turned_away():
        sheet.mark(sheet.x(conflict.at), height - 11, conflict.outcome)
    sheet.down(height)
    return height


def _tally(sheet: Sheet, lane: Lane) -> None:
    x = _WIDTH - _RIGHT + 14
    sheet.text(x, 15, f"{len(lane.runs)} ran")
    more = [f"{count} {outcome}" for outcome, count in lane.outcomes().items()]
    sheet.text(x, 30, ", ".join(more + overlaps_in_words(lane)), "pale")


def _rows(runs: Iterable[Run]) -> list[list[Run]]:
    """The runs in as many rows as ran at once."""
    rows: list[list[Run]] = []
    for run in sorted(runs, key=lambda run: run.start):
        free = next((row for row in rows if row[-1].end <= run.start), None)
        if free is None:
            rows.append([run])
        else:
            free.append(run)
    return rows


def _overlaps(sheet: Sheet, lane: Lane, height: float) -> None:
    for one, other in lane.overlaps:
        since, until = max(one.start, other.start), min(one.end, other.end)
        sheet.block(since, until, 0, height - 3, fill=BAD, opacity=0.16)


def _runs(sheet: Sheet, rows: list[list[Run]]) -> None:
    for number, row in enumerate(rows):
        for run in row:
            below = 4 + number * _STEP
            sheet.block(run.start, run.end, below, _BAR, rx=2.5, fill=COLOURS.get(run.worker, STRANGER))
            if run.killed:
                sheet.block(run.end, run.end, below - 2, _BAR + 4, fill=BAD)


def _keys_of_the_dead(sheet: Sheet, lane: Lane, now: float) -> None:
    for since, until in lane.orphaned(now):
        sheet.block(since, until, 4, _BAR, fill="url(#orphaned)")
        sheet.block(until, until, 2, _BAR + 4, fill=_GOOD)


def _axis(sheet: Sheet) -> None:
    for second in range(0, int(sheet.seconds) + 1, 5):
        sheet.text(sheet.x(second), 12, f"{second} s", "pale", anchor="middle")
    sheet.down(32)


def _legend(sheet: Sheet) -> None:
    fills = [(f"worker {worker}", colour) for worker, colour in COLOURS.items()]
    fills += [("key of a dead run", "url(#orphaned)"), ("overlap", f"{BAD}4d")]
    x = float(_MARGIN)
    for name, fill in fills:
        sheet.patch(x, 16, 0, 12, fill=fill, rx=2)
        x = _name(sheet, x + 22, name)
    for name, colour in (("killed", BAD), ("key free", _GOOD)):
        sheet.patch(x, 3, -2, 16, fill=colour)
        x = _name(sheet, x + 9, name)
    for outcome in _MARKS:
        sheet.mark(x + 4, 6, outcome)
        x = _name(sheet, x + 13, outcome)
    sheet.down(36)


def _name(sheet: Sheet, x: float, name: str) -> float:
    """Write what a sign means and return where the next sign goes."""
    sheet.text(x, 11, name, "pale")
    return x + 6.6 * len(name) + 18


def _short(value: object) -> str:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)
