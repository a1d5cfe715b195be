"""The lease of a task, for any code: `with Lock("stock"): ...`."""

import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal
from weakref import WeakKeyDictionary, ref

from celery import Celery, current_app

from celery_singleton_lock import signals
from celery_singleton_lock.errors import ConfigurationError, SingletonLockError
from celery_singleton_lock.leases.heartbeat import count as count_one
from celery_singleton_lock.leases.heartbeat import count_grant
from celery_singleton_lock.leases.key import checked_name, key_of
from celery_singleton_lock.leases.lease import Lease, new_token
from celery_singleton_lock.leases.teller import teller
from celery_singleton_lock.options import Duration, count, prefix_of, seconds
from celery_singleton_lock.settings import store_of
from celery_singleton_lock.stores import shared_store
from celery_singleton_lock.stores.records import Claim, Conflict, Facts

# The label of a metric: names of locks may be made of ids, of which there is no end.
_NO_TASK = ""
_NOT_MINE = (
    "is not held by this thread, asyncio task or process; only the one that acquired it can give it back here, "
    "and any thread of its process by lease.release()"
)


class _Mine:
    """The leases that one thread, or one asyncio task in it, has acquired through a lock.

    Attributes:
        leases: The leases that were taken, the latest last; some may be released already.
        blocks: For each `with` that runs, the outermost first: its lease, and how often that was taken by then.
        kept: The leases that were taken without a `with`, because callers need not keep them.
    """

    def __init__(self) -> None:
        self.leases: list[ref[Lease]] = []
        self.blocks: list[tuple[ref[Lease], int]] = []
        self.kept: list[Lease] = []
        self._with: ref[_With] | None = None

    @property
    def latest(self) -> Lease | None:
        """The lease that was acquired last and is not released, neither here nor by the lease."""
        self.leases[:] = [one for one in self.leases if (lease := one()) is not None and lease.takes]
        self.kept[:] = [lease for lease in self.kept if lease.takes]
        return self.leases[-1]() if self.leases else None

    def begins(self, block: "_With") -> None:
        """A `with` is about to enter."""
        self._with = ref(block)

    def begun(self) -> list[Lease]:
        """The list that keeps the lease of the block that is entered."""
        block = self._with() if self._with is not None else None
        self._with = None
        return self.kept if block is None else block.kept

    def leave(self, depth: int) -> None:
        """End the block that is *depth* blocks deep, unless it has ended."""
        if 0 < depth <= len(self.blocks):
            one, takes = self.blocks[depth - 1]
            lease = one()
            if lease is not None and lease.takes >= takes:
                lease.release()
            del self.blocks[depth - 1 :]

    def taken(self) -> dict[Lease, int]:
        """How often each lease was taken."""
        return {lease: lease.takes for one in self.leases if (lease := one()) is not None}

    def give_back(self, before: Mapping[Lease, int]) -> None:
        """Release the leases that were taken since."""
        for lease in self.taken():
            while lease.takes > before.get(lease, 0):
                lease.release()


class _With:
    """The callable that one `with` calls at its end; nothing else keeps its lease."""

    def __init__(self, leave: Callable[..., Literal[False]]) -> None:
        self.kept: list[Lease] = []
        self._leave = leave

    def __call__(self, *error: object) -> Literal[False]:
        return self._leave(*error)


class _Exit:
    """`Lock.__exit__`, which each `with` looks up before it enters.

    A signal may raise before the first instruction of any function, so of this one, too: then the block is over, and
    its lease was not released. But nothing refers to the lease any more, because only the callable that was looked up
    here kept it. So it ends by its ttl.
    """

    def __get__(self, lock: "Lock | None", owner: "type[Lock]") -> Callable[..., Literal[False]]:
        if lock is None:
            # An ExitStack looks it up on the class.
            return owner._leave  # noqa: SLF001 (its own)
        block = _With(lock._leave)  # noqa: SLF001
        lock._mine().begins(block)  # noqa: SLF001 (its own)
        return block


class Lock:
    """A lock with at most *limit* holders at once, in all processes that use the store.

    A holder has a lease: it lasts *ttl* seconds, is renewed in the background
    while it is held, and ends by itself if the process dies. If it is lost,
    `lease.lost`, `lease.check()` and the `lock_lost` signal say so; nothing is ever raised
    in running code. Waiters are served in the order of their arrival and woken
    by the release.

    Many threads and asyncio tasks may use one object; they compete with each
    other, and so do two objects with one name. A call blocks its thread, so from an event
    loop call `acquire` and `lease.release` in other threads, and release also what a thread is given after its asyncio
    task was cancelled; `docs/how-to/lock-without-a-task.md` shows it. There is no `async with`, because it would be a
    second implementation of the same rules, and each would have to be proved twice.
    After a fork, the child holds nothing. A task with the same `lock_name` and `lock_key=()`
    takes the same lock.

    Arguments:
        name: The name of the lock, 1 to 200 characters.
        url: The store, see `singleton_lock_url`. By default the one of *app*.
        app: The Celery app whose settings apply, by default the current one.
        ttl: Seconds a lease lasts without renewal, at least 1; by default 30.
        limit: How many may hold the lock at once; it applies to grants to this object.
        reentrant: A thread (or greenlet, or asyncio task) that holds it through this object may
            acquire it again; it is free once it has been released as often, here or by the lease. A thread of
            an executor serves many asyncio tasks, so use no re-entrant lock there.

    Raises:
        ConfigurationError: A value cannot work, or there is no store.
    """

    def __init__(
        self,
        name: str,
        *,
        url: str | None = None,
        app: "Celery[Any] | None" = None,
        ttl: Duration = 30,
        limit: int = 1,
        reentrant: bool = False,
    ) -> None:
        app = app or current_app._get_current_object()  # noqa: SLF001 (stores are kept by the app itself)
        self._store = store_of(app) if url is None else shared_store(url)
        self._key = key_of(prefix_of(app), checked_name(name), {})
        self._ttl = seconds("ttl", ttl, least=1)
        self._limit = count("limit", limit)
        self._reentrant = reentrant
        self._thread = threading.local()

    def __enter__(self) -> Lease:
        """Wait for the lock, for as long as it takes."""
        mine = self._mine()
        keeper = mine.begun()
        depth, before = len(mine.blocks), mine.taken()
        try:
            lease = self._take(None, keeper)
            assert lease is not None
            mine.blocks.append((ref(lease), lease.takes))
            return lease
        except BaseException:
            # A signal may raise after it was acquired and before the block begins.
            del mine.blocks[depth:]
            mine.give_back(before)
            raise

    __exit__: _Exit = _Exit()

    def _leave(self, error_type: object = None, *_: object) -> Literal[False]:
        """Release what this block has taken, unless that was released already; `with` calls it.

        Raises:
            SingletonLockError: This thread, or asyncio task, has not entered the block, or was forked inside; but
                not in place of an error that ends the block.
        """
        depth = None
        try:
            mine = self._mine()
            depth = len(mine.blocks)
            # The exception that closes a generator is no error.
            if depth == 0 and error_type in (None, GeneratorExit):
                raise SingletonLockError(f"the block of lock key={self._key} cannot be left here: it {_NOT_MINE}")
            mine.leave(depth)
            return False
        except BaseException:
            # A signal handler may have raised at any moment of this.
            mine = self._mine()
            mine.leave(len(mine.blocks) if depth is None else depth)
            raise

    @property
    def key(self) -> str:
        """The lock key."""
        return self._key

    def acquire(self, blocking: bool = True, timeout: Duration | None = None) -> Lease | None:
        """Take the lock; the arguments are those of `threading.Lock`.

        Arguments:
            blocking: Queue until it is free. Otherwise ask once.
            timeout: Seconds to queue for, at most; None waits for as long as it takes.

        Returns:
            The lease, or None if others held the lock for all that time.

        Raises:
            StoreError: The store did not answer within 5 s; nothing is held.
            ConfigurationError: *timeout* is negative or goes with `blocking=False`.
        """
        return self._take(_patience(blocking, timeout), self._mine().kept)

    def release(self) -> None:
        """Release the lease that this thread, or asyncio task, acquired last; elsewhere, call the lease's `release`.

        Raises:
            SingletonLockError: It holds no lease through this object, or has released it already.
        """
        latest = self._mine().latest
        if latest is None:
            raise SingletonLockError(f"lock key={self._key} {_NOT_MINE}")
        latest.release()

    def _take(self, patience: float | None, keeper: list[Lease]) -> Lease | None:
        """The lease, kept by *keeper*, or None if it was not granted within *patience* seconds."""
        mine = self._mine()
        before, latest = mine.taken(), mine.latest
        try:
            if self._reentrant and latest is not None and latest.keeps_others_out:
                keeper.append(latest)
                latest.take_again()
                return latest
            lease = self._new_lease()
            keeper.append(lease)
            mine.leases.append(ref(lease))
            conflict = lease.acquire()
            if isinstance(conflict, Conflict) and (patience == 0 or lease.wait(conflict, patience) is not None):
                mine.give_back(before)
                return None
            count_grant(lease.store, lease.key, _NO_TASK, waited=lease.waited, took_over=lease.took_over)
            lease.on_released = _tell_released
            signals.lock_acquired.send(sender=Lock, lease=lease)
            return lease
        except BaseException:
            mine.give_back(before)
            raise

    def _mine(self) -> _Mine:
        """The leases that the calling thread, or asyncio task, has acquired through this object in this process."""
        held = getattr(self._thread, "held", None)
        if held is None or held[0] != os.getpid():
            held = self._thread.held = os.getpid(), _Mine(), WeakKeyDictionary[Any, _Mine]()
        _, own, of_tasks = held
        task = _current_task()
        return own if task is None else of_tasks.setdefault(task, _Mine())

    def _new_lease(self) -> Lease:
        facts = Facts(hostname=socket.gethostname(), pid=os.getpid())
        claim = Claim(self._key, new_token(), self._ttl, self._limit, facts)
        return Lease(self._store, claim, on_lost=_tell_lost)


def _current_task() -> Any:
    """The asyncio task that runs in this thread, if one does."""
    asyncio = sys.modules.get("asyncio")
    loop = asyncio and asyncio._get_running_loop()  # noqa: SLF001 (the public one raises where there is none)
    return asyncio.current_task(loop) if asyncio and loop else None


def _patience(blocking: bool, timeout: Duration | None) -> float | None:
    """Seconds to queue for: 0 not at all, None for as long as it takes."""
    if timeout is None:
        return None if blocking else 0.0
    if not blocking:
        raise ConfigurationError(f"timeout={timeout!r} goes with blocking=True only")
    return seconds("timeout", timeout, least=0)


def _tell_released(lease: Lease) -> None:
    count_one(lease.store, lease.key, "held", _NO_TASK, value=lease.age)
    signals.lock_released.send(sender=Lock, lease=lease)


def _tell_lost(lease: Lease) -> None:
    count_one(lease.store, lease.key, "lost", _NO_TASK, lease.lost_reason or "expired")
    teller.tell(partial(signals.lock_lost.send, sender=Lock, lease=lease, reason=lease.lost_reason))
