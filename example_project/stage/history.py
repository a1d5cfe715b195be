"""The records, read as runs: who ran when, what overlapped, who died."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import combinations

from example_project.stage.records import Record


@dataclass(slots=True)
class Run:
    """One run of a body. Times are seconds since the first record of the shop."""

    worker: str
    task_id: str
    start: float
    end: float
    left: bool = False
    killed: bool = False

    def overlaps(self, other: "Run") -> bool:
        return self.start < other.end and other.start < self.end


@dataclass(frozen=True, slots=True)
class Conflict:
    """A run that found its key held, and what became of it."""

    outcome: str
    at: float
    task_id: str


@dataclass(slots=True)
class Lane:
    """The history of one key."""

    runs: list[Run] = field(default_factory=list)
    conflicts: list[Conflict] = field(default_factory=list)
    freed: list[float] = field(default_factory=list)

    @property
    def overlaps(self) -> list[tuple[Run, Run]]:
        return [(one, other) for one, other in combinations(self.runs, 2) if one.overlaps(other)]

    def outcomes(self) -> Counter[str]:
        """The outcomes of calls that found the key held, each with the number of calls."""
        return Counter(conflict.outcome for conflict in self.turned_away())

    def turned_away(self) -> list[Conflict]:
        """The conflicts without repetitions: a call that waits may ask and be refused several times."""
        first = {(conflict.task_id, conflict.outcome): conflict for conflict in reversed(self.conflicts)}
        return sorted(first.values(), key=lambda conflict: conflict.at)

    def killed(self) -> list[Run]:
        return [run for run in self.runs if run.killed]

    def after(self, run: Run) -> Run | None:
        """The next run of this key."""
        return min((other for other in self.runs if other.start > run.end), key=lambda other: other.start, default=None)

    def orphaned(self, now: float) -> list[tuple[float, float]]:
        """The times in which the lease of a killed run kept others out."""
        return [(run.end, self.freed_after(run) or now) for run in self.killed()]

    def at_once(self, since: float, until: float) -> int:
        """How many ran at once, at most, between two moments."""
        present = [run for run in self.runs if run.start < until and since < run.end]
        starts = [max(run.start, since) for run in present]
        return max((sum(run.start <= at < run.end for run in present) for at in starts), default=0)

    def freed_after(self, run: Run) -> float | None:
        successor = self.after(run)
        seen = [at for at in self.freed if at > run.end] + ([successor.start] if successor else [])
        return min(seen, default=None)


class History:
    """One shop's records, read as they come.

    Arguments:
        locked: Whether this is the shop with the lock.
        keys: The keys that have to be run, in this order.
    """

    def __init__(self, *, locked: bool, keys: Iterable[str] = ()) -> None:
        self.locked = locked
        self.lanes = {key: Lane() for key in keys}
        self.told: list[tuple[float, str]] = []
        self.kills: list[tuple[float, str]] = []
        self.ending: dict[str, str] | None = None
        self.latest = 0.0
        self._first: int | None = None
        self._runs: dict[str, Run] = {}

    @property
    def title(self) -> str:
        return "with the lock" if self.locked else "without the lock"

    @property
    def opened(self) -> bool:
        return self._first is not None

    @property
    def runs(self) -> list[Run]:
        return list(self._runs.values())

    @property
    def overlaps(self) -> int:
        return sum(len(lane.overlaps) for lane in self.lanes.values())

    def read(self, records: Iterable[Record]) -> None:
        for record in records:
            if self._first is None:
                self._first = record.at
            at = (record.at - self._first) / 1e9
            self.latest = max(self.latest, at)
            getattr(self, f"_{record.what}")(at, record.facts)

    def victims(self) -> list[tuple[str, Run]]:
        """The runs that ended because their worker was killed, with their keys."""
        return [(key, run) for key, lane in self.lanes.items() for run in lane.killed()]

    def _lane(self, facts: dict[str, str]) -> Lane:
        return self.lanes.setdefault(facts["key"], Lane())

    def _enter(self, at: float, facts: dict[str, str]) -> None:
        run = Run(facts["worker"], facts["task_id"], start=at, end=at)
        self._runs[facts["run"]] = run
        self._lane(facts).runs.append(run)

    def _tick(self, at: float, facts: dict[str, str]) -> None:
        # A stream that was cut may begin in the midst of a run.
        if run := self._runs.get(facts["run"]):
            run.end = max(run.end, at)

    def _leave(self, at: float, facts: dict[str, str]) -> None:
        self._tick(at, facts)
        if run := self._runs.get(facts["run"]):
            run.left = True

    def _conflict(self, at: float, facts: dict[str, str]) -> None:
        self._lane(facts).conflicts.append(Conflict(facts["outcome"], at, facts["task_id"]))

    def _free(self, at: float, facts: dict[str, str]) -> None:
        self._lane(facts).freed.append(at)

    def _killed(self, at: float, facts: dict[str, str]) -> None:
        self.kills.append((at, facts["worker"]))
        for run in self._runs.values():
            if run.worker == facts["worker"] and not run.left:
                run.killed = True

    def _lost(self, at: float, facts: dict[str, str]) -> None:
        self.told.append((at, f"A lease was lost ({facts['reason']})."))

    def _told(self, at: float, facts: dict[str, str]) -> None:
        self.told.append((at, facts["text"]))

    def _end(self, _: float, facts: dict[str, str]) -> None:
        self.ending = facts
