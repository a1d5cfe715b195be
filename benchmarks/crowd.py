"""The cost of very many messages that wait for one key: for the broker, the result backend and the store."""

import os
import re
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any, Self

from benchmarks import processor
from benchmarks.candidates import client_of
from tests.servers import running
from tests.waiting import until
from tests.workers import Worker

APP = "benchmarks.scale_app"
SERVERS = ("broker", "backend", "store")
PROCESSES = 4
PATIENCE = 180
A_MOMENT = 3.0
# The longest delay of those that are requeued, by a ttl of 30 s, and a bit.
SETTLED = 12.0
COUNTED = {"commands": ("tot-cmds",), "bytes": ("tot-net-in", "tot-net-out")}

Rates = dict[str, dict[str, float]]


class Crowd:
    """One worker, three servers, and a call of one policy that holds its key until this ends.

    Each needs a process of its own, because an app knows one broker for ever.
    """

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with self._stack:
            self._gate = Path(self._stack.enter_context(tempfile.TemporaryDirectory())) / "gate"
            servers = {name: self._stack.enter_context(running("valkey")) for name in SERVERS}
            os.environ.update({f"SCALE_{name.upper()}": server.url for name, server in servers.items()})
            self._clients = {name: client_of(server.url) for name, server in servers.items()}
            self._task = import_module(APP).one_key[self._policy]
            # A caller has an ear for each result, which would be counted as well.
            self._task.backend.on_task_call = lambda *_: None
            self._worker = Worker(APP, {}, concurrency=PROCESSES)
            self._stack.callback(self._worker.close)
            self._worker.start().ready()
            self._holder = self._send(0, until=str(self._gate))
            until(lambda: self._task.lock_holders(0), "the holder runs")
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def grow(self, number: int) -> None:
        """Send so many calls, and have them settle."""
        before = self._seen()
        with self._task.app.producer_pool.acquire() as producer:
            for each in range(number):
                self._send(each + 1, producer=producer)
        if self._policy != "wait":
            until(lambda: self._seen() >= before + number, "each has come", timeout=PATIENCE)
        time.sleep(SETTLED)

    def waiting(self) -> int:
        """How many messages the broker has, besides the holder's, which was acknowledged when it began."""
        broker = self._clients["broker"]
        return int(broker.llen("celery") + broker.hlen("unacked"))

    def rates(self, seconds: float) -> Rates:
        """Commands of each server in a second, lines in the worker's log, and cores that the worker keeps busy."""
        before, lines, worked, begun = self._counts(), self._lines(), processor.seconds(self._worker.pid), time.time()
        time.sleep(seconds)
        after, passed = self._counts(), time.time() - begun
        found = {name: {what: _grown(before[name], after[name], what) / passed for what in COUNTED} for name in SERVERS}
        worked = processor.seconds(self._worker.pid) - worked
        return {**found, "worker": {"lines": (self._lines() - lines) / passed, "processor": worked / passed}}

    def kept(self) -> dict[str, int]:
        """Bytes in each server."""
        return {name: int(client.info("memory")["used_memory_dataset"]) for name, client in self._clients.items()}

    def _send(self, number: int, producer: Any = None, **arguments: Any) -> Any:
        return self._task.apply_async((number,), arguments, producer=producer)

    def _seen(self) -> int:
        """How many calls the worker has received, each once."""
        return len(set(re.findall(r"Task \S+\[(\S+)\] received", self._worker.log())))

    def _lines(self) -> int:
        return self._worker.log().count("\n")

    def _counts(self) -> dict[str, Mapping[str, Mapping[str, str]]]:
        own = {name: str(client.client_id()) for name, client in self._clients.items()}
        return {
            name: {one["id"]: one for one in client.client_list() if one["id"] != own[name]}
            for name, client in self._clients.items()
        }


def _grown(before: Mapping[str, Mapping[str, str]], after: Mapping[str, Mapping[str, str]], what: str) -> int:
    """By how much, summed over the connections that are there in the end."""
    return sum(
        int(one[counter]) - int(before.get(number, {}).get(counter, 0))
        for number, one in after.items()
        for counter in COUNTED[what]
    )


def of_one_message(policy: str, crowds: tuple[int, ...], seconds: float) -> dict[str, Any]:
    """The rates with each crowd, less those of the holder alone, and a message's part of them."""
    with Crowd(policy) as crowd:
        time.sleep(A_MOMENT)
        alone, empty, came, found = crowd.rates(seconds), crowd.kept(), 0, {}
        for number in crowds:
            crowd.grow(number - came)
            came = number
            waiting, kept = crowd.waiting(), crowd.kept()
            rates = crowd.rates(seconds)
            found[str(number)] = {
                "waiting": waiting,
                "rates": {name: _less(rates[name], alone[name]) for name in rates},
                "kept": {name: kept[name] - empty[name] for name in kept},
            }
    return {"processes": PROCESSES, "crowds": found}


def _less(rates: Mapping[str, float], alone: Mapping[str, float]) -> dict[str, float]:
    return {what: rate - alone[what] for what, rate in rates.items()}
