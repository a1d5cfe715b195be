"""Messages that wait for their turn in the main process of a worker, as every message with a countdown does.

Celery keeps such a message in its timer. The message leaves the timer once: at its time, or earlier if its turn is
woken.
"""

import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from heapq import heapify
from typing import Any
from weakref import WeakValueDictionary

from celery.signals import worker_shutting_down
from celery.utils.functional import maybe_list
from celery.worker import state

from celery_singleton_lock.leases.line import InLine, Line
from celery_singleton_lock.worker import SingletonRequest

# Seconds in which a call that was revoked leaves the line.
_LOOK_FOR_REVOKED = 1.0
# Fewer cancelled entries are not worth a walk through the timer.
_A_FEW = 50


@dataclass(eq=False)
class Waiting:
    """A message that waits, and what Celery's timer would call for it at its time."""

    go: Callable[..., Any]
    args: Any
    entry: Any = None

    @property
    def is_revoked(self) -> bool:
        """The call was revoked; Celery itself finds that only at the message's time."""
        request = self.args[0]
        if request.id in state.revoked:
            return True
        return any(
            each in maybe_list(state.revoked_stamps.get(name, ()))
            for name, value in request.stamps.items()
            for each in maybe_list(value)
        )


class WaitingMessages:
    """The messages that wait in a consumer for their turns; the strategies of its tasks use this as their timer."""

    def __init__(self, consumer: Any) -> None:
        self._timer = consumer.timer
        self._hub = consumer.hub
        self._line = Line(self._call)
        self._waiting: dict[InLine, Waiting] = {}
        self._latest: WeakValueDictionary[tuple[str, int], Waiting] = WeakValueDictionary()
        self._called: deque[InLine] = deque()
        self._ends: tuple[socket.socket, ...] = ()
        self._looks_for_revoked = False
        self._cancelled = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._timer, name)

    def start(self) -> None:
        """Hear of calls from now on: in the event loop if the worker has one."""
        hears, _ = self._ends = socket.socketpair()
        self._ends[1].setblocking(False)
        if self._hub is not None:
            hears.setblocking(False)
            self._hub.add_reader(hears, self._hear)
        else:
            threading.Thread(target=self._listen, args=(hears,), name="singleton-lock-calls", daemon=True).start()
        # While a worker ends softly, it starts nothing more.
        worker_shutting_down.connect(self._leave_line)

    def stop(self) -> None:
        """Forget all of them, and hear of no calls: the broker delivers them again, here or elsewhere."""
        worker_shutting_down.disconnect(self._leave_line)
        self._leave_line()
        self._waiting.clear()
        ends = self._ends
        self._ends = ()
        if ends and self._hub is not None:
            self._hub.remove_reader(ends[0])
        for end in ends:
            # It ends the thread that listens there.
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _leave_line(self, **_: Any) -> None:
        """From now on, wake other turns than those of these messages."""
        for one in list(self._waiting):
            self._line.remove(one)

    def call_at(self, at: float, go: Callable[..., Any], args: Any = (), priority: int = 0) -> Any:
        """As the timer, but sooner for a message whose turn is woken."""
        one = None
        if self._ends and args and isinstance(args[0], SingletonRequest):
            one = args[0].in_line()
        if one is None:
            return self._timer.call_at(at, go, args, priority=priority)
        waiting = self._waiting[one] = Waiting(go, args)
        message = one.claim.channel, one.claim.message
        if (other := self._latest.get(message)) is not None:
            # The broker has delivered the message again while it waits here, and not every broker says so.
            for each in (waiting, other):
                each.args[0].expect_copies()
        self._latest[message] = waiting
        # Join the line first: a time that has passed calls `_go` at once, which leaves the line.
        self._line.add(one)
        waiting.entry = self._timer.call_at(at, partial(self._go, one), args, priority=priority)
        self._look_for_revoked()
        return waiting.entry

    def _go(self, one: InLine, *_: Any) -> None:
        """Start the message, unless another thread has: a timer may have a thread of its own."""
        waiting = self._waiting.pop(one, None)
        if waiting is not None:
            self._line.remove(one)
            # Our copy of the arguments: `_go_early` empties the entry's.
            waiting.go(*waiting.args)

    def _call(self, one: InLine) -> None:
        """Wake the consumer, from any thread, also from one that must not touch greenlets."""
        self._called.append(one)
        for end in self._ends[1:]:
            # A full socket wakes the reader all the same.
            with suppress(OSError):
                end.send(b".")

    def _look_for_revoked(self) -> None:
        if not self._looks_for_revoked:
            self._looks_for_revoked = True
            self._line.thread.submit(self._call_revoked, _LOOK_FOR_REVOKED)

    def _call_revoked(self) -> None:
        self._looks_for_revoked = False
        if self._waiting:
            self._look_for_revoked()
        if state.revoked or state.revoked_stamps:
            for one, waiting in list(self._waiting.items()):
                if waiting.is_revoked:
                    self._call(one)

    def _hear(self) -> None:
        with suppress(OSError):
            while self._ends and self._ends[0].recv(4096):
                pass
        self._start_called()

    def _listen(self, hears: socket.socket) -> None:
        with suppress(OSError):
            while hears.recv(4096):
                self._start_called()

    def _start_called(self) -> None:
        while self._called:
            one = self._called.popleft()
            if (waiting := self._waiting.get(one)) is not None:
                self._go_early(one, waiting)

    def _go_early(self, one: InLine, waiting: Waiting) -> None:
        """Let the timer call it now, in whichever thread it calls what is due."""
        # Cancel before the message starts: some timers kill what they cancel.
        if waiting.entry is not None:
            self._timer.cancel(waiting.entry)
            with suppress(AttributeError):
                # A cancelled entry may stay in the timer until its time, and must not keep the message and its claim.
                waiting.entry.fun, waiting.entry.args = _nothing, ()
            self._drop_cancelled()
        self._timer.call_after(0, partial(self._go, one), waiting.args)

    def _drop_cancelled(self) -> None:
        """Drop cancelled entries from the timer of an event loop once they are half of its entries."""
        self._cancelled += 1
        entries: Any = getattr(self._timer, "_queue", None)
        if self._hub is None or not isinstance(entries, list) or self._cancelled < max(_A_FEW, len(entries) / 2):
            return
        self._cancelled = 0
        left = [each for each in entries if not each.entry.canceled]
        heapify(left)
        # In place: the event loop goes on with this very list.
        entries[:] = left


def _nothing() -> None:
    """The function of a cancelled entry."""
