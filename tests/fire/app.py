"""The tasks under fire: every policy, every mode, and a note of each body outside the store of locks."""

import faulthandler
import os
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any

from celery import Celery

from celery_singleton_lock import SingletonTask, signals
from tests.fire.kinds import KINDS, STRIKE, Kind
from tests.runs.record import Recorded, body, execution, record, work

NOT_STRUCK = ("celery", "kombu", "amqp", "billiard", "tests")
DAWDLES = 6.0
NOWHERE = "redis://127.0.0.1:1/0"

app = Celery("fire", broker=os.environ.get("FIRE_BROKER", NOWHERE), backend=os.environ.get("FIRE_RESULTS", NOWHERE))
app.conf.update(
    singleton_lock_url=os.environ.get("FIRE_LOCKS", NOWHERE),
    singleton_lock_replicas=int(os.environ.get("FIRE_REPLICAS", "0")),
    # A call that is lost while it counts as queued keeps the others of its key away for so long.
    singleton_lock_queue_ttl=15,
    singleton_lock_wait_timeout=20,
    broker_connection_retry_on_startup=True,
    broker_connection_max_retries=None,
    # Without confirms, what is published to a broker that dies is lost without a word.
    broker_transport_options={"confirm_publish": True},
    worker_prefetch_multiplier=1,
    worker_soft_shutdown_timeout=float(os.environ.get("FIRE_SOFT_SHUTDOWN", "0")),
    worker_cancel_long_running_tasks_on_connection_loss=bool(os.environ.get("FIRE_CANCEL")),
    task_default_queue="fire",
    result_expires=86400,
)


class FlakyError(Exception):
    """Celery retries this error."""


class StruckError(Exception):
    """The nemesis raises this in the midst of a task, as a limit does."""


class Locked(Recorded, SingletonTask):
    abstract = True


class Sabotaged(Locked):
    """Does everything as it should, but under a key of its own: nobody excludes anybody."""

    abstract = True

    def lock_key_in(self, notes: Any) -> str:
        key = super().lock_key_in(notes)
        return f"{key}:{execution.get().run}" if key else ""


def task_of(kind: Kind) -> Any:
    @app.task(
        base=Sabotaged if os.environ.get("FIRE_SABOTAGE") else Locked,
        bind=True,
        name=kind.name,
        lock_key=("key",),
        lock_name=kind.lock or None,
        lock_on_conflict=kind.policy,
        lock_mode=kind.mode,
        lock_limit=kind.limit,
        lock_ttl=kind.ttl,
        acks_late=kind.late,
        reject_on_worker_lost=kind.late,
        autoretry_for=(FlakyError,),
        default_retry_delay=0,
        max_retries=3,
    )
    def runs(self: Any, key: str, seconds: float) -> str:
        with body(kind.label(key), seconds):
            work(seconds)
            if kind.how == "retry" and self.request.retries < 2:
                raise self.retry(countdown=0.1)
            if kind.how == "fail" and self.request.retries < 1:
                raise FlakyError(key)
        return "ran"

    return runs


def strike(number: int, frame: FrameType | None) -> None:
    """Raise if a body or the library is interrupted, also in the midst of what it calls; Celery is not to be broken."""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("celery_singleton_lock") or frame.f_code is work.__code__:
            raise StruckError(number)
        if module.startswith(NOT_STRUCK):
            return
        frame = frame.f_back


signal.signal(STRIKE, strike)
# A worker that does not end when it is told to leaves in its log where it hangs.
faulthandler.register(signal.SIGUSR2)

TASKS = {name: task_of(kind) for name, kind in KINDS.items()}


@signals.lock_unanswered.connect
def _unanswered(sender: Any, outcome: str, **_: Any) -> None:
    record().write("unanswered", task_id=sender.request.id, outcome=outcome)


@signals.lock_lost.connect
def _lost(sender: Any, lease: Any, reason: str, **_: Any) -> None:
    # In a thread of its own, which does not know the run: a child has one at a time.
    record().write("lost", task_id=lease._holding.task_id, reason=reason)
    if Path(f"{os.environ['TEST_RECORD']}.slow").exists():
        time.sleep(DAWDLES)
