"""The lease of a task, for any code: `with Lock("stock"): ...`."""

import os
import socket
import threading
from functools import partial
from typing import Any, Literal

from celery import Celery, current_app

from celery_singleton_lock import signals
from celery_singleton_lock.errors import ConfigurationError, SingletonLockError
from celery_singleton_lock.leases.key import checked_name, key_of
from celery_singleton_lock.leases.lease import Lease, new_token
from celery_singleton_lock.leases.teller import teller
from celery_singleton_lock.options import count, prefix_of, seconds
from celery_singleton_lock.settings import store_of
from celery_singleton_lock.stores import store_from_url
from celery_singleton_lock.stores.records import Answer, Claim, Conflict, Facts


class Lock:
    """A lock that at most *limit* hold at once, in all processes that use the store.

    What is held is a lease: it lasts *ttl* seconds, is renewed in the background
    while it is held, and ends by itself when the process dies. If it is lost,
    `lease.lost`, `lease.check()` and the `lock_lost` signal tell; nothing is ever raised
    into running code. Waiters are served in the order of their arrival and woken
    by the release.

    One object may be used by many threads; they compete like strangers. After a
    fork, the child holds nothing. A task with the same `lock_name` and `lock_key=()`
    takes the same lock.

    Arguments:
        name: What the lock is called, 1 to 200 characters.
        url: The store, see `singleton_lock_url`. By default the one of *app*.
        app: The Celery app whose settings apply, by default the current one.
        ttl: Seconds a lease lasts without renewal, at least 1; by default 30.
        limit: How many may hold it at once, as far as this object is concerned.
        reentrant: A thread (or greenlet) that holds it through this object may
            acquire it again; it is free once it has been released as often.

    Raises:
        ConfigurationError: A value that cannot work, or no store to use.
    """

    def __init__(
        self,
        name: str,
        *,
        url: str | None = None,
        app: Celery | None = None,
        ttl: Any = 30,
        limit: int = 1,
        reentrant: bool = False,
    ) -> None:
        app = app or current_app._get_current_object()  # noqa: SLF001 (stores are kept by the app itself)
        self._store = store_of(app) if url is None else store_from_url(url)
        self._key = key_of(prefix_of(app), checked_name(name), {})
        self._ttl = seconds("ttl", ttl, least=1)
        self._limit = count("limit", limit)
        self._reentrant = reentrant
        self._thread = threading.local()

    def __enter__(self) -> Lease:
        """Wait for the lock as long as it takes."""
        before = len(self._leases())
        try:
            lease = self.acquire()
            assert lease is not None
            return lease
        except BaseException:
            # A signal may raise after it was acquired and before the block begins.
            self._give_back(before)
            raise

    def __exit__(self, *_: object) -> Literal[False]:
        """Release the lock, unless its lease was released already, or is the parent's in a forked child."""
        before = None
        try:
            leases = self._leases()
            before = len(leases) - 1
            # Without any, this is the wrong thread, and `release` says so.
            if not leases or leases[-1].unreleased:
                self.release()
            else:
                leases.pop()
            return False
        except BaseException:
            self._give_back(len(self._leases()) - 1 if before is None else before)
            raise

    @property
    def key(self) -> str:
        """The lock key."""
        return self._key

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> Lease | None:
        """Take the lock; the arguments are those of `threading.Lock`.

        Arguments:
            blocking: Queue until it is free. Otherwise ask once.
            timeout: Seconds to queue for, at most; None waits for as long as it takes.

        Returns:
            The lease, or None if the lock is held by others and stayed so.

        Raises:
            StoreError: The store did not answer within 5 s; nothing is held.
            ConfigurationError: *timeout* is negative or goes with `blocking=False`.
        """
        patience = _patience(blocking, timeout)
        leases = self._leases()
        if self._reentrant and leases and leases[-1].held:
            leases.append(leases[-1])
            return leases[-1]
        before, lease = len(leases), self._new_lease()
        try:
            leases.append(lease)
            conflict = lease.acquire()
            if isinstance(conflict, Conflict) and (patience == 0 or lease.wait(conflict, patience) is not None):
                self._give_back(before)
                return None
            signals.lock_acquired.send(sender=Lock, lease=lease)
            return lease
        except BaseException:
            self._give_back(before)
            raise

    def release(self) -> None:
        """Give back what this thread acquired last.

        Raises:
            SingletonLockError: This thread holds nothing through this object, or
                has released the lease already.
        """
        leases = self._leases()
        if not leases:
            raise SingletonLockError(
                f"lock key={self._key} is not held by this thread; only the one that acquired it can release it"
            )
        lease = leases[-1]
        try:
            is_done = lease not in leases[:-1] and lease.release() is Answer.DONE
        finally:
            # Not if a signal has raised before anything was released: then it is still to be given back.
            if lease in leases[:-1] or not lease.unreleased:
                leases.pop()
        if is_done:
            signals.lock_released.send(sender=Lock, lease=lease)

    def _give_back(self, before: int) -> None:
        """Give back what this thread has asked for since it had *before* leases, and tell nobody."""
        leases = self._leases()
        for lease in leases[before:]:
            if lease.unreleased and lease not in leases[:before]:
                lease.release()
        del leases[before:]

    def _leases(self) -> list[Lease]:
        """What this thread has acquired through this object, the latest last; before a fork as well."""
        leases: list[Lease] = self._thread.__dict__.setdefault("held", [])
        return leases

    def _new_lease(self) -> Lease:
        facts = Facts(hostname=socket.gethostname(), pid=os.getpid())
        claim = Claim(self._key, new_token(), self._ttl, self._limit, facts)
        return Lease(self._store, claim, on_lost=_tell_lost)


def _patience(blocking: bool, timeout: float | None) -> float | None:
    """Seconds to queue for: 0 not at all, None for as long as it takes."""
    if timeout is None:
        return None if blocking else 0.0
    if not blocking:
        raise ConfigurationError(f"timeout={timeout!r} goes with blocking=True only")
    return seconds("timeout", timeout, least=0)


def _tell_lost(lease: Lease) -> None:
    teller.tell(partial(signals.lock_lost.send, sender=Lock, lease=lease, reason=lease.lost_reason))
