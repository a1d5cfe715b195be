"""Tens of thousands of schedules, none of which may break a promise; and broken locks, which have to be found out."""

import multiprocessing
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import pytest

from celery_singleton_lock.leases import renewal as renewal_module
from celery_singleton_lock.leases.pulse import Pulse
from celery_singleton_lock.leases.renewal import Renewal
from celery_singleton_lock.stores.memory import admission as admission_module
from celery_singleton_lock.stores.memory.lock import Lock, Place
from celery_singleton_lock.stores.memory.store import MemoryStore
from celery_singleton_lock.stores.records import Answer, Claim
from tests.model.simulator import Simulation, first_violation

CHUNKS = 4
CHUNK = 2_600
PART = 260
ENOUGH_TO_FIND_A_BREACH = 3_000


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_no_schedule_breaks_a_promise(processes: ProcessPoolExecutor, chunk: int) -> None:
    parts = [range(start, start + PART) for start in range(chunk * CHUNK, (chunk + 1) * CHUNK, PART)]

    breaches = [breach[1] for breach in processes.map(first_violation, parts) if breach is not None]

    assert not breaches, "\n\n".join(breaches)


def test_one_schedule_replays() -> None:
    seed = int(os.environ.get("SIMULATION_SEED", "0"))

    assert Simulation(seed).run() == Simulation(seed).run()


# Broken locks. A simulator that finds nothing wrong with these would prove nothing about the whole one.


def counted_from_the_answer() -> AbstractContextManager[Any]:
    whole = Renewal.renewed
    return patch.object(Renewal, "renewed", lambda renewal, sent_at: whole(renewal, renewal_module.clock()))


def without_allowance_for_drift() -> AbstractContextManager[Any]:
    return patch.multiple(renewal_module, _DRIFT=0.0, _DRIFT_FLOOR=0.0)


def released_by_anybody() -> AbstractContextManager[Any]:
    whole = MemoryStore.release

    def release(self: MemoryStore, claim: Claim, place: int | None, *rest: Any, **options: Any) -> Answer:
        lock = self._locks.get(claim.key)
        holder = lock.places.get(place or 1) if lock is not None else None
        return whole(self, holder.claim if holder is not None else claim, place, *rest, **options)

    return patch.object(MemoryStore, "release", release)


def renewed_by_anybody() -> AbstractContextManager[Any]:
    def renew(self: MemoryStore, claims: list[Claim], timeout: float) -> list[Answer]:
        return [Answer.DONE for _ in claims]

    return patch.object(MemoryStore, "renew", renew)


def fences_from_a_counter() -> AbstractContextManager[Any]:
    """The counter is as volatile as the rest of the data."""

    def next_fence(self: MemoryStore, now: float) -> int:
        self._fence += 1
        return self._fence

    return patch.object(MemoryStore, "_next_fence", next_fence)


def places_without_expiry() -> AbstractContextManager[Any]:
    whole = Lock.stay_until

    def alive(lock: Lock, now: float) -> list[Place]:
        return [place for _, place in sorted(lock.places.items()) if not place.on_hold or place.deadline > now]

    return patch.multiple(Lock, alive=alive, stay_until=lambda lock, moment: whole(lock, moment + 1e9))


def turns_without_expiry() -> AbstractContextManager[Any]:
    return patch.object(admission_module, "_GRACE", 1e9)


def a_heartbeat_that_never_gives_up() -> AbstractContextManager[Any]:
    return patch.object(Pulse, "_take_overdue", lambda self: {})


def deadlines_that_are_believed_to_move() -> AbstractContextManager[Any]:
    """An unanswered renewal is taken for one that worked."""
    return patch.object(Renewal, "unsure", lambda renewal, error: renewal.renewed(renewal_module.clock()))


OVERLAP = "by its own clock|believe to hold|told a loss, but had"

BROKEN: dict[str, tuple[Callable[[], AbstractContextManager[Any]], str]] = {
    "counted from the answer": (counted_from_the_answer, OVERLAP),
    "no allowance for drift": (without_allowance_for_drift, OVERLAP),
    "released by anybody": (released_by_anybody, "has freed the place of"),
    "renewed by anybody": (renewed_by_anybody, OVERLAP),
    "unanswered is renewed": (deadlines_that_are_believed_to_move, f"{OVERLAP}|was told .* late"),
    "fences from a counter": (fences_from_a_counter, "got fence"),
    "places without expiry": (places_without_expiry, "nobody has got|is still there|has not finished"),
    "turns without expiry": (turns_without_expiry, "nobody has got|is still there"),
    "never gives up": (a_heartbeat_that_never_gives_up, "late|runs in circles"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_lock_is_found_out(name: str) -> None:
    sabotage, complaint = BROKEN[name]

    with sabotage():
        breach = first_violation(range(ENOUGH_TO_FIND_A_BREACH))

    assert breach is not None
    assert re.search(complaint, breach[1].splitlines()[0])
