"""A kit for the tests of applications: locks without a server, held by another run, lost, off, or recorded.

With pytest, `pytest_plugins = ["celery_singleton_lock.testing"]` in the `conftest.py` at the root brings the fixture
`singleton_locks`. The rest works with any test runner. The library itself does not import this package.

PYTEST_DONT_REWRITE: a `conftest.py` may import it before pytest loads it.
"""

import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from importlib.util import find_spec
from itertools import count
from typing import Any, NamedTuple
from weakref import ref

from celery import Celery, _state, current_app
from celery.utils.text import match_case

from celery_singleton_lock.errors import ConfigurationError, SingletonLockError, StoreError
from celery_singleton_lock.leases.heartbeat import heartbeat
from celery_singleton_lock.leases.lease import Lease, current, new_token
from celery_singleton_lock.lock import Lock
from celery_singleton_lock.options import MAX_LIMIT, option_of
from celery_singleton_lock.settings import store_of
from celery_singleton_lock.stores import extra_is_missing, in_memory
from celery_singleton_lock.stores.base import RELEASE_BOUND, clock
from celery_singleton_lock.stores.records import Claim, Conflict, Facts, Holder
from celery_singleton_lock.stores.redis.store import Store
from celery_singleton_lock.task import SingletonTask
from celery_singleton_lock.testing.recording import (
    Acquired,
    Conflicted,
    Lost,
    Recorded,
    Released,
    Unanswered,
    await_reports,
    recorded,
)

try:
    from celery_singleton_lock.stores.memory import MemoryStore
except ImportError as error:
    raise extra_is_missing("celery_singleton_lock.testing", error) from error

HELD_BY_TEST = "held-by-test"
"""The task id of the holder that `hold` stands for."""

_SETTING = "singleton_lock_url"
_TTL = 30.0
# The shortest time that a store counts.
_MOMENT = 0.001
# Seconds for a body that ends at the same time as the test.
_PATIENCE = 1.0
_A_KEY = re.compile(r".+:v\d+:\{.+\}")
_numbers = count(1)


# Locks in memory.


class StoreInMemory(MemoryStore):
    """Locks of the process that made the store, and of no other.

    Its clock is not the wall clock: it runs on while time-machine or freezegun hold the time, and only `advance`
    moves it.
    """

    def advance(self, seconds: float) -> None:
        """Let so many seconds pass at once for everything in the store.

        Cool-downs and marks end. Leases of bodies, of `hold` and of `Lock`, and turns of waiters do not, because a
        living process would have renewed them. The timers of the process do not run faster, so a `countdown` takes
        as long as ever.

        Raises:
            ConfigurationError: It is not a number of seconds, or it is negative.
        """
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < float("inf"):
            raise ConfigurationError(f"advance({seconds!r}) is not possible: give a number of seconds, at least 0")
        living = [one.claim for one in heartbeat.watched() if one.store is self]
        with self.alone():
            # Long enough for the leap, and then as long as ever.
            self.renew([replace(claim, ttl=claim.ttl + seconds) for claim in living], RELEASE_BOUND)
            super().advance(seconds)
            self.renew(living, RELEASE_BOUND)

    def held(self) -> list[Holder]:
        """The present holders of all locks; a cool-down has none."""
        return [holder for key in self.keys("") for holder in self.holders(key) if not holder.is_on_hold]

    def _refuse_a_copy(self, pid: int) -> None:
        raise ConfigurationError(
            f"memory_store() was entered in process {pid}, and process {os.getpid()} has a copy of it, so a "
            "lock there would exclude nobody; run the worker with the pool 'solo' or 'threads' "
            "(celery_worker_pool), or test prefork with a server"
        )


@contextmanager
def memory_store(app: "Celery[Any]") -> Iterator[StoreInMemory]:
    """Have the app use a new store in memory inside, instead of its own.

    All threads of this process use it, so a worker of Celery's `celery_worker` does too. Other processes do not: in
    one that is forked inside each lock raises an error, and one that was started on its own uses the app's own store.

    Raises:
        ConfigurationError: *app* is not a Celery app.
    """
    if not isinstance(app, Celery):
        raise ConfigurationError(f"memory_store({app!r}) is not possible: give the Celery app whose tasks are tested")
    url, changes, prefix = f"memory://test-{next(_numbers)}", app.conf.changes, app.conf.prefix
    # In an app with a namespace, Celery before 5.7 looks everywhere for the name with the prefix before the other one.
    names = [_SETTING, match_case(f"{prefix}{_SETTING}", prefix)] if prefix else [_SETTING]
    before = {name: changes[name] for name in names if name in changes}
    store = in_memory[url] = StoreInMemory()
    changes.update(dict.fromkeys(names, url))
    try:
        yield store
    finally:
        for name in names:
            changes.pop(name, None)
        changes.update(before)
        in_memory.pop(url, None)


# Locks that another run seems to hold, and leases that end as if their holder had died.


class _Target(NamedTuple):
    """The lock that a test means."""

    said: str
    store: Store
    key: str
    ttl: float = _TTL
    limit: int = 1
    task_name: str = ""
    queue_ttl: float = 0.0
    is_of_queue: bool = False


_held: set[str] = set()


def hold(task_or_key: Any, /, *args: Any, **kwargs: Any) -> AbstractContextManager[Holder]:
    """Have another holder hold the lock inside, like a run in another worker; the lock is free again at the end.

    The lease is a real one, in the store that the app uses, and is renewed. It takes one place: with a greater
    `lock_limit`, nest as many. With the mode `until_executing`, which is about calls, another call is queued
    inside. An eager call of this thread does not wait for it, because it would wait for ever: it ends with `LockHeld`.

    Arguments:
        task_or_key: A `SingletonTask`, or a lock key: that of a `Lock` is `lock.key`.
        *args: The arguments of the call that finds its key held.
        **kwargs: Likewise. With a key, only `app`: the app whose store has the lock, by default the current one.

    Returns:
        A context manager for the `Holder`, whose task id is `HELD_BY_TEST`.

    Raises:
        ConfigurationError: There is no such lock, or the block is inside `disabled()`.
        SingletonLockError: The lock is held already.
    """
    target = _target("hold", task_or_key, args, kwargs)
    return _hint_at_memory(_queued(target) if target.is_of_queue else _leased(target))


def expire(task_or_key: Any, /, *args: Any, **kwargs: Any) -> None:
    """End the leases on the lock now, as if their holders had died.

    A `hold` ends like a process that was killed: the next run gets the key and its `self.lock.took_over` is true. A
    body in this process is interrupted before this returns, as its `lock_on_lost` says. One in another process
    learns it from its own heartbeat, at most a third of its ttl later. A waiter gets the key.

    Arguments:
        task_or_key: A `SingletonTask`, or a lock key.
        *args: The arguments of the call whose key is meant.
        **kwargs: As with `hold`.

    Raises:
        ConfigurationError: There is no such lock.
        SingletonLockError: The lock has no holder.
    """
    target = _target("expire", task_or_key, args, kwargs)
    holders = [holder for holder in target.store.holders(target.key) if not holder.is_on_hold]
    if not holders:
        if target.is_of_queue and _unqueue(target):
            return
        raise SingletonLockError(
            f"{target.said}: key={target.key} has no holder; hold it by `with hold(...)`, or wait until a body runs"
        )
    # By its token, because a `Lock` with a URL of its own may use the same store by another object.
    renewals = {one.claim.token: one for one in heartbeat.watched()}
    for holder in holders:
        _end(target, holder, renewals.get(holder.token))
    _wait_for_the_end(target, {holder.token for holder in holders})
    # A release for a token that nobody has; it wakes the waiters.
    target.store.release(Claim(target.key, new_token(), _TTL), None)
    for holder in holders:
        lost = renewals.get(holder.token)
        if lost is not None and holder.token not in _held:
            lost.lose("expired")
    await_reports()


def _target(said: str, task_or_key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Target:
    if isinstance(task_or_key, str):
        target = _of_key(said, task_or_key, args, kwargs)
    else:
        target = _of_task(said, task_or_key, args, kwargs)
    if _off.blocks:
        raise ConfigurationError(f"{target.said} has no effect inside disabled(): remove one of the two")
    return target


def _of_key(said: str, key: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Target:
    said = f"{said}({key!r})"
    app = kwargs.get("app", current_app._get_current_object())  # noqa: SLF001 (stores are kept by the app itself)
    if args or kwargs.keys() - {"app"} or not isinstance(app, Celery):
        raise ConfigurationError(f"{said} takes no call arguments with a key; give only `app=`, a Celery app")
    if not _A_KEY.fullmatch(key):
        raise ConfigurationError(
            f"{said}: that is not a lock key; take it from `task.lock_key_for(...)` or `Lock(...).key`, or give a task"
        )
    return _Target(said, store_of(app), key)


def _of_task(said: str, task: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Target:
    if isinstance(task, Lock):
        raise ConfigurationError(f"{said}(...) takes no Lock; give its key: {said}({task.key!r})")
    if not isinstance(task, SingletonTask) or not task.__class__.is_lockable():
        name = getattr(task, "name", None) or repr(task)
        raise ConfigurationError(f"{said}({name}): it has no lock; give a task with base=SingletonTask, or a lock key")
    said = f"{said}({task.name})"
    try:
        key = task.lock_key_of_some(*args, **kwargs)
    except TypeError as error:
        raise ConfigurationError(f"{said}: {error}; give the arguments of the call that is meant") from None
    options, named = task.lock_options, "" if option_of(task, "name") is None else task.name
    is_of_queue = options.mode == "until_executing"
    return _Target(said, store_of(task.app), key, options.ttl, options.limit, named, options.queue_ttl, is_of_queue)


@contextmanager
def _hint_at_memory(held: AbstractContextManager[Holder]) -> Iterator[Holder]:
    with ExitStack() as stack:
        try:
            holder = stack.enter_context(held)
        except StoreError as error:
            hint = "a test needs no server inside memory_store(app), or with the fixture singleton_locks"
            raise StoreError(error.store, f"{error.problem}; {hint}") from None
        yield holder


@contextmanager
def _leased(target: _Target) -> Iterator[Holder]:
    facts = Facts(HELD_BY_TEST, target.task_name, socket.gethostname(), os.getpid())
    claim = Claim(target.key, new_token(), target.ttl, target.limit, facts)
    lease = Lease(target.store, claim)
    _held.add(claim.token)
    before = current.get()
    try:
        answer = lease.acquire()
        if isinstance(answer, Conflict):
            raise _taken(target, answer.first)
        current.set((*before, ref(lease)))
        yield next(each for each in target.store.holders(target.key) if each.token == claim.token)
    finally:
        current.set(before)
        _held.discard(claim.token)
        if lease.unreleased and not lease.lost and lease.remaining() > 0:
            lease.release()
        elif lease.unreleased:
            # It has died, so it says nothing more.
            with suppress(StoreError):
                target.store.release(claim, None)


@contextmanager
def _queued(target: _Target) -> Iterator[Holder]:
    found = target.store.mark_queued(target.key, HELD_BY_TEST, target.queue_ttl, limit=0, quiet=0.0)
    if found is not None:
        raise _taken(target, found)
    try:
        yield Holder.former(target.key, HELD_BY_TEST)
    finally:
        with suppress(StoreError):
            target.store.unmark(target.key, HELD_BY_TEST)


def _unqueue(target: _Target) -> bool:
    """Whether a call was queued."""
    probe = new_token()
    other = target.store.mark_queued(target.key, probe, _TTL, limit=0, quiet=0.0)
    target.store.unmark(target.key, probe if other is None or other.task_id is None else other.task_id)
    return other is not None


def _taken(target: _Target, holder: Holder) -> SingletonLockError:
    return SingletonLockError(
        f"{target.said}: key={target.key} is already held by task_id={holder.task_id}; let that run end first, or "
        "end its lease by expire(...)"
    )


def _end(target: _Target, holder: Holder, renewal: Any) -> None:
    """Stop the renewal of a holder's lease and let it end; take it away if another process has it."""
    if renewal is None:
        target.store.release(Claim(target.key, holder.token, _TTL), None)
        return
    if renewal.thread is not None:
        renewal.thread.remove(renewal)
    if holder.token in _held:
        renewal.stop()
    target.store.renew([replace(renewal.claim, ttl=_MOMENT)], RELEASE_BOUND)


def _wait_for_the_end(target: _Target, tokens: set[str]) -> None:
    give_up_at = clock() + RELEASE_BOUND
    while any(holder.token in tokens for holder in target.store.holders(target.key)):
        if clock() > give_up_at:
            raise SingletonLockError(f"{target.said}: key={target.key} is still held {RELEASE_BOUND:g} s later")
        time.sleep(_MOMENT)


# No locking.


class _Unlimited(MemoryStore):
    """Grants each claim, because it has more places than a test can have threads."""

    def acquire(self, claim: Claim) -> Any:
        return super().acquire(replace(claim, limit=MAX_LIMIT))


class _NotLockable:
    """Stands for `SingletonTask.is_lockable`: always False for a task. A class answers as ever, for its definition."""

    def __init__(self, on: Any) -> None:
        self._on = on

    def __get__(self, task: Any, cls: Any) -> Callable[[], bool]:
        on: Callable[[], bool] = self._on.__get__(task, cls)
        return on if task is None else bool


class _Off:
    """Off while at least one block is open, in any thread."""

    def __init__(self) -> None:
        self.blocks = 0
        self._guard = threading.RLock()
        self._was: tuple[Any, Any] = None, None

    def __enter__(self) -> None:
        with self._guard:
            self.blocks += 1
            if self.blocks == 1:
                self._was = vars(SingletonTask)["is_lockable"], vars(Lock)["_store"]
                store = _Unlimited()
                self._turn(_NotLockable(self._was[0]), property(lambda _: store))

    def __exit__(self, *_: object) -> None:
        with self._guard:
            self.blocks -= 1
            if self.blocks == 0:
                self._turn(*self._was)

    @staticmethod
    def _turn(is_lockable: Any, store: Any) -> None:
        # SingletonTask checks what is assigned to it.
        type.__setattr__(SingletonTask, "is_lockable", is_lockable)
        type.__setattr__(Lock, "_store", store)


_off = _Off()


@contextmanager
def disabled() -> Iterator[None]:
    """Lock nothing inside, in any thread of this process: bodies run, calls are published, `Lock` grants at once.

    The `self.lock` of a body is that of a run without a lock: not held, and its fence is 0. No store is used. A
    process that is forked inside locks nothing for as long as it lives; one that was started on its own locks as ever.
    """
    with _off:
        yield


# For pytest, which looks for fixtures among the names of a plugin.


class SingletonLocks(Recorded):
    """The record of the test's locks, and their store.

    Attributes:
        store: The store.
    """

    def __init__(self, store: StoreInMemory) -> None:
        super().__init__()
        self.store = store

    def advance(self, seconds: float) -> None:
        """Let so many seconds pass at once for everything in the store."""
        self.store.advance(seconds)


if find_spec("pytest") is not None:
    import pytest

    @pytest.fixture
    def singleton_lock_app(request: pytest.FixtureRequest) -> "Celery[Any]":
        """The app whose locks `singleton_locks` keeps in memory; define a fixture of this name to choose another.

        It is Celery's `celery_app` if the test uses that fixture, else the current app.

        Raises:
            ConfigurationError: There is no app yet.
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
        """Locks in memory, new for this test, and a record of what they did; a lock left held fails the test."""
        with memory_store(singleton_lock_app) as store:
            locks = SingletonLocks(store)
            with locks.listening():
                yield locks
            give_up_at = clock() + _PATIENCE
            while store.held() and clock() < give_up_at:
                time.sleep(10 * _MOMENT)
            left = [f"key={holder.key} by task_id={holder.task_id}" for holder in store.held()]
        if left:
            pytest.fail(
                f"the test has left a lock held: {'; '.join(left)}. Release it, or wait until its body has ended",
                pytrace=False,
            )


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
