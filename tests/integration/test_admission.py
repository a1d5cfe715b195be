"""The life of a message, delivery by delivery: from a broker in memory, traced as a worker does it."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pytest
from celery import Celery, Task, states, uuid

from celery_singleton_lock import CallRevoked, LockHeld, SingletonTask, StoreError, signals
from celery_singleton_lock.stores.records import Claim, Grant
from celery_singleton_lock.stores.redis.inventory import Inventory
from celery_singleton_lock.testing import memory_store
from tests.tracing import tracer_of
from tests.waiting import until

ALL = ("skip", "raise", "reschedule", "wait", "join", "rerun", "replace")
REQUEUES = ("reschedule", "join", "rerun", "replace")
ME = "me"


@dataclass(frozen=True)
class Message:
    headers: Mapping[str, Any]
    body: Any
    delivery: Mapping[str, Any]
    sent_after: datetime

    def is_due_within(self, seconds: float) -> bool:
        """Whether a worker keeps it back no longer than that. Never false because this machine is slow."""
        eta = self.headers["eta"]
        return eta is None or (datetime.fromisoformat(eta) - datetime.now(UTC)).total_seconds() <= seconds

    def is_due_after(self, seconds: float) -> bool:
        """Whether a worker keeps it back for longer. Never false because this machine is slow."""
        eta = self.headers["eta"]
        return eta is not None and (datetime.fromisoformat(eta) - self.sent_after).total_seconds() > seconds


@dataclass
class World:
    app: Celery
    store: Any
    task: Any = None
    ran: list[Any] = field(default_factory=list)
    began: datetime = field(default_factory=lambda: datetime.now(UTC))

    def define(self, body: Callable[..., Any] | None = None, **options: Any) -> None:
        def its_body(task: Any, number: int = 1) -> str:
            self.ran.append((number, task.lock.held))
            return "ran"

        options = {"base": SingletonTask, "bind": True, "name": "task", "lock_key": (), **options}
        self.task = self.app.task(**options)(body or its_body)

    @property
    def sent(self) -> Message | None:
        with self.app.connection_for_read() as connection:
            channel = connection.default_channel
            channel.queue_declare(self.app.conf.task_default_queue)
            message = channel.basic_get(self.app.conf.task_default_queue, no_ack=True)
        if message is None:
            return None
        return Message(message.headers, message.decode(), message.delivery_info, self.began)

    def deliver(self, message: Message | None, **request: Any) -> str:
        """Run a delivery as a worker does it; the state that is stored afterwards."""
        assert message is not None, "nothing was sent"
        self.began = datetime.now(UTC)
        args, kwargs, embedded = message.body
        keys = ("exchange", "routing_key", "priority", "redelivered")
        delivery = {"redelivered": False, **message.delivery, **request.pop("delivery_info", {})}
        facts = {**message.headers, **embedded, "args": args, "kwargs": kwargs, **request}
        facts["delivery_info"] = {key: delivery.get(key) for key in keys}
        tracer_of(self.app.tasks[message.headers["task"]])(message.headers["id"], args, kwargs, facts)
        return str(self.result.state)

    @property
    def result(self) -> Any:
        return self.app.AsyncResult(ME)

    def is_held(self, by: str = "the-holder", ttl: float = 30) -> Callable[[], Any]:
        """Have another run hold the key; return what ends it."""
        claim = Claim(self.task.lock_key_for(), f"token of {by}", ttl, 100, task_id=by)
        assert isinstance(self.store.acquire(claim), Grant)
        return lambda: self.store.release(claim, None)


@pytest.fixture
def world() -> Iterator[World]:
    app = Celery("admission", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.task_default_queue = uuid()
    with memory_store(app) as store:
        yield World(app, store)
    app.close()


def publish(world: World) -> Message | None:
    world.task.apply_async((1,), task_id=ME)
    return world.sent


def publish_by_name(world: World) -> Message | None:
    world.app.send_task("task", (1,), task_id=ME)
    return world.sent


def by_message(world: World, **request: Any) -> tuple[str, Any]:
    return world.deliver(publish(world), **request), world.result.result


def by_send_task(world: World) -> tuple[str, Any]:
    return world.deliver(publish_by_name(world)), world.result.result


def redelivered(world: World) -> tuple[str, Any]:
    return by_message(world, delivery_info={"redelivered": True})


def for_a_retry(world: World) -> tuple[str, Any]:
    return by_message(world, retries=1)


def in_a_chord(world: World) -> tuple[str, Any]:
    body = {"task": "task", "args": (), "kwargs": {}, "options": {"task_id": "the-body"}, "chord_size": 2}
    return by_message(world, chord=body)


def eagerly(world: World) -> tuple[str, Any]:
    ended = world.task.apply((1,), task_id=ME, throw=False)
    return ended.state, ended.result


def in_a_map(world: World) -> tuple[str, Any]:
    world.task.map([1]).apply_async(task_id=ME)
    state, result = world.deliver(world.sent), world.result.result
    return state, result[0] if isinstance(result, list) else result


@pytest.mark.parametrize("comes", [by_message, by_send_task, redelivered, for_a_retry, eagerly, in_a_map])
@pytest.mark.parametrize("policy", ALL)
def test_a_free_key_lets_a_call_in_however_it_comes(world: World, policy: str, comes: Any) -> None:
    world.define(lock_on_conflict=policy)

    assert comes(world) == ("SUCCESS", "ran")
    assert world.ran == [(1, True)]
    assert world.store.held() == []


NO_RUN: list[tuple[str, Any, dict[str, Any], str, Any]] = [
    *(("skip", comes, {}, "REVOKED", CallRevoked) for comes in (by_message, by_send_task, redelivered, for_a_retry)),
    ("skip", eagerly, {}, "REVOKED", CallRevoked),
    ("skip", in_a_chord, {}, "SUCCESS", None),
    ("skip", in_a_map, {}, "SUCCESS", None),
    ("skip", by_message, {"lock_skip_result": None}, "SUCCESS", None),
    *(("skip", how, {"lock_skip_result": 5}, "SUCCESS", 5) for how in (by_message, eagerly, in_a_chord, in_a_map)),
    *(("raise", how, {}, "FAILURE", LockHeld) for how in (by_message, for_a_retry, eagerly, in_a_chord, in_a_map)),
    # In eager mode there is no broker through which a call could be requeued.
    *((policy, eagerly, {}, "FAILURE", LockHeld) for policy in REQUEUES),
    *((policy, by_message, {"lock_wait_timeout": 0}, "FAILURE", LockHeld) for policy in ("reschedule", "wait")),
    # An item of a map is no message of its own, so it waits in its place.
    *((policy, in_a_map, {"lock_wait_timeout": 0.01}, "FAILURE", LockHeld) for policy in (*REQUEUES, "wait")),
]  # fmt: skip


@pytest.mark.parametrize(("policy", "comes", "options", "state", "result"), NO_RUN)
def test_a_call_whose_key_is_held_ends_as_its_policy_says(
    world: World, caplog: pytest.LogCaptureFixture, policy: str, comes: Any, options: Any, state: str, result: Any
) -> None:
    caplog.set_level("INFO", "celery_singleton_lock")
    world.define(lock_on_conflict=policy, **options)
    world.is_held()
    released: list[Any] = []
    signals.lock_released.connect(lambda lease, **_: released.append(lease), sender=world.task, weak=False)

    ended, found = comes(world)

    assert (ended, type(found) if isinstance(found, Exception) else found) == (state, result)
    if isinstance(found, (CallRevoked, LockHeld)):
        assert found.holder_task_id == "the-holder"
    assert [holder.task_id for holder in world.task.lock_holders()] == ["the-holder"]
    assert (world.ran, world.sent, released) == ([], None, [])
    assert f"lock.conflict key={world.task.lock_key_for()} task_id={ME} holder=the-holder" in caplog.text


@pytest.mark.parametrize("policy", ALL)
def test_an_eager_replacement_by_an_equal_call_keeps_the_lease(world: World, policy: str) -> None:
    leases = []

    def body(task: Any, times: int) -> str:
        leases.append((task.lock.key, task.lock.fence))
        return str(task.replace(task.s(times - 1))) if times else "replaced"

    world.define(body, lock_on_conflict=policy)

    assert world.task.apply((1,)).get() == "replaced"
    assert len(leases) == 2
    assert len(set(leases)) == 1
    assert (world.sent, world.store.held()) == (None, [])


@pytest.mark.timeout(60)
def test_an_eager_call_does_not_wait_for_its_own_thread(world: World) -> None:
    inner = []

    def body(task: Any, depth: int) -> str:
        if depth:
            inner.append(task.apply((depth - 1,)))
        return "ran"

    world.define(body, lock_on_conflict="wait")
    result = world.task.apply((1,))

    assert result.get() == "ran"
    with pytest.raises(LockHeld, match=result.id):
        inner[0].get()
    assert world.sent is None


@pytest.mark.parametrize("policy", REQUEUES)
def test_a_call_that_is_requeued_is_the_same_and_never_far_away(world: World, policy: str) -> None:
    world.define(lock_on_conflict=policy)
    release = world.is_held(ttl=3600)
    message = publish(world)

    # One that has a turn is called. A joiner asks: eight refusals cost 2 s at most, many of them a third of the ttl.
    for longest in (*(2,) * 8, *(10,) * 12) if policy == "join" else (900,) * 3:
        assert world.deliver(message) == "RETRY"
        message = world.sent
        assert message.is_due_after(0)
        assert message.is_due_within(longest)
        assert (message.headers["id"], message.headers["retries"], message.body[0]) == (ME, 0, [1])
        assert world.sent is None
    assert message.is_due_after(4)
    release()
    # A joiner looks for the result of its holder first, for some seconds.
    while world.deliver(message) == "RETRY":
        world.store.advance(2)
        message = world.sent

    assert (world.ran, world.result.result) == ([(1, True)], "ran")
    (survey,) = world.store.survey([world.task.lock_key_for()])
    assert (survey.places, survey.marks, world.sent) == ((), (), None)


@pytest.mark.parametrize("by", ["a run", "another queued call"])
def test_a_call_that_is_kept_out_gives_up_after_lock_wait_timeout(world: World, by: str) -> None:
    mode = "while_executing" if by == "a run" else "until_executing"
    world.define(lock_mode=mode, lock_on_conflict="reschedule", lock_wait_timeout=20)
    message = publish(world)
    if by == "a run":
        world.is_held(ttl=3600)
    else:
        # As after `lock_queue_ttl`, or by `break`.
        world.store.unmark(world.task.lock_key_for(), ME)
        world.task.apply_async(task_id="another")
        assert world.sent is not None

    assert world.deliver(message) == "RETRY"
    world.store.advance(10)
    assert world.deliver(world.sent) == "RETRY"
    world.store.advance(11)
    assert world.deliver(world.sent) == "FAILURE"

    assert isinstance(world.result.result, LockHeld)
    assert world.sent is None


@pytest.mark.parametrize("policy", ALL)
def test_a_call_that_meets_a_run_whose_call_has_ended_waits_for_the_end_of_that_run(world: World, policy: str) -> None:
    world.define(lock_on_conflict=policy, lock_wait_timeout=0.01 if policy == "wait" else None)
    release = world.is_held()
    world.store.unmark(world.task.lock_key_for(), "the-holder", call_ended=True)
    message = publish(world)
    if policy == "wait":
        # It waits in its place, as it does for any other run.
        assert world.deliver(message) == "FAILURE"
        return

    assert world.deliver(message) == "RETRY"
    assert (world.ran, len(world.task.lock_holders())) == ([], 1)
    release()
    assert world.deliver(world.sent) == "SUCCESS"
    assert world.ran == [(1, True)]


@pytest.mark.parametrize("how", ["is done", "fails", "raises LockHeld", "is skipped", "is broken"])
def test_an_end_is_stored_once_nothing_is_left_of_its_call(
    world: World, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    # Its caller may forget the result and publish the next call at once.
    def body(task: Any, number: int = 1) -> str:
        if how == "fails":
            raise ValueError
        if how == "is broken":
            Inventory(world.store).break_lock(task.lock.key, [task.lock.token], "alice")
            until(lambda: task.lock.lost, "it is told")
            time.sleep(20)
        return "ran"

    def stored(task_id: str, result: Any, state: str, *args: Any, **kwargs: Any) -> Any:
        left.append((state, world.task.lock_state().queued, [each.task_id for each in world.task.lock_holders()]))
        return store(task_id, result, state, *args, **kwargs)

    left: list[Any] = []
    store = world.app.backend.store_result
    policy = "raise" if how == "raises LockHeld" else "skip"
    world.define(body, lock_mode="until_executed", lock_ttl=1, lock_on_conflict=policy)
    message = publish(world)
    holders = []
    if how in ("is skipped", "raises LockHeld"):
        # Sent by another service, it had no mark to heed.
        world.is_held(ttl=600)
        holders = ["the-holder"]
    monkeypatch.setattr(world.app.backend, "store_result", stored)

    state = world.deliver(message)

    assert left == [(state, None, holders)]
    assert state == {"is done": "SUCCESS", "is skipped": "REVOKED", "is broken": "REVOKED"}.get(how, "FAILURE")


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_caller_in_a_cool_down_gets_the_earlier_result_and_waits_for_none_that_is_gone(
    world: World, is_kept: bool
) -> None:
    world.define(lock_mode="until_executed", lock_min_hold=3600)
    assert world.deliver(publish(world)) == "SUCCESS"
    if not is_kept:
        world.result.forget()

    again = world.task.delay(1)

    assert (again.id, world.sent) == (ME, None)
    if is_kept:
        assert again.get(timeout=5) == "ran"
    else:
        with pytest.raises(CallRevoked, match=f"task_id={ME} stands for this call"):
            again.get(timeout=5)


@pytest.mark.parametrize(("limit", "publishes"), [(1, publish), (2, publish), (1, publish_by_name)])
@pytest.mark.parametrize("policy", ALL)
def test_a_copy_waits_for_its_own_run_and_is_dropped_after_it(
    world: World, policy: str, limit: int, publishes: Any
) -> None:
    copies: list[tuple[str, Message | None]] = []
    ran = []

    def body(task: Any, number: int) -> str:
        ran.append(number)
        if len(ran) == 1:
            # In another thread, as in another process: it knows nothing of this run.
            copy = threading.Thread(target=world.deliver, args=(message,), kwargs={"delivery_info": again})
            copy.start()
            copy.join()
            copies.append((world.result.state, world.sent))
        return "ran"

    again = {"redelivered": True}
    world.define(body, lock_on_conflict=policy, lock_limit=limit)
    message = publishes(world)

    assert world.deliver(message) == "SUCCESS"
    ((state, copy),) = copies
    # The copy has not ended the call whose run went on.
    assert (state, copy is not None) == ("PENDING", True)
    # The parked copy is known as one although it has no redelivered flag.
    assert world.deliver(copy) == "SUCCESS"

    assert (ran, world.result.result, world.sent) == ([1], "ran", None)


@pytest.mark.parametrize("policy", ["reschedule", "rerun", "replace"])
def test_a_copy_that_has_joined_leaves_nothing_whatever_policy_its_task_has_by_now(world: World, policy: str) -> None:
    world.define(lock_on_conflict="join")
    ends = world.is_held()
    assert world.deliver(publish(world)) == "RETRY"
    joined = world.sent
    world.task.lock_on_conflict = policy

    assert world.deliver(joined, delivery_info={"redelivered": True}) == "RETRY"
    world.app.backend.store_result("the-holder", "of the holder", states.SUCCESS)
    ends()
    assert world.deliver(world.sent) == "SUCCESS"

    assert world.result.get() == "of the holder"
    state = world.task.lock_state()
    assert (state.next, state.turns) == (None, ())


def test_a_joiner_waits_while_the_result_backend_is_away(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.define(lock_on_conflict="join")
    ends = world.is_held()
    assert world.deliver(publish(world)) == "RETRY"
    ends()
    answers = world.app.backend.get_task_meta

    def is_away(task_id: str, **cache: Any) -> Any:
        if "the-holder" in task_id:
            raise ConnectionError("the backend is away")
        return answers(task_id, **cache)

    with monkeypatch.context() as patch:
        patch.setattr(world.app.backend, "get_task_meta", is_away)
        assert world.deliver(world.sent) == "RETRY"
        # For longer than a living run needs to store its result.
        time.sleep(2)
        assert world.deliver(world.sent) == "RETRY"
    world.app.backend.store_result("the-holder", "of the holder", states.SUCCESS)

    assert world.deliver(world.sent) == "SUCCESS"
    assert (world.result.get(), world.ran) == ("of the holder", [])


@pytest.mark.parametrize("policy", ["skip", "raise", "wait", "join", "rerun", "replace"])
def test_a_turn_ends_with_its_message_whatever_policy_its_task_has_by_now(world: World, policy: str) -> None:
    world.define(lock_on_conflict="reschedule")
    ends = world.is_held()
    assert world.deliver(publish(world)) == "RETRY"
    waiting = world.sent
    world.task.lock_on_conflict = policy
    world.task.lock_wait_timeout = 0.1 if policy == "wait" else None

    state = world.deliver(waiting)
    world.app.backend.store_result("the-holder", "of the holder", states.SUCCESS)
    ends()
    if state == "RETRY":
        state = world.deliver(world.sent)

    assert state in states.READY_STATES
    assert world.task.lock_state().turns == ()


def test_a_call_that_waits_in_its_slot_by_now_leaves_no_turn_of_its_message(world: World) -> None:
    world.define(lock_on_conflict="reschedule")
    ends = world.is_held()
    assert world.deliver(publish(world)) == "RETRY"
    world.task.lock_on_conflict = "wait"
    ending = threading.Timer(0.3, ends)
    ending.start()

    assert world.deliver(world.sent) == "SUCCESS"

    ending.join()
    assert world.task.lock_state().turns == ()


@pytest.mark.parametrize("policy", ["rerun", "replace"])
def test_a_call_that_is_never_given_up_by_now_does_not_ask_in_haste(world: World, policy: str) -> None:
    world.define(lock_on_conflict="reschedule", lock_wait_timeout=0.3)
    world.is_held()
    assert world.deliver(publish(world)) == "RETRY"
    world.task.lock_on_conflict = policy
    time.sleep(0.4)

    assert world.deliver(world.sent) == "RETRY"

    sent = world.sent
    assert sent is not None
    assert sent.is_due_after(0.1)


@pytest.mark.parametrize("option", ["acks_on_failure_or_timeout", "acks_on_failure"])
@pytest.mark.parametrize("acknowledged", [True, False])
def test_a_later_delivery_of_a_run_that_failed_is_dropped_only_if_that_was_acknowledged(
    world: World, option: str, acknowledged: bool
) -> None:
    if not hasattr(Task, option):
        pytest.skip(f"{option} is new in Celery 5.7")
    ran = []

    def body(task: Any, number: int) -> None:
        ran.append(number)
        raise ValueError

    world.define(body, acks_late=True, **{option: acknowledged})
    message = publish(world)

    for _ in range(2):
        assert world.deliver(message, delivery_info={"redelivered": True}) == "FAILURE"

    assert len(ran) == (1 if acknowledged else 2)


@pytest.mark.parametrize(
    ("where", "is_done", "ignored", "runs"),
    [
        ("release", False, False, 2),
        ("release", True, False, 2),
        ("mark_as_done", False, False, 2),
        ("mark_as_done", True, False, 1),
        ("mark_as_done", False, True, 1),
    ],
)
def test_a_later_delivery_runs_if_the_process_has_ended_before_it_stored_a_result_that_somebody_may_wait_for(
    world: World, monkeypatch: pytest.MonkeyPatch, where: str, is_done: bool, ignored: bool, runs: int
) -> None:
    world.define(acks_late=True, lock_ttl=1, ignore_result=ignored)
    message, again = publish(world), {"redelivered": True}
    ends_in = world.store if where == "release" else type(world.task.backend)
    known = getattr(ends_in, where)

    ends: list[type[BaseException]] = [SystemExit]

    def end(*args: Any, **options: Any) -> Any:
        answer = known(*args, **options) if is_done or not ends else None
        if ends:
            raise ends.pop()
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(ends_in, where, end)
        with pytest.raises(SystemExit):
            world.deliver(message, delivery_info=again)

    copies = [message]

    def is_settled() -> bool:
        world.deliver(copies.pop(), delivery_info=again)
        if (parked := world.sent) is not None:
            copies.append(parked)
        return not copies

    until(is_settled, "no delivery waits", timeout=60)
    assert len(world.ran) == runs


@contextmanager
def silence(world: World, monkeypatch: pytest.MonkeyPatch, *, deaf: bool = True) -> Iterator[None]:
    """Let no acquire be answered. A store that is not deaf grants it nevertheless, and its answer is lost."""
    acquire = world.store.acquire

    def unanswered(claim: Claim) -> Any:
        if not deaf:
            acquire(claim)
        raise StoreError("memory://", "no answer")

    with monkeypatch.context() as patch:
        patch.setattr(world.store, "acquire", unanswered)
        yield


UNANSWERED: list[tuple[str, Any, dict[str, Any], str, Any, str]] = [
    ("run", by_message, {}, "SUCCESS", "ran", "unlocked"),
    ("skip", by_message, {}, "REVOKED", CallRevoked, "skipped"),
    ("skip", by_message, {"lock_skip_result": "no"}, "SUCCESS", "no", "skipped"),
    ("raise", by_message, {}, "FAILURE", StoreError, "raised"),
    ("reschedule", eagerly, {}, "FAILURE", StoreError, "raised"),
    ("reschedule", in_a_map, {}, "FAILURE", StoreError, "raised"),
]


@pytest.mark.parametrize(("wanted", "comes", "options", "state", "result", "outcome"), UNANSWERED)
def test_a_call_without_an_answer_ends_as_lock_on_store_error_says(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    wanted: str,
    comes: Any,
    options: Any,
    state: str,
    result: Any,
    outcome: str,
) -> None:
    world.define(lock_on_store_error=wanted, **options)

    with silence(world, monkeypatch):
        ended, found = comes(world)

    assert (ended, type(found) if isinstance(found, Exception) else found) == (state, result)
    assert world.ran == ([(1, False)] if wanted == "run" else [])
    assert world.sent is None
    (line,) = [each for each in caplog.messages if each.startswith("lock.unanswered ")]
    assert line.startswith(f"lock.unanswered key={world.task.lock_key_for()} task_id={ME} outcome={outcome}: ")


def test_a_call_without_an_answer_comes_the_more_seldom_and_at_least_once_a_minute(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.define()
    message = publish(world)

    with silence(world, monkeypatch):
        for longest in (1, *(60,) * 19):
            assert world.deliver(message) == "RETRY"
            message = world.sent
            assert message.is_due_within(longest)
    assert message.is_due_after(25)
    assert world.deliver(message) == "SUCCESS"


@pytest.mark.parametrize("wanted", ["reschedule", "raise", "run"])
def test_a_grant_whose_answer_is_lost_is_given_back(world: World, monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    world.define(lock_on_store_error=wanted)

    with silence(world, monkeypatch, deaf=False):
        world.deliver(publish(world))

    until(lambda: world.task.lock_holders() == [], "it is given back")


@pytest.mark.parametrize("task", ["usual", "store_errors_even_if_ignored", "backend"])
@pytest.mark.parametrize("by", [*REQUEUES, "retry", "autoretry_for"])
def test_that_a_call_is_requeued_is_not_stored_over_an_end_that_comes_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch, by: str, task: str
) -> None:
    # As for one that has expired by then, or was revoked: a worker throws it away as it comes.
    def body(task: Any, number: int) -> None:
        try:
            raise KeyError("not yet")
        except KeyError as error:
            if by == "retry":
                raise task.retry(exc=error) from error
            raise

    def end_elsewhere(*_: Any, **__: Any) -> None:
        assert world.result.state == "RETRY"
        world.app.backend.mark_as_revoked(ME, "ended elsewhere")

    kinds: dict[str, Any] = {"backend": world.app.backend, "store_errors_even_if_ignored": True}
    options = {name: value for name, value in kinds.items() if name == task}
    if by in REQUEUES:
        world.define(lock_on_conflict=by, **options)
        world.is_held()
    else:
        world.define(body, autoretry_for=(KeyError,) if by == "autoretry_for" else (), **options)
    message = publish(world)
    monkeypatch.setattr(world.app, "send_task", end_elsewhere)

    assert world.deliver(message) == states.REVOKED


def test_the_backend_of_a_task_that_retries_still_stores_what_a_user_tells_it(world: World) -> None:
    world.define(lock_on_conflict="reschedule")
    world.is_held()
    world.deliver(publish(world))

    world.task.backend.mark_as_retry("another", KeyError("a user's own"))
    assert world.app.AsyncResult("another").state == "RETRY"


def test_a_call_that_waits_leaves_no_error_where_only_errors_are_kept(world: World) -> None:
    world.define(lock_on_conflict="reschedule", ignore_result=True, store_errors_even_if_ignored=True)
    release = world.is_held()
    assert world.deliver(publish(world)) == "PENDING"
    release()

    assert world.deliver(world.sent) == "PENDING"
    assert world.ran == [(1, True)]
