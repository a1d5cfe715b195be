"""The runs of a record, and the two promises that hold for them: one at a time, and fences that only grow."""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf
from typing import TypeVar

from tests.recorder import Event


@dataclass(frozen=True)
class Finding:
    promise: str
    what: str
    at: float = 0.0
    key: str = ""

    def __str__(self) -> str:
        return f"{self.promise}: {self.key} {self.what}"


@dataclass
class Run:
    """One execution of a message. It has no body if it did not get the lock."""

    run: str
    key: str
    task: str
    task_id: str
    pid: int
    began: float
    attempt: int = 0
    number: int = 0
    fence: int = 0
    entered: float = inf
    left: float = inf
    died: float = inf
    ended: float = inf
    process_died: float = inf
    outcome: str = ""
    body: str = ""
    """The outcome of the body; `outcome` is what the lock made of it."""
    excuses: list[tuple[float, float, str]] = field(default_factory=list)

    def __str__(self) -> str:
        return f"number {self.number} ({self.task_id[:8]}, attempt {self.attempt}, in {self.pid})"

    @property
    def ran(self) -> bool:
        return self.entered < inf

    @property
    def over(self) -> float:
        return min(self.left, self.died)

    def runs_at(self, moment: float) -> bool:
        return self.entered <= moment < self.over

    def excuse_at(self, moment: float) -> str | None:
        """Why the run may overlap with another at that moment."""
        return next((why for since, until, why in self.excuses if since <= moment < until), None)


R = TypeVar("R", bound=Run)


def read(events: Sequence[Event], kind: type[R]) -> list[R]:
    runs: dict[str, R] = {}
    of: dict[int, list[R]] = defaultdict(list)
    for event in sorted(events, key=lambda event: event.at):
        facts = event.facts
        if event.name == "began":
            some = (facts["task"], facts["task_id"], event.pid, event.at, facts["attempt"])
            runs[event.run] = run = kind(event.run, event.key, *some)
            of[event.pid].append(run)
        elif event.name == "died":
            for run in of.pop(facts["victim"], []):
                run.process_died = facts["alive_at"]
                if run.left == inf:
                    run.died = max(facts["alive_at"], run.entered if run.ran else run.began)
        elif event.run in runs:
            _follow(runs[event.run], event)
    return list(runs.values())


def _follow(run: Run, event: Event) -> None:
    if event.name == "enter":
        run.key, run.entered = event.key, event.at
        run.fence, run.number = event.facts["fence"], event.facts["number"]
    elif event.name == "leave":
        run.left, run.body = event.at, event.facts["outcome"]
    elif event.name == "ended":
        run.left = min(run.left, event.at)
        run.ended, run.outcome = event.at, event.facts["outcome"]


def exclusive(runs: Sequence[Run], limit: Callable[[Run], int]) -> tuple[list[Finding], Counter[str]]:
    """Where more bodies of a key ran at once than its limit allows, and how often each excuse explains that."""
    findings, excused = [], Counter[str]()
    for key, alike in _by_key(runs).items():
        for run in alike:
            # The limit can only be exceeded when a run enters, or loses its excuse.
            for moment in sorted({run.entered, *(until for _, until, _ in run.excuses if until < run.over)}):
                others = [other for other in alike if other.runs_at(moment)]
                counted = [other for other in others if other.excuse_at(moment) is None]
                if run in counted and len(counted) > limit(run):
                    what = f"{len(counted)} bodies at once, {limit(run)} allowed: " + ", ".join(map(str, counted))
                    findings.append(Finding("one at a time", what, moment, key))
                elif len(others) > limit(run) and moment == run.entered:
                    excused[next(filter(None, (other.excuse_at(moment) for other in others)), "")] += 1
    return findings, excused


def fenced(runs: Sequence[Run]) -> Iterator[Finding]:
    """Runs without a fence, with another run's, or with a smaller one than a run that entered before they began."""
    for key, alike in _by_key(runs).items():
        entered = [run.entered for run in alike]
        greatest = list(accumulate((run.fence for run in alike), max))
        given: set[int] = set()
        for run in alike:
            before = bisect_left(entered, run.began)
            if not run.fence:
                yield Finding("fenced", f"{run} ran without a lease", run.entered, key)
            elif run.fence in given:
                yield Finding("fenced", f"{run} has the fence {run.fence} of another", run.entered, key)
            elif before and greatest[before - 1] > run.fence:
                what = f"{run} has fence {run.fence}, less than {greatest[before - 1]} before it"
                yield Finding("fenced", what, run.entered, key)
            given.add(run.fence)


def _by_key(runs: Sequence[Run]) -> Mapping[str, list[Run]]:
    alike: dict[str, list[Run]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: run.entered):
        if run.ran:
            alike[run.key].append(run)
    return alike
