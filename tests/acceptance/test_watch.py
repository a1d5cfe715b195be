"""`singleton watch`: the list again and again, as lines of JSON, and on a terminal."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Any

import pytest

from celery_singleton_lock.stores.records import Claim, Facts
from celery_singleton_lock.stores.redis.store import Store
from tests.acceptance.conftest import APP
from tests.waiting import until

CELERY, INTERVAL = [sys.executable, "-m", "celery", "-A"], ["singleton", "watch", "--interval", "0.1"]
COMMAND = [*CELERY, APP, *INTERVAL]
PATIENCE = 60.0
KEY = "singleton:v3:{shop:00}"


Rows = list[tuple[str, str]]


class Watch:
    """A `watch` that goes on, and what it has written."""

    def __init__(self, env: dict[str, str], *arguments: str, app: str = APP) -> None:
        command = [*CELERY, app, *INTERVAL, *arguments]
        self._process = subprocess.Popen(command, env={**os.environ, **env}, text=True, stdout=subprocess.PIPE)
        self.updates: list[list[dict[str, Any]]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self.updates.append(json.loads(line))

    def shows(self, is_meant: Callable[[Rows], bool]) -> None:
        """Wait until the newest list has such rows: state and task id of each."""

        def is_shown() -> bool:
            assert self._process.poll() is None
            return bool(self.updates) and is_meant([(row["state"], row["task_id"]) for row in self.updates[-1]])

        until(is_shown, "it is shown", timeout=PATIENCE)

    def interrupted(self) -> int:
        self._process.send_signal(signal.SIGINT)
        return self._process.wait(PATIENCE)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join(PATIENCE)
        assert self._process.stdout is not None
        self._process.stdout.close()


def claim(token: str, *, ttl: float = 60.0, key: str = KEY, **more: Any) -> Claim:
    return Claim(key, token, ttl, facts=Facts(f"id-{token}", hostname="w1@web", pid=7), **more)


# As a program reads it.


def test_each_update_is_a_line_with_what_list_writes(store: Store, env: dict[str, str]) -> None:
    store.acquire(claim("secret"))
    with closing(Watch(env, "--json")) as watching:
        watching.shows(lambda rows: rows == [("held", "id-secret")])
        store.mark_queued(KEY, "id-q", 60.0, limit=0, cooldown=0.0)
        watching.shows(lambda rows: rows == [("held", "id-secret"), ("queued", "id-q")])
        store.unmark(KEY, "id-q")
        store.release(claim("secret"), 1)
        watching.shows(lambda rows: rows == [])
        assert watching.interrupted() == 0

        (row,) = watching.updates[0]
    assert (row["key"], row["hostname"], row["pid"], row["waiters"]) == (KEY, "w1@web", 7, 0)
    assert "secret" not in row.values()


# As a person reads it.


@pytest.mark.prove
def test_on_a_terminal_the_list_is_drawn_again(store: Store, env: dict[str, str]) -> None:
    store.acquire(claim("a"))
    screen, inside = pty.openpty()
    process = subprocess.Popen(
        COMMAND, env={**os.environ, **env, "COLUMNS": "60", "LINES": "5"}, stdin=inside, stdout=inside, stderr=inside
    )
    os.close(inside)
    said: list[str] = []

    def read() -> None:
        # The other end is closed when it ends.
        with suppress(OSError):
            while piece := os.read(screen, 65536):
                said.append(piece.decode())

    reader = threading.Thread(target=read, daemon=True)
    reader.start()

    def drawn() -> list[str]:
        # The last one may not be whole yet.
        return "".join(said).split("\x1b[H")[1:-1]

    try:
        until(lambda: any("id-a" in each for each in drawn()), "it is drawn", timeout=PATIENCE)
        for number in range(6):
            store.acquire(claim(f"b{number}", key=f"singleton:v3:{{shop:{number}0}}"))
        until(lambda: any("more" in each for each in drawn()), "it is drawn with all", timeout=PATIENCE)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        process.wait()
        reader.join(PATIENCE)
        os.close(screen)
    full = next(each for each in reversed(drawn()) if "... and 4 more" in each)
    lines = re.sub(r"\x1b\[[KJ]", "", full).splitlines()
    assert lines[0].startswith("LOCK")
    assert len(lines) <= 5
    assert all(len(line) <= 60 for line in lines)
    assert full.endswith("\x1b[J")
