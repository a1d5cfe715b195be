"""The story of the shop: who does what, and when.

Run as a program it plays the story to workers that are there already, and ends
with 1 if two runs of a key overlapped.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator

from celery import Task
from celery.result import AsyncResult
from kombu.exceptions import OperationalError
from rich.console import Console

from example_project.app import BROKER_URL, LOCKED, TTL, app, database
from example_project.stage.history import History
from example_project.stage.recorder import key_of, records
from example_project.stage.records import Records
from example_project.stage.report import report
from example_project.tasks import book_delivery, import_catalog, rebuild_index, send_invoice, sync_prices

WORKERS = 2
DELIVERIES = (10, 20, 30, 40, 50)
CHANGES = (1, 2, 3, 4)

LAMPS = key_of(book_delivery, ["lamp"])
KEYS = (
    key_of(import_catalog, ["acme"]),
    key_of(import_catalog, ["bolt"]),
    key_of(sync_prices, []),
    key_of(send_invoice, [1042]),
    LAMPS,
    key_of(rebuild_index, [CHANGES[0]]),
)


def story() -> Iterator[AsyncResult]:
    """Let it happen; yields every call that is made."""
    tell("Acme's script uploads its catalogue three times, Bolt's once.")
    yield import_catalog.delay("acme")
    pause(0.5)
    yield import_catalog.delay("acme")
    yield import_catalog.delay("bolt")
    pause(0.7)
    yield import_catalog.delay("acme")
    tell("Four articles change; each change asks for a new search index.")
    for change in CHANGES:
        yield rebuild_index.delay(change)
        pause(0.15)
    pause(1.7)
    tell("A clerk clicks twice on `send invoice`.")
    yield send_invoice.delay(1042)
    pause(0.3)
    yield send_invoice.delay(1042)
    pause(1.2)
    tell(f"Lamps are delivered, and each delivery counts. The ttl is {TTL} s.")
    yield book_delivery.delay("lamp", DELIVERIES[0])
    let_the_worker_die()
    pause(0.8)
    tell("Four more deliveries of lamps arrive at once.")
    for pieces in DELIVERIES[1:]:
        yield book_delivery.delay("lamp", pieces)


def play() -> None:
    """Play the story, and wait until every call in it has ended."""
    until(workers_are_ready, "the workers are ready", seconds=40)
    database.delete("shelf:lamp", "mails:1042", "index")
    calls = list(story())
    watches = [KeyWatch(book_delivery, "lamp", 0), KeyWatch(sync_prices)] if LOCKED else []

    def ended() -> bool:
        for watch in watches:
            watch.look()
        return all(call.ready() for call in calls)

    until(ended, "every call has ended", seconds=40)
    lamps, mails, index = database.mget("shelf:lamp", "mails:1042", "index")
    records.write("end", lamps=lamps or 0, delivered=sum(DELIVERIES), mails=mails or 0, index=index or 0)


def tell(text: str) -> None:
    records.write("told", text=text)


def pause(seconds: float) -> None:
    """Let the people in the story take their time."""
    time.sleep(seconds)


def let_the_worker_die() -> None:
    """Wait until the worker of this delivery is killed, if it will be.

    Celery's Redis transport takes a message off the list before it notes it as
    unacknowledged. A message that the dying worker takes would be lost.
    """
    if os.environ.get("SHOP_KILL") != "on":
        return
    watched = Records(BROKER_URL)
    until(lambda: any(record.what == "killed" for record in watched.unread()), "a worker is killed", seconds=30)


def workers_are_ready() -> bool:
    try:
        replies = app.control.inspect(timeout=1.0, limit=WORKERS).ping()
    except OperationalError:
        return False
    return len(replies or {}) == WORKERS


class KeyWatch:
    """Writes down when the lock key of a call comes free."""

    def __init__(self, task: Task, *args: object) -> None:
        self._task, self._args = task, args
        self._held = False

    def look(self) -> None:
        held = bool(self._task.lock_holders(*self._args))
        if self._held and not held:
            records.write("free", key=key_of(self._task, self._args))
        self._held = held


def until(condition: Callable[[], object], what: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:g} s: {what}")
        time.sleep(0.05)


def main() -> int:
    try:
        play()
    except TimeoutError as late:
        print(late)
    history = History(locked=LOCKED, keys=KEYS)
    history.read(Records(BROKER_URL).unread())
    return report([history], Console(highlight=False))


if __name__ == "__main__":
    sys.exit(main())
