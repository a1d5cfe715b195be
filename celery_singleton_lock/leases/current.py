"""Which lease the calling code runs under."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from celery_singleton_lock.leases.lease import Lease

_current: ContextVar[Lease | None] = ContextVar("current_lease", default=None)


def current_lease() -> Lease | None:
    """The lease under which the calling code runs, or None if it runs under none."""
    return _current.get()


@contextmanager
def running_under(lease: Lease) -> Iterator[None]:
    """Let `current_lease()` find *lease* inside."""
    before = _current.set(lease)
    try:
        yield
    finally:
        _current.reset(before)
