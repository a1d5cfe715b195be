"""A background thread that has died, or was never alive, costs only what it was about to do."""

import threading
from collections.abc import Callable

import pytest

from celery_singleton_lock.leases import background as module
from celery_singleton_lock.leases.background import Background
from tests.waiting import until


class DiesAtBirth(Background):
    """Its first thread gets an exception for the thread that has started it, before its first line."""

    births = 0

    def _start(self, run: Callable[[object], None], mark: object) -> None:
        self.births += 1
        if self.births > 1:
            super()._start(run, mark)


def test_a_thread_that_has_died_at_birth_is_replaced_by_a_later_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LONGEST_START", 0.0)
    background, made = DiesAtBirth(), threading.Event()

    background.submit(made.set)
    assert background.births == 1
    background.submit(made.set)

    until(made.is_set, "the call is made")


def test_a_thread_that_a_call_has_ended_goes_on_with_the_next() -> None:
    background, made = Background(), threading.Event()

    def end() -> None:
        raise SystemExit

    background.submit(end)
    background.submit(made.set)

    until(made.is_set, "the call is made")


def test_calls_are_made_when_they_are_due() -> None:
    background, made = Background(), list[str]()

    background.submit(lambda: made.append("later"), 0.2)
    background.submit(lambda: made.append("at once"))

    until(lambda: len(made) == 2, "both are made")
    assert made == ["at once", "later"]
