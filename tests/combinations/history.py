"""What is known of a program that has been played, as the rules look at it."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import inf

from tests.combinations.program import Call, Program
from tests.recorder import Event


@dataclass(frozen=True)
class Answer:
    """What the sender of a call has got.

    Attributes:
        parts: The task ids of the messages of chunks, of which `task_id` is the group.
        merged: It was not sent, and its sender was given the id of another.
        state: As the sender sees it; HUNG if `.get()` did not return within the bound, or, where nothing can be
            read, if no worker has ended it; ENDED where one has.
        error, text: Of the exception; of one that sending has raised, too.
        canvas: The same for the canvas it is in.
        ran_again: Whether it has, where its id was used again when all was over.
    """

    call: int
    task_id: str = ""
    sent: float = 0.0
    merged: bool = False
    state: str = ""
    error: str = ""
    text: str = ""
    canvas: str = ""
    canvas_error: str = ""
    ran_again: bool | None = None
    parts: Sequence[str] = ()
    published: float = 0.0


@dataclass(frozen=True)
class History:
    """All that is known of a program.

    Attributes:
        left: Keys that stay in the store of locks.
        open: What runs on when all should have ended.
        deployed: When its tasks were given another policy, by the first who had it.
    """

    program: Program
    events: Sequence[Event]
    answers: Sequence[Answer] = ()
    left: Sequence[str] = ()
    open: Sequence[str] = ()
    deployed: float = inf


@dataclass
class Body:
    """One execution of a body.

    Attributes:
        task_id: Of the message that has brought it: an item of a map has the map's.
        number: Of its call.
        again_of: At a second try, the `run` of the first, which may have had no body.
    """

    run: str
    key: str
    task_id: str
    number: int
    attempt: int
    pid: int
    host: str
    fence: int
    is_item: bool
    entered: float
    left: float = inf
    outcome: str = ""
    again_of: str = ""

    def __str__(self) -> str:
        kind = ("the second try of " if self.again_of else "") + ("an item of " if self.is_item else "")
        return f"{kind}number {self.number} ({self.task_id[:8]}, attempt {self.attempt})"


@dataclass
class Held:
    """A `Lock` of a key, in a body."""

    key: str
    body: Body
    asked: float
    entered: float = inf
    left: float = inf

    def __str__(self) -> str:
        return f"a Lock in {self.body}"


@dataclass(frozen=True)
class Refused:
    """A conflict of a call.

    Attributes:
        by: The task id of the holder; None if that is no task.
    """

    task_id: str
    key: str
    at: float
    outcome: str
    by: str | None


@dataclass
class Known:
    """What the rules look at."""

    history: History
    plain: bool = False
    bodies: list[Body] = field(default_factory=list)
    locks: list[Held] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    began: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    @property
    def program(self) -> Program:
        return self.history.program

    @property
    def calls(self) -> Sequence[Call]:
        return self.program.calls

    @property
    def broadcast(self) -> bool:
        return bool(self.program.stage["broker"] == "broadcast")

    @property
    def eager(self) -> bool:
        return bool(self.program.stage["pool"] == "eager")

    @property
    def failed(self) -> set[str]:
        return {event.facts["task_id"] for event in self.history.events if event.name == "failed"}

    @property
    def rejected(self) -> set[str]:
        ended = [event.facts for event in self.history.events if event.name == "ended"]
        return {facts["task_id"] for facts in ended if facts["outcome"] == "Reject"}

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


def read(history: History, plain: bool = False) -> Known:
    known = Known(history, plain)
    told = _Told()
    for event in sorted(history.events, key=lambda event: event.at):
        if event.name == "began" and event.facts["task_id"]:
            known.began[event.facts["task_id"]].append(event.at)
        elif event.name == "conflict":
            known.refused.append(_refusal(event))
        elif event.name == "died":
            told.death(event)
        elif event.name == "enter":
            told.enter(event)
        elif event.run in told.bodies:
            told.body(event)
    known.bodies = sorted(told.bodies.values(), key=lambda body: body.entered)
    known.locks = list(told.locks.values())
    for held in known.locks:
        # Whoever was killed has given it back as little as it has left its body.
        held.left = min(held.left, held.body.left)
    return known


def _refusal(event: Event) -> Refused:
    facts = event.facts
    return Refused(facts["task_id"], event.key, event.at, facts["outcome"], facts.get("holder"))


class _Told:
    """Bodies and their locks, as the events tell of them one after another."""

    def __init__(self) -> None:
        self.bodies: dict[str, Body] = {}
        self.locks: dict[str, Held] = {}

    def enter(self, event: Event) -> None:
        facts = event.facts
        some = (facts["task_id"], facts["number"], facts["attempt"] or 0, event.pid, facts["host"], facts["fence"])
        again_of = facts.get("again_of", "")
        self.bodies[event.run] = Body(
            event.run, event.key, *some, is_item=facts["item"], entered=event.at, again_of=again_of
        )

    def body(self, event: Event) -> None:
        """It leaves, or something becomes of its lock."""
        body = self.bodies[event.run]
        if event.name == "leave":
            body.left, body.outcome = event.at, event.facts["outcome"]
        elif event.name == "asks":
            self.locks[event.run] = Held(event.key, body, event.at)
        elif event.name == "locked":
            self.locks[event.run].entered = event.at
        elif event.name == "unlocked":
            self.locks[event.run].left = event.at

    def death(self, event: Event) -> None:
        for body in self.bodies.values():
            if body.pid == event.facts["victim"] and body.left == inf:
                body.left, body.outcome = max(body.entered, event.facts["alive_at"]), "died"
