"""What happened, as lines in a file: whoever is killed leaves what it has written, and no store is asked."""

import json
import os
import time
from typing import Any

from tests.recorder import Event


def now() -> float:
    """The clock of the library's deadlines, the same for all processes of a machine."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Record:
    """Appends to the file, each event in one write."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, name: str, key: str = "", run: str = "", **facts: Any) -> None:
        line = {"name": name, "key": key, "run": run, "at": now(), "pid": os.getpid(), "facts": facts}
        os.write(self._file, json.dumps(line).encode() + b"\n")


class Reader:
    """Reads the file as it grows."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "rb")  # noqa: SIM115 (it stays open)
        self._unfinished = b""

    def unread(self) -> list[Event]:
        *lines, self._unfinished = (self._unfinished + self._file.read()).split(b"\n")
        return [Event(**json.loads(line)) for line in lines]
