"""The task base class: a lease is taken before the body runs and given back after it."""

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from functools import cached_property, partial
from typing import Any

from celery import Celery, Task
from celery.app.task import Context
from celery.exceptions import Retry

from celery_singleton_lock import signals
from celery_singleton_lock.again import forget_history
from celery_singleton_lock.conflict import settle, unanswered
from celery_singleton_lock.copies import drop_copy, noting_the_end
from celery_singleton_lock.definition import check_call_order, run_signature
from celery_singleton_lock.errors import ConfigurationError, StoreError
from celery_singleton_lock.joined import NotJoined, joined_result
from celery_singleton_lock.leases.current import running_under
from celery_singleton_lock.leases.interrupt import Interrupt
from celery_singleton_lock.leases.key import KeyChoice, KeyMaker
from celery_singleton_lock.leases.lease import Lease
from celery_singleton_lock.lost import deadman_for, making_way, tell_lost
from celery_singleton_lock.options import OPTIONS, LockOptions, check_task, resolve
from celery_singleton_lock.publish import KEY_HEADER, UNTIL_EXECUTING, is_awaited, is_unique_in_the_queue, publish_once
from celery_singleton_lock.settings import store_of
from celery_singleton_lock.stores.records import Answer, Conflict, Holder
from celery_singleton_lock.successors import succession_for, unpack

TOKEN_HEADER = "lock_token"
"""Where the main process of a worker tells a pool child the token to use."""


class _Unset(Enum):
    UNSET = "unset"


class SingletonTask(Task):
    """A Celery task of which one execution per lock key runs at a time.

    The right to run is a lease in Redis: it lasts *lock_ttl* seconds and is
    renewed for as long as the body runs. A worker that dies stops renewing, and
    the key is free again within one ttl. A run that finds the key held does
    what *lock_on_conflict* says.

    A direct call, `task(...)`, takes no lock; a task that calls itself directly
    goes on under the lease it has. Tasks of Celery itself are never locked.

    Attributes:
        lock_mode: `"while_executing"` (default): one at a time. `"until_executing"`: unique in
            the queue, until the body starts. `"until_executed"`: unique in the queue and
            while it runs. `"until_and_while_executing"`: unique in the queue, and one at a time.
        lock_key: Which arguments make two calls the same. None: all of them. A
            list of parameter names: those; `()`: none, the task as a whole. A
            format string: `"{customer_id}"`. A callable `(*args, **kwargs)`.
        lock_name: First part of the key, by default the task's name. Tasks that
            share it exclude one another.
        lock_ttl: Seconds a lease lasts without renewal, at least 1; by default
            30, so that a killed worker blocks nobody for long and a lease
            survives two missed renewals.
        lock_limit: How many may run at once, by default 1.
        lock_on_conflict: `"skip"` (default), `"raise"`, `"reschedule"`, `"wait"` in place,
            first come, first served, which occupies a place in the pool, `"join"`,
            which ends with the holder's own result or error, `"rerun"`, one more run
            after the present one, with the newest arguments, or `"replace"`, which
            asks the holder to make way.
        lock_skip_result: What a skipped run returns. Unset: it ends as REVOKED.
        lock_wait_timeout: Seconds after which who comes again or waits gives up with `LockHeld`.
        lock_min_hold: Seconds for which the key stays taken, counted from the start
            of a run, even if the run ends earlier. A run that dies does not count.
        lock_on_lost: `"abort"` (default) raises `LockLost` in the body, `"warn"`
            leaves it to the log, the signal and `self.lock.check()`, `"kill"` has the
            kernel kill the pool child at the deadline, even if it is stopped, frozen
            or stuck in C (prefork on Linux; a `ConfigurationError` elsewhere).
        lock_on_store_error: `"reschedule"` (default), `"raise"`, `"run"`
            (unlocked) or `"skip"`, where Redis gives no answer within 5 s.

    None means the app's `singleton_lock_*` setting, and without one the default.
    """

    abstract = True
    Request = "celery_singleton_lock.request:SingletonRequest"

    lock_mode: str | None = None
    lock_key: KeyChoice = None
    lock_name: str | None = None
    lock_limit: int | None = None
    lock_ttl: Any = None
    lock_on_conflict: str | None = None
    lock_skip_result: Any = _Unset.UNSET
    lock_wait_timeout: Any = None
    lock_on_lost: str | None = None
    lock_on_store_error: str | None = None
    lock_min_hold: Any = None
    lock_queue_ttl: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the body under a lease, or end without it as the options say."""
        if self._runs_without_lock():
            return super().__call__(*args, **kwargs)
        interrupt = Interrupt()
        lease = self.lease_for(
            args,
            kwargs,
            # The publisher's, so that a deploy that changes a default does not strand what is queued.
            key=(self.request.headers or {}).get(KEY_HEADER),
            token=self.request.get(TOKEN_HEADER),
            facts=self._facts(),
            succession=succession_for(self, args, kwargs),
            deadman=deadman_for(self),
            on_lost=partial(tell_lost, self, interrupt),
        )
        self.request.lock_lease, self.request.lock_interrupt = lease, interrupt
        try:
            drop_copy(self, lease.key)
            if (result := joined_result(self, lease.key)) is not NotJoined:
                return result
            # Inside the try: a time limit may strike between the server's grant and the next line.
            conflict = lease.acquire()
            if conflict is not None and self._waits_for(lease, conflict):
                conflict = None
            # Once more, because the run that this may be a copy of has perhaps ended meanwhile.
            drop_copy(self, lease.key)
        except StoreError as error:
            if self.lock_options.on_store_error != "run":
                return unanswered(self, lease.key, error)
            return super().__call__(*args, **kwargs)
        else:
            if conflict is not None:
                return settle(self, conflict)
            if lease.arguments:
                args, kwargs = self.request.args, self.request.kwargs = unpack(self, lease.arguments)
            with self._body_of(lease, interrupt):
                return super().__call__(*args, **kwargs)
        finally:
            # Else the next attempt may end before Celery has stored RETRY, over its end: `handlers` gives it back.
            if not isinstance(sys.exception(), Retry):
                self._give_back(lease)

    @property
    def lock(self) -> Lease | None:
        """The lease under which the body runs; None outside a body and without one."""
        lease: Lease | None = self.request.get("lock_lease")
        return lease if lease is not None and lease.granted and lease.unreleased else None

    @cached_property
    def lock_options(self) -> LockOptions:
        """The options of this task, with the app's settings and the defaults filled in.

        Raises:
            ConfigurationError: A setting has a value that is not allowed.
        """
        return resolve(self.app, _own_options(type(self)))

    @property
    def skips_with_result(self) -> bool:
        """A skipped run returns `lock_skip_result`."""
        return self.lock_skip_result is not _Unset.UNSET

    @cached_property
    def _lock_keys(self) -> KeyMaker:
        # Not made in on_bound: another thread may use the task before Celery has bound it.
        return self._key_maker()

    def lock_key_for(self, *args: Any, **kwargs: Any) -> str:
        """The lock key of a call with these arguments.

        Raises:
            TypeError: The task cannot be called like this.
            ConfigurationError: An argument that counts cannot be serialised.
        """
        return self._lock_keys.key(self.lock_options.prefix, args, kwargs)

    def lease_for(self, args: Any, kwargs: Any, key: str | None = None, **more: Any) -> Lease:
        """The lease of a call with these arguments, not asked for yet; *more* goes to `Lease`."""
        options = self.lock_options
        return Lease(
            store_of(self.app),
            key or self.lock_key_for(*args, **kwargs),
            ttl=options.ttl,
            limit=options.limit,
            # Counted from the moment at which it was published, where that is what is unique.
            min_hold=0.0 if is_unique_in_the_queue(self) else options.min_hold,
            queued=is_unique_in_the_queue(self),
            **more,
        )

    def lock_holders(self, *args: Any, **kwargs: Any) -> list[Holder]:
        """Who holds the lock of a call with these arguments now.

        Raises:
            StoreError: The store did not answer within 5 s.
        """
        return store_of(self.app).holders(self.lock_key_for(*args, **kwargs))

    def apply_async(self, args: Any = None, kwargs: Any = None, *rest: Any, **options: Any) -> Any:
        """As Celery's; arguments that can make no lock key fail here, where the caller sees it."""
        key = None
        if self.is_lockable():
            # A TypeError is Celery's to raise: it knows whether the task has typing=False.
            with suppress(TypeError):
                key = self.lock_key_for(*(args or ()), **(kwargs or {}))
        send = partial(super().apply_async, args, kwargs, *rest)
        # Who has an id already, as a member of a canvas or a retry has, is always
        # sent, because somebody waits for it; it is settled when it runs.
        if key is None or rest or is_awaited(options) or not is_unique_in_the_queue(self):
            return send(**options)
        return publish_once(self, key, options, send)

    def retry(self, *args: Any, **kwargs: Any) -> Any:
        """As Celery's; a lease that is lost meanwhile does not break off the publishing, which would lose the retry."""
        interrupt = self.request.get("lock_interrupt") or Interrupt()
        with interrupt.held_back():
            return super().retry(*args, **kwargs)

    def push_request(self, *args: Any, **kwargs: Any) -> None:
        """As Celery's from 5.5 on: where nothing is traced by a worker, the body sees the request it runs for."""
        self.request_stack.push(Context(*args, **{**vars(self.request), **kwargs}))

    def after_return(self, status: str, retval: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        """Let nothing be held after this, whatever happened to `__call__`'s own release."""
        self.release_leftover()
        super().after_return(status, retval, task_id, args, kwargs, einfo)

    def release_leftover(self) -> None:
        """Give back what the present request still holds; nothing in the usual case."""
        lease = self.request.get("lock_lease")
        if lease is not None:
            self._give_back(lease)

    @classmethod
    def on_bound(cls, app: Celery) -> None:
        """Check the options as soon as the task exists."""
        super().on_bound(app)
        if not cls.is_lockable():
            return
        check_call_order(cls, SingletonTask)
        check_task(cls.name, _own_options(cls))
        cls._key_maker()

    @classmethod
    def _key_maker(cls) -> KeyMaker:
        name = cls.name if cls.lock_name is None else cls.lock_name
        try:
            return KeyMaker(name, run_signature(cls), cls.lock_key)
        except ConfigurationError as error:
            raise ConfigurationError(f"task {cls.name}: {error}") from None

    def _runs_without_lock(self) -> bool:
        called_itself = self.request.get("lock_lease") is not None
        return self.request.called_directly or called_itself or not self.is_lockable()

    @classmethod
    def is_lockable(cls) -> bool:
        """Celery's own tasks are never locked, not even with `app.Task = SingletonTask`."""
        return not cls.name.startswith("celery.")

    def _waits_for(self, lease: Lease, conflict: Conflict) -> bool:
        """Queue for the lease where that is the task's policy, unless a copy of this run holds it."""
        options = self.lock_options
        copies = [holder for holder in conflict.holders if holder.task_id == self.request.id]
        return options.on_conflict == "wait" and not copies and lease.wait(options.wait_timeout)

    def _facts(self) -> dict[str, str]:
        request = self.request
        facts = {
            "task_id": request.id,
            "hostname": request.hostname or socket.gethostname(),
            "pid": str(os.getpid()),
        }
        if self.lock_name is not None:
            facts["task_name"] = self.name
        if request.retries:
            facts["attempt"] = str(request.retries)
        return facts

    @contextmanager
    def _body_of(self, lease: Lease, interrupt: Interrupt) -> Iterator[None]:
        """What holds while the body runs under *lease*."""
        if self.lock_options.mode == UNTIL_EXECUTING:
            self._give_back(lease)
            forget_history(self.request)
            yield
            return
        signals.lock_acquired.send(sender=self, lease=lease)
        with making_way(self, lease), noting_the_end(self), running_under(lease), interrupt.allowed():
            forget_history(self.request)
            yield

    def _give_back(self, lease: Lease) -> None:
        if lease.unreleased and lease.release() is Answer.DONE:
            signals.lock_released.send(sender=self, lease=lease)


def _own_options(cls: type[SingletonTask]) -> dict[str, Any]:
    return {name: getattr(cls, f"lock_{name}") for name in OPTIONS}
