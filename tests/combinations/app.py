"""The app of a stage, for its workers and for who sends: tasks of which the arguments say what the body does."""

import faulthandler
import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from celery import Celery, Task
from celery import signals as celery_signals
from celery.exceptions import Ignore, Reject
from kombu import Exchange, Queue

from celery_singleton_lock import SingletonTask
from tests.combinations.program import TTL, VISIBILITY
from tests.runs.record import Recorded, body, record, work

# All tasks share this name, so the keys of programs differ by their arguments alone.
LOCK = "combined"
# A call of it is on the next key.
OTHER = " other"


class AgainError(Exception):
    """Celery retries this error."""


class RefusedError(Exception):
    """What `before_start` raises."""


class Locked(Recorded, SingletonTask):
    abstract = True

    def before_start(self: Any, task_id: str, args: Any, kwargs: Any) -> None:
        if len(args) > 2 and args[2]["ending"] == "before_start":
            record().write("refused", args[0], task_id=task_id)
            raise RefusedError(args[0])


class Unlocked(Recorded, Task):
    abstract = True


def send_again(task: Any, key: str, number: int, script: Mapping[str, Any]) -> None:
    once = {**script, "retries": "none"}
    if task.request.retries or script["retries"] == "none":
        return
    if script["retries"] == "countdown":
        raise task.retry(countdown=1)
    if script["retries"] == "other arguments":
        raise task.retry(args=(key + OTHER, number, once), kwargs={}, countdown=1)
    task.replace(task.si(key, number, once))


def end(task: Any, ending: str) -> None:
    if ending == "raise":
        raise ValueError(ending)
    if ending == "ignore":
        raise Ignore(ending)
    if ending == "reject":
        raise Reject(ending, requeue=False)
    # Celery drops a limit when a task replaces itself.
    if ending == "terminate" or (ending in ("soft limit", "hard limit") and any(task.request.timelimit or ())):
        work(20)
    if ending == "kill" and _is_first(task.request.id):
        os.kill(os.getpid(), signal.SIGKILL)


def _is_first(task_id: str) -> bool:
    try:
        Path(f"{os.environ['TEST_RECORD']}.{task_id}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def name_of(task: Mapping[str, Any]) -> str:
    return "combined." + "-".join(str(value) for value in task.values())


def key_by_code(key: str, number: int = 0, script: Mapping[str, Any] | None = None) -> str:
    """A worker would make another key of the message than the publisher made of the call."""
    return key if script is None or isinstance(script["sent"], tuple) else f"{key} of a message"


def make_task(app: Celery, task: Mapping[str, Any]) -> None:
    options: dict[str, Any] = {f"lock_{name}": task[name] for name in ("mode", "limit", "min_hold")}
    options |= {f"lock_{name}": task[name] for name in ("wait_timeout", "queue_ttl") if task[name] is not None}
    if task["autoretry"]:
        options |= {"autoretry_for": (Exception,), "default_retry_delay": 1}

    @app.task(
        base=Locked,
        bind=True,
        # Else Celery registers it with the apps of all other stages as well.
        shared=False,
        name=name_of(task),
        lock_name=LOCK,
        lock_key=key_by_code if task["keys"] == "by code" else ("key",),
        lock_on_conflict=task["policy"],
        acks_late=task["late"],
        reject_on_worker_lost=task["late"],
        ignore_result=task["ignore"],
        max_retries=2,
        **options,
    )
    def runs(self: Any, key: str, number: int, script: Mapping[str, Any]) -> int:
        with body(key, script["seconds"], number):
            work(script["seconds"])
            send_again(self, key, number, script)
            if task["autoretry"] and not self.request.retries:
                raise AgainError(key)
            end(self, script["ending"])
        return number


def make_app(setting: Mapping[str, Any]) -> Celery:
    stage = setting["stage"]
    app = Celery("combinations", broker=setting["broker"], backend=setting["results"], set_as_current=False)
    app.conf.update(
        singleton_lock_url=setting["locks"],
        singleton_lock_ttl=TTL,
        # A bound, so that a mark that is left over keeps a slot from the other programs for no longer.
        singleton_lock_queue_ttl=60,
        accept_content=["json", "pickle"],
        result_accept_content=["json", "pickle"],
        broker_connection_retry_on_startup=True,
        broker_transport_options={
            "visibility_timeout": VISIBILITY if stage["redelivers"] else 3600,
            # Else its workers deliver again what those of other stages have, whose timeout is longer.
            **{
                name: f"{name} {setting['queue']}" for name in ("unacked_key", "unacked_index_key", "unacked_mutex_key")
            },
            "unacked_restore_interval": 1,
            "unacked_restore_throttle": 1,
        }
        if setting["broker"].startswith("redis")
        else {"confirm_publish": True},
        # The solo pool acknowledges nothing while a body runs; RabbitMQ waits for that, and Celery looks now and then.
        worker_prefetch_multiplier=8 if stage["pool"] == "solo" else 1,
        task_track_started=stage["track"],
        task_default_queue=setting["queue"],
        result_expires=600,
        # A chord of the database is polled. On a quorum queue Celery counts whole seconds, and wants at least one.
        result_chord_retry_interval=1,
    )
    if stage["broker"] == "quorum":
        queue = Queue(
            setting["queue"],
            Exchange(setting["queue"], type="topic"),
            routing_key=setting["queue"],
            queue_arguments={"x-queue-type": "quorum"},
        )
        app.conf.update(
            task_queues=[queue],
            task_default_exchange=setting["queue"],
            task_default_exchange_type="topic",
            task_default_routing_key=setting["queue"],
            task_default_queue_type="quorum",
        )
    for task in setting["tasks"]:
        make_task(app, task)

    @app.task(base=Unlocked, bind=True, shared=False, name="step")
    def step(self: Any, key: str, number: int = 0) -> int:
        record().write("step", key, task_id=self.request.id, number=number)
        return number

    return app


@celery_signals.task_revoked.connect
def _revoked(sender: Any, request: Any, **_: Any) -> None:
    record().write("revoked", task_id=request.id)


@celery_signals.task_failure.connect
def _failed(sender: Any, task_id: str, exception: BaseException, **_: Any) -> None:
    # Also in the main process, for a child that was killed.
    record().write("failed", task_id=task_id, error=type(exception).__name__)


if "COMBINATIONS_SETTING" in os.environ:
    # A worker that does not end when it is told to leaves in its log where it hangs.
    faulthandler.register(signal.SIGUSR2)
    app = make_app(json.loads(Path(os.environ["COMBINATIONS_SETTING"]).read_text(encoding="utf-8")))
