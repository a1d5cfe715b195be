"""From the call of `release` in one process to the return of `acquire` in another."""

import multiprocessing
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection

from redis import Redis

from benchmarks.candidates import PATIENCE, PYTHON_REDIS_LOCK, Candidate, candidates, client_of
from benchmarks.rounds import AGAIN, in_turns
from tests.waiting import until

_NAME = "handed-on"
# Long enough for the waiter to fall asleep, and spread over the 0.1 s in which redis-py looks once.
_SHORTEST_HOLD, _LONGEST_HOLD = 0.005, 0.105
_START_TIMEOUT = 30


def hand_offs(url: str, trials: int) -> dict[str, list[float]]:
    """Seconds of each hand-off, in turns, one number per trial; python-redis-lock twice, to know what is noise."""
    known = {candidate.label: candidate for candidate in candidates(url)}
    known |= {AGAIN: known[PYTHON_REDIS_LOCK]}
    client = client_of(url)
    with _waiter(url) as waiter:
        return in_turns({who: partial(_hand_off, each, client, waiter) for who, each in known.items()}, trials)


def _hand_off(candidate: Candidate, client: Redis, waiter: Connection) -> float:
    client.config_resetstat()
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
