import os
import signal
import time
from typing import Any

from celery import Celery, Task
from celery.signals import worker_init, worker_process_init

from celery_singleton_lock import LockLost, SingletonTask, current_lease
from tests.recorder import Recorder

STORE = os.environ.get("TEST_STORE", "redis://127.0.0.1:6379/0")
TTL = float(os.environ.get("TEST_TTL", "10"))

Base: Any = Task if os.environ.get("TEST_SABOTAGE") else SingletonTask

app = Celery("acceptance", broker=os.environ.get("TEST_BROKER", STORE), backend=STORE.removesuffix("/0") + "/1")
app.conf.update(
    singleton_lock_url=os.environ.get("TEST_LOCKS", STORE.removesuffix("/0") + "/2"),
    singleton_lock_ttl=TTL,
    broker_connection_retry_on_startup=True,
    broker_transport_options={
        "visibility_timeout": float(os.environ.get("TEST_VISIBILITY", "3600")),
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
        # A worker that is killed while it looks for them keeps the others from it for so many seconds.
        "unacked_mutex_expire": 3,
    },
    worker_prefetch_multiplier=1,
    result_expires=600,
)
recorder = Recorder(STORE.removesuffix("/0") + "/3")
process = {"kind": "publisher"}
worker_init.connect(lambda **_: process.update(kind="main"), weak=False)
worker_process_init.connect(lambda **_: process.update(kind="child"), weak=False)


def note_process(what: str) -> None:
    if process["kind"] != "publisher":
        recorder._client.sadd(what, os.getpid())


def body(task: Any, key: Any, seconds: float = 0.0, gate: str | None = None, **facts: Any) -> None:
    lease = current_lease()
    facts["lock"] = lease.key if lease else None
    facts["fence"] = lease.fence if lease else 0
    facts["took_over"] = lease.took_over if lease else False
    # The sabotage test's tasks have none.
    facts["held"] = hasattr(task, "lock") and task.lock.held
    facts["notes"] = task.request.get("singleton_lock")
    with recorder.body(key, task.request.id, **facts):
        time.sleep(seconds)
        if gate:
            recorder.wait_at(gate)


@app.task(base=Base, bind=True, lock_key=("key",), lock_on_conflict="reschedule")
def rescheduled(self: Any, key: Any, number: int = 0, seconds: float = 0.05) -> int:
    body(self, key, seconds)
    return number


def ran(name: str, **options: Any) -> Any:
    @app.task(base=SingletonTask, bind=True, name=f"{__name__}.{name}", **{"lock_key": ("key",), **options})
    def runs(self: Any, key: Any, seconds: float = 0.0) -> str:
        body(self, key, seconds)
        return "ran"

    return runs


skipped = ran("skipped")
skipped_with_result = ran("skipped_with_result", lock_skip_result="was skipped")
refused = ran("refused", lock_on_conflict="raise")
warned = ran("warned", lock_on_lost="warn")
three_at_once = ran("three_at_once", lock_limit=3, lock_on_conflict="wait")


MODES = ("until_executing", "until_executed", "until_and_while_executing")


def retrying_in(mode: str) -> Any:
    @app.task(base=SingletonTask, bind=True, name=f"retrying-{mode}", lock_key=("key",), lock_mode=mode, max_retries=3)
    def retries(self: Any, key: Any, attempts: int = 1, finish: float = 0.0) -> int:
        with recorder.body(key, self.request.id, attempt=self.request.retries):
            try:
                if self.request.retries < attempts:
                    raise self.retry(countdown=0)
            finally:
                time.sleep(finish)
        return int(self.request.retries)

    return retries


retrying = retrying_in("while_executing")
retrying_by_mode = {mode: retrying_in(mode) for mode in MODES}


@app.task(base=SingletonTask, bind=True, lock_key=("key",))
def aborted(self: Any, key: Any, seconds: float) -> str:
    try:
        body(self, key, seconds)
    except LockLost as lost:
        recorder.write("told", key, self.request.id, reason=lost.reason, remaining=self.lock.remaining())
        raise
    return "ran to its end"


def task_with(name: str, base: type = SingletonTask, busy: float = 0.0, **options: Any) -> Any:
    @app.task(base=base, bind=True, name=name, lock_key=("key",), **options)
    def runs(
        self: Any,
        key: Any,
        number: int = 0,
        seconds: float = busy,
        gate: str | None = None,
        fails: bool = False,
        dies: bool = False,
        **_: Any,
    ) -> int:
        body(self, key, seconds, gate, number=number)
        if dies and recorder.is_first(key):
            os.kill(os.getpid(), signal.SIGKILL)
        if fails:
            raise ValueError(number)
        return number

    return runs


by_policy = {
    policy: task_with(policy, lock_on_conflict=policy)
    for policy in ("skip", "raise", "reschedule", "wait", "join", "rerun", "replace")
}
waiting_without_store = task_with("waiting_without_store", lock_on_conflict="reschedule", lock_on_store_error="raise")
impatient = task_with("impatient", lock_on_conflict="reschedule", lock_name="reschedule", lock_wait_timeout=2)
by_mode = {mode: task_with(mode, lock_mode=mode) for mode in MODES}

PAIRS = ("rerun until_executing", "rerun until_and_while_executing", "replace until_and_while_executing")


def in_each_pair(name: str, **options: Any) -> dict[str, Any]:
    pairs = {pair: pair.split() for pair in PAIRS}
    return {
        pair: task_with(f"{name}-{pair}", lock_on_conflict=policy, lock_mode=mode, **options)
        for pair, (policy, mode) in pairs.items()
    }


newest_of = in_each_pair("newest_of")
debounced_of = in_each_pair("debounced_of", lock_wait_timeout=4)
newest_retried = task_with(
    "newest_retried",
    lock_on_conflict="rerun",
    lock_mode="until_and_while_executing",
    autoretry_for=(ValueError,),
    max_retries=1,
    default_retry_delay=0,
)
cooling_after_success = {
    f"{mode}{retries}": task_with(
        f"cooling_after_success-{mode}{retries}",
        lock_mode=mode,
        lock_min_hold=600,
        lock_min_hold_on_failure=False,
        autoretry_for=(ValueError,) if retries else (),
        retry_kwargs={"countdown": 600},
    )
    for mode in ("while_executing", *by_mode)
    for retries in ("", " with retries")
}


rescheduled_in_queue = task_with(
    "rescheduled_in_queue", lock_on_conflict="reschedule", lock_mode="until_and_while_executing"
)


def retrying_once(name: str, **options: Any) -> Any:
    @app.task(base=SingletonTask, bind=True, name=name, lock_key=("key",), max_retries=3, **options)
    def retries(
        self: Any,
        key: Any,
        number: int = 0,
        countdown: float | None = None,
        key_of_retry: str | None = None,
        seconds: float = 0.0,
        gate: str | None = None,
    ) -> int:
        body(self, key, seconds, gate, number=number, attempt=self.request.retries)
        if countdown is not None and not self.request.retries:
            raise self.retry(args=(key_of_retry or key, number), kwargs={"countdown": countdown}, countdown=countdown)
        return number

    return retries


rerun_and_retried = retrying_once("rerun_and_retried", lock_on_conflict="rerun")


@app.task
def collect(results: Any) -> Any:
    return results


@app.task
def after(result: Any) -> Any:
    return ["after", result]
