"""Beats of one process, on a real server: whose fence counts, whose schedule it is, and what was really sent."""

import logging
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from celery import Celery
from kombu.exceptions import OperationalError

from celery_singleton_lock import ConfigurationError, SingletonTask
from celery_singleton_lock.beat import SingletonSchedulerMixin
from celery_singleton_lock.settings import store_of
from tests.servers import FakeClock, Server, running
from tests.waiting import until

TTL = 2


class Beat(SingletonSchedulerMixin):
    """One that keeps its schedule in memory and counts what it sends."""

    def __init__(self, app: Celery) -> None:
        self.sent: list[str] = []
        self.publish: Callable[..., Any] = lambda *args, **kwargs: None
        super().__init__(app)
        self.merge_inplace(app.conf.beat_schedule)

    def send_task(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self.publish(name, *args, **kwargs)
        self.sent.append(name)

    def sends(self) -> bool:
        """It has sent something since it was asked last."""
        before = len(self.sent)
        self.tick()
        return len(self.sent) > before


def beat_of(url: str, *tasks: str, main: str = "shop", every: float = 0.5, **settings: Any) -> Beat:
    app = Celery(main, broker="memory://", set_as_current=False)
    schedule = {task: {"task": task, "schedule": timedelta(seconds=every)} for task in tasks}
    app.conf.update(singleton_lock_url=url, singleton_beat_ttl=TTL, beat_schedule=schedule, **settings)
    return Beat(app)


def slots_of(beat: Beat) -> dict[str, Any]:
    return store_of(beat.app).slots(beat._slots)


def test_an_heir_sends_although_the_clock_of_the_store_was_set_back(wall_clock: FakeClock) -> None:
    with running("valkey", env=wall_clock.env) as server:
        first, second = (beat_of(server.url, "collect") for _ in range(2))
        until(first.sends, "the first sends")
        first.close()
        wall_clock.step("-60")
        known = slots_of(first)["collect"]

        until(second.sends, "the second sends", timeout=5)

        assert slots_of(second)["collect"].fence > known.fence
        second.close()


def test_a_slot_that_was_sent_in_the_future_does_not_silence_an_heir(valkey: Server) -> None:
    first, second = (beat_of(valkey.url, "collect") for _ in range(2))
    until(first.sends, "the first sends")
    known = slots_of(first)["collect"]
    # As one does whose clock is ahead.
    ahead = 60_000_000
    assert store_of(first.app).claim_slot(
        first._slots, type(known)("collect", known.due + ahead, known.fence, known.sent + ahead)
    )
    first.close()

    until(second.sends, "the second sends", timeout=5)

    assert slots_of(second)["collect"].sent < time.time_ns() // 1000 + 1_000_000
    second.close()


def test_apps_of_one_main_are_told_apart_by_the_name_of_the_beat(valkey: Server) -> None:
    one, other = (beat_of(valkey.url, name, singleton_beat_name=name) for name in ("shop", "stock"))

    for beat in (one, other):
        until(beat.sends, "it sends")

    for beat in (one, other):
        beat.close()


def test_apps_of_two_mains_are_one_schedule_by_the_name_of_the_beat(valkey: Server) -> None:
    one, other = (beat_of(valkey.url, "collect", main=main, singleton_beat_name="ours") for main in ("shop", "stock"))
    until(one.sends, "one sends")

    other.tick()

    assert other._lease is None
    one.close()


@pytest.mark.parametrize("name", ["", 7, "x" * 101])
def test_a_name_that_cannot_be_is_refused(valkey: Server, name: Any) -> None:
    with pytest.raises(ConfigurationError, match="singleton_beat_name="):
        beat_of(valkey.url, "collect", singleton_beat_name=name).tick()


def test_a_standby_says_once_who_leads(valkey: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    leader, standby = (beat_of(valkey.url, "collect") for _ in range(2))
    until(leader.sends, "the leader sends")

    for _ in range(20):
        standby.tick()

    (said,) = [record.getMessage() for record in caplog.records if "beat.stands_by" in record.getMessage()]
    for words in ("key=", "holder=", "pid="):
        assert words in said
    assert "beat.differs" not in caplog.text
    leader.close()


def test_a_standby_with_another_schedule_is_warned_once(valkey: Server, caplog: pytest.LogCaptureFixture) -> None:
    leader, standby = beat_of(valkey.url, "sell"), beat_of(valkey.url, "count")
    until(leader.sends, "the leader sends")

    for _ in range(30):
        standby.tick()

    (said,) = [record for record in caplog.records if "beat.differs" in record.getMessage()]
    assert said.levelno == logging.WARNING
    for words in ("sell", "singleton_beat_name"):
        assert words in said.getMessage()
    leader.close()


def test_an_entry_that_went_before_the_present_leader_is_no_difference(
    valkey: Server, caplog: pytest.LogCaptureFixture
) -> None:
    former = beat_of(valkey.url, "renamed since")
    until(former.sends, "it sends")
    former.close()
    leader, standby = (beat_of(valkey.url, "collect") for _ in range(2))
    until(leader.sends, "the leader sends")

    for _ in range(30):
        standby.tick()

    assert "beat.differs" not in caplog.text
    leader.close()


def test_a_slot_that_could_not_be_published_is_not_noted_as_sent(
    valkey: Server, caplog: pytest.LogCaptureFixture
) -> None:
    def unpublished(*_: Any, **__: Any) -> None:
        raise OperationalError("the broker is away")

    leader, heir = (beat_of(valkey.url, "collect", every=2.0) for _ in range(2))
    leader.publish = unpublished
    until(lambda: leader.tick() is not None and "beat.unsent" in caplog.text, "it was not published")

    assert slots_of(leader)["collect"].sent == 0
    leader.close()
    until(heir.sends, "the heir sends it", timeout=5)
    heir.close()


def test_a_duplicate_that_is_refused_counts_as_sent(valkey: Server) -> None:
    beat = beat_of(valkey.url, "unique")

    @beat.app.task(base=SingletonTask, name="unique", lock_mode="until_executed", lock_on_conflict="raise")
    def unique() -> None: ...

    unique.delay()

    until(lambda: beat.tick() is not None and "unique" in slots_of(beat), "it is claimed")

    assert slots_of(beat)["unique"].sent
    beat.close()


def test_a_beat_that_is_refused_says_so_ever_more_rarely_until_it_leads(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(beat: Beat, seconds: int) -> list[int]:
        """At which of so many seconds it is told, by a clock that goes on by a tick's pause."""
        begun, told = now[0], []
        while now[0] < begun + seconds:
            caplog.clear()
            now[0] += beat.tick()
            told += [round(now[0] - begun)] * caplog.text.count("beat.unanswered")
        return told

    now = [1000.0]
    monkeypatch.setattr("celery_singleton_lock.beat.clock", lambda: now[0])
    with running("valkey") as server, server.client() as client:
        client.config_set("requirepass", "secret")
        beat = beat_of(server.url)
        assert told(beat, 300) == [1, 3, 7, 15, 31, 63, 123, 183, 243]

        client.config_set("requirepass", "")
        assert told(beat, 1) == []
        client.config_set("requirepass", "secret")
        client.client_kill_filter(_type="normal", skipme=True)
        beat._give_up()
        assert told(beat, 2) == [1]
