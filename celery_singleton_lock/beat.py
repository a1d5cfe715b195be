"""Several beats, of which one leads: `celery -A proj beat --scheduler celery_singleton_lock.beat:SingletonScheduler`.

The leader holds a lease. Before it sends an entry it claims the entry's due slot
in the store, and notes afterwards that it was sent. So its heir knows where it
stopped: a slot that was due meanwhile is sent once, late; one that was claimed,
but not noted as sent, is sent with the same task id.
"""

import logging
import os
import socket
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import NAMESPACE_OID, uuid5

from celery.beat import PersistentScheduler, Scheduler
from celery.utils.time import maybe_make_aware

from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.leases.key import checked_name, key_of
from celery_singleton_lock.leases.lease import Lease, new_token
from celery_singleton_lock.options import prefix_of, seconds
from celery_singleton_lock.runs.message import DUE_HEADER, ENTRY_HEADER
from celery_singleton_lock.settings import store_of
from celery_singleton_lock.stores.records import Claim, Facts, Slot

logger = logging.getLogger("celery_singleton_lock")

_LOOKS_PER_TTL = 5
_LONGEST_PAUSE = 1.0


class SingletonSchedulerMixin(Scheduler):
    """For a scheduler of which several may run: `class Mine(SingletonSchedulerMixin, DatabaseScheduler)`.

    A standby takes over within one `singleton_beat_ttl` (by default that of the
    locks) and one tick. Each message carries the entry's name and its due time in
    the headers `beat_entry` and `beat_due`.
    """

    _lease: Lease | None = None

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """Lead, or look whether somebody has to.

        Returns:
            Seconds until the next tick.
        """
        try:
            leads = self._leads()
        except StoreError as error:
            logger.warning("beat.unanswered: %s", error)
            return _LONGEST_PAUSE
        if not leads:
            return min(_LONGEST_PAUSE, self._ttl / _LOOKS_PER_TTL)
        pause: float = super().tick(*args, **kwargs)
        # Often enough to learn of it when the lease is lost.
        return min(pause, self._ttl / _LOOKS_PER_TTL)

    def apply_entry(self, entry: Any, producer: Any = None) -> None:
        """Send an entry whose slot is due, if nobody else has."""
        lease, due = self._lease, due_of(entry)
        if lease is None or lease.remaining() <= 0:
            return
        slot = Slot(entry.name, _microseconds(due), lease.fence)
        try:
            if not lease.store.claim_slot(self._slots, slot):
                logger.info("beat.sent entry=%s due=%s: by somebody else", entry.name, due.isoformat())
                return
        except StoreError as error:
            logger.warning("beat.unanswered entry=%s due=%s: %s", entry.name, due.isoformat(), error)
            return
        super().apply_entry(self._marked(entry, due), producer=producer)
        try:
            lease.store.claim_slot(self._slots, replace(slot, sent=self._sent_at(entry, due)))
        except StoreError as error:
            logger.warning("beat.unnoted entry=%s due=%s: %s", entry.name, due.isoformat(), error)

    def close(self) -> None:
        """Let a standby lead at once."""
        self._give_up()
        super().close()

    def _sent_at(self, entry: Any, due: datetime) -> int:
        """What the scheduler itself takes for the entry's last run, if it says so; now, if not."""
        following = self.schedule.get(entry.name)
        last = _microseconds(following.last_run_at) if following is not None else 0
        return last if last >= _microseconds(due) else _microseconds(entry.default_now())

    def _leads(self) -> bool:
        if self._lease is not None and self._lease.held:
            return self._lease.remaining() > 0
        self._give_up()
        facts = Facts(hostname=socket.gethostname(), pid=os.getpid(), task_name="celery.beat")
        lease = Lease(store_of(self.app), Claim(self._key, new_token(), self._ttl, facts=facts))
        try:
            if lease.acquire() is not None:
                return False
            self._go_on_where_the_last_one_stopped()
        except StoreError:
            # It may be ours all the same; and who does not know what was sent must not lead.
            lease.release()
            raise
        self._lease = lease
        logger.info("beat.leads key=%s fence=%d took_over=%s", lease.key, lease.fence, lease.took_over)
        return True

    def _give_up(self) -> None:
        if self._lease is not None and self._lease.unreleased:
            self._lease.release()
        self._lease = None

    def _go_on_where_the_last_one_stopped(self) -> None:
        known = store_of(self.app).slots(self._slots)
        for name, entry in self.schedule.items():
            if name in known and known[name].sent:
                entry.last_run_at = datetime.fromtimestamp(known[name].sent / 1_000_000, UTC)
        # The heap was made of what was known before.
        self._heap = None

    def _marked(self, entry: Any, due: datetime) -> Any:
        marked = _twin(entry)
        marked.options = {
            **entry.options,
            "task_id": str(uuid5(NAMESPACE_OID, f"{self._key} {entry.name} {due.isoformat()}")),
            "headers": {
                **(entry.options.get("headers") or {}),
                ENTRY_HEADER: entry.name,
                DUE_HEADER: due.isoformat(),
            },
        }
        return marked

    @property
    def _ttl(self) -> float:
        conf = self.app.conf
        ttl = conf.get("singleton_beat_ttl") or conf.get("singleton_lock_ttl", 30)
        return seconds("singleton_beat_ttl", ttl, least=1)

    @property
    def _key(self) -> str:
        return key_of(prefix_of(self.app), checked_name(f"celery.beat.{self.app.main}"), {})

    @property
    def _slots(self) -> str:
        return f"{self._key}:slots"


class SingletonScheduler(SingletonSchedulerMixin, PersistentScheduler):
    """Celery's own scheduler, of which several may run."""


def due_of(entry: Any) -> datetime:
    """When an entry that is due was due."""
    schedule, last = entry.schedule, entry.last_run_at
    every: timedelta | None = getattr(schedule, "run_every", None)
    if every is not None:
        due: datetime = schedule.maybe_make_aware(last) + every
    elif hasattr(schedule, "remaining_delta"):
        start, delta, _ = schedule.remaining_delta(last)
        due = start + delta
    else:
        now = schedule.now()
        at_that_moment = _twin(schedule)
        at_that_moment.nowfun = lambda: now
        due = now + at_that_moment.remaining_estimate(last)
    return due.astimezone(UTC).replace(microsecond=due.microsecond // 1000 * 1000)


def _twin(original: Any) -> Any:
    # Not copy.copy(), which makes the entries of other schedulers anew, and wrongly.
    twin = object.__new__(type(original))
    vars(twin).update(vars(original))
    return twin


def _microseconds(moment: datetime) -> int:
    aware: datetime = maybe_make_aware(moment)
    return round(aware.timestamp() * 1_000_000)
