"""A program: one to three tasks and two to five calls of them, drawn from a row of the covering array and a seed."""

import dataclasses
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.combinations.cover import rows
from tests.combinations.factors import CALL, STAGE, TASK, Row, plain, why_not

VISIBILITY = 3.0
TTL = 4.0
# Seconds from the first worker that has a deploy to the last.
ROLLING = 1.0
MOST_CALLS = 5
# Programs that are played on one stage at a time.
HANDFUL = 12
# Of the other calls, so many are as special as those of another row.
SHARE_OF_SPECIAL = 0.35
# Of the calls beside a retry with other arguments, a `Lock` in a body, or one that hands on, so many are on the other
# key from the beginning.
SHARE_OF_OTHERS = 0.5
_PAUSES = (0.0, 0.1, 0.4, 0.9, 1.6)
_WORK = (0.1, 0.5, 1.2, 2.5)


@dataclass(frozen=True)
class Call:
    """One call.

    Attributes:
        task: Which of the program's tasks, by its index.
        number: Which call of the program; an argument that counts for no key.
        at: Seconds after the beginning.
        seconds: How long its body works.
        other: It is on the key that a retry with other arguments is on, and a `Lock` in a body.
        lock: How often its body takes a `Lock`.
        link: What is called when it has ended.
    """

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
    lock: str = "none"
    link: str = "none"
    other: bool = False

    @property
    def script(self) -> dict[str, Any]:
        """What its body is to do."""
        # A tuple, of which a serialiser makes something else.
        sent = {"sent": ()}
        return {"seconds": self.seconds, "retries": self.retries, "ending": self.ending, "lock": self.lock, **sent}


@dataclass(frozen=True, eq=False)
class Program:
    """What is played.

    Attributes:
        stage: Where: the stage's factors.
        tasks: What each task declares: the task's factors, its limit as a number, and the policy, or mode, that is
            deployed.
        rows: Of the covering array, those it was drawn from.
        deployed_at: Seconds after the beginning, if any of its tasks is given another policy, or mode.
    """

    stage: dict[str, Any]
    tasks: tuple[dict[str, Any], ...]
    calls: tuple[Call, ...]
    rows: tuple[dict[str, Any], ...] = ()
    deployed_at: float = 0.0

    @property
    def is_deployed(self) -> bool:
        """A task of it is given another policy, or mode, meanwhile."""
        return any(task["deploy"] for task in self.tasks)

    @property
    def policies(self) -> set[str]:
        """All that its tasks have, before the deploy and after it."""
        return {policy for task in self.tasks for policy in (task["policy"], deployed_policy(task)) if policy}

    @property
    def modes(self) -> set[str]:
        """All that its tasks have, before the deploy and after it."""
        deployed = {task["deploy"] for task in self.tasks if task["deploy"] in TASK["mode"]}
        return {task["mode"] for task in self.tasks} | deployed

    @property
    def limit(self) -> int:
        """The largest that is in use."""
        return max(int(task["limit"]) for task in self.tasks)

    @property
    def mode(self) -> str:
        return str(self.tasks[0]["mode"])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Program) and self.line() == other.line()

    def __hash__(self) -> int:
        return hash(self.line())

    def line(self) -> str:
        """All of it in a line, without what is plain; `read` is the way back."""
        bare = plain()
        deployed = {"deployed_at": self.deployed_at} if self.is_deployed else {}
        told = {
            "stage": _unlike(self.stage, bare),
            "tasks": [_unlike(task, {**bare, "limit": 1}) for task in self.tasks],
            "calls": [_unlike(dataclasses.asdict(call), dataclasses.asdict(Call())) for call in self.calls],
            **deployed,
        }
        return json.dumps(told)


def deployed_policy(task: Row) -> str | None:
    """The policy that a task is given, if it is given one."""
    return str(task["deploy"]) if task["deploy"] in TASK["policy"] else None


def tasks_of(programs: Sequence[Program]) -> list[dict[str, Any]]:
    """What they declare; some declare the same."""
    return list({json.dumps(task): task for program in programs for task in program.tasks}.values())


def bare_task() -> dict[str, Any]:
    """What a task declares that declares nothing."""
    bare = plain()
    return {name: bare[name] for name in TASK} | {"limit": 1}


def read(line: str) -> Program:
    """The program of a line."""
    told = json.loads(line)
    bare = plain()
    stage = {name: bare[name] for name in STAGE} | told["stage"]
    tasks = tuple(bare_task() | task for task in told["tasks"])
    calls = tuple(Call(**call) for call in told["calls"])
    return Program(stage, tasks, calls, deployed_at=told.get("deployed_at", 0.0))


def draw(seed: int, number: int) -> list[Program]:
    """So many programs, a stage at a time, so that few stages have to be set up."""
    rng = random.Random(f"combinations {seed}")
    drawn: list[Program] = []
    while len(drawn) < number:
        for hand in _hands(rng):
            drawn += [one(row, hand, rng) for row in hand]
    return drawn[:number]


def _hands(rng: random.Random) -> list[list[Row]]:
    """All rows, shuffled, in handfuls of one stage each: as many of a stage as it has rows."""
    of: dict[str, list[Row]] = {}
    for row in rows():
        of.setdefault(json.dumps([row[name] for name in STAGE]), []).append(row)
    hands = []
    for alike in of.values():
        rng.shuffle(alike)
        # One slot serves few.
        most = HANDFUL // 3 if alike[0]["pool"] == "solo" else HANDFUL
        hands += [alike[begin : begin + most] for begin in range(0, len(alike), most)]
    rng.shuffle(hands)
    return hands


def one(row: Row, others: Sequence[Row], rng: random.Random) -> Program:
    """A program about *row*, in which calls of some of the *others* may interfere."""
    tasks = _tasks(row, others, rng)
    used = [dict(row)]
    calls = []
    for index in range(rng.randint(2, MOST_CALLS)):
        some: Row = plain() | ({"serializer": "pickle"} if row["keys"] == "of a set" else {})
        if index == 0:
            some = row
        elif rng.random() < SHARE_OF_SPECIAL:
            other = {**row, **{name: rng.choice(others)[name] for name in CALL}}
            if why_not(other) is None:
                used.append(other)
                some = other
        # One that the brokers delivers again works for longer than that takes.
        long = row["redelivers"] and index == 0
        call = Call(
            task=rng.randrange(len(tasks)) if index else 0,
            seconds=VISIBILITY + 1.5 if long else rng.choice(_WORK),
            other=bool(index) and _has_another_key(row) and rng.random() < SHARE_OF_OTHERS,
            **{name: some[name] for name in CALL},
        )
        calls.append(call)
    if row["pool"] == "eager":
        calls = [dataclasses.replace(call, timing="now", route="delay", place="single", link="none") for call in calls]
    rng.shuffle(calls)
    at = 0.0
    timed = []
    for number, call in enumerate(calls):
        timed.append(dataclasses.replace(call, number=number, at=round(at, 2)))
        at += rng.choice(_PAUSES)
    stage = {name: row[name] for name in STAGE}
    return Program(stage, tasks, tuple(timed), tuple(used), round(rng.uniform(0.0, at + 1.0), 1))


def _has_another_key(row: Row) -> bool:
    return row["retries"] == "other arguments" or row["lock"] != "none" or row["route"].startswith("hands on")


def _tasks(row: Row, others: Sequence[Row], rng: random.Random) -> tuple[dict[str, Any], ...]:
    """The row's own; where its limit changes, as a deploy would change it; and sometimes one of another policy.

    A change of policy or mode is no task of its own, because calls are superseded by those of a task of the same name.
    """
    own = {name: row[name] for name in TASK}
    if row["deploy"] == "of another policy":
        own["deploy"] = rng.choice([policy for policy in TASK["policy"] if _may_become(row, policy)])
    elif row["deploy"]:
        own["deploy"] = rng.choice([mode for mode in TASK["mode"] if mode not in ("until_executing", row["mode"])])
    tasks = [{**own, "limit": int(limit)} for limit in row["limit"].split(" then ")]
    if rng.random() < 0.3:
        policy = rng.choice(others)["policy"]
        if why_not({**row, "policy": policy}) is None:
            tasks.append({**tasks[0], "policy": policy})
    return tuple(tasks)


def _may_become(row: Row, policy: str) -> bool:
    return policy != row["policy"] and why_not({**row, "policy": policy}) is None


def _unlike(some: dict[str, Any], bare: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in some.items() if value != bare[name]}
