"""A call that is requeued keeps its message. Real messages of kombu's broker in memory."""

import uuid
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import Ignore
from kombu import Exchange, Queue
from kombu.exceptions import OperationalError
from kombu.utils.imports import symbol_by_name

from celery_singleton_lock import SingletonTask
from celery_singleton_lock.testing import hold

AS_IT_CAME = {
    "serializer": "pickle",
    "compression": "gzip",
    "priority": 7,
    "shadow": "shown",
    "expires": 600,
    "time_limit": 60,
    "soft_time_limit": 50,
    "reply_to": "caller",
    "headers": {"mine": {"deep": [1]}},
    "ignore_result": True,
    # Chosen by the caller, who hides a password for example.
    "argsrepr": "(shown,)",
    "kwargsrepr": "{hidden}",
    "stamped_headers": ["stamp"],
    "stamp": ["s"],
}
HEADERS = ["id", "task", "expires", "timelimit", "shadow", "group", "root_id", "parent_id", "retries", "mine"]
HEADERS += ["ignore_result", "stamped_headers", "stamps", "compression", "argsrepr", "kwargsrepr"]


@pytest.fixture
def app() -> Iterator[Celery]:
    app = Celery("messages", broker="memory://", backend="cache+memory://", set_as_current=False)
    mark = str(uuid.uuid4())
    queues = [
        Queue(f"{mark}.celery", Exchange(f"{mark}.celery"), "celery"),
        Queue(f"{mark}.native", Exchange(f"{mark}.native", type="topic"), "deep.key"),
    ]
    app.conf.update(accept_content=["json", "pickle"], task_queues=queues, task_default_queue=f"{mark}.celery")
    app.conf.singleton_lock_url = f"memory://{mark}"
    yield app
    app.close()


@pytest.fixture
def task(app: Celery) -> Any:
    @app.task(base=SingletonTask, bind=True, name="task", lock_on_conflict="reschedule", acks_late=True)
    def task(_: Any, *args: Any, **kwargs: Any) -> str:
        return "ran"

    app.finalize()
    return app.tasks["task"]


def take(app: Celery, queue: str) -> Any:
    with app.connection_for_read() as connection:
        bound = app.amqp.queues[queue](connection.default_channel)
        bound.declare()
        found = bound.get(accept=["json", "pickle"])
        if found is not None:
            found.ack()
        return found


def runs(task: Any, message: Any) -> None:
    request = symbol_by_name(task.Request)(message, app=task.app, task=task, hostname="here")
    with suppress(Ignore):
        request.execute()


def test_a_call_that_is_rescheduled_is_requeued_as_it_came(app: Celery, task: Any) -> None:
    queue = app.conf.task_default_queue
    follows = {"link": task.si("linked"), "link_error": task.si("failed"), "chain": [task.si("next")]}
    ids = {"task_id": "me", "group_id": "group", "root_id": "root", "parent_id": "parent"}
    task.apply_async((1,), {"two": 2}, **AS_IT_CAME, **follows, **ids)
    came = take(app, queue)
    with hold(task, 1, two=2):
        runs(task, came)
    again = take(app, queue)

    for name in HEADERS:
        assert again.headers.get(name) == came.headers.get(name) is not None, name
    assert set(again.headers) <= set(came.headers)
    assert came.headers["eta"] is None
    assert again.headers["eta"]
    assert again.payload[:2] == came.payload[:2] == ((1,), {"two": 2})
    for part in ("callbacks", "errbacks", "chain", "chord"):
        assert repr(again.payload[2][part]) == repr(came.payload[2][part])
    assert again.content_type == came.content_type == "application/x-python-serialize"
    for name in ("priority", "reply_to", "correlation_id"):
        assert again.properties[name] == came.properties[name] is not None
    # RabbitMQ would drop it, and its result would stay RETRY; by its header the next worker ends it as REVOKED.
    assert "expiration" in came.properties
    assert "expiration" not in again.properties


@pytest.mark.parametrize("expires", [600, datetime.now(UTC) + timedelta(hours=1)], ids=["seconds", "a moment"])
@pytest.mark.parametrize("protocol", [1, 2])
def test_a_retry_has_no_ttl_for_the_broker_but_keeps_its_expiry(
    app: Celery, task: Any, protocol: int, expires: Any
) -> None:
    app.conf.task_protocol = protocol
    task.apply_async((1,), task_id="me", retries=1, expires=expires)
    again = take(app, app.conf.task_default_queue)

    assert "expiration" not in again.properties
    assert (again.headers if protocol > 1 else again.payload)["expires"]


@pytest.mark.parametrize("nested", [{"x-trace": "1"}, "no dict", None], ids=["dict", "text", "none"])
def test_headers_that_another_hides_are_requeued(app: Celery, task: Any, nested: Any) -> None:
    hiding = {"headers": nested, "tenant": "a", "singleton_state": "theirs", "singleton_delivery": "theirs"}
    task.apply_async((1,), headers=hiding)
    queue = app.conf.task_default_queue
    came = take(app, queue)
    with hold(task, 1):
        runs(task, came)
    again = take(app, queue)

    assert {name: again.headers[name] for name in ("headers", "tenant")} == {
        name: came.headers[name] for name in ("headers", "tenant")
    }
    assert again.headers["singleton_lock"]["tries"] == 1
    assert again.headers["singleton_lock"]["published"] == came.headers["singleton_lock"]["published"]
    runs(task, again)
    assert task.AsyncResult(came.headers["id"]).get(timeout=5) == "ran"


def test_an_item_of_a_map_can_hand_on_its_headers(app: Celery) -> None:
    @app.task(base=SingletonTask, bind=True)
    def item(self: Any, _: int) -> Any:
        return self.request.headers

    assert item.map([1]).apply().get() == [{}]


@pytest.mark.parametrize("before", ["", "0." * 28, "1.0." * 14], ids=["as it is", "delayed by RabbitMQ", "long"])
def test_it_goes_back_to_the_queue_it_came_by(app: Celery, task: Any, before: str) -> None:
    native = app.conf.task_default_queue.replace("celery", "native")
    task.apply_async((1,), queue=native)
    came = take(app, native)
    # RabbitMQ's delayed delivery puts a prefix before the routing key.
    came.delivery_info["routing_key"] = before + "deep.key"
    with hold(task, 1):
        runs(task, came)

    assert take(app, native).headers["id"] == came.headers["id"]
    assert take(app, app.conf.task_default_queue) is None


@pytest.mark.parametrize("acks_late", [False, True])
def test_it_waits_for_a_broker_that_restarts(
    app: Celery, task: Any, monkeypatch: pytest.MonkeyPatch, acks_late: bool
) -> None:
    send, failures = app.send_task, [OperationalError("down")]

    def fail_once(*args: Any, **kwargs: Any) -> Any:
        if failures:
            raise failures.pop()
        return send(*args, **kwargs)

    task.acks_late = acks_late
    task.apply_async((1,))
    came = take(app, app.conf.task_default_queue)
    monkeypatch.setattr(app, "send_task", fail_once)
    with hold(task, 1):
        runs(task, came)

    assert failures == []
    assert take(app, app.conf.task_default_queue).headers["id"] == came.headers["id"]
    assert take(app, app.conf.task_default_queue) is None


class Array:  # noqa: PLW1641 (only `==` matters here)
    """As numpy's, which raises if two of them are compared."""

    def __eq__(self, other: object) -> bool:
        raise ValueError("ambiguous")


def test_a_retry_is_published_though_its_arguments_cannot_be_compared(app: Celery) -> None:
    @app.task(base=SingletonTask, bind=True, name="retried", lock_key=(), serializer="pickle")
    def retried(task: Any, _: Array) -> None:
        task.retry((Array(),), countdown=0)

    retried.apply_async((Array(),))
    queue = app.conf.task_default_queue
    runs(retried, take(app, queue))

    assert take(app, queue).headers["retries"] == 1
