"""Places, turns and marks in memory, as the holders that callers are told of."""

from collections.abc import Sequence
from datetime import UTC, datetime

from celery_singleton_lock.stores.base import lock_name_of
from celery_singleton_lock.stores.memory.lock import Mark, Place, Turn
from celery_singleton_lock.stores.records import Holder

A_FEW = 8


def described(places: Sequence[Place], now: float) -> list[Holder]:
    """The lease that ends first, first."""
    return sorted((_holder(place, now) for place in places), key=lambda holder: holder.expires_in)


def described_turn(key: str, turn: Turn | Mark, now: float) -> Holder:
    """A call that goes before, described as the holder that it will be."""
    token, task_id = (turn.claim.token, turn.claim.facts.task_id) if isinstance(turn, Turn) else ("", turn.task_id)
    return Holder(key, token, 0, datetime.fromtimestamp(now, UTC), turn.deadline - now, task_id or None)


def _holder(place: Place, now: float) -> Holder:
    key, facts = place.claim.key, place.claim.facts
    return Holder(
        key=key,
        token=place.claim.token,
        fence=place.fence,
        acquired_at=datetime.fromtimestamp(place.since, UTC),
        expires_in=place.deadline - now,
        task_id=facts.task_id or None,
        # As in Redis: an empty task name means the name of the lock.
        task_name=facts.task_name or (lock_name_of(key) if facts.task_id else None),
        hostname=facts.hostname or None,
        pid=facts.pid or None,
        attempt=facts.attempt,
        published=facts.published,
        label=facts.label or None,
    )
