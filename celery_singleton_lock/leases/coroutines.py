"""Asking for a lease, waiting for it and giving it back without blocking an event loop.

The store is asked in a few threads of our own, and never in those of the loop. Whoever waits costs one channel of the
store's listener, and no thread. A coroutine can be cancelled at each `await`; a request that is under way goes on, and
what it brings is given back.
"""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from celery_singleton_lock.errors import SingletonLockError, StoreError
from celery_singleton_lock.leases.background import background
from celery_singleton_lock.leases.line import pause_after, pause_before
from celery_singleton_lock.stores.clock import clock
from celery_singleton_lock.stores.records import Conflict, Grant, Verdict
from celery_singleton_lock.stores.redis.listener import DEAF
from celery_singleton_lock.stores.redis.store import ACQUIRE_BOUND

if TYPE_CHECKING:
    from celery_singleton_lock.leases.holding import Holding

T = TypeVar("T")

_THREADS = 8
# By process: after a fork the threads are the parent's.
_pools: dict[int, ThreadPoolExecutor] = {}


async def acquire(lease: "Holding", patience: float | None) -> Verdict:
    """Take it, or queue for it for *patience* seconds; None waits for as long as it takes.

    Unless it is granted, nothing is left in the store, or will not be soon.
    """
    requests = _Requests(lease)
    try:
        answer = await requests.ask(lease.acquire)
        if isinstance(answer, Conflict) and patience != 0:
            answer = await _wait(lease, patience, requests)
            if not isinstance(answer, Grant):
                await requests.make(requests.give_back)
    except BaseException:
        requests.give_back_last()
        raise
    return answer


async def release(lease: "Holding") -> None:
    """Give it back; if this is cancelled, it is given back all the same. See `Lease.release`."""
    _loop(lease.key)
    if lease.let_go():
        # Now, so that nobody releases it twice.
        lease.stop()
        await _Requests(lease).make(lease.give_back)


def release_soon(lease: "Holding") -> None:
    """The same, for a coroutine that is closed and cannot wait any more."""
    if lease.let_go():
        lease.stop()
        background.submit(lease.give_back)


async def _wait(lease: "Holding", patience: float | None, requests: "_Requests") -> Verdict:
    give_up_at = clock() + (float("inf") if patience is None else patience)
    lease.stand_in_line()
    channel = lease.claim.channel
    listener = lease.store.listener

    def end() -> None:
        listener.remove(channel)
        requests.give_back_last()

    bell = _Bell(end)
    try:
        listener.add(channel, bell.ring)
        await bell.wait(pause_before(lease.claim, give_up_at))
        answer = await requests.ask(lease.acquire)
        while pause := pause_after(answer, lease.claim, give_up_at, is_deaf=bell.is_deaf):
            await bell.wait(pause)
            answer = await requests.ask(lease.acquire)
        return answer
    finally:
        listener.remove(channel)


def _loop(key: str) -> asyncio.AbstractEventLoop:
    try:
        return asyncio.get_running_loop()
    except RuntimeError as error:
        raise SingletonLockError(
            f"the lock key={key} can be awaited only where an event loop of asyncio runs (that of uvloop is one); "
            "elsewhere use `with lock`, lock.acquire() and lease.release()"
        ) from error


class _Requests:
    """Requests about a lease, in threads, one after the other."""

    _last: "Future[Any] | None" = None

    def __init__(self, lease: "Holding") -> None:
        self._lease = lease

    async def make(self, call: Callable[[], T]) -> T:
        """What *call* returns; it is made to its end, even if this is cancelled."""
        loop = _loop(self._lease.key)
        self._last = request = _submit(call)
        # Whoever has waited in a loop that was closed will never hear of it.
        request.add_done_callback(lambda _: self.give_back() if loop.is_closed() else None)
        return await asyncio.shield(asyncio.wrap_future(request))

    async def ask(self, call: Callable[[], T]) -> T:
        """The same, unless no thread comes to it in time: the store is silent to those who have asked before."""
        began_at = clock()

        def ask_in_time() -> T:
            if clock() - began_at > ACQUIRE_BOUND:
                raise StoreError(self._lease.store.address, "no answer to those that have asked before")
            return call()

        return await self.make(ask_in_time)

    def give_back_last(self) -> None:
        """After the request that is under way; nobody waits for it."""
        if (last := self._last) is not None:
            # Whoever calls may be the garbage collector, which ends a coroutine anywhere, also where the lock of a
            # future or of the pool is held.
            background.submit(lambda: last.add_done_callback(lambda _: _submit(self.give_back)))

    def give_back(self) -> None:
        if self._lease.unreleased:
            self._lease.give_back()


class _Bell:
    """Wakes a coroutine, from any thread, also while it does not sleep; *is_gone* is called if its loop was closed."""

    is_deaf = True
    """It may be rung by nobody."""

    def __init__(self, is_gone: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._is_gone = is_gone
        self._rung = asyncio.Event()

    def ring(self, what: str) -> None:
        def note() -> None:
            self.is_deaf = what == DEAF
            self._rung.set()

        try:
            self._loop.call_soon_threadsafe(note)
        except RuntimeError:
            # It was closed, so whoever waits there will never hear of it.
            self._is_gone()

    async def wait(self, seconds: float) -> None:
        """Return once it has been rung since the last time, and at the latest after *seconds*."""
        # Not `wait_for`, which loses a cancellation that comes together with the ringing, before Python 3.12.
        alarm = self._loop.call_later(seconds, self._rung.set)
        try:
            await self._rung.wait()
            self._rung.clear()
        finally:
            alarm.cancel()


def _submit(call: Callable[[], T]) -> "Future[T]":
    pid = os.getpid()
    pool = _pools.get(pid) or _pools.setdefault(pid, ThreadPoolExecutor(_THREADS, "singleton-lock"))
    return pool.submit(call)
