"""Beats of one process, on a real server: whose fence counts, whose schedule it is, and what was really sent."""

import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery import Celery
from celery.schedules import crontab, schedule, solar
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


def slots_key(server: Server) -> str:
    """Of the one schedule that there is."""
    with server.client() as client:
        (key,) = client.scan_iter("*:slots")
    return str(key)


def slots_of(beat: Beat, server: Server) -> dict[str, Any]:
    with server.client() as client:
        if not [*client.scan_iter("*:slots")]:
            return {}
    return store_of(beat.app).slots(slots_key(server))


def test_an_heir_sends_although_the_clock_of_the_store_was_set_back(wall_clock: FakeClock) -> None:
    with running("valkey", env=wall_clock.env) as server:
        first, second = (beat_of(server.url, "collect") for _ in range(2))
        until(first.sends, "the first sends")
        first.close()
        wall_clock.step("-60")
        known = slots_of(first, server)["collect"]

        until(second.sends, "the second sends", timeout=5)

        assert slots_of(second, server)["collect"].fence > known.fence
        second.close()


def test_apps_of_one_main_are_told_apart_by_the_name_of_the_beat(valkey: Server) -> None:
    one, other = (beat_of(valkey.url, name, singleton_beat_name=name) for name in ("shop", "stock"))

    for beat in (one, other):
        until(beat.sends, "it sends")

    for beat in (one, other):
        beat.close()


@pytest.mark.parametrize("name", ["", 7, "x" * 101])
def test_a_name_that_cannot_be_is_refused(valkey: Server, name: Any) -> None:
    with pytest.raises(ConfigurationError, match="singleton_beat_name="):
        beat_of(valkey.url, "collect", singleton_beat_name=name).tick()


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


def test_a_slot_that_could_not_be_published_is_not_noted_as_sent(
    valkey: Server, caplog: pytest.LogCaptureFixture
) -> None:
    def unpublished(*_: Any, **__: Any) -> None:
        raise OperationalError("the broker is away")

    leader, heir = (beat_of(valkey.url, "collect", every=2.0) for _ in range(2))
    leader.publish = unpublished
    until(lambda: leader.tick() is not None and "beat.publish_failed" in caplog.text, "it was not published")

    assert slots_of(leader, valkey)["collect"].sent == 0
    leader.close()
    until(heir.sends, "the heir sends it", timeout=5)
    heir.close()


def test_a_duplicate_that_is_refused_counts_as_sent(valkey: Server) -> None:
    beat = beat_of(valkey.url, "unique")

    @beat.app.task(base=SingletonTask, name="unique", lock_mode="until_executed", lock_on_conflict="raise")
    def unique() -> None: ...

    unique.delay()

    until(lambda: beat.tick() is not None and "unique" in slots_of(beat, valkey), "it is claimed")

    assert slots_of(beat, valkey)["unique"].sent
    beat.close()


LAST = datetime(2026, 3, 1, 11, 58, 30, tzinfo=UTC)


@pytest.mark.parametrize(
    ("when", "due"),
    [
        (schedule(timedelta(seconds=90)), "2026-03-01T12:00:00"),
        (crontab(minute="0"), "2026-03-01T12:00:00"),
        (crontab(minute="30", hour="4"), "2026-03-02T04:30:00"),
        (solar("sunset", 52.5, 13.4), "2026-03-01T16:"),
    ],
    ids=["interval", "hourly", "daily", "sunset"],
)
def test_a_message_says_when_its_entry_was_due(valkey: Server, when: Any, due: str) -> None:
    beat, told = beat_of(valkey.url, "collect"), list[str]()
    beat.publish = lambda *_, headers, **__: told.append(headers["beat_due"])
    beat.schedule["collect"].schedule = when
    when.app = beat.app
    beat.schedule["collect"].last_run_at = LAST

    until(beat.sends, "it sends")

    assert told[0].startswith(due)
    beat.close()


def test_a_beat_that_is_refused_says_so_once_in_a_while_until_it_leads(caplog: pytest.LogCaptureFixture) -> None:
    def told(beat: Beat) -> int:
        """How often in as many looks as a moment has."""
        caplog.clear()
        for _ in range(20):
            beat.tick()
        return caplog.text.count("beat.unanswered")

    with running("valkey") as server, server.client() as client:
        client.config_set("requirepass", "secret")
        beat = beat_of(server.url)
        assert (told(beat), told(beat)) == (1, 0)

        client.config_set("requirepass", "")
        assert told(beat) == 0
        beat.close()
        client.config_set("requirepass", "secret")
        client.client_kill_filter(_type="normal", skipme=True)
        assert told(beat) == 1


@pytest.mark.parametrize(("settings", "ttl"), [({}, 30), ({"singleton_lock_ttl": 7}, 7)])
def test_a_ttl_that_is_not_given_is_that_of_the_locks(valkey: Server, settings: dict[str, Any], ttl: float) -> None:
    beat = beat_of(valkey.url, "collect")
    beat.app.conf.update(settings, singleton_beat_ttl=None)

    beat.tick()

    with valkey.client() as client:
        (key,) = [key for key in client.scan_iter("*celery.beat*") if not key.endswith(":slots")]
    (holder,) = store_of(beat.app).holders(key)
    assert ttl - 5 < holder.expires_in <= ttl
    beat.close()
