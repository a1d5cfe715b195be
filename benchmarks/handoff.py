"""From the call of `release` in one process to the return of `acquire` in another."""

import multiprocessing
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection

from benchmarks.candidates import PATIENCE, Candidate, candidates, client_of
from benchmarks.rounds import seconds_per_call
from tests.waiting import until

_NAME = "handed-on"
# The waiter is asleep by then; spread over the 0.1 s in which redis-py looks once.
_SHORTEST_HOLD, _LONGEST_HOLD = 0.005, 0.105
_START_TIMEOUT = 30
_PINGS = 20


def hand_offs(url: str, trials: int) -> dict[str, list[float]]:
    """Seconds of each hand-off, and of a PING in the same cycle, one number per trial."""
    known = candidates(url)
    client = client_of(url)
    seconds: dict[str, list[float]] = {"PING": [], **{candidate.label: [] for candidate in known}}
    with _waiter(url) as waiter:
        for _ in range(trials):
            seconds["PING"].append(seconds_per_call(client.ping, _PINGS))
            for candidate in known:
                client.config_resetstat()
                seconds[candidate.label].append(_hand_off(candidate, waiter))
    return seconds


def _hand_off(candidate: Candidate, waiter: Connection) -> float:
    lock = candidate.lock(_NAME)
    lock.acquire()
    waiter.send(candidate.label)
    until(partial(candidate.queued, _NAME), "the waiter is in line", timeout=PATIENCE)
    time.sleep(random.uniform(_SHORTEST_HOLD, _LONGEST_HOLD))
    released_at = time.monotonic()
    lock.release()
    return _received(waiter, PATIENCE) - released_at


@contextmanager
def _waiter(url: str) -> Iterator[Connection]:
    """The other process, which waits for whatever lock it is told to."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=_wait_as_told, args=(url, there), daemon=True)
    process.start()
    there.close()
    try:
        _received(here, _START_TIMEOUT)
        yield here
    finally:
        here.close()
        process.join(PATIENCE)
        process.kill()


def _wait_as_told(url: str, pipe: Connection) -> None:
    known = {candidate.label: candidate for candidate in candidates(url)}
    pipe.send(time.monotonic())
    while True:
        try:
            candidate = known[pipe.recv()]
        except EOFError:
            return
        lock = candidate.lock(_NAME)
        if candidate.wait(lock):
            # The same clock in all processes of a machine.
            acquired_at = time.monotonic()
            lock.release()
            pipe.send(acquired_at)


def _received(pipe: Connection, timeout: float) -> float:
    if not pipe.poll(timeout):
        raise TimeoutError(f"nothing heard of the waiter in {timeout} s")
    moment: float = pipe.recv()
    return moment
