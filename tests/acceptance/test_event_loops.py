"""P4: a body that waits in an event loop ends once it is replaced, broken or has lost its lease, whatever the loop."""

from collections.abc import Callable
from typing import Any

import pytest
from celery.exceptions import TaskRevokedError

from celery_singleton_lock import LockLost
from tests.acceptance.conftest import operated
from tests.acceptance.loops_app import WAYS, waits
from tests.recorder import Recorder, of_key, overlaps
from tests.waiting import until
from tests.workers import workers

LONG = 600
"""Seconds for which a body would go on."""
PROMPTLY = 30


def is_replaced(key: str, way: str, holder: Any) -> None:
    newer = waits.delay(key, way, 0)
    assert newer.get(timeout=PROMPTLY) == "ran"
    with pytest.raises(TaskRevokedError, match=newer.id):
        holder.get(timeout=PROMPTLY)


def is_broken(key: str, way: str, holder: Any) -> None:
    operated(waits.app)("break", waits.lock_key_for(key, way, LONG), "--yes")
    with pytest.raises(TaskRevokedError, match="broken"):
        holder.get(timeout=PROMPTLY)


def is_lost(key: str, way: str, holder: Any) -> None:
    operated(waits.app)("break", waits.lock_key_for(key, way, LONG), "--yes", "--force")
    with pytest.raises(LockLost, match="expired"):
        holder.get(timeout=PROMPTLY)


WAY = "uvloop, kept for nothing else"


@pytest.mark.parametrize(
    ("pool", "ways"),
    [
        ("threads", [WAY]),
        pytest.param("threads", [way for way in WAYS if way != WAY], marks=pytest.mark.prove),
        pytest.param("prefork", list(WAYS), marks=pytest.mark.prove),
    ],
    ids=["threads", "threads, other ways", "prefork"],
)
def test_a_body_in_an_event_loop_ends(recorder: Recorder, pool: str, ways: list[str]) -> None:
    endings: list[Callable[[str, str, Any], None]] = [is_replaced, is_broken, is_lost]
    with workers("tests.acceptance.loops_app", pool=pool, concurrency=2) as (worker,):
        for way in ways:
            for ends in endings:
                key = f"{way} {ends.__name__}"
                holder = waits.delay(key, way, LONG)
                until(lambda key=key: of_key(recorder, key, "enter"), f"{key}: it waits")
                ends(key, way, holder)
                assert waits.delay(key, way, 0).get(timeout=PROMPTLY) == "ran"
        assert "Exception in callback" not in worker.log()
    assert overlaps(recorder.events()) == []
