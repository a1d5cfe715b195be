"""What is known of a program that has been played, as the rules look at it."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import inf

from tests.combinations.program import Call, Program
from tests.recorder import Event


@dataclass(frozen=True)
class Answer:
    """What the sender of a call has got."""

    call: int
    task_id: str = ""
    sent: float = 0.0
    merged: bool = False
    state: str = ""
    error: str = ""
    text: str = ""
    canvas: str = ""
    canvas_error: str = ""
    parts: Sequence[str] = ()
    published: float = 0.0
    # The task ids of those whose results said before it was sent that they were revoked.
    revoked: Sequence[str] = ()


@dataclass(frozen=True)
class History:
    """All that is known of a program: also what stays in the store, and what runs on when all should have ended."""

    program: Program
    events: Sequence[Event]
    answers: Sequence[Answer] = ()
    left: Sequence[str] = ()
    open: Sequence[str] = ()


@dataclass
class Body:
    """One execution of a body; an item of a map has the task id and the number of the map's message."""

    run: str
    key: str
    task_id: str
    number: int
    attempt: int
    pid: int
    fence: int
    is_item: bool
    entered: float
    left: float = inf
    outcome: str = ""

    def __str__(self) -> str:
        kind = "an item of " if self.is_item else ""
        return f"{kind}number {self.number} ({self.task_id[:8]}, attempt {self.attempt})"


@dataclass(frozen=True)
class Refused:
    """A conflict of a call; `by` is the task id of the holder."""

    task_id: str
    key: str
    at: float
    outcome: str
    by: str | None


@dataclass
class Known:
    """What the rules look at."""

    history: History
    bodies: list[Body] = field(default_factory=list)
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

    def of(self, task_id: str) -> list[Body]:
        return [body for body in self.bodies if body.task_id == task_id]

    def skipped(self, task_ids: Collection[str]) -> list[float]:
        """When messages of these were."""
        return [some.at for some in self.refused if some.outcome == "skipped" and some.task_id in task_ids]

    def was_retried(self, answer: Answer) -> bool:
        """A body of one of its messages has asked for a retry."""
        ids = self.messages(answer)
        return any(body.outcome == "Retry" for body in self.bodies if body.task_id in ids)

    def messages(self, answer: Answer) -> set[str]:
        """The task ids under which the call was sent."""
        return {answer.task_id, *answer.parts}


def read(history: History) -> Known:
    known, bodies = Known(history), dict[str, Body]()
    for event in sorted(history.events, key=lambda event: event.at):
        facts = event.facts
        if event.name == "began":
            known.began[facts["task_id"]].append(event.at)
        elif event.name == "conflict":
            known.refused.append(Refused(facts["task_id"], event.key, event.at, facts["outcome"], facts.get("holder")))
        elif event.name == "died":
            for body in bodies.values():
                if body.pid == facts["victim"] and body.left == inf:
                    body.left, body.outcome = max(body.entered, facts["alive_at"]), "died"
        elif event.name == "enter":
            some = (facts["task_id"], facts["number"], facts["attempt"] or 0, event.pid, facts["fence"], facts["item"])
            bodies[event.run] = Body(event.run, event.key, *some, entered=event.at)
        elif event.name == "leave" and event.run in bodies:
            bodies[event.run].left, bodies[event.run].outcome = event.at, facts["outcome"]
    known.bodies = sorted(bodies.values(), key=lambda body: body.entered)
    return known
