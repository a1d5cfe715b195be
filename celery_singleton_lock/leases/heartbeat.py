"""The renewal of every lease that a process holds."""

import os
from _queue import Empty, SimpleQueue
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from celery_singleton_lock.errors import REASONS_TO_STOP, LostReason, StoreError
from celery_singleton_lock.leases.background import Background, background
from celery_singleton_lock.leases.counters import count, counters
from celery_singleton_lock.log import log
from celery_singleton_lock.stores.clock import clock
from celery_singleton_lock.stores.redis.store import Store
from celery_singleton_lock.stores.threads import LINGERS, DaemonThread, patched_by

if TYPE_CHECKING:
    from celery_singleton_lock.leases.holding import Holding

_BEATS_PER_TTL = 12
_SHORTEST_PAUSE = 0.05
_LONGEST_RENEWAL = 5.0  # seconds that a renewal may take, with connecting
_LATE_RENEWAL = 1.0  # the same for a renewal after the deadline
_MOST_LINES = 10  # in the log, for each beat
_NEVER = float("inf")


class RenewalThread(DaemonThread):
    """Renews the leases of this process at one server.

    Under gevent and eventlet this is a native thread with a client of its own, so that no greenlet can starve it. A
    greenlet writes the log and reports losses, because a native thread must not take the locks of greenlets.
    """

    is_native = True

    def __init__(self, where: tuple[int, Hashable], store: Store) -> None:
        self._where = where
        self._address = store.address
        self._greenlet = None
        self._client = store
        store.on_clock_step = self._report_step
        if patched_by() is not None:
            self._greenlet = Background(lambda: bool(self.watching))
            self._client = store.clone()
            self._client.on_clock_step = lambda seconds: self._call(partial(self._report_step, seconds))
        # Weak, otherwise an abandoned lease would be renewed for ever.
        self.watching: dict[Callable[[], Holding | None], None] = {}
        self._wakes: SimpleQueue[None] = SimpleQueue()
        self._wakes_at = _NEVER

    def add(self, holding: "Holding") -> None:
        holding.thread = self
        self.watching[holding.weak] = None
        if self._greenlet is not None:
            self._greenlet.ensure()
        if self._begun is not self._running:
            self.ensure()
        if holding.next_renewal < self._wakes_at:
            self._wakes.put(None)

    def remove(self, holding: "Holding") -> None:
        self.watching.pop(holding.weak, None)

    def watched(self) -> "list[Holding]":
        watched = []
        for known in list(self.watching):
            if (holding := known()) is not None and holding.is_kept:
                watched.append(holding)
            else:
                self.watching.pop(known, None)
        return watched

    def _has_work(self) -> bool:
        # Under gevent and eventlet the thread does not end, because its client's event loop would stay open.
        return bool(self.watching) or self._greenlet is not None

    def _step(self) -> bool:
        # An idle thread removes itself from `_threads` below, but a concurrent `watch` may start it again.
        _threads.setdefault(self._where, self)
        # Reset `_wakes_at` before reading `watched`. Otherwise `add` may see the old time, and not wake this thread.
        self._wakes_at = _NEVER
        with suppress(Empty):
            while True:
                self._wakes.get_nowait()
        due = [min(one.next_renewal, one.deadline) for one in self.watched()]
        self._wakes_at = due_at = min(due, default=clock() + LINGERS)
        with suppress(Empty):
            self._wakes.get(timeout=max(0.0, due_at - clock()))
        if clock() < due_at:
            return True
        if not due:
            if not self._has_work():
                _threads.pop(self._where, None)
            return False
        self._wakes_at = _NEVER
        try:
            if late := {one: seconds for one in self.watched() if (seconds := one.lateness(clock()))}:
                self._call(partial(tell_late, late))
            self._beat()
        except Exception as error:  # noqa: BLE001 (the thread must go on; the log tells)
            self._log(log.error, "lock.bug", "the thread goes on", where="heartbeat", exc_info=error)
            with suppress(Empty):
                self._wakes.get(timeout=1.0)
        return True

    def _beat(self) -> None:
        now = clock()
        for holding in self.watched():
            # At the deadline, give up only if the last renewal got no answer. Otherwise this thread is just late, and
            # the next renewal may work: the worker's main process may have renewed the lease, or nobody took the key.
            if holding.is_unsure and holding.deadline <= now:
                self._lose(holding, "unreachable")
        # Renew leases that are due soon, too, otherwise each would cost a request.
        if due := [one for one in self.watched() if one.next_renewal - now <= one.ttl / _BEATS_PER_TTL]:
            self._renew(due)

    def _renew(self, holdings: "list[Holding]") -> None:
        sent_at = clock()
        # The nearest deadline is the bound, otherwise a loss would be reported late.
        left = [max(holding.deadline - sent_at, 0.0) or _LATE_RENEWAL for holding in self.watched()]
        bound = min(_LONGEST_RENEWAL, max(_SHORTEST_PAUSE, min(left, default=0.0)))
        for holding in holdings:
            # Otherwise a lease that waits for the answer would count as late.
            holding.next_renewal = sent_at + bound
        try:
            answers = self._client.renew([holding.claim for holding in holdings], bound)
        except Exception as error:  # noqa: BLE001 (any error counts as no answer; the next try may work)
            for holding in holdings:
                holding.is_unsure = True
                holding.next_renewal = clock() + max(_SHORTEST_PAUSE, min(1.0, holding.ttl / 15))
            if not isinstance(error, StoreError):
                self._log(log.error, "lock.bug", "the thread goes on", where="heartbeat", exc_info=error)
            for one in [each for each in holdings if each.is_kept][:_MOST_LINES]:
                told = {"key": one.key, "task_id": one.task_id, "remaining": one.time_left, "leases": len(holdings)}
                self._log(log.warning, "lock.renewal_failed", "%s", error, **told)
            return
        for holding, answer in zip(holdings, answers, strict=True):
            if holding.is_kept and (reason := holding.answered(answer, sent_at)) is not None:
                self._lose(holding, reason)

    def _lose(self, holding: "Holding", reason: LostReason) -> None:
        self._call(partial(holding.lose, reason))
        if reason not in REASONS_TO_STOP:
            self.remove(holding)

    def _report_step(self, seconds: float) -> None:
        text = "the store's clock jumped: it was set, or a new master's clock differs; leases may end early or late"
        # Not `_log`, whose greenlet ends with the last lease: a later jump would not be logged.
        background.submit(partial(log.warning, "lock.clock", text, store=self._address, step=seconds))

    def _log(self, write: Callable[..., None], *line: Any, **fields: Any) -> None:
        # A log handler may block, and would delay renewals.
        self._call(partial(background.submit, partial(write, *line, **fields)))

    def _call(self, call: Callable[[], object]) -> None:
        if self._greenlet is None:
            call()
        else:
            # Not `submit`, which would start a greenlet in this thread's own event loop.
            self._greenlet.put(call)


# By pid, because a forked child has none of these threads. By server, because a silent server must not delay the
# renewals at others.
_threads: dict[tuple[int, Hashable], RenewalThread] = {}


def watch(holding: "Holding") -> None:
    """Keep a lease alive. This takes no lock: a signal handler may raise at any line here, and leave it locked."""
    store = holding.store
    where = holding.pid, store.servers.part_of(holding.key) if store.servers.is_sharded else store
    thread = _threads.get(where)
    if thread is None:
        counters.ensure_own()
        thread = _threads.setdefault(where, RenewalThread(where, store))
    thread.add(holding)


def watched() -> "list[Holding]":
    threads = [thread for (pid, _), thread in list(_threads.items()) if pid == os.getpid()]
    return [holding for thread in threads for holding in thread.watched()]


def tell_late(late: "dict[Holding, float]") -> None:
    text = "the heartbeat got no time to run; if the lease is lost, raise lock_ttl"
    for number, (one, seconds) in enumerate(late.items()):
        if number < _MOST_LINES:
            told = {"key": one.key, "task_id": one.task_id, "late": seconds, "ttl": one.ttl, "leases": len(late)}
            background.submit(partial(log.warning, "lock.late", text, **told))
        count(one.store, one.key, "late", one.task_name)
