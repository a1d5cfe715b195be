"""Which leases the calling code runs under, and which it has taken through a `Lock`."""

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from typing import NamedTuple
from weakref import ref

from celery_singleton_lock.leases.lease import Lease

running_loop: Callable[[], asyncio.AbstractEventLoop | None] = asyncio._get_running_loop  # noqa: SLF001
"""The event loop that this thread runs, or None. The public function raises then, which is slow."""

# Weakly, because contexts are copied and outlive what they were made for.
current: ContextVar[tuple["ref[Lease]", ...]] = ContextVar("current_lease", default=())


def current_lease() -> Lease | None:
    """The lease under which the calling code runs, or None if it runs under none."""
    leases = current.get()
    return leases[-1]() if leases else None


def held_here(key: str) -> Lease | None:
    """The lease on *key* under which the calling code runs, or None; a wait for that key would never end."""
    leases = [lease() for lease in current.get()]
    return next((lease for lease in leases if lease is not None and lease.key == key), None)


class Hold(NamedTuple):
    """One take of a lease through a `Lock`.

    Attributes:
        lock, caller: The `Lock`, and the process, thread and asyncio task that has taken it.
        takes: How often the lease was taken by then.
        in_block: A `with` statement has taken it.
    """

    lock: object
    caller: tuple[int, int, object]
    lease: Lease
    takes: int
    in_block: bool

    @property
    def lasts(self) -> bool:
        """It was not released, neither by the lock nor by the lease."""
        return self.lease.takes >= self.takes


holds: ContextVar[tuple[Hold, ...]] = ContextVar("holds", default=())
"""Nothing else keeps a lease that was taken by `Lock.acquire` and that the caller does not keep.

Contexts are copied, so a copy may list what another thread or task has taken, or what was released meanwhile.
"""


def live_holds() -> tuple[Hold, ...]:
    """Those that last, and those of blocks, which end with their block."""
    return tuple([hold for hold in holds.get() if hold.in_block or hold.lasts])


def give_back(hold: Hold) -> None:
    """End it, and release its lease unless that was done."""
    holds.set(tuple([one for one in holds.get() if one is not hold]))
    if hold.lasts:
        hold.lease.release()
