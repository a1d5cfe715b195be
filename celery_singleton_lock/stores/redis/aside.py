"""Work that nobody waits for."""

import _thread
from collections.abc import Callable


def aside(call: Callable[[], None]) -> None:
    """Do it in a thread, because the caller may be the heartbeat, which nothing may hold up."""
    try:
        _thread.start_new_thread(call, ())
    except RuntimeError:
        # There are no threads any more at the end of a process.
        call()
