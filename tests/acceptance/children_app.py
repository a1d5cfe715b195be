"""Tasks whose bodies let no other thread of their process run, as a computation in C may."""

import ctypes
from typing import Any

from celery_singleton_lock import SingletonTask
from tests.acceptance.app import app, recorder

__all__ = ["app"]


def holding_the_gil(name: str, ttl: float, **options: Any) -> Any:
    options |= {"name": name, "lock_key": ("key",), "lock_ttl": ttl, "lock_on_conflict": "reschedule"}

    @app.task(base=SingletonTask, bind=True, **options)
    def holds_the_gil(self: Any, key: str, seconds: float) -> None:
        with recorder.body(key, self.request.id):
            # Unlike other functions called by ctypes, those of a PyDLL keep the GIL.
            ctypes.PyDLL(None).usleep(round(seconds * 1_000_000))

    return holds_the_gil


TTL = 15.0
"""The main process renews when less than half of it is left, looks eight times per ttl, and may stand still for 5 s."""

holds_the_gil = holding_the_gil("children.holds_the_gil", TTL)
is_stopped = holding_the_gil("children.is_stopped", 4)
is_killed = holding_the_gil("children.is_killed", 4, lock_on_lost="kill")
