"""A `__call__` before ours that catches the end of a run and tries again: a second run, under a lease of its own."""

import json
from base64 import b64encode
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from uuid import UUID

import pytest
from celery import Celery, states, uuid

from celery_singleton_lock import ConfigurationError, LockHeld, SingletonTask
from celery_singleton_lock.leases.lease import Lease, new_token
from celery_singleton_lock.options import OnConflict
from celery_singleton_lock.runs.message import DELIVERY, HEADER
from celery_singleton_lock.settings import store_of
from celery_singleton_lock.stores.records import Claim, Facts
from tests.servers import Server
from tests.tracing import tracer_of


class TriesAgain(SingletonTask):
    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except Exception:  # noqa: BLE001 (as users write it)
            return super().__call__(*args, **kwargs)


class RunsTheBodyItself(SingletonTask):
    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except OSError:
            return self.run(*args, **kwargs)


@pytest.fixture
def app(server: Server) -> Iterator[Celery]:
    app = Celery("again", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(singleton_lock_url=server.url, singleton_lock_ttl=5, task_default_queue=uuid())
    yield app
    app.close()


def traced(task: Any, **headers: Any) -> Any:
    task_id = uuid()
    return tracer_of(task)(task_id, (), {}, {"id": task_id, "args": (), "kwargs": {}, **headers}).info


def keys(server: Server) -> list[Any]:
    with server.client() as client:
        return list(client.scan_iter("*"))


@pytest.mark.parametrize(
    "delivery",
    [{DELIVERY: ("its-token",)}, {"delivery_info": {"redelivered": True}}],
    ids=["from a worker", "delivered again"],
)
def test_the_second_body_runs_under_a_lease_of_its_own(app: Celery, server: Server, delivery: Any) -> None:
    leases: list[Lease] = []

    @app.task(base=TriesAgain, bind=True)
    def body(self: Any) -> str:
        assert self.lock.held
        assert len(self.lock_holders()) == 1
        leases.append(self.lock)
        if len(leases) == 1:
            raise OSError("the first time")
        return "done"

    assert traced(body, **delivery) is None

    first, second = leases
    assert first.token != second.token
    assert second.fence > first.fence
    assert [key for key in keys(server) if ":done:" not in key] == []


@pytest.mark.parametrize("policy", ["raise", "skip", "reschedule", "rerun", "replace"])
def test_a_call_that_finds_its_key_held_does_not_run_at_the_second_try(app: Celery, policy: OnConflict) -> None:
    bodies, queue = [], app.conf.task_default_queue

    @app.task(base=TriesAgain, lock_on_conflict=policy, lock_wait_timeout=2)
    def body() -> None:
        bodies.append(1)

    holder = Lease(store_of(app), Claim(body.lock_key_for(), new_token(), 30, facts=Facts(task_id="the-holder")))
    assert holder.acquire() is None
    outcome = traced(body, delivery_info={"exchange": "", "routing_key": queue})
    holder.release()

    assert bodies == []
    ends = {"raise": states.FAILURE, "skip": states.IGNORED}
    assert outcome.state == ends.get(policy, states.RETRY)
    if policy not in ends:
        with app.connection_for_read() as connection:
            assert connection.default_channel.queue_declare(queue, passive=True).message_count == 1


def test_a_second_try_that_its_own_cool_down_refuses_ends_there(app: Celery) -> None:
    bodies, queue = [], app.conf.task_default_queue

    @app.task(base=TriesAgain, lock_min_hold=60)
    def body() -> None:
        bodies.append(1)
        raise OSError

    assert traced(body, delivery_info={"exchange": "", "routing_key": queue}).state == states.IGNORED

    assert bodies == [1]
    with app.connection_for_read() as connection:
        assert connection.default_channel.queue_declare(queue).message_count == 0


class TriesAgainCarefully(SingletonTask):
    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except OSError:
            return super().__call__(*args, **kwargs, careful=True)


@pytest.mark.parametrize(
    ("base", "bodies"), [(TriesAgain, [(2, False), (2, False)]), (TriesAgainCarefully, [(2, False), (1, True)])]
)
def test_the_second_try_has_the_merged_arguments_unless_it_is_given_others(app: Celery, base: Any, bodies: Any) -> None:
    ran = []

    @app.task(base=base, lock_key=(), lock_on_conflict="rerun")
    def body(number: int, careful: bool = False) -> None:
        ran.append((number, careful))
        raise OSError

    store, key = store_of(app), body.lock_key_for(0)
    newest = json.dumps(["application/json", "utf-8", b64encode(b"[[2], {}]").decode()])
    for published, task_id, arguments in ((1, "first", ""), (2, "newer", newest)):
        claim = Claim(key, new_token(), 30, facts=Facts(task_id=task_id, published=published))
        assert store.succeed(claim, "rerun", body.name, arguments, 60) is not None
    notes = {"key": key, "task_id": "first", "published": 1, "asked": True}
    request = {"id": "first", "args": (1,), "kwargs": {}, "headers": {HEADER: notes}}

    assert isinstance(tracer_of(body)("first", (1,), {}, request).info.retval, OSError)

    assert ran == bodies


def test_a_marker_that_the_first_try_has_left_says_at_the_end_that_the_result_is_stored(
    app: Celery, server: Server
) -> None:
    bodies = []

    @app.task(base=TriesAgain)
    def body() -> None:
        bodies.append(1)
        raise OSError

    assert traced(body, delivery_info={"redelivered": True}).state == states.FAILURE

    assert bodies == [1, 1]
    (marker,) = keys(server)
    with server.client() as client:
        assert "stored" in str(client.get(marker))


def test_a_run_keeps_none_of_the_tries_before_it_that_have_left_nothing(app: Celery) -> None:
    runs = []

    class Patient(SingletonTask):
        abstract = True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            for _ in range(3):
                with suppress(LockHeld):
                    super().__call__(*args, **kwargs)
            runs.append(self.request.lock_run)

    @app.task(base=Patient, lock_on_conflict="raise")
    def body() -> None: ...

    holder = Lease(store_of(app), Claim(body.lock_key_for(), new_token(), 30, facts=Facts(task_id="the-holder")))
    assert holder.acquire() is None
    assert traced(body) is None
    holder.release()

    (last,) = runs
    assert last.before is None


def test_a_map_in_the_body_of_an_item_leaves_its_lease_alone(app: Celery) -> None:
    held = []

    @app.task(base=SingletonTask, bind=True)
    def body(self: Any, depth: int) -> None:
        if depth:
            self.map([depth - 1]).apply()
        held.append((self.lock.held, len(self.lock_holders(depth))))

    body.map([2]).apply().get()

    assert held == [(True, 1)] * 3


def test_a_hook_that_calls_its_task_goes_without_a_lock(app: Celery) -> None:
    bodies = []

    class CallsItselfAfterwards(SingletonTask):
        abstract = True

        def on_success(self, *_: Any) -> None:
            held = Lease(store_of(app), Claim(self.lock_key_for(), new_token(), 30, facts=Facts(task_id="another")))
            assert held.acquire() is None
            self()
            held.release()

    @app.task(base=CallsItselfAfterwards)
    def body() -> None:
        bodies.append(1)

    assert traced(body) is None
    assert bodies == [1, 1]


def test_a_retry_is_known_by_an_id_that_is_no_text(app: Celery) -> None:
    runs = []

    # An older Celery keeps results by ids that are text only.
    @app.task(base=SingletonTask, bind=True, ignore_result=True)
    def body(self: Any) -> None:
        self.retry(throw=False, countdown=60)
        runs.append(self.request.lock_run)

    task_id = UUID(uuid())
    tracer_of(body)(task_id, (), {}, {"id": task_id, "args": (), "kwargs": {}})

    (run,) = runs
    assert run.retry_key == run.key


def test_a_second_body_that_leads_past_the_lock_fails_before_it_begins(app: Celery) -> None:
    bodies = []

    @app.task(base=RunsTheBodyItself)
    def body() -> None:
        bodies.append(1)
        raise OSError

    assert isinstance(traced(body).retval, ConfigurationError)
    assert bodies == [1]
