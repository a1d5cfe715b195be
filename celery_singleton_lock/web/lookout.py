"""All locks of an app, looked at no more often than their store can bear."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.operations.inventory import Locks, Row
from celery_singleton_lock.stores.base import clock

# After a look, nobody looks again for so many times its duration, so requests cost the store at most a twentieth of
# its time.
_REST = 20
_REST_AFTER_A_FAILURE = 1.0


@dataclass(frozen=True)
class Seen:
    """The result of a look.

    Attributes:
        rows: Holders and marks, in the order of `list`.
        seconds: How long the look took.
    """

    rows: list[Row]
    seconds: float


class Lookout:
    """Looks at the locks of an app for all requests, in any thread.

    Arguments:
        locks: Returns the locks; called at each look, because an app may move to another store.
    """

    def __init__(self, locks: Callable[[], Locks]) -> None:
        self._locks = locks
        self._lock = threading.Lock()
        self._kept: Seen | StoreError | None = None
        self._kept_until = 0.0

    def look(self) -> Seen:
        """All locks, as they are now or were a moment ago.

        Raises:
            StoreError: No answer in time, or none a moment ago.
        """
        with self._lock:
            if self._kept is None or clock() >= self._kept_until:
                self._look()
            if isinstance(self._kept, StoreError):
                raise type(self._kept)(*self._kept.args)
            assert self._kept is not None
            return self._kept

    def forget(self) -> None:
        """Look again at the next request, because something was changed."""
        self._kept_until = 0.0

    def _look(self) -> None:
        began_at = clock()
        try:
            rows = self._locks().rows()
        except StoreError as error:
            self._kept, self._kept_until = error, clock() + _REST_AFTER_A_FAILURE
        else:
            self._kept = Seen(rows, clock() - began_at)
            self._kept_until = clock() + _REST * self._kept.seconds
