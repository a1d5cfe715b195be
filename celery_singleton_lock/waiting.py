"""Messages that wait for their turn in the main process of a worker, in Celery's timer.

A refused message waits until its countdown ends or its turn is woken. A new message waits if other calls of its key are
in this worker, because its run would be refused.
"""

import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from heapq import heapify
from typing import Any
from weakref import WeakValueDictionary, ref

from celery.app.task import Context
from celery.bootsteps import StartStopStep
from celery.concurrency.solo import TaskPool as SoloPool
from celery.signals import worker_shutting_down
from celery.worker import state

from celery_singleton_lock.definition.options import broker_delays
from celery_singleton_lock.definition.settings import store_of
from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.leases.counters import count
from celery_singleton_lock.leases.line import InLine, Line
from celery_singleton_lock.log import log
from celery_singleton_lock.runs import policies, run
from celery_singleton_lock.runs.endings import until_expired
from celery_singleton_lock.runs.message import DELIVERY, Delivery, text_of, way_of
from celery_singleton_lock.stores.records import Conflict
from celery_singleton_lock.worker import SingletonRequest

# Seconds. Celery itself notices a revoked call only when its countdown ends.
_LOOK_FOR_REVOKED = 1.0
# Seconds after which a started run has probably asked for its lock.
_ASKS_WITHIN = 1.0
# In the pool `solo`, woken messages are held back for these seconds after a redelivery. So the worker can first read
# messages with earlier turns.
_READS_FOR = 1.0
# In the pool `solo`: seconds until a redelivered message starts without its turn.
_ASKS_AFTER = 10.0


@dataclass(eq=False)
class Waiting(InLine):
    messages: "WaitingMessages"
    request: Any
    go: Callable[[], Any]
    entry: Any = None

    def come(self) -> None:
        self.messages.woken.append(self)
        self.messages.ring()

    def has_turn(self, conflict: Conflict) -> bool:
        if self not in self.messages.waiting:
            return False
        self.request.report(conflict)
        # Wake the event loop, so that it raises RabbitMQ's prefetch count. Otherwise Celery would get no other message
        # in place of this one.
        self.messages.ring()
        return True

    def is_expected(self) -> bool:
        # The last call that went to the pool will take the only place, unless that call has asked already.
        last = self.messages.last_in_pool.get(self.claim.key)
        return self.claim.limit == 1 and last is not None and last.is_in_pool and not last.has_asked


class WaitingMessages(StartStopStep):
    """Stands in for Celery's timer where messages of our tasks are received: `call_at` gets each one with an ETA."""

    requires = ("celery.worker.consumer.connection:Connection",)

    def __init__(self, consumer: Any, **_: Any) -> None:
        consumer.waiting_messages = self
        self._timer = consumer.timer
        self._hub = consumer.hub
        self.call_soon = consumer.call_soon
        self._line = Line()
        self.waiting = set[Waiting]()
        self.last_in_pool: WeakValueDictionary[str, RequestInTurn] = WeakValueDictionary()
        self._latest: WeakValueDictionary[tuple[str, int], Waiting] = WeakValueDictionary()
        self.woken = deque[Waiting]()
        self._ends: tuple[socket.socket, ...] = ()
        self._looks_for_revoked = False
        self._cancelled = 0
        self._is_solo = isinstance(consumer.pool, SoloPool)
        self._reads_until = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._timer, name)

    def start(self, _: Any = None) -> None:
        hears, _ = self._ends = socket.socketpair()
        self._ends[1].setblocking(False)
        if self._hub is not None:
            hears.setblocking(False)
            self._hub.add_reader(hears, self._hear, hears)
        else:
            threading.Thread(target=self._listen, args=(hears,), name="singleton-lock-calls", daemon=True).start()
        worker_shutting_down.connect(self._leave_line)

    def stop(self, _: Any = None) -> None:
        """Forget all messages, which the broker delivers again."""
        worker_shutting_down.disconnect(self._leave_line)
        self._leave_line()
        self.waiting.clear()
        ends, self._ends = self._ends, ()
        if ends and self._hub is not None:
            self._hub.remove_reader(ends[0])
        for end in ends:
            # `close` alone would not wake the thread that listens.
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    terminate = stop

    def _leave_line(self, **_: Any) -> None:
        """Let the turns of other workers be woken instead."""
        for each in list(self.waiting):
            self._line.remove(each)

    def call_at(self, at: float, go: Callable[..., Any], args: Any = (), priority: int = 0) -> Any:
        one = None
        if self._ends and args and isinstance(args[0], SingletonRequest):
            one = args[0].in_line()
        if one is None:
            return self._timer.call_at(at, go, args, priority=priority)
        waiting = Waiting(one.store, one.claim, one.timeout, self, args[0], partial(go, *args))
        self.waiting.add(waiting)
        message = one.claim.channel, one.claim.message
        if (other := self._latest.get(message)) is not None and other in self.waiting:
            # This is a redelivery, even if the broker has not marked it.
            for each in (waiting, other):
                each.request.expect_copies()
        self._latest[message] = waiting
        # Join the line before the timer may call `_go`. Otherwise a message that has gone would stay in the line.
        self._line.add(waiting)
        if self._is_solo and args[0].delivery_info.get("redelivered"):
            # Start no message for a while. Its body would run in this thread, and messages with earlier turns would
            # stay unread.
            now = time.monotonic()
            if now > self._reads_until:
                self._reads_until = now + _READS_FOR
            # Put this message off, even if its countdown has ended: messages with earlier turns must ask first.
            left = min(one.timeout, until_expired(args[0].task, args[0].expires))
            at = max(at, now + min(_ASKS_AFTER, left))
        # Weak: a cancelled entry stays in the timer until its time, and would keep the message.
        waiting.entry = self._timer.call_at(at, partial(self._go, ref(waiting)), args, priority=priority)
        self._look_for_revoked()
        return waiting.entry

    def _go(self, known: "ref[Waiting]", *_: Any) -> None:
        if (waiting := known()) is not None and waiting in self.waiting:
            # Not `remove`: `stop` may clear the set in another thread.
            self.waiting.discard(waiting)
            self._line.remove(waiting)
            if isinstance(request := waiting.request, RequestInTurn):
                self.last_in_pool[waiting.claim.key] = request
                request.note_turn()
            waiting.go()

    def requests_of(self, task: Any) -> type[Any]:
        given: type[Any] = task.Request
        try:
            options = task.lock_options
        except ConfigurationError:
            return given
        takes_turns = policies.POLICIES[options.on_conflict].takes_turns and options.mode == "while_executing"
        is_patient = options.wait_timeout is None or options.wait_timeout >= policies.REFUSED.first
        # With quorum queues the prefetch count is fixed, so waiting messages would keep out others.
        if not (task.is_lockable and takes_turns and is_patient) or broker_delays(task.app):
            return given
        return type("Request", (RequestInTurn, given), {"messages": self})

    def meets_others(self, request: "RequestInTurn", key: str) -> bool:
        last = self.last_in_pool.get(key)
        if self._ends and ((last is not None and last.is_in_pool) or self._line.has(store_of(request.app), key)):
            return True
        self.last_in_pool[key] = request
        return False

    def ring(self) -> None:
        for end in self._ends[1:]:
            # A full socket has woken its reader already.
            with suppress(OSError):
                end.send(b".")

    def _look_for_revoked(self) -> None:
        # Not by Celery's timer, which would delay the worker's stop, and cannot cancel a repeated call under gevent.
        if not self._looks_for_revoked:
            self._looks_for_revoked = True
            self._line.submit(self._wake_revoked, _LOOK_FOR_REVOKED)

    def _wake_revoked(self) -> None:
        self._looks_for_revoked = False
        if self.waiting:
            self._look_for_revoked()
        for each in list(self.waiting):
            if each.request.id in state.revoked:
                each.come()

    def _listen(self, hears: socket.socket) -> None:
        while self._hear(hears):
            pass

    def _hear(self, hears: socket.socket) -> bool:
        received = b""
        with suppress(OSError):
            received = hears.recv(4096)
        while self.woken:
            if (waiting := self.woken.popleft()) in self.waiting:
                self._go_early(waiting)
        return bool(received)

    def _go_early(self, waiting: Waiting) -> None:
        # Cancel before the message starts: some timers kill what they cancel.
        if waiting.entry is not None:
            self._timer.cancel(waiting.entry)
            # `inspect scheduled` would show the message of a cancelled entry.
            with suppress(AttributeError):
                waiting.entry.args = ()
            self._drop_cancelled()
        # Go through the timer even with 0 seconds: only the timer's own thread may start a message.
        seconds = max(0.0, self._reads_until - time.monotonic())
        self._timer.call_after(seconds, partial(self._go, ref(waiting)), (waiting.request,))

    def _drop_cancelled(self) -> None:
        self._cancelled += 1
        # Only the timer of an event loop has a list.
        entries: Any = getattr(self._timer, "_queue", None)
        if not isinstance(entries, list) or self._cancelled < len(entries) / 2:
            return
        self._cancelled = 0
        left = [each for each in entries if not each.entry.canceled]
        heapify(left)
        # In place, because the event loop goes on using this list.
        entries[:] = left


class RequestInTurn(SingletonRequest):
    messages: WaitingMessages
    _in_line: InLine | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The run reports the same error.
        with suppress(Exception):
            way = self._way_of_new()
            if way and self.key is not None and (self.messages.meets_others(self, self.key) or way == "copy"):
                self._stand_in_line(may_be_copy=way == "copy")

    def _way_of_new(self) -> str:
        """`first` or `copy` for a message that has not asked for the lock before; otherwise empty."""
        message, notes = Context(self._request_dict, called_directly=False), self._notes()
        if notes.refused_at or notes.newest or notes.marked or notes.joins or message.eta:
            return ""
        way = way_of(self.task, message, notes, Delivery())
        return way if way in ("first", "copy") and not run.is_later_attempt(message, notes) else ""

    def _stand_in_line(self, *, may_be_copy: bool) -> None:
        self._in_line = self.entry_in_line()
        if self._in_line is not None:
            self._in_line.claim.may_be_copy = may_be_copy
            delay = policies.delay_in_line(self.task, self._request_dict.get("expires"), self._in_line.timeout)
            # With an ETA, Celery keeps the message in its timer.
            self._eta = datetime.now(UTC) + timedelta(seconds=delay)

    def in_line(self) -> InLine | None:
        return self._in_line or super().in_line()

    @property
    def is_in_pool(self) -> bool:
        return self in state.reserved_requests

    @property
    def has_asked(self) -> bool:
        return time.monotonic() - self._accepted_at > _ASKS_WITHIN

    def note_turn(self) -> None:
        if self._in_line is not None and (claim := self._in_line.claim).rank:
            self._note(rank=claim.rank, refused_at=claim.refused_at)

    def report(self, conflict: Conflict) -> None:
        """Report the conflict as its run would, but send no signal: receivers are user code."""
        key, holder, outcome = conflict.key, conflict.first, "rescheduled"
        log.tell_of_conflict(key, text_of(self.id), holder, outcome)
        count(store_of(self.app), key, "conflicts", self.task.name, outcome)
        if self._request_dict[DELIVERY][2]:
            # Event dispatchers work in the consumer's thread only.
            self.messages.call_soon(self.send_event, "lock-conflict", key=key, holder=holder.task_id, outcome=outcome)
