"""`singleton watch`: what becomes of locks, a line each; and on a terminal the list, again and again."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from typing import Any

import pytest

from celery_singleton_lock.settings import store_of
from celery_singleton_lock.stores.records import Claim, Facts
from celery_singleton_lock.stores.redis.store import Store
from tests.acceptance.conftest import APP
from tests.servers import free_port
from tests.waiting import until

CELERY, INTERVAL = [sys.executable, "-m", "celery", "-A"], ["singleton", "watch", "--interval", "0.1"]
COMMAND = [*CELERY, APP, *INTERVAL]
PATIENCE = 60.0
KEY = "singleton:v3:{shop:00}"


class Watch:
    """A `watch` that goes on, and what it has said."""

    def __init__(self, env: dict[str, str], *arguments: str, app: str = APP) -> None:
        command = [*CELERY, app, *INTERVAL, *arguments]
        self._process = subprocess.Popen(
            command, env={**os.environ, **env}, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self.lines: list[dict[str, Any]] = []
        self.errors: list[str] = []
        self._readers = [
            threading.Thread(target=self._read, args=each, daemon=True)
            for each in ((self._process.stdout, lambda line: self.lines.append(json.loads(line))),)
        ]
        self._readers.append(
            threading.Thread(target=self._read, args=(self._process.stderr, self.errors.append), daemon=True)
        )
        for reader in self._readers:
            reader.start()

    def _read(self, stream: Any, keep: Callable[[str], Any]) -> None:
        for line in stream:
            keep(line)

    def told(self, number: int) -> list[tuple[str, str | None]]:
        """Event and task id of the first so many lines."""
        until(lambda: len(self.lines) >= number or self._process.poll() is not None, "it is told", timeout=PATIENCE)
        return [(line["event"], line["task_id"]) for line in self.lines[:number]]

    def interrupted(self) -> int:
        self._process.send_signal(signal.SIGINT)
        return self._process.wait(PATIENCE)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for reader in self._readers:
            reader.join(PATIENCE)
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()


@pytest.fixture
def watch(tasks: Any, env: dict[str, str]) -> Iterator[Callable[..., Watch]]:
    with ExitStack() as started:

        def start(*arguments: str, **more: str) -> Watch:
            one = Watch({**env, **more}, *arguments)
            started.callback(one.close)
            return one

        yield start


@pytest.fixture
def store(tasks: Any) -> Store:
    return store_of(tasks.app)


def claim(token: str, *, ttl: float = 60.0, key: str = KEY, **more: Any) -> Claim:
    return Claim(key, token, ttl, facts=Facts(f"id-{token}", hostname="w1@web", pid=7), **more)


# As a program reads it.


def test_each_change_is_a_line(store: Store, watch: Callable[..., Watch]) -> None:
    store.acquire(claim("a"))
    watching = watch("--json")
    assert watching.told(1) == [("acquired", "id-a")]

    store.mark_queued(KEY, "id-q", 60.0, limit=0, quiet=0.0)
    assert watching.told(2)[1:] == [("waiting", "id-q")]
    with store.waiter(claim("w")) as waiter:
        waiter.ask()
        assert watching.told(3)[2:] == [("waiting", None)]
        store.release(claim("w"), None)
    store.unmark(KEY, "id-q")
    store.release(claim("a"), 1)
    assert watching.told(4)[3:] == [("released", "id-a")]
    store.acquire(claim("b"))
    assert watching.told(5)[4:] == [("acquired", "id-b")]
    assert watching.interrupted() == 0

    assert {(line["key"], line["hostname"]) for line in watching.lines if line["task_id"] != "id-q"} == {
        (KEY, "w1@web"),
        (KEY, None),
    }
    times = [datetime.fromisoformat(line["at"]) for line in watching.lines]
    assert times == sorted(times)
    assert all(abs((at - datetime.now(UTC)).total_seconds()) < PATIENCE * 6 for at in times)


@pytest.mark.prove
def test_whose_holder_has_died_is_told(store: Store, watch: Callable[..., Watch]) -> None:
    store.acquire(claim("lives", key="singleton:v3:{other:00}"))
    watching = watch()
    assert watching.told(1) == [("acquired", "id-lives")]

    # Long enough to be seen by a process that comes seldom to its turn.
    store.acquire(claim("a", ttl=5.0))

    assert watching.told(3)[1:] == [("acquired", "id-a"), ("released", "id-a")]


def test_the_token_is_in_no_line(store: Store, watch: Callable[..., Watch]) -> None:
    store.acquire(claim("secret"))
    watching = watch()
    watching.told(1)

    assert set(watching.lines[0]) == {"at", "event", "key", "task_id", "hostname"}


@pytest.mark.prove
def test_a_store_that_is_away_at_first_is_told_by_the_exit_code(env: dict[str, str]) -> None:
    locks = f"redis://:pa55@127.0.0.1:{free_port()}/0"

    done = subprocess.run(
        COMMAND, env={**os.environ, **env, "TEST_LOCKS": locks}, capture_output=True, text=True, timeout=PATIENCE
    )

    assert (done.returncode, done.stdout) == (69, "")
    assert "did not answer" in done.stderr
    assert "pa55" not in done.stderr


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
