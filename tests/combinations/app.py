"""The app of a stage, for its workers and for who sends: tasks of which the arguments say what the body does."""

import dataclasses
import faulthandler
import json
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from celery import Celery, Task, current_task
from celery import signals as celery_signals
from celery.exceptions import Ignore, Reject
from kombu import Exchange, Queue
from kombu.common import Broadcast
from pydantic import BaseModel

from celery_singleton_lock import Lock, SingletonTask, current_lease, signals
from tests.combinations.factors import TASK
from tests.combinations.program import TTL, VISIBILITY, Call
from tests.fire.record import Record, now

# Of all keys; a program's own are told apart by their arguments.
LOCK = "combined"
QUEUE = "combinations"
# The header of a message with the number of its call.
SENT_AS = "combined"
# A call of it is on the next key.
OTHER = " other"
_SLICE = 0.05
# A deploy reaches one worker later than another; who sends has it at once.
_LAG = float(os.environ.get("COMBINATIONS_LAG", "0"))


class AgainError(Exception):
    """What Celery is to retry."""


class RefusedError(Exception):
    """What `before_start` raises."""


@dataclass(frozen=True)
class Execution:
    """What is known of one before its body.

    Attributes:
        task_id: Of the message that has brought it: an item of a map has the map's.
        sent_as: The number of the call that the message was sent for.
        again_of: At a second try, the `run` of the first.
    """

    run: str
    label: str
    task_id: str
    is_item: bool
    sent_as: int
    again_of: str = ""


_record: Record | None = None
_runs = count()
_NOBODY = Execution("", "", "", False, -1)
# Not on the request: an item of a map has none of its own.
_execution: ContextVar[Execution] = ContextVar("_execution", default=_NOBODY)
_deployed: ContextVar[Path | None] = ContextVar("_deployed", default=None)


def record() -> Record:
    """The file, opened where it is first needed; who only sends has none."""
    global _record  # noqa: PLW0603 (one for the process)
    if _record is None:
        _record = Record(os.environ.get("COMBINATIONS_RECORD", os.devnull))
    return _record


class Noted:
    """Notes each execution, with or without a body, around the lock."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        execution = _execution_of(self, args)
        run, key = execution.run, execution.label
        token = _execution.set(execution)
        facts = {
            "task": self.name,
            "task_id": execution.task_id,
            "host": self.request.hostname,
            "item": execution.is_item,
        }
        # As it stands on the message: nothing else tells when a call was published first.
        notes = (self.request.headers or {}).get("singleton_lock") or 0
        published = notes if isinstance(notes, int) else notes.get("published", 0)
        record().write("began", key, run, attempt=self.request.retries, published=published, **facts)
        outcome = "died"
        try:
            result = super().__call__(*args, **kwargs)  # type: ignore[misc]
            outcome = "returned"
            return result
        except BaseException as error:
            outcome = type(error).__name__
            raise
        finally:
            _execution.reset(token)
            record().write("ended", key, run, outcome=outcome, **facts)

    def before_start(self: Any, task_id: str, args: Any, kwargs: Any) -> None:
        if len(args) > 2 and args[2]["ending"] == "before_start":
            record().write("refused", args[0], task_id=str(task_id))
            raise RefusedError(args[0])


def _execution_of(task: Any, args: Sequence[Any]) -> Execution:
    # Under fire its runs and those of other tasks are in one record.
    run, label = f"combined-{os.getpid()}-{next(_runs)}", str(args[0]) if args else ""
    is_item = bool(task.request.called_directly)
    # Whose body calls an item is `celery.map` or `celery.starmap`.
    request = current_task.request if is_item else task.request
    # Not from the arguments: an item of a map is nothing but a key.
    sent_as = (request.headers or {}).get(SENT_AS, args[1] if len(args) > 1 else 0)
    return Execution(run, label, str(request.id), is_item, sent_as)


class TriesAgain:
    """Tries once more after an error, where its task declares that, as classes of users do."""

    again: str | None = None

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        except Exception:
            if not self.again:
                raise
            first = _execution.get()
            token = _execution.set(dataclasses.replace(first, run=f"{first.run} again", again_of=first.run))
            try:
                return super().__call__(*args, **kwargs)  # type: ignore[misc]
            finally:
                _execution.reset(token)


class Locked(Noted, TriesAgain, SingletonTask):
    """A task of ours."""

    abstract = True
    deploy: str | None = None

    @property
    def lock_options(self) -> Any:
        """With the policy, or the mode, that this process has by now."""
        options = super().lock_options
        if not self._is_deployed():
            return options
        other = {"mode": self.deploy} if self.deploy in TASK["mode"] else {"on_conflict": self.deploy}
        return dataclasses.replace(options, **other)  # type: ignore[arg-type]

    def _is_deployed(self) -> bool:
        if not self.deploy:
            return False
        file = _deployed.get()
        if file is None and (label := _execution.get().label):
            file = deployed(os.environ["COMBINATIONS_RECORD"], label)
        return file is not None and now() >= float(file.read_text(encoding="utf-8")) + _LAG


def deployed(record_path: str, label: str) -> Path:
    """The file with the moment at which the tasks of the program with this key are deployed."""
    return Path(f"{record_path}.{label.partition(OTHER)[0]}")


@contextmanager
def sending(file: Path) -> Iterator[None]:
    """Who sends inside executes nothing, and is told in this file when the tasks are deployed."""
    token = _deployed.set(file)
    try:
        yield
    finally:
        _deployed.reset(token)


class LockOfCalls(Lock):
    """A `Lock` of a key that calls of the task are on as well."""

    def __init__(self, task: Any, label: str, *, reentrant: bool) -> None:
        super().__init__(LOCK, app=task.app, ttl=TTL, reentrant=reentrant)
        self._key = task.lock_key_for(label, 0, None, *task.more)


class Unlocked(Noted, TriesAgain, Task):
    """The same without a lock: the other steps of a canvas."""

    abstract = True


@contextmanager
def noted(task: Any, key: str, number: int, seconds: float) -> Iterator[None]:
    """Note that the body runs; one that is killed never leaves."""
    execution, lease = _execution.get(), current_lease()
    run = execution.run
    facts = {
        "task_id": execution.task_id,
        "number": number,
        "attempt": task.request.retries,
        "task": task.name,
        "item": execution.is_item,
    }
    held = {"fence": lease.fence if lease else 0, "again_of": execution.again_of}
    record().write("enter", key, run, seconds=seconds, host=task.request.hostname, **held, **facts)
    outcome = "died"
    try:
        yield
        outcome = "returned"
    except BaseException as error:
        outcome = type(error).__name__
        raise
    finally:
        record().write("leave", key, run, outcome=outcome, **facts)


def work(seconds: float) -> None:
    """Be busy for so long, in slices, so that a thread can be interrupted."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(_SLICE)


@contextmanager
def worked(task: Any, key: str, script: Mapping[str, Any]) -> Iterator[None]:
    """Work before what is inside; where the script says so, all of it under a `Lock`, or under one taken twice."""
    if script["lock"] == "none" or not isinstance(task, Locked):
        work(script["seconds"])
        yield
        return
    # Its key comes after the body's own, so that no two wait for each other.
    label, is_taken_again = key + OTHER, script["lock"] == "again inside"
    lock = LockOfCalls(task, label, reentrant=is_taken_again)
    run, facts = _execution.get().run, {"task_id": _execution.get().task_id}
    record().write("asks", label, run, **facts)
    with lock:
        record().write("locked", label, run, **facts)
        try:
            work(script["seconds"])
            with lock if is_taken_again else nullcontext():
                yield
        finally:
            record().write("unlocked", label, run, **facts)


def come_again(task: Any, key: str, number: int, script: Mapping[str, Any]) -> Any:
    """At the first attempt, do what the script says of retries; in eager mode a replacement has a result."""
    once = {**script, "retries": "none"}
    if task.request.retries or script["retries"] == "none":
        return None
    if script["retries"] == "countdown":
        raise task.retry(countdown=1)
    if script["retries"] == "other arguments":
        raise task.retry(args=(key + OTHER, number, once, *task.more), kwargs={}, countdown=1)
    return task.replace(task.si(key, number, once, *task.more))


def end(task: Any, script: Mapping[str, Any]) -> None:
    """End as the script says."""
    ending, is_again = script["ending"], bool(_execution.get().again_of)
    if is_again and (task.again == "with success" or ending == "soft limit"):
        # Such a limit strikes a message once.
        return
    if ending == "raise":
        raise ValueError(ending)
    if ending == "ignore":
        raise Ignore(ending)
    if ending == "reject":
        raise Reject(ending, requeue=False)
    if _will_be_struck(task, ending):
        work(20)
    if ending == "kill" and _is_first(task.request.id):
        os.kill(os.getpid(), signal.SIGKILL)


def _will_be_struck(task: Any, ending: str) -> bool:
    """The message has a limit, which Celery drops when a task replaces itself, or its sender terminates it."""
    return ending == "terminate" or (ending in ("soft limit", "hard limit") and any(task.request.timelimit or ()))


def _is_first(task_id: str) -> bool:
    """Nobody has asked this for the call before."""
    try:
        Path(f"{os.environ['COMBINATIONS_RECORD']}.{task_id}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def name_of(task: Mapping[str, Any]) -> str:
    """The same for the same options."""
    return "combined." + "-".join(str(value) for value in task.values())


def key_by_code(key: str, number: int = 0, script: Mapping[str, Any] | None = None) -> str:
    """Another one for a message than for the call."""
    return key if script is None or isinstance(script["sent"], tuple) else f"{key} of a message"


class Basket(BaseModel):
    """An argument that only pickle carries."""

    fruit: set[str]


def key_of_a_set(key: str, number: int = 0, script: Any = None, basket: Basket | None = None) -> list[str]:
    """A set has no order of its own, so only code can make a key of it."""
    return [key, *sorted(basket.fruit if basket is not None else ())]


_FRUIT = {"apple", "banana", "cherry", "date", "elderberry", "fig", "grape"}
# For `lock_key`.
_KEYS = {"by name": ("key",), "by code": key_by_code, "of a set": key_of_a_set}


def make_task(app: Celery, task: Mapping[str, Any]) -> None:
    """Register what declares these options."""
    is_of_a_set = task["keys"] == "of a set"
    # Retries keep no serialiser but the task's.
    carried = {"more": (Basket(fruit=_FRUIT),), "serializer": "pickle"} if is_of_a_set else {"more": ()}
    again = {"autoretry_for": (Exception,), "default_retry_delay": 1} if task["autoretry"] else {}
    patience = {} if task["wait_timeout"] is None else {"lock_wait_timeout": task["wait_timeout"]}
    queued = {} if task["queue_ttl"] is None else {"lock_queue_ttl": task["queue_ttl"]}

    @app.task(
        base=Unlocked if os.environ.get("COMBINATIONS_PLAIN") else Locked,
        bind=True,
        # Else Celery registers it with the apps of all other stages as well.
        shared=False,
        name=name_of(task),
        lock_name=LOCK,
        lock_key=_KEYS[task["keys"]],
        lock_mode=task["mode"],
        lock_on_conflict=task["policy"],
        lock_limit=task["limit"],
        lock_min_hold=task["min_hold"],
        acks_late=task["late"],
        reject_on_worker_lost=task["late"],
        ignore_result=task["ignore"],
        max_retries=2,
        deploy=task["deploy"],
        again=task["again"],
        **carried,
        **again,
        **patience,
        **queued,
    )
    def runs(self: Any, key: str, number: int = 0, script: Any = None, basket: Any = None) -> int:
        if script is None:
            # An item of a map is nothing but a key.
            number, script = _execution.get().sent_as, Call().script
        with noted(self, key, number, script["seconds"]), worked(self, key, script):
            if (replaced := come_again(self, key, number, script)) is not None:
                return replaced
            if task["autoretry"] and not self.request.retries:
                raise AgainError(key)
            end(self, script)
        return number


def make_tasks(app: Celery, tasks: Sequence[Mapping[str, Any]]) -> None:
    """Register those of programs, and what else is in their canvases."""
    for task in tasks:
        make_task(app, task)

    @app.task(base=Unlocked, bind=True, shared=False, name="step")
    def step(self: Any, key: str, number: int = 0) -> int:
        record().write("step", key, task_id=self.request.id, number=number)
        return number

    @app.task(base=Unlocked, bind=True, shared=False, name="linked")
    def linked(self: Any, key: str, number: int, *, link: str) -> None:
        record().write("linked", key, task_id=self.request.id, number=number, link=link)


def make_app(setting: Mapping[str, Any]) -> Celery:
    """The app of a stage.

    Arguments:
        setting: What the stage has written down: its factors, the URLs of its servers, and the tasks of its programs.
    """
    stage = setting["stage"]
    app = Celery("combinations", broker=setting["broker"], backend=setting["results"], set_as_current=False)
    app.conf.update(
        singleton_lock_url=setting["locks"],
        singleton_lock_ttl=TTL,
        # Bounds, so that a mark or a turn that is left over keeps a slot from the other programs for no longer.
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
        # A chord of the database is asked for once a second.
        result_chord_retry_interval=0.5,
    )
    if stage["broker"] == "broadcast":
        app.conf.task_queues = [Queue(setting["queue"]), Broadcast(f"{setting['queue']}.all")]
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
    make_tasks(app, setting["tasks"])
    return app


def _of_ours(sender: Any) -> bool:
    return getattr(sender, "name", "").startswith("combined.")


@signals.lock_conflict.connect
def _conflict(sender: Any, key: str, holder: Any, outcome: str, **_: Any) -> None:
    if not _of_ours(sender):
        return
    # Who publishes executes nothing, and is told apart by that.
    own = _execution.get()
    record().write("conflict", own.label, own.run, task_id=own.task_id, outcome=outcome, holder=holder.task_id)


@celery_signals.task_revoked.connect
def _revoked(sender: Any, request: Any, **_: Any) -> None:
    if _of_ours(sender):
        record().write("revoked", "", task_id=str(request.id))


@celery_signals.task_failure.connect
def _failed(sender: Any, task_id: str, exception: BaseException, **_: Any) -> None:
    # Also in the main process, for a child that was killed.
    if _of_ours(sender):
        record().write("failed", "", task_id=str(task_id), error=type(exception).__name__)


if "COMBINATIONS_SETTING" in os.environ:
    # A worker that does not end when it is told to leaves in its log where it hangs.
    faulthandler.register(signal.SIGUSR2)
    app = make_app(json.loads(Path(os.environ["COMBINATIONS_SETTING"]).read_text(encoding="utf-8")))
