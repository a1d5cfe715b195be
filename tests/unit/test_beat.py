"""When an entry was due, as the beat tells it."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery import Celery
from celery.beat import ScheduleEntry
from celery.schedules import crontab, schedule, solar

from celery_singleton_lock import ConfigurationError, StoreError
from celery_singleton_lock.beat import SingletonSchedulerMixin, due_of
from celery_singleton_lock.settings import store_of

LAST = datetime(2026, 3, 1, 11, 58, 30, tzinfo=UTC)


@pytest.fixture
def app() -> Celery:
    return Celery("beat", broker="memory://", set_as_current=False)


@pytest.mark.parametrize(
    ("when", "due"),
    [
        (schedule(timedelta(seconds=90)), datetime(2026, 3, 1, 12, 0, tzinfo=UTC)),
        (crontab(minute="0"), datetime(2026, 3, 1, 12, 0, tzinfo=UTC)),
        (crontab(minute="30", hour="4"), datetime(2026, 3, 2, 4, 30, tzinfo=UTC)),
    ],
)
def test_the_due_time_follows_from_the_last_run(app: Celery, when: Any, due: datetime) -> None:
    when.app = app
    entry = ScheduleEntry(name="e", task="t", schedule=when, last_run_at=LAST, app=app)

    assert due_of(entry) == due
    assert due_of(entry) == due_of(entry)


def test_a_solar_entry_is_due_at_the_event(app: Celery) -> None:
    when = solar("sunset", 52.5, 13.4, app=app)
    entry = ScheduleEntry(name="e", task="t", schedule=when, last_run_at=LAST, app=app)

    assert LAST < due_of(entry) < LAST + timedelta(days=1)
    # The schedule says how long it is until then; the clock that goes on meanwhile must not show.
    assert len({due_of(entry) for _ in range(500)}) == 1


def test_who_could_not_read_what_was_sent_does_not_lead(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    app.conf.singleton_lock_url = "memory://beat"
    backend = store_of(app)
    scheduler = SingletonSchedulerMixin(app)
    with monkeypatch.context() as broken:
        broken.setattr(backend, "slots", unanswered)
        assert scheduler.tick() > 0
        assert backend.holders(scheduler._key) == []

    scheduler.tick()
    assert len(backend.holders(scheduler._key)) == 1
    scheduler.close()
    assert backend.holders(scheduler._key) == []


@pytest.mark.parametrize("value", [0, False, "", "30", -1])
def test_a_ttl_that_is_no_duration_is_refused(app: Celery, value: Any) -> None:
    app.conf.update(singleton_lock_url="memory://ttl", singleton_beat_ttl=value)

    with pytest.raises(ConfigurationError, match=f"^singleton_beat_ttl={value!r} is not allowed"):
        _ = SingletonSchedulerMixin(app)._ttl


@pytest.mark.parametrize(("settings", "ttl"), [({}, 30), ({"singleton_beat_ttl": None, "singleton_lock_ttl": 7}, 7)])
def test_a_ttl_that_is_not_given_is_that_of_the_locks(app: Celery, settings: dict[str, Any], ttl: float) -> None:
    app.conf.update(settings)

    assert SingletonSchedulerMixin(app)._ttl == ttl


def unanswered(_: str) -> Any:
    raise StoreError("memory://beat", "no reply")
