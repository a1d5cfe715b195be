"""The checker finds what is wrong with a history, and nothing in a right one."""

from itertools import count
from typing import Any

import pytest

from tests.fire.checker import PROMPT, Call, History, Remains, check, unaccounted
from tests.fire.kinds import KINDS
from tests.fire.load import STRUCK_WHILE_PICKLED
from tests.recorder import Event

TTL = KINDS["reschedule_late"].ttl
_numbers = count()


def at(moment: float, name: str, *, key: str = "", run: str = "", pid: int = 0, **facts: Any) -> list[Event]:
    return [Event(name, key, run, moment, pid, facts)]


def run(
    since: float,
    until: float | None,
    task_id: str = "a",
    pid: int = 1,
    fence: int | None = None,
    task: str = "reschedule_late",
    began: float | None = None,
    outcome: str = "returned",
) -> list[Event]:
    name, label = str(next(_numbers)), KINDS[task].label("k")
    fence = int(since * 1000) if fence is None else fence
    events = at(
        since if began is None else began,
        "began",
        run=name,
        pid=pid,
        task=task,
        task_id=task_id,
        attempt=0,
        is_item=False,
    )
    events += at(since, "enter", key=label, run=name, pid=pid, fence=fence, seconds=1, number=0)
    if until is not None:
        events += at(until, "leave", key=label, run=name, pid=pid, outcome=outcome)
        events += at(until, "ended", run=name, pid=pid, outcome=outcome)
    return events


def b(since: float, until: float, **facts: Any) -> list[Event]:
    return run(since, until, "b", pid=2, **facts)


def gates(number: int) -> list[Event]:
    return [event for each in range(number) for event in run(1, 5, f"{each}", each, each + 1, "gates")]


def dies(moment: float, pid: int = 1) -> list[Event]:
    return at(moment, "died", victim=pid, alive_at=moment - 0.1)


def stops(until: float, since: float = 1.5) -> list[Event]:
    return at(until, "stopped", pids=[1], since=since)


def lost(moment: float, reason: str = "unreachable") -> list[Event]:
    return at(moment, "lost", pid=1, task_id="a", reason=reason)


def says(outcome: str) -> list[Event]:
    return at(1.5, "conflict", pid=3, task="skip", task_id="a", outcome=outcome, holder="b")


EMPTIED = at(2.5, "emptied", down=2.0)
SHUT_DOWN = [*at(1.9, "fault", what="cold shutdown of worker 1"), *at(5, "healed", what="cold shutdown of worker 1")]


def promises(events: list[Event], *calls: Call, **more: Any) -> list[str]:
    history = History(sorted(events, key=lambda event: event.at), calls, **more)
    return sorted({finding.promise for finding in check(history).findings})


@pytest.mark.parametrize(
    ("events", "broken"),
    [
        ([], "bite"),
        (run(1, 2) + b(2, 3), ""),
        (run(1, 3) + b(2, 4), "one at a time"),
        # A run that never ends is in the way of all after it, until its process dies.
        (run(1, None) + b(50, 51), "one at a time"),
        (run(1, None) + dies(2) + b(2, 3), ""),
        (run(1, None) + b(2, 3) + dies(2.5), "one at a time"),
        # Up to the limit, and no more; tasks may share a lock, and one of a queue mode has none around its body.
        (gates(3), ""),
        (gates(4), "one at a time"),
        (run(1, 3, task="skip") + b(2, 4, task="wait"), "one at a time"),
        (run(1, 3, task="until_executing", fence=0) + b(2, 4, task="until_executing", fence=0), ""),
        # While it is stopped beyond its lease, and no longer.
        (run(1, 6.5, outcome="LockLost") + stops(6) + b(5, 7) + lost(6.2), ""),
        # It hears of its loss by an exception first, on a busy machine a little late.
        (run(1, 3, outcome="LockLost") + b(2.9, 4) + lost(3.5), ""),
        (run(1, 3, outcome="LockLost") + b(2.5, 4) + lost(3.5), "one at a time"),
        (run(1, 3, outcome="LockLost") + b(2.9, 4) + lost(3.5, "replaced"), "one at a time"),
        (run(1, 7 + PROMPT) + stops(6) + b(5, 20), "one at a time"),
        (run(1, 4) + stops(2.5, since=2) + b(2.2, 3), "one at a time"),
        # For one ttl after the store has lost its data.
        (run(1, 4, outcome="LockLost") + EMPTIED + b(3, 5), ""),
        (run(1, 3.5 + TTL + PROMPT) + EMPTIED + b(3, 20), "one at a time"),
        (EMPTIED + run(2.6, 4) + b(3, 5), "one at a time"),
        # A run that makes way for a successor still has its lease.
        (run(1, 4) + lost(2, "replaced") + b(3, 5), "one at a time"),
        # A run that has heard of its loss ends soon, and by that.
        (run(1, 3 + PROMPT, outcome="LockLost") + lost(2), "told"),
        (run(1, 3) + lost(2), "told"),
        (run(1, 3 + PROMPT, task="retrying", outcome="Retry") + lost(2), ""),
        # A fence only grows, also where the store has lost its data; but one may have asked long before it ran.
        (run(1, 2, fence=7) + b(3, 4, fence=6), "fenced"),
        (run(1, 2, fence=7) + b(3, 4, fence=7), "fenced"),
        (run(1, 2, fence=7) + EMPTIED + b(3, 4, fence=1), "fenced"),
        (run(1, 2, fence=0), "fenced"),
        (run(6, 6.1, fence=7, began=1) + stops(5.9) + b(5, 5.5, fence=8), ""),
    ],
)
def test_what_bodies_show(events: list[Event], broken: str) -> None:
    assert promises(events) == ([broken] if broken else [])


@pytest.mark.parametrize(
    ("call", "without", "explained_by"),
    [
        # Without the event that explains the state, the call counts as lost.
        (Call("a", "skip", "REVOKED"), [], says("skipped")),
        (Call("a", "skip", "FAILURE", "LockHeld"), [], says("raised")),
        (Call("a", "join", "SUCCESS"), [], says("joined")),
        (Call("a", "join", "FAILURE", "StoreError"), [], says("joined")),
        (
            Call("a", "skip", "FAILURE", "StoreError"),
            [],
            at(1, "unanswered", task="skip", task_id="a", outcome="raised"),
        ),
        (Call("a", "skip", "FAILURE", "StruckError"), [], run(1, 2, task="skip", outcome="StruckError")),
        (Call("a", "skip", "FAILURE", STRUCK_WHILE_PICKLED), [], run(1, 2, task="skip", outcome="Revoked")),
        (Call("a", "retrying", "RETRY"), [], run(1, 2, task="retrying", outcome="Reject")),
        (Call("a", "retrying", "FAILURE", "Reject"), [], run(1, 2, task="retrying", outcome="Reject")),
        (Call("a", "skip"), run(1, None, task="skip"), dies(2)),
        (Call("a", "skip"), run(1, 2, task="skip"), dies(2.1)),
        (Call("a", "skip", "RETRY"), run(1, 2, task="skip", outcome="Revoked") + dies(4.5), SHUT_DOWN),
        (
            Call("a", "failing_at_first", "RETRY"),
            run(1, 3.2, task="failing_at_first", outcome="Retry") + run(3.1, 3.2, task="failing_at_first", pid=2),
            lost(3, "taken"),
        ),
    ],
)
def test_an_end_has_to_be_explained(call: Call, without: list[Event], explained_by: list[Event]) -> None:
    other = b(10, 11, task="until_executing", fence=0)

    assert "nothing lost" in promises(without + other, call)
    assert "nothing lost" not in promises(without + explained_by + other, call)


@pytest.mark.parametrize(
    ("call", "events"),
    [
        # A message that is requeued, or is acknowledged late, does not die with a process.
        (Call("a", "reschedule", "RETRY"), run(1, 2, task="reschedule", outcome="Retry") + dies(2.1)),
        (Call("a", "reschedule_late"), run(1, None) + dies(2)),
        (Call("a", "reschedule_late", "STARTED"), b(1, 2)),
        (Call("a", "reschedule_late", "SUCCESS"), b(1, 2)),
        (Call("a", "reschedule_late", "FAILURE", "AttributeError"), run(1, 2, outcome="AttributeError")),
        (Call("a", "reschedule_late", "FAILURE", "OperationalError"), run(1, 2)),
    ],
)
def test_a_lost_call_is_found(call: Call, events: list[Event]) -> None:
    assert promises(events, call) == ["nothing lost"]


def test_who_waits_for_the_end_hears_which_calls_have_none() -> None:
    history = History(b(1, 2), [Call("a", "reschedule_late"), Call("b", "reschedule_late", "SUCCESS")])

    assert [call.task_id for call in unaccounted(history)] == ["a"]


@pytest.mark.parametrize(
    ("left", "promise"),
    [
        (Remains(drained=False), "drains"),
        (Remains(messages=1), "drains"),
        (Remains(holders=["k by a"]), "drains"),
        (Remains(troubles=["worker 1 has ended by itself"]), "drains"),
        (Remains(without_expiry=["k"]), "no key without expiry"),
    ],
)
def test_what_is_left_is_seen(left: Remains, promise: str) -> None:
    assert promises(run(1, 2), remains=left) == [promise]
