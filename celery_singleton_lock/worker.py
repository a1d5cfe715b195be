"""The main process of a worker: its start, its requests, and the loss of its broker.

The main process makes the token of each run. With the token it can renew or release the lease of a child.
"""

import os
import time
from collections.abc import Callable, Hashable
from contextlib import closing, suppress
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from billiard.einfo import ExceptionWithTraceback
from billiard.exceptions import Terminated, WorkerLostError
from celery.app.task import Context
from celery.bootsteps import StartStopStep, Step
from celery.concurrency.solo import TaskPool as SoloPool
from celery.utils.imports import load_extension_class_names, symbol_by_name
from celery.worker import state
from celery.worker.control import inspect_command
from celery.worker.request import Request

from celery_singleton_lock.checks import check_beat, check_worker, try_store
from celery_singleton_lock.definition import keys, options, settings
from celery_singleton_lock.errors import ConfigurationError, SingletonLockError, StoreError
from celery_singleton_lock.leases import counters, interrupt
from celery_singleton_lock.leases.background import Background, background
from celery_singleton_lock.leases.holding import Holding
from celery_singleton_lock.leases.line import InLine
from celery_singleton_lock.log import log
from celery_singleton_lock.runs import endings, policies, run
from celery_singleton_lock.runs.message import DELIVERY, HEADER, Notes, for_a_dead_run, hidden_in, text_of
from celery_singleton_lock.stores.clock import clock
from celery_singleton_lock.stores.records import Holder, new_token
from celery_singleton_lock.stores.redis.inventory import Inventory

# The main process looks after a body that has run for this part of the TTL. By then a healthy child has renewed.
_NEEDS_HELP_AFTER = 0.4
_ROUNDS_PER_TTL = 8
_RENEWAL_BOUND = 2.0  # seconds


class Start(Step):
    """Checks the worker before its pool starts.

    Not by a receiver of a Celery signal: Celery would only log the receiver's error, and start the worker.
    """

    requires = ("celery.worker.components:Pool",)

    def __init__(self, worker: Any, beat: bool = False, **kwargs: Any) -> None:
        check_worker(worker.app, worker.pool_cls)
        # An embedded beat could end only itself, and the worker would go on without a beat.
        if beat and _has_our_scheduler(worker):
            check_beat(worker.app, has_lease=True)
        super().__init__(worker, beat=beat, **kwargs)


def _has_our_scheduler(worker: Any) -> bool:
    from celery_singleton_lock.beat import SingletonSchedulerMixin  # noqa: PLC0415 (of no use but in a beat)

    # Celery itself reports a scheduler that cannot be imported.
    with suppress(ImportError, AttributeError):
        aliases = dict(load_extension_class_names("celery.beat_schedulers"))
        return issubclass(symbol_by_name(worker.scheduler, aliases), SingletonSchedulerMixin)
    return False


@inspect_command()
def singleton_store(state: Any, bound: float = 0.5, held: str = "", **_: Any) -> dict[str, Any]:
    """Try the store from this worker, whose network and clock may differ from the operator's.

    With *held*, a key that the operator holds now, `sees` in the answer says if this worker finds a holder there.
    """
    try:
        with closing(settings.open_store(state.app)) as store:
            answer: dict[str, Any] = {}
            if not store.is_of_one_process:
                try_store(state.app, bound)
                answer["ahead"] = Inventory(store).latency(bound)[1]
            if held:
                has_our_prefix = held.startswith(keys.start_of_keys(options.prefix_of(state.app)))
                answer["sees"] = has_our_prefix and bool(store.holders(held))
            return answer
    except (ConfigurationError, StoreError) as error:
        return {"problem": options.as_set(state.app, str(error))}


class SingletonRequest(Request):
    has_renewer = False
    _accepted_at = float("inf")
    _held_at_death: Holder | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        eventer = self._eventer
        sends_events = False
        if eventer and eventer.enabled and self._task.send_events:
            # `groups` names the events to send. Without `-E` it is {"worker"}. If it is empty, all are sent.
            sends_events = not eventer.groups or "task" in eventer.groups
        message = self._request_dict
        # A plain tuple, because pickle would add the class name of a `Delivery` to each message.
        message[DELIVERY] = new_token(), clock(), sends_events, self._content_type, hidden_in(message)

    def on_accepted(self, pid: int, time_accepted: float) -> None:
        # Monotonic, unlike Celery's `time_start`, which jumps with the wall clock.
        self._accepted_at = time_accepted
        super().on_accepted(pid, time_accepted)
        # A pool runs all tasks in children, or none.
        if not self.has_renewer:
            if self._runs_in_a_child():
                # The child reports wrong settings.
                with suppress(SingletonLockError):
                    child_lease_renewer.start(self.task.lock_options.ttl)
            type(self).has_renewer = True

    def on_failure(self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False) -> Any:
        error = exc_info.exception
        if isinstance(error, ExceptionWithTraceback):
            # The pool's own errors are still wrapped: only pickling unwraps them.
            error = error.exc
        if isinstance(error, WorkerLostError | Terminated):
            self._release_once_dead(is_redelivered=self._is_redelivered(), has_died=True)
        with for_a_dead_run(self._notes()):
            return super().on_failure(exc_info, send_failed_event=send_failed_event, return_ok=return_ok)

    def on_timeout(self, soft: bool, timeout: float) -> None:
        if not soft:
            task = self.task
            # New in Celery 5.7.
            is_acknowledged = getattr(task, "acks_on_timeout", task.acks_on_failure_or_timeout)
            self._release_once_dead(is_redelivered=task.acks_late and not is_acknowledged)
        super().on_timeout(soft, timeout)

    def _announce_revoked(self, reason: str, terminated: bool, signum: Any, expired: bool) -> None:
        # Unmark first. Otherwise a caller who sees the stored end could be refused the next call.
        self._unmark(has_begun=terminated)
        super()._announce_revoked(reason, terminated, signum, expired)

    def _announce_cancelled(self, *args: Any, **kwargs: Any) -> None:
        """Keep a stored result: Celery would store RETRY over it as the worker shuts down."""
        received = time.time() - (clock() - self._request_dict[DELIVERY][1])
        lease = self.lease
        # Take the earlier time: the publisher's clock may be ahead of ours.
        since = min(lease.claim.message, round(received * 1_000_000)) if lease is not None else 0
        kept = endings.final_result(self.task, self.id, since)
        super()._announce_cancelled(*args, **kwargs)
        if kept is not None:
            about = {"traceback": kept.get("traceback"), "request": self._context}
            self.task.backend.store_result(self.id, kept["result"], kept["status"], **about)

    def _notes(self) -> Notes:
        # The child reports unreadable notes.
        with suppress(ConfigurationError):
            return Notes.of(self.request_dict, self.id)
        return Notes()

    @property
    def lease(self) -> Holding | None:
        # The message may carry anything. The child reports the error.
        with suppress(Exception):
            if self.task.is_lockable and self.key is not None:
                token = self.request_dict[DELIVERY][0]
                options, retries = self.task.lock_options, self.request_dict.get("retries") or 0
                claim = run.claim_of(options, self._notes(), self.key, token, text_of(self.id), retries)
                return Holding(settings.store_of(self.app), claim, sender=self.task)
        return None

    @cached_property
    def key(self) -> str | None:
        with suppress(Exception):
            known: str | None = self.task.lock_key_in(self._notes())
            return known or self.task.lock_key_without_user_code(self.args, self.kwargs)
        return None

    def expect_copies(self) -> None:
        self._note(is_copy=True)

    def _note(self, **noted: Any) -> None:
        # With the task id: a body may hand its headers on to a new call, for which these notes must not count.
        self._request_dict[HEADER] = {**self._notes().header(), "task_id": text_of(self.id), **noted}

    def in_line(self) -> InLine | None:
        notes = self._notes()
        return self.entry_in_line() if notes.rank or notes.waits_as_next else None

    def entry_in_line(self) -> InLine | None:
        lease = self.lease
        if lease is None:
            return None
        claim, notes, options = lease.claim, self._notes(), self.task.lock_options
        policy = policies.POLICIES[options.on_conflict].for_call(notes)
        claim.rank = notes.rank
        claim.turn_for = options.redelivered_within if policy.takes_turns else 0.0
        is_later = run.is_later_attempt(Context(self.request_dict), notes)
        policy.complete(claim, options, notes, is_later_attempt=is_later)
        timeout = None if notes.newest else options.wait_timeout
        return InLine(lease.store, claim, float("inf") if timeout is None else timeout)

    def _runs_in_a_child(self) -> bool:
        return self.worker_pid not in (None, os.getpid())

    def find_late_lease(self) -> Holding | None:
        options = self.task.lock_options
        # With `kill`, a child that cannot renew has to die.
        if options.on_lost == "kill" or not self._runs_in_a_child():
            return None
        # A stopped child may never continue, so its lease must expire.
        runs_for_long = time.monotonic() - self._accepted_at > options.ttl * _NEEDS_HELP_AFTER
        return self.lease if runs_for_long and _state_of(self.worker_pid) not in _DEAD + _STOPPED else None

    def _release_once_dead(self, *, is_redelivered: bool, has_died: bool = False) -> None:
        pid, lease = self.worker_pid, self.lease
        if not self._runs_in_a_child() or lease is None:
            return
        options = self.task.lock_options
        # A cool-down would keep out the same call when its message comes again.
        if options.min_hold_on_failure and not (options.unique_in_queue or is_redelivered):
            lease.claim.min_hold = options.min_hold
        pending = lease.pending_release()
        if has_died:
            pending.release = partial(self._release_and_tell, lease, is_lost=interrupt.has_fired(pid, clock()))
        pending.may_release = lambda: _state_of(pid) in _DEAD
        # An acquire that the child sent as it died may still arrive.
        pending.may_arrive = True
        background.submit(pending)
        if not is_redelivered:
            self._unmark(has_begun=True)

    def _release_and_tell(self, lease: Holding, *, is_lost: bool) -> None:
        """Release a dead child's lease. *is_lost*: the kernel timer of `DeadMan` has killed the child."""
        try:
            # Keep the holder: when the release is repeated, the survey may no longer show it.
            holders = lease.store.survey([lease.key])[0].holders
            mine = next((holder for holder in holders if holder.token == lease.claim.token), None)
            self._held_at_death = died = mine or self._held_at_death
            lost = lease.store.release(lease.claim, lease.grant.place).lost
        except StoreError:
            if is_lost and lease.lost_reason is None:
                lease.report_lost("unreachable")
            raise
        # Report the death here, unless another run took the place (`lost`) and reports it. Without `mine`, `lost`
        # proves nothing: an earlier try may have released the lease, and then nobody else reports.
        if died is not None and (lost is None or mine is None):
            self._held_at_death = None
            named = replace(died, task_name=died.task_name or self.task.name)
            log.tell_of_death(lease.key, named, "its pool process died while it held the lock")
            counters.record(lease.store, lease.key, "holder_died", "", self.task.name, died)
            counters.count(lease.store, lease.key, "holder_died", self.task.name)
        if is_lost and lease.lost_reason is None:
            lease.report_lost(lost or "expired")

    def _is_redelivered(self) -> bool:
        """Whether Celery delivers or publishes the message of a dead child again."""
        task = self.task
        is_rejected = task.acks_late and task.reject_on_worker_lost
        has_retries = task.max_retries is None or (self.request_dict.get("retries") or 0) < task.max_retries
        return bool(is_rejected or (getattr(task, "retry_on_worker_lost", False) and has_retries))

    def _unmark(self, *, has_begun: bool) -> None:
        lease = self.lease
        if lease is not None:
            stays = has_begun and self.task.lock_options.min_hold_on_failure
            ends = {"ends_cooldown": not stays, "call_ended": True}
            endings.unmark(lease.store, lease.key, lease.claim.task_id, **ends, in_background=True)


def active_requests() -> list[SingletonRequest]:
    while True:
        # The main thread may change the set meanwhile.
        with suppress(RuntimeError):
            return [request for request in state.active_requests if isinstance(request, SingletonRequest)]


class ChildLeaseRenewer:
    """Renews for children whose heartbeat cannot run, because their body holds the GIL in C."""

    _pause = float("inf")

    def __init__(self) -> None:
        # Not `background`, where a silent store would delay renewals.
        self._thread = Background()

    def start(self, ttl: float) -> None:
        pause = ttl / _ROUNDS_PER_TTL
        if pause < self._pause:
            self._pause = pause
            self._thread.submit(partial(self._look, pause), pause)

    def _look(self, pause: float) -> None:
        # By server: otherwise a silent server would prevent the renewals at others.
        late: dict[Hashable, list[Holding]] = {}
        for request in active_requests():
            # One task's wrong settings must not prevent the renewals of others.
            with suppress(Exception):
                if (lease := request.find_late_lease()) is not None:
                    late.setdefault(lease.store.servers.part_of(lease.key), []).append(lease)
        for leases in late.values():
            with suppress(Exception):
                _renew(leases)
        # A shorter TTL may have started faster rounds.
        if pause == self._pause:
            self._thread.submit(partial(self._look, pause), pause)


def _renew(leases: list[Holding]) -> None:
    store = leases[0].store
    surveys = store.survey([lease.key for lease in leases])
    late = [
        lease.claim
        for lease, survey in zip(leases, surveys, strict=True)
        if any(each.token == lease.claim.token and each.is_unrenewed for each in survey.holders)
    ]
    if late:
        store.renew(late, _RENEWAL_BOUND)


child_lease_renewer = ChildLeaseRenewer()

# States in `/proc/<pid>/stat`; empty if there is no such process.
_DEAD = ("", "Z", "X")
_STOPPED = ("T", "t")


def _state_of(pid: int) -> str:
    with suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return stat.rpartition(")")[2].split()[0]
    # There is no `/proc` on macOS.
    with suppress(OSError):
        os.kill(pid, 0)
        return "R"
    return ""


class LostConnection(StartStopStep):
    """Prepares for a lost broker connection: bodies go on, and the broker may deliver their messages again."""

    requires = ("celery.worker.consumer.connection:Connection",)

    def start(self, consumer: Any) -> None:
        pool: Any = getattr(consumer.pool, "_pool", None)
        if hasattr(pool, "flush"):
            consumer.pool.flush = partial(_flush, pool, pool._cache)  # noqa: SLF001 (there is no other way)
        if isinstance(consumer.pool, SoloPool):
            name = "call_soon_ack" if hasattr(consumer, "call_soon_ack") else "call_soon"
            # From the class: after a reconnection, the consumer's attribute is our wrapper, and would be wrapped again.
            call_soon = getattr(type(consumer), name).__get__(consumer)
            setattr(consumer, name, partial(_acknowledge_at_once, call_soon))

    def stop(self, consumer: Any) -> None:  # noqa: ARG002
        if state.should_stop is None and state.should_terminate is None:
            background.submit(partial(_expect_copies, active_requests()))


def _acknowledge_at_once(call_soon: Callable[..., Any], function: Any, *args: Any, **kwargs: Any) -> Any:
    """As `call_soon`, but acknowledge at once.

    Otherwise the bodies of other due messages would run first, and the broker could deliver this message again.
    """
    if getattr(function, "__name__", "") == "ack_log_error":
        # Celery repeats a failed acknowledgement later.
        with suppress(Exception):
            return function(*args, **kwargs)
    return call_soon(function, *args, **kwargs)


def _expect_copies(running: list[SingletonRequest]) -> None:
    """Let these runs leave done markers. Otherwise a copy that comes after the end would run."""
    silent: dict[Hashable, SingletonLockError] = {}
    for request in running:
        lease = request.lease
        if lease is None:
            continue
        part = lease.store.servers.part_of(lease.key)
        if part not in silent:
            try:
                # A limit of 0 grants no place, and only announces a copy.
                lease.store.acquire(replace(lease.claim, token=new_token(), limit=0, may_be_copy=True))
                continue
            except SingletonLockError as error:
                silent[part] = error
        text = "a copy of this message may run: %s"
        log.warning("lock.done_marker_failed", text, silent[part], key=lease.key, task_id=request.id)


def _flush(pool: Any, jobs: dict[int, Any]) -> None:
    """Flush, but keep running jobs, whose unacknowledged messages would otherwise run again.

    Celery before 5.7 forgets all jobs (celery/celery#8541). Later versions forget the jobs whose start is not reported
    yet. At a stop, also keep jobs that were sent to a process: nobody reads the result of a forgotten job, and its
    process would wait 30 s for a reader.
    """
    stops = state.should_stop is not None
    running = {number: job for number, job in jobs.items() if job.accepted() or (stops and job._write_to)}  # noqa: SLF001
    pool.flush()
    jobs.update((number, job) for number, job in running.items() if not job.ready())
