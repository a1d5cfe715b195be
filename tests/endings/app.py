import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from celery.exceptions import Ignore, Reject

from celery_singleton_lock import LockLost, SingletonTask, current_lease, signals
from celery_singleton_lock.definition.settings import store_of
from tests.acceptance.app import app, recorder

app.conf.update(
    worker_soft_shutdown_timeout=float(os.environ.get("TEST_SOFT_SHUTDOWN", "0")),
    worker_cancel_long_running_tasks_on_connection_loss=bool(os.environ.get("TEST_CANCEL")),
    worker_proc_alive_timeout=30,
)

# Longer than a third of the short ttl, so that each lease has been renewed when its run ends.
BUSY = 1.0
SHORT, LONG = 2.0, 60.0


def task_of(ttl: float, *, late: bool) -> Any:
    name = f"{'long' if ttl == LONG else 'short'}-{'late' if late else 'early'}"

    @app.task(
        base=SingletonTask,
        bind=True,
        name=name,
        lock_key=("key",),
        lock_ttl=ttl,
        lock_on_conflict="reschedule",
        acks_late=late,
    )
    def ends(self: Any, key: str, how: str) -> str:
        lease = current_lease()
        with recorder.body(key, self.request.id, token=lease.token):
            if recorder.is_first(key):
                WAYS[how](self)
        return "ran"

    return ends


def raising(error: BaseException) -> Callable[[Any], None]:
    def way(_: Any) -> None:
        time.sleep(BUSY)
        raise error

    return way


def retry(task: Any) -> None:
    time.sleep(BUSY)
    raise task.retry(countdown=0)


def be_replaced(task: Any) -> None:
    time.sleep(BUSY)
    raise task.replace(task.s(*task.request.args))


def stay(_: Any) -> None:
    time.sleep(10)


def refuse_to_end(_: Any) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            time.sleep(60)
        except BaseException:  # noqa: BLE001 (that is what it is for)
            continue


def crash(_: Any) -> None:
    time.sleep(BUSY)
    os.kill(os.getpid(), signal.SIGSEGV)


WAYS = {
    "return": lambda _: time.sleep(BUSY),
    "raise": raising(ValueError("it fails")),
    "retry": retry,
    "ignore": raising(Ignore()),
    "reject": raising(Reject("it rejects", requeue=False)),
    "be replaced": be_replaced,
    "exit": raising(SystemExit(1)),
    "run out of memory": raising(MemoryError()),
    "stay": stay,
    "refuse to end": refuse_to_end,
    "crash": crash,
}
TASKS = {(ttl, late): task_of(ttl, late=late) for ttl in (SHORT, LONG) for late in (False, True)}


@app.task(base=SingletonTask, bind=True, lock_key=("key",), lock_ttl=3, lock_on_conflict="reschedule")
def aborted(self: Any, key: Any, seconds: float) -> str:
    with recorder.body(key, self.request.id):
        try:
            nap(seconds)
        except LockLost as lost:
            recorder.write("told", key, self.request.id, reason=lost.reason)
            raise
    return "ran"


@signals.lock_lost.connect(weak=False)
def record_loss(sender: Any = None, lease: Any = None, reason: str = "", **_: Any) -> None:
    if getattr(sender, "name", "") == killed.name:
        recorder.write("signalled", lease.key, lease._holding.task_id, reason=reason)


def nap(seconds: float) -> None:
    in_slices = os.environ.get("TEST_SLICES")
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, 0.02) if in_slices else left)


@app.task(
    base=SingletonTask,
    bind=True,
    lock_key=("key",),
    lock_ttl=float(os.environ.get("TEST_TTL_OF_KILLED", "2")),
    # A worker with another pool would not start.
    lock_on_lost="kill" if "prefork" in sys.argv or "--pool" not in sys.argv else "abort",
    lock_on_conflict="reschedule",
)
def killed(self: Any, key: Any, seconds: float) -> str:
    recorder.write("enter", key, self.request.id)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        recorder.write("tick", key, self.request.id)
        time.sleep(0.02)
    recorder.write("leave", key, self.request.id)
    return "ran"


@app.task(base=SingletonTask, bind=True, lock_on_lost=killed.lock_on_lost)
def forgotten_at_its_end(self: Any) -> str:
    store_of(app).call("DEL", self.lock.key)
    return "ran"
