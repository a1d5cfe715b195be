"""Leases for callers: the public `Lease`, the leases that the calling code holds, and requests from event loops."""

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import ref

from celery_singleton_lock.errors import ConfigurationError, LostReason, StoreError
from celery_singleton_lock.leases.background import background
from celery_singleton_lock.leases.line import pause_after, pause_before
from celery_singleton_lock.stores.clock import clock
from celery_singleton_lock.stores.records import ACQUIRE_BOUND, Conflict, Grant, Verdict

if TYPE_CHECKING:
    from celery_singleton_lock.leases.holding import Holding

T = TypeVar("T")

_THREADS = 8
# By pid: after a fork, the threads are the parent's.
_pools: dict[int, ThreadPoolExecutor] = {}


class Lease:
    """One execution's time-bound right to a lock key.

    A process that is paused past the deadline loses the lease, and does not notice until it checks. Call `check()`
    before a step that must not happen twice. If a resource can compare numbers, let it refuse a `fence` smaller than
    the greatest it has seen.

    The heartbeat renews the lease every third of its ttl until the release. The renewals also stop once no variable, no
    unfinished run and no living context refers to the lease.

    Attributes:
        key: The lock key.
        token: Proof of this acquisition, new for each. Anybody with the token and write access to the store can release
            the lock, so no log should show it.
        ttl: Seconds the lease lasts without renewal.
        fence: A number greater than that of any earlier lease on the key.
        acquired_at: When it was granted, by the store's clock, in UTC.
        took_over: Whether the previous holder's lease ran out without a release.
        waited: Seconds between the first refusal and the grant. 0.0 if it was granted at once.
    """

    def __init__(self, holding: "Holding") -> None:
        self._holding: Holding = holding
        self.key: str = holding.key
        self.token: str = holding.claim.token
        self.ttl: float = holding.ttl
        self.fence: int = holding.fence
        self.acquired_at: datetime = datetime.fromtimestamp(holding.grant.since, UTC)
        self.took_over: bool = holding.grant.took_over
        self.waited: float = holding.waited

    @property
    def held(self) -> bool:
        """Whether this process has the lease now: neither released nor lost, and before its deadline."""
        return self._holding.remaining() > 0.0

    @property
    def lost(self) -> bool:
        """Whether the lease ended before its release, or its holder was asked to stop."""
        return self._holding.lost_reason is not None

    @property
    def lost_reason(self) -> LostReason | None:
        """`expired`, `taken`, `unreachable`, `replaced`, `broken`, or None while it is not lost."""
        return self._holding.lost_reason

    def remaining(self) -> float:
        """Seconds for which this process certainly has the lease. 0.0 once it is lost or released."""
        return self._holding.remaining()

    def check(self) -> None:
        """Raise unless this process has the lease now. Ask the store if the deadline has passed without a renewal.

        Raises:
            LockLost: The lease is lost or released, its holder was asked to stop, it belongs to the parent process, or
                the store has not answered within a second.
        """
        self._holding.check()

    def release(self) -> None:
        """Give the lease back.

        Raises:
            SingletonLockError: It was released before, or belongs to the parent process.
        """
        self._holding.release()

    async def arelease(self) -> None:
        """As `release`, without blocking the event loop. Even a cancelled `await` gives the lease back."""
        await release_in_loop(self._holding)


def is_undone(result: Any) -> bool:
    """Whether *result* stands for work that would be done after the lock of the call is released."""
    return hasattr(type(result), "__await__") or isinstance(result, (GeneratorType, AsyncGeneratorType))


def refusal_of(undone: Any, whose: str, advice: str) -> ConfigurationError:
    if isinstance(undone, CoroutineType | GeneratorType):
        # Otherwise Python would also warn that a coroutine was never awaited.
        undone.close()
    what = f"has returned a {type(undone).__name__}, whose work would be done after the lock is released"
    return ConfigurationError(f"{whose} {what}; {advice}")


# The leases of the bodies around the calling code. Weak, because contexts are copied and outlive the bodies.
current: ContextVar[tuple["ref[Holding]", ...]] = ContextVar("current_lease", default=())


def current_holding() -> "Holding | None":
    leases = current.get()
    return leases[-1]() if leases else None


def current_lease() -> Lease | None:
    """The lease under which the calling code runs, or None if it runs under none."""
    holding = current_holding()
    return None if holding is None else holding.view


def held_here(key: str) -> "Holding | None":
    leases = [lease() for lease in current.get()]
    return next((lease for lease in leases if lease is not None and lease.key == key), None)


@dataclass(eq=False)
class Hold:
    """One take of a lease through a `Lock`. The lease is renewed while this object exists."""

    lock: "ref[Any]"
    caller: tuple[int, object]  # thread and asyncio task
    lease: "Holding"
    takes: int  # the number of this take among those of the lease, from 1
    statement: object = None  # the `with` that took the lease

    @property
    def lasts(self) -> bool:
        return self.lease.unreleased and self.lease.takes >= self.takes

    @staticmethod
    def known() -> "list[Hold]":
        return [hold for known in holds.get() if (hold := known()) is not None]

    def remember(self) -> None:
        # If a signal handler raises between the grant and the `with` block, nobody releases the lease. The weak
        # reference lets the lease run out.
        known: Callable[[], Hold | None] = (lambda: self) if self.statement is None else ref(self)
        holds.set((*(each for each in holds.get() if (other := each()) is not None and other.lasts), known))

    def forget(self) -> None:
        holds.set(tuple([known for known in holds.get() if known() is not self]))
        if (lock := self.lock()) is not None:
            lock._blocks.pop(self, None)  # noqa: SLF001 (it is this library's)

    def give_back(self) -> None:
        self.forget()
        if self.lasts:
            self.lease.release()


KnownHolds = tuple[Callable[[], Hold | None], ...]

# Contexts are copied, and may list released holds, or holds of another thread or task.
holds: ContextVar[KnownHolds] = ContextVar("holds", default=())


def has_locked(key: str) -> bool:
    """Whether the calling thread holds *key* by a `Lock`, and would wait for ever."""
    here = threading.get_ident()
    return any(hold.lease.key == key and hold.caller[0] == here and hold.lasts for hold in Hold.known())


# Threads of our own ask the store, because the event loop's executor may be busy. If a coroutine is cancelled, its
# request goes on, and the lease is then given back.


async def acquire_in_loop(lease: "Holding", patience: float | None) -> Verdict:
    """Take the lease, or wait in line for *patience* seconds. None waits without a limit."""
    requests = _Requests(lease)
    try:
        answer = await requests.acquire()
        if isinstance(answer, Conflict) and patience != 0:
            answer = await _wait(lease, patience, requests)
            if not isinstance(answer, Grant):
                await requests.make(partial(_give_back, lease))
    except BaseException:
        requests.give_back_last()
        raise
    return answer


async def release_in_loop(lease: "Holding", *, may_wait: bool = True) -> None:
    """As `lease.release`. A coroutine that is being closed must not wait, and may have no loop any more."""
    requests = _Requests(lease) if may_wait else None
    if lease.let_go():
        # Before the first `await`, otherwise the lease could be released twice.
        lease.stop_keeping()
        if requests is not None:
            await requests.make(lease.give_back)
        else:
            background.submit(lease.give_back)


async def _wait(lease: "Holding", patience: float | None, requests: "_Requests") -> Verdict:
    give_up_at = clock() + (float("inf") if patience is None else patience)
    lease.stand_in_line()
    loop, rung = asyncio.get_running_loop(), asyncio.Event()
    channel, listener = lease.claim.channel, lease.store.listener

    def ring(_: str) -> None:
        try:
            loop.call_soon_threadsafe(rung.set)
        except RuntimeError:
            # The loop is closed, and never resumes this coroutine.
            listener.remove(channel)
            requests.give_back_last()

    listener.add(channel, ring)
    try:
        pause = pause_before(lease.claim, give_up_at)
        while True:
            # Not `wait_for`, which can lose a cancellation before Python 3.12.
            alarm = loop.call_later(pause, rung.set)
            try:
                await rung.wait()
            finally:
                # A pending alarm would keep the caller's context and its leases alive.
                alarm.cancel()
            rung.clear()
            answer = await requests.acquire()
            if not (pause := pause_after(answer, lease.claim, lease.store, give_up_at)):
                return answer
    finally:
        listener.remove(channel)


class _Requests:
    _last: "Future[Any] | None" = None

    def __init__(self, lease: "Holding") -> None:
        self._lease = lease
        self._loop = asyncio.get_running_loop()

    async def make(self, call: Callable[[], T]) -> T:
        """Run *call* in a thread, to its end even if this coroutine is cancelled."""
        loop, lease = self._loop, self._lease
        self._last = request = _submit(call)
        # If the loop is closed before the answer, this coroutine never goes on to release the lease. A callback that
        # refers to `self` would keep the lease alive until the garbage collector runs.
        request.add_done_callback(lambda _: _give_back(lease) if loop.is_closed() else None)
        return await asyncio.shield(asyncio.wrap_future(request))

    async def acquire(self) -> Verdict:
        return await self.make(partial(self._ask, clock()))

    def _ask(self, wanted_at: float) -> Verdict:
        # A silent store may have kept all threads busy.
        if clock() - wanted_at > ACQUIRE_BOUND:
            raise StoreError(self._lease.store.address, "no answer to earlier requests")
        return self._lease.acquire()

    def give_back_last(self) -> None:
        """Release the lease once the last request has ended, without waiting for that."""
        if (last := self._last) is not None:
            # In the background: the garbage collector may close a coroutine while its thread has the lock of a future
            # or of the pool. To wait for that lock here would be a deadlock.
            give_back = partial(_give_back, self._lease)
            background.submit(lambda: last.add_done_callback(lambda _: _submit(give_back)))


def _give_back(lease: "Holding") -> None:
    if lease.unreleased:
        lease.give_back()


def _submit(call: Callable[[], T]) -> "Future[T]":
    pid = os.getpid()
    pool = _pools.get(pid) or _pools.setdefault(pid, ThreadPoolExecutor(_THREADS, "singleton-lock"))
    return pool.submit(call)
