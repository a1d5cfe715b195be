"""The view that users have of a lease, and the leases under which the calling code runs."""

import asyncio
import os
import threading
from binascii import b2a_base64
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from types import AsyncGeneratorType, GeneratorType
from typing import TYPE_CHECKING, Any
from weakref import ref

from celery_singleton_lock.errors import LostReason
from celery_singleton_lock.leases import coroutines

if TYPE_CHECKING:
    from celery_singleton_lock.leases.holding import Holding

_SAFE_IN_URLS = bytes.maketrans(b"+/", b"-_")


def new_token() -> str:
    """A token that nobody else has."""
    # Each comes from the kernel: if a process is copied, by a fork or from a snapshot, a batch would be used twice.
    return b2a_base64(os.urandom(12), newline=False).translate(_SAFE_IN_URLS).decode()


class Lease:
    """One execution's time-bound right to a lock key.

    A lease is not mutual exclusion of side effects: a process that is paused past its deadline wakes up without the
    lease and continues until it checks. Call `check()` before a step that must not happen twice, and hand `fence` to a
    resource that can compare it with the greatest it has seen.

    The heartbeat renews it every third of its ttl, which leaves room for two missed renewals, and only while its run,
    its `Lock` or this object is referenced.

    Attributes:
        key: The lock key.
        token: Proof of this acquisition, fresh for each; not a secret, yet not to be reused.
        ttl: Seconds the lease lasts without renewal.
        fence: A number greater than that of any earlier lease on the key.
        acquired_at: When it was granted, by the store's clock, in UTC.
        took_over: The lease of the holder before it ran out without a release.
        waited: Seconds between the first refusal and the grant; 0.0 if it was granted at once.
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
        """Granted to this process, neither released nor lost, and its deadline lies ahead."""
        return self._holding.remaining() > 0.0

    @property
    def lost(self) -> bool:
        """It ended while it was still wanted, or its holder was asked to stop."""
        return self._holding.lost_reason is not None

    @property
    def lost_reason(self) -> LostReason | None:
        """`expired`, `taken`, `unreachable`, `replaced`, `broken`, or None while it is not lost."""
        return self._holding.lost_reason

    def remaining(self) -> float:
        """Seconds for which the lease is certainly ours; 0.0 once it is lost or released."""
        return self._holding.remaining()

    def check(self) -> None:
        """Return if the lease is ours at this moment; if its deadline has passed unrenewed, the store is asked.

        Raises:
            LockLost: It is not, or the store has not answered within a second.
        """
        self._holding.check()

    def release(self) -> None:
        """Give it back.

        Raises:
            SingletonLockError: It was released before, or belongs to the process that this one was forked from.
        """
        self._holding.release()

    async def arelease(self) -> None:
        """As `release`, without blocking the event loop; a cancelled `arelease` gives the lease back all the same."""
        await coroutines.release(self._holding)


_GENERATORS = GeneratorType, AsyncGeneratorType


def is_undone(result: Any) -> bool:
    """Whether *result* stands for work that somebody else has to do, after the lock of the call is released."""
    return hasattr(type(result), "__await__") or isinstance(result, _GENERATORS)


def task_id_of(lease: Lease) -> str | None:
    """The task id of the run that has the lease; None if it is no task's."""
    return lease._holding.task_id  # noqa: SLF001 (it is this library's)


# The leases under which the calling code runs, and those that it has taken through a `Lock`.

running_loop: Callable[[], asyncio.AbstractEventLoop | None] = asyncio._get_running_loop  # noqa: SLF001
"""The event loop that this thread runs, or None. The public function raises then, which is slow."""

# Weak references, because contexts are copied and outlive the bodies for which they were made.
current: ContextVar[tuple["ref[Holding]", ...]] = ContextVar("current_lease", default=())


def current_holding() -> "Holding | None":
    leases = current.get()
    return leases[-1]() if leases else None


def current_lease() -> Lease | None:
    """The lease under which the calling code runs, or None if it runs under none."""
    holding = current_holding()
    return None if holding is None else holding.view


def held_here(key: str) -> "Holding | None":
    """The lease with this key under which the calling code runs, if any; a wait for that key would never end."""
    leases = [lease() for lease in current.get()]
    return next((lease for lease in leases if lease is not None and lease.key == key), None)


@dataclass(eq=False)
class Hold:
    """One take of a lease through a `Lock`; it keeps the lease."""

    lock: "ref[Any]"
    caller: tuple[int, object]  # thread and asyncio task
    lease: "Holding"
    takes: int  # how often the lease was taken by then
    statement: object = None  # the `with` that has taken it, if one has

    @property
    def lasts(self) -> bool:
        """Neither the lock nor the lease has released it."""
        return self.lease.unreleased and self.lease.takes >= self.takes


KnownHolds = tuple[Callable[[], Hold | None], ...]

holds: ContextVar[KnownHolds] = ContextVar("holds", default=())
"""Nothing else keeps what `Lock.acquire` has taken. A block is kept by its `Lock`, as it may be left in any context.

Contexts are copied, so a copy may list what another thread or task has taken, or what was released meanwhile.
"""


def known_holds() -> list[Hold]:
    """The holds that this context lists, the last one last."""
    return [hold for known in holds.get() if (hold := known()) is not None]


def has_locked(key: str) -> bool:
    """The calling thread holds *key* by a `Lock`; a wait for it in this thread would never end."""
    here = threading.get_ident()
    return any(hold.lease.key == key and hold.caller[0] == here and hold.lasts for hold in known_holds())


def forget(hold: Hold) -> None:
    """End it; its lease is released otherwise, or was."""
    holds.set(tuple([known for known in holds.get() if known() is not hold]))
    if (lock := hold.lock()) is not None:
        lock._blocks.pop(hold, None)  # noqa: SLF001 (it is this library's)


def give_back(hold: Hold) -> None:
    """End it, and release its lease unless that was done."""
    forget(hold)
    if hold.lasts:
        hold.lease.release()
