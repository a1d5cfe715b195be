"""The clock and the bounds of all requests to a store."""

import time
from collections.abc import Callable
from functools import partial
from urllib.parse import unquote

# CLOCK_BOOTTIME goes on while the machine is suspended, as the server's clock does.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

clock: Callable[[], float] = partial(time.clock_gettime, _CLOCK)
"""Seconds on the local clock by which deadlines are kept; it never steps."""


def lock_name_of(key: str) -> str:
    """The lock name inside *key*, without prefix and digest."""
    return unquote(key.partition("{")[2].rpartition(":")[0])


ACQUIRE_BOUND = 5.0
RELEASE_BOUND = 2.0
PUBLISH_BOUND = 2.0
