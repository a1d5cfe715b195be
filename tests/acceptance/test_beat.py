"""Several beats, of which one leads: no slot is sent twice, and none is left out when the leader goes."""

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.servers import Server
from tests.waiting import until
from tests.workers import Process

EVERY = 2.0
TTL = 3.0
TICK = 1.0
OURS, OF_DJANGO = "celery_singleton_lock.beat:SingletonScheduler", "tests.acceptance.django_app:Scheduler"
SLACK = 10.0


class Beat(Process):
    def __init__(self, scheduler: str) -> None:
        schedule = tempfile.mkdtemp(prefix="beat-") + "/schedule"
        options = ("--scheduler", scheduler, "--schedule", schedule, "--pidfile", "")
        super().__init__("tests.acceptance.beat_app", {}, "beat", *options)

    def starts(self) -> bool:
        return self._has_said("beat: Starting")

    def leads(self) -> bool:
        return self._has_said("beat.leads")

    def _has_said(self, words: str) -> bool:
        assert self._process.poll() is None, self.log()
        return words in self.log()


@pytest.fixture
def start() -> Iterator[Callable[..., Beat]]:
    with ExitStack() as ends:
        yield lambda *arguments: ends.enter_context(closing(Beat(*arguments)))


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_DATABASE", str(tmp_path / "db.sqlite3"))


def in_django(what: str, name: str, value: str) -> None:
    subprocess.run([sys.executable, "-m", "tests.acceptance.django_app", what, name, value], check=True)


def sent(valkey: Server) -> list[dict[str, Any]]:
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
    return sorted(datetime.fromisoformat(due).timestamp() for name, due in slots(valkey) if name == entry)


@pytest.mark.prove
@pytest.mark.usefixtures("database")
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM], ids=lambda end: end.name)
@pytest.mark.parametrize("scheduler", [OURS, OF_DJANGO, "tests.acceptance.sqlalchemy_beat:Scheduler"])
def test_no_slot_is_sent_twice_and_the_gap_is_short_when_the_leader_goes(
    start: Callable[..., Beat], valkey: Server, scheduler: str, end: signal.Signals
) -> None:
    if scheduler == OF_DJANGO:
        in_django("make", "every-two-seconds", "2")
    leader = start(scheduler)
    until(leader.leads, "the first leads")
    standby = start(scheduler)
    until(standby.starts, "the second stands by")
    # A leader that dies between sending a message and noting it leaves its slot to be sent again.
    until(lambda: len(sent(valkey)) >= 3 and all_noted(valkey), "the leader sends", timeout=30)
    leader.send(end)
    gone_at = time.time()
    until(standby.leads, "the standby leads", timeout=40)
    assert time.time() - gone_at < TTL + TICK + SLACK
    # A leader that ends in order gives its lease back, so nobody waits until that has run out.
    assert ("took_over=False" in standby.log()) == (end is signal.SIGTERM)
    before = len(sent(valkey))
    if end is signal.SIGSTOP:
        leader.send(signal.SIGCONT)
    until(lambda: len(sent(valkey)) >= before + 4, "the heir sends", timeout=30)

    assert set(slots(valkey).values()) == {1}
    due = times(valkey, "every-two-seconds")
    assert max(later - earlier for earlier, later in pairwise(due)) < EVERY + TTL + TICK + SLACK


@pytest.mark.prove
@pytest.mark.usefixtures("database")
def test_an_entry_that_was_disabled_in_django_is_not_sent_at_once_and_a_one_off_entry_is_no_difference(
    start: Callable[..., Beat], valkey: Server
) -> None:
    for entry, every in (("every-two-seconds", "2"), ("every-six-seconds", "6")):
        in_django("make", entry, every)
    in_django("one_off", "every-two-seconds", "True")
    leader = start(OF_DJANGO)
    until(lambda: times(valkey, "every-two-seconds") and times(valkey, "every-six-seconds"), "both are sent")
    in_django("enabled", "every-six-seconds", "False")
    off_at = time.time()
    until(lambda: "every-six-seconds" not in noted(valkey), "it is forgotten", timeout=30)
    standby = start(OF_DJANGO)
    until(lambda: "beat.stands_by" in standby.log() and time.time() > off_at + 7, "its interval is over")
    assert "beat.differs" not in standby.log()
    before = times(valkey, "every-six-seconds")

    # Before its process begins: on a busy machine a beat sees the change long before that process has ended.
    on_at = time.time()
    in_django("enabled", "every-six-seconds", "True")
    leader.send(signal.SIGTERM)
    until(lambda: times(valkey, "every-six-seconds") != before, "it is sent again", timeout=30)

    assert standby.leads()
    assert time.time() > on_at + 5
    assert len(times(valkey, "every-two-seconds")) == 1
