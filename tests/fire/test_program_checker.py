"""What must not happen to a program under fire is seen, and what faults bring about is not taken for it."""

import dataclasses
from typing import Any

import pytest

from tests.combinations.app import name_of
from tests.combinations.history import Answer, History
from tests.combinations.program import TTL, Call, Program, bare_task
from tests.fire.checker import PROMPT
from tests.fire.program_checker import check
from tests.fire.programs import drawn, facts
from tests.recorder import Event


class Story:
    """A program of two calls, told event by event."""

    def __init__(self) -> None:
        self.task = bare_task()
        self.calls = [Call(number=0), Call(number=1)]
        self.events: list[Event] = []
        self.answers: list[Answer] = []
        self._runs = 0

    def at(self, moment: float, name: str, run: str = "", key: str = "", pid: int = 1, **more: Any) -> None:
        self.events.append(Event(name, key, run, moment, pid, more))

    def body(
        self,
        since: float,
        until: float | None,
        task_id: str = "aaa",
        pid: int = 1,
        outcome: str = "returned",
        published: int = 0,
    ) -> None:
        self._runs += 1
        run = str(self._runs)
        told = {"task": name_of(self.task), "task_id": task_id, "host": "w", "attempt": 0, "item": False}
        self.at(since, "began", run, "k", pid, published=published, **told)
        self.at(since, "enter", run, "k", pid, **told, number=0, fence=round(since * 1000), seconds=1)
        if until is not None:
            self.at(until, "leave", run, "k", pid, **told, outcome=outcome)
            self.at(until, "ended", run, "k", pid, **told, outcome=outcome)

    def step(self, since: float, until: float, task_id: str, number: int = 0, pid: int = 1) -> None:
        """A plain one of a canvas."""
        self._runs += 1
        run, told = str(self._runs), {"task": "step", "task_id": task_id}
        self.at(since, "began", run, "k", pid, **told)
        self.at(since, "step", "", "k", pid, task_id=task_id, number=number)
        self.at(until, "ended", run, "k", pid, **told, outcome="returned")

    def answer(self, number: int, task_id: str, state: str = "SUCCESS", error: str = "") -> None:
        self.answers.append(Answer(number, task_id, state=state, error=error))

    def promises(self, left: tuple[str, ...] = ()) -> list[str]:
        program = Program(facts(broker_is_redis=False), (self.task,), tuple(self.calls))
        events = sorted(self.events, key=lambda event: event.at)
        findings, _ = check(History(program, events, self.answers, left), forgetful=False)
        return sorted({finding.promise for finding in findings})


@pytest.fixture
def story() -> Story:
    return Story()


def test_one_after_another_is_good(story: Story) -> None:
    story.body(1, 2)
    story.body(2, 3, "bbb", pid=2)
    story.answer(0, "aaa")
    story.answer(1, "bbb")

    assert story.promises() == []


def test_two_at_once_are_seen(story: Story) -> None:
    story.body(1, 3)
    story.body(2, 4, "bbb", pid=2)

    assert story.promises() == ["one at a time"]


def test_but_not_while_one_is_stopped_beyond_its_lease(story: Story) -> None:
    story.body(1, 2 + TTL + PROMPT, outcome="LockLost")
    story.at(1 + TTL + PROMPT, "stopped", pids=[1], since=1.5)
    story.body(1 + TTL + 0.5, 9, "bbb", pid=2)

    assert story.promises() == []


def test_a_message_that_runs_twice_at_once_is_seen_where_two_may(story: Story) -> None:
    story.task["limit"] = 2
    story.body(1, 3)
    story.body(2, 4, pid=2)

    assert story.promises() == ["one body of a message"]


@pytest.mark.parametrize(("second", "promises"), [(8, []), (7, ["one body of a message"])])
def test_a_step_that_was_published_twice_is_two_messages(story: Story, second: int, promises: list[str]) -> None:
    story.task["limit"] = 2
    story.calls[0] = dataclasses.replace(story.calls[0], place="middle of a chain")
    story.body(1, 3, published=7)
    story.body(2, 4, pid=2, published=second)
    story.answer(0, "aaa")

    assert story.promises() == promises


@pytest.mark.parametrize(("late", "promises"), [(False, []), (True, ["every call ends"])])
def test_a_call_that_died_with_its_worker_is_lost_by_celery_if_it_was_acknowledged_early(
    story: Story, late: bool, promises: list[str]
) -> None:
    story.task["late"] = late
    story.body(1, None)
    story.at(2, "died", victim=1, alive_at=2.0)
    story.answer(0, "aaa", "PENDING")

    assert story.promises() == promises


def test_a_call_that_nobody_ended_is_seen(story: Story) -> None:
    story.answer(0, "aaa", "PENDING")

    assert story.promises() == ["every call ends"]


@pytest.mark.parametrize(("runs_again", "promises"), [(True, []), (False, ["every call ends"])])
def test_a_chord_that_has_counted_a_step_of_its_header_twice_is_celerys(
    story: Story, runs_again: bool, promises: list[str]
) -> None:
    story.calls[0] = dataclasses.replace(story.calls[0], place="chord body")
    story.step(1, 2, "first", pid=2)
    story.at(2.5, "died", victim=2, alive_at=2.5)
    if runs_again:
        story.step(3, 4, "first")
    story.answer(0, "aaa", "PENDING")

    assert story.promises() == promises


def test_of_an_ignore_celery_stores_no_end(story: Story) -> None:
    story.calls[0] = dataclasses.replace(story.calls[0], ending="ignore")
    story.body(1, 2, outcome="Ignore")
    story.answer(0, "aaa", "PENDING")

    assert story.promises() == []


def test_an_error_that_nobody_brought_about_is_seen(story: Story) -> None:
    story.body(1, 2, outcome="LockLost")
    story.answer(0, "aaa", "FAILURE", "LockLost")
    assert story.promises() == []

    story.answer(1, "bbb", "FAILURE", "LockLost")
    assert story.promises() == ["it fails for a reason"]


@pytest.mark.parametrize(
    ("call", "promises"),
    [
        ({}, ["it fails for a reason"]),
        ({"place": "map"}, ["it fails for a reason"]),
        ({"place": "group"}, ["it fails for a reason"]),
        ({"place": "first of a chain"}, []),
        ({"link": "link"}, []),
        ({"retries": "replace"}, []),
    ],
)
def test_a_call_fails_with_what_is_to_be_published_before_or_after_it(
    story: Story, call: dict[str, str], promises: list[str]
) -> None:
    story.calls[0] = dataclasses.replace(story.calls[0], **call)
    story.body(1, 2)
    story.answer(0, "aaa", "FAILURE", "OperationalError")

    assert story.promises() == promises


@pytest.mark.parametrize(
    ("place", "error", "promises"),
    [
        ("middle of a chain", "StruckError", []),
        ("chord body", "ChordError", []),
        ("middle of a chain", "ChordError", ["it fails for a reason"]),
        ("group", "StruckError", ["it fails for a reason"]),
    ],
)
def test_a_step_that_was_struck_as_it_published_the_next_one_fails_that_as_well(
    story: Story, place: str, error: str, promises: list[str]
) -> None:
    story.calls[0] = dataclasses.replace(story.calls[0], place=place)
    story.answer(0, "aaa", "FAILURE", error)

    assert story.promises() == promises


def test_what_is_left_is_seen(story: Story) -> None:
    assert story.promises(left=("singleton:k: a mark",)) == ["nothing is left"]


def test_programs_are_drawn_for_the_workers_of_fire() -> None:
    stage = facts(broker_is_redis=False)

    programs = drawn(3, 40, stage)

    assert len(programs) == 40
    assert programs == drawn(3, 40, stage)
    assert all(program.stage == stage for program in programs)
    # RabbitMQ itself drops what has expired.
    assert "expires" not in {call.timing for program in programs for call in program.calls}
