"""Helpers for the tests of applications: keep locks in memory; hold, expire, disable and record them.

The fixtures need pytest, and `pytest_plugins = ["celery_singleton_lock.testing"]` in the `conftest.py` at the root.

PYTEST_DONT_REWRITE: a `conftest.py` may import this package before pytest loads it.
"""

import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from importlib.util import find_spec
from itertools import count
from typing import Any, NamedTuple, Self

from celery import Celery, Task, _state, current_app

from celery_singleton_lock import signals
from celery_singleton_lock.definition import options, settings
from celery_singleton_lock.errors import REASONS_TO_STOP, ConfigurationError, LostReason, SingletonLockError, StoreError
from celery_singleton_lock.leases import heartbeat
from celery_singleton_lock.leases.background import background
from celery_singleton_lock.leases.holding import Holding, State
from celery_singleton_lock.leases.lease import Lease, current
from celery_singleton_lock.stores import extra_is_missing, in_memory
from celery_singleton_lock.stores.clock import clock
from celery_singleton_lock.stores.records import Claim, Conflict, Holder, new_token
from celery_singleton_lock.stores.redis.inventory import Inventory
from celery_singleton_lock.stores.redis.store import RELEASE_BOUND, Store
from celery_singleton_lock.task import SingletonTask

try:
    from celery_singleton_lock.stores.memory import MemoryStore
except ImportError as error:
    raise ImportError(str(extra_is_missing("celery_singleton_lock.testing", error))) from error

HELD_BY_TEST = "held-by-test"
"""The task id of the holder that `hold` makes."""

_SETTING = "singleton_lock_url"
_TTL = 30.0
_A_MILLISECOND = 0.001
_EXPIRES_WITHIN = 10.0  # seconds, because a busy machine may pause
_PATIENCE = 1.0  # seconds for a body that ends after its test
_A_KEY = re.compile(r".+:v\d+:\{.+\}")
_numbers = count(1)


class StoreInMemory(MemoryStore):
    """Locks in the memory of this process. time-machine and freezegun do not move their clock."""

    def advance(self, seconds: options.Duration) -> None:
        """Move the clock of the store ahead by *seconds*: cool-downs and marks end, leases and a `countdown` do not."""
        ahead = options.seconds("advance", seconds, least=0)
        living = [one.claim for one in heartbeat.watched() if one.store is self]
        # Lock the server: a renewal between the two steps would restore the plain TTL, and the lease would expire.
        with self._server.lock:
            self.renew([replace(claim, ttl=claim.ttl + ahead) for claim in living], RELEASE_BOUND)
            super().advance(ahead)

    def held(self) -> list[Holder]:
        """The holders of all locks."""
        return [holder for lock in self.survey([*Inventory(self).keys("")]) for holder in lock.holders]

    def _refuse_a_copy(self, pid: int) -> None:
        raise ConfigurationError(
            f"memory_store() was entered in process {pid}, and process {os.getpid()} has a copy of it, so a "
            "lock there would exclude nobody; run the worker with the pool 'solo' or 'threads' "
            "(celery_worker_pool), or test prefork with a server"
        )


@contextmanager
def memory_store(app: "Celery[Any]") -> Iterator[StoreInMemory]:
    """Inside the block, the locks of the app and every `Lock`, even with a `url`, are in the memory of this process.

    In a process that is forked inside the block, each lock raises an error. Other processes use the app's own store.
    """
    if not isinstance(app, Celery):
        raise ConfigurationError(f"memory_store({app!r}) is not possible: give the Celery app whose tasks are tested")
    app.conf.get(_SETTING)  # loads a pending configuration
    url = f"memory://test-{next(_numbers)}"
    changes = app.conf.changes
    before = {_SETTING: changes[_SETTING]} if _SETTING in changes else {}
    store = in_memory[url] = StoreInMemory()
    changes[_SETTING] = url
    try:
        # If a `memory_store` block is open for the app of a `Lock`, the `Lock` uses the store of that block.
        with _stores_of_locks(lambda app: in_memory.get(app.conf.changes.get(_SETTING), store)):
            yield store
    finally:
        del changes[_SETTING]
        changes.update(before)
        in_memory.pop(url, None)


@contextmanager
def _stores_of_locks(find: Callable[[Any], Store]) -> Iterator[None]:
    # The last entry counts. Inside `disabled()`, insert first, so that the entry of `disabled()` stays last.
    at = len(settings.stores_of_locks) if options.Lockable.is_lockable else 0
    settings.stores_of_locks.insert(at, find)
    try:
        yield
    finally:
        settings.stores_of_locks.remove(find)


class _Target(NamedTuple):
    said: str  # what the test has called
    store: Store
    key: str
    of_task: options.LockOptions | None = None  # None for a key


def hold(task_or_key: Any, /, *args: Any, **kwargs: Any) -> AbstractContextManager[Holder]:
    """Hold the lock inside the block, as a run in another worker would; gives the `Holder`.

    The lease is renewed, and takes one place: nest blocks to take more. In the mode `until_executing`, whose runs take
    no lease, a call is queued instead. If an eager call in this thread would have to wait, it ends with `LockHeld`.

    Arguments:
        task_or_key: A `SingletonTask`, or a lock key, such as the `key` of a `Lock`.
        *args: The arguments of the call whose lock is held.
        **kwargs: The keyword arguments of that call. With a key, only `app`: the app whose store has the lock, by
            default the current one.

    Raises:
        ConfigurationError: There is no such lock, or the block is inside `disabled()`.
        SingletonLockError: The lock is held already.
    """
    target = _target("hold", task_or_key, args, kwargs)
    is_queued = target.of_task is not None and target.of_task.mode == "until_executing"
    return _queued(target) if is_queued else _leased(target)


def expire(task_or_key: Any, /, *args: Any, **kwargs: Any) -> None:
    """End the leases on the lock now, as if their holders had died.

    The arguments are those of `hold`. In the next run, `self.lock.took_over` is true. A body in this process is
    interrupted before `expire` returns, as its `lock_on_lost` says. A body in another process learns of the loss within
    a third of its TTL.

    Raises:
        ConfigurationError: There is no such lock.
        SingletonLockError: The lock has no holder.
    """
    said, store, key, _ = _target("expire", task_or_key, args, kwargs)
    tokens = {holder.token for holder in store.survey([key])[0].holders}
    if not tokens:
        raise SingletonLockError(
            f"{said}: key={key} has no holder; hold it by `with hold(...)`, or wait until a body runs"
        )
    # Compare tokens: a `Lock` with its own URL may use the same store by another object.
    renewals = {one.claim.token: one for one in heartbeat.watched() if one.claim.token in tokens}
    for renewal in renewals.values():
        if renewal.thread is not None:
            renewal.thread.remove(renewal)
        if isinstance(renewal, Holding) and renewal.task_id == HELD_BY_TEST:
            renewal.go_to(State.LOST)  # a killed process reports nothing
        store.renew([replace(renewal.claim, ttl=_A_MILLISECOND)], RELEASE_BOUND)
    # Other processes would renew a lease that is only shortened.
    for token in tokens - renewals.keys():
        store.release(Claim(key, token, _TTL), None)
    give_up_at = clock() + _EXPIRES_WITHIN
    while not tokens.isdisjoint(holder.token for holder in store.holders(key)):
        if clock() > give_up_at:
            raise SingletonLockError(f"{said}: key={key} is still held {_EXPIRES_WITHIN:g} s later")
        time.sleep(_A_MILLISECOND)
    store.wake_next(key)
    for renewal in renewals.values():
        renewal.lose("expired")
    _await_reports()


def _target(verb: str, what: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Target:
    said = f"{verb}({getattr(what, 'name', None) or repr(what)})"
    if not options.Lockable.is_lockable:
        raise ConfigurationError(f"{said} has no effect inside disabled(): remove one of the two")
    if isinstance(what, str) and _A_KEY.fullmatch(what):
        app = kwargs.get("app", current_app._get_current_object())  # noqa: SLF001 (stores are kept by the app itself)
        if args or kwargs.keys() - {"app"} or not isinstance(app, Celery):
            raise ConfigurationError(f"{said} takes no call arguments with a key; give only `app=`, a Celery app")
        return _Target(said, settings.store_of(app), what)
    if not isinstance(what, SingletonTask) or not what.is_lockable:
        raise ConfigurationError(f"{said}: give a task with base=SingletonTask, or a lock key, as a Lock has in `key`")
    try:
        return _Target(said, settings.store_of(what.app), what.lock_key_of_some(*args, **kwargs), what.lock_options)
    except TypeError as error:
        raise ConfigurationError(f"{said}: {error}; give the arguments of the call that is meant") from None


@contextmanager
def _leased(target: _Target) -> Iterator[Holder]:
    chosen = target.of_task
    name = chosen.holder_name if chosen else ""
    ttl, limit = (chosen.ttl, chosen.limit) if chosen else (_TTL, 1)
    claim = Claim(target.key, new_token(), ttl, limit, task_id=HELD_BY_TEST, task_name=name, keeps_result=False)
    claim.hostname, claim.pid = socket.gethostname(), os.getpid()
    lease = Holding(target.store, claim)
    before = current.get()
    try:
        answer = lease.acquire()
        if isinstance(answer, Conflict):
            raise _taken(target, answer.first)
        current.set((*before, lease.weak))
        yield next(each for each in target.store.holders(target.key) if each.token == lease.claim.token)
    finally:
        current.set(before)
        if lease.remaining() > 0:
            lease.release()
        elif lease.unreleased:
            # After `expire`, as after a death: no signal and no log line.
            with suppress(StoreError):
                target.store.release(lease.claim, None)


@contextmanager
def _queued(target: _Target) -> Iterator[Holder]:
    assert target.of_task is not None
    store, key = target.store, target.key

    def own_marks() -> Iterator[Holder]:
        return (each for each in store.survey([key])[0].marks if each.task_id == HELD_BY_TEST)

    queue_ttl = target.of_task.queue_ttl
    # Look first: the store would take a second mark with the same task id for a repetition.
    found = next(own_marks(), None) or store.mark_queued(key, HELD_BY_TEST, queue_ttl, limit=0, cooldown=0.0)
    if isinstance(found, Holder):
        raise _taken(target, found)
    try:
        yield next(own_marks())
    finally:
        with suppress(StoreError):
            store.unmark(key, HELD_BY_TEST)


def _taken(target: _Target, holder: Holder) -> SingletonLockError:
    return SingletonLockError(
        f"{target.said}: key={target.key} is already held by task_id={holder.task_id}; let that run end first, or "
        "end its lease by expire(...)"
    )


class _Unlimited(MemoryStore):
    def acquire(self, claim: Claim) -> Any:
        # Enough for many claims on the whole lock, each of which takes a million places.
        return super().acquire(replace(claim, limit=10**12))


@contextmanager
def disabled() -> Iterator[None]:
    """Inside the block, lock nothing in this process: bodies run, calls are published, and each `Lock` is granted.

    A process that is forked inside the block never locks anything.
    """
    store = _Unlimited()
    before = options.Lockable.is_lockable
    with _stores_of_locks(lambda _: store):
        options.Lockable.is_lockable = False
        try:
            yield
        finally:
            options.Lockable.is_lockable = before


class Acquired(NamedTuple):
    """A lease was granted. Here and below, `task` and `task_id` are None for a `Lock`."""

    task: str | None
    task_id: str | None
    key: str
    fence: int
    waited: float
    took_over: bool


class Conflicted(NamedTuple):
    """A call found its key held by the task id `holder`; `task_id` is None if the call was not published."""

    task: str
    task_id: str | None
    key: str
    holder: str | None
    outcome: signals.ConflictOutcome


class Lost(NamedTuple):
    """A lease ended while it was needed."""

    task: str | None
    task_id: str | None
    key: str
    reason: LostReason


class Released(NamedTuple):
    """A lease was released."""

    task: str | None
    task_id: str | None
    key: str


class Unanswered(NamedTuple):
    """The store gave no answer to a run."""

    task: str
    task_id: str | None
    key: str
    problem: str
    outcome: signals.UnansweredOutcome


class Recorded:
    """The signals of this process, earliest first."""

    def __init__(self) -> None:
        self.acquired: list[Acquired] = []
        self.conflicts: list[Conflicted] = []
        self.released: list[Released] = []
        self.unanswered: list[Unanswered] = []
        self._lost: list[Lost] = []

    @property
    def lost(self) -> list[Lost]:
        """The losses that are known by now. Reading this waits until they are reported."""
        _await_reports()
        return self._lost

    @contextmanager
    def listening(self) -> Iterator[Self]:
        """Record inside the block."""
        pairs = (
            (signals.lock_acquired, self._on_acquired),
            (signals.lock_conflict, self._on_conflict),
            (signals.lock_lost, self._on_lost),
            (signals.lock_released, self._on_released),
            (signals.lock_unanswered, self._on_unanswered),
        )
        try:
            for signal, receiver in pairs:
                # Celery before 5.7 counts the same method of two records as one receiver.
                signal.connect(receiver, weak=False, dispatch_uid=self)
            yield self
        finally:
            _await_reports()
            for signal, _ in pairs:
                signal.disconnect(dispatch_uid=self)

    def _on_acquired(self, sender: Any, lease: Lease, **_: Any) -> None:
        self.acquired.append(Acquired(*_whose(sender, lease), lease.fence, lease.waited, lease.took_over))

    def _on_conflict(self, sender: Task, key: str, holder: Holder, outcome: signals.ConflictOutcome, **_: Any) -> None:
        # An unpublished call has no request: `sender.request` may be the publisher's.
        task_id = None if outcome == "unpublished" else sender.request.id
        self.conflicts.append(Conflicted(sender.name, task_id, key, holder.task_id, outcome))

    def _on_lost(self, sender: Any, lease: Lease, reason: LostReason, **_: Any) -> None:
        self._lost.append(Lost(*_whose(sender, lease), reason))

    def _on_released(self, sender: Any, lease: Lease, **_: Any) -> None:
        # A holder that was asked to stop counts as `lost`, but still has its lease.
        if not lease.lost or lease.lost_reason in REASONS_TO_STOP:
            self.released.append(Released(*_whose(sender, lease)))

    def _on_unanswered(
        self, sender: Task, key: str, error: StoreError, outcome: signals.UnansweredOutcome, **_: Any
    ) -> None:
        self.unanswered.append(Unanswered(sender.name, sender.request.id, key, error.problem, outcome))


def recorded() -> AbstractContextManager[Recorded]:
    """Record what locks do in this process inside the block, but not in the pool processes of a worker."""
    return Recorded().listening()


def _await_reports() -> None:
    """Wait for reports of known losses, but not for a slow receiver."""
    reported = threading.Event()
    background.submit(reported.set)
    reported.wait(RELEASE_BOUND)


def _whose(sender: Any, lease: Lease) -> tuple[str | None, str | None, str]:
    task_id = lease._holding.task_id  # noqa: SLF001 (it is this library's)
    return sender.name if isinstance(sender, Task) else None, task_id, lease.key


class SingletonLocks(Recorded):
    """The record of the test's locks, and their `store`."""

    def __init__(self, store: StoreInMemory) -> None:
        super().__init__()
        self.store = store
        self.advance: Callable[[options.Duration], None] = store.advance


if find_spec("pytest") is not None:
    import pytest

    @pytest.fixture
    def singleton_lock_app(request: pytest.FixtureRequest) -> "Celery[Any]":
        """The app whose locks `singleton_locks` keeps in memory; define a fixture of this name to choose another.

        By default: Celery's `celery_app` if the test uses that fixture, else the current app.
        """
        for name in ("celery_app", "celery_session_app"):
            if name in request.fixturenames:
                app: Celery[Any] = request.getfixturevalue(name)
                return app
        app = _state.get_current_app()
        if app.main == "default":
            raise ConfigurationError(
                "singleton_locks does not know your app, because the test has imported none; define a fixture "
                "singleton_lock_app in conftest.py that returns it"
            )
        return app

    @pytest.fixture
    def singleton_locks(singleton_lock_app: "Celery[Any]") -> Iterator[SingletonLocks]:
        """New locks in memory, and a record of what they do; a lock left held fails the test."""
        with memory_store(singleton_lock_app) as store:
            with SingletonLocks(store).listening() as locks:
                yield locks
            give_up_at = clock() + _PATIENCE
            while store.held() and clock() < give_up_at:
                time.sleep(10 * _A_MILLISECOND)
            left = [f"key={holder.key} by task_id={holder.task_id}" for holder in store.held()]
        if left:
            advice = "Release it, or wait until its body has ended"
            pytest.fail(f"the test has left a lock held: {'; '.join(left)}. {advice}", pytrace=False)


__all__ = [
    "HELD_BY_TEST",
    "Acquired",
    "Conflicted",
    "Lost",
    "Recorded",
    "Released",
    "SingletonLocks",
    "StoreInMemory",
    "Unanswered",
    "disabled",
    "expire",
    "hold",
    "memory_store",
    "recorded",
    "singleton_lock_app",
    "singleton_locks",
]
