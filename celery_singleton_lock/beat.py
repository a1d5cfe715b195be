"""Several beats, of which one leads: `celery -A proj beat --scheduler celery_singleton_lock.beat:SingletonScheduler`.

A *slot* is a moment at which an entry is due. The leader claims a slot in the store, sends the entry, and records the
slot as sent. The next leader continues from there. A slot that was claimed, but not recorded as sent, is sent again
with the same task id.
"""

import os
import socket
import time
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from uuid import NAMESPACE_OID, uuid5

from celery import Celery
from celery.beat import PersistentScheduler, Scheduler
from celery.schedules import schedstate
from celery.utils.time import maybe_make_aware, timezone

from celery_singleton_lock.definition import keys, options, settings
from celery_singleton_lock.errors import LockHeld, StoreError
from celery_singleton_lock.leases.holding import Holding
from celery_singleton_lock.log import log
from celery_singleton_lock.runs.message import DUE_HEADER, ENTRY_HEADER
from celery_singleton_lock.stores.clock import clock
from celery_singleton_lock.stores.records import Claim, Conflict, Grant, Holder, Slot, new_token
from celery_singleton_lock.stores.redis.store import Store

_LOOKS_PER_TTL = 5
_LONGEST_PAUSE = 1.0  # seconds between two tries to lead, or to ask a silent store
# Seconds between log lines about a silent store, and between records of the leader.
_INTERVAL = 60.0
# Prefix of the entry under which a leader records itself.
_LEADER = "\x1f"


class SingletonSchedulerMixin(Scheduler):
    """Makes a scheduler of which several may run: `class Mine(SingletonSchedulerMixin, DatabaseScheduler)`.

    A standby takes over within one `singleton_beat_ttl` and one tick. Each message carries the entry's name and its
    due time in the headers `beat_entry` and `beat_due`.
    """

    _lease: Holding | None = None
    _fence = 0
    _records_again_at = _logs_again_at = 0.0
    _slot: Slot | None = None
    _messages = _failures = 0
    # What `reserve` returned for the entry that is being sent.
    _reserved: Any = None
    # On a standby: the leader's fence, and whether to compare the schedules.
    _follows = 0
    _compares = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._made_at = time.time_ns() // 1000
        self._known = dict[str, Slot]()
        super().__init__(*args, **kwargs)

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """As Celery's on the leader; a standby tries to lead."""
        pause = _LONGEST_PAUSE
        try:
            if self._leads():
                if clock() >= self._records_again_at:
                    self._heap = None
                pause = super().tick(*args, **kwargs)
        except StoreError as error:
            if self._logs_again():
                log.warning("beat.unanswered", "%s", error)
            self._heap = None
            return _LONGEST_PAUSE
        # A lost lease must be seen before another beat may lead.
        return min(pause, options.beat_ttl_of(self.app) / _LOOKS_PER_TTL)

    def populate_heap(self, *args: Any, **kwargs: Any) -> None:
        """As Celery's, from the recorded slots."""
        # Read once: with a schedule in a database, each access may be a query.
        schedule = self.schedule
        now = time.time_ns() // 1000
        recorded = settings.store_of(self.app).slots(self._slots)
        for name, entry in schedule.items():
            slot = recorded.pop(name, None) or self._begun(name, entry, now)
            # The slot in memory is newer if recording it failed.
            self._known[name] = max(slot, self._known.get(name, slot), key=lambda slot: slot.sent)
            entry.last_run_at = self._last_run(entry, self._known[name], now)
        for name in recorded:
            settings.store_of(self.app).change_slot(self._slots, "forget", Slot(name, 0, self._fence))
        # Record the leader last: a standby compares the schedules as soon as it sees this record.
        self._record(Slot(f"{_LEADER}{socket.gethostname()}:{os.getpid()}", now, self._fence, sent=now))
        self._records_again_at = clock() + _INTERVAL
        super().populate_heap(*args, **kwargs)

    def is_due(self, entry: Any) -> Any:
        """As Celery's, but no entry is due while the store is silent, or once this beat's lease has ended.

        Otherwise Celery would count the entry as run, although this beat sends nothing.
        """
        state = super().is_due(entry)
        self._slot = None
        if not state[0]:
            return state
        try:
            if self._lease is not None and self._lease.remaining() > 0:
                self._slot = self._claimed(entry)
                return state
        except StoreError as error:
            if self._logs_again():
                log.warning("beat.unanswered", "%s", error, entry=entry.name, due=_due_of(entry).isoformat())
        return schedstate(is_due=False, next=_LONGEST_PAUSE)

    def reserve(self, entry: Any) -> Any:
        """As Celery's. The entry is kept for `apply_entry`."""
        self._reserved = super().reserve(entry)
        return self._reserved

    def apply_entry(self, entry: Any, producer: Any = None) -> None:
        """Send an entry that is due, unless another beat has sent it."""
        # A scheduler may call this without `is_due`.
        self._slot = slot = self._slot or self._claimed(entry)
        if slot is None:
            log.info("beat.sent", "by another beat", entry=entry.name, due=_due_of(entry).isoformat())
            return
        self._messages = self._failures = 0
        due = _moment(slot.due).isoformat()
        sent = replace(slot, sent=max(slot.due, time.time_ns() // 1000))
        try:
            super().apply_entry(entry, producer=producer)
        finally:
            self._slot = None
        if self._failures:
            text = "%d of %d messages", self._failures, self._messages
            log.warning("beat.publish_failed", *text, entry=entry.name, due=due)
            return
        self._known[entry.name] = sent
        if self._reserved is not None and self._reserved.name == entry.name:
            # The next leader computes due times and task ids from `sent`. This beat must compute the same.
            self._reserved.last_run_at = _last_run_of(self._reserved, sent.sent)
        try:
            self._record(sent)
        except StoreError as error:
            log.warning("beat.slot_unrecorded", "%s", error, entry=entry.name, due=due)

    def apply_async(self, entry: Any, *args: Any, **kwargs: Any) -> Any:
        """As Celery's, but count failures, which Celery only logs."""
        if (slot := self._slot) is not None:
            due = _moment(slot.due).isoformat()
            # Every beat must compute the same task ids. The number distinguishes the messages of one slot.
            number = f" {self._messages}" if self._messages else ""
            self._messages += 1
            task_id = str(uuid5(NAMESPACE_OID, f"{self._key} {slot.entry} {due}{number}"))
            headers = {**(entry.options.get("headers") or {}), ENTRY_HEADER: slot.entry, DUE_HEADER: due}
            own = {**entry.options, "task_id": task_id, "headers": headers}
            entry = _clone(entry)
            entry.options = own
        try:
            return super().apply_async(entry, *args, **kwargs)
        except Exception as error:
            # A refused duplicate is no failure, and must not be sent later.
            self._failures += not isinstance(error.__context__, LockHeld)
            raise

    def close(self) -> None:
        """Let a standby lead at once."""
        self._give_up()
        super().close()

    def _record(self, slot: Slot) -> None:
        settings.store_of(self.app).change_slot(self._slots, "note", slot)

    def _claimed(self, entry: Any) -> Slot | None:
        slot = Slot(entry.name, _microseconds(_due_of(entry)), self._fence)
        return slot if settings.store_of(self.app).change_slot(self._slots, "claim", slot) else None

    def _begun(self, name: str, entry: Any, now: int) -> Slot:
        """Record where a new entry begins. Earlier slots are not sent."""
        begins = min(_microseconds(entry.last_run_at), now)
        if hasattr(entry.schedule, "clocked_time") and not entry.total_run_count:
            # Otherwise a clocked entry that is added after its time would count as sent.
            begins = min(begins, _microseconds(_due_of(entry)) - 1)
        slot = Slot(name, max(0, begins), self._fence, sent=max(0, begins))
        self._record(slot)
        return slot

    def _last_run(self, entry: Any, slot: Slot, now: int) -> datetime:
        last = slot.sent
        own = _microseconds(entry.last_run_at)
        # Before its first run, an entry may have this scheduler's start as `last_run_at`. So use that only after a run.
        if (entry.total_run_count or (hasattr(entry, "model") and own < self._made_at)) and last >= slot.due:
            last = max(last, own)
        if last > now and hasattr(entry.schedule, "run_every"):
            # The last leader's clock was ahead, or ours was set back. Slots until `last` would count as sent.
            last = now
            self._known[slot.entry] = Slot(slot.entry, now, self._fence, sent=now)
            self._record(self._known[slot.entry])
        return _last_run_of(entry, last)

    def _leads(self) -> bool:
        if self._lease is not None and self._lease.remaining() > 0:
            return True
        self._give_up()
        claim = Claim(self._key, new_token(), options.beat_ttl_of(self.app), task_name=keys.BEAT)
        claim.hostname, claim.pid = socket.gethostname(), os.getpid()
        lease = Holding(settings.store_of(self.app), claim)
        try:
            answer = lease.acquire()
            known = lease.store.slots(self._slots) if isinstance(answer, Grant) else {}
        except StoreError:
            # The lease may have been granted, but a beat that does not know which slots were sent must not lead.
            lease.release()
            raise
        self._logs_again_at = 0.0
        if isinstance(answer, Conflict):
            self._stand_by(answer.first)
            return False
        # If the store's clock was set back, the lease's fence may be lower than earlier ones.
        self._fence = max([lease.fence, *(slot.fence + 1 for slot in known.values())])
        self._lease = lease
        self._follows = 0
        self._heap = None
        log.info("beat.leads", key=lease.key, fence=self._fence, took_over=lease.grant.took_over)
        return True

    def _stand_by(self, leader: Holder) -> None:
        who: dict[str, Any] = {"key": self._key, "holder": leader.hostname, "pid": leader.pid}
        if self._follows != leader.fence:
            self._follows = leader.fence
            # Do not compare schedules from a database, which may change between the reads of two beats.
            self._compares = type(self).schedule in (Scheduler.schedule, PersistentScheduler.schedule)
            log.info("beat.stands_by", **who, since=leader.acquired_at.isoformat())
        if not self._compares:
            return
        slots = settings.store_of(self.app).slots(self._slots)
        ours = self.schedule.keys()
        theirs = {name for name in slots if not name.startswith(_LEADER)}
        has_recorded = any(slots[name].fence >= leader.fence for name in slots.keys() - theirs)
        self._compares = not has_recorded
        if has_recorded and theirs != ours:
            text = (
                "only the leader has %s; only this beat has %s. Nobody sends what only this beat has. For two "
                "schedules, give each its own singleton_beat_name. After a deploy, end the old beats"
            )
            only = [", ".join(sorted(names)) or "nothing" for names in (theirs - ours, ours - theirs)]
            log.warning("beat.differs", text, *only, **who)

    def _give_up(self) -> None:
        if self._lease is not None and self._lease.unreleased:
            self._lease.release()
        self._lease = None

    def _logs_again(self) -> bool:
        """True at most once a minute."""
        if clock() < self._logs_again_at:
            return False
        self._logs_again_at = clock() + _INTERVAL
        return True

    @property
    def _key(self) -> str:
        return keys.beat_key_of(self.app)

    @property
    def _slots(self) -> str:
        return f"{self._key}:slots"


def last_leader_of(app: Celery, store: Store) -> tuple[bool, Slot | None]:
    """Whether a beat leads now; and the last leader: `entry` is its host and pid, `sent` is when it was last seen."""
    key = keys.beat_key_of(app)
    slots = store.slots(f"{key}:slots").values()
    leaders = [replace(slot, entry=slot.entry[1:]) for slot in slots if slot.entry.startswith(_LEADER)]
    return bool(store.holders(key)), max(leaders, key=lambda slot: slot.fence, default=None)


class SingletonScheduler(SingletonSchedulerMixin, PersistentScheduler):
    """Celery's own scheduler, for several beats."""


def _due_of(entry: Any) -> datetime:
    schedule = _clone(entry.schedule)
    last = _last_run_of(entry, _microseconds(entry.last_run_at))
    if hasattr(schedule, "remaining_delta"):
        start, delta, _ = schedule.remaining_delta(last)
        due: datetime = start + delta
    else:
        schedule.nowfun = lambda: last
        due = last + schedule.remaining_estimate(last)
    return due.astimezone(UTC).replace(microsecond=due.microsecond // 1000 * 1000)


def _last_run_of(entry: Any, microseconds: int) -> datetime:
    # Celery before 5.7 computes in the zone of the last run. A crontab needs its own zone. An interval needs UTC, or it
    # would be an hour wrong when summer time begins or ends.
    zone = timezone.get_timezone(entry.schedule.tz) if hasattr(entry.schedule, "remaining_delta") else UTC
    return _moment(microseconds).astimezone(zone)


def _clone(original: Any) -> Any:
    # copy.copy() would call `__reduce__`, which is wrong for entries of other schedulers.
    clone = object.__new__(type(original))
    vars(clone).update(vars(original))
    return clone


def _microseconds(moment: datetime) -> int:
    aware: datetime = maybe_make_aware(moment)
    return round(aware.timestamp() * 1_000_000)


def _moment(microseconds: int) -> datetime:
    return datetime.fromtimestamp(microseconds / 1_000_000, UTC)
