"""P4: a body that waits in a loop of uvloop, which only the loop can wake, ends once it is to stop.

The other loops, and other ways to run them, are in tests/integration/test_abort.py.
"""

from collections.abc import Callable
from typing import Any

import pytest
from celery.exceptions import TaskRevokedError

from celery_singleton_lock import LockLost
from tests.acceptance.conftest import operated
from tests.acceptance.loops_app import waits
from tests.recorder import Recorder, of_key, overlaps
from tests.waiting import until
from tests.workers import workers

LONG = 600
"""Seconds for which a body would go on."""
PROMPTLY = 30


def is_replaced(key: str, holder: Any) -> None:
    newer = waits.delay(key, 0)
    assert newer.get(timeout=PROMPTLY) == "ran"
    with pytest.raises(TaskRevokedError, match=newer.id):
        holder.get(timeout=PROMPTLY)


def is_broken(key: str, holder: Any) -> None:
    operated(waits.app)("break", waits.lock_key_for(key, LONG), "--yes")
    with pytest.raises(TaskRevokedError, match="broken"):
        holder.get(timeout=PROMPTLY)


def is_lost(key: str, holder: Any) -> None:
    operated(waits.app)("break", waits.lock_key_for(key, LONG), "--yes", "--force")
    with pytest.raises(LockLost, match="expired"):
        holder.get(timeout=PROMPTLY)


def test_a_body_in_an_event_loop_ends(recorder: Recorder) -> None:
    endings: list[Callable[[str, Any], None]] = [is_replaced, is_broken, is_lost]
    with workers("tests.acceptance.loops_app", pool="threads") as (worker,):
        for ends in endings:
            key = ends.__name__
            holder = waits.delay(key, LONG)
            until(lambda key=key: of_key(recorder, key, "enter"), f"{key}: it waits")
            ends(key, holder)
            assert waits.delay(key, 0).get(timeout=PROMPTLY) == "ran"
        assert "Exception in callback" not in worker.log()
    assert overlaps(recorder.events()) == []
