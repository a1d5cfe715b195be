"""Which leases the calling code runs under."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from weakref import ref

from celery_singleton_lock.leases.lease import Lease

# Weakly, because contexts are copied and outlive what they were made for.
_current: ContextVar[tuple["ref[Lease]", ...]] = ContextVar("current_lease", default=())


def current_lease() -> Lease | None:
    """The lease under which the calling code runs, or None if it runs under none."""
    leases = _current.get()
    return leases[-1]() if leases else None


def held_here(key: str) -> Lease | None:
    """The lease on *key* under which the calling code runs, so that to wait for it would never end."""
    leases = [lease() for lease in _current.get()]
    return next((lease for lease in leases if lease is not None and lease.key == key), None)


@contextmanager
def running_under(lease: Lease) -> Iterator[None]:
    """Let `current_lease()` find *lease* inside."""
    before = _current.get()
    try:
        _current.set((*before, ref(lease)))
        yield
    finally:
        _current.set(before)
