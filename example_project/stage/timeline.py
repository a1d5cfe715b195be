"""Two histories as lanes of text, for a terminal of any width and for none."""

from collections.abc import Iterator, Sequence

from rich.console import Console, ConsoleOptions
from rich.text import Text

from example_project.stage.history import History, Lane, Run
from example_project.stage.narration import narrate

COLOURS = {"one": "#4f83e6", "two": "#23a58f"}
STRANGER = "#8a8f98"
BAD = "#e5484d"

_MARKS = {"skipped": "\N{MULTIPLICATION SIGN}", "rescheduled": "↻", "raised": "!", "superseded": "↷", "parked": "‖"}
_KILLED, _FREED, _ORPHANED = "†", "◇", "░"
_KEYS = 20
_TALLY = 19
_SHORTEST = 24.0
_TOLD_AT_A_TIME = 4


class Timeline:
    """A timeline: the runs of each worker, calls that were turned away, deaths, and when the key came free.

    Arguments:
        histories: The shops, from the top down. The story is told of the first.
        whole: Tell all of it, not only the latest.
    """

    def __init__(self, histories: Sequence[History], *, whole: bool = False) -> None:
        self._histories = histories
        self._whole = whole

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> Iterator[Text]:
        seconds = max([_SHORTEST, *(history.latest for history in self._histories)])
        scale = Scale(seconds, max(20, options.max_width - _KEYS - _TALLY - 1))
        for history in self._histories:
            yield _heading(history)
            for key, lane in history.lanes.items():
                yield _row(key, lane, scale, history)
        yield _axis(scale)
        yield _legend()
        for at, sentence in narrate(self._histories[0])[0 if self._whole else -_TOLD_AT_A_TIME :]:
            yield Text.assemble((f"{at:6.1f} s  ", "bold"), sentence)


class Scale:
    """How seconds become cells."""

    def __init__(self, seconds: float, cells: int) -> None:
        self.cells = cells
        self.per_cell = seconds / cells

    def spans(self) -> Iterator[tuple[float, float]]:
        for cell in range(self.cells):
            yield cell * self.per_cell, (cell + 1) * self.per_cell


def _heading(history: History) -> Text:
    verdict = f"overlaps: {history.overlaps}"
    return Text.assemble((history.title, "bold"), "  ", (verdict, f"bold {BAD}" if history.overlaps else "bold green"))


def _row(key: str, lane: Lane, scale: Scale, history: History) -> Text:
    line = Text(f"{key:<{_KEYS}}", no_wrap=True)
    orphaned = lane.orphaned(history.latest) if history.locked else []
    for since, until in scale.spans():
        line.append(*_cell(lane, orphaned, since, until))
    return line.append(f" {_tally(lane)}", "dim")


def _tally(lane: Lane) -> str:
    """How often it ran, and what else is to be said."""
    more = [f"{count}{_MARKS[outcome]}" for outcome, count in lane.outcomes().items()]
    return " ".join([f"{len(lane.runs):2} ran", *more, *overlaps_in_words(lane)])


def overlaps_in_words(lane: Lane) -> list[str]:
    count = len(lane.overlaps)
    return [f"{count} overlap" + "s" * (count > 1)] if count else []


def _cell(lane: Lane, orphaned: list[tuple[float, float]], since: float, until: float) -> tuple[str, str]:
    """The character that tells most about this stretch of time, and its style."""
    run = _latest(lane, since, until)
    return _event(lane, orphaned, run, since, until) or _state(lane, orphaned, run, since, until)


def _event(
    lane: Lane, orphaned: list[tuple[float, float]], run: Run | None, since: float, until: float
) -> tuple[str, str] | None:
    if any(since <= victim.end < until for victim in lane.killed()):
        return _KILLED, f"bold {BAD}"
    if any(since <= end < until for _, end in orphaned):
        return _FREED, "bold green"
    marks = [_MARKS[conflict.outcome] for conflict in lane.turned_away() if since <= conflict.at < until]
    if marks:
        return marks[0], f"bold white on {_colour(run)}" if run else "bold"
    return None


def _state(
    lane: Lane, orphaned: list[tuple[float, float]], run: Run | None, since: float, until: float
) -> tuple[str, str]:
    if (together := lane.at_once(since, until)) > 1:
        return str(min(together, 9)), f"bold white on {BAD}"
    if run:
        return "▐" if run.start >= since else "█", _colour(run)
    if any(start < until and since < end for start, end in orphaned):
        return _ORPHANED, BAD
    return "·", "dim"


def _colour(run: Run) -> str:
    return COLOURS.get(run.worker, STRANGER)


def _latest(lane: Lane, since: float, until: float) -> Run | None:
    present = [run for run in lane.runs if run.start < until and since < run.end]
    return max(present, key=lambda run: run.start, default=None)


def _axis(scale: Scale) -> Text:
    line = " " * (_KEYS + scale.cells + _TALLY)
    for second in range(0, int(scale.cells * scale.per_cell) + 1, 5):
        place = _KEYS + int(second / scale.per_cell)
        label = f"{second} s" if second == 0 else str(second)
        line = line[:place] + label + line[place + len(label) :]
    return Text(line.rstrip(), "dim", no_wrap=True)


def _legend() -> Text:
    workers = [(f"█ {name}  ", colour) for name, colour in COLOURS.items()]
    death = f"{_KILLED} killed  {_ORPHANED} key of a dead run  {_FREED} key free"
    marks = "  ".join(f"{mark} {outcome}" for outcome, mark in _MARKS.items())
    return Text.assemble("worker ", *workers, ("2 ", f"bold {BAD}"), f"two at once  {death}\n{marks}")
