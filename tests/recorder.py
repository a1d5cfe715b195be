"""Records when the bodies of the tests' tasks run, in a Redis list apart from the locks."""

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import redis

from tests.waiting import until

# Seconds; longer than any test keeps a gate shut. The pool then gets its process back.
_PATIENCE = 180.0


@dataclass(frozen=True)
class Event:
    """One line of the record. Times are CLOCK_BOOTTIME, the same for all processes of a machine."""

    name: str
    key: str
    run: str
    at: float
    pid: int
    facts: dict[str, Any]


class Recorder:
    def __init__(self, url: str) -> None:
        self._client = redis.Redis.from_url(url, decode_responses=True)

    def write(self, name: str, key: Any, run: str, **facts: Any) -> None:
        at = time.clock_gettime(time.CLOCK_BOOTTIME)
        line = {"name": name, "key": str(key), "run": run, "at": at, "pid": os.getpid(), "facts": facts}
        self._client.rpush("record", json.dumps(line))

    @contextmanager
    def body(self, key: Any, run: str, **facts: Any) -> Iterator[None]:
        """Record `enter` and `leave`. A killed body has no `leave`."""
        self.write("enter", key, run, **facts)
        try:
            yield
        finally:
            self.write("leave", key, run)

    def is_first(self, key: Any) -> bool:
        return bool(self._client.incr(f"asked:{key}") == 1)

    def events(self, name: str | None = None) -> list[Event]:
        lines: Any = self._client.lrange("record", 0, -1)
        events = [Event(**json.loads(line)) for line in lines]
        return sorted((event for event in events if name in (None, event.name)), key=lambda event: event.at)

    def begun(self, result: Any) -> Any:
        until(lambda: result.id in [event.run for event in self.events("enter")], "it runs", timeout=60)
        return result

    def wait_at(self, gate: str) -> None:
        until(lambda: self._client.exists(f"gate:{gate}"), f"the gate {gate} opens", timeout=_PATIENCE)

    def open_gate(self, gate: str) -> None:
        self._client.set(f"gate:{gate}", "open")

    def close(self) -> None:
        self._client.close()


def most_at_once(events: list[Event]) -> int:
    running: dict[str, int] = defaultdict(int)
    most = 0
    for event in events:
        running[event.key] += {"enter": 1, "leave": -1}.get(event.name, 0)
        most = max(most, running[event.key])
    return most


def of_key(recorder: Recorder, key: str, name: str | None = None) -> list[Event]:
    return [event for event in recorder.events(name) if event.key == key]


def numbers(recorder: Recorder, key: str = "k") -> list[int]:
    return [event.facts["number"] for event in of_key(recorder, key, "enter")]


def overlaps(events: list[Event]) -> list[tuple[Event, Event]]:
    """The `enter` events of each two runs that overlapped."""
    running: dict[str, dict[tuple[str, int], Event]] = defaultdict(dict)
    found = []
    for event in events:
        runs = running[event.key]
        if event.name == "enter":
            found += [(other, event) for other in runs.values()]
            runs[event.run, event.pid] = event
        elif event.name in ("leave", "died"):
            runs.pop((event.run, event.pid), None)
    return found
