"""What operators see and no test from outside shows yet: take-overs, how often a page looks, a deaf waiter."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery import Celery
from redis import exceptions

from celery_singleton_lock.operations.watch import changes
from celery_singleton_lock.stores.inventory import LeftMark, Survey
from celery_singleton_lock.stores.records import Holder
from celery_singleton_lock.stores.redis.store import UNMARK, RedisStore
from celery_singleton_lock.web import application
from tests.browsing import Visitor
from tests.servers import Server

KEY = "singleton:v3:{shop:00}"

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def holder(token: str, expires_in: float, acquired: float = 0.0) -> Holder:
    return Holder(KEY, token, 1, NOW + timedelta(seconds=acquired), expires_in, task_id=token)


def survey(at: float, *holders: Holder, marks: tuple[LeftMark, ...] = (), waiters: int = 0) -> dict[str, Survey]:
    moment = round((NOW + timedelta(seconds=at)).timestamp() * 1_000_000)
    return {KEY: Survey(KEY, moment, 1, holders, marks, waiters)}


def told(before: dict[str, Survey], after: dict[str, Survey]) -> list[tuple[str, str | None]]:
    return [(change.event, change.task_id) for change in changes(before, after)]


def test_a_grant_after_the_deadline_of_the_one_before_is_a_take_over() -> None:
    before = survey(0, holder("a", 10))

    assert told(before, survey(12, holder("b", 30, acquired=11))) == [("taken_over", "b")]
    assert told(before, survey(9, holder("b", 30, acquired=8))) == [("released", "a"), ("acquired", "b")]


def test_who_goes_on_is_no_change() -> None:
    queued = (LeftMark("queued", "q", 10.0),)

    assert told(survey(0, holder("a", 10), marks=queued), survey(2, holder("a", 10), marks=queued)) == []


def test_a_cool_down_is_no_holder() -> None:
    quiet = (LeftMark("quiet", "q", 10.0),)

    assert told(survey(0, holder("a", 10)), survey(2, holder("~a", 10), marks=quiet)) == [("released", "a")]


def test_a_look_is_not_repeated_for_twenty_times_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    moment, looks = 0.0, []
    monkeypatch.setattr("celery_singleton_lock.web.site.clock", lambda: moment)

    class Slow:
        def __init__(self, app: Any) -> None: ...

        def rows(self) -> list[Any]:
            nonlocal moment
            moment += 0.1
            looks.append(moment)
            return []

    monkeypatch.setattr("celery_singleton_lock.web.site.Locks", Slow)
    visitor = Visitor(application(Celery("shop")))
    visitor.get("/locks.json")
    moment += 1.9
    visitor.get("/locks.json")
    assert len(looks) == 1
    moment += 0.2
    visitor.get("/locks.json")
    assert len(looks) == 2


def test_a_release_that_wakes_nobody_is_told(valkey: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    store = RedisStore(valkey.url, {})
    # In place of a release, a script that tells nobody.
    monkeypatch.setattr("celery_singleton_lock.stores.redis.store.RELEASE", UNMARK)

    with pytest.raises(exceptions.TimeoutError):
        store._try_out(f"{KEY}:deaf", 0.5)
    store.close()
