"""Several beats, of which one leads: no slot is sent twice, and none is left out when the leader goes."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.servers import FakeClock, Server
from tests.waiting import until
from tests.workers import Process

EVERY = 2.0
TTL = 3.0
TICK = 1.0
SLACK = 5.0
"""For a machine that has other things to do."""


class Beat(Process):
    """One `celery beat`, with a schedule file of its own."""

    def __init__(self, env: dict[str, str], scheduler: str = "celery_singleton_lock.beat:SingletonScheduler") -> None:
        schedule = tempfile.mkdtemp(prefix="beat-") + "/schedule"
        options = ("--scheduler", scheduler, "--schedule", schedule, "--pidfile", "")
        super().__init__("tests.acceptance.beat_app", env, "beat", *options)

    def starts(self) -> bool:
        return self._has_said("beat: Starting")

    def leads(self) -> bool:
        return self._has_said("beat.leads")

    def _has_said(self, words: str) -> bool:
        assert self._process.poll() is None, self.log()
        return words in self.log()


@pytest.fixture
def in_a_database(env: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """A schedule in the database of a Django project."""
    env["TEST_DATABASE"] = str(tmp_path / "db.sqlite3")
    in_django(env, "make", "every-two-seconds", "2")
    return env


def in_django(env: dict[str, str], what: str, name: str, value: str) -> None:
    command = [sys.executable, "-m", "tests.acceptance.django_app", what, name, value]
    subprocess.run(command, env={**os.environ, **env}, check=True)


@pytest.fixture(
    params=[
        "celery_singleton_lock.beat:SingletonScheduler",
        "tests.acceptance.django_app:Scheduler",
        "tests.acceptance.sqlalchemy_beat:Scheduler",
    ]
)
def beats(request: pytest.FixtureRequest, env: dict[str, str], tmp_path: Path) -> Iterator[list[Beat]]:
    """A leader and a standby."""
    env["TEST_DATABASE"] = str(tmp_path / "db.sqlite3")
    if "django" in request.param:
        request.getfixturevalue("in_a_database")
    started = [Beat(env, request.param)]
    until(started[0].leads, "the first leads")
    started.append(Beat(env, request.param))
    until(started[1].starts, "the second stands by")
    yield started
    for beat in started:
        beat.close()


def sent(valkey: Server) -> list[dict[str, Any]]:
    """Messages that wait, oldest first."""
    with valkey.client() as client:
        return [json.loads(message) for message in reversed(client.lrange("celery", 0, -1))]


def slots(valkey: Server) -> Counter[tuple[str, str]]:
    return Counter((message["headers"]["beat_entry"], message["headers"]["beat_due"]) for message in sent(valkey))


def noted(valkey: Server) -> dict[str, list[int]]:
    with valkey.client(database=2) as locks:
        (key,) = locks.keys("*:slots")
        return {name: [*map(int, value.split(" "))] for name, value in locks.hgetall(key).items()}


def all_noted(valkey: Server) -> bool:
    return all(sent >= due for due, _, sent in noted(valkey).values())


def times(valkey: Server, entry: str) -> list[float]:
    """When the messages of an entry were due, in order."""
    return sorted(datetime.fromisoformat(due).timestamp() for name, due in slots(valkey) if name == entry)


@pytest.mark.prove
@pytest.mark.parametrize("end", ["killed", "stopped and continued"])
def test_no_slot_is_sent_twice_and_the_gap_is_short_when_the_leader_goes(
    beats: list[Beat], valkey: Server, end: str
) -> None:
    leader, standby = beats
    # Between sending a message and noting it, a leader that dies leaves its slot to be sent again.
    until(lambda: len(sent(valkey)) >= 3 and all_noted(valkey), "the leader sends", timeout=30)
    leader.send(signal.SIGKILL if end == "killed" else signal.SIGSTOP)
    gone_at = time.time()
    until(standby.leads, "the standby leads", timeout=20)
    assert time.time() - gone_at < TTL + TICK + SLACK
    before = len(sent(valkey))
    if end != "killed":
        leader.send(signal.SIGCONT)
    until(lambda: len(sent(valkey)) >= before + 4, "the heir sends", timeout=30)

    assert set(slots(valkey).values()) == {1}
    due = times(valkey, "every-two-seconds")
    assert max(later - earlier for earlier, later in pairwise(due)) < EVERY + TTL + TICK + SLACK


@pytest.mark.prove
def test_a_beat_that_ends_lets_the_other_lead_at_once(beats: list[Beat]) -> None:
    leader, standby = beats
    leader.send(signal.SIGTERM)

    until(standby.leads, "the standby leads", timeout=TICK + TTL + SLACK)
    # It has not waited until the lease of the other one ran out.
    assert "took_over=False" in standby.log()


@pytest.mark.prove
def test_an_entry_that_was_disabled_in_django_is_not_sent_at_once_and_a_one_off_entry_is_no_difference(
    in_a_database: dict[str, str], valkey: Server
) -> None:
    in_django(in_a_database, "make", "every-six-seconds", "6")
    in_django(in_a_database, "one_off", "every-two-seconds", "True")
    beats = [Beat(in_a_database, "tests.acceptance.django_app:Scheduler")]
    try:
        until(lambda: times(valkey, "every-two-seconds") and times(valkey, "every-six-seconds"), "both are sent")
        in_django(in_a_database, "enabled", "every-six-seconds", "False")
        off_at = time.time()
        until(lambda: "every-six-seconds" not in noted(valkey), "it is forgotten", timeout=30)
        beats.append(Beat(in_a_database, "tests.acceptance.django_app:Scheduler"))
        until(lambda: "beat.stands_by" in beats[1].log() and time.time() > off_at + 7, "its interval is over")
        assert "beat.differs" not in beats[1].log()
        before = times(valkey, "every-six-seconds")

        in_django(in_a_database, "enabled", "every-six-seconds", "True")
        on_at = time.time()
        beats[0].send(signal.SIGTERM)
        until(lambda: times(valkey, "every-six-seconds") != before, "it is sent again", timeout=30)

        assert beats[1].leads()
        assert time.time() > on_at + 5
        assert len(times(valkey, "every-two-seconds")) == 1
    finally:
        for beat in beats:
            beat.close()


# Red with libfaketime 0.9.10, where the sleep of a process whose clock is ahead is an invalid argument.
@pytest.mark.nightly
def test_the_heir_of_a_leader_whose_clock_is_ahead_is_not_silent(
    env: dict[str, str], valkey: Server, wall_clock: FakeClock
) -> None:
    wall_clock.step("+25")
    beats = [Beat({**env, **wall_clock.env})]
    try:
        until(lambda: len(times(valkey, "every-two-seconds")) > 1 and all_noted(valkey), "the one ahead sends")
        beats.append(Beat(env))
        until(beats[1].starts, "the other stands by")
        beats[0].send(signal.SIGKILL)
        until(beats[1].leads, "the heir leads")
        before = len(times(valkey, "every-two-seconds"))

        until(lambda: len(times(valkey, "every-two-seconds")) > before + 1, "the heir sends", timeout=10)
    finally:
        for beat in beats:
            beat.close()
