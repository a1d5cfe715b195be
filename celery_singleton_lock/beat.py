"""Several beats, of which one leads: `celery -A proj beat --scheduler celery_singleton_lock.beat:SingletonScheduler`.

The leader holds a lease. Before it sends an entry it claims the entry's due slot in the store, and notes afterwards
that it was sent. So the next leader knows where it stopped. A slot that was due meanwhile is sent once, late. A slot
that was claimed, but not noted as sent, is sent with the same task id.
"""

import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from uuid import NAMESPACE_OID, uuid5

from celery import Celery
from celery.beat import PersistentScheduler, Scheduler
from celery.utils.time import maybe_make_aware

from celery_singleton_lock.checks import check_beat
from celery_singleton_lock.errors import ConfigurationError, LockHeld, StoreError
from celery_singleton_lock.keys import checked_name, key_of
from celery_singleton_lock.leases.lease import Lease, new_token
from celery_singleton_lock.options import prefix_of, seconds, setting
from celery_singleton_lock.runs.notes import DUE_HEADER, ENTRY_HEADER
from celery_singleton_lock.settings import store_of
from celery_singleton_lock.stores.base import clock
from celery_singleton_lock.stores.records import Claim, Conflict, Facts, Grant, Holder, Slot

logger = logging.getLogger("celery_singleton_lock")

_LOOKS_PER_TTL = 5
_LONGEST_PAUSE = 1.0
# Between two lines that say the same.
_SILENCE = 60.0
_LONGEST_NAME = 100


class SingletonSchedulerMixin(Scheduler):
    """For a scheduler of which several may run: `class Mine(SingletonSchedulerMixin, DatabaseScheduler)`.

    A standby takes over within one `singleton_beat_ttl` and one tick. Each message carries the entry's name and its
    due time in the headers `beat_entry` and `beat_due`.
    """

    _lease: Lease | None = None
    _fence = 0
    _stands_by = False
    _is_sent = False
    _logs_again_at = 0.0

    def check(self) -> None:
        """Return if this beat can work; what cannot pass ends it."""
        check_beat(self.app, *questions_of(self.app))

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """Lead, or look whether this beat has to.

        Returns:
            Seconds until the next tick.
        """
        try:
            leads = self._leads()
        except StoreError as error:
            # A store may refuse us for days.
            if clock() >= self._logs_again_at:
                logger.warning("beat.unanswered: %s", error)
                self._logs_again_at = clock() + _SILENCE
            return _LONGEST_PAUSE
        self._logs_again_at = 0.0
        if not leads:
            return min(_LONGEST_PAUSE, _ttl_of(self.app) / _LOOKS_PER_TTL)
        pause: float = super().tick(*args, **kwargs)
        # Often enough to learn in time that the lease is lost.
        return min(pause, _ttl_of(self.app) / _LOOKS_PER_TTL)

    def apply_entry(self, entry: Any, producer: Any = None) -> None:
        """Send an entry whose slot is due, if no other beat has."""
        lease, due = self._lease, due_of(entry)
        if lease is None or lease.remaining() <= 0:
            return
        slot = Slot(entry.name, _microseconds(due), self._fence)
        try:
            if not lease.store.claim_slot(self._slots, slot):
                logger.info("beat.sent entry=%s due=%s: by another beat", entry.name, due.isoformat())
                return
        except StoreError as error:
            logger.warning("beat.unanswered entry=%s due=%s: %s", entry.name, due.isoformat(), error)
            return
        self._is_sent = False
        super().apply_entry(self._marked(entry, due), producer=producer)
        if not self._is_sent:
            # Celery has logged why, and goes on; an heir sends it.
            logger.warning("beat.publish_failed entry=%s due=%s", entry.name, due.isoformat())
            return
        try:
            lease.store.claim_slot(self._slots, replace(slot, sent=self._sent_at(entry, due)))
        except StoreError as error:
            logger.warning("beat.slot_unrecorded entry=%s due=%s: %s", entry.name, due.isoformat(), error)

    def apply_async(self, entry: Any, *args: Any, **kwargs: Any) -> Any:
        """As Celery's, which only logs a failure."""
        try:
            result = super().apply_async(entry, *args, **kwargs)
        except Exception as error:
            # A refused duplicate is settled, so it is not sent later.
            self._is_sent = isinstance(error.__context__, LockHeld)
            raise
        self._is_sent = True
        return result

    def close(self) -> None:
        """Let a standby lead at once."""
        self._give_up()
        super().close()

    def _sent_at(self, entry: Any, due: datetime) -> int:
        """The time of the entry's last run, if the scheduler itself has one; else now."""
        following = self.schedule.get(entry.name)
        last = _microseconds(following.last_run_at) if following is not None else 0
        return last if last >= _microseconds(due) else _microseconds(entry.default_now())

    def _leads(self) -> bool:
        if self._lease is not None and self._lease.held:
            return self._lease.remaining() > 0
        self._give_up()
        facts = Facts(hostname=socket.gethostname(), pid=os.getpid(), task_name="celery.beat")
        lease = Lease(store_of(self.app), Claim(self._key, new_token(), _ttl_of(self.app), facts=facts))
        try:
            answer = lease.acquire()
            if isinstance(answer, Grant):
                self._go_on_where_the_last_one_stopped(lease)
        except StoreError:
            # The lease may be ours all the same. And a beat that does not know which slots were sent must not lead.
            lease.release()
            raise
        if isinstance(answer, Conflict):
            self._stand_by(answer.first)
            return False
        self._lease, self._stands_by = lease, False
        logger.info("beat.leads key=%s fence=%d took_over=%s", lease.key, self._fence, lease.took_over)
        return True

    def _stand_by(self, leader: Holder) -> None:
        """Log once who leads, and what of that schedule is not in this one."""
        if self._stands_by:
            return
        self._stands_by = True
        who = self._key, leader.hostname, leader.pid
        logger.info("beat.stands_by key=%s holder=%s pid=%s since=%s", *who, leader.acquired_at.isoformat())
        slots = store_of(self.app).slots(self._slots).values()
        sent = {slot.entry for slot in slots if slot.fence >= leader.fence}
        if strangers := sorted(sent - self.schedule.keys()):
            logger.warning(
                "beat.differs key=%s holder=%s pid=%s: it sends %s, which are not in this schedule, and nothing of "
                "this schedule is sent; give beats with different schedules different names by singleton_beat_name",
                *who,
                ", ".join(strangers),
            )

    def _give_up(self) -> None:
        if self._lease is not None and self._lease.unreleased:
            self._lease.release()
        self._lease = None

    def _go_on_where_the_last_one_stopped(self, lease: Lease) -> None:
        known = lease.store.slots(self._slots)
        # If the clock of the store was set back, its fences are lower than before.
        self._fence = max([lease.fence, *(slot.fence + 1 for slot in known.values())])
        now = time.time_ns() // 1000
        for name, entry in self.schedule.items():
            sent = known[name].sent if name in known else 0
            if sent > now and getattr(entry.schedule, "run_every", None) is not None:
                # By the clock of another host. Otherwise all slots of the interval until then would count as sent.
                sent = now
                lease.store.claim_slot(self._slots, Slot(name, now, self._fence, sent=now))
            if sent:
                entry.last_run_at = datetime.fromtimestamp(sent / 1_000_000, UTC)
        # The heap was made from older times.
        self._heap = None

    def _marked(self, entry: Any, due: datetime) -> Any:
        marked, slot = _clone(entry), due.isoformat()
        headers = {**(entry.options.get("headers") or {}), ENTRY_HEADER: entry.name, DUE_HEADER: slot}
        # The same for whoever sends this slot.
        task_id = str(uuid5(NAMESPACE_OID, f"{self._key} {entry.name} {slot}"))
        marked.options = {**entry.options, "task_id": task_id, "headers": headers}
        return marked

    @property
    def _key(self) -> str:
        return _key_of(self.app)

    @property
    def _slots(self) -> str:
        return f"{self._key}:slots"


def questions_of(app: Celery) -> tuple[Callable[[], str], Callable[[], float]]:
    """The questions that the settings of this app's beat must answer: its key, and its ttl."""
    return partial(_key_of, app), partial(_ttl_of, app)


def _key_of(app: Celery) -> str:
    name = setting(app, "singleton_beat_name")
    if name is not None and (not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME):
        raise ConfigurationError(
            f"singleton_beat_name={name!r:.80} is not allowed: give a text of 1 to {_LONGEST_NAME} characters, "
            "the same for all beats of one schedule"
        )
    return key_of(prefix_of(app), checked_name(f"celery.beat.{name or app.main}"), {})


def _ttl_of(app: Celery) -> float:
    ttl = setting(app, "singleton_beat_ttl")
    return seconds("singleton_beat_ttl", setting(app, "singleton_lock_ttl", 30) if ttl is None else ttl, least=1)


class SingletonScheduler(SingletonSchedulerMixin, PersistentScheduler):
    """Celery's own scheduler, for several beats."""


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
        at_that_moment = _clone(schedule)
        at_that_moment.nowfun = lambda: now
        due = now + at_that_moment.remaining_estimate(last)
    return due.astimezone(UTC).replace(microsecond=due.microsecond // 1000 * 1000)


def _clone(original: Any) -> Any:
    # Not copy.copy(), which makes the entries of other schedulers anew, and wrongly.
    clone = object.__new__(type(original))
    vars(clone).update(vars(original))
    return clone


def _microseconds(moment: datetime) -> int:
    aware: datetime = maybe_make_aware(moment)
    return round(aware.timestamp() * 1_000_000)
