"""The checker finds what is wrong with a history, and nothing in a right one: each rule in one that breaks it."""

from itertools import count
from typing import Any

import pytest

from tests.combinations.checker import MOST_DELIVERIES, check
from tests.combinations.factors import STAGE
from tests.combinations.history import Answer, History
from tests.combinations.program import Call, Program, bare_task
from tests.combinations.stage import hangs_in_amqp
from tests.recorder import Event

PLAIN = {name: values[0] for name, values in STAGE.items()}
_runs = count()


def at(moment: float, name: str, run: str = "", key: str = "k", pid: int = 1, **facts: Any) -> list[Event]:
    return [Event(name, key, run, moment, pid, facts)]


def begins(moment: float, task_id: str = "aaa", run: str = "", **facts: Any) -> list[Event]:
    facts = {"task": "t", "attempt": 0, **facts}
    return at(moment, "began", run or str(next(_runs)), task_id=task_id, **facts)


def body(
    since: float,
    until: float | None,
    task_id: str = "aaa",
    outcome: str = "returned",
    number: int = 0,
    fence: int | None = None,
    pid: int = 1,
    **began: Any,
) -> list[Event]:
    run, fence = str(next(_runs)), round(since * 1000) if fence is None else fence
    events = begins(since - 0.01, task_id, run, pid=pid, **began)
    events += at(since, "enter", run, pid=pid, number=number, fence=fence, seconds=1)
    return events + (at(until, "leave", run, pid=pid, outcome=outcome, task_id=task_id) if until is not None else [])


def b(since: float, until: float | None, **facts: Any) -> list[Event]:
    return body(since, until, "bbb", number=1, **facts)


def conflict(moment: float, task_id: str, outcome: str, holder: str = "aaa") -> list[Event]:
    return at(moment, "conflict", task_id=task_id, outcome=outcome, holder=holder)


def first(state: str = "SUCCESS", error: str = "", text: str = "", **more: Any) -> Answer:
    return Answer(0, "aaa", state=state, error=error, text=text, **more)


def second(state: str = "SUCCESS", error: str = "", text: str = "", **more: Any) -> Answer:
    return Answer(1, "bbb", state=state, error=error, text=text, **more)


UNSENT = Answer(1, state="UNSENT", error="LockHeld", text="held by aaa")
SKIPPED = second("REVOKED", text="held by aaa")
# It names one that was refused itself, or whose end nobody can read.
NAMES_B = Answer(1, state="UNSENT", error="LockHeld", text="held by bbb")
RAISING = {"task": {"mode": "until_and_while_executing", "policy": "raise"}}
A_GROUP_HANGS = second("FAILURE", "LockHeld", "held by aaa", canvas="HUNG")
BEFORE_A_GROUP = {"task": {"policy": "raise"}, "other": {"place": "before a group"}}
BY_SEND_TASK = {"task": {"policy": "rerun"}, "call": {"route": "send_task"}}
BEFORE = {"mode": "until_executing"}
QUEUED = {"mode": "until_executed"}
FLOOD = [event for number in range(2 * MOST_DELIVERIES) for event in begins(number / 100)]


def rules(
    events: list[Event],
    *answers: Answer,
    task: dict[str, Any] | None = None,
    call: dict[str, Any] | None = None,
    other: dict[str, Any] | None = None,
    stage: dict[str, Any] | None = None,
    **more: Any,
) -> set[str]:
    calls = (Call(number=0, **(call or {})), Call(number=1, **(other or {})))
    program = Program({**PLAIN, **(stage or {})}, ({**bare_task(), **(task or {})},), calls)
    return {finding.promise for finding in check(History(program, events, answers, **more))}


RIGHT: list[tuple[list[Event], list[Answer], dict[str, Any]]] = [
    (body(1, 2) + b(3, 4), [first(), second()], {}),
    (body(1, 3) + b(2, 4), [], {"task": {"limit": 2}}),
    (body(1, 3) + b(2, 4), [], {"task": BEFORE}),
    (body(1, None, pid=7) + at(2, "died", victim=7, alive_at=2.0) + b(2.5, 3), [], {}),
    ([], [first("HUNG")], {"call": {"ending": "ignore"}}),
    (body(1, 2, outcome="ValueError"), [first("FAILURE", "ValueError")], {"call": {"ending": "raise"}}),
    (body(1, 2), [first(), SKIPPED], {}),
    (body(1, 2), [first(), UNSENT], {"task": {**QUEUED, "policy": "raise"}}),
    ([], [first()], {"task": {"policy": "join"}}),
    (body(1, 2) + conflict(1.6, "bbb", "raised"), [first(sent=0.9), second("", sent=1.5), NAMES_B], RAISING),
    (body(1, 2) + conflict(1.6, "bbb", "superseded"), [first(sent=0.9), second("ENDED", sent=0.8), NAMES_B], RAISING),
    (body(3, 4) + b(5, 6), [first(sent=0.9), second(sent=1.5)], {"task": {**BEFORE, "policy": "replace"}}),
    # The store dates a call by `send_task`, a moment after its run began.
    (body(1, 2), [first(), second("REVOKED", text="held by aaa", sent=1.05)], BY_SEND_TASK),
    # Celery leaves a group waiting after a step that fails.
    (body(1, 2) + at(3, "failed", task_id="bbb"), [first(), A_GROUP_HANGS], BEFORE_A_GROUP),
    ([begins(number)[0] for number in range(2 * MOST_DELIVERIES)], [], {}),
]


@pytest.mark.parametrize(("events", "answers", "program"), RIGHT)
def test_a_right_history_breaks_no_rule(events: list[Event], answers: list[Answer], program: dict[str, Any]) -> None:
    assert rules(events, *answers, **program) == set()


WRONG: list[tuple[str, list[Event], list[Answer], dict[str, Any]]] = [
    ("one at a time", body(1, 3) + b(2, 4), [], {}),
    ("one at a time", body(1, None) + b(9, 10), [], {}),
    ("one body of a message", body(1, 3, attempt=0) + body(2, 4, attempt=1), [first()], {"task": BEFORE}),
    ("fences grow", body(1, 2, fence=0), [], {}),
    ("fences grow", body(1, 2, fence=6) + b(3, 4, fence=5), [], {}),
    ("every call ends", [], [first("HUNG")], {}),
    ("every call ends", [], [first("RETRY")], {}),
    ("every call ends", body(1, 2), [first(canvas="HUNG")], {}),
    ("every call ends", [], [], {"open": ["number 0 still runs"]}),
    ("every call ends", body(1, 2), [first(), A_GROUP_HANGS], BEFORE_A_GROUP),
    ("every call can be sent", [], [Answer(0, state="UNSENT", error="TypeError")], {}),
    ("it fails for what it does", [], [first("FAILURE", "ConfigurationError")], {}),
    ("it fails for what it does", body(1, 2), [first("FAILURE", "AgainError")], {"task": {"autoretry": True}}),
    ("who does not run names who does", body(1, 2), [first(), second("REVOKED", text="held by nobody")], {}),
    ("who does not run names who does", body(1, 2), [first(), second("REVOKED", text="made way for bbb")], {}),
    ("who does not run names who does", [], [first("REVOKED", text="held by bbb"), SKIPPED], {}),
    ("who does not run names who does", body(1, 2), [first(sent=0.9), second("", sent=1.5), NAMES_B], RAISING),
    ("who succeeds has run", [], [first()], {}),
    ("the newest runs", body(1, 2), [first(), SKIPPED], {"task": {"policy": "rerun"}}),
    ("the newest runs", body(1, 2), [first(), SKIPPED], {"task": {"policy": "replace"}}),
    (
        "who is superseded is run for",
        b(3.5, 3.6) + conflict(3.4, "aaa", "superseded", "bbb"),
        [first("REVOKED", text="lock key=k: superseded by task_id=bbb", sent=0.9), second(sent=0.1)],
        {"task": {"policy": "replace"}, "call": {"timing": "eta"}},
    ),
    (
        "nobody older runs while a newer one waits",
        body(3, 4) + begins(1, "bbb") + b(5, 6),
        [first(sent=0.1), second(sent=0.9)],
        {"task": {"policy": "rerun"}},
    ),
    ("an attempt is completed once", body(1, 2) + body(9, 10), [], {}),
    (
        "who was replaced is over",
        body(1, 2, outcome="LockLost") + b(3, 4) + body(5, 6, attempt=1),
        [],
        {"task": {"policy": "replace"}},
    ),
    (
        "a retry makes way for nobody absent",
        body(1, 2, outcome="Retry") + conflict(5, "aaa", "skipped", "bbb") + b(9, 10),
        [first("REVOKED", text="held by bbb")],
        {},
    ),
    ("a duplicate is not sent", body(1, 2) + b(3, 4), [first(sent=0.9), second(sent=1.5)], {"task": QUEUED}),
    ("a duplicate is not sent", body(3, 4) + b(5, 6), [first(sent=0.9), second(sent=1.5)], {"task": BEFORE}),
    ("no flood", FLOOD, [], {}),
    ("nothing is left", [], [], {"left": ["singleton:{combined:1}"]}),
]


@pytest.mark.parametrize(("rule", "events", "answers", "program"), WRONG)
def test_what_is_wrong_is_found(rule: str, events: list[Event], answers: list[Answer], program: dict[str, Any]) -> None:
    assert rules(events, *answers, **program) == {rule}


@pytest.mark.parametrize(
    ("frames", "is_its_own"),
    [
        (["amqp/transport.py", "amqp/connection.py", "kombu/connection.py"], True),
        (["celery_singleton_lock/publish.py", "amqp/connection.py"], False),
        (["threading.py", "kombu/connection.py"], False),
    ],
)
def test_a_body_that_hangs_in_amqp_is_told_from_one_that_hangs_in_the_lock(frames: list[str], is_its_own: bool) -> None:
    stack = "".join(f'  File "/site/{frame}", line 7 in close\n' for frame in frames)
    told = f"Thread 0x1 (most recent call first):\n\nCurrent thread 0x2 (most recent call first):\n{stack}"

    assert hangs_in_amqp(told + '  File "/site/kombu/resource.py", line 125 in replace\n') == is_its_own
    assert not hangs_in_amqp(told)
