"""Locks that another run seems to hold, and leases that end as if their holder had died."""

import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from typing import Any, NamedTuple

from celery import Celery, current_app

from celery_singleton_lock.errors import ConfigurationError, SingletonLockError, StoreError
from celery_singleton_lock.leases.heartbeat import heartbeat
from celery_singleton_lock.leases.lease import Lease, new_token
from celery_singleton_lock.leases.renewal import Renewal
from celery_singleton_lock.lock import Lock
from celery_singleton_lock.settings import store_of
from celery_singleton_lock.stores.base import RELEASE_BOUND, Store, clock
from celery_singleton_lock.stores.records import Claim, Conflict, Facts, Holder
from celery_singleton_lock.task import SingletonTask
from celery_singleton_lock.testing.off import switch
from celery_singleton_lock.testing.recording import let_be_told

HELD_BY_TEST = "held-by-test"
"""The task id of the holder that `hold` stands for."""

_TTL = 30.0
# The shortest time that a store counts.
_MOMENT = 0.001
_A_KEY = re.compile(r".+:v\d+:\{.+\}")
_held: set[str] = set()


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


def hold(task_or_key: Any, /, *args: Any, **kwargs: Any) -> AbstractContextManager[Holder]:
    """Have another holder hold the lock inside, like a run in another worker; the lock is free again at the end.

    The lease is a real one, in the store that the app uses, and is renewed. It takes one place: with a greater
    `lock_limit`, nest as many. With the mode `until_executing`, which is about calls, another call is queued
    inside.

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
    return _queued(target) if target.is_of_queue else _leased(target)


def expire(task_or_key: Any, /, *args: Any, **kwargs: Any) -> None:
    """End the leases on the lock now, as if their holders had died.

    A `hold` ends like a process that was killed: the next run gets the key and its `self.lock.took_over` is true. A
    body in this process is told before this returns, as its `lock_on_lost` says. A body in another process is told by
    its own heartbeat, at most a third of its ttl later. A waiter gets the key.

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
    let_be_told()


def _target(said: str, task_or_key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Target:
    if isinstance(task_or_key, str):
        target = _of_key(said, task_or_key, args, kwargs)
    else:
        target = _of_task(said, task_or_key, args, kwargs)
    if switch.is_off:
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
        key = task.lock_key_for(*args, **kwargs)
    except TypeError as error:
        raise ConfigurationError(f"{said}: {error}; give the arguments of the call that is meant") from None
    options = task.lock_options
    return _Target(
        said,
        store_of(task.app),
        key,
        options.ttl,
        options.limit,
        "" if task.lock_name is None else task.name,
        options.queue_ttl,
        options.mode == "until_executing",
    )


@contextmanager
def _leased(target: _Target) -> Iterator[Holder]:
    facts = Facts(HELD_BY_TEST, target.task_name, socket.gethostname(), os.getpid())
    claim = Claim(target.key, new_token(), target.ttl, target.limit, facts)
    lease = Lease(target.store, claim)
    _held.add(claim.token)
    try:
        answer = lease.acquire()
        if isinstance(answer, Conflict):
            raise _taken(target, answer.first)
        yield next(each for each in target.store.holders(target.key) if each.token == claim.token)
    finally:
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


def _end(target: _Target, holder: Holder, renewal: Renewal | None) -> None:
    """Stop the renewal of a holder's lease and let it end; take it away if another process has it."""
    if renewal is None:
        target.store.release(Claim(target.key, holder.token, _TTL), None)
        return
    heartbeat.forget(renewal)
    if holder.token in _held:
        renewal.end()
    target.store.renew([replace(renewal.claim, ttl=_MOMENT)], RELEASE_BOUND)


def _wait_for_the_end(target: _Target, tokens: set[str]) -> None:
    give_up_at = clock() + RELEASE_BOUND
    while any(holder.token in tokens for holder in target.store.holders(target.key)):
        if clock() > give_up_at:
            raise SingletonLockError(f"{target.said}: key={target.key} is still held {RELEASE_BOUND:g} s later")
        time.sleep(_MOMENT)
