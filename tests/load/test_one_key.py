"""One key's crowd harms no other key, and costs the server, the worker and the wire no more than a bounded amount."""

import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from celery_singleton_lock import Lock
from celery_singleton_lock.leases.line import InLine, Line
from celery_singleton_lock.stores.clock import clock
from celery_singleton_lock.stores.records import RELEASED, Claim, Conflict, Grant
from celery_singleton_lock.stores.redis.store import Store
from tests.acceptance import combined_app as combined
from tests.contract.asking import Waiter
from tests.load.asking import ask_at_once
from tests.recorder import Recorder
from tests.servers import Server, running
from tests.waiting import until
from tests.workers import Worker, workers

APP = "tests.acceptance.combined_app"
CALLS = 2000
WAITERS = 1000
PLACES = 1000

Report = Callable[[str, object], None]


@pytest.fixture
def locks() -> Iterator[Server]:
    """A server for the locks alone, so that what it is asked and what it answers can be counted."""
    with running("valkey", "--maxclients", "10000") as server:
        yield server


@pytest.fixture
def worker(valkey: Server, locks: Server) -> Iterator[Worker]:
    results = valkey.url.removesuffix("/0") + "/1"
    combined.app.conf.update(broker_url=valkey.url, result_backend=results, singleton_lock_url=locks.url)
    # A delay is a third of the ttl at most; a crowd of this size wants 40 s.
    env = {"TEST_STORE": valkey.url, "TEST_LOCKS": locks.url, "TEST_TTL": "150", "C_FORCE_ROOT": "1"}
    with workers(APP, env, 1, concurrency=2) as (worker,):
        yield worker


def sent_by(server: Server) -> int:
    with server.client() as client:
        return int(client.info("stats")["total_net_output_bytes"])


class Scripts:
    def __init__(self, server: Server) -> None:
        self._client = server.client()
        self._client.config_resetstat()

    def milliseconds(self) -> float:
        stats = self._client.info("commandstats")
        ran = [what for name, what in stats.items() if name.startswith(("cmdstat_eval", "cmdstat_fcall"))]
        self._client.close()
        return float(sum(what["usec"] for what in ran) / sum(what["calls"] for what in ran) / 1000)


def seconds_of_a_plain_task(calls: int = 5) -> float:
    took = []
    for number in range(calls):
        begin = time.monotonic()
        combined.plain.delay(number).get(timeout=30, interval=0.001)
        took.append(time.monotonic() - begin)
    return statistics.median(took)


def test_a_plain_task_is_served_while_thousands_wait_for_one_key(
    worker: Worker, recorder: Recorder, record_property: Report
) -> None:
    task = combined.by_policy["reschedule"]
    before = seconds_of_a_plain_task()
    holder = task.delay("crowd", 0, gate="crowd")
    until(lambda: recorder.events("enter"), "the holder runs")
    with combined.app.producer_pool.acquire() as producer:
        for number in range(CALLS):
            task.apply_async(("crowd", number), producer=producer, ignore_result=True)

    meanwhile: list[float] = []

    def is_served() -> bool:
        # As long as each waits behind a long queue, five of them would outlast the gate.
        meanwhile.append(seconds_of_a_plain_task(calls=1))
        return meanwhile[-1] < 2 * before + 0.05 and seconds_of_a_plain_task() < 2 * before + 0.05

    # The first encounters of all of them take a while; after that they have to keep quiet.
    until(is_served, "a plain task takes as long as before", timeout=150)

    record_property("milliseconds before, and with a crowd", [round(1000 * took) for took in (before, *meanwhile)])
    assert seconds_of_a_plain_task() < 2 * before + 0.5
    assert not holder.ready()
    recorder.open_gate("crowd")
    assert holder.get(timeout=60) == 0


def test_threads_that_wait_for_one_lock_harm_no_other(locks: Server, record_property: Report) -> None:
    crowded = Lock("crowd", url=locks.url)
    lease = crowded.acquire()
    with Lock("another", url=locks.url, ttl=6) as another:
        command = [sys.executable, "-m", "tests.load.waiters", locks.url, str(WAITERS // 2)]
        crowd = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) for _ in range(2)]
        try:
            for process in crowd:
                assert process.stdout.readline() == "all wait\n"
            scripts, took = Scripts(locks), []
            # For longer than the other lease lasts without renewal.
            end = time.monotonic() + 12
            while time.monotonic() < end:
                begin = time.monotonic()
                assert crowded.acquire(blocking=False) is None
                took.append(time.monotonic() - begin)
            cost = scripts.milliseconds()
            assert not another.lost

            lease.release()
            lines = [line for process in crowd for line in process.communicate(timeout=120)[0].splitlines()]
        finally:
            for process in crowd:
                process.kill()
                process.wait()

    record_property("milliseconds of a script", cost)
    record_property("milliseconds of a conflict", 1000 * statistics.median(took))
    # A walk over all who wait takes several.
    assert cost < 2
    assert statistics.median(took) < 0.05
    assert sorted(set(lines)) == ["served"]
    assert len(lines) == WAITERS


@pytest.mark.parametrize("asked", ["a conflict", "a grant and a release"])
def test_a_lock_with_many_places_answers_in_a_few_milliseconds(
    locks: Server, record_property: Report, asked: str
) -> None:
    lock = Lock("many", url=locks.url, limit=PLACES, ttl=60)
    leases: list[Any] = [lock.acquire(blocking=False) for _ in range(PLACES)]
    assert None not in leases
    if asked != "a conflict":
        leases.pop().release()
    scripts, before = Scripts(locks), sent_by(locks)
    for _ in range(20):
        lease = lock.acquire(blocking=False)
        assert (lease is None) == (asked == "a conflict")
        if lease is not None:
            lease.release()
    cost, sent = scripts.milliseconds(), (sent_by(locks) - before) / 20
    for lease in leases:
        lease.release()

    record_property("milliseconds of a script", cost)
    record_property("bytes of an answer", sent)
    # One walk over all places takes about two, and one for each of them would take a thousand.
    assert cost < 40
    assert sent < 32_000


KEY = "singleton:v3:{shop.tasks.sync:00}"
CROWD = 150
# Milliseconds of the server that a script may take, by the median: many times what it takes on a quiet machine, and
# less than a walk over the whole crowd.
AT_MOST = 5.0


def claim(token: str, limit: int = 1, **more: Any) -> Claim:
    return Claim(KEY, token, 600.0, limit, task_id=f"id-of-{token}", hostname="celery@worker-1", pid=12345, **more)


def test_many_waiters_that_vanished_slow_no_release_and_keep_nobody_out(
    store: Store, client: Any, record_property: Callable[[str, object], None]
) -> None:
    store.acquire(claim("holder"))
    ask_at_once(client, [claim(f"w{number}") for number in range(CROWD)])
    with Waiter(store, claim("alive")) as waiter:
        waiter.ask()
        client.slowlog_reset()
        began = clock()

        assert store.release(claim("holder"), 1) == RELEASED

        seconds = clock() - began
        waiter.sleep(20)
        assert clock() - began < 15
        assert isinstance(waiter.ask(), Grant)
    took = sorted(entry["duration"] / 1000 for entry in client.slowlog_get(1_000_000) if b"EVAL" in entry["command"])
    told = f"{seconds:.3f} s in {len(took)} scripts, {statistics.median(took):.3f} ms each, {took[-1]:.3f} at most"
    record_property(f"released past {CROWD} that vanished", told)
    assert statistics.median(took) <= AT_MOST


def test_thousands_of_messages_take_their_turns_in_no_time_of_the_main_process() -> None:
    heard: dict[str, Callable[[str], None]] = {}
    listener = SimpleNamespace(add=heard.__setitem__, remove=heard.pop, is_refused=False)
    refusal = Conflict(KEY, (), rank=1, is_near=False)
    refuses = cast("Store", Mock(listener=listener, look=lambda _: refusal))
    line, done = Line(), threading.Event()
    for number in range(5000):
        line.add(InLine(refuses, claim(f"w{number}", turn_for=600.0), float("inf")))
    line.submit(lambda: [each("(listening)") for each in heard.values()])
    began = time.process_time()
    line.submit(lambda: line.submit(done.set))

    assert done.wait(120)
    # A walk along the line for each of them takes several seconds.
    assert time.process_time() - began < 1
