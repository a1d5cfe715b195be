"""A program: one to three tasks and two to five calls of them, drawn from a row of factors and a seed."""

import dataclasses
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.combinations.factors import CALL, STAGE, TASK, Row, drawn, plain, why_not

VISIBILITY = 3.0
TTL = 4.0
MOST_CALLS = 5
# Programs that are played on one stage at a time; one slot serves few.
HANDFUL = 12
HANDFUL_OF_SOLO = 4
# The share of the other calls that are as special as those of another row.
SHARE_OF_SPECIAL = 0.35
# The share of the calls beside a retry with other arguments that are on its key from the beginning.
SHARE_OF_OTHERS = 0.5
_PAUSES = (0.0, 0.1, 0.4, 0.9, 1.6)
_WORK = (0.1, 0.5, 1.2, 2.5)


@dataclass(frozen=True)
class Call:
    task: int = 0
    number: int = 0
    at: float = 0.0
    seconds: float = 0.1
    retries: str = "none"
    ending: str = "return"
    place: str = "single"
    serializer: str = "json"
    timing: str = "now"
    route: str = "delay"
    other: bool = False

    @property
    def script(self) -> dict[str, Any]:
        """Instructions for the body, and a tuple, which a serialiser turns into a list."""
        return {"seconds": self.seconds, "retries": self.retries, "ending": self.ending, "sent": ()}


@dataclass(frozen=True)
class Program:
    stage: dict[str, Any]
    tasks: tuple[dict[str, Any], ...]
    calls: tuple[Call, ...]

    @property
    def policies(self) -> set[str]:
        return {task["policy"] for task in self.tasks}

    @property
    def limit(self) -> int:
        return max(int(task["limit"]) for task in self.tasks)

    @property
    def mode(self) -> str:
        return str(self.tasks[0]["mode"])

    def line(self) -> str:
        """All of it in a line, without what is plain; `read` is the way back."""
        bare = plain()
        told = {
            "stage": _unlike(self.stage, bare),
            "tasks": [_unlike(task, {**bare, "limit": 1}) for task in self.tasks],
            "calls": [_unlike(dataclasses.asdict(call), dataclasses.asdict(Call())) for call in self.calls],
        }
        return json.dumps(told)


def tasks_of(programs: Sequence[Program]) -> list[dict[str, Any]]:
    return list({json.dumps(task): task for program in programs for task in program.tasks}.values())


def bare_task() -> dict[str, Any]:
    return {name: values[0] for name, values in TASK.items()} | {"limit": 1}


def read(line: str) -> Program:
    told = json.loads(line)
    stage = {name: values[0] for name, values in STAGE.items()} | told["stage"]
    tasks = tuple(bare_task() | task for task in told["tasks"])
    return Program(stage, tasks, tuple(Call(**call) for call in told["calls"]))


def draw(seed: int, number: int) -> list[Program]:
    rng = random.Random(f"combinations {seed}")
    programs: list[Program] = []
    while len(programs) < number:
        stage = drawn(rng, STAGE, {})
        size = HANDFUL_OF_SOLO if stage["pool"] == "solo" else HANDFUL
        hand = [drawn(rng, [*TASK, *CALL], stage) for _ in range(min(size, number - len(programs)))]
        programs += [one(row, hand, rng) for row in hand]
    return programs


def one(row: Row, others: Sequence[Row], rng: random.Random) -> Program:
    """A program about *row*, in which calls of some of the *others* may interfere."""
    tasks = _tasks(row, others, rng)
    calls = []
    for index in range(rng.randint(2, MOST_CALLS)):
        some: Row = plain()
        if index == 0:
            some = row
        elif rng.random() < SHARE_OF_SPECIAL:
            other = {**row, **{name: rng.choice(others)[name] for name in CALL}}
            if why_not(other) is None:
                some = other
        # A call that the broker is to deliver again works for longer than the visibility timeout.
        long = row["redelivers"] and index == 0
        call = Call(
            task=rng.randrange(len(tasks)) if index else 0,
            seconds=VISIBILITY + 1.5 if long else rng.choice(_WORK),
            other=bool(index) and row["retries"] == "other arguments" and rng.random() < SHARE_OF_OTHERS,
            **{name: some[name] for name in CALL},
        )
        calls.append(call)
    rng.shuffle(calls)
    at = 0.0
    timed = []
    for number, call in enumerate(calls):
        timed.append(dataclasses.replace(call, number=number, at=round(at, 2)))
        at += rng.choice(_PAUSES)
    return Program({name: row[name] for name in STAGE}, tasks, tuple(timed))


def _tasks(row: Row, others: Sequence[Row], rng: random.Random) -> tuple[dict[str, Any], ...]:
    """The row's own; where its limit changes, as a deploy would change it; and sometimes one of another policy."""
    own = {name: row[name] for name in TASK}
    tasks = [{**own, "limit": int(limit)} for limit in row["limit"].split(" then ")]
    if rng.random() < 0.3:
        policy = rng.choice(others)["policy"]
        if why_not({**row, "policy": policy}) is None:
            tasks.append({**tasks[0], "policy": policy})
    return tuple(tasks)


def _unlike(some: dict[str, Any], bare: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in some.items() if value != bare[name]}
