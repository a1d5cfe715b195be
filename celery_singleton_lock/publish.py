"""Publishes calls.

In a queue mode, a call is not sent if an equal call is queued, has begun a cool-down, or runs (in `until_executed`).
"""

import os
import socket
import time
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from celery import Task, states, uuid
from celery._state import get_current_task
from celery.app.routes import MapRoute
from celery.result import AsyncResult, EagerResult

from celery_singleton_lock import signals
from celery_singleton_lock.definition.keys import are_plain, label_of
from celery_singleton_lock.definition.options import LockOptions
from celery_singleton_lock.definition.settings import store_of
from celery_singleton_lock.errors import ConfigurationError, SingletonLockError, StoreError, StoreRefused
from celery_singleton_lock.leases.counters import count, record
from celery_singleton_lock.log import log
from celery_singleton_lock.runs import endings, message
from celery_singleton_lock.runs.run import ASKING, Run
from celery_singleton_lock.stores.clock import clock
from celery_singleton_lock.stores.records import Facts, Holder, PublishMode

# Seconds in which a silent store is not asked again.
_MEMORY = 1.0
# For each silent server: when to ask it again, and the arguments of the `StoreError` to report until then.
_silences: WeakKeyDictionary[Hashable, tuple[float, str, str]] = WeakKeyDictionary()

# Somebody waits for a call with one of these options: it is in a canvas, has callbacks, or is a retry.
_WAITED_FOR = frozenset({"group_id", "chord", "chain", "root_id", "parent_id", "link", "link_error", "retries"})
# With one of these, a call that cannot have a key is sent all the same, and its run fails. If the publisher raised the
# error, no result would be stored, and the canvas or the retry would hang.
_TOLD_BY_A_RESULT = ("group_id", "chord", "parent_id", "retries")

_DESTINATIONS = frozenset({"queue", "exchange", "routing_key"})


def options_by_name(
    task_id: Any = None, producer: Any = None, link: Any = None, link_error: Any = None, shadow: Any = None, **rest: Any
) -> dict[str, Any]:
    return {"task_id": task_id, "producer": producer, "link": link, "link_error": link_error, "shadow": shadow, **rest}


def _known_of(
    task: Task, args: Any, kwargs: Any, options: Mapping[str, Any]
) -> tuple[message.Notes, str | None, Run | None]:
    """The call's notes so far; its key if known; and, if a body publishes its own retry, the run of that body.

    A requeued call, or a retry with the same arguments, keeps its key: serialised arguments, or a new version of the
    code, could make another key.
    """
    task_id = options.get("task_id")
    run = message.run_of(task.request) if options.get("retries") else None
    if run is not None and run.phase is not ASKING and str(task_id) == run.task_id:
        return run.notes.of_the_call(), run.key if _has_arguments(run, args, kwargs) else None, run
    headers = options.get("headers")
    # A call without a task id is new, even if a body has handed on its own headers.
    notes = message.Notes.of(headers if headers and isinstance(headers, Mapping) else None, task_id or "")
    dead = message.of_a_dead_run.get()
    if options.get("retries") and not notes.published:
        # Celery loses the headers of a retry if one of them is named `headers`.
        if dead is not None:
            notes = dead
        elif task.request.id == task_id:
            notes = message.notes_of(task.request).of_the_call()
    if dead is not None:
        return notes, notes.key, None
    return notes, (notes.key or None) if notes.tries else None, None


def _has_arguments(run: Run, args: Any, kwargs: Any) -> bool:
    try:
        return list(run.args) == list(args or ()) and dict(run.kwargs) == dict(kwargs or {})
    except Exception:  # noqa: BLE001 (whatever an argument's `__eq__` raises)
        return False


def leaves_its_key(task: Any, args: Any, kwargs: Any, options: Mapping[str, Any]) -> bool:
    """Whether the worker makes the key, so that only the time of publication has to be noted."""
    return (
        task._leaves_its_key  # noqa: SLF001 (ours)
        and are_plain(args or ())
        and (not kwargs or are_plain(kwargs.values()))
        # Look for an origin only if there are options: only `replace` sets one, and it always passes options.
        and not (options and (options.get("headers") or options.get("retries") or message.origin.get()))
    )


def publish(task: Task, args: Any, kwargs: Any, options: dict[str, Any], send: Callable[..., Any]) -> Any:
    """Publish a call. If an equal call keeps it from being sent, return the result of that call."""
    # Read `lock_options` first: reading waits until the task is bound. An unbound task has no request.
    wanted = task.lock_options
    is_retry = bool(options.get("retries"))
    notes, key, run = _known_of(task, args, kwargs, options)
    problem = None
    try:
        if key is None:
            key = task.lock_key_for(*(args or ()), **(kwargs or {}))
    except (TypeError, ValueError) as error:
        # Raise only errors of ours. Celery may accept such arguments, with `typing=False` or a pydantic model.
        if isinstance(error, ConfigurationError) and not any(map(options.get, _TOLD_BY_A_RESULT)):
            raise
        key = ""
        problem = error
    if run is not None:
        run.store_retry(run.retry_error, key)
    if notes.tries or is_retry:
        send = partial(_send_again, task, send)
    task_id = options.get("task_id") or uuid()
    # A retry is marked only in `until_executed`. In other queue modes, a call counts as queued until its body begins.
    is_marked = wanted.mode == "until_executed" if is_retry else wanted.unique_in_queue
    counts_as_queued = bool(key and is_marked)
    # A requeued call, which has `tries`, keeps its notes and its mark.
    if not notes.tries:
        _note_call(task, notes, key, task_id)
        notes.marked = counts_as_queued
    if counts_as_queued and wanted.newest_wins and not (notes.newest or (notes.origin and notes.origin.had_lease)):
        notes.newest = "queued"
    noted = {**options, "task_id": task_id, "headers": message.with_notes(options.get("headers"), notes)}
    if notes.tries or not counts_as_queued:
        sent = send(**noted)
        if problem and wanted.unique_in_queue:
            log.warning("lock.unmarked", "no lock key can be made (%s)", problem, task=task.name, task_id=sent.id)
        return sent
    # A label may need user code, which a main process must not run.
    label = "" if message.of_a_dead_run.get() else label_of(task, key, notes.task_id, args or (), kwargs or {})
    call = _QueuedCall(task, notes, noted, label, bool(options.get("task_id")))
    return _ending_its_mark(task, key, call.publish(send))


def queue_by(task: Task, options: Mapping[str, Any]) -> str:
    """The queue of a call; empty if it cannot be known without calling a router."""
    try:
        wanted = {**task._get_exec_options(), **options}  # noqa: SLF001 (Celery merges them so)
        queue = wanted.get("queue")
        if not queue:
            routes = task.app.amqp.router.routes
            is_table = all(isinstance(each, MapRoute) for each in routes)
            if wanted.get("exchange") or wanted.get("routing_key") or not is_table:
                return ""
            found = next(filter(None, (table(task.name) for table in routes)), None)
            queue = found["queue"] if found else task.app.amqp.default_queue
        return str(getattr(queue, "name", queue))
    except Exception:  # noqa: BLE001 (Celery is going to raise it as well)
        return ""


class _WithoutTtl:
    def __init__(self, producer: Any) -> None:
        self._producer = producer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)

    def publish(self, *args: Any, expiration: Any = None, **options: Any) -> Any:  # noqa: ARG002 (left out)
        return self._producer.publish(*args, **options)


def _send_again(task: Task, send: Callable[..., Any], **options: Any) -> Any:
    """Send without the message TTL that Celery derives from `expires`.

    RabbitMQ would silently drop the message once that TTL is over, and the result would stay RETRY.
    """
    if options.get("expires", task.expires) is None:
        return send(**options)
    with task.app.producer_or_acquire(options.get("producer")) as producer:
        return send(**{**options, "producer": _WithoutTtl(producer)})


def _note_call(task: Task, notes: message.Notes, key: str, task_id: Any) -> None:
    notes.task_id = message.text_of(task_id)
    notes.key = key
    # The main process must not wait for the store.
    if key and not notes.published and task.lock_options.newest_wins and not message.of_a_dead_run.get():
        # Use the store's clock: by the clocks of two publishers, an older call could win.
        with suppress(SingletonLockError):
            notes.published = store_of(task.app).time(key) or 0
    notes.published = notes.published or time.time_ns() // 1000
    origin = message.origin_here()
    if origin is not None and key == origin.key:
        notes.origin = origin


def _is_body_of_chord(task_id: Any) -> bool:
    # The body is published by the last member of the header, or by `celery.chord_unlock`.
    publisher = get_current_task()
    if publisher is None:
        return False
    of_member: Mapping[str, Any] = (publisher.request.chord or {}).get("options") or {}
    return bool(publisher.name == "celery.chord_unlock" or of_member.get("task_id") == task_id)


class _QueuedCall:
    publish_mode: PublishMode = ""
    """How to mark a call that is sent in any case, because somebody waits for it."""

    def __init__(self, task: Any, notes: message.Notes, options: dict[str, Any], label: str, has_own_id: bool) -> None:
        self.task = task
        self.wanted: LockOptions = task.lock_options
        self.store = store_of(task.app)
        self.key = notes.key
        self.notes = notes
        self.options = options
        self.label = label
        self.task_id = notes.task_id
        self.has_own_id = has_own_id
        self.is_retry = bool(options.get("retries"))
        is_waited_for = not _WAITED_FOR.isdisjoint(options) and any(map(options.get, _WAITED_FOR))
        is_waited_for = is_waited_for or (has_own_id and _is_body_of_chord(self.task_id))
        if is_waited_for and message.DUE_HEADER not in options["headers"]:
            # `anyway` ignores a cool-down. `over` also ignores another queued call: the retried call is older.
            self.publish_mode = "over" if self.is_retry else "anyway"

    def publish(self, send: Callable[..., Any]) -> AsyncResult:
        is_asking = True
        try:
            found = self._mark()
            if found is not None and not self.publish_mode and endings.unmark_if_ended(self.task, self.key, found):
                found = self._mark()
            is_asking = False
            if found is None or self.publish_mode:
                return send(**self.options)
        except BaseException as error:
            # End the mark: no message was sent, so the mark would keep out later calls. A signal handler may raise
            # anywhere above. After an error of the store there is no mark, or `_mark` has begun to end it.
            if not (is_asking and isinstance(error, SingletonLockError)):
                endings.unmark(self.store, self.key, self.task_id, may_arrive=is_asking)
            raise
        return self._result_of(found)

    def _mark(self) -> Holder | None:
        part = self.store.servers.part_of(self.key)
        silence = _silences.get(part)
        if silence is not None and clock() < silence[0]:
            self._allow_unmarked(StoreError(*silence[1:]), log.info)
            return None
        try:
            return self._request_mark()
        except StoreRefused as error:
            if not self.publish_mode:
                raise
            self._allow_unmarked(error, log.warning)
        except StoreError as error:
            _silences[part] = clock() + _MEMORY, error.store, f"{error.problem} (less than a second ago)"
            # The request may still arrive, and its mark would outlive the call.
            # A retry keeps the cool-down of its first publication.
            ends = {"ends_cooldown": not self.is_retry, "may_arrive": True, "in_background": True}
            endings.unmark(self.store, self.key, self.task_id, **ends)
            self._allow_unmarked(error, log.warning)
        return None

    def _request_mark(self) -> Holder | None:
        wanted, options = self.wanted, self.options
        seconds, due_for, due_in = _times_queued(self.task, options)
        queue = self.task._usual_queue if _DESTINATIONS.isdisjoint(options) else queue_by(self.task, options)  # noqa: SLF001
        answer = self.store.mark_queued(
            self.key,
            self.task_id,
            seconds,
            limit=wanted.limit if wanted.mode == "until_executed" and not self.publish_mode else 0,
            cooldown=0.0 if self.is_retry else wanted.min_hold,
            label=self.label,
            sent=self.publish_mode,
            queue=queue,
            # A caller may reuse its own task id. The time of publication tells the calls apart.
            published=self.notes.first_published if self.has_own_id or wanted.newest_wins else 0,
            due_for=due_for,
            newest=wanted.newest_wins,
            due_in=due_in,
            within=wanted.wait_timeout if wanted.newest_wins else None,
        )
        if isinstance(answer, Holder):
            return answer
        if answer.sooner:
            options.update(countdown=max(0.0, due_in - answer.sooner), eta=None)
        return None

    def _allow_unmarked(self, error: StoreError, write: Callable[..., None]) -> None:
        policy = self.wanted.on_store_error
        outcome = "raised" if policy == "raise" and not self.publish_mode else "published"
        write("lock.unanswered", "%s", error, key=self.key, task_id=self.task_id, outcome=outcome)
        count(self.store, self.key, "unanswered", self.task.name, policy)
        record(self.store, self.key, "unanswered", outcome, self.task.name, _facts_of(self.task_id))
        if outcome == "raised":
            raise error

    def _result_of(self, found: Holder) -> AsyncResult:
        task, wanted = self.task, self.wanted
        if self.has_own_id:
            self._revoke_unsent(found)
        self._report_unpublished(found)
        result: AsyncResult = task.AsyncResult(found.task_id)
        result.ignored = bool(self.options.get("ignore_result", task.ignore_result))
        # If only the cool-down of a call is left, the call has ended, and its result may have expired.
        is_over = wanted.mode == "until_executed" and found.state == "cooldown"
        is_there = endings.has_result(task, found) and not (is_over and endings.final_result(task, result.id) is None)
        if not (result.ignored or is_there):
            # Otherwise `get` would wait for ever.
            state, value = states.SUCCESS, wanted.skip_result
            if not wanted.skips_with_result:
                state, value = states.REVOKED, self._revoked(result.id, ", and its result cannot be read here")
            result._maybe_set_cache({"task_id": result.id, "status": state, "result": value, "children": []})  # noqa: SLF001
        return result

    def _revoked(self, holder_task_id: str | None, more: str = "") -> endings.CallRevoked:
        text = f"lock key={self.key}: not sent, because of task_id={holder_task_id}{more}"
        return endings.CallRevoked(text, self.key, holder_task_id, "unpublished")

    def _revoke_unsent(self, found: Holder) -> None:
        """Store REVOKED under the task id that the caller has chosen: somebody may wait for it."""
        is_ignored = self.options.get("ignore_result") or message.DUE_HEADER in self.options["headers"]
        if is_ignored or self.task_id == found.task_id or endings.why_unreadable(self.task):
            return
        try:
            self.task.backend.store_result(self.task_id, self._revoked(found.task_id), states.REVOKED)
        except Exception as error:  # noqa: BLE001 (whatever a backend raises)
            log.warning("lock.result_failed", "%s", error, key=self.key, task_id=self.task_id)

    def _report_unpublished(self, found: Holder) -> None:
        name = self.task.name
        log.tell_of_conflict(self.key, None, found, "unpublished")
        count(self.store, self.key, "conflicts", name, "unpublished")
        call = _facts_of(self.task_id if self.has_own_id else "", self.label)
        record(self.store, self.key, "conflict", "unpublished", name, call, found.task_id)
        signals.lock_conflict.send(sender=self.task, key=self.key, holder=found, outcome="unpublished")
        if self.wanted.on_conflict == "raise" or found.task_id is None:
            raise found.refusal


def _ending_its_mark(task: Task, key: str, result: Any) -> Any:
    """Make `result.revoke()` end the mark at once, not when a worker hears of it."""
    if not isinstance(result, AsyncResult) or isinstance(result, EagerResult):
        return result
    task_id = result.id

    def revoke(*args: Any, **options: Any) -> None:
        # A closure over *result* would be a reference cycle.
        task.AsyncResult(task_id).revoke(*args, **options)
        endings.unmark(store_of(task.app), key, message.text_of(task_id))

    vars(result)["revoke"] = revoke
    return result


def _facts_of(task_id: str, label: str = "") -> Facts:
    return Facts(task_id=task_id, hostname=socket.gethostname(), pid=os.getpid(), label=label)


def _times_queued(task: Task, options: Mapping[str, Any]) -> tuple[float, float, float]:
    """The `seconds`, `due_for` and `due_in` of `Store.mark_queued`, all in seconds.

    `due_for` is the time from the due time to `expires`, when the mark ends. It is 0 if `lock_queue_ttl` ends the mark
    earlier.
    """
    due = options.get("countdown") or options.get("eta")
    due_in = max(0.0, endings.seconds_until(task, due)) if due else 0.0
    longest = due_in + task.lock_options.queue_ttl
    expires = options.get("expires", task.expires)
    if expires is None or (left := endings.until_expired(task, expires)) >= longest:
        return longest, 0.0, due_in
    return left, max(endings.A_MOMENT, left - due_in), due_in
