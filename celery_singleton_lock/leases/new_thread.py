"""The moment at which a body starts a thread, when an exception for the body could hit the new thread instead."""

import gc
import sys
import threading
from typing import Any

from celery_singleton_lock.leases.event_loop import frame_of


def started_by(thread: int) -> threading.Thread | None:
    """The thread that *thread* is starting; None if it starts none, or only waits until that one runs."""
    was_enabled = gc.isenabled()
    # Python 3.11 lists the frames under a lock. A garbage collection that begins meanwhile may need the same lock.
    gc.disable()
    try:
        frame = sys._current_frames().get(thread)  # noqa: SLF001 (there is no other way)
    finally:
        if was_enabled:
            gc.enable()
    start = frame_of(threading.Thread.start, frame)
    if start is None:
        return None
    child: Any = start.f_locals["self"]
    # Once `start` waits for the new thread, an exception may break it off. Before, `start` would undo what the new
    # thread undoes as well.
    waits = start is not frame
    return None if waits and child._started.is_set() else child  # noqa: SLF001 (as above)


def end_start_of(child: Any) -> None:
    """Let `start` return though *child* has not said that it runs."""
    child._started.set()  # noqa: SLF001 (as above)
