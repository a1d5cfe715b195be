"""`Lock`: the lease of tasks, for code that is no task."""

import asyncio
import contextlib
import inspect
import os
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine
from functools import wraps
from typing import Any, Literal, ParamSpec, TypeVar, cast
from weakref import ref

from celery import Celery, Task, current_app

from celery_singleton_lock.definition import keys, options, settings
from celery_singleton_lock.errors import DOCS, ConfigurationError, SingletonLockError
from celery_singleton_lock.leases.holding import Holding
from celery_singleton_lock.leases.lease import Hold, Lease, acquire_in_loop, is_undone, refusal_of, release_in_loop
from celery_singleton_lock.stores import shared_store
from celery_singleton_lock.stores.records import WHOLE, Claim, Conflict, LockState, Verdict, new_token
from celery_singleton_lock.stores.redis.store import Store
from celery_singleton_lock.stores.threads import running_loop, waits_stop_greenlets

P = ParamSpec("P")
R = TypeVar("R")

_NOT_MINE = (
    "is not held by this thread, asyncio task or process. Release it where it was acquired, or call lease.release() "
    "in any thread of that process"
)
_BLOCKS_LOOP = (
    "is held by others, and this thread runs an event loop, which a wait would block, maybe for ever: write "
    "`async with lock`, or `await lock.aacquire(timeout=...)`, or ask once by acquire(blocking=False)"
)
_STOPS_GREENLETS = (
    "cannot be waited for: gevent or eventlet has patched only a part of this process, so a wait would stop all its "
    "greenlets, also the one that holds the lock. Call gevent.monkey.patch_all() or eventlet.monkey_patch() before any "
    "other import, or ask once by acquire(blocking=False)"
)
_TAKES_FUNCTIONS = (
    "give a function, or a coroutine function; in a generator take the lock inside, and at a task put "
    f"this decorator below the task's own, see {DOCS}how-to/lock-without-a-task/"
)


class Lock:
    """A lock with at most *limit* holders at once, in all processes that use the store.

    Each holder has a lease, which is renewed in the background and expires if the process dies. Waiters are served in
    the order of their arrival. `lease.lost`, `lease.check()` and the `lock_lost` signal report a loss; nothing is
    raised in running code.

    Threads and asyncio tasks compete with each other, and so do objects with the same name. A `with` block may end in
    another context or thread of its process. After a fork, the child holds nothing.

    In a coroutine, write `async with`, `await lock.aacquire()` and `await lease.arelease()`. A blocking call raises an
    error there if it would have to wait.

    Arguments:
        name: The name of the lock, 1 to 200 characters.
        url: The store, as in `singleton_lock_url` (default: the store of *app*).
        app: The Celery app whose settings apply (default: the current app).
        ttl: Seconds that a lease lasts without renewal, at least 1.
        limit: How many may hold the lock at once. Give all objects of one name the same limit, because each object asks
            with its own.
        reentrant: The thread, greenlet or asyncio task that holds the lock may acquire it again through this object,
            and releases it as often. Do not use it for calls in an executor: asyncio tasks whose calls run in one
            thread would hold the lock together.
        timeout: Seconds that a `with` or `async with` block, or a decorated call, waits. 0 asks once, None waits
            without limit. `lock.timeout` may be set later.

    Raises:
        ConfigurationError: A value cannot work, or there is no store.
    """

    # `lock_for` makes a lock that takes all places.
    _is_whole = False

    def __init__(
        self,
        name: str,
        *,
        url: str | None = None,
        app: "Celery[Any] | None" = None,
        ttl: options.Duration = 30,
        limit: int = 1,
        reentrant: bool = False,
        timeout: options.Duration | None = None,
    ) -> None:
        if app is not None and not isinstance(app, Celery):
            raise options.not_allowed("app", app, "give a Celery app, or None for the current one")
        self._app: Celery[Any] = app or current_app._get_current_object()  # noqa: SLF001 (stores are kept by the app itself)
        self._url = url
        # Fail now if there is no store.
        _ = self._store
        self._key = keys.key_of(options.prefix_of(self._app), keys.checked_name(name), {})
        self._ttl = options.seconds("ttl", ttl, least=1)
        self._limit = options.count("limit", limit)
        self._reentrant = options.flag("reentrant", reentrant)
        _seconds_to_wait(True, timeout)
        self.timeout = timeout
        # Keeps the holds of open blocks alive. `Hold.remember` refers to them weakly, and their leases could run out.
        self._blocks: dict[Hold, bool] = {}

    def __enter__(self) -> Lease:
        """Take the lock, or raise `LockHeld` after *timeout* seconds."""
        lease = self._take(_seconds_to_wait(True, self.timeout), _statement())
        # Call nothing after the grant: if a signal handler raised there, nobody would release the lease.
        assert lease is not None
        return lease

    def __exit__(self, error_type: object = None, *_: object) -> Literal[False]:
        """Release the lease of this block, in any context or thread, unless it was released before.

        Raises:
            SingletonLockError: The block was not entered in this process, or was left before.
        """
        hold = None
        try:
            hold = self._leave(_statement(), error_type)
            if hold is not None:
                hold.give_back()
        except BaseException:
            # A signal handler may have raised before the release, even before `hold` was assigned.
            hold = hold or self._block_left_by(_statement())
            if hold is not None:
                hold.give_back()
            raise
        return False

    # No `async def`: `_statement` needs the frame of the caller.
    def __aenter__(self) -> Coroutine[Any, Any, Lease]:
        """As `__enter__`, without blocking the event loop."""
        return self._enter(_statement())

    def __aexit__(self, error_type: object = None, *_: object) -> Coroutine[Any, Any, Literal[False]]:
        """As `__exit__`, without blocking the event loop; even a cancelled `await` releases the lease."""
        return self._exit(_statement(), error_type)

    async def _enter(self, statement: object) -> Lease:
        lease = await self._take_in_loop(_seconds_to_wait(True, self.timeout), statement)
        assert lease is not None
        return lease

    async def _exit(self, statement: object, error_type: object) -> Literal[False]:
        hold = self._leave(statement, error_type)
        if hold is not None:
            hold.forget()
            if hold.lasts:
                await release_in_loop(hold.lease, may_wait=error_type is not GeneratorExit)
        return False

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate a function or a coroutine function: each call of it holds the lock.

        Raises:
            ConfigurationError: *function* is neither, or is a generator function. A call raises this error if it
                returns an awaitable or a generator, whose work would be done after the release.
        """
        is_lazy = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
        if is_lazy or not callable(function) or isinstance(function, type | Task):
            raise ConfigurationError(f"lock key={self._key} cannot decorate {function!r:.80}: {_TAKES_FUNCTIONS}")

        @wraps(function)
        def locked(*args: P.args, **kwargs: P.kwargs) -> R:
            with self:
                return self._done(function, function(*args, **kwargs))

        @wraps(function)
        async def locked_coroutine(*args: P.args, **kwargs: P.kwargs) -> Any:
            async with self:
                return self._done(function, await cast("Awaitable[Any]", function(*args, **kwargs)))

        return cast("Callable[P, R]", locked_coroutine) if inspect.iscoroutinefunction(function) else locked

    def _done(self, function: Callable[..., Any], result: R) -> R:
        if is_undone(result):
            advice = "decorate an `async def`, or take the lock where the work is done"
            raise refusal_of(result, f"lock key={self._key}: {function!r:.80}", advice)
        return result

    @property
    def key(self) -> str:
        """The lock key."""
        return self._key

    def state(self) -> LockState:
        """Who holds the lock, who comes next, how many wait, and when a cool-down ends."""
        return self._store.survey([self._key])[0]

    def acquire(self, blocking: bool = True, timeout: options.Duration | None = None) -> Lease | None:
        """Take the lock; the arguments are those of `threading.Lock`.

        Arguments:
            blocking: Wait until the lock is free; False asks once.
            timeout: Seconds to wait at most. None waits without limit, whatever `lock.timeout` is.

        Returns:
            The lease, or None if the lock did not become free in time.

        Raises:
            StoreError: The store did not answer within 5 s. The lock is not held.
            ConfigurationError: *timeout* is negative, or given with `blocking=False`.
            SingletonLockError: The call would have to wait in a thread that runs an event loop.
        """
        return self._take(_seconds_to_wait(blocking, timeout))

    async def aacquire(self, timeout: options.Duration | None = None) -> Lease | None:
        """As `acquire`, without blocking the event loop; after a cancelled `await`, the lock is not held."""
        return await self._take_in_loop(_seconds_to_wait(True, timeout))

    def release(self) -> None:
        """Release the lease that this thread or asyncio task acquired last. Elsewhere, call `lease.release()`.

        Raises:
            SingletonLockError: This thread or task holds no lease through this object.
        """
        hold = self._latest()
        if hold is None:
            raise SingletonLockError(f"lock key={self._key} {_NOT_MINE}")
        hold.lease.release()

    @property
    def _store(self) -> Store:
        if settings.stores_of_locks:
            return settings.stores_of_locks[-1](self._app)
        return settings.store_of(self._app) if self._url is None else shared_store(self._url)

    def _take(self, patience: float | None, statement: object = None) -> Lease | None:
        if patience != 0 and waits_stop_greenlets():
            # Refuse even a free lock: otherwise the error would come only under contention.
            raise ConfigurationError(f"lock key={self._key} {_STOPS_GREENLETS}")
        hold = self._begin(statement)
        try:
            answer = hold.lease.acquire() if hold.takes == 1 else None
            if isinstance(answer, Conflict) and patience != 0:
                if running_loop() is not None:
                    raise SingletonLockError(f"lock key={self._key} {_BLOCKS_LOOP}")
                answer = hold.lease.wait(patience)
            return self._taken(hold, answer)
        except BaseException:
            hold.give_back()
            raise

    async def _take_in_loop(self, patience: float | None, statement: object = None) -> Lease | None:
        hold = self._begin(statement)
        try:
            answer = await acquire_in_loop(hold.lease, patience) if hold.takes == 1 else None
        except BaseException:
            hold.forget()
            raise
        return self._taken(hold, answer)

    def _begin(self, statement: object) -> Hold:
        latest = self._latest() if self._reentrant else None
        is_again = latest is not None and latest.lease.time_left > 0
        lease = latest.lease if latest is not None and is_again else self._new_lease()
        hold = Hold(ref(self), _caller(), lease, lease.takes + is_again, statement)
        hold.remember()
        return hold

    def _taken(self, hold: Hold, answer: Verdict | None) -> Lease | None:
        if isinstance(answer, Conflict):
            hold.give_back()
            if hold.statement is not None:
                raise answer.first.refusal
            return None
        if hold.takes > 1:
            hold.lease.takes += 1
        else:
            hold.lease.report_granted()
        if hold.statement is not None:
            # Only now: otherwise another thread could leave a block that has not begun.
            self._blocks[hold] = True
        return hold.lease.view

    def _latest(self) -> Hold | None:
        caller = _caller()
        mine = [hold for hold in Hold.known() if hold.lock() is self and hold.caller == caller and hold.lasts]
        return mine[-1] if mine else None

    def _leave(self, statement: object, error_type: object) -> Hold | None:
        """The hold of the block that *statement* ends, or None if no open block is known."""
        # Look again if another thread has left the block that was found.
        while (hold := self._block_left_by(statement)) is not None and not self._blocks.pop(hold, False):
            pass
        # Report an unknown block, but do not hide an error of the block itself. `GeneratorExit` is no error.
        if hold is None and error_type in (None, GeneratorExit):
            why = "nobody in this process has entered it through this object, or it was left already"
            raise SingletonLockError(f"the block of lock key={self._key} cannot be left here: {why}")
        return hold

    def _block_left_by(self, statement: object) -> Hold | None:
        """The hold of the block that *statement* ends, begun in any thread.

        If *statement* began no open block, prefer a block of this context, then a block whose lease is over, then the
        newest block. A wrong choice could release a live lease.
        """
        blocks = [hold for hold in reversed(tuple(self._blocks)) if hold.lease.pid == os.getpid()]
        known = Hold.known()

        def likeness(hold: Hold) -> tuple[bool, ...]:
            own = hold.statement == statement
            return (own,) if own else (own, hold in known, not hold.lease.time_left)

        found = max(blocks, key=likeness, default=None)
        # The holds of a re-entrant lease end newest first.
        return found and next(hold for hold in blocks if hold.lease is found.lease)

    def _new_lease(self) -> Holding:
        token = f"{WHOLE if self._is_whole else ''}{new_token()}"
        claim = Claim(self._key, token, self._ttl, self._limit, hostname=socket.gethostname(), pid=os.getpid())
        return Holding(self._store, claim, sender=Lock)


def _statement() -> object:
    """An id of the calling `with`, the same at its start and end, in any thread."""
    # A greenlet that begins with this call has no calling frame.
    frame = sys._getframe(1).f_back  # noqa: SLF001 (there is no public one)
    if frame is not None and frame.f_globals is vars(contextlib):
        # An `ExitStack` enters and leaves in different frames.
        return id(frame.f_locals.get("self")), contextlib
    # Not the frame itself, which would keep the caller's variables alive. The code is added because a later frame may
    # have the same id.
    return id(frame), frame and frame.f_code


def _caller() -> tuple[int, object]:
    """The calling thread and asyncio task. Not the context: a new task copies it."""
    loop = running_loop()
    task = asyncio.current_task(loop) if loop is not None else None
    return threading.get_ident(), task and ref(task)


def _seconds_to_wait(blocking: bool, timeout: options.Duration | None) -> float | None:
    """0 asks once, None waits without limit."""
    if timeout is None:
        return None if blocking else 0.0
    if not blocking:
        raise ConfigurationError(f"timeout={timeout!r} goes with blocking=True only")
    return options.seconds("timeout", timeout, least=0)
