"""Which leases the calling code runs under."""

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
    """The lease on *key* under which the calling code runs, or None; a wait for that key would never end."""
    leases = [lease() for lease in _current.get()]
    return next((lease for lease in leases if lease is not None and lease.key == key), None)


class running_under:  # noqa: N801 (it reads as what it does)
    """Let `current_lease()` find *lease* inside.

    By hand, because a generator costs each run several times as much.
    """

    __slots__ = ("_before", "_lease")

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self._before = _current.get()

    def __enter__(self) -> None:
        try:
            _current.set((*self._before, ref(self._lease)))
        except BaseException:
            # A signal handler may raise after the variable was set.
            _current.set(self._before)
            raise

    def __exit__(self, *_: object) -> None:
        _current.set(self._before)
