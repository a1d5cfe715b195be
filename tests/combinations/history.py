"""The facts about a program that has been played, as the rules read them."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.combinations.program import Call, Program
from tests.recorder import Event
from tests.runs import rules
from tests.runs.rules import Run


@dataclass(frozen=True)
class Answer:
    call: int
    task_id: str = ""
    sent: float = 0.0
    merged: bool = False
    state: str = ""
    error: str = ""
    text: str = ""
    canvas: str = ""
    canvas_error: str = ""
    published: float = 0.0


@dataclass(frozen=True)
class History:
    """All that is known of a program: also what stays in the store, and what runs on when all should have ended."""

    program: Program
    events: Sequence[Event]
    answers: Sequence[Answer] = ()
    left: Sequence[str] = ()
    open: Sequence[str] = ()


@dataclass(frozen=True)
class Refused:
    task_id: str
    key: str
    at: float
    outcome: str
    by: str | None


@dataclass
class Known:
    history: History
    bodies: list[Run]
    refused: list[Refused] = field(default_factory=list)
    began: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    @property
    def program(self) -> Program:
        return self.history.program

    @property
    def calls(self) -> Sequence[Call]:
        return self.program.calls

    @property
    def failed(self) -> set[str]:
        return {event.facts["task_id"] for event in self.history.events if event.name == "failed"}

    @property
    def rejected(self) -> set[str]:
        ended = [event.facts for event in self.history.events if event.name == "ended"]
        return {facts["task_id"] for facts in ended if facts["outcome"] == "Reject"}

    def policy(self, answer: Answer) -> str:
        return str(self.program.tasks[self.calls[answer.call].task]["policy"])

    def of(self, task_id: str) -> list[Run]:
        return [body for body in self.bodies if body.task_id == task_id]

    def skipped(self, task_id: str) -> list[float]:
        return [some.at for some in self.refused if some.outcome == "skipped" and some.task_id == task_id]


def read(history: History) -> Known:
    runs = rules.read(history.events, Run)
    known = Known(history, sorted((run for run in runs if run.ran), key=lambda run: run.entered))
    for run in runs:
        known.began[run.task_id].append(run.began)
    for event in history.events:
        if event.name == "conflict":
            facts = event.facts
            known.refused.append(Refused(facts["task_id"], event.key, event.at, facts["outcome"], facts["holder"]))
    return known
