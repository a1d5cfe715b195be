"""The bugs of celery-singleton (S), -once (O), -heimdall (H) and -once-task (T), each as a test of ours.

Those of them that lock when a task is published have no counterpart yet: nothing is locked then.
"""

import os
import pickle
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import TaskRevokedError

from celery_singleton_lock import ConfigurationError, LockHeld, LockLost, SingletonTask
from celery_singleton_lock.settings import store_of
from celery_singleton_lock.stores import store_from_url
from celery_singleton_lock.stores.records import Answer, Claim, Conflict
from tests.acceptance.conftest import APP
from tests.gates import open_gate
from tests.proxy import Proxy
from tests.recorder import Recorder, overlaps
from tests.servers import Server
from tests.waiting import until
from tests.workers import Worker, workers

pytestmark = pytest.mark.prove

PROMPTLY = 30


@pytest.fixture
def worker(env: dict[str, str], tasks: Any) -> Iterator[Worker]:
    with workers(APP, env, 1, concurrency=3) as (worker,):
        yield worker


@pytest.fixture
def app(valkey: Server) -> Celery:
    app = Celery("here", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.singleton_lock_url = valkey.url
    return app


def hold(tasks: Any, recorder: Recorder, seconds: float = 30) -> Any:
    held = tasks.by_policy["skip"].delay("k", 1, seconds)
    until(lambda: recorder.events("enter"), "the holder runs")
    return held


@pytest.mark.parametrize("bug", ["S1", "O1", "O5", "H2", "T1"])
def test_an_expired_run_frees_nobody_elses_lock(valkey: Server, bug: str) -> None:
    store = store_from_url(valkey.url)
    expired, successor = Claim(f"{bug}", "a", 0.05), Claim(f"{bug}", "b", 30.0)
    store.acquire(expired)
    until(lambda: not isinstance(store.acquire(successor), Conflict), "the successor has it")

    assert store.release(expired, 1) is Answer.TAKEN
    assert isinstance(store.acquire(Claim(f"{bug}", "c", 30.0)), Conflict)


@pytest.mark.parametrize("bug", ["S2", "O3", "H4", "T3"])
def test_a_retry_does_not_meet_its_own_lock(tasks: Any, worker: Worker, recorder: Recorder, bug: str) -> None:
    assert tasks.retrying.delay(bug, attempts=2, finish=0.1).get(timeout=20) == 2
    assert len(recorder.events("enter")) == 3


def test_s3_a_call_by_name_from_anywhere_is_settled_when_it_runs(
    tasks: Any, worker: Worker, recorder: Recorder
) -> None:
    holder = hold(tasks, recorder)

    with pytest.raises(TaskRevokedError, match=holder.id):
        tasks.app.send_task("skip", ("k",)).get(timeout=PROMPTLY)


def test_s6_a_second_app_locks_in_its_own_store(valkey: Server) -> None:
    apps = [Celery(name, set_as_current=False) for name in ("one", "two")]
    for number, app in enumerate(apps):
        app.conf.singleton_lock_url = f"{valkey.url[:-1]}{number}"

    first, second = (store_of(app) for app in apps)
    assert not isinstance(first.acquire(Claim("k", "a", 30.0)), Conflict)
    assert not isinstance(second.acquire(Claim("k", "b", 30.0)), Conflict)


@pytest.mark.parametrize("url", ["redis://h/1", "rediss://h/1", "unix:///tmp/s", "redis+socket:///tmp/s"])
def test_s7_h11_every_url_that_celery_takes_for_redis_is_taken(url: str) -> None:
    app = Celery("urls", broker="memory://", backend=url, set_as_current=False)
    assert store_of(app).address


@pytest.mark.parametrize("error", [LockHeld("k", "id", 1.5), LockLost("k", "taken"), ConfigurationError("x")])
def test_s9_errors_survive_a_pickle(error: Exception) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.args, str(again)) == (type(error), error.args, str(error))


def test_o4_a_run_that_is_killed_does_not_keep_its_key_for_an_hour(
    tasks: Any, worker: Worker, recorder: Recorder
) -> None:
    hold(tasks, recorder)
    os.kill(recorder.events("enter")[0].pid, signal.SIGKILL)

    until(lambda: not tasks.by_policy["skip"].lock_holders("k"), "the key is free", timeout=8)
    assert tasks.by_policy["skip"].delay("k", 2).get(timeout=PROMPTLY) == 2


def test_o6_o7_o8_h7_t6_the_key_is_the_same_wherever_it_is_made(app: Celery) -> None:
    @app.task(base=SingletonTask)
    def call(a: Any, b: Any = 5) -> None: ...

    assert call.lock_key_for((1, 2)) == call.lock_key_for([1, 2], 5) == call.lock_key_for(b=5, a=[1, 2])
    assert call.lock_key_for({1: "x"}) == call.lock_key_for({"1": "x"})
    assert call.lock_key_for("a", "b-c") != call.lock_key_for("a-b", "c")
    assert call.lock_key_for(1) != call.lock_key_for("1")


def test_o10_user_and_password_are_understood(valkey: Server) -> None:
    with valkey.client() as client:
        client.acl_setuser("us@er", enabled=True, passwords=["+p@ss/w:rd"], keys=["*"], commands=["+@all"])
        url = f"redis://us%40er:p%40ss%2Fw%3Ard@127.0.0.1:{valkey.port}/0"
        try:
            assert store_from_url(url).holders("k") == []
        finally:
            client.acl_deluser("us@er")


def test_h1_a_refused_duplicate_leaves_the_lock_alone(tasks: Any, worker: Worker, recorder: Recorder) -> None:
    holder = hold(tasks, recorder)
    for _ in range(3):
        with pytest.raises(TaskRevokedError, match=holder.id):
            tasks.by_policy["skip"].delay("k").get(timeout=PROMPTLY)

    assert len(recorder.events("enter")) == 1


@pytest.mark.parametrize("bug", ["H3", "T5"])
def test_a_second_delivery_neither_runs_nor_writes_beside_the_first(
    tasks: Any, worker: Worker, recorder: Recorder, bug: str
) -> None:
    first = tasks.by_policy["skip"].apply_async((bug, 1), {"gate": bug})
    until(lambda: recorder.events("enter"), "it runs")
    tasks.by_policy["skip"].apply_async((bug, 2), task_id=first.id)
    until(lambda: "outcome=parked" in worker.log(), "the second has come")

    assert first.state not in ("SUCCESS", "FAILURE", "REVOKED", "RETRY")
    open_gate(recorder, bug)
    assert first.get(timeout=PROMPTLY) == 1
    assert overlaps(recorder.events()) == []


def test_h5_a_run_costs_two_round_trips(tasks: Any, env: dict[str, str], valkey: Server, recorder: Recorder) -> None:
    with (
        # No renewal, even if the machine pauses meanwhile.
        workers(APP, {**env, "TEST_TTL": "60"}, 1, concurrency=3),
        valkey.client() as client,
        valkey.client(database=2) as locks,
    ):
        tasks.by_policy["skip"].delay("warm").get(timeout=PROMPTLY)
        # What was counted is handed over; the next time is five seconds after the next run has begun.
        until(lambda: locks.exists("singleton:v3:stats"), "it is handed over")
        client.config_resetstat()
        tasks.by_policy["skip"].delay("k").get(timeout=PROMPTLY)
        stats = client.info("commandstats")
        assert sum(stats.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("eval", "evalsha")) == 2


def test_h6_a_direct_call_takes_no_lock(app: Celery, valkey: Server) -> None:
    @app.task(base=SingletonTask)
    def call() -> int:
        with valkey.client() as client:
            return len(client.keys("singleton:*"))

    assert call() == 0


def test_h10_a_conflict_leaves_the_task_object_as_it_was(app: Celery) -> None:
    @app.task(base=SingletonTask, lock_on_conflict="raise", max_retries=2)
    def call() -> None: ...

    before = dict(vars(type(call)))
    store_of(app).acquire(Claim(call.lock_key_for(), "a", 30.0))
    with pytest.raises(LockHeld):
        call.apply(throw=True)

    assert {name: value for name, value in vars(type(call)).items() if before.get(name) != value} == {}
    assert call.max_retries == 2


def test_t2_a_store_that_is_away_is_no_duplicate(
    tasks: Any, env: dict[str, str], recorder: Recorder, valkey: Server
) -> None:
    with Proxy(valkey.port) as proxy:
        proxy.reset()
        with workers(APP, {**env, "TEST_LOCKS": f"{proxy.url[:-1]}2"}, 1) as (worker,):
            result = tasks.by_policy["skip"].delay("k", 1)
            until(lambda: "lock.unanswered" in worker.log(), "it says so")
            proxy.forward()

            assert result.get(timeout=20) == 1


def test_t4_a_warm_shutdown_frees_no_key_of_a_run_that_goes_on(tasks: Any, worker: Worker, recorder: Recorder) -> None:
    hold(tasks, recorder, seconds=2)
    worker.send(signal.SIGTERM)
    while not recorder.events("leave"):
        held = bool(tasks.by_policy["skip"].lock_holders("k"))
        assert held or recorder.events("leave")
