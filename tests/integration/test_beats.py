"""Beats of one process, on a real server: whose fence counts, whose schedule it is, and what was really sent."""

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.beat import PersistentScheduler, Scheduler, SchedulingError
from celery.schedules import BaseSchedule, crontab, schedstate, schedule, solar
from kombu.exceptions import OperationalError

from celery_singleton_lock import ConfigurationError, SingletonTask
from celery_singleton_lock.beat import SingletonSchedulerMixin
from celery_singleton_lock.definition.keys import beat_key_of
from celery_singleton_lock.definition.settings import store_of
from tests.servers import Server, running
from tests.waiting import until

TTL = 10


class Plain(Scheduler):
    def __init__(self, app: Celery, **kwargs: Any) -> None:
        self.sent: list[str] = []
        self.publish: Callable[..., Any] = lambda *args, **kwargs: None
        super().__init__(app, **kwargs)

    def send_task(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self.publish(name, *args, **kwargs)
        self.sent.append(name)

    def sends(self) -> bool:
        before = len(self.sent)
        self.tick()
        return len(self.sent) > before


class Beat(SingletonSchedulerMixin, Plain):
    """Of several."""


def beat_of(url: str, *tasks: str, main: str = "shop", every: float = 0.5, **settings: Any) -> Beat:
    app = Celery(main, broker="memory://", set_as_current=False)
    schedule = {task: {"task": task, "schedule": timedelta(seconds=every)} for task in tasks}
    app.conf.update(singleton_lock_url=url, singleton_beat_ttl=TTL, beat_schedule=schedule, **settings)
    return Beat(app)


def slots_of(beat: Beat, server: Server) -> dict[str, Any]:
    with server.client() as client:
        keys = list(client.scan_iter("*:slots"))
    return store_of(beat.app).slots(*keys) if keys else {}


def test_an_heir_of_a_beat_whose_clocks_were_an_hour_ahead_begins_the_interval_anew(valkey: Server) -> None:
    first, second = (beat_of(valkey.url, "collect") for _ in range(2))
    until(first.sends, "the first sends")
    first.close()
    recorded, hour = slots_of(first, valkey)["collect"], 3_600_000_000
    # The fence is that of a store whose clock was set back afterwards.
    ahead = replace(recorded, due=recorded.due + hour, sent=recorded.sent + hour, fence=recorded.fence + hour)
    store_of(first.app).change_slot(f"{beat_key_of(first.app)}:slots", "note", ahead)

    until(second.sends, "the second sends", timeout=60)

    last = slots_of(second, valkey)["collect"]
    assert last.sent < ahead.sent
    assert last.fence > ahead.fence
    second.close()


def test_apps_of_one_main_are_told_apart_by_the_name_of_the_beat(valkey: Server) -> None:
    one, other = (beat_of(valkey.url, name, singleton_beat_name=name) for name in ("shop", "stock"))

    for beat in (one, other):
        until(beat.sends, "it sends")

    for beat in (one, other):
        beat.close()


@pytest.mark.parametrize("name", ["", 7, "x" * 101, "\ud800"])
def test_a_name_that_cannot_be_is_refused(valkey: Server, name: Any) -> None:
    with pytest.raises(ConfigurationError, match="singleton_beat_name="):
        beat_of(valkey.url, "collect", singleton_beat_name=name).tick()


@pytest.mark.parametrize(
    ("theirs", "ours", "told"),
    [
        (["sell"], ["count"], ["only the leader has sell", "only this beat has count", "singleton_beat_name"]),
        (["sell"], ["sell", "count"], ["only the leader has nothing", "only this beat has count"]),
        ([], ["count"], ["only this beat has count"]),
        (["sell", "count"], ["sell"], ["only the leader has count", "only this beat has nothing"]),
        (["sell"], ["sell"], []),
    ],
)
def test_a_standby_with_another_schedule_is_warned_once(
    valkey: Server, caplog: pytest.LogCaptureFixture, theirs: list[str], ours: list[str], told: list[str]
) -> None:
    leader, standby = beat_of(valkey.url, *theirs), beat_of(valkey.url, *ours)
    leader.tick()
    # Messages that were sent before it began to lead do not count.
    until(lambda: leader.tick() is not None and (leader.sent or not theirs), "the leader sends")

    for _ in range(30):
        standby.tick()

    said = [record for record in caplog.records if "beat.differs" in record.getMessage()]
    assert [record.levelno for record in said] == [logging.WARNING] * bool(told)
    for words in told:
        assert words in said[0].getMessage()
    leader.close()


def test_a_slot_that_could_not_be_published_is_sent_by_the_heir_at_once_with_the_same_id(
    valkey: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    every, told = 4.0, list[tuple[str, str]]()

    def publish(*_: Any, task_id: str, headers: dict[str, str], **__: Any) -> None:
        told.append((task_id, headers["beat_due"]))
        if len(told) == 2:
            raise OperationalError("the broker is away")

    # Celery reads the clock before the message is published, and we do so afterwards.
    monkeypatch.setattr(Celery, "now", lambda app: datetime.now(app.timezone) - timedelta(milliseconds=5))
    leader = beat_of(valkey.url, "collect", every=every)
    leader.publish = publish
    until(lambda: leader.tick() is not None and "beat.publish_failed" in caplog.text, "it was not published")
    slot = slots_of(leader, valkey)["collect"]
    assert slot.sent < slot.due
    leader.close()

    # As in a container: nothing but the store knows when the entry began.
    heir = beat_of(valkey.url, "collect", every=every)
    heir.publish = publish
    until(heir.sends, "the heir sends it")
    assert slots_of(heir, valkey)["collect"].due == slot.due
    assert told[2] == told[1] != told[0]
    heir.close()


def test_an_entry_that_was_put_back_waits_for_its_interval(valkey: Server) -> None:
    every = 2.0
    for name in ("collect", "other"):
        beat = beat_of(valkey.url, name, every=every)
        until(beat.sends, "it sends")
        beat.close()

    began_at = time.monotonic()
    beat = beat_of(valkey.url, "collect", "other", every=every)
    until(lambda: beat.sends() and "collect" in beat.sent, "it is sent again")
    beat.close()
    assert time.monotonic() - began_at > every - 0.5


def test_a_schedule_that_changes_under_its_leader_is_followed(valkey: Server) -> None:
    beat = beat_of(valkey.url, "old")
    until(beat.sends, "it sends")
    del beat.schedule["old"]
    beat.add(name="new", task="new", schedule=timedelta(seconds=1))

    until(lambda: beat.sends() and "new" in beat.sent, "it sends the new one")
    assert {"old", "new"} & slots_of(beat, valkey).keys() == {"new"}
    beat.close()


class Clocked(BaseSchedule):
    """One moment, as django-celery-beat and sqlalchemy-celery-beat have it."""

    def __init__(self, clocked_time: datetime, **kwargs: Any) -> None:
        self.clocked_time = clocked_time
        super().__init__(**kwargs)

    def remaining_estimate(self, last_run_at: datetime) -> timedelta:
        return self.clocked_time - self.now()

    def is_due(self, last_run_at: datetime) -> Any:
        left = self.remaining_estimate(last_run_at).total_seconds()
        return schedstate(is_due=left <= 0, next=max(left, 3600.0))


def test_an_entry_whose_one_moment_is_over_when_a_beat_sees_it_is_sent_once(
    valkey: Server, caplog: pytest.LogCaptureFixture
) -> None:
    moment = datetime.now(UTC) - timedelta(minutes=1)

    def beat_with_one_moment() -> Beat:
        beat = beat_of(valkey.url, "collect", every=3600)
        beat.add(name="once", task="once", schedule=Clocked(moment, app=beat.app))
        return beat

    beat = beat_with_one_moment()
    until(lambda: beat.sends() or beat.sent, "it sends it")
    beat.close()
    heir = beat_with_one_moment()
    with caplog.at_level(logging.INFO):
        until(lambda: heir.tick() and "beat.sent" in caplog.text, "the heir finds that it was sent")
    heir.close()

    assert (beat.sent, heir.sent) == (["once"], [])


def test_an_entry_of_one_moment_that_has_run_is_not_sent_again_once_the_store_has_lost_its_slot(valkey: Server) -> None:
    now = datetime.now(UTC)
    beat = beat_of(valkey.url)
    # As the scheduler's file has it.
    known = {"last_run_at": now - timedelta(seconds=50), "total_run_count": 1}
    beat.add(name="once", task="once", schedule=Clocked(now - timedelta(minutes=1), app=beat.app), **known)

    for _ in range(3):
        beat.tick()

    assert beat.sent == []
    beat.close()


def test_a_crontab_that_is_new_in_the_hour_that_comes_twice_is_not_sent_at_once(
    valkey: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    second_time = datetime(2026, 10, 25, 1, 31, tzinfo=UTC)
    monkeypatch.setattr(Celery, "now", lambda app: second_time.astimezone(app.timezone))
    monkeypatch.setattr(time, "time_ns", lambda: int(second_time.timestamp()) * 1_000_000_000)
    beat = beat_of(valkey.url, timezone="Europe/Berlin")
    beat.add(name="nightly", task="nightly", schedule=crontab(hour="2", minute="45", app=beat.app))

    for _ in range(3):
        beat.tick()

    assert beat.sent == []
    beat.close()


def test_a_crontab_counts_in_the_zone_of_its_app(valkey: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    midnight = datetime(2026, 7, 2, tzinfo=UTC)
    now = midnight - timedelta(seconds=30)
    monkeypatch.setattr(Celery, "now", lambda app: now.astimezone(app.timezone))
    monkeypatch.setattr(time, "time_ns", lambda: int(now.timestamp()) * 1_000_000_000)
    beat = beat_of(valkey.url, timezone="Asia/Tokyo")
    entry = {"schedule": crontab(hour="9", minute="0", app=beat.app), "task": "daily"}
    beat.add(name="daily", **entry)

    assert not beat.sends()
    now = midnight + timedelta(seconds=1)
    assert beat.sends()

    assert slots_of(beat, valkey)["daily"].due == midnight.timestamp() * 1_000_000
    assert beat.schedule["daily"].is_due() == schedstate(is_due=False, next=24 * 3600 - 1)
    beat.close()


def test_beats_that_live_shorter_than_an_interval_send_its_entry(valkey: Server) -> None:
    every, sent = 3.0, list[str]()

    def lives_shortly() -> bool:
        beat = beat_of(valkey.url, "collect", every=every)
        until_then = time.monotonic() + every / 6
        while time.monotonic() < until_then:
            beat.tick()
        beat.close()
        sent.extend(beat.sent)
        return bool(sent)

    until(lives_shortly, "one of them sends it", timeout=40)


def test_what_a_scheduler_has_sent_without_us_counts(valkey: Server, tmp_path: Path) -> None:
    class Filed(Plain, PersistentScheduler):
        """One with a file."""

    class OfSeveral(SingletonSchedulerMixin, Filed):
        """One of several."""

    def runs(scheduler: type[Filed], times: int) -> Any:
        app = beat_of(valkey.url, "collect", every=every).app
        one = scheduler(app, schedule_filename=str(tmp_path / "schedule"))
        until(lambda: one.tick() is not None and len(one.sent) >= times, "it sends")
        return one

    every = 2.0
    runs(OfSeveral, 1).close()
    runs(Filed, 2).close()
    began_at = time.monotonic()
    runs(OfSeveral, 1).close()
    assert time.monotonic() - began_at > every - 0.5


def test_a_slot_is_sent_late_if_the_store_refused_its_leader_for_a_while(caplog: pytest.LogCaptureFixture) -> None:
    with running("valkey") as server, server.client() as client:
        beat, told = beat_of(server.url, "collect", every=2.0), list[str]()
        beat.app.conf.singleton_beat_ttl = 30
        beat.publish = lambda *_, headers, **__: told.append(headers["beat_due"])
        until(beat.sends, "it sends")
        client.config_set("requirepass", "secret")
        client.client_kill_filter(_type="normal", skipme=True)
        until(lambda: beat.tick() is not None and "beat.unanswered entry=collect" in caplog.text, "it is due")
        client.config_set("requirepass", "")

        until(beat.sends, "it sends", timeout=40)
        assert f"due={told[1]}" in caplog.text
        beat.close()


def test_a_leader_that_has_lost_its_lease_sends_no_slot_that_its_heir_has_sent(
    valkey: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "celery_singleton_lock")
    leader, heir = (beat_of(valkey.url, "collect") for _ in range(2))
    # With a long ttl it does not learn of its loss soon.
    leader.app.conf.singleton_beat_ttl = 60
    until(leader.sends, "it leads")
    sent = len(leader.sent)
    with valkey.client() as client:
        client.delete(*client.keys("*celery.beat*}"))
    until(heir.sends, "its heir sends")

    until(lambda: leader.tick() is not None and "beat.sent entry=collect" in caplog.text, "it is told")
    assert len(leader.sent) == sent
    for beat in (leader, heir):
        beat.close()


def test_a_slot_of_which_nobody_can_record_that_it_was_sent_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with running("valkey") as server, server.client() as client:
        beat = beat_of(server.url, "collect")
        beat.publish = lambda *_, **__: client.config_set("maxmemory", 1)
        until(lambda: beat.tick() is not None and "beat.slot_unrecorded entry=collect" in caplog.text, "it is told")
        client.config_set("maxmemory", 0)
        beat.close()


class Tenants(Plain):
    """One that sends each entry once for each tenant."""

    def apply_entry(self, entry: Any, producer: Any = None) -> None:
        for _ in range(3):
            with suppress(SchedulingError):
                self.apply_async(entry, producer=producer, advance=False)


class OfTenants(SingletonSchedulerMixin, Tenants):
    """As docs/how-to/several-beats.md mixes it."""


@pytest.mark.parametrize("fails", [0, 2])
def test_each_of_several_messages_of_a_slot_has_an_id_of_its_own_and_the_same_in_an_heir(
    valkey: Server, caplog: pytest.LogCaptureFixture, fails: int
) -> None:
    told = list[str]()

    def publish(*_: Any, task_id: str, **__: Any) -> None:
        told.append(task_id)
        if is_fatal and len(told) - 1 == fails:
            raise OperationalError("the broker is away")

    app, is_fatal = beat_of(valkey.url, "collect", every=1.0).app, True
    leader, heir = OfTenants(app), OfTenants(app)
    leader.publish = heir.publish = publish
    until(lambda: leader.tick() is not None and "beat.publish_failed" in caplog.text, "one of them fails")
    assert "1 of 3 messages" in caplog.text
    leader.close()
    assert len(set(told)) == 3

    is_fatal = False
    until(heir.sends, "the heir sends")
    assert told[3:] == told[:3]
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
