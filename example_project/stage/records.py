"""The records of a shop: one Redis stream, apart from everything the lock keeps there."""

import time
from dataclasses import dataclass

from redis import Redis

_STREAM = "shop:records"
_KEPT = 50_000
# The same clock in all processes and containers of a machine; it never steps.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


@dataclass(frozen=True, slots=True)
class Record:
    """One line: what happened, when (nanoseconds), and the rest."""

    what: str
    at: int
    facts: dict[str, str]


class Records:
    """The stream at *url*, to write to and to read what is new."""

    def __init__(self, url: str) -> None:
        self._redis = Redis.from_url(url, decode_responses=True)
        self._unread_from = "-"

    def write(self, what: str, **facts: str | int) -> None:
        at = time.clock_gettime_ns(_CLOCK)
        self._redis.xadd(_STREAM, {"what": what, "at": at, **facts}, maxlen=_KEPT)

    def unread(self) -> list[Record]:
        entries = self._redis.xrange(_STREAM, min=self._unread_from)
        if entries:
            self._unread_from = f"({entries[-1][0]}"
        return [Record(facts.pop("what"), int(facts.pop("at")), facts) for _, facts in entries]
