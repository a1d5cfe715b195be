"""Tasks that combine options, for the workers of the acceptance tests: modes with policies, retries with both."""

import gc
import os
from typing import Any
from unittest.mock import patch

from celery import Task, chain, maybe_signature
from celery.exceptions import Ignore
from celery.worker.control import inspect_command
from celery.worker.request import Request
from kombu.exceptions import OperationalError

from celery_singleton_lock import SingletonTask
from tests.acceptance.app import (
    MODES,
    app,
    body,
    by_policy,
    collect,
    note_process,
    process,
    ran,
    recorder,
    retrying_once,
    task_with,
)

__all__ = ["app", "by_policy", "collect"]

app.conf.accept_content = ["json", "pickle"]
app.conf.task_track_started = "TEST_TRACKING" in os.environ
if "TEST_RESULTS" in os.environ:
    app.conf.result_backend = os.environ["TEST_RESULTS"]


def bounded(policy: str) -> dict[str, Any]:
    return {"lock_wait_timeout": 0.5} if policy in ("wait", "reschedule") else {}


moving = task_with("moving", lock_on_conflict=os.environ.get("TEST_MOVING", "rerun"))
never_given_up = {
    policy: task_with(f"never-given-up-{policy}", lock_on_conflict=policy, lock_wait_timeout=1, lock_on_lost="warn")
    for policy in ("rerun", "replace")
}
unique = {
    policy: task_with(
        f"unique-{policy}", lock_mode="until_and_while_executing", lock_on_conflict=policy, **bounded(policy)
    )
    for policy in ("skip", "raise", "wait", "reschedule")
}


waiting_by_mode = {
    mode: task_with(f"waiting-{mode}", lock_mode=mode, lock_on_conflict="wait")
    for mode in ("until_executed", "until_and_while_executing")
}


@app.task(
    base=SingletonTask,
    bind=True,
    lock_key=lambda key, *_, **__: repr(key),
    lock_on_conflict="reschedule",
    max_retries=3,
)
def keyed_by_what_is_no_json(self: Any, key: Any, gate: str | None = None, retries: bool = False) -> int:
    """A tuple is a list once it has been sent, so a worker would make another key than the publisher."""
    body(self, key[0], gate=gate)
    if retries and not self.request.retries:
        raise self.retry(countdown=0)
    return int(self.request.retries)


class Stumbles(SingletonTask):
    abstract = True

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        if kwargs.get("stumbles"):
            raise ValueError("it stumbles")


dying = task_with("dying", lock_mode="until_executed", retry_on_worker_lost=True, default_retry_delay=3, max_retries=2)
stumbling = task_with("stumbling", base=Stumbles, lock_mode="until_executed")


class Reports(SingletonTask):
    abstract = True

    def on_failure(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        recorder.wait_at("it is reported")


reporting = task_with("reporting", base=Reports, lock_mode="until_executed")
ignoring = task_with("ignoring", ignore_result=True)


class Told(Request):
    """A request class of the user's. It tells of each failure that the main process hears of."""

    def on_failure(self, exc_info: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.write("told", self.args[0], self.id, error=type(exc_info.exception).__name__)
        return super().on_failure(exc_info, *args, **kwargs)


class Company(Task):
    abstract = True
    Request = f"{__name__}:Told"


CLASSES: dict[str, tuple[Any, ...]] = {
    "own": (SingletonTask,),
    "behind": (SingletonTask, Company),
    "before": (Company, SingletonTask),
}
told = {
    name: task_with(
        f"request-{name}", base=type(name, bases, {"abstract": True, **({} if Company in bases else {"Request": Told})})
    )
    for name, bases in CLASSES.items()
}


@app.task
def plain(number: int = 0) -> int:
    return number


def key_of_whole_numbers(number: Any, retry_with: Any = None) -> Any:
    if isinstance(number, str):
        raise TypeError("no number")
    return None if isinstance(number, list) else number


def keyed_by_number(mode: str) -> Any:
    @app.task(base=SingletonTask, bind=True, name=f"keyed-{mode}", lock_mode=mode, lock_key=key_of_whole_numbers)
    def keyed(self: Any, number: Any, retry_with: Any = None) -> Any:
        body(self, repr(number))
        if retry_with is not None:
            raise self.retry(args=(retry_with,), kwargs={}, countdown=0)
        return number

    return keyed


keyed = {mode: keyed_by_number(mode) for mode in ("while_executing", "until_executed")}


@app.task(base=SingletonTask, bind=True, lock_key=("key",), lock_on_conflict="reschedule")
def published_by_hand(self: Any, key: str) -> str | None:
    return None if self.request.retries else self.apply_async((key,), retries=1).id


@app.task
def echo(value: Any) -> Any:
    return value


@app.task(bind=True)
def replaced_by(self: Any, canvas: Any) -> Any:
    raise self.replace(maybe_signature(canvas, app))


@app.task(ignore_result=False)
def waits_at(gate: str) -> str:
    recorder.wait_at(gate)
    return gate


@app.task(base=SingletonTask, bind=True, lock_key=("key",), lock_on_conflict="join")
def joined_handing_on(self: Any, key: Any, own_gate: str, *later_gates: str) -> Any:
    body(self, key, gate=own_gate)
    raise self.replace(chain(waits_at.si(gate) for gate in later_gates))


@app.task(base=SingletonTask, bind=True, lock_key=("key",), lock_on_conflict="join")
def joined_going_on(self: Any, key: Any, number: int = 0, by: str = "", gate: str | None = None, end: str = "") -> int:
    if by and not (self.request.retries or self.request.get("replaced_task_nesting")):
        raise self.retry(countdown=0) if by == "retry" else self.replace(self.si(key, number, by, gate, end))
    body(self, key, gate=gate, number=number)
    if end == "ignored":
        raise Ignore
    return number


@app.task(base=SingletonTask, bind=True, lock_key=("key",), lock_on_conflict="join")
def joined_unpublished(self: Any, key: Any, gate: str) -> str:
    """Its first run asks for a retry that the broker does not take."""
    if recorder.is_first(key):
        body(self, key, gate=gate)
        with patch.object(self.app.amqp, "send_task_message", side_effect=OperationalError("away")):
            raise self.retry(countdown=0)
    return "ran"


@inspect_command()
def objects_in_the_main_process(state: Any) -> int:
    gc.collect()
    return len(gc.get_objects())


retrying_by_mode = {
    mode: retrying_once(f"combined-retrying-{mode}", lock_mode=mode, lock_on_conflict="reschedule") for mode in MODES
}
retrying_unique = retrying_once("retrying-unique", lock_mode="until_and_while_executing")
retrying_or_ending = {
    policy: retrying_once(f"retrying-{policy}", lock_on_conflict=policy) for policy in ("skip", "raise")
}
retrying_late = retrying_once("retrying-late", lock_on_conflict="reschedule", acks_late=True)
retrying_replace = retrying_once("retrying-replace", lock_on_conflict="replace")


@app.task(
    base=SingletonTask,
    bind=True,
    lock_key=("key",),
    lock_on_conflict="replace",
    autoretry_for=(Exception,),
    default_retry_delay=0,
    max_retries=5,
)
def replace_autoretrying(self: Any, key: Any, number: int = 0, seconds: float = 0.0) -> int:
    body(self, key, seconds, number=number)
    return number


dying_rerun = {
    "redelivered": task_with("rerun-redelivered", lock_on_conflict="rerun", acks_late=True, reject_on_worker_lost=True),
    "retried": task_with(
        "rerun-retried", lock_on_conflict="rerun", retry_on_worker_lost=True, default_retry_delay=1, max_retries=2
    ),
}
cooling = {
    (mode, after_failure): task_with(
        f"cooling-{mode}-{after_failure}", lock_mode=mode, lock_min_hold=60, lock_min_hold_on_failure=after_failure
    )
    for mode in ("while_executing", "until_executed")
    for after_failure in (True, False)
}
late_and_warned = task_with("late-and-warned", acks_late=True, lock_on_lost="warn", lock_on_store_error="run")
late = task_with("late", acks_late=True)


def key_of_a_child(key: Any, *_: Any, **__: Any) -> Any:
    """Needs what only pool children have, a connection to a database for example."""
    if process["kind"] == "main":
        raise RuntimeError("this process has no connection")
    return key


def key_on_record(key: Any, *_: Any, **__: Any) -> Any:
    note_process("makers of keys")
    return key


def key_of_a_number(key: Any, *_: Any, **__: Any) -> Any:
    return key + 1


keyed_by = {
    "a format": ran("keyed-by-format", lock_key="{key:d}"),
    "a callable": ran("keyed-by-callable", lock_key=key_of_a_number),
    "a callable of children": ran("keyed-by-children", lock_key=key_of_a_child),
    "a callable on record": ran("keyed-on-record", lock_key=key_on_record),
}


mapped = {
    policy: task_with(f"mapped-{policy}", busy=0.2, lock_on_conflict=policy)
    for policy in ("skip", "reschedule", "replace")
}


@app.task(base=SingletonTask, lock_key=("key",))
def calls_directly(key: str, number: int, times: int = 1) -> Any:
    return calls_directly(key, number, times - 1) if times else mapped["skip"](key, number)
