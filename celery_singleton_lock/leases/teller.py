"""Telling others of what has happened, without waiting for them."""

import logging
import os
import threading
from collections import deque
from collections.abc import Callable

from celery_singleton_lock.leases.one_thread import OneThread

logger = logging.getLogger("celery_singleton_lock")


class Teller:
    """Calls foreign code, one call after the other, in a thread of its own.

    The heartbeat must not wait for a receiver, or a handler of the log, that takes
    its time: all leases of its store would go without a renewal.

    Arguments:
        name: What the thread is called.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._start_over()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._start_over)

    def _start_over(self) -> None:
        self._lock = threading.RLock()
        self._calls: deque[Callable[[], object]] = deque()
        self._thread = OneThread(self._name, self._run, self._lock)

    def tell(self, call: Callable[[], object]) -> None:
        """Call it soon, after the earlier calls."""
        with self._lock:
            self._calls.append(call)
            self._thread.ensure()

    def _run(self) -> None:
        while (call := self._next()) is not None:
            try:
                call()
            except Exception:
                logger.exception("lock.untold: a receiver has failed")

    def _next(self) -> Callable[[], object] | None:
        with self._lock:
            return self._calls.popleft() if self._thread.goes_on(bool(self._calls)) else None


teller = Teller("teller")
"""For those who receive signals."""

scribe = Teller("scribe")
"""For what the heartbeat writes to the log, which no receiver may hold up."""
