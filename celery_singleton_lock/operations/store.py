"""The store of the locks: whether it answers, has the rights that runs need, and keeps its data."""

from collections.abc import Callable

from celery import Celery

from celery_singleton_lock.errors import ConfigurationError, StoreError
from celery_singleton_lock.operations.finding import Finding, a_few
from celery_singleton_lock.operations.server import NAMES, about_servers
from celery_singleton_lock.start import try_store
from celery_singleton_lock.stores.base import Store

OTHERS = ("locking", *NAMES, "clock", "expiry")
"""The checks that need an answer from the store."""

_SLOW = 0.02
_CLOCKS_DIFFER_BY = 1.0


def unseen(names: tuple[str, ...], why: str) -> list[Finding]:
    """None of them could be looked at."""
    return [Finding(name, None, why) for name in names]


def about_store(app: Celery, store: Store, start: str, timeout: float) -> list[Finding]:
    """All findings about the store, in which our keys begin with *start*.

    Raises:
        StoreError: It does not answer at all.
    """
    echo = store.echo(timeout)
    slow = "; that is slow, and each task waits for two answers" if echo.round_trip > _SLOW else ""
    return [
        Finding("store", True, f"{store.address} answers in {echo.round_trip * 1000:.2f} ms{slow}"),
        _locking(app, timeout),
        *if_allowed(NAMES, lambda: about_servers(store.about_servers(timeout))),
        _clock(echo.ahead),
        *if_allowed(("expiry",), lambda: [_expiry(sorted(store.without_expiry(start)))]),
    ]


def if_allowed(names: tuple[str, ...], look: Callable[[], list[Finding]]) -> list[Finding]:
    """The finding of a look, or the finding that the store does not allow it."""
    try:
        return look()
    except StoreError as error:
        return unseen(names, str(error))


def _locking(app: Celery, timeout: float) -> Finding:
    try:
        try_store(app, timeout)
    except (ConfigurationError, StoreError) as error:
        return Finding("locking", False, str(error))
    return Finding("locking", True, "a lock was acquired, waited for, released, and its waiter woken")


def _clock(ahead: float) -> Finding:
    if abs(ahead) <= _CLOCKS_DIFFER_BY:
        return Finding("clock", True, f"the store and this machine agree within {_CLOCKS_DIFFER_BY:g} s")
    side = "ahead of" if ahead > 0 else "behind"
    why = "ages and the slots of a beat are wrong by that, leases are not; mend the time service of the wrong one"
    return Finding("clock", False, f"that of the store is {abs(ahead):.1f} s {side} this machine's: {why}")


def _expiry(keys: list[str]) -> Finding:
    if not keys:
        return Finding("expiry", True, "each key of ours ends by itself")
    why = "something else has changed them; delete each once nobody holds it"
    return Finding("expiry", False, f"never end by themselves: {a_few(keys)}: {why}")
