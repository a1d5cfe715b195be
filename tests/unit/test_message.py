"""What we write on a message, and that it comes again as it came."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery, uuid
from celery.app.task import Context
from celery.exceptions import Reject
from kombu import Exchange, Queue
from kombu.common import Broadcast
from kombu.exceptions import OperationalError

from celery_singleton_lock import ConfigurationError, LockHeld, SingletonTask, StoreError, settings
from celery_singleton_lock.publish import for_a_dead_run
from celery_singleton_lock.request import SingletonRequest
from celery_singleton_lock.runs import message
from celery_singleton_lock.runs.message import DELIVERY, DUE_HEADER, HEADER, Delivery, Notes
from celery_singleton_lock.stores.memory.store import MemoryStore

FULL = Notes("key", 1, 2, 3, True, "joined", 4, 5, True, True, True, True, 6, 7, "id", continues_from=8)
NOW = 1000.0
QUEUES = ("celery", "other", "native")


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> Iterator[Celery]:
    app = Celery("messages", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(
        accept_content=["json", "pickle"],
        task_queues=[
            Queue("celery", Exchange("celery"), "celery"),
            Queue("other", Exchange("other"), "o"),
            Queue("native", Exchange("native", type="topic"), "deep.key"),
            Broadcast("everybody"),
        ],
    )
    monkeypatch.setitem(settings._stores, app, MemoryStore())
    app.finalize()
    empty(app)
    yield app
    empty(app)
    app.close()


@pytest.fixture
def task(app: Celery) -> Any:
    @app.task(base=SingletonTask, bind=True, name="task")
    def task(_: Any, *args: Any, **kwargs: Any) -> str:
        return "ran"

    return task


def empty(app: Celery) -> None:
    for queue in QUEUES:
        while take(app, queue) is not None:
            pass


def take(app: Celery, queue: str = "celery") -> Any:
    """The next message of the queue, if there is one."""
    with app.connection_for_read() as connection:
        bound = app.amqp.queues[queue](connection.default_channel)
        bound.declare()
        found = bound.get(accept=["json", "pickle"])
        if found is not None:
            found.ack()
        return found


def pushed(task: Any, **request: Any) -> Context:
    """The request that a worker would have pushed."""
    info = {"exchange": "celery", "routing_key": "celery", "redelivered": False}
    task.request_stack.push(Context({"id": "me", "called_directly": False, "delivery_info": info, **request}))
    return task.request


def visible_for(task: Any, seconds: float) -> None:
    """The setting as a new process finds it."""
    task.app.conf.broker_transport_options = {"visibility_timeout": seconds}
    vars(task).pop("lock_options", None)


def received(task: Any, found: Any) -> Context:
    """The request that a worker makes of a message, and pushes."""
    request = SingletonRequest(found, app=task.app, task=task, hostname="here")
    embedded = {**request.request_dict, **found.payload[2]}
    context = Context(embedded, args=request.args, kwargs=request.kwargs, called_directly=False)
    task.request_stack.push(context)
    return task.request


# Notes.


def test_notes_survive_the_way_through_a_message() -> None:
    assert Notes.of({HEADER: FULL.header()}) == FULL


@pytest.mark.parametrize("headers", [None, {}, {"other": 1}, {HEADER: None}, {HEADER: {}}])
def test_a_message_without_notes_says_nothing(headers: Any) -> None:
    assert Notes.of(headers) == Notes()


def test_what_goes_without_saying_is_not_written() -> None:
    assert Notes().header() == {}
    assert Notes(key="k", tries=1).header() == {"key": "k", "tries": 1}


@pytest.mark.parametrize(
    "written",
    [
        "a text",
        ["a", "list"],
        1,
        {"unknown": 1},
        {"key": 1},
        {"key": None},
        {"tries": "1"},
        {"tries": True},
        {"tries": 1.5},
        {"is_copy": 1},
        {"joins": b"bytes"},
        {"since": 1.0},
    ],
    ids=repr,
)
def test_a_header_that_only_looks_like_ours_is_refused_by_name(written: Any) -> None:
    with pytest.raises(ConfigurationError, match="is not ours"):
        Notes.of({HEADER: written})


def test_a_long_header_of_others_is_not_told_in_full() -> None:
    with pytest.raises(ConfigurationError) as raised:
        Notes.of({HEADER: "x" * 10_000})
    assert len(str(raised.value)) < 400


def test_a_retry_begins_with_what_is_known_of_the_call_alone() -> None:
    assert FULL.of_the_call() == Notes(key="key", published=1, continues_from=FULL.continues_from, task_id="id")


def test_notes_about_another_call_are_none() -> None:
    headers = {HEADER: Notes("key", 1, task_id="another").header()}

    assert Notes.of(headers, "me") == Notes()
    assert Notes.of(headers, "another").key == "key"


def test_notes_are_written_beside_the_headers_of_others_and_on_a_copy_of_them() -> None:
    headers = {"mine": 1, HEADER: {"key": "old"}}

    assert message.with_notes(headers, Notes(key="new")) == {"mine": 1, HEADER: {"key": "new"}}
    assert headers == {"mine": 1, HEADER: {"key": "old"}}
    assert message.with_notes(None, Notes()) == {HEADER: {}}


def test_two_publications_of_one_id_have_done_markers_of_their_own() -> None:
    first, second = (message.marker_of("key", "id", Notes(published=moment)) for moment in (1, 2))

    assert first != second


# What may be a copy.


@pytest.mark.parametrize(
    ("request_", "notes", "expected"),
    [
        ({}, Notes(), False),
        ({"retries": 1}, Notes(), False),
        ({"delivery_info": {"redelivered": True}}, Notes(), True),
        ({"delivery_info": None}, Notes(), False),
        ({}, Notes(is_copy=True), True),
        ({"eta": "2026-01-01"}, Notes(), True),
        ({"eta": "2026-01-01"}, Notes(tries=1), False),
        ({"eta": "2026-01-01"}, Notes(tries=1, is_copy=True), True),
        ({"is_eager": True, "delivery_info": {"redelivered": True}}, Notes(is_copy=True), False),
        ({"eta": "2026-01-01", "is_eager": True}, Notes(), False),
        ({"delivery_info": {"redelivered": True, "exchange": "everybody"}}, Notes(is_copy=True), False),
        ({"delivery_info": {"redelivered": True, "exchange": "other"}}, Notes(), True),
        ({DELIVERY: Delivery(received=NOW - 8)}, Notes(), False),
        ({DELIVERY: Delivery(received=NOW - 9.5)}, Notes(), True),
        ({DELIVERY: Delivery(received=NOW - 9.5)}, Notes(tries=1), True),
        ({DELIVERY: Delivery(received=float("-inf"))}, Notes(), True),
        ({DELIVERY: Delivery(received=NOW - 9.5), "is_eager": True}, Notes(), False),
    ],
    ids=str,
)
def test_what_may_be_delivered_more_than_once(
    task: Any, monkeypatch: pytest.MonkeyPatch, request_: Any, notes: Notes, expected: bool
) -> None:
    monkeypatch.setattr(message, "clock", lambda: NOW)
    task.app.conf.broker_transport_options = {"visibility_timeout": 10}
    pushed(task, **request_)

    assert message.may_be_copy(task, task.request, notes) is expected


@pytest.mark.parametrize(
    ("received", "late", "expected"),
    [(NOW - 89, True, False), (NOW - 91, True, True), (NOW - 91, False, True), (NOW - 85, False, False)],
)
def test_what_may_be_delivered_again_before_it_is_acknowledged(
    task: Any, monkeypatch: pytest.MonkeyPatch, received: float, late: bool, expected: bool
) -> None:
    monkeypatch.setattr(message, "clock", lambda: NOW)
    visible_for(task, 100)
    task.acks_late = late
    pushed(task, **{DELIVERY: Delivery(received=received)})

    assert message.will_have_copies(task, task.request, Notes()) is expected

    visible_for(task, 1000)
    pushed(task, **{DELIVERY: Delivery(received=NOW - 895)})
    assert not message.will_have_copies(task, task.request, Notes())

    visible_for(task, 20)
    pushed(task, **{DELIVERY: Delivery(received=NOW - 12)})
    assert message.will_have_copies(task, task.request, Notes()) is late


@pytest.mark.parametrize(
    ("request_", "expected"),
    [({}, False), ({"retries": 1}, True), ({"replaced_task_nesting": 1}, True), ({"retries": None}, False)],
    ids=str,
)
def test_what_continues_an_earlier_run(request_: Any, expected: bool) -> None:
    assert message.hands_over(Context(request_)) is expected


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        (None, False),
        ({}, False),
        ({"exchange": ""}, False),
        ({"exchange": "celery"}, False),
        ({"exchange": "everybody"}, True),
        ({"exchange": "unknown"}, False),
    ],
    ids=str,
)
def test_what_came_by_a_fanout_exchange(task: Any, info: Any, expected: bool) -> None:
    pushed(task, delivery_info=info)

    assert message.is_broadcast(task, task.request) is expected


@pytest.mark.parametrize(("options", "expected"), [({}, 3720), ({"visibility_timeout": 60}, 180)])
def test_how_long_a_broker_may_deliver_again(app: Celery, task: Any, options: Any, expected: float) -> None:
    app.conf.broker_transport_options = options

    assert message.kept(task) == expected


# It comes again as it came.

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


@pytest.fixture
def sent_twice(app: Celery, task: Any) -> tuple[Any, Any]:
    """A message as it came, and as it came again."""
    options = {
        **AS_IT_CAME,
        "link": task.si("linked"),
        "link_error": task.si("failed"),
        "group_id": "group",
        "root_id": "root",
        "parent_id": "parent",
        "chain": [task.si("next")],
    }
    task.apply_async((1,), {"two": 2}, task_id="me", **options)
    came = take(app)
    received(task, came)
    message.send_again(task, task.lock_key_for(1, two=2), 5, is_copy=True)
    return came, take(app)


@pytest.mark.parametrize(
    "name",
    [
        "id",
        "task",
        "expires",
        "timelimit",
        "shadow",
        "group",
        "root_id",
        "parent_id",
        "retries",
        "ignore_result",
        "stamped_headers",
        "stamps",
        "mine",
        "compression",
        "argsrepr",
        "kwargsrepr",
    ],
)
def test_a_header_comes_again_as_it_came(sent_twice: tuple[Any, Any], name: str) -> None:
    came, again = sent_twice

    assert again.headers.get(name) == came.headers.get(name) is not None


def test_arguments_and_what_follows_come_again_as_they_came(sent_twice: tuple[Any, Any]) -> None:
    came, again = sent_twice

    assert again.payload[:2] == came.payload[:2] == ((1,), {"two": 2})
    for part in ("callbacks", "errbacks", "chain", "chord"):
        assert repr(again.payload[2][part]) == repr(came.payload[2][part])


def test_priority_serialiser_and_the_way_back_come_again_as_they_came(sent_twice: tuple[Any, Any]) -> None:
    came, again = sent_twice

    assert again.content_type == came.content_type == "application/x-python-serialize"
    for name in ("priority", "reply_to", "correlation_id"):
        assert again.properties[name] == came.properties[name] is not None
    assert again.delivery_info["routing_key"] == came.delivery_info["routing_key"] == "celery"


def test_it_comes_again_with_a_delay_and_with_its_notes(sent_twice: tuple[Any, Any]) -> None:
    came, again = sent_twice
    before, after = (Notes.of(each.headers) for each in (came, again))

    assert came.headers["eta"] is None
    assert again.headers["eta"]
    assert (before.tries, after.tries) == (0, 1)
    assert after.is_copy
    assert (after.key, after.published) == (before.key, before.published)


def test_it_bears_no_header_that_it_did_not_come_with(sent_twice: tuple[Any, Any]) -> None:
    came, again = sent_twice

    assert set(again.headers) - set(came.headers) == set()


@pytest.mark.parametrize(
    ("exchange", "routing_key", "queue"),
    [
        ("", "celery", "celery"),
        ("celery", "celery", "celery"),
        ("other", "o", "other"),
        ("native", "deep.key", "native"),
        # What RabbitMQ's delayed delivery has put before it.
        ("native", "0." * 28 + "deep.key", "native"),
        ("native", "1.0." * 14 + "deep.key", "native"),
    ],
)
def test_it_goes_back_to_the_queue_it_came_by(
    app: Celery, task: Any, exchange: str, routing_key: str, queue: str
) -> None:
    pushed(task, args=(), kwargs={}, delivery_info={"exchange": exchange, "routing_key": routing_key})

    message.send_again(task, "key", 1)

    assert take(app, queue) is not None


def test_a_routing_key_that_only_looks_delayed_is_left_as_it_is(task: Any) -> None:
    pushed(task, delivery_info={"exchange": "native", "routing_key": "0." * 27 + "deep.key"})

    assert message._queue_of(task) is None


def test_notes_replace_those_that_were_there(app: Celery, task: Any) -> None:
    pushed(task, args=(), kwargs={}, headers={HEADER: Notes("k", 1, tries=4, since=5, crowds=True).header()})

    message.send_again(task, "key", 1, joins="other")

    known = {"tries": 5, "since": 5, "joins": "other", "crowds": True, "task_id": task.request.id}
    assert Notes.of(take(app).headers) == Notes("key", 1, **known)


@pytest.mark.parametrize(
    ("error", "acks_late", "raised"),
    [
        (OperationalError("down"), True, Reject),
        (OperationalError("down"), False, OperationalError),
        (ValueError("too long"), True, ValueError),
    ],
    ids=str,
)
def test_a_message_that_cannot_be_published_is_delivered_again_if_the_broker_still_has_it(
    app: Celery, task: Any, monkeypatch: pytest.MonkeyPatch, error: Exception, acks_late: bool, raised: Any
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(message, "_PATIENCE", 0)
    monkeypatch.setattr(app, "send_task", fail)
    monkeypatch.setattr(task, "acks_late", acks_late)
    pushed(task, args=(), kwargs={})

    with pytest.raises(raised) as seen:
        message.send_again(task, "key", 1)
    assert getattr(seen.value, "requeue", True)


@pytest.mark.parametrize("acks_late", [False, True])
def test_a_message_waits_for_a_broker_that_restarts(
    app: Celery, task: Any, monkeypatch: pytest.MonkeyPatch, acks_late: bool
) -> None:
    send, answers = app.send_task, iter([OperationalError("down"), OperationalError("still down")])

    def fail_twice(*args: Any, **kwargs: Any) -> Any:
        for error in answers:
            raise error
        return send(*args, **kwargs)

    monkeypatch.setattr(message, "_PAUSE", 0.01)
    monkeypatch.setattr(app, "send_task", fail_twice)
    monkeypatch.setattr(task, "acks_late", acks_late)
    pushed(task, args=(), kwargs={}, headers={HEADER: Notes(tries=4).header()})

    message.send_again(task, "key", 1)

    assert Notes.of(take(app).headers).tries == 5
    assert take(app) is None


# Publishing.


class Outbox:
    """Takes what would be sent."""

    def __init__(self, app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[dict[str, Any]] = []
        self._app = app
        self.error: Exception | None = None
        monkeypatch.setattr(app, "send_task", self._take)

    def _take(self, _: str, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        if self.error:
            raise self.error
        self.sent.append({"args": args, **options})
        return self._app.AsyncResult(options["task_id"] or uuid())

    @property
    def notes(self) -> list[Notes]:
        """Those of the messages that were sent."""
        return [Notes.of(each["headers"]) for each in self.sent]


@pytest.fixture
def outbox(app: Celery, monkeypatch: pytest.MonkeyPatch) -> Outbox:
    return Outbox(app, monkeypatch)


def unique(app: Celery, mode: str = "until_executed", **options: Any) -> Any:
    """A task whose calls are unique in the queue."""
    app.tasks.pop("unique", None)

    @app.task(base=SingletonTask, bind=True, name="unique", lock_mode=mode, **options)
    def unique(_: Any, *args: Any) -> None: ...

    return unique


def test_a_call_bears_its_key_and_the_time_of_its_publication(task: Any, outbox: Outbox) -> None:
    task.delay(1)

    (notes,) = outbox.notes
    assert notes.key == task.lock_key_for(1)
    assert abs(notes.published / 1e6 - time.time()) < 10
    assert notes == Notes(notes.key, notes.published, task_id=outbox.sent[0]["task_id"])


def test_the_callers_headers_stay_the_callers(app: Celery, outbox: Outbox) -> None:
    headers = {"mine": 1}

    for task in (unique(app), unique(app, "while_executing")):
        task.apply_async((), headers=headers)

    assert headers == {"mine": 1}
    assert all(each["headers"]["mine"] == 1 for each in outbox.sent)


def test_a_retry_keeps_the_time_of_first_publication_and_gets_the_key_of_its_own_arguments(
    task: Any, outbox: Outbox
) -> None:
    pushed(task, args=(1,), kwargs={}, headers={HEADER: Notes(task.lock_key_for(1), 77).header()})

    task.retry(throw=False, countdown=0)
    task.retry(args=(2,), throw=False, countdown=0)

    assert outbox.notes == [Notes(task.lock_key_for(number), 77, task_id=task.request.id) for number in (1, 2)]


def test_one_that_comes_again_keeps_the_time_of_first_publication(task: Any, outbox: Outbox) -> None:
    pushed(task, args=(1,), kwargs={}, headers={HEADER: Notes(task.lock_key_for(1), 77, tries=1).header()})

    message.send_again(task, "key", 1)

    assert outbox.notes == [Notes("key", 77, tries=2, task_id=task.request.id)]


def test_a_call_that_bears_the_headers_of_another_is_published_now(task: Any, outbox: Outbox) -> None:
    handed_on = {HEADER: Notes("another key", 77, tries=3, task_id="another").header(), "mine": 1}

    task.apply_async((1,), headers=handed_on)

    (notes,) = outbox.notes
    assert (notes.key, notes.tries, notes.task_id) == (task.lock_key_for(1), 0, outbox.sent[0]["task_id"])
    assert notes.published != 77
    assert outbox.sent[0]["headers"]["mine"] == 1


def test_a_header_of_others_is_refused_where_it_is_published(task: Any, outbox: Outbox) -> None:
    with pytest.raises(ConfigurationError, match="give a header of your own another name"):
        task.apply_async((), headers={HEADER: "mine"})
    assert outbox.sent == []


@pytest.mark.parametrize("mode", ["until_executing", "until_executed", "until_and_while_executing"])
def test_a_second_call_is_not_sent_and_returns_the_first(app: Celery, outbox: Outbox, mode: str) -> None:
    task = unique(app, mode)

    assert task.delay(1).id == task.delay(1).id
    task.delay(2)

    assert len(outbox.sent) == 2


def test_with_raise_a_second_call_is_refused(app: Celery, outbox: Outbox) -> None:
    task = unique(app, lock_on_conflict="raise")
    first = task.delay()

    with pytest.raises(LockHeld, match=first.id):
        task.delay()


@pytest.mark.parametrize(
    ("options", "sent"),
    [
        ({"task_id": "of-a-canvas"}, 1),
        ({"task_id": "of-a-beat", "headers": {DUE_HEADER: "now"}}, 0),
        ({"task_id": "retried", "retries": 1}, 1),
        ({"task_id": "again", "headers": {HEADER: {"tries": 1}}}, 1),
        ({"countdown": 60}, 0),
    ],
    ids=str,
)
def test_what_is_sent_although_another_is_queued(app: Celery, outbox: Outbox, options: Any, sent: int) -> None:
    task = unique(app)
    task.delay()

    task.apply_async((), **options)

    assert len(outbox.sent) == 1 + sent


def test_a_call_that_could_not_be_published_is_not_queued(app: Celery, outbox: Outbox) -> None:
    task = unique(app, lock_min_hold=60)
    outbox.error = OperationalError("down")
    with pytest.raises(OperationalError):
        task.delay()
    outbox.error = None

    task.delay()

    assert len(outbox.sent) == 1


def test_until_its_retry_runs_a_call_counts_as_queued(app: Celery, outbox: Outbox) -> None:
    task = unique(app)
    pushed(task, args=(), kwargs={}, headers={HEADER: Notes(task.lock_key_for(), 77).header()})

    task.retry(throw=False, countdown=60)

    assert task.delay().id == "me"


@pytest.mark.parametrize(("policy", "sent"), [("raise", 0), ("reschedule", 1), ("run", 1), ("skip", 1)])
def test_without_an_answer_of_the_store_a_message_too_many_is_better_than_one_too_few(
    app: Celery, outbox: Outbox, monkeypatch: pytest.MonkeyPatch, policy: str, sent: int
) -> None:
    def silent(*_: Any, **__: Any) -> None:
        raise StoreError("memory://", "no answer")

    task = unique(app, lock_on_store_error=policy)
    monkeypatch.setattr(settings.store_of(app), "mark_queued", silent)
    try:
        task.delay()
    except StoreError:
        assert policy == "raise"

    assert len(outbox.sent) == sent


def test_a_main_process_marks_nothing_under_no_key(app: Celery, outbox: Outbox) -> None:
    with for_a_dead_run():
        unique(app).apply_async((), task_id="me", retries=1)

    assert settings.store_of(app)._locks == {}


def test_a_main_process_makes_no_key_of_arguments(app: Celery, outbox: Outbox) -> None:
    def explode(*_: Any) -> None:
        raise AssertionError("a main process runs no code of the user")

    task = unique(app, "while_executing", lock_key=explode)

    with for_a_dead_run():
        task.apply_async((1,), task_id="me", headers={HEADER: Notes("key", 77).header()})
        task.apply_async((1,), task_id="me")

    assert [notes.key for notes in outbox.notes] == ["key", ""]


def test_a_call_of_a_dead_run_says_so_and_a_later_retry_of_it_does_not(app: Celery, outbox: Outbox) -> None:
    with for_a_dead_run():
        unique(app).apply_async((), task_id="me", retries=1)

    (notes,) = outbox.notes
    assert notes.died
    assert not notes.of_the_call().died


def test_a_task_of_celery_bears_no_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Celery("whole", task_cls=SingletonTask, broker="memory://", set_as_current=False)
    outbox = Outbox(whole, monkeypatch)

    whole.tasks["celery.accumulate"].apply_async(())

    assert [each.get("headers") for each in outbox.sent] == [None]


@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_an_eager_call_that_has_ended_is_queued_no_longer(app: Celery, policy: str) -> None:
    app.conf.task_always_eager = True

    unique(app, lock_on_conflict=policy).apply_async(())

    assert settings.store_of(app)._locks == {}


def test_an_eager_call_that_never_begins_is_queued_no_longer(app: Celery) -> None:
    def refuse(*_: Any) -> None:
        raise ValueError("not today")

    app.conf.task_always_eager = True

    unique(app, before_start=refuse).apply_async(())

    assert settings.store_of(app)._locks == {}
