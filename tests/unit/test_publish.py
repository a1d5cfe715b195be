"""How long a call counts as queued, and what the caller of a duplicate gets."""

import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext, suppress
from datetime import UTC, datetime, timedelta
from typing import Any, get_args

import pytest
from celery import Celery, Signature, uuid
from celery.exceptions import TaskRevokedError

from celery_singleton_lock import ConfigurationError, LockHeld, SingletonTask, StoreError, signals
from celery_singleton_lock.definition.options import Mode
from celery_singleton_lock.definition.settings import store_of
from celery_singleton_lock.stores.records import Claim, Holder
from tests.unit.conftest import headers_of
from tests.waiting import Watch

HOUR = 3600.0


def lasts(options: dict[str, Any], **of_the_task: Any) -> float:
    task = unique("raise", **of_the_task)
    task.apply_async(**options)
    with pytest.raises(LockHeld) as held:
        task.delay()
    return held.value.expires_in


def tomorrow() -> datetime:
    return datetime.now(UTC) + timedelta(days=1)


def made(store: str = "memory://", results: str = "disabled://", **options: Any) -> Any:
    app = Celery(broker="memory://", backend=results, set_as_current=False)
    app.conf.singleton_lock_url = store

    @app.task(base=SingletonTask, **{"lock_name": uuid(), **options})
    def task(number: int = 0, other: Any = None) -> None: ...

    return task


def unique(on_conflict: str = "raise", **options: Any) -> Any:
    return made(lock_mode="until_executed", lock_on_conflict=on_conflict, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"parent_id": "the-call-before", "root_id": "the-first"},
        {"link": Signature("next")},
        {"link_error": Signature("tell")},
    ],
    ids=lambda options: next(iter(options)),
)
def test_a_call_that_is_always_sent_is_sent_beside_one_that_is_queued(options: dict[str, Any]) -> None:
    task = unique("raise")
    queued = task.delay()

    sent = task.apply_async(**options)

    assert sent.id != queued.id
    with pytest.raises(LockHeld) as held:
        task.delay()
    assert held.value.holder_task_id == queued.id


class BindsSlowly:
    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.is_binding = threading.Event()
        self.may_go_on = threading.Event()

    def annotate(self, task: Any) -> dict[str, Any]:
        if task.name != "slowly bound":
            return {}
        self.is_binding.set()
        assert self.may_go_on.wait(60)
        return self.options


@pytest.mark.parametrize("call", [{}, {"retries": 1, "task_id": "of-its-caller"}], ids=["new", "retry"])
@pytest.mark.parametrize("key", [None, ["x"], "{x}", lambda x: x], ids=["all", "list", "format", "callable"])
@pytest.mark.parametrize("mode", get_args(Mode))
def test_a_call_waits_until_another_thread_has_bound_its_task(mode: str, key: Any, call: dict[str, Any]) -> None:
    slow = BindsSlowly({"lock_mode": mode, "ignore_result": True})
    app = Celery(broker="memory://", set_as_current=False)
    app.conf.update(singleton_lock_url=f"memory://{uuid()}", task_default_queue=uuid(), task_annotations=[slow])

    @app.task(base=SingletonTask, lock_key=key, name="slowly bound", shared=False)
    def work(x: Any) -> None: ...

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(lambda: work.delay({"a": 1}))
        assert slow.is_binding.wait(60)
        second = threads.submit(lambda: app._tasks["slowly bound"].apply_async(({"a": 1},), **call))
        # A call that does not wait has failed long before.
        wait([second], timeout=0.1)
        slow.may_go_on.set()

        assert second.result(60).ignored
        if not call:
            assert (first.result(60).id == second.result(60).id) == (mode != "while_executing")


@pytest.mark.parametrize(
    ("options", "longer"),
    [
        (dict, 0),
        (lambda: {"countdown": 60}, 60),
        (lambda: {"eta": tomorrow()}, 24 * HOUR),
        (lambda: {"eta": tomorrow().replace(tzinfo=None)}, 24 * HOUR),  # in the app's zone: UTC
        (lambda: {"eta": tomorrow() - timedelta(days=2)}, 0),
        # It can never begin later than it expires.
        (lambda: {"expires": 90.5}, 90.5 - HOUR),
        (lambda: {"expires": tomorrow().isoformat()}, 0),
        (lambda: {"countdown": 60, "expires": 90}, 90 - HOUR),
        (lambda: {"eta": tomorrow(), "expires": tomorrow() + timedelta(minutes=2)}, 23 * HOUR + 120),
        (lambda: {"task_id": "of-a-retry", "retries": 1, "expires": 90}, 90 - HOUR),
    ],
)
def test_a_mark_lasts_until_the_message_may_run_and_then_as_long_as_lock_queue_ttl(
    options: Callable[[], dict[str, Any]], longer: float
) -> None:
    assert lasts(options()) == pytest.approx(HOUR + longer, abs=10)


def test_a_newest_call_that_expires_before_it_is_due_is_queued_until_then() -> None:
    task = made(lock_mode="until_executing", lock_on_conflict="rerun", lock_wait_timeout=10)

    _, newest = (task.apply_async(countdown=60, expires=20) for _ in range(2))

    assert task.lock_state().queued == newest.id


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("held", "is held by task_id=a; its lease"),
        ("cooldown", "cool-down of task_id=a"),
        ("queued", "task_id=a, which is queued"),
    ],
)
def test_a_refusal_says_whether_a_call_runs_is_queued_or_has_left_a_cool_down(
    state: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    task = unique("raise")
    store, claim = store_of(task.app), Claim(task.lock_key_for(), "token", 30, task_id="a")
    store.mark_queued(claim.key, "a", 60, limit=0, cooldown=60 if state == "cooldown" else 0)
    if state != "queued":
        store.acquire(claim)
    if state == "cooldown":
        store.release(claim, 1)

    with pytest.raises(LockHeld, match=words) as held:
        task.delay()

    assert held.value.state == state
    assert ("lease" in str(held.value)) == (state == "held")
    assert f"holder=a state={state} " in caplog.text


@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_a_run_in_a_cool_down_is_told_so(policy: Any) -> None:
    task = made(lock_on_conflict=policy, lock_min_hold=60)

    first = task.apply()
    assert f"is in the cool-down of task_id={first.id}" in str(task.apply().result)


UNREADABLE = {
    "results go to their own callers": ("rpc://", {}),
    "there are no results": ("disabled://", {}),
    "an item of a map stands for it": ("cache+memory://", {"task_name": "celery.map"}),
    "a task that ignores its results stands for it": ("cache+memory://", {"task_name": "keeps no results"}),
    "a run that keeps no result stands for it": ("cache+memory://", {"keeps_result": False}),
}


def duplicate(results: str, holder: dict[str, Any], of_the_call: dict[str, Any] | None = None, **options: Any) -> Any:
    task = made(results=results, lock_mode="until_executed", **options)
    task.app.task(name="keeps no results", ignore_result=True)(tomorrow)
    standing = Claim(task.lock_key_for(), "token", 30, task_id=uuid(), **holder)
    store_of(task.app).acquire(standing)
    result = task.apply_async(**(of_the_call or {}))
    assert result.id == standing.task_id
    return result


@pytest.mark.parametrize("why", UNREADABLE)
@pytest.mark.parametrize("policy", ["skip", "reschedule", "wait"])
def test_where_nobody_can_read_the_others_result_a_duplicate_ends_as_if_it_was_skipped(why: str, policy: str) -> None:
    result = duplicate(*UNREADABLE[why], lock_on_conflict=policy)

    assert result.ready()
    with pytest.raises(TaskRevokedError, match=result.id):
        result.get(timeout=1)
    assert (result.result.holder_task_id, result.result.reason) == (result.id, "unpublished")


@pytest.mark.parametrize("holder", [{}, {"hostname": "a-host"}, {"task_name": "unknown here"}], ids=str)
def test_a_result_that_can_be_read_is_the_others(holder: dict[str, Any]) -> None:
    result = duplicate("cache+memory://", holder)
    assert result.state == "PENDING"
    result.backend.store_result(result.id, 42, "SUCCESS")

    assert result.get(timeout=1) == 42


@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_an_own_task_id_is_no_reason_to_send_a_duplicate_and_it_ends_and_names_the_other_call(policy: str) -> None:
    results, mine = f"file://{tempfile.mkdtemp()}", uuid()
    refused: Any = pytest.raises(LockHeld) if policy == "raise" else nullcontext()
    with refused:
        duplicate(results, {}, {"task_id": mine}, lock_on_conflict=policy)

    end = Celery(backend=results, set_as_current=False).AsyncResult(mine)
    assert end.state == "REVOKED"
    assert end.result.args[3] == "unpublished"


@pytest.mark.parametrize("policy", ["skip", "raise", "wait"])
def test_a_duplicate_that_is_not_sent_is_told_in_the_log_and_by_a_signal(
    caplog: pytest.LogCaptureFixture, policy: str
) -> None:
    caplog.set_level("INFO", "celery_singleton_lock")
    told: list[Any] = []

    def hear(key: str, holder: Holder, outcome: str, **_: Any) -> None:
        told.append((key, holder.task_id, outcome))

    signals.lock_conflict.connect(hear)
    with suppress(LockHeld):
        duplicate("cache+memory://", {}, lock_on_conflict=policy)
    signals.lock_conflict.disconnect(hear)

    ((key, standing, outcome),) = told
    (line,) = [each for each in caplog.messages if each.startswith("lock.conflict ")]
    assert outcome == "unpublished"
    assert line.startswith(f"lock.conflict key={key} task_id=None holder={standing} ")
    assert line.endswith("outcome=unpublished")


@pytest.fixture
def black_hole() -> Iterator[str]:
    """A store that takes connections, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"redis://127.0.0.1:{server.getsockname()[1]}/0"


@pytest.mark.parametrize("store", ["black_hole", "no store"])
def test_a_publisher_that_no_store_tells_its_time_goes_by_its_own_clock_at_once(
    request: pytest.FixtureRequest, store: str
) -> None:
    url = request.getfixturevalue("black_hole") if store == "black_hole" else "redis://127.0.0.1:1/0"
    task, began_at = made(url, lock_on_conflict="rerun"), time.monotonic()

    sent = headers_of(task, lambda: [task.delay(number) for number in range(100)])
    published = [headers["singleton_lock"]["published"] for headers in sent]

    # The first call alone waits, for half a second, but the machine may stand still for some seconds.
    assert time.monotonic() - began_at < 20
    assert published == sorted(published)
    assert abs(published[-1] / 1e6 - time.time()) < 20


def levels_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.levelname for record in caplog.records if record.getMessage().startswith("lock.unanswered ")]


@pytest.mark.parametrize("policy", ["raise", "reschedule"])
def test_ten_calls_wait_once_for_a_store_that_is_away(
    caplog: pytest.LogCaptureFixture, black_hole: str, policy: str
) -> None:
    caplog.set_level("INFO", "celery_singleton_lock")
    task, refused = made(black_hole, lock_mode="until_executed", lock_on_store_error=policy), []

    with Watch() as watch:
        for number in range(10):
            try:
                task.delay(number)
            except StoreError as error:
                refused.append(str(error))

    # Each alone would wait for two seconds. A busy machine may need more than one, for which the silence is remembered.
    assert 0.9 < watch.seconds < 12
    assert levels_of(caplog)[:1] == ["WARNING"]
    assert levels_of(caplog).count("INFO") >= 5
    assert len(refused) == (10 if policy == "raise" else 0)


def test_a_call_that_is_sent_although_it_makes_no_key_is_told(caplog: pytest.LogCaptureFixture) -> None:
    made(lock_mode="until_executed", typing=False).apply_async((1, 2, "too many"))

    assert "WARNING" in [record.levelname for record in caplog.records if "lock.unmarked task=" in record.getMessage()]


def test_a_call_that_is_sent_although_the_store_refuses_its_mark_is_told(caplog: pytest.LogCaptureFixture) -> None:
    task = made(lock_mode="until_executed")
    store_of(task.app).call("SET", task.lock_key_for(1), "of another program", "EX", "60")

    task.apply_async((1,), link=task.si(2))

    assert levels_of(caplog) == ["WARNING"]
    with pytest.raises(ConfigurationError, match="WRONGTYPE"):
        task.delay(1)


def test_headers_of_the_caller_stay_the_callers_and_a_key_of_ours_is_refused() -> None:
    task, headers = unique("skip"), {"mine": 1}

    task.apply_async(headers=headers)

    assert headers == {"mine": 1}
    with pytest.raises(ConfigurationError, match="give a header of your own another name"):
        task.apply_async(headers={"singleton_lock": "mine"})


def test_an_eager_call_that_never_begins_is_queued_no_longer() -> None:
    def refuse(*_: Any) -> None:
        raise ValueError("not today")

    task = unique("raise", before_start=refuse)
    task.app.conf.task_always_eager = True

    assert task.apply_async().failed()

    task.app.conf.task_always_eager = False
    assert task.delay().id


def sent_by(call: Callable[[Any], Any], **options: Any) -> list[Any]:
    task = made(**options)
    return [headers["singleton_lock"] for headers in headers_of(task, lambda: call(task))]


@pytest.mark.parametrize("call", [{"args": (1, "two")}, {"kwargs": {"number": 1}}, {"args": [None], "countdown": 1}])
def test_a_usual_call_tells_when_it_was_published_and_nothing_else(call: dict[str, Any]) -> None:
    before = time.time_ns() // 1000

    (published,) = sent_by(lambda task: task.apply_async(**call))

    assert before <= published <= time.time_ns() // 1000


@pytest.mark.parametrize(
    ("options", "args"),
    [
        ({"lock_key": "{number}"}, (1,)),
        ({"lock_key": lambda number, other: number}, (1, 2)),
        ({"lock_mode": "until_and_while_executing", "lock_name": "unique-in-the-queue"}, (1,)),
        ({}, (1, [2, {"three": 4}])),
    ],
)
def test_a_key_that_is_needed_at_once_or_made_by_user_code_travels_with_the_call(
    options: dict[str, Any], args: tuple[Any, ...]
) -> None:
    keys: list[str] = []

    def call(task: Any) -> None:
        task.apply_async(args)
        keys.append(task.lock_key_for(*args))

    (notes,) = sent_by(call, **options)

    assert [notes["key"]] == keys


def test_a_call_that_was_given_the_headers_of_another_has_an_age_of_its_own() -> None:
    def call(task: Any) -> None:
        first = {"singleton_lock": {"task_id": "another", "published": 1}}
        task.apply_async((1,), headers=first)
        # As a retry has it.
        task.apply_async((1,), headers=first, task_id="another")

    new, again = sent_by(call)

    assert new["published"] > 1
    assert again["published"] == 1


def test_a_call_whose_options_are_given_by_position_is_published_as_any_other() -> None:
    task = unique("skip")
    first = task.apply_async((1,), {}, "the-first", None, None)

    assert first.id == "the-first"
    assert task.apply_async((1,), None, None, None).id == "the-first"
    with pytest.raises(TypeError):
        task.apply_async((1,), None, None, None, None, None, None, "one too many")
    with pytest.raises(TypeError):
        task.apply_async((1,), None, "by position", task_id="by name")
